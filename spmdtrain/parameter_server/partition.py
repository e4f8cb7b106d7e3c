"""Partitions of arrays, and of trees of arrays, over parameter servers.

The three partitioners work as in TensorFlow (`tf.distribute.experimental.partitioners`): they split
an array along its first dim, and never a scalar.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from spmdtrain.tree import named_leaves, path_name

PyTree = Any
Shape = Sequence[int]


class Partitioner(Protocol):
    """A function that determines the number of shards of an array."""

    def __call__(self, shape: Shape, itemsize: int) -> int:
        """Returns the number of shards: at least 1, at most the first dim.

        `itemsize` is the number of bytes of one element.
        """
        ...


@dataclass(frozen=True)
class FixedShards:
    """Splits each array into the same number of shards, or fewer if it has fewer rows.

    Attributes:
      num_shards: Number of shards.
    """

    num_shards: int

    def __call__(self, shape: Shape, itemsize: int) -> int:
        return _limit(shape, self.num_shards)


@dataclass(frozen=True)
class MinSize:
    """Splits an array into one shard for each `min_shard_bytes` of its size, rounded up.

    Attributes:
      max_shards: Maximum number of shards.
      min_shard_bytes: Size of a shard in bytes.
    """

    max_shards: int = 1
    min_shard_bytes: int = 256 << 10

    def __call__(self, shape: Shape, itemsize: int) -> int:
        filled = math.ceil(math.prod(shape) * itemsize / self.min_shard_bytes)
        return _limit(shape, min(self.max_shards, filled))


@dataclass(frozen=True)
class MaxSize:
    """Splits an array into the fewest shards of whole rows that do not exceed a size.

    Attributes:
      max_shard_bytes: Maximum size of a shard in bytes; a shard has at least one row.
      max_shards: Maximum number of shards, which takes precedence over the size; None for no
        maximum.
    """

    max_shard_bytes: int
    max_shards: int | None = None

    def __call__(self, shape: Shape, itemsize: int) -> int:
        if not shape or not math.prod(shape):
            return 1
        row = math.prod(shape[1:]) * itemsize
        shards = math.ceil(shape[0] / max(1, self.max_shard_bytes // row))
        return _limit(shape, shards if self.max_shards is None else min(self.max_shards, shards))


def _limit(shape: Shape, shards: int) -> int:
    return max(1, min(shape[0], shards)) if shape else 1


@dataclass(frozen=True)
class RowRange:
    """A range of rows of an array: from `start` to before `stop` along its first dim."""

    start: int
    stop: int


@dataclass(frozen=True)
class Leaf:
    """Shape of an array, and the bytes of one element."""

    shape: tuple[int, ...]
    itemsize: int


def assign_rows(
    leaves: Mapping[str, Leaf], servers: int, partitioner: Partitioner
) -> list[dict[str, RowRange]]:
    """Assigns the rows of arrays to servers; returns each server's rows by the names of the arrays.

    The shards of an array are assigned to the servers with the fewest bytes, the largest arrays
    first. A server that receives several shards of an array receives adjacent ones.

    An array is absent from the result of a server that holds no rows of it. An array that is not
    split is `RowRange(0, first dim)` of one server, and a scalar `RowRange(0, 1)`.
    """
    placed: list[dict[str, RowRange]] = [{} for _ in range(servers)]
    used = [0] * servers  # bytes

    def size(name: str) -> int:
        return math.prod(leaves[name].shape) * leaves[name].itemsize

    for name in sorted(leaves, key=lambda name: (-size(name), name)):
        leaf = leaves[name]
        rows = leaf.shape[0] if leaf.shape else 1
        shards = partitioner(leaf.shape, leaf.itemsize)
        holders = min(shards, servers)
        lightest = sorted(range(servers), key=lambda server: (used[server], server))[:holders]
        for number, server in enumerate(sorted(lightest)):
            # The shards are distributed over the holders as evenly as possible.
            first, after = (_start_of(shards, holders, n) for n in (number, number + 1))
            own = RowRange(_start_of(rows, shards, first), _start_of(rows, shards, after))
            placed[server][name] = own
            used[server] += size(name) * (own.stop - own.start) // max(1, rows)
    return placed


def _start_of(total: int, parts: int, part: int) -> int:
    """Returns the start of a part of a total; with a remainder the first parts are one larger."""
    size, remainder = divmod(total, parts)
    return part * size + min(part, remainder)


@dataclass(frozen=True)
class TreePartition:
    """A partition of a tree of arrays over servers; `whole` and `parts` are abstract.

    Each part has the structure of the whole tree: an array has a first dim of 0 in the part of a
    server that holds no rows of it. Therefore everything that depends on the structure (labels of
    parameters, masks) applies to a part too.
    """

    whole: PyTree
    parts: Sequence[PyTree]

    def cut(self, tree: PyTree, server: int) -> PyTree:
        """Returns a server's part of a tree of this structure, NumPy arrays."""
        return jax.tree.map(
            lambda x, whole, *parts: _cut(np.asarray(x), whole, parts, server),
            tree,
            self.whole,
            *self.parts,
        )

    def join(self, parts: Sequence[PyTree]) -> PyTree:
        """Returns the whole tree from the parts of all servers in their order."""
        return jax.tree.map(lambda whole, *leaves: _join(whole, leaves), self.whole, *parts)

    def map(self, function: Callable[[PyTree], PyTree]) -> "TreePartition":
        """Returns the partition of the output of a function that is applied to each part."""
        return TreePartition(
            jax.eval_shape(function, self.whole),
            [jax.eval_shape(function, part) for part in self.parts],
        )

    def bytes_of(self, server: int) -> int:
        """Returns the size of a server's part in bytes."""
        leaves = jax.tree.leaves(self.parts[server])
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)


def partition_tree(whole: PyTree, servers: int, partitioner: Partitioner) -> TreePartition:
    """Returns the partition of a tree along the first dims of its (abstract) arrays."""
    leaves = named_leaves(whole)
    shapes = {name: Leaf(tuple(x.shape), x.dtype.itemsize) for name, x in leaves.items()}
    placed = assign_rows(shapes, servers, partitioner)
    return TreePartition(whole, [_part(whole, rows) for rows in placed])


def _part(whole: PyTree, rows: Mapping[str, RowRange]) -> PyTree:
    def part(path: tuple[Any, ...], x: Any) -> jax.ShapeDtypeStruct:
        own = rows.get(path_name(path))
        if own is None:
            return jax.ShapeDtypeStruct((0, *x.shape[1:]), x.dtype)
        shape = (own.stop - own.start, *x.shape[1:]) if x.shape else ()
        return jax.ShapeDtypeStruct(shape, x.dtype)

    return jax.tree_util.tree_map_with_path(part, whole)


def _is_partitioned(whole: Any, parts: Sequence[Any]) -> bool:
    """Returns False for an array that every server holds whole, such as a step counter."""
    return any(part.shape != whole.shape for part in parts)


def _cut(x: np.ndarray, whole: Any, parts: Sequence[Any], server: int) -> np.ndarray:
    own = parts[server]
    if not _is_partitioned(whole, parts) or own.shape == whole.shape:
        return x
    if not whole.shape:
        return np.zeros(own.shape, own.dtype)
    first = sum(part.shape[0] for part in parts[:server])
    return x[first : first + own.shape[0]]


def _join(whole: Any, parts: Sequence[Any]) -> Any:
    if not _is_partitioned(whole, parts):
        return np.asarray(parts[0])
    if not whole.shape:
        return next(np.asarray(part) for part in parts if not part.shape)
    joined = np.concatenate([np.asarray(part) for part in parts])
    assert joined.shape == whole.shape, (joined.shape, whole.shape)
    return joined

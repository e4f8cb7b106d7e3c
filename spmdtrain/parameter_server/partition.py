"""Into how many shards a parameter is cut, and which parameter server holds which of its rows.

The three partitioners are TensorFlow's (`tf.distribute.experimental.partitioners`): a parameter is
cut along its first dim, and a single number never.
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
    """How many shards an array is cut into."""

    def __call__(self, shape: Shape, itemsize: int) -> int:
        """For its shape, and the bytes of one element; at most its first dim, at least 1."""
        ...


@dataclass(frozen=True)
class FixedShards:
    """As many shards for each, where its first dim has that many rows."""

    num_shards: int

    def __call__(self, shape: Shape, itemsize: int) -> int:
        return _possible(shape, self.num_shards)


@dataclass(frozen=True)
class MinSize:
    """As many as `max_shards`, if each has `min_shard_bytes`: how many can is rounded up."""

    max_shards: int = 1
    min_shard_bytes: int = 256 << 10

    def __call__(self, shape: Shape, itemsize: int) -> int:
        filled = math.ceil(math.prod(shape) * itemsize / self.min_shard_bytes)
        return _possible(shape, min(self.max_shards, filled))


@dataclass(frozen=True)
class MaxSize:
    """As few as hold `max_shard_bytes` at most, whole rows each; no more than `max_shards`."""

    max_shard_bytes: int
    max_shards: int | None = None

    def __call__(self, shape: Shape, itemsize: int) -> int:
        if not shape or not math.prod(shape):
            return 1
        row = math.prod(shape[1:]) * itemsize
        shards = math.ceil(shape[0] / max(1, self.max_shard_bytes // row))
        return _possible(shape, shards if self.max_shards is None else min(self.max_shards, shards))


def _possible(shape: Shape, shards: int) -> int:
    return max(1, min(shape[0], shards)) if shape else 1


@dataclass(frozen=True)
class Rows:
    """The rows of an array from `start` to before `stop`, along its first dim."""

    start: int
    stop: int


@dataclass(frozen=True)
class Leaf:
    """An array as it is placed: its shape, and the bytes of one element."""

    shape: tuple[int, ...]
    itemsize: int


def place(
    leaves: Mapping[str, Leaf], servers: int, partitioner: Partitioner
) -> list[dict[str, Rows]]:
    """For each server the rows that it has, by the names of the arrays that it has any of.

    What is not cut goes whole to one server, as `Rows(0, first dim)` (of a single number 0 to 1).
    The shards of an array go to the servers that have the fewest bytes so far, the largest arrays
    first; a server that gets several has them side by side.
    """
    placed: list[dict[str, Rows]] = [{} for _ in range(servers)]
    held = [0] * servers

    def size(name: str) -> int:
        return math.prod(leaves[name].shape) * leaves[name].itemsize

    for name in sorted(leaves, key=lambda name: (-size(name), name)):
        leaf = leaves[name]
        rows = leaf.shape[0] if leaf.shape else 1
        shards = partitioner(leaf.shape, leaf.itemsize)
        holders = min(shards, servers)
        lightest = sorted(range(servers), key=lambda server: (held[server], server))[:holders]
        for number, server in enumerate(sorted(lightest)):
            # Of the shards, as even as they can be, this server's are one run of rows.
            first, after = (_share(shards, holders, n) for n in (number, number + 1))
            mine = Rows(_share(rows, shards, first), _share(rows, shards, after))
            placed[server][name] = mine
            held[server] += size(name) * (mine.stop - mine.start) // max(1, rows)
    return placed


def _share(total: int, parts: int, before: int) -> int:
    """Where part `before` of a total begins: the first ones have one more where it is uneven."""
    each, more = divmod(total, parts)
    return before * each + min(before, more)


@dataclass(frozen=True)
class TreePartition:
    """How a tree is cut: the abstract whole, and the abstract part of each server."""

    whole: PyTree
    parts: Sequence[PyTree]

    def cut(self, tree: PyTree, server: int) -> PyTree:
        """What a server has of a tree of this structure, as NumPy arrays."""
        return jax.tree.map(
            lambda x, whole, *parts: _cut(np.asarray(x), whole, parts, server),
            tree,
            self.whole,
            *self.parts,
        )

    def join(self, parts: Sequence[PyTree]) -> PyTree:
        """The whole again, from the parts of all servers in their order."""
        return jax.tree.map(lambda whole, *found: _joined(whole, found), self.whole, *parts)

    def map(self, function: Callable[[PyTree], PyTree]) -> "TreePartition":
        """How what a function makes of such a tree is cut, if it is made of each part alone."""
        return TreePartition(
            jax.eval_shape(function, self.whole),
            [jax.eval_shape(function, part) for part in self.parts],
        )

    def bytes_of(self, server: int) -> int:
        """What a server has of it."""
        leaves = jax.tree.leaves(self.parts[server])
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)


def cuts_of(whole: PyTree, servers: int, partitioner: Partitioner) -> TreePartition:
    """Cut an abstract tree along the first dim of its arrays, as the partitioner says."""
    leaves = named_leaves(whole)
    shapes = {name: Leaf(tuple(x.shape), x.dtype.itemsize) for name, x in leaves.items()}
    placed = place(shapes, servers, partitioner)
    return TreePartition(whole, [_part(whole, rows) for rows in placed])


def _part(whole: PyTree, rows: Mapping[str, Rows]) -> PyTree:
    def part(path: tuple[Any, ...], x: Any) -> jax.ShapeDtypeStruct:
        mine = rows.get(path_name(path))
        if mine is None:
            return jax.ShapeDtypeStruct((0, *x.shape[1:]), x.dtype)
        shape = (mine.stop - mine.start, *x.shape[1:]) if x.shape else ()
        return jax.ShapeDtypeStruct(shape, x.dtype)

    return jax.tree_util.tree_map_with_path(part, whole)


def _is_cut(whole: Any, parts: Sequence[Any]) -> bool:
    """Whether an array is in parts: else each server has all of it (a counter of steps, say)."""
    return any(part.shape != whole.shape for part in parts)


def _cut(x: np.ndarray, whole: Any, parts: Sequence[Any], server: int) -> np.ndarray:
    mine = parts[server]
    if not _is_cut(whole, parts) or mine.shape == whole.shape:
        return x
    if not whole.shape:
        return np.zeros(mine.shape, mine.dtype)
    first = sum(part.shape[0] for part in parts[:server])
    return x[first : first + mine.shape[0]]


def _joined(whole: Any, parts: Sequence[Any]) -> Any:
    if not _is_cut(whole, parts):
        return np.asarray(parts[0])
    if not whole.shape:
        return next(np.asarray(part) for part in parts if not part.shape)
    found = np.concatenate([np.asarray(part) for part in parts])
    assert found.shape == whole.shape, (found.shape, whole.shape)
    return found

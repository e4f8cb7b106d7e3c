"""A state in parts, one for each parameter server, and the whole again.

A part has the structure of the whole: of what a server has no rows of, an array of none. So what
goes by structure (labels of parameters, masks) means the same in a part.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from spmdtrain.parameter_server.partition import Leaf, Partitioner, Rows, place
from spmdtrain.tree import named_leaves, path_name

PyTree = Any


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

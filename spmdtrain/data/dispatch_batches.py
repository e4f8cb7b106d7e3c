"""The batches of one dispatch: of a step, or of several steps in stacked arrays."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from spmdtrain.data.marked_rows import rows_of

PyTree = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class IndexedBatch:
    """A batch as indices into arrays that are on every device.

    Attributes:
      indices: int32 (B,), or `MarkedRows` of it; (n, B) for n steps.
      arrays: All examples, arrays (N, ...).
    """

    indices: PyTree
    arrays: PyTree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CountedBatches:
    """The batches of a dispatch whose number of steps is an argument of its program.

    Attributes:
      batches: Stacked batches, with the largest number of steps as leading dim; the batches after
        `count` are zero.
      count: int32 scalar, the number of steps.
    """

    batches: PyTree
    count: Any


def examples_of(batch: PyTree) -> PyTree:
    """Returns the examples of a batch, which it gathers if it is an `IndexedBatch`."""
    if not isinstance(batch, IndexedBatch):
        return batch
    indices = rows_of(batch.indices)
    rows = jax.tree.map(lambda x: jnp.take(x, indices, axis=0), batch.arrays)
    return rows if indices is batch.indices else replace(batch.indices, rows=rows)


def indexed(indices: PyTree, arrays: PyTree) -> PyTree:
    """Returns the batch, or the batches of a dispatch, of these indices into `arrays`."""
    if isinstance(indices, CountedBatches):
        return CountedBatches(IndexedBatch(indices.batches, arrays), indices.count)
    return IndexedBatch(indices, arrays)


def batch_at(batches: PyTree, number: Any) -> PyTree:
    """Returns the batch of one step from stacked batches. `number` is an integer or an array."""
    if isinstance(batches, CountedBatches):
        return batch_at(batches.batches, number)
    if isinstance(batches, IndexedBatch):
        return IndexedBatch(batch_at(batches.indices, number), batches.arrays)
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, number, keepdims=False), batches)


def stacked_steps(batches: PyTree) -> int:
    """Returns the leading dim of the stacked batches of several steps."""
    if isinstance(batches, CountedBatches):
        return stacked_steps(batches.batches)
    each = batches.indices if isinstance(batches, IndexedBatch) else batches
    size: int = jax.tree.leaves(each)[0].shape[0]
    return size


def stack_batches(batches: Sequence[PyTree], size: int) -> PyTree:
    """Returns stacked host batches, with zeros after the last one up to a leading dim of `size`."""

    def stacked(*parts: np.ndarray) -> np.ndarray:
        if len(parts) == size:
            return np.stack(parts)
        whole = np.zeros((size, *parts[0].shape), parts[0].dtype)
        np.stack(parts, out=whole[: len(parts)])
        return whole

    return jax.tree.map(stacked, *batches)


def stacked_sharding(sharding: Sharding) -> Sharding:
    """Returns the sharding of stacked batches, whose first dim (steps) is not split."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))

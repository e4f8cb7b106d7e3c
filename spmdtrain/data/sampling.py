"""The examples of batch k, as a function of k, and the batches of one dispatch."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from spmdtrain.config.run_config import NOTHING_SKIPPED, Purpose, SkippedBatches, derive_seed
from spmdtrain.data.datasets import Dataset, batched_of, blocks_of, own_rows
from spmdtrain.data.mixture import mixture_of
from spmdtrain.data.order import EpochOrder, Order
from spmdtrain.errors import locate_errors

# -- The examples of batch k, as a function of k ---------------------------------------------------
#
# The stream of training examples is the concatenation of each epoch's order, and batch k is the
# k-th slice of it. Neither devices, nor processes, nor interruptions of the run change it.

PyTree = Any
Augment = Callable[[PyTree, np.random.Generator], PyTree]
"""(example, generator) -> augmented example. The generator depends on seed, example and epoch."""

_BLOCK = 16384  # positions whose examples are computed at once, to amortize NumPy's cost per call


def all_rows(batch_size: int) -> np.ndarray:
    """Returns the indices of all rows of a batch."""
    return np.arange(batch_size)


def process_rows(sharding: Sharding, batch_size: int) -> np.ndarray:
    """Returns the indices of the rows of a global batch that this process's devices hold, sorted.

    They follow from the sharding, not from the process index, because several processes hold the
    same rows if a model axis crosses processes.
    """
    slices = sharding.addressable_devices_indices_map((batch_size,)).values()
    return np.unique(np.concatenate([all_rows(batch_size)[s] for s in slices if s is not None]))


def padded_size(batch_size: int, sharding: Sharding) -> int:
    """Returns `batch_size` rounded up to a multiple of the number of parts of a batch."""
    shards = 1
    if isinstance(sharding, NamedSharding) and sharding.spec and sharding.spec[0] is not None:
        axes = sharding.spec[0] if isinstance(sharding.spec[0], tuple) else (sharding.spec[0],)
        shards = math.prod(sharding.mesh.shape[axis] for axis in axes)
    return -(-batch_size // shards) * shards


@dataclass(eq=False)
class TrainBatches:
    """The batches of the training stream. All are full and continue into the next epoch.

    Item k is a pytree of the rows that this process loads for step k + 1. They are rows of batch k,
    unless earlier batches are left out. The rows of a mixture are `MarkedRows` with their
    components.

    Attributes:
      seed: The run's seed, for the order and `augment`.
      steps: Number of batches.
      local: Indices of the rows of each batch to load (see `process_rows`).
    """

    dataset: Dataset
    batch_size: int
    seed: int
    shuffle: bool
    steps: int
    local: np.ndarray
    augment: Augment | None = None
    skipped: SkippedBatches = NOTHING_SKIPPED

    def __post_init__(self) -> None:
        self._mixture = mixture_of(self.dataset)
        self._order = order_of(
            self.dataset, self.seed, shuffle=self.shuffle, batch_size=self.batch_size
        )
        self._per_block = max(1, _BLOCK // self.batch_size)  # batches
        # A few blocks, because threads that read ahead may be in different ones.
        self._block = functools.lru_cache(maxsize=4)(self._make_block)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy in another process computes the order again, and begins with empty caches.
        return TrainBatches, tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> PyTree:
        indices, epochs = self.local_examples(step)
        rows = own_rows(self.dataset, indices)
        if self.augment is not None:
            zeros = np.zeros_like(indices)
            counters = np.stack([zeros, zeros, indices, epochs], axis=1)
            rows = augmented(self.augment, rows, counters, self.seed)
        return self.with_components(rows, indices)

    def with_components(self, rows: PyTree, indices: np.ndarray) -> PyTree:
        """Returns rows, marked with their components if the dataset is a mixture."""
        if (mixture := self._mixture) is None:
            return rows
        return with_marks(rows, component=mixture.component_of(indices), names=mixture.names)

    def examples(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns index and epoch of each example of item `step` of all processes, int64 (B,)."""
        block, batch = divmod(self.skipped.batch_of(step), self._per_block)
        indices, epochs = self._block(block)
        return indices[batch], epochs[batch]

    def local_examples(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the index and the epoch of the examples that this process loads."""
        indices, epochs = self.examples(step)
        return indices[self.local], epochs[self.local]

    def _make_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the indices and epochs of several batches, each (batches, batch_size)."""
        length = self._per_block * self.batch_size
        indices, epochs = self._order.examples(np.arange(block * length, (block + 1) * length))
        shape = (self._per_block, self.batch_size)
        return indices.reshape(shape), epochs.reshape(shape)


def augmented(augment: Augment, rows: PyTree, counters: np.ndarray, seed: int) -> PyTree:
    """Returns rows after `augment`, whose randomness depends on the seed and a row's counter.

    `counters` are integers (n, 4), different for each example and epoch.
    """
    examples = []
    augment = locate_errors(augment, "augment", takes="(example, generator)")
    for row, counter in enumerate(counters.tolist()):
        # Philox is counter-based: each counter has its own stream under the key.
        # Grain's `random_map` would draw by position in the stream, not by example.
        bits = np.random.Philox(key=derive_seed(seed, Purpose.DATA), counter=counter)
        example = jax.tree.map(lambda array, row=row: array[row], rows)
        examples.append(augment(example, np.random.Generator(bits)))
    return jax.tree.map(lambda *leaves: np.stack(leaves), *examples)


def order_of(dataset: Dataset, seed: int, *, shuffle: bool, batch_size: int) -> Order:
    """Returns the order in which a dataset is trained on.

    Raises:
      UserError: If the dataset's blocks are not valid, or it is a `Subset` of a mixture.
    """
    if (mixture := mixture_of(dataset)) is not None:
        return mixture.order(seed, shuffle=shuffle, batch_size=batch_size)
    whole, blocks = batched_of(dataset) is not None, blocks_of(dataset)
    return EpochOrder(len(dataset), seed, shuffle=shuffle, blocks=blocks, whole_blocks=whole)


@dataclass(frozen=True)
class OrderedBatches:
    """Batches of all examples, each once and in order.

    A batch is padded by repeating its last example. Item k is (rows, mask); mask is f32, 0 for
    padding rows.

    Attributes:
      local: Indices of the rows of each batch to load; indices from `batch_size` on are padding.
      split_size: If given, only batches of exactly this number of examples are split over the
        processes. Other batches are not padded, and every process loads all of their rows.
    """

    dataset: Dataset
    batch_size: int
    local: np.ndarray
    split_size: int | None = None

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.batch_size)

    def is_unpadded(self, index: int) -> bool:
        """Returns whether every process loads all rows of a batch, which is not padded."""
        return self.split_size is not None and self._count(index) != self.split_size

    def _count(self, index: int) -> int:
        return min(self.batch_size, len(self.dataset) - index * self.batch_size)

    def __getitem__(self, index: int) -> tuple[PyTree, np.ndarray]:
        first, count = index * self.batch_size, self._count(index)
        local = all_rows(count) if self.is_unpadded(index) else self.local
        # Padding repeats a real example, so that the model never sees values unlike the data.
        rows = own_rows(self.dataset, first + np.minimum(local, count - 1))
        return rows, (local < count).astype(np.float32)


# -- The batches of one dispatch: of a step, or of several steps in stacked arrays -----------------


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


# -- Rows of a batch with marks: whether a row is padding, and its component of a mixture ----------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MarkedRows:
    """Rows of a batch with marks, which the objective does not receive.

    Attributes:
      rows: Arrays of leading dim P.
      mask: f32 (P,), 1 for examples and 0 for padding rows; None if there is no padding.
      component: int32 (P,), the number of each row's component in `names`; None if the examples
        are not of a mixture.
    """

    rows: PyTree
    mask: Any = None
    component: Any = None
    names: tuple[str, ...] = field(default=(), metadata={"static": True})


def with_marks(batch: PyTree, **marks: Any) -> MarkedRows:
    """Returns rows with these fields of `MarkedRows` besides the marks that they have."""
    return replace(as_marked(batch), **marks)


def as_marked(batch: PyTree) -> MarkedRows:
    """Returns a batch as `MarkedRows`; without marks if it is rows alone."""
    return batch if isinstance(batch, MarkedRows) else MarkedRows(batch)


def rows_of(batch: PyTree) -> PyTree:
    """Returns the rows of a batch, without its marks."""
    return batch.rows if isinstance(batch, MarkedRows) else batch

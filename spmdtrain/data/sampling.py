"""The examples of batch k, as a function of k.

The stream of training examples is the concatenation of each epoch's order, and batch k is the
k-th slice of it. Neither devices, nor processes, nor interruptions of the run change it.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from spmdtrain.config import Purpose, derive_seed
from spmdtrain.data.datasets import Dataset

PyTree = Any
Augment = Callable[[PyTree, np.random.Generator], PyTree]
"""(example, generator) -> augmented example. The generator depends on seed, example and epoch."""

_BLOCK = 16384  # positions permuted at once, to amortize NumPy's cost per call
_ROUNDS = 8  # of the Feistel network


def all_rows(batch_size: int) -> np.ndarray:
    """Returns the indices of all rows of a batch."""
    return np.arange(batch_size)


def process_rows(sharding: Sharding, batch_size: int) -> np.ndarray:
    """Returns the indices of the rows of each global batch that this process's devices hold.

    They follow from the sharding, not from the process index, because several processes hold the
    same rows if a model axis crosses processes.

    Args:
      sharding: The sharding of a batch.
      batch_size: Number of rows of the global batch.

    Returns:
      Sorted indices, int64.
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

    Item k is the pytree of the rows of batch k that this process loads.

    Attributes:
      dataset: The examples.
      batch_size: Number of examples of a global batch.
      seed: The run's seed, for the order and `augment`.
      shuffle: Whether each epoch has a random order.
      steps: Number of batches.
      local: Indices of the rows of each batch to load (see `process_rows`).
      augment: Applied to each example.
    """

    dataset: Dataset
    batch_size: int
    seed: int
    shuffle: bool
    steps: int
    local: np.ndarray
    augment: Augment | None = None

    def __post_init__(self) -> None:
        self._per_block = max(1, _BLOCK // self.batch_size)  # batches
        # A few blocks, because threads that read ahead may be in different ones.
        self._block = functools.lru_cache(maxsize=4)(self._make_block)
        self._local_block = functools.lru_cache(maxsize=4)(self._make_local_block)

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> PyTree:
        indices, epochs = self.local_examples(step)
        rows = self.dataset.rows(indices)
        if self.augment is None:
            return rows
        return self._augmented(self.augment, rows, indices, epochs)

    def examples(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the index and the epoch of each example of global batch `step`, int64 (B,)."""
        indices, epochs = self._block(step // self._per_block)
        batch = step % self._per_block
        return indices[batch], epochs[batch]

    def local_examples(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the index and the epoch of the examples that this process loads."""
        indices, epochs = self._local_block(step // self._per_block)
        batch = step % self._per_block
        return indices[batch], epochs[batch]

    def _make_local_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        indices, epochs = self._block(block)
        return indices[:, self.local], epochs[:, self.local]

    def _make_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the indices and epochs of several batches, each (batches, batch_size)."""
        size, length = len(self.dataset), self._per_block * self.batch_size
        positions = np.arange(block * length, (block + 1) * length)
        epochs = positions // size
        positions -= epochs * size
        if self.shuffle:
            positions = permuted(positions, size=size, seed=self.seed, epochs=epochs)
        shape = (self._per_block, self.batch_size)
        return positions.reshape(shape), epochs.reshape(shape)

    def _augmented(
        self, augment: Augment, rows: PyTree, indices: np.ndarray, epochs: np.ndarray
    ) -> PyTree:
        examples = []
        for row, (index, epoch) in enumerate(zip(indices, epochs, strict=True)):
            # Philox is counter-based: each (example, epoch) has its own stream under the key.
            # Grain's `random_map` would draw by position in the stream, not by example.
            bits = np.random.Philox(
                key=derive_seed(self.seed, Purpose.DATA), counter=[0, 0, int(index), int(epoch)]
            )
            example = jax.tree.map(lambda array, row=row: array[row], rows)
            examples.append(augment(example, np.random.Generator(bits)))
        return jax.tree.map(lambda *leaves: np.stack(leaves), *examples)


@dataclass(frozen=True)
class OrderedBatches:
    """Batches of all examples, each once and in order.

    A batch is padded by repeating its last example. Item k is (rows, mask); mask is f32, 0 for
    padding rows.

    Attributes:
      dataset: The examples.
      batch_size: Number of examples of a batch; the last one may have fewer.
      local: Indices of the rows of each batch to load; those from `batch_size` on are padding.
      split_size: If given, only batches of exactly this number of examples are split over the
        processes. Every process loads all rows of the others, which are not padded.
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
        rows = self.dataset.rows(first + np.minimum(local, count - 1))
        return rows, (local < count).astype(np.float32)


# -- the order of an epoch ------------------------------------------------------------------------


def permuted(positions: np.ndarray, *, size: int, seed: int, epochs: np.ndarray) -> np.ndarray:
    """Returns the examples at these positions of the shuffled epochs.

    For each (seed, epoch) this is a keyed bijection of [0, size), computed in time and memory
    proportional to `positions`; no permutation is stored. It is a Feistel network over a grid of
    about sqrt(size) by sqrt(size) cells, with addition instead of exclusive or, so that the sides
    need not be powers of two (Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
    2002). The grid may have a few cells more than `size`: a result outside is permuted again until
    it is inside.

    Grain's `index_shuffle` permutes one position per call, which takes about 80 times as long, and
    `MapDataset.shuffle` seeds epoch e by seed + e, so that the second epoch of one seed has the
    order of the first epoch of the next seed.

    Args:
      positions: int64, in [0, size).
      size: Number of examples.
      seed: The run's seed.
      epochs: The epoch of each position; broadcasts against `positions`.

    Returns:
      Indices of examples, int64, of the shape of `positions`.
    """
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    keys = np.array(np.broadcast_to(epochs, positions.shape), np.uint64)
    keys += np.uint64(derive_seed(seed, Purpose.DATA) << 32)
    _mix(keys, 0)
    result = _shuffle(positions.astype(np.uint64), keys, rows, columns)
    while (outside := np.flatnonzero(result >= np.uint64(size))).size:
        result[outside] = _shuffle(result[outside], keys[outside], rows, columns)
    return result.view(np.int64)


def _shuffle(positions: np.ndarray, keys: np.ndarray, rows: int, columns: int) -> np.ndarray:
    row = positions // np.uint64(columns)  # NumPy's divmod is slow
    column = positions - row * np.uint64(columns)
    for round_ in range(0, _ROUNDS, 2):
        row = _sum(row, _draw(column, keys, round_, rows), rows)
        column = _sum(column, _draw(row, keys, round_ + 1, columns), columns)
    return row * np.uint64(columns) + column


def _sum(a: np.ndarray, b: np.ndarray, below: int) -> np.ndarray:
    """Returns (a + b) % below, for a and b less than `below`."""
    a += b
    # Unsigned: if a < below, the difference wraps around to a huge number.
    return np.minimum(a, a - np.uint64(below))


def _draw(half: np.ndarray, keys: np.ndarray, round_: int, below: int) -> np.ndarray:
    """Returns pseudorandom numbers in [0, below), a function of half, key and round."""
    mixed = half * np.uint64(_ROUNDS)
    mixed += keys
    _mix(mixed, round_)
    # The upper bits, scaled without a division.
    mixed >>= np.uint64(32)
    mixed *= np.uint64(below)
    mixed >>= np.uint64(32)
    return mixed


def _mix(x: np.ndarray, offset: int) -> None:
    """Replaces x by SplitMix64's finalizer of x + offset, in which every bit affects every other.

    Source: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
    """
    x += np.uint64(0x9E3779B97F4A7C15 + offset)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)

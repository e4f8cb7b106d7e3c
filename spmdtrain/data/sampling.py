"""Which examples make up batch k, as a function of the step alone.

The stream of training examples is the concatenation of each epoch's order, and batch k is the
k-th slice of it, whatever the devices, the processes, and how often the run was interrupted.
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
"""(example, generator) -> example; what is drawn depends on seed, example and epoch alone."""

_BLOCK = 16384  # positions permuted at once: enough to spread NumPy's cost a call over many batches
_ROUNDS = 8


def all_rows(batch_size: int) -> np.ndarray:
    """The rows of a batch that a process loads when it loads all of them."""
    return np.arange(batch_size)


def process_rows(sharding: Sharding, batch_size: int) -> np.ndarray:
    """The rows of each global batch that this process's devices hold.

    Read off the sharding, never the process index: with a model axis across processes, several
    processes hold the same rows.
    """
    slices = sharding.addressable_devices_indices_map((batch_size,)).values()
    return np.unique(np.concatenate([all_rows(batch_size)[s] for s in slices if s is not None]))


def padded_size(batch_size: int, sharding: Sharding) -> int:
    """The smallest number of rows from `batch_size` on that divides over a batch's devices."""
    shards = 1
    if isinstance(sharding, NamedSharding) and sharding.spec and sharding.spec[0] is not None:
        axes = sharding.spec[0] if isinstance(sharding.spec[0], tuple) else (sharding.spec[0],)
        shards = math.prod(sharding.mesh.shape[axis] for axis in axes)
    return -(-batch_size // shards) * shards


@dataclass(eq=False)
class TrainBatches:
    """Batch k of the training stream for every k: always full, running on into the next epoch."""

    dataset: Dataset
    batch_size: int
    seed: int
    shuffle: bool
    steps: int
    local: np.ndarray
    """Rows of each batch to load (see `process_rows`)."""
    augment: Augment | None = None

    def __post_init__(self) -> None:
        self._per_block = max(1, _BLOCK // self.batch_size)  # batches
        # A few blocks, as threads that read ahead may stand in different ones.
        self._block = functools.lru_cache(maxsize=4)(self._make_block)
        self._own_block = functools.lru_cache(maxsize=4)(self._make_own_block)

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> PyTree:
        indices, epochs = self.own_examples(step)
        rows = self.dataset.rows(indices)
        if self.augment is None:
            return rows
        return self._augmented(rows, indices, epochs)

    def examples(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Index and epoch of each example of global batch `step`."""
        indices, epochs = self._block(step // self._per_block)
        batch = step % self._per_block
        return indices[batch], epochs[batch]

    def own_examples(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """The same of this process's rows alone."""
        indices, epochs = self._own_block(step // self._per_block)
        batch = step % self._per_block
        return indices[batch], epochs[batch]

    def _make_own_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        indices, epochs = self._block(block)
        return indices[:, self.local], epochs[:, self.local]

    def _make_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Of several batches, one in a row."""
        size, length = len(self.dataset), self._per_block * self.batch_size
        positions = np.arange(block * length, (block + 1) * length)
        epochs = positions // size
        positions -= epochs * size
        if self.shuffle:
            positions = permuted(positions, size=size, seed=self.seed, epochs=epochs)
        shape = (self._per_block, self.batch_size)
        return positions.reshape(shape), epochs.reshape(shape)

    def _augmented(self, rows: PyTree, indices: np.ndarray, epochs: np.ndarray) -> PyTree:
        assert self.augment is not None
        examples = []
        for row, (index, epoch) in enumerate(zip(indices, epochs, strict=True)):
            # Philox is counter-based: each (example, epoch) has a stream of its own under the key.
            bits = np.random.Philox(
                key=derive_seed(self.seed, Purpose.DATA), counter=[0, 0, int(index), int(epoch)]
            )
            example = jax.tree.map(lambda array, row=row: array[row], rows)
            examples.append(self.augment(example, np.random.Generator(bits)))
        return jax.tree.map(lambda *leaves: np.stack(leaves), *examples)


@dataclass(frozen=True)
class OrderedBatches:
    """The examples once each, in order. A batch is filled up by repeating its last row.

    An item is (rows, mask); mask is f32, 0 for what was only filled in.
    """

    dataset: Dataset
    batch_size: int
    """Examples of a batch; the last one may have fewer."""
    local: np.ndarray
    """Rows of each batch to load; those from `batch_size` on only fill it up."""
    unless: int | None = None
    """If given, batches of another number of rows are not filled up, and all rows are loaded."""

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.batch_size)

    def is_whole(self, number: int) -> bool:
        """Whether all rows of a batch are loaded, because it is not filled up."""
        return self.unless is not None and self._count(number) != self.unless

    def _count(self, number: int) -> int:
        return min(self.batch_size, len(self.dataset) - number * self.batch_size)

    def __getitem__(self, number: int) -> tuple[PyTree, np.ndarray]:
        first, count = number * self.batch_size, self._count(number)
        local = all_rows(count) if self.is_whole(number) else self.local
        # A real row rather than zeros, so that no model meets a value it never could in the data.
        rows = self.dataset.rows(first + np.minimum(local, count - 1))
        return rows, (local < count).astype(np.float32)


# -- the order of an epoch ------------------------------------------------------------------------


def permuted(positions: np.ndarray, *, size: int, seed: int, epochs: np.ndarray) -> np.ndarray:
    """Where `positions` (int64, in [0, size)) go in the order of their `epochs`.

    A keyed bijection of [0, size) for each (seed, epoch), in time and memory of `positions`
    alone. It is a Feistel network over a grid of about sqrt(size) by sqrt(size) places, which
    adds where the classic one takes the exclusive or, so that the sides need not be powers of
    two (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). The grid may have a
    few places more than `size`: what lands there is sent on until it lands inside.
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
    for number in range(0, _ROUNDS, 2):
        row = _sum(row, _draw(column, keys, number, rows), rows)
        column = _sum(column, _draw(row, keys, number + 1, columns), columns)
    return row * np.uint64(columns) + column


def _sum(a: np.ndarray, b: np.ndarray, below: int) -> np.ndarray:
    """Modulo `below`, which is more than either: what is less than 0 is huge, without a sign."""
    a += b
    return np.minimum(a, a - np.uint64(below))


def _draw(half: np.ndarray, keys: np.ndarray, number: int, below: int) -> np.ndarray:
    """In [0, below)."""
    mixed = half * np.uint64(_ROUNDS)
    mixed += keys
    _mix(mixed, number)
    # The upper bits, scaled without a division.
    mixed >>= np.uint64(32)
    mixed *= np.uint64(below)
    mixed >>= np.uint64(32)
    return mixed


def _mix(x: np.ndarray, number: int) -> None:
    """SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014): every bit moves every other.

    Of `x + number`, in place.
    """
    x += np.uint64(0x9E3779B97F4A7C15 + number)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)

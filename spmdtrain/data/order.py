"""The order in which training reads examples, by a keyed permutation."""

import functools
import math
from typing import Any, Protocol

import numpy as np

from spmdtrain.config.run_config import Purpose, derive_seed

# -- The order in which training reads examples ----------------------------------------------------

BLOCKS_PER_GROUP = 8  # consecutive permuted blocks whose examples are shuffled together
_CACHED_EPOCHS = 4  # epochs whose block permutations are cached


class Order(Protocol):
    """A function from positions of the training stream to examples."""

    def examples(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the indices in the dataset, and the epochs, of the examples at positions.

        All arrays are int64 (n,); positions are at least 0.
        """
        ...


class EpochOrder:
    """An order of consecutive epochs; each epoch contains every example once.

    With blocks, an epoch permutes the blocks, and then the examples within each group of
    `BLOCKS_PER_GROUP` consecutive permuted blocks, so that neighboring positions read few blocks.

    Args:
      blocks: int64 (m+1,), the examples at which blocks begin, from 0 to `size`. By default all
        examples are permuted together.
      whole_blocks: Whether the examples of a block keep their order, and stay together.
    """

    def __init__(
        self,
        size: int,
        seed: int,
        *,
        shuffle: bool,
        blocks: np.ndarray | None = None,
        whole_blocks: bool = False,
    ) -> None:
        self._whole_blocks = whole_blocks
        self._size, self._seed, self._shuffle, self._blocks = size, seed, shuffle, blocks
        self._epoch = functools.lru_cache(maxsize=_CACHED_EPOCHS)(self._permute_blocks)

    def examples(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        epochs = positions // self._size
        positions = positions - epochs * self._size
        if not self._shuffle:
            return positions, epochs
        if self._blocks is None:
            return permuted(positions, size=self._size, seed=self._seed, epochs=epochs), epochs
        indices = np.empty_like(positions)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            indices[chosen] = self._of_epoch(self._blocks, int(epoch), positions[chosen])
        return indices, epochs

    def _of_epoch(self, blocks: np.ndarray, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Returns the examples at positions of one epoch."""
        order, begins = self._epoch(epoch)
        if self._whole_blocks:
            block = np.searchsorted(begins, positions, side="right") - 1
            return blocks[order[block]] + positions - begins[block]
        # Shuffle within the group.
        ends = np.append(begins[:-1:BLOCKS_PER_GROUP], self._size)
        group = np.searchsorted(ends, positions, side="right") - 1
        first = ends[group]
        within = permuted(
            positions - first,
            size=ends[group + 1] - first,
            seed=self._seed,
            epochs=np.asarray(epoch),
            part=group + 1,
        )
        # Find the block that contains the shuffled position.
        within += first
        block = np.searchsorted(begins, within, side="right") - 1
        return blocks[order[block]] + within - begins[block]

    def _permute_blocks(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the blocks in the order of an epoch, and the positions at which they begin."""
        assert self._blocks is not None
        count = len(self._blocks) - 1
        order = permuted(
            np.arange(count), size=count, seed=self._seed, epochs=np.asarray(epoch), part=0
        )
        return order, np.concatenate([[0], np.cumsum(np.diff(self._blocks)[order])])


# -- A keyed permutation of [0, size), computed position by position -------------------------------

_ROUNDS = 8  # of the Feistel network


Integers = int | np.ndarray


def permuted(
    positions: np.ndarray,
    *,
    size: Integers,
    seed: int,
    epochs: np.ndarray,
    part: Integers | None = None,
) -> np.ndarray:
    """Returns the examples at these positions of the shuffled epochs, int64.

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
      positions: int64 (n,), in [0, size).
      size: Number of examples; int64 (n,) if positions are of permutations of different sizes.
      epochs: The epoch of each position; broadcasts against `positions`.
      part: Number of one of several permutations of an epoch, an int or int64 (n,). By default
        there is only one.
    """
    if isinstance(size, int):
        rows: Any = math.isqrt(size - 1) + 1
        columns: Any = -(-size // rows)
    else:
        rows = np.ceil(np.sqrt(size)).astype(np.int64)
        columns = -(-size // rows)
    keys = np.array(np.broadcast_to(epochs, positions.shape), np.uint64)
    keys += np.uint64(derive_seed(seed, Purpose.DATA) << 32)
    _mix(keys, 0)
    if part is not None:
        keys += np.asarray(part).astype(np.uint64)
        _mix(keys, 1)
    result = _shuffle(positions.astype(np.uint64), keys, rows, columns)
    limit = np.asarray(size).astype(np.uint64)
    while (outside := np.flatnonzero(result >= limit)).size:
        sides = (x if np.ndim(x) == 0 else x[outside] for x in (rows, columns))
        result[outside] = _shuffle(result[outside], keys[outside], *sides)
    return result.view(np.int64)


def _shuffle(
    positions: np.ndarray, keys: np.ndarray, rows: Integers, columns: Integers
) -> np.ndarray:
    rows, columns = (np.asarray(x).astype(np.uint64) for x in (rows, columns))
    row = positions // columns  # NumPy's divmod is slow
    column = positions - row * columns
    for round_ in range(0, _ROUNDS, 2):
        row = _sum(row, _draw(column, keys, round_, rows), rows)
        column = _sum(column, _draw(row, keys, round_ + 1, columns), columns)
    return row * columns + column


def _sum(a: np.ndarray, b: np.ndarray, below: Any) -> np.ndarray:
    """Returns (a + b) % below, for a and b less than `below`."""
    a += b
    # Unsigned: if a < below, the difference wraps around to a huge number.
    return np.minimum(a, a - below)


def _draw(half: np.ndarray, keys: np.ndarray, round_: int, below: Any) -> np.ndarray:
    """Returns pseudorandom numbers in [0, below), a function of half, key and round."""
    mixed = half * np.uint64(_ROUNDS)
    mixed += keys
    _mix(mixed, round_)
    # The upper bits, scaled without a division.
    mixed >>= np.uint64(32)
    mixed *= below
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

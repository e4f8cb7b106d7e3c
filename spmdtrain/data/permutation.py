"""A keyed permutation of [0, size), computed position by position."""

import math
from typing import Any

import numpy as np

from spmdtrain.config.run_config import Purpose, derive_seed

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

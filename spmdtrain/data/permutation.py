"""A new order of N examples for every epoch, computed where it is needed and stored nowhere."""

import math

import numpy as np

from spmdtrain.config import Purpose, derive_seed

_ROUNDS = 8


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

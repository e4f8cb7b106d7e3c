"""Reduction of a long curve to few points, among them its extremes."""

import math
from collections.abc import Sequence

import numpy as np

_DIGITS = 6


def reduce_curve(
    x: Sequence[float], y: Sequence[float | None], most: int
) -> tuple[list[float], list[float | None]]:
    """Returns at most `most` points of a curve, with the smallest and largest value of each part.

    The curve is divided into parts of equally many points. The smallest and the largest value of
    each part are kept, the first gap of a part, and the first and the last point of the curve.
    Libraries that do the same (`tsdownsample`) have no gaps.

    Args:
      x: Positions in ascending order.
      y: Values; None is a gap.
      most: At least 8. A curve that has no more points keeps all of them. Values are rounded to 6
        digits, except for the first and the last one.
    """
    assert most >= 8, most
    count = len(x)
    kept = set(range(count)) if count <= most else extremes(y, most)
    ends = (0, count - 1)
    chosen = sorted(kept)
    values = [y[n] for n in chosen]
    return [x[n] for n in chosen], [
        value if value is None or n in ends else _rounded(value)
        for n, value in zip(chosen, values, strict=True)
    ]


def extremes(y: Sequence[float | None], most: int) -> set[int]:
    """Returns at most `most` indices of values of a long curve to keep; None in `y` is a gap."""
    values = np.array([math.nan if value is None else value for value in y], dtype=np.float64)
    kept = {0, len(y) - 1}
    parts = (most - 2) // (3 if np.isnan(values).any() else 2)
    size, longer = divmod(len(y), parts)  # as np.array_split: the first parts have one more
    middle = longer * (size + 1)
    for first, end, width in ((0, middle, size + 1), (middle, len(y), size)):
        rows = values[first:end].reshape(-1, width)
        begins = np.arange(first, end, width)
        missing = np.isnan(rows)
        gaps, whole = missing.any(axis=1), ~missing.all(axis=1)
        kept.update((begins + missing.argmax(axis=1))[gaps].tolist())
        for argextreme, least in ((np.argmin, np.inf), (np.argmax, -np.inf)):
            found = begins + argextreme(np.where(missing, least, rows), axis=1)
            kept.update(found[whole].tolist())
    return kept


def mean_curve(
    x: Sequence[float], y: Sequence[float | None], parts: int
) -> tuple[list[float], list[float]]:
    """Returns the mean of each part of a curve, at the part's mean position.

    Args:
      x: Positions in ascending order.
      y: Values; None is left out of the means.
      parts: The number of parts, of equally many points.
    """
    found = [(at, value) for at, value in zip(x, y, strict=True) if value is not None]
    if not found:
        return [], []
    points = np.array(found, dtype=np.float64)
    means = [part.mean(axis=0) for part in np.array_split(points, min(parts, len(points)))]
    return [round(float(m[0]), 1) for m in means], [_rounded(float(m[1])) for m in means]


def merge_means(rows: np.ndarray, size: int) -> np.ndarray:
    """Returns the means of groups of `size` neighboring rows; the last group may have fewer.

    Rows before and after have position, value and weight, in shape (rows, 3). The weight of a group
    is the sum of its weights.
    """
    if size == 1 or not len(rows):
        return rows
    return _grouped(rows, np.arange(len(rows)) // size)


def mean_curve_of_means(rows: np.ndarray, parts: int) -> tuple[list[float], list[float]]:
    """Returns the means of parts of a curve as `mean_curve` does, from means of shorter parts.

    Args:
      rows: Position, value and weight of the means, of shape (rows, 3).
      parts: The number of parts, of about equal weight.
    """
    if not len(rows):
        return [], []
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    before = np.cumsum(rows[:, 2]) - rows[:, 2]
    number = (before * min(parts, len(rows)) / rows[:, 2].sum()).astype(int)
    means = _grouped(rows, np.unique(number, return_inverse=True)[1])
    return [round(float(at), 1) for at in means[:, 0]], [_rounded(float(v)) for v in means[:, 1]]


def _grouped(rows: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Returns mean position, mean value and weight of each group of rows."""
    weight = np.bincount(groups, rows[:, 2])
    means = [np.bincount(groups, rows[:, n] * rows[:, 2]) / weight for n in (0, 1)]
    return np.stack([*means, weight], axis=1)


def _rounded(value: float) -> float:
    """Returns a value with 6 significant digits, which take half the space in the file."""
    return float(f"{value:.{_DIGITS}g}")

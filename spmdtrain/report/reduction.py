"""Reduction of a long curve to few points, among them its extremes."""

import math
from collections.abc import Sequence

import numpy as np

_DIGITS = 6


def reduce_curve(
    x: Sequence[float], y: Sequence[float | None], most: int
) -> tuple[list[float], list[float | None]]:
    """Returns at most `most` points of a curve, with the smallest and largest value of each part.

    The curve is divided into parts of equally many points. Of each part the smallest and the
    largest value are kept, and its first gap if it has one; of the curve also the first and the
    last point. Libraries that do the same (`tsdownsample`) have no gaps.

    Args:
      x: Positions in ascending order.
      y: Values; None is a gap.
      most: The number of points, at least 8. A curve that has no more is returned as it is, with
        its values rounded to 6 digits, except for the first and the last one.

    Returns:
      Positions and values.
    """
    assert most >= 8, most
    count = len(x)
    kept = set(range(count)) if count <= most else _extremes(y, most)
    ends = (0, count - 1)
    chosen = sorted(kept)
    values = [y[n] for n in chosen]
    return [x[n] for n in chosen], [
        value if value is None or n in ends else _rounded(value)
        for n, value in zip(chosen, values, strict=True)
    ]


def _extremes(y: Sequence[float | None], most: int) -> set[int]:
    """Returns the indices of the values that are kept of a long curve."""
    values = np.array([math.nan if value is None else value for value in y], dtype=np.float64)
    kept = {0, len(y) - 1}
    parts = (most - 2) // (3 if np.isnan(values).any() else 2)
    for part in np.array_split(np.arange(len(y)), parts):
        inside = values[part]
        missing = np.isnan(inside)
        if missing.any():
            kept.add(int(part[missing.argmax()]))
        if not missing.all():
            kept |= {int(part[np.nanargmin(inside)]), int(part[np.nanargmax(inside)])}
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


def _rounded(value: float) -> float:
    """Returns a value with 6 significant digits, which take half the space in the file."""
    return float(f"{value:.{_DIGITS}g}")

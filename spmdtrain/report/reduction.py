"""Reduction of a long curve to so many points that its extremes stay visible."""

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
    if count <= most:
        return list(x), [
            value if n in (0, count - 1) else _rounded(value) for n, value in enumerate(y)
        ]
    values = np.array([math.nan if value is None else value for value in y], dtype=np.float64)
    kept = {0, count - 1}
    parts = (most - 2) // (3 if np.isnan(values).any() else 2)
    for part in np.array_split(np.arange(count), parts):
        inside = values[part]
        missing = np.isnan(inside)
        if missing.any():
            kept.add(int(part[missing.argmax()]))
        if not missing.all():
            kept |= {int(part[np.nanargmin(inside)]), int(part[np.nanargmax(inside)])}
    chosen = sorted(kept)
    ends = (0, count - 1)
    return [x[n] for n in chosen], [y[n] if n in ends else _rounded(y[n]) for n in chosen]


def _rounded(value: float | None) -> float | None:
    """Returns a value with 6 significant digits, which take half the space in the file."""
    return None if value is None else float(f"{value:.{_DIGITS}g}")

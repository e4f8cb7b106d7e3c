"""Reduction of long curves."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdtrain.record.readers import mean_curve, reduce_curve


@given(st.integers(2001, 30_000), st.integers(0, 2**16), st.floats(0, 0.3))
@settings(max_examples=8)
def test_extremes_ends_and_gaps_stay(count: int, seed: int, gaps: float) -> None:
    draw = random.Random(seed)
    y = [None if draw.random() < gaps else draw.gauss(0, 1) for _ in range(count)]
    x = [10 * n for n in range(count)]
    spikes = draw.sample(range(1, count - 1), 2)
    y[spikes[0]], y[spikes[1]] = 1000.0, -1000.0
    some_gap = draw.choice([n for n in range(count) if n not in (0, count - 1, *spikes)])
    y[some_gap : some_gap + 1] = [None]
    new_x, new_y = reduce_curve(x, y, 2000)
    assert 700 < len(new_x) <= 2000 and new_x == sorted(set(new_x))
    assert (new_x[0], new_y[0]) == (x[0], y[0]) and (new_x[-1], new_y[-1]) == (x[-1], y[-1])
    points = dict(zip(new_x, new_y, strict=True))
    assert points[x[spikes[0]]] == 1000 and points[x[spikes[1]]] == -1000
    assert None in new_y
    for at, value in points.items():  # no value is invented
        original = y[round(at) // 10]
        assert (value is None) == (original is None)
        assert value is None or value == pytest.approx(original, rel=1e-5)


def test_a_short_curve_keeps_all_points_and_its_exact_ends() -> None:
    y = [1 / 3, 2 / 3, None, 1 / 7]
    assert reduce_curve([1, 2, 3, 4], y, 2000) == ([1, 2, 3, 4], [1 / 3, 0.666667, None, 1 / 7])
    assert reduce_curve([], [], 2000) == ([], [])


def test_the_mean_is_that_of_the_values() -> None:
    y: list[float | None] = [float(n % 10) for n in range(1000)]
    y[5] = None
    x, means = mean_curve(list(range(1000)), y, 10)
    assert len(x) == 10 and means[1:] == pytest.approx([4.5] * 9, abs=0.1)
    assert np.mean(means) == pytest.approx(4.5, abs=0.05)
    assert mean_curve([1], [None], 10) == ([], [])
    assert not any(math.isnan(mean) for mean in means)

"""Columns of long runs, which keep a bounded number of values."""

import random

import pytest

from spmdtrain.record.readers import Column, mean_curve
from spmdtrain.record.validation import parse_objects


def test_a_long_column_keeps_extremes_gaps_means_and_its_end() -> None:
    draw, column = random.Random(3), Column()
    values = [draw.gauss(0, 1) + n / 50_000 for n in range(100_000)]
    values[40_123], values[70_321] = -100.0, 100.0
    for step, value in enumerate(values):
        column.add(step, None if step == 55_555 or step > 99_990 else value)
    steps, kept = column.by_step()
    assert len(steps) < 40_000 and steps == sorted(set(steps))
    points = dict(zip(steps, kept, strict=True))
    assert points[40_123] == -100 and points[70_321] == 100 and points[55_555] is None
    assert column.last == (99_990, values[99_990])
    assert (column.count, column.last_step) == (100_000, 99_999)
    assert column.total == pytest.approx(sum(values[:55_555]) + sum(values[55_556:99_991]))
    at, means = column.means(10)
    expected_at, expected = mean_curve(range(100_000), values, 10)
    assert at == pytest.approx(expected_at, rel=1e-2)
    assert means == pytest.approx(expected, abs=0.03)


def test_of_equal_steps_in_a_long_column_the_newest_value_counts() -> None:
    column = Column()
    for step in [*range(40_000), *range(35_000, 45_000)]:
        column.add(step, -1.0 if column.count == 39_000 else float(column.count))
    steps, values = column.by_step()
    points = dict(zip(steps, values, strict=True))
    assert list(points) == sorted(steps) and points[39_000] == 44_000 and steps[-1] == 44_999


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([b'{"a": 1}', b'{"a": 2}'], [{"a": 1}, {"a": 2}]),
        ([b'{"a": {"b": 1}}', b'{"a": 2}'], [{"a": {"b": 1}}, {"a": 2}]),
        ([b'{"a": 1}, {"a": 2}', b'{"b": 3}'], [{}, {"b": 3}]),
        ([b'{"a": 1}, 5', b'{"b": 3}'], [{}, {"b": 3}]),
        ([b'{"a": "{"}', b'"b": 3}', b'{"c": "'], [{"a": "{"}, {}, {}]),
        ([b'{"a": 1', b'"b": 2}', b'{"c": 3}, {"d": 4}'], [{}, {}, {}]),
        ([b'{"a": 1}', b"\xff", b""], [{"a": 1}, {}, {}]),
        ([b'{"a": 99999999999999999999999}', b'{"a": 2}'], [{}, {"a": 2}]),
        ([], []),
    ],
)
def test_lines_that_are_decoded_together_are_those_decoded_alone(
    lines: list[bytes], expected: list[object]
) -> None:
    assert parse_objects(lines) == expected

"""Readers of a run's files: reads with a limit, events, columns of metrics, and reduced curves."""

import itertools
import json
import math
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from etils import epath
from hypothesis import given, settings
from hypothesis import strategies as st
from report_files import BEGAN, phases, restarted_events

from spmdtrain.record import no_follow
from spmdtrain.record.lines import run_times
from spmdtrain.record.readers import (
    Activity,
    Column,
    EventLog,
    mean_curve,
    reduce_curve,
    shares,
    spans,
)
from spmdtrain.record.validation import Malformed, parse_objects, read_bytes

GIB = 2**30


def below_root(path: epath.Path, most: int) -> bytes:
    return no_follow.read_file(Path(path).parent, path.name, most)


@pytest.mark.parametrize("read", [read_bytes, below_root])
def test_a_read_allocates_the_size_of_the_file_and_not_the_limit(
    tmp_path: Path, read: Callable[[epath.Path, int], bytes]
) -> None:
    file = epath.Path(tmp_path / "file")
    file.write_bytes(b"0123456789")
    tracemalloc.start()
    try:
        assert read(file, 4 * GIB) == b"0123456789"
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert read(file, 10) == b"0123456789"
    with pytest.raises((Malformed, OSError), match=r"the limit is 9|larger than 9 bytes"):
        read(file, 9)


def test_a_read_from_an_offset_returns_the_rest(tmp_path: Path) -> None:
    file = epath.Path(tmp_path / "file")
    file.write_bytes(b"0123456789")
    assert [read_bytes(file, start=start) for start in (0, 7, 10, 12)] == [
        b"0123456789",
        b"789",
        b"",
        b"",
    ]


# -- where the time of a run went, from its events -------------------------------------------------


def log_of(*events: object) -> EventLog:
    log = EventLog()
    for event in events:
        log.add(*parse_objects([json.dumps(event).encode()]))
    return log


def test_a_killed_start_is_followed_by_time_down_and_repeated_steps() -> None:
    log = log_of(*restarted_events())
    assert [(s.step, s.last_step, s.seconds, s.status) for s in log.starts] == [
        (0, 400, 55, ""),
        (300, 600, 35, "finished"),
    ]
    found = spans(log.starts)
    seconds = shares(found)
    assert seconds[Activity.DOWN] == 60
    # The second start computed 300 steps in 20 s; 100 of them for the second time.
    assert seconds[Activity.REPEATED] == pytest.approx(20 / 3)
    assert seconds[Activity.STEP] == pytest.approx(40 + 40 / 3)
    assert seconds[Activity.COMPILE] == 7 and seconds[Activity.RESTORE] == 2
    assert sum(seconds.values()) == pytest.approx(150)  # all of the wall-clock time
    # One after the other, without holes.
    for before, after in itertools.pairwise(found):
        assert after.begin == pytest.approx(before.end)


def test_many_readings_are_merged_and_keep_their_sum() -> None:
    readings = [phases(n, n, 0, 0, 0, n * 0.9, 0, n * 0.1, 0, 0) for n in range(1, 1001)]
    log = log_of({"time": BEGAN, "event": "start", "step": 0}, *readings)
    found = spans(log.starts, 12)
    assert len(found) <= 2 * 12
    seconds = shares(found)
    assert seconds[Activity.STEP] == pytest.approx(900)
    assert seconds[Activity.EVALUATE] == pytest.approx(100)


def test_the_shares_are_those_of_the_goodput_that_the_run_prints() -> None:
    """The second start repeats steps whose speed changes between its readings."""
    begin = {"event": "start", "time": BEGAN, "step": 0}
    first = [phases(n, 10 * n, 0, 0, 0, n * 0.9, 0, 0, 0, n * 0.1) for n in range(1, 41)]
    again = [phases(100 + n, 100 + 5 * n, 0, 0, 0, n * n / 100, 0, 0, 0, 0) for n in range(1, 81)]
    events: list[Any] = [begin, *first, {**begin, "time": BEGAN + 100, "step": 100}, *again]
    seconds, times = shares(spans(log_of(*events).starts)), run_times(events)
    assert seconds[Activity.REPEATED] == pytest.approx(times.lost["repeated"]) == 36
    assert seconds[Activity.STEP] == pytest.approx(times.productive)


def test_the_end_of_a_killed_start_is_known_from_other_files() -> None:
    log = log_of(*restarted_events())
    log.extend([(BEGAN + 70, 450), (BEGAN + 120, 320), (BEGAN + 500, 999)])
    assert log.starts[0].seconds == 70 and log.starts[0].last_step == 450
    assert log.starts[1].seconds == 35  # its end is recorded
    assert shares(spans(log.starts))[Activity.DOWN] == pytest.approx(45)


def test_events_that_are_not_valid_are_counted() -> None:
    log = log_of(
        {"time": BEGAN, "event": "checkpoint", "step": 1},  # before any start
        {"time": "now", "event": "start"},
        {"time": BEGAN, "event": "start", "step": -5},
        {"time": BEGAN, "event": "start", "step": 0, "processes": True},
        {"time": BEGAN, "event": "start"},
        {"time": BEGAN + 1, "event": "phases", "step": 3, "seconds": {"step": "x"}},
        {"time": BEGAN + 1, "event": "phases", "step": 3, "seconds": {"load": -4}},
        {"time": BEGAN + 1, "event": "phases", "step": 3, "seconds": [1]},
        {"time": BEGAN + 1, "event": "of another version", "step": 3},
        {"time": BEGAN + 1, "event": "fault", "step": 2, "reason": 3},
        {"time": BEGAN + 2, "event": "phases", "step": 1},
        [1],
    )
    log.add(*parse_objects([b"\xff{"]))
    assert log.invalid == 9 and len(log.events) == 3
    (start,) = log.starts
    assert (start.step, start.processes, start.last_step, start.seconds) == (0, None, 1, 2)
    assert [span.activity for span in spans(log.starts)] == [Activity.HOST]


def test_a_clock_that_goes_back_makes_no_negative_time() -> None:
    begin = {"event": "start", "step": 0}
    log = log_of(
        {**begin, "time": BEGAN + 100},
        phases(150, 50, 0, 0, 0, 40, 0, 0, 0, 0),
        {**begin, "time": BEGAN},
        phases(10, 60, 0, 0, 0, 5, 0, 0, 0, 0),
    )
    assert all(span.end >= span.begin for span in spans(log.starts))


# -- columns of long runs, which keep a bounded number of values -----------------------------------


def test_a_long_column_keeps_extremes_gaps_means_and_its_end() -> None:
    draw, column = random.Random(3), Column(bounded=True)
    values = [draw.gauss(0, 1) + n / 50_000 for n in range(100_000)]
    values[40_123], values[70_321] = -100.0, 100.0
    for step, value in enumerate(values):
        column.add(step, None if step == 55_555 or step > 99_990 else value)
    steps, kept = column.by_step()
    assert len(steps) < 40_000 and steps.tolist() == sorted(set(steps.tolist()))
    points = dict(zip(steps, kept, strict=True))
    assert points[40_123] == -100 and points[70_321] == 100 and math.isnan(points[55_555])
    assert column.last == (99_990, values[99_990])
    assert (column.count, column.last_step) == (100_000, 99_999)
    assert column.total == pytest.approx(sum(values[:55_555]) + sum(values[55_556:99_991]))
    at, means = column.means(10)
    expected_at, expected = mean_curve(range(100_000), values, 10)
    assert at == pytest.approx(expected_at, rel=1e-2)
    assert means == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("bounded", [False, True])
def test_of_equal_steps_in_a_long_column_the_newest_value_counts(bounded: bool) -> None:
    column = Column(bounded=bounded)
    for step in [*range(40_000), *range(35_000, 45_000)]:
        column.add(step, -1.0 if column.count == 39_000 else float(column.count))
    steps, values = column.by_step()
    points = dict(zip(steps, values, strict=True))
    assert list(points) == sorted(steps) and points[39_000] == 44_000 and steps[-1] == 44_999
    assert bounded or (len(points) == 45_000 and column.last == (44_999, 49_999.0))


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


# -- reduction of long curves ----------------------------------------------------------------------


@pytest.mark.slow
@given(st.integers(2001, 30_000), st.integers(0, 2**16), st.floats(0, 0.3))
@settings(max_examples=8)
def test_extremes_ends_and_gaps_stay(count: int, seed: int, gaps: float) -> None:
    draw = random.Random(seed)
    y = [math.nan if draw.random() < gaps else draw.gauss(0, 1) for _ in range(count)]
    y[0], y[-1] = 1 / 3, 2 / 3
    x = [10 * n for n in range(count)]
    spikes = draw.sample(range(1, count - 1), 2)
    y[spikes[0]], y[spikes[1]] = 1000.0, -1000.0
    some_gap = draw.choice([n for n in range(count) if n not in (0, count - 1, *spikes)])
    y[some_gap] = math.nan
    new_x, new_y = reduce_curve(x, y, 2000)
    assert 700 < len(new_x) <= 2000 and new_x == sorted(set(new_x))
    assert (new_x[0], new_y[0]) == (x[0], y[0]) and (new_x[-1], new_y[-1]) == (x[-1], y[-1])
    points = dict(zip(new_x, new_y, strict=True))
    assert points[x[spikes[0]]] == 1000 and points[x[spikes[1]]] == -1000
    assert None in new_y
    for at, value in points.items():  # no value is invented
        original = y[round(at) // 10]
        assert (value is None) == math.isnan(original)
        assert value is None or value == pytest.approx(original, rel=1e-5)


def test_a_short_curve_keeps_all_points_and_its_exact_ends() -> None:
    y = [1 / 3, 2 / 3, math.nan, 1 / 7]
    assert reduce_curve([1, 2, 3, 4], y, 2000) == ([1, 2, 3, 4], [1 / 3, 0.666667, None, 1 / 7])
    assert reduce_curve([], [], 2000) == ([], [])


def test_the_mean_is_that_of_the_values() -> None:
    y = [float(n % 10) for n in range(1000)]
    y[5] = math.nan
    x, means = mean_curve(list(range(1000)), y, 10)
    assert len(x) == 10 and means[1:] == pytest.approx([4.5] * 9, abs=0.1)
    assert np.mean(means) == pytest.approx(4.5, abs=0.05)
    assert mean_curve([1], [math.nan], 10) == ([], [])
    assert not any(math.isnan(mean) for mean in means)

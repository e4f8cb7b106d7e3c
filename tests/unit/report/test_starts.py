"""Where the time of a run went, from its events."""

import itertools
import json
from typing import Any

import pytest
from report_files import BEGAN, phases, restarted_events

from spmdtrain.record.lines import run_times
from spmdtrain.record.readers import Activity, EventLog, shares, spans
from spmdtrain.record.validation import parse_objects


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
        {"time": BEGAN, "event": "start", "step": -5, "processes": True},
        {"time": BEGAN + 1, "event": "phases", "step": 3, "seconds": {"step": "x", "load": -4}},
        [1],
    )
    log.add(*parse_objects([b"\xff{"]))
    assert log.invalid == 4
    (start,) = log.starts
    assert (start.step, start.processes, start.last_step) == (0, None, 3)
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

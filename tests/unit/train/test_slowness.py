"""The rule that names the process that the others wait for."""

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdtrain.distributed.progress import Interval
from spmdtrain.train.slowness import Pace, Slow, SlowDevices, SlowProcesses, delays, paces_of

WINDOWS = 3  # that must agree
STEPS = 10  # of a window


def pace(load: float = 0, host: float = 0, wait: float = 0, paused: float = 0) -> Pace:
    """The pace of a process, in milliseconds; a step is dispatched in 0.1 ms."""
    values = (load + host + 0.1 + wait, load, host, 0.1, wait, paused)
    return Pace(*(value / 1e3 for value in values))


def blocked(load: float, host: float, wait: float) -> Pace:
    """A pace of which the wait is a part of the dispatch."""
    return pace(load, host)._replace(step=(load + host + wait) / 1e3, dispatch=wait / 1e3)


def found(*paces: Pace, on_host: bool = False) -> list[tuple[float, str]]:
    """The milliseconds for which the others wait for each process, and why."""
    return [
        (round(x.seconds * 1e3, 3), x.cause if x.seconds else "")
        for x in delays(paces, paces, computes_on_host=on_host)
    ]


NONE = (0, "")


@pytest.mark.parametrize(
    ("paces", "expected"),
    {
        "all wait for their devices": ([pace(1, 1, 8)] * 3, [NONE] * 3),
        "none waits": ([pace(9, 1)] * 3, [NONE] * 3),
        "one reads": (
            [pace(1, 1, 8), pace(9, 1, 0), pace(1, 1, 8)],
            [NONE, (8, "load"), NONE],
        ),
        # Its devices have work all the time.
        "one reads longer, while its devices compute": (
            [pace(1, 1, 8), pace(5, 1, 4), pace(1, 1, 8)],
            [NONE, NONE, NONE],
        ),
        "one reads so long that its devices wait a part of the time": (
            [pace(1, 1, 8), pace(7, 1, 2), pace(1, 1, 8)],
            [NONE, (4, "load"), NONE],
        ),
        "two of two": ([pace(1, 1, 8), pace(1, 9, 0)], [NONE, (8, "host")]),
        "two of four": (
            [pace(9, 1), pace(1, 1, 8), pace(9, 1), pace(1, 1, 8)],
            [(8, "load"), NONE, (8, "load"), NONE],
        ),
        # A loop that waits for each result itself waits in `host`.
        "one reads, in a loop that waits": (
            [pace(1, 9), pace(9, 1), pace(1, 9)],
            [NONE, (8, "load"), NONE],
        ),
        "one of two reads, in a loop that waits": (
            [pace(1, 9), pace(9, 1)],
            [NONE, (8, "load")],
        ),
        # A dispatch that blocks waits for the others.
        "one has host work, and dispatches block": (
            [blocked(1, 1, 8), blocked(1, 9, 0), blocked(1, 1, 8)],
            [NONE, (8, "host"), NONE],
        ),
        "one dispatches slowly": (
            [pace(1, 1, 8), pace(1, 1, 0)._replace(dispatch=0.0081), pace(1, 1, 8)],
            [NONE, (8, "dispatch"), NONE],
        ),
        "one is stopped for long, while the device of a GPU continues": (
            [pace(1, 1, 8), pace(1, 1, 8, paused=6), pace(1, 1, 8)],
            [NONE, NONE, NONE],
        ),
    }.values(),
    ids=str,
)
def test_a_process_delays_the_others_by_what_it_does_longer_and_does_not_wait(
    paces: Sequence[Pace], expected: list[tuple[float, str]]
) -> None:
    assert found(*paces) == expected


def test_a_process_that_does_not_run_delays_the_others_where_the_host_computes() -> None:
    usual, stopped = pace(1, 1, 8, paused=1), pace(1, 1, 8, paused=7)
    assert found(usual, stopped, usual, on_host=True) == [NONE, (6, "paused"), NONE]


def test_the_sentence_has_the_phase_and_its_share_of_the_delay() -> None:
    processes = SlowProcesses(["chief", "worker 0", "worker 1"], computes_on_host=False)
    paces = [pace(1, 1, 8), pace(1, 1, 8), pace(7, 3)]
    reported = [processes.judge([[x] * 5 for x in paces]) for _ in range(WINDOWS + 2)]
    assert [len(news) for news in reported] == [0] * (WINDOWS - 1) + [1, 0, 0]
    assert reported[WINDOWS - 1][0].text == (
        "worker 1 is the one that the others wait for: 75 % in load, 8.0 ms of each 10.1 ms step"
    )
    assert processes.named == [2] and processes.share == pytest.approx(8 / 10.1)


def test_the_beginning_and_the_end_are_reported_once() -> None:
    processes = SlowProcesses(["chief", "worker 0", "worker 1"], computes_on_host=False)
    quiet, slow = [pace(1, 1, 8)] * 3, [pace(9, 1), pace(1, 1, 8), pace(1, 1, 8)]
    windows = [slow] * (WINDOWS - 1) + [quiet] + [slow] * 20 + [quiet] + [slow] + [quiet] * 20
    reported = [
        (n, news.text)
        for n, window in enumerate(windows)
        for news in processes.judge([[x] * 5 for x in window])
    ]
    # A pause in one window begins again; the end is when most of the fifteen last are quiet.
    assert [n for n, _ in reported] == [WINDOWS + WINDOWS - 1, 24 + 7]
    assert reported[1][1] == "the others no longer wait for chief"
    assert processes.named == [] and processes.share == 0


def test_of_many_slow_processes_the_three_slowest_are_named() -> None:
    processes = SlowProcesses([f"process {n}" for n in range(12)], computes_on_host=False)
    paces = [pace(1, 1, 8)] * 7 + [pace(load, 1) for load in (6, 9, 7, 8, 5)]
    reported = [news.name for _ in range(9) for news in processes.judge([[x] * 5 for x in paces])]
    assert reported == ["process 8", "process 10", "process 9"]


# -- windows of a simulated job --------------------------------------------------------------------

Step = Callable[[random.Random, int], tuple[float, float, float]]
"""A generator and a rank -> milliseconds that the process loads, does other work, and computes."""


def simulated(step: Step, processes: int, windows: int, seed: int) -> list[list[Slow]]:
    """What is reported of a job with these steps, all of which wait for the slowest process.

    A process runs ahead of its devices by up to 8 steps.
    """
    draw = random.Random(seed)
    rule = SlowProcesses([f"process {n}" for n in range(processes)], computes_on_host=False)
    host = [0.0] * processes  # the time of each process
    done: list[float] = [0.0]  # when the devices have made each step
    reported = []
    for _ in range(windows):
        intervals: list[list[Interval]] = [[] for _ in range(processes)]
        for _ in range(STEPS):
            ready = []
            for rank in range(processes):
                load, other, compute = (max(x, 0) for x in step(draw, rank))
                now = host[rank] + load + other + 0.1
                ready.append(max(now, done[-1]) + compute)
                wait = max(0.0, done[-8] - now if len(done) > 8 else 0.0)
                host[rank] = now + wait
                step_ms = 0.1 + wait
                intervals[rank].append(
                    Interval(load / 1e3, other / 1e3, step_ms / 1e3, wait / 1e3, 1)
                )
            done.append(max(ready))
        paces = [paces_of(own, 0.0) for own in intervals]
        reported.append(rule.judge([x for x in paces if x is not None]))
    return reported


def noise(draw: random.Random) -> float:
    """Milliseconds of a job's normal work on a busy machine, with a heavy tail."""
    return 0.5 * draw.paretovariate(1.5)


@given(st.integers(0, 2**32), st.integers(2, 6), st.sampled_from([0.0, 3.0, 30.0]))
def test_no_equal_process_is_named(seed: int, processes: int, compute: float) -> None:
    reported = simulated(
        lambda draw, rank: (noise(draw), noise(draw), compute + noise(draw)), processes, 60, seed
    )
    assert not any(reported)


@given(
    st.integers(0, 2**32),
    st.integers(2, 6),
    st.sampled_from(["load", "host"]),
    st.floats(10, 100),
)
def test_a_slow_process_is_named_within_50_steps(
    seed: int, processes: int, cause: str, slow: float
) -> None:
    def step(draw: random.Random, rank: int) -> tuple[float, float, float]:
        own = slow if rank == 1 else 0.0
        load, host = (own, 0.0) if cause == "load" else (0.0, own)
        return load + noise(draw), host + noise(draw), 3 + noise(draw)

    reported = simulated(step, processes, 50 // STEPS, seed)
    names = [(news.name, news.cause) for each in reported for news in each]
    assert names == [("process 1", cause)]


def test_a_reader_whose_threads_read_several_batches_at_once_is_named_later() -> None:
    number = [0] * 3

    def step(draw: random.Random, rank: int) -> tuple[float, float, float]:
        number[rank] += 1
        burst = 80.0 if rank == 1 and number[rank] % 4 == 0 else 0.0
        return burst + noise(draw), noise(draw), 3 + noise(draw)

    (news,) = [news for reported in simulated(step, 3, 25, 1) for news in reported]
    assert news.name == "process 1" and news.cause == "load"


def test_a_window_without_steps_has_no_pace() -> None:
    assert paces_of([Interval(1.0, 1.0, 1.0, 0.0, 0)] * 20, 0.0) is None


def test_a_pace_is_of_a_step() -> None:
    usual, longer = Interval(0.4, 0.2, 1.0, 0.8, 2), Interval(3.0, 1.0, 3.0, 2.0, 2)
    paces = paces_of([usual] * 8 + [usual, longer], 0.5)
    assert paces is not None
    assert paces[1] == pytest.approx(Pace(0.8, 0.2, 0.1, 0.1, 0.4, 0.4))
    assert paces[4] == pytest.approx(Pace(2.15, 0.85, 0.3, 0.3, 0.7, 1.075))


# -- devices ---------------------------------------------------------------------------------------


def test_a_device_that_takes_longer_in_all_of_ten_checks_is_named_until_it_is_as_fast() -> None:
    rule = SlowDevices(["device 0", "device 1", "device 2"])
    slow, quiet = [[0.020, 0.025, 0.021]], [[0.020, 0.020, 0.021]]
    checks = slow * 9 + quiet + slow * 12 + quiet * 9
    reported = [(n, news) for n, check in enumerate(checks) for news in rule.judge(check)]
    assert [n for n, _ in reported] == [19, 27]  # when most of the last ten are quiet
    assert reported[0][1].share == pytest.approx(0.16) and reported[0][1].cause == "device"
    assert reported[0][1].text == (
        "device 1 is slow: it computes gradients in 25.0 ms, and others the same number of "
        "examples in 21.0 ms"
    )
    assert (reported[1][1].text, reported[1][1].share) == (
        "device 1 is as fast as the others again",
        0,
    )


@given(st.integers(0, 2**32), st.integers(2, 8))
def test_no_equal_device_is_named(seed: int, devices: int) -> None:
    draw, rule = random.Random(seed), SlowDevices([str(n) for n in range(devices)])
    checks = ([20 + noise(draw) for _ in range(devices)] for _ in range(200))
    assert not any(rule.judge(check) for check in checks)

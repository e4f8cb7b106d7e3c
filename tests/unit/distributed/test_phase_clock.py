"""The seconds of a process in each phase."""

import time

import pytest

from spmdtrain.distributed import progress
from spmdtrain.distributed.progress import CONTEXT, Phase, PhaseClock, phase


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> PhaseClock:
    """A new clock of this process, which counts a second at each look."""
    seconds = iter(range(10_000))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(seconds)))
    monkeypatch.setattr(CONTEXT, "clock", None)
    monkeypatch.setattr(CONTEXT, "channel", None)
    return progress.take_clock()


def test_the_time_of_an_inner_phase_does_not_count_as_that_of_the_outer(clock: PhaseClock) -> None:
    with phase(Phase.RESTORE), phase(Phase.COMPILE):
        pass
    with phase(Phase.EVALUATE), phase(Phase.LOAD):  # an evaluation reads its batches
        pass
    assert clock.read() == {"start": 1, "restore": 2, "compile": 1, "host": 2, "evaluate": 3}


def test_time_during_which_devices_run_steps_counts_as_that_of_steps(clock: PhaseClock) -> None:
    with phase(Phase.STEP):
        pass  # 1 s
    progress.end_interval(overlapped=False)
    with phase(Phase.LOAD):
        pass
    with phase(Phase.EVALUATE):
        pass
    before = clock.read()  # the looks at the clock count as HOST
    assert before == {"start": 1, "step": 1, "load": 1, "evaluate": 1, "host": 4}
    progress.end_interval(overlapped=True)  # the load, and HOST since the last call
    assert clock.read() == {"start": 1, "step": 6, "load": 0, "evaluate": 1, "host": 2}


def test_a_second_run_of_a_process_has_a_clock_of_its_own(clock: PhaseClock) -> None:
    assert progress.take_clock() is clock  # nothing but the start was counted
    with phase(Phase.STEP):
        pass
    assert progress.take_clock() is not clock

"""The seconds of a process in each phase."""

import time

import pytest

from spmdtrain.distributed import progress
from spmdtrain.distributed.context import CONTEXT
from spmdtrain.distributed.phase_clock import PhaseClock
from spmdtrain.distributed.progress import Phase, phase


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
    progress.count_overlapped(Phase.HOST, 0.5)  # the devices ran steps meanwhile
    assert clock.read() == {
        "start": 1,
        "restore": 2,
        "compile": 1,
        "host": 1.5,
        "evaluate": 3,
        "step": 0.5,
    }


def test_a_second_run_of_a_process_has_a_clock_of_its_own(clock: PhaseClock) -> None:
    assert progress.take_clock() is clock  # nothing but the start was counted
    with phase(Phase.STEP):
        pass
    assert progress.take_clock() is not clock

"""When a job without progress counts as hung."""

import time

import pytest

from spmdtrain.distributed.progress import HangTimer, Phase

LOAD, STEP = Phase.LOAD, Phase.STEP


class Job:
    """A job of two tasks, observed each half second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, timeout: float | None) -> None:
        self.now, self.changes = 1000.0, 0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.timer = HangTimer(timeout, 900, max_interval=1.0)

    def wait(self, seconds: float, *phases: Phase) -> float | None:
        """Makes a change, and then none; returns after which seconds the job counts as hung."""
        self.changes += 1
        until, began = self.now + seconds, self.now
        while True:
            if self.timer.hung_for(self.changes, phases):
                return self.now - began
            if self.now >= until:
                return None
            self.now += 0.5

    def train(self, seconds: float) -> None:
        for _ in range(60):
            assert self.wait(seconds, LOAD, STEP) is None


@pytest.mark.parametrize(("slowest", "limit"), [(1, 60), (10, 60), (30, 150), (59, 295)])
def test_the_limit_follows_from_the_slowest_step(
    monkeypatch: pytest.MonkeyPatch, slowest: float, limit: float
) -> None:
    job = Job(monkeypatch, None)
    job.train(1)
    assert job.wait(slowest, STEP, STEP) is None
    found = job.wait(2000, LOAD, STEP)
    assert found is not None and limit <= found <= limit + 1


@pytest.mark.parametrize(
    "phases",
    [
        *((Phase.COMPILE, STEP), (Phase.SAVE, Phase.SAVE), (Phase.HOST, STEP)),
        *((Phase.EVALUATE, STEP), (Phase.RESTORE, STEP), (Phase.COMPILED, Phase.COMPILED)),
    ],
)
def test_phases_that_say_nothing_of_the_next_keep_their_limit(
    monkeypatch: pytest.MonkeyPatch, phases: tuple[Phase, ...]
) -> None:
    job = Job(monkeypatch, None)
    job.train(1)
    assert job.wait(890, *phases) is None
    job.train(1)
    found = job.wait(2000, LOAD, STEP)
    assert found is not None and found < 61  # the long pause was not one of steps
    job = Job(monkeypatch, None)
    job.train(1)
    assert job.wait(2000, *phases) == 900


def test_the_first_steps_keep_the_default_since_they_are_only_dispatched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(monkeypatch, None)
    for _ in range(39):
        job.wait(0.5, LOAD, STEP)
    assert job.wait(2000, STEP, STEP) == 900


@pytest.mark.parametrize(("timeout", "limit"), [(0, None), (2, 2), (1200, 1200)])
def test_a_given_timeout_is_kept(
    monkeypatch: pytest.MonkeyPatch, timeout: float, limit: float | None
) -> None:
    job = Job(monkeypatch, timeout)
    job.train(1)
    assert job.wait(3000, LOAD, STEP) == limit

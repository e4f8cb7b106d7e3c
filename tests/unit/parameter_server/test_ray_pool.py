"""The wait for answers of servers, on a Ray whose servers may hang."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from spmdtrain.errors import ClusterError, PreemptedExit
from spmdtrain.parameter_server import ray_pool
from spmdtrain.parameter_server.ray_pool import await_answers


class ActorLost(Exception):
    pass


class Ray:
    """Answers calls, which are texts; each wait takes half a second of the fake clock."""

    exceptions = SimpleNamespace(RayActorError=ActorLost)

    def __init__(self, answered_at: dict[str, float]) -> None:
        self.answered_at, self.now = answered_at, 100.0

    def wait(
        self, calls: Sequence[str], num_returns: int, timeout: float
    ) -> tuple[list[str], list[str]]:
        self.now += timeout
        missing = [call for call in calls if self.answered_at[call] > self.now - 100.0]
        return [call for call in calls if call not in missing], missing

    def get(self, calls: Sequence[str]) -> list[str]:
        if "lost" in calls:
            raise ActorLost
        return [call.upper() for call in calls]


def await_from(
    ray: Ray, monkeypatch: pytest.MonkeyPatch, stop_at: float = 1e9
) -> tuple[list[Any], list[str]]:
    """The answers, and what was reported; a signal comes after `stop_at` seconds."""
    monkeypatch.setattr(ray_pool, "time", SimpleNamespace(monotonic=lambda: ray.now))
    silent: list[str] = []

    def check_interrupt() -> None:
        if ray.now - 100.0 > stop_at:
            raise PreemptedExit("SIGTERM")

    calls = {call: f"ps {n}" for n, call in enumerate(ray.answered_at)}
    try:
        return await_answers(ray, calls, silent.append, check_interrupt), silent
    except PreemptedExit:
        return [], silent


@pytest.mark.parametrize(("slowest", "reported"), [(19.0, []), (40.0, ["ps 1 and ps 2"])])
def test_silent_servers_are_reported_once(
    slowest: float, reported: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = Ray({"a": 0.2, "b": slowest, "c": slowest})
    assert await_from(ray, monkeypatch) == (["A", "B", "C"], reported)


def test_a_signal_ends_the_wait_for_a_server_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Ray({"a": 0.2, "b": 1e9})
    assert await_from(ray, monkeypatch, stop_at=35.0) == ([], ["ps 1"])
    assert ray.now - 100.0 < 36.0


def test_a_lost_server_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClusterError, match="a parameter server is lost"):
        await_from(Ray({"a": 0.2, "lost": 3.0}), monkeypatch)

"""Exchanges between processes that do not belong together."""

from collections.abc import Callable
from typing import Any

import jax
import pytest

from spmdtrain import UserError
from spmdtrain.distributed import process_group
from spmdtrain.distributed.progress import CONTEXT

NAMES = ["chief", "worker 0"]


class Store:
    """The key-value store of a job, whose other process answers as soon as one waits for it."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.other: process_group.Job | None = None

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        assert allow_overwrite or key not in self.values
        self.values[key] = value
        if self.other is not None and "/awaited/" in key:
            self.other.answer()

    def key_value_try_get(self, key: str) -> str:
        if key not in self.values:
            raise jax.errors.JaxRuntimeError("NOT_FOUND: no such key")
        return self.values[key]

    def blocking_key_value_get(self, key: str, timeout: int) -> str:
        if key not in self.values:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: timeout")
        return self.values[key]

    def key_value_delete(self, key: str) -> None:
        self.values.pop(key, None)


def jobs() -> tuple[process_group.Job, process_group.Job]:
    store = Store()
    chief, worker = (process_group.Job(NAMES, rank, store) for rank in (0, 1))
    return chief, worker


def agree() -> Any:
    return process_group.broadcast(3)


def evaluate() -> Any:
    return process_group.broadcast({"loss": 1.0})


def count() -> Any:
    return process_group.collect(1)


def calls_of(job: process_group.Job, *calls: Callable[[], Any]) -> list[Any]:
    CONTEXT.job = job
    return [call() for call in calls]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CONTEXT, "job", None)


def test_the_same_calls_exchange_values() -> None:
    chief, worker = jobs()
    calls_of(worker, count)
    assert calls_of(chief, count, agree) == [[1, 1], 3]
    assert calls_of(worker, agree) == [3]


def test_the_values_of_other_calls_are_never_taken() -> None:
    chief, worker = jobs()
    calls_of(chief, agree, agree)
    with pytest.raises(UserError, match="worker 0 and chief make different calls") as refused:
        calls_of(worker, agree, evaluate)
    text = str(refused.value)
    assert (
        "exchange 2 between the processes is made in worker 0 by broadcast, called in eva" in text
    )
    assert "[broadcast in evaluate], and in chief by broadcast, called in agree (" in text


def test_two_processes_that_wait_for_each_other_in_different_calls() -> None:
    chief, worker = jobs()
    chief.main.last = process_group.Exchange(1, "collect in count", "")  # it waits there
    chief.client.other = chief
    with pytest.raises(UserError, match=r"and in chief by collect in count; make the same"):
        calls_of(worker, evaluate)


def test_a_process_that_makes_its_next_step_without_the_call() -> None:
    chief, worker = jobs()
    worker.client.other = chief
    chief.points = 7
    worker.points = 6
    with pytest.raises(UserError, match=r"and in chief left out \(") as refused:
        calls_of(worker, evaluate)
    assert "by broadcast, called in evaluate (" in str(refused.value)


def test_a_process_that_has_ended_without_the_call() -> None:
    chief, worker = jobs()
    worker.answer(ended=True)
    with pytest.raises(UserError, match=r"and in worker 0 left out \(its script has ended\)"):
        calls_of(chief, count)


def test_a_process_that_is_behind_is_waited_for() -> None:
    chief, worker = jobs()
    chief.points = worker.points = 6
    chief.client.other = chief

    def late(key: str, timeout: int) -> str:
        attempts.append(timeout)
        if len(attempts) == 8:
            calls_of(chief, evaluate)
            CONTEXT.job = worker
        return Store.blocking_key_value_get(chief.client, key, timeout)

    attempts: list[int] = []
    chief.client.blocking_key_value_get = late
    assert calls_of(worker, evaluate) == [{"loss": 1.0}]
    assert attempts == [1_000, 2_000, 3_000, 4_000, 5_000, 5_000, 5_000, 5_000]

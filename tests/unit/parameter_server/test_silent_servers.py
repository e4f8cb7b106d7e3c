"""What a chief does if a server hangs while the chief waits for its answer, without Ray."""

import contextlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import optax
import pytest
from flax import nnx

from spmdtrain import RunConfig, Trainer
from spmdtrain.errors import PreemptedExit
from spmdtrain.parameter_server import executor as executor_module
from spmdtrain.parameter_server import ray_pool
from spmdtrain.parameter_server.executor import ServerExecutor

SIGNAL_AFTER = 30.0


class HangingRay:
    """The calls of `ps 1` get no answer. Its clock stands still except in `wait`."""

    exceptions = SimpleNamespace(RayActorError=ConnectionError)
    now = 0.0

    def wait(
        self, calls: Sequence[str], num_returns: int, timeout: float
    ) -> tuple[list[str], list[str]]:
        self.now += timeout
        assert self.now < 100, "the wait does not end"
        missing = [call for call in calls if "ps 1" in call]
        return [call for call in calls if call not in missing], missing

    def get(self, calls: Sequence[str]) -> list[str]:
        raise AssertionError(f"this would wait forever: {calls}")


def server(name: str) -> Any:
    def method(what: str) -> Any:
        return SimpleNamespace(remote=lambda: f"{what} of {name}")

    return SimpleNamespace(held=method("held"), counts=method("counts"))


@pytest.mark.parametrize(
    ("call", "lost"),
    [
        (lambda executor, state: executor.sync(state), "the state cannot be saved"),
        (lambda executor, state: executor.report(), "the counts of the servers are not known"),
    ],
    ids=["state", "report"],
)
def test_a_silent_server_is_named_and_a_signal_ends_the_wait(
    call: Any, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(
        model=lambda rngs: nnx.Linear(2, 1, rngs=rngs),
        objective=lambda model, batch: {"loss": model(batch)[:, 0] ** 2},
        optimizer=optax.sgd(0.1),
    )
    trainer.fit(np.ones((8, 2), np.float32), steps=1, global_batch_size=8)
    state = trainer.state
    assert state is not None

    ray, lines = HangingRay(), list[str]()
    for module in (ray_pool, executor_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: ray.now))

    def stop_if_received() -> None:
        if ray.now > SIGNAL_AFTER:
            raise PreemptedExit("SIGTERM")

    run = MagicMock()
    run.config = RunConfig(strategy="parameter_server", steps=1, global_batch_size=8)
    run.signals.stop_requested = lambda: ray.now > SIGNAL_AFTER
    run.signals.stop_if_received = stop_if_received
    run.logger.terminal.line = lines.append
    run.logger.terminal.waiting = contextlib.nullcontext
    job: Any = SimpleNamespace(
        ray=ray,
        servers=2,
        workers=1,
        serve=lambda *arguments, **keywords: [server("ps 0"), server("ps 1")],
        worker_pool=lambda make: MagicMock(),
    )
    executor = ServerExecutor(job, run, state, trainer.functions, MagicMock(), None)
    with pytest.raises(PreemptedExit):
        call(executor, state)
    assert lines == [
        "waiting for the servers for 20 s: no answer from ps 1",
        f"{lost}, because the parameter servers do not answer",
    ]
    assert SIGNAL_AFTER + 15 < ray.now < SIGNAL_AFTER + 17

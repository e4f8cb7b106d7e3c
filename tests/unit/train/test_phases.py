"""The shares of a run's time: waiting for the devices counts as steps, also on the host."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spmdtrain import FunctionModel, Loop, MeshSpec, Trainer
from spmdtrain.distributed.progress import CONTEXT, Phase
from spmdtrain.document.terminal import Terminal

X = {"x": np.ones((32, 4), np.float32)}
STEPS = 8
OPTIONS: dict[str, Any] = {
    "steps": STEPS,
    "global_batch_size": 8,
    "mesh": MeshSpec(devices=(0,)),
    "terminal": Terminal(quiet=True),
}


def product(x: jax.Array) -> jax.Array:
    """A product that takes far longer than the host needs for a step."""
    whole = jax.lax.fori_loop(0, 60, lambda _, a: a @ a / 500, jnp.ones((500, 500)) + x.sum() * 0)
    return whole[0, 0]


def train(callbacks: Any = (), validation: Any = None, **options: Any) -> None:
    Trainer(
        model=FunctionModel(lambda key: jnp.ones(4), lambda params, x: x @ params),
        objective=lambda model, batch: {"loss": model(batch["x"]) * product(batch["x"])},
        optimizer=optax.sgd(0.0),
        callbacks=callbacks,
        **OPTIONS | options,
    ).fit(X, validation=validation)


def loop_of_steps(with_batches: bool) -> None:
    def step(state: Any, batch: Any, key: Any) -> Any:
        return state, {"loss": product(batch["x"])}

    with Loop(**OPTIONS) as loop:
        state = loop.start(lambda key: {"params": {"w": jnp.zeros(())}}, train=X)
        compiled = loop.compile_step(step)
        batch = loop.shard_batch({"x": X["x"][:8]})
        for given in loop.batches() if with_batches else loop.steps():
            state, output = compiled(state, given if with_batches else batch)
            loop.end_step(state, output)


def busy(event: Any) -> None:
    """The host works while the devices do, and for a shorter time."""
    until = time.perf_counter() + 0.002
    while time.perf_counter() < until:
        pass


RUNS: dict[str, Callable[[], None]] = {
    "trainer": train,
    "several steps a dispatch": lambda: train(steps_per_dispatch=4),
    "callbacks beside the steps": lambda: train({"step": busy}),
    "loop": lambda: loop_of_steps(True),
    "loop without data": lambda: loop_of_steps(False),
}


def seconds_of(run: Callable[[], None]) -> dict[str, float]:
    run()
    assert CONTEXT.clock is not None
    found = CONTEXT.clock.read()
    return {phase: found.get(phase, 0.0) for phase in Phase}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_the_time_of_the_devices_counts_as_steps(name: str) -> None:
    found = seconds_of(RUNS[name])
    assert found["step"] > 3 * (found["host"] + found["load"]), found


@pytest.mark.slow
def test_the_time_of_an_evaluation_is_its_own() -> None:
    validation = {"x": np.ones((8 * STEPS, 4), np.float32)}
    found = seconds_of(lambda: train(validation=validation, eval_batch_size=8, steps=1))
    assert found["evaluate"] > 3 * (found["host"] + found["load"] + found["step"]), found

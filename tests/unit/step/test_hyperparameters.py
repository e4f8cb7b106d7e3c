"""Injected hyperparameters (`optax.inject_hyperparams`) across a resume."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import linear_model
import numpy as np
import optax
import pytest
from helpers import metrics

from spmdtrain import CallbackContext, Loop, TrainState, read_manifest
from spmdtrain.document.terminal import Terminal
from spmdtrain.run import main
from spmdtrain.step.hyperparameters import initial_values, injected
from spmdtrain.tree import named_leaves

RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 4)).astype(np.float32)
Y = X.sum(1, keepdims=True)
STEPS = 4
RATE = "inner_state/hyperparams/learning_rate"

EXPERIMENT = """
from dataclasses import dataclass
from functools import partial
import numpy as np, optax
from flax import nnx
from spmdtrain import Experiment, RunConfig

@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    steps: int | None = 2
    global_batch_size: int | None = 16
    log_every: int = 1
    learning_rate: float | None = 0.1

def squared_error(model, batch):
    return {"loss": (model(batch[0]) - batch[1]) ** 2}

def build(config):
    x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    return Experiment(
        model=partial(nnx.Linear, 4, 1),
        objective=squared_error,
        optimizer=optax.chain(
            optax.clip(1e9), optax.inject_hyperparams(optax.sgd)(config.learning_rate)
        ),
        train=(x, x.sum(1, keepdims=True)),
    )
"""


def nested(rate: float, momentum: float = 0.0) -> optax.GradientTransformation:
    """Injected twice: in a chain, and for one of two groups of parameters."""
    sgd = optax.inject_hyperparams(optax.sgd)(rate, momentum=momentum)
    groups = {
        "kernel": sgd,
        "bias": optax.inject_hyperparams(optax.sgd)(optax.constant_schedule(rate)),
    }
    by_name = optax.partition(groups, lambda params: {k: k for k in params})
    return optax.chain(optax.clip(1e9), by_name)


def moved(workdir: Path, rate: float, optimizer: Any = nested, **options: Any) -> dict[str, Any]:
    """How far the parameters go in the first step after a resume at step 2, and the rates then."""
    before: dict[str, Any] = {}
    after: dict[str, Any] = {}

    def keep(event: CallbackContext) -> None:
        params = jax.device_get(event.trainer.state.params)
        (before if event.event == "fit_start" else after).update(params)

    fitted = linear_model.trainer(
        optimizer=optimizer(rate),
        workdir=str(workdir),
        global_batch_size=16,
        callbacks={"fit_start": keep, "fit_end": keep},
        **options,
    )
    fitted.fit((X, Y), steps=3)
    assert fitted.state is not None
    rates = {n: float(x) for n, x in injected(fitted.state.opt_state).items()}
    return {n: after[n] - before[n] for n in after} | rates


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["mirrored", "fully_sharded", "central_storage"])
def test_a_changed_learning_rate_scales_the_first_update_after_a_resume(
    tmp_path: Path, strategy: str
) -> None:
    found = {}
    for rate in (0.1, 0.01):
        workdir = tmp_path / str(rate)
        linear_model.trainer(
            optimizer=nested(0.1),
            workdir=str(workdir),
            global_batch_size=16,
            strategy=strategy,
        ).fit((X, Y), steps=2)
        found[rate] = moved(workdir, rate, strategy=strategy)
    for name in ("kernel", "bias"):
        np.testing.assert_allclose(found[0.01][name], 0.1 * found[0.1][name], rtol=1e-4)
    assert np.abs(found[0.1]["kernel"]).max() > 1e-3


@pytest.mark.slow
def test_what_a_run_changed_itself_is_kept_unless_its_initial_value_changes(
    tmp_path: Path,
) -> None:
    def optimizer(rate: float, momentum: float = 0.0) -> optax.GradientTransformation:
        return optax.inject_hyperparams(optax.sgd)(rate, momentum=momentum)

    def halve(event: CallbackContext) -> None:
        if event.step == 1:
            state = event.trainer.state
            halved = jax.tree.map(lambda x: x * 0.5, state.opt_state.hyperparams)
            opt_state = state.opt_state._replace(hyperparams=halved)
            event.trainer.state = dataclasses.replace(state, opt_state=opt_state)

    linear_model.trainer(
        optimizer=optimizer(0.1, 0.8), workdir=str(tmp_path), callbacks={"step": halve}
    ).fit((X, Y), steps=2)
    fitted = linear_model.trainer(optimizer=optimizer(0.1, 0.6), workdir=str(tmp_path))
    fitted.fit((X, Y), steps=3)
    assert fitted.state is not None
    rates = {n: float(x) for n, x in fitted.state.opt_state.hyperparams.items()}
    assert rates["learning_rate"] == pytest.approx(0.05)  # no field has changed
    assert rates["momentum"] == pytest.approx(0.6)


@pytest.mark.slow
def test_the_command_uses_the_learning_rate_that_it_announces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text(EXPERIMENT)
    losses = {}
    for name, rate in (("same", 0.1), ("zero", 1e-9)):
        command = ["--config", str(tmp_path / "own.py"), "--workdir", str(tmp_path / name)]
        main(command)
        main([*command, "--steps", "4", "--learning-rate", str(rate)])
        losses[name] = [line["loss"] for line in metrics(tmp_path / name, "train")]
    same, zero = losses["same"], losses["zero"]
    assert same[:3] == zero[:3]
    assert zero[3] == pytest.approx(zero[2], rel=1e-5) and same[3] < 0.9 * same[2]
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("optimizer: ")]
    assert lines == ["optimizer: 1/hyperparams/learning_rate 0.1 -> 1e-09"]


@pytest.mark.slow
def test_a_schedule_is_no_initial_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rate, steps in ((0.1, 2), (0.01, 3)):
        schedule = optax.inject_hyperparams(optax.sgd)(optax.constant_schedule(rate), momentum=0.5)
        of = linear_model.trainer(optimizer=schedule, workdir=str(tmp_path), terminal=Terminal())
        of.fit((X, Y), steps=steps)
    lines = [line for line in capsys.readouterr().out.splitlines() if "optimizer: " in line]
    assert lines == ["changed since: optimizer: constant 0.1 -> 0.01"]
    assert read_manifest(tmp_path).identity.hyperparameters == {"hyperparams/momentum": 0.5}


@pytest.mark.slow
def test_a_loop_uses_it_too(tmp_path: Path) -> None:
    def train(rate: float, steps: int) -> float:
        optimizer = optax.inject_hyperparams(optax.sgd)(rate)

        def init(key: jax.Array) -> dict[str, Any]:
            params = {"w": jnp.zeros(())}
            return {"params": params, "opt_state": {"own": optimizer.init(params)}}

        def step(state: TrainState, batch: Any, key: jax.Array) -> tuple[TrainState, Any]:
            gradients = {"w": jnp.ones(())}
            updates, own = optimizer.update(gradients, state.opt_state["own"], state.params)
            params = optax.apply_updates(state.params, updates)
            return dataclasses.replace(state, params=params, opt_state={"own": own}), {
                "loss": batch.mean()
            }

        with Loop(steps=steps, workdir=str(tmp_path), terminal=Terminal(quiet=True)) as loop:
            state = loop.start(init)
            compiled = loop.compile_step(step)
            for _ in loop.steps():
                state, output = compiled(state, loop.shard_batch(np.ones((8,), np.float32)))
                loop.end_step(state, output)
            return float(state.params["w"])

    assert train(0.5, 2) == -1.0
    assert train(0.25, 3) == -1.25


def test_only_what_is_injected_is_found() -> None:
    params = {"hyperparams": {"learning_rate": jnp.ones(3)}}
    optimizer = optax.chain(optax.adam(0.1), optax.inject_hyperparams(optax.sgd)(0.5))
    assert initial_values(optimizer.init, params) == {"1/hyperparams/learning_rate": 0.5}
    assert list(named_leaves(injected(optimizer.init(params)))) == ["1/hyperparams/learning_rate"]
    assert initial_values(optax.adam(0.1).init, params) == {}

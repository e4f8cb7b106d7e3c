"""The same numbers on any number of devices, for the shipped experiments."""

import dataclasses
import importlib.util
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import DIGITS, LINEAR, MNIST

from spmdtrain import Experiment, MeshSpec, Trainer, TrainState
from spmdtrain.config.run_config import RunConfig
from spmdtrain.data.datasets import as_dataset
from spmdtrain.data.loader import train_batches
from spmdtrain.document.terminal import Terminal
from spmdtrain.sharding.mesh import resolve
from spmdtrain.step.program import plan_step
from spmdtrain.tree import named_leaves
from spmdtrain.xla import collectives

DEVICES = (1, 2, 4, 8)
# Computed but once, and canceled to nearly nothing, an element keeps the rounding of its terms:
# it is measured against the largest of its array.
FLOOR = 5e-6


def load(path: Path) -> Any:
    """An experiment's file as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def build(path: Path, **options: Any) -> tuple[Experiment, RunConfig]:
    """A shipped experiment's objects and configuration."""
    module = load(path)
    config = resolve(module.Config(**options), batch_shards=8)
    return module.build(config), config


def trainer_on(devices: int, experiment: Experiment, config: RunConfig, **options: Any) -> Trainer:
    mesh = MeshSpec(devices=tuple(range(devices)))
    return Trainer.from_experiment(
        experiment, config, mesh=mesh, terminal=Terminal(quiet=True), **options
    )


class Gradients:
    """Loss and gradients of the batch that follows a state, on so many devices."""

    def __init__(self, devices: int, experiment: Experiment, config: RunConfig) -> None:
        # An "optimizer" whose state is the gradient: what the shipped step made of it, exactly.
        experiment = dataclasses.replace(experiment, optimizer=optax.trace(decay=0.0))
        self.trainer = trainer_on(devices, experiment, config)
        self.devices, self.experiment, self.config = devices, experiment, config

    def __call__(self, state: TrainState) -> tuple[float, dict[str, np.ndarray]]:
        steps = self.trainer.functions
        common = dataclasses.replace(
            steps.init(0),
            step=jnp.asarray(np.asarray(state.step)),
            params=jax.device_get(state.params),
            model_state=jax.device_get(state.model_state),
            key=jnp.asarray(np.asarray(state.key)),
        )
        batch = first_batch(self.trainer, self.experiment, self.config, int(state.step))
        assert len(jax.tree.leaves(batch)[0].sharding.device_set) == self.devices
        step = plan_step(steps, batch).program()
        after, output = step(jax.device_put(common, steps.shardings), batch)
        found = {name: np.asarray(x) for name, x in named_leaves(after.opt_state.trace).items()}
        return float(output.metrics["loss"]), found


def first_batch(trainer: Trainer, experiment: Experiment, config: RunConfig, step: int) -> Any:
    """The batch of update `step`, placed as `fit` places it."""
    assert config.global_batch_size is not None
    return next(
        train_batches(
            as_dataset(experiment.train),
            config.global_batch_size,
            trainer.placement.batch,
            seed=config.seed,
            shuffle=True,
            start=step,
            stop=step + 1,
        )
    )


@pytest.fixture(params=["digits", pytest.param("mnist", marks=pytest.mark.nightly), "linear"])
def shipped(request: pytest.FixtureRequest) -> tuple[Experiment, RunConfig]:
    if request.param == "digits":
        return build(DIGITS, epochs=None, steps=120)
    if request.param == "mnist":
        data_dir = str(request.getfixturevalue("mnist"))
        return build(MNIST, data_dir=data_dir, epochs=None, steps=200)
    line = load(LINEAR)
    x = np.linspace(-1, 1, 400, dtype=np.float32)[:, None]
    experiment = Experiment(
        model=partial(nnx.Linear, 1, 1),
        objective=line.squared_error,
        optimizer=optax.sgd(0.1),
        train=(x, 3 * x + 2 + np.sin(1000 * x) / 10),
    )
    return experiment, resolve(RunConfig(epochs=2, global_batch_size=16), batch_shards=8)


def test_loss_and_gradients_from_a_common_state_are_equal_on_1_2_4_and_8_devices(
    shipped: tuple[Experiment, RunConfig],
) -> None:
    experiment, config = shipped
    trained = trainer_on(8, experiment, config)
    on_one, *on_more = (Gradients(devices, experiment, config) for devices in DEVICES)
    total = config.total_steps(len(as_dataset(experiment.train)))
    for point in (1, total // 2, total):
        trained.fit(experiment.train, steps=point)
        assert trained.state is not None
        loss, expected = on_one(trained.state)
        assert all(np.abs(gradient).max() > 0 for gradient in expected.values())
        for on_devices in on_more:
            other, found = on_devices(trained.state)
            np.testing.assert_allclose(other, loss, rtol=1e-5)
            for name, gradient in expected.items():
                np.testing.assert_allclose(
                    found[name],
                    gradient,
                    rtol=1e-5,
                    atol=FLOOR * np.abs(gradient).max(),
                    err_msg=f"{name} after step {point} on {on_devices.devices} devices",
                )


@pytest.mark.nightly
@pytest.mark.slow
def test_the_first_ten_losses_are_equal_on_1_2_4_and_8_devices(mnist: Path) -> None:
    experiment, config = build(MNIST, data_dir=str(mnist), epochs=None, steps=200)
    losses: dict[int, list[float]] = {devices: [] for devices in DEVICES}
    for devices in DEVICES:
        trainer_on(
            devices,
            experiment,
            config,
            log_every=1,
            callbacks={"log": lambda event, n=devices: losses[n].append(event.metrics["loss"])},
        ).fit(experiment.train, steps=10)
    assert len(losses[1]) == 10 and losses[1][9] < losses[1][0]
    for devices in DEVICES[1:]:
        np.testing.assert_allclose(losses[devices], losses[1], rtol=1e-4)


def test_the_step_all_reduces_each_gradient_once_and_has_no_all_gather() -> None:
    experiment, config = build(DIGITS)
    trainer = trainer_on(8, experiment, config)
    program = compiled(trainer, experiment, config)
    assert trainer.mesh is not None
    found = collectives.collectives(program, trainer.mesh)
    assert {collective.kind for collective in found} == {"all-reduce"}
    assert {collective.axes for collective in found} == {("data",)}
    parameters = sum(leaf.size for leaf in jax.tree.leaves(trainer.functions.abstract_state.params))
    loss_and_accuracy = 2
    assert sum(collective.bytes for collective in found) == 4 * (parameters + loss_and_accuracy)


def test_the_step_on_one_device_holds_no_collective() -> None:
    experiment, config = build(DIGITS)
    trainer = trainer_on(1, experiment, config)
    assert trainer.mesh is not None
    assert collectives.collectives(compiled(trainer, experiment, config), trainer.mesh) == []


def compiled(trainer: Trainer, experiment: Experiment, config: RunConfig) -> str:
    """The optimized HLO of the train step that `fit` would run."""
    steps, batch = trainer.functions, first_batch(trainer, experiment, config, 0)
    step = plan_step(steps, batch).program()
    text: str = step.lower(steps.abstract_state, batch).compile().as_text()
    return text


def test_the_state_is_initialized_directly_into_its_shardings() -> None:
    experiment, config = build(DIGITS)
    trainer = trainer_on(8, experiment, config)
    for name, leaf in named_leaves(trainer.functions.init(0)).items():
        assert len(leaf.sharding.device_set) == 8, name
        assert leaf.sharding.is_fully_replicated, name


def test_golden_first_step() -> None:
    experiment, config = build(DIGITS)
    trainer = trainer_on(8, experiment, config)
    result = trainer.fit(experiment.train, steps=1)
    assert trainer.state is not None
    norm = float(optax.tree.norm(trainer.state.params))
    message = (
        "the first step of digits_mlp has other numbers: initial parameters, the order of the "
        "data, dropout or the update changed. If that was meant, no earlier run can be "
        "reproduced or resumed any more: say so in CHANGELOG.md and put the new numbers here"
    )
    np.testing.assert_allclose([result.train["loss"], norm], GOLDEN, rtol=1e-5, err_msg=message)


GOLDEN = [2.414811134338379, 16.235841751098633]

"""A resume compares the program of the run with its own: settings, versions, optimizer, code."""

import dataclasses
import json
import os
import re
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import linear_model
import numpy as np
import optax
import pytest
from flax import nnx

from spmdtrain import Loop, MeshSpec, RunConfig, Trainer, UserError, read_manifest, weighted_mean
from spmdtrain.checkpoints.manifest import digest
from spmdtrain.checkpoints.run_identity import Identity, check_same_run
from spmdtrain.checkpoints.run_identity import changes as all_changes
from spmdtrain.config.run_config import config_as_json
from spmdtrain.document.terminal import Terminal
from spmdtrain.step.optimizer_record import (
    OptimizerRecord,
    changed_arguments,
    record_optimizer,
)

os.environ.setdefault("KERAS_BACKEND", "jax")  # read when Keras is first imported
X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
Y = X.sum(1, keepdims=True)


def train(workdir: Path, steps: int, **options: Any) -> Trainer:
    """Trains up to a step in a new trainer, which prints its lines."""
    defaults = {"log_every": 100, "trackers": (), "terminal": Terminal()}
    trainer = linear_model.trainer(workdir=str(workdir), **defaults | options)
    trainer.fit((X, Y), steps=steps)
    return trainer


def changes(output: str) -> list[str]:
    """The changes that a resume or a fork has printed, besides those of its length."""
    lines = [line.strip().partition(": ") for line in output.splitlines()]
    found = [text for label, _, text in lines if label in ("changed since", "changed")]
    return [text for text in found if not text.startswith("steps: ")]


def rewrite(workdir: Path, step: int, **fields: Any) -> None:
    """Replaces fields of the identity in a manifest."""
    path = workdir / "checkpoints" / str(step) / "manifest.json"
    content = json.loads(path.read_text())
    del content["sha256"]
    content["identity"] |= fields
    path.write_text(json.dumps(content | {"sha256": digest(content)}))


# -- settings and versions -------------------------------------------------------------------------

SETTINGS: dict[str, tuple[AbstractContextManager[Any], str]] = {
    "jax_threefry_partitionable": (
        jax.threefry_partitionable(False),
        "=True, and this process has False, which gives other numbers: set "
        "JAX_THREEFRY_PARTITIONABLE=1, continue with other numbers (resume_anyway=True), or "
        "another",
    ),
    "jax_default_matmul_precision": (
        jax.default_matmul_precision("highest"),
        "=not set, and this process has highest, which gives other numbers: unset "
        "JAX_DEFAULT_MATMUL_PRECISION, continue",
    ),
    "jax_default_prng_impl": (
        jax.default_prng_impl("rbg"),
        "=threefry2x32, and this process has rbg, which gives other numbers: set "
        "JAX_DEFAULT_PRNG_IMPL=threefry2x32, or another workdir",
    ),
}


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["jax_threefry_partitionable"]
    + [pytest.param(name, marks=pytest.mark.slow) for name in list(SETTINGS)[1:]],
)
def test_a_resume_under_a_setting_of_another_meaning_is_refused_with_the_way_back(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, 2)
    context, message = SETTINGS[name]
    with context:
        with pytest.raises(UserError) as caught:
            train(tmp_path, 4)
        assert f"{tmp_path}/checkpoints/2 was trained with {name}{message}" in str(caught.value)
        capsys.readouterr()
        if name == "jax_default_prng_impl":  # whose key has another shape
            with pytest.raises(UserError, match="another random number generator: key is uint32"):
                train(tmp_path, 4, resume_anyway=True)
        else:
            assert train(tmp_path, 4, resume_anyway=True).step == 4
            assert [line for line in changes(capsys.readouterr().out) if name in line]
    assert train(tmp_path, 6, resume_anyway=True).step == 6


@pytest.mark.slow
def test_other_settings_and_versions_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, 1)
    capsys.readouterr()
    with jax.numpy_rank_promotion("raise"):
        train(tmp_path, 2)
    assert changes(capsys.readouterr().out) == ["jax_numpy_rank_promotion: allow -> raise"]
    versions = dict(read_manifest(str(tmp_path)).identity.versions)
    rewrite(tmp_path, 2, versions=versions | {"jax": "0.1"})
    train(tmp_path, 3)
    found = changes(capsys.readouterr().out)
    assert f"version of jax: 0.1 -> {jax.__version__}" in found


# -- the optimizer ---------------------------------------------------------------------------------


PARAMS = {
    "kernel": jax.ShapeDtypeStruct((4, 1), np.float32),
    "bias": jax.ShapeDtypeStruct((1,), np.float32),
}


def identity(optimizer: Any) -> Identity:
    """The identity of a run, of which the optimizer alone matters."""
    config = config_as_json(RunConfig(global_batch_size=8))
    return Identity(config, {}, {}, "", update=record_optimizer(optimizer, PARAMS))


def decayed_by(number: float) -> optax.GradientTransformation:
    """A chain with an own transformation, whose constant has no name."""
    half = optax.stateless(lambda updates, params: jax.tree.map(lambda x: x * number, updates))
    return optax.chain(optax.clip(9.0), half)


def layerwise(rate: float) -> optax.GradientTransformation:
    groups = {"a": optax.sgd(0.1), "b": optax.sgd(rate)}
    return optax.partition(groups, {"kernel": "a", "bias": "b"})


def masked(name: str) -> optax.GradientTransformation:
    mask = {"kernel": name == "kernel", "bias": name == "bias"}
    return optax.chain(optax.add_decayed_weights(0.1, mask), optax.sgd(0.1))


def every(steps: int) -> Any:
    return optax.MultiSteps(optax.adam(0.1), steps)


KINDS: dict[str, tuple[Any, Any, str]] = {
    "yogi": (optax.adam(0.1), optax.yogi(0.1), "scale_by_adam -> scale_by_yogi"),
    "adamax": (optax.adam(0.1), optax.adamax(0.1), "scale_by_adam -> scale_by_adamax"),
    "radam": (optax.adam(0.1), optax.radam(0.1), "scale_by_adam -> scale_by_radam"),
    "nadam": (optax.adam(0.1), optax.nadam(0.1), "scale_by_adam.nesterov: False -> True"),
    "sign": (optax.sgd(0.1), optax.sign_sgd(0.1), "chain(identity, scale) there and chain(scale_b"),
    "nesterov": (
        optax.sgd(0.1, 0.9),
        optax.sgd(0.1, 0.9, nesterov=True),
        "trace.nesterov: False -> True",
    ),
    "clip": (
        optax.chain(optax.clip(1.0), optax.sgd(0.1)),
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
        "clip -> clip_by_global_norm",
    ),
    "inside": (
        optax.inject_hyperparams(optax.adam)(0.1),
        optax.inject_hyperparams(optax.adam)(0.1, nesterov=True),
        "inject_hyperparams there and inject_hyperparams here, with other operations",
    ),
    "wrapped": (
        optax.MultiSteps(optax.adam(0.1), 2),
        optax.MultiSteps(optax.nadam(0.1), 2),
        "MultiSteps there and MultiSteps here (scale_by_adam.nesterov: False -> True)",
    ),
    "mask": (masked("kernel"), masked("bias"), "with other operations"),
}


@pytest.mark.parametrize("name", KINDS)
def test_another_optimizer_with_the_same_state_is_refused_by_name(name: str) -> None:
    before, here, message = KINDS[name]
    with pytest.raises(UserError) as caught:
        check_same_run(identity(before), identity(here), "runs/x/1", 1)
    assert "runs/x/1 is of another optimizer, with the same state: " in str(caught.value)
    assert message in str(caught.value) and "(resume_anyway=True)" in str(caught.value)


CONSTANTS: dict[str, tuple[Any, Any, list[str]]] = {
    "rate": (optax.adam(0.1), optax.adam(0.01), ["scale.step_size: -0.1 -> -0.01"]),
    "b1": (optax.adam(0.1), optax.adam(0.1, b1=0.5), ["scale_by_adam.b1: 0.9 -> 0.5"]),
    "accumulation": (every(2), every(4), ["MultiSteps.every_k_schedule: 2 -> 4"]),
    "own": (decayed_by(0.5), decayed_by(0.25), ["decayed_by.number: 0.5 -> 0.25"]),
    "group": (layerwise(0.1), layerwise(0.3), ["scale.step_size: -0.1 -> -0.3"]),
    "swapped": (
        layerwise(0.3),
        optax.partition({"b": optax.sgd(0.1), "a": optax.sgd(0.3)}, {"kernel": "a", "bias": "b"}),
        ["constants: those of some parameters have changed"],
    ),
    "schedule": (
        optax.sgd(optax.cosine_decay_schedule(0.1, 9)),
        optax.sgd(optax.linear_schedule(0.1, 0, 9)),
        ["another schedule", "cosine_decay_schedule -> polynomial_schedule"],
    ),
    "length": (
        optax.sgd(optax.cosine_decay_schedule(0.1, 9)),
        optax.sgd(optax.cosine_decay_schedule(0.1, 90)),
        ["cosine_decay_schedule.decay_steps: 9 -> 90"],
    ),
    "same": (optax.adam(0.1), optax.adam(0.1), []),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_other_constants_of_an_optimizer_are_changes(name: str) -> None:
    before, here, expected = CONSTANTS[name]
    saved, now = identity(before), identity(here)
    check_same_run(saved, now, "runs/x/1", 1)
    assert all_changes(saved, now) == [f"optimizer: {text}" for text in expected]


@pytest.mark.slow
def test_the_optimizer_is_recognized_on_other_devices_and_with_other_parts_of_a_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def schedule(step: Any) -> Any:
        return 0.1 * 0.9**step

    def optimizer() -> Any:
        decayed = optax.adamw(schedule, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p))
        return optax.chain(optax.clip_by_global_norm(1.0), decayed)

    train(tmp_path, 1, optimizer=optimizer())
    others: list[dict[str, Any]] = [
        {"mesh": MeshSpec(devices=(0,))},
        {"strategy": "fully_sharded", "microbatches": 2, "uneven_batch": "pad"},
    ]
    capsys.readouterr()
    for steps, options in enumerate(others, start=2):
        train(tmp_path, steps, optimizer=optimizer(), **options)
    found = changes(capsys.readouterr().out)
    assert found and not [text for text in found if text.startswith(("optimizer", "code"))]


def test_of_equal_layers_the_first_and_the_last_stand_for_all() -> None:
    def record(rates: list[float]) -> OptimizerRecord:
        groups = {str(n): optax.adam(rate) for n, rate in enumerate(rates)}
        params = {f"layer_{n}": {"kernel": jax.ShapeDtypeStruct((3, 2), "f4")} for n in range(9)}
        labels = {f"layer_{n}": {"kernel": "0" if n < 8 else "1"} for n in range(9)}
        return record_optimizer(optax.partition(groups, labels), params)

    before = record([0.1, 0.2])
    assert record([0.1, 0.2]) == before and len(before.numbers) < 40
    assert changed_arguments(before, record([0.1, 0.3])) == ["scale.step_size: -0.2 -> -0.3"]


@pytest.mark.slow
def test_a_frozen_parameter_makes_no_other_optimizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    train(tmp_path, 1, optimizer=optimizer)
    capsys.readouterr()
    train(tmp_path, 2, optimizer=optimizer, freeze=("bias",))
    assert changes(capsys.readouterr().out) == [
        "freeze: [] -> ['bias']",
        "optimizer: its operations are not compared, because freeze differs",
    ]


@pytest.mark.slow
def test_with_other_versions_operations_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, 1, optimizer=optax.adam(0.1))
    versions = dict(read_manifest(str(tmp_path)).identity.versions)
    rewrite(tmp_path, 1, versions=versions | {"optax": "0.1"})
    capsys.readouterr()
    train(tmp_path, 2, optimizer=optax.adam(0.2, nesterov=True))
    assert changes(capsys.readouterr().out) == [
        "optimizer: scale.step_size: -0.1 -> -0.2",
        "optimizer: scale_by_adam.nesterov: False -> True",
        "optimizer: its operations are not compared, because the version of optax differs",
        f"version of optax: 0.1 -> {optax.__version__}",
    ]


@pytest.mark.slow
def test_a_fork_and_resume_anyway_print_what_a_resume_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "run", 1, optimizer=optax.adam(0.1))
    with pytest.raises(UserError, match="checkpoints/1 is of another optimizer, with the same"):
        train(tmp_path / "run", 2, optimizer=optax.yogi(0.1))
    options: dict[str, dict[str, Any]] = {
        "fork": {"fork_from": str(tmp_path / "run")},
        "run": {"resume_anyway": True},
    }
    for name, given in options.items():
        capsys.readouterr()
        assert train(tmp_path / name, 2, optimizer=optax.yogi(0.1), **given).step == 2
        assert changes(capsys.readouterr().out)[:1] == [
            "optimizer: chain(scale_by_adam, scale) -> chain(scale_by_yogi, scale), with other "
            "operations"
        ]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("of_keras", [True, False])
def test_an_optimizer_of_keras_is_known_by_its_class_and_arguments(
    of_keras: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keras = pytest.importorskip("keras")

    base: Any = keras.optimizers.SGD

    class Own(base):  # type: ignore[misc]
        """Of the user: its update is traced."""

    kind = base if of_keras else Own

    def fit(steps: int, optimizer: Any) -> None:
        layers = [keras.Input((4,)), keras.layers.Dense(1, name="dense")]
        model = keras.Sequential(layers, name="net")
        model.compile(optimizer=optimizer, loss="mse")
        given: dict[str, Any] = {
            "global_batch_size": 8,
            "log_every": 100,
            "terminal": Terminal(),
            "trackers": (),
        }
        Trainer.from_keras(model, workdir=str(tmp_path), **given).fit((X, Y), steps=steps)

    fit(1, kind(0.1, momentum=0.9))
    capsys.readouterr()
    fit(2, kind(0.1, momentum=0.5))
    (line,) = changes(capsys.readouterr().out)
    assert line == "optimizer: " + ("momentum: 0.9 -> 0.5" if of_keras else "constant 0.9 -> 0.5")
    with pytest.raises(UserError, match="another optimizer, with the same state"):
        fit(3, kind(0.1, momentum=0.5, nesterov=True))


# -- functions of the user -------------------------------------------------------------------------


def absolute_error(model: Any, batch: Any) -> Any:
    return {"loss": abs(model(batch[0]) - batch[1])}


@pytest.mark.slow
def test_changed_functions_of_a_trainer_are_printed_by_their_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def noisy(example: Any, rng: np.random.Generator) -> Any:
        return example[0] + rng.normal(size=4).astype(np.float32), example[1]

    train(tmp_path, 1)
    capsys.readouterr()
    train(tmp_path, 2)
    assert changes(capsys.readouterr().out) == []
    train(
        tmp_path,
        3,
        objective=absolute_error,
        augment=noisy,
        model=partial(nnx.Linear, 4, 1, use_bias=True),
    )
    found = [re.split("[,:]", text)[0] for text in changes(capsys.readouterr().out)]
    assert found == ["code of augment", "code of model", "code of objective"]


@pytest.mark.slow
def test_changed_functions_of_a_loop_are_printed_by_their_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fit(steps: int, optimizer: Any) -> None:
        def init(key: Any) -> dict[str, Any]:
            params = {"w": jax.random.normal(key, (4, 1))}
            return {"params": params, "opt_state": optimizer.init(params)}

        def update(state: Any, batch: Any, key: Any) -> Any:
            def loss(params: Any) -> Any:
                return weighted_mean((batch[0] @ params["w"] - batch[1]) ** 2)

            value, gradients = jax.value_and_grad(loss)(state.params)
            updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            return dataclasses.replace(state, params=params, opt_state=opt_state), {"loss": value}

        options: dict[str, Any] = {"global_batch_size": 8, "log_every": 100, "trackers": ()}
        given = {"workdir": str(tmp_path), "terminal": Terminal()}
        with Loop(steps=steps, **options | given) as loop:
            state = loop.start(init, train=(X, Y))
            step = loop.compile_step(update)
            for batch in loop.batches():
                state, output = step(state, batch)
                loop.end_step(state, output)

    fit(1, optax.sgd(0.1, 0.9))
    capsys.readouterr()
    fit(2, optax.sgd(0.1, 0.9))
    assert changes(capsys.readouterr().out) == []
    fit(3, optax.sgd(0.1, 0.9, nesterov=True))
    found = [re.split("[,:]", text)[0] for text in changes(capsys.readouterr().out)]
    assert found == ["code of init", "code of step"]


@pytest.mark.nightly
@pytest.mark.slow
def test_numbers_in_64_bits_are_the_data_that_a_step_computes_with(tmp_path: Path) -> None:
    wide = (X.astype(np.float64), Y.astype(np.float64))
    trainer = linear_model.trainer(workdir=str(tmp_path))
    trainer.fit((X, Y), steps=1)
    trainer.fit(wide, steps=2)
    for steps, data in ((3, wide), (4, (X, Y)), (5, wide)):
        resumed = linear_model.trainer(workdir=str(tmp_path))
        resumed.fit(data, steps=steps)
        assert resumed.step == steps
    with pytest.raises(UserError, match="other data: crc32 was"):
        trainer = linear_model.trainer(workdir=str(tmp_path))
        trainer.fit((wide[0] + 1, wide[1]), steps=6)


@pytest.mark.slow
def test_a_checkpoint_that_recorded_64_bits_is_refused(tmp_path: Path) -> None:
    train(tmp_path, 2)
    manifest = tmp_path / "checkpoints" / "2" / "manifest.json"
    data = json.loads(manifest.read_text())["identity"]["dataset"]
    arrays = {name: x.replace("float32", "float64") for name, x in data["arrays"].items()}
    assert arrays != data["arrays"]
    rewrite(tmp_path, 2, dataset=data | {"arrays": arrays, "crc32": data["crc32"] + 1})
    with pytest.raises(UserError, match=r"other data: arrays was .*float64.*, or another workdir"):
        train(tmp_path, 4)

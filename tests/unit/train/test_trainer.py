"""The Python API: what `Trainer` takes, calls, writes and refuses."""

import copy
import json
import pickle
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import linear_model
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import metrics, saved_steps, status
from jax.sharding import PartitionSpec
from linear_model import squared_error

from spmdtrain import (
    CallbackContext,
    FunctionModel,
    MeshSpec,
    NonFiniteError,
    RunConfig,
    Subset,
    Trainer,
    UserError,
    errors,
    read_manifest,
)
from spmdtrain.data.datasets import as_dataset
from spmdtrain.document.terminal import Terminal
from spmdtrain.sharding.rules import Rule
from spmdtrain.step.metrics import RESERVED
from spmdtrain.train.metrics_reader import add_advice
from spmdtrain.tree import named_leaves

X = np.random.default_rng(1).normal(size=(40, 4)).astype(np.float32)
Y = (X @ np.array([[1.0], [-2.0], [0.5], [3.0]], np.float32)).astype(np.float32)


def trainer(**options: Any) -> Trainer:
    return linear_model.trainer(**{"optimizer": optax.sgd(0.05)} | options)


@pytest.mark.slow
def test_without_a_workdir_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = trainer().fit((X, Y), validation=(X, Y), test=(X, Y), epochs=2)
    assert list(tmp_path.iterdir()) == []
    assert result.step == 10
    assert result.test == result.validation and result.test["loss"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"remat": "full"}, {"microbatches": 2}, {"exact": 8}], ids=str)
def test_an_objective_may_take_entries_out_of_its_batch(options: dict[str, Any]) -> None:
    def objective(model: Any, batch: Any) -> Any:
        labels = batch.pop("labels")
        return {"loss": ((model(batch["x"]) - labels) ** 2).mean(1)}

    def reference(model: Any, batch: Any) -> Any:
        return {"loss": ((model(batch["x"]) - batch["labels"]) ** 2).mean(1)}

    # As many outputs as rows: without its labels, a batch would look like values of pairs.
    data = {"x": X[:16], "labels": np.tile(Y[:16], 16)}
    one_device = {"mesh": MeshSpec(devices=(0,)), "model": nnx.Linear(4, 16, rngs=nnx.Rngs(0))}
    results = [
        trainer(objective=f, **one_device, **options).fit(
            data, validation=data, steps=2, global_batch_size=16
        )
        for f in (objective, reference)
    ]
    assert results[0].validation == results[1].validation


@pytest.mark.slow
def test_the_initialization_of_the_model_is_traced_once() -> None:
    traces = []

    def model(rngs: nnx.Rngs) -> nnx.Module:
        traces.append(rngs)
        return nnx.Linear(4, 1, rngs=rngs)

    trainer(model=model).fit((X, Y), steps=1)
    assert len(traces) == 1


@pytest.mark.slow
def test_fit_takes_a_batch_size_per_device() -> None:
    devices = MeshSpec(devices=(0, 1, 2, 3))
    fitted = trainer(mesh=devices)
    fitted.fit((X, Y), steps=3, batch_size_per_device=2)
    same = trainer(mesh=devices)
    same.fit((X, Y), steps=3, global_batch_size=8)
    assert fitted.state is not None and same.state is not None
    for one, other in zip(*map(jax.tree.leaves, (fitted.state, same.state)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_steps_and_epochs_are_totals() -> None:
    fitted = trainer()
    assert fitted.fit((X, Y), epochs=1).step == 5
    assert fitted.fit((X, Y), epochs=2).step == 10
    assert fitted.fit((X, Y), steps=4).step == 10
    whole = trainer()
    whole.fit((X, Y), epochs=2)
    for name, leaf in named_leaves(whole.state).items():
        if name != "key":
            np.testing.assert_array_equal(leaf, named_leaves(fitted.state)[name])


@pytest.mark.slow
def test_callbacks_are_called_at_their_moments_and_can_stop_the_run(tmp_path: Path) -> None:
    heard: list[tuple[str, int]] = []

    def hear(event: CallbackContext) -> None:
        heard.append((event.event, event.step))
        if event.event == "step" and event.step == 7:
            event.trainer.stop()

    moments = ("fit_start", "step", "log", "evaluation", "checkpoint", "fit_end")
    fitted = trainer(
        workdir=str(tmp_path), log_every=3, callbacks={moment: [hear] for moment in moments}
    )
    result = fitted.fit((X, Y), validation=(X, Y), epochs=3)
    assert result.step == 7
    assert heard[0] == ("fit_start", 0) and heard[-1] == ("fit_end", 7)
    steps = {moment: [s for m, s in heard if m == moment] for moment in moments}
    assert steps["step"] == [1, 2, 3, 4, 5, 6, 7]
    assert steps["log"] == [1, 3, 6, 7]
    assert steps["evaluation"] == steps["checkpoint"] == [5, 7]
    assert [line["step"] for line in metrics(tmp_path, "eval")] == [5, 7]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        # An unknown moment or option names the nearest.
        ({"callbacks": {"on_step": print}}, r"'on_step'.*'step'"),
        ({"log_evry": 3}, r"'log_evry'.*'log_every'"),
        # What belongs to build is no keyword.
        ({"learning_rate": 3.0}, "learning_rate is"),
        # Values of the wrong type.
        ({"seed": 1.5}, "seed is 1.5: it must be a whole number"),
        ({"steps": "3"}, "steps is '3': it must be a whole number"),
        ({"log_every": None}, "log_every is None: it must be a whole number"),
        ({"checkpoint_every_seconds": "1"}, "checkpoint_every_seconds is '1': it must be a number"),
        # Callbacks that are none.
        (
            {"callbacks": print},
            "callbacks is a builtin_function_or_method: it must be a dictionary of events",
        ),
        (
            {"callbacks": [print]},
            "a callback is a builtin_function_or_method, which has no method named after",
        ),
        ({"callbacks": {"log": 3}}, r"callbacks\['log'\] is a int: it must be a function"),
        ({"callbacks": {"log": [print, None]}}, r"callbacks\['log'\] is a NoneType"),
        # An evaluation at each checkpoint is the training's own.
        (
            {"eval_at_checkpoints": True, "evaluated_by": "evaluator"},
            "an evaluator evaluates",
        ),
        (
            {"eval_at_checkpoints": True, "evaluated_by": "evaluator", "workdir": "there"},
            "an evaluator evaluates",
        ),
    ],
    ids=str,
)
def test_what_is_no_option_of_a_trainer_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        trainer(**options)


UNFIT: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    # Options of the trainer, and arguments of fit.
    "no length": ({}, {"steps": None}, "epochs or steps"),
    "two lengths": ({}, {"epochs": 1, "steps": 2}, "epochs is 1 and steps is 2"),
    "two batches": ({}, {"global_batch_size": 8, "batch_size_per_device": 1}, "one of the two"),
    "no numbers": ({}, {"train": {"name": np.array(["a"] * 8)}}, r"'name'.*<U1"),
    "no rows": ({}, {"validation": (X[:0], Y[:0])}, "validation data"),
    "evaluations at checkpoints, no workdir": (
        {"eval_at_checkpoints": True},
        {"validation": (X, Y)},
        "workdir is not given: give a folder",
    ),
    "evaluations at checkpoints, no validation split": (
        {"eval_at_checkpoints": True, "workdir": "there"},
        {},
        "needs a validation split",
    ),
    "a best metric that no evaluation gives": (
        {"workdir": "there", "best_metric": "acuracy"},
        {"validation": (X, Y)},
        r"'acuracy'.* loss",
    ),
}


@pytest.mark.parametrize(("options", "arguments", "message"), UNFIT.values(), ids=UNFIT)
def test_what_cannot_be_fitted_is_refused(
    options: dict[str, Any],
    arguments: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = {"train": (X, Y), "steps": 1, **arguments}
    with pytest.raises(UserError, match=message):
        trainer(**options).fit(arguments.pop("train"), **arguments)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("batch_size", "Did you mean 'global_batch_size'?"),
        ("num_steps", "Did you mean 'steps'?"),
        ("max_steps", "Did you mean 'steps'?"),
        ("validation_data", "Did you mean 'validation'?"),
        ("callbacks", "Give 'callbacks' to the Trainer."),
        ("validation_freq", "Give 'eval_every_steps' to the Trainer."),
    ],
)
def test_a_keyword_that_fit_does_not_have_gets_a_suggestion(name: str, hint: str) -> None:
    with pytest.raises(UserError) as raised:
        trainer().fit((X, Y), **{name: 1})  # type: ignore[arg-type]
    assert str(raised.value) == f"fit has no option {name!r}. {hint}"
    with pytest.raises(UserError, match="fit has no option"):  # before that train is missing
        trainer().fit(**{name: 1})  # type: ignore[arg-type]


@pytest.mark.slow
def test_weights_count_in_the_gradient_as_in_the_mean() -> None:
    weights = np.array([0.0, 1.0, 3.0, 0.5] * 10, np.float32)

    def weighted(model: Any, batch: tuple[jax.Array, ...]) -> dict[str, Any]:
        x, y, w = batch
        return {"loss": ((model(x) - y)[:, 0] ** 2, w), "heavy": (w > 1, w)}

    def start(key: jax.Array) -> dict[str, jax.Array]:
        return {"w": jnp.ones((4, 1))}

    model = FunctionModel(start, lambda params, x: x @ params["w"])
    fitted = trainer(model=model, objective=weighted, shuffle=False, global_batch_size=40)
    result = fitted.fit((X, Y, weights), steps=1)
    error, w = X @ np.ones((4, 1)) - Y, weights[:, None]
    np.testing.assert_allclose(result.train["loss"], (w * error**2).sum() / w.sum(), rtol=1e-5)
    np.testing.assert_allclose(result.train["heavy"], 30 / 45, rtol=1e-6)
    gradient = 2 * X.T @ (w * error) / w.sum()
    assert fitted.state is not None
    np.testing.assert_allclose(fitted.state.params["w"], 1 - 0.05 * gradient, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["loss", "params"])
def test_a_non_finite_loss_or_state_stops_the_run_and_is_never_saved(
    tmp_path: Path, where: str
) -> None:
    x = X.copy()
    if where == "loss":
        x[19] = np.nan  # in batch 2
    options: dict[str, Any] = {"optimizer": optax.sgd(3e38)} if where == "params" else {}
    fitted = trainer(
        workdir=str(tmp_path), shuffle=False, checkpoint_every_steps=1, log_every=100, **options
    )
    # At step 3 a loss that is NaN; or, at step 1, a finite one whose update is not.
    expected = r"step 3: loss and params" if where == "loss" else r"step 1: params not finite"
    with pytest.raises(NonFiniteError, match=expected):
        fitted.fit((x, Y), steps=5)
    saved = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert saved == (["1", "2"] if where == "loss" else [])
    found = status(tmp_path)
    assert found["status"] == "failed" and expected[:6] in found["reason"]
    if where == "loss":
        assert (found["step"], fitted.state) == (2, None)
        with pytest.raises(NonFiniteError, match="step 3"):  # it resumes from the last save
            fitted.fit((x, Y), steps=5)


@pytest.mark.parametrize(
    ("options", "loss", "advice"),
    [
        ({"workdir": "runs/a"}, "nan", ". JAX_DEBUG_NANS=1 with jit=False names the operation"),
        ({}, "inf", ". JAX_DEBUG_INFS=1 with jit=False names the operation"),
        ({}, "-inf", ". JAX_DEBUG_INFS=1 with jit=False names the operation"),
        ({"steps_per_dispatch": 4}, "nan", ""),  # which needs compiled steps
        ({"strategy": "parameter_server", "workdir": "runs/a"}, "nan", ""),
    ],
)
def test_a_script_gets_only_advice_that_works_for_its_run(
    options: dict[str, Any], loss: str, advice: str
) -> None:
    message = f"step 3: loss not finite (loss {loss})"
    error = NonFiniteError(message, 3, is_infinite="inf" in loss)
    add_advice(error, RunConfig(**options))
    assert str(error) == message + advice and error.step == 3


@pytest.mark.slow
def test_saving_by_seconds_follows_the_clock(tmp_path: Path) -> None:
    now = [0.0]

    def tick(event: CallbackContext) -> None:
        now[0] += 1.0

    fitted = trainer(
        workdir=str(tmp_path),
        checkpoint_every_seconds=4,
        keep_latest=10,
        clock=lambda: now[0],
        callbacks={"step": tick},
    )
    fitted.fit((X, Y), steps=10)
    saved = sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir())
    assert saved == [4, 8, 10]


@pytest.mark.slow
def test_the_best_by_the_named_metric_is_kept_beside_the_newest(tmp_path: Path) -> None:
    losses = {}

    def note(event: CallbackContext) -> None:
        losses[event.step] = event.metrics["distance"]

    def objective(model: Any, batch: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
        x, y = batch
        return {"loss": (model(x) - y) ** 2, "distance": jnp.abs(model(x) - y)}

    fitted = trainer(
        objective=objective,
        workdir=str(tmp_path),
        best_metric="distance",
        best_direction="max",
        keep_latest=2,
        keep_best=1,
        callbacks={"evaluation": note},
    )
    fitted.fit((X, Y), validation=(X, Y), epochs=6)
    best = max(losses, key=lambda step: losses[step])
    assert best == 5  # the error only falls
    saved = sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir())
    assert saved == [5, 25, 30]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "step"),
    [
        ({"eval_every_steps": 2, "checkpoint_every_steps": 3}, 2),
        ({"eval_every_steps": 2, "checkpoint_every_steps": 2}, None),
        ({"eval_every_steps": 4, "checkpoint_every_steps": 2}, None),
        ({"eval_every_steps": 2, "checkpoint_every_steps": 3, "keep_best": 0}, None),
    ],
)
def test_an_evaluation_that_can_give_no_best_checkpoint_is_named_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: dict[str, Any], step: int | None
) -> None:
    fitted = trainer(workdir=str(tmp_path), terminal=Terminal(), **options)
    fitted.fit((X, Y), steps=6, validation=(X, Y))
    said = [x for x in capsys.readouterr().out.splitlines() if x.startswith("the best checkpoint")]
    assert len(said) == (step is not None)
    assert all(f"; step {step} is evaluated and not saved: " in line for line in said)


@pytest.mark.slow
def test_a_metric_that_a_callback_adds_selects_the_best_checkpoint(tmp_path: Path) -> None:
    def add(event: CallbackContext) -> None:
        event.metrics["score"] = -abs(event.step - 10)

    options: dict[str, Any] = {"best_direction": "max", "keep_latest": 1}
    scored = {"evaluation": add}
    fitted = trainer(workdir=str(tmp_path), best_metric="score", callbacks=scored, **options)
    fitted.fit((X, Y), validation=(X, Y), epochs=4)
    saved = sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir())
    assert saved == [10, 20]
    other = trainer(workdir=str(tmp_path / "other"), best_metric="scor", callbacks=scored)
    with pytest.raises(UserError, match=r"'scor', which this evaluation does not give.*'score'"):
        other.fit((X, Y), validation=(X, Y), epochs=1)


@pytest.mark.slow
def test_evaluate_before_fit_does_not_hide_the_checkpoint_from_fit(tmp_path: Path) -> None:
    first = trainer(workdir=str(tmp_path))
    first.fit((X, Y), steps=5)
    again = trainer(workdir=str(tmp_path))
    assert again.evaluate((X, Y)) == first.evaluate((X, Y))
    assert again.fit((X, Y), steps=6).step == 6
    assert [line["step"] for line in metrics(tmp_path, "train")] == [1, 5, 6]


@pytest.mark.slow
def test_what_the_rules_ask_for_is_where_the_state_lives() -> None:
    shapes: list[dict[str, Any]] = []

    def note(event: CallbackContext) -> None:
        leaves = named_leaves(event.trainer.state)
        shapes.append({n: x.addressable_shards[0].data.shape for n, x in leaves.items()})
        for name, leaf in leaves.items():
            assert shapes[-1][name] == ((8, 4) if name.endswith("kernel") else leaf.shape), name

    fitted = trainer(
        model=partial(nnx.Linear, 8, 16),
        optimizer=optax.adam(1e-3),
        mesh=MeshSpec(data=2, fsdp=4),
        rules=[Rule("kernel", PartitionSpec(None, "fsdp"))],
        callbacks={"fit_start": note, "fit_end": note},
    )
    fitted.fit((np.ones((16, 8), np.float32), np.ones((16, 16), np.float32)), steps=1)
    before, after = shapes
    assert before == after and after["opt_state/0/mu/kernel"] == (8, 4)


@pytest.mark.parametrize(("options", "steps"), [({}, 4), ({"accumulation_size": 5}, 2)], ids=str)
def test_the_optimizer_may_ask_for_the_loss(options: dict[str, Any], steps: int) -> None:
    """A value that is infinite until enough losses have come is no fault of the run."""
    plateau = optax.contrib.reduce_on_plateau(patience=1, **options)
    fitted = trainer(optimizer=optax.chain(optax.sgd(0.05), plateau))
    fitted.fit((X, Y), steps=steps)
    assert fitted.state is not None
    assert np.isinf(fitted.state.opt_state[1].best_value) == bool(options)


def test_augmentation_reaches_the_training_examples_alone() -> None:
    def shifted(example: Any, generator: np.random.Generator) -> Any:
        x, y = example
        return x, y + 100

    fitted = trainer(augment=shifted, optimizer=optax.sgd(0.0))
    result = fitted.fit((X, Y), validation=(X, Y), epochs=1)
    assert result.train["loss"] > 5000 and result.validation["loss"] < 100


def test_training_on_a_subset_of_the_devices() -> None:
    fitted = trainer(mesh=MeshSpec(devices=(2, "cpu:5")))
    fitted.fit((X, Y), steps=1)
    assert fitted.state is not None
    placed = jax.tree.leaves(fitted.state.params)[0].sharding.device_set
    assert {device.id for device in placed} == {2, 5}


def test_a_config_and_keywords_together() -> None:
    fitted = trainer(config=RunConfig(seed=4, steps=3), seed=5)
    assert fitted.config.seed == 5
    assert fitted.fit((X, Y)).step == 3


@pytest.mark.slow
def test_reading_in_threads_gives_the_same_run() -> None:
    results = [trainer(data_threads=threads).fit((X, Y), steps=7) for threads in (0, 3)]
    assert results[0].train == results[1].train


def test_a_subset_is_a_dataset_of_its_own() -> None:
    subset = Subset(as_dataset((X, Y)), np.arange(5, 12))
    fitted = trainer()
    expected = fitted.evaluate((X[5:12], Y[5:12]))
    assert fitted.evaluate(subset) == expected


@pytest.mark.slow
def test_a_trainer_restores_its_own_checkpoint_rather_than_what_it_began_with(
    tmp_path: Path,
) -> None:
    parent, child = str(tmp_path / "parent"), str(tmp_path / "child")
    trainer(workdir=parent).fit((X, Y), steps=1)
    trained = trainer(workdir=child, init_from=parent)
    trained.fit((X, Y), steps=30)
    again = trainer(workdir=child, init_from=parent)
    assert again.evaluate((X, Y)) == trained.evaluate((X, Y))
    again.restore(parent)
    assert again.evaluate((X, Y))["loss"] > 2 * trained.evaluate((X, Y))["loss"]


@pytest.mark.slow
def test_an_optimizer_that_keeps_the_parameters_starts_from_those_it_is_given(
    tmp_path: Path,
) -> None:
    trainer(workdir=str(tmp_path)).fit((X, Y), steps=5)
    keeping = optax.contrib.schedule_free_sgd(0.1)
    begun = trainer(optimizer=keeping, init_from=str(tmp_path))
    given = begun.evaluate((X, Y))["loss"]
    assert begun.fit((X, Y), steps=40).train["loss"] < given / 2


@pytest.mark.slow
@pytest.mark.parametrize("has_workdir", [True, False])
def test_a_second_fit_may_not_change_what_is_computed(tmp_path: Path, has_workdir: bool) -> None:
    fitted = trainer(workdir=str(tmp_path) if has_workdir else None)
    fitted.fit((X, Y), steps=3)
    with pytest.raises(UserError, match=r"global_batch_size=8.* 16"):
        fitted.fit((X, Y), steps=4, global_batch_size=16)
    with pytest.raises(UserError, match=r"step 3 .*examples was 40"):
        fitted.fit((X[:30], Y[:30]), steps=4)
    assert fitted.fit((X, Y), steps=4).step == 4


@pytest.mark.slow
def test_a_non_finite_evaluation_stops_the_run() -> None:
    x = X.copy()
    x[3] = np.inf
    with pytest.raises(NonFiniteError, match="step 5: the eval loss"):
        trainer().fit((X, Y), validation=(x, Y), steps=5)


@pytest.mark.slow
def test_an_early_stop_ends_at_the_evaluation_and_lasts(tmp_path: Path) -> None:
    def enough(event: CallbackContext) -> None:
        if event.step == 10:
            event.trainer.stop()

    def run(**options: Any) -> int:
        fitted = trainer(workdir=str(tmp_path), callbacks={"evaluation": enough})
        return fitted.fit((X, Y), validation=(X, Y), test=(X, Y), **options).step

    assert run(epochs=3) == 10
    lines = metrics(tmp_path)
    assert run(epochs=3) == 10
    assert metrics(tmp_path) == lines
    assert run(epochs=4) == 20


@pytest.mark.slow
def test_a_stop_at_a_step_that_is_saved_and_not_evaluated_evaluates_it(tmp_path: Path) -> None:
    def stop(event: CallbackContext) -> None:
        if event.step == 4:
            event.trainer.stop()

    cadences = {"log_every": 1, "eval_every_steps": 100, "checkpoint_every_steps": 4}
    fitted = trainer(workdir=str(tmp_path), callbacks={"log": stop}, **cadences)
    result = fitted.fit((X, Y), validation=(X, Y), steps=20)
    assert result.step == 4 and list(result.validation) == ["loss"]
    assert read_manifest(tmp_path).metrics == result.validation


@pytest.mark.slow
def test_evaluation_takes_the_batch_of_fit_and_fills_it_up() -> None:
    fitted = trainer(mesh=MeshSpec(devices=tuple(range(5))), global_batch_size=10)
    fitted.fit((X, Y), steps=1)
    w = np.asarray(fitted.model.kernel[...])
    error = ((X @ w + np.asarray(fitted.model.bias[...]) - Y) ** 2).mean()
    np.testing.assert_allclose(fitted.evaluate((X, Y))["loss"], error, rtol=1e-5)
    found = fitted.evaluate((X, Y), global_batch_size=7)["loss"]
    np.testing.assert_allclose(found, error, rtol=1e-5)


@pytest.mark.slow
def test_a_restored_model_is_evaluated_in_batches_of_its_training(tmp_path: Path) -> None:
    def mixing(model: Any, batch: Any) -> dict[str, jax.Array]:
        return {"loss": (model(batch[0]) - batch[1] - batch[1].mean()) ** 2}

    def of(devices: int, **options: Any) -> Trainer:
        mesh = MeshSpec(devices=tuple(range(devices)))
        found = {"global_batch_size": None, "batch_size_per_device": 2, "objective": mixing}
        return trainer(mesh=mesh, workdir=str(tmp_path), **found | options)

    expected = of(8).fit((X, Y), validation=(X, Y), steps=2).validation
    assert of(2).evaluate((X, Y)) == pytest.approx(expected, rel=1e-5)
    assert of(2).predict((X, Y)).shape == Y.shape
    restored = of(4)
    restored.restore(f"{tmp_path}/checkpoints/2")  # as an evaluator task does
    assert restored.evaluate((X, Y)) == pytest.approx(expected, rel=1e-5)
    others = of(2, eval_batch_size=8).evaluate((X, Y))
    assert others["loss"] != pytest.approx(expected["loss"], rel=1e-3)


@pytest.mark.slow
def test_all_names_that_a_run_itself_writes_are_reserved(tmp_path: Path) -> None:
    optimizer = optax.inject_hyperparams(optax.sgd)(0.1)
    fitted = trainer(optimizer=optimizer, workdir=str(tmp_path), on_divergence="skip")
    history = fitted.fit((X, Y), epochs=2, validation=(X, Y)).history
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    written = {name for line in [*lines, *history.epochs, *history.evaluations] for name in line}
    # The evaluator writes the trajectory.
    assert written - {"loss"} == set(RESERVED) - {"trajectory"}


@pytest.mark.parametrize("name", RESERVED)
def test_a_metric_may_not_take_a_word_of_the_metrics_file(name: str) -> None:
    def objective(model: Any, batch: Any) -> dict[str, jax.Array]:
        return squared_error(model, batch) | {name: batch[0][:, 0]}

    with pytest.raises(UserError, match=f"'{name}' is a reserved"):
        trainer(objective=objective).fit((X, Y), steps=1)


@pytest.mark.slow
def test_values_for_pairs_of_examples_are_a_mistake_unless_weighted() -> None:
    def pairs(model: Any, batch: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
        x, y = batch
        return {"loss": (model(x) - y) ** 2}

    def meant(model: Any, batch: tuple[jax.Array, jax.Array]) -> dict[str, Any]:
        return {"loss": (pairs(model, batch)["loss"], jnp.ones(len(batch[0])))}

    with pytest.raises(UserError, match=r"\(8, 8\).*\(8, 1\).*\(8,\)"):
        trainer(objective=pairs).fit((X, Y[:, 0]), steps=1)
    assert trainer(objective=meant).fit((X, Y[:, 0]), steps=1).train["loss"] > 0


def test_a_stop_before_the_first_step_makes_none() -> None:
    fitted = trainer(callbacks={"fit_start": lambda event: event.trainer.stop()})
    assert fitted.fit((X, Y), steps=5).step == 0


@pytest.mark.slow
def test_a_workdir_in_use_is_refused_and_free_again_afterward(tmp_path: Path) -> None:
    def second(event: CallbackContext) -> None:
        with pytest.raises(UserError, match=f"{tmp_path} is in use"):
            trainer(workdir=str(tmp_path)).fit((X, Y), steps=1)

    trainer(workdir=str(tmp_path), callbacks={"checkpoint": second}).fit((X, Y), steps=1)
    assert trainer(workdir=str(tmp_path)).fit((X, Y), steps=2).step == 2


@pytest.mark.slow
def test_a_home_folder_in_a_path_is_the_user_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    trainer(workdir="~/run").fit((X, Y), steps=1)
    assert (tmp_path / "run" / "checkpoints" / "1").is_dir()


@pytest.mark.slow
def test_an_evaluation_at_each_checkpoint(tmp_path: Path) -> None:
    """At 4, 8 and the end, and not at the end of epochs, of 5 steps each."""
    options: dict[str, Any] = {"workdir": str(tmp_path), "global_batch_size": 8}
    fitted = trainer(**options, eval_at_checkpoints=True, checkpoint_every_steps=4)
    fitted.fit((X, Y), validation=(X, Y), steps=10)
    assert evaluated_steps(tmp_path) == [4, 8, 10]
    manifests = (tmp_path / "checkpoints" / str(step) / "manifest.json" for step in (8, 10))
    losses = [json.loads(path.read_text())["metrics"]["loss"] for path in manifests]
    assert losses == [line["loss"] for line in metrics(tmp_path, "eval")[1:]]


@pytest.mark.slow
def test_an_evaluation_at_each_checkpoint_and_by_count(tmp_path: Path) -> None:
    clock = iter(np.arange(0, 1000, 1.0))
    fitted = trainer(
        workdir=str(tmp_path),
        eval_at_checkpoints=True,
        eval_every_steps=4,
        checkpoint_every_seconds=6.0,
        clock=lambda: float(next(clock)),
    )
    fitted.fit((X, Y), validation=(X, Y), steps=10)
    saved = set(saved_steps(tmp_path))
    assert len(saved) > 1 and saved != {10}
    assert set(evaluated_steps(tmp_path)) == saved | {4, 8, 10}


def evaluated_steps(workdir: Path) -> list[int]:
    return [line["step"] for line in metrics(workdir, "eval")]


@pytest.mark.slow
@pytest.mark.parametrize("jit", [True, False])
def test_an_error_in_an_objective_begins_with_the_users_line(jit: bool) -> None:
    def helper(x: Any, y: Any) -> Any:
        return jnp.dot(x, y)  # shapes do not agree: HERE

    def wrong(model: Any, batch: Any) -> Any:
        return {"loss": helper(model(batch[0]), jnp.ones((7, 2)))}

    def missing(model: Any, batch: Any) -> Any:
        return {"loss": {"x": batch}["no such"]}  # THERE

    def numbered(model: Any, batch: Any) -> Any:
        found: Any = {"x": batch}
        return {"loss": found[0]}  # AT 0

    lines = Path(__file__).read_text().splitlines()
    for objective, mark, error in (
        (wrong, "HERE", TypeError),
        (missing, "THERE", KeyError),
        (numbered, "AT 0", KeyError),
    ):
        with pytest.raises(error) as caught:
            trainer(objective=objective, jit=jit).fit((X, Y), steps=1)
        number = next(n for n, line in enumerate(lines, 1) if line.endswith(mark))
        first = str(caught.value).splitlines()[0]
        assert first.startswith(f"{__file__}:{number}, in ") and first.endswith(mark)
        assert len(str(caught.value).splitlines()) > 1  # and what JAX says of it


def test_a_file_beside_the_package_is_the_users_own(tmp_path: Path) -> None:
    path = Path(errors.__file__).parent.with_name("spmdtrain_own") / "model.py"
    found: dict[str, Any] = {}
    exec(compile("def objective(model, batch):\n    return batch['y']", path, "exec"), found)
    with pytest.raises(KeyError) as caught:
        Trainer(
            model=partial(nnx.Linear, 2, 1),
            objective=found["objective"],
            optimizer=optax.sgd(0.1),
            terminal=Terminal(quiet=True),
        ).evaluate({"x": np.ones((4, 2), np.float32)})
    assert str(caught.value).startswith(f"{path}:2, in objective")


def test_an_error_without_a_text_names_its_line_once() -> None:
    def media(model: Any, batch: Any) -> dict[str, Any]:
        raise NotImplementedError

    with pytest.raises(NotImplementedError) as caught:
        trainer(media=media).fit((X, Y), validation=(X, Y), steps=1)
    notes = [note for note in caught.value.__notes__ if "in media: " in note]
    assert len(notes) == 1


# -- what callbacks read and add -------------------------------------------------------------------


@pytest.mark.slow
def test_a_callback_reads_the_state_of_its_own_step_or_none() -> None:
    read: list[tuple[str, int, int]] = []
    refused: list[str] = []

    def read_state(event: CallbackContext) -> None:
        assert event.trainer.state is not None
        read.append((event.event, event.step, int(event.trainer.state.step)))

    def try_all(event: CallbackContext) -> None:
        for name in ("state", "model", "step"):
            with pytest.raises(UserError, match="log callback"):
                getattr(event.trainer, name)
        for call in (event.trainer.evaluate, event.trainer.predict):
            with pytest.raises(UserError, match="log callback"):
                call((X, Y))
        refused.append(event.event)

    others = ("fit_start", "step", "evaluation", "fit_end")
    fitted = trainer(log_every=1, callbacks={"log": try_all} | dict.fromkeys(others, read_state))
    fitted.fit((X, Y), validation=(X, Y), epochs=2)
    assert refused == ["log"] * 10 and len(read) == 14
    assert all(step == of_state for _, step, of_state in read)
    assert fitted.step == 10


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["fit_start", "step", "fit_end"])
def test_metrics_are_added_at_no_other_moment(moment: str) -> None:
    def add(event: CallbackContext) -> None:
        event.metrics["double"] = 2.0

    with pytest.raises(UserError, match="'log' and 'evaluation'"):
        trainer(callbacks={moment: add}).fit((X, Y), steps=1)


@pytest.mark.slow
def test_metrics_that_callbacks_add_are_in_every_record(tmp_path: Path) -> None:
    def add(event: CallbackContext) -> None:
        event.metrics["double"] = 2 * event.metrics["loss"]

    def change(event: CallbackContext) -> None:
        with pytest.raises(UserError, match="cannot be changed"):
            event.metrics["loss"] = 0.0

    fitted = trainer(
        workdir=str(tmp_path),
        callbacks={"log": [add, change], "evaluation": add, "checkpoint": change},
    )
    result = fitted.fit((X, Y), validation=(X, Y), epochs=1)
    for split, found in (("train", result.train), ("eval", result.validation)):
        line = metrics(tmp_path, split)[-1]
        assert line["double"] == pytest.approx(2 * line["loss"])
        assert {name: line[name] for name in found} == found
    assert read_manifest(tmp_path).metrics == result.validation


@pytest.mark.slow
def test_metrics_of_an_event_are_added_to_and_copied_as_a_dictionary_is() -> None:
    copies: list[dict[str, float]] = []

    def add(event: CallbackContext) -> None:
        metrics = event.metrics
        metrics |= {"one": 1.0}
        event.metrics |= {"two": 2.0}
        assert metrics.setdefault("three", 3.0) == 3.0
        assert metrics.setdefault("three", 4.0) == 3.0
        assert metrics.setdefault("loss", 0.0) == metrics["loss"]
        with pytest.raises(UserError, match="computed"):
            event.metrics |= {"loss": 0.0}
        with pytest.raises(UserError, match="cannot be replaced"):
            event.metrics = {"loss": 0.0}

    def keep(event: CallbackContext) -> None:
        of = event.metrics
        copies.extend([copy.copy(of), copy.deepcopy(of), pickle.loads(pickle.dumps(of))])

    result = trainer(callbacks={"log": [add, keep], "fit_end": keep}).fit(
        (X, Y), test=(X, Y), steps=1
    )
    computed = ("loss", "gradient_norm", "parameter_norm", "update_norm")
    added = {name: x for name, x in result.train.items() if name not in computed}
    assert added == {"one": 1.0, "two": 2.0, "three": 3.0}
    assert copies == [result.train] * 3 + [result.test] * 3
    assert {type(found) for found in copies} == {dict}


@pytest.mark.slow
def test_what_writes_event_files_is_imported_before_training_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "tensorboardX.record_writer"
    monkeypatch.delitem(sys.modules, name, raising=False)
    imported: list[bool] = []
    callbacks = {"fit_start": lambda event: imported.append(name in sys.modules)}
    trainer(workdir=str(tmp_path), callbacks=callbacks).fit((X, Y), steps=1)
    assert imported == [True]


@pytest.mark.slow
def test_the_state_at_the_start_is_evaluated_before_its_save(tmp_path: Path) -> None:
    options = {"checkpoint_at_start": True, "eval_at_checkpoints": True}
    trainer(workdir=str(tmp_path), **options).fit((X, Y), validation=(X, Y), epochs=1)
    start, end = metrics(tmp_path, "eval")
    assert (start["step"], end["step"]) == (0, 5) and start["loss"] > end["loss"]
    manifest = read_manifest(tmp_path / "checkpoints" / "0")
    assert manifest.metrics == {"loss": start["loss"]}


@pytest.mark.parametrize(
    ("value", "rate", "name"),
    [(np.nan, 0.1, "NANS"), (np.inf, 0.1, "INFS"), (-np.inf, 0.1, "INFS"), (0.0, 3e38, "INFS")],
)
def test_a_step_that_is_infinite_and_not_nan_is_looked_for_as_infinite(
    value: float, rate: float, name: str
) -> None:
    fitted = Trainer(
        model=FunctionModel(lambda key: np.ones(4, np.float32), lambda w, x: x @ w),
        objective=lambda model, x: {"loss": 100 * model(x) + value},
        optimizer=optax.sgd(rate),
        global_batch_size=8,
        terminal=Terminal(quiet=True),
    )
    with pytest.raises(NonFiniteError, match=f"JAX_DEBUG_{name}=1 with jit=False") as caught:
        fitted.fit(np.abs(X), steps=2)
    assert caught.value.is_infinite == (name == "INFS")
    assert caught.value.loss is not None and np.isfinite(caught.value.loss) == (rate > 1)

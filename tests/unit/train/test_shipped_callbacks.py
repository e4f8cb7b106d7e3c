"""Callbacks that are objects: early stopping, plateaus, thresholds, samples and uploads."""

import json
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import linear_model
import numpy as np
import optax
import pytest
from etils import epath
from helpers import metrics, saved_steps, status
from jax import Array

from spmdtrain import (
    CallbackContext,
    EarlyStopping,
    LogSamples,
    Loop,
    PreemptedExit,
    ReduceOnPlateau,
    StopAtThreshold,
    Trainer,
    TrainState,
    UploadCheckpoints,
    UserError,
    load_params,
    read_manifest,
)
from spmdtrain.document.terminal import Terminal
from spmdtrain.tree import named_leaves

X = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
Y = X.sum(1, keepdims=True)


def with_score(event: CallbackContext) -> None:
    """Adds a metric: 5, then always 4."""
    event.metrics["score"] = 5.0 if event.step == 1 else 4.0


def trainer(workdir: Path, callbacks: Any, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "workdir": str(workdir),
        "callbacks": callbacks,
        "optimizer": optax.inject_hyperparams(optax.sgd)(0.125),
        "eval_every_steps": 1,
    }
    return linear_model.trainer(**defaults | options)


def fit(workdir: Path, steps: int, callbacks: Any = None, **options: Any) -> Trainer:
    if callbacks is None:
        callbacks = [
            {"evaluation": with_score},
            ReduceOnPlateau("score", factor=0.5, patience=2, cooldown=1),
            EarlyStopping("score", patience=6),
        ]
    fitted = trainer(workdir, callbacks, **options)
    fitted.fit((X, Y), validation=(X, Y), steps=steps)
    return fitted


def rate(fitted: Trainer) -> float:
    assert fitted.state is not None
    return float(fitted.state.opt_state.hyperparams["learning_rate"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is not interrupted: reduced at 4 and 7 (5 is the cooldown), stopped at 8."""
    workdir = tmp_path_factory.mktemp("whole")
    rates: list[float] = []
    watch = [
        {"evaluation": [with_score, lambda event: rates.append(rate(event.trainer))]},
        ReduceOnPlateau("score", factor=0.5, patience=2, cooldown=1),
        EarlyStopping("score", patience=6),
    ]
    assert fit(workdir, 20, watch).step == 8
    assert rates == [0.125] * 4 + [0.0625] * 3 + [0.03125]
    return workdir


def assert_same_run(workdir: Path, whole: Path) -> None:
    assert status(workdir) == {"status": "finished", "step": 8}
    assert read_manifest(workdir).callbacks == read_manifest(whole).callbacks
    assert_same_params(workdir, whole)


def assert_same_params(one: Path, other: Path) -> None:
    first, second = named_leaves(load_params(one)), named_leaves(load_params(other))
    assert first.keys() == second.keys()
    for name, array in first.items():
        np.testing.assert_array_equal(second[name], array)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [4, 5])
def test_a_resumed_run_makes_the_decisions_of_an_uninterrupted_one(
    whole: Path, tmp_path: Path, cut: int
) -> None:
    first = fit(tmp_path, cut)
    assert (first.step, rate(first)) == (cut, 0.0625)
    resumed = fit(tmp_path, 20)
    assert (resumed.step, rate(resumed)) == (8, 0.03125)
    assert_same_run(tmp_path, whole)
    assert fit(tmp_path, 20).step == 8  # it was stopped: there is nothing to do


@pytest.mark.slow
def test_an_evaluation_that_is_repeated_is_counted_once(whole: Path, tmp_path: Path) -> None:
    fit(tmp_path, 4)
    (tmp_path / "metrics.jsonl").unlink()  # so that the evaluation of step 4 is missing
    repeated: list[int] = []
    callbacks = [
        {"evaluation": [with_score, lambda event: repeated.append(event.step)]},
        ReduceOnPlateau("score", factor=0.5, patience=2, cooldown=1),
        EarlyStopping("score", patience=6),
    ]
    fit(tmp_path, 20, callbacks)
    assert repeated == [4, 5, 6, 7, 8]
    assert_same_run(tmp_path, whole)


@pytest.mark.slow
def test_an_interrupted_evaluation_is_counted_after_the_restart(
    whole: Path, tmp_path: Path
) -> None:
    data = linear_model.Interrupting(X, Y)
    callbacks = [
        {
            "evaluation": with_score,
            "step": partial(data.arm, 4),
        },
        ReduceOnPlateau("score", factor=0.5, patience=2, cooldown=1),
        EarlyStopping("score", patience=6),
    ]
    interrupted = trainer(tmp_path, callbacks)
    with pytest.raises(PreemptedExit):
        interrupted.fit((X, Y), validation=data, steps=20)
    state = read_manifest(tmp_path).callbacks["EarlyStopping(score)"]
    assert (saved_steps(tmp_path)[-1], state["step"], state["waited"]) == (4, 3, 1)

    def fail(event: CallbackContext) -> None:  # after the evaluation, and before the next save
        raise RuntimeError

    with pytest.raises(RuntimeError):
        fit(tmp_path, 20, [{"evaluation": with_score, "step": fail}, *callbacks[1:]])
    saved = read_manifest(tmp_path)  # or it would never be the best
    (line,) = (x for x in metrics(tmp_path, "eval") if x["step"] == 4)
    assert saved.metrics == {name: line[name] for name in ("loss", "score")}
    assert fit(tmp_path, 20).step == 8
    assert_same_run(tmp_path, whole)
    assert (tmp_path / "metrics.jsonl").read_text().count('"step": 4, "split": "eval"') == 1


@pytest.mark.slow
def test_states_without_callbacks_and_callbacks_without_states_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path, 1, [EarlyStopping(patience=2)])

    fit(tmp_path, 3, [ReduceOnPlateau()], terminal=Terminal())
    lines = capsys.readouterr().out.splitlines()
    assert (
        "callback EarlyStopping(loss) is in the checkpoint and not in this run: its state is "
        "ignored" in lines
    )
    assert (
        "callback ReduceOnPlateau(loss) is not in the checkpoint: it starts with its initial state"
        in lines
    )

    class Broken(ReduceOnPlateau):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("best")

    broken = Broken()
    broken.name = "ReduceOnPlateau(loss)"
    with pytest.raises(UserError, match=r"ReduceOnPlateau\(loss\) cannot use its state .*KeyError"):
        fit(tmp_path, 4, [broken])


@pytest.mark.slow
def test_a_restarted_fit_begins_with_the_initial_states() -> None:
    stopping = EarlyStopping("score", patience=2)
    fitted = linear_model.trainer(
        callbacks=[{"evaluation": with_score}, stopping], eval_every_steps=1
    )
    assert fitted.fit((X, Y), validation=(X, Y), steps=20).step == 4
    assert (stopping.best, stopping.waited) == (4.0, 2)
    assert fitted.fit((X, Y), validation=(X, Y), steps=1, restart=True).step == 1
    assert (stopping.best, stopping.best_step, stopping.waited) == (5.0, 1, 0)


@pytest.mark.slow
def test_a_threshold_ends_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    def steps(*callbacks: Any) -> int:
        given = [{"evaluation": with_score}, *callbacks]
        fitted = linear_model.trainer(callbacks=given, eval_every_steps=1, terminal=Terminal())
        return fitted.fit((X, Y), validation=(X, Y), steps=3).step

    assert steps(StopAtThreshold("score", at_most=4.0)) == 2
    assert "stopped at step 2: score is 4\n" in capsys.readouterr().out
    assert steps(StopAtThreshold("score", at_least=5.0)) == 1
    assert steps(StopAtThreshold("score", at_least=6.0)) == 3
    with pytest.raises(UserError, match=r"no metric 'scor'\. Did you mean 'score'"):
        steps(StopAtThreshold("scor", at_most=4.0))


@pytest.mark.slow
def test_arguments_are_checked(tmp_path: Path) -> None:
    for make, message in (
        (lambda: EarlyStopping(patience=0), "patience is 0"),
        (lambda: EarlyStopping(min_delta=-1), "min_delta is -1"),
        (lambda: ReduceOnPlateau(factor=1), "factor is 1"),
        (lambda: StopAtThreshold("loss"), "give either"),
        (lambda: LogSamples((X, Y), count=0), "count is 0"),
        (lambda: UploadCheckpoints(3), "destination is 3: it must be a folder"),  # type: ignore[arg-type]
        (lambda: linear_model.trainer(callbacks=[EarlyStopping]), "is a class"),
        (lambda: linear_model.trainer(callbacks=[object()]), "no method named after an event"),
        (lambda: linear_model.trainer(callbacks=[EarlyStopping()] * 2), "are named"),
        (lambda: linear_model.trainer(callbacks=EarlyStopping()), "must be a dictionary"),
    ):
        with pytest.raises(UserError, match=message):
            make()
    numbers = linear_model.trainer(callbacks=[LogSamples((X, Y), lambda rows: [1])])  # type: ignore[list-item]
    with pytest.raises(UserError, match="format_predictions returned 1 among its lines"):
        numbers.fit((X, Y), validation=(X, Y), steps=1)
    fixed = linear_model.trainer(callbacks=[ReduceOnPlateau()])
    with pytest.raises(UserError, match="optimizer has no injected learning rate"):
        fixed.fit((X, Y), validation=(X, Y), steps=1)
    apart = linear_model.trainer(
        callbacks=[EarlyStopping()], evaluated_by="evaluator", workdir=str(tmp_path)
    )
    with pytest.raises(UserError, match="needs the evaluations of the training"):
        apart.fit((X, Y), validation=(X, Y), steps=1)


@pytest.mark.slow
def test_samples_are_predicted_at_each_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = LogSamples((X, Y), lambda rows: [f"<{float(row[0]):.2f}>" for row in rows], count=2)
    fitted = fit(tmp_path, 4, [samples], eval_every_steps=2, terminal=Terminal())
    found = capsys.readouterr().out.splitlines()
    at = found.index("samples at step 4:")
    expected = [f"<{float(row[0]):.2f}>" for row in fitted.predict((X[:2], Y[:2]))]
    assert found[at + 1 : at + 3] == expected and "samples at step 2:" in found
    media = [json.loads(line) for line in (tmp_path / "media.jsonl").read_text().splitlines()]
    assert [(item["step"], item["name"]) for item in media] == [(2, "samples"), (4, "samples")]
    assert media[1]["text"] == "\n".join(expected)


# -- uploads ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_complete_checkpoints_are_uploaded_and_repeated_after_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, calls = tmp_path / "store", []

    def unreliable(path: epath.Path, step: int) -> None:
        calls.append(step)
        assert read_manifest(path).step == step  # it is complete
        if step == 3 or calls.count(step) == 1:
            raise OSError(f"no route at {step}")

    fit(tmp_path / "run", 2, [UploadCheckpoints(str(folder))], checkpoint_every_steps=1)
    assert saved_steps(tmp_path / "run") == [1, 2]
    for step in (1, 2):
        assert_same_params(folder / str(step), tmp_path / f"run/checkpoints/{step}")
    # The next start uploads what the saved state does not contain.
    uploads = UploadCheckpoints(unreliable, attempts=2, pause=0)
    fitted = fit(tmp_path / "run", 3, [uploads], terminal=Terminal())
    assert fitted.step == 3 and calls[-2:] == [3, 3] and calls.count(2) == 2
    lines = capsys.readouterr().out.splitlines()
    assert "checkpoint 3 was not uploaded to unreliable: no route at 3" in lines, lines
    assert uploads.state_dict()["uploaded"][-1] == 2


@pytest.mark.slow
def test_a_signal_ends_the_wait_for_uploads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reachable, uploaded = threading.Event(), list[int]()

    def upload(path: epath.Path, step: int) -> None:
        assert reachable.wait(60)
        uploaded.append(step)

    def ask(event: CallbackContext) -> None:
        signal.raise_signal(signal.SIGTERM)

    callbacks = [{"fit_end": ask}, UploadCheckpoints(upload)]
    options: dict[str, Any] = {"checkpoint_every_steps": 1, "terminal": Terminal()}
    assert fit(tmp_path, 2, callbacks, **options).step == 2 and not uploaded
    assert "uploads to upload are not complete" in capsys.readouterr().out
    with pytest.raises(PreemptedExit):  # the request has not stopped anything yet
        fit(tmp_path / "next", 2, [])
    reachable.set()
    fit(tmp_path, 2, [UploadCheckpoints(upload)], **options)
    assert sorted(set(uploaded)) == [1, 2]


# -- loops -----------------------------------------------------------------------------------------


def init(key: Array) -> dict[str, Array]:
    return {"params": jnp.zeros(())}


def step(state: TrainState, batch: Any, key: Array) -> tuple[TrainState, dict[str, Array]]:
    return state, {"loss": batch[0].sum() * 0 + 0.5}


def looped(workdir: Path, steps: int) -> int:
    stopping = [EarlyStopping("score", patience=3), UploadCheckpoints(f"{workdir}/store")]
    with Loop(steps=steps, global_batch_size=8, workdir=str(workdir), quiet=True) as loop:
        state = loop.start(init, train=(X, Y), callbacks=stopping)
        compiled = loop.compile_step(step)
        for batch in loop.batches():
            state, output = compiled(state, batch)
            loop.end_step(state, output)
            loop.log_evaluation({"score": 1.0, "loss": 0.5})
    return loop.step


@pytest.mark.slow
def test_early_stopping_and_uploads_work_in_a_loop(tmp_path: Path) -> None:
    assert looped(tmp_path / "whole", 9) == 4
    assert looped(tmp_path / "cut", 2) == 2
    assert looped(tmp_path / "cut", 9) == 4
    state = read_manifest(tmp_path / "cut").callbacks["EarlyStopping(score)"]
    assert state == {"best": 1.0, "best_step": 1, "step": 4, "waited": 3}
    assert sorted(path.name for path in (tmp_path / "cut" / "store").iterdir()) == ["2", "4"]
    with (
        Loop(steps=1) as loop,
        pytest.raises(UserError, match="for a Trainer"),
    ):
        loop.start(init, callbacks=[ReduceOnPlateau()])
    with Loop(steps=1) as loop, pytest.raises(UserError, match="no event 'step'"):
        loop.start(init, callbacks={"step": print})

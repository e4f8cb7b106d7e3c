"""Epochs: weighted means of the training metrics, the history of a fit, and its callbacks."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grain
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import metrics

from spmdtrain import (
    FitResult,
    FunctionModel,
    Loop,
    MeshSpec,
    RunConfig,
    Subset,
    Trainer,
    UserError,
)
from spmdtrain.document.terminal import Terminal
from spmdtrain.train.callbacks import CallbackContext
from spmdtrain.train.metrics_reader import MetricsReader
from spmdtrain.train.run_logger import StepTimer
from spmdtrain.train.schedule import Epochs

SIZE, BATCH = 100, 16  # epochs end at steps 7, 13 and 19: batches reach over their ends
ENDS = [0, 7, 13, 19]
_RANDOM = np.random.default_rng(0)
DATA = {
    "x": _RANDOM.normal(size=(SIZE, 3)).astype(np.float32),
    "weight": _RANDOM.choice([0.0, 0.5, 7.0], size=SIZE).astype(np.float32),
}


def _objective(model: Any, batch: Any) -> dict[str, Any]:
    found = model(batch["x"])
    return {"loss": (found**2, batch["weight"]), "off": jnp.abs(found)}


def fitted(
    optimizer: Any = None,
    callbacks: Any = None,
    validation: Any = DATA,
    train: Any = DATA,
    **options: Any,
) -> FitResult:
    """What a fit without shuffling returns; by default nothing changes the parameters."""
    defaults: dict[str, Any] = {
        "objective": _objective,
        "global_batch_size": BATCH,
        "shuffle": False,
    }
    trainer = Trainer(
        model=FunctionModel(lambda key: jnp.ones(3), lambda p, x: x @ p),
        optimizer=optimizer or optax.sgd(0.0),
        callbacks=callbacks,
        terminal=Terminal(quiet=True),
        **defaults | options,
    )
    return trainer.fit(train, validation=validation)


@pytest.mark.slow
@pytest.mark.parametrize("together", [1, 4])
def test_an_epochs_metrics_are_weighted_means_over_its_batches(
    together: int, tmp_path: Path
) -> None:
    options = {"steps_per_dispatch": together, "eval_every_steps": 8}
    result = fitted(workdir=str(tmp_path), epochs=3, **options)
    value = DATA["x"].astype(np.float64).sum(axis=1)
    for number, written in enumerate(metrics(tmp_path, "epoch"), start=1):
        line = result.history.epochs[number - 1]
        assert written.items() - {("split", "epoch")} <= line.items()
        rows = np.arange(ENDS[number - 1] * BATCH, ENDS[number] * BATCH) % SIZE
        weight = DATA["weight"][rows]
        assert (line["step"], line["epoch"]) == (ENDS[number], number)
        assert line["loss"] == pytest.approx(np.average(value[rows] ** 2, weights=weight), rel=1e-6)
        assert line["off"] == pytest.approx(np.abs(value[rows]).mean(), rel=1e-6)
        assert line["examples_per_second"] == pytest.approx(len(rows) / line["seconds"])
    assert len(result.history.epochs) == 3
    seen = [(line["step"], line["epoch"]) for line in result.history.evaluations]
    assert seen == [(8, 1), (16, 2), (19, 3)]
    assert result.history.evaluations[-1]["loss"] == result.validation["loss"]


@pytest.mark.slow
def test_a_resumed_run_writes_the_same_epochs_and_its_history_has_those_before(
    tmp_path: Path,
) -> None:
    def trained(steps: int, name: str) -> FitResult:
        return fitted(optax.adam(0.1), steps=steps, workdir=str(tmp_path / name))

    def of(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        measured = ("seconds", "examples_per_second", "input_wait")
        return [{k: x for k, x in line.items() if k not in measured} for line in lines]

    whole = trained(19, "whole")
    trained(10, "parts")  # in the midst of the second epoch
    parts = trained(19, "parts")
    assert [line["step"] for line in parts.history.epochs] == ENDS[1:]
    assert of(parts.history.epochs) == of(whole.history.epochs)
    assert of(metrics(tmp_path / "parts", "epoch")) == of(metrics(tmp_path / "whole", "epoch"))
    # Evaluations at the end of each epoch, and where the first part ended.
    assert [line["step"] for line in parts.history.evaluations] == [7, 10, 13, 19]


@pytest.mark.slow
def test_a_second_fit_continues_its_epoch() -> None:
    trainer = Trainer(
        model=FunctionModel(lambda key: jnp.ones(3), lambda p, x: x @ p),
        objective=_objective,
        optimizer=optax.sgd(0.0),
        terminal=Terminal(quiet=True),
        global_batch_size=BATCH,
    )
    trainer.fit(DATA, steps=10)
    history = trainer.fit(DATA, steps=19).history
    assert [line["step"] for line in history.epochs] == ENDS[1:]


@pytest.mark.slow
@pytest.mark.parametrize("together", [1, 2])
def test_a_callback_at_an_epochs_end_reads_its_state_and_may_stop(together: int) -> None:
    seen: list[tuple[int, int, float]] = []

    def ended(event: CallbackContext) -> None:
        assert event.trainer.step == int(event.trainer.state.step) == event.step
        seen.append((event.step, int(event.metrics["epoch"]), event.metrics["loss"]))
        if event.metrics["epoch"] == 2:
            event.trainer.stop()

    result = fitted(
        callbacks={"epoch_end": ended}, epochs=3, eval_every_steps=50, steps_per_dispatch=together
    )
    assert [one[:2] for one in seen] == [(7, 1), (13, 2)]
    assert [one[2] for one in seen] == [line["loss"] for line in result.history.epochs]
    assert result.step == 13 and [e["step"] for e in result.history.evaluations] == [13]


@pytest.mark.slow
def test_an_epochs_learning_rate_is_that_of_its_last_step_or_none() -> None:
    schedule = optax.linear_schedule(1.0, 0.0, 20)
    injected = optax.inject_hyperparams(optax.sgd)(learning_rate=schedule)
    rates = [line["learning_rate"] for line in fitted(injected, epochs=3).history.epochs]
    assert rates == pytest.approx([float(schedule(step - 1)) for step in ENDS[1:]])
    given = {"epochs": 1, "config": RunConfig(learning_rate=0.5)}
    assert fitted(optax.sgd(0.5), **given).history.epochs[0]["learning_rate"] == 0.5
    # The configured value is not what a schedule makes of it.
    (of_schedule,) = fitted(optax.sgd(schedule), **given).history.epochs
    assert of_schedule["learning_rate"] == pytest.approx(float(schedule(ENDS[1] - 1)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [optax.contrib.prodigy(0.5), optax.contrib.mechanize(optax.sgd(lambda count: 0.5))],
    ids=["prodigy", "mechanize"],
)
def test_a_rate_that_the_optimizer_estimates_is_not_known(optimizer: Any) -> None:
    given = {"epochs": 1, "config": RunConfig(learning_rate=0.5)}
    assert "learning_rate" not in fitted(optimizer, **given).history.epochs[0]


@pytest.mark.slow
def test_a_metric_of_no_weight_is_0_in_the_lines_of_epochs_as_in_those_of_steps(
    tmp_path: Path,
) -> None:
    def objective(model: Any, batch: Any) -> dict[str, Any]:
        found = model(batch["x"])
        return {"loss": found**2, "none": (found, jnp.zeros(len(found)))}

    fitted(objective=objective, epochs=1, workdir=str(tmp_path))
    assert {line["none"] for split in ("train", "epoch") for line in metrics(tmp_path, split)} == {
        0.0
    }


@pytest.mark.slow
def test_an_epoch_in_which_the_metrics_changed_is_left_out(tmp_path: Path) -> None:
    def trained(steps: int, objective: Any) -> list[int]:
        result = fitted(objective=objective, steps=steps, workdir=str(tmp_path))
        return [int(line["step"]) for line in result.history.epochs]

    assert trained(10, lambda model, batch: {"loss": model(batch["x"]) ** 2}) == ENDS[1:2]
    assert trained(19, _objective) == [ENDS[1], ENDS[3]]


@pytest.mark.slow
def test_the_copies_of_what_is_read_start_before_later_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU the host would wait for each copy: twice for a step, for 1 ms of a step of 2."""
    added: list[Any] = []
    copied: dict[int, set[str]] = {}
    add, start = MetricsReader.add, type(jnp.zeros(())).copy_to_host_async

    def recording_add(reader: MetricsReader, steps: Any, output: Any) -> None:
        added.append((steps[-1], output))
        add(reader, steps, output)

    def recording_start(array: Any) -> None:
        step, output = added[-1]
        fields = {"finite": output.finite, "sums": output.sums, "rate": output.rate}
        fields |= output.metrics
        copied.setdefault(step, set()).update(n for n, x in fields.items() if x is array)
        start(array)

    monkeypatch.setattr(MetricsReader, "add", recording_add)
    monkeypatch.setattr(type(jnp.zeros(())), "copy_to_host_async", recording_start)
    fitted(epochs=1, log_every=4, validation=None)
    assert copied == {}  # NumPy reads arrays on CPU
    added.clear()
    monkeypatch.setattr("spmdtrain.train.metrics_reader.is_on_cpu", lambda array: False)
    fitted(epochs=1, log_every=4, validation=None)
    assert copied[3] == {"finite", "sums"}
    assert copied[4] == {"finite", "sums", "loss", "off"}
    rate = optax.sgd(optax.linear_schedule(0.0, 0.0, 4))
    copied.clear()
    fitted(rate, epochs=1, log_every=8, validation=None, steps_per_dispatch=2, log_hash_every=8)
    assert copied[4] == {"finite", "sums", "rate", "loss"}  # of the hash's line, the last loss


def test_the_end_of_an_epoch_waits_for_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The means are of outputs that are fetched as late as in the midst of an epoch."""
    dispatched, fetched = [0], {}
    add, count = MetricsReader.add, Epochs.count

    def counting_add(reader: MetricsReader, steps: Any, output: Any) -> None:
        dispatched.append(steps[-1])
        add(reader, steps, output)

    def counting_count(epochs: Epochs, steps: Any, *rest: Any) -> None:
        fetched[steps[-1]] = dispatched[-1]
        count(epochs, steps, *rest)

    monkeypatch.setattr(MetricsReader, "add", counting_add)
    monkeypatch.setattr(Epochs, "count", counting_count)
    result = fitted(epochs=3, log_every=100, validation=None)
    assert [line["step"] for line in result.history.epochs] == ENDS[1:]
    assert len(fetched) == ENDS[-1]
    ahead = fetched[1] - 1
    assert ahead > 0 and fetched == {s: min(s + ahead, ENDS[-1]) for s in fetched}


def test_sums_have_the_same_bits_if_steps_are_counted_together() -> None:
    sums = (_RANDOM.normal(size=(6, 2, 2)) * 10.0 ** _RANDOM.integers(-6, 6, (6, 2, 2))).astype("f")
    logger: Any = SimpleNamespace(timer=StepTimer(lambda: 0.0))

    def counted(*parts: range) -> dict[str, Any]:
        epochs = Epochs(RunConfig(global_batch_size=BATCH, epochs=1), SIZE, logger, None)
        for steps in parts:
            rows = slice(steps.start - 1, steps.stop - 1)
            epochs.count(steps, ["loss", "off"], sums[rows], None)
        return epochs.to_json()

    alone = counted(*(range(n, n + 1) for n in range(1, 7)))
    assert alone["steps"] == 6
    assert alone == counted(range(1, 7)) == counted(range(1, 2), range(2, 7))


@pytest.mark.slow
@pytest.mark.parametrize("length", [{"epochs": 10}, {"steps": 2}])
def test_a_batch_larger_than_the_data_is_refused_unless_they_are_repeated(
    length: dict[str, int],
) -> None:
    data = {name: values[:5] for name, values in DATA.items()}
    options = {"global_batch_size": 32, **length}
    with pytest.raises(UserError, match="global_batch_size is 32"):
        fitted(train=data, **options)
    repeated = fitted(train=Subset(data, np.arange(32) % 5), **options).history.epochs
    assert [epoch["epoch"] for epoch in repeated] == list(range(1, length.get("epochs", 2) + 1))
    source = grain.MapDataset.source([{n: x[i] for n, x in data.items()} for i in range(5)])
    assert len(fitted(train=source.repeat(7), **options).history.epochs) >= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options", "works"),
    [
        ("Loop", {"devices": (0,)}, 5),
        ("Loop", {"devices": (0, 1)}, 4),
        ("Loop", {}, None),
        ("Trainer", {"devices": (0,)}, 5),
        ("Trainer", {"devices": (0, 1)}, 4),
        ("Trainer", {"devices": (0, 1, 2, 3)}, 4),
        ("Trainer", {}, None),  # eight devices
        ("Trainer", {"devices": (0, 1), "microbatches": 2}, 4),
        ("Trainer", {"devices": (0, 1), "microbatches": 4}, None),
        ("Trainer", {"devices": (0, 1), "uneven_batch": "pad"}, 5),
        ("Trainer", {"devices": (0, 1), "exact": 4}, 4),
        ("Trainer", {"devices": (0, 1), "exact": 8}, None),
    ],
)
def test_the_error_of_a_batch_larger_than_the_data_names_one_that_works(
    kind: str, options: dict[str, Any], works: int | None
) -> None:
    data = {name: values[:5] for name, values in DATA.items()}
    others = {name: value for name, value in options.items() if name != "devices"}
    others["mesh"] = MeshSpec(devices=options.get("devices", ()))

    def run(batch: int) -> None:
        if kind == "Trainer":
            fitted(train=data, validation=None, steps=1, **others | {"global_batch_size": batch})
            return
        with Loop(steps=1, global_batch_size=batch, **others) as loop:
            loop.start(lambda key: {"params": jnp.ones(3)}, train=data)
            loop.stop()

    with pytest.raises(UserError) as caught:
        run(16)
    give = f"give global_batch_size={works}, or "
    assert str(caught.value) == (
        "global_batch_size is 16, and the training data have 5 examples, of which a batch would "
        f"hold some several times: {give if works else ''}repeat them: "
        "Subset(data, np.arange(16) % 5)"
    )
    if works:
        run(works)

"""Which checkpoints stay: by rule, whatever order of metrics, and on the disk."""

import contextlib
import datetime
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from checkpoint_helpers import load_state
from etils import epath
from flax import nnx
from helpers import metrics, saved_steps
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdtrain import Trainer, UserError
from spmdtrain.adapters.as_adapter import as_adapter
from spmdtrain.checkpoints.listing import CheckpointRecord, Retention
from spmdtrain.checkpoints.manifest import Manifest
from spmdtrain.checkpoints.run_identity import Identity, describe_leaves, describe_optimizer
from spmdtrain.checkpoints.save import Checkpoints
from spmdtrain.config.options import MeshSpec
from spmdtrain.config.run_config import RunConfig, config_as_json
from spmdtrain.document.terminal import Terminal
from spmdtrain.sharding.placement import make_placement
from spmdtrain.step.functions import RunFunctions
from spmdtrain.step.objective import model_output
from spmdtrain.step.state import TrainState

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)

# -- by rule ---------------------------------------------------------------------------------------


@st.composite
def saves(draw: st.DrawFn) -> list[CheckpointRecord]:
    """Saves in their order; metrics repeat, are missing, of another name or no numbers."""
    number = st.sampled_from([0.0, 1.0, 2.0, 3.0, 0.5, math.nan, math.inf, -math.inf])
    measured = st.one_of(
        st.none(),
        st.just({}),
        st.builds(lambda x: {"accuracy": x}, number),
        st.builds(lambda x: {"loss": x}, number),
        st.builds(lambda x: {"loss": x, "accuracy": -x}, st.floats(-9, 9)),
    )
    step, hours, records = draw(st.integers(-1, 3)), 0.0, []
    for found in draw(st.lists(measured, max_size=25)):
        step += draw(st.integers(1, 7))
        hours += draw(st.sampled_from([0.0, 0.1, 0.5, 1.0, 5.0, 30.0]))
        records.append(CheckpointRecord(step, START + datetime.timedelta(hours=hours), found))
    return records


retentions = st.builds(
    Retention,
    latest=st.integers(1, 4),
    best=st.integers(0, 4),
    metric=st.sampled_from(["loss", "accuracy"]),
    direction=st.sampled_from(["min", "max"]),
    every_steps=st.none() | st.integers(1, 20),
    every_hours=st.none() | st.sampled_from([0.5, 1.0, 24.0]),
)


def value(record: CheckpointRecord, of: Retention) -> float:
    return (record.metrics or {}).get(of.metric, math.nan)


def best_of(seen: Sequence[CheckpointRecord], of: Retention) -> list[int]:
    """The best of all that were ever saved: each beats all but fewer than `best` others."""
    measured = [r for r in seen if math.isfinite(value(r, of))]

    def beats(one: CheckpointRecord, other: CheckpointRecord) -> bool:
        a, b = value(one, of), value(other, of)
        return one.step > other.step if a == b else (a < b) == (of.direction == "min")

    return [r.step for r in measured if sum(beats(x, r) for x in measured if x != r) < of.best]


def for_good(seen: Sequence[CheckpointRecord], of: Retention) -> list[int]:
    """The first of every so many steps, counted from 0, and of every so many hours."""
    kept = []
    if of.every_steps:
        for period in range(1, seen[-1].step // of.every_steps + 1):
            first, end = period * of.every_steps, (period + 1) * of.every_steps
            kept += [r.step for r in seen if first <= r.step < end][:1]
    if of.every_hours:
        hours = [r.saved_at.timestamp() / 3600 // of.every_hours for r in seen]
        kept += [r.step for n, r in enumerate(seen) if n == 0 or hours[n] > hours[n - 1]]
    return kept


@pytest.mark.nightly
@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(saves(), retentions)
def test_after_every_save_the_newest_the_best_ever_and_the_lasting_ones_are_there(
    records: list[CheckpointRecord], of: Retention
) -> None:
    there: list[CheckpointRecord] = []
    for number, record in enumerate(records, start=1):
        seen = records[:number]
        kept = of.keep([*there, record])
        assert of.keep([record, *reversed(there)]) == kept  # whatever order a folder lists
        there = [r for r in [*there, record] if r.step in kept]
        newest = [r.step for r in seen[-of.latest :]]
        best, lasting = best_of(seen, of), for_good(seen, of)
        assert record.step in kept and len(best) <= of.best
        assert kept == {*newest, *best, *lasting} == {r.step for r in there}
        # Started again, the same is found of what is there: nothing goes, nothing is missed.
        assert of.keep(there) == kept == of.keep(seen)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(saves(), retentions)
def test_what_was_not_measured_is_never_best_and_ages_out(
    records: list[CheckpointRecord], of: Retention
) -> None:
    ranked = of.best_first(records)
    assert {r.step for r in records if math.isfinite(value(r, of))} == set(ranked)
    ages = Retention(latest=of.latest, best=of.best, metric=of.metric, direction=of.direction)
    for record in records[: -of.latest]:
        if not math.isfinite(value(record, of)):
            assert record.step not in ages.keep(records)


@pytest.mark.slow
@given(saves(), st.data())
def test_an_evaluator_beside_the_run_says_which_is_best_and_is_waited_for(
    records: list[CheckpointRecord], data: st.DataObject
) -> None:
    steps = sorted(record.step for record in records)
    seen = data.draw(st.sampled_from(steps)) if steps else 0
    skipped = data.draw(st.sets(st.sampled_from(steps))) if steps else set()
    evaluated = {step: {"loss": float(step % 7)} for step in steps if step <= seen} or {}
    evaluated = {s: m for s, m in evaluated.items() if s not in skipped or s == seen}
    of_others = {(step, "left"): {"loss": -1.0} for step in steps}
    found = {(step, ""): metrics for step, metrics in evaluated.items()} | of_others
    kept = Retention(latest=1, best=1).keep_evaluated(records, found)
    awaited = {step for step in steps if not evaluated or step > max(evaluated)}
    best = {max(evaluated, key=lambda s: (-evaluated[s]["loss"], s))} if evaluated else set()
    assert kept == awaited | best | set(steps[-1:])  # its own metrics count for nothing


def test_of_equals_the_newer_is_better_and_the_direction_counts() -> None:
    records = [
        CheckpointRecord(n, START, {"loss": x})
        for n, x in enumerate([2.0, 1.0, 1.0, 3.0, 3.0, 2.0])
    ]
    assert Retention().best_first(records) == [2, 1, 5, 0, 4, 3]
    assert Retention(direction="max").best_first(records) == [4, 3, 5, 0, 2, 1]
    assert Retention(latest=1, best=1).keep(records) == {2, 5}
    assert Retention(latest=1, best=2, direction="max").keep(records) == {3, 4, 5}
    assert Retention(latest=2, best=0).keep(records) == {4, 5}


def test_hours_and_steps_begin_where_the_clock_and_the_count_do() -> None:
    times = [0.0, 0.4, 0.9, 1.0, 1.9, 5.5, 5.6]
    records = [
        CheckpointRecord(10 * n, START + datetime.timedelta(hours=hours), None)
        for n, hours in enumerate(times)
    ]
    assert Retention(latest=1, every_hours=1).keep(records) == {0, 30, 50, 60}
    assert Retention(latest=1, every_steps=25).keep(records) == {30, 50, 60}
    assert Retention(latest=1, every_steps=20, every_hours=3).keep(records) == {0, 20, 40, 50, 60}


# -- on the disk -----------------------------------------------------------------------------------


def small_steps() -> RunFunctions:
    config = RunConfig(mesh=MeshSpec(devices=(0,)))
    return RunFunctions(
        adapter=as_adapter(partial(nnx.Linear, 2, 1)),
        objective=squared_error,
        predict=model_output,
        optimizer=optax.sgd(0.1),
        placement=make_placement(config),
        config=config,
    )


def squared_error(model: Any, batch: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
    x, y = batch
    error = ((model(x) - y) ** 2)[:, 0]
    return {"loss": error, "close": error < 1}


def identity_of(state: TrainState) -> Identity:
    optimizer = describe_optimizer(state.opt_state)
    return Identity(config_as_json(RunConfig()), {}, describe_leaves(state), optimizer)


def loss_at(step: int) -> float | None:
    """A loss for two saves in three; the two lowest early on, ever poorer toward the end."""
    lowest = {4: 0.25, 17: 0.125, 20: math.nan, 29: -math.inf, 49: math.inf}
    return lowest.get(step, None if step % 3 == 0 else 1.0 + abs(step - 26) / 10)


@pytest.mark.nightly
@pytest.mark.slow
def test_fifty_saves_leave_the_newest_and_the_best_alone(tmp_path: Path) -> None:
    folder, retention = tmp_path / "checkpoints", Retention(latest=3, best=2)
    steps = small_steps()
    state = steps.init(0)
    identity = identity_of(state)

    def save(first: int, last: int) -> None:
        with contextlib.closing(Checkpoints(epath.Path(folder), retention)) as checkpoints:
            for step in range(first, last + 1):
                loss = loss_at(step)
                params = jax.tree.map(lambda x, step=step: x * 0 + step, state.params)
                now = TrainState(**{**vars(state), "params": params})
                metrics = None if loss is None else {"loss": loss, "close": 0.0}
                checkpoints.save(now, step, identity, metrics)

    save(1, 21)
    assert saved_steps(tmp_path) == [4, 17, 19, 20, 21]
    save(22, 40)  # the best of the first start are known to the second
    save(41, 50)
    left = [4, 17, 48, 49, 50]
    assert sorted(path.name for path in folder.iterdir()) == sorted(map(str, left))
    for step in left:  # and each is whole, and the one it says it is
        found = Manifest.read(epath.Path(folder / str(step)))
        loss = loss_at(step)
        measured = {"loss": loss, "close": 0.0} if step in (4, 17, 50) else None
        measured = {"close": 0.0} if step == 49 else measured  # its loss is infinite
        assert (found.step, found.metrics) == (step, measured)
        loaded = load_state(folder / str(step), steps.abstract_state, steps.shardings)
        assert {float(x.reshape(-1)[0]) for x in jax.tree.leaves(loaded.params)} == {step}


X = np.random.default_rng(0).normal(size=(16, 2)).astype(np.float32)
DATA = (X, X @ np.ones((2, 1), np.float32))


def worse_and_worse(workdir: Path, steps: int, **options: Any) -> list[int]:
    """Train uphill: each step's loss is above the last one's. What is saved in the end."""
    trainer = Trainer(
        model=partial(nnx.Linear, 2, 1),
        objective=squared_error,
        optimizer=optax.sgd(-0.01),
        terminal=Terminal(quiet=True),
        workdir=str(workdir),
        global_batch_size=16,
        mesh=MeshSpec(devices=(0,)),
        **{"checkpoint_every_steps": 1, "keep_latest": 3, "keep_best": 2} | options,
    )
    trainer.fit(DATA, validation=DATA, steps=steps)
    return saved_steps(workdir)


@pytest.mark.nightly
@pytest.mark.slow
def test_saves_of_a_run_that_gets_worse_leave_n_and_m(tmp_path: Path) -> None:
    options = {"eval_every_steps": 4}
    assert worse_and_worse(tmp_path, 13, **options) == [4, 8, 11, 12, 13]
    assert worse_and_worse(tmp_path, 22, **options) == [4, 8, 20, 21, 22]
    losses = [line["loss"] for line in metrics(tmp_path, "eval")]
    assert losses == sorted(set(losses)) and len(losses) == 5 + 2  # uphill, and at both ends


@pytest.mark.slow
def test_a_custom_metric_and_its_direction_decide_which_is_best(tmp_path: Path) -> None:
    best = {"best_metric": "loss", "best_direction": "max", "eval_every_steps": 1}
    assert worse_and_worse(tmp_path / "max", 6, keep_latest=1, **best) == [5, 6]
    close = {"best_metric": "close", "best_direction": "max", "keep_latest": 1, "keep_best": 1}
    # No prediction stays close for long: the last step at which the most of them are is best.
    assert worse_and_worse(tmp_path / "close", 30, eval_every_steps=3, **close)[-1] == 30
    found = {line["step"]: line["close"] for line in metrics(tmp_path / "close", "eval")}
    best_step = max(found, key=lambda step: (found[step], step))
    assert saved_steps(tmp_path / "close") == [best_step, 30] and best_step < 30


def test_a_metric_that_no_evaluation_gives_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'closer'.*'close'"):
        worse_and_worse(tmp_path, 2, best_metric="closer", eval_every_steps=1)


@pytest.mark.slow
def test_some_are_kept_for_good_besides(tmp_path: Path) -> None:
    options = {"keep_every_steps": 5, "keep_best": 0, "keep_latest": 1, "eval_every_steps": 100}
    every_third = {"checkpoint_every_steps": 3, **options}
    assert worse_and_worse(tmp_path, 16, **every_third) == [6, 12, 15, 16]
    assert worse_and_worse(tmp_path, 23, **every_third) == [6, 12, 15, 21, 23]
    lasting = {**options, "keep_every_steps": None, "keep_every_hours": 1e6}
    found = worse_and_worse(tmp_path / "hours", 4, checkpoint_at_start=True, **lasting)
    assert found == [0, 4]  # no other million hours begin before 2084

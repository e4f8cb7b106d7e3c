"""Several steps at once, and data on the devices: the same numbers, fewer words with the host."""

import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import DIGITS, metrics, run, saved_steps
from hypothesis import given
from linear_model import trainer

from spmdtrain import (
    CallbackContext,
    FunctionModel,
    MeshSpec,
    NonFiniteError,
    Subset,
    UserError,
)
from spmdtrain.config.options import ShardingOptions
from spmdtrain.config.run_config import RunConfig
from spmdtrain.data.datasets import ArrayDataset
from spmdtrain.distributed import process_group
from spmdtrain.document.terminal import Terminal
from spmdtrain.record.run import Run
from spmdtrain.step.dispatch import Dispatch, Repeat
from spmdtrain.step.program import plan_step
from spmdtrain.train.callbacks import CallbackRunner
from spmdtrain.train.schedule import Schedule
from spmdtrain.tree import named_leaves

GENERATOR = np.random.default_rng(7)
X = GENERATOR.normal(size=(80, 4)).astype(np.float32)
Y = (X @ np.array([[1.0], [-2.0], [0.5], [3.0]], np.float32)).astype(np.float32)


def losses(workdir: Path, **options: Any) -> list[float]:
    """The loss of each step of 23, with evaluations at 10 and 20, and of two epochs."""
    fitted = trainer(workdir=str(workdir), log_every=1, **options)
    assert fitted.fit((X, Y), validation=(X, Y), steps=23).step == 23
    return [line["loss"] for line in metrics(workdir)]


# -- which steps are made together -----------------------------------------------------------------


@given(
    size=st.integers(1, 9),
    repeat=st.sampled_from([Repeat.SCAN, Repeat.COUNTED]),
    first=st.integers(0, 20),
    total=st.integers(1, 60),
    ends=st.sets(st.integers(1, 60)),
)
def test_each_step_is_made_once_and_nothing_due_is_passed_over(
    size: int, repeat: Repeat, first: int, total: int, ends: set[int]
) -> None:
    schedule: Any = SimpleNamespace(
        _size=size, dispatch=Dispatch(size, repeat), total=total, _splits=ends.__contains__
    )
    found = list(Schedule.dispatches(schedule, first))
    assert list(itertools.chain(*found)) == list(range(first + 1, total + 1))
    for steps in found:
        assert not ends & set(steps[:-1])
    if repeat is Repeat.COUNTED:  # as many as possible
        last = {*ends, total}
        assert all(len(steps) == size or steps[-1] in last for steps in found)
        return
    assert {len(steps) for steps in found} <= {1, size}  # two programs at most
    # One step alone is made only where so many would pass over what is due, or the end.
    for steps in found:
        if len(steps) < size:
            window = range(steps[0], steps[0] + size)
            assert window[-1] > total or ends & set(window[:-1])


def test_steps_that_never_come_together_are_an_error() -> None:
    """Of a loop of a fixed number of steps, which is that of GPUs and TPUs."""
    message = "steps_per_dispatch is 8, and there are never so many steps without an evaluation"
    fixed = Dispatch(8, Repeat.SCAN)
    config = RunConfig(steps_per_dispatch=8, eval_every_steps=5)
    made = partial(Schedule, config, num_examples=80, saves=False, clock=lambda: 0.0)
    with pytest.raises(UserError, match=message):
        made(total=40, evaluates=True).set_dispatch(fixed)
    made(total=40, evaluates=False).set_dispatch(fixed)
    made(total=7, evaluates=True).set_dispatch(fixed)  # all there are
    made(total=40, evaluates=True).set_dispatch(Dispatch(8, Repeat.COUNTED))


# -- the same numbers ------------------------------------------------------------------------------

SMALL = ShardingOptions(min_size=1)
PLACES: dict[str, dict[str, Any]] = {
    "one device": {"mesh": MeshSpec(devices=(0,))},
    "no mesh": {"strategy": "default"},
    "8 devices": {},
    "zero": {"strategy": "zero", "sharding": SMALL},
    "fully_sharded": {
        "strategy": "fully_sharded",
        "sharding": SMALL,
        "mesh": MeshSpec(fsdp=4, data=2),
    },
    "central_storage": {"strategy": "central_storage", "mesh": MeshSpec(devices=(0, 1))},
    "an average": {"ema_decay": 0.9, "microbatches": 2, "mesh": MeshSpec(devices=(0, 1))},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    [
        "8 devices",
        pytest.param("fully_sharded", marks=pytest.mark.slow),
        *(
            pytest.param(place, marks=pytest.mark.nightly)
            for place in PLACES
            if place not in ("8 devices", "fully_sharded")
        ),
    ],
)
def test_the_numbers_are_those_of_single_steps(tmp_path: Path, place: str) -> None:
    options = PLACES[place]
    expected = losses(tmp_path / "a", **options)
    assert len(expected) == 23 + 3 + 2 and max(expected[:5]) > 2 * expected[-1]
    ways: list[dict[str, Any]] = [
        {"steps_per_dispatch": 5},
        {"data_on_device": True},
        {"steps_per_dispatch": 5, "data_on_device": True},
    ]
    for number, way in enumerate(ways):
        found = losses(tmp_path / str(number), **options, **way)
        np.testing.assert_allclose(found, expected, rtol=1e-5, err_msg=str(way))


@pytest.mark.nightly
@pytest.mark.slow
def test_random_numbers_and_the_state_of_a_model_are_those_of_single_steps(tmp_path: Path) -> None:
    class Noisy(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.linear = nnx.Linear(4, 1, rngs=rngs)
            self.norm = nnx.BatchNorm(4, momentum=0.5, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.linear(self.dropout(self.norm(x)))

    found = []
    for way in ({}, {"steps_per_dispatch": 4, "data_on_device": True}):
        fitted = trainer(model=Noisy, **way)
        fitted.fit((X, Y), steps=9)
        found.append(named_leaves(jax.device_get(fitted.state)))
    for name, leaf in found[0].items():
        np.testing.assert_allclose(found[1][name], leaf, rtol=2e-5, atol=1e-6, err_msg=name)
    assert not np.allclose(found[0]["model_state/norm/mean"], 0)


@pytest.mark.slow
def test_an_interrupted_run_resumes_with_the_same_numbers(tmp_path: Path) -> None:
    options = {"steps_per_dispatch": 5, "data_on_device": True, "checkpoint_every_steps": 10}
    whole = losses(tmp_path / "whole", **options)
    cut = trainer(workdir=str(tmp_path / "cut"), log_every=1, **options)
    cut.fit((X, Y), validation=(X, Y), steps=13)
    assert saved_steps(tmp_path / "cut") == [10, 13]
    found = losses(tmp_path / "cut", **options)
    # Step 13 was evaluated as the last one, then.
    assert len(found) == len(whole) + 1
    del found[len([x for x in metrics(tmp_path / "cut") if x["step"] <= 13]) - 1]
    np.testing.assert_allclose(found, whole, rtol=1e-6)


@pytest.mark.nightly
def test_the_command_takes_both(tmp_path: Path) -> None:
    found = []
    for name, options in (("a", ()), ("b", ("--steps-per-dispatch", 10, "--data-on-device"))):
        workdir = tmp_path / name
        ended = run(DIGITS, "--steps", 60, "--workdir", workdir, *options, devices=1)
        assert ended.returncode == 0, ended.stderr
        found.append([(line["step"], line["loss"]) for line in metrics(workdir)])
    assert [step for step, _ in found[0]] == [step for step, _ in found[1]]
    np.testing.assert_allclose([x for _, x in found[1]], [x for _, x in found[0]], rtol=1e-4)


@pytest.mark.slow
def test_fixed_loops_and_single_steps_make_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of GPUs and TPUs: a program of 5 steps, and one of a single step."""
    expected = losses(tmp_path / "single")
    fixed = Dispatch(5, Repeat.SCAN)
    monkeypatch.setattr("spmdtrain.step.compile.choose_dispatch", lambda *given: fixed)
    called: list[int] = []
    callbacks = {"step": lambda event: called.append(event.step)}
    found = losses(tmp_path / "fixed", steps_per_dispatch=5, callbacks=callbacks)
    assert called == [5, 10, 15, 20, 21, 22, 23]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.nightly
@pytest.mark.slow
def test_small_steps_have_the_same_bits_wherever_a_dispatch_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One device groups them by default; neither a cadence nor a restart changes a bit."""
    noted: dict[str, Any] = {"terminal": Terminal(), "workdir": str(tmp_path / "noted")}
    ways: list[dict[str, Any]] = [
        noted,
        {"checkpoint_every_steps": 3, "log_hash_every": 7, "workdir": str(tmp_path / "saves")},
        {"steps_per_dispatch": 7},
        {"data_on_device": True},
        {"workdir": str(tmp_path / "resumed")},
    ]
    states = []
    for way in ways:
        fitted = trainer(mesh=MeshSpec(devices=(0,)), log_every=1, **way)
        if way is ways[-1]:
            fitted.fit((X, Y), steps=14)
            fitted = trainer(mesh=MeshSpec(devices=(0,)), **way)
        fitted.fit((X, Y), steps=23)
        states.append(jax.device_get(fitted.state))
    out = capsys.readouterr().out
    assert "up to 50 steps per dispatch" in out and "step 23/23" in out
    for state in states[1:]:
        jax.tree.map(np.testing.assert_array_equal, state, states[0])
    # The loss of each step, also of those in dispatches of other lengths.
    logged = [
        [line["loss"] for line in metrics(tmp_path / name) if line["split"] == "train"]
        for name in ("noted", "saves")
    ]
    assert logged[0] == logged[1] and len(set(logged[0])) == 23
    hashes = Run(str(tmp_path / "saves")).hashes
    assert {step: hashes[step].loss for step in (7, 14, 21)} == {
        step: logged[0][step - 1] for step in (7, 14, 21)
    }


@pytest.mark.slow
def test_a_loop_of_small_steps_has_the_operations_of_one(tmp_path: Path) -> None:
    found = []
    for steps in (None, 1, 7):
        workdir = tmp_path / str(steps)
        trainer(mesh=MeshSpec(devices=(0,)), workdir=str(workdir), steps_per_dispatch=steps).fit(
            (X, Y), steps=9
        )
        found.append(json.loads((workdir / "program.json").read_text())["flops_per_step"])
    assert found[0] == found[1] == found[2] > 0


@pytest.mark.slow
def test_callbacks_of_steps_and_of_log_lines_are_not_delayed_by_default() -> None:
    called: dict[str, list[int]] = {"step": [], "log": []}
    for event in called:

        def call(context: CallbackContext) -> None:
            called[context.event].append(context.step)
            if context.step == 3:
                context.trainer.stop()

        fitted = trainer(mesh=MeshSpec(devices=(0,)), log_every=1, callbacks={event: call})
        fitted.fit((X, Y), steps=30)
    assert called["step"] == [1, 2, 3]
    # Those of log lines are called when these are read, at most 8 steps later.
    assert called["log"] == list(range(1, 12))


# -- what is printed -------------------------------------------------------------------------------


@pytest.mark.slow
def test_callbacks_are_called_after_each_dispatch_and_its_logged_steps(tmp_path: Path) -> None:
    heard: dict[str, list[int]] = {"step": [], "log": [], "evaluation": [], "checkpoint": []}

    def hear(event: CallbackContext) -> None:
        heard[event.event].append(event.step)
        assert event.event != "step" or event.trainer.step == event.step

    fitted = trainer(
        workdir=str(tmp_path),
        steps_per_dispatch=4,
        log_every=3,
        callbacks=dict.fromkeys(heard, hear),
    )
    fitted.fit((X, Y), validation=(X, Y), epochs=2)
    assert heard["step"] == [4, 8, 10, 14, 18, 20]
    assert heard["log"] == [1, 3, 6, 9, 12, 15, 18, 20]
    assert heard["evaluation"] == heard["checkpoint"] == [10, 20]


def test_a_stop_comes_after_the_dispatch_it_is_asked_in() -> None:
    def stop(event: CallbackContext) -> None:
        event.trainer.stop()

    fitted = trainer(steps_per_dispatch=6, callbacks={"step": stop})
    assert fitted.fit((X, Y), steps=60).step == 6


@pytest.mark.slow
def test_the_step_that_went_wrong_is_named() -> None:
    x = X.copy()
    x[8 * 6 + 1] = np.nan
    one = {"mesh": MeshSpec(devices=(0,))}
    every = {"steps_per_dispatch": 5}
    for way in ({}, one, every, every | {"data_on_device": True}):
        fitted = trainer(shuffle=False, **way)
        with pytest.raises(NonFiniteError, match="step 7: loss and params and opt_state"):
            fitted.fit((x, Y), steps=10)
        assert fitted.state is None


@pytest.mark.slow
def test_a_nan_of_the_optimizer_alone_is_named_by_the_steps_of_its_dispatch() -> None:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        count = state["count"] + 1
        moments = jnp.where(count >= 7, jnp.nan, state["moments"])  # used by nothing
        return updates, {"count": count, "moments": moments}

    def init(params: Any) -> Any:
        return {"count": jnp.int32(0), "moments": jnp.zeros(3)}

    optimizer = optax.chain(optax.GradientTransformation(init, update), optax.sgd(0.01))
    one = {"mesh": MeshSpec(devices=(0,)), "optimizer": optimizer}
    for options, named in [
        ({"steps_per_dispatch": 1}, "^step 7"),
        ({"steps_per_dispatch": 5}, "^one of steps 6 to 10"),
        ({}, "^one of steps 1 to 10"),
    ]:
        with pytest.raises(NonFiniteError, match=f"{named}: opt_state not finite"):
            trainer(**one, **options).fit((X, Y), steps=20)


def test_speed_is_that_of_whole_dispatches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps that are read at once were not made in no time."""
    fitted = trainer(steps_per_dispatch=20, log_every=5, terminal=Terminal())
    fitted.fit((X, Y), steps=60)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    shown = [line.split("  ")[2:4] for line in lines]
    assert len(lines) == 1 + 12
    assert shown[2] == shown[3] == shown[4] and "steps/s" in shown[3][1]


# -- what cannot be --------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.slow
def test_steps_that_are_not_compiled_are_made_one_by_one() -> None:
    with pytest.raises(UserError, match="jit is False"):
        trainer(steps_per_dispatch=2, jit=False)
    found = trainer(data_on_device=True, jit=False).fit((X, Y), steps=3)
    expected = trainer().fit((X, Y), steps=3)
    np.testing.assert_allclose(found.train["loss"], expected.train["loss"], rtol=1e-5)


@pytest.mark.nightly
@pytest.mark.slow
def test_on_cpu_convolutions_of_several_steps_are_not_in_a_loop(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Convolves(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.conv = nnx.Conv(1, 1, (3,), rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.conv(x[..., None]).mean((1, 2))[:, None]

    options: dict[str, Any] = {"model": Convolves, "mesh": MeshSpec(devices=(0,))}
    expected = trainer(**options).fit((X, Y), steps=6).train["loss"]
    fitted = trainer(**options, steps_per_dispatch=3, terminal=Terminal())
    assert fitted.fit((X, Y), steps=6).train["loss"] == pytest.approx(expected, rel=1e-5)
    assert "3 steps unrolled, because convolutions" in capsys.readouterr().out
    stacked = jax.tree.map(lambda x: x[:24].reshape(3, 8, -1), (X, Y))
    of = fitted.functions
    plan = plan_step(of, (X[:24], Y[:24]), dispatch=Dispatch(3, Repeat.UNROLLED))
    program = plan.program().lower(of.abstract_state, stacked)
    inside, _, straight = program.compile().as_text().rpartition("ENTRY")
    assert straight.count(" convolution(") >= 3 and " convolution(" not in inside


def test_examples_that_are_generated_cannot_be_cached_on_the_devices() -> None:
    with pytest.raises(UserError, match="augment"):
        trainer(data_on_device=True, augment=lambda example, generator: example)


@pytest.mark.slow
def test_any_dataset_can_rest_on_the_devices_and_is_read_once() -> None:
    asked: list[int] = []

    class Recording(ArrayDataset):
        def rows(self, indices: np.ndarray) -> Any:
            asked.extend(indices.tolist())
            return super().rows(indices)

    every = np.arange(0, 80, 2)
    fitted = trainer(data_on_device=True)
    fitted.fit(dataset := Subset(Recording((X, Y)), every), steps=12)
    fitted.fit(dataset, steps=40)
    single = trainer()
    single.fit((X[every], Y[every]), steps=40)
    for name, leaf in named_leaves(single.state).items():
        np.testing.assert_allclose(named_leaves(fitted.state)[name], leaf, rtol=1e-5, err_msg=name)
    # Beside an example for its shapes, here and there, and those of the fingerprints (16 each).
    assert len(asked) == len(every) + 2 + 2 * 16


def test_numbers_that_devices_would_cut_off_are_refused_there_too() -> None:
    ids = {"x": X, "y": Y, "id": np.array([2**40] * 80)}
    with pytest.raises(UserError, match="int32"):
        trainer(data_on_device=True).fit(ids, steps=1)


def test_batches_of_other_shapes_are_refused_because_the_step_would_be_recompiled() -> None:
    class Grows(ArrayDataset):
        asked = 0

        def rows(self, indices: np.ndarray) -> Any:
            x, y = super().rows(indices)
            self.asked += 1
            return (x if self.asked < 6 else np.concatenate([x, x], 1)), y

    with pytest.raises(UserError, match=r"returned 0 float32\[8\], 1 .* after 0 float32\[4\], 1"):
        trainer().fit(Grows((X, Y)), steps=20)


class Short:
    """A dataset that gives other rows than it was asked for, beyond the first."""

    def __init__(self, change: Callable[[np.ndarray], np.ndarray]) -> None:
        self.change = change

    def __len__(self) -> int:
        return len(X)

    def rows(self, indices: np.ndarray) -> Any:
        x = X[indices]
        return (x if len(x) == 1 else self.change(x)), Y[indices]


@pytest.mark.parametrize(
    "change, shown",
    [
        (lambda x: x[:-5], r"returned 75 rows, shape \(75, 4\), for 80 indices"),
        (lambda x: x[:, :1], r"returned 0 float32\[1\], 1 .* after 0 float32\[4\], 1"),
        (lambda x: x.astype(np.int32), r"returned 0 int32\[4\], 1 .* after 0 float32\[4\], 1"),
    ],
)
def test_data_on_devices_is_all_of_it_and_alike(
    change: Callable[[np.ndarray], np.ndarray], shown: str
) -> None:
    with pytest.raises(UserError, match=shown):
        trainer(data_on_device=True).fit(Short(change), steps=3)


# -- what the host does not do again ---------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["default", "mirrored", "zero", "central_storage"])
def test_the_step_is_compiled_once(strategy: str, caplog: pytest.LogCaptureFixture) -> None:
    """Calls of the jitted function find what was compiled ahead of them."""
    fitted = trainer(strategy=strategy, sharding=SMALL)
    jax.config.update("jax_log_compiles", True)  # of all threads
    try:
        fitted.fit((X, Y), steps=6)
    finally:
        jax.config.update("jax_log_compiles", False)
    compiled = [r.getMessage() for r in caplog.records if "jit(train_step" in r.getMessage()]
    finished = [text for text in compiled if text.startswith("Finished XLA compilation")]
    assert len(finished) == 1, compiled


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "shape"),
    [
        (8, (5,)),
        *(
            pytest.param(n, x, marks=pytest.mark.nightly)
            for n, x in ((1, ()), (8, (2, 3, 4)), (1, (5,)), (8, ()))
        ),
    ],
)
def test_whatever_is_not_finite_is_seen_wherever_it_is(
    shape: tuple[int, ...], devices: int
) -> None:
    """Each element of each array: the sums in which they are looked for lose none of them."""

    def init(key: jax.Array) -> dict[str, jax.Array]:
        return {"w": jnp.ones(shape), "other": jnp.full((4, 4), 3e38)}  # its sums are too large

    def objective(model: Any, batch: jax.Array) -> dict[str, jax.Array]:
        return {"loss": model(batch)}

    places = list(np.ndindex(shape))[:: max(1, int(np.prod(shape)) // 4)]
    wrong = (np.nan, np.inf, -np.inf)
    for number in range(max(len(wrong), len(places))):
        spoilt = np.zeros(shape, np.float32)
        spoilt[places[number % len(places)]] = wrong[number % len(wrong)]

        def update(updates: Any, state: Any, params: Any = None, spoilt: Any = spoilt) -> Any:
            return {"w": jnp.asarray(spoilt), "other": jnp.zeros((4, 4))}, state

        fitted = trainer(
            model=FunctionModel(init, lambda params, x: x[:, 0] * params["w"].ravel()[0]),
            objective=objective,
            optimizer=optax.GradientTransformation(lambda params: optax.EmptyState(), update),
            mesh=MeshSpec(devices=tuple(range(devices))),
        )
        with pytest.raises(NonFiniteError, match="step 1: params"):
            fitted.fit(X, steps=1)


def test_all_processes_have_callbacks_of_the_same_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Because they handle an event together: they agree to stop, for example."""
    compared = list[str]()

    def agree(what: str, value: str, advice: str) -> None:
        compared.append(f"{what} is {value}")

    monkeypatch.setattr(process_group, "agree", agree)
    for functions in ({"log": print, "step": print}, {"epoch_end": print}, {}):
        CallbackRunner(None, functions, state_at_steps=True).begin(from_step_zero=True)
    listed = ["step, log", "epoch_end", "empty"]
    assert compared == [f"the list of events with callbacks is {text}" for text in listed]

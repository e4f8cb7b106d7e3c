"""The watch of layers: its numbers, the names of layers, and that it changes no step."""

import dataclasses
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from helpers import BOUND, TESTS
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from spmdtrain import (
    FunctionModel,
    KerasModel,
    LinenModel,
    MeshSpec,
    Rule,
    RunConfig,
    Trainer,
    UserError,
    open_run,
)
from spmdtrain.document.terminal import Terminal
from spmdtrain.record.lines import WATCH_EDGES, WatchLog
from spmdtrain.sharding.placement import constrain_sharding
from spmdtrain.step.dispatch import Dispatch, Repeat
from spmdtrain.step.layer_loop import scan_layers
from spmdtrain.testing import run_processes
from spmdtrain.trackers.base import Histogram, RunInfo, Tracker
from spmdtrain.train.layer_watch import measure_array, summarize
from spmdtrain.train.schedule import Schedule

os.environ.setdefault("KERAS_BACKEND", "jax")
EDGES = np.array(WATCH_EDGES)
DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(64, 4)).astype(np.float32)
Y = X.sum(1)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, rate: float = 0.0) -> None:
        self.blocks = nnx.List([nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)])
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.out = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = nnx.relu(block(x))
        return self.out(self.dropout(x))[:, 0]


def objective(model: Any, batch: Any) -> dict[str, jax.Array]:
    answer = model(batch[0])
    return {"loss": (answer.reshape(len(batch[1])) - batch[1]) ** 2}


def trainer(workdir: Path | None = None, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "model": Model,
        "objective": objective,
        "optimizer": optax.adam(0.01),
        "workdir": None if workdir is None else str(workdir),
        "global_batch_size": 32,
        "shuffle": False,
        "log_every": 1,
        "trackers": (),
        "terminal": Terminal(quiet=True),
    }
    return Trainer(**defaults | options)


def watched(workdir: Path, steps: int = 1, watch: Any = (".",), **options: Any) -> Any:
    """The first watched step of a run."""
    trainer(workdir, watch=watch, **options).fit((X, Y), steps=steps)
    return next(iter(open_run(workdir).watched.values()))


def lines(workdir: Path) -> list[dict[str, Any]]:
    found = map(json.loads, (workdir / "watch.jsonl").read_text().splitlines())
    return [{name: x for name, x in line.items() if name != "time"} for line in found]


def check_statistics(found: Mapping[str, Any], values: Any) -> None:
    """Checks statistics against NumPy's in float64."""
    x = np.asarray(values, np.float64)
    expected = {
        "norm": np.linalg.norm(x),
        "mean": x.mean(),
        "std": x.std(),
        "min": x.min(),
        "max": x.max(),
        "zeros": (x == 0).mean(),
        "nonfinite": 0.0,
    }
    assert found["size"] == x.size
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    counts, _ = np.histogram(x, EDGES)
    first = int(np.flatnonzero(counts)[0])
    assert found["edges"] == EDGES[first : first + len(found["edges"])].tolist()
    # A value on an edge may be on either side of it after rounding.
    assert np.abs(np.subtract(found["counts"], counts[first:][: len(found["counts"])])).sum() <= 2
    assert sum(found["counts"]) == x.size


PLACES: dict[str, dict[str, Any]] = {
    "one device": {"strategy": "one_device"},
    "8 devices": {"strategy": "mirrored"},
    "sharded parameters": {"strategy": "fully_sharded"},
    "microbatches": {"microbatches": 2},
    "recomputed": {"remat": "full"},
    "data on the devices": {"data_on_device": True},
    "on the host": {"strategy": "central_storage"},
    "exact": {"exact": 16},
    "moving average": {"ema_decay": 0.9},
}


@pytest.mark.parametrize("place", PLACES)
def test_outputs_and_gradients_are_those_of_a_computation_by_hand(
    place: str, tmp_path: Path
) -> None:
    found = watched(tmp_path, **PLACES[place])
    model = trainer().init().params
    layers = [model["blocks"]["0"], model["blocks"]["1"], model["out"]]
    x, outputs = X[:32], []
    for layer in layers:
        x = x @ np.asarray(layer["kernel"]) + np.asarray(layer["bias"])
        outputs.append(x)
        x = np.maximum(x, 0)
    names = ["blocks/0", "blocks/1", "dropout", "out"]
    assert list(found["outputs"]) == names and found["step"] == 1
    outputs.insert(2, np.maximum(outputs[1], 0))
    for name, values in zip(names, outputs, strict=True):
        check_statistics(found["outputs"][name], values)

    def loss(params: Any) -> jax.Array:
        x = jnp.asarray(X[:32])
        for name in ("0", "1"):
            x = jax.nn.relu(x @ params["blocks"][name]["kernel"] + params["blocks"][name]["bias"])
        return jnp.mean(((x @ params["out"]["kernel"] + params["out"]["bias"])[:, 0] - Y[:32]) ** 2)

    gradients = jax.grad(loss)(jax.device_get(model))
    expected = {
        **{f"blocks/{n}/{part}": gradients["blocks"][n][part] for n in "01" for part in BOTH},
        **{f"out/{part}": gradients["out"][part] for part in BOTH},
    }
    assert found["gradients"].keys() == expected.keys()
    for name, values in expected.items():
        assert found["gradients"][name]["norm"] == pytest.approx(np.linalg.norm(values), rel=1e-4)
        assert found["gradients"][name]["zeros"] == (values == 0).mean()


BOTH = ("kernel", "bias")


def curve(workdir: Path) -> list[tuple[Any, ...]]:
    names = ("step", "loss", "gradient_norm", "parameter_norm", "update_norm")
    found = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [tuple(line.get(name) for name in names) for line in found if line["split"] == "train"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"model": partial(Model, rate=0.5)},
        {"strategy": "fully_sharded", "microbatches": 2},
        {"strategy": "one_device"},  # small steps are dispatched together
        {"steps_per_dispatch": 4},
        {"exact": 16},
    ],
    ids=str,
)
def test_a_watched_run_has_the_bits_of_one_that_is_not(
    options: dict[str, Any], tmp_path: Path
) -> None:
    plain, seen = tmp_path / "plain", tmp_path / "seen"
    trainer(plain, **options).fit((X, Y), steps=10)
    trainer(seen, watch=["blocks"], watch_every=3, **options).fit((X, Y), steps=10)
    assert curve(seen) == curve(plain) and len(curve(seen)) == 10
    assert [line["step"] for line in lines(seen)] == [1, 3, 6, 9]
    assert not (plain / "watch.jsonl").exists()


def test_the_norms_of_gradients_are_those_of_the_log(tmp_path: Path) -> None:
    """Of each watched step, and so of its state, batch and random numbers."""
    options = {"model": partial(Model, rate=0.5), "watch_every": 2, "shuffle": True}
    watched(tmp_path, steps=6, **options)
    logged = {step: norm for step, _, norm, *_ in curve(tmp_path)}
    for step, line in open_run(tmp_path).watched.items():
        whole = math.hypot(*(x["norm"] or 0.0 for x in line["gradients"].values()))
        assert whole == pytest.approx(logged[step], rel=1e-5)
    assert list(open_run(tmp_path).watched) == [1, 2, 4, 6]


def test_dropout_is_that_of_the_step(tmp_path: Path) -> None:
    def with_share(model: Any, batch: Any) -> dict[str, jax.Array]:
        outputs = model(batch[0])
        return {"loss": (outputs.mean(1) - batch[1]) ** 2, "dropped": (outputs == 0).mean(1)}

    def make(rngs: nnx.Rngs) -> nnx.Module:
        return nnx.Sequential(nnx.Linear(4, 8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))

    found = watched(tmp_path, watch=["layers"], model=make, objective=with_share)
    (line,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines()[:1])
    assert found["outputs"]["layers/1"]["zeros"] == pytest.approx(line["dropped"])
    assert list(found["outputs"]) == ["layers/0", "layers/1"]


# -- the layers of each library, and values in loops and branches ----------------------------------


class LinenLayers(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        block = linen.Dense(4, name="blocks")
        loop: Any = linen.scan(
            lambda block, x, _: (linen.relu(block(x)), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
        )
        x, _ = loop(block, x, None)
        return linen.Dense(1, name="out")(x)


class NnxLoop(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs: nnx.Rngs) -> nnx.Linear:
            return nnx.Linear(4, 4, rngs=rngs)

        self.blocks = make(rngs)
        self.out = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        run: Any = nnx.scan(
            lambda x, block: nnx.relu(block(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
        )
        return self.out(run(x, self.blocks))


def stacked(key: jax.Array) -> dict[str, jax.Array]:
    return {"blocks": jax.random.normal(key, (3, 4, 4)), "out": jnp.ones((4, 1))}


def scanned(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, None]:
        return constrain_sharding(x @ kernel, "batch", None), None

    x, _ = scan_layers(layer, x, params["blocks"], unroll=False)
    return checkpoint_name(x @ params["out"], "out")


def equinox_model() -> Any:
    eqx = pytest.importorskip("equinox")
    first, second = jax.random.split(jax.random.key(0))
    layers = [eqx.nn.Linear(4, 4, key=first), eqx.nn.Lambda(jax.nn.relu)]
    return eqx.nn.Sequential([*layers, eqx.nn.Linear(4, 1, key=second)])


def of_equinox(model: Any, batch: Any) -> dict[str, jax.Array]:
    return objective(jax.vmap(model), batch)


def keras_model() -> KerasModel:
    import keras

    layers = keras.layers
    hidden = layers.Dense(3, activation="relu", name="hidden")
    model = [keras.Input((4,)), hidden, layers.BatchNormalization(name="norm"), layers.Dense(1)]
    return KerasModel(keras.Sequential(model, name="net"))


IN_LOOP = ["blocks[0]", "blocks[1]", "blocks[2]", "out"]
LIBRARIES: dict[str, tuple[Callable[[], Any], dict[str, Any], list[str]]] = {
    "linen": (lambda: LinenModel(LinenLayers(), X[:1]), {}, IN_LOOP),
    "nnx": (lambda: NnxLoop, {}, IN_LOOP),
    "equinox": (
        equinox_model,
        {"objective": of_equinox},
        ["layers/0", "layers/1", "layers/2"],
    ),
    "keras": (keras_model, {}, ["net/hidden", "net/norm", "net/dense"]),
    "functions": (
        lambda: FunctionModel(stacked, scanned),
        {},
        ["layers[0]", "layers[1]", "layers[2]", "out"],
    ),
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_layers_of_each_library_have_their_names(library: str, tmp_path: Path) -> None:
    make, options, names = LIBRARIES[library]
    found = watched(tmp_path, model=make(), **options)
    assert [x.rstrip("_0123456789") for x in found["outputs"]] == [
        x.rstrip("_0123456789") for x in names
    ]
    width = {"keras": 3}.get(library, 4)
    sizes = [x["size"] for x in found["outputs"].values()]
    assert sizes == [32 * width] * (len(names) - 1) + [32]
    # The last output is the answer, from which the loss is computed.
    last = list(found["outputs"].values())[-1]
    loss = curve(tmp_path)[0][1]
    answers = trainer(model=make(), **options)
    if library != "keras":  # whose batch normalization evaluates otherwise
        values = answers.predict(X[:32])
        check_statistics(last, values)
        assert loss == pytest.approx(np.mean((values[:, 0] - Y[:32]) ** 2), rel=1e-4)


@pytest.mark.parametrize("options", [{}, {"microbatches": 2}, {"strategy": "fully_sharded"}])
def test_the_layers_of_a_loop_are_apart(options: dict[str, Any], tmp_path: Path) -> None:
    model = FunctionModel(stacked, scanned)
    found = watched(tmp_path, watch=["layers"], model=model, **options)
    x = X[:32]
    kernels = np.asarray(trainer(model=model).init().params["blocks"])
    assert list(found["outputs"]) == [f"layers[{n}]" for n in range(3)]
    for kernel, statistics in zip(kernels, found["outputs"].values(), strict=True):
        x = x @ kernel
        check_statistics(statistics, x)


class Branching(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.out = nnx.Linear(4, 1, rngs=rngs)
        self.step = nnx.Variable(jnp.zeros(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        def twice(x: jax.Array) -> jax.Array:
            return checkpoint_name(2 * x, "taken")

        def never(x: jax.Array) -> jax.Array:
            return checkpoint_name(3 * x, "not taken")

        x = jax.lax.cond(self.step[...] == 0, twice, never, x)
        shift = jax.lax.while_loop(
            lambda i: i < 1, lambda i: checkpoint_name(i + 1, "repeated"), jnp.zeros(())
        )
        return self.out(x + shift)


def test_values_in_branches_count_if_they_are_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"model": Branching, "terminal": None, "strategy": "one_device"}
    found = watched(tmp_path, watch=["taken", "repeated"], **options)
    assert list(found["outputs"]) == ["taken"] and found["gradients"] == {}
    check_statistics(found["outputs"]["taken"], 2 * X[:32])
    text = " ".join(capsys.readouterr().out.split())
    assert "watched every 100 steps: outputs of not taken, taken" in text
    assert "not measured, because they are in a loop of unknown length" in text
    assert text.rpartition("devices: ")[2].startswith("repeated")


def test_a_function_without_names_has_gradients_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = FunctionModel(lambda key: {"w": jnp.ones((4, 1))}, lambda params, x: x @ params["w"])
    found = watched(tmp_path, model=model, terminal=None)
    expected = 2 * X[:32].T @ (X[:32].sum(1) - Y[:32]) / 32
    assert found["outputs"] == {} and list(found["gradients"]) == ["w"]
    assert found["gradients"]["w"]["norm"] == pytest.approx(np.linalg.norm(expected), abs=1e-5)
    text = " ".join(capsys.readouterr().out.split())
    assert "the model is a function, so it has no layers with names" in text


# -- what is refused, and when it is due -----------------------------------------------------------


def test_a_pattern_without_a_match_ends_the_run_before_its_first_step(tmp_path: Path) -> None:
    steps: list[int] = []
    options: dict[str, Any] = {"callbacks": {"step": lambda event: steps.append(event.step)}}
    with pytest.raises(UserError) as refused:
        watched(tmp_path / "run", watch=["out", "blocs/1.*"], **options)
    assert str(refused.value).startswith("watch: 'blocs/1.*' matches no layer and no trained")
    assert "The nearest are blocks/1, " in str(refused.value) and not steps
    # Also if the first step after a resume is not due.
    trainer(tmp_path / "resumed").fit((X, Y), steps=2)
    with pytest.raises(UserError, match="nearest are out"):
        watched(tmp_path / "resumed", steps=3, watch=["outt"])
    with pytest.raises(UserError, match=r"watch: '\(' is not a valid regular expression"):
        RunConfig(watch=("(",))


def test_frozen_parameters_have_no_gradients(tmp_path: Path) -> None:
    found = watched(tmp_path, freeze=["blocks"])
    assert list(found["gradients"]) == ["out/bias", "out/kernel"]
    assert "blocks/0" in found["outputs"]


def test_dispatches_end_before_a_watched_step_only_if_they_may() -> None:
    config = RunConfig(watch=("x",), watch_every=5, steps_per_dispatch=4, global_batch_size=1)
    counted, unrolled = (
        Schedule(config, 20, 0, evaluates=False, saves=False, clock=lambda: 0.0) for _ in range(2)
    )
    counted.set_dispatch(Dispatch(4, Repeat.COUNTED))
    unrolled.set_dispatch(Dispatch(4, Repeat.UNROLLED))
    assert [x[0] for x in counted.dispatches(0)] == [1, 5, 9, 10, 14, 15, 19, 20]
    assert [x[0] for x in unrolled.dispatches(0)] == [1, 5, 9, 13, 17]


def test_of_other_dispatches_the_first_step_is_watched(tmp_path: Path) -> None:
    def convolved(rngs: nnx.Rngs) -> nnx.Module:
        return nnx.Conv(4, 1, (1,), rngs=rngs)

    def of_rows(model: Any, batch: Any) -> dict[str, jax.Array]:
        return objective(lambda x: model(x[:, None])[:, 0], batch)

    options = {"model": convolved, "objective": of_rows, "watch": ["kernel"], "watch_every": 3}
    trainer(tmp_path, steps_per_dispatch=4, **options).fit((X, Y), steps=12)
    assert [line["step"] for line in lines(tmp_path)] == [1, 5, 9]
    trainer(tmp_path / "each", **options).fit((X, Y), steps=9)
    each = {line["step"]: line for line in lines(tmp_path / "each")}
    found = [line["gradients"]["kernel"]["norm"] for line in lines(tmp_path)]
    assert found[0] == pytest.approx(each[1]["gradients"]["kernel"]["norm"])
    assert found[2] == pytest.approx(each[9]["gradients"]["kernel"]["norm"], rel=1e-4)


@pytest.mark.slow
def test_a_resumed_run_watches_as_if_it_had_not_ended(tmp_path: Path) -> None:
    options: dict[str, Any] = {"watch": ["."], "watch_every": 2, "model": partial(Model, rate=0.5)}
    trainer(tmp_path / "whole", **options).fit((X, Y), steps=7)
    for steps in (3, 7):
        trainer(tmp_path / "run", **options).fit((X, Y), steps=steps)
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")
    assert [line["step"] for line in lines(tmp_path / "run")] == [1, 2, 4, 6]


# -- the statistics --------------------------------------------------------------------------------


def summary_of(*parts: Any) -> Any:
    return summarize(np.stack([np.asarray(measure_array(jnp.asarray(x))) for x in parts]))


def test_parts_are_joined_as_one_array() -> None:
    values = [DRAW.normal(n, 2.0**n, size=(n + 1, 7)).astype(np.float32) for n in range(4)]
    check_statistics(summary_of(*values), np.concatenate([x.ravel() for x in values]))


def test_the_bins_are_those_of_numpy() -> None:
    powers = 2.0 ** np.arange(-44, 24)
    x = np.concatenate([powers, -powers, 1.3 * powers, -1.3 * powers, [0.0] * 7]).astype(np.float32)
    found = summary_of(x)
    counts, _ = np.histogram(x, EDGES)
    assert found["counts"] == counts.tolist() and found["edges"] == EDGES.tolist()


def test_values_that_are_not_finite_are_counted_and_left_out() -> None:
    x = np.array([1.0, -3.0, np.nan, np.inf, -np.inf, 0.0, 0.0, 2.0], np.float32)
    found = summary_of(x)
    assert (found["size"], found["nonfinite"], found["zeros"]) == (8, 0.375, 0.25)
    assert (found["min"], found["max"], found["mean"]) == (-3, 2, 0)
    assert found["norm"] == pytest.approx(math.sqrt(14)) and sum(found["counts"]) == 5
    nothing = summary_of(np.array([np.nan, np.inf], np.float32))
    assert nothing["nonfinite"] == 1 and nothing["counts"] == nothing["edges"] == []
    for name in ("norm", "mean", "std", "min", "max"):
        assert nothing[name] is None
    json.dumps(nothing, allow_nan=False)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.complex64])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_all_dtypes(dtype: Any, scale: float) -> None:
    x = jnp.asarray(DRAW.normal(size=(16, 5)) * scale, dtype)
    wide = np.asarray(x.astype(jnp.complex64))
    found = summary_of(x)
    expected = np.abs(wide) if dtype == jnp.complex64 else wide.real
    check_statistics(found, expected)


def test_squares_of_large_and_small_values_neither_overflow_nor_vanish() -> None:
    for scale in (1e30, 1e-30):
        x = np.array([3.0, 4.0, 0.0, 0.0], np.float32) * np.float32(scale)
        found = summary_of(x)
        assert found["norm"] == pytest.approx(5 * scale)
        assert found["std"] == pytest.approx(x.astype(np.float64).std(), rel=1e-5)
    # A spread that is small beside the mean.
    x = np.float32(1000) + np.array([0.0, 1.0, 2.0, 3.0], np.float32) / 64
    assert summary_of(x)["std"] == pytest.approx(x.astype(np.float64).std(), rel=1e-3)


# -- trackers --------------------------------------------------------------------------------------


VALID = {
    **{"size": 2, "norm": 1.0, "mean": 0.5, "std": None, "min": 0, "max": 1.0, "zeros": 0.5},
    **{"nonfinite": 0.0, "first": 61, "counts": [1, 1]},
}


@pytest.mark.parametrize(
    "changed",
    [
        {"size": "2"},
        {"size": True},
        {"norm": "\x1b[2J"},
        {"norm": [1.0]},
        {"counts": 3},
        {"counts": [1, 0.5]},
        {"counts": [1] * 200},
        {"first": -1},
        {"first": 122},
    ],
    ids=str,
)
def test_a_line_that_no_run_has_written_is_left_out(changed: dict[str, Any]) -> None:
    log = WatchLog()
    log.add({"step": 3, "time": 0.0, "outputs": {"a": VALID}, "gradients": {}, "later": 1})
    (found,) = log.by_step[3]["outputs"].values()
    assert found["edges"] == [-(2.0**-40), 2.0**-40, 2.0**-39] and found["counts"] == [1, 1]
    log.add({"step": 4, "outputs": {"a": VALID | changed}, "gradients": {}})
    log.add({"step": -1, "outputs": {}, "gradients": {}})
    log.add({"step": 5, "outputs": {}, "gradients": [VALID]})
    assert log.invalid == 3 and list(log.by_step) == [3]


@dataclasses.dataclass
class Kept(Tracker):
    name = "kept"
    numbers: dict[str, float] = dataclasses.field(default_factory=dict)
    histograms: dict[str, Histogram] = dataclasses.field(default_factory=dict)

    def start(self, run: RunInfo) -> None:
        pass

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.numbers |= values

    def histogram(self, step: int, tag: str, histogram: Histogram) -> None:
        self.histograms[tag] = histogram


def test_trackers_get_numbers_and_histograms(tmp_path: Path) -> None:
    kept = Kept()
    found = watched(tmp_path, watch=["^out"], trackers=[kept])
    output = found["outputs"]["out"]
    assert kept.numbers["watch/outputs/out/norm"] == output["norm"]
    assert kept.numbers["watch/outputs/out/nonfinite"] == 0
    assert "watch/outputs/out/size" not in kept.numbers
    assert {x for x in kept.histograms if x.startswith("watch/")} == {
        "watch/outputs/out",
        "watch/gradients/out/bias",
        "watch/gradients/out/kernel",
    }
    histogram = kept.histograms["watch/outputs/out"]
    assert histogram.counts.tolist() == output["counts"]
    assert histogram.edges.tolist() == output["edges"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [MeshSpec(data=4, tensor=2), MeshSpec(data=2, tensor=4)], ids=lambda x: str(x.tensor)
)
def test_tensors_that_are_split_have_the_same_statistics(mesh: MeshSpec, tmp_path: Path) -> None:
    rules = [Rule("blocks/./kernel", PartitionSpec(None, "tensor"))]
    options: dict[str, Any] = {"strategy": "tensor_parallel", "mesh": mesh, "rules": rules}
    split = watched(tmp_path / "split", **options)
    whole = watched(tmp_path / "whole", strategy="one_device")
    for kind in ("outputs", "gradients"):
        assert split[kind].keys() == whole[kind].keys()
        for name, expected in whole[kind].items():
            assert split[kind][name]["norm"] == pytest.approx(expected["norm"], rel=1e-4)
            assert split[kind][name]["max"] == pytest.approx(expected["max"], rel=1e-4)


# -- several processes -----------------------------------------------------------------------------

JOB = """
import sys
from pathlib import Path
sys.path[:0] = [TESTS, TESTS + "/unit/train"]
from spmdtrain import initialize
initialize()
from test_layer_watch import X, Y, trainer
for strategy in ("mirrored", "fully_sharded"):
    options = {"strategy": strategy, "watch": ["."], "watch_every": 2}
    trainer(Path(WORKDIR) / strategy, **options).fit((X, Y), steps=3)
"""


@pytest.mark.slow
def test_several_processes_write_the_statistics_once(tmp_path: Path) -> None:
    job = JOB.replace("TESTS", repr(str(TESTS))).replace("WORKDIR", repr(str(tmp_path)))
    run_processes([sys.executable, "-c", job], processes=2, devices_per_process=2, timeout=BOUND)
    watched(tmp_path / "alone", steps=3, strategy="one_device", watch_every=2)
    expected = lines(tmp_path / "alone")
    assert [line["step"] for line in expected] == [1, 2]
    for strategy in ("mirrored", "fully_sharded"):
        found = lines(tmp_path / strategy)
        assert [line["step"] for line in found] == [1, 2]
        for line, other in zip(found, expected, strict=True):
            for kind in ("outputs", "gradients"):
                assert line[kind].keys() == other[kind].keys()
                for name, each in line[kind].items():
                    assert each["norm"] == pytest.approx(other[kind][name]["norm"], rel=1e-4)
                    assert sum(each["counts"]) == sum(other[kind][name]["counts"])


def test_a_step_that_leaves_its_update_out_is_watched_with_the_state_before_it(
    tmp_path: Path,
) -> None:
    y = Y.copy()
    y[40] = np.nan  # in the second batch of an epoch of two
    options: dict[str, Any] = {"on_divergence": "skip", "watch": (".",), "watch_every": 1}
    trainer(tmp_path, **options).fit((X, y), steps=5)
    found = open_run(tmp_path).watched
    shares = {step: line["gradients"]["out/kernel"]["nonfinite"] for step, line in found.items()}
    assert shares == {1: 0, 2: 1, 3: 0, 4: 1, 5: 0}
    # The state of step 2 is that of step 3, and batch 1 is that of step 3 as well.
    assert found[3]["outputs"] != found[1]["outputs"]

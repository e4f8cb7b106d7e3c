"""Random crossings of features against a loop of plain JAX (`tests/covering.py`).

`COVERING_SEED` is the first seed of the cells; by default they are fixed, and the date determines
those at night. A failure prints the cell and the command that repeats it. A refusal is a right
answer if its message names both features of a pair that the cell crosses (`PAIRS`).
"""

import collections
import dataclasses
import datetime
import itertools
import math
import os

os.environ.setdefault("KERAS_BACKEND", "jax")  # read when Keras is first imported

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import covering
import flax.linen as nn
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from covering import HIDDEN, OUTPUTS, WIDTH, Cell, Numbers
from flax import nnx
from helpers import metrics
from jax.sharding import PartitionSpec

from spmdtrain import (
    FunctionModel,
    KerasModel,
    LinenModel,
    Loop,
    LoraModel,
    MeshSpec,
    Rule,
    Trainer,
    UserError,
    weighted_mean,
)
from spmdtrain.config.run_config import Purpose, derive_seed
from spmdtrain.document.terminal import Terminal

# Keras copies arrays in a way that NumPy 2 will not know some day.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

# Chosen so that each value of a feature occurs twice, and many pairs of values in little time. Two
# of three are left to the night, with the many that follow from the date.
SEEDS = [
    *(189, 541, 580, 598, 612, 1372, 1491, 1805, 1865, 1923, 2057, 2410, 2544, 2615, 2791),
    *(2877, 3279, 3367, 3435, 4100, 4285, 5459, 5481, 5678, 6269, 6543, 7562, 7687, 8413, 8759),
]
if "COVERING_SEED" in os.environ:
    first = int(os.environ["COVERING_SEED"])
    SEEDS = list(range(first, first + int(os.environ.get("COVERING_CELLS", "30"))))
DATE = int(os.environ.get("COVERING_SEED", f"{datetime.date.today():%Y%m%d}000"))
AT_NIGHT = int(os.environ.get("COVERING_CELLS", "300"))
OPTIONS = ("strategy", "microbatches", "steps_per_dispatch", "remat", "exact", "compute_dtype")

# The split of `tensor_parallel`, by columns and then by rows.
RULES = [
    Rule("first/kernel", PartitionSpec(None, "tensor")),
    Rule("second/kernel", PartitionSpec("tensor", None)),
    Rule("bias", PartitionSpec()),
]
# Pairs of features that exclude each other, and what the message says of the first and the second.
PAIRS = {
    ("exact", "strategy"): ("exact", "{}"),
    ("exact", "microbatches"): ("exact is", "{} microbatches"),
    ("exact", "steps_per_dispatch"): ("exact is", "steps_per_dispatch is {}"),
    ("batch", "examples"): ("global_batch_size is {}", "{} examples"),
    ("devices", "microbatches"): ("{} devices", "{} microbatches"),
    ("strategy", "microbatches"): ("devices", "{} microbatches"),
    ("exact", "devices"): ("exact is", "{} devices"),
    ("exact", "weights"): ("exact:", "the weights of the loss depend on trained"),
    ("exact", "eval_batch"): ("exact is", "eval_batch_size is {}"),
    ("callback", "optimizer"): ("{}", "the optimizer"),
    ("entry", "compute_dtype"): ("a keras model", "compute_dtype is {}"),
    ("model", "compute_dtype"): ("a {} model", "compute_dtype is {}"),
}


@pytest.fixture(autouse=True)
def compiles_quickly(request: pytest.FixtureRequest) -> Iterator[None]:
    """Halves the time by LLVM's lowest level; at night programs are compiled as users' are."""
    at_night = request.node.get_closest_marker("nightly") is not None
    jax.config.update("jax_disable_most_optimizations", not at_night)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.skipif("COVERING_SEED" in os.environ, reason="other seeds")
def test_each_value_of_a_feature_is_crossed_twice() -> None:
    crossed = [list(covering.draw(seed).features.items()) for seed in SEEDS]
    count = collections.Counter(itertools.chain(*crossed))
    plain = Cell()
    for name, values in covering.FEATURES.items():
        others = [value for value, _ in values if value != getattr(plain, name)]
        assert min(count[name, value] for value in others) >= 2, name
    pairs = {frozenset(pair) for each in crossed for pair in itertools.combinations(each, 2)}
    assert len(pairs) > 1300 and sum("begun_with" in dict(each) for each in crossed) >= 2


@pytest.mark.parametrize(
    "seed",
    [pytest.param(x, marks=[pytest.mark.nightly] * (n % 3 > 0)) for n, x in enumerate(SEEDS)],
)
def test_a_random_crossing_computes_what_a_plain_loop_does(seed: int, tmp_path: Path) -> None:
    check(covering.draw(seed), tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(AT_NIGHT))
def test_another_crossing_of_the_day(number: int, tmp_path: Path) -> None:
    check(covering.draw(DATE + number), tmp_path)


def check(cell: Cell, folder: Path) -> None:
    print(f"{cell}\nCOVERING_SEED={cell.seed} COVERING_CELLS=1 pytest {__file__} -m 'not nightly'")
    evaluated = covering.make_data(cell, count=21, shift=7)
    try:
        found = {"loop": of_loop}.get(cell.entry, of_trainer)(cell, folder, evaluated)
    except UserError as refusal:
        assert any(excludes(cell, pair, str(refusal)) for pair in PAIRS), refusal
        return
    key = jax.random.key(derive_seed(cell.seed, Purpose.STEP))
    wanted = covering.expected(cell, key, evaluated, first_factors(cell))
    rtol, atol = covering.tolerance(cell)
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=rtol, atol=atol, err_msg="losses")
    for name, value in wanted.params.items():
        np.testing.assert_allclose(found.params[name], value, rtol=rtol, atol=atol, err_msg=name)
    for name, number in found.evaluation.items():
        np.testing.assert_allclose(
            number, wanted.evaluation[name], rtol=rtol, atol=atol, err_msg=name
        )
    if found.evaluated is not None:
        assert wanted.evaluated is not None
        assert found.evaluated.keys() == wanted.evaluated.keys()
        for step, loss in wanted.evaluated.items():
            np.testing.assert_allclose(
                found.evaluated[step], loss, rtol=rtol, atol=atol, err_msg=f"evaluation {step}"
            )
    assert found.saved.keys() == wanted.saved.keys()
    for epoch, values in wanted.saved.items():
        assert found.saved[epoch].keys() >= values.keys(), found.saved[epoch].keys()
        for name, value in values.items():
            np.testing.assert_allclose(
                found.saved[epoch][name], value, rtol=rtol, atol=atol, err_msg=f"{epoch} {name}"
            )
    if found.predictions is not None:
        assert wanted.predictions is not None
        np.testing.assert_allclose(found.predictions, wanted.predictions, rtol=rtol, atol=atol)


def first_factors(cell: Cell) -> dict[str, np.ndarray]:
    """The first factors of LoRA, which a run draws: only these are taken from the package."""
    if not cell.lora:
        return {}
    made = Trainer(
        model=make_model(cell), objective=objective(cell), optimizer=optax.sgd(0.1), seed=cell.seed
    )
    found = by_name(made.functions.init(cell.seed).params)
    return {name: x for name, x in found.items() if name.startswith("lora/")}


def excludes(cell: Cell, pair: tuple[str, str], message: str) -> bool:
    """Returns whether the message names both features of a pair that the cell crosses."""
    said = zip(pair, PAIRS[pair], strict=True)
    return all(
        name in cell.features and words.format(getattr(cell, name)).lower() in message.lower()
        for name, words in said
    )


@pytest.mark.parametrize(
    ("pair", "cell"),
    [
        (("exact", "strategy"), Cell(exact=8, strategy="tensor_parallel", devices=2)),
        (("exact", "microbatches"), Cell(exact=8, microbatches=2)),
        (("exact", "steps_per_dispatch"), Cell(exact=8, steps_per_dispatch=3)),
        (("batch", "examples"), Cell(batch=24, examples=20)),
        (("devices", "microbatches"), Cell(devices=4, microbatches=4)),
        (("exact", "devices"), Cell(exact=8, devices=8)),
        (("exact", "weights"), Cell(exact=8, weights="params", devices=2)),
        (("exact", "eval_batch"), Cell(exact=8, eval_batch=5)),
        (
            ("callback", "optimizer"),
            Cell(entry="from_keras", callback="ReduceLROnPlateau", optimizer="adam"),
        ),
        (
            ("callback", "optimizer"),
            Cell(
                entry="from_keras", callback="LearningRateScheduler", optimizer="ExponentialDecay"
            ),
        ),
        (("entry", "compute_dtype"), Cell(entry="from_keras", compute_dtype="bfloat16")),
        (("model", "compute_dtype"), Cell(model="keras", compute_dtype="bfloat16")),
    ],
)
def test_a_refusal_names_both_features(pair: tuple[str, str], cell: Cell, tmp_path: Path) -> None:
    evaluated = covering.make_data(cell, count=21, shift=7)
    with pytest.raises(UserError) as refusal:
        of_trainer(cell, tmp_path, evaluated)
    assert excludes(cell, pair, str(refusal.value)), refusal.value


@pytest.mark.parametrize(
    "begun_with",
    [
        (("devices", 2), ("strategy", "zero")),
        (("microbatches", 2), ("steps_per_dispatch", 3), ("remat", "full")),
    ],
)
def test_a_resume_under_other_settings_computes_what_one_run_does(
    begun_with: tuple[tuple[str, Any], ...], tmp_path: Path
) -> None:
    cell = Cell(
        continued="resumed",
        begun_with=begun_with,
        optimizer="adam",
        devices=4,
        strategy="fully_sharded",
        weights="zeros",
        examples=37,
    )
    check(cell, tmp_path)


def test_a_resume_that_would_change_the_batches_is_refused(tmp_path: Path) -> None:
    cell = Cell(continued="resumed", begun_with=(("global_batch_size", 16),))
    with pytest.raises(UserError, match=r"global_batch_size\D+(16\D+8|8\D+16)\D"):
        of_trainer(cell, tmp_path, covering.make_data(cell, count=21, shift=7))


# -- the models, with the initial parameters of the plain loop -------------------------------------


def constant(value: np.ndarray) -> Any:
    return lambda key, shape, dtype=jnp.float32: jnp.asarray(value, dtype).reshape(shape)


class Net(nnx.Module):
    def __init__(self, cell: Cell, rngs: nnx.Rngs) -> None:
        initial = {name: constant(x) for name, x in covering.first_params(cell).items()}
        self.first = nnx.Linear(
            *(WIDTH, HIDDEN),
            kernel_init=initial["first/kernel"],
            bias_init=initial["first/bias"],
            rngs=rngs,
        )
        if "batch_norm" in cell.model:
            self.norm = nnx.BatchNorm(
                HIDDEN,
                momentum=covering.MOMENTUM,
                epsilon=covering.EPSILON,
                use_bias=False,
                use_scale=False,
                rngs=rngs,
            )
            if cell.model == "eval_batch_norm":
                self.norm.eval()
        if "dropout" in cell.model:
            self.dropout = nnx.Dropout(1 - covering.KEEP, rngs=rngs)
            if cell.model == "eval_dropout":
                self.dropout.eval()
        self.second = nnx.Linear(
            *(HIDDEN, OUTPUTS),
            kernel_init=initial["second/kernel"],
            bias_init=initial["second/bias"],
            rngs=rngs,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = jnp.tanh(self.first(x))
        hidden = self.dropout(hidden) if hasattr(self, "dropout") else hidden
        return self.second(self.norm(hidden) if hasattr(self, "norm") else hidden)


class LinenNet(nn.Module):
    cell: Cell

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        initial = {name: constant(v) for name, v in covering.first_params(self.cell).items()}
        for name, size in (("first", HIDDEN), ("second", OUTPUTS)):
            x = nn.Dense(
                size,
                name=name,
                kernel_init=initial[f"{name}/kernel"],
                bias_init=initial[f"{name}/bias"],
            )(x)
            x = jnp.tanh(x) if name == "first" else x
        return x


def keras_net(cell: Cell) -> Any:
    import keras

    layers = [
        keras.layers.Dense(HIDDEN, activation="tanh", name="first"),
        keras.layers.Dense(OUTPUTS, name="second"),
    ]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers], name="net")  # in a resume too
    model.set_weights([*covering.first_params(cell).values()])
    return model


def function_net(cell: Cell) -> FunctionModel:
    def apply(params: Any, x: jax.Array) -> jax.Array:
        return covering.forward(plain, params, (), x, training=True)[0]

    plain = dataclasses.replace(cell, lora=False)  # `LoraModel` adds the product
    initial = covering.first_params(cell)
    return FunctionModel(lambda _: jax.tree.map(jnp.asarray, initial), apply)


def make_model(cell: Cell) -> Any:
    model = plain_model(cell)
    if not cell.lora:
        return model
    return LoraModel(model, "first/kernel", rank=covering.RANK, alpha=covering.ALPHA)


def plain_model(cell: Cell) -> Any:
    if cell.model == "linen":
        return LinenModel(LinenNet(cell), jnp.zeros((1, WIDTH)))
    if cell.model == "keras":
        return KerasModel(keras_net(cell))
    if cell.model == "function":
        return function_net(cell)
    return lambda rngs: Net(cell, rngs)


def objective(cell: Cell) -> Any:
    def values(model: Any, batch: Any, x: jax.Array) -> dict[str, Any]:
        output = model(x)
        params = model.args[0] if cell.weights == "params" else None
        loss, weights = covering.values_and_weights(cell, output, batch, params)
        off = jnp.abs(output - batch["y"]).mean(-1)
        return {"loss": loss if cell.weights == "none" else (loss, weights), "off": off}

    # Not in an evaluation: it draws from another key.
    def with_draws(model: Any, batch: Any, key: jax.Array) -> dict[str, Any]:
        return values(model, batch, covering.drawn(batch["x"], key))

    return with_draws if cell.draws else lambda model, batch: values(model, batch, batch["x"])


def source(cell: Cell) -> Any:
    data = covering.make_data(cell)
    if cell.source == "arrays":
        return data
    if cell.source == "py_dataset":
        return py_dataset(cell, data)
    records = [{name: x[i] for name, x in data.items()} for i in range(cell.examples)]
    if cell.source == "records":
        return records
    if cell.source in ("grain", "grain_stream"):
        dataset = grain.MapDataset.source(records)
        return dataset if cell.source == "grain" else dataset.repeat().to_iter_dataset()
    import datasets

    hugging_face = datasets.Dataset.from_list(
        [{name: np.asarray(x).tolist() for name, x in record.items()} for record in records]
    ).with_format("numpy")
    if cell.source == "hugging_face":
        return hugging_face
    return hugging_face.to_iterable_dataset()


def keras_optimizer(cell: Cell) -> Any:
    """Returns the optimizer of a cell if it is one of Keras."""
    from keras import optimizers

    rate: Any = covering.RATE
    if cell.optimizer == "Adam":
        return optimizers.Adam(rate, epsilon=1e-4)
    if cell.optimizer == "ExponentialDecay":
        rate = optimizers.schedules.ExponentialDecay(
            rate, covering.DECAY_STEPS, covering.DECAY_RATE
        )
    averages = {"use_ema": True, "ema_momentum": covering.EMA_MOMENTUM}
    options = averages if cell.optimizer == "use_ema" else {}
    own = cell.optimizer in covering.OF_KERAS
    return optimizers.SGD(rate, momentum=0.9, nesterov=True, **options) if own else None


def keras_callbacks(cell: Cell, folder: Path) -> list[Any]:
    from keras import callbacks

    monitor = "val_loss" if cell.eval_every else "loss"
    options: dict[str, Any] = {"patience": 1, "min_delta": covering.BETTER_BY}
    if cell.callback == "LearningRateScheduler":
        return [callbacks.LearningRateScheduler(covering.Watcher.scheduled)]
    if cell.callback == "ReduceLROnPlateau":
        return [callbacks.ReduceLROnPlateau(monitor, covering.FACTOR, **options)]
    if cell.callback == "EarlyStopping":
        return [callbacks.EarlyStopping(monitor, **options)]
    if cell.callback == "ModelCheckpoint":
        return [callbacks.ModelCheckpoint(str(folder / "{epoch}.keras"))]
    return []


def files_of_keras(folder: Path, *, with_optimizer: bool) -> dict[int, dict[str, Any]]:
    """Returns the values of the models and optimizers in the files, by epoch."""
    found = {}
    for path in folder.glob("*.keras"):
        import keras

        # Keras does not load the file of a model that was compiled without an optimizer otherwise.
        model = keras.saving.load_model(path, compile=with_optimizer)
        values = {v.path.removeprefix("net/"): v.value for v in model.weights}
        layers = ("first/kernel", "first/bias", "second/kernel", "second/bias")
        paths = {name.replace("/", "_"): name for name in layers}
        for variable in model.optimizer.variables if with_optimizer else ():
            layer, _, slot = variable.name.removeprefix("net_").rpartition("_")
            values[f"{paths[layer]}/{slot}" if layer in paths else slot] = variable.value
        found[int(path.stem)] = values
    return found


def py_dataset(cell: Cell, data: dict[str, np.ndarray]) -> Any:
    """The examples in the batches of the run; the last one may be smaller."""
    import keras

    class Batches(keras.utils.PyDataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return math.ceil(cell.examples / cell.batch)

        def __getitem__(self, number: int) -> Any:
            rows = {name: x[number * cell.batch :][: cell.batch] for name, x in data.items()}
            return of_keras(cell, rows) if cell.entry == "from_keras" else rows

    return Batches()


def of_keras(cell: Cell, data: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    """The data as Keras' `fit` takes them."""
    return tuple(data[name] for name in ("x", "y", "w")[: 2 + (cell.weights != "none")])


# -- the runs ----------------------------------------------------------------------------------


def of_trainer(cell: Cell, folder: Path, evaluated: dict[str, np.ndarray]) -> Numbers:
    in_keras = cell.entry == "from_keras"
    data: Any = source(cell)
    test: Any = evaluated
    if in_keras:
        test = of_keras(cell, evaluated)
        data = of_keras(cell, data) if cell.source == "arrays" else data

    def trainer(devices: int = cell.devices, **options: Any) -> Trainer:
        common = {
            "seed": cell.seed,
            "shuffle": False,
            "global_batch_size": cell.batch,
            "eval_batch_size": cell.eval_batch,
            "log_every": 1,
            "eval_every_steps": cell.eval_every,
            "ema_decay": cell.average,
            "terminal": Terminal(quiet=True),
            **{name: getattr(cell, name) for name in OPTIONS},
            **options,
        }
        if cell.strategy == "tensor_parallel":
            common["rules"] = RULES
        if cell.strategy != "default":
            common["mesh"] = MeshSpec(devices=tuple(range(devices)))
        if "stream" in cell.source:
            del common["shuffle"]
            common["stream_shards"] = 1
        if in_keras:
            model = keras_net(cell)
            own = keras_optimizer(cell)
            model.compile(own, loss="mean_squared_error", metrics=["mean_absolute_error"])
            common["optimizer"] = None if own else covering.make_optimizer(cell)
            watching = [*keras_callbacks(cell, folder), *common.pop("callbacks", [])]
            return Trainer.from_keras(model, callbacks=watching, **common)
        return Trainer(
            model=make_model(cell),
            objective=objective(cell),
            optimizer=covering.make_optimizer(cell),
            predict=lambda model, batch: model(batch["x"]),
            freeze=("first",) if cell.freeze else (),
            **common,
        )

    validation = test if cell.eval_every else None
    middle, run = cell.fits[0].stop, str(folder / "run")
    folders = [folder / "run"]
    if cell.continued == "resumed" and cell.steps > 1:
        first = trainer(workdir=run, **dict(cell.begun_with))
        first.fit(data, steps=middle, validation=validation)
    last = trainer(workdir=run)
    if cell.continued == "forked" and cell.steps > 1:
        last.fit(data, steps=middle, validation=validation)
        folders.append(folder / "fork")
        last = trainer(workdir=str(folders[-1]), fork_from=run)
    elif cell.continued == "twice" and cell.steps > 1:
        last.fit(data, steps=middle, validation=validation)
    elif cell.continued == "restarted":
        last = trainer(callbacks=[{"log": lambda event: seen.append(event.metrics["loss"])}])
        seen: list[float] = []
        last.fit(data, steps=cell.steps, validation=validation)
        last.fit(data, steps=cell.steps, validation=validation, restart=True)
        return results(cell, last, folder, seen, None, test)
    last.fit(data, steps=cell.steps, validation=validation)
    lines = [line for each in folders for line in metrics(each)]
    losses = {line["step"]: line["loss"] for line in lines if line["split"] == "train"}
    of_steps = {line["step"]: line["loss"] for line in lines if line["split"] == "eval"}
    return results(cell, last, folder, [losses[step] for step in sorted(losses)], of_steps, test)


def results(
    cell: Cell,
    trainer: Trainer,
    folder: Path,
    losses: list[float],
    evaluated: dict[int, float] | None,
    test: Any,
) -> Numbers:
    found = {} if cell.draws else trainer.evaluate(test)
    if cell.entry == "from_keras":
        found = {"off" if "absolute" in k else k: v for k, v in found.items()}
    assert cell.draws or set(found) >= {"loss", "off"}
    assert trainer.state is not None
    return Numbers(
        losses,
        {name: found[name] for name in ("loss", "off") if name in found},
        np.asarray(trainer.predict(test)),
        by_name(trainer.state.params),
        None if cell.draws else evaluated,
        files_of_keras(folder, with_optimizer=cell.optimizer in covering.OF_KERAS),
    )


def by_name(params: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}
    names = ["first/kernel", "first/bias", "second/kernel", "second/bias"]
    found = {}
    for path, x in named.items():
        (name,) = (each for each in names if each in path)
        is_factor = path.startswith("lora/")
        found[f"lora/{name}/{path[-1]}" if is_factor else name] = np.asarray(x, np.float32)
    return found


def of_loop(cell: Cell, folder: Path, evaluated: dict[str, np.ndarray]) -> Numbers:
    optimizer = covering.make_optimizer(cell)
    options: dict[str, Any] = {"strategy": cell.strategy, "seed": cell.seed, "log_every": 1}
    if cell.strategy != "default":
        options["mesh"] = MeshSpec(devices=tuple(range(cell.devices)))
    if "stream" in cell.source:
        options["stream_shards"] = 1
    else:
        options["shuffle"] = False
    options |= {"global_batch_size": cell.batch, "workdir": str(folder), "steps": cell.steps}

    def init(key: jax.Array) -> dict[str, Any]:
        params = jax.tree.map(jnp.asarray, covering.first_params(cell))
        return {"params": params, "opt_state": optimizer.init(params)}

    def step(state: Any, batch: Any, key: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            x = covering.drawn(batch["x"], key) if cell.draws else batch["x"]
            output, _ = covering.forward(cell, params, (), x, training=True)
            values, weights = covering.values_and_weights(cell, output, batch, params)
            return weighted_mean(values, weights)

        value, gradients = jax.value_and_grad(loss)(state.params)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return dataclasses.replace(state, params=params, opt_state=opt_state), {"loss": value}

    for steps in cell.fits:
        with Loop(**{**options, "steps": steps.stop}, terminal=Terminal(quiet=True)) as loop:
            rules = RULES if cell.strategy == "tensor_parallel" else ()
            state = loop.start(init, train=source(cell), rules=rules)
            compiled = loop.compile_step(step)
            for batch in loop.batches():
                state, output = compiled(state, batch)
                loop.end_step(state, output)
            params = by_name(state.params)
    losses = {x["step"]: x["loss"] for x in metrics(folder) if x["split"] == "train"}
    return Numbers([losses[number] for number in sorted(losses)], {}, None, params, None)

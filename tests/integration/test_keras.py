"""Keras models through the same seam: what Keras' own training would have given, and more."""

import functools
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import BOUND, REPOSITORY, environment, metrics, run
from jax.sharding import PartitionSpec as P
from processes import codes, job
from step_helpers import primitives

from spmdtrain import (
    CollectiveOptions,
    MeshSpec,
    Rule,
    ShardingOptions,
    Trainer,
    UserError,
    load_params,
)
from spmdtrain.adapters.as_adapter import as_adapter
from spmdtrain.document.terminal import Terminal
from spmdtrain.keras.model import KerasModel
from spmdtrain.tree import named_leaves

os.environ.setdefault("KERAS_BACKEND", "jax")  # read when Keras is first imported
keras = pytest.importorskip("keras", reason="Keras is an extra")
Model: Any = keras.Model
Layer: Any = keras.layers.Layer

BATCH, STEPS, CLASSES = 16, 5, 3
_draw = np.random.default_rng(0)
DATA = {
    "image": _draw.normal(1.0, 2.0, (BATCH * STEPS, 4)).astype(np.float32),
    "label": _draw.integers(0, CLASSES, BATCH * STEPS).astype(np.int32),
}

# -- models of each kind; named, so that two of them have the same paths ---------------------------


def layers(dropout: float = 0.0) -> list[Any]:
    return [
        keras.layers.Dense(8, activation="relu", name="hidden"),
        keras.layers.BatchNormalization(momentum=0.9, name="norm"),
        keras.layers.Dropout(dropout, name="dropout"),
        keras.layers.Dense(CLASSES, name="logits"),
    ]


def sequential(dropout: float = 0.0) -> Any:
    return keras.Sequential([keras.Input((4,)), *layers(dropout)], name="net")


def functional(dropout: float = 0.0) -> Any:
    hidden, norm, drop, logits = layers(dropout)
    hidden.kernel_regularizer = keras.regularizers.L2(0.05)
    inputs = keras.Input((4,))
    x = drop(norm(hidden(inputs)))
    return keras.Model(inputs, logits(keras.layers.concatenate([x, inputs])), name="net")


class Net(Model):  # type: ignore[misc]
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(name="net")
        self.hidden, self.norm, self.dropout, self.logits = layers(dropout)

    def call(self, x: Any, training: bool | None = None) -> Any:
        x = self.norm(self.hidden(x), training=training)
        x = self.dropout(x, training=training)
        self.add_loss(0.01 * keras.ops.mean(x**2))
        return self.logits(x)


def subclassed(dropout: float = 0.0) -> Any:
    net = Net(dropout)
    net(DATA["image"][:1])
    return net


KINDS = {"sequential": sequential, "functional": functional, "subclassed": subclassed}


def made(make: Callable[..., Any], *args: Any) -> Any:
    """A model that draws the same initial values each time."""
    keras.utils.set_random_seed(0)
    return make(*args)


def objective(model: Any, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    logits = model(batch["image"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return {"loss": loss + sum(model.losses), "accuracy": logits.argmax(-1) == batch["label"]}


def trainer(model: Any, devices: int = 8, **options: Any) -> Trainer:
    defaults = {"objective": objective, "optimizer": optax.sgd(0.1), "shuffle": False}
    return Trainer(
        **{"mesh": MeshSpec(devices=tuple(range(devices)))} | defaults | options,
        model=model if isinstance(model, KerasModel) else KerasModel(model),
        global_batch_size=BATCH,
        log_every=1,
        terminal=Terminal(quiet=True),
    )


def losses_of(
    model: Any, devices: int = 8, *, steps: int = STEPS, data: Any = DATA, **options: Any
) -> list[float]:
    """Each step's loss; the model has the trained values then."""
    seen: list[float] = []
    fitted = trainer(
        model, devices, callbacks={"log": lambda e: seen.append(e.metrics["loss"])}, **options
    )
    fitted.fit(data, steps=steps)
    assert fitted.model is model
    return seen


def keras_losses(
    model: Any, optimizer: Any, data: dict[str, np.ndarray] = DATA, batch: int = BATCH
) -> list[float]:
    """Each step's loss by Keras' own `fit`, which tells the mean over an epoch."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
    seen = []
    for at in range(0, len(data["label"]), batch):
        x, y = (data[name][at : at + batch] for name in ("image", "label"))
        seen += model.fit(x, y, batch_size=batch, shuffle=False, verbose=0).history["loss"]
    return seen


def values(model: Any) -> dict[str, np.ndarray]:
    return {v.path: np.array(v.value) for v in model.weights}


def check_same_values(found: Any, expected: Any) -> None:
    assert values(found).keys() == values(expected).keys()
    for name, value in values(expected).items():
        np.testing.assert_allclose(values(found)[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


# -- what Keras' own training gives ----------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [pytest.param(x, marks=[pytest.mark.nightly] * (x != "functional")) for x in KINDS],
)
def test_losses_and_values_are_those_of_keras_fit(kind: str) -> None:
    theirs = made(KINDS[kind])
    before = values(theirs)
    expected = keras_losses(theirs, keras.optimizers.SGD(0.1))
    assert np.ptp(expected) > 0.05
    for devices in (1, 8):
        ours = made(KINDS[kind])
        np.testing.assert_allclose(losses_of(ours, devices), expected, rtol=1e-4)
        check_same_values(ours, theirs)  # batch statistics too
    moved = [name for name, old in before.items() if not np.allclose(values(ours)[name], old)]
    assert len(moved) == len(before) == 8


@pytest.mark.nightly
@pytest.mark.slow
def test_keras_adam_is_had_by_a_schedule_of_epsilon() -> None:
    rate, epsilon = 0.01, 1e-3  # large, so that it matters where it is added
    expected = keras_losses(made(sequential), keras.optimizers.Adam(rate, epsilon=epsilon))

    def keras_epsilon(count: jax.Array) -> jax.Array:
        return epsilon / jnp.sqrt(1 - 0.999 ** (count + 1))

    same = optax.inject_hyperparams(optax.adam)(rate, eps=keras_epsilon)
    found = losses_of(made(sequential), optimizer=same)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    other = losses_of(made(sequential), optimizer=optax.adam(rate, eps=epsilon))
    assert abs(other[-1] / expected[-1] - 1) > 1e-3


def test_evaluate_and_predict_are_those_of_keras() -> None:
    model = made(sequential, 0.5)
    fitted = trainer(model)
    fitted.fit(DATA, steps=3)
    ragged = {name: x[:37] for name, x in DATA.items()}
    found, logits = fitted.evaluate(ragged), fitted.predict(ragged)
    returned = fitted.model
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    returned.compile(loss=loss, metrics=["accuracy"])
    theirs = returned.evaluate(ragged["image"], ragged["label"], verbose=0, return_dict=True)
    assert found["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    assert found["accuracy"] == pytest.approx(theirs["accuracy"], rel=1e-6)
    np.testing.assert_allclose(logits, returned.predict(ragged["image"], verbose=0), rtol=1e-4)
    assert fitted.evaluate(ragged) == found  # no statistics were taken, and nothing dropped


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(600)  # two compilations of 50 convolutions
def test_mobilenet_trains_as_in_keras() -> None:
    size, classes = 64, 10
    draw = np.random.default_rng(0)
    image = draw.normal(size=(BATCH, size, size, 3)).astype(np.float32)
    label = draw.integers(0, classes, BATCH).astype(np.int32)
    # The same batch again and again, whose loss falls; so slowly, as a fresh net of 50 layers of
    # batch normalization makes much of any rounding: at 1e-3, 8 devices leave 1 at the third step.
    data = {"image": np.concatenate([image] * STEPS), "label": np.concatenate([label] * STEPS)}
    rate = 2e-6
    make = partial(
        keras.applications.MobileNetV2,
        input_shape=(size, size, 3),
        alpha=0.35,
        weights=None,
        classes=classes,
        classifier_activation=None,
    )
    theirs = made(make)
    expected = keras_losses(theirs, keras.optimizers.SGD(rate), data)
    assert expected == sorted(expected, reverse=True) and expected[0] > 1.02 * expected[-1]
    ours = made(make)
    found = losses_of(ours, optimizer=optax.sgd(rate), data=data)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    statistics = [v.path for v in ours.non_trainable_weights]
    assert len(statistics) == 104
    for name in statistics:
        # Many means are of what is 0 on the whole, of which rounding is all that is left.
        np.testing.assert_allclose(
            values(ours)[name], values(theirs)[name], rtol=1e-3, atol=1e-6, err_msg=name
        )


# -- randomness ------------------------------------------------------------------------------------


class Careless(Model):  # type: ignore[misc]
    """Does not tell its layers whether they train, which is Keras' to do."""

    def __init__(self) -> None:
        super().__init__(name="careless")
        self.dropout = keras.layers.Dropout(0.5)
        self.dense = keras.layers.Dense(1, kernel_initializer="ones", name="dense")

    def call(self, x: Any) -> Any:
        return self.dense(self.dropout(x))


def kept(model: Any, batch: jax.Array) -> dict[str, jax.Array]:
    """Which fraction of ones is kept, in two calls; whether these kept the same."""
    first, second = model(batch), model(batch)
    width = 2 * batch.shape[1]  # what is kept is doubled
    return {"loss": first[:, 0] / width, "second": second[:, 0] / width, "same": first == second}


def test_dropout_is_active_in_training_alone_and_each_call_draws_its_own() -> None:
    ones = np.ones((BATCH, 500), np.float32)
    model = Careless()
    fitted = trainer(KerasModel(model, ones[:1]), objective=kept, optimizer=optax.sgd(0.0))
    found = fitted.fit(ones, steps=1).train
    assert found["loss"] == pytest.approx(0.5, abs=0.03)
    assert found["second"] == pytest.approx(0.5, abs=0.03) and found["same"] < 0.2
    assert fitted.evaluate(ones) == {"loss": 0.5, "second": 0.5, "same": 1.0}
    assert fitted.state is not None
    assert fitted.state.model_state == {}  # the random stream is derived each step


@pytest.mark.slow
def test_masks_are_the_same_on_any_number_of_devices_and_others_each_step() -> None:
    still = optax.sgd(0.0)
    one, eight = (losses_of(made(functional, 0.5), n, optimizer=still) for n in (1, 8))
    np.testing.assert_allclose(eight, one, rtol=1e-5)
    again = {name: np.concatenate([x[:BATCH]] * STEPS) for name, x in DATA.items()}
    repeated = losses_of(made(functional, 0.5), optimizer=still, data=again)
    assert len(set(repeated)) == STEPS


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = losses_of(made(sequential, 0.5))
    where: dict[str, Any] = {"workdir": str(tmp_path)}
    first = losses_of(made(sequential, 0.5), steps=2, **where)
    keras.utils.set_random_seed(7)  # other initial values, other seeds of Keras' own
    model = sequential(0.5)
    assert first + losses_of(model, **where) == whole
    for name, value in named_leaves(load_params(str(tmp_path))).items():
        np.testing.assert_array_equal(value, values(model)[name], err_msg=name)


# -- where it lives --------------------------------------------------------------------------------

SPLITS: dict[str, tuple[dict[str, Any], P]] = {
    "mirrored": ({}, P()),
    "fully_sharded": ({"sharding": ShardingOptions(min_size=16)}, P(None, "fsdp")),
    "tensor_parallel": (
        {
            "rules": [
                Rule("net/hidden/kernel$", P(None, "tensor")),
                Rule("net/logits/kernel$", P("tensor", None)),
            ]
        },
        P(None, "tensor"),
    ),
}


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(x, marks=[pytest.mark.nightly] * (x == "mirrored")) for x in SPLITS],
)
def test_rules_find_variables_by_their_keras_paths(strategy: str) -> None:
    options, spec = SPLITS[strategy]
    model = made(sequential)
    mesh = MeshSpec(tensor=2) if strategy == "tensor_parallel" else MeshSpec()
    momentum = optax.sgd(0.1, momentum=0.9)
    fitted = trainer(model, strategy=strategy, optimizer=momentum, mesh=mesh, **options)
    fitted.fit(DATA, steps=STEPS)
    assert fitted.state is not None
    found = named_leaves(fitted.state.params)
    assert set(found) == {v.path for v in model.trainable_variables}
    assert found["net/hidden/kernel"].sharding.spec == spec
    of_optimizer = named_leaves(fitted.state.opt_state)
    assert of_optimizer["0/trace/net/hidden/kernel"].sharding.spec == spec
    expected = made(sequential)
    keras_losses(expected, keras.optimizers.SGD(0.1, momentum=0.9))
    check_same_values(fitted.model, expected)
    assert all(len(v.value.devices()) == 1 for v in model.weights)  # each where it was


def test_initial_values_go_straight_to_their_places() -> None:
    split = ShardingOptions(min_size=16)
    fitted = trainer(made(sequential), strategy="fully_sharded", sharding=split)
    place = fitted.functions.given_shardings["net/hidden/kernel"]
    assert place.spec == P(None, "fsdp")
    started = fitted.functions.init(0).params["net"]["hidden"]["kernel"]
    np.testing.assert_array_equal(started, values(made(sequential))["net/hidden/kernel"])


def test_gradients_are_also_reduced_by_hand() -> None:
    def make() -> Any:
        dense = keras.layers.Dense(CLASSES, name="logits")
        return keras.Sequential([keras.Input((4,)), dense], name="net")

    expected = losses_of(made(make))
    by_hand = losses_of(made(make), collectives=CollectiveOptions(reduction="all_reduce"))
    np.testing.assert_allclose(by_hand, expected, rtol=1e-5)
    with pytest.raises(UserError, match=r"\(2 arrays"):
        losses_of(made(sequential), collectives=CollectiveOptions(reduction="all_reduce"))


def test_it_computes_in_the_dtype_of_its_own_policy() -> None:
    dense = keras.layers.Dense(CLASSES, name="logits", dtype="mixed_bfloat16")
    model = made(lambda: keras.Sequential([keras.Input((4,)), dense], name="net"))
    fitted = trainer(model)
    products = primitives(fitted, {name: x[:BATCH] for name, x in DATA.items()}, "dot_general")
    dtypes = {str(x.aval.dtype) for one in products for x in one.invars}
    assert dtypes == {"bfloat16"}
    fitted.fit(DATA, steps=1)
    assert fitted.state is not None
    assert fitted.state.params["net"]["logits"]["kernel"].dtype == jnp.float32
    with pytest.raises(UserError, match=r"compute_dtype is bfloat16.*'mixed_bfloat16'"):
        trainer(model, compute_dtype="bfloat16").fit(DATA, steps=1)


# -- the model handed back -------------------------------------------------------------------------


# Keras copies arrays in a way that NumPy 2 will not know some day.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_the_trained_model_is_saved_and_loaded(tmp_path: Path) -> None:
    model = made(functional, 0.3)
    initial = values(model)
    fitted = trainer(model, strategy="fully_sharded", sharding=ShardingOptions(min_size=16))
    fitted.fit(DATA, steps=2)
    for name, value in values(model).items():
        np.testing.assert_array_equal(value, initial[name])  # until it is asked for
    assert fitted.model is model
    path = tmp_path / "net.keras"
    fitted.model.save(path)
    loaded = keras.saving.load_model(path)
    predicted = fitted.predict(DATA)
    found = loaded.predict(DATA["image"], verbose=0)
    np.testing.assert_allclose(found, predicted, rtol=1e-5, atol=1e-5)
    handed = values(model)
    fitted.fit(DATA, steps=4)
    for name, value in values(model).items():
        np.testing.assert_array_equal(value, handed[name])  # not donated with the state
    assert not np.allclose(fitted.predict(DATA), predicted)


def test_frozen_layers_stay_as_they_are() -> None:
    theirs, ours = made(sequential), made(sequential)
    for model in (theirs, ours):
        model.get_layer("hidden").trainable = False
        model.get_layer("norm").trainable = False  # and so uses its statistics
    before = values(ours)
    fitted = trainer(ours)
    fitted.fit(DATA, steps=STEPS)
    assert fitted.state is not None
    assert set(named_leaves(fitted.state.params)) == {"net/logits/kernel", "net/logits/bias"}
    assert len(named_leaves(fitted.state.model_state)) == 6
    keras_losses(theirs, keras.optimizers.SGD(0.1))
    check_same_values(fitted.model, theirs)
    still = {n for n, value in values(ours).items() if np.array_equal(value, before[n])}
    assert still == set(before) - {"net/logits/kernel", "net/logits/bias"}


# -- what is refused -------------------------------------------------------------------------------


def refusal(make: Callable[[], Any], *, steps: int = 0) -> str:
    with pytest.raises(UserError) as caught:
        fitted = trainer(make())
        fitted.fit(DATA, steps=steps)
    return str(caught.value)


def test_losses_that_the_objective_leaves_out_are_named() -> None:
    def forgetful(model: Any, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        logits = model(batch["image"])
        return {"loss": optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])}

    fitted = trainer(made(functional), objective=forgetful)
    with pytest.raises(UserError, match=r"'net' .*model\.losses"):
        fitted.fit(DATA, steps=1)
    assert fitted.evaluate(DATA)["loss"] > 0  # where there is nothing to be learned from them
    assert len(losses_of(made(sequential), objective=forgetful, steps=2)) == 2


def test_an_unbuilt_model_needs_an_example() -> None:
    assert "'careless' is not built, so it has no variables yet: call it once" in refusal(Careless)

    class WithoutBuild(Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(CLASSES, name="inner")

        def call(self, x: Any) -> Any:
            return self.dense(x)

    with pytest.warns(UserWarning, match=r"build\(\)"):
        half = WithoutBuild()
        half.build((None, 4))
    assert "layers that are not built, so they have no variables yet (inner): call" in refusal(
        lambda: half
    )
    half(np.ones((1, 4), np.float32))  # the advice
    assert len(KerasModel(half).given) == 2
    built = KerasModel(Careless(), np.ones((1, 4), np.float32))
    assert set(built.given) == {"careless/dense/kernel", "careless/dense/bias"}


def test_only_a_keras_model_is_taken() -> None:
    assert "takes a keras.Model, not a Dense" in refusal(lambda: keras.layers.Dense(1))


def test_paths_have_to_be_different() -> None:
    class Twice(Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="twice")
            self.one, self.other = (keras.layers.Dense(4, name="d") for _ in range(2))

        def call(self, x: Any) -> Any:
            return self.other(self.one(x))

    example = DATA["image"][:1]
    assert "2 variables of the Keras model have the path twice/d/kernel" in refusal(
        lambda: KerasModel(Twice(), example)
    )

    class Inside(Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.scale = self.add_weight(shape=(), name="dense")
            self.dense = keras.layers.Dense(CLASSES, name="dense")
            self.dense.build(shape)

        def call(self, x: Any) -> Any:
            return self.dense(x) * self.scale

    assert "a variable n/a/dense, and n/a/dense/" in refusal(
        lambda: keras.Sequential([keras.Input((4,)), Inside(name="a")], name="n")
    )


def test_what_optax_would_not_do_is_refused() -> None:
    def with_layer(**options: Any) -> Callable[[], Any]:
        dense = keras.layers.Dense(CLASSES, name="d", **options)
        return lambda: keras.Sequential([keras.Input((4,)), dense], name="n")

    assert "n/d/kernel has the constraint NonNeg" in refusal(with_layer(kernel_constraint="NonNeg"))
    assert "the layer 'd' computes in float16" in refusal(with_layer(dtype="mixed_float16"))
    assert "'n' has no trainable variables" in refusal(with_layer(trainable=False))


def test_a_layer_with_a_state_of_each_row_is_refused() -> None:
    inner = keras.layers.LSTM(2, stateful=True, name="lstm")
    for layer in (inner, keras.layers.Bidirectional(inner)):
        net = keras.Sequential([keras.Input((3, 4), batch_size=8), layer])
        found = refusal(functools.partial(KerasModel, net))
        assert f"({type(layer).__name__}) has stateful=True" in found


def test_variables_that_are_made_late_or_kept_elsewhere_are_named() -> None:
    class Late(Careless):
        def build(self, shape: Any) -> None:
            self.dense.build(shape)
            self.late = keras.layers.Dense(1, name="late")

        def call(self, x: Any) -> Any:
            return self.dense(x) + (self.late(x) if self.dropout else 0)

    late = Late()
    late.built = True
    late.build((None, 4))
    found = refusal(lambda: late, steps=1)
    assert "has layers that are not built, so they have no variables yet (late): call it" in found

    elsewhere = {"seed": keras.random.SeedGenerator(0)}

    class Drawing(Careless):
        def call(self, x: Any) -> Any:
            return self.dense(x + keras.random.normal((4,), seed=elsewhere["seed"]))

    example = DATA["image"][:1]
    found = refusal(lambda: KerasModel(Drawing(), example), steps=1)
    assert "'careless' assigns to a variable that it does not own" in found


def test_keras_has_to_run_on_jax_and_leave_the_devices_to_us(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(keras.backend, "backend", lambda: "tensorflow")
        assert "its tensorflow backend: set KERAS_BACKEND=jax in the env" in refusal(sequential)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "keras", None)
        assert refusal(object) == "Keras is missing: pip install 'spmdtrain[keras]'"
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=["cpu:0"]))
    try:
        assert "set_distribution(None)" in refusal(object)
    finally:
        keras.distribution.set_distribution(None)


def test_the_error_for_a_keras_model_instance_says_how_to_fix_it() -> None:
    with pytest.raises(UserError, match=r"KerasModel\(model\)"):
        as_adapter(made(sequential))


# -- the experiment, and several processes ---------------------------------------------------------

MNIST_KERAS = REPOSITORY / "experiments" / "mnist_keras.py"


@pytest.mark.nightly
@pytest.mark.slow
def test_mnist_learns_in_one_epoch(mnist: Path, tmp_path: Path) -> None:
    options = (
        *(MNIST_KERAS, "--data-dir", mnist, "--workdir", tmp_path, "--epochs", 1, "--hidden", 128),
        *("--cpu-devices", 4, "--strategy", "tensor_parallel", "--mesh.tensor", 2),
    )
    ended = run(*options)
    assert ended.returncode == 0, ended.stderr
    (tested,) = metrics(tmp_path, "test")
    assert tested["step"] == 250 and tested["accuracy"] > 0.85
    shown = run(*options, "--show-sharding").stdout
    lines = [line for line in shown.splitlines() if "mlp/hidden_0/kernel" in line]
    assert "step" not in shown
    assert lines and "P(None, 'tensor')" in lines[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "words"),
    [
        pytest.param(
            *("numpy", "Keras runs on its numpy backend: set KERAS_BACKEND=jax"),
            marks=pytest.mark.nightly,
        ),
        ("tensorflow", r"Keras cannot be imported \(.*tensorflow.*\): set KERAS_BACKEND=jax"),
    ],
)
def test_on_another_backend_the_experiment_says_what_to_do(
    mnist: Path, backend: str, words: str
) -> None:
    if backend == "tensorflow" and importlib.util.find_spec("tensorflow"):
        pytest.skip("TensorFlow is installed, so Keras can be imported on it")
    ended = subprocess.run(
        [sys.executable, "-m", "spmdtrain.run", "--config", MNIST_KERAS, "--data-dir", mnist],
        env=environment() | {"KERAS_BACKEND": backend},
        capture_output=True,
        text=True,
        timeout=BOUND,
    )
    assert ended.returncode == 2
    assert re.match(f"error: {words}", ended.stderr), ended.stderr


EXPERIMENT = '''"""A small Keras network on noise."""

import os
from dataclasses import dataclass

import numpy as np
import optax

from spmdtrain import Experiment, RunConfig
from spmdtrain.keras.model import KerasModel

os.environ["KERAS_BACKEND"] = "jax"

import keras


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    steps: int | None = 4
    learning_rate: float | None = 0.1
    global_batch_size: int | None = 16
    save: str = ""
    seeded: bool = True


def objective(model, batch):
    x, y = batch
    return {"loss": (model(x)[:, 0] - y) ** 2}


def build(config):
    if config.seeded:
        keras.utils.set_random_seed(config.seed)
    dense = [keras.layers.Dense(n, name=f"dense_{n}") for n in (8, 1)]
    norm = keras.layers.BatchNormalization(name="norm")
    model = keras.Sequential([keras.Input((4,)), dense[0], norm, dense[1]], name="net")
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)

    def save(event):  # every process has the whole model
        event.trainer.model.save(f"{config.save}.{os.getpid()}.keras")

    return Experiment(
        model=KerasModel(model),
        objective=objective,
        optimizer=optax.sgd(config.learning_rate),
        train=(x, x.sum(1)),
        callbacks={"fit_end": save} if config.save else {},
    )
'''


@pytest.mark.drill
def test_two_processes_hand_back_the_model_of_one(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(EXPERIMENT)
    split = ("--strategy", "fully_sharded", "--sharding.min-size", 8)
    for number in (1, 2):
        workdir, save = tmp_path / f"run{number}", tmp_path / f"of{number}"
        options = (*split, "--workdir", workdir, "--save", save)
        job(path, *options, processes=number, devices=2 // number)
    (one,), two = list(tmp_path.glob("of1.*.keras")), list(tmp_path.glob("of2.*.keras"))
    assert len(two) == 2
    expected = keras.saving.load_model(one)
    for file in two:
        check_same_values(keras.saving.load_model(file), expected)


@pytest.mark.drill
def test_processes_that_draw_other_initial_values_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(EXPERIMENT)
    ended = job(path, "--no-seeded", "--workdir", tmp_path / "run", check=False)
    assert codes(ended) == [2, 2]
    for one in ended:
        assert "initial value of net/dense_8/kernel is" in one.output
        assert "keras.utils.set_random_seed(seed) before the model is created" in one.output

"""Compiled Keras models: the numbers of Keras' own losses, metrics and optimizers."""

import copy
import itertools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmdtrain import MeshSpec, Trainer, UserError
from spmdtrain.adapters.base import Mode, Variables
from spmdtrain.keras.compile import CompiledKeras
from spmdtrain.keras.internals import mask_of
from spmdtrain.keras.model import BoundKeras, KerasModel, KerasOptimizer
from spmdtrain.step.metrics import weighted_sums
from spmdtrain.train.evaluate import EvaluationTotals

os.environ.setdefault("KERAS_BACKEND", "jax")  # read when Keras is first imported
keras = pytest.importorskip("keras", reason="Keras is an extra")

# Keras itself requests int64 in some metrics.
pytestmark = pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning")

Model: Any = keras.Model
Layer: Any = keras.layers.Layer
Metric: Any = keras.metrics.Metric

_draw = np.random.default_rng(0)
X = _draw.normal(size=(12, 4)).astype(np.float32)
LABEL = _draw.integers(0, 3, 12).astype(np.int32)
BINARY = _draw.integers(0, 2, (12, 1)).astype(np.int32)
WEIGHT = _draw.uniform(0, 3, 12).astype(np.float32)
TOKENS = np.where(np.arange(6) < _draw.integers(1, 6, (12, 1)), 2, 0)  # 0 is masked


def dense(*, units: int = 3, **compiled: Any) -> Any:
    activation, penalty = "softmax" if units > 1 else "sigmoid", keras.regularizers.L2(0.1)
    layer = keras.layers.Dense(units, activation, kernel_regularizer=penalty, name="out")
    model = keras.Sequential([keras.Input((4,)), layer], name="net")
    model.compile(**{"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]} | compiled)
    return model


def tagger(**compiled: Any) -> Any:
    embedding = keras.layers.Embedding(3, 4, mask_zero=True, name="embedding")
    model = keras.Sequential(
        [keras.Input((6,), dtype="int32"), embedding, keras.layers.Dense(3, "softmax", name="out")],
        name="tagger",
    )
    model.compile(**{"loss": "ce", "weighted_metrics": ["accuracy"]} | compiled)
    return model


def two_outputs(**compiled: Any) -> Any:
    inputs = keras.Input((4,))
    first = keras.layers.Dense(3, "softmax", name="first")(inputs)
    second = keras.layers.Dense(1, name="second")(inputs)
    model = keras.Model(inputs, [first, second], name="two")
    model.compile(**compiled)
    return model


def both(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.abs(y_true - y_pred)  # of shape (B, 1): Keras takes the mean of all


class Share:
    """A metric that is a callable object without a name."""

    def __call__(self, y_true: Any, y_pred: Any) -> Any:
        return y_pred[:, 1]


class Worst(Metric):  # type: ignore[misc]
    """A metric whose variable is no sum."""

    def __init__(self) -> None:
        super().__init__(name="worst")
        self.worst = self.add_variable((), "zeros", name="worst")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        distance = keras.ops.abs(keras.ops.cast(y_true, "float32") - y_pred)
        self.worst.assign(keras.ops.maximum(self.worst, keras.ops.max(distance)))

    def result(self) -> Any:
        return self.worst + 0


CASES: dict[str, tuple[Callable[[], Any], tuple[Any, ...]]] = {
    "regularized": (dense, (X, LABEL)),
    "weighted": (
        lambda: dense(
            weighted_metrics=["accuracy", "sparse_categorical_crossentropy"], metrics=["accuracy"]
        ),
        (X, LABEL, WEIGHT),
    ),
    "divided by weights": (
        lambda: dense(
            units=1,
            loss=keras.losses.BinaryCrossentropy(reduction="mean_with_sample_weight"),
            metrics=[keras.metrics.Precision(name="p"), keras.metrics.Recall(name="r"), "acc"],
        ),
        (X, BINARY, WEIGHT),
    ),
    "beyond means": (
        lambda: dense(
            units=1,
            loss="bce",
            metrics=["auc", keras.metrics.BinaryIoU(), keras.metrics.F1Score(threshold=0.5)],
            weighted_metrics=[
                keras.metrics.AUC(curve="PR", name="area"),
                keras.metrics.TruePositives(),
                keras.metrics.RootMeanSquaredError(),
                keras.metrics.R2Score(),
                keras.metrics.PrecisionAtRecall(0.5),
                Worst(),
            ],
        ),
        (X, BINARY, WEIGHT),
    ),
    "classes": (
        lambda: dense(
            metrics=[keras.metrics.MeanIoU(3, sparse_y_pred=False), lambda y, p: p[:, 0], Share()]
        ),
        (X, LABEL),
    ),
    "masked": (tagger, (TOKENS, _draw.integers(0, 3, (12, 6)))),
    "masked by the model and the loss": (
        lambda: tagger(loss=keras.losses.SparseCategoricalCrossentropy(ignore_class=1)),
        (TOKENS, _draw.integers(0, 3, (12, 6)), _draw.uniform(0, 3, (12, 6))),
    ),
    "masked by the loss and divided by weights": (
        lambda: dense(
            loss=keras.losses.SparseCategoricalCrossentropy(
                ignore_class=1, reduction="mean_with_sample_weight"
            )
        ),
        (X, LABEL, WEIGHT),
    ),
    "two outputs": (
        lambda: two_outputs(
            loss={"first": "crossentropy", "second": both},
            loss_weights={"first": 0.5, "second": 2.0},
            metrics={"first": ["accuracy"], "second": "mae"},
        ),
        (X, [LABEL, X[:, :1]], WEIGHT),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [pytest.param(x, marks=[pytest.mark.slow] * (x == "beyond means")) for x in CASES],
)
def test_losses_and_metrics_are_those_of_keras_evaluate(case: str) -> None:
    keras.utils.set_random_seed(0)
    make, batch = CASES[case]
    model = make()
    x, *rest = batch
    expected = model.evaluate(x, *rest[:1], sample_weight=(*rest, None)[1], verbose=0,
                              batch_size=12, return_dict=True)  # fmt: skip
    adapter, compiled = KerasModel(model), CompiledKeras(model)
    variables = Variables(*adapter.init(adapter.given, jax.random.key(0)))

    @jax.jit
    def sums_of(part: Any) -> Any:
        outputs, _ = adapter.run(compiled.objective, variables, part, jax.random.key(0), Mode.EVAL)
        return weighted_sums(outputs, 6)

    totals = EvaluationTotals()
    for rows in (slice(0, 6), slice(6, 12)):
        totals.add(sums_of(jax.tree.map(lambda x, rows=rows: x[rows], batch)))
    found = totals.result()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-5), name


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, clipnorm=0.1),
    "adam": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5), global_clipnorm=0.2
    ),
    "adamw": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.1, use_ema=True, ema_momentum=0.5),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.1, gradient_accumulation_steps=2, clipvalue=0.2),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "adafactor": lambda: keras.optimizers.Adafactor(0.1),
    "nadam": lambda: keras.optimizers.Nadam(0.1),
    "lion": lambda: keras.optimizers.Lion(0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            x, marks=[pytest.mark.nightly] * (x in ("adagrad", "adafactor", "nadam", "lion"))
        )
        for x in OPTIMIZERS
    ],
)
def test_updates_are_those_of_the_keras_optimizer(name: str) -> None:
    keras.utils.set_random_seed(0)
    theirs, ours = dense(optimizer=OPTIMIZERS[name]()), dense(optimizer=OPTIMIZERS[name]())
    for variable, value in zip(ours.weights, theirs.weights, strict=True):
        variable.assign(value.value)
    optimizer = KerasOptimizer(ours.optimizer, ours)
    params = KerasModel(ours).init(KerasModel(ours).given, jax.random.key(0)).params
    state = optimizer.transformation.init(params)
    for number in range(4):
        rate = float(theirs.optimizer.learning_rate)
        gradients = jax.tree.map(lambda x, k=number: jnp.sin(x * 9 + k), params)
        theirs.optimizer.apply(
            [gradients["net"]["out"][v.name] for v in theirs.trainable_variables],
            theirs.trainable_variables,
        )
        updates, state = optimizer.transformation.update(gradients, state, params)
        params = jax.tree.map(jnp.add, params, updates)
        assert float(state.hyperparams["learning_rate"]) == pytest.approx(rate, rel=1e-6)
        for variable in theirs.trainable_variables:
            np.testing.assert_allclose(
                params["net"]["out"][variable.name], variable.value, rtol=1e-5, atol=1e-6
            )
    optimizer.assign_state(state)
    for found, variable in zip(ours.optimizer.variables, theirs.optimizer.variables, strict=True):
        np.testing.assert_allclose(found.value, variable.value, rtol=1e-4, atol=1e-6)
    if optimizer.averages_params:
        theirs.optimizer.finalize_variable_values(theirs.trainable_variables)
        averaged = optimizer.average(params, state)["net"]["out"]["kernel"]
        np.testing.assert_allclose(averaged, theirs.layers[0].kernel.value, rtol=1e-4)


class OwnStep(Model):  # type: ignore[misc]
    def train_step(self, *_: Any) -> Any: ...


REFUSED: dict[str, tuple[Callable[[], Any], Any, str]] = {
    "not compiled": (
        lambda: keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]),
        [],
        r"is not compiled: call model\.compile",
    ),
    "own step": (lambda: _compiled(OwnStep(name="own")), [], "'own' overrides train_step"),
    "eager": (lambda: dense(run_eagerly=True), [], "run_eagerly=True: leave it out"),
    "not compiled by JAX": (
        lambda: dense(jit_compile=False),
        [],
        "jit_compile=False: leave it out",
    ),
    "several steps": (lambda: dense(steps_per_execution=4), [], "option steps_per_dispatch"),
    "scaled": (
        lambda: dense(optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())),
        [],
        "scales the loss",
    ),
    "not a list": (dense, keras.callbacks.CSVLogger("x"), "callbacks is a CSVLogger: it must be"),
    "backup": (dense, [keras.callbacks.BackupAndRestore("x")], "BackupAndRestore .* workdir='x'"),
    "steps": (
        dense,
        [keras.callbacks.LambdaCallback(on_train_batch_end=print)],
        "on_train_batch_end cannot be used",
    ),
}


def _compiled(model: Any) -> Any:
    model.compile(loss="mse")
    return model


@pytest.mark.parametrize("case", REFUSED)
def test_what_needs_the_loop_of_keras_is_refused_by_name(case: str) -> None:
    make, callbacks, words = REFUSED[case]
    with pytest.raises(UserError, match=words):
        Trainer.from_keras(make(), callbacks=callbacks)


@pytest.mark.parametrize(
    ("compiled", "words"),
    [
        ({"loss": keras.losses.MeanSquaredError("sum")}, "reduction 'sum': it must be a mean"),
        (
            {"loss": lambda y, p: keras.ops.mean(p)},
            r"each example, not their mean: for example keras.ops.mean\(\.\.\., axis=-1\)$",
        ),
        (
            {"units": 1, "loss": keras.losses.Tversky()},
            r"not their mean: give it axis, as in keras.losses.Tversky\(axis=\(1,\)\)$",
        ),
        (
            {"metrics": [keras.metrics.Precision([0.2, 0.5], name="p")]},
            r"'p' \(Precision\) returns an",
        ),
        (
            {"metrics": [keras.metrics.MeanAbsoluteError(name="loss")]},
            "the metric 'loss' of model.compile has the name of a loss, 'loss': give it another",
        ),
        ({"loss": {"other": "mse"}}, "loss names the output 'other': the outputs are out"),
    ],
)
def test_losses_that_are_no_means_and_metrics_of_several_numbers_are_refused(
    compiled: dict[str, Any], words: str
) -> None:
    model = dense(**compiled)
    adapter, objective = KerasModel(model), CompiledKeras(model).objective
    variables = adapter.init(adapter.given, jax.random.key(0))
    with pytest.raises(UserError, match=words):
        adapter.run(objective, variables, (X, LABEL), jax.random.key(0), Mode.EVAL)


def of_images(layer: Any) -> Any:
    layers = [layer, keras.layers.Flatten(), keras.layers.Dense(3, "softmax")]
    model = keras.Sequential([keras.Input((6, 6, 1)), *layers])
    model.compile(loss="sparse_categorical_crossentropy")
    assert model.jit_compile is False
    return model


@pytest.mark.slow
def test_layers_that_keras_does_not_compile_are_compiled_or_named() -> None:
    images = _draw.uniform(size=(12, 6, 6, 1)).astype(np.float32)
    keras.utils.set_random_seed(0)
    model = of_images(keras.layers.RandomRotation(0.3))
    adapter, objective = KerasModel(model), CompiledKeras(model).objective
    variables = adapter.init(adapter.given, jax.random.key(0))

    def loss(batch: Any, mode: Mode) -> Any:
        return adapter.run(objective, variables, batch, jax.random.key(1), mode)[0]["loss"]

    found = jax.jit(loss, static_argnums=1)((images, LABEL), Mode.TRAIN)
    np.testing.assert_allclose(found, loss((images, LABEL), Mode.TRAIN), rtol=1e-4)
    assert np.abs(found - loss((images, LABEL), Mode.EVAL)).max() > 1e-3  # it turns the images
    cropped = Trainer.from_keras(of_images(keras.layers.RandomCrop(4, 4, name="crop")))
    with pytest.raises(UserError, match=r"'crop' \(RandomCrop\) .* be compiled: .* jit=False"):
        cropped.fit((images, LABEL), steps=1, global_batch_size=8)


def test_an_output_without_a_target_is_named() -> None:
    inputs = keras.Input((4,))
    penalized = keras.Model(inputs, keras.layers.ActivityRegularization(l2=1.0)(inputs))
    penalized.compile(metrics=["mse"])
    lacking = two_outputs(loss={"first": "crossentropy", "second": "mse"})
    for model, batch, words in (
        (penalized, (X,), "loss or a metric, but a batch has no target"),
        (lacking, (X, {"first": LABEL}), "the output 'second' .* no target"),
    ):
        objective = CompiledKeras(model).objective
        with pytest.raises(UserError, match=words):
            objective(BoundKeras(model, training=False), jax.tree.map(jnp.asarray, batch))


def test_a_missing_internal_names_the_version_of_keras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("keras.src.backend.get_keras_mask")
    with pytest.raises(UserError, match=rf"Keras {keras.__version__} has no .*get_keras_mask"):
        mask_of(X)


class AddsLoss(Layer):  # type: ignore[misc]
    def __init__(self, reduce: Any) -> None:
        super().__init__()
        self.reduce = reduce

    def call(self, x: Any) -> Any:
        self.add_loss(self.reduce(x**2))
        return x


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "layer", "is_refused"),
    [
        ("mse", lambda: keras.layers.Dense(2, activity_regularizer="l2"), False),
        ("mse", lambda: AddsLoss(keras.ops.mean), False),
        ("mse", lambda: AddsLoss(keras.ops.sum), True),
        ("circle", lambda: keras.layers.BatchNormalization(), True),
    ],
)
def test_with_microbatches_the_loss_is_that_of_the_batch_or_refused(
    loss: str, layer: Any, is_refused: bool
) -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(32, 3)).astype("float32")
    y = generator.integers(0, 2, (32, 1) if loss == "mse" else 32)

    def first_loss(microbatches: int) -> float:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((3,)), layer(), keras.layers.Dense(1)])
        model.compile("sgd", loss="mse" if loss == "mse" else keras.losses.Circle())
        seen: list[float] = []
        callbacks = [{"log": lambda event: seen.append(event.metrics["loss"])}]
        options: dict[str, Any] = {"callbacks": callbacks, "quiet": True}
        of = Trainer.from_keras(
            model, microbatches=microbatches, mesh=MeshSpec(devices=(0,)), **options
        )
        of.fit((x, y), steps=1, global_batch_size=32)
        return seen[0]

    if is_refused:
        name = "mse" if loss == "mse" else "keras.losses.Circle"
        with pytest.raises(UserError, match=f"{name} and .*add_loss.* Leave out microbatches"):
            first_loss(4)
    else:
        np.testing.assert_allclose(first_loss(4), first_loss(1), rtol=1e-5)


class Subclassed(Model):  # type: ignore[misc]
    """A model whose outputs have no names but those of a dictionary."""

    def __init__(self, arranged: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.arranged = arranged
        self.one, self.two = keras.layers.Dense(1), keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.arranged(self.one(x), self.two(x))


def with_outputs(arranged: Callable[[Any, Any], Any], *, subclassed: bool) -> Any:
    if subclassed:
        return Subclassed(arranged)
    inputs = keras.Input((4,))
    one, two = (keras.layers.Dense(1, name=name)(inputs) for name in ("one", "two"))
    return keras.Model(inputs, arranged(one, two))


OUTPUTS: dict[str, Callable[[Any, Any], Any]] = {
    "one": lambda one, two: one,
    "one in a list": lambda one, two: [one],
    "list": lambda one, two: [one, two],
    "tuple": lambda one, two: (one, two),
    "dict": lambda one, two: {"u": two, "t": one},
}
NAMED: dict[str, Any] = {
    "nothing": None,
    "one": ["mae"],
    "for each": [["mae"], ["mae"]],
    "twice": [["mae", "mae"], ["mae"]],
    "of one output": [None, ["mse", "mae"]],
    "by name": {"u": ["mae"], "t": "mae"},
    "by one name": {"t": ["mae", keras.losses.MeanSquaredError(name="own")]},
    "functions": [[both, keras.metrics.MeanMetricWrapper(both, name="mae")], [Share()]],
}
LOSSES: dict[str, Any] = {
    "one": {"loss": "mse"},
    "for each": {"loss": ["mse", keras.losses.MeanAbsoluteError()]},
    "weighted": {"loss": ["mse", both], "loss_weights": [0.5, 2.0]},
    "of one output": {"loss": [None, "mse"]},
    "by name": {"loss": {"u": "mse", "t": "mae"}, "loss_weights": {"u": 1.0, "t": 2.0}},
}


@pytest.mark.slow
@pytest.mark.parametrize("subclassed", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("outputs", OUTPUTS)
def test_names_are_those_of_keras(outputs: str, subclassed: bool) -> None:
    """In each case that Keras accepts; in the others there is no name to compare."""
    target, checked = jnp.asarray(X[:, :1]), 0
    arranged = OUTPUTS[outputs]
    for loss, metrics, weighted in itertools.product(LOSSES, NAMED, NAMED):
        if metrics != weighted and (loss != "one" or "twice" not in (metrics, weighted)):
            continue
        model = with_outputs(arranged, subclassed=subclassed)
        try:
            model.compile(
                **copy.deepcopy(LOSSES[loss]),
                metrics=copy.deepcopy(NAMED[metrics]),
                weighted_metrics=copy.deepcopy(NAMED[weighted]),
            )
            # `test_on_batch` compiles a program; this names the metrics without one.
            y, predictions = arranged(target, target), model(jnp.asarray(X))
            model.compute_loss(jnp.asarray(X), y, predictions)
            expected = model.compute_metrics(jnp.asarray(X), y, predictions)
        except (KeyError, TypeError, ValueError, AttributeError):
            continue
        objective, bound = CompiledKeras(model).objective, BoundKeras(model, training=False)
        named = any("by" in x for x in (loss, metrics, weighted))
        if outputs.startswith("one") and (named or isinstance(LOSSES[loss]["loss"], list)):
            # Keras ignores these names, and all losses but the first.
            with pytest.raises(UserError, match=r"names the output|for the 1 outputs"):
                objective(bound, (jnp.asarray(X), y))
            continue
        found = objective(bound, (jnp.asarray(X), y))
        assert found.keys() == expected.keys(), (loss, metrics, weighted)
        checked += 1
    assert checked > 5

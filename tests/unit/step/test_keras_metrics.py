"""Keras metrics of every class, beside `model.evaluate` and `model.fit` of Keras itself."""

import inspect
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from spmdtrain import MeshSpec, Trainer, UserError
from spmdtrain.document.terminal import Terminal

os.environ.setdefault("KERAS_BACKEND", "jax")  # read when Keras is first imported
keras = pytest.importorskip("keras", reason="Keras is an extra")
ops = keras.ops

pytestmark = [  # of Keras itself
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning"),
    pytest.mark.filterwarnings("ignore:You are passing weight as `float`:UserWarning"),
]

Metric: Any = keras.metrics.Metric
Mean: Any = keras.metrics.Mean
ROWS, BATCH, CLASSES = 21, 8, 3  # the last batch is partial
_draw = np.random.default_rng(0)
X = _draw.normal(size=(ROWS, 4)).astype(np.float32)
SPARSE = _draw.integers(0, CLASSES, ROWS).astype(np.int32)
DENSE = np.eye(CLASSES, dtype=np.float32)[SPARSE]
WEIGHTS = _draw.uniform(0, 3, ROWS).astype(np.float32)

# Arguments without which a class cannot be created, or returns several numbers.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "F1Score": {"average": "macro"},
    "FBetaScore": {"average": "micro"},
    "IoU": {"num_classes": CLASSES, "target_class_ids": [0, 1], "sparse_y_pred": False},
    "MeanIoU": {"num_classes": CLASSES, "sparse_y_pred": False},
    "MeanMetricWrapper": {"fn": lambda y_true, y_pred: ops.abs(y_true - y_pred)},
    "OneHotIoU": {"num_classes": CLASSES, "target_class_ids": [0]},
    "OneHotMeanIoU": {"num_classes": CLASSES},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
}
CLASSES_OF_KERAS: dict[str, Any] = {
    name: each
    for name, each in vars(keras.metrics).items()
    # `Mean` and `Sum` take one array, which `compile` does not give them; see `Share` below.
    if inspect.isclass(each) and name not in ("Metric", "Mean", "Sum")
}
WITHOUT_WEIGHTS = {"BinaryIoU"}  # Keras fails if examples have several values


def made(name: str, kind: str) -> Any:
    """Returns a metric of a class, or one of a subclass that mixes examples or changes them."""
    given, parent = ARGUMENTS.get(name, {}), CLASSES_OF_KERAS[name]
    if kind == "keras":
        return parent(**given, name=name)

    class Own(parent):  # type: ignore[misc, valid-type]
        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            changed = ops.roll(y_pred, 1, axis=0) if kind == "mixing" else y_pred[:, ::-1]
            return parent.update_state(self, y_true, changed, sample_weight)

    return Own(**given, name=f"{kind}_{name}")


def rmse(y_true: Any, y_pred: Any) -> Any:
    return ops.sqrt(ops.mean(ops.square(y_true - y_pred)))


def r2(y_true: Any, y_pred: Any) -> Any:
    residual = ops.sum(ops.square(y_true - y_pred))
    return 1 - residual / ops.sum(ops.square(y_true - ops.mean(y_true)))


def of_classes(y_true: Any, y_pred: Any) -> Any:
    return ops.max(y_pred, axis=0)  # of shape (C,), whatever the batch


class Share(Mean):  # type: ignore[misc]
    """A mean whose count is not one of examples."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(ops.sum(y_pred[:, 0]))
        self.count.assign_add(ops.sum(y_true[:, 0]))


class OfBatches(Mean):  # type: ignore[misc]
    """A mean over batches of their mean."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(ops.mean(y_pred[:, 0]))
        self.count.assign_add(1.0)


class Decaying(Metric):  # type: ignore[misc]
    """A moving average over batches."""

    def __init__(self) -> None:
        super().__init__(name=type(self).__name__)
        self.value = self.add_variable((), "ones")

    def reset_state(self) -> None:
        self.value.assign(1.0)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign(0.5 * self.value + ops.mean(y_pred[:, 0]))

    def result(self) -> Any:
        return self.value + 0


class Initial(Decaying):
    """A sum that begins at 1."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign_add(ops.sum(y_pred[:, 0]))


class Latest(Decaying):
    """A value of the last batch alone."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign(ops.sum(y_pred[:, 0]))


# Keras fails if it has to weight values that are not those of examples.
NOT_OF_EXAMPLES: list[Callable[[], Any]] = [
    lambda: rmse,
    lambda: r2,
    lambda: of_classes,
    lambda: keras.metrics.CosineSimilarity(axis=0, name="cosine_of_columns"),
    lambda: keras.metrics.PearsonCorrelation(axis=0, name="pearson_of_columns"),
    lambda: keras.metrics.ConcordanceCorrelation(axis=0, name="concordance_of_columns"),
]
OTHERS: list[Callable[[], Any]] = [
    lambda: keras.metrics.Precision(0.99, name="uncounted"),  # 0 of 0 examples
    lambda: Share(name="share"),
    lambda: OfBatches(name="of_batches"),
    Decaying,
    Initial,
    Latest,
    lambda: "mse",
    lambda: "accuracy",
]


def metrics_of(kind: str, *, weighted: bool) -> dict[str, list[Any]]:
    """Returns the metrics of both outputs; those of sparse labels are given to the second."""
    if kind == "others":
        return {"dense": [make() for make in OTHERS + NOT_OF_EXAMPLES * (not weighted)]}
    found: dict[str, list[Any]] = {"dense": [], "sparse": []}
    for name in CLASSES_OF_KERAS:
        if weighted and name in WITHOUT_WEIGHTS:
            continue
        is_sparse = "Sparse" in name or name in ("IoU", "MeanIoU")
        found["sparse" if is_sparse else "dense"].append(made(name, kind))
    return found


def compiled(kind: str, *, weighted: bool) -> Any:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,))
    outputs = {
        name: keras.layers.Dense(CLASSES, "softmax", name=name)(inputs)
        for name in ("dense", "sparse")
    }
    model = keras.Model(inputs, outputs, name="net")
    key = "weighted_metrics" if weighted else "metrics"
    model.compile(
        keras.optimizers.SGD(0.0),
        {"dense": "mse", "sparse": "sparse_categorical_crossentropy"},
        **{key: metrics_of(kind, weighted=weighted)},
    )
    return model


def trainer(model: Any, devices: int, **options: Any) -> Trainer:
    mesh = MeshSpec(devices=tuple(range(devices)))
    return Trainer.from_keras(
        model, mesh=mesh, shuffle=False, terminal=Terminal(quiet=True), **options
    )


def in_f32(value: float) -> Any:
    return pytest.approx(value, rel=2e-5, abs=1e-6, nan_ok=True)


# The kinds, with weights or without, on a number of devices. Compilation takes a minute in all.
CASES = [
    pytest.param(
        *(kind, weighted, devices),
        marks=[pytest.mark.slow]
        + [pytest.mark.nightly] * (devices == 1 or kind != "others" or weighted),
    )
    for kind in ("keras", "changing", "mixing", "others")
    for weighted in (False, True)
    for devices in (1, 4)
]


@pytest.mark.parametrize(("kind", "weighted", "devices"), CASES)
def test_each_metric_is_that_of_keras_evaluate(kind: str, weighted: bool, devices: int) -> None:
    """Over several batches and a partial one, on one device or split over four."""
    model, y = compiled(kind, weighted=weighted), {"dense": DENSE, "sparse": SPARSE}
    data = (X, y, WEIGHTS) if weighted else (X, y)
    expected = model.evaluate(
        X, y, BATCH, verbose=0, sample_weight=WEIGHTS if weighted else None, return_dict=True
    )
    assert len(expected) > (8 if kind == "others" else 35)
    model = compiled(kind, weighted=weighted)
    found = trainer(model, devices, eval_batch_size=BATCH).evaluate(data)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == in_f32(value), name


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "weighted", "devices"), CASES)
def test_each_mean_of_an_epoch_is_that_of_keras_fit(
    kind: str, weighted: bool, devices: int
) -> None:
    rows, y = 2 * BATCH, {"dense": DENSE[:16], "sparse": SPARSE[:16]}
    weights = WEIGHTS[:rows] if weighted else None
    theirs = compiled(kind, weighted=weighted).fit(
        X[:rows], y, BATCH, epochs=1, shuffle=False, verbose=0, sample_weight=weights
    )
    expected = {name: values[0] for name, values in theirs.history.items()}
    data = (X[:rows], y, weights) if weighted else (X[:rows], y)
    result = trainer(compiled(kind, weighted=weighted), devices).fit(
        data, epochs=1, global_batch_size=BATCH
    )
    (epoch,) = result.history.epochs
    found = {name: x for name, x in epoch.items() if name in expected}
    assert len(found) > (5 if kind == "others" else 20)
    for name, value in found.items():
        assert value == in_f32(expected[name]), name


class Counted(Metric):  # type: ignore[misc]
    """A count of batches, or of examples, whose result is the variable itself."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        of_examples = ops.sum(ops.ones_like(y_pred[:, 0]))
        self.count.assign_add(of_examples if self.name == "examples" else 1.0)

    def result(self) -> Any:
        return self.count


def compiled_with(**metrics: Any) -> Any:
    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(CLASSES)(inputs))
    model.compile(keras.optimizers.SGD(0.0), "mse", **metrics)
    return model


def test_a_metric_may_return_its_variable() -> None:
    """Keras itself fails with it since JAX 0.9 asks for explicit conversions."""
    model = compiled_with(metrics=[Counted("batches"), Counted("examples")])
    found = trainer(model, 4, eval_batch_size=BATCH).evaluate((X, DENSE))
    assert (found["batches"], found["examples"]) == (3, ROWS)


def test_a_function_of_a_batch_cannot_be_weighted() -> None:
    model = compiled_with(weighted_metrics=[rmse])
    with pytest.raises(UserError, match=r"'rmse' cannot be weighted: .*`metrics` instead of"):
        trainer(model, 1, eval_batch_size=BATCH).evaluate((X, DENSE, WEIGHTS))


@pytest.mark.nightly
def test_each_metric_by_name_is_that_of_keras_evaluate_in_every_model() -> None:
    """Those that Keras creates for a model have variables of their own, as those of the next."""
    dense = [name for name in CLASSES_OF_KERAS if name not in ARGUMENTS and "Sparse" not in name]

    def model() -> Any:
        keras.utils.set_random_seed(0)
        net = keras.Sequential([keras.Input((4,)), keras.layers.Dense(CLASSES, "softmax")])
        net.compile("sgd", "mse", metrics=dense)
        return net

    expected = model().evaluate(X, DENSE, BATCH, verbose=0, return_dict=True)
    assert "R2Score" in expected and len(expected) > 20
    for _ in range(2):
        found = trainer(model(), 1, eval_batch_size=BATCH).evaluate((X, DENSE))
        assert found == {name: in_f32(value) for name, value in expected.items()}


def test_shapes_that_a_metric_of_keras_does_not_take_are_refused() -> None:
    net = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, "sigmoid")])
    net.compile("sgd", "mse", metrics=[keras.metrics.F1Score(average="macro", threshold=0.5)])
    with pytest.raises(UserError, match=r"'f1_score' \(F1Score\): .* expects 2D inputs"):
        trainer(net, 1).evaluate((X, X[:, 0]))

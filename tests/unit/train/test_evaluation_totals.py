"""Evaluations with metrics beyond means: sums of arrays, and functions of all predictions."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import sklearn.metrics
from flax import nnx
from step_helpers import on

from spmdtrain import (
    Combination,
    Histogram,
    Mixture,
    PredictionMetric,
    Scalar,
    SumMetric,
    Table,
    Trainer,
    UserError,
    balanced_accuracy,
    confusion_counts,
    confusion_table,
    macro_f1,
    perplexity,
    roc_auc,
    value_histogram,
)
from spmdtrain.document.terminal import Terminal
from spmdtrain.models import MLP
from spmdtrain.step.metrics import weighted_sums
from spmdtrain.train.evaluate import EvaluationTotals

os.environ["KERAS_BACKEND"] = "jax"
keras: Any = pytest.importorskip("keras")

N, CLASSES = 101, 4  # batches of 32 leave 5 examples, which do not divide over 8 devices
GENERATOR = np.random.default_rng(0)
DATA = {
    "x": GENERATOR.normal(size=(N, 6)).astype(np.float32),
    "label": GENERATOR.integers(0, CLASSES, N).astype(np.int32),
    "labeled": (np.arange(N) < 20).astype(np.float32),  # only in the first batch of 32
}
KERAS_AUC = keras.metrics.AUC(num_thresholds=500)
NNX_ACCURACY = nnx.metrics.Accuracy()
EDGES = (-2.0, -0.5, 0.0, 0.5, 2.0)


def in_order(labels: np.ndarray, scores: np.ndarray) -> float:
    """Depends on the order of all examples, so no sum over examples can give it."""
    assert isinstance(labels, np.ndarray)
    assert len(labels) == N
    return float((np.arange(N) * labels * scores).sum())


def objective(model: Any, batch: Any) -> dict[str, Any]:
    logits = model(batch["x"])
    label, predicted = batch["label"], logits.argmax(-1)
    values = optax.softmax_cross_entropy_with_integer_labels(logits, label)
    is_first, score = label == 0, jax.nn.softmax(logits)[:, 0]
    counts = confusion_counts(label, predicted, CLASSES)
    return {
        "loss": Combination({"ce": 1.0, "square": 0.5, "never": 7.0}),
        "ce": values,
        "square": (logits[:, 0] ** 2, batch["labeled"]),
        "never": (values, jnp.zeros_like(values)),
        "size": Scalar(logits.mean()),
        "balanced": SumMetric(counts, balanced_accuracy),
        "f1": SumMetric(counts, macro_f1),
        "examples": SumMetric(jnp.ones_like(score), float),
        "confusion": SumMetric(counts, confusion_table),
        "logits": value_histogram(logits, EDGES, batch["labeled"]),
        "auc": roc_auc(is_first, score),
        "perplexity": perplexity(values, batch["labeled"]),
        "in_order": PredictionMetric(in_order, label, score),
        "keras_auc": PredictionMetric(KERAS_AUC, is_first, score),
        "nnx_accuracy": PredictionMetric(NNX_ACCURACY, logits=logits, labels=label),
    }


def make(devices: int, function: Any = objective, **options: Any) -> Trainer:
    mirrored: dict[str, Any] = {"strategy": "mirrored", "mesh": on(devices)}
    return Trainer(
        model=partial(MLP, 6, [8], CLASSES),
        objective=function,
        optimizer=optax.sgd(0.1),
        predict=lambda model, batch: model(batch["x"]),
        terminal=Terminal(quiet=True),
        **(mirrored if devices > 1 else {}) | options,
    )


@pytest.mark.slow
def test_each_metric_is_that_of_all_examples_once() -> None:
    trainer = make(8)
    logits = trainer.predict(DATA, global_batch_size=32)
    label, labeled = DATA["label"], DATA["labeled"] > 0
    predicted = logits.argmax(-1)
    values = np.asarray(optax.softmax_cross_entropy_with_integer_labels(logits, label))
    score = np.asarray(jax.nn.softmax(logits))[:, 0]
    square = (logits[labeled, 0] ** 2).mean()
    expected = {
        "loss": values.mean() + 0.5 * square,
        "ce": values.mean(),
        "square": square,
        "never": np.nan,
        "size": logits.mean(),
        "balanced": sklearn.metrics.balanced_accuracy_score(label, predicted),
        "f1": sklearn.metrics.f1_score(label, predicted, average="macro"),
        "perplexity": np.exp(values[labeled].mean()),
        "in_order": in_order(label, score),
        "nnx_accuracy": (predicted == label).mean(),
        "examples": N,
    }
    found = trainer.evaluate(DATA, global_batch_size=32)
    exact = sklearn.metrics.roc_auc_score(label == 0, score)
    assert found.pop("auc") == pytest.approx(exact, abs=2e-3)
    assert found.pop("keras_auc") == pytest.approx(exact, abs=5e-3)
    assert found == pytest.approx(expected, rel=1e-5, nan_ok=True)
    assert trainer.evaluate(DATA, global_batch_size=32) == pytest.approx(
        found | {"auc": exact, "keras_auc": exact}, abs=5e-3, nan_ok=True
    )


def test_padding_rows_do_not_count_and_batches_are_added_up_in_f64() -> None:
    totals = EvaluationTotals()
    for mask, values in (([1, 1, 0], [2**24, 0, 7]), ([1, 1, 1], [1, 0, 0])):
        x = jnp.asarray(values, jnp.float32)
        outputs = {
            "loss": x * 0,
            "sum": SumMetric(x, float),
            "rows": PredictionMetric(len, x),
            "scalar": Scalar(5.0 * (x[0] == 1)),
        }
        totals.add(weighted_sums(outputs, 3, jnp.asarray(mask)))
    expected = {"loss": 0, "sum": 2**24 + 1, "rows": 5, "scalar": 5 * 3 / 5}
    assert totals.result() == expected


@pytest.mark.nightly
@pytest.mark.slow
def test_training_logs_the_combined_loss_and_evaluations_the_rest(tmp_path: Path) -> None:
    trainer = make(1, workdir=str(tmp_path), global_batch_size=24, steps_per_dispatch=2)
    result = trainer.fit(DATA, validation=DATA, steps=9)
    epoch = result.history.epochs[0]
    terms = {"ce": 1.0, "square": 0.5, "never": 7.0}
    assert epoch["loss"] == pytest.approx(sum(c * epoch[n] for n, c in terms.items()), rel=1e-6)
    assert "auc" not in epoch
    assert {"auc", "in_order", "perplexity"} <= result.validation.keys()
    assert result.validation["examples"] == N  # the last batch has 5 of 24 rows, the rest padding
    assert "confusion" not in result.validation
    text = (tmp_path / "media.jsonl").read_text()
    assert '"confusion"' in text
    assert '"logits"' in text


@pytest.mark.slow
def test_media_of_a_mixture_are_computed_once_for_all_examples() -> None:
    finished: list[np.ndarray] = []

    def table(counts: np.ndarray) -> Table:
        finished.append(counts)
        return confusion_table(counts)

    def counted(model: Any, batch: Any) -> dict[str, Any]:
        counts = confusion_counts(batch["label"], model(batch["x"]).argmax(-1), CLASSES)
        examples = SumMetric(jnp.ones(len(batch["x"])), float)
        return {"loss": batch["x"][:, 0], "counts": SumMetric(counts, table), "n": examples}

    parts = {
        "few": {n: x[:5] for n, x in DATA.items()},
        "many": {n: x[5:] for n, x in DATA.items()},
    }
    mixture = Mixture({name: (part, 0.5) for name, part in parts.items()})
    found = make(1, counted).evaluate(mixture, global_batch_size=N)
    assert [found[name] for name in ("n", "n/few", "n/many")] == [N, 5, N - 5]
    assert [counts.sum() for counts in finished] == [N]


def test_finished_media_are_those_of_numpy() -> None:
    counts = np.zeros((3, 3))
    counts[0, 1] = 2
    table = confusion_table(counts)
    assert isinstance(table, Table)
    assert table.on_host().rows() == [[0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0]]
    values = np.array([[-3, -2, -0.5], [0.1, 2, np.nan]], np.float32)
    metric = value_histogram(values, EDGES)
    histogram = metric.finish(np.asarray(metric.values, np.float64).sum(0))
    assert isinstance(histogram, Histogram)
    expected = np.histogram(values[np.isfinite(values)], EDGES)[0]
    np.testing.assert_array_equal(histogram.on_host().counts, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (lambda x: SumMetric(x, lambda total: "text"), "returned a str: it must return one number"),
        (lambda x: SumMetric(x, lambda total: total), r"of shape \(6,\): it must return one numb"),
        (lambda x: SumMetric(x.sum(0), np.sum), "a row for each of the 32 examples"),
        (lambda x: SumMetric(x, 5), "finish is a int: it must be a function of the sum"),  # type: ignore[arg-type]
        (lambda x: PredictionMetric(keras.metrics.AUC, x), "create the object outside"),
        (lambda x: PredictionMetric(np.mean), "without arrays"),
        (
            lambda x: perplexity(x, x[0]),
            r"values of shape \(32, 6\) and weights of shape \(6,\): va",
        ),
        (lambda x: roc_auc(x[:, 0], x[:, 0], bins=0), "bins is 0: it must be an integer above 0"),
        (lambda x: roc_auc(0 * x[:, 0] + 0.7, 0 * x[:, 0]), "some labels are neither 0 nor 1"),
        (lambda x: roc_auc(2 * (x[:, 0] > 0), 0 * x[:, 0]), "some labels are neither 0 nor 1"),
        (lambda x: PredictionMetric(np.mean, "x"), "'wrong' does not consist of arrays: "),
        (lambda x: Scalar(None), "'wrong' does not consist of arrays: None is not"),  # type: ignore[arg-type]
    ],
)
def test_a_metric_that_is_not_one_number_is_refused(metric: Any, message: str) -> None:
    def wrong(model: Any, batch: Any) -> dict[str, Any]:
        return {"loss": model(batch["x"]).sum(-1), "wrong": metric(batch["x"])}

    rows = {name: x[:32] for name, x in DATA.items()}
    with pytest.raises(UserError, match=message):
        make(1, wrong).evaluate(rows, global_batch_size=32)


@pytest.mark.slow
def test_media_cannot_rank_checkpoints() -> None:
    with pytest.raises(UserError, match="best_metric is 'confusion', which this evaluation does"):
        make(1, best_metric="confusion").fit(DATA, validation=DATA, global_batch_size=32, steps=1)

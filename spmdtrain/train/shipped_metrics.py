"""Metrics beyond means: confusion counts, AUC, perplexity and histograms.

Each is a `SumMetric`, or makes one: a sum over examples on the devices, finished on the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmdtrain.errors import UserError
from spmdtrain.step.metrics import SumMetric
from spmdtrain.trackers.base import Histogram, Table

Array = jax.typing.ArrayLike


def confusion_counts(labels: Array, predictions: Array, classes: int) -> jax.Array:
    """Returns the confusion matrix of each example, as values of a `SumMetric`.

    Args:
      labels: Integers (B,). Examples with a label outside of 0 to classes - 1 are not counted.
      predictions: Integers (B,).
      classes: Number of classes C.

    Returns:
      f32 (B, C, C): 1 at [label, prediction], 0 elsewhere.

    Raises:
      UserError: If the shapes differ.
    """
    labels, predictions = jnp.asarray(labels), jnp.asarray(predictions)
    if labels.ndim != 1 or labels.shape != predictions.shape:
        raise UserError(
            f"confusion_counts: labels of shape {labels.shape} and predictions of shape "
            f"{predictions.shape}: both must be integers of shape (B,)"
        )
    rows, columns = (jax.nn.one_hot(x, classes, dtype=jnp.float32) for x in (labels, predictions))
    return rows[:, :, None] * columns[:, None, :]


def balanced_accuracy(counts: np.ndarray) -> float:
    """Returns the mean recall of the classes that have examples; NaN if none has.

    Args:
      counts: Confusion matrix (labels, predictions).
    """
    of_class = counts.sum(1)
    present = of_class > 0
    return _mean(counts.diagonal()[present] / of_class[present])


def macro_f1(counts: np.ndarray) -> float:
    """Returns the mean F1 score of the classes that occur among labels or predictions.

    Args:
      counts: Confusion matrix (labels, predictions).
    """
    both = counts.sum(0) + counts.sum(1)
    return _mean(2 * counts.diagonal()[both > 0] / both[both > 0])


def confusion_table(counts: np.ndarray) -> Table:
    """Returns a confusion matrix as media to log: a row for each label.

    Args:
      counts: Confusion matrix (labels, predictions).
    """
    whole = bool((counts == np.rint(counts)).all())  # not if examples have weights
    shown = counts.astype(np.int64) if whole else counts
    columns = {f"predicted {n}": column.tolist() for n, column in enumerate(shown.T)}
    return Table({"label": list(range(len(counts))), **columns})


def roc_auc(
    labels: Array, scores: Array, *, bins: int = 1000, weights: Array | None = None
) -> SumMetric:
    """Returns the area under the ROC curve, from counts of scores in bins of equal width.

    It is the probability that a positive example has a larger score than a negative one. Scores in
    the same bin count as ties, which changes it by at most half the share of such pairs.

    Args:
      labels: (B,), 1 for positive and 0 for negative examples. Examples with a label below 0 are
        not counted. Any other value, such as 2 or 0.7, is an error of the evaluation, unless its
        weight is 0.
      scores: (B,), from 0 to 1, such as probabilities. If one is outside or NaN, the AUC is NaN.
      bins: Number of bins.
      weights: (B,), by default 1.

    Raises:
      UserError: If the shapes differ, or `bins` is not a number of bins.
    """
    if not isinstance(bins, int) or bins < 1:
        raise UserError(f"roc_auc: bins is {bins!r}: it must be an integer above 0")
    labels, scores = jnp.asarray(labels), jnp.asarray(scores, jnp.float32)
    if labels.ndim != 1 or labels.shape != scores.shape:
        raise UserError(
            f"roc_auc: labels of shape {labels.shape} and scores of shape {scores.shape}: both "
            "must have shape (B,)"
        )
    labels = labels.astype(jnp.int32) if labels.dtype == jnp.bool_ else labels
    # One more bin counts the labels that are no classes, because values are not known under jit.
    is_wrong = (labels != 0) & (labels != 1) & ~(labels < 0)
    label = jnp.where(is_wrong, jnp.zeros_like(labels), labels).astype(jnp.int32)
    of_score = jnp.clip(scores * bins, 0, bins - 1).astype(jnp.int32)
    of_bin = jax.nn.one_hot(jnp.where(is_wrong, bins, of_score), bins + 1, dtype=jnp.float32)
    counts = jax.nn.one_hot(label, 2, dtype=jnp.float32)[:, :, None] * of_bin[:, None, :]
    valid = (scores >= 0) & (scores <= 1)
    return SumMetric(jnp.where(valid[:, None, None], counts, jnp.nan), _area, weights)


def perplexity(values: Array, weights: Array | None = None) -> SumMetric:
    """Returns exp of the weighted mean of negative log-likelihoods over all examples.

    Args:
      values: (B, ...), negative log-likelihoods in nats, of tokens for example.
      weights: Broadcast against `values` from the left; by default 1.

    Raises:
      UserError: If the shapes do not fit.
    """
    values = jnp.asarray(values, jnp.float32)
    weights = jnp.ones((), jnp.float32) if weights is None else jnp.asarray(weights, jnp.float32)
    lengths = zip(weights.shape, values.shape, strict=False)
    if not values.ndim >= max(1, weights.ndim) or any(w not in (1, v) for w, v in lengths):
        raise UserError(
            f"perplexity: values of shape {values.shape} and weights of shape {weights.shape}: "
            "values must have shape (B, ...), and weights its first dims"
        )
    weights = weights.reshape(weights.shape + (1,) * (values.ndim - weights.ndim))
    weights = jnp.broadcast_to(weights, values.shape)
    weighted = jnp.where(weights == 0, 0.0, values) * weights
    sums = [x.reshape(len(values), -1).sum(1) for x in (weighted, weights)]
    return SumMetric(jnp.stack(sums, -1), _exp_of_mean)


def value_histogram(
    values: Array, edges: Sequence[float], weights: Array | None = None
) -> SumMetric:
    """Returns a histogram of values over all examples, as media to log.

    Args:
      values: (B, ...). Those outside of the edges, and NaN, are not counted; a value at an inner
        edge belongs to the bin on its right.
      edges: (n + 1,), rising.
      weights: (B,), 1 or 0: whether an example counts. By default 1.

    Raises:
      UserError: If the edges do not rise.
    """
    if len(edges) < 2 or not (np.diff(edges) > 0).all():
        raise UserError(f"value_histogram: the edges must rise: {list(edges)}")
    values = jnp.asarray(values, jnp.float32)
    values = values.reshape(len(values), -1, 1)
    lower, upper = jnp.asarray([edges[:-1], edges[1:]], jnp.float32)[:, None, None]
    inside = (values >= lower) & (values < upper)
    counts = inside.sum(1, dtype=jnp.float32)
    last = (values[..., 0] == edges[-1]).sum(1, dtype=jnp.float32)  # closed, as in NumPy
    finish = _CountedBins(tuple(map(float, edges)))
    return SumMetric(counts.at[:, -1].add(last), finish, weights)


@dataclass(frozen=True)
class _CountedBins:
    edges: tuple[float, ...]

    def __call__(self, counts: np.ndarray) -> Histogram:
        return Histogram(edges=np.array(self.edges), counts=counts)


def _area(counts: np.ndarray) -> float:
    """Returns the AUC of counts (negative and positive, bins); the last bin is of wrong labels."""
    if counts[0, -1] > 0:
        raise UserError(
            "roc_auc: some labels are neither 0 nor 1: compare them with the positive class, such "
            "as label == 2, and give examples without a label the label -1 or the weight 0"
        )
    negatives, positives = counts[:, :-1]
    below = np.concatenate([[0.0], np.cumsum(negatives)[:-1]])
    pairs = negatives.sum() * positives.sum()
    return float((positives * (below + negatives / 2)).sum() / pairs) if pairs else float("nan")


def _exp_of_mean(sums: np.ndarray) -> float:
    total, weight = sums
    with np.errstate(over="ignore"):
        return float(np.exp(total / weight)) if weight else float("nan")


def _mean(values: Any) -> float:
    return float(np.mean(values)) if len(values) else float("nan")

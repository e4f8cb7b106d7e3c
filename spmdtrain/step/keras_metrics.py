"""Keras metrics as outputs of an objective: means, sums, or functions of all predictions."""

import enum
import math
import warnings
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmdtrain.adapters.keras_internals import direction_of, mask_of, reported_name
from spmdtrain.adapters.keras_losses import expanded, kind_of_labels
from spmdtrain.errors import UserError
from spmdtrain.step.outputs import PredictionMetric, SumMetric


class MetricKind(enum.Enum):
    """The way in which the result of a metric is computed from its examples."""

    MEAN = enum.auto()  # its first variable divided by its second one
    RATIO = enum.auto()  # its first variable divided by the sum of both: Precision and Recall
    SUMS = enum.auto()  # a function of its variables, each a sum over the examples
    PREDICTIONS = enum.auto()  # a function of all predictions


@dataclass(frozen=True)
class OutputMetric:
    """A Keras metric of one output.

    Attributes:
      name: The name, as Keras reports it.
      metric: The Keras metric. Only `of_predictions` changes its state.
      kind: How its result is computed. Training steps compute the first two kinds only.
      takes_mask: Whether the metric ignores what the mask of an output excludes.
    """

    name: str
    metric: Any
    kind: MetricKind
    takes_mask: bool

    @property
    def direction(self) -> str | None:
        """The kind of its best value: "min" (the lowest) or "max"; None if it is unknown."""
        return direction_of(self.metric)

    def __call__(
        self, targets: jax.Array, predictions: jax.Array, weights: jax.Array | None
    ) -> tuple[jax.Array, jax.Array] | SumMetric | PredictionMetric:
        """Returns the output of an objective whose value over a dataset is the metric's result.

        Args:
          targets: Of the output.
          predictions: The output.
          weights: The sample weights.
        """
        if self.kind is MetricKind.PREDICTIONS:
            named = {} if weights is None else {"sample_weight": weights}
            return PredictionMetric(self.of_predictions, targets, predictions, **named)
        mask = mask_of(predictions) if self.takes_mask else None
        if mask is not None:
            kept = mask.astype(jnp.float32)
            weights = kept if weights is None else kept * expanded(weights, kept)
        zeros = [jnp.zeros(v.shape, v.dtype) for v in self.metric.variables]

        def of_example(*row: Any) -> jax.Array:
            batch = jax.tree.map(lambda x: x[None], row)
            sums = self.metric.stateless_update_state(zeros, *batch)
            return jnp.concatenate([x.ravel().astype(jnp.float32) for x in sums])

        sums = jax.vmap(of_example)(targets, predictions, weights)
        if self.kind is MetricKind.SUMS:
            return SumMetric(sums, self.of_sums)
        first, second = sums[:, 0], sums[:, 1]
        divisor = first + second if self.kind is MetricKind.RATIO else second
        return jnp.where(divisor == 0, 0.0, first / jnp.where(divisor == 0, 1, divisor)), divisor

    def of_sums(self, sums: np.ndarray) -> float:
        """Returns the metric's result.

        Args:
          sums: The values of all of its variables over a dataset, one after the other.

        Raises:
          UserError: If the result is not one number.
        """
        variables = self.metric.variables
        ends = np.cumsum([math.prod(v.shape) for v in variables])
        parts = zip(variables, np.split(sums, ends[:-1]), strict=True)
        values = [x.reshape(v.shape).astype(v.dtype) for v, x in parts]
        return self._number(self.metric.stateless_result(values))

    def of_predictions(self, *arrays: np.ndarray, **named: np.ndarray) -> float:
        """Returns the metric's result.

        Args:
          *arrays: Targets and predictions of a dataset.
          **named: Its sample weights, if the metric uses them.

        Raises:
          UserError: If the result is not one number.
        """
        self.metric.reset_state()
        self.metric.update_state(*arrays, **named)
        return self._number(self.metric.result())

    def _number(self, result: Any) -> float:
        if isinstance(result, dict) or np.size(result) != 1:
            shown = "a dictionary" if isinstance(result, dict) else f"an array {np.shape(result)}"
            raise UserError(
                f"the metric {self.name!r} ({type(self.metric).__name__}) returns {shown}: it must "
                "return one number. Give an average (average='macro'), one threshold, or one "
                "metric for each class (class_id=0)"
            )
        return float(np.asarray(result).reshape(()))


def metric_of_output(
    keras: Any, given: Any, targets: jax.Array, predictions: jax.Array
) -> OutputMetric:
    """Returns a metric of an output.

    Args:
      keras: The module.
      given: The name of a metric, a function, or a Keras metric.
      targets: Of the output; its rank decides what "accuracy" means.
      predictions: The output.

    Raises:
      UserError: If the metric's result is not one number.
    """
    metrics = keras.metrics
    resolved = given
    if isinstance(given, str) and given.lower() in ("accuracy", "acc"):
        kind = kind_of_labels(targets, predictions)
        resolved = {
            "binary": metrics.BinaryAccuracy,
            "categorical": metrics.CategoricalAccuracy,
            "sparse_categorical": metrics.SparseCategoricalAccuracy,
        }[kind]()
    metric = metrics.get(resolved)
    name = given if isinstance(given, str) else reported_name(metric)
    if not isinstance(metric, metrics.Metric):
        metric = metrics.MeanMetricWrapper(metric, name=name)
    takes_mask = isinstance(metric, metrics.MeanMetricWrapper)
    found = OutputMetric(name, metric, _kind(metrics, metric), takes_mask)
    if found.kind is MetricKind.SUMS:
        # Called once before the training, because an array must not stop its first evaluation.
        with jax.ensure_compile_time_eval(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about no examples
            found.of_sums(np.zeros(sum(math.prod(v.shape) for v in metric.variables)))
    return found


def _kind(metrics: Any, metric: Any) -> MetricKind:
    is_scalar = all(v.shape in ((), (1,)) for v in metric.variables)
    if isinstance(metric, metrics.Mean) and type(metric).result is metrics.Mean.result:
        return MetricKind.MEAN
    for ratio in (metrics.Precision, metrics.Recall):
        if isinstance(metric, ratio) and type(metric).result is ratio.result and is_scalar:
            return MetricKind.RATIO
    # The variables of Keras' own updates are sums. Some metrics create them in the first update,
    # which a step cannot contain, and the variables of other classes may be anything.
    is_of_keras = type(metric).update_state.__module__.split(".")[0] == "keras"
    return MetricKind.SUMS if is_of_keras and metric.variables else MetricKind.PREDICTIONS

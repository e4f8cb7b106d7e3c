"""Keras metrics as values and weights for each example."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from spmdtrain.adapters.keras_losses import expanded, kind_of_labels
from spmdtrain.errors import UserError


@dataclass(frozen=True)
class ExampleMetric:
    """A Keras metric whose result is a quotient of two sums over the examples.

    Attributes:
      name: The name, as Keras reports it.
      metric: The Keras metric; it is called without its state.
      counts_pairs: Whether the sum of the metric's two variables divides the first, as for
        `Precision` and `Recall`; the second variable divides it otherwise.
      takes_mask: Whether the metric ignores what the mask of an output excludes.
    """

    name: str
    metric: Any
    counts_pairs: bool
    takes_mask: bool

    @property
    def direction(self) -> str | None:
        """Whether the lowest ("min") or the highest ("max") value is the best; None if unknown."""
        known = {"down": "min", "up": "max"}
        return known.get(getattr(self.metric, "_direction", None) or "")

    def __call__(
        self, targets: jax.Array, predictions: jax.Array, weights: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the values (B,) and weights (B,) whose weighted mean is the metric's result.

        Args:
          targets: Of the output.
          predictions: The output.
          weights: The sample weights.
        """
        mask = getattr(predictions, "_keras_mask", None) if self.takes_mask else None
        if mask is not None:
            kept = mask.astype(jnp.float32)
            weights = kept if weights is None else kept * expanded(weights, kept)
        zeros = [jnp.zeros(v.shape, v.dtype) for v in self.metric.variables]

        def of_example(*row: Any) -> list[jax.Array]:
            batch = jax.tree.map(lambda x: x[None], row)
            variables: list[jax.Array] = self.metric.stateless_update_state(zeros, *batch)
            return [x.reshape(()) for x in variables]

        first, second = jax.vmap(of_example)(targets, predictions, weights)
        divisor = first + second if self.counts_pairs else second
        return jnp.where(divisor == 0, 0.0, first / jnp.where(divisor == 0, 1, divisor)), divisor


def metric_of_output(
    keras: Any, given: Any, targets: jax.Array, predictions: jax.Array
) -> ExampleMetric:
    """Returns a metric of an output.

    Args:
      keras: The module.
      given: The name of a metric, a function, or a Keras metric.
      targets: Of the output; its rank decides what "accuracy" means.
      predictions: The output.

    Raises:
      UserError: If the metric is not a mean, `Precision` or `Recall`.
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
    if not isinstance(metric, metrics.Metric):
        function = metric
        metric = metrics.MeanMetricWrapper(function, name=getattr(function, "__name__", None))
    name = given if isinstance(given, str) else metric.name
    is_mean = isinstance(metric, metrics.Mean) and type(metric).result is metrics.Mean.result
    is_quotient = any(
        isinstance(metric, quotient) and type(metric).result is quotient.result
        for quotient in (metrics.Precision, metrics.Recall)
    )
    if not (is_mean or is_quotient) or any(v.shape not in ((), (1,)) for v in metric.variables):
        raise UserError(
            f"the metric {name!r} ({type(metric).__name__}) is not a mean over the examples: leave "
            "it out of model.compile, and call model.evaluate with it after the fit. Means, "
            "Precision and Recall with one threshold are computed"
        )
    return ExampleMetric(
        name,
        metric,
        counts_pairs=is_quotient,
        takes_mask=isinstance(metric, metrics.MeanMetricWrapper),
    )

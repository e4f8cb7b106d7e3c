"""Weighted sums and means: objectives return per-example values, and the mean is computed here."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spmdtrain.errors import UserError, did_you_mean
from spmdtrain.sharding.mesh import EXPERT
from spmdtrain.sharding.placement import current_device, current_mesh
from spmdtrain.step.metric_names import check_names
from spmdtrain.step.outputs import (
    AddedState,
    Combination,
    PredictionMetric,
    Scalar,
    SumMetric,
    counted,
    is_of_evaluation,
    loss_terms,
)


class WeightedValues(NamedTuple):
    """Values with weights.

    Attributes:
      values: Array of leading dim B.
      weights: Broadcast against `values` from the left: one weight an example, or one a token.
        Weights that depend on trained parameters are differentiated.
    """

    values: jax.typing.ArrayLike
    weights: jax.typing.ArrayLike


class Sums(NamedTuple):
    """The sum of weighted values and the sum of the weights, f32 scalars."""

    total: Any
    weight: Any


BatchSums = dict[str, Sums | Combination]
"""The sums of a batch by name, and the combinations of their means."""
EvaluationSums = dict[str, Any]
"""The same, with an `ArraySum` or `PredictedRows` for metrics that only evaluations compute."""


def weighted_sums(
    outputs: Mapping[str, Any],
    batch_size: int,
    mask: jax.Array | None = None,
    *,
    training: bool = False,
) -> EvaluationSums:
    """Returns the weighted sums of an objective's outputs for a global batch, by name.

    Args:
      outputs: Arrays of leading dim B, `WeightedValues`, pairs (values, weights), or a type of
        `spmdtrain.step.outputs`, by name. One name is "loss".
      batch_size: Number of rows B of the batch.
      mask: (B,), 0 for padding rows.
      training: Whether a training step calls it, which needs a mean of each output.

    Raises:
      UserError: If the outputs have another form or shape.
    """
    if not isinstance(outputs, Mapping) or "loss" not in outputs:
        raise UserError(
            f"the objective returned {_described(outputs)}: it must return a dictionary of "
            'per-example values with "loss" among them, such as {"loss": values}'
        )
    check_names(outputs, "the objective's")
    if is_of_evaluation(outputs["loss"]):
        raise UserError(
            f"the objective's 'loss' is a {type(outputs['loss']).__name__}, which only evaluations "
            "compute: return per-example values"
        )
    sums: EvaluationSums = {}
    for name, value in outputs.items():
        what = f"the objective's {name!r}"
        if isinstance(value, Combination):
            _check_terms(what, value, outputs)
            sums[name] = value
        else:
            sums[name] = _sums_of_output(what, value, batch_size, mask, training)
    return sums


def _described(outputs: Any) -> str:
    """Describes what an objective returned in place of a dictionary with a loss."""
    if isinstance(outputs, Mapping):
        return f"the values {', '.join(map(repr, outputs))}" if outputs else "no values"
    if isinstance(outputs, (jax.Array, np.ndarray)):
        mean = ", the mean over the batch" if outputs.ndim == 0 else ""
        return f"an array of shape {outputs.shape}{mean}"
    return "nothing" if outputs is None else f"a {type(outputs).__name__}"


def training_sums(
    outputs: Mapping[str, Any], batch_size: int, mask: jax.Array | None = None
) -> BatchSums:
    """Returns `weighted_sums` of outputs without the metrics that only evaluations compute."""
    sums = weighted_sums(outputs, batch_size, mask, training=True)
    if (dtype := _dtype_of(outputs["loss"])) is not None and not jnp.issubdtype(dtype, jnp.inexact):
        raise UserError(
            f"the objective's 'loss' is {dtype}, which has no gradient: return floating-point "
            "values that depend on the parameters"
        )
    return {name: x for name, x in sums.items() if isinstance(x, (Sums, Combination))}


def combined_weights(sums: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Returns the weight of each term of the loss if it is a `Combination`; else nothing."""
    if not isinstance(sums["loss"], Combination):
        return {}
    return {name: term.weight for name, term in loss_terms(sums).items()}


def differentiated(sums: BatchSums, weights: Mapping[str, jax.Array]) -> jax.Array:
    """Returns the f32 scalar whose gradients are added up over the parts of a batch.

    It is the weighted sum of the loss, because the added gradients are divided by the weight of the
    whole batch. Each term of a `Combination` has its own divisor, so it is divided here. `sums`
    belong to a part, and `weights` are the `combined_weights` of the whole batch.
    """
    loss = sums["loss"]
    if isinstance(loss, Sums):
        total: jax.Array = loss.total
        return total
    return _combined(loss, {name: Sums(_of(sums, name).total, w) for name, w in weights.items()})


def batch_means(sums: BatchSums) -> dict[str, jax.Array]:
    """Returns the mean of each metric of a batch by name, f32 scalars."""
    return {
        name: mean(value) if isinstance(value, Sums) else _combined(value, sums)
        for name, value in sums.items()
    }


def combinations(sums: Mapping[str, Any]) -> dict[str, Combination]:
    """Returns the sums by name that are combined from others."""
    return {name: value for name, value in sums.items() if isinstance(value, Combination)}


def _combined(combination: Combination, sums: Mapping[str, Any]) -> jax.Array:
    terms = [coefficient * mean(sums[name]) for name, coefficient in combination.terms]
    return jnp.stack(terms).sum()


def _of(sums: Mapping[str, Any], name: str) -> Sums:
    found = sums[name]
    assert isinstance(found, Sums)  # checked by `weighted_sums`
    return found


def _check_terms(what: str, combination: Combination, outputs: Mapping[str, Any]) -> None:
    """Checks that the terms of a combination are outputs that have a mean."""
    for name, _ in combination.terms:
        term = outputs.get(name)
        if name not in outputs:
            raise UserError(
                f"{what} combines {name!r}, which the objective does not return."
                f"{did_you_mean(name, outputs)}"
            )
        if isinstance(term, Combination) or is_of_evaluation(term):
            raise UserError(
                f"{what} combines {name!r}, which is a {type(term).__name__}: terms are values, "
                "values with weights, or a Scalar"
            )


def component_losses(
    outputs: Mapping[str, Any],
    component: jax.Array,
    names: Sequence[str],
    mask: jax.Array | None = None,
) -> BatchSums:
    """Returns the weighted sums of the loss over the rows of each component of a mixture.

    The keys are `component_metric`, also for the terms of a `Combination`. The weight of a
    component without rows is 0.

    Args:
      component: int32 (B,), the number of each row's component.
      mask: (B,), 0 for padding rows.

    Raises:
      UserError: If the objective itself returns a metric of such a name, or a `Scalar` as loss.
    """
    loss, found = outputs["loss"], BatchSums()
    for term, value in loss_terms(outputs).items():
        if isinstance(value, Scalar):
            if term == "loss":
                raise UserError(
                    "the objective's 'loss' is a Scalar, which does not belong to one component of "
                    "the mixture: return per-example values"
                )
            continue
        size = component.shape[0]
        weighted, weights = _weighted(f"the objective's {term!r}", value, size, mask)
        of_rows = Sums(*(x.reshape(size, -1).sum(1) for x in (weighted, weights)))
        for number, name in enumerate(names):
            sums = (jnp.where(component == number, x, 0.0).sum() for x in of_rows)
            found[component_metric(term, name)] = Sums(*sums)
    if isinstance(loss, Combination):
        for name in names:
            parts = {component_metric(term, name): c for term, c in loss.terms}
            if known := {term: c for term, c in parts.items() if term in found}:
                found[component_metric("loss", name)] = Combination(known)
    if taken := [name for name in found if name in outputs]:
        raise UserError(
            f"the objective's {taken[0]!r} has the name of a metric of a component of the mixture: "
            "rename it"
        )
    return found


def component_metric(metric: str, component: str) -> str:
    """Returns the name of a metric of one component of a mixture."""
    return f"{metric}/{component}"


def weighted_mean(
    values: jax.typing.ArrayLike, weights: jax.typing.ArrayLike | None = None
) -> jax.Array:
    """Returns the weighted mean of values over a global batch.

    Args:
      values: Array of leading dim B.
      weights: Broadcast against `values` from the left: (B,), or one a token. By default 1. A value
        of weight 0 is ignored, even if it is NaN.

    Returns:
      f32 scalar; 0 if all weights are 0.

    Raises:
      UserError: If the shapes do not fit.
    """
    values = jnp.asarray(values)
    if values.ndim == 0:
        raise UserError("weighted_mean takes the values of a batch, not a single number")
    weighted = values if weights is None else WeightedValues(values, weights)
    return mean(_sums("the argument of weighted_mean", weighted, values.shape[0], None))


def _sums_of_output(
    what: str, value: Any, batch_size: int, mask: jax.Array | None, training: bool
) -> Any:
    """Returns the sums of an output; raises `UserError` if JAX cannot make arrays of its values."""
    try:
        if isinstance(value, AddedState) and training and value.divisor:
            return Sums(*value.mean_of_batch(what, batch_size, mask))
        if isinstance(value, (SumMetric, PredictionMetric, AddedState)):
            return value.of_batch(what, batch_size, mask)
        return _sums(what, value, batch_size, mask)
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise UserError(f"{what} does not consist of arrays: {error}") from error


def _sums(what: str, value: Any, batch_size: int, mask: jax.Array | None) -> Sums:
    if isinstance(value, Scalar):
        return _scalar_sums(what, value, batch_size, mask)
    weighted, weights = _weighted(what, value, batch_size, mask)
    return Sums(weighted.sum(), _after(jax.lax.stop_gradient(weighted), weights).sum())


def _after(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns the weights; on CPUs that split experts they depend on the values.

    XLA's CPU client does not order a sum over devices and a loop of layers that contains others, so
    its threads can wait in different ones forever. The gradients of a `Combination` need the sum of
    the weights, which does not need the loop. The dependency makes it wait for the loop.
    """
    over = current_mesh()
    if over is None or over.parts(EXPERT) == 1 or current_device().platform != "cpu":
        return weights
    return jnp.where(values > jnp.inf, 0.0, weights)  # never, but XLA does not know that


def _dtype_of(value: Any) -> Any:
    """Returns the dtype of the values of an output; None for a `Combination`."""
    if isinstance(value, Combination):
        return None
    values = value.value if isinstance(value, Scalar) else value
    return jnp.asarray(values[0] if isinstance(values, tuple) else values).dtype


def _real(what: str, values: jax.Array) -> jax.Array:
    """Returns values in f32; raises `UserError` if they are complex."""
    if jnp.iscomplexobj(values):
        raise UserError(
            f"{what} is {values.dtype}: return real values, such as jnp.abs(x) or x.real"
        )
    return values.astype(jnp.float32)


def _scalar_sums(what: str, scalar: Scalar, batch_size: int, mask: jax.Array | None) -> Sums:
    examples = batch_size if mask is None else mask.sum()
    value = _real(what, jnp.asarray(scalar.value))
    weight = jnp.asarray(examples if scalar.weight is None else scalar.weight, jnp.float32)
    if value.shape or weight.shape:
        raise UserError(
            f"{what} is a Scalar whose value has shape {value.shape} and whose weight has shape "
            f"{weight.shape}: both must be single numbers"
        )
    return Sums(counted(value, weight), weight)


def _weighted(
    what: str, value: Any, batch_size: int, mask: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Returns the values times their weights, and the weights, of the shape of the values."""
    if isinstance(value, Mapping):
        raise UserError(
            f"{what} is a dictionary of {', '.join(map(str, value))}: metrics are not nested, so "
            'name each one, for example "aux/accuracy"'
        )
    if isinstance(value, tuple):
        if len(value) != 2:
            raise UserError(f"{what} is a tuple of {len(value)}: return (values, weights)")
        values, weights = jnp.asarray(value[0]), jnp.asarray(value[1], jnp.float32)
    else:
        values, weights = jnp.asarray(value), jnp.ones((), jnp.float32)
    if values.ndim == 0 or values.shape[0] != batch_size:
        raise UserError(
            f"{what} has shape {values.shape}: it must hold a value for each of "
            f"the {batch_size} examples of the batch (leading dim {batch_size}), not their mean; "
            "for a number that is not one of examples, return Scalar(value, weight)"
        )
    weights = _expand(what, weights, values)
    if mask is not None:
        weights = weights * _expand(what, mask, values).astype(jnp.float32)
    weights = jnp.broadcast_to(weights, values.shape)
    return counted(_real(what, values), weights), weights


def _expand(what: str, weights: jax.Array, values: jax.Array) -> jax.Array:
    """Appends dims to `weights`, so that they broadcast from the leading dim on."""
    fits = weights.ndim <= values.ndim and all(
        w in (1, v) for w, v in zip(weights.shape, values.shape, strict=False)
    )
    if not fits:
        raise UserError(
            f"{what} has weights of shape {weights.shape}, which do not "
            f"broadcast against values of shape {values.shape} from the leading dim on"
        )
    return weights.reshape(weights.shape + (1,) * (values.ndim - weights.ndim))


def loss_first(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics with the loss first, the others by name (JAX sorts them by name)."""
    return dict(sorted(metrics.items(), key=lambda item: (item[0] != "loss", item[0])))


def stacked(sums: BatchSums) -> jax.Array:
    """Returns the sums by sorted name as one array (names, 2), for a single transfer.

    The weight of a `Combination` is the sum of the weights of its terms.
    """

    def pair(value: Sums | Combination) -> Sums:
        if isinstance(value, Sums):
            return value
        weight = jnp.stack([_of(sums, name).weight for name, _ in value.terms]).sum()
        return Sums(_combined(value, sums) * weight, weight)

    return jnp.stack([jnp.stack(pair(sums[name])) for name in sorted(sums)])


def mean(sums: Sums) -> jax.Array:
    """Returns the weighted mean; 0 if the weight is 0."""
    return jnp.where(
        sums.weight == 0, 0.0, sums.total / jnp.where(sums.weight == 0, 1, sums.weight)
    )


class Means:
    """Weighted means over many batches, accumulated on the host in f64.

    `nnx.metrics.Average` counts values without weights, and accumulates them in f32.

    Args:
      sums: Initial (total, weight) by name.
      combined: The metrics that are combined from the means of others.
    """

    def __init__(
        self,
        sums: Mapping[str, Sequence[float]] | None = None,
        combined: Mapping[str, Combination] | None = None,
    ) -> None:
        self._sums = {name: np.array(pair, np.float64) for name, pair in (sums or {}).items()}
        self._combined = dict(combined or {})

    def add(self, sums: BatchSums) -> None:
        """Adds the sums of a batch."""
        for name, value in sums.items():
            if isinstance(value, Combination):
                self._combined[name] = value
                continue
            self._sums[name] = self._sums.get(name, np.zeros(2)) + np.array(value, np.float64)

    def result(self, empty: float = math.nan) -> dict[str, float]:
        """Returns the means by name, the loss first.

        Args:
          empty: The mean if the weight is 0. In a `Combination`, such a term counts as 0, unless
            the weights of all terms are 0.
        """
        means = {n: float(t / w) if w else empty for n, (t, w) in self._sums.items()}
        for name, combination in self._combined.items():
            known = [(c, means[term]) for term, c in combination.terms if self._sums[term][1]]
            means[name] = sum(c * value for c, value in known) if known else empty
        return loss_first(means)

"""Outputs of an objective, and weighted sums and means of them."""

import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from spmdtrain.errors import UserError, did_you_mean, is_text
from spmdtrain.sharding.placement import current_device, current_mesh
from spmdtrain.strategies import EXPERT_AXIS

# -- Types that an objective may return besides per-example values ---------------------------------

F = TypeVar("F", bound=Callable[..., Any])


@jax.tree_util.register_static
@dataclass(frozen=True, init=False)
class Combination:
    """A sum of the means of other outputs, each times a coefficient.

    As the "loss" it is what the step minimizes. Each mean is taken over its own weights, so the
    terms may have different denominators. A term whose weights are all 0 contributes 0.

    Args:
      coefficients: The coefficient of each term, by the name of its output.

    Raises:
      UserError: If there are none, or if one is not a finite number.
    """

    terms: tuple[tuple[str, float], ...]

    def __init__(self, coefficients: Mapping[str, float]) -> None:
        if not isinstance(coefficients, Mapping) or not coefficients:
            raise UserError(
                f"Combination({coefficients!r}): give the coefficient of each term by the name of "
                'its output, for example Combination({"mlm": 1.0, "nsp": 0.5})'
            )
        for name, value in coefficients.items():
            if not isinstance(name, str):
                raise UserError(f"Combination: {name!r} is a {type(name).__name__}: give a name")
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise UserError(
                    f"Combination: the coefficient of {name!r} is a {type(value).__name__}: it "
                    "must be a Python number, the same in each step. Multiply the values of "
                    "the term by numbers that change"
                )
            if not math.isfinite(value):
                raise UserError(f"Combination: the coefficient of {name!r} is {value}")
        object.__setattr__(self, "terms", tuple(sorted(coefficients.items())))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scalar:
    """One number for the batch that the objective receives, instead of a value for each example.

    The mean over several batches, microbatches or replicas is sum(weight * value) / sum(weight). It
    equals the value for the whole batch if `value` does not depend on the batch
    (a penalty on parameters), or if `value` is a mean whose denominator is `weight`.

    Attributes:
      value: A scalar.
      weight: A scalar; by default the number of examples of the batch, without padding rows.
    """

    value: jax.typing.ArrayLike
    weight: jax.typing.ArrayLike | None = None


@functools.partial(jax.tree_util.register_dataclass, data_fields=["total"], meta_fields=["finish"])
@dataclass(frozen=True)
class ArraySum:
    """The weighted sum of a `SumMetric` over the examples of a batch, an f32 array.

    `finish` is the function of the metric.
    """

    total: Any
    finish: Callable[[Any], Any]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["values", "weights"], meta_fields=["finish"]
)
@dataclass(frozen=True)
class SumMetric:
    """A metric of an evaluation that is computed from the sum of an array over all examples.

    The sum is computed on the devices, in f32 for each batch and in f64 over batches. Training
    steps do not compute it.

    Attributes:
      values: Array (B, ...), one for each example.
      finish: Called on the host with the sum, a float64 array; returns a number, or media to log
        (`Table`, `Histogram`, `Image`).
      weights: (B,), by default 1. A value of weight 0 is ignored, even if it is NaN.
    """

    values: Any
    finish: Callable[[Any], Any]
    weights: Any = None

    def of_batch(self, what: str, batch_size: int, mask: jax.Array | None) -> ArraySum:
        """Returns the sum over a batch.

        Args:
          what: The start of an error message.
          batch_size: Number of rows B.
          mask: (B,), 0 for padding rows.

        Raises:
          UserError: If an array has another shape, or `finish` is not a function.
        """
        if not callable(self.finish):
            raise UserError(
                f"{what} is a SumMetric whose finish is a {type(self.finish).__name__}: it must be "
                "a function of the sum"
            )
        values = jnp.asarray(self.values, jnp.float32)
        _check_rows(what, values, batch_size)
        given = jnp.ones(batch_size, jnp.float32) if self.weights is None else self.weights
        weights = jnp.asarray(given, jnp.float32)
        if weights.shape != (batch_size,):
            raise UserError(
                f"{what} has weights of shape {weights.shape}: a SumMetric takes one weight for "
                f"each of the {batch_size} examples"
            )
        weights = weights if mask is None else weights * mask.astype(jnp.float32)
        weights = weights.reshape(-1, *[1] * (values.ndim - 1))
        return ArraySum((jnp.where(weights == 0, 0.0, values) * weights).sum(0), self.finish)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["sums"],
    meta_fields=["finish", "divisor", "of_rows"],
)
@dataclass(frozen=True)
class AddedState:
    """The change of a metric's state by a batch, such as a total and a count.

    Attributes:
      sums: (B, n), what each example adds; (n,) if it is known of the whole batch only.
      finish: Called on the host with the sum over a dataset, like `SumMetric.finish`.
      divisor: The entries whose sum divides the first one, so that the result is a mean that
        training steps can report; None if it is something else.
      of_rows: Whether `sums` has a row for each example.
    """

    sums: jax.Array
    finish: Callable[[Any], Any]
    divisor: tuple[int, ...] | None
    of_rows: bool

    def of_batch(self, what: str, batch_size: int, mask: jax.Array | None) -> ArraySum:
        """Returns the sum over a batch; see `SumMetric.of_batch`."""
        if self.of_rows:
            return SumMetric(self.sums, self.finish).of_batch(what, batch_size, mask)
        return ArraySum(self.sums, self.finish)  # padding never reaches it

    def mean_of_batch(
        self, what: str, batch_size: int, mask: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the dividend and the divisor of the mean; see `SumMetric.of_batch`."""
        assert self.divisor is not None, "it is of evaluations only"
        total = self.of_batch(what, batch_size, mask).total
        return total[0], jnp.stack([total[number] for number in self.divisor]).sum()


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["arrays", "named", "mask"],
    meta_fields=["compute"],
)
@dataclass(frozen=True)
class PredictedRows:
    """The arrays of a `PredictionMetric` for a batch.

    All have leading dim B. `mask` is (B,), 0 for padding rows.
    """

    arrays: tuple[Any, ...]
    named: dict[str, Any]
    mask: Any
    compute: Any


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["arrays", "named"], meta_fields=["compute"]
)
@dataclass(frozen=True, init=False)
class PredictionMetric:
    """A metric of an evaluation that the host computes from all predictions, in dataset order.

    Process 0 computes it once, after the last batch. Training steps do not compute the arrays.

    Args:
      compute: A function of NumPy arrays that returns a number. Or a metric of a library, which is
        reset, updated and read: one of Keras, of `flax.nnx.metrics`, or a class of `clu.metrics`.
      *arrays: Arrays (B, ...), its positional arguments.
      **named: Arrays (B, ...), its keyword arguments.
    """

    compute: Any
    arrays: tuple[Any, ...]
    named: dict[str, Any]

    def __init__(self, compute: Any, *arrays: Any, **named: Any) -> None:
        for name, value in {"compute": compute, "arrays": arrays, "named": named}.items():
            object.__setattr__(self, name, value)

    def of_batch(self, what: str, batch_size: int, mask: jax.Array | None) -> PredictedRows:
        """Returns the arrays of a batch; bfloat16 as float32.

        Args:
          what: The start of an error message.
          batch_size: Number of rows B.
          mask: (B,), 0 for padding rows.

        Raises:
          UserError: If an array has another shape.
        """
        if not self.arrays and not self.named:
            raise UserError(f"{what} is a PredictionMetric without arrays: give it predictions")
        arrays, named = jax.tree.map(_for_numpy, (self.arrays, self.named))
        for array in jax.tree.leaves((arrays, named)):
            _check_rows(what, array, batch_size)
        return PredictedRows(
            arrays, named, jnp.ones(batch_size, jnp.float32) if mask is None else mask, self.compute
        )


@jax.custom_jvp
def counted(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns values times weights, f32 arrays of the same shape.

    Values of weight 0 do not change a sum, even if they are NaN. The derivative with respect to a
    weight is the value, also where the weight is 0.
    """
    return jnp.where(weights == 0, 0.0, values) * weights


@functools.partial(counted.defjvp, symbolic_zeros=True)
def _change_of_counted(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    (values, weights), (of_values, of_weights) = primals, tangents
    is_ignored = weights == 0
    change = jnp.zeros_like(values)
    if not isinstance(of_values, SymbolicZero):
        change = jnp.where(is_ignored, 0.0, of_values) * weights
    if not isinstance(of_weights, SymbolicZero):  # constant weights cost nothing
        change += jnp.where(is_ignored & ~jnp.isfinite(values), 0.0, values) * of_weights
    return jnp.where(is_ignored, 0.0, values) * weights, change


def loss_terms(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the outputs that the loss consists of: itself, or the terms of a `Combination`."""
    loss = outputs["loss"]
    if not isinstance(loss, Combination):
        return {"loss": loss}
    return {name: outputs[name] for name, _ in loss.terms}


def is_of_evaluation(output: Any) -> bool:
    """Returns whether an output is computed in evaluations only."""
    if isinstance(output, AddedState):
        return output.divisor is None
    return isinstance(output, (SumMetric, PredictionMetric))


def outputs_of_training(outputs: Any) -> Any:
    """Returns an objective's outputs without those that are computed in evaluations only."""
    if not isinstance(outputs, Mapping):
        return outputs
    return {name: x for name, x in outputs.items() if name == "loss" or not is_of_evaluation(x)}


def batch_coupled(objective: F, coupled: bool = True) -> F:
    """Declares that an objective combines the examples of its batch, as a contrastive loss does.

    It always receives the whole global batch, without padding rows, on any number of devices.
    Microbatches, and reductions of gradients under `shard_map`, would give it parts of the batch
    and so other values: they are an error.

    Args:
      objective: A function of (model, batch).
      coupled: False declares the opposite, for microbatches: the values of an example do not depend
        on the others, although the analysis of the objective cannot prove it.

    Returns:
      A function of the same arguments.

    Raises:
      UserError: If `objective` is not a function.
    """
    if not callable(objective):
        raise UserError(f"batch_coupled takes an objective, not a {type(objective).__name__}")

    @functools.wraps(objective)
    def declared(*args: Any, **arguments: Any) -> Any:
        return objective(*args, **arguments)

    declared.is_batch_coupled = coupled  # type: ignore[attr-defined]
    return declared  # type: ignore[return-value]


def _for_numpy(x: Any) -> jax.Array:
    array = jnp.asarray(x)
    return array.astype(jnp.float32) if array.dtype == jnp.bfloat16 else array


def _check_rows(what: str, array: jax.Array, batch_size: int) -> None:
    if array.ndim == 0 or array.shape[0] != batch_size:
        raise UserError(
            f"{what} has an array of shape {array.shape}: it must hold a row for each of the "
            f"{batch_size} examples of the batch"
        )


# -- Weighted sums and means: objectives return per-example values, and the mean is computed here


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
        `spmdtrain.step.metrics`, by name. One name is "loss".
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
    if over is None or over.parts(EXPERT_AXIS) == 1 or current_device().platform != "cpu":
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


# -- Checks of the values that an objective returns ------------------------------------------------


def check_no_pairs(outputs: Mapping[str, Any], batch: Any) -> None:
    """Raises `UserError` if an output has one value for each pair of examples.

    Values of shape (B, B, ...) result from combining (B, 1) with (B,) by mistake. They are accepted
    with explicit weights, or if an array of the batch has such a shape.
    """
    leaves = jax.tree.leaves(batch)
    pairs = (leaves[0].shape[0],) * 2
    # Rows of B or B + 1 tokens explain such a shape, too.
    if pairs[0] == 1 or any(
        leaf.ndim > 1 and leaf.shape[1] - pairs[1] in (0, 1) for leaf in leaves
    ):
        return
    for name, value in outputs.items():
        if isinstance(value, (AddedState, Combination, Scalar)) or is_of_evaluation(value):
            continue
        if not isinstance(value, tuple) and jnp.shape(value)[:2] == pairs:
            raise UserError(
                f"the objective's {name!r} has shape {jnp.shape(value)}, a value for each pair of "
                f"examples: it seems that ({pairs[0]}, 1) and ({pairs[0]},) were combined. Reshape "
                "one of them; if pairs are intended, return (values, weights)"
            )


def is_of_tokens(loss: Any, batch: Any) -> bool:
    """Returns whether a loss, with weights or without, has a value for each token of the examples.

    That is, it has shape (B, T) with T > 1, and an array of the batch holds integers of shape
    (B, T) or (B, more than T). The sum of its weights is then the number of tokens trained on.
    """
    if isinstance(loss, (Combination, Scalar)):
        return False
    shape = jnp.shape(loss[0] if isinstance(loss, tuple) else loss)
    return (
        len(shape) == 2
        and shape[1] > 1
        and any(
            jnp.issubdtype(x.dtype, jnp.integer) and x.ndim == 2 and x.shape[1] >= shape[1]
            for x in jax.tree.leaves(batch)
        )
    )


def check_precise(outputs: Mapping[str, Any]) -> None:
    """Raises `UserError` if the loss is computed in 16 bits.

    Their rounding errors are larger than the changes of a loss in training.
    """
    for name, value in loss_terms(outputs).items():
        value = value.value if isinstance(value, Scalar) else value
        dtype = jnp.asarray(value[0] if isinstance(value, tuple) else value).dtype
        if jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize < 4:
            raise UserError(
                f"the objective's {name} is {dtype}, which is not precise enough for a loss: cast "
                "the model's output to float32 first: model(...).astype(jnp.float32)"
            )


# -- Metrics of Keras, flax.nnx and clu as functions of arrays -------------------------------------


def as_function(metric: Any) -> Callable[..., Any]:
    """Returns a function of all predictions that computes a metric.

    A metric object of a library is reset first, so it can be used in several evaluations.

    Args:
      metric: A function; an object with `reset_state`, `update_state` and `result` (Keras), or with
        `reset`, `update` and `compute` (`flax.nnx.metrics`); or a class with `from_model_output`
        (`clu.metrics`).

    Raises:
      UserError: If it is none of them.
    """
    if inspect.isclass(metric) and hasattr(metric, "from_model_output"):
        return lambda *arrays, **named: metric.from_model_output(*arrays, **named).compute()
    for reset, update, compute in _OF_OBJECTS:
        if not inspect.isclass(metric) and all(hasattr(metric, x) for x in (reset, update)):
            return _updated(metric, reset, update, compute)
    if callable(metric) and not inspect.isclass(metric):
        function: Callable[..., Any] = metric
        return function
    name = metric.__name__ if inspect.isclass(metric) else type(metric).__name__
    raise UserError(
        f"PredictionMetric takes a function of arrays, a metric object of Keras or "
        f"flax.nnx.metrics, or a class of clu.metrics, not {name}"
        f"{': create the object outside of the objective' if inspect.isclass(metric) else ''}"
    )


_OF_OBJECTS = (("reset_state", "update_state", "result"), ("reset", "update", "compute"))


def _updated(metric: Any, reset: str, update: str, compute: str) -> Callable[..., Any]:
    def function(*arrays: Any, **named: Any) -> Any:
        getattr(metric, reset)()
        getattr(metric, update)(*arrays, **named)
        return getattr(metric, compute)()

    return function


# -- The names of metrics: those that a run itself writes are reserved -----------------------------

NORMS_OF_GRADIENTS = ("gradient_norm", "update_norm")
"""The names of the norms that a `Loop` does not know, and its function may return."""
NORMS = ("parameter_norm", *NORMS_OF_GRADIENTS)
"""The names of the norms that `Health` computes."""
LEARNING_RATE = "learning_rate"
"""The name of the learning rate in a line of training."""
LEFT_OUT = "updates_left_out"
"""The name of the number of steps so far that have left their update out, in such a line."""
OF_EPOCH = ("epoch", LEARNING_RATE, "seconds", "examples_per_second", "input_wait")
"""Names of what a run itself writes into the line of an epoch."""
RESERVED = ("step", "split", "trajectory", LEFT_OUT, *OF_EPOCH, *NORMS)
"""Names that a run itself writes into lines of metrics and the history; no metric may have them."""


def check_names(names: Iterable[str], whose: str, allowed: Collection[str] = ()) -> None:
    """Raises `UserError` if the name of a metric is no text, or one that a run itself writes.

    Args:
      whose: The start of the error message, for example "the objective's".
      allowed: Names of values that this run does not write itself.
    """
    for name in names:
        if not isinstance(name, str):
            raise UserError(
                f"{whose} {name!r} has a {type(name).__name__} as its name: use a string"
            )
        if not is_text(name):
            raise UserError(f"{whose} {name!r} cannot be written as UTF-8: rename it")
    for name in RESERVED:
        if name in names and name not in allowed:
            raise UserError(f"{whose} {name!r} is a reserved name in the metrics file: rename it")

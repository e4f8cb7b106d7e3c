"""Types that an objective may return besides per-example values."""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from spmdtrain.errors import UserError

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

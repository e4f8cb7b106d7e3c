"""Keras losses without their reduction: values for each example, with what divides their sum."""

import functools
import inspect
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from spmdtrain.adapters.keras_internals import loss_of_function, values_and_masks
from spmdtrain.errors import UserError

ExampleLosses = Callable[[jax.Array, jax.Array, jax.Array | None], tuple[Any, Any]]
"""(targets, predictions, sample weights) -> (values, weights). The loss is the sum of the values,
divided by the sum of the weights. If the weights are None, the values have shape (B,), and B
divides their sum.
"""

_SUM_OF_WEIGHTS = "mean_with_sample_weight"
_MEANS = ("sum_over_batch_size", "mean", _SUM_OF_WEIGHTS)


def loss_of(keras: Any, given: Any, targets: jax.Array, predictions: jax.Array) -> ExampleLosses:
    """Returns a Keras loss without its reduction.

    Keras divides the sum of the values times their sample weights by the number of values, or, if
    the model or the loss has computed a mask, by the number of values that it keeps. The reduction
    `mean_with_sample_weight` divides by the sum of the sample weights instead.

    Args:
      given: The name of a loss, a function, or a Keras loss. "crossentropy" means the variant for
        the shapes of targets and predictions.

    Raises:
      UserError: If its reduction is not a mean.
    """
    if isinstance(given, str) and given.lower() in ("crossentropy", "ce"):
        given = f"{kind_of_labels(targets, predictions)}_crossentropy"
    loss = keras.losses.get(given)
    if not isinstance(loss, keras.losses.Loss):
        loss = loss_of_function(loss, _name(loss))
    if loss.reduction not in _MEANS:
        raise UserError(
            f"the loss {loss.name!r} has the reduction {loss.reduction!r}: it must be a mean "
            "('sum_over_batch_size'), which does not depend on the batch size"
        )
    by_weights = loss.reduction == _SUM_OF_WEIGHTS

    def values_of(true: jax.Array, prediction: jax.Array, weight: jax.Array | None) -> Any:
        values, masks = values_and_masks(loss, true, prediction)
        rows = prediction.shape[0]
        if values.ndim == 0 or values.shape[0] != rows:
            # Keras' own that have an axis combine the whole batch by default: Dice, Tversky.
            kind, axes = loss.name.title(), tuple(range(1, prediction.ndim))
            has_axis = (
                getattr(loss, "axis", 0) is None
                or "axis" in inspect.signature(getattr(keras.losses, kind, object)).parameters
            )
            hint = (
                f"give it axis, as in keras.losses.{kind}(axis={axes})"
                if has_axis
                else "for example keras.ops.mean(..., axis=-1)"
            )
            raise UserError(
                f"the loss {loss.name!r} returns shape {values.shape} for a batch of {rows}: it "
                f"must return a value for each example, not their mean: {hint}"
            )
        for each in masks:
            if each.shape != values.shape:
                raise UserError(
                    f"the loss {loss.name!r} has values of shape {values.shape}, and a mask of "
                    f"shape {each.shape}: they must be equal"
                )
        mask = functools.reduce(operator.and_, masks) if masks else None
        if weight is not None:
            weight = expanded(weight, values)
        if by_weights and weight is not None:
            kept = jnp.broadcast_to(weight, values.shape)
            return values, kept if mask is None else kept * mask
        if weight is not None:
            values = values * weight
        if mask is not None:
            return values, mask.astype(values.dtype)
        return values.reshape(rows, math.prod(values.shape[1:])).mean(1), None

    return values_of


def kind_of_labels(targets: jax.Array, predictions: jax.Array) -> str:
    """Returns which of its variants Keras means by "accuracy" or "crossentropy"."""
    if predictions.shape[-1] == 1:
        return "binary"
    if targets.ndim < predictions.ndim or targets.shape[-1] == 1:
        return "sparse_categorical"
    return "categorical"


def expanded(weights: jax.Array, values: jax.Array) -> jax.Array:
    """Reshapes sample weights, one for each example or each value, to multiply values (B, ...)."""
    weights = jnp.asarray(weights, values.dtype)
    if weights.ndim == values.ndim + 1 and weights.shape[-1] == 1:
        return weights[..., 0]
    return weights.reshape(weights.shape + (1,) * (values.ndim - weights.ndim))


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))

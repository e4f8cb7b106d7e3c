"""Checks of the values that an objective returns."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from spmdtrain.errors import UserError
from spmdtrain.step.outputs import AddedState, Combination, Scalar, is_of_evaluation, loss_terms


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

"""What a run trains, and what of it survives an interruption."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from spmdtrain.adapters.base import Variables
from spmdtrain.step.gradients import accumulation_dtype

PyTree = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that must survive an interruption."""

    step: jax.Array  # int32: updates made so far
    params: PyTree
    opt_state: PyTree
    averaged: PyTree  # moving average of params; an empty dictionary where none is kept
    model_state: PyTree  # batch statistics and the like
    key: jax.Array  # uint32: the numbers of the random key that all steps' keys come from

    @property
    def step_key(self) -> jax.Array:
        """What the next step draws from: fold_in(key, step)."""
        return jax.random.fold_in(jax.random.wrap_key_data(self.key), self.step)

    @property
    def variables(self) -> Variables:
        """What the model is evaluated with: the averaged parameters where an average is kept.

        These are wider than the model's own where those are less than f32 (see `first_average`).
        """
        averaged = jax.tree.leaves(self.averaged)
        return Variables(self.averaged if averaged else self.params, self.model_state)


def first_average(params: PyTree) -> PyTree:
    """The moving average of the parameters before the first step: these, in f32 at least.

    In bfloat16 an average of decay 0.999 would stand still, as each of its steps is smaller than
    half the distance to the next number.
    """
    return jax.tree.map(lambda x: jnp.array(x, accumulation_dtype(x.dtype)), params)


def average_of(params: PyTree) -> PyTree:
    """The abstract average of abstract parameters."""
    return jax.eval_shape(first_average, params)

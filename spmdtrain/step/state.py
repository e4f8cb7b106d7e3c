"""The training state."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from spmdtrain.adapters.base import Variables
from spmdtrain.errors import UserError
from spmdtrain.step.gradients import accumulation_dtype
from spmdtrain.strategies import StateField
from spmdtrain.tree import named_leaves

PyTree = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that must survive an interruption of a run.

    Attributes:
      step: int32, number of updates so far.
      params: The parameters.
      opt_state: The optimizer's state.
      averaged: The moving average of the parameters, or a schedule-free optimizer's parameters for
        evaluation; an empty dictionary without an average.
      model_state: Other values that the model carries, such as batch statistics.
      key: uint32, the data of the random key from which the keys of all steps derive.
      averaged_before: int32, number of updates in the moving average at step 0, which
        `fit(restart=True)` keeps; an empty dictionary without a moving average.
    """

    step: jax.Array
    params: PyTree
    opt_state: PyTree
    averaged: PyTree
    model_state: PyTree
    key: jax.Array
    averaged_before: PyTree = field(default_factory=dict)

    FIELDS: ClassVar[Mapping[str, StateField]] = {
        "step": StateField(item="training", is_tree=False, replicated=True),
        "params": StateField(item="params", title="parameters", like_params=True, of_model=True),
        "opt_state": StateField(
            item="training",
            title="optimizer",
            kind="optimizer",
            like_params=True,
            of_optimizer=True,
        ),
        "averaged": StateField(
            item="averaged",
            title="average",
            kind="moving average",
            like_params=True,
            of_model=True,
            evaluated=True,
        ),
        "model_state": StateField(item="model_state", title="model state", of_model=True),
        "key": StateField(
            item="training", kind="random number generator", is_tree=False, replicated=True
        ),
        "averaged_before": StateField(item="averaging", kind="moving average", is_tree=False),
    }

    @property
    def step_key(self) -> jax.Array:
        """The random key of the next step: fold_in(key, step)."""
        return jax.random.fold_in(jax.random.wrap_key_data(self.key), self.step)

    @property
    def variables(self) -> Variables:
        """The values to evaluate the model with: the averaged parameters if there is an average.

        An average has at least float32, even if the parameters are narrower (see `first_average`).
        """
        name = evaluated_field(lambda name: bool(jax.tree.leaves(getattr(self, name))))
        return Variables(getattr(self, name), self.model_state)


TREES = tuple(name for name, row in TrainState.FIELDS.items() if row.is_tree)


def evaluated_field(has_arrays: Callable[[str], bool]) -> str:
    """Returns the field with the parameters for evaluations, of a state that has arrays in some."""
    rows = TrainState.FIELDS.items()
    return next((n for n, row in rows if row.evaluated and has_arrays(n)), "params")


def check_same_arrays(before: PyTree, after: PyTree) -> None:
    """Raises `UserError` if a step adds or removes arrays of a state, or changes a shape or dtype.

    No checkpoint could be restored then.
    """
    old, new = (
        {name: f"{x.dtype}{list(x.shape)}" for name, x in named_leaves(state).items()}
        for state in (before, after)
    )
    for name in {**old, **new}:
        if old.get(name) != new.get(name):
            raise UserError(
                f"{name} of the state is {old.get(name, 'absent')} before a step and "
                f"{new.get(name, 'absent')} after it: initialize it with the shape and dtype that "
                "it keeps"
            )


def first_average(params: PyTree) -> PyTree:
    """Returns the moving average before the first step: the parameters in at least float32.

    In bfloat16 an average of decay 0.999 would never change, because each of its steps is smaller
    than half the distance to the next number.
    """
    return jax.tree.map(lambda x: jnp.array(x, accumulation_dtype(x.dtype)), params)


def averaged_steps(step: jax.Array, before: PyTree) -> jax.Array:
    """Returns the number of updates in a moving average, which its decay follows.

    `step` is the number of updates so far, and `before` the state's `averaged_before`.
    """
    return sum(jax.tree.leaves(before), start=step)


def average_of(params: PyTree) -> PyTree:
    """Returns the abstract moving average of abstract parameters."""
    return jax.eval_shape(first_average, params)

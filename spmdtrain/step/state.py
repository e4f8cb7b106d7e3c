"""The training state, and transforms of the step, which may add fields to it."""

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from spmdtrain.adapters.base import Variables
from spmdtrain.config.run_config import RunConfig
from spmdtrain.errors import UserError
from spmdtrain.sharding.placement import Placement
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
      extra: The fields by name that the step's transform adds (see `StepTransform`).
    """

    step: jax.Array
    params: PyTree
    opt_state: PyTree
    averaged: PyTree
    model_state: PyTree
    key: jax.Array
    averaged_before: PyTree = field(default_factory=dict)
    extra: dict[str, PyTree] = field(default_factory=dict)

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
        # The user of a `Loop` cannot begin with it, so it is none of `TREES`.
        "extra": StateField(item="extra", kind="step's transform", is_tree=False, like_params=True),
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


# -- Transforms, which make the programs of a run from its step ------------------------------------

Step = Callable[..., tuple[TrainState, Any]]
"""(state, batch, is_last=None) -> (state, output), as of `make_train_step`."""


class StepTransform:
    """Makes the programs of a run from its step, one for each kind of step.

    The host chooses the program by the number of the step, and a dispatch of several steps ends
    where the kind changes. This transform leaves the step as it is, others override what differs.

    Attributes:
      placement: The placement of the code in the step.
      fields: The rows of the fields that it adds to `TrainState.extra`, and those that replace the
        rows of other fields.
    """

    fields: ClassVar[Mapping[str, StateField]] = {}

    def __init__(self, config: RunConfig, placement: Placement) -> None:
        self.placement = placement

    def begin(self, init: Callable[..., TrainState]) -> Callable[..., TrainState]:
        """Returns a function that returns the first state of a run, from one of the step's."""
        return init

    def kind(self, step: int) -> str:
        """Returns the kind of a step, which is counted from 1."""
        return ""

    def explained_kind(self, step: int) -> str:
        """Returns the kind whose result is that of a step, also if the run does not use it."""
        return self.kind(step)

    def programs(self, step: Step) -> Mapping[str, Step]:
        """Returns the step of each kind.

        It takes the state of the run; `step` takes one without `extra`, and returns such a state.
        """
        return {self.kind(1): step}

    def describe(self, kind: str) -> str:
        """Returns a note for the log of a program; "" if it needs none."""
        return ""


TRANSFORMS: Mapping[tuple[str, Any], str] = {
    ("on_divergence", "skip"): "spmdtrain.step.divergence:LeavesUpdatesOut",
}
"""`module:class` of the transforms, each by the option and the value that turn it on."""


def transform_of(config: RunConfig, placement: Placement) -> StepTransform:
    """Returns the transform that the configuration turns on."""
    made = (
        pkgutil.resolve_name(name)
        for (option, value), name in TRANSFORMS.items()
        if getattr(config, option) == value
    )
    transform: StepTransform = next(made, StepTransform)(config, placement)
    return transform


def renewed_leaves(saved: Mapping[str, str], now: Mapping[str, str]) -> frozenset[str]:
    """Returns the paths with which a start does not continue, because they differ and may.

    They are those of the fields of transforms (see `StateField.renewed`). The arguments have the
    shape and dtype of each leaf by its path.
    """
    if not any(name.startswith("extra/") for name in (*saved, *now)):
        return frozenset()
    rows = {
        n: row for x in TRANSFORMS.values() for n, row in pkgutil.resolve_name(x).fields.items()
    }
    ours = tuple(f"extra/{name}/" for name, row in rows.items() if row.renewed)
    before, here = (
        {name: text for name, text in leaves.items() if name.startswith(ours)}
        for leaves in (saved, now)
    )
    return frozenset() if before == here else frozenset((*before, *here))


# -- Checks of the arrays of a state, and the moving average of parameters -------------------------


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

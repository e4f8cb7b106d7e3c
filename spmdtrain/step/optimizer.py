"""Optimizer updates of all parameters, or of a parameter server's part."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from spmdtrain.errors import UserError
from spmdtrain.step.extra_arguments import ExtraArguments, update_with
from spmdtrain.step.optimizer_checks import check_optimizer
from spmdtrain.step.schedule_free import average_in, is_schedule_free
from spmdtrain.step.state import first_average
from spmdtrain.tree import named_leaves, path_name

PyTree = Any


@dataclass(frozen=True)
class Updated:
    """The result of an update.

    Attributes:
      params: All parameters after it.
      opt_state: The optimizer's state after it.
      updates: What was added to the trained parameters, None in place of the others.
      gradients: The given gradients.
    """

    params: PyTree
    opt_state: PyTree
    updates: PyTree
    gradients: PyTree


@dataclass(frozen=True)
class Update:
    """The optimizer with the parameters that it trains and their average.

    The average is a moving average, or that of a schedule-free optimizer.

    Attributes:
      optimizer: An optax optimizer.
      frozen: Regular expressions; a parameter whose path one of them matches is not trained, and a
        leaf of the model state keeps its value.
      ema_decay: The decay of the moving average of the parameters; None for no average.

    Raises:
      UserError: If `optimizer` is not an optax optimizer.
    """

    optimizer: optax.GradientTransformation
    frozen: Sequence[str] = ()
    ema_decay: float | None = None

    def __post_init__(self) -> None:
        optimizer = self.optimizer
        if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
            raise UserError(
                f"optimizer is a {type(optimizer).__module__}.{type(optimizer).__name__}: it must "
                "be an optax optimizer, for example optax.adam(1e-3)"
            )

    def init(self, params: PyTree) -> PyTree:
        """Returns the initial state of the optimizer for these parameters."""
        return self.optimizer.init(self.partition(params)[0])

    def first_average(self, params: PyTree) -> PyTree:
        """Returns the average before the first step; an empty dictionary without an average."""
        free = is_schedule_free(jax.eval_shape(self.init, params))
        return first_average(params) if free or self.ema_decay is not None else {}

    @property
    def averaged_before(self) -> PyTree:
        """The state's field of this name before the first step."""
        return {} if self.ema_decay is None else jnp.zeros((), jnp.int32)

    def __call__(
        self,
        params: PyTree,
        opt_state: PyTree,
        gradients: PyTree,
        extra: ExtraArguments,
        before: Sequence[jax.Array] = (),
    ) -> Updated:
        """Returns the parameters and the optimizer's state after a step.

        Args:
          params: All parameters.
          opt_state: The optimizer's state.
          gradients: Gradients of the trained parameters, None in place of the others.
          extra: The arguments for optimizers that use more than the gradients.
          before: With the gradients, the results of all collectives of the step so far. They matter
            to updates with collectives in a loop (see `in_loop_of_one_turn`).
        """
        trained, frozen = self.partition(params)
        updates, opt_state = update_with(self.optimizer, gradients, opt_state, trained, extra)
        params = merge(optax.apply_updates(trained, updates), frozen)
        return Updated(params, opt_state, updates, gradients)

    def partition(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """Returns the trained parameters and the others, each with None in the others' places."""
        # With `optax.selective_transform` instead, the gradients of the others would be computed
        # and reduced too, before it replaces their updates by 0.
        if not self.frozen:
            return params, None

        def part(belongs: Callable[[str], bool]) -> PyTree:
            return jax.tree_util.tree_map_with_path(
                lambda path, x: x if belongs(path_name(path)) else None, params
            )

        return part(lambda name: not self.is_frozen(name)), part(self.is_frozen)

    def is_frozen(self, name: str) -> bool:
        """Returns whether a variable is not trained, by its path in the model."""
        return matches_any(self.frozen, name)

    def check(self, params: PyTree, opt_state: PyTree, state_names: Iterable[str] = ()) -> None:
        """Checks the optimizer and the patterns of `freeze`.

        Args:
          params: All parameters; shapes suffice.
          opt_state: The optimizer's state; shapes suffice.
          state_names: Paths of the layers' model state.

        Raises:
          UserError: If the optimizer cannot be used (see `check_optimizer`), if a pattern matches
            neither a parameter nor a part of the model state, or if nothing is left to train.
        """
        check_optimizer(self.optimizer, opt_state, averages=self.ema_decay is not None)
        names, states = list(named_leaves(params)), list(state_names)
        for pattern in self.frozen:
            if not any(re.search(pattern, name) for name in [*names, *states]):
                raise UserError(f"freeze: {pattern!r} matches no parameter's path: {names}")
        trained = named_leaves(self.partition(params)[0])
        if self.frozen and not trained:
            raise UserError(f"freeze: no parameter is left to train of {names}")
        for name, x in trained.items():
            if not jnp.issubdtype(x.dtype, jnp.inexact):
                raise UserError(
                    f"parameter {name} is {x.dtype}, which has no gradient: freeze it (freeze="
                    f"({re.escape(name)!r},)), or give it a floating-point dtype"
                )

    def average(
        self, averaged: PyTree, params: PyTree, opt_state: PyTree, step: jax.Array
    ) -> PyTree:
        """Returns the average of the parameters after an update.

        That of a schedule-free optimizer is computed from its state. Otherwise it is an exponential
        moving average. The decay of update k, counted from 1, is at most (1 + k) / (10 + k), so
        that the average soon forgets the initial values, as TensorFlow's
        `ExponentialMovingAverage` with `num_updates` does.

        Args:
          averaged: The average before the update.
          params: The parameters after it.
          opt_state: The optimizer's state after it.
          step: Number of updates in the average before it.
        """
        if is_schedule_free(opt_state):
            return average_in(opt_state, params)
        if self.ema_decay is None:
            return averaged
        count = step.astype(jnp.float32)
        decay = jnp.minimum(self.ema_decay, (2.0 + count) / (11.0 + count))

        # `optax.ema` averages updates, from 0 and with a fixed decay. `optax.incremental_update`
        # computes s * new + (1 - s) * old, by whose rounding the average of a parameter that does
        # not change would drift, and returns float32 for a bfloat16 average.
        def average(old: jax.Array, new: jax.Array) -> jax.Array:
            change = new.astype(old.dtype) - old
            return old + (1 - decay).astype(old.dtype) * change

        return jax.tree.map(average, averaged, params)


def matches_any(patterns: Iterable[str], name: str) -> bool:
    """Returns whether one of some regular expressions matches anywhere in a path."""
    return any(re.search(pattern, name) for pattern in patterns)


def merge(params: PyTree, frozen: PyTree) -> PyTree:
    """Joins the two parts that `Update.partition` returns."""
    if frozen is None:
        return params
    return jax.tree.map(
        lambda x, y: y if x is None else x, params, frozen, is_leaf=lambda x: x is None
    )


def clipped(
    transformation: optax.GradientTransformation, gradients: PyTree, trained: PyTree, loss: Any
) -> PyTree:
    """Applies the part of an optimizer that runs on workers, and keeps no state, to gradients.

    Args:
      transformation: The part of the optimizer, gradient clipping for example.
      gradients: The whole gradients.
      trained: The trained parameters.
      loss: The loss.

    Returns:
      The transformed gradients.
    """
    extra = ExtraArguments(jnp.asarray(loss), gradients)
    state = transformation.init(trained)
    return update_with(transformation, gradients, state, trained, extra)[0]

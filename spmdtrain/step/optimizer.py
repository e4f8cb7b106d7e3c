"""Optimizer updates of all parameters, or of a parameter server's part."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from spmdtrain.errors import UserError
from spmdtrain.step.extra_arguments import ExtraArguments, update_with
from spmdtrain.step.optimizer_checks import check_optimizer
from spmdtrain.step.schedule_free import average_in, is_schedule_free
from spmdtrain.step.state import first_average
from spmdtrain.tree import named_leaves, path_name, promoted

PyTree = Any
_LARGEST_SUM = 1e6
"""Gradients of sums over a batch can exceed smaller limits, such as those of float16 and float8."""


@dataclass(frozen=True)
class Updated:
    """The result of an update.

    Attributes:
      params: All parameters after it.
      updates: What was added to the trained parameters, None in place of the others.
    """

    params: PyTree
    opt_state: PyTree
    updates: PyTree
    gradients: PyTree


@dataclass(frozen=True)
class Update:
    """The optimizer with the parameters that it trains and their average.

    The average is a moving average, or the average of a schedule-free optimizer.

    Attributes:
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
        """Returns the initial state of the optimizer for these parameters, frozen ones included.

        Raises:
          UserError: If the optimizer compares an `nnx.State` or another tree with them.
          ValueError: If the optimizer does not fit the parameters otherwise.
        """
        trained = self.partition(params)[0]
        try:
            return _settled(self.optimizer, self.optimizer.init(trained), trained)
        except ValueError as error:
            if "pytree structure error" not in str(error):
                raise
            from flax import nnx  # slow to import

            is_state = str(nnx.State) in str(error)
            remedy = "nnx.to_pure_dict(state)" if is_state else "such dictionaries"
            raise UserError(
                f"the optimizer compares {'an nnx.State' if is_state else 'another tree'} (a mask "
                "of optax.masked, or labels of optax.partition) with the parameters, which are "
                f"nested dictionaries here: give it {remedy}, or a function of the parameters"
            ) from error

    def first_average(self, params: PyTree) -> PyTree:
        """Returns the average before the first step; an empty dictionary without an average."""
        free = is_schedule_free(jax.eval_shape(self.init, params))
        return first_average(params) if free or self.ema_decay is not None else {}

    @property
    def averaged_before(self) -> PyTree:
        """The field `averaged_before` of the state before the first step."""
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
        """Returns the trained parameters and the others, each with None in place of the rest."""
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
        """Checks the optimizer and the patterns of `freeze`; shapes suffice.

        `state_names` has the paths of the layers' model state.

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
            if (largest := _largest_number(x.dtype)) < _LARGEST_SUM:
                raise UserError(
                    f"parameter {name} is {x.dtype}, whose largest number is "
                    f"{largest:g}: the gradient of a batch's sum can exceed "
                    "it where that of the mean does not. Give it float32 (param_dtype="
                    f"jnp.float32) or bfloat16, or freeze it (freeze=({re.escape(name)!r},))"
                )

    def average(
        self, averaged: PyTree, params: PyTree, opt_state: PyTree, step: jax.Array
    ) -> PyTree:
        """Returns the average of the parameters after an update.

        The average of a schedule-free optimizer is computed from its state. Otherwise it is an
        exponential moving average. The decay of update k, counted from 1, is at most (1 + k) /
        (10 + k), so that the average soon forgets the initial values, as TensorFlow's
        `ExponentialMovingAverage` with `num_updates` does.

        `averaged` is the average before the update, which contains `step` updates; `params` and
        `opt_state` are those after the update.
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
            if not jnp.issubdtype(new.dtype, jnp.inexact):
                return new  # frozen: flags, integers, random keys
            change = new.astype(old.dtype) - old
            return old + (1 - decay).astype(old.dtype) * change

        return jax.tree.map(average, averaged, params)


def _settled(optimizer: optax.GradientTransformation, state: PyTree, trained: PyTree) -> PyTree:
    """Returns an initial state with the arrays and dtypes that it has after an update.

    `optax.monitor` has no measurements before the first one. `optax.inject_hyperparams` multiplies
    by numbers of the widest dtype among the parameters, so the moments of narrower ones widen.
    """
    is_monitor = partial(_is_a, optax.MonitorState)
    has_monitor = any(map(is_monitor, jax.tree.leaves(state, is_leaf=is_monitor)))
    if not has_monitor and len({x.dtype for x in jax.tree.leaves(trained)}) < 2:
        return state  # an update is traced only where it may differ

    def update(trained: PyTree, state: PyTree) -> PyTree:
        loss = jnp.zeros((), jnp.float32)
        extra = ExtraArguments(loss, trained, lambda params: loss, lambda params, _: params)
        return update_with(optimizer, trained, state, trained, extra)[1]

    after = jax.eval_shape(update, trained, state)

    def fit(before: Any, after: Any) -> Any:
        if is_monitor(before):
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), after.measurements)
            states = jax.tree.map(fit, before.measure_states, after.measure_states)
            return before._replace(measurements=zeros, measure_states=states)
        widens = before.shape == after.shape and before.dtype != after.dtype
        if widens and promoted(before.dtype, after.dtype) == after.dtype:
            return before.astype(after.dtype)
        return before

    # Another structure is refused as a step's.
    structure: Any
    leaves, structure = jax.tree.flatten(state, is_leaf=is_monitor)
    others, other = jax.tree.flatten(after, is_leaf=is_monitor)
    return state if structure != other else structure.unflatten(map(fit, leaves, others))


def _largest_number(dtype: Any) -> float:
    """Returns the largest number of a floating-point dtype; of others, infinity."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return math.inf
    return float(jnp.finfo(dtype).max)  # type: ignore[no-untyped-call]


def _is_a(kind: type, node: Any) -> bool:
    return isinstance(node, kind)


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
    """Applies the part of an optimizer that runs on workers to the whole gradients.

    It is gradient clipping, for example, and keeps no state.
    """
    extra = ExtraArguments(jnp.asarray(loss), gradients)
    state = transformation.init(trained)
    return update_with(transformation, gradients, state, trained, extra)[0]

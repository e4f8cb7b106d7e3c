"""The learning rate of a step, from an optimizer's state and its schedule."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from spmdtrain.step.extra_arguments import closure_of, reachable_functions
from spmdtrain.step.hyperparameters import learning_rate

PyTree = Any
_RATES = frozenset({"scale", "learning_rate", "estim_lr"})
"""Fields of optax's states whose values scale the updates."""
_SCALED = (optax.contrib.MechanicState,)  # states that scale the updates by other fields
# Functions of optax: those that scale the updates, and the one that holds a schedule.
_SCALING = frozenset({"scale.<locals>.update_fn", "scale_by_schedule.<locals>.update_fn"})
_OF_SCHEDULE = "scale_by_learning_rate.<locals>.<lambda>"
_CONSTANT = "scale.<locals>.update_fn"
# States that scale the updates once more, with the field that has the factor of the last update.
_FACTORS: Mapping[type[Any], str] = {
    optax.contrib.ReduceLROnPlateauState: "scale",
    optax.ScaleByZoomLinesearchState: "learning_rate",
    optax.ScaleByBacktrackingLinesearchState: "learning_rate",
}


def scales_updates(opt_state: PyTree) -> bool:
    """Returns whether an optimizer's state, or its shapes, has a rate, a scale or a schedule."""

    def scales(node: Any) -> bool:
        return _has_scale(node) or isinstance(node, optax.ScaleByScheduleState)

    return any(map(scales, jax.tree.leaves(opt_state, is_leaf=scales)))


def step_rate(
    optimizer: optax.GradientTransformation, before: PyTree, after: PyTree
) -> jax.Array | None:
    """Returns the learning rate of an update, with the scale of plateaus and line searches.

    It is an f32 scalar; None if the rate is constant or not known. `before` and `after` are the
    optimizer's states before and after the update.
    """
    rate = learning_rate(after)
    if rate is None:
        rate = _rate_in_closures(optimizer, before)
    factors = [getattr(node, _FACTORS[type(node)]) for node in _factor_nodes(after)]
    return None if rate is None else math.prod(factors, start=rate)


def _rate_in_closures(
    optimizer: optax.GradientTransformation, opt_state: PyTree
) -> jax.Array | None:
    """Returns the rate that a single schedule gives, or a constant one that a state scales.

    An optax optimizer does not offer its rate, which only the closures of its functions hold. The
    result is None if they are not as expected, or if anything else scales the updates.
    """

    def is_count(node: Any) -> bool:
        return isinstance(node, optax.ScaleByScheduleState)

    counts = [x for x in jax.tree.leaves(opt_state, is_leaf=is_count) if is_count(x)]
    factors = _factor_nodes(opt_state)
    scales = filter(_has_scale, jax.tree.leaves(opt_state, is_leaf=_has_scale))
    if not all(map(_is_factor, scales)):
        return None
    functions = reachable_functions(optimizer.update, follows=_is_of_optax)
    found = {id(function): function for function in functions}.values()
    scaling = [f for f in found if _name(f) in _SCALING]
    if len(scaling) != 1:
        return None
    if not counts and factors and _name(scaling[0]) == _CONSTANT:
        step_size = closure_of(scaling[0]).get("step_size")
        return None if step_size is None else -jnp.asarray(step_size, jnp.float32)
    schedules = [f for f in found if _name(f) == _OF_SCHEDULE]
    if len(counts) != 1 or len(schedules) != 1:
        return None
    schedule = closure_of(schedules[0]).get("learning_rate")
    return jnp.asarray(schedule(counts[0].count), jnp.float32) if callable(schedule) else None


def _has_scale(node: Any) -> bool:
    return not _RATES.isdisjoint(getattr(node, "_fields", ())) or isinstance(node, _SCALED)


def _is_factor(node: Any) -> bool:
    return type(node) in _FACTORS


def _factor_nodes(opt_state: PyTree) -> list[Any]:
    return [x for x in jax.tree.leaves(opt_state, is_leaf=_is_factor) if _is_factor(x)]


def _is_of_optax(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("optax.")


def _name(function: Any) -> str:
    """Returns the qualified name of a function of optax; "" of another function."""
    return str(getattr(function, "__qualname__", "")) if _is_of_optax(function) else ""

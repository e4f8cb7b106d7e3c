"""Hyperparameters in the optimizer's state, and the learning rate of a step."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.interpreters import partial_eval

from spmdtrain.errors import UserError
from spmdtrain.step.optimizer import closure_of, reachable_functions
from spmdtrain.step.state import TrainState
from spmdtrain.tree import path_name

# -- Hyperparameters in the optimizer's state (`optax.inject_hyperparams`) across a resume ---------
#
# An injected constant is part of the optimizer's state, so a restore brings the old value back.
# Each checkpoint therefore records the initial values of the optimizer. If one of them differs on a
# resume, the new value replaces the restored one. A value that the run itself has changed (in a
# callback, for example) is kept as long as the initial value is the same. Schedules are not
# recorded: they are computed from the step count at each update. A checkpoint of an older version
# has no record; then the configured learning rate decides.

PyTree = Any
_FIELD = jax.tree_util.GetAttrKey("hyperparams")
_SCHEDULES = jax.tree_util.GetAttrKey("hyperparams_states")
_RATE = "learning_rate"


def injected(opt_state: PyTree) -> dict[str, Any]:
    """Returns the injected hyperparameters of an optimizer's state by path."""
    leaves = jax.tree_util.tree_leaves_with_path(opt_state)
    return {path_name(path): leaf for path, leaf in leaves if _FIELD in path}


def _constants(opt_state: PyTree) -> dict[str, Any]:
    """Returns the injected hyperparameters that no schedule computes, by path."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(opt_state)]
    indices = [(path, path.index(_SCHEDULES)) for path in paths if _SCHEDULES in path]
    scheduled = {path_name((*path[:at], _FIELD, path[at + 1])) for path, at in indices}
    return {name: x for name, x in injected(opt_state).items() if name not in scheduled}


def _is_rate(name: str) -> bool:
    return name.split("/")[-1] == _RATE


def learning_rate(opt_state: PyTree) -> jax.Array | None:
    """Returns the injected learning rate; None if there is none, or more than one."""
    rates = [x for name, x in injected(opt_state).items() if _is_rate(name)]
    return rates[0] if len(rates) == 1 and rates[0].ndim == 0 else None


def changeable_learning_rate(opt_state: PyTree) -> float:
    """Returns the injected learning rate, which `with_learning_rate` can replace.

    Raises:
      UserError: If the optimizer has no injected learning rate, has several, or a schedule computes
        it.
    """
    rate = _constants(opt_state)[_rate_name(opt_state)]
    return float(np.asarray(rate.addressable_data(0)))


def _rate_name(opt_state: PyTree) -> str:
    rates = {name: x for name, x in _constants(opt_state).items() if _is_rate(name)}
    if len(rates) != 1 or next(iter(rates.values())).ndim:
        count = f"{len(rates)} injected learning rates" if rates else "no injected learning rate"
        raise UserError(
            f"the learning rate cannot be changed during the run, because the optimizer has {count}"
            ": make it as optax.inject_hyperparams(optax.adam)(learning_rate=0.001), with a number"
        )
    return next(iter(rates))


def with_learning_rate(state: TrainState, rate: float) -> TrainState:
    """Returns a state with another injected learning rate (see `changeable_learning_rate`).

    All processes call it, with the same rate.
    """
    rate_name = _rate_name(state.opt_state)

    def replace(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        if path_name(path) != rate_name:
            return leaf
        value = np.full(leaf.shape, rate, leaf.dtype)
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: value[index])

    opt_state = jax.tree_util.tree_map_with_path(replace, state.opt_state)
    return dataclasses.replace(state, opt_state=opt_state)


def initial_values(init: Callable[..., PyTree], *arguments: PyTree) -> dict[str, Any]:
    """Returns the initial values of an optimizer's injected hyperparameters, as numbers by path.

    Hyperparameters that a schedule computes are left out. `init` returns the optimizer's state;
    shapes of its `arguments` suffice. It is traced, and only what the hyperparameters depend on is
    computed.
    """
    program, shapes = jax.make_jaxpr(init, return_shape=True)(*arguments)
    constants = _constants(shapes)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(shapes)]
    wanted = [path_name(path) in constants for path in paths]
    if not any(wanted):
        return {}
    needed, used = partial_eval.dce_jaxpr(program.jaxpr, wanted)
    if any(used):  # values computed from the parameters are not options
        return {}
    values = jax.core.eval_jaxpr(needed, program.consts)
    return {name: np.asarray(value).tolist() for name, value in zip(constants, values, strict=True)}


def updated(
    state: TrainState,
    shardings: TrainState,
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    log: Callable[[str], None],
) -> TrainState:
    """Returns a restored state with the new values of hyperparameters that have changed.

    Args:
      saved: The initial values when the state was saved.
      now: The initial values of this run.
      log: Called with a line for each change.
    """
    if not now or saved == now:
        return state

    def replace(path: tuple[Any, ...], leaf: jax.Array, sharding: jax.sharding.Sharding) -> Any:
        name = path_name(path)
        if name not in now or saved.get(name, now[name]) == now[name]:
            return leaf
        value = np.asarray(now[name], leaf.dtype)
        restored = np.asarray(leaf.addressable_data(0)) if leaf.is_fully_replicated else None
        if restored is not None and not np.array_equal(restored, value):
            log(f"optimizer: {name} {restored!s} -> {value!s}")
        values = np.broadcast_to(value, leaf.shape)  # each copy of the state may have its own
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: values[index])

    opt_state = jax.tree_util.tree_map_with_path(replace, state.opt_state, shardings.opt_state)
    return dataclasses.replace(state, opt_state=opt_state)


# -- The learning rate of a step, from an optimizer's state and its schedule -----------------------

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

"""The learning rate of an optimizer with an optax schedule."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

PyTree = Any
_RATES = frozenset({"scale", "learning_rate", "estim_lr"})
"""Fields of optax's states whose values scale the updates."""
# Functions of optax: those that scale the updates, and the one that holds a schedule.
_SCALING = frozenset({"scale.<locals>.update_fn", "scale_by_schedule.<locals>.update_fn"})
_OF_SCHEDULE = "scale_by_learning_rate.<locals>.<lambda>"


def scales_updates(opt_state: PyTree, *, schedules: bool = True) -> bool:
    """Returns whether an optimizer's state holds a rate or a scale of the updates.

    Args:
      opt_state: The state, or its shapes.
      schedules: Whether the count of a schedule counts as one.
    """

    def scales(node: Any) -> bool:
        named = not _RATES.isdisjoint(getattr(node, "_fields", ()))
        return named or (schedules and isinstance(node, optax.ScaleByScheduleState))

    return any(map(scales, jax.tree.leaves(opt_state, is_leaf=scales)))


def scheduled_rate(optimizer: optax.GradientTransformation, opt_state: PyTree) -> jax.Array | None:
    """Returns the learning rate of the next update, if a single optax schedule determines it.

    An optax optimizer does not offer its schedule, which only the closures of its functions hold.
    The result is None if they are not as expected, or if anything else scales the updates.

    Args:
      optimizer: The optimizer.
      opt_state: Its state before the update.

    Returns:
      f32 scalar; None if the rate is not known.
    """

    def is_count(node: Any) -> bool:
        return isinstance(node, optax.ScaleByScheduleState)

    counts = [x for x in jax.tree.leaves(opt_state, is_leaf=is_count) if is_count(x)]
    if len(counts) != 1 or scales_updates(opt_state, schedules=False):
        return None
    found = {id(function): function for function in _functions(optimizer.update)}.values()
    scaling = [f for f in found if _name(f) in _SCALING]
    schedules = [f for f in found if _name(f) == _OF_SCHEDULE]
    if len(scaling) != 1 or len(schedules) != 1:
        return None
    schedule = dict(_closure(schedules[0])).get("learning_rate")
    return jnp.asarray(schedule(counts[0].count), jnp.float32) if callable(schedule) else None


def _functions(function: Any) -> Iterator[Callable[..., Any]]:
    """Yields a function of optax, and the functions in its closure and in their closures."""
    seen: set[int] = set()
    pending = [function]
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, tuple | list):
            pending += item
        elif isinstance(item, dict):
            pending += item.values()
        elif callable(item):
            yield item
            pending += [value for _, value in _closure(item)]


def _closure(function: Any) -> list[tuple[str, Any]]:
    """Returns the variables that a function of optax refers to; none of another function."""
    cells = getattr(function, "__closure__", None)
    if not cells or not str(getattr(function, "__module__", "")).startswith("optax."):
        return []
    try:
        return [
            (name, cell.cell_contents)
            for name, cell in zip(function.__code__.co_freevars, cells, strict=True)
        ]
    except ValueError:  # a variable without a value yet
        return []


def _name(function: Any) -> str:
    """Returns the qualified name of a function of optax; "" of another function."""
    in_optax = str(getattr(function, "__module__", "")).startswith("optax.")
    return str(getattr(function, "__qualname__", "")) if in_optax else ""

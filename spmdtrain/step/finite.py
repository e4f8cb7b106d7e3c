"""Checks of a step's loss and state for NaN and infinity."""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from spmdtrain.tree import named_leaves

PyTree = Any
FLAGS = ("loss", "params", "opt_state", "model_state")
"""The names of the flags that `finite_flags` returns."""


class Whole(Protocol):
    """The fields of a state, or of a parameter server's part of one."""

    @property
    def params(self) -> PyTree: ...

    @property
    def opt_state(self) -> PyTree: ...

    @property
    def model_state(self) -> PyTree: ...


def finite_flags(loss: jax.Array, before: Whole, after: Whole, places: Whole) -> jax.Array:
    """Returns whether each of `FLAGS` is finite after a step.

    `optax.apply_if_finite` checks gradients only, and skips their update; a run has to stop.

    Values that were infinite before are compared only if they may be infinite on purpose: reading
    the old parameters would prevent their update in place, a third of a small step's time.

    Args:
      loss: One or several numbers.
      before: The state before the step.
      after: The state after the step.
      places: The shardings of the state.

    Returns:
      bool (4,).
    """
    return jnp.stack(
        [
            jnp.isfinite(loss).all(),
            stays_finite(before.params, after.params, places.params),
            stays_finite(before.opt_state, after.opt_state, places.opt_state),
            stays_finite(
                before.model_state, after.model_state, places.model_state, arrays_too=True
            ),
        ]
    )


def stays_finite(
    before: PyTree, after: PyTree, places: PyTree, *, arrays_too: bool = False
) -> jax.Array:
    """Returns whether no element became NaN or infinite, a bool scalar.

    A scalar that was infinite before may stay so (the best loss so far, for example).

    Args:
      before: Arrays before a step.
      after: The same arrays after it.
      places: Their shardings.
      arrays_too: Whether elements of arrays that were infinite before may stay so, too (a mask).
    """
    flags, small = [], []
    for x, y, place in zip(*map(jax.tree.leaves, (before, after, places)), strict=True):
        if not jnp.issubdtype(y.dtype, jnp.inexact):
            continue
        if arrays_too or y.ndim == 0:
            flags.append((jnp.isfinite(y) | (jnp.isinf(x) & ~jnp.isnan(y))).all())
        elif not uses_products(y, place):
            flags.append(jnp.isfinite(y).all())
        elif y.size > _SMALL:
            flags.append(_is_finite(y.reshape(-1, y.shape[-1])))
        else:
            small.append(y.ravel())
    # One reduction for all small arrays: a reduction for each took most of the compile time of a
    # model with hundreds of arrays, and a fifth of its step's time.
    for dtype in dict.fromkeys(y.dtype for y in small):  # in the same order in each run
        flags.append(_is_finite(jnp.concatenate([y for y in small if y.dtype == dtype])))
    return jnp.array(flags).all()


_SMALL = 2**14  # elements up to which the copy into one array takes next to no time


def uses_products(x: jax.Array, place: Sharding) -> bool:
    """Returns whether a product is the fastest check of an array.

    XLA:CPU compares elements one by one, which makes a step of a small network a quarter slower. A
    product with zeros, which is NaN if an element is not finite, costs next to nothing.

    Args:
      x: The array.
      place: Its sharding.
    """
    device: Any = next(iter(place.device_set))
    whole, widths = place.is_fully_replicated, (jnp.float32, jnp.float64)
    return device.platform == "cpu" and whole and x.dtype in widths


def _is_finite(x: jax.Array) -> jax.Array:
    """Returns whether all elements are finite, by a product with zeros."""
    return jnp.isfinite(x @ jnp.zeros(x.shape[-1], x.dtype)).all()


def first_non_finite(tree: PyTree) -> str | None:
    """Returns the path of the first array that holds NaN or infinity; None if there is none."""
    for name, leaf in named_leaves(tree).items():
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and not bool(jnp.isfinite(leaf).all()):
            return name
    return None

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


def finite_flags(
    loss: jax.Array,
    before: Whole,
    after: Whole,
    places: Whole,
    *,
    is_last: jax.Array | None = None,
) -> jax.Array:
    """Returns whether each of `FLAGS` is finite after a step, bool (4,).

    `optax.apply_if_finite` checks gradients only, and skips their update; a run has to stop.

    Values that were infinite before are compared only if they may be infinite on purpose: reading
    the old parameters would prevent their update in place, a third of a small step's time.

    Within a dispatch of several steps on CPU, reading the optimizer's state takes a sixth of a
    small step's time. So its flag is computed only after the last step, because the states in
    between are never read, and after the first step whose loss or parameters are not finite.

    Args:
      loss: One or several numbers.
      places: The shardings of the state.
      is_last: A bool scalar, whether the step is the last one of a dispatch of several; None for a
        dispatch of one step.
    """

    def of_optimizer() -> jax.Array:
        return stays_finite(before.opt_state, after.opt_state, places.opt_state)

    of_loss = jnp.isfinite(loss).all()
    of_params = stays_finite(before.params, after.params, places.params)
    if is_last is not None and may_branch(places.opt_state):
        needed = is_last | ~of_loss | ~of_params
        of_state = jax.lax.cond(needed, of_optimizer, lambda: jnp.array(True))
    else:
        of_state = of_optimizer()
    of_model = stays_finite(
        before.model_state, after.model_state, places.model_state, arrays_too=True
    )
    return jnp.stack([of_loss, of_params, of_state, of_model])


def may_branch(places: PyTree | None) -> bool:
    """Returns whether a branch may reduce arrays: on CPUs, if every device has them whole.

    The reduction of split arrays needs an all-reduce. XLA's CPU client runs an all-reduce in a
    branch or loop concurrently with those outside, and not in the same order on all devices: its
    threads then wait in different all-reduces, until it aborts after 40 seconds. On GPUs a branch
    would make the host wait for the device, and XLA fuses the sums with the update.

    `places` has the shardings of all arrays; None if they are not known.
    """
    shardings = jax.tree.leaves(places)
    if not shardings or next(iter(shardings[0].device_set)).platform != "cpu":
        return False
    return all(sharding.is_fully_replicated for sharding in shardings)


def stays_finite(
    before: PyTree, after: PyTree, places: PyTree, *, arrays_too: bool = False
) -> jax.Array:
    """Returns whether no element became NaN or infinite, a bool scalar.

    A scalar that was infinite before may stay so (the best loss so far, for example); with
    `arrays_too` also elements of arrays (a mask). `places` has the shardings of the arrays.
    """
    flags, products = [], []
    for x, y, place in zip(*map(jax.tree.leaves, (before, after, places)), strict=True):
        if not jnp.issubdtype(y.dtype, jnp.inexact):
            continue
        if arrays_too or y.ndim == 0:
            flags.append((jnp.isfinite(y) | (jnp.isinf(x) & ~jnp.isnan(y))).all())
        elif not uses_products(y, place):
            flags.append(jnp.isfinite(y).all())
        elif y.size > SMALL_ARRAY:
            rows = y.reshape(-1, y.shape[-1])
            products.append(rows @ jnp.zeros(y.shape[-1], y.dtype))
        else:
            products.append(y.ravel())
    # One reduction for all arrays: a reduction for each took most of the compile time of a model
    # with hundreds of arrays, and a fifth of its step's time.
    for dtype in dict.fromkeys(y.dtype for y in products):  # in the same order in each run
        values = jnp.concatenate([y for y in products if y.dtype == dtype])
        flags.append(jnp.isfinite(values @ jnp.zeros(values.size, dtype)))
    return jnp.array(flags).all()


SMALL_ARRAY = 2**14
"""The largest size of an array that takes next to no time to copy into one with many others."""


def uses_products(x: jax.Array, place: Sharding) -> bool:
    """Returns whether a product is the fastest check of an array.

    XLA:CPU compares elements one by one, which makes a step of a small network a quarter slower.
    The dot product with zeros is NaN if any element is not finite, and XLA:CPU vectorizes it.
    """
    device: Any = next(iter(place.device_set))
    whole, widths = place.is_fully_replicated, (jnp.float32, jnp.float64)
    return device.platform == "cpu" and whole and x.dtype in widths


def first_non_finite(tree: PyTree) -> str | None:
    """Returns the path of the first array that holds NaN or infinity; None if there is none."""
    for name, leaf in named_leaves(tree).items():
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and not bool(jnp.isfinite(leaf).all()):
            return name
    return None

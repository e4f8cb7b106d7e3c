"""L2 norms of the parameters, the gradients and the updates of a step."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from spmdtrain.sharding.layout import Layout
from spmdtrain.step.finite import uses_products

PyTree = Any
NORMS = ("parameter_norm", "gradient_norm", "update_norm")
"""The names of the norms that `step_norms` returns."""


def has_norms(step: Any, every: int) -> Any:
    """Returns whether `step_norms` computes the norms of a step: the first, and each `every`-th.

    Args:
      step: The number of the step, counted from 1; an integer or an array.
      every: The cadence of the log.
    """
    return (step == 1) | (step % every == 0)


def step_norms(
    params: PyTree,
    layout: Layout,
    step: jax.Array,
    every: int,
    *,
    changes: tuple[PyTree, PyTree] | None = None,
) -> jax.Array:
    """Returns the norms of `NORMS`, float32 (3,), or (1,) without gradients and updates.

    On CPUs, where a pass over all parameters is a tenth of the step of a small network, steps that
    are not logged skip them (see `_may_skip`).

    Args:
      params: The updated parameters.
      layout: The shardings of the state.
      step: The number of the step, counted from 1.
      every: The cadence of the log (see `has_norms`).
      changes: Gradients of the mean loss and the optimizer's updates, None in place of frozen
        parameters; or None if they are not known.
    """
    places = layout.on_device.params
    of_changes = None if layout.splits_gradients else places
    zero = jnp.zeros((), jnp.float32)
    needed = has_norms(step, every)
    if _may_skip(places):
        norm = jax.lax.cond(needed, lambda: global_norm(params, places), lambda: zero)
    else:
        norm = global_norm(params, places)
    if changes is None:
        return norm[None]

    def norms() -> jax.Array:
        return jnp.stack([global_norm(tree, of_changes) for tree in changes])

    if _may_skip(of_changes):
        # A loop of one iteration or none, because with a `cond` XLA fuses the update with other
        # operations, so that the parameters would differ in their last bits from those without
        # norms. XLA computes these norms before the loop, in every step; a barrier in the body
        # prevents that, but it changes the last bits too.
        times = needed.astype(jnp.int32)
        found = jax.lax.fori_loop(0, times, lambda *_: norms(), jnp.stack([zero, zero]))
    else:
        found = norms()
    return jnp.concatenate([norm[None], found])


def _may_skip(places: PyTree | None) -> bool:
    """Returns whether a norm is computed in a branch: on CPUs, if every device has whole arrays.

    The norm of split arrays needs an all-reduce. XLA's CPU client runs one in a branch or in a loop
    beside those outside of it, and not on all devices in the same order: its threads then wait in
    different all-reduces, until it aborts after 40 seconds. On GPUs a branch would make the host
    wait for the device, and XLA fuses the sums with the update.

    Args:
      places: The shardings of all arrays; None if they are not known.
    """
    shardings = jax.tree.leaves(places)
    if not shardings or next(iter(shardings[0].device_set)).platform != "cpu":
        return False
    return all(sharding.is_fully_replicated for sharding in shardings)


def global_norm(tree: PyTree, places: PyTree | None) -> jax.Array:
    """Returns the L2 norm of all elements of a tree, a float32 scalar.

    Sums are in float32, also those of 16-bit arrays. Leaves of integers do not count.
    `optax.global_norm` adds up a 16-bit leaf in 16 bits, and reduces element by element on CPUs.

    Args:
      tree: Arrays; None in place of those that do not count.
      places: The shardings of all arrays; None if they are not known.
    """

    def leaves_of(tree: PyTree) -> list[Any]:
        return jax.tree.leaves(tree, is_leaf=lambda x: x is None)

    leaves = leaves_of(tree)
    known = [None] * len(leaves) if places is None else leaves_of(places)
    squares = [
        _square(x, place)
        for x, place in zip(leaves, known, strict=True)
        if x is not None and jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    return jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))


def _square(x: jax.Array, place: Sharding | None) -> jax.Array:
    """Returns the sum of the squared absolute values of the elements, float32."""
    x = (jnp.abs(x) if jnp.iscomplexobj(x) else x).astype(jnp.float32)
    if place is not None and uses_products(x, place):  # of a split array they would need all of it
        flat = x.ravel()
        return flat @ flat
    return jnp.square(x).sum()

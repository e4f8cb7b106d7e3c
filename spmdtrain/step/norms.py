"""L2 norms of the parameters, the gradients and the updates of a step."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from spmdtrain.sharding.layout import Layout
from spmdtrain.step.finite import SMALL_ARRAY, may_branch, uses_products
from spmdtrain.step.fixed_order import FixedOrder
from spmdtrain.step.metric_names import NORMS

PyTree = Any
Changes = Callable[[], tuple[PyTree, PyTree]]
"""Returns the gradients of the mean loss and the optimizer's updates.

Both have None in place of frozen parameters.
"""
_SMALL = 2**26  # bytes of gradients
_FEW = 32  # arrays


def has_norms(step: Any, every: int) -> Any:
    """Returns whether `step_norms` computes the norms of a step: the first, and each `every`-th.

    `step` is counted from 1; an integer or an array.
    """
    return (step == 1) | (step % every == 0)


def step_norms(
    params: PyTree,
    layout: Layout,
    step: jax.Array,
    every: int,
    *,
    changes: Changes | None = None,
    order: FixedOrder | None = None,
) -> jax.Array:
    """Returns the norms of `NORMS`, float32 (3,), or (1,) without gradients and updates.

    On CPUs, where a pass over all parameters is a tenth of the step of a small network, steps that
    are not logged skip them (see `may_branch` and `recomputes_changes`).

    Args:
      params: The updated parameters.
      step: The number of the step, counted from 1.
      changes: The gradients and the updates; None if they are not known.
      order: The order of the sums; None if it may depend on the devices.
    """
    if order is not None:
        trees = (params, *(() if changes is None else changes()))
        return jnp.stack([order.evaluate(lambda x: global_norm(x, None), tree) for tree in trees])
    places = layout.on_device.params
    places_of_changes = None if layout.splits_gradients else places
    needed = has_norms(step, every)

    def of_params() -> jax.Array:
        return global_norm(params, places)

    def of_changes(*, by_rows: bool = False) -> list[jax.Array]:
        trees = () if changes is None else changes()
        return [global_norm(tree, places_of_changes, by_rows=by_rows) for tree in trees]

    def in_branch() -> jax.Array:
        return jnp.stack([of_params(), *of_changes(by_rows=True)])

    if changes is not None and recomputes_changes(params, layout):
        return jax.lax.cond(needed, in_branch, lambda: jnp.zeros(len(NORMS), jnp.float32))
    if may_branch(places):
        norm = jax.lax.cond(needed, of_params, lambda: jnp.zeros((), jnp.float32))
    else:
        norm = of_params()
    return jnp.stack([norm, *of_changes()])


def recomputes_changes(params: PyTree, layout: Layout) -> bool:
    """Returns whether the norms of gradients and updates are computed in a branch: on one CPU.

    The branch computes the updates again (`recomputable`), because otherwise XLA would write them
    to memory in every step. The gradients of all layers stay in memory until then, so networks have
    to be small. On several devices a branch that uses reduced gradients changes last bits of the
    update. Shapes of the parameters suffice.
    """
    places = layout.on_device.params
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    single = all(len(place.device_set) == 1 for place in jax.tree.leaves(places))
    return single and size <= _SMALL and may_branch(places)


def global_norm(tree: PyTree, places: PyTree | None, *, by_rows: bool = False) -> jax.Array:
    """Returns the L2 norm of all elements of a tree, a float32 scalar.

    Sums are in float32, also those of 16-bit arrays. Leaves of integers do not count.
    `optax.global_norm` adds up a 16-bit leaf in 16 bits, and reduces element by element on CPUs.

    Args:
      tree: Arrays; None in place of those that do not count.
      places: The shardings of all arrays; None if they are not known.
      by_rows: Whether to add up the squares of whole arrays on a CPU by a product with ones. That
        takes half the time if the elements have yet to be computed.
    """

    def leaves_of(tree: PyTree) -> list[Any]:
        return jax.tree.leaves(tree, is_leaf=lambda x: x is None)

    leaves = leaves_of(tree)
    known = [None] * len(leaves) if places is None else leaves_of(places)
    pairs = [
        ((jnp.abs(x) if jnp.iscomplexobj(x) else x).astype(jnp.float32), place)
        for x, place in zip(leaves, known, strict=True)
        if x is not None and jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    # Many small arrays are added up as one: with a product for each of some hundred, their
    # compilation took most of the time until the first step.
    small, apart, squares = [], [], []
    for x, place in pairs:
        if x.size <= SMALL_ARRAY and _uses_products(x, place):
            small.append(x.ravel())
        else:
            apart.append((x, place))
    if len(small) > _FEW:
        joined = jnp.concatenate(small)
        pairs, squares = apart, [joined @ joined]
    squares += [_square(x, place, by_rows=by_rows) for x, place in pairs]
    return jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))


def _uses_products(x: jax.Array, place: Sharding | None) -> bool:
    """Returns whether the squares of an array are added up by a product."""
    return place is not None and uses_products(x, place)  # of a split array it would need all


def _square(x: jax.Array, place: Sharding | None, *, by_rows: bool) -> jax.Array:
    """Returns the sum of the squares of the elements, a float32 scalar."""
    if _uses_products(x, place):
        if by_rows and x.ndim and x.size:
            rows = jnp.square(x).reshape(-1, x.shape[-1])
            return (rows @ jnp.ones(x.shape[-1], x.dtype)).sum()
        flat = x.ravel()
        return flat @ flat
    return jnp.square(x).sum()

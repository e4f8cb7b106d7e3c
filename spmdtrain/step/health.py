"""Norms of a step, and checks of its loss and state for NaN and infinity."""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from spmdtrain.sharding.layout import Layout
from spmdtrain.tree import named_leaves

# -- Checks of a step's loss and state for NaN and infinity ----------------------------------------

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

    Some optimizers leave out updates that are not finite: then `Health` lets the state decide
    alone.

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


# -- L2 norms of the parameters, the gradients and the updates of a step ---------------------------

Changes = Callable[[], tuple[PyTree, PyTree]]
"""Returns the gradients of the mean loss and the optimizer's updates.

Both have None in place of frozen parameters.
"""
_SMALL = 2**26  # bytes of gradients
_FEW = 32  # arrays


def has_norms(step: Any, every: int) -> Any:
    """Returns whether a step has norms: the first, and each `every`-th.

    `step` is counted from 1; an integer or an array.
    """
    return (step == 1) | (step % every == 0)


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

"""Whether what a step has made is finite."""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from spmdtrain.tree import named_leaves

PyTree = Any
HEALTH = ("loss", "params", "opt_state", "model_state")


class Whole(Protocol):
    """A state, or a server's part of one."""

    @property
    def params(self) -> PyTree: ...

    @property
    def opt_state(self) -> PyTree: ...

    @property
    def model_state(self) -> PyTree: ...


def health(loss: jax.Array, before: Whole, after: Whole, places: Whole) -> jax.Array:
    """Whether each of `HEALTH` is finite after a step, bool (4,).

    `loss` may be several numbers; `places` are the state's shardings.

    To look at the old parameters too would keep them from being overwritten in place: a third of a
    small step's time. So only what may be infinite on purpose is compared.
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
    """Whether no element became NaN or infinite.

    A scalar that was infinite before is meant so (the best loss yet, say), and is none of it;
    with `arrays_too`, so is an element of an array (a mask).
    """
    sound, small = [], []
    for x, y, place in zip(*map(jax.tree.leaves, (before, after, places)), strict=True):
        if not jnp.issubdtype(y.dtype, jnp.inexact):
            continue
        if arrays_too or y.ndim == 0:
            sound.append((jnp.isfinite(y) | (jnp.isinf(x) & ~jnp.isnan(y))).all())
        elif not _by_products(y, place):
            sound.append(jnp.isfinite(y).all())
        elif y.size > _SMALL:
            sound.append(_product(y.reshape(-1, y.shape[-1])))
        else:
            small.append(y.ravel())
    # Of small arrays, one for all: to compile a reduction for each took most of the compile time
    # of a model of hundreds of arrays, and to run them a fifth of its step.
    for dtype in dict.fromkeys(y.dtype for y in small):  # in an order that is the same in each run
        sound.append(_product(jnp.concatenate([y for y in small if y.dtype == dtype])))
    return jnp.array(sound).all()


_SMALL = 2**14  # elements, that are copied next to others' in no time


def _by_products(x: jax.Array, place: Sharding) -> bool:
    """Whether products tell best if an array is finite.

    XLA:CPU compares elements one by one: with it, a step of a small network takes a quarter longer.
    Products with zeros, which are NaN for what is not finite, take it nothing.
    """
    device: Any = next(iter(place.device_set))
    whole, widths = place.is_fully_replicated, (jnp.float32, jnp.float64)
    return device.platform == "cpu" and whole and x.dtype in widths


def _product(x: jax.Array) -> jax.Array:
    """Whether all elements are finite."""
    return jnp.isfinite(x @ jnp.zeros(x.shape[-1], x.dtype)).all()


def first_non_finite(tree: PyTree) -> str | None:
    """The path of the first array that holds a NaN or an infinity."""
    for name, leaf in named_leaves(tree).items():
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and not bool(jnp.isfinite(leaf).all()):
            return name
    return None

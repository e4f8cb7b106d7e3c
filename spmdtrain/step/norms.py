"""L2 norms of the gradients and of the parameters of a step."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from spmdtrain.step.finite import uses_products

PyTree = Any
GRADIENT_NORM, PARAMETER_NORM = "gradient_norm", "parameter_norm"


def global_norm(tree: PyTree, places: PyTree) -> jax.Array:
    """Returns the L2 norm of all elements of a tree, a float32 scalar.

    Sums are in float32, also those of 16-bit arrays. Leaves of integers do not count.
    `optax.global_norm` adds up a 16-bit leaf in 16 bits, and reduces element by element on CPUs.

    Args:
      tree: Arrays; None in place of frozen parameters.
      places: The shardings of the arrays, a tree with the same or more leaves.
    """
    squares = [
        _square(x, place)
        for x, place in zip(
            jax.tree.leaves(tree, is_leaf=_is_none), jax.tree.leaves(places), strict=True
        )
        if x is not None and jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    return jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))


def _is_none(x: Any) -> bool:
    return x is None


def _square(x: jax.Array, place: Sharding) -> jax.Array:
    """Returns the sum of the squared elements, float32."""
    x = x.astype(jnp.float32)
    if uses_products(x, place):
        flat = x.ravel()
        return flat @ flat
    return jnp.square(x).sum()

"""Changes of the model state, and how those of several workers or replicas are combined."""

from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


def difference(after: PyTree, before: PyTree) -> PyTree:
    """What a batch adds to the model state, so that what several add comes together.

    A batch statistic becomes `new - old`, which moves the newest one by as much; counters, and the
    numbers of random keys, add up modulo their range. A flag is taken as it is.
    """

    def more(x: jax.Array, y: jax.Array) -> jax.Array:
        if x.dtype == jnp.bool_:
            return x
        return jnp.where(x == y, jnp.zeros_like(x), x - y)  # a mask's infinities stay

    return jax.tree.map(more, after, before)


def with_difference(tree: PyTree, more: PyTree, staleness: jax.Array) -> PyTree:
    """The model state with what a batch adds to it, computed so many updates ago.

    As each of n workers that pulled the same moves a statistic towards its batch's, together they
    would move it n times as far, and beyond: a variance below 0. So they share the way.
    """

    def added(x: jax.Array, y: jax.Array) -> jax.Array:
        if x.dtype == jnp.bool_:
            return y
        return x + (y / (1 + staleness) if jnp.issubdtype(x.dtype, jnp.inexact) else y).astype(
            x.dtype
        )

    return jax.tree.map(added, tree, more)


def averages_and_counts(change: PyTree) -> tuple[PyTree, PyTree]:
    """Splits a change into its floating-point leaves and its counters and flags.

    Args:
        change: A change as `difference` returns it.

    Returns:
        Two trees of the same structure, each with None in place of the other's leaves.
    """

    def part(floating: bool) -> PyTree:
        return jax.tree.map(
            lambda x: x if jnp.issubdtype(x.dtype, jnp.inexact) == floating else None, change
        )

    return part(True), part(False)


def rejoined(averages: PyTree, counts: PyTree) -> PyTree:
    """Joins the two trees that `averages_and_counts` returns."""
    return jax.tree.map(
        lambda x, y: y if x is None else x, averages, counts, is_leaf=lambda x: x is None
    )

"""Changes of the model state, and their combination over workers or replicas."""

from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


def difference(after: PyTree, before: PyTree) -> PyTree:
    """Returns the change of the model state by a batch, so that several changes can be combined.

    The change of a batch statistic is `new - old`. Counters and random key data are subtracted
    modulo their range. A flag is its new value.

    Args:
      after: The model state after the batch.
      before: The model state before it.
    """

    def change(x: jax.Array, y: jax.Array) -> jax.Array:
        if x.dtype == jnp.bool_:
            return x
        return jnp.where(x == y, jnp.zeros_like(x), x - y)  # a mask's infinities stay

    return jax.tree.map(change, after, before)


def with_difference(tree: PyTree, more: PyTree, staleness: jax.Array) -> PyTree:
    """Returns the model state with a change applied.

    If n workers pulled the same state, each moves a statistic toward its batch's value, and
    together they would move it n times as far: a variance could become negative. So the change of
    a floating-point leaf is divided by 1 + staleness.

    Args:
      tree: The current model state.
      more: The change, as `difference` returns it.
      staleness: Number of updates since the change was computed.
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
      change: A change, as `difference` returns it.

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

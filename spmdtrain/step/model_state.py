"""Changes of the model state, and their combination over workers or replicas."""

from typing import Any

import jax
import jax.numpy as jnp

from spmdtrain.step.reductions import accumulation_dtype

PyTree = Any


def difference(after: PyTree, before: PyTree) -> PyTree:
    """Returns the change of the model state by a batch, so that several changes can be combined.

    The change of a batch statistic is `new - old`. Counters and random key data are subtracted
    modulo their range. A flag is its new value.
    """

    def change(x: jax.Array, y: jax.Array) -> jax.Array:
        if x.dtype == jnp.bool_:
            return x
        return jnp.where(x == y, jnp.zeros_like(x), x - y)  # a mask's infinities stay

    return jax.tree.map(change, after, before)


def with_difference(tree: PyTree, more: PyTree, staleness: jax.Array) -> PyTree:
    """Returns the model state with a change applied, which `difference` has returned.

    If n workers pulled the same state, each moves a statistic toward its batch's value, and
    together they would move it n times as far: a variance could become negative. So the change of a
    floating-point leaf is divided by 1 + `staleness`, the number of updates since the change was
    computed.
    """

    def added(x: jax.Array, y: jax.Array) -> jax.Array:
        if x.dtype == jnp.bool_:
            return y
        return x + (y / (1 + staleness) if _is_float(x) else y).astype(x.dtype)

    return jax.tree.map(added, tree, more)


def parts_of_replica(after: PyTree, before: PyTree) -> tuple[PyTree, PyTree]:
    """Returns what a replica contributes to the model state after its rows of the batch.

    Returns:
      Two trees with the structure of the state. The first has (2, *shape) for a floating-point leaf
      of `shape`: its value, and 1 where it changed. Its arrays are added up over the replicas. The
      second has the changes of counters and flags, and the largest of the replicas' values counts.
      Each has None in place of the leaves of the other tree.
    """

    def floats(x: jax.Array, y: jax.Array) -> jax.Array | None:
        dtype = accumulation_dtype(x.dtype)
        return jnp.stack([x.astype(dtype), (x != y).astype(dtype)]) if _is_float(x) else None

    def counts(x: jax.Array, y: jax.Array) -> jax.Array | None:
        return None if _is_float(x) else difference(x, y)

    return jax.tree.map(floats, after, before), jax.tree.map(counts, after, before)


def of_replicas(before: PyTree, sums: PyTree, counts: PyTree, replicas: int) -> PyTree:
    """Returns the model state after a step of all replicas: the mean of what changed.

    What no replica changed keeps its bits. The values are averaged, because the mean of their
    changes would lose the digits of values that are much smaller than before. `sums` and `counts`
    are the sums and the maxima over the replicas of what `parts_of_replica` returns.
    """

    def leaf(x: jax.Array, found: jax.Array | None, change: jax.Array | None) -> jax.Array:
        if found is None:
            return with_difference(x, change, jnp.zeros((), jnp.float32))
        value, changed = found
        return jnp.where(changed != 0, value / replicas, x.astype(value.dtype)).astype(x.dtype)

    return jax.tree.map(leaf, before, sums, counts, is_leaf=lambda x: x is None)


def _is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)

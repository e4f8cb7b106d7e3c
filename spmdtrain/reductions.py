"""Gradients reduced by hand, under `shard_map`: an option beside XLA's own all-reduce."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any
Reduction = Callable[[PyTree, tuple[str, ...]], PyTree]
"""(gradients, axes) -> gradients: from each device's share of the gradients (the sum over its
examples, divided by the global batch size) to the sum over these mesh axes, the same on all
devices. Called under `shard_map`, so that `jax.lax.psum(x, axes)` is one."""


def all_reduce(gradients: PyTree, axes: tuple[str, ...]) -> PyTree:
    """The sum of each array over all devices."""
    return jax.lax.psum(gradients, axes)


def hierarchical(gradients: PyTree, axes: tuple[str, ...]) -> PyTree:
    """The same sums, with a fraction of the bytes over the axis `replica`.

    In three parts: scattered within each group, then each device's own part over the groups' slow
    links, then gathered within the group (tf.distribute's HierarchicalCopyAllReduce).
    """
    inner = tuple(axis for axis in axes if axis != "replica")
    parts = jax.lax.axis_size(inner)

    def reduce(x: jax.Array) -> jax.Array:
        flat = jnp.pad(x.ravel(), (0, -x.size % parts))
        part = jax.lax.psum_scatter(flat, inner, tiled=True)
        part = jax.lax.psum(part, "replica") if "replica" in axes else part
        return jax.lax.all_gather(part, inner, tiled=True)[: x.size].reshape(x.shape)

    return jax.tree.map(reduce, gradients)


NAMED = {"all_reduce": all_reduce, "hierarchical": hierarchical}


def in_dtype(reduction: Reduction, dtype: str) -> Reduction:
    """`reduction` with every array sent in `dtype`, and taken back to its own.

    The numbers of float16 end at 65504, and lose digits below 6e-5: there, all are first scaled by
    the power of two that brings the largest near the upper end.
    """

    def reduce(gradients: PyTree, axes: tuple[str, ...]) -> PyTree:
        scale = _scale(gradients, axes) if dtype == "float16" else 1.0
        sent = jax.tree.map(lambda x: (x * scale).astype(dtype), gradients)
        return jax.tree.map(
            lambda x, like: (x.astype(like.dtype) / scale).astype(like.dtype),
            reduction(sent, axes),
            gradients,
        )

    return reduce


def _scale(gradients: PyTree, axes: tuple[str, ...]) -> jax.Array:
    """A power of two by which no sum over the devices comes to more than 2**15."""
    largest = jnp.stack([jnp.abs(x).max() for x in jax.tree.leaves(gradients)]).max()
    bound = jax.lax.pmax(largest, axes) * jax.lax.axis_size(axes)
    usable = jnp.isfinite(bound) & (bound > 0)
    exponent = 15 - jnp.ceil(jnp.log2(jnp.where(usable, bound, 1.0)))
    return jnp.exp2(jnp.clip(exponent, -100, 100))

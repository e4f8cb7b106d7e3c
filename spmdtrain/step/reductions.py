"""Gradients reduced by hand, under `shard_map`: an option beside XLA's own all-reduce."""

import collections
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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


def one_device(gradients: PyTree, axes: tuple[str, ...]) -> PyTree:
    """Reduces to the first device along a binary tree, and broadcasts the sums back along it.

    This is tf.distribute's ReductionToOneDevice: 2 * ceil(log2(devices)) collective permutes of
    each array instead of an all-reduce.
    """
    size, index = jax.lax.axis_size(axes), jax.lax.axis_index(axes)
    strides = [2**power for power in range((size - 1).bit_length())]
    edges = {
        stride: [(n, n - stride) for n in range(stride, size, 2 * stride)] for stride in strides
    }

    def reduce(x: jax.Array) -> jax.Array:
        for stride in strides:  # a device that receives nothing adds zeros
            x = x + jax.lax.ppermute(x, axes, edges[stride])
        for stride in reversed(strides):
            back = [(to, sender) for sender, to in edges[stride]]
            received = jax.lax.ppermute(x, axes, back)
            x = jnp.where(index % (2 * stride) == stride, received, x)
        return x

    return jax.tree.map(reduce, gradients)


_WIDTH = 256
_ALONE = 2**19  # elements above which an array is worth a call of its own, and not worth a copy


def flattened(gradients: PyTree, axes: tuple[str, ...]) -> PyTree:
    """The same sums, of small arrays joined into one for each dtype.

    Gloo makes a call for each array, which takes a millisecond, however small that is. They are
    joined as rows of two dims: of one, XLA on CPU takes hundreds of times as long.
    """
    leaves, structure = jax.tree.flatten(gradients)
    groups = collections.defaultdict(list)
    for place, x in enumerate(leaves):
        if x.size <= _ALONE:
            groups[x.dtype].append(place)
        else:
            leaves[place] = jax.lax.psum(x, axes)
    for places in groups.values():
        rows = [_as_rows(leaves[place]) for place in places]
        # The barriers keep XLA from making one loop of the joining and what comes before or after.
        whole = jnp.concatenate(jax.lax.optimization_barrier(rows))
        whole = jax.lax.optimization_barrier(jax.lax.psum(whole, axes))
        ends = np.cumsum([len(part) for part in rows])
        for place, part in zip(places, jnp.split(whole, ends[:-1]), strict=True):
            like = leaves[place]
            leaves[place] = part.ravel()[: like.size].reshape(like.shape)
    return jax.tree.unflatten(structure, leaves)


def _as_rows(x: jax.Array) -> jax.Array:
    """Its elements as rows of `_WIDTH`, the last one filled up with zeros."""
    return jnp.pad(x.ravel(), (0, -x.size % _WIDTH)).reshape(-1, _WIDTH)


NAMED = {
    "all_reduce": all_reduce,
    "flattened": flattened,
    "hierarchical": hierarchical,
    "one_device": one_device,
}


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

"""Reductions of gradients under `shard_map`, as alternatives to XLA's own all-reduce."""

import collections
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any
Reduction = Callable[[PyTree, tuple[str, ...]], PyTree]
"""(gradients, axes) -> gradients, called under `shard_map`. The argument is each device's share of
the gradients (the sum over its examples, divided by the global batch size); the result is the sum
over these mesh axes, the same on all devices. `jax.lax.psum` is one."""


def all_reduce(gradients: PyTree, axes: tuple[str, ...]) -> PyTree:
    """Returns the sums of the arrays over the axes, by one all-reduce for each."""
    return jax.lax.psum(gradients, axes)


def scatter(x: jax.Array, axes: tuple[str, ...], *, dim: int) -> jax.Array:
    """Returns this device's part, along a dim, of the sum of an array over the axes.

    `axes` are in the order in which they split the dim.
    """
    return jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)


def hierarchical(gradients: PyTree, axes: tuple[str, ...]) -> PyTree:
    """Returns the sums of `all_reduce`, with a fraction of the bytes over the axis `replica`.

    Arrays are reduce-scattered within each group, which spans all axes but `replica`; then each
    device all-reduces its part over the slow links between the groups; then the parts are gathered
    within the group. This is tf.distribute's HierarchicalCopyAllReduce.
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
    """Returns the sums of `all_reduce`, reduced to the first device along a binary tree.

    The first device broadcasts them back. This is tf.distribute's ReductionToOneDevice: 2 *
    ceil(log2(devices)) collective permutes of each array instead of an all-reduce.
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


_WIDTH = 256  # elements of a row of `flattened`
_MAX_COPIED = 2**19  # elements above which a separate collective is cheaper than a copy
_MAX_GATHERED = 2**12  # elements up to which one collective is cheaper than two with fewer bytes


def flattened(gradients: PyTree, axes: tuple[str, ...]) -> PyTree:
    """Returns the sums of `all_reduce`, with small arrays concatenated into one for each dtype.

    Gloo makes a call for each array, which takes a millisecond even for a small one.
    """
    return _packed(lambda x: jax.lax.psum(x, axes), gradients)


def pairwise(gradients: PyTree, axes: tuple[str, ...]) -> PyTree:
    """Returns the sums of `all_reduce`, with bits that do not depend on the number of devices.

    The devices' shares are added up in the order of a binary tree. If each share is the sum of a
    subtree, the result is the sum of the whole tree. Each device adds up its part of every array,
    so as many bytes are sent as in a ring all-reduce. Small arrays, such as batch statistics, are
    gathered and added up on each device instead, by one collective. The number of devices is a
    power of two.
    """
    size = jax.lax.axis_size(axes)
    if size == 1:
        return gradients

    def reduce(x: jax.Array) -> jax.Array:
        if x.size <= _MAX_GATHERED:
            return tree_sum(jax.lax.all_gather(x, axes))
        flat = jnp.pad(x.ravel(), (0, -x.size % size)).reshape(size, -1)
        parts = jax.lax.all_to_all(flat, axes, 0, 0, tiled=True)
        whole = jax.lax.all_gather(tree_sum(parts), axes, tiled=True)
        return whole[: x.size].reshape(x.shape)

    is_alone = len(jax.tree.leaves(gradients)) == 1
    return jax.tree.map(reduce, gradients) if is_alone else _packed(reduce, gradients)


def tree_sum(x: jax.Array) -> jax.Array:
    """Returns the sum over the leading dim, a power of two, in the order of a binary tree."""
    while len(x) > 1:
        x = x[0::2] + x[1::2]
    return x[0]


def _packed(reduce: Callable[[jax.Array], jax.Array], tree: PyTree) -> PyTree:
    """Returns an elementwise reduction of large arrays, and of small ones concatenated by dtype.

    The arrays are concatenated as rows with two dims, because XLA on CPU takes hundreds of times as
    long with one.
    """
    leaves, structure = jax.tree.flatten(tree)
    groups = collections.defaultdict(list)
    for place, x in enumerate(leaves):
        if x.size <= _MAX_COPIED:
            groups[x.dtype].append(place)
        else:
            leaves[place] = reduce(x)
    for places in groups.values():
        rows = [_as_rows(leaves[place]) for place in places]
        # The barriers keep XLA from fusing the concatenation with the code before and after it.
        whole = jnp.concatenate(jax.lax.optimization_barrier(rows))
        whole = jax.lax.optimization_barrier(reduce(whole))
        ends = np.cumsum([len(part) for part in rows])
        for place, part in zip(places, jnp.split(whole, ends[:-1]), strict=True):
            like = leaves[place]
            leaves[place] = part.ravel()[: like.size].reshape(like.shape)
    return jax.tree.unflatten(structure, leaves)


def _as_rows(x: jax.Array) -> jax.Array:
    """Returns the elements as rows of `_WIDTH`, the last one padded with zeros."""
    return jnp.pad(x.ravel(), (0, -x.size % _WIDTH)).reshape(-1, _WIDTH)


NAMED = {
    "all_reduce": all_reduce,
    "flattened": flattened,
    "hierarchical": hierarchical,
    "one_device": one_device,
}


def in_dtype(reduction: Reduction, dtype: str) -> Reduction:
    """Returns `reduction` with arrays cast to `dtype` for the transfer, and cast back.

    The range of float16 ends at 65504, and its precision falls below 6e-5. So arrays are scaled for
    float16 by the power of two that brings the largest value near the upper end.
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
    """Returns a power of two with which no sum over the devices exceeds 2**15."""
    largest = jnp.stack([jnp.abs(x).max() for x in jax.tree.leaves(gradients)]).max()
    bound = jax.lax.pmax(largest, axes) * jax.lax.axis_size(axes)
    usable = jnp.isfinite(bound) & (bound > 0)
    exponent = 15 - jnp.ceil(jnp.log2(jnp.where(usable, bound, 1.0)))
    return jnp.exp2(jnp.clip(exponent, -100, 100))


def scale_arrays(gradients: PyTree, by: jax.Array | float) -> PyTree:
    """Returns arrays times a number, in their dtypes; 16-bit arrays are multiplied in f32."""
    return jax.tree.map(
        lambda x: (x.astype(accumulation_dtype(x.dtype)) * by).astype(x.dtype), gradients
    )


def accumulation_dtype(dtype: Any) -> Any:
    """Returns the dtype in which values of `dtype` are added up: at least float32."""
    narrow = jnp.issubdtype(dtype, jnp.inexact) and jnp.dtype(dtype).itemsize < 4
    return jnp.float32 if narrow else dtype

"""Attention over a sequence whose tokens are split over the mesh axis "context"."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from spmdtrain.config.options import ContextMethod
from spmdtrain.errors import UserError
from spmdtrain.kernels.attention_blocks import Pattern, Tokens, attend, attend_backward
from spmdtrain.kernels.over_devices import (
    LocalAttention,
    attention_over_devices,
    heads_of_device,
)
from spmdtrain.kernels.ring_attention import make_ring, ring_attention
from spmdtrain.sharding.placement import CurrentMesh
from spmdtrain.xla.chips import chip_of

PyTree = Any
CONTEXT = "context"
"""The mesh axis that splits the tokens."""


# Time of attention by XLA relative to that of a kernel: for Llama 3.1 8B with 131,072 tokens on
# v5p:4x4x4 a plan has 39 s for the ring of a step, and 10.5 s for splash. cuDNN was not measured.
_XLA_SLOWNESS = 3.7


def choose_context_method(
    device: Any,
    query: jax.Array,
    key: jax.Array,
    window: int | None,
    over: CurrentMesh,
    *,
    causal: bool,
    has_kernel: bool,
) -> ContextMethod:
    """Returns the method that is expected to be the fastest, by peak rates.

    A ring sends the keys and values of a device in the time of the products with them, if a device
    has enough tokens; with a window it has few turns. "ulysses" waits for all that it sends. But
    this takes less time than the waits of a ring if a device has few tokens, or than the time that
    a ring loses because it computes by XLA.

    `has_kernel` tells whether a device computes whole sequences, as "ulysses" does, with a kernel.
    Shapes are as in `attention`.
    """
    size, chip = over.sizes[CONTEXT], chip_of(device.device_kind)
    if window is not None or chip is None or chip.name == "cpu":
        return "ring"
    tokens = query.shape[1] // size
    width = query.shape[3] * query.dtype.itemsize
    heads, kv_heads = heads_of_device(query.shape[2], key.shape[2], over)
    if heads % size:
        return "ring"
    # Seconds for one row of the batch. Half of the products of a causal ring are not computed.
    products = (2 if causal else 4) * tokens**2 * heads * query.shape[3] / chip.flops
    in_ring = products * (_XLA_SLOWNESS if has_kernel else 1)
    turn = 2 * tokens * kv_heads * width / chip.link
    ring = size * in_ring + (size - 1) * max(0.0, turn - in_ring)
    exchanged = 2 * tokens * (heads + math.lcm(kv_heads, size)) * width * (size - 1) / size
    return "ring" if ring <= size * products + exchanged / chip.link else "ulysses"


def context_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None,
    *,
    method: ContextMethod,
    pattern: Pattern,
    over: CurrentMesh,
    name: str,
    whole: Callable[..., jax.Array],
) -> jax.Array:
    """Returns attention's output, (B, T, heads, head width), split over "context".

    The shapes are as in `attention`.

    Args:
      method: "ring": keys and values go around the devices. "gather": each device gathers the keys
        and values of all tokens. "ulysses": each device gathers all tokens of some of the heads.
      name: Name of the output for `jax.checkpoint` policies.
      whole: Maps (query, key, value, segments=...) of whole sequences on one device to the output,
        for "ulysses".

    Raises:
      UserError: If the tokens, or the heads with "ulysses", do not divide.
    """
    size, tokens = over.sizes[CONTEXT], query.shape[1]
    if key.shape[1] != tokens:
        raise UserError(
            f"attention: {tokens} queries and {key.shape[1]} keys: over mesh.context={size} a "
            "sequence must attend to itself"
        )
    if tokens % (2 * size):
        raise UserError(
            f"attention: {tokens} tokens do not divide over mesh.context={size}: their number must "
            f"be a multiple of {2 * size}"
        )
    local: LocalAttention
    if method == "ring":
        ring = make_ring(CONTEXT, size, tokens, pattern, name)
        local = partial(ring_attention, ring=ring)
    elif method == "gather":

        def local(
            query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None
        ) -> jax.Array:
            return _mix(query, key, value, segments, pattern, name)

    else:
        heads, _ = heads_of_device(query.shape[2], key.shape[2], over)
        if heads % size:
            raise UserError(
                f"context.method ulysses: {heads} heads on each device do not divide over "
                f"mesh.context={size}: use ring, which does not split the heads"
            )
        local = partial(_ulysses, whole=whole, size=size)
    return attention_over_devices(local, query, key, value, segments, over, tokens=CONTEXT)


def _all(x: PyTree) -> PyTree:
    """Returns the arrays (B, T, ...) of all tokens."""
    return jax.tree.map(lambda x: jax.lax.all_gather(x, CONTEXT, axis=1, tiled=True), x)


# -- all to all ------------------------------------------------------------------------------------


def _ulysses(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None,
    *,
    whole: Callable[..., jax.Array],
    size: int,
) -> jax.Array:
    """Exchanges tokens for heads and back (Jacobs et al. 2023, arXiv:2309.14509)."""
    heads = key.shape[2]
    copies = math.lcm(heads, size) // heads  # of key-value heads that several devices need
    key, value = (jnp.repeat(x, copies, axis=2) for x in (key, value))
    query, key, value = (
        jax.lax.all_to_all(x, CONTEXT, split_axis=2, concat_axis=1, tiled=True)
        for x in (query, key, value)
    )
    mixed = whole(query, key, value, segments=_all(segments))
    return jax.lax.all_to_all(mixed, CONTEXT, split_axis=1, concat_axis=2, tiled=True)


# -- gathered keys and values ----------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _mix(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None,
    pattern: Pattern,
    name: str,
) -> jax.Array:
    return _mix_forward(query, key, value, segments, pattern, name)[0]


def _places(query: jax.Array, segments: jax.Array | None) -> tuple[Tokens, Tokens]:
    """Returns the places of this device's tokens and of all tokens."""
    length = query.shape[1]
    start = jax.lax.axis_index(CONTEXT) * length
    everywhere = jnp.arange(length * jax.lax.axis_size(CONTEXT), dtype=jnp.int32)
    return Tokens(start + jnp.arange(length, dtype=jnp.int32), segments), Tokens(
        everywhere, _all(segments)
    )


def _mix_forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None,
    pattern: Pattern,
    name: str,
) -> tuple[jax.Array, PyTree]:
    (all_keys, all_values), (of, to) = _all((key, value)), _places(query, segments)
    mixed = attend(query, all_keys, all_values, of, to, pattern, every=pattern.is_full)
    values = checkpoint_name(mixed.values.astype(query.dtype), name)
    logsumexp = checkpoint_name(mixed.logsumexp, name)
    return values, (query, key, value, segments, values, logsumexp)


def _mix_backward(pattern: Pattern, name: str, residuals: PyTree, gradient: jax.Array) -> PyTree:
    del name
    # Keys and values are gathered again, so that none of another device is kept meanwhile.
    query, key, value, segments, values, logsumexp = residuals
    (all_keys, all_values), (of, to) = _all((key, value)), _places(query, segments)
    d_query, *others = attend_backward(
        query,
        all_keys,
        all_values,
        of,
        to,
        pattern,
        every=pattern.is_full,
        logsumexp=logsumexp,
        gradient=gradient,
        inner=(values.astype(jnp.float32) * gradient.astype(jnp.float32)).sum(-1),
    )
    d_key, d_value = (
        jax.lax.psum_scatter(x, CONTEXT, scatter_dimension=1, tiled=True).astype(key.dtype)
        for x in others
    )
    return d_query.astype(query.dtype), d_key, d_value, None


_mix.defvjp(_mix_forward, _mix_backward)

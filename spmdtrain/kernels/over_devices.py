"""Attention on each device's part of a batch, of the tokens and of the heads."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from spmdtrain.sharding.mesh import BATCH_AXES
from spmdtrain.sharding.placement import CurrentMesh

LocalAttention = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None], jax.Array]


def heads_of_device(heads: int, kv_heads: int, over: CurrentMesh) -> tuple[int, int]:
    """Returns the numbers of heads and of key-value heads that a device computes."""
    parts = over.parts("tensor")
    if parts % kv_heads == 0 and heads % parts == 0:
        return heads // parts, 1  # which several devices share
    return (heads, kv_heads) if kv_heads % parts else (heads // parts, kv_heads // parts)


def attention_over_devices(
    local: LocalAttention,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None,
    over: CurrentMesh,
    *,
    tokens: str | None = None,
) -> jax.Array:
    """Returns attention's output, (B, T, heads, head width): each device computes its part.

    The batch is split over the batch axes and the heads over "tensor". What does not divide over
    the devices is computed by each of them. The shapes are as in `attention`.

    Args:
      local: Maps a device's parts of the arrays to its part of the result.
      tokens: The axis that splits the tokens, whose number it divides; None for whole sequences.
    """
    if not over.free:
        return local(query, key, value, segments)
    parts, (kept, kept_kv) = (
        over.parts("tensor"),
        heads_of_device(query.shape[2], key.shape[2], over),
    )
    splits = kept < query.shape[2]
    if splits and kept_kv * parts > key.shape[2]:
        # Each device has query heads of a single key-value head, which several devices share.
        key, value = (jnp.repeat(x, parts // x.shape[2], axis=2) for x in (key, value))
    axes = tuple(axis for axis in BATCH_AXES if axis in over.free)
    rows = axes if axes and len(query) % over.parts(*axes) == 0 else None
    split = PartitionSpec(rows, tokens, "tensor" if splits else None, None)
    # Without the check of varying axes, which kernels do not support.
    mapped = jax.shard_map(
        local,
        mesh=over.mesh,
        in_specs=(split, split, split, PartitionSpec(rows, tokens)),
        out_specs=split,
        axis_names=set(over.free),
        check_vma=False,
    )
    return mapped(query, key, value, segments)

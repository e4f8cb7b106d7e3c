"""Attention of new tokens to cached keys and values."""

from typing import Any

import jax
import jax.numpy as jnp

from spmdtrain.sharding.placement import constrain_sharding


def cache_array(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Returns zeros for keys or values: the batch split over devices, the heads over "tensor".

    Args:
      shape: (..., B, heads, length, head width).
      dtype: Of the keys or values.
    """
    layers = [None] * (len(shape) - 4)
    return constrain_sharding(jnp.zeros(shape, dtype), *layers, "batch", "tensor", None, None)


def attend_to_cache(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cached: tuple[jax.Array, jax.Array],
    positions: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Returns each head's mixed values (B, T, heads, head width), and the extended cache.

    A token attends to positions up to and including its own.

    Args:
      query: (B, T, heads, head width), of the new tokens.
      key: (B, T, key-value heads, head width), written to the cache. Each key-value head is shared
        by the same number of consecutive query heads.
      value: As `key`.
      cached: Keys and values (B, key-value heads, length, head width).
      positions: int (B, T), the positions in the cache: T consecutive ones in each row.
    """

    @jax.vmap
    def put(row: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
        first = jnp.zeros_like(start)  # of the same dtype, which `jnp.int64` may not be
        return jax.lax.dynamic_update_slice(row, new, (first, start, first))

    query, key, value = (jnp.swapaxes(part, 1, 2) for part in (query, key, value))
    keys, values = (
        constrain_sharding(put(old, new, positions[:, 0]), "batch", "tensor", None, None)
        for old, new in zip(cached, (key, value), strict=True)
    )
    rows, heads, count, width = query.shape
    query = query.reshape(rows, keys.shape[1], -1, count, width)
    # The heads come before the positions: `jax.nn.dot_product_attention` takes the other order,
    # and would transpose the whole cache for each token.
    scores = jnp.einsum("bngth,bnlh->bngtl", query, keys, preferred_element_type=jnp.float32)
    everywhere = jnp.arange(keys.shape[2], dtype=positions.dtype)
    seen = everywhere[None, None] <= positions[..., None]
    scores = jnp.where(seen[:, None, None], scores * width**-0.5, -jnp.inf)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    mixed = jnp.einsum("bngtl,bnlh->btngh", probabilities, values)
    return mixed.reshape(rows, count, heads, width), (keys, values)

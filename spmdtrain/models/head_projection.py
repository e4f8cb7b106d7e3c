"""Projections of tokens to the heads of attention, in the order that is fastest on the device."""

import jax
import jax.numpy as jnp

from spmdtrain.sharding.placement import constrain_sharding, current_device


def project_heads(x: jax.Array, kernel: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Returns queries, keys or values, (B, T, heads, head width).

    Args:
      x: (B, T, width).
      kernel: (width, heads, head width).
      bias: (heads, head width) or None.
    """
    if not _heads_come_first():
        heads = jnp.einsum("btd,dnh->btnh", x, kernel)
        heads = heads if bias is None else heads + bias
        return constrain_sharding(heads, "batch", "context", "tensor", None)
    heads = jnp.einsum("btd,dnh->bnth", x, kernel)
    heads = heads if bias is None else heads + bias[:, None]
    return jnp.swapaxes(constrain_sharding(heads, "batch", "tensor", "context", None), 1, 2)


def project_qkv(
    x: jax.Array, kernel: jax.Array, bias: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns queries, keys and values, each (B, T, heads, head width).

    Args:
      x: (B, T, width).
      kernel: (width, 3, heads, head width).
      bias: (3, heads, head width) or None.
    """
    if _heads_come_first():
        query, key, value = (
            project_heads(x, kernel[:, i], None if bias is None else bias[i]) for i in range(3)
        )
        return query, key, value
    # In the order of the product, because another order would be a copy.
    qkv = jnp.einsum("btd,dcnh->btcnh", x, kernel)
    if bias is not None:
        qkv += bias
    qkv = constrain_sharding(qkv, "batch", "context", None, "tensor", None)
    # The gradient of a split is one concatenation; that of three slices pads and adds three times.
    query, key, value = (part[:, :, 0] for part in jax.lax.split(qkv, (1, 1, 1), axis=2))
    return query, key, value


def _heads_come_first() -> bool:
    """Returns whether each head's tokens are adjacent: the order of the TPU's attention kernel.

    There each array is the result of a product of its own, because a part of a larger one would be
    copied before the kernel reads it.
    """
    return current_device().platform == "tpu"

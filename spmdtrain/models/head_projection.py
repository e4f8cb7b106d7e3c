"""Projections of tokens to the heads of attention, in the order that is fastest on the device."""

from typing import Any

import jax
import jax.numpy as jnp

from spmdtrain.sharding.placement import constrain_sharding, current_device, current_mesh


def project_heads(x: jax.Array, kernel: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Returns queries, keys or values, (B, T, heads, head width).

    Args:
      x: (B, T, width).
      kernel: (width, heads, head width).
      bias: (heads, head width) or None.
    """
    if not _heads_come_first():
        heads = jnp.einsum("btd,dnh->btnh", x, kernel)
        heads = heads if bias is None else heads + bias[None, None]
        return constrain_sharding(heads, "batch", "context", "tensor", None)
    heads = jnp.einsum("btd,dnh->bnth", x, kernel)
    heads = heads if bias is None else heads + bias[None, :, None]
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
    if _uses_three_products():
        projected = _three_products(x, kernel)
        if bias is not None:
            projected = tuple(part + bias[i][None, None] for i, part in enumerate(projected))
        query, key, value = (
            constrain_sharding(part, "batch", "context", "tensor", None) for part in projected
        )
        return query, key, value
    # In the order of the product, because another order would be a copy.
    qkv = jnp.einsum("btd,dcnh->btcnh", x, kernel)
    if bias is not None:
        qkv += bias[None, None]
    return _split(constrain_sharding(qkv, "batch", "context", None, "tensor", None))


def _split(qkv: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the parts of an array (B, T, 3, heads, head width), each without the third dim."""
    # The gradient of a split is one concatenation; that of three slices pads and adds three times.
    query, key, value = (part[:, :, 0] for part in jax.lax.split(qkv, (1, 1, 1), axis=2))
    return query, key, value


def _uses_three_products() -> bool:
    """Returns whether `_three_products` is used: on GPUs, unless heads are split over devices.

    With split heads, the tokens of `x` would be gathered for each of the three products.
    """
    over = current_mesh()
    return current_device().platform == "gpu" and over is not None and over.parts("tensor") == 1


@jax.custom_jvp
def _three_products(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, ...]:
    """Returns queries, keys and values from three separate products, without a bias.

    cuDNN's attention reads arrays that are contiguous, so parts of the result of one product would
    be copied.
    """
    projected = []
    for i in range(3):
        projected.append(jnp.einsum("btd,dnh->btnh", x, kernel[:, i]))
        x = jax.lax.optimization_barrier(x)  # XLA computes products of the same array as one
    return tuple(projected)


@_three_products.defjvp
def _three_products_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    (x, kernel), (x_change, kernel_change) = primals, tangents
    # One product each, because the gradient of `x` would otherwise be the sum of three results.
    change = jnp.einsum("btd,dcnh->btcnh", x_change, kernel)
    change += jnp.einsum("btd,dcnh->btcnh", x, kernel_change)
    return _three_products(x, kernel), _split(change)


def _heads_come_first() -> bool:
    """Returns whether each head's tokens are adjacent: the order of the TPU's attention kernel.

    Each array is then the result of a separate product, because a part of a larger one would be
    copied before the kernel reads it.
    """
    return current_device().platform == "tpu"

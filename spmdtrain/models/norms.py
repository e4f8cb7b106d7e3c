"""Normalization of the last dim, computed in f32 for any dtype."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """Returns values divided by their root mean square, scaled (arXiv:1910.07467).

    Args:
      x: (..., width).
      scale: (width,).
      epsilon: Added to the mean square.
    """
    return _scaled(x.astype(jnp.float32), scale, epsilon).astype(x.dtype)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float) -> jax.Array:
    """Returns values of mean 0 and variance 1, scaled and shifted (arXiv:1607.06450).

    Args:
      x: (..., width).
      scale: (width,).
      bias: (width,).
      epsilon: Added to the variance.
    """
    wide = x.astype(jnp.float32)
    normal = _scaled(wide - wide.mean(axis=-1, keepdims=True), scale, epsilon)
    return (normal + jax.lax.broadcast_to_rank(bias.astype(jnp.float32), x.ndim)).astype(x.dtype)


def _scaled(wide: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    scale = jax.lax.broadcast_to_rank(scale.astype(jnp.float32), wide.ndim)
    return wide * jax.lax.rsqrt(mean_square + epsilon) * scale

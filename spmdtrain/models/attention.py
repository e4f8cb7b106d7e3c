"""Attention within a sequence, and rotary positions, for the shipped models."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from spmdtrain.sharding.placement import current_device

Rotation = Callable[[jax.Array], jax.Array]
"""Rotates queries or keys (B, T, heads, head width) by the positions of their tokens."""


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None = None,
    *,
    causal: bool = True,
) -> jax.Array:
    """Returns what the heads mix, (B, T, heads, head width).

    Args:
      query: (B, T, heads, head width).
      key: (B, T, key-value heads, head width), as `value`. Each head is shared by as many
        consecutive query heads (grouped-query attention, Ainslie et al. 2023, arXiv:2305.13245).
      value: Mixed by the softmax of the scaled products of queries and keys.
      segments: int (B, T), the number of each token's document within its row: a token attends to
        its own document only. None for one document in each row.
      causal: Whether a token attends to positions up to its own only.
    """
    mask = None if segments is None else segments[:, None, :, None] == segments[:, None, None]
    masked = None if mask is None else query.shape[1]
    fused = is_fused(current_device(), query.dtype, value.shape[-1], masked)
    return jax.nn.dot_product_attention(
        query, key, value, mask=mask, is_causal=causal, implementation="cudnn" if fused else "xla"
    )


def is_fused(device: Any, dtype: Any, head_width: int, masked_length: int | None = None) -> bool:
    """Returns whether cuDNN's fused attention supports this case.

    It needs 16 bits and an NVIDIA GPU since Ampere. It takes a mask as a bias, for which the number
    of tokens must be even in training. JAX raises an error for unsupported cases, and uses XLA's
    attention by default.

    Args:
      device: The device.
      dtype: The dtype of queries, keys and values.
      head_width: The width of each head.
      masked_length: Number of tokens, if attention has a mask.
    """
    # "9.0" on an NVIDIA GPU, another form on AMD's, missing on other devices.
    major = str(getattr(device, "compute_capability", "")).split(".")[0]
    sixteen_bits = dtype in (jnp.bfloat16, jnp.float16)
    fits = head_width % 8 == 0 and head_width <= 128 and (masked_length or 0) % 2 == 0
    return sixteen_bits and fits and major.isdecimal() and int(major) >= 8


def rotary_speeds(width: int, base: float) -> jax.Array:
    """Returns the radians by which each pair of values turns from a token to the next.

    Args:
      width: Width of a head, an even number.
      base: The speeds fall from 1 to nearly 1 / base.

    Returns:
      f32 (width / 2,).
    """
    half = width // 2
    return jnp.exp(-math.log(base) / half * jnp.arange(half))


def rotation(positions: int | jax.Array, speeds: jax.Array) -> Rotation:
    """Returns a function that rotates (B, T, heads, width) by each token's position.

    The product of a query and a key then depends on their distance, not on their positions (rotary
    position embedding, Su et al. 2021, arXiv:2104.09864). A pair has one value of each half.

    Args:
      positions: Each token's position, int (B, T); or the number of tokens T, for positions from 0
        to T - 1.
      speeds: f32 (width / 2,), radians from a token to the next.
    """
    if isinstance(positions, int):
        positions = jnp.arange(positions)
    angles = (positions[..., None] * speeds)[..., None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)

    def turn(x: jax.Array) -> jax.Array:
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        turned = jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)
        return turned.astype(x.dtype)

    return turn

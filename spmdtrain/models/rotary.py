"""Rotary positions, for the shipped models."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

Rotation = Callable[[jax.Array], jax.Array]
"""Rotates queries or keys (B, T, heads, head width) by the positions of their tokens."""


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

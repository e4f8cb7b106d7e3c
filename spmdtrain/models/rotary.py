"""Rotary positions, for the shipped models."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmdtrain.kernels.reference import optimized_implementation, uses_reference
from spmdtrain.sharding.placement import current_device

Rotation = Callable[[jax.Array], jax.Array]
"""Rotates queries or keys (B, T, heads, head width) by the positions of their tokens."""

_MAX_TABLE = 2**20  # elements of a table that is a constant of the program


def rotary_speeds(width: int, base: float) -> np.ndarray:
    """Returns the radians by which each pair of values turns from a token to the next.

    Args:
      width: Width of a head, an even number.
      base: The speeds fall from 1 to nearly 1 / base.

    Returns:
      f64 (width / 2,).
    """
    speeds: np.ndarray = float(base) ** (-np.arange(0, width, 2) / width)
    return speeds


def rotation(positions: int | jax.Array, speeds: np.ndarray) -> Rotation:
    """Returns a function that rotates (B, T, heads, width) by each token's position.

    The product of a query and a key then depends on their distance, not on their positions (rotary
    position embedding, Su et al. 2021, arXiv:2104.09864). A pair has one value of each half of the
    head. In bfloat16 on TPUs the rotation has no forward-mode derivatives (`jax.jvp`).

    Args:
      positions: Each token's position, int (B, T); or the number of tokens T, for positions from 0
        to T - 1.
      speeds: (width / 2,), radians from a token to the next, used as f32.
    """
    cos, sin = _tables(positions, speeds.astype(np.float32))
    on_tpu = current_device().platform == "tpu" and not uses_reference()
    join = np.concatenate if isinstance(cos, np.ndarray) else jnp.concatenate
    of_halves = (join((cos, cos), axis=-1), join((-sin, sin), axis=-1)) if on_tpu else None

    def turn(x: jax.Array) -> jax.Array:
        # A TPU rounds the factors of a product to bfloat16, so those of other dtypes would change.
        if of_halves is not None and x.dtype == jnp.bfloat16:
            return _turn_with_swap(x, *of_halves)
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        turned = jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)
        return turned.astype(x.dtype)

    return turn


@jax.custom_vjp
def _turn_with_swap(x: jax.Array, cos: Any, sin: Any) -> jax.Array:
    """Returns `x` rotated, with its halves swapped by a product.

    A TPU's vector unit works on 128 adjacent values, so it needs as long for half of a head as for
    a whole one, and longer to join two halves. A product with a permutation matrix swaps the
    halves in the matrix unit, and XLA computes all of the rotation in the pass of this product.

    Args:
      x: bf16 (B, T, heads, width).
      cos: f32 (B or 1, T, 1, width), the cosine of each value's angle.
      sin: f32, the same shape, the sine, negative in the first half.
    """
    half = x.shape[-1] // 2
    swap = jnp.asarray(np.roll(np.eye(2 * half), half, axis=0), x.dtype)
    with optimized_implementation():
        swapped = jnp.einsum("btnh,hk->btnk", x, swap, preferred_element_type=jnp.float32)
    return (x.astype(jnp.float32) * cos + swapped * sin).astype(x.dtype)


def _turn_forward(x: jax.Array, cos: Any, sin: Any) -> tuple[jax.Array, tuple[Any, Any]]:
    return _turn_with_swap(x, cos, sin), (cos, sin)


def _turn_backward(kept: tuple[Any, Any], gradient: jax.Array) -> tuple[jax.Array, None, None]:
    # Rotated by the negative angle: the transposed product would round to bfloat16 before the sum.
    cos, sin = kept
    return _turn_with_swap(gradient, cos, -sin), None, None


_turn_with_swap.defvjp(_turn_forward, _turn_backward)


def _tables(positions: int | jax.Array, speeds: np.ndarray) -> tuple[Any, Any]:
    """Returns the cosines and sines of the angles, f32 (B or 1, T, 1, width / 2).

    For a known number of positions they are constants. XLA:CPU would compute them again in each
    operation that uses them, which took a twentieth of a small transformer's step.
    """
    if not isinstance(positions, int):
        angles = positions[..., None, None].astype(jnp.float32) * speeds[None, None, None]
        return jnp.cos(angles), jnp.sin(angles)
    if positions * speeds.size > _MAX_TABLE:
        return _tables(jnp.arange(positions)[None], speeds)
    known = np.arange(positions, dtype=np.float32)[None, :, None, None] * speeds
    # In f64: NumPy's f32 functions have other bits on other processors, and f64 ones hardly ever
    # after they are rounded.
    angles = known.astype(np.float64)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

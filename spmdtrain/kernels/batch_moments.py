"""Mean and variance of each channel over the global batch, by one collective."""

import jax
import jax.numpy as jnp

from spmdtrain.sharding.placement import (
    constrain_sharding,
    current_batch_axis,
    current_batch_shards,
)


def moments(x: jax.Array, near: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns mean and variance of each channel over the global batch, two arrays (C,).

    Args:
      x: Values (B, ..., C), B split over the replicas. Where `current_batch_axis` names the axis of
        the parts of the batch, the values of one part.
      near: (C,), constants near the means, such as their running averages.
    """
    if (axis := current_batch_axis()) is not None:
        return _moments_over(axis, x, near)
    parts = current_batch_shards()
    return _moments_of(1 if len(x) % parts else parts, x)


def _moments_of(parts: int, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Combines variances of parts to the variance of all rows (Chan, Golub and LeVeque 1983)."""
    rows = x.reshape(parts, len(x) // parts, *x.shape[1:])
    dims = tuple(range(1, rows.ndim - 1))
    means = rows.mean(dims, keepdims=True)
    variances = jnp.square(rows - means).mean(dims)
    both = jnp.stack([means.reshape(variances.shape), variances])
    means, variances = constrain_sharding(both, None, None, None)
    mean = means.mean(0)
    return mean, (variances + jnp.square(means - mean)).mean(0)


def _moments_over(axis: str, x: jax.Array, near: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns mean and variance by one mean over a named axis."""
    # Squares of differences from `near` lose no precision if values are far from 0.
    dims, shifted = tuple(range(x.ndim - 1)), x - near
    both = jnp.stack([shifted.mean(dims), jnp.square(shifted).mean(dims)])
    mean, square = jax.lax.pmean(both, axis)
    return near + mean, jnp.maximum(square - jnp.square(mean), 0.0)

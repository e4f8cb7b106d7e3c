"""Parts that the kernels share: reference implementations, varying axes, batch moments."""

from contextlib import AbstractContextManager
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from spmdtrain.sharding.placement import (
    constrain_sharding,
    current_batch_axis,
    current_batch_shards,
)

# -- The context in which every operation of this folder uses its reference implementation ---------

OPTIMIZED = "optimized_implementation"
"""Name of the scope of `optimized_implementation`."""

# A context of JAX, so that a trace cached with kernels is not reused without them.
_reference = jax.make_user_context(default_value=False)


def reference_kernels() -> AbstractContextManager[None]:
    """Returns a context in which operations are traced as plain JAX, without kernels.

    The products of the trace are those of the model's mathematics, which an implementation may
    compute more than once, or skip.
    """
    return _reference(True)


def uses_reference() -> bool:
    """Returns whether the context is active."""
    return bool(_reference.value)


def optimized_implementation() -> AbstractContextManager[None]:
    """Returns the scope of plain JAX code whose products are not those of the reference.

    Its trace shows that products have to be counted in a trace of the reference. Kernels need no
    scope, because a trace shows them.
    """
    return jax.named_scope(OPTIMIZED)


# -- Axes over which arrays vary in a `jax.shard_map` of the user, which JAX checks by default -----

Arrays = TypeVar("Arrays")


def varying_alike(arrays: Arrays) -> Arrays:
    """Returns arrays that vary over the same manual axes: all those over which one of them varies.

    The backward pass of a `jax.custom_vjp` must return gradients that vary like its arguments, and
    the gradient of parameters that devices share varies like the tokens. JAX adds up the gradients
    of what is cast here. Outside of a `jax.shard_map` with `check_vma` nothing is cast.
    """
    axes = frozenset[Any]().union(*map(_axes, jax.tree.leaves(arrays)))

    def cast(x: Any) -> Any:
        missing = sorted(axes - _axes(x))
        return jax.lax.pcast(x, tuple(missing), to="varying") if missing else x

    return jax.tree.map(cast, arrays)


def _axes(x: Any) -> frozenset[Any]:
    axes: frozenset[Any] = jax.typeof(x).manual_axis_type.varying
    return axes


# -- Mean and variance of each channel over the global batch, by one collective --------------------


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

"""Axes over which arrays vary in a `jax.shard_map` of the user, which JAX checks by default."""

from typing import Any, TypeVar

import jax

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

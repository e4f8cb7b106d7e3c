"""Explicit gathers of split parameters under `shard_map`; their gradients are reduce-scattered."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

PyTree = Any
SplitDims = tuple[tuple[int, tuple[str, ...]], ...]
"""Pairs of a dim, counted from the end, and the mesh axes that split it."""
Scatter = Callable[[jax.Array, SplitDims], jax.Array]
"""(array, split dims) -> this device's part of the sum of the arrays of all these axes."""


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gather_array(split: SplitDims, scatter: Scatter, part: jax.Array) -> jax.Array:
    """Gathers an array from the devices' parts. `scatter` scatters its gradient.

    `scatter` adds up the devices' gradients, and leaves each device its own part of the sum.
    """
    return _all_gather(split, part)


def _all_gather(split: SplitDims, part: jax.Array) -> jax.Array:
    for dim, axes in split:
        part = jax.lax.all_gather(part, axes, axis=part.ndim + dim, tiled=True)
    return part


def _gather_forward(split: SplitDims, scatter: Scatter, part: jax.Array) -> tuple[jax.Array, None]:
    # Not by `gather_array`, so that `remat_gathers` sees the primitive that gathers.
    return _all_gather(split, part), None


def _gather_backward(
    split: SplitDims, scatter: Scatter, _: None, gradient: jax.Array
) -> tuple[jax.Array]:
    return (scatter(gradient, split),)


gather_array.defvjp(_gather_forward, _gather_backward)


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class ShardedWeight:
    """A device's part of an array that is not gathered yet. A loop over its first dim slices it."""

    part: Any
    gather: Callable[[jax.Array], jax.Array]

    def tree_flatten(self) -> tuple[tuple[Any], Callable[[jax.Array], jax.Array]]:
        return (self.part,), self.gather

    @classmethod
    def tree_unflatten(
        cls, gather: Callable[[jax.Array], jax.Array], parts: tuple[Any]
    ) -> "ShardedWeight":
        return cls(parts[0], gather)


class ParamGathers:
    """The gathers of one computation of the objective on each device's parts of the parameters.

    A stacked parameter is gathered as a whole, and so the model sees a plain array. If a loop over
    layers uses this very array (`as_shards`), it takes the parts instead and gathers one layer at
    a time. The gather of the whole then has no use, and does not get into the program.

    Args:
      scatter: Scatters the gradients. None if the parameters are whole, to record their use only.

    Attributes:
      in_loop: The names of the parameters that loops over layers have used.
    """

    def __init__(self, scatter: Scatter | None) -> None:
        self._scatter = scatter
        self._stacked: dict[int, tuple[jax.Array, str, ShardedWeight]] = {}
        self.in_loop: set[str] = set()

    def gather(self, name: str, part: jax.Array, split: SplitDims, *, stacked: bool) -> jax.Array:
        """Returns a parameter gathered from the devices' parts.

        If it is `stacked`, its first dim counts layers, which a loop may gather one at a time.
        """
        gather = _identity if self._scatter is None else partial(gather_array, split, self._scatter)
        whole: jax.Array = gather(part)
        if stacked:  # the reference to the array keeps its id from being used again
            self._stacked[id(whole)] = (whole, name, ShardedWeight(part, gather))
        return whole

    def as_shards(self, weights: PyTree) -> PyTree:
        """Returns a tree with `ShardedWeight`s in place of the arrays gathered from them."""

        def shard(x: Any) -> Any:
            if id(x) not in self._stacked:
                return x
            _, name, part = self._stacked[id(x)]
            self.in_loop.add(name)
            return part

        return jax.tree.map(shard, weights)


# A context of JAX, so that a trace cached under one computation is not reused under another.
_current = jax.make_user_context(default_value=None)


def use_gathers(gathers: ParamGathers) -> AbstractContextManager[Any]:
    """Returns a context manager in which `current_gathers()` returns `gathers`."""
    context: AbstractContextManager[Any] = _current(gathers)
    return context


def current_gathers() -> ParamGathers | None:
    """Returns the gathers of the calling code: None if its parameters are global arrays."""
    gathers: ParamGathers | None = _current.value
    return gathers


def as_shards(weights: PyTree) -> PyTree:
    """Returns stacked weights with `ShardedWeight`s in place of explicitly gathered arrays."""
    gathers = current_gathers()
    return weights if gathers is None else gathers.as_shards(weights)


def has_shards(weights: PyTree) -> bool:
    """Returns whether a tree contains `ShardedWeight`s."""
    return any(map(_is_shard, jax.tree.leaves(weights, is_leaf=_is_shard)))


def gather_shards(weights: PyTree) -> PyTree:
    """Returns a tree with the gathered arrays in place of `ShardedWeight`s."""
    return jax.tree.map(
        lambda x: x.gather(x.part) if _is_shard(x) else x, weights, is_leaf=_is_shard
    )


def _is_shard(x: Any) -> bool:
    return isinstance(x, ShardedWeight)


def _identity(x: jax.Array) -> jax.Array:
    return x

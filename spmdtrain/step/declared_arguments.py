"""Arguments that an objective or predict function receives because it declares them."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any

# Keeps the key of objectives apart from those that models derive from the same key.
_OF_OBJECTIVES = 0x6F626A65


@dataclass(frozen=True)
class Declared:
    """A function of (model, batch) that may also declare `key` and `mask`.

    Attributes:
        function: The user's function.
        key: Whether it has a parameter `key` without a value: a typed JAX key, for its own draws.
        mask: Whether it has a parameter `mask` without a value: f32 (B,), 0 for padding rows.
    """

    function: Callable[..., PyTree]
    key: bool
    mask: bool

    @classmethod
    def of(cls, function: Callable[..., PyTree]) -> "Declared":
        """Reads the signature; model and batch are the first two parameters."""
        try:
            parameters = list(inspect.signature(function).parameters.values())[2:]
        except (TypeError, ValueError):  # a callable that has none
            parameters = []
        open_ = {
            one.name
            for one in parameters
            if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
            and (one.default is one.empty or one.default is None)
        }
        return cls(function, "key" in open_, "mask" in open_)

    def given(
        self, key: jax.Array, batch: PyTree, mask: jax.Array | None = None
    ) -> Callable[[Any, PyTree], PyTree]:
        """The function of (model, batch).

        Args:
            key: What the model's own draws derive from; the function's key is another one.
            batch: The batch, for its size.
            mask: 0 for padding rows; by default all rows are real.
        """
        found: dict[str, jax.Array] = {}
        if self.key:
            found["key"] = jax.random.fold_in(key, _OF_OBJECTIVES)
        if self.mask:
            rows = jax.tree.leaves(batch)[0].shape[0]
            found["mask"] = jnp.ones(rows, jnp.float32) if mask is None else mask
        return partial(self.function, **found) if found else self.function


def eval_key(draw: jax.Array) -> jax.Array:
    """The key of one batch of an evaluation, from (seed of evaluations, number of the batch)."""
    return jax.random.fold_in(jax.random.key(draw[0]), draw[1])

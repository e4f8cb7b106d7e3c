"""Arguments that an objective or predict function receives because it declares them."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any

# Separates the objective's key from the keys that models derive from the same key.
_OF_OBJECTIVES = 0x6F626A65


@dataclass(frozen=True)
class Declared:
    """A function of (model, batch) that may also declare `key` and `mask`.

    Attributes:
      key: Whether the function has a parameter `key` without a default, or with the default None: a
        typed JAX key for random numbers of the function.
      mask: The same for a parameter `mask`: f32 (B,), 0 for padding rows.
      batch_coupled: Whether the function is declared to combine the examples of its batch.
      by_example: Whether the function is declared not to combine them.
    """

    function: Callable[..., PyTree]
    key: bool
    mask: bool
    batch_coupled: bool = False
    by_example: bool = False

    @classmethod
    def of(cls, function: Callable[..., PyTree]) -> "Declared":
        """Returns an objective or predict function with the arguments that it declares."""
        try:
            parameters = list(inspect.signature(function).parameters.values())[2:]
        except (TypeError, ValueError):  # a callable without a signature
            parameters = []
        open_ = {
            p.name
            for p in parameters
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
            and (p.default is p.empty or p.default is None)
        }
        coupled = getattr(function, "is_batch_coupled", None)
        declared = "key" in open_, "mask" in open_
        return cls(function, *declared, batch_coupled=coupled is True, by_example=coupled is False)

    def given(
        self, key: jax.Array, batch: PyTree, mask: jax.Array | None = None
    ) -> Callable[[Any, PyTree], PyTree]:
        """Returns the function of (model, batch), with the declared arguments bound.

        Args:
          key: The key of the model's random numbers; the function's key derives from it.
          batch: Only its number of rows is read.
          mask: f32 (B,), 0 for padding rows. By default no row is padding.
        """
        declared: dict[str, jax.Array] = {}
        if self.key:
            declared["key"] = jax.random.fold_in(key, _OF_OBJECTIVES)
        if self.mask:
            rows = jax.tree.leaves(batch)[0].shape[0]
            declared["mask"] = jnp.ones(rows, jnp.float32) if mask is None else mask
        return partial(self.function, **declared) if declared else self.function


def eval_key(draw: jax.Array) -> jax.Array:
    """Returns the random key of one batch of an evaluation.

    `draw` is uint32 (2,): the seed of evaluations and the index of the batch.
    """
    return jax.random.fold_in(jax.random.key(draw[0]), draw[1])

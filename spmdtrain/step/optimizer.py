"""What an optimizer makes of parameters and gradients: of all, or of the part a server has."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from spmdtrain.errors import UserError
from spmdtrain.step.state import first_average
from spmdtrain.tree import named_leaves, path_name

PyTree = Any


@dataclass(frozen=True)
class Update:
    """The optimizer, what it leaves alone, and the average that is kept of what it makes.

    Attributes:
        optimizer: Of optax. Raises `UserError` for what is none.
        frozen: Patterns of the paths of parameters that are not trained.
        ema_decay: Of the moving average of the parameters; None where none is kept.
    """

    optimizer: optax.GradientTransformation
    frozen: Sequence[str] = ()
    ema_decay: float | None = None

    def __post_init__(self) -> None:
        optimizer = self.optimizer
        if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
            raise UserError(
                f"optimizer is a {type(optimizer).__module__}.{type(optimizer).__name__}: it must "
                "be of optax, optax.adam(1e-3) say"
            )

    def init(self, params: PyTree) -> PyTree:
        """The optimizer's state before its first step."""
        return self.optimizer.init(self.partition(params)[0])

    def first_average(self, params: PyTree) -> PyTree:
        """The average before the first step; an empty dictionary where none is kept."""
        return {} if self.ema_decay is None else first_average(params)

    def __call__(
        self, params: PyTree, opt_state: PyTree, gradients: PyTree, loss: jax.Array
    ) -> tuple[PyTree, PyTree]:
        """The parameters and the optimizer's state after a step.

        Gradients are of those that are trained, None in the others' places; `loss` is for
        optimizers that look at it.
        """
        trained, frozen = self.partition(params)
        optimizer = optax.with_extra_args_support(self.optimizer)
        try:
            updates, opt_state = optimizer.update(gradients, opt_state, trained, value=loss)
        except TypeError as error:
            if "value_fn" not in str(error):
                raise
            raise UserError(
                "the optimizer needs value_fn, the loss as a function of the parameters, to search "
                "along a line, as optax.lbfgs does. A step computes the loss once: use an "
                "optimizer without a line search, for example optax.lbfgs(1.0, linesearch=None)"
            ) from error
        return merge(optax.apply_updates(trained, updates), frozen), opt_state

    def partition(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """The parameters that are trained and those that are not, None in the others' places."""
        patterns = [re.compile(pattern) for pattern in self.frozen]
        if not patterns:
            return params, None

        def part(belongs: Callable[[str], bool]) -> PyTree:
            return jax.tree_util.tree_map_with_path(
                lambda path, x: x if belongs(path_name(path)) else None, params
            )

        def found(name: str) -> bool:
            return any(pattern.search(name) for pattern in patterns)

        return part(lambda name: not found(name)), part(found)

    def check(self, params: PyTree) -> None:
        """Raise `UserError` where `freeze` matches no parameter, or all."""
        names = list(named_leaves(params))
        for pattern in self.frozen:
            if not any(re.search(pattern, name) for name in names):
                raise UserError(f"freeze: {pattern!r} is found in no parameter's path: {names}")
        if self.frozen and not jax.tree.leaves(self.partition(params)[0]):
            raise UserError(f"freeze: nothing is left to train of {names}")

    def average(self, averaged: PyTree, params: PyTree, step: jax.Array) -> PyTree:
        """The exponential moving average of the parameters after update number `step`, from 0.

        It decays faster at first, by (1 + k) / (10 + k) in update k, so that it soon forgets the
        initial values: as TensorFlow's `ExponentialMovingAverage` does with `num_updates`.
        """
        if self.ema_decay is None:
            return averaged
        decay = jnp.minimum(self.ema_decay, (2.0 + step) / (11.0 + step))

        def average(old: jax.Array, new: jax.Array) -> jax.Array:
            return (old + (1 - decay) * (new - old)).astype(old.dtype)

        return jax.tree.map(average, averaged, params)


def merge(params: PyTree, frozen: PyTree) -> PyTree:
    """The parameters again, from the two parts that `Update.parted` makes."""
    if frozen is None:
        return params
    return jax.tree.map(
        lambda x, y: y if x is None else x, params, frozen, is_leaf=lambda x: x is None
    )


def clipped(
    transformation: optax.GradientTransformation, gradients: PyTree, trained: PyTree, loss: Any
) -> PyTree:
    """What the worker's part of an optimizer makes of a whole gradient; it keeps no state."""
    full = optax.with_extra_args_support(transformation)
    found, _ = full.update(gradients, full.init(trained), trained, value=jnp.asarray(loss))
    return found

"""The split of an optimizer into a part that needs whole gradients and one that does not."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spmdtrain.errors import UserError
from spmdtrain.parameter_server.partition import TreePartition
from spmdtrain.step.optimizer import ExtraArguments, evaluates_loss, update_with
from spmdtrain.step.optimizer_record import name_of, parts_of

PyTree = Any
_STEPS = 2  # the second step uses the state that the first one leaves
_LARGE = 1e8  # factor of gradients that every clipping changes


def split_optimizer(
    optimizer: optax.GradientTransformation, trained: TreePartition
) -> tuple[optax.GradientTransformation, optax.GradientTransformation]:
    """Splits an optimizer into a part for the workers and a part for the servers.

    The first transformations of a chain may need the whole gradient if they keep no state, such as
    clipping by the global norm: they run on the workers.

    Returns:
      The transformation that a worker applies to whole gradients, and the one that each server
      applies to its part. The state of the second has the structure of the whole optimizer's state.

    Raises:
      UserError: If the optimizer cannot be split. Names the transformation.
    """
    if evaluates_loss(optimizer):
        raise UserError(
            f"strategy parameter_server: the optimizer's {name_of(optimizer)} evaluates the loss "
            "at other parameters, and the servers have no batch. Use another strategy, or an "
            "optimizer without evaluations (sgd, adam, adamw)"
        )
    chain = parts_of(optimizer)
    trial = _Trial.of(trained)
    inseparable = [number for number, part in enumerate(chain) if not trial.is_separable(part)]
    count = inseparable[-1] + 1 if inseparable else 0
    for part in chain[:count]:
        if jax.tree.leaves(jax.eval_shape(part.init, trained.whole)):
            keeps = "keeps" if part is chain[count - 1] else f"{name_of(part)} keeps"
            raise UserError(
                f"strategy parameter_server: the optimizer's {name_of(chain[count - 1])} needs the "
                f"whole gradient, and {keeps} a state, of which each server would have only a "
                "part. Use an optimizer that works element by element (sgd, adam, adamw), with "
                "clip_by_global_norm before it if needed"
            )
    if not count:
        return optax.identity(), optimizer
    rest = [_without_update(part) for part in chain[:count]] + list(chain[count:])
    return optax.chain(*chain[:count]), optax.chain(*rest)


def _without_update(part: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns an identity whose state has the structure of the state of `part`."""
    return optax.GradientTransformation(
        part.init, lambda updates, state, params=None: (updates, state)
    )


@dataclass(frozen=True)
class _Trial:
    """Random inputs on which the updates of parts are compared with the update of the whole.

    `gradients` has one tree for each step.
    """

    partition: TreePartition
    params: PyTree
    gradients: Sequence[PyTree]

    @classmethod
    def of(cls, partition: TreePartition) -> "_Trial":
        generator = np.random.default_rng(0)
        params, *gradients = (
            jax.tree.map(lambda x: _random(x, generator), partition.whole)
            for _ in range(1 + _STEPS)
        )
        return cls(partition, params, gradients)

    def is_separable(self, part: optax.GradientTransformation) -> bool:
        """Returns whether the updates of the parts, joined, equal the update of the whole.

        The inputs include large gradients, because clipping may leave small ones unchanged. They
        also include a NaN in the first or the last step: a transformation with a state reacts to it
        in a later step, one without a state in the same step.
        """

        @jax.jit
        def run(params: PyTree, gradients: Sequence[PyTree]) -> tuple[PyTree, PyTree]:
            state, updates = part.init(params), params
            for gradient in gradients:
                extra = ExtraArguments(jnp.float32(1.0), gradient)
                updates, state = update_with(part, gradient, state, params, extra)
            return updates, state

        for gradients in self._cases():
            expected = run(self.params, gradients)
            servers = range(len(self.partition.parts))
            results = [
                run(cut(self.params), [cut(x) for x in gradients])
                for cut in (partial(self.partition.cut, server=n) for n in servers)
            ]
            if not _equals_joined(expected, results):
                return False
        return True

    def _cases(self) -> Iterator[list[PyTree]]:
        first, last = self.gradients
        yield [first, last]
        yield [jax.tree.map(lambda x: x * _LARGE, gradient) for gradient in (first, last)]
        yield [_with_nan(first), last]
        yield [first, _with_nan(last)]


def _equals_joined(whole: PyTree, parts: Sequence[PyTree]) -> bool:
    try:
        result = TreePartition(whole, parts).join(parts)
    except (AssertionError, TypeError, ValueError):  # other shapes, or random keys
        return False
    return all(
        x.shape == y.shape and np.allclose(x, y, rtol=1e-4, atol=1e-6, equal_nan=True)
        for x, y in zip(*map(jax.tree.leaves, (whole, result)), strict=True)
    )


def _random(x: Any, generator: np.random.Generator) -> jax.Array:
    return jnp.asarray(generator.standard_normal(x.shape, np.float32), x.dtype)


def _with_nan(tree: PyTree) -> PyTree:
    """Returns the tree with one NaN in its largest array."""
    leaves, structure = jax.tree.flatten(tree)
    largest = max(range(len(leaves)), key=lambda n: leaves[n].size)
    x = leaves[largest]
    leaves[largest] = x.ravel().at[0].set(jnp.nan).reshape(x.shape)
    return jax.tree.unflatten(structure, leaves)

"""An optimizer in two: what needs the whole gradient, and what works on each part of it alone."""

import inspect
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

PyTree = Any
_STEPS = 2  # the second looks at what the first has left in the state
_LARGE = 1e8


def divided(
    optimizer: optax.GradientTransformation, cuts: TreePartition
) -> tuple[optax.GradientTransformation, optax.GradientTransformation]:
    """What is done to a gradient on the worker, and then to each part of it on its server.

    `cuts` are of the parameters that are trained. Of a chain, what comes first may need the whole
    gradient, if it keeps no state: clipping by the global norm. The state of the second is that of
    the whole optimizer. Raises `UserError`, which names it, for what cannot be divided.
    """
    chain = parts_of(optimizer)
    trial = _Trial.of(cuts)
    whole = [number for number, part in enumerate(chain) if not trial.is_separable(part)]
    count = whole[-1] + 1 if whole else 0
    for part in chain[:count]:
        if jax.tree.leaves(jax.eval_shape(part.init, cuts.whole)):
            keeps = "keeps" if part is chain[count - 1] else f"{name_of(part)} keeps"
            raise UserError(
                f"strategy parameter_server: the optimizer's {name_of(chain[count - 1])} needs the "
                f"whole gradient, and {keeps} a state of its own: no server has the whole of it. "
                "An optimizer that works element by element (sgd, adam, adamw) can be divided, and "
                "clip_by_global_norm before it"
            )
    if not count:
        return optax.identity(), optimizer
    rest = [_nothing(part) for part in chain[:count]] + list(chain[count:])
    return optax.chain(*chain[:count]), optax.chain(*rest)


def _nothing(part: optax.GradientTransformation) -> optax.GradientTransformation:
    """Does nothing, and keeps a state of the same structure: the whole optimizer's has it."""
    return optax.GradientTransformation(
        part.init, lambda updates, state, params=None: (updates, state)
    )


def parts_of(optimizer: optax.GradientTransformation) -> Sequence[optax.GradientTransformation]:
    """The parts of an `optax.chain`, in order; else the optimizer alone."""
    known = _closed_over(optimizer.init).get("init_fns"), _closed_over(optimizer.update)
    inits, updates = known[0], known[1].get("update_fns")
    if not (inits and updates and len(inits) == len(updates)):
        return [optimizer]
    return [
        optax.GradientTransformationExtraArgs(init, update)
        for init, update in zip(inits, updates, strict=True)
    ]


def name_of(optimizer: optax.GradientTransformation) -> str:
    """What optax calls it: `clip_by_global_norm`, or `chain(scale_by_adam, scale)`."""
    if len(parts := parts_of(optimizer)) > 1:
        return f"chain({', '.join(map(name_of, parts))})"
    update: Any = optimizer.update
    inner = _closed_over(update).get("tx")
    if inner is not None:
        update = inner.update
    return str(getattr(update, "__qualname__", type(optimizer).__name__)).split(".")[0]


def _closed_over(function: Any) -> dict[str, Any]:
    if not inspect.isfunction(function):
        return {}
    return dict(inspect.getclosurevars(function).nonlocals)


@dataclass(frozen=True)
class _Trial:
    """Random numbers, of the parameters' shapes, that tell what works on each part alone."""

    cuts: TreePartition
    params: PyTree
    gradients: Sequence[PyTree]
    """Of the steps."""

    @classmethod
    def of(cls, cuts: TreePartition) -> "_Trial":
        generator = np.random.default_rng(0)
        params, *gradients = (
            jax.tree.map(lambda x: _random(x, generator), cuts.whole) for _ in range(1 + _STEPS)
        )
        return cls(cuts, params, gradients)

    def is_separable(self, part: optax.GradientTransformation) -> bool:
        """Whether the parts' results, joined, are the whole's.

        Tried also with large gradients, which a clip may be waiting for, and with a NaN in the
        first and in the last: what has a state shows it later, what has none at once.
        """
        part = optax.with_extra_args_support(part)

        @jax.jit
        def run(params: PyTree, gradients: Sequence[PyTree]) -> tuple[PyTree, PyTree]:
            state, updates = part.init(params), params
            for given in gradients:
                updates, state = part.update(given, state, params, value=jnp.float32(1.0))
            return updates, state

        for gradients in self._hard():
            expected = run(self.params, gradients)
            found = [
                run(cut(self.params), [cut(x) for x in gradients])
                for cut in (partial(self.cuts.cut, server=n) for n in range(len(self.cuts.parts)))
            ]
            if not _is_joined(expected, found):
                return False
        return True

    def _hard(self) -> Iterator[list[PyTree]]:
        first, last = self.gradients
        yield [first, last]
        yield [jax.tree.map(lambda x: x * _LARGE, of) for of in (first, last)]
        yield [_spoilt(first), last]
        yield [first, _spoilt(last)]


def _is_joined(whole: PyTree, parts: Sequence[PyTree]) -> bool:
    """Whether the parts, joined, are the whole."""
    try:
        result = TreePartition(whole, parts).join(parts)
    except (AssertionError, TypeError, ValueError):  # of other shapes, or keys of random numbers
        return False
    return all(
        x.shape == y.shape and np.allclose(x, y, rtol=1e-4, atol=1e-6, equal_nan=True)
        for x, y in zip(*map(jax.tree.leaves, (whole, result)), strict=True)
    )


def _random(x: Any, generator: np.random.Generator) -> jax.Array:
    return jnp.asarray(generator.standard_normal(x.shape, np.float32), x.dtype)


def _spoilt(tree: PyTree) -> PyTree:
    """The same with one number that is none, in the largest array."""
    leaves, structure = jax.tree.flatten(tree)
    place = max(range(len(leaves)), key=lambda n: leaves[n].size)
    leaves[place] = leaves[place].ravel().at[0].set(jnp.nan).reshape(leaves[place].shape)
    return jax.tree.unflatten(structure, leaves)

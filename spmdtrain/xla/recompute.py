"""Values that a branch computes again, instead of receiving them.

If a branch uses a value that is also needed outside of it, XLA writes the value to memory in each
execution, also in those that skip the branch. It also compiles the code outside differently, which
changes last bits. Therefore a branch computes cheap values again, from arrays that are in memory
anyway.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from spmdtrain.xla.jaxpr import inner_jaxprs

PyTree = Any

_NAMES = """
abs add and broadcast_in_dim clamp conj convert_element_type copy cos div eq erf exp exp2 expm1 ge
gt imag integer_pow is_finite le log log1p log2 logistic lt max min mul ne neg not one_minus_square
or pow real rem reshape rsqrt select_n sign sin sqrt square squeeze sub tanh xor
"""
_ELEMENTWISE = frozenset(_NAMES.split())
"""Primitives that are computed again: XLA fuses them into one pass over their operands."""
_CALLS = frozenset(("jit", "pjit"))
_PLACES = frozenset(("sharding_constraint",))


def recomputable(
    function: Callable[..., tuple[PyTree, PyTree]], *args: PyTree, beside: bool = False
) -> tuple[PyTree, Callable[[], PyTree]]:
    """Evaluates a function that returns two results, the second for use in a branch.

    The branch computes the elementwise operations that the second result needs again, from the
    first result, the arguments, and the results of all other operations (products, reductions,
    collectives, loops).

    Args:
      function: A traceable function that returns (first, second).
      *args: Its arguments, pytrees of arrays.
      beside: Whether the second result is computed again beside the first one instead of after it:
        not from the first result, and from scalars that XLA cannot recognize, so that it does not
        reuse what it computes for the first. It then fuses sums of both into one pass over their
        operands.

    Returns:
      The first result, and a function that computes the second one; call it in the branch.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    jaxpr = closed.jaxpr
    structures = [jax.tree.structure(part) for part in shapes]
    size = len(jax.tree.leaves(shapes[0]))
    first, second = jaxpr.outvars[:size], jaxpr.outvars[size:]
    # Equations by the variables that they define, without those whose values are in memory anyway.
    known = set() if beside else {x for x in first if not _is_literal(x)}
    again = {
        x: equation
        for equation in jaxpr.eqns
        if _is_elementwise(equation) or (beside and equation.primitive.name in _PLACES)
        for x in equation.outvars
        if x not in known
    }
    needed: set[Any] = set()
    waiting = [x for x in second if not _is_literal(x)]
    while waiting:
        if (x := waiting.pop()) not in needed:
            needed.add(x)
            waiting += [y for y in again[x].invars if not _is_literal(y)] if x in again else []
    # In the order of the jaxpr, so that a program is the same in each process and start.
    given = [x for x in needed if x not in again]
    defined = [*jaxpr.constvars, *jaxpr.invars, *(y for e in jaxpr.eqns for y in e.outvars)]
    given.sort(key={x: place for place, x in enumerate(defined)}.__getitem__)
    inner = jaxpr.replace(
        constvars=[],
        invars=given,
        outvars=second,
        eqns=[e for e in jaxpr.eqns if any(x in needed and x in again for x in e.outvars)],
        effects=set(),
    )
    whole = jaxpr.replace(outvars=[*first, *given])
    values = _evaluated(whole, closed.consts, *jax.tree.leaves(args))

    def recompute() -> PyTree:
        operands = values[size:]
        if beside:
            operands = [x if jnp.ndim(x) else jax.lax.optimization_barrier(x) for x in operands]
        found = _evaluated(inner, (), *operands)
        return jax.tree.unflatten(structures[1], found)

    return jax.tree.unflatten(structures[0], values[:size]), recompute


def _evaluated(jaxpr: Any, constants: Sequence[Any], *args: Any) -> list[jax.Array]:
    """Returns the results of a jaxpr as arrays, also Python numbers, which are constant results.

    The state of `optax.contrib.dog` has one.
    """
    values = jax.core.eval_jaxpr(jaxpr, constants, *args)
    return [
        jnp.asarray(x, y.aval.dtype) if _is_literal(y) else x
        for x, y in zip(values, jaxpr.outvars, strict=True)
    ]


def _is_elementwise(equation: Any) -> bool:
    """Returns whether each element of an equation's results needs one element of each operand."""
    if equation.primitive.name in _CALLS:
        return all(_is_elementwise(e) for inner in inner_jaxprs(equation) for e in inner.eqns)
    return equation.primitive.name in _ELEMENTWISE


def _is_literal(atom: Any) -> bool:
    return hasattr(atom, "val")

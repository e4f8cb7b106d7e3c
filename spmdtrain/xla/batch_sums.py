"""Sums and means over the rows of a batch, such as batch statistics."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from spmdtrain.xla.padding_rules import CALLS
from spmdtrain.xla.traces import FIXED, Mixed, Op, Rows, Value, differing

_NAMES = """
add add_any broadcast_in_dim concatenate copy cumsum neg reduce_sum reshape rev sharding_constraint
slice squeeze stack sub transpose
"""
_ADDITIVE = frozenset(_NAMES.split())
"""Primitives whose results are sums over the rows if all operands are."""
NEVER = Rows(0, all_false=True)
"""A number that is False for every batch size."""
_LINEAR = frozenset({"add", "add_any", "broadcast_in_dim", "neg", "reshape", "squeeze", "sub"})
"""Primitives whose results are means over the rows if their operands are, or depend on one row."""


def sum_or_mean(op: Op) -> Value:
    """Returns the class of a sum or a mean over the rows of a batch; None for anything else.

    A mean is a sum as well, because the number of rows counts as a constant in sums. A test whether
    this number is 0 is never true.
    """
    if op.first.primitive.name == "eq" and isinstance(op.ins[0], Mixed) and op.ins[0].power:
        return NEVER if getattr(op.first.invars[1], "val", None) == 0 else None
    total, average = _sum(op), _mean(op)
    return average if total is None else total._replace(is_mean=average is not None)


def _sum(op: Op) -> Mixed | None:
    """Returns the class of a sum over the rows of a batch; None if an operation computes none.

    The sum is of values that each depend on one row. Sums of such sums, and their multiples by
    constants, are such sums as well, and the number of rows is a constant here.
    """
    name = op.first.primitive.name
    sums = [isinstance(x, Mixed) and x.is_sum for x in op.ins]
    or_zeros = [a or b for a, b in zip(sums, op.zeros or sums, strict=True)]
    if name == "reduce_sum" and isinstance(rows := op.ins[0], Rows):
        found = rows.dim in op.params["axes"] and not rows.positional
    elif name in ("scatter-add", "scatter_add") and op.zeros[0]:
        found = _adds_rows(op)
    elif name == "convert_element_type":
        found = sums[0] and not _rounds(op.first)
    elif name == "dot_general" and not any(sums):
        found = _contracts_rows(op)
    elif name == "select_n":
        found = op.ins[0] is FIXED and any(sums) and all(or_zeros[1:])
    elif name in ("mul", "div", "dot_general"):
        found = (sums[0] and _is_constant(op.ins[1])) or (
            name != "div" and sums[1] and _is_constant(op.ins[0])
        )
    else:
        found = name in _ADDITIVE and any(sums) and all(or_zeros)
    if not found:
        return None
    # The reason for an error is the operation that added up the rows.
    origin = next((x for x in op.ins if isinstance(x, Mixed) and x.is_sum), op.mixed())
    return origin._replace(is_sum=True)


def _mean(op: Op) -> Mixed | None:
    """Returns the class of a mean over the rows of a batch; None if an operation computes none.

    It is a sum over the rows divided by a multiple of their number. Multiples of such means by
    fixed values, and their sums with values that depend on at most one row, are such means as well.
    """
    name = op.first.primitive.name
    is_mean = [isinstance(x, Mixed) and x.is_mean for x in op.ins]
    if name == "div":
        found = _divides(op.ins[0], op.ins[1], 1) or (is_mean[0] and op.ins[1] is FIXED)
    elif name == "mul":
        one, other = op.ins
        by_number = _divides(one, other, -1) or _divides(other, one, -1)
        found = by_number or (any(is_mean) and FIXED in op.ins)
    elif name == "reduce_sum":  # not of a mean that is repeated for each row
        found = is_mean[0] and not differing(op.first.invars[0].aval, op.second.invars[0].aval)
    else:
        known = all(mean or _is_plain(x) for mean, x in zip(is_mean, op.ins, strict=True))
        converts = name == "convert_element_type" and not _rounds(op.first)
        found = (name in _LINEAR or converts) and any(is_mean) and known
    if not found:
        return None
    origin = next(x for x in op.ins if isinstance(x, Mixed) and (x.is_sum or x.is_mean))
    return Mixed(origin.why, is_mean=True)


def _is_plain(value: Value) -> bool:
    """Returns whether an array depends on no row, or each of its rows on one row of the batch."""
    return value is FIXED or (isinstance(value, Rows) and not value.positional)


def _divides(total: Value, number: Value, power: int) -> bool:
    """Returns whether a number of this power turns a sum over the rows into a mean."""
    is_sum = isinstance(total, Mixed) and total.is_sum
    return is_sum and isinstance(number, Mixed) and number.power == power


def sum_over_parts(op: Op) -> Value:
    """Returns the class of a sum over all parts of a batch (`jax.lax.psum`).

    It is fixed if it adds up sums over the rows of each part, because it is then the sum over all
    rows of the batch. The number of a row within its part must not matter to these sums.
    """
    known = all(x is FIXED or (isinstance(x, Mixed) and x.is_sum) for x in op.ins)
    return FIXED if known and op.params.get("axis_index_groups") is None else op.mixed()


def adds_to_first(program: Any, count: int) -> bool:
    """Returns whether a closed jaxpr adds something to each of its first `count` arguments.

    It has `count` results. Result i is argument i plus something that does not depend on the first
    arguments.
    """
    given = [*range(count), *[None] * (len(program.jaxpr.invars) - count)]
    return _additions(program.jaxpr, given) == list(range(count))


_OTHER = -1


def _additions(jaxpr: Any, given: Sequence[int | None]) -> list[int | None]:
    """Returns, for each result of an open jaxpr, the argument to which it adds something.

    `given` has, for each argument, the number of the first argument that it equals except for an
    added value; None if it does not depend on the first arguments, `_OTHER` if it does in another
    way.
    """
    known: dict[Any, int | None] = dict(zip(jaxpr.invars, given, strict=True))

    def read(operand: Any) -> int | None:
        return None if hasattr(operand, "val") else known.get(operand)

    for equation in jaxpr.eqns:
        ins = [read(x) for x in equation.invars]
        outs: list[int | None] = [None] * len(equation.outvars)
        if any(x is not None for x in ins):
            name, params = equation.primitive.name, equation.params
            inner = params.get("jaxpr", params.get("call_jaxpr"))
            if name in CALLS and inner is not None:
                outs = _additions(getattr(inner, "jaxpr", inner), ins)
            else:
                outs = [_addition(equation, ins)] * len(outs)
        known |= dict(zip(equation.outvars, outs, strict=True))
    return [read(x) for x in jaxpr.outvars]


def _addition(equation: Any, ins: Sequence[int | None]) -> int | None:
    """Returns the argument to which the result of an operation adds something; see `_additions`."""
    name = equation.primitive.name
    at = [number for number, value in enumerate(ins) if value is not None]
    keeps = name in ("broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze")
    adds = name in ("add", "add_any") or (name == "sub" and at == [0])
    old, new = equation.invars[at[0]].aval, equation.outvars[0].aval
    is_same = (old.shape, old.dtype) == (new.shape, new.dtype)
    return ins[at[0]] if len(at) == 1 and is_same and (keeps or adds) else _OTHER


def _adds_rows(op: Op) -> bool:
    """Returns whether each row is added at indices of this row: `bincount`, for example."""
    _, indices, updates = op.ins
    numbers = op.params["dimension_numbers"]
    if not isinstance(indices, Rows) or not isinstance(updates, Rows):
        return False
    dims = [d for d in range(len(op.shape(2))) if d not in numbers.update_window_dims]
    paired = indices.dim < len(dims) and dims[indices.dim] == updates.dim
    unbatched = not numbers.operand_batching_dims
    return paired and unbatched and indices.inner == updates.inner and not updates.positional


def _contracts_rows(op: Op) -> bool:
    """Returns whether a product adds up products of a row with the same row: `x.T @ y`."""
    (left, right), _ = op.params["dimension_numbers"]
    a, b = op.ins
    if not isinstance(a, Rows) or not isinstance(b, Rows) or a.positional or b.positional:
        return False
    return (a.dim, b.dim) in zip(left, right, strict=True) and a.inner == b.inner


def _rounds(equation: Any) -> bool:
    """Returns whether a conversion rounds numbers to integers, or to booleans."""
    old, new = (x[0].aval.dtype for x in (equation.invars, equation.outvars))
    to_integers = jnp.issubdtype(old, jnp.inexact) and not jnp.issubdtype(new, jnp.inexact)
    return bool(to_integers or jnp.issubdtype(new, jnp.bool_))


def _is_constant(value: Value) -> bool:
    return value is FIXED or (isinstance(value, Mixed) and value.power is not None)

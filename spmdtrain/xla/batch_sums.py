"""Sums over the rows of a batch, such as batch statistics."""

from spmdtrain.xla.padding_rules import FIXED, Mixed, Op, Rows, Value

_NAMES = """
add add_any broadcast_in_dim concatenate convert_element_type neg reduce_sum reshape squeeze stack
sub
"""
_ADDITIVE = frozenset(_NAMES.split())
"""Primitives whose results are sums over the rows if all operands are."""


def batch_sum(op: Op) -> Mixed | None:
    """Returns the class of a sum over the rows of a batch; None if an operation computes none.

    The sum is of values that each depend on one row. Sums of such sums, and their multiples by
    constants, are such sums as well, and the number of rows is a constant here.

    Args:
      op: The operation.
    """
    name = op.first.primitive.name
    sums = [isinstance(x, Mixed) and x.is_sum for x in op.ins]
    if name == "reduce_sum" and isinstance(rows := op.ins[0], Rows):
        found = rows.dim in op.params["axes"] and not rows.positional
    elif name in ("mul", "div"):
        found = (sums[0] and _is_constant(op.ins[1])) or (
            name == "mul" and sums[1] and _is_constant(op.ins[0])
        )
    else:
        found = name in _ADDITIVE and bool(sums) and all(sums)
    if not found:
        return None
    # The reason for an error is the operation that added up the rows.
    origin = next((x for x in op.ins if isinstance(x, Mixed) and x.is_sum), op.mixed())
    return origin._replace(is_sum=True)


def sum_over_parts(op: Op) -> Value:
    """Returns the class of a sum over all parts of a batch (`jax.lax.psum`).

    It is fixed if it adds up sums over the rows of each part, because it is then the sum over all
    rows of the batch. The number of a row within its part must not matter to these sums.

    Args:
      op: The operation.
    """
    known = all(x is FIXED or (isinstance(x, Mixed) and x.is_sum) for x in op.ins)
    return FIXED if known and op.params.get("axis_index_groups") is None else op.mixed()


def _is_constant(value: Value) -> bool:
    return value is FIXED or (isinstance(value, Mixed) and value.is_number)

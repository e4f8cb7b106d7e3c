"""Floating-point operations of one product: a matrix multiplication or a convolution."""

import math
from collections.abc import Callable
from typing import Any


def _dot(equation: Any) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    return 2 * _size(equation.outvars[0]) * math.prod(shape[dim] for dim in contracted)


def _convolution(equation: Any) -> int:
    """Returns the FLOPs of a convolution: 2 for each pair of output and kernel element of a group.

    An input dilated by n, as in the gradient of a strided convolution, is filled with zeros: only
    one of n taps meets an element.
    """
    params, kernel = equation.params, equation.invars[1].aval.shape
    features = kernel[params["dimension_numbers"].rhs_spec[0]]  # of the output
    dilated = math.prod(params["lhs_dilation"])
    return 2 * _size(equation.outvars[0]) * math.prod(kernel) // features // dilated


def _ragged_dot(equation: Any) -> int:
    """Counts each row, or each contracted column, times the matrix of its own group only."""
    rows, matrices = equation.invars[0].aval.shape, equation.invars[1].aval.shape
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    shared = {*contracted, *batch, *numbers.rhs_group_dimensions}
    return 2 * math.prod(rows) * math.prod(n for dim, n in enumerate(matrices) if dim not in shared)


PRODUCT_FLOPS: dict[str, Callable[[Any], int]] = {
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "ragged_dot": _ragged_dot,
    "ragged_dot_general": _ragged_dot,
}
"""For each primitive that is a product, the function from its equation to its operations."""


def padded_dot(equation: Any, lanes: int) -> float:
    """Returns the operations of a `dot_general` on a matrix unit of `lanes` x `lanes`.

    The unit holds a block of one operand and streams the other one through it. The two dims of the
    block are rounded up to a multiple of `lanes`; of the two operands, the one that wastes less is
    taken.
    """
    (contracted, _), (batch, _) = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    depth = math.prod(left[dim] for dim in contracted)
    batches = math.prod(left[dim] for dim in batch)
    rows = math.prod(left) // max(1, depth * batches)
    columns = _size(equation.outvars[0]) // max(1, rows * batches)

    def whole(size: int) -> int:
        return -(-size // lanes) * lanes

    return 2.0 * batches * whole(depth) * min(rows * whole(columns), whole(rows) * columns)


def _size(variable: Any) -> int:
    return math.prod(variable.aval.shape)

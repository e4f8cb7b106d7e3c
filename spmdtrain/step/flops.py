"""Floating-point operations of a jaxpr.

Only products (matrix multiplications and convolutions) are counted, two operations for each
multiply-add, as is usual for model FLOPs ("PaLM", arXiv 2204.02311, appendix B). XLA's own
`cost_analysis` is not used because it counts the body of a loop only once.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from jax._src import source_info_util

from spmdtrain.step import finite, norms
from spmdtrain.xla.hlo_parser import is_library
from spmdtrain.xla.jaxpr import inner_jaxprs

_CHECKS = frozenset({finite.__file__, norms.__file__})
_RECOMPUTED = "rematted_computation"  # name stack entry of `jax.checkpoint`


@dataclass
class Flops:
    """Operations of a program on all devices together.

    Attributes:
        total: All operations.
        again: Part of `total` that rematerialization recomputes.
        by_line: `total` by source line of the user, as `file.py:12 (name)`.
        unknown_loops: Lines with a `while` of unknown trip count, whose body counts once.
    """

    total: int = 0
    again: int = 0
    by_line: Counter[str] = field(default_factory=Counter)
    unknown_loops: list[str] = field(default_factory=list)


def count_flops(jaxpr: Any, without: Collection[str] = ()) -> Flops:
    """Returns the operations of a jaxpr: `count_flops(jax.make_jaxpr(f)(x))`.

    The body of a `scan` counts for each iteration, a `cond` by its most expensive branch, and the
    body of a `shard_map` once for each device along its axes. The check that the state is finite
    and the norms do not count, because they are not part of the model.

    Args:
        jaxpr: An open or closed jaxpr.
        without: Further source files whose operations do not count.
    """
    flops = Flops()
    left_out = _CHECKS.union(without)
    _count(getattr(jaxpr, "jaxpr", jaxpr), 1, flops, left_out, again=False)
    return flops


def _count(jaxpr: Any, times: int, into: Flops, left_out: Collection[str], *, again: bool) -> None:
    outer = again
    for equation in jaxpr.eqns:
        again = outer or _RECOMPUTED in str(equation.source_info.name_stack)
        count = _COUNTS.get(equation.primitive.name)
        if count is not None:
            if any(frame.file_name in left_out for frame in _frames(equation)):
                continue
            operations = times * count(equation)
            into.total += operations
            into.again += operations * again
            into.by_line[_line(equation)] += operations
            continue
        if equation.primitive.name == "cond":
            branches = [count_flops(b, left_out) for b in equation.params["branches"]]
            largest = max(branches, key=lambda branch: branch.total)
            _add(largest, times, into, again=again)
            continue
        if equation.primitive.name == "while":
            into.unknown_loops += [_line(equation)] if _computes(equation) else []
        inside = times * _repeats(equation)
        for inner in inner_jaxprs(equation):
            _count(inner, inside, into, left_out, again=again)


def _add(flops: Flops, times: int, into: Flops, *, again: bool) -> None:
    into.total += times * flops.total
    into.again += times * (flops.total if again else flops.again)
    for line, operations in flops.by_line.items():
        into.by_line[line] += times * operations
    into.unknown_loops += flops.unknown_loops


def _computes(equation: Any) -> bool:
    return any(count_flops(inner).total for inner in inner_jaxprs(equation))


def _repeats(equation: Any) -> int:
    """Returns how often the body of an equation runs, on all devices together."""
    params = equation.params
    match equation.primitive.name:
        case "scan":
            return int(params["length"])
        case "shard_map":
            return math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
        case "pallas_call":
            return math.prod(params["grid_mapping"].grid)
    return 1


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


_COUNTS = {
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "ragged_dot": _ragged_dot,
    "ragged_dot_general": _ragged_dot,
}


def _size(variable: Any) -> int:
    return math.prod(variable.aval.shape)


def _line(equation: Any) -> str:
    """Returns the innermost source line outside of libraries."""
    for frame in _frames(equation):
        if not is_library(frame.file_name):
            return f"{frame.file_name}:{frame.start_line} ({frame.function_name})"
    return "unknown"


def _frames(equation: Any) -> Iterator[Any]:
    yield from source_info_util.user_frames(equation.source_info.traceback)

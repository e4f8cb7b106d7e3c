"""Floating-point operations, counted in what JAX has traced.

Products alone are counted (matrix multiplications and convolutions), two operations for each
multiply-add, as is usual where model FLOPs are told ("PaLM", arXiv 2204.02311, appendix B). XLA's
own `cost_analysis` counts the body of a loop once, and is of no use for that.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from jax._src import source_info_util

from spmdtrain.step import finite
from spmdtrain.xla.hlo_parser import is_library
from spmdtrain.xla.jaxpr import inner_jaxprs

_AGAIN = "rematted_computation"  # as `jax.checkpoint` names what it computes again


@dataclass
class Flops:
    """What a program computes, on all devices together.

    Attributes:
        total: Operations.
        again: Of these, what rematerialisation computes a second time.
        by_line: The same by the line of the user's that asks for them, `file.py:12 (name)`.
        unknown_loops: Lines with a `while` whose turns nobody knows: its body counts once.
    """

    total: int = 0
    again: int = 0
    by_line: Counter[str] = field(default_factory=Counter)
    unknown_loops: list[str] = field(default_factory=list)


def count_flops(jaxpr: Any) -> Flops:
    """The operations of a jaxpr, open or closed: `count_flops(jax.make_jaxpr(f)(x))`.

    A `scan` counts as often as it is long, of a `cond` the dearest branch, what is under
    `shard_map` once for each device along its axes. What looks if the state is finite is none of
    the model's.
    """
    found = Flops()
    _count(getattr(jaxpr, "jaxpr", jaxpr), 1, found, again=False)
    return found


def _count(jaxpr: Any, times: int, into: Flops, *, again: bool) -> None:
    outer = again
    for equation in jaxpr.eqns:
        again = outer or _AGAIN in str(equation.source_info.name_stack)
        own = _OF_PRIMITIVE.get(equation.primitive.name)
        if own is not None:
            if _is_check(equation):
                continue
            operations = times * own(equation)
            into.total += operations
            into.again += operations * again
            into.by_line[_line(equation)] += operations
            continue
        if equation.primitive.name == "cond":
            branches = [count_flops(branch) for branch in equation.params["branches"]]
            dearest = max(branches, key=lambda branch: branch.total)
            _add(dearest, times, into, again=again)
            continue
        if equation.primitive.name == "while":
            into.unknown_loops += [_line(equation)] if _computes(equation) else []
        inside = times * _repeats(equation)
        for inner in inner_jaxprs(equation):
            _count(inner, inside, into, again=again)


def _add(found: Flops, times: int, into: Flops, *, again: bool) -> None:
    into.total += times * found.total
    into.again += times * (found.total if again else found.again)
    for line, operations in found.by_line.items():
        into.by_line[line] += times * operations
    into.unknown_loops += found.unknown_loops


def _computes(equation: Any) -> bool:
    return any(count_flops(inner).total for inner in inner_jaxprs(equation))


def _repeats(equation: Any) -> int:
    """How often what is inside an equation runs, on all devices together."""
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
    """Each output element meets each element of the kernel that is of its group.

    What dilates the input, as the gradient of a strided convolution does, are zeros: of as many
    taps as the dilation one meets an element.
    """
    params, kernel = equation.params, equation.invars[1].aval.shape
    into = kernel[params["dimension_numbers"].rhs_spec[0]]  # output features
    dilated = math.prod(params["lhs_dilation"])
    return 2 * _size(equation.outvars[0]) * math.prod(kernel) // into // dilated


def _ragged_dot(equation: Any) -> int:
    """Each row, or each column that is summed over, meets the matrix of its group alone."""
    rows, matrices = equation.invars[0].aval.shape, equation.invars[1].aval.shape
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    met = {*contracted, *batch, *numbers.rhs_group_dimensions}
    return 2 * math.prod(rows) * math.prod(n for dim, n in enumerate(matrices) if dim not in met)


_OF_PRIMITIVE = {
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "ragged_dot": _ragged_dot,
    "ragged_dot_general": _ragged_dot,
}


def _size(variable: Any) -> int:
    return math.prod(variable.aval.shape)


def _is_check(equation: Any) -> bool:
    return any(frame.file_name == finite.__file__ for frame in _frames(equation))


def _line(equation: Any) -> str:
    """The innermost line that is no library's."""
    for frame in _frames(equation):
        if not is_library(frame.file_name):
            return f"{frame.file_name}:{frame.start_line} ({frame.function_name})"
    return "unknown"


def _frames(equation: Any) -> Iterator[Any]:
    yield from source_info_util.user_frames(equation.source_info.traceback)

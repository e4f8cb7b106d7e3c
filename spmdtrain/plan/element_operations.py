"""Elementwise operations, reductions and transposes of a compiled program."""

import enum
import math
import re
from collections import defaultdict
from collections.abc import Sequence

from spmdtrain.xla.hlo import Array, Computation, Instruction, Module, reading_program


class ElementKind(enum.StrEnum):
    """A kind of operations on elements, which take about the same time on a CPU."""

    ARITHMETIC = "arithmetic"
    """Arithmetic without divisions, comparisons, bit operations and conversions."""
    DIVISIONS = "divisions"
    """Divisions and roots."""
    FUNCTIONS = "functions"
    """Exponentials and similar functions."""
    REDUCTIONS = "reductions"
    """Elements that are reduced."""
    TRANSPOSES = "transposes"
    """Elements that are written in another order."""


_KINDS = {
    ElementKind.ARITHMETIC: (
        *("abs", "add", "and", "ceil", "clamp", "compare", "convert", "count-leading-zeros"),
        *("floor", "is-finite", "maximum", "minimum", "multiply", "negate", "not", "or"),
        *("popcnt", "reduce-precision", "round-nearest-afz", "round-nearest-even", "select"),
        *("shift-left", "shift-right-arithmetic", "shift-right-logical", "sign", "subtract", "xor"),
    ),
    ElementKind.DIVISIONS: ("divide", "remainder", "rsqrt", "sqrt"),
    ElementKind.FUNCTIONS: (
        *("atan2", "cbrt", "cosine", "erf", "exponential", "exponential-minus-one", "log"),
        *("log-plus-one", "logistic", "power", "sine", "tan", "tanh"),
    ),
    ElementKind.REDUCTIONS: ("reduce", "reduce-window"),
    ElementKind.TRANSPOSES: ("copy", "transpose"),
}
_KIND_OF = {opcode: kind for kind, opcodes in _KINDS.items() for opcode in opcodes}
_DIMENSIONS = re.compile(r"dimensions=\{([\d,]*)\}")
_WINDOW = re.compile(r"window=\{size=([\dx]+)")


@reading_program()
def element_operations(module: Module) -> dict[str, float]:
    """Returns the number of operations on elements in a step on one device, by `ElementKind`.

    Operations within fusions count. If several results of a fusion need a value, and it computes
    the value several times, the value counts once. Gathers, scatters, sorts and pads have no kind:
    only their memory traffic is known.
    """
    found: dict[str, float] = defaultdict(float)
    for name, times in module.times.items():
        computation = module.computations[name]
        for instruction in computation.instructions.values() if times else ():
            if kind := _KIND_OF.get(instruction.opcode):
                found[kind] += times * _count(instruction, kind, computation)
    return {kind: count for kind, count in found.items() if count}


def _count(instruction: Instruction, kind: ElementKind, within: Computation) -> int:
    """Returns the number of operations of one execution of an instruction."""
    given = within.instructions.get(next(iter(instruction.operands), ""))
    if not instruction.arrays or given is None or not given.arrays:
        return 0
    result, operand = instruction.arrays[0], given.arrays[0]
    if kind is ElementKind.TRANSPOSES:
        return math.prod(result.dims) if _moves(instruction, operand, result) else 0
    if instruction.opcode == "reduce":
        return math.prod(operand.dims)
    window = _WINDOW.search(instruction.attributes)
    each = math.prod(map(int, window[1].split("x"))) if window else 1
    return each * math.prod(result.dims)


def _moves(instruction: Instruction, operand: Array, result: Array) -> bool:
    """Returns whether a copy or a transpose writes elements in another order.

    XLA also writes a transpose where only the layout changes, so that the elements stay.
    """
    after: Sequence[int] = result.order  # the dims of the operand, in the order of the result
    if instruction.opcode == "transpose" and (match := _DIMENSIONS.search(instruction.attributes)):
        dims = [int(dim) for dim in match[1].split(",") if dim]
        after = [dims[dim] for dim in result.order]
    wide = {dim for dim, size in enumerate(operand.dims) if size > 1}
    return [dim for dim in after if dim in wide] != [dim for dim in operand.order if dim in wide]

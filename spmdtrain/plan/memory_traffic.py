"""Memory traffic of a compiled program."""

import math
import re
from collections.abc import Callable

from spmdtrain.xla.collectives import KINDS
from spmdtrain.xla.hlo import (
    ASYNC,
    Array,
    Computation,
    Instruction,
    Module,
    arrays_of,
    reading_program,
)

# These refer to existing arrays, or wait for data that another instruction counts.
_FREE = frozenset(
    (
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota"),
        *("while", "call", "conditional", "partition-id", "replica-id", "opt-barrier", "domain"),
    )
)
# Custom calls of TPUs that refer to memory, or to arrays that are already adjacent.
_FREE_CALLS = re.compile(
    'custom_call_target="(AllocateBuffer|ConcatBitcast|AssumeGatherIndices.*?)"'
)


@reading_program()
def bytes_moved(
    module: Module, omitted: Callable[[Instruction], bool] = lambda instruction: False
) -> float:
    """Returns the bytes that the instructions of a step read and write on one device.

    An operand counts in full for each instruction that reads it, except that a slice counts only
    its part, and an update in place only the updated part. Tiles of a layout count in full. Arrays
    outside of the main memory (a TPU keeps some in its vector memory) do not count. Caches are
    ignored, so the result tends to be an upper bound.
    """
    return sum(
        times * bytes_of(instruction, within, module)
        for instruction, within, times in module.instructions()
        if not omitted(instruction)
    )


def bytes_of(instruction: Instruction, within: Computation, module: Module) -> float:
    """Returns the bytes that one execution of an instruction reads and writes."""
    if (
        instruction.opcode in _FREE
        or instruction.opcode in ASYNC
        or instruction.opcode.endswith("-done")
    ):
        return 0
    if instruction.opcode == "custom-call" and _FREE_CALLS.search(instruction.attributes):
        return 0
    if instruction.opcode in ("fusion", "fusion-start"):  # GPUs slice stacked layers in the latter
        return _moved_by_fusion(instruction, within, module)
    written = _main_bytes(instruction.shape)
    match instruction.opcode:
        case "dynamic-slice" | "slice" | "gather":
            return written + _sliced(instruction.arrays[0], instruction, within)
        case "slice-start" | "dynamic-slice-start":
            part = instruction.arrays[1]  # the first array is its operand
            return _in_main(part) + _sliced(part, instruction, within)
        case "dynamic-update-slice":
            return 2 * _operand_bytes(instruction.operands[1], within)
    if instruction.opcode.endswith("-start") and instruction.opcode != "all-reduce-start":
        return written  # its result includes its operands
    return written + _operand_sum(instruction, within)


def array_bytes(
    instruction: Instruction, within: Computation
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns the bytes of each operand and of each result of an instruction in main memory."""
    operands = tuple(_operand_bytes(name, within) for name in instruction.operands)
    return operands, tuple(map(_in_main, instruction.arrays))


def _moved_by_fusion(instruction: Instruction, within: Computation, module: Module) -> float:
    """Returns the bytes that a fusion reads of its operands and writes of its results."""
    ((_, name),) = instruction.called
    body = module.computations[name]
    total = 0.0
    for number, operand in enumerate(instruction.operands):
        whole = _operand_bytes(operand, within)
        parameter = _parameter(number, body)
        if whole and parameter is not None:
            whole = min(whole, _read(parameter.name, body, module))
        total += whole
    root = body.root
    results = [body.instructions[x] for x in root.operands] if root.opcode == "tuple" else [root]
    # Only the shape of the fusion itself shows which of its results are in the main memory.
    arrays = instruction.arrays
    if len(arrays) != len(results):  # tuples in a tuple
        return total + sum(_written(x, body, module) for x in results)
    pairs = zip(results, arrays, strict=True)
    return total + sum(_written(x, body, module) for x, array in pairs if array.space == 0)


def _read(name: str, body: Computation, module: Module) -> float:
    """Returns the bytes that the instructions within a fusion read of a value; infinity if all."""
    total = 0.0
    for user in body.instructions.values():
        places = [place for place, operand in enumerate(user.operands) if operand == name]
        if not places:
            continue
        match user.opcode:
            case "dynamic-slice" | "slice" | "gather" if places == [0]:
                total += _main_bytes(user.shape)
            case "dynamic-update-slice" if places == [0]:
                pass  # in place
            case "tuple":
                pass  # returned as it is
            case opcode if opcode in KINDS:
                pass  # a part of a collective that runs at the same time
            case "bitcast":
                total += _read(user.name, body, module)
            case "fusion":
                ((_, inner),) = user.called
                nested = module.computations[inner]
                parameters = [_parameter(place, nested) for place in places]
                total += sum(_read(x.name, nested, module) for x in parameters if x is not None)
            case _:
                return math.inf
    return total


def _written(result: Instruction, body: Computation, module: Module) -> float:
    """Returns the bytes that a fusion writes of a result; of an update in place, only its part."""
    match result.opcode:
        case "tuple":
            return sum(_written(body.instructions[x], body, module) for x in result.operands)
        case "dynamic-update-slice":
            return _main_bytes(body.instructions[result.operands[1]].shape)
        case "bitcast":
            return _written(body.instructions[result.operands[0]], body, module)
        case "fusion":
            ((_, inner),) = result.called
            nested = module.computations[inner]
            return _written(nested.root, nested, module)
    is_own = result.opcode != "parameter" and result.opcode not in KINDS
    return _main_bytes(result.shape) if is_own else 0


def _parameter(number: int, body: Computation) -> Instruction | None:
    own = (x for x in body.instructions.values() if x.opcode == "parameter")
    return next((x for x in own if int(x.inside) == number), None)


def _sliced(part: Array, instruction: Instruction, within: Computation) -> float:
    """Returns the bytes read of an operand that is sliced, whatever memory the slice is in."""
    return min(part.stored_bytes, _operand_bytes(instruction.operands[0], within))


def _operand_sum(instruction: Instruction, within: Computation) -> float:
    return sum(_operand_bytes(name, within) for name in instruction.operands)


def _operand_bytes(name: str, within: Computation) -> float:
    instruction = within.instructions.get(name)
    return 0 if instruction is None else _main_bytes(instruction.shape)


def _main_bytes(shape: str) -> float:
    return sum(map(_in_main, arrays_of(shape)))


def _in_main(array: Array) -> float:
    return array.stored_bytes if array.space == 0 else 0

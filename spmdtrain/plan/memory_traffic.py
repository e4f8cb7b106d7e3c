"""Memory traffic of a compiled program."""

import re

from spmdtrain.xla.hlo_parser import (
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
def bytes_moved(module: Module) -> float:
    """Returns the bytes that all instructions of a step read and write on one device.

    An operand counts in full for each instruction that reads it, except that a slice counts only
    its part, and an update in place only the updated part. Arrays outside of the main memory (a TPU
    keeps some in its vector memory) do not count. Caches are ignored, so the result tends to be an
    upper bound.

    Args:
        module: The compiled program.

    Raises:
        UnreadableProgramError: If XLA wrote the program in an unknown format.
    """
    return sum(
        times * _moved(instruction, within, module)
        for instruction, within, times in module.instructions()
    )


def _moved(instruction: Instruction, within: Computation, module: Module) -> float:
    if (
        instruction.opcode in _FREE
        or instruction.opcode in ASYNC
        or instruction.opcode.endswith("-done")
    ):
        return 0
    if instruction.opcode == "custom-call" and _FREE_CALLS.search(instruction.attributes):
        return 0
    if instruction.opcode == "fusion":
        ((_, name),) = instruction.called
        return _moved_by_fusion(instruction, within, module.computations[name])
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


def _moved_by_fusion(instruction: Instruction, within: Computation, body: Computation) -> float:
    """Returns the bytes that a fusion reads of its operands and writes of its results."""
    total = 0.0
    inner = list(body.instructions.values())
    parameters = {int(x.inside): x for x in inner if x.opcode == "parameter"}
    for number, name in enumerate(instruction.operands):
        whole = _operand_bytes(name, within)
        if whole and number in parameters:
            users = [x for x in inner if parameters[number].name in x.operands]
            whole = min(whole, sum(_read(parameters[number].name, x, body) for x in users))
        total += whole
    root = body.root
    results = [root]
    if root.opcode == "tuple":
        results = [body.instructions[name] for name in root.operands]
    for result in results:
        if result.opcode == "dynamic-update-slice":
            total += _main_bytes(body.instructions[result.operands[1]].shape)
        else:
            total += _main_bytes(result.shape)
    # Only the shape of the fusion itself shows whether its result is in the main memory.
    return (
        total
        if _main_bytes(instruction.shape)
        else total - sum(_main_bytes(x.shape) for x in results)
    )


def _read(name: str, by: Instruction, body: Computation) -> float:
    """Returns the bytes that an instruction within a fusion reads of a parameter."""
    if by.opcode in ("dynamic-slice", "slice", "gather") and by.operands[0] == name:
        return _main_bytes(by.shape)
    if by.opcode == "dynamic-update-slice" and by.operands[0] == name:
        return 0  # in place
    return float("inf")


def _sliced(part: Array, instruction: Instruction, within: Computation) -> float:
    """Returns the bytes read of an operand that is sliced, whatever memory the slice is in."""
    return min(part.bytes, _operand_bytes(instruction.operands[0], within))


def _operand_sum(instruction: Instruction, within: Computation) -> float:
    return sum(_operand_bytes(name, within) for name in instruction.operands)


def _operand_bytes(name: str, within: Computation) -> float:
    instruction = within.instructions.get(name)
    return 0 if instruction is None else _main_bytes(instruction.shape)


def _main_bytes(shape: str) -> float:
    return sum(map(_in_main, arrays_of(shape)))


def _in_main(array: Array) -> float:
    return array.bytes if array.space == 0 else 0

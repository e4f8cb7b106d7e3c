"""What a compiled program reads and writes in a device's memory."""

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

# These name what is there already, or wait for what another instruction counts.
_NOTHING = frozenset(
    (
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota"),
        *("while", "call", "conditional", "partition-id", "replica-id", "opt-barrier", "domain"),
    )
)
# Of a TPU's own: these name memory, or arrays that lie side by side already.
_NAMES = re.compile('custom_call_target="(AllocateBuffer|ConcatBitcast|AssumeGatherIndices.*?)"')


@reading_program()
def bytes_moved(module: Module) -> float:
    """Bytes that each instruction reads and writes, as often as it runs, on one device.

    An operand counts in full for each instruction that reads it, unless it is only sliced there;
    of an update in place what is updated. What is in another memory than the main one (a TPU keeps
    some arrays in its vector memory) does not count. An upper bound of sorts: caches are not known
    here.
    """
    return sum(times * _moved(one, within, module) for one, within, times in module.instructions())


def _moved(one: Instruction, within: Computation, module: Module) -> float:
    if one.opcode in _NOTHING or one.opcode in ASYNC or one.opcode.endswith("-done"):
        return 0
    if one.opcode == "custom-call" and _NAMES.search(one.attributes):
        return 0
    if one.opcode == "fusion":
        ((_, name),) = one.called
        return _moved_by_fusion(one, within, module.computations[name])
    written = _main_bytes(one.shape)
    match one.opcode:
        case "dynamic-slice" | "slice" | "gather":
            return written + _sliced(one.arrays[0], one, within)
        case "slice-start" | "dynamic-slice-start":
            part = one.arrays[1]  # beside its operand
            return _in_main(part) + _sliced(part, one, within)
        case "dynamic-update-slice":
            return 2 * _operand_bytes(one.operands[1], within)
    if one.opcode.endswith("-start") and one.opcode != "all-reduce-start":
        return written  # its result holds its operands, too
    return written + _operand_sum(one, within)


def _moved_by_fusion(one: Instruction, within: Computation, body: Computation) -> float:
    """What is read of each operand, and what is written of the result."""
    total = 0.0
    inner = list(body.instructions.values())
    parameters = {int(x.inside): x for x in inner if x.opcode == "parameter"}
    for number, name in enumerate(one.operands):
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
    # Where a result leaves the main memory says the fusion's own shape alone.
    return total if _main_bytes(one.shape) else total - sum(_main_bytes(x.shape) for x in results)


def _read(name: str, by: Instruction, body: Computation) -> float:
    """What an instruction within a fusion reads of a parameter."""
    if by.opcode in ("dynamic-slice", "slice", "gather") and by.operands[0] == name:
        return _main_bytes(by.shape)
    if by.opcode == "dynamic-update-slice" and by.operands[0] == name:
        return 0  # in place
    return float("inf")


def _sliced(part: Array, one: Instruction, within: Computation) -> float:
    """What is read of an operand of which a part is taken, wherever that goes."""
    return min(part.bytes, _operand_bytes(one.operands[0], within))


def _operand_sum(one: Instruction, within: Computation) -> float:
    return sum(_operand_bytes(name, within) for name in one.operands)


def _operand_bytes(name: str, within: Computation) -> float:
    one = within.instructions.get(name)
    return 0 if one is None else _main_bytes(one.shape)


def _main_bytes(shape: str) -> float:
    return sum(map(_in_main, arrays_of(shape)))


def _in_main(array: Array) -> float:
    return array.bytes if array.space == 0 else 0

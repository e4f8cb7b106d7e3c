"""The order of the collectives of a compiled program."""

from collections.abc import Mapping, Sequence

from spmdtrain.xla.hlo import Computation, Instruction, Module

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def unordered_collectives(text: str) -> list[tuple[str, str]]:
    """Returns pairs (loop or branch with collectives, later collective independent of it).

    XLA's CPU client starts the later one while the loop is still running, so that devices may wait
    in different collectives forever.

    Args:
      text: The HLO of a compiled program, whose instructions are in the order of execution.
    """
    computations = Module(text).computations
    communicates: dict[str, bool] = {}

    def called_communicate(instruction: Instruction) -> bool:
        for _, name in instruction.called:
            if name not in communicates and name in computations:
                inside = computations[name].instructions.values()
                communicates[name] = any(is_collective(x) or called_communicate(x) for x in inside)
        return any(communicates.get(name, False) for _, name in instruction.called)

    def is_collective(instruction: Instruction) -> bool:
        return instruction.opcode.removesuffix("-start") in KINDS

    found = []
    for computation in computations.values():
        users = _users(computation)
        open_loops: list[tuple[str, set[str]]] = []
        for instruction in computation.instructions.values():
            is_loop = called_communicate(instruction)
            if is_loop or is_collective(instruction):
                found += [
                    (loop, instruction.name)
                    for loop, dependent in open_loops
                    if instruction.name not in dependent
                ]
            if is_loop:
                open_loops.append((instruction.name, _dependent(instruction.name, users)))
    return found


def _users(computation: Computation) -> dict[str, list[str]]:
    users: dict[str, list[str]] = {}
    for instruction in computation.instructions.values():
        for operand in instruction.operands:
            users.setdefault(operand, []).append(instruction.name)
    return users


def _dependent(first: str, users: Mapping[str, Sequence[str]]) -> set[str]:
    seen, remaining = {first}, [first]
    while remaining:
        new = set(users.get(remaining.pop(), ())) - seen
        seen |= new
        remaining += new
    return seen

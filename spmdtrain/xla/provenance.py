"""The model parameters that a value of a compiled step comes from, or whose update it feeds."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from spmdtrain.xla.hlo_parser import ASYNC, INDEX, Computation, Instruction, Module

_ALIASES = re.compile(r"\{(\d*)\}: \((\d+), \{\}")
_TRANSFER = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')

# Operations that move or convert their operand.
_MOVES = frozenset(
    (
        *("copy", "bitcast", "convert", "reshape", "transpose", "slice", "dynamic-slice", "pad"),
        *("reduce-precision", "optimization-barrier", "opt-barrier", "reverse", "bitcast-convert"),
        *("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all"),
        *("ragged-all-to-all", "collective-broadcast", "concatenate", "dynamic-update-slice"),
        *("select", "async", "call-done", "recv-done", "custom-call"),
    )
)
# Each result of these is a form of the operand with the same index.
_SIDE_BY_SIDE = frozenset(
    (
        *("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all"),
        "collective-broadcast",
    )
)
# Operations that produce different data: their result is no longer a gradient of a parameter.
_ENDS = frozenset(
    (
        *("dot", "convolution", "reduce", "reduce-window", "gather", "broadcast"),
        *("compare", "is-finite", "iota", "constant", "rng-bit-generator", "sort", "send-done"),
    )
)
_CALLS = ("fusion", "call", *ASYNC)
_PASSES = frozenset(("parameter", "get-tuple-element", "tuple", "while", "conditional", *_CALLS))


@dataclass(frozen=True)
class Origin:
    """Relation of a value to the model parameters.

    Attributes:
      parameters: Model parameters, such as `dense/kernel`. The value consists of copies or
        conversions of them, or it feeds their gradients or new values.
      is_source: Whether the value is a moved or converted form of the parameters.
    """

    parameters: tuple[str, ...]
    is_source: bool

    @property
    def parameter(self) -> str:
        """The parameter if there is exactly one, else ""."""
        return self.parameters[0] if len(self.parameters) == 1 else ""


@dataclass(frozen=True)
class _Value:
    """An array of an instruction's result: the path to it within a tuple, or () for no tuple."""

    computation: str
    name: str
    path: tuple[int, ...] = ()


_Step = Callable[[_Value], "Iterator[_Value | str]"]


class Origins:
    """The paths of values through a program, back to its arguments and on to its results.

    Args:
      parameters: Names of the model parameters by JAX's name of the argument, such as
        `state.params['dense']['kernel']`. A result is identified by the argument whose buffer it
        reuses.
      devices: Number of devices over which the state may be sharded. An array smaller than one such
        shard is not a form of the value any more.
    """

    def __init__(self, module: Module, parameters: Mapping[str, str], devices: int) -> None:
        self._module, self._parameters, self._devices = module, parameters, devices
        self._callers: dict[str, list[tuple[Instruction, str, str]]] = defaultdict(list)
        self._users: dict[tuple[str, str], list[Instruction]] = defaultdict(list)
        self._arguments: dict[int, str] = {}
        self._transfers: dict[tuple[str, str], list[_Value]] = defaultdict(list)
        for computation in module.computations.values():
            for instruction in computation.instructions.values():
                for role, inner in instruction.called:
                    self._callers[inner].append((instruction, role, computation.name))
                for name in instruction.operands:
                    self._users[computation.name, name].append(instruction)
                if computation.name == module.entry and instruction.opcode == "parameter":
                    self._arguments[int(instruction.inside)] = instruction.op_name
                if instruction.opcode in ("send", "recv") and (
                    known := _TRANSFER.search(instruction.attributes)
                ):
                    value = _Value(computation.name, instruction.name, (0,))
                    self._transfers[instruction.opcode, known[1]].append(value)
        self._replaced = {
            int(result or 0): int(argument) for result, argument in _ALIASES.findall(module.heading)
        }

    def parameters_of(
        self, instruction: Instruction, within: Computation, index: int = 0
    ) -> Origin:
        """Returns the parameters that a value is computed from by copies and conversions, or feeds.

        A value feeds a parameter if the parameter's update is computed from it. `index` selects the
        value if the instruction has several results.
        """
        value = self._value(instruction, within, index)
        for step in (self._behind, self._ahead):
            reached = self._reached(value, step)
            names = {self._parameters[path] for path in reached if path in self._parameters}
            if names:
                return Origin(tuple(sorted(names)), step == self._behind)
        return Origin((), False)

    def producer(
        self, instruction: Instruction, within: Computation, index: int = 0
    ) -> Instruction:
        """Returns an instruction that computed a value which was only moved since then.

        It is the first such instruction with an operation name; `instruction` if there is none.
        `index` selects the value if the instruction has several results.
        """
        start = self._value(instruction, within, index)
        seen, waiting = {start}, [start]
        while waiting:
            value = waiting.pop()
            candidate, _ = self._get(value)
            if candidate is None:
                continue
            opcode = candidate.opcode
            if opcode not in _PASSES and not _moves(opcode) and candidate.op_name:
                return candidate
            for behind in self._behind(value):
                if isinstance(behind, _Value) and behind not in seen:
                    seen.add(behind)
                    waiting.append(behind)
        return instruction

    def _value(self, instruction: Instruction, within: Computation, index: int) -> _Value:
        """Returns the result with an index; a started collective has one result per operand."""
        several = instruction.shape.startswith("(") and bool(instruction.arrays)
        if instruction.opcode.endswith("-start"):
            several = len(instruction.operands) > 1 and _base(instruction.opcode) in _SIDE_BY_SIDE
        return _Value(within.name, instruction.name, (index,) if several else ())

    def _reached(self, start: _Value, step: _Step) -> set[str]:
        names: set[str] = set()
        seen, waiting = {start}, [start]
        while waiting:
            for value in step(waiting.pop()):
                if isinstance(value, str):
                    names.add(value)
                elif value not in seen:
                    seen.add(value)
                    waiting.append(value)
        return names

    def _get(self, value: _Value) -> tuple[Instruction | None, Computation]:
        within = self._module.computations[value.computation]
        return within.instructions.get(value.name), within

    def _behind(self, value: _Value) -> Iterator[_Value | str]:
        """Yields the values or arguments that a value is a moved or converted form of."""
        instruction, within = self._get(value)
        if instruction is None:
            return
        name, path = within.name, value.path
        match instruction.opcode:
            case "parameter" if name == self._module.entry:
                yield self._arguments[int(instruction.inside)]
            case "parameter":
                for caller, role, outer in self._callers[name]:
                    place = _operand_of(caller, name, int(instruction.inside))
                    if place < len(caller.operands):
                        yield _Value(outer, caller.operands[place], path)
                    if role == "body":
                        yield _Value(name, within.root.name, path)
            case "get-tuple-element":
                yield _Value(name, instruction.operands[0], (_index(instruction), *path))
            case "tuple" if path:
                yield _Value(name, instruction.operands[path[0]], path[1:])
            case "while":
                yield _Value(name, instruction.operands[0], path)
                yield self._root(dict(instruction.called)["body"], path)
            case "conditional":
                yield from (self._root(branch, path) for _, branch in instruction.called)
            case opcode if opcode in _CALLS:
                yield self._root(instruction.called[0][1], path)
            case "recv":
                yield from self._transfers["send", _transfer(instruction)]
            case "send":
                yield _Value(name, instruction.operands[0])
            case opcode if _moves(opcode):
                yield from (
                    _Value(name, operand, rest) for operand, rest in _given(instruction, path)
                )

    def _ahead(self, value: _Value) -> Iterator[_Value | str]:
        """Yields the values or arguments that are computed elementwise from a value."""
        instruction, within = self._get(value)
        if instruction is None:
            return
        name, path = within.name, value.path
        if instruction.is_root:
            yield from self._beyond(within, path)
        if instruction.opcode == "send":
            yield from self._transfers["recv", _transfer(instruction)]
            return
        for user in self._users[name, instruction.name]:
            places = [n for n, operand in enumerate(user.operands) if operand == instruction.name]
            match user.opcode:
                case "get-tuple-element":
                    if path[:1] == (_index(user),):
                        yield _Value(name, user.name, path[1:])
                case "tuple":
                    yield from (_Value(name, user.name, (place, *path)) for place in places)
                case "while":
                    body = dict(user.called)["body"]
                    yield from (_Value(body, x.name, path) for x in self._parameters_in(body))
                case "conditional":
                    for _, branch in user.called:
                        for x in self._parameters_in(branch):
                            if _operand_of(user, branch, int(x.inside)) in places:
                                yield _Value(branch, x.name, path)
                case opcode if opcode in _CALLS:
                    called = user.called[0][1]
                    for x in self._parameters_in(called):
                        if int(x.inside) in places:
                            yield _Value(called, x.name, path)
                case "send":
                    yield _Value(name, user.name, (0,))
                case "scatter" if 0 not in places:
                    continue  # the result is a form of the array, not of the updates
                case opcode if _base(opcode) not in _ENDS and self._is_form(user, instruction):
                    if path or opcode.endswith("-done"):
                        yield _Value(name, user.name, path)
                    elif _base(opcode) in _SIDE_BY_SIDE and len(user.operands) > 1:
                        yield from (_Value(name, user.name, (place,)) for place in places)
                    else:
                        yield _Value(name, user.name)

    def _beyond(self, within: Computation, path: tuple[int, ...]) -> Iterator[_Value | str]:
        """Yields the values or arguments that take the result of a computation."""
        if within.name == self._module.entry:
            argument = self._replaced.get(path[0] if path else 0)
            if argument is not None:
                yield self._arguments[argument]
            return
        for caller, role, outer in self._callers[within.name]:
            if role != "condition":
                yield _Value(outer, caller.name, path)

    def _root(self, name: str, path: tuple[int, ...]) -> _Value:
        return _Value(name, self._module.computations[name].root.name, path)

    def _parameters_in(self, name: str) -> list[Instruction]:
        inner = self._module.computations[name].instructions.values()
        return [instruction for instruction in inner if instruction.opcode == "parameter"]

    def _is_form(self, result: Instruction, operand: Instruction) -> bool:
        """Returns whether a result is as large as its operand or a device's shard of it."""
        if _moves(result.opcode):
            return True
        whole, size = (
            max((math.prod(x.dims) for x in y.arrays), default=0) for y in (operand, result)
        )
        return size <= whole <= size * self._devices


def _operand_of(caller: Instruction, inner: str, parameter: int) -> int:
    """Returns the index of the caller's operand for a parameter of a called computation."""
    if caller.opcode == "conditional":  # operand 0 selects the branch; each branch has one more
        return 1 + [name for _, name in caller.called].index(inner)
    return 0 if caller.opcode == "while" else parameter


def _base(opcode: str) -> str:
    """Returns `all-gather` for `all-gather-start`; opcodes in `_MOVES` stay unchanged."""
    return opcode if opcode in _MOVES else opcode.removesuffix("-start").removesuffix("-done")


def _moves(opcode: str) -> bool:
    return opcode not in ASYNC and _base(opcode) in _MOVES


def _given(
    instruction: Instruction, path: tuple[int, ...]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the operands whose data form a result, each with the path within the operand."""
    base = _base(instruction.opcode)
    if instruction.opcode.endswith("-done"):
        yield instruction.operands[0], path
    elif base in _SIDE_BY_SIDE and len(instruction.operands) > 1:
        place = path[0] if path else 0
        if place < len(instruction.operands):
            yield instruction.operands[place], ()
    elif base == "select":
        yield from ((name, path) for name in instruction.operands[1:])
    elif base == "dynamic-update-slice":
        yield from ((name, ()) for name in instruction.operands[:2])
    elif base in ("concatenate", "custom-call"):  # such as a TPU's ConcatBitcast
        yield from ((name, ()) for name in instruction.operands)
    elif instruction.operands:
        is_tuple = base in ("optimization-barrier", "opt-barrier")
        yield instruction.operands[0], path if is_tuple else ()


def _transfer(instruction: Instruction) -> str:
    match = _TRANSFER.search(instruction.attributes)
    return match[1] if match else ""


def _index(instruction: Instruction) -> int:
    match = INDEX.search(instruction.attributes)
    return int(match[1]) if match else 0

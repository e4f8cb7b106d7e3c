"""Which part of the state a value within a compiled step is, or becomes."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from spmdtrain.xla.hlo_parser import ASYNC, INDEX, Computation, Instruction, Module

_ALIASES = re.compile(r"\{(\d*)\}: \((\d+), \{\}")
_TRANSFER = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')

# What hands on the data that it is given, in another form or at another place.
_MOVES = frozenset(
    (
        *("copy", "bitcast", "convert", "reshape", "transpose", "slice", "dynamic-slice", "pad"),
        *("reduce-precision", "optimization-barrier", "opt-barrier", "reverse", "bitcast-convert"),
        *("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all"),
        *("ragged-all-to-all", "collective-broadcast", "concatenate", "dynamic-update-slice"),
        *("select", "async", "call-done", "recv-done", "custom-call"),
    )
)
# Of these each result is a form of the operand in its place.
_SIDE_BY_SIDE = frozenset(
    (
        *("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all"),
        "collective-broadcast",
    )
)
# What makes other data of it: a gradient that meets one of these is no gradient after.
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
    """What a value is to the model.

    Attributes:
        parameters: The model parameters, `dense/kernel`, that it is a form of, or that are made of
            it.
        is_source: Whether it is these, moved or converted, and not what they become.
    """

    parameters: tuple[str, ...]
    is_source: bool

    @property
    def parameter(self) -> str:
        """The only one, else ""."""
        return self.parameters[0] if len(self.parameters) == 1 else ""


@dataclass(frozen=True)
class _Value:
    """An array of an instruction's result: the path to it within a tuple, () where it is none."""

    computation: str
    name: str
    path: tuple[int, ...] = ()


_Step = Callable[[_Value], "Iterator[_Value | str]"]


class Origins:
    """Follows values through a program: back to the arguments, and on to the results.

    Args:
        module: The program.
        parameters: The model parameters by what JAX calls them where they are arguments
            (`state.params['dense']['kernel']`). A result is known by the argument whose place it
            takes.
        devices: How many share the state: what is a smaller part of it than one of these is no
            form of it any more.
    """

    def __init__(self, module: Module, parameters: Mapping[str, str], devices: int) -> None:
        self._module, self._parameters, self._devices = module, parameters, devices
        self._callers: dict[str, list[tuple[Instruction, str, str]]] = defaultdict(list)
        self._users: dict[tuple[str, str], list[Instruction]] = defaultdict(list)
        self._arguments: dict[int, str] = {}
        self._transfers: dict[tuple[str, str], list[_Value]] = defaultdict(list)
        for computation in module.computations.values():
            for one in computation.instructions.values():
                for role, inner in one.called:
                    self._callers[inner].append((one, role, computation.name))
                for name in one.operands:
                    self._users[computation.name, name].append(one)
                if computation.name == module.entry and one.opcode == "parameter":
                    self._arguments[int(one.inside)] = one.op_name
                if one.opcode in ("send", "recv") and (known := _TRANSFER.search(one.attributes)):
                    value = _Value(computation.name, one.name, (0,))
                    self._transfers[one.opcode, known[1]].append(value)
        self._replaced = {
            int(result or 0): int(argument) for result, argument in _ALIASES.findall(module.heading)
        }

    def parameters_of(self, one: Instruction, within: Computation, index: int = 0) -> Origin:
        """The model parameters that a value is a form of, or that are made of it."""
        value = self._value(one, within, index)
        for step in (self._behind, self._ahead):
            reached = self._reached(value, step)
            names = {self._parameters[path] for path in reached if path in self._parameters}
            if names:
                return Origin(tuple(sorted(names)), step == self._behind)
        return Origin((), False)

    def producer(self, one: Instruction, within: Computation, index: int = 0) -> Instruction:
        """What computed a value that has only been moved since: the first that is found."""
        start = self._value(one, within, index)
        seen, waiting = {start}, [start]
        while waiting:
            value = waiting.pop()
            maker, _ = self._get(value)
            if maker is None:
                continue
            if maker.opcode not in _PASSES and not _moves(maker.opcode) and maker.op_name:
                return maker
            for behind in self._behind(value):
                if isinstance(behind, _Value) and behind not in seen:
                    seen.add(behind)
                    waiting.append(behind)
        return one

    def _value(self, one: Instruction, within: Computation, index: int) -> _Value:
        """The result of that number; what has begun and is not done has one for each operand."""
        several = one.shape.startswith("(")
        if one.opcode.endswith("-start"):
            several = len(one.operands) > 1 and _base(one.opcode) in _SIDE_BY_SIDE
        return _Value(within.name, one.name, (index,) if several else ())

    def _reached(self, start: _Value, step: _Step) -> set[str]:
        found: set[str] = set()
        seen, waiting = {start}, [start]
        while waiting:
            for value in step(waiting.pop()):
                if isinstance(value, str):
                    found.add(value)
                elif value not in seen:
                    seen.add(value)
                    waiting.append(value)
        return found

    def _get(self, value: _Value) -> tuple[Instruction | None, Computation]:
        within = self._module.computations[value.computation]
        return within.instructions.get(value.name), within

    def _behind(self, value: _Value) -> Iterator[_Value | str]:
        """What a value is a form of."""
        one, within = self._get(value)
        if one is None:
            return
        here, path = within.name, value.path
        match one.opcode:
            case "parameter" if here == self._module.entry:
                yield self._arguments[int(one.inside)]
            case "parameter":
                for caller, role, outer in self._callers[here]:
                    place = _operand_of(caller, here, int(one.inside))
                    if place < len(caller.operands):
                        yield _Value(outer, caller.operands[place], path)
                    if role == "body":
                        yield _Value(here, within.root.name, path)
            case "get-tuple-element":
                yield _Value(here, one.operands[0], (_index(one), *path))
            case "tuple" if path:
                yield _Value(here, one.operands[path[0]], path[1:])
            case "while":
                yield _Value(here, one.operands[0], path)
                yield self._root(dict(one.called)["body"], path)
            case "conditional":
                yield from (self._root(name, path) for _, name in one.called)
            case opcode if opcode in _CALLS:
                yield self._root(one.called[0][1], path)
            case "recv":
                yield from self._transfers["send", _transfer(one)]
            case "send":
                yield _Value(here, one.operands[0])
            case opcode if _moves(opcode):
                yield from (_Value(here, name, rest) for name, rest in _given(one, path))

    def _ahead(self, value: _Value) -> Iterator[_Value | str]:
        """What is made of a value alone, element by element."""
        one, within = self._get(value)
        if one is None:
            return
        here, path = within.name, value.path
        if one.is_root:
            yield from self._beyond(within, path)
        if one.opcode == "send":
            yield from self._transfers["recv", _transfer(one)]
            return
        for user in self._users[here, one.name]:
            places = [place for place, name in enumerate(user.operands) if name == one.name]
            match user.opcode:
                case "get-tuple-element":
                    if path[:1] == (_index(user),):
                        yield _Value(here, user.name, path[1:])
                case "tuple":
                    yield from (_Value(here, user.name, (place, *path)) for place in places)
                case "while":
                    body = dict(user.called)["body"]
                    yield from (_Value(body, x.name, path) for x in self._parameters_in(body))
                case "conditional":
                    for _, name in user.called:
                        for x in self._parameters_in(name):
                            if _operand_of(user, name, int(x.inside)) in places:
                                yield _Value(name, x.name, path)
                case opcode if opcode in _CALLS:
                    name = user.called[0][1]
                    for x in self._parameters_in(name):
                        if int(x.inside) in places:
                            yield _Value(name, x.name, path)
                case "send":
                    yield _Value(here, user.name, (0,))
                case "scatter" if 0 not in places:
                    continue  # of what is added to an array elsewhere it is no form
                case opcode if _base(opcode) not in _ENDS and self._is_form(user, one):
                    if path or opcode.endswith("-done"):
                        yield _Value(here, user.name, path)
                    elif _base(opcode) in _SIDE_BY_SIDE and len(user.operands) > 1:
                        yield from (_Value(here, user.name, (place,)) for place in places)
                    else:
                        yield _Value(here, user.name)

    def _beyond(self, within: Computation, path: tuple[int, ...]) -> Iterator[_Value | str]:
        """Where the result of a computation goes."""
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
        return [one for one in inner if one.opcode == "parameter"]

    def _is_form(self, made: Instruction, of: Instruction) -> bool:
        """Whether an array is as large as another, or a device's part of it."""
        if _moves(made.opcode):
            return True
        whole, size = (max((math.prod(x.dims) for x in y.arrays), default=0) for y in (of, made))
        return size <= whole <= size * self._devices


def _operand_of(caller: Instruction, inner: str, parameter: int) -> int:
    """Which operand of an instruction a parameter of a computation that it calls is."""
    if caller.opcode == "conditional":  # after what chooses, one for each branch
        return 1 + [name for _, name in caller.called].index(inner)
    return 0 if caller.opcode == "while" else parameter


def _base(opcode: str) -> str:
    """`all-gather` of `all-gather-start`; what is known by its whole name stays as it is."""
    return opcode if opcode in _MOVES else opcode.removesuffix("-start").removesuffix("-done")


def _moves(opcode: str) -> bool:
    return opcode not in ASYNC and _base(opcode) in _MOVES


def _given(one: Instruction, path: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The operands whose data a result is, each with the path to it there."""
    base = _base(one.opcode)
    if one.opcode.endswith("-done"):
        yield one.operands[0], path
    elif base in _SIDE_BY_SIDE and len(one.operands) > 1:
        place = path[0] if path else 0
        if place < len(one.operands):
            yield one.operands[place], ()
    elif base == "select":
        yield from ((name, path) for name in one.operands[1:])
    elif base == "dynamic-update-slice":
        yield from ((name, ()) for name in one.operands[:2])
    elif base in ("concatenate", "custom-call"):  # a TPU's ConcatBitcast
        yield from ((name, ()) for name in one.operands)
    elif one.operands:
        is_tuple = base in ("optimization-barrier", "opt-barrier")
        yield one.operands[0], path if is_tuple else ()


def _transfer(one: Instruction) -> str:
    match = _TRANSFER.search(one.attributes)
    return match[1] if match else ""


def _index(one: Instruction) -> int:
    match = INDEX.search(one.attributes)
    return int(match[1]) if match else 0

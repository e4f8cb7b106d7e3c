"""Which part of the state a value within a compiled step is, or becomes."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from spmdtrain.hlo_module import Computation, Instruction, Module

_ALIASES = re.compile(r"\{(\d*)\}: \((\d+), \{\}")
_NAMES = re.compile(r"\[\\?['\"]?([^\]'\"\\]+)\\?['\"]?\]|\.(\w+)")
_INDEX = re.compile(r"\bindex=(\d+)")

# What hands on the data that it is given, in another form or at another place.
_MOVES = frozenset(
    (
        *("copy", "bitcast", "convert", "reshape", "transpose", "slice", "dynamic-slice", "pad"),
        *("reduce-precision", "optimization-barrier", "opt-barrier", "reverse", "bitcast-convert"),
        *("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all"),
        *("collective-broadcast", "concatenate", "dynamic-update-slice", "select", "copy-start"),
        *("copy-done", "async-done", "async-update", "call-done", "custom-call"),
    )
)
# What makes other data of it: a gradient that meets one of these is no gradient after.
_ENDS = frozenset(
    (
        *("dot", "convolution", "reduce", "reduce-window", "gather", "scatter", "broadcast"),
        *("compare", "is-finite", "iota", "constant", "rng-bit-generator", "sort"),
    )
)


_PASSES = frozenset(("parameter", "get-tuple-element", "tuple", "while", "call", "fusion"))
_PARAMETERS = "state.params"


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
    """An array of an instruction's result: the only one, or one of a tuple."""

    computation: str
    name: str
    index: int = 0


class Origins:
    """Follows values through a program: back to the arguments, and on to the results.

    Args:
        module: The program. What names a part of the state is the pytree path that JAX gives each
            argument, and each result by the argument whose place it takes.
        devices: How many share the state: what is a smaller part of it than one of these is no
            form of it any more.
    """

    def __init__(self, module: Module, devices: int) -> None:
        self._module, self._devices = module, devices
        self._callers: dict[str, list[tuple[Instruction, str, str]]] = defaultdict(list)
        self._users: dict[tuple[str, str], list[Instruction]] = defaultdict(list)
        self._arguments: dict[int, str] = {}
        for computation in module.computations.values():
            for one in computation.instructions.values():
                for role, inner in one.called:
                    self._callers[inner].append((one, role, computation.name))
                for name in one.operands:
                    self._users[computation.name, name].append(one)
                if computation.name == module.entry and one.opcode == "parameter":
                    self._arguments[int(one.inside)] = one.op_name.replace("\\", "")
        self._replaced = {
            int(result or 0): int(argument) for result, argument in _ALIASES.findall(module.heading)
        }

    def parameters_of(self, one: Instruction, within: Computation, index: int = 0) -> Origin:
        """The model parameters that a value is a form of, or that are made of it."""
        value = _Value(within.name, one.name, index)
        for step in (self._behind, self._ahead):
            found = {path for path in self._reached(value, step) if path.startswith(_PARAMETERS)}
            if found:
                names = sorted(_path_name(path.removeprefix(_PARAMETERS)) for path in found)
                return Origin(tuple(names), step == self._behind)
        return Origin((), False)

    def made_by(self, one: Instruction, within: Computation, index: int = 0) -> Instruction:
        """What computed a value that has only been moved since: the first that is found."""
        start = _Value(within.name, one.name, index)
        seen, waiting = {start}, [start]
        while waiting:
            value = waiting.pop()
            maker, _ = self._get(value)
            if maker is None:
                continue
            if maker.opcode not in _PASSES and _base(maker.opcode) not in _MOVES and maker.op_name:
                return maker
            for behind in self._behind(value):
                if isinstance(behind, _Value) and behind not in seen:
                    seen.add(behind)
                    waiting.append(behind)
        return one

    def _reached(
        self, start: _Value, step: Callable[[_Value], Iterator["_Value | str"]]
    ) -> set[str]:
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
        here, index = within.name, value.index
        match one.opcode:
            case "parameter" if here == self._module.entry:
                yield self._arguments[int(one.inside)]
            case "parameter":
                for caller, role, outer in self._callers[here]:
                    if role in ("body", "condition"):
                        yield _Value(outer, caller.operands[0], index)
                    elif int(one.inside) < len(caller.operands):
                        yield _Value(outer, caller.operands[int(one.inside)], index)
                    if role == "body":
                        yield from self._result(within, index)
            case "get-tuple-element":
                yield _Value(here, one.operands[0], _index(one))
            case "tuple":
                yield _Value(here, one.operands[index])
            case "while":
                yield _Value(here, one.operands[0], index)
                yield from self._result(self._module.computations[dict(one.called)["body"]], index)
            case "fusion" | "call" | "async-start" | "call-start":
                ((_, name), *_) = one.called
                yield from self._result(self._module.computations[name], index)
            case opcode if _base(opcode) in _MOVES:
                yield from (_Value(here, name, index) for name in _given(one, index))

    def _ahead(self, value: _Value) -> Iterator[_Value | str]:
        """What is made of a value alone, element by element."""
        one, within = self._get(value)
        if one is None:
            return
        here = within.name
        if one.is_root:
            yield from self._beyond(within, value.index)
        several = one.shape.startswith("(")
        for user in self._users[here, one.name]:
            places = [place for place, name in enumerate(user.operands) if name == one.name]
            match user.opcode:
                case "get-tuple-element":
                    if _index(user) == value.index:
                        yield _Value(here, user.name)
                case "tuple":
                    yield from (_Value(here, user.name, place) for place in places)
                case "while":
                    body = self._module.computations[dict(user.called)["body"]]
                    yield from (_Value(body.name, x.name, value.index) for x in _parameters(body))
                case "fusion" | "call" | "async-start" | "call-start":
                    ((_, name), *_) = user.called
                    inner = self._module.computations[name]
                    for x in _parameters(inner):
                        if int(x.inside) in places:
                            yield _Value(inner.name, x.name, value.index)
                case opcode if _base(opcode) not in _ENDS and self._is_form(user, one):
                    passes = several and _base(opcode) in _MOVES
                    index = value.index if passes else places[0] if user.shape[0] == "(" else 0
                    yield _Value(here, user.name, index)

    def _beyond(self, within: Computation, index: int) -> Iterator[_Value | str]:
        """Where the result of a computation goes."""
        if within.name == self._module.entry:
            if (argument := self._replaced.get(index)) is not None:
                yield self._arguments[argument]
            return
        for caller, role, outer in self._callers[within.name]:
            if role != "condition":
                yield _Value(outer, caller.name, index)

    def _result(self, inner: Computation, index: int) -> Iterator[_Value]:
        root = inner.root
        if root.opcode == "tuple":
            yield _Value(inner.name, root.operands[index])
        else:
            yield _Value(inner.name, root.name, index)

    def _is_form(self, made: Instruction, of: Instruction) -> bool:
        """Whether an array is as large as another, or a device's part of it."""
        if _base(made.opcode) in _MOVES:
            return True
        whole, size = (max((_size(x.dims) for x in y.arrays), default=0) for y in (of, made))
        return size <= whole <= size * self._devices


def _path_name(path: str) -> str:
    """`['dense']['kernel']` as `dense/kernel`."""
    return "/".join(quoted or dotted for quoted, dotted in _NAMES.findall(path)) or path


def _base(opcode: str) -> str:
    """`all-gather` of `all-gather-done`; what is known by its whole name stays as it is."""
    return opcode if opcode in _MOVES else opcode.removesuffix("-start").removesuffix("-done")


def _given(one: Instruction, index: int) -> tuple[str, ...]:
    """The operands whose data an element of a result is."""
    match one.opcode:
        case "select":
            return one.operands[1:]
        case "dynamic-update-slice":
            return one.operands[:2]
        case "concatenate" | "custom-call":  # a TPU's ConcatBitcast
            return one.operands
        case opcode if opcode.startswith("all-") and len(one.operands) > index:
            return one.operands[index : index + 1]
    return one.operands[:1]


def _parameters(computation: Computation) -> list[Instruction]:
    return [one for one in computation.instructions.values() if one.opcode == "parameter"]


def _index(one: Instruction) -> int:
    match = _INDEX.search(one.attributes)
    return int(match[1]) if match else 0


def _size(dims: tuple[int, ...]) -> int:
    size = 1
    for dim in dims:
        size *= dim
    return size

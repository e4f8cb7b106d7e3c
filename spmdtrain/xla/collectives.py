"""The collectives of a compiled step, and the parameters that values come from."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jax.sharding import Mesh

from spmdtrain.document.terminal import byte_size
from spmdtrain.xla.hlo import (
    ASYNC,
    INDEX,
    Array,
    Computation,
    Instruction,
    Module,
    UnreadableProgramError,
    arrays_of,
    reading_program,
)

# -- The model parameters that a value of a compiled step comes from, or whose update it feeds -----

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


# -- The collectives of a compiled step, from its optimized HLO text -------------------------------

KINDS = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)

_LAYOUT = re.compile(r"\{[^{}]*\}")
# An element of a tuple: an inner tuple or an array.
_ELEMENT = re.compile(r"\([^()]*\)|\w+\[[^\]]*\]")
# TPU programs contain one collective several times, once in each fusion that executes a part of it.
# The channel alone does not identify it: a function that is called twice keeps its channel.
_PIECE = re.compile(r'(channel_id=\d+).*(chain_id="\d+").*"async_collective_fusion_config"')
# On TPUs a reduce-scatter is a computation of this name: an all-reduce, and the slice of a device.
_SCATTERING = "all-reduce-scatter"
# Between TPU slices the hosts send a collective, each the part of its own slice.
_BETWEEN_SLICES = re.compile(
    r'_xla_megascale_target="\{([\d,]+)\}.*_xla_megascale_transfer_type="(\w+)"'
)
_IS_SYNC = '"is_sync":true'

_MOST_TEXT = 2**27  # characters of a program; reading so many takes a minute
_MOST_DEVICES = 2**24  # of a program; a larger number in its text is invalid
_LISTS = re.compile(r"(replica_groups|source_target_pairs)=\{([\d,{} ]*)\}")
_IOTA = re.compile(r"replica_groups=(\[[\d,]+\])<=(\[[\d,]+\](?:T\([\d,]+\))?)")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^{}]*)\}")


@dataclass(frozen=True)
class Carried:
    """One array of a collective.

    Attributes:
      parameters: Model parameters that the array contains, or whose gradients or new values it
        contains.
      is_parameter: Whether it contains the parameters themselves.
      bytes: Size, as in `Collective`.
      elements: Number of elements in `bytes`.
    """

    parameters: tuple[str, ...]
    is_parameter: bool
    bytes: int
    elements: int


@dataclass(frozen=True)
class Collective:
    """One collective instruction of a compiled step.

    Attributes:
      kind: XLA's name, such as "all-reduce", without `-start`.
      axes: Mesh axes along which the devices of a group differ, in mesh order; empty if unknown. A
        group may span a part of an axis: see `group_size`.
      group_size: Number of devices that communicate; 0 if unknown. For a permute, the longest chain
        of devices that send to each other.
      bytes: Size of the whole payload on one device, summed over the arrays: the result of an
        all-gather, the operand of a reduce-scatter (the result if the group is unknown). For other
        kinds operand and result have the same size; a ragged all-to-all counts its result buffer,
        an upper bound.
      arrays: Number of arrays in the collective.
      op_name: JAX operation that it comes from (one of them if XLA combined several), or "".
      line: Source line of the user that it comes from, or "".
      times: Number of executions in a step: the product of the trip counts of its loops.
      overlapped: Whether XLA runs other instructions at the same time.
      group: Partition ids of one of its groups; empty if unknown.
      carries: Its arrays; empty unless `collectives_of` was called with origins.
      name: The instruction; of several pieces the first.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    bytes: int
    arrays: int
    op_name: str = ""
    line: str = ""
    times: float = 1
    overlapped: bool = False
    group: tuple[int, ...] = field(default=(), compare=False)
    carries: tuple[Carried, ...] = ()
    name: str = field(default="", compare=False)


def collectives(hlo_text: str, mesh: Mesh) -> list[Collective]:
    """Returns the collectives of a compiled step: `collectives(compiled.as_text(), mesh)`.

    They are in the order of the text. A collective in a loop is listed once. Collectives whose
    groups are single devices are omitted because they send nothing. If its groups cannot be parsed,
    a collective has empty `axes` and `group_size` 0 instead of raising an error, because a report
    must not end a run.

    Args:
      hlo_text: Optimized HLO.
      mesh: Mesh of the step. XLA's partition ids are positions in `mesh.devices.flat`.

    Raises:
      UnreadableProgramError: If XLA wrote the program in an unknown format.
    """
    return collectives_of(Module(hlo_text), mesh)


@reading_program()
def collectives_of(module: Module, mesh: Mesh, origins: Origins | None = None) -> list[Collective]:
    """Returns the collectives of a parsed program; see `collectives`.

    With the origins of the program's values, `Collective.carries` is set.
    """
    result: list[Collective] = []
    pieces: dict[tuple[str, ...], int] = {}
    inside_async = {
        name
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode in ASYNC
        for _, name in instruction.called
    }
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            times = module.times.get(computation.name, 1)
            if instruction.opcode == "send" and (
                match := _BETWEEN_SLICES.search(instruction.attributes)
            ):
                source = _source(instruction, computation, origins)
                result.append(
                    replace(
                        _between_slices(instruction, match, times, mesh),
                        op_name=source.op_name,
                        line=module.line_of(source),
                        carries=_carried(
                            instruction, computation, instruction.arrays[:1], 1, origins
                        ),
                    )
                )
            started = instruction.opcode.endswith("-start")
            kind = instruction.opcode.removesuffix("-start")
            if kind not in KINDS:
                continue
            if kind == "all-reduce" and computation.name.startswith(_SCATTERING):
                kind = "reduce-scatter"
            piece = _PIECE.search(instruction.attributes)
            if piece and (kind, *piece.groups()) in pieces:
                # The whole collective runs as often as the piece that runs least often.
                first = pieces[kind, *piece.groups()]
                result[first] = replace(result[first], times=min(times, result[first].times))
                continue
            groups = _groups(instruction.attributes, mesh.size)
            group_size = 0 if groups is None else groups.shape[1]
            if group_size == 1:
                continue
            if piece:
                pieces[kind, *piece.groups()] = len(result)
            arrays = _payload(instruction.shape, kind, started=started)
            whole = max(group_size, 1) if instruction.opcode.startswith("reduce-scatter") else 1
            source = _source(instruction, computation, origins)
            is_sync = _IS_SYNC in instruction.attributes
            is_async = started or piece is not None or computation.name in inside_async
            result.append(
                Collective(
                    kind=kind,
                    axes=() if groups is None else _axes(groups, mesh),
                    group_size=group_size,
                    bytes=sum(array.bytes for array in arrays) * whole,
                    arrays=len(arrays),
                    times=times,
                    overlapped=is_async and not is_sync,
                    group=() if groups is None else tuple(groups[0].tolist()),
                    carries=_carried(instruction, computation, arrays, whole, origins),
                    op_name=source.op_name,
                    line=module.line_of(source),
                    name=instruction.name,
                )
            )
    return result


def _carried(
    instruction: Instruction,
    within: Computation,
    arrays: Sequence[Array],
    whole: int,
    origins: Origins | None,
) -> tuple[Carried, ...]:
    if origins is None:
        return ()
    carried = []
    for index, array in enumerate(arrays):
        origin = origins.parameters_of(instruction, within, index)
        carried.append(
            Carried(
                parameters=origin.parameters,
                is_parameter=origin.is_source,
                bytes=array.bytes * whole,
                elements=math.prod(array.dims) * whole,
            )
        )
    return tuple(carried)


def _source(instruction: Instruction, within: Computation, origins: Origins | None) -> Instruction:
    """Returns the collective itself if it has an operation name, else the producer of its data."""
    if origins is None or instruction.op_name:
        return instruction
    return origins.producer(instruction, within)


def _between_slices(
    instruction: Instruction, match: re.Match[str], times: float, mesh: Mesh
) -> Collective:
    slices = len(_numbers(match[1]))
    # The devices of a slice are consecutive in a mesh.
    group = np.arange(slices) * (mesh.size // slices)
    return Collective(
        kind=match[2].lower().replace("_", "-"),
        axes=_axes(group[None], mesh),
        group_size=slices,
        bytes=instruction.arrays[0].bytes,
        arrays=1,
        times=times,
        overlapped=True,
        group=tuple(group.tolist()),
    )


def describe_collectives(step: Sequence[Collective], mesh: Mesh) -> str:
    """Returns a line such as `1 all-reduce, 1.08 MB, over data=8`, summed by kind and axes."""
    groups: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for each in step:
        groups.setdefault((each.kind, each.axes), []).append(each.bytes)
    parts = []
    for (kind, axes), sizes in sorted(groups.items(), key=lambda item: -sum(item[1])):
        over = " ".join(f"{axis}={mesh.shape[axis]}" for axis in axes) or "unknown axes"
        plural = "s" if len(sizes) > 1 else ""
        parts.append(f"{len(sizes)} {kind}{plural}, {byte_size(sum(sizes))}, over {over}")
    return "; ".join(parts) or "no collectives"


def find_collectives(hlo_text: str, mesh: Mesh | None) -> "list[Collective] | str":
    """Returns the collectives of a compiled step, or the reason why they are not known.

    `hlo_text` is optimized HLO. Without a mesh the step has no collectives.
    """
    if mesh is None:
        return []
    if len(hlo_text) > _MOST_TEXT:
        return f"the compiled step has {len(hlo_text):,} characters, more than {_MOST_TEXT:,}"
    try:
        return collectives(hlo_text, mesh)
    except UnreadableProgramError as error:  # a report must not end a run
        return str(error)


def describe_found(found: "list[Collective] | str", mesh: Mesh | None) -> str:
    """Returns a line about what `find_collectives` returned."""
    if isinstance(found, str):
        return f"collectives unknown: {found}"
    return "no collectives" if mesh is None else describe_collectives(found, mesh)


def _payload(shape: str, kind: str, started: bool) -> list[Array]:
    """Returns the result arrays of `f32[8,128]{1,0:T(8,128)}`, or of a tuple of such shapes."""
    shape = _LAYOUT.sub("", shape)
    if started and shape.startswith("("):
        # (operands, results, context ...). Only an all-reduce-start may have results alone; if it
        # also has operands, these are a nested tuple.
        elements = _ELEMENT.findall(shape[1:-1])
        if len(elements) > 1 and (kind != "all-reduce" or elements[0].startswith("(")):
            shape = elements[1]
    return [array for array in arrays_of(shape) if array.dtype != "token"]


def _axes(groups: np.ndarray, mesh: Mesh) -> tuple[str, ...]:
    if not groups.size or groups.max() >= mesh.size:
        return ()  # compiled for another mesh
    coordinates = np.unravel_index(groups, mesh.devices.shape)
    varies = [(along != along[:, :1]).any() for along in coordinates]
    return tuple(
        str(axis) for axis, differs in zip(mesh.axis_names, varies, strict=True) if differs
    )


def _groups(attributes: str, devices: int) -> np.ndarray | None:
    """Returns partition ids, one row per group, or None.

    The formats are those of XLA's `xla/hlo/ir/replica_group.cc`, `mesh_and_axis.cc` and
    `tile_assignment.cc`.
    """
    try:
        if match := _LISTS.search(attributes):
            groups = [_numbers(group) for group in re.findall(r"\{([^{}]+)\}", match[2])]
            if match[1] == "source_target_pairs":
                groups = _chains(groups)
            elif not groups:
                groups = [list(range(devices))]
            width = max(map(len, groups))  # pad shorter groups with their first id
            return np.array([group + group[:1] * (width - len(group)) for group in groups])
        if match := _IOTA.search(attributes):
            return _iota(match[2]).reshape(_numbers(match[1]))
        if match := _MESH.search(attributes):
            return _mesh_groups(*match.groups())
    except (ValueError, LookupError, ArithmeticError):  # inconsistent numbers
        pass
    return None


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _chains(pairs: Iterable[Sequence[int]]) -> list[list[int]]:
    """Returns the groups of devices connected by (source, target) pairs, directly or indirectly."""
    chain_of: dict[int, list[int]] = {}
    for source, target in pairs:
        chain = chain_of.setdefault(source, [source])
        joined = chain_of.setdefault(target, [target])
        if chain is not joined:
            chain += joined
            chain_of.update(dict.fromkeys(joined, chain))
    return list({id(chain): chain for chain in chain_of.values()}.values())


def _ids(sizes: Sequence[int]) -> np.ndarray:
    if (count := math.prod(sizes)) > _MOST_DEVICES:
        raise ValueError(f"{count} devices")
    return np.arange(count)


def _iota(text: str) -> np.ndarray:
    """Parses `[4,2]T(1,0)`: 0, 1, 2, ... in these dims, transposed, then flattened."""
    dims, _, permutation = text.partition("T")
    ids = _ids(_numbers(dims)).reshape(_numbers(dims))
    return ids.transpose(_numbers(permutation) or None).ravel()


def _mesh_groups(axes: str, device_ids: str | None, grouped: str) -> np.ndarray:
    """Returns device ids (groups, size) of a mesh `'a'=8,'b'=2`, grouped by axes `'b','a':(2)4`.

    The device ids are a list or an iota; without them they count from 0. The axis names are
    XLA's own. `'a':(2)4` is the part of size 4 of an axis that is split into (2, 4, remainder).
    """
    names, lengths = zip(*re.findall(r"'?([^',=]+)'?=(\d+)", axes), strict=True)
    sizes = [int(length) for length in lengths]
    if device_ids is None:
        ids = _ids(sizes)
    else:
        ids = _iota(device_ids) if "[" in device_ids else np.array(_numbers(device_ids))
    coordinates = np.indices(sizes).reshape(len(sizes), -1)
    outside = coordinates.copy()  # devices with equal values are a group
    group_size = 1
    for name, before, part in re.findall(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?", grouped):
        axis = names.index(name)
        size = int(part or sizes[axis])
        stride = sizes[axis] // (int(before or 1) * size)
        outside[axis] -= coordinates[axis] // stride % size * stride
        group_size *= size
    order = np.argsort(np.ravel_multi_index(tuple(outside), sizes), kind="stable")
    return ids[order].reshape(-1, group_size)

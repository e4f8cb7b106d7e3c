"""What XLA made of a step: the collectives in its optimized HLO text."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jax.sharding import Mesh

from spmdtrain.terminal import byte_size
from spmdtrain.xla.hlo_parser import (
    ASYNC,
    Array,
    Computation,
    Instruction,
    Module,
    UnreadableProgramError,
    arrays_of,
    reading_program,
)
from spmdtrain.xla.provenance import Origins

KINDS = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)

_LAYOUT = re.compile(r"\{[^{}]*\}")
_ELEMENT = re.compile(r"\([^()]*\)|\w+\[[^\]]*\]")  # of a tuple: an inner tuple, or an array
# A TPU writes one collective several times, in each fusion that carries a part of it along.
# The channel alone is not enough to know these by: a function called twice keeps its channel.
_PIECE = re.compile(r'(channel_id=\d+).*(chain_id="\d+").*"async_collective_fusion_config"')
# Between slices of TPUs a collective is sent by the hosts, each slice's part of it.
_BETWEEN_SLICES = re.compile(
    r'_xla_megascale_target="\{([\d,]+)\}.*_xla_megascale_transfer_type="(\w+)"'
)
_IS_SYNC = '"is_sync":true'

_MOST_DEVICES = 2**24  # of a program; a larger number in its text is damage
_LISTS = re.compile(r"(replica_groups|source_target_pairs)=\{([\d,{} ]*)\}")
_IOTA = re.compile(r"replica_groups=(\[[\d,]+\])<=(\[[\d,]+\](?:T\([\d,]+\))?)")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^{}]*)\}")


@dataclass(frozen=True)
class Carried:
    """One array of a collective.

    Attributes:
        parameters: The model parameters that it is, or that are made of it.
        is_parameter: Whether it is these themselves, and not their gradients or new values.
        bytes: As in `Collective`.
        elements: As many as these bytes are.
    """

    parameters: tuple[str, ...]
    is_parameter: bool
    bytes: int
    elements: int


@dataclass(frozen=True)
class Collective:
    """One collective instruction of a compiled step.

    Attributes:
        kind: XLA's name of it, "all-reduce" for instance, without `-start`.
        axes: The mesh axes along which the devices of a group differ, in mesh order; empty if
            that cannot be told. A group may span a part of an axis: see `group_size`.
        group_size: How many devices communicate, 0 if unknown. Of a permute: the longest chain
            of devices that send to each other.
        bytes: The payload where it is whole: on one device, summed over the arrays, the result
            of an all-gather, the operand of a reduce-scatter (the result, if the group is
            unknown). For other kinds both are of one size; a ragged all-to-all counts its
            result buffer, an upper bound.
        arrays: How many arrays travel together.
        op_name: The JAX operation it comes from (one of them, if XLA combined several), or "".
        line: The line of the user's that it comes from, or "".
        times: How often it runs in a step: as often as the loops turn that it is in.
        overlapped: Whether XLA lets other instructions run meanwhile.
        group: The partition ids of one of its groups; empty if unknown.
        carries: Its arrays; empty where nobody asked.
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


def collectives(hlo_text: str, mesh: Mesh) -> list[Collective]:
    """The collectives of a compiled step: `collectives(compiled.as_text(), mesh)`.

    In the order of the text, each once however often it runs. Those whose groups are single devices
    move nothing and are left out. A device's id is XLA's partition id, its position in
    `mesh.devices.flat`. Groups that cannot be read are no error, they leave `axes` empty and
    `group_size` 0: a report must not end a run.
    """
    return collectives_of(Module(hlo_text), mesh)


@reading_program()
def collectives_of(module: Module, mesh: Mesh, origins: Origins | None = None) -> list[Collective]:
    """The same of a program that is read already; with `origins` also what each carries."""
    found: list[Collective] = []
    pieces: dict[tuple[str, ...], int] = {}
    inside_async = {
        name
        for computation in module.computations.values()
        for one in computation.instructions.values()
        if one.opcode in ASYNC
        for _, name in one.called
    }
    for computation in module.computations.values():
        for one in computation.instructions.values():
            times = module.times.get(computation.name, 1)
            if one.opcode == "send" and (sent := _BETWEEN_SLICES.search(one.attributes)):
                source = _source(one, computation, origins)
                found.append(
                    replace(
                        _between_slices(one, sent, times, mesh),
                        op_name=source.op_name,
                        line=module.line_of(source),
                        carries=_carried(one, computation, one.arrays[:1], 1, origins),
                    )
                )
            kind, started = one.opcode.removesuffix("-start"), one.opcode.endswith("-start")
            if kind not in KINDS:
                continue
            piece = _PIECE.search(one.attributes)
            if piece and (kind, *piece.groups()) in pieces:
                # All of it has run as often as the piece that ran least.
                place = pieces[kind, *piece.groups()]
                found[place] = replace(found[place], times=min(times, found[place].times))
                continue
            groups = _groups(one.attributes, mesh.size)
            group_size = 0 if groups is None else groups.shape[1]
            if group_size == 1:
                continue
            if piece:
                pieces[kind, *piece.groups()] = len(found)
            arrays = _payload(one.shape, kind, started=started)
            whole = max(group_size, 1) if kind == "reduce-scatter" else 1
            source = _source(one, computation, origins)
            waits = _IS_SYNC in one.attributes
            aside = started or piece is not None or computation.name in inside_async
            found.append(
                Collective(
                    kind=kind,
                    axes=() if groups is None else _axes(groups, mesh),
                    group_size=group_size,
                    bytes=sum(array.bytes for array in arrays) * whole,
                    arrays=len(arrays),
                    times=times,
                    overlapped=aside and not waits,
                    group=() if groups is None else tuple(groups[0].tolist()),
                    carries=_carried(one, computation, arrays, whole, origins),
                    op_name=source.op_name,
                    line=module.line_of(source),
                )
            )
    return found


def _carried(
    one: Instruction,
    within: Computation,
    arrays: Sequence[Array],
    whole: int,
    origins: Origins | None,
) -> tuple[Carried, ...]:
    if origins is None:
        return ()
    carried = []
    for index, array in enumerate(arrays):
        origin = origins.parameters_of(one, within, index)
        carried.append(
            Carried(
                parameters=origin.parameters,
                is_parameter=origin.is_source,
                bytes=array.bytes * whole,
                elements=math.prod(array.dims) * whole,
            )
        )
    return tuple(carried)


def _source(one: Instruction, within: Computation, origins: Origins | None) -> Instruction:
    """What tells where a collective comes from: what made its data, if it does not tell itself."""
    return one if origins is None or one.op_name else origins.producer(one, within)


def _between_slices(one: Instruction, sent: re.Match[str], times: float, mesh: Mesh) -> Collective:
    slices = len(_numbers(sent[1]))
    group = np.arange(slices) * (mesh.size // slices)  # a mesh has one slice after the other
    return Collective(
        kind=sent[2].lower().replace("_", "-"),
        axes=_axes(group[None], mesh),
        group_size=slices,
        bytes=one.arrays[0].bytes,
        arrays=1,
        times=times,
        overlapped=True,
        group=tuple(group.tolist()),
    )


def describe(found: Sequence[Collective], mesh: Mesh) -> str:
    """`1 all-reduce, 1.08 MB, over data=8`: by kind and axes, the most bytes first."""
    together: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for one in found:
        together.setdefault((one.kind, one.axes), []).append(one.bytes)
    parts = []
    for (kind, axes), sizes in sorted(together.items(), key=lambda item: -sum(item[1])):
        over = " ".join(f"{axis}={mesh.shape[axis]}" for axis in axes) or "unknown axes"
        plural = "s" if len(sizes) > 1 else ""
        parts.append(f"{len(sizes)} {kind}{plural}, {byte_size(sum(sizes))}, over {over}")
    return "; ".join(parts) or "no collectives"


def told(hlo_text: str, mesh: Mesh | None) -> str:
    """The collectives of a compiled step in a line; without a mesh there are none."""
    try:
        return "no collectives" if mesh is None else describe(collectives(hlo_text, mesh), mesh)
    except UnreadableProgramError as error:  # a report must not end a run
        return f"collectives unknown: {error}"


def _payload(shape: str, kind: str, started: bool) -> list[Array]:
    """The arrays of each result in `f32[8,128]{1,0:T(8,128)}`, or in a tuple of such."""
    shape = _LAYOUT.sub("", shape)
    if started and shape.startswith("("):
        # (operands, results, context ...). A plain all-reduce-start alone has only its results;
        # where it has its operands too, they are a tuple of their own.
        elements = _ELEMENT.findall(shape[1:-1])
        if len(elements) > 1 and (kind != "all-reduce" or elements[0].startswith("(")):
            shape = elements[1]
    return [array for array in arrays_of(shape) if array.dtype != "token"]


def _axes(groups: np.ndarray, mesh: Mesh) -> tuple[str, ...]:
    if not groups.size or groups.max() >= mesh.size:
        return ()  # not compiled for this mesh
    coordinates = np.unravel_index(groups, mesh.devices.shape)
    varies = [(along != along[:, :1]).any() for along in coordinates]
    return tuple(str(axis) for axis, is_so in zip(mesh.axis_names, varies, strict=True) if is_so)


def _groups(attributes: str, devices: int) -> np.ndarray | None:
    """Partition ids, a row for each group, or None.

    The spellings are those of XLA's `xla/hlo/ir/replica_group.cc`, `mesh_and_axis.cc` and
    `tile_assignment.cc`.
    """
    try:
        if match := _LISTS.search(attributes):
            groups = [_numbers(group) for group in re.findall(r"\{([^{}]+)\}", match[2])]
            if match[1] == "source_target_pairs":
                groups = _chains(groups)
            elif not groups:
                groups = [list(range(devices))]
            width = max(map(len, groups))  # a shorter group is filled up with an id of its own
            return np.array([group + group[:1] * (width - len(group)) for group in groups])
        if match := _IOTA.search(attributes):
            return _iota(match[2]).reshape(_numbers(match[1]))
        if match := _MESH.search(attributes):
            return _mesh_groups(*match.groups())
    except (ValueError, LookupError, ArithmeticError):  # numbers that do not fit together
        pass
    return None


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _chains(pairs: Iterable[Sequence[int]]) -> list[list[int]]:
    """Devices joined by (source, target) pairs, directly or through others."""
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
    """`[4,2]T(1,0)`: 0, 1, 2 ... in these dims, then transposed, flat."""
    dims, _, permutation = text.partition("T")
    ids = _ids(_numbers(dims)).reshape(_numbers(dims))
    return ids.transpose(_numbers(permutation) or None).ravel()


def _mesh_groups(axes: str, device_ids: str | None, grouped: str) -> np.ndarray:
    """`'a'=8,'b'=2`; device ids as a list, as an iota, or none; and `'b','a':(2)4`.

    The names are XLA's own. `'a':(2)4` is the part of size 4 of an axis that is split into
    (2, 4, what remains).
    """
    names, lengths = zip(*re.findall(r"'?([^',=]+)'?=(\d+)", axes), strict=True)
    sizes = [int(length) for length in lengths]
    if device_ids is None:
        ids = _ids(sizes)
    else:
        ids = _iota(device_ids) if "[" in device_ids else np.array(_numbers(device_ids))
    coordinates = np.indices(sizes).reshape(len(sizes), -1)
    outside = coordinates.copy()  # the devices of a group are those that agree in this
    group_size = 1
    for name, before, part in re.findall(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?", grouped):
        axis = names.index(name)
        size = int(part or sizes[axis])
        stride = sizes[axis] // (int(before or 1) * size)
        outside[axis] -= coordinates[axis] // stride % size * stride
        group_size *= size
    order = np.argsort(np.ravel_multi_index(tuple(outside), sizes), kind="stable")
    return ids[order].reshape(-1, group_size)

"""The table of `--show-sharding`: the sharding of each parameter and its bytes on a device."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import NamedSharding, Sharding
from rich.cells import cell_len
from rich.table import Table

from spmdtrain.document.terminal import Terminal, byte_size
from spmdtrain.sharding.describe import describe_sharding
from spmdtrain.sharding.state_paths import field_of, parameter_of
from spmdtrain.tree import named_leaves

PyTree = Any

_SPEC = 3  # the index of a column


@dataclass(frozen=True)
class MemoryUse:
    """The memory of some leaves.

    Attributes:
      device: Bytes in the memory of a device.
      host: Bytes in host memory that belong to a device.
      whole: Bytes of the unsplit leaves.
    """

    device: int = 0
    host: int = 0
    whole: int = 0

    @property
    def parts(self) -> int:
        """The number of equal parts that the leaves are split into."""
        held = self.device + self.host
        return round(self.whole / held) if held else 1

    def __add__(self, other: "MemoryUse") -> "MemoryUse":
        return MemoryUse(
            self.device + other.device, self.host + other.host, self.whole + other.whole
        )

    def __str__(self) -> str:
        parts = [byte_size(self.device)] if self.device or not self.host else []
        return " + ".join(parts + ([f"{byte_size(self.host)} host"] if self.host else []))


@dataclass(frozen=True)
class Row:
    """One parameter, with the leaves of the optimizer's state and of the average that follow it.

    Attributes:
      own: Memory of the parameter itself.
      elements: Number of elements of the parameter; 0 for `other`.
      source: The source of the spec, for example "rule 1"; see `Layout.sources`.
    """

    name: str
    shape: str
    dtype: str
    spec: str
    own: MemoryUse
    optimizer: MemoryUse
    average: MemoryUse
    elements: int = 0
    source: str = ""


@dataclass(frozen=True)
class Worst:
    """The leaf with the most bytes on a device beyond an even split over all devices.

    Attributes:
      holders: Number of devices that hold a part of it, or all of it.
      held: Bytes on each of these devices.
      excess: Bytes on each of these devices beyond an even split.
      copies: 1 if it is split over its holders, the number of holders if it is replicated.
    """

    name: str
    spec: str
    holders: int
    held: int
    excess: int
    copies: float


@dataclass(frozen=True)
class ShardingTable:
    """The memory of a state on the devices. A row has the bytes of a device that holds a part.

    Attributes:
      rows: The parameters in the state's order. The last row is `other`: step, key, model state,
        and leaves of the optimizer's state that follow no parameter.
      fullest: Bytes in the memory of the device that holds the most.
      emptiest: Bytes in the memory of the device that holds the least.
      worst: None if every leaf is split evenly.
    """

    rows: list[Row]
    total: Row
    devices: int
    fullest: int
    emptiest: int
    worst: Worst | None


@dataclass
class _Sums:
    """A row under construction."""

    own: MemoryUse = field(default_factory=MemoryUse)
    optimizer: MemoryUse = field(default_factory=MemoryUse)
    average: MemoryUse = field(default_factory=MemoryUse)


def tabulate(
    abstract_state: PyTree, shardings: PyTree, sources: Mapping[str, str] | None = None
) -> ShardingTable:
    """Returns the table of a state. Nothing is compiled or allocated.

    A leaf of the optimizer's state of any shape counts for its parameter (see `parameter_of`).
    `sources` are as in `Layout.sources`.
    """
    leaves, where = named_leaves(abstract_state), named_leaves(shardings)
    assert list(leaves) == list(where), "the state and its shardings are different trees"
    shapes = {n: tuple(leaf.shape) for n, leaf in leaves.items() if field_of(n) == "params"}
    sums = {name: _Sums() for name in shapes}
    other, others = _Sums(), []
    places = _Places()
    for name, leaf in leaves.items():
        held = places.add(leaf, where[name])
        owner = parameter_of(name, tuple(leaf.shape), shapes)
        row = other if owner is None else sums[owner]
        if owner is None:
            others.append(name)
        match field_of(name):
            case "opt_state":
                row.optimizer += held
            case "averaged":
                row.average += held
            case _:
                row.own += held
    rows = [
        Row(
            name=name.removeprefix("params/"),
            shape=str(tuple(leaves[name].shape)),
            dtype=str(leaves[name].dtype),
            spec=_spec(where[name]),
            own=of.own,
            optimizer=of.optimizer,
            average=of.average,
            elements=math.prod(leaves[name].shape),
            source=(sources or {}).get(name, ""),
        )
        for name, of in sums.items()
    ]
    specs = {_spec(where[name]) for name in others}
    rows.append(
        Row(
            name="other",
            shape=f"{len(others)} arrays",
            dtype="",
            spec=specs.pop() if len(specs) == 1 else "several",
            own=other.own,
            optimizer=other.optimizer,
            average=other.average,
        )
    )
    devices = places.per_device()
    return ShardingTable(
        rows=rows,
        total=Row(
            *("total", "", "", ""),
            own=_sum(row.own for row in rows),
            optimizer=_sum(row.optimizer for row in rows),
            average=_sum(row.average for row in rows),
        ),
        devices=len(devices),
        fullest=max(devices),
        emptiest=min(devices),
        worst=_worst(leaves, where, len(devices)),
    )


def render(table: ShardingTable) -> Table:
    """Returns the table for rich."""
    header, *rows = _cells(table)
    drawn = Table()
    for number, name in enumerate(header):
        is_size = number >= _first_size(table)
        drawn.add_column(name, justify="right" if is_size else "left", no_wrap=True)
    for row in rows:
        if row is rows[-1]:
            drawn.add_section()
        drawn.add_row(*row)
    return drawn


def narrow(table: ShardingTable) -> list[str]:
    """Returns the table as two lines a row, for a narrow terminal: name and spec, then sizes."""
    (_, *rows), first = _cells(table), _first_size(table)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [size.rjust(width) for size, width in zip(row[first:], widths[first:], strict=True)]
        labeled = map("".join, zip(("", "optimizer ", "average "), cells, strict=False))
        lines.append("  ".join([row[0], *row[_SPEC:first]]).rstrip())
        lines.append("  ".join([f"    {row[1]:{widths[1]}}", f"{row[2]:{widths[2]}}", *labeled]))
    return lines


def summary(table: ShardingTable) -> list[str]:
    """Returns the lines below the table: the bytes of a device, and the worst imbalance."""
    total = table.total.own + table.total.optimizer + table.total.average
    who = f"each of {table.devices} devices" if table.devices > 1 else "the one device"
    holds, even = f"holds {byte_size(table.fullest)}", -(-total.whole // table.devices)
    if table.fullest != table.emptiest:
        who = f"the fullest of {table.devices} devices"
        holds += f", the emptiest {byte_size(table.emptiest)}"
    if total.host:
        holds += f", and {byte_size(total.host)} in host memory"
    comma = "," if "," in holds else ""
    line = f"{who} {holds}{comma} of {byte_size(total.whole)} ({_part(table, total)}"
    if table.fullest + total.host > 1.01 * even:
        line += f"; an even split is {byte_size(even)}"
    if table.devices == 1:
        return [line + ")"]
    worst = "none, every array is split evenly"
    if table.worst is not None:
        worst = _describe_worst(table.worst, table.devices, table.fullest + total.host)
    return [line + ")", f"worst imbalance: {worst}"]


def show_sharding(terminal: Terminal, table: ShardingTable) -> None:
    """Prints the table and its summary. In a file, a row is one line of any width."""
    widths = [
        max(cell_len(line) for cell in column for line in cell.split("\n"))
        for column in zip(*_cells(table), strict=True)
    ]
    if sum(widths) + 3 * len(widths) + 1 <= terminal.console.width:  # with rules and padding
        terminal.console.print(render(table))
    else:
        for line in narrow(table):
            terminal.line(line)
    for line in summary(table):
        terminal.line(line)


def _cells(table: ShardingTable) -> list[list[str]]:
    """Returns the cells of the header, the rows and the total."""
    averaged, sourced = table.total.average.whole > 0, _has_sources(table)
    sizes = ["bytes per\ndevice", "optimizer\nper device", "average\nper device"]
    cells = [["parameter", "shape", "dtype", "spec", *["source"][:sourced], *sizes]]
    for row in [*table.rows, table.total]:
        held = map(str, (row.own, row.optimizer, row.average))
        named = [row.name, row.shape, row.dtype, row.spec, *[row.source][:sourced]]
        cells.append([*named, *held])
    return cells if averaged else [row[:-1] for row in cells]


def _has_sources(table: ShardingTable) -> bool:
    return any(row.source for row in table.rows)


def _first_size(table: ShardingTable) -> int:
    """Returns the index of the first column of sizes."""
    return _SPEC + 1 + _has_sources(table)


class _Places:
    """Sums up what each device holds."""

    def __init__(self) -> None:
        # By group of devices, not by device: a mesh may have thousands of devices, and a state
        # hundreds of leaves.
        self._bytes: dict[Any, int] = {}
        self._devices: dict[Any, Iterable[jax.Device]] = {}

    def add(self, leaf: Any, sharding: Sharding) -> MemoryUse:
        held, whole = _held(leaf, sharding), _nbytes(leaf, leaf.shape)
        on_host = sharding.memory_kind == "pinned_host"
        group = sharding.mesh if isinstance(sharding, NamedSharding) else sharding
        self._devices[group] = sharding.device_set
        self._bytes[group] = self._bytes.get(group, 0) + (0 if on_host else held)
        return MemoryUse(0, held, whole) if on_host else MemoryUse(held, 0, whole)

    def per_device(self) -> list[int]:
        by_device: dict[jax.Device, int] = {}
        for group, size in self._bytes.items():
            for device in self._devices[group]:
                by_device[device] = by_device.get(device, 0) + size
        return list(by_device.values())


def _worst(leaves: dict[str, Any], where: dict[str, Sharding], devices: int) -> Worst | None:
    worst: Worst | None = None
    for name, leaf in leaves.items():
        sharding, whole = where[name], _nbytes(leaf, leaf.shape)
        held = _held(leaf, sharding)
        excess = held - -(-whole // devices)
        if excess > (worst.excess if worst else 0):
            worst = Worst(
                name=name.removeprefix("params/") if field_of(name) == "params" else name,
                spec=_spec(sharding),
                holders=sharding.num_devices,
                held=held,
                excess=excess,
                copies=held * sharding.num_devices / whole,
            )
    return worst


def _describe_worst(worst: Worst, devices: int, held: int) -> str:
    who = f"each of {devices}" if worst.holders == devices else f"{worst.holders} of {devices}"
    copies = f"{worst.copies:g} cop{'y' if worst.copies == 1 else 'ies'}"
    share = worst.excess / held
    return (
        f"{worst.name} ({worst.spec}), {byte_size(worst.held)} on {who} devices ({copies}): "
        f"{byte_size(worst.excess)} more than an even split, "
        f"{f'{share:.1%}' if share >= 0.001 else 'under 0.1%'} of what a device holds"
    )


def _held(leaf: Any, sharding: Sharding) -> int:
    return _nbytes(leaf, sharding.shard_shape(tuple(leaf.shape)))


def _nbytes(leaf: Any, shape: Iterable[int]) -> int:
    return math.prod(shape) * int(leaf.dtype.itemsize)


def _sum(parts: Iterable[MemoryUse]) -> MemoryUse:
    return sum(parts, MemoryUse())


def _part(table: ShardingTable, total: MemoryUse) -> str:
    """Returns the share of a device as text: `1/8`, or `56%` if it is not such a fraction."""
    held = table.fullest + total.host
    if held >= total.whole:
        return "all of it"
    parts = round(total.whole / held)
    is_part = abs(total.whole / held / parts - 1) < 0.01
    return f"1/{parts}" if is_part else f"{held / total.whole:.0%}"


def _spec(sharding: Sharding) -> str:
    on_host = sharding.memory_kind == "pinned_host"
    return describe_sharding(sharding) + (" host" if on_host else "")

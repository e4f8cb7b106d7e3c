"""Live arrays at peak memory, from the files that XLA dumps during compilation."""

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

_TOTAL = re.compile(r"Memory Space: default \(color=0\)\s+Total bytes: (\d+)")
_ALLOCATION = re.compile(r"allocation \d+: (?P<rest>.*)")
_COLOR = re.compile(r"\bcolor (\d+)")
_VALUE = re.compile(
    r"\s*value: <\d+ (?P<name>[^\s{]+)(?:\{(?P<index>[\d,]*)\})?(?: \(phi\))? @\d+> "
    r"\(size=(?P<size>\d+),offset=(?P<offset>\d+)\)"
)
_RANGE = re.compile(r"\s*(?P<name>[^\s{]+)\{(?P<index>[\d,]*)\}:(?P<start>\d+)-(?P<end>\d+)$")


@dataclass(frozen=True)
class Live:
    """A temporary array that is live at peak memory."""

    name: str
    """Name of the instruction that produces it."""
    path: tuple[int, ...]
    """Index into the instruction's result if that is a tuple, else ()."""
    bytes: int


@dataclass(frozen=True)
class PeakMemory:
    """Memory that XLA's allocator assigned to a program.

    Attributes:
      total: Bytes of the main memory for the program, arguments included.
      live: Temporary arrays at the time of their largest sum, the largest first. Gaps between
        arrays of different sizes and lifetimes are not included.
    """

    total: int
    live: list[Live]


def read_dump(folder: Path) -> PeakMemory | None:
    """Reads the memory use of a program from the files that `xla_dump_to` writes.

    XLA's own list of the buffers at the peak is incomplete, so they are computed from the live
    range and the allocation of each value. None if files are missing or in an unknown format.
    """
    files = {
        kind: next(iter(folder.glob(f"*after_optimizations-{kind}.txt")), None)
        for kind in ("memory-usage-report", "buffer-assignment", "live-range")
    }
    report, assignment, ranges = (path and path.read_text() for path in files.values())
    total = _TOTAL.search(report or "")
    if total is None or not assignment or not ranges:
        return None
    return PeakMemory(int(total[1]), _live_at_peak(_values(assignment), _ranges(ranges)))


_Name = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class _Slot:
    allocation: int
    offset: int
    bytes: int


def _values(text: str) -> dict[_Name, _Slot]:
    """Returns the slots of the temporary values in the main memory."""
    slots = {}
    allocation, counts = 0, False
    for line in text.splitlines():
        if match := _ALLOCATION.match(line):
            color = _COLOR.search(match["rest"])
            counts = "preallocated-temp" in match["rest"] and (color is None or color[1] == "0")
            allocation += 1
        elif counts and (match := _VALUE.match(line)):
            slot = _Slot(allocation, int(match["offset"]), int(match["size"]))
            slots[match["name"], _path(match["index"])] = slot
    return slots


def _ranges(text: str) -> dict[_Name, tuple[int, int]]:
    matches = map(_RANGE.match, text.splitlines())
    return {
        (match["name"], _path(match["index"])): (int(match["start"]), int(match["end"]))
        for match in matches
        if match
    }


def _path(index: str | None) -> tuple[int, ...]:
    return tuple(int(number) for number in (index or "").split(",") if number)


def _live_at_peak(values: dict[_Name, _Slot], ranges: dict[_Name, tuple[int, int]]) -> list[Live]:
    """Returns the values that are live at the time of their largest sum."""
    changes: dict[int, list[tuple[bool, _Name]]] = defaultdict(list)
    for name in values:
        if name in ranges:
            start, end = ranges[name]
            changes[start].append((True, name))
            changes[end + 1].append((False, name))
    # A slot may hold several values, each computed from another in place; the largest counts.
    groups: dict[tuple[int, int], dict[_Name, int]] = defaultdict(dict)
    live = most = 0
    largest: list[_Name] = []
    for time in sorted(changes):
        for begins, name in changes[time]:
            slot = values[name]
            group = groups[slot.allocation, slot.offset]
            before = max(group.values(), default=0)
            if begins:
                group[name] = slot.bytes
            else:
                group.pop(name, None)
            live += max(group.values(), default=0) - before
        if live > most:
            most = live
            largest = [max(group, key=group.__getitem__) for group in groups.values() if group]
    arrays = [Live(name, path, values[name, path].bytes) for name, path in largest]
    return sorted(arrays, key=lambda array: -array.bytes)

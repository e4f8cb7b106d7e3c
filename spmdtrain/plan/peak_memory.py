"""What is in a device's memory when it is fullest, as XLA's own dump of a compilation tells it."""

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
    """A temporary array that is there when a device's memory is fullest."""

    name: str
    """Of the instruction that makes it."""
    path: tuple[int, ...]
    """Which of its results, of a tuple; () where it has one."""
    bytes: int


@dataclass(frozen=True)
class PeakMemory:
    """What XLA has found room for.

    Attributes:
        total: Bytes of the main memory that the program has for itself, arguments included.
        live: The temporary arrays of the moment when they are most, the largest first. What is
            between them is not in here: of arrays of many sizes that come and go, gaps are left.
    """

    total: int
    live: list[Live]


def read_dump(folder: Path) -> PeakMemory | None:
    """What the files that `xla_dump_to` leaves tell of memory; None where they tell nothing.

    XLA's own list of the peak's buffers leaves some out, so that it is computed here: from the
    ranges in which each value lives, and the place it has been given.
    """
    found = {
        kind: next(iter(folder.glob(f"*after_optimizations-{kind}.txt")), None)
        for kind in ("memory-usage-report", "buffer-assignment", "live-range")
    }
    report, assignment, ranges = (path and path.read_text() for path in found.values())
    total = _TOTAL.search(report or "")
    if total is None or not assignment or not ranges:
        return None
    return PeakMemory(int(total[1]), _fullest(_values(assignment), _ranges(ranges)))


_Name = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class _Place:
    allocation: int
    offset: int
    bytes: int


def _values(text: str) -> dict[_Name, _Place]:
    """Where the temporary values of the main memory are."""
    found = {}
    allocation, counts = 0, False
    for line in text.splitlines():
        if match := _ALLOCATION.match(line):
            color = _COLOR.search(match["rest"])
            counts = "preallocated-temp" in match["rest"] and (color is None or color[1] == "0")
            allocation += 1
        elif counts and (match := _VALUE.match(line)):
            place = _Place(allocation, int(match["offset"]), int(match["size"]))
            found[match["name"], _path(match["index"])] = place
    return found


def _ranges(text: str) -> dict[_Name, tuple[int, int]]:
    matches = map(_RANGE.match, text.splitlines())
    return {
        (match["name"], _path(match["index"])): (int(match["start"]), int(match["end"]))
        for match in matches
        if match
    }


def _path(index: str | None) -> tuple[int, ...]:
    return tuple(int(number) for number in (index or "").split(",") if number)


def _fullest(values: dict[_Name, _Place], ranges: dict[_Name, tuple[int, int]]) -> list[Live]:
    """The values of the moment when those that live take most room."""
    changes: dict[int, list[tuple[bool, _Name]]] = defaultdict(list)
    for name in values:
        if name in ranges:
            start, end = ranges[name]
            changes[start].append((True, name))
            changes[end + 1].append((False, name))
    # At one place there may be several values, each made of another in place.
    there: dict[tuple[int, int], dict[_Name, int]] = defaultdict(dict)
    held = most = 0
    best: list[_Name] = []
    for moment in sorted(changes):
        for begins, name in changes[moment]:
            place = values[name]
            group = there[place.allocation, place.offset]
            before = max(group.values(), default=0)
            if begins:
                group[name] = place.bytes
            else:
                group.pop(name, None)
            held += max(group.values(), default=0) - before
        if held > most:
            most = held
            best = [max(group, key=group.__getitem__) for group in there.values() if group]
    live = [Live(name, path, values[name, path].bytes) for name, path in best]
    return sorted(live, key=lambda one: -one.bytes)

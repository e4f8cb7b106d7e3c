"""Parts of arrays: `[{layer},:,0]`, `[0:50257]`, `[:,0/3]`."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from spmdtrain.errors import UserError

Box = tuple[tuple[int, int], ...]
"""The first index and the end of each dim."""

_ENTRY = re.compile(r"\s*(?::|(\d+)|(\d*):(\d*)|(\d+)/(\d+))\s*", re.ASCII)


class MisfitError(Exception):
    """A part or an order of dims that does not fit the shape of an array."""


@dataclass(frozen=True)
class Region:
    """A box within an array; `kept` are its dims, without those that are given as one index."""

    box: Box
    kept: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The lengths of the dims in `kept`."""
        return tuple(self.box[dim][1] - self.box[dim][0] for dim in self.kept)

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)


def region_of(shape: Sequence[int], slot: str, fields: Mapping[str, str]) -> Region:
    """Returns the part of an array of a shape that a slot names.

    Args:
      slot: One entry for each of the first dims, separated by commas: `:` for the whole dim, an
        index, `a:b`, `k/n` for the k-th of n equal parts, or a `{field}` of these.
      fields: The fields of the name.

    Raises:
      UserError: If the slot is malformed.
      MisfitError: If it does not fit the shape.
    """
    box, kept = [(0, length) for length in shape], list(range(len(shape)))
    for dim, entry in enumerate(slot.split(",") if slot else ()):
        for name, value in fields.items():
            entry = entry.replace(f"{{{name}}}", value)
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise UserError(
                f"weight rule: the part [{slot}] has {entry!r}: an entry is :, an index, a:b, k/n, "
                "or a {field} of the name"
            )
        if dim >= len(shape):
            raise MisfitError(f"[{slot}] has more dims than {list(shape)}")
        index, first, end, part, parts = match.groups()
        length = shape[dim]
        if index is not None:
            box[dim] = int(index), int(index) + 1
            kept.remove(dim)
        elif part is not None:
            if not int(parts) or length % int(parts):
                raise MisfitError(f"dim {dim} of {list(shape)} does not divide into {parts} parts")
            share = length // int(parts)
            box[dim] = int(part) * share, (int(part) + 1) * share
        elif first or end:
            box[dim] = int(first or 0), int(end or length)
        if not 0 <= box[dim][0] < box[dim][1] <= length:
            raise MisfitError(f"{entry.strip()} is not a part of dim {dim} of {list(shape)}")
    return Region(tuple(box), tuple(kept))


def shape_around(slots: Iterable[tuple[str, tuple[int, ...]]]) -> tuple[int, ...]:
    """Returns the shape of the array that parts, given as slot and shape, fill together.

    Raises `MisfitError` if the parts are not of one array.
    """
    shapes = []
    for slot, shape in slots:
        lengths, rest = [], list(shape)
        for entry in slot.split(",") if slot else ():
            match = _ENTRY.fullmatch(entry)
            assert match is not None  # the slot has named a region before
            index, _, end, _, parts = match.groups()
            length = 1 if index is not None else rest.pop(0)
            lengths.append(
                int(index) + 1 if index else int(end) if end else length * int(parts or 1)
            )
        shapes.append((*lengths, *rest))
    if len({len(shape) for shape in shapes}) != 1:
        raise MisfitError(f"the parts have different numbers of dims: {slots}")
    return tuple(map(max, zip(*shapes, strict=True)))


def overlap(a: Box, b: Box) -> Box | None:
    """Returns the box that two boxes share; None if they share nothing."""
    shared = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return None if any(first >= end for first, end in shared) else shared


def slices(box: Box, origin: Sequence[int] | None = None) -> tuple[slice, ...]:
    """Returns the slices of a box, relative to an origin."""
    starts = origin or (0,) * len(box)
    return tuple(
        slice(first - start, end - start) for (first, end), start in zip(box, starts, strict=True)
    )

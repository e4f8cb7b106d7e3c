"""The order, split and merge of the dims of an array: `d (c n h) -> d c n h`."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from spmdtrain.errors import UserError
from spmdtrain.weights.region import Box, MisfitError, slices

Groups = list[tuple[str, ...]]

_DIM = re.compile(r"\(([^()]*)\)|(\S+)")
_NAME = re.compile("[a-z][a-z0-9_]*", re.ASCII)
_SIDE = re.compile(r"(?:\s*(?:\([^()]*\)|[^\s()]+))*\s*")


@dataclass(frozen=True)
class DimOrder:
    """A transposition in which dims are split or merged.

    Attributes:
      text: `FROM -> TO`, where both sides have the same names, one for each dim; the names in
        parentheses are parts of one dim, the first one the slowest.

    Raises:
      UserError: If the text is malformed.
    """

    text: str

    def __post_init__(self) -> None:
        before, after = (sorted(name for group in side for name in group) for side in self.sides)
        if before != after or len(set(before)) != len(before):
            raise self._malformed("both sides need the same names, each of them once")

    @cached_property
    def sides(self) -> tuple[Groups, Groups]:
        """The names of each dim, before and after."""
        sides = self.text.split("->")
        if len(sides) != 2 or not all(map(_SIDE.fullmatch, sides)):
            raise self._malformed("write for example 'out in -> in out' or 'd (n h) -> d n h'")
        parsed = [
            [tuple((match[1] if match[2] is None else match[2]).split()) for match in found]
            for found in map(_DIM.finditer, sides)
        ]
        names = [name for side in parsed for group in side for name in group]
        if not all(map(_NAME.fullmatch, names)):
            raise self._malformed("names are lower-case letters and digits")
        return parsed[0], parsed[1]

    def _malformed(self, why: str) -> UserError:
        return UserError(f"weight rule: dims is {self.text!r}: {why}")

    @property
    def inverse(self) -> "DimOrder":
        """The order that leads back: `TO -> FROM`."""
        before, _, after = self.text.partition("->")
        return DimOrder(f"{after.strip()} -> {before.strip()}")

    def lengths(
        self, before: Sequence[int] | None, after: Sequence[int] | None = None
    ) -> dict[str, int]:
        """Returns the length of each name, from the shapes before and after that are known.

        Raises `MisfitError` if the shapes do not fit, or leave a length open.
        """
        groups = []
        for side, shape in zip(self.sides, (before, after), strict=True):
            if shape is None:
                continue
            if len(side) != len(shape):
                raise MisfitError(f"{self.text!r} has {len(side)} dims, and {list(shape)} not")
            groups += list(zip(side, shape, strict=True))
        lengths: dict[str, int] = {}
        for names, length in sorted(groups, key=lambda group: len(group[0])):
            unknown = [name for name in names if name not in lengths]
            known = prod(lengths[name] for name in names if name in lengths)
            if len(unknown) == 1 and known and length % known == 0:
                lengths[unknown[0]] = length // known
            elif not unknown and known != length:
                raise MisfitError(f"{self.text!r} does not fit")
        if missing := {name for side in self.sides for names in side for name in names} - set(
            lengths
        ):
            raise MisfitError(f"{self.text!r} leaves the length of {sorted(missing)[0]} open")
        return lengths

    def shapes(self, lengths: Mapping[str, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes before and after, by the length of each name."""
        before, after = (
            tuple(prod(lengths[name] for name in names) for names in side) for side in self.sides
        )
        return before, after

    def read(
        self, lengths: Mapping[str, int], box: Box, read: Callable[[Box], np.ndarray]
    ) -> np.ndarray:
        """Returns a part of the reordered array, and reads only what it needs of the original one.

        Args:
          lengths: The length of each name.
          box: The part, in indices of the reordered array.
          read: Returns a part of the original array.
        """
        before, after = self.sides
        ranges: dict[str, tuple[int, int]] = {}
        for names, (first, end) in zip(after, box, strict=True):
            inner = prod(lengths[name] for name in names[1:])
            ranges |= {name: (0, lengths[name]) for name in names}
            ranges |= dict.fromkeys(names[:1], (first // inner, -(-end // inner)))
        # Of a merged dim, the range of the first name alone is contiguous.
        wanted, shape, crop = [], [], []
        for names in before:
            inner = prod(lengths[name] for name in names[1:])
            first, end = ranges[names[0]] if names else (0, 1)
            wanted.append((first * inner, end * inner))
            shape += [end - first, *(lengths[name] for name in names[1:])][: len(names)]
            crop += [(0, end - first), *(ranges[name] for name in names[1:])][: len(names)]
        values = read(tuple(wanted)).reshape(shape)[slices(tuple(crop))]
        names_before = [name for names in before for name in names]
        values = values.transpose([names_before.index(name) for names in after for name in names])
        lengths_here = {name: end - first for name, (first, end) in ranges.items()}
        values = values.reshape([prod(lengths_here[name] for name in names) for names in after])
        starts = [
            ranges[names[0]][0] * prod(lengths[name] for name in names[1:]) if names else 0
            for names in after
        ]
        return values[slices(box, starts)]

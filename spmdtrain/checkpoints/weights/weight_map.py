"""Rules by which the arrays of a file become those of a model, and back."""

import re
import runpy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from spmdtrain.errors import UserError, did_you_mean, foreign

# -- Patterns of array names with named fields, which both match names and write them --------------

_FIELD = re.compile(r"([a-z_][a-z0-9_]*)(?::(.+))?", re.ASCII | re.DOTALL)
_SLOT = re.compile(r"(.+)\[([^\[\]]*)\]", re.DOTALL)
_DEFAULT = "[0-9]+"


@dataclass(frozen=True)
class NamePattern:
    """A name such as `h.{layer}.attn.bias`, and perhaps a part of the array, `[:,0/3]`.

    Text outside of braces is literal. `{layer}` is a field of digits, and `{name:REGEX}` a field of
    a regular expression. Raises `UserError` if a brace is not closed, or a regular expression is
    invalid.
    """

    text: str

    def __post_init__(self) -> None:
        assert self._regex is not None  # raises for an invalid pattern

    @cached_property
    def slot(self) -> str:
        """The text between the brackets at the end; empty for a whole array."""
        match = _SLOT.fullmatch(self.text)
        return match[2] if match else ""

    @cached_property
    def fields(self) -> frozenset[str]:
        """The names of the fields."""
        return frozenset(self._regex.groupindex)

    def match(self, name: str) -> dict[str, str] | None:
        """Returns the fields of a name; None if the pattern does not match all of it."""
        match = self._regex.fullmatch(name)
        return match.groupdict() if match else None

    def format(self, fields: Mapping[str, str]) -> str:
        """Returns the name with these fields; a missing one becomes nothing."""
        return "".join(
            part if is_text else fields.get(_field_of(part)[0], "") for is_text, part in self._parts
        )

    @cached_property
    def _parts(self) -> list[tuple[bool, str]]:
        """The name in parts: whether a part is literal text, and the text or the field."""
        match = _SLOT.fullmatch(self.text)
        name = match[1] if match else self.text
        parts, text, rest = [], "", name
        while rest:
            if not rest.startswith("{"):
                text, rest = text + rest[0], rest[1:]
                continue
            end = _closing_brace(rest)
            if end is None or not _FIELD.fullmatch(rest[1:end]):
                raise UserError(
                    f"weight rule: {self.text!r} has a brace that is not a field: write {{name}} "
                    "for digits, or {name:REGEX}"
                )
            parts += [(True, text), (False, rest[1:end])]
            text, rest = "", rest[end + 1 :]
        return [*parts, (True, text)]

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        seen: set[str] = set()
        regex = ""
        for is_text, part in self._parts:
            if is_text:
                regex += re.escape(part)
                continue
            name, own = _field_of(part)
            regex += f"(?P={name})" if name in seen else f"(?P<{name}>{own})"
            seen.add(name)
        try:
            return re.compile(regex)
        except re.error as error:
            raise UserError(f"weight rule: {self.text!r} is not valid: {error}") from error


def _field_of(part: str) -> tuple[str, str]:
    """Returns the name and the regular expression of a field."""
    name, _, regex = part.partition(":")
    return name, regex or _DEFAULT


def _closing_brace(text: str) -> int | None:
    """Returns the index of the brace that closes the first one; None if there is none."""
    depth = 0
    for index, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if not depth:
            return index
    return None


# -- Parts of arrays: `[{layer},:,0]`, `[0:50257]`, `[:,0/3]` --------------------------------------

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


# -- The order, split and merge of the dims of an array: `d (c n h) -> d c n h` --------------------

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


# -- Rules by which the arrays of a file become those of a model, and back -------------------------

_SLOT_FIELD = re.compile(r"\{(\w+)\}", re.ASCII)


@dataclass(frozen=True)
class WeightRule:
    """A rule that takes arrays of a file as arrays of the model, or as parts of them.

        WeightRule("h.{layer}.attn.c_attn.weight", "blocks/qkv[{layer}]", "d (c n h) -> d c n h")

    Text is literal outside of braces: `{layer}` stands for digits, `{name:REGEX}` for what a
    regular expression matches. Brackets at the end name a part of the array, with an entry for each
    of its first dims: `:`, an index, `a:b`, or `k/n` for the k-th of n equal parts. In `target`
    they stack or merge arrays (`qkv[{layer},:,0]`), in `source` they split one (`qkv.weight[0/3]`).
    Empty brackets name the whole array: `w[0][]` is an array with the name `w[0]`.

    Attributes:
      source: The names in the file.
      target: The array of the model, by its path such as `layers/0/kernel`; it has fields of
        `source` alone.
      dims: The order of the dims in the file and in the model, `out in -> in out`. Names in
        parentheses are merged to one dim: `d (n h) -> d n h`. By default the shapes are equal.
      fill: The value of elements of the target that no rule covers; without it there must be none.

    Raises:
      UserError: If the rule is malformed.
    """

    source: str
    target: str
    dims: str = ""
    fill: float | None = None

    def __post_init__(self) -> None:
        slots = self.target_pattern.slot + self.source_pattern.slot
        used = self.target_pattern.fields | set(_SLOT_FIELD.findall(slots))
        if unknown := used - self.source_pattern.fields:
            raise UserError(
                f"weight rule {self.source!r} -> {self.target!r}: the source has no field "
                f"{min(unknown)!r}"
            )
        if self.dims:
            assert self.order is not None  # raises for malformed dims

    @cached_property
    def source_pattern(self) -> NamePattern:
        """The pattern of the names in the file."""
        return NamePattern(self.source)

    @cached_property
    def target_pattern(self) -> NamePattern:
        """The pattern of the paths in the model."""
        return NamePattern(self.target)

    @cached_property
    def order(self) -> DimOrder | None:
        """The order of the dims; None if both sides have the same shape."""
        return DimOrder(self.dims) if self.dims else None

    def __str__(self) -> str:
        return f"weight rule {self.source!r} -> {self.target!r}"


WeightMap = Sequence[WeightRule]
"""Rules, each of which applies to all arrays that it matches. Without rules, arrays with the name
of an array of the model are taken, where `.` and `/` are the same."""


def plain_name(name: str) -> str:
    """Returns a name of the model as `export` writes it: `layers.0.kernel`, or `params` for ""."""
    return name.replace("/", ".") or "params"


def read_weight_map(file: str) -> WeightMap:
    """Returns the `WEIGHT_MAP` of a Python file, which is executed.

    Raises `UserError` if the file cannot be executed, or has no such map.
    """
    sys.path.append(str(Path(file).resolve().parent))  # it may import modules of its folder
    try:
        found = runpy.run_path(file).get("WEIGHT_MAP")
    except (Exception, SystemExit) as error:
        raise UserError(
            f"{file}: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    if not (rules := checked_weight_map(found, f"{file}: WEIGHT_MAP")):
        raise UserError(f"{file}: its WEIGHT_MAP is empty")
    return rules


def checked_weight_map(rules: Any, what: str = "weight_map") -> WeightMap:
    """Returns a list of `WeightRule`; raises `UserError` for anything else, named `what`."""
    if not isinstance(rules, Sequence) or not all(isinstance(x, WeightRule) for x in rules):
        given = "missing" if rules is None else f"{rules!r:.80}"
        raise UserError(
            f"{what} is {given}: it must be a list of rules, such as "
            '[WeightRule("dense.weight", "kernel", "out in -> in out")]'
        )
    return rules


def unmapped(rules: WeightMap, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Converts the arrays of a model, by their paths, to the names and shapes of a map's file.

    A field of a source that its target lacks becomes nothing.

    Raises:
      UserError: If a rule matches nothing, an array has no rule, or the map has no way back.
    """
    parts: dict[str, list[tuple[str, np.ndarray]]] = {}
    used: set[str] = set()
    for rule in rules:
        found = list(_parts_of(rule, arrays))
        if not found:
            raise UserError(
                f"{rule}: the model has no such array.{did_you_mean(rule.target, arrays)}"
            )
        for target, name, slot, values in found:
            used.add(target)
            parts.setdefault(name, []).append((slot, values))
    if left := [name for name in arrays if name not in used]:
        raise UserError(f"the weight map has no rule that writes {foreign(', '.join(left[:5]))}")
    return {name: _joined(name, found) for name, found in parts.items()}


def _parts_of(
    rule: WeightRule, arrays: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, str, str, np.ndarray]]:
    """Yields each target of a rule, its name and slot in the file, and its values."""
    pattern = rule.target_pattern
    for target, array in arrays.items():
        fields = pattern.match(target)
        if fields is None:
            continue
        for index in _indices(rule, array.shape):
            known = fields | index
            try:
                region = region_of(array.shape, pattern.slot, known)
                values = array[slices(region.box)].reshape(region.shape)
                if rule.order is not None:
                    order = rule.order.inverse
                    lengths = order.lengths(region.shape)
                    box = tuple((0, length) for length in order.shapes(lengths)[1])
                    values = order.read(lengths, box, partial(_part, values))
            except MisfitError as error:
                raise UserError(f"{rule} cannot be written back: {error}") from error
            slot = rule.source_pattern.slot
            for name, value in known.items():
                slot = slot.replace(f"{{{name}}}", value)
            yield target, rule.source_pattern.format(known), slot, values


def _part(values: np.ndarray, box: Box) -> np.ndarray:
    return values[slices(box)]


def _indices(rule: WeightRule, shape: Sequence[int]) -> Iterator[dict[str, str]]:
    """Yields the values of fields that are an index in the slot of a target, such as `layer`."""
    pattern = rule.target_pattern
    entries = [entry.strip() for entry in pattern.slot.split(",")]
    named = {
        entry[1:-1]: shape[dim]
        for dim, entry in enumerate(entries)
        if entry.startswith("{") and entry[1:-1] not in pattern.fields and dim < len(shape)
    }
    found: list[dict[str, str]] = [{}]
    for name, length in named.items():
        found = [{**known, name: str(index)} for known in found for index in range(length)]
    yield from found


def _joined(name: str, parts: Sequence[tuple[str, np.ndarray]]) -> np.ndarray:
    """Joins the parts that rules write to one array."""
    try:
        shape = shape_around([(slot, values.shape) for slot, values in parts])
        whole = np.empty(shape, parts[0][1].dtype)
        regions: list[Region] = []
        for slot, values in parts:
            region = region_of(shape, slot, {})
            if any(overlap(region.box, other.box) is not None for other in regions):
                raise UserError(f"two weight rules write the same part of {name}")
            whole[slices(region.box)] = values.reshape([end - a for a, end in region.box])
            regions.append(region)
    except (MisfitError, ValueError) as error:
        raise UserError(f"the parts of {name} do not make up one array: {error}") from error
    if (filled := sum(region.size for region in regions)) != whole.size:
        raise UserError(
            f"weight rules write {filled:,} elements of {name}, which has {whole.size:,}"
        )
    return whole

"""Rules by which the arrays of a file become those of a model, and back."""

import re
import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from spmdtrain.errors import UserError, did_you_mean, foreign
from spmdtrain.weights.dim_order import DimOrder
from spmdtrain.weights.name_pattern import NamePattern
from spmdtrain.weights.region import (
    Box,
    MisfitError,
    Region,
    overlap,
    region_of,
    shape_around,
    slices,
)

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

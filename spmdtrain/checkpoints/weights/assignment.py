"""The arrays of a file that a model takes, and their placement on devices."""

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from spmdtrain.checkpoints.weights.source import ArrayHeader, WeightSource
from spmdtrain.checkpoints.weights.weight_map import (
    Box,
    DimOrder,
    MisfitError,
    Region,
    WeightMap,
    WeightRule,
    overlap,
    plain_name,
    region_of,
    slices,
)
from spmdtrain.distributed import process_group
from spmdtrain.document.blocks import TableBlock
from spmdtrain.errors import UserError, did_you_mean, foreign, option

# -- The arrays of a file that a model takes, before any of them is read ---------------------------

_SHOWN = 5  # names in a message
_BRACES = set("{}")


@dataclass(frozen=True)
class Piece:
    """A part of an array of the model, and the part of a file's array that fills it.

    Attributes:
      source: The name of the file's array.
      taken: The part of the file's array.
      filled: The part of the model's array.
      order: The order of the dims; None if both parts have the same shape.
      lengths: The length of each name of `order`.
    """

    source: str
    taken: Region
    filled: Region
    order: DimOrder | None
    lengths: Mapping[str, int]

    def read(self, source: WeightSource, box: Box) -> np.ndarray:
        """Returns the values of a part of the model's array; `box` lies within `filled`."""
        inner = tuple(
            (box[dim][0] - self.filled.box[dim][0], box[dim][1] - self.filled.box[dim][0])
            for dim in self.filled.kept
        )
        if self.order is None:
            values = self._read_taken(source, inner)
        else:
            values = self.order.read(self.lengths, inner, lambda box: self._read_taken(source, box))
        return values.reshape([end - first for first, end in box])

    def _read_taken(self, source: WeightSource, box: Box) -> np.ndarray:
        """Returns a part of `taken`; `box` has indices within it."""
        whole, at = list(self.taken.box), self.taken.box
        for dim, (first, end) in zip(self.taken.kept, box, strict=True):
            whole[dim] = at[dim][0] + first, at[dim][0] + end
        values = source.read(self.source, tuple(whole))
        return values.reshape([end - first for first, end in box])


@dataclass
class WeightAssignment:
    """The pieces that fill each array of a model, and everything that does not fit.

    Attributes:
      pieces: By the name of the model's array, the pieces that together fill it.
      fill: The value of elements without a piece, by the name of the model's array.
      missing: Names of the model's arrays that nothing fills, or only in part.
      misfits: Reasons why an array of the file does not fit, by the name of the model's array.
      left: Names of the file's arrays that are not taken.
      unused: Rules that match no array of the file.
    """

    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    fill: dict[str, float] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    misfits: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    unused: list[WeightRule] = field(default_factory=list)

    @property
    def kept(self) -> list[str]:
        """Names of the model's arrays that keep their initial values."""
        return [*self.misfits, *self.missing]


def assign_weights(
    path: str, headers: Mapping[str, ArrayHeader], targets: Mapping[str, Any], rules: WeightMap
) -> WeightAssignment:
    """Returns which arrays of a file become which arrays of a model.

    Without rules, arrays with the name of an array of the model are taken. The same applies if no
    rule matches and the file has all arrays of the model, as `export` writes it without a map.

    Args:
      path: The file, for messages.
      headers: Shape and dtype of the file's arrays.
      targets: Shape and dtype of the model's arrays, by their paths.

    Raises:
      UserError: If an array is matched twice, a rule names no array of the model, or an array has a
        dtype that the model's array cannot take.
    """
    found = WeightAssignment()
    taken: dict[str, list[Piece]] = {}
    for rule in rules or _rules_of_equal_names(path, headers, targets):
        matches = 0
        only = rule.source_pattern.format({})
        for name in headers if rule.source_pattern.fields else {only} & headers.keys():
            header, fields = headers[name], rule.source_pattern.match(name)
            if fields is None:
                continue
            matches += 1
            target = rule.target_pattern.format(fields)
            if target not in targets:
                raise UserError(
                    f"{rule}: {foreign(name, 200)} would become {foreign(target, 200)}, which the "
                    f"model does not have.{did_you_mean(target, targets)}"
                )
            _check_dtype(path, name, header, target, targets[target])
            try:
                piece = _piece(rule, name, header, targets[target].shape, fields)
            except MisfitError as error:
                why = f"{header} there, {_described(targets[target])} here"
                found.misfits.setdefault(target, f"{name}: {why} ({error})")
                continue
            _check_once(path, rule, target, piece, taken.setdefault(name, []), found.pieces)
            if rule.fill is not None:
                found.fill[target] = _checked_fill(rule, rule.fill, targets[target].dtype)
        if not matches:
            found.unused.append(rule)
    if rules and len(found.unused) == len(rules):
        with contextlib.suppress(UserError):  # which would not be about the map
            own = assign_weights(path, headers, targets, ())
            if not own.kept:
                return own
    for target, leaf in targets.items():
        covered = sum(piece.filled.size for piece in found.pieces.get(target, ()))
        is_whole = covered == prod(leaf.shape) or (covered and target in found.fill)
        if target in found.misfits or not is_whole:
            found.pieces.pop(target, None)
            if target not in found.misfits:
                found.missing.append(target)
    used = {piece.source for pieces in found.pieces.values() for piece in pieces}
    found.left = [name for name in headers if name not in used]
    return found


def rules_of_file(source: WeightSource, file_names: Mapping[str, str | None]) -> WeightMap:
    """Returns the rules for a file of the model's library, whose names count the model's layers.

    There are none if the file has none of these names. `file_names` has the path in the model of
    each array in such a file, None for an array that the model does not take.

    Raises:
      UserError: If the file is of a model with other layers: its names count them.
    """
    saved = {name for name in source.headers if not name.startswith("optimizer/")}
    if saved.isdisjoint(file_names):
        return ()
    if others := sorted(saved ^ file_names.keys()):
        which = "the file" if others[0] in saved else "this model"
        path = f" ({file_names[others[0]]})" if file_names.get(others[0]) else ""
        raise UserError(
            f"init_from {source.path}: it is of a model with other layers ({which} alone has "
            f"{foreign(others[0], 200)}{path}), and its names count the layers: give a weight_map"
        )
    taken = {name: path for name, path in file_names.items() if path is not None}
    return [WeightRule(_literal(name), _literal(path)) for name, path in taken.items()]


def check_taken(what: str, found: WeightAssignment, *, strict: bool, advice: str = "") -> None:
    """Checks that an assignment is what the user asked for.

    `what` and `advice` begin and end the message; by default it advises a map. `strict` demands
    that each array of the model is taken and that each rule matches. Raises `UserError` if
    something is missing, or nothing is taken.
    """
    faults = []
    if found.missing:
        names = _in_short(found.missing)
        faults.append(f"{len(found.missing)} arrays of the model are not in it: {names}")
    if found.misfits:
        reasons = _in_short([f"{name} ({why})" for name, why in found.misfits.items()])
        faults.append(f"{len(found.misfits)} do not fit: {reasons}")
    if found.unused:
        faults.append(f"it has nothing for {_in_short([str(rule) for rule in found.unused])}")
    if not found.pieces:
        left = f"; it has {_in_short(found.left)}" if found.left else ""
        raise UserError(
            f"{what}: no array of the model is taken: {'; '.join(faults)}{left}. "
            f"{advice or 'Give a weight_map'}"
        )
    if strict and faults:
        instead = option("init_from_strict", "matching")
        by_map = f"Correct the weight_map, or let these keep their initial values: {instead}"
        raise UserError(f"{what}: {'; '.join(faults)}. {advice or by_map}")


def _in_short(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return foreign(", ".join(names[:_SHOWN]), 1500) + more


def _rules_of_equal_names(
    path: str, headers: Mapping[str, ArrayHeader], targets: Mapping[str, Any]
) -> list[WeightRule]:
    """Returns rules that take each array with the name of an array of the model."""
    by_plain_name: dict[str, str] = {}
    for name in headers:
        plain = plain_name(name)
        if (other := by_plain_name.setdefault(plain, name)) != name:
            raise UserError(
                f"{path}: {foreign(other, 200)} and {foreign(name, 200)} are the same name: give "
                "a weight_map"
            )
    return [
        WeightRule(_literal(by_plain_name[plain_name(target)]), _literal(target))
        for target in targets
        if plain_name(target) in by_plain_name and not _BRACES & set(target)
    ]


def _literal(name: str) -> str:
    """Returns the pattern that matches a name without braces."""
    return f"{name}[]" if name.endswith("]") else name  # `w[0]` alone would be a part of `w`


def _piece(
    rule: WeightRule,
    name: str,
    header: ArrayHeader,
    shape: Sequence[int],
    fields: Mapping[str, str],
) -> Piece:
    taken = region_of(header.shape, rule.source_pattern.slot, fields)
    filled = region_of(shape, rule.target_pattern.slot, fields)
    lengths: Mapping[str, int] = {}
    if rule.order is not None:
        lengths = rule.order.lengths(taken.shape, filled.shape)
    elif taken.shape != filled.shape:
        raise MisfitError(f"{list(taken.shape)} is not {list(filled.shape)}")
    return Piece(name, taken, filled, rule.order, lengths)


def _check_once(
    path: str,
    rule: WeightRule,
    target: str,
    piece: Piece,
    of_source: list[Piece],
    by_target: dict[str, list[Piece]],
) -> None:
    """Records a piece; raises `UserError` if it is taken or filled already."""
    of_target = by_target.setdefault(target, [])
    if any(overlap(piece.taken.box, other.taken.box) is not None for other in of_source):
        raise UserError(
            f"{path}: two weight rules match {foreign(piece.source, 200)}; the second is {rule}"
        )
    for other in of_target:
        if overlap(piece.filled.box, other.filled.box) is not None:
            raise UserError(
                f"{path}: {foreign(other.source, 200)} and {foreign(piece.source, 200)} would both "
                f"fill {target}; the second by {rule}"
            )
    of_source.append(piece)
    of_target.append(piece)


def _checked_fill(rule: WeightRule, fill: float, dtype: Any) -> float:
    if np.isnan(fill):
        raise UserError(f"{rule}: fill is {fill}: it must be a number")
    with np.errstate(over="ignore", invalid="ignore"):
        held = np.asarray(fill, np.float64).astype(dtype)
    is_float = jnp.issubdtype(dtype, jnp.inexact)
    if not (np.isfinite(held) or np.isinf(fill) if is_float else held == fill):
        raise UserError(f"{rule}: fill is {fill}, which {np.dtype(dtype).name} cannot hold")
    return fill


def _check_dtype(path: str, name: str, header: ArrayHeader, target: str, leaf: Any) -> None:
    """Raises `UserError` if the values of a dtype are of another kind than the model's."""
    kinds = (jnp.floating, jnp.complexfloating, jnp.integer, jnp.bool_)
    if not any(
        jnp.issubdtype(header.dtype, kind) and jnp.issubdtype(leaf.dtype, kind) for kind in kinds
    ):
        raise UserError(
            f"{path}: {foreign(name, 200)} is {header}, and {target} is {_described(leaf)}: "
            "another kind of numbers"
        )


def _described(leaf: Any) -> str:
    return str(ArrayHeader(tuple(leaf.shape), np.dtype(leaf.dtype)))


# -- Placement of a file's arrays: each process reads what its devices hold, one shard at a time


def place(
    source: WeightSource,
    found: WeightAssignment,
    targets: Mapping[str, Any],
    expected: type[Exception] = UserError,
) -> dict[str, jax.Array]:
    """Returns the arrays of a model that a file has, in their shardings.

    All processes of a job call it. The host holds one shard and the part of the file's array that
    is read for it.

    Args:
      targets: `jax.ShapeDtypeStruct` with a sharding, by the path of the array.
      expected: The errors that one process raises in all of them.

    Raises:
      UserError: If a value is NaN or infinite, or too large for the model's integers, or the file
        is corrupted.
    """

    def read() -> dict[str, jax.Array]:
        return {name: _array(source, found, name, targets[name]) for name in found.pieces}

    return process_group.run_on_all(read, expected)


def read_whole(source: WeightSource, found: WeightAssignment, name: str, target: Any) -> np.ndarray:
    """Returns an array of a model that a file has, on the host; raises `UserError` like `place`.

    `name` is the path of the array, `target` its shape and dtype.
    """
    return _shard(source, found, name, tuple((0, n) for n in target.shape), target.dtype)


def _array(source: WeightSource, found: WeightAssignment, name: str, target: Any) -> jax.Array:
    holders: dict[Box, list[jax.Device]] = {}
    for device, index in target.sharding.addressable_devices_indices_map(target.shape).items():
        box = tuple(
            part.indices(length)[:2] for part, length in zip(index, target.shape, strict=True)
        )
        holders.setdefault(box, []).append(device)
    memory = target.sharding.memory_kind
    shards = []
    for box, devices in holders.items():
        values = _shard(source, found, name, box, target.dtype)
        for device in devices:
            # Copied, because an array that shares memory with NumPy's cannot be donated.
            where = SingleDeviceSharding(device, memory_kind=memory)
            shards.append(jax.device_put(values, where, may_alias=False))
        jax.block_until_ready(shards[-len(devices) :])  # the copies are made, so `values` is freed
        del values
    return jax.make_array_from_single_device_arrays(target.shape, target.sharding, shards)


def _shard(
    source: WeightSource, found: WeightAssignment, name: str, box: Box, dtype: Any
) -> np.ndarray:
    values = np.full([end - first for first, end in box], found.fill.get(name, 0), dtype)
    origin = [first for first, _ in box]
    for piece in found.pieces[name]:
        if (shared := overlap(box, piece.filled.box)) is None:
            continue
        read = piece.read(source, shared)
        with np.errstate(over="ignore", invalid="ignore"):  # an overflow is found below
            place: tuple[Any, ...] = (*slices(shared, origin), ...)  # a view, also of 0 dims
            part = values[place]
            part[...] = read
        if jnp.issubdtype(dtype, jnp.integer) and not np.array_equal(part, read):
            raise UserError(
                f"{source.path}: {foreign(piece.source, 200)} is {read.dtype.name} and has a value "
                f"that {np.dtype(dtype).name} cannot hold; nothing was loaded"
            )
        del read
        if jnp.issubdtype(dtype, jnp.inexact) and not np.isfinite(part).all():
            raise UserError(
                f"{source.path}: {foreign(piece.source, 200)} has a value that is NaN or infinite "
                f"(as {np.dtype(dtype).name}); nothing was loaded"
            )
    return values


# -- The table of what a model takes from a file ---------------------------------------------------

_NUMBER = re.compile(r"(?<![^./])[0-9]+(?![^./])", re.ASCII)  # a whole part of a name


def report(
    path: str,
    found: WeightAssignment,
    headers: Mapping[str, ArrayHeader],
    targets: Mapping[str, Any],
) -> TableBlock:
    """Returns a table of the arrays that are taken, that differ, and that are left.

    Arrays whose names differ only in numbers share a row: `h.*.mlp.c_fc.weight`. `path` is the
    file, `headers` describe its arrays and `targets` those of the model.
    """
    taken = [
        ("taken", _text(name, _header(targets[name])), _text(piece.source, headers[piece.source]))
        for name, pieces in found.pieces.items()
        for piece in pieces
    ]
    differs = [
        ("differs", _text(name, _header(targets[name])), why) for name, why in found.misfits.items()
    ]
    missing = [("initial", _text(name, _header(targets[name])), "") for name in found.missing]
    left = [("left", "", _text(name, headers[name])) for name in found.left]
    rows = _counted([*taken, *differs, *missing, *left])
    return TableBlock(
        ("", "in the model", "in the file", "arrays"),
        [(*row, str(count)) for row, count in rows.items()],
        numeric=frozenset({3}),
        title=f"init_from {path}",
        whole=frozenset({0}),
    )


def _header(leaf: Any) -> ArrayHeader:
    return ArrayHeader(tuple(leaf.shape), np.dtype(leaf.dtype))


def _text(name: str, header: ArrayHeader) -> str:
    return f"{_NUMBER.sub('*', name)} {header}"


def _counted(rows: Iterable[tuple[str, str, str]]) -> dict[tuple[str, str, str], int]:
    """Returns how often each row occurs, in the order of the rows."""
    counts: dict[tuple[str, str, str], int] = {}
    for row in rows:
        counts[row] = counts.get(row, 0) + 1
    return counts

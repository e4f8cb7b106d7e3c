"""The names that models give to the dims of their arrays, and their translation to mesh axes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import PartitionSpec

from spmdtrain.errors import UserError, did_you_mean
from spmdtrain.strategies import AXES

Axes = str | tuple[str, ...] | None
"""Axes of the mesh: one, several, or none."""
Pairs = tuple[tuple[str, Axes], ...]


@dataclass(frozen=True)
class AxisRules:
    """A table from the logical names of a model's annotations to axes of the mesh.

    The model's own constraints of activations use it, too: it is Flax's `logical_axis_rules` while
    the model runs. If a name occurs several times, the first entry applies whose axes the array
    does not use yet, as in Flax. A name that is not in the table means the mesh axis of that name.

    Args:
      rules: Names to an axis, a tuple of axes, or None (not split); or such pairs.
      explicit: The axes that are explicit while the model runs (`jax.sharding.AxisType`), like the
        axes of `jax.make_mesh`. A model that passes `out_sharding` to operations needs this for
        every axis that it names.

    Attributes:
      pairs: The entries in order.

    Raises:
      UserError: If an entry has another form, or an axis is unknown.
    """

    rules: Mapping[str, Any] | Iterable[tuple[str, Any]] = ()
    explicit: Sequence[str] = ()
    pairs: Pairs = field(init=False)

    def __post_init__(self) -> None:
        entries = self.rules.items() if isinstance(self.rules, Mapping) else self.rules
        object.__setattr__(self, "pairs", tuple(map(_checked_entry, entries)))
        object.__setattr__(self, "rules", self.pairs)
        if unknown := [axis for axis in self.explicit if axis not in AXES]:
            raise UserError(
                f"AxisRules has the explicit axis {unknown[0]!r}, which is not an axis of the mesh."
                f"{did_you_mean(unknown[0], AXES)}"
            )
        object.__setattr__(self, "explicit", tuple(self.explicit))


@dataclass(frozen=True)
class DimsOf:
    """The dims that an array shares with a parameter, whose rule shards them.

    Attributes:
      parameter: The path of the parameter in the state.
      dims: For each dim of the array, the same dim of the parameter; None if the parameter has no
        such dim, which is then not split.
    """

    parameter: str
    dims: tuple[int | None, ...]

    def spec(self, spec: PartitionSpec) -> PartitionSpec:
        """Converts the spec of the parameter to the spec of the array."""
        entries = dict(enumerate(spec))
        return PartitionSpec(
            *(None if dim is None else entries.get(dim) for dim in self.dims if entries)
        )


@dataclass(frozen=True)
class Annotation:
    """The annotation of one array by its model.

    Attributes:
      names: One entry for each dim: a name, several names, or None. Dims may be left out at the
        end.
      rules: Entries of the array's own table; entries of `AxisRules` win.
    """

    names: tuple[Axes, ...]
    rules: Pairs = ()

    @classmethod
    def of(cls, value: Any, rules: Any = ()) -> "Annotation | None":
        """Returns the annotation that a model's metadata state; None if they state nothing.

        Args:
          value: A sequence of names, a `PartitionSpec`, or an object with such a `spec` (a
            `NamedSharding`, or the `sharding` of a `Format`).
        """
        value = getattr(value, "sharding", value)
        value = getattr(value, "spec", value)
        if not value:
            return None
        names = tuple(None if name is PartitionSpec.UNCONSTRAINED else name for name in value)
        return cls(names, tuple((name, _as_axes(axes)) for name, axes in rules or ()))

    def __str__(self) -> str:
        return f"({', '.join(map(repr, self.names))}{',' * (len(self.names) == 1)})"


def specs_of(
    annotations: Mapping[str, Annotation], axis_rules: AxisRules | None
) -> dict[str, PartitionSpec]:
    """Returns the specs of annotated arrays by path.

    Raises:
      UserError: If a name is neither in the table nor an axis of the mesh, or if two dims of an
        array would be split over the same axis.
    """
    own = axis_rules.pairs if axis_rules is not None else ()
    tables = {path: _table(annotation, own) for path, annotation in annotations.items()}
    unmapped: dict[str, str] = {}  # name to the first path
    for path, annotation in annotations.items():
        known = {name for name, _ in tables[path]}
        for name in _flat(annotation):
            if name not in known:
                unmapped.setdefault(name, path)
    if unmapped:
        name, path = next(iter(unmapped.items()))
        names = ", ".join(map(repr, unmapped))
        raise UserError(
            f"{path} is annotated {annotations[path]}: axis_rules do not map {names}, and the "
            f"axes of the mesh are {', '.join(AXES)}. Map names to axes or to None: "
            f"axis_rules=AxisRules({{{name!r}: None, ...}})"
        )
    return {path: _spec(path, annotations[path], table) for path, table in tables.items()}


def _table(annotation: Annotation, own: Pairs) -> Pairs:
    """Returns the entries that apply to an array: the experiment's, its own, and axes by name."""
    table = own
    for later in (annotation.rules, tuple((axis, axis) for axis in AXES)):
        known = {name for name, _ in table}
        table += tuple(pair for pair in later if pair[0] not in known)
    return table


def _spec(path: str, annotation: Annotation, table: Pairs) -> PartitionSpec:
    found: dict[tuple[int, str], Axes] = {}  # (dim, name) to axes
    users: dict[str, str] = {}  # axis to the name that is mapped to it
    wanted = [(dim, name) for dim, names in enumerate(annotation.names) for name in _each(names)]
    for name, axes in table:
        if unknown := [axis for axis in _each(axes) if axis not in AXES]:
            raise UserError(
                f"{path}: the table of its annotation maps {name!r} to {unknown[0]!r}, which is "
                f"not an axis of the mesh.{did_you_mean(unknown[0], AXES)}"
            )
        for use in wanted:
            if use[1] == name and use not in found and not set(_each(axes)) & set(users):
                found[use] = axes
                users |= dict.fromkeys(_each(axes), name)
    for use in wanted:
        if use in found:
            continue
        axis = next(axis for name, axes in table if name == use[1] for axis in _each(axes))
        raise UserError(
            f"{path} is annotated {annotation}: {users.get(axis, use[1])!r} and {use[1]!r} are "
            f"both mapped to {axis}, and an array is split over an axis once. Map one of them to "
            "another axis or to None"
        )
    entries: list[Axes] = []
    for dim, names in enumerate(annotation.names):
        axes = tuple(axis for name in _each(names) for axis in _each(found[dim, name]))
        entries.append((axes[0] if len(axes) == 1 else axes) or None)
    return PartitionSpec(*entries)


def _checked_entry(entry: Any) -> tuple[str, Axes]:
    try:
        name, axes = entry
        axes = _as_axes(axes)
    except (TypeError, ValueError):
        name, axes = None, ("",)
    if not isinstance(name, str) or not all(isinstance(axis, str) for axis in _each(axes)):
        raise UserError(
            f"AxisRules has the entry {entry!r}: it must be a name with an axis, a tuple of axes "
            "or None"
        )
    for axis in _each(axes):
        if axis not in AXES:
            raise UserError(
                f"AxisRules maps {name!r} to {axis!r}, which is not an axis of the mesh."
                f"{did_you_mean(axis, AXES)}"
            )
    if len(set(_each(axes))) < len(_each(axes)):
        raise UserError(f"AxisRules maps {name!r} to an axis twice: {axes}")
    return name, axes


def _as_axes(axes: Any) -> Axes:
    return axes if axes is None or isinstance(axes, str) else tuple(axes)


def _each(entry: Axes) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _flat(annotation: Annotation) -> list[str]:
    return [name for names in annotation.names for name in _each(names)]

"""Sharding rules, names of dims, paths in the state, and shardings as text."""

import enum
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from spmdtrain.errors import UserError, did_you_mean
from spmdtrain.sharding.mesh import describe_devices
from spmdtrain.strategies import AXES
from spmdtrain.tree import named_leaves

# -- Sharding rules: a pattern for paths in the state, and the spec of the leaves that it matches

REPLICATED = PartitionSpec()


class GatherPolicy(enum.Enum):
    """The point in a step at which a parameter that is split over a batch axis is gathered."""

    BEFORE_FORWARD = "at the start"
    """Before the model is called. XLA moves the all-gather to the first use."""
    PER_LAYER = "in the model"
    """By XLA inside the model: one layer at a time, for stacked layers in a loop."""


@dataclass(frozen=True)
class Rule:
    """A sharding rule for leaves of the state, of any model library (unlike Flax's metadata).

    If the strategy shards the state too, it splits one more dim, for which the spec has no axis,
    over its own axis. Only `PartitionSpec()` excludes this: such leaves are replicated.

    Attributes:
      pattern: A regular expression that may match anywhere in a leaf's path.
      spec: The spec of the leaves that it matches.
      gather: When a parameter that is split over a batch axis is gathered.

    Raises:
      UserError: If the pattern or the spec is not valid.
    """

    pattern: str
    spec: PartitionSpec
    gather: GatherPolicy = GatherPolicy.BEFORE_FORWARD

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise UserError(
                f"sharding rule {self.pattern!r} is not a regular expression: {error}"
            ) from error
        if not isinstance(self.spec, PartitionSpec) or PartitionSpec.UNCONSTRAINED in self.spec:
            raise UserError(
                f"sharding rule {self.pattern!r} has the spec {self.spec!r}: it must be a "
                "jax.sharding.PartitionSpec of axes and None"
            )
        entries = (e if isinstance(e, tuple) else (e,) for e in self.spec if e is not None)
        for axis in (axis for entry in entries for axis in entry):
            if not isinstance(axis, str):
                raise UserError(f"sharding rule {self.pattern!r} has the axis {axis!r}: give names")
        if not isinstance(self.gather, GatherPolicy):
            raise UserError(
                f"sharding rule {self.pattern!r} has gather={self.gather!r}: it must be "
                "GatherPolicy.BEFORE_FORWARD or GatherPolicy.PER_LAYER"
            )
        if len(set(axes := axes_of_spec(self.spec))) < len(axes):
            raise UserError(f"sharding rule {self.pattern!r} names an axis twice: {self.spec}")


def checked_rules(given: object) -> Sequence[Rule]:
    """Returns the sharding rules that a user has given; `UserError` if one is no `Rule`."""
    rules = tuple(given) if isinstance(given, Iterable) else ()
    if not isinstance(given, Iterable) or not all(isinstance(rule, Rule) for rule in rules):
        raise UserError(f"rules is {given!r}: give a list of Rule(pattern, spec)")
    return rules


# -- The names that models give to the dims of their arrays, and their translation to mesh axes ----

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


# -- Shardings as text, and the check that arrays have the intended ones ---------------------------

PyTree = Any


def check_placed(tree: PyTree, shardings: PyTree, when: str) -> None:
    """Raises `UserError` if a leaf does not have its sharding, including the memory kind.

    A float0 leaf is an error, too: JAX places it on no device. `when` begins the message, for
    example "as restored".
    """
    wanted = named_leaves(shardings)
    for name, leaf in named_leaves(tree).items():
        if leaf.dtype == jax.dtypes.float0:
            raise UserError(
                f"{when}, {name} is float0, which holds no values and is on no device: leave it "
                "out of the state"
            )
        want, has = wanted[name], leaf.sharding
        if has.is_equivalent_to(want, leaf.ndim) and _memory(has) == _memory(want):
            continue
        raise UserError(
            f"{when}, {name} of shape {leaf.shape} is {_with_memory(has)}, but its rules require "
            f"{_with_memory(want)}"
        )


def describe_sharding(sharding: Sharding) -> str:
    """Returns a sharding as text, for example "P('fsdp', None)".

    If its spec names only axes of size 1, the text is "replicated" with their sizes.
    """
    if not isinstance(sharding, NamedSharding):
        return f"on {describe_devices(sorted(sharding.device_set, key=lambda device: device.id))}"
    mesh, axes = sharding.mesh, axes_of_spec(sharding.spec)
    if not sharding.is_fully_replicated:
        return f"P({', '.join(map(_entry, sharding.spec))})"
    sizes = ", ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)
    return f"replicated ({sizes})" if axes else "replicated"


def _entry(entry: Any) -> str:
    return repr(entry[0] if isinstance(entry, tuple) and len(entry) == 1 else entry)


def _with_memory(sharding: Sharding) -> str:
    on_host = _memory(sharding) == "pinned_host"
    return describe_sharding(sharding) + (", in host memory" if on_host else "")


def _memory(sharding: Sharding) -> str:
    kind: str | None = sharding.memory_kind
    return "device" if kind in (None, "device") else kind


def axes_of_entry(entry: Any) -> tuple[str, ...]:
    """Returns the axes of one entry of a spec."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def axes_of_spec(spec: PartitionSpec) -> list[str]:
    """Returns the axes of a spec in order."""
    return [axis for entry in spec for axis in axes_of_entry(entry)]


def split_dims(spec: PartitionSpec, ndim: int) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """Returns the dims that a spec splits, counted from the end, with the axes of each."""
    entries = ((dim - ndim, axes_of_entry(entry)) for dim, entry in enumerate(spec))
    return tuple((dim, axes) for dim, axes in entries if axes)


def keep_axes(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    """Returns a spec with only those of its axes that are in `axes`."""
    kept = [tuple(axis for axis in axes_of_entry(entry) if axis in axes) for entry in spec]
    return PartitionSpec(*(entry or None for entry in kept))


def division(size: int, parts: int) -> str:
    """Returns a division with remainder as text: `50257 = 6282 * 8 + 1`."""
    return f"{size} = {size // parts} * {parts} + {size % parts}"


# -- Paths of leaves of the state: the field they are in, and the parameter they belong to ---------

Shape = tuple[int, ...]


def parameter_of(name: str, shape: Shape, parameters: Mapping[str, Shape]) -> str | None:
    """Returns the path of the parameter that a leaf of the state belongs to; None if there is none.

    The parameter's path ends the leaf's path: `opt_state/0/mu/blocks/q` belongs to
    `params/blocks/q`. With several optimizers, `opt_state/actor/0/mu/q` belongs to
    `params/actor/q`. A parameter of the leaf's shape is preferred, then the longest path. The leaf
    is of a field with `like_params`.
    """
    _, *parts = name.split("/")
    tails = [parts[start:] for start in range(len(parts) + 1)]
    if not "".join(parts[:1]).isdecimal():  # a number is an index in a chain of optimizers
        tails += [parts[:1] + tail for tail in tails]
    names = ["/".join(["params", *tail]) for tail in sorted(tails, key=len, reverse=True)]
    matches = [name for name in names if name in parameters]
    same_shape = [name for name in matches if parameters[name] == shape]
    return next(iter(same_shape + matches), None)


def field_of(name: str) -> str:
    """Returns the field of the state that a leaf's path begins with."""
    return name.partition("/")[0]


def params_path(name: str) -> str:
    """Returns a parameter's path in the state. `name` is empty if the parameters are one array."""
    return f"params/{name}" if name else "params"

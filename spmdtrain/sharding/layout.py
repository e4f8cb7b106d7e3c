"""The sharding of every leaf of the state, and the table of `--show-sharding`."""

import copy
import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from spmdtrain.config.options import ShardingOptions
from spmdtrain.document.blocks import NoteBlock, TableBlock
from spmdtrain.document.terminal import byte_size
from spmdtrain.errors import UserError, did_you_mean, option
from spmdtrain.sharding.mesh import GATHER_AXES
from spmdtrain.sharding.placement import ParamGathers, Placement, computes_alone, current_scope
from spmdtrain.sharding.rules import (
    REPLICATED,
    Annotation,
    AxisRules,
    DimsOf,
    GatherPolicy,
    Rule,
    Shape,
    axes_of_entry,
    axes_of_spec,
    describe_sharding,
    division,
    field_of,
    keep_axes,
    parameter_of,
    params_path,
    specs_of,
    split_dims,
)
from spmdtrain.strategies import AXES, MESH_AXES, REST_AXIS, TENSOR_AXIS, StateField
from spmdtrain.tree import named_leaves, path_name

# -- The sharding of every leaf of the state, from rules, the model's annotations and the strategy

PyTree = Any


class NotSplitError(UserError):
    """A strategy should split a large leaf of the state but cannot."""


class Layout:
    """The shardings of a state, from rules, a model's annotations and a strategy.

    An array without a rule has the spec of its annotation. A leaf of the optimizer's state that has
    its parameter's shape gets its parameter's spec. The strategy splits dims that remain free.

    Args:
      state: A `TrainState` whose leaves have shapes and dtypes.
      rules: The experiment's rules; the first match applies.
      axis_rules: The table from the annotations' names to axes.
      derived: Parameters by path that are sharded by the rule of another one, dim by dim.

    Attributes:
      on_device: The sharding of each leaf in device memory, while a step computes.
      shardings: The sharding of each leaf between steps: as in `on_device`, or in host memory.
      splits_tensors: Whether parameters are split over axes that are not in `GATHER_AXES`.

    Raises:
      UserError: If a rule matches nothing, a name is not mapped, a dim does not divide, or a large
        leaf that the strategy should split is not split.
    """

    def __init__(
        self,
        state: Any,
        placement: Placement,
        rules: Sequence[Rule],
        options: ShardingOptions,
        *,
        annotations: Mapping[str, Annotation] | None = None,
        axis_rules: AxisRules | None = None,
        derived: Mapping[str, DimsOf] | None = None,
    ) -> None:
        self._derived = derived or {}
        self._placement, self._rules, self._options = placement, tuple(rules), options
        self._unused = dict(enumerate(self._rules))
        self._fields: Mapping[str, StateField] = state.FIELDS
        named = named_leaves(state)
        self._shapes = {n: tuple(x.shape) for n, x in named.items() if field_of(n) == "params"}
        self._annotated: Mapping[str, Rule] = {}
        if annotations:
            self._annotated = self._annotation_rules(annotations, axis_rules)
        check_axes_used(placement, self._rules, list(self._annotated.values()))
        self.on_device: Any = _with_paths(self._on_device, state)
        if placement.mesh is not None and self._unused:
            patterns = [rule.pattern for rule in self._unused.values()]
            raise UserError(f"sharding rules that match no leaf of the state: {patterns}")
        self.shardings: Any = self.on_device
        if placement.strategy.on_host:
            self.shardings = _with_paths(self._at_rest, state, self.on_device)
        used = {a for n, shape in self._shapes.items() for a in self._used(self._spec(n, shape)[0])}
        self.replicates_params = not used
        self.splits_tensors = not used <= set(GATHER_AXES)
        self._gathers = bool(used & set(GATHER_AXES))

    def of_run(self, state: Any, placement: Placement, fields: Mapping[str, StateField]) -> Any:
        """Returns the shardings of the state of a run between steps, with its step's transform.

        Args:
          state: The abstract state of the run; this layout is that of the state in a step.
          placement: The placement in a step, whose axes of `apart` split the copies of a field.
          fields: The rows of the transform (see `StepTransform.fields`).
        """
        layout = copy.copy(self)
        layout._fields = {**self._fields, **fields}

        def place(name: str, leaf: Any) -> Sharding:
            name = name.removeprefix("extra/")
            copied = layout._fields[field_of(name)].copied
            leaf = jax.ShapeDtypeStruct(leaf.shape[copied:], leaf.dtype)
            sharding = layout._at_rest(name, leaf, layout._on_device(name, leaf))
            if not copied:
                return sharding
            assert isinstance(sharding, NamedSharding)
            spec = PartitionSpec(placement.apart, *sharding.spec)
            return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)

        return _with_paths(place, state)

    def unsharded_params(self) -> list[str]:
        """Returns the large parameters that the strategy does not split because no dim divides.

        Parameters that a rule replicates are not included.
        """
        strategy = self._placement.strategy
        field = "params" if strategy.shards_params else "opt_state"
        axes = strategy.split_axes(self._fields[field])
        if all(self._placement.size(axis) == 1 for axis in axes):
            return []
        names = []
        for name, shape in self._shapes.items():
            spec, rule = self._spec(name, shape, field=field)
            large = math.prod(shape) >= self._options.min_size
            if large and not self._used(spec) and (rule is None or rule.spec != REPLICATED):
                names.append(name.removeprefix("params/"))
        return names

    @property
    def sources(self) -> dict[str, str]:
        """The source of the spec of each parameter that is split or has a rule, by path.

        For example "rule 2" (the second of the experiment's rules), "annotation", "strategy", or
        two of them if the strategy splits one more dim.
        """
        found = {}
        for name, shape in self._shapes.items():
            spec, rule = self._spec(name, shape)
            parts = [] if rule is None else [self._source(name, rule)]
            if set(axes_of_spec(spec)) - set(axes_of_spec(rule.spec if rule else REPLICATED)):
                parts.append("strategy")
            if parts:
                found[name] = " + ".join(parts)
        return found

    def in_model(self, variables: PyTree) -> PyTree:
        """Returns the specs that the variables of a model have while it runs."""
        return _with_paths(lambda name, x: self._in_model(name, tuple(x.shape)), variables)

    def to_device(self, tree: PyTree, of: Callable[[Any], PyTree]) -> PyTree:
        """Returns a tree with leaves in host memory copied to the devices. Traced under `jit`.

        `tree` is a part of the state; `of` selects the same part from the state's shardings.
        """
        if self.shardings is self.on_device:
            return tree

        def copy(x: jax.Array, between: Sharding, on_device: Sharding) -> jax.Array:
            return x if between == on_device else jax.device_put(x, on_device)

        return jax.tree.map(copy, tree, of(self.shardings), of(self.on_device))

    def gather(self, params: PyTree) -> PyTree:
        """Returns the parameters gathered for the model. Traced under `jit`.

        Parameters that are split over axes of `GATHER_AXES` are gathered, because each device needs
        all of them for its own examples. Splits over other axes are kept. In a scope with gathers
        they are explicit; where a device computes alone there is nothing to gather.
        """
        if not self._gathers:
            return params
        if (gathers := current_scope().gathers) is not None:
            return _with_paths(partial(self._gather_parts, gathers), params)
        alone = computes_alone(self._placement)
        return params if alone else self._constrain(params, self._gathered)

    def batch_specs(self, params: PyTree, field: str) -> PyTree:
        """Returns the specs of parameters, or of a part of them, over `GATHER_AXES` (`shard_map`).

        `field` is "params", or "opt_state" for the specs of their gradients.
        """
        return _with_paths(lambda name, _: self._over_batch(params_path(name), field), params)

    def gathered_whole(self, in_loop: Collection[str]) -> list[str]:
        """Returns the parameters that explicit gathers would gather whole, and XLA would not.

        XLA gathers stacked layers one at a time in a loop. It gathers a parameter that is annotated
        as split where the parameter is used. If an annotated model has its layers in `in_loop`, its
        other arrays are few (an embedding, an output layer), and only further layers are returned.

        Args:
          in_loop: The names of the parameters that loops over layers gather one layer at a time.
        """
        lengths = {self._shapes[name][0] for name in in_loop}

        def is_whole(name: str) -> bool:
            rule = self._spec(name, self._shapes[name])[1]
            if rule is not None and rule is self._annotated.get(name):
                splits = any(self._gather_axes(rule.spec))
                return splits and (not in_loop or self._shapes[name][0] in lengths)
            return self._is_stacked(name) and any(self._over_batch(name, "params"))

        return [name for name in self._shapes if name not in in_loop and is_whole(name)]

    def gradients(self, gradients: PyTree) -> PyTree:
        """Constrains gradients to the shardings of the optimizer's state. Traced under `jit`.

        XLA then reduce-scatters them, and each device updates its own part.
        """
        return self._constrain(gradients, self._gradient) if self.splits_gradients else gradients

    @property
    def splits_gradients(self) -> bool:
        """Whether `gradients` splits arrays, although their parameters may not be split."""
        strategy = self._placement.strategy
        return strategy.shards_params or strategy.shards_optimizer

    def at_rest(self, params: PyTree) -> PyTree:
        """Constrains updated parameters to their shardings. Traced under `jit`.

        If only the optimizer state is sharded, this gathers them once.
        """
        if not self._placement.strategy.shards_optimizer:
            return params
        return jax.lax.with_sharding_constraint(params, self.on_device.params)

    # -- the spec of one leaf ------------------------------------------------------------------

    def _on_device(self, name: str, leaf: Any) -> Sharding:
        spec, rule = self._spec(name, tuple(leaf.shape))
        if self._placement.mesh is not None:
            intended = rule is not None and rule.spec == REPLICATED
            if not intended:
                self._check_split(name, leaf, spec)
        return self._placement.sharding(spec)

    def _at_rest(self, name: str, leaf: Any, on_device: Sharding) -> Sharding:
        # Scalars, such as an optimizer's counts, are not worth a transfer.
        field = self._fields[field_of(name)]
        is_offloaded = self._options.offload != "optimizer" or field.of_optimizer
        on_host = self._placement.strategy.on_host and field.like_params and is_offloaded
        return on_device.with_memory_kind("pinned_host") if leaf.shape and on_host else on_device

    def _gathered(self, name: str, leaf: Any) -> Sharding | None:
        _, rule = self._spec(name, leaf.shape)
        if rule is not None and rule.gather is GatherPolicy.PER_LAYER:
            return None
        return self._placement.sharding(self._in_model(name, leaf.shape))

    def _gather_parts(self, gathers: ParamGathers, name: str, part: jax.Array) -> jax.Array:
        """Gathers a parameter explicitly from the devices' parts."""
        name = params_path(name)
        split = split_dims(self._over_batch(name, "params"), part.ndim)
        if not split:
            return part
        stacked = self._is_stacked(name) and all(dim > -part.ndim for dim, _ in split)
        return gathers.gather(name, part, split, stacked=stacked)

    def _is_stacked(self, name: str) -> bool:
        """Returns whether a parameter may consist of layers, which a loop gathers one at a time."""
        rule = self._spec(name, self._shapes[name])[1]
        return rule is not None and (
            rule.gather is GatherPolicy.PER_LAYER or rule is self._annotated.get(name)
        )

    def _over_batch(self, name: str, field: str) -> PartitionSpec:
        """Returns a parameter's spec in a field, with only the axes of `GATHER_AXES`."""
        return self._gather_axes(self._spec(name, self._shapes[name], field=field)[0])

    def _gather_axes(self, spec: PartitionSpec) -> PartitionSpec:
        size = self._placement.size
        return keep_axes(spec, [axis for axis in GATHER_AXES if size(axis) > 1])

    def _in_model(self, name: str, shape: Shape) -> PartitionSpec:
        spec, rule = self._spec(name, shape)
        if rule is not None and rule.gather is GatherPolicy.PER_LAYER:
            return spec
        if rule is not None and rule is self._annotated.get(name):
            return rule.spec  # the model was written for this spec
        return keep_axes(spec, [axis for axis in AXES if axis not in GATHER_AXES])

    def _gradient(self, name: str, leaf: Any) -> Sharding:
        return self._placement.sharding(self._spec(name, leaf.shape, field="opt_state")[0])

    def _spec(
        self, name: str, shape: Shape, field: str | None = None
    ) -> tuple[PartitionSpec, Rule | None]:
        """Returns the spec of a leaf, or of a parameter's leaf in another field, and its rule."""
        row = self._fields[field or field_of(name)]
        if row.replicated or self._placement.mesh is None:
            return REPLICATED, None
        rule = self._rule(name, shape)
        if rule is not None and rule.spec == REPLICATED:
            return REPLICATED, rule
        spec = REPLICATED if rule is None else rule.spec
        for axis in self._placement.strategy.split_axes(row):
            spec = self._also_over(axis, spec, shape)
        return spec, rule

    def _rule(self, name: str, shape: Shape) -> Rule | None:
        field = field_of(name)
        like_params = self._fields[field].like_params
        owner = parameter_of(name, shape, self._shapes) if like_params else None
        if owner is not None and self._shapes[owner] == shape[1:] and owner != name:
            # A stack of arrays of its parameter's shape: the memory of `optax.lbfgs`.
            rule = self._rule(owner, shape[1:])
            if rule is None or rule.spec == REPLICATED:
                return rule
            return replace(rule, spec=PartitionSpec(None, *rule.spec))
        follows = owner is not None and self._shapes[owner] == shape
        derived = self._derived.get(str(owner) if follows else name)
        for number, rule in enumerate(self._rules):
            # A leaf of the optimizer's state has the rule of its parameter if both have the same
            # shape (a factored second moment has another), or a rule whose pattern names the field.
            names = [str(owner)] if follows else []
            if not like_params or field == "params" or field in rule.pattern:
                names.append(name)
            if derived:
                names = [derived.parameter]
            if not any(re.search(rule.pattern, known) for known in names):
                continue
            self._unused.pop(number, None)
            if derived:
                rule = dataclasses.replace(rule, spec=derived.spec(rule.spec))
            self._check_divides(name, shape, rule)
            return rule
        annotated = self._annotated.get(str(owner) if follows else name)
        if annotated is not None:
            self._check_divides(name, shape, annotated)
        return annotated

    def _annotation_rules(
        self, annotations: Mapping[str, Annotation], axis_rules: AxisRules | None
    ) -> dict[str, Rule]:
        """Returns a rule for each annotated array that no rule of the experiment matches."""
        free = {
            path: annotation
            for path, annotation in annotations.items()
            if not any(re.search(rule.pattern, path) for rule in self._rules)
        }
        specs = specs_of(free, axis_rules)
        for path, dims in self._derived.items():
            if dims.parameter in specs:
                specs[path] = dims.spec(specs[dims.parameter])
        return {path: Rule(f"^{re.escape(path)}$", spec) for path, spec in specs.items()}

    def _source(self, name: str, rule: Rule) -> str:
        is_annotation = rule is self._annotated.get(name)
        if is_annotation:
            return "annotation"
        # By pattern, because the rule of a derived parameter has another spec.
        return f"rule {[each.pattern for each in self._rules].index(rule.pattern) + 1}"

    def _also_over(self, axis: str, spec: PartitionSpec, shape: Shape) -> PartitionSpec:
        """Returns `spec` with `axis` added to the largest dim that is free and divides."""
        size = self._placement.size(axis)
        if size == 1 or axis in axes_of_spec(spec) or math.prod(shape) < self._options.min_size:
            return spec
        entries = [*spec, *[None] * (len(shape) - len(spec))]
        # An axis of size 1 splits nothing, so its dim is free.
        taken = [
            math.prod(map(self._placement.size, axes_of_entry(entry))) > 1 for entry in entries
        ]
        free = [d for d, n in enumerate(shape) if not taken[d] and n % size == 0]
        if not free:
            return spec
        entries[max(free, key=lambda dim: shape[dim])] = axis
        return PartitionSpec(*entries)

    def _used(self, spec: PartitionSpec) -> list[str]:
        return [axis for axis in axes_of_spec(spec) if self._placement.size(axis) > 1]

    # -- errors --------------------------------------------------------------------------------

    def _check_divides(self, name: str, shape: Shape, rule: Rule) -> None:
        size_of = self._placement.size
        if len(rule.spec) > len(shape):
            raise UserError(
                f"{name} has shape {shape}, {len(shape)} dims, and {self._described(rule)} gives "
                f"it a spec of {len(rule.spec)}: {rule.spec}"
            )
        for dim, (size, entry) in enumerate(zip(shape, rule.spec, strict=False)):
            names = axes_of_entry(entry)
            if unknown := [axis for axis in names if axis not in AXES]:
                raise UserError(
                    f"{name}: {self._described(rule)} splits dim {dim} over {unknown[0]!r}, "
                    f"which is not an axis of the mesh.{did_you_mean(str(unknown[0]), AXES)}"
                )
            parts = math.prod(map(size_of, names))
            if size % parts:
                whole = "map its name to None in axis_rules"
                if not self._is_annotation(rule):
                    whole = f"give a rule that does not split it (now {rule.pattern!r})"
                raise UserError(
                    f"{name}: dim {dim} of shape {shape} does not divide over "
                    f"{' * '.join(f'{axis}={size_of(axis)}' for axis in names)} "
                    f"({division(size, parts)}): make it a multiple of {parts}, such as "
                    f"{-(-size // parts) * parts}, or {whole}"
                )

    def _described(self, rule: Rule) -> str:
        return "its annotation" if self._is_annotation(rule) else f"the rule {rule.pattern!r}"

    def _is_annotation(self, rule: Rule) -> bool:
        return any(rule is known for known in self._annotated.values())

    def _check_split(self, name: str, leaf: Any, spec: PartitionSpec) -> None:
        """Checks that a large leaf is split if the strategy splits such leaves."""
        strategy, row = self._placement.strategy, self._fields[field_of(name)]
        by_rules = (TENSOR_AXIS,) * (strategy.needs_rules and row.like_params)
        splitting = strategy.split_axes(row) + by_rules
        axes = [axis for axis in splitting if self._placement.size(axis) > 1]
        if not axes or self._used(spec):
            return
        elements = math.prod(leaf.shape)
        held = elements * leaf.dtype.itemsize
        if elements < self._options.min_size or held <= self._options.replicated_limit:
            return
        sizes = " and ".join(f"{axis}={self._placement.size(axis)}" for axis in axes)
        dims = ", ".join(division(n, self._placement.size(axes[0])) for n in leaf.shape)
        why = f"no dim divides ({dims}). Make a dim divide, or give"
        if axes == [TENSOR_AXIS]:
            why = "only rules split over that. Give"
        raise NotSplitError(
            f"{name}, shape {tuple(leaf.shape)}, would be replicated, {byte_size(held)}: "
            f"strategy {self._placement.name} splits over {sizes}, no rule splits it, and {why} a "
            "rule for it: PartitionSpec() replicates it (or raise "
            f"{option('sharding.replicated_limit')})"
        )

    def _constrain(self, params: PyTree, sharding: Callable[[str, Any], Sharding | None]) -> PyTree:
        def constrained(name: str, x: jax.Array) -> jax.Array:
            wanted = sharding(params_path(name), x)
            return x if wanted is None else jax.lax.with_sharding_constraint(x, wanted)

        return _with_paths(constrained, params)


def _with_paths(function: Callable[..., Any], *trees: PyTree) -> PyTree:
    """Maps `function` of a leaf's path and its leaves over trees."""
    return jax.tree_util.tree_map_with_path(lambda p, *x: function(path_name(p), *x), *trees)


# -- The check that rules name each mesh axis over which only rules split --------------------------


def check_axes_used(placement: Placement, rules: Sequence[Rule], annotated: Sequence[Rule]) -> None:
    """Raises `UserError` if no rule names an axis over which only rules split.

    The devices of such an axis would repeat each other's work. `annotated` are the rules of the
    model's annotations.
    """
    named = {axis for rule in (*rules, *annotated) for axis in axes_of_spec(rule.spec)}
    for axis in [each for each in MESH_AXES if each.only_by_rules and each.name not in named]:
        name, size = axis.name, placement.size(axis.name)
        needed = axis.splits_tensors and placement.strategy.needs_rules
        if size == 1 and not needed:
            continue
        or_annotations = f" and {len(annotated)} annotations" if annotated else ""
        effect, instead = (
            "its devices would repeat each other's work",
            "choose another strategy" if needed else f"remove mesh.{name}",
        )
        if axis.splits_batch:
            effect, instead = "every device would hold all parameters", f"use mesh.{REST_AXIS}"
        raise UserError(
            f"mesh axis {name}={size} is not used: under strategy {placement.name} only "
            f"sharding rules split over {name}, and none of the {len(rules)} rules"
            f"{or_annotations} names it, so {effect}. Give rules that name {name} or {instead}"
        )


# -- The table of `--show-sharding`: the sharding of each parameter and its bytes on a device ------


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

    def _repr_html_(self) -> str:
        """Returns the table for a notebook."""
        from spmdtrain.document.notebook import as_html

        return as_html(*sharding_blocks(self))


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
    fields: Mapping[str, StateField] = abstract_state.FIELDS
    leaves, where = named_leaves(abstract_state), named_leaves(shardings)
    assert list(leaves) == list(where), "the state and its shardings are different trees"
    shapes = {n: tuple(leaf.shape) for n, leaf in leaves.items() if field_of(n) == "params"}
    sums = {name: _Sums() for name in shapes}
    other, others = _Sums(), []
    places = _Places()
    for name, leaf in leaves.items():
        held = places.add(leaf, where[name])
        field = fields[field_of(name)]
        owner = parameter_of(name, tuple(leaf.shape), shapes) if field.like_params else None
        row = other if owner is None else sums[owner]
        if owner is None:
            others.append(name)
        if field.of_optimizer:
            row.optimizer += held
        elif field.evaluated:
            row.average += held
        else:
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


_COLUMNS = {
    "parameter": "",
    "shape": "",
    "dtype": "",
    "spec": "",
    "source": "",
    "bytes per\ndevice": "",
    "optimizer\nper device": "optimizer",
    "average\nper device": "average",
}
"""The columns of the table, and the words before their cells on a narrow terminal."""


def sharding_blocks(table: ShardingTable) -> list[TableBlock | NoteBlock]:
    """Returns the table and its summary. On a narrow terminal, each row is two lines."""
    rows = [
        (
            *(row.name, row.shape, row.dtype, row.spec, row.source),
            *map(str, (row.own, row.optimizer, row.average)),
        )
        for row in [*table.rows, table.total]
    ]
    block = TableBlock(
        tuple(_COLUMNS),
        rows,
        numeric=frozenset({5, 6, 7}),
        totals=1,
        whole=frozenset(range(8)),
        lines=((0, 3, 4), (1, 2, 5, 6, 7)),
        labels=dict(enumerate(_COLUMNS.values())),
    )
    if not table.total.average.whole:
        block = block.without({7})
    if not any(row.source for row in table.rows):
        block = block.without({4})
    return [block, *map(NoteBlock, summary(table))]


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

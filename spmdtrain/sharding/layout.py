"""The sharding of every leaf of the state, from rules, the model's annotations and the strategy."""

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec, Sharding

from spmdtrain.config.options import ShardingOptions
from spmdtrain.document.terminal import byte_size
from spmdtrain.errors import UserError, did_you_mean, option
from spmdtrain.sharding.annotations import Annotation, AxisRules, DimsOf, specs_of
from spmdtrain.sharding.axis_checks import check_axes_used
from spmdtrain.sharding.describe import (
    axes_of_entry,
    axes_of_spec,
    division,
    keep_axes,
    split_dims,
)
from spmdtrain.sharding.mesh import GATHER_AXES
from spmdtrain.sharding.param_gather import ParamGathers, current_gathers
from spmdtrain.sharding.placement import Placement, computes_alone
from spmdtrain.sharding.rules import REPLICATED, GatherPolicy, Rule
from spmdtrain.sharding.state_paths import Shape, field_of, parameter_of, params_path
from spmdtrain.strategies import AXES, STATE
from spmdtrain.tree import named_leaves, path_name

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
        named = named_leaves(state)
        self._shapes = {n: tuple(x.shape) for n, x in named.items() if field_of(n) == "params"}
        self._annotated = self._annotation_rules(annotations or {}, axis_rules)
        check_axes_used(placement, self._rules, list(self._annotated.values()))
        self.on_device: Any = _with_paths(self._on_device, state)
        if placement.mesh is not None and self._unused:
            patterns = [rule.pattern for rule in self._unused.values()]
            raise UserError(f"sharding rules that match no leaf of the state: {patterns}")
        self.shardings: Any = _with_paths(self._at_rest, state, self.on_device)
        used = {a for n, shape in self._shapes.items() for a in self._used(self._spec(n, shape)[0])}
        self.replicates_params = not used
        self.splits_tensors = not used <= set(GATHER_AXES)
        self._gathers = bool(used & set(GATHER_AXES))

    def unsharded_params(self) -> list[str]:
        """Returns the large parameters that the strategy does not split because no dim divides.

        Parameters that a rule replicates are not included.
        """
        strategy = self._placement.strategy
        field, axis = ("params", "fsdp") if strategy.shards_params else ("opt_state", "data")
        splits = strategy.shards_params or strategy.shards_optimizer
        if not splits or self._placement.size(axis) == 1:
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

        def copy(x: jax.Array, between: Sharding, on_device: Sharding) -> jax.Array:
            return x if between == on_device else jax.device_put(x, on_device)

        return jax.tree.map(copy, tree, of(self.shardings), of(self.on_device))

    def gather(self, params: PyTree) -> PyTree:
        """Returns the parameters gathered for the model. Traced under `jit`.

        Parameters that are split over axes of `GATHER_AXES` are gathered, because each device needs
        all of them for its own examples. Splits over other axes are kept. Under `use_gathers` the
        gathers are explicit; where a device computes alone there is nothing to gather.
        """
        if not self._gathers:
            return params
        if (gathers := current_gathers()) is not None:
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
        if not leaf.shape or not self._rests_on_host(name):
            return on_device
        return on_device.with_memory_kind("pinned_host")

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

    def _rests_on_host(self, name: str) -> bool:
        field = field_of(name)
        if self._options.offload == "optimizer" and field != "opt_state":
            return False
        return field in self._placement.strategy.on_host

    def _spec(
        self, name: str, shape: Shape, field: str | None = None
    ) -> tuple[PartitionSpec, Rule | None]:
        """Returns the spec of a leaf, or of a parameter's leaf in another field, and its rule."""
        strategy = self._placement.strategy
        field = field or field_of(name)
        if field in ("step", "key") or self._placement.mesh is None:
            return REPLICATED, None
        rule = self._rule(name, shape)
        if rule is not None and rule.spec == REPLICATED:
            return REPLICATED, rule
        spec = REPLICATED if rule is None else rule.spec
        if field in STATE and strategy.shards_params:
            spec = self._also_over("fsdp", spec, shape)
        if field == "opt_state" and strategy.shards_optimizer:
            spec = self._also_over("data", spec, shape)
        return spec, rule

    def _rule(self, name: str, shape: Shape) -> Rule | None:
        owner = parameter_of(name, shape, self._shapes)
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
            if field_of(name) not in ("opt_state", "averaged") or field_of(name) in rule.pattern:
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
        field = field_of(name)
        axes = [axis for axis in self._splitting(field) if self._placement.size(axis) > 1]
        if not axes or self._used(spec):
            return
        elements = math.prod(leaf.shape)
        held = elements * leaf.dtype.itemsize
        if elements < self._options.min_size or held <= self._options.replicated_limit:
            return
        sizes = " and ".join(f"{axis}={self._placement.size(axis)}" for axis in axes)
        dims = ", ".join(division(n, self._placement.size(axes[0])) for n in leaf.shape)
        why = f"no dim divides ({dims}). Make a dim divide, or give"
        if axes == ["tensor"]:
            why = "only rules split over that. Give"
        raise NotSplitError(
            f"{name}, shape {tuple(leaf.shape)}, would be replicated, {byte_size(held)}: "
            f"strategy {self._placement.name} splits over {sizes}, no rule splits it, and {why} a "
            "rule for it: PartitionSpec() replicates it (or raise "
            f"{option('sharding.replicated_limit')})"
        )

    def _splitting(self, field: str) -> Iterable[str]:
        """Yields the axes over which the strategy splits the large leaves of a field."""
        strategy = self._placement.strategy
        if field not in STATE:
            return
        if strategy.shards_params:
            yield "fsdp"
        if strategy.shards_optimizer and field == "opt_state":
            yield "data"
        if strategy.needs_rules:
            yield "tensor"

    def _constrain(self, params: PyTree, sharding: Callable[[str, Any], Sharding | None]) -> PyTree:
        def constrained(name: str, x: jax.Array) -> jax.Array:
            wanted = sharding(params_path(name), x)
            return x if wanted is None else jax.lax.with_sharding_constraint(x, wanted)

        return _with_paths(constrained, params)


def _with_paths(function: Callable[..., Any], *trees: PyTree) -> PyTree:
    """Maps `function` of a leaf's path and its leaves over trees."""
    return jax.tree_util.tree_map_with_path(lambda p, *x: function(path_name(p), *x), *trees)

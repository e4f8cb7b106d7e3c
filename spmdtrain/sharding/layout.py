"""Where every leaf of the state lives: rules from paths to partition specs, checked."""

import enum
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from spmdtrain.config import ShardingOptions
from spmdtrain.errors import UserError, did_you_mean
from spmdtrain.sharding.mesh import BATCH_AXES, describe_devices
from spmdtrain.sharding.placement import Placement
from spmdtrain.strategies import AXES, STATE
from spmdtrain.terminal import byte_size
from spmdtrain.tree import named_leaves, path_name

PyTree = Any
Shape = tuple[int, ...]
REPLICATED = PartitionSpec()


class GatherPolicy(enum.Enum):
    """When a parameter that is split over a batch axis is made whole for the step."""

    BEFORE_FORWARD = "at the start"
    """Before the model is called: XLA then places the all-gather where it is used."""
    PER_LAYER = "in the model"
    """Left to XLA inside the model, for layers that are stacked and looped over: only one of them
    is ever whole."""


@dataclass(frozen=True)
class Rule:
    """Leaves whose path the regular expression matches anywhere get this spec.

    A strategy that splits the state adds its axis in a dim that the spec leaves free; but the
    spec `PartitionSpec()` means replicated, and stays so.
    """

    pattern: str
    spec: PartitionSpec
    gather: GatherPolicy = GatherPolicy.BEFORE_FORWARD

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise UserError(
                f"sharding rule {self.pattern!r} is no regular expression: {error}"
            ) from error
        if not isinstance(self.spec, PartitionSpec) or PartitionSpec.UNCONSTRAINED in self.spec:
            raise UserError(
                f"sharding rule {self.pattern!r} has the spec {self.spec!r}: it must be a "
                "jax.sharding.PartitionSpec of axes and None"
            )
        if len(set(axes := _axes(self.spec))) < len(axes):
            raise UserError(f"sharding rule {self.pattern!r} names an axis twice: {self.spec}")


def parameter_of(name: str, shape: Shape, parameters: Mapping[str, Shape]) -> str | None:
    """The parameter that a leaf of the state belongs to: one whose path ends the leaf's own.

    `opt_state/0/mu/blocks/q` belongs to `params/blocks/q`, and of several optimizers
    `opt_state/actor/0/mu/q` to `params/actor/q`; what is no part of the parameters, the optimizer's
    state or the average belongs to none. Of several, that of the leaf's shape, then the longest.
    """
    root, *parts = name.split("/")
    if root not in ("params", *STATE):
        return None
    tails = [parts[start:] for start in range(len(parts) + 1)]
    if not "".join(parts[:1]).isdecimal():  # a number is a place in a chain of optimizers
        tails += [parts[:1] + tail for tail in tails]
    names = ["/".join(["params", *tail]) for tail in sorted(tails, key=len, reverse=True)]
    found = [name for name in names if name in parameters]
    of_its_shape = [name for name in found if parameters[name] == shape]
    return next(iter(of_its_shape + found), None)


def field_of(name: str) -> str:
    """The field of the state that a leaf's path begins with."""
    return name.partition("/")[0]


class NotSplitError(UserError):
    """A strategy should split a large leaf of the state, and cannot."""


class Layout:
    """The shardings of a state, from rules and a strategy.

    `rules` are the experiment's, the first match counts; an optimizer's leaf of its parameter's
    shape goes where that goes, and the strategy splits what they leave free. `state` holds anything
    with shapes and dtypes, its fields those of `TrainState`. Raises `UserError` for a rule that
    matches nothing, a dim that does not divide, and what should be split and is not.
    """

    def __init__(
        self, state: Any, placement: Placement, rules: Sequence[Rule], options: ShardingOptions
    ) -> None:
        self._placement, self._rules, self._options = placement, tuple(rules), options
        self._unused = dict(enumerate(self._rules))
        named = named_leaves(state)
        self._shapes = {n: tuple(x.shape) for n, x in named.items() if field_of(n) == "params"}
        self._check_axes_used()
        self.on_device: Any = _with_paths(self._on_device, state)
        """Where each leaf is, in device memory, while a step computes."""
        if placement.mesh is not None and self._unused:
            patterns = [rule.pattern for rule in self._unused.values()]
            raise UserError(f"sharding rules that match no leaf of the state: {patterns}")
        self.shardings: Any = _with_paths(self._at_rest, state, self.on_device)
        """Where it rests between steps: there, or in its host's memory."""
        used = {a for n, shape in self._shapes.items() for a in self._used(self._spec(n, shape)[0])}
        self.replicates_params = not used
        """Whether every device has all parameters, whatever axes the mesh has."""
        self._gathers = bool(used & set(BATCH_AXES))

    def unsharded_params(self) -> list[str]:
        """Parameters of which the strategy would split something large, had it a dim that divides.

        What a rule says is replicated is meant to be.
        """
        strategy = self._placement.strategy
        field, axis = ("params", "fsdp") if strategy.shards_params else ("opt_state", "data")
        asked = strategy.shards_params or strategy.shards_optimizer
        if not asked or self._placement.size(axis) == 1:
            return []
        found = []
        for name, shape in self._shapes.items():
            spec, rule = self._spec(name, shape, field=field)
            large = math.prod(shape) >= self._options.min_size
            if large and not self._used(spec) and (rule is None or rule.spec != REPLICATED):
                found.append(name.removeprefix("params/"))
        return found

    def to_device(self, tree: PyTree, of: Callable[[Any], PyTree]) -> PyTree:
        """What rests in host memory, brought to the devices; `of` says which part of the state."""

        def brought(x: jax.Array, resting: Sharding, there: Sharding) -> jax.Array:
            return x if resting == there else jax.device_put(x, there)

        return jax.tree.map(brought, tree, of(self.shardings), of(self.on_device))

    def whole(self, params: PyTree) -> PyTree:
        """Parameters as the model reads them: split at most as the rules say.

        What a strategy has split over axes of the batch is gathered, since each device computes
        other examples with all of it.
        """
        return self._constrain(params, self._whole) if self._gathers else params

    def gradients(self, gradients: PyTree) -> PyTree:
        """Gradients split as the optimizer's state of their parameters is.

        So they are reduced into their parts, and updates are computed there.
        """
        strategy = self._placement.strategy
        if not (strategy.shards_params or strategy.shards_optimizer):
            return gradients
        return self._constrain(gradients, self._gradient)

    def at_rest(self, params: PyTree) -> PyTree:
        """Updated parameters where they rest: made whole once, whoever reads them."""
        if not self._placement.strategy.shards_optimizer:
            return params
        return jax.lax.with_sharding_constraint(params, self.on_device.params)

    # -- the spec of one leaf ------------------------------------------------------------------

    def _on_device(self, name: str, leaf: Any) -> Sharding:
        spec, rule = self._spec(name, tuple(leaf.shape))
        if self._placement.mesh is not None:
            meant = rule is not None and rule.spec == REPLICATED
            if not meant:
                self._check_split(name, leaf, spec)
        return self._placement.sharding(spec)

    def _at_rest(self, name: str, leaf: Any, on_device: Sharding) -> Sharding:
        # Scalars, an optimizer's counts, are not worth the way.
        if not leaf.shape or not self._rests_on_host(name):
            return on_device
        return on_device.with_memory_kind("pinned_host")

    def _whole(self, name: str, leaf: Any) -> Sharding | None:
        spec, rule = self._spec(name, leaf.shape)
        if rule is not None and rule.gather is GatherPolicy.PER_LAYER:
            return None
        kept = [tuple(a for a in _names(entry) if a not in BATCH_AXES) for entry in spec]
        return self._placement.sharding(PartitionSpec(*(axes or None for axes in kept)))

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
        """The spec of a leaf (of a parameter's own path, also as `field` would have it)."""
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
        follows = owner is not None and self._shapes[owner] == shape
        for number, rule in enumerate(self._rules):
            # An optimizer's leaf goes where its parameter goes, if it has that one's shape (a
            # factored second moment has not), or where a rule that is about optimizers says.
            names = [str(owner)] if follows else []
            if field_of(name) not in ("opt_state", "averaged") or field_of(name) in rule.pattern:
                names.append(name)
            if not any(re.search(rule.pattern, known) for known in names):
                continue
            self._unused.pop(number, None)
            self._check_divides(name, shape, rule)
            return rule
        return None

    def _also_over(self, axis: str, spec: PartitionSpec, shape: Shape) -> PartitionSpec:
        """`spec` with the largest free dim that divides split over `axis` too."""
        size = self._placement.size(axis)
        if size == 1 or axis in _axes(spec) or math.prod(shape) < self._options.min_size:
            return spec
        entries = [*spec, *[None] * (len(shape) - len(spec))]
        # An axis of size 1 splits nothing: its dim is as free as one that no rule names.
        taken = [math.prod(map(self._placement.size, _names(entry))) > 1 for entry in entries]
        free = [d for d, n in enumerate(shape) if not taken[d] and n % size == 0]
        if not free:
            return spec
        entries[max(free, key=lambda dim: shape[dim])] = axis
        return PartitionSpec(*entries)

    def _used(self, spec: PartitionSpec) -> list[str]:
        return [axis for axis in _axes(spec) if self._placement.size(axis) > 1]

    # -- errors --------------------------------------------------------------------------------

    def _check_axes_used(self) -> None:
        """Checks that the rules use every axis that splits no batch.

        Devices along any other axis would repeat each other's work.
        """
        placement = self._placement
        named = {axis for rule in self._rules for axis in _axes(rule.spec)}
        for axis in AXES:
            needed = axis == "tensor" and placement.strategy.needs_rules
            if axis in BATCH_AXES or axis in named or not (needed or placement.size(axis) > 1):
                continue
            raise UserError(
                f"mesh axis {axis}={placement.size(axis)} is not used: under strategy "
                f"{placement.name} only sharding rules split over {axis}, and none of the "
                f"{len(self._rules)} rules names it, so its devices would repeat each other's "
                f"work. Give rules that name {axis}"
                + (" or choose another strategy" if needed else f" or remove mesh.{axis}")
            )

    def _check_divides(self, name: str, shape: Shape, rule: Rule) -> None:
        mesh = self._placement.mesh
        assert mesh is not None
        if len(rule.spec) > len(shape):
            raise UserError(
                f"{name} has shape {shape}, {len(shape)} dims, and the rule {rule.pattern!r} gives "
                f"it a spec of {len(rule.spec)}: {rule.spec}"
            )
        for dim, (size, entry) in enumerate(zip(shape, rule.spec, strict=False)):
            names = _names(entry)
            if unknown := [axis for axis in names if axis not in mesh.shape]:
                raise UserError(
                    f"{name}: the rule {rule.pattern!r} splits dim {dim} over {unknown[0]!r}, "
                    f"which is no axis of the mesh.{did_you_mean(str(unknown[0]), mesh.shape)}"
                )
            parts = math.prod(mesh.shape[axis] for axis in names)
            if size % parts:
                raise UserError(
                    f"{name}: dim {dim} of shape {shape} does not divide over "
                    f"{' * '.join(f'{axis}={mesh.shape[axis]}' for axis in names)} "
                    f"({_division(size, parts)})"
                )

    def _check_split(self, name: str, leaf: Any, spec: PartitionSpec) -> None:
        """Nothing large is silently replicated where a strategy would have it split."""
        field = field_of(name)
        axes = [axis for axis in self._splitting(field) if self._placement.size(axis) > 1]
        if not axes or self._used(spec):
            return
        elements = math.prod(leaf.shape)
        held = elements * leaf.dtype.itemsize
        if elements < self._options.min_size or held <= self._options.replicated_limit:
            return
        sizes = " and ".join(f"{axis}={self._placement.size(axis)}" for axis in axes)
        dims = ", ".join(_division(n, self._placement.size(axes[0])) for n in leaf.shape)
        why = f"no dim divides ({dims}). Make a dim divide, or give"
        if axes == ["tensor"]:
            why = "over that only rules split. Give"
        raise NotSplitError(
            f"{name}, shape {tuple(leaf.shape)}, would be whole on each device, {byte_size(held)}: "
            f"strategy {self._placement.name} splits over {sizes}, no rule splits it, and {why} a "
            "rule for it: PartitionSpec() says that it is meant to be replicated (or raise "
            "--sharding.replicated-limit)"
        )

    def _splitting(self, field: str) -> Iterable[str]:
        """The axes over which the strategy has the large leaves of a field split."""
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
            asked = sharding("/".join(filter(None, ["params", name])), x)
            return x if asked is None else jax.lax.with_sharding_constraint(x, asked)

        return _with_paths(constrained, params)


def _with_paths(function: Callable[..., Any], *trees: PyTree) -> PyTree:
    """`function` of a leaf's path and of the leaves there."""
    return jax.tree_util.tree_map_with_path(lambda p, *x: function(path_name(p), *x), *trees)


def check_placed(tree: PyTree, shardings: PyTree, when: str) -> None:
    """Raise `UserError` where a leaf is not where its sharding says, memory kind included."""
    asked = named_leaves(shardings)
    for name, leaf in named_leaves(tree).items():
        want, has = asked[name], leaf.sharding
        if has.is_equivalent_to(want, leaf.ndim) and _memory(has) == _memory(want):
            continue
        raise UserError(
            f"{when}, {name} of shape {leaf.shape} is {_place(has)}, and its rules ask for "
            f"{_place(want)}"
        )


def describe(sharding: Sharding) -> str:
    """How an array is split: `P('fsdp', None)`; `replicated`, with the sizes that make it so."""
    if not isinstance(sharding, NamedSharding):
        return f"on {describe_devices(sorted(sharding.device_set, key=lambda device: device.id))}"
    mesh, axes = sharding.mesh, _axes(sharding.spec)
    if not sharding.is_fully_replicated:
        return f"P({', '.join(map(_entry, sharding.spec))})"
    sizes = ", ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)
    return f"replicated ({sizes})" if axes else "replicated"


def _entry(entry: Any) -> str:
    return repr(entry[0] if isinstance(entry, tuple) and len(entry) == 1 else entry)


def _place(sharding: Sharding) -> str:
    on_host = _memory(sharding) == "pinned_host"
    return describe(sharding) + (", in host memory" if on_host else "")


def _memory(sharding: Sharding) -> str:
    kind: str | None = sharding.memory_kind
    return "device" if kind in (None, "device") else kind


def _names(entry: Any) -> tuple[str, ...]:
    """The axes of one entry of a spec."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _axes(spec: PartitionSpec) -> list[str]:
    return [axis for entry in spec for axis in _names(entry)]


def _division(size: int, parts: int) -> str:
    """`50257 = 6282 * 8 + 1`."""
    return f"{size} = {size // parts} * {parts} + {size % parts}"

"""Placements: a strategy with its mesh, and gathers of split parameters."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from spmdtrain.config.options import (
    CollectiveOptions,
    ContextMethod,
    ContextOptions,
    ExpertOptions,
    MeshSpec,
    ParameterServerOptions,
)
from spmdtrain.config.run_config import RunConfig
from spmdtrain.distributed import initialize, process_group
from spmdtrain.errors import UserError, did_you_mean, option
from spmdtrain.sharding.mesh import (
    BATCH_AXES,
    Config,
    batch_sharding,
    batch_shards,
    build_mesh,
    choose_devices,
    default_device,
    describe_devices,
    describe_mesh,
    make_cpu_devices,
    may_limit_shards,
    resolve,
)
from spmdtrain.strategies import AXES, DEFAULT, MESH_AXES, REST_AXIS, Axis, Strategy, strategy
from spmdtrain.xla.compiler import configure_collectives, keep_programs

# -- Placements: a strategy with its mesh, and access to the current one from model code -----------

T = TypeVar("T")


@dataclass(frozen=True)
class Placement:
    """A strategy and its mesh.

    Attributes:
      mesh: The mesh; None under the default strategy, whose arrays are on the default device.
      context_method: The method of attention over the axis "context"; None if shapes decide.
      limits_shards: Whether the strategy's `max_shards` has limited the axis fsdp.
      batch_axis: See `current_batch_axis`.
      apart: Axes along which each device computes steps of its own, with a state and batches of its
        own: inside such a step nothing is split over them.
    """

    strategy: Strategy
    mesh: Mesh | None
    context_method: ContextMethod | None = None
    expert: ExpertOptions = ExpertOptions()
    limits_shards: bool = False
    batch_axis: str | None = None
    apart: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The strategy's name, as in `--strategy`."""
        return self.strategy.name

    @property
    def devices(self) -> list[jax.Device]:
        """The devices in use, in mesh order."""
        return [default_device()] if self.mesh is None else list(self.mesh.devices.flat)

    @property
    def batch_shards(self) -> int:
        """The number of parts of a split batch: tf.distribute's `num_replicas_in_sync`."""
        return 1 if self.mesh is None else batch_shards(self.mesh, self.batch_axes)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes over which the examples of a batch are split."""
        return tuple(axis for axis in BATCH_AXES if axis not in self.apart)

    @property
    def batch(self) -> Sharding:
        """The sharding of a batch: its leading dim is split over the batch axes."""
        if self.mesh is None:
            return self.replicated
        return batch_sharding(self.mesh, self.batch_axes)

    @property
    def replicated(self) -> Sharding:
        """The sharding of arrays that every device holds in full."""
        return self.sharding(PartitionSpec())

    def sharding(self, spec: PartitionSpec) -> Sharding:
        """Returns the sharding of an array with this spec, in device memory."""
        if self.mesh is None:
            return SingleDeviceSharding(default_device())
        return NamedSharding(self.mesh, spec)

    def size(self, axis: str) -> int:
        """Returns the number of devices along an axis; `UserError` if no mesh has such an axis."""
        if axis not in AXES:
            raise UserError(f"{axis!r} is not an axis of a mesh.{did_you_mean(str(axis), AXES)}")
        return 1 if self.mesh is None else self.mesh.shape[axis]

    @property
    def shared_axes(self) -> list[Axis]:
        """The axes in use along which several devices compute an example together."""
        return [axis for axis in MESH_AXES if axis.shares_examples and self.size(axis.name) > 1]

    def is_virtual(self) -> bool:
        """Returns whether the devices are virtual devices of a CPU."""
        return len(self.devices) > 1 and self.devices[0].platform == "cpu"

    @property
    def axes(self) -> str:
        """The axes in use, for example "data=4 tensor=2"; "none" without a mesh."""
        return "none" if self.mesh is None else describe_mesh(self.mesh)

    @property
    def description(self) -> str:
        """The strategy and the axes in use for the log."""
        limit = f" (at most {self.strategy.max_shards} shards by default)"
        return f"{self.name}, mesh {self.axes}{limit if self.limits_shards else ''}"


def make_placement(config: RunConfig) -> Placement:
    """Returns the placement of a configuration on the devices.

    Reads `strategy`, `mesh`, `sharding.max_shards`, `context.method` and `expert`.

    Raises:
      UserError: If the mesh does not fit the devices, or the strategy does not support several
        processes.
    """
    of = strategy(config.strategy)
    if of.has_mesh:
        spec, shards = config.mesh, config.sharding.max_shards
        mesh = build_mesh(spec, of, max_shards=shards)
        if config.jit and mesh.size > 1 and jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            raise UserError(
                "JAX_DISABLE_JIT (or jax.disable_jit) is on, and without compilation JAX ignores "
                f"on which of the {mesh.size} devices arrays belong: leave it out. "
                f"{option('jit', value=False)} runs the steps operation by operation"
            )
        limits = of.max_shards is not None and mesh.shape[REST_AXIS] > 1
        limits = limits and may_limit_shards(spec, shards)
        method, expert = config.context.method, config.expert
        return Placement(of, mesh, limits_shards=limits, context_method=method, expert=expert)
    if process_group.count() > 1:
        raise UserError(
            f"strategy default is for one process, and there are {process_group.count()}: mirrored "
            "uses them all"
        )
    return Placement(of, None)


# -- the current placement -------------------------------------------------------------------------


@dataclass(frozen=True)
class Scope:
    """The values that traced code of a step finds around it.

    Attributes:
      placement: The strategy and mesh; None outside of a run.
      gathers: The gathers of split parameters; None if the parameters are global arrays.
      remat: The option `remat`, for the parts of a model that are marked.
      queries: Receives an entry for each call of `current_strategy`; None if they are not
        recorded. Caches of traces ignore it.
    """

    placement: Placement | None = None
    gathers: "ParamGathers | None" = None
    remat: str = "none"
    queries: list[str] | None = dataclasses.field(default=None, compare=False)


# A context of JAX, so that a trace cached in one scope is not reused in another.
_scope = jax.make_user_context(default_value=Scope())


def current_scope() -> Scope:
    """Returns the scope of the calling code."""
    scope: Scope = _scope.value
    return scope


def use_scope(**changes: Any) -> AbstractContextManager[Any]:
    """Returns a context manager with the calling code's scope, some fields of which change."""
    context: AbstractContextManager[Any] = _scope(dataclasses.replace(current_scope(), **changes))
    return context


is_data_worker = False
"""Whether this process is a data worker of a run (`data_workers`)."""


def current_strategy() -> Placement:
    """Returns the strategy and mesh that the calling code runs under: a `Trainer`'s or `Loop`'s.

    Outside of a run it is the default strategy (see `has_strategy`), as with
    `tf.distribute.get_strategy`: one device, and no mesh.

    Raises:
      UserError: In a worker that reads data, which does not know the strategy of its run.
    """
    if (queries := current_scope().queries) is not None:
        queries.append("current_strategy")
    if is_data_worker:
        raise UserError(
            "current_strategy() was called in a data worker, which does not know the strategy of "
            f"its run: leave the call out of the dataset, or {option('data_workers')} out"
        )
    return _strategy()


def has_strategy() -> bool:
    """Returns whether the calling code runs under another strategy than the default one.

    It is False outside of a run, and within `per_replica`.
    """
    return current_strategy().mesh is not None


def current_device() -> jax.Device:
    """Returns one of the devices that the calling code runs on. All are of the same kind."""
    return _strategy().devices[0]


def current_context_method() -> ContextMethod | None:
    """Returns the requested method of attention over "context"; None if shapes decide."""
    return _strategy().context_method


def current_expert_options() -> ExpertOptions:
    """Returns the options of the exchange of tokens over "expert"."""
    return _strategy().expert


def current_batch_shards() -> int:
    """Returns the number of parts that the batch is split into where the calling code runs.

    For code whose results do not depend on the number. Other code calls `current_strategy`.
    """
    return _strategy().batch_shards


def current_batch_axis() -> str | None:
    """Returns the named axis over which the calling code has one of the parts of the batch.

    The parts have the same number of rows, so `jax.lax.pmean(x.mean(0), axis)` is the mean over the
    batch. None if the calling code has the whole batch.
    """
    return _strategy().batch_axis


def is_under_shard_map(placement: Placement) -> bool:
    """Returns whether the calling code runs on each device of the run's mesh alone."""
    current = current_scope().placement
    return placement.mesh is not None and current is not None and current.mesh is None


def computes_alone(placement: Placement) -> bool:
    """Returns whether the calling code computes with whole arrays as on a single device."""
    return current_scope().queries is not None or is_under_shard_map(placement)


@dataclass(frozen=True)
class CurrentMesh:
    """The mesh of the calling code, for operations that XLA cannot partition.

    Attributes:
      mesh: The mesh for `jax.shard_map`; None for the mesh of JAX's context.
      free: The axes over which arrays are split automatically: none on one device, or where each
        device computes alone (under `jax.shard_map`).
    """

    mesh: Mesh | None
    sizes: Mapping[str, int]
    free: tuple[str, ...]

    def parts(self, *axes: str) -> int:
        """Returns the number of parts of a dim split over axes; only those in `free` split it."""
        return math.prod(self.sizes[axis] for axis in axes if axis in self.free)


def current_mesh() -> CurrentMesh | None:
    """Returns the mesh of the calling code.

    It is None if the sharding of arrays is not known: outside of a run with several devices, or if
    the model has explicit axes.
    """
    context = jax.sharding.get_abstract_mesh()
    if not context.empty:
        is_split = context.size > 1 or context.manual_axes
        axes = context.axis_names if is_split else ()
        free = tuple(axis for axis in axes if axis not in context.manual_axes)
        if not set(free) <= set(AXES) or set(free) & set(context.explicit_axes):
            return None
        return CurrentMesh(None, dict(context.shape), free)
    if current_scope().placement is None and len(choose_devices(())) > 1:
        return None
    placement = _strategy()
    mesh = placement.mesh
    if mesh is None or mesh.size == 1:
        return CurrentMesh(None, {}, ())
    free = tuple(axis for axis in mesh.axis_names if axis not in placement.apart)
    return CurrentMesh(mesh, dict(mesh.shape), free)


def _strategy() -> Placement:
    return current_scope().placement or Placement(DEFAULT, None)


@contextlib.contextmanager
def record_strategy_queries() -> Iterator[list[str]]:
    """Records the calls of `current_strategy`; disables `constrain_sharding` meanwhile.

    It shows whether a function depends on the strategy. The list receives an entry for each call.
    """
    queries: list[str] = []
    with use_scope(queries=queries):
        yield queries


def use_placement(placement: Placement) -> AbstractContextManager[Any]:
    """Returns a context manager in which `current_strategy()` returns `placement`."""
    return use_scope(placement=placement)


def bind_strategy(function: Callable[..., T]) -> Callable[..., T]:
    """Returns the function with the calling code's strategy, for calls in other threads."""
    placement = current_scope().placement

    @functools.wraps(function)
    def called(*arguments: Any) -> T:
        with use_scope(placement=placement):
            return function(*arguments)

    return called


def constrain_sharding(x: jax.Array, *spec: str | tuple[str, ...] | None) -> jax.Array:
    """Constrains the sharding of an array inside a model. Without a mesh it has no effect.

    A dim that does not divide is left to XLA: unlike the rules of parameters, this is only a hint.

    Args:
      x: The array.
      *spec: One entry for each dim: "batch" for the axes that split the batch, the name of an axis,
        or None. Of a tuple of axes, the last ones are left out until the dim divides.

    Returns:
      The constrained array.

    Raises:
      ValueError: If the number of entries is wrong, or an entry is not an axis.
    """
    if len(spec) != x.ndim:
        raise ValueError(f"constrain_sharding: {len(spec)} entries for an array of shape {x.shape}")
    placement = _strategy()
    split = [_axes_of(entry, placement) for entry in spec]
    named = [axis for axes in split for axis in axes]
    if unknown := [axis for axis in named if axis not in AXES]:
        raise ValueError(
            f"constrain_sharding: {unknown[0]!r} is not an axis."
            f"{did_you_mean(str(unknown[0]), ['batch', *AXES])}"
        )
    if len(set(named)) < len(named):
        raise ValueError(f"constrain_sharding: {spec} names an axis twice (batch is {BATCH_AXES})")
    if placement.mesh is None or placement.mesh.size == 1 or current_scope().queries is not None:
        return x
    entries: list[object] = []
    for size, entry, axes in zip(x.shape, spec, split, strict=True):
        while isinstance(entry, tuple) and len(axes) > 1 and size % _parts(placement, axes):
            axes = axes[:-1]
        divides = size % _parts(placement, axes) == 0
        entries.append((axes or None) if divides else PartitionSpec.UNCONSTRAINED)
    sharding = NamedSharding(placement.mesh, PartitionSpec(*entries))
    return jax.lax.with_sharding_constraint(x, sharding)


def _axes_of(entry: str | tuple[str, ...] | None, placement: Placement) -> tuple[str, ...]:
    if entry is None:
        return ()
    names, batch = entry if isinstance(entry, tuple) else (entry,), placement.batch_axes
    return tuple(axis for name in names for axis in (batch if name == "batch" else (name,)))


def _parts(placement: Placement, axes: tuple[str, ...]) -> int:
    return math.prod(map(placement.size, axes))


# -- configurations --------------------------------------------------------------------------------


def configure_backend(config: RunConfig) -> None:
    """Joins the job, and sets the options that JAX reads at the first use of its devices."""
    keep_programs(config.compilation_cache)
    if not strategy(config.strategy).is_asynchronous:  # their tasks are independent JAX programs
        initialize.initialize(strategy=config.strategy)
    make_cpu_devices(config.cpu_devices)
    configure_collectives(config.collectives, process_group.count())


def resolve_config(config: Config) -> Config:
    """Returns the configuration resolved for the devices (see `mesh.resolve`).

    A script calls it before an experiment's `build(config)`, as the run command does.

    Args:
      config: The configuration.
    """
    configure_backend(config)
    return resolve(config, batch_shards=make_placement(config).batch_shards)


def local_config(config: Config, log: Callable[[str], None]) -> Config:
    """Returns a run's configuration adapted to a process with other devices than the run.

    Strategy and mesh are kept if they fit; if not, all devices split the batch, and `log` is called
    with a line.
    """
    # This process does not participate in the run's collectives.
    config = dataclasses.replace(config, collectives=CollectiveOptions())
    configure_backend(config)
    try:
        make_placement(config)
    except UserError as error:
        devices = describe_devices(choose_devices(()))
        log(f"mirrored over {devices}, because the run's own placement fails here: {error}")
        config = mirrored_config(config, MeshSpec())
    return dataclasses.replace(config, learning_rate_scaling="none", learning_rate_table={})


def mirrored_config(config: Config, mesh: MeshSpec) -> Config:
    """Returns a configuration whose devices all split the batch, without other meshes' options."""
    return dataclasses.replace(
        config,
        strategy="mirrored",
        mesh=mesh,
        collectives=CollectiveOptions(),
        sharding=dataclasses.replace(config.sharding, max_shards=None, offload=None),
        servers=ParameterServerOptions(),
        context=ContextOptions(),
        expert=ExpertOptions(),
    )


# -- Explicit gathers of split parameters under `shard_map`; their gradients are reduce-scattered

PyTree = Any
SplitDims = tuple[tuple[int, tuple[str, ...]], ...]
"""Pairs of a dim, counted from the end, and the mesh axes that split it."""
Scatter = Callable[[jax.Array, SplitDims], jax.Array]
"""(array, split dims) -> this device's part of the sum of the arrays of all these axes."""


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gather_array(split: SplitDims, scatter: Scatter, part: jax.Array) -> jax.Array:
    """Gathers an array from the devices' parts. `scatter` scatters its gradient.

    `scatter` adds up the devices' gradients, and leaves each device its own part of the sum.
    """
    return _all_gather(split, part)


def _all_gather(split: SplitDims, part: jax.Array) -> jax.Array:
    for dim, axes in split:
        part = jax.lax.all_gather(part, axes, axis=part.ndim + dim, tiled=True)
    return part


def _gather_forward(split: SplitDims, scatter: Scatter, part: jax.Array) -> tuple[jax.Array, None]:
    # Not by `gather_array`, so that `remat_gathers` sees the primitive that gathers.
    return _all_gather(split, part), None


def _gather_backward(
    split: SplitDims, scatter: Scatter, _: None, gradient: jax.Array
) -> tuple[jax.Array]:
    return (scatter(gradient, split),)


gather_array.defvjp(_gather_forward, _gather_backward)


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class ShardedWeight:
    """A device's part of an array that is not gathered yet. A loop over its first dim slices it."""

    part: Any
    gather: Callable[[jax.Array], jax.Array]

    def tree_flatten(self) -> tuple[tuple[Any], Callable[[jax.Array], jax.Array]]:
        return (self.part,), self.gather

    @classmethod
    def tree_unflatten(
        cls, gather: Callable[[jax.Array], jax.Array], parts: tuple[Any]
    ) -> "ShardedWeight":
        return cls(parts[0], gather)


class ParamGathers:
    """The gathers of one computation of the objective on each device's parts of the parameters.

    A stacked parameter is gathered as a whole, and so the model sees a plain array. If a loop over
    layers uses this very array (`as_shards`), it takes the parts instead and gathers one layer at
    a time. The gather of the whole then has no use, and does not get into the program.

    Args:
      scatter: Scatters the gradients. None if the parameters are whole, to record their use only.

    Attributes:
      in_loop: The names of the parameters that loops over layers have used.
    """

    def __init__(self, scatter: Scatter | None) -> None:
        self._scatter = scatter
        self._stacked: dict[int, tuple[jax.Array, str, ShardedWeight]] = {}
        self.in_loop: set[str] = set()

    def gather(self, name: str, part: jax.Array, split: SplitDims, *, stacked: bool) -> jax.Array:
        """Returns a parameter gathered from the devices' parts.

        If it is `stacked`, its first dim counts layers, which a loop may gather one at a time.
        """
        gather = _identity if self._scatter is None else partial(gather_array, split, self._scatter)
        whole: jax.Array = gather(part)
        if stacked:  # the reference to the array keeps its id from being used again
            self._stacked[id(whole)] = (whole, name, ShardedWeight(part, gather))
        return whole

    def as_shards(self, weights: PyTree) -> PyTree:
        """Returns a tree with `ShardedWeight`s in place of the arrays gathered from them."""

        def shard(x: Any) -> Any:
            if id(x) not in self._stacked:
                return x
            _, name, part = self._stacked[id(x)]
            self.in_loop.add(name)
            return part

        return jax.tree.map(shard, weights)


def as_shards(weights: PyTree) -> PyTree:
    """Returns stacked weights with `ShardedWeight`s in place of explicitly gathered arrays."""
    gathers = current_scope().gathers
    return weights if gathers is None else gathers.as_shards(weights)


def has_shards(weights: PyTree) -> bool:
    """Returns whether a tree contains `ShardedWeight`s."""
    return any(map(_is_shard, jax.tree.leaves(weights, is_leaf=_is_shard)))


def gather_shards(weights: PyTree) -> PyTree:
    """Returns a tree with the gathered arrays in place of `ShardedWeight`s."""
    return jax.tree.map(
        lambda x: x.gather(x.part) if _is_shard(x) else x, weights, is_leaf=_is_shard
    )


def _is_shard(x: Any) -> bool:
    return isinstance(x, ShardedWeight)


def _identity(x: jax.Array) -> jax.Array:
    return x

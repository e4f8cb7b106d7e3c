"""Where a run's arrays live: a strategy on real devices, and what library code may ask of it."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from spmdtrain.config import CollectiveOptions, MeshSpec, RunConfig
from spmdtrain.config_checks import Config, resolve
from spmdtrain.distributed import initialize, process_group
from spmdtrain.errors import UserError, did_you_mean
from spmdtrain.sharding.mesh import (
    BATCH_AXES,
    batch_sharding,
    batch_shards,
    build_mesh,
    choose_devices,
    default_device,
    describe,
    describe_devices,
    make_cpu_devices,
)
from spmdtrain.strategies import AXES, DEFAULT, Strategy, strategy
from spmdtrain.xla import collective_options
from spmdtrain.xla.compile_cache import keep_programs

T = TypeVar("T")


@dataclass(frozen=True)
class Placement:
    """A strategy and the mesh it is laid over."""

    strategy: Strategy
    mesh: Mesh | None
    """None under the default strategy: arrays are on the default device, and no more is said."""

    @property
    def name(self) -> str:
        """The strategy's name, as `--strategy` has it."""
        return self.strategy.name

    @property
    def devices(self) -> list[jax.Device]:
        """The devices in use, in mesh order."""
        return [default_device()] if self.mesh is None else list(self.mesh.devices.flat)

    @property
    def batch_shards(self) -> int:
        """Into how many parts a batch is split: tf.distribute's `num_replicas_in_sync`."""
        return 1 if self.mesh is None else batch_shards(self.mesh)

    @property
    def batch(self) -> Sharding:
        """The sharding of a batch: its leading dim is split over the batch axes."""
        return self.replicated if self.mesh is None else batch_sharding(self.mesh)

    @property
    def replicated(self) -> Sharding:
        """The sharding of what every device holds in full."""
        return self.sharding(PartitionSpec())

    def sharding(self, spec: PartitionSpec) -> Sharding:
        """The sharding of an array of that spec, in device memory."""
        if self.mesh is None:
            return SingleDeviceSharding(default_device())
        return NamedSharding(self.mesh, spec)

    def size(self, axis: str) -> int:
        """Devices along an axis."""
        return 1 if self.mesh is None else self.mesh.shape[axis]

    def is_virtual(self) -> bool:
        """Whether the devices are several parts of one CPU."""
        return len(self.devices) > 1 and self.devices[0].platform == "cpu"

    @property
    def axes(self) -> str:
        """`data=4 tensor=2`: the axes in use."""
        return "none" if self.mesh is None else describe(self.mesh)


def make_placement(config: RunConfig) -> Placement:
    """The placement that a configuration asks for, on the devices there are."""
    of = strategy(config.strategy)
    if of.has_mesh:
        spec, shards = config.mesh, config.sharding.max_shards
        return Placement(of, build_mesh(spec, of, max_shards=shards))
    if process_group.count() > 1:
        raise UserError(
            f"strategy default is for one process, and there are {process_group.count()}: mirrored "
            "uses them all"
        )
    return Placement(of, None)


# -- what a run runs under -------------------------------------------------------------------------

# Known to JAX: what it has traced under one strategy is not taken for another's.
_current = jax.make_user_context(default_value=None)


def current_strategy() -> Placement:
    """Returns the strategy and mesh that the calling code runs under: a `Trainer`'s or `Loop`'s.

    Raises:
      UserError: If no run is going on, because the answer depends on a run's configuration.
    """
    if (asked := _asked.get()) is not None:
        asked.append("current_strategy")
    found: Placement | None = _current.value
    if found is None:
        raise UserError(
            "current_strategy() was called outside a run, where no strategy is known. Use "
            "trainer.placement.batch_shards; before there is a trainer, give "
            "batch_size_per_device or call resolve_config(config)"
        )
    return found


def current_device() -> jax.Device:
    """A device of those that the code that calls this runs on: all of them are of its kind."""
    return _strategy().devices[0]


def current_batch_shards() -> int:
    """Returns how many parts the batch is split into where the calling code runs.

    For code that computes the same for any number. Other code calls `current_strategy`.
    """
    return _strategy().batch_shards


def _strategy() -> Placement:
    found: Placement | None = _current.value
    return found or Placement(DEFAULT, None)


_asked: ContextVar[list[str] | None] = ContextVar("asked", default=None)


@contextlib.contextmanager
def record_strategy_queries() -> Iterator[list[str]]:
    """Records the calls of `current_strategy`; disables `constrain_sharding` meanwhile.

    For whoever wants to know whether a function would be another without the strategy.
    """
    asked: list[str] = []
    token = _asked.set(asked)
    try:
        yield asked
    finally:
        _asked.reset(token)


def use_placement(placement: Placement) -> AbstractContextManager[Any]:
    """Within, `current_strategy()` is this."""
    context: AbstractContextManager[Any] = _current(placement)
    return context


def carried(function: Callable[..., T]) -> Callable[..., T]:
    """Returns the function with the calling code's strategy, for calls in other threads."""
    found: Placement | None = _current.value

    @functools.wraps(function)
    def called(*arguments: Any) -> T:
        with _current(found):
            return function(*arguments)

    return called


def constrain_sharding(x: jax.Array, *spec: str | None) -> jax.Array:
    """Say how an array inside a model lies on the mesh, where there is one.

    An entry for each dim: "batch" for the axes that split the batch, the name of an axis, or None.
    A dim that does not divide is left to XLA: it may be a hint, the parameters' rules are claims.
    Raises `ValueError` for another number of entries than dims, and for axes that are none.
    """
    if len(spec) != x.ndim:
        raise ValueError(f"constrain_sharding: {len(spec)} entries for an array of shape {x.shape}")
    named = [a for e in spec if e for a in (BATCH_AXES if e == "batch" else (e,))]
    if unknown := [axis for axis in named if axis not in AXES]:
        raise ValueError(
            f"constrain_sharding: {unknown[0]!r} is no axis."
            f"{did_you_mean(unknown[0], ['batch', *AXES])}"
        )
    if len(set(named)) < len(named):
        raise ValueError(f"constrain_sharding: {spec} names an axis twice (batch is {BATCH_AXES})")
    placement = _strategy()
    if placement.mesh is None or placement.mesh.size == 1 or _asked.get() is not None:
        return x
    entries: list[object] = []
    for size, entry in zip(x.shape, spec, strict=True):
        if entry is None:
            entries.append(None)
            continue
        axes = BATCH_AXES if entry == "batch" else (entry,)
        parts = math.prod(map(placement.size, axes))
        entries.append(axes if size % parts == 0 else PartitionSpec.UNCONSTRAINED)
    sharding = NamedSharding(placement.mesh, PartitionSpec(*entries))
    return jax.lax.with_sharding_constraint(x, sharding)


# -- configurations --------------------------------------------------------------------------------


def configure_backend(config: RunConfig) -> None:
    """Join the job, and set what JAX reads when its devices are first used."""
    keep_programs(config.compilation_cache)
    if not strategy(config.strategy).by_servers:  # whose tasks are programs of their own
        initialize.initialize(strategy=config.strategy)
    make_cpu_devices(config.cpu_devices)
    collective_options.configure_collectives(config.collectives, process_group.count())


def resolve_config(config: Config) -> Config:
    """The configuration resolved for the devices it will run on (see `config_checks.resolve`).

    A script calls it before an experiment's `build(config)`, as the run command does.
    """
    configure_backend(config)
    return resolve(config, batch_shards=make_placement(config).batch_shards)


def local_config(config: Config, tell: Callable[[str], None]) -> Config:
    """The configuration of a training, for a process that has other devices than the training.

    Its strategy and mesh are kept where they fit; else, as `tell` is told, all devices are along
    the batch.
    """
    # One process of its own has no part in the training's collectives.
    config = dataclasses.replace(config, collectives=CollectiveOptions())
    configure_backend(config)
    try:
        make_placement(config)
    except UserError as error:
        here = describe_devices(choose_devices(()))
        tell(f"here mirrored over {here}, as its own placement fails: {error}")
        sharding = dataclasses.replace(config.sharding, max_shards=None, offload=None)
        config = dataclasses.replace(
            config, mesh=MeshSpec(), strategy="mirrored", sharding=sharding
        )
    return dataclasses.replace(config, learning_rate_scaling="none", learning_rate_table={})

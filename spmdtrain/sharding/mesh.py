"""Meshes, and the batch size and learning rate on the devices of a run."""

import contextlib
import dataclasses
import math
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from spmdtrain.config.conflicts import Moment, refuse_conflicts
from spmdtrain.config.options import MeshSpec
from spmdtrain.config.run_config import DEFAULT_GLOBAL_BATCH_SIZE, OPTIONS, RunConfig
from spmdtrain.distributed import process_group
from spmdtrain.errors import UserError
from spmdtrain.strategies import (
    OPTIMIZER_AXIS,
    OUTER_AXIS,
    PARAMS_AXIS,
    REST_AXIS,
    STRATEGIES,
    Strategy,
    axes_that,
    mesh_sizes,
)

# -- Meshes: devices arranged along named axes -----------------------------------------------------

GATHER_AXES = axes_that(lambda axis: axis.splits_batch and not axis.splits_experts)
"""Axes of the batch over which a device gathers the parameters that it needs."""
BATCH_AXES = axes_that(lambda axis: axis.splits_batch)


def make_cpu_devices(count: int | None) -> None:
    """Splits the CPU into virtual devices; None changes nothing.

    It has no effect on accelerators, or if the environment sets the number of devices
    (JAX_NUM_CPU_DEVICES, or XLA_FLAGS).

    Raises:
      UserError: If a JAX backend has started.
    """
    if count is None or cpu_devices_in_environment() is not None:
        return
    if jax.config.jax_num_cpu_devices == count:  # type: ignore[attr-defined]
        return
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        raise UserError(
            f"cpu_devices={count} comes too late: JAX has already started its backend (Keras does, "
            f"when a model is created). Set JAX_NUM_CPU_DEVICES={count} in the environment before "
            "the script starts"
        ) from error


def cpu_devices_in_environment() -> str | None:
    """Returns the environment's number of CPU devices as `NAME=value`; None if it is not set."""
    if "JAX_NUM_CPU_DEVICES" in os.environ:
        return f"JAX_NUM_CPU_DEVICES={os.environ['JAX_NUM_CPU_DEVICES']}"
    flag = "--xla_force_host_platform_device_count"
    return next((f for f in os.environ.get("XLA_FLAGS", "").split() if f.startswith(flag)), None)


class _Abstract(NamedTuple):
    """Devices of a topology, and the platform by which users name them."""

    devices: Sequence[jax.Device]
    platform: str


_abstract: ContextVar[_Abstract | None] = ContextVar("abstract", default=None)


@contextlib.contextmanager
def abstract_devices(devices: Sequence[jax.Device], platform: str | None = None) -> Iterator[None]:
    """Makes meshes use devices of a topology instead of this machine's, to compile for them.

    Programs can be compiled for these devices but not run on them. `platform` is the platform of
    the topology, if devices of another one stand in for it.
    """
    token = _abstract.set(_Abstract(devices, platform or devices[0].platform))
    try:
        yield
    finally:
        _abstract.reset(token)


def is_abstract() -> bool:
    """Returns whether `abstract_devices` is active, so nothing can run on the devices."""
    return _abstract.get() is not None


def default_device() -> jax.Device:
    """Returns the device of arrays that are not on a mesh."""
    if abstract := _abstract.get():
        return abstract.devices[0]
    chosen = jax.config.jax_default_device  # type: ignore[attr-defined]
    return chosen if isinstance(chosen, jax.Device) else jax.local_devices(backend=chosen)[0]


def _visible(platform: str | None = None) -> list[jax.Device]:
    """Returns all devices, or those of one platform; none if the platform is missing."""
    if abstract := _abstract.get():
        named = "gpu" if platform in ("cuda", "rocm") else platform  # as in `jax.devices`
        return list(abstract.devices) if named in (None, abstract.platform) else []
    try:
        return jax.devices(platform)
    except RuntimeError:
        if platform is None:
            raise
        return []


def choose_devices(names: tuple[str | int, ...]) -> list[jax.Device]:
    """Returns devices by name; all devices if there are no names.

    Names are indices (`0`, `"3"`), or platforms and indices (`"gpu:0"`). TensorFlow's spellings
    (`"/gpu:0"`, `"GPU:0"`, `"/device:GPU:0"`) are equivalent.

    Raises:
      UserError: If a device does not exist, is named twice, or if a process has none of them.
    """
    if not names:
        return _visible()
    chosen = [_device(str(name)) for name in names]
    if len(set(chosen)) != len(chosen):
        raise UserError(f"mesh.devices names a device twice: {' '.join(map(str, names))}")
    for process, name in enumerate(process_group.names() if _abstract.get() is None else ()):
        if process not in {device.process_index for device in chosen}:
            raise UserError(
                f"mesh.devices names none of the devices of {name}: {' '.join(map(str, names))}; "
                "the mesh needs devices of every process of the job"
            )
    return chosen


def _device(name: str) -> jax.Device:
    plain = name.lower().removeprefix("/").removeprefix("device:")
    platform, _, index = plain.rpartition(":")
    visible = _visible(platform or None)
    if not index.isdecimal() or int(index) >= len(visible):
        where = f" of platform {platform}" if platform else ""
        abstract = _abstract.get()
        known = [abstract.platform if abstract else device.platform for device in visible]
        seen = ", ".join(f"{each}:{i}" for i, each in enumerate(known)) or "none"
        raise UserError(f"mesh.devices: there is no device {name!r}; visible{where}: {seen}")
    return visible[int(index)]


def build_mesh(
    spec: MeshSpec, of: Strategy = STRATEGIES["mirrored"], *, max_shards: int | None = None
) -> Mesh:
    """Returns the mesh that `spec` describes, for a strategy that has one.

    The mesh has every axis; unused ones have size 1. The strategy provides default sizes.

    Args:
      max_shards: The largest size of an fsdp axis of size -1. The default is the strategy's limit,
        if `spec` gives neither fsdp nor data.

    Raises:
      UserError: If the product of the sizes is not the number of devices, or the strategy has no
        axis to split over.
    """
    assert of.has_mesh
    devices = _single_device(spec) if of.devices == 1 else choose_devices(spec.devices)
    given = spec.given()
    sizes = mesh_sizes(of, given)
    if len(devices) == 1:  # every strategy accepts one device: there is nothing to split over
        sizes |= {axis: 1 for axis, size in of.sizes if size > 1 and given[axis] is None}
    hosts = _hosts(devices) if sizes[OUTER_AXIS] != 1 else []
    if sizes[OUTER_AXIS] == -1:
        sizes[OUTER_AXIS] = len(hosts) if len(hosts) > 1 else min(2, len(devices))
    if sizes[PARAMS_AXIS] == -1:
        others = math.prod(size for size in sizes.values() if size != -1)
        rest = max(1, len(devices) // others)
        shards = _largest_divisor(rest, max_shards or rest)
        if of.max_shards and may_limit_shards(spec, max_shards):
            fewer = _largest_divisor(rest, of.max_shards)
            # Of a number of devices with few divisors, the shards would be much larger.
            shards = fewer if 2 * fewer > of.max_shards else shards
        if shards < rest:
            sizes[PARAMS_AXIS] = shards
            sizes[REST_AXIS] = -1 if given[REST_AXIS] is None else sizes[REST_AXIS]
    sizes = _resolve_rest(sizes, devices)
    _check_used(of, sizes, devices)
    shape = tuple(sizes.values())
    if sizes[OUTER_AXIS] > 1:
        grid = np.stack(
            [
                _grid(shape[1:], group, spec)
                for group in host_groups(devices, hosts, sizes[OUTER_AXIS])
            ]
        )
    else:
        grid = _grid(shape, devices, spec)
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def may_limit_shards(spec: MeshSpec, max_shards: int | None) -> bool:
    """Returns whether the user leaves the number of shards to the strategy's `max_shards`."""
    given = spec.given()
    return max_shards is None and given[PARAMS_AXIS] is None and given[REST_AXIS] is None


def _largest_divisor(number: int, most: int) -> int:
    return next(n for n in range(min(number, most), 0, -1) if number % n == 0)


def _single_device(spec: MeshSpec) -> list[jax.Device]:
    if process_group.count() > 1:
        raise UserError(
            f"strategy one_device is for one process, and there are {process_group.count()}: "
            "mirrored uses them all"
        )
    if len(spec.devices) > 1:
        raise UserError(
            f"strategy one_device takes one device, but mesh.devices names {len(spec.devices)}"
        )
    return choose_devices(spec.devices)[:1]


def _resolve_rest(sizes: dict[str, int], devices: Sequence[jax.Device]) -> dict[str, int]:
    """Replaces the size that is -1 by the rest of the devices."""
    rest = [axis for axis, size in sizes.items() if size == -1]
    fixed = math.prod(size for size in sizes.values() if size != -1)
    product = " * ".join(f"{axis}={size}" for axis, size in sizes.items() if size != -1)
    if len(rest) > 1:
        raise UserError(f"mesh: {' and '.join(rest)} are both -1, and only one can be the rest")
    if rest:
        if len(devices) % fixed:
            raise UserError(
                f"mesh: {product} = {fixed} does not divide {describe_devices(devices)}, "
                f"so {rest[0]}=-1 has no whole size"
            )
        return sizes | {rest[0]: len(devices) // fixed}
    if fixed != len(devices):
        raise UserError(
            f"mesh: {product} = {fixed} != {describe_devices(devices)}; set one axis to -1, or "
            "name the devices to use in mesh.devices"
        )
    return sizes


def _check_used(of: Strategy, sizes: Mapping[str, int], devices: Sequence[jax.Device]) -> None:
    """Checks that the axes over which the strategy splits have more than one device."""
    # No strategy's sizes include this axis; with shards_params, that of the parameters replaces it.
    zero = [OPTIMIZER_AXIS] if of.shards_optimizer and not of.shards_params else []
    for axis in [*zero, *(axis for axis, size in of.sizes if size != 1)]:
        if sizes[axis] == 1 and len(devices) > 1:
            raise UserError(
                f"strategy {of.name} uses the axis {axis}, and the mesh has {axis}=1: "
                f"{', '.join(f'{name}={size}' for name, size in sizes.items())} "
                f"on {describe_devices(devices)}"
            )


def _grid(shape: tuple[int, ...], devices: Sequence[jax.Device], spec: MeshSpec) -> np.ndarray:
    # JAX arranges all devices along the links between them; devices that were named keep their
    # order.
    if spec.devices:
        return np.array(devices).reshape(shape)
    slices: dict[int, list[jax.Device]] = {}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", 0), []).append(device)
    if len(slices) == 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    # JAX arranges the devices of a slice. The first axis that divides spans the slow network
    # between the slices.
    over = next((axis for axis, size in enumerate(shape) if size % len(slices) == 0), None)
    if over is None:
        raise UserError(
            f"mesh: none of the axes' sizes ({', '.join(map(str, shape))}) divides over "
            f"{len(slices)} slices"
        )
    part = (*shape[:over], shape[over] // len(slices), *shape[over + 1 :])
    return np.concatenate([_grid(part, of_one, spec) for of_one in slices.values()], over)


def _hosts(devices: Sequence[jax.Device]) -> list[list[jax.Device]]:
    """Returns the devices grouped by fast links: by slice, or by host if there is one slice."""
    where: dict[jax.Device, Any] = {d: getattr(d, "slice_index", 0) for d in devices}
    if len(set(where.values())) == 1:
        where = {device: device.process_index for device in devices}
        if process_group.count() > 1:  # several processes may share a host
            names = process_group.gather(socket.gethostname())
            where = {device: names[device.process_index] for device in devices}
    groups: dict[Any, list[jax.Device]] = {}
    for device in devices:
        groups.setdefault(where[device], []).append(device)
    return list(groups.values())


def host_groups(
    devices: Sequence[jax.Device], hosts: list[list[jax.Device]], number: int
) -> list[list[jax.Device]]:
    """Returns `number` groups of equal size, each of whole hosts or within one host."""
    # Hosts of one size next to each other, so that groups end where hosts do.
    ordered = [device for host in sorted(hosts, key=len, reverse=True) for device in host]
    size = len(ordered) // number
    groups = [ordered[start : start + size] for start in range(0, len(ordered), max(1, size))]
    whole = len(groups) == number and all(
        set(host) <= set(group) or set(group) <= set(host) or not set(host) & set(group)
        for host in hosts
        for group in groups
    )
    if not whole:
        counts = sorted({len(host) for host in hosts})
        raise UserError(
            f"mesh: {OUTER_AXIS}={number} does not divide {describe_devices(devices)} on "
            f"{len(hosts)} host{'s' if len(hosts) > 1 else ''} of {' or '.join(map(str, counts))} "
            "into groups of whole hosts, or hosts into whole groups"
        )
    return groups


def describe_devices(devices: Sequence[jax.Device]) -> str:
    """Returns a count such as "8 devices"; with several processes also the count of each."""
    text = f"{len(devices)} device{'s' if len(devices) > 1 else ''}"
    owners = [device.process_index for device in devices]
    counts = [str(owners.count(owner)) for owner in sorted(set(owners))]
    return text if len(counts) == 1 else f"{text} ({' + '.join(counts)} of {len(counts)} processes)"


def batch_sharding(mesh: Mesh, axes: tuple[str, ...] = BATCH_AXES) -> NamedSharding:
    """Returns the sharding of a batch: its leading dim is split over the batch axes."""
    return NamedSharding(mesh, PartitionSpec(axes))


def batch_shards(mesh: Mesh, axes: tuple[str, ...] = BATCH_AXES) -> int:
    """Returns the number of parts that a batch is split into."""
    return math.prod(mesh.shape[axis] for axis in axes)


def describe_mesh(mesh: Mesh) -> str:
    """Returns the axes in use as text, for example "data=4 tensor=2"."""
    used = [f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1]
    return " ".join(used) or f"{REST_AXIS}=1"


# -- Resolution of a configuration: its batch size and learning rate on the devices of a run -------

Config = TypeVar("Config", bound=RunConfig)


def check_inherited(config: RunConfig) -> None:
    """Runs the checks of `RunConfig`, which the class of a configuration may override.

    An experiment's `Config` may define `__post_init__` without `super().__post_init__()`. The
    functions that begin a run therefore call this one. Of an experiment's own fields it checks only
    the size of integers.
    """
    RunConfig.__post_init__(config)


def resolve(config: Config, *, batch_shards: int) -> Config:
    """Returns the configuration with batch size and learning rate computed for the devices.

    In the result `resolved_batch_size` is known, `batch_size_per_device` is None, and
    `learning_rate` is scaled.

    Raises:
      UserError: If the configuration is not valid, or if the global batch does not divide over
        devices and microbatches and `uneven_batch` is `refuse`.
    """
    check_inherited(config)
    refuse_conflicts(config, OPTIONS, Moment.RESOLVED)
    if config.batch_size_per_device is not None:
        batch = config.batch_size_per_device * batch_shards
    else:
        batch = config.global_batch_size or DEFAULT_GLOBAL_BATCH_SIZE
    config = dataclasses.replace(config, global_batch_size=batch, batch_size_per_device=None)
    pads = config.uneven_batch == "pad"
    if not pads and batch % batch_shards:
        raise UserError(
            f"global_batch_size is {batch}: it does not divide over {batch_shards} devices "
            f"({batch} = {batch // batch_shards} * {batch_shards} + {batch % batch_shards}); "
            f"{max(1, batch // batch_shards) * batch_shards} would; uneven_batch=pad pads "
            "the batch, with rows that devices compute for nothing (not supported by Loop)"
        )
    parts = batch_shards * config.microbatches
    if not pads and batch % parts:
        raise UserError(
            f"global_batch_size is {batch}: it does not divide over {batch_shards} devices and "
            f"{config.microbatches} microbatches ({batch} = {batch // parts} * {parts} + "
            f"{batch % parts}); {max(1, batch // parts) * parts} would; "
            "uneven_batch=pad pads the batch, with rows that devices compute for nothing (not "
            "supported by Loop)"
        )
    return dataclasses.replace(
        config,
        learning_rate=scale_learning_rate(config),
        learning_rate_scaling="none",
        learning_rate_base_batch_size=None,
        learning_rate_table={},
    )


def scale_learning_rate(config: RunConfig) -> float | None:
    """Returns the learning rate for the configured `global_batch_size`, by table or by scaling.

    Raises:
      UserError: If table and scaling are both set, if the table has no entry for the batch size,
        or if scaling lacks `learning_rate` or `learning_rate_base_batch_size`.
    """
    batch = config.resolved_batch_size
    if config.learning_rate_table:
        sizes = [size for size in config.learning_rate_table if size <= batch]
        if not sizes:
            raise UserError(
                f"learning_rate_table begins at batch size {min(config.learning_rate_table)}: "
                f"it has no learning rate for a global batch of {batch}"
            )
        return config.learning_rate_table[max(sizes)]
    if config.learning_rate_scaling == "none":
        return config.learning_rate
    rate, base = config.learning_rate, config.learning_rate_base_batch_size
    assert rate is not None and base is not None  # as a row of the conflicts says
    ratio = batch / base
    return rate * (ratio if config.learning_rate_scaling == "linear" else ratio**0.5)

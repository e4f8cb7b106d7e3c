"""Devices and the named axes they are arranged in."""

import dataclasses
import math
import os
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from spmdtrain import distributed, processes
from spmdtrain.config import Config, MeshSpec, resolve
from spmdtrain.errors import UserError

BATCH_AXES = ("data", "fsdp")  # the axes over which a batch's examples are split


def make_cpu_devices(count: int | None) -> None:
    """Split the CPU into `count` virtual devices; call it before anything uses a JAX backend.

    Without effect on accelerators, and where the environment already says how many
    (JAX_NUM_CPU_DEVICES, or XLA_FLAGS).
    """
    if count is None or cpu_devices_in_environment() is not None:
        return
    if jax.config.jax_num_cpu_devices == count:  # type: ignore[attr-defined]
        return
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        raise UserError(
            f"cpu_devices={count} comes too late: JAX has already started its backend"
        ) from error


def cpu_devices_in_environment() -> str | None:
    """The setting that already says how many CPU devices there are, as `NAME=value`."""
    if "JAX_NUM_CPU_DEVICES" in os.environ:
        return f"JAX_NUM_CPU_DEVICES={os.environ['JAX_NUM_CPU_DEVICES']}"
    flag = "--xla_force_host_platform_device_count"
    return next((f for f in os.environ.get("XLA_FLAGS", "").split() if f.startswith(flag)), None)


def choose_devices(names: tuple[str | int, ...]) -> list[jax.Device]:
    """The devices of these names, an index (`0`, `"3"`) or platform and index (`"gpu:0"`).

    No names mean all devices. Raises `UserError` for a device that is not there.
    """
    if not names:
        return jax.devices()
    chosen = [_device(str(name)) for name in names]
    if len(set(chosen)) != len(chosen):
        raise UserError(f"mesh.devices names a device twice: {' '.join(map(str, names))}")
    for process, name in enumerate(processes.names()):
        if process not in {device.process_index for device in chosen}:
            raise UserError(
                f"mesh.devices names none of the devices of {name}: {' '.join(map(str, names))}; "
                "every process of a job takes part in its mesh"
            )
    return chosen


def _device(name: str) -> jax.Device:
    platform, _, index = name.rpartition(":")
    try:
        visible = jax.devices(platform or None)
    except RuntimeError:
        visible = []
    if not index.isdecimal() or int(index) >= len(visible):
        where = f" of platform {platform}" if platform else ""
        seen = ", ".join(f"{d.platform}:{i}" for i, d in enumerate(visible)) or "none"
        raise UserError(f"mesh.devices: there is no device {name!r}; visible{where}: {seen}")
    return visible[int(index)]


def build_mesh(spec: MeshSpec) -> Mesh:
    """The mesh that `spec` describes: every axis is there, those not used with size 1.

    Raises `UserError`, with the arithmetic, where the sizes do not multiply to the devices.
    """
    devices = choose_devices(spec.devices)
    sizes = spec.sizes()
    rest = [axis for axis, size in sizes.items() if size == -1]
    fixed = math.prod(size for size in sizes.values() if size != -1)
    product = " * ".join(f"{axis}={size}" for axis, size in sizes.items() if size != -1)
    if len(rest) > 1:
        raise UserError(f"mesh: {' and '.join(rest)} are both -1, and only one can be the rest")
    if rest:
        if len(devices) % fixed:
            raise UserError(
                f"mesh: {product} = {fixed} does not divide {count_of(devices)}, "
                f"so {rest[0]}=-1 has no whole size"
            )
        sizes[rest[0]] = len(devices) // fixed
    elif fixed != len(devices):
        raise UserError(
            f"mesh: {product} = {fixed} != {count_of(devices)}; set one axis to -1, or name "
            "the devices to use in mesh.devices"
        )
    shape = tuple(sizes.values())
    # All devices: let JAX lay the mesh along the links between them. A chosen few: as chosen.
    grid = (
        np.array(devices).reshape(shape)
        if spec.devices
        else mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    )
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def count_of(devices: Sequence[jax.Device]) -> str:
    """`8 devices`; of several processes also how many each has: `5 devices (2 + 3)`."""
    text = f"{len(devices)} device{'s' if len(devices) > 1 else ''}"
    owners = [device.process_index for device in devices]
    counts = [str(owners.count(owner)) for owner in sorted(set(owners))]
    return text if len(counts) == 1 else f"{text} ({' + '.join(counts)} of {len(counts)} processes)"


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of what every device holds in full."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of a batch: its leading dim is split over the batch axes."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def batch_shards(mesh: Mesh) -> int:
    """Into how many parts a batch is split."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def is_virtual(mesh: Mesh) -> bool:
    """Whether the devices are several parts of one CPU."""
    return mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"


def resolve_on_devices(config: Config) -> Config:
    """The configuration resolved for the devices it will run on (see `config.resolve`).

    A script calls it before an experiment's `build(config)`, as the run command does.
    """
    distributed.initialize()
    make_cpu_devices(config.cpu_devices)
    return resolve(config, batch_shards=batch_shards(build_mesh(config.mesh)))


def on_own_devices(config: Config) -> Config:
    """The configuration of a training, for a process that has other devices than the training.

    Its mesh is kept where it fits; else all devices are along the batch.
    """
    make_cpu_devices(config.cpu_devices)
    try:
        build_mesh(config.mesh)
    except UserError:
        config = dataclasses.replace(config, mesh=MeshSpec())
    return dataclasses.replace(config, learning_rate_scaling="none", learning_rate_table={})


def describe(mesh: Mesh) -> str:
    """`data=4 tensor=2`: the axes in use."""
    used = [f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1]
    return " ".join(used) or "data=1"

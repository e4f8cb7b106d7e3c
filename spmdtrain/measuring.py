"""What a step takes where its devices are at hand: the other half of a plan."""

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from spmdtrain.chips import Chip
from spmdtrain.compilation import OFF
from spmdtrain.config import RunConfig
from spmdtrain.errors import UserError
from spmdtrain.experiment import ExperimentFile
from spmdtrain.placement import resolve_on_devices
from spmdtrain.terminal import Terminal
from spmdtrain.topologies import Topology
from spmdtrain.trainer import Trainer

_SECONDS = 4.0  # of training, at the least
_FEWEST = 5  # steps
_ROUNDS = 5


@dataclass(frozen=True)
class Measured:
    """What a run has taken.

    Attributes:
        devices: What it ran on.
        step: Seconds of a step, on average over some seconds.
        peak: Bytes that a device held at most; None where nobody counts.
        chip: What a virtual device of this CPU can do, while the others are as busy; None of other
            devices, whose peaks are known.
    """

    devices: str
    step: float
    peak: int | None
    chip: Chip | None

    def known(self, topology: Topology) -> Topology:
        """A topology of virtual devices, with what they were found to do."""
        return topology if self.chip is None else dataclasses.replace(topology, chip=self.chip)


def from_json(found: Mapping[str, Any]) -> Measured:
    """What `dataclasses.asdict` made of one."""
    chip = found["chip"]
    return Measured(**{**found, "chip": None if chip is None else Chip(**chip)})


def environment(topology: Topology) -> dict[str, str]:
    """What a process that measures needs in its environment when it starts."""
    if topology.platform != "cpu":
        return {}
    return {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(topology.devices)}


def measure(file: ExperimentFile, config: RunConfig, topology: Topology) -> Measured:
    """Train an experiment for some seconds. Raises `UserError` where the devices are not here."""
    _check_devices(topology)
    config = dataclasses.replace(config, workdir=None, cpu_devices=None, compilation_cache=OFF)
    config = resolve_on_devices(config)
    experiment = file.build(config)
    trainer = Trainer.of(experiment, config, terminal=Terminal(quiet=True))

    def seconds(steps: int) -> float:
        began = time.perf_counter()
        trainer.fit(experiment.train, steps=trainer.step + steps)
        return time.perf_counter() - began

    seconds(2 * config.steps_per_dispatch)  # compiles
    few = _FEWEST * config.steps_per_dispatch
    many = few * max(2, round(_SECONDS / seconds(few)))
    # What a call of `fit` itself takes is in both.
    step = (seconds(many) - seconds(few)) / (many - few)
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [of["peak_bytes_in_use"] for of in stats if "peak_bytes_in_use" in of]
    return Measured(
        devices=f"{len(jax.devices())} x {jax.devices()[0].device_kind}",
        step=step,
        peak=max(peaks, default=None),
        chip=_virtual_device(topology) if topology.platform == "cpu" else None,
    )


def _check_devices(topology: Topology) -> None:
    has = jax.devices()
    kind = has[0].device_kind.lower()
    wanted = {"gpu": "gpu", "tpu": "tpu", "cpu": "cpu"}[topology.platform]
    if has[0].platform != wanted or len(has) != topology.devices:
        raise UserError(
            f"--measure runs on {topology}, {topology.devices} {wanted} devices, and here are "
            f"{len(has)} of {has[0].platform} ({kind})"
        )


# -- what a virtual device can do ------------------------------------------------------------------


def _virtual_device(topology: Topology) -> Chip:
    """The rates of one of several virtual devices, all of which compute at once."""
    devices = jax.devices()
    mesh = jax.make_mesh((len(devices),), ("all",), devices=devices)
    split = NamedSharding(mesh, PartitionSpec("all"))

    def per_device(*shape: int) -> jax.Array:
        return jax.device_put(jnp.ones((len(devices), *shape)), split)

    size = 384
    product = _seconds(lambda x: jax.vmap(jnp.dot)(x, x), per_device(size, size))
    elements = 2**20
    copied = _seconds(lambda x: x + 1, per_device(elements))

    def summed(x: jax.Array) -> jax.Array:
        return jnp.sum(x, 0)

    small, large = (_seconds(summed, per_device(n)) for n in (1, elements))
    sent = 2 * 4 * elements * (len(devices) - 1) / max(1, len(devices))
    return Chip(
        name="cpu",
        flops=2 * size**3 / product,
        memory=_host_memory() // len(devices),
        bandwidth=2 * 4 * elements / copied,
        links=1,
        link=max(1.0, sent / max(large - small, 1e-9)),
        network=0.0,
        torus=0,
        devices=1,
        source="measured",
        latency=small,
    )


def _seconds(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> float:
    compiled = jax.jit(function)
    compiled(x).block_until_ready()
    found = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        compiled(x).block_until_ready()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

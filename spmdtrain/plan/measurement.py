"""What a step takes where its devices are at hand: the other half of a plan."""

import dataclasses
import re
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from spmdtrain.config import RunConfig
from spmdtrain.errors import UserError
from spmdtrain.plan.chips import Chip
from spmdtrain.plan.time_model import wire_bytes
from spmdtrain.plan.topologies import Topology
from spmdtrain.sharding.placement import configure_backend, resolve_config
from spmdtrain.terminal import Terminal
from spmdtrain.train.experiment import ExperimentFile
from spmdtrain.train.trainer import Trainer
from spmdtrain.xla.compile_cache import OFF

_SECONDS = 4.0  # of training, at the least
_FEWEST = 5  # steps
_ROUNDS = 9


# What JAX calls the devices of some chips; of the others their name is in it.
_KINDS = {"v5e": "v5 lite", "v5p": "v5p?$", "v6e": "v6 lite"}


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
    return {"JAX_PLATFORMS": "cpu"}


def measure(file: ExperimentFile, config: RunConfig, topology: Topology) -> Measured:
    """Train an experiment for some seconds. Raises `UserError` where the devices are not here."""
    config = dataclasses.replace(
        config,
        compilation_cache=OFF,
        cpu_devices=None,
        # It writes nothing, so nothing of what is about files holds.
        workdir=None,
        resume="auto",
        profile_steps=None,
        eval_at_checkpoints=False,
        evaluated_by="training",
    )
    configure_backend(config)
    _check_devices(topology)
    config = resolve_config(config)
    experiment = file.build(config)
    trainer = Trainer.from_experiment(experiment, config, terminal=Terminal(quiet=True))

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
    platform, kind = has[0].platform, has[0].device_kind
    wanted = "" if topology.chip is None else _KINDS.get(topology.chip.name, topology.chip.name)
    is_it = platform == topology.platform and re.search(wanted, kind.lower())
    if not is_it or len(has) != topology.devices:
        raise UserError(
            f"--measure runs on {topology}, {topology.devices} {topology.platform} devices, and "
            f"here are {len(has)} of {platform} ({kind})"
        )


# -- what a virtual device can do ------------------------------------------------------------------

_SIDE = 128  # of the matrices
_ELEMENTS = 2**16  # of the arrays: of the size that most of a small step's are, and in the caches


def _virtual_device(topology: Topology) -> Chip:
    """The rates of one of several virtual devices, all of which compute at once.

    Each is the difference between many turns of a loop within a program and few.
    """
    mesh = jax.make_mesh((len(jax.devices()),), ("all",), axis_types=(AxisType.Auto,))

    def seconds(turn: Callable[[jax.Array], jax.Array], *shape: int) -> float:
        x = jax.device_put(jnp.ones((mesh.size, *shape)), NamedSharding(mesh, PartitionSpec("all")))
        few, many = (_seconds(_loop(turn, turns, mesh), x) for turns in _TURNS)
        return max(many - few, 1e-9) / (_TURNS[1] - _TURNS[0])

    product = seconds(lambda x: jnp.matmul(x, x) * 1e-3, _SIDE, _SIDE)
    copied = seconds(lambda x: x * 0.999 + 0.1, _ELEMENTS)
    small, large = (seconds(lambda x: jax.lax.psum(x, "all") * 0.1, n) for n in (1, _ELEMENTS))
    sent = wire_bytes("all-reduce", 4 * _ELEMENTS, mesh.size)
    return Chip(
        name="cpu",
        flops=2 * _SIDE**3 / product,
        memory=0,  # which all share, and with whatever else runs
        bandwidth=2 * 4 * _ELEMENTS / copied,
        links=1,
        link=max(sent, 1.0) / max(large - small, 1e-9),
        network=0.0,
        torus=0,
        devices=1,
        source="measured",
        latency=small,
    )


_TURNS = (20, 220)


def _loop(turn: Callable[[jax.Array], jax.Array], turns: int, mesh: Mesh) -> jax.stages.Wrapped:
    def local(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, turns, lambda _, x: turn(x), x)

    split = PartitionSpec("all")
    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
    )


def _seconds(function: jax.stages.Wrapped, x: jax.Array) -> float:
    function(x).block_until_ready()
    found = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        function(x).block_until_ready()
        found.append(time.perf_counter() - began)
    return statistics.median(found)

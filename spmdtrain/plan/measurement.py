"""Measurement of a step on available devices, to compare with the plan."""

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

from spmdtrain.config.experiment import ExperimentFile
from spmdtrain.config.run_config import OPTIONS, RunConfig
from spmdtrain.document.terminal import Terminal
from spmdtrain.errors import UserError
from spmdtrain.plan.instruction_work import ElementKind
from spmdtrain.plan.time_model import wire_bytes
from spmdtrain.plan.topologies import Topology
from spmdtrain.sharding.placement import configure_backend, resolve_config
from spmdtrain.train.trainer import Trainer
from spmdtrain.xla.chips import MEASURED, Chip
from spmdtrain.xla.compiler import OFF

_SECONDS = 4.0  # of training, at least
_FEWEST = 5  # steps
_ROUNDS = 9

# Patterns of JAX's device kinds; other chips' kinds contain their name.
_KINDS = {"v5e": "v5 lite", "v5p": "v5p?$", "v6e": "v6 lite"}


@dataclass(frozen=True)
class Measured:
    """Time and memory of a measured run.

    Attributes:
      devices: Number and kind of the devices.
      step: Seconds per step, averaged over several seconds of training.
      peak: Peak bytes in use on one device; None if the platform does not report it.
      chip: Rates of one virtual CPU device while the others are equally busy; None for other
        devices, whose peak rates are known.
    """

    devices: str
    step: float
    peak: int | None
    chip: Chip | None

    def known(self, topology: Topology) -> Topology:
        """Returns the topology with the measured rates; unchanged if no rates were measured."""
        return topology if self.chip is None else dataclasses.replace(topology, chip=self.chip)


def from_json(fields: Mapping[str, Any]) -> Measured:
    """Returns the `Measured` that `dataclasses.asdict` converted to these fields."""
    chip = fields["chip"]
    return Measured(**{**fields, "chip": None if chip is None else Chip(**chip)})


def environment(topology: Topology) -> dict[str, str]:
    """Returns environment variables for a process that measures on a topology."""
    if topology.platform != "cpu":
        return {}
    return {"JAX_PLATFORMS": "cpu"}


def measure(file: ExperimentFile, config: RunConfig, topology: Topology) -> Measured:
    """Trains an experiment for a few seconds and measures its steps.

    Nothing is written, so the workdir is not used.

    Raises:
      UserError: If this process does not have the devices of the topology.
    """
    # Nothing is written, evaluated or continued.
    unused = {n: row.default for n, row in OPTIONS.items() if not row.option.in_measurements}
    config = dataclasses.replace(config, compilation_cache=OFF, cpu_devices=None, **unused)
    configure_backend(config)
    _check_devices(topology)
    config = resolve_config(config)
    experiment = file.build(config)
    trainer = Trainer.from_experiment(
        experiment, config, terminal=Terminal(quiet=True), trackers=[]
    )

    def seconds(steps: int) -> float:
        start = time.perf_counter()
        trainer.fit(experiment.train, steps=trainer.step + steps)
        return time.perf_counter() - start

    together = config.steps_per_dispatch or 1
    seconds(2 * together)  # compiles
    few = _FEWEST * together
    many = few * max(2, round(_SECONDS / seconds(few)))
    # The difference cancels the constant cost of a call of `fit`.
    step = (seconds(many) - seconds(few)) / (many - few)
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [stat["peak_bytes_in_use"] for stat in stats if "peak_bytes_in_use" in stat]
    return Measured(
        devices=f"{len(jax.devices())} x {jax.devices()[0].device_kind}",
        step=step,
        peak=max(peaks, default=None),
        chip=virtual_device() if topology.platform == "cpu" else None,
    )


def _check_devices(topology: Topology) -> None:
    devices = jax.devices()
    platform, kind = devices[0].platform, devices[0].device_kind
    pattern = "" if topology.chip is None else _KINDS.get(topology.chip.name, topology.chip.name)
    matches = platform == topology.platform and re.search(pattern, kind.lower())
    if not matches or len(devices) != topology.devices:
        raise UserError(
            f"--measure {topology} needs {topology.devices} {topology.platform} devices, but this "
            f"machine has {len(devices)} {platform} devices ({kind})"
        )


# -- rates of a virtual device ---------------------------------------------------------------------

_SIDE = 128  # rows and columns of the matrices
# Elements of the arrays: most arrays of a small step are of this size, and fit in the caches.
_ELEMENTS = 2**16
_ITERATIONS = (20, 220)
_ROWS = (_ELEMENTS // _SIDE, _SIDE)
_REPEATED = 16  # times that a loop's body operates on each element


@dataclass(frozen=True)
class ElementLoop:
    """A loop whose time consists of operations of one kind, and of copies.

    Attributes:
      operations: Number of operations of the kind in one iteration, on each element.
      copies: The memory that one iteration reads and writes, as copies of the array.
    """

    body: Callable[[jax.Array], jax.Array]
    operations: int
    copies: float = 1.0


def _repeated(body: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """Returns a function that applies another often enough to take longer than a copy."""

    def repeated(x: jax.Array) -> jax.Array:
        for _ in range(_REPEATED):
            x = body(x)
        return x

    return repeated


ELEMENT_LOOPS = {
    ElementKind.ARITHMETIC: ElementLoop(
        _repeated(lambda x: jnp.maximum(x * 0.999, 0.1) - 0.01), 3 * _REPEATED
    ),
    ElementKind.DIVISIONS: ElementLoop(
        _repeated(lambda x: jnp.sqrt(0.7 / (x + 0.5))), 2 * _REPEATED
    ),
    ElementKind.FUNCTIONS: ElementLoop(_repeated(lambda x: jnp.exp(-x)), _REPEATED),
    # The array is read for the sum, and again for the difference.
    ElementKind.REDUCTIONS: ElementLoop(
        lambda x: x - 0.01 * x.sum(-1, keepdims=True), 1, copies=1.5
    ),
    # XLA writes the transposed array before the arithmetic, which reads it again.
    ElementKind.TRANSPOSES: ElementLoop(
        lambda x: x.swapaxes(-1, -2).reshape(x.shape) * 0.999 + 0.1, 1, copies=2
    ),
}


def virtual_device() -> Chip:
    """Returns the rates of one virtual device, measured while all of them compute.

    Each rate comes from the difference between a loop of many iterations and one of few.
    """
    mesh = jax.make_mesh((len(jax.devices()),), ("all",), axis_types=(AxisType.Auto,))

    def seconds(body: Callable[[jax.Array], jax.Array], *shape: int) -> float:
        x = jax.device_put(jnp.ones((mesh.size, *shape)), NamedSharding(mesh, PartitionSpec("all")))
        few, many = (_seconds(_loop(body, count, mesh), x) for count in _ITERATIONS)
        return max(many - few, 1e-9) / (_ITERATIONS[1] - _ITERATIONS[0])

    product = seconds(lambda x: jnp.matmul(x, x) * 1e-3, _SIDE, _SIDE)
    copied = seconds(lambda x: x * 0.999 + 0.1, _ELEMENTS)
    rates: dict[str, float] = {}
    for kind, loop in ELEMENT_LOOPS.items():
        whole = seconds(loop.body, *_ROWS)
        # Not less than a tenth, because both times vary.
        own = max(whole - loop.copies * copied, 0.1 * whole)
        rates[kind] = loop.operations * _ELEMENTS / own
    small, large = (seconds(lambda x: jax.lax.psum(x, "all") * 0.1, n) for n in (1, _ELEMENTS))
    sent = wire_bytes("all-reduce", 4 * _ELEMENTS, mesh.size)
    return Chip(
        name="cpu",
        flops=2 * _SIDE**3 / product,
        memory=0,  # all devices and other programs share the host memory
        bandwidth=2 * 4 * _ELEMENTS / copied,
        links=1,
        link=max(sent, 1.0) / max(large - small, 1e-9),
        network=0.0,
        torus=0,
        devices=1,
        source=MEASURED,
        latency=small,
        element_rates=rates,
    )


def _loop(body: Callable[[jax.Array], jax.Array], count: int, mesh: Mesh) -> jax.stages.Wrapped:
    def local(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, count, lambda _, x: body(x), x)

    split = PartitionSpec("all")
    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
    )


def _seconds(function: jax.stages.Wrapped, x: jax.Array) -> float:
    function(x).block_until_ready()
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        function(x).block_until_ready()
        times.append(time.perf_counter() - start)
    return statistics.median(times)

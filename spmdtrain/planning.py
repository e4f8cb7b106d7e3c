"""What a run would take where it is not: the trainer's own step, compiled for other devices."""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies as jax_topologies

from spmdtrain import estimate, mesh
from spmdtrain.compilation import OFF, cache_folder, keep_file
from spmdtrain.config import Collectives, RunConfig
from spmdtrain.data import as_dataset
from spmdtrain.errors import UserError
from spmdtrain.experiment import ExperimentFile
from spmdtrain.feed import abstract_batch
from spmdtrain.flops import Flops, count_flops
from spmdtrain.hlo import Collective, collectives_of
from spmdtrain.hlo_module import Module
from spmdtrain.placement import Placement, resolve_on_devices
from spmdtrain.sharding_table import Held
from spmdtrain.terminal import Terminal, byte_size
from spmdtrain.topologies import Topology, gpu_config
from spmdtrain.traffic import bytes_moved
from spmdtrain.trainer import Trainer

_REFUSED = re.compile(r"\(?([\d.]+[KMGT]?)\)? ?(?:of|exceeds available HBM) \(?([\d.]+[KMGT]?)\)?")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, of the one that holds most.

    Attributes:
        params: Parameters.
        optimizer: The optimizer's state.
        average: The moving average of the parameters.
        other: Step, key, and the model's own state.
        inputs: The batch.
        temporaries: Gradients, activations and whatever else the step makes and forgets. None
            where the state alone is too big, and nothing was compiled.
        results: What the step returns that is not in the place of an argument.
        code: The program.
        peak: All that together, at the worst moment.
        limit: What a program may have there; None where nobody knows.
    """

    params: int
    optimizer: int
    average: int
    other: int
    inputs: int
    temporaries: int | None
    results: int
    code: int
    peak: int
    limit: int | None

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within the limit."""
        return None if self.limit is None else self.peak <= self.limit


@dataclass(frozen=True)
class Moved:
    """One collective, with what it costs at least."""

    kind: str
    axes: tuple[str, ...]
    group_size: int
    bytes: int
    times: float
    overlapped: bool
    link: str
    seconds: float
    op_name: str
    line: str


@dataclass(frozen=True)
class Plan:
    """What is known of a run before any of it is rented."""

    topology: str
    chips: int
    used: float
    """Of these, how many the mesh has."""
    devices: int
    placement: str
    global_batch_size: int
    steps: int
    memory: Memory
    collectives: list[Moved]
    flops: int
    flops_by_line: dict[str, int]
    times: estimate.Times | None
    """None where nobody knows how fast the devices are."""
    notes: list[str] = field(default_factory=list)

    @property
    def fits(self) -> bool | None:
        """Whether it does."""
        return self.memory.fits

    @property
    def of_peak(self) -> float | None:
        """Of what the chips could compute in the estimated time, what they do.

        With rematerialisation more than the model FLOPs utilization, which counts nothing twice.
        """
        if self.times is None:
            return None
        return self.times.compute / self.times.estimate


def environment(topology: Topology) -> dict[str, str]:
    """What a process that plans for a topology needs in its environment when it starts."""
    if topology.platform == "tpu":
        return {
            "JAX_PLATFORMS": "cpu",  # where what an experiment builds is built
            "TPU_SKIP_MDS_QUERY": "1",  # else libtpu asks Google's servers which machine this is
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "TF_CPP_MIN_LOG_LEVEL": "2",
        }
    if topology.platform == "gpu" and _has_cuda():
        return {
            "JAX_PLATFORMS": "",  # the plugin is to be loaded, and finds no GPU
            "CUDA_VISIBLE_DEVICES": "-1",
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
            "XLA_FLAGS": "--xla_gpu_autotune_level=0",  # which would run kernels
            "TF_CPP_MIN_LOG_LEVEL": "2",
        }
    return {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(topology.devices)}


_CUDA = "jax-cuda12-plugin"


def _version(package: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return "none"


def _has_cuda() -> bool:
    with contextlib.suppress(ImportError):
        return importlib.util.find_spec("jax_plugins.xla_cuda12") is not None
    return False


def devices_of(topology: Topology) -> list[jax.Device]:
    """The devices of a topology, to compile for. Raises `UserError`.

    Without the CUDA plugin those of GPUs are virtual ones of the CPU.
    """
    chip = topology.chip
    if chip is None or (topology.platform == "gpu" and not _has_cuda()):
        return jax.devices("cpu")
    options: dict[str, Any] = {}
    shape = "x".join(map(str, topology.shape))
    if topology.platform == "gpu":
        options = {"target_config": gpu_config(chip), "topology": f"1x{shape}"}
        platform, name = "cuda", chip.name
    else:
        if importlib.util.find_spec("libtpu") is None:
            raise UserError(
                f"--topology {topology}: the compiler for TPUs is not installed; "
                "pip install 'spmdtrain[tpu]'"
            )
        if topology.slices > 1:
            options = {"num_slices": topology.slices}
        if topology.chips == 1:
            options["chips_per_host_bounds"] = [1, 1, 1]
        if chip.name == "v4":
            options["chip_config_name"] = "megacore"
        platform, name = "tpu", f"{chip.name}:{shape}"
    try:
        found = jax_topologies.get_topology_desc(platform=platform, topology_name=name, **options)
    except Exception as error:  # of whatever class the plugin's are
        raise UserError(f"--topology {topology}: {_short(error)}") from error
    return list(found.devices)


def plan(file: ExperimentFile, config: RunConfig, topology: Topology) -> Plan:
    """Compile the step of an experiment for a topology, and read what came of it.

    Raises `UserError`.
    """
    # Programs for what is not there cannot be read back, and kept ones have lost their lines.
    kept = config.compilation_cache
    config = dataclasses.replace(config, compilation_cache=OFF, workdir=None, cpu_devices=None)
    devices = devices_of(topology)
    with mesh.devices_elsewhere(devices):
        if topology.platform == "gpu" and devices[0].platform == "cpu":
            # What is faster between virtual devices is not what a GPU's compiler would do.
            config = dataclasses.replace(config, collectives=_automatic(config))
        config = resolve_on_devices(config)
        experiment = file.build(config)
        trainer = Trainer.of(experiment, config, terminal=Terminal(quiet=True))
        train = as_dataset(experiment.train)
        assert config.global_batch_size is not None
        batch = abstract_batch(
            train,
            config.global_batch_size,
            trainer.placement,
            augment=experiment.augment,
            steps=1,
            by_number=config.data_on_device,
            by_step=True,
        )
        traced = trainer.trace_step(batch)
        flops = count_flops(traced.jaxpr)
        memory = _held(trainer, batch, topology)
        notes = [
            f"{line}: a loop whose turns nobody knows, counted once" for line in flops.unknown_loops
        ]
        notes += _also(trainer, config, topology, devices)
        found: Found | None = None
        if memory.fits is not False:  # else the state alone is too big: nothing is worth compiling
            found = compiled(traced, trainer.mesh, topology, config, keep=kept != OFF)
        moved: list[Moved] = []
        times = None
        if found is not None and found.refusal:
            memory = _refused(memory, found.refusal)
            notes.append(f"the compiler: {_short(Exception(found.refusal))}")
        elif found is not None:
            memory = _measured(memory, found.memory)
            moved = [_moved(one, trainer.placement, topology) for one in found.collectives]
            times = _times(topology, flops, trainer, moved, found.traffic)
            notes += [
                f"{line}: compiled to a loop whose turns nobody knows" for line in found.unknown
            ]
    return Plan(
        topology=str(topology),
        chips=topology.chips,
        used=_used(trainer, topology),
        devices=topology.devices,
        placement=f"{trainer.placement.name}, mesh {trainer.placement.axes}",
        global_batch_size=config.global_batch_size,
        steps=config.total_steps(len(train)),
        memory=memory,
        collectives=moved,
        flops=flops.total,
        flops_by_line=dict(flops.by_line.most_common()),
        times=times,
        notes=notes,
    )


def _used(trainer: Trainer, topology: Topology) -> float:
    per_chip = 1 if topology.chip is None else topology.chip.devices
    return len(trainer.placement.devices) / per_chip


def _also(
    trainer: Trainer, config: RunConfig, topology: Topology, devices: Sequence[jax.Device]
) -> list[str]:
    """What the numbers do not tell."""
    notes = []
    if topology.platform == "gpu" and devices[0].platform == "cpu":
        notes.append(
            "partitioned for virtual devices, as the CUDA plugin is not installed (pip install "
            "'spmdtrain[cuda12]'): temporaries are a rough estimate, and so are collectives in 16 "
            "bits"
        )
    if (used := _used(trainer, topology)) < topology.chips:
        notes.append(f"uses {used:g} of the {topology.chips} chips")
    if trainer.tries_reduction:
        notes.append("a run tries the experiment's own reduction on its devices first: not here")
    if config.steps_per_dispatch > 1:
        more = config.steps_per_dispatch - 1
        notes.append(f"told of one step: a dispatch of several holds {more} more batches")
    if host := _total(trainer).host:
        notes.append(
            f"{byte_size(host)} of a device's state are in its host's memory, and cross to the "
            "device and back in each step: that is not in the times"
        )
    return notes


def _total(trainer: Trainer) -> Held:
    total = trainer.sharding_table().total
    return total.own + total.optimizer + total.average


def _automatic(config: RunConfig) -> Collectives:
    given = config.collectives
    return given if given.reduction else dataclasses.replace(given, reduction="automatic")


# -- compiling -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """What is read off a compiled step."""

    memory: dict[str, int]
    """What XLA says of it, by its own names; empty where it was refused."""
    collectives: list[Collective]
    traffic: float
    """See `bytes_moved`."""
    unknown: list[str]
    """Lines that were compiled to loops whose turns nobody knows."""
    refusal: str = ""
    """Why it was not compiled."""


def compiled(
    traced: jax.stages.Traced,
    on: jax.sharding.Mesh | None,
    topology: Topology,
    config: RunConfig,
    *,
    keep: bool,
) -> Found:
    """Compile a step, or find what was read off the same one before.

    Kept is the summary: XLA can write programs for what is not there, and not read them back.
    """
    lowered = traced.lower()
    path = cache_folder() / "plans" / f"{_key(lowered, topology, config)}.json"
    if keep and path.exists():
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # then it is made anew
            return _read(path)
    try:
        program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        found = Found({}, [], 0, [], str(error))
    else:
        module = Module(program.as_text() or "")
        found = Found(
            memory={name: getattr(program.memory_analysis(), name) for name in _SIZES},
            collectives=[] if on is None else collectives_of(module, on),
            traffic=bytes_moved(module),
            unknown=[module.line_of(one) or one.name for one in module.unknown_loops],
        )
    if keep:
        keep_file(path, json.dumps(dataclasses.asdict(found)).encode())
    return found


def _read(path: Path) -> Found:
    found = json.loads(path.read_text())
    collectives = [
        Collective(**{**one, "axes": tuple(one["axes"]), "group": tuple(one["group"])})
        for one in found.pop("collectives")
    ]
    return Found(**found, collectives=collectives)


def _key(lowered: jax.stages.Lowered, topology: Topology, config: RunConfig) -> str:
    """Of all that the summary hangs on: program, lines, options, compilers, and our readers."""
    here = Path(__file__).parent
    readers = ("hlo.py", "hlo_module.py", "planning.py", "traffic.py")
    parts = [str(topology), lowered.as_text(debug_info=True), os.environ.get("XLA_FLAGS", "")]
    parts += [repr(config.compiler_option), repr(config.collectives)]
    parts += [f"{name} {_version(name)}" for name in ("jax", "jaxlib", "libtpu", _CUDA)]
    parts += [(here / name).read_text() for name in readers]
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


# -- memory ----------------------------------------------------------------------------------------


def _held(trainer: Trainer, batch: Any, topology: Topology) -> Memory:
    """What is known without compiling: the state and the batch."""
    total = trainer.sharding_table().total
    other = trainer.sharding_table().rows[-1].own.device
    placement = trainer.placement
    inputs = sum(
        math.prod((x.sharding or placement.batch).shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(batch)
    )
    state = total.own.device + total.optimizer.device + total.average.device
    return Memory(
        params=total.own.device - other,
        optimizer=total.optimizer.device,
        average=total.average.device,
        other=other,
        inputs=inputs,
        temporaries=None,
        results=0,
        code=0,
        peak=state + inputs,
        limit=None if topology.chip is None else topology.chip.memory,
    )


_SIZES = (
    *("argument_size_in_bytes", "output_size_in_bytes", "alias_size_in_bytes"),
    *("temp_size_in_bytes", "generated_code_size_in_bytes"),
)


def _measured(memory: Memory, found: Mapping[str, int]) -> Memory:
    """With what the compiler says of its program."""
    arguments, outputs, aliased, temporaries, code = (found[name] for name in _SIZES)
    return dataclasses.replace(
        memory,
        temporaries=temporaries,
        results=outputs - aliased,
        code=code,
        peak=arguments + temporaries + outputs - aliased + code,
    )


def _refused(memory: Memory, refusal: str) -> Memory:
    match = _REFUSED.search(refusal)
    if match is None:
        return dataclasses.replace(memory, peak=max(memory.peak, (memory.limit or 0) + 1))
    needed, limit = (_size(text) for text in match.groups())
    return dataclasses.replace(
        memory, temporaries=max(0, needed - memory.peak), peak=needed, limit=limit
    )


def _size(text: str) -> int:
    unit = text[-1] if text[-1] in _UNITS else ""
    return int(float(text.removesuffix(unit)) * _UNITS[unit])


def _short(error: Exception) -> str:
    """The first line of what a compiler says."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


# -- time ------------------------------------------------------------------------------------------


def _moved(one: Collective, placement: Placement, topology: Topology) -> Moved:
    seconds, name = math.nan, "unknown"
    if topology.chip is None:
        name = "memory"
    elif one.group:
        devices = placement.devices
        group = [devices[number] for number in one.group]
        link = estimate.link_between(one.kind, group, topology)
        name = link.name
        seconds = one.times * estimate.seconds(one.kind, one.bytes, one.group_size, link)
    return Moved(
        kind=one.kind,
        axes=one.axes,
        group_size=one.group_size,
        bytes=one.bytes,
        times=one.times,
        overlapped=one.overlapped,
        link=name,
        seconds=seconds,
        op_name=one.op_name,
        line=one.line,
    )


def _times(
    topology: Topology, flops: Flops, trainer: Trainer, moved: Sequence[Moved], traffic: float
) -> estimate.Times | None:
    chip = topology.chip
    if chip is None:
        return None
    known = [one for one in moved if not math.isnan(one.seconds)]
    sent = sum(
        one.times * estimate.wire_bytes(one.kind, one.bytes, one.group_size)
        for one in moved
        if one.link != estimate.WITHIN
    )
    return estimate.Times(
        compute=flops.total / (_used(trainer, topology) * chip.flops),
        memory=traffic * chip.devices / chip.bandwidth,
        waiting=sum(one.seconds for one in known if not one.overlapped),
        overlapped=sum(one.seconds for one in known if one.overlapped),
        least_memory=_total(trainer).device * chip.devices / chip.bandwidth,
        least_links=sent / (chip.links * chip.link),
    )

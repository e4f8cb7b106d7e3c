"""What a run would take where it is not: the trainer's own step, compiled for other devices."""

import contextlib
import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from spmdtrain.config import CollectiveOptions, RunConfig
from spmdtrain.data.datasets import as_dataset
from spmdtrain.data.loader import abstract_batch
from spmdtrain.errors import UserError
from spmdtrain.plan import time_model
from spmdtrain.plan.aot import devices_of, has_compiler, other_compiler
from spmdtrain.plan.compiler_log import short
from spmdtrain.plan.flops import Flops, count_flops
from spmdtrain.plan.summary import Buffer, Found, Rematerialized, Use, compiled
from spmdtrain.plan.topologies import Topology, gpu_config
from spmdtrain.plan.traffic import Traffic, least_sent, traffic_of
from spmdtrain.sharding import mesh
from spmdtrain.sharding.layout import NotSplitError, field_of
from spmdtrain.sharding.placement import Placement, resolve_config
from spmdtrain.sharding.table import MemoryUse, Row
from spmdtrain.step.state import TrainState
from spmdtrain.strategies import strategy
from spmdtrain.terminal import Terminal, byte_size
from spmdtrain.train.experiment import Experiment, ExperimentFile
from spmdtrain.train.trainer import Trainer
from spmdtrain.tree import path_name
from spmdtrain.xla.collectives import Carried, Collective
from spmdtrain.xla.compile_cache import OFF, processor

_REFUSED = re.compile(r"\(?([\d.]+[KMGT]?)\)? ?(?:of|exceeds available HBM) \(?([\d.]+[KMGT]?)\)?")
_MORE = 1.05  # what is padded, to be split, is a little more, too
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
        temporaries: Whatever else the step makes and forgets. None where the state alone is too
            big, and nothing was compiled.
        results: What the step returns that is not in the place of an argument.
        code: The program.
        peak: All that together, at the worst moment.
        limit: What a program may have there; None where nobody knows.
        uses: Of the temporaries, what is there when they are most, by what it is for; the rest are
            the gaps between arrays that come and go.
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
    uses: dict[Use, int] = field(default_factory=dict)

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within the limit."""
        return None if self.limit is None else self.peak <= self.limit


@dataclass(frozen=True)
class PlannedCollective:
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
    carries: tuple[Carried, ...] = ()


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
    batch_shards: int
    """Devices that share a batch."""
    undivided: list[str]
    """Parameters that the strategy would split, or their optimizer's state, if a dim divided."""
    tokens: int
    """Of one example; 0 where it has none."""
    steps: int
    rows: list[Row]
    """The state's parameters; see `ShardingTable`."""
    memory: Memory
    buffers: list[Buffer]
    """The temporary arrays of the worst moment, the largest first."""
    collectives: list[PlannedCollective]
    traffic: Traffic
    rematerialized: list[Rematerialized]
    flops: int
    flops_again: int
    """Of these, what rematerialisation computes a second time."""
    flops_by_line: dict[str, int]
    products: float
    """Of the compiled program on one device; nan where that is not known."""
    times: time_model.Times | None
    """None where nobody knows how fast the devices are."""
    notes: list[str] = field(default_factory=list)

    @property
    def fits(self) -> bool | None:
        """Whether it does."""
        return self.memory.fits

    @property
    def used_devices(self) -> int:
        """What JAX sees of the chips that are used."""
        return round(self.used * self.devices / self.chips)

    @property
    def utilization(self) -> float | None:
        """The model FLOPs utilization (MFU) at best: what is computed twice counts once."""
        if self.times is None:
            return None
        return self.times.useful / self.times.estimate


Tell = Callable[[str], None]


def plan(
    file: ExperimentFile,
    config: RunConfig,
    topology: Topology,
    *,
    tell: Tell = lambda what: None,
) -> Plan:
    """Compile the step of an experiment for a topology, and read what came of it.

    `tell` is called with what is being done. Raises `UserError`.
    """
    if strategy(config.strategy).by_servers:
        raise UserError(
            "strategy parameter_server has no step that a mesh makes: plan --strategy mirrored for "
            "the devices of one worker"
        )
    # Programs for what is not there cannot be read back, and kept ones have lost their lines.
    kept = config.compilation_cache
    config = dataclasses.replace(config, compilation_cache=OFF, workdir=None, cpu_devices=None)
    if topology.platform == "cpu":  # where it only says when a run is to give up
        collectives = dataclasses.replace(config.collectives, timeout=None)
        config = dataclasses.replace(config, collectives=collectives)
    tell("building")
    devices = devices_of(topology)
    virtual = not has_compiler(topology)
    with mesh.abstract_devices(devices):
        if virtual:
            # What is faster between virtual devices is not what a GPU's compiler would do.
            config = dataclasses.replace(config, collectives=_automatic(config))
        config = resolve_config(config)
        experiment = file.build(config)
        try:
            trainer = Trainer.from_experiment(experiment, config, terminal=Terminal(quiet=True))
        except NotSplitError as error:
            raise UserError(f"{error}{_fewer_parts(experiment, config, topology)}") from error
        batch = _batch(experiment, config, trainer.placement)
        tell("tracing")
        traced = trainer.trace_step(batch)
        flops = count_flops(traced.jaxpr)
        table = trainer.sharding_table()
        memory = _held(table.total, table.rows[-1], batch, trainer.placement, topology)
        found = Found({}, [], 0, 0, [])
        if memory.fits is not False:  # else the state alone is too big: nothing is worth compiling
            tell("compiling")
            where = [str(topology), repr(sorted(trainer.compiler_options.items()))]
            where += [_place(device) for device in trainer.placement.devices]
            if topology.platform == "gpu" and topology.chip is not None:
                where.append(gpu_config(topology.chip))
            if virtual or topology.platform == "cpu":
                where.append(processor())
            names = _parameters(trainer.abstract_state)
            found = compiled(traced, trainer.mesh, names, where, keep=kept != OFF)
            memory = _measured(memory, found, topology)
        moved = [_moved(one, trainer.placement, topology) for one in found.collectives]
        return Plan(
            topology=str(topology),
            chips=topology.chips,
            used=_used(trainer, topology),
            devices=topology.devices,
            placement=f"{trainer.placement.name}, mesh {trainer.placement.axes}",
            global_batch_size=config.global_batch_size or 0,
            batch_shards=trainer.placement.batch_shards,
            undivided=trainer.unsharded_params(),
            tokens=_tokens(batch),
            steps=config.total_steps(len(as_dataset(experiment.train))),
            rows=table.rows[:-1],
            memory=memory,
            buffers=found.buffers,
            collectives=moved,
            traffic=_traffic(found, trainer, table.rows[:-1], config),
            rematerialized=found.rematerialized,
            flops=flops.total,
            flops_again=flops.again,
            flops_by_line=dict(flops.by_line.most_common()),
            products=found.products if found.traffic else math.nan,
            times=_times(topology, flops, trainer, moved, found) if found.traffic else None,
            notes=_notes(trainer, config, topology, flops, memory, found, virtual=virtual),
        )


def _fewer_parts(experiment: Experiment, config: RunConfig, topology: Topology) -> str:
    """What splits a state that does not divide over all devices, where anything does."""
    if not strategy(config.strategy).shards_params:
        return ""
    most = config.sharding.max_shards or topology.devices
    for parts in range(most - 1, 1, -1):
        if topology.devices % parts:
            continue
        sharding = dataclasses.replace(config.sharding, max_shards=parts)
        with contextlib.suppress(UserError):
            fewer = dataclasses.replace(config, sharding=sharding)
            total = _total(
                Trainer.from_experiment(experiment, fewer, terminal=Terminal(quiet=True))
            )
            return (
                f"; with --sharding.max-shards {parts} all of it divides, and a device has "
                f"{byte_size(total.device)} of the state"
            )
    return ""


def _batch(experiment: Experiment, config: RunConfig, placement: Placement) -> Any:
    assert config.global_batch_size is not None
    return abstract_batch(
        as_dataset(experiment.train),
        config.global_batch_size,
        placement,
        augment=experiment.augment,
        steps=1,
        by_number=config.data_on_device,
        by_step=True,
        padded_to=config.padded_batch_size(placement.batch_shards),
    )


def _parameters(state: TrainState) -> dict[str, str]:
    """The model's parameters, by what JAX calls them where the state is an argument."""
    names = {}
    for path, _ in jax.tree_util.tree_leaves_with_path(state):
        name = path_name(path)
        if field_of(name) == "params":
            names[f"state{jax.tree_util.keystr(path)}"] = name.removeprefix("params/")
    return names


def _place(device: jax.Device) -> str:
    coords = getattr(device, "coords", None)
    return f"{device.id} {coords} {getattr(device, 'slice_index', 0)}"


def _tokens(batch: Any) -> int:
    """Of one example: its longest sequence of whole numbers; bytes are taken for a picture's.

    Of a sequence that is all there is, one token is only to be predicted.
    """
    whole = [
        x
        for x in jax.tree.leaves(getattr(batch, "arrays", batch))
        if jnp.issubdtype(x.dtype, jnp.integer)
    ]
    lengths = [x.shape[1] for x in whole if x.ndim == 2 and x.dtype != jnp.uint8]
    return max(lengths, default=0) - (1 if len(lengths) == len(whole) == 1 else 0)


def _used(trainer: Trainer, topology: Topology) -> float:
    per_chip = 1 if topology.chip is None else topology.chip.devices
    return len(trainer.placement.devices) / per_chip


def _notes(
    trainer: Trainer,
    config: RunConfig,
    topology: Topology,
    flops: Flops,
    memory: Memory,
    found: Found,
    *,
    virtual: bool,
) -> list[str]:
    """What the numbers do not tell."""
    notes = [
        f"{line}: a loop whose turns nobody knows, counted once" for line in flops.unknown_loops
    ]
    notes += [f"{line}: compiled to a loop whose turns nobody knows" for line in found.unknown]
    notes += [
        f"{line}: of its branches the one that does most counts, in the bound too"
        for line in dict.fromkeys(found.choices)
    ]
    if found.refusal:
        notes.append(f"the compiler: {short(Exception(found.refusal))}")
    if other := other_compiler(topology):
        notes.append(other)
    if topology.platform == "gpu" and memory.limit and 0.75 < memory.peak / memory.limit <= 1:
        notes.append(
            "JAX takes three quarters of a GPU's memory, which is less: set "
            "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 for this run"
        )
    if virtual:
        notes.append(
            "partitioned for virtual devices, as the CUDA plugin is not installed (pip install "
            "'spmdtrain[cuda12]'): temporaries are a rough estimate, and so are collectives in 16 "
            "bits"
        )
    share = flops.total / len(trainer.placement.devices)
    if share and found.products > _MORE * share:
        notes.append(
            f"each device makes {found.products / share:.3g} times its share of the products: what "
            "is not split is made on several alike (--show-sharding tells), and a compiler may "
            "make what is grouped dense"
        )
    if (used := _used(trainer, topology)) < topology.chips:
        notes.append(f"uses {used:g} of the {topology.chips} chips")
    if trainer.has_custom_reduction:
        notes.append("a run tries the experiment's own reduction on its devices first: not here")
    if config.steps_per_dispatch > 1:
        more = config.steps_per_dispatch - 1
        notes.append(f"told of one step: a dispatch of several holds {more} more batches")
    if host := _total(trainer).host:
        notes.append(
            f"{byte_size(host)} of a device's state are in its host's memory, and cross to the "
            "device and back in each step: that is not in the times, which are far too short"
        )
    return notes


def _total(trainer: Trainer) -> MemoryUse:
    total = trainer.sharding_table().total
    return total.own + total.optimizer + total.average


def _touched(trainer: Trainer) -> int:
    """Bytes of a device's state that a step has to read, and to write."""
    frozen = trainer.config.freeze
    rows = [row for row in trainer.sharding_table().rows if row.elements]
    kept = sum(row.own.device for row in rows if _is_frozen(row.name, frozen))
    return 2 * _total(trainer).device - kept


def _is_frozen(name: str, frozen: Sequence[str]) -> bool:
    return any(re.search(pattern, name) for pattern in frozen)


def _automatic(config: RunConfig) -> CollectiveOptions:
    given = config.collectives
    return given if given.reduction else dataclasses.replace(given, reduction="automatic")


def _traffic(found: Found, trainer: Trainer, rows: Sequence[Row], config: RunConfig) -> Traffic:
    """What is sent, and what has to be; nobody knows the least where tensors are split by rules."""
    placement = trainer.placement
    least = None
    if placement.mesh is not None and placement.size("tensor") == 1 and config.microbatches == 1:
        least = {}
        for row in rows:
            width = jnp.dtype(row.dtype).itemsize
            least[row.name] = least_sent(
                row,
                placement.batch_shards,
                compute_width=min(width, jnp.dtype(config.compute_dtype).itemsize),
                width=width,
                is_trained=not _is_frozen(row.name, config.freeze),
            )
    return traffic_of(found.collectives, rows, least)


# -- memory ----------------------------------------------------------------------------------------


def _held(total: Row, others: Row, batch: Any, placement: Placement, topology: Topology) -> Memory:
    """What is known without compiling: the state and the batch."""
    other = others.own.device
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
        limit=None if topology.chip is None else topology.chip.memory or None,
    )


def _measured(memory: Memory, found: Found, topology: Topology) -> Memory:
    """With what the compiler says of its program, or of that which it has refused."""
    uses: dict[Use, int] = defaultdict(int)
    for buffer in found.buffers:
        uses[buffer.use] += buffer.bytes
    memory = dataclasses.replace(memory, uses=dict(uses))
    if found.refusal:
        return _refused(memory, found)
    sizes = found.sizes
    results, code = sizes["output"] - sizes["alias"], sizes["generated_code"]
    temporaries = sizes["temp"]
    if topology.platform == "tpu" and "total" in sizes:
        # The others do not add up to what a TPU's allocator has found room for.
        temporaries = max(0, sizes["total"] - sizes["argument"] - results)
    return dataclasses.replace(
        memory,
        temporaries=temporaries,
        results=results,
        code=code,
        peak=sizes["argument"] + temporaries + results + code,
    )


def _refused(memory: Memory, found: Found) -> Memory:
    match = _REFUSED.search(found.refusal)
    needed, limit = map(_size, match.groups()) if match else ((memory.limit or 0) + 1, memory.limit)
    needed = found.sizes.get("total", max(needed, memory.peak))
    return dataclasses.replace(
        memory, temporaries=max(0, needed - memory.peak), peak=needed, limit=limit
    )


def _size(text: str) -> int:
    unit = text[-1] if text[-1] in _UNITS else ""
    return int(float(text.removesuffix(unit)) * _UNITS[unit])


# -- time ------------------------------------------------------------------------------------------


def _moved(one: Collective, placement: Placement, topology: Topology) -> PlannedCollective:
    seconds, name = math.nan, "unknown"
    if topology.chip is None:
        name = "memory"
    elif one.group:
        devices = placement.devices
        group = [devices[number] for number in one.group]
        link = time_model.link_between(one.kind, group, topology)
        name = link.name
        seconds = one.times * time_model.seconds(one.kind, one.bytes, one.group_size, link)
    return PlannedCollective(
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
        carries=one.carries,
    )


def _times(
    topology: Topology,
    flops: Flops,
    trainer: Trainer,
    moved: Sequence[PlannedCollective],
    found: Found,
) -> time_model.Times | None:
    chip = topology.chip
    if chip is None:
        return None
    used, peak = len(trainer.placement.devices), chip.flops / chip.devices
    known = [one for one in moved if not math.isnan(one.seconds)]
    sent = sum(
        one.times * time_model.least_bytes(one.kind, one.bytes, one.group_size, topology)
        for one in moved
        if one.link != time_model.WITHIN
    )
    return time_model.Times(
        compute=(flops.total / used if math.isnan(found.products) else found.products) / peak,
        useful=(flops.total - flops.again) / used / peak,
        memory=found.traffic * chip.devices / chip.bandwidth,
        waiting=sum(one.seconds for one in known if not one.overlapped),
        overlapped=sum(one.seconds for one in known if one.overlapped),
        least_memory=_touched(trainer) * chip.devices / chip.bandwidth,
        least_links=sent / (chip.links * chip.link),
        serial=topology.platform == "cpu",
    )

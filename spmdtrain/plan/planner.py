"""Memory and time of a trainer's step, compiled ahead of time for a target topology."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from spmdtrain.config.experiment import Experiment, ExperimentFile
from spmdtrain.config.options import CollectiveOptions
from spmdtrain.config.run_config import RunConfig
from spmdtrain.data.loader import abstract_batch
from spmdtrain.data.training_data import TrainingData, examples_per_epoch, training_data
from spmdtrain.document.terminal import Terminal, byte_size
from spmdtrain.errors import UserError, option
from spmdtrain.kernels.attention import describe_attention
from spmdtrain.plan import time_model
from spmdtrain.plan.aot import devices_of, has_compiler
from spmdtrain.plan.kernels import PlannedKernel, planned_kernels
from spmdtrain.plan.memory import Memory, state_memory, with_program
from spmdtrain.plan.notes import kernel_notes, notes_of, used_chips
from spmdtrain.plan.planned_collective import PlannedCollective, planned_collective
from spmdtrain.plan.summary import Buffer, CompiledSummary, Rematerialized, summarize_compiled
from spmdtrain.plan.time_model import Overlap
from spmdtrain.plan.topologies import Topology, gpu_config
from spmdtrain.plan.traffic import Traffic, least_sent, traffic_of
from spmdtrain.sharding import mesh
from spmdtrain.sharding.layout import MemoryUse, NotSplitError, Row
from spmdtrain.sharding.placement import Placement, resolve_config
from spmdtrain.sharding.rules import field_of
from spmdtrain.step.flops import CostBasis, Flops, count_flops, model_flops
from spmdtrain.step.functions import describe_preset
from spmdtrain.step.state import TrainState
from spmdtrain.strategies import strategy
from spmdtrain.train.trainer import Trainer
from spmdtrain.tree import path_name
from spmdtrain.xla.chips import Chip
from spmdtrain.xla.compiler import OFF, compiler_options, processor


@dataclass(frozen=True)
class Plan:
    """Memory, communication and time of one step on a topology."""

    topology: str
    chips: int
    used: float
    """Number of chips that the mesh uses."""
    devices: int
    placement: str
    global_batch_size: int
    batch_shards: int
    """Number of devices over which the batch is split."""
    unsharded_params: list[str]
    """Parameters that the strategy should shard, and does not because no dim divides."""
    tokens: int
    """Tokens of one example; 0 if it has none."""
    steps: int
    """Steps of the run."""
    rows: list[Row]
    """Parameters of the state; see `ShardingTable`."""
    memory: Memory
    buffers: list[Buffer]
    """Temporary arrays that are live at peak memory, the largest first."""
    collectives: list[PlannedCollective]
    traffic: Traffic
    rematerialized: list[Rematerialized]
    model_flops: int
    """Floating-point operations of the model's mathematics in a step; see `flops.CONVENTION`."""
    flops: int
    """Floating-point operations of a step on all devices, as it is implemented."""
    flops_again: int
    """Part of `flops` that rematerialization recomputes."""
    flops_by_line: dict[str, int]
    """`flops` by source line."""
    products: float
    """Floating-point operations of the compiled program on one device; NaN if unknown."""
    kernels: list[PlannedKernel]
    """Kernels of the compiled program, of Pallas and of cuDNN's attention."""
    times: time_model.Times | None
    """None if the rates of the devices are unknown."""
    chip: Chip | None = None
    """Peak rates, or rates measured on CPU; None if they are unknown."""
    links: list[time_model.TopologyLink] = field(default_factory=list)
    """Links of the topology."""
    notes: list[str] = field(default_factory=list)
    """Limitations of the figures, as sentences for the user."""
    limits_shards: bool = False
    """Whether the strategy's limit on the number of shards applies."""

    @property
    def fits(self) -> bool | None:
        """Whether the step fits in a device's memory; None if the limit is unknown."""
        return self.memory.fits

    @property
    def used_devices(self) -> int:
        """Number of JAX devices that the mesh uses."""
        return round(self.used * self.devices / self.chips)

    @property
    def utilization(self) -> float | None:
        """Model FLOPs utilization (MFU) at the estimated time; see `flops.CONVENTION`.

        None if the time is unknown, or if the operations of a kernel are unknown.
        """
        if self.times is None or any(math.isnan(each.flops) for each in self.kernels):
            return None
        return self.times.useful / self.times.estimate


def plan(
    file: ExperimentFile,
    config: RunConfig,
    topology: Topology,
    *,
    on_progress: Callable[[str], None] = lambda stage: None,
) -> Plan:
    """Compiles the step of an experiment for a topology and estimates its memory and time.

    The process must be set up for the topology: see `aot.environment`. The workdir and the
    compilation cache of the options are not used. `times` of the plan are None if the step does not
    fit.

    Args:
      on_progress: Receives the name of each stage: building, tracing, compiling.

    Raises:
      UserError: If the experiment or its options are invalid on this topology.
    """
    if strategy(config.strategy).by_servers:
        raise UserError(
            "strategy parameter_server cannot be planned: it has no step on a mesh; plan with "
            f"{option('strategy', 'mirrored')} for the devices of one worker"
        )
    if not config.jit:
        raise UserError(
            f"{option('jit', False)} cannot be planned: operations that run one by one are no "
            "program; leave it out to plan the compiled step"
        )
    # JAX's compilation cache is off, because programs for absent devices cannot be deserialized and
    # cached programs have lost their source lines.
    cache_option = config.compilation_cache
    config = dataclasses.replace(config, compilation_cache=OFF, workdir=None, cpu_devices=None)
    on_progress("building")
    devices = devices_of(topology)
    virtual = not has_compiler(topology)
    config = dataclasses.replace(config, collectives=_collectives(config, topology, virtual))
    with mesh.abstract_devices(devices, topology.platform):
        config = resolve_config(config)
        experiment = file.build(config)
        try:
            trainer = Trainer.from_experiment(experiment, config, terminal=Terminal(quiet=True))
        except NotSplitError as error:
            raise UserError(f"{error}{_fewer_parts(experiment, config, topology)}") from error
        train = training_data(experiment.train, config)
        batch = _batch(train, experiment, config, trainer.placement)
        table = trainer.sharding_table()
        memory = state_memory(table.total, table.rows[-1], batch, trainer.placement, topology)
        # Libraries of kernels choose them by the default device, when a step is traced and lowered.
        with jax.default_device(trainer.placement.devices[0]):
            on_progress("tracing")
            traced = trainer.trace_step(batch)
            flops = count_flops(traced.jaxpr)
            useful = model_flops(traced.jaxpr, lambda: trainer.trace_step(batch).jaxpr)
            summary = CompiledSummary({}, [], 0, 0, [])
            if memory.fits is not False:  # if the state alone does not fit, nothing is compiled
                on_progress("compiling")
                target = [str(topology), repr(sorted(trainer.compiler_options.items()))]
                target += [_device_key(device) for device in trainer.placement.devices]
                if topology.platform == "gpu" and topology.chip is not None:
                    target.append(gpu_config(topology.chip))
                if virtual or topology.platform == "cpu":
                    target.append(processor())
                names = _parameters(trainer.abstract_state)
                keep = cache_option != OFF
                summary = summarize_compiled(traced, trainer.mesh, names, target, keep=keep)
                memory = with_program(memory, summary, topology)
        attention = describe_attention(traced.jaxpr.jaxpr, trainer.placement.devices[0].platform)
        preset = describe_preset(config, trainer.placement, trainer.compiler_options)
        planned = [
            planned_collective(each, trainer.placement, topology) for each in summary.collectives
        ]
        is_compiled = bool(summary.traffic)
        kernels = _kernels(topology, flops, summary)
        # The jaxpr, whose operations a note compares, does not show those of cuDNN's attention.
        shown = [each for each in kernels if each.basis != CostBasis.SHAPES]
        return Plan(
            topology=str(topology),
            chips=topology.chips,
            used=used_chips(trainer, topology),
            devices=topology.devices,
            placement=trainer.placement.description,
            global_batch_size=config.resolved_batch_size,
            batch_shards=trainer.placement.batch_shards,
            limits_shards=trainer.placement.limits_shards,
            unsharded_params=trainer.unsharded_params(),
            tokens=_tokens(batch),
            steps=config.total_steps(examples_per_epoch(train)),
            rows=table.rows[:-1],
            memory=memory,
            buffers=summary.buffers,
            collectives=planned,
            traffic=_traffic(summary, trainer, table.rows[:-1], config),
            rematerialized=summary.rematerialized,
            model_flops=useful.once,
            flops=flops.total,
            flops_again=flops.again,
            flops_by_line=dict(flops.by_line.most_common()),
            products=_products(summary, kernels) if is_compiled else math.nan,
            kernels=kernels,
            times=_times(topology, flops, useful, trainer, planned, summary, kernels)
            if is_compiled
            else None,
            chip=topology.chip,
            links=time_model.topology_links(topology),
            notes=[
                *notes_of(
                    *(trainer, topology, flops, memory, summary, _products(summary, shown)),
                    _total(trainer).host,
                    virtual=virtual,
                ),
                *(each for each in (attention, preset) if each),
                *kernel_notes(kernels, useful),
            ],
        )


def _fewer_parts(experiment: Experiment, config: RunConfig, topology: Topology) -> str:
    """Returns a hint with the largest `max_shards` that divides the state, or ""."""
    if not strategy(config.strategy).shards_params:
        return ""
    max_shards = config.sharding.max_shards or topology.devices
    for parts in range(max_shards - 1, 1, -1):
        if topology.devices % parts:
            continue
        sharding = dataclasses.replace(config.sharding, max_shards=parts)
        with contextlib.suppress(UserError):
            fewer = dataclasses.replace(config, sharding=sharding)
            total = _total(
                Trainer.from_experiment(experiment, fewer, terminal=Terminal(quiet=True))
            )
            return (
                f"; with {option('sharding.max_shards', parts)} all parameters are divisible, and "
                f"each device holds {byte_size(total.device)} of the state"
            )
    return ""


def _batch(
    train: TrainingData, experiment: Experiment, config: RunConfig, placement: Placement
) -> Any:
    return abstract_batch(
        train,
        config.resolved_batch_size,
        placement,
        augment=experiment.augment,
        steps=1,
        by_index=config.data_on_device,
        step_may_place=True,
        padded_to=config.padded_batch_size(placement.batch_shards),
    )


def _parameters(state: TrainState) -> dict[str, str]:
    """Returns the parameter names by JAX's name of the argument that holds them."""
    names = {}
    for path, _ in jax.tree_util.tree_leaves_with_path(state):
        name = path_name(path)
        if field_of(name) == "params":
            names[f"state{jax.tree_util.keystr(path)}"] = name.removeprefix("params/")
    return names


def _device_key(device: jax.Device) -> str:
    coords = getattr(device, "coords", None)
    return f"{device.id} {coords} {getattr(device, 'slice_index', 0)}"


def _tokens(batch: Any) -> int:
    """Returns the tokens of one example: the length of its longest integer sequence.

    uint8 arrays are images. If the sequence is the only integer array of the batch, its last token
    is only a target, not an input, and does not count.
    """
    integers = [
        x
        for x in jax.tree.leaves(getattr(batch, "arrays", batch))
        if jnp.issubdtype(x.dtype, jnp.integer)
    ]
    lengths = [x.shape[1] for x in integers if x.ndim == 2 and x.dtype != jnp.uint8]
    return max(lengths, default=0) - (1 if len(lengths) == len(integers) == 1 else 0)


def _total(trainer: Trainer) -> MemoryUse:
    total = trainer.sharding_table().total
    return total.own + total.optimizer + total.average


def _touched(trainer: Trainer) -> int:
    """Returns the bytes of a device's state that a step must read, plus those it must write."""
    rows = [row for row in trainer.sharding_table().rows if row.elements]
    frozen = sum(row.own.device for row in rows if _is_frozen(row.name, trainer))
    return 2 * _total(trainer).device - frozen


def _is_frozen(name: str, trainer: Trainer) -> bool:
    """Returns whether a parameter is not trained, by its path in the state."""
    return trainer.functions.update.is_frozen(name.removeprefix("params/"))


def _collectives(config: RunConfig, topology: Topology, virtual: bool) -> CollectiveOptions:
    """Returns the options for compiling the step here as a run compiles it on the topology."""
    options = config.collectives
    if topology.platform == "cpu":  # how processes connect, and how long they wait
        return dataclasses.replace(options, timeout=None, cpu_implementation=None)
    if not virtual:
        return options
    # Without the target's compiler, the step is compiled for virtual CPU devices.
    compiler_options(options, topology.platform)  # refused there
    if config.expert.exchange == "ragged_all_to_all":
        raise UserError(
            "expert.exchange is ragged_all_to_all, which the virtual devices that stand in for "
            f"{topology} do not have: install the GPU compiler with pip install "
            "'spmdtrain[cuda12]' or 'spmdtrain[cuda13]', or plan for all_to_all"
        )
    # XLA has no thresholds on CPU, where it reduces bfloat16 in float32. float16 has its size.
    options = dataclasses.replace(options, combine_threshold_bytes=None)
    if options.reduce_dtype == "bfloat16":
        options = dataclasses.replace(options, reduce_dtype="float16")
    if options.reduction or config.exact or config.batch_statistics == "replica":
        return options
    # The default on CPU, flattened gradients, is not that of a GPU.
    return dataclasses.replace(options, reduction="automatic")


def _traffic(
    summary: CompiledSummary, trainer: Trainer, rows: Sequence[Row], config: RunConfig
) -> Traffic:
    """Returns the traffic of a step and its minimum.

    There is no formula for the minimum with tensor parallelism, split experts or microbatches.
    """
    placement = trainer.placement
    least = None
    is_known = placement.size("tensor") == placement.size("expert") == config.microbatches == 1
    if placement.mesh is not None and is_known:
        least = {}
        for row in rows:
            width = jnp.dtype(row.dtype).itemsize
            least[row.name] = least_sent(
                row,
                placement.batch_shards,
                context=placement.size("context"),
                compute_width=min(width, jnp.dtype(config.compute_dtype).itemsize),
                width=width,
                is_trained=not _is_frozen(row.name, trainer),
            )
    return traffic_of(summary.collectives, rows, least)


# -- time ------------------------------------------------------------------------------------------


def _kernels(topology: Topology, flops: Flops, summary: CompiledSummary) -> list[PlannedKernel]:
    chip = topology.chip
    return planned_kernels(
        summary.kernels,
        flops.kernels,
        peak=math.inf if chip is None else chip.flops / chip.devices,
        bandwidth=math.inf if chip is None else chip.bandwidth / chip.devices,
        pads=topology.platform == "tpu",
    )


def _products(summary: CompiledSummary, kernels: Sequence[PlannedKernel]) -> float:
    """Returns the operations of a compiled step on one device, including kernels."""
    return summary.products + sum(each.times * each.flops for each in kernels)


def _times(
    topology: Topology,
    flops: Flops,
    useful: Flops,
    trainer: Trainer,
    collectives: Sequence[PlannedCollective],
    summary: CompiledSummary,
    kernels: Sequence[PlannedKernel],
) -> time_model.Times | None:
    chip = topology.chip
    if chip is None:
        return None
    used, peak = len(trainer.placement.devices), chip.flops / chip.devices
    # Virtual devices stand in for GPUs whose compiler is not installed: their program has other
    # fusions, and so more traffic.
    overlap = Overlap.of(topology.platform) if has_compiler(topology) else Overlap.ALL
    traffic = summary.own_traffic if overlap == Overlap.COLLECTIVES else summary.traffic
    timed = [each for each in collectives if not math.isnan(each.seconds)]
    sent = sum(
        each.times * time_model.least_bytes(each.kind, each.bytes, each.group_size, topology, chip)
        for each in collectives
        if each.link != time_model.WITHIN
    )
    products = flops.total / used if math.isnan(summary.products) else summary.products
    return time_model.Times(
        compute=products / peak,
        useful=useful.once / used / peak,
        memory=traffic * chip.devices / chip.bandwidth,
        waiting=sum(each.seconds for each in timed if not each.overlapped),
        overlapped=time_model.overlapped_seconds(
            (f"{each.kind} {each.axes}", each.direction, each.seconds)
            for each in timed
            if each.overlapped
        ),
        least_memory=_touched(trainer) * chip.devices / chip.bandwidth,
        least_links=sent / (chip.links * chip.link),
        overlap=overlap,
        kernels=sum(each.seconds for each in kernels),
        instructions=time_model.instruction_times(summary.work, chip),
        elements=time_model.element_seconds(summary.elements, chip),
        rates=time_model.TimeSource.MEASURED if chip.element_rates else time_model.TimeSource.PEAK,
    )

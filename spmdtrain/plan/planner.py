"""Memory and time of a trainer's step, compiled ahead of time for a target topology."""

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

from spmdtrain.config.experiment import Experiment, ExperimentFile
from spmdtrain.config.options import CollectiveOptions
from spmdtrain.config.run_config import RunConfig
from spmdtrain.data.loader import abstract_batch
from spmdtrain.data.training_data import TrainingData, examples_per_epoch, training_data
from spmdtrain.document.terminal import Terminal, byte_size
from spmdtrain.errors import UserError, option
from spmdtrain.plan import time_model
from spmdtrain.plan.failures import SnapshotCost, snapshot_cost
from spmdtrain.plan.instruction_work import PlannedKernel, TrafficBasis, Work, planned_kernels
from spmdtrain.plan.summary import Buffer, CompiledSummary, Rematerialized, Use, summarize_compiled
from spmdtrain.plan.time_model import (
    Overlap,
    PlannedCollective,
    Traffic,
    least_sent,
    planned_collective,
    traffic_of,
)
from spmdtrain.plan.topologies import (
    Compiler,
    Topology,
    compiler_of,
    devices_of,
    gpu_config,
    has_compiler,
    other_compiler,
    short,
)
from spmdtrain.sharding import mesh
from spmdtrain.sharding.layout import MemoryUse, NotSplitError, Row
from spmdtrain.sharding.placement import Placement, resolve_config, use_placement
from spmdtrain.sharding.rules import field_of
from spmdtrain.step.flops import CostBasis, Flops, KernelFlops, count_flops, model_flops
from spmdtrain.step.state import TrainState
from spmdtrain.strategies import SEQUENCE_AXIS, axes_that, strategy
from spmdtrain.train.session import saved_shapes
from spmdtrain.train.trainer import Trainer
from spmdtrain.tree import path_name
from spmdtrain.xla.chips import MEASURED, Chip, published
from spmdtrain.xla.compiler import OFF, compiler_options, processor

# -- Memory of one device during a planned step ----------------------------------------------------

# Needed and available memory in XLA's out-of-memory message.
_OUT_OF_MEMORY = re.compile(
    r"\(?([\d.]+[KMGT]?)\)? ?(?:of|exceeds available HBM) \(?([\d.]+[KMGT]?)\)?"
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Memory:
    """Bytes on one device; with unequal devices, on the one that holds the most.

    Attributes:
      other: Step, key, and model state.
      temporaries: Temporary arrays of the step. None if the state alone exceeds the limit, in
        which case nothing is compiled.
      results: Results of the step that do not reuse the buffer of an argument.
      code: The program.
      limit: Memory that a program may use; None if unknown.
      uses: Temporaries that are live at their peak, by use. The remainder of `temporaries` are
        gaps between arrays of different lifetimes.
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
        """Whether the peak is within the limit; None if the limit is unknown."""
        return None if self.limit is None else self.peak <= self.limit


def state_memory(
    total: Row, others: Row, batch: Any, placement: Placement, topology: Topology
) -> Memory:
    """Returns the memory that is known without compiling: state and batch.

    `total` and `others` are the sum and the last row of the sharding table. `batch` is the abstract
    global batch.
    """
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


def with_program(memory: Memory, summary: CompiledSummary, topology: Topology) -> Memory:
    """Adds the memory of the compiled program, or of one that was rejected as too big."""
    uses: dict[Use, int] = defaultdict(int)
    for buffer in summary.buffers:
        uses[buffer.use] += buffer.bytes
    memory = dataclasses.replace(memory, uses=dict(uses))
    if summary.refusal:
        return _rejected(memory, summary)
    sizes = summary.sizes
    results, code = sizes["output"] - sizes["alias"], sizes["generated_code"]
    temporaries = sizes["temp"]
    if topology.platform == "tpu" and "total" in sizes:
        # On TPU the other sizes do not add up to what the allocator assigned.
        temporaries = max(0, sizes["total"] - sizes["argument"] - results)
    return dataclasses.replace(
        memory,
        temporaries=temporaries,
        results=results,
        code=code,
        peak=sizes["argument"] + temporaries + results + code,
    )


def _rejected(memory: Memory, summary: CompiledSummary) -> Memory:
    match = _OUT_OF_MEMORY.search(summary.refusal)
    needed, limit = map(_size, match.groups()) if match else ((memory.limit or 0) + 1, memory.limit)
    needed = summary.sizes.get("total", max(needed, memory.peak))
    return dataclasses.replace(
        memory, temporaries=max(0, needed - memory.peak), peak=needed, limit=limit
    )


def _size(text: str) -> int:
    unit = text[-1] if text[-1] in _UNITS else ""
    return int(float(text.removesuffix(unit)) * _UNITS[unit])


# -- Memory and time of a trainer's step, compiled ahead of time for a target topology -------------


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
    compiler: Compiler | None = None
    """None if nothing was compiled, because the state and the batch alone do not fit."""
    chip: Chip | None = None
    """Peak rates, or rates measured on CPU; None if they are unknown."""
    links: list[time_model.TopologyLink] = field(default_factory=list)
    """Links of the topology."""
    notes: list[str] = field(default_factory=list)
    """Limitations of the figures, as sentences for the user."""
    limits_shards: bool = False
    """Whether the strategy's limit on the number of shards applies."""
    snapshots: SnapshotCost | None = None
    """What the run's snapshots in memory cost; None if it takes none."""
    program: str = ""
    """Name of the compiled program."""
    work: list[Work] = field(default_factory=list)
    """Work of the instructions of the compiled program."""

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
    memory_limit: int | None = None,
    on_progress: Callable[[str], None] = lambda stage: None,
) -> Plan:
    """Compiles the step of an experiment for a topology and estimates its memory and time.

    The process must be set up for the topology: see `compiler_environment`. The workdir and the
    compilation cache of the options are not used. `times` of the plan are None if the step does not
    fit.

    Args:
      memory_limit: Bytes of a device that a program may use; None: the memory of the chip.
      on_progress: Receives the name of each stage: building, tracing, compiling.

    Raises:
      UserError: If the experiment or its options are invalid on this topology.
    """
    if strategy(config.strategy).is_asynchronous:
        raise UserError(
            f"strategy {config.strategy} cannot be planned: it has no step on a mesh; plan with "
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
        memory = dataclasses.replace(memory, limit=memory_limit or memory.limit)
        # Libraries of kernels choose them by the default device, when a step is traced and lowered.
        with jax.default_device(trainer.placement.devices[0]):
            on_progress("tracing")
            decided = trainer.plan_step(batch)
            traced = trainer.trace_step(batch, decided)
            flops = count_flops(traced.jaxpr)
            # Not `trace_step`: it checks the program, which with other kernels is not the run's.
            program, arguments = decided.program(), (trainer.functions.abstract_state, batch)
            with use_placement(trainer.placement):
                useful = model_flops(traced.jaxpr, lambda: program.trace(*arguments).jaxpr)
            summary, compiler = CompiledSummary({}, [], 0, 0, []), None
            if memory.fits is not False:  # if the state alone does not fit, nothing is compiled
                on_progress("compiling")
                compiler = compiler_of(topology)
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
            compiler=compiler,
            chip=topology.chip,
            links=time_model.topology_links(topology),
            program=summary.program,
            work=summary.work,
            snapshots=None
            if config.snapshot_every_steps is None
            else snapshot_cost(
                saved_shapes(trainer.functions), trainer.placement.devices, topology
            ),
            notes=[
                *notes_of(
                    *(trainer, topology, flops, memory, summary, _products(summary, shown)),
                    _total(trainer).host,
                    virtual=virtual,
                ),
                *decided.decisions(traced.jaxpr.jaxpr),
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
    if options.reduction or config.exact or config.normalizes_per_replica:
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
    sizes = [placement.size(axis) for axis in axes_that(lambda axis: axis.only_by_rules)]
    is_known = {*sizes, config.microbatches} == {1}
    if placement.mesh is not None and is_known:
        least = {}
        for row in rows:
            width = jnp.dtype(row.dtype).itemsize
            least[row.name] = least_sent(
                row,
                placement.batch_shards,
                context=placement.size(SEQUENCE_AXIS),
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
        # Their assumed share of the peak is one of the published peak.
        peak=math.inf if chip is None else published(chip).flops / chip.devices,
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
    # The jaxpr has the dtypes of the products; virtual devices compute 16-bit products in float32.
    in_float32 = flops.float32 / flops.total if flops.total else 0.0
    slower = 1.0 if chip.float32_flops is None else chip.flops / chip.float32_flops
    return time_model.Times(
        compute=products / peak * (1 + in_float32 * (slower - 1)),
        useful=useful.once / used / (published(chip).flops / chip.devices),
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
        host=chip.gap,
        rates=time_model.TimeSource.MEASURED if chip.is_measured else time_model.TimeSource.PEAK,
    )


# -- Notes for the user about what the figures of a plan do not cover ------------------------------

# A device's products in excess of its share above which a note is written: padding of split dims
# alone adds a little.
_EXCESS_PRODUCTS = 1.05


def used_chips(trainer: Trainer, topology: Topology) -> float:
    """Returns the number of chips that the trainer's mesh uses; 0.5 if it uses half of one."""
    per_chip = 1 if topology.chip is None else topology.chip.devices
    return len(trainer.placement.devices) / per_chip


def notes_of(
    trainer: Trainer,
    topology: Topology,
    flops: Flops,
    memory: Memory,
    summary: CompiledSummary,
    products: float,
    host: int,
    *,
    virtual: bool,
) -> list[str]:
    """Returns notes about what the figures of a plan do not cover.

    Args:
      flops: Operations of the traced step.
      products: Operations of the compiled step on one device.
      host: Bytes of a device's state that are in host memory.
      virtual: Whether virtual CPU devices stand in for the topology's devices.
    """
    notes = [
        f"a loop with an unknown trip count is counted once: {line}" for line in flops.unknown_loops
    ]
    notes += [
        f"compiled to a loop with an unknown trip count, which is counted once: {line}"
        for line in summary.unknown
    ]
    notes += [
        f"the FLOPs of {call} are unknown, because XLA does not say what it computes: products of "
        "the compiled program are unknown, and their time is that of the products in the traced "
        "step"
        for call in summary.opaque
    ]
    notes += [
        f"only the most expensive branch is counted, in the lower bound too: {line}"
        for line in dict.fromkeys(summary.choices)
    ]
    notes += [
        "a branch that seldom runs is not counted in the times, and its collectives have times 0: "
        f"{line}"
        for line in dict.fromkeys(summary.rare)
    ]
    if summary.refusal:
        notes.append(f"the compiler: {short(Exception(summary.refusal))}")
    if not summary.has_triton:
        notes.append(
            "XLA cannot compile this step with Triton for an absent GPU: the plan is that of a "
            "program that computes all products with cuBLAS"
        )
    if (chip := topology.chip) is not None and chip.is_measured and chip.source != MEASURED:
        notes.append(f"the rates of {chip.name} were {chip.source}: --rates none ignores them")
    if other := other_compiler(topology):
        notes.append(other)
    if topology.platform == "gpu" and memory.limit and 0.75 < memory.peak / memory.limit <= 1:
        notes.append(
            "JAX preallocates three quarters of a GPU's memory, which is less than this step "
            "needs: set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 for this run"
        )
    if virtual:
        notes.append(
            "the GPU's compiler is not installed (pip install 'spmdtrain[cuda12]' or "
            "'spmdtrain[cuda13]'), so the step was compiled for virtual CPU devices: all times, "
            "temporaries and 16-bit collectives are rough estimates, and kernels are those of a CPU"
        )
    share = flops.total / len(trainer.placement.devices)
    if share and products > _EXCESS_PRODUCTS * share:
        notes.append(
            f"each device computes {products / share:.3g} times its share of the products: "
            "operations that are not split run on several devices identically (see "
            "--show-sharding), and a compiler may replace grouped operations by dense ones"
        )
    if (used := used_chips(trainer, topology)) < topology.chips:
        notes.append(f"uses {used:g} of the {topology.chips} chips")
    if trainer.has_custom_reduction:
        notes.append(
            "a run first tries the experiment's own reduction on its devices; a plan does not"
        )
    if (more := (trainer.config.steps_per_dispatch or 1) - 1) > 0:
        notes.append(f"memory is that of one step: each dispatch holds {more} more batches")
    if host:
        notes.append(
            f"{byte_size(host)} of a device's state are in host memory and are copied to the "
            "device and back in each step: the times omit these copies and are far too short"
        )
    return notes


def kernel_notes(kernels: Sequence[PlannedKernel], useful: Flops) -> list[str]:
    """Returns notes about kernels whose operations are assumed or unknown.

    `useful` are the operations of the model's mathematics.
    """
    notes = []
    for kernel in kernels:
        name = _described(kernel)
        if kernel.basis in (CostBasis.INDICES, CostBasis.SHAPES):
            continue
        if not kernel.basis:
            notes.append(
                f"{name}: its operations are unknown, because it states no cost_estimate: its time "
                f"is that of reading and writing {kernel.traffic}, and the MFU is unknown"
            )
        elif kernel.basis == CostBasis.BODY:
            grid = ", of which an unknown dim counts as 1" if kernel.unknown_grid else ""
            notes.append(
                f"{name} states no cost_estimate: its operations are assumed to be those of "
                f"{kernel.basis}{grid}"
            )
        if kernel.basis and kernel.traffic == TrafficBasis.ONCE:
            notes.append(
                f"{name} copies its arrays by itself: its bytes are assumed to be those of "
                f"{kernel.traffic}"
            )
    notes += [
        f"the MFU includes the operations of {_described(kernel)} as they are computed: it has no "
        "reference (plain JAX for a trace in which spmdtrain.kernels.reference.uses_reference() is "
        "true)"
        for kernel in useful.kernels
    ]
    return list(dict.fromkeys(notes))


def _described(kernel: PlannedKernel | KernelFlops) -> str:
    return f"kernel {kernel.name}" + (f" ({kernel.line})" if kernel.line else "")

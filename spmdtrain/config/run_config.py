"""Configuration of a run: plain dataclasses, which do not import JAX, and their checks."""

import dataclasses
import enum
import hashlib
import inspect
import math
import re
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal

from spmdtrain.config.options import (
    CollectiveOptions,
    ContextOptions,
    ExpertOptions,
    MeshSpec,
    ParameterServerOptions,
    ShardingOptions,
    check_above_zero,
    check_values,
    not_default,
)
from spmdtrain.errors import UserError, foreign, is_text
from spmdtrain.strategies import EXPERT_AXIS, SEQUENCE_AXIS, strategy

# -- Checks of the values and combinations of a configuration's fields -----------------------------

_ABOVE_ZERO = (
    "epochs",
    "steps",
    "global_batch_size",
    "batch_size_per_device",
    "eval_batch_size",
    "learning_rate_base_batch_size",
    "cpu_devices",
    "log_every",
    "log_hash_every",
    "stream_shards",
    "eval_every_steps",
    "checkpoint_every_steps",
    "checkpoint_every_seconds",
    "keep_latest",
    "keep_every_steps",
    "keep_every_hours",
    "microbatches",
    "exact",
    "steps_per_dispatch",
    "sentinel_every",
    "compare_copies_every",
)


def check_run(config: "RunConfig") -> None:
    """Checks ranges and combinations of fields that depend neither on the devices nor on the data.

    The types (`check_values`) and the option groups are checked already. Raises `UserError` if a
    field has an invalid value, or if two fields conflict.
    """
    check_above_zero(config, _ABOVE_ZERO)
    for size in config.learning_rate_table:
        if size < 1:
            raise UserError(f"learning_rate_table has a batch size of {size}: it must be above 0")
    for name in ("keep_best", "data_threads", "data_workers", "max_bad_records"):
        if getattr(config, name) < 0:
            raise UserError(f"{name} is {getattr(config, name)}: it must be 0 or more")
    for name, other in (("epochs", "steps"), ("global_batch_size", "batch_size_per_device")):
        if getattr(config, name) is not None and getattr(config, other) is not None:
            raise UserError(
                f"{name} is {getattr(config, name)} and {other} is {getattr(config, other)}: "
                "give one of the two"
            )
    if config.checkpoint not in ("latest", "best") and not config.checkpoint.isdecimal():
        raise UserError(
            f"checkpoint is {config.checkpoint!r}: it must be latest, best or a step number"
        )
    if not config.jit and config.mesh.context not in (None, 1):
        raise UserError(
            f"mesh.context is {config.mesh.context} and jit is False: only a compiled step shows "
            "whether the model's attention uses the axis; leave one of the two out"
        )
    if not config.jit and config.mesh.expert not in (None, 1):
        raise UserError(
            f"mesh.expert is {config.mesh.expert} and jit is False: experts are split in compiled "
            "steps alone; leave one of the two out"
        )
    if config.context.method is not None and config.mesh.context in (None, 1):
        raise UserError(
            f"context.method is {config.context.method}, and mesh.context is not given: give the "
            "number of devices that split the tokens, or leave context.method out"
        )
    if (given := not_default(config.expert)) and config.mesh.expert in (None, 1):
        raise UserError(
            f"expert.{given[0]} is {getattr(config.expert, given[0])}, and mesh.expert is not "
            "given: give the number of devices that split the experts, or leave "
            f"expert.{given[0]} out"
        )
    if config.init_from_strict != "all" and not config.init_from:
        raise UserError(
            f"init_from_strict is {config.init_from_strict}, and init_from is not given: give both"
        )
    for option in config.compiler_options:
        name, equals, _ = option.partition("=")
        if not (name and equals):
            raise UserError(f"compiler_options is {option!r}: it must be NAME=VALUE")
    if config.eval_at_checkpoints and config.evaluated_by == "evaluator":
        raise UserError(
            "eval_at_checkpoints is True and evaluated_by is 'evaluator': an evaluator evaluates "
            "each checkpoint anyway; leave eval_at_checkpoints out"
        )
    if config.data_workers and config.data_on_device:
        raise UserError(
            f"data_workers is {config.data_workers} and data_on_device is True: the devices hold "
            "all examples, so processes have nothing to read; leave one of the two out"
        )
    if (config.steps_per_dispatch or 1) > 1 and not config.jit:
        raise UserError(
            f"steps_per_dispatch is {config.steps_per_dispatch} and jit is False: several steps "
            "per dispatch are one compiled program; leave one of the two out"
        )
    _check_sentinel(config)
    if config.ema_decay is not None and not 0 <= config.ema_decay < 1:
        raise UserError(f"ema_decay is {config.ema_decay}: it must be 0 or more, and below 1")
    _check_placement(config)
    for name, rate in [
        ("learning_rate", config.learning_rate),
        *(
            (f"learning_rate_table[{size}]", rate)
            for size, rate in config.learning_rate_table.items()
        ),
    ]:
        if rate is not None and not (rate >= 0 and math.isfinite(rate)):
            raise UserError(f"{name} is {rate}: it must be a finite number, 0 or more")
    config.profile_range()
    _check_workdir(config.workdir)


def _check_sentinel(config: "RunConfig") -> None:
    """Raises `UserError` if the sentinel cannot run, or its action has no effect."""
    if config.sentinel_every is None:
        if config.sentinel_action != "stop":
            raise UserError(
                f"sentinel_action is {config.sentinel_action}, and sentinel_every is not given: "
                "give both"
            )
        return
    problem = None
    placed = strategy(config.strategy)
    if not config.jit:
        problem = "jit is False, and it compares runs of one compiled program"
    elif placed.is_asynchronous or placed.needs_rules or placed.devices == 1:
        problem = (
            f"strategy {placed.name} is not supported: it needs devices that each compute whole "
            "examples of their own: mirrored, zero, fully_sharded, central_storage or hybrid"
        )
    if problem is not None:
        raise UserError(f"sentinel_every is {config.sentinel_every}: {problem}")


def _check_workdir(workdir: str | None) -> None:
    """Raises `UserError` if the workdir is empty or not a valid name for a file system."""
    if workdir is None:
        return
    problem = "it must not contain NUL" if "\0" in workdir else ""
    if not is_text(workdir):
        problem = "it must be text in UTF-8"
    if not workdir.strip():
        problem = (
            "it is empty; give a folder, or leave the option out: the default is runs/NAME on the "
            "command line, and no workdir in Python"
        )
    if problem:
        raise UserError(f"workdir is {workdir!a}: {problem}")


def check_compute_dtype(name: object) -> None:
    """Raises `UserError` for float16, under any of its names, because it needs loss scaling."""
    if name in ("float16", "mixed_float16", "f16", "fp16", "half"):
        raise UserError(
            f"compute_dtype is {name}: float16 gradients underflow without dynamic loss scaling, "
            "which spmdtrain does not have. Use bfloat16, which has the range of float32"
        )


def _check_placement(config: "RunConfig") -> None:
    placed, sharding, collectives = strategy(config.strategy), config.sharding, config.collectives
    if not placed.has_mesh and not_default(config.mesh):
        raise UserError(
            f"a mesh is given, but strategy {placed.name} has none: leave it out, or choose the "
            "device with strategy one_device and mesh.devices"
        )
    for option in ("reduction", "reduce_dtype"):
        if getattr(collectives, option) not in (None, "automatic") and not placed.has_mesh:
            raise UserError(
                f"collectives.{option}: strategy {placed.name} has no mesh to reduce over"
            )
    if collectives.combine_threshold_bytes is not None and not config.jit:
        raise UserError(
            "collectives.combine_threshold_bytes has no effect because jit is False: leave one of "
            "the two out"
        )
    if sharding.max_shards is not None:
        if not placed.shards_params:
            raise UserError(
                f"sharding.max_shards is for fully_sharded, but the strategy is {placed.name}"
            )
        if config.mesh.fsdp not in (None, -1):
            raise UserError(
                f"sharding.max_shards is {sharding.max_shards} and mesh.fsdp is "
                f"{config.mesh.fsdp}: give one of the two"
            )
    _check_servers(config)
    _check_exact(config)
    if sharding.offload is not None and not placed.on_host:
        raise UserError(
            f"sharding.offload is for central_storage, but the strategy is {placed.name}"
        )
    for pattern in config.freeze:
        try:
            re.compile(pattern)
        except re.error as error:
            raise UserError(
                f"freeze: {pattern!r} is not a valid regular expression: {error}"
            ) from error


def _check_exact(config: "RunConfig") -> None:
    shards = config.exact
    if shards is None:
        return
    if shards < 2 or shards & (shards - 1):
        raise UserError(
            f"exact is {shards}: the number of virtual shards must be a power of two, at least "
            "twice the number of devices"
        )
    conflicts: list[tuple[str, object, object, str]] = [
        ("collectives.reduction", config.collectives.reduction, None, _OWN_ORDER),
        ("collectives.reduce_dtype", config.collectives.reduce_dtype, None, _OWN_ORDER),
        ("batch_statistics", config.batch_statistics, "global", "replicas are the devices"),
        ("uneven_batch", config.uneven_batch, "refuse", "padding depends on the devices"),
        ("jit", config.jit, True, "operations that run one by one have other kernels"),
        (
            "steps_per_dispatch",
            config.steps_per_dispatch or 1,
            1,
            "a loop is another program",
        ),
    ]
    found = [(name, value, why) for name, value, default, why in conflicts if value != default]
    if strategy(config.strategy).is_asynchronous:
        found.insert(0, ("strategy", config.strategy, "the order of the workers' updates varies"))
    for name, value, why in found:
        raise UserError(
            f"exact is {shards} and {name} is {value}: {why}, so the bits would depend on the "
            "number of devices; leave one of the two out"
        )


def can_pad(options: Mapping[str, Any]) -> bool:
    """Returns whether other options of a run, by name, allow `uneven_batch` to be `pad`."""
    name = options.get("strategy")
    is_asynchronous = name is not None and strategy(name).is_asynchronous
    return options.get("exact") is None and not is_asynchronous


_OWN_ORDER = "it adds up gradients in an order of its own"


def _check_servers(config: "RunConfig") -> None:
    if not strategy(config.strategy).is_asynchronous:
        for name in not_default(config.servers):
            raise UserError(
                f"servers.{name} is for parameter_server, but the strategy is {config.strategy}"
            )
        return
    for name, why in (
        (EXPERT_AXIS, "each worker reads whole parameters from the servers"),
        (SEQUENCE_AXIS, "a worker's devices split its batch alone"),
    ):
        if (size := config.mesh.given()[name]) not in (None, 1):
            raise UserError(
                f"mesh.{name} is {size}, but under parameter_server {why}: leave it out"
            )
    if (steps := config.steps_per_dispatch or 1) > 1:
        raise UserError(
            f"steps_per_dispatch is {steps}, but under parameter_server a worker computes one step "
            "at a time: leave it out"
        )
    for name, required, why in (
        ("data_on_device", False, "each worker reads the examples of the batches assigned to it"),
        ("data_workers", 0, "each worker is a process that reads its own batches"),
        ("profile_steps", None, "the steps run in other processes"),
        ("log_hash_every", None, "the servers update the state in an order of their own"),
        ("skip_steps", (), "a worker reads the batch with the number of the step"),
        ("uneven_batch", "refuse", "each worker computes whole batches on its own devices"),
    ):
        if getattr(config, name) != required:
            raise UserError(
                f"{name} is {getattr(config, name)}, but under parameter_server {why}: leave it out"
            )


# -- Batches that a run leaves out, and the batch of each step -------------------------------------

_RANGE = re.compile(r"(\d{1,19})(?::(\d{1,19}))?", re.ASCII)


@dataclass(frozen=True)
class SkippedBatches:
    """The batches that `skip_steps` leaves out.

    Batches are numbered from 0, whether they are left out or not, so a number always names the same
    examples. The steps of a run use the batches that are left, in order.

    Attributes:
      ranges: Ranges of numbers of batches, ascending; between two of them there is a batch that is
        not left out.
    """

    ranges: tuple[range, ...] = ()

    @classmethod
    def parse(cls, given: Sequence[str | int]) -> "SkippedBatches":
        """Parses numbers of batches, and texts `A:B`, which mean the batches A to B - 1.

        `given` is the option `skip_steps`; ranges may overlap. Raises `UserError` for a value that
        is neither a number of a batch nor `A:B` with A < B.
        """
        merged: list[range] = []
        for each in sorted(map(_parse_range, given), key=lambda x: x.start):
            if merged and each.start <= merged[-1].stop:
                merged[-1] = range(merged[-1].start, max(merged[-1].stop, each.stop))
            else:
                merged.append(each)
        return cls(tuple(merged))

    def __contains__(self, batch: int) -> bool:
        return any(batch in each for each in self.ranges)

    @property
    def texts(self) -> tuple[str, ...]:
        """The ranges as in the option `skip_steps`."""
        return tuple(f"{each.start}:{each.stop}" for each in self.ranges)

    def batch_of(self, steps: int) -> int:
        """Returns the number of the batch that is used after `steps` steps."""
        batch = steps
        for each in self.ranges:
            if each.start > batch:
                break
            batch += len(each)
        return batch

    def position(self, steps: int) -> int:
        """Returns the number of the batch after the last one that was used in `steps` steps."""
        return self.batch_of(steps - 1) + 1 if steps else 0

    def first_not_in(self, other: "SkippedBatches") -> int | None:
        """Returns the first batch that is left out here and not by `other`, or None."""
        for each in self.ranges:
            batch = each.start
            for known in other.ranges:
                if batch in known:
                    batch = known.stop
            if batch in each:
                return batch
        return None


_LAST = 2**40  # of batches: positions of their examples fit into 64 bits
NOTHING_SKIPPED = SkippedBatches()


def _parse_range(given: object) -> range:
    is_number = isinstance(given, Integral) and not isinstance(given, bool)
    match = _RANGE.fullmatch(str(given)) if is_number or isinstance(given, str) else None
    start = int(match[1]) if match else 0
    stop = int(match[2] or start + 1) if match else 0
    if not start < stop <= _LAST:
        raise UserError(
            f"skip_steps is {foreign(repr(given), 100)}: write the number of a batch, counted from "
            f"0, or A:B with A < B up to {_LAST}, which leaves out the batches A to B - 1"
        )
    return range(start, stop)


# -- Configuration of a run: plain dataclasses, which do not import JAX ----------------------------

DEFAULT_GLOBAL_BATCH_SIZE = 32
_ADDRESS = r" at 0x[0-9a-fA-F]+"  # in the text of a function or object
STEPS_BETWEEN_CHECKPOINTS = 500  # of a run whose length is in steps, without epochs to save at


class Purpose(enum.StrEnum):
    """Use of a random key. Each one has its own seed, derived from `seed`."""

    INIT = "init"
    DATA = "data"
    STEP = "step"
    EVAL = "eval"


def derive_seed(seed: int, purpose: Purpose) -> int:
    """Returns the 32-bit seed of one purpose.

    It is a hash, so that the seeds of neighboring values of `seed` are independent.
    """
    digest = hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Fields that every experiment has. An experiment inherits from it to add its own.

    `Trainer` takes the same names as keywords, except those that `build` uses: `learning_rate`, its
    scaling and table, and `data_dir`.
    """

    workdir: str | None = None
    """Folder or URL of the run's files; required with several processes. None means runs/NAME, with
    the name of the experiment (a sweep: runs/NAME-sweep). In Python, None means that no files are
    written."""
    seed: int = 0
    """Seed of all randomness: initial parameters, order of the data, dropout."""
    epochs: int | None = None
    """Length of the run in passes over the data: a total, which includes the epochs before a
    resume."""
    steps: int | None = None
    """Length of the run in optimizer updates, instead of epochs; also a total."""
    global_batch_size: int | None = None
    """Examples per step, over all devices. None means 32."""
    batch_size_per_device: int | None = None
    """Examples per step on each device, instead of global_batch_size. Devices along mesh.tensor or
    mesh.context share theirs."""
    uneven_batch: Literal["refuse", "pad"] = "refuse"
    """Treatment of a global batch that does not divide over the devices and microbatches: `refuse`,
    or `pad` with rows of weight 0, which is an error if padding could change the gradients."""
    eval_batch_size: int | None = None
    """Examples per batch of evaluation and prediction, over all devices. None means the global
    batch size."""
    learning_rate: float | None = None
    """Learning rate that the experiment passes to its optimizer."""
    learning_rate_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Scaling of learning_rate by r = global batch size / learning_rate_base_batch_size: none,
    multiply by r (linear) or by the square root of r (sqrt)."""
    learning_rate_base_batch_size: int | None = None
    """Global batch size for which learning_rate was chosen."""
    learning_rate_table: dict[int, float] = field(default_factory=dict)
    """Learning rates by global batch size, instead of learning_rate: 32 1e-3 256 4e-3 is 1e-3 from
    batch size 32 and 4e-3 from 256."""
    data_dir: str | None = None
    """Folder that directly contains the data files."""
    shuffle: bool = True
    """Shuffle the training examples, in another order every epoch."""
    data_on_device: bool = False
    """Keep all training examples on each device; steps select theirs by index."""
    data_threads: int = 0
    """Threads that read batches ahead. 0 reads between steps, which suits data in memory."""
    data_workers: int = 0
    """Processes that read training batches ahead, for each process of the job: for decoding and
    tokenizing that hold Python's lock. Each reads with data_threads threads."""
    on_bad_record: Literal["fail", "skip"] = "fail"
    """Treatment of records that are corrupted or cannot be decoded: `fail` ends the run; `skip`
    reads all records once at the start, and leaves out the bad ones."""
    max_bad_records: int = 100
    """Largest number of records of each dataset that on_bad_record=skip leaves out."""
    skip_steps: tuple[str | int, ...] = ()
    """Batches to leave out, counted from 0: each a number, or A:B for the batches A to B - 1. A run
    keeps them in all later starts."""
    stream_shards: int | None = None
    """Number of shards that a stream is read as, fixed for the run. It divides the global batch
    size, and the number of processes divides it. None means the greatest common divisor of the
    batch size and 8."""
    mesh: MeshSpec = MeshSpec()
    strategy: str = "mirrored"
    """Placement of the model: mirrored, zero, fully_sharded, tensor_parallel, central_storage and
    hybrid, of which several can be joined by + (hybrid+zero); or one of default (JAX's default
    device, without a mesh), one_device and parameter_server."""
    sharding: ShardingOptions = ShardingOptions()
    context: ContextOptions = ContextOptions()
    expert: ExpertOptions = ExpertOptions()
    collectives: CollectiveOptions = CollectiveOptions()
    servers: ParameterServerOptions = ParameterServerOptions()
    microbatches: int = 1
    """Gradient accumulation: the batch of a step is computed in this many parts, one after the
    other, and their gradients are added."""
    exact: int | None = None
    """The same bits on any number of devices: number of virtual shards of the batch, a power of two
    and at least twice the devices. global_batch_size must be a multiple of it, times microbatches.
    None means the same numbers to rounding."""
    batch_statistics: Literal["global", "replica"] = "global"
    """Batch normalization in training: with the statistics of the global batch, or of each
    replica's own examples, as in tf.distribute. With replica, the running averages are the means
    over the replicas."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the model's computation. Parameters, optimizer state and sums keep theirs."""
    remat: Literal["none", "full", "dots", "dots_no_batch", "attention"] = "none"
    """Intermediate results that the backward pass recomputes instead of storing: none, all (full),
    all but the output of attention (attention), all but that and the results of matrix products
    (dots), or all but that and those of matrix products without a batch dim (dots_no_batch)."""
    freeze: tuple[str, ...] = ()
    """Regular expressions; parameters whose path contains a match are not trained, and batch
    statistics with such a path keep their values. A pattern without a match is an error."""
    cpu_devices: int | None = None
    """Number of virtual CPU devices of each process if there is no accelerator. None means the
    number in JAX_NUM_CPU_DEVICES or XLA_FLAGS, or else one; either replaces an experiment's
    default."""
    ema_decay: float | None = None
    """Decay of an exponential moving average of the parameters, at least 0 and below 1. In update k
    it is at most (1 + k) / (10 + k). Evaluation and prediction then use the averaged parameters."""
    evaluated_by: Literal["training", "evaluator"] = "training"
    """Task that evaluates the validation split, and so decides which checkpoint is best: the
    training itself, or a separate evaluator (--role evaluate, the launcher's --evaluator, or a task
    of TF_CONFIG). Without a running evaluator, no checkpoint is then removed."""
    steps_per_dispatch: int | None = None
    """Steps that the devices compute without the host if nothing is due between them. Signals and
    callbacks are delayed until the last of them. None means 10 to 50 for small steps of examples
    in memory, without callbacks at step or log, on CPUs with one device per process, and 1
    otherwise."""
    jit: bool = True
    """Compile the steps. --no-jit runs them operation by operation, for debugging."""
    compilation_cache: str | None = None
    """Folder that keeps compiled programs for later starts, up to 4 GiB, or 'off'. None means
    ~/.cache/spmdtrain, or the folder of JAX_COMPILATION_CACHE_DIR if that is set."""
    compiler_options: tuple[str, ...] = ()
    """XLA options for compiling the steps, each as NAME=VALUE."""
    xla_preset: Literal["auto", "none"] = "auto"
    """Options of XLA that make steps on several TPU v5e or v5p chips faster (auto), or none. On
    other devices auto adds nothing. compiler_options replace them."""
    resume: Literal["auto", "never", "must"] = "auto"
    """Use of the checkpoints in the workdir: auto restores the newest valid one, and starts from
    step 0 only if there are none; never refuses a workdir with checkpoints, must one without."""
    resume_anyway: bool = False
    """Resume although the optimizer's update, or a setting of JAX that gives results another
    meaning, differs from that of the checkpoint. Each difference is printed."""
    init_from: str | None = None
    """Initial parameters, if the workdir has no checkpoint to resume from: the workdir of another
    run, or one of its checkpoints/STEP (the averaged ones if it has them); or weights of another
    program: .safetensors (a file, or a folder with its index), .npz, .keras, or an Orbax
    checkpoint. With --mode evaluate or predict, the model to use instead of the workdir's."""
    init_from_strict: Literal["all", "matching"] = "all"
    """all: init_from must have every array of the model. matching: arrays that are missing there or
    have another shape (a new head) keep their initial values."""
    fork_from: str | None = None
    """RUN or RUN@STEP: without checkpoints in the workdir, start from the full state of another
    run: parameters, optimizer, step, position in the data. STEP may be best; by default the
    newest valid checkpoint."""
    checkpoint: str = "latest"
    """Checkpoint to load from init_from, or from the workdir to evaluate and predict: latest (the
    newest valid one), best (by best_metric) or a step."""
    log_every: int = 10
    """Steps between two lines of training metrics."""
    log_hash_every: int | None = None
    """Steps between two hashes of the whole state in hashes.jsonl; the last step has one, too. None
    means no hashes."""
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = ("tensorboard",)
    """Where metrics and media go, besides the files of the workdir: tensorboard, wandb, mlflow,
    trackio; nowhere else without a name. A tracker that fails does not stop the run."""
    eval_every_steps: int | None = None
    """Steps between two evaluations. The last step has one, too. None means at the end of each
    epoch."""
    eval_at_checkpoints: bool = False
    """Evaluate before each save of a checkpoint, instead of at the end of each epoch."""
    checkpoint_every_steps: int | None = None
    """Steps between two checkpoints. The last step has one, too. None means each epoch, or 500
    steps without epochs, unless checkpoint_every_seconds is given."""
    checkpoint_every_seconds: float | None = None
    """Seconds between two checkpoints, instead of each epoch or 500 steps. With
    checkpoint_every_steps, both apply. None means no checkpoints by time."""
    checkpoint_at_start: bool = False
    """Also save the state before the first step, as checkpoints/0."""
    keep_latest: int = 3
    """Number of newest checkpoints to keep."""
    keep_best: int = 1
    """Number of best checkpoints to keep in addition."""
    keep_every_steps: int | None = None
    """N steps; the first checkpoint at or after each multiple of N is never deleted. None means
    that no checkpoint is kept for its step."""
    keep_every_hours: float | None = None
    """Hours; the first checkpoint of each such period of the clock is never deleted. None means
    that no checkpoint is kept for its time."""
    best_metric: str = "loss"
    """Evaluation metric by which the best checkpoint is chosen."""
    best_direction: Literal["min", "max"] = "min"
    """Whether a low (min) or a high (max) best_metric is better."""
    quiet: bool = False
    """Print only errors, warnings and the result: the metrics of the last evaluation, or the
    predictions."""
    sentinel_every: int | None = None
    """Steps between two checks that the devices compute correctly: the gradients of each device's
    part of the batch are computed again on another device, and must have the same bits."""
    sentinel_action: Literal["warn", "stop", "rollback"] = "stop"
    """Reaction to a device that computes other gradients: log it (warn), end the run with exit code
    4 (stop), or also rename the checkpoints since the last check that passed (rollback); the
    launcher then restarts the job without the process of that device."""
    compare_copies_every: int | None = None
    """Steps between two comparisons of the copies of the state that several processes hold, besides
    those after the first step and before each save."""
    profile_steps: str | None = None
    """Range of steps to profile, A:B, both included. Writes a profiler trace into the workdir."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        bases = (getattr(base, "__dataclass_fields__", {}) for base in reversed(cls.__mro__[1:]))
        inherited = {name: field for fields in bases for name, field in fields.items()}
        typed = inspect.get_annotations(cls)
        for name, value in vars(cls).items():
            # A class with slots is made a second time, with descriptors in place of the defaults.
            is_default = not isinstance(value, types.MemberDescriptorType)
            if name in inherited and name not in typed and is_default:
                kind = inspect.formatannotation(inherited[name].type)
                raise UserError(
                    f"{cls.__name__} sets {name} without a type, which does not change the default "
                    f"of a dataclass: write {name}: {kind} = {value!r}"
                )

    def __post_init__(self) -> None:
        # An experiment that overrides this method should call it first; if it does not, the
        # functions that begin a run do (`sharding.mesh.check_inherited`).
        check_compute_dtype(self.compute_dtype)  # first: it explains why float16 is no choice
        check_values(self, RunConfig)
        groups = (self.mesh, self.sharding, self.context, self.expert)
        for group in (*groups, self.collectives, self.servers):
            group.check()
        check_run(self)
        object.__setattr__(self, "skip_steps", self.skipped_batches.texts)

    @property
    def resolved_batch_size(self) -> int:
        """The global batch size of a resolved configuration (see `resolve_config`).

        Raises:
          UserError: If the configuration is not resolved.
        """
        if self.global_batch_size is None:
            raise UserError(
                "global_batch_size is not set: call config = resolve_config(config) first"
            )
        return self.global_batch_size

    # -- lengths and cadences ----------------------------------------------------------------

    def total_steps(self, num_examples: int) -> int:
        """Returns the updates of the whole run: `steps`, or `ceil(epochs * num_examples / batch)`.

        Args:
          num_examples: Number of training examples.

        Raises:
          UserError: If neither `epochs` nor `steps` is set.
        """
        if self.steps is not None:
            return self.steps
        if self.epochs is None:
            raise UserError("the length of the training is not set: give epochs or steps")
        return -(-self.epochs * num_examples // self.resolved_batch_size)

    def epochs_at(self, step: int, num_examples: int) -> int:
        """Returns the number of epochs completed after `step` updates.

        Args:
          step: Number of updates.
          num_examples: Number of training examples; with 0 no epoch is ever completed.
        """
        return step * self.resolved_batch_size // num_examples if num_examples else 0

    def epoch_of(self, step: int, num_examples: int) -> range:
        """Returns the updates of the epoch that update `step` belongs to.

        Args:
          step: Number of the update, from 1.
          num_examples: Number of training examples.
        """
        before, batch = self.epochs_at(step - 1, num_examples), self.resolved_batch_size
        first, last = (-(-n * num_examples // batch) for n in (before, before + 1))
        return range(first + 1, last + 1)

    def ends_epoch(self, step: int, num_examples: int) -> bool:
        """Returns whether the batch of update `step` contains an epoch's last example.

        Args:
          step: Number of the update, from 1.
          num_examples: Number of training examples; with 0 no epoch ends.
        """
        return self.epochs_at(step, num_examples) > self.epochs_at(step - 1, num_examples)

    def evaluates_at(self, step: int, num_examples: int) -> bool:
        """Returns whether an evaluation is due after `step`.

        The caller also evaluates after the last step of the run.

        Args:
          step: Number of updates so far, at least 1.
          num_examples: Number of training examples.
        """
        if self.eval_every_steps is not None:
            return step % self.eval_every_steps == 0
        if self.eval_at_checkpoints:
            return False
        return self.ends_epoch(step, num_examples)

    def saves_at(self, step: int, num_examples: int) -> bool:
        """Returns whether a checkpoint is due after `step` by the number of steps or epochs.

        The caller also saves by `checkpoint_every_seconds`, and after the last step.

        Args:
          step: Number of updates so far, at least 1.
          num_examples: Number of training examples.
        """
        if self.checkpoint_every_steps is not None:
            return step % self.checkpoint_every_steps == 0
        if self.checkpoint_every_seconds is not None:
            return False
        if self.epochs is not None:
            return self.ends_epoch(step, num_examples)
        return step % STEPS_BETWEEN_CHECKPOINTS == 0

    def logs_at(self, step: int, total: int) -> bool:
        """Returns whether `step` is logged: the first, the last, and every `log_every`-th are.

        Args:
          step: Number of the step, from 1.
          total: Number of steps of the run.
        """
        return step in (1, total) or step % self.log_every == 0

    def hashes_at(self, step: int, total: int) -> bool:
        """Returns whether the state after `step` is hashed: each `log_hash_every`-th, and the last.

        Args:
          step: Number of the step, from 1.
          total: Number of steps of the run.
        """
        every = self.log_hash_every
        return every is not None and (step == total or step % every == 0)

    def checks_devices_at(self, step: int) -> bool:
        """Returns whether the sentinel checks the devices before `step`.

        Args:
          step: Number of the step, from 1.
        """
        return self.sentinel_every is not None and step % self.sentinel_every == 0

    @property
    def skipped_batches(self) -> SkippedBatches:
        """The batches that `skip_steps` leaves out."""
        return SkippedBatches.parse(self.skip_steps)

    def padded_batch_size(self, batch_shards: int) -> int:
        """Returns the rows of a batch, padded to divide over batch shards and microbatches.

        Args:
          batch_shards: Number of devices that the batch is split over.
        """
        parts = batch_shards * self.microbatches
        return -(-self.resolved_batch_size // parts) * parts

    @property
    def normalizes_per_replica(self) -> bool:
        """Whether each replica normalizes by its own examples."""
        return self.batch_statistics == "replica"

    def profile_range(self) -> tuple[int, int] | None:
        """Returns the first and last step of the profiler trace; None without `profile_steps`.

        Raises:
          UserError: If `profile_steps` is not `A:B` with `1 <= A <= B`.
        """
        if self.profile_steps is None:
            return None
        try:
            first, last = map(int, self.profile_steps.split(":"))
        except ValueError:
            first, last = 0, 0
        if not 1 <= first <= last:
            raise UserError(
                f"profile_steps is {self.profile_steps!r}: write A:B, two step numbers with "
                "1 <= A <= B"
            )
        return first, last


def file_of_config(config: RunConfig) -> str | None:
    """Returns the file that defines the class of a configuration, such as an experiment's file.

    None for `RunConfig` itself, and for a class that is defined in no file.
    """
    if type(config) is RunConfig:
        return None
    return getattr(sys.modules.get(type(config).__module__), "__file__", None)


def own_code(config: RunConfig) -> dict[str, Any]:
    """Returns the fields that are functions, classes or objects of an experiment, by name."""
    inherited = {each.name for each in dataclasses.fields(RunConfig)}
    names = [each.name for each in dataclasses.fields(config) if each.name not in inherited]
    found = {name: getattr(config, name) for name in names}
    return {n: x for n, x in found.items() if callable(x) or re.search(_ADDRESS, str(x))}


def config_as_json(config: RunConfig) -> dict[str, Any]:
    """Returns the configuration as JSON values: nested dicts, lists for tuples, string keys.

    A value without a JSON type is replaced by its `str`, without the addresses of functions and
    objects, which differ in every process.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        if isinstance(value, (set, frozenset)):
            return sorted(map(plain, value), key=str)
        if isinstance(value, (str, int, float, bool, type(None))):
            return value
        return re.sub(_ADDRESS, "", str(value))

    return plain(dataclasses.asdict(config))

"""Configuration of a run: plain dataclasses, which do not import JAX, and their checks."""

import dataclasses
import enum
import hashlib
import inspect
import re
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any, Literal

from spmdtrain.config.conflicts import Moment, refuse_conflicts
from spmdtrain.config.options import (
    ABOVE_ZERO,
    FINITE,
    NOT_NEGATIVE,
    STEP_IS_YOURS,
    CollectiveOptions,
    ContextOptions,
    ExpertOptions,
    FieldDocs,
    Group,
    MeshSpec,
    OnResume,
    OptionRow,
    ParameterServerOptions,
    Range,
    ShardingOptions,
    check_values,
    option_field,
    option_rows,
)
from spmdtrain.errors import UserError, foreign, is_text
from spmdtrain.strategies import strategy

# -- Values of single options ----------------------------------------------------------------------

_DECAY = Range(text="0 or more, and below 1", at_least=0, below=1)
_SHARDS = Range(
    text="a power of two, at least twice the number of devices",
    at_least=2,
    also=lambda shards: shards & (shards - 1) == 0,
)


def _check_rates(table: Mapping[int, float]) -> None:
    for size, rate in table.items():
        if size < 1:
            raise UserError(f"learning_rate_table has a batch size of {size}: it must be above 0")
        if rate not in FINITE:
            raise UserError(f"learning_rate_table[{size}] is {rate}: it must be {FINITE.text}")


def _check_which(checkpoint: str) -> None:
    if checkpoint not in ("latest", "best") and not checkpoint.isdecimal():
        raise UserError(f"checkpoint is {checkpoint!r}: it must be latest, best or a step number")


def _check_assignments(compiler_options: Sequence[str]) -> None:
    for given in compiler_options:
        name, equals, _ = given.partition("=")
        if not (name and equals):
            raise UserError(f"compiler_options is {given!r}: it must be NAME=VALUE")


def _check_names(trackers: Sequence[str]) -> None:
    for name in trackers:
        if not isinstance(name, str):
            raise UserError(f"trackers has {name!r}: it must be the name of a tracker")


def _check_patterns(name: str, patterns: Sequence[str]) -> None:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise UserError(
                f"{name}: {pattern!r} is not a valid regular expression: {error}"
            ) from error


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

    epochs: int | None = option_field(None, Group.LENGTH, usual=True, range=NOT_NEGATIVE)
    """Length of the run in passes over the data: a total, which includes the epochs before a
    resume."""
    steps: int | None = option_field(None, Group.LENGTH, usual=True, range=NOT_NEGATIVE)
    """Length of the run in optimizer updates, instead of epochs; also a total."""
    global_batch_size: int | None = option_field(
        None, Group.LENGTH, usual=True, range=ABOVE_ZERO, on_resume=OnResume.REFUSED
    )
    """Examples per step, over all devices. None means 32."""
    batch_size_per_device: int | None = option_field(
        None, Group.LENGTH, usual=True, range=ABOVE_ZERO
    )
    """Examples per step on each device, instead of global_batch_size. Devices along mesh.tensor or
    mesh.context share theirs."""
    eval_batch_size: int | None = option_field(None, Group.LENGTH, range=ABOVE_ZERO)
    """Examples per batch of evaluation and prediction, over all devices. None means the global
    batch size."""
    uneven_batch: Literal["refuse", "pad"] = option_field(
        "refuse", Group.LENGTH, in_loops=STEP_IS_YOURS
    )
    """Treatment of a global batch that does not divide over the devices and microbatches: `refuse`,
    or `pad` with rows of weight 0, which is an error if padding could change the gradients."""
    steps_per_dispatch: int | None = option_field(
        None, Group.LENGTH, range=ABOVE_ZERO, neutral=(1,), in_loops=STEP_IS_YOURS
    )
    """Steps that the devices compute without the host if nothing is due between them. Signals and
    callbacks are delayed until the last of them. None means 10 to 50 for small steps of examples
    in memory, without callbacks at step or log, on CPUs with one device per process, and 1
    otherwise."""
    learning_rate: float | None = option_field(None, Group.OPTIMIZATION, usual=True, range=FINITE)
    """Learning rate that the experiment passes to its optimizer."""
    microbatches: int = option_field(
        1, Group.OPTIMIZATION, usual=True, range=ABOVE_ZERO, in_loops=STEP_IS_YOURS
    )
    """Gradient accumulation: the batch of a step is computed in this many parts, one after the
    other, and their gradients are added."""
    ema_decay: float | None = option_field(
        None, Group.OPTIMIZATION, usual=True, range=_DECAY, in_loops=STEP_IS_YOURS
    )
    """Decay of an exponential moving average of the parameters, at least 0 and below 1. In update k
    it is at most (1 + k) / (10 + k). Evaluation and prediction then use the averaged parameters."""
    learning_rate_scaling: Literal["none", "linear", "sqrt"] = option_field(
        "none", Group.OPTIMIZATION
    )
    """Scaling of learning_rate by r = global batch size / learning_rate_base_batch_size: none,
    multiply by r (linear) or by the square root of r (sqrt)."""
    learning_rate_base_batch_size: int | None = option_field(
        None, Group.OPTIMIZATION, range=ABOVE_ZERO
    )
    """Global batch size for which learning_rate was chosen."""
    learning_rate_table: dict[int, float] = option_field({}, Group.OPTIMIZATION, check=_check_rates)
    """Learning rates by global batch size, instead of learning_rate: 32 1e-3 256 4e-3 is 1e-3 from
    batch size 32 and 4e-3 from 256."""
    freeze: tuple[str, ...] = option_field(
        (), Group.OPTIMIZATION, check=partial(_check_patterns, "freeze"), in_loops=STEP_IS_YOURS
    )
    """Regular expressions; parameters whose path contains a match are not trained, and batch
    statistics with such a path keep their values. A pattern without a match is an error."""
    on_divergence: Literal["stop", "skip", "rewind"] = option_field(
        "stop",
        Group.OPTIMIZATION,
        on_resume=OnResume.FREE,
        in_loops="the loop is code that you write",
    )
    """Reaction to a loss or state that is NaN or infinite, and to a step that divergence_sigma
    finds: end the run with exit code 3 (stop), leave the update of that step out (skip), or go back
    to the newest checkpoint or snapshot before that step, and continue without its batch
    (rewind)."""
    divergence_sigma: float | None = option_field(
        None, Group.OPTIMIZATION, range=ABOVE_ZERO, on_resume=OnResume.FREE
    )
    """Robust standard deviations above the median of the steps before, from which a loss or a
    gradient norm counts as diverged. None means that only NaN and infinity count."""
    divergence_window: int = option_field(
        128, Group.OPTIMIZATION, range=ABOVE_ZERO, on_resume=OnResume.FREE
    )
    """Number of steps with which divergence_sigma compares a step."""
    max_rewinds: int = option_field(
        3,
        Group.OPTIMIZATION,
        range=ABOVE_ZERO,
        on_resume=OnResume.FREE,
        in_loops="the loop is code that you write",
    )
    """Largest number of times that a run goes back by on_divergence."""
    data_dir: str | None = option_field(None, Group.DATA, usual=True, on_resume=OnResume.FREE)
    """Folder that directly contains the data files."""
    shuffle: bool = option_field(True, Group.DATA, usual=True, on_resume=OnResume.REFUSED)
    """Shuffle the training examples, in another order every epoch."""
    data_threads: int | Literal["auto"] = option_field(
        "auto", Group.DATA, usual=True, range=NOT_NEGATIVE, on_resume=OnResume.FREE
    )
    """Threads that read batches ahead. 0 reads between steps, which suits data in memory. auto
    chooses the number while the run waits for batches, and 0 for data that do not say that threads
    may share them."""
    data_workers: int = option_field(0, Group.DATA, usual=True, range=NOT_NEGATIVE)
    """Processes that read training batches ahead, for each process of the job: for decoding and
    tokenizing that hold Python's lock. Each reads with data_threads threads (auto: none)."""
    data_on_device: bool = option_field(False, Group.DATA, in_loops=STEP_IS_YOURS)
    """Keep all training examples on each device; steps select theirs by index."""
    on_bad_record: Literal["fail", "skip"] = option_field("fail", Group.DATA)
    """Treatment of records that are corrupted or cannot be decoded: `fail` ends the run; `skip`
    reads all records once at the start, and leaves out the bad ones."""
    max_bad_records: int = option_field(100, Group.DATA, range=NOT_NEGATIVE)
    """Largest number of records of each dataset that on_bad_record=skip leaves out."""
    skip_steps: tuple[str | int, ...] = option_field((), Group.DATA)
    """Batches to leave out, counted from 0: each a number, or A:B for the batches A to B - 1. A run
    keeps them in all later starts."""
    stream_shards: int | None = option_field(None, Group.DATA, range=ABOVE_ZERO)
    """Number of shards that a stream is read as, fixed for the run. It divides the global batch
    size, and the number of processes divides it. None means the greatest common divisor of the
    batch size and 8."""
    strategy: str = option_field("mirrored", Group.PLACEMENT, usual=True, check=strategy)
    """Placement of the model: mirrored, zero, fully_sharded, tensor_parallel, central_storage and
    hybrid, of which several can be joined by + (hybrid+zero); or one of default (JAX's default
    device, without a mesh), one_device and parameter_server."""
    mesh: MeshSpec = option_field(MeshSpec(), Group.PLACEMENT)
    cpu_devices: int | None = option_field(None, Group.PLACEMENT, usual=True, range=ABOVE_ZERO)
    """Number of virtual CPU devices of each process if there is no accelerator. None means the
    number in JAX_NUM_CPU_DEVICES or XLA_FLAGS, or else one; either replaces an experiment's
    default."""
    sharding: ShardingOptions = option_field(ShardingOptions(), Group.PLACEMENT)
    context: ContextOptions = option_field(ContextOptions(), Group.PLACEMENT)
    expert: ExpertOptions = option_field(ExpertOptions(), Group.PLACEMENT)
    collectives: CollectiveOptions = option_field(CollectiveOptions(), Group.PLACEMENT)
    servers: ParameterServerOptions = option_field(ParameterServerOptions(), Group.PLACEMENT)
    seed: int = option_field(0, Group.NUMERICS, usual=True, on_resume=OnResume.REFUSED)
    """Seed of all randomness: initial parameters, order of the data, dropout."""
    compute_dtype: Literal["float32", "bfloat16"] = option_field(
        "float32", Group.NUMERICS, usual=True, in_loops=STEP_IS_YOURS
    )
    """Dtype of the model's computation. Parameters, optimizer state and sums keep theirs."""
    remat: Literal["none", "full", "dots", "dots_no_batch", "attention"] = option_field(
        "none", Group.NUMERICS, usual=True, in_loops=STEP_IS_YOURS
    )
    """Intermediate results that the backward pass recomputes instead of storing: none, all (full),
    all but the output of attention (attention), all but that and the results of matrix products
    (dots), or all but that and those of matrix products without a batch dim (dots_no_batch)."""
    exact: int | None = option_field(None, Group.NUMERICS, range=_SHARDS, in_loops=STEP_IS_YOURS)
    """The same bits on any number of devices: number of virtual shards of the batch, a power of two
    and at least twice the devices. global_batch_size must be a multiple of it, times microbatches.
    None means the same numbers to rounding."""
    batch_statistics: Literal["global", "replica"] = option_field(
        "global", Group.NUMERICS, in_loops=STEP_IS_YOURS
    )
    """Batch normalization in training: with the statistics of the global batch, or of each
    replica's own examples, as in tf.distribute. With replica, the running averages are the means
    over the replicas."""
    jit: bool = option_field(True, Group.NUMERICS, in_loops=STEP_IS_YOURS)
    """Compile the steps. --no-jit runs them operation by operation, for debugging."""
    compilation_cache: str | None = option_field(None, Group.NUMERICS, on_resume=OnResume.FREE)
    """Folder that keeps compiled programs for later starts, up to 4 GiB, or 'off'. None means
    ~/.cache/spmdtrain, or the folder of JAX_COMPILATION_CACHE_DIR if that is set."""
    compiler_options: tuple[str, ...] = option_field((), Group.NUMERICS, check=_check_assignments)
    """XLA options for compiling the steps, each as NAME=VALUE."""
    xla_preset: Literal["auto", "none"] = option_field("auto", Group.NUMERICS)
    """Options of XLA that make steps on several TPU v5e or v5p chips faster (auto), or none. On
    other devices auto adds nothing. compiler_options replace them."""
    eval_every_steps: int | None = option_field(
        None, Group.EVALUATION, usual=True, range=ABOVE_ZERO
    )
    """Steps between two evaluations. The last step has one, too. None means at the end of each
    epoch."""
    best_metric: str = option_field("loss", Group.EVALUATION, usual=True, in_measurements=False)
    """Evaluation metric by which the best checkpoint is chosen."""
    best_direction: Literal["min", "max"] = option_field("min", Group.EVALUATION, usual=True)
    """Whether a low (min) or a high (max) best_metric is better."""
    eval_at_checkpoints: bool = option_field(
        False, Group.EVALUATION, in_loops=STEP_IS_YOURS, in_measurements=False
    )
    """Evaluate before each save of a checkpoint, instead of at the end of each epoch."""
    evaluated_by: Literal["training", "evaluator"] = option_field(
        "training", Group.EVALUATION, in_loops=STEP_IS_YOURS, in_measurements=False
    )
    """Task that evaluates the validation split, and so decides which checkpoint is best: the
    training itself, or a separate evaluator (--role evaluate, the launcher's --evaluator, or a task
    of TF_CONFIG). Without a running evaluator, no checkpoint is then removed."""
    workdir: str | None = option_field(
        None,
        Group.CHECKPOINTS,
        usual=True,
        check=_check_workdir,
        on_resume=OnResume.FREE,
        in_measurements=False,
    )
    """Folder or URL of the run's files; required with several processes. None means runs/NAME, with
    the name of the experiment (a sweep: runs/NAME-sweep). In Python, None means that no files are
    written."""
    resume: Literal["auto", "never", "must"] = option_field(
        "auto", Group.CHECKPOINTS, usual=True, on_resume=OnResume.FREE, in_measurements=False
    )
    """Use of the checkpoints in the workdir: auto restores the newest valid one, and starts from
    step 0 only if there are none; never refuses a workdir with checkpoints, must one without."""
    init_from: str | None = option_field(
        None,
        Group.CHECKPOINTS,
        usual=True,
        neutral=("",),
        on_resume=OnResume.FREE,
        in_loops=STEP_IS_YOURS,
    )
    """Initial parameters, if the workdir has no checkpoint to resume from: the workdir of another
    run, or one of its checkpoints/STEP (the averaged ones if it has them); or weights of another
    program: .safetensors (a file, or a folder with its index), .npz, .keras, or an Orbax
    checkpoint. With --mode evaluate or predict, the model to use instead of the workdir's."""
    checkpoint: str = option_field(
        "latest",
        Group.CHECKPOINTS,
        usual=True,
        check=_check_which,
        on_resume=OnResume.FREE,
        in_loops=STEP_IS_YOURS,
    )
    """Checkpoint to load from init_from, or from the workdir to evaluate and predict: latest (the
    newest valid one), best (by best_metric) or a step."""
    checkpoint_every_steps: int | None = option_field(
        None, Group.CHECKPOINTS, usual=True, range=ABOVE_ZERO
    )
    """Steps between two checkpoints. The last step has one, too. None means each epoch, or 500
    steps without epochs, unless checkpoint_every_seconds is given."""
    snapshot_every_steps: int | Literal["auto"] | None = option_field(
        None,
        Group.CHECKPOINTS,
        range=ABOVE_ZERO,
        on_resume=OnResume.FREE,
        in_measurements=False,
    )
    """Steps between two snapshots of the state in the memory of the hosts, and in that of another
    host if there are several: a restart continues from the newest one. auto takes the number at
    which they cost at most 1 % of the time. None means no snapshots."""
    keep_latest: int = option_field(3, Group.CHECKPOINTS, usual=True, range=ABOVE_ZERO)
    """Number of newest checkpoints to keep."""
    keep_best: int = option_field(1, Group.CHECKPOINTS, usual=True, range=NOT_NEGATIVE)
    """Number of best checkpoints to keep in addition."""
    resume_anyway: bool = option_field(False, Group.CHECKPOINTS, on_resume=OnResume.FREE)
    """Resume although the optimizer's update, or a setting of JAX that gives results another
    meaning, differs from that of the checkpoint. Each difference is printed."""
    init_from_strict: Literal["all", "matching"] = option_field(
        "all", Group.CHECKPOINTS, on_resume=OnResume.FREE, in_loops=STEP_IS_YOURS
    )
    """all: init_from must have every array of the model. matching: arrays that are missing there or
    have another shape (a new head) keep their initial values."""
    fork_from: str | None = option_field(
        None, Group.CHECKPOINTS, neutral=("",), on_resume=OnResume.FREE, in_measurements=False
    )
    """RUN or RUN@STEP: without checkpoints in the workdir, start from the full state of another
    run: parameters, optimizer, step, position in the data. STEP may be best; by default the
    newest valid checkpoint."""
    checkpoint_every_seconds: float | None = option_field(None, Group.CHECKPOINTS, range=ABOVE_ZERO)
    """Seconds between two checkpoints, instead of each epoch or 500 steps. With
    checkpoint_every_steps, both apply. None means no checkpoints by time."""
    checkpoint_at_start: bool = option_field(False, Group.CHECKPOINTS)
    """Also save the state before the first step, as checkpoints/0."""
    keep_every_steps: int | None = option_field(None, Group.CHECKPOINTS, range=ABOVE_ZERO)
    """N steps; the first checkpoint at or after each multiple of N is never deleted. None means
    that no checkpoint is kept for its step."""
    keep_every_hours: float | None = option_field(None, Group.CHECKPOINTS, range=ABOVE_ZERO)
    """Hours; the first checkpoint of each such period of the clock is never deleted. None means
    that no checkpoint is kept for its time."""
    sentinel_every: int | None = option_field(
        None,
        Group.HARDWARE,
        range=ABOVE_ZERO,
        on_resume=OnResume.FREE,
        in_loops=STEP_IS_YOURS,
        in_measurements=False,
    )
    """Steps between two checks that the devices compute correctly: the gradients of each device's
    part of the batch are computed again on another device, and must have the same bits."""
    sentinel_action: Literal["warn", "stop", "rollback"] = option_field(
        "stop", Group.HARDWARE, on_resume=OnResume.FREE, in_measurements=False
    )
    """Reaction to a device that computes other gradients: log it (warn), end the run with exit code
    4 (stop), or also rename the checkpoints since the last check that passed (rollback); the
    launcher then restarts the job without the process of that device."""
    compare_copies_every: int | None = option_field(
        None, Group.HARDWARE, range=ABOVE_ZERO, on_resume=OnResume.FREE
    )
    """Steps between two comparisons of the copies of the state that several processes hold, besides
    those after the first step and before each save."""
    log_every: int = option_field(10, Group.LOGGING, usual=True, range=ABOVE_ZERO)
    """Steps between two lines of training metrics."""
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"] | str, ...] = option_field(
        ("tensorboard",),
        Group.LOGGING,
        usual=True,
        check=_check_names,
        on_resume=OnResume.FREE,
        in_measurements=False,
    )
    """Where metrics and media go, besides the files of the workdir: tensorboard, wandb, mlflow,
    trackio, or a tracker of an installed package; nowhere else without a name. A tracker that fails
    does not stop the run."""
    quiet: bool = option_field(False, Group.LOGGING, usual=True, on_resume=OnResume.FREE)
    """Print only errors, warnings and the result: the metrics of the last evaluation, or the
    predictions."""
    log_hash_every: int | None = option_field(
        None, Group.LOGGING, range=ABOVE_ZERO, on_resume=OnResume.FREE
    )
    """Steps between two hashes of the whole state in hashes.jsonl; the last step has one, too. None
    means no hashes."""
    watch: tuple[str, ...] = option_field(
        (),
        Group.LOGGING,
        check=partial(_check_patterns, "watch"),
        on_resume=OnResume.FREE,
        in_loops=STEP_IS_YOURS,
        in_measurements=False,
    )
    """Regular expressions of the layers and parameters to watch, by path: norms, extremes, shares
    of zeros and of non-finite values, and histograms of outputs and gradients go to watch.jsonl and
    the trackers."""
    watch_every: int = option_field(
        100, Group.LOGGING, range=ABOVE_ZERO, on_resume=OnResume.FREE, in_measurements=False
    )
    """Steps between two that are watched, besides the first one."""
    profile_steps: str | None = option_field(
        None, Group.LOGGING, in_loops=STEP_IS_YOURS, in_measurements=False
    )
    """Range of steps to profile, A:B, both included. Writes a profiler trace into the workdir."""
    memory_profile: bool = option_field(False, Group.LOGGING, in_measurements=False)
    """Write the memory of process 0 and of the arrays on its devices with each logged step, and the
    places that have made these arrays to memory.pprof in the workdir."""

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
        self.profile_range()
        refuse_conflicts(self, OPTIONS, Moment.CONSTRUCTED)
        if self.skip_steps:
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

    def watches_at(self, step: int) -> bool:
        """Returns whether layers are watched in `step`: in the first, and each `watch_every`-th.

        Args:
          step: Number of the step, from 1.
        """
        return bool(self.watch) and (step == 1 or step % self.watch_every == 0)

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


RunConfig.__doc__ = FieldDocs(RunConfig.__doc__)  # type: ignore[assignment]
OPTIONS: Mapping[str, OptionRow] = option_rows(RunConfig)
"""The properties of all options, by name."""


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

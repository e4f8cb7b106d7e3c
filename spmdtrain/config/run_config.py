"""Configuration of a run: plain dataclasses, which do not import JAX."""

import dataclasses
import enum
import hashlib
import inspect
import re
import sys
import types
from dataclasses import dataclass, field
from typing import Any, Literal

from spmdtrain.config.checks import check_compute_dtype, check_run, check_values
from spmdtrain.config.option_groups import (
    CollectiveOptions,
    ContextOptions,
    ExpertOptions,
    MeshSpec,
    ParameterServerOptions,
    ShardingOptions,
)
from spmdtrain.config.skipped_batches import SkippedBatches
from spmdtrain.errors import UserError

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
        # functions that begin a run do (`sharding.resolution.check_inherited`).
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

"""What a run is told: plain data that neither needs nor imports JAX."""

import dataclasses
import enum
import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from spmdtrain.errors import UserError, did_you_mean
from spmdtrain.strategies import AXES, strategy

DEFAULT_GLOBAL_BATCH_SIZE = 32
STEPS_BETWEEN_CHECKPOINTS = 500  # where a run is told in steps and has no epochs to save at


@dataclass(frozen=True, kw_only=True)
class MeshSpec:
    """Sizes of the mesh axes, and the devices they are laid over."""

    replica: int | None = None
    """Groups of devices along the slow outer axis, which splits the batch; -1 makes one of each
    host or slice, or two where there is but one."""
    data: int | None = None
    """Devices along the axis that splits the batch; -1 takes the rest."""
    fsdp: int | None = None
    """Devices along the axis that splits the batch and may split the state; -1 takes the rest."""
    tensor: int | None = None
    """Devices along the axis that may split single tensors; -1 takes the rest."""
    devices: tuple[str | int, ...] = ()
    """The devices to use, by index (0 3) or by name (gpu:0 gpu:1); all of them by default."""

    def given(self) -> dict[str, int | None]:
        """Axis name to size, in mesh order; None where the strategy says it."""
        return {axis: getattr(self, axis) for axis in AXES}


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """How a strategy splits the state."""

    min_size: int = 2**14
    """Elements below which an array is left whole: to gather it would cost more than it saves."""
    max_shards: int | None = None
    """The most parts to split the state into over fsdp; the other devices go along data."""
    replicated_limit: int = 2**20
    """Bytes above which an array that a strategy should split must not be whole on each device,
    unless a rule says so."""
    offload: Literal["state", "optimizer"] | None = None
    """What central_storage keeps in host memory: all of the state, or the optimizer's alone."""


@dataclass(frozen=True, kw_only=True)
class ParameterServerOptions:
    """How parameter_server divides the state, and how far its workers may drift apart."""

    partitioner: Literal["min_size", "max_size", "fixed_shards"] = "min_size"
    """How many servers share a parameter: as many as have min_shard_bytes of it, as few as need no
    more than max_shard_bytes each, or max_shards of them."""
    min_shard_bytes: int = 256 * 1024
    """What a shard has at least, with min_size; as the number of shards is rounded up, half of it
    where a parameter is little larger."""
    max_shard_bytes: int = 4 * 1024 * 1024
    """The most that a shard has, with max_size, whole rows each."""
    max_shards: int | None = None
    """The most shards of a parameter; where nothing is said, as many as there are servers, and any
    number with max_size."""
    max_staleness: int | None = None
    """How many updates may come between what a worker reads and what it adds to them; any number
    where nothing is said, and with 0 the result is that of mirrored."""
    backup_task_timeout: float | None = None
    """Seconds after which a batch that has not come back is given to an idle worker, too; three
    times what one usually takes where nothing is said, and at least one second."""


@dataclass(frozen=True, kw_only=True)
class CollectiveOptions:
    """How devices exchange what they have computed. What a backend cannot do is an error."""

    reduction: (
        Literal["automatic", "all_reduce", "flattened", "hierarchical", "one_device"] | None
    ) = None
    """Who adds the gradients up: XLA where it sees fit (automatic), or each device computes its own
    and they are reduced once: array by array, flattened into one, first within the groups of the
    replica axis, or on one device, which sends the sums to the others. Where nothing is said,
    flattened on CPU if that means the same, else automatic."""
    reduce_dtype: Literal["bfloat16", "float16"] | None = None
    """Reduce gradients in this dtype, not in their own."""
    combine_threshold_bytes: int | None = None
    """Arrays of up to so many bytes together travel in one collective."""
    cpu_implementation: Literal["gloo", "mpi"] | None = None
    """What carries the collectives of several CPU processes; gloo where nothing is said."""
    timeout: float | None = None
    """Seconds that a collective of CPU devices may take before the process ends, rounded up to
    whole ones."""


class Purpose(enum.StrEnum):
    """What a random key is for. Each draws from `seed` on its own."""

    INIT = "init"
    DATA = "data"
    STEP = "step"
    EVAL = "eval"


def derive_seed(seed: int, purpose: Purpose) -> int:
    """The 32-bit seed of one purpose: a hash, so that neighbouring seeds share nothing."""
    digest = hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The fields every experiment has; an experiment adds its own by inheritance.

    `Trainer` takes the same names as keywords.
    """

    workdir: str | None = None
    """Folder or URL that holds the run's files; runs/NAME of the experiment where none is given."""
    seed: int = 0
    """Where all randomness comes from: initial parameters, order of the data, dropout."""
    epochs: int | None = None
    """Length of the whole run in passes over the data. A total, also after a resume."""
    steps: int | None = None
    """Length of the whole run in optimizer updates, instead of epochs."""
    global_batch_size: int | None = None
    """Examples in one step over all devices; 32 where nothing is said."""
    batch_size_per_device: int | None = None
    """Examples in one step on each device, instead of global_batch_size."""
    uneven_batch: Literal["refuse", "pad"] = "refuse"
    """Treatment of a global batch that does not divide over the devices: `refuse`, or `pad` with
    rows of weight 0, which is an error if padding could change the gradients."""
    eval_batch_size: int | None = None
    """Examples in one batch of an evaluation or prediction over all devices; the global batch size
    if it is not given."""
    learning_rate: float | None = None
    """Learning rate that the experiment hands to its optimizer."""
    learning_rate_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Multiply learning_rate by global batch / learning_rate_base_batch_size, or by its root."""
    learning_rate_base_batch_size: int | None = None
    """The global batch size for which learning_rate was chosen."""
    learning_rate_table: dict[int, float] = field(default_factory=dict)
    """Instead of learning_rate, one for each batch size (32 1e-3 256 4e-3), from that size on."""
    data_dir: str | None = None
    """The folder that directly holds the data files."""
    shuffle: bool = True
    """Draw a new order of the training examples every epoch."""
    data_on_device: bool = False
    """Keep all training examples on each device, where steps take theirs by number."""
    data_threads: int = 0
    """Threads that read batches ahead; 0 reads between steps, right for data in memory."""
    mesh: MeshSpec = MeshSpec()
    strategy: str = "mirrored"
    """How the model is placed: default, one_device, mirrored, zero, fully_sharded,
    tensor_parallel, central_storage, hybrid or parameter_server; several are joined by +
    (hybrid+zero)."""
    sharding: ShardingOptions = ShardingOptions()
    collectives: CollectiveOptions = CollectiveOptions()
    servers: ParameterServerOptions = ParameterServerOptions()
    microbatches: int = 1
    """Parts in which a step's batch is computed one after the other, their gradients added up."""
    batch_statistics: Literal["global", "replica"] = "global"
    """Normalize training batches by the statistics of the global batch, or by those of each
    replica's own examples, as tf.distribute does; running averages are then replicas' means."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """What the model computes in; parameters, optimizer state and sums stay as they are."""
    remat: Literal["none", "full", "dots", "dots_no_batch"] = "none"
    """What the backward pass computes again rather than keeps: nothing, everything, or everything
    but the results of matrix products (of those without a batch dim)."""
    freeze: tuple[str, ...] = ()
    """Parameters that are not trained, by regular expressions found in their paths."""
    cpu_devices: int | None = None
    """Virtual devices to make of the CPU where there is no accelerator."""
    ema_decay: float | None = None
    """Keep a moving average of the parameters with this decay, and evaluate and predict with it."""
    evaluated_by: Literal["training", "evaluator"] = "training"
    """Who evaluates the validation split, and so says which checkpoint is best: the training
    itself, or an evaluator task beside it (--role evaluate)."""
    steps_per_dispatch: int = 1
    """Steps that devices make without the host, where nothing is due between them: signals and
    callbacks wait so long."""
    jit: bool = True
    """Compile the steps; --no-jit runs them operation by operation, for debugging."""
    compilation_cache: str | None = None
    """Folder where compiled programs are kept for later starts; one of the user's
    (~/.cache/spmdtrain) where nothing is said, and none for 'off'."""
    compiler_options: tuple[str, ...] = ()
    """Options of XLA's to compile the steps with, NAME=VALUE each."""
    resume: Literal["auto", "never", "must"] = "auto"
    """Go on from the workdir's newest good checkpoint, never, or fail where there is none."""
    init_from: str | None = None
    """Another run's workdir, or one of its checkpoints/STEP, whose parameters to start from
    (the averaged ones where it kept an average)."""
    checkpoint: str = "latest"
    """Which checkpoint to take of init_from, and of the workdir to evaluate and predict: latest
    (the newest good one), best (by best_metric) or a step."""
    log_every: int = 10
    """Steps between metrics lines."""
    eval_every_steps: int | None = None
    """Steps between evaluations; at the end of each epoch where nothing is said."""
    eval_at_checkpoints: bool = False
    """Evaluate at each step that is saved, before the save, instead of at the end of each epoch."""
    checkpoint_every_steps: int | None = None
    """Steps between checkpoints; where nothing is said, each epoch, or 500 steps without epochs."""
    checkpoint_every_seconds: float | None = None
    """Seconds between checkpoints."""
    checkpoint_at_start: bool = False
    """Also save the state before the first step, as checkpoints/0."""
    keep_latest: int = 3
    """Newest checkpoints to keep."""
    keep_best: int = 1
    """Best checkpoints to keep besides."""
    keep_every_steps: int | None = None
    """Keep for good the first checkpoint of every so many steps."""
    keep_every_hours: float | None = None
    """Keep for good the first checkpoint of every so many hours."""
    best_metric: str = "loss"
    """The evaluation metric that says which checkpoint is best."""
    best_direction: Literal["min", "max"] = "min"
    """Whether a low or a high best_metric is good."""
    profile_steps: str | None = None
    """A:B writes a profiler trace of steps A to B into the workdir."""

    # -- lengths and cadences ----------------------------------------------------------------

    def total_steps(self, num_examples: int) -> int:
        """Updates of the whole run: `steps`, or `ceil(epochs * num_examples / batch)`."""
        if self.steps is not None:
            return self.steps
        if self.epochs is None:
            raise UserError("how long to train is not said: give epochs or steps")
        return -(-self.epochs * num_examples // self._batch())

    def epochs_at(self, step: int, num_examples: int) -> int:
        """Returns the number of epochs completed after `step` updates."""
        return step * self._batch() // num_examples if num_examples else 0

    def epoch_of(self, step: int, num_examples: int) -> range:
        """Returns the updates of the epoch that update `step` belongs to."""
        before = self.epochs_at(step - 1, num_examples)
        first, last = (-(-n * num_examples // self._batch()) for n in (before, before + 1))
        return range(first + 1, last + 1)

    def ends_epoch(self, step: int, num_examples: int) -> bool:
        """Whether an epoch's last example is in the batch of update `step` (counted from 1)."""
        return self.epochs_at(step, num_examples) > self.epochs_at(step - 1, num_examples)

    def evaluates_at(self, step: int, num_examples: int) -> bool:
        """Whether `step` is one to evaluate after; the last step of a run is one in any case."""
        if self.eval_every_steps is not None:
            return step % self.eval_every_steps == 0
        if self.eval_at_checkpoints:
            return False
        return self.ends_epoch(step, num_examples)

    def saves_at(self, step: int, num_examples: int) -> bool:
        """Whether `step` is one to save after, by count; seconds and the last step come on top."""
        if self.checkpoint_every_steps is not None:
            return step % self.checkpoint_every_steps == 0
        if self.checkpoint_every_seconds is not None:
            return False
        if self.epochs is not None:
            return self.ends_epoch(step, num_examples)
        return step % STEPS_BETWEEN_CHECKPOINTS == 0

    def logs_at(self, step: int, total: int) -> bool:
        """Whether `step` gets a metrics line: the first, the last, and each `log_every`-th."""
        return step in (1, total) or step % self.log_every == 0

    def padded_batch_size(self, batch_shards: int) -> int:
        """Rows of a step's batch, with those that make it divide over devices and microbatches."""
        parts = batch_shards * self.microbatches
        return -(-self._batch() // parts) * parts

    def profile_range(self) -> tuple[int, int] | None:
        """First and last step of the profiler trace."""
        if self.profile_steps is None:
            return None
        try:
            first, last = map(int, self.profile_steps.split(":"))
        except ValueError:
            first, last = 0, 0
        if not 1 <= first <= last:
            raise UserError(
                f"profile_steps is {self.profile_steps!r}: write A:B, two step numbers from 1, "
                "the first not above the second"
            )
        return first, last

    def _batch(self) -> int:
        assert self.global_batch_size is not None, "resolve() comes first"
        return self.global_batch_size


_POSITIVE = (
    "epochs",
    "steps",
    "global_batch_size",
    "batch_size_per_device",
    "eval_batch_size",
    "learning_rate_base_batch_size",
    "cpu_devices",
    "log_every",
    "eval_every_steps",
    "checkpoint_every_steps",
    "checkpoint_every_seconds",
    "keep_latest",
    "keep_every_steps",
    "keep_every_hours",
    "microbatches",
    "steps_per_dispatch",
)


def check(config: RunConfig) -> None:
    """Raise `UserError` for values that no run could have, whatever the devices and the data."""
    check_compute_dtype(config.compute_dtype)
    _check_types(config, RunConfig)
    for name in _POSITIVE:
        value = getattr(config, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UserError(f"{name} is {value}: it must be above 0")
    for size in config.learning_rate_table:
        if size < 1:
            raise UserError(f"learning_rate_table has a batch size of {size}: it must be above 0")
    for name in ("keep_best", "data_threads"):
        if getattr(config, name) < 0:
            raise UserError(f"{name} is {getattr(config, name)}: it must be 0 or more")
    for one, other in (("epochs", "steps"), ("global_batch_size", "batch_size_per_device")):
        if getattr(config, one) is not None and getattr(config, other) is not None:
            raise UserError(
                f"{one} is {getattr(config, one)} and {other} is {getattr(config, other)}: "
                "give one of the two"
            )
    if config.checkpoint not in ("latest", "best") and not config.checkpoint.isdecimal():
        raise UserError(
            f"checkpoint is {config.checkpoint!r}: it must be latest, best or a step number"
        )
    for option in config.compiler_options:
        name, equals, _ = option.partition("=")
        if not (name and equals):
            raise UserError(f"compiler_options is {option!r}: it must be NAME=VALUE")
    if config.eval_at_checkpoints and config.evaluated_by == "evaluator":
        raise UserError(
            "eval_at_checkpoints is for evaluated_by 'training': an evaluator evaluates each "
            "checkpoint by itself"
        )
    if config.steps_per_dispatch > 1 and not config.jit:
        raise UserError(
            f"steps_per_dispatch is {config.steps_per_dispatch}, and jit is off: several steps are "
            "one compiled program"
        )
    if config.ema_decay is not None and not 0 <= config.ema_decay < 1:
        raise UserError(f"ema_decay is {config.ema_decay}: it must be 0 or more, and below 1")
    for axis, given in config.mesh.given().items():
        if given is not None and given < 1 and given != -1:
            raise UserError(f"mesh.{axis} is {given}: it must be 1 or more, or -1 for the rest")
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


def _check_workdir(workdir: str | None) -> None:
    """Raises `UserError` if the name of the workdir is empty, or none that a file system takes."""
    if workdir is None:
        return
    try:
        workdir.encode()
    except UnicodeEncodeError:
        problem = "it must be text in UTF-8"
    else:
        problem = "it must not contain NUL" if "\0" in workdir else ""
    if not workdir.strip():
        problem = "give a folder; without the option it is runs/NAME, from Python none"
    if problem:
        raise UserError(f"workdir is {workdir!a}: {problem}")


def check_compute_dtype(name: object) -> None:
    """Raises `UserError` for float16, under any of its names, because it needs loss scaling."""
    if name in ("float16", "mixed_float16", "f16", "fp16", "half"):
        raise UserError(
            f"compute_dtype is {name}: float16 gradients underflow without dynamic loss scaling, "
            "which spmdtrain does not have. Use bfloat16, which has the range of float32"
        )


def with_options(config: RunConfig, options: Mapping[str, Any], of: str) -> RunConfig:
    """The configuration changed by the keywords of whatever `of` names. Raises `UserError`."""
    fields = [field.name for field in dataclasses.fields(config)]
    for name in options:
        if name not in fields:
            raise UserError(f"{of} has no option {name!r}.{did_you_mean(name, fields)}")
    config = dataclasses.replace(config, **options)
    check(config)
    return config


def validate_trainer_options(config: RunConfig, options: Mapping[str, Any]) -> RunConfig:
    """The same for a trainer, whose model and optimizer are built already.

    Raises `UserError` also for what only a `build` could heed.
    """
    instead = {
        "learning_rate": "give it to the optimizer, for example optimizer=optax.adam(0.001)",
        "data_dir": "give the data to fit",
    }
    for name, advice in instead.items():
        if name in options:
            raise UserError(f"{name} is a field for the build(config) of an experiment: {advice}")
    config = with_options(config, options, "Trainer")
    if config.learning_rate_scaling != "none" or config.learning_rate_table:
        raise UserError(
            "learning_rate_scaling and learning_rate_table come too late for a Trainer, whose "
            "optimizer is built: call config = resolve_config(config) before building it"
        )
    return config


def _check_types(values: Any, fields: type, prefix: str = "") -> None:
    """The command line holds to the types by itself; Python does not."""
    for field_name, hint in get_type_hints(fields).items():
        name, value = f"{prefix}{field_name}", getattr(values, field_name)
        kinds = get_args(hint) if get_origin(hint) is UnionType else (hint,)
        if value is None and NoneType in kinds:
            continue
        for kind in kinds:
            if isinstance(kind, type) and dataclasses.is_dataclass(kind):
                if not isinstance(value, kind):
                    raise UserError(f"{name} is {value!r}: it must be a {kind.__name__}")
                _check_types(value, kind, f"{name}.")
            if get_origin(kind) is Literal and value not in get_args(kind):
                choices = [str(choice) for choice in get_args(kind)]
                raise UserError(f"{name} is {value!r}.{did_you_mean(str(value), choices)}")
            if kind is int and not isinstance(value, Integral):
                raise UserError(f"{name} is {value!r}: it must be a whole number")
            if kind is float and not isinstance(value, Real):
                raise UserError(f"{name} is {value!r}: it must be a number")
            if get_origin(kind) is tuple and not isinstance(value, (tuple, list)):
                raise UserError(f"{name} is {value!r}: it must be a tuple")
            if kind == tuple[str, ...] and not all(isinstance(item, str) for item in value):
                raise UserError(f"{name} is {value!r}: it must be a tuple of texts")
            if kind is str and not isinstance(value, str):
                raise UserError(f"{name} is {value!r}: it must be a text")


def _check_placement(config: RunConfig) -> None:
    placed, sharding, collectives = strategy(config.strategy), config.sharding, config.collectives
    if not placed.has_mesh and config.mesh != MeshSpec():
        raise UserError(
            f"strategy {placed.name} has no mesh, and one is given: one_device takes mesh.devices"
        )
    for name, value in (
        ("sharding.min_size", sharding.min_size),
        ("sharding.max_shards", sharding.max_shards),
        ("sharding.replicated_limit", sharding.replicated_limit),
        ("collectives.combine_threshold_bytes", collectives.combine_threshold_bytes),
        ("collectives.timeout", collectives.timeout),
    ):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UserError(f"{name} is {value}: it must be above 0")
    for option in ("reduction", "reduce_dtype"):
        if getattr(collectives, option) not in (None, "automatic") and not placed.has_mesh:
            raise UserError(
                f"collectives.{option}: strategy {placed.name} has no mesh to reduce over"
            )
    if collectives.combine_threshold_bytes is not None and not config.jit:
        raise UserError("collectives.combine_threshold_bytes is for compiled steps, and jit is off")
    if sharding.max_shards is not None:
        if not placed.shards_params:
            raise UserError(
                f"sharding.max_shards is for fully_sharded, and the strategy is {placed.name}"
            )
        if config.mesh.fsdp not in (None, -1):
            raise UserError(
                f"sharding.max_shards is {sharding.max_shards} and mesh.fsdp is "
                f"{config.mesh.fsdp}: give one of the two"
            )
    _check_servers(config)
    if sharding.offload is not None and not placed.on_host:
        raise UserError(
            f"sharding.offload is for central_storage, and the strategy is {placed.name}"
        )
    for pattern in config.freeze:
        try:
            re.compile(pattern)
        except re.error as error:
            raise UserError(f"freeze: {pattern!r} is no regular expression: {error}") from error


def _check_servers(config: RunConfig) -> None:
    servers, default = config.servers, ParameterServerOptions()
    if not strategy(config.strategy).by_servers:
        for name in (f.name for f in dataclasses.fields(ParameterServerOptions)):
            if getattr(servers, name) != getattr(default, name):
                raise UserError(
                    f"servers.{name} is for parameter_server, and the strategy is {config.strategy}"
                )
        return
    for name in ("min_shard_bytes", "max_shard_bytes", "max_shards", "backup_task_timeout"):
        value = getattr(servers, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UserError(f"servers.{name} is {value}: it must be above 0")
    if servers.max_staleness is not None and servers.max_staleness < 0:
        raise UserError(f"servers.max_staleness is {servers.max_staleness}: it must be 0 or more")
    for name, of in (("min_shard_bytes", "min_size"), ("max_shard_bytes", "max_size")):
        if getattr(servers, name) != getattr(default, name) and servers.partitioner != of:
            raise UserError(
                f"servers.{name} is for {of}, and servers.partitioner is {servers.partitioner}"
            )
    for name, only, why in (
        ("steps_per_dispatch", 1, "a worker makes one step at a time"),
        ("data_on_device", False, "each worker reads the examples of the batches it is given"),
        ("profile_steps", None, "the steps are made elsewhere"),
        ("uneven_batch", "refuse", "each worker computes whole batches on its own devices"),
    ):
        if getattr(config, name) != only:
            raise UserError(
                f"{name} is {getattr(config, name)}, and under parameter_server {why}: leave it out"
            )


def scale_learning_rate(config: RunConfig) -> float | None:
    """The learning rate for the configured `global_batch_size`, by table or by scaling."""
    batch = config.global_batch_size
    assert batch is not None
    if config.learning_rate_table:
        if config.learning_rate_scaling != "none":
            raise UserError("learning_rate_table and learning_rate_scaling exclude each other")
        fitting = [size for size in config.learning_rate_table if size <= batch]
        if not fitting:
            raise UserError(
                f"learning_rate_table begins at batch size {min(config.learning_rate_table)}: "
                f"it has no learning rate for a global batch of {batch}"
            )
        return config.learning_rate_table[max(fitting)]
    if config.learning_rate_scaling == "none":
        return config.learning_rate
    if config.learning_rate is None or config.learning_rate_base_batch_size is None:
        raise UserError(
            f"learning_rate_scaling is {config.learning_rate_scaling}: it needs learning_rate and "
            "learning_rate_base_batch_size, the batch for which that rate was chosen"
        )
    ratio = batch / config.learning_rate_base_batch_size
    return config.learning_rate * (
        ratio if config.learning_rate_scaling == "linear" else ratio**0.5
    )


Config = TypeVar("Config", bound=RunConfig)


def resolve(config: Config, *, batch_shards: int) -> Config:
    """The same configuration with nothing left that depends on the devices.

    Afterwards `global_batch_size` is set, `batch_size_per_device` is not, and `learning_rate` is
    the one to use. `batch_shards` is the number of devices that the batch is split over.
    """
    check(config)
    if config.batch_size_per_device is not None:
        batch = config.batch_size_per_device * batch_shards
    else:
        batch = config.global_batch_size or DEFAULT_GLOBAL_BATCH_SIZE
    config = dataclasses.replace(config, global_batch_size=batch, batch_size_per_device=None)
    refused = config.uneven_batch == "refuse"
    if refused and batch % batch_shards:
        raise UserError(
            f"global_batch_size is {batch}: it does not divide over {batch_shards} devices "
            f"({batch} = {batch // batch_shards} * {batch_shards} + {batch % batch_shards}); "
            f"{max(1, batch // batch_shards) * batch_shards} would; uneven_batch=pad pads "
            "the batch (not for a Loop)"
        )
    parts = batch_shards * config.microbatches
    if refused and batch % parts:
        raise UserError(
            f"global_batch_size is {batch}: it does not divide over {batch_shards} devices and "
            f"{config.microbatches} microbatches ({batch} = {batch // parts} * {parts} + "
            f"{batch % parts}); {max(1, batch // parts) * parts} would; "
            "uneven_batch=pad pads the batch (not for a Loop)"
        )
    return dataclasses.replace(
        config,
        learning_rate=scale_learning_rate(config),
        learning_rate_scaling="none",
        learning_rate_base_batch_size=None,
        learning_rate_table={},
    )


def as_json(config: RunConfig) -> dict[str, Any]:
    """The configuration as JSON holds it: nested dictionaries, lists for tuples, string keys."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)

    return plain(dataclasses.asdict(config))

"""Keywords of `Trainer` and `Loop` by type, written by .ci/options.py."""

from typing import Literal, TypedDict

from spmdtrain.config.options import (
    CollectiveOptions,
    ContextOptions,
    ExpertOptions,
    MeshSpec,
    ParameterServerOptions,
    ShardingOptions,
)


class _SharedOptions(TypedDict, total=False):
    epochs: int | None
    steps: int | None
    global_batch_size: int | None
    batch_size_per_device: int | None
    eval_batch_size: int | None
    divergence_sigma: float | None
    divergence_window: int
    shuffle: bool
    data_threads: int | Literal["auto"]
    data_workers: int
    on_bad_record: Literal["fail", "skip"]
    max_bad_records: int
    skip_steps: tuple[str | int, ...] | list[str | int]
    stream_shards: int | None
    strategy: str
    mesh: MeshSpec
    cpu_devices: int | None
    sharding: ShardingOptions
    context: ContextOptions
    expert: ExpertOptions
    collectives: CollectiveOptions
    servers: ParameterServerOptions
    seed: int
    compilation_cache: str | None
    compiler_options: tuple[str, ...] | list[str]
    xla_preset: Literal["auto", "none"]
    eval_every_steps: int | None
    best_metric: str
    best_direction: Literal["min", "max"]
    workdir: str | None
    resume: Literal["auto", "never", "must"]
    checkpoint_every_steps: int | None
    snapshot_every_steps: int | Literal["auto"] | None
    keep_latest: int
    keep_best: int
    resume_anyway: bool
    fork_from: str | None
    checkpoint_every_seconds: float | None
    checkpoint_at_start: bool
    keep_every_steps: int | None
    keep_every_hours: float | None
    sentinel_action: Literal["warn", "stop", "rollback"]
    compare_copies_every: int | None
    log_every: int
    quiet: bool
    log_hash_every: int | None
    watch_every: int
    memory_profile: bool


class TrainerOptions(_SharedOptions, total=False):
    """The fields of `RunConfig` that a `Trainer` takes as keywords."""

    uneven_batch: Literal["refuse", "pad"]
    steps_per_dispatch: int | None
    microbatches: int
    ema_decay: float | None
    freeze: tuple[str, ...] | list[str]
    on_divergence: Literal["stop", "skip", "rewind"]
    max_rewinds: int
    data_on_device: bool
    compute_dtype: Literal["float32", "bfloat16"]
    remat: Literal["none", "full", "dots", "dots_no_batch", "attention"]
    exact: int | None
    batch_statistics: Literal["global", "replica"]
    jit: bool
    eval_at_checkpoints: bool
    evaluated_by: Literal["training", "evaluator"]
    init_from: str | None
    checkpoint: str
    init_from_strict: Literal["all", "matching"]
    sentinel_every: int | None
    watch: tuple[str, ...] | list[str]
    profile_steps: str | None


class LoopOptions(_SharedOptions, total=False):
    """The fields of `RunConfig` that a `Loop` takes as keywords."""

    learning_rate: float | None
    learning_rate_scaling: Literal["none", "linear", "sqrt"]
    learning_rate_base_batch_size: int | None
    learning_rate_table: dict[int, float]
    data_dir: str | None

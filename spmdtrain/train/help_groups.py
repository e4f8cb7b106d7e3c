"""The groups in which `--help` shows the options of the run command and of the plan command."""

from dataclasses import dataclass


@dataclass(frozen=True)
class HelpGroup:
    """Options under one heading of the help.

    Attributes:
      usual: Names of options that `--help` shows; a nested one has a dot.
      rare: Names of options that only `--help-all` shows. The name of a group of nested options
        means all of them that `usual` does not name.
    """

    title: str
    usual: tuple[str, ...]
    rare: tuple[str, ...] = ()


HELP_GROUPS = (
    HelpGroup(
        "Run length and batch",
        ("epochs", "steps", "global_batch_size", "batch_size_per_device"),
        ("eval_batch_size", "uneven_batch", "steps_per_dispatch"),
    ),
    HelpGroup(
        "Optimization",
        ("learning_rate", "microbatches", "ema_decay"),
        (
            "learning_rate_scaling",
            "learning_rate_base_batch_size",
            "learning_rate_table",
            "freeze",
        ),
    ),
    HelpGroup(
        "Data",
        ("data_dir", "shuffle", "data_threads", "data_workers"),
        (
            "data_on_device",
            "on_bad_record",
            "max_bad_records",
            "skip_steps",
            "stream_shards",
        ),
    ),
    HelpGroup(
        "Placement",
        ("strategy", "mesh.data", "mesh.fsdp", "mesh.tensor", "cpu_devices"),
        ("mesh", "sharding", "context", "expert", "collectives", "servers", "show_sharding"),
    ),
    HelpGroup(
        "Numerics and compilation",
        ("seed", "compute_dtype", "remat"),
        (
            *("exact", "batch_statistics", "jit"),
            *("compilation_cache", "compiler_options", "xla_preset"),
        ),
    ),
    HelpGroup(
        "Evaluation",
        ("split", "eval_every_steps", "best_metric", "best_direction"),
        ("eval_at_checkpoints", "evaluated_by", "role", "evaluate_which"),
    ),
    HelpGroup(
        "Checkpoints",
        (
            "workdir",
            "resume",
            "init_from",
            "checkpoint",
            "checkpoint_every_steps",
            "keep_latest",
            "keep_best",
        ),
        (
            "resume_anyway",
            "init_from_strict",
            "fork_from",
            "checkpoint_every_seconds",
            "checkpoint_at_start",
            "keep_every_steps",
            "keep_every_hours",
        ),
    ),
    HelpGroup(
        "Faulty hardware",
        (),
        ("sentinel_every", "sentinel_action", "compare_copies_every"),
    ),
    HelpGroup("Logging", ("log_every", "trackers", "quiet"), ("log_hash_every", "profile_steps")),
    HelpGroup(
        "Several processes",
        ("cluster",),
        ("coordinator", "processes", "process_id", "init_timeout", "hang_timeout"),
    ),
)
"""Every field of `RunConfig`, and the options of the commands that are not shown first. An option
that is in no group is shown under "Command" if it is the command's, and else under "Other"."""

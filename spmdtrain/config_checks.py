"""Checks of a configuration, and its resolution for the devices of a run."""

import dataclasses
import math
import re
from collections.abc import Mapping
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from spmdtrain.config import (
    DEFAULT_GLOBAL_BATCH_SIZE,
    MeshSpec,
    ParameterServerOptions,
    RunConfig,
    as_json,
)
from spmdtrain.errors import LARGEST_INTEGER, UserError, did_you_mean
from spmdtrain.strategies import strategy

Config = TypeVar("Config", bound=RunConfig)

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
    """Checks everything that depends neither on the devices nor on the data.

    Args:
      config: The configuration. Of an experiment's own fields only the size of integers is checked.

    Raises:
      UserError: If a field has the wrong type or an invalid value, or if two fields conflict.
    """
    check_compute_dtype(config.compute_dtype)
    _check_types(config, RunConfig)
    for name, value in as_json(config).items():
        _check_integers(name, value)
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
    for option in config.compiler_options:
        name, equals, _ = option.partition("=")
        if not (name and equals):
            raise UserError(f"compiler_options is {option!r}: it must be NAME=VALUE")
    if config.eval_at_checkpoints and config.evaluated_by == "evaluator":
        raise UserError(
            "eval_at_checkpoints is True and evaluated_by is 'evaluator': an evaluator evaluates "
            "each checkpoint anyway; leave eval_at_checkpoints out"
        )
    if config.steps_per_dispatch > 1 and not config.jit:
        raise UserError(
            f"steps_per_dispatch is {config.steps_per_dispatch} and jit is False: several steps "
            "per dispatch are one compiled program; leave one of the two out"
        )
    if config.ema_decay is not None and not 0 <= config.ema_decay < 1:
        raise UserError(f"ema_decay is {config.ema_decay}: it must be 0 or more, and below 1")
    for axis, given in config.mesh.given().items():
        if given is not None and given < 1 and given != -1:
            raise UserError(
                f"mesh.{axis} is {given}: it must be 1 or more, or -1 for the remaining devices"
            )
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
    """Raises `UserError` if the workdir is empty or not a valid name for a file system."""
    if workdir is None:
        return
    try:
        workdir.encode()
    except UnicodeEncodeError:
        problem = "it must be text in UTF-8"
    else:
        problem = "it must not contain NUL" if "\0" in workdir else ""
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


def with_options(config: RunConfig, options: Mapping[str, Any], of: str) -> RunConfig:
    """Returns the configuration with some fields replaced.

    Args:
      config: The configuration to change.
      options: New values by field name.
      of: The name of the function or class that received `options`, for the error message.

    Raises:
      UserError: If an option is no field of `config`, or if the result is not valid.
    """
    fields = [field.name for field in dataclasses.fields(config)]
    for name in options:
        if name not in fields:
            raise UserError(f"{of} has no option {name!r}.{did_you_mean(name, fields)}")
    config = dataclasses.replace(config, **options)
    check(config)
    return config


def validate_trainer_options(config: RunConfig, options: Mapping[str, Any]) -> RunConfig:
    """Returns the configuration with the options of a `Trainer`, which has a built optimizer.

    Args:
      config: The configuration to change.
      options: New values by field name.

    Raises:
      UserError: If an option is unknown or not valid, or has an effect only before the model,
        the optimizer and the data are built (`learning_rate`, its scaling, `data_dir`).
    """
    instead = {
        "learning_rate": "give it to the optimizer, for example optimizer=optax.adam(0.001)",
        "data_dir": "give the data to fit",
    }
    for name, advice in instead.items():
        if name in options:
            raise UserError(f"{name} is for the build(config) of an experiment: {advice}")
    config = with_options(config, options, "Trainer")
    if config.learning_rate_scaling != "none" or config.learning_rate_table:
        raise UserError(
            "learning_rate_scaling and learning_rate_table have no effect in a Trainer, because "
            "its optimizer is already built: call config = resolve_config(config) first, and build "
            "the optimizer with config.learning_rate"
        )
    return config


def _check_types(values: Any, fields: type, prefix: str = "") -> None:
    """Checks the types of all fields. The command line converts its options; Python does not."""
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
                raise UserError(f"{name} is {value!r}: it must be a tuple of strings")
            if kind is str and not isinstance(value, str):
                raise UserError(f"{name} is {value!r}: it must be a string")


def _check_placement(config: RunConfig) -> None:
    placed, sharding, collectives = strategy(config.strategy), config.sharding, config.collectives
    if not placed.has_mesh and config.mesh != MeshSpec():
        raise UserError(
            f"a mesh is given, but strategy {placed.name} has none: leave it out, or choose the "
            "device with strategy one_device and mesh.devices"
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


def _check_servers(config: RunConfig) -> None:
    servers, default = config.servers, ParameterServerOptions()
    if not strategy(config.strategy).by_servers:
        for name in (f.name for f in dataclasses.fields(ParameterServerOptions)):
            if getattr(servers, name) != getattr(default, name):
                raise UserError(
                    f"servers.{name} is for parameter_server, but the strategy is {config.strategy}"
                )
        return
    for name in ("min_shard_bytes", "max_shard_bytes", "max_shards", "backup_task_timeout"):
        value = getattr(servers, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UserError(f"servers.{name} is {value}: it must be above 0")
    if servers.max_staleness is not None and servers.max_staleness < 0:
        raise UserError(f"servers.max_staleness is {servers.max_staleness}: it must be 0 or more")
    for name, partitioner in (("min_shard_bytes", "min_size"), ("max_shard_bytes", "max_size")):
        if getattr(servers, name) != getattr(default, name) and servers.partitioner != partitioner:
            raise UserError(
                f"servers.{name} is for {partitioner}, but servers.partitioner is "
                f"{servers.partitioner}"
            )
    for name, required, why in (
        ("steps_per_dispatch", 1, "a worker computes one step at a time"),
        ("data_on_device", False, "each worker reads the examples of the batches assigned to it"),
        ("profile_steps", None, "the steps run in other processes"),
        ("uneven_batch", "refuse", "each worker computes whole batches on its own devices"),
    ):
        if getattr(config, name) != required:
            raise UserError(
                f"{name} is {getattr(config, name)}, but under parameter_server {why}: leave it out"
            )


def scale_learning_rate(config: RunConfig) -> float | None:
    """Returns the learning rate for the configured `global_batch_size`, by table or by scaling.

    Args:
      config: A configuration whose `global_batch_size` is set.

    Raises:
      UserError: If table and scaling are both set, if the table has no entry for the batch size,
        or if scaling lacks `learning_rate` or `learning_rate_base_batch_size`.
    """
    batch = config.global_batch_size
    assert batch is not None
    if config.learning_rate_table:
        if config.learning_rate_scaling != "none":
            raise UserError(
                "learning_rate_table and learning_rate_scaling are both set: give one of the two"
            )
        sizes = [size for size in config.learning_rate_table if size <= batch]
        if not sizes:
            raise UserError(
                f"learning_rate_table begins at batch size {min(config.learning_rate_table)}: "
                f"it has no learning rate for a global batch of {batch}"
            )
        return config.learning_rate_table[max(sizes)]
    if config.learning_rate_scaling == "none":
        return config.learning_rate
    if config.learning_rate is None or config.learning_rate_base_batch_size is None:
        raise UserError(
            f"learning_rate_scaling is {config.learning_rate_scaling}: it needs learning_rate and "
            "learning_rate_base_batch_size, the batch size for which that rate was chosen"
        )
    ratio = batch / config.learning_rate_base_batch_size
    return config.learning_rate * (
        ratio if config.learning_rate_scaling == "linear" else ratio**0.5
    )


def _check_integers(name: str, value: Any) -> None:
    """Raises `UserError` for an integer, also a nested one, that a manifest cannot hold."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            _check_integers(name, item)
    elif isinstance(value, int) and abs(value) >= LARGEST_INTEGER:
        shown = str(value) if abs(value) < 10**40 else "an integer of more than 40 digits"
        raise UserError(f"{name} is {shown}: it must be below 2^63")


def resolve(config: Config, *, batch_shards: int) -> Config:
    """Returns the configuration with batch size and learning rate computed for the devices.

    In the result `global_batch_size` is set, `batch_size_per_device` is None, and `learning_rate`
    is scaled.

    Args:
      config: The configuration to resolve.
      batch_shards: Number of devices that the batch is split over.

    Raises:
      UserError: If the configuration is not valid, or if the global batch does not divide over
        devices and microbatches and `uneven_batch` is `refuse`.
    """
    check(config)
    if config.batch_size_per_device is not None:
        batch = config.batch_size_per_device * batch_shards
    else:
        batch = config.global_batch_size or DEFAULT_GLOBAL_BATCH_SIZE
    config = dataclasses.replace(config, global_batch_size=batch, batch_size_per_device=None)
    pads = config.uneven_batch == "pad"
    if not pads and batch % batch_shards:
        raise UserError(
            f"global_batch_size is {batch}: it does not divide over {batch_shards} devices "
            f"({batch} = {batch // batch_shards} * {batch_shards} + {batch % batch_shards}); "
            f"{max(1, batch // batch_shards) * batch_shards} would; uneven_batch=pad pads "
            "the batch (not supported by Loop)"
        )
    parts = batch_shards * config.microbatches
    if not pads and batch % parts:
        raise UserError(
            f"global_batch_size is {batch}: it does not divide over {batch_shards} devices and "
            f"{config.microbatches} microbatches ({batch} = {batch // parts} * {parts} + "
            f"{batch % parts}); {max(1, batch // parts) * parts} would; "
            "uneven_batch=pad pads the batch (not supported by Loop)"
        )
    return dataclasses.replace(
        config,
        learning_rate=scale_learning_rate(config),
        learning_rate_scaling="none",
        learning_rate_base_batch_size=None,
        learning_rate_table={},
    )

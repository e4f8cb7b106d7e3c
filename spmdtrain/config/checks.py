"""Checks of the values and combinations of a configuration's fields."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from spmdtrain.errors import LARGEST_INTEGER, UserError, did_you_mean, is_text
from spmdtrain.strategies import strategy

if TYPE_CHECKING:  # `run_config` imports this module
    from spmdtrain.config.run_config import RunConfig

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


_groups_are_checked: ContextVar[bool] = ContextVar("groups_are_checked", default=True)


def groups_are_checked() -> bool:
    """Returns whether an option group checks its values when it is constructed."""
    return _groups_are_checked.get()


@contextmanager
def unchecked_groups() -> Iterator[None]:
    """Defers the checks of option groups to `RunConfig`.

    tyro constructs the groups first, and would print their `UserError` in a box instead of raising
    it.
    """
    before = _groups_are_checked.set(False)
    try:
        yield
    finally:
        _groups_are_checked.reset(before)


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
    elif placed.by_servers or placed.needs_rules or placed.devices == 1:
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


def check_values(values: Any, fields: type, prefix: str = "") -> None:
    """Checks the types of the fields of a dataclass, and the size of its integers.

    The command line converts its options; Python does not.

    Args:
      values: An instance of the dataclass, or of a subclass. The types of fields that the subclass
        adds are not checked.
      fields: The dataclass.
      prefix: Stands before the names of the fields in messages, such as `mesh.`.

    Raises:
      UserError: If a field has the wrong type, or an integer is too large for a manifest.
    """
    for field_name, hint in _type_hints(fields).items():
        _check_type(f"{prefix}{field_name}", getattr(values, field_name), hint)
    for field in dataclasses.fields(values):
        # A field that the subclass computes itself has no value yet.
        _check_integers(f"{prefix}{field.name}", getattr(values, field.name, None))


@functools.cache
def _type_hints(fields: type) -> dict[str, Any]:
    return get_type_hints(fields)


def _check_type(name: str, value: Any, hint: Any) -> None:
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if value is None and NoneType in kinds:
        return
    for kind in kinds:
        is_class = isinstance(kind, type) and dataclasses.is_dataclass(kind)
        if is_class and not isinstance(value, kind):
            raise UserError(f"{name} is {value!r}: it must be a {kind.__name__}")
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
        if get_origin(kind) is tuple and get_origin(choice := get_args(kind)[0]) is Literal:
            for item in value:
                _check_type(name, item, choice)
        if kind is str and not isinstance(value, str):
            raise UserError(f"{name} is {value!r}: it must be a string")
        if get_origin(kind) is dict:
            if not isinstance(value, dict):
                raise UserError(f"{name} is {value!r}: it must be a dictionary")
            of_keys, of_values = get_args(kind)
            for key, item in value.items():
                _check_type(f"a key of {name}", key, of_keys)
                _check_type(f"{name}[{key!r}]", item, of_values)


def _check_integers(name: str, value: Any) -> None:
    """Raises `UserError` for an integer, also a nested one, that a manifest cannot hold."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _check_integers(f"{name}.{field.name}", getattr(value, field.name))
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            _check_integers(name, item)
    elif isinstance(value, int) and abs(value) >= LARGEST_INTEGER:
        shown = str(value) if abs(value) < 10**40 else "an integer of more than 40 digits"
        raise UserError(f"{name} is {shown}: it must be below 2^63")


def check_above_zero(values: object, names: Sequence[str], prefix: str = "") -> None:
    """Raises `UserError` unless each of some fields is None or a finite number above 0.

    `prefix` stands before the names of the fields in messages, such as `sharding.`.
    """
    for name in names:
        value = getattr(values, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UserError(f"{prefix}{name} is {value}: it must be above 0")


def not_default(values: Any) -> list[str]:
    """Returns the names of the fields of a dataclass whose value is not the default."""
    return [f.name for f in dataclasses.fields(values) if getattr(values, f.name) != f.default]


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
    if strategy(config.strategy).by_servers:
        found.insert(0, ("strategy", config.strategy, "the order of the workers' updates varies"))
    for name, value, why in found:
        raise UserError(
            f"exact is {shards} and {name} is {value}: {why}, so the bits would depend on the "
            "number of devices; leave one of the two out"
        )


def can_pad(options: Mapping[str, Any]) -> bool:
    """Returns whether other options of a run, by name, allow `uneven_batch` to be `pad`."""
    name = options.get("strategy")
    by_servers = name is not None and strategy(name).by_servers
    return options.get("exact") is None and not by_servers


_OWN_ORDER = "it adds up gradients in an order of its own"


def _check_servers(config: "RunConfig") -> None:
    if not strategy(config.strategy).by_servers:
        for name in not_default(config.servers):
            raise UserError(
                f"servers.{name} is for parameter_server, but the strategy is {config.strategy}"
            )
        return
    for name, why in (
        ("expert", "each worker reads whole parameters from the servers"),
        ("context", "a worker's devices split its batch alone"),
    ):
        if (size := getattr(config.mesh, name)) not in (None, 1):
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

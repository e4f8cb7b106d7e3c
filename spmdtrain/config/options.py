"""Groups of options, each of which is one field of `RunConfig`, and checks of values."""

import dataclasses
import enum
import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from spmdtrain.errors import LARGEST_INTEGER, UserError, did_you_mean
from spmdtrain.strategies import AXES

# -- Groups of options, each of which is one field of `RunConfig` ----------------------------------

ContextMethod = Literal["ring", "gather", "ulysses"]
ExpertExchange = Literal["all_to_all", "ragged_all_to_all"]


class OptionGroup:
    """Options that are one field of `RunConfig`. A group checks its own values."""

    PREFIX: ClassVar[str]
    """Stands before the names of its options, such as `mesh.`."""
    ABOVE_ZERO: ClassVar[Sequence[str]] = ()
    """Options that are None or above 0."""

    def __post_init__(self) -> None:
        if _groups_are_checked.get():
            self.check()

    def check(self) -> None:
        """Raises `UserError` for a field with the wrong type or an invalid value."""
        check_values(self, type(self), self.PREFIX)
        check_above_zero(self, self.ABOVE_ZERO, self.PREFIX)


@dataclass(frozen=True, kw_only=True)
class MeshSpec(OptionGroup):
    """Sizes of the mesh axes, and the devices of the mesh."""

    PREFIX = "mesh."
    replica: int | None = None
    """Number of device groups along the slow outer axis, which splits the batch. -1 makes one group
    for each host or slice, or two groups if there is only one host. None means 1, or -1 with
    hybrid."""
    data: int | None = None
    """Number of devices along the axis that splits the batch; -1 takes the remaining devices. None
    means the remaining devices, unless another axis takes them."""
    fsdp: int | None = None
    """Number of devices along the axis that splits the batch and can shard the state; -1 takes the
    remaining devices. None means 1, or the remaining devices with fully_sharded (at most
    sharding.max_shards)."""
    expert: int | None = None
    """Number of devices along the axis that splits the batch and the experts of each layer; -1
    takes the remaining devices. None means 1."""
    context: int | None = None
    """Number of devices along the axis that splits the tokens of each sequence; -1 takes the
    remaining devices. None means 1."""
    tensor: int | None = None
    """Number of devices along the axis that can shard single tensors; -1 takes the remaining
    devices. None means 1, or 2 with tensor_parallel."""
    devices: tuple[str | int, ...] = ()
    """Devices to use, by index (0 3) or by name (gpu:0 gpu:1). Empty means all devices."""

    def given(self) -> dict[str, int | None]:
        """Returns the size of each axis, in mesh order; None if the strategy chooses it."""
        return {axis: getattr(self, axis) for axis in AXES}

    def check(self) -> None:
        """Checks the values of the group.

        Raises:
          UserError: If a field has the wrong type, or a size is neither -1 nor at least 1.
        """
        super().check()
        for axis, size in self.given().items():
            if size is not None and size < 1 and size != -1:
                raise UserError(
                    f"mesh.{axis} is {size}: it must be 1 or more, or -1 for the remaining devices"
                )


@dataclass(frozen=True, kw_only=True)
class ContextOptions(OptionGroup):
    """Attention over tokens that are split over mesh.context."""

    PREFIX = "context."
    method: ContextMethod | None = None
    """ring: keys and values go around the devices, while products with those of the device before
    are computed. gather: each device gathers the keys and values of all tokens. ulysses: each
    device gathers all tokens of some of the heads. None means the method that is expected to be
    the fastest, by the sizes and the peak rates of the devices."""


@dataclass(frozen=True, kw_only=True)
class ExpertOptions(OptionGroup):
    """Exchange of tokens between the devices of mesh.expert."""

    PREFIX = "expert."
    exchange: ExpertExchange = "all_to_all"
    """all_to_all: each device sends a buffer of fixed size to each other one. ragged_all_to_all: it
    sends the rows in use alone, which XLA does not support on CPU."""
    capacity_factor: float = 2.0
    """Size of the buffers, relative to an even load of the experts: at least 1. If the tokens of a
    layer do not fit, its devices gather all tokens instead, which is slower and equally exact."""

    def check(self) -> None:
        """Raises `UserError` for a field with the wrong type, or too small a capacity."""
        super().check()
        if not 1 <= self.capacity_factor < math.inf:
            raise UserError(
                f"expert.capacity_factor is {self.capacity_factor}: it must be at least 1, which "
                "is room for an even load of the experts"
            )


@dataclass(frozen=True, kw_only=True)
class ShardingOptions(OptionGroup):
    """Limits and choices for sharding the state."""

    PREFIX, ABOVE_ZERO = "sharding.", ("min_size", "max_shards", "replicated_limit")
    min_size: int = 2**14
    """Smallest array, in elements, that a strategy shards by itself; an experiment's rules also
    shard smaller ones. Gathering a smaller array would cost more than sharding saves."""
    max_shards: int | None = None
    """Largest number of shards of the state along fsdp; the other devices go along data. None: the
    strategy's limit of 64, or none if the mesh gives fsdp or data."""
    replicated_limit: int = 2**20
    """Largest array, in bytes, that a strategy which shards the state may replicate on every device
    without a rule that says so."""
    offload: Literal["state", "optimizer"] | None = None
    """Part of the state that central_storage keeps in host memory: parameters, optimizer state and
    moving average (state), or only the optimizer state (optimizer). None means state."""


@dataclass(frozen=True, kw_only=True)
class ParameterServerOptions(OptionGroup):
    """Partitioning of the state over parameter servers, and staleness of the workers."""

    PREFIX = "servers."
    ABOVE_ZERO = ("min_shard_bytes", "max_shard_bytes", "max_shards", "backup_task_timeout")
    partitioner: Literal["min_size", "max_size", "fixed_shards"] = "min_size"
    """Rule for the number of shards of a parameter: its size divided by min_shard_bytes, rounded
    up; as few as keep each within max_shard_bytes; or max_shards. A shard has at least one row."""
    min_shard_bytes: int = 256 * 1024
    """Size in bytes by which min_size divides a parameter. The number of shards is rounded up, so
    that the shards of a parameter slightly above this size have half of it."""
    max_shard_bytes: int = 4 * 1024 * 1024
    """Largest size of a shard with max_size, in bytes. A shard consists of whole rows."""
    max_shards: int | None = None
    """Largest number of shards of a parameter. None means the number of servers, or
    no limit with max_size."""
    max_staleness: int | None = None
    """Largest number of updates that may be applied between a worker's read of the parameters and
    its own update. None means no limit; with 0 the result is that of mirrored."""
    backup_task_timeout: float | None = None
    """Seconds without a result after which a batch is also assigned to an idle worker. None
    means three times the usual duration of a batch, and at least one second."""

    def check(self) -> None:
        """Checks the values of the group.

        Raises:
          UserError: If a field has the wrong type or range, or two fields exclude each other.
        """
        super().check()
        if self.max_staleness is not None and self.max_staleness < 0:
            raise UserError(f"servers.max_staleness is {self.max_staleness}: it must be 0 or more")
        for name, partitioner in (("min_shard_bytes", "min_size"), ("max_shard_bytes", "max_size")):
            if name in not_default(self) and self.partitioner != partitioner:
                raise UserError(
                    f"servers.{name} is for {partitioner}, but servers.partitioner is "
                    f"{self.partitioner}"
                )


@dataclass(frozen=True, kw_only=True)
class CollectiveOptions(OptionGroup):
    """Communication between devices. An option that the backend does not support is an error."""

    PREFIX, ABOVE_ZERO = "collectives.", ("combine_threshold_bytes", "timeout")
    reduction: (
        Literal[
            "automatic", "all_reduce", "flattened", "hierarchical", "one_device", "reduce_scatter"
        ]
        | None
    ) = None
    """Gradient reduction. automatic: XLA inserts the collectives. With the others each device
    computes its own gradients, which are reduced once: array by array (all_reduce), concatenated
    into one array (flattened), first within the groups of the replica axis (hierarchical), on one
    device that broadcasts the sums (one_device), or so that each device gets its own part of the
    sums (reduce_scatter, for zero and fully_sharded). Default, if it gives the same result:
    flattened on CPU, reduce_scatter on TPU if the strategy splits gradients; else automatic."""
    reduce_dtype: Literal["bfloat16", "float16"] | None = None
    """Dtype in which gradients are reduced, by all_reduce unless reduction names another one, or by
    reduce_scatter if the strategy splits gradients. None means their own. On CPU, bfloat16 is an
    error."""
    combine_threshold_bytes: int | None = None
    """Arrays are combined into one collective up to this total size in bytes."""
    cpu_implementation: Literal["gloo", "mpi"] | None = None
    """Library for collectives between CPU processes. None means gloo."""
    timeout: float | None = None
    """Seconds, rounded up to whole ones, that a collective of CPU devices may take before the
    process ends."""


# -- Checks of the values of option groups: types, integers, ranges --------------------------------

_groups_are_checked: ContextVar[bool] = ContextVar("groups_are_checked", default=True)
"""Whether an option group checks its values when it is constructed."""
_type_hints = functools.cache(get_type_hints)


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


# -- Options of the evaluator, which the help needs ------------------------------------------------


class Which(enum.StrEnum):
    """The checkpoints to evaluate."""

    EACH = "each"
    """All of them, the oldest first."""
    NEWEST = "newest"
    """The newest at each time, and so the last one; older ones are skipped."""

"""The properties of options beside their fields, groups of options, and checks of values."""

import ast
import dataclasses
import enum
import functools
import inspect
import io
import json
import math
import textwrap
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from spmdtrain.errors import LARGEST_INTEGER, UserError, did_you_mean
from spmdtrain.strategies import AXES

# -- The properties of an option, beside its field -------------------------------------------------

ContextMethod = Literal["ring", "gather", "ulysses"]
ExpertExchange = Literal["all_to_all", "ragged_all_to_all"]


class Group(enum.StrEnum):
    """The headings of the help, in its order."""

    LENGTH = "Run length and batch"
    OPTIMIZATION = "Optimization"
    DATA = "Data"
    PLACEMENT = "Placement"
    NUMERICS = "Numerics and compilation"
    EVALUATION = "Evaluation"
    CHECKPOINTS = "Checkpoints"
    HARDWARE = "Faulty hardware"
    LOGGING = "Logging"
    PROCESSES = "Several processes"


class OnResume(enum.Enum):
    """The reaction of a resume to another value than in the run of the checkpoint."""

    REFUSED = "refused"
    PRINTED = "printed"
    FREE = "free"
    """It is not compared."""


@dataclass(frozen=True, kw_only=True)
class Range:
    """The numbers that an option may have.

    Attributes:
      text: Follows "it must be" in messages.
      also: A further condition.
    """

    text: str
    at_least: float | None = None
    above: float | None = None
    below: float | None = None
    also: Callable[[Any], bool] = lambda value: True

    def __contains__(self, value: Any) -> bool:
        return (
            math.isfinite(value)
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
            and self.also(value)
        )


ABOVE_ZERO = Range(text="above 0", above=0)
NOT_NEGATIVE = Range(text="0 or more", at_least=0)
FINITE = Range(text="a finite number, 0 or more", at_least=0)
STEP_IS_YOURS = "the step is a function that you write"
"""The reason why a `Loop` refuses an option of the Trainer's own step."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """The properties of an option besides its type and default.

    Attributes:
      group: The heading of the help; None for the first one. The fields of an option group have the
        heading of the group.
      usual: Whether `--help` shows it, not only `--help-all`.
      range: The numbers that it may have; None without a limit.
      check: Raises `UserError` for a wrong value, after the checks of type and range.
      neutral: Values that mean the same as the default.
      on_resume: What a resume does if it has another value.
      in_loops: The reason why a `Loop` refuses it; "" if it does not.
      in_measurements: Whether `plan --measure` uses it. If not, it has the default there.
    """

    group: Group | None = None
    usual: bool = False
    range: Range | None = None
    check: Callable[[Any], None] | None = None
    neutral: tuple[Any, ...] = ()
    on_resume: OnResume = OnResume.PRINTED
    in_loops: str = ""
    in_measurements: bool = True


_OPTION = "option"  # the key in the metadata of a field
_PLAIN = Option()


def option_field(default: Any, group: Group | None = None, **properties: Any) -> Any:
    """Returns the field of an option; `properties` are attributes of `Option`."""
    metadata = {_OPTION: Option(group=group, **properties)}
    if isinstance(default, dict):  # each object has its own
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Returns the default of a field; `dataclasses.MISSING` if it is required."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def option_rows(of: type, prefix: str = "", group: Group | None = None) -> dict[str, "OptionRow"]:
    """Returns the options of a dataclass by name; those of a group of options have a dot."""
    rows: dict[str, OptionRow] = {}
    for each in dataclasses.fields(of):
        properties: Option = each.metadata.get(_OPTION, _PLAIN)
        of_group = properties.group or group
        default = default_of(each)
        if isinstance(default, OptionGroup):
            rows |= option_rows(type(default), default.PREFIX, of_group)
        else:
            name = prefix + each.name
            rows[name] = OptionRow(dataclasses.replace(properties, group=of_group), default)
    return rows


@dataclass(frozen=True)
class OptionRow:
    """The properties of an option, and its default (`dataclasses.MISSING` if it is required)."""

    option: Option
    default: Any

    def is_given(self, value: Any) -> bool:
        """Returns whether a value means something else than the default."""
        value = tuple(value) if isinstance(value, list) else value
        return value != self.default and value not in self.option.neutral


# -- Docstrings of fields --------------------------------------------------------------------------


def field_docs(of: type) -> dict[str, str]:
    """Returns the docstrings of the fields of a dataclass and its bases by name.

    A docstring is a string after the field, or a comment in the same line or in the lines above it.
    """
    docs: dict[str, str] = {}
    for each in filter(dataclasses.is_dataclass, reversed(of.__mro__)):
        try:
            source = textwrap.dedent(inspect.getsource(each))
            (tree,) = ast.parse(source).body
        except (OSError, TypeError, SyntaxError):  # it was made without a file
            continue
        assert isinstance(tree, ast.ClassDef)
        comments: dict[int, tuple[str, bool]] = {}  # by line: the text, and whether it is all of it
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                text = token.string.lstrip("# ")
                comments[token.start[0]] = text, token.line.lstrip().startswith("#")
        for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
            if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
                continue
            text = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = str(after.value.value)
            elif node.end_lineno in comments:
                text = comments[node.end_lineno][0]
            else:
                line = node.lineno - 1
                while line in comments and comments[line][1]:
                    text, line = f"{comments[line][0]} {text}", line - 1
            # A field that only changes the default keeps the inherited docstring.
            if text:
                docs[node.target.id] = " ".join(text.split())
    return docs


@dataclass(frozen=True)
class FieldDocs:
    """The docstring of a dataclass, to which its fields are added when it is read.

    `help` and notebooks show it. It is not complete before, because it needs the source of the
    class.
    """

    text: Any

    def __get__(self, instance: Any, owner: type) -> str:
        docs = field_docs(owner)
        lines = [inspect.cleandoc(self.text), "", "Attributes:"]
        for field in dataclasses.fields(owner):
            default = default_of(field)
            if isinstance(default, OptionGroup):
                kind = type(default).__name__
                text = f"{field.name} ({kind}): see {kind}."
            else:
                kind = inspect.formatannotation(field.type)
                text = f"{field.name} ({kind}, default {default!r}): {docs.get(field.name, '')}"
            lines += textwrap.wrap(
                text, 88, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
            )
        return "\n".join(lines)


# -- Groups of options, each of which is one field of `RunConfig` ----------------------------------


class OptionGroup:
    """Options that are one field of `RunConfig`. A group checks its own values."""

    PREFIX: ClassVar[str]
    """Stands before the names of its options, such as `mesh.`."""

    def __post_init__(self) -> None:
        if _groups_are_checked.get():
            self.check()

    def check(self) -> None:
        """Raises `UserError` for a field with the wrong type or an invalid value."""
        check_values(self, type(self), self.PREFIX)


_SIZE = Range(
    text="1 or more, or -1 for the remaining devices",
    at_least=-1,
    also=lambda size: size != 0,
)
_CAPACITY = Range(text="at least 1, which is room for an even load of the experts", at_least=1)
_REDUCED = "per_replica(...) returns gradients, which you reduce"


def _check_devices(devices: Sequence[Any]) -> None:
    for device in devices:
        if isinstance(device, bool) or not isinstance(device, (str, Integral)):
            raise UserError(
                f"mesh.devices has {device!r}: give the index of a device, such as 0, or its name, "
                "such as 'gpu:0'"
            )


@dataclass(frozen=True, kw_only=True)
class MeshSpec(OptionGroup):
    """Sizes of the mesh axes, and the devices of the mesh."""

    PREFIX = "mesh."
    replica: int | None = option_field(None, range=_SIZE)
    """Number of device groups along the slow outer axis, which splits the batch. -1 makes one group
    for each host or slice, or two groups if there is only one host. None means 1, or -1 with
    hybrid."""
    data: int | None = option_field(None, usual=True, range=_SIZE)
    """Number of devices along the axis that splits the batch; -1 takes the remaining devices. None
    means the remaining devices, unless another axis takes them."""
    fsdp: int | None = option_field(None, usual=True, range=_SIZE)
    """Number of devices along the axis that splits the batch and can shard the state; -1 takes the
    remaining devices. None means 1, or the remaining devices with fully_sharded (at most
    sharding.max_shards)."""
    expert: int | None = option_field(None, range=_SIZE, neutral=(1,))
    """Number of devices along the axis that splits the batch and the experts of each layer; -1
    takes the remaining devices. None means 1."""
    context: int | None = option_field(None, range=_SIZE, neutral=(1,))
    """Number of devices along the axis that splits the tokens of each sequence; -1 takes the
    remaining devices. None means 1."""
    tensor: int | None = option_field(None, usual=True, range=_SIZE)
    """Number of devices along the axis that can shard single tensors; -1 takes the remaining
    devices. None means 1, or 2 with tensor_parallel."""
    devices: tuple[str | int, ...] = option_field((), check=_check_devices)
    """Devices to use, by index (0 3) or by name (gpu:0 gpu:1). Empty means all devices."""

    def given(self) -> dict[str, int | None]:
        """Returns the size of each axis, in mesh order; None if the strategy chooses it."""
        return {axis: getattr(self, axis) for axis in AXES}


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
    capacity_factor: float = option_field(2.0, range=_CAPACITY)
    """Size of the buffers, relative to an even load of the experts: at least 1. If the tokens of a
    layer do not fit, its devices gather all tokens instead, which is slower and equally exact."""


@dataclass(frozen=True, kw_only=True)
class ShardingOptions(OptionGroup):
    """Limits and choices for sharding the state."""

    PREFIX = "sharding."
    min_size: int = option_field(2**14, range=ABOVE_ZERO)
    """Smallest array, in elements, that a strategy shards by itself; an experiment's rules also
    shard smaller ones. Gathering a smaller array would cost more than sharding saves."""
    max_shards: int | None = option_field(None, range=ABOVE_ZERO)
    """Largest number of shards of the state along fsdp; the other devices go along data. None: the
    strategy's limit of 64, or none if the mesh gives fsdp or data."""
    replicated_limit: int = option_field(2**20, range=ABOVE_ZERO)
    """Largest array, in bytes, that a strategy which shards the state may replicate on every device
    without a rule that says so."""
    offload: Literal["state", "optimizer"] | None = None
    """Part of the state that central_storage keeps in host memory: parameters, optimizer state and
    moving average (state), or only the optimizer state (optimizer). None means state."""


@dataclass(frozen=True, kw_only=True)
class ParameterServerOptions(OptionGroup):
    """Partitioning of the state over parameter servers, and staleness of the workers."""

    PREFIX = "servers."
    partitioner: Literal["min_size", "max_size", "fixed_shards"] = "min_size"
    """Rule for the number of shards of a parameter: its size divided by min_shard_bytes, rounded
    up; as few as keep each within max_shard_bytes; or max_shards. A shard has at least one row."""
    min_shard_bytes: int = option_field(256 * 1024, range=ABOVE_ZERO)
    """Size in bytes by which min_size divides a parameter. The number of shards is rounded up, so
    that the shards of a parameter slightly above this size have half of it."""
    max_shard_bytes: int = option_field(4 * 1024 * 1024, range=ABOVE_ZERO)
    """Largest size of a shard with max_size, in bytes. A shard consists of whole rows."""
    max_shards: int | None = option_field(None, range=ABOVE_ZERO)
    """Largest number of shards of a parameter. None means the number of servers, or
    no limit with max_size."""
    max_staleness: int | None = option_field(None, range=NOT_NEGATIVE)
    """Largest number of updates that may be applied between a worker's read of the parameters and
    its own update. None means no limit; with 0 the result is that of mirrored."""
    backup_task_timeout: float | None = option_field(None, range=ABOVE_ZERO)
    """Seconds without a result after which a batch is also assigned to an idle worker. None
    means three times the usual duration of a batch, and at least one second."""


@dataclass(frozen=True, kw_only=True)
class CollectiveOptions(OptionGroup):
    """Communication between devices. An option that the backend does not support is an error."""

    PREFIX = "collectives."
    reduction: (
        Literal[
            "automatic", "all_reduce", "flattened", "hierarchical", "one_device", "reduce_scatter"
        ]
        | None
    ) = option_field(None, neutral=("automatic",), in_loops=_REDUCED)
    """Gradient reduction. automatic: XLA inserts the collectives. With the others each device
    computes its own gradients, which are reduced once: array by array (all_reduce), concatenated
    into one array (flattened), first within the groups of the replica axis (hierarchical), on one
    device that broadcasts the sums (one_device), or so that each device gets its own part of the
    sums (reduce_scatter, for zero and fully_sharded). Default, if it gives the same result:
    flattened on CPU, reduce_scatter on TPU if the strategy splits gradients; else automatic."""
    reduce_dtype: Literal["bfloat16", "float16"] | None = option_field(None, in_loops=_REDUCED)
    """Dtype in which gradients are reduced, by all_reduce unless reduction names another one, or by
    reduce_scatter if the strategy splits gradients. None means their own. On CPU, bfloat16 is an
    error."""
    combine_threshold_bytes: int | None = option_field(None, range=ABOVE_ZERO)
    """Arrays are combined into one collective up to this total size in bytes."""
    cpu_implementation: Literal["gloo", "mpi"] | None = None
    """Library for collectives between CPU processes. None means gloo."""
    timeout: float | None = option_field(None, range=ABOVE_ZERO)
    """Seconds, rounded up to whole ones, that a collective of CPU devices may take before the
    process ends."""


for _group in OptionGroup.__subclasses__():
    _group.__doc__ = FieldDocs(_group.__doc__)  # type: ignore[assignment]

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
    """Checks the fields of a dataclass: types, the size of integers, and what their rows say.

    The command line converts its options; Python does not.

    Args:
      values: An instance of the dataclass, or of a subclass. Of fields that the subclass adds, only
        the size of integers is checked.
      fields: The dataclass.
      prefix: Stands before the names of the fields in messages, such as `mesh.`.

    Raises:
      UserError: If a field has the wrong type or a value that is not allowed, or an integer is too
        large for a manifest.
    """
    for field_name, hint in _type_hints(fields).items():
        _check_type(f"{prefix}{field_name}", getattr(values, field_name), hint)
    for field in dataclasses.fields(values):
        # A field that the subclass computes itself has no value yet.
        _check_integers(f"{prefix}{field.name}", getattr(values, field.name, None))
    for field in dataclasses.fields(fields):
        row, value = field.metadata.get(_OPTION, _PLAIN), getattr(values, field.name)
        is_number = value is not None and not isinstance(value, str)  # "auto" is none
        if row.range is not None and is_number and value not in row.range:
            raise UserError(f"{prefix}{field.name} is {value}: it must be {row.range.text}")
        if row.check is not None and value not in (field.default, {}):
            row.check(value)


def _check_type(name: str, value: Any, hint: Any) -> None:
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if value is None and NoneType in kinds:
        return
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    if words and int in kinds:  # a number, or a word in place of it
        if value not in words and (isinstance(value, bool) or not isinstance(value, Integral)):
            raise UserError(f"{name} is {value!r}: it must be a whole number, or {words[0]!r}")
        return
    for kind in kinds:
        is_class = isinstance(kind, type) and dataclasses.is_dataclass(kind)
        if is_class and not isinstance(value, kind):
            raise UserError(f"{name} is {value!r}: it must be a {kind.__name__}")
        if get_origin(kind) is Literal and value not in get_args(kind):
            choices = [str(choice) for choice in get_args(kind)]
            raise UserError(f"{name} is {value!r}.{did_you_mean(str(value), choices)}")
        if kind is bool and not isinstance(value, bool):
            raise UserError(f"{name} is {value!r}: it must be True or False")
        if kind is int and (isinstance(value, bool) or not isinstance(value, Integral)):
            raise UserError(f"{name} is {value!r}: it must be a whole number")
        if kind is float and (isinstance(value, bool) or not isinstance(value, Real)):
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


# -- The JSON schema of options --------------------------------------------------------------------

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}


def schema_of(
    of: type, defaults: Mapping[str, Any], known: Mapping[str, OptionRow]
) -> dict[str, Any]:
    """Returns the JSON schema of a dataclass: types, choices, ranges, defaults and docstrings.

    A field whose type has no equal in JSON, such as a function, has a schema without a type.

    Args:
      defaults: The default values, as JSON values.
      known: The properties of options by name.
    """
    return {"$schema": _DRAFT, "title": of.__name__} | _object(of, defaults, known, "")


def _object(
    of: type, defaults: Mapping[str, Any], known: Mapping[str, OptionRow], prefix: str
) -> dict[str, Any]:
    docs, hints = field_docs(of), get_type_hints(of)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(of)}
    properties = {}
    for name, hint in fields.items():
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            inner = hint.PREFIX if issubclass(hint, OptionGroup) else f"{prefix}{name}."
            properties[name] = _object(hint, defaults[name], known, inner)
        else:
            row = known.get(prefix + name)
            limits = _limits(row.option.range) if row is not None and row.option.range else {}
            properties[name] = _type_schema(hint, limits) | _default_schema(hint, defaults[name])
        if docs.get(name):
            properties[name]["description"] = docs[name]
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _default_schema(hint: Any, default: Any) -> dict[str, Any]:
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {"default": str(default).rpartition(".")[2]}
    try:
        json.dumps(default, allow_nan=False)
    except ValueError:  # NaN and infinity are no JSON
        return {}
    return {"default": default}


def _limits(of: Range) -> dict[str, Any]:
    limits = {"minimum": of.at_least, "exclusiveMinimum": of.above, "exclusiveMaximum": of.below}
    return {name: limit for name, limit in limits.items() if limit is not None}


def _type_schema(hint: Any, limits: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema of a type; `limits` are those of its numbers."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return {"anyOf": [_type_schema(each, limits) for each in arguments]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if isinstance(hint, type) and issubclass(hint, enum.StrEnum):
        return {"enum": [each.value for each in hint]}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {"enum": [each.name for each in hint]}
    if hint is NoneType:
        return {"type": "null"}
    if hint in _JSON_TYPES:
        return {"type": _JSON_TYPES[hint], **(limits if hint in (int, float) else {})}
    if origin in (tuple, list):
        kinds = [each for each in arguments if each is not ...]
        return {
            "type": "array",
            "items": _type_schema(kinds[0], limits) if len(set(kinds)) == 1 else {},
        }
    if origin is dict:
        return {"type": "object", "additionalProperties": _type_schema(arguments[1], limits)}
    return {}


# -- Options of the evaluator, which the help needs ------------------------------------------------


class Which(enum.StrEnum):
    """The checkpoints to evaluate."""

    EACH = "each"
    """All of them, the oldest first."""
    NEWEST = "newest"
    """The newest at each time, and so the last one; older ones are skipped."""

"""Refused pairs of options: rows of one table, and questions to them."""

import enum
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from spmdtrain.config.options import (
    ExpertOptions,
    MeshSpec,
    OptionRow,
    ParameterServerOptions,
    option_rows,
)
from spmdtrain.errors import UserError
from spmdtrain.strategies import ASYNCHRONOUS, STRATEGIES, Strategy, strategy

# -- The rows --------------------------------------------------------------------------------------


LEAVE_OUT = "leave one of the two out"
_SO_BITS = "so the bits would depend on the number of devices"
_REPLICATING = "use mirrored, zero, fully_sharded or hybrid"


class Kind(enum.Enum):
    """The relation of two options, as the template of its message."""

    EXCLUDES = "{option} is {value} and {other} is {other_value}: {why}"
    SAME = "{option} is {value} and {other} is {other_value}: give one of the two"
    """They say the same: on the command line, one that is given replaces the other's default."""
    NEEDS = "{option} is {value}, and {other} is not given: {why}"
    UNDER = "{option} is {value}, but under {other_value} {because}: leave it out"
    """The strategy does not use the option."""
    ONLY_FOR = "{option} is for {because}, but {the_other} is {other_value}"


class Moment(enum.Enum):
    """The time at which a row is checked."""

    CONSTRUCTED = enum.auto()
    """The construction of a configuration."""
    RESOLVED = enum.auto()
    """The resolution for the devices of a run. Until then, options may be replaced."""
    FIT = enum.auto()
    """The start of a training."""
    ASKED = enum.auto()
    """A call of `conflict`: the two options alone do not decide."""


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """A refused pair of options.

    Attributes:
      option: The option that is given (see `OptionRow.is_given`).
      other: The option that it excludes or needs.
      values: The values of `option` to which the row applies; empty for all.
      refused: The values of `other` that are refused; empty for every given one.
      allowed: The only values of `other` that are not refused, in place of `refused`.
      strategies: Returns whether a strategy is refused, if `other` is the option `strategy`.
      because: The reason. Kind.SAME has none.
      instead: The remedy. Only Kind.EXCLUDES and Kind.NEEDS have one.
    """

    option: str
    other: str
    kind: Kind = Kind.EXCLUDES
    values: tuple[Any, ...] = ()
    refused: tuple[Any, ...] = ()
    allowed: tuple[Any, ...] = ()
    strategies: Callable[[Strategy], bool] | None = None
    because: str = ""
    instead: str = LEAVE_OUT
    moment: Moment = Moment.CONSTRUCTED

    def applies(self, config: Any, rows: Mapping[str, OptionRow]) -> bool:
        """Returns whether a configuration has the refused pair."""
        value = operator.attrgetter(self.option)(config)
        if not rows[self.option].is_given(value) or (self.values and value not in self.values):
            return False
        other = operator.attrgetter(self.other)(config)
        if self.strategies is not None:
            return self.strategies(strategy(other))
        if self.refused or self.allowed:
            return other in self.refused if self.refused else other not in self.allowed
        return rows[self.other].is_given(other) != (self.kind is Kind.NEEDS)

    def text(self, config: Any) -> str:
        """Returns the message for a configuration."""
        value, other = (operator.attrgetter(name)(config) for name in (self.option, self.other))
        return self.kind.value.format(
            option=self.option,
            value=_shown(value),
            other=self.other,
            other_value=_shown(other),
            the_other="the strategy" if self.other == "strategy" else self.other,
            because=self.because,
            why="; ".join(filter(None, (self.because, self.instead))),
        )


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


CONFLICTS: tuple[Conflict, ...] = (
    Conflict(option="epochs", other="steps", kind=Kind.SAME),
    Conflict(option="global_batch_size", other="batch_size_per_device", kind=Kind.SAME),
    # -- options without effect or meaning beside others
    Conflict(
        option="mesh.context",
        other="jit",
        because="only a compiled step shows whether the model's attention uses the axis",
    ),
    Conflict(
        option="mesh.expert", other="jit", because="experts are split in compiled steps alone"
    ),
    Conflict(
        option="context.method",
        other="mesh.context",
        kind=Kind.NEEDS,
        instead="give the number of devices that split the tokens, or leave context.method out",
    ),
    *(
        Conflict(
            option=name,
            other="mesh.expert",
            kind=Kind.NEEDS,
            instead="give the number of devices that split the experts, or leave the options of "
            "expert out",
        )
        for name in option_rows(ExpertOptions, ExpertOptions.PREFIX)
    ),
    Conflict(option="init_from_strict", other="init_from", kind=Kind.NEEDS, instead="give both"),
    Conflict(
        option="eval_at_checkpoints",
        other="evaluated_by",
        because="an evaluator evaluates each checkpoint anyway",
        instead="leave eval_at_checkpoints out",
    ),
    Conflict(
        option="data_workers",
        other="data_on_device",
        because="the devices hold all examples, so processes have nothing to read",
    ),
    Conflict(
        option="steps_per_dispatch",
        other="jit",
        because="several steps per dispatch are one compiled program",
    ),
    Conflict(
        option="collectives.combine_threshold_bytes",
        other="jit",
        because="the threshold has an effect on compiled steps alone",
    ),
    Conflict(
        option="learning_rate_table",
        other="learning_rate_scaling",
        instead="give one of the two",
        moment=Moment.RESOLVED,
    ),
    *(
        Conflict(
            option="learning_rate_scaling",
            other=name,
            kind=Kind.NEEDS,
            instead="give learning_rate, and learning_rate_base_batch_size, the batch size for "
            "which that rate was chosen",
            moment=Moment.RESOLVED,
        )
        for name in ("learning_rate", "learning_rate_base_batch_size")
    ),
    # -- faulty devices
    Conflict(
        option="sentinel_action", other="sentinel_every", kind=Kind.NEEDS, instead="give both"
    ),
    Conflict(
        option="sentinel_every",
        other="jit",
        because="the sentinel compares runs of one compiled program",
    ),
    Conflict(
        option="sentinel_every",
        other="strategy",
        strategies=lambda of: of.is_asynchronous or of.needs_rules or of.devices == 1,
        because="the sentinel needs devices that each compute whole examples of their own",
        instead="use mirrored, zero, fully_sharded, central_storage or hybrid",
    ),
    # -- watched layers
    Conflict(option="watch_every", other="watch", kind=Kind.NEEDS, instead="give both"),
    Conflict(
        option="watch",
        other="jit",
        because="a compiled program of its own watches the layers",
        instead="look at their values in a debugger",
    ),
    Conflict(
        option="batch_statistics",
        other="watch",
        because="each replica normalizes by its own examples, and the layers are watched with all "
        "examples of the batch",
    ),
    # -- steps that diverge
    Conflict(
        option="divergence_window", other="divergence_sigma", kind=Kind.NEEDS, instead="give both"
    ),
    Conflict(
        option="max_rewinds",
        other="on_divergence",
        kind=Kind.NEEDS,
        instead="give on_divergence rewind, too",
    ),
    Conflict(
        option="max_rewinds",
        other="on_divergence",
        refused=("skip",),
        because="a run that leaves updates out does not go back",
    ),
    Conflict(
        option="on_divergence",
        other="strategy",
        values=("skip", "rewind"),
        strategies=lambda of: of.is_asynchronous,
        because="workers push gradients of later batches before the loss of a step is read",
        instead="use stop",
    ),
    # -- placement
    *(
        Conflict(
            option=name,
            other="strategy",
            strategies=lambda of: not of.has_mesh,
            because="that strategy has no mesh",
            instead="leave the options of the mesh out, or choose the device with strategy "
            "one_device and mesh.devices",
        )
        for name in option_rows(MeshSpec, MeshSpec.PREFIX)
    ),
    *(
        Conflict(
            option=f"collectives.{name}",
            other="strategy",
            strategies=lambda of: not of.has_mesh,
            because="that strategy has no mesh to reduce over",
        )
        for name in ("reduction", "reduce_dtype")
    ),
    Conflict(
        option="collectives.reduction",
        values=("reduce_scatter",),
        other="strategy",
        strategies=lambda of: of.has_mesh and not (of.shards_params or of.shards_optimizer),
        because="reduce_scatter is for the strategies that split gradients (zero, fully_sharded)",
        instead="use all_reduce",
        moment=Moment.ASKED,  # when the functions are made: a class may have it as a default
    ),
    Conflict(
        option="sharding.max_shards",
        other="strategy",
        kind=Kind.ONLY_FOR,
        strategies=lambda of: not of.shards_params,
        because="fully_sharded",
    ),
    Conflict(
        option="sharding.max_shards",
        other="mesh.fsdp",
        allowed=(None, -1),
        instead="give one of the two",
    ),
    Conflict(
        option="sharding.offload",
        other="strategy",
        kind=Kind.ONLY_FOR,
        strategies=lambda of: not of.on_host,
        because="central_storage",
    ),
    Conflict(
        option="batch_statistics",
        other="collectives.reduction",
        refused=("automatic",),
        because="the first reduces gradients under shard_map, and the second leaves them to XLA",
        moment=Moment.ASKED,  # on several devices, without a reduction function
    ),
    # -- parameter servers
    *(
        Conflict(
            option=name,
            other="strategy",
            kind=Kind.ONLY_FOR,
            strategies=lambda of: not of.is_asynchronous,
            because=ASYNCHRONOUS,
        )
        for name in option_rows(ParameterServerOptions, ParameterServerOptions.PREFIX)
    ),
    *(
        Conflict(
            option=f"servers.{name}",
            other="servers.partitioner",
            kind=Kind.ONLY_FOR,
            allowed=(partitioner,),
            because=partitioner,
        )
        for name, partitioner in (("min_shard_bytes", "min_size"), ("max_shard_bytes", "max_size"))
    ),
    *(
        Conflict(
            option=name,
            other="strategy",
            kind=Kind.UNDER,
            strategies=lambda of: of.is_asynchronous,
            because=because,
        )
        for name, because in (
            ("mesh.expert", "each worker reads whole parameters from the servers"),
            ("mesh.context", "a worker's devices split its batch alone"),
            ("steps_per_dispatch", "a worker computes one step at a time"),
            ("data_on_device", "each worker reads the examples of the batches assigned to it"),
            ("data_workers", "each worker is a process that reads its own batches"),
            ("profile_steps", "the steps run in other processes"),
            ("watch", "the steps run in other processes"),
            ("log_hash_every", "the servers update the state in an order of their own"),
            ("skip_steps", "a worker reads the batch with the number of the step"),
            ("uneven_batch", "each worker computes whole batches on its own devices"),
            ("snapshot_every_steps", "the chief alone has the state, and only at boundaries"),
        )
    ),
    # -- the same bits on any number of devices
    *(
        Conflict(
            option="exact",
            other="strategy",
            strategies=strategies,
            because=because,
            instead=instead,
        )
        for strategies, because, instead in (
            (
                lambda of: of.is_asynchronous,
                f"the order of the workers' updates varies, {_SO_BITS}",
                LEAVE_OUT,
            ),
            (
                lambda of: not of.has_mesh,
                "that strategy has no mesh",
                "use one_device for one device",
            ),
            (
                lambda of: of.needs_rules,
                "that strategy splits matrix products, which adds up their parts in another order",
                _REPLICATING,
            ),
            (lambda of: of.on_host, "that strategy keeps state in host memory", _REPLICATING),
        )
    ),
    *(
        Conflict(option="exact", other=name, because=f"{because}, {_SO_BITS}")
        for name, because in (
            ("collectives.reduction", "the reduction adds up gradients in an order of its own"),
            ("collectives.reduce_dtype", "the reduction adds up gradients in an order of its own"),
            ("batch_statistics", "replicas are the devices"),
            ("uneven_batch", "padding depends on the devices"),
            ("jit", "operations that run one by one have other kernels"),
            ("steps_per_dispatch", "a loop is another program"),
        )
    ),
    # -- files, and the state that a run begins with
    Conflict(
        option="fork_from",
        other="init_from",
        because="a fork takes all of a run's state, init_from parameters alone",
        moment=Moment.ASKED,  # the base weights of a LoraModel come from init_from
    ),
    Conflict(
        option="checkpoint",
        other="init_from",
        kind=Kind.NEEDS,
        because="a run itself always resumes from its latest checkpoint",
        instead="give init_from, or leave checkpoint out",
        moment=Moment.FIT,
    ),
    *(
        Conflict(option=name, other="workdir", kind=Kind.NEEDS, instead=why, moment=Moment.FIT)
        for name, why in (
            ("eval_at_checkpoints", "give a folder for the checkpoints"),
            ("evaluated_by", "give the folder that the evaluator reads"),
            ("profile_steps", "give a folder for the trace"),
            ("memory_profile", "give a folder for the profile"),
            ("snapshot_every_steps", "give the folder in which a later start finds its run"),
        )
    ),
    *(
        Conflict(
            option=name,
            other="workdir",
            kind=Kind.NEEDS,
            values=(value,),
            instead="give a folder with checkpoints to go back to",
            moment=Moment.FIT,
        )
        for name, value in (("sentinel_action", "rollback"), ("on_divergence", "rewind"))
    ),
)
"""All refused pairs of options, in the order of the checks."""

EXCLUSIVE = tuple((row.option, row.other) for row in CONFLICTS if row.kind is Kind.SAME)
"""Pairs of options with the same meaning."""


# -- Questions to the rows -------------------------------------------------------------------------


def refuse_conflicts(config: Any, rows: Mapping[str, OptionRow], moment: Moment) -> None:
    """Raises `UserError` for the first refused pair that a configuration has at a moment."""
    for row in CONFLICTS:
        if row.moment is moment and row.applies(config, rows):
            raise UserError(row.text(config))


def conflict(option: str, other: str) -> Conflict:
    """Returns the row of two options for code that asks (see `Moment.ASKED`)."""
    asked = [row for row in CONFLICTS if row.moment is Moment.ASKED]
    return next(row for row in asked if (row.option, row.other) == (option, other))


def is_allowed(
    name: str, value: Any, given: Mapping[str, Any], rows: Mapping[str, OptionRow]
) -> bool:
    """Returns whether an option may have a value beside other options, given by name."""
    if not isinstance(given.get("strategy", ""), str):
        return False  # the configuration is refused
    defaults = {name: row.default for name, row in rows.items() if "." not in name}
    config = SimpleNamespace(**{**defaults, **given, name: value})
    asked = [row for row in CONFLICTS if name in (row.option, row.other)]
    return not any(row.applies(config, rows) for row in asked if "." not in row.option + row.other)


def strategies_of(row: Conflict) -> list[str]:
    """Returns the names of the strategies that a row refuses; none if it is about no strategy."""
    refused = row.strategies
    return [] if refused is None else [name for name, of in STRATEGIES.items() if refused(of)]

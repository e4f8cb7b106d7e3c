"""Sharding rules: a pattern for paths in the state, and the spec of the leaves that it matches."""

import enum
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from spmdtrain.errors import UserError
from spmdtrain.sharding.describe import axes_of_spec

REPLICATED = PartitionSpec()


class GatherPolicy(enum.Enum):
    """The point in a step at which a parameter that is split over a batch axis is gathered."""

    BEFORE_FORWARD = "at the start"
    """Before the model is called. XLA moves the all-gather to the first use."""
    PER_LAYER = "in the model"
    """By XLA inside the model: one layer at a time, for stacked layers in a loop."""


@dataclass(frozen=True)
class Rule:
    """A sharding rule for leaves of the state, of any model library (unlike Flax's metadata).

    If the strategy shards the state too, it splits one more dim, for which the spec has no axis,
    over its own axis. Only `PartitionSpec()` excludes this: such leaves are replicated.

    Attributes:
      pattern: A regular expression that may match anywhere in a leaf's path.
      spec: The spec of the leaves that it matches.
      gather: When a parameter that is split over a batch axis is gathered.

    Raises:
      UserError: If the pattern or the spec is not valid.
    """

    pattern: str
    spec: PartitionSpec
    gather: GatherPolicy = GatherPolicy.BEFORE_FORWARD

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise UserError(
                f"sharding rule {self.pattern!r} is not a regular expression: {error}"
            ) from error
        if not isinstance(self.spec, PartitionSpec) or PartitionSpec.UNCONSTRAINED in self.spec:
            raise UserError(
                f"sharding rule {self.pattern!r} has the spec {self.spec!r}: it must be a "
                "jax.sharding.PartitionSpec of axes and None"
            )
        entries = (e if isinstance(e, tuple) else (e,) for e in self.spec if e is not None)
        for axis in (axis for entry in entries for axis in entry):
            if not isinstance(axis, str):
                raise UserError(f"sharding rule {self.pattern!r} has the axis {axis!r}: give names")
        if not isinstance(self.gather, GatherPolicy):
            raise UserError(
                f"sharding rule {self.pattern!r} has gather={self.gather!r}: it must be "
                "GatherPolicy.BEFORE_FORWARD or GatherPolicy.PER_LAYER"
            )
        if len(set(axes := axes_of_spec(self.spec))) < len(axes):
            raise UserError(f"sharding rule {self.pattern!r} names an axis twice: {self.spec}")


def checked_rules(given: object) -> Sequence[Rule]:
    """Returns the sharding rules that a user has given; `UserError` if one is no `Rule`."""
    rules = tuple(given) if isinstance(given, Iterable) else ()
    if not isinstance(given, Iterable) or not all(isinstance(rule, Rule) for rule in rules):
        raise UserError(f"rules is {given!r}: give a list of Rule(pattern, spec)")
    return rules

"""The record of a low-rank adaptation in checkpoints, and the base weights that they leave out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from spmdtrain.weights.weight_map import WeightMap, WeightRule


class RuleRecord(TypedDict):
    """The fields of a `WeightRule`."""

    source: str
    target: str
    dims: str
    fill: float | None


@dataclass(frozen=True)
class LoraRecord:
    """The base model of a run that trains low-rank factors. Stored in its checkpoints as JSON."""

    alpha: float = 0.0
    """The scale of the factors; 0 in a run without factors."""
    source: str = ""
    """The file of weights, or the checkpoint of a run, with the frozen weights that checkpoints
    leave out; empty if checkpoints contain them."""
    rules: Sequence[RuleRecord] = ()
    """The rules by which arrays of the file become those of the model."""
    leaves: Mapping[str, str] = field(default_factory=dict)
    """Shape and dtype of the weights that are left out, by path in the state."""
    sums: Mapping[str, str] = field(default_factory=dict)
    """Checksums of the weights that are left out, by path in the state."""

    @property
    def weight_map(self) -> WeightMap:
        """`rules`, as the rules of a weight map."""
        return [WeightRule(**rule) for rule in self.rules]


def record_rules(weight_map: WeightMap) -> list[RuleRecord]:
    """Returns the rules of a map as in `LoraRecord.rules`."""
    return [
        RuleRecord(source=rule.source, target=rule.target, dims=rule.dims, fill=rule.fill)
        for rule in weight_map
    ]

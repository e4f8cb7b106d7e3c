"""Comparison of what two runs have recorded of the same steps."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from spmdtrain.checkpoints.items import ITEMS
from spmdtrain.checkpoints.read_arrays import check_saved_items, holds, read_host_array
from spmdtrain.replay.recorded_run import RecordedRun, RecordedStep, manifest_at

TOLERANCE = 1e-5
"""The relative difference of losses and gradients that is promised on any number of devices."""
_PROMISED = ("loss", "gradient_norm")


@dataclass(frozen=True)
class Pair:
    """A number that both runs have recorded."""

    first: float
    second: float

    @property
    def is_equal(self) -> bool:
        """Whether the numbers have the same bits; NaN equals NaN."""
        return self.first == self.second or (math.isnan(self.first) and math.isnan(self.second))

    @property
    def difference(self) -> float:
        """The difference relative to the larger number; 0 if both are 0."""
        if self.is_equal:
            return 0.0
        return abs(self.first - self.second) / max(abs(self.first), abs(self.second))


@dataclass(frozen=True)
class StepComparison:
    """A step of two runs.

    Attributes:
      step: The step.
      metrics: The metrics that both have recorded, by name.
      hashes: The hashes of the state; None if one of them is not known.
      arrays: Whether each array of the state is equal, by path; empty without hashes.
    """

    step: int
    metrics: Mapping[str, Pair]
    hashes: tuple[str, str] | None
    arrays: Mapping[str, bool]

    @property
    def is_comparable(self) -> bool:
        """Whether both runs have recorded something of the step."""
        return bool(self.metrics) or self.hashes is not None

    @property
    def is_equal(self) -> bool:
        """Whether all that both have recorded is equal, bit for bit."""
        same = self.hashes is None or self.hashes[0] == self.hashes[1]
        return same and all(pair.is_equal for pair in self.metrics.values())

    @property
    def promised(self) -> list[Pair]:
        """Loss and gradient norm, which are equal to `TOLERANCE` also under other conditions."""
        return [self.metrics[name] for name in _PROMISED if name in self.metrics]

    @property
    def is_within_tolerance(self) -> bool:
        """Whether loss and gradient norm are equal to `TOLERANCE`; False if neither is known."""
        return bool(self.promised) and all(x.difference <= TOLERANCE for x in self.promised)

    @property
    def different_arrays(self) -> list[str]:
        """The paths of the arrays that differ: parameters first, in the order of the state."""
        names = [name for name, is_equal in self.arrays.items() if not is_equal]
        return sorted(names, key=lambda name: not name.startswith("params/"))


def compare_step(step: int, first: RecordedStep, second: RecordedStep) -> StepComparison:
    """Returns the comparison of a step of two runs.

    Args:
      step: The step.
      first: What one run has recorded of it.
      second: What the other run has recorded.
    """
    names = [name for name in first.metrics if name in second.metrics]
    names.sort(key=lambda name: _PROMISED.index(name) if name in _PROMISED else len(_PROMISED))
    metrics = {name: Pair(first.metrics[name], second.metrics[name]) for name in names}
    if first.hash is None or second.hash is None:
        return StepComparison(step, metrics, None, {})
    paths = dict.fromkeys([*first.sums, *second.sums])
    arrays = {path: first.sums.get(path) == second.sums.get(path) for path in paths}
    return StepComparison(step, metrics, (first.hash, second.hash), arrays)


def compare_steps(
    first: RecordedRun, second: RecordedRun, steps: Iterable[int] | None = None
) -> list[StepComparison]:
    """Returns the comparisons of all steps of which two runs have recorded the same things.

    Args:
      first: A run.
      second: Another run.
      steps: The steps to compare; None for all.
    """
    both = first.steps.keys() & second.steps.keys()
    chosen = both if steps is None else both & set(steps)
    found = (compare_step(s, first.steps[s], second.steps[s]) for s in sorted(chosen))
    return [each for each in found if each.is_comparable]


@dataclass(frozen=True)
class ArrayDifference:
    """The difference of an array in two checkpoints: that of the elements which differ most.

    Attributes:
      absolute: The difference; NaN if an element is NaN in one of them alone.
      relative: It relative to the largest element of the first array.
      elements: Number of elements that differ.
      size: Number of elements.
    """

    absolute: float
    relative: float
    elements: int
    size: int


def difference_of(first: np.ndarray, second: np.ndarray) -> ArrayDifference:
    """Returns how far two arrays of one shape differ; integers and keys as numbers.

    Args:
      first: An array.
      second: Another one of the same shape and dtype.
    """
    kind = np.complex128 if jnp.issubdtype(first.dtype, np.complexfloating) else np.float64
    a, b = first.astype(kind), second.astype(kind)
    differs = (a != b) & ~(np.isnan(a) & np.isnan(b))
    largest = float(np.abs(np.where(differs, a - b, 0)).max(initial=0))
    scale = float(np.abs(a).max(initial=0))
    relative = largest / scale if scale else (math.inf if largest else 0.0)
    return ArrayDifference(largest, relative, int(differs.sum()), a.size)


def array_differences(
    first: RecordedRun, second: RecordedRun, step: int, names: Sequence[str]
) -> dict[str, ArrayDifference]:
    """Returns how far arrays differ, if both runs have a checkpoint of a step.

    The arrays are read one at a time.

    Args:
      first: A run.
      second: Another run.
      step: The step.
      names: The paths of the arrays.

    Returns:
      The differences by path; {} if a run has no checkpoint of the step.

    Raises:
      CheckpointCorruptedError: If a checkpoint is corrupted.
      StorageError: If one cannot be read.
    """
    manifests = [manifest_at(run.checkpoints, step) for run in (first, second)]
    if (own := manifests[0]) is None or (other := manifests[1]) is None:
        return {}
    folders = [run.checkpoints.path(step) for run in (first, second)]
    known = [n for n in names if own.identity.leaves.get(n) == other.identity.leaves.get(n)]
    items = {field: item for item, fields in ITEMS.items() for field in fields}
    for folder, manifest in zip(folders, (own, other), strict=True):
        used = [i for i, fields in ITEMS.items() if any(holds(manifest, f) for f in fields)]
        check_saved_items(folder, manifest, used)
    found = {}
    for name in known:
        if name not in own.sums or name not in other.sums:
            continue
        item = items[name.split("/")[0]]
        pair = [
            read_host_array(folder, manifest, item, name)
            for folder, manifest in zip(folders, (own, other), strict=True)
        ]
        found[name] = difference_of(*pair)
    return found

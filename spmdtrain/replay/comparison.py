"""Comparison of the records of two runs for the same steps."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from spmdtrain.checkpoints.manifest import ITEMS
from spmdtrain.checkpoints.read_arrays import check_saved_items, holds, read_host_array
from spmdtrain.replay.recorded_run import RecordedRun, RecordedStep, manifest_at

TOLERANCE = 1e-5
"""The relative difference of losses and gradients that is promised for any number of devices."""
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
    """The records of one step in two runs, compared.

    Attributes:
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
        """Whether everything that both runs have recorded is equal, bit for bit."""
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
    """Compares one step of two runs."""
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
    """Compares all steps, or the given ones, for which two runs have recorded the same things."""
    both = first.steps.keys() & second.steps.keys()
    chosen = both if steps is None else both & set(steps)
    found = (compare_step(s, first.steps[s], second.steps[s]) for s in sorted(chosen))
    return [each for each in found if each.is_comparable]


@dataclass(frozen=True)
class ArrayDifference:
    """The differences between the elements of an array in two checkpoints.

    Attributes:
      absolute: The largest difference of an element; NaN if an element is NaN in only one of them.
      relative: `absolute` divided by the largest magnitude in the first array.
      elements: Number of elements that differ.
      size: Number of all elements.
    """

    absolute: float
    relative: float
    elements: int
    size: int


def difference_of(first: np.ndarray, second: np.ndarray) -> ArrayDifference:
    """Compares two arrays of one shape and dtype; integers and random keys count as numbers."""
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
    """Returns how far the named arrays differ after a step, by path; {} if a checkpoint is missing.

    The arrays are read one at a time.

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

"""The recorded steps of a run, and the comparison of two runs."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from spmdtrain.checkpoints.listing import Source, list_checkpoints
from spmdtrain.checkpoints.manifest import ITEMS, CheckpointCorruptedError, Manifest
from spmdtrain.checkpoints.read_arrays import (
    check_saved_items,
    holds,
    read_host_array,
)
from spmdtrain.errors import UserError
from spmdtrain.record.lines import RunEvent, hash_of_sums, last_step
from spmdtrain.record.run import Run
from spmdtrain.record.run_files import Split
from spmdtrain.record.storage import storage_errors

# -- The steps of a run as its workdir records them ------------------------------------------------

_NOTHING: Mapping[str, float] = {}
_NO_SUMS: Mapping[str, str] = {}


@dataclass(frozen=True)
class RecordedStep:
    """The record of a step.

    Attributes:
      metrics: The metrics of its line of training; only the loss if only a hash was logged.
      sums: The checksum of each array of the state after the step by path, in the order of the
        state.
    """

    metrics: Mapping[str, float] = field(default_factory=lambda: _NOTHING)
    sums: Mapping[str, str] = field(default_factory=lambda: _NO_SUMS)

    @property
    def hash(self) -> str | None:
        """The hash of the state after the step; None if it is not known."""
        return hash_of_sums(self.sums) if self.sums else None


@dataclass(frozen=True)
class RecordedRun:
    """The record of a run in its workdir.

    Attributes:
      config: The configuration as JSON values; {} if `config.json` is missing.
      experiment: The experiment's file; None if it is not known.
      experiment_sha256: The SHA-256 of that file at the last start; "" if unknown.
      versions: Versions of libraries by name.
      device_kind: "" if it is not known.
      devices: The number of devices of each start, by the step from which it began.
      processes: The number of processes of each start, by the step from which it began.
      steps: The recorded steps by number, ascending.
      first_step: The step from which the run began: above 0 for a fork.
      last_step: The last step that the run is known to have made.
      failed: The reason of each failed step.
    """

    workdir: str
    config: Mapping[str, Any]
    experiment: str | None
    experiment_sha256: str
    versions: Mapping[str, str]
    device_kind: str
    devices: Mapping[int, int]
    processes: Mapping[int, int]
    steps: Mapping[int, RecordedStep]
    checkpoints: Source
    first_step: int
    last_step: int
    failed: Mapping[int, str]

    def devices_of(self, step: int) -> int | None:
        """Returns the number of devices that made a step; None if it is not known."""
        return _made_by(self.devices, step)

    def processes_of(self, step: int) -> int | None:
        """Returns the number of processes that made a step; None if it is not known."""
        return _made_by(self.processes, step)


def _made_by(starts: Mapping[int, int], step: int) -> int | None:
    """Returns the value of the start that made a step; `starts` has the first steps as keys."""
    before = [first for first in starts if first < step]
    return starts[max(before)] if before else None


def read_run(workdir: str) -> RecordedRun:
    """Reads the record of a run from its workdir, a folder or URL.

    Raises:
      UserError: If it is not the workdir of a run.
      StorageError: If a file cannot be read.
    """
    run = Run(workdir)
    content, metrics = run.config_file, run.metric_log.read_valid().by_step(Split.TRAIN)
    hashes, events, checkpoints = run.hashes, run.events, list_checkpoints(workdir)
    if not (content or metrics or checkpoints.steps):
        raise UserError(
            f"{workdir} is not the workdir of a run: it has no config.json, metrics.jsonl and "
            "checkpoints"
        )
    sums = {step: found for step in checkpoints.steps if (found := _saved_sums(checkpoints, step))}
    sums |= {step: each.sums for step, each in hashes.items()}
    losses = {s: {"loss": x.loss} for s, x in hashes.items() if x.loss is not None}
    known: dict[int, Mapping[str, float]] = {**losses, **metrics}
    steps = {s: RecordedStep(known.get(s, {}), sums.get(s, {})) for s in sorted({*known, *sums})}
    config = content.get("config", {})
    began = [event.get("step", 0) for event in events if event["event"] == "start"]
    failed = {
        event["step"]: event.get("reason", "")
        for event in events
        if event["event"] == "end" and "step" in event
    }
    return RecordedRun(
        workdir=workdir,
        config=config,
        experiment=content.get("experiment"),
        experiment_sha256=content.get("experiment_sha256", ""),
        versions=content.get("versions", {}),
        device_kind=content.get("device_kind", ""),
        devices=_by_start(events, "devices"),
        processes=_by_start(events, "processes"),
        steps=steps,
        checkpoints=checkpoints,
        first_step=min(began, default=0) if config.get("fork_from") else 0,
        last_step=max([_saved_step(run), last_step(events), *steps, *failed]),
        failed=failed,
    )


def _by_start(events: Sequence[RunEvent], name: Literal["devices", "processes"]) -> dict[int, int]:
    """Returns a number of each start by the step from which the start began."""
    found: dict[int, int] = {}
    for event in events:
        if event["event"] == "start" and name in event:
            first = event.get("step", 0)
            # A later start replaces what earlier ones have recorded of the same steps.
            found = {step: n for step, n in found.items() if step < first}
            found[first] = event[name]
    return found


def _saved_step(run: Run) -> int:
    """Returns the step in `status.json`, the last one that was saved; 0 if unknown."""
    try:
        status = run.status
    except UserError:
        return 0
    return 0 if status is None else status["step"]


def manifest_at(source: Source, step: int) -> Manifest | None:
    """Returns the manifest of the checkpoint of a step; None if it is missing or corrupted."""
    if step not in source.steps:
        return None
    folder = source.path(step)
    try:
        with storage_errors(folder):
            return Manifest.read(folder)
    except CheckpointCorruptedError:
        return None


def _saved_sums(source: Source, step: int) -> Mapping[str, str]:
    """Returns the checksums in the manifest of a checkpoint; {} if it lacks a part of the state."""
    manifest = manifest_at(source, step)
    if manifest is None or manifest.identity.lora.source:  # the base model is not part of it
        return {}
    return manifest.sums


# -- Comparison of the records of two runs for the same steps --------------------------------------

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

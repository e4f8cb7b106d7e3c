"""The checkpoints of a workdir: listing, selection, retention."""

import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal, TypeVar

from etils import epath

from spmdtrain.checkpoints.manifest import (
    NAME,
    CheckpointCorruptedError,
    Manifest,
    read_positions,
    steps_in,
)
from spmdtrain.checkpoints.read_arrays import read_arrays
from spmdtrain.distributed import process_group
from spmdtrain.errors import StorageError, UserError, foreign
from spmdtrain.record.run import Run
from spmdtrain.record.storage import absolute, folder_of, storage_errors

# -- Listing of the checkpoints of a workdir with their metrics, and selection of one --------------

LATEST, BEST = "latest", "best"


@dataclass(frozen=True)
class Listing:
    """Checkpoints with their manifests and metrics, and the best of them.

    The metrics come from the run's own evaluation, or from a separate evaluator task. The newest
    checkpoint's `best_metric` and `best_direction` define which one is the best.
    """

    manifests: Mapping[int, Manifest]
    """The valid manifests by step, oldest first."""
    faults: Mapping[int, str]
    """What is wrong with each of the other checkpoints, by step."""
    metrics: Mapping[int, Mapping[str, float]]
    """Evaluation metrics by step; empty for a checkpoint that was not evaluated."""
    best_metric: str
    best: int | None
    """Step of the best checkpoint; None if no checkpoint has the metric."""

    @classmethod
    def of(cls, folder: epath.Path, steps: Sequence[int], run: Run | None = None) -> "Listing":
        """Reads the manifests of checkpoints in the `checkpoints` folder of a workdir.

        `run` is the record of the run if it has been read before. Raises `StorageError` if the
        evaluator's metrics cannot be read.
        """
        manifests: dict[int, Manifest] = {}
        faults: dict[int, str] = {}
        for step in sorted(steps):
            try:
                manifests[step] = Manifest.read(folder / str(step))
            except (UserError, OSError) as error:
                faults[step] = str(error)
        evaluated = (run or Run(str(folder.parent))).evaluations
        metrics = {
            step: dict(
                manifest.metrics or evaluated.get((step, manifest.identity.trajectory_at(step)), {})
            )
            for step, manifest in manifests.items()
        }
        ranking = Retention()
        if manifests:
            config = manifests[max(manifests)].identity.config
            metric, direction = config["best_metric"], config["best_direction"]
            ranking = Retention(metric=metric, direction=direction)
        ranked = ranking.best_first(
            CheckpointRecord(step, datetime.fromisoformat(manifest.saved_at), metrics[step])
            for step, manifest in manifests.items()
        )
        best = ranked[0] if ranked else None
        return cls(manifests, faults, metrics, ranking.metric, best)


def parse_choice(which: str | int) -> str | int:
    """Parses "latest", "best" or a step (an int or digits); raises `UserError` for others."""
    text = str(which)
    if text.isdecimal():
        return int(text)
    if text not in (LATEST, BEST):
        raise UserError(
            f"checkpoint is {which!r}: it must be {LATEST}, {BEST} or a step number such as 500"
        )
    return text


def choose(folder: epath.Path, steps: Sequence[int], which: str | int) -> int:
    """Returns the step of the best checkpoint, or `which` itself if it is a step.

    `steps` are those of the checkpoints in `folder`, the `checkpoints` folder of a workdir.

    Raises:
      UserError: If there is no such checkpoint, no checkpoint has the metric, or a manifest cannot
        be read, because its checkpoint could be the best.
    """
    if which != BEST:
        step = int(which)
        if step not in steps:
            existing = ", ".join(map(str, sorted(steps)))
            raise UserError(f"{folder}: no checkpoint of step {step}; existing steps: {existing}")
        return step
    listing = Listing.of(folder, steps)
    for step, fault in listing.faults.items():
        if (folder / str(step)).exists():  # it was not removed meanwhile
            raise UserError(
                f"{folder / str(step)}: {fault}; it could be the best checkpoint: choose a step, "
                "or latest"
            )
    if listing.best is None:
        raise UserError(
            f"{folder}: none of its {len(steps)} checkpoints has the evaluation metric "
            f"{listing.best_metric!r}, which ranks them: choose a step, or latest"
        )
    return listing.best


# -- The checkpoints that a path names, and the newest valid one of them ---------------------------

T = TypeVar("T")

_LISTINGS, _BETWEEN_LISTINGS = 3, 0.02  # seconds


@dataclass(frozen=True)
class Source:
    """Checkpoints in a folder, from which one is loaded.

    Attributes:
      steps: The steps of the checkpoints, oldest first.
      whole_workdir: Whether these are all checkpoints of a workdir.
    """

    folder: epath.Path
    steps: Sequence[int]
    whole_workdir: bool = True

    def path(self, step: int) -> epath.Path:
        """Returns the folder of one checkpoint."""
        return self.folder / str(step)

    def is_on_disk(self, step: int) -> bool:
        """Returns whether one checkpoint is in its folder, and no snapshot in memory."""
        return step in self.steps

    def kind(self, step: int) -> str:
        """Returns the kind of place of what was loaded: `source` of `RunEvent`."""
        return "checkpoint"

    def origin(self, step: int) -> str:
        """Returns the places of what was loaded, for messages; "" for a checkpoint on disk."""
        return ""

    def title(self, step: int) -> str:
        """Returns the name of one checkpoint for messages."""
        return f"checkpoint {self.path(step)}"

    def read_manifest(self, step: int) -> Manifest:
        """Returns the manifest of one checkpoint. Raises as `Manifest.read`, or `StorageError`."""
        folder = self.path(step)
        with storage_errors(folder):
            return Manifest.read(folder)

    def read_arrays(self, manifest: Manifest, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns arrays of one checkpoint by field, placed and verified (see `read_arrays`)."""
        return read_arrays(self.path(manifest.step), manifest, fields)

    def read_positions(self, manifest: Manifest) -> Mapping[str, str]:
        """Returns the positions of the shards of a stream (see `read_positions`)."""
        return read_positions(self.path(manifest.step), manifest.stream)


def list_checkpoints(workdir: str) -> Source:
    """Returns the checkpoints of a workdir, perhaps none.

    Raises `StorageError` if it cannot be read.
    """
    return _list(absolute(folder_of(workdir) / "checkpoints"))


def list_for_all(workdir: str) -> Source:
    """Returns the checkpoints of a workdir, perhaps none, as process 0 lists them.

    All processes of a job call it. Raises `StorageError` in all of them if process 0 cannot read
    the folder.
    """

    def steps() -> list[int]:
        return list(list_checkpoints(workdir).steps) if process_group.is_chief() else []

    found = process_group.broadcast(process_group.run_on_all(steps, StorageError))
    return Source(absolute(folder_of(workdir) / "checkpoints"), found)


def _list(folder: epath.Path) -> Source:
    """Returns the checkpoints in a folder, perhaps none.

    If a run keeps one checkpoint, and perhaps the best, the next one may be published and the last
    one removed while a listing is read. So a listing without the newest checkpoint is repeated.
    """
    with storage_errors(folder):
        steps = steps_in(folder)
        for _ in range(_LISTINGS):
            if _has_newest(steps, folder):
                break
            time.sleep(_BETWEEN_LISTINGS)
            steps = steps_in(folder)
        return Source(folder, steps)


def _has_newest(steps: Sequence[int], folder: epath.Path) -> bool:
    """Returns whether listed steps include the newest step that the folder has now."""
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    newest = max((int(name) for name in names if name.isdecimal()), default=None)
    return newest in steps if names else not steps


def find(path: str | os.PathLike[str], which: str | int = LATEST) -> Source:
    """Returns the checkpoints that a path names.

    Args:
      path: A workdir, its `checkpoints` folder, or one `checkpoints/STEP`.
      which: "best" or a step selects one checkpoint of a workdir. "latest" returns all of them, and
        `load_latest_valid` loads the newest valid one.

    Raises:
      UserError: If there is no such checkpoint.
      StorageError: If the folder cannot be read.
    """
    path, which = os.fspath(path), parse_choice(which)
    given = absolute(folder_of(path))
    is_inside = given.parent.name == "checkpoints" or (given / NAME).exists()
    if given.name.isdecimal() and is_inside and given.is_dir():
        if which not in (LATEST, int(given.name)):
            raise UserError(
                f"{path} names one checkpoint; to choose {'the best' if which == BEST else which}, "
                "give its workdir"
            )
        return Source(given.parent, [int(given.name)], whole_workdir=False)
    source = _list(given) if given.name == "checkpoints" else list_checkpoints(path)
    if not source.steps:
        workdir = given.parent if given.name == "checkpoints" else path
        if (status := Run(str(workdir)).status) is None:
            why = "neither a workdir nor a checkpoints/STEP"
        else:
            reason = f", {foreign(status['reason'])}" if status.get("reason") else ""
            why = f"its run has saved none; {status['status']}{reason}"
        raise UserError(f"{path}: holds no checkpoint ({why})")
    if which == LATEST:
        return source
    with storage_errors(source.folder):
        step = choose(source.folder, source.steps, which)
    return Source(source.folder, [step], whole_workdir=False)


def load_latest_valid(
    source: Source,
    load: Callable[[epath.Path, Manifest], T],
    log: Callable[[str], None],
    *,
    by_all: bool = False,
) -> tuple[T, Manifest, Sequence[int]]:
    """Loads the newest valid checkpoint of a source.

    Returns what `load` returns, the manifest, and the steps of newer checkpoints, which are
    corrupted.

    Args:
      load: Loads one; its `UserError` other than for a corrupted checkpoint ends the search.
      log: Receives a line for each corrupted checkpoint.
      by_all: Whether all processes of the job load together.

    Raises:
      CheckpointCorruptedError: If no checkpoint is valid.
      UserError: If there is no checkpoint any more.
      StorageError: If a checkpoint cannot be read.
    """
    if by_all:  # all processes load the same one
        source = replace(source, steps=process_group.broadcast(list(source.steps)))
    corrupted: dict[int, CheckpointCorruptedError] = {}
    for step in reversed(source.steps):
        folder = source.path(step)
        try:
            reading = functools.partial(source.read_manifest, step)
            manifest = (
                process_group.run_on_all(reading, CheckpointCorruptedError) if by_all else reading()
            )
            return load(folder, manifest), manifest, list(corrupted)
        except CheckpointCorruptedError as error:
            gone = not folder.exists()
            if source.whole_workdir and (process_group.broadcast(gone) if by_all else gone):
                # A run in progress has removed it while it was read: there is a newer one.
                return load_latest_valid(_list(source.folder), load, log, by_all=by_all)
            corrupted[step] = error
            if step != source.steps[0]:
                log(f"{source.title(step)} is corrupted: {error}; trying the one before")
    if not corrupted:
        raise UserError(f"{source.folder}: holds no checkpoint any more")
    newest = max(corrupted)
    if len(corrupted) == 1:
        raise CheckpointCorruptedError(f"{source.title(newest)} is corrupted: {corrupted[newest]}")
    raise CheckpointCorruptedError(
        f"none of the {len(corrupted)} checkpoints in {source.folder} is valid; of the newest, "
        f"{newest}: {corrupted[newest]}"
    )


# -- Retention of checkpoints ----------------------------------------------------------------------

_HOUR = 3600


@dataclass(frozen=True)
class CheckpointRecord:
    """The properties of a checkpoint that decide whether it is kept."""

    step: int
    saved_at: datetime
    metrics: Mapping[str, float] | None
    trajectory: str = ""


@dataclass(frozen=True)
class Retention:
    """Selects the checkpoints to keep: the newest, the best and periodic ones.

    The selection is a function of the records, so a restart does not change it.

    Orbax receives it as a preservation policy (see `orbax.open_manager`). Its own policies would
    keep other checkpoints. `BestN` keeps all of at most n checkpoints, even without a metric, and
    cannot rank NaN. `EveryNSteps` keeps multiples of n only, but a save at the end of an epoch or
    by the clock can have any step; with `exact_interval=False` it counts, like `EveryNSeconds`,
    from the last checkpoint that it keeps, and always keeps the first.

    Attributes:
      latest: Number of newest checkpoints to keep.
      best: Number of best checkpoints to keep. A record without a finite metric is never among
        them; of two with the same value the newer is better.
      metric: The metric that ranks checkpoints.
      direction: Whether its best value is the minimum or the maximum.
      every_steps: Keep the first checkpoint of each period of this many steps.
      every_hours: Keep the first checkpoint of each period of this many hours.
    """

    latest: int = 3
    best: int = 1
    metric: str = "loss"
    direction: Literal["min", "max"] = "min"
    every_steps: int | None = None
    every_hours: float | None = None

    def keep(self, records: Iterable[CheckpointRecord]) -> set[int]:
        """Returns the steps to keep."""
        by_step = sorted(records, key=lambda record: record.step)
        newest = [record.step for record in by_step[-self.latest :]]
        return {*newest, *self.best_first(by_step)[: self.best], *self._periodic(by_step)}

    def keep_evaluated(
        self,
        records: Iterable[CheckpointRecord],
        evaluated: Mapping[tuple[int, str], Mapping[str, float]],
    ) -> set[int]:
        """Returns the steps to keep if a separate evaluator task computes the metrics.

        Checkpoints that it has not evaluated yet are kept too, because they may become the best.
        `evaluated` has its metrics by step and trajectory: the same step of another trajectory is a
        state that the run has left by going back.
        """
        records = [
            dataclasses.replace(r, metrics=evaluated.get((r.step, r.trajectory))) for r in records
        ]
        seen = max((r.step for r in records if r.metrics is not None), default=-1)
        return self.keep(records) | {r.step for r in records if r.step > seen}

    def best_first(self, records: Iterable[CheckpointRecord]) -> list[int]:
        """Returns the steps that have the metric, the best first."""
        ranked = sorted(
            (value if self.direction == "max" else -value, record.step)
            for record in records
            if math.isfinite(value := (record.metrics or {}).get(self.metric, math.nan))
        )
        return [step for _, step in reversed(ranked)]

    def _periodic(self, by_step: Sequence[CheckpointRecord]) -> set[int]:
        """Returns the first checkpoint of each period, which stays the first in later calls."""
        kept: set[int] = set()
        periods: set[tuple[str, int]] = set()
        for record in by_step:
            own = set()
            if self.every_steps and record.step >= self.every_steps:
                own.add(("steps", record.step // self.every_steps))
            if self.every_hours:
                hours = record.saved_at.timestamp() / _HOUR
                own.add(("hours", math.floor(hours / self.every_hours)))
            if own - periods:
                kept.add(record.step)
            periods |= own
        return kept

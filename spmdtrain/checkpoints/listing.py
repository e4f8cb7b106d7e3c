"""Listing of the checkpoints of a workdir with their metrics, and selection of one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from etils import epath

from spmdtrain.checkpoints.manifest import Manifest
from spmdtrain.checkpoints.retention import CheckpointRecord, Retention
from spmdtrain.errors import UserError
from spmdtrain.record.run_files import evaluator_metrics

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
    def of(cls, folder: epath.Path, steps: Sequence[int]) -> "Listing":
        """Reads the manifests of checkpoints in the `checkpoints` folder of a workdir.

        Raises `StorageError` if the evaluator's metrics cannot be read.
        """
        manifests: dict[int, Manifest] = {}
        faults: dict[int, str] = {}
        for step in sorted(steps):
            try:
                manifests[step] = Manifest.read(folder / str(step))
            except (UserError, OSError) as error:
                faults[step] = str(error)
        evaluated = evaluator_metrics(str(folder.parent))
        metrics = {
            step: dict(
                manifest.metrics or evaluated.get((step, manifest.identity.trajectory_at(step)), {})
            )
            for step, manifest in manifests.items()
        }
        newest = max(manifests, default=None)
        config: Mapping[str, Any] = {} if newest is None else manifests[newest].identity.config
        # Versions without these fields ranked by the lowest loss.
        metric = config.get("best_metric", "loss")
        ranking = Retention(metric=metric, direction=config.get("best_direction", "min"))
        ranked = ranking.best_first(
            CheckpointRecord(step, datetime.fromisoformat(manifest.saved_at), metrics[step])
            for step, manifest in manifests.items()
        )
        best = ranked[0] if ranked else None
        return cls(manifests, faults, metrics, metric, best)


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

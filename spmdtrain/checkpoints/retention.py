"""Retention of checkpoints."""

import dataclasses
import datetime
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

_HOUR = 3600


@dataclass(frozen=True)
class CheckpointRecord:
    """The properties of a checkpoint that decide whether it is kept."""

    step: int
    saved_at: datetime.datetime
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

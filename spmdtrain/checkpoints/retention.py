"""Which checkpoints stay."""

import dataclasses
import datetime
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

_HOUR = 3600


@dataclass(frozen=True)
class Record:
    """What of a checkpoint decides whether it stays."""

    step: int
    saved_at: datetime.datetime
    metrics: Mapping[str, float] | None


@dataclass(frozen=True)
class Retention:
    """The newest `latest` stay, the `best` best, and the first of every so many steps or hours.

    A function of the records alone, so that a restart changes nothing. A record without the metric
    is never among the best; of equals the newer is better.
    """

    latest: int = 3
    best: int = 1
    metric: str = "loss"
    direction: Literal["min", "max"] = "min"
    every_steps: int | None = None
    every_hours: float | None = None

    def keep(self, records: Iterable[Record]) -> set[int]:
        """The steps to keep."""
        by_step = sorted(records, key=lambda record: record.step)
        newest = [record.step for record in by_step[-self.latest :]]
        return {*newest, *self.best_first(by_step)[: self.best], *self._for_good(by_step)}

    def keep_evaluated(
        self, records: Iterable[Record], evaluated: Mapping[int, Mapping[str, float]]
    ) -> set[int]:
        """The steps to keep where an evaluator beside the run gives the metrics, by step.

        Those that it has still to look at stay, too: any of them may turn out to be the best.
        """
        records = [dataclasses.replace(r, metrics=evaluated.get(r.step)) for r in records]
        steps = {record.step for record in records}  # others are of a run that has gone back since
        seen = max(steps & evaluated.keys(), default=-1)
        return self.keep(records) | {r.step for r in records if r.step > seen}

    def best_first(self, records: Iterable[Record]) -> list[int]:
        """The steps that have the metric, the best first."""
        ranked = sorted(
            (self._merit(record), record.step) for record in records if self._measured(record)
        )
        return [step for _, step in reversed(ranked)]

    def _measured(self, record: Record) -> bool:
        value = (record.metrics or {}).get(self.metric, math.nan)
        return math.isfinite(value)

    def _merit(self, record: Record) -> float:
        assert record.metrics is not None
        value = record.metrics[self.metric]
        return -value if self.direction == "min" else value

    def _for_good(self, by_step: Sequence[Record]) -> set[int]:
        """The first checkpoint of each period. The oldest stays first, so this never changes."""
        kept: set[int] = set()
        periods: set[tuple[str, int]] = set()
        for record in by_step:
            found = set()
            if self.every_steps and record.step >= self.every_steps:
                found.add(("steps", record.step // self.every_steps))
            if self.every_hours:
                hours = record.saved_at.timestamp() / _HOUR
                found.add(("hours", math.floor(hours / self.every_hours)))
            if found - periods:
                kept.add(record.step)
            periods |= found
        return kept

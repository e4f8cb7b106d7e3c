"""The values of metrics by split and name, collected from the lines of a run."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

from spmdtrain.files.run_files import parse_metrics_line
from spmdtrain.files.validation import Malformed, parse_object

Steps: TypeAlias = Sequence[int]
Values: TypeAlias = Sequence["float | None"]
_NOT_METRICS = {"step", "split"}
_NOT_PERFORMANCE = {"step", "time"}


class Column:
    """The values of one metric. None is a value that was NaN or infinite."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.values: list[float | None] = []
        self._is_ordered = True

    def add(self, step: int, value: float | None) -> None:
        """Appends a value."""
        if self.steps and step <= self.steps[-1]:
            self._is_ordered = False
        self.steps.append(step)
        self.values.append(None if value is None or not math.isfinite(value) else value)

    def by_step(self) -> tuple[Steps, Values]:
        """Returns the values in the order of their steps; of equal steps the newest value."""
        if not self._is_ordered:
            newest = dict(zip(self.steps, self.values, strict=True))
            self.steps = sorted(newest)
            self.values = [newest[step] for step in self.steps]
            self._is_ordered = True
        return self.steps, self.values

    @property
    def last(self) -> tuple[int, float] | None:
        """The last step with a value, and the value."""
        steps, values = self.by_step()
        for step, value in zip(reversed(steps), reversed(values), strict=True):
            if value is not None:
                return step, value
        return None


class MetricColumns:
    """The metrics of `metrics.jsonl`, by split and name."""

    def __init__(self) -> None:
        self.columns: dict[tuple[str, str], Column] = {}
        self.invalid = 0
        """Number of lines that are not lines of metrics."""

    def add(self, line: bytes) -> None:
        """Adds a line; counts it as invalid if it is not one of metrics."""
        content = parse_metrics_line(line)
        if content is None:
            self.invalid += 1
            return
        step, split = content["step"], content["split"]
        for name, value in content.items():
            if name not in _NOT_METRICS and not isinstance(value, dict):
                self._column(split, name).add(step, value)

    def _column(self, split: str, name: str) -> Column:
        if (column := self.columns.get((split, name))) is None:
            column = self.columns[split, name] = Column()
        return column

    def names(self, split: str) -> list[str]:
        """Returns the names of the metrics of a split, in the order of their appearance."""
        return [name for of, name in self.columns if of == split]

    def get(self, split: str, name: str) -> Column | None:
        """Returns a metric; None if there is none."""
        return self.columns.get((split, name))

    def last_step(self) -> int:
        """Returns the last step of all lines; 0 without lines."""
        return max((max(c.steps) for c in self.columns.values() if c.steps), default=0)


class PerformanceColumns:
    """The values of `performance.jsonl` by name, and the time of each line."""

    def __init__(self) -> None:
        self.columns: dict[str, Column] = {}
        self.times = Column()
        self.invalid = 0

    def add(self, line: bytes) -> None:
        """Adds a line; counts it as invalid if it is not one of performance."""
        try:
            content = parse_object(line)
        except Malformed:
            content = {}
        step, time = content.get("step"), content.get("time")
        if type(step) is not int or step < 0 or not is_number(time):
            self.invalid += 1
            return
        self.times.add(step, float(time))
        for name, value in content.items():
            if name not in _NOT_PERFORMANCE and is_number(value):
                self.columns.setdefault(name, Column()).add(step, value)


def is_number(value: Any) -> TypeGuard[float]:
    """Returns whether a JSON value is a finite number, which excludes true and false."""
    return type(value) in (int, float) and math.isfinite(value)


def numbers_of(content: Mapping[str, Any], name: str) -> dict[str, float]:
    """Returns the finite numbers of the object `name` in a JSON object, without other values."""
    found = content.get(name)
    if not isinstance(found, dict):
        return {}
    return {str(key): float(value) for key, value in found.items() if is_number(value)}

"""The values of metrics by split and name, collected from the lines of a run."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard, TypeVar

import numpy as np

from spmdtrain.files.run_files import NOT_METRICS, is_metrics
from spmdtrain.report.reduction import extremes, mean_curve, mean_curve_of_means, merge_means

K = TypeVar("K")
Steps: TypeAlias = Sequence[int]
Values: TypeAlias = Sequence["float | None"]
_MOST_VALUES, _KEPT_VALUES = 2**15, 2**13  # of a column, before and after it is thinned
_MOST_MEANS, _VALUES_PER_MEAN = 2**13, 16
MOST_COLUMNS = 10_000
"""The number of metrics of one file whose values are kept."""
_NOT_PERFORMANCE = {"step", "time"}


class Column:
    """The values of one metric. None is a value that was NaN or infinite.

    Of more than 32,768 values it keeps about 8,192: the extremes and gaps of each part of the
    curve. The other values are replaced by the means of 16 or more.
    """

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._values: list[float | None] = []
        self._is_ordered = True
        self._dropped = 0  # values that are no longer in the lists
        self._thinned = 0  # values at the beginning of the lists that an earlier thinning has kept
        self._means = np.zeros((0, 3))  # step, value and number of the values before that thinning

    def add(self, step: int, value: float | None) -> None:
        steps = self._steps
        if steps and step <= steps[-1]:
            self._is_ordered = False
        steps.append(step)
        self._values.append(None if value is None or not math.isfinite(value) else value)
        if len(steps) > _MOST_VALUES:
            self._thin()

    @property
    def count(self) -> int:
        """Number of values of the curve, including the values that are no longer kept."""
        return self._dropped + len(self._steps)

    def by_step(self) -> tuple[Steps, Values]:
        """Returns the values in the order of their steps, for equal steps the newest value."""
        if self._is_ordered:
            return self._steps, self._values
        newest = dict(zip(self._steps, self._values, strict=True))
        steps = sorted(newest)
        values = [newest[step] for step in steps]
        if not self._thinned:  # otherwise the new values would be among those that were kept
            self._steps, self._values, self._is_ordered = steps, values, True
        return steps, values

    def means(self, parts: int) -> tuple[list[float], list[float]]:
        """Returns the means of `parts` parts of about equally many values, at their mean steps."""
        steps, values = self.by_step()
        if not self._thinned:
            return mean_curve(steps, values, parts)
        return mean_curve_of_means(self._all_means(), parts)

    def _all_means(self) -> np.ndarray:
        """Returns step, value and count of the means; a newer value is a mean of one."""
        return np.concatenate([self._means, self._means_of_new(1)])

    def _means_of_new(self, size: int) -> np.ndarray:
        """Returns the means of groups of `size` values that were added since the last thinning."""
        new = zip(self._steps[self._thinned :], self._values[self._thinned :], strict=True)
        newest = {step: value for step, value in new if value is not None}
        rows = np.array([(s, newest[s], 1.0) for s in sorted(newest)]).reshape(-1, 3)
        return merge_means(rows, size)

    def _thin(self) -> None:
        means = np.concatenate([self._means, self._means_of_new(_VALUES_PER_MEAN)])
        self._means = merge_means(means, 2) if len(means) > _MOST_MEANS else means
        steps, values = self.by_step()
        last = next((n for n in reversed(range(len(values))) if values[n] is not None), 0)
        kept = sorted(extremes(values, _KEPT_VALUES) | {last})
        self._dropped += len(steps) - len(kept)
        self._steps, self._values = [steps[n] for n in kept], [values[n] for n in kept]
        self._is_ordered, self._thinned = True, len(kept)

    @property
    def total(self) -> float:
        """The sum of the values."""
        if not self._thinned:
            return sum(v for v in self.by_step()[1] if v is not None)
        means = self._all_means()
        return float(means[:, 1] @ means[:, 2])

    @property
    def last_step(self) -> int:
        """The largest step; 0 without values."""
        return max(self._steps, default=0)

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

    def add(self, content: Mapping[str, Any]) -> None:
        """Adds the object of a line; counts it as invalid if it is not a line of metrics."""
        if not is_metrics(content):
            self.invalid += 1
            return
        columns, step, split = self.columns, content["step"], content["split"]
        for name, value in content.items():
            if name not in NOT_METRICS and type(value) is not dict:
                column = columns.get((split, name)) or new_column(columns, (split, name))
                column.add(step, value)

    def names(self, split: str) -> list[str]:
        """Returns the names of the metrics of a split, in the order of their appearance."""
        return [name for of, name in self.columns if of == split]

    def get(self, split: str, name: str) -> Column | None:
        """Returns a metric; None if there is none."""
        return self.columns.get((split, name))

    def last_step(self) -> int:
        """Returns the last step of all lines; 0 without lines."""
        return max((column.last_step for column in self.columns.values()), default=0)


class PerformanceColumns:
    """The values of `performance.jsonl` by name, and the time of each line."""

    def __init__(self) -> None:
        self.columns: dict[str, Column] = {}
        self.times = Column()
        self.invalid = 0

    def add(self, content: Mapping[str, Any]) -> None:
        """Adds the object of a line; counts it as invalid if it is not a line of performance."""
        step, time = content.get("step"), content.get("time")
        if type(step) is not int or step < 0 or not is_number(time):
            self.invalid += 1
            return
        self.times.add(step, float(time))
        for name, value in content.items():
            if name not in _NOT_PERFORMANCE and is_number(value):
                column = self.columns.get(name) or new_column(self.columns, name)
                column.add(step, value)


def new_column(columns: dict[K, Column], key: K) -> Column:
    """Returns a new column, which is added unless the file has very many names already."""
    column = Column()
    if len(columns) < MOST_COLUMNS:
        columns[key] = column
    return column


def is_number(value: Any) -> TypeGuard[float]:
    """Returns whether a JSON value is a finite number, which excludes true and false."""
    return type(value) in (int, float) and math.isfinite(value)


def numbers_of(content: Mapping[str, Any], name: str) -> dict[str, float]:
    """Returns the finite numbers of the object `name` in a JSON object, without other values."""
    found = content.get(name)
    if not isinstance(found, dict):
        return {}
    return {str(key): float(value) for key, value in found.items() if is_number(value)}

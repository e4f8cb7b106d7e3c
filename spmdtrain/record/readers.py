"""Collectors of the lines that a run appends to its files: starts, metrics and media."""

import bisect
import enum
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, TypeVar

import numpy as np
from etils import epath
from numpy.typing import ArrayLike

from spmdtrain.document.blocks import MediaType
from spmdtrain.errors import UserError, foreign
from spmdtrain.record import no_follow
from spmdtrain.record.changing_files import Collector
from spmdtrain.record.lines import EVENT_KINDS, RunEvent, parse_event
from spmdtrain.record.run_files import NOT_METRICS, TRAJECTORY, Split, is_metrics, metrics_of
from spmdtrain.record.storage import failures, is_url
from spmdtrain.record.validation import Malformed, is_number, read_bytes

# -- The starts of a run and the uses of their time, from `events.jsonl` ---------------------------

_LONGEST_REASON = 500


class Activity(enum.StrEnum):
    """A use of the time of a run, in the order of the legend."""

    STEP = "steps"
    REPEATED = "repeated steps"
    START = "start"
    COMPILE = "compilation"
    RESTORE = "restore"
    LOAD = "input"
    EVALUATE = "evaluation"
    SAVE = "saving"
    HOST = "host"
    DOWN = "down"


_PHASES = {
    "start": Activity.START,
    "compile": Activity.COMPILE,
    "restore": Activity.RESTORE,
    "step": Activity.STEP,
    "load": Activity.LOAD,
    "evaluate": Activity.EVALUATE,
    "save": Activity.SAVE,
    "host": Activity.HOST,
}


@dataclass(frozen=True)
class Reading:
    """An event `phases`: the seconds of each phase since the start."""

    time: float
    step: int
    seconds: dict[str, float]


@dataclass
class RunStart:
    """One start of a run, up to its end.

    Attributes:
      time: When it began, in seconds since 1970.
      step: The step that it started from.
      processes: The number of processes; None if it is not recorded.
      last_time: The time of its last event.
      last_step: The last step that is known.
      status: How it ended; empty if its end is not recorded, because it was killed or is running.
      reason: Why it ended early.
      source: Where its state came from (see `RunEvent`); empty if it is not recorded.
      change: "loss" if it has fewer processes than the start before, "rejoin" if it has more.
      lost_steps: Steps of the start before that it makes again; None if it is not recorded.
      lost_seconds: Seconds from the last step of the start before until its state was there; None
        if it is not recorded.
    """

    time: float
    step: int
    processes: int | None = None
    readings: list[Reading] = field(default_factory=list)
    last_time: float = 0.0
    last_step: int = 0
    status: str = ""
    reason: str = ""
    source: str = ""
    change: str = ""
    lost_steps: int | None = None
    lost_seconds: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds from the start to the last event."""
        return max(0.0, self.last_time - self.time)


@dataclass(frozen=True)
class Span:
    """A part of the wall-clock time of a run.

    Attributes:
      start: The number of the start, from 0.
      begin: Seconds since the run began.
      end: Seconds since the run began.
      step: The last step of the part.
    """

    start: int
    activity: Activity
    begin: float
    end: float
    step: int


class EventLog(Collector):
    """The events of a run, and its starts."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[RunEvent] = []
        """The valid events in the order of the file, of the kinds that this version knows."""
        self.starts: list[RunStart] = []

    def add(self, content: Mapping[str, Any]) -> None:
        kind = content.get("event")
        if isinstance(kind, str) and kind not in EVENT_KINDS and is_number(content.get("time")):
            return  # of another version
        try:
            event = parse_event(content)
        except Malformed:
            self.invalid += 1
            return
        self.events.append(event)
        time, step = event["time"], event.get("step", 0)
        if event["event"] == "start":
            processes = event.get("processes") or None
            start = RunStart(time, step, processes, last_time=time, last_step=step)
            start.source = foreign(event.get("source") or "", 40)
            start.change = foreign(event.get("change") or "", 40)
            start.lost_steps = event.get("lost_steps")
            start.lost_seconds = event.get("lost_seconds")
            self.starts.append(start)
            return
        if not self.starts:
            return
        start = self.starts[-1]
        start.last_time = max(start.last_time, time)
        start.last_step = max(start.last_step, step)
        if event["event"] == "phases":
            reading = Reading(time, step or start.last_step, event.get("seconds", {}))
            start.readings.append(reading)
        elif event["event"] == "end":
            start.status = foreign(event.get("status") or "ended", 40)
            start.reason = foreign(event.get("reason") or "", _LONGEST_REASON)

    def extend(self, lines: Iterable[tuple[float, int]]) -> None:
        """Extends starts whose end is not recorded up to the lines of another file.

        `lines` are pairs of time and step.
        """
        begins = [start.time for start in self.starts]
        for time, step in lines:
            start = self.starts[bisect.bisect_right(begins, time) - 1] if begins else None
            if start and not start.status and time > start.last_time:
                start.last_time = time
                start.last_step = max(start.last_step, step)


def spans(starts: Sequence[RunStart], most_per_start: int | None = None) -> list[Span]:
    """Returns the parts of the wall-clock time of a run, in their order.

    The order of the phases between two events `phases` is not known: they stand in the order in
    which a run passes through them.

    Args:
      starts: The starts of the run, in their order.
      most_per_start: The number of intervals into which a start is divided for a picture; None for
        all intervals, whose sums equal `run_times`.
    """
    if not starts:
        return []
    began = starts[0].time
    found: list[Span] = []
    reached = 0  # the last step of the starts before
    previous_end = began
    for number, start in enumerate(starts):
        begin = max(start.time, previous_end)
        if begin > previous_end:
            found.append(
                Span(number, Activity.DOWN, previous_end - began, begin - began, start.step)
            )
        at, step = begin, start.step
        before: dict[str, float] = {}
        for reading in _thinned(start.readings, most_per_start or len(start.readings)):
            for activity, seconds in _interval(before, reading, step, reached):
                end = min(at + seconds, max(start.last_time, at))
                if end > at:
                    found.append(Span(number, activity, at - began, end - began, reading.step))
                at = end
            before, step = reading.seconds, reading.step
        if start.last_time > at:  # time after the last reading, or not in a phase
            rest = Activity.HOST if start.readings else Activity.START
            found.append(Span(number, rest, at - began, start.last_time - began, start.last_step))
        previous_end = max(previous_end, start.last_time)
        reached = max(reached, start.last_step)
    return found


def _thinned(readings: Sequence[Reading], most: int) -> Sequence[Reading]:
    """Returns at most `most` readings, always the last one; each is a sum since the start."""
    stride = -(-len(readings) // most) if readings else 1
    return readings[::-1][::stride][::-1]


def _interval(
    before: dict[str, float], reading: Reading, step: int, reached: int
) -> list[tuple[Activity, float]]:
    """Returns the seconds of each activity between two readings.

    Args:
      before: The seconds of the previous reading.
      step: The step of the previous reading.
      reached: The last step that an earlier start had computed: steps up to it are repeated.
    """
    parts: list[tuple[Activity, float]] = []
    for phase, activity in _ORDER:
        seconds = reading.seconds.get(phase, 0.0) - before.get(phase, 0.0)
        if seconds <= 0:
            continue
        if activity is Activity.STEP and step < reached:
            steps = max(1, reading.step - step)
            again = seconds * min(steps, reached - step) / steps
            parts += [(Activity.REPEATED, again), (Activity.STEP, seconds - again)]
        else:
            parts.append((activity, seconds))
    return parts


_ORDER = [
    (name, _PHASES[name])
    for name in ("start", "restore", "compile", "load", "step", "host", "evaluate", "save")
]


def shares(found: Sequence[Span]) -> dict[Activity, float]:
    """Returns the seconds of each activity, the largest first."""
    seconds: dict[Activity, float] = {}
    for span in found:
        seconds[span.activity] = seconds.get(span.activity, 0.0) + span.end - span.begin
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


# -- The values of metrics by split and name, collected from the lines of a run --------------------

K = TypeVar("K")
_MOST_VALUES, _KEPT_VALUES = 2**15, 2**13  # of a bounded column, before and after it is thinned
_MOST_MEANS, _VALUES_PER_MEAN = 2**13, 16
MOST_COLUMNS = 10_000
"""The number of metrics of one file whose values are kept."""
_NOT_PERFORMANCE = {"step", "time"}


class Column:
    """The values of one metric by step. NaN is a value that was NaN or infinite.

    Of more than 32,768 values a bounded column keeps about 8,192: the extremes and gaps of each
    part of the curve. The other values are replaced by the means of 16 or more.
    """

    def __init__(self, *, bounded: bool = False) -> None:
        self._bounded = bounded
        self._steps, self._values = array("q"), array("d")
        self._is_ordered = True
        self._dropped = 0  # values that are no longer in the arrays
        self._thinned = 0  # values at the beginning of the arrays that an earlier thinning has kept
        self._means = np.zeros((0, 3))  # step, value and number of the values before that thinning

    def add(self, step: int, value: float | None) -> None:
        steps = self._steps
        if steps and step <= steps[-1]:
            self._is_ordered = False
        steps.append(step)
        self._values.append(math.nan if value is None or not math.isfinite(value) else value)
        if self._bounded and len(steps) > _MOST_VALUES:
            self._thin()

    @property
    def count(self) -> int:
        """Number of values of the curve, including the values that are no longer kept."""
        return self._dropped + len(self._steps)

    def by_step(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the steps in ascending order and their values, for equal steps the newest value.

        The steps are int64, the values float64, both of shape (N,).
        """
        steps, values = np.array(self._steps, np.int64), np.array(self._values)
        if self._is_ordered:
            return steps, values
        order = np.argsort(steps, kind="stable")
        steps, values = steps[order], values[order]
        is_newest = np.append(steps[1:] != steps[:-1], True)
        steps, values = steps[is_newest], values[is_newest]
        if not self._thinned:  # otherwise the new values would be among those that were kept
            self._replace(steps, values)
        return steps, values

    def _replace(self, steps: np.ndarray, values: np.ndarray) -> None:
        self._steps, self._values = array("q", steps.tobytes()), array("d", values.tobytes())
        self._is_ordered = True

    def means(self, parts: int) -> tuple[list[float], list[float]]:
        """Returns the means of `parts` parts of about equally many values, at their mean steps."""
        if not self._thinned:
            return mean_curve(*self.by_step(), parts)
        return mean_curve_of_means(self._all_means(), parts)

    def _all_means(self) -> np.ndarray:
        """Returns step, value and count of the means; a newer value is a mean of one."""
        return np.concatenate([self._means, self._means_of_new(1)])

    def _means_of_new(self, size: int) -> np.ndarray:
        """Returns the means of groups of `size` values that were added since the last thinning."""
        new = zip(self._steps[self._thinned :], self._values[self._thinned :], strict=True)
        newest = {step: value for step, value in new if not math.isnan(value)}
        rows = np.array([(s, newest[s], 1.0) for s in sorted(newest)]).reshape(-1, 3)
        return merge_means(rows, size)

    def _thin(self) -> None:
        means = np.concatenate([self._means, self._means_of_new(_VALUES_PER_MEAN)])
        self._means = merge_means(means, 2) if len(means) > _MOST_MEANS else means
        steps, values = self.by_step()
        last = np.flatnonzero(~np.isnan(values))[-1:].tolist()
        kept = sorted({*extremes(values, _KEPT_VALUES), *last})
        self._dropped += len(steps) - len(kept)
        self._replace(steps[kept], values[kept])
        self._thinned = len(kept)

    @property
    def total(self) -> float:
        """The sum of the values."""
        if not self._thinned:
            values = self.by_step()[1]
            return float(sum(values[~np.isnan(values)].tolist()))
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
        (known,) = np.nonzero(~np.isnan(values))
        return (int(steps[known[-1]]), float(values[known[-1]])) if known.size else None


class ColumnCollector(Collector):
    """Collects the values of lines in columns.

    Args:
      bounded: Whether long columns are thinned, so that the memory does not grow with the file.
    """

    def __init__(self, *, bounded: bool = False) -> None:
        super().__init__()
        self._bounded, self._left_out = bounded, False

    def column(self, columns: dict[K, Column], key: K) -> Column:
        """Returns the column of a key, which is kept unless the file has very many already."""
        if (column := columns.get(key)) is None:
            column = Column(bounded=self._bounded)
            self._left_out |= len(columns) >= MOST_COLUMNS
            if not self._left_out:
                columns[key] = column
        return column

    def faults(self) -> list[str]:
        left_out = f"metrics after the first {MOST_COLUMNS:,} are left out"
        return super().faults() + ([left_out] if self._left_out else [])


class MetricColumns(ColumnCollector):
    """The metrics of `metrics.jsonl`, by split and name."""

    def __init__(self, *, bounded: bool = False) -> None:
        super().__init__(bounded=bounded)
        self.columns: dict[tuple[str, str], Column] = {}

    def add(self, content: Mapping[str, Any]) -> None:
        if not is_metrics(content):
            self.invalid += 1
            return
        step, split = content["step"], content["split"]
        for name, value in content.items():
            if name not in NOT_METRICS and type(value) is not dict:
                self.column(self.columns, (split, name)).add(step, value)

    def names(self, split: str) -> list[str]:
        """Returns the names of the metrics of a split, in the order of their appearance."""
        return [name for of, name in self.columns if of == split]

    def of_split(self, split: str) -> dict[str, Column]:
        """Returns the metrics of a split by name, in the order of their appearance."""
        return {name: self.columns[split, name] for name in self.names(split)}

    def get(self, split: str, name: str) -> Column | None:
        """Returns a metric; None if there is none."""
        return self.columns.get((split, name))

    def by_step(self, split: str) -> dict[int, dict[str, float]]:
        """Returns the metrics of a split by step and name, without those that a step lacks."""
        found: dict[int, dict[str, float]] = {}
        for name, column in self.of_split(split).items():
            steps, values = column.by_step()
            for step, value in zip(steps.tolist(), values.tolist(), strict=True):
                found.setdefault(step, {})[name] = value
        return {step: found[step] for step in sorted(found)}

    def last_step(self) -> int:
        """Returns the last step of all lines; 0 without lines."""
        return max((column.last_step for column in self.columns.values()), default=0)


class EvaluatorColumns(MetricColumns):
    """The metrics of `metrics.evaluator.jsonl`, also by the trajectories of the states."""

    def __init__(self, *, bounded: bool = False) -> None:
        super().__init__(bounded=bounded)
        self.evaluations: dict[tuple[int, str], dict[str, float]] = {}
        """Step and trajectory of an evaluated state -> metrics."""

    def add(self, content: Mapping[str, Any]) -> None:
        super().add(content)
        if is_metrics(content) and content["split"] == Split.EVAL:
            key = content["step"], content.get(TRAJECTORY, "")
            self.evaluations[key] = metrics_of(content)


class PerformanceColumns(ColumnCollector):
    """The values of `performance.jsonl` by name, and the time of each line."""

    def __init__(self, *, bounded: bool = False) -> None:
        super().__init__(bounded=bounded)
        self.columns: dict[str, Column] = {}
        self.times = Column(bounded=bounded)

    def add(self, content: Mapping[str, Any]) -> None:
        step, time = content.get("step"), content.get("time")
        if type(step) is not int or step < 0 or not is_number(time):
            self.invalid += 1
            return
        self.times.add(step, float(time))
        for name, value in content.items():
            if name not in _NOT_PERFORMANCE and is_number(value):
                self.column(self.columns, name).add(step, value)


# -- Reduction of a long curve to few points, among them its extremes ------------------------------

_DIGITS = 6


def reduce_curve(x: ArrayLike, y: ArrayLike, most: int) -> tuple[list[float], list[float | None]]:
    """Returns at most `most` points of a curve, with the smallest and largest value of each part.

    The curve is divided into parts of equally many points. The smallest and the largest value of
    each part are kept, the first gap of a part, and the first and the last point of the curve.
    Libraries that do the same (`tsdownsample`) have no gaps.

    Args:
      x: Positions in ascending order, of shape (N,).
      y: Values, of shape (N,); NaN is a gap. In the result None is one.
      most: At least 8. A curve that has no more points keeps all of them. Values are rounded to 6
        digits, except for the first and the last one.
    """
    assert most >= 8, most
    positions, values = np.asarray(x), np.asarray(y, np.float64)
    count = len(values)
    chosen = list(range(count)) if count <= most else sorted(extremes(values, most))
    ends = (0, count - 1)
    return positions[chosen].tolist(), [
        None if math.isnan(value) else value if n in ends else _rounded(value)
        for n, value in zip(chosen, values[chosen].tolist(), strict=True)
    ]


def extremes(values: np.ndarray, most: int) -> set[int]:
    """Returns at most `most` indices of values of a long curve to keep; NaN is a gap."""
    count = len(values)
    kept = {0, count - 1}
    parts = (most - 2) // (3 if np.isnan(values).any() else 2)
    size, longer = divmod(count, parts)  # as np.array_split: the first parts have one more
    middle = longer * (size + 1)
    for first, end, width in ((0, middle, size + 1), (middle, count, size)):
        rows = values[first:end].reshape(-1, width)
        begins = np.arange(first, end, width)
        missing = np.isnan(rows)
        gaps, whole = missing.any(axis=1), ~missing.all(axis=1)
        kept.update((begins + missing.argmax(axis=1))[gaps].tolist())
        for argextreme, least in ((np.argmin, np.inf), (np.argmax, -np.inf)):
            found = begins + argextreme(np.where(missing, least, rows), axis=1)
            kept.update(found[whole].tolist())
    return kept


def mean_curve(x: ArrayLike, y: ArrayLike, parts: int) -> tuple[list[float], list[float]]:
    """Returns the mean of each part of a curve, at the part's mean position.

    Args:
      x: Positions in ascending order, of shape (N,).
      y: Values, of shape (N,); NaN is left out of the means.
      parts: The number of parts, of equally many points.
    """
    points = np.stack([np.asarray(x, np.float64), np.asarray(y, np.float64)], axis=1)
    points = points[~np.isnan(points[:, 1])]
    if not len(points):
        return [], []
    means = [part.mean(axis=0) for part in np.array_split(points, min(parts, len(points)))]
    return [round(float(m[0]), 1) for m in means], [_rounded(float(m[1])) for m in means]


def merge_means(rows: np.ndarray, size: int) -> np.ndarray:
    """Returns the means of groups of `size` neighboring rows; the last group may have fewer.

    Rows before and after have position, value and weight, in shape (rows, 3). The weight of a group
    is the sum of its weights.
    """
    if size == 1 or not len(rows):
        return rows
    return _grouped(rows, np.arange(len(rows)) // size)


def mean_curve_of_means(rows: np.ndarray, parts: int) -> tuple[list[float], list[float]]:
    """Returns the means of parts of a curve as `mean_curve` does, from means of shorter parts.

    Args:
      rows: Position, value and weight of the means, of shape (rows, 3).
      parts: The number of parts, of about equal weight.
    """
    if not len(rows):
        return [], []
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    before = np.cumsum(rows[:, 2]) - rows[:, 2]
    number = (before * min(parts, len(rows)) / rows[:, 2].sum()).astype(int)
    means = _grouped(rows, np.unique(number, return_inverse=True)[1])
    return [round(float(at), 1) for at in means[:, 0]], [_rounded(float(v)) for v in means[:, 1]]


def _grouped(rows: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Returns mean position, mean value and weight of each group of rows."""
    weight = np.bincount(groups, rows[:, 2])
    means = [np.bincount(groups, rows[:, n] * rows[:, 2]) / weight for n in (0, 1)]
    return np.stack([*means, weight], axis=1)


def _rounded(value: float) -> float:
    """Returns a value with 6 significant digits, which take half the space in the file."""
    return float(f"{value:.{_DIGITS}g}")


# -- The samples, images, histograms and tables that a run has logged, from `media.jsonl` ----------

_LARGEST_PICTURE = 2**22  # bytes
_PNG = b"\x89PNG\r\n\x1a\n"
_LONGEST_NAME = 200
LONGEST_TEXT = 4000
_MOST_ROWS = 50  # of a table
_MOST_COLUMNS = 100
_LONGEST_LIST = 10_001  # the rows of a table, the edges of bins
_MOST_ITEMS = 200


class MediaKind(enum.StrEnum):
    """The kinds of items."""

    IMAGE = "image"
    FIGURE = "figure"
    TEXT = "text"
    HISTOGRAM = "histogram"
    TABLE = "table"


@dataclass(frozen=True)
class MediaItem:
    """One item of `media.jsonl`.

    Attributes:
      split: Such as `eval`.
      name: The name that the run gave.
      file: The picture's path in the workdir, if it is an image or a figure.
      captions: The texts of the images in the picture, row by row.
      edges: The edges of a histogram's bins, one more than `counts`.
      columns: The titles of a table's columns.
      rows: The cells of the first rows of a table.
      row_count: The number of all its rows.
    """

    step: int
    split: str
    name: str
    kind: MediaKind
    file: str = ""
    captions: Sequence[str] = ()
    text: str = ""
    edges: Sequence[float] = ()
    counts: Sequence[float] = ()
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    row_count: int = 0


class MediaLog(Collector):
    """The items of `media.jsonl` in the order of the file; of very many, the last steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.items: list[MediaItem] = []
        self.dropped = 0
        """Number of older items that are left out."""

    def add(self, content: Mapping[str, Any]) -> None:
        try:
            self.items.append(_parse_item(content))
        except Malformed:
            self.invalid += 1
        if len(self.items) >= 2 * _MOST_ITEMS:
            kept = sorted(range(len(self.items)), key=lambda n: (self.items[n].step, n))
            self.dropped += len(kept) - _MOST_ITEMS
            self.items = [self.items[n] for n in sorted(kept[-_MOST_ITEMS:])]

    def newest(self) -> Sequence[MediaItem]:
        """Returns the items, the newest first. An item that was logged again counts once."""
        unique = {(x.step, x.split, x.name, n): x for n, x in _numbered(self.items)}
        return sorted(unique.values(), key=lambda item: -item.step)


def _numbered(items: Sequence[MediaItem]) -> list[tuple[int, MediaItem]]:
    """Returns each item with its number among the items of the same step, split and name.

    A step that is repeated after a restart logs the same items again, with the same files.
    """
    counts: dict[Any, int] = {}
    seen: dict[Any, int] = {}
    numbered = []
    for item in items:
        key = (item.step, item.split, item.name)
        if item.file and (key, item.file) in seen:
            numbered.append((seen[key, item.file], item))
            continue
        counts[key] = counts.get(key, -1) + 1
        if item.file:
            seen[key, item.file] = counts[key]
        numbered.append((counts[key], item))
    return numbered


def _parse_item(content: Mapping[str, Any]) -> MediaItem:
    """Returns the item of a line; raises `Malformed` if it is not valid."""
    step, kind = content.get("step"), content.get("kind")
    if type(step) is not int or step < 0 or kind not in tuple(MediaKind):
        raise Malformed("not an item")
    split, name = (foreign(content.get(key) or "", _LONGEST_NAME) for key in ("split", "name"))
    item: dict[str, Any] = {"step": step, "split": split, "name": name, "kind": MediaKind(kind)}
    match MediaKind(kind):
        case MediaKind.IMAGE | MediaKind.FIGURE:
            captions = [_cell(x) for x in _list(content.get("captions", []))]
            return MediaItem(**item, file=_inner_path(content.get("file")), captions=captions)
        case MediaKind.TEXT:
            return MediaItem(**item, text=_string(content.get("text"))[:LONGEST_TEXT])
        case MediaKind.HISTOGRAM:
            edges, counts = _numbers(content.get("edges")), _numbers(content.get("counts"))
            if len(edges) != len(counts) + 1 or not counts:
                raise Malformed("edges must be one more than counts")
            return MediaItem(**item, edges=edges, counts=counts)
        case MediaKind.TABLE:
            columns = [_cell(x) for x in _list(content.get("columns"), _MOST_COLUMNS)]
            rows = [[_cell(x) for x in _list(row)] for row in _list(content.get("rows"))]
            if any(len(row) != len(columns) for row in rows):
                raise Malformed("a row has another number of cells than there are columns")
            return MediaItem(**item, columns=columns, rows=rows[:_MOST_ROWS], row_count=len(rows))


def _list(value: Any, most: int = _LONGEST_LIST) -> list[Any]:
    if not isinstance(value, list):
        raise Malformed("not a list")
    if len(value) > most:
        raise Malformed(f"a list of {len(value):,} entries, more than {most:,}")
    return value


def _numbers(value: Any) -> list[float]:
    numbers = _list(value)
    if not all(is_number(x) for x in numbers):
        raise Malformed("not numbers")
    return numbers


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise Malformed("not a text")
    return value


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return foreign("" if value is None else value, _LONGEST_NAME)


def _inner_path(value: Any) -> str:
    """Returns the path of a file below `media/`; raises `Malformed` if it leads elsewhere."""
    path = PurePosixPath(_string(value))
    parts = path.parts
    if "\0" in str(path) or path.is_absolute() or ".." in parts or parts[:1] != ("media",):
        raise Malformed("not a file below media/")
    if len(parts) < 2:
        raise Malformed("not a file below media/")
    return str(path)


def read_picture(folder: epath.Path, file: str) -> tuple[bytes, MediaType]:
    """Returns the content and the type of a picture, whose path is relative to the workdir.

    A link is not followed, because another user may have written the workdir, and the page may be
    given away. Raises `UserError` if the file cannot be read, or is neither PNG nor SVG.
    """
    try:
        if is_url(folder):
            content = read_bytes(folder / file, _LARGEST_PICTURE)
        else:
            content = no_follow.read_file(folder, file, _LARGEST_PICTURE)
    except UserError:
        raise
    except failures(folder) as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    if content.startswith(_PNG):
        return content, MediaType.PNG
    if file.endswith(".svg") and b"<svg" in content[:4096]:
        return content, MediaType.SVG
    raise UserError(f"{file} is neither a PNG nor an SVG file")

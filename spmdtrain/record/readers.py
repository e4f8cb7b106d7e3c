"""Readers of the growing files of a run: starts, metrics and media."""

import bisect
import enum
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any, TypeAlias, TypeGuard, TypeVar

import numpy as np
from etils import epath

from spmdtrain.document.blocks import MediaType
from spmdtrain.errors import StorageError, UserError, foreign
from spmdtrain.record import no_follow
from spmdtrain.record.run_files import FIELDS, NOT_METRICS, is_metrics
from spmdtrain.record.storage import failures, file_system, is_url, one_line
from spmdtrain.record.validation import (
    LARGEST,
    LARGEST_LOG,
    Malformed,
    OtherFields,
    check_fields,
    parse_object,
    parse_objects,
    read_bytes,
)

# -- Incremental reading of the growing files of a run ---------------------------------------------

OnBytes = Callable[[int], None]
PIECE = 2**24
"""The most bytes that one reading returns; a longer line cannot be read."""
_TAIL = 2**12  # bytes, several lines
_TOGETHER = 2**10  # lines that are decoded at once


@dataclass(frozen=True)
class FileState:
    """Identity, size in bytes and time of a file. At least one of them changes if the file does."""

    inode: int
    """For an object at a URL its generation, which each upload changes."""
    size: int
    time: int


def file_state(path: epath.Path) -> FileState | None:
    """Returns the state of a local file or an object at a URL; None if there is none.

    Raises `StorageError` if it cannot be accessed.
    """
    try:
        if is_url(path):
            found = file_system(str(path)).info(str(path))
            return FileState(int(found.get("generation") or 0), found["size"] or 0, 0)
        local = os.stat(path)
        return FileState(local.st_ino, local.st_size, local.st_mtime_ns)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except failures(path) as error:
        raise StorageError(f"{path} cannot be read: {one_line(error)}") from error


class GrowingFile:
    """A file of lines that another process appends to. It need not exist.

    A run that resumes replaces its `metrics.jsonl`: then all lines are read again. At a URL each
    upload replaces the object. Since lines are only cut off at the end and appended, the new object
    continues the old one if the last bytes that were read are unchanged.
    """

    def __init__(self, path: epath.Path) -> None:
        self.path = path
        self.fault = ""
        """Why the file cannot be read; empty if it can."""
        self._state: FileState | None = None
        self._read = 0  # bytes of the complete lines that were returned
        self._tail = b""  # the last of them, of an object at a URL

    def unread(self) -> int:
        """Returns the number of bytes that the next reading will process."""
        state = file_state(self.path)
        if state is None or state == self._state:
            return 0
        return state.size - (self._read if self._continues(state) else 0)

    def _continues(self, state: FileState) -> bool:
        old = self._state
        if old is None or state.size < self._read:
            return False
        return is_url(self.path) or state.inode == old.inode

    def read(self) -> tuple[bool, Sequence[bytes]] | None:
        """Reads complete lines that are new, at most 16 MB, so call it until None.

        Returns:
          Whether the file was replaced, so that earlier lines no longer count, and the lines; None
            if nothing is left to read.

        Raises:
          StorageError: If the file cannot be accessed.
        """
        state = file_state(self.path)
        if state == self._state:
            return None
        replaced = not (state is not None and self._continues(state))
        start, tail = (0, b"") if replaced else (self._read, self._tail)
        content, fault = b"", ""
        try:
            if state is not None:
                first, count = start - len(tail), len(tail) + PIECE
                content = read_bytes(self.path, LARGEST_LOG, first, count)
        except Malformed as error:
            fault = str(error)
        except FileNotFoundError:
            state, replaced, start, tail = None, True, 0, b""
        except failures(self.path) as error:
            raise StorageError(f"{self.path} cannot be read: {one_line(error)}") from error
        if not fault and not content.startswith(tail):
            self._state = None
            return self.read()
        content = content[len(tail) :]
        end = content.rfind(b"\n") + 1
        if state is not None and start + len(content) < state.size and not fault:
            if end:
                state = replace(state, size=start + end)  # differs until the last piece is read
            elif len(content) == PIECE:
                fault = f"{self.path} has a line of more than {PIECE:,} bytes"
        # Only now, so that after an error the next reading has the same lines.
        self._state, self._read, self.fault = state, start + end, fault
        if is_url(self.path):
            self._tail = (tail + content[:end])[-_TAIL:]
        return replaced, content[:end].split(b"\n")[:-1]


def take_objects(
    lines: Sequence[bytes], take: Callable[[Mapping[str, Any]], None], on_bytes: OnBytes
) -> None:
    """Passes the JSON object of each line to a function, and the progress to another one.

    Args:
      take: Receives each object; `{}` for a line that is not one.
      on_bytes: Receives the number of bytes since its last call.
    """
    for first in range(0, len(lines), _TOGETHER):
        some = lines[first : first + _TOGETHER]
        for content in parse_objects(some):
            take(content)
        on_bytes(sum(map(len, some)) + len(some))


def read_object(path: epath.Path) -> tuple[dict[str, Any] | None, str]:
    """Reads a JSON object; returns it and what is wrong with it, if anything.

    The object is None if the file is missing or not valid. Raises `StorageError` if it cannot be
    accessed.
    """
    try:
        content = parse_object(read_bytes(path, LARGEST))
    except (FileNotFoundError, NotADirectoryError):
        return None, ""
    except UserError as error:
        return None, f"{path.name}: {error}"
    except failures(path) as error:
        raise StorageError(f"{path} cannot be read: {one_line(error)}") from error
    try:
        check_fields(content, FIELDS[path.name])
    except OtherFields as error:
        return content, f"{path.name}: {error}"
    return content, ""


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
    """

    time: float
    step: int
    processes: int | None = None
    readings: list[Reading] = field(default_factory=list)
    last_time: float = 0.0
    last_step: int = 0
    status: str = ""
    reason: str = ""

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


class EventLog:
    """The events of a run."""

    def __init__(self) -> None:
        self.starts: list[RunStart] = []
        self.invalid = 0

    def add(self, content: Mapping[str, Any]) -> None:
        """Adds the object of a line of `events.jsonl`; counts it as invalid if it is not one."""
        time, event = content.get("time"), content.get("event")
        if not is_number(time) or not isinstance(event, str):
            self.invalid += 1
            return
        step = content.get("step")
        number = step if type(step) is int and step >= 0 else None
        if event == "start":
            at = number or 0
            processes = _count(content, "processes")
            self.starts.append(RunStart(time, at, processes, last_time=time, last_step=at))
            return
        if not self.starts:
            self.invalid += 1
            return
        start = self.starts[-1]
        start.last_time = max(start.last_time, time)
        start.last_step = max(start.last_step, number or 0)
        if event == "phases":
            seconds = {k: v for k, v in numbers_of(content, "seconds").items() if v >= 0}
            start.readings.append(Reading(time, number or start.last_step, seconds))
        elif event == "end":
            start.status = foreign(content.get("status") or "ended", 40)
            start.reason = foreign(content.get("reason") or "", _LONGEST_REASON)

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


def _count(content: Mapping[str, Any], name: str) -> int | None:
    value = content.get(name)
    return value if type(value) is int and value > 0 else None


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


# -- Reduction of a long curve to few points, among them its extremes ------------------------------

_DIGITS = 6


def reduce_curve(
    x: Sequence[float], y: Sequence[float | None], most: int
) -> tuple[list[float], list[float | None]]:
    """Returns at most `most` points of a curve, with the smallest and largest value of each part.

    The curve is divided into parts of equally many points. The smallest and the largest value of
    each part are kept, the first gap of a part, and the first and the last point of the curve.
    Libraries that do the same (`tsdownsample`) have no gaps.

    Args:
      x: Positions in ascending order.
      y: Values; None is a gap.
      most: At least 8. A curve that has no more points keeps all of them. Values are rounded to 6
        digits, except for the first and the last one.
    """
    assert most >= 8, most
    count = len(x)
    kept = set(range(count)) if count <= most else extremes(y, most)
    ends = (0, count - 1)
    chosen = sorted(kept)
    values = [y[n] for n in chosen]
    return [x[n] for n in chosen], [
        value if value is None or n in ends else _rounded(value)
        for n, value in zip(chosen, values, strict=True)
    ]


def extremes(y: Sequence[float | None], most: int) -> set[int]:
    """Returns at most `most` indices of values of a long curve to keep; None in `y` is a gap."""
    values = np.array([math.nan if value is None else value for value in y], dtype=np.float64)
    kept = {0, len(y) - 1}
    parts = (most - 2) // (3 if np.isnan(values).any() else 2)
    size, longer = divmod(len(y), parts)  # as np.array_split: the first parts have one more
    middle = longer * (size + 1)
    for first, end, width in ((0, middle, size + 1), (middle, len(y), size)):
        rows = values[first:end].reshape(-1, width)
        begins = np.arange(first, end, width)
        missing = np.isnan(rows)
        gaps, whole = missing.any(axis=1), ~missing.all(axis=1)
        kept.update((begins + missing.argmax(axis=1))[gaps].tolist())
        for argextreme, least in ((np.argmin, np.inf), (np.argmax, -np.inf)):
            found = begins + argextreme(np.where(missing, least, rows), axis=1)
            kept.update(found[whole].tolist())
    return kept


def mean_curve(
    x: Sequence[float], y: Sequence[float | None], parts: int
) -> tuple[list[float], list[float]]:
    """Returns the mean of each part of a curve, at the part's mean position.

    Args:
      x: Positions in ascending order.
      y: Values; None is left out of the means.
      parts: The number of parts, of equally many points.
    """
    found = [(at, value) for at, value in zip(x, y, strict=True) if value is not None]
    if not found:
        return [], []
    points = np.array(found, dtype=np.float64)
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


@dataclass
class MediaLog:
    """The items of `media.jsonl` in the order of the file; of very many, the last steps only.

    Attributes:
      invalid: Number of lines that are not valid.
      dropped: Number of older items that are left out.
    """

    items: list[MediaItem] = field(default_factory=list)
    invalid: int = 0
    dropped: int = 0

    def add(self, content: Mapping[str, Any]) -> None:
        """Adds the object of a line; counts it as invalid if it is not an item."""
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

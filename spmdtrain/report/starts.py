"""The starts of a run and the uses of their time, from `events.jsonl`."""

import bisect
import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spmdtrain.errors import foreign
from spmdtrain.report.metric_columns import is_number, numbers_of

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

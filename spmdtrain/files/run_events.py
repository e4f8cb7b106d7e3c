"""The file `events.jsonl`: the starts of a run, its seconds by phase, and how each start ended."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, TypedDict

from etils import epath

from spmdtrain.errors import StorageError, UserError
from spmdtrain.files.storage import failures, folder_of, one_line
from spmdtrain.files.validation import (
    LARGEST_LOG,
    Malformed,
    check,
    parse_object,
    read_bytes,
    without_other_fields,
)

EVENTS_FILE = "events.jsonl"
_STEP = "step"  # the phase whose time is productive


class RunEvent(TypedDict):
    """A line of `events.jsonl`. `time` is in seconds since the epoch."""

    time: float
    event: Literal["start", "phases", "checkpoint", "evaluation", "fault", "end"]
    step: NotRequired[int]
    processes: NotRequired[int]
    devices: NotRequired[int]
    seconds: NotRequired[dict[str, float]]
    status: NotRequired[str]
    reason: NotRequired[str]


def read_events(workdir: str) -> list[RunEvent]:
    """Returns the events of a run in the order of the file; none if there is no file.

    Lines that are not valid are left out, because a kill may have cut off any start's last line.

    Raises:
      StorageError: If the file cannot be read.
      UserError: If it is not a regular file.
    """
    path = folder_of(workdir) / EVENTS_FILE
    try:
        lines = read_bytes(path, LARGEST_LOG).split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    except UserError:
        raise
    except failures(path) as error:
        raise StorageError(f"{path} cannot be read: {one_line(error)}") from error
    events = [_parsed(epath.Path(path).name, line) for line in lines]
    return [event for event in events if event is not None]


def _parsed(name: str, line: bytes) -> RunEvent | None:
    try:
        content: Any = without_other_fields(parse_object(line), RunEvent)
        check(content, RunEvent, name)
    except Malformed:
        return None
    numbers = [content["time"], content.get("step", 0), *content.get("seconds", {}).values()]
    valid = all(math.isfinite(number) and number >= 0 for number in numbers)
    return content if valid else None


@dataclass
class _Start:
    """One start of a run.

    Attributes:
      began: When it began, in seconds since the epoch.
      first: The step at which it began.
      last: When it wrote its last line, in seconds since the epoch.
      points: Steps and the seconds of phase "step" up to each, in order.
      seconds: Seconds by phase.
    """

    began: float
    first: int
    last: float
    points: list[tuple[int, float]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def seconds_until(self, step: int) -> float:
        """Returns the seconds of phase "step" up to a step, interpolated between the points."""
        before_step, before = self.first, 0.0
        for at, seconds in self.points:
            if at >= step:
                share = (step - before_step) / max(1, at - before_step)
                return before + max(0.0, min(share, 1.0)) * max(0.0, seconds - before)
            before_step, before = at, max(before, seconds)
        return before


@dataclass(frozen=True)
class RunTimes:
    """Seconds of a run by use, over all of its starts.

    Attributes:
      wall: Seconds since the first start.
      productive: Seconds of steps that count: each step once.
      lost: Seconds of everything else by kind: the phases, "repeated" for steps that were run again
        after a restart, "down" for the time between two starts.
    """

    wall: float
    productive: float
    lost: dict[str, float]

    @property
    def goodput(self) -> float:
        """The productive share of the time, from 0 to 1."""
        return max(0.0, min(self.productive / self.wall, 1.0)) if self.wall > 0 else 0.0


def last_step(events: list[RunEvent]) -> int:
    """Returns the last step that a start is known to have reached."""
    reached = [e.get("step", 0) for e in events if e["event"] in ("start", "phases")]
    return max(reached, default=0)


def run_times(events: list[RunEvent], now: float | None = None, done: int = 0) -> RunTimes:
    """Returns the seconds of a run by use.

    A start that was killed has no line "end": it counts up to its last line, and the time from then
    to the next start is "down".

    Args:
      events: The events of all starts.
      now: The end of the time that counts, in seconds since the epoch; by default the last event.
      done: The last step that was run before these events.
    """
    starts: list[_Start] = []
    for event in events:
        if event["event"] == "start":
            starts.append(_Start(event["time"], event.get("step", 0), event["time"]))
        elif starts:
            start = starts[-1]
            start.last = max(start.last, event["time"])
            if event["event"] == "phases":
                start.seconds = event.get("seconds", {})
                start.points.append((event.get("step", 0), start.seconds.get(_STEP, 0.0)))
    if not starts:
        return RunTimes(0.0, 0.0, {})
    productive, lost = 0.0, dict[str, float]()
    for number, start in enumerate(starts):
        spent = start.seconds.get(_STEP, 0.0)
        repeated = start.seconds_until(done) if done > start.first else 0.0
        productive += max(0.0, spent - repeated)
        until = starts[number + 1].began if number + 1 < len(starts) else start.last
        parts = {k: x for k, x in start.seconds.items() if k != _STEP}
        parts |= {"repeated": repeated, "down": max(0.0, until - start.last)}
        for kind, seconds in parts.items():
            lost[kind] = lost.get(kind, 0.0) + seconds
        done = max([done, start.first, *(step for step, _ in start.points)])
    end = starts[-1].last if now is None else now
    return RunTimes(max(0.0, end - starts[0].began), productive, lost)

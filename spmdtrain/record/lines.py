"""Files of JSON lines of a run: their writer, events, and hashes of the state."""

import contextlib
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict, cast

from etils import epath

from spmdtrain.errors import StorageError
from spmdtrain.record import no_follow
from spmdtrain.record.changing_files import Collector
from spmdtrain.record.storage import failures, one_line
from spmdtrain.record.validation import (
    LARGEST_LOG,
    Malformed,
    check,
    is_number,
    read_bytes,
    without_other_fields,
)

# -- Files of JSON lines that grow during a run ----------------------------------------------------

_KEPT_OPEN = 1.0  # seconds


def finite_or_null(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Returns metrics for JSON, which has no NaN and no infinity: None instead."""
    return {name: x if math.isfinite(x) else None for name, x in metrics.items()}


@contextlib.contextmanager
def errors_of_writing(path: epath.Path) -> Iterator[None]:
    """Raises errors of writing a file as `StorageError`."""
    try:
        yield
    except StorageError:
        raise
    except failures(path) as error:
        raise StorageError(f"{path} cannot be written: {one_line(error)}") from error


class LinesFile:
    """A file to which complete lines are appended, also over several starts of a run.

    A line is written at once, without a buffer, so that no line is lost if the process is killed.
    The file is closed after each line, because a network file system may report errors and show
    lines to others only then. It stays open while lines follow within a second: opening it again
    would take most of the time of a line.

    Args:
      local: The local folder of the file, which may not exist yet.
      name: The name of the file.
      workdir: The folder of the run. If it is a URL, an earlier content is copied from there first.
      check_lock: Raises if another run may be writing to the folder: its file would be truncated.

    Raises:
      UserError: If it is not a regular file.
      Exception: If an earlier content cannot be read (see `failures`).
    """

    def __init__(
        self, local: Path, name: str, workdir: epath.Path, check_lock: Callable[[], None]
    ) -> None:
        self._folder, self._name, self._check_lock = local, name, check_lock
        self._path, self._local_path = workdir / name, os.path.join(local, name)
        self._file: int | None = None
        self._appended_at = -_KEPT_OPEN
        before = b""
        with contextlib.suppress(FileNotFoundError):
            before = read_bytes(self._path, LARGEST_LOG)
            if epath.Path(local) != workdir:
                (local / name).write_bytes(before)
        self._complete = before.rfind(b"\n") + 1  # bytes of the complete lines

    def read(self) -> list[bytes]:
        """Returns the complete lines, without line feeds."""
        try:
            return read_bytes(epath.Path(self._local_path), LARGEST_LOG).split(b"\n")[:-1]
        except FileNotFoundError:
            return []

    def append(self, content: Mapping[str, Any]) -> None:
        """Appends a line with JSON values.

        Raises `StorageError` if it cannot be written, or if the lock of the folder is lost. The
        next call removes the part that was written.
        """
        line = json.dumps(content).encode() + b"\n"
        before, self._appended_at = self._appended_at, time.monotonic()
        with errors_of_writing(self._path):
            try:
                left, file = memoryview(line), self._open()
                while left:
                    left = left[os.write(file, left) :]
            except BaseException:
                self.close()
                raise
            self._complete += len(line)
            if self._appended_at - before >= _KEPT_OPEN:
                self.close()

    def _open(self) -> int:
        """Returns the open file, which is opened again if it was removed or replaced.

        Removes an incomplete line, which a kill or a full disk may leave.
        """
        if self._file is not None:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.lstat(self._local_path), os.fstat(self._file)):
                    return self._file
        self.close()
        self._check_lock()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._file = file = no_follow.open_file(self._folder, self._name, flags)
        self._complete = min(self._complete, os.fstat(file).st_size)
        os.ftruncate(file, self._complete)
        return file

    def replace(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Replaces all lines; raises `StorageError` as `append` does."""
        self._check_lock()
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        self.close()
        with errors_of_writing(self._path):
            no_follow.write(self._folder, self._name, lambda file: file.write(content))
        self._complete = len(content)

    def close(self) -> None:
        """Closes the file until the next line."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


# -- The file `events.jsonl`: the starts of a run, its seconds by phase, and how each start ended

EVENTS_FILE = "events.jsonl"
EVENT_KINDS = (
    *("start", "phases", "checkpoint", "snapshot", "evaluation", "fault", "skipped", "slow", "end"),
)
_STEP = "step"  # the phase whose time is productive
_MADE = ("start", "phases", "checkpoint", "snapshot", "evaluation")  # events after their step


class RunEvent(TypedDict):
    """A line of `events.jsonl`.

    `time` is in seconds since the epoch. A start says

    - in `source` where its state came from: "checkpoint", "snapshot" (the memory of its own hosts),
      "partner" (in part the memory of another host), "fork" or "initial"; absent if a `Trainer`
      continues with the state that it has
    - in `change` whether it has fewer processes than the start before, a "loss", or more, a
      "rejoin"
    - in `lost_steps` how many steps of the start before it makes again, and in `lost_seconds` the
      seconds from the last step of that start until the state was there, as far as it is known

    An event "slow" has the `process` that the others wait for, the `share` of a step, from 0 to 1,
    and the `cause`; with 0 they no longer wait for it. An end with the status "rewound" has the
    batches that the run leaves out from then on.
    """

    time: float
    event: Literal[
        "start", "phases", "checkpoint", "snapshot", "evaluation", "fault", "skipped", "slow", "end"
    ]
    step: NotRequired[int]
    source: NotRequired[str]
    processes: NotRequired[int]
    devices: NotRequired[int]
    change: NotRequired[str]
    lost_steps: NotRequired[int]
    lost_seconds: NotRequired[float]
    seconds: NotRequired[dict[str, float]]
    status: NotRequired[str]
    reason: NotRequired[str]
    process: NotRequired[str]
    share: NotRequired[float]
    cause: NotRequired[str]
    skip_steps: NotRequired[list[str]]


def parse_event(content: Mapping[str, Any]) -> RunEvent:
    """Returns the event of a line, without the fields that only other versions know.

    It is not checked by a schema, because that takes 100 us per line, and a run can have 100,000.

    Raises:
      Malformed: If it is not valid.
    """
    event = without_other_fields(content, RunEvent)
    seconds = event.get("seconds", {})
    numbers = [event.get("time"), event.get("share", 0.0), event.get("lost_seconds", 0.0)]
    numbers += [*(seconds.values() if isinstance(seconds, dict) else [None])]
    counts = [event.get(name, 0) for name in ("step", "processes", "devices", "lost_steps")]
    names = ("status", "reason", "source", "change", "process", "cause")
    texts = [event.get(name, "") for name in names]
    left_out = event.get("skip_steps", [])
    texts += left_out if isinstance(left_out, list) else [None]
    if (
        event.get("event") not in EVENT_KINDS
        or not all(is_number(number) and number >= 0 for number in numbers)
        or not all(type(count) is int and count >= 0 for count in counts)
        or not all(type(text) is str for text in texts)
    ):
        raise Malformed("not an event")
    return cast(RunEvent, event)


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


LONG = 60.0
"""Seconds of a run whose goodput says more than that it has started."""


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

    @property
    def is_meaningful(self) -> bool:
        """Whether the goodput says something: of a long run, or of several starts."""
        return self.wall >= LONG or self.lost.get("down", 0.0) > 0


def last_step(events: Sequence[RunEvent]) -> int:
    """Returns the last step that a start is known to have reached."""
    reached = [e.get("step", 0) for e in events if e["event"] in ("start", "phases")]
    return max(reached, default=0)


def what_is_lost(
    events: Sequence[RunEvent], start: RunEvent, now: float, logged: tuple[int, float] | None
) -> RunEvent:
    """Completes the event of a start by what it has lost of the start before.

    Args:
      events: The events of earlier starts.
      start: The event, with its step and number of processes.
      now: When its state was there, in seconds since the epoch.
      logged: The last step of a line of training of an earlier start, and its time; None if there
        is none.

    Returns:
      The event with `change`, `lost_steps` and `lost_seconds`, as far as they apply.
    """
    starts = [number for number, event in enumerate(events) if event["event"] == "start"]
    if not starts:
        return start
    own = events[starts[-1] :]
    before, processes = own[0].get("processes", 0), start.get("processes", 0)
    if before and processes != before:
        start = start | {"change": "loss" if processes < before else "rejoin"}
    # The step of a fault or of an end is one that was not made.
    reached = [(e["step"], e["time"]) for e in own if "step" in e and e["event"] in _MADE]
    if logged is not None and logged[1] >= own[0]["time"]:
        reached.append(logged)
    if reached:
        step, at = max(reached, key=lambda found: (found[0], -found[1]))
        start = start | {"lost_steps": max(0, step - start.get("step", 0))}
        if own[-1].get("status") != "finished":
            start = start | {"lost_seconds": round(max(0.0, now - at), 3)}
    return start


def run_times(events: Sequence[RunEvent], now: float | None = None, done: int = 0) -> RunTimes:
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


# -- The file `hashes.jsonl`: hashes of the state after some steps of a run ------------------------

HASHES_FILE = "hashes.jsonl"


@dataclass(frozen=True)
class StateHash:
    """A hash of the state after a step.

    Attributes:
      sums: The checksum of each array by its path, in the order of the state.
      loss: The loss before the step's update; None if it is not known.
    """

    step: int
    sums: Mapping[str, str] = field(default_factory=dict)
    loss: float | None = None

    @property
    def hash(self) -> str:
        return hash_of_sums(self.sums)

    def to_json(self) -> dict[str, Any]:
        """Returns the line of the file."""
        known = {} if self.loss is None else {"loss": self.loss}
        return {"step": self.step, "hash": self.hash} | known | {"arrays": dict(self.sums)}


@dataclass(frozen=True)
class ResumedAt:
    """The step from which a later start has resumed: hashes of later steps are void.

    It is -1 for a start that continues nothing.
    """

    step: int

    def to_json(self) -> dict[str, Any]:
        """Returns the line of the file."""
        return {"resumed": self.step}


def hash_of_sums(sums: Mapping[str, str]) -> str:
    """Returns the hash of a state as 16 hexadecimal digits, which does not depend on its sharding.

    It is the beginning of the SHA-256 of the paths and the checksums of all arrays, in any order.
    """
    return hashlib.sha256(json.dumps(dict(sums), sort_keys=True).encode()).hexdigest()[:16]


class _Line(TypedDict):
    """A line of the file with a hash."""

    step: int
    hash: str
    loss: NotRequired[float]
    arrays: dict[str, str]


class _ResumedLine(TypedDict):
    """A line of the file with the step of a resume."""

    resumed: int


class HashLog(Collector):
    """The hashes of a run by step.

    The file has the lines of all starts. The line of a resume voids earlier lines with later steps,
    because another trajectory has replaced these states.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_step: dict[int, StateHash] = {}
        """Ascending by step."""

    def add(self, content: Mapping[str, Any]) -> None:
        try:
            line = _parsed_hash(content)
        except Malformed:
            self.invalid += 1
            return
        last = line.step if isinstance(line, ResumedAt) else line.step - 1
        while self.by_step and next(reversed(self.by_step)) > last:
            self.by_step.popitem()
        if isinstance(line, StateHash):
            self.by_step[line.step] = line


def _parsed_hash(content: Mapping[str, Any]) -> StateHash | ResumedAt:
    """Returns what a line says; raises `Malformed` if it is not valid."""
    if "resumed" in content:
        check(without_other_fields(content, _ResumedLine), _ResumedLine, HASHES_FILE)
        return ResumedAt(content["resumed"])
    check(without_other_fields(content, _Line), _Line, HASHES_FILE)
    return StateHash(content["step"], content["arrays"], content.get("loss"))


# -- The file `watch.jsonl`: statistics of layers and gradients before some steps of a run ---------

WATCH_FILE = "watch.jsonl"
WATCH_EXPONENTS = range(-40, 21)
_POWERS = [2.0**exponent for exponent in WATCH_EXPONENTS]
_LARGEST = 3.4028234663852886e38  # of float32
WATCH_EDGES = (-_LARGEST, *(-power for power in reversed(_POWERS)), *_POWERS, _LARGEST)
"""The edges of all histograms: powers of two, of both signs."""
_MOST_WATCHED = 256  # steps of a bounded log
_NUMBERS = ("norm", "mean", "std", "min", "max", "zeros", "nonfinite")


class Statistics(TypedDict):
    """The statistics of an array; those but `size`, `zeros` and `nonfinite` of its finite values.

    Attributes:
      size: The number of its elements.
      norm: The L2 norm. As `mean`, `std`, `min` and `max`, None without a finite value.
      zeros: The share of zeros, from 0 to 1.
      nonfinite: The share of NaN and infinite values.
      edges: The edges of the bins of a histogram: those of `WATCH_EDGES` around the values.
      counts: The number of values in each bin.
    """

    size: int
    norm: float | None
    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    zeros: float | None
    nonfinite: float | None
    edges: list[float]
    counts: list[int]


class WatchedStep(TypedDict):
    """A line of the file.

    Attributes:
      outputs: The statistics of outputs by layer, in the order in which they are computed; those of
        a layer in a loop by `LAYER[3]`.
      gradients: The statistics of gradients by parameter.
    """

    step: int
    outputs: dict[str, Statistics]
    gradients: dict[str, Statistics]


def watch_line(watched: WatchedStep) -> dict[str, Any]:
    """Returns the line of a step. In place of edges it has the number of the first bin."""

    def short(statistics: Statistics) -> dict[str, Any]:
        edges = statistics["edges"]
        first = WATCH_EDGES.index(edges[0]) if edges else 0
        return {n: x for n, x in statistics.items() if n != "edges"} | {"first": first}

    outputs, gradients = (
        {name: short(statistics) for name, statistics in of.items()}
        for of in (watched["outputs"], watched["gradients"])
    )
    times = {"step": watched["step"], "time": time.time()}
    return {**times, "outputs": outputs, "gradients": gradients}


class WatchLog(Collector):
    """The watched steps of a run. Of several lines of a step, the newest counts.

    Args:
      bounded: Whether to leave out histograms, and every second step if there are many.
    """

    def __init__(self, *, bounded: bool = False) -> None:
        super().__init__()
        self._bounded, self._every, self._seen = bounded, 1, 0
        self.by_step: dict[int, WatchedStep] = {}

    def add(self, content: Mapping[str, Any]) -> None:
        try:
            step, outputs, gradients = (content.get(x) for x in ("step", "outputs", "gradients"))
            if type(step) is not int or step < 0:
                raise Malformed("no step")
            watched: WatchedStep = {
                "step": step,
                "outputs": self._parsed(outputs),
                "gradients": self._parsed(gradients),
            }
        except Malformed:
            self.invalid += 1
            return
        self._seen += 1
        if self._seen % self._every == 0:
            self.by_step[step] = watched
        if self._bounded and len(self.by_step) > _MOST_WATCHED:
            self._every *= 2
            for step in sorted(self.by_step)[1::2]:
                del self.by_step[step]

    def _parsed(self, found: Any) -> dict[str, Statistics]:
        """Returns the statistics by name; not by `check`, which takes a minute for a long file."""
        if not isinstance(found, dict):
            raise Malformed("no statistics")
        parsed: dict[str, Statistics] = {}
        for name, each in found.items():
            if not isinstance(each, dict):
                raise Malformed("no statistics")
            numbers = {key: each.get(key) for key in _NUMBERS}
            size: Any = each.get("size")
            first: Any = each.get("first")
            counts: Any = each.get("counts")
            is_valid = type(size) is int and type(first) is int and isinstance(counts, list)
            if not is_valid or not all(x is None or is_number(x) for x in numbers.values()):
                raise Malformed("no statistics")
            end = first + len(counts) + 1
            if first < 0 or end > len(WATCH_EDGES) or any(type(x) is not int for x in counts):
                raise Malformed("no histogram")
            edges = list(WATCH_EDGES[first:end]) if counts else []
            if self._bounded:
                edges, counts = [], []
            known = {"size": size, **numbers, "edges": edges, "counts": counts}
            parsed[name] = cast(Statistics, known)
        return parsed

"""Slow processes of a job: the one that the others wait for, and what it does meanwhile.

In a synchronous job all steps take equally long in all processes. What differs is who waits: a
process that the others wait for spends its time otherwise. Each process publishes what it does in
a step, and process 0 compares them.
"""

import contextlib
import itertools
import json
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low
from typing import Literal, NamedTuple, TypeVar

import jax
import numpy as np

from spmdtrain.distributed import process_group
from spmdtrain.distributed.process_group import KEY, Job
from spmdtrain.distributed.progress import Interval, PhaseClock

T = TypeVar("T")

# -- What a process does in a step -----------------------------------------------------------------

_PARTS = 5  # of a window


class Pace(NamedTuple):
    """The seconds that a process spends on the parts of a step; means over some steps.

    Attributes:
      step: The whole step.
      load: Waits for a batch.
      host: Runs callbacks, the logging, the user's loop.
      dispatch: Dispatches the step.
      wait: Waits for the output of a step.
      paused: The process did not run at all, whatever it did.
    """

    step: float
    load: float
    host: float
    dispatch: float
    wait: float
    paused: float


def paces_of(intervals: Sequence[Interval], paused: float) -> list[Pace] | None:
    """Returns the pace of a process in each part of a window; None if a part has no steps.

    Args:
      intervals: What the thread that trains did, in the order of time.
      paused: The share of the window in which the process did not run, from 0 to 1. It counts in
        all parts, because a process may be stopped for longer than a part takes.
    """
    paces = []
    for own in _parts(intervals):
        if not (steps := sum(x.steps for x in own)):
            return None
        load, host, step, wait = (sum(x[n] for x in own) / steps for n in range(4))
        whole = load + host + step
        paces.append(Pace(whole, load, host, max(0.0, step - wait), wait, paused * whole))
    return paces


def _parts(items: Sequence[T]) -> list[Sequence[T]]:
    ends = [len(items) * n // _PARTS for n in range(_PARTS + 1)]
    return [items[a:b] for a, b in itertools.pairwise(ends)]


# -- The process that the others wait for, by the paces of all -------------------------------------

Cause = Literal["load", "host", "dispatch", "paused", "device"]


@dataclass(frozen=True)
class Delay:
    """The time for which the others wait for a process in a step.

    Attributes:
      seconds: How long they wait, in seconds of a step; 0 if they do not.
      step: Duration of the step in seconds.
      cause: What the process does most of that time.
      part: The part of that time for which it does so, from 0 to 1.
    """

    seconds: float
    step: float
    cause: Cause
    part: float

    @property
    def share(self) -> float:
        """The share of the step, from 0 to 1."""
        return min(self.seconds / self.step, 1.0) if self.step > 0 else 0.0

    def __str__(self) -> str:
        taken = f"{_duration(self.seconds)} of each {_duration(self.step)} step"
        if self.cause == "paused":
            return f"it is stopped or throttled by the system for {taken}"
        return f"{self.part:.0%}".replace("%", " %") + f" in {self.cause}, {taken}"


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def delays(
    paces: Sequence[Pace], usual_paces: Sequence[Pace], *, computes_on_host: bool
) -> list[Delay]:
    """Returns by how much each process delays the others.

    A process delays the others by what it does longer than the median of all processes, without
    the time for which it waits for steps itself: as long as it does, its devices have work.

    Args:
      paces: Of the same steps, by rank.
      usual_paces: The same, or others that the processes are compared with.
      computes_on_host: Whether the devices are processors of the host, so that a process that does
        not run computes nothing.
    """
    step = median(pace.step for pace in paces)
    usual = Pace(*map(median_low, zip(*usual_paces, strict=True)))
    busy = median_low([pace.load + pace.host for pace in usual_paces])
    sent = median_low([pace.load + pace.host + pace.dispatch for pace in usual_paces])
    found = []
    for pace in paces:
        # Where one process loads longer, the others may wait for it in phase HOST, if a loop of
        # the user waits for its results, or in the dispatch, which may block: that is no work.
        own = pace.load + pace.host
        longer: dict[Cause, float] = {
            "load": max(0.0, pace.load - usual.load),
            "host": max(0.0, min(pace.host - usual.host, own - busy)),
            "dispatch": max(0.0, min(pace.dispatch - usual.dispatch, own + pace.dispatch - sent)),
        }
        total = sum(longer.values())
        cause = max(longer, key=lambda name: longer[name])
        delay = Delay(max(0.0, total - pace.wait), step, cause, longer[cause] / (total or 1.0))
        paused = max(0.0, pace.paused - usual.paused)
        if not computes_on_host:
            paused -= pace.wait
        found.append(Delay(paused, step, "paused", 1.0) if paused > delay.seconds else delay)
    return found


_NAMED, _ENDED = 0.10, 0.05  # shares of a step
_WINDOWS = 3
_MOST_NAMED = 3  # at a time


@dataclass(frozen=True)
class Slow:
    """The beginning or the end of the time in which a process or a device is slow.

    Attributes:
      name: The name of the process or the device.
      cause: What the process does; "device" for a device.
      share: The share of the time of a step that is lost, from 0 to 1; 0 at the end.
      text: A sentence for the log.
    """

    name: str
    cause: Cause
    share: float
    text: str


class SlowProcesses:
    """Decides window by window which processes are slow.

    The parts of the last three windows are compared, and for what differs from part to part, such
    as a reader with threads, the means of the last fifteen windows. In either case these are
    fifteen values. A process is named if the others wait for it for a tenth of a step or more, even
    if its smallest value but one is compared with the largest but one of the others: equal
    processes of a busy machine differ as well, but not in nearly all parts. That has ended when the
    medians differ by less than a twentieth.

    Args:
      names: The names of the processes by rank.
      computes_on_host: As for `delays`.
    """

    def __init__(self, names: Sequence[str], *, computes_on_host: bool) -> None:
        self._names, self._computes_on_host = names, computes_on_host
        # (processes, parts, values of a pace) of each window; the means of the parts.
        self._windows: deque[np.ndarray] = deque(maxlen=_WINDOWS)
        self._means: deque[np.ndarray] = deque(maxlen=_WINDOWS * _PARTS)
        self.named: list[int] = []
        """The ranks of the slow processes."""
        self.share = 0.0
        """The largest share of a step for which others wait for one."""

    def judge(self, window: Sequence[Sequence[Sequence[float]]]) -> list[Slow]:
        """Returns what has begun and ended with a window: the paces of all processes by rank."""
        values = np.array(window)
        self._windows.append(values)
        self._means.append(values.mean(axis=1))
        if len(self._windows) < _WINDOWS:
            return []
        usually, least = self._compare(np.concatenate(self._windows, axis=1))
        if len(self._means) == self._means.maxlen:
            both = zip((usually, least), self._compare(np.stack(self._means, axis=1)), strict=True)
            usually, least = (
                [max(pair, key=lambda delay: delay.share) for pair in zip(*found, strict=True)]
                for found in both
            )
        news = []
        for rank in [rank for rank in self.named if usually[rank].share < _ENDED]:
            self.named.remove(rank)
            name = self._names[rank]
            text = f"the others no longer wait for {name}"
            news.append(Slow(name, usually[rank].cause, 0.0, text))
        for rank in sorted(range(len(least)), key=lambda rank: -usually[rank].seconds):
            is_new = rank not in self.named and least[rank].share >= _NAMED
            if is_new and len(self.named) < _MOST_NAMED:
                self.named.append(rank)
                name, delay = self._names[rank], usually[rank]
                text = f"{name} is the one that the others wait for: {delay}"
                news.append(Slow(name, delay.cause, delay.share, text))
        self.share = max(delay.share for delay in usually)
        return news

    def _compare(self, values: np.ndarray) -> tuple[list[Delay], list[Delay]]:
        """Returns the usual delays by all processes, and the least ones.

        The values have shape (processes, 15, values of a pace).
        """
        ascending = np.sort(values, axis=1)
        # The least but one and the largest but one: a single pause must not count.
        usual, low, high = (
            [Pace(*pace) for pace in ascending[:, n].tolist()]
            for n in (ascending.shape[1] // 2, 1, -2)
        )
        low = [a._replace(step=b.step, wait=b.wait) for a, b in zip(low, usual, strict=True)]
        on_host = self._computes_on_host
        usually = delays(usual, usual, computes_on_host=on_host)
        return usually, delays(low, high, computes_on_host=on_host)


# -- Devices that compute slowly, by the computations of the sentinel ------------------------------

_CHECKS = 10


class SlowDevices:
    """Decides check by check which devices are slow.

    A device is named if in each of the last ten checks it took more than a tenth longer than the
    others in any of them. That has ended if the medians differ by less than a twentieth.

    Args:
      names: The names of the devices.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._checks: deque[Sequence[float]] = deque(maxlen=_CHECKS)
        self._named: list[int] = []

    def judge(self, seconds: Sequence[float]) -> list[Slow]:
        """Returns what has begun and ended with a check: the seconds of each device's computation.

        All devices have run the same program, without collectives.
        """
        self._checks.append(seconds)
        if len(self._checks) < _CHECKS:
            return []
        own = [sorted(values) for values in zip(*self._checks, strict=True)]
        usual, most = median_low(map(median, own)), median_low(x[-1] for x in own)
        news = []
        for number, values in enumerate(own):
            name, taken = self._names[number], median(values)
            if number in self._named and taken * (1 - _ENDED) < usual:
                self._named.remove(number)
                news.append(Slow(name, "device", 0.0, f"{name} is as fast as the others again"))
            is_slow = values[0] * (1 - _NAMED) > most
            if number not in self._named and is_slow and len(self._named) < _MOST_NAMED:
                self._named.append(number)
                text = (
                    f"{name} is slow: it computes gradients in {_duration(taken)}, and others the "
                    f"same number of examples in {_duration(usual)}"
                )
                news.append(Slow(name, "device", 1 - usual / taken, text))
        return news


# -- The thread that publishes the pace of this process, and in process 0 compares those of all ----

_TICK = 0.025  # seconds
# Seconds that a thread may start late in a process that runs: for the interpreter's lock (5 ms),
# and for a processor.
_LATE = 0.010
_STEPS = _INTERVALS = 10  # the fewest of a window
_SECONDS = 0.25  # the shortest window
_EACH = 0.01  # seconds of a window for each process: process 0 reads what all have published
_RETRY = 0.1  # seconds


class SlownessWatch:
    """Names slow processes of this job while it trains, by a thread beside the one that trains.

    Args:
      job: The processes.
      clock: The clock of the thread that trains.
    """

    def __init__(self, job: Job, clock: PhaseClock) -> None:
        self._job, self._clock = job, clock
        # The name is the same in all processes, and of this fit alone.
        self._keys = f"{KEY}/pace/{process_group.new_sequence().name}/"
        on_host = jax.devices()[0].platform == "cpu"
        self._processes = SlowProcesses(job.names, computes_on_host=on_host)
        self._seconds = max(_SECONDS, _EACH * len(job.names))
        clock.intervals = deque(maxlen=10_000)
        self._intervals: list[Interval] = []
        self._paused = 0.0  # seconds
        self._at = self._began = time.perf_counter()
        self._window = self._judged = 0
        self._read_at = 0.0
        self._news: deque[Slow] = deque()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="slowness", daemon=True)
        self._thread.start()

    def take(self) -> list[Slow]:
        """Returns what is new since the last call, in process 0."""
        return [self._news.popleft() for _ in range(len(self._news))]

    @property
    def figures(self) -> Mapping[str, float]:
        """The values for a line of `performance.jsonl`; none before the first comparison."""
        if not self._judged:
            return {}
        found = {"slowest_share": self._processes.share}
        if self._processes.named:
            found["slow_process"] = self._processes.named[0]
        return found

    def close(self) -> None:
        """Ends the thread."""
        self._clock.intervals = None
        self._stop.set()
        self._thread.join(1.0)
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._job.client.key_value_delete(f"{self._keys}{self._job.rank}")

    def _run(self) -> None:
        while not self._stop.wait(_TICK):
            # The coordination service ends with the job.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._tick()

    def _tick(self) -> None:
        now = time.perf_counter()
        passed, self._at = now - self._at, now
        self._paused += max(0.0, passed - _TICK - _LATE)
        if (intervals := self._clock.intervals) is not None:
            self._intervals += [intervals.popleft() for _ in range(len(intervals))]
        if now - self._began >= self._seconds and self._is_complete():
            paces = paces_of(self._intervals, self._paused / (now - self._began))
            self._intervals, self._paused, self._began = [], 0.0, now
            if paces is not None:
                self._window += 1
                values = [[round(x, 6) for x in pace] for pace in paces]
                text = json.dumps([self._window, values])
                key = f"{self._keys}{self._job.rank}"
                self._job.client.key_value_set(key, text, allow_overwrite=True)
        is_due = self._window > self._judged and now - self._read_at >= _RETRY
        if self._job.rank == 0 and is_due:
            self._read_at = now
            self._judge()

    def _is_complete(self) -> bool:
        own = self._intervals
        return len(own) >= _INTERVALS and sum(x.steps for x in own) >= _STEPS

    def _judge(self) -> None:
        """Compares the processes, if all have published a window since the last time."""
        by_rank = {
            int(key.rpartition("/")[2]): json.loads(text)
            for key, text in self._job.client.key_value_dir_get(self._keys)
        }
        windows = [window for window, _ in by_rank.values()]
        if len(windows) == len(self._job.names) and min(windows) > self._judged:
            self._judged = min(self._window, *windows)
            paces = [by_rank[rank][1] for rank in range(len(windows))]
            self._news.extend(self._processes.judge(paces))

"""Jobs that hang: how long nothing has changed, and which task blocks the others.

The launcher and the processes of a job without a launcher detect hangs by the same functions. They
differ in where the records come from: files of the job's folder, or JAX's key-value store.
"""

import math
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from spmdtrain.distributed.progress import WAITING, Phase, ProgressRecord
from spmdtrain.errors import option


class IdleTimer:
    """The time for which an observed state has not changed.

    At most `max_interval` seconds are counted between two calls of `idle`. While a launcher is
    stopped (Ctrl-Z), its children soon block on their output: that time must not count as a hang.
    """

    def __init__(self, max_interval: float = math.inf) -> None:
        self._max_interval = max_interval
        self._state: object = None
        self._last = time.monotonic()
        self._idle = 0.0

    def idle(self, state: object) -> float:
        """Returns the seconds since the state, compared by `==`, has last changed."""
        now = time.monotonic()
        interval = min(now - self._last, self._max_interval)
        self._idle = self._idle + interval if state == self._state else 0.0
        self._state, self._last = state, now
        return self._idle


MEASURED = frozenset({Phase.LOAD, Phase.STEP, Phase.EVALUATE})
"""Phases that recur, so that the next one can be expected to take no longer than some before. A
compilation, a save or a callback says nothing about the next one."""
_FACTOR, _LEAST = 5, 60.0  # times the longest interval without a change; seconds
_ENOUGH = 20  # changes of each task to see first: first steps are dispatched, and not awaited


class HangTimer:
    """Decides when a job without progress counts as hung.

    Args:
      timeout: Seconds without progress, 0 for never; None derives them from the measured steps.
      default: With None, the seconds for the first steps and for phases outside of `MEASURED`.
      max_interval: See `IdleTimer`.
    """

    def __init__(self, timeout: float | None, default: float, max_interval: float) -> None:
        self._timeout, self._default = timeout, default
        self._max_interval, self._timer = max_interval, IdleTimer(max_interval)
        self._before, self._idle, self._at = frozenset[Phase](), 0.0, time.monotonic()
        # Of training and, where the key is True, of evaluation.
        self._changes, self._slowest = Counter[bool](), {False: 0.0, True: 0.0}

    def hung_for(self, state: object, phases: Sequence[Phase]) -> str | None:
        """Returns how long a hung job has been without progress, and the limit; else None.

        The state is compared by `==`; `phases` are the current phases of all tasks.
        """
        idle, now, current = self._timer.idle(state), time.monotonic(), frozenset(phases)
        if idle == 0 and self._before and self._before <= MEASURED:
            # The state may have changed at any time since the last call.
            pause = self._idle + min(now - self._at, self._max_interval)
            evaluates = Phase.EVALUATE in self._before
            self._slowest[evaluates] = max(self._slowest[evaluates], pause)
            self._changes[evaluates] += 1
        self._idle, self._at, self._before = idle, now, current
        limit, why = self._limit(current, _ENOUGH * len(phases))
        return f"{limit:g} s{why}" if 0 < limit <= idle else None

    def _limit(self, phases: frozenset[Phase], enough: int) -> tuple[float, str]:
        if self._timeout is not None:
            return self._timeout, ""
        evaluates = Phase.EVALUATE in phases
        if not phases or not phases <= MEASURED or self._changes[evaluates] < enough:
            return self._default, ""
        slowest = self._slowest[evaluates]
        limit = min(self._default, max(_LEAST, math.ceil(_FACTOR * slowest)))
        longest = f"the longest pause before was {slowest:.1f} s"
        return limit, f" ({longest}; {option('hang_timeout')} sets another limit)"


@dataclass(frozen=True)
class Hang:
    """The task that most likely blocks a job without progress."""

    task: str | None
    """None if no single task blocks the others."""
    phase: Phase | None
    step: int | None
    sentence: str


def find_hung_task(records: Sequence[ProgressRecord], stopped: Collection[str] = ()) -> Hang:
    """Returns the task that blocks the others of a job without progress.

    It is found by the phases in the last records of all tasks. Step counters alone would select the
    wrong task: steps are dispatched ahead, so the task that blocks the others may be ahead of them
    or behind. `stopped` has the names of the tasks that are stopped by a signal.
    """
    ordered = sorted(records, key=lambda record: record.at)  # longest without progress first
    halted = [record for record in ordered if record.task in stopped]
    absent = [record for record in ordered if record.changes == 0]
    working = [record for record in ordered if record.phase not in WAITING]
    places = {(record.phase, record.step) for record in ordered}
    others = " and blocks the others" if len(ordered) > 1 else ""
    if halted:
        return _hang(halted[0], f"is stopped by a signal in {halted[0].where}{others}")
    if absent:
        return _hang(absent[0], f"has not started{others}")
    if unread := [record for record in ordered if record.unread]:
        first = unread[0]
        return _hang(first, f"is in {first.where}{others}: its {first.unread} is not read")
    if len(ordered) == 1 or (working and len(working) < len(ordered)):
        first = (working or ordered)[0]
        return _hang(first, f"is in {first.where}{others}")
    if len(places) == 1:
        sentence = f"all wait in {ordered[0].where}: a collective does not end"
        if working:
            more = f"a larger {option('hang_timeout')} allows more time"
            sentence = f"all are in {ordered[0].where}, and none waits for another: {more}"
        return Hang(None, ordered[0].phase, ordered[0].step, sentence)
    if working:  # all tasks work, and none waits for another
        return _hang(working[0], f"is in {working[0].where}, the longest without progress")
    outlier = _outlier(ordered)
    if outlier is not None:
        rest = ", ".join(sorted({record.where for record in ordered if record is not outlier}))
        return _hang(outlier, f"is in {outlier.where} while the others wait in {rest}")
    where = ", ".join(f"{record.task} in {record.where}" for record in ordered)
    return Hang(None, None, None, f"each waits for the others ({where})")


def _hang(record: ProgressRecord, predicate: str) -> Hang:
    return Hang(record.task, record.phase, record.step, f"{record.task} {predicate}")


def _outlier(waiting: Sequence[ProgressRecord]) -> ProgressRecord | None:
    """Returns the one task whose phase differs from most of the others, else the one behind."""
    counts = Counter(record.phase for record in waiting).most_common()
    if len(counts) > 1 and counts[-1][1] < counts[-2][1]:
        waiting = [record for record in waiting if record.phase is counts[-1][0]]
    behind = min(record.step for record in waiting)
    if len(waiting) > 1 and all(record.step == behind for record in waiting):
        return None
    return next(record for record in waiting if record.step == behind)

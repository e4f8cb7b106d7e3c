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


class IdleTimer:
    """The time for which an observed state has not changed.

    Args:
      max_interval: Maximum number of seconds that are counted between two calls of `idle`. While
        a launcher is stopped (Ctrl-Z), its children soon block on their output: that time must
        not count as a hang.
    """

    def __init__(self, max_interval: float = math.inf) -> None:
        self._max_interval = max_interval
        self._state: object = None
        self._last = time.monotonic()
        self._idle = 0.0

    def idle(self, state: object) -> float:
        """Returns the seconds since the state has last changed.

        Args:
          state: The current state, compared by `==`.
        """
        now = time.monotonic()
        interval = min(now - self._last, self._max_interval)
        self._idle = self._idle + interval if state == self._state else 0.0
        self._state, self._last = state, now
        return self._idle


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

    It is found by the phases. Step counters alone would select the wrong task: steps are dispatched
    ahead, so the task that blocks the others may be ahead of them or behind.

    Args:
      records: The last record of each task.
      stopped: Names of the tasks that are stopped by a signal.
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
    if len(ordered) == 1 or (working and len(working) < len(ordered)):
        first = (working or ordered)[0]
        return _hang(first, f"is in {first.where}{others}")
    if len(places) == 1:
        sentence = f"all wait in {ordered[0].where}: a collective does not end"
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

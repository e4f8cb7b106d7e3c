"""Scheduling of batches on workers that may be lost: each batch is applied exactly once."""

import heapq
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from spmdtrain.distributed.progress import heartbeat
from spmdtrain.errors import ClusterError
from spmdtrain.step.metrics import Combination

# -- The interface of a pool of workers, and its events --------------------------------------------


@dataclass(frozen=True)
class Done:
    """A worker has finished its work item."""

    worker: str
    result: Any


@dataclass(frozen=True)
class Failed:
    """A work item has raised an error. The worker remains available."""

    worker: str
    error: Exception


@dataclass(frozen=True)
class WorkerLost:
    """A worker is lost, and its work item with it."""

    worker: str
    reason: str


@dataclass(frozen=True)
class WorkerJoined:
    """A worker has become available, for the first time or after a loss."""

    worker: str


PoolEvent = Done | Failed | WorkerLost | WorkerJoined


class WorkerPool(Protocol):
    """Workers that may join and be lost at any time; each processes one work item at a time."""

    @property
    def is_empty(self) -> bool:
        """Whether no worker is available."""
        ...

    def idle(self) -> Sequence[str]:
        """Returns the names of the available workers without a work item."""
        ...

    def give(self, worker: str, work: Any) -> None:
        """Starts a work item, such as the number of a batch, on an idle worker."""
        ...

    def events(self, timeout: float) -> Sequence[PoolEvent]:
        """Returns the events since the last call; waits at most `timeout` s for the first."""
        ...


# -- Scheduling of batches on workers that may be lost: each batch is applied exactly once ---------

_POLL = 0.5  # seconds between two checks for overdue batches
_RECENT = 64  # batches whose median duration is the usual one
_OVERDUE_FACTOR = 3  # times the usual duration: a batch is overdue if no timeout is configured
# An overdue batch that the run waits for precedes new ones after so many seconds, and timeouts.
_URGENT, _URGENT_FACTOR = 10.0, 4
_MAX_LOSSES = 4  # workers lost with the same batch until the batch is considered the cause
_ALONE = 20.0  # seconds without any worker until the user is informed
_MIN_TIMEOUT = 1.0  # seconds
_FIRST_TIMEOUT = 60.0  # seconds, until the first batch has completed


@dataclass
class _Assignment:
    """A batch in progress."""

    holders: set[str]
    version: int
    """Number of applied updates when its first holder received it, or a later one."""
    since: float


class BatchQueue:
    """The state of each batch number, from `first` on: not started, in progress or applied.

    A batch is a pure function of its number, so the batch of a lost worker is identical when
    another worker computes it. This class uses no JAX, no clock and no messages: its caller passes
    events, and times in seconds of any clock.

    `max_staleness` is the maximum number of updates between a worker's pull and its push; None for
    no bound.
    """

    def __init__(self, first: int, max_staleness: int | None = None) -> None:
        self.max_staleness = max_staleness
        self.limit = first
        """Batches with lower numbers may be assigned."""
        self.applied = IdSet(first)
        self._next = first
        self._requeued: list[int] = []  # a heap of batches whose workers were lost
        self._in_progress: dict[int, _Assignment] = {}

    @property
    def is_idle(self) -> bool:
        """Whether all batches that were assigned have been applied."""
        return not self._in_progress and not self._requeued

    def give(self, worker: str, now: float) -> int | None:
        """Assigns the next batch, and returns its number; None if the worker has to wait."""
        if not (self._requeued or self._next < self.limit) or not self._stays_fresh():
            return None
        if self._requeued:
            number = heapq.heappop(self._requeued)
        else:
            number = self._next
            self._next += 1
        self._in_progress[number] = _Assignment({worker}, self.applied.count, now)
        return number

    def assign_backup(self, number: int, worker: str, now: float) -> None:
        """Assigns a batch in progress to one more worker; the first result is used."""
        self._in_progress[number].holders.add(worker)
        self._in_progress[number].since = now

    def complete(self, number: int) -> bool:
        """Marks a batch as applied. Returns False if it was applied before."""
        if self._in_progress.pop(number, None) is None:
            return False
        return self.applied.enter(number)

    def requeue(self, worker: str) -> list[int]:
        """Releases the batches of a worker that is lost or whose result was refused.

        Returns the batches that no other worker computes; they are assigned again.
        """
        lost = []
        for number, assignment in list(self._in_progress.items()):
            assignment.holders.discard(worker)
            if not assignment.holders:
                del self._in_progress[number]
                heapq.heappush(self._requeued, number)
                lost.append(number)
        return lost

    def overdue(self, before: float) -> list[int]:
        """Returns the batches in progress whose last assignment was before a time."""
        return [
            number for number, assignment in self._in_progress.items() if assignment.since < before
        ]

    def holders(self, number: int) -> set[str]:
        """Returns the workers that compute a batch in progress."""
        return set(self._in_progress[number].holders)

    def stop_dispatch(self) -> int:
        """Lowers the limit so that no further batch is started; returns the limit."""
        self.limit = min(self.limit, self._next)
        return self.limit

    def _stays_fresh(self) -> bool:
        """Returns whether every batch stays within `max_staleness` if one more is assigned.

        In the worst case all other batches in progress are applied before the oldest one.
        """
        if self.max_staleness is None:
            return True
        versions = [assignment.version for assignment in self._in_progress.values()]
        age = self.applied.count - min(versions) if versions else 0
        return age + len(self._in_progress) <= self.max_staleness


@dataclass(frozen=True)
class BatchResult:
    """The result of a batch.

    Attributes:
      metrics: Weighted means, "loss" among them.
      sums: Weighted sum and weight of each metric.
      combined: The metrics that are combined from the means of others.
      finite: Whether each of `FLAGS` is finite, on all servers.
      staleness: Number of updates between the pull and the push of the batch: the maximum over the
        servers.
      is_stale: Whether a server has refused the batch as too stale; it is computed again.
      pulled: Bytes that the worker has read from the servers.
      pushed: Bytes that the worker has sent to the servers.
    """

    number: int
    metrics: dict[str, float]
    sums: Mapping[str, Sequence[float]]
    combined: dict[str, Combination]
    finite: tuple[bool, ...]
    staleness: int
    is_stale: bool
    pulled: int
    pushed: int


class BatchScheduler:
    """Assigns batches to the workers of a pool and collects their results.

    Args:
      backup_task_timeout: Seconds after which an idle worker computes a batch in progress too
        ("backup tasks" in Dean and Ghemawat, "MapReduce", OSDI 2004); by default three times the
        median of recent durations, and at least one second.
      log: Receives a line for the user, such as the loss of a worker.
      check_interrupt: Called while results are pending, with whether the pool is empty; may raise.
      on_silence: Called once with the number of seconds in which no pending batch has completed.
    """

    def __init__(
        self,
        pool: WorkerPool,
        queue: BatchQueue,
        backup_task_timeout: float | None = None,
        log: Callable[[str], None] = lambda line: None,
        check_interrupt: Callable[[bool], None] = lambda is_empty: None,
        on_silence: Callable[[float], None] = lambda seconds: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool, self.queue, self._backup_task_timeout = pool, queue, backup_task_timeout
        self._log, self._check_interrupt, self._clock = log, check_interrupt, clock
        self._results: dict[int, BatchResult] = {}  # not returned by `take` yet
        self.batches: Counter[str] = Counter()
        """Number of batches by the worker whose result was used."""
        self._started: dict[str, float] = {}  # when each worker received its batch
        self._durations: deque[float] = deque(maxlen=_RECENT)
        self._reported_slow: set[str] = set()
        self._lost: set[str] = set()
        self._losses: dict[int, list[str]] = {}  # by batch, the workers lost with it
        self._last_worker_at, self._was_alone = clock(), False
        # When the last result arrived, or no batch was pending.
        self._on_silence, self._last_result_at, self._was_silent = on_silence, clock(), False

    def take(self, number: int) -> BatchResult:
        """Waits for a batch's result while others proceed; raises the user function's error."""
        while number not in self._results:
            self._process_events(number)
        return self._results.pop(number)

    def drain(self) -> None:
        """Waits until no batch is in progress."""
        while not self.queue.is_idle:
            self._process_events()

    def slow_after(self) -> float | None:
        """Returns the seconds after which a batch is slow; None before any has completed."""
        if not self._durations:
            return None
        return max(_MIN_TIMEOUT, _OVERDUE_FACTOR * statistics.median(self._durations))

    def _process_events(self, awaited: int | None = None) -> None:
        """Assigns batches to idle workers, and processes the events of the pool."""
        now = self._clock()
        self._check_workers()
        if self._pool.is_empty or self.queue.is_idle:
            self._last_result_at = now
        overdue = self.queue.overdue(now - self.batch_timeout())
        # New batches are assigned before overdue ones, because otherwise all batches of a slow
        # worker would be computed twice. Exception: after a longer time, the batch that the run
        # waits for.
        long_overdue = self.queue.overdue(now - max(_URGENT, _URGENT_FACTOR * self.batch_timeout()))
        urgent = [number for number in long_overdue if number == awaited]
        for worker in self._pool.idle():
            number = None if urgent else self.queue.give(worker, now)
            if number is None and (urgent or overdue):
                number = urgent.pop() if urgent else overdue.pop(0)
                self._report_slow(number, worker)
                self.queue.assign_backup(number, worker, now)
                overdue = [other for other in overdue if other != number]
            if number is not None:
                self._started[worker] = now
                self._pool.give(worker, number)
        for event in self._pool.events(_POLL):
            match event:
                case Done(worker, result) if result.is_stale:
                    self.queue.requeue(worker)
                case Done(worker, result):
                    self._last_result_at = self._clock()
                    heartbeat()
                    self._durations.append(self._clock() - self._started[worker])
                    self._reported_slow.discard(worker)
                    # All servers have applied it now, whichever worker pushed it to each of them.
                    self._losses.pop(result.number, None)
                    if self.queue.complete(result.number):
                        self._results[result.number] = result
                        self.batches[worker] += 1
                case Failed(_, error):
                    raise error
                case WorkerLost(worker, reason):
                    requeued = self.queue.requeue(worker)
                    self._check_losses(requeued, worker, reason)
                    consequence = f"; batch {requeued[0]} is reassigned" if requeued else ""
                    self._lost.add(worker)
                    self._log(f"{worker} is lost ({reason}){consequence}")
                case WorkerJoined(worker) if worker in self._lost:
                    self._lost.remove(worker)
                    self._log(f"{worker} is back")
        self._check_silence()  # last, after the results that have arrived were processed

    def _check_losses(self, batches: Sequence[int], worker: str, reason: str) -> None:
        """Raises `ClusterError` if a batch was lost with too many workers."""
        for number in batches:
            lost = self._losses.setdefault(number, [])
            lost.append(worker)
            if len(lost) == _MAX_LOSSES:
                raise ClusterError(
                    f"batch {number} was lost {_MAX_LOSSES} times with its worker "
                    f"({', '.join(lost)}; last reason: {reason}). It may need more memory than a "
                    "worker has"
                )

    def batch_timeout(self) -> float:
        """Returns the seconds after which a batch in progress is overdue."""
        if self._backup_task_timeout is not None:
            return self._backup_task_timeout
        return self.slow_after() or _FIRST_TIMEOUT

    def _report_slow(self, number: int, worker: str) -> None:
        """Logs that a batch is assigned again: once per slow worker, until it completes one."""
        slow = self.queue.holders(number) - self._reported_slow
        if slow:
            self._reported_slow |= slow
            self._log(
                f"{' and '.join(sorted(slow))}: batch {number} has taken more than "
                f"{self.batch_timeout():.3g} s; {worker} computes it too (reported once)"
            )

    def _check_silence(self) -> None:
        """Calls `on_silence` once if batches are pending and none completes.

        The workers may be waiting for a server.
        """
        timeout = max(_ALONE, self.slow_after() or _FIRST_TIMEOUT)
        is_silent = self._clock() - self._last_result_at > timeout
        if is_silent and not self._was_silent:
            self._on_silence(timeout)
        self._was_silent = is_silent

    def _check_workers(self) -> None:
        """Logs once if there is no worker for some time; calls `check_interrupt`."""
        is_empty, now = self._pool.is_empty, self._clock()
        if not is_empty:
            self._last_worker_at = now
        elif self._last_worker_at < now - _ALONE and not self._was_alone:
            self._log(f"no worker has been available for {_ALONE:g} s; waiting for one")
        self._was_alone = is_empty and self._last_worker_at < now - _ALONE
        self._check_interrupt(is_empty)


# -- A compact form of a set that contains almost all numbers below a bound ------------------------


class IdSet:
    """A set of integers: all below a bound, and single ones above it.

    It records which batches have been applied, in any order, without storing every number. At first
    it contains all numbers below `first`.
    """

    def __init__(self, first: int = 0) -> None:
        self.complete = first
        """All numbers below this are members."""
        self.beyond: set[int] = set()
        """The other members."""

    def enter(self, number: int) -> bool:
        """Adds a number. Returns False if it was a member already."""
        if number in self:
            return False
        self.beyond.add(number)
        self._raise_bound()
        return True

    def _raise_bound(self) -> None:
        while self.complete in self.beyond:
            self.beyond.remove(self.complete)
            self.complete += 1

    def close(self, floor: int) -> None:
        """Adds all numbers below `floor`."""
        if floor > self.complete:
            self.complete = floor
            self.beyond = {number for number in self.beyond if number >= floor}
            self._raise_bound()

    def __contains__(self, number: int) -> bool:
        return number < self.complete or number in self.beyond

    @property
    def count(self) -> int:
        """Number of members that are not negative."""
        return self.complete + len(self.beyond)

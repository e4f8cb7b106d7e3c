"""Batches given to workers that come and go, until each has landed on all servers once."""

import heapq
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from spmdtrain.distributed.progress import heartbeat
from spmdtrain.errors import ClusterError
from spmdtrain.parameter_server.id_set import IdSet
from spmdtrain.parameter_server.worker_pool import (
    Done,
    Failed,
    WorkerJoined,
    WorkerLost,
    WorkerPool,
)

_LOOK = 0.5  # seconds after which to look for batches that are overdue
_RECENT = 64  # batches whose times say how long one usually takes
_USUAL = 3  # times that, and a batch is overdue, where nobody has said how long to wait
_URGENT, _HANGS = 10.0, 4  # seconds, and times what is bearable: then it goes before new ones
_FATAL = 4  # workers that are lost with the same batch, and it is to blame
_ALONE = 20.0  # seconds without any worker after which to say so
_LEAST, _FIRST = 1.0, 60.0  # seconds, at least, and while no batch has come yet


@dataclass
class _Out:
    """A batch that is being computed."""

    holders: set[str]
    version: int
    """Updates that had landed when the oldest of its holders was given it, or later."""
    since: float


class BatchQueue:
    """Numbers of batches, each to land exactly once.

    Args:
        first: The first that is still to be made.
        max_staleness: How many updates may land between what a worker reads and what it adds to
            them; None is any number.
    """

    def __init__(self, first: int, max_staleness: int | None = None) -> None:
        self.max_staleness = max_staleness
        self.limit = first
        """Numbers below this may be given out."""
        self.landed = IdSet(first)
        self._next = first
        self._again: list[int] = []  # given out before, and lost
        self._out: dict[int, _Out] = {}

    @property
    def is_idle(self) -> bool:
        """Whether all that was given out has landed."""
        return not self._out and not self._again

    def give(self, worker: str, now: float) -> int | None:
        """The number of the batch that a worker is to compute next; None where it is to wait."""
        if not (self._again or self._next < self.limit) or not self._stays_fresh():
            return None
        if self._again:
            number = heapq.heappop(self._again)
        else:
            number = self._next
            self._next += 1
        self._out[number] = _Out({worker}, self.landed.count, now)
        return number

    def assign_backup(self, number: int, worker: str, now: float) -> None:
        """Have one more worker compute a batch that another holds: who lands it first, lands it."""
        self._out[number].holders.add(worker)
        self._out[number].since = now

    def complete(self, number: int) -> bool:
        """A batch has been added to the parameters; False where it had before."""
        if self._out.pop(number, None) is None:
            return False
        return self.landed.enter(number)

    def requeue(self, worker: str) -> list[int]:
        """A worker is gone, or has given up: what it alone held is given out again."""
        lost = []
        for number, out in list(self._out.items()):
            out.holders.discard(worker)
            if not out.holders:
                del self._out[number]
                heapq.heappush(self._again, number)
                lost.append(number)
        return lost

    def overdue(self, before: float) -> list[int]:
        """The batches that were given out before that time, and for the last time, and are out."""
        return [number for number, out in self._out.items() if out.since < before]

    def holders(self, number: int) -> set[str]:
        """The workers that have a batch which is out."""
        return set(self._out[number].holders)

    def hold(self) -> int:
        """Give out no number that was not before; what the limit is then."""
        self.limit = min(self.limit, self._next)
        return self.limit

    def _stays_fresh(self) -> bool:
        """Whether none becomes too stale, if one more is given out and all others land first."""
        if self.max_staleness is None:
            return True
        versions = [out.version for out in self._out.values()]
        aged = self.landed.count - min(versions) if versions else 0
        return aged + len(self._out) <= self.max_staleness


@dataclass(frozen=True)
class Outcome:
    """What came of a batch.

    Attributes:
        number: Which it was.
        metrics: Its weighted means, "loss" among them.
        sums: Weighted sum and weight of each metric.
        finite: Whether each of `HEALTH` is, on all servers.
        staleness: Updates that were added between what it was computed with and itself: the most
            that any server has seen.
        is_stale: Whether a server has refused it for that: it is to be computed again.
        pulled: Bytes that its worker has read from the servers.
        pushed: Bytes that it has sent to them.
    """

    number: int
    metrics: dict[str, float]
    sums: Mapping[str, Sequence[float]]
    finite: tuple[bool, ...]
    staleness: int
    is_stale: bool
    pulled: int
    pushed: int


class BatchScheduler:
    """Has a crew compute batches.

    Args:
        crew: The workers.
        dispenser: The batches.
        patience: Seconds after which a batch is given to a worker that has nothing to do, too, as
            of old ("backup tasks" in Dean and Ghemawat, "MapReduce", OSDI 2004); None is three
            times what one usually takes, and a second at least.
        tell: Called with what a user should know of: a worker that is lost, and its batch.
        may_stop: Called while batches are waited for, with whether no worker is there; may raise.
        tell_silence: Called with the seconds after which nothing has come of what is out.
    """

    def __init__(
        self,
        crew: WorkerPool,
        dispenser: BatchQueue,
        patience: float | None = None,
        tell: Callable[[str], None] = lambda line: None,
        may_stop: Callable[[bool], None] = lambda is_empty: None,
        tell_silence: Callable[[float], None] = lambda seconds: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._crew, self.dispenser, self._patience = crew, dispenser, patience
        self._tell, self._may_stop, self._clock = tell, may_stop, clock
        self._landed: dict[int, Outcome] = {}  # and not taken yet
        self.made: Counter[str] = Counter()
        """Batches by the worker that was first to land them."""
        self._began: dict[str, float] = {}  # when each worker was given what it is doing
        self._seconds: deque[float] = deque(maxlen=_RECENT)
        self._called_slow: set[str] = set()
        self._lost: set[str] = set()
        self._killed: dict[int, list[str]] = {}  # by batch, who was lost with it
        self._there_at, self._was_alone = clock(), False  # when there was a worker last
        # When something has come last, or nothing was out.
        self._tell_silence, self._came_at, self._was_silent = tell_silence, clock(), False

    def take(self, number: int) -> Outcome:
        """What came of a batch, once it has landed; others are computed meanwhile.

        Raises what the user's function has raised.
        """
        while number not in self._landed:
            self._go_on(number)
        return self._landed.pop(number)

    def settle(self) -> None:
        """Return when nothing is under way any more."""
        while not self.dispenser.is_idle:
            self._go_on()

    def slow_after(self) -> float | None:
        """Seconds after which a batch is late, as they usually take; None while none has come."""
        if not self._seconds:
            return None
        return max(_LEAST, _USUAL * statistics.median(self._seconds))

    def _go_on(self, awaited: int | None = None) -> None:
        """Give work to whoever has none, and see what has come of what was given."""
        now = self._clock()
        self._look_for_workers()
        if self._crew.is_empty or self.dispenser.is_idle:
            self._came_at = now
        overdue = self.dispenser.overdue(now - self._bearable())
        # New ones go first, or a slow worker's would all be made twice; but no run is to stand.
        hangs = self.dispenser.overdue(now - max(_URGENT, _HANGS * self._bearable()))
        urgent = [number for number in hangs if number == awaited]
        for worker in self._crew.idle():
            number = None if urgent else self.dispenser.give(worker, now)
            if number is None and (urgent or overdue):
                number = urgent.pop() if urgent else overdue.pop(0)
                self._call_slow(number, worker)
                self.dispenser.assign_backup(number, worker, now)
                overdue = [other for other in overdue if other != number]
            if number is not None:
                self._began[worker] = now
                self._crew.give(worker, number)
        for event in self._crew.events(_LOOK):
            match event:
                case Done(worker, outcome) if outcome.is_stale:
                    self.dispenser.requeue(worker)
                case Done(worker, outcome):
                    self._came_at = self._clock()
                    heartbeat()
                    self._seconds.append(self._clock() - self._began[worker])
                    self._called_slow.discard(worker)
                    # It is on all servers now, whoever has brought it to which of them.
                    self._killed.pop(outcome.number, None)
                    if self.dispenser.complete(outcome.number):
                        self._landed[outcome.number] = outcome
                        self.made[worker] += 1
                case Failed(_, error):
                    raise error
                case WorkerLost(worker, reason):
                    again = self.dispenser.requeue(worker)
                    self._check_survived(again, worker, reason)
                    given = f": batch {again[0]} is given out again" if again else ""
                    self._lost.add(worker)
                    self._tell(f"{worker} is lost ({reason}){given}")
                case WorkerJoined(worker) if worker in self._lost:
                    self._lost.remove(worker)
                    self._tell(f"{worker} is back")
        self._look_for_silence()  # last: what came meanwhile has been taken

    def _check_survived(self, batches: Sequence[int], worker: str, reason: str) -> None:
        """Raise `ClusterError` where a batch kills whoever computes it."""
        for number in batches:
            lost = self._killed.setdefault(number, [])
            lost.append(worker)
            if len(lost) == _FATAL:
                raise ClusterError(
                    f"batch {number} was lost with each of {_FATAL} workers that had it "
                    f"({', '.join(lost)}; the last: {reason}): does it take more memory than there "
                    "is?"
                )

    def _bearable(self) -> float:
        """Seconds that a batch may be out."""
        if self._patience is not None:
            return self._patience
        return self.slow_after() or _FIRST

    def _call_slow(self, number: int, worker: str) -> None:
        """Say once of a worker that others do what it has been given, until it does some again."""
        slow = self.dispenser.holders(number) - self._called_slow
        if slow:
            self._called_slow |= slow
            self._tell(
                f"{' and '.join(sorted(slow))}: batch {number} is out for more than "
                f"{self._bearable():.3g} s; {worker} makes it, too, and so with those to come"
            )

    def _look_for_silence(self) -> None:
        """Say once that nothing comes, if workers are there: their servers may not answer."""
        bearable = max(_ALONE, self.slow_after() or _FIRST)
        is_silent = self._clock() - self._came_at > bearable
        if is_silent and not self._was_silent:
            self._tell_silence(bearable)
        self._was_silent = is_silent

    def _look_for_workers(self) -> None:
        is_empty, now = self._crew.is_empty, self._clock()
        if not is_empty:
            self._there_at = now
        elif self._there_at < now - _ALONE and not self._was_alone:
            self._tell(f"no worker has been there for {_ALONE:g} s: waiting for one")
        self._was_alone = is_empty and self._there_at < now - _ALONE
        self._may_stop(is_empty)

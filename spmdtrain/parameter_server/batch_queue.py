"""Which batches are out, which have landed, and which is the next to be given out.

A batch is a pure function of its number, so that what a worker was given and lost with it is given
to another, and is the same. No JAX, no clock and no messages in here: who knows them tells.
"""

import heapq
from dataclasses import dataclass

from spmdtrain.parameter_server.id_set import IdSet


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

"""The interface of a pool of workers, and its events."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


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

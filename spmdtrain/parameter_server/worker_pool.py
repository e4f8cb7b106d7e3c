"""The workers of an asynchronous training, as whoever gives them work sees them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Done:
    """A worker has done what it was given."""

    worker: str
    result: Any


@dataclass(frozen=True)
class Failed:
    """What a worker was given has raised an error; the worker is there still."""

    worker: str
    error: Exception


@dataclass(frozen=True)
class WorkerLost:
    """A worker is gone, and what it was given with it."""

    worker: str
    reason: str


@dataclass(frozen=True)
class WorkerJoined:
    """A worker is there, for the first time or again."""

    worker: str


PoolEvent = Done | Failed | WorkerLost | WorkerJoined


class WorkerPool(Protocol):
    """Workers that come and go; each does one thing at a time."""

    @property
    def is_empty(self) -> bool:
        """Whether no worker is there."""
        ...

    def idle(self) -> Sequence[str]:
        """The workers that are there and have nothing to do."""
        ...

    def give(self, worker: str, work: Any) -> None:
        """Have a worker do something: the batch of a number, say."""
        ...

    def events(self, timeout: float) -> Sequence[PoolEvent]:
        """What has happened since; waits for the first, but no longer than so many seconds."""
        ...

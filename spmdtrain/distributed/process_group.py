"""The processes of a job: their names and ranks, and host-side communication between them.

Values are exchanged through the key-value store of JAX's coordination service on process 0, never
through the devices (as `jax.experimental.multihost_utils` does), so that they cannot interfere with
collectives. With one process the functions return at once. `distributed.initialize` creates the
job.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax

# JAX has no public name for its key-value store, nor for its preemption sync points.
from jax._src import distributed as jax_distributed

from spmdtrain.distributed.context import CONTEXT
from spmdtrain.errors import NOT_SET, UserError, foreign

T = TypeVar("T")

KEY = "spmdtrain"  # prefix of all keys of this package


@dataclass
class CallSequence:
    """The collective calls of one thread.

    All processes make the same calls of a sequence in the same order. Calls of two sequences may
    occur in any order, so a thread in the background has a sequence of its own.

    Attributes:
      name: Prefix of the keys.
    """

    name: str
    agreements: int = 0
    """Number of calls so far. It is the same in all processes, and so identifies a call."""
    unread: list[str] = field(default_factory=list)
    """Keys of process 0 that others may still read."""

    def broadcast(self, value: T) -> T:
        """Returns process 0's value in all processes. The value is JSON."""
        job = current()
        if job is None:
            return value
        key = self._next_key()
        if job.rank == 0:
            job.client.key_value_set(key, json.dumps(value))
            self.unread.append(key)
            result: T = value
        else:
            result = json.loads(_get(job, key))
        if self.agreements % 256 == 0:
            self.collect(None)  # deletes the keys that all processes have read
        return result

    def collect(self, value: T) -> list[T]:
        """Returns all processes' values, by rank, in process 0; an empty list in the others."""
        job = current()
        if job is None:
            return [value]
        key = self._next_key()
        if job.rank != 0:
            job.client.key_value_set(f"{key}/{job.rank}", json.dumps(value))
            return []
        values = [value]
        for rank in range(1, len(job.names)):
            values.append(json.loads(_get(job, f"{key}/{rank}")))
            job.client.key_value_delete(f"{key}/{rank}")
        # All processes have made this call, so all have read the earlier broadcasts.
        for old in self.unread:
            job.client.key_value_delete(old)
        self.unread.clear()
        return values

    def gather(self, value: T) -> list[T]:
        """Returns the values of all processes, by rank, in all of them."""
        return self.broadcast(self.collect(value))

    def _next_key(self) -> str:
        self.agreements += 1
        return f"{KEY}/{self.name}/{self.agreements}"


@dataclass
class Job:
    """The processes that train together, and the rank of this one.

    Attributes:
      names: Name of each process, by rank.
      rank: Rank of this process.
      client: Client of JAX's coordination service.
    """

    names: Sequence[str]
    rank: int
    client: Any
    main: CallSequence = field(default_factory=lambda: CallSequence("main"))
    """The sequence of this module's functions."""
    sequences: int = 0
    """Number of calls of `new_sequence` so far."""
    points: int = 0
    """Number of calls of `preempted` so far."""
    stopping: bool = False
    """Whether the sync point at which to stop is reached."""

    @property
    def name(self) -> str:
        """The name of this process."""
        return self.names[self.rank]


def current() -> Job | None:
    """Returns the job, also after a script's own `jax.distributed.initialize`; None if alone."""
    if CONTEXT.job is None and jax.distributed.is_initialized():
        size = jax_distributed.global_state.num_processes
        if size > 1:
            enter([f"process {number}" for number in range(size)])
    return CONTEXT.job


def joined() -> Job:
    """Returns the job of several processes. Raises `RuntimeError` if this process is alone."""
    job = current()
    if job is None:
        raise RuntimeError("this process has not joined a job")
    return job


def enter(names: Sequence[str]) -> Job:
    """Sets the job to the processes of an initialized JAX cluster, and returns it."""
    state = jax_distributed.global_state
    CONTEXT.job = Job(names, state.process_id, state.client)
    return CONTEXT.job


def clear_job() -> None:
    """Unsets the job."""
    CONTEXT.job = None


# -- identity --------------------------------------------------------------------------------------


def count() -> int:
    """Returns the number of processes of the job, without initializing JAX's backends."""
    job = current()
    return 1 if job is None else len(job.names)


def rank() -> int:
    """Returns the rank of this process, from 0."""
    job = current()
    return 0 if job is None else job.rank


def is_chief() -> bool:
    """Returns whether this is process 0, the only one that writes logs, metrics and status."""
    return rank() == 0


def name() -> str:
    """Returns the name of this process."""
    return names()[rank()]


def names() -> Sequence[str]:
    """Returns the names of all processes, by rank."""
    job = current()
    return ["this process"] if job is None else job.names


# -- communication: all processes make the same calls, in the same order ---------------------------


def broadcast(value: T) -> T:
    """Returns process 0's value in all processes. The value is JSON."""
    job = current()
    return value if job is None else job.main.broadcast(value)


def collect(value: T) -> list[T]:
    """Returns the values of all processes, by rank, in process 0; an empty list in the others."""
    job = current()
    return [value] if job is None else job.main.collect(value)


def gather(value: T) -> list[T]:
    """Returns the values of all processes, by rank, in all of them."""
    return broadcast(collect(value))


def barrier() -> None:
    """Waits until all processes have called it."""
    gather(None)


def new_sequence() -> CallSequence:
    """Returns a new sequence, for the calls of one thread in the background."""
    job = current()
    if job is None:
        return CallSequence("alone")
    job.sequences += 1
    return CallSequence(f"sequence/{job.sequences}")


def run_on_all(call: Callable[[], T], expected: type[Exception]) -> T:
    """Returns `call()`. If it raises `expected` in any process, raises `expected` in all of them.

    Args:
      call: The function to call in each process.
      expected: Type of the exceptions to share; others propagate in their process only.
    """
    own: Exception | None = None
    try:
        value = call()
    except expected as error:
        own = error
    faults = gather(None if own is None else str(own))
    if own is not None:
        raise own
    for fault in faults:
        if fault is not None:
            raise expected("\n".join(foreign(line, 10_000) for line in str(fault).split("\n")))
    return value


def summed(parts: Mapping[str, int]) -> dict[str, int]:
    """Returns the sums by name over all processes, in all of them."""
    if count() == 1:
        return dict(parts)
    total: dict[str, int] = {}
    for values in collect(dict(parts)):
        for name, part in values.items():
            total[name] = total.get(name, 0) + part
    return broadcast(total)


def check_same(what: Mapping[str, Any]) -> None:
    """Checks that values are equal in all processes.

    Args:
      what: Name to value, in nested dicts. Values that are not JSON are compared by their `str`.

    Raises:
      UserError: If a process has another value; names the first difference.
    """
    if count() == 1:
        return
    mine = flatten(what)
    text = json.dumps(mine, sort_keys=True, default=str)
    digests = gather(hashlib.sha256(text.encode()).hexdigest())
    odd = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if odd is None:
        return
    flats = gather(mine if rank() in (0, odd) else {})
    first, other = flats[0], flats[odd]
    first_name, odd_name = names()[0], names()[odd]
    for key in [*first, *other]:
        if first.get(key) != other.get(key):
            raise UserError(
                f"{odd_name} and {first_name} differ: {foreign(key)} is "
                f"{foreign(other.get(key, NOT_SET))} in {odd_name} and "
                f"{foreign(first.get(key, NOT_SET))} in {first_name}; start all processes of a job "
                "with the same code and settings"
            )


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested values by their dotted path, as JSON represents them."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = json.loads(json.dumps(value, default=str))
    return flat


def _get(job: Job, key: str) -> str:
    """Waits for a key. A process that fails before setting it ends the job (see `failures`)."""
    while True:
        try:  # 5 seconds at a time, so that Python can handle signals in between
            return str(job.client.blocking_key_value_get(key, 5_000))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


# -- preemption ------------------------------------------------------------------------------------


def preempted() -> bool:
    """Returns whether to stop because a process received SIGTERM; the same in all processes.

    All processes call it at the same points, such as after each step. After a SIGTERM, JAX chooses
    the first of these points that no process has passed; from that point on the result is True.
    """
    job = current()
    if job is None:
        return False
    job.points += 1
    manager: Any = jax_distributed.global_state.preemption_sync_manager
    job.stopping = job.stopping or bool(manager.reached_sync_point(job.points))
    return job.stopping

"""The processes of a job: who they are, and what they agree on.

Nothing here goes through the devices: values travel through the key-value store that JAX's
coordination service on process 0 offers, so that no agreement can get in the way of a collective.
With one process, all of it is trivial. `distributed` makes the job.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax

# JAX has no public name for its key-value store, nor for its points to stop at.
from jax._src import distributed as jax_distributed

from spmdtrain.errors import NOT_SET, UserError, foreign

T = TypeVar("T")

KEY = "spmdtrain"  # what all of our keys begin with


@dataclass
class Job:
    """The processes that train together, and this one among them."""

    names: Sequence[str]
    rank: int
    client: Any
    agreements: int = 0
    """Made so far: they are numbered alike in all processes, as all make the same."""
    points: int = 0
    """To stop at, passed so far."""
    stopping: bool = False
    """Whether one of them was the one to stop at."""
    unread: list[str] = field(default_factory=list)
    """Keys of process 0 that others may still read."""

    @property
    def name(self) -> str:
        """What this process is called."""
        return self.names[self.rank]


_job: Job | None = None


def current() -> Job | None:
    """The job, also where a script has called `jax.distributed.initialize`; None if alone."""
    global _job
    if _job is None and jax.distributed.is_initialized():
        size = jax_distributed.global_state.num_processes
        if size > 1:
            enter([f"process {number}" for number in range(size)])
    return _job


def enter(names: Sequence[str]) -> Job:
    """Take the processes of an initialised JAX cluster as the job."""
    global _job
    state = jax_distributed.global_state
    _job = Job(names, state.process_id, state.client)
    return _job


def leave() -> None:
    """Be alone again."""
    global _job
    _job = None


# -- who -------------------------------------------------------------------------------------------


def count() -> int:
    """How many processes train together; does not start JAX's devices."""
    job = current()
    return 1 if job is None else len(job.names)


def rank() -> int:
    """Which of the processes this one is, from 0."""
    job = current()
    return 0 if job is None else job.rank


def is_chief() -> bool:
    """Whether this is process 0: it alone writes logs, metrics and status."""
    return rank() == 0


def name() -> str:
    """What this process is called."""
    return names()[rank()]


def names() -> Sequence[str]:
    """What the processes are called, by rank."""
    job = current()
    return ["this process"] if job is None else job.names


# -- agreeing --------------------------------------------------------------------------------------


def broadcast(value: T) -> T:
    """Process 0's value, of what JSON holds; all processes call it, in the same order."""
    job = current()
    if job is None:
        return value
    job.agreements += 1
    key = f"{KEY}/{job.agreements}"
    if job.rank == 0:
        job.client.key_value_set(key, json.dumps(value))
        job.unread.append(key)
        found: T = value
    else:
        found = json.loads(_get(job, key))
    if job.agreements % 256 == 0:
        collect(None)  # so that what nobody reads any more is let go of
    return found


def collect(value: T) -> list[T]:
    """The values of all processes by rank, in process 0; elsewhere nothing. As `broadcast`."""
    job = current()
    if job is None:
        return [value]
    job.agreements += 1
    key = f"{KEY}/{job.agreements}"
    if job.rank != 0:
        job.client.key_value_set(f"{key}/{job.rank}", json.dumps(value))
        return []
    found = [value]
    for rank in range(1, len(job.names)):
        found.append(json.loads(_get(job, f"{key}/{rank}")))
        job.client.key_value_delete(f"{key}/{rank}")
    # All have come here, so all have read what was broadcast before.
    for old in job.unread:
        job.client.key_value_delete(old)
    job.unread.clear()
    return found


def gather(value: T) -> list[T]:
    """The values of all processes by rank, in all of them. As `broadcast`."""
    return broadcast(collect(value))


def barrier() -> None:
    """Return when all processes are here."""
    gather(None)


def run_on_all(call: Callable[[], T], expected: type[Exception]) -> T:
    """What `call()` returns; where it raises `expected` in any process, that is raised in all."""
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
    """Sums by name over all processes. As `broadcast`."""
    if count() == 1:
        return dict(parts)
    total: dict[str, int] = {}
    for found in collect(dict(parts)):
        for name, part in found.items():
            total[name] = total.get(name, 0) + part
    return broadcast(total)


def check_same(what: Mapping[str, Any]) -> None:
    """Raise `UserError`, which names the first difference, unless it is the same in all processes.

    `what` is nested dictionaries of what JSON holds.
    """
    if count() == 1:
        return
    mine = _flat(what)
    text = json.dumps(mine, sort_keys=True, default=str)
    digests = gather(hashlib.sha256(text.encode()).hexdigest())
    odd = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if odd is None:
        return
    flats = gather(mine if rank() in (0, odd) else {})
    first, other = flats[0], flats[odd]
    one, odd_one = (names()[rank] for rank in (0, odd))
    for key in [*first, *other]:
        if first.get(key) != other.get(key):
            raise UserError(
                f"{odd_one} and {one} differ: {foreign(key)} is "
                f"{foreign(other.get(key, NOT_SET))} in {odd_one} and "
                f"{foreign(first.get(key, NOT_SET))} in {one}; all processes of a job are started "
                "alike"
            )


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = json.loads(json.dumps(value, default=str))
    return found


def publish(key: str, value: Any) -> None:
    """Give a value to whoever asks for it by name: from any thread, in no order."""
    job = current()
    assert job is not None
    job.client.key_value_set(f"{KEY}/named/{key}", json.dumps(value))


def pop(key: str) -> Any:
    """A published value, when it is there; it can be taken once."""
    job = current()
    assert job is not None
    value = json.loads(_get(job, f"{KEY}/named/{key}"))
    job.client.key_value_delete(f"{KEY}/named/{key}")
    return value


def _get(job: Job, key: str) -> str:
    """The value of a key, when it is there; whoever fails to set it ends all (see `failing`)."""
    while True:
        try:  # a few seconds each, for Python to look after signals in between
            return str(job.client.blocking_key_value_get(key, 5_000))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


# -- being stopped ---------------------------------------------------------------------------------


def preempted() -> bool:
    """Whether to stop now, as some process was sent SIGTERM: the same answer in all of them.

    All call it at the same points, each step say: JAX agrees on one of these points, the first
    that none of them has passed yet. From there on the answer is yes.
    """
    job = current()
    if job is None:
        return False
    job.points += 1
    manager: Any = jax_distributed.global_state.preemption_sync_manager
    job.stopping = job.stopping or bool(manager.reached_sync_point(job.points))
    return job.stopping

"""The processes of a job: their names and ranks, and host-side communication between them.

Values are exchanged through the key-value store of JAX's coordination service on process 0, never
through the devices (as `jax.experimental.multihost_utils` does), so that they cannot interfere with
collectives. With one process the functions return at once. `distributed.initialize` creates the
job.
"""

import contextlib
import hashlib
import itertools
import json
import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from types import FrameType
from typing import Any, NoReturn, TypeVar

import jax

# JAX has no public name for its key-value store, nor for its preemption sync points.
from jax._src import distributed as jax_distributed

from spmdtrain.distributed.progress import CONTEXT
from spmdtrain.errors import NOT_SET, UserError, call_by_user, foreign

T = TypeVar("T")

KEY = "spmdtrain"  # prefix of all keys of this package
# Folders of the store, each with a key for each rank.
_AWAITED = f"{KEY}/awaited/"  # set by a process that waits for a value of this one
_POSITION = f"{KEY}/position/"  # the answers
_FIRST_WAIT, _LONGEST_WAIT = 1_000, 5_000  # milliseconds between two looks at the awaited process
_MOST_LISTED = 8  # processes, or different values, in a message
SAME_CODE = "start all processes of a job with the same code and settings"
"""Advice to processes with different values."""


@dataclass(frozen=True)
class Exchange:
    """One call of a `CallSequence`: all processes must make the same one.

    Attributes:
      number: The position of the call in its sequence, from 1.
      what: `broadcast` or `collect`, and the function that calls it.
      caller: The call of the user's code that leads to it; empty without such code.
    """

    number: int
    what: str
    caller: str

    def __str__(self) -> str:
        return f"{self.caller} [{self.what}]" if self.caller else self.what


@dataclass
class CallSequence:
    """The collective calls of one thread.

    All processes make the same calls of a sequence in the same order. Calls of two sequences may
    occur in any order, so a thread in the background has a separate sequence. `name` is the prefix
    of the keys.
    """

    name: str
    last: Exchange = Exchange(0, "no exchange", "")
    """The last call. Its number is the same in all processes, and so identifies it."""
    unread: list[str] = field(default_factory=list)
    """Keys of process 0 that others may still read."""

    def broadcast(self, value: T) -> T:
        """Returns process 0's value in all processes. The value is JSON."""
        job = current()
        if job is None:
            return value
        key = self._next_key("broadcast")
        if job.rank == 0:
            job.client.key_value_set(key, self._packed(value))
            self.unread.append(key)
            result: T = value
        else:
            result = self._get(job, key, 0)
        if self.last.number % 256 == 0:
            self.collect(None)  # deletes the keys that all processes have read
        return result

    def collect(self, value: T) -> list[T]:
        """Returns all processes' values, by rank, in process 0; an empty list in the others."""
        job = current()
        if job is None:
            return [value]
        key = self._next_key("collect")
        if job.rank != 0:
            job.client.key_value_set(f"{key}/{job.rank}", self._packed(value))
            return []
        values = [value]
        for rank in range(1, len(job.names)):
            values.append(self._get(job, f"{key}/{rank}", rank))
            job.client.key_value_delete(f"{key}/{rank}")
        # All processes have made this call, so all have read the earlier broadcasts.
        for old in self.unread:
            job.client.key_value_delete(old)
        self.unread.clear()
        return values

    def gather(self, value: T) -> list[T]:
        """Returns the values of all processes, by rank, in all of them."""
        return self.broadcast(self.collect(value))

    def _next_key(self, way: str) -> str:
        """Begins the next exchange, and returns the key of its values."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals is globals():
            frame = frame.f_back
        function = "" if frame is None else frame.f_code.co_qualname.replace(".<locals>", "")
        number = self.last.number + 1
        self.last = Exchange(number, f"{way} in {function}", call_by_user(frame, way))
        return f"{KEY}/{self.name}/{number}"

    def _packed(self, value: Any) -> str:
        return json.dumps([self.last.what, self.last.caller, value])

    def _get(self, job: "Job", key: str, rank: int) -> Any:
        """Waits for the value of a process, and checks that it belongs to the same exchange."""
        # A process that fails before it sets the value ends the job (see `failures`).
        for waits in itertools.count():
            with contextlib.suppress(_TimeoutError):
                wait = min(_FIRST_WAIT * (waits + 1), _LONGEST_WAIT)
                what, caller, value = json.loads(_get(job, key, wait))
                if what != self.last.what:
                    self._refuse(job, rank, f"by {Exchange(self.last.number, what, caller)}")
                return value
            self._check_position(job, rank)

    def _check_position(self, job: "Job", rank: int) -> None:
        """Checks that the process that this one waits for can still reach the same exchange."""
        if self is not job.main:  # the package alone makes the calls of the others
            return
        job.client.key_value_set(f"{_AWAITED}{rank}", "", allow_overwrite=True)
        try:
            position = json.loads(job.client.key_value_try_get(f"{_POSITION}{rank}"))
        except jax.errors.JaxRuntimeError:  # it has not answered yet
            return
        other = Exchange(*position["last"])
        if other.number == self.last.number and other.what != self.last.what:
            self._refuse(job, rank, f"by {other}")
        if other.number < self.last.number and position["points"] > job.points:
            # It has passed the next point that all processes have in common.
            self._refuse(job, rank, f"left out ({position['doing']})")

    def _refuse(self, job: "Job", rank: int, other: str) -> NoReturn:
        raise UserError(
            f"{job.name} and {job.names[rank]} make different calls: exchange {self.last.number} "
            f"between the processes is made in {job.name} by {foreign(str(self.last), 500)}, and "
            f"in {job.names[rank]} {foreign(other, 500)}; make the same calls in all processes, "
            "and use their results in any of them"
        )


@dataclass
class Job:
    """The processes that train together, and the rank of this one.

    `names` are by rank; `client` is the client of JAX's coordination service.
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
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while `points` increases. A thread that holds it keeps this process before a point."""

    @property
    def name(self) -> str:
        """The name of this process."""
        return self.names[self.rank]

    def answer(self, *, ended: bool = False) -> None:
        """Publishes this process' position if another one waits for it, or if its script has ended.

        It is for another thread than the one that trains.
        """
        awaited, points = f"{_AWAITED}{self.rank}", math.inf if ended else self.points
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # usually no process waits
            if not ended:
                self.client.key_value_try_get(awaited)
                self.client.key_value_delete(awaited)
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            doing = "its script has ended" if ended else call_by_user(frame)
            # After the points: exchanges before a point are counted when the point is.
            position = {"points": points, "last": astuple(self.main.last), "doing": doing}
            key = f"{_POSITION}{self.rank}"
            self.client.key_value_set(key, json.dumps(position), allow_overwrite=True)


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
    job = current()
    return [value] if job is None else job.main.gather(value)


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

    Exceptions of other types propagate in their process only.
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


def agree(
    what: str,
    value: Any,
    advice: str = SAME_CODE,
    *,
    differ: str = "differ",
    details: Callable[[], Mapping[str, str]] | None = None,
) -> None:
    """Checks that a value is equal in all processes.

    Processes exchange digests. Only if these differ, they exchange the first entry that does.

    Args:
      what: The name of the value. It precedes the names of the entries of a mapping, which may be
        nested; "" if these say enough.
      value: JSON values; others are compared by their `str`.
      advice: The end of the message.
      differ: What the processes do that have different values, for the message.
      details: Returns texts by name that show where the value differs, such as the lines of a
        program. Called only if it does.

    Raises:
      UserError: If processes have different values; names the first difference, the processes and
        what each of them has.
    """
    if count() == 1:
        return
    mine = flatten({what: value} if what else value)
    digests = gather(_digest(mine))
    odd = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if odd is None:
        return
    entries = {**(details() if details else {}), **mine}
    by_digest = {_digest([entry, x]): entry for entry, x in entries.items()}
    found = gather(list(by_digest) if rank() in (0, odd) else [])
    unequal = {*found[0]} ^ {*found[odd]}
    digest = next(x for x in [*found[0], *found[odd]] if x in unequal)
    entry = next(x for x in gather(by_digest.get(digest)) if x is not None)
    here = entries.get(entry, NOT_SET)
    values = gather([_digest([entry in entries, here]), foreign(here)])
    chief, (usual, of_chief) = names()[0], values[0]
    others: dict[str, list[str]] = {}  # processes by what they have instead
    for process, (digest, text) in zip(names(), values, strict=True):
        if digest != usual:
            others.setdefault(text, []).append(process)
    which = [process for processes in others.values() for process in processes]
    texts = [f"{text} in {format_names(processes)}" for text, processes in others.items()]
    more = len(texts) - _MOST_LISTED
    texts[_MOST_LISTED:] = [f"{more} more values"] * (more > 0)
    raise UserError(
        f"{format_names([*which, chief])} {differ}: {foreign(entry)} is "
        f"{' and '.join(texts)} and {of_chief} in {chief}; {advice}"
    )


def format_names(processes: Sequence[str]) -> str:
    """Returns names of processes for a message; of many, the first ones and how many more."""
    if len(processes) <= _MOST_LISTED:
        return " and ".join(processes)
    more = len(processes) - _MOST_LISTED
    return f"{', '.join(processes[:_MOST_LISTED])} and {more} more"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested values by their dotted path, as JSON represents them."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = json.loads(json.dumps(value, default=str))
    return flat


class _TimeoutError(Exception):
    """A key that is not set in time."""


def _get(job: Job, key: str, wait: int) -> str:
    """Waits for a key for some milliseconds: few, so that Python handles signals in between."""
    try:
        return str(job.client.blocking_key_value_get(key, wait))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        raise _TimeoutError from error


# -- preemption ------------------------------------------------------------------------------------


def preempted() -> bool:
    """Returns whether to stop because a process received SIGTERM; the same in all processes.

    All processes call it at the same points, such as after each step. After a SIGTERM, JAX chooses
    the first of these points that no process has passed; from that point on the result is True.
    """
    job = current()
    if job is None:
        return False
    with job.lock:
        job.points += 1
    manager: Any = jax_distributed.global_state.preemption_sync_manager
    job.stopping = job.stopping or bool(manager.reached_sync_point(job.points))
    return job.stopping

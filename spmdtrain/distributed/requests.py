"""Requests of a run's owner: read beside the training, and taken at one step by all processes."""

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import jax

from spmdtrain.distributed.process_group import KEY, Job
from spmdtrain.errors import StorageError
from spmdtrain.record import no_follow, requests
from spmdtrain.record.requests import PREFIX, STACKS_FILE, Action, Request, State

_TICK = 1.0  # seconds between two looks for requests
_BARRIER = 5_000  # milliseconds that a process waits until all others have seen a request
_STACKS = 10_000  # milliseconds that process 0 waits for the stacks of another process
_MOST_STACKS = 500_000  # characters of a process


@dataclass
class Requests:
    """The requests to one fit or one `Loop`, which a thread reads.

    With several processes, the thread of process 0 passes a request on to those of the others. They
    agree on a point of `process_group.preempted` as JAX does after a SIGTERM: while no process can
    pass a point, each publishes the last that it has passed, and the one after the last of all is
    the first that no process has passed.

    Attributes:
      folder: The workdir, in process 0.
      start: The name of this start of the run, which a request must have.
      warn: Receives a line about a file that is no valid request.
      job: The processes of the job; None if there is one.
      name: A name of this fit, the same in all processes.
      pending: Requests whose point this process has reached, and which are not answered yet. They
        are the same in all processes between two points.
    """

    folder: Path | None = None
    start: str = ""
    warn: Callable[[str], None] = print
    job: Job | None = None
    name: str = ""
    pending: list[Request] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    agreed: list[tuple[int, Request]] = field(default_factory=list)
    """Requests with the point at which to take them."""
    _number: int = 0  # requests that all processes have seen
    _proposed: list[Request] = field(default_factory=list)  # in process 0: those that they have not
    _refused: set[str] = field(default_factory=set)

    def listen(self) -> None:
        """Reads requests until the run ends: the main function of a thread."""
        while not self.ended.wait(_TICK):
            # The folder may be gone for a while, and the coordination service ends with the job.
            with suppress(OSError, jax.errors.JaxRuntimeError):
                # A listing, because network file systems cache that a name does not exist.
                names = os.listdir(self.folder) if self.folder else ()
                if any(name.startswith(PREFIX) for name in names):
                    self._read()
                if self.job is not None:
                    self._agree(self.job)

    def take(self) -> bool:
        """Makes the requests pending whose point is reached; returns whether one asks to stop."""
        point = 0 if self.job is None else self.job.points
        while self.agreed and self.agreed[0][0] <= point:
            self.pending.append(self.agreed.pop(0)[1])
        return any(request.action == Action.STOP for request in self.pending)

    def answer(self, request: Request, state: State, text: str) -> None:
        """Answers a request, in process 0."""
        if self.folder is not None:
            try:
                requests.write_answer(self.folder, request, state, text)
            except OSError as error:
                self.warn(f"a request cannot be answered: {error}")

    def _read(self) -> None:
        assert self.folder is not None
        try:
            for request in requests.take_requests(self.folder, self.start, self._refused):
                if request.action == Action.STACKS and self.job is None:
                    self._answer_stacks(request, {"this process": _stacks()})
                    continue
                self.answer(request, State.ACCEPTED, "it acts after its current step")
                if self.job is None:
                    self.agreed.append((0, request))
                else:
                    self._proposed.append(request)
        except StorageError as error:
            self.warn(str(error))

    def _agree(self, job: Job) -> None:
        """Agrees with the other processes on the point at which to take the next request."""
        where = f"{KEY}/requests/{self.name}/{self._number}"
        if self._proposed:
            job.client.key_value_set(where, self._proposed[0].to_json(), allow_overwrite=True)
        try:
            request = Request.parse(job.client.key_value_try_get(where))
        except jax.errors.JaxRuntimeError:  # usually there is none
            return
        self._number += 1
        if request.action == Action.STACKS:
            job.client.key_value_set(f"{where}/stacks/{job.rank}", _stacks())
            if self._proposed:
                self._answer_stacks(self._proposed.pop(0), _stacks_of_all(job, where))
            return
        # If a process does not come, process 0 proposes the request once more.
        job.client.wait_at_barrier(f"{where}/seen", _BARRIER)
        with job.lock:
            job.client.key_value_set(f"{where}/at/{job.rank}", json.dumps(job.points))
            job.client.wait_at_barrier(f"{where}/at", _BARRIER)
            points = [json.loads(x) for _, x in job.client.key_value_dir_get(f"{where}/at/")]
            self.agreed.append((max(points) + 1, request))
        if self._proposed:
            self._proposed.pop(0)

    def _answer_stacks(self, request: Request, found: dict[str, str]) -> None:
        assert self.folder is not None
        text = "\n".join(f"== {name}\n{stacks}" for name, stacks in found.items())
        try:
            no_follow.write(self.folder, STACKS_FILE, lambda file: file.write(text.encode()))
        except OSError as error:
            self.answer(request, State.REFUSED, f"{STACKS_FILE} cannot be written: {error}")
            return
        self.answer(request, State.DONE, f"stacks of {', '.join(found)}")


def _stacks() -> str:
    """Returns the Python stacks of all threads of this process but the calling one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}  # the main one first
    frames = sys._current_frames()
    texts = [
        f"-- thread {name}\n{''.join(traceback.format_stack(frames[ident]))}"
        for ident, name in names.items()
        if ident in frames and ident != threading.get_ident()
    ]
    return "".join(texts)[:_MOST_STACKS]


def _stacks_of_all(job: Job, where: str) -> dict[str, str]:
    """Returns the stacks of all processes by name, in process 0."""
    found = {}
    for rank, name in enumerate(job.names):
        try:
            found[name] = job.client.blocking_key_value_get(f"{where}/stacks/{rank}", _STACKS)
        except jax.errors.JaxRuntimeError:
            found[name] = f"no answer within {_STACKS // 1000} s\n"
    job.client.key_value_delete(f"{where}/stacks/")
    return found

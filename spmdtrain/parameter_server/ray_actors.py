"""Ray actors of workers and parameter servers."""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

from spmdtrain.distributed import initialize, progress
from spmdtrain.errors import describe_sys_exit
from spmdtrain.parameter_server import ray_nodes
from spmdtrain.parameter_server.server import Counts, Pulled, Push, PushResult, Server, ServerState
from spmdtrain.parameter_server.state_partition import ServerPartition


class ServerActor:
    """A parameter server (see `Server`) in its own process."""

    def __init__(
        self, partition: ServerPartition, held: ServerState, step: int, max_staleness: int | None
    ) -> None:
        _initialize_process()
        self._server = Server(partition.on_server, held, step, max_staleness)

    def ready(self) -> None:
        """Returns when the process of the actor runs."""

    def pull(self, number: int | None = None) -> Pulled:
        """Returns the current parameters; see `Server.pull`."""
        return self._server.pull(number)

    def push(self, pushed: Push) -> PushResult:
        """Applies a push; see `Server.push`."""
        with progress.phase(progress.Phase.STEP, pushed.number + 1):
            return self._server.push(pushed)

    def held(self) -> tuple[ServerState, int]:
        """Returns the part of the state, and the bound below which all batches are in it."""
        return self._server.held(), self._server.applied.complete

    def counts(self) -> Counts:
        """Returns the numbers of pushes by result."""
        return self._server.counts


class WorkerActor:
    """A worker in its own process.

    It has no arguments, because Ray restarts it after a loss and may have lost them by then.
    """

    def __init__(self) -> None:
        _initialize_process()
        self._function: Callable[[Any], Any] | None = None

    def ready(self) -> None:
        """Returns when the process of the actor runs."""

    def begin(self, make: Callable[[], Callable[[Any], Any]]) -> None:
        """Makes the function that processes work items, if there is none yet."""
        if self._function is None:
            with _exit_as_error():
                self._function = make()

    def do(self, work: Any) -> Any:
        """Returns the result of a work item."""
        assert self._function is not None
        with _exit_as_error():
            return self._function(work)


@contextlib.contextmanager
def _exit_as_error() -> Iterator[None]:
    """Raises `RuntimeError` in place of `SystemExit`, because Ray would end the actor for good."""
    try:
        yield
    except SystemExit as stop:
        raise RuntimeError(describe_sys_exit(stop, "in a worker")) from stop


def _initialize_process() -> None:
    """Sets up the process of an actor.

    It is a single process for JAX, writes to the output of its task, and is killed when its
    parent process, Ray's node, ends.
    """
    initialize.set_single_process()
    progress.begin_for_task()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):  # the task's output is closed, or a socket
            path = f"/proc/{os.environ[ray_nodes.TASK_PROCESS]}/fd/{descriptor}"
            target = os.open(path, os.O_WRONLY | os.O_APPEND)
            os.dup2(target, descriptor)
            os.close(target)

"""What runs at the tasks of workers and of parameter servers, as actors of Ray."""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from spmdtrain.distributed import initialize, progress
from spmdtrain.parameter_server import ray_nodes
from spmdtrain.parameter_server.server import Counts, Pulled, Push, PushResult, Server, ServerState
from spmdtrain.parameter_server.state_partition import ServerPartition


class ServerActor:
    """A parameter server in a process of its own."""

    def __init__(
        self, division: ServerPartition, held: ServerState, step: int, max_staleness: int | None
    ) -> None:
        _settle_in()
        self._server = Server(division.on_server, held, step, max_staleness)

    def ready(self) -> None:
        """Return, which it does once it is there."""

    def pull(self, number: int | None = None) -> Pulled:
        return self._server.pull(number)

    def push(self, pushed: Push) -> PushResult:
        with progress.phase(progress.Phase.STEP, pushed.number + 1):
            return self._server.push(pushed)

    def held(self) -> tuple[ServerState, int]:
        """What it has, and below which number all batches are in it."""
        return self._server.held(), self._server.ledger.complete

    def counts(self) -> Counts:
        """What has come of the pushes to it."""
        return self._server.counts


class WorkerActor:
    """A worker in a process of its own.

    It is made without arguments: Ray makes it again after a loss, and may not have them any more.
    """

    def __init__(self) -> None:
        _settle_in()
        self._do: Callable[[Any], Any] | None = None

    def ready(self) -> None:
        """Return, which it does once it is there."""

    def begin(self, make: Callable[[], Callable[[Any], Any]]) -> None:
        """Be ready: `make` makes what does the work here."""
        if self._do is None:
            self._do = make()

    def do(self, work: Any) -> Any:
        """What comes of some work."""
        assert self._do is not None
        return self._do(work)


def _settle_in() -> None:
    """Be alone to JAX, write to where the task writes, and end with the node in any case."""
    initialize.set_single_process()
    progress.begin_for_task()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):  # where the task's is closed, or a socket
            path = f"/proc/{os.environ[ray_nodes.TASK_PROCESS]}/fd/{descriptor}"
            target = os.open(path, os.O_WRONLY | os.O_APPEND)
            os.dup2(target, descriptor)
            os.close(target)

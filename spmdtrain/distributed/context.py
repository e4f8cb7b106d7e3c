"""State of this process that outlives a run: its job, its progress record, signals, its exit.

This module imports no JAX, because the launcher does not.
"""

import mmap
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spmdtrain.distributed.phase_clock import PhaseClock
    from spmdtrain.distributed.process_group import Job
    from spmdtrain.distributed.progress import Channel


def ignore_failure(reason: str) -> None:
    """Ignores the failure of another process: the default of `ExitState.on_failure`."""


_SAME_REQUEST = 0.3  # seconds in which further signals do not make a request more urgent


class StopRequest:
    """The request of signals to stop this process.

    Signals within 0.3 s of the first are one request, because the scheduler, the terminal and a
    wrapper may each send one.

    Attributes:
      signal: The first signal; None before.
      repeated: Whether another signal came after these 0.3 s, which asks to stop at once.
      acted: Whether a part of this process has begun to stop because of it.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.repeated = self.acted = False
        self._received_at = 0.0

    def hear(self, number: int) -> None:
        """Records a signal."""
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._received_at = signal.Signals(number), now
        elif now - self._received_at > _SAME_REQUEST:
            self.repeated = True


@dataclass
class ExitState:
    """State of the watching thread and of the exit of this process."""

    training: bool = False
    """Whether this process trains now. Outside of training, a lack of progress is not a hang."""
    at_work: int = 0
    """The pid of this process while its end would be a failure, whatever its exit code; else 0."""
    work: str = ""
    """What the process then does, such as `training`."""
    hang_timeout: float = 0.0
    """Seconds without progress after which a process that is alone ends; 0 is never."""
    failing: bool = False
    """Whether the main thread has failed."""
    on_failure: Callable[[str], None] = ignore_failure
    """Called with the reason before this process exits because another one has failed."""
    usual_thread_hook: Any = threading.__excepthook__
    """The hook for uncaught exceptions in threads that `failures` has replaced."""
    stop: Callable[[], None] = lambda: None
    """Stops the watching thread."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    finished: threading.Event = field(default_factory=threading.Event)
    """Set when all processes have reached the end of the job."""


@dataclass
class ProcessContext:
    """State of this process. Only the module in parentheses, if there is one, sets a field."""

    job: "Job | None" = None
    """The job that this process has joined (`process_group`)."""
    initialized: bool = False
    """Whether this process has joined a job, or is known to be alone (`initialize`)."""
    deferred: Callable[..., None] | None = None
    """A call of `initialize` that waits for the name of the strategy (`initialize`)."""
    channel: "Channel | None" = None
    """Publishes the progress of this process; None without a launcher (`progress`)."""
    clock: "PhaseClock | None" = None
    """The seconds of this process in each phase; None before `progress.begin` or a run."""
    stop_request: StopRequest = field(default_factory=StopRequest)
    """The request of signals to stop, until a part has acted on it."""
    exits: ExitState = field(default_factory=ExitState)
    """State of the exit after a failure in this or another process (`failures`)."""
    reserve: mmap.mmap | None = None
    """Reserved address space, freed to report that memory is exhausted (`out_of_memory`)."""
    has_coordinator: bool = False
    """Whether this process has created a `Coordinator`."""
    running_call: Any = None
    """The call that this worker of a `Coordinator` is running: a `remote_call.Running`, or None."""


CONTEXT = ProcessContext()


def stop_request() -> StopRequest:
    """Returns the request to stop this process: a new one if a part has acted on the last."""
    if CONTEXT.stop_request.acted:
        CONTEXT.stop_request = StopRequest()
    return CONTEXT.stop_request

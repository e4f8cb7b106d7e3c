"""Being asked to stop: signals become a question that the training loop asks."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

from spmdtrain.distributed import process_group
from spmdtrain.errors import PreemptedExit


class StopSignals:
    """While entered, the first SIGTERM, SIGUSR1 or SIGINT only sets `asked`; a second ends at once.

    SIGUSR1 is what Slurm sends ahead of a job's end (`--signal=USR1@120`).

    Only the main thread can catch signals; in another one, they are left alone. Where several
    processes train together, SIGTERM to one of them is caught by JAX and concerns all.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            if process_group.count() > 1:
                self._set(self._pass_on, signal.SIGINT, signal.SIGUSR1)
            else:
                self._set(self._catch, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
        return self

    def _set(
        self, handler: Callable[[int, FrameType | None], None], *numbers: signal.Signals
    ) -> None:
        for number in numbers:
            self._before[number] = signal.signal(number, handler)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:  # the next one ends this process; a SIGTERM changes nothing
            self._restore()
        os.kill(os.getpid(), signal.SIGTERM)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self._restore()

    def asked(self) -> bool:
        """Whether a signal has come. All processes ask at the same points, and stop at the same."""
        if self.received is None and process_group.preempted():
            self.received = signal.SIGTERM
        return self.received is not None

    def stop_if_received(self) -> None:
        """Raise `PreemptedExit` if a signal has come; as `asked`."""
        if self.asked():
            assert self.received is not None
            raise PreemptedExit(self.received.name)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()

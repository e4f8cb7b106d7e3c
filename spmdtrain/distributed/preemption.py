"""Preemption: signals that ask a run to stop, checked by the training loop between steps."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

from spmdtrain.distributed import process_group
from spmdtrain.distributed.context import CONTEXT, stop_request
from spmdtrain.errors import PreemptedExit


class StopSignals:
    """Handlers of SIGTERM, SIGUSR1 and SIGINT while entered.

    The first signal is only recorded, for `stop_requested`. A signal more than 0.3 s after it ends
    the process at once. Slurm sends SIGUSR1 before the end of a job (`--signal=USR1@120`). A signal
    that arrives too late for a fit, while its last files are written, stops the next one.

    Only the main thread can handle signals; in another thread nothing is changed. With several
    processes, JAX handles SIGTERM, which then stops all of them, and SIGINT and SIGUSR1 are
    forwarded as SIGTERM.

    Attributes:
      received: The signal that any process has received; None before.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._passed_on: signal.Signals | None = None  # the signal forwarded as SIGTERM
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopSignals":
        stop_request()  # without one that a part has acted on
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
        if number == signal.SIGINT:  # a second SIGINT ends this process; a SIGTERM does not
            self._restore()
        self._passed_on = signal.Signals(number)
        os.kill(os.getpid(), signal.SIGTERM)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        CONTEXT.stop_request.hear(number)
        if CONTEXT.stop_request.repeated:
            CONTEXT.stop_request.acted = True
            self._restore()
            os.kill(os.getpid(), number)

    def stop_requested(self) -> bool:
        """Returns whether to stop: the same in all processes, which call it at the same points."""
        if self.received is None:
            self.received = CONTEXT.stop_request.signal
        if self.received is None and process_group.preempted():
            passed_on = process_group.gather(self._passed_on)
            self.received = signal.Signals(next(filter(None, passed_on), signal.SIGTERM))
        return self.received is not None

    def stop_if_received(self) -> None:
        """Raises `PreemptedExit` after a signal. All processes call it at the same points."""
        if self.stop_requested():
            assert self.received is not None
            CONTEXT.stop_request.acted = True
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
        stop_request()  # without one that a part has acted on

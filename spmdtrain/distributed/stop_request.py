"""The request of signals to stop a process, for all commands. This module imports no JAX."""

import signal
import time

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

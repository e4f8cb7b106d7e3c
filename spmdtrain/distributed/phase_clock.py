"""Seconds that this process has spent in each phase."""

import time
from collections import defaultdict


class PhaseClock:
    """Adds up the time in each phase of the thread that trains.

    Args:
      phase: The phase at the beginning.
    """

    __slots__ = ("_seconds", "_since", "began", "phase")

    def __init__(self, phase: str) -> None:
        self.phase = phase
        self.began = time.time()
        """When the clock was started, in seconds since the epoch."""
        self._since = time.perf_counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def switch(self, phase: str) -> str:
        """Ends the current phase and begins another; returns the one that has ended."""
        now, before = time.perf_counter(), self.phase
        self._seconds[before] += now - self._since
        self.phase, self._since = phase, now
        return before

    def move(self, seconds: float, source: str, target: str) -> None:
        """Counts time of one phase as time of another."""
        self._seconds[source] -= seconds
        self._seconds[target] += seconds

    def read(self) -> dict[str, float]:
        """Returns the seconds by phase, up to now."""
        self.switch(self.phase)
        return {str(phase): max(0.0, seconds) for phase, seconds in self._seconds.items()}

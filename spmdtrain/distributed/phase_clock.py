"""Seconds that this process has spent in each phase."""

import time
from collections import defaultdict
from collections.abc import Sequence


class PhaseClock:
    """Adds up the time in each phase of the thread that trains, which begins in `phase`."""

    __slots__ = ("_marks", "_seconds", "_since", "began", "phase")

    def __init__(self, phase: str) -> None:
        self.phase = phase
        self.began = time.time()
        """When the clock was started, in seconds since the epoch."""
        self._since = time.perf_counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._marks: defaultdict[str, float] = defaultdict(float)  # at the end of an interval

    def switch(self, phase: str) -> str:
        """Ends the current phase and begins another; returns the one that has ended."""
        now, before = time.perf_counter(), self.phase
        self._seconds[before] += now - self._since
        self.phase, self._since = phase, now
        return before

    def end_interval(self, sources: Sequence[str], target: str, *, moves: bool) -> None:
        """Ends an interval, which began with the end of the one before.

        With `moves`, the time of the sources in this interval counts as time of the target.
        """
        self.switch(self.phase)
        for source in sources:
            seconds = self._seconds[source] - self._marks[source] if moves else 0.0
            self._seconds[source] -= seconds
            self._seconds[target] += seconds
            self._marks[source] = self._seconds[source]

    def read(self) -> dict[str, float]:
        """Returns the seconds by phase, up to now."""
        self.switch(self.phase)
        return {str(phase): max(0.0, seconds) for phase, seconds in self._seconds.items()}

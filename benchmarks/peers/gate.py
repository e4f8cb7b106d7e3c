"""What a peer and the benchmark say to each other. A peer imports this and no more of the project.

A peer is a program that trains in segments of as many steps as it was asked for at its start. The
benchmark lets one peer run at a time, so all the others stand at their gates.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

STARTED, ANSWERS = "BENCHMARK_STARTED", "BENCHMARK_ANSWERS"
"""Variables: when the process was started (`time.time()`), and the pipe that answers go to."""
RANK, ADDRESS = "BENCHMARK_RANK", "BENCHMARK_ADDRESS"
"""Variables: which of a peer's processes this is, and the port where the first one listens."""


@dataclass
class _Clock:
    """Seconds that have passed, and those that the processor has worked for this process."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> "_Clock":
        return cls(time.perf_counter(), time.process_time())


class Gate:
    """Where a peer waits for its turn, and tells what the last one took."""

    def __init__(self) -> None:
        # What libraries print goes elsewhere.
        self._answers: TextIO = os.fdopen(int(os.environ[ANSWERS]), "w")
        self._begun: _Clock | None = None
        self._since_start: dict[str, float] = {}
        self.device_peak: Callable[[], float] | None = None
        """Gives the most bytes that the accelerator had in use."""
        self.rank = int(os.environ[RANK])
        self.address = os.environ[ADDRESS]

    def mark(self, event: str) -> None:
        """Note that something has come to pass for the first time: `imported`, `first step`."""
        if event not in self._since_start:
            self._since_start[event] = time.time() - float(os.environ[STARTED])

    def wait(self, **found: float) -> bool:
        """End the segment, whose steps must all be done, and wait for the next; False: no more.

        What else was `found` in it is told, too.
        """
        now = _Clock.now()
        answer: dict[str, Any] = {"since start": self._since_start, **found}
        if self._begun is not None:
            answer["seconds"] = now.wall - self._begun.wall
            answer["cpu seconds"] = now.cpu - self._begun.cpu
        answer["peak MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        if self.device_peak is not None:
            answer["device peak MB"] = self.device_peak() / 2**20
        print(json.dumps(answer), file=self._answers, flush=True)
        again = sys.stdin.readline().strip() == "go"
        self.begin()
        return again

    def begin(self) -> None:
        """Count the segment from now on: what was made ahead while others trained is used up."""
        self._begun = _Clock.now()

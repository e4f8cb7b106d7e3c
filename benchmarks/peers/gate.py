"""Synchronization of a peer with the benchmark.

A peer is a program that trains in segments of a number of steps given at its start. The benchmark
lets one peer run at a time; all others wait at their gates.
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
"""Environment variables: start time (`time.time()`), and file descriptor for reports."""
CHECK = "BENCHMARK_CHECK"
"""Environment variable, set if the peer has to report its work instead of training."""
RANK, ADDRESS = "BENCHMARK_RANK", "BENCHMARK_ADDRESS"
"""Environment variables: rank within the peer, and address of its first process."""


@dataclass
class _Clock:
    """Wall and CPU time of this process in seconds."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> "_Clock":
        return cls(time.perf_counter(), time.process_time())


class Gate:
    """Waits for a peer's turn and reports the previous one."""

    def __init__(self) -> None:
        # A separate pipe, because libraries write to standard output.
        self._answers: TextIO = os.fdopen(int(os.environ[ANSWERS]), "w")
        self._segment_start: _Clock | None = None
        self._since_start: dict[str, float] = {}
        self.device_peak: Callable[[], float] | None = None
        """Returns the peak bytes in use on the accelerator."""
        self.rank = int(os.environ[RANK])
        self.address = os.environ[ADDRESS]
        self.checks = CHECK in os.environ
        """Whether the peer has to call `report_work` instead of training."""

    def mark(self, event: str) -> None:
        """Records the time of the first occurrence of an event: `imported` or `first step`."""
        if event not in self._since_start:
            self._since_start[event] = time.time() - float(os.environ[STARTED])

    def report_work(self, loss: float, parameters: int, flops: float | None, dtypes: str) -> None:
        """Reports a step on the weights and the batch of `same_work`, and ends the process.

        Args:
            loss: The mean loss of the batch.
            parameters: Number of trained parameters.
            flops: FLOPs of the products of the step; None if they are not known.
            dtypes: The dtypes of parameters and products.
        """
        answer = {"loss": loss, "parameters": parameters, "flops": flops, "dtypes": dtypes}
        print(json.dumps(answer), file=self._answers, flush=True)
        os._exit(0)

    def wait(self, **figures: float) -> bool:
        """Ends the segment, whose steps must be complete, and waits for the next one.

        Args:
            figures: Further figures for the report.

        Returns:
            Whether there is a next segment.
        """
        now = _Clock.now()
        answer: dict[str, Any] = {"since start": self._since_start, **figures}
        if self._segment_start is not None:
            answer["seconds"] = now.wall - self._segment_start.wall
            answer["cpu seconds"] = now.cpu - self._segment_start.cpu
        answer["peak MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        if self.device_peak is not None:
            answer["device peak MB"] = self.device_peak() / 2**20
        print(json.dumps(answer), file=self._answers, flush=True)
        has_next = sys.stdin.readline().strip() == "go"
        self.begin()
        return has_next

    def begin(self) -> None:
        """Restarts the segment's clock, after batches prefetched during other turns are used up."""
        self._segment_start = _Clock.now()

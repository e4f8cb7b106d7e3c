"""The file `performance.jsonl`: speed, utilization, memory and goodput during a run."""

import time
from collections.abc import Sequence
from typing import Any

from spmdtrain.record.lines import LinesFile
from spmdtrain.record.run_files import RunFiles
from spmdtrain.sharding.placement import Placement
from spmdtrain.train.program_report import ProgramReport, StepProgram

PyTree = Any
PERFORMANCE_FILE, PROGRAM_REPORT = "performance.jsonl", "program"
_TAGS = {"goodput": "time", "device_memory_bytes": "memory"}  # groups of curves; others are "speed"


class PerformanceLog:
    """Writes a line of `performance.jsonl` for each logged step of training, and `program.json`.

    Args:
      files: The files of the workdir; None without one, and in all processes but process 0.
    """

    def __init__(self, files: RunFiles | None) -> None:
        self._files = files
        self._lines: LinesFile | None = None
        self.loss_is_of_tokens = False
        """Whether each weight of the loss belongs to a token, so that their sum counts tokens."""
        self._weight, self._steps = 0.0, 0  # of the loss, since the last line
        self._report: ProgramReport | None = None
        self._flops: float | None = None  # of one step
        self._is_written = False

    def count_weights(self, weights: Sequence[float]) -> None:
        """Counts the loss's weights, given as a sum for each of several steps."""
        self._weight += sum(weights)
        self._steps += len(weights)

    def describe(
        self, program: StepProgram, params: PyTree, places: PyTree | None, placement: Placement
    ) -> None:
        """Starts to compute the report of the program; arguments as for `ProgramReport`."""
        if self._files is not None and self._report is None:
            self._report = ProgramReport(program, params, places, placement)

    def write_program(self, *, wait: bool = False) -> None:
        """Writes `program.json` once it is computed; waits for that if `wait`."""
        if self._is_written or self._report is None or self._files is None:
            return
        if (content := self._report.content(wait=wait)) is not None:
            self._is_written, self._flops = True, content["flops_per_step"]
            self._files.write_report(PROGRAM_REPORT, content)

    def record(
        self,
        step: int,
        examples_per_second: float | None,
        steps_per_second: float | None,
        input_wait: float | None,
        goodput: float | None,
        devices: Any,
    ) -> dict[str, float]:
        """Writes a line; returns the values for curves, by tag. None is a value that is not known.

        Args:
          steps_per_second: Speed since the last line.
          input_wait: Share of the time in which the devices waited for batches, from 0 to 1.
          goodput: Share of the time since the first start that was spent on steps, from 0 to 1.
          devices: The devices of this process.
        """
        self.write_program()
        known = {
            "examples_per_second": examples_per_second,
            "steps_per_second": steps_per_second,
            "tokens_per_second": self._tokens(steps_per_second),
            "model_flops_utilization": self._utilization(steps_per_second),
            "input_wait": input_wait,
            "device_memory_bytes": peak_memory(devices),
            "goodput": goodput,
        }
        self._weight, self._steps = 0.0, 0
        values = {name: value for name, value in known.items() if value is not None}
        if self._files is not None:
            if self._lines is None:
                self._lines = self._files.lines_file(PERFORMANCE_FILE)
            self._lines.append({"step": step, "time": time.time()} | values)
        return {f"{_TAGS.get(name, 'speed')}/{name}": value for name, value in values.items()}

    def _tokens(self, steps_per_second: float | None) -> float | None:
        if steps_per_second is None or not self.loss_is_of_tokens or not self._steps:
            return None
        return steps_per_second * self._weight / self._steps

    def _utilization(self, steps_per_second: float | None) -> float | None:
        report = self._report
        if steps_per_second is None or report is None or not report.peak or not self._flops:
            return None
        return self._flops * steps_per_second / (report.peak * report.devices)


def peak_memory(devices: Any) -> int | None:
    """Returns the most bytes in use so far on the fullest of this process's devices.

    None if it is not known, as for CPUs.
    """
    found = [device.memory_stats() or {} for device in devices]
    peaks = [stats["peak_bytes_in_use"] for stats in found if "peak_bytes_in_use" in stats]
    return max(peaks, default=None)

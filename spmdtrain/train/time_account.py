"""The time account of a run: `events.jsonl`, and the goodput over all of its starts."""

import functools
import time
from collections.abc import Callable
from typing import Literal

from spmdtrain.distributed import process_group, progress
from spmdtrain.distributed.progress import Phase
from spmdtrain.document.terminal import duration
from spmdtrain.record.lines import (
    EVENTS_FILE,
    LinesFile,
    RunEvent,
    RunTimes,
    last_step,
    read_events,
    run_times,
)
from spmdtrain.record.run_files import RunFiles

_INTERVAL = 30.0  # seconds between two lines of phases with lines of training
_WIDTH = 80  # of the summary


class TimeAccount:
    """Writes the events of one start of a run, and computes the goodput of the run.

    Args:
      files: The files of the workdir; None without one, and in all processes but process 0.
      clock: Returns seconds since the epoch.
    """

    def __init__(self, files: RunFiles | None, clock: Callable[[], float] = time.time) -> None:
        self._files, self._clock = files, clock
        self._phases = progress.take_clock()
        self._lines: LinesFile | None = None
        self._earlier = RunTimes(0.0, 0.0, {})  # of the earlier starts
        self._began = self._phases.began  # when the first start began
        self._done = 0  # the last step that an earlier start has reached
        self._own: list[RunEvent] = []  # of this start, as far as `run_times` needs them
        self._step, self._written_at, self._ended = 0, 0.0, False

    @functools.cached_property
    def earlier_events(self) -> list[RunEvent]:
        """The events of earlier starts, until `begin`; none in a process without files."""
        return [] if self._files is None else read_events(str(self._files.folder))

    def begin(self, step: int, devices: int) -> None:
        """Reads the events of earlier starts, and writes the start from `step`.

        `devices` is the number of devices of all processes.
        """
        began = self._phases.began
        if self._files is not None:
            events = self.earlier_events
            del self.earlier_events  # a long run has many
            self._earlier, self._done = run_times(events), last_step(events)
            starts = [event["time"] for event in events if event["event"] == "start"]
            self._began = min([began, *starts[:1]])
            lost = self._earlier.lost
            gap = max(0.0, began - self._began - self._earlier.wall) if starts else 0.0
            lost["down"] = lost.get("down", 0.0) + gap
            self._lines = self._files.lines_file(EVENTS_FILE)
        start: RunEvent = {"time": began, "event": "start", "step": step}
        start |= {"processes": process_group.count(), "devices": devices}
        self._own, self._step = [start], step
        self._write(start)

    def measure(self, step: int) -> RunTimes | None:
        """Returns the seconds of the run so far by use; None before `begin`.

        `step` is the last step that is known to be done.
        """
        if not self._own:
            return None
        self._step = max(self._step, step)
        event = self._now()
        # Points before the last step of an earlier start tell how long its steps took again.
        if len(self._own) > 1 and self._own[-1].get("step", 0) > self._done:
            self._own.pop()
        self._own.append(event)
        own, lost = run_times(self._own, done=self._done), dict(self._earlier.lost)
        for kind, seconds in own.lost.items():
            lost[kind] = lost.get(kind, 0.0) + seconds
        productive = self._earlier.productive + own.productive
        if event["time"] - self._written_at >= _INTERVAL:
            self._write_phases(event)
        return RunTimes(max(0.0, event["time"] - self._began), productive, lost)

    def log(self, event: Literal["checkpoint", "evaluation"], step: int) -> None:
        """Writes that a checkpoint is being saved or an evaluation is done, and the phases."""
        if self._own:
            self._step = max(self._step, step)
            self._write({"time": self._clock(), "event": event, "step": step})
            self._write_phases(self._now())

    def log_fault(self, step: int, reason: str) -> None:
        """Writes that in a step a device has computed other gradients than the other devices."""
        if self._own:
            self._write({"time": self._clock(), "event": "fault", "step": step, "reason": reason})

    def end(self, status: str, reason: str | None, step: int | None = None) -> None:
        """Writes how this start ended; further calls do nothing.

        Args:
          status: "finished", "failed" or "preempted".
          reason: Why it ended early.
          step: The step that failed; None if that is not known.
        """
        if not self._own or self._ended:
            return
        self._ended = True
        self._write_phases(self._now())
        end: RunEvent = {"time": self._clock(), "event": "end", "status": status}
        end |= {"reason": reason or ""}
        self._write(end if step is None else end | {"step": step})

    def _now(self) -> RunEvent:
        seconds = self._phases.read()
        # Waiting for the compilation in other processes is compilation, too.
        seconds[Phase.COMPILE] = seconds.get(Phase.COMPILE, 0.0) + seconds.pop(Phase.COMPILED, 0.0)
        seconds[Phase.HOST] = seconds.get(Phase.HOST, 0.0) + seconds.pop(Phase.END, 0.0)
        plain = {str(phase): round(seconds.get(phase, 0.0), 6) for phase in _PHASES}
        return {"time": self._clock(), "event": "phases", "step": self._step, "seconds": plain}

    def _write_phases(self, event: RunEvent) -> None:
        self._written_at = event["time"]
        self._write(event)

    def _write(self, event: RunEvent) -> None:
        if self._lines is not None:
            self._lines.append(event)


_PHASES = (
    *(Phase.START, Phase.COMPILE, Phase.RESTORE, Phase.STEP),
    *(Phase.LOAD, Phase.EVALUATE, Phase.SAVE, Phase.HOST),
)


def goodput_line(times: RunTimes) -> str:
    """Returns a line of at most 80 characters: the goodput and the largest other uses of time."""
    line = f"goodput {times.goodput:.0%} of {duration(times.wall)}".replace("%", " %")
    shares = {kind: seconds / times.wall for kind, seconds in times.lost.items() if times.wall > 0}
    separator = ": "
    for kind, share in sorted(shares.items(), key=lambda item: -item[1]):
        part = f"{separator}{kind} {share:.0%}".replace("%", " %")
        if share < 0.005 or len(line) + len(part) > _WIDTH:
            break
        line, separator = line + part, ", "
    return line

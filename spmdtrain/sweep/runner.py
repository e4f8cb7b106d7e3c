"""Execution of the trials of a sweep, several processes at the same time."""

import contextlib
import dataclasses
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

from spmdtrain.distributed import out_of_memory, progress
from spmdtrain.document.terminal import number
from spmdtrain.errors import ExitCode
from spmdtrain.launch.child import Child, Reaper, Signals, TaskExit, describe_exit
from spmdtrain.record import no_follow
from spmdtrain.record.run_files import Status, status_of
from spmdtrain.sweep.live_table import LiveTable, RunningRow
from spmdtrain.sweep.trials import (
    Trial,
    TrialFactory,
    TrialMetrics,
    TrialSource,
    TrialState,
)

LOG = "log.txt"
_POLL_INTERVAL = 0.2  # seconds; signals and the exit of a child interrupt the sleep
_GRACE = 120.0  # seconds that the trials have to save and exit after a signal
_RUN = (sys.executable, "-m", "spmdtrain.run")
# Exits of a run that a signal has ended before it could save.
_STOPPED = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)


class TrialLog:
    """The file `log.txt` in the folder of a trial, to which the trial's output is appended."""

    def __init__(self, folder: Path) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._file = os.fdopen(no_follow.open_file(folder, LOG, flags), "ab", buffering=0)

    def line(self, name: str, stream: str, text: bytes) -> None:
        """Appends a line of standard output or standard error."""
        # A full disk does not stop the trial. A process that has outlived the trial may write after
        # `close`.
        with contextlib.suppress(OSError, ValueError):
            self._file.write(text + b"\n")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


@dataclass
class _Running:
    """A trial whose process runs."""

    trial: Trial
    metrics: TrialMetrics
    child: Child
    log: TrialLog
    slot: int
    pruned: bool = False
    first: tuple[float, int] | None = None  # time and step of the first progress


def _has_finished(trial: Trial) -> bool:
    """Returns whether `status.json` of a trial says that the run has finished."""
    found = status_of(str(trial.folder))
    return found is not None and found["status"] == Status.FINISHED


class SweepRunner:
    """Runs the trials of a sweep.

    Args:
      environments: The environments of the trials that run at the same time, one for each.
      metric: The metric that compares the trials.
      direction: Whether a low (`min`) or a high (`max`) value is better.
      signals: The signals that this process receives.
    """

    def __init__(
        self,
        source: TrialSource,
        factory: TrialFactory,
        environments: Sequence[Mapping[str, str]],
        metric: str,
        direction: Literal["min", "max"],
        signals: Signals,
        table: LiveTable,
    ) -> None:
        self._source, self._factory = source, factory
        self._environments, self._signals, self._table = environments, signals, table
        self._metric, self._direction = metric, direction
        self._running: list[_Running] = []
        self._folder = tempfile.mkdtemp(prefix="spmdtrain-")
        self._reaper = Reaper(self._folder)
        self._oom_kills = out_of_memory.OomKills()
        self._deadline: float | None = None

    def __enter__(self) -> "SweepRunner":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._reaper.close()

    def run(self) -> None:
        """Runs trials until none is left or a signal arrives; then waits for the running trials."""
        while True:
            self._start_trials()
            if not self._running:
                return
            self._signals.wait(_POLL_INTERVAL)
            self._oom_kills.poll()
            if (received := self._signals.received) is not None:
                self._stop_all(received)
            for running in list(self._running):
                # Read after the exit of the process, so that its last lines are included.
                ended = running.child.poll()
                running.metrics.update()
                if ended:
                    self._running.remove(running)
                    self._finish(running)
                elif not running.child.sent:
                    self._prune(running)
            self._table.show([self._row(running) for running in self._running], self._counts())

    def _start_trials(self) -> None:
        free = set(range(len(self._environments))) - {running.slot for running in self._running}
        for slot in sorted(free):
            if self._signals.received or (trial := self._source.next_trial()) is None:
                return
            trial.folder.mkdir(exist_ok=True)
            launched = {progress.LAUNCH: self._folder, progress.TASK: trial.name}
            environment = {**self._environments[slot], **launched, "PYTHONUNBUFFERED": "1"}
            log = TrialLog(trial.folder)
            command = [*_RUN, *self._factory.command_of(trial.values, trial.folder)]
            child = Child(trial.name, command, environment, log, self._reaper)
            trial.state, trial.reason = TrialState.RUNNING, None
            metrics = TrialMetrics(trial, self._metric)
            self._running.append(_Running(trial, metrics, child, log, slot))
            self._table.line(f"{trial.name}: started")

    def _stop_all(self, received: signal.Signals) -> None:
        """Asks all trials to save and exit; kills them at the second signal, or too late."""
        if self._deadline is None:
            self._deadline = time.monotonic() + _GRACE
            self._table.line(
                f"{received.name}: asked {len(self._running)} trials to save and "
                f"exit within {_GRACE:g} s; a second signal kills them"
            )
            for running in self._running:
                self._terminate(running)
        elif self._signals.repeated or time.monotonic() >= self._deadline:
            for running in self._running:
                running.child.kill()

    def _terminate(self, running: _Running) -> None:
        if not running.child.sent:  # a second signal would end it before it has saved
            record = progress.read(self._folder, running.trial.name)
            running.child.send(signal.SIGTERM, record.pid if record else None)

    def _prune(self, running: _Running) -> None:
        evaluations = running.metrics.evaluations
        if not evaluations or max(evaluations) == running.metrics.total_steps:
            return
        if self._source.should_prune(running.trial, evaluations):
            running.pruned = True
            self._terminate(running)

    def _finish(self, running: _Running) -> None:
        trial, ended = running.trial, self._exit_of(running)
        running.log.close()
        stopped = ended.status == ExitCode.PREEMPTED or (
            bool(running.child.sent) and ended.signal in _STOPPED
        )
        if ended.code == ExitCode.DONE and running.metrics.fault:
            trial.state, trial.reason = TrialState.FAILED, running.metrics.fault
        elif ended.code == ExitCode.DONE and not _has_finished(trial):
            trial.state, trial.reason = TrialState.FAILED, "ended (code 0) before its run"
        elif ended.code == ExitCode.DONE:
            trial.state = TrialState.FINISHED
        elif stopped:
            trial.state = TrialState.PRUNED if running.pruned else TrialState.PREEMPTED
        else:
            trial.state = TrialState.FAILED
            trial.reason = describe_exit(ended).removeprefix(f"{trial.name} ")
        best = running.metrics.best(self._direction)
        self._source.record_end(trial, None if best is None else best[1])
        result = (
            "" if best is None else f"; best {self._metric} {number(best[1])} at step {best[0]}"
        )
        how = f"failed: {trial.reason}" if trial.state is TrialState.FAILED else trial.state
        where = "" if trial.state is TrialState.FAILED else f" at step {running.metrics.step}"
        self._table.line(f"{trial.name}: {how}{where}{result}")

    def _exit_of(self, running: _Running) -> TaskExit:
        child = running.child
        assert child.status is not None
        ended = TaskExit(
            child.name,
            child.status,
            record=progress.read(self._folder, child.name),
            reason=progress.read_reason(self._folder, child.name),
            errors=child.errors,
            peak=child.peak,
            work=progress.unfinished_work(self._folder, child.name),
        )
        if ended.signal is signal.SIGKILL and not child.sent:
            return dataclasses.replace(ended, memory=self._oom_kills.reason())
        return ended

    def _row(self, running: _Running) -> RunningRow:
        record = progress.read(self._folder, running.trial.name)
        step = max(running.metrics.step, record.step if record else 0)
        total = running.metrics.total_steps
        last = next(reversed([*running.metrics.evaluations.values()]), None)
        now = time.monotonic()
        if step and running.first is None:
            running.first = (now, step)
        left = None
        if running.first is not None and total is not None and step > running.first[1]:
            began, first = running.first
            left = (now - began) * (total - step) / (step - first)
        phase = str(record.phase) if record else "start"
        state = "stopping" if running.child.sent else phase
        return RunningRow(running.trial.name, state, step, total, last, left)

    def _counts(self) -> dict[TrialState, int]:
        states = [trial.state for trial in self._source.trials]
        counts = {state: states.count(state) for state in TrialState}
        counts[TrialState.WAITING] += self._source.total - len(states)
        return counts

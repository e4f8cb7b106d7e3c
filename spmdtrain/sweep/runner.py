"""Execution of the trials of a sweep, their live progress, and their results."""

import contextlib
import dataclasses
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

from spmdtrain.distributed import out_of_memory, progress
from spmdtrain.document.blocks import TableBlock
from spmdtrain.document.terminal import Terminal, duration, number
from spmdtrain.errors import ExitCode, UserError
from spmdtrain.launch.child import Child, Reaper, Signals, TaskExit, describe_exit
from spmdtrain.launch.task_env import gpus_of
from spmdtrain.record import no_follow
from spmdtrain.sweep.trials import (
    Trial,
    TrialFactory,
    TrialMetrics,
    TrialSource,
    TrialState,
    has_finished,
    was_stopped,
)

# -- Devices of the trials that run at the same time -----------------------------------------------


def trial_environments(
    jobs: int, devices_per_trial: int | None, inherited: Mapping[str, str]
) -> list[dict[str, str]]:
    """Returns the environments of the trials that run at the same time.

    No two of them share a GPU, because each process reserves most of the GPU's memory.

    Args:
      jobs: Number of trials that run at the same time.
      devices_per_trial: Number of GPUs of each, or of virtual CPU devices without a GPU; None for
        an equal share of the GPUs, or the devices that the experiment asks for on the CPU.
      inherited: The environment of this process.

    Raises:
      UserError: If there are too few GPUs, or if this machine has TPUs and jobs is not 1.
    """
    gpus = gpus_of(inherited)
    if not gpus:
        if jobs > 1 and inherited.get("JAX_PLATFORMS") != "cpu" and _has_tpu():
            raise UserError(
                f"--jobs is {jobs}: only one process can use the TPUs of a machine; use --jobs 1, "
                "or set JAX_PLATFORMS=cpu"
            )
        own = {} if devices_per_trial is None else {"JAX_NUM_CPU_DEVICES": str(devices_per_trial)}
        return [{**inherited, **own} for _ in range(jobs)]
    each = devices_per_trial or len(gpus) // jobs
    if not 0 < each * jobs <= len(gpus):
        raise UserError(
            f"--jobs is {jobs} x {each or 1} GPUs, but there are {len(gpus)} ({','.join(gpus)}): "
            "trials cannot share a GPU; change --jobs or --devices-per-trial, or set "
            "JAX_PLATFORMS=cpu"
        )
    return [
        {**inherited, "CUDA_VISIBLE_DEVICES": ",".join(gpus[job * each : (job + 1) * each])}
        for job in range(jobs)
    ]


def _has_tpu() -> bool:
    return any(Path("/dev").glob("accel[0-9]*"))


# -- Live progress of a sweep: a table on a terminal, lines in a log file --------------------------


@dataclass(frozen=True)
class RunningRow:
    """The progress of a trial that runs."""

    name: str
    state: str
    step: int
    total: int | None
    metric: float | None
    """The last value of the metric that compares the trials."""
    seconds_left: float | None


def running_table(
    rows: Sequence[RunningRow], counts: Mapping[TrialState, int], metric: str
) -> TableBlock:
    """Returns the table of the trials that run.

    `counts` are the trials by state, and `metric` compares them.
    """
    states = [state for state in TrialState if counts.get(state) and state != "running"]
    return TableBlock(
        ("trial", "state", "step", metric, "left"),
        [
            (
                row.name.replace(",", " "),
                row.state,
                f"{row.step:,}/{row.total:,}" if row.total else f"{row.step:,}",
                "" if row.metric is None else number(row.metric),
                "" if row.seconds_left is None else duration(row.seconds_left),
            )
            for row in rows
        ],
        numeric=frozenset({2, 3, 4}),
        note=", ".join(f"{counts[state]} {state}" for state in states),
        whole=frozenset({1, 2, 3, 4}),
    )


# -- Execution of the trials of a sweep, several processes at the same time ------------------------

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


class SweepRunner:
    """Runs the trials of a sweep.

    Args:
      environments: The environments of the trials that run at the same time, one for each.
      metric: The metric that compares the trials.
      direction: Whether a low (`min`) or a high (`max`) value is better.
      signals: The signals that this process receives.
      terminal: Where it prints a line for each trial that starts or ends.
      show: Shows the table of the trials that run.
    """

    def __init__(
        self,
        source: TrialSource,
        factory: TrialFactory,
        environments: Sequence[Mapping[str, str]],
        metric: str,
        direction: Literal["min", "max"],
        signals: Signals,
        terminal: Terminal,
        show: Callable[[TableBlock], None],
    ) -> None:
        self._source, self._factory = source, factory
        self._environments, self._signals = environments, signals
        self._terminal, self._show = terminal, show
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
            rows = [self._row(running) for running in self._running]
            self._show(running_table(rows, self._counts(), self._metric))

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
            self._terminal.line(f"{trial.name}: started")

    def _stop_all(self, received: signal.Signals) -> None:
        """Asks all trials to save and exit; kills them at the second signal, or too late."""
        if self._deadline is None:
            self._deadline = time.monotonic() + _GRACE
            self._terminal.line(
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
        elif ended.code == ExitCode.DONE and has_finished(trial):
            trial.state = TrialState.FINISHED
        elif stopped or (ended.code == ExitCode.DONE and was_stopped(trial)):
            trial.state = TrialState.PRUNED if running.pruned else TrialState.PREEMPTED
        elif ended.code == ExitCode.DONE:
            trial.state, trial.reason = TrialState.FAILED, "ended (code 0) before its run"
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
        self._terminal.line(f"{trial.name}: {how}{where}{result}")

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


# -- Results of a sweep: the table of its trials, means over seeds, and `results.json` -------------

FILE = "results.json"
_SEED = "seed"


@dataclass(frozen=True)
class TrialResult:
    """The result of a trial."""

    trial: Trial
    step: int | None
    """The step of the best evaluation; None without an evaluation that is a number."""
    value: float | None
    """The metric at that step."""
    test: float | None
    """The metric of the test split."""


@dataclass(frozen=True)
class SeedMean:
    """The mean over trials that differ only in their seed."""

    values: Mapping[str, str]
    """The other options."""
    count: int
    mean: float
    deviation: float | None
    """Sample standard deviation; None for a single trial."""


def read_results(
    trials: Iterable[Trial], metric: str, direction: Literal["min", "max"]
) -> list[TrialResult]:
    """Reads the results of trials from their files, the best first, results without a value last.

    `direction` is `min` if a low value of the metric is better.
    """
    results = []
    for trial in trials:
        metrics = TrialMetrics(trial, metric)
        metrics.update()
        step, value = metrics.best(direction) or (None, None)
        results.append(TrialResult(trial, step, value, metrics.test))
    sign = 1 if direction == "min" else -1

    def rank(result: TrialResult) -> tuple[bool, float]:
        return result.value is None, sign * (result.value or 0.0)

    return sorted(results, key=rank)


def best_result(results: Sequence[TrialResult]) -> TrialResult | None:
    """Returns the best finished trial with a value, of sorted results; None if there is none."""
    finished = (result for result in results if result.trial.state is TrialState.FINISHED)
    return next((result for result in finished if result.value is not None), None)


def means_over_seeds(
    results: Sequence[TrialResult], direction: Literal["min", "max"]
) -> list[SeedMean]:
    """Returns mean and standard deviation over the seeds, the best mean first.

    There is one for each combination of the other options, over finished trials only; none if the
    seed does not vary.
    """
    groups: dict[tuple[tuple[str, str], ...], list[float]] = {}
    for result in results:
        values = result.trial.values
        if _SEED not in values:
            return []
        if result.trial.state is TrialState.FINISHED and result.value is not None:
            others = tuple((option, values[option]) for option in values if option != _SEED)
            groups.setdefault(others, []).append(result.value)
    means = [
        SeedMean(
            dict(others),
            len(found),
            statistics.fmean(found),
            statistics.stdev(found) if len(found) > 1 else None,
        )
        for others, found in groups.items()
    ]
    return sorted(means, key=lambda mean: mean.mean, reverse=direction == "max")


def result_tables(
    results: Sequence[TrialResult], metric: str, direction: Literal["min", "max"]
) -> list[TableBlock]:
    """Returns the table of the trials, and of the means over the seeds if they vary.

    Args:
      results: Sorted, the best first.
      direction: Whether a low (`min`) or a high (`max`) value is better.
    """
    best = best_result(results)
    options = list(dict.fromkeys(option for r in results for option in r.trial.values))
    shown = {
        option: _shortened([r.trial.values.get(option, "") for r in results]) for option in options
    }
    with_test = any(result.test is not None for result in results)
    rows = [
        [
            "best" if result is best else "",
            *(shown[option][row] for option in options),
            result.trial.state,
            _shown(result.value),
            "" if result.step is None else f"{result.step:,}",
            *([_shown(result.test)] if with_test else []),
        ]
        for row, result in enumerate(results)
    ]
    columns = ["", *options, "state", metric, "at step", *([f"test {metric}"] if with_test else [])]
    marked = frozenset(row for row, result in enumerate(results) if result is best)
    tables = [_of_trials(columns, rows, options, marked, left=len(options) + 1)]
    means = means_over_seeds(results, direction)
    if any(mean.count > 1 for mean in means):
        tables.append(_means_table(means, metric))
    return tables


def _means_table(means: Sequence[SeedMean], metric: str) -> TableBlock:
    options = list(means[0].values)
    shown = {option: _shortened([mean.values[option] for mean in means]) for option in options}
    marked = frozenset([0] if len(means) > 1 else [])
    rows = [
        [
            "best" if row in marked else "",
            *(shown[option][row] for option in options),
            str(mean.count),
            number(mean.mean),
            _shown(mean.deviation),
        ]
        for row, mean in enumerate(means)
    ]
    columns = ["", *options, "seeds", f"mean {metric}", "standard deviation"]
    return _of_trials(columns, rows, options, marked)


def _of_trials(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    options: Sequence[str],
    marked: frozenset[int],
    left: int = 0,
) -> TableBlock:
    """Returns a table whose second and following columns are options of trials.

    All columns but the first and `left` are aligned to the right.
    """
    every = range(len(columns))
    return TableBlock(
        columns,
        rows,
        numeric=frozenset(every[1:]) - {left},
        marked=marked,
        lines=(every[: len(options) + 1], every[len(options) + 1 :]),
    )


def _shortened(values: Sequence[str]) -> Sequence[str]:
    """Rounds the values of an option to three significant digits, if they still differ then."""

    def short(value: str) -> str:
        try:
            return value if len(value) <= 8 or value.isdecimal() else f"{float(value):.3g}"
        except ValueError:
            return value

    found = [short(value) for value in values]
    return found if len(set(found)) == len(set(values)) else values


def _shown(value: float | None) -> str:
    return "" if value is None else number(value)


def write_results(
    folder: Path,
    results: Sequence[TrialResult],
    metric: str,
    direction: Literal["min", "max"],
) -> None:
    """Writes `results.json`: the trials, the best first, and the means over seeds.

    Args:
      folder: The folder of the sweep.
      results: Sorted, the best first.
      direction: Whether a low (`min`) or a high (`max`) value is better.
    """
    best = best_result(results)
    content = {
        "metric": metric,
        "direction": direction,
        "best": best and best.trial.name,
        "trials": [
            {
                "name": result.trial.name,
                "values": dict(result.trial.values),
                "state": result.trial.state,
                "value": result.value,
                "step": result.step,
                "test": None if result.test is None or math.isnan(result.test) else result.test,
                "reason": result.trial.reason,
            }
            for result in results
        ],
        "means": [
            {
                "values": dict(mean.values),
                "trials": mean.count,
                "mean": mean.mean,
                "standard_deviation": mean.deviation,
            }
            for mean in means_over_seeds(results, direction)
        ],
    }
    text = json.dumps(content, indent=2) + "\n"
    no_follow.write(folder, FILE, lambda file: file.write(text.encode()))

"""Trials of a sweep: their options, folders and metrics."""

import contextlib
import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from etils import epath

from spmdtrain.config.command_line import parse_command_line
from spmdtrain.config.run_config import RunConfig
from spmdtrain.errors import StorageError
from spmdtrain.record.readers import GrowingFile
from spmdtrain.record.run_files import Split, Status, parse_metrics_line, status_of
from spmdtrain.record.validation import Malformed, parse_object, read_bytes
from spmdtrain.sweep.specification import option_words, readable_name

_LONGEST_NAME = 100  # characters; file systems allow 255 bytes


class TrialState(enum.StrEnum):
    """The state of a trial in this sweep."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    PRUNED = "pruned"
    """Ended by the search at an evaluation, because others were better at that step."""
    PREEMPTED = "preempted"
    """Ended by a signal; the next sweep in the folder resumes it."""
    FAILED = "failed"


@dataclass
class Trial:
    """One run of a sweep."""

    number: int
    name: str
    """The name of its folder."""
    values: Mapping[str, str]
    """The options that vary, as on a command line."""
    folder: Path
    """The workdir of the run."""
    state: TrialState = TrialState.WAITING
    reason: str | None = None
    """The reason of a failure, in one line."""


class TrialSource(Protocol):
    """The trials in their order, and the decision to end one early."""

    @property
    def trials(self) -> Sequence[Trial]:
        """All trials that are known so far."""

    @property
    def total(self) -> int:
        """Number of trials of the whole sweep."""

    def next_trial(self) -> Trial | None:
        """Returns a trial to run; None if no other is left."""

    def should_prune(self, trial: Trial, evaluations: Mapping[int, float]) -> bool:
        """Returns whether a running trial is to be ended.

        `evaluations` has the metric by step, at least one.
        """

    def record_end(self, trial: Trial, value: float | None) -> None:
        """Records the end of a trial, which has its final state.

        `value` is the best value of its metric; None without an evaluation.
        """


class TrialFactory:
    """Creates the trials of one sweep.

    Args:
      config: The experiment's file.
      arguments: Options of every trial.
      switches: Names of the options that are `--NAME` or `--no-NAME`.
      folder: The folder of the sweep.
      prog: The program's name, for errors of the parser.
    """

    def __init__(
        self,
        config: str,
        arguments: Sequence[str],
        switches: Iterable[str],
        folder: Path,
        prog: str,
    ) -> None:
        self._config, self._arguments = config, arguments
        self._switches, self._prog = frozenset(switches), prog
        self.folder = folder

    def command_of(self, values: Mapping[str, str], workdir: Path) -> list[str]:
        """Returns the arguments of `python -m spmdtrain.run` for a trial."""
        words = [
            word
            for option, value in values.items()
            for word in option_words(option, value, option in self._switches)
        ]
        return [
            *("--config", self._config),
            *self._arguments,
            *words,
            *("--workdir", str(workdir)),
        ]

    def check(self, values: Mapping[str, str]) -> RunConfig:
        """Returns the configuration of a trial.

        Raises:
          UserError: If an option or a value is not valid.
          SystemExit: If the parser has printed an error.
        """
        return parse_command_line(self.command_of(values, self.folder), prog=self._prog).config

    def create(self, number: int, values: Mapping[str, str], name: str) -> Trial:
        """Returns a trial that has not started."""
        return Trial(number, name, values, self.folder / name)

    def grid(self, points: Sequence[Mapping[str, str]]) -> list[Trial]:
        """Returns a trial with a unique name for each point."""
        names = [readable_name(values) for values in points]
        lowered = [name.lower() for name in names]  # some file systems ignore case
        return [
            self.create(number, values, unique_name(number, name, lowered))
            for number, (values, name) in enumerate(zip(points, names, strict=True))
        ]


def unique_name(number: int, name: str, others: Sequence[str]) -> str:
    """Returns a name for a folder, which begins with the number if it is cut or not unique.

    `others` has the names of all trials in lower case, this one included.
    """
    if len(name) <= _LONGEST_NAME and others.count(name.lower()) == 1:
        return name
    return f"{number:03},{name[:_LONGEST_NAME]}"


class GridTrials:
    """All combinations of values, started in their order. Finished trials are not run again."""

    def __init__(self, trials: Sequence[Trial]) -> None:
        self._trials = trials
        for trial in trials:
            status = status_of(str(trial.folder))
            if status is not None and status["status"] == Status.FINISHED:
                trial.state = TrialState.FINISHED
        self._left = iter([trial for trial in trials if trial.state is TrialState.WAITING])

    @property
    def trials(self) -> Sequence[Trial]:
        return self._trials

    @property
    def total(self) -> int:
        return len(self._trials)

    def next_trial(self) -> Trial | None:
        return next(self._left, None)

    def should_prune(self, trial: Trial, evaluations: Mapping[int, float]) -> bool:
        return False

    def record_end(self, trial: Trial, value: float | None) -> None:
        pass


# -- the metrics of a trial ------------------------------------------------------------------------


@dataclass
class TrialMetrics:
    """The metric of a trial by step, read from `metrics.jsonl` while it is written."""

    trial: Trial
    metric: str
    step: int = 0
    """The step of the last line."""
    test: float | None = None
    """The metric of the test split."""
    fault: str = ""
    """The error of the last reading; empty without one."""
    _evaluations: dict[int, float] = field(default_factory=dict)
    _epochs: dict[int, float] = field(default_factory=dict)
    _steps: int | None = None  # length of the run, of which one is set
    _epochs_of_run: int | None = None
    _epoch_end: tuple[int, int] | None = None  # the last epoch, and the step of its end

    def __post_init__(self) -> None:
        self._file = GrowingFile(epath.Path(self.trial.folder / "metrics.jsonl"))

    def update(self) -> None:
        """Reads the lines written since the last call, or all of a file that was replaced.

        A run that resumes replaces the file, without the lines after its checkpoint.
        """
        try:
            while (found := self._file.read()) is not None and not self._file.fault:
                replaced, lines = found
                if replaced:
                    self._evaluations, self._epochs, self.test, self.step = {}, {}, None, 0
                for line in lines:
                    if (content := parse_metrics_line(line)) is not None:
                        self._add(content)
        except StorageError as error:
            self.fault = str(error)  # the next reading has the same lines
            return
        self.fault = self._file.fault

    def _read_length(self) -> None:
        """Reads the length of the run from `config.json`, which it writes at its start."""
        path = epath.Path(self.trial.folder / "config.json")
        with contextlib.suppress(FileNotFoundError, Malformed):
            config = parse_object(read_bytes(path)).get("config")
            if isinstance(config, dict):
                length = [config.get(name) for name in ("steps", "epochs")]
                self._steps, self._epochs_of_run = (n if type(n) is int else None for n in length)

    def _add(self, line: Mapping[str, object]) -> None:
        step, split = line["step"], line["split"]
        assert isinstance(step, int)
        self.step = step
        epoch = line.get("epoch")
        if split == Split.EPOCH and isinstance(epoch, int) and epoch > 0:
            self._epoch_end = epoch, step
        if self.metric not in line:
            return
        value = line[self.metric]
        number = float(value) if isinstance(value, (int, float)) else math.nan
        if split == Split.EVAL:
            self._evaluations[step] = number
        elif split == Split.EPOCH:
            self._epochs[step] = number
        elif split == Split.TEST:
            self.test = number

    @property
    def evaluations(self) -> Mapping[int, float]:
        """The metric by step, on the validation split; without evaluations, of the epochs."""
        return self._evaluations or self._epochs

    @property
    def total_steps(self) -> int | None:
        """The length of the run in steps, if it is known yet."""
        if self._steps is None and self._epochs_of_run is None:
            self._read_length()
        if self._steps is not None:
            return self._steps
        if self._epoch_end is None or self._epochs_of_run is None:
            return None
        epoch, step = self._epoch_end
        return -(-step * self._epochs_of_run // epoch)  # an estimate before the last epoch

    def best(self, direction: Literal["min", "max"]) -> tuple[int, float] | None:
        """Returns step and value of the best evaluation; None without one that is a number.

        `direction` is `min` if a low value is better.
        """
        known = [(step, value) for step, value in self.evaluations.items() if value == value]
        sign = 1 if direction == "min" else -1
        return min(known, key=lambda found: sign * found[1], default=None)

"""Trials of a sweep: their specification, options, folders, metrics and search."""

import contextlib
import dataclasses
import enum
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, get_type_hints

from etils import epath

from spmdtrain.config.command_line import parse_command_line
from spmdtrain.config.run_config import RunConfig
from spmdtrain.errors import CONTROL, StorageError, UserError, did_you_mean, import_extra
from spmdtrain.record import no_follow, validation
from spmdtrain.record.readers import MetricColumns
from spmdtrain.record.run import Run
from spmdtrain.record.run_files import Split, Status
from spmdtrain.record.storage import one_line

# -- Trials of a sweep: their options, folders and metrics -----------------------------------------

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
            if has_finished(trial):
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


# -- the record of a trial -------------------------------------------------------------------------


def has_finished(trial: Trial) -> bool:
    """Returns whether `status.json` of a trial says that the run has finished."""
    status = Run(str(trial.folder)).status
    return status is not None and Status(status["status"]) is Status.FINISHED


def was_stopped(trial: Trial) -> bool:
    """Returns whether `spmdtrain control` has stopped the run of a trial, with exit code 0."""
    status = Run(str(trial.folder)).status
    return status is not None and status.get("reason") == CONTROL


class TrialMetrics:
    """The metric of a trial by step, read from the record of its run while it is written."""

    def __init__(self, trial: Trial, metric: str) -> None:
        self._run, self._metric = Run(str(trial.folder), bounded=True), metric
        self._columns = MetricColumns()
        self.fault = ""
        """The error of the last reading; empty without one."""

    def update(self) -> None:
        """Reads the lines written since the last call, or all of a file that was replaced.

        A run that resumes replaces the file, without the lines after its checkpoint.
        """
        try:
            self._columns, self.fault = self._run.metric_log.read_valid(), ""
        except (StorageError, UserError) as error:  # the next reading has the same lines
            self.fault = str(error)

    def _values(self, split: Split) -> Mapping[int, float]:
        """Returns the metric of a split by step."""
        column = self._columns.get(split, self._metric)
        if column is None:
            return {}
        return dict(zip(*(array.tolist() for array in column.by_step()), strict=True))

    @property
    def step(self) -> int:
        """The last step of the lines; 0 without one."""
        return self._columns.last_step()

    @property
    def test(self) -> float | None:
        """The metric of the test split."""
        return next(reversed([*self._values(Split.TEST).values()]), None)

    @property
    def evaluations(self) -> Mapping[int, float]:
        """The metric by step, on the validation split; without evaluations, of the epochs."""
        return self._values(Split.EVAL) or self._values(Split.EPOCH)

    @property
    def total_steps(self) -> int | None:
        """The length of the run in steps, if it is known yet."""
        config: Mapping[str, Any] = {}
        with contextlib.suppress(UserError, StorageError):  # the next reading may succeed
            config = self._run.config
        steps, epochs = config.get("steps"), config.get("epochs")
        if type(steps) is int:
            return steps
        column = self._columns.get(Split.EPOCH, "epoch")
        last = None if column is None else column.last
        if last is None or last[1] < 1 or type(epochs) is not int:
            return None
        step, epoch = last
        return -(-step * epochs // int(epoch))  # an estimate before the last epoch

    def best(self, direction: Literal["min", "max"]) -> tuple[int, float] | None:
        """Returns step and value of the best evaluation; None without one that is a number.

        `direction` is `min` if a low value is better.
        """
        known = [(step, value) for step, value in self.evaluations.items() if value == value]
        sign = 1 if direction == "min" else -1
        return min(known, key=lambda found: sign * found[1], default=None)


# -- Specification of a sweep: the options that vary, their values, and the file `sweep.json` ------

FILE = "sweep.json"
MOST_TRIALS = 10_000
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"(log:)?({_NUMBER})\.\.({_NUMBER})")
_INTEGER = re.compile(r"[-+]?\d+")
_NOT_SWEPT = {
    "workdir": "each trial has its own, in the folder of the sweep",
    "config": "start a sweep for each experiment",
}


@dataclass(frozen=True)
class ListedValues:
    """An option with the values to try."""

    option: str
    values: tuple[str, ...]
    """As on a command line; several words are separated by spaces."""


@dataclass(frozen=True)
class ValueRange:
    """An option with a range of numbers to try, both ends included."""

    option: str
    low: float
    high: float
    integer: bool
    """Whether only integers are tried."""
    log: bool
    """Whether a search samples on a logarithmic scale."""

    def ends(self) -> tuple[str, str]:
        """Returns both ends as on a command line."""
        return number_text(self.low, self.integer), number_text(self.high, self.integer)


Setting = ListedValues | ValueRange


def number_text(value: float, integer: bool) -> str:
    """Returns a number as on a command line, with all its digits."""
    return str(int(value)) if integer else repr(float(value))


def parse_setting(text: str) -> Setting:
    """Parses an option and its values.

    Args:
      text: `NAME=A,B,...`, `NAME=0..4` (integers, both ends included), `NAME=0.1..0.5` or
        `NAME=log:1e-4..1e-2`. An element of a list may also be a range of integers.

    Raises:
      UserError: If the text has another form, or a value is missing, invalid or given twice.
    """
    name, equals, values = text.partition("=")
    option = name.strip().removeprefix("--").replace("-", "_")
    if not option or not equals:
        raise UserError(
            f"--set {text!r} has no values: write NAME=VALUE,VALUE, such as "
            "learning_rate=1e-3,3e-3 or seed=0..4"
        )
    elements = [element.strip() for element in values.split(",")]
    if "" in elements:
        raise UserError(f"--set {text}: a value is empty")
    ranges = [_range_of(option, element) for element in elements]
    if len(elements) == 1 and ranges[0] is not None:
        return ranges[0]
    listed: list[str] = []
    for element, found in zip(elements, ranges, strict=True):
        listed += [element] if found is None else _integers(found, f"{option}={element}")
    repeated = next((value for value in listed if listed.count(value) > 1), None)
    if repeated is not None:
        raise UserError(f"--set {option}: the value {repeated} is given twice")
    return ListedValues(option, tuple(listed))


def _range_of(option: str, text: str) -> ValueRange | None:
    """Returns the range that a text describes; None if it describes none."""
    if (match := _RANGE.fullmatch(text)) is None:
        if text.startswith("log:"):
            raise UserError(f"--set {option}={text}: write log:LOW..HIGH, two numbers")
        return None
    log, *ends = match.groups()
    integer = all(map(_INTEGER.fullmatch, ends))
    low, high = map(float, ends)
    if not (low <= high and math.isfinite(high - low)) or (low == high and not integer):
        raise UserError(f"--set {option}={text}: the first number must be the smaller one")
    if log and low <= 0:
        raise UserError(f"--set {option}={text}: a logarithmic range begins above 0")
    return ValueRange(option, low, high, integer, bool(log))


def _integers(values: ValueRange, text: str) -> list[str]:
    """Returns the integers of a range; `text` names it in errors."""
    if not values.integer or values.log:
        raise UserError(
            f"--set {text} is a range to sample from: add --search N to try N samples, or list "
            "the values (A,B,C)"
        )
    if values.high - values.low >= MOST_TRIALS:
        raise UserError(f"--set {text}: more than {MOST_TRIALS:,} values")
    return [str(value) for value in range(int(values.low), int(values.high) + 1)]


def parse_settings(texts: Sequence[str]) -> list[Setting]:
    """Parses the options that vary; see `parse_setting`.

    Raises:
      UserError: If there is none, or one of them is not valid or given twice.
    """
    settings = [parse_setting(text) for text in texts]
    if not settings:
        raise UserError("--set is missing: write --set NAME=VALUE,VALUE")
    names = [setting.option for setting in settings]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"--set gives {name} twice: write {name}=A,B,C once")
        if name in _NOT_SWEPT:
            raise UserError(f"--set {name}: it cannot vary in a sweep; {_NOT_SWEPT[name]}")
    return settings


def grid_points(settings: Sequence[Setting]) -> list[dict[str, str]]:
    """Returns all combinations, each as option name to value; the last option varies fastest.

    Raises:
      UserError: If there are too many, or a setting is a range of real numbers.
    """
    values = [
        setting.values
        if isinstance(setting, ListedValues)
        else tuple(_integers(setting, _text_of(setting)))
        for setting in settings
    ]
    if (count := math.prod(map(len, values))) > MOST_TRIALS:
        raise UserError(
            f"--set describes {count:,} trials, and the limit is {MOST_TRIALS:,}: use --search N "
            "to try N of them"
        )
    names = [setting.option for setting in settings]
    return [dict(zip(names, point, strict=True)) for point in itertools.product(*values)]


def _text_of(values: ValueRange) -> str:
    return f"{values.option}={'log:' * values.log}{'..'.join(values.ends())}"


def corners(settings: Sequence[Setting]) -> list[dict[str, str]]:
    """Returns assignments that contain each listed value and both ends of each range at least once.

    A search checks them before it starts, because its trials are not known then.
    """
    values = {
        setting.option: setting.values if isinstance(setting, ListedValues) else setting.ends()
        for setting in settings
    }
    longest = max(map(len, values.values()))
    return [
        {option: found[min(i, len(found) - 1)] for option, found in values.items()}
        for i in range(longest)
    ]


# -- the options of an experiment ------------------------------------------------------------------


def option_kinds(config: RunConfig) -> dict[str, bool]:
    """Returns the options of an experiment, nested ones with a dot, and whether each is a bool."""
    return dict(_fields_of(config, ""))


def _fields_of(group: Any, prefix: str) -> Iterator[tuple[str, bool]]:
    types = get_type_hints(type(group))
    for each in dataclasses.fields(group):
        name, value = f"{prefix}{each.name}", getattr(group, each.name)
        if dataclasses.is_dataclass(value):
            yield from _fields_of(value, f"{name}.")
        else:
            yield name, types[each.name] is bool


def check_option_names(settings: Sequence[Setting], known: Sequence[str]) -> None:
    """Raises `UserError`, with the nearest name, if an option does not exist."""
    for setting in settings:
        if setting.option not in known:
            raise UserError(
                f"--set {setting.option}: the experiment has no such option."
                f"{did_you_mean(setting.option, known)}"
            )


_BOOLS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def option_words(option: str, value: str, is_bool: bool) -> list[str]:
    """Returns the words of a command line that set an option.

    Args:
      value: Several words are separated by spaces.
      is_bool: Whether it is a switch: `--NAME` or `--no-NAME`.

    Raises:
      UserError: If the value of a switch is neither true nor false.
    """
    # The parser keeps underscores at the end of a name.
    words = option.split(".")
    stems = [word.rstrip("_") for word in words]
    parts = [s.replace("_", "-") + w[len(s) :] for s, w in zip(stems, words, strict=True)]
    group, dot, name = ".".join(parts).rpartition(".")
    if not is_bool:
        return [f"--{group}{dot}{name}", *value.split()]
    if value.lower() not in _BOOLS:
        raise UserError(f"--set {option}={value}: the value must be true or false")
    return [f"--{group}{dot}{'' if _BOOLS[value.lower()] else 'no-'}{name}"]


# -- sweep.json ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SweepSpecification:
    """The content of `sweep.json`: everything that the trials of a sweep depend on."""

    config: str
    """The experiment's file."""
    arguments: list[str]
    """Options of every trial."""
    set: dict[str, str]
    """The values of each option that varies, by name, as given."""
    search: int | None
    """Number of trials of a search; None for all combinations."""
    metric: str
    """The evaluation metric that compares the trials."""
    direction: Literal["min", "max"]

    def differences(self, other: "SweepSpecification") -> list[str]:
        """Returns the differences that make another sweep; another number of trials is none."""
        mine, others = _flat(self), _flat(other)
        return [
            f"{name} is {_shown(others.get(name))} there and {_shown(mine.get(name))} here"
            for name in dict.fromkeys([*others, *mine])
            if mine.get(name) != others.get(name)
        ]


def _flat(specification: SweepSpecification) -> dict[str, str]:
    content = dataclasses.asdict(specification)
    content["search"] = "a search" if content["search"] else "a grid"
    content["arguments"] = " ".join(content["arguments"])
    return {**{f"set {k}": v for k, v in content.pop("set").items()}, **content}


def _shown(value: str | None) -> str:
    return "missing" if value is None else value or "empty"


def store_specification(folder: epath.Path, specification: SweepSpecification) -> None:
    """Writes `sweep.json`; a sweep that is stored there must be the same.

    A search may have more trials than the stored one.

    Raises:
      UserError: If the folder holds another sweep, or its file is not valid.
    """
    try:
        text = validation.read_bytes(folder / FILE)
    except FileNotFoundError:
        text = None
    if text is not None:
        try:
            stored = validation.build(SweepSpecification, validation.parse_object(text))
        except validation.Malformed as error:
            raise UserError(f"{folder / FILE} is not the file of a sweep: {error}") from error
        if differences := specification.differences(stored):
            raise UserError(
                f"{folder} holds another sweep: {'; '.join(differences)}. Give another --workdir, "
                "or the options of that sweep to continue it"
            )
    content = json.dumps(dataclasses.asdict(specification), indent=2) + "\n"
    no_follow.write(folder, FILE, lambda file: file.write(content.encode()))


def readable_name(values: Mapping[str, str]) -> str:
    """Returns `NAME=VALUE,NAME=VALUE` with only characters that file names can have everywhere."""
    text = ",".join(f"{option}={value}" for option, value in values.items())
    return re.sub(r"[^\w.,=+-]", "_", text, flags=re.ASCII)


# -- Search with Optuna: samples the options of trials and ends trials that are worse than others

JOURNAL = "search.journal"
_STUDY = "sweep"
_SEED = 0  # of the sampler, so that the same sweep samples the same trials


class SearchTrials:
    """The trials of an Optuna study: TPE samples them, the median rule prunes them.

    The study is stored in the sweep's folder. Trials that a killed sweep has not ended are run
    first. Only one process may use the folder.

    Args:
      settings: The options to sample.
      direction: Whether a low (`min`) or a high (`max`) value of the metric is better.

    Raises:
      UserError: If Optuna is missing, or the stored study is not valid.
    """

    def __init__(
        self,
        folder: Path,
        settings: Sequence[Setting],
        factory: TrialFactory,
        total: int,
        direction: Literal["min", "max"],
        metric: str,
    ) -> None:
        self._optuna = import_extra("optuna", "sweep", "searches (--search)")
        self._settings, self._factory, self._metric = settings, factory, metric
        self.total = total
        self.trials: list[Trial] = []
        self._of_study: dict[int, Any] = {}  # trial number to Optuna's trial
        self._judged: dict[int, int] = {}  # trial number to its last step that was judged
        self._study, self._storage = self._open(folder / JOURNAL, direction)
        self._left = self._restore()

    def _open(self, journal: Path, direction: str) -> tuple[Any, Any]:
        optuna = self._optuna
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        journals = import_extra("optuna.storages.journal", "sweep", "searches (--search)")
        _drop_unfinished_write(journal)
        try:
            storage = journals.JournalStorage(journals.JournalFileBackend(str(journal)))
            study = optuna.create_study(
                storage=storage,
                study_name=_STUDY,
                direction="minimize" if direction == "min" else "maximize",
                pruner=optuna.pruners.MedianPruner(),
                load_if_exists=True,
            )
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{journal} cannot be read: {one_line(error)}") from error
        return study, storage

    def _restore(self) -> list[Trial]:
        """Recreates the trials of the study; returns the ones that a killed sweep has not ended."""
        states = self._optuna.trial.TrialState
        known = {
            states.COMPLETE: TrialState.FINISHED,
            states.PRUNED: TrialState.PRUNED,
            states.FAIL: TrialState.FAILED,
        }
        left = []
        for stored in self._study.get_trials(deepcopy=False):
            trial = self._sample(stored.number)
            trial.state = known.get(stored.state, TrialState.WAITING)
            if trial.state is TrialState.WAITING:
                left.append(trial)
            if trial.state is TrialState.FAILED:
                trial.reason = stored.user_attrs.get("reason")
        return left

    def _sample(self, number: int) -> Trial:
        """Returns the trial with a number; options that are stored keep their values."""
        study_id = self._storage.get_study_id_from_name(_STUDY)
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(study_id, number)
        # The sample of a trial depends on its number and on earlier results. With one sampler for
        # all trials, a resumed search would repeat its first samples.
        self._study.sampler = self._optuna.samplers.TPESampler(seed=_SEED + number)
        sampled = self._optuna.trial.Trial(self._study, trial_id)
        values: dict[str, str] = {}
        shown: dict[str, str] = {}
        for setting in self._settings:
            option = setting.option
            if isinstance(setting, ListedValues):
                values[option] = sampled.suggest_categorical(option, setting.values)
                shown[option] = values[option]
                continue
            suggest = sampled.suggest_int if setting.integer else sampled.suggest_float
            kind = int if setting.integer else float
            value = suggest(option, kind(setting.low), kind(setting.high), log=setting.log)
            values[option] = number_text(value, setting.integer)
            shown[option] = values[option] if setting.integer else f"{value:.3g}"
        name = f"{number:03},{readable_name(shown)}"
        trial = self._factory.create(number, values, unique_name(number, name, [name.lower()]))
        self.trials.append(trial)
        self._of_study[number] = sampled
        return trial

    def next_trial(self) -> Trial | None:
        """Returns a trial that a killed sweep has not ended, or a new one; None after the last."""
        if self._left:
            return self._left.pop(0)
        if len(self.trials) >= self.total:
            return None
        return self._sample(self._study.ask().number)

    def should_prune(self, trial: Trial, evaluations: Mapping[int, float]) -> bool:
        """Reports new evaluations to the study; returns whether other trials were better."""
        last = max(evaluations)
        if self._judged.get(trial.number) == last:
            return False
        self._judged[trial.number] = last
        sampled = self._of_study[trial.number]
        reported = self._study.get_trials(deepcopy=False)[trial.number].intermediate_values
        for step, value in evaluations.items():
            if step not in reported:
                sampled.report(value, step)
        return bool(sampled.should_prune())

    def record_end(self, trial: Trial, value: float | None) -> None:
        """Stores the result of a trial. A preempted trial stays open, for the next sweep."""
        states = self._optuna.trial.TrialState
        if trial.state is TrialState.FINISHED and value is None:
            trial.state = TrialState.FAILED
            trial.reason = f"it finished without an evaluation of {self._metric!r}"
        if trial.state is TrialState.FAILED:
            self._of_study[trial.number].set_user_attr("reason", trial.reason)
            self._study.tell(trial.number, state=states.FAIL)
        elif trial.state is TrialState.PRUNED:
            self._study.tell(trial.number, state=states.PRUNED)
        elif trial.state is TrialState.FINISHED:
            self._study.tell(trial.number, value)


def _drop_unfinished_write(journal: Path) -> None:
    """Removes an incomplete last line and the lock of Optuna, both left by a killed process."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{journal}.lock")
    with contextlib.suppress(FileNotFoundError), journal.open("r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)

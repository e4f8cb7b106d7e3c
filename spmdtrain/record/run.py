"""The record of a run: one reader of everything that a run writes into its folder."""

import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast, get_type_hints

import numpy as np

from spmdtrain.errors import UserError, did_you_mean
from spmdtrain.record.changing_files import Log, ObjectFile, state_to_read
from spmdtrain.record.lines import (
    EVENTS_FILE,
    HASHES_FILE,
    WATCH_FILE,
    HashLog,
    RunEvent,
    StateHash,
    WatchedStep,
    WatchLog,
)
from spmdtrain.record.readers import (
    Column,
    EvaluatorColumns,
    EventLog,
    MediaLog,
    MetricColumns,
    PerformanceColumns,
)
from spmdtrain.record.run_files import (
    MEDIA_LINES,
    OBJECT_FILES,
    PERFORMANCE_FILE,
    ConfigFile,
    ProgramFile,
    Split,
    StatusFile,
    Writer,
    checked_status,
    object_file,
)
from spmdtrain.record.storage import folder_of
from spmdtrain.record.validation import OtherFields, check

if TYPE_CHECKING:
    import pandas

LARGEST_TABLE = 2**30
"""The most values of the table of a split: 8 GiB."""
_EVALUATOR = str(Writer.EVALUATOR)


def open_run(path: str | os.PathLike[str]) -> "Run":
    """Opens the record of a run, which may still be in progress, to read its metrics and files.

    Args:
      path: The workdir of the run, a local folder or a `gs://` or `s3://` URL. It is only read.

    Returns:
      The record of the run. A file is read when its content is asked for.

    Raises:
      UserError: If it is not the workdir of a run.
      StorageError: If it cannot be accessed.
    """
    return Run.open(os.fspath(path))


class Run:
    """The record of a run in its workdir, from `open_run`.

    Each access returns what the run has written so far, and reads only what is new since the last
    access. An incomplete last line is left for the next one. Lines that a resumed run has removed
    do not count, and of several values of a metric at one step the newest counts.

    A file that is missing is empty. `UserError` is raised for a file with another content than a
    run writes, because another user may have written the folder, and `StorageError` if a file
    cannot be accessed.

    Args:
      workdir: A folder or URL, which need not exist yet.
      bounded: Whether metrics of more than 32,768 values are thinned to extremes and means, so that
        the memory does not grow with the files.
    """

    def __init__(self, workdir: str, *, bounded: bool = False) -> None:
        self.workdir, self.folder = workdir, folder_of(workdir)
        self.objects: Mapping[str, ObjectFile] = {
            name: object_file(self.folder, name) for name in OBJECT_FILES
        }
        training, evaluator = (
            self.folder / writer.file("metrics", ".jsonl")
            for writer in (Writer.TRAINING, Writer.EVALUATOR)
        )
        self.metric_log = Log(training, partial(MetricColumns, bounded=bounded))
        self.evaluator_log = Log(evaluator, partial(EvaluatorColumns, bounded=bounded))
        self.performance_log = Log(
            self.folder / PERFORMANCE_FILE, partial(PerformanceColumns, bounded=bounded)
        )
        self.event_log = Log(self.folder / EVENTS_FILE, EventLog)
        self.hash_log = Log(self.folder / HASHES_FILE, HashLog)
        self.media_log = Log(self.folder / MEDIA_LINES, MediaLog)
        self.watch_log = Log(self.folder / WATCH_FILE, partial(WatchLog, bounded=bounded))

    @classmethod
    def open(cls, workdir: str, *, bounded: bool = False) -> "Run":
        """Opens the record of a run that has begun.

        Args:
          workdir: The folder or URL.
          bounded: As for the class.

        Returns:
          The record.

        Raises:
          UserError: If it is not the workdir of a run.
          StorageError: If it cannot be accessed.
        """
        run = cls(workdir, bounded=bounded)
        names = (*OBJECT_FILES, run.metric_log.path.name, "checkpoints")
        if not any(state_to_read(run.folder / name) for name in names):
            raise UserError(
                f"{workdir} is not the workdir of a run: it has no {', no '.join(names[:2])} and "
                f"no {names[3]}"
            )
        return run

    @property
    def config(self) -> Mapping[str, Any]:
        """The resolved options of the last start by name, as JSON values."""
        return self.config_file.get("config", {})

    @property
    def config_file(self) -> ConfigFile:
        """The content of `config.json`: the options, versions, mesh, devices and experiment."""
        return cast(ConfigFile, self._checked("config.json", "the configuration of a run"))

    @property
    def status(self) -> StatusFile | None:
        """The content of `status.json`: status, step of the newest checkpoint, reason of a failure.

        None before the run has written it.
        """
        return checked_status(self.objects["status.json"])

    @property
    def program(self) -> ProgramFile:
        """The content of `program.json`: parameters, operations, collectives, decisions."""
        return cast(ProgramFile, self._checked("program.json", "the program of a run"))

    def _checked(self, name: str, what: str) -> dict[str, Any]:
        """Returns the object in a file after a check of its fields; `what` names it in errors."""
        file = self.objects[name]
        file.refresh()
        content = file.content or {}
        try:
            if file.error is not None:
                raise file.error
            for field, kind in get_type_hints(OBJECT_FILES[name]).items():
                if field in content:
                    check(content[field], kind, field)
        except OtherFields as error:
            raise error.of_file(file.path) from error
        except UserError as error:
            raise UserError(f"{file.path}: not {what}: {error}") from error
        return content

    def _repr_html_(self) -> str:
        """Returns the status, the last metrics and the curve of the loss, for a notebook."""
        from spmdtrain.document.notebook import run_html

        curves = {}
        for split in ("train", "eval", "test"):
            columns = self.metrics(split)
            steps = columns.pop("step")
            curves[split] = [
                (int(step), {name: float(values[n]) for name, values in columns.items()})
                for n, step in enumerate(steps)
            ]
        last = {
            split: {name: value for name, value in lines[-1][1].items() if not math.isnan(value)}
            for split, lines in curves.items()
            if lines
        }
        status = self.status
        where = f"{status['status']}, step {status['step']:,} saved" if status else "not started"
        return run_html(f"{self.workdir}: {where}", last, curves)

    def metrics(self, split: str) -> dict[str, np.ndarray]:
        """Returns the metrics of a split as columns, with a row for each step that has a line.

        Args:
          split: `train`, `epoch`, `eval` or `test`, or `evaluator`: the evaluations by an evaluator
            task.

        Returns:
          The column `step`, int64 and ascending, and the metrics by name, float64, all of shape
          (N,). A metric is NaN where the line of a step lacks it, or it was NaN or infinite. Times
          are in seconds; counts are left out. Without lines, there is only `step`, of shape (0,).

        Raises:
          UserError: If there is no such split, or a line is not one of metrics.
          StorageError: If the file cannot be accessed.
        """
        splits = (*map(str, Split), _EVALUATOR)
        if split not in splits:
            raise UserError(
                f"split is {split!r}, which is no split of a run.{did_you_mean(str(split), splits)}"
            )
        if split == _EVALUATOR:
            return _table(self.evaluator_log, self.evaluator_log.read_all().of_split(Split.EVAL))
        return _table(self.metric_log, self.metric_log.read_all().of_split(split))

    def performance(self) -> dict[str, np.ndarray]:
        """Returns speed, utilization and memory as columns, with a row for each logged step.

        Returns:
          Columns as `metrics` returns them, by the names in docs/logging.md. `time` is in seconds
          since 1970, `device_memory_bytes` in bytes; utilization, input wait and goodput are shares
          from 0 to 1.

        Raises:
          UserError: If a line is not one of performance.
          StorageError: If the file cannot be accessed.
        """
        found = self.performance_log.read_all()
        return _table(self.performance_log, {"time": found.times, **found.columns})

    def table(self, split: str) -> "pandas.DataFrame":
        """Returns the metrics of a split as a table of pandas.

        Args:
          split: As for `metrics`.

        Returns:
          A `pandas.DataFrame` with the columns of `metrics`, and a row for each step.

        Raises:
          UserError: As `metrics` does, or if pandas is not installed.
          StorageError: If the file cannot be accessed.
        """
        try:
            import pandas
        except ModuleNotFoundError as error:
            raise UserError(
                "tables need pandas, which is not installed: pip install pandas"
            ) from error
        return pandas.DataFrame(self.metrics(split))

    @property
    def events(self) -> Sequence[RunEvent]:
        """The events of all starts, in the order of the file, without lines that are not valid."""
        return [*self.event_log.read_valid().events]

    @property
    def hashes(self) -> Mapping[int, StateHash]:
        """The hashes of the state by step, ascending, without lines that are not valid."""
        return {**self.hash_log.read_valid().by_step}

    @property
    def watched(self) -> Mapping[int, WatchedStep]:
        """The statistics of `--watch` by step, ascending, without lines that are not valid."""
        return dict(sorted(self.watch_log.read_valid().by_step.items()))

    @property
    def evaluations(self) -> Mapping[tuple[int, str], Mapping[str, float]]:
        """The metrics by an evaluator task, by step and trajectory of the evaluated state."""
        return self.evaluator_log.read_valid().evaluations


def _table(log: Log[Any], columns: Mapping[str, Column]) -> dict[str, np.ndarray]:
    """Returns the columns of a file with one row for each step of any of them, and the steps.

    Raises `UserError` if the table is too large: of a file of 2 GiB whose lines have different
    names, it would have terabytes of NaN.
    """
    found = {name: column.by_step() for name, column in columns.items()}
    none = np.zeros(0, np.int64)
    steps = np.sort(np.concatenate([none, *(steps for steps, _ in found.values())]))
    is_first = np.append(True, steps[1:] != steps[:-1])[: len(steps)]
    steps = steps[is_first]  # as np.unique, which hashes and takes many times as long
    if len(steps) * len(columns) > LARGEST_TABLE:
        raise UserError(
            f"{log.path}: {len(columns):,} metrics of {len(steps):,} steps are more than "
            f"{LARGEST_TABLE:,} values"
        )
    table = {"step": steps}
    for name, (at, values) in found.items():
        table[name] = np.full(len(steps), np.nan)
        table[name][np.searchsorted(steps, at)] = values
    return table

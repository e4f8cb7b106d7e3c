"""The evaluator beside a training: it waits for checkpoints and evaluates them as they come.

It is none of the training's processes: it has devices and a mesh of its own, and shares with the
training nothing but the workdir, in which each writes files of its own.
"""

import contextlib
import enum
import math
import os
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from spmdtrain.checkpoints.manifest import CheckpointCorruptedError
from spmdtrain.checkpoints.restore import Source, list_checkpoints, read_manifest
from spmdtrain.config import RunConfig
from spmdtrain.config_checks import resolve
from spmdtrain.data.datasets import Dataset, as_dataset
from spmdtrain.distributed import progress
from spmdtrain.distributed.preemption import StopSignals
from spmdtrain.errors import ExitCode, PreemptedExit, StorageError, UserError
from spmdtrain.files.run_files import RunFiles, Split, Status, Writer, status_of
from spmdtrain.files.storage import failures, folder_of, one_line, size_and_time
from spmdtrain.terminal import Terminal
from spmdtrain.train.run_logger import Metrics, RunLogger

T = TypeVar("T")

# Seconds.
_PATIENCE = 60.0  # how long what cannot be read is tried again
_SILENCE = 300.0  # between two lines that say that there is nothing new
_GRACE = 60.0  # for a training that begins with us, or is started again, to say that it runs
_ORPHANED = 600.0  # a launcher starts a failed training again, and says when it does so no more
_SILENT = 3600.0  # a training that was killed says nothing any more


class Which(enum.StrEnum):
    """Which checkpoints to evaluate."""

    EACH = "each"
    """All of them, the oldest first."""
    NEWEST = "newest"
    """The newest there is at the time, and so the last; those that it overtakes are left out."""


class Model(Protocol):
    """What evaluates the checkpoints: a `Trainer`."""

    config: RunConfig
    terminal: Terminal
    check_interrupt: Callable[[], None]

    def restore(self, path: str | None = None) -> int:
        """Takes the parameters of a checkpoint; returns its step."""
        ...

    def evaluate(self, data: Any, *, global_batch_size: int | None = None) -> Metrics:
        """Returns the weighted means over a dataset."""
        ...


def follow(
    trainer: Model,
    config: RunConfig,
    train: Any,
    validation: Any,
    *,
    which: Which = Which.EACH,
) -> int:
    """Evaluates the checkpoints of the training that a configuration describes; see `watch`.

    Args:
      trainer: Evaluates.
      config: Configuration of the training.
      train: Its training data, whose length gives the step at which it ends.
      validation: The data to evaluate on.
      which: The checkpoints to evaluate.

    Returns:
      The exit code.
    """
    known = config.batch_size_per_device is None  # else it takes the training's devices to say
    total = resolve(config, batch_shards=1).total_steps(len(as_dataset(train)))
    return watch(trainer, validation, which=which, total_steps=total if known else None)


def watch(
    trainer: Model,
    validation: Any,
    *,
    which: Which = Which.EACH,
    total_steps: int | None = None,
    poll_seconds: float = 1.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Evaluate the checkpoints of the trainer's workdir until its training has ended.

    `validation` is a dataset or arrays; `total_steps` is where the training is to end. Returns the
    exit code: 75 where a signal has stopped the training or the evaluator, else 0. Started again,
    it goes on after what it has written. Takes a training of which there is nothing new for an
    hour, no line of metrics either, as failed. Raises `UserError` for anything wrong in what it was
    given, a checkpoint of another model too, and `StorageError` for what cannot be written, or
    not be read for a minute.
    """
    workdir = trainer.config.workdir
    if workdir is None:
        raise UserError("an evaluator needs a workdir: that of the training it is to follow")
    if validation is None:
        raise UserError("an evaluator needs a validation split, and there is none")
    dataset = as_dataset(validation, "validation data")
    with StopSignals() as signals, contextlib.closing(RunFiles(workdir, Writer.EVALUATOR)) as files:
        evaluator = _Evaluator(
            trainer=trainer,
            dataset=dataset,
            files=files,
            signals=signals,
            training=_Training(workdir, total_steps, clock),
            checkpoints=_Checkpoints(workdir, Which(which)),
            poll_seconds=poll_seconds,
            clock=clock,
            sleep=sleep,
        )
        before, trainer.check_interrupt = trainer.check_interrupt, signals.stop_if_received
        try:
            return evaluator.run()
        finally:
            trainer.check_interrupt = before


@dataclass
class _Evaluator:
    """One call of `watch`."""

    trainer: Model
    dataset: Dataset
    files: RunFiles
    signals: StopSignals
    training: "_Training"
    checkpoints: "_Checkpoints"
    poll_seconds: float
    clock: Callable[[], float]
    sleep: Callable[[float], None]

    def run(self) -> int:
        """Evaluate until the training has ended; returns the exit code."""
        workdir, terminal = self.trainer.config.workdir, self.trainer.terminal
        try:
            terminal.line(f"evaluator: waiting for checkpoints in {workdir}")
            told = self.files.history(Split.EVAL)
            self._patiently(lambda: self.checkpoints.settle_told(told))
            while (step := self._await_checkpoint()) is not None:
                self._evaluate(step)
        except PreemptedExit as stop:
            terminal.line(f"evaluator: {stop.signal}; start again to go on")
            return ExitCode.PREEMPTED
        terminal.line(f"evaluator: {self.training.describe()}")
        if found := best_and_last(self.files.history(Split.EVAL), self.trainer.config):
            terminal.results(found)
        else:
            terminal.line("evaluator: there was no checkpoint to evaluate")
        preempted = self.training.status is Status.PREEMPTED
        return ExitCode.PREEMPTED if preempted else ExitCode.DONE

    def _await_checkpoint(self) -> int | None:
        """The step to evaluate next; None where the training has ended and nothing is left."""
        text = f"waiting for checkpoints in {self.trainer.config.workdir}"
        told = self.clock()
        with self.trainer.terminal.waiting(text):
            while True:
                self.signals.stop_if_received()
                # In this order: a training that has ended has saved before all that it will.
                ended = self._patiently(lambda: self.training.ended(self.checkpoints.steps))
                anew = self._patiently(self.checkpoints.look)
                if anew is not None:
                    # The training went back and passes its steps again: what was told from here
                    # on is of states that are no more.
                    self.files.rewind(anew - 1)
                step = self.checkpoints.due
                if step is not None or ended:
                    return step
                if self.clock() - told >= _SILENCE:
                    told = self.clock()
                    state = self.training.describe()
                    self.trainer.terminal.line(f"evaluator: nothing new; {state}; still {text}")
                self._pause()
                self._patiently(self.files.sync)

    def _evaluate(self, step: int) -> None:
        """Write how good the checkpoint of a step is, if it can be read."""
        tell, checkpoints = self.trainer.terminal.line, self.checkpoints
        mark = self._patiently(lambda: checkpoints.mark(step))
        with progress.phase(progress.Phase.EVALUATE, step):
            try:
                with progress.phase(progress.Phase.RESTORE):
                    self._patiently(lambda: self.trainer.restore(checkpoints.path(step)))
            except UserError as error:
                if not self._patiently(lambda: checkpoints.holds(step)):
                    tell(f"checkpoint {step} was removed before it was read: skipped")
                elif isinstance(error, CheckpointCorruptedError):
                    tell(f"{error}; skipped")
                    checkpoints.settle(step, mark)
                else:
                    raise
                return
            metrics = self.trainer.evaluate(self.dataset)
        logger = RunLogger(self.trainer.terminal, self.files, self.trainer.config)
        logger.log_evaluation(Split.EVAL, step, metrics)
        self._patiently(lambda: checkpoints.settle(step, mark, evaluated=True))

    def _patiently(self, read: Callable[[], T]) -> T:
        """What `read` returns; storage that does not answer is asked again for a while."""
        began: float | None = None
        while True:
            try:
                return read()
            except StorageError as error:
                if began is None:
                    began = self.clock()
                    self.trainer.terminal.line(f"{error}; trying again for {_PATIENCE:.0f} s")
                elif self.clock() - began >= _PATIENCE:
                    raise
            self._pause()

    def _pause(self) -> None:
        self.sleep(self.poll_seconds)
        self.signals.stop_if_received()


def best_and_last(
    found: Mapping[int, Metrics], config: RunConfig
) -> dict[str, Mapping[str, float]]:
    """The best and the last of the metrics by step, as rows of a table."""
    sign = 1 if config.best_direction == "min" else -1
    values = {
        step: sign * metrics.get(config.best_metric, math.nan) for step, metrics in found.items()
    }
    ranked = [step for step in found if math.isfinite(values[step])]
    rows: dict[str, Mapping[str, float]] = {}
    if ranked:
        best = min(ranked, key=lambda step: (values[step], -step))  # of equals the newer
        rows[f"best: step {best}"] = found[best]
    if found:
        rows[f"last: step {max(found)}"] = found[max(found)]
    return rows


# -- which checkpoint is next ------------------------------------------------------------------


# Tells a checkpoint from another of the same step: when it was saved, and what its arrays hold.
_Mark = tuple[str, int]


class _Checkpoints:
    """The checkpoints of a workdir, and those of them that need no look any more."""

    def __init__(self, workdir: str, which: Which) -> None:
        self._workdir, self._which = workdir, which
        self._source = Source(folder_of(workdir) / "checkpoints", ())
        self._settled: dict[int, _Mark | None] = {}

    def settle_told(self, told: Container[int]) -> None:
        """Settle those that an earlier start has told of."""
        self._source = list_checkpoints(self._workdir)
        for step in self._source.steps:
            if step in told:
                self.settle(step, self.mark(step), evaluated=True)

    def look(self) -> int | None:
        """See what there is now; the first step that has been saved anew, if one has.

        From that one on nothing is settled any more.
        """
        self._source = list_checkpoints(self._workdir)
        anew = None
        # A training that went back saves anew from there on, and sets aside what is newer: from
        # the newest down, all are new up to the first that is as it was.
        for step in reversed(self._source.steps):
            if step in self._settled:
                mark = self.mark(step)
                if mark is None or mark == self._settled[step]:
                    break
                anew = step
        if anew is not None:
            self._settled = {step: mark for step, mark in self._settled.items() if step < anew}
        return anew

    @property
    def steps(self) -> Sequence[int]:
        """Those that there were at the last look."""
        return self._source.steps

    @property
    def due(self) -> int | None:
        """The step to evaluate next, if there was one at the last look."""
        left = [step for step in self._source.steps if step not in self._settled]
        if not left:
            return None
        return left[0] if self._which is Which.EACH else left[-1]

    def settle(self, step: int, mark: _Mark | None, *, evaluated: bool = False) -> None:
        """Leave a checkpoint alone from here on, as long as it has this mark."""
        self._settled[step] = mark
        if evaluated and self._which is Which.NEWEST:
            for older in self._source.steps:
                if older < step and older not in self._settled:
                    self._settled[older] = self.mark(older)

    def holds(self, step: int) -> bool:
        """Whether the checkpoint of a step is still there."""
        return step in list_checkpoints(self._workdir).steps

    def path(self, step: int) -> str:
        """Where the checkpoint of a step is."""
        return str(self._source.path(step))

    def mark(self, step: int) -> _Mark | None:
        """The mark of the checkpoint of a step; None where its manifest cannot be read."""
        try:
            manifest = read_manifest(self.path(step))
        except UserError as error:
            if not isinstance(error, CheckpointCorruptedError) and self.holds(step):
                raise
            return None
        return manifest.saved_at, hash(frozenset(manifest.sums.items()))


# -- what has become of the training -----------------------------------------------------------


class _Training:
    """What the training and its launcher say of it."""

    def __init__(self, workdir: str, total_steps: int | None, clock: Callable[[], float]) -> None:
        self.status: Status | None = None  # before it has begun
        self.step = 0
        self.reason = ""
        self._workdir, self._total_steps, self._clock = workdir, total_steps, clock
        self._launched = bool(os.environ.get(progress.LAUNCH))
        self._read: Mapping[str, Any] | None = {}  # as no status is: the first look is a change
        self._changes = -1
        self._changed_at = 0.0
        self._metrics = folder_of(workdir) / Writer.TRAINING.file("metrics", ".jsonl")
        self._heard: object = None  # what there was of it at the last look
        self._looked_at = clock()
        self._silence = 0.0  # seconds for which that has been the same

    def ended(self, saved: Sequence[int]) -> bool:
        """Whether the training has ended for good, as far as one can know.

        `saved` are the steps of its checkpoints, as far as they have been seen.
        """
        told = progress.job_ended()  # first: a training writes its status before it ends
        found = status_of(self._workdir)
        if found != self._read:
            self._read, self._changed_at = found, self._clock()
            self._changes += 1
        if found is not None:
            self.status, self.step = Status(found["status"]), found["step"]
            self.reason = found.get("reason", "")
        else:
            self.status, self.step, self.reason = None, 0, ""
        self._listen(found, saved)
        if told is not None:
            self._take_over(told)
            return True
        if self.status in (None, Status.RUNNING):
            if self._silence < _SILENT:
                return False
            self.status = Status.FAILED
            self.reason = f"nothing has been heard of it for {_SILENT / 60:.0f} minutes"
            return True
        if self.status is Status.FINISHED and self.step >= (self._total_steps or math.inf):
            return True
        # Else another may follow, by which this is written over: one that begins with us, or, as
        # schedulers start a failed training again, this one.
        stopped = self.status is Status.FINISHED and self._changes > 0
        grace = _ORPHANED if self._launched else 0.0 if stopped else _GRACE
        return self._clock() - self._changed_at >= grace

    def _listen(self, status: object, saved: Sequence[int]) -> None:
        """Count for how long nothing of the training has changed."""
        try:
            metrics = size_and_time(self._metrics)
        except FileNotFoundError:
            metrics = None
        except failures(self._metrics) as error:
            raise StorageError(f"{self._metrics} cannot be read: {one_line(error)}") from error
        heard, now = (status, metrics, tuple(saved)), self._clock()
        # Between two looks we may have been stopped for hours, and the training with us.
        passed = min(now - self._looked_at, _GRACE)
        self._silence = self._silence + passed if heard == self._heard else 0.0
        self._heard, self._looked_at = heard, now

    def _take_over(self, told: str) -> None:
        """The launcher knows better: a training that was killed has written nothing."""
        how, _, reason = told.strip().partition(": ")
        status = Status(how) if how in list(Status) else Status.FAILED
        if status is not self.status:
            self.reason = ""
        self.status, self.reason = status, reason or self.reason

    def describe(self) -> str:
        """What has become of it, for people."""
        if self.status is None:
            return "the training has not begun"
        verb = (
            "was"
            if self.status is Status.PREEMPTED
            else "is"
            if self.status is Status.RUNNING
            else "has"
        )
        reason = f": {self.reason}" if self.reason else ""
        return f"the training {verb} {self.status} at step {self.step:,}{reason}"

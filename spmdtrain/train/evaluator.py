"""The evaluator: evaluates the checkpoints of a training that runs in other processes.

It has its own devices and mesh. It shares only the workdir with the training, and each of the two
writes its own files there.
"""

import contextlib
import math
import os
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from spmdtrain.checkpoints.listing import Source, list_checkpoints
from spmdtrain.checkpoints.manifest import CheckpointCorruptedError
from spmdtrain.checkpoints.restore import read_manifest
from spmdtrain.checkpoints.run_identity import Identity
from spmdtrain.config.options import Which
from spmdtrain.config.run_config import RunConfig
from spmdtrain.data.datasets import Dataset
from spmdtrain.data.training_data import examples_per_epoch, run_dataset, training_data
from spmdtrain.distributed import failures, progress
from spmdtrain.distributed.failures import StopSignals
from spmdtrain.document.terminal import Terminal
from spmdtrain.errors import ExitCode, PreemptedExit, StorageError, UserError
from spmdtrain.record.changing_files import file_state
from spmdtrain.record.run import Run
from spmdtrain.record.run_files import RunFiles, Split, Status, Writer
from spmdtrain.record.storage import folder_of
from spmdtrain.sharding.mesh import resolve
from spmdtrain.trackers.run_trackers import evaluator_trackers
from spmdtrain.train.run_logger import Metrics, RunLogger

T = TypeVar("T")

# Seconds.
_PATIENCE = 60.0  # how long a failing read is repeated
_SILENCE = 300.0  # between two lines that say that there is nothing new
_GRACE = 60.0  # in which a training that starts or restarts writes its status
_ORPHANED = 600.0  # the same under a launcher, which restarts a training and reports its end
MAX_SILENCE = 3600.0  # without any change, after which a training counts as killed


class Model(Protocol):
    """Evaluates checkpoints: a `Trainer`."""

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
    """Evaluates the checkpoints of the training with a configuration; returns `watch`'s exit code.

    Args:
      config: Configuration of the training.
      train: Its training data, whose length gives the step at which it ends.
      validation: The data to evaluate on.
    """
    # A batch size per device gives the total only with the devices of the training.
    known = config.batch_size_per_device is None
    resolved = resolve(config, batch_shards=1)
    needed = known and config.steps is None
    size = examples_per_epoch(training_data(train, resolved)) if needed else 0
    total = resolved.total_steps(size) if known else None
    return watch(trainer, validation, which=which, total_steps=total)


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
    """Evaluates the checkpoints of the trainer's workdir until its training has ended.

    A second start continues after the evaluations that the first one wrote. A training without any
    new status, checkpoint or line of metrics for an hour counts as failed.

    Args:
      validation: A dataset or arrays.
      total_steps: The step at which the training ends, if it is known.
      poll_seconds: Seconds between two reads of the workdir.

    Returns:
      The exit code: 75 if a signal has stopped the training or the evaluator, and 0 otherwise.

    Raises:
      UserError: If an argument is wrong, or a checkpoint is of another model.
      StorageError: If a file cannot be written, or cannot be read for a minute.
    """
    workdir = trainer.config.workdir
    if workdir is None:
        raise UserError("an evaluator needs a workdir: that of the training to evaluate")
    if validation is None:
        raise UserError("an evaluator needs a validation split, and there is none")
    dataset = run_dataset(validation, trainer.config, "validation data")
    log = trainer.terminal.line
    with (
        StopSignals() as signals,
        contextlib.closing(RunFiles(workdir, Writer.EVALUATOR, report=log)) as files,
        contextlib.closing(evaluator_trackers(trainer.config, files, log)) as trackers,
    ):
        evaluator = _Evaluator(
            trainer=trainer,
            dataset=dataset,
            files=files,
            logger=RunLogger(trainer.terminal, files, trainer.config, trackers=trackers),
            signals=signals,
            training=_Training(workdir, total_steps, clock),
            checkpoints=_Checkpoints(workdir, Which(which)),
            poll_seconds=poll_seconds,
            clock=clock,
            sleep=sleep,
        )
        trackers.start(max(files.history(Split.EVAL), default=0), {})
        before, trainer.check_interrupt = trainer.check_interrupt, signals.stop_if_received
        try:
            with failures.work_in_progress(failures.EVALUATION):
                return evaluator.run()
        finally:
            trainer.check_interrupt = before


@dataclass
class _Evaluator:
    """One call of `watch`."""

    trainer: Model
    dataset: Dataset
    files: RunFiles
    logger: RunLogger
    signals: StopSignals
    training: "_Training"
    checkpoints: "_Checkpoints"
    poll_seconds: float
    clock: Callable[[], float]
    sleep: Callable[[float], None]

    def run(self) -> int:
        """Evaluates until the training has ended; returns the exit code."""
        workdir, terminal = self.trainer.config.workdir, self.trainer.terminal
        try:
            terminal.line(f"evaluator: waiting for checkpoints in {workdir}")
            self._patiently(self.checkpoints.look)
            self._forget_left()
            evaluated = self.files.trajectories(Split.EVAL)
            self._patiently(lambda: self.checkpoints.settle_evaluated(evaluated))
            while (step := self._await_checkpoint()) is not None:
                self._evaluate(step)
        except PreemptedExit as stop:
            terminal.result(f"evaluator: {stop.signal}; run the command again to resume")
            return ExitCode.PREEMPTED
        terminal.line(f"evaluator: {self.training.describe()}")
        if found := best_and_last(self.files.history(Split.EVAL), self.trainer.config):
            terminal.results(found)
        else:
            terminal.line("evaluator: there was no checkpoint to evaluate")
        preempted = self.training.status is Status.PREEMPTED
        return ExitCode.PREEMPTED if preempted else ExitCode.DONE

    def _await_checkpoint(self) -> int | None:
        """Waits for the step to evaluate next; None if the training has ended and none is left."""
        text = f"waiting for checkpoints in {self.trainer.config.workdir}"
        last_line = self.clock()
        with self.trainer.terminal.waiting(text):
            while True:
                self.signals.stop_if_received()
                # In this order: a training that has ended has saved all its checkpoints before.
                ended = self._patiently(lambda: self.training.ended(self.checkpoints.steps))
                resaved = self._patiently(self.checkpoints.look)
                if resaved is not None:
                    # The training went back and runs its steps again: the evaluations from here
                    # on are of states that no longer exist.
                    self.files.rewind(resaved - 1)
                    self.logger.trackers.rewind(resaved - 1)
                self._forget_left()
                step = self.checkpoints.due
                if step is not None or ended:
                    return step
                if self.clock() - last_line >= _SILENCE:
                    last_line = self.clock()
                    state = self.training.describe()
                    self.trainer.terminal.line(f"evaluator: nothing new; {state}; still {text}")
                self._pause()
                self._patiently(self.files.sync)

    def _forget_left(self) -> None:
        """Removes the evaluations of states that the training has left by going back."""
        evaluated = self.files.trajectories(Split.EVAL)
        if not (left := self._patiently(lambda: self.checkpoints.left(evaluated))):
            return
        self.files.remove(left)
        trackers = self.logger.trackers
        trackers.rewind(min(left) - 1)
        for step, metrics in self.files.history(Split.EVAL).items():
            if step > min(left):  # its curves were removed as well
                trackers.scalars(step, {f"{Split.EVAL}/{n}": x for n, x in metrics.items()})

    def _evaluate(self, step: int) -> None:
        """Evaluates the checkpoint of a step and writes its metrics, if it can be read."""
        log, checkpoints = self.trainer.terminal.line, self.checkpoints
        mark = self._patiently(lambda: checkpoints.mark(step))
        with progress.phase(progress.Phase.EVALUATE, step):
            try:
                with progress.phase(progress.Phase.RESTORE):
                    self._patiently(lambda: self.trainer.restore(checkpoints.path(step)))
            except UserError as error:
                if not self._patiently(lambda: checkpoints.holds(step)):
                    log(f"checkpoint {step} was removed before it was read: skipped")
                elif isinstance(error, CheckpointCorruptedError):
                    log(f"{error}; skipped")
                    checkpoints.settle(step, mark)
                else:
                    raise
                return
            metrics = self.trainer.evaluate(self.dataset)
        self.files.check_lock()
        name = "" if mark is None else mark.trajectory
        self.logger.log_evaluation(Split.EVAL, step, metrics, trajectory=name)
        self._patiently(lambda: checkpoints.settle(step, mark, evaluated=True))

    def _patiently(self, read: Callable[[], T]) -> T:
        """Returns what `read` returns; repeats it for a minute if the storage fails."""
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
        progress.heartbeat()  # to wait is no hang
        self.signals.stop_if_received()


def best_and_last(
    found: Mapping[int, Metrics], config: RunConfig
) -> dict[str, Mapping[str, float]]:
    """Returns the best and the last metrics by step, as rows of a table."""
    sign = 1 if config.best_direction == "min" else -1
    values = {
        step: sign * metrics.get(config.best_metric, math.nan) for step, metrics in found.items()
    }
    ranked = [step for step in found if math.isfinite(values[step])]
    rows: dict[str, Mapping[str, float]] = {}
    if ranked:
        best = min(ranked, key=lambda step: (values[step], -step))  # the newer of equals
        rows[f"best: step {best}"] = found[best]
    if found:
        rows[f"last: step {max(found)}"] = found[max(found)]
    return rows


# -- which checkpoint is next ------------------------------------------------------------------


@dataclass(frozen=True)
class _Mark:
    """The properties that distinguish checkpoints of the same step."""

    saved_at: str
    sums: int
    trajectory: str
    identity: Identity = field(compare=False)


class _Checkpoints:
    """The checkpoints of a workdir, and the record of the ones that are done."""

    def __init__(self, workdir: str, which: Which) -> None:
        self._workdir, self._which = workdir, which
        self._source = Source(folder_of(workdir) / "checkpoints", ())
        self._settled: dict[int, _Mark | None] = {}
        self._newest: int | None = None  # the newest step for which `left` has an answer

    def settle_evaluated(self, evaluated: Container[int]) -> None:
        """Marks the listed checkpoints that an earlier start has evaluated as done."""
        for step in self._source.steps:
            if step in evaluated:
                self.settle(step, self.mark(step), evaluated=True)

    def left(self, evaluated: Mapping[int, str]) -> set[int]:
        """Returns the steps of evaluations whose states the training has left.

        Only a new checkpoint shows that; without one, the result is empty. `evaluated` maps steps
        to the trajectories of the evaluated states.
        """
        step = max(self._source.steps, default=None)
        if step == self._newest or step is None or (newest := self.mark(step)) is None:
            return set()
        self._newest = step
        now = {each: newest.identity.trajectory_at(each) for each in evaluated}
        for each in self._source.steps:
            if each in evaluated and (mark := self.mark(each)) is not None:
                now[each] = mark.trajectory
        return {each for each, trajectory in evaluated.items() if trajectory != now[each]}

    def look(self) -> int | None:
        """Lists the checkpoints; returns the first step that was saved again, or None.

        Checkpoints from that step on are evaluated again.
        """
        self._source = list_checkpoints(self._workdir)
        resaved = None
        # A training that went back saves its steps again and quarantines newer checkpoints. So the
        # newest checkpoints are new ones, down to the first that has not changed.
        for step in reversed(self._source.steps):
            if step in self._settled:
                mark = self.mark(step)
                if mark is None or mark == self._settled[step]:
                    break
                resaved = step
        if resaved is not None:
            self._newest = None
            self._settled = {step: mark for step, mark in self._settled.items() if step < resaved}
        return resaved

    @property
    def steps(self) -> Sequence[int]:
        """The steps of the checkpoints at the last listing."""
        return self._source.steps

    @property
    def due(self) -> int | None:
        """The step to evaluate next; None if all checkpoints of the last listing are done."""
        left = [step for step in self._source.steps if step not in self._settled]
        if not left:
            return None
        return left[0] if self._which is Which.EACH else left[-1]

    def settle(self, step: int, mark: _Mark | None, *, evaluated: bool = False) -> None:
        """Marks a checkpoint as done, as long as it keeps this mark."""
        self._settled[step] = mark
        if evaluated and self._which is Which.NEWEST:
            for older in self._source.steps:
                if older < step and older not in self._settled:
                    self._settled[older] = self.mark(older)

    def holds(self, step: int) -> bool:
        """Returns whether the checkpoint of a step still exists."""
        return step in list_checkpoints(self._workdir).steps

    def path(self, step: int) -> str:
        return str(self._source.path(step))

    def mark(self, step: int) -> _Mark | None:
        """Returns the mark of a checkpoint; None if its manifest cannot be read."""
        try:
            manifest = read_manifest(self.path(step))
        except UserError as error:
            if not isinstance(error, CheckpointCorruptedError) and self.holds(step):
                raise
            return None
        identity, sums = manifest.identity, hash(frozenset(manifest.sums.items()))
        return _Mark(manifest.saved_at, sums, identity.trajectory_at(step), identity)


# -- the training ------------------------------------------------------------------------------


class _Training:
    """The state of the training, as its files and its launcher report it."""

    def __init__(self, workdir: str, total_steps: int | None, clock: Callable[[], float]) -> None:
        self.status: Status | None = None  # None before the training has begun
        self.step = 0
        self.reason = ""
        self._run, self._total_steps, self._clock = Run(workdir), total_steps, clock
        self._launched = bool(os.environ.get(progress.LAUNCH))
        self._read: Mapping[str, Any] | None = {}  # no status is empty, so the first read differs
        self._changes = -1
        self._changed_at = 0.0
        self._heard: object = None  # status, metrics file and checkpoints at the last read
        self._looked_at = clock()
        self._silence = 0.0  # seconds without a change of these

    def ended(self, saved: Sequence[int]) -> bool:
        """Returns whether the training has ended and will not be restarted.

        `saved` has the steps of its checkpoints at the last listing.
        """
        outcome = progress.job_ended()  # first: a training writes its status before it ends
        found = self._run.status
        if found != self._read:
            self._read, self._changed_at = found, self._clock()
            self._changes += 1
        if found is not None:
            self.status, self.step = Status(found["status"]), found["step"]
            self.reason = found.get("reason", "")
        else:
            self.status, self.step, self.reason = None, 0, ""
        self._listen(found, saved)
        if outcome is not None:
            self._take_over(outcome)
            return True
        if self.status in (None, Status.RUNNING):
            if self._silence < MAX_SILENCE:
                return False
            self.status = Status.FAILED
            self.reason = f"nothing has been heard of it for {MAX_SILENCE / 60:.0f} minutes"
            return True
        total = math.inf if self._total_steps is None else self._total_steps
        if self.status is Status.FINISHED and self.step >= total:
            return True
        # Otherwise a new status may follow: of a training that starts together with the evaluator,
        # or of this one, if a scheduler restarts it.
        stopped = self.status is Status.FINISHED and self._changes > 0
        grace = _ORPHANED if self._launched else 0.0 if stopped else _GRACE
        return self._clock() - self._changed_at >= grace

    def _listen(self, status: object, saved: Sequence[int]) -> None:
        """Counts the seconds since the last change of the training's files."""
        metrics = file_state(self._run.metric_log.path)
        heard, now = (status, metrics, tuple(saved)), self._clock()
        # The whole machine may have been stopped for hours between two reads.
        passed = min(now - self._looked_at, _GRACE)
        self._silence = self._silence + passed if heard == self._heard else 0.0
        self._heard, self._looked_at = heard, now

    def _take_over(self, outcome: str) -> None:
        """Takes the launcher's status, because a killed training has written none."""
        how, _, reason = outcome.strip().partition(": ")
        status = Status(how) if how in list(Status) else Status.FAILED
        if status is not self.status:
            self.reason = ""
        self.status, self.reason = status, reason or self.reason

    def describe(self) -> str:
        """Returns the state of the training as a sentence."""
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

"""Shipped callbacks: early ends, learning rates, samples, copies of checkpoints."""

import contextlib
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, TypedDict

import jax
import numpy as np
from etils import epath

from spmdtrain.checkpoints.manifest import NAME as MANIFEST
from spmdtrain.checkpoints.manifest import steps_in
from spmdtrain.data.datasets import Subset, as_dataset
from spmdtrain.distributed import process_group
from spmdtrain.distributed.progress import CONTEXT
from spmdtrain.document.terminal import number
from spmdtrain.errors import UserError, did_you_mean
from spmdtrain.record.storage import absolute, folder_of, is_url, one_line
from spmdtrain.record.validation import check
from spmdtrain.step import hyperparameters
from spmdtrain.strategies import strategy
from spmdtrain.trackers.base import Text
from spmdtrain.train.callbacks import CallbackContext

# -- The base of callbacks that react when a metric of the evaluations stops improving -------------

Direction = Literal["min", "max"]


class _State(TypedDict):
    best: float | None
    best_step: int
    waited: int
    step: int


class MetricWatch:
    """Callback that watches a metric of evaluations. The base of callbacks that react to it.

    A value that is NaN or infinite is no improvement.

    Args:
      metric: The name of the metric.
      patience: Number of evaluations without an improvement after which `on_patience_end` is
        called.
      min_delta: The difference to the best value that counts as an improvement.
      direction: Whether a low (min) or a high (max) value is better.

    Raises:
      UserError: If an argument is wrong.
    """

    def __init__(
        self, metric: str, *, patience: int, min_delta: float, direction: Direction
    ) -> None:
        kind = type(self).__name__
        if not isinstance(patience, int) or patience < 1:
            raise UserError(f"{kind}: patience is {patience!r}: it must be an integer, 1 or more")
        if not min_delta >= 0:
            raise UserError(f"{kind}: min_delta is {min_delta!r}: it must be 0 or more")
        if direction not in ("min", "max"):
            raise UserError(f"{kind}: direction is {direction!r}: it must be 'min' or 'max'")
        self.metric, self.patience = metric, patience
        self.min_delta, self.direction = min_delta, direction
        self.name = f"{kind}({metric})"
        self.best: float | None = None
        """The best value so far; None before the first evaluation."""
        self.best_step = 0
        """The step of the best value."""
        self.waited = 0
        """Number of evaluations since the last improvement."""
        self._step = -1  # of the last evaluation that was counted

    def fit_start(self, event: CallbackContext) -> None:
        """Checks that the run evaluates.

        Args:
          event: The event.

        Raises:
          UserError: If the run cannot have this callback.
        """
        if event.trainer.config.evaluated_by == "evaluator":
            raise UserError(
                f"{self.name} needs the evaluations of the training, and evaluated_by is "
                "'evaluator': leave it out, or evaluate in the training"
            )

    def evaluation(self, event: CallbackContext) -> None:
        """Counts an evaluation.

        Args:
          event: The event.
        """
        value = metric_of(event, self.metric, self.name)
        if event.step <= self._step:
            return  # it is repeated after an interruption, and is counted already
        self._step = event.step
        sign = 1 if self.direction == "min" else -1
        if math.isfinite(value) and (
            self.best is None or sign * value < sign * self.best - self.min_delta
        ):
            self.best, self.best_step, self.waited = value, event.step, 0
        else:
            self.waited += 1
        if self.waited >= self.patience:
            self.on_patience_end(event)

    def on_patience_end(self, event: CallbackContext) -> None:
        """Reacts to `patience` or more evaluations in a row without an improvement.

        Args:
          event: The event.
        """
        raise NotImplementedError

    def fit_end(self, event: CallbackContext) -> None:
        """Prints a warning if there was no evaluation.

        Args:
          event: The event.
        """
        if self._step < 0:
            text = f"{self.name} had no effect, because the run has no evaluation (validation=...)"
            event.trainer.terminal.warning(text)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as JSON values."""
        return dict(
            _State(best=self.best, best_step=self.best_step, waited=self.waited, step=self._step)
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a state that `state_dict` returned.

        Args:
          state: The state.
        """
        check(state, _State, self.name)
        self.best, self.best_step = state["best"], state["best_step"]
        self.waited, self._step = state["waited"], state["step"]


def metric_of(event: CallbackContext, metric: str, name: str) -> float:
    """Returns a metric of an evaluation: the value of process 0, in all processes.

    A metric that a callback has added may differ between processes, which have to decide the same.
    Raises `UserError`, with the callback's `name`, if the metric is missing.
    """
    if metric not in event.metrics:
        raise UserError(
            f"{name}: the evaluation has no metric {metric!r}.{did_you_mean(metric, event.metrics)}"
        )
    return process_group.broadcast(float(event.metrics[metric]))


# -- Callbacks that end a run: early stopping, and a threshold of a metric -------------------------


class EarlyStopping(MetricWatch):
    """Ends the run if a metric of the evaluations stops improving.

    Args:
      metric: The name of the metric.
      patience: Number of evaluations without an improvement after which the run ends.
      min_delta: The difference to the best value that counts as an improvement.
      direction: Whether a low (min) or a high (max) value is better.

    Raises:
      UserError: If an argument is wrong.
    """

    def __init__(
        self,
        metric: str = "loss",
        *,
        patience: int = 3,
        min_delta: float = 0.0,
        direction: Direction = "min",
    ) -> None:
        super().__init__(metric, patience=patience, min_delta=min_delta, direction=direction)

    def on_patience_end(self, event: CallbackContext) -> None:
        """Ends the run.

        Args:
          event: The event.
        """
        best = "" if self.best is None else f" (best: {number(self.best)} at step {self.best_step})"
        event.trainer.terminal.line(
            f"early stopping at step {event.step}: {self.metric} has not improved for "
            f"{self.waited} evaluations{best}"
        )
        event.trainer.stop()


class StopAtThreshold:
    """Ends the run when a metric of an evaluation reaches a value.

    Args:
      metric: The name of the metric.
      at_least: Ends the run at this value or above.
      at_most: Ends the run at this value or below.

    Raises:
      UserError: If not exactly one of the two is given.
    """

    def __init__(
        self, metric: str, *, at_least: float | None = None, at_most: float | None = None
    ) -> None:
        if (at_least is None) == (at_most is None):
            raise UserError("StopAtThreshold: give either at_least or at_most")
        self.metric, self.at_least, self.at_most = metric, at_least, at_most
        self.name = f"StopAtThreshold({metric})"

    def evaluation(self, event: CallbackContext) -> None:
        """Ends the run if the value is reached.

        Args:
          event: The event.
        """
        value = metric_of(event, self.metric, self.name)
        if self.at_least is not None:
            reached = value >= self.at_least
        else:
            assert self.at_most is not None
            reached = value <= self.at_most
        if reached:
            event.trainer.terminal.line(
                f"stopped at step {event.step}: {self.metric} is {number(value)}"
            )
            event.trainer.stop()


# -- Callback that reduces the learning rate when a metric stops improving -------------------------


class ReduceOnPlateau(MetricWatch):
    """Multiplies the learning rate by a factor if a metric of the evaluations stops improving.

    The rate must be injected, so that it is a part of the state:
    `optax.inject_hyperparams(optax.adam)(learning_rate=0.001)`. It is saved and restored with the
    optimizer's state. `optax.contrib.reduce_on_plateau` is an alternative within the compiled step:
    it sees the training loss of each step, and not the evaluations.

    Args:
      metric: The name of the metric.
      factor: Multiplies the learning rate; between 0 and 1.
      patience: Number of evaluations without an improvement after which it is reduced.
      min_delta: The difference to the best value that counts as an improvement.
      cooldown: Number of evaluations after a reduction that do not count for `patience`.
      min_learning_rate: The smallest learning rate.
      direction: Whether a low (min) or a high (max) value is better.

    Raises:
      UserError: If an argument is wrong.
    """

    def __init__(
        self,
        metric: str = "loss",
        *,
        factor: float = 0.1,
        patience: int = 3,
        min_delta: float = 0.0,
        cooldown: int = 0,
        min_learning_rate: float = 0.0,
        direction: Direction = "min",
    ) -> None:
        super().__init__(metric, patience=patience, min_delta=min_delta, direction=direction)
        if not 0 < factor < 1:
            raise UserError(f"ReduceOnPlateau: factor is {factor!r}: it must be between 0 and 1")
        if cooldown < 0 or min_learning_rate < 0:
            raise UserError("ReduceOnPlateau: cooldown and min_learning_rate must be 0 or more")
        self.factor, self.cooldown, self.min_learning_rate = factor, cooldown, min_learning_rate
        self._cooling = 0  # evaluations that are left of the cooldown

    def fit_start(self, event: CallbackContext) -> None:
        """Checks that the learning rate can be changed.

        Args:
          event: The event.

        Raises:
          UserError: If the run cannot have this callback.
        """
        super().fit_start(event)
        trainer = event.trainer
        if not hasattr(trainer, "state"):
            raise UserError(
                "ReduceOnPlateau is for a Trainer: in a Loop the state is yours, so multiply "
                "its learning rate after an evaluation"
            )
        if strategy(trainer.config.strategy).is_asynchronous:
            raise UserError(
                "ReduceOnPlateau cannot change the learning rate with strategy "
                f"{trainer.config.strategy}, "
                "because the servers hold the optimizer's state: use a schedule"
            )
        hyperparameters.changeable_learning_rate(trainer.state.opt_state)

    def evaluation(self, event: CallbackContext) -> None:
        """Counts an evaluation, unless it belongs to the cooldown.

        Args:
          event: The event.
        """
        before, cooling = self._step, self._cooling
        super().evaluation(event)
        if cooling and self._step != before:
            self._cooling, self.waited = cooling - 1, 0

    def on_patience_end(self, event: CallbackContext) -> None:
        """Reduces the learning rate.

        Args:
          event: The event.
        """
        if self._cooling:
            return
        trainer = event.trainer
        old = hyperparameters.changeable_learning_rate(trainer.state.opt_state)
        new = max(old * self.factor, self.min_learning_rate)
        waited, self.waited, self._cooling = self.waited, 0, self.cooldown
        if new >= old:
            return
        trainer.state = hyperparameters.with_learning_rate(trainer.state, new)
        trainer.terminal.line(
            f"learning rate {number(old)} -> {number(new)} at step {event.step}: {self.metric} has "
            f"not improved for {waited} evaluations"
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as JSON values."""
        return super().state_dict() | {"cooling": self._cooling}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a state that `state_dict` returned.

        Args:
          state: The state.
        """
        rest = dict(state)
        cooling = rest.pop("cooling", None)
        check(cooling, int, f"{self.name}: cooling")
        super().load_state_dict(rest)
        self._cooling = cooling


# -- Callback that logs predictions for a few examples at each evaluation --------------------------

PyTree = Any


class LogSamples:
    """Predicts the first examples of a dataset at each evaluation, and logs them as text.

    Args:
      examples: A dataset or arrays: prompts, or the validation data.
      format_predictions: Predictions -> lines of text; by default one line for each prediction.
      count: Number of examples.
      name: The name under which they are logged.

    Raises:
      UserError: If an argument is wrong.
    """

    def __init__(
        self,
        examples: Any,
        format_predictions: Callable[[PyTree], Iterable[str]] | None = None,
        *,
        count: int = 4,
        name: str = "samples",
    ) -> None:
        dataset = as_dataset(examples, "the examples of LogSamples")
        if count < 1:
            raise UserError(f"LogSamples: count is {count}: it must be 1 or more")
        self._examples = Subset(dataset, np.arange(min(count, len(dataset))))
        self._format = format_predictions or _rows
        self.name = name

    def fit_start(self, event: CallbackContext) -> None:
        """Checks that the run can predict.

        Args:
          event: The event.

        Raises:
          UserError: If the run cannot have this callback.
        """
        if not hasattr(event.trainer, "predict"):
            raise UserError(
                "LogSamples is for a Trainer, which can predict: in a Loop, log your own samples"
            )

    def evaluation(self, event: CallbackContext) -> None:
        """Predicts and logs; all processes predict together.

        Args:
          event: The event.

        Raises:
          UserError: If `format_predictions` does not return lines of text.
        """
        lines = list(self._format(event.trainer.predict(self._examples)))
        if wrong := [line for line in lines if not isinstance(line, str)]:
            raise UserError(
                f"LogSamples: format_predictions returned {wrong[0]!r} among its lines: each must "
                "be a string"
            )
        for line in [f"{self.name} at step {event.step}:", *lines]:
            event.trainer.terminal.line(line)
        event.log({self.name: Text("\n".join(lines))})


def _rows(predictions: PyTree) -> list[str]:
    leaves = jax.tree.leaves(predictions)
    rows = (jax.tree.map(lambda leaf, n=n: leaf[n], predictions) for n in range(len(leaves[0])))
    return [str(row) for row in rows]


# -- Callback that copies each complete checkpoint to another place --------------------------------

_CHECK_INTERVAL = 0.5  # seconds between two checks whether a save is complete
_SIGNAL_INTERVAL = 0.1  # seconds between two checks whether a signal has arrived
_REMEMBERED = 1000  # uploaded checkpoints in the state; most older ones are removed by then
_COMMITTED = "commit_success.txt"  # makes a checkpoint in a bucket complete, for Orbax


class UploadCheckpoints:
    """Uploads each complete checkpoint in a thread of process 0, while the training continues.

    An upload that fails is repeated; if it keeps failing, a line names the checkpoint and the
    reason, and the training continues. The end of the run waits for the uploads. Those that an
    interruption has cut off are repeated by the next start.

    Args:
      destination: A folder or URL, which gets a folder STEP for each checkpoint; or a function
        (path of the checkpoint, step) that uploads it. It may be called again for a checkpoint
        that it has uploaded, if the run is interrupted before its next save.
      attempts: Number of attempts for each checkpoint.
      pause: Seconds before the second attempt, twice as many before the third, and so on.

    Raises:
      UserError: If an argument is wrong.
    """

    name = "UploadCheckpoints"

    def __init__(
        self,
        destination: str | Callable[[epath.Path, int], None],
        *,
        attempts: int = 3,
        pause: float = 5.0,
    ) -> None:
        if attempts < 1 or pause < 0:
            raise UserError("UploadCheckpoints: attempts must be 1 or more, and pause 0 or more")
        if not callable(destination) and not isinstance(destination, (str, os.PathLike)):
            raise UserError(
                f"UploadCheckpoints: destination is {destination!r}: it must be a folder, a URL or "
                "a function of the checkpoint's path and its step"
            )
        if callable(destination):
            self._upload, self._where = destination, getattr(destination, "__name__", "a function")
        else:
            target = absolute(folder_of(destination))
            self._upload = lambda path, step: copy_checkpoint(path, target / str(step))
            self._where = str(target)
        self._attempts, self._pause = attempts, pause
        self._steps: queue.Queue[int | None] = queue.Queue()
        self._uploaded: set[int] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def fit_start(self, event: CallbackContext) -> None:
        """Starts the thread, and uploads checkpoints that an earlier start did not upload.

        Args:
          event: The event.

        Raises:
          UserError: If the run cannot have this callback.
        """
        workdir = event.trainer.config.workdir
        if workdir is None:
            raise UserError("UploadCheckpoints needs a workdir: without one nothing is saved")
        if not process_group.is_chief():
            return
        folder = absolute(folder_of(workdir)) / "checkpoints"
        self._steps.put(None)  # ends the thread of an earlier fit that has failed
        self._steps = queue.Queue()
        with self._lock:
            missing = [s for s in steps_in(folder) if s not in self._uploaded and s <= event.step]
        for step in missing:
            self._steps.put(step)
        # A daemon, because a run that is stopped by a signal has to end in time.
        self._thread = threading.Thread(
            target=self._work,
            args=(folder, self._steps, event.trainer.terminal.warning),
            name="upload-checkpoints",
            daemon=True,
        )
        self._thread.start()

    def checkpoint(self, event: CallbackContext) -> None:
        """Uploads the checkpoint once it is complete: its save has only begun.

        Args:
          event: The event.
        """
        self._steps.put(event.step)

    def fit_end(self, event: CallbackContext) -> None:
        """Waits for the uploads, until a signal asks to stop if a single process trains.

        Args:
          event: The event.
        """
        if self._thread is None:
            return
        self._steps.put(None)
        terminal = event.trainer.terminal
        with terminal.waiting("uploading checkpoints"):
            while self._thread.is_alive() and CONTEXT.stop_request.signal is None:
                self._thread.join(_SIGNAL_INTERVAL)
        if self._thread.is_alive():
            terminal.warning(
                f"uploads to {self._where} are not complete, because this process was asked to "
                "stop: the same command, run again, continues them"
            )
        self._thread = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the steps of the uploaded checkpoints."""
        with self._lock:
            return {"uploaded": sorted(self._uploaded)[-_REMEMBERED:]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a state that `state_dict` returned.

        Args:
          state: The state.
        """
        check(state, dict[str, list[int]], self.name)
        with self._lock:
            self._uploaded = set(state["uploaded"])

    # -- in the thread -------------------------------------------------------------------------

    def _work(
        self, folder: epath.Path, steps: "queue.Queue[int | None]", warn: Callable[[str], None]
    ) -> None:
        while (step := steps.get()) is not None:
            try:
                if self._await_save(folder, step, steps):
                    self._attempt(folder / str(step), step)
                    with self._lock:
                        self._uploaded.add(step)
                    continue
                why = "it was removed before, or was never complete"
            except Exception as error:  # of the user's function, or of any storage
                why = "it was removed during the upload"
                if _may_exist(folder / str(step)):
                    why = one_line(error)
            warn(f"checkpoint {step} was not uploaded to {self._where}: {why}")

    def _await_save(self, folder: epath.Path, step: int, steps: "queue.Queue[int | None]") -> bool:
        """Waits until a checkpoint is complete; returns False if it does not exist any more."""
        while step not in (complete := steps_in(folder)):
            if any(later > step for later in complete) or not steps.empty():
                # A later save, or the end of the run, waits for this one.
                return step in steps_in(folder)
            time.sleep(_CHECK_INTERVAL)
        return True

    def _attempt(self, path: epath.Path, step: int) -> None:
        for attempt in range(1, self._attempts + 1):
            try:
                return self._upload(path, step)
            except Exception:
                if attempt == self._attempts or not _may_exist(path):
                    raise
            time.sleep(self._pause * 2 ** (attempt - 1))


def copy_checkpoint(source: epath.Path, target: epath.Path) -> None:
    """Copies the folder of a complete checkpoint. The copy is complete once it has its manifest.

    A target that is complete already is left as it is.
    """
    manifest = target / MANIFEST
    if manifest.exists() and manifest.read_bytes() == (source / MANIFEST).read_bytes():
        return
    with contextlib.suppress(FileNotFoundError):
        manifest.unlink()
    last = (MANIFEST, _COMMITTED)
    names = sorted(_files(source), key=lambda name: last.index(name) if name in last else -1)
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).copy(target / name, overwrite=True)
    if is_url(target) and _COMMITTED not in names:
        (target / _COMMITTED).write_text(f"Checkpoint commit was successful to {target}")


def _may_exist(path: epath.Path) -> bool:
    """Returns False if a path does not exist, and True if that cannot be found out."""
    try:
        return path.exists()
    except Exception:
        return True


def _files(folder: epath.Path, prefix: str = "") -> Iterator[str]:
    for path in folder.iterdir():
        if path.is_dir():
            yield from _files(path, f"{prefix}{path.name}/")
        else:
            yield prefix + path.name

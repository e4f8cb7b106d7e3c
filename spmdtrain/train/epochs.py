"""Weighted means of the training metrics over an epoch, and the history of a run."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from spmdtrain.config.run_config import RunConfig
from spmdtrain.record.run_files import Split
from spmdtrain.step import hyperparameters
from spmdtrain.step.hyperparameters import scales_updates
from spmdtrain.step.metrics import Combination, Means
from spmdtrain.train.run_logger import Metrics, RunLogger

PyTree = Any


@dataclass(frozen=True)
class History:
    """Metrics of a run, oldest first, including the part before a resume.

    Attributes:
      epochs: One dictionary per epoch: "step" and "epoch", the weighted means of the training
        metrics, "learning_rate" if it is known, "seconds", "examples_per_second" and "input_wait".
      evaluations: One dictionary per evaluation of the validation split: "step", "epoch" (the
        number of epochs completed by then) and the metrics.
    """

    epochs: list[dict[str, float]]
    evaluations: list[dict[str, float]]


@dataclass(frozen=True)
class FitResult:
    """Result of a fit: the last step, the last metrics of each split, and the history."""

    step: int
    train: Metrics
    validation: Metrics
    test: Metrics
    history: History


@dataclass
class EpochSums:
    """The steps of the current epoch whose outputs were read.

    Attributes:
      steps: Number of steps.
      seconds: Time spent on them.
      names: Names of their metrics.
      sums: Weighted sums of the metrics and their weights in float64, (names, 2).
    """

    steps: int = 0
    seconds: float = 0.0
    names: Sequence[str] = ()
    sums: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 2)))


class Epochs:
    """Sums the training metrics of each epoch, and writes their means at its end.

    Args:
      num_examples: Number of training examples; 0 if the run has no dataset, and so no epochs.
      fixed_rate: The learning rate of all steps, if it is known.
    """

    def __init__(
        self, config: RunConfig, num_examples: int, logger: RunLogger, fixed_rate: float | None
    ) -> None:
        self._config, self._size, self._logger = config, num_examples, logger
        self.fixed_rate = fixed_rate
        self._counted = 0.0  # seconds of training that were added to the sums of an epoch
        self._before = 0.0, 0.0  # seconds of training and of input waits before the epoch
        self._epoch = range(0)  # its steps
        self.sums = EpochSums()

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continues from the sums that `to_json` returned; from none if `saved` is empty."""
        if saved:
            sums = saved["sums"]
            values = np.array(list(sums.values()), np.float64).reshape(-1, 2)
            self.sums = EpochSums(saved["steps"], saved["seconds"], list(sums), values)

    def to_json(self) -> dict[str, Any]:
        """Returns the sums of the epoch as JSON, in which floats keep all their bits."""
        self._count_seconds()
        epoch = self.sums
        sums = {name: pair.tolist() for name, pair in zip(epoch.names, epoch.sums, strict=True)}
        return {"steps": epoch.steps, "seconds": epoch.seconds, "sums": sums}

    def completed(self, step: int) -> int:
        """Returns the number of epochs completed after a step."""
        return self._config.epochs_at(step, self._size)

    def ends_with(self, step: int) -> bool:
        """Returns whether an epoch ends with a step; steps must be passed in order."""
        if step >= self._epoch.stop:
            self._epoch = self._config.epoch_of(step, self._size)
        return step == self._epoch.stop - 1

    def count(
        self,
        steps: Sequence[int],
        names: Sequence[str],
        sums: np.ndarray,
        rate: jax.Array | None,
        combined: Mapping[str, Combination] | None = None,
    ) -> None:
        """Adds the metrics of steps of one epoch, and writes the means if it ends with the last.

        Steps are counted in order. The means of an epoch are written only if all its steps were
        counted.

        Args:
          sums: Weighted sums of the metrics and their weights, (steps, names, 2).
          rate: The learning rate of the last step, if the step returned it.
          combined: The metrics that are combined from the means of others.
        """
        epoch, config = self.sums, self._config
        if epoch.names != names:  # none yet, or the objective has changed since the save
            epoch = self.sums = EpochSums(0, epoch.seconds, names, np.zeros((len(names), 2)))
        epoch.steps += len(steps)
        if len(steps) == 1:
            epoch.sums += sums[0]
        else:  # in the same order, so that the dispatch does not change last bits
            epoch.sums = np.add.reduce(np.concatenate([epoch.sums[None], sums]), axis=0)
        step = steps[-1]
        if not self.ends_with(step):
            return
        self._count_seconds()
        wait = self._input_wait()
        self.sums = EpochSums()
        if epoch.steps != len(self._epoch):
            return
        used = self.fixed_rate if rate is None else float(rate)
        measured = {} if used is None else {"learning_rate": used}
        measured["seconds"] = epoch.seconds
        if epoch.seconds > 0:
            examples = epoch.steps * (config.global_batch_size or 0)
            measured["examples_per_second"] = examples / epoch.seconds
        if wait is not None:
            measured["input_wait"] = wait
        pairs = dict(zip(epoch.names, epoch.sums, strict=True))
        means = Means(pairs, combined).result(empty=0.0)
        found = {"epoch": self.completed(step)} | means | measured
        self._logger.log_epoch(step, found)

    def _count_seconds(self) -> None:
        now = self._logger.seconds
        self.sums.seconds += now - self._counted
        self._counted = now

    def _input_wait(self) -> float | None:
        """Returns the share of the epoch's time in which the devices waited for batches.

        None if it is not measured. After a resume within the epoch, only the time since then
        counts.
        """
        (seconds, waited), now = self._before, (self._counted, self._logger.input_wait or 0.0)
        self._before = now
        if self._logger.input_wait is None or now[0] <= seconds:
            return None
        return min((now[1] - waited) / (now[0] - seconds), 1.0)

    def result(self, step: int) -> FitResult:
        """Returns the result of a fit that ends after `step`."""
        latest = self._logger.latest
        train, seen, tested = latest[Split.TRAIN], latest[Split.EVAL], latest[Split.TEST]
        return FitResult(step, train, seen, tested, self.history())

    def history(self) -> History:
        """Returns the metrics that were written for epochs and evaluations."""
        written = self._logger.written
        return History(
            [{"step": step} | metrics for step, metrics in sorted(written[Split.EPOCH].items())],
            [
                {"step": step, "epoch": self.completed(step)} | metrics
                for step, metrics in sorted(written[Split.EVAL].items())
            ],
        )


def known_rate(config: RunConfig, opt_state: PyTree) -> float | None:
    """Returns the configured learning rate if the optimizer uses no other one.

    None if the optimizer's state (or its shapes) holds a schedule's count, or a rate or a scale of
    the updates (`optax.contrib.reduce_on_plateau`).
    """
    scaled = scales_updates(opt_state)
    return None if scaled or hyperparameters.injected(opt_state) else config.learning_rate

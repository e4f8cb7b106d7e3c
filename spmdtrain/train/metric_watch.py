"""The base of callbacks that react when a metric of the evaluations stops improving."""

import math
from typing import Any, Literal, TypedDict

from spmdtrain.distributed import process_group
from spmdtrain.errors import UserError, did_you_mean
from spmdtrain.record.validation import check
from spmdtrain.train.callbacks import CallbackContext

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

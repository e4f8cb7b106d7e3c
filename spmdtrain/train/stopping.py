"""Callbacks that end a run: early stopping, and a threshold of a metric."""

from spmdtrain.document.terminal import number
from spmdtrain.errors import UserError
from spmdtrain.train.callbacks import CallbackContext
from spmdtrain.train.metric_watch import Direction, MetricWatch, metric_of


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

"""The actions of a trainer or loop between two steps."""

from collections.abc import Callable
from dataclasses import dataclass

from spmdtrain.train.run_logger import Metrics


@dataclass(frozen=True)
class BoundaryActions:
    """The actions of a trainer or loop that `RunSession.boundary` calls between two steps.

    Attributes:
      flush: Waits for pending steps and reads their outputs.
      end_epoch: (step, whether an evaluation follows) -> None; calls the callbacks of the epoch
        that ends with the step.
      evaluate: (step, whether an evaluation is due) -> the metrics of the step's evaluation; None
        if there is none, or a signal interrupted it.
      save: Saves the state after a step, with the metrics of its evaluation.
      hash_last: Logs the hash of the state after the last step, unless it is logged or not due.
      report: Prints a summary after the last step.
      stop_requested: Returns whether `stop()` was called, so that the run ends with this step.
    """

    flush: Callable[[], None]
    end_epoch: Callable[[int, bool], None]
    evaluate: Callable[[int, bool], Metrics | None]
    save: Callable[[int, Metrics | None], None]
    hash_last: Callable[[int], None]
    report: Callable[[], None]
    stop_requested: Callable[[], bool]

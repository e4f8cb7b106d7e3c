"""Callback that logs predictions for a few examples at each evaluation."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from spmdtrain.data.datasets import Subset, as_dataset
from spmdtrain.errors import UserError
from spmdtrain.trackers.base import Text
from spmdtrain.train.callbacks import CallbackContext

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

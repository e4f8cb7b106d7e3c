"""Callback that reduces the learning rate when a metric stops improving."""

from typing import Any

from spmdtrain.document.terminal import number
from spmdtrain.errors import UserError
from spmdtrain.record.validation import check
from spmdtrain.step import hyperparameters
from spmdtrain.train.callbacks import CallbackContext
from spmdtrain.train.metric_watch import Direction, MetricWatch


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
        if trainer.config.strategy == "parameter_server":
            raise UserError(
                "ReduceOnPlateau cannot change the learning rate with strategy parameter_server, "
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

"""Constructors of `Trainer` from other objects than its arguments."""

from typing import Any, Self

import optax

from spmdtrain.config.run_config import RunConfig, can_pad
from spmdtrain.train.callbacks import Callbacks
from spmdtrain.train.experiment import Experiment


class TrainerConstructors:
    """The class methods of `Trainer` that return one."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)

    @classmethod
    def from_experiment(cls, experiment: Experiment, config: RunConfig, **keywords: Any) -> Self:
        """Returns the trainer of an experiment, without the parts that `fit` and `predict` use.

        Args:
          experiment: The model, the objective, the optimizer and other arguments of `Trainer`.
          config: The configuration.
          **keywords: Arguments of `Trainer`, in place of the experiment's.
        """
        return cls(**{"config": config, **experiment.trainer_arguments(), **keywords})

    @classmethod
    def from_keras(
        cls,
        model: Any,
        *,
        optimizer: optax.GradientTransformation | None = None,
        callbacks: Callbacks = (),
        **keywords: Any,
    ) -> Self:
        """Returns the trainer of a compiled Keras model: its losses, metrics and optimizer.

        A batch is Keras' own: (x,), (x, y) or (x, y, sample_weight). After each `fit`, the model
        and its optimizer have the trained values. Without `config`, `uneven_batch` is `pad`:
        the batches of Keras' scripts run on any number of devices.

        Args:
          model: A Keras model on which `model.compile` was called.
          optimizer: An optax optimizer instead of the model's.
          callbacks: Keras callbacks and those of `Trainer`, in a list.
          **keywords: Arguments of `Trainer` and fields of `RunConfig`.

        Raises:
          UserError: If a part of the model or a callback cannot be used, or an argument is wrong.
        """
        # Imported here, because Flax, which the adapter uses, is slow to import.
        from spmdtrain.keras.compile import parts_of_compiled

        parts = parts_of_compiled(
            model,
            optimizer=optimizer,
            callbacks=callbacks,
            steps_per_dispatch=keywords.get("steps_per_dispatch"),
        )
        if "config" not in keywords and can_pad(keywords):
            parts["uneven_batch"] = "pad"
        return cls(**{**parts, **keywords})

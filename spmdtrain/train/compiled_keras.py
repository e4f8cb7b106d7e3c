"""The parts of an experiment that a compiled Keras model has."""

from typing import Any

import optax

from spmdtrain.adapters.keras import KerasModel, import_keras
from spmdtrain.adapters.keras_optimizer import KerasOptimizer
from spmdtrain.errors import UserError
from spmdtrain.step.keras_compile import CompiledKeras
from spmdtrain.train.callbacks import Callbacks, listed_callbacks
from spmdtrain.train.keras_callbacks import KerasCallbacks


def parts_of_compiled(
    model: Any,
    *,
    optimizer: optax.GradientTransformation | None,
    callbacks: Callbacks,
    steps_per_dispatch: int | None,
) -> dict[str, Any]:
    """Returns the arguments of an experiment that a compiled Keras model determines.

    Args:
      optimizer: Replaces the model's optimizer.
      callbacks: Keras callbacks and callbacks of this package.
      steps_per_dispatch: The option of the run; None if it is not known.

    Raises:
      UserError: If a part of the model cannot be used.
    """
    compiled = CompiledKeras(model)
    own = None
    if optimizer is None:
        if compiled.optimizer is None:
            raise UserError(
                f"the Keras model {model.name!r} is compiled without an optimizer: name one in "
                "model.compile, or pass optimizer=optax.adam(1e-3)"
            )
        own = KerasOptimizer(compiled.optimizer, model)
        optimizer = own.transformation
    if compiled.steps_per_execution not in (1, steps_per_dispatch):
        raise UserError(
            f"the Keras model {model.name!r} is compiled with steps_per_execution="
            f"{compiled.steps_per_execution}: leave it out and use the option steps_per_dispatch"
        )
    others = listed_callbacks(callbacks)
    kind = import_keras().callbacks.Callback
    of_keras = [callback for callback in others if isinstance(callback, kind)]
    bridge = KerasCallbacks(model, own, of_keras, compiled.directions)
    return {
        "model": KerasModel(model, enforces_constraints=own is not None),
        "objective": compiled.objective,
        "optimizer": optimizer,
        "predict": compiled.predict,
        # First, so that callbacks at the end of a fit find the trained values in the model.
        "callbacks": [bridge, *(each for each in others if not isinstance(each, kind))],
    }

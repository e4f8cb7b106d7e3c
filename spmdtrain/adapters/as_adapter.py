"""The choice of the adapter for a model."""

from typing import Any

from spmdtrain.adapters.base import Adapter
from spmdtrain.errors import UserError


def as_adapter(model: Any) -> Adapter:
    """Returns the adapter of a model.

    Args:
      model: An nnx module, a function of `rngs` that returns one, or an adapter (`LinenModel`,
        `KerasModel`, `FunctionModel`), which is returned as it is.

    Raises:
      UserError: If `model` is anything else.
    """
    if isinstance(model, Adapter):
        return model
    hint = ""
    if _is_from(model, "flax.linen"):
        hint = ": wrap it in LinenModel(module, example_input)"
    elif _is_from(model, "keras"):
        hint = ": wrap it in KerasModel(model)"
    elif _is_from(model, "flax.nnx") or callable(model):
        from spmdtrain.adapters.nnx import (
            NnxModel,
        )  # importing flax is slow, and not every model needs it

        if (adapter := NnxModel.of(model)) is not None:
            return adapter
    raise UserError(
        f"model is a {type(model).__module__}.{type(model).__name__}{hint}. It must be an nnx "
        "module, a function of rngs that returns one, a LinenModel, KerasModel or FunctionModel"
    )


def _is_from(model: Any, library: str) -> bool:
    """Returns whether the model is an instance of a class of that library, or of a subclass."""
    return any(f"{cls.__module__}.".startswith(f"{library}.") for cls in type(model).__mro__)

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
    kind = _class_of(model)
    raise UserError(
        f"model is a {kind.__module__}.{kind.__name__}{hint}. It must be an nnx "
        "module, a function of rngs that returns one, a LinenModel, KerasModel or FunctionModel"
    )


def _is_from(model: Any, library: str) -> bool:
    """Returns whether the model is a class of that library, a subclass, or an instance of one."""
    return any(f"{c.__module__}.".startswith(f"{library}.") for c in _class_of(model).__mro__)


def _class_of(model: Any) -> type:
    return model if isinstance(model, type) else type(model)

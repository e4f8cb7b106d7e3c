"""The adapter for a model, whatever library it comes from."""

from typing import Any

from spmdtrain.adapters.base import Adapter
from spmdtrain.errors import UserError


def as_adapter(model: Any) -> Adapter:
    """The adapter of an nnx module, or of a function of `rngs` that makes one."""
    if isinstance(model, Adapter):
        return model
    hint = ""
    if _is_from(model, "flax.linen"):
        hint = ": wrap it in LinenModel(module, example_input)"
    elif _is_from(model, "keras"):
        hint = ": wrap it in KerasModel(model)"
    elif _is_from(model, "flax.nnx") or callable(model):
        from spmdtrain.adapters.nnx import NnxModel  # flax takes long, and not every model is its

        if (found := NnxModel.of(model)) is not None:
            return found
    raise UserError(
        f"model is a {type(model).__module__}.{type(model).__name__}{hint}. It must be an nnx "
        "module, a function of rngs that makes one, a LinenModel, KerasModel or FunctionModel"
    )


def _is_from(model: Any, library: str) -> bool:
    """Whether the model is of a class of that library's, or of one made from such a class."""
    return any(f"{cls.__module__}.".startswith(f"{library}.") for cls in type(model).__mro__)

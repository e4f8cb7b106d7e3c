"""The choice of the adapter for a model, and the adapter of plain functions."""

import inspect
from collections.abc import Callable
from functools import partial
from numbers import Number
from typing import Any

import jax
import numpy as np

from spmdtrain.adapters.base import Adapter, Function, Mode, Variables, check_call
from spmdtrain.errors import UserError
from spmdtrain.tree import named_leaves

# -- The choice of the adapter for a model ---------------------------------------------------------


def as_adapter(model: Any) -> Adapter:
    """Returns the adapter of a model.

    Args:
      model: An nnx module, a function of `rngs` that returns one, an Equinox module without state,
        or an adapter (`LinenModel`, `EquinoxModel`, `KerasModel`, `FunctionModel`), which is
        returned as it is.

    Raises:
      UserError: If `model` is anything else.
    """
    if isinstance(model, Adapter):
        return model
    hint, kind = "", model if isinstance(model, type) else type(model)
    # What makes a model is a function or a class; a callable object is a model of some library.
    makes = isinstance(model, (type, partial)) or inspect.isroutine(model)
    if _is_from(kind, "flax.linen"):
        hint = ": wrap it in LinenModel(module, example_input)"
    elif _is_from(kind, "keras"):
        hint = ": wrap it in KerasModel(model)"
    elif _is_from(kind, "equinox"):
        if not makes:
            from spmdtrain.adapters.equinox import EquinoxModel

            return EquinoxModel(model)
        hint = ": wrap it in EquinoxModel(functools.partial(Model, size)), a function of key"
    elif makes and not _takes(model, "rngs") and _takes(model, "key"):
        hint = " of key: wrap it in EquinoxModel(function) or FunctionModel(init, apply)"
    elif isinstance(model, tuple) and any(_is_from(type(x), "equinox") for x in model):
        hint = ": wrap it in EquinoxModel((module, state))"
    elif _is_from(kind, "flax.nnx") or makes or (callable(model) and _takes(model, "rngs")):
        from spmdtrain.adapters.nnx import (
            NnxModel,
        )  # importing flax is slow, and not every model needs it

        if (adapter := NnxModel.of(model)) is not None:
            return adapter
    raise UserError(
        f"model is a {kind.__module__}.{kind.__name__}{hint}. It must be an nnx module, a function "
        "of rngs that returns one, an Equinox module, or a LinenModel, EquinoxModel, KerasModel "
        "or, for any other library, FunctionModel(init, apply)"
    )


def _takes(function: Any, name: str) -> bool:
    """Returns whether a callable has a parameter of that name."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # it has no signature
        return False


def _is_from(kind: type, library: str) -> bool:
    """Returns whether a class is of that library, or a subclass of one."""
    return any(f"{c.__module__}.".startswith(f"{library}.") for c in kind.__mro__)


# -- The adapter of plain functions ----------------------------------------------------------------

PyTree = Any


class FunctionModel:
    """A model as plain pure functions.

    Args:
      init: Returns the initial parameters, any pytree, for a random key.
      apply: A function of (params, ...). The objective gets `partial(apply, params)` as its model,
        or the parameters themselves if there is no `apply`.

    Raises:
      UserError: If `init` does not take one argument, a key.
    """

    def __init__(
        self, init: Callable[[jax.Array], PyTree], apply: Callable[..., Any] | None = None
    ) -> None:
        self.given: PyTree = {}
        self._init, self._apply = init, apply
        check_call(init, "FunctionModel: init(key)", None)

    def init(self, given: PyTree, key: jax.Array) -> Variables:
        params = self._init(key)
        for name, leaf in named_leaves(params).items():
            if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, Number)):
                raise UserError(
                    f"FunctionModel: init(key) returned a {type(leaf).__name__} for {name!r}: "
                    "parameters must be arrays"
                )
        return Variables(params, {})

    def run(
        self, function: Function, variables: Variables, batch: PyTree, key: jax.Array, mode: Mode
    ) -> tuple[PyTree, PyTree]:
        return function(self.merge(variables), batch), variables.model_state

    def merge(self, variables: Variables) -> Any:
        params = variables.params
        return params if self._apply is None else partial(self._apply, params)

"""The adapter of plain functions."""

from collections.abc import Callable
from functools import partial
from numbers import Number
from typing import Any

import jax
import numpy as np

from spmdtrain.adapters.base import Function, Mode, Variables, check_call
from spmdtrain.errors import UserError
from spmdtrain.tree import named_leaves

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

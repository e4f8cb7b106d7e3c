"""The adapter of plain functions."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from spmdtrain.adapters.base import Function, Mode, Variables

PyTree = Any


class FunctionModel:
    """A model as plain pure functions.

    Args:
      init: Returns the initial parameters, any pytree, for a random key.
      apply: A function of (params, ...). The objective gets `partial(apply, params)` as its model,
        or the parameters themselves if there is no `apply`.
    """

    def __init__(
        self, init: Callable[[jax.Array], PyTree], apply: Callable[..., Any] | None = None
    ) -> None:
        self.given: PyTree = {}
        self._init, self._apply = init, apply

    def init(self, given: PyTree, key: jax.Array) -> Variables:
        return Variables(self._init(key), {})

    def run(
        self, function: Function, variables: Variables, batch: PyTree, key: jax.Array, mode: Mode
    ) -> tuple[PyTree, PyTree]:
        return function(self.merge(variables), batch), variables.model_state

    def merge(self, variables: Variables) -> Any:
        params = variables.params
        return params if self._apply is None else partial(self._apply, params)

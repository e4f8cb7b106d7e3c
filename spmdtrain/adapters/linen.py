"""The adapter of flax.linen modules."""

from collections.abc import Sequence
from typing import Any

import jax

from spmdtrain.adapters.base import Function, Mode, Variables

PyTree = Any


class LinenModel:
    """A flax.linen module.

    The objective gets a `BoundLinen` and calls it: `model(x, train=model.training)`.

    Args:
      module: The module.
      *inputs: Example inputs for `module.init`.
      streams: Names of the random streams that the module draws from.
      **kwargs: Keyword arguments for `module.init`.
    """

    def __init__(
        self, module: Any, *inputs: PyTree, streams: Sequence[str] = ("dropout",), **kwargs: Any
    ) -> None:
        self.given: PyTree = {}
        self.module = module
        self.streams = tuple(streams)
        self._inputs, self._kwargs = inputs, kwargs

    def init(self, given: PyTree, key: jax.Array) -> Variables:
        rngs = _stream_keys(key, ("params", *self.streams))
        variables = dict(self.module.init(rngs, *self._inputs, **self._kwargs))
        return Variables(variables.pop("params", {}), variables)

    def run(
        self, function: Function, variables: Variables, batch: PyTree, key: jax.Array, mode: Mode
    ) -> tuple[PyTree, PyTree]:
        bound = BoundLinen(self.module, variables, key, self.streams, training=mode is Mode.TRAIN)
        result = function(bound, batch)
        return result, bound.model_state

    def merge(self, variables: Variables) -> "BoundLinen":
        key = jax.random.key(0)
        return BoundLinen(self.module, variables, key, self.streams, training=False)


def _stream_keys(key: jax.Array, streams: Sequence[str]) -> dict[str, jax.Array]:
    return {name: jax.random.fold_in(key, index) for index, name in enumerate(streams)}


class BoundLinen:
    """A linen module with its variables, the `model` that an objective gets.

    Attributes:
      training: Whether dropout is to be active.
      model_state: The model state after the latest call.
    """

    def __init__(
        self,
        module: Any,
        variables: Variables,
        key: jax.Array,
        streams: Sequence[str],
        *,
        training: bool,
    ) -> None:
        self.training = training
        self.model_state = variables.model_state
        self._module, self._params = module, variables.params
        self._key, self._streams = key, streams
        self._calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls `module.apply`; in training, updates the model state.

        Args:
          *args: Inputs of the module.
          **kwargs: Keyword arguments of the module.

        Returns:
          The output of the module.
        """
        key = jax.random.fold_in(self._key, self._calls)  # so a second call draws different masks
        self._calls += 1
        result, changed = self._module.apply(
            {"params": self._params, **self.model_state},
            *args,
            rngs=_stream_keys(key, self._streams),
            mutable=list(self.model_state) if self.training else [],
            **kwargs,
        )
        self.model_state = {**self.model_state, **changed}
        return result

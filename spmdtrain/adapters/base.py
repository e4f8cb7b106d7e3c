"""The `Adapter` protocol: a model of any library as pure functions over plain pytrees."""

import enum
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

from spmdtrain.sharding.annotations import Annotation

PyTree = Any
Function = Callable[[Any, PyTree], PyTree]
"""An objective or a predict function: (model, batch) -> outputs."""


class Mode(enum.Enum):
    """The mode of a model, which decides about dropout and batch statistics."""

    TRAIN = "train"
    EVAL = "eval"


class Variables(NamedTuple):
    """The values of a model.

    Both fields are plain nested dictionaries of arrays for nnx, linen and Keras models.

    Attributes:
      params: The parameters, which the optimizer trains.
      model_state: Other values that the model carries from step to step (batch statistics).
    """

    params: PyTree
    model_state: PyTree


@runtime_checkable
class Annotated(Protocol):
    """An adapter whose model may annotate its arrays with names or axes."""

    annotations: Mapping[str, Annotation]
    """The annotations by path in the state (`params/layers/0/kernel`); known after `init`."""


def annotations_of(adapter: "Adapter") -> Mapping[str, Annotation]:
    """Returns the annotations of a model, by path; empty if its adapter reads none.

    Args:
      adapter: An adapter whose `init` has been traced.
    """
    return adapter.annotations if isinstance(adapter, Annotated) else {}


@runtime_checkable
class Adapter(Protocol):
    """A model as pure functions."""

    given: PyTree
    """The arrays that `init` starts from; an empty dictionary if it starts from the key alone.
    They are passed to `init` as an argument, so that they are not compiled in as constants."""

    def init(self, given: PyTree, key: jax.Array) -> Variables:
        """Returns the initial variables. Traced under `jit`.

        Args:
          given: The attribute `given`, on the devices.
          key: The random key of the initialization.
        """
        ...

    def run(
        self, function: Function, variables: Variables, batch: PyTree, key: jax.Array, mode: Mode
    ) -> tuple[PyTree, PyTree]:
        """Calls `function(model, batch)`. Traced under `jit`.

        Args:
          function: An objective or a predict function.
          variables: The values of the model.
          batch: The batch.
          key: The random key from which dropout and other random streams derive.
          mode: Whether the model trains.

        Returns:
          The function's outputs, and the model state after the call.
        """
        ...

    def merge(self, variables: Variables) -> Any:
        """Returns the model with these values, in evaluation mode, for calls outside of a run.

        Args:
          variables: The values of the model.
        """
        ...

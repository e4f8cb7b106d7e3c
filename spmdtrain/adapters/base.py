"""The `Adapter` protocol: a model of any library as pure functions over plain pytrees."""

import enum
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

PyTree = Any
Function = Callable[[Any, PyTree], PyTree]  # an objective or predict function of (model, batch)


class Mode(enum.Enum):
    """What a model is run for: dropout and batch statistics differ."""

    TRAIN = "train"
    EVAL = "eval"


class Variables(NamedTuple):
    """What a model is made of: trained parameters, and state it carries (batch statistics).

    Both are plain nested dictionaries of arrays for nnx and linen models.
    """

    params: PyTree
    model_state: PyTree


@runtime_checkable
class Adapter(Protocol):
    """A model as pure functions."""

    given: PyTree
    """Arrays that `init` starts from, handed to it as an argument so that they are not compiled
    in as constants; an empty dictionary where it starts from the key alone."""

    def init(self, given: PyTree, key: jax.Array) -> Variables:
        """The initial variables; traced under `jit`."""
        ...

    def run(
        self, function: Function, variables: Variables, batch: PyTree, key: jax.Array, mode: Mode
    ) -> tuple[PyTree, PyTree]:
        """`function(model, batch)` and the model state afterwards; traced under `jit`.

        `key` feeds dropout and the like.
        """
        ...

    def merge(self, variables: Variables) -> Any:
        """The model with these values, to call outside a run."""
        ...

"""The `Adapter` protocol: a model of any library as pure functions over plain pytrees."""

import enum
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

from spmdtrain.errors import UserError
from spmdtrain.sharding.rules import Annotation, DimsOf
from spmdtrain.tree import named_leaves

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


def check_call(function: Callable[..., Any], what: str, *args: Any, **kwargs: Any) -> None:
    """Raises `UserError` if a function of the user does not take the arguments, without calling it.

    `what` names the call in the message.
    """
    if not callable(function):
        raise UserError(f"{what}: a {type(function).__name__} is not a function")
    is_flax = type(function).__module__.startswith("flax.")
    try:
        if isinstance(function, type) and is_flax:  # whose metaclass hides the arguments
            init = inspect.signature(function.__init__, follow_wrapped=False)  # type: ignore[misc]
            init.bind(None, *args, **kwargs)
        else:  # a decorator may supply arguments of the function that it wraps
            inspect.signature(function, follow_wrapped=False).bind(*args, **kwargs)
    except TypeError as error:
        raise UserError(f"{what}: {error}") from error
    except ValueError:
        return  # it has no signature


def annotations_of(adapter: "Adapter") -> Mapping[str, Annotation]:
    """Returns the annotations by path, which `init` has set; empty if the adapter reads none."""
    return adapter.annotations if isinstance(adapter, Annotated) else {}


@runtime_checkable
class HasModes(Protocol):
    """An adapter whose layers have modes (train or evaluate), which training does not change."""

    modes: Mapping[str, bool]
    """Whether the user's model has each layer in evaluation mode, by path; known after `init`."""


def describe_modes(adapter: "Adapter") -> str:
    """Returns which layers stay in evaluation mode in training (known after `init`); "" if none."""
    modes = adapter.modes if isinstance(adapter, HasModes) else {}
    names = [name or "the model itself" for name, in_evaluation in modes.items() if in_evaluation]
    if not names:
        return ""
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return (
        f"{len(names)} of {len(modes)} layers with a mode are in evaluation mode, as the model "
        f"was given, and stay in it in training: {shown}"
    )


@runtime_checkable
class HasFileNames(Protocol):
    """An adapter of a library whose files name arrays by their place in the model."""

    def file_names(self) -> Mapping[str, str | None]:
        """Returns the path in the model of each array in its library's file; None for others."""
        ...


def file_names_of(adapter: "Adapter") -> Mapping[str, str | None]:
    """Returns the adapter's `file_names`; empty if the files of its library have no such names."""
    return adapter.file_names() if isinstance(adapter, HasFileNames) else {}


@runtime_checkable
class ExtendsBase(Protocol):
    """An adapter that adds trained parameters to the frozen parameters of a base model."""

    alpha: float
    """The scale of the low-rank factors (see `LoraModel`)."""
    frozen: Sequence[str]
    """Regular expressions of the base model's variables, by path in the model."""
    derived: Mapping[str, DimsOf]
    """The dims that each added parameter shares with a parameter of the base model, by path in the
    state; known after `init`.
    """


@runtime_checkable
class ComputesParams(Protocol):
    """An adapter that computes the parameters of its base model from the parameters of the state.

    The step computes them in the dtype of the state, before it casts them to the compute dtype.
    `run` and `merge` compute them as well.
    """

    base: "Adapter"
    """The model that gets the computed parameters."""

    def is_operand(self, name: str) -> bool:
        """Returns whether `base_params` computes with a parameter, by its path in `params`."""
        ...

    def base_params(self, params: PyTree) -> PyTree:
        """Returns the parameters of the base model. Traced under `jit`.

        `params` may have None in place of all operands, or in place of all other parameters.
        """
        ...


@runtime_checkable
class FreezesState(Protocol):
    """An adapter whose layers can train with their stored batch statistics."""

    def layer_path(self, name: str) -> str:
        """Converts a path in the model state to a path in the model's layers."""
        ...

    def with_frozen_state(self, names: Collection[str]) -> "Adapter":
        """Returns a copy whose batch normalizations use their stored statistics in training.

        `names` are paths of these statistics in the model state. `init` must have been traced.
        """
        ...


def layer_paths(adapter: "Adapter", model_state: PyTree) -> dict[str, str]:
    """Returns the path in the model's layers for each path in the model state; shapes suffice."""
    names = named_leaves(model_state)
    return {n: adapter.layer_path(n) if isinstance(adapter, FreezesState) else n for n in names}


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

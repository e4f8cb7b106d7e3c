"""The attributes of Keras that this package reads although Keras does not document them.

Keras 3.15 has all of them; if another version lacks one, the error advises to install 3.15.
"""

import contextlib
import copyreg
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from spmdtrain.errors import UserError

_KNOWN = "3.15"


def compile_arguments(model: Any) -> Mapping[str, Any]:
    """Returns the arguments of `model.compile` by name, as objects.

    Keras' public `get_compile_config` serializes them.
    """
    arguments: Mapping[str, Any] = _read(_read(model, "_compile_config"), "config")
    return arguments


def all_layers(model: Any) -> Sequence[Any]:
    """Returns the layers of a model, with nested ones."""
    return list(_read(model, "_flatten_layers")())


@contextlib.contextmanager
def with_moments(layers: Sequence[Any], moments: Callable[..., Any]) -> Iterator[None]:
    """Makes the batch normalizations among some layers compute mean and variance by `moments`.

    Layers that do not reduce over the first dim, and calls with a mask, keep Keras' computation.

    Args:
      moments: Computes mean and variance (C,) from values (B, ..., C) and `near`, their averages.
    """
    kind = importlib.import_module("keras").layers.BatchNormalization
    # Without this attribute Keras computes the same numbers, by more collectives.
    of_keras: Any = getattr(kind, "_moments", None)

    def replaced(layer: Any, inputs: Any, mask: Any) -> Any:
        if mask is not None or layer.axis in (0, -inputs.ndim):
            return of_keras(layer, inputs, mask)
        near = jax.lax.stop_gradient(layer.moving_mean.value).astype(inputs.dtype)
        return moments(jnp.moveaxis(inputs, layer.axis, -1), near=near)

    norms = [x for x in layers if isinstance(x, kind) and of_keras is not None]
    norms = [x for x in norms if type(x)._moments is of_keras]
    try:
        for layer in norms:
            vars(layer)["_moments"] = functools.partial(replaced, layer)
        yield
    finally:
        for layer in norms:
            del vars(layer)["_moments"]


@contextlib.contextmanager
def with_named_calls(model: Any, name: Callable[[str, Any], Any]) -> Iterator[None]:
    """Makes each call of a layer of a model return `name(path, outputs)`.

    The path of a layer is the one with which those of its variables begin. A layer without
    variables may have none, and has its name as the path.
    """

    def named(path: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            return name(path, call(*args, **kwargs))

        return run

    layers = [x for x in all_layers(model) if x is not model and "call" not in vars(x)]
    try:
        for layer in layers:
            vars(layer)["call"] = named(getattr(layer, "path", None) or layer.name, layer.call)
        yield
    finally:
        for layer in layers:
            del vars(layer)["call"]


def saved_variables(model: Any) -> Mapping[str, Any]:
    """Returns what a `.keras` file of a model holds, by the name in its HDF5 file.

    Values are the model's variables themselves, unless a layer saves something else.
    """
    saving = importlib.import_module("keras.src.saving.saving_lib")
    store = _read(saving, "NpzIOStore")("", None, "w")  # keeps what it is given until it is closed
    _read(saving, "_save_state")(model, store, None, "", set())
    folders = {"" if name == "__root__" else f"{name}/": x for name, x in store.contents.items()}
    return {
        f"{folder}vars/{name}": value
        for folder, values in folders.items()
        for name, value in values.items()
    }


def mask_of(array: Any) -> Any:
    """Returns the mask that a layer attached to its output; None if there is none."""
    # Not the attribute of the array, which is absent if there is no mask.
    return _read(importlib.import_module("keras.src.backend"), "get_keras_mask")(array)


def with_mask(array: Any, mask: Any) -> None:
    """Attaches a mask to an array, as a layer does to its output."""
    _read(importlib.import_module("keras.src.backend"), "set_keras_mask")(array, mask)


def values_and_masks(loss: Any, targets: Any, predictions: Any) -> tuple[Any, list[Any]]:
    """Returns the values of a Keras loss before its reduction, and the masks of values that count.

    A mask comes with the predictions, or the loss attaches it to the values (`ignore_class`).
    """
    masks = [mask_of(predictions)]

    def call(targets: Any, predictions: Any) -> Any:
        values = loss.call(targets, predictions)
        masks.append(mask_of(values))
        return values

    # `copy.copy` would serialize the loss, which custom functions do not survive.
    unreduced = object.__new__(type(loss))
    vars(unreduced).update(vars(loss), reduction="none", call=call)
    values = unreduced(targets, predictions)
    return values, [mask for mask in masks if mask is not None]


def loss_of_function(function: Any, name: str) -> Any:
    """Returns a Keras loss that calls a function; the reduction is the mean.

    `function(targets, predictions)` returns a value for each example.
    """
    # Keras wraps functions in the base class of its own losses, which it does not export.
    loss = importlib.import_module("keras").losses.MeanSquaredError(name=name)
    _read(loss, "fn")
    loss.fn = function
    return loss


def direction_of(metric: Any) -> str | None:
    """Returns whether the lowest ("min") or highest ("max") value is the best; None if unknown."""
    # Optional: Keras sets it for some of its metrics only, and a callback needs `mode` without it.
    return {"down": "min", "up": "max"}.get(getattr(metric, "_direction", None) or "")


def has_variables(metric: Any) -> bool:
    """Returns whether a metric has its variables before its first update."""
    # Optional: only those of Keras that create variables later have the attribute.
    return bool(metric.variables) and getattr(metric, "_built", True)


def reported_name(metric: Any) -> str:
    """Returns the name under which Keras reports a metric, which may be a function."""
    naming = importlib.import_module("keras.src.utils.naming")
    return str(_read(naming, "get_object_name")(metric))


def profiles_steps(callback: Any) -> bool:
    """Returns whether a `TensorBoard` callback would write a profile: `profile_batch` is not 0."""
    return bool(_read(callback, "_should_trace"))


def reduce_by_attributes(value: Any) -> Any:
    """Returns how pickle copies an object of Keras with its attributes; NotImplemented for others.

    A `Pickler.reducer_override`. Keras' own pickles are its files: they need a `get_config` of each
    class and its module, and the variables read from them are not those that the rest of the
    pickle refers to.
    """
    if "keras" not in sys.modules:
        return NotImplemented
    saveable = _read(importlib.import_module("keras.src.saving.keras_saveable"), "KerasSaveable")
    # Not of a class with a `__reduce__` of its own.
    if getattr(type(value), "__reduce__", None) is saveable.__reduce__:
        # A model lists its nodes. Those of each layer would be as deep a recursion as the model.
        edges = ("_inbound_nodes", "_outbound_nodes")
        attributes = {name: [] if name in edges else x for name, x in vars(value).items()}
        return copyreg.__newobj__, (type(value),), attributes  # type: ignore[attr-defined]
    if type(value).__module__ == "keras.src.utils.tracking":
        for kind in (list, dict, set):
            if isinstance(value, kind):
                # Its methods read its attributes, which pickle sets after it has filled it.
                return _tracked, (type(value), kind), (vars(value), kind(value)), None, None, _fill
    return NotImplemented


def _tracked(cls: type, kind: Any) -> Any:
    return kind.__new__(cls)


def _fill(tracked: Any, state: tuple[Mapping[str, Any], Any]) -> None:
    vars(tracked).update(state[0])
    kind = type(state[1])
    (kind.extend if kind is list else kind.update)(tracked, state[1])


def _read(owner: Any, name: str) -> Any:
    if not hasattr(owner, name):
        whose = getattr(owner, "__name__", type(owner).__name__)
        version = importlib.import_module("keras").__version__
        raise UserError(
            f"Keras {version} has no {whose}.{name}, which spmdtrain reads: install Keras {_KNOWN} "
            f"(pip install 'keras=={_KNOWN}.*')"
        )
    return getattr(owner, name)

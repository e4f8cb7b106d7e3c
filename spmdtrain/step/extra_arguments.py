"""The extra arguments of optax optimizers: which ones an optimizer takes, and their values."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import optax

from spmdtrain.errors import UserError
from spmdtrain.tree import with_own_containers

PyTree = Any
_OFFERED = ("value", "grad", "value_fn", "obj_fn", "grad_fn")
_OF_LOSS = frozenset({"value_fn", "obj_fn", "grad_fn"})


@dataclass(frozen=True)
class ExtraArguments:
    """The values of the extra arguments in a step.

    Attributes:
      value: The weighted mean loss of the global batch, a scalar; `value`.
      grad: Its gradients with respect to the trained parameters; `grad`.
      value_fn: A function from trained parameters to the loss of the same batch with the same
        random key; `value_fn`, and `obj_fn` (`optax.contrib.sophia`). None if it is not known.
      grad_fn: A function from trained parameters and a number, which is ignored, to the gradients;
        `grad_fn` (`optax.contrib.sam`). None if it is not known.
    """

    value: jax.Array
    grad: PyTree
    value_fn: Callable[[PyTree], jax.Array] | None = None
    grad_fn: Callable[[PyTree, Any], PyTree] | None = None

    def of(self, names: Iterable[str]) -> dict[str, Any]:
        """Returns the arguments of these names."""
        found = {
            "value": self.value,
            "grad": self.grad,
            "value_fn": self.value_fn,
            "obj_fn": self.value_fn,
            "grad_fn": self.grad_fn,
        }
        return {name: found[name] for name in names}


def update_with(
    optimizer: optax.GradientTransformation,
    gradients: PyTree,
    opt_state: PyTree,
    trained: PyTree,
    extra: ExtraArguments,
) -> tuple[PyTree, PyTree]:
    """Returns an optimizer's updates and new state; it gets the extra arguments it declares."""
    update: Any = optimizer.update
    given = extra.of(extra_names(optimizer))
    own = with_own_containers((gradients, opt_state, trained))
    updates, after = update(*own, **given)
    return updates, after


def extra_names(optimizer: optax.GradientTransformation) -> list[str]:
    """Returns the names of the extra arguments that an optimizer and its parts declare.

    The transformations that a chain or another wrapper calls are in the closures of its functions.

    Raises:
      UserError: If it requires an argument that a step does not have.
    """
    own = _parameters(optimizer.update) or []
    names: set[str] = set()
    functions = (optimizer.init, optimizer.update)
    for function in reachable_functions(functions, follows=lambda function: True):
        parameters = _parameters(function) or []
        # optax calls updates with `params=`, so an update function has a parameter of this name.
        if [p.name for p in parameters[2:3]] != ["params"]:
            continue
        for parameter in parameters[3:]:
            if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                continue
            if parameter.name in _OFFERED:
                names.add(parameter.name)
            elif parameter.default is parameter.empty:
                raise UserError(
                    f"the optimizer's {_name(function)} requires the extra argument "
                    f"{parameter.name!r}, which a step does not have: it passes "
                    f"{', '.join(_OFFERED)}. Rename the argument or give it a default"
                )
    if not any(p.kind is p.VAR_KEYWORD for p in own):
        names &= {p.name for p in own}
    return [name for name in _OFFERED if name in names]


def evaluates_loss(optimizer: optax.GradientTransformation) -> bool:
    """Returns whether an optimizer evaluates the loss or its gradients at other parameters."""
    return not _OF_LOSS.isdisjoint(extra_names(optimizer))


def reachable_functions(
    functions: Any, *, follows: Callable[[Callable[..., Any]], bool]
) -> Iterator[Callable[..., Any]]:
    """Yields a function, or a tuple of several, and recursively the functions in their closures.

    The closure of a function is searched if `follows` returns True for it.
    """
    seen: set[int] = set()
    pending = [functions]
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, tuple | list):
            pending += item
        elif isinstance(item, dict):
            pending += item.values()
        elif callable(item):
            yield item
            if follows(item):
                pending += _held_by(item)


def closure_of(function: Any) -> dict[str, Any]:
    """Returns the values of the outer variables of a function by name."""
    cells = getattr(function, "__closure__", None)
    if not cells:
        return {}
    try:
        return {
            name: cell.cell_contents
            for name, cell in zip(function.__code__.co_freevars, cells, strict=True)
        }
    except ValueError:  # a variable without a value yet
        return {}


def _held_by(function: Any) -> list[Any]:
    """Returns the objects that a function refers to and that may call other functions."""
    if isinstance(function, partial):
        return [function.func, *function.args, *function.keywords.values()]
    if inspect.ismethod(function):  # of `optax.MultiSteps`, for example
        held = getattr(function.__self__, "__dict__", {})
        return [function.__func__, *held.values()]
    found = closure_of(function)
    held = [*found.values(), getattr(function, "__wrapped__", None)]
    if inspect.isfunction(function):
        names = inspect.getclosurevars(function).globals.values()
        held += [x.update for x in names if hasattr(x, "init") and hasattr(x, "update")]
    held += [x.update for x in found.values() if hasattr(x, "init") and hasattr(x, "update")]
    if {"inner_factory", "other_hps", "numeric_hps", "sched_hps"} <= found.keys():
        # `optax.inject_hyperparams` creates its inner optimizer in each update.
        scheduled = {name: f(f.init()) for name, f in found["sched_hps"].items()}
        given = found["other_hps"] | found["numeric_hps"] | scheduled
        held.append(found["inner_factory"](**given).update)
    return held


def _parameters(function: Any) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature
        return None


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__)).split(".")[0]

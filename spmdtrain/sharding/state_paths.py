"""Paths of leaves of the state: the field they are in, and the parameter they belong to."""

from collections.abc import Mapping

from spmdtrain.strategies import STATE

Shape = tuple[int, ...]


def parameter_of(name: str, shape: Shape, parameters: Mapping[str, Shape]) -> str | None:
    """Returns the path of the parameter that a leaf of the state belongs to; None if there is none.

    The parameter's path ends the leaf's path: `opt_state/0/mu/blocks/q` belongs to
    `params/blocks/q`. With several optimizers, `opt_state/actor/0/mu/q` belongs to
    `params/actor/q`. A parameter of the leaf's shape is preferred, then the longest path. Leaves
    of other fields than `params`, `opt_state` and `averaged` belong to none.
    """
    root, *parts = name.split("/")
    if root not in ("params", *STATE):
        return None
    tails = [parts[start:] for start in range(len(parts) + 1)]
    if not "".join(parts[:1]).isdecimal():  # a number is an index in a chain of optimizers
        tails += [parts[:1] + tail for tail in tails]
    names = ["/".join(["params", *tail]) for tail in sorted(tails, key=len, reverse=True)]
    matches = [name for name in names if name in parameters]
    same_shape = [name for name in matches if parameters[name] == shape]
    return next(iter(same_shape + matches), None)


def field_of(name: str) -> str:
    """Returns the field of the state that a leaf's path begins with."""
    return name.partition("/")[0]


def params_path(name: str) -> str:
    """Returns a parameter's path in the state. `name` is empty if the parameters are one array."""
    return f"params/{name}" if name else "params"

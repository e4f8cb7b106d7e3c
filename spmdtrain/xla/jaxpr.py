"""Iteration over the equations of a jaxpr, and their evaluation one by one."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AxisType


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yields every equation of an open jaxpr, including those of loops, branches and functions."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in inner_jaxprs(equation):
            yield from equations(inner)


def constrains_sharding(jaxpr: Any) -> bool:
    """Returns whether an operation of an open jaxpr constrains the sharding of arrays."""
    return any(map(_is_constraint, equations(jaxpr)))


def _is_constraint(equation: Any) -> bool:
    if equation.primitive.name == "reshard":
        # JAX gives a gradient the mesh of the value; on automatic axes that constrains nothing.
        mesh = equation.params["dst_sharding"].mesh
        return not all(kind is AxisType.Auto for kind in mesh.axis_types)
    return equation.primitive.name in ("sharding_constraint", "shard_map")


def inner_jaxprs(equation: Any) -> Iterator[Any]:
    """Yields the open jaxprs in an equation's parameters: a loop's body, branches, a function."""
    for inner, _ in inner_programs(equation):
        yield inner


def inner_programs(equation: Any) -> Iterator[tuple[Any, Sequence[Any]]]:
    """Yields the open jaxprs in an equation's parameters, each with its constants."""
    for value in equation.params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(part, "jaxpr", part)  # the open jaxpr of a closed one
            if hasattr(inner, "eqns"):
                yield inner, getattr(part, "consts", ())


def scan_operands(equation: Any) -> tuple[int, int]:
    """Returns how many of the operands of a `scan` are constants and how many are carried.

    The constants are its first operands, the carried values follow.
    """
    params = equation.params
    if "ft_in" in params:  # JAX 0.11 and later
        constants, carried, _ = (len(list(part)) for part in params["ft_in"].unpack())
        return constants, carried
    return params["num_consts"], params["num_carry"]


def evaluate(jaxpr: Any, equation: Any, read: Callable[[Any], Any]) -> list[Any]:
    """Returns the results of an equation of an open jaxpr; `read` returns a variable's value."""
    given = variables(equation.invars)
    alone = jaxpr.replace(
        constvars=[],
        invars=given,
        outvars=equation.outvars,
        eqns=[equation],
        effects=equation.effects,
    )
    values: list[Any] = jax.core.eval_jaxpr(alone, (), *map(read, given))
    return values


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Returns the distinct variables among the operands of an equation, without the literals."""
    return list(dict.fromkeys(x for x in atoms if not hasattr(x, "val")))

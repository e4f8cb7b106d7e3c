"""Iteration over the equations of a jaxpr."""

from collections.abc import Iterator
from typing import Any


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yields every equation of a jaxpr, including those of loops, branches and inner functions.

    Args:
        jaxpr: An open jaxpr.
    """
    for equation in jaxpr.eqns:
        yield equation
        for inner in inner_jaxprs(equation):
            yield from equations(inner)


def inner_jaxprs(equation: Any) -> Iterator[Any]:
    """Yields the open jaxprs in an equation's parameters: a loop's body, branches, a function.

    Args:
        equation: An equation of a jaxpr.
    """
    for value in equation.params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(part, "jaxpr", part)  # the open jaxpr of a closed one
            if hasattr(inner, "eqns"):
                yield inner

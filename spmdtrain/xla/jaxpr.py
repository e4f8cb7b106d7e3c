"""Reads what JAX has traced."""

from collections.abc import Iterator
from typing import Any


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr, those of loops, branches and inner functions too."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in inner_jaxprs(equation):
            yield from equations(inner)


def inner_jaxprs(equation: Any) -> Iterator[Any]:
    """The jaxprs within an equation, open: a loop's body, branches, a function."""
    for value in equation.params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(part, "jaxpr", part)  # of a closed one, the open
            if hasattr(inner, "eqns"):
                yield inner

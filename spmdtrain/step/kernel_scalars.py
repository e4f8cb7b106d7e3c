"""Values of a kernel's scalars at the points of its grid."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class ScalarTable:
    """A known array in memory, which a kernel reads by index."""

    values: np.ndarray


Known = np.ndarray | ScalarTable
"""A known scalar, with one value for each point of the grid, or a table."""


def table_element(
    equation: Any, operands: Sequence[Known | None], points: int
) -> np.ndarray | None:
    """Returns the element that a `get` reads of a table at each point; None if it is not known.

    Operands that are not known are None. `points` is the number of points.
    """
    table = operands[0]
    if not isinstance(table, ScalarTable) or equation.outvars[0].aval.shape:
        return None
    transforms = equation.params["tree"].unflatten(operands[1:])
    if len(transforms) != 1 or not hasattr(transforms[0], "indices"):
        return None
    indices = transforms[0].indices  # each known or not, or a constant
    if any(isinstance(index, ScalarTable) or np.ndim(index) > 1 for index in indices):
        return None
    if not all(isinstance(index, (int, np.integer, np.ndarray)) for index in indices):
        return None
    limits = zip(indices, table.values.shape, strict=True)
    inside = tuple(np.clip(index, 0, size - 1) for index, size in limits)
    return np.broadcast_to(table.values[inside], (points,))


def _quotient(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Divides as `lax.div`, which rounds integers toward zero."""
    y = np.where(y == 0, 1, y)
    return np.fix(x / y).astype(x.dtype) if x.dtype.kind in "iu" else x / y


_COMPUTED: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _quotient,
    "rem": lambda x, y: np.fmod(x, np.where(y == 0, 1, y)),
    "max": np.maximum,
    "min": np.minimum,
    "sign": np.sign,
    "neg": np.negative,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "not": np.invert,
    "select_n": lambda which, *cases: np.choose(which.astype(int), cases),
    "clamp": lambda low, x, high: np.clip(x, low, high),
}
_SAME = ("squeeze", "reshape", "broadcast_in_dim", "copy", "stop_gradient")


def computed(equation: Any, operands: Sequence[Known | None]) -> np.ndarray | None:
    """Returns the scalar result of an equation at each point; None if it is not known.

    Operands that are not known are None.
    """
    name, aval = equation.primitive.name, equation.outvars[0].aval if equation.outvars else None
    values = [x for x in operands if isinstance(x, np.ndarray)]
    if getattr(aval, "shape", None) != () or len(values) < len(operands) or not values:
        return None
    if name == "convert_element_type":
        return values[0].astype(equation.params["new_dtype"])
    if name in _SAME:
        return values[0]
    return _COMPUTED[name](*values) if name in _COMPUTED else None

"""Two traces of a function of a batch, with different numbers of rows, and their comparison."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src import source_info_util

from spmdtrain.tree import is_key

PyTree = Any


class Rows(NamedTuple):
    """An array with the rows of the batch, in order, along one dim."""

    dim: int
    inner: int = 1
    """Consecutive elements of the dim that belong to one row: T after (B, T) to (B * T)."""
    is_row_index: tuple[bool, ...] = ()
    """Whether each entry of the last dim holds the row's own index (`arange(B)`)."""
    all_false: bool = False
    """Whether all elements are False."""
    positional: bool = False
    """Whether a row's values depend on its position in the batch or on earlier rows."""


class Mixed(NamedTuple):
    """An array that padding may change."""

    why: str
    is_sum: bool = False
    """True of a sum over the rows of values that each depend on one row."""
    is_mean: bool = False
    """True of a mean over the rows, alone or added to values that each depend on one row."""
    power: int | None = None
    """Of a constant number that depends on the batch size: 1 if proportional, -1 if inversely."""


FIXED = None
Value = Rows | Mixed | None


@dataclass(frozen=True)
class Op:
    """An equation of the first trace, its counterpart in the second, and its operands."""

    first: Any
    second: Any
    ins: Sequence[Value]
    sizes: tuple[int, int]  # of the batches
    zeros: Sequence[bool] = ()  # whether each operand is created as an array of zeros

    @property
    def params(self) -> dict[str, Any]:
        params: dict[str, Any] = self.first.params
        return params

    @property
    def rows(self) -> list[Rows]:
        return [value for value in self.ins if isinstance(value, Rows)]

    def shape(self, operand: int) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.first.invars[operand].aval.shape
        return shape

    @property
    def out(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.first.outvars[0].aval.shape
        return shape

    def sized(self, output: int = 0) -> list[int]:
        """Returns the dims of an output that depend on the batch size."""
        return differing(self.first.outvars[output].aval, self.second.outvars[output].aval)

    def mixed(self) -> Mixed:
        where = source_info_util.summarize(self.first.source_info)
        name = self.first.primitive.name
        return Mixed(f"{name} at {where}" if where else name)

    def same(self) -> Rows | None:
        """Returns the layout of the rows if all operands with rows have the same, else None."""
        layouts = {(rows.dim, rows.inner) for rows in self.rows}
        return Rows(*layouts.pop()) if len(layouts) == 1 else None

    def with_position(self, value: Value) -> Value:
        """Returns a rule's result, marked `positional` if an operand depends on row positions."""
        if not isinstance(value, Rows):
            return value
        lost = self.first.primitive.name != "gather" and not any(value.is_row_index)
        positional = any(rows.positional or (lost and any(rows.is_row_index)) for rows in self.rows)
        return value._replace(positional=value.positional or positional)


def differing(first: Any, second: Any) -> list[int]:
    """Returns the dims in which two shapes of the same rank differ."""
    a, b = getattr(first, "shape", ()), getattr(second, "shape", ())
    return [dim for dim, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]]


def size_of(batch: PyTree) -> int:
    """Returns the number of rows of a batch."""
    size: int = jax.tree.leaves(batch)[0].shape[0]
    return size


def traces_of(
    function: Callable[[PyTree, PyTree], PyTree],
    fixed: PyTree,
    batch: PyTree,
    other: int,
    axes: Sequence[tuple[str, int]] = (),
) -> tuple[Any, Any] | str:
    """Returns the traces of a batch and of one of `other` rows, or why there is no second one."""

    def trace(rows: int) -> Any:
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), batch)
        return jax.make_jaxpr(function, axis_env=axes)(fixed, shapes)

    first = trace(size_of(batch))
    try:
        return first, trace(other)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        return f"the function cannot be traced for another batch size ({reason})"


# -- comparison of the two traces ------------------------------------------------------------------

# These follow from the shapes, which are compared separately.
_SIZES = {"shape", "new_sizes", "limit_indices", "slice_sizes", "sizes", "reps"}


def shape_of(variable: Any) -> tuple[int, ...]:
    """Returns the shape of a variable of a jaxpr."""
    shape: tuple[int, ...] = getattr(variable.aval, "shape", ())
    return shape


def same_params(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Returns whether two equations have the same parameters, apart from their shapes."""
    return all(name in _SIZES or _same(first[name], second[name]) for name in first)


def _same(first: Any, second: Any) -> bool:
    try:
        return bool(first == second) or str(first) == str(second)
    except ValueError:  # arrays
        return same_array(first, second)


def same_array(first: Any, second: Any) -> bool:
    """Returns whether two arrays have the same values; False if they are in other processes."""
    if first is second:
        return True
    if any(isinstance(x, jax.Array) and not x.is_fully_addressable for x in (first, second)):
        return False
    a, b = map(_numbers, (first, second))
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def is_zero(operand: Any) -> bool:
    """Returns whether an operand of an equation is the number 0."""
    value = getattr(operand, "val", 1)
    is_number = np.ndim(value) == 0 and np.asarray(value).dtype != jax.dtypes.float0
    return is_number and bool(value == 0)


def creates_zeros(jaxpr: Any, variable: Any) -> bool:
    """Returns whether a result of an open jaxpr is an array that it creates as zeros."""
    if is_zero(variable):
        return True
    made = next((x for x in jaxpr.eqns if any(variable is out for out in x.outvars)), None)
    if made is None or made.primitive.name != "broadcast_in_dim":
        return False
    return is_zero(made.invars[0])


def _numbers(x: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if is_key(x) else x)


def classified_const(first: Any, second: Any) -> Value:
    """Classifies a constant: the same array, or one row per row of the batch (`np.arange(B)`)."""
    if same_array(first, second):
        return FIXED
    if np.ndim(first) == np.ndim(second) and differing(first, second) == [0]:
        shared = min(len(first), len(second))
        if same_array(first[:shared], second[:shared]):
            return Rows(0, positional=True)
    return Mixed("one of its constants depends on the batch size")

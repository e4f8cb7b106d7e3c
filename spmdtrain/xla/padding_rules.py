"""Effects of single operations on the rows of a batch, in two traces of a function."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import source_info_util

from spmdtrain.tree import is_key

# -- Two traces of a function of a batch, with different numbers of rows, and their comparison -----

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
    a, b = (np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in (first, second))
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


def classified_const(first: Any, second: Any) -> Value:
    """Classifies a constant: the same array, or one row per row of the batch (`np.arange(B)`)."""
    if same_array(first, second):
        return FIXED
    if np.ndim(first) == np.ndim(second) and differing(first, second) == [0]:
        shared = min(len(first), len(second))
        if same_array(first[:shared], second[:shared]):
            return Rows(0, positional=True)
    return Mixed("one of its constants depends on the batch size")


# -- Effects of single operations on the rows of a batch -------------------------------------------
#
# A rule maps an operation with classified operands to the classes of its results.

Rule = Callable[[Op], "Value | list[Value]"]


def _elementwise(op: Op) -> Value:
    return op.same() or op.mixed()


def _less(op: Op) -> Value:
    """Recognizes that no row index is below 0, a test that indexing with `arange(B)` contains."""
    bound = getattr(op.first.invars[1], "val", None)
    value = op.ins[0]
    if isinstance(value, Rows) and all(value.is_row_index or (False,)) and bound == 0:
        return Rows(value.dim, value.inner, all_false=True)
    return _elementwise(op)


def _created(op: Op) -> Value:
    """Classifies an array that is created with the batch size."""
    sized = op.sized()
    return Rows(sized[0]) if len(sized) == 1 else FIXED if not sized else op.mixed()


def _repeated(op: Op) -> Value:
    """Classifies an array in which a constant is repeated, once or more for each row."""
    value = _created(op)
    if not isinstance(value, Rows):
        return value
    lengths = [each.outvars[0].aval.shape[value.dim] for each in (op.first, op.second)]
    inner = lengths[0] // op.sizes[0]
    return Rows(value.dim, inner) if lengths[1] == op.sizes[1] * inner else op.mixed()


def _iota(op: Op) -> Value:
    value = _created(op)
    if isinstance(value, Rows) and op.params["dimension"] == value.dim:
        alone = len(op.out) == 1
        return value._replace(is_row_index=(True,) if alone else (), positional=not alone)
    return value


def _broadcast_in_dim(op: Op) -> Value:
    value = op.ins[0]
    if not isinstance(value, Rows):
        return _repeated(op)
    dims = op.params["broadcast_dimensions"]
    column = op.out == (*op.shape(0), 1)
    return Rows(dims[value.dim], value.inner, value.is_row_index if column else ())


def _random(op: Op) -> Value:
    """Random bits or keys, drawn by position, so that more rows do not change the first ones."""
    if op.rows:  # one key per row
        return op.same() or op.mixed()
    value = _created(op)
    return value if value is FIXED or _by_position(op, value) else op.mixed()


def _random_gamma(op: Op) -> Value:
    """One draw per entry of the second operand, by position if there is a single key."""
    value = op.same()
    if value is None or (op.ins[0] is FIXED and not _by_position(op, value)):
        return op.mixed()
    return value


def _by_position(op: Op, value: Value) -> bool:
    """Returns whether more rows leave the random numbers of the first rows unchanged."""
    key = op.first.invars[0].aval
    flags: Any = jax.config  # has no types for its attributes
    partitionable = "fry" in str(key.dtype) and flags.jax_threefry_partitionable
    leading = isinstance(value, Rows) and math.prod(op.out[: value.dim]) == 1
    return partitionable and leading and not key.shape


def _reduce(op: Op) -> "Value | list[Value]":
    axes = op.params["axes"] if "axes" in op.params else op.params["dimensions"]
    value = op.same()
    if value is None or value.dim in axes:
        return op.mixed()
    return Rows(value.dim - sum(axis < value.dim for axis in axes), value.inner)


def _along(name: str) -> Rule:
    """Returns the rule of an operation along one dim, which must not be the dim of the rows."""

    def rule(op: Op) -> Value:
        value, axis = op.same(), op.params.get(name, len(op.shape(0)) - 1)
        return op.mixed() if value is None or value.dim == axis else value

    return rule


def _reshape(op: Op) -> Value:
    value, sized = op.ins[0], op.sized()
    if not isinstance(value, Rows) or len(sized) != 1 or op.params.get("dimensions"):
        return op.mixed()
    shape, dim = op.shape(0), sized[0]
    if math.prod(shape[: value.dim]) != math.prod(op.out[:dim]):
        return op.mixed()
    rows = shape[value.dim] // value.inner
    return Rows(dim, op.out[dim] // rows) if op.out[dim] % rows == 0 else op.mixed()


def _transpose(op: Op) -> Value:
    (value,) = op.rows
    return Rows(tuple(op.params["permutation"]).index(value.dim), value.inner)


def _squeeze(op: Op) -> Value:
    (value,) = op.rows
    removed = [dim % len(op.shape(0)) for dim in op.params["dimensions"]]
    return Rows(value.dim - sum(dim < value.dim for dim in removed), value.inner)


def _concatenate(op: Op) -> Value:
    value, axis = op.same(), op.params["dimension"]
    if value is None or axis == value.dim:
        return op.mixed()
    columns: list[bool] = []
    if axis == len(op.out) - 1:
        for number, operand in enumerate(op.ins):
            width = op.shape(number)[-1]
            known = isinstance(operand, Rows) and len(operand.is_row_index) == width
            columns += operand.is_row_index if known else [False] * width  # type: ignore[union-attr]
    return value._replace(is_row_index=tuple(columns))


def _slice(op: Op) -> Value:
    """A part of each row: the slice contains the whole dim of the rows."""
    value = op.ins[0]
    if not isinstance(value, Rows) or any(operand is not FIXED for operand in op.ins[1:]):
        return op.mixed()
    strides = op.params.get("strides")
    kept = op.out[value.dim] == op.shape(0)[value.dim]
    dense = not strides or strides[value.dim] == 1
    return Rows(*value[:2]) if kept and dense else op.mixed()


def _stack(op: Op) -> Value:
    value = op.same()
    if value is None:
        return op.mixed()
    return Rows(value.dim + (op.params["axis"] <= value.dim), value.inner)


def _unstack(op: Op) -> Value:
    (value,), axis = op.rows, op.params["axis"]
    return op.mixed() if axis == value.dim else Rows(value.dim - (axis < value.dim), value.inner)


def _tile(op: Op) -> Value:
    value, reps = op.ins[0], op.params["reps"]
    if not isinstance(value, Rows):
        return _repeated(op)
    return Rows(*value[:2]) if reps[value.dim] == 1 else op.mixed()


def _pad(op: Op) -> Value:
    value = op.ins[0]
    if not isinstance(value, Rows) or op.ins[1] is not FIXED:
        return op.mixed()
    untouched = tuple(op.params["padding_config"][value.dim]) == (0, 0, 0)
    return Rows(*value[:2]) if untouched else op.mixed()


def _update_slice(op: Op) -> Value:
    value = op.ins[0]
    if not isinstance(value, Rows) or not isinstance(op.ins[1], Rows):
        return op.mixed()
    whole = op.ins[1][:2] == value[:2] and op.shape(1)[value.dim] == op.shape(0)[value.dim]
    fixed = all(operand is FIXED for operand in op.ins[2:])
    return Rows(*value[:2]) if whole and fixed else op.mixed()


def _window(op: Op) -> Value:
    value = op.same()
    if value is None or op.params["window_dimensions"][value.dim] != 1:
        return op.mixed()
    strides = op.params["window_strides"][value.dim]
    padding = tuple(op.params["padding"][value.dim])
    dilated = [op.params.get(n) for n in ("base_dilation", "window_dilation")]
    plain = all(dilation is None or dilation[value.dim] == 1 for dilation in dilated)
    return value if strides == 1 and padding == (0, 0) and plain else op.mixed()


def _batched(trailing: int) -> Rule:
    """Returns the rule of an operation on the last dims, batched over the dims before them."""

    def rule(op: Op) -> Value:
        value = op.same()
        dims = trailing or len(op.params["fft_lengths"])
        return op.mixed() if value is None or value.dim >= len(op.shape(0)) - dims else value

    return rule


def _dot(op: Op) -> Value:
    (left, right), (left_batch, right_batch) = op.params["dimension_numbers"]
    batched = len(left_batch)
    sides = [(left, left_batch, op.ins[0]), (right, right_batch, op.ins[1])]
    places: set[tuple[int, int, bool]] = set()
    before = batched
    for side, (contracted, batch, value) in enumerate(sides):
        free = [d for d in range(len(op.shape(side))) if d not in (*contracted, *batch)]
        if isinstance(value, Rows):
            if value.dim in contracted:
                return op.mixed()
            within = value.dim in batch
            at = tuple(batch).index(value.dim) if within else before + free.index(value.dim)
            places.add((at, value.inner, within))
        before += len(free)
    if len(places) != 1:
        return op.mixed()
    ((at, inner, within),) = places
    return Rows(at, inner) if len(op.rows) == (2 if within else 1) else op.mixed()


def _conv(op: Op) -> Value:
    numbers, value = op.params["dimension_numbers"], op.ins[0]
    alone = isinstance(value, Rows) and op.ins[1] is FIXED and op.params["batch_group_count"] == 1
    if not alone or not isinstance(value, Rows) or value.dim != numbers.lhs_spec[0]:
        return op.mixed()
    return Rows(numbers.out_spec[0], value.inner)


def _gather(op: Op) -> Value:
    numbers, (operand, indices) = op.params["dimension_numbers"], op.ins
    by_number = any(any(rows.is_row_index) for rows in op.rows)
    batch_dims = [d for d in range(len(op.out)) if d not in numbers.offset_dims]
    by_index = isinstance(indices, Rows) and indices.dim < len(op.shape(1)) - 1
    if not isinstance(operand, Rows):  # a table
        assert isinstance(indices, Rows)
        if not by_index:
            return op.mixed()
        return Rows(batch_dims[indices.dim], indices.inner, positional=by_number)
    removed = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    if indices is FIXED:
        if (
            operand.dim in removed
            or op.params["slice_sizes"][operand.dim] != op.shape(0)[operand.dim]
        ):
            return op.mixed()
        kept = [d for d in range(len(op.shape(0))) if d not in removed]
        return Rows(
            numbers.offset_dims[kept.index(operand.dim)], operand.inner, positional=by_number
        )
    assert isinstance(indices, Rows)
    if not by_index or operand.inner != indices.inner:
        return op.mixed()
    if operand.dim in numbers.operand_batching_dims:  # row by row
        number = tuple(numbers.operand_batching_dims).index(operand.dim)
        paired = numbers.start_indices_batching_dims[number] == indices.dim
        if not paired:
            return op.mixed()
        return Rows(batch_dims[indices.dim], indices.inner, positional=by_number)
    # x[arange(B), ...]: each row reads from itself; a wider window would read other rows too.
    alone = operand.inner == 1 and op.params["slice_sizes"][operand.dim] == 1
    if operand.dim in numbers.start_index_map and alone:
        column = tuple(numbers.start_index_map).index(operand.dim)
        if indices.is_row_index[column : column + 1] == (True,):
            others = indices.is_row_index[:column] + indices.is_row_index[column + 1 :]
            positional = any(others) or any(operand.is_row_index)
            return Rows(batch_dims[indices.dim], indices.inner, positional=positional)
    return op.mixed()


def _scatter(op: Op) -> Value:
    numbers, (operand, indices, updates) = op.params["dimension_numbers"], op.ins
    if not isinstance(operand, Rows) or not isinstance(updates, Rows):
        return op.mixed()
    if operand.inner != updates.inner:
        return op.mixed()
    batching = tuple(numbers.operand_batching_dims)
    if operand.dim in batching and isinstance(indices, Rows):
        dims = [d for d in range(len(op.shape(2))) if d not in numbers.update_window_dims]
        paired = numbers.scatter_indices_batching_dims[batching.index(operand.dim)] == indices.dim
        matches = paired and dims[indices.dim] == updates.dim
        return Rows(*operand[:2]) if matches else op.mixed()
    window = [
        d for d in range(len(op.shape(0))) if d not in (*numbers.inserted_window_dims, *batching)
    ]
    if indices is not FIXED or operand.dim not in window:
        return op.mixed()
    at = numbers.update_window_dims[window.index(operand.dim)]
    whole = at == updates.dim and op.shape(2)[at] == op.shape(0)[operand.dim]
    return Rows(*operand[:2]) if whole else op.mixed()


def _each(op: Op) -> list[Value]:
    return list(op.ins)


CALLS = {
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "checkpoint",
    "remat",
    "remat2",
}
_ELEMENTWISE = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type cbrt ceil clamp complex conj convert_element_type copy copy_p cos cosh
    digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac
    imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt_to max min mul name ne neg
    nextafter not one_minus_square or polygamma polynomial population_count clz pow random_clone
    random_fold_in
    random_seed real reduce_precision regularized_incomplete_beta rem reshard round rsqrt select_n
    sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt
    square stop_gradient sub tan tanh xor zeta
"""
# Random draws whose first operand is a key: by position if one key serves all rows.
DRAWS = ("random_bits", "random_split", "random_gamma")
RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE.split(), _elementwise),
    "lt": _less,
    "iota": _iota,
    "broadcast_in_dim": _broadcast_in_dim,
    **dict.fromkeys(("random_bits", "random_split"), _random),
    "random_gamma": _random_gamma,
    "random_wrap": _elementwise,
    "random_unwrap": _elementwise,
    **dict.fromkeys(
        (f"reduce_{n}" for n in ("sum", "max", "min", "prod", "and", "or", "xor")), _reduce
    ),
    **dict.fromkeys(("argmax", "argmin", "reduce"), _reduce),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _along("axis")),
    "top_k": _along("axis"),
    "split": _along("axis"),
    "sort": _along("dimension"),
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "concatenate": _concatenate,
    "stack": _stack,
    "unstack": _unstack,
    "tile": _tile,
    "slice": _slice,
    "dynamic_slice": _slice,
    "dynamic_update_slice": _update_slice,
    "pad": _pad,
    **dict.fromkeys((f"reduce_window{n}" for n in ("", "_max", "_min", "_sum")), _window),
    "select_and_gather_add": _window,
    **dict.fromkeys(("cholesky", "triangular_solve", "lu", "qr", "eigh", "svd"), _batched(2)),
    "fft": _batched(0),
    "dot_general": _dot,
    "conv_general_dilated": _conv,
    "gather": _gather,
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter_add", "scatter_mul", "scatter_min", "scatter_max"),
        _scatter,
    ),
    "rev": lambda op: (
        op.mixed()
        if (value := op.same()) is None or value.dim in op.params["dimensions"]
        else value
    ),
    **dict.fromkeys(("optimization_barrier", "device_put"), _each),
}


# -- Sums and means over the rows of a batch, such as batch statistics -----------------------------

_NAMES = """
add add_any broadcast_in_dim concatenate copy cumsum neg reduce_sum reshape rev sharding_constraint
slice squeeze stack sub transpose
"""
_ADDITIVE = frozenset(_NAMES.split())
"""Primitives whose results are sums over the rows if all operands are."""
NEVER = Rows(0, all_false=True)
"""A number that is False for every batch size."""
_LINEAR = frozenset({"add", "add_any", "broadcast_in_dim", "neg", "reshape", "squeeze", "sub"})
"""Primitives whose results are means over the rows if their operands are, or depend on one row."""


def sum_or_mean(op: Op) -> Value:
    """Returns the class of a sum or a mean over the rows of a batch; None for anything else.

    A mean is a sum as well, because the number of rows counts as a constant in sums. A test whether
    this number is 0 is never true.
    """
    if op.first.primitive.name == "eq" and isinstance(op.ins[0], Mixed) and op.ins[0].power:
        return NEVER if getattr(op.first.invars[1], "val", None) == 0 else None
    total, average = _sum(op), _mean(op)
    return average if total is None else total._replace(is_mean=average is not None)


def _sum(op: Op) -> Mixed | None:
    """Returns the class of a sum over the rows of a batch; None if an operation computes none.

    The sum is of values that each depend on one row. Sums of such sums, and their multiples by
    constants, are such sums as well, and the number of rows is a constant here.
    """
    name = op.first.primitive.name
    sums = [isinstance(x, Mixed) and x.is_sum for x in op.ins]
    or_zeros = [a or b for a, b in zip(sums, op.zeros or sums, strict=True)]
    if name == "reduce_sum" and isinstance(rows := op.ins[0], Rows):
        found = rows.dim in op.params["axes"] and not rows.positional
    elif name in ("scatter-add", "scatter_add") and op.zeros[0]:
        found = _adds_rows(op)
    elif name == "convert_element_type":
        found = sums[0] and not _rounds(op.first)
    elif name == "dot_general" and not any(sums):
        found = _contracts_rows(op)
    elif name == "select_n":
        found = op.ins[0] is FIXED and any(sums) and all(or_zeros[1:])
    elif name in ("mul", "div", "dot_general"):
        found = (sums[0] and _is_constant(op.ins[1])) or (
            name != "div" and sums[1] and _is_constant(op.ins[0])
        )
    else:
        found = name in _ADDITIVE and any(sums) and all(or_zeros)
    if not found:
        return None
    # The reason for an error is the operation that added up the rows.
    origin = next((x for x in op.ins if isinstance(x, Mixed) and x.is_sum), op.mixed())
    return origin._replace(is_sum=True)


def _mean(op: Op) -> Mixed | None:
    """Returns the class of a mean over the rows of a batch; None if an operation computes none.

    It is a sum over the rows divided by a multiple of their number. Multiples of such means by
    fixed values, and their sums with values that depend on at most one row, are such means as well.
    """
    name = op.first.primitive.name
    is_mean = [isinstance(x, Mixed) and x.is_mean for x in op.ins]
    if name == "div":
        found = _divides(op.ins[0], op.ins[1], 1) or (is_mean[0] and op.ins[1] is FIXED)
    elif name == "mul":
        one, other = op.ins
        by_number = _divides(one, other, -1) or _divides(other, one, -1)
        found = by_number or (any(is_mean) and FIXED in op.ins)
    elif name == "reduce_sum":  # not of a mean that is repeated for each row
        found = is_mean[0] and not differing(op.first.invars[0].aval, op.second.invars[0].aval)
    else:
        known = all(mean or _is_plain(x) for mean, x in zip(is_mean, op.ins, strict=True))
        converts = name == "convert_element_type" and not _rounds(op.first)
        found = (name in _LINEAR or converts) and any(is_mean) and known
    if not found:
        return None
    origin = next(x for x in op.ins if isinstance(x, Mixed) and (x.is_sum or x.is_mean))
    return Mixed(origin.why, is_mean=True)


def _is_plain(value: Value) -> bool:
    """Returns whether an array depends on no row, or each of its rows on one row of the batch."""
    return value is FIXED or (isinstance(value, Rows) and not value.positional)


def _divides(total: Value, number: Value, power: int) -> bool:
    """Returns whether a number of this power turns a sum over the rows into a mean."""
    is_sum = isinstance(total, Mixed) and total.is_sum
    return is_sum and isinstance(number, Mixed) and number.power == power


def sum_over_parts(op: Op) -> Value:
    """Returns the class of a sum over all parts of a batch (`jax.lax.psum`).

    It is fixed if it adds up sums over the rows of each part, because it is then the sum over all
    rows of the batch. The number of a row within its part must not matter to these sums.
    """
    known = all(x is FIXED or (isinstance(x, Mixed) and x.is_sum) for x in op.ins)
    return FIXED if known and op.params.get("axis_index_groups") is None else op.mixed()


def without_names(op: Op) -> Op:
    """Returns a `jax.lax.psum` over axes of `jax.vmap` alone as the sum over dims that it is."""
    axes = op.params["axes"]
    if len(op.ins) > 1 or not axes or not all(isinstance(axis, int) for axis in axes):
        return op
    params = {"axes": axes, "out_sharding": None}
    first, second = (
        x.replace(primitive=jax.lax.reduce_sum_p, params=params) for x in (op.first, op.second)
    )
    return replace(op, first=first, second=second)


def adds_to_first(program: Any, count: int) -> bool:
    """Returns whether a closed jaxpr adds something to each of its first `count` arguments.

    It has `count` results. Result i is argument i plus something that does not depend on the first
    arguments.
    """
    given = [*range(count), *[None] * (len(program.jaxpr.invars) - count)]
    return _additions(program.jaxpr, given) == list(range(count))


_OTHER = -1


def _additions(jaxpr: Any, given: Sequence[int | None]) -> list[int | None]:
    """Returns, for each result of an open jaxpr, the argument to which it adds something.

    `given` has, for each argument, the number of the first argument that it equals except for an
    added value; None if it does not depend on the first arguments, `_OTHER` if it does in another
    way.
    """
    known: dict[Any, int | None] = dict(zip(jaxpr.invars, given, strict=True))

    def read(operand: Any) -> int | None:
        return None if hasattr(operand, "val") else known.get(operand)

    for equation in jaxpr.eqns:
        ins = [read(x) for x in equation.invars]
        outs: list[int | None] = [None] * len(equation.outvars)
        if any(x is not None for x in ins):
            name, params = equation.primitive.name, equation.params
            inner = params.get("jaxpr", params.get("call_jaxpr"))
            if name in CALLS and inner is not None:
                outs = _additions(getattr(inner, "jaxpr", inner), ins)
            else:
                outs = [_addition(equation, ins)] * len(outs)
        known |= dict(zip(equation.outvars, outs, strict=True))
    return [read(x) for x in jaxpr.outvars]


def _addition(equation: Any, ins: Sequence[int | None]) -> int | None:
    """Returns the argument to which the result of an operation adds something; see `_additions`."""
    name = equation.primitive.name
    at = [number for number, value in enumerate(ins) if value is not None]
    keeps = name in ("broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze")
    adds = name in ("add", "add_any") or (name == "sub" and at == [0])
    old, new = equation.invars[at[0]].aval, equation.outvars[0].aval
    is_same = (old.shape, old.dtype) == (new.shape, new.dtype)
    return ins[at[0]] if len(at) == 1 and is_same and (keeps or adds) else _OTHER


def _adds_rows(op: Op) -> bool:
    """Returns whether each row is added at indices of this row: `bincount`, for example."""
    _, indices, updates = op.ins
    numbers = op.params["dimension_numbers"]
    if not isinstance(indices, Rows) or not isinstance(updates, Rows):
        return False
    dims = [d for d in range(len(op.shape(2))) if d not in numbers.update_window_dims]
    paired = indices.dim < len(dims) and dims[indices.dim] == updates.dim
    unbatched = not numbers.operand_batching_dims
    return paired and unbatched and indices.inner == updates.inner and not updates.positional


def _contracts_rows(op: Op) -> bool:
    """Returns whether a product adds up products of a row with the same row: `x.T @ y`."""
    (left, right), _ = op.params["dimension_numbers"]
    a, b = op.ins
    if not isinstance(a, Rows) or not isinstance(b, Rows) or a.positional or b.positional:
        return False
    return (a.dim, b.dim) in zip(left, right, strict=True) and a.inner == b.inner


def _rounds(equation: Any) -> bool:
    """Returns whether a conversion rounds numbers to integers, or to booleans."""
    old, new = (x[0].aval.dtype for x in (equation.invars, equation.outvars))
    to_integers = jnp.issubdtype(old, jnp.inexact) and not jnp.issubdtype(new, jnp.inexact)
    return bool(to_integers or jnp.issubdtype(new, jnp.bool_))


def _is_constant(value: Value) -> bool:
    return value is FIXED or (isinstance(value, Mixed) and value.power is not None)

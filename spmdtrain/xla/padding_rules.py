"""Effects of single operations on the rows of a batch.

A rule maps an operation with classified operands to the classes of its results.
"""

import math
from collections.abc import Callable
from typing import Any

import jax

from spmdtrain.xla.traces import FIXED, Op, Rows, Value

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

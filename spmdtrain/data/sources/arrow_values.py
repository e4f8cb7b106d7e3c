"""Columns of Arrow as NumPy arrays and Python values, and the checks of their rows."""

import itertools
from typing import Any

import numpy as np

PyArrow = Any  # the module `pyarrow`, which is imported on first use
Values = np.ndarray | list[Any]


def fixed_shape(pa: PyArrow, kind: Any) -> tuple[int, ...] | None:
    """Returns the shape of a value of an Arrow type of numbers; None for any other type.

    A value is a number, a boolean, or lists of a fixed number of these.
    """
    types = pa.types
    if types.is_fixed_size_list(kind):
        inner = fixed_shape(pa, kind.value_type)
        return None if inner is None else (kind.list_size, *inner)
    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
        return ()
    return None


def as_numbers(pa: PyArrow, array: Any) -> np.ndarray | None:
    """Returns an Arrow array of numbers as NumPy's, of shape (n, ...), without a copy if possible.

    None if a value is null, or the values are not numbers of a fixed shape.
    """
    if (shape := fixed_shape(pa, array.type)) is None:
        return None
    count = len(array)
    while pa.types.is_fixed_size_list(array.type):
        if array.null_count:
            return None
        size = array.type.list_size
        array = array.values.slice(array.offset * size, len(array) * size)
    if array.null_count:
        return None
    return array.to_numpy(zero_copy_only=False).reshape(count, *shape)


def python_values(pa: PyArrow, array: Any) -> Values:
    """Returns the n values of an Arrow array without nulls.

    Numbers and times are NumPy's, lists of numbers are arrays, text is `str`, binary values are
    `bytes`, other lists are lists, structs are dictionaries. Lists of lists of numbers are arrays
    if they have one shape, else lists, which no batch can hold.

    Raises:
      UnicodeDecodeError: If text is not UTF-8.
    """
    kind, types = array.type, pa.types
    if types.is_dictionary(kind):
        array = array.dictionary_decode()
        kind = array.type
    if isinstance(kind, pa.FixedShapeTensorType) and not array.storage.flatten().null_count:
        return np.asarray(array.to_numpy_ndarray())
    if (numbers := as_numbers(pa, array)) is not None:
        return numbers
    if types.is_temporal(kind) and not types.is_time(kind) and not types.is_interval(kind):
        return array.to_numpy(zero_copy_only=False)
    if types.is_fixed_size_list(kind):
        array = array.cast(pa.list_(kind.value_type))
        kind = array.type
    if types.is_list(kind) or types.is_large_list(kind):
        ends = array.offsets.to_numpy()
        inner = python_values(pa, array.values.slice(ends[0], ends[-1] - ends[0]))
        ends = ends - ends[0]
        lists = [inner[i:j] for i, j in itertools.pairwise(ends)]
        if isinstance(inner, np.ndarray) and inner.dtype == object:
            return [list(each) for each in lists]
        return lists if isinstance(inner, np.ndarray) else [_stacked(each) for each in lists]
    if types.is_struct(kind):
        names = [field.name for field in kind]
        columns = [python_values(pa, column) for column in array.flatten()]
        if not names:
            return [{} for _ in range(len(array))]
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
    if types.is_string(kind) or types.is_large_string(kind):
        try:
            return array.to_numpy(zero_copy_only=False)
        except pa.ArrowException:  # to_pylist raises UnicodeDecodeError
            pass
    return array.to_pylist()


def _stacked(values: Any) -> Any:
    """Returns arrays of numbers of one shape as one array, others as lists."""
    if not values or not all(isinstance(x, np.ndarray) and x.dtype != object for x in values):
        return values
    if len({x.shape for x in values}) == 1:
        return np.stack(values)
    return [x.tolist() for x in values]  # a list of arrays would be several fields


def has_null(pa: PyArrow, array: Any) -> bool:
    """Returns whether a value of an Arrow array is null, or contains a null."""
    kind, types = array.type, pa.types
    if array.null_count:
        return True
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return has_null(pa, array.flatten())  # of the slice alone
    if types.is_struct(kind):
        return any(has_null(pa, column) for column in array.flatten())
    if types.is_dictionary(kind):
        return has_null(pa, array.dictionary_decode())
    return types.is_null(kind) and len(array) > 0

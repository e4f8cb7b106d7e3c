"""Tables of pandas, Polars, Arrow and Hugging Face as arrays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spmdtrain.errors import UserError
from spmdtrain.optional import import_extra

_REMOVE = {
    "pandas": "data.drop(columns={})",
    "polars": "data.drop({})",
    "pyarrow": "data.drop_columns({})",
    "datasets": "data.remove_columns({})",
}
"""Code that removes columns, by library."""


def pandas_columns(frame: Any) -> dict[str, np.ndarray]:
    """Returns the columns of a pandas DataFrame as arrays of numbers.

    Args:
      frame: The DataFrame. A cell of a column of objects may be an array or a list; then all have
        one shape.

    Raises:
      UserError: If columns share a name, or do not hold numbers.
    """
    if not frame.columns.is_unique:
        names = frame.columns[frame.columns.duplicated()]
        raise UserError(
            f"several columns of a pandas.DataFrame are named {names[0]!r}: rename them"
        )
    columns = {str(name): _pandas_values(frame[name]) for name in frame.columns}
    return _checked(columns, "pandas", "pandas.DataFrame")


def _pandas_values(series: Any) -> np.ndarray | str:
    """Returns the values of a pandas Series, or why they are not numbers."""
    if series.dtype.kind in "biufc" and isinstance(series.dtype, np.dtype):
        return series.to_numpy()
    if missing := int(series.isna().sum()):
        return f"{series.dtype}, {missing} missing"
    if series.dtype.kind in "biuf":  # a nullable dtype without missing values
        return series.to_numpy(dtype=np.dtype(str(series.dtype.numpy_dtype)))
    if series.dtype.kind == "O" and len(series) and not isinstance(series.iloc[0], str):
        return _cells(series.tolist())
    return str(series.dtype)


def _cells(values: Sequence[Any]) -> np.ndarray | str:
    """Returns arrays or lists of numbers as one array, or why they are not of one shape."""
    try:
        found = np.stack([np.asarray(value) for value in values])
    except ValueError:
        return "values of different shapes"
    return found if found.dtype.kind in "biufc" else type(values[0]).__name__


def arrow_columns(
    table: Any, library: str = "pyarrow", name: str = "pyarrow.Table"
) -> dict[str, np.ndarray]:
    """Returns the columns of an Arrow table as arrays of numbers, without a copy if possible.

    Args:
      table: A table or record batch. Lists of numbers are arrays; all have one length.
      library: The library of the data, for messages.
      name: The class of the data, for messages.

    Raises:
      UserError: If columns share a name, or do not hold numbers.
    """
    pa = import_extra("pyarrow", "parquet", "Arrow tables")
    names = table.schema.names
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"several columns of a {name} are named {duplicates[0]!r}: rename them")
    columns = {each: _arrow_values(pa, table.column(each)) for each in names}
    return _checked(columns, library, name)


def _arrow_values(pa: Any, column: Any) -> np.ndarray | str:
    """Returns the values of an Arrow column (n, ...), or why they are not numbers."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if isinstance(column.type, pa.BaseExtensionType):
        values = _arrow_values(pa, column.storage)
        is_tensor = isinstance(column.type, pa.FixedShapeTensorType)
        if is_tensor and not isinstance(values, str):
            values = np.asarray(column.to_numpy_ndarray())
        return values
    kind, types = column.type, pa.types
    if column.null_count:
        return f"{kind}, {column.null_count} null"
    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
        return column.to_numpy(zero_copy_only=False)
    if types.is_fixed_size_list(kind) or types.is_list(kind) or types.is_large_list(kind):
        inner = _arrow_values(pa, column.flatten())
        if isinstance(inner, str):
            return f"list of {inner}"
        if types.is_fixed_size_list(kind):
            length = kind.list_size
        else:
            lengths = np.diff(column.offsets.to_numpy())
            length = int(lengths[0]) if len(lengths) else 0
            if (lengths != length).any():
                return f"lists of {lengths.min()} to {lengths.max()} values"
        return inner.reshape(len(column), length, *inner.shape[1:])
    return str(kind)


def _kind(dtype: np.dtype) -> str:
    return {"U": "text", "S": "bytes"}.get(dtype.kind, str(dtype))


def _checked(
    columns: Mapping[str, np.ndarray | str], library: str, name: str
) -> dict[str, np.ndarray]:
    """Returns the columns, if all are arrays; raises `UserError` that names all that are not."""
    reasons = {key: values for key, values in columns.items() if isinstance(values, str)}
    if reasons:
        shown = ", ".join(f"{key!r} ({reason})" for key, reason in reasons.items())
        raise UserError(
            f"columns of a {name} are not numbers of one shape: {shown}. Leave them out, "
            f"{_REMOVE[library].format(list(reasons))}; train on text by Packed(Tokenized(source, "
            "tokenizer, field=NAME), length)"
        )
    return {key: values for key, values in columns.items() if not isinstance(values, str)}


@dataclass(frozen=True)
class HuggingFaceDataset:
    """A map-style dataset of Hugging Face, with the columns of its format.

    Without a format, or with one of a table, columns of numbers keep their dtype. If there are
    others, such as images, Hugging Face decodes them as its format "numpy" does.

    Attributes:
      data: The `datasets.Dataset`.
    """

    data: Any

    def __post_init__(self) -> None:
        form = self.data.format
        if form["type"] not in (None, "arrow", "pandas", "polars"):
            return
        names, schema = form["columns"], self.data.features.arrow_schema
        plain = all(_is_numeric(schema.field(name).type) for name in names)
        chosen = self.data.with_format("arrow" if plain else "numpy", columns=names)
        object.__setattr__(self, "data", chosen)

    def __len__(self) -> int:
        return len(self.data)

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        found = self.data[indices.tolist()]
        if self.data.format["type"] == "arrow":
            return arrow_columns(found, "datasets", "datasets.Dataset")
        columns: dict[str, np.ndarray | str] = {}
        for name, values in found.items():
            array = np.asarray(values) if not isinstance(values, list) else None
            if array is None or array.dtype.kind == "O":
                columns[name] = _cells(values)
            else:
                columns[name] = array if array.dtype.kind in "biufcV" else _kind(array.dtype)
        return _checked(columns, "datasets", "datasets.Dataset")

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, if one column holds labels."""
        labels = [x for x in self.data.features.values() if type(x).__name__ == "ClassLabel"]
        return tuple(labels[0].names) if len(labels) == 1 else ()


def _is_numeric(kind: Any) -> bool:
    """Returns whether values of an Arrow type are numbers or lists of numbers."""
    pa = import_extra("pyarrow", "huggingface", "Hugging Face datasets")
    while isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    while hasattr(kind, "value_type"):
        kind = kind.value_type
    types = pa.types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))

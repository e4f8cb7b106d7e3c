"""Tables of pandas, Polars, Arrow and Hugging Face as arrays."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from spmdtrain.errors import UserError
from spmdtrain.optional import import_extra

PyTree = Any

_REMOVE = {
    "pandas": "data.drop(columns={})",
    "polars": "data.drop({})",
    "pyarrow": "data.drop_columns({})",
    "datasets": "data.remove_columns({})",
}
"""Code that removes columns, by library."""


def pandas_columns(frame: Any) -> dict[str, np.ndarray]:
    """Returns the columns of a pandas DataFrame as arrays of numbers.

    A cell of a column of objects may be an array or a list; then all have one shape.

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
) -> dict[str, Any]:
    """Returns the columns of an Arrow table as arrays of numbers, without a copy if possible.

    Lists of numbers are arrays; all have one length. Structs are dictionaries. For messages,
    `library` is the library of the data, and `name` their class.

    Raises:
      UserError: If columns share a name, or do not hold numbers.
    """
    pa = import_extra("pyarrow", "parquet", "Arrow tables")
    names = table.schema.names
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"several columns of a {name} are named {duplicates[0]!r}: rename them")
    columns = {each: _arrow_values(pa, table.column(each)) for each in names}
    return _checked(columns, library, name)


def _arrow_values(pa: Any, column: Any) -> PyTree:
    """Returns the values of an Arrow column: an array (n, ...), a pytree of them, or a text.

    The text says why they are not numbers of one shape.
    """
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if isinstance(column.type, pa.BaseExtensionType):
        values: Any = _arrow_values(pa, column.storage)
        is_tensor = isinstance(column.type, pa.FixedShapeTensorType)
        if is_tensor and not isinstance(values, str):
            values = np.asarray(column.to_numpy_ndarray())
        return values
    kind, types = column.type, pa.types
    if column.null_count:
        return f"{kind}, {column.null_count} null"
    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
        return column.to_numpy(zero_copy_only=False)
    if types.is_struct(kind) and len(kind):
        parts = [_arrow_values(pa, part) for part in column.flatten()]
        named = {field.name: part for field, part in zip(kind, parts, strict=True)}
        return next((f"{n}: {x}" for n, x in named.items() if isinstance(x, str)), named)
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
        split = jax.tree.map(lambda x: x.reshape(len(column), length, *x.shape[1:]), inner)
        if isinstance(inner, np.ndarray):
            return split
        return [jax.tree.map(lambda x, n=n: x[:, n], split) for n in range(length)]
    return str(kind)


def _kind(dtype: np.dtype) -> str:
    return {"U": "text", "S": "bytes"}.get(dtype.kind, str(dtype))


def _checked(columns: Mapping[str, Any], library: str, name: str) -> dict[str, Any]:
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


_TABLES = (None, "arrow", "pandas", "polars")
"""Formats of Hugging Face in which columns of numbers keep the dtypes of the features."""


@dataclass(frozen=True)
class HuggingFaceDataset:
    """A map-style dataset of Hugging Face, with the columns of its format.

    Without a format, or with one of a table, columns of numbers keep their dtypes. Others, such as
    images, are decoded as Hugging Face's format "numpy" does.
    """

    data: Any

    def __len__(self) -> int:
        return len(self.data)

    @functools.cached_property
    def _parts(self) -> Sequence[Any]:
        """The dataset for columns of numbers, and the one for others, if both exist."""
        form = self.data.format
        if form["type"] not in _TABLES:
            return [self.data]
        schema = self.data.features.arrow_schema
        plain = [name for name in form["columns"] if _is_numeric(schema.field(name).type)]
        others = [name for name in form["columns"] if name not in plain]
        formats = {"arrow": plain, "numpy": others}
        return [self.data.with_format(kind, columns=x) for kind, x in formats.items() if x]

    def rows(self, indices: np.ndarray) -> dict[str, Any]:
        columns: dict[str, Any] = {}
        for part in self._parts:
            found = part[indices.tolist()]
            if part.format["type"] == "arrow":
                columns |= arrow_columns(found, "datasets", "datasets.Dataset")
                continue
            for name, values in found.items():
                array = np.asarray(values) if not isinstance(values, list) else None
                if array is None or array.dtype.kind == "O":
                    columns[name] = _cells(values)
                else:
                    columns[name] = array if array.dtype.kind in "biufcV" else _kind(array.dtype)
        names = [name for name in self.data.format["columns"] if name in columns]
        ordered = {name: columns[name] for name in names or columns}
        return _checked(ordered, "datasets", "datasets.Dataset")

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, if one column holds labels."""
        labels = [x for x in self.data.features.values() if type(x).__name__ == "ClassLabel"]
        return tuple(labels[0].names) if len(labels) == 1 else ()


@dataclass(frozen=True)
class HuggingFaceStream:
    """An `IterableDataset` of Hugging Face, with the values of `HuggingFaceDataset`.

    If its format was one of a table, `data` is without a format.
    """

    data: Any
    is_formatted: bool

    @classmethod
    def from_data(cls, data: Any) -> "HuggingFaceStream":
        """Returns the stream of an `IterableDataset`."""
        formatting = getattr(data, "_formatting", None)
        is_formatted = formatting is not None and formatting.format_type not in _TABLES
        is_table = formatting is not None and not is_formatted
        return cls(data.with_format(None) if is_table else data, is_formatted)

    def __iter__(self) -> Iterator[Any]:
        if self.is_formatted:
            # By batches of one, because the formats give single numbers other dtypes.
            for batch in self.data.iter(batch_size=1):
                yield {name: values[0] for name, values in batch.items()}
            return
        schema = self.data.features and self.data.features.arrow_schema
        for example in self.data:
            if schema is None:
                yield example
            else:
                kinds = {name: schema.field(name).type for name in example}
                yield {name: _typed(kinds[name], value) for name, value in example.items()}

    def set_epoch(self, epoch: int) -> None:
        self.data.set_epoch(epoch)

    def state_dict(self) -> Any:
        return self.data.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.data.load_state_dict(state)


def _typed(kind: Any, value: Any) -> Any:
    """Returns a value of Hugging Face with the dtypes of its Arrow type; others as they are."""
    pa = import_extra("pyarrow", "huggingface", "Hugging Face datasets")
    kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    if pa.types.is_struct(kind) and isinstance(value, dict):
        kinds = {field.name: field.type for field in kind}
        return {n: _typed(kinds[n], x) if n in kinds else x for n, x in value.items()}
    inner = kind
    while hasattr(inner, "value_type"):
        inner = inner.value_type
    if pa.types.is_struct(inner) and isinstance(value, list):
        return [_typed(kind.value_type, x) for x in value]
    if not _is_numeric(inner):
        return value
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths, which the reader of examples refuses
        return value
    is_number = array.dtype.kind in "biuf"  # not of objects, such as None
    return array.astype(inner.to_pandas_dtype())[()] if is_number else value


def _is_numeric(kind: Any) -> bool:
    """Returns whether values of an Arrow type are numbers, or lists or structs of numbers."""
    pa = import_extra("pyarrow", "huggingface", "Hugging Face datasets")
    while isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    while hasattr(kind, "value_type"):
        kind = kind.value_type
    types = pa.types
    if types.is_struct(kind):
        return all(_is_numeric(field.type) for field in kind)
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))

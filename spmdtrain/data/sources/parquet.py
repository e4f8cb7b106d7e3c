"""Rows of Parquet files by index, as NumPy arrays and Python values."""

import hashlib
import itertools
import operator
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import numpy as np

from spmdtrain.data.examples import ExampleReader
from spmdtrain.data.sources.files import (
    CACHED_BLOCKS,
    BlockCache,
    Files,
    SourceFile,
    delayed_progress,
    find_files,
)
from spmdtrain.errors import BadRecordError, UserError, did_you_mean, import_extra, printable
from spmdtrain.record.storage import failures, in_short, is_url

# -- Columns of Arrow as NumPy arrays and Python values, and the checks of their rows --------------

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


# -- Rows of Parquet files by index, decoded one row group at a time -------------------------------

_FOOTER_THREADS = 16
# Arrow's errors; ArrowInvalid and others are ValueErrors.
_DECODING_ERRORS = (ValueError, KeyError, IndexError, TypeError, NotImplementedError)
_AGREE = (
    "the files of a source must agree. Write them with one schema, or choose common columns, "
    "ParquetSource(files, columns=[...])"
)

Column = Any
"""A column of a row group: its values, or an Arrow array if one of them is null or not UTF-8."""


@dataclass(frozen=True)
class _Footer:
    """The schema of a file, and the number of rows of each of its row groups."""

    schema: Any
    rows: list[int]


class ParquetSource:
    """The rows of Parquet files as examples: dictionaries of the columns' values.

    Numbers are NumPy scalars, lists of numbers are arrays, text is `str`, binary values are
    `bytes`, structs are dictionaries. If all columns hold numbers, or lists of numbers of one
    length, the source is also a dataset: `rows` reads batches of arrays.

    Only the footers of the files are read at the start. Row groups are decoded when one of their
    rows is read, and the last ones are kept. The source may be used by several threads.

    Args:
      files: A file, a folder, a pattern such as `s3://bucket/data/*.parquet`, or a list of these.
      columns: Names of the columns to read. The default is all.
      cached_row_groups: Number of decoded row groups to keep in memory; `Packed` keeps as many as
        its windows need. Fewer than 8 are too few for a shuffled order, which mixes the rows of 8
        row groups.

    Attributes:
      files: The files, in the order of their rows.
      columns: The names of the columns.
      blocks: int64 (m+1,), the rows at which the row groups begin, and the number of rows.

    Raises:
      UserError: If there are no such files, one is not a Parquet file, their columns differ, or
        there is no row or no such column.
      StorageError: If a file cannot be read.
    """

    thread_safe = True

    def __init__(
        self,
        files: Files,
        columns: Sequence[str] | None = None,
        *,
        cached_row_groups: int = CACHED_BLOCKS,
    ) -> None:
        named = columns is None or (
            isinstance(columns, Sequence)
            and not isinstance(columns, str)
            and len(columns) > 0
            and all(isinstance(name, str) for name in columns)
        )
        if not named:
            raise UserError(f"columns is {columns!r}: it must be a list of names, or None for all")
        if not isinstance(cached_row_groups, int) or cached_row_groups < 1:
            raise UserError(f"cached_row_groups is {cached_row_groups!r}: it must be at least 1")
        import_extra("pyarrow.parquet", "parquet", "Parquet files")
        self.files = find_files(files, (".parquet", ".pq"), "Parquet files")
        footers = _read_footers(self.files)
        self.columns = _checked_columns(self.files, footers, columns)
        # Empty row groups hold no row, and are not counted.
        rows = [(f, g, n) for f, x in enumerate(footers) for g, n in enumerate(x.rows) if n]
        if not rows:
            raise UserError(f"{self.files[0]}: {_and_others(self.files)} no rows")
        table = np.array(rows, np.int64)
        self._groups = table[:, :2]  # the file and the number of the row group in it
        self.blocks = np.concatenate([[0], np.cumsum(table[:, 2])])
        self._is_remote = any(is_url(file.path) for file in self.files)
        self._footers = BlockCache[Any](cached_row_groups)
        self._cache = BlockCache[dict[str, Column]](cached_row_groups)

    def __len__(self) -> int:
        return int(self.blocks[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([operator.index(index)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Returns several rows by their numbers, which are read by row group.

        Raises:
          BadRecordError: If a value is null or not UTF-8, or a row group is corrupted.
          UserError: If a file has changed.
          StorageError: If a file cannot be read.
        """
        pa = _pyarrow()
        examples: list[Any] = [None] * len(indices)
        for group, places, rows in self._by_group(np.asarray(indices, np.int64)):
            columns = self._columns(group)
            values = [self._values(pa, group, name, columns[name], rows) for name in self.columns]
            for place, row in zip(places.tolist(), zip(*values, strict=True), strict=True):
                examples[place] = dict(zip(self.columns, row, strict=True))
        return examples

    def _getitems(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Returns several rows. `grain.MapDataset.source` reads them by this name."""
        return self.__getitems__(indices)

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns rows as arrays of leading dim n, if all columns hold numbers.

        Args:
          indices: int64 (n,), their numbers.

        Returns:
          The columns by name. Booleans and numbers keep their dtypes.

        Raises:
          UserError: If a column holds anything else or lists of different lengths, a value is null,
            a row group is corrupted, or a file has changed.
          StorageError: If a file cannot be read.
        """
        pa = _pyarrow()
        numbers = np.asarray(indices, np.int64)
        batch: dict[str, np.ndarray] = {}
        for group, places, rows in self._by_group(numbers):
            columns = self._columns(group)
            for name in self.columns:
                values = self._values(pa, group, name, columns[name], rows)
                if not isinstance(values, np.ndarray) or values.dtype.kind not in "biuf":
                    # Lists of numbers; anything else is refused with what to write.
                    examples = self.__getitems__(numbers.tolist())
                    stack = ExampleReader(type(self).__name__).stack
                    return cast("dict[str, np.ndarray]", stack(examples, numbers.tolist()))
                if name not in batch:
                    batch[name] = np.empty((len(numbers), *values.shape[1:]), values.dtype)
                batch[name][places] = values
        return batch

    def fingerprint(self) -> str:
        """Returns a hash of the files' names, sizes and versions, and of the columns."""
        files = [(file.path, file.size, file.version) for file in self.files]
        return hashlib.sha256(repr((files, self.columns)).encode()).hexdigest()

    def describe(self, index: int) -> str:
        """Returns the name of an example for messages: its file and its number in it.

        Args:
          index: The number of the example.
        """
        group = int(np.searchsorted(self.blocks, index, side="right")) - 1
        return self._row(group, index - int(self.blocks[group]))

    def reserve_blocks(self, count: int) -> None:
        """Keeps at least this number of decoded row groups in memory.

        Args:
          count: Number of row groups.
        """
        self._cache.reserve(count)

    def _by_group(self, indices: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yields row groups with the places in `indices` and the rows in the group that they hold.

        `IndexError` if an index is out of range.
        """
        if len(indices) and not (indices.min() >= 0 and indices.max() < len(self)):
            raise IndexError(f"rows {indices.min()} to {indices.max()} of {len(self)}")
        groups = np.searchsorted(self.blocks, indices, side="right") - 1
        places = np.argsort(groups, kind="stable")
        ends = np.flatnonzero(np.diff(groups[places])) + 1
        if self._is_remote:  # from a local disk, threads read no faster and take more memory
            self._cache.prefetch(np.unique(groups).tolist(), self._decode)
        for part in np.split(places, ends) if len(indices) else []:
            group = int(groups[part[0]])
            yield group, part, indices[part] - self.blocks[group]

    def _columns(self, group: int) -> dict[str, Column]:
        """Returns the columns of a row group of a file that has not changed."""
        columns = self._cache.get(group, self._decode)
        if not is_url(self._file(group).path):  # an object was compared after it was read
            self._file(group).check_unchanged()
        return columns

    def _decode(self, group: int) -> dict[str, Column]:
        """Reads the columns of a row group."""
        pa = _pyarrow()
        file, number = self._file(group), int(self._groups[group, 1])
        expected = int(self.blocks[group + 1] - self.blocks[group])
        with closing(file.open()) as content:
            try:
                footer = self._footers.get(
                    int(self._groups[group, 0]), lambda _: pa.parquet.read_metadata(content)
                )
                parquet = pa.parquet.ParquetFile(
                    content, metadata=footer, pre_buffer=is_url(file.path)
                )
                table = parquet.read_row_group(number, list(self.columns))
                columns = {name: _one_chunk(table[name]) for name in self.columns}
                if table.num_rows != expected:
                    raise pa.ArrowInvalid(f"{table.num_rows} rows instead of {expected}")
            except (*_DECODING_ERRORS, MemoryError, failures(file.path)) as error:
                file.check_unchanged()
                _raise_unreadable(file, error, f": row group {number}")
        if is_url(file.path):
            file.check_unchanged()
        return {name: _values_or_array(pa, column) for name, column in columns.items()}

    def _file(self, group: int) -> SourceFile:
        return self.files[self._groups[group, 0]]

    def _row(self, group: int, row: int) -> str:
        """Returns the file of a row of a row group, and the row's number in the file, as text."""
        first = np.searchsorted(self._groups[:, 0], self._groups[group, 0])  # row group of the file
        number = self.blocks[group] - self.blocks[first] + row
        return f"{self._file(group)}: row {number}"

    def _values(self, pa: Any, group: int, name: str, column: Column, rows: np.ndarray) -> Values:
        if isinstance(column, np.ndarray):
            return column[rows]
        if isinstance(column, list):
            return [column[row] for row in rows.tolist()]
        taken = column.take(pa.array(rows))
        if (values := _values_or_array(pa, taken)) is not taken:
            return values
        for position, row in enumerate(rows.tolist()):
            one = taken.slice(position, 1)
            where = f"{self._row(group, row)}: column {printable(name)!r}"
            if has_null(pa, one):
                raise BadRecordError(
                    f"{where} is null, or holds a null: fill or remove such rows, or choose other "
                    "columns"
                )
            try:
                python_values(pa, one)
            except UnicodeDecodeError as error:
                raise BadRecordError(f"{where} is text, but not UTF-8: {error}") from error
        raise AssertionError("each row can be read, but all of them together cannot")


def _one_chunk(column: Any) -> Any:
    """Returns a chunked array as one Arrow array, without a copy if it has one chunk."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _values_or_array(pa: Any, array: Any) -> Column:
    """Returns the values of an Arrow array, or the array if one is null or not UTF-8."""
    if has_null(pa, array):
        return array
    try:
        return python_values(pa, array)
    except UnicodeDecodeError:
        return array


def _read_footers(files: Sequence[SourceFile]) -> list[_Footer]:
    with (
        delayed_progress("reading footers", len(files)) as advance,
        ThreadPoolExecutor(_FOOTER_THREADS, thread_name_prefix="footers") as pool,
    ):
        footers = []
        try:
            for footer in pool.map(_read_footer, files):
                footers.append(footer)
                advance(len(footers))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return footers


def _read_footer(file: SourceFile) -> _Footer:
    pa = _pyarrow()
    with closing(file.open()) as content:
        try:
            footer = pa.parquet.read_metadata(content)
            groups = range(footer.num_row_groups)
            rows = [footer.row_group(number).num_rows for number in groups]
            return _Footer(footer.schema.to_arrow_schema(), rows)
        except (*_DECODING_ERRORS, MemoryError, failures(file.path)) as error:
            _raise_unreadable(file, error)


def _raise_unreadable(file: SourceFile, error: Exception, where: str = "") -> NoReturn:
    """Raises the error for a failure of storage, or for corrupted content."""
    if isinstance(error, MemoryError):
        raise UserError(
            f"{file}{where}: not enough memory to decode it: write smaller row groups, or lower "
            "cached_row_groups"
        ) from error
    # Arrow raises an OSError without a number if content is corrupted, and gcsfs if access fails.
    is_arrows = type(error) is OSError and error.errno is None and "Forbidden" not in str(error)
    if not is_arrows and not isinstance(error, _DECODING_ERRORS):
        file.fail(error)
    raise (BadRecordError if where else UserError)(
        f"{file}{where}: cannot be decoded: {in_short(error)}. The file is truncated, corrupted "
        "or not a Parquet file: write it again, or leave it out"
    ) from error


def _checked_columns(
    files: Sequence[SourceFile], footers: Sequence[_Footer], columns: Sequence[str] | None
) -> tuple[str, ...]:
    """Returns the columns to read, which must be the same in all files."""
    first = footers[0].schema
    names = list(first.names if columns is None else columns)
    for names_of, what in ((names, "columns"), (first.names, str(files[0]))):
        if repeated := sorted({n for n in names_of if names_of.count(n) > 1}):
            raise UserError(f"{what}: the name {printable(repeated[0])!r} occurs twice")
    if not names:
        raise UserError(f"{files[0]}: the file has no columns")
    for file, footer in zip(files, footers, strict=True):
        schema = footer.schema
        for name in names:
            shown = printable(name)
            if name not in schema.names:
                if columns is None:
                    raise UserError(
                        f"{file}: has no column {shown!r}, but {files[0]} has: {_AGREE}"
                    )
                raise UserError(
                    f"{file}: there is no column {shown!r}.{did_you_mean(name, schema.names)}"
                )
            here, there = schema.field(name).type, first.field(name).type
            if here != there:
                raise UserError(
                    f"{file}: column {shown!r} is {here}, but {there} in {files[0]}: {_AGREE}"
                )
        more = [name for name in schema.names if name not in names]
        if columns is None and more:
            raise UserError(
                f"{file}: has a column {printable(more[0])!r}, which {files[0]} lacks: {_AGREE}"
            )
    return tuple(names)


def _and_others(files: Sequence[SourceFile]) -> str:
    return "the file holds" if len(files) == 1 else f"this file and {len(files) - 1} others hold"


def _pyarrow() -> Any:
    """Returns the module `pyarrow`, with `pyarrow.parquet` imported."""
    import_extra("pyarrow.parquet", "parquet", "Parquet files")
    return import_extra("pyarrow", "parquet", "Parquet files")

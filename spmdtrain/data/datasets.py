"""Datasets: random access to examples by index, also of tables and other libraries."""

import functools
import os
import sys
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from spmdtrain.data.examples import (
    BATCHED,
    BatchedDataset,
    ExampleReader,
    IndexableDataset,
    holds_numbers,
)
from spmdtrain.data.sources.files import SourceFile, find_files
from spmdtrain.errors import UserError, foreign, import_extra
from spmdtrain.tree import is_key, named_leaves

# -- Datasets: random access to examples by index --------------------------------------------------

PyTree = Any


@runtime_checkable
class Dataset(Protocol):
    """Examples by index: any object with these two methods.

    It may also have `blocks`, int64 (m+1,), ascending from 0 to its length: the examples at which
    the blocks begin that are read together, such as the row groups of a file. Shuffling then keeps
    the examples of a block close together.

    `thread_safe = True` says that several threads may call `rows` at a time, and that a call takes
    long enough to be worth it: `data_threads="auto"` then reads batches ahead.
    """

    def __len__(self) -> int:
        """Returns the number of examples, at least 1."""
        ...

    def rows(self, indices: np.ndarray) -> PyTree:
        """Returns examples.

        Args:
          indices: int64 (n,), their indices.

        Returns:
          A pytree of arrays of leading dim n. They are copied, so the next call may overwrite them,
          unless `data_threads` is set.
        """
        ...


class ArrayDataset:
    """A pytree of arrays in memory, or of files that are mapped into it.

    Args:
      arrays: Arrays of numbers, all with the examples along the leading dim.

    Raises:
      UserError: If an array does not hold numbers, or the arrays differ in their leading dim.
    """

    def __init__(self, arrays: PyTree) -> None:
        for name, leaf in named_leaves(arrays).items():
            if isinstance(leaf, np.ma.MaskedArray):
                raise UserError(
                    f"array {name!r} of a dataset is a masked array, and JAX has no masks: fill it "
                    "(x.filled(0)), and give weights of 0 for the values that are missing"
                )
            if isinstance(leaf, jax.Array) and is_key(leaf):
                raise UserError(
                    f"array {name!r} of a dataset holds random keys: give "
                    "jax.random.key_data(keys), and call jax.random.wrap_key_data in the objective"
                )
        self._files = [file for leaf in jax.tree.leaves(arrays) for file in _mapped_file(leaf)]
        self.arrays = jax.tree.map(np.asarray, arrays)
        for name, leaf in named_leaves(self.arrays).items():
            if not holds_numbers(leaf.dtype):
                raise UserError(f"array {name!r} of a dataset holds {leaf.dtype}, not numbers")
        shapes = {name: leaf.shape for name, leaf in named_leaves(self.arrays).items()}
        if not shapes or any(not shape for shape in shapes.values()):
            raise UserError(
                f"a dataset needs arrays with a leading dim of examples: {foreign(shapes, 300)}"
            )
        lengths = {shape[0] for shape in shapes.values()}
        if len(lengths) > 1:
            each = foreign(shapes, 300)
            raise UserError(f"the arrays of a dataset differ in their number of examples: {each}")
        (self._length,) = lengths
        self._leaves: list[np.ndarray]
        self._structure: Any
        self._leaves, self._structure = jax.tree.flatten(self.arrays)

    def __len__(self) -> int:
        return self._length

    def rows(self, indices: np.ndarray) -> PyTree:
        self._check_files()  # to read what a file has lost would end the process
        # For long rows `take` is faster, but it copies the whole of an array with other strides.
        rows = [
            x.take(indices, axis=0)
            if x.ndim > 1 and x.flags.c_contiguous and x.flags.aligned
            else x[indices]
            for x in self._leaves
        ]
        # JAX refuses the other byte order, of a file mapped into memory for example.
        native = [x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("=")) for x in rows]
        self._check_files()
        return self._structure.unflatten(native)

    def _check_files(self) -> None:
        for file in self._files:
            file.check_unchanged()


def own_rows(dataset: Dataset, indices: np.ndarray) -> PyTree:
    """Returns rows in new containers and arrays.

    A dataset may return the same ones in each call. But functions of the user change rows in place,
    several batches are kept at a time, and batches on CPU devices share memory with the rows.
    """
    rows = dataset.rows(indices)
    if type(dataset) is ArrayDataset:  # makes new arrays, as a subclass need not
        return rows
    return jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, rows)


def _mapped_file(array: Any) -> tuple[SourceFile, ...]:
    """Returns the file of an array that is mapped into memory, unless this process writes to it."""
    if not isinstance(array, np.memmap) or array.mode not in ("r", "c"):
        return ()
    name = array.filename
    return find_files(name, (), "arrays") if name and os.path.exists(name) else ()


@dataclass(frozen=True)
class Subset:
    """Some examples of a dataset, in the order of their indices.

    Attributes:
      dataset: A dataset, or arrays.
      indices: Integers (n,), the indices of the examples in `dataset`.

    Raises:
      UserError: If the indices are not integers in one dim, or are out of range.
    """

    dataset: Any
    indices: np.ndarray

    def __post_init__(self) -> None:
        object.__setattr__(self, "dataset", as_dataset(self.dataset, sparse=True))
        indices, length = np.asarray(self.indices), len(self.dataset)
        if indices.ndim != 1 or indices.dtype.kind not in "iu":
            raise UserError(
                f"the indices of a Subset are {indices.dtype}{list(indices.shape)}: they must be "
                "integers in one dim"
            )
        if indices.size and not (indices.min() >= 0 and indices.max() < length):
            raise UserError(
                f"the indices of a Subset go from {indices.min()} to {indices.max()}: the dataset "
                f"has 0 to {length - 1}"
            )

    def __len__(self) -> int:
        return len(self.indices)

    def rows(self, indices: np.ndarray) -> PyTree:
        return self.dataset.rows(np.asarray(self.indices)[indices])

    @property
    def blocks(self) -> np.ndarray | None:
        """The first example of each block, int64 (m + 1,); None if the indices do not ascend."""
        blocks, indices = blocks_of(self.dataset), np.asarray(self.indices)
        if blocks is None or (indices[1:] < indices[:-1]).any():
            return None
        return np.searchsorted(indices, blocks).astype(np.int64)


@dataclass(frozen=True)
class MappedDataset:
    """A dataset with a function applied to the rows that are read.

    Attributes:
      dataset: A dataset, or arrays.
      function: Maps a pytree of rows, of leading dim n, to another pytree of n rows.
    """

    dataset: Any
    function: Callable[[PyTree], PyTree]

    def __post_init__(self) -> None:
        object.__setattr__(self, "dataset", as_dataset(self.dataset))

    def __len__(self) -> int:
        return len(self.dataset)

    def rows(self, indices: np.ndarray) -> PyTree:
        rows = own_rows(self.dataset, indices)
        try:
            return self.function(rows)
        except Exception as error:
            first, more = ", ".join(map(str, indices[:8])), len(indices) - 8
            which = first + (f" and {more} more" if more > 0 else "")
            error.add_note(f"in the function of a MappedDataset, for the examples {which}")
            raise

    @property
    def blocks(self) -> np.ndarray | None:
        """The blocks of the dataset."""
        return blocks_of(self.dataset)


def batched_of(dataset: Any) -> BatchedDataset | None:
    """Returns the data that were given as batches, also in a `MappedDataset`; None for others."""
    while isinstance(dataset, MappedDataset):
        dataset = dataset.dataset
    return dataset if isinstance(dataset, BatchedDataset) else None


def is_in_memory(dataset: Any) -> bool:
    """Returns whether a dataset only copies rows of arrays in memory."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return type(dataset) is ArrayDataset  # a subclass may read its rows from elsewhere


def as_dataset(data: Any, what: str = "the dataset", *, sparse: bool = False) -> Dataset:
    """Converts data to a dataset.

    Args:
      data: A dataset; arrays (one, a tuple or a dictionary of them); a list of records; a table of
        pandas, Polars, Arrow or Hugging Face; or a source of single examples, which has `__len__`
        and `__getitem__(int)`, such as a `grain.MapDataset`.
      what: The name of `data` in error messages.
      sparse: Whether examples of a `grain.MapDataset` may be missing, because they are not read.

    Raises:
      UserError: If `data` is anything else, or empty.
    """
    data = from_library(data, sparse=sparse)
    if isinstance(data, Dataset):
        dataset: Dataset = data
    elif isinstance(data, (tuple, dict, np.ndarray, jax.Array)):
        dataset = ArrayDataset(data)
    elif isinstance(data, list) and data:
        dataset = _of_list(data)
    elif isinstance(data, str):
        raise UserError(f"a str is not a dataset: {data!r}. Give what it names, such as the arrays")
    elif hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        dataset = IndexableDataset(data)
    else:
        is_stream = isinstance(data, Iterable) or hasattr(data, "make_shard")
        why = f": {NO_STREAM}" if is_stream else ""
        raise UserError(
            f"a {type(data).__name__} is not a dataset{why}. Give arrays, or an object with "
            "__len__ and rows(indices)"
        )
    if len(dataset) < 1:
        raise UserError(f"{what} is empty: it needs at least one example")
    return dataset


def _of_list(records: list[Any]) -> ArrayDataset:
    """Stacks a list of records or numbers."""
    if isinstance(records[0], (list, np.ndarray, jax.Array)):
        raise UserError(
            "a list of arrays is not a dataset, because it could mean several examples or several "
            "arrays: give np.stack(data) if each is an example, tuple(data) if each holds all "
            "examples of a field"
        )
    reader = ExampleReader("list")
    dtypes = reader.dtypes(records[0], 0)
    if isinstance(records[0], tuple) and _may_be_batch(records[0]):
        raise UserError(
            "a list of tuples of arrays of one length is not a dataset, because each could be an "
            "example or a batch: give tuple(map(np.stack, zip(*data))) if each is an example, "
            "tuple(map(np.concatenate, zip(*data))) if each is a batch"
        )
    return ArrayDataset(reader.stack(records, range(len(records)), dtypes))


def _may_be_batch(record: tuple[Any, ...]) -> bool:
    """Returns whether a tuple could be a batch of Keras: arrays of one number of rows, above 1."""
    shapes = [np.shape(x) if isinstance(x, (np.ndarray, jax.Array)) else () for x in record]
    lengths = {shape[0] if shape else 1 for shape in shapes}
    return len(record) > 1 and len(lengths) == 1 and lengths != {1}


def blocks_of(data: Any) -> np.ndarray | None:
    """Returns where the blocks begin that are read together; None if there are none.

    They are int64 (m+1,), from 0 to the number of examples; `UserError` if `blocks` of `data` is
    anything else.
    """
    if (blocks := getattr(data, "blocks", None)) is None:
        return None
    blocks, size = np.asarray(blocks), len(data)
    ascending = blocks.ndim == 1 and blocks.dtype.kind in "iu" and blocks.size > 1
    if not ascending or blocks[0] != 0 or blocks[-1] != size or (blocks[1:] < blocks[:-1]).any():
        shown = f"{blocks.dtype}{list(blocks.shape)}: {np.array2string(blocks, threshold=6)}"
        raise UserError(
            f"the blocks of a {type(data).__name__} are {shown}: they must be integers that ascend "
            f"from 0 to its {size} examples"
        )
    return blocks.astype(np.int64)


def fingerprint(dataset: Dataset) -> dict[str, Any]:
    """Returns what identifies a dataset: its length, shapes, dtypes and a CRC-32 of 16 rows.

    Class names are included if the dataset has any, and so are a CRC-32 of its blocks and of the
    bad records that are left out, the libraries that decode images beside Pillow, and the
    components and weights of a mixture, which determine the order of the examples. The dictionary
    can be stored as JSON.
    """
    rows = dataset.rows(np.unique(np.linspace(0, len(dataset) - 1, 16).astype(np.int64)))
    classes, blocks = classes_of(dataset), blocks_of(dataset)
    given: dict[str, Any] = {"classes": list(classes)} if classes else {}
    if blocks is not None:
        given["blocks"] = f"{len(blocks) - 1} (crc32 {zlib.crc32(blocks.tobytes())})"
    if skipped := skipped_of(dataset):
        given["skipped"] = f"{len(skipped)} (crc32 {zlib.crc32(' '.join(skipped).encode())})"
    if decoders := {getattr(each, "decoders", "") for each in sources_within(dataset)} - {""}:
        given["decoders"] = ", ".join(sorted(decoders))
    inner: Any = dataset
    while isinstance(inner, MappedDataset):
        inner = inner.dataset
    if parts := getattr(inner, "parts_fingerprint", None):  # a mixture
        given |= parts()
    return given | {
        "examples": len(dataset),
        **fingerprint_of_rows(rows),
    }


def fingerprint_of_rows(rows: PyTree) -> dict[str, Any]:
    """Returns shapes, dtypes and a CRC-32 of examples, as a step computes with them.

    Without `jax_enable_x64`, the same numbers in 64 and in 32 bits are the same data. The
    dictionary can be stored as JSON.
    """
    arrays, crc = {}, 0
    for name, leaf in named_leaves(rows).items():
        array = np.asarray(leaf)
        if array.dtype.kind in "iufc":
            with np.errstate(over="ignore"):
                array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
        arrays[name] = f"{array.dtype}{list(array.shape[1:])}"
        crc = zlib.crc32(array.tobytes(), crc)
    return {"arrays": arrays, "crc32": crc}


_WITHIN = ("dataset", "source", "documents", "_source")
"""Attributes of spmdtrain's and Grain's classes that hold what a dataset or source reads from."""


def sources_within(data: Any) -> Iterator[Any]:
    """Yields a dataset or source, and all those that it reads from, as far as they are known.

    For an object of another library than spmdtrain or Grain nothing is yielded.
    """
    if not any(name.startswith(("spmdtrain.", "grain.")) for name in known_as(data)):
        return
    yield data
    for each in _within(data):
        yield from sources_within(each)


def _within(data: Any) -> list[Any]:
    """Returns what an object of spmdtrain or Grain reads from."""
    inner = [getattr(data, name, None) for name in _WITHIN]
    components: Mapping[str, Any] = getattr(data, "components", {})
    every = (*inner, *getattr(data, "parents", ()), *components.values())
    return [each for each in every if each is not None]


def is_thread_safe(data: Any) -> bool:
    """Returns whether a dataset or source says that several threads may read it at a time.

    It says so by an attribute `thread_safe`. Without one, spmdtrain's and Grain's classes are as
    safe as all that they read from. Functions that map examples are functions of them alone.
    """
    if (declared := getattr(data, "thread_safe", None)) is not None:
        return declared is True
    known = any(name.startswith(("spmdtrain.", "grain.")) for name in known_as(data))
    within = _within(data) if known else []
    return bool(within) and all(map(is_thread_safe, within))


def skipped_of(dataset: Any) -> list[str]:
    """Returns the numbers or files of the bad records that sources of a dataset leave out."""
    return [str(x) for each in sources_within(dataset) for x in getattr(each, "skipped", ())]


def classes_of(dataset: Any) -> Sequence[str]:
    """Returns the class names of a dataset, or of the dataset in a `Subset` or `MappedDataset`."""
    while isinstance(dataset, (Subset, MappedDataset)):
        dataset = dataset.dataset
    classes = getattr(dataset, "classes", ())
    named = isinstance(classes, (tuple, list)) and all(isinstance(name, str) for name in classes)
    return classes if named else ()


# -- Data of other libraries: what can be a dataset, and why anything else cannot ------------------

_STREAMS = {
    "webdataset.WebDataset": (  # before its base, torch.IterableDataset
        "Read its tar files by index: spmdtrain.WebDatasetSource(files, fields)"
    ),
    "grain.IterDataset": "Give the MapDataset from before .to_iter_dataset()",
    "grain.DatasetIterator": "Give the MapDataset that it iterates over",
    "grain.DataLoader": (
        "Give its source, with its operations as transformations: "
        "grain.MapDataset.source(source).map(function)"
    ),
    "datasets.IterableDataset": "Load it without streaming=True",
    "torch.IterableDataset": "Give a map-style dataset, with __getitem__ and __len__",
    "torch.DataLoader": "Give its dataset, loader.dataset",
    "tensorflow.DatasetV2": (
        "Read its files by an indexed format: docs/data.md names one for each kind of data"
    ),
}
NO_STREAM = (
    "a stream has no number of examples, so it is training data only; evaluate on a list of its "
    "first examples, list(itertools.islice(stream, 1000))"
)


def known_as(data: Any) -> frozenset[str]:
    """Returns an object's classes and bases as `library.Class`, such as `pandas.DataFrame`.

    They identify objects of a library without importing it.
    """
    classes = type(data).__mro__
    return frozenset(f"{c.__module__.partition('.')[0]}.{c.__name__}" for c in classes)


def stream_advice(data: Any) -> tuple[str, str] | None:
    """Returns the name of a known stream, and the dataset to give instead; None for other data."""
    names = known_as(data)
    name = next((name for name in _STREAMS if name in names), None)
    return None if name is None else (name, _STREAMS[name])


def from_library(data: Any, *, sparse: bool = False) -> Any:
    """Converts a table, and checks a collection, of a library that spmdtrain knows.

    A table becomes a dictionary of arrays or a dataset; other data are returned as they are. If
    `sparse`, examples of a `grain.MapDataset` may be missing.

    Raises:
      UserError: If `data` cannot be a dataset; says what to give instead.
    """
    names = known_as(data)
    if advice := stream_advice(data):
        name, instead = advice
        raise UserError(f"a {name} is not a dataset: {NO_STREAM}. {instead}")
    if splits := sorted(names & {"datasets.DatasetDict", "datasets.IterableDatasetDict"}):
        raise UserError(
            f"a {splits[0]} is not a dataset: it holds several splits: give one, data[name] with "
            f"name in {sorted(data)}"
        )
    if "grain.MapDataset" in names:
        _check_map_dataset(data, sparse)
    return _table(data, names)


def _table(data: Any, names: frozenset[str]) -> Any:
    """Returns the arrays or the dataset of a table; any other object as it is."""
    if "pandas.DataFrame" in names:
        return pandas_columns(data)
    if "polars.LazyFrame" in names:
        raise UserError(
            "a polars.LazyFrame is not a dataset: it has no rows yet: give data.collect()"
        )
    if "polars.DataFrame" in names:
        return arrow_columns(data.to_arrow(), "polars", "polars.DataFrame")
    if names & {"pandas.Series", "polars.Series"}:
        frame = data.to_frame(data.name or "values")
        return next(iter(_table(frame, known_as(frame)).values()))
    if names & {"pyarrow.Table", "pyarrow.RecordBatch"}:
        return arrow_columns(data)
    if names & BATCHED and not isinstance(data, BatchedDataset):
        return BatchedDataset(data)
    return HuggingFaceDataset(data) if "datasets.Dataset" in names else data


def _check_map_dataset(data: Any, sparse: bool) -> None:
    """Checks that a `grain.MapDataset` has a length, and that its elements are single examples."""
    if len(data) >= sys.maxsize:
        raise UserError(
            "a grain.MapDataset that repeats without end has no epochs: leave .repeat() out; "
            "`epochs` or `steps` of the run give its length"
        )
    check_unbatched(data, "grain.MapDataset", "grain.MapDataset.source(data)")
    removes = {"grain.FilterMapDataset": ".filter()", "grain.FlatMapMapDataset": ".flat_map()"}
    for name, call in removes.items():
        if not sparse and _transformation(data, name) is not None:
            raise UserError(
                f"a grain.MapDataset with {call} has a length that also counts removed examples: "
                "select those that are left, Subset(data, np.array([i for i in range(len(data)) if "
                "data[i] is not None]))"
            )


def check_unbatched(data: Any, name: str, instead: str) -> None:
    """Raises `UserError` if a Grain pipeline has a `batch` without a later `flat_map`.

    For the message, `name` is its kind, and `instead` says what to give if batches are meant to be
    the examples.
    """
    until = ("grain.FlatMapMapDataset", "grain.FlatMapIterDataset")
    for batch in ("grain.BatchMapDataset", "grain.BatchIterDataset", "grain.RebatchIterDataset"):
        if (batches := _transformation(data, batch, until)) is not None:
            raise UserError(
                f"a {name} with .batch() has batches as its examples ({batches}): leave .batch() "
                "out; global_batch_size of the run gives their size. If each batch is meant to be "
                f"one example, give {instead}"
            )


def check_examples(iterable: Any) -> None:
    """Raises `UserError` if an iterable of a `Stream` is a `DataLoader` that makes batches.

    Batches of a `grain.IterDataset` may be meant to be the examples.
    """
    names = known_as(iterable)
    if "grain.DataLoader" in names:
        check_unbatched(
            getattr(iterable, "_dataset", None),
            "grain.DataLoader",
            "the grain.IterDataset of the batches in spmdtrain.Stream(make_shard)",
        )
    makes_batches = getattr(iterable, "batch_size", None) or getattr(
        iterable, "batch_sampler", None
    )
    if "torch.DataLoader" in names and makes_batches:
        raise UserError(
            f"a {type(iterable).__name__} of PyTorch has batches as its examples: give it "
            "batch_size=None; global_batch_size of the run gives their size"
        )


def inputs_of(dataset: Any) -> list[Any]:
    """Returns the datasets that a `grain.MapDataset` or `grain.IterDataset` reads.

    Interleaved datasets that are made lazily are left out.
    """
    # An InterleaveIterDataset, with which mp_prefetch begins, does not count them as its parents.
    interleaved = getattr(dataset, "_datasets", ())
    listed = interleaved if isinstance(interleaved, (list, tuple)) else ()
    return [*getattr(dataset, "parents", ()), *listed]


def _transformation(data: Any, name: str, until: Collection[str] = ()) -> Any:
    """Returns the first transformation of a class on the way to the sources; None without one."""
    names = known_as(data)
    if name in names:
        return data
    if names & {*until}:
        return None
    found = (_transformation(each, name, until) for each in inputs_of(data))
    return next((each for each in found if each is not None), None)


# -- Tables of pandas, Polars, Arrow and Hugging Face as arrays ------------------------------------

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

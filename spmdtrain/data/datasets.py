"""Datasets: random access to examples by index."""

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from spmdtrain.data.batched import BatchedDataset
from spmdtrain.data.examples import ExampleReader, holds_numbers
from spmdtrain.data.indexable import IndexableDataset
from spmdtrain.data.libraries import NO_STREAM, from_library, known_as
from spmdtrain.data.sources.files import SourceFile, find_files
from spmdtrain.errors import UserError, foreign
from spmdtrain.tree import is_key, named_leaves

PyTree = Any


@runtime_checkable
class Dataset(Protocol):
    """Examples by index: any object with these two methods.

    It may also have `blocks`, int64 (m+1,), ascending from 0 to its length: the examples at which
    the blocks begin that are read together, such as the row groups of a file. Shuffling then keeps
    the examples of a block close together.
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
        # NumPy indexes arrays of scalars faster; for longer rows `take` is faster.
        rows = [x[indices] if x.ndim == 1 else x.take(indices, axis=0) for x in self._leaves]
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
    bad records that are left out, and the components and weights of a mixture, which determine the
    order of the examples. The dictionary can be stored as JSON.
    """
    rows = dataset.rows(np.unique(np.linspace(0, len(dataset) - 1, 16).astype(np.int64)))
    classes, blocks = classes_of(dataset), blocks_of(dataset)
    given: dict[str, Any] = {"classes": list(classes)} if classes else {}
    if blocks is not None:
        given["blocks"] = f"{len(blocks) - 1} (crc32 {zlib.crc32(blocks.tobytes())})"
    if skipped := skipped_of(dataset):
        given["skipped"] = f"{len(skipped)} (crc32 {zlib.crc32(' '.join(skipped).encode())})"
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
    inner = [getattr(data, name, None) for name in _WITHIN]
    components: Mapping[str, Any] = getattr(data, "components", {})
    for each in (*inner, *getattr(data, "parents", ()), *components.values()):
        yield from sources_within(each)


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

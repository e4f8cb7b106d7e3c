"""Examples as rows: their values, and sources of single examples or of batches."""

import functools
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import jax
import numpy as np

from spmdtrain.data.sources.files import BlockCache
from spmdtrain.errors import BadRecordError, StorageError, UserError, foreign, is_library
from spmdtrain.tree import is_key, named_leaves, path_name

# -- Examples as rows: the values of a field in several examples become one array ------------------
#
# Lists, files, tables, pipelines and streams all read their examples here, so that a value is the
# same array, or refused by the same rule, whatever its source is.

PyTree = Any

_VALUES = (int, float, complex, str, bytes, np.generic)


def holds_numbers(dtype: np.dtype) -> bool:
    """Returns whether JAX has arrays of a dtype: not of objects, text, structures, long doubles.

    A dtype that JAX adds, such as bfloat16, is of kind V.
    """
    longest = 16 if dtype.kind == "c" else 8  # bytes
    return dtype.kind in "biufcV" and dtype.names is None and dtype.itemsize <= longest


@dataclass(frozen=True)
class ExampleReader:
    """Stacks the examples of a source to rows.

    An example is a pytree of numbers and arrays; a list of numbers is an array.

    Attributes:
      name: The class of the source, for messages.
      in_stream: Whether the source is a stream, which has other remedies.
      unit: What messages call an item of the source.
    """

    name: str
    in_stream: bool = False
    unit: str = "example"

    def stack(
        self,
        examples: Sequence[Any],
        numbers: Sequence[Any],
        dtypes: Sequence[np.dtype] | None = None,
    ) -> PyTree:
        """Stacks examples to rows: a pytree of arrays of leading dim n.

        Args:
          examples: At least one example.
          numbers: Their numbers, or other objects whose text says which ones they are.
          dtypes: The dtypes of the fields of the first example of the source. Without them the
            dtype of a batch would depend on its examples, and the dtype of a process's part of a
            batch on the number of processes: 1 and 2.5 are of one field.

        Raises:
          UserError: If an example is None or has other fields than the first one, a field holds
            anything but numbers, or has different shapes, or `dtypes` would change a value.
        """
        rows = self._stacked(examples, numbers)
        if dtypes is None or leaf_dtypes(rows) == dtypes:
            return rows
        return self._converted(rows, dtypes, examples, numbers)

    def dtypes(self, example: Any, number: Any) -> list[np.dtype]:
        """Returns the dtypes of the fields of an example."""
        return leaf_dtypes(self._stacked([example], [number]))

    def _stacked(self, examples: Sequence[Any], numbers: Sequence[Any]) -> PyTree:
        first = examples[0]
        if (
            type(first) is dict
            and first
            and all(isinstance(x, (np.ndarray, *_VALUES)) for x in first.values())
        ):
            keys = first.keys()  # the common case, without a call of Python for each field
            if all(type(example) is dict and example.keys() == keys for example in examples):
                return {
                    key: self._column([example[key] for example in examples], str(key), numbers)
                    for key in keys
                }
        for number, example in zip(numbers, examples, strict=True):
            if example is None:
                raise UserError(f"{self.unit} {number} of a {self.name} is None{self._left_out}")
        structure: Any
        paths, structure = jax.tree_util.tree_flatten_with_path(first, is_leaf=_is_leaf)
        fields = [path_name(path) for path, _ in paths]
        columns: list[list[Any]] = [[] for _ in fields]
        for number, example in zip(numbers, examples, strict=True):
            leaves, other = jax.tree.flatten(example, is_leaf=_is_leaf)
            if other != structure:
                raise UserError(
                    f"{self.unit} {number} of a {self.name} has {_fields_of(example)}; example "
                    f"{numbers[0]} has {_fields_of(first)}: all examples must have the same fields"
                )
            for column, leaf in zip(columns, leaves, strict=True):
                column.append(leaf)
        if not fields:
            raise UserError(
                f"{self.unit} {numbers[0]} of a {self.name} holds no numbers: {first!r}"
            )
        pairs = zip(columns, fields, strict=True)
        return structure.unflatten(
            [self._column(column, field, numbers) for column, field in pairs]
        )

    def _converted(
        self,
        rows: PyTree,
        dtypes: Sequence[np.dtype],
        examples: Sequence[Any],
        numbers: Sequence[Any],
    ) -> PyTree:
        """Returns rows in other dtypes; raises `UserError` if that would change a value."""
        structure: Any
        named, structure = jax.tree_util.tree_flatten_with_path(rows)
        if len(named) != len(dtypes):
            return rows  # other fields than the first example, which the check of batches refuses
        for place, ((path, leaf), dtype) in enumerate(zip(named, dtypes, strict=True)):
            if np.can_cast(leaf.dtype, dtype):
                continue
            for number, example in zip(numbers, examples, strict=True):
                own = self.dtypes(example, number)[place]
                if not np.can_cast(own, dtype):
                    first = "the first example" if self.in_stream else "example 0"
                    raise UserError(
                        f"field {path_name(path)!r} of {self.unit} {number} of a {self.name} holds "
                        f"{own}, but {dtype} in {first}: a field needs one dtype. Write 1.0 "
                        f"instead of 1, or convert it {self._by_a_map}"
                    )
        leaves = [leaf.astype(dtype) for (_, leaf), dtype in zip(named, dtypes, strict=True)]
        return structure.unflatten(leaves)

    def _column(self, values: list[Any], field: str, numbers: Sequence[Any]) -> np.ndarray:
        """Returns the values of a field as one array (n, ...)."""
        try:
            if any(isinstance(value, np.ma.MaskedArray) for value in values):
                self._reject(values, field, numbers)
            if isinstance(values[0], (list, *_VALUES)):
                column = np.asarray(values)
            else:
                column = np.stack([np.asarray(value) for value in values])
        except (ValueError, OverflowError, TypeError):  # shapes that differ, or no arrays
            self._reject(values, field, numbers)
        if not holds_numbers(column.dtype):
            self._reject(values, field, numbers)
        return column

    def _reject(self, values: list[Any], field: str, numbers: Sequence[Any]) -> NoReturn:
        """Raises the error for values that cannot be stacked to an array of numbers."""
        what = f"field {field!r} of " if field else ""
        shapes = []
        for number, value in zip(numbers, values, strict=True):
            array = self._checked(value, field, f"{what}{self.unit} {number} of a {self.name}")
            shapes.append(array.shape)
        other = next((n for n, shape in enumerate(shapes) if shape != shapes[0]), 0)
        raise UserError(
            f"{what or 'the value of '}a {self.name} has the shape {shapes[0]} in example "
            f"{numbers[0]} and {shapes[other]} in example {numbers[other]}: {self._one_shape}"
        )

    def _checked(self, value: Any, field: str, which: str) -> np.ndarray:
        """Returns a value as an array; raises `UserError` if it does not hold numbers."""
        if value is None:
            raise UserError(f"{which} is None: examples must be numbers")
        if isinstance(value, np.ma.MaskedArray):
            raise UserError(
                f"{which} is a masked array, and JAX has no masks: fill it by a map function, and "
                "give weights of 0 for the values that are missing"
            )
        if isinstance(value, jax.Array) and is_key(value):
            raise UserError(
                f"{which} holds random keys: give jax.random.key_data(keys), and call "
                "jax.random.wrap_key_data in the objective"
            )
        leaf: Any = value
        while isinstance(leaf, list) and leaf:
            leaf = leaf[0]
        if isinstance(leaf, str):
            tokens = f"Packed(Tokenized(source, tokenizer{f', field={field!r}' if field else ''})"
            give = "Tokenize it in the pipeline" if self.in_stream else f"Give {tokens}, length)"
            raise UserError(
                f"{which} is text: a batch holds numbers. {give}, or leave it out {self._by_a_map}"
            )
        if isinstance(leaf, bytes):
            decode = self._by_a_map.replace("function)", "decode)")
            raise UserError(f"{which} is bytes: a batch holds numbers. Decode it {decode}")
        try:
            array = np.asarray(value)
        except ValueError:  # lists of different lengths
            raise UserError(
                f"{which} holds lists of different lengths: {self._one_shape}"
            ) from None
        except TypeError:
            raise UserError(f"{which} is a {type(value).__name__}, not numbers") from None
        if not holds_numbers(array.dtype):
            raise UserError(f"{which} holds {array.dtype}, not numbers: {foreign(value, 100)}")
        return array

    @property
    def _by_a_map(self) -> str:
        """How a field is changed, for messages."""
        if self.in_stream:
            return "by a map function of the pipeline"
        return "by a map function: grain.MapDataset.source(source).map(function)"

    @property
    def _one_shape(self) -> str:
        """What to do about different shapes, for messages."""
        pack = "" if self.in_stream else "Pack documents with Packed(source, length), or pad"
        return (
            f"the examples of a batch need one shape. {pack or 'Pad'} them "
            f"{'by a map function of the pipeline' if self.in_stream else 'by a map function'}"
        )

    @property
    def _left_out(self) -> str:
        """What to do about an example that is None, for messages."""
        if self.in_stream:
            return ": leave it out in the pipeline"
        return (
            ", as .filter() and .flat_map() of Grain mark a removed one: select those that are "
            "left, Subset(data, np.array([i for i in range(len(data)) if data[i] is not None]))"
        )


def array_or_value(value: Any) -> Any:
    """Returns a list of numbers as an array, and any other value as it is."""
    if not isinstance(value, list) or not isinstance(value[:1] and value[0], (int, float, list)):
        return value
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):  # lists of different lengths
        return value
    return array if array.dtype.kind in "biuf" else value


def leaf_dtypes(rows: PyTree) -> list[np.dtype]:
    """Returns the dtypes of the arrays of a pytree."""
    return [leaf.dtype for leaf in jax.tree.leaves(rows)]


def _is_leaf(x: Any) -> bool:
    """Returns whether a value is one field: None, or a list of numbers, which is an array."""
    while isinstance(x, list) and x:
        x = x[0]
    return x is None or isinstance(x, (list, *_VALUES))


def _fields_of(example: Any) -> str:
    named = jax.tree_util.tree_leaves_with_path(example, is_leaf=_is_leaf)
    names = [path_name(path) for path, _ in named]
    return f"the fields {', '.join(names)}" if any(names) else f"no fields ({type(example)})"


# -- Sources of single examples as datasets: examples are read by index and stacked ----------------


@dataclass(frozen=True)
class IndexableDataset:
    """A source of single examples, such as a `grain.MapDataset`, as a dataset.

    The source has `__len__` and `__getitem__(int)`. If it has `__getitems__(list of int)`, several
    examples are read by one call. An example is a pytree of numbers and arrays of fixed shapes; a
    list of numbers is an array.
    """

    source: Any

    def __len__(self) -> int:
        return len(self.source)

    def rows(self, indices: np.ndarray) -> PyTree:
        numbers = indices.tolist()
        return self._reader.stack(read_examples(self.source, numbers), numbers, self._dtypes)

    @property
    def _reader(self) -> ExampleReader:
        return ExampleReader(describe(self.source))

    @functools.cached_property
    def _dtypes(self) -> Any:
        """The dtypes of the fields of example 0; None if it cannot be read or is missing."""
        try:
            return self._reader.dtypes(read_examples(self.source, [0])[0], 0)
        except UserError:  # a `Subset` may leave it out
            return None

    @property
    def blocks(self) -> Any:
        """The source's blocks; None if it has none."""
        return getattr(_untransformed(self.source), "blocks", None)


# Transformations of Grain that keep the number of every example, and so its block.
_KEEPS_ORDER = {
    *("MapMapDataset", "MapWithIndexMapDataset", "RandomMapMapDataset"),
    "_WithSeedMapDataset",  # .seed()
}


def _untransformed(source: Any) -> Any:
    """Returns the source of a `grain.MapDataset` that keeps the numbers of the source's examples.

    Only that source has `blocks`. Without them, a batch would read from all row groups.
    """
    while type(source).__module__.startswith("grain."):
        if type(source).__name__ in _KEEPS_ORDER:
            (source,) = source.parents
        elif type(source).__name__ == "SourceMapDataset":
            source = source._source
        else:
            break
    return source


def describe(source: Any) -> str:
    """Returns the class of a source for messages, such as `grain MapMapDataset`."""
    library = type(source).__module__.partition(".")[0]
    name = type(source).__name__
    shown = library in ("grain", "datasets", "pandas", "polars", "pyarrow", "torch")
    return f"{library} {name}" if shown else name


def read_examples(source: Any, indices: Sequence[int]) -> Sequence[Any]:
    """Reads examples of a source in order of their indices, by one call if it has `__getitems__`.

    Raises:
      BadRecordError: If an example cannot be read; names its index, and the line of the user's code
        if it failed there.
      UserError: If the source raises one, or returns another number of examples.
      StorageError: If an example cannot be read because its storage fails.
    """
    # Grain's own sources have `_getitems` instead (SupportsBatchedReadRandomAccessDataSource).
    several = getattr(source, "__getitems__", None) or getattr(source, "_getitems", None)
    if several is not None:
        try:
            examples: Sequence[Any] = several(indices)
        except (UserError, StorageError, MemoryError):
            raise
        except Exception as error:
            _read_singly(source, indices)  # names the example, if one fails alone
            _fail(source, f"examples {min(indices)} to {max(indices)}", error)
        if len(examples) != len(indices):
            raise UserError(
                f"a {describe(source)} returned {len(examples)} examples for {len(indices)} indices"
            )
        return examples
    return _read_singly(source, indices)


def _read_singly(source: Any, indices: Sequence[int]) -> Sequence[Any]:
    examples, index = [], 0
    try:
        for index in indices:
            examples.append(source[index])
    except (UserError, StorageError, MemoryError):
        raise
    except Exception as error:
        _fail(source, f"example {index}", error)
    return examples


def _fail(source: Any, which: str, error: Exception) -> NoReturn:
    raise_with_place(f"{which} of a {describe(source)} cannot be read", error)


def raise_with_place(what: str, error: Exception) -> NoReturn:
    """Raises an error of the user's code again, with the place in the data.

    Raises:
      StorageError: If storage or a connection fails, so that another attempt can succeed.
      BadRecordError: Otherwise.
    """
    message = f"{what}: {cause_of(error)}"
    is_storage = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
    if is_storage and not _is_of_decoder(error):
        raise StorageError(message) from error
    raise BadRecordError(message) from error


def _is_of_decoder(error: Exception) -> bool:
    """Returns whether a decoder raised an error: errors of Pillow and gzip are `OSError`s, too."""
    if getattr(error, "errno", None) is not None:  # of the operating system
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    module = frames[-1].f_globals.get("__name__", "") if frames else ""
    return module.partition(".")[0] in ("PIL", "bz2", "gzip", "lzma", "_compression")


def decoded(function: Callable[[Any], Any] | None, record: Any, name: Callable[[], str]) -> Any:
    """Returns what the user's function makes of a record, or the record if there is no function.

    Raises `BadRecordError` with the name if it fails, but lets errors of storage and memory pass.
    """
    if function is None:
        return record
    try:
        return function(record)
    except (UserError, StorageError, MemoryError):
        raise
    except Exception as error:
        raise BadRecordError(f"{name()} cannot be decoded: {cause_of(error)}") from error


def cause_of(error: Exception) -> str:
    """Returns class and message of an error, and the line of the user's code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not is_library(frame.filename)]
    where = f" ({own[-1].filename}:{own[-1].lineno}, in {own[-1].name})" if own else ""
    text = f": {foreign(' '.join(str(error).split()), 500)}" if str(error) else ""
    return f"{type(error).__name__}{text}{where}"


# -- Data whose items are batches, as in Keras' `PyDataset`: their rows are the examples -----------

BATCHED = {"keras.PyDataset", "keras.Sequence", "tf_keras.Sequence", "tensorflow.Sequence"}
"""Classes whose items are batches, as `known_as` names them."""
_HOOKS = ("on_epoch_begin", "on_epoch_end")


@dataclass(frozen=True)
class BatchedDataset:
    """The rows of the batches of a `keras.utils.PyDataset` as a dataset.

    A batch is a tuple of up to three parts, a dictionary or an array. All batches but the last one
    have one number of rows, so that a row is found by its number.

    Raises:
      UserError: If it has no known number of batches, changes between epochs or between two reads,
        reads by workers of its own, or batches differ in their number of rows.
    """

    source: Any
    _cache: BlockCache[tuple[int, PyTree]] = field(default_factory=BlockCache, repr=False)

    def __post_init__(self) -> None:
        name = describe(self.source)
        if (hook := self._overridden_hook) is not None:
            raise UserError(
                f"a {name} has {hook}(), which changes its batches between epochs, and neither a "
                "resume nor another process can repeat that: leave it out, because the run "
                "shuffles the batches (shuffle=True), and draw changes of examples in augment"
            )
        workers = getattr(self.source, "_workers", 1)
        if workers > 1 or getattr(self.source, "_use_multiprocessing", False):
            raise UserError(
                f"a {name} has workers={workers} of Keras, which read nothing here: leave workers "
                f"and use_multiprocessing out, and give data_threads={workers} or data_workers"
            )
        first, again = (named_leaves(self._read(0)[1]) for _ in range(2))
        same = {part for part, x in again.items() if part in first and _equal(x, first[part])}
        if differing := [part for part in first if part not in same]:
            raise UserError(
                f"batch 0 of a {name} differs between two reads"
                f"{f' in {differing[0]}' if differing[0] else ''}: a batch must be the same "
                "whenever it is read. Draw changes of examples in augment, by its generator"
            )

    def __len__(self) -> int:
        return self._length

    def rows(self, indices: np.ndarray) -> PyTree:
        batches, within = np.divmod(np.asarray(indices), self.batch_size)
        order: list[np.ndarray] = []
        parts = []
        for number in np.unique(batches):
            chosen = np.flatnonzero(batches == number)
            rows = within[chosen]
            parts.append(jax.tree.map(lambda x, rows=rows: x[rows], self._batch(int(number))[1]))
            order.append(chosen)
        places = np.argsort(np.concatenate(order), kind="stable")
        try:
            return jax.tree.map(lambda *x: np.concatenate(x)[places], *parts)
        except ValueError:
            raise UserError(
                f"batches of a {describe(self.source)} have other fields or shapes than others: "
                "all must have the same, except for their number of rows"
            ) from None

    def describe(self, index: int) -> str:
        """Returns the batch and the row of an example."""
        batch, row = divmod(index, self.batch_size)
        return f"row {row} of batch {batch} of {describe(self.source)}"

    @functools.cached_property
    def batch_size(self) -> int:
        """The number of rows of each batch but the last one."""
        return self._read(0)[0]

    @functools.cached_property
    def _length(self) -> int:
        last = self._batches - 1
        return last * self.batch_size + self._batch(last)[0]

    @property
    def blocks(self) -> np.ndarray:
        """The first example of each batch, int64 (m + 1,)."""
        return np.append(np.arange(self._batches) * self.batch_size, len(self)).astype(np.int64)

    @functools.cached_property
    def _batches(self) -> int:
        try:
            # Sequence of Keras 2 has no num_batches.
            number = self.source.num_batches if hasattr(type(self.source), "num_batches") else None
            count = (
                len(self.source) if number is None and hasattr(self.source, "__len__") else number
            )
        except NotImplementedError:
            count = None
        if not isinstance(count, int) or count < 1:
            raise UserError(
                f"a {describe(self.source)} has the number of batches {count}: it needs at least "
                "one, and a __len__ that returns their number"
            )
        return count

    @property
    def _overridden_hook(self) -> str | None:
        """The name of a method for epochs that the class of the source defines, or None."""
        kind = type(self.source)
        base = next(c for c in kind.__mro__ if c.__name__ in ("PyDataset", "Sequence"))
        own = (x for x in _HOOKS if getattr(kind, x, None) is not getattr(base, x, None))
        return next(own, None)

    def _batch(self, number: int) -> tuple[int, PyTree]:
        """Returns the number of rows of a batch, and its arrays; they are cached."""
        return self._cache.get(number, self._checked)

    def _checked(self, number: int) -> tuple[int, PyTree]:
        found = self._read(number)
        if number and found[0] != self.batch_size:
            is_last = number == self._batches - 1
            if not is_last or found[0] > self.batch_size:
                self._refuse(number, found[0])
        return found

    def _refuse(self, number: int, rows: int) -> None:
        raise UserError(
            f"batch {number} of a {describe(self.source)} has {rows} rows, and batch 0 has "
            f"{self.batch_size}: all but the last one, which may have fewer, need one number. Give "
            "its examples as arrays: tuple(map(np.concatenate, zip(*data)))"
        )

    def _read(self, number: int) -> tuple[int, PyTree]:
        """Returns the number of rows of a batch, and its arrays, which are new."""
        (batch,) = read_examples(self.source, [number])
        if isinstance(batch, list):  # as in Keras
            batch = tuple(batch)
        while isinstance(batch, tuple) and batch and batch[-1] is None:  # no targets or weights
            batch = batch[:-1]
        name = describe(self.source)
        stacked = ExampleReader(name, unit="batch").stack([batch], [number])
        arrays = jax.tree.map(lambda x: x[0], stacked)
        shapes = {part: leaf.shape for part, leaf in named_leaves(arrays).items()}
        sizes = {shape[0] if shape else None for shape in shapes.values()}
        if len(sizes) != 1 or not isinstance(size := sizes.pop(), int) or not size:
            raise UserError(
                f"batch {number} of a {name} has the shapes {shapes}: its arrays need one number "
                "of rows, the examples of the batch"
            )
        return size, arrays


def _equal(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and one.tobytes() == other.tobytes()

"""Sources of single examples as datasets: examples are read by index and stacked."""

import functools
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import numpy as np

from spmdtrain.errors import BadRecordError, StorageError, UserError, foreign
from spmdtrain.tree import path_name
from spmdtrain.xla.source_files import is_library

PyTree = Any

_VALUES = (int, float, complex, str, bytes, np.generic)


def holds_numbers(dtype: np.dtype) -> bool:
    """Returns whether JAX has arrays of a dtype: not of objects, text, structures, long doubles.

    Args:
      dtype: The dtype; one that JAX adds, such as bfloat16, is of kind V.
    """
    longest = 16 if dtype.kind == "c" else 8  # bytes
    return dtype.kind in "biufcV" and dtype.names is None and dtype.itemsize <= longest


@dataclass(frozen=True)
class IndexableDataset:
    """A source of single examples, such as a `grain.MapDataset`, as a dataset.

    Attributes:
      source: An object with `__len__` and `__getitem__(int)`. If it has `__getitems__(list of
        int)`, several examples are read by one call. An example is a pytree of numbers and arrays
        of fixed shapes; a list of numbers is an array.
    """

    source: Any

    def __len__(self) -> int:
        return len(self.source)

    def rows(self, indices: np.ndarray) -> PyTree:
        numbers, name = indices.tolist(), describe(self.source)
        examples = read_examples(self.source, numbers)
        rows = stack(examples, numbers, name)
        if self._dtypes is None or _dtypes(rows) == self._dtypes:
            return rows
        return _converted(rows, self._dtypes, examples, numbers, name)

    @functools.cached_property
    def _dtypes(self) -> Any:
        """The dtypes of the fields of example 0; None if it cannot be read, or is not there."""
        try:
            return _dtypes(stack(read_examples(self.source, [0]), [0], describe(self.source)))
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
    """Returns the source of a `grain.MapDataset` whose examples have the same numbers there.

    `blocks` are an attribute of that source: without them, a batch would read from all row groups.
    """
    while type(source).__module__.startswith("grain."):
        if type(source).__name__ in _KEEPS_ORDER:
            (source,) = source.parents
        elif type(source).__name__ == "SourceMapDataset":
            source = source._source
        else:
            break
    return source


def _dtypes(rows: PyTree) -> list[np.dtype]:
    return [leaf.dtype for leaf in jax.tree.leaves(rows)]


def _converted(
    rows: PyTree,
    dtypes: Sequence[np.dtype],
    examples: Sequence[Any],
    numbers: Sequence[int],
    name: str,
) -> PyTree:
    """Returns rows in the dtypes of example 0.

    Without them the dtype of a batch would depend on which examples it has, and with several
    processes that of one part of a batch on the number of processes: 1 and 2.5 are of one field.

    Raises:
      UserError: If that would change a value.
    """
    structure: Any
    named, structure = jax.tree_util.tree_flatten_with_path(rows)
    if len(named) != len(dtypes):
        return rows  # other fields than example 0, which the check of batches refuses
    for place, ((path, leaf), dtype) in enumerate(zip(named, dtypes, strict=True)):
        if np.can_cast(leaf.dtype, dtype):
            continue
        for number, example in zip(numbers, examples, strict=True):
            own = _dtypes(stack([example], [number], name))[place]
            if not np.can_cast(own, dtype):
                raise UserError(
                    f"field {path_name(path)!r} of example {number} of a {name} holds {own}, but "
                    f"{dtype} in example 0: a field needs one dtype. Write 1.0 instead of 1, or "
                    "convert it by a map function: grain.MapDataset.source(source).map(function)"
                )
    leaves = [leaf.astype(dtype) for (_, leaf), dtype in zip(named, dtypes, strict=True)]
    return structure.unflatten(leaves)


def describe(source: Any) -> str:
    """Returns the class of a source for messages, such as `grain MapMapDataset`."""
    library = type(source).__module__.partition(".")[0]
    name = type(source).__name__
    shown = library in ("grain", "datasets", "pandas", "polars", "pyarrow", "torch")
    return f"{library} {name}" if shown else name


def read_examples(source: Any, indices: Sequence[int]) -> Sequence[Any]:
    """Reads examples of a source, by one call if it has `__getitems__`.

    Args:
      source: The source.
      indices: Their indices.

    Returns:
      The examples, in the order of `indices`.

    Raises:
      BadRecordError: If an example cannot be read; names its index, and the line of the user's code
        if it failed there.
      UserError: If the source raises one, or returns another number of examples.
      StorageError: If an example cannot be read because its storage fails.
    """  # noqa: DOC501 (some are raised by _fail)
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

    Args:
      what: What cannot be read.
      error: The error.

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
    """Returns whether a decoder raised an error: Pillow's and gzip's are `OSError`s, too."""
    if getattr(error, "errno", None) is not None:  # of the operating system
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    module = frames[-1].f_globals.get("__name__", "") if frames else ""
    return module.partition(".")[0] in ("PIL", "bz2", "gzip", "lzma", "_compression")


def cause_of(error: Exception) -> str:
    """Returns class and message of an error, and the line of the user's code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not is_library(frame.filename)]
    where = f" ({own[-1].filename}:{own[-1].lineno}, in {own[-1].name})" if own else ""
    text = f": {foreign(' '.join(str(error).split()), 500)}" if str(error) else ""
    return f"{type(error).__name__}{text}{where}"


# -- stacking --------------------------------------------------------------------------------------


def stack(examples: Sequence[Any], indices: Sequence[int], name: str) -> PyTree:
    """Stacks examples to rows.

    Args:
      examples: At least one pytree of numbers and arrays.
      indices: Their indices, for messages.
      name: The class of the source, for messages.

    Returns:
      A pytree of arrays, of leading dim n.

    Raises:
      UserError: If an example is None or has other fields than the first one, or a field holds text
        or bytes, or has different shapes.
    """
    first = examples[0]
    if (
        type(first) is dict
        and first
        and all(isinstance(x, (np.ndarray, *_VALUES)) for x in first.values())
    ):
        keys = first.keys()  # the common case, without a call of Python for each field
        if all(type(example) is dict and example.keys() == keys for example in examples):
            return {
                key: _column([example[key] for example in examples], str(key), indices, name)
                for key in keys
            }
    for index, example in zip(indices, examples, strict=True):
        if example is None:
            raise UserError(
                f"example {index} of a {name} is None, as .filter() and .flat_map() of Grain mark "
                "a removed one: select those that are left, Subset(data, np.array([i for i in "
                "range(len(data)) if data[i] is not None]))"
            )
    structure: Any
    paths, structure = jax.tree_util.tree_flatten_with_path(first, is_leaf=_is_leaf)
    fields = [path_name(path) for path, _ in paths]
    columns: list[list[Any]] = [[] for _ in fields]
    for index, example in zip(indices, examples, strict=True):
        leaves, other = jax.tree.flatten(example, is_leaf=_is_leaf)
        if other != structure:
            raise UserError(
                f"example {index} of a {name} has {_fields_of(example)}; example {indices[0]} has "
                f"{_fields_of(first)}: all examples must have the same fields"
            )
        for column, leaf in zip(columns, leaves, strict=True):
            column.append(leaf)
    if not fields:
        raise UserError(f"example {indices[0]} of a {name} holds no numbers: {first!r}")
    pairs = zip(columns, fields, strict=True)
    return structure.unflatten([_column(column, field, indices, name) for column, field in pairs])


def _is_leaf(x: Any) -> bool:
    """Returns whether a value is one field: None, or a list of numbers, which is an array."""
    while isinstance(x, list) and x:
        x = x[0]
    return x is None or isinstance(x, (list, *_VALUES))


def _fields_of(example: Any) -> str:
    named = jax.tree_util.tree_leaves_with_path(example, is_leaf=_is_leaf)
    names = [path_name(path) for path, _ in named]
    return f"the fields {', '.join(names)}" if any(names) else f"no fields ({type(example)})"


def _column(values: list[Any], field: str, indices: Sequence[int], name: str) -> np.ndarray:
    """Returns the values of a field as one array (n, ...)."""
    try:
        if any(isinstance(value, np.ma.MaskedArray) for value in values):
            _reject(values, field, indices, name)
        if isinstance(values[0], (list, *_VALUES)):
            column = np.asarray(values)
        else:
            column = np.stack([np.asarray(value) for value in values])
    except (ValueError, OverflowError):  # shapes that differ
        _reject(values, field, indices, name)
    if not holds_numbers(column.dtype):
        _reject(values, field, indices, name)
    return column


def _reject(values: list[Any], field: str, indices: Sequence[int], name: str) -> NoReturn:
    """Raises the error for values that cannot be stacked to an array of numbers."""
    what = f"field {field!r} of " if field else ""
    shapes: dict[int, tuple[int, ...]] = {}
    for index, value in zip(indices, values, strict=True):
        which = f"{what}example {index} of a {name}"
        if value is None:
            raise UserError(f"{which} is None: examples must be numbers")
        if isinstance(value, np.ma.MaskedArray):
            raise UserError(
                f"{which} is a masked array, and JAX has no masks: fill it by a map function, and "
                "give weights of 0 for the values that are missing"
            )
        leaf: Any = value
        while isinstance(leaf, list) and leaf:
            leaf = leaf[0]
        if isinstance(leaf, str):
            raise UserError(
                f"{which} is text: a batch holds numbers. Give Packed(Tokenized(source, tokenizer"
                f"{f', field={field!r}' if field else ''}), length), or leave it out by a map "
                "function: grain.MapDataset.source(source).map(function)"
            )
        if isinstance(leaf, bytes):
            raise UserError(
                f"{which} is bytes: a batch holds numbers. Decode it: "
                "grain.MapDataset.source(source).map(decode)"
            )
        try:
            array = np.asarray(value)
        except ValueError:  # lists of different lengths
            raise UserError(f"{which} holds lists of different lengths: {_SHAPES}") from None
        if not holds_numbers(array.dtype):
            raise UserError(f"{which} holds {array.dtype}, not numbers: {foreign(value, 100)}")
        shapes[index] = array.shape
    first = indices[0]
    other = next((index for index, shape in shapes.items() if shape != shapes[first]), first)
    raise UserError(
        f"{what or 'the value of '}a {name} has the shape {shapes[first]} in example {first} and "
        f"{shapes[other]} in example {other}: {_SHAPES}"
    )


_SHAPES = (
    "the examples of a batch need one shape. Pack documents with Packed(source, length), or pad "
    "them by a map function"
)

"""Sources of single examples as datasets: examples are read by index and stacked."""

import functools
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from spmdtrain.data.examples import ExampleReader
from spmdtrain.errors import BadRecordError, StorageError, UserError, foreign, is_library

PyTree = Any


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


def cause_of(error: Exception) -> str:
    """Returns class and message of an error, and the line of the user's code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not is_library(frame.filename)]
    where = f" ({own[-1].filename}:{own[-1].lineno}, in {own[-1].name})" if own else ""
    text = f": {foreign(' '.join(str(error).split()), 500)}" if str(error) else ""
    return f"{type(error).__name__}{text}{where}"

"""Sources without the records that cannot be read."""

import operator
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from spmdtrain.data.datasets import as_dataset, blocks_of
from spmdtrain.data.indexable import read_examples
from spmdtrain.data.libraries import from_library
from spmdtrain.data.progress import delayed_progress
from spmdtrain.distributed import process_group
from spmdtrain.errors import UserError

PyTree = Any

_BATCH = 1024  # records read at once


class SkipBadRecords:
    """A source without the records that are corrupted or cannot be decoded.

    All records are read once, at the start, in every process. So the examples of a batch do not
    depend on when and where a bad record is read, an evaluation counts every other record once, and
    a resume on other devices has the same batches. A failure of storage is not skipped.

    Args:
      source: An object with `__len__` and `__getitem__(int)`.
      max_bad_records: The largest number of bad records.

    Attributes:
      source: The source.
      skipped: int64 (n,), the numbers of the bad records in the source, ascending.

    Raises:
      UserError: If more records are bad, or no record is left.
      StorageError: If the storage of a record fails.
    """

    def __init__(self, source: Any, max_bad_records: int = 100) -> None:
        if not hasattr(source, "__getitem__") or not hasattr(source, "__len__"):
            raise UserError(
                f"SkipBadRecords needs an object with __len__ and __getitem__(int), not a "
                f"{type(source).__name__}"
            )
        if isinstance(max_bad_records, bool) or not isinstance(max_bad_records, int):
            raise UserError(f"max_bad_records is {max_bad_records!r}: it must be a number")
        from_library(source)  # refuses streams
        self.source = source
        reasons = _find_bad(source, max_bad_records)
        self.skipped = np.array(sorted(reasons), np.int64)
        # Record i of this source is record i + (number of offsets up to i) of the other one.
        self._offsets = self.skipped - np.arange(len(self.skipped))
        if not reasons:
            return
        first = reasons[int(self.skipped[0])]
        message = f"{len(reasons):,} of {len(source):,} records cannot be read; the first: {first}"
        if not len(self):
            raise UserError(f"{message}. None is left")
        if process_group.is_chief():
            print(f"bad_records: {message}. They are left out", file=sys.stderr, flush=True)

    def __len__(self) -> int:
        return len(self.source) - len(self.skipped)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([operator.index(index)])[0]

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        """Returns several records.

        Args:
          indices: Their numbers.
        """
        return read_examples(self.source, self._originals(np.asarray(indices, np.int64)).tolist())

    def rows(self, indices: np.ndarray) -> PyTree:
        return as_dataset(self.source).rows(self._originals(indices))

    @property
    def blocks(self) -> np.ndarray | None:
        """The first record of each block, int64 (m + 1,); None if the source has no blocks."""
        if (blocks := blocks_of(self.source)) is None:
            return None
        return blocks - np.searchsorted(self.skipped, blocks)

    @property
    def classes(self) -> Sequence[str]:
        """The names of the source's classes."""
        classes: Sequence[str] = getattr(self.source, "classes", ())
        return classes

    def reserve_blocks(self, count: int) -> None:
        """Lets the source keep at least this number of blocks in memory, if it can.

        Args:
          count: Number of blocks.
        """
        if hasattr(self.source, "reserve_blocks"):
            self.source.reserve_blocks(count)

    def fingerprint(self) -> str:
        """Returns the source's fingerprint, if it has one, and the numbers of the bad records."""
        known = self.source.fingerprint() if hasattr(self.source, "fingerprint") else ""
        return f"{known} without {self.skipped.tolist()}"

    def describe(self, index: int) -> str:
        """Returns the name of a record in the source, for messages.

        Args:
          index: Its number in this source.
        """
        original = int(self._originals(np.array([index]))[0])
        known = hasattr(self.source, "describe")
        return str(self.source.describe(original)) if known else f"record {original}"

    def _originals(self, indices: np.ndarray) -> np.ndarray:
        """Returns the numbers of records in the source."""
        if len(indices) and not (indices.min() >= 0 and indices.max() < len(self)):
            raise IndexError(f"records {indices.min()} to {indices.max()} of {len(self)}")
        return indices + np.searchsorted(self._offsets, indices, side="right")


def _find_bad(source: Any, limit: int) -> dict[int, str]:
    """Returns the bad records, with the message of each."""
    bad: dict[int, str] = {}
    with delayed_progress("checking records", len(source)) as advance:
        for start in range(0, len(source), _BATCH):
            indices = range(start, min(start + _BATCH, len(source)))
            try:
                read_examples(source, list(indices))
            except UserError:
                for index in indices:
                    try:
                        read_examples(source, [index])
                    except UserError as error:
                        bad[index] = str(error)
                    if len(bad) > limit:
                        raise UserError(
                            f"over {limit} records of a {type(source).__name__} cannot be read, "
                            f"the limit max_bad_records; the first: {next(iter(bad.values()))}"
                        ) from None
            advance(indices.stop)
    return bad

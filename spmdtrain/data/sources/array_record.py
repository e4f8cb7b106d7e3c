"""Records of ArrayRecord files by index."""

import hashlib
import operator
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import numpy as np

from spmdtrain.data.examples import decoded
from spmdtrain.data.sources.files import Files, SourceFile, find_files, listed
from spmdtrain.errors import BadRecordError, UserError, import_extra, printable
from spmdtrain.record.storage import in_short, is_url

_OPENING_THREADS = 16
_READ_ERRORS = (RuntimeError, ValueError, OSError)  # of array_record


class ArrayRecordSource:
    """The records of ArrayRecord files as examples.

    Reads with `grain.sources.ArrayRecordDataSource`, and adds patterns, the decoding, and errors
    that name file and record. Grain's own returns empty bytes for the records that a file has lost
    since it was opened. The source may be used by several threads.

    Args:
      files: Local files: one, a folder, a pattern such as `data/*.array_record`, or a list of
        these.
      decode: Bytes of a record -> example. Without it, examples are `bytes`.

    Attributes:
      files: The files, in the order of their records.

    Raises:
      UserError: If there are no such files, one is not an ArrayRecord file or is truncated, or
        there is no record.
      StorageError: If a file cannot be read.
    """

    thread_safe = True

    def __init__(self, files: Files, decode: Callable[[bytes], Any] | None = None) -> None:
        if decode is not None and not callable(decode):
            raise UserError(f"decode is {decode!r}: it must be a function of the bytes of a record")
        import_extra("array_record", "arrayrecord", "ArrayRecord files")
        if remote := next((path for path in listed(files) if is_url(str(path))), None):
            raise UserError(
                f"{printable(remote)}: ArrayRecord files are read from local folders: mount the "
                "bucket, or copy the files"
            )
        self.files = find_files(files, (".array_record", ".arrayrecord"), "ArrayRecord files")
        self._function = decode
        with ThreadPoolExecutor(_OPENING_THREADS, thread_name_prefix="indices") as pool:
            counts = list(pool.map(_number_of_records, self.files))
        self._ends = np.cumsum(counts, dtype=np.int64)
        if not len(self):
            raise UserError(f"{self.files[0]}: the ArrayRecord files hold no records")
        # With the numbers of records in brackets, Grain does not read the files again.
        parts = [f"{x.path}[0:{count}]" for x, count in zip(self.files, counts, strict=True)]
        self._source = _grain_source(parts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([operator.index(index)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Returns several records by their numbers, decoded.

        Raises:
          BadRecordError: If a record is corrupted or cannot be decoded.
          UserError: If a file has changed.
          StorageError: If a file cannot be read.
          IndexError: If an index is out of range.
        """
        if len(indices) and not (min(indices) >= 0 and max(indices) < len(self)):
            raise IndexError(f"records {min(indices)} to {max(indices)} of {len(self)}")
        contents = self._read(indices)
        return [
            self._example(content, index) for index, content in zip(indices, contents, strict=True)
        ]

    _getitems = __getitems__  # Grain's protocol, by which a MapDataset reads several examples

    def fingerprint(self) -> str:
        """Returns a hash of the files' names, sizes and versions."""
        files = [(file.path, file.size, file.version) for file in self.files]
        return hashlib.sha256(repr(files).encode()).hexdigest()

    def describe(self, index: int) -> str:
        """Returns the file of a record, and its number in it, for messages.

        Args:
          index: Its number in the source.
        """
        file, record = self._file_of(index)
        return f"{file}: record {record}"

    def _example(self, content: bytes, index: int) -> Any:
        """Returns a record, decoded."""
        size = len(content)
        return decoded(self._function, content, lambda: f"{self.describe(index)} ({size} bytes)")

    def _file_of(self, index: int) -> tuple[SourceFile, int]:
        """Returns the file of a record, and its number in it."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        return self.files[number], index - int(self._ends[number - 1] if number else 0)

    def _read(self, indices: Sequence[int]) -> list[bytes]:
        """Returns the bytes of records."""
        # One by one: `__getitems__` of array_record starts threads in every call, which takes
        # longer than to read a batch from the system's file cache.
        contents = [self._read_one(index) for index in indices]
        for file in np.unique(np.searchsorted(self._ends, indices, side="right")).tolist():
            self.files[file].check_unchanged()
        return contents

    def _read_one(self, index: int) -> bytes:
        try:
            content: bytes = self._source[index]
            return content
        except _READ_ERRORS as error:
            file, record = self._file_of(index)
            _raise_unreadable(file, error, f": record {record}")


def _grain_source(paths: Sequence[str]) -> Any:
    from grain.sources import ArrayRecordDataSource

    return ArrayRecordDataSource(paths)


def _number_of_records(file: SourceFile) -> int:
    try:
        return len(_grain_source([file.path]))
    except _READ_ERRORS as error:
        _raise_unreadable(file, error)


def _raise_unreadable(file: SourceFile, error: Exception, where: str = "") -> NoReturn:
    """Raises the error for a file that has changed, or whose content is corrupted."""
    file.check_unchanged()
    raise (BadRecordError if where else UserError)(
        f"{file}{where}: cannot be read: {in_short(error) or 'no reason given'}. The file is "
        "truncated, corrupted or not an ArrayRecord file: write it again, or leave it out"
    ) from error

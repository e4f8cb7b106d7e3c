"""Reads of parts of local files, by several threads at once."""

import contextlib
import os
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from spmdtrain.data.sources.block_cache import BlockCache
from spmdtrain.data.sources.files import SourceFile
from spmdtrain.errors import StorageError, UserError

SUMMED = 2**16
"""Bytes of a part of a file that has a checksum."""

_OPEN_FILES = 64  # kept open; the limit of a process is often 1,024


class LocalReader:
    """Local files, opened on first use. Memory does not grow with what is read.

    A memory map would need no calls, but a file that is truncated while it is mapped ends the
    process with SIGBUS, and the pages that were read count as memory of the process. Each read
    compares the file with what it was when the source was created.

    Args:
      sums: For each file that is a copy that can be made again, the CRC-32 of each `SUMMED` bytes,
        integers, which are compared on the first read of this part; empty for other files. The
        default is for no copies.
    """

    def __init__(self, files: Sequence[SourceFile], sums: Sequence[np.ndarray] = ()) -> None:
        self._files = files
        self._sums = sums or [np.zeros(0, np.int64) for _ in files]
        self._compared = [np.zeros(len(each), bool) for each in self._sums]
        self._open: BlockCache[_Descriptor] = BlockCache(_OPEN_FILES)

    def read(self, file: int, offset: int, size: int) -> bytes:
        """Returns `size` bytes from `offset` on of a file, given by its number.

        Raises:
          UserError: If the file has changed, or ends before.
          StorageError: If it cannot be read, or is a corrupted copy.
        """
        if len(self._sums[file]):
            for part in range(offset // SUMMED, -(-(offset + size) // SUMMED)):
                self._compare(file, part)
        content = self._read(file, offset, size)
        self._files[file].check_unchanged()
        return content

    def check(self, file: int) -> None:
        """Checks that a file whose content was read before has not changed (`check_unchanged`)."""
        self._files[file].check_unchanged()

    def _read(self, file: int, offset: int, size: int) -> bytes:
        opened, content = self._open.get(file, self._opened), b""
        while len(content) < size:  # Linux reads at most 2 GiB at once
            try:
                more = os.pread(opened.number, size - len(content), offset + len(content))
            except OSError as error:
                self._files[file].fail(error)
            if not more:
                raise UserError(
                    f"{self._files[file]}: the file has been truncated since the run started: "
                    f"{self._files[file].size:,} bytes at the start, {offset + len(content):,} now"
                )
            content = content + more if content else more
        return content

    def _compare(self, file: int, part: int) -> None:
        """Compares a part of a copy with its checksum, once."""
        if self._compared[file][part]:
            return
        copy, start = self._files[file], part * SUMMED
        content = self._read(file, start, min(SUMMED, copy.size - start))
        if zlib.crc32(content) != self._sums[file][part]:
            copy.check_unchanged()
            with contextlib.suppress(OSError):
                os.unlink(copy.path)
            raise StorageError(
                f"{copy}: this copy in the cache was corrupted after it was written, and has been "
                "removed: start again, and it is made from the original"
            )
        self._compared[file][part] = True

    def _opened(self, file: int) -> "_Descriptor":
        return _Descriptor(self._files[file])


class _Descriptor:
    """An open file, which is closed when no thread uses it any more."""

    def __init__(self, file: SourceFile) -> None:
        file.check_unchanged()
        try:
            self.number = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StorageError(f"{file}: cannot be read: {error.strerror}") from error

    def __del__(self, close: Any = os.close) -> None:
        if hasattr(self, "number"):
            close(self.number)

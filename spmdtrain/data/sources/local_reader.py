"""Reads of parts of local files, by several threads at once."""

import os
from collections.abc import Sequence
from typing import Any

from spmdtrain.data.sources.block_cache import BlockCache
from spmdtrain.data.sources.files import SourceFile
from spmdtrain.errors import StorageError, UserError

_OPEN_FILES = 64  # kept open; the limit of a process is often 1,024


class LocalReader:
    """Local files, opened on first use. Memory does not grow with what is read.

    A memory map would need no calls, but a file that is truncated while it is mapped ends the
    process with SIGBUS, and the pages that were read count as memory of the process.

    Args:
      files: The files.
    """

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = files
        self._open: BlockCache[_Descriptor] = BlockCache(_OPEN_FILES)

    def read(self, file: int, offset: int, size: int) -> bytes:
        """Returns bytes of a file.

        Args:
          file: The number of the file.
          offset: The position of the first byte.
          size: Number of bytes.

        Raises:
          UserError: If the file has changed, or ends before.
          StorageError: If it cannot be read.
        """
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

"""Reading of the growing files of a run: only what is new since the last reading."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from etils import epath

from spmdtrain.errors import StorageError, UserError
from spmdtrain.files.run_files import FIELDS
from spmdtrain.files.storage import failures, is_url, one_line
from spmdtrain.files.validation import (
    LARGEST,
    LARGEST_LOG,
    Malformed,
    OtherFields,
    check_fields,
    parse_object,
    parse_objects,
    read_bytes,
)

OnBytes = Callable[[int], None]
_PIECE = 2**24  # bytes that one reading returns, and so the longest line
_TOGETHER = 2**10  # lines that are decoded at once


@dataclass(frozen=True)
class FileState:
    """Identity, size in bytes and time of a file, one of which changes if the file does."""

    inode: int
    size: int
    time: int


def file_state(path: epath.Path) -> FileState | None:
    """Returns the state of a file; None if there is none.

    Args:
      path: A local file, or an object at a URL.

    Raises:
      StorageError: If the file cannot be accessed.
    """
    try:
        if is_url(path):
            found = path.stat()
            return FileState(0, found.length, found.mtime)
        local = os.stat(path)
        return FileState(local.st_ino, local.st_size, local.st_mtime_ns)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except failures(path) as error:
        raise StorageError(f"{path} cannot be read: {one_line(error)}") from error


class GrowingFile:
    """A file of lines that another process appends to.

    A run that resumes replaces its `metrics.jsonl`: then all lines are read again.

    Args:
      path: The file, which need not exist.
    """

    def __init__(self, path: epath.Path) -> None:
        self.path = path
        self.fault = ""
        """Why the file cannot be read; empty if it can."""
        self._state: FileState | None = None
        self._read = 0  # bytes of the complete lines that were returned

    def unread(self) -> int:
        """Returns the number of bytes that the next reading will process."""
        state = file_state(self.path)
        if state is None or state == self._state:
            return 0
        return state.size - (self._read if self._continues(state) else 0)

    def _continues(self, state: FileState) -> bool:
        old = self._state
        return (
            not is_url(self.path)
            and old is not None
            and state.inode == old.inode
            and state.size >= self._read
        )

    def read(self) -> tuple[bool, Sequence[bytes]] | None:
        """Reads complete lines that are new: of a local file at most 16 MB, so call it until None.

        Returns:
          Whether the file was replaced, so that earlier lines no longer count, and the lines; None
          if nothing is left to read.

        Raises:
          StorageError: If the file cannot be accessed.
        """
        state = file_state(self.path)
        if state == self._state:
            return None
        replaced = not (state is not None and self._continues(state))
        start, content, fault = 0 if replaced else self._read, b"", ""
        try:
            if state is not None:
                content = read_bytes(self.path, LARGEST_LOG, start, _PIECE)
        except Malformed as error:
            fault = str(error)
        except FileNotFoundError:
            state, replaced, start = None, True, 0
        except failures(self.path) as error:
            raise StorageError(f"{self.path} cannot be read: {one_line(error)}") from error
        end = content.rfind(b"\n") + 1
        if state is not None and start + len(content) < state.size and not fault:
            if end:
                state = replace(state, size=start + end)  # differs until the last piece is read
            else:
                fault = f"{self.path} has a line of more than {_PIECE:,} bytes"
        # Only now, so that after an error the next reading has the same lines.
        self._state, self._read, self.fault = state, start + end, fault
        return replaced, content[:end].split(b"\n")[:-1]


def take_objects(
    lines: Sequence[bytes], take: Callable[[Mapping[str, Any]], None], on_bytes: OnBytes
) -> None:
    """Passes the JSON object of each line to a function, and the bytes done to another one.

    Args:
      lines: The lines.
      take: Receives each object; `{}` for a line that is not one.
      on_bytes: Receives the number of bytes since its last call.
    """
    for first in range(0, len(lines), _TOGETHER):
        some = lines[first : first + _TOGETHER]
        for content in parse_objects(some):
            take(content)
        on_bytes(sum(map(len, some)) + len(some))


def read_object(path: epath.Path) -> tuple[dict[str, Any] | None, str]:
    """Reads a JSON object.

    Args:
      path: The file.

    Returns:
      The object, None if there is no file or it is not valid; and what is wrong with it, if
      anything.

    Raises:
      StorageError: If the file cannot be accessed.
    """
    try:
        content = parse_object(read_bytes(path, LARGEST))
    except (FileNotFoundError, NotADirectoryError):
        return None, ""
    except UserError as error:
        return None, f"{path.name}: {error}"
    except failures(path) as error:
        raise StorageError(f"{path} cannot be read: {one_line(error)}") from error
    try:
        check_fields(content, FIELDS[path.name])
    except OtherFields as error:
        return content, f"{path.name}: {error}"
    return content, ""

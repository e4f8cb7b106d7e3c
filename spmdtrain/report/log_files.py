"""Incremental reading of the growing files of a run."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from etils import epath

from spmdtrain.errors import StorageError, UserError
from spmdtrain.files.run_files import FIELDS
from spmdtrain.files.storage import failures, file_system, is_url, one_line
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
PIECE = 2**24
"""The most bytes that one reading returns; a longer line cannot be read."""
_TAIL = 2**12  # bytes, several lines
_TOGETHER = 2**10  # lines that are decoded at once


@dataclass(frozen=True)
class FileState:
    """Identity, size in bytes and time of a file. At least one of them changes if the file does."""

    inode: int
    """For an object at a URL its generation, which each upload changes."""
    size: int
    time: int


def file_state(path: epath.Path) -> FileState | None:
    """Returns the state of a local file or an object at a URL; None if there is none.

    Raises `StorageError` if it cannot be accessed.
    """
    try:
        if is_url(path):
            found = file_system(str(path)).info(str(path))
            return FileState(int(found.get("generation") or 0), found["size"] or 0, 0)
        local = os.stat(path)
        return FileState(local.st_ino, local.st_size, local.st_mtime_ns)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except failures(path) as error:
        raise StorageError(f"{path} cannot be read: {one_line(error)}") from error


class GrowingFile:
    """A file of lines that another process appends to. It need not exist.

    A run that resumes replaces its `metrics.jsonl`: then all lines are read again. At a URL each
    upload replaces the object. Since lines are only cut off at the end and appended, the new object
    continues the old one if the last bytes that were read are unchanged.
    """

    def __init__(self, path: epath.Path) -> None:
        self.path = path
        self.fault = ""
        """Why the file cannot be read; empty if it can."""
        self._state: FileState | None = None
        self._read = 0  # bytes of the complete lines that were returned
        self._tail = b""  # the last of them, of an object at a URL

    def unread(self) -> int:
        """Returns the number of bytes that the next reading will process."""
        state = file_state(self.path)
        if state is None or state == self._state:
            return 0
        return state.size - (self._read if self._continues(state) else 0)

    def _continues(self, state: FileState) -> bool:
        old = self._state
        if old is None or state.size < self._read:
            return False
        return is_url(self.path) or state.inode == old.inode

    def read(self) -> tuple[bool, Sequence[bytes]] | None:
        """Reads complete lines that are new, at most 16 MB, so call it until None.

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
        start, tail = (0, b"") if replaced else (self._read, self._tail)
        content, fault = b"", ""
        try:
            if state is not None:
                first, count = start - len(tail), len(tail) + PIECE
                content = read_bytes(self.path, LARGEST_LOG, first, count)
        except Malformed as error:
            fault = str(error)
        except FileNotFoundError:
            state, replaced, start, tail = None, True, 0, b""
        except failures(self.path) as error:
            raise StorageError(f"{self.path} cannot be read: {one_line(error)}") from error
        if not fault and not content.startswith(tail):
            self._state = None
            return self.read()
        content = content[len(tail) :]
        end = content.rfind(b"\n") + 1
        if state is not None and start + len(content) < state.size and not fault:
            if end:
                state = replace(state, size=start + end)  # differs until the last piece is read
            elif len(content) == PIECE:
                fault = f"{self.path} has a line of more than {PIECE:,} bytes"
        # Only now, so that after an error the next reading has the same lines.
        self._state, self._read, self.fault = state, start + end, fault
        if is_url(self.path):
            self._tail = (tail + content[:end])[-_TAIL:]
        return replaced, content[:end].split(b"\n")[:-1]


def take_objects(
    lines: Sequence[bytes], take: Callable[[Mapping[str, Any]], None], on_bytes: OnBytes
) -> None:
    """Passes the JSON object of each line to a function, and the progress to another one.

    Args:
      take: Receives each object; `{}` for a line that is not one.
      on_bytes: Receives the number of bytes since its last call.
    """
    for first in range(0, len(lines), _TOGETHER):
        some = lines[first : first + _TOGETHER]
        for content in parse_objects(some):
            take(content)
        on_bytes(sum(map(len, some)) + len(some))


def read_object(path: epath.Path) -> tuple[dict[str, Any] | None, str]:
    """Reads a JSON object; returns it and what is wrong with it, if anything.

    The object is None if the file is missing or not valid. Raises `StorageError` if it cannot be
    accessed.
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

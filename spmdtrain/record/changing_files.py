"""Incremental reading of files that another process writes: JSON objects, and growing lines.

The files may be missing, incomplete, or written by another user.
"""

import errno
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from etils import epath

from spmdtrain.errors import StorageError, UserError
from spmdtrain.record.storage import (
    failures,
    file_system,
    is_url,
    one_line,
    size_and_version,
)
from spmdtrain.record.validation import (
    LARGEST_LOG,
    Malformed,
    check_fields,
    parse_object,
    parse_objects,
    read_bytes,
)

# -- The state of a file ---------------------------------------------------------------------------


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
            size, version = size_and_version(found)
            return FileState(version, size, 0)
        local = os.stat(path)
        return FileState(local.st_ino, local.st_size, local.st_mtime_ns)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except failures(path) as error:
        raise StorageError(f"{path} cannot be read: {one_line(error)}") from error


def state_to_read(path: epath.Path) -> FileState | None:
    """Returns `file_state`; that of the link for a link to itself, which `read_bytes` refuses."""
    try:
        return file_state(path)
    except StorageError as error:
        if getattr(error.__cause__, "errno", None) != errno.ELOOP:
            raise
        link = os.lstat(path)
        return FileState(link.st_ino, link.st_size, link.st_mtime_ns)


# -- Files with one JSON object, which are replaced as a whole -------------------------------------


class ObjectFile:
    """A file with one JSON object, which is parsed again once the file has changed.

    Args:
      path: The file, which need not exist.
      known: The fields of the object that this version knows.
      most: The largest size in bytes.
    """

    def __init__(self, path: epath.Path, known: Collection[str], most: int) -> None:
        self.path, self._known, self._most = path, known, most
        self.text: bytes | None = None
        """The content of the file; None if it is missing or cannot be read."""
        self.content: dict[str, Any] | None = None
        """The object; None without a valid one."""
        self.error: UserError | None = None
        """The fault of the file; None without one. With `OtherFields`, there is an object, too."""
        self._state: FileState | None = None

    def refresh(self) -> None:
        """Reads the file if it has changed; raises `StorageError` if it cannot be accessed."""
        state = state_to_read(self.path)
        if state == self._state:
            return
        text, content, error = None, None, None
        try:
            text = read_bytes(self.path, self._most)
            content = parse_object(text)
            check_fields(content, self._known)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except UserError as found:
            error = found
        except failures(self.path) as failure:
            raise StorageError(f"{self.path} cannot be read: {one_line(failure)}") from failure
        self.text, self.content, self.error, self._state = text, content, error, state


# -- Files of lines, which grow --------------------------------------------------------------------

OnBytes = Callable[[int], None]
PIECE = 2**24
"""The most bytes that one reading returns; a longer line cannot be read."""
_TAIL = 2**12  # bytes, several lines
_TOGETHER = 2**10  # lines that are decoded at once


class GrowingFile:
    """A file of lines that another process appends to. It need not exist.

    A run that resumes replaces its `metrics.jsonl`: then all lines are read again. At a URL each
    upload replaces the object, and a file system may give a new file the inode of an older one. So
    a file continues what was read before only if the last bytes that were read are unchanged.
    """

    def __init__(self, path: epath.Path) -> None:
        self.path = path
        self.fault = ""
        """The reason why the file cannot be read; empty if it can be read."""
        self._state: FileState | None = None
        self._read = 0  # bytes of the complete lines that were returned
        self._tail = b""  # the last of them

    def unread(self) -> int:
        """Returns the number of bytes that the next reading will process."""
        state = state_to_read(self.path)
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
        state = state_to_read(self.path)
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


C = TypeVar("C", bound="Collector")


class Collector:
    """Collects what the lines of a file say; a line is one JSON object."""

    def __init__(self) -> None:
        self.invalid = 0
        """Number of lines that are not valid, and left out."""

    def add(self, content: Mapping[str, Any]) -> None:
        """Adds the object of a line, or counts it as invalid; `{}` is a line without an object."""
        raise NotImplementedError

    def faults(self) -> list[str]:
        """Returns a sentence for each kind of lines or values that are left out."""
        if not self.invalid:
            return []
        lines_are = "line is" if self.invalid == 1 else "lines are"
        return [f"{self.invalid:,} {lines_are} not valid and left out"]


class Log(Generic[C]):
    """A growing file of JSON lines, of which each reading collects only what is new.

    Args:
      path: The file, which need not exist.
      new: Returns an empty collector: a run that resumes replaces the file.
    """

    def __init__(self, path: epath.Path, new: Callable[[], C]) -> None:
        self.path, self.file, self._new = path, GrowingFile(path), new
        self.content = new()
        """The content as of the last reading."""

    def read(self, on_bytes: OnBytes = lambda count: None) -> C:
        """Reads what is new; the content of a file that cannot be read stays as it is.

        Args:
          on_bytes: Receives the number of bytes since its last call.

        Raises:
          StorageError: If the file cannot be accessed.
        """
        while (found := self.file.read()) is not None:
            replaced, lines = found
            if replaced:
                self.content = self._new()
            take_objects(lines, self.content.add, on_bytes)
        return self.content

    def read_valid(self) -> C:
        """Reads what is new, without lines that are not valid.

        Raises `UserError` if the file cannot be read, and `StorageError` as `read` does.
        """
        content = self.read()
        if self.file.fault:
            raise UserError(self.file.fault)
        return content

    def read_all(self) -> C:
        """Reads what is new; raises `UserError` also if anything of the file is left out."""
        content = self.read_valid()
        for fault in content.faults():
            raise UserError(f"{self.path}: {fault}")
        return content

    def faults(self) -> list[str]:
        """Returns a sentence for everything that the readings so far have left out."""
        found = [self.file.fault] if self.file.fault else []
        return found + [f"{self.path.name}: {fault}" for fault in self.content.faults()]

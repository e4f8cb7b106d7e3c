"""Files of JSON lines that grow during a run."""

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from etils import epath

from spmdtrain.errors import StorageError
from spmdtrain.files import no_follow
from spmdtrain.files.storage import failures, one_line
from spmdtrain.files.validation import LARGEST_LOG, read_bytes

_KEPT_OPEN = 1.0  # seconds


def finite_or_null(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Returns metrics for JSON, which has no NaN and no infinity: None instead."""
    return {name: x if math.isfinite(x) else None for name, x in metrics.items()}


@contextlib.contextmanager
def errors_of_writing(path: epath.Path) -> Iterator[None]:
    """Raises errors of writing a file as `StorageError`."""
    try:
        yield
    except StorageError:
        raise
    except failures(path) as error:
        raise StorageError(f"{path} cannot be written: {one_line(error)}") from error


class LineAppender:
    """A local file to which complete lines are appended.

    A line is written at once, without a buffer, so that no line is lost if the process is killed.
    The file is closed after each line, because a network file system may report errors and show
    lines to others only then. It stays open while lines follow within a second: opening it again
    would take most of the time of a line.

    Args:
      name: The name of the file, which may not exist yet.
      complete: Number of bytes of its complete lines.
      check_lock: Raises if another run may be writing to the folder: its file would be truncated.
    """

    def __init__(
        self, folder: Path, name: str, complete: int, check_lock: Callable[[], None]
    ) -> None:
        self._folder, self._name, self._complete = folder, name, complete
        self._check_lock = check_lock
        self._path = os.path.join(folder, name)
        self._file: int | None = None
        self._appended_at = -_KEPT_OPEN

    def append(self, line: bytes) -> None:
        """Writes a line, which includes its line feed.

        Raises:
          OSError: If it cannot be written. The next call removes the part that was written.
          StorageError: If the lock of the folder is lost.
        """
        before, self._appended_at = self._appended_at, time.monotonic()
        try:
            if not self._is_open():
                self._open()
            assert self._file is not None
            left = memoryview(line)
            while left:
                left = left[os.write(self._file, left) :]
        except BaseException:
            self.close()
            raise
        self._complete += len(line)
        if self._appended_at - before >= _KEPT_OPEN:
            self.close()

    def _is_open(self) -> bool:
        """Returns whether the file is open, and was not removed or replaced since."""
        if self._file is None:
            return False
        try:
            current = os.lstat(self._path)
        except FileNotFoundError:
            return False
        return os.path.samestat(current, os.fstat(self._file))

    def _open(self) -> None:
        """Opens the file, and removes an incomplete line, which a kill or a full disk may leave."""
        self.close()
        self._check_lock()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._file = no_follow.open_file(self._folder, self._name, flags)
        self._complete = min(self._complete, os.fstat(self._file).st_size)
        os.ftruncate(self._file, self._complete)

    def close(self) -> None:
        """Closes the file until the next line."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


class LinesFile:
    """A file to which complete lines are appended, also over several starts of a run.

    `local` is the local folder of the file. If the workdir is a URL, an earlier content is copied
    from there first. `check_lock` is as for `LineAppender`.
    """

    def __init__(
        self, local: Path, name: str, workdir: epath.Path, check_lock: Callable[[], None]
    ) -> None:
        self._path = workdir / name
        try:
            before = read_bytes(self._path, LARGEST_LOG)
            if epath.Path(local) != workdir:
                (local / name).write_bytes(before)
        except FileNotFoundError:
            before = b""
        except failures(self._path) as error:
            raise StorageError(f"{self._path} cannot be read: {one_line(error)}") from error
        self._lines = LineAppender(local, name, before.rfind(b"\n") + 1, check_lock)

    def append(self, content: Mapping[str, Any]) -> None:
        """Appends a line with JSON values; raises `StorageError` if the file cannot be written."""
        with errors_of_writing(self._path):
            self._lines.append(json.dumps(content).encode() + b"\n")

    def close(self) -> None:
        """Closes the file until the next line."""
        self._lines.close()

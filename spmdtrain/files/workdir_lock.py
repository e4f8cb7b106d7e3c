"""The exclusive lock of a writer on a local workdir."""

import os
import socket
import time
import weakref
from collections.abc import Callable
from typing import IO

from etils import epath

from spmdtrain.errors import StorageError, UserError, foreign
from spmdtrain.files import no_follow
from spmdtrain.files.storage import one_line

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]


PATIENCE = 30.0
"""Seconds in which a process that is ending releases the lock."""
_POLL_INTERVAL = 0.2  # seconds
_held: "weakref.WeakSet[WorkdirLock]" = weakref.WeakSet()


def _files_held() -> list[IO[bytes]]:
    """Returns the locked files of this process."""
    return [lock._file for lock in _held if not lock._file.closed]


def _release_in_child() -> None:
    """Closes the locks in a forked process, which would hold them after the end of this one."""
    for lock in list(_held):
        lock.close()


if fcntl is not None:
    os.register_at_fork(after_in_child=_release_in_child)


class WorkdirLock:
    """A locked file, which the kernel unlocks in whatever way the process ends.

    The file contains the process and the host that hold it, for messages. If the lock is held, the
    start waits, because a process that was killed may need a while to end.

    Args:
      folder: The workdir.
      name: The file's name in it.
      writer: The kind of writer, for messages: `run` or `evaluator`.
      report: Receives a line if the lock has to be waited for.

    Raises:
      UserError: If this process itself holds the lock.
      StorageError: If another process holds the lock for half a minute.
      OSError: If the file cannot be opened for writing.
    """

    def __init__(
        self, folder: epath.Path, name: str, writer: str, report: Callable[[str], None]
    ) -> None:
        self._path = folder / name
        flags = os.O_RDWR | os.O_CREAT
        self._file: IO[bytes] = os.fdopen(no_follow.open_file(folder, name, flags), "r+b")
        if fcntl is None:
            return
        try:
            self._acquire(f"workdir {folder} is in use by another {writer}", report)
            self._file.truncate(0)
            self._file.write(_holder().encode())
            self._file.flush()
        except BaseException:
            self._file.close()
            raise
        _held.add(self)

    def _acquire(self, problem: str, report: Callable[[str], None]) -> None:
        until, reported = time.monotonic() + PATIENCE, False
        while True:
            try:
                return fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._file.seek(0)
                holder = self._file.read(300).decode(errors="replace")
                self._file.seek(0)
            if any(os.path.sameopenfile(x.fileno(), self._file.fileno()) for x in _files_held()):
                raise UserError(f"{problem} of this process")
            by = f"{problem} ({foreign(holder, 300)})" if holder else problem
            if time.monotonic() >= until:
                raise StorageError(
                    f"{by}, or by a process that it started: wait for its end or end it, then give "
                    "the same command again"
                )
            if not reported:
                report(f"{by}: waiting up to {PATIENCE:.0f} s for its end")
                reported = True
            time.sleep(_POLL_INTERVAL)

    def check(self) -> None:
        """Checks that the locked file still exists, because otherwise another run can lock it.

        Does nothing after `close`. Raises `StorageError` if the file was removed or replaced, or
        cannot be read.
        """
        if self._file.closed:
            return
        locked = os.fstat(self._file.fileno())
        try:
            current = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            change = "removed"
        except OSError as error:
            raise StorageError(f"{self._path} cannot be read: {one_line(error)}") from error
        else:
            if os.path.samestat(current, locked):
                return
            change = "replaced"
        raise StorageError(
            f"{self._path}, this run's lock, was {change}: another run may be using the workdir, "
            "so this one ends and saves nothing more there. Never remove the lock of a run that is "
            "still running"
        )

    def close(self) -> None:
        """Unlocks the workdir."""
        self._file.close()


def _holder() -> str:
    """Returns the text that names this process as the holder of a lock."""
    return f"process {os.getpid()} on {socket.gethostname()}"

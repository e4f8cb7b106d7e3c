"""The exclusive lock of a writer on a local workdir."""

import os
from typing import IO

from etils import epath

from spmdtrain.errors import StorageError, UserError
from spmdtrain.files import no_follow
from spmdtrain.files.storage import one_line

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]


class WorkdirLock:
    """A locked file, which the kernel unlocks in whatever way the process ends.

    Args:
      folder: The workdir.
      name: The file's name in it.
      writer: The kind of writer, for messages: `run` or `evaluator`.

    Raises:
      UserError: If another process holds the lock.
      OSError: If the file cannot be opened for writing.
    """

    def __init__(self, folder: epath.Path, name: str, writer: str) -> None:
        self._path = folder / name
        flags = os.O_RDWR | os.O_CREAT
        self._file: IO[bytes] = os.fdopen(no_follow.open_file(folder, name, flags), "r+b")
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise UserError(f"workdir {folder} is in use by another {writer}") from None
        except OSError:
            self._file.close()
            raise

    def check(self) -> None:
        """Checks that the locked file still exists, because otherwise another run can lock it.

        Does nothing after `close`.

        Raises:
          StorageError: If the file was removed or replaced, or cannot be read.
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

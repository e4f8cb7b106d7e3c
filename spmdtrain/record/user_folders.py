"""Folders of the current user, and the files of caches in them."""

import contextlib
import errno
import fcntl
import functools
import os
import stat
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

from spmdtrain.errors import UserError

# -- Folders of the current user, who may have no home folder and no entry in /etc/passwd ----------

_SECONDS_FOR_OTHERS = 120  # in which another process finds ports, or starts a node of Ray


def cache_folder() -> Path:
    """Returns the folder for caches, without creating it.

    It is below XDG_CACHE_HOME or the home folder, or in `private_folder()` without a home folder: a
    container whose user has no entry in /etc/passwd may leave HOME unset.
    """
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache) / "spmdtrain"
    home = os.path.expanduser("~")
    return private_folder() / "cache" if home == "~" else Path(home, ".cache", "spmdtrain")


def make_folder(path: Path) -> None:
    """Creates a folder, and missing ones above it, for this user alone (mode 0700)."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    for each in reversed(missing):
        with suppress(FileExistsError):
            each.mkdir(mode=0o700)


def check_own(path: Path) -> None:
    """Checks that only this user can write into a folder, and into those above it.

    Raises `PermissionError` if a folder up to `cache_folder()` belongs to or is writable by others.
    """
    for each in (path, *path.parents[: len(path.relative_to(cache_folder()).parts)]):
        found = each.stat()
        if found.st_uid != os.geteuid():
            why = f"it belongs to user {found.st_uid}"
            raise PermissionError(errno.EPERM, why, str(each))
        if found.st_mode & 0o022:
            why = f"others can write to it; chmod go-w {each}"
            raise PermissionError(errno.EPERM, why, str(each))


def private_folder(parent: Path | None = None, variable: str = "TMPDIR") -> Path:
    """Returns a folder for temporary files that only this user can access, and creates it.

    Args:
      parent: The folder that contains it; by default the one for temporary files.
      variable: The environment variable by which the user chooses another one.

    Raises:
      UserError: If it belongs to another user, is not a folder, or others can access it.
    """
    folder = (parent or Path(tempfile.gettempdir())) / f"spmdtrain-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or mode & 0o077:
        raise UserError(
            f"{folder} must be a folder of user {os.getuid()} with mode 0700, but is "
            f"{stat.filemode(status.st_mode)} of user {status.st_uid}: remove it, or set "
            f"{variable} to a folder of your own"
        )
    return folder


@contextlib.contextmanager
def exclusive_file(name: str) -> Iterator[IO[str]]:
    """Opens a file of `private_folder()` for this process alone, after the others that use it.

    The file is created if it does not exist, and is open for reading and writing.

    Raises:
      UserError: If it is not a regular file, or another process keeps it for minutes.
    """
    path = private_folder() / name
    try:
        # Without O_NONBLOCK, opening a FIFO would wait for its other end.
        flags = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        raise UserError(f"{path} cannot be opened: {error.strerror}: remove it") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UserError(f"{path} is not a regular file: remove it")
    with open(descriptor, "r+", encoding="ascii", errors="replace") as file:
        until = time.monotonic() + _SECONDS_FOR_OTHERS
        while not _is_locked(file):
            if time.monotonic() > until:
                raise UserError(
                    f"{path}: another process has locked it for {_SECONDS_FOR_OTHERS} s: end it "
                    "(lsof and fuser name it)"
                )
            time.sleep(0.05)
        yield file


def _is_locked(file: IO[str]) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


# -- Files of caches, written as a whole or not at all, by one process at a time -------------------

NOTICE_DELAY = 1.0  # seconds that a process waits for another one before it says so
_POLL = 0.02  # seconds


@contextlib.contextmanager
def replaced(path: Path, modified: int | None = None, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Opens a new file that takes the place of a file at the end of the block.

    After an error in the block nothing has changed.

    Args:
      path: The file; its folder exists.
      modified: The time of modification that the file is given, in ns.
      mode: The permissions of the file, before the umask.
    """
    # A name unique to this call, in the folder of the final name, where a rename is atomic.
    temporary = path.with_name(f".new-{uuid.uuid4().hex}")
    try:
        with open(temporary, "xb", opener=functools.partial(os.open, mode=mode)) as content:
            yield content
        if modified is not None:
            os.utime(temporary, ns=(modified, modified))
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):  # a file left behind is never read
            temporary.unlink()
        raise


def keep_file(path: Path, content: bytes) -> None:
    """Writes a file, and missing folders, for this user alone.

    Errors are ignored, because a missing file is made again.
    """
    with contextlib.suppress(OSError):
        make_folder(path.parent)
        with replaced(path, mode=0o600) as file:
            file.write(content)


@contextlib.contextmanager
def locked(path: Path, work: str) -> Iterator[None]:
    """Lets one process of this machine at a time make a file of a cache.

    A process that waits for longer than a second says so in a line.

    Args:
      path: The file; its folder exists. The lock is a file beside it until the end of the block.
      work: What the process does that holds the lock, such as "counting tokens".
    """
    lock = path.with_name(f"{path.name}.lock")
    with open(lock, "ab") as file:
        _acquire(file, work)
        try:
            yield
        finally:
            # Processes that wait have opened it already, and look for the result once they hold it.
            with contextlib.suppress(OSError):
                lock.unlink()


def _acquire(file: IO[bytes], work: str) -> None:
    deadline = time.monotonic() + NOTICE_DELAY
    while time.monotonic() < deadline:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_POLL)
    message = f"{work}: another process does it; waiting for its result"
    print(message, file=sys.stderr, flush=True)
    fcntl.flock(file, fcntl.LOCK_EX)

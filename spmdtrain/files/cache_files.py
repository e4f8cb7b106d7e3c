"""Files of caches, written as a whole or not at all, by one process at a time."""

import contextlib
import fcntl
import functools
import os
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from spmdtrain.files.user_folders import make_folder

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

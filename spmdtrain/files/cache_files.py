"""Files of caches, written as a whole or not at all."""

import contextlib
import functools
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from spmdtrain.files.user_folders import make_folder


@contextlib.contextmanager
def replaced(path: Path, modified: int | None = None, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Opens a new file that takes the place of a file at the end of the block.

    After an error in the block nothing has changed.

    Args:
      path: The file; its folder exists.
      modified: The time of modification that the file is given, in ns.
      mode: The permissions of the file, before the umask.

    Yields:
      The new file, for writing.
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
    """Writes a file for this user alone; errors are ignored because a missing file is made again.

    Args:
      path: The file; missing folders are created.
      content: Its content.
    """
    with contextlib.suppress(OSError):
        make_folder(path.parent)
        with replaced(path, mode=0o600) as file:
            file.write(content)

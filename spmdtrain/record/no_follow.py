"""File operations inside a folder that never follow a symbolic link.

The folder of a run, and links in it, may come from another user. Each function takes the folder,
`root`, whose path may contain links, and a name below it. No component of the name may be a link:
each component is opened relative to its parent. Some functions also accept a URL as `root`, because
object stores have no links; their docstrings say so.

The functions raise `OSError` if a component is a link, or if access fails.
"""

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeAlias

from etils import epath

from spmdtrain.record.storage import is_url
from spmdtrain.record.validation import read_at_most

_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
# O_NONBLOCK, so that opening a FIFO does not block; it is then refused.
_FILE = _NOFOLLOW | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_RELATIVE = os.open in os.supports_dir_fd  # False only on Windows

Root: TypeAlias = "Path | epath.Path"


def is_link(path: Root) -> bool:
    """Returns whether a path is a symbolic link; False for a URL."""
    return not is_url(path) and os.path.islink(path)


def make_subfolder(root: Root, name: str) -> None:
    """Creates a folder below `root` unless it exists.

    Raises `NotADirectoryError` if a link or a file has this name.
    """
    with _parent(root, name) as (parent, last):
        with contextlib.suppress(FileExistsError):
            os.mkdir(last, dir_fd=parent)
        if not stat.S_ISDIR(os.stat(last, dir_fd=parent, follow_symlinks=False).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), name)


def open_file(root: Root, name: str, flags: int) -> int:
    """Opens a regular file below `root`; `flags` are as for `os.open`. Returns the descriptor."""
    with _parent(root, name) as (parent, last):
        file = os.open(last, flags | _FILE, 0o666, dir_fd=parent)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise OSError(errno.EINVAL, "not a regular file", str(Path(root, name)))
        return file


def read_file(root: Root, name: str, most: int) -> bytes:
    """Returns the content of a regular file below `root`.

    Raises `OSError` also if it has more than `most` bytes.
    """
    with os.fdopen(open_file(root, name, os.O_RDONLY), "rb") as file:
        content = read_at_most(file, most + 1, expected=os.fstat(file.fileno()).st_size)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"larger than {most:,} bytes", str(Path(root, name)))
    return content


def create(root: Root, name: str) -> IO[bytes]:
    """Returns a new file below `root`, which may be a URL, open for writing.

    Raises `FileExistsError` if the name exists (not checked for a URL).
    """
    if is_url(root):
        file: IO[bytes] = (epath.Path(root) / name).open("wb")
        return file
    return os.fdopen(open_file(root, name, os.O_RDWR | os.O_CREAT | os.O_EXCL), "w+b")


def write(root: Root, name: str, save: Callable[[IO[bytes]], Any]) -> None:
    """Writes or replaces a file below `root`, which may be a URL, atomically.

    A link with this name is replaced, and its target is not changed. `save` writes the content to
    the file that it is given.
    """
    if is_url(root):  # an object becomes visible only when it is complete
        with create(root, name) as file:
            save(file)
        return
    path = PurePosixPath(name)
    unfinished = str(path.with_name(f".{path.name}.new"))
    with contextlib.suppress(FileNotFoundError):  # left by a killed process
        _unlink(root, unfinished)
    try:
        with create(root, unfinished) as file:
            save(file)
        with _parent(root, name) as (parent, last):
            source = os.path.join(os.path.dirname(last), f".{path.name}.new")
            os.replace(source, last, src_dir_fd=parent, dst_dir_fd=parent)
    except BaseException:
        with contextlib.suppress(OSError):  # free the disk space of the incomplete file
            _unlink(root, unfinished)
        raise


def remove(root: Root, name: str) -> None:
    """Removes a file, a link, or a folder with its content below `root`."""
    with _parent(root, name) as (parent, last):
        mode = os.stat(last, dir_fd=parent, follow_symlinks=False).st_mode
        if stat.S_ISDIR(mode):
            try:
                shutil.rmtree(last, dir_fd=parent)  # does not follow links inside
            except RecursionError:
                why = "its folders are nested too deeply"
                raise OSError(errno.ENAMETOOLONG, why, name) from None
        else:
            os.unlink(last, dir_fd=parent)


def names_in(root: Root, name: str) -> list[str]:
    """Returns the sorted names in a folder below `root`."""
    with _parent(root, name) as (parent, last):
        if parent is None:
            return sorted(os.listdir(last))
        folder = os.open(last, _FOLDER | _NOFOLLOW, dir_fd=parent)
        try:
            return sorted(os.listdir(folder))
        finally:
            os.close(folder)


def _unlink(root: Root, name: str) -> None:
    with _parent(root, name) as (parent, last):
        os.unlink(last, dir_fd=parent)


@contextlib.contextmanager
def _parent(root: Root, name: str) -> Iterator[tuple[int | None, str]]:
    """Yields a descriptor of the folder that contains `name`, and the last component of `name`.

    If the system has no descriptors of folders (Windows), yields None and the full path.
    """
    *folders, last = name.split("/")
    assert all(part not in ("", ".", "..") for part in (*folders, last)), name
    if not _RELATIVE:
        yield None, str(Path(root, name))
        return
    with contextlib.ExitStack() as stack:
        try:
            parent = os.open(root, _FOLDER)
            stack.callback(os.close, parent)
            for folder in folders:
                parent = os.open(folder, _FOLDER | _NOFOLLOW, dir_fd=parent)
                stack.callback(os.close, parent)
            yield parent, last
        except OSError as error:
            _name_link(error, root, name)
            raise


def _name_link(error: OSError, root: Root, name: str) -> None:
    """Raises an error that names the link that caused `error`; else gives it the full path."""
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        path = Path(root)
        for part in name.split("/"):
            path /= part
            if path.is_symlink():
                reason = "a symbolic link, through which a run writes nothing: remove it"
                raise OSError(errno.ELOOP, reason, str(path)) from error
    if error.filename is not None and error.errno is not None:
        error.filename = str(Path(root, name))

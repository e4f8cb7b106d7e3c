"""File operations inside a folder that never follow a symbolic link.

A run's folder may come from someone else, and so may links in it. Each function takes the folder,
`root`, by the user's own path, which may pass through links, and a name below it, of which no
component may be one: components are opened one by one, relative to the one before. `root` may be
a URL where this is said: object stores have no links.
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

from spmdtrain.files.storage import is_url

_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
# A FIFO is opened at once or not at all, and then refused.
_FILE = _NOFOLLOW | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_RELATIVE = os.open in os.supports_dir_fd  # everywhere but on Windows

Root: TypeAlias = "Path | epath.Path"


def is_link(path: Root) -> bool:
    """Returns whether a path is a symbolic link; a URL is none."""
    return not is_url(path) and os.path.islink(path)


def make_folder(root: Root, name: str) -> None:
    """Creates a folder below `root` unless it is there.

    Raises:
      OSError: If it is a link, or not a folder.
    """
    with _parent(root, name) as (parent, last):
        with contextlib.suppress(FileExistsError):
            os.mkdir(last, dir_fd=parent)
        if not stat.S_ISDIR(os.stat(last, dir_fd=parent, follow_symlinks=False).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), name)


def open_file(root: Root, name: str, flags: int) -> int:
    """Opens a regular file below `root`.

    Args:
      root: The folder.
      name: The file's path below it.
      flags: Those of `os.open`.

    Returns:
      The descriptor.

    Raises:
      OSError: If the file is a link or not a regular file, or cannot be opened.
    """
    with _parent(root, name) as (parent, last):
        file = os.open(last, flags | _FILE, 0o666, dir_fd=parent)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise OSError(errno.EINVAL, "not a regular file", str(Path(root, name)))
        return file


def create(root: Root, name: str) -> IO[bytes]:
    """Returns a new file below `root`, which may be a URL, open for writing.

    Raises:
      FileExistsError: If there is anything of that name.
    """
    if is_url(root):
        file: IO[bytes] = (epath.Path(root) / name).open("wb")
        return file
    return os.fdopen(open_file(root, name, os.O_RDWR | os.O_CREAT | os.O_EXCL), "w+b")


def write(root: Root, name: str, save: Callable[[IO[bytes]], Any]) -> None:
    """Writes a file below `root`, which may be a URL, or replaces it: whole or not at all.

    A link of that name is replaced, and what it points to stays as it is.

    Args:
      root: The folder.
      name: The file's path below it.
      save: Writes the content into the file that it is given.

    Raises:
      OSError: If it cannot be written.
    """
    if is_url(root):  # an object appears when it is whole
        with create(root, name) as file:
            save(file)
        return
    path = PurePosixPath(name)
    unfinished = str(path.with_name(f".{path.name}.new"))
    with contextlib.suppress(FileNotFoundError):  # what a killed process left
        _unlink(root, unfinished)
    try:
        with create(root, unfinished) as file:
            save(file)
        with _parent(root, name) as (parent, last):
            source = os.path.join(os.path.dirname(last), f".{path.name}.new")
            os.replace(source, last, src_dir_fd=parent, dst_dir_fd=parent)
    except BaseException:
        with contextlib.suppress(OSError):  # half of it is of no use, and takes room
            _unlink(root, unfinished)
        raise


def remove(root: Root, name: str) -> None:
    """Removes a file, a link or a folder with all that is in it below `root`.

    Raises:
      OSError: If it cannot be removed.
    """
    with _parent(root, name) as (parent, last):
        mode = os.stat(last, dir_fd=parent, follow_symlinks=False).st_mode
        if stat.S_ISDIR(mode):
            shutil.rmtree(last, dir_fd=parent)  # itself follows no links inside
        else:
            os.unlink(last, dir_fd=parent)


def names_in(root: Root, name: str) -> list[str]:
    """Returns what is in a folder below `root`, in order.

    Raises:
      OSError: If it is a link, or cannot be read.
    """
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
    """A descriptor of the folder that holds `name`, and its last component.

    Without descriptors of folders (Windows) None and the whole path.
    """
    *folders, last = name.split("/")
    assert all(part not in ("", ".", "..") for part in (*folders, last)), name
    if not _RELATIVE:
        yield None, str(Path(root, name))
        return
    with contextlib.ExitStack() as stack, _named_links(root, name):
        parent = os.open(root, _FOLDER)
        stack.callback(os.close, parent)
        for folder in folders:
            parent = os.open(folder, _FOLDER | _NOFOLLOW, dir_fd=parent)
            stack.callback(os.close, parent)
        yield parent, last


@contextlib.contextmanager
def _named_links(root: Root, name: str) -> Iterator[None]:
    """Names the link that an operation was refused for, and else the whole path."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            path = Path(root)
            for part in name.split("/"):
                path /= part
                if path.is_symlink():
                    reason = "a symbolic link, which a run writes nothing through: remove it"
                    raise OSError(errno.ELOOP, reason, str(path)) from error
        if error.filename is not None and error.errno is not None:
            error.filename = str(Path(root, name))
        raise

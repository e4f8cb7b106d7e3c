"""Folders of the current user, who may have no home folder and no entry in /etc/passwd."""

import errno
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from spmdtrain.errors import UserError


def cache_folder() -> Path:
    """Returns the folder for caches, without creating it.

    It is below XDG_CACHE_HOME or the home folder, or in `private_folder()` without a home folder: a
    container whose user has no entry in /etc/passwd may leave HOME unset.

    Raises:
      UserError: If `private_folder()` raises it.
    """
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache) / "spmdtrain"
    home = os.path.expanduser("~")
    return private_folder() / "cache" if home == "~" else Path(home, ".cache", "spmdtrain")


def make_folder(path: Path) -> None:
    """Creates a folder for this user alone (mode 0700).

    Args:
      path: The folder; those above it that are missing are created too.

    Raises:
      OSError: If it cannot be created.
    """
    missing = [each for each in (path, *path.parents) if not each.exists()]
    for each in reversed(missing):
        with suppress(FileExistsError):
            each.mkdir(mode=0o700)


def check_own(path: Path) -> None:
    """Checks that only this user can write into a folder, and into those above it.

    Args:
      path: A folder in `cache_folder()`.

    Raises:
      PermissionError: If one of them up to `cache_folder()` belongs to or is writable by others.
    """
    for each in (path, *path.parents[: len(path.relative_to(cache_folder()).parts)]):
        found = each.stat()
        if found.st_uid != os.geteuid():
            why = f"it belongs to user {found.st_uid}"
            raise PermissionError(errno.EPERM, why, str(each))
        if found.st_mode & 0o022:
            why = f"others can write to it; chmod go-w {each}"
            raise PermissionError(errno.EPERM, why, str(each))


def private_folder() -> Path:
    """Returns a folder for temporary files that only this user can access, and creates it.

    Raises:
      UserError: If it belongs to another user, is not a folder, or others can access it.
    """
    folder = Path(tempfile.gettempdir()) / f"spmdtrain-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or mode & 0o077:
        raise UserError(
            f"{folder} must be a folder of user {os.getuid()} with mode 0700, but is "
            f"{stat.filemode(status.st_mode)} of user {status.st_uid}: remove it, or set TMPDIR to "
            "a folder of your own"
        )
    return folder

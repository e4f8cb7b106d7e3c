"""Folders of the user who runs a process, who may have no home and no entry in /etc/passwd."""

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from spmdtrain.errors import UserError


def cache_folder() -> Path:
    """Returns the folder for what can be computed again.

    It is below XDG_CACHE_HOME or the home folder, or in `private_folder()` if there is none: a
    container whose user has no entry in /etc/passwd may leave HOME unset.

    Raises:
      UserError: As `private_folder`.
    """
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache) / "spmdtrain"
    home = os.path.expanduser("~")
    return private_folder() / "cache" if home == "~" else Path(home, ".cache", "spmdtrain")


def private_folder() -> Path:
    """Returns a folder for temporary files that only this user can enter, and creates it.

    Raises:
      UserError: If somebody else has made it, or others can enter it.
    """
    folder = Path(tempfile.gettempdir()) / f"spmdtrain-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or mode & 0o077:
        raise UserError(
            f"{folder} must be a folder of user {os.getuid()} with mode 0700, and is "
            f"{stat.filemode(found.st_mode)} of user {found.st_uid}: remove it, or set TMPDIR to a "
            "folder of your own"
        )
    return folder

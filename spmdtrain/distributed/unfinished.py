"""The file of a task that has not finished what it does: for ends that run no Python code."""

import contextlib
import os
from collections.abc import Iterator

from spmdtrain.distributed.progress import LAUNCH, TASK, path

_KIND = "work"  # of the file


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Tells the launcher while entered that this process has not finished what it does.

    It is a file, which stays if the process ends in a way that runs no further code.

    Args:
      what: What it does, such as `training`.
    """
    folder, task = os.environ.get(LAUNCH), os.environ.get(TASK)
    if not folder or not task or (file := path(folder, task, _KIND)).exists():
        yield  # without a launcher, or in a child process of the task
        return
    file.write_text(what)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def unfinished_work(folder: str | os.PathLike[str], task: str) -> str | None:
    """Returns what a task has not finished (see `working`); None if it does no such work."""
    try:
        return path(folder, task, _KIND).read_text()
    except FileNotFoundError:
        return None

"""The checkpoints that a path names, and the newest valid one of them."""

import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from etils import epath

from spmdtrain.checkpoints.items import steps_in
from spmdtrain.checkpoints.listing import BEST, LATEST, choose, parse_choice
from spmdtrain.checkpoints.manifest import NAME, CheckpointCorruptedError, Manifest
from spmdtrain.checkpoints.read_arrays import storage_errors
from spmdtrain.distributed import process_group
from spmdtrain.errors import StorageError, UserError, foreign
from spmdtrain.record.run_files import status_of
from spmdtrain.record.storage import absolute, folder_of

T = TypeVar("T")

_LISTINGS, _BETWEEN_LISTINGS = 3, 0.02  # seconds


@dataclass(frozen=True)
class Source:
    """Checkpoints in a folder, from which one is loaded.

    Attributes:
      steps: The steps of the checkpoints, oldest first.
      whole_workdir: Whether these are all checkpoints of a workdir.
    """

    folder: epath.Path
    steps: Sequence[int]
    whole_workdir: bool = True

    def path(self, step: int) -> epath.Path:
        """Returns the folder of one checkpoint."""
        return self.folder / str(step)


@dataclass(frozen=True)
class LoadedCheckpoint(Generic[T]):
    """A loaded value, the manifest of its checkpoint, and the steps of newer corrupted ones."""

    value: T
    manifest: Manifest
    corrupted: Sequence[int]


def list_checkpoints(workdir: str) -> Source:
    """Returns the checkpoints of a workdir, perhaps none.

    Raises `StorageError` if it cannot be read.
    """
    return _list(absolute(folder_of(workdir) / "checkpoints"))


def list_for_all(workdir: str) -> Source:
    """Returns the checkpoints of a workdir, perhaps none, as process 0 lists them.

    All processes of a job call it. Raises `StorageError` in all of them if process 0 cannot read
    the folder.
    """

    def steps() -> list[int]:
        return list(list_checkpoints(workdir).steps) if process_group.is_chief() else []

    found = process_group.broadcast(process_group.run_on_all(steps, StorageError))
    return Source(absolute(folder_of(workdir) / "checkpoints"), found)


def _list(folder: epath.Path) -> Source:
    """Returns the checkpoints in a folder, perhaps none.

    If a run keeps one checkpoint, and perhaps the best, the next one may be published and the last
    one removed while a listing is read. So a listing without the newest checkpoint is repeated.
    """
    with storage_errors(folder):
        steps = steps_in(folder)
        for _ in range(_LISTINGS):
            if _has_newest(steps, folder):
                break
            time.sleep(_BETWEEN_LISTINGS)
            steps = steps_in(folder)
        return Source(folder, steps)


def _has_newest(steps: Sequence[int], folder: epath.Path) -> bool:
    """Returns whether listed steps include the newest step that the folder has now."""
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    newest = max((int(name) for name in names if name.isdecimal()), default=None)
    return newest in steps if names else not steps


def find(path: str | os.PathLike[str], which: str | int = LATEST) -> Source:
    """Returns the checkpoints that a path names.

    Args:
      path: A workdir, its `checkpoints` folder, or one `checkpoints/STEP`.
      which: "best" or a step selects one checkpoint of a workdir. "latest" returns all of them, and
        `load_latest_valid` loads the newest valid one.

    Raises:
      UserError: If there is no such checkpoint.
      StorageError: If the folder cannot be read.
    """
    path, which = os.fspath(path), parse_choice(which)
    given = absolute(folder_of(path))
    is_inside = given.parent.name == "checkpoints" or (given / NAME).exists()
    if given.name.isdecimal() and is_inside and given.is_dir():
        if which not in (LATEST, int(given.name)):
            raise UserError(
                f"{path} names one checkpoint; to choose {'the best' if which == BEST else which}, "
                "give its workdir"
            )
        return Source(given.parent, [int(given.name)], whole_workdir=False)
    source = _list(given) if given.name == "checkpoints" else list_checkpoints(path)
    if not source.steps:
        workdir = given.parent if given.name == "checkpoints" else path
        if (status := status_of(str(workdir))) is None:
            why = "neither a workdir nor a checkpoints/STEP"
        else:
            reason = f", {foreign(status['reason'])}" if status.get("reason") else ""
            why = f"its run has saved none; {status['status']}{reason}"
        raise UserError(f"{path}: holds no checkpoint ({why})")
    if which == LATEST:
        return source
    with storage_errors(source.folder):
        step = choose(source.folder, source.steps, which)
    return Source(source.folder, [step], whole_workdir=False)


def load_latest_valid(
    source: Source,
    load: Callable[[epath.Path, Manifest], T],
    log: Callable[[str], None],
    *,
    by_all: bool = False,
) -> LoadedCheckpoint[T]:
    """Loads the newest valid checkpoint of a source.

    Args:
      load: Loads one; its `UserError` other than for a corrupted checkpoint ends the search.
      log: Receives a line for each corrupted checkpoint.
      by_all: Whether all processes of the job load together.

    Raises:
      CheckpointCorruptedError: If no checkpoint is valid.
      UserError: If there is no checkpoint any more.
      StorageError: If a checkpoint cannot be read.
    """

    def read(folder: epath.Path) -> Manifest:
        with storage_errors(folder):
            return Manifest.read(folder)

    if by_all:  # all processes load the same one
        source = replace(source, steps=process_group.broadcast(list(source.steps)))
    corrupted: dict[int, CheckpointCorruptedError] = {}
    for step in reversed(source.steps):
        folder = source.path(step)
        try:
            reading = functools.partial(read, folder)
            manifest = (
                process_group.run_on_all(reading, CheckpointCorruptedError) if by_all else reading()
            )
            return LoadedCheckpoint(load(folder, manifest), manifest, list(corrupted))
        except CheckpointCorruptedError as error:
            gone = not folder.exists()
            if source.whole_workdir and (process_group.broadcast(gone) if by_all else gone):
                # A run in progress has removed it while it was read: there is a newer one.
                return load_latest_valid(_list(source.folder), load, log, by_all=by_all)
            corrupted[step] = error
            if step != source.steps[0]:
                log(f"checkpoint {folder} is corrupted: {error}; trying the one before")
    if not corrupted:
        raise UserError(f"{source.folder}: holds no checkpoint any more")
    newest = max(corrupted)
    if len(corrupted) == 1:
        raise CheckpointCorruptedError(
            f"checkpoint {source.path(newest)} is corrupted: {corrupted[newest]}"
        )
    raise CheckpointCorruptedError(
        f"none of the {len(corrupted)} checkpoints in {source.folder} is valid; of the newest, "
        f"{newest}: {corrupted[newest]}"
    )

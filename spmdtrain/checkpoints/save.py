"""Saving checkpoints: a thin layer over Orbax that seals what was saved and says what was not."""

import contextlib
import datetime
import importlib
import itertools
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import absl.logging
from etils import epath, epy

from spmdtrain.checkpoints import manifest, replica_check
from spmdtrain.checkpoints.checksums import PartSum, as_text, read_parts, start_sums
from spmdtrain.checkpoints.items import ITEMS, items_of, raw_keys, steps_in
from spmdtrain.checkpoints.manifest import CheckpointCorruptedError, Manifest
from spmdtrain.checkpoints.retention import Record, Retention
from spmdtrain.checkpoints.run_identity import Identity
from spmdtrain.distributed import process_group, progress
from spmdtrain.errors import StorageError, UserError
from spmdtrain.files import no_follow
from spmdtrain.files.storage import (
    absolute,
    failures,
    is_url,
    silence_tensorstore_shutdown,
    why_failed,
)
from spmdtrain.step.state import TrainState

with epy.lazy_imports():  # as it takes long, and a run's first step can come before
    import orbax.checkpoint as ocp

PyTree = Any

_NOTHING: Mapping[str, Any] = {}
_REMOVED = ".removed"
_UNFINISHED = ".orbax-checkpoint-tmp"
_SHOWS_WITHIN = 45.0  # seconds in which a new file shows on a network file system
_numbers = itertools.count()  # of saves: the same in all processes, as they save together

# Orbax tells through absl of every step it takes; what goes wrong it raises. absl is imported
# before, as a logger of its name that is not its own would not know who has called it.
absl.logging.get_absl_logger().addFilter(lambda record: "orbax" not in record.pathname)


def check_shared(folder: Path) -> None:
    """Raise `UserError` where a process of the job has another folder of that name than the first.

    Each would write its part of every checkpoint into its own, and none of them would be whole.
    """
    name = process_group.broadcast(f".shared-{secrets.token_hex(8)}")
    mark = folder / name
    if process_group.is_chief():
        no_follow.create(folder, name).close()
    process_group.barrier()

    def look() -> None:
        until = time.monotonic() + _SHOWS_WITHIN
        while not mark.exists():
            if time.monotonic() > until:
                raise UserError(
                    f"{folder} in {process_group.name()} is not the folder that "
                    f"{process_group.names()[0]} has there: the workdir must be one that all "
                    "processes share"
                )
            time.sleep(0.2)

    try:
        process_group.run_on_all(look, UserError)
    finally:
        if process_group.is_chief():
            mark.unlink()


class Checkpoints:
    """The checkpoints that one run writes: `STEP/` holds the state after that many updates.

    Each is published by one rename, when all its arrays and its manifest are written. Only then is
    an older one removed. Where several processes train together, all of them write, and all call
    the same methods in the same order; process 0 alone seals, renames and removes.

    `evaluated` reads the metrics of an evaluator beside the run by step, where that is what says
    which checkpoint is best.
    """

    def __init__(
        self,
        folder: epath.Path,
        retention: Retention,
        evaluated: Callable[[], Mapping[int, Mapping[str, float]]] | None = None,
    ) -> None:
        # As Orbax wants it; whether it is a link itself is looked at below.
        self.folder = folder = absolute(folder.parent) / folder.name
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder} is a file: it must be the folder of the checkpoints")
        if no_follow.is_link(folder):
            raise UserError(
                f"{folder} is a symbolic link, which a run writes nothing through: make it a "
                "folder, or give a workdir where it points to"
            )
        silence_tensorstore_shutdown()
        self._retention, self._evaluated = retention, evaluated
        self._remover = ThreadPoolExecutor(1, thread_name_prefix="remove-checkpoints")
        self._teller = ThreadPoolExecutor(1, thread_name_prefix="tell-check-sums")
        self._manager: Any = None  # once something has been saved
        self._saving: _Save | None = None
        self._told: Future[None] | None = None  # what this process adds to the sums
        self._failed = self._abandoned = False
        with self._named_failures("the folder of the checkpoints cannot be used"):
            if process_group.is_chief():
                folder.mkdir(parents=True, exist_ok=True)
                self._remove_links()
            if process_group.count() > 1 and not is_url(folder):
                check_shared(Path(folder))
            self._opened = self._folder_identity()
            self._records: dict[int, Record] = {}
            if process_group.is_chief():
                self._records = {s: r for s in steps_in(folder) if (r := self._record(s))}
        # The newest that is known to be whole.
        self.saved_step = process_group.broadcast(max(self._records, default=0))
        self._remove()

    def save(
        self,
        state: TrainState,
        step: int,
        identity: Identity,
        metrics: Mapping[str, float] | None,
        *,
        stopped: bool = False,
        epoch: Mapping[str, Any] = _NOTHING,
    ) -> None:
        """Save asynchronously: returns when the state is copied to the host.

        `epoch` goes into the manifest.
        `metrics` are those of an evaluation of this very state; without them, or where the one
        that ranks checkpoints is not finite, the checkpoint is never the best. Raises
        `StorageError` with what went wrong, also with the save before, and `ReplicaError`, before
        anything is written, if processes hold different copies of the state.
        """
        if metrics is not None and not math.isfinite(metrics.get(self._retention.metric, math.nan)):
            metrics = None
        self.wait()
        now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
        # The sums are begun before the copy: what the next step writes into donated memory, or
        # anything on the way to the disk, cannot be in them.
        items = items_of(state)
        sums = start_sums({field: x for item in items.values() for field, x in item.items()})
        replica_check.check_equal(sums, step)
        self._saving = save = _Save(
            next(_numbers), step, now, identity, metrics, stopped, sums, epoch
        )
        if process_group.is_chief():
            self._records[step] = Record(step, now, metrics)
        else:
            self._told = self._teller.submit(
                lambda: process_group.publish(save.key_of(), read_parts(sums))
            )
        with self._failing():
            if self._folder_identity() != self._opened:
                raise FileNotFoundError("the folder is gone: removed, or no longer mounted")
            if self._manager is None:
                self._manager = self._open_manager()
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    **{item: ocp.args.PyTreeSave(raw_keys(x)) for item, x in items.items()}
                ),
                force=True,
            )

    def get_ready(self) -> None:
        """Import, beside whatever goes on, what the first save needs: else it takes longer."""
        self._teller.submit(importlib.import_module, "spmdtrain.checkpoints.orbax")

    def wait(self) -> None:
        """Return when nothing is being saved any more; raises `StorageError`, but only once."""
        if self._saving is None:
            return
        with self._failing():
            if self._told is not None:
                self._told.result()
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        self.saved_step, self._saving = self._saving.step, None
        self._remove()

    def close(self) -> None:
        """Finish what is being saved and let go of the folder."""
        if self._abandoned:
            return
        try:
            self.wait()
        finally:
            # A failure that was raised already is raised again by Orbax.
            with contextlib.suppress(Exception) if self._failed else contextlib.nullcontext():
                if self._manager is not None:
                    self._manager.close()
            self._remover.shutdown()
            self._teller.shutdown()
            if self._failed and self._folder_identity() == self._opened:
                time.sleep(0.5)  # Orbax waits no more for threads that are still writing
                self._remove_unfinished()
            if not is_url(self.folder):
                with contextlib.suppress(OSError):  # not there, or not empty: the next start looks
                    os.rmdir(self.folder / _REMOVED)

    def abandon(self) -> None:
        """Let go of the folder as it is: other processes of the job may be gone."""
        self._saving = None
        self._remover.shutdown(wait=False)
        self._teller.shutdown(wait=False)
        self._abandoned = True

    def holds(self, step: int) -> bool:
        """Whether there is a whole checkpoint of a step."""
        return process_group.broadcast(step in self._records)

    def quarantine(self, steps: Sequence[int]) -> list[str]:
        """Rename damaged checkpoints, so that they count no more; the new names."""
        names = []
        with self._named_failures("a damaged checkpoint could not be set aside"):
            for step in steps if process_group.is_chief() else []:
                taken = {path.name for path in self.folder.iterdir()}
                candidates = (f"{step}.damaged{n}" for n in ("", *range(2, len(taken) + 3)))
                name = next(name for name in candidates if name not in taken)
                (self.folder / str(step)).rename(self.folder / name)
                self._records.pop(step, None)
                names.append(name)
            names = process_group.broadcast(names)
            self.saved_step = process_group.broadcast(max(self._records, default=0))
            if self._manager is not None:
                self._manager.reload()
        return names

    def _open_manager(self) -> Any:
        from spmdtrain.checkpoints.orbax import open_manager

        return open_manager(
            self.folder,
            ITEMS,
            seal=self._seal,
            keep=self._keep,
            removed=None if is_url(self.folder) else _REMOVED,
        )

    # -- sealing -------------------------------------------------------------------------------

    def _seal(self) -> None:
        """Write the manifest: all arrays are on the disk, and the folder has not its name yet."""
        assert self._saving is not None
        with progress.sealing(self._saving.step):
            self._write_manifest(self._saving)

    def _write_manifest(self, save: "_Save") -> None:
        totals = read_parts(save.sums)
        for rank in range(1, process_group.count()):
            for name, part in process_group.pop(save.key_of(rank)).items():
                totals[name] += part
        unpublished = (f"{save.step}", f"{save.step}{_UNFINISHED}")  # URLs, local paths
        folders = (
            path
            for path in self.folder.iterdir()
            if path.name.startswith(unpublished[1]) or path.name == unpublished[0]
        )
        if (folder := next(folders, None)) is None:
            raise FileNotFoundError(f"what was written of step {save.step} is gone")
        Manifest(
            step=save.step,
            saved_at=save.saved_at.isoformat(timespec="seconds"),
            identity=save.identity,
            metrics=None if save.metrics is None else dict(save.metrics),
            stopped=save.stopped,
            sums=as_text(totals),
            files=manifest.sizes(folder),
            epoch=save.epoch,
        ).write(folder)

    # -- retention -----------------------------------------------------------------------------

    def _keep(self, steps: Sequence[int]) -> list[bool]:
        records = list(self._records.values())
        if self._evaluated is None:
            kept = self._retention.keep(records)
        else:
            kept = self._retention.keep_evaluated(records, self._evaluated())
        # One without a manifest is none that we saved: it neither counts nor goes.
        keeps = [step in kept or step not in self._records for step in steps]
        self._records = {step: record for step, record in self._records.items() if step in kept}
        return keeps

    def _record(self, step: int) -> Record | None:
        try:
            found = Manifest.read(self.folder / str(step))
        except CheckpointCorruptedError:
            return None
        return Record(step, datetime.datetime.fromisoformat(found.saved_at), found.metrics)

    # -- failures ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """What goes wrong with a save ends saving, and is named where storage is to blame."""
        save = self._saving
        assert save is not None
        try:
            yield
        except BaseException as error:
            self._failed, self._saving = True, None
            reason = why_failed(error, self.folder) if isinstance(error, Exception) else None
            if self._folder_identity() == self._opened:
                self._remove_unfinished()
            if (self.folder / str(save.step) / manifest.NAME).exists():
                self.saved_step = save.step
                what = f"step {save.step} is saved, and an older one could not be removed,"
            else:
                self._records.pop(save.step, None)
                what = f"step {save.step} could not be saved"
            if reason is None:
                raise
            raise StorageError(f"{what} in {self.folder}: {reason}") from error

    @contextlib.contextmanager
    def _named_failures(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if (reason := why_failed(error, self.folder)) is None:
                raise
            raise StorageError(f"{what} in {self.folder}: {reason}") from error

    def _folder_identity(self) -> tuple[int, int] | None:
        """Which folder it is: another may have come into the place of one that was lost."""
        if is_url(self.folder):
            return None
        try:
            found = os.stat(self.folder)
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    def _remove_unfinished(self) -> None:
        """Give back the room that a failed save still takes."""
        if not process_group.is_chief():
            return
        with contextlib.suppress(failures(self.folder)):
            for path in self.folder.iterdir():
                if _UNFINISHED in path.name:
                    with contextlib.suppress(failures(self.folder)):  # the next start tries again
                        if is_url(path):
                            path.rmtree()
                        else:
                            no_follow.remove(self.folder, path.name)

    def _remove_links(self) -> None:
        """Removes links in the place of folders that Orbax writes to, moves to or removes."""
        for path in () if is_url(self.folder) else Path(self.folder).iterdir():
            if path.is_symlink() and (path.name == _REMOVED or _UNFINISHED in path.name):
                no_follow.remove(self.folder, path.name)

    def _remove(self) -> None:
        """Remove, beside the training, what Orbax has put aside for that, in earlier runs too."""
        if is_url(self.folder) or not process_group.is_chief():
            return
        with contextlib.suppress(FileNotFoundError):
            for name in no_follow.names_in(self.folder, _REMOVED):
                self._remover.submit(self._remove_one, f"{_REMOVED}/{name}")

    def _remove_one(self, name: str) -> None:
        with contextlib.suppress(OSError):  # the next start tries again
            no_follow.remove(self.folder, name)


@dataclass(frozen=True)
class _Save:
    """What is being saved."""

    number: int
    step: int
    saved_at: datetime.datetime
    identity: Identity
    metrics: Mapping[str, float] | None
    stopped: bool
    sums: Mapping[str, Sequence[PartSum]]
    epoch: Mapping[str, Any]

    def key_of(self, rank: int | None = None) -> str:
        """Under which a process, this one by default, tells what it adds to the sums."""
        return f"sums/{self.number}/{process_group.rank() if rank is None else rank}"

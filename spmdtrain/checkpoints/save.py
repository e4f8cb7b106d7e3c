"""Saving of checkpoints: Orbax, with manifests, retention and messages for failures."""

import contextlib
import datetime
import importlib
import json
import math
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, cast

import absl.logging
from etils import epath

from spmdtrain.checkpoints import checksums, manifest
from spmdtrain.checkpoints.checksums import PartSum, format_sums, read_parts, start_sums
from spmdtrain.checkpoints.host_copy import (
    as_jax_arrays,
    can_copy,
    copy_to_host,
    is_on_cpu,
    sum_copies,
)
from spmdtrain.checkpoints.listing import CheckpointRecord, Retention
from spmdtrain.checkpoints.manifest import (
    ITEMS,
    CheckpointCorruptedError,
    Manifest,
    items_of,
    raw_keys,
    steps_in,
    write_positions,
)
from spmdtrain.checkpoints.orbax_import import ocp
from spmdtrain.checkpoints.run_identity import Identity
from spmdtrain.distributed import process_group, progress
from spmdtrain.errors import StorageError, UserError
from spmdtrain.record import no_follow
from spmdtrain.record.storage import (
    absolute,
    failures,
    is_url,
    rename_folder,
    silence_tensorstore_shutdown,
    why_failed,
)
from spmdtrain.record.validation import Malformed, check, parse_object, read_bytes
from spmdtrain.step.state import TrainState

PyTree = Any
T = TypeVar("T")

_NOTHING: Mapping[str, Any] = {}
_REMOVED = ".removed"
_QUARANTINE = "quarantine.json"
"""The file with the checkpoints that are being renamed, so that a later start renames the rest."""
_RETENTION = "retention.json"
"""The file with the checkpoints that the next one replaces, so that a later start removes them."""
_POLL_INTERVAL = 0.02  # seconds
_UNFINISHED = ".orbax-checkpoint-tmp"

# Hides Orbax's log lines: it logs every action, and raises its errors. absl must be imported first,
# because only its own logger class records the caller's path.
absl.logging.get_absl_logger().addFilter(lambda record: "orbax" not in record.pathname)


def is_unfinished(name: str) -> bool:
    """Returns whether a folder with this name is an unfinished checkpoint."""
    return re.fullmatch(rf"\d+{re.escape(_UNFINISHED)}(-\d+)?", name) is not None


class Checkpoints:
    """The checkpoints of a run: `STEP/` holds the state after that many updates.

    A checkpoint is published by one rename, after all its arrays and its manifest are written; only
    then are older ones removed. If several processes train together, all of them write, and all
    call the same methods in the same order; only process 0 writes the manifest, renames and
    removes.

    One thread, the owner, makes all changes of the checkpoints, one after the other. An interrupt
    of the main thread ends its wait; the change continues. Another thread deletes what the owner
    has moved to the folder of removed checkpoints: a deletion may take long, and the next save must
    not wait for it.

    Args:
      folder: The `checkpoints` folder of the workdir.
      evaluated: Reads the metrics of the evaluator task by step and trajectory; None if the run
        evaluates its own checkpoints.
      check_lock: Raises if the lock of the workdir is lost. Called before a checkpoint is
        published, changed or renamed.

    Raises:
      UserError: If the folder is a file or a symbolic link, or is not shared by all processes.
      StorageError: If the folder cannot be used.
    """

    def __init__(
        self,
        folder: epath.Path,
        retention: Retention,
        evaluated: Callable[[], Mapping[tuple[int, str], Mapping[str, float]]] | None = None,
        check_lock: Callable[[], None] = lambda: None,
    ) -> None:
        # Orbax requires an absolute path. A link in the last component is kept for the check below.
        self.folder = folder = absolute(folder.parent) / folder.name
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder} is a file: it must be the folder of the checkpoints")
        if no_follow.is_link(folder):
            raise UserError(
                f"{folder} is a symbolic link, through which a run does not write: make it a "
                "folder, or use the workdir that it points to"
            )
        silence_tensorstore_shutdown()
        self._retention, self._evaluated, self._check_lock = retention, evaluated, check_lock
        self._owner = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._remover = ThreadPoolExecutor(1, thread_name_prefix="remove-checkpoints")
        self._manager: Any = None  # opened by the first save
        self._saving: _Save | None = None  # what the owner saves
        self._pending: Future[int] | None = None  # the last save that was requested
        self._sequence = process_group.new_sequence()  # of the owner
        self._failed = self._abandoned = False
        self._records: dict[int, CheckpointRecord] = {}
        self.quarantined: Sequence[str] = ()
        """New names of checkpoints whose quarantine an earlier start has not completed."""
        with self._storage_errors("the folder of the checkpoints cannot be used"):
            if process_group.is_chief():
                self._by_owner(self._prepare_folder)
            if process_group.count() > 1 and not is_url(folder):
                check_shared(Path(folder))
            self._opened = self._folder_identity()
            if process_group.is_chief():
                self._by_owner(self._read_folder)
        self.saved_step = process_group.broadcast(max(self._records, default=0))
        """Step of the newest checkpoint that is known to be complete; 0 without one."""
        self._remover.submit(self._remove)

    def _by_owner(self, change: Callable[..., T], *args: Any) -> T:
        """Makes a change in the owner's thread, and returns its result."""
        return self._owner.submit(change, *args).result()

    def _prepare_folder(self) -> None:
        """Makes the folder, and removes what must not be there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # Links in place of folders to which Orbax writes, or which it removes.
        for path in () if is_url(self.folder) else Path(self.folder).iterdir():
            if path.is_symlink() and (path.name == _REMOVED or is_unfinished(path.name)):
                no_follow.remove(self.folder, path.name)
        removed = self.folder / _REMOVED
        if not is_url(self.folder) and removed.exists() and not removed.is_dir():
            raise UserError(f"{removed} is not a folder: remove it")
        self._removed()  # raises an error that the thread which deletes would meet

    def _read_folder(self) -> None:
        """Completes the quarantine of an earlier start, and reads the manifests."""
        self.quarantined = self._complete_quarantine()
        self._records = {s: r for s in steps_in(self.folder) if (r := self._record(s))}

    def save(
        self,
        state: TrainState,
        step: int,
        identity: Identity,
        metrics: Mapping[str, float] | None,
        *,
        stopped: bool = False,
        epoch: Mapping[str, Any] = _NOTHING,
        callbacks: Mapping[str, Any] = _NOTHING,
        positions: Mapping[str, str] = _NOTHING,
        wait_for_files: Callable[[], None] = lambda: None,
    ) -> None:
        """Saves a state asynchronously. Returns when it is copied to the host.

        Args:
          step: Number of updates in the state.
          metrics: Metrics of an evaluation of this state; None without one. Those that are not
            finite are left out; without the ranking metric the checkpoint is never the best.
          stopped: Whether a callback ended the run here.
          epoch: Metrics of the unfinished epoch.
          callbacks: States of the callbacks.
          positions: Positions of the shards of a stream that this process reads.
          wait_for_files: Waits, for a limited time, until other files of the run include all
            earlier steps. Called before the checkpoint is published, because a resume does not log
            these steps again.

        Raises:
          StorageError: If the previous save has failed.
          ReplicaError: If processes held different copies of the previous state; nothing of it was
            written.
        """
        if metrics is not None:
            metrics = _finite(metrics)
        self.wait()
        now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
        items = {item: raw_keys(fields) for item, fields in items_of(vars(state)).items()}
        # On accelerators, checksums cover the copy to the host, too. This only starts them.
        sums = None if is_on_cpu(items) else start_sums(_by_field(items))
        is_copied = can_copy(items)
        if is_copied:
            items = copy_to_host(items)
        save = _Save(
            step, now, identity, metrics, stopped, epoch, callbacks, dict(positions), wait_for_files
        )
        self._pending = self._owner.submit(self._save, save, items, sums)
        if not is_copied:
            save.is_read.wait()

    def _save(
        self,
        save: "_Save",
        items: Mapping[str, PyTree],
        sums: Mapping[str, Sequence[PartSum]] | None,
    ) -> int:
        """Saves arrays or their copies, and removes older checkpoints; returns the step."""
        try:
            if self._folder_identity() != self._opened:
                raise FileNotFoundError("the checkpoint folder was removed or unmounted")
            self._saving = save
            if process_group.is_chief():
                trajectory = save.identity.trajectory_at(save.step)
                self._records[save.step] = CheckpointRecord(
                    save.step, save.saved_at, save.metrics, trajectory
                )
            self._write(save, items, sums)
            save.is_read.set()
            if process_group.count() > 1:
                self._await_others()
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
            if save.replaces:
                (self.folder / _RETENTION).unlink()
        except Exception as error:
            if (failure := self._after_failure(save, error)) is None:
                raise
            raise failure from error
        finally:
            save.is_read.set()
        self._remover.submit(self._remove)
        return save.step

    def _await_others(self) -> None:
        """Waits until Orbax has published the checkpoint; raises the error of this process.

        Of several processes, one that has failed must say so at once: the others wait for it in
        Orbax' barriers, and end when they hear of it.
        """
        while self._manager.is_saving_in_progress():
            if self._manager.failure is not None:
                raise self._manager.failure
            time.sleep(_POLL_INTERVAL)

    def _write(
        self,
        save: "_Save",
        items: Mapping[str, PyTree],
        sums: Mapping[str, Sequence[PartSum]] | None,
    ) -> None:
        """Passes arrays, or their copies, to Orbax, which has read them when this returns."""
        if sums is None:
            sums = sum_copies(_by_field(items))
        checksums.check_equal(sums, save.step, self._sequence)
        for parts, positions in self._sequence.collect((read_parts(sums), save.positions)):
            save.positions |= positions
            for name, part in parts.items():
                save.sums[name] = save.sums.get(name, 0) + part
        if self._manager is None:
            if not is_url(self.folder):  # left by a killed run
                self._remove_unfinished()
            from spmdtrain.checkpoints.orbax import open_manager

            self._manager = open_manager(
                self.folder,
                ITEMS,
                seal=self._seal,
                keep=self._keep,
                removed=None if is_url(self.folder) else _REMOVED,
            )
        arrays = {item: as_jax_arrays(fields) for item, fields in items.items()}
        self._manager.save(
            save.step,
            args=ocp.args.Composite(
                **{item: ocp.args.PyTreeSave(fields) for item, fields in arrays.items()}
            ),
            force=True,  # the schedule decides when to save, not Orbax's policies
        )

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Adds metrics to a checkpoint whose evaluation a signal had interrupted.

        Without them it would never be the best one. Nothing is changed if the checkpoint does not
        exist, or has metrics. Returns whether they were added, the same in all processes. Raises
        `StorageError` if the manifest cannot be replaced.
        """
        record = self._records.get(step)  # in process 0
        is_missing = record is not None and record.metrics is None
        if is_missing:
            with self._storage_errors(f"the metrics of step {step} could not be added"):
                self._by_owner(self._add_metrics, step, _finite(metrics))
        return process_group.broadcast(is_missing)

    def _add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._check_lock()
        folder = self.folder / str(step)
        replace(Manifest.read(folder), metrics=metrics, metrics_added=True).write(folder)
        self._records[step] = replace(self._records[step], metrics=metrics)

    def complete_retention(self) -> None:
        """Removes what the last checkpoint replaces, if an earlier start was killed before that.

        Called after the arrays of that checkpoint were read: it may be corrupted.
        """
        if process_group.is_chief():
            with self._storage_errors("replaced checkpoints could not be removed"):
                self._by_owner(self._complete_retention)

    def get_ready(self) -> None:
        """Imports Orbax in a thread, so that the first save does not wait for the import."""
        self._owner.submit(importlib.import_module, "spmdtrain.checkpoints.orbax")

    def wait(self) -> None:
        """Waits for the pending save.

        Raises:
          StorageError: If it has failed; only once.
          ReplicaError: If processes held different copies of the state; nothing is written then.
        """
        if self._pending is None:
            return
        try:
            self.saved_step = self._pending.result()
        except Exception:  # an interrupt only ends the wait
            self._pending = None
            raise
        self._pending = None

    def close(self) -> None:
        """Waits for the pending save and releases the folder."""
        if self._abandoned:
            return
        try:
            self.wait()
        finally:
            # No interrupt ends this wait: once the lock is released, a second owner may open the
            # folder.
            released, interrupt = self._owner.submit(self._release), None
            while not released.done():
                try:
                    futures.wait([released])
                except KeyboardInterrupt as error:
                    interrupt = error
            self._owner.shutdown()
            released.result()
            if interrupt is not None:
                raise interrupt

    def _release(self) -> None:
        """Closes Orbax' manager, and removes what a failed save and the removal have left."""
        # After a failure, Orbax raises the same error again.
        with contextlib.suppress(Exception) if self._failed else contextlib.nullcontext():
            if self._manager is not None:
                self._manager.close()
        if self._failed and self._folder_identity() == self._opened:
            time.sleep(0.5)  # Orbax does not wait for threads that are still writing
            self._remove_unfinished()
        self._remover.shutdown()
        if not is_url(self.folder):
            with contextlib.suppress(OSError):  # absent, or not empty: left to the next start
                os.rmdir(self.folder / _REMOVED)

    def abandon(self) -> None:
        """Releases the folder without waiting, because other processes of the job may be lost."""
        self._pending = None
        self._owner.shutdown(wait=False)
        self._remover.shutdown(wait=False)
        self._abandoned = True

    def holds(self, step: int) -> bool:
        """Returns whether there is a complete checkpoint of a step."""
        return process_group.broadcast(step in self._records)

    def quarantine(
        self, steps: Sequence[int], kind: Literal["corrupted", "suspect"] = "corrupted"
    ) -> list[str]:
        """Quarantines checkpoints: renames them, so that they are ignored. Returns the new names.

        `kind` follows the step in the name: "corrupted", or "suspect" after a device fault.
        """
        names: list[str] = []
        with self._storage_errors(f"a {kind} checkpoint could not be renamed"):
            if steps and process_group.is_chief():
                names = self._by_owner(self._quarantine, _Quarantine(steps=list(steps), kind=kind))
            names = process_group.broadcast(names)
            self.saved_step = process_group.broadcast(max(self._records, default=0))
            if self._manager is not None:
                self._by_owner(self._manager.reload)
        return names

    def _quarantine(self, wanted: "_Quarantine") -> list[str]:
        """Records which checkpoints are quarantined, and renames them; returns their new names."""
        self._check_lock()
        intent = json.dumps(wanted).encode()
        no_follow.write(self.folder, _QUARANTINE, lambda file: file.write(intent))
        return self._complete_quarantine()

    def _complete_quarantine(self) -> list[str]:
        """Renames the checkpoints that are to be quarantined; returns their new names."""
        if (wanted := self._intent(_QUARANTINE, _Quarantine)) is None:
            return []
        names = []
        for step in wanted["steps"]:
            taken = {path.name for path in self.folder.iterdir()}
            candidates = (f"{step}.{wanted['kind']}{n}" for n in ("", *range(2, len(taken) + 3)))
            name = next(name for name in candidates if name not in taken)
            if str(step) in taken:
                rename_folder(self.folder / str(step), self.folder / name)
                names.append(name)
            self._records.pop(step, None)
        (self.folder / _QUARANTINE).unlink()
        return names

    def _complete_retention(self) -> None:
        if (wanted := self._intent(_RETENTION, _Replaced)) is None:
            return
        self._check_lock()
        if wanted["by"] in self._records:
            for step in {*wanted["steps"]} & {*steps_in(self.folder)}:
                if is_url(self.folder):
                    (self.folder / str(step)).rmtree()
                else:  # renamed, so that a kill leaves no part of it
                    (self.folder / _REMOVED).mkdir(exist_ok=True)
                    with contextlib.suppress(FileNotFoundError):
                        no_follow.remove(self.folder, f"{_REMOVED}/{step}")
                    (self.folder / str(step)).rename(self.folder / _REMOVED / str(step))
                self._records.pop(step, None)
        (self.folder / _RETENTION).unlink()
        self._remover.submit(self._remove)

    def _intent(self, name: str, kind: type[T]) -> T | None:
        """Returns the content of a file that says what a start has to complete."""
        path = self.folder / name
        try:
            content = parse_object(read_bytes(path))
            check(content, kind, name)
        except FileNotFoundError:
            return None
        except Malformed as error:
            raise UserError(f"{path} is malformed ({error}): remove it") from error
        return cast(T, content)

    # -- manifest ------------------------------------------------------------------------------

    def _seal(self) -> None:
        """Writes the manifest. Orbax calls this after all arrays are written, before the rename."""
        save = self._saving
        assert save is not None
        with progress.sealing(save.step):
            save.wait_for_files()
            self._check_lock()
            unpublished = (f"{save.step}", f"{save.step}{_UNFINISHED}")  # URLs, local paths
            folders = (
                path
                for path in self.folder.iterdir()
                if path.name.startswith(unpublished[1]) or path.name == unpublished[0]
            )
            if (folder := next(folders, None)) is None:
                raise FileNotFoundError(f"the unfinished checkpoint of step {save.step} is missing")
            stream = write_positions(folder, save.positions)
            Manifest(
                step=save.step,
                saved_at=save.saved_at.isoformat(timespec="seconds"),
                identity=save.identity,
                metrics=None if save.metrics is None else dict(save.metrics),
                stopped=save.stopped,
                sums=format_sums(save.sums),
                files=manifest.sizes(folder),
                epoch=save.epoch,
                callbacks=save.callbacks,
                stream=stream,
            ).write(folder)
            if save.replaces:
                intent = json.dumps({"by": save.step, "steps": save.replaces}).encode()
                no_follow.write(self.folder, _RETENTION, lambda file: file.write(intent))

    # -- retention -----------------------------------------------------------------------------

    def _keep(self, steps: Sequence[int]) -> list[bool]:
        records = list(self._records.values())
        if self._evaluated is None:
            kept = self._retention.keep(records)
        else:
            kept = self._retention.keep_evaluated(records, self._evaluated())
        # A checkpoint without a manifest is not from this package: it is ignored and kept.
        keeps = [step in kept or step not in self._records for step in steps]
        assert self._saving is not None
        self._saving.replaces = sorted(self._records.keys() - kept)
        self._records = {step: record for step, record in self._records.items() if step in kept}
        return keeps

    def _record(self, step: int) -> CheckpointRecord | None:
        try:
            saved = Manifest.read(self.folder / str(step))
        except CheckpointCorruptedError:
            return None
        saved_at = datetime.datetime.fromisoformat(saved.saved_at)
        trajectory = saved.identity.trajectory_at(step)
        return CheckpointRecord(step, saved_at, saved.metrics, trajectory)

    # -- failures ------------------------------------------------------------------------------

    def _after_failure(self, save: "_Save", error: Exception) -> StorageError | None:
        """Cleans up after a failed save; returns the error for users if the storage has failed."""
        self._failed = True
        reason = why_failed(error, self.folder)
        if self._folder_identity() == self._opened:
            self._remove_unfinished()
        if (self.folder / str(save.step) / manifest.NAME).exists():
            self.saved_step = save.step
            failure = f"step {save.step} is saved, but an older one could not be removed,"
        else:
            self._records.pop(save.step, None)
            failure = f"step {save.step} could not be saved"
        return None if reason is None else StorageError(f"{failure} in {self.folder}: {reason}")

    @contextlib.contextmanager
    def _storage_errors(self, failure: str) -> Iterator[None]:
        """Raises errors of the storage as `StorageError`."""
        try:
            yield
        except Exception as error:
            if (reason := why_failed(error, self.folder)) is None:
                raise
            raise StorageError(f"{failure} in {self.folder}: {reason}") from error

    def _folder_identity(self) -> tuple[int, int] | None:
        """Returns device and inode of the folder, to detect a replacement; None if it is absent."""
        if is_url(self.folder):
            return None
        try:
            status = os.stat(self.folder)
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino

    def _remove_unfinished(self) -> None:
        """Removes unfinished checkpoints, to free the space of a failed save."""
        if not process_group.is_chief():
            return
        with contextlib.suppress(failures(self.folder)):
            for path in self.folder.iterdir():
                if is_unfinished(path.name):
                    with contextlib.suppress(failures(self.folder)):  # the next start tries again
                        if is_url(path):
                            path.rmtree()
                        else:
                            no_follow.remove(self.folder, path.name)

    def _remove(self) -> None:
        """Deletes the checkpoints that Orbax has moved to `_REMOVED`, also in an earlier start."""
        for name in self._removed() if process_group.is_chief() else ():
            with contextlib.suppress(OSError):  # the next start tries again
                no_follow.remove(self.folder, f"{_REMOVED}/{name}")

    def _removed(self) -> list[str]:
        """Returns the names of the checkpoints that Orbax has moved to `_REMOVED`."""
        if is_url(self.folder):
            return []
        try:
            return list(no_follow.names_in(self.folder, _REMOVED))
        except FileNotFoundError:
            return []


class _Quarantine(TypedDict):
    """The content of the file `_QUARANTINE`."""

    steps: list[int]
    kind: Literal["corrupted", "suspect"]


class _Replaced(TypedDict):
    """The content of the file `_RETENTION`."""

    by: int
    steps: list[int]


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _by_field(items: Mapping[str, Mapping[str, PyTree]]) -> dict[str, PyTree]:
    """Returns the fields of all items."""
    return {field: x for item in items.values() for field, x in item.items()}


@dataclass
class _Save:
    """A pending save."""

    step: int
    saved_at: datetime.datetime
    identity: Identity
    metrics: Mapping[str, float] | None
    stopped: bool
    epoch: Mapping[str, Any]
    callbacks: Mapping[str, Any]
    positions: dict[str, str]
    """Positions of the shards of a stream that this process reads; in process 0, later of all
    shards."""
    wait_for_files: Callable[[], None]
    sums: dict[str, int] = field(default_factory=dict)
    """In process 0, the checksum of each array by its path, once it is known."""
    replaces: list[int] = field(default_factory=list)
    """In process 0, the steps of the checkpoints to remove after this one is published."""
    is_read: threading.Event = field(default_factory=threading.Event)
    """Set once the arrays may be donated, or the save has failed."""


# -- The check that all processes of a job share a folder ------------------------------------------

_MARKER = ".shared-"
_VISIBLE_WITHIN = 45.0  # seconds until a new file is visible on a network file system


def check_shared(folder: Path) -> None:
    """Checks that all processes of the job share an existing local folder.

    Otherwise each would write its part of a checkpoint to its own folder, and no checkpoint would
    be complete. Raises `UserError` if a process has another folder at this path than process 0.
    """
    name = process_group.broadcast(f"{_MARKER}{secrets.token_hex(8)}")
    marker = folder / name
    if process_group.is_chief():
        for left in sorted(folder.glob(f"{_MARKER}*")):  # by a start that was killed here
            no_follow.remove(folder, left.name)
        no_follow.create(folder, name).close()
    process_group.barrier()

    def check() -> None:
        deadline = time.monotonic() + _VISIBLE_WITHIN
        while not marker.exists():
            if time.monotonic() > deadline:
                raise UserError(
                    f"{folder} in {process_group.name()} is not the folder that "
                    f"{process_group.names()[0]} has there: use a workdir that all processes share"
                )
            time.sleep(0.2)

    try:
        process_group.run_on_all(check, UserError)
    finally:
        if process_group.is_chief():
            marker.unlink()

"""Callback that copies each complete checkpoint to another place."""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from etils import epath

from spmdtrain.checkpoints.manifest import NAME as MANIFEST
from spmdtrain.checkpoints.manifest import steps_in
from spmdtrain.distributed import process_group
from spmdtrain.distributed.progress import CONTEXT
from spmdtrain.errors import UserError
from spmdtrain.record.storage import absolute, folder_of, is_url, one_line
from spmdtrain.record.validation import check
from spmdtrain.train.callbacks import CallbackContext

_CHECK_INTERVAL = 0.5  # seconds between two checks whether a save is complete
_SIGNAL_INTERVAL = 0.1  # seconds between two checks whether a signal has arrived
_REMEMBERED = 1000  # uploaded checkpoints in the state; most older ones are removed by then
_COMMITTED = "commit_success.txt"  # makes a checkpoint in a bucket complete, for Orbax


class UploadCheckpoints:
    """Uploads each complete checkpoint in a thread of process 0, while the training continues.

    An upload that fails is repeated; if it keeps failing, a line names the checkpoint and the
    reason, and the training continues. The end of the run waits for the uploads. Those that an
    interruption has cut off are repeated by the next start.

    Args:
      destination: A folder or URL, which gets a folder STEP for each checkpoint; or a function
        (path of the checkpoint, step) that uploads it. It may be called again for a checkpoint
        that it has uploaded, if the run is interrupted before its next save.
      attempts: Number of attempts for each checkpoint.
      pause: Seconds before the second attempt, twice as many before the third, and so on.

    Raises:
      UserError: If an argument is wrong.
    """

    name = "UploadCheckpoints"

    def __init__(
        self,
        destination: str | Callable[[epath.Path, int], None],
        *,
        attempts: int = 3,
        pause: float = 5.0,
    ) -> None:
        if attempts < 1 or pause < 0:
            raise UserError("UploadCheckpoints: attempts must be 1 or more, and pause 0 or more")
        if not callable(destination) and not isinstance(destination, (str, os.PathLike)):
            raise UserError(
                f"UploadCheckpoints: destination is {destination!r}: it must be a folder, a URL or "
                "a function of the checkpoint's path and its step"
            )
        if callable(destination):
            self._upload, self._where = destination, getattr(destination, "__name__", "a function")
        else:
            target = absolute(folder_of(destination))
            self._upload = lambda path, step: copy_checkpoint(path, target / str(step))
            self._where = str(target)
        self._attempts, self._pause = attempts, pause
        self._steps: queue.Queue[int | None] = queue.Queue()
        self._uploaded: set[int] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def fit_start(self, event: CallbackContext) -> None:
        """Starts the thread, and uploads checkpoints that an earlier start did not upload.

        Args:
          event: The event.

        Raises:
          UserError: If the run cannot have this callback.
        """
        workdir = event.trainer.config.workdir
        if workdir is None:
            raise UserError("UploadCheckpoints needs a workdir: without one nothing is saved")
        if not process_group.is_chief():
            return
        folder = absolute(folder_of(workdir)) / "checkpoints"
        self._steps.put(None)  # ends the thread of an earlier fit that has failed
        self._steps = queue.Queue()
        with self._lock:
            missing = [s for s in steps_in(folder) if s not in self._uploaded and s <= event.step]
        for step in missing:
            self._steps.put(step)
        # A daemon, because a run that is stopped by a signal has to end in time.
        self._thread = threading.Thread(
            target=self._work,
            args=(folder, self._steps, event.trainer.terminal.warning),
            name="upload-checkpoints",
            daemon=True,
        )
        self._thread.start()

    def checkpoint(self, event: CallbackContext) -> None:
        """Uploads the checkpoint once it is complete: its save has only begun.

        Args:
          event: The event.
        """
        self._steps.put(event.step)

    def fit_end(self, event: CallbackContext) -> None:
        """Waits for the uploads, until a signal asks to stop if a single process trains.

        Args:
          event: The event.
        """
        if self._thread is None:
            return
        self._steps.put(None)
        terminal = event.trainer.terminal
        with terminal.waiting("uploading checkpoints"):
            while self._thread.is_alive() and CONTEXT.stop_request.signal is None:
                self._thread.join(_SIGNAL_INTERVAL)
        if self._thread.is_alive():
            terminal.warning(
                f"uploads to {self._where} are not complete, because this process was asked to "
                "stop: the same command, run again, continues them"
            )
        self._thread = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the steps of the uploaded checkpoints."""
        with self._lock:
            return {"uploaded": sorted(self._uploaded)[-_REMEMBERED:]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a state that `state_dict` returned.

        Args:
          state: The state.
        """
        check(state, dict[str, list[int]], self.name)
        with self._lock:
            self._uploaded = set(state["uploaded"])

    # -- in the thread -------------------------------------------------------------------------

    def _work(
        self, folder: epath.Path, steps: "queue.Queue[int | None]", warn: Callable[[str], None]
    ) -> None:
        while (step := steps.get()) is not None:
            try:
                if self._await_save(folder, step, steps):
                    self._attempt(folder / str(step), step)
                    with self._lock:
                        self._uploaded.add(step)
                    continue
                why = "it was removed before, or was never complete"
            except Exception as error:  # of the user's function, or of any storage
                why = "it was removed during the upload"
                if _may_exist(folder / str(step)):
                    why = one_line(error)
            warn(f"checkpoint {step} was not uploaded to {self._where}: {why}")

    def _await_save(self, folder: epath.Path, step: int, steps: "queue.Queue[int | None]") -> bool:
        """Waits until a checkpoint is complete; returns False if it does not exist any more."""
        while step not in (complete := steps_in(folder)):
            if any(later > step for later in complete) or not steps.empty():
                # A later save, or the end of the run, waits for this one.
                return step in steps_in(folder)
            time.sleep(_CHECK_INTERVAL)
        return True

    def _attempt(self, path: epath.Path, step: int) -> None:
        for attempt in range(1, self._attempts + 1):
            try:
                return self._upload(path, step)
            except Exception:
                if attempt == self._attempts or not _may_exist(path):
                    raise
            time.sleep(self._pause * 2 ** (attempt - 1))


def copy_checkpoint(source: epath.Path, target: epath.Path) -> None:
    """Copies the folder of a complete checkpoint. The copy is complete once it has its manifest.

    A target that is complete already is left as it is.
    """
    manifest = target / MANIFEST
    if manifest.exists() and manifest.read_bytes() == (source / MANIFEST).read_bytes():
        return
    with contextlib.suppress(FileNotFoundError):
        manifest.unlink()
    last = (MANIFEST, _COMMITTED)
    names = sorted(_files(source), key=lambda name: last.index(name) if name in last else -1)
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).copy(target / name, overwrite=True)
    if is_url(target) and _COMMITTED not in names:
        (target / _COMMITTED).write_text(f"Checkpoint commit was successful to {target}")


def _may_exist(path: epath.Path) -> bool:
    """Returns False if a path does not exist, and True if that cannot be found out."""
    try:
        return path.exists()
    except Exception:
        return True


def _files(folder: epath.Path, prefix: str = "") -> Iterator[str]:
    for path in folder.iterdir():
        if path.is_dir():
            yield from _files(path, f"{prefix}{path.name}/")
        else:
            yield prefix + path.name

"""The trackers of a run."""

import contextlib
import importlib.util
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import PurePath
from typing import Any

from spmdtrain.config.run_config import RunConfig
from spmdtrain.distributed import process_group
from spmdtrain.errors import UserError, foreign
from spmdtrain.record.run_files import RunFiles, Split, Status, Writer
from spmdtrain.record.storage import failures, one_line
from spmdtrain.record.validation import Malformed, check, parse_object, read_bytes
from spmdtrain.trackers.base import RunInfo, Tracker
from spmdtrain.trackers.media import Histogram, Image, Media
from spmdtrain.trackers.media_files import MediaFiles
from spmdtrain.trackers.mlflow import MlflowTracker
from spmdtrain.trackers.pending_media import PendingMedia
from spmdtrain.trackers.png import check_pillow
from spmdtrain.trackers.tensorboard import TensorBoardTracker, import_writer
from spmdtrain.trackers.trackio import TrackioTracker
from spmdtrain.trackers.wandb import WandbTracker
from spmdtrain.trackers.worker import TrackerCall, TrackerWorker, wait_for_all

_SHIPPED: Mapping[str, tuple[type[Tracker], str]] = {
    "wandb": (WandbTracker, "wandb"),
    "mlflow": (MlflowTracker, "mlflow"),
    "trackio": (TrackioTracker, "trackio"),
}
"""Class and library of the trackers of the option `trackers`; the extras have the same names."""
_MEDIA_SIZE = 100  # of a call with media, in the size of a call with metrics
_LARGEST_FILE = 2**20  # bytes of trackers.json
_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_FLUSH_TIMEOUT = 10.0  # seconds
_PREEMPTED_TIMEOUT = 10.0  # seconds; a machine that is taken away leaves about 30
_VERSION = sys.version_info[:3]
MUST_IMPORT_FIRST = (3, 11) <= _VERSION < (3, 11, 8) or (3, 12) <= _VERSION < (3, 12, 2)
"""True if `ast.parse` may raise SystemError because another thread calls it at the same time ("AST
constructor recursion depth mismatch", python/cpython#106905). The import of W&B calls it for each
of its models, and JAX calls it now and then."""
IMPORTED_FIRST: Mapping[type[Tracker], str] = {
    WandbTracker: "wandb.apis.public",  # `wandb.init` imports it, and it imports all models
    MlflowTracker: "mlflow",
    TrackioTracker: "trackio",
}
"""The modules that are imported before the threads start, if `MUST_IMPORT_FIRST`."""


def choose_trackers(names: Sequence[str], own: Sequence[Tracker]) -> list[Tracker]:
    """Returns the trackers of a run, except TensorBoard's.

    `names` is the option `trackers`. A user's tracker with the name of a shipped one replaces it.
    Raises `UserError` if a library is missing, or a tracker is not a `Tracker`.
    """
    check_trackers(own)
    replaced = {tracker.name for tracker in own}
    found = []
    for name in dict.fromkeys(names):
        if name in replaced or name not in _SHIPPED:
            continue
        made, library = _SHIPPED[name]
        if importlib.util.find_spec(library) is None:
            raise UserError(
                f"trackers has {name!r}, and {library} is not installed: pip install "
                f"'spmdtrain[{name}]'"
            )
        found.append(made())
    chosen = [*found, *own]
    if MUST_IMPORT_FIRST:
        for kind, module in IMPORTED_FIRST.items():
            if any(isinstance(tracker, kind) for tracker in chosen):
                # In the tracker's thread, the import raises its exception again: printed there.
                with contextlib.suppress(Exception):
                    importlib.import_module(module)
    return chosen


def check_trackers(own: Sequence[Tracker]) -> None:
    """Raises `UserError` unless the user's trackers are `Tracker`s with different names."""
    for number, tracker in enumerate(own):
        if not isinstance(tracker, Tracker):
            kind = tracker.__name__ if isinstance(tracker, type) else type(tracker).__name__
            raise UserError(
                f"trackers[{number}] is {kind!r}: it must be an object of a subclass of Tracker"
            )
    names = [tracker.name for tracker in own]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"two trackers have the name {twice[0]!r}: give one another `name`")


def open_trackers(
    config: RunConfig, own: Sequence[Tracker], files: RunFiles | None, log: Callable[[str], None]
) -> "RunTrackers":
    """Returns the trackers of a training run; only those of process 0 record anything.

    `own` are the user's trackers; `files` is None without a workdir. Raises `UserError` if a
    library is missing, or a tracker is not a `Tracker`.
    """
    if not process_group.is_chief():
        check_trackers(own)
        return RunTrackers.none()
    events = TensorBoardTracker.name
    writes_events = events in config.trackers and events not in {each.name for each in own}
    return RunTrackers(
        choose_trackers(config.trackers, own),
        files,
        log,
        event_files=events if writes_events else None,
        writes_media=True,
    )


def evaluator_trackers(
    config: RunConfig, files: RunFiles, log: Callable[[str], None]
) -> "RunTrackers":
    """Returns the trackers of an evaluator: TensorBoard, in a folder of its own.

    TensorBoard follows only one file in each folder. Other trackers take one writer for each run,
    which is the training.
    """
    if others := [name for name in config.trackers if name != "tensorboard"]:
        log(f"evaluator: writes to TensorBoard alone, not to {', '.join(others)}")
    has_events = "tensorboard" in config.trackers
    folder = Writer.EVALUATOR.file("tensorboard") if has_events else None
    return RunTrackers((), files, log, event_files=folder)


class RunTrackers:
    """Passes metrics and media of a run to its trackers, each in its own thread.

    Args:
      trackers: The trackers, besides TensorBoard's and the files of media.
      files: The files of the workdir; None without one.
      event_files: Name of TensorBoard's folder in the workdir; None to write none.
      writes_media: Whether media are written to the workdir.
    """

    def __init__(
        self,
        trackers: Sequence[Tracker],
        files: RunFiles | None,
        log: Callable[[str], None],
        *,
        event_files: str | None = None,
        writes_media: bool = False,
    ) -> None:
        self._files, self._log = files, log
        self._lock = threading.Lock()
        self._ids: dict[str, str] = {}
        self.status = Status.FAILED
        """The status at the end; until it is known, the status of an unexpected end."""
        given = list(trackers)
        self._writes_events = files is not None and event_files is not None
        if files is not None and event_files is not None:
            given.insert(0, TensorBoardTracker(event_files))
        self._trackers = [TrackerWorker(tracker, log) for tracker in given]
        # The files of media have no metrics, which are in `metrics.jsonl`.
        media = [MediaFiles()] if files is not None and writes_media else []
        self._workers = [*(TrackerWorker(tracker, log) for tracker in media), *self._trackers]

    @classmethod
    def none(cls) -> "RunTrackers":
        """Returns the trackers of a process that records nothing."""
        return cls((), None, lambda line: None)

    def start(self, step: int, config: Mapping[str, Any]) -> None:
        """Starts the trackers of a run that starts from `step`.

        `config` is the resolved configuration, as JSON values.
        """
        files = self._files
        if self._writes_events:
            import_writer()  # in this thread: for a moment it hides a module from other imports
        self._ids = {} if files is None else self._read_ids(files)
        workdir = None if files is None else str(files.folder)
        for worker in self._workers:
            run = RunInfo(
                name=PurePath(workdir).name if workdir else "run",
                workdir=workdir,
                folder=None if files is None else files.local,
                step=step,
                earlier=self._ids.get(worker.tracker.name),
                config=config,
            )
            worker.add(TrackerCall("its start", partial(self._start, run)))

    def _start(self, run: RunInfo, tracker: Tracker) -> None:
        """Starts a tracker, in its thread, and keeps its id."""
        found = tracker.start(run)
        if found is None or found == run.earlier:
            return
        if not isinstance(found, str) or not _ID.fullmatch(found):
            raise ValueError(f"start() returned {found!r}: an id has letters, digits and ._- only")
        if run.earlier is not None:
            self._log(f"{tracker.name}: run {run.earlier} was not found, so {found} begins")
        if self._files is not None:
            with self._lock:
                self._ids[tracker.name] = found
                self._files.write_report("trackers", self._ids)

    def _read_ids(self, files: RunFiles) -> dict[str, str]:
        """Returns the ids of an earlier start. Another user may have written the file."""
        path = files.folder / "trackers.json"
        try:
            content = parse_object(read_bytes(path, _LARGEST_FILE))
            check(content, dict[str, str], "trackers.json")
            for name, value in content.items():
                if not _ID.fullmatch(value):
                    raise Malformed(f"{name}: {value!r} is not an id")
        except FileNotFoundError:
            return {}
        except Malformed as error:
            self._log(f"{path} is not valid, so trackers begin new runs: {error}")
            return {}
        except failures(path) as error:
            self._log(f"{path} cannot be read, so trackers begin new runs: {one_line(error)}")
            return {}
        return content

    def scalars(
        self,
        step: int,
        values: Mapping[str, float],
        counts: Mapping[str, Mapping[int, int]] | None = None,
    ) -> None:
        """Records the metrics of a step by tag.

        `counts` has the count of each integer by tag, recorded as histograms.
        """
        given = dict(values)

        def record(tracker: Tracker) -> None:
            tracker.scalars(step, given)
            for tag, count in (counts or {}).items():
                tracker.histogram(step, tag, Histogram.of_integers(count))

        for worker in self._trackers:
            worker.add(TrackerCall(f"metrics of step {step}", record))

    def media(self, step: int, split: Split, items: Mapping[str, Media]) -> None:
        """Records media by name, which have been checked.

        Their arrays are fetched in the threads of the trackers. Raises `UserError` if Pillow is
        missing, which writes images.
        """
        if not self._workers:
            return
        if any(isinstance(item, Image) for item in items.values()):
            check_pillow()
        for name, media in items.items():
            pending = PendingMedia(media, f"{name} of step {step}", self._log)
            tag = f"{split}/{name}"

            def record(tracker: Tracker, tag: str = tag, pending: PendingMedia = pending) -> None:
                if (found := pending.on_host()) is not None:
                    getattr(tracker, found.kind)(step, tag, found)

            self._add(TrackerCall(f"{name} of step {step}", record, _MEDIA_SIZE))

    def artifact(self, path: str, name: str) -> None:
        """Records a file, which must not change until the end of the run."""
        absolute = os.path.abspath(path)
        self._add(TrackerCall(f"artifact {name}", lambda tracker: tracker.artifact(absolute, name)))

    def rewind(self, step: int) -> None:
        """Prepares the trackers for steps after `step` that are recorded again."""
        self._add(TrackerCall(f"rewind to step {step}", lambda tracker: tracker.rewind(step)))

    def flush(self) -> Callable[[], None]:
        """Queues a flush of the workdir's own files; the result waits for it, at most 10 s."""
        own = (MediaFiles, TensorBoardTracker)
        waits = [worker.flush() for worker in self._workers if isinstance(worker.tracker, own)]

        def wait() -> None:
            for each in waits:
                each(_FLUSH_TIMEOUT)

        return wait

    def _add(self, call: TrackerCall) -> None:
        for worker in self._workers:
            worker.add(call)

    def close(self, timeout: float | None = None) -> None:
        """Ends the trackers; waits up to the `close_timeout` of each, and at most `timeout` s."""
        if timeout is None and self.status is Status.PREEMPTED:
            timeout = _PREEMPTED_TIMEOUT
        for worker in self._workers:
            worker.end(self.status)
        wait_for_all(self._workers, timeout)


def check_items(items: Any, what: str) -> None:
    """Checks the names and the content of media by name; raises `UserError` if one is not valid.

    `what` is the function that received them, for messages.
    """
    if not isinstance(items, Mapping):
        raise UserError(
            f"{what} got a {type(items).__name__}: it takes media by name, for example "
            '{"samples": Image(images)}'
        )
    for name, media in items.items():
        if not isinstance(name, str) or not 1 <= len(name) <= 100:
            raise UserError(f"{what}: the name {name!r} must be text of 1 to 100 characters")
        if "/" in name or "\\" in name or name in (".", "..") or foreign(name, 100) != name:
            raise UserError(
                f"{what}: the name {name!r} must not have /, \\ or unprintable characters"
            )
        _check_media(name, media, what)


def _check_media(name: str, media: Any, what: str) -> None:
    if not isinstance(media, Media):
        hint = ""
        if isinstance(media, (int, float)) or getattr(media, "shape", None) == ():
            hint = (
                "; numbers are metrics: add them to event.metrics in a log or evaluation callback"
            )
        raise UserError(
            f"{what}: {name!r} is a {type(media).__name__}: it must be an Image, Text, Histogram, "
            f"Table or Figure{hint}"
        )
    try:
        media.check()
    except UserError as error:
        raise UserError(f"{what}: {name!r}: {error}") from None

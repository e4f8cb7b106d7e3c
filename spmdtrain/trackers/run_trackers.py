"""The trackers of a run, their threads, and the files of its media."""

import contextlib
import hashlib
import importlib
import json
import math
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Any

from etils import epath

from spmdtrain.config.run_config import RunConfig
from spmdtrain.distributed import process_group
from spmdtrain.errors import UserError, did_you_mean, foreign
from spmdtrain.record import no_follow
from spmdtrain.record.run_files import MEDIA_LINES, RunFiles, Split, Status, Writer
from spmdtrain.record.storage import failures, one_line
from spmdtrain.record.validation import LARGEST_LOG, Malformed, check, parse_object, read_bytes
from spmdtrain.trackers.base import (
    Figure,
    Histogram,
    Image,
    Media,
    PendingMedia,
    RunInfo,
    Table,
    Text,
    Tracker,
    check_pillow,
    encode_png,
    make_tracker,
)

# -- The thread of a tracker, with a bounded queue of calls ----------------------------------------

MAX_PENDING = 10_000
"""Sum of the sizes of pending calls."""
PAUSE = 0.2
"""Seconds for which the thread collects calls after it has made the pending ones. Waking it for
each line of the log, and flushing a file for each, took a tenth of a small network's time."""


@dataclass(frozen=True)
class TrackerCall:
    """A call of a tracker.

    Attributes:
      what: What it records, for messages: `metrics of step 20`.
      size: 1 for a few numbers, more for larger content.
    """

    what: str
    run: Callable[[Tracker], object]
    size: int = 1


_DONE = TrackerCall("", lambda tracker: None)


class TrackerWorker:
    """Calls a tracker in a thread of its own, so that training never waits for it.

    The tracker's first exception is printed, and later calls are dropped. Calls that are added
    while too many are pending are dropped, too.
    """

    def __init__(self, tracker: Tracker, log: Callable[[str], None]) -> None:
        self.tracker = tracker
        self._log = log
        self._queue: queue.SimpleQueue[TrackerCall | Status] = queue.SimpleQueue()
        self._pending = 0  # sum of sizes
        self._dropped = 0
        self._lock = threading.Lock()
        self._current = ""  # what the thread is doing
        self._begun = self._failed = self._over = False
        self._hurry = threading.Event()  # ends the pause
        self._thread = threading.Thread(
            target=self._run, name=f"tracker {tracker.name}", daemon=True
        )
        self._thread.start()

    def add(self, call: TrackerCall) -> None:
        """Queues a call, or drops it if the tracker has failed or too many calls are pending."""
        if self._failed or self._over:
            return
        with self._lock:
            is_full = self._pending + call.size > MAX_PENDING
            if is_full:
                self._dropped += 1
            else:
                self._pending += call.size
        if not is_full:
            self._queue.put(call)
        elif self._dropped == 1:
            self._log(
                f"{self.tracker.name}: slower than the run, so calls are dropped, the first of "
                f"them {call.what}"
            )

    def end(self, status: Status) -> None:
        """Queues the end of the tracking; further calls are dropped."""
        if not self._over:
            self._over = True
            self._queue.put(status)
            self._hurry.set()

    def flush(self) -> Callable[[float], None]:
        """Queues a flush; returns a function that waits until all earlier calls are written.

        The function takes the largest number of seconds to wait.
        """
        done = threading.Event()

        def flush(tracker: Tracker) -> None:
            tracker.flush()
            if not self._over:
                self._hurry.clear()
            done.set()

        def wait(seconds: float) -> None:
            until = time.monotonic() + seconds
            while is_queued and not self._failed and time.monotonic() < until:
                if done.wait(0.05):
                    return

        is_queued = not (self._failed or self._over)
        if is_queued:
            self._hurry.set()  # first, because the call clears it
            self._queue.put(TrackerCall("a flush", flush, 0))
        return wait

    def wait(self, timeout: float, spent: float = 0.0) -> None:
        """Waits until the tracker is closed, and prints what is lost if it takes too long.

        `spent` seconds of `timeout` have passed already.
        """
        name = self.tracker.name
        self._thread.join(max(0.0, timeout - spent))
        if self._thread.is_alive() and not self._failed:
            self._failed = True
            left = max(0, self._queue.qsize() - 1)  # without the end
            lost = f"{self._current} and {left} later calls are" if left else f"{self._current} is"
            self._log(f"{name}: not done after {timeout:g} s: {lost} lost")
        if self._dropped:
            self._log(f"{name}: {self._dropped:,} calls were dropped")
            self._dropped = 0

    def _run(self) -> None:
        while True:
            call = self._queue.get()
            if isinstance(call, Status):
                self._close(call)
                return
            self._current, self._begun = call.what, True
            is_last = False
            try:
                if not self._failed:
                    call.run(self.tracker)
                    if is_last := self._queue.empty():
                        self.tracker.flush()
            except BaseException as error:  # also a SystemExit, which would end the thread
                self._fail(error)
            # Freed before the next call arrives, because it may hold arrays of the devices.
            size, call = call.size, _DONE
            with self._lock:
                self._pending -= size
            if is_last:
                self._hurry.wait(PAUSE)

    def _close(self, status: Status) -> None:
        if not self._begun:  # the run failed before its start
            return
        self._current = "its end"
        try:
            self.tracker.close(status)
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Prints the first failure."""
        if self._failed:
            return
        self._failed = True
        text = foreign(" ".join(str(error).split()), 300)
        what = self._current
        self._log(
            f"{self.tracker.name}: {what}: {type(error).__name__}: {text}; the run continues "
            "without it"
        )


# -- The trackers of a run -------------------------------------------------------------------------

_MEDIA_SPLITS = (Split.TRAIN, Split.EVAL, Split.TEST)
_MEDIA_SIZE = 100  # of a call with media, in the size of a call with metrics
_LARGEST_FILE = 2**20  # bytes of trackers.json
_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_FLUSH_TIMEOUT = 10.0  # seconds
_PREEMPTED_TIMEOUT = 10.0  # seconds; a machine that is taken away leaves about 30
_VERSION = sys.version_info[:3]
MUST_IMPORT_FIRST = (3, 11) <= _VERSION < (3, 11, 8) or (3, 12) <= _VERSION < (3, 12, 2)
"""True if `ast.parse` may raise SystemError because another thread calls it at the same time ("AST
constructor recursion depth mismatch", python/cpython#106905). The import of W&B calls it for each
of its models, and JAX calls it now and then. The modules that trackers import are then imported
before the threads start."""
_EVENTS = "tensorboard"  # the only tracker of an evaluator


def choose_trackers(
    names: Sequence[str], own: Sequence[Tracker], *, has_workdir: bool
) -> list[Tracker]:
    """Returns the trackers of a run.

    `names` is the option `trackers`. A user's tracker with the name of another one replaces it.
    Raises `UserError` if a tracker is not found or not a `Tracker`, or if its library is missing.
    """
    check_trackers(own)
    replaced = {tracker.name for tracker in own}
    named = [make_tracker(name) for name in dict.fromkeys(names) if name not in replaced]
    chosen = [each for each in (*named, *own) if has_workdir or not each.in_workdir]
    if MUST_IMPORT_FIRST:
        for module in {tracker.imports for tracker in chosen if tracker.imports}:
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

    `own` are the user's trackers; `files` is None without a workdir. Raises `UserError` as
    `choose_trackers` does.
    """
    if not process_group.is_chief():
        check_trackers(own)
        return RunTrackers.none()
    chosen = choose_trackers(config.trackers, own, has_workdir=files is not None)
    return RunTrackers(chosen, files, log, writes_media=True)


def evaluator_trackers(
    config: RunConfig, files: RunFiles, log: Callable[[str], None]
) -> "RunTrackers":
    """Returns the trackers of an evaluator: TensorBoard, in a folder of its own.

    TensorBoard follows only one file in each folder. Other trackers take one writer for each run,
    which is the training.
    """
    if others := [name for name in config.trackers if name != _EVENTS]:
        log(f"evaluator: writes to TensorBoard alone, not to {', '.join(others)}")
    has_events = _EVENTS in config.trackers
    folder = Writer.EVALUATOR.file(_EVENTS)
    return RunTrackers([make_tracker(_EVENTS, folder)] if has_events else [], files, log)


class RunTrackers:
    """Passes metrics and media of a run to its trackers, each in its own thread.

    Args:
      trackers: The trackers, besides the files of media.
      files: The files of the workdir; None without one.
      writes_media: Whether media are written to the workdir.
    """

    def __init__(
        self,
        trackers: Sequence[Tracker],
        files: RunFiles | None,
        log: Callable[[str], None],
        *,
        writes_media: bool = False,
    ) -> None:
        self._files, self._log = files, log
        self._lock = threading.Lock()
        self._ids: dict[str, str] = {}
        self.status = Status.FAILED
        """The status at the end; until it is known, the status of an unexpected end."""
        self._trackers = [TrackerWorker(tracker, log) for tracker in trackers]
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
        for worker in self._workers:
            worker.tracker.before_start()
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
        histograms: Mapping[str, Histogram] | None = None,
    ) -> None:
        """Records the metrics and histograms of a step by tag."""
        given = dict(values)

        def record(tracker: Tracker) -> None:
            tracker.scalars(step, given)
            for tag, histogram in (histograms or {}).items():
                tracker.histogram(step, tag, histogram.on_host())

        for worker in self._trackers:
            worker.add(TrackerCall(f"metrics of step {step}", record))

    def log(self, items: Mapping[str, Media], step: int, split: Split) -> None:
        """Records media that the user logs, after their checks."""
        if type(step) is not int or step < 0:
            raise UserError(f"log(): step is {step!r}: it must be a whole number, 0 or more")
        check_items(items, "log()")
        self.media(step, split, items)

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

    def log_artifact(self, path: str | os.PathLike[str], name: str | None) -> None:
        """Records a file, which must not change until the end of the run."""
        if not os.path.isfile(path):
            raise UserError(f"log_artifact(): {os.fspath(path)} is not a file")
        absolute, kept = os.path.abspath(os.fspath(path)), name or os.path.basename(path)
        self._add(TrackerCall(f"artifact {kept}", lambda tracker: tracker.artifact(absolute, kept)))

    def rewind(self, step: int) -> None:
        """Prepares the trackers for steps after `step` that are recorded again."""
        self._add(TrackerCall(f"rewind to step {step}", lambda tracker: tracker.rewind(step)))

    def flush(self) -> Callable[[], None]:
        """Queues a flush of the workdir's own files; the result waits for it, at most 10 s."""
        waits = [worker.flush() for worker in self._workers if worker.tracker.in_workdir]

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
        began = time.monotonic()
        for worker in self._workers:  # at most as long as the slowest of them may take
            own = worker.tracker.close_timeout
            limit = own if timeout is None else min(own, timeout)
            worker.wait(limit, time.monotonic() - began)


def checked_split(name: str) -> Split:
    """Returns the split of a name; raises `UserError` if media of it cannot be logged."""
    if name not in _MEDIA_SPLITS:
        raise UserError(f"there is no split {name!r}.{did_you_mean(name, _MEDIA_SPLITS)}")
    return Split(name)


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


# -- The files `media.jsonl` and `media/` of a workdir ---------------------------------------------

_FOLDER = "media"
_FILE = re.compile(r"media/[A-Za-z0-9_-][A-Za-z0-9._-]*\.(png|svg)")


class MediaFiles(Tracker):
    """Writes a line of `media.jsonl` for each item, and a file for each image and figure."""

    name = "media"
    in_workdir = True
    _folder: Path

    def start(self, run: RunInfo) -> None:
        """Removes the media of steps after the one from which the run resumes."""
        assert run.folder is not None
        self._folder = run.folder
        self.rewind(run.step)

    def rewind(self, step: int) -> None:
        """Removes the media of steps after `step`, and lines that are not valid."""
        try:
            content = read_bytes(epath.Path(self._folder / MEDIA_LINES), LARGEST_LOG)
        except FileNotFoundError:
            return
        kept: list[bytes] = []
        files: set[str] = set()
        stale: set[str] = set()
        for text in content.split(b"\n"):
            line = _parse(text)
            if line is None:
                continue
            file = line.get("file")
            of_line = {file} if isinstance(file, str) and _FILE.fullmatch(file) else set()
            if line["step"] <= step:
                kept.append(text + b"\n")
                files |= of_line
            else:
                stale |= of_line
        whole = b"".join(kept)
        if whole == content:
            return
        no_follow.write(self._folder, MEDIA_LINES, lambda file: file.write(whole))
        for name in sorted(stale - files):
            if (self._folder / name).is_file():
                no_follow.remove(self._folder, name)

    def image(self, step: int, tag: str, image: Image) -> None:
        """Writes the images as one PNG file."""
        number, height, width, _ = image.array.shape
        content = {"file": self._save(step, tag, encode_png(image.grid()), "png")}
        sizes = {"count": number, "width": width, "height": height}
        captions = {"captions": list(image.captions)} if image.captions else {}
        self._append(step, tag, image.kind, content | sizes | captions)

    def text(self, step: int, tag: str, text: Text) -> None:
        self._append(step, tag, text.kind, {"text": text.joined()})

    def histogram(self, step: int, tag: str, histogram: Histogram) -> None:
        edges, counts = histogram.edges.tolist(), histogram.counts.tolist()
        self._append(step, tag, histogram.kind, {"edges": edges, "counts": counts})

    def table(self, step: int, tag: str, table: Table) -> None:
        """Writes the rows; numbers that are not finite are null."""
        rows = [[_json_cell(cell) for cell in row] for row in table.rows()]
        self._append(step, tag, table.kind, {"columns": list(table.columns), "rows": rows})

    def figure(self, step: int, tag: str, figure: Figure) -> None:
        """Writes the figure as a file."""
        file = self._save(step, tag, figure.content, figure.format)
        self._append(step, tag, figure.kind, {"file": file})

    def _save(self, step: int, tag: str, content: bytes, extension: str) -> str:
        """Writes a file of an item; returns its path in the workdir."""
        plain = re.sub(r"[^A-Za-z0-9_-]", "-", tag)
        if plain != tag.replace("/", "-", 1):  # other names could become the same
            plain += "-" + hashlib.blake2b(tag.encode(), digest_size=4).hexdigest()
        name = f"{_FOLDER}/{plain}-{step:08}.{extension}"
        no_follow.make_subfolder(self._folder, _FOLDER)
        no_follow.write(self._folder, name, lambda file: file.write(content))
        return name

    def _append(self, step: int, tag: str, kind: str, content: dict[str, Any]) -> None:
        split, _, name = tag.partition("/")
        line = {"step": step, "split": split, "name": name, "kind": kind} | content
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        with os.fdopen(no_follow.open_file(self._folder, MEDIA_LINES, flags), "ab") as file:
            file.write(json.dumps(line).encode() + b"\n")


def _parse(line: bytes) -> dict[str, Any] | None:
    """Parses a line with a step; None if it is not valid."""
    try:
        content = parse_object(line)
    except Malformed:
        return None
    return content if type(content.get("step")) is int else None


def _json_cell(cell: Any) -> Any:
    return None if isinstance(cell, float) and not math.isfinite(cell) else cell

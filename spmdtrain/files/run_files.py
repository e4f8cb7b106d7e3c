"""The files of a run, by the names other tools may rely on (see DESIGN's workdir)."""

import contextlib
import enum
import importlib
import importlib.metadata
import json
import logging
import math
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal, NotRequired, TypedDict

import numpy as np
from etils import epath

from spmdtrain.errors import StorageError, UserError
from spmdtrain.files import no_follow
from spmdtrain.files.storage import failures, folder_of, is_url, one_line
from spmdtrain.files.validation import (
    LARGEST,
    LARGEST_LOG,
    Malformed,
    check,
    parse_object,
    read_bytes,
)
from spmdtrain.files.workdir_lock import WorkdirLock
from spmdtrain.tree import as_numpy, named_leaves

_VERSIONS = ("spmdtrain", "jax", "flax", "optax", "orbax-checkpoint", "grain", "numpy")

# gcsfs logs with a traceback what it then raises.
logging.getLogger("gcsfs").addFilter(lambda record: not record.exc_info)


class Split(enum.StrEnum):
    """The part of the data a metrics line is about."""

    TRAIN = "train"
    EVAL = "eval"
    TEST = "test"
    EPOCH = "epoch"  # the training metrics over a whole epoch


# Seconds between two times that lines of a split make `sync` run. More often than once in a second
# Google's storage takes no new version of an object.
_SYNC_SECONDS = {Split.TRAIN: 30.0, Split.EVAL: 1.0, Split.TEST: 1.0, Split.EPOCH: 1.0}


class Status(enum.StrEnum):
    """What has become of a run."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    PREEMPTED = "preempted"


class Writer(enum.StrEnum):
    """Who writes into a workdir. Two writers never share a file."""

    TRAINING = "run"
    EVALUATOR = "evaluator"

    def file(self, stem: str, extension: str = "") -> str:
        """The writer's own file: `metrics.jsonl`, and `metrics.evaluator.jsonl`."""
        return f"{stem}{extension}" if self is Writer.TRAINING else f"{stem}.{self}{extension}"


_NONE: Mapping[str, float] = {}
_NO_COUNTS: Mapping[str, Mapping[int, int]] = {}
_COUNTS = "_counts"  # what a line calls them, after their name


class RunFiles:
    """`config.json`, `metrics.jsonl`, `status.json` and `tensorboard/` under one workdir.

    The first and the third are the training's alone; of the others each `writer` has its own.
    No object store can append: where the workdir is a URL, what grows does so in a temporary
    folder, which `sync` copies. What can no longer be written raises `StorageError`.
    """

    def __init__(
        self,
        workdir: str,
        writer: Writer = Writer.TRAINING,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lines_name = writer.file("metrics", ".jsonl")
        # A sibling: TensorBoard shows each folder as a run, and follows but one file in it.
        self._curves_name = writer.file("tensorboard")
        self.folder = folder_of(workdir)
        self._lock: WorkdirLock | None = None
        self._lines = self.folder / self._lines_name
        self._all_curves = self.folder / self._curves_name
        self._curves: _Curves | None = None
        self._purge_from: int | None = None
        self._status_lock, self._failed = threading.Lock(), False
        self._synced: dict[Path, tuple[int, int]] = {}  # size and time of what has been copied
        self._clock, self._synced_at = clock, clock()
        with contextlib.ExitStack() as stack:
            try:
                if not is_url(workdir):
                    self.folder.mkdir(parents=True, exist_ok=True)
                # Also shows whether anything can be written.
                if is_url(workdir):
                    (self.folder / writer.file(".lock")).write_text("")
                else:
                    self._lock = WorkdirLock(self.folder, writer.file(".lock"), writer)
                    stack.callback(self._lock.close)
                self._grown = self._growing(stack)
                self._metrics = self._grown / self._lines_name
                self._whole = self._whole_lines()
            except failures(workdir) as error:
                raise UserError(
                    f"workdir {workdir} cannot be written: {one_line(error)}"
                ) from error
            self._closing = stack.pop_all()

    def _growing(self, stack: contextlib.ExitStack) -> Path:
        """The folder of the files that grow, this writer's alone; `stack` lets go of it."""
        if not is_url(self.folder):
            return Path(self.folder)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="spmdtrain-")))
        if (metrics := self.folder / self._lines_name).exists():
            (folder / metrics.name).write_bytes(read_bytes(metrics, LARGEST_LOG))
        return folder

    def _whole_lines(self) -> int:
        """How many bytes of the metrics are lines that were written to their end."""
        return self._content().rfind(b"\n") + 1

    def _content(self) -> bytes:
        try:
            return read_bytes(epath.Path(self._metrics), LARGEST_LOG)
        except FileNotFoundError:
            return b""

    @staticmethod
    def prepare_curves() -> None:
        """Imports what writes event files, so that the first write takes no longer than others."""
        for module in ("record_writer", "proto.event_pb2", "proto.summary_pb2"):
            importlib.import_module(f"tensorboardX.{module}")

    def write_config(self, config: Mapping[str, Any], *, mesh: str, devices: Sequence[Any]) -> None:
        """Write `config.json`: the configuration, and what it runs on."""
        content = {
            "config": config,
            "versions": {name: importlib.metadata.version(name) for name in _VERSIONS},
            "mesh": mesh,
            "devices": len(devices),
            "device_kind": devices[0].device_kind,
        }
        self._replace("config.json", json.dumps(content, indent=2) + "\n")
        self.sync()

    def check_lock(self) -> None:
        """Raises `StorageError` if the workdir's lock is gone: another run may train there."""
        if self._lock is not None:
            self._lock.check()

    def write_report(self, name: str, content: Mapping[str, Any]) -> None:
        """Write `NAME.json`: what a part of the run has to tell at its end."""
        self._replace(f"{name}.json", json.dumps(content, indent=2) + "\n")

    def write_status(self, status: Status, step: int, reason: str | None = None) -> None:
        """Write `status.json`, after all that it speaks of."""
        with self._status_lock:  # the thread that hears of another process's failure writes, too
            if self._failed:
                return
            self._failed = status is Status.FAILED
            self.check_lock()
            content = {"status": status, "step": step} | ({"reason": reason} if reason else {})
            try:
                self.sync()
            finally:
                self._replace("status.json", json.dumps(content) + "\n")

    def write_metrics(
        self,
        step: int,
        split: Split,
        metrics: Mapping[str, float],
        curves: Mapping[str, float] = _NONE,
        counts: Mapping[str, Mapping[int, int]] = _NO_COUNTS,
    ) -> None:
        """Add a line to the metrics, and points to the curves, more than these where given.

        A non-finite value is null in the line. `counts` say how often each number has come: in the
        line by the numbers as text, in the curves as a histogram.
        """
        finite = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
        told = {name + _COUNTS: dict(sorted(of.items())) for name, of in counts.items()}
        line = json.dumps({"step": step, "split": split} | finite | told) + "\n"
        # Closed each time, so that no line is ever lost.
        with _written(self._lines), self._appended() as file:
            # What a full disk left of a line is not to stand in the middle once there is room.
            file.truncate(min(self._whole, file.tell()))
            file.write(line.encode())
            file.flush()
            self._whole = file.tell()
        own = {f"{split}/{name}": value for name, value in metrics.items()}
        histograms = {f"{split}/{name}{_COUNTS}": of for name, of in counts.items()}
        self._write_curves(step, own | dict(curves), histograms)
        if self._clock() - self._synced_at >= _SYNC_SECONDS[split]:
            self.sync()

    def _appended(self) -> IO[bytes]:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        return os.fdopen(no_follow.open_file(self._grown, self._lines_name, flags), "ab")

    def _write_curves(
        self, step: int, points: Mapping[str, float], histograms: Mapping[str, Mapping[int, int]]
    ) -> None:
        with _written(self._all_curves):
            if self._curves is None:
                curves = _Curves(self._grown / self._curves_name, self._purge_from)
                self._curves = self._closing.enter_context(contextlib.closing(curves))
            self._curves.add(step, points, histograms)

    def sync(self) -> None:
        """Bring the files that grow up to date, for those who read them."""
        self._synced_at = self._clock()
        if self._curves is not None:
            with _written(self.folder / self._curves_name):
                self._curves.flush()
        if not is_url(self.folder):
            return
        for path in sorted(path for path in self._grown.rglob("*") if path.is_file()):
            target = self.folder / path.relative_to(self._grown)
            with _written(target):
                state = (path.stat().st_size, path.stat().st_mtime_ns)
                if self._synced.get(path) != state:
                    target.write_bytes(path.read_bytes())
                    self._synced[path] = state

    def lines(self) -> list[dict[str, Any]]:
        """What the metrics hold; a last line cut short by a kill is left out."""
        lines = _whole(self._content())
        return [self._parsed(number, line) for number, line in enumerate(lines, start=1)]

    def _parsed(self, number: int, line: bytes) -> dict[str, Any]:
        if (content := _metrics_line(line)) is None:
            path, start = self.folder / self._lines_name, line[:60].decode(errors="replace")
            raise UserError(f"{path}:{number}: not a line of metrics: {start!r}")
        return content

    def recorded(self, split: Split, step: int) -> dict[str, float]:
        """The metrics that are already written of a split at a step, or nothing."""
        return self.history(split).get(step, {})

    def history(self, split: Split) -> dict[int, dict[str, float]]:
        """All metrics that are already written of a split, by step."""
        return _by_step(self.lines(), split)

    def rewind(self, step: int) -> None:
        """Take back all that was written of later steps: the run goes on from `step`."""
        kept = [json.dumps(line) + "\n" for line in self.lines() if line["step"] <= step]
        content = "".join(kept).encode()
        with _written(self._lines):
            no_follow.write(self._grown, self._lines_name, lambda file: file.write(content))
        self._whole = self._whole_lines()
        if self._curves is not None:
            with _written(self.folder / self._curves_name):
                self._curves.purge(step + 1)
        elif (self.folder / self._curves_name).exists():
            self._purge_from = step + 1  # what TensorBoard is then told to forget

    def close(self) -> None:
        """Write out what is still waiting."""
        with self._closing:
            self.sync()

    def _replace(self, name: str, content: str) -> None:
        with _written(self.folder / name):
            no_follow.write(self.folder, name, lambda file: file.write(content.encode()))


class _Curves:
    """One event file of TensorBoard.

    Not tensorboardX's SummaryWriter, which waits for ever once its thread has met a full disk.
    """

    def __init__(self, folder: Path, purge_from: int | None) -> None:
        from tensorboardX.record_writer import RecordWriter

        no_follow.make_folder(folder.parent, folder.name)
        now = time.time_ns()  # runs that follow one another within a second have files of their own
        name = f"events.out.tfevents.{now // 10**9}.{socket.gethostname()}.{now}"
        self._file = RecordWriter(str(folder / name))
        self._write(0, file_version="brain.Event:2")
        if purge_from is not None:
            self._write(purge_from, file_version="brain.Event:2")
            self.purge(purge_from)

    def purge(self, step: int) -> None:
        """Have TensorBoard forget what it was told of `step` and later ones."""
        from tensorboardX.proto.event_pb2 import SessionLog

        self._write(step, session_log=SessionLog(status=SessionLog.START))

    def add(
        self,
        step: int,
        points: Mapping[str, float],
        histograms: Mapping[str, Mapping[int, int]] = _NO_COUNTS,
    ) -> None:
        from tensorboardX.proto.summary_pb2 import HistogramProto, Summary

        # One record of all: most of what a record takes is its check sums, which Python computes.
        values = [Summary.Value(tag=name, simple_value=x) for name, x in points.items()]
        for name, counts in histograms.items():
            numbers = sorted(counts)
            histogram = HistogramProto(
                min=numbers[0],
                max=numbers[-1],
                num=sum(counts.values()),
                sum=sum(n * count for n, count in counts.items()),
                sum_squares=sum(n * n * count for n, count in counts.items()),
                # A bucket a number, whose edges are between it and the next.
                bucket_limit=[n + 0.5 for n in range(numbers[0] - 1, numbers[-1] + 1)],
                bucket=[counts.get(n, 0) for n in range(numbers[0] - 1, numbers[-1] + 1)],
            )
            values.append(Summary.Value(tag=name, histo=histogram))
        self._write(step, summary=Summary(value=values))

    def _write(self, step: int, **content: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        event = Event(wall_time=time.time(), step=step, **content)
        self._file.write(event.SerializeToString())

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # `flush` has said so
            self._file.close()


# -- reading what was written --------------------------------------------------------------------


def status_of(workdir: str) -> dict[str, Any] | None:
    """What a run's `status.json` says: `status`, `step`, perhaps `reason`; None before any run.

    Raises `StorageError` where it cannot be read, and `UserError` where it is none of ours.
    """
    path = folder_of(workdir) / "status.json"
    if (text := _read(path)) is None:
        return None
    try:
        content = parse_object(text)
        check(content, _Told, "status")
    except Malformed as error:
        start = text[:60].decode(errors="replace")
        raise UserError(f"{path}: not the status of a run: {start!r}") from error
    return content


def evaluator_metrics(workdir: str) -> dict[int, dict[str, float]]:
    """What an evaluator beside the run has found, by step; `{}` where there is none.

    For a reader who does not wait: a line that cannot be read yet is one not yet written. Raises
    `StorageError` where the file cannot be read.
    """
    text = _read(folder_of(workdir) / Writer.EVALUATOR.file("metrics", ".jsonl"), LARGEST_LOG)
    found = [_metrics_line(line) for line in _whole(text or b"")]
    return _by_step([content for content in found if content is not None], Split.EVAL)


class _Told(TypedDict):
    """What `status.json` holds."""

    status: Literal["running", "finished", "failed", "preempted"]
    step: int
    reason: NotRequired[str]


def _read(path: epath.Path, most: int = LARGEST) -> bytes | None:
    try:
        return read_bytes(path, most)
    except FileNotFoundError:
        return None
    except UserError:
        raise
    except failures(path) as error:
        raise StorageError(f"{path} cannot be read: {one_line(error)}") from error


def _whole(text: bytes) -> list[bytes]:
    """The lines that were written to their end."""
    return text.split(b"\n")[:-1]


def _metrics_line(line: bytes) -> dict[str, Any] | None:
    """A line of metrics, or None if it is not one.

    Checked here and not by a schema, which would take 60 us a line; files have up to millions.
    """
    try:
        content = parse_object(line)
    except Malformed:
        return None
    step, split = content.get("step"), content.get("split")
    if type(step) is not int or step < 0 or split not in list(Split):
        return None
    values = [value for name, value in content.items() if name not in ("step", "split")]
    counts = [of for value in values if isinstance(value, dict) for of in value.values()]
    plain = [value for value in values if not isinstance(value, dict)]
    sound = all(value is None or type(value) in (int, float) for value in plain)
    return content if sound and all(type(value) is int for value in counts) else None


def _by_step(lines: Iterable[Mapping[str, Any]], split: Split) -> dict[int, dict[str, float]]:
    """The metrics of a split by step; of two lines of one step the later counts."""
    return {
        line["step"]: {
            name: math.nan if value is None else value
            for name, value in line.items()
            if name not in ("step", "split") and not isinstance(value, dict)
        }
        for line in lines
        if line["split"] == split
    }


# -- predictions ---------------------------------------------------------------------------------


def write_predictions(workdir: str | None, predictions: Any) -> epath.Path:
    """Write `predictions.npz`: an array a name, `predictions` where there is but one."""
    assert workdir is not None
    path = folder_of(workdir) / "predictions.npz"
    arrays = {name or "predictions": x for name, x in named_leaves(predictions).items()}
    plain: dict[str, Any] = {name: as_numpy(x) for name, x in arrays.items()}
    try:
        if not is_url(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        no_follow.write(path.parent, path.name, lambda file: np.savez(file, **plain))
    except failures(path) as error:
        raise UserError(f"{path} cannot be written: {one_line(error)}") from error
    return path


@contextlib.contextmanager
def _written(path: epath.Path) -> Iterator[None]:
    """Turns what a write fails with into a `StorageError`."""
    try:
        yield
    except failures(path) as error:
        raise StorageError(f"{path} cannot be written: {one_line(error)}") from error

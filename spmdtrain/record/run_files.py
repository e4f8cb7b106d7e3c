"""Files of a run in its workdir: configuration, metrics, status, predictions, lock."""

import contextlib
import enum
import errno
import json
import logging
import math
import os
import socket
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal, NotRequired, TypedDict, cast

from etils import epath

from spmdtrain.errors import StorageError, UserError, foreign, version_of
from spmdtrain.record import no_follow
from spmdtrain.record.changing_files import ObjectFile
from spmdtrain.record.lines import LinesFile, errors_of_writing, finite_or_null
from spmdtrain.record.storage import (
    failures,
    folder_of,
    is_url,
    one_line,
    source_digest,
    storage_errors,
)
from spmdtrain.record.validation import (
    LARGEST,
    LARGEST_LOG,
    Malformed,
    OtherFields,
    check,
    parse_object,
    read_bytes,
    write_npz,
)
from spmdtrain.tree import as_numpy, named_leaves

# -- Faults of devices in `status.json` ------------------------------------------------------------


class FoundFault(TypedDict):
    """A fault that the sentinel has found."""

    step: int
    kind: str
    devices: list[str]
    processes: list[str]
    hosts: list[str]
    parameter: str


class SentinelStatus(TypedDict):
    """Findings of the sentinel, in `status.json`.

    Attributes:
      passed: The last step whose check has passed; 0 before the first one.
      faults: The newest faults.
    """

    passed: int
    faults: list[FoundFault]


# -- Files of a run in its workdir: configuration, metrics, status and reports ---------------------
#
# Other tools may rely on their names and formats.

MEDIA_LINES = "media.jsonl"
"""File with a line for each logged image, text, histogram, table and figure."""
PERFORMANCE_FILE = "performance.jsonl"
"""File with speed, utilization and memory, a line for each logged step of training."""
_LARGEST_STATUS = 2**20  # bytes; it has 100, and a message
_VERSIONS = ("spmdtrain", "jax", "flax", "optax", "orbax-checkpoint", "grain", "numpy")

# gcsfs logs an error with its traceback before it raises it.
logging.getLogger("gcsfs").addFilter(lambda record: not record.exc_info)


class Split(enum.StrEnum):
    """The part of the data that a metrics line is about."""

    TRAIN = "train"
    EVAL = "eval"
    TEST = "test"
    EPOCH = "epoch"  # the training metrics over a whole epoch


# Seconds between two calls of `sync` for lines of a split. Google's storage accepts a new version
# of an object at most once per second.
_SYNC_SECONDS = {Split.TRAIN: 30.0, Split.EVAL: 1.0, Split.TEST: 1.0, Split.EPOCH: 1.0}


class Status(enum.StrEnum):
    """The status of a run in `status.json`."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    PREEMPTED = "preempted"


class ConfigFile(TypedDict, total=False):
    """The content of `config.json`; older versions wrote fewer fields.

    Attributes:
      config: The resolved options by name, as JSON values.
      versions: The version of each library.
      mesh: A description of the mesh.
      devices: Number of devices.
      device_kind: Such as `NVIDIA H200`.
      skipped_records: Numbers of bad records that are left out of the data, by split.
      experiment: The experiment's file.
      experiment_sha256: The SHA-256 of that file at the last start, in hex.
    """

    config: dict[str, Any]
    versions: dict[str, str]
    mesh: str
    devices: int
    device_kind: str
    skipped_records: dict[str, int]
    experiment: str
    experiment_sha256: str


class StatusFile(TypedDict):
    """The content of `status.json`.

    Attributes:
      step: The step of the newest checkpoint.
      reason: The reason of a failure, in one line.
      sentinel: The findings of the sentinel.
    """

    status: Literal["running", "finished", "failed", "preempted"]
    step: int
    reason: NotRequired[str]
    sentinel: NotRequired[SentinelStatus]


class ProgramFile(TypedDict, total=False):
    """The content of `program.json` (docs/logging.md)."""

    parameters: int
    flops_per_step: float | None
    flops_convention: str
    flops_unknown: str
    peak_flops_per_device: float | None
    devices: int
    mesh: dict[str, int]
    sharding: list[dict[str, Any]]
    collectives: list[dict[str, Any]]
    collectives_unknown: str
    decisions: list[str]


OBJECT_FILES: Mapping[str, type[Any]] = {
    "config.json": ConfigFile,
    "status.json": StatusFile,
    "program.json": ProgramFile,
}
"""The JSON files of a run with one object, and the objects' fields."""


def object_file(folder: epath.Path, name: str) -> ObjectFile:
    """Returns one of `OBJECT_FILES` in the folder of a run, to be read."""
    most = _LARGEST_STATUS if name == "status.json" else LARGEST
    return ObjectFile(folder / name, OBJECT_FILES[name].__annotations__, most)


def checked_status(file: ObjectFile) -> StatusFile | None:
    """Reads the `status.json` of a run; None if there is no such file.

    Raises:
      StorageError: If the file cannot be read.
      UserError: If it is not the status of a run.
    """
    file.refresh()
    if file.text is None:
        if file.error is not None:
            raise file.error
        return None
    try:
        if file.error is not None:
            raise file.error
        check(file.content, StatusFile, "status")
    except OtherFields as error:
        raise error.of_file(file.path) from error
    except Malformed as error:
        start = file.text[:60].decode(errors="replace")
        raise UserError(f"{file.path}: not the status of a run: {start!r}") from error
    return cast(StatusFile, file.content)


class Writer(enum.StrEnum):
    """A task that writes into a workdir. Two writers never share a file."""

    TRAINING = "run"
    EVALUATOR = "evaluator"

    def file(self, stem: str, extension: str = "") -> str:
        """Returns the name of this writer's file: `metrics.jsonl` or `metrics.evaluator.jsonl`."""
        return f"{stem}{extension}" if self is Writer.TRAINING else f"{stem}.{self}{extension}"


_NO_COUNTS: Mapping[str, Mapping[int, int]] = {}
_MAY_PASS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.ETIMEDOUT, errno.EBUSY)
"""Errors for which the same command may work later, so that a launcher tries it again."""
TRAJECTORY = "trajectory"
NOT_METRICS = ("step", "split", TRAJECTORY)
"""Names in a line of metrics that are not metrics."""
COUNTS_SUFFIX = "_counts"
"""End of the names of counts in a metrics line."""


class RunFiles:
    """The files `config.json`, `metrics.jsonl` and `status.json` of a workdir.

    Only the training writes `config.json` and `status.json`; each writer has its own metrics.
    Object stores cannot append: if the workdir is a URL, the metrics and the files of trackers are
    written to a temporary folder, which `sync` copies. Methods raise `StorageError` if a file can
    no longer be written.

    Args:
      workdir: Folder or URL, which is created.
      clock: Returns the time in seconds.
      report: Receives a line if the end of another writer has to be waited for.

    Raises:
      UserError: If the workdir cannot be written, or this process is already writing to it.
      StorageError: If another process is writing to it, and does not end within half a minute, or
        the storage fails in a way that may pass, such as a full disk.
    """

    def __init__(
        self,
        workdir: str,
        writer: Writer = Writer.TRAINING,
        clock: Callable[[], float] = time.monotonic,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.folder = folder_of(workdir)
        self._lock: WorkdirLock | None = None
        self.start = ""
        """Names this start of the run; "" if no requests to it can be checked."""
        self._parsed: list[dict[str, Any]] | None = None  # the lines that the file has
        self._status_lock, self._failed = threading.Lock(), False
        self.sentinel: SentinelStatus | None = None
        """Part of the status of the training, kept over its starts."""
        self._synced: dict[Path, tuple[int, int]] = {}  # size and mtime of each copied file
        self._clock, self._synced_at = clock, clock()
        with contextlib.ExitStack() as stack:
            try:
                # Creating the lock also checks that the workdir is writable.
                if is_remote := is_url(workdir):
                    (self.folder / writer.file(".lock")).write_text("")
                else:
                    self.folder.mkdir(parents=True, exist_ok=True)
                    self._lock = WorkdirLock(self.folder, writer.file(".lock"), writer, report)
                    stack.callback(self._lock.close)
                    self.start = self._lock.start
                self.local = self._copied_folder(stack) if is_remote else Path(self.folder)
                """The local folder whose files `sync` copies to a remote workdir; otherwise the
                workdir itself."""
                self._lines_name = writer.file("metrics", ".jsonl")
                self._lines = LinesFile(self.local, self._lines_name, self.folder, self.check_lock)
            except (FileExistsError, NotADirectoryError) as error:
                raise UserError(f"workdir {workdir} is not a folder: {one_line(error)}") from error
            except StorageError:  # in use
                raise
            except failures(workdir) as error:
                may_pass = getattr(error, "errno", None) in _MAY_PASS
                kind = StorageError if may_pass else UserError
                raise kind(f"workdir {workdir} cannot be written: {one_line(error)}") from error
            stack.callback(self._lines.close)
            self._closing = stack.pop_all()
        if writer is Writer.TRAINING:
            with contextlib.suppress(UserError):  # it is replaced
                with storage_errors(self.folder):
                    exists = (self.folder / "status.json").exists()
                status = checked_status(object_file(self.folder, "status.json")) if exists else None
                self.sentinel = None if status is None else status.get("sentinel")

    def _copied_folder(self, stack: contextlib.ExitStack) -> Path:
        """Returns a temporary folder, which `stack` deletes, with the lines of media."""
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="spmdtrain-")))
        if (lines := self.folder / MEDIA_LINES).exists():
            (folder / MEDIA_LINES).write_bytes(read_bytes(lines, LARGEST_LOG))
        return folder

    def write_config(
        self,
        config: Mapping[str, Any],
        *,
        mesh: str,
        devices: Sequence[Any],
        skipped_records: Mapping[str, int],
        experiment: str | None = None,
    ) -> None:
        """Writes `config.json`.

        Args:
          config: The resolved configuration, as JSON.
          mesh: A description of the mesh.
          skipped_records: Numbers of bad records that are left out of the data, by split.
          experiment: The experiment's file, if there is one. Its SHA-256 is recorded, too.
        """
        content = {
            "config": config,
            "versions": {name: version_of(name) for name in _VERSIONS},
            "mesh": mesh,
            "devices": len(devices),
            "device_kind": devices[0].device_kind,
            "skipped_records": dict(skipped_records),
        }
        if experiment is not None:
            content |= {"experiment": experiment, "experiment_sha256": source_digest(experiment)}
        self.write_bytes("config.json", f"{json.dumps(content, indent=2)}\n".encode())
        self.sync()

    def check_lock(self) -> None:
        """Raises `StorageError` if the workdir's lock is gone: another run may be using it."""
        if self._lock is not None:
            self._lock.check()

    def lines_file(self, name: str) -> LinesFile:
        """Returns a further file of JSON lines, which `sync` copies like the metrics."""
        try:
            lines = LinesFile(self.local, name, self.folder, self.check_lock)
        except failures(self.folder) as error:
            raise StorageError(f"{self.folder / name} cannot be read: {one_line(error)}") from error
        self._closing.callback(lines.close)
        return lines

    def write_bytes(self, name: str, content: bytes) -> None:
        """Writes a file, in place of an earlier one of this name."""
        with errors_of_writing(self.folder / name):
            no_follow.write(self.folder, name, lambda file: file.write(content))

    def write_report(self, name: str, content: Mapping[str, Any]) -> None:
        """Writes `NAME.json`: a JSON report of a part of the run."""
        self.write_bytes(f"{name}.json", f"{json.dumps(content, indent=2)}\n".encode())

    def write_status(self, status: Status, step: int, reason: str | None = None) -> None:
        """Writes `status.json`, after the other files. A failed status is never replaced.

        `step` is the step of the newest checkpoint, `reason` the reason of a failure, in one line.
        """
        with self._status_lock:  # the thread that watches other processes also writes the status
            if self._failed:
                return
            self._failed = status is Status.FAILED
            self.check_lock()
            content: dict[str, Any] = {"status": status, "step": step}
            content |= {"reason": reason} if reason else {}
            content |= {"sentinel": self.sentinel} if self.sentinel else {}
            try:
                self.sync()
            finally:
                self.write_bytes("status.json", f"{json.dumps(content)}\n".encode())

    def write_metrics(
        self,
        step: int,
        split: Split,
        metrics: Mapping[str, float],
        counts: Mapping[str, Mapping[int, int]] = _NO_COUNTS,
        trajectory: str = "",
    ) -> None:
        """Appends a line to the metrics.

        Args:
          metrics: Metric name to value. A non-finite value is null in the line.
          counts: Name to the count of each integer. In the line they are objects with the integers
            as keys.
          trajectory: The trajectory of the state, for a writer that does not train.
        """
        sorted_counts = {
            name + COUNTS_SUFFIX: dict(sorted(count.items())) for name, count in counts.items()
        }
        first = {"step": step, "split": split} | ({TRAJECTORY: trajectory} if trajectory else {})
        self._parsed = None
        self._lines.append(first | finite_or_null(metrics) | sorted_counts)
        if self._clock() - self._synced_at >= _SYNC_SECONDS[split]:
            self.sync()

    def sync(self) -> None:
        """Copies metrics and the files of trackers to a remote workdir."""
        self._synced_at = self._clock()
        if not is_url(self.folder):
            return
        files = (path for path in self.local.rglob("*") if path.is_file())
        # A file whose name begins with a dot is being written by a tracker.
        for path in sorted(path for path in files if not path.name.startswith(".")):
            target = self.folder / path.relative_to(self.local)
            with errors_of_writing(target):
                try:
                    state = (path.stat().st_size, path.stat().st_mtime_ns)
                    content = None if self._synced.get(path) == state else path.read_bytes()
                except FileNotFoundError:  # a tracker has removed it
                    continue
                if content is not None:
                    target.write_bytes(content)
                    self._synced[path] = state

    def lines(self) -> list[dict[str, Any]]:
        """Returns the lines of the metrics, without an incomplete last line of a killed run.

        The lines are kept until the next write, because a start reads them several times.
        """
        if self._parsed is None:
            parsed = []
            for number, line in enumerate(self._lines.read(), start=1):
                if (content := parse_metrics_line(line)) is None:
                    path, start = self.folder / self._lines_name, line[:60].decode(errors="replace")
                    raise UserError(f"{path}:{number}: not a line of metrics: {start!r}")
                parsed.append(content)
            self._parsed = parsed
        return self._parsed

    def recorded(self, step: int) -> dict[str, dict[str, float]]:
        """Returns the written metrics at a step by split."""
        return {line["split"]: metrics_of(line) for line in self.lines() if line["step"] == step}

    def history(self, split: Split) -> dict[int, dict[str, float]]:
        """Returns the written metrics of a split by step; of two lines, those of the later one."""
        lines = [line for line in self.lines() if line["split"] == split]
        return {line["step"]: metrics_of(line) for line in lines}

    def trajectories(self, split: Split) -> dict[int, str]:
        """Returns the trajectories of the states in the lines of a split, by step."""
        lines = [line for line in self.lines() if line["split"] == split]
        return {line["step"]: line.get(TRAJECTORY, "") for line in lines}

    def rewind(self, step: int) -> None:
        """Removes the metrics of later steps, because the run resumes at `step`."""
        self._keep([line for line in self.lines() if line["step"] <= step])

    def remove(self, steps: Collection[int]) -> None:
        """Removes the metrics of some steps, whose states the training has left."""
        self._keep([line for line in self.lines() if line["step"] not in steps])

    def _keep(self, kept: list[dict[str, Any]]) -> None:
        self._lines.replace(kept)
        self._parsed = kept

    def close(self) -> None:
        """Syncs and closes all files, and unlocks the workdir."""
        with self._closing:
            self.sync()


# -- The lines of metrics --------------------------------------------------------------------------

_SPLITS = tuple(Split)


def parse_metrics_line(line: bytes) -> dict[str, Any] | None:
    """Returns the content of a line of metrics without its line feed; None if it is not valid."""
    try:
        content = parse_object(line)
    except Malformed:
        return None
    return content if is_metrics(content) else None


def is_metrics(content: Mapping[str, Any]) -> bool:
    """Returns whether a JSON object is a line of metrics.

    It is not checked by a schema, because that takes 60 us per line, and a file can have millions.
    """
    step, split = content.get("step"), content.get("split")
    if type(step) is not int or step < 0 or split not in _SPLITS:
        return False
    if type(content.get(TRAJECTORY, "")) is not str:
        return False
    for name, value in content.items():
        kind = type(value)
        if kind is dict:
            if not all(type(count) is int for count in value.values()):
                return False
        elif not (kind is float or kind is int or value is None or name in NOT_METRICS):
            return False
    return True


def metrics_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Returns the metrics in a line; NaN for a value that was not finite."""
    return {
        name: math.nan if value is None else value
        for name, value in line.items()
        if name not in NOT_METRICS and not isinstance(value, dict)
    }


# -- The file of predictions in a workdir ----------------------------------------------------------


def write_predictions(workdir: str | None, predictions: Any) -> epath.Path:
    """Writes `predictions.npz`, with an array for each leaf by its path, and returns its path.

    `workdir` is created. A single array is named `predictions`. Raises `UserError` if the file
    cannot be written.
    """
    assert workdir is not None
    path = folder_of(workdir) / "predictions.npz"
    arrays = {name or "predictions": x for name, x in named_leaves(predictions).items()}
    plain = {name: as_numpy(x) for name, x in arrays.items()}
    try:
        if not is_url(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        no_follow.write(path.parent, path.name, lambda file: write_npz(file, plain))
    except failures(path) as error:
        raise UserError(f"{path} cannot be written: {one_line(error)}") from error
    return path


# -- The exclusive lock of a writer on a local workdir ---------------------------------------------

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]


PATIENCE = 30.0
"""Seconds in which a process that is ending releases the lock."""
_POLL_INTERVAL = 0.2  # seconds
_held: "weakref.WeakSet[WorkdirLock]" = weakref.WeakSet()


def _files_held() -> list[IO[bytes]]:
    """Returns the locked files of this process."""
    return [lock._file for lock in _held if not lock._file.closed]


def _release_in_child() -> None:
    """Closes the locks in a forked process, which would hold them after the end of this one."""
    for lock in list(_held):
        lock.close()


if fcntl is not None:
    os.register_at_fork(after_in_child=_release_in_child)


class WorkdirLock:
    """A locked file, which the kernel unlocks in whatever way the process ends.

    The file contains the process and the host that hold it, for messages, and in a second line a
    name of this start of the run, which requests to it must have (`record/requests.py`). If
    the lock is held, the start waits, because a process that was killed may need a while to end.

    Args:
      folder: The workdir.
      name: The file's name in it.
      writer: The kind of writer, for messages: `run` or `evaluator`.
      report: Receives a line if the lock has to be waited for.

    Raises:
      UserError: If this process itself holds the lock.
      StorageError: If another process holds the lock for half a minute.
      OSError: If the file cannot be opened for writing.
    """

    def __init__(
        self, folder: epath.Path, name: str, writer: str, report: Callable[[str], None]
    ) -> None:
        self._path = folder / name
        flags = os.O_RDWR | os.O_CREAT
        self._file: IO[bytes] = os.fdopen(no_follow.open_file(folder, name, flags), "r+b")
        self.start = ""
        """Names this start of the run."""
        if fcntl is None:
            return
        try:
            self._acquire(f"workdir {folder} is in use by another {writer}", report)
            self._file.truncate(0)
            self.start = uuid.uuid4().hex
            holder = f"process {os.getpid()} on {socket.gethostname()}\n{self.start}\n"
            self._file.write(holder.encode())
            self._file.flush()
        except BaseException:
            self._file.close()
            raise
        _held.add(self)

    def _acquire(self, problem: str, report: Callable[[str], None]) -> None:
        until, reported = time.monotonic() + PATIENCE, False
        while True:
            try:
                return fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._file.seek(0)
                holder = self._file.read(300).decode(errors="replace").partition("\n")[0]
                self._file.seek(0)
            if any(os.path.sameopenfile(x.fileno(), self._file.fileno()) for x in _files_held()):
                raise UserError(f"{problem} of this process")
            by = f"{problem} ({foreign(holder, 300)})" if holder else problem
            if time.monotonic() >= until:
                raise StorageError(
                    f"{by}, or by a process that it started: wait for its end or end it, then give "
                    "the same command again"
                )
            if not reported:
                report(f"{by}: waiting up to {PATIENCE:.0f} s for its end")
                reported = True
            time.sleep(_POLL_INTERVAL)

    def check(self) -> None:
        """Checks that the locked file still exists, because otherwise another run can lock it.

        Does nothing after `close`. Raises `StorageError` if the file was removed or replaced, or
        cannot be read.
        """
        if self._file.closed:
            return
        locked = os.fstat(self._file.fileno())
        try:
            current = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            change = "removed"
        except OSError as error:
            raise StorageError(f"{self._path} cannot be read: {one_line(error)}") from error
        else:
            if os.path.samestat(current, locked):
                return
            change = "replaced"
        raise StorageError(
            f"{self._path}, this run's lock, was {change}: another run may be using the workdir, "
            "so this one ends and saves nothing more there. Never remove the lock of a run that is "
            "still running"
        )

    def close(self) -> None:
        """Unlocks the workdir."""
        self._file.close()

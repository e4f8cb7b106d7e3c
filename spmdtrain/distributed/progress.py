"""Where each process of a launched job is: a small file a task, written without any collective.

A process that waits in a collective cannot tell why it waits: only the one that it waits for could.
So each publishes the step and the phase it is in, and the launcher reads them all. Where there is
no launcher, nothing here does anything.
"""

import contextlib
import enum
import faulthandler
import json
import mmap
import os
import signal
import struct
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

LAUNCH = "SPMDTRAIN_LAUNCH"
"""The variable that names the folder of the job's files."""
TASK = "SPMDTRAIN_TASK"
"""The variable that names the task, as in `worker 1`."""


class Phase(enum.StrEnum):
    """What a process is doing. Eight letters at most: a record has no room for more."""

    START = "start"
    RESTORE = "restore"
    COMPILE = "compile"
    COMPILED = "compiled"
    """Waiting until all processes have compiled the program that comes next."""
    LOAD = "load"
    STEP = "step"
    EVALUATE = "evaluate"
    SAVE = "save"
    HOST = "host"
    """Between the others: callbacks and the rest."""
    END = "end"


# Here a process may be waiting for all the others; elsewhere it can only keep them waiting.
WAITING = frozenset(
    {Phase.COMPILED, Phase.STEP, Phase.EVALUATE, Phase.SAVE, Phase.RESTORE, Phase.END}
)

# A record: process, step, phase, changes, time. Behind it, a slot of its own: the step last saved,
# which another thread may write. Apart, the two need no lock.
_RECORD = struct.Struct("<qq8sqd")
_SAVED = struct.Struct("<q")
_SEALING = struct.Struct("<q")  # another slot: the step whose manifest is being written
_SIZE = _RECORD.size + _SAVED.size + _SEALING.size
_NOT_SAVED = -1


def path(folder: str | os.PathLike[str], task: str, kind: str) -> Path:
    """The file of a task: of its `phase`, its `reason` or its `stacks`."""
    return Path(folder) / f"{task.replace(' ', '-')}.{kind}"


# The side of the processes.


class _Channel:
    """The .phase file of this process, in its memory, and what was last written to it.

    In memory, as a system call takes longer than all the rest. The system keeps what was written
    there, however the process ends.
    """

    __slots__ = ("_memory", "changes", "phase", "pid", "step")

    def __init__(self, file: int | None, *, shared: bool = False) -> None:
        if shared and file is not None:
            self._memory = mmap.mmap(file, _SIZE)
            os.close(file)
            # The pid stays that of the task, to which the launcher sends its signals.
            self.pid, self.step, phase, self.changes, _ = _RECORD.unpack_from(self._memory)
            self.phase = Phase(phase.rstrip(b"\0").decode())
            return
        content = bytes(_RECORD.size) + _SAVED.pack(_NOT_SAVED) + _SEALING.pack(_NOT_SAVED)
        if file is None:
            self._memory = mmap.mmap(-1, len(content))
            self._memory[:] = content
        else:
            # With content from the start: to touch a page that the disk has no room for is fatal.
            os.write(file, content)
            self._memory = mmap.mmap(file, len(content))
            os.close(file)
        self.pid = os.getpid()
        self.changes = 0
        self.publish(Phase.START, 0)

    def publish(self, phase: Phase, step: int) -> None:
        self.phase = phase
        self.step = step
        self.changes += 1
        # Packed before it is copied, so that a reader sees the old record or the new one.
        record = _RECORD.pack(self.pid, step, phase.encode(), self.changes, time.monotonic())
        self._memory[: _RECORD.size] = record

    def read(self) -> bytes:
        return bytes(self._memory)

    def publish_saved(self, step: int) -> None:
        self._memory[_RECORD.size : _RECORD.size + _SAVED.size] = _SAVED.pack(step)

    def publish_sealing(self, step: int) -> None:
        self._memory[_RECORD.size + _SAVED.size :] = _SEALING.pack(step)


_channel: _Channel | None = None


class _Within:
    """Publishes a phase at its entry and the outer one at its exit.

    A class, as a generator's context manager takes three times as long, and a loop enters several
    of these a step.
    """

    __slots__ = ("_channel", "_outer", "_phase", "_step")

    def __init__(self, channel: _Channel, phase: Phase, step: int | None) -> None:
        self._channel = channel
        self._phase = phase
        self._step = step

    def __enter__(self) -> None:
        channel = self._channel
        outer = channel.phase
        # Whoever has entered a phase has started.
        self._outer = Phase.HOST if outer is Phase.START else outer
        channel.publish(self._phase, channel.step if self._step is None else self._step)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._channel.publish(self._outer, self._channel.step)


_NOTHING = contextlib.nullcontext()


def begin(*, always: bool = False) -> None:
    """Begin to publish, in phase START; to be called early, and again at will.

    From here on the launcher may ask this process for its stacks. `always` publishes without a
    launcher, too: to this process itself, see `here`.
    """
    global _channel
    folder, task = os.environ.get(LAUNCH), os.environ.get(TASK)
    if _channel is not None:
        return
    if not folder or not task:
        _channel = _Channel(None) if always else None
        return
    try:
        stacks = _create(path(folder, task, "stacks"))
    except FileExistsError:
        return  # a process that the task has started inherits its environment, but is not it
    # In this order: SIGUSR2 ends a process that has not registered, and is sent to those only that
    # have a .phase file.
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
    _channel = _Channel(_create(path(folder, task, "phase")))
    os.register_at_fork(after_in_child=_forget)


def begin_for_task() -> None:
    """Begins to publish in the record of the task that started this process.

    For a process that does the work of a task which publishes nothing more itself.
    """
    global _channel
    folder, task = os.environ.get(LAUNCH), os.environ.get(TASK)
    if _channel is None and folder and task:
        with contextlib.suppress(FileNotFoundError):  # the task has not begun to publish
            file = os.open(path(folder, task, "phase"), os.O_RDWR)
            _channel = _Channel(file, shared=True)


def _create(file: Path) -> int:
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)


def _forget() -> None:
    """In a forked process: the file is its parent's."""
    global _channel
    _channel = None


def launched() -> bool:
    """Whether a launcher has started this process, and watches it."""
    return bool(os.environ.get(LAUNCH) and os.environ.get(TASK))


def local_record(task: str) -> "Record | None":
    """What this process has last published, under that name; None where it does not publish."""
    return None if _channel is None else _record(task, _channel.read())


def phase(phase: Phase, step: int | None = None) -> AbstractContextManager[None]:
    """While entered, this process is in `phase`, at `step` or at the one it was at.

    At the exit it is in the outer phase again: in HOST at the outermost. Of one thread only, the
    one that trains.
    """
    channel = _channel
    return _NOTHING if channel is None else _Within(channel, phase, step)


def heartbeat() -> None:
    """Say that what this process waits for gets on: where no record changes, a job is hung."""
    if _channel is not None:
        _channel.publish(_channel.phase, _channel.step)


def saved(step: int) -> None:
    """Say that the checkpoint of `step` is the newest that is known to be whole."""
    if _channel is not None:
        _channel.publish_saved(step)


@contextlib.contextmanager
def sealing(step: int) -> Iterator[None]:
    """Publishes that the checkpoint of `step` lacks only its manifest, from the saving thread."""
    if _channel is not None:
        _channel.publish_sealing(step)
    yield
    if _channel is not None:
        _channel.publish_sealing(_NOT_SAVED)


def write_exit_reason(code: int, reason: str, *, own: bool = True) -> None:
    """Say why this process is about to end with `code`; the first reason told stays.

    `own` is False where it ends only because another one did.
    """
    folder, task = os.environ.get(LAUNCH), os.environ.get(TASK)
    if folder and task:
        content = json.dumps({"code": int(code), "reason": _as_text(reason), "own": own})
        with contextlib.suppress(FileExistsError), path(folder, task, "reason").open("x") as file:
            file.write(content)  # all ASCII, as JSON is written here


def job_ended() -> str | None:
    """How the training has ended for good: `finished`, `preempted` or `failed: ...`.

    None while it goes on, and where there is no launcher.
    """
    folder = os.environ.get(LAUNCH)
    try:
        return (Path(folder) / "ended").read_text("utf-8") if folder else None
    except FileNotFoundError:
        return None


def _as_text(reason: str) -> str:
    """A reason may name a file, and names need not be text: what is none is escaped."""
    return reason.encode("utf-8", "backslashreplace").decode("utf-8")


# The side of the launcher.


@dataclass(frozen=True)
class Record:
    """Where a task is, or was when it died."""

    task: str
    step: int
    phase: Phase
    saved: int
    """The step of the newest whole checkpoint; -1 where there is none."""
    changes: int
    """How often it has published; 0 of a task that has not begun to."""
    at: float
    """When it last did, by `time.monotonic`, which is one clock for the whole machine."""
    pid: int = 0
    """The process itself, which need not be the one that was started: that may be a wrapper."""
    sealing: int = _NOT_SAVED
    """The step of a checkpoint whose data is written and whose manifest is not; -1 if none is."""

    @property
    def where(self) -> str:
        """`step 37`, or `load at step 37`."""
        if self.phase is Phase.STEP:
            return f"step {self.step}"
        return self.phase if self.phase is Phase.START else f"{self.phase} at step {self.step}"


@dataclass(frozen=True)
class Reason:
    """Why a task ended, in its own words."""

    code: int
    reason: str
    own: bool


def read(folder: str | os.PathLike[str], task: str) -> Record | None:
    """What a task has last published; None before it has begun to."""
    try:
        content = path(folder, task, "phase").read_bytes()
    except FileNotFoundError:
        return None
    return _record(task, content)


def _record(task: str, content: bytes) -> Record | None:
    if len(content) < _SIZE:
        return None  # it is being made
    pid, step, phase, changes, at = _RECORD.unpack_from(content)
    if not changes:
        return None
    (newest,) = _SAVED.unpack_from(content, _RECORD.size)
    (sealing,) = _SEALING.unpack_from(content, _RECORD.size + _SAVED.size)
    phase = Phase(phase.rstrip(b"\0").decode())
    return Record(task, step, phase, newest, changes, at, pid, sealing)


def read_reason(folder: str | os.PathLike[str], task: str) -> Reason | None:
    """What a task has said of its end; None where it said nothing, or died in the midst of it."""
    try:
        content = json.loads(path(folder, task, "reason").read_text())
    except (FileNotFoundError, ValueError):
        return None
    return Reason(content["code"], content["reason"], content["own"])


def write_ended(folder: str | os.PathLike[str], how: str) -> None:
    """Tell `job_ended` how the training has ended."""
    written = Path(folder) / "ended.new"
    written.write_text(_as_text(how), "utf-8")
    written.replace(Path(folder) / "ended")


@dataclass(frozen=True)
class Holder:
    """Who keeps a job from moving, as far as that can be told from outside."""

    task: str | None
    """None where nobody in particular does."""
    phase: Phase | None
    step: int | None
    sentence: str


def find_stalled_task(records: Sequence[Record], stopped: Collection[str] = ()) -> Holder:
    """Who holds the others, when no record has changed for long.

    Step counters alone would blame the wrong one: steps are dispatched ahead, so the one that holds
    the others may be before them or behind. `stopped` are the tasks that a signal has stopped.
    """
    ordered = sorted(records, key=lambda record: record.at)  # who has not moved for longest: first
    halted = [record for record in ordered if record.task in stopped]
    absent = [record for record in ordered if record.changes == 0]
    local = [record for record in ordered if record.phase not in WAITING]
    places = {(record.phase, record.step) for record in ordered}
    others = " and holds the others" if len(ordered) > 1 else ""
    if halted:
        return _blame(halted[0], f"is stopped by a signal in {halted[0].where}{others}")
    if absent:
        return _blame(absent[0], f"has not begun{others}")
    if len(ordered) == 1 or (local and len(local) < len(ordered)):
        first = (local or ordered)[0]
        return _blame(first, f"is in {first.where}{others}")
    if len(places) == 1:
        sentence = f"all wait in {ordered[0].where}: a collective does not end"
        return Holder(None, ordered[0].phase, ordered[0].step, sentence)
    if local:  # all of them: nobody waits for anybody, as far as one can see
        return _blame(local[0], f"is in {local[0].where} and has not moved for longest")
    odd = _odd_one(ordered)
    if odd is not None:
        rest = ", ".join(sorted({record.where for record in ordered if record is not odd}))
        return _blame(odd, f"is in {odd.where} while the others wait in {rest}")
    where = ", ".join(f"{record.task} in {record.where}" for record in ordered)
    return Holder(None, None, None, f"each waits for the others ({where})")


def _blame(record: Record, what: str) -> Holder:
    return Holder(record.task, record.phase, record.step, f"{record.task} {what}")


def _odd_one(waiting: Sequence[Record]) -> Record | None:
    """Of tasks that wait in different places, the one elsewhere than most, or else behind."""
    counts = Counter(record.phase for record in waiting).most_common()
    if len(counts) > 1 and counts[-1][1] < counts[-2][1]:
        waiting = [record for record in waiting if record.phase is counts[-1][0]]
    behind = min(record.step for record in waiting)
    if len(waiting) > 1 and all(record.step == behind for record in waiting):
        return None
    return next(record for record in waiting if record.step == behind)

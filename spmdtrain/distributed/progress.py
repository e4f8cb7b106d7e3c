"""State and progress of a process, and the detection of jobs that hang."""

import contextlib
import dataclasses
import enum
import faulthandler
import json
import math
import mmap
import os
import select
import signal
import struct
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from spmdtrain.errors import option

if TYPE_CHECKING:
    from spmdtrain.distributed.process_group import Job


# -- State of this process that outlives a run: its job, its progress record, signals, its exit ----
#
# The launcher uses this file: it imports no JAX.


def ignore_failure(reason: str) -> None:
    """Ignores the failure of another process: the default of `ExitState.on_failure`."""


_SAME_REQUEST = 0.3  # seconds in which further signals do not make a request more urgent


@dataclass
class StopRequest:
    """The request of signals to stop this process.

    Signals within 0.3 s of the first are one request, because the scheduler, the terminal and a
    wrapper may each send one.
    """

    signal: Signals | None = None
    """The first signal; None before."""
    repeated: bool = False
    """Whether another signal came after these 0.3 s, which asks to stop at once."""
    acted: bool = False
    """Whether a part of this process has begun to stop because of it."""
    received_at: float = 0.0
    """When the first signal came, by `time.monotonic`."""

    def hear(self, number: int) -> None:
        """Records a signal."""
        now = time.monotonic()
        if self.signal is None:
            self.signal, self.received_at = Signals(number), now
        elif now - self.received_at > _SAME_REQUEST:
            self.repeated = True


@dataclass
class ExitState:
    """State of the watching thread and of the exit of this process."""

    training: bool = False
    """Whether this process trains now. Outside of training, a lack of progress is not a hang."""
    at_work: int = 0
    """The pid of this process while its end would be a failure, whatever its exit code; else 0."""
    work: str = ""
    """What the process then does, such as `training`."""
    hang_timeout: float = 0.0
    """Seconds without progress after which a process that is alone ends; 0 is never."""
    failing: bool = False
    """Whether the main thread has failed."""
    on_failure: Callable[[str], None] = ignore_failure
    """Called with the reason before this process exits because another one has failed."""
    usual_thread_hook: Any = threading.__excepthook__
    """The hook for uncaught exceptions in threads that `failures` has replaced."""
    stop: Callable[[], None] = lambda: None
    """Stops the watching thread."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    finished: threading.Event = field(default_factory=threading.Event)
    """Set when all processes have reached the end of the job."""


@dataclass
class ProcessContext:
    """State of this process. Only the module in parentheses, if there is one, sets a field."""

    job: "Job | None" = None
    """The job that this process has joined (`process_group`)."""
    initialized: bool = False
    """Whether this process has joined a job, or is known to be alone (`initialize`)."""
    deferred: Callable[..., None] | None = None
    """A call of `initialize` that waits for the name of the strategy (`initialize`)."""
    channel: "Channel | None" = None
    """Publishes the progress of this process; None without a launcher (`progress`)."""
    clock: "PhaseClock | None" = None
    """The seconds of this process in each phase; None before `progress.begin` or a run."""
    stop_request: StopRequest = field(default_factory=StopRequest)
    """The request of signals to stop, until a part has acted on it."""
    exits: ExitState = field(default_factory=ExitState)
    """State of the exit after a failure in this or another process (`failures`)."""
    reserve: mmap.mmap | None = None
    """Reserved address space, freed to report that memory is exhausted (`out_of_memory`)."""
    has_coordinator: bool = False
    """Whether this process has created a `Coordinator`."""
    running_call: Any = None
    """The call that this worker of a `Coordinator` is running: a `coordinator.Running`, or None."""


CONTEXT = ProcessContext()


def stop_request() -> StopRequest:
    """Returns the request to stop this process: a new one if a part has acted on the last."""
    if CONTEXT.stop_request.acted:
        CONTEXT.stop_request = StopRequest()
    return CONTEXT.stop_request


# -- Seconds that this process has spent in each phase ---------------------------------------------


class Interval(NamedTuple):
    """The seconds of the thread that trains in an interval (see `PhaseClock.end_interval`).

    Attributes:
      load: Waited for a batch.
      host: Everything else outside of steps.
      step: Dispatched steps, and waited for them; `waited` is a part of it.
      waited: Waited for the output of steps.
      steps: Number of the steps that were dispatched.
    """

    load: float
    host: float
    step: float
    waited: float
    steps: int


class PhaseClock:
    """Adds up the time in each phase of the thread that trains, which begins in `phase`."""

    __slots__ = ("_marks", "_seconds", "_since", "_steps", "_waited", "began", "intervals", "phase")

    def __init__(self, phase: str) -> None:
        self.phase = phase
        self.began = time.time()
        """When the clock was started, in seconds since the epoch."""
        self._since = time.perf_counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._marks: defaultdict[str, float] = defaultdict(float)  # at the end of an interval
        self._waited, self._steps = 0.0, 0  # in this interval
        self.intervals: deque[Interval] | None = None
        """Receives the intervals if another thread has set it, which takes them."""

    def switch(self, phase: str) -> str:
        """Ends the current phase and begins another; returns the one that has ended."""
        now, before = time.perf_counter(), self.phase
        self._seconds[before] += now - self._since
        self.phase, self._since = phase, now
        return before

    def count_wait(self, seconds: float) -> None:
        """Counts a wait for the output of steps."""
        self._waited += seconds

    def count_steps(self, number: int) -> None:
        """Counts steps that were dispatched."""
        self._steps += number

    def end_interval(self, *, overlapped: bool) -> None:
        """Ends an interval, which began with the end of the one before.

        If it is overlapped, its time of phases LOAD and HOST counts as time of STEP.
        """
        self.switch(self.phase)
        totals, marks = self._seconds, self._marks
        load, host = (totals[x] - marks[x] for x in (Phase.LOAD, Phase.HOST))
        if self.intervals is not None:
            step = totals[Phase.STEP] - marks[Phase.STEP]
            self.intervals.append(Interval(load, host, step, self._waited, self._steps))
            self._waited, self._steps = 0.0, 0
        if overlapped:
            totals[Phase.LOAD] -= load
            totals[Phase.HOST] -= host
            totals[Phase.STEP] += load + host
        for x in (Phase.LOAD, Phase.HOST, Phase.STEP):
            marks[x] = totals[x]

    def read(self) -> dict[str, float]:
        """Returns the seconds by phase, up to now."""
        self.switch(self.phase)
        return {str(phase): max(0.0, seconds) for phase, seconds in self._seconds.items()}


# -- Progress of the tasks of a launched job: a small file for each, written without collectives
#
# A process that waits in a collective does not know which other process it waits for. Therefore
# each one publishes its step and phase, and the launcher compares them. Without a launcher the
# functions for processes do nothing.

LAUNCH = "SPMDTRAIN_LAUNCH"
"""Environment variable with the folder of the job's files."""
TASK = "SPMDTRAIN_TASK"
"""Environment variable with the name of the task, such as `worker 1`."""


class Phase(enum.StrEnum):
    """The current activity of a process. At most 8 letters, because a record has 8 bytes for it."""

    START = "start"
    RESTORE = "restore"
    COMPILE = "compile"
    COMPILED = "compiled"
    """Waiting until all processes have compiled the next program."""
    LOAD = "load"
    STEP = "step"
    EVALUATE = "evaluate"
    SAVE = "save"
    HOST = "host"
    """Everything outside the other phases, such as callbacks."""
    END = "end"


# In these phases a process may wait for all the others; in the rest it only makes them wait.
WAITING = frozenset(
    {Phase.COMPILED, Phase.STEP, Phase.EVALUATE, Phase.SAVE, Phase.RESTORE, Phase.END}
)

# A record: pid, step, phase, changes, time. The step last saved follows in a separate slot, because
# another thread may write it: separate slots need no lock.
WITHOUT = "without"
"""File with the task to leave out."""
REFUSED = "refused-processes"
"""File with the numbers of processes that the job cannot have."""
_RECORD = struct.Struct("<qq8sqd")
_SAVED = struct.Struct("<q")
_SEALING = struct.Struct("<q")  # a third slot: the step whose manifest is being written
_SIZE = _RECORD.size + _SAVED.size + _SEALING.size
_NOT_SAVED = -1


KINDS = ("phase", "reason", "stacks", "work")
"""Kinds of files of a task."""


def path(folder: str | os.PathLike[str], task: str, kind: str) -> Path:
    """Returns the file of a task; `kind` is one of `KINDS`."""
    return Path(folder) / f"{task.replace(' ', '-')}.{kind}"


# -- in the processes ------------------------------------------------------------------------------


class Channel:
    """The memory-mapped .phase file of this process, and the values last written to it.

    It is mapped because a system call would take longer than all the rest. The kernel keeps the
    written values however the process ends.
    """

    __slots__ = ("_memory", "changes", "phase", "pid", "step")

    def __init__(self, file: int | None, *, shared: bool = False) -> None:
        if shared and file is not None:
            self._memory = mmap.mmap(file, _SIZE)
            os.close(file)
            # Keeps the pid of the task, because the launcher sends its signals to that.
            self.pid, self.step, phase, self.changes, _ = _RECORD.unpack_from(self._memory)
            self.phase = Phase(phase.rstrip(b"\0").decode())
            return
        content = bytes(_RECORD.size) + _SAVED.pack(_NOT_SAVED) + _SEALING.pack(_NOT_SAVED)
        if file is None:
            self._memory = mmap.mmap(-1, len(content))
            self._memory[:] = content
        else:
            # Written before it is mapped, because touching a mapped page that does not fit on the
            # disk is fatal.
            os.write(file, content)
            self._memory = mmap.mmap(file, len(content))
            os.close(file)
        self.pid = os.getpid()
        self.changes = 0
        self.publish(Phase.START, 0)

    def publish(self, phase: Phase, step: int) -> None:
        """Writes a new record."""
        self.phase = phase
        self.step = step
        self.changes += 1
        # Packed first and then copied at once, so that a reader sees the old record or the new one.
        record = _RECORD.pack(self.pid, step, phase.encode(), self.changes, time.monotonic())
        self._memory[: _RECORD.size] = record

    def read(self) -> bytes:
        """Returns the content of the file."""
        return bytes(self._memory)

    def publish_saved(self, step: int) -> None:
        """Writes the step of the newest complete checkpoint."""
        self._memory[_RECORD.size : _RECORD.size + _SAVED.size] = _SAVED.pack(step)

    def publish_sealing(self, step: int) -> None:
        """Writes the step of the checkpoint whose manifest is being written; -1 if none is."""
        self._memory[_RECORD.size + _SAVED.size :] = _SEALING.pack(step)


class _TimedScope:
    """Counts the time between entry and exit as time of a phase.

    A class, because a context manager from a generator takes three times as long, and a loop enters
    several of these per step.
    """

    __slots__ = ("_before", "_clock", "_phase")

    def __init__(self, clock: PhaseClock, phase: Phase) -> None:
        self._clock = clock
        self._phase = phase

    def __enter__(self) -> None:
        clock = self._clock
        # An evaluation includes the reading of its batches.
        inside = self._phase is Phase.LOAD and clock.phase == Phase.EVALUATE
        before = clock.switch(Phase.EVALUATE if inside else self._phase)
        # A process that enters a phase has started.
        self._before = Phase.HOST if before == Phase.START else before

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._clock.switch(self._before)


class _PhaseScope(_TimedScope):
    """Publishes a phase on entry and the outer phase on exit, and counts the time."""

    __slots__ = ("_channel", "_outer", "_step")

    def __init__(self, clock: PhaseClock, channel: Channel, phase: Phase, step: int | None) -> None:
        super().__init__(clock, phase)
        self._channel = channel
        self._step = step

    def __enter__(self) -> None:
        super().__enter__()
        channel = self._channel
        outer = channel.phase
        self._outer = Phase.HOST if outer is Phase.START else outer
        channel.publish(self._phase, channel.step if self._step is None else self._step)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        self._channel.publish(self._outer, self._channel.step)


def begin(*, always: bool = False) -> None:
    """Starts to publish, in phase START. Call it early; further calls do nothing.

    After it the launcher can request the stacks of this process by SIGUSR2. With `always`, the
    process publishes also without a launcher, for `local_record`.
    """
    folder, task = os.environ.get(LAUNCH), os.environ.get(TASK)
    if CONTEXT.clock is None:
        CONTEXT.clock = PhaseClock(Phase.START)
    if CONTEXT.channel is not None:
        return
    if not folder or not task:
        CONTEXT.channel = Channel(None) if always else None
        return
    try:
        stacks = _create(path(folder, task, "stacks"))
    except FileExistsError:
        return  # a child process of the task, which inherits its environment
    # Register before the .phase file exists: SIGUSR2 kills a process without a handler, and the
    # launcher sends it only to those with a .phase file.
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
    CONTEXT.channel = Channel(_create(path(folder, task, "phase")))
    os.register_at_fork(after_in_child=_forget)


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Marks the work of this process as unfinished for the launcher, while entered.

    The mark is a file, which stays if the process ends in a way that runs no further code.
    """
    folder, task = os.environ.get(LAUNCH), os.environ.get(TASK)
    if not folder or not task or (file := path(folder, task, "work")).exists():
        yield  # without a launcher, or in a child process of the task
        return
    file.write_text(what)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def begin_for_task() -> None:
    """Starts to publish in the record of the task that started this process.

    It is for a process that does the work of a task, if the task itself publishes nothing more.
    """
    folder, task = os.environ.get(LAUNCH), os.environ.get(TASK)
    if CONTEXT.channel is None and folder and task:
        with contextlib.suppress(FileNotFoundError):  # the task does not publish yet
            file = os.open(path(folder, task, "phase"), os.O_RDWR)
            CONTEXT.channel = Channel(file, shared=True)


def _create(file: Path) -> int:
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)


def _forget() -> None:
    """Stops publishing in a forked process, because the file belongs to its parent."""
    CONTEXT.channel = None


def launched() -> bool:
    """Returns whether a launcher has started this process and watches it."""
    return bool(os.environ.get(LAUNCH) and os.environ.get(TASK))


def local_record(task: str) -> "ProgressRecord | None":
    """Returns the last record of this process with `task` as its name; None if it has none."""
    record = None if CONTEXT.channel is None else _record(task, CONTEXT.channel.read())
    return record and dataclasses.replace(record, unread=_unread())


def _unread() -> str:
    """Returns the standard stream whose reader has stopped reading; else an empty text."""
    for file, name in ((1, "standard output"), (2, "standard error")):
        with contextlib.suppress(OSError):  # it is closed
            if not select.select([], [file], [], 0)[1]:
                return name
    return ""


def phase(phase: Phase, step: int | None = None) -> AbstractContextManager[None]:
    """Publishes `phase` while entered, and the outer phase again on exit (HOST at the outermost).

    The time is counted as time of the phase, also without a launcher (see `PhaseClock`). Only the
    thread that trains may use it. Without a step, the last one stays.
    """
    channel, clock = CONTEXT.channel, CONTEXT.clock
    if clock is None:
        clock = CONTEXT.clock = PhaseClock(Phase.START)
    return (
        _TimedScope(clock, phase) if channel is None else _PhaseScope(clock, channel, phase, step)
    )


def end_interval(*, overlapped: bool) -> None:
    """Ends an interval of the thread that trains, between two of the points that call this.

    `overlapped` means that devices ran steps throughout: the time in which this thread read
    batches, or ran callbacks or the user's loop, then counts as time of steps.
    """
    if CONTEXT.clock is not None:
        CONTEXT.clock.end_interval(overlapped=overlapped)


def count_wait(seconds: float) -> None:
    """Counts a wait of the thread that trains, in phase STEP, for the output of steps."""
    if CONTEXT.clock is not None:
        CONTEXT.clock.count_wait(seconds)


def count_steps(number: int) -> None:
    """Counts steps that the thread that trains has dispatched."""
    if CONTEXT.clock is not None:
        CONTEXT.clock.count_steps(number)


def take_clock() -> PhaseClock:
    """Returns the clock of the phases for a new run.

    The clock of the first run has the time since `begin`; a later run in the same process gets a
    new clock.
    """
    clock = CONTEXT.clock
    if clock is None or clock.phase != Phase.START:
        clock = CONTEXT.clock = PhaseClock(Phase.START)
    return clock


def heartbeat() -> None:
    """Publishes that the operation that this process waits for makes progress.

    A job counts as hung if no record changes.
    """
    if CONTEXT.channel is not None:
        CONTEXT.channel.publish(CONTEXT.channel.phase, CONTEXT.channel.step)


def saved(step: int) -> None:
    """Publishes that the checkpoint of `step` is the newest one that is complete."""
    if CONTEXT.channel is not None:
        CONTEXT.channel.publish_saved(step)


@contextlib.contextmanager
def sealing(step: int) -> Iterator[None]:
    """Publishes while entered that the checkpoint of `step` lacks only its manifest.

    The saving thread calls it.
    """
    if CONTEXT.channel is not None:
        CONTEXT.channel.publish_sealing(step)
    yield
    if CONTEXT.channel is not None:
        CONTEXT.channel.publish_sealing(_NOT_SAVED)


def write_exit_reason(code: int, reason: str, *, own: bool = True) -> None:
    """Writes the reason of this process' exit for the launcher; later calls do nothing.

    `reason` is in one line. `own` is False if this process exits only because another one failed.
    """
    folder, task = os.environ.get(LAUNCH), os.environ.get(TASK)
    if folder and task:
        content = json.dumps({"code": int(code), "reason": _as_text(reason), "own": own})
        with contextlib.suppress(FileExistsError), path(folder, task, "reason").open("x") as file:
            file.write(content)  # ASCII, because json.dumps escapes all other characters


def request_without(task: str) -> None:
    """Asks the launcher, if there is one, to start the job again without a task.

    It does so if this attempt ends by `ExitCode.DEVICE_FAULT`.
    """
    if folder := os.environ.get(LAUNCH):
        (Path(folder) / WITHOUT).write_text(_as_text(task), "utf-8")


def wants_refused_processes() -> bool:
    """Returns whether the launcher asks with which numbers of processes the job cannot continue."""
    folder = os.environ.get(LAUNCH)
    return folder is not None and (Path(folder) / REFUSED).exists()


def write_refused_processes(reasons: Mapping[int, str]) -> None:
    """Tells the launcher with which numbers of processes the job cannot continue, and why."""
    _replace(Path(os.environ[LAUNCH]), REFUSED, json.dumps(reasons))


def job_ended() -> str | None:
    """Returns how the training has finally ended: `finished`, `preempted` or `failed: ...`.

    Returns None while it is running, and without a launcher.
    """
    folder = os.environ.get(LAUNCH)
    try:
        return (Path(folder) / "ended").read_text("utf-8") if folder else None
    except FileNotFoundError:
        return None


def _as_text(reason: str) -> str:
    """Escapes surrogates, which a reason may contain because file names need not be valid text."""
    return reason.encode("utf-8", "backslashreplace").decode("utf-8")


# -- in the launcher -------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProgressRecord:
    """The last published progress of a task."""

    task: str
    step: int
    phase: Phase
    saved: int
    """Step of the newest complete checkpoint; -1 if there is none."""
    changes: int
    """Number of times the task has published; 0 if it has not started to."""
    at: float
    """Time of the last publication by `time.monotonic`, one clock for the whole machine."""
    pid: int = 0
    """The publishing process; the process that was started may be a wrapper of it."""
    sealing: int = _NOT_SAVED
    """Step of a checkpoint whose data is written and whose manifest is not; -1 if there is none."""
    unread: str = ""
    """The stream of the process that is full and not read, such as `standard output`."""

    @property
    def where(self) -> str:
        """`step 37`, or `load at step 37`."""
        if self.phase is Phase.STEP:
            return f"step {self.step}"
        return self.phase if self.phase is Phase.START else f"{self.phase} at step {self.step}"


@dataclass(frozen=True)
class Reason:
    """The reason that a task has written for its exit (see `write_exit_reason`)."""

    code: int
    reason: str
    own: bool


def read(folder: str | os.PathLike[str], task: str) -> ProgressRecord | None:
    """Returns the last record of a task; None before it has published one."""
    try:
        content = path(folder, task, "phase").read_bytes()
    except FileNotFoundError:
        return None
    return _record(task, content)


def _record(task: str, content: bytes) -> ProgressRecord | None:
    if len(content) < _SIZE:
        return None  # the file is being written
    pid, step, phase, changes, at = _RECORD.unpack_from(content)
    if not changes:
        return None
    (newest,) = _SAVED.unpack_from(content, _RECORD.size)
    (sealing,) = _SEALING.unpack_from(content, _RECORD.size + _SAVED.size)
    phase = Phase(phase.rstrip(b"\0").decode())
    return ProgressRecord(task, step, phase, newest, changes, at, pid, sealing)


def shifted(content: bytes, seconds: float) -> bytes:
    """Returns the content of a record with another time, for a clock that is ahead by seconds."""
    if len(content) < _SIZE:
        return content
    *values, at = _RECORD.unpack_from(content)
    return _RECORD.pack(*values, at + seconds) + content[_RECORD.size :]


def read_reason(folder: str | os.PathLike[str], task: str) -> Reason | None:
    """Returns the exit reason of a task; None if it has not written one completely."""
    try:
        content = json.loads(path(folder, task, "reason").read_text())
    except (FileNotFoundError, ValueError):
        return None
    return Reason(content["code"], content["reason"], content["own"])


def unfinished_work(folder: str | os.PathLike[str], task: str) -> str | None:
    """Returns what a task has not finished (see `working`); None if it does no such work."""
    try:
        return path(folder, task, "work").read_text()
    except FileNotFoundError:
        return None


def take_without(folder: str | os.PathLike[str]) -> str | None:
    """Returns and forgets the task of `request_without`; None if there was no such request."""
    written = Path(folder) / WITHOUT
    try:
        task = written.read_text("utf-8")
    except FileNotFoundError:
        return None
    written.unlink()
    return task


def ask_for_refused_processes(folder: str | os.PathLike[str]) -> None:
    """Asks the job for its `refused_processes`."""
    _replace(Path(folder), REFUSED, "{}")


def refused_processes(folder: str | os.PathLike[str]) -> dict[int, str]:
    """Returns the numbers of processes with which the job cannot continue, and why.

    It is empty before the job has said so.
    """
    found = json.loads((Path(folder) / REFUSED).read_text("utf-8"))
    return {int(number): why for number, why in found.items()}


def write_ended(folder: str | os.PathLike[str], how: str) -> None:
    """Writes the result of the training for `job_ended`."""
    _replace(Path(folder), "ended", _as_text(how))


def _replace(folder: Path, name: str, text: str) -> None:
    """Writes a file that a reader sees as a whole."""
    written = folder / f"{name}.new"
    written.write_text(text, "utf-8")
    written.replace(folder / name)


# -- Jobs that hang: how long nothing has changed, and which task blocks the others ----------------
#
# The launcher and the processes of a job without a launcher detect hangs by the same functions.
# They differ in where the records come from: files of the job's folder, or JAX's key-value store.


class IdleTimer:
    """The time for which an observed state has not changed.

    At most `max_interval` seconds are counted between two calls of `idle`. While a launcher is
    stopped (Ctrl-Z), its children soon block on their output: that time must not count as a hang.
    """

    def __init__(self, max_interval: float = math.inf) -> None:
        self._max_interval = max_interval
        self._state: object = None
        self._last = time.monotonic()
        self._idle = 0.0

    def idle(self, state: object) -> float:
        """Returns the seconds since the state, compared by `==`, has last changed."""
        now = time.monotonic()
        interval = min(now - self._last, self._max_interval)
        self._idle = self._idle + interval if state == self._state else 0.0
        self._state, self._last = state, now
        return self._idle


MEASURED = frozenset({Phase.LOAD, Phase.STEP, Phase.EVALUATE})
"""Phases that recur, so that the next one can be expected to take no longer than some before. A
compilation, a save or a callback says nothing about the next one."""
_FACTOR, _LEAST = 5, 60.0  # times the longest interval without a change; seconds
_ENOUGH = 20  # changes of each task to see first: first steps are dispatched, and not awaited


class HangTimer:
    """Decides when a job without progress counts as hung.

    Args:
      timeout: Seconds without progress, 0 for never; None derives them from the measured steps.
      default: With None, the seconds for the first steps and for phases outside of `MEASURED`.
      max_interval: See `IdleTimer`.
    """

    def __init__(self, timeout: float | None, default: float, max_interval: float) -> None:
        self._timeout, self._default = timeout, default
        self._max_interval, self._timer = max_interval, IdleTimer(max_interval)
        self._before, self._idle, self._at = frozenset[Phase](), 0.0, time.monotonic()
        # Of training and, where the key is True, of evaluation.
        self._changes, self._slowest = Counter[bool](), {False: 0.0, True: 0.0}

    def hung_for(self, state: object, phases: Sequence[Phase]) -> str | None:
        """Returns how long a hung job has been without progress, and the limit; else None.

        The state is compared by `==`; `phases` are the current phases of all tasks.
        """
        idle, now, current = self._timer.idle(state), time.monotonic(), frozenset(phases)
        if idle == 0 and self._before and self._before <= MEASURED:
            # The state may have changed at any time since the last call.
            pause = self._idle + min(now - self._at, self._max_interval)
            evaluates = Phase.EVALUATE in self._before
            self._slowest[evaluates] = max(self._slowest[evaluates], pause)
            self._changes[evaluates] += 1
        self._idle, self._at, self._before = idle, now, current
        limit, why = self._limit(current, _ENOUGH * len(phases))
        return f"{limit:g} s{why}" if 0 < limit <= idle else None

    def _limit(self, phases: frozenset[Phase], enough: int) -> tuple[float, str]:
        if self._timeout is not None:
            return self._timeout, ""
        evaluates = Phase.EVALUATE in phases
        if not phases or not phases <= MEASURED or self._changes[evaluates] < enough:
            return self._default, ""
        slowest = self._slowest[evaluates]
        limit = min(self._default, max(_LEAST, math.ceil(_FACTOR * slowest)))
        longest = f"the longest pause before was {slowest:.1f} s"
        return limit, f" ({longest}; {option('hang_timeout')} sets another limit)"


@dataclass(frozen=True)
class Hang:
    """The task that most likely blocks a job without progress."""

    task: str | None
    """None if no single task blocks the others."""
    phase: Phase | None
    step: int | None
    sentence: str


def find_hung_task(records: Sequence[ProgressRecord], stopped: Collection[str] = ()) -> Hang:
    """Returns the task that blocks the others of a job without progress.

    It is found by the phases in the last records of all tasks. Step counters alone would select the
    wrong task: steps are dispatched ahead, so the task that blocks the others may be ahead of them
    or behind. `stopped` has the names of the tasks that are stopped by a signal.
    """
    ordered = sorted(records, key=lambda record: record.at)  # longest without progress first
    halted = [record for record in ordered if record.task in stopped]
    absent = [record for record in ordered if record.changes == 0]
    working = [record for record in ordered if record.phase not in WAITING]
    places = {(record.phase, record.step) for record in ordered}
    others = " and blocks the others" if len(ordered) > 1 else ""
    if halted:
        return _hang(halted[0], f"is stopped by a signal in {halted[0].where}{others}")
    if absent:
        return _hang(absent[0], f"has not started{others}")
    if unread := [record for record in ordered if record.unread]:
        first = unread[0]
        return _hang(first, f"is in {first.where}{others}: its {first.unread} is not read")
    if len(ordered) == 1 or (working and len(working) < len(ordered)):
        first = (working or ordered)[0]
        return _hang(first, f"is in {first.where}{others}")
    if len(places) == 1:
        sentence = f"all wait in {ordered[0].where}: a collective does not end"
        if working:
            more = f"a larger {option('hang_timeout')} allows more time"
            sentence = f"all are in {ordered[0].where}, and none waits for another: {more}"
        return Hang(None, ordered[0].phase, ordered[0].step, sentence)
    if working:  # all tasks work, and none waits for another
        return _hang(working[0], f"is in {working[0].where}, the longest without progress")
    outlier = _outlier(ordered)
    if outlier is not None:
        rest = ", ".join(sorted({record.where for record in ordered if record is not outlier}))
        return _hang(outlier, f"is in {outlier.where} while the others wait in {rest}")
    where = ", ".join(f"{record.task} in {record.where}" for record in ordered)
    return Hang(None, None, None, f"each waits for the others ({where})")


def _hang(record: ProgressRecord, predicate: str) -> Hang:
    return Hang(record.task, record.phase, record.step, f"{record.task} {predicate}")


def _outlier(waiting: Sequence[ProgressRecord]) -> ProgressRecord | None:
    """Returns the one task whose phase differs from most of the others, else the one behind."""
    counts = Counter(record.phase for record in waiting).most_common()
    if len(counts) > 1 and counts[-1][1] < counts[-2][1]:
        waiting = [record for record in waiting if record.phase is counts[-1][0]]
    behind = min(record.step for record in waiting)
    if len(waiting) > 1 and all(record.step == behind for record in waiting):
        return None
    return next(record for record in waiting if record.step == behind)

"""Child processes of the launcher, and reports of how tasks exit."""

import collections
import contextlib
import enum
import functools
import itertools
import math
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Protocol

from spmdtrain.distributed import out_of_memory
from spmdtrain.distributed.progress import Phase, ProgressRecord, Reason, stop_request
from spmdtrain.document.terminal import byte_size
from spmdtrain.errors import ExitCode

# -- Child processes of the launcher, whose output is prefixed and which never outlive it ----------

_LONGEST_LINE = 1 << 16
_KEPT_LINES = 300  # lines of standard error in which the reason of a failure is searched
# Gloo writes this line for each group of devices, and has no option to turn it off.
_CONNECTED = re.compile(
    rb"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. "
    rb"Expected number of connected peer ranks is : \d+"
)
_STREAMS = {"stdout": 1, "stderr": 2}
_TITLES = {"stdout": "output", "stderr": "error"}
_PATIENCE = 5.0  # seconds for the reader of a stream to read a line, and for the reaper to end
_MOST_DRAINING = 10.0  # seconds for the last lines of a task that has exited
_MAX_WAITING = 1 << 20  # bytes of lines that wait for it
_COLORS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)

# Runs before the command, in the same process: makes Linux kill it when the launcher dies. It is
# not a preexec_fn, because that would run between fork and exec of a process with threads.
_EXEC = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):  # the launcher died before the call of prctl
    os._exit(1)
for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec would keep that
    signal.signal(ignored, signal.SIG_DFL)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    print(f"error: {sys.argv[2]} cannot be run: {error.strerror}", file=sys.stderr)
    os._exit(2)
"""

# Reads "+GROUP" and "-GROUP" until the launcher ends in any way, then kills the remaining groups.
_REAPER = """
import os, shutil, signal, sys
for ignored in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
    signal.signal(ignored, signal.SIG_IGN)
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
shutil.rmtree(sys.argv[1], ignore_errors=True)
"""


class Reaper:
    """A process that kills remaining children when the launcher ends, and deletes `folder`.

    It also kills the processes that the children have started, if they stay in their process group.
    """

    def __init__(self, folder: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-u", "-c", _REAPER, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )

    def notify(self, sign: str, group: int) -> None:
        """Adds (`+`) or removes (`-`) a process group to kill."""
        assert self._process.stdin is not None
        # If the reaper itself was killed, PR_SET_PDEATHSIG still kills the children.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._process.stdin.fileno(), f"{sign}{group}\n".encode())

    def close(self) -> None:
        """Waits until it has killed the remaining groups and deleted the folder.

        If that takes longer than some seconds, the launcher does not wait for it.
        """
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE)


class LineWriter(Protocol):
    """Receives the lines of children, in several threads."""

    def line(self, name: str, stream: str, text: bytes) -> None:
        """Writes a line of a child to `stdout` or `stderr`; `text` has no line feed."""


class Output:
    """Standard output and error of the launcher, to which many threads write whole lines.

    Lines wait for a slow reader, and so do the tasks. If the reader has stopped, such as a pager,
    or if a disk is full, the tasks continue and the other stream says so. The names of the tasks
    prefix their lines. Where both streams are one file, such as a terminal, lines are in the order
    in which they were read: a task's output and errors come through two pipes.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._prefixes = {stream: prefixes(names, file) for stream, file in _STREAMS.items()}
        self._streams = {
            stream: _Stream(file, functools.partial(self._note, stream))
            for stream, file in _STREAMS.items()
        }
        with contextlib.suppress(OSError):  # one of them is closed
            if os.path.sameopenfile(*_STREAMS.values()):
                self._streams["stderr"] = self._streams["stdout"]

    def line(self, name: str, stream: str, text: bytes) -> None:
        """Writes a line with the prefix of its task; waits for a reader that is slow."""
        self._streams[stream].put(self._prefixes[stream][name] + text + b"\n")

    def report(self, name: str, text: str, stream: str = "stderr") -> None:
        """Writes a line of the launcher itself: it never waits, and is not left out for others.

        `name` is the task, or `launch`.
        """
        line = self._prefixes[stream][name] + text.encode(errors="replace") + b"\n"
        self._streams[stream].put(line, own=True)

    def close(self) -> None:
        """Waits until all lines are written, or their reader has stopped."""
        for name, stream in self._streams.items():
            if lost := stream.lost():
                self._note(name, f"is not read: {lost:,} lines were left out")
        self._streams["stdout"].lost()  # it may have got the last note

    def _note(self, stream: str, text: str) -> None:
        (other,) = _STREAMS.keys() - {stream}
        self.report("launch", f"standard {_TITLES[stream]} {text}", other)


class _Stream:
    """Lines that wait to be written to a stream, and the thread that writes them.

    `note` says on the other stream that lines of this one are lost.
    """

    def __init__(self, file: int, note: Callable[[str], None]) -> None:
        self._file, self._note = file, note
        self._waiting, self._size = collections.deque[bytes](), 0
        self._moved = time.monotonic()  # when something was last written, or began to wait
        self._left_out, self._failed = 0, False
        self._writers = 0  # threads that wait for room
        self._change = threading.Condition()
        threading.Thread(target=self._write, daemon=True).start()

    def put(self, line: bytes, *, own: bool = False) -> None:
        """Adds a line; waits for room, unless it is a line of the launcher itself (`own`)."""
        with self._change:
            self._writers += 1
            while not (has_room := own or self._size < _MAX_WAITING) and (left := self._patience()):
                self._change.wait(left)
            self._writers -= 1
            if has_room:
                if not self._waiting:
                    self._moved = time.monotonic()
                self._waiting.append(line)
                self._size += len(line)
                self._change.notify_all()
            else:
                self._left_out += 1
            is_first = not has_room and self._left_out == 1
        if is_first:  # without the lock, because the other stream may be about to say the same
            self._note("is not read: lines are left out until it is")

    def _patience(self) -> float:
        """Returns the seconds that a reader has left to read a line."""
        return max(0.0, self._moved + _PATIENCE - time.monotonic())

    def _write(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._waiting)
                line = self._waiting[0]
            self._write_line(line)
            self._moved = time.monotonic()
            with self._change:
                count = self._take_left_out() if len(self._waiting) == 1 else 0
            if count:
                self._note(f"is read again: {count:,} lines were left out")
            with self._change:
                self._size -= len(self._waiting.popleft())
                self._change.notify_all()

    def _write_line(self, line: bytes) -> None:
        # os.write, because a thread that blocks in Python's buffered writer keeps Python from
        # exiting. If the stream is closed or its disk is full, the training continues without it.
        try:
            while line:
                try:
                    line = line[os.write(self._file, line) :]
                except BlockingIOError:  # the stream is not blocking
                    select.select([], [self._file], [])
        except OSError as error:
            if not self._failed:
                self._failed = True
                self._note(f"cannot be written ({error.strerror}): its lines are lost")

    def _take_left_out(self) -> int:
        count, self._left_out = self._left_out, 0
        return count

    def lost(self) -> int:
        """Waits until all lines are written or the reader stops; returns how many are lost."""
        with self._change:
            while (self._waiting or self._writers) and (left := self._patience()):
                self._change.wait(left)
            return len(self._waiting) + self._take_left_out()


def prefixes(names: Sequence[str], file: int) -> dict[str, bytes]:
    """Returns the prefix of each task's lines; in a terminal padded to one width, and colored."""
    plain = {name: f"[{name}] " for name in names}
    if os.isatty(file):
        width = max(map(len, plain.values()))
        plain = {name: prefix.ljust(width) for name, prefix in plain.items()}
        if "NO_COLOR" not in os.environ:
            colors = itertools.cycle(_COLORS)
            plain = {name: f"\x1b[{next(colors)}m{text}\x1b[0m" for name, text in plain.items()}
    return {name: prefix.encode() for name, prefix in plain.items()}


class Child:
    """A running command in its own session, whose output is forwarded line by line.

    It inherits the open `files`.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: LineWriter,
        reaper: Reaper,
        files: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.sent: set[int] = set()
        """Signals that the launcher has sent to it."""
        self.status: int | None = None
        """None while it runs; then its exit code, or -N if signal N killed it."""
        self.peak = 0
        """Peak memory of its largest process in bytes, after its exit."""
        self.address_limit: int | None = None
        """Limit of its address space in bytes, after its exit; None if unlimited or unknown."""
        self.address_space = 0
        """The largest address space that `poll` has seen, in bytes."""
        self._output = output
        self._reaper = reaper
        self._errors: collections.deque[bytes] = collections.deque(maxlen=_KEPT_LINES)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _EXEC, str(os.getpid()), *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=files,
        )
        self.pid = self._process.pid
        reaper.notify("+", self.pid)
        self._moves = dict.fromkeys(_STREAMS, 0)  # odd while a line waits for the launcher's reader
        self._drained_by = math.inf
        self._readers = [
            threading.Thread(target=self._forward, args=(stream,), daemon=True)
            for stream in _STREAMS
        ]
        for reader in self._readers:
            reader.start()

    @property
    def errors(self) -> str:
        """The last lines of its standard error."""
        return b"\n".join(self._errors).decode(errors="replace")

    def poll(self) -> bool:
        """Returns whether it has exited and its output is read; kills what is left of its group."""
        if self.status is not None:
            return True
        # WNOWAIT does not reap it, so that no other process group can get its number.
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            self.address_space = max(self.address_space, out_of_memory.address_space(self.pid))
            return False
        self._signal_group(signal.SIGKILL)
        if not self._is_drained():
            return False
        self._reaper.notify("-", self.pid)
        self.address_limit = out_of_memory.address_limit(self.pid)
        _, status, usage = os.wait4(self.pid, 0)
        self.peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        self.status = self._process.returncode = os.waitstatus_to_exitcode(status)
        return True

    def _is_drained(self) -> bool:
        """Returns whether all output is read, or seems to be: no line has come or waited for 1 s.

        A process that has left the group may keep the pipes open.
        """
        before, began = dict(self._moves), time.monotonic()
        self._drained_by = min(self._drained_by, began + _MOST_DRAINING)
        for reader in self._readers:
            reader.join(timeout=max(0, began + 1 - time.monotonic()))
        if not any(reader.is_alive() for reader in self._readers):
            return True
        is_quiet = self._moves == before and not any(n % 2 for n in before.values())
        return is_quiet or time.monotonic() >= self._drained_by

    def send(self, number: int, pid: int | None = None) -> None:
        """Sends a signal to process `pid` if it is in the child's session, else to the child."""
        if self.status is None:
            self.sent.add(number)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid if pid and self._in_session(pid) else self.pid, number)

    def _in_session(self, pid: int) -> bool:
        try:
            return os.getsid(pid) == self.pid
        except ProcessLookupError:
            return False

    def kill(self) -> None:
        """Kills it with its process group."""
        if self.status is None:
            self.sent.add(signal.SIGKILL)
            self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def _forward(self, stream: str) -> None:
        pipe = getattr(self._process, stream)
        with contextlib.closing(pipe):
            for line in lines(pipe.fileno()):
                if stream == "stderr":
                    self._errors.append(line)
                if not _CONNECTED.fullmatch(line):
                    self._moves[stream] += 1
                    self._output.line(self.name, stream, line)
                    self._moves[stream] += 1


def lines(file: int) -> Iterator[bytes]:
    """Yields the lines of a pipe as a terminal would finally show them, very long ones in pieces.

    Text that a progress bar has overwritten by a carriage return is omitted.
    """
    rest = b""
    while chunk := os.read(file, _LONGEST_LINE):
        *complete, rest = (rest + chunk).split(b"\n")
        for line in complete:
            yield _visible(line.removesuffix(b"\r"))
        rest = _visible(rest)
        if len(rest) > _LONGEST_LINE:
            yield rest
            rest = b""
    if rest:
        yield rest.removesuffix(b"\r")


def _visible(line: bytes) -> bytes:
    """Returns the text after the last carriage return, apart from one at the end (CR LF)."""
    return line[line.rfind(b"\r", 0, -1) + 1 :]


class Signals:
    """Recorded stop signals, and a sleep that they and the exit of a child interrupt.

    The stop signals are SIGTERM, SIGHUP, SIGINT and SIGUSR1, which Slurm sends before the end of a
    job. A signal that is already ignored, such as under nohup, stays ignored.
    """

    def __init__(self) -> None:
        self._before: dict[int, object] = {}

    def __enter__(self) -> "Signals":
        self._request = stop_request()
        self._reader, self._writer = os.pipe()
        for end in (self._reader, self._writer):
            os.set_blocking(end, False)
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        stop = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1)
        for number in (*stop, signal.SIGCHLD):
            if number == signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._catch)
        return self

    @property
    def received(self) -> signal.Signals | None:
        """The first stop signal that this process has received; None before."""
        return self._request.signal

    @property
    def repeated(self) -> bool:
        """Whether a second stop signal came more than 0.3 s after the first: stop at once."""
        return self._request.repeated

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            self._request.hear(number)

    def wait(self, seconds: float) -> None:
        """Sleeps until a signal arrives, at most `seconds`."""
        ready, _, _ = select.select([self._reader], [], [], seconds)
        if ready:
            os.read(self._reader, 4096)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._request.acted = self._request.signal is not None  # the children were stopped
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        os.close(self._reader)
        os.close(self._writer)


# -- Reports of task exits: their description, the root cause, and the budget of restarts ----------

# Messages of JAX's coordination service and gloo if another process has gone or never joined.
_LOST = re.compile(
    r"connection (closed|reset) by peer|heartbeat|coordination ?(service|agent)|"
    r"another task|peer task|shutdown barrier|jax distributed service detected fatal errors|"
    r"gloo [\w-]+ failed|ncclremoteerror|remote process exited",
    re.IGNORECASE,
)
_NEVER_JOINED = re.compile(r"DEADLINE_EXCEEDED.*RegisterTask", re.DOTALL)
_TRACEBACK = "Traceback (most recent call last):"
_MESSAGE = re.compile(r"^(?:error|failed|stopped): (.+)", re.MULTILINE)  # of `exit_code_of`
_MAX_REASON = 300  # characters of a reason; the output above has all of it

_VERBS = {
    signal.SIGKILL: "was killed",
    signal.SIGTERM: "was terminated",
    signal.SIGINT: "was interrupted",
    signal.SIGABRT: "aborted",
}
_HINTS = {
    signal.SIGKILL: "a SIGKILL without a known sender usually comes from the kernel because memory "
    "was exhausted: see dmesg, or the limits of the container",
    signal.SIGSEGV: "a SIGSEGV is a crash in native code; PYTHONFAULTHANDLER=1 shows where",
    signal.SIGBUS: "a SIGBUS usually means a full disk or full shared memory (see df -h /dev/shm), "
    "or a data file that was truncated while it was mapped by np.memmap",
}


def lost_peer(text: str) -> bool:
    """Returns whether an error is only a consequence of another process that is missing."""
    return bool(_LOST.search(text) or _NEVER_JOINED.search(text))


@dataclass(frozen=True)
class TaskExit:
    """The exit of a task, with the evidence of its cause."""

    task: str
    status: int
    """Exit code, or -N if signal N killed it."""
    ours: bool = False
    """Whether the launcher sent that signal."""
    record: ProgressRecord | None = None
    """Last published progress."""
    reason: Reason | None = None
    """Reason that the task wrote before its exit."""
    errors: str = ""
    """Last lines of its standard error."""
    memory: str | None = None
    """Evidence that memory was exhausted."""
    peak: int = 0
    """Peak memory of its largest process in bytes; 0 if unknown."""
    gone: str | None = None
    """Why nothing more is known of it: its machine is lost."""
    work: str | None = None
    """The work that was not finished when it exited (see `progress.working`)."""

    @property
    def is_early(self) -> bool:
        """Whether it exited with the code of success before it had finished."""
        return self.status == ExitCode.DONE and self.work is not None

    @property
    def signal(self) -> signal.Signals | None:
        """The signal that killed it, or the process that a shell ran for it (code 128 + N)."""
        number = self.status - 128 if self.status > 128 else -self.status
        known = number in set(signal.Signals)
        return signal.Signals(number) if known and not 0 <= self.status <= 128 else None

    @property
    def code(self) -> int:
        """The exit code as in a shell: 128 + N if signal N killed it; 1 if it exited early."""
        if self.is_early:
            return ExitCode.FAILED
        return 128 - self.status if self.status < 0 else self.status

    @property
    def exception(self) -> str | None:
        """The exception line of the last traceback on standard error; None without a traceback."""
        _, header, text = self.errors.rpartition(_TRACEBACK)
        lines = (line for line in text.splitlines() if line and not line[0].isspace())
        return next(lines, None) if header else None

    @property
    def message(self) -> str | None:
        """The reason in one line: the one that the task wrote, else from its standard error."""
        messages = _MESSAGE.findall(self.errors)
        text = self.reason.reason if self.reason else self.exception or "".join(messages[-1:])
        line = next(iter(text.strip().splitlines()), "")
        return (line if len(line) <= _MAX_REASON else line[:_MAX_REASON] + " ...") or None


class CauseRank(enum.IntEnum):
    """The rank of an exit as an explanation of the others; the lowest value explains best."""

    OWN = 0
    """A failure with its own reason."""
    FAILED = 1
    """A failure without a known reason."""
    PREEMPTED = 2
    CONSEQUENCE = 3
    """A consequence of the failure of another task."""
    NONE = 4
    """Not a failure, or caused by the launcher."""


def cause_rank(ended: TaskExit) -> CauseRank:
    """Returns how well an exit explains the others."""
    if ended.is_early:
        return CauseRank.OWN
    if ended.status == 0 or ended.ours:
        return CauseRank.NONE
    if ended.reason is not None:
        if ended.reason.code == ExitCode.PREEMPTED == ended.status:
            return CauseRank.PREEMPTED
        return CauseRank.OWN if ended.reason.own else CauseRank.CONSEQUENCE
    if ended.status == ExitCode.PREEMPTED:
        return CauseRank.PREEMPTED
    if ended.status in (ExitCode.BAD_INPUT, ExitCode.NON_FINITE, ExitCode.DEVICE_FAULT):
        return CauseRank.OWN
    if ended.signal is not None and ended.signal is not signal.SIGABRT:
        return CauseRank.OWN
    # JAX also aborts after an error of this process, which then has a traceback.
    evidence = ended.exception or (ended.errors if ended.signal else "")
    if lost_peer(evidence):
        return CauseRank.CONSEQUENCE
    if ended.signal is not None or ended.exception is not None:
        return CauseRank.OWN
    return CauseRank.FAILED


def is_killed(ended: TaskExit) -> bool:
    """Returns whether a signal from outside, or a crash, has ended a task: nothing it has said."""
    by_signal = ended.signal is not None and ended.reason is None
    return by_signal and cause_rank(ended) is CauseRank.OWN


def root_cause(exits: Sequence[TaskExit]) -> TaskExit | None:
    """Returns the exit with the best rank, the first one of equal rank; None if none failed."""
    failed = [ended for ended in exits if cause_rank(ended) is not CauseRank.NONE]
    return min(failed, key=cause_rank, default=None)


def describe_exit(ended: TaskExit) -> str:
    """Returns a line with the task, how and where it ended, and the reason if it is known."""
    if ended.gone is not None and ended.reason is None:
        return f"{ended.task} is lost{_where(ended.record)}: {ended.gone}"
    # A message may name its step; the process has begun later ones since.
    names_step = re.match(r"(one of )?steps? \d", ended.message or "")
    where = "" if names_step else _where(ended.record)
    because = f": {ended.message}" if ended.message else ""
    if ended.memory is not None:
        because = f": {ended.memory}"
    if ended.is_early:
        because = f" during the {ended.work}, without an error: by os._exit, or in native code"
    lost = cause_rank(ended) is CauseRank.CONSEQUENCE and ended.reason is None
    if ended.signal is not None:
        how = f"{_VERBS.get(ended.signal, 'crashed')} ({ended.signal.name}){where}"
        if lost:
            joined = not _NEVER_JOINED.search(ended.errors)
            because = ": JAX lost a peer" if joined else ": JAX timed out waiting for a peer"
        elif ended.memory is None and ended.reason is None and ended.signal is not signal.SIGABRT:
            because = ""  # it has a traceback, but the signal ended it
    elif ended.status == ExitCode.PREEMPTED:
        how, because = f"was preempted and saved (code 75){where}", ""
    elif ended.status in (
        *(ExitCode.DONE, ExitCode.BAD_INPUT),
        *(ExitCode.NON_FINITE, ExitCode.DEVICE_FAULT),
    ):
        how = f"ended (code {ended.status}){where if ended.status != ExitCode.BAD_INPUT else ''}"
    elif ended.reason is not None and not ended.reason.own:
        how = f"ended with the job{where}"
    else:
        how = f"failed{where}" if because else f"failed{where} (code {ended.status})"
        because = because.replace(": ", ": it lost a peer: ", 1) if lost else because
    return f"{ended.task} {how}{because}"


def hint(ended: TaskExit) -> str | None:
    """Returns the usual meaning of a signal, and the peak memory if memory may be the reason.

    None if there is neither, or if the launcher caused the exit.
    """
    if ended.ours or ended.gone is not None:
        return None
    hints = []
    if ended.signal in _HINTS and ended.memory is None:
        hints.append(_HINTS[ended.signal])
    by_memory = ended.memory or out_of_memory.is_allocation_failure(ended.message or "")
    if ended.peak and (by_memory or ended.signal is signal.SIGKILL):
        hints.append(f"the peak host memory of {ended.task} was {byte_size(ended.peak)}")
    return "; ".join(hints) or None


def _where(record: ProgressRecord | None) -> str:
    if record is None or record.phase is Phase.END:
        return ""
    if record.phase is Phase.START:
        return " at its start"
    if record.sealing >= 0:  # by the saving thread, while another one trains
        return f" in {Phase.SAVE} of step {record.sealing}, at step {record.step}"
    inside = "" if record.phase in (Phase.STEP, Phase.HOST) else f" in {record.phase}"
    return f"{inside} at step {record.step}"


@dataclass
class Restarts:
    """A budget of restarts, which each new checkpoint resets.

    A job that makes progress may therefore be restarted any number of times.
    """

    limit: int
    """Largest number of restarts without a new checkpoint."""
    used: int = 0
    """Restarts since the last new checkpoint."""
    saved: int = -1
    """Step of the newest checkpoint at the last restart; -1 without one."""
    first_at_once: bool = False
    """Whether the first restart after a new checkpoint comes without a wait."""

    def next(self, saved: int, *, after_rollback: bool = False) -> float | None:
        """Uses one restart and returns the seconds to wait before it; None if no restarts are left.

        The seconds double from 1 to 60, after a first restart at once if there is one. `saved` is
        the step of the newest checkpoint; -1 without one. `after_rollback` means that the newest
        checkpoints were renamed, so that the next one may be of an earlier step.
        """
        if saved > self.saved:
            self.saved, self.used = saved, 0
        if after_rollback:
            self.saved = -1
        if self.used >= self.limit:
            return None
        self.used += 1
        waits = self.used - self.first_at_once
        return min(60.0, 2.0 ** (waits - 1)) if waits else 0.0

    def note(self, wait: float, task: str = "") -> str:
        """Returns `restart 2 of 3 of TASK in 1 s`, for the seconds that `next` has returned."""
        of_task = f" of {task}" if task else ""
        when = f"in {wait:g} s" if wait else "at once"
        return f"restart {self.used} of {self.limit}{of_task} {when}"

"""The processes that a launcher starts: none outlives it, and every line says whose it is."""

import collections
import contextlib
import itertools
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType, TracebackType

from spmdtrain.distributed import out_of_memory

_LONGEST_LINE = 1 << 16
_REMEMBERED = 300  # lines of standard error, from which the reason of a death is read
# Gloo writes this line itself, once for each group of devices, and has no option against it.
_CONNECTED = re.compile(
    rb"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. "
    rb"Expected number of connected peer ranks is : \d+"
)
_STREAMS = {"stdout": 1, "stderr": 2}
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)

# Ends with the launcher, in the way that Linux has for it, and then becomes the command itself. Not
# a preexec_fn: that would run between fork and exec of a process with threads.
_EXEC = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):  # it had gone before that held
    os._exit(1)
for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python, and what is ignored stays so
    signal.signal(ignored, signal.SIG_DFL)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    print(f"error: {sys.argv[2]} cannot be run: {error.strerror}", file=sys.stderr)
    os._exit(2)
"""

# Reads "+GROUP" and "-GROUP" until the launcher has ended, however it has.
_GUARD = """
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
    """A process that outlives the launcher by a moment, to kill what it left and clear its folder.

    It also reaches what the children have started, as long as that stays in their process groups.
    """

    def __init__(self, folder: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-u", "-c", _GUARD, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )

    def tell(self, sign: str, group: int) -> None:
        """Say that a process group exists (`+`) or no more (`-`)."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # killed: then there is still PR_SET_PDEATHSIG
            os.write(self._process.stdin.fileno(), f"{sign}{group}\n".encode())

    def close(self) -> None:
        """Let it kill what is left, clear the folder, and end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Output:
    """Standard output and error of the launcher, which many threads write whole lines to."""

    def __init__(self, names: Sequence[str]) -> None:
        self._prefixes = {stream: _prefixes(names, file) for stream, file in _STREAMS.items()}
        # Apart: a reader that has stopped to read one of them does not hold up the other.
        self._locks = {stream: threading.Lock() for stream in _STREAMS}

    def line(self, name: str, stream: str, text: bytes) -> None:
        """Write one line, and whose it is, to `stdout` or `stderr`."""
        file = _STREAMS[stream]
        text = self._prefixes[stream][name] + text + b"\n"
        # Straight to the system: a thread that waits in a buffer of Python's would not let it end.
        with self._locks[stream], contextlib.suppress(OSError):  # nobody reads any more: train on
            while text:
                text = text[os.write(file, text) :]


def _prefixes(names: Sequence[str], file: int) -> dict[str, bytes]:
    """What each task's lines begin with: in a terminal of one width, and in a colour of its own."""
    plain = {name: f"[{name}] " for name in names}
    if os.isatty(file):
        width = max(map(len, plain.values()))
        plain = {name: prefix.ljust(width) for name, prefix in plain.items()}
        if "NO_COLOR" not in os.environ:
            colours = itertools.cycle(_COLOURS)
            plain = {name: f"\x1b[{next(colours)}m{text}\x1b[0m" for name, text in plain.items()}
    return {name: prefix.encode() for name, prefix in plain.items()}


class Child:
    """A started command in a session of its own, whose output goes on line by line."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: Output,
        guardian: Reaper,
    ) -> None:
        self.name = name
        self.sent: set[int] = set()
        """The signals that the launcher has sent it."""
        self.status: int | None = None
        """None while it runs; then its exit code, or -N where signal N ended it."""
        self.peak = 0
        """Memory that its largest process has used, in bytes; set when it has ended."""
        self.address_limit: int | None = None
        """Limit of its address space in bytes; set when it has ended."""
        self._output = output
        self._guardian = guardian
        self._errors: collections.deque[bytes] = collections.deque(maxlen=_REMEMBERED)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _EXEC, str(os.getpid()), *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.pid = self._process.pid
        guardian.tell("+", self.pid)
        self._readers = [
            threading.Thread(target=self._forward, args=(stream,), daemon=True)
            for stream in _STREAMS
        ]
        for reader in self._readers:
            reader.start()

    @property
    def errors(self) -> str:
        """The last lines that it wrote to standard error."""
        return b"\n".join(self._errors).decode(errors="replace")

    def poll(self) -> bool:
        """Whether it has ended; what it had started is killed then, and its output forwarded."""
        if self.status is not None:
            return True
        # Only looked at: as long as it is not reaped, no other group can have its number.
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        self._signal_group(signal.SIGKILL)
        patience = time.monotonic() + 1  # with a process that has left the group, and could write
        for reader in self._readers:
            reader.join(timeout=max(0, patience - time.monotonic()))
        self._guardian.tell("-", self.pid)
        self.address_limit = out_of_memory.address_limit(self.pid)
        _, status, usage = os.wait4(self.pid, 0)
        self.peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        self.status = self._process.returncode = os.waitstatus_to_exitcode(status)
        return True

    def send(self, number: int, pid: int | None = None) -> None:
        """Send a signal to one process: to `pid`, if it is of the child's session, or the child."""
        if self.status is None:
            self.sent.add(number)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid if pid and self._has(pid) else self.pid, number)

    def _has(self, pid: int) -> bool:
        try:
            return os.getsid(pid) == self.pid
        except ProcessLookupError:
            return False

    def kill(self) -> None:
        """Kill it with all that it has started."""
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
                    self._output.line(self.name, stream, line)


def lines(file: int) -> Iterator[bytes]:
    """The lines of a pipe as a terminal would show them in the end, the longest in pieces.

    What a progress bar has written over (with a carriage return) is left out.
    """
    rest = b""
    while chunk := os.read(file, _LONGEST_LINE):
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield _shown(line.removesuffix(b"\r"))
        rest = _shown(rest)
        if len(rest) > _LONGEST_LINE:
            yield rest
            rest = b""
    if rest:
        yield rest.removesuffix(b"\r")


def _shown(line: bytes) -> bytes:
    """What follows the last carriage return but for one at the end: a line feed may follow it."""
    return line[line.rfind(b"\r", 0, -1) + 1 :]


class Signals:
    """Signals to stop as flags, and a sleep that they and the end of a child cut short.

    They are SIGTERM, SIGHUP, Ctrl-C and SIGUSR1, which Slurm sends ahead of a job's end.

    One that is ignored from the start, as by nohup, stays so.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._before: dict[int, object] = {}

    def __enter__(self) -> "Signals":
        self._reader, self._writer = os.pipe()
        for end in (self._reader, self._writer):
            os.set_blocking(end, False)
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        stop = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1)
        for number in (*stop, signal.SIGCHLD):
            if number == signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._catch)
        return self

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            self.received.append(signal.Signals(number))

    def wait(self, seconds: float) -> None:
        """Sleep, but not past a signal."""
        ready, _, _ = select.select([self._reader], [], [], seconds)
        if ready:
            os.read(self._reader, 4096)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        os.close(self._reader)
        os.close(self._writer)

"""Reports of task exits: their description, the root cause, and the budget of restarts."""

import enum
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from spmdtrain.distributed import out_of_memory
from spmdtrain.distributed.progress import Phase, ProgressRecord, Reason
from spmdtrain.document.terminal import byte_size
from spmdtrain.errors import ExitCode

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


def root_cause(exits: Sequence[TaskExit]) -> TaskExit | None:
    """Returns the exit with the best rank, the first one of equal rank; None if none failed."""
    failed = [ended for ended in exits if cause_rank(ended) is not CauseRank.NONE]
    return min(failed, key=cause_rank, default=None)


def describe_exit(ended: TaskExit) -> str:
    """Returns a line with the task, how and where it ended, and the reason if it is known."""
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
    if ended.ours:
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

    def next(self, saved: int, *, after_rollback: bool = False) -> float | None:
        """Uses one restart and returns the seconds to wait before it; None if no restarts are left.

        The seconds double from 1 to 60. `saved` is the step of the newest checkpoint; -1 without
        one. `after_rollback` means that the newest checkpoints were renamed, so that the next one
        may be of an earlier step.
        """
        if saved > self.saved:
            self.saved, self.used = saved, 0
        if after_rollback:
            self.saved = -1
        if self.used >= self.limit:
            return None
        self.used += 1
        return min(60.0, 2.0 ** (self.used - 1))

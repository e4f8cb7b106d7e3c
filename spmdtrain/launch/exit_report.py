"""Why a launched job ended: deaths in words, which of them explains the rest, what comes next."""

import enum
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from spmdtrain.distributed import out_of_memory
from spmdtrain.distributed.progress import Phase, Reason, Record
from spmdtrain.errors import ExitCode
from spmdtrain.terminal import byte_size

# What JAX's coordination service and gloo print when another process is gone, or never came.
_LOST = re.compile(
    r"connection (closed|reset) by peer|heartbeat|coordination ?(service|agent)|"
    r"another task|peer task|shutdown barrier|jax distributed service detected fatal errors|"
    r"gloo [\w-]+ failed|ncclremoteerror|remote process exited",
    re.IGNORECASE,
)
_NEVER_CAME = re.compile(r"DEADLINE_EXCEEDED.*RegisterTask", re.DOTALL)
_TRACEBACK = "Traceback (most recent call last):"
_MESSAGE = re.compile(r"^(?:error|failed|stopped): (.+)", re.MULTILINE)  # of `exit_code_of`
_LONGEST = 300  # letters of a reason; the whole of it is in the output above

_VERBS = {
    signal.SIGKILL: "was killed",
    signal.SIGTERM: "was terminated",
    signal.SIGINT: "was interrupted",
    signal.SIGABRT: "aborted",
}
_HINTS = {
    signal.SIGKILL: "a SIGKILL that nobody sent is most often the system's own, for want of "
    "memory: dmesg tells, or the container's limits do",
    signal.SIGSEGV: "a SIGSEGV is a crash in native code; PYTHONFAULTHANDLER=1 shows where",
    signal.SIGBUS: "a SIGBUS is most often a full disk or full shared memory (see df -h /dev/shm), "
    "or a data file in use through np.memmap that was cut short",
}


def lost_peer(text: str) -> bool:
    """Whether an error is only a consequence: of another process that is gone or never came."""
    return bool(_LOST.search(text) or _NEVER_CAME.search(text))


@dataclass(frozen=True)
class TaskExit:
    """A task that has ended, and all that is known of why."""

    task: str
    status: int
    """Its exit code, or -N where signal N ended it."""
    ours: bool = False
    """Whether the launcher sent that signal."""
    record: Record | None = None
    reason: Reason | None = None
    errors: str = ""
    """The last lines of its standard error."""
    memory: str | None = None
    """Evidence that memory was exhausted."""
    peak: int = 0
    """Memory that its largest process has used, in bytes; 0 if unknown."""

    @property
    def signal(self) -> signal.Signals | None:
        """The signal that ended it, or the process that a shell ran for it (code 128 + N)."""
        number = self.status - 128 if self.status > 128 else -self.status
        known = number in set(signal.Signals)
        return signal.Signals(number) if known and not 0 <= self.status <= 128 else None

    @property
    def code(self) -> int:
        """Its exit code as shells have it: 128 + N where signal N ended it."""
        return 128 - self.status if self.status < 0 else self.status

    @property
    def exception(self) -> str | None:
        """What the last traceback on its standard error ends with, in one line."""
        _, found, text = self.errors.rpartition(_TRACEBACK)
        lines = (line for line in text.splitlines() if line and not line[0].isspace())
        return next(lines, None) if found else None

    @property
    def message(self) -> str | None:
        """Why it ended, in one line: told by itself, or else as its standard error has it."""
        told = _MESSAGE.findall(self.errors)
        text = self.reason.reason if self.reason else self.exception or "".join(told[-1:])
        line = next(iter(text.strip().splitlines()), "")
        return (line if len(line) <= _LONGEST else line[:_LONGEST] + " ...") or None


class CauseRank(enum.IntEnum):
    """How well a death explains the others, the best first."""

    OWN = 0
    """It says by itself why."""
    FAILED = 1
    PREEMPTED = 2
    CONSEQUENCE = 3
    """It only followed from another one."""
    NONE = 4
    """It is no failure, or the launcher's own doing."""


def rank(ended: TaskExit) -> CauseRank:
    """How well a death explains the others."""
    if ended.status == 0 or ended.ours:
        return CauseRank.NONE
    if ended.reason is not None:
        if ended.reason.code == ExitCode.PREEMPTED == ended.status:
            return CauseRank.PREEMPTED
        return CauseRank.OWN if ended.reason.own else CauseRank.CONSEQUENCE
    if ended.status == ExitCode.PREEMPTED:
        return CauseRank.PREEMPTED
    if ended.status in (ExitCode.BAD_INPUT, ExitCode.NON_FINITE):
        return CauseRank.OWN
    if ended.signal is not None and ended.signal is not signal.SIGABRT:
        return CauseRank.OWN
    # JAX aborts also after an error of the process itself: then there is a traceback of that.
    evidence = ended.exception or (ended.errors if ended.signal else "")
    if lost_peer(evidence):
        return CauseRank.CONSEQUENCE
    if ended.signal is not None or ended.exception is not None:
        return CauseRank.OWN
    return CauseRank.FAILED


def root_cause(deaths: Sequence[TaskExit]) -> TaskExit | None:
    """The death that explains the rest, of equally good ones the first; None where none failed."""
    failed = [ended for ended in deaths if rank(ended) is not CauseRank.NONE]
    return min(failed, key=rank, default=None)


def describe(ended: TaskExit) -> str:
    """A death in one line: who, how, where, and why as far as it is known."""
    where = _where(ended.record)
    because = f": {ended.message}" if ended.message else ""
    lost = rank(ended) is CauseRank.CONSEQUENCE and ended.reason is None
    if ended.signal is not None:
        how = f"{_VERBS.get(ended.signal, 'crashed')} ({ended.signal.name}){where}"
        if lost:
            came = not _NEVER_CAME.search(ended.errors)
            because = ": JAX lost a peer" if came else ": JAX waited in vain for a peer"
        elif ended.memory is not None:
            because = f": {ended.memory}"
        elif ended.reason is None and ended.signal is not signal.SIGABRT:
            because = ""  # a traceback that did not end it
    elif ended.status == ExitCode.PREEMPTED:
        how, because = f"was preempted and saved (code 75){where}", ""
    elif ended.status in (ExitCode.DONE, ExitCode.BAD_INPUT, ExitCode.NON_FINITE):
        how = f"ended (code {ended.status}){where if ended.status != ExitCode.BAD_INPUT else ''}"
    elif ended.reason is not None and not ended.reason.own:
        how = f"ended with it{where}"
    else:
        how = f"failed{where}" if because else f"failed{where} (code {ended.status})"
        because = because.replace(": ", ": it lost a peer: ", 1) if lost else because
    return f"{ended.task} {how}{because}"


def hint(ended: TaskExit) -> str | None:
    """Returns what a death most often means, and the peak memory if memory may be the reason.

    None if the launcher caused it, or nothing is known.
    """
    if ended.ours:
        return None
    found = []
    if ended.signal in _HINTS and ended.memory is None:
        found.append(_HINTS[ended.signal])
    by_memory = ended.memory or out_of_memory.is_told(ended.message or "")
    if ended.peak and (by_memory or ended.signal is signal.SIGKILL):
        found.append(f"the peak host memory of {ended.task} was {byte_size(ended.peak)}")
    return "; ".join(found) or None


def _where(record: Record | None) -> str:
    if record is None or record.phase is Phase.END:
        return ""
    if record.phase is Phase.START:
        return " at its start"
    if record.sealing >= 0:  # by a thread beside the one that trains
        return f" in {Phase.SAVE} of step {record.sealing}, at step {record.step}"
    inside = "" if record.phase in (Phase.STEP, Phase.HOST) else f" in {record.phase}"
    return f"{inside} at step {record.step}"


@dataclass
class Restarts:
    """How often a job may still be restarted, and how long to wait before."""

    limit: int
    used: int = 0
    saved: int = -1
    """The newest checkpoint at the restart before."""

    def next(self, saved: int) -> float | None:
        """Seconds to wait before another restart; None where none is left.

        A checkpoint that is newer than at the restart before refills the budget: a job that gets on
        may fail as often as it likes.
        """
        if saved > self.saved:
            self.saved, self.used = saved, 0
        if self.used >= self.limit:
            return None
        self.used += 1
        return min(60.0, 2.0 ** (self.used - 1))

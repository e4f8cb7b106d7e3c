"""Exhausted host memory: a reserve with which a process can still report it, and OOM kills."""

import contextlib
import errno
import faulthandler
import mmap
import os
import re
import resource
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from spmdtrain.distributed.context import CONTEXT

_RESERVE = 48 << 20  # bytes: thread stacks of 8 MiB, a traceback, messages to other processes
_REPORT_WITHIN = 20.0  # seconds
# What libraries print before they abort because an allocation has failed.
_PRINTED = re.compile(
    r"bad_alloc|cannot allocate memory|unable to allocate|out of memory|MemoryError|"
    r"can't start new thread|failed to allocate|pthread_create\(\) failed",
    re.IGNORECASE,
)
_STACKS = "Fatal Python error:"  # faulthandler prints it, and then the stacks of all threads
_LAST_LINES = 30  # with those of a stack that native code prints; earlier ones are of other events
_NEAR = 0.8  # of its limit an address space is exhausted; much of it is never in physical memory
_NO_LIMIT = 2**60  # bytes; version 1 has a number of pages below 2^63
_LOOK_EVERY, _RECENT = 5.0, 60.0  # seconds
_CGROUPS = Path("/sys/fs/cgroup")

# -- in the process --------------------------------------------------------------------------------


def reserve() -> None:
    """Reserves address space for the report of an exhausted memory.

    It counts towards a limit of the address space (`ulimit -v`, `prlimit --as`) and takes no
    physical memory.
    """
    if CONTEXT.reserve is None:
        with contextlib.suppress(OSError):  # the limit is as low as that already
            CONTEXT.reserve = mmap.mmap(-1, _RESERVE)


def release(error: BaseException) -> bool:
    """Frees the reserve if an error says that memory is exhausted.

    Args:
      error: The error, with its causes.

    Returns:
      Whether it says so.
    """
    if not is_exhausted(error):
        return False
    if CONTEXT.reserve is not None:
        CONTEXT.reserve.close()
        CONTEXT.reserve = None
    return True


def end_within(code: int, seconds: float = _REPORT_WITHIN) -> None:
    """Ends this process after some seconds, with all stacks, even if Python cannot allocate.

    Args:
      code: Exit code if no thread can be started; it is 1 otherwise.
      seconds: Time for an orderly end.
    """
    try:
        faulthandler.dump_traceback_later(seconds, exit=True)
    except (RuntimeError, MemoryError, ValueError, OSError):  # ... or there is no standard error
        os._exit(code)


def is_exhausted(error: BaseException | None) -> bool:
    """Returns whether an error, or a cause of it, is that host memory cannot be allocated."""
    while error is not None:
        if isinstance(error, MemoryError):
            return True
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            return True
        if isinstance(error, RuntimeError) and str(error) == "can't start new thread":
            return True
        error = error.__cause__ or error.__context__
    return False


# -- in the launcher -------------------------------------------------------------------------------


class OomKills:
    """Counts of the processes that the kernel has killed because memory was exhausted.

    Args:
      root: Where control groups are mounted.
      proc: Where the kernel's own files are.
    """

    def __init__(self, root: Path = _CGROUPS, proc: Path = Path("/proc")) -> None:
        self._group = _counter(root, proc)
        self._machine = proc / "vmstat"
        self._seen = [(time.monotonic(), self._counts())]

    def look(self) -> None:
        """Notes the counts, to be called often: only recent kills explain a death."""
        now = time.monotonic()
        if now - self._seen[-1][0] >= _LOOK_EVERY:
            self._seen.append((now, self._counts()))
            recent = [seen for seen in self._seen[1:] if now - seen[0] >= _RECENT]
            self._seen = self._seen[len(recent) :]

    def reason(self) -> str | None:
        """Returns the evidence that a process was killed, once for each that the kernel counts."""
        (group, machine), now = self._seen[0][1], self._counts()
        if now[0] > group:
            self._explain(1, 1)  # the kernel counts it in both
            return "the kernel's OOM killer: the memory of its control group was exhausted"
        if now[1] > machine:
            self._explain(0, 1)
            return "the kernel's OOM killer, probably: it has ended a process of this machine"
        return None

    def _explain(self, group: int, machine: int) -> None:
        self._seen = [(at, (seen[0] + group, seen[1] + machine)) for at, seen in self._seen]

    def _counts(self) -> tuple[int, int]:
        return _count(self._group), _count(self._machine)


def _counter(root: Path, proc: Path) -> Path | None:
    """Returns the file with the number of OOM kills in the control group of this process."""
    files = _group_files(root, proc, "memory.oom_control", "memory.events")
    return next((file for file in files if file.exists()), None)


def group_limit(root: Path = _CGROUPS, proc: Path = Path("/proc")) -> int | None:
    """Returns the bytes of memory that the control groups of this process allow; None if any.

    Args:
      root: Where control groups are mounted.
      proc: Where the kernel's own files are.
    """
    limits = []
    for file in _group_files(root, proc, "memory.limit_in_bytes", "memory.max"):
        with contextlib.suppress(OSError, ValueError):  # not there, or "max"
            limits.append(int(file.read_text()))
    return min((limit for limit in limits if limit < _NO_LIMIT), default=None)


def _group_files(root: Path, proc: Path, first: str, second: str) -> Iterator[Path]:
    """Yields where files of this process' control groups may be, those of its own group first.

    Args:
      root: Where control groups are mounted.
      proc: Where the kernel's own files are.
      first: The file's name in version 1 of control groups.
      second: Its name in version 2.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            top, name = root / "memory", first
        elif not controllers:
            top, name = root, second
        else:
            continue
        group = PurePosixPath(path.lstrip("/"))
        # Of a container only the last may be there: it sees its own group as the uppermost.
        yield from (top / each / name for each in (group, *group.parents))


def _count(file: Path | None) -> int:
    """Returns the value of `oom_kill` in a file of the kernel; 0 if there is none."""
    with contextlib.suppress(OSError):
        text = file.read_text() if file is not None else ""
        if found := re.search(r"^oom_kill (\d+)$", text, re.MULTILINE):
            return int(found[1])
    return 0


def address_limit(pid: int) -> int | None:
    """Returns the limit of a process' address space in bytes; None if there is none."""
    try:
        soft, _ = resource.prlimit(pid, resource.RLIMIT_AS)
    except (OSError, AttributeError):  # it has gone, or this is not Linux
        return None
    return None if soft == resource.RLIM_INFINITY else soft


def is_told(text: str) -> bool:
    """Returns whether a line says that memory could not be allocated."""
    return bool(_PRINTED.search(text))


def why_aborted(errors: str, limit: int | None, peak: int) -> str | None:
    """Returns the evidence that native code aborted because memory could not be allocated.

    Args:
      errors: End of the standard error of the process.
      limit: Limit of its address space in bytes, if there is one.
      peak: Physical memory that it has used at most, in bytes.
    """
    before_stacks = errors.partition(_STACKS)[0].splitlines()[-_LAST_LINES:]
    if lines := [line for line in before_stacks if is_told(line)]:
        return f"memory could not be allocated ({lines[-1].strip()})"
    if limit is not None and peak > _NEAR * limit:
        return (
            f"memory could not be allocated, probably: its address space is limited to "
            f"{limit / 1e9:.2f} GB (RLIMIT_AS)"
        )
    return None

"""Host memory: what exhausts it, and what the allocator keeps."""

import contextlib
import ctypes
import errno
import faulthandler
import functools
import glob
import mmap
import os
import re
import resource
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from spmdtrain.distributed.progress import CONTEXT

# -- Exhausted host memory: a reserve for reporting it, and detection of OOM kills -----------------

_RESERVE = 48 << 20  # bytes: thread stacks of 8 MiB, a traceback, messages to other processes
_REPORT_TIMEOUT = 20.0  # seconds
# Messages of libraries that abort after a failed allocation.
_ALLOCATION_FAILURE = re.compile(
    r"bad_alloc|cannot allocate memory|unable to allocate|out of memory|MemoryError|"
    r"can't start new thread|failed to allocate|pthread_create\(\) failed",
    re.IGNORECASE,
)
_STACKS = "Fatal Python error:"  # printed by faulthandler before the stacks of all threads
_LAST_LINES = 30  # enough for a native stack trace; earlier lines belong to other events
_NEAR = 0.9  # fraction of the address limit above which the address space counts as exhausted
_NO_LIMIT = 2**60  # bytes; without a limit, version 1 reports the largest page multiple below 2^63
_POLL_INTERVAL, _RECENT = 5.0, 60.0  # seconds
_CGROUPS = Path("/sys/fs/cgroup")
_OF_GROUP = "the kernel's OOM killer: the memory of its control group was exhausted"
_OF_MACHINE = "the kernel's OOM killer, probably: it has killed a process of this machine"

# -- in the process --------------------------------------------------------------------------------


def reserve() -> None:
    """Reserves address space for reporting that memory is exhausted.

    The reserve counts toward the limit of the address space (`ulimit -v`, `prlimit --as`), but
    uses no physical memory.
    """
    if CONTEXT.reserve is None:
        with contextlib.suppress(OSError):  # the limit is too low for the reserve
            CONTEXT.reserve = mmap.mmap(-1, _RESERVE)


def release(error: BaseException) -> bool:
    """Frees the reserve if an error, or one of its causes, means that memory is exhausted.

    Returns whether memory is exhausted.
    """
    if not is_exhausted(error):
        return False
    if CONTEXT.reserve is not None:
        CONTEXT.reserve.close()
        CONTEXT.reserve = None
    return True


def end_within(code: int, seconds: float = _REPORT_TIMEOUT) -> None:
    """Exits after a timeout and prints all stacks, even if Python cannot allocate memory.

    The exit code is then 1. If the timer cannot be started, this exits at once with `code`.
    """
    try:
        faulthandler.dump_traceback_later(seconds, exit=True)
    except (RuntimeError, MemoryError, ValueError, OSError):  # no thread, or no standard error
        os._exit(code)


def is_exhausted(error: BaseException | None) -> bool:
    """Returns whether an error, or one of its causes, is a failed allocation of host memory."""
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

    `root` is the mount point of the control groups, `proc` the mount point of the proc file system.
    """

    def __init__(self, root: Path = _CGROUPS, proc: Path = Path("/proc")) -> None:
        # The kernel counts each kill in the group of the killed process. The counter of the machine
        # also contains those of other jobs, so it is evidence only where a group has none.
        group = _counter(root, proc)
        self._evidence = _OF_MACHINE if group is None else _OF_GROUP
        self._file = proc / "vmstat" if group is None else group
        self._history = [(time.monotonic(), _count(self._file))]

    def poll(self) -> None:
        """Records the count. Call it often, because only recent kills explain an exit."""
        now = time.monotonic()
        if now - self._history[-1][0] >= _POLL_INTERVAL:
            self._history.append((now, _count(self._file)))
            expired = [entry for entry in self._history[1:] if now - entry[0] >= _RECENT]
            self._history = self._history[len(expired) :]

    def reason(self) -> str | None:
        """Returns the evidence of a recent OOM kill, once for each kill; None without one."""
        if _count(self._file) <= self._history[0][1]:
            return None
        self._history = [(at, count + 1) for at, count in self._history]
        return self._evidence


def _counter(root: Path, proc: Path) -> Path | None:
    """Returns the file with the number of OOM kills in the control group of this process."""
    files = _group_files(root, proc, "memory.oom_control", "memory.events")
    return next((file for file in files if file.exists()), None)


def group_limit(root: Path = _CGROUPS, proc: Path = Path("/proc")) -> int | None:
    """Returns the memory limit of this process' control groups in bytes; None without a limit."""
    limits = []
    for file in _group_files(root, proc, "memory.limit_in_bytes", "memory.max"):
        with contextlib.suppress(OSError, ValueError):  # no such file, or its content is "max"
            limits.append(int(file.read_text()))
    return min((limit for limit in limits if limit < _NO_LIMIT), default=None)


@functools.cache
def available_memory() -> int:
    """Returns the bytes of memory of this machine, or of the container."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(machine, group_limit() or machine)


def free_memory() -> int:
    """Returns the bytes of memory that this machine, or the container, can still give."""
    free = available_memory()
    with contextlib.suppress(OSError, ValueError, StopIteration):  # not on Linux
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        free = min(free, int(line.split()[1]) * 1024)
    return free


def _group_files(root: Path, proc: Path, first: str, second: str) -> Iterator[Path]:
    """Yields the possible paths of a file in this process' control groups, innermost group first.

    `first` is the name of the file in version 1 of control groups, `second` in version 2.
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
        # In a container possibly only the last path exists, because its own group is the root.
        yield from (top / each / name for each in (group, *group.parents))


def _count(file: Path) -> int:
    """Returns the value of `oom_kill` in a file of the kernel; 0 if it cannot be read."""
    with contextlib.suppress(OSError):
        if match := re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE):
            return int(match[1])
    return 0


def address_limit(pid: int) -> int | None:
    """Returns the limit of a process' address space in bytes; None if unlimited or unknown."""
    try:
        soft, _ = resource.prlimit(pid, resource.RLIMIT_AS)
    except (OSError, AttributeError):  # the process has exited, or this is not Linux
        return None
    return None if soft == resource.RLIM_INFINITY else soft


def is_allocation_failure(text: str) -> bool:
    """Returns whether a text contains a message about a failed allocation of memory."""
    return bool(_ALLOCATION_FAILURE.search(text))


def address_space(pid: int) -> int:
    """Returns the size of a process' address space in bytes; 0 if unknown."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    except (OSError, IndexError, ValueError):  # the process has exited, or this is not Linux
        return 0
    return pages * resource.getpagesize()


def resident_memory() -> int | None:
    """Returns the bytes of this process that are in memory; None if unknown."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):  # this is not Linux
        return None
    return pages * resource.getpagesize()


def why_aborted(errors: str, limit: int | None, used: int) -> str | None:
    """Returns the evidence of an abort of native code by a failed allocation; None without any.

    Args:
      errors: Last lines of the standard error of the process.
      limit: Limit of its address space in bytes; None if unlimited.
      used: The largest address space of the process that was seen, in bytes.
    """
    before_stacks = errors.partition(_STACKS)[0].splitlines()[-_LAST_LINES:]
    if lines := [line for line in before_stacks if is_allocation_failure(line)]:
        return f"memory could not be allocated ({lines[-1].strip()})"
    if limit is not None and used > _NEAR * limit:
        return (
            f"memory could not be allocated, probably: its address space is limited to "
            f"{limit / 1e9:.2f} GB (RLIMIT_AS)"
        )
    return None


# -- The allocator of the C library: memory that it keeps for the next step on CPU -----------------

_SETTINGS = (
    "MALLOC_ARENA_MAX",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_TRIM_THRESHOLD_",
    "GLIBC_TUNABLES",
)
# NVIDIA, also in WSL; AMD; TPUs.
_ACCELERATORS = (
    "/dev/nvidia[0-9]*",
    "/dev/dxg",
    "/dev/kfd",
    "/dev/accel*",
    "/dev/vfio/[0-9]*",
)
# The parameters of mallopt(3).
_MXFAST, _TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = 1, -1, -4, -8
_NEVER = -1  # of the threshold


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory for the next step, if this process will compute on CPU.

    XLA allocates the temporary arrays of each step, and frees them after it. glibc returns memory
    of more than 32 MB to the system at once, so that each step has a page fault for each of its
    pages: a quarter of the time of a small transformer. With one arena, no `mmap` and no trimming,
    the memory stays. Without fast bins, threads that share the arena rarely wait for each other.

    Call it before a second thread allocates: a thread keeps the arena of its first allocation. It
    does nothing if the user has set the allocator, with another C library, and on a machine with
    NVIDIA or AMD GPUs or TPUs.
    """
    if not _is_glibc() or any(name in os.environ for name in _SETTINGS) or not _is_cpu_only():
        return
    mallopt = ctypes.CDLL(None).mallopt
    for parameter, value in (
        (_ARENA_MAX, 1),
        (_MMAP_MAX, 0),
        (_TRIM_THRESHOLD, _NEVER),
        (_MXFAST, 0),
    ):
        mallopt(parameter, value)


def _is_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError):  # no such function, or another C library
        return False


def _is_cpu_only() -> bool:
    """Returns whether JAX will find no accelerator, without importing it."""
    if platforms := os.environ.get("JAX_PLATFORMS"):
        return platforms == "cpu"
    return not any(glob.glob(pattern) for pattern in _ACCELERATORS)

"""Memory of a process: its exhaustion, kills by the kernel, and freed memory that is kept."""

import contextlib
import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import BOUND
from processes import drill, launching, run_line

from spmdtrain.distributed.out_of_memory import (
    OomKills,
    group_limit,
    is_exhausted,
    why_aborted,
)
from spmdtrain.distributed.progress import Reason
from spmdtrain.launch.child import TaskExit, describe_exit, hint


@pytest.mark.parametrize(
    ("group", "file", "text"),
    [
        ("0::/job\n", "job/memory.events", "low 0\noom 3\noom_kill {}\noom_group_kill 0\n"),
        ("4:cpu,memory:/job\n0::/\n", "memory/job/memory.oom_control", "oom_kill {}\n"),
        ("4:memory:/outside\n0::/\n", "memory/memory.oom_control", "under_oom 0\noom_kill {}\n"),
    ],
)
def test_kills_are_counted_in_the_control_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, file: str, text: str
) -> None:
    counter, machine = tmp_path / "cgroup" / file, tmp_path / "proc" / "vmstat"
    counter.parent.mkdir(parents=True)
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(group)
    counter.write_text(text.format(7))
    machine.write_text("pgfault 1\noom_kill 9\n")
    kills = OomKills(tmp_path / "cgroup", tmp_path / "proc")
    assert kills.reason() is None
    machine.write_text("pgfault 1\noom_kill 11\n")  # a process of another job, which is no evidence
    assert kills.reason() is None
    counter.write_text(text.format(8))
    assert "control group" in (kills.reason() or "")
    assert kills.reason() is None
    counter.write_text(text.format(9))
    now = time.monotonic()
    for seconds in (6, 70, 76):  # a kill of long ago explains no death
        monkeypatch.setattr("time.monotonic", lambda at=now + seconds: at)
        kills.poll()
    assert kills.reason() is None


@pytest.mark.parametrize(
    ("group", "files", "limit"),
    [
        ("0::/pod/job\n", {"pod/memory.max": "300", "pod/job/memory.max": "max"}, 300),
        ("0::/outside\n", {"memory.max": "300"}, 300),  # of a container, as it sees it
        ("4:memory:/job\n0::/\n", {"memory/job/memory.limit_in_bytes": "200"}, 200),
        ("4:memory:/x\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("", {}, None),
    ],
)
def test_the_memory_that_control_groups_allow(
    tmp_path: Path, group: str, files: dict[str, str], limit: int | None
) -> None:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(group)
    for name, text in files.items():
        (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name).write_text(text + "\n")
    assert group_limit(tmp_path / "cgroup", tmp_path / "proc") == limit


def test_without_a_counter_of_the_group_that_of_the_machine_is_evidence(tmp_path: Path) -> None:
    machine = tmp_path / "vmstat"
    machine.write_text("oom_kill 9\n")
    kills = OomKills(tmp_path, tmp_path)
    machine.write_text("oom_kill 10\n")
    assert "probably: it has killed a process of this machine" in (kills.reason() or "")
    assert kills.reason() is None


def test_without_counters_nothing_is_known(tmp_path: Path) -> None:
    assert OomKills(tmp_path, tmp_path).reason() is None


def test_errors_of_exhausted_memory() -> None:
    assert is_exhausted(MemoryError())
    assert is_exhausted(OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert is_exhausted(RuntimeError("can't start new thread"))
    wrapped = ValueError("no batch")
    wrapped.__cause__ = MemoryError()
    assert is_exhausted(wrapped)
    assert not is_exhausted(OSError(errno.ENOSPC, "No space left"))


def test_how_a_death_of_exhausted_memory_is_described() -> None:
    aborted = "E1123 memory_manager.cc\nLLVM ERROR: Unable to allocate section memory!\n"
    found = why_aborted(aborted, None, 0)
    assert found == (
        "memory could not be allocated (LLVM ERROR: Unable to allocate section memory!)"
    )
    death = TaskExit("worker 0", -6, errors=aborted, memory=found, peak=1_230_000_000)
    assert describe_exit(death) == f"worker 0 aborted (SIGABRT): {found}"
    assert hint(death) == "the peak host memory of worker 0 was 1.23 GB"
    assert "1.50 GB (RLIMIT_AS)" in (why_aborted("", 1_500_000_000, 1_400_000_000) or "")
    assert why_aborted("", 500_000_000_000, 200_000_000) is None  # far from its limit
    assert why_aborted("Segmentation fault", None, 0) is None
    earlier = "W allocator: out of memory, trying again\n" + "step 7\n" * 40
    assert why_aborted(earlier, None, 0) is None
    stacks = "Fatal Python error: Aborted\n" + '  File "a.py", line 1 in f\n' * 100
    assert why_aborted(aborted + stacks, None, 0) == found
    no_library = "cannot allocate memory for thread-local data: ABORT"
    exited = TaskExit("worker 0", 127, errors=no_library, memory=why_aborted(no_library, None, 0))
    assert describe_exit(exited) == (
        f"worker 0 failed: memory could not be allocated ({no_library})"
    )
    killed = hint(TaskExit("worker 0", -9, peak=1_230_000_000)) or ""
    assert "because memory was exhausted" in killed and killed.endswith("worker 0 was 1.23 GB")
    failed = TaskExit("worker 0", 1, reason=Reason(1, "RuntimeError: can't start new thread", True))
    assert hint(failed) is None
    assert "1.23 GB" in (hint(replace(failed, peak=1_230_000_000)) or "")
    assert "GB" not in (hint(TaskExit("worker 0", -11, peak=1_230_000_000)) or "")


# -- real processes --------------------------------------------------------------------------------

# Objects that are kept, of all sizes under a limit, so that nothing can be allocated after it.
HOARD = """
        if fault == "hoard":
            if self.config.limited:
                used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (used + 2**20,) * 2)
            for size in (2**20, 2**12, 500, 50) if self.config.limited else (2**24,):
                with contextlib.suppress(MemoryError):
                    while True:
                        hoard.append(bytearray(size))
            raise MemoryError
        if fault == "exception":"""


def hoarding(folder: Path) -> Path:
    """Returns an experiment whose fault takes all memory."""
    return drill(
        folder,
        ('        if fault == "exception":', HOARD),
        (
            "import os\nimport signal",
            "import contextlib\nimport os\nimport resource\nimport signal",
        ),
        ("class Rows:", "hoard = []\n\n\nclass Rows:"),
        ('    mark: str = ""', '    limited: bool = True\n    mark: str = ""'),
    )


def launched(
    folder: Path, *options: object, group: Path | None = None, within: float = 30.0
) -> list[str]:
    """Runs it through the launcher, perhaps in a control group; returns the launcher's lines."""
    mark = folder / "mark"
    workdir = ["--workdir", folder / "run", "--steps", 400, "--pause", 0.05]
    line = run_line(hoarding(folder), *workdir, "--fault", "hoard", "--mark", mark, *options)
    before = ":" if group is None else f"echo $$ > {group}/cgroup.procs"
    with launching(line, "--max-restarts", 0, before=before) as (process, lines):
        process.wait(BOUND)
    said = [text for _, text in lines if text.startswith("[launch]")]
    assert said, lines
    assert lines[-1][0] - float(mark.read_text()) < within, lines
    return said


@pytest.mark.drill
def test_a_process_that_cannot_allocate_ends_the_job_with_the_reason(tmp_path: Path) -> None:
    said = launched(tmp_path)
    # A thread of native code may fail to allocate before Python reports it, and end the process.
    reported = r"worker 0 (failed|aborted|crashed).* at step \d+: (MemoryError|memory could not)"
    assert re.search(reported, said[-1]), said
    assert any(re.search("chief ended with the job|killed chief", text) for text in said), said
    assert any(re.search(r"peak host memory of worker 0 was \d+ MB", text) for text in said), said


@pytest.fixture
def group() -> Iterator[Path]:
    """Returns a control group of 1.2 GB below that of this process."""
    try:
        own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        first = [path for _, names, path in own if "memory" in names.split(",")]
        (second,) = [path for _, names, path in own if not names] if not first else [""]
        top = Path("/sys/fs/cgroup/memory", first[0][1:]) if first else Path("/sys/fs/cgroup")
        found = top / second.lstrip("/") / f"spmdtrain-test-{os.getpid()}"
        found.mkdir()
    except (OSError, ValueError) as error:
        pytest.skip(f"no control group for memory can be made: {error!r}")
    try:
        limit = found / ("memory.limit_in_bytes" if first else "memory.max")
        if not limit.exists():  # version 2 has it if the group above hands the controller down
            pytest.skip(f"{found.parent} does not pass on the memory controller")
        limit.write_text("1200000000")
        yield found
    finally:
        for pid in (found / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        for _ in range(50):
            with contextlib.suppress(OSError):
                found.rmdir()
                break
            time.sleep(0.1)


@pytest.mark.drill
def test_a_kill_by_the_kernel_is_recognized(tmp_path: Path, group: Path) -> None:
    said = launched(tmp_path, "--no-limited", group=group, within=60.0)  # it takes time to fill
    killed = r"worker 0 was killed \(SIGKILL\).* step \d+: the kernel's OOM killer: the memory of"
    assert re.search(killed, said[-1]), said
    assert any(
        re.search(r"peak host memory of worker 0 was [\d.]+ [MG]B", text) for text in said
    ), said


# -- page faults of memory that is allocated again and again ---------------------------------------

needs_glibc = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
NO_HUGE_PAGES = 41  # PR_SET_THP_DISABLE of prctl(2)
FAULTS = f"""
import ctypes, glob, resource, sys, threading
from spmdtrain.distributed.out_of_memory import keep_freed_memory
glob.glob = lambda pattern: [path for path in sys.argv[1:] if path[:9] == pattern[:9]]
keep_freed_memory()
ctypes.CDLL(None).prctl({NO_HUGE_PAGES}, 1, 0, 0, 0)

def allocate():
    for _ in range(3):
        b"x" * 80_000_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        b"x" * 80_000_000
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

thread = threading.Thread(target=allocate)
thread.start()
thread.join()
"""
COMMAND = """
import os, runpy, sys
from spmdtrain.distributed import out_of_memory

def record():
    print(len(os.listdir("/proc/self/task")), "numpy" in sys.modules, flush=True)

out_of_memory.keep_freed_memory = record
sys.argv = ["run", "--config", "no such experiment.py"]
runpy.run_module("spmdtrain.run", run_name="__main__")
"""


def printed(program: str, *arguments: str, **given: str) -> str:
    """Returns the output of a program with only the given settings of allocator and platform."""
    dropped = ("JAX_PLATFORMS", "MALLOC_", "GLIBC_TUNABLES")
    env = {name: x for name, x in os.environ.items() if not name.startswith(dropped)}
    line = [sys.executable, "-c", program, *arguments]
    return subprocess.run(line, env=env | given, capture_output=True, text=True).stdout


@pytest.mark.slow
@needs_glibc
@pytest.mark.parametrize(
    ("device", "given", "is_kept"),
    [
        ("/dev/null", {}, True),
        ("/dev/nvidia0", {}, False),
        ("/dev/accel0", {}, False),
        ("/dev/nvidia0", {"JAX_PLATFORMS": "cpu"}, True),
        ("/dev/null", {"JAX_PLATFORMS": "cuda"}, False),
        ("/dev/null", {"MALLOC_ARENA_MAX": "0"}, False),
    ],
)
def test_memory_is_kept_on_cpu_unless_the_user_has_set_the_allocator(
    device: str, given: dict[str, str], is_kept: bool
) -> None:
    pages = 10 * 80_000_000 // os.sysconf("SC_PAGE_SIZE")
    assert (int(printed(FAULTS, device, **given)) < 0.1 * pages) is is_kept


@pytest.mark.slow
@needs_glibc
def test_the_run_command_keeps_memory_before_threads_start() -> None:
    assert printed(COMMAND).splitlines()[0] == "1 False"

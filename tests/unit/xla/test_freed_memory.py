"""Memory that the C library keeps: page faults of memory that is allocated again and again."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
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
from spmdtrain.distributed import out_of_memory as freed_memory

def record():
    print(len(os.listdir("/proc/self/task")), "numpy" in sys.modules, flush=True)

freed_memory.keep_freed_memory = record
sys.argv = ["run", "--config", "no such experiment.py"]
runpy.run_module("spmdtrain.run", run_name="__main__")
"""


def printed(program: str, *arguments: str, **given: str) -> str:
    """Returns the output of a program with only the given settings of allocator and platform."""
    dropped = ("JAX_PLATFORMS", "MALLOC_", "GLIBC_TUNABLES")
    env = {name: x for name, x in os.environ.items() if not name.startswith(dropped)}
    line = [sys.executable, "-c", program, *arguments]
    return subprocess.run(line, env=env | given, capture_output=True, text=True).stdout


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


def test_the_run_command_keeps_memory_before_threads_start() -> None:
    assert printed(COMMAND).splitlines()[0] == "1 False"

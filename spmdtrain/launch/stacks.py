"""The stacks of processes that hang, and whether a process is stopped by a signal."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from spmdtrain.distributed import progress

_STACKS_TIMEOUT = 3.0  # seconds for all tasks to write their stacks


def is_stopped(pid: int) -> bool:
    """Returns whether a signal or a debugger has stopped a process; False where /proc is absent."""
    try:
        content = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return content.rpartition(")")[2].split()[0] in "Tt"


def gather_stacks(folder: str, names: Sequence[str]) -> dict[str, str]:
    """Waits until the tasks have completely written their stacks, at most `_STACKS_TIMEOUT`.

    Returns task name to text; empty if it has written nothing.
    """
    until, before = time.monotonic() + _STACKS_TIMEOUT, dict[str, str]()
    while True:
        time.sleep(0.1)
        files = {name: progress.path(folder, name, "stacks") for name in names}
        stacks = {name: file.read_text(errors="replace") for name, file in files.items()}
        if (all(stacks.values()) and stacks == before) or time.monotonic() > until:
            return stacks
        before = stacks


def main_stacks(dump: str) -> Iterator[str]:
    """Yields the relevant lines of a faulthandler dump, and the number of omitted threads.

    These are the lines of the thread that received the signal, and of the main thread, which is the
    last one.
    """
    blocks = [block.strip("\n") for block in dump.split("\n\n") if block.strip()]
    threads = [block for block in blocks if block.startswith(("Thread", "Current thread 0x"))]
    chosen = [b for b in blocks if b.startswith("Current") or b in threads[-1:]]
    for block in chosen:
        yield from block.splitlines()
    if len(chosen) < len(blocks):
        yield f"(and {len(blocks) - len(chosen)} other threads)"

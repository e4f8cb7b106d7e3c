"""What a launcher sees of processes that are alive and do not get on."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from spmdtrain.distributed import progress

_PATIENCE = 3.0  # seconds for the stacks of all


class Watch:
    """How long nothing has changed."""

    def __init__(self) -> None:
        self._seen: object = None
        self._last = time.monotonic()
        self._idle = 0.0

    def idle(self, seen: object) -> float:
        """Seconds for which what is seen has been the same."""
        now = time.monotonic()
        # While the launcher was stopped (Ctrl-Z), its children were soon held up by their output.
        self._idle = self._idle + min(now - self._last, 1) if seen == self._seen else 0.0
        self._seen, self._last = seen, now
        return self._idle


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a process, as far as the system tells."""
    try:
        content = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return content.rpartition(")")[2].split()[0] in "Tt"


def gather_stacks(folder: str, names: Sequence[str]) -> dict[str, str]:
    """What the tasks have written of their stacks, once all have and it grows no more."""
    until, before = time.monotonic() + _PATIENCE, dict[str, str]()
    while True:
        time.sleep(0.1)
        files = {name: progress.path(folder, name, "stacks") for name in names}
        stacks = {name: file.read_text(errors="replace") for name, file in files.items()}
        if (all(stacks.values()) and stacks == before) or time.monotonic() > until:
            return stacks
        before = stacks


def main_stacks(dump: str) -> Iterator[str]:
    """The lines that matter of what faulthandler writes of all threads, and how many are left out.

    They are those of the thread that got the signal and of the main one, which comes last.
    """
    blocks = [block.strip("\n") for block in dump.split("\n\n") if block.strip()]
    threads = [block for block in blocks if block.startswith(("Thread", "Current thread 0x"))]
    chosen = [b for b in blocks if b.startswith("Current") or b in threads[-1:]]
    for block in chosen:
        yield from block.splitlines()
    if len(chosen) < len(blocks):
        yield f"(and {len(blocks) - len(chosen)} other threads)"

"""Jobs with parameter servers: the lines of their launcher, and the processes of a task."""

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

from helpers import BOUND

Lines = list[tuple[float, str]]

# All processes that these tests start inherit it. Other tests that run at the same time have tasks
# of the same names, also those of another pytest on this machine.
_OWN = "SPMDTRAIN_TESTS", str(os.getpid())
os.environ[_OWN[0]] = _OWN[1]


def text_of(lines: Lines) -> str:
    return "\n".join(text for _, text in lines)


def until(found: Callable[[], object], lines: Lines) -> None:
    end = time.monotonic() + BOUND
    while not found():
        assert time.monotonic() < end, text_of(lines)
        time.sleep(0.05)


def made(lines: Lines) -> int:
    """The last step that the chief's lines tell of."""
    found = re.findall(r"\[chief\] step (\d+)/", text_of(list(lines)))
    return int(found[-1]) if found else 0


def stale_updates(workdir: Path, after: int = 0) -> int:
    """The updates with a staleness above 0 that a run has logged for the steps after one.

    With one worker at work there are none. Each of them is of one worker, and the other one has
    made a batch meanwhile, so that of 2 N of them each of two workers has made at least N batches.
    """
    with contextlib.suppress(FileNotFoundError):
        text = (workdir / "metrics.jsonl").read_text()
        logged = [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]
        return sum(
            updates
            for line in logged
            if line["step"] > after
            for staleness, updates in line.get("staleness_counts", {}).items()
            if int(staleness) > 0
        )
    return 0


def of_task(name: str) -> dict[int, str]:
    """The processes that a launcher has begun for a task, its actors among them, by number."""
    expected = {f"SPMDTRAIN_TASK={name}".encode(), "=".join(_OWN).encode()}
    found = {}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdecimal() and expected <= set(
                (folder / "environ").read_bytes().split(b"\0")
            ):
                found[int(folder.name)] = (folder / "cmdline").read_text()
    return found


def send(number: signal.Signals, task: str, what: str = "") -> None:
    """Send a signal to the processes of a task: all, or those whose command line has these words.

    Ray names its actors' processes so: `ray::WorkerActor`. A process that is not found is searched
    for again: on a busy machine one worker may start after the other has made hundreds of steps.
    """
    end = time.monotonic() + BOUND
    while not (found := [pid for pid, line in of_task(task).items() if what in line]) and what:
        assert time.monotonic() < end, f"{task} has no process named {what}"
        time.sleep(0.01)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

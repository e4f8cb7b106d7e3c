"""Jobs with parameter servers: the lines of their launcher, and the processes of a task."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

BOUND = 300  # seconds for what takes ten or twenty where the machine has nothing else to do
Lines = list[tuple[float, str]]


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


def of_task(name: str) -> dict[int, str]:
    """The processes that a launcher has begun for a task, its actors among them, by number."""
    # Other tests that run at the same time have tasks of the same names.
    mine = f"PYTEST_XDIST_WORKER={os.environ.get('PYTEST_XDIST_WORKER', '')}".encode()
    found = {}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdecimal():
                variables = (folder / "environ").read_bytes().split(b"\0")
                if f"SPMDTRAIN_TASK={name}".encode() in variables and (
                    "PYTEST_XDIST_WORKER" not in os.environ or mine in variables
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

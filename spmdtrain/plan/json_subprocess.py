"""A command in a process of its own, which says what it does and answers in JSON."""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spmdtrain.plan.compiler_log import LOG

_SAYS = "SPMDTRAIN_SAYS"  # the descriptor that its messages go to
_PARENT = "SPMDTRAIN_SAYS_TO"  # the process that listens
_LONGEST_LOG = 20_000


class EndedError(Exception):
    """It has ended without an answer. What it wrote to its stderr is told on ours."""


def is_elsewhere() -> bool:
    """Whether this process is such a one."""
    return _SAYS in os.environ


def end_with_parent() -> None:
    """Ends such a process when the one that began it does, in the way that Linux has for it."""
    parent = int(os.environ[_PARENT])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it had gone before that held
        os._exit(1)


def send(what: str, message: Any) -> None:
    """Sends a message from such a process, anything that JSON has; the last is its answer."""
    line = json.dumps([what, message]) + "\n"
    data = line.encode()
    while data:
        data = data[os.write(int(os.environ[_SAYS]), data) :]


def run(
    command: Sequence[str], env: Mapping[str, str | None], hear: Callable[[str, Any], None]
) -> tuple[str, Any]:
    """Runs a Python command in this process' environment and `env`; returns its last message.

    A variable of `env` that is None is left out. `hear` is called with each message. What it prints
    is kept, and told if it ends without an answer. Ends it, with all that it has begun, when this
    is interrupted. Raises `EndedError`.
    """
    told = {k: v for k, v in {**os.environ, **env}.items() if v is not None}
    with tempfile.TemporaryDirectory(prefix="spmdtrain-") as folder:
        output = Path(folder) / "output"
        reads, writes = os.pipe()
        with os.fdopen(reads) as messages, output.open("w") as file:
            try:
                child = subprocess.Popen(
                    [sys.executable, *command],
                    # What it leaves for the moment goes with the folder, whatever ends it.
                    env=told | {_SAYS: str(writes), _PARENT: str(os.getpid()), "TMPDIR": folder},
                    pass_fds=(writes,),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                )
            finally:
                os.close(writes)
            last: tuple[str, Any] | None = None
            with _ended(child):
                for line in messages:
                    what, message = last = json.loads(line)
                    hear(what, message)
                child.wait()
        if last is None or child.returncode:
            for path in (output, *Path(folder).glob(f"{LOG}*")):
                sys.stderr.write(path.read_text(errors="replace")[-_LONGEST_LOG:])
            raise EndedError(f"ended with code {child.returncode}, see above")
    return last


@contextlib.contextmanager
def _ended(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """Ends a process that is still there at the end, with all that it has begun."""
    try:
        yield
    finally:
        if child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()

"""Subprocesses that send JSON messages: progress, then a result."""

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

_CHANNEL = "SPMDTRAIN_SAYS"  # file descriptor for the messages
_PARENT = "SPMDTRAIN_SAYS_TO"  # process id of the receiver
_LONGEST_LOG = 20_000


class EndedError(Exception):
    """Raised if a subprocess ended without a result. Its output was copied to stderr."""


def is_child() -> bool:
    """Returns whether `run` started this process."""
    return _CHANNEL in os.environ


def end_with_parent() -> None:
    """Makes a process that `run` started die with its parent; only Linux supports this."""
    parent = int(os.environ[_PARENT])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # the parent ended before the call of prctl
        os._exit(1)


def send(kind: str, message: Any) -> None:
    """Sends a message from a process that `run` started; the last message is its result."""
    line = json.dumps([kind, message]) + "\n"
    data = line.encode()
    while data:
        data = data[os.write(int(os.environ[_CHANNEL]), data) :]


def end_messages() -> None:
    """Signals the receiver that no messages follow, whatever this process still does."""
    os.close(int(os.environ[_CHANNEL]))


def run(
    command: Sequence[str],
    env: Mapping[str, str | None],
    on_message: Callable[[str, Any], None],
    *,
    seconds_to_end: float = 30.0,
) -> tuple[str, Any]:
    """Runs a Python command and returns the kind and the content of its last message.

    If this call is interrupted, it kills the command and all processes that it started.

    Args:
      command: Arguments of the Python interpreter.
      env: Changes to this process's environment; None removes a variable.
      on_message: Receives the kind and the content of each message.
      seconds_to_end: How long it may live after its last message; then it is killed.

    Raises:
      EndedError: If the command failed or sent no message; its output is copied to stderr.
    """
    variables = {k: v for k, v in {**os.environ, **env}.items() if v is not None}
    with tempfile.TemporaryDirectory(prefix="spmdtrain-") as folder:
        output = Path(folder) / "output"
        reads, writes = os.pipe()
        with os.fdopen(reads) as messages, output.open("w") as file:
            try:
                child = subprocess.Popen(
                    [sys.executable, *command],
                    # The child's temporary files are removed with the folder, however it ends.
                    env=variables
                    | {_CHANNEL: str(writes), _PARENT: str(os.getpid()), "TMPDIR": folder},
                    pass_fds=(writes,),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                )
            finally:
                os.close(writes)
            last: tuple[str, Any] | None = None
            with _killed_on_exit(child):
                for line in messages:
                    kind, message = last = json.loads(line)
                    on_message(kind, message)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(seconds_to_end)
                code = child.returncode
        if last is None or code:
            for path in (output, *Path(folder).glob(f"{LOG}*")):
                sys.stderr.write(path.read_text(errors="replace")[-_LONGEST_LOG:])
            raise EndedError(f"ended with code {child.returncode}, see above")
    return last


@contextlib.contextmanager
def _killed_on_exit(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """Kills the process group of a child that still runs when the context exits."""
    try:
        yield
    finally:
        if child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()

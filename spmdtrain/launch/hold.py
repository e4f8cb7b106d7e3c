"""The first part of a spare process: imports what its task will import, then waits for the task.

A spare is the command of a task. Python runs this file as its `sitecustomize`, before the command,
so that everything after the wait is a start like any other: arguments, `__main__`, tracebacks, exit
codes. The launcher and the spare exchange lines of JSON over a socket.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
from typing import Any

SPARE = "SPMDTRAIN_SPARE"
"""Environment variable that makes a process a spare: the argument of `hold` as JSON."""
UNHELD = "this process is a spare of the launcher"
"""TF_CONFIG of a spare whose Python does not run this file: it ends, and trains nothing."""
_CLOCK = 0.1  # seconds by which the clock of a file system may differ
_REST = 3.0  # seconds of sleep for each second of imports, so that they do not slow the job


class _RestingFinder:
    """A finder of modules that finds none: it makes this process sleep between its imports.

    An ordinary process may lower its priority, but not raise it again.
    """

    def __init__(self) -> None:
        self._used = time.process_time()

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        time.sleep(_REST * (time.process_time() - self._used))
        self._used = time.process_time()


def hold(request: dict[str, Any]) -> None:
    """Imports modules, waits until this process is given a task, and takes its environment.

    `request` has the `socket`; the `folder` of this file in `sys.path`; the `modules` to import;
    the `path` that Python will put first in `sys.path` for the command, empty without one; and
    whether the command `keeps_memory`. Ends the process if the launcher ends, if an import starts a
    JAX backend, or if a file has changed since its import.
    """
    os.environ.pop("TF_CONFIG", None)  # see `UNHELD`
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends it without a traceback
    own = sys.modules["sitecustomize"]
    vars(own).pop("__file__", None)  # it is not a module of the user
    sys.path[:] = [entry for entry in sys.path if entry != request["folder"]]
    _import_other_customization(own)
    began, before = time.time(), list(sys.path)
    if request["path"] and not sys.flags.safe_path:
        sys.path.insert(0, request["path"])
    # A start of the command does the same two things before its imports.
    gc.disable()
    if request["keeps_memory"]:
        from spmdtrain.distributed.out_of_memory import keep_freed_memory

        keep_freed_memory()
    with socket.socket(fileno=request["socket"]) as line:
        line.set_inheritable(False)
        for name in request["modules"]:
            _import(name)
            if _has_backend():
                _end(line, {"never": f"the import of {name} starts a JAX backend"})
        sys.path[:] = before
        gc.freeze()
        gc.enable()
        imported = {file: _state(file) for file in _files()}
        for file, state in imported.items():
            if state is None or max(state[:2]) >= (began - _CLOCK) * 1e9:
                imported[file] = None  # it may have changed between its import and now
        _send(line, {"ready": True})
        task = _receive(line)
        for file, state in imported.items():
            if state is None or _state(file) != state:
                _end(line, {"changed": file})
        # Only what differs, because imports have set variables, too.
        for variable, value in task.items():
            if value is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value
        importlib.invalidate_caches()  # the user may have added modules since
        signal.signal(signal.SIGINT, interrupt)
        _send(line, {"taken": True})


def _import_other_customization(own: Any) -> None:
    """Runs the `sitecustomize` of this Python or user, in whose place Python has run this file."""
    del sys.modules["sitecustomize"]
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", own)


def _import(name: str) -> None:
    """Imports a module slowly, or calls MODULE:FUNCTION; leaves errors to the task's own import."""
    module, _, function = name.partition(":")
    finder: Any = _RestingFinder()
    sys.meta_path.insert(0, finder)
    try:
        with contextlib.suppress(Exception, SystemExit):
            found = importlib.import_module(module)
            if function:
                getattr(found, function)()
    finally:
        sys.meta_path.remove(finder)


def _has_backend() -> bool:
    bridge: Any = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bridge.backends_are_initialized()


def _files() -> list[str]:
    found = (vars(module).get("__file__") for module in list(sys.modules.values()))
    return [file for file in found if isinstance(file, str)]


def _state(file: str) -> tuple[int, ...] | None:
    """Returns what changes with the content of a file; None if there is no such file."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


def _send(line: socket.socket, message: dict[str, Any]) -> None:
    line.sendall(json.dumps(message).encode() + b"\n")


def _receive(line: socket.socket) -> dict[str, str | None]:
    """Returns the variables of the task; ends the process if the launcher has ended."""
    text = b""
    while not text.endswith(b"\n"):
        if not (piece := line.recv(1 << 16)):
            os._exit(0)
        text += piece
    variables: dict[str, str | None] = json.loads(text)
    return variables


def _end(line: socket.socket, message: dict[str, Any]) -> None:
    """Ends this process, before the command, with a message for the launcher."""
    with contextlib.suppress(OSError):
        _send(line, message)
    os._exit(0)


if __name__ == "sitecustomize" and SPARE in os.environ:
    try:
        hold(json.loads(os.environ.pop(SPARE)))
    except BaseException as error:  # Python would continue to the command
        sys.excepthook(type(error), error, error.__traceback__)
        os._exit(1)

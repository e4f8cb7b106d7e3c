"""One failure ends a job: all of its processes, with its reason, within seconds.

JAX by itself leaves the others waiting for minutes, and then ends them by SIGABRT.
"""

import atexit
import contextlib
import dataclasses
import faulthandler
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NoReturn

import jax

from spmdtrain.distributed import out_of_memory, process_group, progress
from spmdtrain.distributed.process_group import KEY, Job
from spmdtrain.distributed.progress import Phase
from spmdtrain.errors import ExitCode, PreemptedExit, foreign

_FAILURE = f"{KEY}/failure"
_NOBODY = -1  # whose failure it is where no process says so by itself
_LOOK_EVERY = 0.3  # seconds between two looks at whether another one has failed
_TELLING = 2  # seconds in which one that fails tells the others, before they lose it
_LONGEST_REASON = 10_000  # characters that are shown of another process's reason
_LEAVING = 10  # seconds that a process has to leave things in order once the job has failed
# What JAX and its transports say where it is another process that has gone.
_STATUS = re.compile("[A-Z_]+: ")
_LOST = (
    *("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "socket closed"),
    *("coordination", "heartbeat", "unavailable:"),
)


def to_stderr(text: str) -> None:
    """A line for people, past the progress bar and the log of process 0."""
    print(text, file=sys.stderr, flush=True)


def _say_nothing(reason: str) -> None:
    pass


@dataclass
class _Ending:
    """How this process is about to end."""

    at_work: bool = False
    """Whether it is training: what a script does besides may take its time."""
    failing: bool = False
    """Whether the main thread has met with a failure."""
    on_failure: Callable[[str], None] = _say_nothing
    usual_hook: Any = sys.__excepthook__
    usual_thread_hook: Any = threading.__excepthook__
    stop: Callable[[], None] = lambda: None
    lock: threading.Lock = field(default_factory=threading.Lock)
    over: threading.Event = field(default_factory=threading.Event)
    """Set when the job has come to its end, with all of its processes."""


_ending = _Ending()


def begin(job: Job, hang_timeout: float) -> None:
    """From here on, this process ends with the job, and the job with this process.

    Where no process has moved for `hang_timeout` seconds, the one that holds the others is named,
    and the job ends; 0 is never.
    """
    out_of_memory.reserve()
    _ending.usual_hook, sys.excepthook = sys.excepthook, _end_on_exception
    _ending.usual_thread_hook, threading.excepthook = threading.excepthook, _end_on_exhaustion
    watch = threading.Thread(
        target=_watch, args=(job, hang_timeout), name="watch-the-others", daemon=True
    )
    watch.start()

    def stop() -> None:
        _ending.over.set()
        watch.join(timeout=10)

    _ending.stop = stop
    # A thread that comes back from JAX's client while Python shuts down aborts the process. This is
    # registered after JAX's own shutdown of the job, and so comes before it.
    atexit.register(stop)


def end() -> None:
    """All processes have come to the end of the job: what they do from here on is their own."""
    _ending.stop()
    sys.excepthook, threading.excepthook = _ending.usual_hook, _ending.usual_thread_hook


@contextlib.contextmanager
def watch_failures(on_failure: Callable[[str], None]) -> Iterator[None]:
    """While entered, to stand still counts as hanging, and another's failure is told here.

    `on_failure` is given the reason before this process is ended. It comes from a thread of its
    own, as the main one may be waiting for the process that failed.
    """
    _ending.at_work, _ending.on_failure = True, on_failure
    try:
        yield
    finally:
        _ending.at_work, _ending.on_failure = False, _say_nothing


def reason(error: BaseException) -> str:
    """Why a run fails, in one line: this error, or the failure elsewhere that it comes from.

    Nobody is told yet: whoever has called `fit` may still handle the error.
    """
    out_of_memory.release(error)
    own = _in_one_line(error)
    job, lost = process_group.current(), _is_lost(error)
    if job is None:
        return own
    other = _heard(job, wait=lost)
    return _of_another(other) if other else _in_words(own, lost=lost)


def fail(code: int, why: str, error: BaseException, show: Callable[[], None]) -> int:
    """Tell of a failure by `show()`. In a job all processes end with it, this one at once.

    `why` is what the others are told, in one line. Returns `code`, where this process is alone.
    """
    job = process_group.current()
    if job is None:
        show()
        progress.write_exit_reason(code, why)
        return code
    if out_of_memory.release(error):  # what follows may fail or wait for memory all the same
        progress.write_exit_reason(code, why)
        out_of_memory.end_within(code)
    _ending.failing, lost = True, _is_lost(error)
    first = _announce(job, code, why, lost=lost)
    mine = first["rank"] == job.rank
    if lost and mine:
        to_stderr(f"{job.name} ends: {first['reason']}")
    elif not lost and (mine or first["reason"] != why):
        show()
    _end(job, first)


def fail_with_message(code: int, line: str, error: Exception) -> int:
    """As `fail`, for an error that is meant for users."""
    return fail(code, " ".join(str(error).split()), error, lambda: to_stderr(line))


def check_exit(stop: SystemExit) -> None:
    """`sys.exit` in one process of a job: where it says that something failed, all end with it."""
    if stop.code in (None, 0) or isinstance(stop, PreemptedExit) or process_group.current() is None:
        return
    with_code = isinstance(stop.code, int)
    code = int(stop.code or 0) if with_code else ExitCode.FAILED
    why = f"sys.exit({stop.code})" if with_code else str(stop.code)
    fail(code, why, stop, lambda: to_stderr(why))


def _end_on_exception(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """For a process of a job: a plain exception would leave the others waiting for minutes."""
    code = ExitCode.INTERRUPTED if isinstance(error, KeyboardInterrupt) else ExitCode.FAILED
    line = _in_one_line(error)
    fail(code, line, error, lambda: traceback.print_exception(kind, error, trace))


def _in_one_line(error: BaseException) -> str:
    """Returns the type of an error and its message, if it has one."""
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")


def _end_on_exhaustion(thread: threading.ExceptHookArgs) -> None:
    """Ends the job if a thread dies of exhausted memory, because the others may wait for it.

    Other errors of threads go to the usual hook.
    """
    error = thread.exc_value
    if error is None or not out_of_memory.is_exhausted(error):
        _ending.usual_thread_hook(thread)
        return
    name = thread.thread.name if thread.thread else "a thread"
    line = f"{_in_one_line(error)} (in thread {name})"
    fail(ExitCode.FAILED, line, error, lambda: traceback.print_exception(error))


def _is_lost(error: BaseException) -> bool:
    """Whether an error only says that another process is no longer there."""
    cause: BaseException | None = error
    while cause is not None:
        # Of ValueErrors, only those that JAX makes of what its transports say.
        text, from_jax = str(cause), isinstance(cause, (jax.errors.JaxRuntimeError, ValueError))
        if from_jax and _STATUS.match(text):
            return any(words in text.lower() for words in _LOST)
        cause = cause.__cause__ or cause.__context__
    return False


def _announce(job: Job, code: int, line: str, *, lost: bool) -> dict[str, Any]:
    """The failure that came first, of which all processes are told: this one, or another's."""
    if (other := _heard(job, wait=lost)) is not None:
        return other
    line = _in_words(line, lost=lost)
    own = {"rank": job.rank, "name": job.name, "code": int(code), "reason": line, "lost": lost}
    _set_failure(job, own)
    return _announced(job) or own


def _heard(job: Job, *, wait: bool) -> dict[str, Any] | None:
    """Another process's failure, if one is told; to `wait` gives it a moment to say so."""
    until = time.monotonic() + (_TELLING if wait else 0)
    while (found := _announced(job)) is None and time.monotonic() < until:
        time.sleep(0.1)
    return found if found and found["rank"] != job.rank else None


def _in_words(line: str, *, lost: bool) -> str:
    return f"lost the connection to another process of the job ({line[:200]})" if lost else line


def _set_failure(job: Job, failure: Mapping[str, Any]) -> None:
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # there already, or nobody to tell
        job.client.key_value_set(_FAILURE, json.dumps(failure))


def _announced(job: Job) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(job.client.key_value_try_get(_FAILURE))
    except jax.errors.JaxRuntimeError:
        return None
    shown = {key: foreign(found[key], _LONGEST_REASON) for key in ("name", "reason")}
    return found | shown


def _of_another(failure: Mapping[str, Any]) -> str:
    verb = "" if failure["lost"] else "hangs: " if failure["rank"] == _NOBODY else "failed: "
    return f"{failure['name']} {verb}{failure['reason']}"


def _watch(job: Job, hang_timeout: float) -> None:
    """End this process soon after another one has failed, whatever it is waiting for."""
    places = _Places(job, hang_timeout)
    while not _ending.over.wait(_LOOK_EVERY):
        if (failure := _announced(job)) is not None and failure["rank"] != job.rank:
            # The main thread may be about to find out by itself, and to leave things in order.
            time.sleep(1.0)
            if _ending.failing:
                time.sleep(_LEAVING)
            try:
                _ending.on_failure(_of_another(failure))
            except Exception:
                traceback.print_exc()  # and on: this process is to end in any case
            _end(job, failure)
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the store has gone: so do we, soon
            places.look()


class _Places:
    """Where all processes are: each tells, and process 0 looks whether any of them moves."""

    def __init__(self, job: Job, hang_timeout: float) -> None:
        self._job, self._timeout = job, hang_timeout
        self._every = min(10.0, hang_timeout / 10)
        self._next = self._since = time.monotonic()
        self._seen: object = None

    def look(self) -> None:
        """Tell where this process is; in process 0, end the job where nothing has moved."""
        now = time.monotonic()
        if not self._timeout or now < self._next:
            return
        self._next = now + self._every
        job = self._job
        if (here := progress.local_record(job.name)) is not None:
            # How long ago, as each machine has a clock of its own.
            record = dataclasses.asdict(here) | {"at": now - here.at}
            told = {"at_work": _ending.at_work, "record": record}
            key = f"{KEY}/where/{job.rank}"
            job.client.key_value_set(key, json.dumps(told), allow_overwrite=True)
        if job.rank != 0:
            return
        found = [json.loads(told) for _, told in job.client.key_value_dir_get(f"{KEY}/where/")]
        records = [told["record"] for told in found]
        seen = sorted((record["task"], record["changes"]) for record in records)
        if seen != self._seen or not any(told["at_work"] for told in found):
            self._seen, self._since = seen, now
        elif now - self._since >= self._timeout:
            where = [
                progress.Record(**r | {"phase": Phase(r["phase"]), "at": now - r["at"]})
                for r in records
            ]
            why = progress.find_stalled_task(where).sentence
            why = f"nothing has moved for {self._timeout:g} s: {foreign(why)}"
            hung = {"rank": _NOBODY, "name": "the job", "code": int(ExitCode.FAILED)}
            _set_failure(job, hung | {"reason": why, "lost": False})


def _end(job: Job, failure: Mapping[str, Any]) -> NoReturn:
    """End this process at once, with the code of the failure that came first."""
    if not _ending.lock.acquire(blocking=False):
        time.sleep(60)  # another thread is at it
    mine, why = failure["rank"] == job.rank, str(failure["reason"])
    if not mine:
        why = _of_another(failure)
        to_stderr(f"{job.name} ends, as {why}")
    if failure["rank"] == _NOBODY:
        faulthandler.dump_traceback()
    progress.write_exit_reason(failure["code"], why, own=mine and not failure["lost"])
    with contextlib.suppress(Exception):
        job.client.key_value_set(f"{KEY}/gone/{job.rank}", "")
        if job.rank == 0:  # the store ends with it, and the others are to read it first
            until = time.monotonic() + 5
            gone = 0
            while gone < len(job.names) and time.monotonic() < until:
                gone = len(job.client.key_value_dir_get(f"{KEY}/gone/"))
                time.sleep(0.05)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    # Not sys.exit: JAX would then wait for processes that come no more.
    os._exit(failure["code"])

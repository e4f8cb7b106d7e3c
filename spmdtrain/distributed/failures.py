"""Ends of a job: failures of a process, and signals that ask a run to stop."""

import atexit
import contextlib
import dataclasses
import faulthandler
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, TracebackType
from typing import Any, NoReturn

import jax

from spmdtrain.distributed import out_of_memory, process_group, progress
from spmdtrain.distributed.process_group import KEY, Job
from spmdtrain.distributed.progress import (
    CONTEXT,
    HangTimer,
    IdleTimer,
    Phase,
    find_hung_task,
    ignore_failure,
    stop_request,
)
from spmdtrain.distributed.requests import Requests
from spmdtrain.errors import (
    CONTROL,
    EarlyExit,
    ExitCode,
    OwnExit,
    PreemptedExit,
    describe_sys_exit,
    end_by,
    for_users,
    foreign,
)

# -- Failures of a job: one failed process ends all of them within seconds, with its reason --------
#
# Without this, JAX leaves the others waiting for minutes, and then ends them by SIGABRT.

TRAINING, EVALUATION, PREDICTION = "training", "evaluation", "prediction"
"""Names of work for `work_in_progress`."""
_SUCCESS = (ExitCode.DONE, ExitCode.PREEMPTED)
_FAILURE = f"{KEY}/failure"
# Folders of the store, each with a key for each rank.
_ROLL_CALL = f"{KEY}/roll_call/"  # set by a process that has lost a connection
_PRESENT = f"{KEY}/present/"  # the answers
_WHERE = f"{KEY}/where/"  # the progress of each process
_NO_RANK = -1  # rank in a failure that no process reported itself: a job that hangs
SHUTDOWN = 300
"""Seconds that processes wait for the others at the end."""
HANG_TIMEOUT = 1800.0
"""Seconds without progress in phases whose duration is not measured."""
_POLL_INTERVAL = 0.3  # seconds between two checks whether another process has failed
_REPORT_TIMEOUT = 2  # seconds to wait for the report of a process whose connection is lost
_MAX_REASON = 10_000  # characters printed of another process's reason
_LAST_WORDS = 30.0  # seconds to write why a process ends: its output may not be read
_CLEANUP_TIMEOUT = 10  # seconds that the main thread has to clean up after the job has failed
# Messages of JAX and its transports about another process that has gone.
_STATUS = re.compile("[A-Z_]+: ")
_LOST = (
    *("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "socket closed"),
    *("coordination", "heartbeat", "unavailable:"),
)


def to_stderr(text: str) -> None:
    """Prints a line to stderr, apart from the progress bar and the log of process 0."""
    print(text, file=sys.stderr, flush=True)


def start_watching(job: Job, hang_timeout: float | None) -> None:
    """Starts to watch the job: from now on a failure in any process ends all of them.

    After `hang_timeout` seconds without progress in any process, the job fails with the name of the
    task that blocks the others; 0 disables this, and None measures the steps.
    """
    out_of_memory.reserve()
    end_by(_exit_on_error)
    CONTEXT.exits.usual_thread_hook, threading.excepthook = (
        threading.excepthook,
        _exit_on_exhaustion,
    )
    watch = threading.Thread(
        target=_watch, args=(job, hang_timeout), name="watch-the-others", daemon=True
    )
    watch.start()

    def stop() -> None:
        CONTEXT.exits.finished.set()
        watch.join(timeout=10)

    def end() -> None:
        if not CONTEXT.exits.finished.is_set():
            job.answer(ended=True)
            # JAX waits in its shutdown as well, but what then happens to the others is not watched.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                job.client.wait_at_barrier(f"{KEY}/end", SHUTDOWN * 1000)
        stop()

    CONTEXT.exits.stop = stop
    # A thread that returns from JAX's client while Python shuts down aborts the process. This is
    # registered after JAX's own shutdown of the job, and therefore runs before it.
    atexit.register(end)


def watch_alone(hang_timeout: float) -> None:
    """Makes this process end after `hang_timeout` seconds without progress; 0 disables this."""
    progress.begin(always=True)
    CONTEXT.exits.hang_timeout = hang_timeout


@contextlib.contextmanager
def _watch_own_work() -> Iterator[None]:
    """Ends this process if the progress of its work stops while entered."""
    ended, timeout = threading.Event(), CONTEXT.exits.hang_timeout

    def watch() -> None:
        timer = IdleTimer()
        while not ended.wait(min(1.0, timeout / 10)):
            record = progress.local_record("the process")
            if record is None or timer.idle(record.changes) < timeout:
                continue
            why = f"no progress for {timeout:g} s: {find_hung_task([record]).sentence}"
            _exit_within(_LAST_WORDS, ExitCode.FAILED)
            with contextlib.suppress(Exception):
                CONTEXT.exits.on_failure(why)
            _show(why)
            faulthandler.dump_traceback()
            progress.write_exit_reason(ExitCode.FAILED, why)
            os._exit(ExitCode.FAILED)  # the main thread does not return

    watching = threading.Thread(target=watch, name="watch for a hang", daemon=True)
    if timeout and process_group.current() is None:
        watching.start()
    try:
        yield
    finally:
        ended.set()


def _exit_within(seconds: float, code: int) -> None:
    """Exits after some time in any case: a write may wait for a reader that has stopped."""
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    with contextlib.suppress(RuntimeError):  # there are too many threads
        timer.start()


def stop_watching() -> None:
    """Stops watching, because all processes have reached the end of the job."""
    CONTEXT.exits.stop()
    end_by(None)
    threading.excepthook = CONTEXT.exits.usual_thread_hook


@contextlib.contextmanager
def watch_failures(on_failure: Callable[[str], None]) -> Iterator[None]:
    """Watches for hangs while entered, and reports a failure of another process.

    `on_failure` is called with the reason before this process exits. It runs in the watching
    thread, because the main thread may be waiting for the process that failed.
    """
    CONTEXT.exits.training, CONTEXT.exits.on_failure = True, on_failure
    try:
        yield
    finally:
        CONTEXT.exits.training, CONTEXT.exits.on_failure = False, ignore_failure


def reason(error: BaseException) -> str:
    """Returns why a run fails, in one line: this error, or the other process's failure behind it.

    It does not report the failure to the other processes, because the caller of `fit` may still
    handle the error.
    """
    out_of_memory.release(error)
    own = _in_one_line(error)
    job, lost = process_group.current(), is_lost(error)
    if job is None:
        return own
    other = _failure_of_another(job, wait=lost)
    return describe_failure(other) if other else _reason_text(job, own, lost=lost)


def fail(code: int, why: str, error: BaseException, show: Callable[[], None]) -> int:
    """Reports a failure. In a job this process exits at once, and the others soon after.

    Args:
      why: The reason for the other processes and the launcher, in one line.
      error: The exception, which may only say that another process is lost.
      show: Prints the failure for the user.

    Returns:
      `code`, if this process is not part of a job.
    """
    job = process_group.current()
    if job is None:
        show()
        progress.write_exit_reason(code, why)
        return code
    if out_of_memory.release(error):  # because the code below may still fail or wait for memory
        progress.write_exit_reason(code, why)
        out_of_memory.end_within(code)
    CONTEXT.exits.failing, lost = True, is_lost(error)
    first = _publish_failure(job, code, why, lost=lost)
    mine = first["rank"] == job.rank
    if lost and mine:
        to_stderr(f"{job.name} exits: {first['reason']}")
    elif not lost and (mine or first["reason"] != why):
        show()
    _exit(job, first)


def fail_with_message(code: int, line: str, error: Exception) -> int:
    """Calls `fail` for an error for users (`errors.for_users`), whose line it prints to stderr."""
    return fail(code, " ".join(str(error).split()), error, lambda: to_stderr(line))


@contextlib.contextmanager
def work_in_progress(what: str) -> Iterator[None]:
    """Makes an end of this process a failure while entered, whatever its exit code.

    A `sys.exit` of the user's code, a data source or a library becomes an `EarlyExit`, which the
    outermost of several such contexts reports like any other failure. Exits of the framework, such
    as `PreemptedExit`, pass unchanged. If the interpreter ends while the context is open, the
    failure is reported at exit. The launcher detects an end that runs no Python code, such as
    `os._exit`.
    """
    exits = CONTEXT.exits
    with contextlib.ExitStack() as stack:
        if is_outermost := exits.at_work != os.getpid():
            exits.at_work, exits.work = os.getpid(), what
            stack.callback(setattr, exits, "at_work", 0)
            stack.enter_context(progress.working(what))
            stack.enter_context(_watch_own_work())
            atexit.unregister(_report_open_work)
            atexit.register(_report_open_work)
        try:
            yield
        except SystemExit as stop:
            if isinstance(stop, OwnExit) and not isinstance(stop, EarlyExit):
                raise
            error = stop if isinstance(stop, EarlyExit) else _early_exit(stop)
            if is_outermost:
                fail(error.status, error.reason, error, lambda: _show(error.reason))
            if error is stop:
                raise
            raise error from stop


def _early_exit(stop: SystemExit) -> EarlyExit:
    """Returns the failure for a `sys.exit` during the work of this process."""
    what = CONTEXT.exits.work
    reason = describe_sys_exit(stop, f"during the {what}")
    if what == TRAINING:
        reason += "; to end a run early, call its stop()"
    # Codes that mean success. Of others, the system keeps the last 8 bits.
    code = stop.code & 0xFF if isinstance(stop.code, int) else int(bool(stop.code))
    return EarlyExit(reason, ExitCode.FAILED if code in _SUCCESS else code)


def _report_open_work() -> None:
    """Fails at the exit of an interpreter whose work is not finished, such as in a daemon thread.

    It ends the process itself, because the exit code can no longer be changed otherwise. Later exit
    handlers do not run.
    """
    exits = CONTEXT.exits
    if exits.at_work != os.getpid():  # finished, or a forked process
        return
    why = f"Python ended during the {exits.work}"
    with contextlib.suppress(Exception):
        exits.on_failure(why)
    code = fail(ExitCode.FAILED, why, SystemExit(0), lambda: _show(why))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def _show(why: str) -> None:
    to_stderr(f"failed: {why}")


def check_exit(stop: SystemExit) -> None:
    """Ends the whole job if a process calls `sys.exit` with a code or message of a failure."""
    if stop.code in (None, 0) or isinstance(stop, OwnExit) or process_group.current() is None:
        return
    with_code = isinstance(stop.code, int)
    code = int(stop.code or 0) if with_code else ExitCode.FAILED
    why = f"sys.exit({stop.code})" if with_code else str(stop.code)
    fail(code, why, stop, lambda: to_stderr(why))


def _exit_on_error(code: int, error: BaseException, show: Callable[[], None]) -> None:
    """Ends a job after an uncaught error: the others would wait for minutes."""
    why = " ".join(str(error).split()) if for_users(error) else _in_one_line(error)
    fail(code, why, error, show)


def _in_one_line(error: BaseException) -> str:
    """Returns the type of an error and its message, if it has one."""
    if isinstance(error, EarlyExit):
        return error.reason
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")


def _exit_on_exhaustion(thread: threading.ExceptHookArgs) -> None:
    """`threading.excepthook` that ends the job if a thread runs out of memory.

    Other threads and processes may wait for that thread. Other errors go to the usual hook.
    """
    error = thread.exc_value
    if error is None or not out_of_memory.is_exhausted(error):
        CONTEXT.exits.usual_thread_hook(thread)
        return
    name = thread.thread.name if thread.thread else "a thread"
    line = f"{_in_one_line(error)} (in thread {name})"
    fail(ExitCode.FAILED, line, error, lambda: traceback.print_exception(error))


def is_lost(error: BaseException) -> bool:
    """Returns whether an error only means that the connection to another process is lost."""
    cause: BaseException | None = error
    while cause is not None:
        # Of ValueErrors, only those in which JAX wraps a status of its transports.
        text, from_jax = str(cause), isinstance(cause, (jax.errors.JaxRuntimeError, ValueError))
        if from_jax and _STATUS.match(text):
            return any(words in text.lower() for words in _LOST)
        cause = cause.__cause__ or cause.__context__
    return False


def _publish_failure(job: Job, code: int, line: str, *, lost: bool) -> dict[str, Any]:
    """Returns the first failure of the job, after publishing this one if there is no other."""
    if (other := _failure_of_another(job, wait=lost)) is not None:
        return other
    line = _reason_text(job, line, lost=lost)
    own = {"rank": job.rank, "name": job.name, "code": int(code), "reason": line, "lost": lost}
    _set_failure(job, own)
    return first_failure(job) or own


def _failure_of_another(job: Job, *, wait: bool) -> dict[str, Any] | None:
    """Returns another process's published failure.

    `wait` waits up to `_REPORT_TIMEOUT` for it. Meanwhile the processes that are still there answer
    a roll call, so that `_reason_text` can name the one that is gone.
    """
    if wait:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            job.client.key_value_set(f"{_ROLL_CALL}{job.rank}", "", allow_overwrite=True)
    until = time.monotonic() + (_REPORT_TIMEOUT if wait else 0)
    while (failure := first_failure(job)) is None and time.monotonic() < until:
        time.sleep(0.1)
    return failure if failure and failure["rank"] != job.rank else None


def _reason_text(job: Job, line: str, *, lost: bool) -> str:
    if not lost:
        return line
    try:
        present = {key.rpartition("/")[2] for key, _ in job.client.key_value_dir_get(_PRESENT)}
        gone = [rank for rank in range(len(job.names)) if str(rank) not in present]
        where = dict(job.client.key_value_dir_get(_WHERE))
    except jax.errors.JaxRuntimeError:  # process 0 keeps the store
        gone, where = [0], {}
    lost_ones = [_last_seen(job, rank, where) for rank in gone if rank != job.rank]
    # Without one, all still answer: a network lost the connection.
    who = ", ".join(lost_ones) or "another process of the job"
    return f"lost the connection to {who} ({line[:200]})"


def _last_seen(job: Job, rank: int, where: Mapping[str, str]) -> str:
    """Describes a process that has ended without a report."""
    ended = f"{job.names[rank]}, which ended without a report"
    text = next((text for key, text in where.items() if key.endswith(f"/{rank}")), None)
    if text is None:
        return ended
    report = json.loads(text)
    record = progress.ProgressRecord(
        **report["record"] | {"phase": Phase(report["record"]["phase"])}
    )
    during = f" during the {TRAINING}" if report["at_work"] else ""
    return foreign(f"{ended}{during} (last heard of in {record.where})")


def _set_failure(job: Job, failure: Mapping[str, Any]) -> None:
    # Raises if a failure is already published, or if the store is gone.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        job.client.key_value_set(_FAILURE, json.dumps(failure))


def first_failure(job: Job) -> dict[str, Any] | None:
    """Returns the failure that a process published first, with its texts escaped."""
    try:
        failure: dict[str, Any] = json.loads(job.client.key_value_try_get(_FAILURE))
    except jax.errors.JaxRuntimeError:
        return None
    return failure | {key: foreign(failure[key], _MAX_REASON) for key in ("name", "reason")}


def describe_failure(failure: Mapping[str, Any]) -> str:
    """Returns a published failure as text: the process and the reason."""
    verb = "" if failure["lost"] else "hangs: " if failure["rank"] == _NO_RANK else "failed: "
    return f"{failure['name']} {verb}{failure['reason']}"


def _watch(job: Job, hang_timeout: float | None) -> None:
    """Exits soon after another process has failed, whatever the main thread is waiting for."""
    monitor = _HangMonitor(job, hang_timeout)
    answered = False
    while not CONTEXT.exits.finished.wait(_POLL_INTERVAL):
        if (failure := first_failure(job)) is not None and failure["rank"] != job.rank:
            # The main thread may be about to notice the failure itself, and to clean up.
            time.sleep(1.0)
            if CONTEXT.exits.failing:
                time.sleep(_CLEANUP_TIMEOUT)
            _exit_within(_LAST_WORDS, failure["code"])
            try:
                CONTEXT.exits.on_failure(describe_failure(failure))
            except Exception:
                traceback.print_exc()  # not raised: this process must exit in any case
            _exit(job, failure)
        # Without the store, JAX ends this process soon.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            if not answered and job.client.key_value_dir_get(_ROLL_CALL):
                job.client.key_value_set(f"{_PRESENT}{job.rank}", "", allow_overwrite=True)
                answered = True
            monitor.poll()
        job.answer()


class _HangMonitor:
    """Detects a job that hangs: each process publishes its progress, and process 0 compares it."""

    def __init__(self, job: Job, hang_timeout: float | None) -> None:
        self._job, self._disabled = job, hang_timeout == 0
        self._every = 5.0 if hang_timeout is None else min(10.0, hang_timeout / 10)
        self._next = time.monotonic()
        # A longer interval passes only while this process itself is stopped.
        longest = max(10.0, 2 * self._every)
        self._timer = HangTimer(hang_timeout, HANG_TIMEOUT, longest)

    def poll(self) -> None:
        """Publishes the progress of this process; in process 0, fails a job without progress."""
        now = time.monotonic()
        if self._disabled or now < self._next:
            return
        self._next = now + self._every
        job = self._job
        if (local := progress.local_record(job.name)) is not None:
            # As seconds ago, because each machine has its own clock.
            record = dataclasses.asdict(local) | {"at": now - local.at}
            report = {"at_work": CONTEXT.exits.training, "record": record}
            job.client.key_value_set(
                f"{_WHERE}{job.rank}", json.dumps(report), allow_overwrite=True
            )
        if job.rank != 0:
            return
        reports = [json.loads(text) for _, text in job.client.key_value_dir_get(_WHERE)]
        records = [report["record"] for report in reports]
        counts = sorted((record["task"], record["changes"]) for record in records)
        at_work = any(report["at_work"] for report in reports)
        # The rest of a script may take any time, so it is a new state at each poll.
        phases = [Phase(record["phase"]) for record in records]
        if found := self._timer.hung_for(counts if at_work else object(), phases):
            parsed = [
                progress.ProgressRecord(**r | {"phase": Phase(r["phase"]), "at": now - r["at"]})
                for r in records
            ]
            why = find_hung_task(parsed).sentence
            why = f"no progress for {found}: {foreign(why)}"
            hung = {"rank": _NO_RANK, "name": "the job", "code": int(ExitCode.FAILED)}
            _set_failure(job, hung | {"reason": why, "lost": False})


def _exit(job: Job, failure: Mapping[str, Any]) -> NoReturn:
    """Exits at once with the code of the job's first failure."""
    if not CONTEXT.exits.lock.acquire(blocking=False):
        time.sleep(60)  # another thread is exiting
    _exit_within(_LAST_WORDS, failure["code"])
    mine, why = failure["rank"] == job.rank, str(failure["reason"])
    if not mine:
        why = describe_failure(failure)
        to_stderr(f"{job.name} exits because {why}")
    if failure["rank"] == _NO_RANK:
        faulthandler.dump_traceback()
    progress.write_exit_reason(failure["code"], why, own=mine and not failure["lost"])
    with contextlib.suppress(Exception):
        job.client.key_value_set(f"{KEY}/gone/{job.rank}", "")
        if job.rank == 0:  # the store ends with this process, and the others must read it first
            until = time.monotonic() + 5
            gone = 0
            while gone < len(job.names) and time.monotonic() < until:
                gone = len(job.client.key_value_dir_get(f"{KEY}/gone/"))
                time.sleep(0.05)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    # Not sys.exit, because JAX would then wait for processes that have gone.
    os._exit(failure["code"])


# -- Preemption: signals that ask a run to stop, checked by the training loop between steps --------


@dataclasses.dataclass
class StopSignals:
    """Handlers of SIGTERM, SIGUSR1 and SIGINT while entered.

    The first signal is only recorded, for `stop_requested`. A signal more than 0.3 s after it ends
    the process at once. Slurm sends SIGUSR1 before the end of a job (`--signal=USR1@120`). A signal
    that arrives too late for a fit, while its last files are written, stops the next one.

    Only the main thread can handle signals; in another thread nothing is changed. With several
    processes, JAX handles SIGTERM, which then stops all of them, and SIGINT and SIGUSR1 are
    forwarded as SIGTERM.

    Attributes:
      requests: Requests of the run's owner, of which one may ask to stop.
      received: The name of the signal that any process has received, or `CONTROL`; None before.
    """

    requests: Requests = dataclasses.field(default_factory=Requests)
    received: str | None = None
    _passed_on: signal.Signals | None = None  # the signal forwarded as SIGTERM
    _before: dict[signal.Signals, object] = dataclasses.field(default_factory=dict)

    def __enter__(self) -> "StopSignals":
        stop_request()  # without one that a part has acted on
        if threading.current_thread() is threading.main_thread():
            handler, numbers = self._catch, [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
            if process_group.count() > 1:
                handler, numbers = self._pass_on, [signal.SIGINT, signal.SIGUSR1]
            for number in numbers:
                self._before[number] = signal.signal(number, handler)
        return self

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:  # a second SIGINT ends this process; a SIGTERM does not
            self._restore()
        self._passed_on = signal.Signals(number)
        os.kill(os.getpid(), signal.SIGTERM)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        CONTEXT.stop_request.hear(number)
        if CONTEXT.stop_request.repeated:
            CONTEXT.stop_request.acted = True
            self._restore()
            os.kill(os.getpid(), number)

    def stop_requested(self) -> bool:
        """Returns whether to stop: the same in all processes, which call it at the same points."""
        if self.received is None and CONTEXT.stop_request.signal is not None:
            self.received = CONTEXT.stop_request.signal.name
        if self.received is None and process_group.preempted():
            passed_on = process_group.gather(self._passed_on)
            self.received = signal.Signals(next(filter(None, passed_on), signal.SIGTERM)).name
        if self.requests.agreed and self.requests.take() and self.received is None:
            self.received = CONTROL
        return self.received is not None

    def stop_if_received(self) -> None:
        """Raises `PreemptedExit` after a signal. All processes call it at the same points."""
        if self.stop_requested():
            assert self.received is not None
            CONTEXT.stop_request.acted = True
            raise PreemptedExit(self.received)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()
        stop_request()  # without one that a part has acted on

"""Reading of batches ahead, in threads, or in worker processes of Grain."""

import atexit
import collections
import contextlib
import errno
import functools
import gc
import itertools
import math
import multiprocessing
import multiprocessing.connection
import os
import pickle
import queue
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeVar

import jax
import numpy as np

from spmdtrain.data.datasets import is_thread_safe
from spmdtrain.distributed.code_digest import user_modules
from spmdtrain.distributed.out_of_memory import available_memory
from spmdtrain.errors import ExitCode, StorageError, UserError, describe_sys_exit
from spmdtrain.sharding import placement
from spmdtrain.sharding.placement import bind_strategy

PyTree = Any
T = TypeVar("T")

_BATCHES_PER_WORKER = 2  # that wait to be taken; each worker computes another one meanwhile
_SECONDS_TO_CLOSE = 30
_SECONDS_TO_END = 5  # that Grain needs to notice that its workers are gone
_WORKER = "grain-process-prefetch"  # how the names begin that Grain gives to its worker processes
# What a worker that ended with code 0 before its last batch is reported to have ended with: no
# process has this code.
_ENDED_EARLY = 256
_FULL = "the shared memory of processes (/dev/shm) is full: give it more, or use data_threads"
_SECONDS_BETWEEN_CHECKS = 0.5  # of the workers' exit codes
# Signals that a scheduler or a terminal sends to all processes of a job: the run has to read the
# batches of the steps before its last save, so its workers must outlive them.
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


Threads = int | Literal["auto"]
"""A number of threads, or "auto", for which the reader chooses the number while it runs."""

_MOST_THREADS = 64  # that "auto" chooses, or as many as there are cores
_SHARE_OF_MEMORY = 1 / 8  # that the batches may take which "auto" reads ahead
_WAIT = 0.02  # share of the time in which a batch is waited for, from which on "auto" adds threads
_SECONDS_OF_WINDOW = 0.25  # the least time over which the wait is measured
_WINDOWS_OF_REST = 50  # without another attempt, after one did not help


def read_ahead(
    batches: Any,
    start: int,
    *,
    threads: Threads = 0,
    workers: int = 0,
    announce: Callable[[str], None] = lambda line: None,
) -> Iterator[PyTree]:
    """Returns an iterator over batches, in order, from index `start` on.

    Without threads and workers a batch is read when it is requested, which is faster for rows in
    memory.

    Args:
      batches: A sequence. To be read by workers it must be picklable. "auto" uses threads only if
        they or what they read from declare `thread_safe`, and none in workers.
      threads: Number of threads that read ahead, in each worker if there are workers.
      workers: Number of processes that read ahead. They end when the iterator is closed.
      announce: Prints the number of threads that "auto" has chosen.

    Raises:
      UserError: If `batches` cannot be pickled, or an error of `batches`.
      StorageError: If a worker dies.
    """
    if workers:
        return _from_workers(batches, start, 0 if threads == "auto" else threads, workers)
    if threads == "auto" and is_thread_safe(batches):
        return _from_threads(batches, start, 1, _ChosenThreads(announce).count)
    if threads == "auto" or threads == 0:
        return (batches[index] for index in range(start, len(batches)))
    return _from_threads(batches, start, threads, lambda waited, batch: threads)


def usable_cores() -> int:
    """Returns the number of cores that this process may run on."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# -- threads ---------------------------------------------------------------------------------------


def _from_threads(
    batches: Any, start: int, number: int, choose: Callable[[float, PyTree], int]
) -> Generator[PyTree, None, None]:
    """Yields batches that threads read, each with the same `current_strategy`.

    Their order is that of the requests, whatever the number of threads. Up to twice as many batches
    as threads are read, or being read.

    Args:
      number: Number of threads at first.
      choose: (seconds of the wait for a batch, the batch) -> number of threads from now on.
    """
    read = bind_strategy(batches.__getitem__)
    indices, pending = iter(range(start, len(batches))), collections.deque[Future[PyTree]]()
    pool = ThreadPoolExecutor(number, thread_name_prefix="read ahead")

    def request() -> None:
        missing = max(2 * number - len(pending), 0)
        pending.extend(pool.submit(read, index) for index in itertools.islice(indices, missing))

    try:
        request()
        while pending:
            first = pending.popleft()
            request()
            began = time.perf_counter()
            batch = first.result()
            if (chosen := choose(time.perf_counter() - began, batch)) != number:
                number = chosen
                pool.shutdown(wait=False)  # its threads still read what they were asked for
                pool = ThreadPoolExecutor(number, thread_name_prefix="read ahead")
                request()
            del first
            yield batch
    finally:
        pool.shutdown(wait=False)
        for future in pending:
            future.cancel()


class _ChosenThreads:
    """The number of threads of a reader, chosen while it runs.

    While batches are waited for, the number doubles, up to a limit of cores and memory. If the wait
    for a batch does not fall by that, because all cores or Python's lock are busy, the number goes
    back, and the next attempt comes much later.
    """

    def __init__(self, announce: Callable[[str], None]) -> None:
        self._number = self._before = 1  # now, and before it was doubled
        self._announce, self._announced = announce, 1
        self._most: int | None = None  # known when the first batch has been read
        self._wait_before = math.inf  # seconds for a batch, before the number was doubled
        self._rest = 0  # windows
        self._restart()

    def _restart(self) -> None:
        """Begins a window, after the batches that may be ready."""
        self._to_pass, self._batches, self._waited = 2 * self._number, 0, 0.0
        self._began = self._last = time.perf_counter()
        self._pause = 0.0  # the longest time between two requests

    def count(self, waited: float, batch: PyTree) -> int:
        """Counts the seconds of the wait for a batch; returns the number of threads from now on."""
        if self._most is None:
            size = max(sum(np.asarray(x).nbytes for x in jax.tree.leaves(batch)), 1)
            fitting = int(available_memory() * _SHARE_OF_MEMORY / (2 * size))
            self._most = max(min(max(_MOST_THREADS, usable_cores()), fitting), 1)
        now = time.perf_counter()
        if self._to_pass > 0:
            self._to_pass -= 1
            self._began = self._last = now
            return self._number
        self._batches += 1
        self._waited += waited
        self._pause = max(self._pause, now - self._last - waited)
        self._last, seconds = now, now - self._began
        if self._batches >= max(4, 2 * self._number) and seconds >= _SECONDS_OF_WINDOW:
            if self._pause < seconds / 2:  # else the run compiled, evaluated or saved meanwhile
                self._choose(self._waited / seconds, self._waited / self._batches, self._most)
            self._restart()
        return self._number

    def _choose(self, share: float, wait: float, most: int) -> None:
        """Chooses the number by the share of the time in which batches were waited for."""
        self._rest = max(self._rest - 1, 0)
        # Half of what would be saved if all threads read without waiting for each other.
        enough = self._wait_before * (1 + self._before / self._number) / 2
        if share > _WAIT and wait > enough:
            self._number, self._rest = self._before, _WINDOWS_OF_REST
        elif share > _WAIT and self._number < most and not self._rest:
            self._before, self._wait_before = self._number, wait
            self._number = min(2 * self._number, most)
            return
        self._wait_before = math.inf
        if self._number != self._announced:
            self._announced = self._number
            threads = "1 thread reads" if self._number == 1 else f"{self._number} threads read"
            self._announce(
                f"data_threads auto: {threads} batches ahead, which are waited for in "
                f"{share:.1%} of the time"
            )


def _read_options(threads: int) -> Any:
    import grain

    return grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * threads)


def in_thread(
    items: Generator[T, None, None],
    count: int = 2,
    *,
    interrupt: Callable[[], None] = lambda: None,
) -> Generator[T, None, None]:
    """Yields items that a thread reads ahead, in order. A signal interrupts the wait for them.

    Args:
      items: A generator. The thread runs and closes all of it, because it may hold what only one
        thread may use. Closing the result waits for the item that the thread is reading, up to a
        limit: a connection may never answer.
      interrupt: Ends the wait of that thread for an item. It is called if a signal ended the wait
        of the caller, and after the limit.
    """
    ready: queue.SimpleQueue[tuple[list[T], BaseException | None]] = queue.SimpleQueue()
    room, closed = threading.Semaphore(count), threading.Event()

    def read() -> None:
        with contextlib.closing(items):
            while room.acquire() and not closed.is_set():
                try:
                    ready.put(([next(items)], None))
                except BaseException as error:
                    ready.put(([], error))
                    return

    thread = threading.Thread(target=bind_strategy(read), daemon=True, name="read ahead")
    thread.start()
    try:
        while True:
            try:
                item, error = ready.get()
            except BaseException:
                interrupt()
                raise
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            room.release()
            yield item.pop()
    finally:
        closed.set()
        room.release()
        thread.join(_SECONDS_TO_CLOSE)
        if thread.is_alive():
            interrupt()
            thread.join(_SECONDS_TO_END)


# -- worker processes ------------------------------------------------------------------------------


def _from_workers(batches: Any, start: int, threads: int, workers: int) -> Iterator[PyTree]:
    """Yields batches that processes read. Worker i reads every `workers`-th batch, from i on.

    A thread takes the batches from Grain, because no signal interrupts Grain's waits. This thread
    also starts the processes: it blocks the signals that they ignore, the run's thread does not.
    """
    workers = min(workers, len(batches) - start)
    if workers < 1:
        return
    prepare_workers()
    _check_picklable(batches)
    others, started = set(_grain_workers()), set[Any]()

    def kill() -> None:
        for worker in started or set(_grain_workers()) - others:  # that are still starting
            worker.kill()

    reading = _take_from_workers(batches, start, threads, workers, started, kill)
    with contextlib.closing(in_thread(reading, 1, interrupt=kill)) as items:
        yield from items


def _take_from_workers(
    batches: Any,
    start: int,
    threads: int,
    workers: int,
    started: set[Any],
    kill: Callable[[], None],
) -> Generator[PyTree, None, None]:
    """Yields batches of processes, which are added to `started` when all have started."""
    import grain

    dataset: Any = grain.MapDataset.source(_WorkerItems(batches))[start:]
    options = grain.MultiprocessingOptions(workers, per_worker_buffer_size=_BATCHES_PER_WORKER)
    iterator = iter(
        dataset.to_iter_dataset(_read_options(threads)).mp_prefetch(
            options, lambda *_: begin_worker()
        )
    )
    others = set(_grain_workers())
    try:
        with _hidden_main(), _blocked_signals():
            # All workers have started once each has returned a batch.
            first = [_result(iterator) for _ in range(workers)]
        started |= set(_grain_workers()) - others
        yield from first
        del first
        for _ in range(len(batches) - start - workers):
            yield _result(iterator)
    except StorageError:  # after the death of one, Grain would wait for the others
        kill()
        raise
    finally:
        iterator.close()
        # The error that ends each of Grain's threads refers to its last batch, in a cycle: without
        # this, that shared memory would last until the exit, which warns of it.
        del iterator
        gc.collect()


def _grain_workers() -> list[Any]:
    return [p for p in multiprocessing.active_children() if p.name.startswith(_WORKER)]


def _watch_workers() -> None:
    """Reports a worker that ended with code 0 to Grain as failed; Grain would wait for it forever.

    A worker that has returned all of its batches ends only when its reader is closed, and then the
    reader reads no code any more. `_fail_early_ends` does not see workers that C code ends, or that
    another program replaces.
    """
    seen: dict[int, Any] = {}
    while True:
        seen |= {worker.pid: worker for worker in _grain_workers()}
        for pid, worker in list(seen.items()):
            if worker.exitcode is not None:
                if worker.exitcode == ExitCode.DONE and worker._popen is not None:
                    worker._popen.returncode = _ENDED_EARLY
                del seen[pid]
        time.sleep(_SECONDS_BETWEEN_CHECKS)


@functools.cache
def _start_watch() -> None:
    threading.Thread(target=_watch_workers, daemon=True, name="watch data workers").start()


def _result(iterator: Iterator[Any]) -> PyTree:
    """Returns the next batch; raises the error that reading it raised in the worker."""
    try:
        item = next(iterator)
    except RuntimeError as error:
        if reason := death_of_worker(error):
            raise StorageError(f"data_workers: {reason}") from None
        raise
    except OSError as error:  # of Python's queues: that of a dataset is an item
        why = _FULL if error.errno == errno.ENOSPC else f"cannot be used: {error}"
        raise StorageError(f"data_workers: {why}") from None
    if isinstance(item, _Failure):
        raise item.error
    # Copied, because Grain's arrays are shared memory, which would last until the last batch that
    # something refers to is freed, and at exit too late.
    return jax.tree.map(np.array, item)


def death_of_worker(error: Exception) -> str:
    """Returns how a worker process died, if Grain raised the error because of that; else ""."""
    ended = re.search(r"terminated unexpectedly with exit code (-?\d+)", str(error))
    if ended is None or not isinstance(error, RuntimeError):
        return ""
    if int(ended[1]) == _ENDED_EARLY:
        return (
            "a process that reads batches ended with exit code 0 before its last batch: a library "
            "or the dataset ended it"
        )
    if int(ended[1]) == -signal.SIGBUS:
        return f"a process that reads batches was killed by SIGBUS: {_FULL}"
    why = "it was killed, or was out of memory; run again to resume"
    if int(ended[1]) == ExitCode.FAILED:
        why = "its own lines say why"
    return f"a process that reads batches ended with exit code {ended[1]}: {why}"


class _WorkerItems:
    """A sequence in a worker, whose errors are items, because not every exception is picklable."""

    def __init__(self, items: Any) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> PyTree:
        try:
            return self._items[index]
        except SystemExit as stop:
            why = describe_sys_exit(stop, "in a process that reads batches")
            return _Failure(StorageError(f"data_workers: {why}"))
        except Exception as error:
            return _Failure.of(error)


@dataclass(frozen=True)
class _Failure:
    """An error in a worker."""

    error: Exception

    @classmethod
    def of(cls, error: Exception) -> "_Failure":
        lines = "".join(traceback.format_exception(error))
        try:
            error = pickle.loads(pickle.dumps(error))
        except Exception:  # of a class that only this process has, or that pickles no copy
            error = RuntimeError(f"{type(error).__name__}: {error}")
        error.add_note(f"In a process of data_workers:\n{lines}")
        return cls(error)


def parse_flags() -> None:
    """Marks the flags of absl as parsed: Grain reads some, and a script may not use absl."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


def prepare_workers() -> None:
    """Prepares this process for worker processes of Grain."""
    import cloudpickle

    parse_flags()
    _start_watch()
    for module in user_modules(sys.path):
        cloudpickle.register_pickle_by_value(module)


def _check_picklable(batches: Any) -> None:
    import cloudpickle

    try:
        with open(os.devnull, "wb") as nowhere:  # the pickle of a large dataset would fill memory
            cloudpickle.dump(batches, nowhere)
    except Exception as error:
        raise UserError(
            f"data_workers: the dataset cannot be sent to other processes: {error}. Open files and "
            "connections in rows(), not in __init__, or use data_threads"
        ) from error


@contextlib.contextmanager
def _hidden_main() -> Iterator[None]:
    """Hides the script from `multiprocessing`, which would run it again in each new process.

    Functions and classes of the script are pickled by value.
    """
    main = sys.modules["__main__"]
    missing = object()
    kept = {name: main.__dict__.pop(name, missing) for name in ("__spec__", "__file__")}
    main.__spec__ = None
    try:
        yield
    finally:
        del main.__spec__
        main.__dict__.update({k: v for k, v in kept.items() if v is not missing})


@contextlib.contextmanager
def _blocked_signals() -> Iterator[None]:
    """Delays the signals that workers ignore: a worker that starts does not ignore them yet.

    New threads and processes inherit the mask.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_worker() -> None:
    """Prepares a worker process, before it has read the dataset; it ends with its parent."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)  # blocked while the process started
    # The devices belong to the run: JAX in a dataset computes on the CPU.
    jax.config.update("jax_platforms", "cpu")
    placement.is_data_worker = True
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _fail_early_ends()


def _fail_early_ends() -> None:
    """Makes an end of this worker with code 0 a failure: Grain would wait for its batches forever.

    If a worker ends because its reader is closed, the reader has set an event before.
    """
    pid, end = os.getpid(), os._exit
    # An argument of Grain's function for the process, which has no public name.
    closed = getattr(multiprocessing.current_process(), "_kwargs", {}).get("should_stop")

    def fail(what: str) -> NoReturn:
        print(f"failed: {what} ended a process that reads batches", file=sys.stderr, flush=True)
        end(ExitCode.FAILED)

    def checked_end(status: int) -> NoReturn:
        if status == ExitCode.DONE and os.getpid() == pid:
            fail("os._exit(0)")
        end(status)

    def at_exit() -> None:
        if closed is not None and not closed.is_set() and os.getpid() == pid:
            fail("sys.exit")

    os._exit = checked_end
    atexit.register(at_exit)


def _end_with_parent() -> None:
    """Ends this process as soon as the run's process is gone, whatever ended it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)

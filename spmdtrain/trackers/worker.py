"""The thread of a tracker, with a bounded queue of calls."""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from spmdtrain.errors import foreign
from spmdtrain.record.run_files import Status
from spmdtrain.trackers.base import Tracker

MAX_PENDING = 10_000
"""Sum of the sizes of pending calls."""
PAUSE = 0.2
"""Seconds for which the thread collects calls after it has made the pending ones. Waking it for
each line of the log, and flushing a file for each, took a tenth of a small network's time."""


@dataclass(frozen=True)
class TrackerCall:
    """A call of a tracker.

    Attributes:
      what: What it records, for messages: `metrics of step 20`.
      size: 1 for a few numbers, more for larger content.
    """

    what: str
    run: Callable[[Tracker], object]
    size: int = 1


_DONE = TrackerCall("", lambda tracker: None)


class TrackerWorker:
    """Calls a tracker in a thread of its own, so that training never waits for it.

    The tracker's first exception is printed, and later calls are dropped. Calls that are added
    while too many are pending are dropped, too.
    """

    def __init__(self, tracker: Tracker, log: Callable[[str], None]) -> None:
        self.tracker = tracker
        self._log = log
        self._queue: queue.SimpleQueue[TrackerCall | Status] = queue.SimpleQueue()
        self._pending = 0  # sum of sizes
        self._dropped = 0
        self._lock = threading.Lock()
        self._current = ""  # what the thread is doing
        self._begun = self._failed = self._over = False
        self._hurry = threading.Event()  # ends the pause
        self._thread = threading.Thread(
            target=self._run, name=f"tracker {tracker.name}", daemon=True
        )
        self._thread.start()

    def add(self, call: TrackerCall) -> None:
        """Queues a call, or drops it if the tracker has failed or too many calls are pending."""
        if self._failed or self._over:
            return
        with self._lock:
            is_full = self._pending + call.size > MAX_PENDING
            if is_full:
                self._dropped += 1
            else:
                self._pending += call.size
        if not is_full:
            self._queue.put(call)
        elif self._dropped == 1:
            self._log(
                f"{self.tracker.name}: slower than the run, so calls are dropped, the first of "
                f"them {call.what}"
            )

    def end(self, status: Status) -> None:
        """Queues the end of the tracking; further calls are dropped."""
        if not self._over:
            self._over = True
            self._queue.put(status)
            self._hurry.set()

    def flush(self) -> Callable[[float], None]:
        """Queues a flush; returns a function that waits until all earlier calls are written.

        The function takes the largest number of seconds to wait.
        """
        done = threading.Event()

        def flush(tracker: Tracker) -> None:
            tracker.flush()
            if not self._over:
                self._hurry.clear()
            done.set()

        def wait(seconds: float) -> None:
            until = time.monotonic() + seconds
            while is_queued and not self._failed and time.monotonic() < until:
                if done.wait(0.05):
                    return

        is_queued = not (self._failed or self._over)
        if is_queued:
            self._hurry.set()  # first, because the call clears it
            self._queue.put(TrackerCall("a flush", flush, 0))
        return wait

    def wait(self, timeout: float, spent: float = 0.0) -> None:
        """Waits until the tracker is closed, and prints what is lost if it takes too long.

        `spent` seconds of `timeout` have passed already.
        """
        name = self.tracker.name
        self._thread.join(max(0.0, timeout - spent))
        if self._thread.is_alive() and not self._failed:
            self._failed = True
            left = max(0, self._queue.qsize() - 1)  # without the end
            lost = f"{self._current} and {left} later calls are" if left else f"{self._current} is"
            self._log(f"{name}: not done after {timeout:g} s: {lost} lost")
        if self._dropped:
            self._log(f"{name}: {self._dropped:,} calls were dropped")
            self._dropped = 0

    def _run(self) -> None:
        while True:
            call = self._queue.get()
            if isinstance(call, Status):
                self._close(call)
                return
            self._current, self._begun = call.what, True
            is_last = False
            try:
                if not self._failed:
                    call.run(self.tracker)
                    if is_last := self._queue.empty():
                        self.tracker.flush()
            except BaseException as error:  # also a SystemExit, which would end the thread
                self._fail(error)
            # Freed before the next call arrives, because it may hold arrays of the devices.
            size, call = call.size, _DONE
            with self._lock:
                self._pending -= size
            if is_last:
                self._hurry.wait(PAUSE)

    def _close(self, status: Status) -> None:
        if not self._begun:  # the run failed before its start
            return
        self._current = "its end"
        try:
            self.tracker.close(status)
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Prints the first failure."""
        if self._failed:
            return
        self._failed = True
        text = foreign(" ".join(str(error).split()), 300)
        what = self._current
        self._log(
            f"{self.tracker.name}: {what}: {type(error).__name__}: {text}; the run continues "
            "without it"
        )


def wait_for_all(workers: list[TrackerWorker], timeout: float | None) -> None:
    """Waits until all trackers are closed, at most as long as the slowest of them may take.

    Their workers have been ended. `timeout` is the largest number of seconds for each; None for no
    limit besides `close_timeout`.
    """
    began = time.monotonic()
    for worker in workers:
        own = worker.tracker.close_timeout
        limit = own if timeout is None else min(own, timeout)
        worker.wait(limit, time.monotonic() - began)

"""The time that the devices wait for batches."""

import time
from collections.abc import Callable, Iterator
from typing import Any

from spmdtrain.distributed.progress import Phase, end_interval, phase
from spmdtrain.step.state import TrainState

PyTree = Any


class InputWait:
    """The share of the training time in which the devices waited for a batch.

    As for `Rate`, each reading covers the time since the last one.
    """

    def __init__(self) -> None:
        self._waited: float | None = None  # seconds; None if they are not counted
        self.restart(0, 0.0)

    def restart(self, step: int, seconds: float) -> None:
        """Starts a new measurement at `step`, when `seconds` were spent on training."""
        self._step, self._seconds, self._before = step, seconds, self._waited or 0.0
        self._share: float | None = None

    def count(self, seconds: float) -> None:
        self._waited = (self._waited or 0.0) + seconds

    @property
    def waited(self) -> float | None:
        """Seconds of all waits; None if they are not counted."""
        return self._waited

    def read(self, step: int, seconds: float) -> float | None:
        """Returns the share since the last reading, from 0 to 1, and starts a new measurement.

        The last reading is returned again if `step` has not changed, None if waits are not counted.

        Args:
          step: Number of steps so far.
          seconds: Time spent on training so far.
        """
        if self._waited is not None and step > self._step and seconds > self._seconds:
            share = min((self._waited - self._before) / (seconds - self._seconds), 1.0)
            self.restart(step, seconds)
            self._share = share
        return self._share


def next_batch(
    batches: Iterator[PyTree],
    state: TrainState,
    count: Callable[[float], None],
    step: int | None = None,
) -> PyTree:
    """Returns the next batch, and counts the time in which the devices waited for it.

    If the devices have finished all dispatched steps when the batch is there, they have waited for
    as long as the call took. If steps are still running, the batch was ready in time, and the wait
    is 0. The check does not block.

    Args:
      batches: The batches, placed on the devices.
      state: The state that the last dispatched step returns; it may be pending.
      count: Receives the seconds.
      step: The step that uses the batch.
    """
    began = time.perf_counter()
    with phase(Phase.LOAD, step):
        batch = next(batches)
    pending = is_pending(state)
    seconds = time.perf_counter() - began
    end_interval(overlapped=pending)
    count(0.0 if pending else seconds)
    return batch


def is_pending(state: TrainState) -> bool:
    """Returns, without blocking, whether the devices still run the step that returns a state."""
    step: Any = state.step
    return not step.is_deleted() and not step.is_ready()

"""The numbers of steps, read some steps after those were dispatched."""

import collections
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from spmdtrain.checkpoints.replica_check import FirstStep
from spmdtrain.distributed import process_group
from spmdtrain.distributed.progress import Phase, phase
from spmdtrain.errors import NonFiniteError, ReplicaError, StateError, UserError
from spmdtrain.sharding.placement import Placement
from spmdtrain.step.finite import HEALTH, first_non_finite
from spmdtrain.step.metrics import loss_first
from spmdtrain.step.state import TrainState
from spmdtrain.step.train_step import StepOutput
from spmdtrain.train.session import RunSession

Logged = Callable[[int, dict[str, float]], dict[str, float]]


def _as_computed(step: int, metrics: dict[str, float]) -> dict[str, float]:
    return metrics


class MetricsReader:
    """Takes each step's output, and reads it once `ahead` others are on their way.

    So the host never waits for the devices. What it reads it logs, if it is time, with what
    `logged` returns for the metrics.
    Raises `NonFiniteError` for a loss or a state that is no number; `state` gives the newest one.
    With several processes, raises `ReplicaError` if their states differ after the first step.
    """

    def __init__(
        self,
        run: RunSession,
        placement: Placement,
        state: Callable[[], TrainState | None],
        logged: Logged = _as_computed,
    ) -> None:
        self._run, self._state, self._logged = run, state, logged
        # Many undone steps at once can abort the in-process all-reduce of virtual devices.
        several = run.config.steps_per_dispatch > 1
        self._ahead = 2 if several else max_in_flight(placement)
        if placement.strategy.by_servers:
            self._ahead = 0  # what workers have made is known
        self._in_flight: collections.deque[tuple[Sequence[int], StepOutput]] = collections.deque()
        self._failed: StateError | None = None
        self._compares = process_group.count() > 1  # the copies of the state, once
        self._first: FirstStep | None = None

    def add(self, steps: Sequence[int], output: StepOutput) -> None:
        """What has been dispatched: one step, or several with an output of one more dim."""
        self._check_sound()
        if self._compares and (state := self._state()) is not None:
            self._first, self._compares = FirstStep(state, steps[-1]), False
        self._in_flight.append((steps, output))
        if len(self._in_flight) > self._ahead:
            self._read(*self._in_flight.popleft())

    def flush(self) -> None:
        """Read all that is left: no state is judged or saved before its own flag is known."""
        self._check_sound()
        while self._in_flight:
            self._read(*self._in_flight.popleft())
        self._run.journal.train_pauses()

    def _check_sound(self) -> None:
        """Whoever has caught the error has no sound state all the same."""
        if self._failed is not None:
            raise self._failed

    def _read(self, steps: Sequence[int], output: StepOutput) -> None:
        last = steps[-1]
        if output.number is not None and (made := int(output.number)) != last:
            raise UserError(
                f"step {last} is recorded with the output of step {made}: record(state, output) "
                "comes once after each call of the compiled step, which makes one step"
            )
        with phase(Phase.STEP):  # here a process waits for the others
            finite = np.asarray(output.finite)
        self._read_all(steps, output, finite)
        if self._first is not None:
            self._compare(self._first)

    def _compare(self, first: FirstStep) -> None:
        """Compares the state after the first step between processes."""
        self._first = None
        try:
            with phase(Phase.STEP):
                first.check()
        except ReplicaError as error:
            self._failed = error
            raise

    def _read_all(self, steps: Sequence[int], output: StepOutput, finite: np.ndarray) -> None:
        last = steps[-1]
        if len(steps) == 1:
            self._read_one(last, last, finite, output.metrics)
            if output.sums is not None:
                self._count(last, output, np.asarray(output.sums), output.rate)
            return
        told = {name: np.asarray(x) for name, x in output.metrics.items()}
        sums = None if output.sums is None else np.asarray(output.sums)
        rates = None if output.rate is None else np.asarray(output.rate)
        for number, step in enumerate(steps):
            of_step = {name: values[number] for name, values in told.items()}
            self._read_one(step, last, finite[number], of_step)
            if sums is not None:
                rate = None if rates is None else rates[number]
                self._count(step, output, sums[number], rate)

    def _count(self, step: int, output: StepOutput, sums: np.ndarray, rate: Any) -> None:
        self._run.epochs.count(step, sorted(output.metrics), sums, rate)

    def _read_one(
        self, step: int, last: int, finite: np.ndarray, metrics: Mapping[str, Any]
    ) -> None:
        run = self._run
        if not finite.all():
            wrong = " and ".join(np.array(HEALTH)[~finite])
            values = {name: float(x) for name, x in metrics.items()}
            told = [f"{n} {x}" for n, x in values.items() if n == "loss" or not math.isfinite(x)]
            state = self._state()
            where = None if state is None or state.step.is_deleted() else first_non_finite(state)
            if where is not None:
                told.append(f"{where} is the first such array")
            self._failed = NonFiniteError(f"step {step}: {wrong} not finite ({'; '.join(told)})")
            raise self._failed
        if run.config.logs_at(step, run.total):
            found = loss_first({name: float(x) for name, x in metrics.items()})
            # First the callbacks, which may add metrics to the line.
            run.journal.trained(step, run.total, self._logged(step, found), made=last)
        elif step == last:
            run.journal.terminal.advance(step)


def max_in_flight(placement: Placement) -> int:
    """How many steps may be dispatched and not done."""
    return 2 if placement.is_virtual() else 8

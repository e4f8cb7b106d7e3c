"""The numbers of steps, read some steps after those were dispatched."""

import collections
import math
from collections.abc import Callable, Mapping

import numpy as np

from spmdtrain.errors import NonFiniteError, UserError
from spmdtrain.metrics import loss_first
from spmdtrain.phases import Phase, within
from spmdtrain.placement import Placement
from spmdtrain.session import Session
from spmdtrain.step import HEALTH, StepOutput, TrainState, first_non_finite

Logged = Callable[[int, Mapping[str, float]], None]


def _tell_nobody(step: int, metrics: Mapping[str, float]) -> None:
    pass


class LateReader:
    """Takes each step's output, and reads it once `ahead` others are on their way.

    So the host never waits for the devices. What it reads it logs, if it is time; `logged` is told.
    Raises `NonFiniteError` for a loss or a state that is no number; `state` gives the newest one.
    """

    def __init__(
        self,
        run: Session,
        placement: Placement,
        state: Callable[[], TrainState | None],
        logged: Logged = _tell_nobody,
    ) -> None:
        self._run, self._state, self._logged = run, state, logged
        # Many undone steps at once can abort the in-process all-reduce of virtual devices.
        self._ahead = how_far_ahead(placement)
        self._in_flight: collections.deque[tuple[int, StepOutput]] = collections.deque()
        self._failed: NonFiniteError | None = None

    def add(self, step: int, output: StepOutput) -> None:
        """A step that has been dispatched."""
        self._check_sound()
        self._in_flight.append((step, output))
        if len(self._in_flight) > self._ahead:
            self._read(*self._in_flight.popleft())

    def catch_up(self) -> None:
        """Read all that is left: no state is judged or saved before its own flag is known."""
        self._check_sound()
        while self._in_flight:
            self._read(*self._in_flight.popleft())

    def _check_sound(self) -> None:
        """Whoever has caught the error has no sound state all the same."""
        if self._failed is not None:
            raise self._failed

    def _read(self, step: int, output: StepOutput) -> None:
        run = self._run
        if output.number is not None and (made := int(output.number)) != step:
            raise UserError(
                f"step {step} is recorded with the output of step {made}: record(state, output) "
                "comes once after each call of the compiled step, which makes one step"
            )
        with within(Phase.STEP):  # here a process waits for the others
            finite = np.asarray(output.finite)
        if not finite.all():
            wrong = " and ".join(np.array(HEALTH)[~finite])
            values = {name: float(x) for name, x in output.metrics.items()}
            told = [f"{n} {x}" for n, x in values.items() if n == "loss" or not math.isfinite(x)]
            state = self._state()
            where = None if state is None or state.step.is_deleted() else first_non_finite(state)
            if where is not None:
                told.append(f"{where} is the first such array")
            self._failed = NonFiniteError(f"step {step}: {wrong} not finite ({'; '.join(told)})")
            raise self._failed
        if run.config.logs_at(step, run.total):
            metrics = loss_first({name: float(x) for name, x in output.metrics.items()})
            run.journal.trained(step, run.total, metrics)
            self._logged(step, metrics)
        else:
            run.journal.terminal.advance(step)


def how_far_ahead(placement: Placement) -> int:
    """How many steps may be dispatched and not done."""
    return 2 if placement.is_virtual() else 8

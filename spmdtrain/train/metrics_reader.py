"""Asynchronous reading of step metrics."""

import collections
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from spmdtrain.checkpoints.replica_check import CopiesAfterStep
from spmdtrain.data.mixture import components_of
from spmdtrain.distributed import process_group
from spmdtrain.distributed.progress import Phase, phase
from spmdtrain.errors import NonFiniteError, ReplicaError, StateError, UserError
from spmdtrain.step.finite import FLAGS, first_non_finite
from spmdtrain.step.metrics import component_metric, loss_first
from spmdtrain.step.norms import NORMS, has_norms
from spmdtrain.step.state import TrainState
from spmdtrain.step.train_step import StepOutput
from spmdtrain.train.run_logger import LEARNING_RATE
from spmdtrain.train.session import RunSession

Logged = Callable[[int, dict[str, float]], dict[str, float]]


def _as_computed(step: int, metrics: dict[str, float]) -> dict[str, float]:
    return metrics


class MetricsReader:
    """Fetches step outputs with a delay, so that the host runs ahead of the devices.

    An output is fetched after `max_in_flight` later dispatches. With several processes, the copies
    of the state are compared between them after the first dispatch, and every
    `compare_copies_every` steps.

    Args:
      run: The run whose logger receives the metrics.
      max_in_flight: Number of dispatches whose outputs may be pending.
      state: Returns the newest state; None if there is none.
      logged: (step, metrics) -> the metrics to log; calls the log callbacks.
    """

    def __init__(
        self,
        run: RunSession,
        max_in_flight: int,
        state: Callable[[], TrainState | None],
        logged: Logged = _as_computed,
    ) -> None:
        self._run, self._state, self._logged = run, state, logged
        self._max_in_flight = max_in_flight
        self._in_flight: collections.deque[tuple[Sequence[int], StepOutput]] = collections.deque()
        self._failed: StateError | None = None
        self._is_first = True  # the first state is not compared yet
        self._comparisons: collections.deque[CopiesAfterStep] = collections.deque()
        self._components = list(components_of(run.train))

    def add(self, steps: Sequence[int], output: StepOutput) -> None:
        """Queues the output of a dispatch and fetches the oldest one that is due.

        Args:
          steps: Step numbers of the dispatch.
          output: Its output; leaves have a leading dim of len(steps) if len(steps) > 1.

        Raises:
          NonFiniteError: If a fetched loss or state is NaN or infinite.
          ReplicaError: If the processes' copies of the state differ.
        """
        self._check_sound()
        if self._compares_after(steps) and (state := self._state()) is not None:
            self._comparisons.append(CopiesAfterStep(state, steps[-1]))
            self._is_first = False
        self._in_flight.append((steps, output))
        if len(self._in_flight) > self._max_in_flight:
            self._read(*self._in_flight.popleft())

    def flush(self) -> None:
        """Fetches all pending outputs: call before evaluating or saving. Raises as `add` does."""
        self._check_sound()
        while self._in_flight:
            self._read(*self._in_flight.popleft())
        self._run.logger.pause_timer()

    def _check_sound(self) -> None:
        """Re-raises an earlier error: if the user has caught it, the state is still unusable."""
        if self._failed is not None:
            raise self._failed

    def _read(self, steps: Sequence[int], output: StepOutput) -> None:
        last = steps[-1]
        if output.number is not None and (made := int(output.number)) != last:
            raise UserError(
                f"step {last} is recorded with the output of step {made}: end_step(state, output) "
                "must be called once after each call of the compiled step"
            )
        with phase(Phase.STEP):  # blocks until all processes have run the step
            finite = np.asarray(output.finite)
        self._read_all(steps, output, finite)
        while self._comparisons and self._comparisons[0].step <= last:
            self._compare(self._comparisons.popleft())

    def _compares_after(self, steps: Sequence[int]) -> bool:
        """Returns whether the processes compare the state after a dispatch."""
        if process_group.count() == 1:
            return False
        every = self._run.config.compare_copies_every
        return self._is_first or (every is not None and any(s % every == 0 for s in steps))

    def _compare(self, copies: CopiesAfterStep) -> None:
        """Compares the state after a step between processes."""
        try:
            with phase(Phase.STEP):
                copies.check()
        except ReplicaError as error:
            self._failed = error
            raise

    def _read_all(self, steps: Sequence[int], output: StepOutput, finite: np.ndarray) -> None:
        last = steps[-1]
        sums = None if output.sums is None else np.asarray(output.sums)
        if len(steps) == 1:
            present = self._present(output.metrics, sums)
            self._count_weight(output, sums)
            self._read_one(last, last, finite, present, output.rate, output.norms)
            if sums is not None:
                self._count(last, output, sums, output.rate)
            return
        metrics = {name: np.asarray(x) for name, x in output.metrics.items()}
        rates = None if output.rate is None else np.asarray(output.rate)
        norms = None if output.norms is None else np.asarray(output.norms)
        for number, step in enumerate(steps):
            of_step = {name: values[number] for name, values in metrics.items()}
            present = self._present(of_step, None if sums is None else sums[number])
            rate = None if rates is None else rates[number]
            of_norms = None if norms is None else norms[number]
            self._count_weight(output, None if sums is None else sums[number])
            self._read_one(step, last, finite[number], present, rate, of_norms)
            if sums is not None:
                self._count(step, output, sums[number], rate)

    def _present(self, metrics: Mapping[str, Any], sums: np.ndarray | None) -> Mapping[str, Any]:
        """Returns the metrics without the losses of components that the batch has no rows of."""
        if not self._components or sums is None:
            return metrics
        weights = dict(zip(sorted(metrics), sums[:, 1], strict=True))
        of_components = {component_metric(n, c) for n in metrics for c in self._components}
        return {n: x for n, x in metrics.items() if weights[n] or n not in of_components}

    def _count_weight(self, output: StepOutput, sums: np.ndarray | None) -> None:
        if sums is not None:
            loss = sorted(output.metrics).index("loss")
            self._run.logger.performance.count_weight(float(sums[loss, 1]))

    def _count(self, step: int, output: StepOutput, sums: np.ndarray, rate: Any) -> None:
        self._run.epochs.count(step, sorted(output.metrics), sums, rate, output.combined)

    def _read_one(
        self,
        step: int,
        last: int,
        finite: np.ndarray,
        metrics: Mapping[str, Any],
        rate: Any,
        norms: Any,
    ) -> None:
        run = self._run
        if not finite.all():
            wrong = " and ".join(np.array(FLAGS)[~finite])
            values = {name: float(x) for name, x in metrics.items()}
            facts = [f"{n} {x}" for n, x in values.items() if n == "loss" or not math.isfinite(x)]
            state = self._state()
            where = None if state is None or state.step.is_deleted() else first_non_finite(state)
            if where is not None:
                facts.append(f"{where} is the first such array")
            self._failed = NonFiniteError(f"step {step}: {wrong} not finite ({'; '.join(facts)})")
            raise self._failed
        if run.config.logs_at(step, run.schedule.total):
            found = loss_first({name: float(x) for name, x in metrics.items()})
            # A metric of the objective takes precedence over a value of the same name.
            found |= self._beside(step, rate, norms) | found
            # First the callbacks, which may add metrics to the line.
            run.logger.log_train_step(
                step, run.schedule.total, self._logged(step, found), done=last
            )
        elif step == last:
            run.logger.terminal.advance(step)

    def _beside(self, step: int, rate: Any, norms: Any) -> dict[str, float]:
        """Returns the learning rate and the norms of a step, those of them that are known."""
        used = self._run.epochs.fixed_rate if rate is None else float(rate)
        found = {} if used is None else {LEARNING_RATE: used}
        if norms is not None and has_norms(step, self._run.config.log_every):
            known = dict(zip(NORMS, np.asarray(norms).tolist(), strict=False))
            found |= {name: known[name] for name in sorted(known)}
        return found

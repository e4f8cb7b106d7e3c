"""Asynchronous reading of step metrics."""

import collections
import contextlib
import dataclasses
import math
import shlex
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Never

import jax
import jax.numpy as jnp
import numpy as np

from spmdtrain.checkpoints.checksums import check_equal, format_sums, read_parts
from spmdtrain.checkpoints.host_copy import StateSums, is_on_cpu
from spmdtrain.config.run_config import RunConfig, file_of_config
from spmdtrain.data.mixture import components_of
from spmdtrain.distributed import process_group, progress
from spmdtrain.distributed.progress import Phase, phase
from spmdtrain.errors import (
    NonFiniteError,
    ReplicaError,
    StateError,
    UserError,
    in_command,
    option,
)
from spmdtrain.record.lines import StateHash
from spmdtrain.step.divergence import MOST_IN_A_ROW, WATCHED, DivergenceWatch
from spmdtrain.step.health import FLAGS, first_non_finite, has_norms
from spmdtrain.step.metrics import LEARNING_RATE, LEFT_OUT, NORMS, component_metric, loss_first
from spmdtrain.step.program import StepOutput
from spmdtrain.step.state import TrainState
from spmdtrain.strategies import strategy
from spmdtrain.train.callbacks import CallbackEvent
from spmdtrain.train.session import RunSession
from spmdtrain.tree import named_leaves


def _of_step(value: Any, output: StepOutput, number: int) -> Any:
    return value if value is None or not _is_stacked(output) else np.asarray(value)[number]


def _facts(metrics: Mapping[str, float]) -> list[str]:
    """Returns the loss of a step, and the metrics that are not finite."""
    return [f"{n} {x}" for n, x in metrics.items() if n == "loss" or not math.isfinite(x)]


def _not_finite(flags: np.ndarray, facts: Sequence[str]) -> str:
    return f"{' and '.join(np.array(FLAGS)[~flags])} not finite ({'; '.join(facts)})"


def _is_stacked(output: StepOutput) -> bool:
    """Returns whether the arrays of an output have a leading dim of steps."""
    return output.finite.ndim > 1


class MetricsReader:
    """Fetches step outputs with a delay, so that the host runs ahead of the devices.

    An output or a hash of the state is fetched after `max_in_flight` later dispatches. Several
    processes compare their copies of the state after the first dispatch, with each hash, and every
    `compare_copies_every` steps.

    Args:
      state: Returns the newest state; None if there is none.
    """

    def __init__(
        self, run: RunSession, max_in_flight: int, state: Callable[[], TrainState | None]
    ) -> None:
        self._run, self._state = run, state
        self._max_in_flight = max_in_flight
        self._in_flight: collections.deque[tuple[Sequence[int], StepOutput]] = collections.deque()
        self._failed: StateError | None = None
        self._is_shared = process_group.count() > 1  # then processes are compared
        self._reads_arrays: bool | None = None  # without a copy; None before the first output
        self._is_first = True  # the first state is not compared yet
        # By step, the sums for comparisons, and whether they are also logged as a hash.
        self._sums: dict[int, tuple[StateSums, bool]] = {}
        self._hashed = 0  # the last step whose hash is logged
        self._last_loss: float | None = None  # of the last step that was read
        self._components = list(components_of(run.train))
        self._keys: Collection[str] = ()  # names of the metrics of the last step, then sorted
        self._names: Sequence[str] = ()

    def add(self, steps: Sequence[int], output: StepOutput) -> None:
        """Queues the output of a dispatch and fetches the oldest one that is due.

        Args:
          steps: Step numbers of the dispatch.
          output: Its output. If its program makes several steps, leaves have a leading dim of
            len(steps) or more.

        Raises:
          NonFiniteError: If a fetched loss or state is NaN or infinite.
          ReplicaError: If the processes' copies of the state differ.
        """
        self._check_sound()
        if self._is_shared:
            progress.count_steps(len(steps))
        last = steps[-1]
        hashes = self._run.config.hashes_at(last, self._run.schedule.total)
        compares = process_group.count() > 1 and self._compares_after(steps)
        if (hashes or compares) and (state := self._state()) is not None:
            self._sums[last] = StateSums(state, in_host_memory=hashes), hashes
            self._is_first = False
        self._start_copies(steps, output)
        self._in_flight.append((steps, output))
        if len(self._in_flight) > self._max_in_flight:
            self._read(*self._in_flight.popleft())

    def flush(self) -> None:
        """Fetches all pending outputs: call before evaluating or saving. Raises as `add` does."""
        self._check_sound()
        while self._in_flight:
            self._read(*self._in_flight.popleft())
        self._run.logger.timer.pause()

    def hash_last(self, step: int) -> None:
        """Logs the hash of the state after the last step, if that is due and not done.

        `flush` has read the step. `add` does not know that a step is the last one if a callback
        stops the run after it.
        """
        is_due = self._run.config.hashes_at(step, self._run.schedule.total)
        if is_due and step != self._hashed and (state := self._state()) is not None:
            self._read_sums(step, StateSums(state, in_host_memory=True), is_hashed=True)

    def _start_copies(self, steps: Sequence[int], output: StepOutput) -> None:
        """Starts to copy to the host what `_read` reads of an output.

        Otherwise the host waits for each copy from a GPU or TPU for as long as a small step takes.
        On CPU it reads the arrays without a copy.
        """
        if self._reads_arrays is None:
            self._reads_arrays = is_on_cpu(output.finite)
        if self._reads_arrays:
            return
        run, values = self._run, [output.number, output.finite, output.sums, output.rate]
        values.append(output.left_out)
        if run.epochs.watch is not None or any(
            run.config.logs_at(step, run.schedule.total) for step in steps
        ):
            values += [*output.metrics.values(), output.norms]
        if run.config.log_hash_every is not None:
            values.append(output.metrics.get("loss"))
        for value in values:
            if isinstance(value, jax.Array):
                value.copy_to_host_async()

    def _check_sound(self) -> None:
        """Re-raises an earlier error: if the user has caught it, the state is still unusable."""
        if self._failed is not None:
            raise self._failed

    def _read(self, steps: Sequence[int], output: StepOutput) -> None:
        last = steps[-1]
        with phase(Phase.STEP):  # blocks until all processes have run the step
            began = time.perf_counter()
            output = output.joined()
            finite = np.asarray(output.finite)
            if self._is_shared:
                progress.count_wait(time.perf_counter() - began)
            made = last if output.number is None else int(output.number)
        if made != last:
            raise UserError(
                f"step {last} is recorded with the output of step {made}: end_step(state, output) "
                "must be called once after each call of the compiled step"
            )
        self._read_all(steps, output, finite)
        if self._run.config.log_hash_every is not None:
            loss = output.metrics.get("loss")  # of all steps of the dispatch
            at_last = len(steps) - 1
            self._last_loss = None if loss is None else float(_of_step(loss, output, at_last))
        if last in self._sums:
            sums, is_hashed = self._sums.pop(last)
            self._read_sums(last, sums, is_hashed=is_hashed)

    def _compares_after(self, steps: Sequence[int]) -> bool:
        """Returns whether several processes compare the state after a dispatch."""
        every = self._run.config.compare_copies_every
        return self._is_first or (every is not None and any(s % every == 0 for s in steps))

    def _read_sums(self, step: int, sums: StateSums, *, is_hashed: bool) -> None:
        """Compares the state after the step that was read last; logs its hash if `is_hashed`."""
        try:
            with phase(Phase.STEP):
                parts = sums.parts()
                check_equal(parts, step)
        except ReplicaError as error:
            self._failed = error
            raise
        if is_hashed:
            with phase(Phase.STEP):  # waits for the other processes
                totals = format_sums(process_group.summed(read_parts(parts)))
            self._run.logger.log_hash(StateHash(step, totals, self._last_loss))
            self._hashed = step

    def _read_all(self, steps: Sequence[int], output: StepOutput, finite: np.ndarray) -> None:
        run, last = self._run, steps[-1]
        sums = None if output.sums is None else np.asarray(output.sums)
        if not _is_stacked(output):
            finite, sums = finite[None], None if sums is None else sums[None]
        finite = finite[: len(steps)]  # a counted loop may have room for more steps
        kept = sums  # of the steps whose update counts
        if output.left_out is not None:
            gone = self._leave_out(steps, output, finite, sums)
            finite = finite | gone[:, None]
            kept = None if sums is None else np.where(gone[:, None, None], 0, sums[: len(steps)])
        if output.metrics.keys() != self._keys:  # which seldom change
            self._keys, self._names = output.metrics.keys(), sorted(output.metrics)
        names = self._names
        all_finite = b"\0" not in finite.tobytes()  # a quarter of the time of `all`
        weighed = counted = 0  # steps whose weights are counted for the log, sums for the epoch
        for number, step in enumerate(steps):
            if not all_finite and not finite[number].all():
                self._fail(steps, number, finite[number], self._present(output, sums, number))
            if run.epochs.watch is not None:
                self._check_divergence(run.epochs.watch, output, sums, number, step)
            is_logged = run.config.logs_at(step, run.schedule.total)
            if is_logged or step == last:
                if sums is not None:
                    weights = sums[weighed : number + 1, names.index("loss"), 1].tolist()
                    run.logger.performance.count_weights(weights)
                weighed = number + 1
            if is_logged:
                self._log(steps, output, number, self._present(output, sums, number))
            if kept is not None and (step == last or run.epochs.ends_with(step)):
                rate = _of_step(output.rate, output, number)
                part = slice(counted, number + 1)
                run.epochs.count(steps[part], names, kept[part], rate, output.combined)
                counted = number + 1
        if not is_logged:
            run.logger.terminal.advance(last)

    def _present(
        self, output: StepOutput, sums: np.ndarray | None, number: int
    ) -> Mapping[str, float]:
        """Returns the metrics of a step, without the losses of components that have no rows in it.

        Args:
          sums: Weighted sums and weights, (steps, metrics by sorted name, 2).
          number: Index of the step in the dispatch.
        """
        metrics = {name: float(_of_step(x, output, number)) for name, x in output.metrics.items()}
        if not self._components or sums is None:
            return metrics
        weights = dict(zip(sorted(metrics), sums[number, :, 1], strict=True))
        of_components = {component_metric(n, c) for n in metrics for c in self._components}
        return {n: x for n, x in metrics.items() if weights[n] or n not in of_components}

    def _leave_out(
        self,
        steps: Sequence[int],
        output: StepOutput,
        finite: np.ndarray,
        sums: np.ndarray | None,
    ) -> np.ndarray:
        """Logs the steps whose update was left out, and returns which they are, bool (steps,).

        Raises:
          NonFiniteError: If too many updates in a row were left out.
        """
        found = np.asarray(output.left_out).reshape(-1, 3)[: len(steps)]
        gone = found[:, 0] != 0
        for number in map(int, np.flatnonzero(gone)):
            why, in_a_row, total = found[number].tolist()
            metrics, step = self._present(output, sums, number), steps[number]
            reason = _not_finite(finite[number], _facts(metrics))
            if why <= len(WATCHED):
                norms = np.asarray(_of_step(output.norms, output, number)).tolist()
                name, known = WATCHED[why - 1], {**metrics, **dict(zip(NORMS, norms, strict=False))}
                sigma = self._run.config.divergence_sigma
                reason = (
                    f"{name} {known[name]:.6g} is more than {sigma:g} robust standard deviations "
                    "(divergence_sigma) above the median of the steps before"
                )
            if in_a_row >= MOST_IN_A_ROW:
                self._failed = NonFiniteError(
                    f"step {step}: {reason}. on_divergence is skip, and {in_a_row} steps in a row "
                    f"have left their updates out, {total} in all",
                    step,
                    loss=metrics.get("loss"),
                )
                raise self._failed
            message = f"{reason}; its update is left out, {total} so far"
            self._run.logger.log_skipped(step, f"step {step}: {message}")
        return gone

    def _check_divergence(
        self,
        watch: DivergenceWatch,
        output: StepOutput,
        sums: np.ndarray | None,
        number: int,
        step: int,
    ) -> None:
        """Raises `NonFiniteError` if the loss or the gradient norm of a step is far too large."""
        metrics = self._present(output, sums, number)
        values = {"loss": metrics["loss"]} if "loss" in metrics else {}
        norms = _of_step(output.norms, output, number)
        if norms is not None and has_norms(step, self._run.config.log_every):
            known = dict(zip(NORMS, np.asarray(norms).tolist(), strict=False))
            values |= {n: known[n] for n in ("gradient_norm",) if n in known}
        # An optimizer may leave out what is not finite.
        values = {name: value for name, value in values.items() if math.isfinite(value)}
        if (why := watch.verdict(values)) is not None:
            self._failed = NonFiniteError(f"step {step}: {why}", step, loss=values.get("loss"))
            raise self._failed

    def _fail(
        self, steps: Sequence[int], number: int, finite: np.ndarray, values: Mapping[str, float]
    ) -> Never:
        """Raises `NonFiniteError` for a step of a dispatch, with its flags and metrics."""
        first, step = None, f"step {steps[number]}"
        # Within a dispatch this flag alone may be that of the last step (see `finite_flags`).
        if list(np.array(FLAGS)[~finite]) == ["opt_state"] and 0 < number == len(steps) - 1:
            step, first = f"one of steps {steps[0]} to {steps[-1]}", steps[0]
        facts = _facts(values)
        state = self._state()
        where = None if state is None or state.step.is_deleted() else first_non_finite(state)
        has_nan = any(map(math.isnan, values.values()))
        if where is not None:
            facts.append(f"{where} is the first such array")
            has_nan = has_nan or bool(jnp.isnan(named_leaves(state)[where]).any())
        message, loss = f"{step}: {_not_finite(finite, facts)}", values.get("loss")
        self._failed = NonFiniteError(
            message, steps[number], loss=loss, is_infinite=not has_nan, first_step=first
        )
        raise self._failed

    def _log(
        self, steps: Sequence[int], output: StepOutput, number: int, metrics: Mapping[str, float]
    ) -> None:
        run, step = self._run, steps[number]
        rate, norms = (_of_step(x, output, number) for x in (output.rate, output.norms))
        found = loss_first(dict(metrics))
        used = run.epochs.fixed_rate if rate is None else float(rate)
        if used is not None:
            found[LEARNING_RATE] = used
        if norms is not None and has_norms(step, run.config.log_every):
            known = dict(zip(NORMS, np.asarray(norms).tolist(), strict=False))
            found |= {name: known[name] for name in sorted(known)}
        if (left_out := _of_step(output.left_out, output, number)) is not None:
            found[LEFT_OUT] = int(left_out[-1])
        # First the callbacks, which may add metrics to the line.
        logged = run.callbacks.with_added(CallbackEvent.LOG, step, found)
        run.logger.log_train_step(step, run.schedule.total, logged, done=steps[-1])


# -- What to do about a step that is not finite ----------------------------------------------------


def add_advice(error: NonFiniteError, config: RunConfig) -> None:
    """Adds to the message of a trainer's step how to find the operation and the examples.

    Only commands that work for the run are given: a replay needs the experiment's file, parameter
    servers number steps in the order of pushes, and some options need compiled steps.
    """
    if strategy(config.strategy).is_asynchronous:
        return
    advice, workdir = "", config.workdir
    is_known = str(error).startswith(f"step {error.step}:")  # not "one of steps 1 to 4"
    if is_known and workdir and in_command() and file_of_config(config):
        replay = ["python", "-m", "spmdtrain.replay", workdir, "--step", str(error.step)]
        advice = shlex.join([*replay, "--explain"]) + " names the operation and the examples"
    else:
        with contextlib.suppress(UserError):
            dataclasses.replace(config, jit=False)  # raises if another option needs compiled steps
            what = "JAX_DEBUG_INFS" if error.is_infinite else "JAX_DEBUG_NANS"
            advice = f"{what}=1 with {option('jit', False)} names the operation"
    if advice:
        error.args = (f"{error}. {advice}",)

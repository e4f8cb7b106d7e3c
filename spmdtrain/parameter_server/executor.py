"""The executor of strategy parameter_server: workers make the steps, servers hold the state."""

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from spmdtrain.cluster.spec import from_environment
from spmdtrain.config import ParameterServerOptions
from spmdtrain.distributed.progress import Phase, phase
from spmdtrain.errors import UserError
from spmdtrain.parameter_server import ray_pool
from spmdtrain.parameter_server.partition import FixedShards, MaxSize, MinSize, Partitioner
from spmdtrain.parameter_server.ray_pool import RayJob
from spmdtrain.parameter_server.roles import run_if_worker_or_server, run_task_role
from spmdtrain.parameter_server.scheduler import BatchQueue, BatchScheduler
from spmdtrain.parameter_server.state_partition import ServerPartition
from spmdtrain.parameter_server.stats import StalenessStats
from spmdtrain.parameter_server.worker import Job, for_worker
from spmdtrain.sharding.placement import make_placement
from spmdtrain.step.state import TrainState
from spmdtrain.step.train_step import StepFunctions, StepOutput
from spmdtrain.train.executor import ExecutorInputs, MakeExecutor, Program

PyTree = Any
_FAREST = 10_000  # steps that are looked ahead for what is due
_GRACE = 15.0  # seconds, at least, after a signal in which what is under way may come in
_ANSWERS = 2.0  # seconds that a server has to answer where nothing comes


class ServerExecutor:
    """Makes steps by workers, each from the parameters that the servers hold at that time.

    Raises `UserError`.
    """

    max_in_flight = 0  # a dispatch waits until its batch is applied, so its output is known

    def __init__(
        self,
        job: RayJob,
        inputs: ExecutorInputs,
    ) -> None:
        run, state, own = inputs.run, inputs.state, inputs.functions
        options, terminal = run.config.servers, run.journal.terminal
        self._run, self._own, self._key = run, own, np.asarray(state.key)
        begun: TrainState = jax.tree.map(np.asarray, state)
        first = int(begun.step)
        self._division = server_partition(own, options, job.servers)
        with terminal.waiting("waiting for the servers"), phase(Phase.START):
            self._ray = job.ray
            self._servers = job.serve(
                self._division,
                begun,
                first,
                options.max_staleness,
                may_stop=run.signals.stop_if_received,
            )
        assert run.train is not None
        told = Job(
            inputs.make_functions,
            for_worker(run.config),
            self._division,
            run.train,
            inputs.augment,
            self._key,
            self._servers,
        )
        self._asynchronous = BatchScheduler(
            job.crew(told),
            BatchQueue(first, options.max_staleness),
            options.backup_task_timeout,
            terminal.line,
            self._may_stop,
            self._tell_silence,
        )
        self._asked_at: float | None = None
        self._tally = StalenessStats()
        run.journal.log_header(
            make_placement(run.config),
            state.params,
            f"workers: {job.workers}, parameter servers: {job.servers}",
        )
        run.journal.restart_timer(first)

    def load(self, steps: Sequence[int], state: TrainState) -> tuple[Program, int]:
        """Returns the number of the next batch; workers receive batches up to the next due step."""
        (step,) = steps
        dispenser = self._asynchronous.dispenser
        if dispenser.limit < step:
            limit = step
            while not self._run.schedule.is_due(limit) and limit < step + _FAREST:
                limit += 1
            dispenser.limit = limit
        return self._wait, step - 1

    def _wait(self, state: TrainState, batch: int) -> tuple[TrainState, StepOutput]:
        """Waits until the batch is applied; the state remains with the servers."""
        with phase(Phase.STEP, batch + 1):
            found = self._asynchronous.take(batch)
        if "staleness" in found.metrics:
            raise UserError(
                "the objective gives a metric called staleness, which is the name of what "
                "parameter_server measures: give it another"
            )
        self._tally.add(found.staleness, found.pulled, found.pushed)
        self._run.journal.count("staleness", found.staleness)
        numbers = found.metrics | {"staleness": float(found.staleness)}
        told: Any = {name: np.float32(value) for name, value in numbers.items()}
        pairs = {**found.sums, "staleness": (found.staleness, 1)}  # as the means, by sorted name
        sums: Any = np.array([pairs[name] for name in sorted(numbers)], np.float64)
        return state, StepOutput(told, np.asarray(found.finite), sums=sums)  # type: ignore[arg-type]

    def stop_dispatch(self, step: int) -> int:
        """Returns the last step whose batch a worker has received."""
        return self._asynchronous.dispenser.hold()

    def sync(self, state: TrainState) -> TrainState:
        """Returns the state of the servers, after all started steps."""
        with phase(Phase.STEP):
            self._asynchronous.dispenser.hold()
            self._asynchronous.settle()
            found = ray_pool.answers(self._ray, [server.held.remote() for server in self._servers])
        (step,) = {complete for _, complete in found}
        whole = self._division.state([held for held, _ in found], step, self._key)
        placed: TrainState = jax.device_put(whole, self._own.shardings)
        return placed

    def _may_stop(self, is_empty: bool) -> None:
        """Raise `PreemptedExit` where a signal has come, and what is under way does not come in."""
        if not self._run.signals.asked():
            return
        now = time.monotonic()
        self._asked_at = self._asked_at or now
        self._asynchronous.dispenser.hold()  # so that who is free makes what is overdue
        grace = max(_GRACE, 2 * (self._asynchronous.slow_after() or 0.0))
        if is_empty or now - self._asked_at > grace:
            self._run.journal.terminal.line(
                "what the workers were given does not come in, and without it nothing can be saved"
            )
            self._run.signals.stop_if_received()

    def _tell_silence(self, seconds: float) -> None:
        """Name the servers that do not answer: they may be stopped, or their host be cut off."""
        asked = {server.counts.remote(): f"ps {n}" for n, server in enumerate(self._servers)}
        _, silent = self._ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWERS)
        names = " and ".join(asked[call] for call in silent)
        why = f"no answer from {names}" if silent else "all parameter servers answer"
        self._run.journal.terminal.line(
            f"nothing has come for {seconds:.0f} s of what the workers were given: {why}"
        )

    def report(self) -> None:
        """Prints the staleness of updates, the steps of each worker and the servers' counts."""
        made = self._asynchronous.made
        counts = ray_pool.answers(self._ray, [server.counts.remote() for server in self._servers])
        held = [
            dataclasses.asdict(of) | {"params_bytes": self._division.params.bytes_of(n)}
            for n, of in enumerate(counts)
        ]
        self._run.journal.terminal.console.print(self._tally.table(made))
        if self._run.journal.files:
            self._run.journal.files.write_report("servers", self._tally.report(made, held))


def of_options(options: ParameterServerOptions, servers: int) -> Partitioner:
    """What `--servers.partitioner` says."""
    shards = servers if options.max_shards is None else options.max_shards
    match options.partitioner:
        case "min_size":
            return MinSize(shards, options.min_shard_bytes)
        case "max_size":
            return MaxSize(options.max_shard_bytes, options.max_shards)
    return FixedShards(shards)


def server_partition(
    functions: StepFunctions, options: ParameterServerOptions, servers: int
) -> ServerPartition:
    """Returns the part of the state, and of the optimizer, that each server has.

    Args:
      functions: The step's functions; nothing is computed.
      options: Select the partitioner.
      servers: Number of parameter servers.

    Raises:
      UserError: If the optimizer cannot be partitioned.
    """
    partitioner = of_options(options, servers)
    return ServerPartition.of(functions.abstract_state, functions.update, servers, partitioner)


class ServerBackend:
    """Makes steps by the workers of TF_CONFIG, with the state on its parameter servers."""

    def join(self, timeout: float) -> None:
        """Serves the chief and exits, if this process is a worker or a parameter server."""
        run_if_worker_or_server(timeout)

    def begin_fit(self, timeout: float, *, has_fitted: bool) -> None:
        """Checks that this process is the chief, in its first fit."""
        if has_fitted:
            raise UserError(
                "under parameter_server a trainer has one fit: the workers and servers have "
                "ended with it"
            )
        run_task_role(timeout)

    @contextmanager
    def open(self, timeout: float) -> Iterator[MakeExecutor]:
        """Starts the job as its chief; workers and servers join meanwhile, and end with it."""
        with ray_pool.begin(from_environment(), timeout) as job:
            yield functools.partial(ServerExecutor, job)

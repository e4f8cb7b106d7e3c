"""The executor of strategy parameter_server, and the statistics of its runs."""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from spmdtrain.cluster.spec import from_environment
from spmdtrain.config.command_line import JOB_OPTIONS, Command
from spmdtrain.config.options import MeshSpec, ParameterServerOptions
from spmdtrain.config.run_config import RunConfig
from spmdtrain.data.sampling import Augment
from spmdtrain.distributed import failures
from spmdtrain.distributed.progress import Phase, phase
from spmdtrain.document.blocks import TableBlock
from spmdtrain.document.terminal import Terminal, byte_size
from spmdtrain.errors import UserError, option
from spmdtrain.parameter_server import ray_pool
from spmdtrain.parameter_server.partition import (
    FixedShards,
    MaxSize,
    MinSize,
    Partitioner,
    ServerPartition,
    partition_table,
)
from spmdtrain.parameter_server.ray_nodes import run_if_worker_or_server, run_task_role
from spmdtrain.parameter_server.ray_pool import RayJob
from spmdtrain.parameter_server.scheduler import BatchQueue, BatchScheduler
from spmdtrain.parameter_server.worker import PickledProgram, WorkerFactory, for_worker
from spmdtrain.sharding.placement import Placement, make_placement
from spmdtrain.step.compile import Program, Programs
from spmdtrain.step.functions import RunFunctions
from spmdtrain.step.program import StepOutput
from spmdtrain.step.state import TrainState
from spmdtrain.train.executor import Backend, DeviceExamples, Executor, StepCall
from spmdtrain.train.session import RunSession

# -- The executor of strategy parameter_server -----------------------------------------------------
#
# Workers compute gradients, servers hold and update the state.

PyTree = Any
_MAX_LOOK_AHEAD = 10_000  # steps among which the next due one is searched
_GRACE = 15.0  # minimum seconds after a signal in which batches in progress may complete
_NOT_SAVED = "the state cannot be saved"
_ANSWER_TIMEOUT = 2.0  # seconds in which a server has to answer when no batch completes


class ServerExecutor(Executor):
    """Executor that runs steps on workers, each with the servers' current parameters.

    Raises:
      UserError: If the optimizer cannot be split, or a server does not start in time.
    """

    max_in_flight = 0  # because a dispatch returns after its batch is applied

    def __init__(
        self,
        job: RayJob,
        run: RunSession,
        state: TrainState,
        functions: RunFunctions,
        make_functions: Callable[[RunConfig, Placement], RunFunctions],
        augment: Augment | None,
    ) -> None:
        options, terminal = run.config.servers, run.logger.terminal
        self._run, self._functions, self._key = run, functions, np.asarray(state.key)
        initial: TrainState = jax.tree.map(np.asarray, state)
        first = self._first = int(initial.step)
        self._partition = server_partition(functions, options, job.servers)
        with terminal.waiting("waiting for the servers"), phase(Phase.START):
            self._ray = job.ray
            self._servers = job.serve(
                self._partition,
                initial,
                first,
                options.max_staleness,
                check_interrupt=run.signals.stop_if_received,
            )
        make_worker = WorkerFactory(
            PickledProgram.of(make_functions),
            for_worker(run.config),
            self._partition,
            run.train_dataset,
            augment,
            self._key,
            self._servers,
        )
        self._scheduler = BatchScheduler(
            job.worker_pool(make_worker),
            BatchQueue(first, options.max_staleness),
            options.backup_task_timeout,
            terminal.line,
            self._check_interrupt,
            self._report_silence,
        )
        self._stop_requested_at: float | None = None
        self._stats = StalenessStats()
        placement, trained = make_placement(run.config), functions.update.partition(state.params)[0]
        tasks = f"workers: {job.workers}, parameter servers: {job.servers}"
        program = Program(self._wait, tasks, collectives="each worker compiles its own step")
        run.logger.log_header(placement, state.params, program, trained)
        run.logger.performance.describe(program, state.params, None, placement)
        run.logger.timer.restart(first)

    def load(self, steps: Sequence[int], state: TrainState) -> tuple[StepCall, int]:
        """Returns the number of the next batch; workers receive batches up to the next due step."""
        (step,) = steps
        queue = self._scheduler.queue
        if queue.limit < step:
            limit = step
            while not self._run.schedule.is_due(limit) and limit < step + _MAX_LOOK_AHEAD:
                limit += 1
            queue.limit = limit
        return self._wait, step - 1

    def _wait(self, state: TrainState, batch: int) -> tuple[TrainState, StepOutput]:
        """Waits until the batch is applied; the state remains with the servers."""
        # The workers start and compile before the first batch, which is no time of steps.
        with phase(Phase.COMPILED if batch == self._first else Phase.STEP, batch + 1):
            outcome = self._scheduler.take(batch)
        if "staleness" in outcome.metrics:
            raise UserError(
                "the objective returns a metric called staleness, which is a metric of strategy "
                "parameter_server: rename it"
            )
        self._stats.add(outcome.staleness, outcome.pulled, outcome.pushed)
        self._run.logger.count_value("staleness", outcome.staleness)
        means = outcome.metrics | {"staleness": float(outcome.staleness)}
        metrics: Any = {name: np.float32(value) for name, value in means.items()}
        pairs = {**outcome.sums, "staleness": (outcome.staleness, 1)}
        # In the order of the sorted names, as the sums of a step on devices.
        sums: Any = np.array([pairs[name] for name in sorted(means)], np.float64)
        finite: Any = np.asarray(outcome.finite)
        return state, StepOutput(metrics, finite, sums=sums, combined=outcome.combined)

    def stop_dispatch(self, step: int) -> int:
        """Returns the last step whose batch a worker has received."""
        return self._scheduler.queue.stop_dispatch()

    def sync(self, state: TrainState) -> TrainState:
        """Returns the state of the servers, after all started steps."""
        with phase(Phase.STEP):
            self._scheduler.queue.stop_dispatch()
            self._scheduler.drain()
            parts = self._answers("held", _NOT_SAVED)
        (step,) = {complete for _, complete in parts}
        whole = self._partition.state([held for held, _ in parts], step, self._key)
        placed: TrainState = jax.device_put(whole, self._functions.shardings)
        return placed

    def _answers(self, method: str, otherwise: str) -> list[Any]:
        """Returns each server's result of a method; logs which servers do not answer.

        If a signal ends the wait, `otherwise` is logged.
        """
        log, wait = self._run.logger.terminal.line, ray_pool.SILENCE
        return ray_pool.await_answers(
            self._ray,
            {getattr(server, method).remote(): f"ps {n}" for n, server in enumerate(self._servers)},
            lambda names: log(f"waiting for the servers for {wait:.0f} s: no answer from {names}"),
            lambda: self._check_interrupt(
                False, f"{otherwise}, because the parameter servers do not answer"
            ),
        )

    def _check_interrupt(
        self,
        is_empty: bool,
        message: str = f"{_NOT_SAVED}, because the batches in progress do not complete",
    ) -> None:
        """Logs `message` and raises `PreemptedExit` if pending work does not end after a signal.

        With `is_empty`, which means that no worker is available, there is no grace period.
        """
        if not self._run.signals.stop_requested():
            return
        now = time.monotonic()
        self._stop_requested_at = self._stop_requested_at or now
        self._scheduler.queue.stop_dispatch()  # so that idle workers compute overdue batches
        grace = max(_GRACE, 2 * (self._scheduler.slow_after() or 0.0))
        if is_empty or now - self._stop_requested_at > grace:
            self._run.logger.terminal.line(message)
            self._run.signals.stop_if_received()

    def _report_silence(self, seconds: float) -> None:
        """Logs which servers do not answer: their processes or hosts may not be running."""
        calls = {server.counts.remote(): f"ps {n}" for n, server in enumerate(self._servers)}
        _, silent = self._ray.wait(list(calls), num_returns=len(calls), timeout=_ANSWER_TIMEOUT)
        names = " and ".join(calls[call] for call in silent)
        cause = f"no answer from {names}" if silent else "all parameter servers answer"
        self._run.logger.terminal.line(f"no batch has completed for {seconds:.0f} s: {cause}")

    def report(self) -> None:
        """Prints the staleness of updates, the steps of each worker and the servers' counts."""
        batches = self._scheduler.batches
        counts = self._answers("counts", "the counts of the servers are not known")
        servers = [
            dataclasses.asdict(count) | {"params_bytes": self._partition.params.bytes_of(n)}
            for n, count in enumerate(counts)
        ]
        self._run.logger.terminal.show(self._stats.table(batches))
        if self._run.logger.files:
            self._run.logger.files.write_report("servers", self._stats.report(batches, servers))


def make_partitioner(options: ParameterServerOptions, servers: int) -> Partitioner:
    """Returns the partitioner of `--servers.partitioner` for a number of servers."""
    shards = servers if options.max_shards is None else options.max_shards
    match options.partitioner:
        case "min_size":
            return MinSize(shards, options.min_shard_bytes)
        case "max_size":
            return MaxSize(options.max_shard_bytes, options.max_shards)
    return FixedShards(shards)


def server_partition(
    functions: RunFunctions, options: ParameterServerOptions, servers: int
) -> ServerPartition:
    """Returns the partition of the state, and of the optimizer, over the servers.

    Raises:
      UserError: If the optimizer cannot be split.
    """
    partitioner = make_partitioner(options, servers)
    return ServerPartition.of(functions.abstract_state, functions.update, servers, partitioner)


class ServerBackend(Backend):
    """Makes steps by the workers of TF_CONFIG, with the state on its parameter servers."""

    runs_steps = False

    def join(self, timeout: float) -> None:
        """Serves the chief and exits, if this process is a worker or a parameter server."""
        run_if_worker_or_server(timeout)

    def join_command(self, command: Command) -> None:
        """Takes the role of TF_CONFIG if the command trains; otherwise the process is alone."""
        options = command.options
        if options.show_sharding:
            return  # each task prints the table, and ends
        if options.mode != "train":
            if (tasks := len(from_environment().tasks)) > 1:
                raise UserError(
                    f"{option('mode', options.mode)} under parameter_server is for one process, "
                    f"and TF_CONFIG lists {tasks} tasks: start it without TF_CONFIG"
                )
            return
        for field, default in (("cluster", "tf_config"), ("hang_timeout", None), *JOB_OPTIONS):
            if getattr(options, field) != default:
                raise UserError(
                    f"{option(field)} is for synchronous processes: TF_CONFIG describes those of "
                    "parameter servers, and the launcher watches them"
                )
        run_task_role(options.init_timeout)

    def make_placement(self, config: RunConfig) -> Placement:
        """Returns the chief's placement: all of its devices, because the mesh is a worker's."""
        return make_placement(dataclasses.replace(config, mesh=MeshSpec()))

    def print_sharding(
        self, functions: RunFunctions, config: RunConfig, terminal: Terminal
    ) -> None:
        """Prints the partition of the state over the servers of TF_CONFIG, or over one server."""
        servers = max(1, len(from_environment().jobs.get("ps", ())))
        terminal.show(partition_table(server_partition(functions, config.servers, servers)))

    def begin_fit(self, timeout: float, *, has_fitted: bool) -> None:
        """Checks that this process is the chief, in its first fit."""
        if has_fitted:
            raise UserError(
                "strategy parameter_server supports one fit in a script: the workers and servers "
                "have ended with the first"
            )
        run_task_role(timeout)

    @contextmanager
    def open(self, timeout: float) -> Iterator[Backend]:
        """Starts the job as its chief; its workers and servers end with it."""
        with (
            ray_pool.start_job(from_environment(), timeout) as job,
            # Inside: a `sys.exit(0)` of the user's code must not end the job as finished.
            failures.work_in_progress(failures.TRAINING),
        ):
            yield OpenJob(job)


class OpenJob(Backend):
    """The job of one fit, of which this process is the chief."""

    def __init__(self, job: RayJob) -> None:
        self._job = job

    def make_executor(
        self,
        *,
        run: RunSession,
        state: TrainState,
        functions: RunFunctions,
        make_functions: Callable[[RunConfig, Placement], RunFunctions],
        programs: Programs,
        placement: Placement,
        augment: Augment | None,
        examples: DeviceExamples,
    ) -> Executor:
        """Returns the executor, which needs no program: the workers compile the steps."""
        return ServerExecutor(self._job, run, state, functions, make_functions, augment)


# -- Statistics of a run with parameter servers: staleness of the updates, and bytes ---------------

_BAR = 24  # characters of the longest bar
_SINGLE = 8  # smaller numbers have a row each; of the rows above, each covers twice as many


class StalenessStats:
    """The updates since the start of a run, counted by staleness, and their bytes."""

    def __init__(self) -> None:
        self.staleness: Counter[int] = Counter()
        self._pulled = self._pushed = 0

    @property
    def steps(self) -> int:
        """Number of updates."""
        return self.staleness.total()

    def add(self, staleness: int, pulled: int, pushed: int) -> None:
        """Adds an update; `pulled` and `pushed` are the bytes of its worker."""
        self.staleness[staleness] += 1
        self._pulled += pulled
        self._pushed += pushed

    def report(
        self, batches: Mapping[str, int], servers: Sequence[Mapping[str, int]]
    ) -> dict[str, Any]:
        """Returns the statistics as JSON, with the counts of each server."""
        return {
            "updates": self.steps,
            "staleness": {str(n): self.staleness[n] for n in sorted(self.staleness)},
            "pulled_bytes_per_step": self._pulled // self.steps,
            "pushed_bytes_per_step": self._pushed // self.steps,
            "batches": dict(sorted(batches.items())),
            "servers": {f"ps {number}": dict(counts) for number, counts in enumerate(servers)},
        }

    def table(self, batches: Mapping[str, int]) -> TableBlock:
        """Returns a table of the updates by staleness.

        Its note has the bytes of a step and the number of batches of each worker.
        """
        rows = Counter[str]()
        for n in sorted(self.staleness):
            above = 1 << n.bit_length()
            rows[str(n) if n < _SINGLE else f"{above // 2} to {above - 1}"] += self.staleness[n]
        longest = max(rows.values())
        pulled, pushed = (byte_size(sum_ // self.steps) for sum_ in (self._pulled, self._pushed))
        by_worker = ", ".join(f"{worker} {batches[worker]:,}" for worker in sorted(batches))
        return TableBlock(
            ("staleness", "updates", ""),
            [(name, f"{n:,}", "#" * round(_BAR * n / longest)) for name, n in rows.items()],
            numeric=frozenset({0, 1}),
            title="staleness of the updates",
            note=f"a step pulls {pulled} and pushes {pushed}; batches: {by_worker}",
        )

"""The executor of strategy parameter_server: workers make the steps, servers hold the state."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from spmdtrain.cluster.spec import Role, from_environment
from spmdtrain.config import ParameterServerOptions, RunConfig, resolve
from spmdtrain.data.datasets import Dataset
from spmdtrain.data.sampling import Augment
from spmdtrain.distributed import initialize, progress
from spmdtrain.distributed.progress import Phase, phase
from spmdtrain.errors import ExitCode, UserError
from spmdtrain.parameter_server import ray_nodes, ray_pool
from spmdtrain.parameter_server.batch_queue import BatchQueue
from spmdtrain.parameter_server.partition import FixedShards, MaxSize, MinSize, Partitioner
from spmdtrain.parameter_server.ray_pool import RayJob
from spmdtrain.parameter_server.scheduler import BatchScheduler, Outcome
from spmdtrain.parameter_server.server import PushResult
from spmdtrain.parameter_server.state_partition import ServerPartition, bytes_in, outcome
from spmdtrain.parameter_server.stats import StalenessStats
from spmdtrain.parameter_server.worker import Worker
from spmdtrain.sharding.placement import Placement, configure_backend, make_placement
from spmdtrain.step.state import TrainState
from spmdtrain.step.train_step import StepFunctions, StepOutput
from spmdtrain.train.executor import ExecutorInputs, MakeExecutor

PyTree = Any
_FAREST = 10_000  # steps that are looked ahead for what is due
_GRACE = 15.0  # seconds, at least, after a signal in which what is under way may come in
_ANSWERS = 2.0  # seconds that a server has to answer where nothing comes


@dataclasses.dataclass(frozen=True)
class RemoteWorker:
    """A worker that pulls what it computes with, and pushes what comes of it."""

    worker: Worker
    division: ServerPartition
    servers: Sequence[Any]

    def __call__(self, number: int) -> Outcome:
        """Make the step of a batch."""
        with phase(Phase.STEP, number + 1):
            return self._step(number)

    def _step(self, number: int) -> Outcome:
        import ray

        parts = ray.get([server.pull.remote(number) for server in self.servers])
        computed = self.worker.compute(number, *self.division.pulled(parts))
        pushes = self.division.pushes(number, computed, parts)
        landed: list[PushResult] = ray.get(
            [server.push.remote(push) for server, push in zip(self.servers, pushes, strict=True)]
        )
        return outcome(
            number,
            computed.metrics,
            landed,
            sums=computed.sums,
            pulled=sum(bytes_in((part.params, part.model_state)) for part in parts),
            pushed=sum(bytes_in((push.gradients, push.model_state)) for push in pushes),
        )


@dataclasses.dataclass(frozen=True)
class Job:
    """What a worker is told, wherever it comes.

    Attributes:
        steps: Makes the steps' programs for a configuration, under its placement.
        config: The run's, for one worker with devices of its own.
        key: Of the state.
        servers: The actors.
    """

    steps: Callable[[RunConfig, Placement], StepFunctions]
    config: RunConfig
    division: ServerPartition
    dataset: Dataset
    augment: Augment | None
    key: np.ndarray
    servers: Sequence[Any]

    def __call__(self) -> RemoteWorker:
        """The worker, in its own process."""
        configure_backend(self.config)
        placement = make_placement(self.config)
        # The chief has looked whether the batch divides over devices of its own.
        config = resolve(self.config, batch_shards=placement.batch_shards)
        assert config.global_batch_size is not None
        worker = Worker(
            self.steps(config, placement),
            placement,
            self.division,
            self.dataset,
            batch_size=config.global_batch_size,
            seed=config.seed,
            shuffle=config.shuffle,
            threads=config.data_threads,
            augment=self.augment,
            key=self.key,
        )
        return RemoteWorker(worker, self.division, self.servers)


class ServerExecutor:
    """Makes steps by workers, each from the parameters that the servers hold at that time.

    Raises `UserError`.
    """

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

    def load(self, steps: Sequence[int], state: TrainState) -> int:
        """Returns the number of the batch; workers may receive batches up to the next due step."""
        (step,) = steps
        dispenser = self._asynchronous.dispenser
        if dispenser.limit < step:
            limit = step
            while not self._run.is_due(limit) and limit < step + _FAREST:
                limit += 1
            dispenser.limit = limit
        return step - 1

    def run(self, state: TrainState, batch: int) -> tuple[TrainState, StepOutput]:
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


def for_worker(config: RunConfig) -> RunConfig:
    """The configuration of one worker, which mirrors the model over devices of its own."""
    return dataclasses.replace(
        config, strategy="mirrored", workdir=None, servers=ParameterServerOptions()
    )


def run_task_role(timeout: float) -> None:
    """Takes the role that TF_CONFIG gives this process in a job of parameter servers.

    The chief, or worker 0 of a cluster without one, returns. Workers and servers serve it and exit.

    Args:
      timeout: Seconds in which the chief has to come.

    Raises:
      UserError: If the cluster lacks tasks, or this is its evaluator.
      SystemExit: In a worker or a server, when the job has ended.
    """
    spec = from_environment()
    if spec.role is Role.EVALUATE:
        raise UserError(
            f"by TF_CONFIG this process is {spec.name}, which takes no part in a training: only "
            "Trainer.fit and python -m spmdtrain.run evaluate there"
        )
    if missing := spec.why_no_servers:
        found = f" (this one has {missing})" if spec.jobs else ""
        raise UserError(
            f"parameter servers take a TF_CONFIG with a chief, workers and ps tasks{found}: start "
            "one with python -m spmdtrain.launch --processes 3 --ps 2 -- ..."
        )
    initialize.set_single_process()
    if spec.is_chief:
        return
    how = ray_nodes.serve(spec, timeout)
    if how not in ray_nodes.ENDS:
        progress.write_exit_reason(
            ExitCode.FAILED, f"the job: {how}", own=how == ray_nodes.NODE_DIED
        )
    raise SystemExit(ray_nodes.ENDS.get(how, ExitCode.FAILED))


def run_if_worker_or_server(timeout: float) -> None:
    """Takes the role of a worker or a parameter server, if this process is one, and then exits.

    Call before devices are used, because the actors of the task use them. Raises the errors of
    `run_task_role`.
    """
    spec = from_environment()
    if spec.task_type in ("worker", "ps") and not spec.is_chief:
        run_task_role(timeout)


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

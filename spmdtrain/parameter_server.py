"""The chief of a training by parameter servers: workers make its steps, servers have its state."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np

from spmdtrain import distributed, nodes, phases, ray_crew
from spmdtrain.asynchronous import Asynchronous, Outcome
from spmdtrain.config import RunConfig, Servers, resolve
from spmdtrain.data import Augment, Dataset
from spmdtrain.dispenser import Dispenser
from spmdtrain.division import Division, bytes_in, outcome
from spmdtrain.errors import ExitCode, UserError
from spmdtrain.partitioners import FixedShards, MaxSize, MinSize, Partitioner
from spmdtrain.phases import Phase, within
from spmdtrain.placement import Placement, place, prepare
from spmdtrain.ray_crew import RayJob
from spmdtrain.server import Landed
from spmdtrain.session import Session
from spmdtrain.spec import Role, from_environment
from spmdtrain.state import TrainState
from spmdtrain.step import StepOutput, Steps
from spmdtrain.tallies import Tally
from spmdtrain.worker import Worker

PyTree = Any
_FAREST = 10_000  # steps that are looked ahead for what is due
_GRACE = 15.0  # seconds, at least, after a signal in which what is under way may come in
_ANSWERS = 2.0  # seconds that a server has to answer where nothing comes


@dataclasses.dataclass(frozen=True)
class AmongServers:
    """A worker that pulls what it computes with, and pushes what comes of it."""

    worker: Worker
    division: Division
    servers: Sequence[Any]

    def __call__(self, number: int) -> Outcome:
        """Make the step of a batch."""
        with within(Phase.STEP, number + 1):
            return self._step(number)

    def _step(self, number: int) -> Outcome:
        import ray

        parts = ray.get([server.pull.remote(number) for server in self.servers])
        computed = self.worker.compute(number, *self.division.pulled(parts))
        pushes = self.division.pushes(number, computed, parts)
        landed: list[Landed] = ray.get(
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

    steps: Callable[[RunConfig, Placement], Steps]
    config: RunConfig
    division: Division
    dataset: Dataset
    augment: Augment | None
    key: np.ndarray
    servers: Sequence[Any]

    def __call__(self) -> AmongServers:
        """The worker, in its own process."""
        prepare(self.config)
        placement = place(self.config)
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
        return AmongServers(worker, self.division, self.servers)


class OnServers:
    """Steps that workers make, each from what the servers have by then; see `Stepping`.

    Raises `UserError`.
    """

    def __init__(
        self,
        run: Session,
        state: TrainState,
        own: Steps,
        steps: Callable[[RunConfig, Placement], Steps],
        augment: Augment | None,
        job: RayJob,
        division: Division,
    ) -> None:
        options, terminal = run.config.servers, run.journal.terminal
        self._run, self._own, self._key = run, own, np.asarray(state.key)
        begun: TrainState = jax.tree.map(np.asarray, state)
        first = int(begun.step)
        self._division = division
        with terminal.waiting("waiting for the servers"), within(Phase.START):
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
            steps,
            for_worker(run.config),
            self._division,
            run.train,
            augment,
            self._key,
            self._servers,
        )
        self._asynchronous = Asynchronous(
            job.crew(told),
            Dispenser(first, options.max_staleness),
            options.patience,
            terminal.line,
            self._may_stop,
            self._tell_silence,
        )
        self._asked_at: float | None = None
        self._tally = Tally()
        run.journal.introduce(
            place(run.config),
            state.params,
            f"workers: {job.workers}, parameter servers: {job.servers}",
        )
        run.journal.train_goes_on(first)

    def load(self, steps: Sequence[int], state: TrainState) -> int:
        """The number of the batch; others may be given out up to what is due next."""
        (step,) = steps
        dispenser = self._asynchronous.dispenser
        if dispenser.limit < step:
            limit = step
            while not self._run.is_due(limit) and limit < step + _FAREST:
                limit += 1
            dispenser.limit = limit
        return step - 1

    def make(self, state: TrainState, batch: int) -> tuple[TrainState, StepOutput]:
        """What came of the batch, once it has landed; the state is the servers'."""
        with within(Phase.STEP, batch + 1):
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

    def hold(self, step: int) -> int:
        """The last step whose batch has been given out."""
        return self._asynchronous.dispenser.hold()

    def newest(self, state: TrainState) -> TrainState:
        """What the servers have, gathered."""
        with within(Phase.STEP):
            self._asynchronous.dispenser.hold()
            self._asynchronous.settle()
            found = ray_crew.answers(self._ray, [server.held.remote() for server in self._servers])
        (step,) = {complete for _, complete in found}
        whole = self._division.state([held for held, _ in found], step, self._key)
        placed: TrainState = jax.device_put(whole, self._own.shardings)
        return placed

    def _may_stop(self, is_empty: bool) -> None:
        """Raise `Preempted` where a signal has come, and what is under way does not come in."""
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

    def conclude(self) -> None:
        """Tell how stale the updates were, who has made them, and what the servers have counted."""
        made = self._asynchronous.made
        counts = ray_crew.answers(self._ray, [server.counts.remote() for server in self._servers])
        held = [
            dataclasses.asdict(of) | {"params_bytes": self._division.params.bytes_of(n)}
            for n, of in enumerate(counts)
        ]
        self._run.journal.terminal.console.print(self._tally.table(made))
        if self._run.journal.files:
            self._run.journal.files.write_report("servers", self._tally.report(made, held))


def of_options(options: Servers, servers: int) -> Partitioner:
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
    return dataclasses.replace(config, strategy="mirrored", workdir=None, servers=Servers())


def take_part(timeout: float) -> None:
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
    distributed.stay_alone()
    if spec.is_chief:
        return
    how = nodes.serve(spec, timeout)
    if how not in nodes.ENDS:
        phases.tell_reason(ExitCode.FAILED, f"the job: {how}", own=how == nodes.NODE_DIED)
    raise SystemExit(nodes.ENDS.get(how, ExitCode.FAILED))


def serve_elsewhere(timeout: float) -> None:
    """Takes the role of a worker or a parameter server, if this process is one, and then exits.

    Call before devices are used, because the actors of the task use them. Raises as `take_part`.
    """
    spec = from_environment()
    if spec.task_type in ("worker", "ps") and not spec.is_chief:
        take_part(timeout)


def lead(timeout: float) -> AbstractContextManager[RayJob]:
    """Be the chief: the others come while the run begins, and end with it."""
    return ray_crew.begin(from_environment(), timeout)

"""Executors of train steps, backends of strategies, roles of processes, and profiles of steps."""

import contextlib
import pkgutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import jax

from spmdtrain.checkpoints.listing import list_for_all
from spmdtrain.cluster.spec import Role, from_environment
from spmdtrain.config.run_config import RunConfig
from spmdtrain.data.datasets import Dataset
from spmdtrain.data.loader import on_devices, train_batches
from spmdtrain.data.sampling import Augment, batch_at
from spmdtrain.distributed import initialize, process_group
from spmdtrain.distributed.first_call import await_compiled
from spmdtrain.distributed.progress import Phase, phase
from spmdtrain.document.terminal import Terminal
from spmdtrain.errors import StorageError, UserError
from spmdtrain.record import no_follow
from spmdtrain.record.requests import Request, State
from spmdtrain.record.storage import folder_of, one_line
from spmdtrain.sharding.layout import sharding_blocks
from spmdtrain.sharding.placement import Placement, configure_backend, local_config, make_placement
from spmdtrain.step.compile import Programs
from spmdtrain.step.functions import RunFunctions
from spmdtrain.step.program import StepOutput
from spmdtrain.step.state import TrainState
from spmdtrain.strategies import Strategy, strategy
from spmdtrain.train.run_logger import next_batch
from spmdtrain.train.session import RunSession, terminal_of

if TYPE_CHECKING:
    from spmdtrain.config.command_line import Command


# -- Executors of train steps, and the backends of strategies, which create them -------------------

PyTree = Any
StepCall: TypeAlias = Callable[[TrainState, PyTree], tuple[TrainState, StepOutput]]
"""Runs one dispatch: (state, batch) -> (new state, output). Both results are asynchronous JAX
arrays."""


class Inspection(Protocol):
    """Programs beside the train step, which read what a step is given and do not change it.

    It is made from (functions, placement, run, first), where the run continues from step `first`.
    All processes make the same calls.
    """

    def is_due(self, steps: Sequence[int]) -> bool:
        """Returns whether to inspect a dispatch of these steps."""
        ...

    def inspect(self, steps: Sequence[int], state: TrainState, batch: PyTree) -> None:
        """Inspects the state before a dispatch, and the batch of its first step."""
        ...


INSPECTIONS: Mapping[str, str] = {
    "sentinel_every": "spmdtrain.train.sentinel:Sentinel",
    "watch": "spmdtrain.train.layer_watch:LayerWatch",
}
"""`module:class` of the inspections, each by the option that turns it on."""


class Executor:
    """Runs the steps of a run, one dispatch after the other.

    The defaults are for steps that only the training loop dispatches, on devices of this job.
    """

    max_in_flight: int
    """Number of dispatches whose outputs may be pending."""

    def load(self, steps: Sequence[int], state: TrainState) -> tuple[StepCall, PyTree]:
        """Returns the program of the next dispatch and its batch; `state` is the one before it."""
        raise NotImplementedError

    def inspect(self, steps: Sequence[int], state: TrainState, batch: PyTree) -> None:
        """Calls the inspections that are due before a dispatch.

        Args:
          steps: The steps of the dispatch.
          state: The state before the dispatch.
          batch: The batch of the dispatch, from `load`.

        Raises:
          DeviceFaultError: If the sentinel finds that devices differ.
          UserError: If an inspection cannot be made of this model.
        """

    def stop_dispatch(self, step: int) -> int:
        """Stops the dispatch of further steps; returns the last one (`step` or later)."""
        return step

    def sync(self, state: TrainState) -> TrainState:
        """Waits for all dispatched steps; returns the state after them, which may be pending.

        `state` is the state that the last program returned.
        """
        return state

    def report(self) -> None:
        """Prints a summary after the last step of a run."""

    def close(self) -> None:
        """Ends what the executor has started, at the end of the fit."""


class DeviceExamples:
    """Copies all examples to the devices (`data_on_device`) and keeps them for the last dataset."""

    def __init__(self, placement: Placement, terminal: Terminal) -> None:
        self._placement, self._terminal = placement, terminal
        self._last: tuple[Dataset, PyTree] | None = None

    def __call__(self, dataset: Dataset) -> PyTree:
        """Returns all examples of a dataset on the devices."""
        if self._last is None or self._last[0] is not dataset:
            self._last = None  # first, because the devices need not hold the old ones as well
            with self._terminal.waiting("putting the examples on the devices"), phase(Phase.LOAD):
                self._last = dataset, on_devices(dataset, self._placement)
        return self._last[1]


def max_in_flight(placement: Placement) -> int:
    """Returns how many dispatches of one step on a mesh may be pending.

    On virtual devices, many pending steps can abort XLA's in-process all-reduce.
    """
    return 2 if placement.is_virtual() else 8


class MeshExecutor(Executor):
    """Runs compiled steps on the mesh of this job."""

    def __init__(
        self,
        run: RunSession,
        state: TrainState,
        functions: RunFunctions,
        programs: Programs,
        placement: Placement,
        augment: Augment | None,
        examples: DeviceExamples,
    ) -> None:
        config, first = run.config, int(state.step)
        self._run, self._programs, self._placement = run, programs, placement
        self._functions = functions
        self._dispatch = dispatch = run.schedule.dispatch
        self.max_in_flight = 2 if dispatch.steps > 1 else max_in_flight(placement)
        if dispatch.is_counted:  # the devices compute one while the host prepares the next
            self.max_in_flight = 1
        self._compiled: dict[tuple[str, int], StepCall] = {}  # by kind and number of steps
        self._inspections: list[Inspection] = [
            pkgutil.resolve_name(name)(functions, placement, run, first)
            for option, name in INSPECTIONS.items()
            if getattr(config, option)
        ]
        self._batches = train_batches(
            run.train_data,
            config.resolved_batch_size,
            placement.batch,
            seed=config.seed,
            shuffle=config.shuffle,
            start=first,
            stop=run.schedule.total,
            augment=augment,
            threads=config.data_threads,
            workers=config.data_workers,
            announce=run.logger.terminal.line,
            sizes=map(len, run.schedule.dispatches(first)),
            most_steps=dispatch.steps if dispatch.is_counted else None,
            arrays=examples(run.train_dataset) if config.data_on_device else None,
            step_may_place=config.jit,
            padded_to=config.padded_batch_size(placement.batch_shards),
            progress=run.stream_progress,
            skipped=config.skipped_batches,
        )

    def load(self, steps: Sequence[int], state: TrainState) -> tuple[StepCall, PyTree]:
        """Returns the compiled program of these steps, and the next batch."""
        batch = next_batch(self._batches, state, self._run.logger.timer.count_wait, steps[-1])
        kind = self._run.schedule.kind(steps[-1])
        key = kind, self._dispatch.program_steps(len(steps))
        if key not in self._compiled:
            self._compiled[key] = self._compile(*key, batch, state)
            self._run.logger.timer.restart(steps[0] - 1)
        return self._compiled[key], batch

    def inspect(self, steps: Sequence[int], state: TrainState, batch: PyTree) -> None:
        """Calls the inspections that are due."""
        for each in self._inspections:
            if each.is_due(steps):
                is_stacked = self._dispatch.program_steps(len(steps)) > 1
                each.inspect(steps, state, batch_at(batch, 0) if is_stacked else batch)

    def close(self) -> None:
        """Ends the reading of batches."""
        self._batches.close()

    def _compile(self, kind: str, steps: int, batch: PyTree, state: TrainState) -> StepCall:
        """Compiles the program of `steps` steps for batches like `batch`; logs its description."""
        logger = self._run.logger
        with logger.terminal.waiting("compiling the train step"), phase(Phase.COMPILE):
            program = self._programs.get(kind, self._dispatch, steps, batch)
            await_compiled(program.lowered)
        functions = self._functions
        trained, _ = functions.update.partition(state.params)
        logger.log_header(self._placement, state.params, program, trained)
        params, places = functions.abstract_state.params, functions.shardings.params
        logger.performance.describe(
            program, params, places, self._placement, counts_tokens=functions.loss_is_of_tokens
        )
        return program.call


class Backend:
    """Creates the executor of a strategy. `Strategy.backend` names the class.

    This one runs the steps on the mesh of this job; others override what differs.
    """

    runs_steps = True
    """Whether this process runs the steps: it compiles them while a checkpoint is restored, and has
    the state after each of them. Otherwise it has the state at boundaries."""

    def join(self, timeout: float) -> None:
        """Starts this process in its role, before devices are used.

        On a mesh it does nothing, because `initialize` has joined the processes.

        Args:
          timeout: Seconds to wait for the other processes.

        Raises:
          SystemExit: At the end of the job, in a process that only serves others: a worker or a
            parameter server.
        """

    def join_command(self, command: "Command") -> None:
        """Starts this process in its role in the run command, by the options of the command.

        Raises:
          UserError: If an option contradicts the strategy or TF_CONFIG.
          SystemExit: As in `join`.
        """
        options = command.options
        initialize.initialize(
            strategy=command.config.strategy,
            auto_detect=options.cluster == "auto",
            explicit=initialize.ClusterOptions(
                coordinator=options.coordinator,
                processes=options.processes,
                process_id=options.process_id,
            ),
            timeout=options.init_timeout,
            hang_timeout=options.hang_timeout,
        )

    def make_placement(self, config: RunConfig) -> Placement:
        """Returns the placement of evaluations and of the state in this process."""
        return make_placement(config)

    def print_sharding(
        self, functions: RunFunctions, config: RunConfig, terminal: Terminal
    ) -> None:
        """Prints on which devices or servers each part of the (abstract) state is."""
        terminal.show(*sharding_blocks(functions.sharding_table()))

    def begin_fit(self, timeout: float, *, has_fitted: bool) -> None:
        """Raises `UserError` if a fit cannot begin; otherwise does what `join` does."""

    def compile_ahead(
        self,
        run: RunSession,
        programs: Programs,
        functions: RunFunctions,
        augment: Augment | None,
    ) -> None:
        """Starts to compile the train step in the background, if steps are left to train.

        The checkpoints of the run are not restored yet.
        """
        config, schedule = run.config, run.schedule
        source = config.workdir and list_for_all(config.workdir)
        first = source.steps[-1] if source and source.steps else 0
        if first >= schedule.total or functions.has_custom_reduction:
            return
        dispatch = schedule.dispatch
        numbers = next(schedule.dispatches(first))
        kind, steps = schedule.kind(numbers[-1]), dispatch.program_steps(len(numbers))
        programs.begin(kind, dispatch, steps, run.train_data, augment, config)

    @contextmanager
    def open(self, timeout: float) -> Iterator["Backend"]:
        """Holds the resources of one fit; yields the backend that makes its executor with them."""
        yield self

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
        """Returns the executor of a run.

        Args:
          state: The state before the first step.
          make_functions: Makes the functions in another process, for its placement.
        """
        return MeshExecutor(run, state, functions, programs, placement, augment, examples)


def backend_of(strategy: Strategy) -> Backend:
    """Imports and returns the backend of a strategy."""
    backend: Backend = pkgutil.resolve_name(strategy.backend)()
    return backend


# -- The role of a process in a job, as TF_CONFIG and the strategy decide it -----------------------


def is_evaluator() -> bool:
    """Returns whether TF_CONFIG makes this process the evaluator of a job."""
    return from_environment().role is Role.EVALUATE


def join_job(config: RunConfig, timeout: float, terminal: Terminal | None) -> RunConfig:
    """Takes the role of this process in the job; returns the configuration for this process.

    A process that trains joins the others. A worker or a parameter server serves the chief and
    exits with the job. An evaluator has separate devices, and so another configuration.

    Args:
      timeout: Seconds to wait for the chief of parameter servers.
      terminal: Receives the reason if an evaluator uses another placement.

    Raises:
      UserError: If the strategy has no use for this task.
      SystemExit: In a worker or parameter server, when the job has ended.
    """
    if is_evaluator():
        return local_config(config, (terminal or terminal_of(config)).line)
    backend_of(strategy(config.strategy)).join(timeout)
    configure_backend(config)
    return config


def refuse_evaluator(what: str) -> None:
    """Raises `UserError` in an evaluator task, for what only trains."""
    if is_evaluator():
        name = from_environment().name
        raise UserError(
            f"{what} in task {name} of TF_CONFIG: only Trainer.fit and python -m spmdtrain.run "
            "evaluate checkpoints there; leave the evaluator out of the cluster"
        )


# -- The use of a trainer's state by several threads ----------------------------------------------


class StateAccess:
    """The uses of a trainer's state: by a fit, which donates it, or by threads that read it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers: list[int] = []  # their threads
        self._fit: int | None = None  # its thread

    @property
    def is_elsewhere(self) -> bool:
        """Whether a fit is in progress in another thread."""
        return self._fit not in (None, threading.get_ident())

    def check(self) -> None:
        """Raises `UserError` if a fit is in progress in another thread."""
        if self.is_elsewhere:
            raise UserError(
                "a fit of this Trainer is in progress in another thread, and its steps donate the "
                "state: read it in a callback; event.trainer.model is a copy, which stays valid"
            )

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keeps the fits of other threads waiting; any number of threads may read at once."""
        thread = threading.get_ident()
        with self._changed:
            self.check()
            self._readers.append(thread)
        try:
            yield
        finally:
            with self._changed:
                self._readers.remove(thread)
                self._changed.notify_all()

    @contextmanager
    def fitting(self) -> Iterator[None]:
        """Waits for the threads that read, and keeps others from it; `UserError` in another fit."""
        thread = threading.get_ident()
        with self._changed:
            if thread in self._readers:
                raise UserError(
                    "this Trainer is in an evaluation or prediction: call fit when it has ended"
                )
            while self._readers and self._fit is None:
                self._changed.wait()
            if self._fit is not None:
                raise UserError("this Trainer is in a fit: wait until it ends, or use another one")
            self._fit = thread
        try:
            yield
        finally:
            with self._changed:
                self._fit = None
                self._changed.notify_all()


# -- Profiler traces of some steps of a run, for TensorBoard or Perfetto ---------------------------


class ProfiledSteps:
    """Traces steps (both ends included) into the workdir, if it is set.

    `log` receives a line that says where the trace is.
    """

    def __init__(
        self, folder: str | None, steps: tuple[int, int], log: Callable[[str], None]
    ) -> None:
        self._first, self.last = steps
        # Process 0 alone: the others' traces would be written to the same files.
        self._folder, self._log = folder if process_group.is_chief() else None, log
        self._running = False
        self._marker: jax.profiler.StepTraceAnnotation | None = None

    def start(self) -> None:
        """Starts the trace unless it runs; raises `StorageError` if it cannot be written."""
        if not self._folder or self._running:
            return
        folder = Path(folder_of(self._folder))
        try:
            for name in ("plugins", "plugins/profile"):  # where the profiler writes
                no_follow.make_subfolder(folder, name)
        except OSError as error:
            raise StorageError(f"no trace can be written: {one_line(error)}") from error
        jax.profiler.start_trace(str(folder))
        self._running = True

    def before(self, step: int) -> None:
        """Starts the trace or marks the step; call it before `step` is dispatched."""
        if self._first <= step <= self.last:
            self.start()
        if self._running:  # tools group operations by the markers of steps
            self._marker = jax.profiler.StepTraceAnnotation("train", step_num=step)
            self._marker.__enter__()

    def after(self, step: int, output: Any) -> None:
        """Ends the mark of `step` after its dispatch; waits for the last traced `output`."""
        if self._marker is not None:
            self._marker.__exit__(None, None, None)
            self._marker = None
        if step >= self.last and self._running:
            jax.block_until_ready(output)
            self.close()

    def close(self) -> None:
        """Ends the trace if it has not ended."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
            self._log(
                f"profile from step {self._first}: {self._folder}/plugins/profile; to open it: "
                f"pip install xprof, xprof {self._folder}, or give its trace.json.gz to "
                "https://ui.perfetto.dev"
            )


@dataclass
class Profiles:
    """The traces of one fit, one after another.

    Attributes:
      closing: Ends a trace that has not ended with its last step.
      line: Prints a line on the terminal.
      current: The steps that are traced, or were last; None before.
    """

    closing: contextlib.ExitStack
    line: Callable[[str], None]
    current: ProfiledSteps | None = None

    def begin(self, config: RunConfig, first: int) -> None:
        """Traces the steps of the option `profile_steps`, unless the run resumes after them.

        `first` is the step from which it resumes.
        """
        steps = config.profile_range()
        assert steps is not None
        if first >= steps[1]:
            self.line(f"nothing to profile: step {first} is past {config.profile_steps}")
            return
        self.current = ProfiledSteps(config.workdir, steps, self.line)
        self.closing.callback(self.current.close)

    def ask(self, run: RunSession, step: int, request: Request) -> tuple[State, str]:
        """Starts the trace that the owner of a run asks for after a step; returns the answer."""
        if strategy(run.config.strategy).is_asynchronous:
            return State.REFUSED, "with parameter servers the steps run in other processes"
        if self.current is not None and self.current.last > step:
            return State.REFUSED, f"a profile up to step {self.current.last:,} comes first"
        steps = step + 1, min(step + request.steps, run.schedule.total)
        answer = partial(run.signals.requests.answer, request, State.DONE)

        def end(text: str) -> None:
            self.line(text)
            answer(text)

        asked = ProfiledSteps(run.config.workdir, steps, end)
        try:
            asked.start()
        except (RuntimeError, StorageError) as error:  # the user's code may profile already
            return State.REFUSED, f"no profile can be started: {one_line(error)}"
        self.current = asked
        self.closing.callback(asked.close)
        return State.ACCEPTED, f"it profiles steps {steps[0]:,} to {steps[1]:,}"

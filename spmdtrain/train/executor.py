"""Executors of train steps, and the backends of strategies that make them."""

import pkgutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from spmdtrain.config import RunConfig
from spmdtrain.data.loader import train_batches
from spmdtrain.data.sampling import Augment
from spmdtrain.distributed.first_call import await_compiled
from spmdtrain.distributed.progress import Phase, phase
from spmdtrain.sharding.placement import Placement
from spmdtrain.step.compile import Programs
from spmdtrain.step.state import TrainState
from spmdtrain.step.train_step import StepFunctions, StepOutput
from spmdtrain.strategies import Strategy
from spmdtrain.train.session import RunSession

PyTree = Any


class Executor(Protocol):
    """Makes the steps of a run, one dispatch after the other."""

    def load(self, steps: Sequence[int], state: TrainState) -> PyTree:
        """Returns the input of the next dispatch, which makes these steps."""
        ...

    def run(self, state: TrainState, batch: PyTree) -> tuple[TrainState, StepOutput]:
        """Dispatches steps; returns the state after them and their output, which may be pending."""
        ...

    def stop_dispatch(self, step: int) -> int:
        """Starts no further step; returns the last one that was started, `step` or a later one."""
        ...

    def sync(self, state: TrainState) -> TrainState:
        """Waits for all started steps and returns the state after them.

        Args:
          state: The state that the last `run` returned.
        """
        ...

    def report(self) -> None:
        """Prints a summary after the last step of a run."""
        ...


@dataclass(frozen=True)
class ExecutorInputs:
    """What an executor is made from."""

    run: RunSession
    state: TrainState
    """The state before the first step."""
    functions: StepFunctions
    make_functions: Callable[[RunConfig, Placement], StepFunctions]
    """Makes the functions for another configuration and placement, in a worker."""
    programs: Programs
    placement: Placement
    augment: Augment | None
    all_examples: Callable[[], PyTree]
    """Puts all training examples on the devices (`data_on_device`); None without that option."""


MakeExecutor: TypeAlias = Callable[[ExecutorInputs], Executor]


class Backend(Protocol):
    """Where a strategy makes its steps. `Strategy.backend` names the class."""

    def join(self, timeout: float) -> None:
        """Takes the role of this process, before devices are used.

        Args:
          timeout: Seconds to wait for the other processes.

        Raises:
          SystemExit: In a process that serves another one, when the job has ended.
        """
        ...

    def begin_fit(self, timeout: float, *, has_fitted: bool) -> None:
        """Checks that a fit can begin; raises `UserError`. Arguments and exit are as in `join`."""
        ...

    def open(self, timeout: float) -> Any:
        """Returns a context manager of a `MakeExecutor`: the resources of one fit."""
        ...


def backend_of(strategy: Strategy) -> Backend:
    """Returns the backend of a strategy; imports it first."""
    backend: Backend = pkgutil.resolve_name(strategy.backend)()
    return backend


class MeshBackend:
    """Makes steps on the devices of this program's own mesh."""

    def join(self, timeout: float) -> None:
        """Does nothing: `initialize` has joined the processes."""

    def begin_fit(self, timeout: float, *, has_fitted: bool) -> None:
        """Does nothing: every fit can begin."""

    @contextmanager
    def open(self, timeout: float) -> Iterator[MakeExecutor]:
        """Needs no resources."""
        yield MeshExecutor


class MeshExecutor:
    """Makes steps by the compiled programs of this program's own mesh."""

    def __init__(self, inputs: ExecutorInputs) -> None:
        run, placement = inputs.run, inputs.placement
        config, first = run.config, int(inputs.state.step)
        assert run.train is not None and config.global_batch_size is not None
        self._run, self._programs, self._placement = run, inputs.programs, placement
        self._made: dict[int, Callable[..., Any]] = {}  # by the steps they make
        self._call: Callable[..., Any] | None = None
        self._batches = train_batches(
            run.train,
            config.global_batch_size,
            placement.batch,
            seed=config.seed,
            shuffle=config.shuffle,
            start=first,
            stop=run.total,
            augment=inputs.augment,
            threads=config.data_threads,
            sizes=map(len, run.dispatches(first)),
            arrays=inputs.all_examples(),
            by_step=config.jit,
            padded_to=config.padded_batch_size(placement.batch_shards),
        )

    def load(self, steps: Sequence[int], state: TrainState) -> PyTree:
        """Returns the next batch, and selects the program for its shapes."""
        with phase(Phase.LOAD, steps[-1]):
            batch = next(self._batches)
        if len(steps) not in self._made:
            self._made[len(steps)] = self._compile(len(steps), batch, state)
            self._run.journal.restart_timer(steps[0] - 1)
        self._call = self._made[len(steps)]
        return batch

    def run(self, state: TrainState, batch: PyTree) -> tuple[TrainState, StepOutput]:
        """Dispatches the steps; the host does not wait for the devices."""
        assert self._call is not None
        with phase(Phase.STEP):
            found: tuple[TrainState, StepOutput] = self._call(state, batch)
        return found

    def stop_dispatch(self, step: int) -> int:
        """Returns `step`: no dispatch is started before it is asked for."""
        return step

    def sync(self, state: TrainState) -> TrainState:
        """Returns the state as it is."""
        return state

    def report(self) -> None:
        """Prints nothing: the log has everything."""

    def _compile(self, steps: int, batch: PyTree, state: TrainState) -> Callable[..., Any]:
        """The program of so many steps of such batches, compiled; says what is about to run."""
        journal = self._run.journal
        with journal.terminal.waiting("compiling the train step"), phase(Phase.COMPILE):
            program = self._programs.get(steps, batch)
            await_compiled(program.lowered)
        journal.log_header(self._placement, state.params, program.told)
        return program.call

"""Who makes the steps of a run: the programs of its own mesh, or workers elsewhere."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from spmdtrain.data import Augment
from spmdtrain.feed import train_batches
from spmdtrain.phases import Phase, within
from spmdtrain.placement import Placement
from spmdtrain.programs import Programs
from spmdtrain.session import Session
from spmdtrain.state import TrainState
from spmdtrain.step import StepOutput
from spmdtrain.together import await_compiled

PyTree = Any


class Stepping(Protocol):
    """Makes steps, one dispatch after the other."""

    def load(self, steps: Sequence[int], state: TrainState) -> PyTree:
        """What the next dispatch, which makes these steps, is made from."""
        ...

    def make(self, state: TrainState, batch: PyTree) -> tuple[TrainState, StepOutput]:
        """The state after it, and what it tells; both may still be under way."""
        ...

    def hold(self, step: int) -> int:
        """Begin no step that is not under way; the last one that is, `step` or a later one."""
        ...

    def newest(self, state: TrainState) -> TrainState:
        """The state after the last step, once nothing is under way; `state` is what `make` gave."""
        ...

    def conclude(self) -> None:
        """All steps are made: tell what there is to tell of them."""
        ...


class OnMesh:
    """The steps that this program's own devices make.

    Args:
        run: What it is to make, from after step `first` on.
        programs: Compiled for as many steps as a dispatch has.
        arrays: All examples, where they are on the devices.
    """

    def __init__(
        self,
        run: Session,
        first: int,
        programs: Programs,
        placement: Placement,
        augment: Augment | None,
        arrays: PyTree,
    ) -> None:
        config = run.config
        assert run.train is not None and config.global_batch_size is not None
        self._run, self._programs, self._placement = run, programs, placement
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
            augment=augment,
            threads=config.data_threads,
            sizes=map(len, run.dispatches(first)),
            arrays=arrays,
            by_step=config.jit,
            padded_to=config.padded_batch_size(placement.batch_shards),
        )

    def load(self, steps: Sequence[int], state: TrainState) -> PyTree:
        """The batch, and a program for such a one."""
        with within(Phase.LOAD, steps[-1]):
            batch = next(self._batches)
        if len(steps) not in self._made:
            self._made[len(steps)] = self._compile(len(steps), batch, state)
            self._run.journal.train_goes_on(steps[0] - 1)
        self._call = self._made[len(steps)]
        return batch

    def make(self, state: TrainState, batch: PyTree) -> tuple[TrainState, StepOutput]:
        """The update is only dispatched: the devices work while the host goes on."""
        assert self._call is not None
        with within(Phase.STEP):
            found: tuple[TrainState, StepOutput] = self._call(state, batch)
        return found

    def hold(self, step: int) -> int:
        """Each dispatch is begun when it is asked for, and not before."""
        return step

    def newest(self, state: TrainState) -> TrainState:
        """The very same."""
        return state

    def conclude(self) -> None:
        """Nothing that the log has not."""

    def _compile(self, steps: int, batch: PyTree, state: TrainState) -> Callable[..., Any]:
        """The program of so many steps of such batches, compiled; says what is about to run."""
        journal = self._run.journal
        with journal.terminal.waiting("compiling the train step"), within(Phase.COMPILE):
            program = self._programs.get(steps, batch)
            await_compiled(program.lowered)
        journal.introduce(self._placement, state.params, program.told)
        return program.call

"""The pieces of a run, for loops of one's own: several optimizers, a GAN, reinforcement learning.

The `Trainer` is one loop made of them. Here the loop is the user's; data, placement, checkpoints,
logs and the ways to end are the run's, as there.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from spmdtrain.config import Purpose, RunConfig, derive_seed
from spmdtrain.config_checks import resolve, with_options
from spmdtrain.data.datasets import as_dataset
from spmdtrain.data.loader import check_fits, ordered_batches, train_batches
from spmdtrain.data.sampling import Augment, process_rows
from spmdtrain.distributed import failures, process_group
from spmdtrain.distributed.first_call import Together, call_together
from spmdtrain.distributed.progress import Phase, phase
from spmdtrain.errors import NonFiniteError, UserError, did_you_mean
from spmdtrain.files.run_files import Split, Status
from spmdtrain.sharding.layout import Layout, Rule, check_placed
from spmdtrain.sharding.placement import configure_backend, make_placement, use_placement
from spmdtrain.step.declared_arguments import eval_key
from spmdtrain.step.hyperparameters import initial_values
from spmdtrain.step.per_replica import NotReducedError, replicas_in
from spmdtrain.step.state import TrainState
from spmdtrain.step.train_step import StepOutput
from spmdtrain.terminal import Terminal
from spmdtrain.train.executor import max_in_flight
from spmdtrain.train.loop_checks import (
    Init,
    Step,
    beginning,
    check_batch,
    check_best,
    check_config,
    check_not_donated,
    numbers,
)
from spmdtrain.train.loop_step import LoopStep, make_program
from spmdtrain.train.metrics_reader import MetricsReader
from spmdtrain.train.roles import refuse_evaluator
from spmdtrain.train.run_logger import RunLogger
from spmdtrain.train.session import BoundaryActions, RunSession
from spmdtrain.xla import collective_options
from spmdtrain.xla.compile_cache import compiler_options

PyTree = Any


class Loop:
    """What a training loop of one's own is made of.

        with Loop(strategy="mirrored", steps=1000, workdir="runs/mine") as loop:
            state = loop.start(init, train=images)
            step = loop.compile_step(function)
            for batch in loop.batches():
                state, output = step(state, batch)
                loop.end_step(state, output)

    `options` are fields of `RunConfig`, and change `config`. Raises `UserError` for anything wrong
    in them, and for those that only the `Trainer` heeds.
    """

    def __init__(
        self,
        config: RunConfig | None = None,
        *,
        terminal: Terminal | None = None,
        clock: Callable[[], float] = time.monotonic,
        **options: Any,
    ) -> None:
        config = with_options(config or RunConfig(), options, "Loop")
        check_config(config)
        refuse_evaluator("a Loop")
        configure_backend(config)
        self.placement = make_placement(config)
        self.config = resolve(config, batch_shards=self.placement.batch_shards)
        self.terminal = terminal or Terminal(quiet=not process_group.is_chief())
        self.step = 0
        """Steps recorded so far, of the whole run."""
        placed = self.placement.strategy
        ours = collective_options.compiler_options(
            config.collectives,
            self.placement.devices[0].platform,
            gathers=placed.shards_params or placed.shards_optimizer,
        )
        self._compiler_options = compiler_options(
            self.config.compiler_options, ours, self.placement.replicated
        )
        self._clock = clock
        self._stack = contextlib.ExitStack()
        self._entered = False
        self._run: RunSession | None = None
        self._layout: Layout | None = None
        self._augment: Augment | None = None
        self._state: TrainState | None = None
        self._late: MetricsReader | None = None
        # The step that this start goes on from; that up to which what was due is done.
        self.first_step = self._done = 0
        self._saved: int | None = None  # the newest that there is a checkpoint of
        self._stop = self._over = False
        self._seen: tuple[int, dict[str, float]] | None = None  # an evaluation, and of which step
        self._evaluated: set[tuple[str, int]] = set()  # splits and steps, in this start
        self.stopped_early = False
        """Whether the loop was left, by `break` say, before its last step and without `stop()`."""
        self._bar = contextlib.ExitStack()

    @property
    def mesh(self) -> Mesh | None:
        """The device mesh; None under the default strategy."""
        return self.placement.mesh

    @property
    def started(self) -> bool:
        """Whether `start` has been called."""
        return self._run is not None

    @property
    def total(self) -> int:
        """Steps of the whole run."""
        return self._started().schedule.total

    # -- beginning and end ---------------------------------------------------------------------

    def __enter__(self) -> "Loop":
        self._entered = True
        self._stack.enter_context(use_placement(self.placement))
        return self

    def start(
        self,
        init: Init,
        *,
        train: Any = None,
        rules: Sequence[Rule] = (),
        augment: Augment | None = None,
    ) -> TrainState:
        """The state to go on from: the workdir's newest checkpoint, else what `init` makes.

        `init(key)` is compiled, so that each array is born in its place. `train`: a dataset or
        arrays, for `batches`. Raises `UserError`.
        """
        if not self._entered or self._run is not None:
            raise UserError("start() is called once, within `with Loop(...) as loop:`")
        keys = [jax.random.key(derive_seed(self.config.seed, p)) for p in _PURPOSES]
        begin = beginning(init)
        abstract = jax.eval_shape(begin, *keys)
        self._layout = Layout(abstract, self.placement, rules, self.config.sharding)
        self._augment = augment
        initial = initial_values(lambda *keys: begin(*keys).opt_state, *keys)
        placed = _Placed(abstract, self._layout.shardings, initial)
        run = RunSession.open(
            self._stack,
            self.config,
            {"train": train},
            placed,
            self.terminal,
            self._clock,
        )
        self._stack.enter_context(failures.watch_failures(run.failed_elsewhere))
        with phase(Phase.RESTORE, 0):
            state = run.resume(placed)
            if state is None:
                when = "after the initialisation"
                program = jax.jit(begin, out_shardings=self._layout.shardings)
                state = call_together(program, *keys)
            else:
                when, self._saved = "as restored", int(state.step)
        check_placed(state, self._layout.shardings, when)
        self._run, self._state = run, state
        self._late = MetricsReader(run, max_in_flight(self.placement), lambda: self._state)
        self.step = self.first_step = self._done = int(state.step)
        run.journal.begin(self.step, self.placement)
        self._stack.enter_context(run.record_outcome())
        if run.start_due(self.step):
            self._save(run)
        return state

    def __exit__(self, *error: Any) -> bool | None:
        self._bar.close()
        try:
            if error[0] is None and self._run is not None:
                self._finish(self._run)
        except BaseException as own:
            if not self._stack.__exit__(type(own), own, own.__traceback__):
                raise
            return None
        finally:
            self._over = True
        return self._stack.__exit__(*error)

    def _finish(self, run: RunSession) -> None:
        assert self._late is not None and self._state is not None
        self._boundary()
        self._late.flush()
        # Where a step was made and none recorded, there is no state, not even the first.
        nothing = self.step == self.first_step and self._state.step.is_deleted()
        if self.step != self._saved and not nothing:
            self._save(run)
        run.await_save()
        self.stopped_early = self.step < run.schedule.total
        if self.stopped_early:
            why = f"the loop was left after {self.step} of {run.schedule.total} steps"
            run.journal.end(Status.PREEMPTED, self.step, why, saved=self.step == self._saved)
        else:
            run.journal.end(Status.FINISHED, self.step)

    # -- data ----------------------------------------------------------------------------------

    def batches(self) -> Iterator[PyTree]:
        """The training batches from here to the end of the run, placed on the mesh.

        Between two of them what is due is done: logs, checkpoints, a stop that was asked for. So
        each step is to be recorded before the next batch is taken.
        """
        run = self._started()
        if run.train is None:
            raise UserError("batches() is of the dataset that start(train=...) is given")
        config = self.config
        assert config.global_batch_size is not None
        batches = train_batches(
            run.train,
            config.global_batch_size,
            self.placement.batch,
            seed=config.seed,
            shuffle=config.shuffle,
            start=self.step,
            stop=run.schedule.total,
            augment=self._augment,
            threads=config.data_threads,
        )
        for _ in self.steps():
            with phase(Phase.LOAD):
                batch = next(batches)
            yield batch

    def steps(self) -> Iterator[int]:
        """The numbers of the steps to make, from 1: `batches`, for what makes its own data."""
        run = self._started()
        self._boundary()  # of the last step, where another iteration was left after it
        run.journal.restart_timer(self.step)
        # Not of this generator, which may be kept: it ends with the loop in any case.
        self._bar.close()
        self._bar.enter_context(
            self.terminal.progress("train", done=self.step, total=run.schedule.total)
        )
        while self.step < run.schedule.total:
            step = self.step + 1
            yield step
            if self.step != step:
                raise UserError(
                    f"step {step} was recorded {self.step + 1 - step} times: call "
                    "end_step(state, output) once for each batch"
                )
            self._boundary()
        self._bar.close()

    def eval_batches(self, data: Any) -> Iterator[tuple[PyTree, jax.Array]]:
        """All examples of a dataset once, in order: placed batches of (rows, mask).

        The mask, (B,), is 0 for what only fills up the last batch: a weight for `weighted_mean`.
        """
        assert self.config.global_batch_size is not None
        batches, _ = ordered_batches(
            as_dataset(data),
            self.config.eval_batch_size or self.config.global_batch_size,
            self.placement.batch,
            threads=self.config.data_threads,
        )
        return batches

    def eval_key(self, number: int) -> jax.Array:
        """The random key of batch `number` of an evaluation, the same in each evaluation.

        For functions of the batches that `eval_batches` gives, counted from 0.
        """
        draw = np.array([derive_seed(self.config.seed, Purpose.EVAL), number], np.uint32)
        key: jax.Array = jax.jit(eval_key, out_shardings=self.placement.replicated)(draw)
        return key

    def shard_batch(self, batch: PyTree) -> PyTree:
        """Returns a global batch as arrays that are split over the mesh.

        Args:
          batch: NumPy arrays of a leading dim of examples, the same in all processes.
        """
        check_batch(batch, self.placement.batch_shards)
        sharding = self.placement.batch

        def placed(leaf: Any) -> jax.Array:
            array = np.asarray(leaf)
            check_fits(array)
            local = array[process_rows(sharding, len(array))]
            return jax.make_array_from_process_local_data(sharding, local, array.shape)

        return jax.tree.map(placed, batch)

    # -- programs ------------------------------------------------------------------------------

    def compile_step(
        self, function: Step
    ) -> Callable[[TrainState, PyTree], tuple[TrainState, StepOutput]]:
        """Compiles a train step with the strategy's shardings, for each shape of batch.

        Args:
          function: (state, batch, key) -> (the state after one step, metrics by name). The loop
            counts the step and derives the key. Arrays of the state that rest in host memory are
            in device memory within.

        Returns:
          (state, batch) -> (state, output). The state is donated: use the returned one.
        """
        self._started()
        assert self._layout is not None and self._state is not None
        abstract = jax.tree.map(jax.typeof, self._state)
        program = make_program(
            function, abstract, self._layout, self.placement, self._compiler_options
        )
        return LoopStep(self, program, self._layout.shardings)

    def gather_params(self, params: PyTree) -> PyTree:
        """Within a step, parameters as a model reads them: gathered, where a strategy splits them.

        The state's own, all of them. XLA may otherwise move activations instead, which is less for
        small batches, and more for large ones.
        """
        self._started()
        assert self._layout is not None
        return self._layout.whole(params)

    def compile(self, function: Callable[..., PyTree]) -> Callable[..., PyTree]:
        """Any other function of arrays, compiled; each process gets all of its result."""

        def reduced(*args: PyTree) -> PyTree:
            found = function(*args)
            if replicas_in(found):
                raise NotReducedError(
                    "what compile() makes gives each process all of its result: reduce a value "
                    "for each replica within, or take jax.jit, which leaves it where it is"
                )
            return found

        jitted = Together(jax.jit(reduced, out_shardings=self.placement.replicated))

        def call(*args: PyTree) -> PyTree:
            with use_placement(self.placement):
                return jitted(*jax.tree.map(_in_device_memory, args))

        return call

    # -- what the run is told ------------------------------------------------------------------

    def end_step(self, state: TrainState, output: StepOutput) -> None:
        """One step is made: its state, to be saved when that is due, and its numbers.

        They are read and logged some steps late. Raises `NonFiniteError` where they are none.
        """
        run = self._started()
        assert self._late is not None
        if self.step >= run.schedule.total:
            raise UserError(
                f"all {run.schedule.total} steps of the run are made: take them from batches()"
            )
        if not isinstance(output, StepOutput):
            raise UserError(
                f"end_step(state, output) is given a {type(output).__name__}: the output is the "
                "second value that the compiled step returns"
            )
        check_not_donated(state, self.step)
        self.step += 1
        self._state = state
        self._late.add([self.step], output)

    def should_evaluate(self) -> bool:
        """Whether an evaluation is due after the step just recorded, as `eval_every_steps` says."""
        return self._started().schedule.is_eval_step(self.step)

    def log_evaluation(self, found: Mapping[str, Any], split: str = "eval") -> None:
        """Write the metrics of an evaluation after the step just recorded; `split`: eval, test.

        All processes call it alike. Told before the next batch is taken, those of eval say how
        good this step's checkpoint is. Raises `NonFiniteError` for a loss that is no number.
        """
        run = self._started()
        assert self._late is not None
        if split not in (Split.EVAL, Split.TEST):
            raise UserError(f"there is no split {split!r}.{did_you_mean(split, ['eval', 'test'])}")
        self._late.flush()
        told = numbers(found)
        if not math.isfinite(told.get("loss", 0.0)):
            raise NonFiniteError(f"step {self.step}: the {split} loss is {told['loss']}")
        if (split, self.step) in self._evaluated:
            raise UserError(
                f"log_evaluation() was called twice for {split} after step {self.step}: give all "
                "of its metrics at once"
            )
        if split == Split.EVAL:
            check_best(self.config, told, first=not self._evaluated, tell=self.terminal.line)
            self._seen = self.step, told
        self._evaluated.add((split, self.step))
        if not run.journal.read_metrics(Split(split), self.step):
            run.journal.log_evaluation(Split(split), self.step, told)

    def stop(self) -> None:
        """End the run with the step just recorded, as its last one.

        All processes call it alike. The same command then finds the run finished, unless it asks
        for more steps.
        """
        self._started().schedule.total = self.step
        self._stop = True

    def _boundary(self) -> None:
        """Does what is due after the last step, once."""
        run = self._started()
        if self._done == self.step:
            return
        self._done = self.step
        due = run.due(self.step)
        if due or self._metrics():
            run.boundary(self.step, due, self._actions)

    @property
    def _actions(self) -> BoundaryActions:
        """What a loop does at the boundary between two steps."""
        run = self._started()
        assert self._late is not None
        return BoundaryActions(
            flush=self._late.flush,
            end_epoch=lambda step: None,
            evaluate=lambda step, is_due: self._metrics(),  # the user has made it already
            save=lambda step, metrics: self._save(run),
            report=lambda: None,
            stop_requested=lambda: self._stop,
        )

    def _save(self, run: RunSession) -> None:
        assert self._late is not None and self._state is not None
        check_not_donated(self._state, self.step)
        self._late.flush()
        run.save(self._state, self.step, self._metrics(), stopped=self._stop)
        self._saved = self.step

    def _metrics(self) -> dict[str, float] | None:
        """What an evaluation of the step just recorded has found."""
        step, found = self._seen or (None, None)
        return found if step == self.step else None

    @property
    def logger(self) -> RunLogger:
        """The logger of the run."""
        return self._started().journal

    def _started(self) -> RunSession:
        if self._over:
            raise UserError("the loop is over: it ends with its `with`")
        if self._run is None:
            raise UserError("the loop has not begun: call start(init) first")
        return self._run


_PURPOSES = (Purpose.INIT, Purpose.STEP)


@dataclasses.dataclass(frozen=True)
class _Placed:
    """A state's shapes and places."""

    abstract_state: TrainState
    shardings: TrainState
    initial_hyperparameters: Mapping[str, Any]
    metric_names: None = None


def _in_device_memory(x: Any) -> Any:
    if isinstance(x, jax.Array) and x.sharding.memory_kind == "pinned_host":
        return jax.device_put(x, x.sharding.with_memory_kind("device"))
    return x

"""The `Loop`: data, placement, checkpoints and logs for a training loop that the user writes."""

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from spmdtrain.config.keywords import LoopOptions
from spmdtrain.config.overrides import (
    KeywordsSignature,
    with_fixed_folder,
    with_options,
    with_trackers,
)
from spmdtrain.config.run_config import OPTIONS, Purpose, RunConfig, derive_seed
from spmdtrain.data.loader import check_fits, ordered_batches, train_batches
from spmdtrain.data.sampling import Augment, process_rows, rows_of
from spmdtrain.data.training_data import run_dataset
from spmdtrain.distributed import failures, process_group
from spmdtrain.distributed.code_digest import code_record
from spmdtrain.distributed.first_call import Together, await_compiled, call_together
from spmdtrain.distributed.progress import Phase, end_interval, phase
from spmdtrain.document.terminal import Terminal
from spmdtrain.errors import NonFiniteError, UserError, did_you_mean, locate_errors
from spmdtrain.record.run_files import Split, Status
from spmdtrain.sharding.layout import Layout
from spmdtrain.sharding.mesh import resolve
from spmdtrain.sharding.placement import Placement, configure_backend, make_placement, use_placement
from spmdtrain.sharding.rules import Rule, check_placed
from spmdtrain.step.batch_checks import check_partitioned, check_program
from spmdtrain.step.compile import compile_step
from spmdtrain.step.functions import step_options
from spmdtrain.step.hyperparameters import initial_values, learning_rate
from spmdtrain.step.objective import eval_key
from spmdtrain.step.optimizer_record import OptimizerRecord
from spmdtrain.step.per_replica import NotReducedError, replicas_in
from spmdtrain.step.program import Health, StepOutput, StepPlan
from spmdtrain.step.state import TrainState
from spmdtrain.trackers.base import Media, Tracker
from spmdtrain.trackers.run_trackers import checked_split
from spmdtrain.train.callbacks import (
    CallbackEvent,
    CallbackRunner,
    Callbacks,
)
from spmdtrain.train.executor import max_in_flight, refuse_evaluator
from spmdtrain.train.loop_checks import (
    Init,
    Step,
    as_floats,
    as_scalars,
    check_batch,
    check_config,
    check_not_donated,
    check_state,
    check_trains,
    make_initial_state,
    state_and_metrics,
)
from spmdtrain.train.metrics_reader import MetricsReader
from spmdtrain.train.run_logger import RunLogger, is_pending, next_batch
from spmdtrain.train.schedule import Due
from spmdtrain.train.session import Boundary, RunSession, check_best, terminal_of
from spmdtrain.train.starting_state import InitialState, first_state
from spmdtrain.tree import with_own_containers
from spmdtrain.xla.compiler import options_for_one_run

# -- The compiled train step of a `Loop` -----------------------------------------------------------

PyTree = Any


def plan_loop_step(
    function: Step,
    abstract: TrainState,
    layout: Layout,
    placement: Placement,
    compiler_options: Mapping[str, Any],
    log_every: int,
) -> StepPlan:
    """Returns the plan of a user's step. `abstract` has the shapes and dtypes of the state."""
    health = Health(layout, log_every)
    function = locate_errors(function, "the step function", takes="(state, batch, key)")

    def program(state: TrainState, batch: PyTree) -> tuple[TrainState, StepOutput]:
        state = layout.to_device(state, lambda shardings: shardings)  # from host memory
        own = with_own_containers(state)
        after, metrics = state_and_metrics(function(own, batch, state.step_key))
        check_state(after, abstract)
        if after.step is not state.step or after.key is not state.key:
            raise UserError(
                "the step function changed state.step or state.key, which only the loop updates"
            )
        after = dataclasses.replace(after, step=state.step + 1, key=state.key)
        means = as_scalars(metrics)
        finite, norms = health.of_step(state, after, jnp.stack(list(means.values())))
        rate = learning_rate(after.opt_state)
        return after, StepOutput(means, finite, after.step, rate=rate, norms=norms)

    return StepPlan(program, abstract, layout.shardings, placement, compiler_options)


class LoopStep:
    """A step of a loop, compiled once for each shape of batch.

    The shardings of the state are checked after the first step.
    """

    def __init__(self, loop: "Loop", plan: StepPlan) -> None:
        self._loop, self._plan = loop, plan
        self._compiled: dict[Any, Callable[..., Any]] = {}  # by the shapes of the batch

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, StepOutput]:
        """Makes a step; the state is donated."""
        loop = self._loop
        check_not_donated(state, loop.step)
        leaves, treedef = jax.tree.flatten(jax.tree.map(jax.typeof, batch))
        sizes = [leaf.shape[0] for leaf in leaves if leaf.shape]
        loop.logger.batch_size = sizes[0] if sizes else None
        key = (treedef, *leaves)
        if key not in self._compiled:
            self._compiled[key] = self._compile(state, batch)
        end_interval(overlapped=is_pending(state))  # of the user's loop
        with phase(Phase.STEP):
            after, output = self._compiled[key](state, batch)
        if loop.step == loop.first_step:
            check_placed(after, self._plan.shardings, "after the first step")
        return after, output

    def _compile(self, state: TrainState, batch: PyTree) -> Callable[..., Any]:
        loop = self._loop

        def check(traced: jax.stages.Traced) -> None:
            check_program(traced.jaxpr.jaxpr, (state, batch), loop.placement)
            check_trains(traced.jaxpr.jaxpr, (state, batch), traced.out_info)

        with loop.terminal.waiting("compiling the step"), phase(Phase.COMPILE):
            program = compile_step(self._plan, self._plan.program(), state, batch, check)
            await_compiled(program.lowered)
        loop.logger.log_header(loop.placement, state.params, program)
        if process_group.is_chief():
            params, places = jax.tree.map(jax.typeof, state.params), self._plan.shardings
            loop.logger.performance.describe(program, params, places.params, loop.placement)
        loop.logger.timer.restart(loop.step)
        return program.call


# -- Data and programs of a `Loop` that do not depend on its steps ---------------------------------


@dataclass(frozen=True)
class PlacedState:
    """The shapes and shardings of a loop's state, as a `Trainable`."""

    abstract_state: TrainState
    shardings: TrainState
    initial_hyperparameters: Mapping[str, Any]
    optimizer_record: OptimizerRecord = field(default_factory=OptimizerRecord)
    metric_names: None = None
    base: None = None
    kind: Callable[[int], str] = lambda step: ""

    def begun(self, state: TrainState) -> TrainState:
        """Returns the state: the step of a loop has no transform."""
        return state


class StartedLoop(Boundary):
    """The parts of a loop that exist once `start` has returned, and its boundary between steps.

    Args:
      augment: (example, NumPy generator) -> example.
      state: The first state; later the state after the last recorded step.
      saved: The last step with a checkpoint.
    """

    def __init__(
        self,
        run: RunSession,
        layout: Layout,
        augment: Augment | None,
        state: TrainState,
        saved: int | None,
        in_flight: int,
    ) -> None:
        super().__init__(run, MetricsReader(run, in_flight, lambda: self.state))
        self.layout, self.augment = layout, augment
        self.state, self.saved = state, saved
        self.last_eval: tuple[int, dict[str, float]] | None = None  # its step and metrics

    def evaluate(self, step: int, *, is_due: bool = False) -> dict[str, float] | None:
        """Returns the metrics of the user's evaluation after a step, if there was one."""
        at, found = self.last_eval or (None, None)
        return found if at == step else None

    def save(self, step: int, metrics: dict[str, float] | None) -> None:
        check_not_donated(self.state, step)
        self.reader.flush()
        self.run.save(self.state, step, metrics)
        self.saved = step

    def take_snapshot(self, step: int, metrics: dict[str, float] | None) -> None:
        check_not_donated(self.state, step)
        self.run.take_snapshot(self.state, step, metrics)


def _in_device_memory(x: Any) -> Any:
    if isinstance(x, jax.Array) and x.sharding.memory_kind == "pinned_host":
        return jax.device_put(x, x.sharding.with_memory_kind("device"))
    return x


# -- The `Loop`: data, placement, checkpoints and logs for a training loop that the user writes ----
#
# It is for several optimizers, a GAN or reinforcement learning, which the `Trainer` does not cover.

_PURPOSES = (Purpose.INIT, Purpose.STEP)


class Loop:
    """The parts of a run, for a training loop that the user writes.

        with Loop(strategy="mirrored", steps=1000, workdir="runs/mine") as loop:
            state = loop.start(init, train=images)
            step = loop.compile_step(function)
            for batch in loop.batches():
                state, output = step(state, batch)
                loop.end_step(state, output)

    Args:
      config: The configuration.
      terminal: Shows progress; by default the standard output of process 0.
      clock: Returns seconds.
      trackers: Names of trackers, which replace `config.trackers`, and `Tracker` objects.
      **options: Fields of `RunConfig`, which replace fields of `config`.

    Raises:
      UserError: If an option is wrong, or only the `Trainer` supports it.
    """

    __signature__ = KeywordsSignature(LoopOptions)

    def __init__(
        self,
        config: RunConfig | None = None,
        *,
        terminal: Terminal | None = None,
        clock: Callable[[], float] = time.monotonic,
        trackers: Sequence[Tracker | str] | None = None,
        **options: Unpack[LoopOptions],
    ) -> None:
        refused = [name for name, row in OPTIONS.items() if row.option.in_loops]
        config = with_options(
            config or RunConfig(), options, Loop, begin=Loop.start, refused=refused
        )
        config, self._own_trackers = with_trackers(with_fixed_folder(config), trackers)
        check_config(config)
        refuse_evaluator("a Loop")
        configure_backend(config)
        self.placement = make_placement(config)
        self.config = resolve(config, batch_shards=self.placement.batch_shards)
        self.terminal = terminal or terminal_of(config)
        self.step = 0
        """Number of steps of the whole run that `end_step` has recorded."""
        self._compiler_options = step_options(self.config, self.placement)
        self._clock = clock
        self._stack = contextlib.ExitStack()
        self._entered = False
        self._parts: StartedLoop | None = None
        # The step that this start resumed from; the last step whose boundary is done.
        self.first_step = self._done = 0
        self._steps = 0  # step functions that were compiled
        self._over = False
        self._evaluated: set[tuple[str, int]] = set()  # splits and steps since the start
        self.stopped_early = False
        """Whether the loop ended before its last step without `stop()`, for example by `break`."""
        self._bar = contextlib.ExitStack()

    @property
    def mesh(self) -> Mesh | None:
        """The device mesh; None under the default strategy."""
        return self.placement.mesh

    @property
    def started(self) -> bool:
        """Whether `start` has been called."""
        return self._parts is not None

    @property
    def total(self) -> int:
        """Steps of the whole run."""
        return self._started().run.schedule.total

    # -- beginning and end ---------------------------------------------------------------------

    def __enter__(self) -> "Loop":
        self._entered = True
        self._stack.enter_context(failures.work_in_progress(failures.TRAINING))
        self._stack.enter_context(use_placement(self.placement))
        return self

    def start(
        self,
        init: Init,
        *,
        train: Any = None,
        rules: Sequence[Rule] = (),
        augment: Augment | None = None,
        callbacks: Callbacks | None = None,
    ) -> TrainState:
        """Returns the state to begin with: the workdir's newest checkpoint, or the initial one.

        Args:
          init: key -> the parts of the state by name, "params" among them. It is compiled, so each
            array is initialized directly into its sharding.
          train: A dataset or arrays, for `batches`.
          rules: Sharding rules; the first that matches a path counts.
          augment: (example, NumPy generator) -> example.
          callbacks: Functions by event, or a list of callback objects. A loop has the events
            `fit_start`, `evaluation` (`log_evaluation`), `checkpoint` and `fit_end`.

        Raises:
          UserError: If an argument is wrong, or this is not the first call.
        """
        if not self._entered or self._parts is not None:
            raise UserError("start() is called once, within `with Loop(...) as loop:`")
        runner = CallbackRunner(self, callbacks or {}, state_at_steps=True)
        runner.check_events({"step", "log", "epoch_end"}, "a Loop")
        keys = [jax.random.key(derive_seed(self.config.seed, p)) for p in _PURPOSES]
        begin = make_initial_state(init)
        abstract = jax.eval_shape(begin, *keys)
        layout = Layout(abstract, self.placement, rules, self.config.sharding)
        initial = initial_values(lambda *keys: begin(*keys).opt_state, *keys)
        placed = PlacedState(abstract, layout.shardings, initial)
        run = RunSession.open(
            self._stack,
            self.config,
            {"train": train},
            placed,
            self.terminal,
            self._clock,
            runner,
            self._own_trackers,
            {"init": code_record(init), "augment": code_record(augment)},
        )
        options = options_for_one_run(self.placement.devices[0].platform)
        program = jax.jit(begin, out_shardings=layout.shardings, compiler_options=options)
        state, is_restored = first_state(
            run, placed, lambda: InitialState(call_together(program, *keys))
        )
        in_flight = max_in_flight(self.placement)
        saved = int(state.step) if is_restored and not run.from_snapshot else None
        self._parts = parts = StartedLoop(run, layout, augment, state, saved, in_flight)
        self.step = self.first_step = self._done = int(state.step)
        run.logger.begin(self.step, self.placement, is_new=run.is_new)
        self._stack.enter_context(run.record_outcome())
        evaluates = self.config.eval_every_steps is not None  # the option of `should_evaluate`
        run.name_unsaved_evaluation(self.step, evaluates=evaluates)
        runner(CallbackEvent.FIT_START, self.step)
        if run.should_save_at_start(self.step):
            parts.save(self.step, parts.evaluate(self.step))
        return state

    def __exit__(self, *error: Any) -> bool | None:
        self._bar.close()
        try:
            if error[0] is None and self._parts is not None:
                self._finish(self._parts)
        except BaseException as own:
            if not self._stack.__exit__(type(own), own, own.__traceback__):
                raise
            return None
        finally:
            self._over = True
        return self._stack.__exit__(*error)

    def _finish(self, parts: StartedLoop) -> None:
        run = parts.run
        self._boundary()
        parts.reader.flush()
        # If a step was run and not recorded, it has consumed even the first state.
        nothing = self.step == self.first_step and parts.state.step.is_deleted()
        if self.step != parts.saved and not nothing:
            parts.save(self.step, parts.evaluate(self.step))
        run.wait_for_save()
        self.stopped_early = self.step < run.schedule.total
        if self.stopped_early:
            why = f"the loop was left after {self.step} of {run.schedule.total} steps"
            run.logger.log_end(Status.PREEMPTED, self.step, why, saved=self.step == parts.saved)
        else:
            run.logger.log_end(Status.FINISHED, self.step)
        run.callbacks(CallbackEvent.FIT_END, self.step)

    # -- data ----------------------------------------------------------------------------------

    def batches(self) -> Iterator[PyTree]:
        """Yields the training batches up to the end of the run, placed on the mesh.

        Logging, checkpoints and stops happen between two batches, so record each step by
        `end_step` before taking the next batch.

        Raises:
          UserError: If `start` got no dataset, or a step was not recorded exactly once.
        """
        parts, config = self._started(), self.config
        batches = train_batches(
            parts.run.train_data,
            config.resolved_batch_size,
            self.placement.batch,
            seed=config.seed,
            shuffle=config.shuffle,
            start=self.step,
            stop=parts.run.schedule.total,
            augment=parts.augment,
            threads=config.data_threads,
            workers=config.data_workers,
            announce=self.terminal.line,
            progress=parts.run.stream_progress,
            skipped=parts.run.config.skipped_batches,
        )
        # Also at the end of the loop, because a traceback may keep this generator alive.
        self._stack.callback(batches.close)
        with contextlib.closing(batches):
            for _ in self.steps():
                yield rows_of(next_batch(batches, parts.state, parts.run.logger.timer.count_wait))

    def steps(self) -> Iterator[int]:
        """Yields the numbers of the steps to make, from 1; like `batches`, without a dataset.

        Raises:
          UserError: If a step was not recorded exactly once.
        """
        run = self._started().run
        self._boundary()  # an earlier iteration may have ended after a step
        run.logger.timer.restart(self.step)
        # The bar belongs to the loop, because this generator may outlive it.
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
        """Returns an iterator over the batches of a dataset, in order; each example occurs once.

        Args:
          data: A dataset, or arrays in a tuple or dictionary.

        Returns:
          Pairs (rows, mask), placed on the mesh. The mask, (B,), is 0 for rows that pad the last
          batch: a weight for `weighted_mean`.
        """
        batches, _ = ordered_batches(
            run_dataset(data, self.config),
            self.config.eval_batch_size or self.config.resolved_batch_size,
            self.placement.batch,
            threads=self.config.data_threads,
        )
        return batches

    def eval_key(self, number: int) -> jax.Array:
        """Returns the random key of batch `number` of an evaluation, counted from 0.

        It is the same in each evaluation.

        Args:
          number: Number of the batch.
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
            counts the step and derives the key. Inside the function, arrays offloaded to host
            memory are in device memory.

        Returns:
          (state, batch) -> (state, output). The state is donated: use the returned one.
        """
        parts = self._started()
        self._steps += 1
        parts.run.add_function("step" + (f" {self._steps}" * (self._steps > 1)), function)
        abstract = jax.tree.map(jax.typeof, parts.state)
        plan = plan_loop_step(
            function,
            abstract,
            parts.layout,
            self.placement,
            self._compiler_options,
            self.config.log_every,
        )
        return LoopStep(self, plan)

    def gather_params(self, params: PyTree) -> PyTree:
        """Returns the parameters of the state, gathered if the strategy splits them.

        Call it in a step. Without it XLA may move activations instead of parameters, which costs
        less for small batches and more for large ones.

        Args:
          params: The parameters of the state that the step receives.

        Raises:
          UserError: Before `start`.
        """
        if self._parts is None:
            raise UserError("the loop has not begun: call start(init) first")
        return self._parts.layout.gather(params)

    def compile(self, function: Callable[..., PyTree]) -> Callable[..., PyTree]:
        """Compiles any other function of arrays.

        Args:
          function: A function of arrays, such as the computation of an evaluation.

        Returns:
          The function, compiled; each process gets its whole result. It raises `NotReducedError` if
          the result holds a `PerReplica`.
        """

        def reduced(*args: PyTree) -> PyTree:
            found = function(*args)
            if replicas_in(found):
                raise NotReducedError(
                    "the function of compile() returns a PerReplica, but each process must get the "
                    "whole result: reduce the values in the function, or use jax.jit, which "
                    "leaves them on their devices"
                )
            return found

        check = partial(check_partitioned, placement=self.placement)
        jitted = Together(jax.jit(reduced, out_shardings=self.placement.replicated), check=check)

        def call(*args: PyTree) -> PyTree:
            with use_placement(self.placement):
                return jitted(*jax.tree.map(_in_device_memory, args))

        return call

    # -- steps and evaluations -----------------------------------------------------------------

    def end_step(self, state: TrainState, output: StepOutput) -> None:
        """Records a step: its state, which is saved when that is due, and its output.

        Args:
          state: The state that the compiled step returned.
          output: The output that it returned; it is fetched and logged some steps later.

        Raises:
          NonFiniteError: If a fetched loss or state is NaN or infinite.
          UserError: If an argument is wrong, or all steps of the run are done.
        """
        parts = self._started()
        total = parts.run.schedule.total
        if self.step >= total:
            raise UserError(f"all {total} steps of the run are done: iterate over batches()")
        if not isinstance(output, StepOutput):
            raise UserError(
                f"end_step(state, output) is given a {type(output).__name__}: the output is the "
                "second value that the compiled step returns"
            )
        check_not_donated(state, self.step)
        if self.step == self.first_step:
            parts.run.after_first_step()
        self.step += 1
        parts.state = state
        parts.reader.add([self.step], output)

    def should_evaluate(self) -> bool:
        """Returns whether `eval_every_steps` asks for an evaluation after the last step."""
        return self._started().run.schedule.is_eval_step(self.step)

    def log_evaluation(self, values: Mapping[str, Any], split: str = "eval") -> None:
        """Logs the metrics of an evaluation after the last step. All processes call it.

        Metrics of "eval" that are logged before the next batch also rank this step's checkpoint.

        Args:
          values: Scalars by name.
          split: "eval" or "test".

        Raises:
          NonFiniteError: If the loss is NaN or infinite.
          UserError: If the split is unknown or was already logged after this step, or `best_metric`
            is missing.
        """
        parts = self._started()
        if split not in (Split.EVAL, Split.TEST):
            raise UserError(f"there is no split {split!r}.{did_you_mean(split, ['eval', 'test'])}")
        parts.reader.flush()
        metrics = as_floats(values)
        if not math.isfinite(metrics.get("loss", 0.0)):
            what = f"step {self.step}: the {split} loss is {metrics['loss']}"
            raise NonFiniteError(what, self.step)
        if (split, self.step) in self._evaluated:
            raise UserError(
                f"log_evaluation() was called twice for {split} after step {self.step}: give all "
                "of its metrics at once"
            )
        if split == Split.EVAL:
            metrics = parts.run.callbacks.with_added(CallbackEvent.EVALUATION, self.step, metrics)
            check_best(self.config, metrics, first=not self._evaluated, log=self.terminal.line)
            parts.last_eval = self.step, metrics
        self._evaluated.add((split, self.step))
        process_group.broadcast(None)  # names a call that a single process makes
        logger = parts.run.logger
        if not logger.earlier_metrics(Split(split), self.step):
            logger.log_evaluation(Split(split), self.step, metrics)

    def log(
        self, media: Mapping[str, Media], step: int | None = None, *, split: str = "train"
    ) -> None:
        """Logs images, texts, histograms, tables and figures, without waiting for the devices.

        They are written to `media.jsonl` and `media/` of the workdir, and passed to the trackers,
        by process 0. All processes may call it.

        Args:
          media: Name to `Image`, `Text`, `Histogram`, `Table` or `Figure`.
          step: The step; by default the step of the callback, or the last one.
          split: "train", "eval" or "test".

        Raises:
          UserError: If a name or an item is not valid, or no run is in progress.
        """
        of_split = checked_split(split)
        self.logger.trackers.log(media, self.step if step is None else step, of_split)

    def log_artifact(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        """Passes a file to the trackers that keep files: W&B, MLflow and Trackio.

        It is read later, so it must not change until the run has ended.

        Args:
          path: The path of the file.
          name: The name of the artifact; by default the name of the file.

        Raises:
          UserError: If there is no such file, or no run is in progress.
        """
        self.logger.trackers.log_artifact(path, name)

    def stop(self) -> None:
        """Makes the last recorded step the last one of the run. All processes call it.

        A later start then finds the run finished, unless it asks for more steps.
        """
        run = self._started().run
        run.schedule.total = self.step
        run.callbacks.stop_requested = True

    def _boundary(self) -> None:
        """Does what is due after the last step, once."""
        parts = self._started()
        if self._done == self.step:
            return
        self._done = self.step
        run = parts.run
        preempted = run.signals.stop_requested()
        asked = bool(run.signals.requests.pending)
        due = run.schedule.due(self.step, preempted=preempted, asked=asked)
        if due is not None or parts.evaluate(self.step):
            parts.pass_step(self.step, due or Due())

    @property
    def logger(self) -> RunLogger:
        """The logger of the run."""
        return self._started().run.logger

    def _started(self) -> StartedLoop:
        if self._over:
            raise UserError("the loop is over: it ends with its `with`")
        if self._parts is None:
            raise UserError("the loop has not begun: call start(init) first")
        return self._parts

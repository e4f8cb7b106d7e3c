"""The `Trainer` and its training loop."""

import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Never

import optax

from spmdtrain.adapters.base import Function, describe_modes
from spmdtrain.checkpoints.listing import LATEST
from spmdtrain.checkpoints.weights.weight_map import WeightMap
from spmdtrain.config.run_config import RunConfig
from spmdtrain.data.datasets import Dataset
from spmdtrain.data.sampling import Augment
from spmdtrain.data.streams import StreamProgress
from spmdtrain.distributed.code_digest import code_record
from spmdtrain.distributed.progress import Phase, phase
from spmdtrain.document.terminal import Terminal
from spmdtrain.errors import OwnExit, PreemptedExit, StateError, UserError
from spmdtrain.record.run_files import Split
from spmdtrain.sharding.mesh import resolve
from spmdtrain.sharding.placement import use_placement
from spmdtrain.sharding.rules import AxisRules, Rule
from spmdtrain.step.compile import Programs
from spmdtrain.step.gradients import Reduction
from spmdtrain.trackers.base import Tracker
from spmdtrain.trackers.run_trackers import RunTrackers
from spmdtrain.train import evaluator, later_fit, overrides, roles
from spmdtrain.train.boundary_actions import BoundaryActions
from spmdtrain.train.callbacks import (
    AddableMetrics,
    CallbackEvent,
    CallbackRunner,
    Callbacks,
    FrozenMetrics,
)
from spmdtrain.train.constructors import TrainerConstructors
from spmdtrain.train.epochs import EpochSums, FitResult
from spmdtrain.train.executor import DeviceExamples, Executor, ExecutorInputs, MakeExecutor
from spmdtrain.train.init_state import ValueLoader, at_step_zero
from spmdtrain.train.loop_checks import check_best
from spmdtrain.train.media_log import MediaLogger
from spmdtrain.train.metrics_reader import MetricsReader
from spmdtrain.train.model_runner import ModelRunner
from spmdtrain.train.profiler import profiled_steps
from spmdtrain.train.run_logger import Metrics, no_metrics
from spmdtrain.train.session import RunSession
from spmdtrain.train.starting_state import first_state

PyTree = Any


class Trainer(ModelRunner, MediaLogger, TrainerConstructors):
    """Trains, evaluates and predicts with one model on one device mesh.

    Args:
      model: An nnx module, a function of `rngs` that returns one (its parameters are then
        initialized directly into their shardings), a `LinenModel`, a `KerasModel` or a
        `FunctionModel`.
      objective: (model, batch) -> per-example values by name, "loss" among them. It may declare
        more arguments: `rngs`, `key`, `mask`.
      optimizer: The optax transformation that updates the parameters.
      predict: (model, batch) -> predictions with leading dim B; by default the model's output.
      augment: (example, NumPy generator) -> an augmented example; called on the host.
      rules: Sharding rules; the first one that matches a parameter's path applies.
      axis_rules: Maps the names of the model's annotations to mesh axes.
      reduction: (gradients of a device's part of the batch, mesh axes) -> their sums over the
        axes; called under `shard_map`. By default XLA or a built-in function reduces them.
      callbacks: Functions by `CallbackEvent`, or a list of callback objects.
      media: (model, batch) -> media by name, logged at each evaluation for its first batch.
      trackers: Names of trackers, which replace `config.trackers`, and `Tracker` objects.
      weight_map: Rules by which arrays of `init_from` become those of the model (`WeightRule`).
      config: The configuration; without a `workdir` nothing is written.
      terminal: Shows progress; by default the standard output of process 0.
      clock: Returns seconds.
      init_timeout: Seconds to wait for the other tasks under parameter servers.
      **options: Fields of `RunConfig`, which replace fields of `config`, except `learning_rate`,
        its scaling and table, and `data_dir`.

    Raises:
      UserError: If an argument or option is wrong.
    """

    def __init__(
        self,
        *,
        model: Any,
        objective: Function,
        optimizer: optax.GradientTransformation,
        predict: Function | None = None,
        augment: Augment | None = None,
        rules: Sequence[Rule] = (),
        axis_rules: AxisRules | None = None,
        reduction: Reduction | None = None,
        callbacks: Callbacks | None = None,
        media: Function | None = None,
        trackers: Sequence[Tracker | str] | None = None,
        weight_map: WeightMap = (),
        config: RunConfig | None = None,
        terminal: Terminal | None = None,
        clock: Callable[[], float] = time.monotonic,
        init_timeout: float = 300.0,
        **options: Any,
    ) -> None:
        config = overrides.validate_trainer_options(config or RunConfig(), options, Trainer)
        config, self._own_trackers = overrides.with_trackers(config, trackers)
        super().__init__(
            roles.join_job(config, init_timeout, terminal),
            terminal,
            model=model,
            objective=objective,
            optimizer=optimizer,
            predict=predict,
            rules=rules,
            axis_rules=axis_rules,
            reduction=reduction,
            media=media,
            weight_map=weight_map,
        )
        overrides.check_augment(augment, self.config)
        self._augment, self._code["augment"] = augment, code_record(augment)
        self._clock, self._init_timeout = clock, init_timeout
        at_steps = self._backend.state_at_steps
        self._callbacks = CallbackRunner(self, callbacks or {}, state_at_steps=at_steps)
        self._programs = Programs(self.functions, self.placement, self.config)
        # Of earlier fits: sums of an unfinished epoch, written metrics, the position in a stream.
        self._epoch_sums, self._written = EpochSums(), no_metrics()
        self._stream_progress = StreamProgress()
        self._all_examples = DeviceExamples(self.placement, self.terminal)
        self._trackers: RunTrackers | None = None  # during a fit

    def _check_readable(self) -> None:
        self._callbacks.check_readable()

    def stop(self) -> None:
        """Ends the run after the step in progress, as if it were the last one.

        With several processes, call it in a callback: process 0 decides for all.

        Raises:
          UserError: If several processes train and this is not a callback.
        """
        self._callbacks.request_stop()

    @property
    def _trackers_and_step(self) -> tuple[RunTrackers, int]:
        if self._trackers is None:
            raise UserError("log() was called outside of fit: call event.log() in a callback")
        return self._trackers, self._callbacks.step

    # -- fit -----------------------------------------------------------------------------------

    def fit(
        self,
        train: Any = overrides.REQUIRED,
        *others: Never,
        validation: Any = None,
        test: Any = None,
        epochs: int | None = None,
        steps: int | None = None,
        global_batch_size: int | None = None,
        batch_size_per_device: int | None = None,
        restart: bool = False,
        **unknown: Never,
    ) -> FitResult:
        """Trains until the run has reached `epochs` or `steps` in total.

        It continues from an earlier fit, else from the workdir's newest checkpoint, else from the
        initial state. In an evaluator task of TF_CONFIG, it evaluates the workdir's checkpoints
        until the training ends, and exits the process.

        Args:
          train: A dataset, or arrays in a tuple or dictionary; so are `validation` and `test`.
          *others: None; inputs and targets are one dataset, `fit((x, y))`.
          validation: Evaluated at the cadence of the configuration.
          test: Evaluated once, at the end.
          epochs: Total number of epochs.
          steps: Total number of steps, instead of `epochs`.
          global_batch_size: Number of examples of a step over all devices.
          batch_size_per_device: Number of examples of a step on each device, instead of
            `global_batch_size`.
          restart: Whether to start a new run from the model and the optimizer's state of an earlier
            fit; steps and data start from 0. Needed for other data or batch sizes.
          **unknown: None; another keyword is an error that suggests the right one.

        Returns:
          The last metrics and the history.

        Raises:
          StateError: `NonFiniteError` if the loss or the state is NaN or infinite, `ReplicaError`
            if copies of replicated data differ between processes, `DeviceFaultError` if a device
            computes other gradients than others.
          PreemptedExit: After SIGTERM, SIGUSR1 or Ctrl-C; the state is saved if there is a workdir.
            Not in a single process without a workdir, where Ctrl-C is a KeyboardInterrupt.
          OwnExit: A `SystemExit`: if `sys.exit` is called during the fit, and in an evaluator task
            after the training has ended.
          UserError: If an argument is wrong.
        """
        overrides.check_arguments(self.fit, train, others, unknown)
        totals = epochs, steps, global_batch_size, batch_size_per_device
        config = overrides.with_totals(self.config, *totals)
        if roles.is_evaluator():
            self.config = config
            raise OwnExit(evaluator.follow(self, self.config, train, validation))
        self._backend.begin_fit(self._init_timeout, has_fitted=self._identity is not None)
        config = resolve(config, batch_shards=self.placement.batch_shards)
        data = {"train": train, "validation": validation, "test": test}
        with contextlib.ExitStack() as stack:
            stack.enter_context(use_placement(self.placement))
            given = self.terminal, self._clock, self._own_trackers, self._code
            may_add = self._callbacks.may_add_metrics
            run = RunSession.open(
                stack, config, data, self.functions, *given, may_add_metrics=may_add
            )
            stack.callback(self._end_fit)
            self._fitting, self._trackers = True, run.logger.trackers
            stack.callback(self._programs.wait)  # a background compilation ends before `fit` does
            make_executor = stack.enter_context(self._backend.open(self._init_timeout))
            before = self._state, self._identity
            self._start(run, stack, restart=restart)
            first = self._state
            stack.enter_context(run.record_outcome())
            try:
                self._train(run, make_executor)
                self._finish(run)
            except StateError:
                self._state = None  # unusable: the next fit restores a checkpoint or initializes
                raise
            except Exception as error:
                # If no step was run, forget this run, so that the next fit may have other data.
                if self._state is first and not isinstance(error, PreemptedExit):
                    self._state, self._identity = before
                raise
        return run.epochs.result(self.step)

    def _start(self, run: RunSession, stack: contextlib.ExitStack, *, restart: bool) -> None:
        """Sets the first state: of an earlier fit, restored from a checkpoint, or initialized."""
        run.schedule.stops_at_epochs = self._callbacks.has(CallbackEvent.EPOCH_END)
        watched = any(map(self._callbacks.has, (CallbackEvent.STEP, CallbackEvent.LOG)))
        data = run.train_data, self._augment
        dispatch = self._programs.choose_dispatch(*data, run.config, is_watched=watched)
        run.schedule.set_dispatch(dispatch)
        if run.validation is not None:
            self._evaluation.check(run.validation, run.eval_batch_size)
        if restart:
            later_fit.check_no_checkpoints(run)
        if self.config.checkpoint != LATEST and not self.config.init_from:
            raise UserError(
                f"checkpoint={self.config.checkpoint} needs init_from: a run itself always resumes "
                "from its latest checkpoint"
            )
        run.callback_states = self._callbacks.begin(from_step_zero=restart or self._state is None)
        self._restored = None  # `evaluate` and `predict` use the trained state from here on
        if self._state is None:
            self._backend.compile_ahead(run, self._programs, self.functions, self._augment)
            values = ValueLoader(self.functions, self.config, self._weight_map, self.terminal)
            functions = self.functions, values.initial_state, values.base_weights
            self._state, _ = first_state(run, *functions)
        elif restart:
            self._state = at_step_zero(self._state, self.functions.shardings)
            run.branch(-1)
        elif self._identity is not None:
            later_fit.check_continues(run, self._identity, self.step)
            run.is_new = False
            run.continue_from(self._identity)
            run.epochs.sums, run.logger.written = self._epoch_sums, self._written
            run.stream_progress = self._stream_progress
        stack.callback(self._keep_metrics, run)
        self._identity = run.identity
        run.logger.begin(
            self.step, self.placement, describe_modes(self._adapter), is_new=run.is_new
        )

    def _end_fit(self) -> None:
        self._fitting, self._trackers = False, None

    def _keep_metrics(self, run: RunSession) -> None:
        self._epoch_sums, self._written = run.epochs.sums, run.logger.written
        self._stream_progress = run.stream_progress

    def _train(self, run: RunSession, make_executor: MakeExecutor) -> None:
        first, schedule = self.step, run.schedule
        self._before_first_step(run, first)
        if first >= schedule.total:
            return
        executor = make_executor(self._executor_inputs(run))
        reader = MetricsReader(
            run, executor.max_in_flight, lambda: executor.sync(self._current), self._log
        )
        actions = self._boundary_actions(run, executor, reader)
        with (
            self.terminal.progress("train", done=first, total=schedule.total),
            profiled_steps(run.config, first, self.terminal.line) as profile,
        ):
            for steps in schedule.dispatches(first):  # the range of steps of one dispatch
                step = steps[-1]
                program, batch = executor.load(steps, self._current)
                executor.check_devices(step, self._current, batch)
                profile.before(steps[0])
                with phase(Phase.STEP):
                    self._state, output = program(self._current, batch)
                profile.after(step, output)
                if steps[0] == first + 1:
                    run.check_placed(self._current, self.functions, "after the first step")
                    run.after_first_step()
                reader.add(steps, output)  # fetched later: the host does not wait for this step
                self._callbacks(CallbackEvent.STEP, step)
                if self._callbacks.stop_requested:
                    schedule.total = executor.stop_dispatch(step)
                due = run.due(step)
                # With parameter servers, later steps may be pending: first the loop reads them too.
                if due and executor.stop_dispatch(step) == step:
                    run.boundary(step, due, actions)

    def _before_first_step(self, run: RunSession, first: int) -> None:
        """Calls the first callbacks, saves step 0, and runs an evaluation that was interrupted."""
        run.name_unsaved_evaluation(first, evaluates=run.validation is not None)
        self._callbacks(CallbackEvent.FIT_START, first)
        if run.should_save_at_start(first):
            # Evaluated before the save, which records the metrics. A signal ends the run here.
            evaluates = run.config.eval_at_checkpoints
            self._save(run, 0, self._run_validation(run, 0) if evaluates else None)
        if run.missed_evaluation(first):  # a signal interrupted it before this start
            metrics = self._run_validation(run, first)
            if metrics and run.checkpoints and run.checkpoints.add_metrics(first, metrics):
                self._callbacks(CallbackEvent.CHECKPOINT, first, FrozenMetrics(metrics))
        if self._callbacks.stop_requested:
            run.schedule.total = first
        if first > (total := run.schedule.total):
            self.terminal.line(f"nothing to do: the run is at step {first} of {total} requested")

    def _boundary_actions(
        self, run: RunSession, executor: Executor, reader: MetricsReader
    ) -> BoundaryActions:
        """Returns the actions of this trainer at the boundary between two steps."""

        def flush() -> None:
            self._state = executor.sync(self._current)
            reader.flush()

        def end_epoch(step: int, evaluates: bool) -> None:
            written = run.logger.written[Split.EPOCH].get(step, {})
            means = FrozenMetrics({"epoch": run.epochs.completed(step)} | written)
            last, event = step == run.schedule.total, CallbackEvent.EPOCH_END
            self._callbacks(event, step, means, evaluates=evaluates, is_last=last)

        def evaluate(step: int, is_due: bool) -> Metrics | None:
            if not is_due:
                return None
            try:
                return self._run_validation(run, step)
            except PreemptedExit:  # `RunSession.boundary` saves first, and raises it again
                return None

        return BoundaryActions(
            flush=flush,
            end_epoch=end_epoch,
            evaluate=evaluate,
            save=functools.partial(self._save, run),
            hash_last=reader.hash_last,
            report=executor.report,
            stop_requested=lambda: self._callbacks.stop_requested,
        )

    def _finish(self, run: RunSession) -> None:
        found = run.finish(self.step, lambda data: self._evaluate_split(run, Split.TEST, data))
        self._callbacks(CallbackEvent.FIT_END, self.step, FrozenMetrics(found))

    def _executor_inputs(self, run: RunSession) -> ExecutorInputs:
        """Returns the inputs of the executor of a run."""
        return ExecutorInputs(
            run=run,
            state=self._current,
            functions=self.functions,
            make_functions=self._make_functions,
            programs=self._programs,
            placement=self.placement,
            augment=self._augment,
            all_examples=self._all_examples,
        )

    def _log(self, step: int, metrics: Mapping[str, float]) -> Metrics:
        """Calls the log callbacks; returns the metrics, including the ones that they added."""
        reported = AddableMetrics(metrics)
        self._callbacks(CallbackEvent.LOG, step, reported)
        return reported.with_added()

    def _run_validation(self, run: RunSession, step: int) -> Metrics | None:
        if run.validation is None:
            return None
        reported = AddableMetrics(self._evaluate_split(run, Split.EVAL, run.validation))
        inputs = self._variables(), run.validation, run.eval_batch_size
        is_written = step in run.logger.written[Split.EVAL]  # before an end without a save
        if not is_written and (media := self._evaluation.media(*inputs)) is not None:
            run.logger.trackers.media(step, Split.EVAL, media)
        self._callbacks(CallbackEvent.EVALUATION, step, reported)
        metrics = reported.with_added()
        check_best(self.config, metrics, first=False, log=self.terminal.line)
        run.logger.log_evaluation(Split.EVAL, step, metrics, is_written=is_written)
        return metrics

    def _evaluate_split(self, run: RunSession, split: Split, dataset: Dataset) -> Metrics:
        metrics = self._evaluate(dataset, run.eval_batch_size, run.signals.stop_if_received)
        run.check_finite_loss(split, self.step, metrics)
        return metrics

    def _save(self, run: RunSession, step: int, metrics: Metrics | None) -> None:
        run.save(self._current, step, metrics, stopped=self._callbacks.stop_requested)
        if run.checkpoints is not None:
            self._callbacks(CallbackEvent.CHECKPOINT, step, FrozenMetrics(metrics or {}))

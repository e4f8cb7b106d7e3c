"""The heart: `Trainer`, and one loop that trains, looks, saves and stops."""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from spmdtrain.adapters.as_adapter import as_adapter
from spmdtrain.adapters.base import Function, Variables
from spmdtrain.checkpoints.listing import LATEST
from spmdtrain.checkpoints.restore import broadcast_source, list_checkpoints
from spmdtrain.checkpoints.run_identity import Identity, check_same_classes, check_same_run
from spmdtrain.config import (
    DEFAULT_GLOBAL_BATCH_SIZE,
    MeshSpec,
    Purpose,
    RunConfig,
    derive_seed,
)
from spmdtrain.config_checks import resolve, validate_trainer_options
from spmdtrain.data.datasets import Dataset, as_dataset, classes_of
from spmdtrain.data.loader import IndexedBatch, abstract_batch, on_devices, ordered_batches
from spmdtrain.data.sampling import Augment, padded_size
from spmdtrain.distributed import failures, process_group
from spmdtrain.distributed.preemption import StopSignals
from spmdtrain.distributed.progress import Phase, phase
from spmdtrain.errors import NonFiniteError, PreemptedExit, StateError, UserError
from spmdtrain.files.run_files import Split, Status
from spmdtrain.sharding.layout import Rule, check_placed
from spmdtrain.sharding.placement import Placement, make_placement, use_placement
from spmdtrain.sharding.table import ShardingTable, tabulate
from spmdtrain.step.compile import Programs
from spmdtrain.step.reductions import Reduction
from spmdtrain.step.state import TrainState
from spmdtrain.step.train_step import StepFunctions, model_output
from spmdtrain.strategies import strategy
from spmdtrain.terminal import Terminal
from spmdtrain.train import evaluate, evaluator, roles
from spmdtrain.train.callbacks import (
    CallbackContext,
    CallbackEvent,
    Callbacks,
    Fixed,
    Reported,
    by_moment,
)
from spmdtrain.train.epochs import EpochSums, History
from spmdtrain.train.executor import ExecutorInputs, MakeExecutor, backend_of
from spmdtrain.train.experiment import Experiment
from spmdtrain.train.init_state import initial_state, load_values
from spmdtrain.train.metrics_reader import MetricsReader, max_in_flight
from spmdtrain.train.profiler import ProfiledSteps
from spmdtrain.train.run_logger import Metrics, nothing_told
from spmdtrain.train.session import RunSession

PyTree = Any


@dataclass(frozen=True)
class FitResult:
    """Result of a fit: the last step, the last metrics of each split, and the history."""

    step: int
    train: Metrics
    validation: Metrics
    test: Metrics
    history: History


class Trainer:
    """Trains, evaluates and predicts with one model on one device mesh.

    `model`: an nnx module, a function of `rngs` that makes one (it is then made in its place on
    the mesh), a `LinenModel`, a `KerasModel` or a `FunctionModel`. `objective(model, batch)`
    returns per-example values by name, "loss" among them. `options` are fields of `RunConfig`, and
    change `config`. `init_timeout`: seconds in which parameter servers have to come.
    Without a `workdir` nothing is written. Raises `UserError` for anything wrong in them.
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
        reduction: Reduction | None = None,
        callbacks: Callbacks | None = None,
        config: RunConfig | None = None,
        terminal: Terminal | None = None,
        clock: Callable[[], float] = time.monotonic,
        init_timeout: float = 300.0,
        **options: Any,
    ) -> None:
        self.config = roles.enter(
            validate_trainer_options(config or RunConfig(), options), init_timeout, terminal
        )
        by_servers = strategy(self.config.strategy).by_servers
        # The mesh of workers is not the chief's, which evaluates on all devices of its own.
        mesh = MeshSpec() if by_servers else self.config.mesh
        self.placement = make_placement(dataclasses.replace(self.config, mesh=mesh))
        self._state: TrainState | None = None  # once `fit` has begun
        self.terminal = terminal or Terminal(quiet=not process_group.is_chief())
        if augment is not None and self.config.data_on_device:
            raise UserError(
                "data_on_device is for examples as they are, and augment makes new ones on the host"
            )
        self._adapter = as_adapter(model)
        self._augment = augment
        self._callbacks = by_moment(callbacks or {})
        self._clock = clock
        self._init_timeout = init_timeout
        self.check_interrupt: Callable[[], None] = _nothing  # called at each batch of an evaluation
        self._stop_asked = False
        self._calling: CallbackEvent | None = None  # of the callback that is being called
        self._fitting = False
        self._identity: Identity | None = None  # what `state` was trained with
        # What fits before have counted of the current epoch, and written of the earlier ones.
        self._tally, self._told = EpochSums(), nothing_told()
        self._examples: tuple[Dataset, PyTree] | None = None  # all of a dataset's, on the devices
        self._restored: Variables | None = None  # what to evaluate with where nothing was trained
        self._restored_from: Identity | None = None  # what that was trained with
        self._in_flight = max_in_flight(self.placement)
        self._make_functions = functools.partial(
            _steps_of,
            {
                "adapter": self._adapter,
                "objective": objective,
                "predict": predict or model_output,
                "optimizer": optimizer,
                "rules": rules,
                "reduction": reduction,
            },
        )
        self.functions = self._make_functions(self.config, self.placement)
        self._programs = Programs(self.functions, self.placement, self.config)

    @classmethod
    def from_experiment(
        cls, experiment: Experiment, config: RunConfig, **keywords: Any
    ) -> "Trainer":
        """Returns the trainer of an experiment, without the parts that `fit` and `predict` use."""
        parts = {f.name: getattr(experiment, f.name) for f in dataclasses.fields(experiment)}
        for name in ("train", "validation", "test", "prompts", "format_predictions"):
            del parts[name]
        return cls(**{"config": config, **parts, **keywords})

    @property
    def mesh(self) -> Mesh | None:
        """The device mesh; None under the default strategy."""
        return self.placement.mesh

    @property
    def state(self) -> TrainState | None:
        """The state after `step` updates; None before `fit`.

        Raises `UserError` in a callback whose step has another state (see `CallbackEvent`).
        """
        self._check_readable()
        return self._state

    @state.setter
    def state(self, state: TrainState | None) -> None:
        self._check_readable()
        self._state = state

    def _check_readable(self) -> None:
        """Raise `UserError` in a callback whose step has another state than the newest."""
        late = (
            {CallbackEvent.LOG, CallbackEvent.STEP}
            if self.placement.strategy.by_servers
            else {CallbackEvent.LOG}
        )
        if self._calling in late:
            raise UserError(
                f"the state cannot be read in a {self._calling} callback: the outputs of a step "
                "are read later, when the trainer already holds the state of another step. "
                f"Read it at {', '.join(m for m in CallbackEvent if m not in late)}"
            )

    @property
    def step(self) -> int:
        """Updates made so far."""
        self._check_readable()
        return 0 if self._state is None else int(self._state.step)

    @property
    def model(self) -> Any:
        """The model with the values trained so far, in eval mode: an nnx module again, say."""
        return self._adapter.merge(self.functions.in_device_memory(self._variables()))

    @property
    def has_custom_reduction(self) -> bool:
        """Whether a reduction of the user's own is tried on the devices before the first step."""
        return self.functions.has_custom_reduction

    @property
    def compiler_options(self) -> Mapping[str, Any]:
        """What XLA is told of the steps, by the user and by us."""
        return self.functions.compiler_options

    @property
    def abstract_state(self) -> TrainState:
        """What the state will be: shapes and dtypes."""
        return self.functions.abstract_state

    def sharding_table(self) -> ShardingTable:
        """Where each array of the state lives and what it takes; nothing is allocated for it."""
        return tabulate(self.functions.abstract_state, self.functions.shardings)

    def unsharded_params(self) -> list[str]:
        """Parameters that the strategy would split, had they a dim that divides."""
        return self.functions.layout.unsharded_params()

    def compile_step(self, batch: PyTree) -> jax.stages.Compiled:
        """The train step, compiled for a global batch (arrays, or their shapes) and not run.

        Raises `UserError` where steps are not to be compiled.
        """
        with use_placement(self.placement):  # models may ask what they run under
            return self.trace_step(batch).lower().compile()

    def trace_step(self, batch: PyTree) -> jax.stages.Traced:
        """The same as JAX has traced it, for whoever reads or lowers it elsewhere.

        With `data_on_device` the batch is its examples' numbers and all examples, as `Rows`.
        """
        if not self.config.jit:
            raise UserError("jit is off: the steps are not compiled")
        by_number = isinstance(batch, IndexedBatch)
        with use_placement(self.placement):
            shapes = jax.eval_shape(lambda batch: batch, batch)
            self.functions.choose_reduction(shapes)
            traced: jax.stages.Traced = self.functions.train_program(by_number=by_number).trace(
                self.functions.abstract_state, shapes
            )
        return traced

    def stop(self) -> None:
        """End the run after the step being made, as if it were the last.

        Where several processes train, only their callbacks may call it: they stop together, if
        the first one says so. Raises `UserError`.
        """
        if process_group.count() > 1 and self._calling is None:
            raise UserError(
                "stop() outside of a callback: several processes can only stop where all of them "
                "ask the first, which is after their callbacks"
            )
        self._stop_asked = True

    # -- fit -----------------------------------------------------------------------------------

    def fit(
        self,
        train: Any,
        *,
        validation: Any = None,
        test: Any = None,
        epochs: int | None = None,
        steps: int | None = None,
        global_batch_size: int | None = None,
        batch_size_per_device: int | None = None,
        restart: bool = False,
    ) -> FitResult:
        """Train until `epochs` or `steps` in all have been made, going on from where it was.

        The splits are datasets, or arrays in a tuple or dictionary. Raises `NonFiniteError` when
        the loss or the state is no number any more, and `PreemptedExit` after SIGTERM or Ctrl-C,
        the state saved, where there is a workdir.
        `restart` keeps the model and the optimizer's state of an earlier fit, and counts steps,
        epochs and the position in the data from 0: for other data or another batch size.
        In an evaluator task of TF_CONFIG it evaluates the checkpoints of the workdir instead, until
        the training has ended, and then exits.
        """
        if roles.is_evaluator():
            self.config = self._configured(epochs, steps, global_batch_size, batch_size_per_device)
            raise SystemExit(evaluator.follow(self, self.config, train, validation))
        backend = backend_of(self.placement.strategy)
        backend.begin_fit(self._init_timeout, has_fitted=self._identity is not None)
        config = self._resolved(epochs, steps, global_batch_size, batch_size_per_device)
        splits = {"train": train, "validation": validation, "test": test}
        with contextlib.ExitStack() as stack:
            stack.enter_context(use_placement(self.placement))
            run = RunSession.open(stack, config, splits, self.functions, self.terminal, self._clock)
            stack.enter_context(failures.watch_failures(run.failed_elsewhere))
            stack.callback(setattr, self, "_fitting", False)
            self._fitting = True
            # Nothing is left compiling behind the back of whoever has called.
            stack.callback(self._programs.wait)
            make_executor = stack.enter_context(backend.open(self._init_timeout))
            before = self._state, self._identity
            self._start(run, stack, restart=restart)
            first = self._state
            stack.enter_context(run.record_outcome())
            try:
                self._loop(run, make_executor)
                self._finish(run)
            except StateError:
                self._state = None  # nothing to go on from: a next fit restores or starts anew
                raise
            except Exception as error:
                # Without a step the next fit may be of other data: nothing was trained on these.
                if self._state is first and not isinstance(error, PreemptedExit):
                    self._state, self._identity = before
                raise
        found = run.journal.latest
        train, seen, tested = found[Split.TRAIN], found[Split.EVAL], found[Split.TEST]
        return FitResult(self.step, train, seen, tested, run.epochs.history())

    def _start(self, run: RunSession, stack: contextlib.ExitStack, *, restart: bool) -> None:
        """Find the state to go on from: this run's newest checkpoint, else another's, else none."""
        run.stops_at_epochs = bool(self._callbacks[CallbackEvent.EPOCH_END])
        run.check_dispatches()
        if restart:
            run.check_no_checkpoints()
        if self.config.checkpoint != LATEST and not self.config.init_from:
            raise UserError(
                f"checkpoint={self.config.checkpoint} needs init_from: a run itself always resumes "
                "from its latest checkpoint"
            )
        self._stop_asked = False
        self._restored = None  # from here on there is a state of its own
        if self._state is None:
            self._compile_ahead(run)
            with phase(Phase.RESTORE, 0):
                resumed = run.resume(self.functions)
                tell = self.terminal.line
                self._state = resumed or initial_state(self.functions, self.config, tell)
            self._check_placed("after the initialisation" if resumed is None else "as restored")
        elif restart:
            place: Any = self.functions.shardings.step
            zero = np.zeros((), np.int32)
            step = jax.make_array_from_callback((), place, lambda _: zero)
            self._state = dataclasses.replace(self._state, step=step)
        elif self._identity is not None:
            try:
                check_same_run(self._identity, run.identity, f"this trainer at step {self.step}")
            except UserError as error:
                raise UserError(
                    f"{error}. To keep the model and the optimizer's state and count steps from 0, "
                    "call fit(..., restart=True)"
                ) from None
            run.check_newest(self.step)
            run.epochs.tally, run.journal.told = self._tally, self._told
        stack.callback(self._keep_epochs, run)
        self._identity = run.identity
        run.journal.begin(self.step, self.placement)

    def _keep_epochs(self, run: RunSession) -> None:
        self._tally, self._told = run.epochs.tally, run.journal.told

    def _loop(self, run: RunSession, make_executor: MakeExecutor) -> None:
        config, first = run.config, self.step
        assert self._state is not None and config.global_batch_size is not None
        assert run.train is not None
        self._call(CallbackEvent.FIT_START, first)
        if run.start_due(first):
            # Before the save, which records the metrics. A signal ends the run here.
            evaluates = config.eval_at_checkpoints and run.validation is not None
            self._save(run, 0, self._run_validation(run, 0) if evaluates else None)
        self._resume_missed_eval(run, first)
        if self._stop_asked:
            run.total = first
        if first > run.total:
            self.terminal.line(f"step {first} is past the {run.total} asked for")
        if first >= run.total:
            return
        executor = make_executor(self._executor_inputs(run))

        def newest() -> TrainState:
            assert self._state is not None
            return executor.sync(self._state)

        late = MetricsReader(run, self.placement, newest, self._logged)
        # Of several processes, the first: the others' traces would come into the same files.
        profiled = config.profile_range() if process_group.is_chief() else None
        profile = ProfiledSteps(profiled, config.workdir)
        if profiled and first >= profiled[1]:
            self.terminal.line(f"nothing to profile: step {first} is past {config.profile_steps}")

        with self.terminal.progress("train", done=first, total=run.total), profile:
            for steps in run.dispatches(first):  # one step, or several as one
                step = steps[-1]
                batch = executor.load(steps, self._state)
                profile.before(steps[0])
                self._state, output = executor.run(self._state, batch)
                profile.after(step, output)
                if steps[0] == first + 1:
                    self._check_placed("after the first step")
                    if run.checkpoints is not None:
                        run.checkpoints.get_ready()

                # Outputs are read some steps late, so that the host never waits for the devices.
                late.add(steps, output)
                self._call(CallbackEvent.STEP, step)

                if self._stop_asked:
                    run.total = executor.stop_dispatch(step)
                # From here on, what one process decides all have to: see `processes`.
                save = run.save_due(step)
                look = run.should_evaluate(step, saved=save)
                preempted = run.signals.asked()
                ended = run.epoch_end_due(step)
                if not (look or preempted or save or ended or step == run.total):
                    continue
                if executor.stop_dispatch(step) > step:
                    continue  # it is due when all that is under way is made
                self._state = executor.sync(self._state)

                # No state is judged or saved before its own finite flag is known.
                late.flush()
                if ended:
                    means = run.journal.told[Split.EPOCH].get(step, {})
                    self._call(CallbackEvent.EPOCH_END, step, Fixed(means))
                if self._stop_asked:  # in a callback since `look` was computed
                    run.total = step
                    look = run.should_evaluate(step, saved=save)
                # Evaluation comes before the save, which records how good the state is.
                seen = self._look(run, step) if look else None
                # While it was looked at, a callback or a signal may have asked to stop.
                if self._stop_asked:
                    run.total = step
                preempted = run.signals.asked()
                if preempted or save or run.save_due(step):
                    self._save(run, step, seen)
                if preempted:
                    run.await_save()  # what is told to be saved is saved
                if preempted or step == run.total:
                    executor.report()
                if preempted:
                    run.signals.stop_if_received()
                if step == run.total:
                    break
                run.journal.restart_timer(step)

    def _finish(self, run: RunSession) -> None:
        """The test split, once, on the final state; a finished run repeats its result."""
        step, journal = self.step, run.journal
        run.await_save()  # a failed save must be known before the run is called finished
        if run.test is not None and not journal.read_metrics(Split.TEST, step):
            journal.log_evaluation(Split.TEST, step, self._evaluated(run, Split.TEST, run.test))
        for split in (Split.TRAIN, Split.EVAL):
            if not journal.latest[split]:  # nothing was left to train: as an earlier start saw it
                journal.read_metrics(split, step)
        journal.end(Status.FINISHED, step)
        self._call(CallbackEvent.FIT_END, step, Fixed(journal.latest[Split.TEST]))

    # -- the loop's parts ----------------------------------------------------------------------

    def _executor_inputs(self, run: RunSession) -> ExecutorInputs:
        """Returns what the executor of a run is made from."""
        assert run.train is not None and self._state is not None
        return ExecutorInputs(
            run=run,
            state=self._state,
            functions=self.functions,
            make_functions=self._make_functions,
            programs=self._programs,
            placement=self.placement,
            augment=self._augment,
            all_examples=functools.partial(self._all_examples, run.config, run.train),
        )

    def _compile_ahead(self, run: RunSession) -> None:
        """Begin to compile what the loop will ask for, if it is going to make any steps."""
        config = run.config
        assert run.train is not None and config.global_batch_size is not None
        source = config.workdir and broadcast_source(list_checkpoints(config.workdir))
        first = source.steps[-1] if source and source.steps else 0
        by_others = self.placement.strategy.by_servers
        if first >= run.total or by_others or self.functions.has_custom_reduction:
            return
        steps = len(next(run.dispatches(first)))
        shapes = abstract_batch(
            run.train,
            config.global_batch_size,
            self.placement,
            augment=self._augment,
            steps=steps,
            by_number=config.data_on_device,
            by_step=config.jit,
            padded_to=config.padded_batch_size(self.placement.batch_shards),
        )
        self._programs.begin(steps, shapes)

    def _all_examples(self, config: RunConfig, dataset: Dataset) -> PyTree:
        """Returns all examples of a dataset on the devices; None without `data_on_device`."""
        if not config.data_on_device:
            return None
        if self._examples is None or self._examples[0] is not dataset:
            with self.terminal.waiting("putting the examples on the devices"), phase(Phase.LOAD):
                self._examples = dataset, on_devices(dataset, self.placement)
        return self._examples[1]

    def _check_placed(self, when: str) -> None:
        """What the rules ask for is what every leaf of the state has."""
        if self.config.jit:  # steps that are not compiled leave arrays where they compute them
            check_placed(self._state, self.functions.shardings, when)

    def _logged(self, step: int, metrics: Mapping[str, float]) -> Metrics:
        """Call the log callbacks; return the metrics with those that they have added."""
        found = Reported(metrics)
        self._call(CallbackEvent.LOG, step, found)
        return found.with_added()

    def _look(self, run: RunSession, step: int) -> Metrics | None:
        """Evaluate the validation split; None where a signal to stop cut it off."""
        try:
            return self._run_validation(run, step)
        except PreemptedExit:
            return None

    def _resume_missed_eval(self, run: RunSession, step: int) -> None:
        """Make the evaluation that a signal to stop cut off before this start."""
        told = run.config.workdir is None or run.journal.read_metrics(Split.EVAL, step)
        # A save by the clock may have been due there.
        saved = run.saves_by_count(step) or run.config.checkpoint_every_seconds is not None
        if step and run.should_evaluate(step, saved=saved) and not told:
            self._run_validation(run, step)

    def _run_validation(self, run: RunSession, step: int) -> Metrics:
        assert run.validation is not None
        found = Reported(self._evaluated(run, Split.EVAL, run.validation))
        self._call(CallbackEvent.EVALUATION, step, found)
        metrics = found.with_added()
        run.journal.log_evaluation(Split.EVAL, step, metrics)
        return metrics

    def _evaluated(self, run: RunSession, split: Split, dataset: Dataset) -> Metrics:
        config = run.config
        assert config.global_batch_size is not None
        batch_size = config.eval_batch_size or config.global_batch_size
        metrics = self._evaluate(dataset, batch_size, run.signals.stop_if_received)
        if not math.isfinite(metrics["loss"]):
            raise NonFiniteError(
                f"step {self.step}: the {split} loss is {metrics['loss']} (an example or the "
                "model's answer to it is not finite, or no example has a weight above 0)"
            )
        return metrics

    def _save(self, run: RunSession, step: int, metrics: Metrics | None) -> None:
        assert self._state is not None
        run.save(self._state, step, metrics, stopped=self._stop_asked)
        if run.checkpoints is not None:
            self._call(CallbackEvent.CHECKPOINT, step, Fixed(metrics or {}))

    def _call(self, moment: CallbackEvent, step: int, metrics: Metrics | None = None) -> None:
        self._calling = moment
        found = Fixed({}) if metrics is None else metrics
        try:
            for callback in self._callbacks[moment]:
                callback(CallbackContext(self, moment, step, found))
        finally:
            self._calling = None
        if self._callbacks[moment]:  # which all processes call, and process 0 decides
            self._stop_asked = process_group.broadcast(self._stop_asked)

    # -- evaluate and predict ------------------------------------------------------------------

    def evaluate(self, data: Any, *, global_batch_size: int | None = None) -> Metrics:
        """Weighted means over a dataset, by name; each example counts exactly once."""
        dataset = as_dataset(data)
        self._variables()  # of a checkpoint, say, which has a batch size
        batch_size = self._eval_batch(global_batch_size)
        evaluate.check_same_data(dataset, batch_size)
        with use_placement(self.placement):
            return self._evaluate(dataset, batch_size, self._what_stops())

    def predict(self, data: Any, *, global_batch_size: int | None = None) -> PyTree:
        """Predictions for a dataset: NumPy arrays of leading dim N, in its order."""
        dataset, variables = as_dataset(data), self._variables()
        self._check_classes(dataset)
        batch_size = self._eval_batch(global_batch_size)
        evaluate.check_same_data(dataset, batch_size)
        batches = self._ordered("predict", dataset, batch_size, self._what_stops())
        with use_placement(self.placement):
            return evaluate.predict(
                self.functions.predict,
                variables,
                batches,
                len(dataset),
                batch_size,
                in_flight=self._in_flight,
            )

    def restore(self, path: str | None = None, *, which: str | int | None = None) -> int:
        """Take the model to evaluate from a workdir, or one of its checkpoints/STEP; its step.

        Without a path: from the own workdir, else from `init_from`. `which` selects the checkpoint
        of a workdir: "latest", "best" or a step. By default it is "latest" of a path, and otherwise
        what the field `checkpoint` says.
        """
        if which is None:
            which = self.config.checkpoint if path is None else LATEST
        workdir, init_from = self.config.workdir, self.config.init_from
        if path is None:
            path = (
                init_from
                if workdir is None or not broadcast_source(list_checkpoints(workdir)).steps
                else workdir
            )
        if path is None:
            raise UserError(f"workdir {workdir} holds no checkpoint, and init_from is not given")
        tell = self.terminal.line
        self._restored, manifest = load_values(path, which, self.functions, self.config, tell)
        self._restored_from = manifest.identity
        return manifest.step

    def _evaluate(self, dataset: Dataset, batch_size: int, may_stop: Callable[[], None]) -> Metrics:
        variables = self._variables()
        self._check_classes(dataset)
        batches = self._ordered("evaluate", dataset, batch_size, may_stop)
        with phase(Phase.EVALUATE):
            return evaluate.evaluate(
                self.functions.evaluate, variables, batches, in_flight=self._in_flight
            )

    @property
    def _trained_as(self) -> Identity | None:
        """The training that the values to evaluate with come from; None if there was none."""
        return self._identity if self._state is not None else self._restored_from

    def _check_classes(self, dataset: Dataset) -> None:
        """Raise `UserError` where the labels mean other classes than those trained on."""
        if (trained := self._trained_as) is not None:
            check_same_classes(trained.classes, classes_of(dataset), "the model was")

    def _what_stops(self) -> Callable[[], None]:
        """What is called at each batch, to raise where a signal has come.

        JAX takes the signals of several processes, which have to ask for them; but within a `fit`
        that is the loop's to do, which also saves.
        """
        alone = self._fitting or process_group.count() == 1
        return self.check_interrupt if alone else StopSignals().stop_if_received

    def _ordered(
        self, what: str, dataset: Dataset, batch_size: int, may_stop: Callable[[], None]
    ) -> Iterator[tuple[PyTree, jax.Array, np.ndarray]]:
        """All examples in order, in placed batches of (rows, mask, what its key derives from)."""
        size, why_not = padded_size(batch_size, self.placement.batch), None
        if size != batch_size or len(dataset) % batch_size:
            rows = dataset.rows(np.arange(1))
            why_not = self.functions.why_not_padded(rows, size, predict=what == "predict")
        batches, number = ordered_batches(
            dataset,
            batch_size,
            self.placement.batch,
            threads=self.config.data_threads,
            padded=why_not is None,
        )
        seed = derive_seed(self.config.seed, Purpose.EVAL)
        with self.terminal.progress(what, done=0, total=number):
            for done in range(1, number + 1):
                may_stop()
                with phase(Phase.LOAD):
                    rows, mask = next(batches)
                yield rows, mask, np.array([seed, done - 1], np.uint32)
                self.terminal.advance(done)

    # -- what there is to begin with -----------------------------------------------------------

    def _resolved(
        self, epochs: int | None, steps: int | None, batch: int | None, per_device: int | None
    ) -> RunConfig:
        """The configuration of a fit, resolved for its devices."""
        config = self._configured(epochs, steps, batch, per_device)
        return resolve(config, batch_shards=self.placement.batch_shards)

    def _configured(
        self, epochs: int | None, steps: int | None, batch: int | None, per_device: int | None
    ) -> RunConfig:
        """Returns the configuration with `fit`'s own keywords in place of the trainer's."""
        config = self.config
        if epochs is not None or steps is not None:
            config = dataclasses.replace(config, epochs=epochs, steps=steps)
        if batch is not None or per_device is not None:
            config = dataclasses.replace(
                config, global_batch_size=batch, batch_size_per_device=per_device
            )
        return config

    def _eval_batch(self, batch: int | None) -> int:
        """The batch size to evaluate with: the training's, if neither argument nor option say so.

        So the result does not depend on the devices. It need not divide over them.
        """
        if batch is not None and batch < 1:
            raise UserError(f"global_batch_size is {batch}: it must be above 0")
        batch = batch or self.config.eval_batch_size
        if batch is None and self._trained_as is not None:
            batch = self._trained_as.config.get("global_batch_size")
        if batch is None and self.config.batch_size_per_device is not None:
            batch = self.config.batch_size_per_device * self.placement.batch_shards
        return batch or self.config.global_batch_size or DEFAULT_GLOBAL_BATCH_SIZE

    def _variables(self) -> Variables:
        """The values trained so far; before any training a checkpoint's, or else the first ones."""
        self._check_readable()
        if self._state is not None:
            return self._state.variables
        if self._restored is None:
            workdir = self.config.workdir
            if self.config.init_from or (
                workdir and broadcast_source(list_checkpoints(workdir)).steps
            ):
                self.restore()
            else:
                self._restored = self.functions.init(self.config.seed).variables
        assert self._restored is not None
        return self._restored


def _steps_of(parts: Mapping[str, Any], config: RunConfig, placement: Placement) -> StepFunctions:
    """A function of this module, for it is sent to workers."""
    return StepFunctions(**parts, config=config, placement=placement)


def _nothing() -> None:
    pass

"""The `Trainer`: its model on devices, and its training loop."""

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Never, Self, Unpack

import jax
import optax
from jax.sharding import Mesh

from spmdtrain.adapters.as_adapter import as_adapter
from spmdtrain.adapters.base import Function, Variables, describe_modes
from spmdtrain.checkpoints.listing import LATEST
from spmdtrain.checkpoints.run_identity import Identity, check_same_classes
from spmdtrain.checkpoints.weights.weight_map import WeightMap, checked_weight_map
from spmdtrain.config import overrides
from spmdtrain.config.conflicts import is_allowed
from spmdtrain.config.experiment import Experiment
from spmdtrain.config.keywords import TrainerOptions
from spmdtrain.config.run_config import DEFAULT_GLOBAL_BATCH_SIZE, OPTIONS, RunConfig
from spmdtrain.data.datasets import Dataset, classes_of
from spmdtrain.data.sampling import Augment, IndexedBatch
from spmdtrain.data.streams import StreamProgress
from spmdtrain.data.training_data import run_dataset
from spmdtrain.distributed import failures, process_group
from spmdtrain.distributed.code_digest import code_record
from spmdtrain.distributed.failures import StopSignals
from spmdtrain.distributed.progress import Phase, phase
from spmdtrain.document.terminal import Terminal, metric_texts
from spmdtrain.errors import (
    NonFiniteError,
    OwnExit,
    PreemptedExit,
    StateError,
    UserError,
    in_command,
)
from spmdtrain.record.requests import Request, State
from spmdtrain.record.run_files import Split
from spmdtrain.sharding.layout import ShardingTable
from spmdtrain.sharding.mesh import resolve
from spmdtrain.sharding.placement import Placement, use_placement
from spmdtrain.sharding.rules import AxisRules, Rule, checked_rules
from spmdtrain.step.compile import Programs, check_traced
from spmdtrain.step.divergence import Rewound
from spmdtrain.step.functions import RunFunctions
from spmdtrain.step.gradients import Reduction
from spmdtrain.step.objective import default_predict
from spmdtrain.step.program import StepPlan, plan_step
from spmdtrain.step.state import TrainState
from spmdtrain.strategies import strategy
from spmdtrain.trackers.base import Media, Tracker
from spmdtrain.trackers.run_trackers import RunTrackers, checked_split
from spmdtrain.train import evaluator
from spmdtrain.train.callbacks import (
    CallbackEvent,
    CallbackRunner,
    Callbacks,
    FrozenMetrics,
)
from spmdtrain.train.evaluate import Evaluation, check_same_data
from spmdtrain.train.executor import (
    Backend,
    DeviceExamples,
    Executor,
    Profiles,
    StateAccess,
    backend_of,
    is_evaluator,
    join_job,
)
from spmdtrain.train.metrics_reader import MetricsReader, add_advice
from spmdtrain.train.run_logger import Metrics, Written, checked_media
from spmdtrain.train.schedule import Epochs, FitResult
from spmdtrain.train.session import Boundary, RunSession, check_best, explain_memory, terminal_of
from spmdtrain.train.starting_state import (
    ValueLoader,
    at_step_zero,
    check_continues,
    check_no_checkpoints,
    first_state,
    values_source,
)

PyTree = Any
# What needs less memory of the devices, after an error because it is exhausted.
_SMALLER_BATCHES = "a smaller eval_batch_size needs less"
_MORE_DEVICES = "these are the values of a checkpoint: split over more devices, each has fewer"


def _make_functions(
    parts: Mapping[str, Any], config: RunConfig, placement: Placement
) -> RunFunctions:
    """Makes step functions. It is a function of this module, because it is sent to workers."""
    return RunFunctions(**parts, config=config, placement=placement)


def _nothing() -> None:
    pass


class TrainerArguments(TrainerOptions, total=False):
    """The keywords of `Trainer` that `Trainer.from_keras` takes, too."""

    predict: Function | None
    augment: Augment | None
    rules: Sequence[Rule]
    axis_rules: AxisRules | None
    reduction: Reduction | None
    media: Function | None
    trackers: Sequence[Tracker | str] | None
    weight_map: WeightMap
    config: RunConfig | None
    terminal: Terminal | None
    clock: Callable[[], float]
    init_timeout: float


class Trainer:
    """Trains, evaluates and predicts with one model on one device mesh.

    Args:
      model: An nnx module, a function of `rngs` that returns one (its parameters are then
        initialized directly into their shardings), an Equinox module without state, a
        `LinenModel`, an `EquinoxModel`, a `KerasModel` or a
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

    __signature__ = overrides.KeywordsSignature(TrainerOptions)

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
        **options: Unpack[TrainerOptions],
    ) -> None:
        config = overrides.validate_trainer_options(config or RunConfig(), options, Trainer)
        config, self._own_trackers = overrides.with_trackers(config, trackers)
        self.config = config = overrides.with_fixed_folder(join_job(config, init_timeout, terminal))
        self.terminal = terminal or terminal_of(config)
        self._backend = backend_of(strategy(config.strategy))
        self.placement = placement = self._backend.make_placement(config)
        self.check_interrupt: Callable[[], None] = _nothing
        """Called before each batch of an evaluation or prediction; may raise."""
        self._adapter = as_adapter(model)
        self._state: TrainState | None = None  # once a fit has begun
        # Of what the user has given, before it is used: objects may change later.
        functions = {"model": model, "objective": objective, "reduction": reduction}
        self._code = {use: code_record(function) for use, function in functions.items()}
        self._identity: Identity | None = None  # the run that trained the state
        self._restored: Variables | None = None  # used to evaluate before any training
        self._restored_from: Identity | None = None  # the run that trained `_restored`
        self._make_functions = functools.partial(
            _make_functions,
            {
                "adapter": self._adapter,
                "objective": objective,
                "predict": predict or default_predict(self._adapter),
                "optimizer": optimizer,
                "rules": checked_rules(rules),
                "axis_rules": axis_rules,
                "reduction": reduction,
                "media": checked_media(media),
            },
        )
        self.functions = self._make_functions(config, placement)
        weight_map = () if weight_map == () else checked_weight_map(weight_map)
        self._loader = ValueLoader(self.functions, config, weight_map, self.terminal)
        self._evaluation = Evaluation(self.functions, placement, config, self.terminal)
        overrides.check_augment(augment, self.config)
        self._augment, self._code["augment"] = augment, code_record(augment)
        self._clock, self._init_timeout = clock, init_timeout
        at_steps = self._backend.runs_steps
        self._callbacks = CallbackRunner(self, callbacks or {}, state_at_steps=at_steps)
        self._programs = Programs(self.functions)
        # Of the last fit: sums of an unfinished epoch, written metrics, the position in a stream.
        self._last: tuple[Epochs, Written, StreamProgress] | None = None
        self._examples = DeviceExamples(self.placement, self.terminal)
        self._trackers: RunTrackers | None = None  # during a fit
        self._access = StateAccess()

    @classmethod
    def from_experiment(cls, experiment: Experiment, config: RunConfig, **keywords: Any) -> Self:
        """Returns the trainer of an experiment, without the parts that `fit` and `predict` use.

        Args:
          experiment: The model, the objective, the optimizer and other arguments of `Trainer`.
          config: The configuration.
          **keywords: Arguments of `Trainer`, in place of the experiment's.
        """
        of_others = {
            *("train", "validation", "test", "prompts", "format_predictions", "generate"),
            "huggingface",
        }
        names = {field.name for field in dataclasses.fields(experiment)} - of_others
        parts = {name: getattr(experiment, name) for name in names}
        parts |= {"config": config, "trackers": experiment.trackers or None}
        return cls(**{**parts, **keywords})

    @classmethod
    def from_keras(
        cls,
        model: Any,
        *,
        optimizer: optax.GradientTransformation | None = None,
        callbacks: Callbacks = (),
        **keywords: Unpack[TrainerArguments],
    ) -> Self:
        """Returns the trainer of a compiled Keras model: its losses, metrics and optimizer.

        A batch is Keras' own: (x,), (x, y) or (x, y, sample_weight). After each `fit`, the model
        and its optimizer have the trained values. Without `config`, `uneven_batch` is `pad`:
        the batches of Keras' scripts run on any number of devices.

        Args:
          model: A Keras model on which `model.compile` was called.
          optimizer: An optax optimizer instead of the model's.
          callbacks: Keras callbacks and those of `Trainer`, in a list.
          **keywords: Arguments of `Trainer` and fields of `RunConfig`.

        Raises:
          UserError: If a part of the model or a callback cannot be used, or an argument is wrong.
        """
        # Imported here, because Flax, which the adapter uses, is slow to import.
        from spmdtrain.keras.compile import parts_of_compiled

        parts = parts_of_compiled(
            model,
            optimizer=optimizer,
            callbacks=callbacks,
            steps_per_dispatch=keywords.get("steps_per_dispatch"),
        )
        if "config" not in keywords and is_allowed("uneven_batch", "pad", keywords, OPTIONS):
            parts["uneven_batch"] = "pad"
        return cls(**{**parts, **keywords})

    # -- properties ----------------------------------------------------------------------------

    @property
    def mesh(self) -> Mesh | None:
        """The device mesh; None under the default strategy."""
        return self.placement.mesh

    @property
    def step(self) -> int:
        """Number of updates so far."""
        if self._access.is_elsewhere:
            return self._callbacks.step
        self._callbacks.check_readable()
        return 0 if self._state is None else int(self._state.step)

    @property
    def state(self) -> TrainState | None:
        """The state after `step` updates; None before `fit`.

        Raises:
          UserError: In a callback whose step has another state (see `CallbackEvent`), and in
            another thread than that of a fit in progress.
        """
        self._access.check()
        self._callbacks.check_readable()
        return self._state

    @state.setter
    def state(self, state: TrainState | None) -> None:
        self._callbacks.check_readable()
        self._state = state

    @property
    def _current(self) -> TrainState:
        """The state; it exists during a fit."""
        assert self._state is not None
        return self._state

    @property
    def model(self) -> Any:
        """The model with the values trained so far, in eval mode."""
        return self._adapter.merge(self.functions.in_device_memory(self._variables()))

    @property
    def variables(self) -> Variables:
        """The values that `evaluate` and `predict` use, on the devices: averaged ones, if any."""
        return self._variables()

    def functions_on(self, config: RunConfig, placement: Placement) -> RunFunctions:
        """Returns the run's functions for another placement.

        Args:
          config: The configuration.
          placement: The devices and their mesh, of `config`.
        """
        return self._make_functions(config, placement)

    @property
    def writes_into_model(self) -> bool:
        """Whether a fit writes the trained values into the user's model, as `from_keras` does."""
        return self._callbacks.writes_into_model

    @property
    def has_custom_reduction(self) -> bool:
        """Whether the user's reduction function is tested on the devices before the first step."""
        return self.functions.has_custom_reduction

    @property
    def compiler_options(self) -> Mapping[str, Any]:
        """Options of XLA for the steps: the user's and those of `CollectiveOptions`."""
        return self.functions.compiler_options

    @property
    def abstract_state(self) -> TrainState:
        """Shapes and dtypes of the state."""
        return self.functions.abstract_state

    def sharding_table(self) -> ShardingTable:
        """Returns the sharding and memory of each array of the state, without allocating it."""
        return self.functions.sharding_table()

    def unsharded_params(self) -> list[str]:
        """Returns the parameters that the strategy would split if one of their dims divided."""
        return self.functions.layout.unsharded_params()

    def compile_step(self, batch: PyTree) -> jax.stages.Compiled:
        """Returns the train step, compiled without running it.

        Args:
          batch: A global batch: arrays or their shapes.

        Raises:
          UserError: If `jit` is off.
        """
        with use_placement(self.placement):  # models may call `current_strategy`
            return self.trace_step(batch).lower().compile()

    def plan_step(self, batch: PyTree) -> StepPlan:
        """Returns the plan of the train step.

        Args:
          batch: As for `compile_step`; an `IndexedBatch` with `data_on_device`.

        Returns:
          The plan, with the reasons of what it decides.

        Raises:
          UserError: If the step would not compute what the options promise.
        """
        with use_placement(self.placement):
            shapes = jax.eval_shape(lambda batch: batch, batch)
            return plan_step(self.functions, shapes, by_index=isinstance(batch, IndexedBatch))

    def trace_step(self, batch: PyTree, plan: StepPlan | None = None) -> jax.stages.Traced:
        """Returns the trace of the train step, to read it or to lower it for other devices.

        Args:
          batch: As for `compile_step`; an `IndexedBatch` with `data_on_device`.
          plan: The plan of the step; by default it is made.

        Returns:
          The traced program.

        Raises:
          UserError: If `jit` is off, or the program would not compute on several devices what it
            does on one.
        """
        if not self.config.jit:
            raise UserError("jit is off: the steps are not compiled")
        plan = plan or self.plan_step(batch)
        with use_placement(self.placement):
            shapes = jax.eval_shape(lambda batch: batch, batch)
            traced: jax.stages.Traced = plan.program().trace(self.functions.abstract_state, shapes)
            check_traced(traced, plan, shapes)
        return traced

    # -- initial values ------------------------------------------------------------------------

    def init(self, values: PyTree = None) -> TrainState:
        """Returns the state before step 1, and sets what a new run starts from.

        A `fit` makes this state again, so the returned arrays stay valid. As with `init_from`, a
        workdir with checkpoints is resumed instead.

        Args:
          values: Arrays to start from, copied: a tree as `state.params`, `state.variables`, or
            what the model's own library has (the variables of a linen module, an nnx or Equinox
            module or its state), in any dtype of their kind. They have every parameter of the
            model, and nothing that it has not; its other state may be left out. By default the
            model's initial values, or those of `init_from`, which only the returned state has.

        Returns:
          The state, in the shardings of the run.

        Raises:
          UserError: If the trainer has been trained, `init_from` or `fork_from` is given as well,
            or an array is missing, unknown, has another shape, is NaN or infinite, or differs
            between processes.
        """
        self._access.check()
        self._callbacks.check_readable()
        if self._state is not None:
            raise UserError(
                f"init: this trainer has a state already, of step {self.step}: use a new Trainer"
            )
        loader = self._loader
        if values is not None:
            for name in ("init_from", "fork_from"):
                if path := getattr(self.config, name):
                    raise UserError(f"init: values and {name}={path!r} exclude each other")
            loader = loader.with_given(values)
        with use_placement(self.placement):
            state = loader.initial_state().state
        if values is not None:
            self._loader, self._restored, self._restored_from = loader, state.variables, None
        return state

    # -- evaluate and predict ------------------------------------------------------------------

    def evaluate(
        self,
        data: Any = overrides.REQUIRED,
        *others: Never,
        global_batch_size: int | None = None,
        **unknown: Never,
    ) -> Metrics:
        """Returns the weighted means over a dataset by name; each example counts exactly once.

        Args:
          data: A dataset, or arrays in a tuple or dictionary.
          *others: None; inputs and targets are one dataset.
          global_batch_size: By default `eval_batch_size`, or else the training's batch size.
          **unknown: None; another keyword is an error that suggests the right one.

        Raises:
          UserError: If an argument is wrong.
        """
        overrides.check_arguments(self.evaluate, data, others, unknown)
        dataset = run_dataset(data, self.config)
        with self._access.reading():
            variables = self._variables()  # first: those of a checkpoint have a batch size
            batch_size = self._eval_batch(global_batch_size)
            check_same_data(dataset, batch_size)
            with failures.work_in_progress(failures.EVALUATION), use_placement(self.placement):
                return self._evaluate(variables, dataset, batch_size, self._interrupt_check())

    def predict(
        self,
        data: Any = overrides.REQUIRED,
        *others: Never,
        global_batch_size: int | None = None,
        **unknown: Never,
    ) -> PyTree:
        """Returns predictions for a dataset: NumPy arrays of leading dim N, in its order.

        Args:
          data: A dataset of N examples, or arrays in a tuple or dictionary.
          *others: None; inputs and targets are one dataset.
          global_batch_size: By default `eval_batch_size`, or else the training's batch size.
          **unknown: None; another keyword is an error that suggests the right one.

        Raises:
          UserError: If an argument is wrong.
        """
        overrides.check_arguments(self.predict, data, others, unknown)
        dataset = run_dataset(data, self.config)
        with self._access.reading():
            variables = self._variables()
            self._check_classes(dataset)
            batch_size = self._eval_batch(global_batch_size)
            check_same_data(dataset, batch_size)
            check = self._interrupt_check()
            with failures.work_in_progress(failures.PREDICTION), use_placement(self.placement):
                try:
                    return self._evaluation.predict(variables, dataset, batch_size, check)
                except Exception as error:
                    explain_memory(error, self.config, self.functions, advice=_SMALLER_BATCHES)
                    raise

    def restore(self, path: str | None = None, *, which: str | int | None = None) -> int:
        """Loads the model's values from a checkpoint, for evaluation and prediction.

        Args:
          path: A workdir, one of its checkpoints/STEP, or weights of another program. By default
            the trainer's workdir if it has checkpoints, else the run of `fork_from`, else
            `init_from`.
          which: The checkpoint of a workdir: "latest", "best" or a step. By default "latest" of a
            given path, and the field `checkpoint` otherwise.

        Returns:
          The step of the checkpoint; 0 for weights of another program.

        Raises:
          UserError: If there is no such checkpoint, or none of this model.
        """
        self._access.check()
        if path is not None:
            return self._load_values(path, LATEST if which is None else which)
        which = self.config.checkpoint if which is None else which
        if (source := values_source(self.config, which)) is None:
            raise UserError(
                f"workdir {self.config.workdir} holds no checkpoint, and init_from is not given"
            )
        return self._load_values(*source)

    def _load_values(self, path: str, which: str | int) -> int:
        """Loads the model's values; returns the step of the checkpoint, 0 for a file of weights."""
        try:
            loaded = self._loader.load(path, which)
        except Exception as error:
            explain_memory(error, self.config, self.functions, advice=_MORE_DEVICES)
            raise
        self._restored, self._restored_from = loaded.variables, loaded.identity
        return loaded.step

    def _evaluate(
        self,
        variables: Variables,
        dataset: Dataset,
        batch_size: int,
        check_interrupt: Callable[[], None],
    ) -> Metrics:
        self._check_classes(dataset)
        try:
            return self._evaluation.evaluate(variables, dataset, batch_size, check_interrupt)
        except Exception as error:
            explain_memory(error, self.config, self.functions, advice=_SMALLER_BATCHES)
            raise

    @property
    def trained_as(self) -> Identity | None:
        """The identity of the run that trained the current values; None if there was none."""
        return self._identity if self._state is not None else self._restored_from

    def _check_classes(self, dataset: Dataset) -> None:
        """Raises `UserError` if the dataset's classes differ from those trained on."""
        if (trained := self.trained_as) is not None:
            check_same_classes(trained.classes, classes_of(dataset), "the model was")

    def _interrupt_check(self) -> Callable[[], None]:
        """Returns the function to call before each batch, which raises if a signal has arrived.

        With several processes, JAX receives the signals, and the processes have to ask for them.
        Within a `fit` the loop does that, because it also saves.
        """
        alone = self._trackers is not None or process_group.count() == 1
        return self.check_interrupt if alone else StopSignals().stop_if_received

    def _eval_batch(self, batch: int | None) -> int:
        """Returns the batch size of an evaluation: the argument, the option, or the training's.

        It does not depend on the devices, so the result does not either; it need not divide over
        them.

        Raises:
          UserError: If the argument is below 1.
        """
        if batch is not None and batch < 1:
            raise UserError(f"global_batch_size is {batch}: it must be above 0")
        batch = batch or self.config.eval_batch_size
        if batch is None and self.trained_as is not None:
            batch = self.trained_as.config["global_batch_size"]
        if batch is None and self.config.batch_size_per_device is not None:
            batch = self.config.batch_size_per_device * self.placement.batch_shards
        return batch or self.config.global_batch_size or DEFAULT_GLOBAL_BATCH_SIZE

    def _variables(self) -> Variables:
        """Returns the values trained so far, or else of a checkpoint, or the initial ones."""
        self._access.check()
        self._callbacks.check_readable()
        if self._state is not None:
            return self._state.variables
        if self._restored is None:
            if (source := values_source(self.config, self.config.checkpoint)) is not None:
                self._load_values(*source)
            else:
                self._restored = self._loader.initial_state().state.variables
        assert self._restored is not None
        return self._restored

    # -- media ---------------------------------------------------------------------------------

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
        self._running_trackers().log(
            media, self._callbacks.step if step is None else step, of_split
        )

    def log_artifact(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        """Passes a file to the trackers that keep files: W&B, MLflow and Trackio.

        It is read later, so it must not change until the run has ended.

        Args:
          path: The path of the file.
          name: The name of the artifact; by default the name of the file.

        Raises:
          UserError: If there is no such file, or no run is in progress.
        """
        self._running_trackers().log_artifact(path, name)

    def _running_trackers(self) -> RunTrackers:
        """Returns the trackers of the fit in progress; raises `UserError` outside of one."""
        if self._trackers is None:
            raise UserError("log() was called outside of fit: call event.log() in a callback")
        return self._trackers

    def stop(self) -> None:
        """Ends the run after the step in progress, as if it were the last one.

        With several processes, call it in a callback: process 0 decides for all.

        Raises:
          UserError: If several processes train and this is not a callback.
        """
        self._callbacks.request_stop()

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
          KeyboardInterrupt: After Ctrl-C in a notebook or an interactive Python, in place of
            `PreemptedExit`: the trainer has the state of a whole step, and `fit` continues from it.
          OwnExit: A `SystemExit`: if `sys.exit` is called during the fit, and in an evaluator task
            after the training has ended.
          UserError: If an argument is wrong.
        """
        overrides.check_arguments(self.fit, train, others, unknown)
        totals = epochs, steps, global_batch_size, batch_size_per_device
        config = overrides.with_totals(self.config, *totals)
        if is_evaluator():
            self.config = config
            raise OwnExit(evaluator.follow(self, self.config, train, validation))
        data = {"train": train, "validation": validation, "test": test}
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(self._access.fitting())
                self._backend.begin_fit(self._init_timeout, has_fitted=self._identity is not None)
                config = resolve(config, batch_shards=self.placement.batch_shards)
                stack.enter_context(use_placement(self.placement))
                run = RunSession.open(
                    stack,
                    config,
                    data,
                    self.functions,
                    self.terminal,
                    self._clock,
                    self._callbacks,
                    self._own_trackers,
                    self._code,
                )
                stack.callback(setattr, self, "_trackers", None)
                self._trackers = run.logger.trackers
                stack.callback(
                    self._programs.wait
                )  # a background compilation ends before `fit` does
                backend = stack.enter_context(self._backend.open(self._init_timeout))
                executors = stack.enter_context(
                    contextlib.ExitStack()
                )  # ends after `record_outcome`
                before = self._state, self._identity
                self._start(run, restart=restart)
                first = self._state
                stack.enter_context(run.record_outcome())
                try:
                    self._train(run, backend, executors)
                    found = run.finish(
                        self.step, lambda x: self._evaluate_split(run, Split.TEST, x)
                    )
                    self._callbacks(CallbackEvent.FIT_END, self.step, FrozenMetrics(found))
                except StateError as error:
                    self._state = (
                        None  # unusable: the next fit restores a checkpoint or initializes
                    )
                    if isinstance(error, NonFiniteError):
                        # A state that only this trainer had is lost, unless it has been saved.
                        if before[0] is None or run.has_saved:
                            run.rewind(error)
                        add_advice(error, run.config)
                    raise
                except Exception as error:
                    # If no step was run, forget this run, so that the next fit may have other data.
                    if self._state is first and not isinstance(error, PreemptedExit):
                        self._state, self._identity = before
                    raise
        except Rewound as rewound:
            skip_steps = rewound.skip_steps
        else:
            return run.epochs.result(self.step)
        # What a first start may ask for does not hold for this one, which continues it.
        self.config = dataclasses.replace(
            self.config, skip_steps=skip_steps, resume="auto", checkpoint_at_start=False
        )
        return self.fit(
            train,
            validation=validation,
            test=test,
            epochs=epochs,
            steps=steps,
            global_batch_size=global_batch_size,
            batch_size_per_device=batch_size_per_device,
        )

    def _start(self, run: RunSession, *, restart: bool) -> None:
        """Sets the first state: of an earlier fit, restored from a checkpoint, or initialized."""
        watched = any(map(self._callbacks.has, (CallbackEvent.STEP, CallbackEvent.LOG)))
        data = run.train_data, self._augment
        dispatch = self._programs.choose_dispatch(*data, run.config, is_watched=watched)
        run.schedule.set_dispatch(dispatch)
        if run.validation is not None:
            self._evaluation.check(run.validation, run.eval_batch_size)
        if restart:
            check_no_checkpoints(run)
        self._callbacks.begin(from_step_zero=restart or self._state is None)
        self._restored = None  # `evaluate` and `predict` use the trained state from here on
        if self._state is None:
            if self._backend.runs_steps:
                self._backend.compile_ahead(run, self._programs, self.functions, self._augment)
            functions = self.functions, self._loader.initial_state, self._loader.base_weights
            self._state, _ = first_state(run, *functions)
        elif restart:
            self._state = at_step_zero(self._state, self.functions.shardings)
            run.branch(-1)
        elif self._identity is not None:
            assert self._last is not None  # set with the identity
            check_continues(run, self._identity, self.step)
            run.is_new = False
            run.continue_from(self._identity)
            epochs, run.logger.written, run.stream_progress = self._last
            run.epochs.sums = epochs.sums
        self._last = run.epochs, run.logger.written, run.stream_progress
        self._identity = run.identity
        run.logger.begin(
            self.step, self.placement, describe_modes(self._adapter), is_new=run.is_new
        )

    def _train(self, run: RunSession, backend: Backend, executors: contextlib.ExitStack) -> None:
        first, schedule = self.step, run.schedule
        self._before_first_step(run, first)
        if first >= schedule.total:
            return
        executor = backend.make_executor(
            run=run,
            state=self._current,
            functions=self.functions,
            make_functions=self._make_functions,
            programs=self._programs,
            placement=self.placement,
            augment=self._augment,
            examples=self._examples,
        )
        executors.callback(executor.close)
        reader = MetricsReader(run, executor.max_in_flight, lambda: executor.sync(self._current))
        profiles, requests = Profiles(executors, self.terminal.line), run.signals.requests
        boundary = TrainerBoundary(run, reader, self, executor, profiles)
        if run.config.profile_steps is not None:
            profiles.begin(run.config, first)
        with self.terminal.progress("train", done=first, total=schedule.total):
            for steps in schedule.dispatches(first):  # the range of steps of one dispatch
                step = steps[-1]
                program, batch = executor.load(steps, self._current)
                executor.inspect(steps, self._current, batch)
                if (profile := profiles.current) is not None:
                    profile.before(steps[0])
                with phase(Phase.STEP):
                    self._state, output = program(self._current, batch)
                if profile is not None:
                    profile.after(step, output)
                if steps[0] == first + 1:
                    run.check_placed(self._current, self.functions, "after the first step")
                    run.after_first_step()
                reader.add(steps, output)  # fetched later: the host does not wait for this step
                self._callbacks(CallbackEvent.STEP, step)
                if self._callbacks.stop_requested:
                    schedule.total = executor.stop_dispatch(step)
                preempted = run.signals.stop_requested()
                due = schedule.due(step, preempted=preempted, asked=bool(requests.pending))
                # With parameter servers, later steps may be pending: first the loop reads them too.
                if due is not None and executor.stop_dispatch(step) == step:
                    self._state = executor.sync(self._current)
                    boundary.pass_step(step, due)

    def _before_first_step(self, run: RunSession, first: int) -> None:
        """Calls the first callbacks, saves step 0, and runs an evaluation that was interrupted."""
        run.name_unsaved_evaluation(first, evaluates=run.validation is not None)
        self._callbacks(CallbackEvent.FIT_START, first)
        is_last = first == run.schedule.total == 0
        if (saves := run.should_save_at_start(first)) or (is_last and run.checkpoints is None):
            # Evaluated before the save, which records the metrics. A signal ends the run here.
            evaluates = is_last or run.config.eval_at_checkpoints
            metrics = self._run_validation(run, 0) if evaluates else None
            if saves:
                run.save(self._current, 0, metrics)
        if run.missed_evaluation(first):  # a signal interrupted it before this start
            metrics = self._run_validation(run, first)
            if metrics and run.checkpoints and run.checkpoints.add_metrics(first, metrics):
                self._callbacks(CallbackEvent.CHECKPOINT, first, FrozenMetrics(metrics))
        if self._callbacks.stop_requested:
            run.schedule.total = first
        if first > (total := run.schedule.total):
            instead = "" if in_command() else ", or restart=True to count from 0"
            self.terminal.line(
                f"nothing to do: the run is at step {first} of {total} requested, and steps and "
                f"epochs are totals: give more{instead}"
            )

    def _run_validation(self, run: RunSession, step: int) -> Metrics | None:
        if run.validation is None:
            return None
        metrics = self._evaluate_split(run, Split.EVAL, run.validation)
        inputs = self._variables(), run.validation, run.eval_batch_size
        is_written = step in run.logger.written[Split.EVAL]  # before an end without a save
        if not is_written and (media := self._evaluation.media(*inputs)) is not None:
            run.logger.trackers.media(step, Split.EVAL, media)
        metrics = self._callbacks.with_added(CallbackEvent.EVALUATION, step, metrics)
        check_best(self.config, metrics, first=False, log=self.terminal.line)
        run.logger.log_evaluation(Split.EVAL, step, metrics, is_written=is_written)
        return metrics

    def _evaluate_split(self, run: RunSession, split: Split, dataset: Dataset) -> Metrics:
        variables, check = self._variables(), run.signals.stop_if_received
        metrics = self._evaluate(variables, dataset, run.eval_batch_size, check)
        run.check_finite_loss(split, self.step, metrics)
        return metrics


@dataclasses.dataclass
class TrainerBoundary(Boundary):
    """The boundary between two steps of a trainer, which calls its methods for one fit."""

    trainer: Trainer
    executor: Executor
    profiles: Profiles

    def profile_asked(self, step: int, request: Request) -> tuple[State, str]:
        return self.profiles.ask(self.run, step, request)

    def evaluate_asked(self, step: int) -> tuple[State, str]:
        """Evaluates without callbacks: one that stops early or lowers the rate changes the run."""
        run, trainer = self.run, self.trainer
        if run.validation is None:
            where = "an evaluator task evaluates its checkpoints"
            is_elsewhere = run.config.evaluated_by == "evaluator"
            return State.REFUSED, where if is_elsewhere else "the run has no validation split"
        if (found := run.logger.written[Split.EVAL].get(step)) is None:
            inputs = trainer._variables(), run.validation, run.eval_batch_size
            try:
                found = trainer._evaluate(*inputs, run.signals.stop_if_received)
            except PreemptedExit:  # the next step saves and stops
                return State.REFUSED, f"step {step:,}: the run stops"
            run.logger.log_evaluation(Split.EVAL, step, found)
        return State.DONE, f"step {step:,}: {'  '.join(metric_texts(found))}"

    def evaluate(self, step: int, *, is_due: bool) -> Metrics | None:
        """Returns the metrics of the evaluation; None also if a signal interrupts it."""
        if not is_due:
            return None
        try:
            return self.trainer._run_validation(self.run, step)
        except PreemptedExit:  # `pass_step` saves first, and raises it again
            return None

    def save(self, step: int, metrics: Metrics | None) -> None:
        self.run.save(self.trainer._current, step, metrics)

    def take_snapshot(self, step: int, metrics: Metrics | None) -> None:
        self.run.take_snapshot(self.trainer._current, step, metrics)

    def report(self) -> None:
        self.executor.report()

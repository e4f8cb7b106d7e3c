"""A model on devices: its functions, its values, evaluation and prediction."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Never

import jax
import optax
from jax.sharding import Mesh

from spmdtrain.adapters.as_adapter import as_adapter
from spmdtrain.adapters.base import Function, Variables
from spmdtrain.checkpoints.listing import LATEST, list_for_all
from spmdtrain.checkpoints.run_identity import Identity, check_same_classes
from spmdtrain.checkpoints.weights.weight_map import WeightMap, checked_weight_map
from spmdtrain.config.run_config import DEFAULT_GLOBAL_BATCH_SIZE, RunConfig
from spmdtrain.data.datasets import Dataset, classes_of
from spmdtrain.data.sampling import IndexedBatch
from spmdtrain.data.training_data import run_dataset
from spmdtrain.distributed import failures, process_group
from spmdtrain.distributed.code_digest import code_record
from spmdtrain.distributed.failures import StopSignals
from spmdtrain.document.terminal import Terminal
from spmdtrain.errors import UserError
from spmdtrain.sharding.layout import ShardingTable
from spmdtrain.sharding.placement import Placement, use_placement
from spmdtrain.sharding.rules import AxisRules, Rule, checked_rules
from spmdtrain.step.compile import check_traced
from spmdtrain.step.functions import StepFunctions
from spmdtrain.step.gradients import Reduction
from spmdtrain.step.objective import model_output
from spmdtrain.step.state import TrainState
from spmdtrain.strategies import strategy
from spmdtrain.train import overrides
from spmdtrain.train.evaluate import Evaluation, check_same_data
from spmdtrain.train.executor import backend_of
from spmdtrain.train.init_state import ValueLoader
from spmdtrain.train.media_log import checked_media
from spmdtrain.train.run_logger import Metrics
from spmdtrain.train.starting_state import parse_fork
from spmdtrain.train.terminal_of_run import terminal_of

PyTree = Any


class ModelRunner:
    """A model on one device mesh, which evaluates and predicts. The base of `Trainer`.

    Args:
      config: The configuration.
      terminal: Shows progress; by default the standard output of process 0.
      model: See `Trainer`, as for the following.
      objective: Gives per-example values.
      optimizer: Gives the optimizer's state and updates.
      predict: Gives predictions.
      rules: Sharding rules.
      axis_rules: Maps the names of the model's annotations to mesh axes.
      reduction: Reduces gradients.
      media: Gives media to log.
      weight_map: Rules for the arrays of `init_from`.
    """

    def __init__(
        self,
        config: RunConfig,
        terminal: Terminal | None,
        *,
        model: Any,
        objective: Function,
        optimizer: optax.GradientTransformation,
        predict: Function | None,
        rules: Sequence[Rule],
        axis_rules: AxisRules | None,
        reduction: Reduction | None,
        media: Function | None,
        weight_map: WeightMap,
    ) -> None:
        self.config = config = overrides.with_fixed_folder(config)
        self.terminal = terminal or terminal_of(config)
        self._backend = backend_of(strategy(config.strategy))
        self.placement = placement = self._backend.make_placement(config)
        self.check_interrupt: Callable[[], None] = _nothing
        """Called before each batch of an evaluation or prediction; may raise."""
        self._adapter = as_adapter(model)
        self._state: TrainState | None = None  # once a fit has begun
        self._weight_map = checked_weight_map(weight_map)
        # Of what the user has given, before it is used: objects may change later.
        functions = {"model": model, "objective": objective, "reduction": reduction}
        self._code = {use: code_record(function) for use, function in functions.items()}
        self._identity: Identity | None = None  # the run that trained the state
        self._fitting = False
        self._restored: Variables | None = None  # used to evaluate before any training
        self._restored_from: Identity | None = None  # the run that trained `_restored`
        self._make_functions = functools.partial(
            _make_functions,
            {
                "adapter": self._adapter,
                "objective": objective,
                "predict": predict or model_output,
                "optimizer": optimizer,
                "rules": checked_rules(rules),
                "axis_rules": axis_rules,
                "reduction": reduction,
                "media": checked_media(media),
            },
        )
        self.functions = self._make_functions(config, placement)
        self._evaluation = Evaluation(self.functions, placement, config, self.terminal)

    # -- properties ----------------------------------------------------------------------------

    @property
    def mesh(self) -> Mesh | None:
        """The device mesh; None under the default strategy."""
        return self.placement.mesh

    @property
    def step(self) -> int:
        """Number of updates so far."""
        self._check_readable()
        return 0 if self._state is None else int(self._state.step)

    @property
    def state(self) -> TrainState | None:
        """The state after `step` updates; None before `fit`.

        Raises:
          UserError: In a callback whose step has another state (see `CallbackEvent`).
        """
        self._check_readable()
        return self._state

    @state.setter
    def state(self, state: TrainState | None) -> None:
        self._check_readable()
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

    def trace_step(self, batch: PyTree) -> jax.stages.Traced:
        """Returns the trace of the train step, to read it or to lower it for other devices.

        Args:
          batch: As for `compile_step`; an `IndexedBatch` with `data_on_device`.

        Raises:
          UserError: If `jit` is off, or the program would not compute on several devices what it
            does on one.
        """
        if not self.config.jit:
            raise UserError("jit is off: the steps are not compiled")
        by_index = isinstance(batch, IndexedBatch)
        with use_placement(self.placement):
            shapes = jax.eval_shape(lambda batch: batch, batch)
            self.functions.choose_reduction(shapes)
            traced: jax.stages.Traced = self.functions.train_program(by_index=by_index).trace(
                self.functions.abstract_state, shapes
            )
            check_traced(traced, self.functions, self.placement, shapes, by_index=by_index)
        return traced

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
        self._variables()  # first: those of a checkpoint have a batch size
        batch_size = self._eval_batch(global_batch_size)
        check_same_data(dataset, batch_size)
        with failures.work_in_progress(failures.EVALUATION), use_placement(self.placement):
            return self._evaluate(dataset, batch_size, self._interrupt_check())

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
        dataset, variables = run_dataset(data, self.config), self._variables()
        self._check_classes(dataset)
        batch_size = self._eval_batch(global_batch_size)
        check_same_data(dataset, batch_size)
        check = self._interrupt_check()
        with failures.work_in_progress(failures.PREDICTION), use_placement(self.placement):
            return self._evaluation.predict(variables, dataset, batch_size, check)

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
        if which is None:
            which = self.config.checkpoint if path is None else LATEST
        if path is None:
            workdir, fork_from = self.config.workdir, self.config.fork_from
            if workdir is not None and list_for_all(workdir).steps:
                path = workdir
            elif fork_from is not None:
                path, which = parse_fork(fork_from)
            else:
                path = self.config.init_from
            if path is None:
                raise UserError(
                    f"workdir {workdir} holds no checkpoint, and init_from is not given"
                )
        given = self.functions, self.config, self._weight_map, self.terminal
        loaded = ValueLoader(*given).load(path, which)
        self._restored, self._restored_from = loaded.variables, loaded.identity
        return loaded.step

    def _evaluate(
        self, dataset: Dataset, batch_size: int, check_interrupt: Callable[[], None]
    ) -> Metrics:
        variables = self._variables()
        self._check_classes(dataset)
        return self._evaluation.evaluate(variables, dataset, batch_size, check_interrupt)

    @property
    def _trained_as(self) -> Identity | None:
        """The identity of the run that trained the current values; None if there was none."""
        return self._identity if self._state is not None else self._restored_from

    def _check_classes(self, dataset: Dataset) -> None:
        """Raises `UserError` if the dataset's classes differ from those trained on."""
        if (trained := self._trained_as) is not None:
            check_same_classes(trained.classes, classes_of(dataset), "the model was")

    def _interrupt_check(self) -> Callable[[], None]:
        """Returns the function to call before each batch, which raises if a signal has arrived.

        With several processes, JAX receives the signals, and the processes have to ask for them.
        Within a `fit` the loop does that, because it also saves.
        """
        alone = self._fitting or process_group.count() == 1
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
        if batch is None and self._trained_as is not None:
            batch = self._trained_as.config.get("global_batch_size")
        if batch is None and self.config.batch_size_per_device is not None:
            batch = self.config.batch_size_per_device * self.placement.batch_shards
        return batch or self.config.global_batch_size or DEFAULT_GLOBAL_BATCH_SIZE

    def _variables(self) -> Variables:
        """Returns the values trained so far, or else of a checkpoint, or the initial ones."""
        self._check_readable()
        if self._state is not None:
            return self._state.variables
        if self._restored is None:
            workdir = self.config.workdir
            if (
                self.config.init_from
                or self.config.fork_from
                or (workdir and list_for_all(workdir).steps)
            ):
                self.restore()
            else:
                self._restored = self.functions.init(self.config.seed).variables
        assert self._restored is not None
        return self._restored

    def _check_readable(self) -> None:
        """Raises `UserError` if the state cannot be read now."""


def _make_functions(
    parts: Mapping[str, Any], config: RunConfig, placement: Placement
) -> StepFunctions:
    """Makes step functions. It is a function of this module, because it is sent to workers."""
    return StepFunctions(**parts, config=config, placement=placement)


def _nothing() -> None:
    pass

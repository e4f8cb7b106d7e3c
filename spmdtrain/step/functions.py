"""The jitted functions of a run, their gradient reduction and their XLA options."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.interpreters import partial_eval
from jax.sharding import PartitionSpec, Sharding

from spmdtrain.adapters.base import (
    Adapter,
    ExtendsBase,
    Function,
    ModelContext,
    Variables,
    annotations_of,
    file_names_of,
    layer_paths,
)
from spmdtrain.config.run_config import Purpose, RunConfig, derive_seed
from spmdtrain.data.sampling import as_marked, examples_of
from spmdtrain.distributed.first_call import Together, call_together
from spmdtrain.errors import UserError, locate_errors, option
from spmdtrain.kernels.reference import reference_kernels
from spmdtrain.sharding import mesh
from spmdtrain.sharding.layout import Layout, ShardingTable, tabulate
from spmdtrain.sharding.mesh import BATCH_AXES
from spmdtrain.sharding.placement import (
    ParamGathers,
    Placement,
    record_strategy_queries,
    use_gathers,
    use_placement,
)
from spmdtrain.sharding.rules import AxisRules, Rule
from spmdtrain.step import hyperparameters
from spmdtrain.step.batch_checks import ABSTRACT_DRAW, BatchChecks, check_partitioned, check_program
from spmdtrain.step.exact import (
    ExactGradients,
    ExactUpdate,
    FixedOrder,
    check_exact,
    check_exact_optimizer,
    exact_evaluation,
)
from spmdtrain.step.gradients import (
    NAMED,
    ON_ONE_DEVICE,
    Gradients,
    Reduction,
    ScatteredReduction,
    all_reduce,
    flattened,
    in_dtype,
    pairwise,
)
from spmdtrain.step.objective import Declared, Forward
from spmdtrain.step.optimizer import BaseModel, Update, extra_names
from spmdtrain.step.optimizer_record import OptimizerRecord, record_optimizer
from spmdtrain.step.state import TrainState
from spmdtrain.step.train_step import Repeat, eager, make_gradient_step, make_train_step
from spmdtrain.strategies import EXPERT_AXIS, SEQUENCE_AXIS
from spmdtrain.tree import is_key, named_leaves, path_name
from spmdtrain.xla.compiler import (
    Flag,
    Parameters,
    Value,
    compiler_options,
    exact_options,
    merge_compiler_options,
    options_for_one_run,
    preset_flags,
)
from spmdtrain.xla.jaxpr import constrains_sharding
from spmdtrain.xla.padding import why_parts_differ

# -- The jitted functions of a run: initialize, train, evaluate, predict ---------------------------

PyTree = Any
Check = Callable[[Any, PyTree], None]
"""A check of a program: a function of its open jaxpr and its arguments."""


class StepFunctions:
    """The jitted functions of one model, objective and optimizer under one strategy.

    `train_program` returns the train step. `evaluate` and `predict` are functions of (variables,
    batch, mask, draw), where `draw` is uint32 (2,) (see `eval_key`). All take global arrays.
    Without `config.jit`, they run operation by operation.

    Args:
      objective: Returns per-example values and weights for (model, batch).
      predict: Returns predictions for (model, batch).
      rules: Sharding rules for the state; the first match counts.
      axis_rules: The table from the names of the model's annotations to mesh axes.
      reduction: Reduces the gradients under `shard_map`. By default the configuration decides.
      media: Returns a pytree of arrays to log for (model, batch).

    Attributes:
      abstract_state: The state as shapes and dtypes.
      shardings: The sharding of each leaf of the state between steps.
      base: The frozen base model of low-rank factors; None without.
      compiler_options: Options for XLA, for all functions but `init`.

    Raises:
      UserError: If options contradict each other, or a sharding rule does not fit.
    """

    def __init__(
        self,
        *,
        adapter: Adapter,
        objective: Function,
        predict: Function,
        optimizer: optax.GradientTransformation,
        placement: Placement,
        rules: Sequence[Rule] = (),
        axis_rules: AxisRules | None = None,
        reduction: Reduction | None = None,
        media: Function | None = None,
        config: RunConfig,
    ) -> None:
        self._adapter = adapter
        self._config, self._placement = config, placement
        extends = adapter if isinstance(adapter, ExtendsBase) else None
        frozen = (*config.freeze, *(extends.frozen if extends else ()))
        self.update = Update(optimizer, frozen, config.ema_decay)
        self._order = None if config.exact is None else FixedOrder(placement, config.exact)
        if self._order is not None:
            self.update = ExactUpdate(**vars(self.update), order=self._order)
        self._context = ModelContext(placement, axis_rules)
        init = self._init
        with use_placement(placement):  # models may call current_strategy()
            # By `jax.jit`, which need not trace the same function a second time below.
            self.abstract_state: TrainState = jax.jit(init).eval_shape(
                adapter.given, *map(jax.random.key, (0, 0))
            )
        abstract = self.abstract_state
        states = layer_paths(adapter, abstract.model_state)
        self.update.check(abstract.params, abstract.opt_state, states.values())
        self.base = BaseModel.of(adapter, is_saved=config.init_from is None)
        annotations = annotations_of(adapter)
        self.layout = Layout(
            *(self.abstract_state, placement, rules, config.sharding),
            annotations=annotations,
            axis_rules=axis_rules,
            derived=extends.derived if extends else {},
        )
        self._context = ModelContext(placement, axis_rules, annotated=bool(annotations))
        self.shardings: TrainState = self.layout.shardings
        self._forward = Forward(
            adapter,
            objective,
            predict,
            self.layout,
            self._context,
            config,
            self.abstract_state.params,
            [name for name, path in states.items() if self.update.is_frozen(path)],
        )
        self.checks = BatchChecks(
            self._forward, self.update, self.abstract_state, placement, config
        )
        self._own_reduction = reduction
        for name, leaf in named_leaves(abstract.model_state).items():
            if not is_key(leaf):
                continue
            _check_kept_key(config, name)
            if extends and self.update.is_frozen(states[name]):
                raise UserError(
                    "LoraModel freezes the state of its base model, which keeps a random key "
                    f"({name}): each step would draw the same numbers from it. Draw from a stream "
                    "of the model, such as nnx.Rngs or make_rng"
                )
        keys = [name for name, leaf in named_leaves(abstract.params).items() if is_key(leaf)]
        if keys and config.strategy == "parameter_server":
            raise UserError(
                f"strategy is parameter_server, and parameter {keys[0]} is a random key, which "
                "servers cannot send: keep jax.random.key_data of it, and call "
                "jax.random.wrap_key_data in the model"
            )
        per_replica = config.batch_statistics == "replica"
        if per_replica and not jax.tree.leaves(self.abstract_state.model_state):
            raise UserError(
                "batch_statistics is replica, and the model carries no state, so it has no batch "
                "statistics: leave the option out"
            )
        if per_replica and not {"value_fn", "obj_fn"}.isdisjoint(extra_names(optimizer)):
            raise UserError(
                "batch_statistics is replica, and the optimizer evaluates the loss (value_fn), "
                "which uses the statistics of the global batch: set batch_statistics to global"
            )
        self._requested_reduction = requested_reduction(reduction, config, placement, self.layout)
        self._gradients = Gradients(
            self._forward.training_sums,
            config.microbatches,
            placement,
            self._requested_reduction,
            per_replica=per_replica,
        )
        if config.exact is not None:
            check_exact_optimizer(optimizer)
            self._gradients = ExactGradients.of(self._gradients, config.exact)
        variables, replicated = self.shardings.variables, placement.replicated
        self.compiler_options = step_options(config, placement)

        # The state is initialized directly into its shardings, and so are the arrays that a module
        # already holds: no device ever holds more than its share.
        self.given_shardings = self._given_shardings(replicated)
        self._jit_init = jax.jit(
            partial(init) if annotations else init,  # traced with the annotations
            in_shardings=(self.given_shardings, replicated, replicated),
            out_shardings=self.shardings,
            compiler_options=options_for_one_run(placement.devices[0].platform),
        )
        self._train_programs: dict[tuple[Repeat, bool], Any] = {}
        # Batches are split or, if they do not divide, whole on each device.
        places = (variables, None, None, replicated)
        evaluate: Callable[..., Any] = self._forward.evaluate
        evaluate = exact_evaluation(evaluate, self._order) if self._order else evaluate
        check: Check | None = None
        if placement.mesh is not None and placement.mesh.size > 1:
            check = partial(check_program, placement=placement)
        self.evaluate = self._compile(evaluate, places, check)
        # Replicated predictions, because every process returns all of them.
        self.predict = self._compile(self._forward.predictions, places, check)
        declared = None if media is None else Declared.of(locate_errors(media, "media"))
        self._media = None if declared is None else partial(self._forward.in_eval, declared)
        partitioned = None if check is None else partial(check_partitioned, placement=placement)
        self.media = (
            None if self._media is None else self._compile(self._media, places, partitioned)
        )
        """As `predict`, for the media to log; None if none are declared."""

    # -- the state -----------------------------------------------------------------------------

    def init(self, seed: int) -> TrainState:
        """Returns the state before the first step, on the devices.

        The keys of initialization and of steps derive from `seed`.
        """
        keys = [jax.random.key(derive_seed(seed, p)) for p in (Purpose.INIT, Purpose.STEP)]
        given = jax.tree.map(_placed, self._adapter.given, self.given_shardings)
        with use_placement(self._placement):  # independent of the calling thread
            state: TrainState = call_together(self._jit_init, given, *keys)
        return state

    def _init(self, given: PyTree, init_key: jax.Array, step_key: jax.Array) -> TrainState:
        # Copied, because the first state is donated and the user's own arrays would be with it.
        params, model_state = self._context.call(
            self._adapter.init, jax.tree.map(jnp.copy, given), init_key
        )
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=self.update.init(params),
            averaged=self.update.first_average(params),
            model_state=model_state,
            # Key data, because JAX dispatches programs with typed keys by a slower path in Python.
            key=jax.random.key_data(step_key),
            averaged_before=self.update.averaged_before,
        )

    def _given_shardings(self, default: Sharding) -> PyTree:
        """Returns shardings for the arrays that a module holds, each like its leaf of the state."""
        shardings, shapes = named_leaves(self.layout.on_device), named_leaves(self.abstract_state)

        def sharding(path: tuple[Any, ...], leaf: Any) -> Sharding:
            name = path_name(path).removesuffix("/value")
            for state_name in (f"params/{name}", f"model_state/{name}"):
                if state_name in shardings and shapes[state_name].shape == leaf.shape:
                    of_state: Sharding = shardings[state_name]
                    return of_state
            return default

        return jax.tree_util.tree_map_with_path(sharding, self._adapter.given)

    def sharding_table(self) -> ShardingTable:
        """Returns the sharding and memory of each array of the state, without allocating it."""
        return tabulate(self.abstract_state, self.shardings, self.layout.sources)

    @property
    def placed_state(self) -> TrainState:
        """The abstract state with the sharding of each leaf, to lower programs with."""
        placed: TrainState = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            self.abstract_state,
            self.shardings,
        )
        return placed

    def opt_state_of(self, params: PyTree) -> PyTree:
        """Returns the optimizer's initial state for these parameters, in its shardings."""

        def begin(params: PyTree) -> PyTree:
            on_device = jax.device_put(params, self.layout.on_device.params)
            return self.update.init(on_device)

        program = jax.jit(begin, out_shardings=self.shardings.opt_state)
        return call_together(program, params)

    @property
    def file_names(self) -> Mapping[str, str | None]:
        """The model's arrays by their names in files of its library; see `file_names_of`."""
        return file_names_of(self._adapter)

    @property
    def initial_hyperparameters(self) -> dict[str, Any]:
        """The initial values of injected hyperparameters, by path in the optimizer's state."""
        return hyperparameters.initial_values(self.update.init, self.abstract_state.params)

    @cached_property
    def optimizer_record(self) -> OptimizerRecord:
        """The record of the optimizer's update, by which a resume recognizes it."""
        trained, _ = self.update.partition(self.abstract_state.params)
        return record_optimizer(self.update.optimizer, trained)

    def as_parameters(self, variables: Variables) -> Variables:
        """Returns variables with the parameters, or their average, cast to the model's dtypes."""
        return self._forward.as_parameters(variables)

    def in_device_memory(self, variables: Variables) -> Variables:
        """Returns a copy of variables in device memory, to call the model with outside of steps."""
        on_device = jax.device_put(variables, self.layout.on_device.variables)
        # Copied, because the state's own arrays are donated to the next step.
        return jax.tree.map(jnp.copy, self.as_parameters(on_device))

    # -- the train step ------------------------------------------------------------------------

    def train_program(self, repeat: Repeat = Repeat.NONE, *, by_index: bool = False) -> Any:
        """Returns the train step (see `make_train_step`), compiled at its first call.

        `by_index` tells whether batches are `IndexedBatch`.
        """
        key = repeat, by_index
        if key not in self._train_programs:
            self._train_programs[key] = make_train_step(
                self._gradients,
                self.update,
                self.layout,
                self._placement,
                repeat=repeat,
                by_index=by_index,
                log_every=self._config.log_every,
                order=self._order,
                jit=self._config.jit,
                compiler_options=self.compiler_options,
            )
        return self._train_programs[key]

    def gradient_program(self, on_worker: optax.GradientTransformation) -> Any:
        """Returns the step of a parameter server's worker (see `make_gradient_step`)."""
        return make_gradient_step(
            self._gradients,
            self.update,
            self._placement,
            on_worker,
            jit=self._config.jit,
            compiler_options=self.compiler_options,
        )

    @property
    def has_custom_reduction(self) -> bool:
        """Whether `choose_reduction` runs a program on the devices of all processes."""
        return self._own_reduction is not None

    def choose_reduction(self, batch: PyTree) -> str:
        """Checks a batch of one step, or its shapes, and chooses what reduces its gradients.

        Returns:
          The choice for the log, "" if there is nothing to say.

        Raises:
          UserError: If a train step of it would not compute what the options promise.
        """
        marked = as_marked(jax.eval_shape(examples_of, batch))
        batch, mask = marked.rows, marked.mask
        # The checks read the operations of the model, and kernels cannot be analyzed.
        with reference_kernels():
            self.checks.check_training(batch, mask)
        requested = self._requested_reduction is not None
        wanted = self._requested_reduction or default_reduction(
            self._config, self._placement, self.layout
        )
        if wanted is None:
            return ""
        trained, frozen = self.update.partition(self.abstract_state.params)
        if self._own_reduction is not None and not mesh.is_abstract():
            check_agrees(self._own_reduction, self._placement, trained)
        with reference_kernels(), use_placement(self._gradients.traced_on):
            blocker = shard_map_blocker(
                dataclasses.replace(self._gradients, reduction=wanted),
                layout=self.layout,
                params=trained,
                frozen=frozen,
                model_state=self.abstract_state.model_state,
                batch=batch,
                values=self._forward.values,
                in_context=self._context.is_active,
                batch_coupled=self._forward.objective.batch_coupled,
            )
        if requested:
            if blocker:
                raise UserError(
                    f"{describe_request(self._config)} reduces the gradients under shard_map, "
                    f"where each device computes on its own part of the batch: {blocker}"
                )
            return "; batch statistics of each replica" if self._gradients.per_replica else ""
        reduction = None if blocker else wanted
        if self._gradients.reduction != reduction:
            self._train_programs.clear()
            self._gradients = dataclasses.replace(self._gradients, reduction=reduction)
        if not blocker:
            return ""
        of_state = blocker.startswith(OF_STATE) and wanted is flattened
        hint = (
            f"; layers wait for sums over the devices: {option('batch_statistics', 'replica')} "
            "needs 1 collective a step (statistics of each replica's examples)"
        )
        return f"; reduced by XLA, because {blocker}" + (hint if of_state else "")

    @property
    def loss_is_of_tokens(self) -> bool:
        """Whether the loss has a value for each token, once a train step has been traced."""
        return self._forward.loss_is_of_tokens

    @property
    def gradients(self) -> Gradients:
        """The computation of the gradients, reduced as `choose_reduction` has decided."""
        return self._gradients

    @property
    def reduction(self) -> Reduction | ScatteredReduction | None:
        """The reduction of the gradients under `shard_map`; None if XLA reduces them."""
        return self._gradients.reduction

    # -- evaluation ----------------------------------------------------------------------------

    def metric_names(self, rows: PyTree) -> list[str]:
        """Returns the names of an evaluation's metrics for such rows. Nothing is computed."""
        mask = jnp.ones(jax.tree.leaves(rows)[0].shape[0], bool)
        variables = self.abstract_state.variables
        return list(jax.eval_shape(self._forward.evaluate, variables, rows, mask, ABSTRACT_DRAW))

    def check_media(self, rows: PyTree) -> None:
        """Traces `media` for rows or their shapes, so that its errors are raised now."""
        if self._media is not None:
            mask = jnp.ones(jax.tree.leaves(rows)[0].shape[0], bool)
            with use_placement(self._placement):
                jax.eval_shape(
                    self._media, self.abstract_state.variables, rows, mask, ABSTRACT_DRAW
                )

    def _compile(
        self,
        function: Callable[..., Any],
        in_shardings: Any,
        check: Check | None = None,
    ) -> Any:
        """Compiles a function of variables and a batch; its result is replicated."""
        if not self._config.jit:
            return eager(function)
        compiled = jax.jit(
            function,
            in_shardings=in_shardings,
            out_shardings=self._placement.replicated,
            compiler_options=self.compiler_options or None,
        )
        return Together(compiled, constant=1, check=check)


def _check_kept_key(config: RunConfig, name: str) -> None:
    """Checks that no option lets parts of a batch draw from one key of the model's state."""
    # The keys of random streams derive from the step's key, which differs in each part.
    shares = {
        f"exact is {config.exact}": config.exact is not None,
        "batch_statistics is replica": config.batch_statistics == "replica",
        "strategy is parameter_server": config.strategy == "parameter_server",
    }
    for what, is_given in shares.items():
        if is_given:
            raise UserError(
                f"{what}, and the model keeps a random key in its state ({name}): each part of a "
                "batch would draw the same numbers from it. Draw from a stream of the model, such "
                "as nnx.Rngs or make_rng, or leave the option out"
            )


def _placed(leaf: Any, sharding: Sharding) -> Any:
    """Places a host array that every process holds in full as a global array."""
    if not isinstance(leaf, np.ndarray):
        return leaf
    return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])


# -- The choice of the gradient reduction: by XLA, or by a function under `shard_map` --------------
#
# A function under `shard_map` is used only if the gradients are the same as with XLA's reduction.

OF_STATE = "the model carries state"
"""The beginning of the reason if the model has state, which depends on the global batch."""


def requested_reduction(
    function: Reduction | None, config: RunConfig, placement: Placement, layout: Layout
) -> Reduction | ScatteredReduction | None:
    """Returns the reduction that the user or the configuration requests; None if neither does.

    `function` is the user's own reduction.

    Raises:
      UserError: If `function` is not callable, if nothing is split that `reduce_scatter` could
        scatter, or if two of the options contradict each other.
    """
    options = config.collectives
    if config.exact is not None:
        check_exact(config, placement, function)
        return pairwise
    if function is not None and not callable(function):
        raise UserError(
            f"reduction is {function!r}: it must be a function of (gradients, axes); "
            f"collectives.reduction takes names: {', '.join(NAMED)}"
        )
    if options.reduction not in (None, "automatic"):
        if function is not None:
            raise UserError(
                f"collectives.reduction is {options.reduction}, and a reduction function is "
                "given: use only one of them"
            )
        if options.reduction == "reduce_scatter":
            if not layout.splits_gradients:
                raise UserError(
                    "collectives.reduction is reduce_scatter, which is for the strategies that "
                    f"split gradients (zero, fully_sharded), and the strategy is {placement.name}: "
                    "use all_reduce"
                )
            return ScatteredReduction(layout, options.reduce_dtype)
        function = NAMED[options.reduction]
    if function is None and config.batch_statistics == "replica" and placement.batch_shards > 1:
        if options.reduction == "automatic":
            raise UserError(
                "batch_statistics is replica, which reduces gradients under shard_map, and "
                "collectives.reduction is automatic, which leaves them to XLA: leave one out"
            )
        on_cpu = placement.devices[0].platform == "cpu"
        function = flattened if on_cpu and options.reduce_dtype is None else all_reduce
    if options.reduce_dtype is None:
        return function
    if function is None and layout.splits_gradients:
        return ScatteredReduction(layout, options.reduce_dtype)
    return in_dtype(function or all_reduce, options.reduce_dtype)


def describe_request(config: RunConfig) -> str:
    """Returns the setting that requests a reduction under `shard_map`, for an error message."""
    if config.exact is not None:
        return f"exact={config.exact}"
    if config.batch_statistics == "replica":
        return "batch_statistics=replica"
    if config.collectives.reduction is not None:
        return f"collectives.reduction={config.collectives.reduction}"
    if config.collectives.reduce_dtype is not None:
        return f"collectives.reduce_dtype={config.collectives.reduce_dtype}"
    return "a reduction function"


def default_reduction(
    config: RunConfig, placement: Placement, layout: Layout
) -> Reduction | ScatteredReduction | None:
    """Returns the reduction that is faster than XLA's; None if there is none.

    On CPU this is one all-reduce of the flattened gradients, with several processes three times as
    fast. GPU and TPU have dedicated links, and XLA combines its own collectives there. But on TPU
    it all-reduces gradients that it should reduce-scatter. The caller checks that the reduction
    computes the same gradients.
    """
    if config.collectives.reduction is not None or not config.jit or placement.batch_shards == 1:
        return None
    platform = placement.devices[0].platform
    if layout.splits_gradients:
        return ScatteredReduction(layout) if platform == "tpu" else None
    return flattened if platform == "cpu" and layout.replicates_params else None


def shard_map_blocker(
    gradients: Gradients,
    *,
    layout: Layout,
    params: PyTree,
    frozen: PyTree,
    model_state: PyTree,
    batch: PyTree,
    values: Callable[[PyTree, PyTree, PyTree, PyTree], PyTree],
    in_context: bool = False,
    batch_coupled: bool = False,
) -> str | None:
    """Returns why gradients reduced under `shard_map` could differ from XLA's; None if they cannot.

    With `gradients.per_replica`, differences by batch statistics and random numbers are intended
    and not reported. The parameters, the model state and the global batch are abstract.

    Args:
      params: The trained parameters; `frozen` are the others.
      values: Maps (params, frozen, model_state, batch) to the objective's values, computed without
        batch statistics.
      in_context: Whether the model runs in a context that it does not have under `shard_map`; see
        `ModelContext`.
      batch_coupled: Whether the objective is declared to combine the examples of its batch.
    """
    if batch_coupled and gradients.parts > 1:
        return "the objective is declared as batch_coupled"
    name = gradients.placement.name
    scatters = isinstance(gradients.reduction, ScatteredReduction)
    splits = layout.splits_tensors if scatters else not layout.replicates_params
    if gradients.placement.size(EXPERT_AXIS) > 1:
        return (
            f"mesh.{EXPERT_AXIS} splits the parameters of the experts, whose gradients XLA reduces"
        )
    if splits and not gradients.gathers_params:
        return (
            f"the strategy {name} splits the parameters; use mirrored, zero, central_storage or "
            "hybrid, without rules"
        )
    if gradients.placement.size(SEQUENCE_AXIS) > 1:
        return (
            f"mesh.{SEQUENCE_AXIS} splits the tokens of each example, whose gradients XLA reduces"
        )
    state_leaves = jax.tree.leaves(model_state)
    if state_leaves and not gradients.per_replica and not gradients.batch_axes:
        return (
            f"{OF_STATE} ({len(state_leaves)} arrays, for example batch "
            "statistics), which would differ between devices"
        )
    single = dataclasses.replace(gradients, reduction=None, placement=ON_ONE_DEVICE)
    key = jax.eval_shape(jax.random.key, 0)
    gathers = ParamGathers(None)
    with record_strategy_queries() as queries, use_gathers(gathers):
        trace = jax.make_jaxpr(single.of_sum, axis_env=gradients.batch_axes)
        jaxpr = trace(params, frozen, model_state, batch, key)
    if scatters and (whole := layout.gathered_whole(gathers.in_loop)):
        return (
            f"{min(whole)} would be gathered whole: only parameters that the model passes to "
            "scan_layers, and whose first dim is not split, are gathered one layer at a time"
        )
    if queries:
        return "the objective calls current_strategy(), which is unknown on a single device"
    named = dict(gradients.batch_axes)
    if effects := [x for x in jaxpr.effects if getattr(x, "name", None) not in named]:
        return (
            f"the objective has side effects ({', '.join(map(str, effects))}), "
            "which each device would repeat"
        )
    if constrains_sharding(jaxpr.jaxpr):
        return "the objective constrains the sharding of arrays itself"
    _, is_used = partial_eval.dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars))
    if is_used[-1] and not gradients.own_draws:  # the key is the last argument
        return (
            "the model or the objective draws random numbers (dropout), which would differ "
            "between devices"
        )
    if (parts := gradients.parts) == 1:
        return None
    # Before the proof below, which traces the model without its context.
    if in_context and _depends_on_context(values, params, frozen, model_state, batch):
        return "the model depends on the mesh of JAX's context, or on Flax's logical axis rules"
    with use_placement(gradients.part_placement):
        why = why_parts_differ(
            lambda given, rows: values(given[0], given[1], given[2], rows),
            (params, frozen, model_state),
            batch,
            parts,
            own_draws=gradients.own_draws,
            gradients=True,
            axes=gradients.batch_axes,
        )
    if why:
        return (
            "the objective's values may depend on other examples of the batch, on its size or on "
            f"an example's position in it, and each device has only a part of the batch ({why})"
        )
    return None


def _depends_on_context(values: Callable[..., PyTree], *given: PyTree) -> bool:
    """Returns whether a model computes something else, or fails, without its `ModelContext`."""

    def program() -> str:
        text = str(jax.make_jaxpr(lambda *args: values(*args))(*given))
        return re.sub(r"0x[0-9a-f]+", "", text)  # addresses of functions

    with record_strategy_queries():
        within = program()
    with use_placement(ON_ONE_DEVICE):
        try:
            return program() != within
        except Exception:  # of any class, as the model's code raises them
            return True


def check_agrees(reduction: Reduction, placement: Placement, params: PyTree) -> None:
    """Raises `UserError` if a user's reduction returns different gradients on the devices.

    The reduction is called once, with random arrays of the parameters' shapes and dtypes. Without
    this check the devices' copies of a parameter would differ from the first step on, without an
    error.
    """
    if placement.mesh is None or placement.batch_shards == 1:
        return

    def local(key: jax.Array) -> PyTree:
        for axis in BATCH_AXES:
            key = jax.random.fold_in(key, jax.lax.axis_index(axis))
        noise = jax.tree.map(lambda x: jax.random.normal(key, x.shape).astype(x.dtype), params)
        reduced = reduction(noise, BATCH_AXES)
        return jax.tree.map(
            lambda x: (jax.lax.pmax(x, BATCH_AXES) == jax.lax.pmin(x, BATCH_AXES)).all(), reduced
        )

    whole = PartitionSpec()
    program = jax.shard_map(
        local, mesh=placement.mesh, in_specs=whole, out_specs=whole, check_vma=False
    )
    agrees = call_together(jax.jit(program), jax.random.key(0))
    by_name = named_leaves(jax.device_get(agrees))
    if differing := [name for name, same in by_name.items() if not same]:
        raise UserError(
            f"the reduction returns different gradients on each device, of {differing[0]} for "
            "example: it must return the sums over all of its axes, as "
            "jax.lax.psum(gradients, axes) does"
        )


# -- XLA options with which the steps of a run are compiled ----------------------------------------


def step_options(config: RunConfig, placement: Placement) -> dict[str, Value]:
    """Returns the XLA options for a step: the user's, and those that other options of the run need.

    Raises:
      UserError: If options contradict each other, or XLA rejects one of the user's.
    """
    platform = placement.devices[0].platform
    ours = compiler_options(config.collectives, platform, gathers=_gathers(placement))
    if config.exact is not None:
        ours |= exact_options(platform)
    flags = {flag.name: flag.value for flag in _flags(config, placement)}
    return merge_compiler_options(config.compiler_options, ours, placement.replicated, flags)


def describe_preset(config: RunConfig, placement: Placement, options: Mapping[str, Value]) -> str:
    """Returns the options that the preset has added, for the log; "" if there are none.

    `options` is the result of `step_options`.
    """
    given = {option.partition("=")[0] for option in config.compiler_options}
    names = [f.name for f in _flags(config, placement) if f.name in options and f.name not in given]
    return f"XLA preset: {', '.join(names)}" if names else ""


def _flags(config: RunConfig, placement: Placement) -> tuple[Flag, ...]:
    if config.xla_preset == "none" or len(placement.devices) == 1:
        return ()
    parameters = Parameters.SHARDED if _gathers(placement) else Parameters.REPLICATED
    return preset_flags(placement.devices[0].device_kind, parameters)


def _gathers(placement: Placement) -> bool:
    return placement.strategy.shards_params or placement.strategy.shards_optimizer

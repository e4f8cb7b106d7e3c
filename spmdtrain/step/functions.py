"""The jitted functions of a run, their gradient reduction and their XLA options."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Sharding

from spmdtrain.adapters.base import (
    Adapter,
    ExtendsBase,
    Function,
    ModelContext,
    Variables,
    annotations_of,
    check_call,
    file_names_of,
    layer_paths,
)
from spmdtrain.config.conflicts import conflict
from spmdtrain.config.run_config import Purpose, RunConfig, derive_seed
from spmdtrain.distributed.first_call import Together, call_together
from spmdtrain.errors import UserError
from spmdtrain.sharding.layout import Layout, ShardingTable, tabulate
from spmdtrain.sharding.placement import (
    Placement,
    use_placement,
)
from spmdtrain.sharding.rules import AxisRules, Rule
from spmdtrain.step import hyperparameters
from spmdtrain.step.batch_checks import ABSTRACT_DRAW, BatchChecks, check_partitioned, check_program
from spmdtrain.step.exact import FixedOrder
from spmdtrain.step.gradients import (
    ANY_ORDER,
    NAMED,
    AllReduced,
    GradientRule,
    Loss,
    Reduction,
    Scattered,
    SumOrder,
    all_reduce,
    flattened,
    in_dtype,
    reduced_by,
)
from spmdtrain.step.objective import Declared, Forward
from spmdtrain.step.optimizer import BaseModel, Update, extra_names
from spmdtrain.step.optimizer_record import OptimizerRecord, record_optimizer
from spmdtrain.step.state import TrainState, transform_of
from spmdtrain.strategies import ASYNCHRONOUS
from spmdtrain.tree import is_key, named_leaves, path_name
from spmdtrain.xla.compiler import (
    Flag,
    Parameters,
    Value,
    compiler_options,
    merge_compiler_options,
    options_for_one_run,
    preset_flags,
)

# -- The jitted functions of a run: initialize, train, evaluate, predict ---------------------------

PyTree = Any
Check = Callable[[Any, PyTree], None]
"""A check of a program: a function of its open jaxpr and its arguments."""


class RunFunctions:
    """The jitted functions of one model, objective and optimizer under one strategy.

    `plan_step` makes the plan of a train step from them. `evaluate` and `predict` are functions of
    (variables, batch, mask, draw), where `draw` is uint32 (2,) (see `eval_key`). All take global
    arrays. Without `config.jit`, they run operation by operation.

    Args:
      objective: Returns per-example values and weights for (model, batch).
      predict: Returns predictions for (model, batch).
      rules: Sharding rules for the state; the first match counts.
      axis_rules: The table from the names of the model's annotations to mesh axes.
      reduction: Reduces the gradients under `shard_map`. By default the configuration decides.
      media: Returns a pytree of arrays to log for (model, batch).

    Attributes:
      transform: Makes the programs of the run from its step.
      kind: Returns the kind of a step, which is counted from 1.
      step_state: The state in a step, as shapes and dtypes; `layout` has its shardings.
      abstract_state: The state of the run, as shapes and dtypes.
      shardings: The sharding of each leaf of the state of the run between steps.
      base: The frozen base model of low-rank factors; None without.
      forward: The model with its objective and predict function.
      loss: The loss of a global batch.
      rule: The gradient rule that options request; None if `plan_step` chooses one.
      own_reduction: The user's reduction of gradients; None without.
      order: The order of the run's sums.
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
        self.config, self.placement = config, placement
        extends = adapter if isinstance(adapter, ExtendsBase) else None
        frozen = (*config.freeze, *(extends.frozen if extends else ()))
        self.order = ANY_ORDER if config.exact is None else FixedOrder(placement, config.exact)
        self.update = self.order.update(Update(optimizer, frozen, config.ema_decay))
        self.context = ModelContext(placement, axis_rules)
        self.transform = transform_of(config, placement)
        self.kind = self.transform.kind
        of_step = self._init
        init = self.transform.begin(of_step)
        given = adapter.given, *map(jax.random.key, (0, 0))
        with use_placement(placement):  # models may call current_strategy()
            # By `jax.jit`, which need not trace the same function a second time below.
            abstract: TrainState = jax.jit(of_step).eval_shape(*given)
            self.abstract_state: TrainState = jax.jit(init).eval_shape(*given)
        self.step_state = abstract
        states = layer_paths(adapter, abstract.model_state)
        self.update.check(abstract.params, abstract.opt_state, states.values())
        is_saved = config.init_from is None
        self.base = BaseModel.of(extends, is_saved=is_saved) if extends else None
        annotations = annotations_of(adapter)
        self.layout = Layout(
            *(abstract, placement, rules, config.sharding),
            annotations=annotations,
            axis_rules=axis_rules,
            derived=extends.derived if extends else {},
        )
        self.context = ModelContext(placement, axis_rules, annotated=bool(annotations))
        self.shardings: TrainState = self.layout.shardings
        if fields := self.transform.fields:
            placement_in_step = self.transform.placement
            self.shardings = self.layout.of_run(self.abstract_state, placement_in_step, fields)
        self.forward = Forward(
            adapter,
            objective,
            predict,
            self.layout,
            self.context,
            config,
            self.abstract_state.params,
            [name for name, path in states.items() if self.update.is_frozen(path)],
        )
        self.checks = BatchChecks(
            self.forward, self.update, self.abstract_state, placement, config, self.order
        )
        self.own_reduction = reduction
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
        if keys and config.strategy == ASYNCHRONOUS:
            raise UserError(
                f"strategy is {ASYNCHRONOUS}, and parameter {keys[0]} is a random key, which "
                "servers cannot send: keep jax.random.key_data of it, and call "
                "jax.random.wrap_key_data in the model"
            )
        per_replica = config.normalizes_per_replica
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
        self.loss = Loss(self.forward.training_sums, config.microbatches, placement)
        self.order.check(config, reduction, optimizer)
        self.rule = self.order.rule() or requested_rule(reduction, config, placement, self.layout)
        variables, replicated = self.shardings.variables, placement.replicated
        self.compiler_options = step_options(config, placement, self.order)

        # The state is initialized directly into its shardings, and so are the arrays that a module
        # already holds: no device ever holds more than its share.
        self.given_shardings = self._given_shardings(replicated)
        self._jit_init = jax.jit(
            partial(init) if annotations else init,  # traced with the annotations
            in_shardings=(self.given_shardings, replicated, replicated),
            out_shardings=self.shardings,
            compiler_options=options_for_one_run(placement.devices[0].platform),
        )
        # Batches are split or, if they do not divide, whole on each device.
        places = (variables, None, None, replicated)
        evaluate = self.order.evaluation(self.forward.evaluate)
        check: Check | None = None
        if placement.mesh is not None and placement.mesh.size > 1:
            check = partial(check_program, placement=placement)
        self.evaluate = self._compile(evaluate, places, check)
        # Replicated predictions, because every process returns all of them.
        self.predict = self._compile(self.forward.predictions, places, check)
        declared = None if media is None else Declared.of(media)
        self._media = None if declared is None else partial(self.forward.in_eval, declared)
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
        with use_placement(self.placement):  # independent of the calling thread
            state: TrainState = call_together(self._jit_init, given, *keys)
        return state

    def _init(self, given: PyTree, init_key: jax.Array, step_key: jax.Array) -> TrainState:
        # Copied, because the first state is donated and the user's own arrays would be with it.
        params, model_state = self.context.call(
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

    def begun(self, state: TrainState) -> TrainState:
        """Returns the first state of the run that begins with the state of a step."""
        if not (fields := self.transform.fields):
            return state
        begin, shardings = self.transform.begin(lambda state: state), self.shardings
        if not fields.keys() & TrainState.FIELDS.keys():  # no copy of the others is needed
            extra = jax.jit(lambda state: begin(state).extra, out_shardings=shardings.extra)
            return dataclasses.replace(state, extra=call_together(extra, state))
        begun: TrainState = call_together(jax.jit(begin, out_shardings=shardings), state)
        return begun

    def opt_state_of(self, params: PyTree) -> PyTree:
        """Returns the optimizer's initial state for these parameters, as in a step."""

        def begin(params: PyTree) -> PyTree:
            on_device = jax.device_put(params, self.layout.on_device.params)
            return self.update.init(on_device)

        program = jax.jit(begin, out_shardings=self.layout.shardings.opt_state)
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
        return self.forward.as_parameters(variables)

    def in_device_memory(self, variables: Variables) -> Variables:
        """Returns a copy of variables in device memory, to call the model with outside of steps."""
        on_device = jax.device_put(variables, self.layout.on_device.variables)
        # Copied, because the state's own arrays are donated to the next step.
        return jax.tree.map(jnp.copy, self.as_parameters(on_device))

    # -- the train step ------------------------------------------------------------------------

    @property
    def has_custom_reduction(self) -> bool:
        """Whether `plan_step` runs a program on the devices of all processes."""
        return self.own_reduction is not None

    @property
    def loss_is_of_tokens(self) -> bool:
        """Whether the loss has a value for each token, once a train step has been traced."""
        return self.forward.loss_is_of_tokens

    # -- evaluation ----------------------------------------------------------------------------

    def metric_names(self, rows: PyTree) -> list[str]:
        """Returns the names of an evaluation's metrics for such rows. Nothing is computed."""
        mask = jnp.ones(jax.tree.leaves(rows)[0].shape[0], bool)
        variables = self.abstract_state.variables
        return list(jax.eval_shape(self.forward.evaluate, variables, rows, mask, ABSTRACT_DRAW))

    def check_media(self, rows: PyTree) -> None:
        """Traces `media` for rows or their shapes, so that its errors are raised now."""
        if self._media is not None:
            mask = jnp.ones(jax.tree.leaves(rows)[0].shape[0], bool)
            with use_placement(self.placement):
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
        if not self.config.jit:
            return eager(function)
        compiled = jax.jit(
            function,
            in_shardings=in_shardings,
            out_shardings=self.placement.replicated,
            compiler_options=self.compiler_options or None,
        )
        return Together(compiled, constant=1, check=check)


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` without compilation: nested `jax.jit` calls run eagerly as well."""

    def run(*args: Any) -> Any:
        with jax.disable_jit():
            return function(*args)

    return run


def _check_kept_key(config: RunConfig, name: str) -> None:
    """Checks that no option lets parts of a batch draw from one key of the model's state."""
    # The keys of random streams derive from the step's key, which differs in each part.
    shares = {
        f"exact is {config.exact}": config.exact is not None,
        "batch_statistics is replica": config.normalizes_per_replica,
        f"strategy is {ASYNCHRONOUS}": config.strategy == ASYNCHRONOUS,
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


# -- The gradient rule that options request ------------------------------------------------------


def requested_rule(
    function: Reduction | None, config: RunConfig, placement: Placement, layout: Layout
) -> GradientRule | None:
    """Returns the gradient rule that the user or the configuration requests; None if neither does.

    `function` is the user's own reduction.

    Raises:
      UserError: If `function` is not callable, or if two of the options contradict each other.
    """
    options, per_replica = config.collectives, config.normalizes_per_replica
    if function is not None and not callable(function):
        raise UserError(
            f"reduction is {function!r}: it must be a function of (gradients, axes); "
            f"collectives.reduction takes names: {', '.join(NAMED)}"
        )
    if function is not None:
        check_call(function, "reduction(gradients, axes)", None, None)
    if options.reduction not in (None, "automatic"):
        if function is not None:
            raise UserError(
                f"collectives.reduction is {options.reduction}, and a reduction function is "
                "given: use only one of them"
            )
        if options.reduction == "reduce_scatter":
            if not layout.splits_gradients:
                raise UserError(conflict("collectives.reduction", "strategy").text(config))
            return Scattered(placement, layout, options.reduce_dtype, per_replica=per_replica)
        function = NAMED[options.reduction]
    if function is None and per_replica and placement.batch_shards > 1:
        if options.reduction == "automatic":
            raise UserError(conflict("batch_statistics", "collectives.reduction").text(config))
        on_cpu = placement.devices[0].platform == "cpu"
        function = flattened if on_cpu and options.reduce_dtype is None else all_reduce
    if options.reduce_dtype is not None:
        if function is None and layout.splits_gradients:
            return Scattered(placement, layout, options.reduce_dtype, per_replica=per_replica)
        function = in_dtype(partial(reduced_by, function or all_reduce), options.reduce_dtype)
    return None if function is None else AllReduced(placement, function, per_replica=per_replica)


def describe_request(config: RunConfig) -> str:
    """Returns the setting that requests a reduction under `shard_map`, for an error message."""
    if config.exact is not None:
        return f"exact={config.exact}"
    if config.normalizes_per_replica:
        return "batch_statistics=replica"
    if config.collectives.reduction is not None:
        return f"collectives.reduction={config.collectives.reduction}"
    if config.collectives.reduce_dtype is not None:
        return f"collectives.reduce_dtype={config.collectives.reduce_dtype}"
    return "a reduction function"


# -- XLA options with which the steps of a run are compiled ----------------------------------------


def step_options(
    config: RunConfig, placement: Placement, order: SumOrder = ANY_ORDER
) -> dict[str, Value]:
    """Returns the XLA options for a step: the user's, and those that other options of the run need.

    Raises:
      UserError: If options contradict each other, or XLA rejects one of the user's.
    """
    platform = placement.devices[0].platform
    ours = compiler_options(config.collectives, platform, gathers=_gathers(placement))
    ours |= order.compiler_options(platform)
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

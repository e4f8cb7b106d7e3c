"""The program of a train step: its plan, which decides, and the step, which computes."""

import dataclasses
import enum
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.interpreters import partial_eval
from jax.sharding import PartitionSpec

from spmdtrain.config.run_config import RunConfig
from spmdtrain.data.sampling import as_marked, examples_of, stacked_sharding
from spmdtrain.distributed.first_call import call_together
from spmdtrain.document.blocks import Fact, FactsBlock, NoteBlock
from spmdtrain.errors import UserError, option
from spmdtrain.kernels.attention import describe_attention
from spmdtrain.kernels.reference import reference_kernels
from spmdtrain.sharding import mesh
from spmdtrain.sharding.layout import Layout
from spmdtrain.sharding.placement import (
    ParamGathers,
    Placement,
    record_strategy_queries,
    use_placement,
    use_scope,
)
from spmdtrain.step import metrics
from spmdtrain.step.dispatch import Dispatch, Repeat, batch_shardings, repeated
from spmdtrain.step.exact import FixedOrder, exist
from spmdtrain.step.functions import (
    RunFunctions,
    describe_preset,
    describe_request,
    eager,
)
from spmdtrain.step.gradients import (
    ANY_ORDER,
    ON_ONE_DEVICE,
    AllReduced,
    ByXla,
    GradientRule,
    Inputs,
    Loss,
    Reduction,
    Scattered,
    SumOrder,
    flattened,
    reduced_by,
)
from spmdtrain.step.health import (
    Changes,
    Whole,
    finite_flags,
    global_norm,
    has_norms,
    may_branch,
    recomputes_changes,
    stays_finite,
)
from spmdtrain.step.hyperparameters import step_rate
from spmdtrain.step.layer_loop import describe_layers
from spmdtrain.step.metrics import NORMS, Combination
from spmdtrain.step.optimizer import ExtraArguments, Update, merge
from spmdtrain.step.state import TrainState, averaged_steps, check_same_arrays
from spmdtrain.strategies import EXPERT_AXIS, SEQUENCE_AXIS
from spmdtrain.tree import named_leaves
from spmdtrain.xla.jaxpr import constrains_sharding, recomputable
from spmdtrain.xla.padding import why_parts_differ

PyTree = Any

# -- The loss of a step's batch as a function of the parameters, for optimizers that evaluate it


@dataclass(frozen=True)
class BatchLoss:
    """The weighted mean loss of one global batch, at parameters that an optimizer chooses.

    Each evaluation starts from the same model state and the same random key as the step, so only
    the parameters differ. The model state after it is discarded.

    Attributes:
      inputs: Those of the step, whose parameters do not count.
      before: Results of the step that have to be complete before an evaluation (see `_after`).
    """

    rule: GradientRule
    loss: Loss
    update: Update
    layout: Layout
    inputs: Inputs
    before: Sequence[jax.Array]

    def value(self, params: PyTree) -> jax.Array:
        """Returns the loss at these trained parameters, a scalar that can be differentiated."""
        return self.loss.mean(self.inputs._replace(params=self._placed(params)))

    def grad(self, params: PyTree, _: Any = None) -> PyTree:
        """Returns the gradients at these trained parameters, computed as in the step."""
        output = self.rule(self.loss, self.inputs._replace(params=self._placed(params)))
        return self.layout.gradients(output.gradients)

    def _placed(self, params: PyTree) -> PyTree:
        whole = self.layout.at_rest(merge(self._after(params), self.inputs.frozen))
        return self.update.partition(whole)[0]

    def _after(self, params: PyTree) -> PyTree:
        """Returns the parameters; on CPUs they depend on the arrays of `before`.

        Optimizers evaluate the loss in loops and branches, and XLA's CPU client does not order the
        collectives in these with those outside. Without this dependency its threads may wait in
        different collectives (see `health.may_branch`).
        """
        device = next(iter(jax.tree.leaves(self.layout.on_device.params)[0].device_set))
        if device.platform != "cpu":
            return params
        known = exist(self.before)
        return jax.tree.map(lambda x: jnp.where(known, x, jnp.zeros_like(x)), params)


# -- Norms and finite flags of a step in the same pass as the optimizer's update, on TPUs ----------
#
# A pass over the parameters for each norm and each flag takes as long as the update itself: for
# GPT-2 small on v5e, the compiler estimates 14 ms for update, norms and flags, and 5 ms for the
# update alone. XLA fuses up to three sums of numbers into the pass of the update, if they are
# computed beside it (see `recomputable`), and no reduction of truth values. So a flag is a sum of
# products with 0, which is NaN if an element is not finite.
#
# These functions surround the whole step. They are not in health.py, because the operations of that
# file are left out of the FLOPs (see `count_flops`).


class Found(Protocol):
    """The first result of an update."""

    @property
    def state(self) -> Any: ...


Watched = TypeVar("Watched", bound=Found)


@dataclass(frozen=True)
class FusedChecks:
    """The norms of a step, and sums that show whether its state is finite.

    Attributes:
      norms: The norms of `metrics.NORMS`, float32 (3,).
      of_params: NaN if a parameter is not finite.
      of_optimizer: NaN if an array of the optimizer's state that has the shape of its parameter is
        not finite.
      others: Names of the other leaves of the optimizer's state.
    """

    norms: jax.Array
    of_params: jax.Array
    of_optimizer: jax.Array
    others: frozenset[str]

    def flags(self, loss: jax.Array, before: Whole, after: Whole, places: Whole) -> jax.Array:
        """Returns whether each of `FLAGS` is finite; arguments as of `finite_flags`."""

        def selected(tree: PyTree) -> list[Any]:
            return [x for name, x in named_leaves(tree).items() if name in self.others]

        states = (before.opt_state, after.opt_state, places.opt_state)
        of_others = stays_finite(*map(selected, states))
        of_model = stays_finite(
            before.model_state, after.model_state, places.model_state, arrays_too=True
        )
        of_state = ~jnp.isnan(self.of_optimizer) & of_others
        flags = [jnp.isfinite(loss).all(), ~jnp.isnan(self.of_params), of_state, of_model]
        return jnp.stack(flags)


def fused_evaluation(
    updated: Callable[..., tuple[Watched, tuple[PyTree, PyTree]]], *args: PyTree
) -> tuple[Watched, FusedChecks]:
    """Returns the result of an update, and its checks.

    `updated(*args)` returns an object with the new `state`, and (gradients, updates), which hold
    None in place of frozen parameters.
    """

    def extended(*args: PyTree) -> tuple[Any, PyTree]:
        found, (gradients, updates) = updated(*args)
        state = found.state
        return (found, gradients), (state.params, state.opt_state, updates)

    (found, gradients), again = recomputable(extended, *args, beside=True)
    params, opt_state, updates = again()
    of_params, of_updates = named_leaves(params), named_leaves(updates)
    of_state = {n: x for n, x in named_leaves(opt_state).items() if _is_checked(x)}
    owners = {name: _owner(name, x, of_params) for name, x in of_state.items()}
    zero = jnp.zeros((), jnp.float32)
    squares, changes, states = zero, zero, zero
    for name, value in of_params.items():
        if not _is_checked(value):
            continue
        wide = _wide(value)
        squares += jnp.square(wide).sum()
        update = of_updates.get(name)
        change = 0 * wide if update is None else jnp.square(_wide(update)) + 0 * wide
        changes += change.sum()
        if own := [_wide(x) for other, x in of_state.items() if owners[other] == name]:
            states += sum((0 * x for x in own), start=jnp.zeros_like(own[0])).sum()
    norms = jnp.stack([jnp.sqrt(squares), global_norm(gradients, None), jnp.sqrt(changes)])
    others = {name for name in named_leaves(opt_state) if owners.get(name) is None}
    return found, FusedChecks(norms, changes, states, frozenset(others))


def _is_checked(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def _owner(name: str, x: Any, params: dict[str, Any]) -> str | None:
    """Returns the parameter of the shape of `x` whose path ends the path `name`, if any."""
    parts = name.split("/")
    ends = ("/".join(parts[start:]) for start in range(len(parts)))
    return next((end for end in ends if end in params and params[end].shape == x.shape), None)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


# -- The health of a step: its finite flags and norms, where the platform computes them fastest ----


class NormsPass(enum.Enum):
    """The place in a step where the norms of its gradients and updates are computed."""

    AFTER = "after the update"
    IN_BRANCH = "in a branch of the logged steps, which computes the updates again"
    IN_UPDATE = "in the pass of the update"


@dataclass(frozen=True)
class Health:
    """The finite flags and the norms of a step.

    Attributes:
      log_every: The cadence of the log. On CPUs, where a pass over all parameters is a tenth of the
        step of a small network, steps that are not logged skip the norms (see `may_branch`).
      order: The order of the sums of norms.
      is_traced: Whether the step may be traced again. Without `jit` the user's code sees values.
    """

    layout: Layout
    log_every: int
    norms_pass: NormsPass = NormsPass.AFTER
    order: SumOrder = ANY_ORDER
    is_traced: bool = True

    @classmethod
    def choose(
        cls,
        layout: Layout,
        placement: Placement,
        params: PyTree,
        log_every: int,
        *,
        order: SumOrder,
        jit: bool,
    ) -> "Health":
        """Returns the fastest way for abstract parameters."""
        norms_pass = NormsPass.AFTER
        if not order.is_fixed and recomputes_changes(params, layout):
            norms_pass = NormsPass.IN_BRANCH
        elif not order.is_fixed and jit and placement.devices[0].platform == "tpu":
            is_complex = any(jnp.iscomplexobj(x) for x in jax.tree.leaves(params))
            norms_pass = NormsPass.AFTER if is_complex else NormsPass.IN_UPDATE
        return cls(layout, log_every, norms_pass, order, is_traced=jit)

    def watched(
        self, update: Callable[[Any, PyTree], tuple[Watched, tuple[PyTree, PyTree]]]
    ) -> Callable[[Any, PyTree], tuple[Watched, Any]]:
        """Returns an update whose second result is what `of_step` needs to know its changes.

        `update` is a function (state, batch) -> (result, (gradients, updates)); the last two hold
        None in place of frozen parameters.
        """
        if self.norms_pass is NormsPass.IN_UPDATE:
            return partial(fused_evaluation, update)
        if self.norms_pass is NormsPass.IN_BRANCH and self.is_traced:
            return partial(recomputable, update)
        return update

    def of_step(
        self,
        before: Any,
        after: Any,
        loss: jax.Array,
        changes: Any = None,
        is_last: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the finite flags and the norms of a step.

        The norms are those of `NORMS`, float32 (3,), or (1,) without `changes`.

        Args:
          before: The state before the update; other arguments as of `finite_flags`.
          changes: The second result of the watched update; None if it is not known.
        """
        places = self.layout.shardings
        # `optax.apply_if_finite` and the like leave out updates that are not finite: then the loss
        # may be anything, and the state decides alone.
        wrappers = optax.ApplyIfFiniteState, optax.ZeroNansState, optax.MultiStepsState
        nodes = jax.tree.leaves(after.opt_state, is_leaf=lambda x: isinstance(x, wrappers))
        leaves_out = any(isinstance(x, wrappers) and getattr(x, "skip_state", True) for x in nodes)
        if isinstance(changes, FusedChecks):
            flags = changes.flags(loss, before, after, places)
        else:
            flags = finite_flags(loss, before, after, places, is_last=is_last)
        if leaves_out:
            flags = flags.at[0].set(True)
        if isinstance(changes, FusedChecks):
            return flags, changes.norms
        known = changes if changes is None or callable(changes) else lambda: changes
        return flags, self._norms(after.params, after.step, known)

    def _norms(self, params: PyTree, step: jax.Array, changes: Changes | None) -> jax.Array:
        if isinstance(order := self.order, FixedOrder):
            trees = (params, *(() if changes is None else changes()))
            return jnp.stack([order.evaluate(lambda x: global_norm(x, None), x) for x in trees])
        places = self.layout.on_device.params
        places_of_changes = None if self.layout.splits_gradients else places
        needed = has_norms(step, self.log_every)

        def of_params() -> jax.Array:
            return global_norm(params, places)

        def of_changes(*, by_rows: bool = False) -> list[jax.Array]:
            trees = () if changes is None else changes()
            return [global_norm(tree, places_of_changes, by_rows=by_rows) for tree in trees]

        def in_branch() -> jax.Array:
            return jnp.stack([of_params(), *of_changes(by_rows=True)])

        if self.norms_pass is NormsPass.IN_BRANCH and changes is not None:
            return jax.lax.cond(needed, in_branch, lambda: jnp.zeros(len(NORMS), jnp.float32))
        if may_branch(places):
            norm = jax.lax.cond(needed, of_params, lambda: jnp.zeros((), jnp.float32))
        else:
            norm = of_params()
        return jnp.stack([norm, *of_changes()])


# -- The train step: one optimizer update on one global batch --------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutput:
    """The small arrays that a train step returns besides the state, fetched by `MetricsReader`.

    Attributes:
      metrics: f32 scalars by name, weighted means over the global batch.
      finite: bool (4,), whether each of `FLAGS` (the loss and the updated state) is finite.
      number: int32, the number of the step. Only the step of a `Loop` sets it, to check that its
        outputs are recorded in order.
      sums: f32 (metrics by sorted name, 2), weighted sums and weights.
      rate: The learning rate of the update, if it changes and is known (see `step_rate`).
      combined: The metrics that are combined from the means of others, by name.
      copies: Whether the arrays have a leading dim of copies of the state, each of which has made
        the step with a batch of its own.
      norms: f32 (3,), the norms of `NORMS`: of all updated parameters, of the mean gradients of the
        trained ones before the optimizer transforms them, and of what the optimizer added to those.
        They are meaningless if `has_norms` is false for the step. The step of a `Loop` has the
        first only.
      left_out: int32 (3,), why the update was left out (0: it was not), and how many were in a row
        and in all; None if the step leaves none out.
    """

    metrics: dict[str, jax.Array]
    finite: jax.Array
    number: jax.Array | None = None
    sums: jax.Array | None = None
    rate: jax.Array | None = None
    norms: jax.Array | None = None
    left_out: jax.Array | None = None
    combined: dict[str, Combination] = field(default_factory=dict)
    copies: bool = field(default=False, metadata={"static": True})

    def joined(self) -> "StepOutput":
        """Returns the output over all copies of the state, for which it waits.

        Means are weighted by the copies' weights, and norms are means.
        """
        if not self.copies:
            return self

        def read(values: Any) -> Any:
            return np.asarray(values)

        sums = read(self.sums).sum(-3)
        totals, weights = sums[..., 0], sums[..., 1]
        quotients = totals / np.where(weights == 0, 1, weights)
        means = {name: quotients[..., n] for n, name in enumerate(sorted(self.metrics))}
        for name, combination in self.combined.items():
            means[name] = sum(c * means[term] for term, c in combination.terms)
        return StepOutput(
            means,
            read(self.finite).all(-2),
            sums=sums,
            rate=None if self.rate is None else read(self.rate)[..., 0],
            norms=None if self.norms is None else read(self.norms).mean(-2),
            combined=self.combined,
        )


class _Updated(NamedTuple):
    """The state after a step, with the metrics of its batch."""

    state: TrainState
    means: dict[str, jax.Array]
    sums: jax.Array
    combined: dict[str, Combination]


def make_train_step(
    rule: GradientRule, loss: Loss, update: Update, layout: Layout, health: Health
) -> Callable[..., tuple[TrainState, StepOutput]]:
    """Returns the train step, a function (state, batch, is_last=None) -> (state, output).

    `is_last` tells whether the step is the last one of a dispatch of several.
    """

    def updated(state: TrainState, batch: PyTree) -> tuple[_Updated, tuple[PyTree, PyTree]]:
        # Gradients of the weighted mean loss, with sums over the global batch.
        trained, frozen = update.partition(state.params)
        inputs = Inputs(trained, frozen, state.model_state, batch, state.step_key)
        computed = rule(loss, inputs)
        means = metrics.batch_means(computed.metrics)
        reduced = layout.gradients(computed.gradients)

        # The optimizer's update, and the average of the parameters.
        sums = metrics.stacked(computed.metrics)
        before = [sums, *jax.tree.leaves(computed.model_state)]
        again = BatchLoss(rule, loss, update, layout, inputs, before)
        extra = ExtraArguments(means["loss"], reduced, again.value, again.grad)
        new = update(state.params, state.opt_state, reduced, extra, before)
        params, opt_state = layout.at_rest(new.params), new.opt_state
        steps = averaged_steps(state.step, state.averaged_before)
        averaged = update.average(state.averaged, params, opt_state, steps)
        model_state = computed.model_state
        after = TrainState(
            *(state.step + 1, params, opt_state, averaged, model_state, state.key),
            state.averaged_before,
        )
        check_same_arrays(state, after)
        combined = metrics.combinations(computed.metrics)
        return _Updated(after, means, sums, combined), (new.gradients, new.updates)

    def train_step(
        state: TrainState, batch: PyTree, is_last: jax.Array | None = None
    ) -> tuple[TrainState, StepOutput]:
        batch = examples_of(batch)
        state = layout.to_device(state, lambda shardings: shardings)  # from host memory
        found, changes = watched(state, batch)
        after, means = found.state, found.means
        # The finite flags of this loss and state. They are read before this state is saved.
        finite, norms = health.of_step(state, after, means["loss"], changes, is_last)
        rate = step_rate(update.optimizer, state.opt_state, after.opt_state)
        return after, StepOutput(
            means, finite, sums=found.sums, rate=rate, norms=norms, combined=found.combined
        )

    watched = health.watched(updated)
    return train_step


# -- The plan of a step: all that is decided before it is traced, with the reasons ----------------


@dataclass(frozen=True)
class StepPlan:
    """All that is decided before a train step is traced.

    Attributes:
      step: (state, batch) -> (state, output). If steps are repeated, it also takes whether it is
        the last one of its dispatch.
      state: The abstract state; that of a `Trainer` has the sharding of each leaf.
      shardings: The sharding of each leaf of the state, before and after a step.
      placement: The shardings of the batch and of the output.
      compiler_options: Options of XLA.
      rule: How gradients are computed and reduced; None in a `Loop`, whose step the user writes.
      dispatch: The steps of a call of the program, and how they are repeated.
      by_index: Whether batches are `IndexedBatch`.
      apart: The axes that split the copies of the state, if outputs have a dim of them.
      jit: Whether steps are compiled. If not, operations run one by one.
      reasons: What was decided and why, where a user may wonder.
      preset: The options of XLA that a preset has added, as text.
    """

    step: Callable[..., tuple[TrainState, StepOutput]]
    state: TrainState
    shardings: TrainState
    placement: Placement
    compiler_options: Mapping[str, Any]
    rule: GradientRule | None = None
    dispatch: Dispatch = field(default_factory=Dispatch)
    by_index: bool = False
    jit: bool = True
    reasons: tuple[str, ...] = ()
    preset: str = ""
    apart: tuple[str, ...] = ()

    def _repr_html_(self) -> str:
        """Returns the decisions that are known before the step is traced, for a notebook."""
        from spmdtrain.document.notebook import as_html

        steps = f"{self.dispatch.steps}, {self.dispatch.repeat}" if self.dispatch.steps > 1 else "1"
        axes = "none" if self.placement.mesh is None else mesh.describe_mesh(self.placement.mesh)
        facts = [Fact("mesh", axes), Fact("steps in a call", steps)]
        if self.rule is not None:
            facts.append(Fact("gradients", type(self.rule).__name__))
        return as_html(FactsBlock(facts, title="train step"), *map(NoteBlock, self.reasons))

    def program(self) -> Any:
        """Returns the function (state, batch) -> (state, output), jitted with `jit`.

        If steps are repeated, the arrays of batch and output have a leading dim of steps.
        """
        repeat = self.dispatch.repeat
        function = self.step if repeat is Repeat.NONE else repeated(self.step, repeat)
        if not self.jit:
            return eager(function)
        batch = batch_shardings(self.placement, repeat, by_index=self.by_index)
        output = self.placement.replicated
        if self.apart:
            output = self.placement.sharding(PartitionSpec(self.apart))
            output = output if repeat is Repeat.NONE else stacked_sharding(output)
        return jax.jit(
            function,
            in_shardings=(self.shardings, batch),
            out_shardings=(self.shardings, output),
            donate_argnums=0,  # the new state reuses the old one's memory
            compiler_options=dict(self.compiler_options) or None,
        )

    def decisions(self, jaxpr: Any) -> tuple[str, ...]:
        """Returns what was decided and why, also while its open jaxpr was traced."""
        attention = describe_attention(jaxpr, self.placement.devices[0].platform)
        found = (*self.reasons, attention, describe_layers(jaxpr), self.preset)
        return tuple(filter(None, found))


def plan_step(
    functions: RunFunctions,
    batch: PyTree,
    *,
    kind: str | None = None,
    dispatch: Dispatch | None = None,
    by_index: bool = False,
) -> StepPlan:
    """Decides how the train step of a batch is computed.

    Args:
      batch: The batch of one step, or its shapes.
      kind: The kind of step (see `StepTransform`); by default that of the first step.
      dispatch: The steps of a call of the program, and how they are repeated; by default one step.
      by_index: Whether the batch is an `IndexedBatch`.

    Raises:
      UserError: If the step would not compute what the options promise.
    """
    dispatch = dispatch or Dispatch()
    marked = as_marked(jax.eval_shape(examples_of, batch))
    # The checks read the operations of the model, and kernels cannot be analyzed.
    with reference_kernels():
        functions.checks.check_training(marked.rows, marked.mask)
    rule, reasons = choose_rule(functions, marked.rows)
    loss = dataclasses.replace(functions.loss, placement=rule.part_placement)
    config, layout, placement = functions.config, functions.layout, functions.placement
    health = Health.choose(
        layout,
        placement,
        functions.abstract_state.params,
        config.log_every,
        order=functions.order,
        jit=config.jit,
    )
    step = make_train_step(rule, loss, functions.update, layout, health)
    transform = functions.transform
    kind = transform.kind(1) if kind is None else kind
    return StepPlan(
        transform.programs(step)[kind],
        functions.placed_state,
        functions.shardings,
        placement,
        functions.compiler_options,
        rule,
        dispatch,
        by_index,
        config.jit,
        (*reasons, *filter(None, [transform.describe(kind), dispatch.note])),
        describe_preset(config, placement, functions.compiler_options),
        transform.placement.apart,
    )


# -- The choice of the gradient rule ---------------------------------------------------------------
#
# A rule that computes parts of a batch apart is used only if the gradients are the same as by XLA.

OF_STATE = "the model carries state"
"""The beginning of the reason if the model has state, which depends on the global batch."""


def choose_rule(functions: RunFunctions, batch: PyTree) -> tuple[GradientRule, tuple[str, ...]]:
    """Returns the gradient rule for a batch, and the reasons."""
    config, layout, placement = functions.config, functions.layout, functions.placement
    by_xla = ByXla(placement)
    rule = functions.rule or default_rule(config, placement, layout)
    if isinstance(rule, ByXla):
        return rule, ()
    trained, frozen = functions.update.partition(functions.abstract_state.params)
    if functions.own_reduction is not None and not mesh.is_abstract():
        check_agrees(functions.own_reduction, placement, trained)
    key = jax.eval_shape(jax.random.key, 0)
    model_state = functions.abstract_state.model_state
    with reference_kernels(), use_placement(rule.traced_on):
        blocker = shard_map_blocker(
            rule,
            functions.loss,
            Inputs(trained, frozen, model_state, batch, key),
            layout=layout,
            values=functions.forward.values,
            in_context=functions.context.is_active,
            batch_coupled=functions.forward.objective.batch_coupled,
            apart=functions.transform.placement.apart,
        )
    if functions.rule is not None:
        if blocker:
            raise UserError(
                f"{describe_request(config)} reduces the gradients under shard_map, "
                f"where each device computes on its own part of the batch: {blocker}"
            )
        return rule, ("batch statistics of each replica",) * rule.own_statistics
    if not blocker:
        return rule, ()
    reasons = [f"reduced by XLA, because {blocker}"]
    if blocker.startswith(OF_STATE) and isinstance(rule, AllReduced):
        reasons.append(
            f"layers wait for sums over the devices: {option('batch_statistics', 'replica')} "
            "needs 1 collective a step (statistics of each replica's examples)"
        )
    return by_xla, tuple(reasons)


def default_rule(config: RunConfig, placement: Placement, layout: Layout) -> GradientRule:
    """Returns the rule that is fastest, if it computes the same gradients as `ByXla`.

    On CPU this is one all-reduce of the flattened gradients, with several processes three times as
    fast. GPU and TPU have dedicated links, and XLA combines its own collectives there. But on TPU
    it all-reduces gradients that it should reduce-scatter.
    """
    by_xla = ByXla(placement)
    if config.collectives.reduction is not None or not config.jit or placement.batch_shards == 1:
        return by_xla
    platform = placement.devices[0].platform
    if layout.splits_gradients:
        return Scattered(placement, layout) if platform == "tpu" else by_xla
    is_all_reduced = platform == "cpu" and layout.replicates_params
    return AllReduced(placement, flattened) if is_all_reduced else by_xla


def shard_map_blocker(
    rule: GradientRule,
    loss: Loss,
    inputs: Inputs,
    *,
    layout: Layout,
    values: Callable[[PyTree, PyTree, PyTree, PyTree], PyTree],
    in_context: bool = False,
    batch_coupled: bool = False,
    apart: tuple[str, ...] = (),
) -> str | None:
    """Returns why the gradients of a rule could differ from those by XLA; None if they cannot.

    With `rule.own_statistics`, differences by batch statistics and random numbers are intended and
    not reported.

    Args:
      inputs: The abstract arrays of a global batch.
      values: Maps (params, frozen, model_state, batch) to the objective's values, computed without
        batch statistics.
      in_context: Whether the model runs in a context that it does not have under `shard_map`; see
        `ModelContext`.
      batch_coupled: Whether the objective is declared to combine the examples of its batch.
      apart: The axes along which steps are computed apart.
    """
    if apart:
        return f"steps are computed apart along {' and '.join(apart)}, which are not reduced over"
    if batch_coupled and rule.parts > 1:
        return "the objective is declared as batch_coupled"
    placement, scatters = rule.placement, isinstance(rule, Scattered)
    splits = layout.splits_tensors if scatters else not layout.replicates_params
    if placement.size(EXPERT_AXIS) > 1:
        return (
            f"mesh.{EXPERT_AXIS} splits the parameters of the experts, whose gradients XLA reduces"
        )
    if splits and not rule.gathers_params:
        return (
            f"the strategy {placement.name} splits the parameters; use mirrored, zero, "
            "central_storage or hybrid, without rules"
        )
    if placement.size(SEQUENCE_AXIS) > 1:
        return (
            f"mesh.{SEQUENCE_AXIS} splits the tokens of each example, whose gradients XLA reduces"
        )
    state_leaves = jax.tree.leaves(inputs.model_state)
    if state_leaves and not rule.own_statistics and not rule.part_axes:
        return (
            f"{OF_STATE} ({len(state_leaves)} arrays, for example batch "
            "statistics), which would differ between devices"
        )
    single = dataclasses.replace(loss, placement=ON_ONE_DEVICE)
    gathers = ParamGathers(None)
    with record_strategy_queries() as queries, use_scope(gathers=gathers):
        part = partial(single.gradients, over_parts=rule.over_parts)
        jaxpr = jax.make_jaxpr(part, axis_env=rule.part_axes)(inputs)
    if scatters and (whole := layout.gathered_whole(gathers.in_loop)):
        return (
            f"{min(whole)} would be gathered whole: only parameters that the model passes to "
            "scan_layers, and whose first dim is not split, are gathered one layer at a time"
        )
    if queries:
        return "the objective calls current_strategy(), which is unknown on a single device"
    named = dict(rule.part_axes)
    if effects := [x for x in jaxpr.effects if getattr(x, "name", None) not in named]:
        return (
            f"the objective has side effects ({', '.join(map(str, effects))}), "
            "which each device would repeat"
        )
    if constrains_sharding(jaxpr.jaxpr):
        return "the objective constrains the sharding of arrays itself"
    _, is_used = partial_eval.dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars))
    if is_used[-1] and not rule.own_draws:  # the key is the last argument
        return (
            "the model or the objective draws random numbers (dropout), which would differ "
            "between devices"
        )
    if rule.parts == 1:
        return None
    # Before the proof below, which traces the model without its context.
    if in_context and _depends_on_context(values, *inputs[:4]):
        return "the model depends on the mesh of JAX's context, or on Flax's logical axis rules"
    with use_placement(rule.part_placement):
        why = why_parts_differ(
            lambda given, rows: values(given[0], given[1], given[2], rows),
            inputs[:3],
            inputs.batch,
            rule.parts,
            own_draws=rule.own_draws,
            gradients=True,
            axes=rule.part_axes,
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

    axes = placement.batch_axes

    def local(key: jax.Array) -> PyTree:
        for axis in axes:
            key = jax.random.fold_in(key, jax.lax.axis_index(axis))
        noise = jax.tree.map(lambda x: jax.random.normal(key, x.shape).astype(x.dtype), params)
        reduced = reduced_by(reduction, noise, axes)
        return jax.tree.map(
            lambda x: (jax.lax.pmax(x, axes) == jax.lax.pmin(x, axes)).all(), reduced
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

"""The train step, and the steps of one dispatch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from spmdtrain.adapters.base import Variables
from spmdtrain.data.sampling import examples_of
from spmdtrain.distributed.first_call import Together
from spmdtrain.sharding.layout import Layout
from spmdtrain.sharding.placement import Placement
from spmdtrain.step import metrics
from spmdtrain.step.batch_checks import check_partitioned
from spmdtrain.step.exact import exist
from spmdtrain.step.gradients import Gradients, difference
from spmdtrain.step.health import Health
from spmdtrain.step.hyperparameters import step_rate
from spmdtrain.step.metrics import Combination
from spmdtrain.step.optimizer import ExtraArguments, Update, clipped, merge
from spmdtrain.step.state import TrainState, averaged_steps, check_same_arrays

# -- The loss of a step's batch as a function of the parameters, for optimizers that evaluate it

PyTree = Any


@dataclass(frozen=True)
class BatchLoss:
    """The weighted mean loss of one global batch, at parameters that an optimizer chooses.

    Each evaluation starts from the same model state and the same random key as the step, so only
    the parameters differ. The model state after it is discarded.

    Attributes:
      model_state: The model state before the batch.
      before: Results of the step that have to be complete before an evaluation (see `_after`).
    """

    gradients: Gradients
    update: Update
    layout: Layout
    frozen: PyTree
    model_state: PyTree
    batch: PyTree
    key: jax.Array
    before: Sequence[jax.Array]

    def value(self, params: PyTree) -> jax.Array:
        """Returns the loss at these trained parameters, a scalar that can be differentiated."""
        params = self._placed(params)
        return self.gradients.mean_loss(params, self.frozen, self.model_state, self.batch, self.key)

    def grad(self, params: PyTree, _: Any = None) -> PyTree:
        """Returns the gradients at these trained parameters, computed as in the step."""
        params = self._placed(params)
        output = self.gradients(params, self.frozen, self.model_state, self.batch, self.key)
        return self.layout.gradients(output.gradients)

    def _placed(self, params: PyTree) -> PyTree:
        whole = self.layout.at_rest(merge(self._after(params), self.frozen))
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
      norms: f32 (3,), the norms of `NORMS`: of all updated parameters, of the mean gradients of the
        trained ones before the optimizer transforms them, and of what the optimizer added to those.
        They are meaningless if `has_norms` is false for the step. The step of a `Loop` has the
        first only.
    """

    metrics: dict[str, jax.Array]
    finite: jax.Array
    number: jax.Array | None = None
    sums: jax.Array | None = None
    rate: jax.Array | None = None
    norms: jax.Array | None = None
    combined: dict[str, Combination] = field(default_factory=dict)


class _Updated(NamedTuple):
    """The state after a step, with the metrics of its batch."""

    state: TrainState
    means: dict[str, jax.Array]
    sums: jax.Array
    combined: dict[str, Combination]


def make_train_step(
    gradients: Gradients, update: Update, layout: Layout, health: Health
) -> Callable[..., tuple[TrainState, StepOutput]]:
    """Returns the train step, a function (state, batch, is_last=None) -> (state, output).

    `is_last` tells whether the step is the last one of a dispatch of several.
    """

    def updated(state: TrainState, batch: PyTree) -> tuple[_Updated, tuple[PyTree, PyTree]]:
        # Gradients of the weighted mean loss, with sums over the global batch.
        trained, frozen = update.partition(state.params)
        computed = gradients(trained, frozen, state.model_state, batch, state.step_key)
        means = metrics.batch_means(computed.metrics)
        reduced = layout.gradients(computed.gradients)

        # The optimizer's update, and the average of the parameters.
        sums = metrics.stacked(computed.metrics)
        before = [sums, *jax.tree.leaves(computed.model_state)]
        given = (frozen, state.model_state, batch, state.step_key)
        loss = BatchLoss(gradients, update, layout, *given, before)
        extra = ExtraArguments(means["loss"], reduced, loss.value, loss.grad)
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


def make_gradient_step(
    gradients: Gradients,
    update: Update,
    placement: Placement,
    on_worker: optax.GradientTransformation,
    *,
    jit: bool = True,
    compiler_options: dict[str, Any] | None = None,
) -> Any:
    """Returns the jitted step of a worker of parameter servers: gradients without an update.

    It is a function (variables, batch, key, step) -> (gradients of the trained parameters, change
    of the model state, weighted means, stacked sums, combined metrics). `on_worker` is the part of
    the optimizer that is applied to the whole gradient.
    """

    def gradient_step(
        variables: Variables, batch: PyTree, key: jax.Array, step: jax.Array
    ) -> tuple[PyTree, PyTree, dict[str, jax.Array], jax.Array, dict[str, Combination]]:
        step_key = jax.random.fold_in(jax.random.wrap_key_data(key), step)
        trained, frozen = update.partition(variables.params)
        computed = gradients(trained, frozen, variables.model_state, batch, step_key)
        means = metrics.batch_means(computed.metrics)
        transformed = clipped(on_worker, computed.gradients, trained, means["loss"])
        change = difference(computed.model_state, variables.model_state)
        sums, combined = metrics.stacked(computed.metrics), metrics.combinations(computed.metrics)
        return transformed, change, means, sums, combined

    if not jit:
        return eager(gradient_step)
    replicated = placement.replicated
    compiled = jax.jit(
        gradient_step,
        in_shardings=(replicated, placement.batch, replicated, replicated),
        out_shardings=replicated,
        compiler_options=compiler_options or None,
    )
    return Together(compiled, constant=1, check=partial(check_partitioned, placement=placement))


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` without compilation: nested `jax.jit` calls run eagerly as well."""

    def run(*args: Any) -> Any:
        with jax.disable_jit():
            return function(*args)

    return run

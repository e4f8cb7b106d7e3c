"""The train step, and the steps of one dispatch."""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from spmdtrain.adapters.base import Variables
from spmdtrain.config.run_config import RunConfig
from spmdtrain.data.sampling import (
    CountedBatches,
    IndexedBatch,
    batch_at,
    examples_of,
    stacked_sharding,
    stacked_steps,
)
from spmdtrain.distributed.first_call import Together
from spmdtrain.errors import UserError
from spmdtrain.sharding.layout import Layout
from spmdtrain.sharding.placement import Placement
from spmdtrain.step import metrics
from spmdtrain.step.batch_checks import check_partitioned
from spmdtrain.step.exact import FixedOrder, exist
from spmdtrain.step.flops import count_flops
from spmdtrain.step.gradients import Gradients, difference
from spmdtrain.step.health import (
    Whole,
    finite_flags,
    global_norm,
    recomputes_changes,
    stays_finite,
    step_norms,
)
from spmdtrain.step.hyperparameters import step_rate
from spmdtrain.step.metrics import Combination
from spmdtrain.step.optimizer import ExtraArguments, Update, clipped, merge
from spmdtrain.step.state import TrainState, averaged_steps, check_same_arrays
from spmdtrain.tree import named_leaves
from spmdtrain.xla.jaxpr import equations, inner_jaxprs, recomputable

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


# -- Norms and finite flags of a step in the same pass as the optimizer's update, on TPUs ----------
#
# A pass over the parameters for each norm and each flag takes as long as the update itself: for
# GPT-2 small on v5e, the compiler estimates 14 ms for update, norms and flags, and 5 ms for the
# update alone. XLA fuses up to three sums of numbers into the pass of the update, if they are
# computed beside it (see `recomputable`), and no reduction of truth values. So a flag is a sum of
# products with 0, which is NaN if an element is not finite.


class Found(Protocol):
    """The first result of an update."""

    @property
    def state(self) -> Whole: ...


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
        """Returns whether each of `health.FLAGS` is finite; arguments as of `finite_flags`."""

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


def fuses_checks(placement: Placement, params: PyTree) -> bool:
    """Returns whether steps compute `FusedChecks`: on TPUs, if all parameters are real."""
    is_complex = any(jnp.iscomplexobj(x) for x in jax.tree.leaves(params))
    return bool(placement.devices[0].platform == "tpu") and not is_complex


def fused_evaluation(
    updated: Callable[..., tuple[Any, tuple[PyTree, PyTree]]], *args: PyTree
) -> tuple[Any, FusedChecks]:
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


# -- The steps of a dispatch: how many run without the host, and in which kind of program ----------

# The steps of a dispatch by default, of the largest small steps and of the smallest ones: the
# smaller the steps, the larger is the host's part of their time.
_OF_LARGEST, _OF_SMALLEST = 10, 50
_GRADIENT_FLOPS = 3  # of values with gradients, relative to those of the values
# Limits of a small step, which a CPU computes in some milliseconds. Signals wait for the end of a
# dispatch, and stacking batches of a few MiB takes longer than the dispatches that it saves.
_SMALL_FLOPS = 10**9
_SMALL_ELEMENTS = 2**23  # of the results of all operations of the objective
_SMALL_STATE = 2**26  # bytes
_SMALL_BATCH = 2**19  # bytes
# Decompositions of matrices, and solutions by them, which `count_flops` does not count.
_DECOMPOSITIONS = frozenset(
    {
        *("cholesky", "lu", "qr", "geqrf", "geqp3", "householder_product", "ormqr"),
        *("eig", "eigh", "svd", "schur", "hessenberg", "tridiagonal"),
        *("triangular_solve", "tridiagonal_solve"),
    }
)


class Repeat(enum.Enum):
    """The kind of program of a dispatch."""

    NONE = "one step"
    SCAN = "a loop of a fixed number of steps"
    UNROLLED = "a fixed number of steps as straight-line code"
    COUNTED = "a loop whose number of steps is an argument"


@dataclass(frozen=True)
class Dispatch:
    """The largest number of steps of a dispatch, and the kind of its program.

    A counted loop runs any number of steps up to `steps` by the same compiled code, so the numbers
    do not depend on where dispatches end. The other kinds have a second program for one step.
    """

    steps: int = 1
    repeat: Repeat = Repeat.NONE

    @property
    def is_counted(self) -> bool:
        """Whether the program takes the number of steps as an argument."""
        return self.repeat is Repeat.COUNTED

    @property
    def note(self) -> str:
        """A note for the log; "" if it needs none."""
        match self.repeat:
            case Repeat.NONE | Repeat.SCAN:
                return ""
            case Repeat.UNROLLED:
                why = "because convolutions in a loop are slow on CPU"
                return f"; {self.steps} steps unrolled, {why}"
            case Repeat.COUNTED:
                return f"; up to {self.steps} steps per dispatch"

    def program_steps(self, count: int) -> int:
        """Returns the number of steps for which the program of `count` steps is compiled."""
        return self.steps if self.is_counted else count

    def repeat_of(self, program_steps: int) -> Repeat:
        """Returns the kind of the program of a number of steps."""
        return self.repeat if program_steps == self.steps else Repeat.NONE


def may_group(config: RunConfig, placement: Placement, state: TrainState) -> bool:
    """Returns whether small steps are grouped if `steps_per_dispatch` is not set.

    They are grouped on CPUs, if each process has one device. On GPUs a loop of unknown length makes
    the host wait for each of its steps, and a loop of known length needs a second program, so the
    numbers would depend on the cadence of checkpoints. Virtual devices are for tests, and their
    collectives take longer than the host. The model must have no state, because a step could change
    its types. Shapes of the state suffice.
    """
    if config.exact is not None or not config.jit or placement.strategy.is_asynchronous:
        return False
    processes = {device.process_index for device in placement.devices}
    has_one_each = len(placement.devices) == len(processes)  # the same in all processes
    is_small = not jax.tree.leaves(state.model_state) and _bytes(state) <= _SMALL_STATE
    return has_one_each and _is_on_cpu(placement) and is_small


def choose_dispatch(
    steps: int | None,
    placement: Placement,
    state: TrainState,
    batch: PyTree,
    forward: Any,
    update: Any | None,
) -> Dispatch:
    """Returns how steps are dispatched.

    Convolutions are never in a loop on CPU: outside of loops XLA calls a library for them, and
    inside it generates code that takes many times as long.

    Args:
      steps: The option `steps_per_dispatch`. If it is None, `may_group` is true.
      state: Shapes suffice.
      batch: The batch of one step; shapes suffice.
      forward: The open jaxpr of the objective's values.
      update: The optimizer's `update_program`; not read if `steps` is given.
    """
    if steps is not None and not _is_on_cpu(placement):
        return Dispatch(steps, Repeat.SCAN)
    convolves = any(x.primitive.name == "conv_general_dilated" for x in equations(forward))
    if steps is not None:
        return Dispatch(steps, Repeat.UNROLLED if convolves else Repeat.COUNTED)
    if convolves or update is None or _has_unknown_time(forward) or _has_unknown_time(update):
        return Dispatch()
    flops = _GRADIENT_FLOPS * count_flops(forward).total + count_flops(update).total
    size = max(  # relative to the largest small step
        _bytes(state) / _SMALL_STATE,
        _bytes(batch) / _SMALL_BATCH,
        _elements(forward) / _SMALL_ELEMENTS,
        flops / _SMALL_FLOPS,
    )
    if size > 1:
        return Dispatch()
    return Dispatch(int(min(_OF_LARGEST / size, _OF_SMALLEST)), Repeat.COUNTED)


def update_program(
    optimizer: optax.GradientTransformation, params: PyTree, state: PyTree
) -> Any | None:
    """Returns the open jaxpr of an optimizer's update; shapes of the arguments suffice.

    The result is None if steps cannot be in a loop, because the update changes the types of the
    state, or if the update needs more than gradients: the other values are not known here.
    """
    trace = jax.make_jaxpr(optimizer.update, return_shape=True)
    try:
        traced, (_, after) = trace(params, state, params)
        _check_types(state, after)
    except Exception:
        return None
    return traced.jaxpr


def repeated(step: Callable[..., Any], repeat: Repeat) -> Callable[[Any, PyTree], Any]:
    """Returns the function of a dispatch: (state, stacked batches) -> (state, output).

    The arrays of its output have a leading dim of steps. `step` is a function (state, batch,
    whether it is the last step) -> (state, output).
    """
    return _counted(step) if repeat is Repeat.COUNTED else _fixed(step, repeat)


def _fixed(step: Callable[..., Any], repeat: Repeat) -> Callable[[Any, PyTree], Any]:
    def train_steps(state: Any, batches: PyTree) -> Any:
        # Of an `IndexedBatch` only the indices have a leading dim of steps.
        is_indexed = isinstance(batches, IndexedBatch)
        each = batches.indices if is_indexed else batches

        def body(state: Any, given: tuple[PyTree, jax.Array]) -> Any:
            batch, is_last = given
            batch = IndexedBatch(batch, batches.arrays) if is_indexed else batch
            return step(state, batch, is_last)

        count = stacked_steps(batches)
        is_last = jnp.arange(count) == count - 1
        return jax.lax.scan(body, state, (each, is_last), unroll=repeat is Repeat.UNROLLED)

    return train_steps


def _counted(step: Callable[..., Any]) -> Callable[[Any, CountedBatches], Any]:
    def train_steps(state: Any, batches: CountedBatches) -> Any:
        def step_at(state: Any, batches: CountedBatches, number: jax.Array) -> Any:
            return step(state, batch_at(batches, number), number == batches.count - 1)

        # Traced once, for the shapes of its output and for the body of the loop. Under `jax.jit`
        # its operations would lose their lines in the source.
        number = jax.ShapeDtypeStruct((), jnp.int32)
        traced, shapes = jax.make_jaxpr(step_at, return_shape=True)(state, batches, number)
        after, each = shapes
        _check_types(state, after)
        size = stacked_steps(batches)
        outputs = jax.tree.map(lambda x: jnp.zeros((size, *x.shape), x.dtype), each)

        def body(number: jax.Array, carried: tuple[Any, Any]) -> tuple[Any, Any]:
            state, outputs = carried
            given = jax.tree.leaves((state, batches, number))
            results = jax.core.eval_jaxpr(traced.jaxpr, traced.consts, *given)
            state, output = jax.tree.unflatten(jax.tree.structure(shapes), results)
            put = partial(jax.lax.dynamic_update_index_in_dim, index=number, axis=0)
            return state, jax.tree.map(put, outputs, output)

        return jax.lax.fori_loop(0, batches.count, body, (state, outputs))

    return train_steps


def _check_types(before: Any, after: Any) -> None:
    """Raises `UserError` if a step changes the arrays of a state, or its containers."""
    check_same_arrays(before, after)
    structures: list[Any] = [jax.tree.structure(state) for state in (before, after)]
    if structures[0] != structures[1]:
        raise UserError(
            "the state has other containers after a step than before it, so steps cannot be "
            "repeated in a loop: keep its structure, or set steps_per_dispatch to 1"
        )


def _is_on_cpu(placement: Placement) -> bool:
    return placement.devices[0].platform == "cpu"


def _has_unknown_time(jaxpr: Any) -> bool:
    """Returns whether the time of an open jaxpr does not follow from its counts of operations.

    It does not with loops of unknown length, calls of Python and decompositions of matrices.
    """
    unknown = _DECOMPOSITIONS | {"while"}
    return any(
        x.primitive.name in unknown or "callback" in x.params or x.effects for x in equations(jaxpr)
    )


def _elements(jaxpr: Any) -> int:
    """Returns the number of elements of the results of all operations of an open jaxpr."""
    total = 0
    for equation in jaxpr.eqns:
        inner = sum(_elements(x) for x in inner_jaxprs(equation))
        total += equation.params["length"] * inner if equation.primitive.name == "scan" else inner
        total += sum(x.aval.size for x in equation.outvars)
    return total


def _bytes(tree: PyTree) -> int:
    leaves = jax.tree.leaves(tree)
    return sum(x.size * x.dtype.itemsize for x in leaves)


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
    gradients: Gradients,
    update: Update,
    layout: Layout,
    placement: Placement,
    *,
    repeat: Repeat = Repeat.NONE,
    by_index: bool = False,
    log_every: int = 1,
    order: FixedOrder | None = None,
    jit: bool = True,
    compiler_options: dict[str, Any] | None = None,
) -> Any:
    """Returns the jitted train step, a function (state, batch) -> (state, output).

    Args:
      repeat: How the steps of a call are repeated. If at all, the arrays of batch and output have a
        leading dim of steps.
      by_index: Whether the batch is an `IndexedBatch`.
      log_every: The cadence of the log, for `step_norms`.
      order: The order of the sums of norms; None if it may depend on the devices.
      jit: Whether to compile. If not, operations run one by one.
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
        combined = metrics.combinations(computed.metrics)
        return _Updated(after, means, sums, combined), (new.gradients, new.updates)

    def train_step(
        state: TrainState, batch: PyTree, is_last: jax.Array | None = None
    ) -> tuple[TrainState, StepOutput]:
        batch = examples_of(batch)
        state = layout.to_device(state, lambda shardings: shardings)  # from host memory
        # Without `jit` the user's code has to see values, and `recomputable` would trace it.
        recomputes = jit and order is None and recomputes_changes(state.params, layout)
        fuses = jit and order is None and fuses_checks(placement, state.params)
        evaluate = recomputable if recomputes else fused_evaluation if fuses else _evaluated
        found, changes = evaluate(updated, state, batch)
        after, means = found.state, found.means
        check_same_arrays(state, after)

        # The finite flags of this loss and state. They are read before this state is saved.
        if isinstance(changes, FusedChecks):
            finite = changes.flags(means["loss"], state, after, layout.shardings)
            norms = changes.norms
        else:
            finite = finite_flags(means["loss"], state, after, layout.shardings, is_last=is_last)
            norms = step_norms(
                after.params, layout, after.step, log_every, changes=changes, order=order
            )
        rate = step_rate(update.optimizer, state.opt_state, after.opt_state)
        return after, StepOutput(
            means, finite, sums=found.sums, rate=rate, norms=norms, combined=found.combined
        )

    def repeated_step(
        state: TrainState, batch: PyTree, is_last: jax.Array
    ) -> tuple[TrainState, StepOutput]:
        after, output = train_step(state, batch, is_last)
        return _in_memory_of(state, after), output

    function = train_step if repeat is Repeat.NONE else repeated(repeated_step, repeat)
    if not jit:
        return eager(function)
    return jax.jit(
        function,
        in_shardings=(layout.shardings, batch_shardings(placement, repeat, by_index=by_index)),
        out_shardings=(layout.shardings, placement.replicated),
        donate_argnums=0,  # the new state reuses the old one's memory
        compiler_options=compiler_options or None,
    )


def batch_shardings(placement: Placement, repeat: Repeat, *, by_index: bool) -> Any:
    """Returns the shardings of a train step's batch, a prefix of its tree."""
    is_single = repeat is Repeat.NONE
    batch: Any = placement.batch if is_single else stacked_sharding(placement.batch)
    if by_index:
        batch = IndexedBatch(batch, placement.replicated)
    return CountedBatches(batch, placement.replicated) if repeat is Repeat.COUNTED else batch


def _in_memory_of(before: TrainState, after: TrainState) -> TrainState:
    """Returns the new state with each array in the memory space of the old one, as in a loop.

    Without a loop, the shardings of the program's results suffice.
    """
    structures: list[Any] = [jax.tree.structure(state) for state in (before, after)]
    if structures[0] != structures[1]:
        return after  # the loop refuses it

    def copied(old: jax.Array, new: jax.Array) -> jax.Array:
        memory = jax.typeof(old).memory_space
        return new if memory == jax.typeof(new).memory_space else jax.device_put(new, memory)

    return jax.tree.map(copied, before, after)


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


def _evaluated(
    function: Callable[..., tuple[PyTree, PyTree]], *args: PyTree
) -> tuple[PyTree, Callable[[], PyTree]]:
    """Returns the two results of a function as `recomputable` does, but keeps the second one."""
    first, second = function(*args)
    return first, lambda: second


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` without compilation: nested `jax.jit` calls run eagerly as well."""

    def run(*args: Any) -> Any:
        with jax.disable_jit():
            return function(*args)

    return run

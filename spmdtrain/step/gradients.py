"""From parameters and a global batch to the gradients of its weighted mean.

However they are computed (all at once, in microbatches, reduced by XLA or by hand), sums are added
up, and the mean is taken once, by the weight of the whole batch.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval
from jax.sharding import PartitionSpec

from spmdtrain.distributed.first_call import call_together
from spmdtrain.errors import UserError
from spmdtrain.sharding.mesh import BATCH_AXES
from spmdtrain.sharding.placement import Placement, record_strategy_queries, use_placement
from spmdtrain.step import metrics
from spmdtrain.step.model_state import averages_and_counts, difference, rejoined, with_difference
from spmdtrain.step.reductions import Reduction, flattened
from spmdtrain.strategies import DEFAULT
from spmdtrain.tree import named_leaves
from spmdtrain.xla.jaxpr import equations
from spmdtrain.xla.padding import why_parts_differ

PyTree = Any


class Found(NamedTuple):
    """What a batch gives: gradients, the weighted sums of loss and metrics, the model's state."""

    gradients: PyTree
    metrics: dict[str, metrics.Sums]
    model_state: PyTree


class Objective(Protocol):
    """The weighted sums of a batch, and the model state after it."""

    def __call__(
        self, params: PyTree, frozen: PyTree, model_state: PyTree, batch: PyTree, key: jax.Array
    ) -> tuple[dict[str, metrics.Sums], PyTree]: ...


@dataclass(frozen=True)
class Gradients:
    """How the gradients of a batch are computed.

    Attributes:
        objective: What is differentiated with respect to `params`, those that are trained.
        microbatches: Parts of the batch that are computed one after the other.
        placement: The mesh.
        reduction: Where given, each device computes its own examples, and this adds them up.
        per_replica: With a reduction, allow model state and random numbers: each replica
            normalizes by its own examples and draws its own numbers, and the change of the model
            state is averaged over the replicas.
    """

    objective: Objective
    microbatches: int
    placement: Placement
    reduction: Reduction | None = None
    per_replica: bool = False

    def __call__(
        self, params: PyTree, frozen: PyTree, model_state: PyTree, batch: PyTree, key: jax.Array
    ) -> Found:
        """For a global batch; the gradients are those of its weighted mean."""
        if self.reduction is not None and self.placement.mesh is not None:
            return self._by_hand(self.reduction, params, frozen, model_state, batch, key)
        found = self._of(params, frozen, model_state, batch, key)
        return found._replace(gradients=_of_mean(found.gradients, found.metrics))

    def _of(
        self, params: PyTree, frozen: PyTree, model_state: PyTree, batch: PyTree, key: jax.Array
    ) -> Found:
        if self.microbatches == 1:
            return self._of_one(params, frozen, model_state, batch, key)

        def one(found: Found, part: tuple[jax.Array, PyTree]) -> tuple[Found, None]:
            number, rows = part
            own = jax.random.fold_in(key, number)
            now = self._of_one(params, frozen, found.model_state, rows, own)
            # Added up leaf by leaf, each as soon as it is there: a leaf's own memory is reused.
            added = jax.tree.map(jnp.add, found.gradients, now.gradients)
            counted = jax.tree.map(jnp.add, found.metrics, now.metrics)
            return Found(added, counted, now.model_state), None

        parts = jax.tree.map(self._split, batch)
        rows = jax.tree.map(lambda x: x[0], parts)
        shapes = jax.eval_shape(self._of_one, params, frozen, model_state, rows, key)
        zeros = jax.tree.map(_zeros, shapes)
        first = Found(zeros.gradients, zeros.metrics, model_state)
        numbers = jnp.arange(self.microbatches)
        found: Found = jax.lax.scan(one, first, (numbers, parts))[0]
        # Back in the parameters' own dtype, as the optimizer gets them without microbatches.
        own = jax.tree.map(lambda x, like: x.astype(like.dtype), found.gradients, shapes.gradients)
        return found._replace(gradients=own)

    def _of_one(
        self, params: PyTree, frozen: PyTree, model_state: PyTree, batch: PyTree, key: jax.Array
    ) -> Found:
        def total(params: PyTree) -> tuple[jax.Array, tuple[dict[str, metrics.Sums], PyTree]]:
            sums, after = self.objective(params, frozen, model_state, batch, key)
            return sums["loss"].total, (sums, after)

        gradients, (sums, after) = jax.grad(total, has_aux=True)(params)
        return Found(gradients, sums, after)

    def _split(self, rows: jax.Array) -> jax.Array:
        """(B, ...) to (microbatches, B / microbatches, ...): row r goes to part r % microbatches.

        So each device splits its own rows, nothing moves, and which examples make a microbatch
        does not depend on the devices.
        """
        parts = rows.reshape(-1, self.microbatches, *rows.shape[1:]).swapaxes(0, 1)
        if self.placement.mesh is None or self.reduction is not None:
            return parts
        spec = PartitionSpec(None, BATCH_AXES)
        return jax.lax.with_sharding_constraint(parts, self.placement.sharding(spec))

    def _by_hand(
        self,
        reduction: Reduction,
        params: PyTree,
        frozen: PyTree,
        model_state: PyTree,
        batch: PyTree,
        key: jax.Array,
    ) -> Found:
        """Each device's own share, which the reduction adds up."""
        replicas = self.placement.batch_shards

        def local(
            params: PyTree, frozen: PyTree, model_state: PyTree, batch: PyTree, key: jax.Array
        ) -> Found:
            if self.per_replica and replicas > 1:
                key = jax.random.fold_in(key, jax.lax.axis_index(BATCH_AXES))
            with use_placement(
                Placement(DEFAULT, None)
            ):  # on one device there is no mesh to lay out over
                found = self._of(params, frozen, model_state, batch, key)
            # Sums over a large batch could be too large for 16 bits on the way. Divided by its
            # size, which is known, rather than its weight, they need not wait for that.
            share = _scaled(found.gradients, 1 / size)
            # The change rather than the state: what no replica changes keeps its bits.
            change = difference(found.model_state, model_state)
            averages, counts = averages_and_counts(change)
            averages = _scaled(averages, 1 / replicas)
            if reduction is flattened:  # metrics and running averages in the same parcel
                reduced, counted, averages = flattened((share, found.metrics, averages), BATCH_AXES)
            else:
                reduced = reduction(share, BATCH_AXES)
                counted, averages = jax.lax.psum((found.metrics, averages), BATCH_AXES)
            change = rejoined(averages, jax.lax.pmax(counts, BATCH_AXES))
            after = with_difference(model_state, change, jnp.zeros((), jnp.float32))
            return Found(_of_mean(reduced, counted, of=size), counted, after)

        size = jax.tree.leaves(batch)[0].shape[0]

        whole, rows = PartitionSpec(), PartitionSpec(BATCH_AXES)
        # Unchecked, for any reduction of the user's: what is differentiated is local.
        return jax.shard_map(
            local,
            mesh=self.placement.mesh,
            in_specs=(whole, whole, whole, rows, whole),
            out_specs=whole,
            check_vma=False,
        )(params, frozen, model_state, batch, key)


def _of_mean(gradients: PyTree, counted: dict[str, metrics.Sums], *, of: int = 1) -> PyTree:
    """Gradients of the weighted sum divided by `of` made the mean's; 0 where nothing counted."""
    weight = counted["loss"].weight
    return _scaled(gradients, jnp.where(weight == 0, 0.0, of / jnp.where(weight == 0, 1, weight)))


def _scaled(gradients: PyTree, by: jax.Array | float) -> PyTree:
    return jax.tree.map(
        lambda x: (x.astype(accumulation_dtype(x.dtype)) * by).astype(x.dtype), gradients
    )


def _zeros(like: Any) -> jax.Array:
    """Zeros to add up in: in f32 at least."""
    return jnp.zeros(like.shape, accumulation_dtype(like.dtype))


def accumulation_dtype(dtype: Any) -> Any:
    """The dtype to add up in: f32 at least."""
    narrow = jnp.issubdtype(dtype, jnp.inexact) and jnp.dtype(dtype).itemsize < 4
    return jnp.float32 if narrow else dtype


def shard_map_blocker(
    gradients: Gradients,
    *,
    replicates_params: bool,
    params: PyTree,
    frozen: PyTree,
    model_state: PyTree,
    batch: PyTree,
    values: Callable[[PyTree, PyTree, PyTree, PyTree], PyTree],
) -> str | None:
    """Why gradients reduced by hand would not be what XLA's are; None where they would be.

    With `per_replica` they may differ by what batch statistics and random numbers do.
    `values` gives the objective's values for parameters, frozen ones, model state and a batch,
    without the use of batch statistics. The other arguments are abstract.
    """
    if not replicates_params:
        return (
            f"the strategy {gradients.placement.name} splits the parameters; use mirrored, "
            "zero, central_storage or hybrid, without rules"
        )
    carried = jax.tree.leaves(model_state)
    if carried and not gradients.per_replica:
        return (
            f"the model carries state ({len(carried)} arrays: batch statistics, say), which "
            "would be each device's own"
        )
    single = dataclasses.replace(gradients, reduction=None, placement=Placement(DEFAULT, None))
    key = jax.random.key(0)
    with record_strategy_queries() as asked:
        jaxpr = jax.make_jaxpr(single._of)(params, frozen, model_state, batch, key)
    if asked:
        return "the objective asks for the strategy that it runs under, none on a device alone"
    if jaxpr.effects:
        return (
            f"the objective does more than to compute ({', '.join(map(str, jaxpr.effects))}), "
            "which each device would do"
        )
    if {"sharding_constraint", "shard_map"} & {of.primitive.name for of in equations(jaxpr.jaxpr)}:
        return "the objective lays arrays out over devices by itself"
    _, used = partial_eval.dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars))
    if used[-1] and not gradients.per_replica:  # the key, which is the last argument
        return (
            "the model or the objective draws random numbers (dropout), which would be each "
            "device's own"
        )
    if (shards := gradients.placement.batch_shards) == 1:
        return None
    with use_placement(Placement(DEFAULT, None)):
        why = why_parts_differ(
            lambda given, rows: values(given[0], given[1], given[2], rows),
            (params, frozen, model_state),
            batch,
            shards,
            own_draws=gradients.per_replica,
        )
    if why:
        return (
            "the objective's values may depend on other examples of the batch, on its size or on "
            f"an example's place in it, and a device has a part of the batch alone ({why})"
        )
    return None


def check_agrees(reduction: Reduction, placement: Placement, params: PyTree) -> None:
    """Raise `UserError` where a reduction of the user's leaves devices with different gradients.

    It is tried once, on noise of the parameters' shapes: the copies of a parameter would drift
    apart from the first step on, and nothing else would tell.
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
    found = call_together(jax.jit(program), jax.random.key(0))
    agree = named_leaves(jax.device_get(found))
    if apart := [name for name, same in agree.items() if not same]:
        raise UserError(
            f"the reduction leaves each device with gradients of its own, of {apart[0]} for one: "
            "it must return the sums over all of its axes, as jax.lax.psum(gradients, axes) does"
        )

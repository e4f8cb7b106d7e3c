"""Gradients with the same bits on any number of devices.

The batch is split into virtual shards of contiguous rows, whose number does not depend on the
devices. Each device computes its virtual shards one after the other in a loop, whose body has the
same shapes everywhere, and so the same kernels. The sums over virtual shards are added up in the
order of one binary tree: its lower levels in nested loops on each device, the others over devices.
Batch statistics are such sums in the middle of the computation (see `synchronized_loops`).
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec

from spmdtrain.adapters.base import Variables
from spmdtrain.sharding.mesh import BATCH_AXES
from spmdtrain.sharding.placement import Placement, use_placement
from spmdtrain.step.declared_arguments import eval_key
from spmdtrain.step.exact_checks import check_one_weight
from spmdtrain.step.extra_arguments import ExtraArguments
from spmdtrain.step.fixed_order import FixedOrder, in_loop_of_one_turn
from spmdtrain.step.gradients import (
    ON_ONE_DEVICE,
    GradientOutput,
    Gradients,
    to_mean,
)
from spmdtrain.step.metrics import EvaluationSums
from spmdtrain.step.optimizer import Update, Updated
from spmdtrain.step.outputs import PredictedRows
from spmdtrain.step.reductions import accumulation_dtype, pairwise
from spmdtrain.step.shard_loops import VIRTUAL_SHARD, synchronized_loops, tree_loop
from spmdtrain.strategies import DEFAULT
from spmdtrain.tree import promoted

PyTree = Any
ON_VIRTUAL_SHARD = Placement(DEFAULT, None, batch_axis=VIRTUAL_SHARD)
"""The placement of code that computes one virtual shard."""
Evaluate = Callable[[Variables, PyTree, jax.Array, jax.Array], EvaluationSums]
"""(variables, batch, mask, draw) -> sums: see `Forward.evaluate`."""


@dataclass(frozen=True, kw_only=True)
class ExactGradients(Gradients):
    """`Gradients` whose results do not depend on the number of devices.

    `shards` is the number of virtual shards: a power of two, at least twice the devices.
    """

    shards: int

    @classmethod
    def of(cls, gradients: Gradients, shards: int) -> "ExactGradients":
        """Returns the exact variant of a computation of gradients whose reduction is `pairwise`."""
        return cls(**vars(gradients), shards=shards)

    @property
    def parts(self) -> int:
        return self.shards

    @property
    def gathers_params(self) -> bool:
        return True

    @property
    def own_draws(self) -> bool:
        return True

    @property
    def part_placement(self) -> Placement:
        return ON_VIRTUAL_SHARD

    @property
    def traced_on(self) -> Placement:
        return self.part_placement

    def over_axes(self, sums: PyTree, axes: tuple[str, ...]) -> PyTree:
        """Raises `UserError` for sums over all virtual shards that gradients need beforehand."""
        check_one_weight(sums)
        return sums

    def __call__(
        self, params: PyTree, frozen: PyTree, model_state: PyTree, batch: PyTree, key: jax.Array
    ) -> GradientOutput:
        """Returns the gradients of the weighted mean loss of a global batch.

        The leading dim of the batch is a multiple of the virtual shards, and each of them draws
        from a random key that derives from `key`.
        """
        turns = self.shards // self.placement.batch_shards

        def local(
            params: PyTree, frozen: PyTree, model_state: PyTree, batch: PyTree, key: jax.Array
        ) -> GradientOutput:
            shards = jax.tree.map(lambda x: x.reshape(turns, -1, *x.shape[1:]), batch)
            first = jax.lax.axis_index(BATCH_AXES) * turns

            def of_turn(turn: jax.Array, rows: PyTree) -> tuple[PyTree, PyTree]:
                shard_key = jax.random.fold_in(key, first + turn)
                output = self.of_sum(params, frozen, model_state, rows, shard_key)
                wide = jax.tree.map(
                    lambda x: x.astype(accumulation_dtype(x.dtype)), output.gradients
                )
                return (wide, output.metrics), output.model_state

            with use_placement(self.part_placement):
                sums, after = synchronized_loops(
                    of_turn,
                    shards,
                    turns=turns,
                    shards=self.shards,
                    reduce=partial(pairwise, axes=BATCH_AXES),
                )
            gradients, metrics = pairwise(sums, BATCH_AXES)
            gradients = jax.tree.map(lambda x, like: x.astype(like.dtype), gradients, params)
            return GradientOutput(to_mean(gradients, metrics), metrics, after)

        whole, rows = PartitionSpec(), PartitionSpec(BATCH_AXES)
        return jax.shard_map(
            local,
            mesh=self.placement.mesh,
            in_specs=(whole, whole, whole, rows, whole),
            out_specs=whole,
            check_vma=False,
        )(params, frozen, model_state, batch, key)


def exact_evaluation(evaluate: Evaluate, order: FixedOrder) -> Evaluate:
    """Returns an evaluation of a batch whose sums do not depend on the number of devices.

    `evaluate` evaluates a batch or a part of it (see `BatchChecks.check_evaluation`).
    """
    turns = order.shards // order.placement.batch_shards

    def local(
        variables: Variables, batch: PyTree, mask: jax.Array, draw: jax.Array
    ) -> EvaluationSums:
        shards = jax.tree.map(lambda x: x.reshape(turns, -1, *x.shape[1:]), (batch, mask))
        first = jax.lax.axis_index(BATCH_AXES) * turns

        def of_turn(turn: jax.Array) -> tuple[PyTree, PyTree]:
            rows, of_rows = jax.tree.map(lambda x: x[turn], shards)
            own = jax.random.key_data(jax.random.fold_in(eval_key(draw), first + turn))
            found = evaluate(variables, rows, of_rows, own)
            values = {n: x for n, x in found.items() if isinstance(x, PredictedRows)}
            return {n: x for n, x in found.items() if n not in values}, values

        with use_placement(ON_ONE_DEVICE):
            sums, values = tree_loop(of_turn, turns)
        sums = pairwise(sums, BATCH_AXES)
        rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), values)
        return sums | jax.lax.all_gather(rows, BATCH_AXES, tiled=True)

    def run(
        variables: Variables, batch: PyTree, mask: jax.Array, draw: jax.Array
    ) -> EvaluationSums:
        assert mask.shape[0] % order.shards == 0, mask.shape
        whole, rows = PartitionSpec(), PartitionSpec(BATCH_AXES)
        found: EvaluationSums = jax.shard_map(
            local,
            mesh=order.placement.mesh,
            in_specs=(whole, rows, rows, whole),
            out_specs=whole,
            check_vma=False,
        )(variables, batch, mask, draw)
        return found

    return run


@dataclass(frozen=True, kw_only=True)
class ExactUpdate(Update):
    """An `Update` whose results do not depend on how the state is split over devices.

    `order` is the order of its sums, for example of a global norm.
    """

    order: FixedOrder

    def init(self, params: PyTree) -> PyTree:
        """Returns the optimizer's initial state, which may hold a norm of the parameters."""
        return self.order.evaluate(super().init, params)

    def __call__(
        self,
        params: PyTree,
        opt_state: PyTree,
        gradients: PyTree,
        extra: ExtraArguments,
        before: Sequence[jax.Array] = (),
    ) -> Updated:
        def apply(params: PyTree, opt_state: PyTree, gradients: PyTree) -> tuple[PyTree, ...]:
            of_loop = dataclasses.replace(extra, grad=gradients)
            new = super(ExactUpdate, self).__call__(params, opt_state, gradients, of_loop)
            return new.params, new.opt_state, new.updates

        def in_order(given: tuple[PyTree, ...], zero: jax.Array) -> tuple[PyTree, ...]:
            used = _as_dtypes_of(gradients, given[2])
            params, opt_state, updates = self.order.evaluate(apply, *given[:2], used, zero=zero)
            return params, opt_state, _as_dtypes_of(given[2], updates), used

        # Updates leave the loop in the place of the gradients. If these stayed the same, XLA would
        # move what depends on them alone out of the loop. The gradients leave it in a fourth place,
        # so that their norm, which needs a collective, is computed after the loop. The place has a
        # dtype that holds the values of both.
        *_, updates = jax.eval_shape(apply, params, opt_state, gradients)
        place = jax.tree.map(lambda x, y: x.astype(promoted(x.dtype, y.dtype)), gradients, updates)
        given = (params, opt_state, place, gradients)
        params, opt_state, found, gradients = in_loop_of_one_turn(in_order, given, before)
        return Updated(params, opt_state, _as_dtypes_of(updates, found), gradients)


def _as_dtypes_of(like: PyTree, tree: PyTree) -> PyTree:
    """Returns a pytree of arrays in the dtypes of `like`, which has the same structure."""
    return jax.tree.map(lambda x, y: y.astype(x.dtype), like, tree)

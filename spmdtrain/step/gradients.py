"""Gradients of the weighted mean loss of a global batch: reductions, the loss, gradient rules."""

import collections
import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
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
from spmdtrain.errors import UserError
from spmdtrain.sharding.layout import Layout
from spmdtrain.sharding.placement import (
    ParamGathers,
    Placement,
    SplitDims,
    use_placement,
    use_scope,
)
from spmdtrain.sharding.rules import axes_of_spec, split_dims
from spmdtrain.step import metrics
from spmdtrain.step.metrics import Combination, loss_terms
from spmdtrain.strategies import DEFAULT, OUTER_AXIS
from spmdtrain.tree import named_leaves
from spmdtrain.xla.compiler import Value
from spmdtrain.xla.jaxpr import is_differentiated

# -- Reductions of gradients under `shard_map`, as alternatives to XLA's own all-reduce ------------

PyTree = Any
Reduction = Callable[[PyTree, tuple[str, ...]], PyTree]
"""(gradients, axes) -> gradients, called under `shard_map`. The argument is each device's share of
the gradients (the sum over its examples, divided by the global batch size); the result is the sum
over these mesh axes, the same on all devices. `jax.lax.psum` is one."""


def all_reduce(gradients: PyTree, axes: tuple[str, ...]) -> PyTree:
    """Returns the sums of the arrays over the axes, by one all-reduce for each."""
    return jax.lax.psum(gradients, axes)


def scatter(x: jax.Array, axes: tuple[str, ...], *, dim: int) -> jax.Array:
    """Returns this device's part, along a dim, of the sum of an array over the axes.

    `axes` are in the order in which they split the dim.
    """
    return jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)


def hierarchical(gradients: PyTree, axes: tuple[str, ...]) -> PyTree:
    """Returns the sums of `all_reduce`, with a fraction of the bytes over the axis `replica`.

    Arrays are reduce-scattered within each group, which spans all axes but `replica`; then each
    device all-reduces its part over the slow links between the groups; then the parts are gathered
    within the group. This is tf.distribute's HierarchicalCopyAllReduce.
    """
    inner = tuple(axis for axis in axes if axis != OUTER_AXIS)
    parts = jax.lax.axis_size(inner)

    def reduce(x: jax.Array) -> jax.Array:
        flat = jnp.pad(x.ravel(), (0, -x.size % parts))
        part = jax.lax.psum_scatter(flat, inner, tiled=True)
        part = jax.lax.psum(part, OUTER_AXIS) if OUTER_AXIS in axes else part
        return jax.lax.all_gather(part, inner, tiled=True)[: x.size].reshape(x.shape)

    return jax.tree.map(reduce, gradients)


def one_device(gradients: PyTree, axes: tuple[str, ...]) -> PyTree:
    """Returns the sums of `all_reduce`, reduced to the first device along a binary tree.

    The first device broadcasts them back. This is tf.distribute's ReductionToOneDevice: 2 *
    ceil(log2(devices)) collective permutes of each array instead of an all-reduce.
    """
    size, index = jax.lax.axis_size(axes), jax.lax.axis_index(axes)
    strides = [2**power for power in range((size - 1).bit_length())]
    edges = {
        stride: [(n, n - stride) for n in range(stride, size, 2 * stride)] for stride in strides
    }

    def reduce(x: jax.Array) -> jax.Array:
        for stride in strides:  # a device that receives nothing adds zeros
            x = x + jax.lax.ppermute(x, axes, edges[stride])
        for stride in reversed(strides):
            back = [(to, sender) for sender, to in edges[stride]]
            received = jax.lax.ppermute(x, axes, back)
            x = jnp.where(index % (2 * stride) == stride, received, x)
        return x

    return jax.tree.map(reduce, gradients)


_WIDTH = 256  # elements of a row of `flattened`
_MAX_COPIED = 2**19  # elements above which a separate collective is cheaper than a copy
_MAX_GATHERED = 2**12  # elements up to which one collective is cheaper than two with fewer bytes


def flattened(gradients: PyTree, axes: tuple[str, ...]) -> PyTree:
    """Returns the sums of `all_reduce`, with small arrays concatenated into one for each dtype.

    Gloo makes a call for each array, which takes a millisecond even for a small one.
    """
    return _packed(lambda x: jax.lax.psum(x, axes), gradients)


def pairwise(gradients: PyTree, axes: tuple[str, ...]) -> PyTree:
    """Returns the sums of `all_reduce`, with bits that do not depend on the number of devices.

    The devices' shares are added up in the order of a binary tree. If each share is the sum of a
    subtree, the result is the sum of the whole tree. Each device adds up its part of every array,
    so as many bytes are sent as in a ring all-reduce. Small arrays, such as batch statistics, are
    gathered and added up on each device instead, by one collective. The number of devices is a
    power of two.
    """
    size = jax.lax.axis_size(axes)
    if size == 1:
        return gradients

    def reduce(x: jax.Array) -> jax.Array:
        if x.size <= _MAX_GATHERED:
            return tree_sum(jax.lax.all_gather(x, axes))
        flat = jnp.pad(x.ravel(), (0, -x.size % size)).reshape(size, -1)
        parts = jax.lax.all_to_all(flat, axes, 0, 0, tiled=True)
        whole = jax.lax.all_gather(tree_sum(parts), axes, tiled=True)
        return whole[: x.size].reshape(x.shape)

    is_alone = len(jax.tree.leaves(gradients)) == 1
    return jax.tree.map(reduce, gradients) if is_alone else _packed(reduce, gradients)


def tree_sum(x: jax.Array) -> jax.Array:
    """Returns the sum over the leading dim, a power of two, in the order of a binary tree."""
    while len(x) > 1:
        x = x[0::2] + x[1::2]
    return x[0]


def _packed(reduce: Callable[[jax.Array], jax.Array], tree: PyTree) -> PyTree:
    """Returns an elementwise reduction of large arrays, and of small ones concatenated by dtype.

    The arrays are concatenated as rows with two dims, because XLA on CPU takes hundreds of times as
    long with one.
    """
    leaves, structure = jax.tree.flatten(tree)
    groups = collections.defaultdict(list)
    for place, x in enumerate(leaves):
        if x.size <= _MAX_COPIED:
            groups[x.dtype].append(place)
        else:
            leaves[place] = reduce(x)
    for places in groups.values():
        rows = [_as_rows(leaves[place]) for place in places]
        # The barriers keep XLA from fusing the concatenation with the code before and after it.
        whole = jnp.concatenate(jax.lax.optimization_barrier(rows))
        whole = jax.lax.optimization_barrier(reduce(whole))
        ends = np.cumsum([len(part) for part in rows])
        for place, part in zip(places, jnp.split(whole, ends[:-1]), strict=True):
            like = leaves[place]
            leaves[place] = part.ravel()[: like.size].reshape(like.shape)
    return jax.tree.unflatten(structure, leaves)


def _as_rows(x: jax.Array) -> jax.Array:
    """Returns the elements as rows of `_WIDTH`, the last one padded with zeros."""
    return jnp.pad(x.ravel(), (0, -x.size % _WIDTH)).reshape(-1, _WIDTH)


NAMED = {
    "all_reduce": all_reduce,
    "flattened": flattened,
    "hierarchical": hierarchical,
    "one_device": one_device,
}


def reduced_by(reduction: Reduction, gradients: PyTree, axes: tuple[str, ...]) -> PyTree:
    """Returns the reduced gradients; `UserError` if they are no such arrays as the given ones."""
    reduced = reduction(gradients, axes)
    given, found = (
        {name: (jnp.shape(x), jnp.result_type(x)) for name, x in named_leaves(tree).items()}
        for tree in (gradients, reduced)
    )
    for name in {**given, **found}:
        if given.get(name) != found.get(name):
            shown = [
                "nothing" if of is None else f"{of[1]}{list(of[0])}"
                for of in (given.get(name), found.get(name))
            ]
            raise UserError(
                f"the reduction returns {shown[1]} for {name or 'the gradients'}, where it is "
                f"given {shown[0]}: it must return the sums over all of its axes in the same tree, "
                "shapes and dtypes, as jax.lax.psum(gradients, axes) does"
            )
    return reduced


def in_dtype(reduction: Reduction, dtype: str) -> Reduction:
    """Returns `reduction`, also one that scatters, with arrays cast to `dtype` for the transfer.

    The range of float16 ends at 65504, and its precision falls below 6e-5. So arrays are scaled for
    float16 by the power of two that brings the largest value near the upper end.
    """

    def reduce(gradients: PyTree, axes: tuple[str, ...]) -> PyTree:
        scale = _scale(gradients, axes) if dtype == "float16" else 1.0
        sent = jax.tree.map(lambda x: (x * scale).astype(dtype), gradients)
        return jax.tree.map(
            lambda x, like: (x.astype(like.dtype) / scale).astype(like.dtype),
            reduction(sent, axes),
            gradients,
        )

    return reduce


def _scale(gradients: PyTree, axes: tuple[str, ...]) -> jax.Array:
    """Returns a power of two with which no sum over the devices exceeds 2**15."""
    largest = jnp.stack([jnp.abs(x).max() for x in jax.tree.leaves(gradients)]).max()
    bound = jax.lax.pmax(largest, axes) * jax.lax.axis_size(axes)
    usable = jnp.isfinite(bound) & (bound > 0)
    exponent = 15 - jnp.ceil(jnp.log2(jnp.where(usable, bound, 1.0)))
    return jnp.exp2(jnp.clip(exponent, -100, 100))


def scale_arrays(gradients: PyTree, by: jax.Array | float) -> PyTree:
    """Returns arrays times a number, in their dtypes; 16-bit arrays are multiplied in f32."""
    return jax.tree.map(
        lambda x: (x.astype(accumulation_dtype(x.dtype)) * by).astype(x.dtype), gradients
    )


def accumulation_dtype(dtype: Any) -> Any:
    """Returns the dtype in which values of `dtype` are added up: at least float32."""
    narrow = jnp.issubdtype(dtype, jnp.inexact) and jnp.dtype(dtype).itemsize < 4
    return jnp.float32 if narrow else dtype


# -- The weighted loss of a batch, and the gradients of its sum ------------------------------------
#
# All rules add up weighted sums and divide once, by the weight of the whole batch. If the loss is a
# `Combination`, the weight of each of its terms over the whole batch is computed first, and divides
# the sum of that term.
#
# If weights depend on trained parameters, the sum and the weight of each term are differentiated.
# The derivatives of the loss by the two need the sums of the whole batch, which are computed before
# the first of several microbatches.

Wanted = Callable[[metrics.BatchSums], dict[str, Any]]
"""Selects the sums of a part whose totals over the whole batch its gradients need."""
OverParts = Callable[[PyTree], PyTree]
"""Maps sums of one part of a batch, which its gradients need, to sums of the whole batch."""
ON_ONE_DEVICE = Placement(DEFAULT, None)
"""The placement of code inside `shard_map`, where there is no mesh to split arrays over."""
NO_SLOPE = (
    "without jax.lax.stop_gradient and without functions that have no derivative (argmax, "
    "comparisons) in between"
)
"""The advice to users whose loss has a gradient of 0."""


class Inputs(NamedTuple):
    """The values that the loss of a batch is computed from.

    `params` are the trained parameters, and `frozen` the others (see `Update.partition`).
    """

    params: PyTree
    frozen: PyTree
    model_state: PyTree
    batch: PyTree
    key: jax.Array


class GradientOutput(NamedTuple):
    """Gradients in the parameters' dtypes, weighted sums by name, and model state after a batch."""

    gradients: PyTree
    metrics: metrics.BatchSums
    model_state: PyTree


class Objective(Protocol):
    """A function from parameters and a batch to weighted sums and the model state after it."""

    def __call__(
        self, params: PyTree, frozen: PyTree, model_state: PyTree, batch: PyTree, key: jax.Array
    ) -> tuple[metrics.BatchSums, PyTree]: ...


def _unchanged(sums: PyTree) -> PyTree:
    return sums


@dataclass(frozen=True)
class Loss:
    """The weighted loss of a batch, or of the part of it that one device or virtual shard computes.

    Attributes:
      microbatches: Number of parts of the rows that are computed one after the other.
      placement: The placement of the code that computes it.
    """

    objective: Objective
    microbatches: int
    placement: Placement

    def mean(self, inputs: Inputs) -> jax.Array:
        """Returns the weighted mean of a global batch, which can be differentiated.

        XLA inserts the reductions. The model state and the random key of each microbatch are as in
        `gradients`. The backward pass recomputes each microbatch, so that only the activations of
        one are in memory.
        """
        params, frozen, model_state, batch, key = inputs
        if self.microbatches == 1:
            sums, _ = self.objective(params, frozen, model_state, batch, key)
            return metrics.batch_means(sums)["loss"]

        @jax.checkpoint
        def evaluate(params: PyTree, state: PyTree, index: jax.Array, rows: PyTree) -> Any:
            part_key = jax.random.fold_in(key, index)
            return self.objective(params, frozen, state, rows, part_key)

        def add(total: Any, part: tuple[jax.Array, PyTree]) -> tuple[Any, None]:
            sums, after = evaluate(params, total[1], *part)
            return (jax.tree.map(jnp.add, total[0], sums), after), None

        parts = (jnp.arange(self.microbatches), jax.tree.map(self._split, batch))
        shapes = jax.eval_shape(evaluate, params, model_state, *jax.tree.map(lambda x: x[0], parts))
        first = jax.tree.map(_zeros, shapes[0])
        return metrics.batch_means(jax.lax.scan(add, (first, model_state), parts)[0][0])["loss"]

    @property
    def gradients(self) -> Callable[..., GradientOutput]:
        """The function (inputs, over_parts) -> gradients of the weighted sum.

        The gradients of a `Combination` are those of its mean: each term is divided already.
        `over_parts` is given for a part of a global batch.
        """
        return self._of_rows if self.microbatches == 1 else self._accumulated

    def _accumulated(self, inputs: Inputs, over_parts: OverParts = _unchanged) -> GradientOutput:
        """Adds up the gradients of the microbatches."""
        # `optax.MultiSteps` would count each microbatch as a step, keep the accumulated gradients
        # in the state, and weight microbatches equally. `optax.microbatching.microbatch` passes
        # neither the model state from one microbatch to the next nor an index for the random key.
        parts = jax.tree.map(self._split, inputs.batch)
        indices = jnp.arange(self.microbatches)
        given = inputs._replace(batch=jax.tree.map(lambda x: x[0], parts))
        wanted: list[Wanted] = []  # what each part needs of the whole batch

        def note(of_batch: Wanted, sums: metrics.BatchSums) -> PyTree:
            wanted.append(of_batch)
            return of_batch(sums)

        shapes = jax.eval_shape(partial(self._of_rows, whole=note), given)
        known: PyTree = {}
        if wanted[-1](shapes.metrics):
            known = over_parts(self._over_microbatches(wanted[-1], inputs, (parts, indices)))

        def accumulate(
            total: GradientOutput, part: tuple[jax.Array, PyTree]
        ) -> tuple[GradientOutput, None]:
            index, rows = part
            of_part = inputs._replace(
                model_state=total.model_state,
                batch=rows,
                key=jax.random.fold_in(inputs.key, index),
            )
            output = self._of_rows(of_part, whole=lambda *_: known)
            # XLA adds each leaf as soon as its gradient exists and then reuses its memory.
            gradients = jax.tree.map(jnp.add, total.gradients, output.gradients)
            sums = jax.tree.map(jnp.add, total.metrics, output.metrics)
            return GradientOutput(gradients, sums, output.model_state), None

        zeros = jax.tree.map(_zeros, shapes)
        first = GradientOutput(zeros.gradients, zeros.metrics, inputs.model_state)
        total: GradientOutput = jax.lax.scan(accumulate, first, (indices, parts))[0]
        # In the dtypes of the parameters, which the optimizer gets without microbatches too.
        gradients = jax.tree.map(
            lambda x, like: x.astype(like.dtype), total.gradients, shapes.gradients
        )
        return total._replace(gradients=gradients)

    def _of_rows(
        self,
        inputs: Inputs,
        over_parts: OverParts = _unchanged,
        whole: Callable[[Wanted, metrics.BatchSums], PyTree] | None = None,
    ) -> GradientOutput:
        """Computes the gradients of all rows at once.

        `whole` maps their sums to those of the whole batch; by default `over_parts` does.
        """
        whole = whole or (lambda wanted, sums: over_parts(wanted(sums)))

        def total(params: PyTree) -> tuple[PyTree, tuple[metrics.BatchSums, PyTree]]:
            sums, after = self.objective(params, *inputs[1:])
            terms = loss_terms(sums)
            _check_trains(params, terms)
            if any(is_differentiated(term.weight) for term in terms.values()):
                return terms, (sums, after)
            weights = whole(metrics.combined_weights, sums)
            return metrics.differentiated(sums, weights), (sums, after)

        found, pull_back, (sums, after) = jax.vjp(total, inputs.params, has_aux=True)
        slopes: PyTree = (
            _slopes(sums["loss"], whole(loss_terms, sums))
            if isinstance(found, dict)
            else jax.lax.full_like(found, 1)
        )
        (gradients,) = pull_back(slopes)
        return GradientOutput(gradients, sums, after)

    def _over_microbatches(
        self, wanted: Wanted, inputs: Inputs, batches: tuple[PyTree, jax.Array]
    ) -> PyTree:
        """Returns the sums of the loss that `wanted` selects, added up over all microbatches.

        Only the part of the objective that the result needs is evaluated: nothing of the model, if
        weights depend on the batch alone.
        """

        def one(model_state: PyTree, part: tuple[PyTree, jax.Array]) -> tuple[PyTree, PyTree]:
            rows, index = part
            part_key = jax.random.fold_in(inputs.key, index)
            sums, after = self.objective(inputs.params, inputs.frozen, model_state, rows, part_key)
            return after, wanted(sums)

        def scan(given: PyTree) -> PyTree:
            return jax.lax.scan(one, *given)[1]

        return jax.tree.map(jnp.sum, _needed_part(scan, (inputs.model_state, batches)))

    def _split(self, rows: jax.Array) -> jax.Array:
        """Returns (B, ...) reshaped to (microbatches, B / microbatches, ...).

        Row r goes to part r % microbatches. So each device splits its own rows, nothing moves
        between devices, and the examples of a microbatch do not depend on the devices.
        """
        parts = rows.reshape(-1, self.microbatches, *rows.shape[1:]).swapaxes(0, 1)
        if self.placement.mesh is None:
            return parts
        spec = PartitionSpec(None, self.placement.batch_axes)
        return jax.lax.with_sharding_constraint(parts, self.placement.sharding(spec))


def _check_trains(params: PyTree, terms: dict[str, metrics.Sums]) -> None:
    """Raises `UserError` if the gradient of the loss is proven to be 0 for every batch.

    It is called in the function that is differentiated.
    """
    if any(map(is_differentiated, jax.tree.leaves(terms))):
        return
    if not (names := list(named_leaves(params))):
        raise UserError("the model has no parameters, so a step trains nothing: evaluate it only")
    raise UserError(
        f"the loss does not depend on the trained parameters ({', '.join(names[:3])}"
        f"{', ...' * (len(names) > 3)}), so its gradient is 0 for every batch: compute it from the "
        f"model's output, {NO_SLOPE}"
    )


def _slopes(loss: Any, whole: dict[str, metrics.Sums]) -> dict[str, metrics.Sums]:
    """Returns the derivatives of the loss by the total and the weight of each of its terms.

    If the loss is no `Combination`, they are multiplied by its weight, because `to_mean` divides by
    it. `whole` has the sums of each term over the whole batch.
    """
    if not isinstance(loss, Combination):
        of_batch = whole["loss"]
        return {"loss": metrics.Sums(jnp.ones_like(of_batch.total), -metrics.mean(of_batch))}

    def combined(terms: dict[str, metrics.Sums]) -> jax.Array:
        return metrics.batch_means(terms | {"loss": loss})["loss"]

    slopes: dict[str, metrics.Sums] = jax.grad(combined)(whole)
    return slopes


def _needed_part(function: Callable[[PyTree], PyTree], argument: PyTree) -> PyTree:
    """Returns `function(argument)`, without the operations that its result does not need.

    They are removed from the jaxpr, so this does not depend on the compiler.
    """
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(argument)
    needed, is_used = partial_eval.dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars))
    leaves = [x for x, used in zip(jax.tree.leaves(argument), is_used, strict=True) if used]
    return jax.tree.unflatten(
        jax.tree.structure(shapes), jax.core.eval_jaxpr(needed, jaxpr.consts, *leaves)
    )


def to_mean(gradients: PyTree, sums: metrics.BatchSums, *, divided_by: int = 1) -> PyTree:
    """Converts gradients of the weighted sum to gradients of the weighted mean.

    They are zeros if the total weight is 0.

    Args:
      sums: The sums of the whole batch.
      divided_by: The number by which the gradients are divided already.
    """
    loss = sums["loss"]
    if isinstance(loss, Combination):
        return gradients  # each term is divided already (see `metrics.differentiated`)
    weight = loss.weight
    scale = jnp.where(weight == 0, 0.0, divided_by / jnp.where(weight == 0, 1, weight))
    return scale_arrays(gradients, scale)


def _zeros(like: Any) -> jax.Array:
    return jnp.zeros(like.shape, accumulation_dtype(like.dtype))


# -- Gradient rules: who computes the gradients of a global batch, and who adds them up ------------


@dataclass(frozen=True)
class GradientRule:
    """Computes the gradients of the weighted mean loss of a global batch.

    The properties say how the parts of a batch are computed, if it has parts: `plan_step` proves
    with them that the gradients are the same as those of the whole batch.

    Attributes:
      placement: The placement of the run.
    """

    placement: Placement

    def __call__(self, loss: Loss, inputs: Inputs) -> GradientOutput:
        """Returns the gradients; `loss` is computed on `part_placement`, and traced here."""
        raise NotImplementedError

    @property
    def part_placement(self) -> Placement:
        """The placement of the code that computes one of the parts."""
        return ON_ONE_DEVICE

    @property
    def parts(self) -> int:
        """The number of parts of the batch that are computed apart."""
        return self.placement.batch_shards

    @property
    def gathers_params(self) -> bool:
        """Whether each device gets whole parameters, however the strategy splits them."""
        return False

    @property
    def own_draws(self) -> bool:
        """Whether each part draws its own random numbers."""
        return False

    @property
    def own_statistics(self) -> bool:
        """Whether each part normalizes by its own examples, as the user has asked."""
        return False

    @property
    def part_axes(self) -> list[tuple[str, int]]:
        """The named axis over which a part averages batch statistics, with its size.

        With an axis, all parts compute the model state of the global batch.
        """
        axis = self.part_placement.batch_axis
        return [] if axis is None else [(axis, self.parts)]

    @property
    def traced_on(self) -> Placement:
        """The placement under which the objective is traced for checks, the same as in a step."""
        return self.placement

    def over_parts(self, sums: PyTree) -> PyTree:
        """Returns sums of the whole batch that a part's gradients need, in a trace of the part."""
        return sums


@dataclass(frozen=True)
class ByXla(GradientRule):
    """One program for the global batch, into which XLA inserts the reductions."""

    @property
    def part_placement(self) -> Placement:
        return self.placement

    @property
    def parts(self) -> int:
        return 1

    def __call__(self, loss: Loss, inputs: Inputs) -> GradientOutput:
        output = loss.gradients(inputs)
        return output._replace(gradients=to_mean(output.gradients, output.metrics))


@dataclass(frozen=True)
class PerDevice(GradientRule):
    """Each device computes its share of the gradients under `shard_map`; a method adds them up.

    Attributes:
      per_replica: Whether model state and random numbers are allowed. Each replica then normalizes
        by its own examples and draws its own numbers, and the change of the model state is averaged
        over the replicas.
    """

    per_replica: bool = field(default=False, kw_only=True)

    @property
    def own_draws(self) -> bool:
        return self.per_replica

    @property
    def own_statistics(self) -> bool:
        return self.per_replica

    def add_up(self, gradients: PyTree, others: PyTree, size: int, *, is_of_mean: bool) -> Any:
        """Returns (the sums of the gradients, the sums of the others) over the devices.

        Args:
          gradients: Each device's share.
          others: A tuple of trees of arrays.
          size: The batch size, by which the result is divided. A sum over a large batch could
            overflow 16 bits. The weight is known only after a reduction.
          is_of_mean: Whether the gradients are divided already, and `size` does not count.
        """
        raise NotImplementedError

    def gathers(self, size: int) -> AbstractContextManager[Any]:
        """Returns a context manager in which each device computes its share."""
        return contextlib.nullcontext()

    def specs(self, params: PyTree, frozen: PyTree) -> tuple[Any, Any, Any]:
        """Returns how the trained parameters, the frozen ones and the gradients are split."""
        whole = PartitionSpec()
        return whole, whole, whole

    def __call__(self, loss: Loss, inputs: Inputs) -> GradientOutput:
        if self.placement.mesh is None:
            return ByXla(self.placement)(loss, inputs)
        replicas, axes = self.placement.batch_shards, self.placement.batch_axes
        size = jax.tree.leaves(inputs.batch)[0].shape[0]

        def over_devices(sums: PyTree) -> PyTree:
            return jax.lax.psum(sums, axes) if sums else sums

        def local(*given: PyTree) -> GradientOutput:
            inputs = Inputs(*given)
            before = inputs.model_state
            if self.per_replica and replicas > 1:
                own = jax.random.fold_in(inputs.key, jax.lax.axis_index(axes))
                inputs = inputs._replace(key=own)
            with use_placement(ON_ONE_DEVICE), self.gathers(size):
                output = loss.gradients(inputs, over_devices)
            is_of_mean = isinstance(output.metrics["loss"], Combination)
            states, counts = parts_of_replica(output.model_state, before)
            others = output.metrics, states
            reduced, (sums, states) = self.add_up(
                output.gradients, others, size, is_of_mean=is_of_mean
            )
            counts = jax.lax.pmax(counts, axes)
            after = of_replicas(before, states, counts, replicas)
            return GradientOutput(to_mean(reduced, sums, divided_by=size), sums, after)

        whole, rows = PartitionSpec(), PartitionSpec(axes)
        *of_params, of_gradients = self.specs(inputs.params, inputs.frozen)
        # Without the check of varying axes, so that users can supply any reduction. Only local
        # code is differentiated.
        results: tuple[Any, ...] = (of_gradients, whole, whole)
        return jax.shard_map(
            local,
            mesh=self.placement.mesh,
            in_specs=(*of_params, whole, rows, whole),
            out_specs=GradientOutput(*results),
            check_vma=False,
        )(*inputs)


@dataclass(frozen=True)
class AllReduced(PerDevice):
    """Each device gets the sums of all gradients, by a function such as `all_reduce`."""

    reduce: Reduction

    def add_up(self, gradients: PyTree, others: PyTree, size: int, *, is_of_mean: bool) -> Any:
        axes = self.placement.batch_axes
        share = gradients if is_of_mean else scale_arrays(gradients, 1 / size)
        if self.reduce is flattened:  # all in the same collective
            return flattened((share, others), axes)
        return reduced_by(self.reduce, share, axes), jax.lax.psum(others, axes)


@dataclass(frozen=True)
class Scattered(PerDevice):
    """Each device gets a part of the sums, by reduce-scatters, for strategies that split them.

    Parameters that are split over batch axes are gathered explicitly, stacked layers one at a time
    (`ParamGathers`), and their gradients are scattered where the backward pass has computed them.
    Gradients of other parameters are scattered after it, if the optimizer's state is split. What no
    axis splits is all-reduced.

    `dtype` is the dtype of the transfer; None for the dtype of the gradients.
    """

    layout: Layout
    dtype: str | None = None

    def gathers(self, size: int) -> AbstractContextManager[Any]:
        """Returns a context manager in which the layout gathers the devices' parts explicitly.

        The gradients are divided by `size` before they are added up, which keeps the sums within
        the range of 16 bits.
        """
        return use_scope(gathers=ParamGathers(partial(self._scatter_dims, 1 / size)))

    def specs(self, params: PyTree, frozen: PyTree) -> tuple[Any, Any, Any]:
        specs_of = self.layout.batch_specs
        return (
            specs_of(params, "params"),
            specs_of(frozen, "params"),
            specs_of(params, "opt_state"),
        )

    def add_up(self, gradients: PyTree, others: PyTree, size: int, *, is_of_mean: bool) -> Any:
        batch_axes = self.placement.batch_axes

        # The gradients of split parameters are already scattered and divided over their axes.
        def finish(x: jax.Array, has: PartitionSpec, wanted: PartitionSpec) -> jax.Array:
            done = set(axes_of_spec(has))
            x = x if done else scale_arrays(x, 1 / size)
            for dim, axes in split_dims(wanted, x.ndim):
                if missing := tuple(axis for axis in axes if axis not in done):
                    x = self._scatter(x, missing, x.ndim + dim)
            done |= set(axes_of_spec(wanted))
            left = [axis for axis in batch_axes if axis not in done]
            return self._reduce(all_reduce, x, [a for a in left if jax.lax.axis_size(a) > 1])

        specs = [self.layout.batch_specs(gradients, field) for field in ("params", "opt_state")]
        reduced = jax.tree.map(finish, gradients, *specs)
        reduced = scale_arrays(reduced, size) if is_of_mean else reduced
        return reduced, jax.lax.psum(others, batch_axes)

    def _scatter_dims(self, factor: float, x: jax.Array, split: SplitDims) -> jax.Array:
        """Returns this device's part of the sum of `factor` times an array."""
        x = scale_arrays(x, factor)
        for dim, axes in reversed(split):
            x = self._scatter(x, axes, x.ndim + dim)
        return x

    def _scatter(self, x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
        return self._reduce(partial(scatter, dim=dim), x, axes)

    def _reduce(self, reduction: Reduction, x: jax.Array, axes: Any) -> jax.Array:
        if not axes:
            return x
        function = reduction if self.dtype is None else in_dtype(reduction, self.dtype)
        reduced: jax.Array = function(x, tuple(axes))
        return reduced


# -- The order in which a run adds up --------------------------------------------------------------

T = TypeVar("T")


class SumOrder:
    """The order of the sums of a run: any, which may depend on the devices.

    `FixedOrder` overrides what differs.
    """

    is_fixed = False
    """Whether all sums have one order on any number of devices."""

    def check(
        self, config: RunConfig, reduction: Any, optimizer: optax.GradientTransformation
    ) -> None:
        """Raises `UserError` if a run cannot have this order.

        `reduction` is the user's reduction of gradients; None without.
        """

    def rule(self) -> GradientRule | None:
        """Returns the gradient rule with this order; None if options and batches decide."""
        return None

    def update(self, update: T) -> T:
        """Returns an optimizer's `Update` with this order."""
        return update

    def evaluation(self, evaluate: T) -> T:
        """Returns the evaluation of a batch with this order."""
        return evaluate

    def compiler_options(self, platform: str) -> Mapping[str, Value]:
        """Returns the options of XLA that the order needs on a platform, such as "gpu"."""
        return {}

    def check_devices(self, devices: int) -> None:
        """Raises `UserError` if a batch cannot be added up in the order on so many devices."""

    def check_rows(self, rows: int, microbatches: int = 1, name: str = "global_batch_size") -> None:
        """Raises `UserError` if a batch of this number of rows cannot be added up in the order.

        `name` is the option that sets the number.
        """

    def check_apart(self, why_parts_differ: Callable[[int], str | None]) -> None:
        """Raises `UserError` if the order evaluates parts apart, and their values would differ.

        The function returns why they differ, for a number of parts.
        """


ANY_ORDER = SumOrder()


# -- Changes of the model state, and their combination over workers or replicas --------------------


def difference(after: PyTree, before: PyTree) -> PyTree:
    """Returns the change of the model state by a batch, so that several changes can be combined.

    The change of a batch statistic is `new - old`. Counters and random key data are subtracted
    modulo their range. A flag is its new value.
    """

    def change(x: jax.Array, y: jax.Array) -> jax.Array:
        if x.dtype == jnp.bool_:
            return x
        return jnp.where(x == y, jnp.zeros_like(x), x - y)  # a mask's infinities stay

    return jax.tree.map(change, after, before)


def with_difference(tree: PyTree, more: PyTree, staleness: jax.Array) -> PyTree:
    """Returns the model state with a change applied, which `difference` has returned.

    If n workers pulled the same state, each moves a statistic toward its batch's value, and
    together they would move it n times as far: a variance could become negative. So the change of a
    floating-point leaf is divided by 1 + `staleness`, the number of updates since the change was
    computed.
    """

    def added(x: jax.Array, y: jax.Array) -> jax.Array:
        if x.dtype == jnp.bool_:
            return y
        return x + (y / (1 + staleness) if _is_float(x) else y).astype(x.dtype)

    return jax.tree.map(added, tree, more)


def parts_of_replica(after: PyTree, before: PyTree) -> tuple[PyTree, PyTree]:
    """Returns what a replica contributes to the model state after its rows of the batch.

    Returns:
      Two trees with the structure of the state. The first has (2, *shape) for a floating-point leaf
      of `shape`: its value, and 1 where it changed. Its arrays are added up over the replicas. The
      second has the changes of counters and flags, and the largest of the replicas' values counts.
      Each has None in place of the leaves of the other tree.
    """

    def floats(x: jax.Array, y: jax.Array) -> jax.Array | None:
        dtype = accumulation_dtype(x.dtype)
        return jnp.stack([x.astype(dtype), (x != y).astype(dtype)]) if _is_float(x) else None

    def counts(x: jax.Array, y: jax.Array) -> jax.Array | None:
        return None if _is_float(x) else difference(x, y)

    return jax.tree.map(floats, after, before), jax.tree.map(counts, after, before)


def of_replicas(before: PyTree, sums: PyTree, counts: PyTree, replicas: int) -> PyTree:
    """Returns the model state after a step of all replicas: the mean of what changed.

    What no replica changed keeps its bits. The values are averaged, because the mean of their
    changes would lose the digits of values that are much smaller than before. `sums` and `counts`
    are the sums and the maxima over the replicas of what `parts_of_replica` returns.
    """

    def leaf(x: jax.Array, found: jax.Array | None, change: jax.Array | None) -> jax.Array:
        if found is None:
            return with_difference(x, change, jnp.zeros((), jnp.float32))
        value, changed = found
        return jnp.where(changed != 0, value / replicas, x.astype(value.dtype)).astype(x.dtype)

    return jax.tree.map(leaf, before, sums, counts, is_leaf=lambda x: x is None)


def _is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)

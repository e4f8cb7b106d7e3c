"""Mixtures of experts: routing, exchange between devices, grouped products."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec

from spmdtrain.config.options import ExpertOptions
from spmdtrain.errors import UserError
from spmdtrain.kernels.reference import optimized_implementation, uses_reference, varying_alike
from spmdtrain.sharding.mesh import BATCH_AXES
from spmdtrain.sharding.placement import (
    CurrentMesh,
    current_device,
    current_expert_options,
    current_mesh,
)
from spmdtrain.strategies import EXPERT_AXIS
from spmdtrain.xla.hlo import RARE_BRANCH
from spmdtrain.xla.padding import why_parts_differ

# -- Computation of experts that are split over the mesh axis "expert" -----------------------------

PyTree = Any
Dot = Callable[[jax.Array, jax.Array], jax.Array]
"""(rows, kernel) -> each row times the matrix of its expert; `kernel` is (experts, in, out)."""
Ffn = Callable[[jax.Array, PyTree, Dot], jax.Array]
"""(rows sorted by expert, weights, dot) -> the experts' output, (rows, width)."""


class _Sorted(NamedTuple):
    """The order of keys.

    Attributes:
      order: The indices that sort the keys.
      place: The place of each key in the sorted order.
      counts: The number of keys of each group.
    """

    order: jax.Array
    place: jax.Array
    counts: jax.Array


def _sort(keys: jax.Array, groups: int) -> _Sorted:
    """Sorts int (n,) keys; keys of `groups` and above are not counted."""
    order = jnp.argsort(keys, stable=True)
    numbers = jnp.arange(len(keys), dtype=order.dtype)
    place = jnp.zeros_like(order).at[order].set(numbers, unique_indices=True)
    return _Sorted(order, place, _count(keys, groups))


def _count(keys: jax.Array, groups: int) -> jax.Array:
    return (keys[:, None] == jnp.arange(groups, dtype=keys.dtype)[None]).sum(0, dtype=jnp.int32)


def _some_rows(rows: jax.Array, counts: jax.Array, weights: PyTree, ffn: Ffn) -> jax.Array:
    """Returns the experts' output of sorted rows; 0 in the rows beyond the sum of `counts`."""
    used = (jnp.arange(len(rows)) < counts.sum())[:, None]
    # The products of rows of no group are not specified, also in the backward pass: the first mask
    # keeps them out of the gradients of these rows, which belong to other tokens.
    rows = jnp.where(used, rows, 0)

    def dot(rows: jax.Array, kernel: jax.Array) -> jax.Array:
        return jnp.where(used, grouped_product(rows, kernel, counts), 0)

    return jnp.where(used, ffn(rows, weights, dot), 0)


def _weighted(values: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns each token's sum of its top_k values times their factors, f32 (n, width).

    `values` are (n * top_k, width), the values of a token in succession, and `scale` f32
    (n, top_k).
    """
    values = values.reshape(*scale.shape, -1).astype(jnp.float32)
    return (values * scale[..., None]).sum(1)


def all_experts(
    x: jax.Array, chosen: jax.Array, scale: jax.Array, weights: PyTree, ffn: Ffn, count: int
) -> jax.Array:
    """Returns each token's weighted sum over its experts, all of which the device holds.

    Args:
      x: The tokens, (n, width).
      chosen: int (n, top_k), the numbers of their experts.
      scale: f32 (n, top_k), the factors of the experts' outputs.
      count: Number of experts.

    Returns:
      f32 (n, width).
    """
    found = _sort(chosen.ravel(), count)

    def dot(rows: jax.Array, kernel: jax.Array) -> jax.Array:
        return grouped_product(rows, kernel, found.counts)

    values = ffn(x[found.order // chosen.shape[1]], weights, dot)
    return _weighted(values[found.place], scale)


def chosen_kernels(
    x: jax.Array, chosen: jax.Array, scale: jax.Array, weights: PyTree, ffn: Ffn
) -> jax.Array:
    """Returns the result of `all_experts`, by a product of each choice with a copy of its kernel.

    It is only traced, for analyses that have to see that a token's output depends on this token
    alone. It would need too much memory to run.
    """
    rows = jnp.broadcast_to(x[:, None], (*chosen.shape, x.shape[1])).reshape(-1, x.shape[1])

    def dot(rows: jax.Array, kernel: jax.Array) -> jax.Array:
        return jnp.einsum("ni,nio->no", rows, kernel[chosen.ravel()])

    return _weighted(ffn(rows, weights, dot), scale)


def _held_experts(
    x: jax.Array,
    chosen: jax.Array,
    scale: jax.Array,
    weights: PyTree,
    ffn: Ffn,
    first: jax.Array,
    count: int,
) -> jax.Array:
    """Returns each token's weighted sum over the experts that a device holds, if it chose them.

    The device holds `count` experts, from the number `first` on.
    """
    own = chosen - first
    is_own = (own >= 0) & (own < count)
    found = _sort(jnp.where(is_own, own, count).ravel(), count)
    tokens, top_k = chosen.shape
    rows = tokens * min(top_k, count)  # a token chooses an expert once
    values = _some_rows(x[found.order[:rows] // top_k], found.counts, weights, ffn)
    place = jnp.minimum(found.place, rows - 1)
    # A factor of 0 would not do: the last row may belong to another token, and may be NaN.
    values = jnp.where(is_own.ravel()[:, None], values[place], 0)
    return _weighted(values, jnp.where(is_own, scale, 0))


# -- exchanges -------------------------------------------------------------------------------------


class _Exchange(Protocol):
    """Rows sent to the devices of their experts, and back.

    Attributes:
      experts: int (rows,), which of its experts a device computes for a received row; the number of
        its experts for rows that are not in use.
      slot: int (n * top_k,), the index of each sorted choice in the result of `back`.
    """

    experts: jax.Array
    slot: jax.Array

    def send(self, x: jax.Array, tokens: jax.Array) -> jax.Array:
        """Sends `x[tokens]`, sorted by expert; returns the rows received."""
        ...

    def back(self, rows: jax.Array) -> jax.Array:
        """Sends the experts' outputs of the rows received back to where they came from."""
        ...


def _swap(x: jax.Array) -> jax.Array:
    """Sends entry i of the leading dim to device i of the axis."""
    return jax.lax.all_to_all(x, EXPERT_AXIS, 0, 0, tiled=True)


def _starts(sizes: jax.Array) -> jax.Array:
    return jnp.cumsum(sizes) - sizes


class _Buffers:
    """An exchange of a buffer of fixed size between each two devices.

    `counts` is int (devices, experts of each), the number of sorted choices for each expert, and
    `capacity` the number of rows of a buffer.
    """

    def __init__(self, counts: jax.Array, capacity: int, choices: int) -> None:
        devices = len(counts)
        self._sizes = counts.sum(1, dtype=jnp.int32)
        starts = _starts(self._sizes)
        in_buffer = jnp.arange(capacity, dtype=jnp.int32)
        self._index = jnp.minimum(starts[:, None] + in_buffer[None], choices - 1)
        self._used = in_buffer[None] < self._sizes[:, None]
        ends = jnp.cumsum(_swap(counts), axis=1)
        self.experts = (in_buffer[None, :, None] >= ends[:, None]).sum(-1, dtype=jnp.int32).ravel()
        number = jnp.arange(choices, dtype=jnp.int32)
        device = (number[:, None] >= jnp.cumsum(self._sizes)[None]).sum(-1, dtype=jnp.int32)
        slot = device * capacity + number - starts[device]
        self.slot = jnp.minimum(slot, devices * capacity - 1)

    def send(self, x: jax.Array, tokens: jax.Array) -> jax.Array:
        rows = jnp.where(self._used[..., None], x[tokens[self._index]], 0)
        return _swap(rows).reshape(-1, x.shape[1])

    def back(self, rows: jax.Array) -> jax.Array:
        returned = _swap(rows.reshape(*self._index.shape, -1))
        return returned.reshape(-1, rows.shape[1])


class _Ragged:
    """An exchange of the rows in use alone.

    `counts` is int (devices, experts of each), the number of sorted choices for each expert, and
    `rows` the number of rows that a device can receive.
    """

    def __init__(self, counts: jax.Array, rows: int, choices: int) -> None:
        received = _swap(counts)
        held = counts.shape[1]
        self._rows, self._choices = rows, choices
        self._sent, self._received = (x.sum(1, dtype=jnp.int32) for x in (counts, received))
        self._from, self._to = _starts(self._sent), _starts(self._received)
        ends = jnp.cumsum(received.ravel())
        group = jnp.searchsorted(ends, jnp.arange(rows, dtype=jnp.int32), side="right")
        self.experts = jnp.where(group < len(ends), group % held, held)
        self.slot = jnp.arange(choices, dtype=jnp.int32)

    def send(self, x: jax.Array, tokens: jax.Array) -> jax.Array:
        empty = jnp.zeros((self._rows, x.shape[1]), x.dtype)
        offsets = self._from, self._sent, _swap(self._to), self._received
        return jax.lax.ragged_all_to_all(x[tokens], empty, *offsets, axis_name=EXPERT_AXIS)

    def back(self, rows: jax.Array) -> jax.Array:
        empty = jnp.zeros((self._choices, rows.shape[1]), rows.dtype)
        offsets = self._to, self._received, _swap(self._from), self._sent
        return jax.lax.ragged_all_to_all(rows, empty, *offsets, axis_name=EXPERT_AXIS)


# -- a layer ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExpertLayer:
    """The static arguments of a layer whose experts are split over the axis "expert".

    Attributes:
      experts: Number of experts of all devices.
      devices: Size of the axis.
      axes: The manual axes of the mesh. Their devices take the same path.
      on_cpu: Whether the devices are CPUs. These compute both paths, because XLA's CPU client does
        not order the collectives of a branch with those outside: its threads may wait in different
        ones, forever. They gather tokens as f32, because the gradient is a sum over devices, at
        which XLA's CPU compiler aborts if its values have 16 bits and some axes of the mesh are not
        manual.
    """

    ffn: Ffn
    experts: int
    devices: int
    options: ExpertOptions
    axes: tuple[str, ...]
    on_cpu: bool

    def overflows(self, chosen: jax.Array) -> jax.Array:
        """Returns whether the rows of a buffer do not suffice on some device, a bool scalar."""
        rows, counts = self._capacity(chosen.size), self._counts(chosen)
        if self.options.exchange == "ragged_all_to_all":
            exceeds = _swap(counts).sum() > self.devices * rows
        else:
            exceeds = (counts.sum(1) > rows).any()
        return jax.lax.pmax(exceeds.astype(jnp.int32), self.axes) > 0

    def either(self, overflow: jax.Array, compute: Callable[["LayerPath"], PyTree]) -> PyTree:
        """Returns `compute(self.gathered)` after an overflow, else `compute(self.exchanged)`."""

        def gathered() -> PyTree:
            with jax.named_scope(RARE_BRANCH):
                return compute(self.gathered)

        def exchanged() -> PyTree:
            return compute(self.exchanged)

        if self.on_cpu:
            return jax.tree.map(partial(jnp.where, overflow), gathered(), exchanged())
        return jax.lax.cond(overflow, gathered, exchanged)

    def exchanged(
        self, x: jax.Array, chosen: jax.Array, scale: jax.Array, weights: PyTree
    ) -> jax.Array:
        """Returns the tokens' weighted sums f32 (n, width), if the buffers suffice."""
        choices, top_k = chosen.size, chosen.shape[1]
        rows, counts = self._capacity(choices), self._counts(chosen)
        exchange: _Exchange
        if self.options.exchange == "ragged_all_to_all":
            exchange = _Ragged(counts, self.devices * rows, choices)
        else:
            exchange = _Buffers(counts, rows, choices)
        sorted_ = _sort(chosen.ravel(), self.experts)
        received = exchange.send(x, sorted_.order // top_k)
        by_expert = _sort(exchange.experts, counts.shape[1])
        values = _some_rows(received[by_expert.order], by_expert.counts, weights, self.ffn)
        returned = exchange.back(values[by_expert.place])
        return _weighted(returned[exchange.slot[sorted_.place]], scale)

    def gathered(
        self, x: jax.Array, chosen: jax.Array, scale: jax.Array, weights: PyTree
    ) -> jax.Array:
        """Returns the tokens' weighted sums f32 (n, width), for any choices."""
        held = self.experts // self.devices
        first = jax.lax.axis_index(EXPERT_AXIS) * held

        @jax.checkpoint
        def of_device(tokens: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            rows, chosen, scale = tokens
            return _held_experts(
                rows.astype(x.dtype), chosen, scale, weights, self.ffn, first, held
            )

        # In a loop over the devices, whose hidden values are no more than with buffers.
        tokens = x.astype(jnp.float32) if self.on_cpu else x
        everything = jax.lax.all_gather((tokens, chosen, scale), EXPERT_AXIS)
        return jax.lax.psum_scatter(jax.lax.map(of_device, everything), EXPERT_AXIS)

    def _capacity(self, choices: int) -> int:
        """Returns the number of rows that a device can send to each other device."""
        even = self.options.capacity_factor * choices / self.devices
        return min(choices, math.ceil(even))

    def _counts(self, chosen: jax.Array) -> jax.Array:
        return _count(chosen.ravel(), self.experts).reshape(self.devices, -1)


LayerPath = Callable[[jax.Array, jax.Array, jax.Array, PyTree], jax.Array]
"""(x, chosen, scale, weights) -> the tokens' weighted sums, f32 (n, width)."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def split_experts(
    layer: ExpertLayer, x: jax.Array, chosen: jax.Array, scale: jax.Array, weights: PyTree
) -> tuple[jax.Array, jax.Array]:
    """Returns each token's weighted sum over its experts, which the axis splits.

    Autodiff of the branches would keep what both of them compute. Here the backward pass computes
    the branch in use again, so nothing of the exchange stays in memory. Arguments are as of
    `all_experts`, for a device's tokens and the experts that it holds.

    Returns:
      f32 (n, width), and whether the buffers did not suffice, a bool scalar.
    """
    return _exchange_forward(layer, x, chosen, scale, weights)[0]


def _exchange_forward(
    layer: ExpertLayer, x: jax.Array, chosen: jax.Array, scale: jax.Array, weights: PyTree
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    overflow = layer.overflows(chosen)
    total = layer.either(overflow, lambda path: path(x, chosen, scale, weights))
    return (total, overflow), (x, chosen, scale, weights, overflow)


def _exchange_backward(layer: ExpertLayer, kept: Any, cotangents: Any) -> Any:
    x, chosen, scale, weights, overflow = kept

    def gradients(path: LayerPath) -> Any:
        def function(x: jax.Array, scale: jax.Array, weights: PyTree) -> jax.Array:
            return path(x, chosen, scale, weights)

        return jax.vjp(function, x, scale, weights)[1](cotangents[0])

    of_x, of_scale, of_weights = layer.either(overflow, gradients)
    return of_x, None, of_scale, of_weights


split_experts.defvjp(_exchange_forward, _exchange_backward)


# -- Mixtures of experts: each token's sum over the experts that a router chooses for it -----------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertOutput:
    """The output of a layer of experts, and the values of its router by row of the batch.

    Attributes:
      output: (B, T, width), each token's weighted sum over its `top_k` experts, in the dtype of x.
      balance: f32 (B,), the load-balance loss of each row: E * sum_e f_e * p_e, where f_e is the
        fraction of the row's choices that fell on expert e, and p_e the mean of its probability
        (Fedus et al. 2021, arXiv:2101.03961; by sequence as in arXiv:2412.19437). It is 1 if both
        are even.
      z: f32 (B,), mean over the tokens of logsumexp(router_logits)**2 (Zoph et al. 2022,
        arXiv:2202.08906).
      entropy: f32 (B,), mean over the tokens of the entropy of the router's probabilities, in nats.
      load: f32 (B, E), number of the row's choices for each expert.
      overflow: f32 scalar, 1 if a buffer would have overflowed, so that all devices of the axis
        "expert" gathered all tokens; else 0. The output is the same.
    """

    output: jax.Array
    balance: jax.Array
    z: jax.Array
    entropy: jax.Array
    load: jax.Array
    overflow: jax.Array


def experts(
    x: jax.Array,
    router_logits: jax.Array,
    weights: PyTree,
    ffn: Ffn,
    *,
    top_k: int,
    normalize: bool = True,
) -> ExpertOutput:
    """Returns each token's sum over its `top_k` experts, weighted by the router's probabilities.

    No token is dropped, however many choose the same expert. On a mesh the batch and the tokens
    ("context") may be split, and the experts over "expert": tokens are sent to the devices of their
    experts and back.

    Args:
      x: The tokens, (B, T, width).
      router_logits: f32 (B, T, E); their softmax gives the probabilities of the experts.
      weights: A pytree of arrays of leading dim E, split over "expert" by their rule:
        `PartitionSpec("expert", ...)`.
      ffn: Maps (rows, weights, dot) to (n, width). `rows` (n, width) are sorted by expert, and
        `dot(rows, kernel)` multiplies each row with the matrix of its expert, of a kernel (experts,
        in, out). Each row of the result depends on this row and on its expert's weights alone, and
        on nothing that is not an argument, because on a mesh a device has a part of the rows and of
        the experts.
      top_k: Number of experts of a token.
      normalize: Whether the probabilities of a token's experts are divided by their sum.

    `jax.vmap` of it is not supported, nor are forward-mode derivatives if experts are split.

    Raises:
      UserError: If the arguments do not fit together, the experts do not divide over "expert", or
        `ffn` is not shown to compute each row alone, on a mesh that splits rows or experts.
    """
    _check(x, router_logits, weights, top_k)
    probabilities = jax.nn.softmax(router_logits, axis=-1)
    over = current_mesh()
    if over is None or not over.free or uses_reference():
        over = CurrentMesh(None, {}, ())
    manual = {axis for axis in over.free if axis != "tensor" or over.parts(axis) == 1}
    count, devices = router_logits.shape[-1], over.parts(EXPERT_AXIS)
    layer = _layer(ffn, count, devices, tuple(sorted(manual))) if devices > 1 else None

    operands = (x, probabilities, weights)
    dtypes = jax.tree.map(jnp.result_type, operands)

    def local(*operands: PyTree) -> tuple[jax.Array, jax.Array, jax.Array]:
        x, probabilities, weights = jax.tree.map(jax.lax.convert_element_type, operands, dtypes)
        scale, chosen = jax.lax.top_k(probabilities, top_k)
        if normalize:
            scale = scale / scale.sum(-1, keepdims=True)
        tokens = x.reshape(-1, x.shape[-1]), chosen.reshape(-1, top_k), scale.reshape(-1, top_k)
        overflow = jnp.zeros((), bool)
        if uses_reference():
            total = chosen_kernels(*tokens, weights, ffn)
        elif layer is None:
            total = all_experts(*tokens, weights, ffn, count)
        else:
            total, overflow = split_experts(layer, *tokens, weights)
        return total.reshape(x.shape).astype(x.dtype), chosen, overflow

    if over.parts(*manual) > 1:
        check_ffn(ffn, x, weights, is_split=layer is not None)
        rows = tuple(axis for axis in BATCH_AXES if axis in over.free)
        length, parts = x.shape[1], over.parts("context")
        split = PartitionSpec(
            rows if x.shape[0] % over.parts(*rows) == 0 else None,
            "context" if "context" in over.free and length % parts == 0 else None,
        )
        if current_device().platform == "cpu" and manual != set(over.free):
            # The gradients of what devices share are sums over these axes. XLA's CPU compiler
            # aborts at such a sum over a part of a mesh's axes if its values have 16 bits.
            operands = jax.tree.map(_widened, operands)
        # Without the check of varying axes: the gradients of the branches are written by hand.
        local = jax.shard_map(
            local,
            mesh=over.mesh,
            in_specs=(split, split, PartitionSpec(EXPERT_AXIS if layer else None)),
            out_specs=(split, split, PartitionSpec()),
            axis_names=manual,
            check_vma=False,
        )
    with optimized_implementation() if not uses_reference() else contextlib.nullcontext():
        output, chosen, overflow = local(*operands)
    numbers = jnp.arange(count, dtype=chosen.dtype)[None, None, None]
    load = (chosen[..., None] == numbers).sum((1, 2), dtype=jnp.float32)
    fraction = load / (x.shape[1] * top_k)
    logs = jax.nn.log_softmax(router_logits, axis=-1)
    return ExpertOutput(
        output=output,
        balance=count * (fraction * probabilities.mean(1)).sum(-1),
        z=jnp.square(jax.nn.logsumexp(router_logits, axis=-1)).mean(-1),
        entropy=-(probabilities * logs).sum(-1).mean(-1),
        load=load,
        overflow=overflow.astype(jnp.float32),
    )


def _widened(x: jax.Array) -> jax.Array:
    """Returns an array in f32 if it has floating-point values of fewer bits."""
    is_narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return x.astype(jnp.float32) if is_narrow else x


def _layer(ffn: Ffn, count: int, devices: int, axes: tuple[str, ...]) -> ExpertLayer:
    """Returns the static arguments of experts that are split over devices."""
    options, on_cpu = current_expert_options(), current_device().platform == "cpu"
    if count % devices:
        raise UserError(
            f"experts: {count} experts do not divide over mesh.expert={devices}: their number must "
            "be a multiple of the axis"
        )
    if on_cpu and options.exchange == "ragged_all_to_all":
        raise UserError(
            "expert.exchange is ragged_all_to_all, which XLA does not support on CPU: use "
            "all_to_all"
        )
    return ExpertLayer(ffn, count, devices, options, axes, on_cpu)


def _check(x: jax.Array, router_logits: jax.Array, weights: PyTree, top_k: int) -> None:
    if x.ndim != 3 or router_logits.ndim != 3 or router_logits.shape[:2] != x.shape[:2]:
        raise UserError(
            f"experts: x {x.shape} and router_logits {router_logits.shape}: the shapes must be "
            "(B, T, width) and (B, T, experts)"
        )
    if router_logits.dtype != jnp.float32:
        raise UserError(
            f"experts: router_logits are {router_logits.dtype}: they must be float32, because the "
            "choice of experts depends on small differences"
        )
    count = router_logits.shape[-1]
    if not 1 <= top_k <= count:
        raise UserError(f"experts: top_k is {top_k}: it must be from 1 to {count}, the experts")
    for each in jax.tree.leaves(weights):
        if each.shape[:1] != (count,):
            raise UserError(
                f"experts: weights of shape {each.shape} for router_logits of {count} experts: the "
                f"leading dim must be {count}"
            )


# -- Check that the function of a mixture of experts computes each row alone -----------------------

_ROWS = 4  # any number above 1


def check_ffn(ffn: Ffn, x: jax.Array, weights: PyTree, *, is_split: bool) -> None:
    """Checks that a device may compute a part of the rows with a part of the experts.

    The function is traced with rows of different experts, one of each. Then its weights have the
    rows' leading dim, and the same proof holds for both: nothing may combine entries of it.
    `is_split` tells whether the mesh splits the experts, not the rows alone.

    Raises:
      UserError: If a row's result may depend on other rows or on other experts, if its width is not
        that of `x`, or if experts are split and the function reads a traced array that is not an
        argument.
    """
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((_ROWS, *leaf.shape[1:]), leaf.dtype),
        (x[0], weights),
    )

    def one_of_each(fixed: tuple[()], given: tuple[jax.Array, PyTree]) -> jax.Array:
        del fixed
        return ffn(*given, _product_of_each)

    traced = jax.make_jaxpr(one_of_each)((), shapes)
    if is_split and any(isinstance(value, jax.core.Tracer) for value in traced.consts):
        raise UserError(
            "experts: ffn reads an array that is not an argument, whose gradient cannot be "
            "computed with mesh.expert: pass it in weights, with an entry for each expert"
        )
    if len(traced.out_avals) != 1:
        raise UserError(
            f"experts: ffn returns {len(traced.out_avals)} arrays: it must return one, (rows, "
            "width)"
        )
    (result,) = traced.out_avals
    if result.shape != shapes[0].shape:
        raise UserError(
            f"experts: ffn returns {result.shape} for rows of {shapes[0].shape}: the shapes must "
            "be equal"
        )
    if why := why_parts_differ(one_of_each, (), shapes, 2, gradients=True):
        raise UserError(
            "experts: ffn must compute each row with the weights of its expert alone, because a "
            f"device has a part of the rows and of the experts: {why}"
        )


def _product_of_each(rows: jax.Array, kernel: jax.Array) -> jax.Array:
    return jnp.einsum("ni,nio->no", rows, kernel)


# -- Products of rows, which are sorted by group, with the matrices of their groups ----------------


@dataclass(frozen=True)
class _Limits:
    """The sizes at which products of blocks take less time than of all rows with each matrix.

    These are the least number of groups, and the least and most rows of a block.
    """

    groups: int
    least: int
    most: int


# A GPU copies the matrix of each block, which takes as long as some hundred rows' products.
_LIMITS = {"cpu": _Limits(2, 8, 128), "gpu": _Limits(4, 64, 1024), "tpu": _Limits(2, 8, 1024)}
GATHERED_BYTES = 256 * 1024**2
"""About the bytes of the matrices that a GPU gathers for some blocks at once."""


def grouped_product(rows: jax.Array, kernel: jax.Array, counts: jax.Array) -> jax.Array:
    """Returns each row times the matrix of its group, (rows, out).

    On CPU and GPUs, XLA computes `jax.lax.ragged_dot` as a product of all rows with each matrix.
    Products of blocks of rows have about as many operations as the rows need. On TPUs, XLA has a
    kernel for `ragged_dot`, but not for the gradient of the matrices, which is computed from blocks
    there.

    Args:
      rows: (rows, in), sorted by group.
      kernel: (groups, in, out).
      counts: int (groups,), the number of rows of each group. The results of rows beyond their sum
        are not specified, and their cotangents must be 0.
    """
    rows, kernel, counts = varying_alike((rows, kernel, counts))
    platform = current_device().platform
    size = _block_size(len(rows), len(kernel), platform)
    if size is None or (platform == "tpu" and _over_tensor()):
        return jax.lax.ragged_dot(rows, kernel, counts)
    if platform == "cpu":
        return _by_blocks(rows, kernel, counts, size)
    return _on_accelerator(platform, size, rows, kernel, counts)


def _over_tensor() -> bool:
    """Returns whether "tensor" splits arrays: XLA would gather all rows again for each block."""
    over = current_mesh()
    return over is not None and over.parts("tensor") > 1


def _block_size(rows: int, groups: int, platform: str) -> int | None:
    """Returns about half of the rows of a group, so that few blocks have rows of two groups.

    It is a multiple of 8. It is None if products of blocks would take longer, or on a platform
    where this is not known.
    """
    if (limits := _LIMITS.get(platform)) is None:
        return None
    size = min(limits.most, rows // (2 * groups) // 8 * 8)
    return size if groups >= limits.groups and size >= limits.least else None


@dataclass(frozen=True)
class _Pairs:
    """Pairs of a block of rows and a group that has rows in it, in the order of the rows.

    Rows of several groups meet in a block only where one group ends and the next one begins, so
    there are at most as many pairs as blocks and groups together.

    Attributes:
      group: int (pairs,). After the last pair, entries have the last group, and no rows.
      block: int (pairs,).
      own: bool (pairs, size), whether a row of the block belongs to the group.
      first: int (groups,), the number of each group's first pair.
      first_block: int (groups,), the block of that pair.
    """

    group: jax.Array
    block: jax.Array
    own: jax.Array
    first: jax.Array
    first_block: jax.Array

    @classmethod
    def of(cls, counts: jax.Array, blocks: int, size: int, batches: int = 1) -> "_Pairs":
        """Returns the pairs of `blocks` blocks of `size` rows.

        Empty pairs are added to make their number a multiple of `batches`.
        """
        groups = len(counts)
        ends = jnp.cumsum(counts)
        starts = ends - counts
        first_block = starts // size
        pairs = jnp.where(counts > 0, (ends - 1) // size - first_block + 1, 0)
        ends_of_pairs = jnp.cumsum(pairs)
        first = ends_of_pairs - pairs

        pair = jnp.arange(-(-(blocks + groups - 1) // batches) * batches, dtype=jnp.int32)
        group = jnp.minimum(
            (pair[:, None] >= ends_of_pairs[None]).sum(-1, dtype=jnp.int32), groups - 1
        )
        block = first_block[group] + pair - first[group]
        row = block[:, None] * size + jnp.arange(size, dtype=jnp.int32)[None]
        own = (row >= starts[group, None]) & (row < ends[group, None])
        return cls(group, jnp.minimum(block, blocks - 1), own, first, first_block)


def _by_blocks(
    rows: jax.Array, kernel: jax.Array, counts: jax.Array, size: int, batches: int = 1
) -> jax.Array:
    """Returns the products, computed for blocks of `size` rows with each matrix that its rows need.

    The shapes are as in `grouped_product`. The products are computed in `batches` steps, each with
    copies of its matrices.
    """
    padded, kernel = _blocks(rows, size), jnp.asarray(kernel)
    pairs = _Pairs.of(counts, len(padded), size, batches)

    def product(pair: tuple[jax.Array, ...]) -> jax.Array:
        group, block, own = pair
        return jnp.where(own[:, None], padded[block], 0) @ kernel[group]

    each = pairs.group, pairs.block, pairs.own
    if batches == 1:
        products = jax.vmap(product)(each)
    else:
        products = jax.lax.map(product, each, batch_size=len(pairs.group) // batches)

    number, groups = jnp.arange(len(rows), dtype=jnp.int32), len(kernel)
    of_row = jnp.minimum(
        (number[:, None] >= jnp.cumsum(counts)[None]).sum(-1, dtype=jnp.int32), groups - 1
    )
    place = pairs.first[of_row] + number // size - pairs.first_block[of_row]
    return products[jnp.clip(place, 0, len(pairs.group) - 1), number % size]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _on_accelerator(
    platform: str, size: int, rows: jax.Array, kernel: jax.Array, counts: jax.Array
) -> jax.Array:
    """Returns the products. The gradient of the matrices is computed from blocks of `size`."""
    if platform == "tpu":
        return jax.lax.ragged_dot(rows, kernel, counts)
    pairs = -(-len(rows) // size) + len(kernel) - 1
    batches = -(-pairs // max(1, GATHERED_BYTES // kernel[0].nbytes))
    return _by_blocks(rows, kernel, counts, size, batches)


def _grouped_forward(
    platform: str, size: int, rows: jax.Array, kernel: jax.Array, counts: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    return _on_accelerator(platform, size, rows, kernel, counts), (rows, kernel, counts)


def _grouped_backward(
    platform: str,
    size: int,
    kept: tuple[jax.Array, jax.Array, jax.Array],
    gradient: jax.Array,
) -> tuple[jax.Array, jax.Array, None]:
    rows, kernel, counts = kept
    of_rows = _on_accelerator(platform, size, gradient, kernel.swapaxes(1, 2), counts)
    of_kernel = _kernel_gradient(size, rows, gradient, counts)
    if platform == "tpu":
        # Otherwise XLA may give the sums the layout of their user, and transpose each product. On
        # GPUs the constraint would gather what "tensor" splits.
        of_kernel = with_layout_constraint(of_kernel, Layout((0, 1, 2)))
    return of_rows, of_kernel.astype(kernel.dtype), None


_on_accelerator.defvjp(_grouped_forward, _grouped_backward)


def _kernel_gradient(
    size: int, rows: jax.Array, gradient: jax.Array, counts: jax.Array
) -> jax.Array:
    """Returns the sums of the outer products of each group's rows and gradients, f32.

    The result is (groups, in, out), and `gradient` the gradient (rows, out) of the products.
    """
    blocks, gradients = _blocks(rows, size), _blocks(gradient, size)
    pairs = _Pairs.of(counts, len(blocks), size)

    def add(total: jax.Array, pair: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        group, block, own = pair
        # Both, because 0 times the NaN of another group would be NaN.
        x, y = (jnp.where(own[:, None], part[block], 0) for part in (blocks, gradients))
        part = jnp.einsum("bi,bo->io", x, y, preferred_element_type=jnp.float32)
        return total.at[group].add(part), None

    zeros = jnp.zeros((len(counts), rows.shape[1], gradient.shape[1]), jnp.float32)
    zeros, *_ = varying_alike((zeros, rows))
    total, _ = jax.lax.scan(add, zeros, (pairs.group, pairs.block, pairs.own))
    return total


def _blocks(rows: jax.Array, size: int) -> jax.Array:
    """Returns rows as (blocks, size, width), padded with 0."""
    count, width = rows.shape
    blocks = -(-count // size)
    return jnp.pad(rows, ((0, blocks * size - count), (0, 0))).reshape(blocks, size, width)

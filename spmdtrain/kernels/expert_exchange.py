"""Computation of experts that are split over the mesh axis "expert"."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from spmdtrain.config.options import ExpertOptions
from spmdtrain.kernels.grouped_product import grouped_product
from spmdtrain.sharding.mesh import EXPERT
from spmdtrain.xla.hlo import RARE_BRANCH

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
    return jax.lax.all_to_all(x, EXPERT, 0, 0, tiled=True)


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
        return jax.lax.ragged_all_to_all(x[tokens], empty, *offsets, axis_name=EXPERT)

    def back(self, rows: jax.Array) -> jax.Array:
        empty = jnp.zeros((self._choices, rows.shape[1]), rows.dtype)
        offsets = self._to, self._received, _swap(self._from), self._sent
        return jax.lax.ragged_all_to_all(rows, empty, *offsets, axis_name=EXPERT)


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
        first = jax.lax.axis_index(EXPERT) * held

        @jax.checkpoint
        def of_device(tokens: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            rows, chosen, scale = tokens
            return _held_experts(
                rows.astype(x.dtype), chosen, scale, weights, self.ffn, first, held
            )

        # In a loop over the devices, whose hidden values are no more than with buffers.
        tokens = x.astype(jnp.float32) if self.on_cpu else x
        everything = jax.lax.all_gather((tokens, chosen, scale), EXPERT)
        return jax.lax.psum_scatter(jax.lax.map(of_device, everything), EXPERT)

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
    return _forward(layer, x, chosen, scale, weights)[0]


def _forward(
    layer: ExpertLayer, x: jax.Array, chosen: jax.Array, scale: jax.Array, weights: PyTree
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    overflow = layer.overflows(chosen)
    total = layer.either(overflow, lambda path: path(x, chosen, scale, weights))
    return (total, overflow), (x, chosen, scale, weights, overflow)


def _backward(layer: ExpertLayer, kept: Any, cotangents: Any) -> Any:
    x, chosen, scale, weights, overflow = kept

    def gradients(path: LayerPath) -> Any:
        def function(x: jax.Array, scale: jax.Array, weights: PyTree) -> jax.Array:
            return path(x, chosen, scale, weights)

        return jax.vjp(function, x, scale, weights)[1](cotangents[0])

    of_x, of_scale, of_weights = layer.either(overflow, gradients)
    return of_x, None, of_scale, of_weights


split_experts.defvjp(_forward, _backward)

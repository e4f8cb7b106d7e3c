"""Attention over a sequence whose tokens are split over devices."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from spmdtrain.config.options import ContextMethod
from spmdtrain.errors import UserError
from spmdtrain.sharding.mesh import BATCH_AXES
from spmdtrain.sharding.placement import CurrentMesh
from spmdtrain.xla.chips import chip_of

# -- Attention on each device's part of a batch, of the tokens and of the heads --------------------

LocalAttention = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None], jax.Array]


def heads_of_device(heads: int, kv_heads: int, over: CurrentMesh) -> tuple[int, int]:
    """Returns the numbers of heads and of key-value heads that a device computes."""
    parts = over.parts("tensor")
    if parts % kv_heads == 0 and heads % parts == 0:
        return heads // parts, 1  # which several devices share
    return (heads, kv_heads) if kv_heads % parts else (heads // parts, kv_heads // parts)


def attention_over_devices(
    local: LocalAttention,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None,
    over: CurrentMesh,
    *,
    tokens: str | None = None,
) -> jax.Array:
    """Returns attention's output, (B, T, heads, head width): each device computes its part.

    The batch is split over the batch axes and the heads over "tensor". What does not divide over
    the devices is computed by each of them. The shapes are as in `attention`.

    Args:
      local: Maps a device's parts of the arrays to its part of the result.
      tokens: The axis that splits the tokens, whose number it divides; None for whole sequences.
    """
    if not over.free:
        return local(query, key, value, segments)
    parts, (kept, kept_kv) = (
        over.parts("tensor"),
        heads_of_device(query.shape[2], key.shape[2], over),
    )
    splits = kept < query.shape[2]
    if splits and kept_kv * parts > key.shape[2]:
        # Each device has query heads of a single key-value head, which several devices share.
        key, value = (jnp.repeat(x, parts // x.shape[2], axis=2) for x in (key, value))
    axes = tuple(axis for axis in BATCH_AXES if axis in over.free)
    rows = axes if axes and len(query) % over.parts(*axes) == 0 else None
    split = PartitionSpec(rows, tokens, "tensor" if splits else None, None)
    # Without the check of varying axes, which kernels do not support.
    mapped = jax.shard_map(
        local,
        mesh=over.mesh,
        in_specs=(split, split, split, PartitionSpec(rows, tokens)),
        out_specs=split,
        axis_names=set(over.free),
        check_vma=False,
    )
    return mapped(query, key, value, segments)


# -- Attention of some queries to some keys, as a part of the attention of a longer sequence -------

# Most queries of a block: its scores with all keys are in memory at once.
QUERY_BLOCK = 512


@dataclass(frozen=True)
class Pattern:
    """The pairs of tokens that attend to each other.

    Attributes:
      causal: Whether a token attends to positions up to its own only.
      window: Number of tokens of the local window, or None.
      scale: Factor of the scores.
    """

    causal: bool
    window: int | None
    scale: float

    @property
    def is_full(self) -> bool:
        """Whether every token attends to every other token of its document."""
        return not self.causal and self.window is None


class Tokens(NamedTuple):
    """The place of some tokens in their sequence.

    `positions` is int (T,), and `segments` int (B, T), the documents of the tokens; None for one
    document in each row.
    """

    positions: jax.Array
    segments: jax.Array | None


class MixedValues(NamedTuple):
    """Values mixed by the softmax over some of the keys.

    Attributes:
      values: f32 (B, T, heads, head width).
      logsumexp: f32 (B, T, heads), the logarithm of the softmax's denominator; -inf without a key.
    """

    values: jax.Array
    logsumexp: jax.Array


def no_values(query: jax.Array) -> MixedValues:
    """Returns the mixed values of queries (B, T, heads, head width) without any keys."""
    values = jnp.zeros(query.shape, jnp.float32)
    return MixedValues(values, jnp.full(query.shape[:3], -jnp.inf, jnp.float32))


def merge_mixed(one: MixedValues, other: MixedValues) -> MixedValues:
    """Returns the values mixed over the keys of both, which are disjoint."""
    total = jnp.logaddexp(one.logsumexp, other.logsumexp)
    finite = jnp.where(total == -jnp.inf, 0.0, total)  # without a key in both
    shares = (jnp.exp(part.logsumexp - finite)[..., None] for part in (one, other))
    first, second = (share * part.values for share, part in zip(shares, (one, other), strict=True))
    return MixedValues(first + second, total)


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    of: Tokens,
    to: Tokens,
    pattern: Pattern,
    *,
    every: bool,
) -> MixedValues:
    """Returns the values of these keys, mixed for each query.

    Args:
      query: (B, T, heads, head width).
      key: (B, S, key-value heads, head width), as `value`.
      of: The place of the queries.
      to: The place of the keys.
      every: Whether positions exclude no pair, so that no mask is computed for them.
    """

    def block(part: tuple[jax.Array, Tokens]) -> MixedValues:
        query, of = part
        scores = _scores(query, key, of, to, pattern, every)
        most = scores.max(-1, keepdims=True)
        weights = jnp.exp(scores - jnp.where(most == -jnp.inf, 0.0, most))
        total = weights.sum(-1, keepdims=True)
        some = jnp.where(total == 0, 1.0, total)
        mixed = _product("bkgts,bskh->btkgh", (weights / some).astype(value.dtype), value)
        logarithm = jnp.where(total == 0, -jnp.inf, most + jnp.log(some))[..., 0]
        return MixedValues(
            mixed.reshape(query.shape), jnp.moveaxis(logarithm, 3, 1).reshape(query.shape[:3])
        )

    return _by_blocks(block, (query, of))


def attend_backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    of: Tokens,
    to: Tokens,
    pattern: Pattern,
    *,
    every: bool,
    logsumexp: jax.Array,
    gradient: jax.Array,
    inner: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the parts of the gradients of query, key and value that come from these pairs, f32.

    Args:
      query: See `attend`, also for the arguments up to `every`.
      logsumexp: f32 (B, T, heads), the logarithm of the softmax's denominator over all keys.
      gradient: (B, T, heads, head width), the gradient of the output.
      inner: f32 (B, T, heads), the products of output and gradient.
    """
    heads = key.shape[2]

    def block(
        sums: tuple[jax.Array, jax.Array], part: Any
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        query, of, logsumexp, gradient, inner = part
        grouped = partial(_grouped, heads=heads)
        scores = _scores(query, key, of, to, pattern, every)
        weights = jnp.exp(scores - _before_keys(grouped(logsumexp)))
        d_weights = _product("btkgh,bskh->bkgts", grouped(gradient), value)
        d_scores = weights * (d_weights - _before_keys(grouped(inner))) * pattern.scale
        low = d_scores.astype(query.dtype)
        d_query = _product("bkgts,bskh->btkgh", low, key).reshape(query.shape)
        d_key = _product("bkgts,btkgh->bskh", low, grouped(query))
        d_value = _product("bkgts,btkgh->bskh", weights.astype(value.dtype), grouped(gradient))
        return (sums[0] + d_key, sums[1] + d_value), d_query

    zeros = (jnp.zeros(key.shape, jnp.float32), jnp.zeros(value.shape, jnp.float32))
    parts = (query, of, logsumexp, gradient, inner)
    length = query.shape[1]
    if length <= QUERY_BLOCK:
        (d_key, d_value), d_query = block(zeros, parts)
        return d_query, d_key, d_value
    (d_key, d_value), blocks = jax.lax.scan(block, zeros, _divided(parts, length))
    return _joined(blocks, length), d_key, d_value


def _by_blocks(block: Any, parts: Any) -> MixedValues:
    length = parts[0].shape[1]
    if length <= QUERY_BLOCK:
        mixed: MixedValues = block(parts)
        return mixed
    blocks = jax.lax.map(block, _divided(parts, length))
    return MixedValues(_joined(blocks.values, length), _joined(blocks.logsumexp, length))


def _divided(parts: Any, length: int) -> Any:
    """Returns the blocks of `length` queries as a leading dim. Positions have no dim of the batch.

    The last block is padded with zeros. Queries of zeros have finite weights, and with an output's
    gradient of zeros they add zero to the gradients of keys and values.
    """
    count = math.ceil(length / QUERY_BLOCK)
    size = math.ceil(length / count)

    def divide(x: jax.Array) -> jax.Array:
        dim = 0 if x.ndim == 1 else 1
        padding = [(0, count * size - length) if n == dim else (0, 0) for n in range(x.ndim)]
        x = jnp.pad(x, padding)
        x = x.reshape(*x.shape[:dim], count, size, *x.shape[dim + 1 :])
        return jnp.moveaxis(x, dim, 0)

    return jax.tree.map(divide, parts)


def _joined(x: jax.Array, length: int) -> jax.Array:
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(len(x), -1, *x.shape[3:])[:, :length]


def _grouped(x: jax.Array, heads: int) -> jax.Array:
    """Divides the heads (dim 2) into the groups that share a key-value head."""
    return x.reshape(*x.shape[:2], heads, -1, *x.shape[3:])


def _before_keys(x: jax.Array) -> jax.Array:
    """Returns (B, T, K, G) as (B, K, G, T, 1), to be broadcast over the keys."""
    return jnp.moveaxis(x, 1, 3)[..., None]


def _product(formula: str, one: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.einsum(formula, one, other, preferred_element_type=jnp.float32)


def _scores(
    query: jax.Array, key: jax.Array, of: Tokens, to: Tokens, pattern: Pattern, every: bool
) -> jax.Array:
    """Returns the scaled scores (B, K, G, T, S), f32: -inf for pairs that do not attend."""
    scores = _product("btkgh,bskh->bkgts", _grouped(query, key.shape[2]), key) * pattern.scale
    before = of.positions[:, None] - to.positions[None]
    allowed = jnp.ones((1, *before.shape), bool)
    if pattern.causal and not every:
        allowed &= before >= 0
    if pattern.window is not None and not every:
        allowed &= jnp.abs(before) < pattern.window
    if of.segments is not None:
        assert to.segments is not None
        allowed &= of.segments[:, :, None] == to.segments[:, None, :]
    if every and of.segments is None:
        return scores
    return jnp.where(allowed[:, None, None], scores, -jnp.inf)


# -- Attention over a sequence whose tokens are split over the mesh axis "context" -----------------

PyTree = Any
CONTEXT = "context"
"""The mesh axis that splits the tokens."""


# Time of attention by XLA relative to that of a kernel: for Llama 3.1 8B with 131,072 tokens on
# v5p:4x4x4 a plan has 39 s for the ring of a step, and 10.5 s for splash. cuDNN was not measured.
_XLA_SLOWNESS = 3.7


def choose_context_method(
    device: Any,
    query: jax.Array,
    key: jax.Array,
    window: int | None,
    over: CurrentMesh,
    *,
    causal: bool,
    has_kernel: bool,
) -> ContextMethod:
    """Returns the method that is expected to be the fastest, by peak rates.

    A ring sends the keys and values of a device in the time of the products with them, if a device
    has enough tokens; with a window it has few turns. "ulysses" waits for all that it sends. But
    this takes less time than the waits of a ring if a device has few tokens, or than the time that
    a ring loses because it computes by XLA.

    `has_kernel` tells whether a device computes whole sequences, as "ulysses" does, with a kernel.
    Shapes are as in `attention`.
    """
    size, chip = over.sizes[CONTEXT], chip_of(device.device_kind)
    if window is not None or chip is None or chip.name == "cpu":
        return "ring"
    tokens = query.shape[1] // size
    width = query.shape[3] * query.dtype.itemsize
    heads, kv_heads = heads_of_device(query.shape[2], key.shape[2], over)
    if heads % size:
        return "ring"
    # Seconds for one row of the batch. Half of the products of a causal ring are not computed.
    products = (2 if causal else 4) * tokens**2 * heads * query.shape[3] / chip.flops
    in_ring = products * (_XLA_SLOWNESS if has_kernel else 1)
    turn = 2 * tokens * kv_heads * width / chip.link
    ring = size * in_ring + (size - 1) * max(0.0, turn - in_ring)
    exchanged = 2 * tokens * (heads + math.lcm(kv_heads, size)) * width * (size - 1) / size
    return "ring" if ring <= size * products + exchanged / chip.link else "ulysses"


def context_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None,
    *,
    method: ContextMethod,
    pattern: Pattern,
    over: CurrentMesh,
    name: str,
    whole: Callable[..., jax.Array],
) -> jax.Array:
    """Returns attention's output, (B, T, heads, head width), split over "context".

    The shapes are as in `attention`.

    Args:
      method: "ring": keys and values go around the devices. "gather": each device gathers the keys
        and values of all tokens. "ulysses": each device gathers all tokens of some of the heads.
      name: Name of the output for `jax.checkpoint` policies.
      whole: Maps (query, key, value, segments=...) of whole sequences on one device to the output,
        for "ulysses".

    Raises:
      UserError: If the tokens, or the heads with "ulysses", do not divide.
    """
    size, tokens = over.sizes[CONTEXT], query.shape[1]
    if key.shape[1] != tokens:
        raise UserError(
            f"attention: {tokens} queries and {key.shape[1]} keys: over mesh.context={size} a "
            "sequence must attend to itself"
        )
    if tokens % (2 * size):
        raise UserError(
            f"attention: {tokens} tokens do not divide over mesh.context={size}: their number must "
            f"be a multiple of {2 * size}"
        )
    local: LocalAttention
    if method == "ring":
        ring = make_ring(CONTEXT, size, tokens, pattern, name)
        local = partial(ring_attention, ring=ring)
    elif method == "gather":

        def local(
            query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None
        ) -> jax.Array:
            return _mix(query, key, value, segments, pattern, name)

    else:
        heads, _ = heads_of_device(query.shape[2], key.shape[2], over)
        if heads % size:
            raise UserError(
                f"context.method ulysses: {heads} heads on each device do not divide over "
                f"mesh.context={size}: use ring, which does not split the heads"
            )
        local = partial(_ulysses, whole=whole, size=size)
    return attention_over_devices(local, query, key, value, segments, over, tokens=CONTEXT)


def _all(x: PyTree) -> PyTree:
    """Returns the arrays (B, T, ...) of all tokens."""
    return jax.tree.map(lambda x: jax.lax.all_gather(x, CONTEXT, axis=1, tiled=True), x)


# -- all to all ------------------------------------------------------------------------------------


def _ulysses(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None,
    *,
    whole: Callable[..., jax.Array],
    size: int,
) -> jax.Array:
    """Exchanges tokens for heads and back (Jacobs et al. 2023, arXiv:2309.14509)."""
    heads = key.shape[2]
    copies = math.lcm(heads, size) // heads  # of key-value heads that several devices need
    key, value = (jnp.repeat(x, copies, axis=2) for x in (key, value))
    query, key, value = (
        jax.lax.all_to_all(x, CONTEXT, split_axis=2, concat_axis=1, tiled=True)
        for x in (query, key, value)
    )
    mixed = whole(query, key, value, segments=_all(segments))
    return jax.lax.all_to_all(mixed, CONTEXT, split_axis=1, concat_axis=2, tiled=True)


# -- gathered keys and values ----------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _mix(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None,
    pattern: Pattern,
    name: str,
) -> jax.Array:
    return _mix_forward(query, key, value, segments, pattern, name)[0]


def _places(query: jax.Array, segments: jax.Array | None) -> tuple[Tokens, Tokens]:
    """Returns the places of this device's tokens and of all tokens."""
    length = query.shape[1]
    start = jax.lax.axis_index(CONTEXT) * length
    everywhere = jnp.arange(length * jax.lax.axis_size(CONTEXT), dtype=jnp.int32)
    return Tokens(start + jnp.arange(length, dtype=jnp.int32), segments), Tokens(
        everywhere, _all(segments)
    )


def _mix_forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None,
    pattern: Pattern,
    name: str,
) -> tuple[jax.Array, PyTree]:
    (all_keys, all_values), (of, to) = _all((key, value)), _places(query, segments)
    mixed = attend(query, all_keys, all_values, of, to, pattern, every=pattern.is_full)
    values = checkpoint_name(mixed.values.astype(query.dtype), name)
    logsumexp = checkpoint_name(mixed.logsumexp, name)
    return values, (query, key, value, segments, values, logsumexp)


def _mix_backward(pattern: Pattern, name: str, residuals: PyTree, gradient: jax.Array) -> PyTree:
    del name
    # Keys and values are gathered again, so that none of another device is kept meanwhile.
    query, key, value, segments, values, logsumexp = residuals
    (all_keys, all_values), (of, to) = _all((key, value)), _places(query, segments)
    d_query, *others = attend_backward(
        query,
        all_keys,
        all_values,
        of,
        to,
        pattern,
        every=pattern.is_full,
        logsumexp=logsumexp,
        gradient=gradient,
        inner=(values.astype(jnp.float32) * gradient.astype(jnp.float32)).sum(-1),
    )
    d_key, d_value = (
        jax.lax.psum_scatter(x, CONTEXT, scatter_dimension=1, tiled=True).astype(key.dtype)
        for x in others
    )
    return d_query.astype(query.dtype), d_key, d_value, None


_mix.defvjp(_mix_forward, _mix_backward)


# -- Attention over a sequence whose tokens are split over devices, by a ring of keys and values


@dataclass(frozen=True)
class Ring:
    """The devices of an axis, and the turns of their keys and values.

    Device i has chunk i of the tokens. In turn s it has the keys and values of chunk i - s.

    Attributes:
      first: The first turn: negative if a window also holds later tokens.
      turns: Number of turns.
      balanced: Whether a device computes with the chunks i and 2 * size - 1 - i of half the length,
        so that causal attention is the same work on each (Brandon et al. 2023, arXiv:2311.09431;
        the assignment is that of Llama 3, arXiv:2407.21783).
      pattern: The pairs of tokens that attend.
      name: Name of output and softmax's total for `jax.checkpoint` policies.
    """

    axis: str
    size: int
    first: int
    turns: int
    balanced: bool
    pattern: Pattern
    name: str


def make_ring(axis: str, size: int, tokens: int, pattern: Pattern, name: str) -> Ring:
    """Returns the ring of an attention: only turns in which some pair attends.

    Args:
      axis: Name of the axis that splits the tokens.
      size: Its number of devices, at least 2.
      tokens: Number of tokens of the whole sequence, a multiple of twice the size.
      name: Name of the output for `jax.checkpoint` policies.
    """
    if pattern.window is None:
        return Ring(axis, size, 0, size, pattern.causal, pattern, name)
    chunk = tokens // size
    before = -(-(pattern.window - 1) // chunk)
    first = 0 if pattern.causal else -before
    turns = min(before - first + 1, size)
    return Ring(axis, size, 0 if turns == size else first, turns, False, pattern, name)


def ring_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None, ring: Ring
) -> jax.Array:
    """Returns the output of this device's tokens, (B, T, heads, head width). Under `shard_map`.

    Keys and values go around the ring, each turn while the scores of the turn before are computed
    (Liu et al. 2023, arXiv:2310.01889). The backward pass sends them around again with their
    gradients, so that no device keeps keys or values of another one. The arrays are this device's
    chunk of the sequence, with the shapes of `attention`.
    """
    if not ring.balanced:
        return _mix_in_ring(query, key, value, segments, ring)
    arrays = {"query": query, "key": key, "value": value, "segments": segments}
    balanced = _balance(arrays, ring)
    return _unbalance(_mix_in_ring(**balanced, ring=ring), ring)


# -- balanced chunks -------------------------------------------------------------------------------
#
# Chunks of half the length: device i has 2i and 2i + 1, and computes with i and 2n - 1 - i. One
# permutation sends the even chunks and one the odd ones.


def _to(ring: Ring, odd: int) -> list[tuple[int, int]]:
    halves = [2 * device + odd for device in range(ring.size)]
    return [
        (device, half if half < ring.size else 2 * ring.size - 1 - half)
        for device, half in enumerate(halves)
    ]


def _balance(tree: PyTree, ring: Ring) -> PyTree:
    device = jax.lax.axis_index(ring.axis)

    def exchange(x: jax.Array) -> jax.Array:
        even, odd = (
            jax.lax.ppermute(half, ring.axis, _to(ring, number))
            for number, half in enumerate(jnp.split(x, 2, axis=1))
        )
        in_order = jnp.concatenate([even, odd], axis=1)
        return jnp.where(device % 2 == 0, in_order, jnp.concatenate([odd, even], axis=1))

    return jax.tree.map(exchange, tree)


def _unbalance(x: jax.Array, ring: Ring) -> jax.Array:
    device = jax.lax.axis_index(ring.axis)
    low, high = jnp.split(x, 2, axis=1)
    is_even = device % 2 == 0
    halves = (jnp.where(is_even, low, high), jnp.where(is_even, high, low))
    back = [
        jax.lax.ppermute(half, ring.axis, [(to, source) for source, to in _to(ring, number)])
        for number, half in enumerate(halves)
    ]
    return jnp.concatenate(back, axis=1)


# -- turns -----------------------------------------------------------------------------------------


def _places_in_ring(
    length: int, segments: jax.Array | None, ring: Ring, chunk: jax.Array
) -> Tokens:
    """Returns the places of the tokens of a device: in a balanced ring, of its two chunks."""
    if not ring.balanced:
        return Tokens(chunk * length + jnp.arange(length, dtype=jnp.int32), segments)
    half = length // 2
    starts = jnp.stack([chunk, 2 * ring.size - 1 - chunk]) * half
    return Tokens((starts[:, None] + jnp.arange(half, dtype=jnp.int32)[None]).reshape(-1), segments)


def _half(tree: PyTree, high: int) -> PyTree:
    """Returns the first or second half of the tokens, of arrays (B, T, ...) and positions (T,)."""

    def of(x: jax.Array) -> jax.Array:
        axis = min(x.ndim - 1, 1)
        return jnp.split(x, 2, axis)[high]

    return jax.tree.map(of, tree)


def _choose(condition: jax.Array, one: PyTree, other: PyTree) -> PyTree:
    return jax.tree.map(partial(jnp.where, condition), one, other)


class _Queries(NamedTuple):
    """Queries; the last three fields are for the backward pass, and None in the forward pass."""

    query: jax.Array
    of: Tokens
    total: jax.Array | None = None
    gradient: jax.Array | None = None
    inner: jax.Array | None = None


class _Keys(NamedTuple):
    """Keys and values that go around the ring."""

    key: jax.Array
    value: jax.Array
    segments: jax.Array | None


_Given = tuple[_Keys, Tokens]
"""Keys and values, and their place."""


def _send(tree: PyTree, ring: Ring, by: int = 1) -> PyTree:
    if by == 0:
        return tree
    to = [(device, (device + by) % ring.size) for device in range(ring.size)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, ring.axis, to), tree)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _mix_in_ring(
    query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None, ring: Ring
) -> jax.Array:
    return _forward(query, key, value, segments, ring).values.astype(query.dtype)


def _mix_in_ring_forward(
    query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None, ring: Ring
) -> tuple[jax.Array, PyTree]:
    mixed = _forward(query, key, value, segments, ring)
    values = checkpoint_name(mixed.values.astype(query.dtype), ring.name)
    logsumexp = checkpoint_name(mixed.logsumexp, ring.name)
    return values, (query, key, value, segments, values, logsumexp)


def _forward(
    query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None, ring: Ring
) -> MixedValues:
    device = jax.lax.axis_index(ring.axis)
    queries = _Queries(query, _places_in_ring(query.shape[1], segments, ring, device))

    def turn(number: jax.Array | int, mixed: MixedValues, keys: _Keys, own: bool) -> MixedValues:
        chunk = (device - ring.first - number) % ring.size
        to = _places_in_ring(query.shape[1], keys.segments, ring, chunk)
        return _attend_in_turn(mixed, queries, keys, to, ring, own=own, earlier=chunk < device)

    keys = _send(_Keys(key, value, segments), ring, ring.first)
    arriving = _send(keys, ring)
    mixed = turn(0, no_values(query), keys, own=ring.first == 0)
    if ring.turns > 2:

        def body(carry: tuple[MixedValues, _Keys], number: jax.Array) -> tuple[Any, None]:
            mixed, keys = carry
            arriving = _send(keys, ring)  # while the scores are computed
            return (turn(number, mixed, keys, own=False), arriving), None

        (mixed, arriving), _ = jax.lax.scan(
            body, (mixed, arriving), jnp.arange(1, ring.turns - 1, dtype=jnp.int32)
        )
    return mixed if ring.turns == 1 else turn(ring.turns - 1, mixed, arriving, own=False)


def _attend_in_turn(
    mixed: MixedValues,
    queries: _Queries,
    keys: _Keys,
    to: Tokens,
    ring: Ring,
    *,
    own: bool,
    earlier: jax.Array,
) -> MixedValues:
    """Returns the values that the queries mix, with the keys of this turn added.

    Args:
      mixed: The values mixed with the keys of the turns before.
      to: The place of the keys of this turn.
      own: Whether the keys are the device's own, in a balanced ring.
      earlier: Whether the keys are of a device with a lower number.
    """

    def part(queries: _Queries, given: _Given, every: bool) -> MixedValues:
        keys, to = given
        pattern = ring.pattern
        return attend(queries.query, keys.key, keys.value, queries.of, to, pattern, every=every)

    if not ring.balanced:
        return merge_mixed(mixed, part(queries, (keys, to), ring.pattern.is_full))
    low, high = (_half(queries, half) for half in (0, 1))
    low_keys, high_keys = (_half((keys, to), half) for half in (0, 1))
    low_mixed, high_mixed = (_half(mixed, half) for half in (0, 1))
    high_mixed = merge_mixed(high_mixed, part(high, low_keys, every=True))
    if own:
        low_mixed = merge_mixed(low_mixed, part(low, low_keys, every=False))
        high_mixed = merge_mixed(high_mixed, part(high, high_keys, every=False))
    else:
        # One of two pairs of chunks attends entirely, and the other not at all.
        chosen = _choose(earlier, (low, low_keys), (high, high_keys))
        found = part(chosen[0], chosen[1], every=True)
        none = no_values(found.values)
        low_mixed = merge_mixed(low_mixed, _choose(earlier, found, none))
        high_mixed = merge_mixed(high_mixed, _choose(earlier, none, found))
    return _join(low_mixed, high_mixed)


def _join(low: PyTree, high: PyTree) -> PyTree:
    return jax.tree.map(lambda *halves: jnp.concatenate(halves, axis=1), low, high)


class _Gradients(NamedTuple):
    """Gradients, f32, of queries, keys and values."""

    query: jax.Array
    key: jax.Array
    value: jax.Array


def _mix_in_ring_backward(ring: Ring, residuals: PyTree, gradient: jax.Array) -> PyTree:
    query, key, value, segments, values, logsumexp = residuals
    device = jax.lax.axis_index(ring.axis)
    inner = (values.astype(jnp.float32) * gradient.astype(jnp.float32)).sum(-1)
    of = _places_in_ring(query.shape[1], segments, ring, device)
    queries = _Queries(query, of, logsumexp, gradient, inner)

    def turn(number: jax.Array | int, keys: _Keys, own: bool) -> _Gradients:
        chunk = (device - ring.first - number) % ring.size
        to = _places_in_ring(query.shape[1], keys.segments, ring, chunk)
        return _backward_in_turn(queries, keys, to, ring, own=own, earlier=chunk < device)

    def add(sums: _Gradients, found: _Gradients) -> _Gradients:
        # The sums of keys and values travel with them, while the scores are computed.
        return jax.tree.map(jnp.add, _Gradients(sums.query, *_send(sums[1:], ring)), found)

    keys = _send(_Keys(key, value, segments), ring, ring.first)
    arriving = _send(keys, ring)
    sums = turn(0, keys, own=ring.first == 0)
    if ring.turns > 2:

        def body(carry: tuple[_Gradients, _Keys], number: jax.Array) -> tuple[Any, None]:
            sums, keys = carry
            return (add(sums, turn(number, keys, own=False)), _send(keys, ring)), None

        (sums, arriving), _ = jax.lax.scan(
            body, (sums, arriving), jnp.arange(1, ring.turns - 1, dtype=jnp.int32)
        )
    if ring.turns > 1:
        sums = add(sums, turn(ring.turns - 1, arriving, own=False))
    last = ring.first + ring.turns - 1
    home = _Gradients(sums.query, *_send(sums[1:], ring, -last))
    of_each = zip(home, (query, key, value), strict=True)
    return (*(found.astype(x.dtype) for found, x in of_each), None)


def _backward_in_turn(
    queries: _Queries, keys: _Keys, to: Tokens, ring: Ring, *, own: bool, earlier: jax.Array
) -> _Gradients:
    """Returns what the pairs of a turn add to the gradients; arguments as of `_attend_in_turn`."""

    def part(queries: _Queries, given: _Given, every: bool) -> _Gradients:
        keys, to = given
        query, of, logsumexp, gradient, inner = queries
        assert logsumexp is not None
        assert gradient is not None
        assert inner is not None
        found = attend_backward(
            query,
            keys.key,
            keys.value,
            of,
            to,
            ring.pattern,
            every=every,
            logsumexp=logsumexp,
            gradient=gradient,
            inner=inner,
        )
        return _Gradients(*found)

    if not ring.balanced:
        return part(queries, (keys, to), ring.pattern.is_full)
    low, high = (_half(queries, half) for half in (0, 1))
    low_keys, high_keys = (_half((keys, to), half) for half in (0, 1))
    first = part(high, low_keys, every=True)
    if own:
        of_low, of_high = part(low, low_keys, every=False), part(high, high_keys, every=False)
    else:
        chosen = _choose(earlier, (low, low_keys), (high, high_keys))
        found = part(chosen[0], chosen[1], every=True)
        none = jax.tree.map(jnp.zeros_like, found)
        of_low, of_high = _choose(earlier, found, none), _choose(earlier, none, found)
    return _Gradients(
        query=_join(of_low.query, of_high.query + first.query),
        key=_join(of_low.key + first.key, of_high.key),
        value=_join(of_low.value + first.value, of_high.value),
    )


_mix_in_ring.defvjp(_mix_in_ring_forward, _mix_in_ring_backward)

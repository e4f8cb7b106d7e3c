"""Attention over a sequence whose tokens are split over devices, by a ring of keys and values."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from spmdtrain.kernels.attention_blocks import (
    MixedValues,
    Pattern,
    Tokens,
    attend,
    attend_backward,
    merge_mixed,
    no_values,
)

PyTree = Any


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
        return _mix(query, key, value, segments, ring)
    arrays = {"query": query, "key": key, "value": value, "segments": segments}
    balanced = _balance(arrays, ring)
    return _unbalance(_mix(**balanced, ring=ring), ring)


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


def _places(length: int, segments: jax.Array | None, ring: Ring, chunk: jax.Array) -> Tokens:
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
def _mix(
    query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None, ring: Ring
) -> jax.Array:
    return _forward(query, key, value, segments, ring).values.astype(query.dtype)


def _mix_forward(
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
    queries = _Queries(query, _places(query.shape[1], segments, ring, device))

    def turn(number: jax.Array | int, mixed: MixedValues, keys: _Keys, own: bool) -> MixedValues:
        chunk = (device - ring.first - number) % ring.size
        to = _places(query.shape[1], keys.segments, ring, chunk)
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


def _mix_backward(ring: Ring, residuals: PyTree, gradient: jax.Array) -> PyTree:
    query, key, value, segments, values, logsumexp = residuals
    device = jax.lax.axis_index(ring.axis)
    inner = (values.astype(jnp.float32) * gradient.astype(jnp.float32)).sum(-1)
    of = _places(query.shape[1], segments, ring, device)
    queries = _Queries(query, of, logsumexp, gradient, inner)

    def turn(number: jax.Array | int, keys: _Keys, own: bool) -> _Gradients:
        chunk = (device - ring.first - number) % ring.size
        to = _places(query.shape[1], keys.segments, ring, chunk)
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


_mix.defvjp(_mix_forward, _mix_backward)

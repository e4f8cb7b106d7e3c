"""Attention of some queries to some keys, as a part of the attention of a longer sequence."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

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

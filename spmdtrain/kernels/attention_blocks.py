"""Attention of some queries to some keys, as a part of a longer sequence's."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# Queries of a block: its products with all keys are in memory at once.
_QUERY_BLOCK = 512


@dataclass(frozen=True)
class Pattern:
    """The pairs of tokens that attend to each other.

    Attributes:
      causal: Whether a token attends to positions up to its own only.
      window: Number of tokens of the local window, or None.
      scale: Factor of the products.
    """

    causal: bool
    window: int | None
    scale: float

    @property
    def is_full(self) -> bool:
        """True if every token attends to every other of its document."""
        return not self.causal and self.window is None


class Tokens(NamedTuple):
    """The place of some tokens in their sequence.

    Attributes:
      positions: int (T,), their positions.
      segments: int (B, T), their documents; None for one document in each row.
    """

    positions: jax.Array
    segments: jax.Array | None


class MixedValues(NamedTuple):
    """Values mixed by the softmax over some of the keys.

    Attributes:
      values: f32 (B, T, heads, head width).
      total: f32 (B, T, heads), the logarithm of the softmax's denominator; -inf without a key.
    """

    values: jax.Array
    total: jax.Array


def nothing(query: jax.Array) -> MixedValues:
    """Returns what queries (B, T, heads, head width) mix of no keys."""
    values = jnp.zeros(query.shape, jnp.float32)
    return MixedValues(values, jnp.full(query.shape[:3], -jnp.inf, jnp.float32))


def merge_mixed(one: MixedValues, other: MixedValues) -> MixedValues:
    """Returns what queries mix of the keys of both, which are disjoint."""
    total = jnp.logaddexp(one.total, other.total)
    finite = jnp.where(total == -jnp.inf, 0.0, total)  # without a key in both
    shares = (jnp.exp(part.total - finite)[..., None] for part in (one, other))
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
    """Returns what the queries mix of these keys' values.

    Args:
      query: (B, T, heads, head width).
      key: (B, S, key-value heads, head width), as `value`.
      value: The values.
      of: The place of the queries.
      to: The place of the keys.
      pattern: The pairs that attend.
      every: Whether positions exclude no pair, so that no mask is computed for them.
    """

    def block(part: tuple[jax.Array, Tokens]) -> MixedValues:
        query, of = part
        products = _products(query, key, of, to, pattern, every)
        most = products.max(-1, keepdims=True)
        weights = jnp.exp(products - jnp.where(most == -jnp.inf, 0.0, most))
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
    total: jax.Array,
    gradient: jax.Array,
    inner: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the parts of the gradients, f32, of query, key and value that these pairs make.

    Args:
      query: As of `attend`.
      key: As of `attend`.
      value: As of `attend`.
      of: The place of the queries.
      to: The place of the keys.
      pattern: The pairs that attend.
      every: Whether positions exclude no pair.
      total: f32 (B, T, heads), the logarithm of the softmax's denominator over all keys.
      gradient: (B, T, heads, head width), the gradient of the output.
      inner: f32 (B, T, heads), the products of output and gradient.
    """
    heads = key.shape[2]

    def block(
        sums: tuple[jax.Array, jax.Array], part: Any
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        query, of, total, gradient, inner = part
        grouped = partial(_grouped, heads=heads)
        products = _products(query, key, of, to, pattern, every)
        weights = jnp.exp(products - _before_keys(grouped(total)))
        d_weights = _product("btkgh,bskh->bkgts", grouped(gradient), value)
        d_products = weights * (d_weights - _before_keys(grouped(inner))) * pattern.scale
        low = d_products.astype(query.dtype)
        d_query = _product("bkgts,bskh->btkgh", low, key).reshape(query.shape)
        d_key = _product("bkgts,btkgh->bskh", low, grouped(query))
        d_value = _product("bkgts,btkgh->bskh", weights.astype(value.dtype), grouped(gradient))
        return (sums[0] + d_key, sums[1] + d_value), d_query

    zeros = (jnp.zeros(key.shape, jnp.float32), jnp.zeros(value.shape, jnp.float32))
    parts = (query, of, total, gradient, inner)
    length = query.shape[1]
    if length % _QUERY_BLOCK or length == _QUERY_BLOCK:
        (d_key, d_value), d_query = block(zeros, parts)
        return d_query, d_key, d_value
    (d_key, d_value), blocks = jax.lax.scan(block, zeros, _divided(parts))
    return _joined(blocks), d_key, d_value


def _by_blocks(block: Any, parts: Any) -> MixedValues:
    length = parts[0].shape[1]
    if length % _QUERY_BLOCK or length == _QUERY_BLOCK:
        mixed: MixedValues = block(parts)
        return mixed
    blocks = jax.lax.map(block, _divided(parts))
    return MixedValues(_joined(blocks.values), _joined(blocks.total))


def _divided(parts: Any) -> Any:
    """Returns the blocks of queries as a leading dim. Positions have no batch."""

    def divide(x: jax.Array) -> jax.Array:
        if x.ndim == 1:
            return x.reshape(-1, _QUERY_BLOCK)
        return jnp.moveaxis(x.reshape(len(x), -1, _QUERY_BLOCK, *x.shape[2:]), 1, 0)

    return jax.tree.map(divide, parts)


def _joined(x: jax.Array) -> jax.Array:
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(len(x), -1, *x.shape[3:])


def _grouped(x: jax.Array, heads: int) -> jax.Array:
    """Divides the heads (dim 2) into the groups that share a key-value head."""
    return x.reshape(*x.shape[:2], heads, -1, *x.shape[3:])


def _before_keys(x: jax.Array) -> jax.Array:
    """Returns (B, T, K, G) as (B, K, G, T, 1), to be broadcast over the keys."""
    return jnp.moveaxis(x, 1, 3)[..., None]


def _product(formula: str, one: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.einsum(formula, one, other, preferred_element_type=jnp.float32)


def _products(
    query: jax.Array, key: jax.Array, of: Tokens, to: Tokens, pattern: Pattern, every: bool
) -> jax.Array:
    """Returns the scaled products (B, K, G, T, S), f32: -inf for pairs that do not attend."""
    products = _product("btkgh,bskh->bkgts", _grouped(query, key.shape[2]), key) * pattern.scale
    before = of.positions[:, None] - to.positions
    allowed = jnp.ones((1, *before.shape), bool)
    if pattern.causal and not every:
        allowed &= before >= 0
    if pattern.window is not None and not every:
        allowed &= jnp.abs(before) < pattern.window
    if of.segments is not None:
        assert to.segments is not None
        allowed &= of.segments[:, :, None] == to.segments[:, None, :]
    if every and of.segments is None:
        return products
    return jnp.where(allowed[:, None, None], products, -jnp.inf)

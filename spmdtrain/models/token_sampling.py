"""Draws of tokens from logits: temperature, top-k and top-p."""

import jax
import jax.numpy as jnp


def filter_logits(
    logits: jax.Array, top_k: int | None = None, top_p: jax.Array | float | None = None
) -> jax.Array:
    """Returns logits with -inf for the tokens that are never drawn.

    Of equal logits the token with the lower number counts as the more probable one.

    Args:
      logits: f32 (vocabulary,), already divided by the temperature.
      top_k: Keep this many of the most probable tokens; None keeps all.
      top_p: Of these, keep the smallest number of most probable tokens whose probabilities sum up
        to at least this, at least one token; None keeps all.
    """
    count = logits.shape[0]
    kept_count = count if top_k is None else min(top_k, count)
    if kept_count == count and top_p is None:
        return logits
    # `top_k` sorts -0 behind 0, although they are equal.
    values, tokens = jax.lax.top_k(jnp.where(logits == 0, 0, logits), kept_count)
    kept = jnp.ones(kept_count, bool)
    if top_p is not None:
        probabilities = jax.nn.softmax(values)
        before = jnp.cumsum(probabilities) - probabilities  # of the more probable tokens
        kept = (before < top_p).at[0].set(True)
    return jnp.full_like(logits, -jnp.inf).at[tokens].set(jnp.where(kept, values, -jnp.inf))


def draw_token(
    key: jax.Array,
    logits: jax.Array,
    temperature: jax.Array | float | None,
    top_k: int | None = None,
    top_p: jax.Array | float | None = None,
) -> jax.Array:
    """Returns a drawn token, int32 ().

    Args:
      key: The random key.
      logits: f32 (vocabulary,).
      temperature: Divides the logits; None takes the most probable token.
      top_k: See `filter_logits`.
      top_p: See `filter_logits`.
    """
    if temperature is None:
        return logits.argmax(-1).astype(jnp.int32)
    filtered = filter_logits(logits / temperature, top_k, top_p)
    return jax.random.categorical(key, filtered).astype(jnp.int32)

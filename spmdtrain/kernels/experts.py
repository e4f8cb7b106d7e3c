"""Mixtures of experts: each token is computed by those experts that its router chooses."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from spmdtrain.errors import UserError
from spmdtrain.kernels.reference import uses_reference

PyTree = Any
Dot = Callable[[jax.Array, jax.Array], jax.Array]
"""Multiplies each row (n, in) with its expert's matrix of a kernel (experts, in, out)."""
Ffn = Callable[[jax.Array, PyTree, Dot], jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertOutput:
    """The output of a mixture of experts, and what its router did.

    Attributes:
      output: (B, T, width), the weighted sum over each token's experts.
      balance: f32 (B,), the load-balance loss of each row, of its own tokens: the number of experts
        times the sum over experts of the fraction of the row's choices times the mean probability
        (Switch Transformer, arXiv 2101.03961). It is 1 if all experts are equally probable.
      z: f32 (B,), the mean over the row's tokens of the square of the logits' normalizer
        log(sum(exp(logits))) (ST-MoE, arXiv 2202.08906).
      entropy: f32 (B,), the mean over the row's tokens of the entropy of the probabilities, in
        nats.
      load: f32 (B, experts), the number of the row's choices for each expert.
      overflow: f32 scalar, 1 if this call gathered all tokens because a buffer was too small.
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
    """Computes each token with the `top_k` experts that have its largest router logits.

    No token is dropped, so that a token's output does not depend on the others.

    Args:
      x: (B, T, width).
      router_logits: f32 (B, T, experts).
      weights: The experts' arrays, of leading dim `experts`.
      ffn: Maps (rows, weights, dot) to the experts' output: rows (n, width) sorted by expert to
        (n, width), with products `dot(rows, kernel)`.
      top_k: Number of experts for each token.
      normalize: Whether the probabilities of a token's experts are divided by their sum.

    Returns:
      The output, and the values of the router.

    Raises:
      UserError: If the logits are not f32, or `top_k` is not from 1 to the number of experts.
    """
    count = router_logits.shape[-1]
    if router_logits.dtype != jnp.float32:
        raise UserError(f"router_logits are {router_logits.dtype}: compute them in float32")
    if not 1 <= top_k <= count:
        raise UserError(f"top_k is {top_k}: it must be from 1 to the number of experts, {count}")
    probabilities = jax.nn.softmax(router_logits)
    values, chosen = jax.lax.top_k(probabilities, top_k)
    if normalize:
        values /= values.sum(-1, keepdims=True)
    load = jax.nn.one_hot(chosen, count).sum((1, 2))
    log_sum = jax.nn.logsumexp(router_logits, axis=-1)

    def mixed(weights: PyTree, x: jax.Array, values: jax.Array, chosen: jax.Array) -> jax.Array:
        return _mixed(x, values, chosen, count, lambda rows, dot: ffn(rows, weights, dot))

    if uses_reference():
        # Row by row, so that the trace shows that no row depends on another one.
        copies = jax.tree.map(lambda w: jnp.broadcast_to(w, (len(x), *w.shape)), weights)
        output = jax.vmap(mixed)(copies, x, values, chosen)
    else:
        output = mixed(weights, *(a.reshape(-1, a.shape[-1]) for a in (x, values, chosen)))
    return ExpertOutput(
        output=output.reshape(x.shape),
        balance=count * (load / chosen[0].size * probabilities.mean(1)).sum(-1),
        z=jnp.square(log_sum).mean(1),
        entropy=(log_sum - (probabilities * router_logits).sum(-1)).mean(1),
        load=load,
        overflow=jnp.float32(0),
    )


def _mixed(
    x: jax.Array,
    values: jax.Array,
    chosen: jax.Array,
    count: int,
    ffn: Callable[[jax.Array, Dot], jax.Array],
) -> jax.Array:
    """Returns the weighted sum over each token's experts, (n, width).

    Args:
      x: (n, width).
      values: f32 (n, top_k), the weights of the experts.
      chosen: int (n, top_k), the experts.
      count: Number of experts.
      ffn: Maps (rows sorted by expert, dot) to the experts' output.
    """
    top_k = chosen.shape[-1]
    order = jnp.argsort(chosen.ravel(), stable=True)
    sizes = (chosen.ravel()[:, None] == jnp.arange(count)).sum(0, dtype=jnp.int32)
    output = ffn(x[order // top_k], lambda rows, kernel: jax.lax.ragged_dot(rows, kernel, sizes))
    output = output[jnp.argsort(order)].reshape(len(x), top_k, -1)
    return (output.astype(jnp.float32) * values[..., None]).sum(1).astype(x.dtype)

"""The parts of decoders that do not depend on the kind of their blocks."""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from spmdtrain.errors import UserError
from spmdtrain.kernels.linear_cross_entropy import LogitLayer, TokenLosses, linear_cross_entropy
from spmdtrain.models.cached_attention import cache_array
from spmdtrain.sharding.placement import constrain_sharding
from spmdtrain.step.layer_loop import unrolls

PyTree = Any


def embed_tokens(embedding: jax.Array, tokens: jax.Array, vocabulary: int) -> jax.Array:
    """Returns the rows of an embedding, (B, T, width).

    Args:
      embedding: (at least `vocabulary`, width).
      tokens: int (B, T). Any that is not from 0 to `vocabulary` - 1 is embedded as NaN.
      vocabulary: Number of tokens.
    """
    # "tensor" splits the rows of the embedding. Each of its devices needs all tokens, to look up
    # those that are in its rows.
    tokens = constrain_sharding(tokens, "batch", "context")
    # Looked up in f32, so that the gradients of frequent tokens are added up in f32.
    x = embedding.astype(jnp.float32)[tokens].astype(embedding.dtype)
    x = constrain_sharding(x, "batch", "context", None)
    # Indexing clamps other numbers, or counts from the end: the loss would be that of other data.
    known = (tokens >= 0) & (tokens < vocabulary)
    return jnp.where(known[..., None], x, jnp.nan)


def token_logits(x: jax.Array, head: jax.Array) -> jax.Array:
    """Returns the logits of the next tokens, f32 (B, T, rows), split over "context" and "tensor".

    Args:
      x: (B, T, width).
      head: (rows, width).
    """
    logits = jnp.einsum("btd,vd->btv", x, head, preferred_element_type=jnp.float32)
    return constrain_sharding(logits, "batch", "context", "tensor")


def dtype_name(dtype: Any) -> Any:
    """Returns the name of a dtype.

    Args:
      dtype: The dtype; anything else is returned as it is.
    """
    try:
        return np.dtype(dtype).name
    except TypeError:
        return dtype


def check_length(length: int, context: int) -> None:
    """Checks that a sequence fits.

    Args:
      length: Its number of tokens.
      context: The largest number.

    Raises:
      UserError: If it is longer.
    """
    if length > context:
        raise UserError(f"a sequence has {length} tokens, but the model's context is {context}")


class StackedDecoder(nnx.Module):
    """A decoder whose `blocks` are arrays with a first dim for the layer.

    Its `config` has the integers `vocabulary`, `layers`, `kv_heads`, `head_width` and `context`,
    and `tied`, `unroll` and `logits_dtype`. Keys and values have the dtype of its `embedding`,
    which may have more rows than there are tokens. Without `tied`, `head` is the output layer.
    """

    config: Any
    embedding: nnx.Param[jax.Array]
    head: nnx.Param[jax.Array]
    blocks: nnx.Dict[Any]

    def __call__(
        self,
        tokens: jax.Array,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """Computes the logits of the next tokens; for the arguments see `hidden`."""
        return self.logits(self.hidden(tokens, segments, positions))

    def hidden(
        self,
        tokens: jax.Array,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """Computes the values from which `logits` computes the logits of the next tokens.

        Args:
          tokens: int (B, T), from 0 to `vocabulary` - 1. Any other makes logits NaN.
          segments: int (B, T), the number of each token's document within its row, if a row holds
            several: a token attends to its own document only.
          positions: int (B, T), each token's position within its document, below the context; by
            default the positions within the row.

        Returns:
          (B, T, width).

        Raises:
          UserError: If T is larger than the context.
        """
        raise NotImplementedError

    def logits(self, x: jax.Array) -> jax.Array:
        """Returns the logits of the next tokens, -1e9 for rows of the output layer without a token.

        Args:
          x: (B, T, width), from `hidden` or `extend`.

        Returns:
          f32 (B, T, rows of the output layer).
        """
        layer = LogitLayer(self.config.vocabulary, None, np.dtype(np.float32))
        return layer.logits(token_logits(x, self._output_layer()), None)

    def token_losses(
        self,
        tokens: jax.Array,
        targets: jax.Array,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
        *,
        z_loss: float = 0.0,
    ) -> TokenLosses:
        """Computes the cross-entropy of the next tokens: see `linear_cross_entropy`.

        Args:
          tokens: See `hidden`.
          targets: int (B, T), the token after each.
          segments: See `hidden`.
          positions: See `hidden`.
          z_loss: See `linear_cross_entropy`.

        Returns:
          The losses, (B, T).
        """
        return self.losses(self.hidden(tokens, segments, positions), targets, z_loss=z_loss)

    def losses(self, x: jax.Array, targets: jax.Array, *, z_loss: float = 0.0) -> TokenLosses:
        """Computes the cross-entropy of the next tokens: see `linear_cross_entropy`.

        Args:
          x: (B, T, width), from `hidden`.
          targets: int (B, T), the token after each.
          z_loss: See `linear_cross_entropy`.

        Returns:
          The losses, (B, T).
        """
        return linear_cross_entropy(
            x,
            self._output_layer(),
            targets,
            vocabulary=self.config.vocabulary,
            z_loss=z_loss,
            logits_dtype=self.config.logits_dtype,
        )

    def _unrolls(self) -> bool:
        return unrolls(self.config.layers, self.config.unroll)

    def _output_layer(self) -> jax.Array:
        return self.embedding[...] if self.config.tied else self.head[...]

    def layers(self) -> PyTree:
        """Returns the weights of the blocks as `extend` takes them.

        Call it outside of a loop over `extend`, because it copies the weights of unrolled layers.
        """
        weights = nnx.to_pure_dict(nnx.state(self.blocks))
        if not self._unrolls():
            return weights
        return [
            jax.tree.map(operator.itemgetter(layer), weights) for layer in range(self.config.layers)
        ]

    def empty_cache(self, rows: int, length: int) -> PyTree:
        """Returns a cache of keys and values for `extend`, of zeros.

        Args:
          rows: Number of rows B.
          length: The number of tokens of a row that it can hold, at most the context.

        Returns:
          Pairs of arrays of shape (B, key-value heads, `length`, head width) in the dtype of the
          parameters, one pair for each unrolled layer; in a loop one pair, in which the layer is
          the first dim.

        Raises:
          UserError: If `length` is larger than the context.
        """
        config, dtype = self.config, self.embedding[...].dtype
        if length > config.context:
            raise UserError(
                f"a cache of {length} tokens, but the model's context is {config.context}"
            )
        shape = (rows, config.kv_heads, length, config.head_width)
        if self._unrolls():
            return [(cache_array(shape, dtype),) * 2 for _ in range(config.layers)]
        return (cache_array((config.layers, *shape), dtype),) * 2


def read_with_cache(
    read: Callable[[jax.Array, PyTree, PyTree], tuple[jax.Array, PyTree]],
    x: jax.Array,
    layers: PyTree,
    cache: PyTree,
) -> tuple[jax.Array, PyTree]:
    """Calls a block for each layer, with the layer's keys and values.

    Args:
      read: A function of (x, weights, cached) of one layer that returns the new x, and the keys
        and values extended by the new tokens.
      x: (B, T, width), the embedded new tokens.
      layers: The weights of each layer as a list, or stacked.
      cache: From `StackedDecoder.empty_cache`, of unrolled layers if `layers` is a list.

    Returns:
      x after the last layer, and the extended cache.
    """
    if isinstance(layers, list):
        after = []
        for weights, cached in zip(layers, cache, strict=True):
            x, cached = read(x, weights, cached)
            after.append(cached)
        return x, after

    def read_layer(carry: tuple[jax.Array, PyTree], layer: Any) -> tuple[Any, None]:
        x, cache = carry
        weights, index = layer
        x, cached = read(x, weights, jax.tree.map(lambda array: array[index], cache))
        # One array, which is updated in place.
        cache = jax.tree.map(lambda array, new: array.at[index].set(new), cache, cached)
        return (x, cache), None

    count = len(jax.tree.leaves(layers)[0])
    (x, cache), _ = jax.lax.scan(read_layer, (x, cache), (layers, jnp.arange(count)))
    return x, cache

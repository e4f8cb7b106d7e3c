"""The compiled programs that read and write tokens with a cache."""

from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from spmdtrain.config.run_config import Purpose, derive_seed
from spmdtrain.models.token_sampling import draw_token
from spmdtrain.sharding.mesh import BATCH_AXES
from spmdtrain.sharding.placement import Placement, constrain_sharding, use_placement
from spmdtrain.strategies import DEFAULT

PyTree = Any

CHUNK = 32
"""Tokens of each row that are written between two returns to the host."""
NO_TOKEN = -1
"""Written in place of a token by a row that has ended."""


@runtime_checkable
class Decoder(Protocol):
    """An nnx module that `generate` accepts, such as `Transformer`."""

    config: Any
    """Has the integers `vocabulary` and `context`."""

    def layers(self) -> PyTree:
        """Returns the weights that `extend` takes."""
        ...

    def empty_cache(self, rows: int, length: int) -> PyTree:
        """Returns a cache of zeros: arrays (..., B, key-value heads, length, head width).

        Args:
          rows: Number of rows B.
          length: The number of tokens of a row that it can hold, at most the context.
        """
        ...

    def extend(
        self, layers: PyTree, tokens: jax.Array, cache: PyTree, start: jax.Array
    ) -> tuple[jax.Array, PyTree]:
        """Reads tokens that follow those in the cache; each attends to positions up to its own.

        Args:
          layers: From `layers`.
          tokens: int (B, T).
          cache: From `empty_cache` or `extend`.
          start: int (B,), the position of the first of each row's tokens.

        Returns:
          The argument of `logits`, with leading dims (B, T), and the extended cache.
        """
        ...

    def logits(self, x: jax.Array) -> jax.Array:
        """Returns the logits of the next tokens, f32 (B, T, at least `vocabulary`).

        Args:
          x: From `extend`.
        """
        ...


class DecodingPrograms:
    """The compiled functions of a model, with its values.

    Args:
      model: The model.
      temperature: See `GenerationOptions`.
      top_k: See `GenerationOptions`.
      top_p: See `GenerationOptions`.
      stop_tokens: See `GenerationOptions`.
      seed: See `GenerationOptions`.
      dtype: See `GenerationOptions`.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        temperature: float,
        top_k: int | None,
        top_p: float,
        stop_tokens: tuple[int, ...],
        seed: int,
        dtype: str | None,
    ) -> None:
        self.context: int = model.config.context
        self._graph, self._values = nnx.split(model)
        self.placement = _placement_of(nnx.state(model, nnx.Param))
        if dtype is not None:
            self._values = jax.tree.map(
                lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x,
                self._values,
            )
        self._sampling = {
            "seed": np.uint32(derive_seed(seed, Purpose.EVAL)),
            "temperature": np.float32(temperature) if temperature else None,
            "top_k": top_k,
            "top_p": np.float32(top_p) if top_p < 1 else None,
            "stop_tokens": stop_tokens,
        }

    def read(self, tokens: np.ndarray, length: int) -> PyTree:
        """Returns a cache with the tokens of all rows.

        Args:
          tokens: int32 (B, T), padded at the end.
          length: The length of the cache.
        """
        with use_placement(self.placement):
            return _read(self._graph, self._values, tokens, length)

    def reread(self, cache: PyTree, tokens: np.ndarray, rows: np.ndarray) -> PyTree:
        """Returns a cache with other tokens in some rows.

        Args:
          cache: The cache, which is donated.
          tokens: int32 (B, T), padded at the end.
          rows: bool (B,), the rows that are replaced.
        """
        with use_placement(self.placement):
            return _reread(self._graph, self._values, cache, tokens, rows)

    def write(
        self,
        cache: PyTree,
        last: np.ndarray,
        position: np.ndarray,
        start: np.ndarray,
        ended: np.ndarray,
        index: np.ndarray,
        steps: int,
    ) -> tuple[PyTree, np.ndarray]:
        """Adds tokens to each row, until all rows have ended.

        Args:
          cache: The tokens before `last`. It is donated.
          last: int32 (B,), the last token of each row.
          position: int32 (B,), its position in the cache.
          start: int32 (B,), the position in the text of the first token in the cache.
          ended: bool (B,), the rows that get no more tokens.
          index: int32 (B,), the index of each prompt, from which its random key derives.
          steps: Number of tokens, at most `CHUNK`.

        Returns:
          The extended cache, and int32 (B, `steps`): the tokens, `NO_TOKEN` where there is none.
        """
        arguments = last, position, start, ended, index, steps
        with use_placement(self.placement):
            cache, written = _write(self._graph, self._values, cache, *arguments, **self._sampling)
        return cache, np.asarray(written)[:, :steps]


def _placement_of(values: PyTree) -> Placement:
    """Returns a placement on the mesh of the arrays; without a mesh if it is not a run's mesh."""
    sharding = getattr(jax.tree.leaves(values)[0], "sharding", None)  # NumPy arrays have none
    mesh = getattr(sharding, "mesh", None)
    is_of_run = mesh is not None and {*BATCH_AXES, "tensor"} <= set(mesh.axis_names)
    return Placement(DEFAULT, mesh if is_of_run else None)


@partial(jax.jit, static_argnums=(0, 3))
def _read(graph: Any, values: PyTree, tokens: jax.Array, length: int) -> PyTree:
    model: Any = nnx.merge(graph, values)
    rows, count = tokens.shape
    cache: PyTree = model.empty_cache(rows, length)
    if not count:
        return cache
    return model.extend(model.layers(), tokens, cache, jnp.zeros(rows, jnp.int32))[1]


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _reread(
    graph: Any, values: PyTree, cache: PyTree, tokens: jax.Array, rows: jax.Array
) -> PyTree:
    model: Any = nnx.merge(graph, values)
    first = jnp.zeros(tokens.shape[0], jnp.int32)
    _, read = model.extend(model.layers(), tokens, cache, first)
    chosen = rows[:, None, None, None]
    return jax.tree.map(lambda new, old: jnp.where(chosen, new, old), read, cache)


@partial(jax.jit, static_argnums=0, static_argnames=("top_k", "stop_tokens"), donate_argnums=2)
def _write(
    graph: Any,
    values: PyTree,
    cache: PyTree,
    last: jax.Array,
    position: jax.Array,
    start: jax.Array,
    ended: jax.Array,
    index: jax.Array,
    steps: jax.Array,
    *,
    seed: jax.Array,
    temperature: jax.Array | None,
    top_k: int | None,
    top_p: jax.Array | None,
    stop_tokens: tuple[int, ...],
) -> tuple[PyTree, jax.Array]:
    """Returns the extended cache, and tokens (B, `CHUNK`): see `DecodingPrograms.write`."""
    model: Any = nnx.merge(graph, values)
    layers = model.layers()
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), index)
    written = jnp.full((last.shape[0], CHUNK), NO_TOKEN, jnp.int32)
    draw = partial(draw_token, temperature=temperature, top_k=top_k, top_p=top_p)

    def is_unfinished(carry: Any) -> jax.Array:
        count, _, _, _, ended, _ = carry
        return (count < steps) & ~ended.all()

    def add(carry: Any) -> Any:
        count, cache, last, position, ended, written = carry
        x, cache = model.extend(layers, last[:, None], cache, position)
        logits = model.logits(x)[:, 0, : model.config.vocabulary]
        logits = constrain_sharding(logits, "batch", None)
        own_keys = jax.vmap(jax.random.fold_in)(keys, start + position + 1)
        drawn = jnp.where(ended, NO_TOKEN, jax.vmap(draw)(own_keys, logits))
        written = jax.lax.dynamic_update_index_in_dim(written, drawn, count, axis=1)
        last = jnp.where(ended, last, drawn)
        position = jnp.where(ended, position, position + 1)
        ended = ended | jnp.isin(drawn, jnp.array(stop_tokens, jnp.int32))
        return count + 1, cache, last, position, ended, written

    carry = (jnp.int32(0), cache, last, position, ended, written)
    _, cache, _, _, _, written = jax.lax.while_loop(is_unfinished, add, carry)
    return cache, constrain_sharding(written, None, None)

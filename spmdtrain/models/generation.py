"""Generation of text by a decoder with a cache of keys and values."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral, Real
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike

from spmdtrain.config.run_config import Purpose, derive_seed
from spmdtrain.errors import UserError
from spmdtrain.sharding.mesh import BATCH_AXES
from spmdtrain.sharding.placement import Placement, constrain_sharding, use_placement
from spmdtrain.strategies import DEFAULT

# -- The compiled programs that read and write tokens with a cache ---------------------------------

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
        self.placement = placement_of_values(nnx.state(model, nnx.Param))
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
    ) -> tuple[PyTree, np.ndarray, np.ndarray]:
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
          The extended cache; int32 (B, `steps`), the tokens, `NO_TOKEN` where there is none; and
          f32 (B, `steps`), their log-probabilities.
        """
        arguments = last, position, start, ended, index, steps
        with use_placement(self.placement):
            cache, *found = _write(self._graph, self._values, cache, *arguments, **self._sampling)
        written, log_probs = (np.asarray(array)[:, :steps] for array in found)
        return cache, written, log_probs


def placement_of_values(values: PyTree) -> Placement:
    """Returns a placement on the mesh of the arrays; without a mesh if it is not a run's mesh.

    Args:
      values: Arrays of a model, of which the first decides.
    """
    sharding = getattr(jax.tree.leaves(values)[0], "sharding", None)  # NumPy arrays have none
    mesh = getattr(sharding, "mesh", None)
    is_of_run = mesh is not None and {*BATCH_AXES, "tensor"} <= set(mesh.axis_names)
    return Placement(DEFAULT, mesh if is_of_run else None)


@partial(jax.jit, static_argnums=(0, 3))
def _read(graph: Any, values: PyTree, tokens: jax.Array, length: int) -> PyTree:
    return _read_prompts(nnx.merge(graph, values), tokens, length)


def _read_prompts(model: Any, tokens: jax.Array, length: int) -> PyTree:
    """Returns a cache of some length with tokens (B, T)."""
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
) -> tuple[PyTree, jax.Array, jax.Array]:
    """Returns the extended cache, and tokens and log-probabilities (B, `CHUNK`).

    See `DecodingPrograms.write`.
    """
    model: Any = nnx.merge(graph, values)
    layers = model.layers()
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), index)
    written = jnp.full((last.shape[0], CHUNK), NO_TOKEN, jnp.int32)
    log_probs = jnp.zeros(written.shape, jnp.float32)
    draw = partial(draw_token, temperature=temperature, top_k=top_k, top_p=top_p)

    def is_unfinished(carry: Any) -> jax.Array:
        count, _, _, _, ended, *_ = carry
        return (count < steps) & ~ended.all()

    def add(carry: Any) -> Any:
        count, cache, last, position, ended, written, log_probs = carry
        logits, of_tokens, cache = _next_token(model, layers, last, cache, position)
        own_keys = jax.vmap(jax.random.fold_in)(keys, start + position + 1)
        drawn = jnp.where(ended, NO_TOKEN, jax.vmap(draw)(own_keys, logits))
        written = jax.lax.dynamic_update_index_in_dim(written, drawn, count, axis=1)
        of_drawn = jnp.where(ended, 0, _at(of_tokens, drawn))
        log_probs = jax.lax.dynamic_update_index_in_dim(log_probs, of_drawn, count, axis=1)
        last = jnp.where(ended, last, drawn)
        position = jnp.where(ended, position, position + 1)
        ended = ended | jnp.isin(drawn, jnp.array(stop_tokens, jnp.int32))
        return count + 1, cache, last, position, ended, written, log_probs

    carry = (jnp.int32(0), cache, last, position, ended, written, log_probs)
    _, cache, *_, written, log_probs = jax.lax.while_loop(is_unfinished, add, carry)
    written, log_probs = (constrain_sharding(x, None, None) for x in (written, log_probs))
    return cache, written, log_probs


def _next_token(
    model: Any, layers: PyTree, last: jax.Array, cache: PyTree, position: jax.Array
) -> tuple[jax.Array, jax.Array, PyTree]:
    """Returns logits and log-probabilities of the next tokens (B, V), and the extended cache.

    Generation and `completion_log_probs` both compute it in a loop of their own.
    """
    x, cache = model.extend(layers, last[:, None], cache, position)
    logits = model.logits(x)[:, 0, : model.config.vocabulary]
    logits = constrain_sharding(logits, "batch", None)
    return logits, jax.nn.log_softmax(logits), cache


def _at(of_tokens: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the values (B,) of tokens (B,), from those of all tokens (B, V)."""
    found: jax.Array = jnp.take_along_axis(of_tokens, jnp.maximum(tokens, 0)[:, None], axis=-1)
    return found[:, 0]


# -- Generation of text by a decoder with a cache of keys and values, in batches, as a stream ------

Prompt = ArrayLike | Sequence[int]
"""The tokens of a prompt, integers of shape (n,)."""

_ROUND = 64  # lengths are rounded up to a multiple, so that similar prompts share a program
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """Options of `generate` and `stream`.

    Attributes:
      max_new_tokens: Tokens that are added to each prompt, unless a stop token ends it earlier.
      temperature: Divides the logits; 0 takes the most probable token. Otherwise at least 1e-30,
        because f32 logits are infinite after a division by less.
      top_k: Draw only from this many of the most probable tokens; None draws from all.
      top_p: Draw only from the smallest number of most probable tokens whose probabilities (after
        temperature and `top_k`) sum up to at least this.
      stop_tokens: Tokens each of which ends a text. It is the last token of the result.
      stop_when: A function of the tokens that were added to a text so far, int32 (n,), that returns
        whether the text ends, such as one that finds a string in them. It is called once for every
        32 tokens or fewer, so a text may have some more. With several processes it returns the
        same in all of them.
      seed: The draws depend on the seed, the index of the prompt and the position in the text.
      slide: A text longer than the model's context is seen through a window, which moves by this
        many tokens whenever it is full; what remains in it is read again. By default half the
        context. With 1, each token depends on exactly `context` tokens, and takes as long as a
        prompt.
      batch_size: Number of prompts that are continued together; by default all of them. It does
        not change the draws.
      dtype: "float32", "bfloat16" or "float16": the parameters are cast to it. By default they keep
        their dtype.

    Raises:
      UserError: If a value is invalid.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    stop_tokens: tuple[int, ...] = ()
    stop_when: Callable[[np.ndarray], bool] | None = None
    seed: int = 0
    slide: int | None = None
    batch_size: int | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "top_k", "slide", "batch_size"):
            value = getattr(self, name)
            if value is not None and not (_is_integer(value) and value >= 1):
                raise UserError(f"{name} is {value!r}: it must be 1 or more, an integer")
        if not _is_integer(self.seed):
            raise UserError(f"seed is {self.seed!r}: it must be an integer")
        if not isinstance(self.stop_tokens, Iterable) or isinstance(self.stop_tokens, str):
            raise UserError(f"stop_tokens is {self.stop_tokens!r}: give a tuple of tokens")
        object.__setattr__(self, "stop_tokens", tuple(self.stop_tokens))
        if self.stop_when is not None and not callable(self.stop_when):
            raise UserError(
                f"stop_when is {self.stop_when!r}: give a function of the tokens that were added"
            )
        for name in ("temperature", "top_p"):
            if not isinstance(value := getattr(self, name), Real):
                raise UserError(f"{name} is {value!r}: it must be a number")
        if self.temperature != 0 and not 1e-30 <= self.temperature < math.inf:
            raise UserError(
                f"temperature is {self.temperature}: it must be 0, or 1e-30 or more and finite"
            )
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}: it must be above 0 and at most 1")
        if self.dtype is not None and self.dtype not in _DTYPES:
            raise UserError(f"dtype is {self.dtype!r}: it must be one of {', '.join(_DTYPES)}")


class NewTokens(NamedTuple):
    """Tokens that were added to a text.

    Attributes:
      row: Index of the prompt.
      tokens: int32 (n,), the tokens that follow those already yielded for this row.
      finished: Whether the text has ended. This is true once for each row.
      log_probs: f32 (n,), the log-probability of each token under the model, whatever temperature,
        `top_k` and `top_p` are.
    """

    row: int
    tokens: np.ndarray
    finished: bool
    log_probs: np.ndarray


def generate(
    model: Decoder, prompts: Sequence[Prompt], options: GenerationOptions
) -> list[np.ndarray]:
    """Returns the tokens that a model adds to each prompt.

    The result of a prompt does not depend on the other prompts, except by rounding: at temperature
    0 it is the same text on any number of devices and with any batch size, unless two tokens are
    equally probable.

    Args:
      model: A `Transformer` or `Llama`, such as `trainer.model`; its arrays may be sharded over a
        mesh. With several processes, all call this with the same arguments.
      prompts: For each text its first tokens, integers of shape (n,) with n of 1 or more. They may
        have different lengths, also more than the model's context.
      options: Number of tokens, temperature and so on.

    Returns:
      For each prompt int32 (n,): the new tokens, without the prompt.

    Raises:
      UserError: If a prompt is empty or has a token outside of the vocabulary, or an option does
        not fit the model.
    """
    texts: list[list[np.ndarray]] = [[] for _ in prompts]
    for piece in stream(model, prompts, options):
        texts[piece.row].append(piece.tokens)
    return [np.concatenate(text) for text in texts]


def stream(
    model: Decoder, prompts: Sequence[Prompt], options: GenerationOptions
) -> Iterator[NewTokens]:
    """Returns an iterator over the tokens that `generate` returns, as they are made.

    Args:
      model: See `generate`.
      prompts: See `generate`.
      options: Number of tokens, temperature and so on.

    Returns:
      An iterator over pieces of at most 32 tokens. The rows of a batch grow together: see
      `in_order`.

    Raises:
      UserError: As for `generate`, before the first piece.
    """
    if not isinstance(model, Decoder):
        raise UserError(
            f"a {type(model).__name__} cannot generate: it needs the methods of a Decoder: "
            "layers, empty_cache, extend and logits, as Transformer has them"
        )
    if not isinstance(options, GenerationOptions):
        raise UserError(f"options is {options!r}: give GenerationOptions(max_new_tokens=...)")
    vocabulary, context = model.config.vocabulary, model.config.context
    texts = [_checked_prompt(row, tokens, vocabulary) for row, tokens in enumerate(prompts)]
    for token in options.stop_tokens:
        if not (_is_integer(token) and 0 <= token < vocabulary):
            raise UserError(f"stop token {token!r}: tokens are integers from 0 to {vocabulary - 1}")
    if options.slide is not None and options.slide > context:
        raise UserError(f"slide is {options.slide}: it must be at most the context, {context}")
    programs = DecodingPrograms(
        model,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        stop_tokens=options.stop_tokens,
        seed=options.seed,
        dtype=options.dtype,
    )
    return _batches(programs, texts, options)


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def in_order(pieces: Iterable[NewTokens]) -> Iterator[NewTokens]:
    """Yields pieces row by row: holds back the pieces of a row until the row before it has ended.

    Use it to print one text after another while they are generated together.

    Args:
      pieces: From `stream`.
    """
    waiting: dict[int, list[NewTokens]] = {}
    current = 0
    for piece in pieces:
        waiting.setdefault(piece.row, []).append(piece)
        while current in waiting:
            ready = waiting.pop(current)
            yield from ready
            if not ready[-1].finished:
                break
            current += 1


def _batches(
    programs: DecodingPrograms, texts: list[np.ndarray], options: GenerationOptions
) -> Iterator[NewTokens]:
    size = options.batch_size or len(texts)
    for first in range(0, len(texts), max(1, size)):
        yield from _Batch(programs, texts[first : first + size], first, options)


def _checked_prompt(row: int, tokens: Prompt, vocabulary: int) -> np.ndarray:
    text = np.asarray(tokens)
    if text.ndim == 1 and not text.size:
        raise UserError(f"prompt {row} is empty: give at least one token")
    if text.ndim != 1 or not np.issubdtype(text.dtype, np.integer):
        raise UserError(
            f"prompt {row} is {text.dtype} of shape {text.shape}: it must be integers of shape (n,)"
        )
    if outside := [int(x) for x in text if not 0 <= x < vocabulary]:
        raise UserError(
            f"prompt {row} has the token {outside[0]}: tokens are from 0 to {vocabulary - 1}"
        )
    return text.astype(np.int32)


# -- batches ---------------------------------------------------------------------------------------


class _Batch:
    """Continues some prompts together; `first` is the index of the first one among all."""

    def __init__(
        self,
        programs: DecodingPrograms,
        texts: list[np.ndarray],
        first: int,
        options: GenerationOptions,
    ) -> None:
        self._programs, self._options = programs, options
        self._first, self._count = first, len(texts)
        self._slide = options.slide or max(1, programs.context // 2)
        # Rows are added until they divide over the devices. They have ended from the beginning.
        shards = programs.placement.batch_shards
        added = -len(texts) % shards
        self._texts = [*texts, *[np.zeros(1, np.int32)] * added]
        self._prompt_lengths = [len(text) for text in self._texts]
        self._ended = np.arange(len(self._texts)) >= self._count

    def __iter__(self) -> Iterator[NewTokens]:
        programs, total = self._programs, self._options.max_new_tokens
        longest = max(map(len, self._texts)) + total - 1
        length = min(programs.context, _rounded(longest))
        start = self._window()
        cache = programs.read(self._unread(start, length), length)
        index = self._first + np.arange(len(self._texts), dtype=np.int32)
        done = 0
        while done < total and not self._ended.all():
            before, start = start, self._window()
            moved = (start != before) & ~self._ended
            if moved.any() and self._slide < programs.context:
                unread = self._unread(start, programs.context - self._slide)
                cache = programs.reread(cache, unread, moved)
            last = np.array([text[-1] for text in self._texts], np.int32)
            position = np.array([len(text) for text in self._texts], np.int32) - 1 - start
            until_full = int((programs.context - position)[~self._ended].min())
            steps = min(CHUNK, total - done, until_full)
            cache, written, log_probs = programs.write(
                cache, last, position, start, self._ended, index, steps
            )
            done += steps
            yield from self._add(written, log_probs, finished=done == total)

    def _window(self) -> np.ndarray:
        """Returns the position of the first token that each row sees, int32 (B,).

        It depends on the length of the text alone, so that a generated text, given as a prompt, is
        continued in the same way.
        """
        beyond = np.array([max(0, len(text) - self._programs.context) for text in self._texts])
        return (-(-beyond // self._slide) * self._slide).astype(np.int32)

    def _unread(self, start: np.ndarray, at_most: int) -> np.ndarray:
        """Returns the tokens that each row sees before its last one, end-padded: int32 (B, T)."""
        seen = [text[first:-1] for text, first in zip(self._texts, start, strict=True)]
        length = min(at_most, _rounded(max(map(len, seen))))
        return np.array([np.pad(text[:length], (0, max(0, length - len(text)))) for text in seen])

    def _add(
        self, written: np.ndarray, log_probs: np.ndarray, *, finished: bool
    ) -> Iterator[NewTokens]:
        for row in np.flatnonzero(~self._ended):
            is_new = written[row] != NO_TOKEN
            tokens = written[row][is_new]
            self._texts[row] = np.concatenate([self._texts[row], tokens])
            added = self._texts[row][self._prompt_lengths[row] :]
            stop_when = self._options.stop_when
            ended = finished or int(tokens[-1]) in self._options.stop_tokens
            ended = ended or (stop_when is not None and bool(stop_when(added)))
            self._ended[row] = ended
            yield NewTokens(self._first + int(row), tokens, ended, log_probs[row][is_new])


def _rounded(length: int) -> int:
    return -(-length // _ROUND) * _ROUND


# -- Log-probabilities of completions, for training on what was generated --------------------------


def completion_log_probs(
    model: Decoder, prompts: jax.Array, lengths: jax.Array, completions: jax.Array
) -> jax.Array:
    """Returns the log-probability of each token of completions, in f32 with the bits of generation.

    The values are computed in the loop of `generate`: token by token, with a cache. The gradients
    are those of the model's parallel forward pass, whose values are equal up to rounding.

    The bits are those of `NewTokens.log_probs` if the shapes are the same: all prompts in one batch
    of `generate`, P the length of the longest one, and C `max_new_tokens`; and if the parameters
    have the same values, dtype and sharding.

    Args:
      model: A `Transformer` or `Llama` without dropout.
      prompts: int (B, P), padded at the end with any token.
      lengths: int (B,), the number of tokens of each prompt, at least 1.
      completions: int (B, C), padded at the end with any token.

    Returns:
      f32 (B, C). Values of padding have no meaning: give them a weight of 0.

    Raises:
      UserError: If P + C - 1 is larger than the model's context.
    """
    needed, context = prompts.shape[1] + completions.shape[1] - 1, model.config.context
    if needed > context:
        raise UserError(
            f"prompts of {prompts.shape[1]} tokens and completions of {completions.shape[1]} need "
            f"a context of {needed}, but the model's is {context}"
        )
    graph, *states = nnx.split(model, nnx.Param, ...)
    return _as_generated(graph, *states, prompts, lengths, completions)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _as_generated(
    graph: Any, params: PyTree, others: PyTree, prompts: Any, lengths: Any, completions: Any
) -> jax.Array:
    model: Any = nnx.merge(graph, params, others)
    count = completions.shape[1]
    length = min(model.config.context, _rounded(prompts.shape[1] + count - 1))
    unread = min(length, _rounded(prompts.shape[1] - 1))
    layers = model.layers()
    tokens = jnp.pad(prompts, ((0, 0), (0, max(0, unread - prompts.shape[1]))))[:, :unread]
    cache = _read_prompts(model, tokens, length)
    position = lengths - 1
    last = _at(prompts, position)

    def add(carry: Any, token: jax.Array) -> Any:
        cache, last, position = carry
        _, of_tokens, cache = _next_token(model, layers, last, cache, position)
        return (cache, token, position + 1), _at(of_tokens, token)

    _, found = jax.lax.scan(add, (cache, last, position), completions.T)
    return found.T


def _in_parallel(
    graph: Any, params: PyTree, others: PyTree, prompts: Any, lengths: Any, completions: Any
) -> jax.Array:
    """Computes the log-probabilities by the forward pass over whole texts."""
    model: Any = nnx.merge(graph, params, others)
    text = jnp.pad(prompts, ((0, 0), (0, completions.shape[1])))
    at = lengths[:, None] + jnp.arange(completions.shape[1])
    text = jax.vmap(lambda row, at, new: row.at[at].set(new))(text, at, completions)
    losses = model.token_losses(text[:, :-1], text[:, 1:]).loss
    return -jnp.take_along_axis(losses, at - 1, axis=-1)


def _forward(graph: Any, *arguments: Any) -> tuple[jax.Array, Any]:
    return _as_generated(graph, *arguments), arguments


def _backward(graph: Any, arguments: Any, gradient: jax.Array) -> Any:
    params, *fixed = arguments
    _, pull = jax.vjp(lambda params: _in_parallel(graph, params, *fixed), params)
    return (*pull(gradient), None, None, None, None)


_as_generated.defvjp(_forward, _backward)


# -- Draws of tokens from logits: temperature, top-k and top-p -------------------------------------


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

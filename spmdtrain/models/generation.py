"""Generation of text by a decoder with a cache of keys and values, in batches, as a stream."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np
from jax.typing import ArrayLike

from spmdtrain.errors import UserError
from spmdtrain.models.decoding import CHUNK, NO_TOKEN, Decoder, DecodingPrograms

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
    """

    row: int
    tokens: np.ndarray
    finished: bool


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
            cache, written = programs.write(cache, last, position, start, self._ended, index, steps)
            done += steps
            yield from self._add(written, finished=done == total)

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

    def _add(self, written: np.ndarray, *, finished: bool) -> Iterator[NewTokens]:
        for row in np.flatnonzero(~self._ended):
            tokens = written[row][written[row] != NO_TOKEN]
            self._texts[row] = np.concatenate([self._texts[row], tokens])
            self._ended[row] = finished or int(tokens[-1]) in self._options.stop_tokens
            yield NewTokens(self._first + int(row), tokens, bool(self._ended[row]))


def _rounded(length: int) -> int:
    return -(-length // _ROUND) * _ROUND

"""Evaluation of language models by the tasks of lm-eval, where the model's parameters are."""

import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from spmdtrain.data.chat import ChatTemplate, Messages, load_template
from spmdtrain.data.sources.files import delayed_progress
from spmdtrain.data.text import SentencePieceTokenizer, load_tokenizer
from spmdtrain.distributed import process_group
from spmdtrain.document.terminal import Terminal
from spmdtrain.errors import UserError, did_you_mean, import_extra, printable
from spmdtrain.models.generation import (
    Decoder,
    GenerationOptions,
    placement_of_values,
    stream,
)
from spmdtrain.sharding.placement import constrain_sharding, use_placement

# -- Log-likelihoods of continuations --------------------------------------------------------------

PyTree = Any
Pair = tuple[Sequence[int], Sequence[int]]
"""The tokens of a context, at least one, and of its continuation, at least one."""

_SHORTEST = 32  # the smallest padded length of a text


class Likelihood(NamedTuple):
    """The log-likelihood of a continuation.

    Attributes:
      log_prob: The log-probability of all its tokens after the context, in nats.
      is_greedy: Whether each of its tokens is the most probable one, or one of several such.
    """

    log_prob: float
    is_greedy: bool


def continuation_likelihoods(
    model: Decoder,
    pairs: Sequence[Pair],
    *,
    max_length: int | None = None,
    batch_size: int = 16,
    quiet: bool = False,
) -> list[Likelihood]:
    """Returns the log-likelihood of each continuation after its context.

    Texts of similar length are computed together, divided over the axes of the mesh that split a
    batch. They are padded to `batch_size` rows, and to lengths that are powers of two from 32 on or
    `max_length`: so at most 2 + log2(`max_length` / 32) programs are compiled.

    Args:
      model: A `Transformer` or `Llama`, such as `trainer.model`; its arrays may be sharded over a
        mesh. With several processes, all call this with the same arguments.
      pairs: The tokens of contexts and continuations. A context is cut from the left if the text
        is longer than `max_length` + 1.
      max_length: The most tokens from which one is predicted; by default the model's context.
      batch_size: Number of texts that are computed together; it is rounded up to a multiple of the
        devices that split a batch.
      quiet: Whether to show no progress bar, which otherwise appears after three seconds.

    Raises:
      UserError: If the model is of another kind, or a pair or an option does not fit it.
    """
    length = _checked_length(model, max_length, batch_size)
    texts = [_text(index, pair, length) for index, pair in enumerate(pairs)]
    lengths = [len(context) + len(continuation) for context, continuation in pairs]
    if cut := sum(count > len(text) for count, text in zip(lengths, texts, strict=True)):
        Terminal(quiet=quiet or not process_group.is_chief()).warning(
            f"{cut} of {len(texts)} texts have more than {length + 1} tokens: their contexts are "
            "cut from the left"
        )
    buckets: dict[int, list[int]] = {}
    # The longest texts come first: a lack of memory shows at once, and the bar is not too hopeful.
    for index in sorted(range(len(texts)), key=lambda index: -len(texts[index])):
        buckets.setdefault(_padded(len(texts[index]) - 1, length), []).append(index)

    graph, values = nnx.split(model)
    placement = placement_of_values(nnx.state(model, nnx.Param))
    rows = -(-batch_size // placement.batch_shards) * placement.batch_shards
    found: dict[int, Likelihood] = {}
    with _progress("computing log-likelihoods", len(pairs), quiet=quiet) as advance:
        for padded, indices in buckets.items():
            for first in range(0, len(indices), rows):
                batch = indices[first : first + rows]
                tokens = np.zeros((rows, padded + 1), np.int32)
                for row, index in enumerate(batch):
                    tokens[row, : len(texts[index])] = texts[index]
                with use_placement(placement):
                    losses, correct = map(np.asarray, _losses(graph, values, tokens))
                for row, index in enumerate(batch):
                    end = len(texts[index]) - 1
                    span = slice(end - len(pairs[index][1]), end)
                    log_prob = -float(losses[row, span].sum(dtype=np.float64))
                    found[index] = Likelihood(log_prob, bool(correct[row, span].all()))
                advance(len(found))
    return [found[index] for index in range(len(pairs))]


@functools.partial(jax.jit, static_argnums=0)
def _losses(graph: Any, values: PyTree, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the losses of tokens 1, 2, ... of each row, and whether each is the most probable."""
    model: Any = nnx.merge(graph, values)
    model.eval()
    tokens = constrain_sharding(tokens, "batch", None)
    found = model.token_losses(tokens[:, :-1], tokens[:, 1:])
    # Every process reads all of them.
    return constrain_sharding(found.loss, None, None), constrain_sharding(found.correct, None, None)


def _checked_length(model: Any, max_length: int | None, batch_size: int) -> int:
    """Returns the most tokens from which one is predicted; checks the arguments of evaluations."""
    if not (isinstance(model, Decoder) and hasattr(model, "token_losses")):
        raise UserError(
            f"a {type(model).__name__} cannot be evaluated: it needs the methods of a Decoder and "
            "token_losses, as Transformer and Llama have them. Give trainer.model, or what "
            "load_model returns"
        )
    context: int = model.config.context
    for name, value in {"max_length": max_length, "batch_size": batch_size}.items():
        if value is None and name == "max_length":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"{name} is {value!r}: it must be 1 or more, an integer")
    if max_length is not None and max_length > context:
        raise UserError(f"max_length is {max_length}: the model's context is {context}")
    return max_length or context


def _text(index: int, pair: Pair, length: int) -> list[int]:
    """Returns the tokens of a context and its continuation, at most `length` + 1 of them."""
    context, continuation = pair
    if not len(context) or not len(continuation):
        which = "continuation" if len(context) else "context"
        raise UserError(f"request {index}: the {which} has no tokens")
    if len(continuation) > length:
        raise UserError(
            f"request {index}: the continuation has {len(continuation)} tokens, and the model sees "
            f"{length}"
        )
    return [*context, *continuation][-(length + 1) :]


def _padded(count: int, length: int) -> int:
    """Returns the smallest padded length for a number of tokens."""
    return min(length, max(_SHORTEST, 1 << (count - 1).bit_length()))


@contextmanager
def _progress(what: str, total: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar once the work takes long; yields a function of the amount done."""
    if quiet:
        yield lambda done: None
        return
    with delayed_progress(what, total) as advance:
        yield advance


# -- Tokenizers, and the options of generation, as lm-eval names them ------------------------------


class _Texts:
    """A tokenizer, and the tokens at the beginning and the end of texts.

    Raises:
      UserError: If the tokenizer cannot be loaded, or does not fit the vocabulary.
    """

    def __init__(
        self,
        tokenizer: str | os.PathLike[str],
        vocabulary: int,
        end: str | int,
        begin: str | int | None,
    ) -> None:
        self.tokenizer, self._vocabulary = load_tokenizer(tokenizer), vocabulary
        if self.tokenizer.vocabulary_size > vocabulary:
            raise UserError(
                f"the tokenizer has {self.tokenizer.vocabulary_size} tokens, and the model "
                f"{vocabulary}: give the tokenizer with which it was trained"
            )
        self.end = self._token("end_of_text", end)
        self.begin = None if begin is None else self._token("begin_of_text", begin)

    def _token(self, name: str, given: str | int) -> int:
        token = self.tokenizer.token(given) if isinstance(given, str) else given
        if isinstance(token, bool) or not isinstance(token, int | np.integer | None):
            raise UserError(f"{name} is {given!r}: give the name or the number of a token")
        if token is None or not 0 <= token < self._vocabulary:
            raise UserError(
                f"{name} is {printable(str(given))!r}, which is no token: give the name of one, or "
                f"a number from 0 to {self._vocabulary - 1}"
            )
        return int(token)

    def encode(self, text: str, *, begin: bool = True) -> list[int]:
        """Returns the tokens of a text, with `begin` after the token that begins texts, if any."""
        tokens: list[int] = self.tokenizer.encode([text])[0].tolist()
        if self.begin is None or not begin or tokens[:1] == [self.begin]:
            return tokens
        return [self.begin, *tokens]

    def written(self, tokens: Sequence[int], until: Sequence[str]) -> str:
        """Returns the text of generated tokens, up to the end and any of some strings."""
        tokens = [int(token) for token in tokens]
        decoded = self.tokenizer.decode(tokens[:-1] if tokens[-1] == self.end else tokens)
        text: str = _library("models.utils").postprocess_generated_text(decoded, [*until], None)
        return text

    def has_any(self, until: Sequence[str], tokens: np.ndarray) -> bool:
        """Returns whether the text of generated tokens contains one of some strings."""
        text = self.tokenizer.decode(tokens.tolist())
        return any(stop in text for stop in until)


_NEW_TOKENS = 256  # what lm-eval's own models write if a task does not say how much
_OPTIONS = ("until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p")
_ALIASES = ("max_new_tokens", "max_tokens", "max_completion_tokens")  # of max_gen_toks


class _Generation(NamedTuple):
    """The options of a task for generated texts: strings that end them, and options of a model."""

    until: tuple[str, ...]
    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float

    @classmethod
    def from_task(cls, given: Mapping[str, Any], length: int) -> "_Generation":
        """Returns the options of a task for a model that sees `length` tokens.

        Raises:
          UserError: If one is not supported.
        """
        options = {**given}
        if options.get("num_beams") == 1:  # no beams
            del options["num_beams"]
        for name in sorted(options.keys() - {*_OPTIONS, *_ALIASES}):
            raise UserError(
                f"the task has {name}={options[name]!r} in generation_kwargs, which is not "
                f"supported: {', '.join(_OPTIONS)} are.{did_you_mean(name, _OPTIONS)}"
            )
        if options.get("do_sample"):
            options.setdefault("temperature", 1.0)
        options = _library("models.utils").normalize_gen_kwargs(options, _NEW_TOKENS)
        until = tuple(stop for stop in options["until"] if stop)
        if not all(isinstance(stop, str) for stop in until):
            raise UserError(f"the task has until={[*until]} in generation_kwargs: give texts")
        count, top_k = options["max_gen_toks"], options.get("top_k")
        if count >= length:
            raise UserError(
                f"max_gen_toks is {count}: it must be below the number of tokens that the model "
                f"sees, {length}. Give simple_evaluate(gen_kwargs={{'max_gen_toks': ...}})"
            )
        temperature = options["temperature"] if options["do_sample"] else 0.0
        top_k = None if top_k in (0, -1) else top_k  # these mean all tokens to other models
        return cls(until, count, temperature, top_k, options.get("top_p", 1.0))


def _library(module: str) -> Any:
    return import_extra(f"lm_eval.{module}", "lm-eval", "tasks of lm-eval")


# -- The model of lm-eval --------------------------------------------------------------------------


def lm_eval_model(
    model: Decoder,
    tokenizer: str | os.PathLike[str],
    *,
    end_of_text: str | int,
    begin_of_text: str | int | None = None,
    template: str | os.PathLike[str] | None = None,
    max_length: int | None = None,
    batch_size: int = 16,
    seed: int = 0,
    quiet: bool = False,
) -> Any:
    """Returns a model for `lm_eval.simple_evaluate(model=..., tasks=[...])`.

    The numbers are those of lm-eval's own models: contexts are cut from the left, a text without a
    context follows `begin_of_text` or `end_of_text`, and texts are generated greedily unless a task
    sets `do_sample` or a temperature. Tasks set `until`, `max_gen_toks` (256 by default),
    `do_sample`, `temperature`, `top_k` and `top_p`; any other option of generation is refused.

    With several processes, all of them evaluate the same tasks, and each gets the results.

    Args:
      model: A `Transformer` or `Llama`, such as `trainer.model`; its arrays may be sharded over a
        mesh.
      tokenizer: "bytes", a file of Hugging Face's tokenizers (`.json`), or a SentencePiece model
        (`.model`), as `Tokenized` takes it. Nothing is downloaded.
      end_of_text: The token that ends a generated text: its name, such as `<|endoftext|>`, or its
        number. Texts without a context follow it.
      begin_of_text: The token before each context, and before texts without one, for models such
        as Llama that were trained with it. By default there is none.
      template: The chat template for `apply_chat_template=True`, as `Chat` takes it: its text, its
        file, or by default a file beside the tokenizer's.
      max_length: The most tokens that the model sees; by default its context.
      batch_size: Number of texts that are computed together: see `continuation_likelihoods`.
      seed: The draws of tasks that set `do_sample` or a temperature depend on it.
      quiet: Whether to show no progress.

    Returns:
      An `lm_eval.api.model.LM`.

    Raises:
      UserError: If lm_eval is not installed, the model is of another kind, or an argument does not
        fit it.
    """
    length = _checked_length(model, max_length, batch_size)
    texts = _Texts(tokenizer, model.config.vocabulary, end_of_text, begin_of_text)
    GenerationOptions(max_new_tokens=1, seed=seed)  # checks it
    return _lm_class()(
        model,
        texts,
        (template, os.fspath(tokenizer)),
        max_length=length,
        batch_size=batch_size,
        seed=seed,
        quiet=quiet,
    )


@functools.cache
def _lm_class() -> Any:
    """Returns the class of the models, which inherits from one of lm-eval."""
    base, windows = _library("api.model").TemplateLM, _library("utils")

    class LanguageModel(base):  # type: ignore[misc, valid-type]
        """A decoder with its tokenizer. In every process it gets all requests."""

        def __init__(
            self,
            model: Decoder,
            texts: _Texts,
            template: tuple[str | os.PathLike[str] | None, str],
            *,
            max_length: int,
            batch_size: int,
            seed: int,
            quiet: bool,
        ) -> None:
            super().__init__()
            self._model, self._texts, self._template = model, texts, template
            self.max_length, self.batch_size = max_length, batch_size
            self._seed, self._quiet = seed, quiet

        @property
        def eot_token_id(self) -> int:
            return self._texts.end

        @property
        def prefix_token_id(self) -> int:
            return self._texts.end if self._texts.begin is None else self._texts.begin

        @property
        def tokenizer_name(self) -> str:
            return f"{self._texts.tokenizer.fingerprint}-{self._chat.text}"

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **_: Any
        ) -> list[int]:
            return self._texts.encode(string, begin=add_special_tokens is not False)

        @functools.cached_property
        def _chat(self) -> ChatTemplate:
            if isinstance(self._texts.tokenizer, SentencePieceTokenizer):
                raise UserError(
                    "apply_chat_template: a SentencePiece model reads the special tokens of a "
                    "template, such as <s>, as text. Give the tokenizer.json of the same model"
                )
            return load_template(*self._template, {})

        def chat_template(self, chat_template: bool | str = False) -> str:
            return self._chat.text if chat_template else ""

        def apply_chat_template(
            self, chat_history: Messages, add_generation_prompt: bool = True
        ) -> str:
            text = self._chat.render(chat_history, prompt=add_generation_prompt)
            if add_generation_prompt:
                return text
            # The last message is the beginning of an answer, which the model continues.
            before, content, _ = text.rpartition(str(chat_history[-1]["content"]).strip())
            return before + content

        def set_cache_hook(self, cache_hook: Any) -> None:
            if cache_hook.dbdict is not None and process_group.count() > 1:
                raise UserError(
                    f"use_cache: {process_group.count()} processes would write to one file. Leave "
                    "it out, or evaluate in one process"
                )
            super().set_cache_hook(cache_hook)

        def loglikelihood(
            self, requests: list[Any], disable_tqdm: bool = False
        ) -> list[Likelihood]:
            _agree(requests)
            for index, request in enumerate(requests):
                if not request.args[1]:
                    raise UserError(f"request {index}: the continuation is an empty text")
            hidden = disable_tqdm or self._quiet or not process_group.is_chief()
            # Encodes the texts, and calls the next function.
            found: list[Likelihood] = super().loglikelihood(requests, disable_tqdm=hidden)
            return found

        def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[Likelihood]:
            first = [self.prefix_token_id]  # of a context that is nothing but spaces
            pairs = [(context or first, continuation) for _, context, continuation in requests]
            found = self._likelihoods(pairs)
            for (texts, *_), likelihood in zip(requests, found, strict=True):
                self.cache_hook.add_partial("loglikelihood", texts, likelihood)
            return found

        def _likelihoods(self, pairs: Sequence[Pair]) -> list[Likelihood]:
            return continuation_likelihoods(
                self._model,
                pairs,
                max_length=self.max_length,
                batch_size=self.batch_size,
                quiet=self._quiet,
            )

        def loglikelihood_rolling(self, requests: list[Any], **_: Any) -> list[float]:
            _agree(requests)
            pairs, owners = [], []
            for owner, request in enumerate(requests):
                for window in windows.get_rolling_token_windows(
                    token_list=self._texts.encode(request.args[0], begin=False),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                ):
                    pairs.append(windows.make_disjoint_window(window))
                    owners.append(owner)
            sums = [0.0] * len(requests)
            for owner, likelihood in zip(owners, self._likelihoods(pairs), strict=True):
                sums[owner] += likelihood.log_prob
            for request, total in zip(requests, sums, strict=True):
                self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
            return sums

        def generate_until(self, requests: list[Any], **_: Any) -> list[str]:
            _agree(requests)
            groups: dict[_Generation, list[int]] = {}
            for index, request in enumerate(requests):
                generation = _Generation.from_task(request.args[1], self.max_length)
                groups.setdefault(generation, []).append(index)
            found: dict[int, str] = {}
            with _progress("generating texts", len(requests), quiet=self._quiet) as advance:
                for generation, indices in groups.items():
                    prompts = [
                        self._prompt(requests[index].args[0], generation) for index in indices
                    ]
                    for position, text in self._texts_of(prompts, generation):
                        index = indices[position]
                        found[index] = text
                        self.cache_hook.add_partial("generate_until", requests[index].args, text)
                        advance(len(found))
            return [found[index] for index in range(len(requests))]

        def _prompt(self, context: str, generation: _Generation) -> list[int]:
            """Returns the tokens of a context, cut from the left so that the new ones fit."""
            tokens = self._texts.encode(context) or [self.prefix_token_id]
            return tokens[-(self.max_length - generation.max_new_tokens) :]

        def _texts_of(
            self, prompts: Sequence[Sequence[int]], generation: _Generation
        ) -> Iterator[tuple[int, str]]:
            """Yields the index of each prompt and the text that follows it, as they are made."""
            order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
            options = GenerationOptions(
                max_new_tokens=generation.max_new_tokens,
                temperature=generation.temperature,
                top_k=generation.top_k,
                top_p=generation.top_p,
                stop_tokens=(self._texts.end,),
                stop_when=functools.partial(self._texts.has_any, generation.until),
                batch_size=self.batch_size,
                seed=self._seed,
            )
            written: dict[int, list[int]] = {}
            for piece in stream(self._model, [prompts[index] for index in order], options):
                tokens = written.setdefault(piece.row, [])
                tokens.extend(piece.tokens.tolist())
                if piece.finished:
                    yield order[piece.row], self._texts.written(tokens, generation.until)

    return LanguageModel


def _agree(requests: Sequence[Any]) -> None:
    """Checks that all processes got the same requests."""
    digest = hashlib.sha256(repr([request.args for request in requests]).encode())
    process_group.agree("requests of lm-eval", digest.hexdigest())

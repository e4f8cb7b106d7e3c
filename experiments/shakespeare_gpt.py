"""A decoder-only transformer on tinyshakespeare: prediction of the next character.

Expected: a validation loss of about 1.61 nats a character, after 7 minutes and a half on two CPU
cores (with --steps 2000 about 1.58, after 9 minutes and a half).

    python -m spmdtrain.run --config experiments/shakespeare_gpt.py --data-dir FOLDER

FOLDER holds input.txt, 1,115,394 characters, from
https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt.
The first 90 % are for training; the last 10 % for validation, which predicts each character once.
The loss is in nats a character. `--mode predict` generates text after each `--prompt`. The presets
from gpt2-small to 1.3b have the shapes of larger models, for larger machines.
"""

import codecs
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from etils import epath

from spmdtrain import Experiment, RunConfig, UserError
from spmdtrain.models import (
    TRANSFORMER_RULES,
    GenerationOptions,
    Transformer,
    TransformerConfig,
    in_order,
    stream,
)

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
_ROUND = 64  # rows of the embedding are a multiple of it, so that they divide over devices

Batch = dict[str, jax.Array]


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    steps: int | None = 1500
    global_batch_size: int | None = 16
    learning_rate: float | None = 3e-3
    eval_every_steps: int | None = 500
    vocabulary: Literal["characters", "bytes"] = "characters"
    """The tokens: characters of the text, or bytes."""
    vocabulary_rows: int | None = None
    """Rows of the embedding; by default the vocabulary's size, rounded up to a multiple of 64."""
    layers: int = 4
    """Blocks of attention and MLP."""
    width: int = 160
    """Width of the residual stream."""
    heads: int = 4
    """Attention heads, which share the width."""
    mlp_width: int | None = None
    """Width inside each MLP; by default four times the width."""
    length: int = 96
    """Tokens of an example, and the most tokens that a prediction depends on."""
    positions: Literal["rotary", "learned"] = "rotary"
    """Position embedding: rotated queries and keys, or a learned vector for each position."""
    tied: bool = True
    """Use the embedding as the output layer."""
    dropout: float = 0.0
    """Fraction of the values dropped in training."""
    unroll: bool | None = None
    """Compile every layer separately: faster steps, longer compilation; by default up to 12."""
    logits_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the logits in memory. bfloat16 is faster on GPUs, and rounds each logit."""
    warmup_steps: int = 100
    """Steps in which the learning rate rises, at most a tenth of the run; a cosine follows."""
    final_learning_rate: float = 0.05
    """The final value of the cosine, as a fraction of learning_rate."""
    weight_decay: float = 0.1
    """AdamW's weight decay, for all parameters but the norms' scales."""
    beta2: float = 0.99
    """AdamW's decay of the average of squared gradients."""
    clip_norm: float = 1.0
    """The norm to which larger gradients are scaled down."""
    prompt: tuple[str, ...] = ("\n",)
    """The texts that predict continues."""
    samples: int = 4
    """Number of texts that predict generates for each prompt."""
    sample_length: int = 300
    """Tokens that predict generates for each text."""
    temperature: float = 0.8
    """Divides the logits before predict samples; 0 takes the most probable token."""
    top_k: int | None = None
    """Predict samples from this many of the most probable tokens; by default from all."""
    top_p: float = 1.0
    """Predict samples from the fewest most probable tokens of at least this probability."""
    stop: str = ""
    """Characters, each of which ends a text of predict."""


_GPT2 = Config(
    steps=5000,
    global_batch_size=32,
    learning_rate=6e-4,
    eval_every_steps=500,
    vocabulary_rows=50304,  # GPT-2's 50,257 rounded up; the text has only 65 characters
    layers=12,
    width=768,
    heads=12,
    length=1024,
    positions="learned",
    warmup_steps=500,
    final_learning_rate=0.1,
    beta2=0.95,
    compute_dtype="bfloat16",
    # A TPU v5e of 16 GB has room for the activations of 8 examples a chip. With 32 on one chip, or
    # on smaller devices: --remat attention.
)

PRESETS = {
    "tiny": Config(
        steps=60,
        learning_rate=1e-2,
        eval_every_steps=60,
        layers=2,
        width=64,
        length=32,
        warmup_steps=6,
        sample_length=40,
    ),
    "gpt2-small": _GPT2,
    "gpt2-medium": replace(
        _GPT2, learning_rate=3e-4, layers=24, width=1024, heads=16, remat="attention"
    ),
    "1.3b": replace(
        _GPT2,
        learning_rate=2e-4,
        layers=24,
        width=2048,
        heads=16,
        length=2048,
        positions="rotary",
        remat="attention",
        global_batch_size=None,
        batch_size_per_device=4,  # fits a TPU v5e of 16 GB if the state is sharded over 16 of them
    ),
}


# -- text ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Vocabulary:
    """A mapping between text and tokens."""

    codes: np.ndarray | None
    """The characters' code points, ascending; None if tokens are bytes."""

    def __len__(self) -> int:
        return 256 if self.codes is None else len(self.codes)

    def encode(self, text: str, option: str) -> np.ndarray:
        """Returns the tokens of an option's text, int32; raises `UserError` for others."""
        if self.codes is None:
            return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8).astype(np.int32)
        codes = _code_points(text)
        if unknown := sorted({chr(c) for c in np.setdiff1d(codes, self.codes)}):
            raise UserError(
                f"{option}: the training text has no {', '.join(map(repr, unknown))}, so the "
                "vocabulary lacks it (--vocabulary bytes has every character)"
            )
        return np.searchsorted(self.codes, codes).astype(np.int32)

    def decoder(self) -> Callable[..., str]:
        """Returns a function of tokens and `final` that returns the text of a piece of a text.

        Bytes that are not UTF-8 become U+FFFD. A character whose bytes are not complete follows
        with the next piece, unless this one is the final one.
        """
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")

        def decode(tokens: np.ndarray, final: bool = False) -> str:
            if self.codes is None:
                return utf8.decode(tokens.astype(np.uint8).tobytes(), final)
            return "".join(map(chr, self.codes[tokens]))

        return decode


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def load_text(config: Config) -> tuple[Vocabulary, np.ndarray]:
    """Returns the vocabulary, and input.txt as tokens."""
    if config.data_dir is None:
        raise UserError(f"shakespeare_gpt needs --data-dir, the folder that holds input.txt: {URL}")
    path = epath.Path(config.data_dir).expanduser() / "input.txt"
    if not path.is_file():
        raise UserError(f"{config.data_dir}: holds no input.txt, which {URL} offers")
    content = path.read_bytes()
    if config.vocabulary == "bytes":
        return Vocabulary(None), np.frombuffer(content, np.uint8).astype(np.int32)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 ({error}); --vocabulary bytes accepts it") from error
    vocabulary = Vocabulary(np.unique(_code_points(text)))
    return vocabulary, vocabulary.encode(text, "input.txt")


class Windows:
    """Windows of `context` + 1 tokens of a text, `stride` apart, as examples.

    The last one is padded with token 0, which has weight 0.
    """

    def __init__(self, text: np.ndarray, context: int, stride: int) -> None:
        self._text, self._context, self._stride = text, context, stride

    def __len__(self) -> int:
        return 1 + max(0, -(-(len(self._text) - 1 - self._context) // self._stride))

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        positions = indices[:, None] * self._stride + np.arange(self._context + 1)
        inside = positions < len(self._text)
        tokens = self._text[np.minimum(positions, len(self._text) - 1)]
        return {
            "tokens": np.where(inside, tokens, 0).astype(np.int32),
            "weights": inside[:, 1:].astype(np.float32),
        }


def split(text: np.ndarray, context: int) -> tuple[Windows, Windows]:
    """Returns training windows from every position, and adjacent validation windows."""
    train, validation = np.split(text, [len(text) * 9 // 10])
    if len(train) <= context or len(validation) < 2:
        raise UserError(
            f"input.txt has {len(text)} tokens: too few for a context of {context} in the 90 % "
            "that train, and for something to predict in the rest"
        )
    return Windows(train, context, stride=1), Windows(validation, context, stride=context)


# -- training --------------------------------------------------------------------------------------


def objective(model: Any, batch: Batch) -> dict[str, tuple[jax.Array, jax.Array]]:
    inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    losses, weights = model.token_losses(inputs, targets), batch["weights"]
    return {"loss": (losses.loss, weights), "accuracy": (losses.correct, weights)}


def predict(model: Any, batch: Batch) -> dict[str, jax.Array]:
    """Returns the loss of each token in nats, (B, length)."""
    return {"loss": objective(model, batch)["loss"][0]}


def check_ranges(config: Config) -> None:
    """Checks options that the optimizer or the model would accept although they make no sense."""
    for name, least, below in (
        ("warmup_steps", 0, math.inf),
        ("final_learning_rate", 0, math.inf),
        ("weight_decay", 0, math.inf),
        ("beta2", 0, 1),
        ("clip_norm", 1e-12, math.inf),
        ("mlp_width", 1, math.inf),
        ("vocabulary_rows", 1, math.inf),
    ):
        value = getattr(config, name)
        if value is not None and not least <= value < below:
            bound = "" if below == math.inf else f", and below {below}"
            raise UserError(f"{name} is {value}: it must be at least {least}{bound}")


def make_optimizer(config: Config, total_steps: int) -> optax.GradientTransformation:
    """Returns AdamW with gradient clipping, and a learning rate with warm-up and cosine decay."""
    assert config.learning_rate is not None
    peak, end = config.learning_rate, config.final_learning_rate
    warmup = min(config.warmup_steps, total_steps // 10)

    def learning_rate(step: jax.Array) -> jax.Array:
        done = jnp.clip((step - warmup) / max(1, total_steps - warmup), 0, 1)
        cosine = end + (1 - end) * (1 + jnp.cos(math.pi * done)) / 2
        return peak * jnp.minimum((step + 1) / (warmup + 1), cosine)

    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate, b2=config.beta2, weight_decay=config.weight_decay, mask=_is_decayed
        ),
    )


def _is_decayed(params: Any) -> Any:
    """Selects all but the norms' scales, by name: with stacked layers these are matrices, too."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: jax.tree_util.keystr(path[-1:], simple=True) != "norm", params
    )


def shape(config: Config, vocabulary: int) -> TransformerConfig:
    """Returns the model's shape for a vocabulary of this size."""
    return TransformerConfig(
        vocabulary=vocabulary,
        rows=config.vocabulary_rows or -(-vocabulary // _ROUND) * _ROUND,
        layers=config.layers,
        width=config.width,
        heads=config.heads,
        hidden=config.mlp_width or 4 * config.width,
        context=config.length,
        positions=config.positions,
        dropout=config.dropout,
        tied=config.tied,
        unroll=config.unroll,
        logits_dtype=config.logits_dtype,
    )


# -- generation ------------------------------------------------------------------------------------


def prompts(config: Config, vocabulary: Vocabulary) -> list[np.ndarray]:
    """Returns the tokens of each prompt, as many times as `samples`."""
    for name in ("samples", "sample_length"):
        if getattr(config, name) < 1:
            raise UserError(f"{name} is {getattr(config, name)}: it must be 1 or more")
    if not config.prompt or "" in config.prompt:
        raise UserError("prompt is empty: give at least one character")
    texts = [vocabulary.encode(text, "prompt") for text in config.prompt]
    return [text for text in texts for _ in range(config.samples)]


def writer(
    config: Config, vocabulary: Vocabulary
) -> Callable[[Any, Callable[[str], None]], dict[str, np.ndarray]]:
    """Returns a function (model, write) that continues the prompts.

    It prints each text while it grows, and returns the tokens of all texts with their lengths.
    """
    starts = prompts(config, vocabulary)
    options = GenerationOptions(
        max_new_tokens=config.sample_length,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        stop_tokens=tuple(vocabulary.encode(config.stop, "stop").tolist()),
        seed=config.seed,
        batch_size=config.eval_batch_size or config.global_batch_size,
        dtype=config.compute_dtype,
    )

    def generate(model: Any, write: Callable[[str], None]) -> dict[str, np.ndarray]:
        texts = [[start] for start in starts]
        for row, tokens, finished, _ in in_order(stream(model, starts, options)):
            if len(texts[row]) == 1:
                decode = vocabulary.decoder()
                write(f"--- {row}\n{decode(starts[row])}")
            texts[row].append(tokens)
            write(decode(tokens, final=finished) + "\n" * finished)
        whole = [np.concatenate(parts) for parts in texts]
        length = np.array([len(text) for text in whole], np.int32)
        padded = [np.pad(text, (0, length.max() - len(text))) for text in whole]
        return {"tokens": np.array(padded), "length": length}

    return generate


def build(config: Config) -> Experiment:
    check_ranges(config)
    vocabulary, text = load_text(config)
    train, validation = split(text, config.length)
    return Experiment(
        model=partial(Transformer, shape(config, len(vocabulary))),
        objective=objective,
        optimizer=make_optimizer(config, config.total_steps(len(train))),
        train=train,
        validation=validation,
        predict=predict,
        rules=TRANSFORMER_RULES,
        generate=writer(config, vocabulary),
    )

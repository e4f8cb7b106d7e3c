"""A decoder-only transformer on tinyshakespeare: the next character, from those before it.

Expected: a validation loss of about 1.61 nats a character, after 7 minutes and a half on two CPU
cores (with --steps 2000 about 1.58, after 9 minutes and a half).

    python -m spmdtrain.run --config experiments/shakespeare_gpt.py --data-dir FOLDER

FOLDER holds input.txt, 1,115,394 characters, which
https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt offers.
Its first 90 % train; the last 10 % validate, each of their characters predicted once. The loss is
in nats a character. `--mode predict` then writes on from `--prompt`. The presets from gpt2-small
to 1.3b have the shapes of larger models, for larger machines.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from etils import epath

from spmdtrain import ArrayDataset, Experiment, RunConfig, UserError
from spmdtrain.models import TRANSFORMER_RULES, Transformer, TransformerConfig

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
_ROUND = 64  # rows of the embedding are a multiple of it, and so divide over devices

Batch = dict[str, jax.Array]


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    steps: int | None = 1500
    global_batch_size: int | None = 16
    learning_rate: float | None = 3e-3
    eval_every_steps: int | None = 500
    vocabulary: Literal["characters", "bytes"] = "characters"
    """What a token is: one of the text's own characters, or a byte."""
    vocabulary_rows: int | None = None
    """Rows of the embedding; where nothing is said, the vocabulary's rounded up to 64."""
    layers: int = 4
    """Blocks of attention and MLP."""
    width: int = 160
    """Values that each token has between the blocks."""
    heads: int = 4
    """Heads of each attention, among which the width is divided."""
    mlp_width: int | None = None
    """Width inside each MLP; where nothing is said, four times the width."""
    context: int = 96
    """Tokens that an example has, and that a prediction sees at most."""
    positions: Literal["rotary", "learned"] = "rotary"
    """How a token's place is told: queries and keys turned by it, or a vector learned for each."""
    tied: bool = True
    """Use the embedding for the logits too."""
    dropout: float = 0.0
    """Fraction of the values dropped in training."""
    unroll: bool = True
    """Compile every layer by itself: faster steps on a CPU, longer compilation."""
    warmup_steps: int = 100
    """Steps in which the learning rate rises, at most a tenth of the run; then comes a cosine."""
    final_learning_rate: float = 0.05
    """Where the cosine ends, as a fraction of learning_rate."""
    weight_decay: float = 0.1
    """AdamW's decay, of all parameters but the norms' scales."""
    beta2: float = 0.99
    """AdamW's decay of the squared gradients' average."""
    clip_norm: float = 1.0
    """Gradients whose norm is above it are scaled down to it."""
    prompt: str = "\n"
    """What predict goes on from."""
    samples: int = 4
    """Texts that predict writes."""
    sample_length: int = 300
    """Tokens that predict adds."""
    temperature: float = 0.8
    """Logits are divided by it before predict draws from them; 0 takes the likeliest token."""


_GPT2 = Config(
    steps=5000,
    global_batch_size=32,
    learning_rate=6e-4,
    eval_every_steps=500,
    vocabulary_rows=50304,  # GPT-2's 50,257 rounded up, though a text of Shakespeare has but 65
    layers=12,
    width=768,
    heads=12,
    context=1024,
    positions="learned",
    unroll=False,
    warmup_steps=500,
    final_learning_rate=0.1,
    beta2=0.95,
    compute_dtype="bfloat16",
    remat="full",
)

PRESETS = {
    "tiny": Config(
        steps=60,
        learning_rate=1e-2,
        eval_every_steps=60,
        layers=2,
        width=64,
        context=32,
        warmup_steps=6,
        sample_length=40,
    ),
    "gpt2-small": _GPT2,
    "gpt2-medium": replace(_GPT2, learning_rate=3e-4, layers=24, width=1024, heads=16),
    "1.3b": replace(
        _GPT2,
        learning_rate=2e-4,
        layers=24,
        width=2048,
        heads=16,
        context=2048,
        positions="rotary",
    ),
}


# -- text ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Vocabulary:
    """Text to tokens and back."""

    codes: np.ndarray | None
    """The characters' code points, ascending; None where tokens are bytes."""

    def __len__(self) -> int:
        return 256 if self.codes is None else len(self.codes)

    def encode(self, text: str) -> np.ndarray:
        """Tokens, int32. Raises `UserError` for characters that the vocabulary lacks."""
        if self.codes is None:
            return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8).astype(np.int32)
        codes = _code_points(text)
        if unknown := sorted({chr(c) for c in np.setdiff1d(codes, self.codes)}):
            raise UserError(
                f"prompt: the text that was trained on has no {', '.join(map(repr, unknown))}, so "
                "the vocabulary lacks it (--vocabulary bytes has everything)"
            )
        return np.searchsorted(self.codes, codes).astype(np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        """Text; bytes that are no UTF-8 become U+FFFD."""
        if self.codes is None:
            return tokens.astype(np.uint8).tobytes().decode("utf-8", "replace")
        return "".join(map(chr, self.codes[tokens]))


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def load_text(config: Config) -> tuple[Vocabulary, np.ndarray]:
    """The vocabulary, and all of input.txt as tokens."""
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
        raise UserError(f"{path} is no UTF-8 ({error}); --vocabulary bytes takes it") from error
    vocabulary = Vocabulary(np.unique(_code_points(text)))
    return vocabulary, vocabulary.encode(text)


class Windows:
    """A text as examples of `context` + 1 tokens, `stride` apart: each is to predict the next.

    What goes beyond the text's end in the last one is filled with token 0, and has weight 0.
    """

    def __init__(self, text: np.ndarray, context: int, stride: int) -> None:
        self._text, self._context, self._stride = text, context, stride

    def __len__(self) -> int:
        return 1 + max(0, -(-(len(self._text) - 1 - self._context) // self._stride))

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        places = indices[:, None] * self._stride + np.arange(self._context + 1)
        inside = places < len(self._text)
        tokens = self._text[np.minimum(places, len(self._text) - 1)]
        return {
            "tokens": np.where(inside, tokens, 0).astype(np.int32),
            "weights": inside[:, 1:].astype(np.float32),
        }


def split(text: np.ndarray, context: int) -> tuple[Windows, Windows]:
    """Training examples from every place, and validation ones side by side."""
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
    logits = model(inputs)
    # A sum, not a look-up: it stays on the devices among which the vocabulary is split.
    right = jnp.arange(logits.shape[-1]) == targets[..., None]
    chosen = jnp.where(right, logits, 0).sum(-1)
    loss = jax.nn.logsumexp(logits, axis=-1) - chosen
    weights = batch["weights"]
    return {"loss": (loss, weights), "accuracy": (chosen >= logits.max(-1), weights)}


def check_ranges(config: Config) -> None:
    """Raise `UserError` for what an optimizer or a model would take and make nonsense of."""
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
    """AdamW with clipping, a warm-up and a cosine."""
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
    """All but the norms' scales; by name, as these are matrices too where layers are stacked."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: jax.tree_util.keystr(path[-1:], simple=True) != "norm", params
    )


def shape(config: Config, vocabulary: int) -> TransformerConfig:
    """The model's shape for a vocabulary of that many tokens."""
    return TransformerConfig(
        vocabulary=vocabulary,
        rows=config.vocabulary_rows or -(-vocabulary // _ROUND) * _ROUND,
        layers=config.layers,
        width=config.width,
        heads=config.heads,
        hidden=config.mlp_width or 4 * config.width,
        context=config.context,
        positions=config.positions,
        dropout=config.dropout,
        tied=config.tied,
        unroll=config.unroll,
    )


# -- writing on ------------------------------------------------------------------------------------


def prompts(config: Config, vocabulary: Vocabulary) -> ArrayDataset:
    """The prompt once for each sample, with the number by which they differ."""
    tokens = vocabulary.encode(config.prompt)
    if not len(tokens):
        raise UserError("prompt is empty: there must be something to go on from")
    rows = max(1, config.samples)
    return ArrayDataset(
        {
            "tokens": np.tile(tokens, (rows, 1)),
            "length": np.full(rows, len(tokens), np.int32),
            "sample": np.arange(rows, dtype=np.int32),
        }
    )


def writer(config: Config) -> Callable[[Any, Batch], Batch]:
    """A predict function that writes on from each row, token by token.

    What a row draws depends on the seed and its own number, so on no devices. The model sees the
    last `context` tokens.
    """
    if not (config.temperature >= 0 and math.isfinite(config.temperature)):
        raise UserError(f"temperature is {config.temperature}: it must be 0 or more")
    for name in ("samples", "sample_length"):
        if getattr(config, name) < 1:
            raise UserError(f"{name} is {getattr(config, name)}: it must be 1 or more")

    def draw(key: jax.Array, logits: jax.Array) -> jax.Array:
        if config.temperature == 0:
            return logits.argmax(-1).astype(jnp.int32)
        return jax.random.categorical(key, logits / config.temperature).astype(jnp.int32)

    def predict(model: Any, batch: Batch) -> Batch:
        length = batch["length"]
        text = jnp.pad(batch["tokens"], ((0, 0), (0, config.sample_length)))
        seen_at_most = min(config.context, text.shape[1])
        key = jax.random.key(config.seed)
        keys = jax.vmap(partial(jax.random.fold_in, key))(batch["sample"])

        def add(number: jax.Array, text: jax.Array) -> jax.Array:
            end = length + number
            start = jnp.maximum(end - seen_at_most, 0)
            # Beyond its end the text is zeros, which no token before them looks at.
            places = start[:, None] + jnp.arange(seen_at_most)
            logits = model(jnp.take_along_axis(text, places, axis=1))
            last = jnp.take_along_axis(logits, (end - 1 - start)[:, None, None], axis=1)[:, 0]
            drawn = jax.vmap(draw)(jax.vmap(jax.random.fold_in, (0, None))(keys, number), last)
            return jnp.where(jnp.arange(text.shape[1]) == end[:, None], drawn[:, None], text)

        written = jax.lax.fori_loop(0, config.sample_length, add, text)
        return {"tokens": written, "length": length + config.sample_length}

    return predict


def present(vocabulary: Vocabulary, predictions: dict[str, np.ndarray]) -> Iterator[str]:
    """The texts that predict wrote, each below its number."""
    for number, tokens in enumerate(predictions["tokens"]):
        yield f"--- {number}"
        yield vocabulary.decode(tokens[: predictions["length"][number]])


def build(config: Config) -> Experiment:
    check_ranges(config)
    vocabulary, text = load_text(config)
    train, validation = split(text, config.context)
    return Experiment(
        model=partial(Transformer, shape(config, len(vocabulary))),
        objective=objective,
        optimizer=make_optimizer(config, config.total_steps(len(train))),
        train=train,
        validation=validation,
        rules=TRANSFORMER_RULES,
        predict=writer(config),
        prompts=prompts(config, vocabulary),
        format_predictions=partial(present, vocabulary),
    )

"""Supervised fine-tuning on conversations: a chat template, completion masks, packed rows.

Expected: an accuracy of 0.98 on the assistant's tokens of the validation data after 300 steps, in a
minute and a half of CPU time.

    python -m spmdtrain.run --config experiments/sft.py --workdir runs/sft
    python -m spmdtrain.run --config experiments/sft.py --workdir runs/sft --mode predict \\
        --question 3+4?

The built-in conversations ask for sums of two small numbers. The system asks for brief answers
("7") or polite ones ("It is 7."); without a system message both occur. Only the assistant's tokens
have a weight in the loss.

`--data-dir FOLDER` takes conversations from train.jsonl and validation.jsonl instead: in each line
{"messages": [{"role": ..., "content": ...}, ...]}. `--tokenizer FILE` takes a tokenizer.json of
Hugging Face, with the chat template that is stored beside it, and `--init-from` the weights of
another run. Needs the extra `chat`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import optax
from etils import epath
from shakespeare_text import objective

from spmdtrain import Chat, Experiment, JsonLinesSource, Packed, RunConfig
from spmdtrain.models import (
    TRANSFORMER_RULES,
    GenerationOptions,
    Transformer,
    TransformerConfig,
    generate,
)

# With bytes as tokens, short names of roles keep rows short.
TEMPLATE = (
    "{% for message in messages %}"
    "<{{ message.role[0] }}>{{ message.content }}{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
STYLES = {"brief": "{}", "polite": "It is {}."}
NUMBERS = 6  # from 0
_ROUND = 64  # rows of the embedding are a multiple of it, so that they divide over devices

Message = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    steps: int | None = 300
    global_batch_size: int | None = 16
    learning_rate: float | None = 3e-3
    eval_every_steps: int | None = 100
    checkpoint_every_steps: int | None = 100
    tokenizer: str = "bytes"
    """The tokenizer: "bytes", or a file of Hugging Face's tokenizers."""
    length: int = 128
    """Tokens of a row, and the most tokens of a conversation; others are cut off."""
    layers: int = 2
    """Blocks of attention and MLP."""
    width: int = 96
    """Width of the residual stream."""
    heads: int = 4
    """Attention heads, which share the width."""
    question: str = "3+4?"
    """The question that predict answers."""


# -- data ------------------------------------------------------------------------------------------


def conversation(index: int) -> list[Message]:
    """Returns a conversation about sums of two numbers, a function of its index."""
    draw = np.random.default_rng(index)
    messages = []
    style = str(draw.choice([*STYLES]))
    if draw.random() < 0.6:
        messages.append({"role": "system", "content": f"Be {style}."})
    for _ in range(draw.integers(1, 4)):
        a, b = draw.integers(NUMBERS, size=2).tolist()
        messages.append({"role": "user", "content": f"{a}+{b}?"})
        messages.append({"role": "assistant", "content": STYLES[style].format(a + b)})
    return messages


def chat(config: Config, source: Any) -> Chat:
    """Returns conversations as tokens."""
    template = TEMPLATE if config.tokenizer == "bytes" else None
    return Chat(source, config.tokenizer, template, length=config.length)


def load(config: Config) -> tuple[Packed, Packed]:
    """Returns the packed training and validation data."""
    sources: tuple[Any, ...]
    if config.data_dir is None:
        sources = (
            [conversation(index) for index in range(4000)],
            [conversation(index) for index in range(4000, 4400)],
        )
    else:
        folder = epath.Path(config.data_dir).expanduser()
        sources = tuple(
            JsonLinesSource(str(folder / f"{name}.jsonl")) for name in ("train", "validation")
        )
    train, validation = (Packed(chat(config, source), config.length) for source in sources)
    return train, validation


# -- training --------------------------------------------------------------------------------------


def shape(config: Config, vocabulary: int) -> TransformerConfig:
    """Returns the model's shape."""
    return TransformerConfig(
        vocabulary=vocabulary,
        rows=-(-vocabulary // _ROUND) * _ROUND,
        layers=config.layers,
        width=config.width,
        heads=config.heads,
        hidden=4 * config.width,
        context=config.length,
    )


def answered(
    config: Config, chat: Chat, model: Any, write: Callable[[str], None]
) -> dict[str, np.ndarray]:
    """Prints the answer to a question, and returns its tokens."""
    prompt = chat.prompt([{"role": "user", "content": config.question}])
    end = (chat.token("\n"),) if config.tokenizer == "bytes" else ()
    options = GenerationOptions(max_new_tokens=32, temperature=0.0, stop_tokens=end)
    (tokens,) = generate(model, [prompt], options)
    write(chat.decode(prompt) + chat.decode(tokens))
    return {"tokens": tokens[None]}


def build(config: Config) -> Experiment:
    train, validation = load(config)
    assert config.learning_rate is not None
    total = config.total_steps(len(train))
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, total // 10, max(2, total), config.learning_rate / 20
    )
    return Experiment(
        model=partial(Transformer, shape(config, train.documents.vocabulary_size)),
        objective=objective,
        optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule)),
        train=train,
        validation=validation,
        rules=TRANSFORMER_RULES,
        generate=partial(answered, config, train.documents),
    )

"""A Llama on tinyshakespeare, prediction of the next byte; fine-tuning of Meta's published models.

Expected: a validation loss of about 1.75 nats a byte after 600 steps, which take three and a half
minutes of CPU time.

    python -m spmdtrain.run --config experiments/llama.py --data-dir FOLDER

FOLDER holds input.txt, 1,115,394 bytes, from
https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt.
The first 90 % are for training; the last 10 % for validation, which predicts each byte once. The
loss is in nats a byte. `--mode predict` continues `--prompt`. If FOLDER holds train.bin and val.bin
instead, tokens as llm.c writes them for Llama 3, these are the data.

The presets llama-3.2-1b, llama-3.2-3b and llama-3.1-8b have the shapes of the published models, for
accelerators:

    python -m spmdtrain.run --config experiments/llama.py --preset llama-3.2-1b --data-dir FOLDER \\
        --init-from LLAMA --strategy fully_sharded

LLAMA is a folder with model.safetensors, such as https://huggingface.co/meta-llama/Llama-3.2-1B.

    python -m spmdtrain.checkpoints export RUN OUT/model.safetensors \\
        --weight-map experiments/llama.py

writes a trained model of the 3.2 family with the names and shapes of the published file: with the
config.json of LLAMA beside it, `transformers.LlamaForCausalLM.from_pretrained("OUT")` loads it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from etils import epath
from shakespeare_gpt import URL, objective, split

from spmdtrain import Experiment, RunConfig, TokenFile, UserError, WeightRule
from spmdtrain.models import (
    LLAMA_AXIS_RULES,
    GenerationOptions,
    Llama,
    Llama3RopeScaling,
    LlamaConfig,
    stream,
)


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    steps: int | None = 600
    global_batch_size: int | None = 16
    learning_rate: float | None = 3e-3
    eval_every_steps: int | None = 200
    vocabulary: int = 256
    """Number of tokens."""
    layers: int = 4
    """Blocks of attention and MLP."""
    width: int = 160
    """Width of the residual stream."""
    heads: int = 4
    """Query heads, which share the width."""
    kv_heads: int = 2
    """Key-value heads, each shared by several query heads."""
    mlp_width: int = 432
    """Width inside each MLP."""
    length: int = 96
    """Tokens of an example, and the most tokens that a prediction depends on."""
    rope_base: float = 10_000.0
    """Base of the speeds of the rotary positions."""
    rope_factor: float | None = None
    """Factor of the published scaling of rotary positions (llama3); by default none."""
    tied: bool = True
    """Use the embedding as the output layer."""
    unroll: bool | None = None
    """Compile every layer separately: faster steps, longer compilation; by default up to 12."""
    warmup_steps: int = 100
    """Steps in which the learning rate rises, at most a tenth of the run; a cosine follows."""
    weight_decay: float = 0.1
    """AdamW's weight decay, for all parameters but the norms' scales."""
    prompt: str = "\n"
    """The text that predict continues."""
    sample_length: int = 300
    """Bytes that predict generates."""
    temperature: float = 0.8
    """Divides the logits before predict samples; 0 takes the most probable byte."""


def published(layers: int, width: int, heads: int, mlp_width: int, factor: float) -> Config:
    """Returns the shape of a published model; its context of 131,072 tokens is cut to 8,192."""
    return Config(
        steps=1000,
        learning_rate=2e-5,
        eval_every_steps=100,
        vocabulary=128_256,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=8,
        mlp_width=mlp_width,
        length=8192,
        rope_base=500_000.0,
        rope_factor=factor,
        tied=width < 4096,
        compute_dtype="bfloat16",
        remat="full",
    )


PRESETS = {
    "tiny": Config(steps=60, learning_rate=1e-2, eval_every_steps=60, layers=2, width=64),
    "llama-3.2-1b": published(16, 2048, 32, 8192, factor=32.0),
    "llama-3.2-3b": published(28, 3072, 24, 8192, factor=32.0),
    "llama-3.1-8b": published(32, 4096, 32, 14336, factor=8.0),
}


def weight_map(*, tied: bool) -> tuple[WeightRule, ...]:
    """Returns the map of the arrays of Hugging Face's `LlamaForCausalLM`."""

    def of_block(source: str, target: str, dims: str = "") -> WeightRule:
        return WeightRule(
            f"model.layers.{{layer}}.{source}.weight", f"blocks/{target}[{{layer}}]", dims
        )

    head = () if tied else (WeightRule("lm_head.weight", "head"),)
    return (
        WeightRule("model.embed_tokens.weight", "embedding"),
        of_block("input_layernorm", "attention/norm"),
        of_block("self_attn.q_proj", "attention/query", "(n h) d -> d n h"),
        of_block("self_attn.k_proj", "attention/key", "(n h) d -> d n h"),
        of_block("self_attn.v_proj", "attention/value", "(n h) d -> d n h"),
        of_block("self_attn.o_proj", "attention/out", "d (n h) -> n h d"),
        of_block("post_attention_layernorm", "mlp/norm"),
        of_block("mlp.gate_proj", "mlp/gate", "f d -> d f"),
        of_block("mlp.up_proj", "mlp/up", "f d -> d f"),
        of_block("mlp.down_proj", "mlp/down", "d f -> f d"),
        WeightRule("model.norm.weight", "norm"),
        *head,
    )


WEIGHT_MAP = weight_map(tied=True)


def shape(config: Config) -> LlamaConfig:
    """Returns the model's shape."""
    factor = config.rope_factor
    return LlamaConfig(
        vocabulary=config.vocabulary,
        layers=config.layers,
        width=config.width,
        heads=config.heads,
        kv_heads=config.kv_heads,
        hidden=config.mlp_width,
        context=config.length,
        rope_base=config.rope_base,
        rope_scaling=None if factor is None else Llama3RopeScaling(factor=factor),
        tied=config.tied,
        unroll=config.unroll,
    )


def load(config: Config) -> tuple[Any, Any]:
    """Returns the training and the validation data."""
    if config.data_dir is None:
        raise UserError(f"llama needs --data-dir, a folder with input.txt: {URL}")
    folder = epath.Path(config.data_dir).expanduser()
    if (folder / "input.txt").is_file():
        text = np.frombuffer((folder / "input.txt").read_bytes(), np.uint8)
        return split(text.astype(np.int32), config.length)
    if (folder / "train.bin").is_file():
        train, validation = (folder / f"{name}.bin" for name in ("train", "val"))
        return TokenFile(train, config.length), TokenFile(validation, config.length)
    raise UserError(
        f"{config.data_dir}: holds neither input.txt, which {URL} offers, nor train.bin"
    )


def make_optimizer(config: Config, total_steps: int) -> optax.GradientTransformation:
    """Returns AdamW with gradient clipping, and a learning rate with warm-up and cosine decay."""
    assert config.learning_rate is not None
    peak = config.learning_rate
    schedule = optax.warmup_cosine_decay_schedule(
        peak / 100,
        peak,
        min(config.warmup_steps, total_steps // 10),
        max(2, total_steps),
        peak / 20,
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b2=0.99, weight_decay=config.weight_decay, mask=_is_decayed),
    )


def _is_decayed(params: Any) -> Any:
    """Selects all but the norms' scales, by name: with stacked layers these are matrices, too."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: jax.tree_util.keystr(path[-1:], simple=True) != "norm", params
    )


def continued(config: Config, model: Llama, write: Callable[[str], None]) -> dict[str, np.ndarray]:
    """Prints a text while it grows, and returns its bytes."""
    start = np.frombuffer(config.prompt.encode(), np.uint8).astype(np.int32)
    options = GenerationOptions(
        max_new_tokens=config.sample_length,
        temperature=config.temperature,
        seed=config.seed,
        dtype=config.compute_dtype,
    )
    write(config.prompt)
    pieces = [start]
    for piece in stream(model, [start], options):
        pieces.append(piece.tokens)
        write(piece.tokens.astype(np.uint8).tobytes().decode("utf-8", "replace"))
    write("\n")
    return {"tokens": np.concatenate(pieces)[None]}


def build(config: Config) -> Experiment:
    train, validation = load(config)
    return Experiment(
        model=partial(Llama, shape(config)),
        objective=objective,
        optimizer=make_optimizer(config, config.total_steps(len(train))),
        train=train,
        validation=validation,
        axis_rules=LLAMA_AXIS_RULES,
        weight_map=weight_map(tied=config.tied),
        generate=partial(continued, config) if config.vocabulary == 256 else None,
    )

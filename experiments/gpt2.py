"""Fine-tuning of GPT-2 on a text, from the weights that Hugging Face publishes.

Expected: with the weights of GPT-2 small (124 million parameters), the loss of the first step is
that of the published model, in nats a token. Fine-tuning it needs an accelerator.

    python -m spmdtrain.run --config experiments/gpt2.py --data-dir FOLDER --init-from GPT2

GPT2 is a folder with model.safetensors, such as https://huggingface.co/openai-community/gpt2.
FOLDER holds train.bin and val.bin, GPT-2's tokens as nanoGPT or llm.c write them. Without
`--init-from` the model starts from random values. The preset `medium` is GPT-2 medium. The preset
`lora` trains low-rank factors of the kernels alone; `export` merges them.

    python -m spmdtrain.checkpoints export RUN OUT --format huggingface

writes a trained model for `transformers.GPT2LMHeadModel.from_pretrained("OUT")`, with the files of
a tokenizer that lie in GPT2. `export RUN model.safetensors --weight-map experiments/gpt2.py` writes
the weights alone; this map is that of the published vocabulary.

`--mode predict` writes the loss of each token of the validation data.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import optax
from etils import epath

from spmdtrain import (
    Experiment,
    LoraModel,
    LoraRule,
    RunConfig,
    TokenFile,
    UserError,
    WeightRule,
)
from spmdtrain.models import GPT2_RULES, Transformer, TransformerConfig

VOCABULARY = 50_257
_ROUND = 128  # rows of the embedding are a multiple of it, so that they divide over devices

Batch = dict[str, jax.Array]


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    steps: int | None = 1000
    global_batch_size: int | None = 32
    learning_rate: float | None = 3e-5
    eval_every_steps: int | None = 100
    vocabulary: int = VOCABULARY
    """Number of tokens."""
    layers: int = 12
    """Blocks of attention and MLP."""
    width: int = 768
    """Width of the residual stream."""
    heads: int = 12
    """Attention heads, which share the width."""
    length: int = 1024
    """Number of positions, and of tokens of an example."""
    dropout: float = 0.1
    """Fraction of the values dropped in training."""
    weight_decay: float = 0.1
    """AdamW's weight decay, for the matrices."""
    warmup_steps: int = 100
    """Steps in which the learning rate rises, at most half of the run; a cosine follows."""
    clip_norm: float = 1.0
    """The norm to which larger gradients are scaled down."""
    lora_rank: int = 0
    """Rank of the factors of the kernels, which are then trained alone (LoRA); 0 trains all."""
    lora_alpha: float = 16.0
    """LoRA's alpha: the product of the factors is multiplied by lora_alpha / lora_rank."""


PRESETS = {
    "lora": Config(learning_rate=3e-4, weight_decay=0.0, lora_rank=8),
    "medium": Config(layers=24, width=1024, heads=16),
    "tiny": Config(
        steps=20,
        global_batch_size=8,
        learning_rate=1e-3,
        eval_every_steps=10,
        vocabulary=311,
        layers=2,
        width=64,
        heads=4,
        length=32,
        warmup_steps=2,
    ),
}


def weight_map(vocabulary: int) -> tuple[WeightRule, ...]:
    """Returns the map of the arrays of Hugging Face's GPT-2, with or without `transformer.`."""

    def rule(source: str, target: str, dims: str = "", fill: float | None = None) -> WeightRule:
        return WeightRule(f"{{prefix:(transformer\\.)?}}{source}", target, dims, fill)

    def of_block(source: str, target: str, dims: str = "") -> WeightRule:
        return rule(f"h.{{layer}}.{source}", f"blocks/{target}[{{layer}}]", dims)

    return (
        # Rows beyond the vocabulary have no token: see `Transformer`.
        rule("wte.weight", f"embedding[0:{vocabulary}]", fill=0.0),
        rule("wpe.weight", "positions"),
        of_block("ln_1.weight", "attention/norm"),
        of_block("ln_1.bias", "attention/norm_bias"),
        of_block("attn.c_attn.weight", "attention/qkv", "d (c n h) -> d c n h"),
        of_block("attn.c_attn.bias", "attention/qkv_bias", "(c n h) -> c n h"),
        of_block("attn.c_proj.weight", "attention/out", "(n h) d -> n h d"),
        of_block("attn.c_proj.bias", "attention/out_bias"),
        of_block("ln_2.weight", "mlp/norm"),
        of_block("ln_2.bias", "mlp/norm_bias"),
        of_block("mlp.c_fc.weight", "mlp/up"),
        of_block("mlp.c_fc.bias", "mlp/up_bias"),
        of_block("mlp.c_proj.weight", "mlp/down"),
        of_block("mlp.c_proj.bias", "mlp/down_bias"),
        rule("ln_f.weight", "norm"),
        rule("ln_f.bias", "norm_bias"),
    )


WEIGHT_MAP = weight_map(VOCABULARY)
KERNELS = (  # each has the layers first
    LoraRule("attention/qkv$|mlp/(up|down)$", inputs=1, stacked=1),
    LoraRule("attention/out$", inputs=2, stacked=1),
)
"""The kernels that the preset `lora` adapts."""


def objective(model: Any, batch: Batch) -> dict[str, tuple[jax.Array, jax.Array]]:
    inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    return {"loss": (model.token_losses(inputs, targets).loss, batch["weights"])}


def predict(model: Any, batch: Batch) -> dict[str, jax.Array]:
    """Returns the loss of each token in nats, (B, length)."""
    return {"loss": objective(model, batch)["loss"][0]}


def make_optimizer(config: Config, total_steps: int) -> optax.GradientTransformation:
    """Returns AdamW with gradient clipping, and a learning rate with warm-up and cosine decay."""
    assert config.learning_rate is not None
    peak = config.learning_rate
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, peak, min(config.warmup_steps, total_steps // 2), max(2, total_steps), peak / 10
    )
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(schedule, b2=0.95, weight_decay=config.weight_decay, mask=_is_decayed),
    )


def _is_decayed(params: Any) -> Any:
    """Selects all but norms and biases, by name: with stacked layers these are matrices, too."""

    def decays(path: Any, _: Any) -> bool:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        return not name.endswith(("norm", "bias"))

    return jax.tree_util.tree_map_with_path(decays, params)


def shape(config: Config) -> TransformerConfig:
    """Returns the model's shape."""
    return TransformerConfig(
        vocabulary=config.vocabulary,
        rows=-(-config.vocabulary // _ROUND) * _ROUND,
        layers=config.layers,
        width=config.width,
        heads=config.heads,
        hidden=4 * config.width,
        context=config.length,
        positions="learned",
        blocks="gpt2",
        dropout=config.dropout,
    )


def build(config: Config) -> Experiment:
    if config.data_dir is None:
        raise UserError("gpt2 needs --data-dir, the folder that holds train.bin and val.bin")
    folder = epath.Path(config.data_dir).expanduser()
    train, validation = (
        TokenFile(folder / f"{name}.bin", config.length) for name in ("train", "val")
    )
    model: Any = partial(Transformer, shape(config))
    if config.lora_rank:
        model = LoraModel(model, KERNELS, rank=config.lora_rank, alpha=config.lora_alpha)
    return Experiment(
        model=model,
        objective=objective,
        optimizer=make_optimizer(config, config.total_steps(len(train))),
        train=train,
        validation=validation,
        predict=predict,
        rules=GPT2_RULES,
        weight_map=weight_map(config.vocabulary),
        huggingface=shape(config).huggingface(),
    )

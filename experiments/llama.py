"""A Llama on tinyshakespeare, prediction of the next byte; fine-tuning of Meta's published models.

Expected: a validation loss of about 1.75 nats a byte after 600 steps, which take three and a half
minutes of CPU time.

    python -m spmdtrain.run --config experiments/llama.py --data-dir FOLDER

FOLDER holds input.txt, 1,115,394 bytes, from
https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt.
The first 90 % are for training; the last 10 % for validation, which predicts each byte once. The
loss is in nats a byte. `--mode predict` continues `--prompt`. If FOLDER holds train.bin and val.bin
instead, tokens as llm.c writes them for Llama 3, these are the data. Of them, `--mode predict`
writes the loss of each token.

`--preset moe` is a small mixture of experts: in place of each MLP of `--preset moe-dense` it has 8
of half the width, of which a router chooses 2 for each token. So it has 2.6 times the parameters,
and not more FLOPs per token. Its loss adds two losses of the router, each with a weight of its own,
to that of the bytes, "cross_entropy". Expected on the validation text after 800 steps, two minutes
of CPU time: 1.83 nats a byte, and 1.89 with moe-dense (1.88 with seed 0, the default).

The presets llama-3.2-1b, llama-3.2-3b, llama-3.1-8b and mixtral-8x7b have the shapes of the
published models, for accelerators:

    python -m spmdtrain.run --config experiments/llama.py --preset llama-3.2-1b --data-dir FOLDER \\
        --init-from LLAMA --strategy fully_sharded

LLAMA is a folder with model.safetensors, such as https://huggingface.co/meta-llama/Llama-3.2-1B,
or https://huggingface.co/mistralai/Mixtral-8x7B-v0.1 for the preset mixtral-8x7b.

    python -m spmdtrain.checkpoints export RUN OUT --format huggingface

writes a trained model for `transformers.LlamaForCausalLM.from_pretrained("OUT")`, and with experts
for `MixtralForCausalLM`, with the files of a tokenizer that lie in LLAMA.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import numpy as np
import optax
from etils import epath
from shakespeare_gpt import URL, Batch, objective, predict, split

from spmdtrain import (
    Combination,
    Experiment,
    RunConfig,
    Scalar,
    SumMetric,
    TokenFile,
    UserError,
    WeightRule,
)
from spmdtrain.models import (
    LLAMA_AXIS_RULES,
    GenerationOptions,
    Llama,
    Llama3RopeScaling,
    LlamaConfig,
    RoutedExperts,
    peak_load,
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
    """Width inside each MLP, or inside each expert."""
    experts: int | None = None
    """Experts of each block, in place of its MLP; by default none."""
    experts_per_token: int | None = None
    """Experts that the router chooses for each token; by default 2."""
    balance_weight: float | None = None
    """Weight of the loss that balances the load of experts; by default 0.02."""
    router_z_weight: float | None = None
    """Weight of the loss that keeps the router's logits small; by default 0.001."""
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
    logits_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the logits in memory. bfloat16 is faster on GPUs, and rounds each logit."""
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


def published(layers: int, width: int, heads: int, mlp_width: int, factor: float | None) -> Config:
    """Returns the shape of a published model, whose context is cut to 8,192 tokens."""
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
        remat="attention",
    )


_SMALL = Config(
    steps=800,
    learning_rate=5e-3,
    eval_every_steps=400,
    layers=2,
    width=64,
    mlp_width=172,
    length=64,
    # The first gradients of a tied embedding make the rows of all tokens similar, so that a router
    # chooses the same experts for all of them.
    tied=False,
)

PRESETS = {
    "tiny": Config(steps=60, learning_rate=1e-2, eval_every_steps=60, layers=2, width=64),
    "moe-dense": _SMALL,
    # The router and 2 experts have 32,768 weights, the MLP of moe-dense 33,024.
    "moe": replace(_SMALL, experts=8, mlp_width=84, best_metric="cross_entropy"),
    "llama-3.2-1b": published(16, 2048, 32, 8192, factor=32.0),
    "llama-3.2-3b": published(28, 3072, 24, 8192, factor=32.0),
    "llama-3.1-8b": published(32, 4096, 32, 14336, factor=8.0),
    "mixtral-8x7b": replace(
        published(32, 4096, 32, 14336, factor=None),
        vocabulary=32_000,
        rope_base=1e6,
        experts=8,
        best_metric="cross_entropy",
    ),
}


def weight_map(*, tied: bool, experts: bool = False) -> tuple[WeightRule, ...]:
    """Returns the map of the arrays of Hugging Face's `LlamaForCausalLM`.

    With experts, it is that of `MixtralForCausalLM`.
    """

    def of_block(source: str, target: str, dims: str = "") -> WeightRule:
        return WeightRule(
            f"model.layers.{{layer}}.{source}.weight", f"blocks/{target}[{{layer}}]", dims
        )

    def of_expert(source: str, target: str) -> WeightRule:
        return WeightRule(
            f"model.layers.{{layer}}.block_sparse_moe.experts.{{expert}}.{source}.weight",
            f"blocks/mlp/{target}[{{layer}},{{expert}}]",
            "a b -> b a",
        )

    mlp = (
        of_block("mlp.gate_proj", "mlp/gate", "f d -> d f"),
        of_block("mlp.up_proj", "mlp/up", "f d -> d f"),
        of_block("mlp.down_proj", "mlp/down", "d f -> f d"),
    )
    routed = (
        of_block("block_sparse_moe.gate", "mlp/router", "e d -> d e"),
        of_expert("w1", "gate"),
        of_expert("w3", "up"),
        of_expert("w2", "down"),
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
        *(routed if experts else mlp),
        WeightRule("model.norm.weight", "norm"),
        *head,
    )


WEIGHT_MAP = weight_map(tied=True)

# The defaults of options that only a model with experts has.
EXPERTS_PER_TOKEN, BALANCE_WEIGHT, ROUTER_Z_WEIGHT = 2, 0.02, 1e-3


def _or_default(value: float | None, default: float) -> float:
    return default if value is None else value


def shape(config: Config) -> LlamaConfig:
    """Returns the model's shape."""
    factor, experts = config.rope_factor, config.experts
    top_k = config.experts_per_token
    top_k = EXPERTS_PER_TOKEN if top_k is None else top_k
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
        logits_dtype=config.logits_dtype,
        experts=None if experts is None else RoutedExperts(count=experts, top_k=top_k),
    )


def routed_objective(config: Config, model: Llama, batch: Batch) -> dict[str, Any]:
    """Returns the loss of a model with experts, its terms, and metrics of the router."""
    hidden, routing = model.hidden_and_routing(batch["tokens"][:, :-1])
    losses, weights = model.losses(hidden, batch["tokens"][:, 1:]), batch["weights"]
    terms = {
        "cross_entropy": 1.0,
        "balance": _or_default(config.balance_weight, BALANCE_WEIGHT),
        "router_z": _or_default(config.router_z_weight, ROUTER_Z_WEIGHT),
    }
    return {
        "loss": Combination(terms),
        "cross_entropy": (losses.loss, weights),
        "balance": routing.balance,
        "router_z": routing.z,
        "accuracy": (losses.correct, weights),
        "expert_entropy": routing.entropy,
        "expert_load": peak_load(routing.load),  # within each example
        "expert_load_total": SumMetric(routing.load, peak_load),  # over all of an evaluation
        "expert_overflow": Scalar(routing.overflow),
    }


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


def check_experts(config: Config) -> None:
    """Checks that options of experts are not given without experts."""
    if config.experts is not None:
        return
    for name in ("experts_per_token", "balance_weight", "router_z_weight"):
        if (value := getattr(config, name)) is not None:
            raise UserError(f"{name} is {value}, but the model has no experts: add --experts 8")


def build(config: Config) -> Experiment:
    check_experts(config)
    train, validation = load(config)
    return Experiment(
        model=partial(Llama, shape(config)),
        objective=objective if config.experts is None else partial(routed_objective, config),
        optimizer=make_optimizer(config, config.total_steps(len(train))),
        train=train,
        validation=validation,
        predict=predict,
        axis_rules=LLAMA_AXIS_RULES,
        weight_map=weight_map(tied=config.tied, experts=config.experts is not None),
        huggingface=shape(config).huggingface(),
        generate=partial(continued, config) if config.vocabulary == 256 else None,
    )

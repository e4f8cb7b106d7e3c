"""A decoder-only transformer whose layers are stacked arrays, run through by one scan."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from spmdtrain.errors import UserError
from spmdtrain.sharding.layout import GatherPolicy, Rule
from spmdtrain.sharding.placement import constrain_sharding, current_device
from spmdtrain.step.remat import remat

# Over "tensor" each device has some of the heads and of the hidden values, so that one sum over
# the devices ends each half of a block. The first dim of what is in blocks is the layers'.
TRANSFORMER_RULES: tuple[Rule, ...] = (
    Rule(
        "blocks/attention/qkv$",
        PartitionSpec(None, None, None, "tensor", None),
        GatherPolicy.PER_LAYER,
    ),
    Rule(
        "blocks/attention/out$", PartitionSpec(None, "tensor", None, None), GatherPolicy.PER_LAYER
    ),
    Rule("blocks/mlp/up$", PartitionSpec(None, None, "tensor"), GatherPolicy.PER_LAYER),
    Rule("blocks/mlp/down$", PartitionSpec(None, "tensor", None), GatherPolicy.PER_LAYER),
    Rule("(embedding|head|positions)$", PartitionSpec("tensor", None)),
)

_Turn = Callable[[jax.Array], jax.Array]

_EPSILON = 1e-6  # keeps the RMS norm of zeros finite
_ROTARY_BASE = 10_000.0
_NO_TOKEN = -1e9  # the logit of a row without a token: e to its power is 0, its gradient too


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The shape of a transformer. Raises `UserError` for one that cannot be."""

    vocabulary: int
    """How many tokens there are."""
    rows: int
    """Rows of the embedding, `vocabulary` or more: a round number divides over devices."""
    layers: int
    width: int
    heads: int
    hidden: int
    """Width inside each block's MLP."""
    context: int
    """The most tokens in a row."""
    positions: Literal["rotary", "learned"] = "rotary"
    """How a token's place is told: queries and keys turned by it, or a vector added for each."""
    dropout: float = 0.0
    """Fraction of the values dropped after the embedding and after each half of a block."""
    tied: bool = True
    """Whether the embedding also makes the logits."""
    unroll: bool = False
    """Compile every layer by itself: faster steps on a CPU, a compilation as long as the model is
    deep."""

    def __post_init__(self) -> None:
        for name in ("vocabulary", "layers", "width", "heads", "hidden", "context"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: it must be 1 or more")
        if self.rows < self.vocabulary:
            raise UserError(f"{self.rows} rows of the embedding for {self.vocabulary} tokens")
        if self.width % self.heads:
            raise UserError(f"width {self.width} does not divide over {self.heads} heads")
        if self.positions == "rotary" and self.head_width % 2:
            raise UserError(
                f"rotary positions turn pairs of values, and width {self.width} over {self.heads} "
                f"heads is {self.head_width} a head: an odd number"
            )
        if not 0 <= self.dropout < 1:
            raise UserError(f"dropout is {self.dropout}: it must be at least 0 and below 1")

    @property
    def head_width(self) -> int:
        """Width of each head."""
        return self.width // self.heads


class Transformer(nnx.Module):
    """Tokens (B, T), whole numbers, to the logits (B, T, `rows`) of each one's successor, f32.

    Pre-norm blocks without biases. It computes in the dtype of its parameters; norms, softmax and
    logits are f32. Rows of the embedding beyond the vocabulary have logits of -1e9: the loss is
    that of the vocabulary alone, from the first step on, and none of them is ever sampled.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        layers, width, hidden = config.layers, config.width, config.hidden
        heads = (config.heads, config.head_width)

        def normal(*shape: int, std: float) -> nnx.Param[jax.Array]:
            return nnx.Param(std * jax.random.normal(rngs.params(), shape))

        def ones(*shape: int) -> nnx.Param[jax.Array]:
            return nnx.Param(jnp.ones(shape))

        # What the blocks add up to is as large as the embedding, however many there are.
        into, back = width**-0.5, (2 * layers) ** -0.5
        self.embedding = normal(config.rows, width, std=0.02)
        if config.positions == "learned":
            self.positions = normal(config.context, width, std=0.02)
        self.blocks = nnx.Dict(
            attention=nnx.Dict(
                norm=ones(layers, width),
                qkv=normal(layers, width, 3, *heads, std=into),
                out=normal(layers, *heads, width, std=into * back),
            ),
            mlp=nnx.Dict(
                norm=ones(layers, width),
                up=normal(layers, width, hidden, std=into),
                down=normal(layers, hidden, width, std=hidden**-0.5 * back),
            ),
        )
        self.norm = ones(width)
        if not config.tied:
            self.head = normal(config.rows, width, std=into)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        config, length = self.config, tokens.shape[1]
        if length > config.context:
            raise UserError(
                f"{length} tokens in a row, and the model's context is {config.context}"
            )
        # Looked up in f32: what comes back is then added up in f32, where tokens come often.
        embedding = self.embedding[...]
        x = embedding.astype(jnp.float32)[tokens].astype(embedding.dtype)
        turn: _Turn = _unturned
        if config.positions == "learned":
            x = x + self.positions[...][:length]
        else:
            turn = rotation(length, config.head_width)
        keys: Any = None
        if config.dropout and not self.dropout.deterministic:
            keys = jax.random.split(self.dropout.rngs(), (config.layers + 1, 2))
            x = self.dropout(x, rngs=keys[-1, 0])
            keys = keys[:-1]
        x = constrain_sharding(x, "batch", None, None)

        @remat
        def block(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
            weights, keys = layer
            key, other = (None, None) if keys is None else keys
            x = x + self.dropout(_attention(weights["attention"], x, turn), rngs=key)
            x = constrain_sharding(x, "batch", None, None)
            x = x + self.dropout(_mlp(weights["mlp"], x), rngs=other)
            return constrain_sharding(x, "batch", None, None), None

        weights = nnx.to_pure_dict(nnx.state(self.blocks))
        x, _ = jax.lax.scan(block, x, (weights, keys), unroll=config.unroll)
        return self._logits(_rms_norm(x, self.norm[...]))

    def _logits(self, x: jax.Array) -> jax.Array:
        head = self.embedding[...] if self.config.tied else self.head[...]
        logits = jnp.einsum("btd,vd->btv", x, head, preferred_element_type=jnp.float32)
        logits = constrain_sharding(logits, "batch", None, "tensor")
        if self.config.rows == self.config.vocabulary:
            return logits
        return jnp.where(jnp.arange(self.config.rows) < self.config.vocabulary, logits, _NO_TOKEN)


def _attention(weights: dict[str, jax.Array], x: jax.Array, turn: _Turn) -> jax.Array:
    x = _rms_norm(x, weights["norm"])
    # Queries, keys and values in front: each is then one piece of memory, which a CPU likes best.
    qkv = jnp.einsum("btd,dcnh->cbtnh", x, weights["qkv"])
    query, key, value = constrain_sharding(qkv, None, "batch", None, "tensor", None)
    mixed = jax.nn.dot_product_attention(
        turn(query),
        turn(key),
        value,
        is_causal=True,
        implementation="cudnn" if is_fused(current_device(), x.dtype, value.shape[-1]) else "xla",
    )
    mixed = constrain_sharding(mixed, "batch", None, "tensor", None)
    return jnp.einsum("btnh,nhd->btd", mixed, weights["out"])


def is_fused(device: Any, dtype: Any, head_width: int) -> bool:
    """Whether cuDNN's fused attention runs there: it wants 16 bits, and an NVIDIA GPU since Ampere.

    JAX raises an error for what it does not support, and would choose XLA's where nothing is said.
    """
    # "9.0" on an NVIDIA GPU; another word on AMD's, and none on what is no GPU.
    major = str(getattr(device, "compute_capability", "")).split(".")[0]
    sixteen_bits = dtype in (jnp.bfloat16, jnp.float16)
    fits = head_width % 8 == 0 and head_width <= 128
    return sixteen_bits and fits and major.isdecimal() and int(major) >= 8


def _mlp(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    hidden = _rms_norm(x, weights["norm"]) @ weights["up"]
    hidden = constrain_sharding(hidden, "batch", None, "tensor")
    # Learns as well as GELU, and costs next to nothing: a fifth of a small step's time on a CPU.
    return jnp.square(jax.nn.relu(hidden)) @ weights["down"]


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    normal = wide * jax.lax.rsqrt(mean_square + _EPSILON)
    return (normal * scale.astype(jnp.float32)).astype(x.dtype)


def rotation(length: int, width: int) -> _Turn:
    """A function that turns (B, T, heads, width) by each token's place.

    A query's product with a key then depends on how far apart they are, and not on where.
    """
    half = width // 2
    speeds = jnp.exp(-math.log(_ROTARY_BASE) / half * jnp.arange(half))
    angles = (jnp.arange(length)[:, None] * speeds)[:, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)

    def turn(x: jax.Array) -> jax.Array:
        one, other = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        turned = jnp.concatenate([one * cos - other * sin, one * sin + other * cos], axis=-1)
        return turned.astype(x.dtype)

    return turn


def _unturned(x: jax.Array) -> jax.Array:
    return x

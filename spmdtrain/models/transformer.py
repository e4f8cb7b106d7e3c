"""A decoder-only transformer whose layers are stacked arrays, computed by one scan."""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from spmdtrain.config.options import check_values
from spmdtrain.errors import UserError
from spmdtrain.kernels.attention import attention
from spmdtrain.models.layers import (
    Rotation,
    StackedDecoder,
    attend_to_cache,
    check_length,
    dtype_name,
    embed_tokens,
    layer_norm,
    project_qkv,
    read_with_cache,
    rms_norm,
    rotary_speeds,
    rotation,
    split_residual,
    squared_relu,
)
from spmdtrain.sharding.placement import constrain_sharding
from spmdtrain.sharding.rules import GatherPolicy, Rule
from spmdtrain.step.layer_loop import scan_layers

# Over "tensor" each device has some of the heads and hidden values, so that each half of a block
# ends with one sum over it (see `split_residual`). The first dim of arrays in blocks is the layer.
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

# Of a transformer with the blocks of GPT-2.
GPT2_RULES: tuple[Rule, ...] = (
    *TRANSFORMER_RULES,
    Rule(
        "blocks/attention/qkv_bias$",
        PartitionSpec(None, None, "tensor", None),
        GatherPolicy.PER_LAYER,
    ),
    Rule("blocks/mlp/up_bias$", PartitionSpec(None, "tensor"), GatherPolicy.PER_LAYER),
)

PyTree = Any

_EPSILON = 1e-6  # keeps the RMS norm of zeros finite
_GPT2_EPSILON = 1e-5
_ROTARY_BASE = 10_000.0


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The shape of a transformer.

    Attributes:
      vocabulary: Number of tokens.
      rows: Number of rows of the embedding, at least `vocabulary`: a round number divides over
        devices.
      layers: Number of blocks.
      width: Width of the residual stream.
      heads: Number of attention heads.
      hidden: Width inside each block's MLP.
      context: The largest number of tokens of a sequence.
      positions: Position embedding: rotations of queries and keys, or a learned vector for each
        position.
      dropout: Fraction of the values dropped after the embedding and after each half of a block.
      tied: Whether the embedding is also the output layer.
      blocks: Blocks without biases, with RMS norm and squared ReLU; or those of GPT-2, with biases,
        layer norm and GELU (its approximation by tanh).
      unroll: Whether to compile every layer separately: faster steps, but a compile time
        proportional to the number of layers. By default up to 12 layers.
      logits_dtype: Dtype of the logits of `losses` in memory: see `linear_cross_entropy`.

    Raises:
      UserError: If a value is invalid.
    """

    vocabulary: int
    rows: int
    layers: int
    width: int
    heads: int
    hidden: int
    context: int
    positions: Literal["rotary", "learned"] = "rotary"
    dropout: float = 0.0
    tied: bool = True
    blocks: Literal["plain", "gpt2"] = "plain"
    unroll: bool | None = None
    logits_dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "logits_dtype", dtype_name(self.logits_dtype))
        check_values(self, TransformerConfig)
        for name in ("vocabulary", "layers", "width", "heads", "hidden", "context"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: it must be 1 or more")
        if self.rows < self.vocabulary:
            raise UserError(f"{self.rows} rows of the embedding for {self.vocabulary} tokens")
        if self.width % self.heads:
            raise UserError(f"width {self.width} does not divide over {self.heads} heads")
        if self.positions == "rotary" and self.head_width % 2:
            raise UserError(
                f"rotary positions rotate pairs of values, but width {self.width} over "
                f"{self.heads} heads is {self.head_width} a head: an odd number"
            )
        if not 0 <= self.dropout < 1:
            raise UserError(f"dropout is {self.dropout}: it must be at least 0 and below 1")

    @property
    def head_width(self) -> int:
        """The width of each head."""
        return self.width // self.heads

    def huggingface(self) -> dict[str, Any]:
        """Returns the JSON files of Hugging Face's `GPT2LMHeadModel` by name.

        Raises:
          UserError: If the model is not a GPT-2.
        """
        if self.blocks != "gpt2" or self.positions != "learned" or not self.tied:
            raise UserError(
                f"blocks is {self.blocks}, positions is {self.positions} and tied is {self.tied}: "
                "Hugging Face's layout of GPT-2 has the blocks gpt2, learned positions and a tied "
                "embedding"
            )
        published = 50_257
        end = published - 1 if self.vocabulary == published else None
        return {
            "config.json": {
                "architectures": ["GPT2LMHeadModel"],
                "model_type": "gpt2",
                "vocab_size": self.vocabulary,
                "n_positions": self.context,
                "n_embd": self.width,
                "n_layer": self.layers,
                "n_head": self.heads,
                "n_inner": self.hidden,
                "activation_function": "gelu_new",
                "layer_norm_epsilon": _GPT2_EPSILON,
                "embd_pdrop": self.dropout,
                "resid_pdrop": self.dropout,
                "attn_pdrop": 0.0,
                "tie_word_embeddings": True,
                "bos_token_id": end,
                "eos_token_id": end,
            }
        }

    @property
    def kv_heads(self) -> int:
        """The number of heads with separate keys and values: all heads."""
        return self.heads


class Transformer(StackedDecoder):
    """A decoder from integer tokens (B, T) to logits (B, T, `rows`) of the next tokens, f32.

    It has pre-norm blocks, and computes in the dtype of its parameters; norms,
    softmax and logits are f32. Rows of the embedding beyond the vocabulary have logits of -1e9, so
    that they neither change the loss nor are ever sampled.

    Args:
      config: The shape.
      rngs: Random streams of the initialization and of dropout.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        layers, width, hidden = config.layers, config.width, config.hidden
        heads = (config.heads, config.head_width)

        def normal(*shape: int, std: float) -> nnx.Param[jax.Array]:
            return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32))

        def ones(*shape: int) -> nnx.Param[jax.Array]:
            return nnx.Param(jnp.ones(shape, jnp.float32))

        def zeros(*shape: int) -> nnx.Param[jax.Array]:
            return nnx.Param(jnp.zeros(shape, jnp.float32))

        # With this scale, the sum of the blocks is as large as the embedding for any number.
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
        if config.blocks == "gpt2":
            attention, mlp = self.blocks["attention"], self.blocks["mlp"]
            attention["norm_bias"], mlp["norm_bias"] = zeros(layers, width), zeros(layers, width)
            attention["qkv_bias"], mlp["up_bias"] = zeros(layers, 3, *heads), zeros(layers, hidden)
            attention["out_bias"], mlp["down_bias"] = zeros(layers, width), zeros(layers, width)
            self.norm_bias = zeros(width)
        if not config.tied:
            self.head = normal(config.rows, width, std=into)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def hidden(
        self,
        tokens: jax.Array,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        config = self.config
        check_length(tokens.shape[1], config.context)
        x, turn = self._embed(tokens, positions)
        keys: Any = None
        if config.dropout and not self.dropout.deterministic:
            keys = jax.random.split(self.dropout.rngs(), (config.layers + 1, 2))
            x = self.dropout(x, rngs=keys[-1, 0])
            keys = keys[:-1]
        x = split_residual(x)

        def block(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
            weights, keys = layer
            key, other = (None, None) if keys is None else keys
            x = x + self.dropout(_attention(weights["attention"], x, turn, segments), rngs=key)
            x = split_residual(x)
            x = x + self.dropout(_mlp(weights["mlp"], x), rngs=other)
            return split_residual(x), None

        weights = nnx.to_pure_dict(nnx.state(self.blocks))
        x, _ = scan_layers(block, x, (weights, keys), config.unroll)
        return split_residual(self._last_norm(x))

    def _last_norm(self, x: jax.Array) -> jax.Array:
        bias = self.norm_bias[...] if self.config.blocks == "gpt2" else None
        return _norm(x, self.norm[...], bias)

    def extend(
        self, layers: PyTree, tokens: jax.Array, cache: PyTree, start: jax.Array
    ) -> tuple[jax.Array, PyTree]:
        """Reads tokens that follow those in the cache, without dropout.

        A token attends to the tokens of its row up to itself. The rows may have different lengths:
        what the cache holds at later positions has no effect, and is overwritten when the row
        reaches them, so shorter rows are padded with any token at their end.

        Args:
          layers: From `layers`.
          tokens: int (B, T), from 0 to `vocabulary` - 1.
          cache: From `empty_cache` or `extend`; each row holds at least `start` tokens.
          start: int (B,), the position of the first of each row's tokens; `start` + T is at most
            the length of the cache.

        Returns:
          The values (B, T, width) from which `logits` computes the logits of the next tokens, and
          the extended cache.
        """
        positions = start[:, None] + jnp.arange(tokens.shape[1], dtype=start.dtype)[None]
        x, turn = self._embed(tokens, positions)
        x = split_residual(x)

        def read(x: jax.Array, weights: Any, cached: Any) -> tuple[jax.Array, Any]:
            heads = _heads(weights["attention"], x, turn)
            mixed, cached = attend_to_cache(*heads, cached, positions)
            x = x + _mix_heads(weights["attention"], mixed)
            x = x + _mlp(weights["mlp"], x)
            return split_residual(x), cached

        x, cache = read_with_cache(read, x, layers, cache)
        return self._last_norm(x), cache

    def _embed(self, tokens: jax.Array, positions: jax.Array | None) -> tuple[jax.Array, Rotation]:
        """Returns the embedded tokens, and the rotation of their queries and keys."""
        config = self.config
        x = embed_tokens(self.embedding[...], tokens, config.vocabulary)
        length = tokens.shape[1]
        if config.positions == "learned":
            learned = self.positions[...]
            if positions is None:
                return x + learned[None, :length], _identity
            return x + embed_tokens(learned, positions, len(learned)), _identity
        speeds = rotary_speeds(config.head_width, _ROTARY_BASE)
        return x, rotation(length if positions is None else positions, speeds)


def _attention(
    weights: dict[str, jax.Array], x: jax.Array, turn: Rotation, segments: jax.Array | None
) -> jax.Array:
    mixed = attention(*_heads(weights, x, turn), causal=True, segments=segments)
    return _mix_heads(weights, mixed)


def _heads(
    weights: dict[str, jax.Array], x: jax.Array, turn: Rotation
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns queries, keys and values (B, T, heads, head width), rotated."""
    x = _norm(x, weights["norm"], weights.get("norm_bias"))
    query, key, value = project_qkv(x, weights["qkv"], weights.get("qkv_bias"))
    return turn(query), turn(key), value


def _mix_heads(weights: dict[str, jax.Array], mixed: jax.Array) -> jax.Array:
    """Returns the output of the attention (B, T, width) from the mixed values of the heads."""
    mixed = constrain_sharding(mixed, "batch", "context", "tensor", None)
    out = jnp.einsum("btnh,nhd->btd", mixed, weights["out"])
    return out + weights["out_bias"][None, None] if "out_bias" in weights else out


def _mlp(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    hidden = _norm(x, weights["norm"], weights.get("norm_bias")) @ weights["up"]
    hidden = constrain_sharding(hidden, "batch", "context", "tensor")
    if "up_bias" in weights:
        active = jax.nn.gelu(hidden + weights["up_bias"][None, None], approximate=True)
        return active @ weights["down"] + weights["down_bias"][None, None]
    # Learns as well as GELU, which takes a fifth of a small step's time on a CPU.
    return squared_relu(hidden) @ weights["down"]


def _norm(x: jax.Array, scale: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Computes the RMS norm; with a bias, the layer norm."""
    if bias is None:
        return rms_norm(x, scale, _EPSILON)
    return layer_norm(x, scale, bias, _GPT2_EPSILON)


def _identity(x: jax.Array) -> jax.Array:
    return x

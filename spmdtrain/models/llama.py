"""Decoders with the blocks of Llama: grouped-query attention, SwiGLU, RMS norm, scaled rotations.

With experts in place of the MLP, the blocks are those of Mixtral.
Their arrays are annotated with logical names, which an `AxisRules` maps to axes of the mesh.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from spmdtrain.config.options import check_values
from spmdtrain.errors import UserError
from spmdtrain.kernels.attention import attention
from spmdtrain.models.layers import (
    AXIS_RULES,
    Rotation,
    RoutedExperts,
    Routing,
    StackedDecoder,
    attend_to_cache,
    check_length,
    dtype_name,
    embed_tokens,
    expert_mlp,
    normal_param,
    project_heads,
    read_with_cache,
    rms_norm,
    rotary_speeds,
    rotation,
    split_residual,
)
from spmdtrain.sharding.placement import constrain_sharding
from spmdtrain.step.layer_loop import scan_layers

LLAMA_AXIS_RULES = AXIS_RULES

PyTree = Any


@runtime_checkable
class RopeScaling(Protocol):
    """A change of the speeds of rotations."""

    def scale(self, speeds: np.ndarray) -> np.ndarray:
        """Returns the scaled speeds of rotations.

        Args:
          speeds: Radians from a token to the next, (n,).
        """
        ...


@dataclass(frozen=True, kw_only=True)
class LinearRopeScaling:
    """Rotations of a longer context by position interpolation (arXiv:2306.15595).

    Attributes:
      factor: Divides all positions.

    Raises:
      UserError: If it is not above 0 and finite.
    """

    factor: float

    def __post_init__(self) -> None:
        check_values(self, LinearRopeScaling)
        _check_factor(self.factor)

    def scale(self, speeds: np.ndarray) -> np.ndarray:
        """Returns the scaled speeds of rotations.

        Args:
          speeds: Radians from a token to the next, (n,).
        """
        return speeds / self.factor


@dataclass(frozen=True, kw_only=True)
class Llama3RopeScaling:
    """Rotations of a longer context as in Llama 3.1: slow ones are slowed down, fast ones are kept.

    A rotation is fast if it turns at least `high_freq_factor` times within the original context,
    slow if it turns at most `low_freq_factor` times, and interpolated in between. The names and
    defaults are as in `rope_scaling` of the published config.json, with `rope_type` "llama3".

    Attributes:
      factor: Divides the speed of slow rotations.
      low_freq_factor: Turns within the original context up to which a rotation is slow.
      high_freq_factor: Turns within the original context from which a rotation is fast.
      original_max_position_embeddings: The context that the model was first trained with.

    Raises:
      UserError: If a value is invalid.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        check_values(self, Llama3RopeScaling)
        _check_factor(self.factor)
        if not 0 < self.low_freq_factor < self.high_freq_factor < math.inf:
            raise UserError(
                f"low_freq_factor is {self.low_freq_factor} and high_freq_factor is "
                f"{self.high_freq_factor}: the second must be larger, and both above 0"
            )
        if self.original_max_position_embeddings < 1:
            raise UserError(
                "original_max_position_embeddings is "
                f"{self.original_max_position_embeddings}: it must be 1 or more"
            )

    def scale(self, speeds: np.ndarray) -> np.ndarray:
        """Returns the scaled speeds of rotations.

        Args:
          speeds: Radians from a token to the next, (n,).
        """
        turns = self.original_max_position_embeddings * speeds / (2 * math.pi)
        low, high = self.low_freq_factor, self.high_freq_factor
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return speeds * (kept + (1 - kept) / self.factor)


def _check_factor(factor: float) -> None:
    if not 0 < factor < math.inf:
        raise UserError(f"factor is {factor}: it must be above 0, and finite")


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """The shape of a Llama.

    Attributes:
      vocabulary: Number of tokens.
      layers: Number of blocks.
      width: Width of the residual stream.
      heads: Number of query heads.
      kv_heads: Number of key-value heads, each shared by `heads / kv_heads` query heads.
      hidden: Width inside each block's MLP, or inside each expert.
      context: The largest number of tokens of a sequence.
      rope_base: The speeds of rotations fall from 1 to nearly 1 / `rope_base`.
      rope_scaling: Changes the speeds for a longer context.
      tied: Whether the embedding is also the output layer.
      epsilon: Added to the mean square by RMS norms.
      experts: The experts of each block in place of its MLP; by default none.
      unroll: Whether to compile every layer separately: faster steps, but a compile time
        proportional to the number of layers. By default up to 12 layers.
      logits_dtype: Dtype of the logits of `losses` in memory: see `linear_cross_entropy`.

    Raises:
      UserError: If a value is invalid.
    """

    vocabulary: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    context: int
    rope_base: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    tied: bool = False
    epsilon: float = 1e-5
    experts: RoutedExperts | None = None
    unroll: bool | None = None
    logits_dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "logits_dtype", dtype_name(self.logits_dtype))
        check_values(self, LlamaConfig)
        if not isinstance(self.rope_scaling, RopeScaling | None):
            raise UserError(f"rope_scaling is {self.rope_scaling!r}: it must have a method `scale`")
        for name in ("vocabulary", "layers", "width", "heads", "kv_heads", "hidden", "context"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: it must be 1 or more")
        if self.width % self.heads:
            raise UserError(f"width {self.width} does not divide over {self.heads} heads")
        if self.head_width % 2:
            raise UserError(
                f"rotary positions rotate pairs of values, but width {self.width} over "
                f"{self.heads} heads is {self.head_width} a head: an odd number"
            )
        if self.heads % self.kv_heads:
            raise UserError(
                f"{self.heads} heads do not divide over {self.kv_heads} key-value heads: kv_heads "
                "must be a divisor of heads"
            )
        if not 1 < self.rope_base < math.inf:
            raise UserError(f"rope_base is {self.rope_base}: it must be above 1, and finite")

    def huggingface(self) -> dict[str, Any]:
        """Returns the JSON files of Hugging Face's layout by name.

        It is that of `LlamaForCausalLM`, and with experts that of `MixtralForCausalLM`.

        Raises:
          UserError: If the layout has no such scaling of rotations.
        """
        scaling: dict[str, Any] | None = None
        if isinstance(self.rope_scaling, Llama3RopeScaling):
            scaling = {"rope_type": "llama3", **asdict(self.rope_scaling)}
        elif isinstance(self.rope_scaling, LinearRopeScaling):
            scaling = {"rope_type": "linear", **asdict(self.rope_scaling)}
        routed = self.experts
        if self.rope_scaling is not None and (scaling is None or routed is not None):
            raise UserError(
                f"rope_scaling is {self.rope_scaling}, and Hugging Face's layout of "
                f"{'Mixtral' if routed else 'Llama'} has no such scaling"
            )
        config: dict[str, Any] = {
            "architectures": ["MixtralForCausalLM" if routed else "LlamaForCausalLM"],
            "model_type": "mixtral" if routed else "llama",
            "vocab_size": self.vocabulary,
            "hidden_size": self.width,
            "intermediate_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": self.context,
            "rms_norm_eps": self.epsilon,
            "rope_theta": self.rope_base,
            "hidden_act": "silu",
            "tie_word_embeddings": self.tied,
            "bos_token_id": None,
            "eos_token_id": None,
        }
        if scaling:
            config["rope_scaling"] = scaling
        if routed:
            of_experts = {"num_local_experts": routed.count, "num_experts_per_tok": routed.top_k}
            config |= {**of_experts, "sliding_window": None}
        return {"config.json": config}

    @property
    def head_width(self) -> int:
        """The width of each head."""
        return self.width // self.heads

    @property
    def speeds(self) -> np.ndarray:
        """Radians by which each pair of a head's values turns per token, f32 (head width / 2,)."""
        speeds = rotary_speeds(self.head_width, self.rope_base)
        scaling = self.rope_scaling
        scaled = speeds if scaling is None else scaling.scale(speeds)
        return scaled.astype(np.float32)


class Llama(StackedDecoder):
    """A decoder from integer tokens (B, T) to logits (B, T, `vocabulary`) of the next tokens, f32.

    With the parameters of Hugging Face's `LlamaForCausalLM` it has the same logits. It computes in
    the dtype of its parameters; norms, softmax and logits are f32. `generate` accepts it.

    Args:
      config: The shape.
      rngs: Random streams of the initialization.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        layers, width, hidden = config.layers, config.width, config.hidden
        heads, kv_heads = (config.heads, config.head_width), (config.kv_heads, config.head_width)
        # With this scale, the sum of the blocks is as large as the embedding for any number.
        into, back = width**-0.5, (2 * layers) ** -0.5

        def normal(*shape: int, std: float, names: tuple[str | None, ...]) -> nnx.Param[jax.Array]:
            return normal_param(rngs, shape, std=std, names=names)

        def stacked(*shape: int, std: float, names: tuple[str | None, ...]) -> nnx.Param[jax.Array]:
            return normal(layers, *shape, std=std, names=(None, *names))

        def scales(*shape: int) -> nnx.Param[jax.Array]:
            return nnx.Param(jnp.ones(shape, jnp.float32))

        experts = config.experts
        count, expert = ((), ()) if experts is None else ((experts.count,), ("experts",))
        self.embedding = normal(config.vocabulary, width, std=0.02, names=("vocab", "embed"))
        self.blocks = nnx.Dict(
            attention=nnx.Dict(
                norm=scales(layers, width),
                query=stacked(width, *heads, std=into, names=("embed", "heads", None)),
                key=stacked(width, *kv_heads, std=into, names=("embed", "kv_heads", None)),
                value=stacked(width, *kv_heads, std=into, names=("embed", "kv_heads", None)),
                out=stacked(*heads, width, std=into * back, names=("heads", None, "embed")),
            ),
            mlp=nnx.Dict(
                norm=scales(layers, width),
                gate=stacked(*count, width, hidden, std=into, names=(*expert, "embed", "mlp")),
                up=stacked(*count, width, hidden, std=into, names=(*expert, "embed", "mlp")),
                down=stacked(
                    *(*count, hidden, width),
                    std=hidden**-0.5 * back,
                    names=(*expert, "mlp", "embed"),
                ),
            ),
        )
        if experts is not None:
            router = stacked(width, experts.count, std=into, names=("embed", None))
            self.blocks["mlp"]["router"] = router
        self.norm = scales(width)
        if not config.tied:
            self.head = normal(config.vocabulary, width, std=into, names=("vocab", "embed"))

    def hidden(
        self,
        tokens: jax.Array,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        return self._run(tokens, segments, positions)[0]

    def hidden_and_routing(
        self,
        tokens: jax.Array,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> tuple[jax.Array, Routing]:
        """Computes `hidden`, and the values of the routers.

        Args:
          tokens: See `hidden`.
          segments: See `hidden`.
          positions: See `hidden`.

        Returns:
          (B, T, width), and the values of the routers.

        Raises:
          UserError: If the model has no experts, or T is larger than the context.
        """
        if self.config.experts is None:
            raise UserError("hidden_and_routing is for a Llama with experts, and this one has none")
        x, layers = self._run(tokens, segments, positions)
        return x, Routing.over_layers(layers)

    def _run(
        self, tokens: jax.Array, segments: jax.Array | None, positions: jax.Array | None
    ) -> tuple[jax.Array, PyTree]:
        """Returns `hidden`, and the values of each layer's router, stacked."""
        config = self.config
        check_length(tokens.shape[1], config.context)
        turn = self._rotation(tokens.shape[1] if positions is None else positions)

        def block(x: jax.Array, weights: Any) -> tuple[jax.Array, PyTree]:
            heads = self._heads(weights["attention"], x, turn)
            mixed = attention(*heads, causal=True, segments=segments)
            return self._rest_of_block(weights, x, mixed)

        weights = nnx.to_pure_dict(nnx.state(self.blocks))
        x, layers = scan_layers(block, self._embed(tokens), weights, config.unroll)
        return split_residual(rms_norm(x, self.norm[...], config.epsilon)), layers

    def extend(
        self, layers: PyTree, tokens: jax.Array, cache: PyTree, start: jax.Array
    ) -> tuple[jax.Array, PyTree]:
        """Reads tokens that follow those in the cache. See `Transformer.extend`.

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
        turn = self._rotation(positions)

        def read(x: jax.Array, weights: Any, cached: Any) -> tuple[jax.Array, Any]:
            heads = self._heads(weights["attention"], x, turn)
            mixed, cached = attend_to_cache(*heads, cached, positions)
            return self._rest_of_block(weights, x, mixed)[0], cached

        x, cache = read_with_cache(read, self._embed(tokens), layers, cache)
        return rms_norm(x, self.norm[...], self.config.epsilon), cache

    def _embed(self, tokens: jax.Array) -> jax.Array:
        x = embed_tokens(self.embedding[...], tokens, self.config.vocabulary)
        return split_residual(x)

    def _rotation(self, positions: int | jax.Array) -> Rotation:
        return rotation(positions, self.config.speeds)

    def _heads(
        self, weights: dict[str, jax.Array], x: jax.Array, turn: Rotation
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns queries and keys, rotated, and values: (B, T, heads, head width)."""
        x = rms_norm(x, weights["norm"], self.config.epsilon)
        query, key, value = (project_heads(x, weights[name]) for name in ("query", "key", "value"))
        return turn(query), turn(key), value

    def _rest_of_block(
        self, weights: dict[str, dict[str, jax.Array]], x: jax.Array, mixed: jax.Array
    ) -> tuple[jax.Array, Routing | None]:
        """Returns the output of a block (B, T, width), and the values of its router if it has one.

        Args:
          x: (B, T, width), the input of the block.
          mixed: (B, T, heads, head width), from its attention.
        """
        mixed = constrain_sharding(mixed, "batch", "context", "tensor", None)
        x = x + jnp.einsum("btnh,nhd->btd", mixed, weights["attention"]["out"])
        x = split_residual(x)
        mlp = weights["mlp"]
        normal = rms_norm(x, mlp["norm"], self.config.epsilon)
        if self.config.experts is not None:
            y, routing = expert_mlp(normal, mlp, self.config.experts)
            return split_residual(x + y), routing
        gate, up = (
            constrain_sharding(normal @ mlp[name], "batch", "context", "tensor")
            for name in ("gate", "up")
        )
        x = x + (jax.nn.silu(gate) * up) @ mlp["down"]
        return split_residual(x), None

"""Layers of the shipped models: activations, norms, rotary positions, projections."""

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from spmdtrain.config.options import check_values
from spmdtrain.errors import UserError
from spmdtrain.kernels.experts import Dot, experts
from spmdtrain.kernels.linear_cross_entropy import LogitLayer, TokenLosses, linear_cross_entropy
from spmdtrain.kernels.reference import optimized_implementation, uses_reference
from spmdtrain.sharding.placement import constrain_sharding, current_device, current_mesh
from spmdtrain.sharding.rules import AxisRules, Rule
from spmdtrain.step.layer_loop import unrolls

# -- Activation functions with gradients for training ----------------------------------------------


@jax.custom_jvp
def squared_relu(x: jax.Array) -> jax.Array:
    """Returns the square of positive values, and 0 for others (arXiv:2109.08668).

    Its gradient needs only the positive part. The gradient of `jax.nn.relu` also needs a
    stored mask of the positive values, which a TPU packs into bits.

    Args:
      x: Any shape.
    """
    return jnp.square(jax.nn.relu(x))


@squared_relu.defjvp
def _squared_relu_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    positive = jnp.maximum(primals[0], 0)
    return jnp.square(positive), 2 * positive * tangents[0]


# -- Normalization of the last dim, computed in f32 for any dtype ----------------------------------


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """Returns values divided by their root mean square, scaled (arXiv:1910.07467).

    Args:
      x: (..., width).
      scale: (width,).
      epsilon: Added to the mean square.
    """
    return _scaled(x.astype(jnp.float32), scale, epsilon).astype(x.dtype)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float) -> jax.Array:
    """Returns values of mean 0 and variance 1, scaled and shifted (arXiv:1607.06450).

    Args:
      x: (..., width).
      scale: (width,).
      bias: (width,).
      epsilon: Added to the variance.
    """
    wide = x.astype(jnp.float32)
    normal = _scaled(wide - wide.mean(axis=-1, keepdims=True), scale, epsilon)
    return (normal + jax.lax.broadcast_to_rank(bias.astype(jnp.float32), x.ndim)).astype(x.dtype)


def _scaled(wide: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    scale = jax.lax.broadcast_to_rank(scale.astype(jnp.float32), wide.ndim)
    return wide * jax.lax.rsqrt(mean_square + epsilon) * scale


# -- The residual stream between the blocks of a transformer, split over devices -------------------


def split_residual(x: jax.Array) -> jax.Array:
    """Returns a residual stream, (B, T, width), with its tokens split over "context" and "tensor".

    Each device of "tensor" then adds, normalizes and drops out its part of the tokens alone, and
    keeps only this part for the backward pass. The sum over "tensor" at the end of each half of a
    block becomes a reduce-scatter, and the next half gathers the tokens after its norm. In the
    forward pass both together send as many bytes as the all-reduce; the backward pass gathers the
    tokens once more (sequence parallelism, Korthikanti et al. 2022, arXiv:2205.05198). Tokens that
    do not divide over "tensor" are whole on each of its devices.

    Args:
      x: (B, T, width).
    """
    return constrain_sharding(x, "batch", ("context", "tensor"), None)


# -- Rotary positions, for the shipped models ------------------------------------------------------

Rotation = Callable[[jax.Array], jax.Array]
"""Rotates queries or keys (B, T, heads, head width) by the positions of their tokens."""

_MAX_TABLE = 2**20  # elements of a table that is a constant of the program


def rotary_speeds(width: int, base: float) -> np.ndarray:
    """Returns the radians by which each pair of values turns from a token to the next.

    Args:
      width: Width of a head, an even number.
      base: The speeds fall from 1 to nearly 1 / base.

    Returns:
      f64 (width / 2,).
    """
    speeds: np.ndarray = float(base) ** (-np.arange(0, width, 2) / width)
    return speeds


def rotation(positions: int | jax.Array, speeds: np.ndarray) -> Rotation:
    """Returns a function that rotates (B, T, heads, width) by each token's position.

    The product of a query and a key then depends on their distance, not on their positions (rotary
    position embedding, Su et al. 2021, arXiv:2104.09864). A pair has one value of each half of the
    head. In bfloat16 on TPUs the rotation has no forward-mode derivatives (`jax.jvp`).

    Args:
      positions: Each token's position, int (B, T); or the number of tokens T, for positions from 0
        to T - 1.
      speeds: (width / 2,), radians from a token to the next, used as f32.
    """
    cos, sin = _tables(positions, speeds.astype(np.float32))
    on_tpu = current_device().platform == "tpu" and not uses_reference()
    join = np.concatenate if isinstance(cos, np.ndarray) else jnp.concatenate
    of_halves = (join((cos, cos), axis=-1), join((-sin, sin), axis=-1)) if on_tpu else None

    def turn(x: jax.Array) -> jax.Array:
        # A TPU rounds the factors of a product to bfloat16, so those of other dtypes would change.
        if of_halves is not None and x.dtype == jnp.bfloat16:
            return _turn_with_swap(x, *of_halves)
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        turned = jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)
        return turned.astype(x.dtype)

    return turn


@jax.custom_vjp
def _turn_with_swap(x: jax.Array, cos: Any, sin: Any) -> jax.Array:
    """Returns `x` rotated, with its halves swapped by a product.

    A TPU's vector unit works on 128 adjacent values, so it needs as long for half of a head as for
    a whole one, and longer to join two halves. A product with a permutation matrix swaps the
    halves in the matrix unit, and XLA computes all of the rotation in the pass of this product.

    Args:
      x: bf16 (B, T, heads, width).
      cos: f32 (B or 1, T, 1, width), the cosine of each value's angle.
      sin: f32, the same shape, the sine, negative in the first half.
    """
    half = x.shape[-1] // 2
    swap = jnp.asarray(np.roll(np.eye(2 * half), half, axis=0), x.dtype)
    with optimized_implementation():
        swapped = jnp.einsum("btnh,hk->btnk", x, swap, preferred_element_type=jnp.float32)
    return (x.astype(jnp.float32) * cos + swapped * sin).astype(x.dtype)


def _turn_forward(x: jax.Array, cos: Any, sin: Any) -> tuple[jax.Array, tuple[Any, Any]]:
    return _turn_with_swap(x, cos, sin), (cos, sin)


def _turn_backward(kept: tuple[Any, Any], gradient: jax.Array) -> tuple[jax.Array, None, None]:
    # Rotated by the negative angle: the transposed product would round to bfloat16 before the sum.
    cos, sin = kept
    return _turn_with_swap(gradient, cos, -sin), None, None


_turn_with_swap.defvjp(_turn_forward, _turn_backward)


def _tables(positions: int | jax.Array, speeds: np.ndarray) -> tuple[Any, Any]:
    """Returns the cosines and sines of the angles, f32 (B or 1, T, 1, width / 2).

    For a known number of positions they are constants. XLA:CPU would compute them again in each
    operation that uses them, which took a twentieth of a small transformer's step.
    """
    if not isinstance(positions, int):
        angles = positions[..., None, None].astype(jnp.float32) * speeds[None, None, None]
        return jnp.cos(angles), jnp.sin(angles)
    if positions * speeds.size > _MAX_TABLE:
        return _tables(jnp.arange(positions)[None], speeds)
    known = np.arange(positions, dtype=np.float32)[None, :, None, None] * speeds
    # In f64: NumPy's f32 functions have other bits on other processors, and f64 ones hardly ever
    # after they are rounded.
    angles = known.astype(np.float64)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


# -- Projections of tokens to the heads of attention, in the order that is fastest on the device


def project_heads(x: jax.Array, kernel: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Returns queries, keys or values, (B, T, heads, head width).

    Args:
      x: (B, T, width).
      kernel: (width, heads, head width).
      bias: (heads, head width) or None.
    """
    if not _heads_come_first():
        heads = jnp.einsum("btd,dnh->btnh", x, kernel)
        heads = heads if bias is None else heads + bias[None, None]
        return constrain_sharding(heads, "batch", "context", "tensor", None)
    heads = jnp.einsum("btd,dnh->bnth", x, kernel)
    heads = heads if bias is None else heads + bias[None, :, None]
    return jnp.swapaxes(constrain_sharding(heads, "batch", "tensor", "context", None), 1, 2)


def project_qkv(
    x: jax.Array, kernel: jax.Array, bias: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns queries, keys and values, each (B, T, heads, head width).

    Args:
      x: (B, T, width).
      kernel: (width, 3, heads, head width).
      bias: (3, heads, head width) or None.
    """
    if _heads_come_first():
        query, key, value = (
            project_heads(x, kernel[:, i], None if bias is None else bias[i]) for i in range(3)
        )
        return query, key, value
    if _uses_three_products():
        projected = _three_products(x, kernel)
        if bias is not None:
            projected = tuple(part + bias[i][None, None] for i, part in enumerate(projected))
        query, key, value = (
            constrain_sharding(part, "batch", "context", "tensor", None) for part in projected
        )
        return query, key, value
    # In the order of the product, because another order would be a copy.
    qkv = jnp.einsum("btd,dcnh->btcnh", x, kernel)
    if bias is not None:
        qkv += bias[None, None]
    return _split(constrain_sharding(qkv, "batch", "context", None, "tensor", None))


def _split(qkv: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the parts of an array (B, T, 3, heads, head width), each without the third dim."""
    # The gradient of a split is one concatenation; that of three slices pads and adds three times.
    query, key, value = (part[:, :, 0] for part in jax.lax.split(qkv, (1, 1, 1), axis=2))
    return query, key, value


def _uses_three_products() -> bool:
    """Returns whether `_three_products` is used: on GPUs, unless heads are split over devices.

    With split heads, the tokens of `x` would be gathered for each of the three products.
    """
    over = current_mesh()
    return current_device().platform == "gpu" and over is not None and over.parts("tensor") == 1


@jax.custom_jvp
def _three_products(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, ...]:
    """Returns queries, keys and values from three separate products, without a bias.

    cuDNN's attention reads arrays that are contiguous, so parts of the result of one product would
    be copied.
    """
    projected = []
    for i in range(3):
        projected.append(jnp.einsum("btd,dnh->btnh", x, kernel[:, i]))
        x = jax.lax.optimization_barrier(x)  # XLA computes products of the same array as one
    return tuple(projected)


@_three_products.defjvp
def _three_products_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    (x, kernel), (x_change, kernel_change) = primals, tangents
    # One product each, because the gradient of `x` would otherwise be the sum of three results.
    change = jnp.einsum("btd,dcnh->btcnh", x_change, kernel)
    change += jnp.einsum("btd,dcnh->btcnh", x, kernel_change)
    return _three_products(x, kernel), _split(change)


def _heads_come_first() -> bool:
    """Returns whether each head's tokens are adjacent: the order of the TPU's attention kernel.

    Each array is then the result of a separate product, because a part of a larger one would be
    copied before the kernel reads it.
    """
    return current_device().platform == "tpu"


# -- Parameters that are annotated with logical names of their dims --------------------------------

# Over "tensor" each device has some of the heads and hidden values, so that each half of a block
# ends with one sum over it (see `split_residual`).
AXIS_RULES = AxisRules(
    {
        "vocab": "tensor",
        "embed": "fsdp",
        "heads": "tensor",
        "kv_heads": "tensor",
        "mlp": "tensor",
        "experts": "expert",
    }
)
"""The axis of each name. Parameters carry these rules; `axis_rules` of a run replace entries."""


def normal_param(
    rngs: nnx.Rngs, shape: tuple[int, ...], *, std: float, names: tuple[str | None, ...]
) -> nnx.Param[jax.Array]:
    """Returns a parameter with draws of a normal distribution of mean 0, f32.

    Args:
      rngs: Its stream `params` is used.
      shape: The shape.
      std: The standard deviation.
      names: For each dim the logical name, or None for a dim that is never split.
    """
    return annotated_param(std * jax.random.normal(rngs.params(), shape, jnp.float32), names)


def annotated_param(value: jax.Array, names: tuple[str | None, ...]) -> nnx.Param[jax.Array]:
    """Returns a parameter whose annotation a run reads.

    Args:
      value: The array.
      names: For each dim the logical name, or None for a dim that is never split.
    """
    # Without eager sharding, because Flax would need axes of a mesh in place of names.
    rules = AXIS_RULES.pairs
    return nnx.Param(value, eager_sharding=False, out_sharding=names, sharding_rules=rules)


# -- Attention of new tokens to cached keys and values ---------------------------------------------


def cache_array(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Returns zeros for keys or values: the batch split over devices, the heads over "tensor".

    Args:
      shape: (..., B, heads, length, head width).
      dtype: Of the keys or values.
    """
    layers = [None] * (len(shape) - 4)
    return constrain_sharding(jnp.zeros(shape, dtype), *layers, "batch", "tensor", None, None)


def attend_to_cache(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cached: tuple[jax.Array, jax.Array],
    positions: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Returns each head's mixed values (B, T, heads, head width), and the extended cache.

    A token attends to positions up to and including its own.

    Args:
      query: (B, T, heads, head width), of the new tokens.
      key: (B, T, key-value heads, head width), written to the cache. Each key-value head is shared
        by the same number of consecutive query heads.
      value: As `key`.
      cached: Keys and values (B, key-value heads, length, head width).
      positions: int (B, T), the positions in the cache: T consecutive ones in each row.
    """

    @jax.vmap
    def put(row: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
        first = jnp.zeros_like(start)  # of the same dtype, which `jnp.int64` may not be
        return jax.lax.dynamic_update_slice(row, new, (first, start, first))

    query, key, value = (jnp.swapaxes(part, 1, 2) for part in (query, key, value))
    keys, values = (
        constrain_sharding(put(old, new, positions[:, 0]), "batch", "tensor", None, None)
        for old, new in zip(cached, (key, value), strict=True)
    )
    rows, heads, count, width = query.shape
    query = query.reshape(rows, keys.shape[1], -1, count, width)
    # The heads come before the positions: `jax.nn.dot_product_attention` takes the other order,
    # and would transpose the whole cache for each token.
    scores = jnp.einsum("bngth,bnlh->bngtl", query, keys, preferred_element_type=jnp.float32)
    everywhere = jnp.arange(keys.shape[2], dtype=positions.dtype)
    seen = everywhere[None, None] <= positions[..., None]
    scores = jnp.where(seen[:, None, None], scores * width**-0.5, -jnp.inf)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    mixed = jnp.einsum("bngtl,bnlh->btngh", probabilities, values)
    return mixed.reshape(rows, count, heads, width), (keys, values)


# -- MLPs of experts for the blocks of decoders, and the values of their routers -------------------


@dataclass(frozen=True, kw_only=True)
class RoutedExperts:
    """The experts of each block, of which a router chooses some for each token.

    Attributes:
      count: Number of experts.
      top_k: Number of experts for each token.
      normalize: Whether the weights of a token's experts, their probabilities, are divided by their
        sum.

    Raises:
      UserError: If `top_k` is not from 1 to `count`.
    """

    count: int
    top_k: int
    normalize: bool = True

    def __post_init__(self) -> None:
        check_values(self, RoutedExperts)
        if not 1 <= self.top_k <= self.count:
            raise UserError(
                f"each token has {self.top_k} of {self.count} experts: it must have at least 1, "
                "and at most all"
            )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routing:
    """The values of a model's routers; see `ExpertOutput`.

    Attributes:
      balance: f32 (B,), the load-balance loss, the mean over layers: 1 if all experts are equally
        probable.
      z: f32 (B,), the mean over layers of the squared normalizer of the logits.
      entropy: f32 (B,), the mean over layers of the entropy of the probabilities, in nats.
      load: f32 (B, layers, experts), the number of choices for each expert; for one layer (B,
        experts).
      overflow: f32 scalar, the number of layers that gathered all tokens.
    """

    balance: jax.Array
    z: jax.Array
    entropy: jax.Array
    load: jax.Array
    overflow: jax.Array

    @classmethod
    def over_layers(cls, layers: "Routing") -> "Routing":
        """Returns the values of a model from the values of its layers.

        Args:
          layers: The values of the layers; the first dim of each array is the layer.
        """
        balance, z, entropy = (x.mean(0) for x in (layers.balance, layers.z, layers.entropy))
        load = jnp.swapaxes(layers.load, 0, 1)
        return cls(balance, z, entropy, load, layers.overflow.sum())


def peak_load(load: Any) -> Any:
    """Returns the load of the busiest expert divided by the mean load, averaged over layers.

    It is 1 if all experts are chosen equally often, and the number of experts over `top_k` if all
    tokens choose the same.

    Args:
      load: A JAX or NumPy array (..., layers, experts): the number of choices for each expert.
    """
    return (load.max(-1) / load.mean(-1)).mean(-1)


def expert_mlp(
    x: jax.Array, weights: dict[str, jax.Array], config: RoutedExperts
) -> tuple[jax.Array, Routing]:
    """Computes each token with the SwiGLU of some of the experts.

    The router computes in f32.

    Args:
      x: (B, T, width).
      weights: `router` (width, experts), `gate` and `up` (experts, width, hidden), `down` (experts,
        hidden, width).
      config: The experts.

    Returns:
      (B, T, width), and the values of the router.
    """
    # On a TPU, a product of f32 arrays is one of bfloat16 by default.
    precise = jax.lax.Precision.HIGHEST
    router = weights["router"].astype(jnp.float32)
    logits = jnp.einsum("btd,de->bte", x.astype(jnp.float32), router, precision=precise)
    kernels = {name: weights[name] for name in ("gate", "up", "down")}
    y = experts(x, logits, kernels, _swiglu, top_k=config.top_k, normalize=config.normalize)
    return y.output, Routing(y.balance, y.z, y.entropy, y.load, y.overflow)


def _swiglu(rows: jax.Array, kernels: dict[str, jax.Array], dot: Dot) -> jax.Array:
    active = jax.nn.silu(dot(rows, kernels["gate"])) * dot(rows, kernels["up"])
    return dot(active, kernels["down"])


# -- The parts of decoders that do not depend on the kind of their blocks --------------------------

PyTree = Any


def embed_tokens(embedding: jax.Array, tokens: jax.Array, vocabulary: int) -> jax.Array:
    """Returns the rows of an embedding, (B, T, width).

    Args:
      embedding: (at least `vocabulary`, width).
      tokens: int (B, T). Any that is not from 0 to `vocabulary` - 1 is embedded as NaN.
      vocabulary: Number of tokens.
    """
    # "tensor" splits the rows of the embedding. Each of its devices needs all tokens, to look up
    # those that are in its rows.
    tokens = constrain_sharding(tokens, "batch", "context")
    # Looked up in f32, so that the gradients of frequent tokens are added up in f32.
    x = embedding.astype(jnp.float32)[tokens].astype(embedding.dtype)
    x = constrain_sharding(x, "batch", "context", None)
    # Indexing clamps other numbers, or counts from the end: the loss would be that of other data.
    known = (tokens >= 0) & (tokens < vocabulary)
    return jnp.where(known[..., None], x, jnp.nan)


def token_logits(x: jax.Array, head: jax.Array) -> jax.Array:
    """Returns the logits of the next tokens, f32 (B, T, rows), split over "context" and "tensor".

    Args:
      x: (B, T, width).
      head: (rows, width).
    """
    logits = jnp.einsum("btd,vd->btv", x, head, preferred_element_type=jnp.float32)
    return constrain_sharding(logits, "batch", "context", "tensor")


def dtype_name(dtype: Any) -> Any:
    """Returns the name of a dtype.

    Args:
      dtype: The dtype; anything else is returned as it is.
    """
    try:
        return np.dtype(dtype).name
    except TypeError:
        return dtype


def check_length(length: int, context: int) -> None:
    """Checks that a sequence fits.

    Args:
      length: Its number of tokens.
      context: The largest number.

    Raises:
      UserError: If it is longer.
    """
    if length > context:
        raise UserError(f"a sequence has {length} tokens, but the model's context is {context}")


class StackedDecoder(nnx.Module):
    """A decoder whose `blocks` are arrays with a first dim for the layer.

    Its `config` has the integers `vocabulary`, `layers`, `kv_heads`, `head_width` and `context`,
    and `tied`, `unroll` and `logits_dtype`. Keys and values have the dtype of its `embedding`,
    which may have more rows than there are tokens. Without `tied`, `head` is the output layer.
    """

    config: Any
    embedding: nnx.Param[jax.Array]
    head: nnx.Param[jax.Array]
    blocks: nnx.Dict[Any]

    def __call__(
        self,
        tokens: jax.Array,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """Computes the logits of the next tokens; for the arguments see `hidden`."""
        return self.logits(self.hidden(tokens, segments, positions))

    def hidden(
        self,
        tokens: jax.Array,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """Computes the values from which `logits` computes the logits of the next tokens.

        Args:
          tokens: int (B, T), from 0 to `vocabulary` - 1. Any other makes logits NaN.
          segments: int (B, T), the number of each token's document within its row, if a row holds
            several: a token attends to its own document only.
          positions: int (B, T), each token's position within its document, below the context; by
            default the positions within the row.

        Returns:
          (B, T, width).

        Raises:
          UserError: If T is larger than the context.
        """
        raise NotImplementedError

    def logits(self, x: jax.Array) -> jax.Array:
        """Returns the logits of the next tokens, -1e9 for rows of the output layer without a token.

        Args:
          x: (B, T, width), from `hidden` or `extend`.

        Returns:
          f32 (B, T, rows of the output layer).
        """
        layer = LogitLayer(self.config.vocabulary, None, np.dtype(np.float32))
        return layer.logits(token_logits(x, self._output_layer()), None)

    def token_losses(
        self,
        tokens: jax.Array,
        targets: jax.Array,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
        *,
        z_loss: float = 0.0,
    ) -> TokenLosses:
        """Computes the cross-entropy of the next tokens: see `linear_cross_entropy`.

        Args:
          tokens: See `hidden`.
          targets: int (B, T), the token after each.
          segments: See `hidden`.
          positions: See `hidden`.
          z_loss: See `linear_cross_entropy`.

        Returns:
          The losses, (B, T).
        """
        return self.losses(self.hidden(tokens, segments, positions), targets, z_loss=z_loss)

    def losses(self, x: jax.Array, targets: jax.Array, *, z_loss: float = 0.0) -> TokenLosses:
        """Computes the cross-entropy of the next tokens: see `linear_cross_entropy`.

        Args:
          x: (B, T, width), from `hidden`.
          targets: int (B, T), the token after each.
          z_loss: See `linear_cross_entropy`.

        Returns:
          The losses, (B, T).
        """
        return linear_cross_entropy(
            x,
            self._output_layer(),
            targets,
            vocabulary=self.config.vocabulary,
            z_loss=z_loss,
            logits_dtype=self.config.logits_dtype,
        )

    def _unrolls(self) -> bool:
        return unrolls(self.config.layers, self.config.unroll)

    def _output_layer(self) -> jax.Array:
        return self.embedding[...] if self.config.tied else self.head[...]

    def layers(self) -> PyTree:
        """Returns the weights of the blocks as `extend` takes them.

        Call it outside of a loop over `extend`, because it copies the weights of unrolled layers.
        """
        weights = nnx.to_pure_dict(nnx.state(self.blocks))
        if not self._unrolls():
            return weights
        return [
            jax.tree.map(operator.itemgetter(layer), weights) for layer in range(self.config.layers)
        ]

    def empty_cache(self, rows: int, length: int) -> PyTree:
        """Returns a cache of keys and values for `extend`, of zeros.

        Args:
          rows: Number of rows B.
          length: The number of tokens of a row that it can hold, at most the context.

        Returns:
          Pairs of arrays of shape (B, key-value heads, `length`, head width) in the dtype of the
          parameters, one pair for each unrolled layer; in a loop one pair, in which the layer is
          the first dim.

        Raises:
          UserError: If `length` is larger than the context.
        """
        config, dtype = self.config, self.embedding[...].dtype
        if length > config.context:
            raise UserError(
                f"a cache of {length} tokens, but the model's context is {config.context}"
            )
        shape = (rows, config.kv_heads, length, config.head_width)
        if self._unrolls():
            return [(cache_array(shape, dtype),) * 2 for _ in range(config.layers)]
        return (cache_array((config.layers, *shape), dtype),) * 2


def read_with_cache(
    read: Callable[[jax.Array, PyTree, PyTree], tuple[jax.Array, PyTree]],
    x: jax.Array,
    layers: PyTree,
    cache: PyTree,
) -> tuple[jax.Array, PyTree]:
    """Calls a block for each layer, with the layer's keys and values.

    Args:
      read: A function of (x, weights, cached) of one layer that returns the new x, and the keys
        and values extended by the new tokens.
      x: (B, T, width), the embedded new tokens.
      layers: The weights of each layer as a list, or stacked.
      cache: From `StackedDecoder.empty_cache`, of unrolled layers if `layers` is a list.

    Returns:
      x after the last layer, and the extended cache.
    """
    if isinstance(layers, list):
        after = []
        for weights, cached in zip(layers, cache, strict=True):
            x, cached = read(x, weights, cached)
            after.append(cached)
        return x, after

    def read_layer(carry: tuple[jax.Array, PyTree], layer: Any) -> tuple[Any, None]:
        x, cache = carry
        weights, index = layer
        x, cached = read(x, weights, jax.tree.map(lambda array: array[index], cache))
        # One array, which is updated in place.
        cache = jax.tree.map(lambda array, new: array.at[index].set(new), cache, cached)
        return (x, cache), None

    count = len(jax.tree.leaves(layers)[0])
    (x, cache), _ = jax.lax.scan(read_layer, (x, cache), (layers, jnp.arange(count)))
    return x, cache


# -- A multi-layer perceptron ----------------------------------------------------------------------


def mlp_rules(layers: int) -> tuple[Rule, ...]:
    """Returns the sharding rules of an `MLP` for the axis "tensor".

    Layers are split in pairs: each device has some outputs of the first layer and the same inputs
    of the second, so that a pair needs one all-reduce. A last layer without a partner is
    replicated, because the number of classes may not divide.

    Args:
      layers: Number of layers, one more than the hidden widths.
    """
    rules = []
    for first in range(0, layers - 1, 2):
        rules += [
            Rule(f"layers/{first}/kernel$", PartitionSpec(None, "tensor")),
            Rule(f"layers/{first}/bias$", PartitionSpec("tensor")),
            Rule(f"layers/{first + 1}/kernel$", PartitionSpec("tensor", None)),
        ]
    return tuple(rules)


MLP_RULES = mlp_rules(2)
"""The rules of the first two layers, which every MLP with a hidden layer has."""


class MLP(nnx.Module):
    """Dense layers with ReLU between them, from (B, ...) to (B, `features_out`).

    All but the first dim of the input are flattened.

    Args:
      features_in: Number of values of an example.
      hidden: Widths of the hidden layers.
      features_out: Number of outputs.
      dropout: Fraction of the hidden values dropped in training.
      rngs: Random streams of the initialization and of dropout.

    Raises:
      UserError: If a width is below 1, or the dropout is outside [0, 1).
    """

    def __init__(
        self,
        features_in: int,
        hidden: Sequence[int],
        features_out: int,
        *,
        dropout: float = 0.0,
        rngs: nnx.Rngs,
    ) -> None:
        sizes = (features_in, *hidden, features_out)
        if min(sizes) < 1:
            raise UserError(f"hidden gives layers of {sizes} values: each must have 1 or more")
        if not 0 <= dropout < 1:
            raise UserError(f"dropout is {dropout}: it must be at least 0 and below 1")
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in itertools.pairwise(sizes)])
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0], -1)
        for layer in self.layers[:-1]:
            x = self.dropout(nnx.relu(layer(x)))
        return self.layers[-1](x)

"""Cross-entropy of a linear layer's logits, without all logits in memory."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from numbers import Integral, Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from spmdtrain.errors import UserError
from spmdtrain.kernels.reference import optimized_implementation, uses_reference
from spmdtrain.kernels.varying import varying_alike
from spmdtrain.kernels.whole_logits import (
    LogitLayer,
    logit_gradients,
    normalizers_and_largest,
    product,
    values_of_logits,
)
from spmdtrain.sharding.mesh import BATCH_AXES
from spmdtrain.sharding.placement import current_device, current_mesh
from spmdtrain.xla.chips import memory_of

# A backward pass that computes the logits a second time costs a third of the layer's time, so it
# pays only if the logits are a large part of a device's memory.
_MAX_WHOLE_SHARE = 1 / 8
_USUAL_MEMORY = 16 * 2**30  # of devices whose memory is not known
# Each chunk reads and writes the gradient of `head` once, so chunks are as large as is harmless.
# With 2 GiB instead of 512 MiB, `plan` estimates 3 % less time for Llama 3.2 1B on an H100, and 1 %
# more on a TPU v5p.
_CHUNK_BYTES = 2**29
_CHUNK_SHARE_OF_GPU = 1 / 32  # of its memory
_LOGITS_DTYPES = tuple(map(np.dtype, (jnp.float32, jnp.bfloat16)))
_TILE_ROWS = 128  # of the matrix units of GPUs and TPUs: a chunk has a multiple of them if possible


class TokenLosses(NamedTuple):
    """The losses of tokens, (...).

    Attributes:
      loss: Cross-entropy in nats, and `z_loss`; f32.
      correct: Whether no other token has a larger logit than the target.
      z_loss: The part of the loss that keeps the logits' normalizers near 0; f32.
    """

    loss: jax.Array
    correct: jax.Array
    z_loss: jax.Array


def linear_cross_entropy(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    bias: jax.Array | None = None,
    vocabulary: int | None = None,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    logits_dtype: Any = jnp.float32,
    chunks: int | None = None,
) -> TokenLosses:
    """Computes the cross-entropy of the logits `hidden @ head.T + bias`.

    If the logits of a device need more than an eighth of its memory (more than 2 GiB if its kind is
    not known, as on CPU), they are computed for one chunk of its tokens after the other, in the
    backward pass again, and no two chunks are in memory. Values and gradients are those of whole
    logits up to rounding. On a mesh each device computes its own tokens, and its own rows of `head`
    if these are split over "tensor". Chunks, and arrays or logits of 16 bits, have no forward-mode
    derivatives.

    Args:
      hidden: (..., D), such as (B, T, D); the first of several leading dims is that of the batch.
      head: (V, D), in the dtype of `hidden`.
      targets: int (...), from 0 to `vocabulary` - 1. The loss of any other is NaN. Leave it out by
        a weight of 0 in the (values, weights) of an objective, or by `jnp.where`, because 0 times
        NaN is NaN.
      bias: (V,), added to the logits.
      vocabulary: Number of tokens; rows of `head` from this one on have no token. By default V.
      z_loss: Coefficient of the square of the logits' normalizer log(sum(exp(logits))), which is
        added to the loss ("PaLM", arXiv 2204.02311, section 5).
      soft_cap: Bounds the logits: soft_cap * tanh(logits / soft_cap) ("Gemma 2", arXiv 2408.00118).
      logits_dtype: Dtype of the products of `hidden` and `head` in memory: float32 or bfloat16. All
        sums over them are f32. In bfloat16 they take half the memory, so larger ones are computed
        whole, and less time on GPUs. Each logit is rounded, which changes losses, gradients and,
        because equal logits count as correct, the accuracy.
      chunks: Number of chunks of each device's tokens; by default by size.

    Returns:
      The losses of the tokens.

    Raises:
      UserError: If an argument is invalid.
    """
    _check(hidden, head, targets, bias, vocabulary, soft_cap, chunks)
    if isinstance(z_loss, Real) and not 0 <= z_loss < math.inf:
        raise UserError(f"linear_cross_entropy: z_loss is {z_loss}: it must be 0 or more")
    dtype = _checked_dtype(logits_dtype)
    layer = LogitLayer(len(head) if vocabulary is None else vocabulary, soft_cap, dtype)
    layout = _Layout.of(hidden, head)
    if chunks is None:
        parts = targets.size // layout.token_parts, len(head) // layout.row_parts
        chunks = _chunks_by_size(*parts, dtype.itemsize)
    hidden, head, bias, targets = varying_alike((hidden, head, bias, targets))
    if chunks == 1 or uses_reference():
        normalizers, chosen, correct = values_of_logits(layer, hidden, head, bias, targets)
    else:
        chunked = _Chunked(layer, layout, chunks)
        with optimized_implementation():
            normalizers, chosen, correct = _in_chunks(chunked, hidden, head, bias, targets)
    # Otherwise a target without a logit, such as -100, would only push all logits down.
    known = (targets >= 0) & (targets < layer.vocabulary)
    loss, correct = jnp.where(known, normalizers - chosen, jnp.nan), correct & known
    if not z_loss:
        return TokenLosses(loss, correct, jnp.zeros_like(loss))
    extra = z_loss * jnp.square(normalizers)
    return TokenLosses(loss + extra, correct, extra)


def _check(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    bias: jax.Array | None,
    vocabulary: int | None,
    soft_cap: float | None,
    chunks: int | None,
) -> None:
    shapes = {"hidden": hidden.shape, "head": head.shape, "targets": targets.shape}
    fits = head.ndim == 2 and hidden.shape == (*targets.shape, head.shape[1])
    if bias is not None:
        shapes["bias"] = bias.shape
        fits = fits and bias.shape == head.shape[:1]
    if not fits or not targets.ndim:
        raise UserError(
            f"linear_cross_entropy: shapes {shapes} do not fit: they must be hidden (..., D), "
            "head (V, D), targets (...) and bias (V,)"
        )
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise UserError(f"linear_cross_entropy: targets are {targets.dtype}: they must be integers")
    for name, value, least, most in (
        ("vocabulary", vocabulary, 1, len(head)),
        ("soft_cap", soft_cap, 1e-6, math.inf),
        ("chunks", chunks, 1, math.inf),
    ):
        if value is None:
            continue
        if name != "soft_cap" and not isinstance(value, Integral):
            raise UserError(f"linear_cross_entropy: {name} is {value!r}: it must be an integer")
        if not least <= value <= most:
            bound = "" if most == math.inf else f" and at most the {most} rows of head"
            raise UserError(
                f"linear_cross_entropy: {name} is {value}: it must be at least {least}{bound}"
            )


def _checked_dtype(dtype: Any) -> np.dtype[Any]:
    """Returns `logits_dtype` as NumPy's; raises `UserError` unless it is float32 or bfloat16."""
    with contextlib.suppress(TypeError):
        if (checked := np.dtype(dtype)) in _LOGITS_DTYPES:
            return checked
    raise UserError(
        f"linear_cross_entropy: logits_dtype is {dtype!r}: it must be float32 or bfloat16"
    )


def _chunks_by_size(tokens: int, rows: int, itemsize: int) -> int:
    """Returns the number of chunks for a device's tokens and rows of the vocabulary.

    `itemsize` is the number of bytes of a logit.
    """
    size, device = itemsize * tokens * rows, current_device()
    memory = memory_of(device.device_kind) or _USUAL_MEMORY
    if size <= _MAX_WHOLE_SHARE * memory:
        return 1
    share = _CHUNK_SHARE_OF_GPU if device.platform == "gpu" else 0
    fewest = -(-size // max(_CHUNK_BYTES, int(share * memory)))
    whole_tiles = (n for n in range(fewest, 2 * fewest) if tokens % (n * _TILE_ROWS) == 0)
    return next(whole_tiles, fewest)


# -- chunks ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layout:
    """The split of tokens and of the vocabulary over devices.

    Attributes:
      mesh: The mesh for `jax.shard_map`; None for the mesh of JAX's context.
      axes: Its axes that are not manual yet; none if each device computes alone, or if XLA
        partitions the code.
      batch: The axes that split the leading dim of the tokens.
      context: The axis that splits the second dim of the tokens.
      tensor: The axis that splits the rows of `head`.
    """

    mesh: Mesh | None = None
    axes: tuple[str, ...] = ()
    batch: tuple[str, ...] = ()
    context: str | None = None
    tensor: str | None = None
    token_parts: int = 1
    row_parts: int = 1

    @classmethod
    def of(cls, hidden: jax.Array, head: jax.Array) -> "_Layout":
        """Returns the layout of these arrays; what does not divide is not split."""
        over = current_mesh()
        if over is None or not over.free:
            return cls()
        shards, columns = over.parts(*BATCH_AXES), over.parts("tensor")
        shards = shards if hidden.shape[0] % shards == 0 else 1
        columns = columns if len(head) % columns == 0 else 1
        batch = tuple(axis for axis in BATCH_AXES if axis in over.free) if shards > 1 else ()
        tensor = "tensor" if columns > 1 else None
        tokens = over.parts("context")
        divides = tokens > 1 and hidden.ndim > 2 and hidden.shape[1] % tokens == 0
        context, shards = ("context", shards * tokens) if divides else (None, shards)
        return cls(over.mesh, over.free, batch, context, tensor, shards, columns)

    def run(self, function: Callable[..., Any], operands: str, results: str, *args: Any) -> Any:
        """Calls a function on each device's part of arrays; returns the results of all devices.

        `operands` and `results` have a letter for each: "t" has leading dims of tokens, "v" of rows
        of `head`.
        """
        if not self.axes:
            return function(*args)
        tokens = (self.batch or None, *([self.context] if self.context else []))
        specs = {"t": PartitionSpec(*tokens), "v": PartitionSpec(self.tensor)}
        # Without the check of varying axes: the derivatives of the collectives are written here.
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=tuple(specs[kind] for kind in operands),
            out_specs=tuple(specs[kind] for kind in results),
            axis_names=set(self.axes),
            check_vma=False,
        )(*args)

    def first_row(self, head: jax.Array) -> int | jax.Array:
        """Returns the number of the first row in `head`, a device's part of the rows."""
        return jax.lax.axis_index(self.tensor) * len(head) if self.tensor else 0

    def sum_vocabulary(self, x: jax.Array) -> jax.Array:
        """Returns the sum of the values of the parts of the vocabulary."""
        return jax.lax.psum(x, self.tensor) if self.tensor else x

    def max_vocabulary(self, x: jax.Array) -> jax.Array:
        """Returns the largest of the values of the parts of the vocabulary."""
        return jax.lax.pmax(x, self.tensor) if self.tensor else x

    def sum_batch(self, x: jax.Array) -> jax.Array:
        """Returns the sum of the values of the parts of the tokens."""
        axes = (*self.batch, *([self.context] if self.context else []))
        return jax.lax.psum(x, axes) if axes else x


@dataclass(frozen=True)
class _Chunked:
    """The static arguments of the computation in chunks."""

    layer: LogitLayer
    layout: _Layout
    chunks: int

    def split(self, x: jax.Array, dims: int, fill: float = 0) -> jax.Array:
        """Returns an array of tokens as (chunks, tokens of a chunk, ...), padded with `fill`.

        The first `dims` dims of `x` hold the tokens. Tokens are added to make the chunks equal.
        """
        tokens = math.prod(x.shape[:dims])
        x = x.reshape(tokens, *x.shape[dims:])
        each = -(-tokens // self.chunks)
        missing = [(0, self.chunks * each - tokens), *[(0, 0)] * (x.ndim - 1)]
        return jnp.pad(x, missing, constant_values=fill).reshape(self.chunks, each, *x.shape[1:])

    def joined(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Returns chunks as an array of tokens of this shape."""
        whole = x.reshape(-1, *x.shape[2:])
        return whole[: math.prod(shape)].reshape(*shape, *x.shape[2:])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_chunks(
    chunked: _Chunked,
    hidden: jax.Array,
    head: jax.Array,
    bias: jax.Array | None,
    targets: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns what `values_of_logits` returns."""
    return chunked.layout.run(partial(_values, chunked), "tvvt", "ttt", hidden, head, bias, targets)


def _values(
    chunked: _Chunked,
    hidden: jax.Array,
    head: jax.Array,
    bias: jax.Array | None,
    targets: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes a device's values."""
    layout, first = chunked.layout, chunked.layout.first_row(head)

    def of_chunk(chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        x, targets = chunk
        logits = chunked.layer.logits(chunked.layer.products("nd,vd->nv", x, head), bias, first)
        own = targets - first
        inside = (own >= 0) & (own < len(head))
        # A lookup, because a sum would read all logits once more.
        chosen = jnp.take_along_axis(logits, jnp.where(inside, own, 0)[:, None], axis=-1)[:, 0]
        normalizers, largest = normalizers_and_largest(logits)
        return normalizers, jnp.where(inside, chosen, 0), largest

    parts = chunked.split(hidden, targets.ndim), chunked.split(targets, targets.ndim)
    normalizers, chosen, largest = (
        chunked.joined(x, targets.shape) for x in jax.lax.map(of_chunk, parts)
    )
    chosen = layout.sum_vocabulary(chosen)
    top = layout.max_vocabulary(normalizers)
    if layout.tensor:
        normalizers = top + jnp.log(layout.sum_vocabulary(jnp.exp(normalizers - top)))
    return normalizers, chosen, chosen >= layout.max_vocabulary(largest)


def _forward(
    chunked: _Chunked,
    hidden: jax.Array,
    head: jax.Array,
    bias: jax.Array | None,
    targets: jax.Array,
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], Any]:
    values = _in_chunks(chunked, hidden, head, bias, targets)
    return values, (hidden, head, bias, targets, values[0])


def _backward(
    chunked: _Chunked, kept: Any, cotangents: Any
) -> tuple[jax.Array, jax.Array, jax.Array | None, None]:
    of_normalizers, of_chosen, _ = cotangents
    found = chunked.layout.run(
        partial(_gradients, chunked), "tvvtttt", "tvv", *kept, of_normalizers, of_chosen
    )
    return *found, None


def _gradients(
    chunked: _Chunked,
    hidden: jax.Array,
    head: jax.Array,
    bias: jax.Array | None,
    targets: jax.Array,
    normalizers: jax.Array,
    of_normalizers: jax.Array,
    of_chosen: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Computes a device's gradients, and adds up the gradients of head and bias over the tokens."""
    layout, first = chunked.layout, chunked.layout.first_row(head)

    def of_chunk(total: Any, chunk: Any) -> tuple[Any, jax.Array]:
        x, targets, normalizers, of_normalizers, of_chosen = chunk
        logits = chunked.layer.logits(chunked.layer.products("nd,vd->nv", x, head), bias, first)
        of_logits = logit_gradients(
            chunked.layer, logits, targets - first, normalizers, of_normalizers, of_chosen
        )
        of_bias = None if bias is None else of_logits.sum(0)
        of_products = of_logits.astype(x.dtype)
        into = product("nv,nd->vd", of_products, x), of_bias
        return jax.tree.map(jnp.add, total, into), product("nv,vd->nd", of_products, head)

    dims = targets.ndim
    split = chunked.split
    tokens = (
        split(hidden, dims),
        split(targets, dims),
        split(normalizers, dims, fill=jnp.inf),  # exp(logits - inf) = 0 for a token that was added
        split(of_normalizers, dims),
        split(of_chosen, dims),
    )
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), (head, bias))
    zeros, tokens = varying_alike((zeros, tokens))
    totals, of_hidden = jax.lax.scan(of_chunk, zeros, tokens)
    of_hidden = layout.sum_vocabulary(chunked.joined(of_hidden, targets.shape).astype(hidden.dtype))
    of_head, of_bias = jax.tree.map(
        lambda x, like: layout.sum_batch(x.astype(like.dtype)), totals, (head, bias)
    )
    return of_hidden, of_head, of_bias


_in_chunks.defvjp(_forward, _backward)

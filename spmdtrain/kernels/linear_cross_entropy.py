"""Cross-entropy of a linear layer's logits, with or without all logits in memory."""

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
from spmdtrain.kernels.reference import optimized_implementation, uses_reference, varying_alike
from spmdtrain.sharding.mesh import BATCH_AXES
from spmdtrain.sharding.placement import constrain_sharding, current_device, current_mesh
from spmdtrain.xla.chips import memory_of

# -- The logits of a linear layer for all tokens at once, and the values for a cross-entropy -------

_NO_TOKEN = -1e9  # the logit of a row without a token: its exponential and gradient are 0

Values = tuple[jax.Array, jax.Array, jax.Array]
"""Normalizers log(sum(exp(logits))), the targets' logits, and whether these are the largest."""


@dataclass(frozen=True)
class LogitLayer:
    """The constants of the layer.

    Attributes:
      vocabulary: Number of tokens; later rows have none.
      soft_cap: Bound of the logits, or None.
      dtype: Dtype of the products of hidden values and rows in memory.
    """

    vocabulary: int
    soft_cap: float | None
    dtype: np.dtype[Any]

    def products(self, dims: str, hidden: jax.Array, head: jax.Array) -> jax.Array:
        """Returns the einsum of hidden values and rows, in `dtype`."""
        return jnp.einsum(dims, hidden, head, preferred_element_type=self.dtype)

    def logits(
        self, products: jax.Array, bias: jax.Array | None, first: int | jax.Array = 0
    ) -> jax.Array:
        """Returns the logits, f32, of rows from `first` on, from the products with these rows."""
        logits = products.astype(jnp.float32)
        logits = (
            logits
            if bias is None
            else logits + jax.lax.broadcast_to_rank(bias.astype(jnp.float32), logits.ndim)
        )
        if self.soft_cap is not None:
            logits = self.soft_cap * jnp.tanh(logits / self.soft_cap)
        rows = logits.shape[-1]
        if isinstance(first, int) and first + rows <= self.vocabulary:
            return logits
        is_token = first + jnp.arange(rows, dtype=jnp.int32) < self.vocabulary
        return jnp.where(jax.lax.broadcast_to_rank(is_token, logits.ndim), logits, _NO_TOKEN)


def values_of_logits(
    layer: LogitLayer,
    hidden: jax.Array,
    head: jax.Array,
    bias: jax.Array | None,
    targets: jax.Array,
) -> Values:
    """Returns the values of all tokens.

    The shapes are `hidden` (..., D), `head` (V, D), `bias` (V,) and `targets` int (...).
    """
    is_narrow = min(hidden.dtype.itemsize, layer.dtype.itemsize) < 4
    if is_narrow and not uses_reference():
        return _narrow(layer, hidden, head, bias, targets)
    return _whole_values(layer, hidden, head, bias, targets)[0]


def _whole_values(
    layer: LogitLayer,
    hidden: jax.Array,
    head: jax.Array,
    bias: jax.Array | None,
    targets: jax.Array,
) -> tuple[Values, jax.Array]:
    """Returns the values and the products."""
    products = layer.products("...d,vd->...v", hidden, head)
    if targets.ndim > 1:
        middle = [*[None] * (targets.ndim - 2), "context"]
        products = constrain_sharding(products, "batch", *middle, "tensor")
    logits = layer.logits(products, bias)
    chosen = summed_at(logits, targets)
    normalizers, largest = normalizers_and_largest(logits)
    return (normalizers, chosen, chosen >= largest), products


def summed_at(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the targets' logits from logits (..., V), 0 for targets without one.

    It sums instead of looking up, because a sum needs no gather if the vocabulary is split, and its
    gradient no scatter.
    """
    return jnp.where(_is_target(logits, targets), logits, 0).sum(-1)


def normalizers_and_largest(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns log(sum(exp(logits))) and the largest logit of each token, both (...).

    `logits` is (..., V), f32 or f64.
    """
    if current_device().platform != "gpu":
        return jax.nn.logsumexp(logits, axis=-1), logits.max(-1)
    total, largest = _in_one_pass(logits)
    return largest + jnp.log(total), largest


@jax.custom_jvp
def _in_one_pass(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns sum(exp(logits - largest)) and the largest logit of each token, both (...).

    XLA otherwise reads the logits twice on a GPU. Here each partial sum is relative to the largest
    logit so far ("Online normalizer calculation for softmax", arXiv 1805.02867). For GPT-2 small
    with 16 rows of 1,024 tokens on an H100, this saves reading 3.3 GB: 1 of 34 ms by the estimate
    of `plan`.
    """
    lowest = np.finfo(logits.dtype).min  # not -inf, because -inf - -inf is NaN
    total, largest = jax.lax.reduce(
        (jnp.ones_like(logits), jnp.maximum(logits, lowest)),
        (jnp.zeros((), logits.dtype), lowest),
        _merge,
        (logits.ndim - 1,),
    )
    return total, largest


# Outside of `_in_one_pass`, so that all traces contain the same function.
def _merge(
    left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Returns the sum and the largest logit of two parts of the logits."""
    (sum_left, top_left), (sum_right, top_right) = left, right
    less = jnp.exp(-jnp.abs(top_left - top_right))
    is_left = top_left >= top_right
    total = jnp.where(is_left, sum_left + sum_right * less, sum_right + sum_left * less)
    return total, jnp.maximum(top_left, top_right)


@_in_one_pass.defjvp
def _in_one_pass_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    """Treats the largest logit as a constant, because the normalizer does not depend on it."""
    (logits,), (change,) = primals, tangents
    total, largest = _in_one_pass(logits)
    of_total = (jnp.exp(logits - largest[..., None]) * change).sum(-1)
    return (total, largest), (of_total, jnp.zeros_like(largest))


def logit_gradients(
    layer: LogitLayer,
    logits: jax.Array,
    targets: jax.Array,
    normalizers: jax.Array,
    of_normalizers: jax.Array,
    of_chosen: jax.Array,
) -> jax.Array:
    """Returns the gradients of the products that `LogitLayer.logits` has taken, f32.

    They are one expression of the logits, which XLA can compute within a product with them. The
    derivatives of `logsumexp` and of a lookup would read the logits several more times.

    Args:
      logits: (..., V), or a part of the rows of V.
      targets: int (...), relative to the first row.
      normalizers: (...), of all rows.
      of_normalizers: (...), the gradients of the normalizers.
      of_chosen: (...), the gradients of the targets' logits.
    """
    # A row without a token needs no mask: its share is 0.
    shares = jnp.exp(logits - normalizers[..., None])
    of_logits = shares * of_normalizers[..., None]
    of_logits += jnp.where(_is_target(logits, targets), of_chosen[..., None], 0)
    if layer.soft_cap is not None:
        slope = 1 - jnp.square(logits / layer.soft_cap)
        of_logits = jnp.where(logits == _NO_TOKEN, 0, of_logits * slope)
    return of_logits


def _is_target(logits: jax.Array, targets: jax.Array) -> jax.Array:
    numbers = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    return jax.lax.broadcast_to_rank(numbers, logits.ndim) == targets[..., None].astype(jnp.int32)


def product(dims: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """Returns an einsum, f32."""
    return jnp.einsum(dims, left, right, preferred_element_type=jnp.float32)


# -- 16 bits ---------------------------------------------------------------------------------------

# With gradients written by hand, because those of `logsumexp` and of the lookup take longer: for
# GPT-2 small on a TPU v5e, the compiler estimates 21 ms for the layer's step, and 16 ms here, where
# the logits' gradients are one expression that each of the two products computes on the way.


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _narrow(
    layer: LogitLayer,
    hidden: jax.Array,
    head: jax.Array,
    bias: jax.Array | None,
    targets: jax.Array,
) -> Values:
    """Returns the values of all tokens from arrays of 16 bits, or by logits of 16 bits."""
    return _whole_values(layer, hidden, head, bias, targets)[0]


def _whole_forward(
    layer: LogitLayer,
    hidden: jax.Array,
    head: jax.Array,
    bias: jax.Array | None,
    targets: jax.Array,
) -> tuple[Values, Any]:
    # Otherwise a TPU converts parameters of 32 bits again for each product, and each of its tiles.
    head = jax.lax.optimization_barrier(head)
    values, products = _whole_values(layer, hidden, head, bias, targets)
    return values, (hidden, head, bias, targets, products, values[0])


def _whole_backward(
    layer: LogitLayer, kept: Any, cotangents: Any
) -> tuple[jax.Array, jax.Array, jax.Array | None, None]:
    hidden, head, bias, targets, products, normalizers = kept
    of_normalizers, of_chosen, _ = cotangents
    logits = layer.logits(products, bias)
    of_logits = logit_gradients(layer, logits, targets, normalizers, of_normalizers, of_chosen)
    dims = tuple(range(targets.ndim))
    of_bias = None if bias is None else of_logits.sum(dims).astype(bias.dtype)
    of_products = of_logits.astype(hidden.dtype)
    of_hidden = product("...v,vd->...d", of_products, head).astype(hidden.dtype)
    # A TPU would add the gradient of a norm to this product, which then has smaller tiles.
    of_hidden = jax.lax.optimization_barrier(of_hidden)
    tokens = math.prod(targets.shape)
    flat = (x.reshape(tokens, x.shape[-1]) for x in (of_products, hidden))
    of_head = product("nv,nd->vd", *flat).astype(head.dtype)
    return of_hidden, of_head, of_bias, None


_narrow.defvjp(_whole_forward, _whole_backward)


# -- Cross-entropy of a linear layer's logits, without all logits in memory ------------------------

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
    if jax.export.is_symbolic_dim(tokens):  # an export for every batch size
        return 1
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

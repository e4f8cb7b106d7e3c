"""Mixtures of experts: each token's sum over the experts that a router chooses for it."""

import contextlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from spmdtrain.errors import UserError
from spmdtrain.kernels.expert_exchange import (
    ExpertLayer,
    Ffn,
    all_experts,
    chosen_kernels,
    split_experts,
)
from spmdtrain.kernels.ffn_check import check_ffn
from spmdtrain.kernels.reference import optimized_implementation, uses_reference
from spmdtrain.sharding.mesh import BATCH_AXES, EXPERT
from spmdtrain.sharding.placement import (
    CurrentMesh,
    current_device,
    current_expert_options,
    current_mesh,
)

PyTree = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertOutput:
    """The output of a layer of experts, and the values of its router by row of the batch.

    Attributes:
      output: (B, T, width), each token's weighted sum over its `top_k` experts, in the dtype of x.
      balance: f32 (B,), the load-balance loss of each row: E * sum_e f_e * p_e, where f_e is the
        fraction of the row's choices that fell on expert e, and p_e the mean of its probability
        (Fedus et al. 2021, arXiv:2101.03961; by sequence as in arXiv:2412.19437). It is 1 if both
        are even.
      z: f32 (B,), mean over the tokens of logsumexp(router_logits)**2 (Zoph et al. 2022,
        arXiv:2202.08906).
      entropy: f32 (B,), mean over the tokens of the entropy of the router's probabilities, in nats.
      load: f32 (B, E), number of the row's choices for each expert.
      overflow: f32 scalar, 1 if a buffer would have overflowed, so that all devices of the axis
        "expert" gathered all tokens; else 0. The output is the same.
    """

    output: jax.Array
    balance: jax.Array
    z: jax.Array
    entropy: jax.Array
    load: jax.Array
    overflow: jax.Array


def experts(
    x: jax.Array,
    router_logits: jax.Array,
    weights: PyTree,
    ffn: Ffn,
    *,
    top_k: int,
    normalize: bool = True,
) -> ExpertOutput:
    """Returns each token's sum over its `top_k` experts, weighted by the router's probabilities.

    No token is dropped, however many choose the same expert. On a mesh the batch and the tokens
    ("context") may be split, and the experts over "expert": tokens are sent to the devices of their
    experts and back.

    Args:
      x: The tokens, (B, T, width).
      router_logits: f32 (B, T, E); their softmax gives the probabilities of the experts.
      weights: A pytree of arrays of leading dim E, split over "expert" by their rule:
        `PartitionSpec("expert", ...)`.
      ffn: Maps (rows, weights, dot) to (n, width). `rows` (n, width) are sorted by expert, and
        `dot(rows, kernel)` multiplies each row with the matrix of its expert, of a kernel (experts,
        in, out). Each row of the result depends on this row and on its expert's weights alone, and
        on nothing that is not an argument, because on a mesh a device has a part of the rows and of
        the experts.
      top_k: Number of experts of a token.
      normalize: Whether the probabilities of a token's experts are divided by their sum.

    `jax.vmap` of it is not supported, nor are forward-mode derivatives if experts are split.

    Raises:
      UserError: If the arguments do not fit together, the experts do not divide over "expert", or
        `ffn` is not shown to compute each row alone, on a mesh that splits rows or experts.
    """
    _check(x, router_logits, weights, top_k)
    probabilities = jax.nn.softmax(router_logits, axis=-1)
    over = current_mesh()
    if over is None or not over.free or uses_reference():
        over = CurrentMesh(None, {}, ())
    manual = {axis for axis in over.free if axis != "tensor" or over.parts(axis) == 1}
    count, devices = router_logits.shape[-1], over.parts(EXPERT)
    layer = _layer(ffn, count, devices, tuple(sorted(manual))) if devices > 1 else None

    operands = (x, probabilities, weights)
    dtypes = jax.tree.map(jnp.result_type, operands)

    def local(*operands: PyTree) -> tuple[jax.Array, jax.Array, jax.Array]:
        x, probabilities, weights = jax.tree.map(jax.lax.convert_element_type, operands, dtypes)
        scale, chosen = jax.lax.top_k(probabilities, top_k)
        if normalize:
            scale = scale / scale.sum(-1, keepdims=True)
        tokens = x.reshape(-1, x.shape[-1]), chosen.reshape(-1, top_k), scale.reshape(-1, top_k)
        overflow = jnp.zeros((), bool)
        if uses_reference():
            total = chosen_kernels(*tokens, weights, ffn)
        elif layer is None:
            total = all_experts(*tokens, weights, ffn, count)
        else:
            total, overflow = split_experts(layer, *tokens, weights)
        return total.reshape(x.shape).astype(x.dtype), chosen, overflow

    if over.parts(*manual) > 1:
        check_ffn(ffn, x, weights, is_split=layer is not None)
        rows = tuple(axis for axis in BATCH_AXES if axis in over.free)
        length, parts = x.shape[1], over.parts("context")
        split = PartitionSpec(
            rows if len(x) % over.parts(*rows) == 0 else None,
            "context" if "context" in over.free and length % parts == 0 else None,
        )
        if current_device().platform == "cpu" and manual != set(over.free):
            # The gradients of what devices share are sums over these axes. XLA's CPU compiler
            # aborts at such a sum over a part of a mesh's axes if its values have 16 bits.
            operands = jax.tree.map(_widened, operands)
        # Without the check of varying axes: the gradients of the branches are written by hand.
        local = jax.shard_map(
            local,
            mesh=over.mesh,
            in_specs=(split, split, PartitionSpec(EXPERT if layer else None)),
            out_specs=(split, split, PartitionSpec()),
            axis_names=manual,
            check_vma=False,
        )
    with optimized_implementation() if not uses_reference() else contextlib.nullcontext():
        output, chosen, overflow = local(*operands)
    numbers = jnp.arange(count, dtype=chosen.dtype)[None, None, None]
    load = (chosen[..., None] == numbers).sum((1, 2), dtype=jnp.float32)
    fraction = load / (x.shape[1] * top_k)
    logs = jax.nn.log_softmax(router_logits, axis=-1)
    return ExpertOutput(
        output=output,
        balance=count * (fraction * probabilities.mean(1)).sum(-1),
        z=jnp.square(jax.nn.logsumexp(router_logits, axis=-1)).mean(-1),
        entropy=-(probabilities * logs).sum(-1).mean(-1),
        load=load,
        overflow=overflow.astype(jnp.float32),
    )


def _widened(x: jax.Array) -> jax.Array:
    """Returns an array in f32 if it has floating-point values of fewer bits."""
    is_narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return x.astype(jnp.float32) if is_narrow else x


def _layer(ffn: Ffn, count: int, devices: int, axes: tuple[str, ...]) -> ExpertLayer:
    """Returns the static arguments of experts that are split over devices."""
    options, on_cpu = current_expert_options(), current_device().platform == "cpu"
    if count % devices:
        raise UserError(
            f"experts: {count} experts do not divide over mesh.expert={devices}: their number must "
            "be a multiple of the axis"
        )
    if on_cpu and options.exchange == "ragged_all_to_all":
        raise UserError(
            "expert.exchange is ragged_all_to_all, which XLA does not support on CPU: use "
            "all_to_all"
        )
    return ExpertLayer(ffn, count, devices, options, axes, on_cpu)


def _check(x: jax.Array, router_logits: jax.Array, weights: PyTree, top_k: int) -> None:
    if x.ndim != 3 or router_logits.ndim != 3 or router_logits.shape[:2] != x.shape[:2]:
        raise UserError(
            f"experts: x {x.shape} and router_logits {router_logits.shape}: the shapes must be "
            "(B, T, width) and (B, T, experts)"
        )
    if router_logits.dtype != jnp.float32:
        raise UserError(
            f"experts: router_logits are {router_logits.dtype}: they must be float32, because the "
            "choice of experts depends on small differences"
        )
    count = router_logits.shape[-1]
    if not 1 <= top_k <= count:
        raise UserError(f"experts: top_k is {top_k}: it must be from 1 to {count}, the experts")
    for each in jax.tree.leaves(weights):
        if each.shape[:1] != (count,):
            raise UserError(
                f"experts: weights of shape {each.shape} for router_logits of {count} experts: the "
                f"leading dim must be {count}"
            )

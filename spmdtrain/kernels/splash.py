"""Attention by JAX's splash kernel for TPUs (`jax.experimental.pallas.ops.tpu`)."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    BlockSizes,
    CausalMask,
    FullMask,
    LocalMask,
    MultiHeadMask,
    SegmentIds,
    make_splash_mha,
)

from spmdtrain.kernels.attention_choice import AttentionCase, SplashBlocks, splash_blocks
from spmdtrain.kernels.context_attention import attention_over_devices
from spmdtrain.sharding.placement import CurrentMesh


def splash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None,
    case: AttentionCase,
    *,
    scale: float,
    name: str,
    over: CurrentMesh,
    interpret: bool,
) -> jax.Array:
    """Returns attention's output, (B, T, heads, head width); the shapes are as in `attention`.

    XLA cannot partition the kernel, so it runs under `shard_map`: each device computes its rows of
    the batch and its heads. What does not divide over the devices is computed by each of them.

    Args:
      case: The properties of the arguments, not refused by `splash_blocker`.
      name: Name of the output and of the softmax's normalization for `jax.checkpoint` policies.
      interpret: Whether JAX interprets the kernel, on a CPU.
    """
    local = partial(_on_device, case=case, scale=scale, name=name, interpret=interpret)
    return attention_over_devices(local, query, key, value, segments, over)


def _on_device(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None,
    *,
    case: AttentionCase,
    scale: float,
    name: str,
    interpret: bool,
) -> jax.Array:
    """Returns the output of this device's rows and heads."""
    kernel = make_splash_mha(
        MultiHeadMask([_mask(case)] * query.shape[2]),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=_block_sizes(splash_blocks(case)),
        residual_checkpoint_name=name,
        interpret=interpret,
    )
    # The kernel does not scale, and its heads come before the tokens. Scaled in f32, because the
    # scale itself would be rounded to bfloat16.
    query = (query.astype(jnp.float32) * scale).astype(query.dtype)
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    if segments is None:
        mixed = jax.vmap(kernel)(query, key, value)
    else:
        ids = segments.astype(jnp.int32)
        mixed = jax.vmap(kernel)(query, key, value, SegmentIds(ids, ids))
    return jnp.swapaxes(mixed, 1, 2)


def _mask(case: AttentionCase) -> CausalMask | FullMask | LocalMask:
    shape = (case.queries, case.keys)
    if case.window is not None:
        before = case.window - 1
        return LocalMask(shape, (before, 0 if case.causal else before), offset=0)
    return CausalMask(shape) if case.causal else FullMask(shape)


def _block_sizes(blocks: SplashBlocks) -> BlockSizes:
    queries, keys = blocks.queries, blocks.keys
    return BlockSizes(
        block_q=queries,
        block_kv=keys,
        block_kv_compute=keys,
        block_q_dkv=queries,
        block_kv_dkv=keys,
        block_kv_dkv_compute=keys,
        block_q_dq=None if blocks.fused else queries,
        block_kv_dq=None if blocks.fused else keys,
        use_fused_bwd_kernel=blocks.fused,
    )

"""Attention within a sequence, by the fastest implementation of the device."""

import re
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from spmdtrain.config.options import ContextMethod
from spmdtrain.errors import UserError
from spmdtrain.kernels.attention_choice import (
    IMPLEMENTATIONS,
    AttentionCase,
    Implementation,
    choose_implementation,
)
from spmdtrain.kernels.context_attention import (
    CONTEXT,
    Pattern,
    choose_context_method,
    context_attention,
)
from spmdtrain.kernels.reference import optimized_implementation, uses_reference
from spmdtrain.sharding.placement import (
    Placement,
    current_context_method,
    current_device,
    current_mesh,
)
from spmdtrain.xla.jaxpr import equations

ATTENTION = "attention"
"""Name of attention's output for `jax.checkpoint` policies. That of cuDNN has none."""

_NAMED = jax.checkpoint_policies.save_only_these_names(ATTENTION)
_CUDNN_FORWARD = "dot_product_attention_fwd_wrapper"  # JAX's name of the primitive


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool,
    segments: jax.Array | None = None,
    window: int | None = None,
    scale: float | jax.Array | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Returns the values that each token attends to, mixed: (B, T, heads, head width).

    Each head mixes the values by the softmax of the scaled products of queries and keys, computed
    in f32. On a mesh, the batch, the heads ("tensor") and the tokens ("context") may be split.

    Args:
      query: (B, T, heads, head width).
      key: (B, S, key-value heads, head width), as `value`. Each key-value head is shared by as many
        consecutive query heads (grouped-query attention, Ainslie et al. 2023, arXiv:2305.13245).
      value: The values.
      causal: Whether query i attends to keys 0 to i only.
      segments: int (B, T), the number of each token's document within its row: a token attends to
        its own document only. None for one document in each row. With segments, S is T.
      window: A token attends to itself and the `window` - 1 tokens before it, and also the
        `window` - 1 tokens after it if attention is not causal. None for all tokens. With a window,
        S is T.
      scale: Factor of the scores; by default 1 / sqrt(head width). An array is multiplied with the
        query, so that it may be a parameter.
      implementation: "splash" is JAX's kernel for TPUs, which a CPU interprets (slow, for tests),
        "cudnn" that of NVIDIA GPUs, "xla" is available everywhere. By default the kernel of the
        device, or "xla" if it does not support the arguments.

    Raises:
      UserError: If the arguments do not fit together, or the requested implementation does not
        support them.
    """
    _check_arguments(query, key, value, segments, window)
    if isinstance(scale, (jax.Array, np.ndarray)):
        query, scale = query * jnp.asarray(scale, query.dtype), 1.0
    case = AttentionCase(
        queries=query.shape[1],
        keys=key.shape[1],
        head_width=query.shape[3],
        dtype=query.dtype,
        causal=causal,
        window=window,
        precision=jax.config.jax_default_matmul_precision,  # type: ignore[attr-defined]
    )
    device, mesh = current_device(), current_mesh()
    chosen: Implementation = "xla"
    if not uses_reference():
        chosen = choose_implementation(device, case, implementation, knows_mesh=mesh is not None)
        if mesh is not None and mesh.parts(CONTEXT) > 1 and query.size:
            method = current_context_method()
            method = method or choose_context_method(
                device, query, key, window, mesh, causal=causal, has_kernel=chosen != "xla"
            )
            if implementation not in (None, "xla") and method != "ulysses":
                raise UserError(
                    f"attention: implementation is {implementation}, and mesh.context splits the "
                    f"tokens, over which {method} computes by XLA: leave implementation out, or "
                    "use context.method=ulysses"
                )
            scale = query.shape[3] ** -0.5 if scale is None else scale

            def whole(*arrays: jax.Array, segments: jax.Array | None) -> jax.Array:
                options: Any = {"causal": causal, "window": window, "scale": scale}
                return attention(
                    *arrays, segments=segments, implementation=implementation, **options
                )

            with optimized_implementation(), jax.named_scope(f"{ATTENTION}_{method}"):
                return context_attention(
                    query,
                    key,
                    value,
                    segments,
                    method=method,
                    pattern=Pattern(causal, window, scale),
                    over=mesh,
                    name=ATTENTION,
                    whole=whole,
                )
    with jax.named_scope(f"{ATTENTION}_{chosen}"):
        if chosen == "splash":
            assert mesh is not None
            # Importing Pallas takes time that only its users should need.
            from spmdtrain.kernels.splash import splash_attention

            return splash_attention(
                query,
                key,
                value,
                segments,
                case,
                scale=query.shape[3] ** -0.5 if scale is None else scale,
                name=ATTENTION,
                over=mesh,
                interpret=device.platform != "tpu",
            )
        mask = None if segments is None else segments[:, None, :, None] == segments[:, None, None]
        before = None if window is None else window - 1
        mixed = jax.nn.dot_product_attention(
            query,
            key,
            value,
            mask=mask,
            scale=scale,
            is_causal=causal,
            local_window_size=None if before is None else (before, 0 if causal else before),
            implementation=chosen,
        )
        # cuDNN's output is kept together with what its backward kernel needs: see `keep_attention`.
        return mixed if chosen == "cudnn" else checkpoint_name(mixed, ATTENTION)


def keep_attention(primitive: Any, *args: Any, **params: Any) -> bool:
    """Returns whether the policy `attention` keeps a result: attention's output.

    For a kernel it also keeps the normalization of the softmax, so that the backward pass does not
    run the kernel again. The arguments are those that `jax.checkpoint` passes to a policy.
    """
    return bool(_NAMED(primitive, *args, **params)) or primitive.name == _CUDNN_FORWARD


def describe_attention(jaxpr: Any, platform: str) -> str:
    """Returns the implementations of attention in an open jaxpr, such as "attention: xla".

    It is for the log, and "" without attention, and on a CPU, which uses XLA.
    """
    found = _implementations(jaxpr)
    methods = found & {*get_args(ContextMethod)}
    listed = ", ".join(sorted(methods or (found if platform != "cpu" else ())))
    return f"attention: {listed}" if listed else ""


def check_context_used(jaxpr: Any, placement: Placement) -> None:
    """Raises `UserError` if several devices split "context", and no attention is computed over it.

    The devices of the axis would repeat each other's work. `jaxpr` is open.
    """
    size = placement.size(CONTEXT)
    if size > 1 and not _implementations(jaxpr) & {*get_args(ContextMethod)}:
        raise UserError(
            f"mesh axis context={size} is not used: the model does not call spmdtrain.attention, "
            "which computes over it, so its devices would repeat each other's work. Call it in "
            "place of jax.nn.dot_product_attention, or remove mesh.context"
        )


def _implementations(jaxpr: Any) -> set[str]:
    """Returns the names of implementations and methods in a program."""
    stacks = {equation.source_info.name_stack for equation in equations(jaxpr)}
    of_each = (re.findall(rf"\b{ATTENTION}_(\w+)", str(stack)) for stack in stacks)
    # A module of the user's may have such a name, for example `attention_norm`.
    known = {*IMPLEMENTATIONS, *get_args(ContextMethod)}
    return {name for names in of_each for name in names} & known


def _check_arguments(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None,
    window: int | None,
) -> None:
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    fits = query.ndim == key.ndim == 4 and key.shape == value.shape
    if not fits or (query.shape[0], query.shape[3]) != (key.shape[0], key.shape[3]):
        raise UserError(
            f"attention: {shapes}: the shapes must be (B, T, heads, width) and, of key and value, "
            "(B, S, key-value heads, width)"
        )
    if not key.shape[2] or query.shape[2] % key.shape[2]:
        raise UserError(
            f"attention: {query.shape[2]} query heads do not divide over {key.shape[2]} key-value "
            "heads"
        )
    if not query.dtype == key.dtype == value.dtype:
        raise UserError(
            f"attention: query is {query.dtype}, key {key.dtype}, value {value.dtype}: they must "
            "have the same dtype"
        )
    if not jnp.issubdtype(query.dtype, jnp.floating):
        raise UserError(f"attention: query is {query.dtype}: it must be floating-point numbers")
    if window is not None and window < 1:
        raise UserError(f"attention: window is {window}: it must be 1 or more")
    if (segments is not None or window is not None) and query.shape[1] != key.shape[1]:
        raise UserError(
            f"attention: {query.shape[1]} queries and {key.shape[1]} keys: segments and windows "
            "are of a sequence that attends to itself, so both numbers must be equal"
        )
    if segments is not None and (
        segments.shape != query.shape[:2] or not jnp.issubdtype(segments.dtype, jnp.integer)
    ):
        raise UserError(
            f"attention: segments is {segments.dtype}{list(segments.shape)}: it must be integers "
            f"of shape {query.shape[:2]}"
        )

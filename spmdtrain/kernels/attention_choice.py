"""The choice of the implementation of attention, by shapes and device."""

from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp

from spmdtrain.errors import UserError

Implementation = Literal["xla", "splash", "cudnn"]
IMPLEMENTATIONS: tuple[Implementation, ...] = ("xla", "splash", "cudnn")

_TPU_LANES = 128  # the splash kernel's blocks are multiples of it
_LARGEST_BLOCK = 1024
_LARGEST_BLOCK_OF_WIDE_HEADS = 512  # larger blocks exceed the VMEM of a TPU v4
_WIDE_HEAD = 256  # bytes
_LARGEST_HEAD = 256
# Products of bfloat16 do not compile in the kernel with another precision.
_FAST_PRECISIONS = (None, "default", "fastest", "bfloat16")
# Number of blocks of keys above which the fused backward kernel is not used: it writes a whole
# gradient of the queries for each.
_MOST_PARTIAL_GRADIENTS = 4


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """Properties of a call of `attention` that its implementations depend on.

    Attributes:
      causal: Whether a token attends to positions up to its own only.
      window: Number of tokens of the local window, or None.
      precision: JAX's option `jax_default_matmul_precision`.
    """

    queries: int
    keys: int
    head_width: int
    dtype: Any
    causal: bool
    window: int | None = None
    precision: str | None = None


@dataclass(frozen=True)
class SplashBlocks:
    """Block sizes of the splash kernel.

    If `fused`, one kernel computes all gradients, instead of one for the queries and one for keys
    and values.
    """

    queries: int
    keys: int
    fused: bool


def splash_blocks(case: AttentionCase) -> SplashBlocks:
    """Returns the block sizes of the splash kernel: the largest that divide, up to 1024.

    The limit is 512 for heads of more than 256 bytes, padded to the 128 lanes of a TPU. The case
    must be one that `splash_blocker` does not refuse.

    The fused backward kernel computes the products of queries and keys once instead of twice, and
    adds the traffic of a gradient of all queries for each block of keys. With a window the separate
    kernels skip the blocks outside of it, but the fused one writes zeros for them.
    """
    width = -(-case.head_width // _TPU_LANES) * _TPU_LANES
    row = width * jnp.dtype(case.dtype).itemsize
    most = _LARGEST_BLOCK if row <= _WIDE_HEAD else _LARGEST_BLOCK_OF_WIDE_HEADS
    keys = _block(case.keys, most)
    few = case.keys // keys <= _MOST_PARTIAL_GRADIENTS
    return SplashBlocks(_block(case.queries, most), keys, fused=few and case.window is None)


def _block(length: int, most: int) -> int:
    sizes = range(most, 0, -_TPU_LANES)
    return next(size for size in sizes if length % size == 0)


def splash_blocker(device: Any, case: AttentionCase) -> str | None:
    """Returns why the splash kernel of TPUs cannot compute a case; None if it can.

    On a CPU, JAX interprets the kernel.
    """
    if device.platform not in ("tpu", "cpu"):
        return f"it is for TPUs, and the device is {device.device_kind}"
    if case.dtype not in (jnp.bfloat16, jnp.float32):
        return f"the dtype is {jnp.dtype(case.dtype).name}: it must be bfloat16 or float32"
    if case.dtype == jnp.bfloat16 and case.precision not in _FAST_PRECISIONS:
        return f"jax_default_matmul_precision is {case.precision}, and the dtype is bfloat16"
    for length, what in ((case.queries, "queries"), (case.keys, "keys")):
        if length % _TPU_LANES:
            return f"there are {length} {what}: it must be a multiple of {_TPU_LANES}"
    if case.head_width % 8 or case.head_width > _LARGEST_HEAD:
        return (
            f"the heads have width {case.head_width}: it must be a multiple of 8, at most "
            f"{_LARGEST_HEAD}"
        )
    return None


def cudnn_blocker(device: Any, case: AttentionCase) -> str | None:
    """Returns why cuDNN's fused attention cannot compute a case; None if it can."""
    # "9.0" on an NVIDIA GPU, another form on AMD's, missing on other devices.
    major = str(getattr(device, "compute_capability", "")).split(".")[0]
    if not (major.isdecimal() and int(major) >= 8):
        return f"it is for NVIDIA GPUs since Ampere, and the device is {device.device_kind}"
    if case.dtype not in (jnp.bfloat16, jnp.float16):
        return f"the dtype is {jnp.dtype(case.dtype).name}: it must be bfloat16 or float16"
    if case.head_width % 8 or case.head_width > 128:
        return f"the heads have width {case.head_width}: it must be a multiple of 8, at most 128"
    if case.window is not None and not case.causal:
        return "the window is not causal"
    if case.causal and case.queries != case.keys:
        return f"there are {case.queries} queries and {case.keys} keys, and attention is causal"
    # With a bias, cuDNN cannot be trained on odd lengths. JAX refuses these without a bias, too.
    for length, what in ((case.queries, "queries"), (case.keys, "keys")):
        if length % 2:
            return f"there are {length} {what}: it must be an even number"
    return None


_UNKNOWN_MESH = (
    "the sharding of the arrays is not known: call attention in a run (Trainer or Loop) without "
    "explicit axes, or under jax.shard_map over all axes"
)
_OF_PLATFORM: dict[str, Implementation] = {"tpu": "splash", "gpu": "cudnn"}


def choose_implementation(
    device: Any, case: AttentionCase, requested: Implementation | None, *, knows_mesh: bool
) -> Implementation:
    """Returns the implementation of a case: the kernel of the platform, or XLA.

    `knows_mesh` tells whether the sharding of the arrays is known (see `current_mesh`).

    Raises:
      UserError: If the requested implementation is unknown or cannot compute the case.
    """
    if requested not in (None, *IMPLEMENTATIONS):
        raise UserError(
            f"attention: implementation is {requested!r}: it must be "
            f"{', '.join(IMPLEMENTATIONS)} or None"
        )
    chosen = requested or _OF_PLATFORM.get(device.platform, "xla")
    why = None
    if chosen == "splash":
        why = splash_blocker(device, case) if knows_mesh else _UNKNOWN_MESH
    elif chosen == "cudnn":
        why = cudnn_blocker(device, case)
    if why is None:
        return chosen
    if requested is None:
        return "xla"
    raise UserError(
        f"attention: implementation {requested} is not possible, because {why}. Leave "
        "implementation out to use the best one that is"
    )

"""The implementation of attention for shapes and devices, without computing anything."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from spmdtrain import UserError
from spmdtrain.kernels.attention_choice import (
    AttentionCase,
    SplashBlocks,
    choose_implementation,
    splash_blocks,
)

CASE = AttentionCase(queries=1024, keys=1024, head_width=64, dtype=jnp.bfloat16, causal=True)
CPU = SimpleNamespace(platform="cpu", device_kind="cpu")
TPU = SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")
AMD = SimpleNamespace(platform="gpu", device_kind="MI300", compute_capability="gfx942")
V100, H100, B200 = (
    SimpleNamespace(platform="gpu", device_kind="GPU", compute_capability=capability)
    for capability in ("7.0", "9.0", "10.0")
)


def choice(device: Any, **changes: Any) -> str:
    return choose_implementation(device, replace(CASE, **changes), None, knows_mesh=True)


def test_each_platform_has_its_kernel_and_xla_the_rest() -> None:
    assert choice(TPU) == choice(TPU, dtype=jnp.float32, window=256) == "splash"
    assert choice(TPU, head_width=128, queries=384, causal=False) == "splash"
    for changes in (
        {"queries": 1000},
        {"keys": 64},
        {"head_width": 36},
        {"dtype": jnp.float16},
        {"precision": "highest"},
    ):
        assert choice(TPU, **changes) == "xla", changes
    assert choice(TPU, precision="highest", dtype=jnp.float32) == "splash"
    assert choose_implementation(TPU, CASE, None, knows_mesh=False) == "xla"

    assert choice(H100) == choice(B200, dtype=jnp.float16, head_width=128) == "cudnn"
    assert choice(H100, window=100) == "cudnn"
    assert choice(H100, causal=False, queries=512) == "cudnn"
    for changes in (
        *({"dtype": jnp.float32}, {"head_width": 36}, {"head_width": 256}, {"queries": 512}),
        *({"queries": 197, "keys": 197}, {"keys": 197, "causal": False}),
        {"window": 9, "causal": False},
    ):
        assert choice(H100, **changes) == "xla", changes
    for other in (CPU, V100, AMD):
        assert choice(other) == "xla"


@pytest.mark.parametrize(
    ("device", "requested", "changes", "why"),
    [
        (TPU, "cudnn", {}, "since Ampere, and the device is TPU v5 lite"),
        (H100, "splash", {}, "it is for TPUs"),
        (TPU, "splash", {"keys": 1000}, "there are 1000 keys: it must be a multiple of 128"),
        (H100, "cudnn", {"dtype": jnp.float32}, "the dtype is float32"),
        (CPU, "flash", {}, "must be xla, splash, cudnn or None"),
    ],
)
def test_an_impossible_request_is_an_error_that_says_why(
    device: Any, requested: Any, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(UserError, match=why):
        choose_implementation(device, replace(CASE, **changes), requested, knows_mesh=True)


def test_outside_of_a_run_splash_is_an_error_that_says_where_to_call_it() -> None:
    with pytest.raises(UserError, match=r"call attention in a run"):
        choose_implementation(TPU, CASE, "splash", knows_mesh=False)


def test_blocks_are_the_largest_that_divide() -> None:
    assert splash_blocks(CASE) == SplashBlocks(1024, 1024, fused=True)
    assert splash_blocks(replace(CASE, queries=256, keys=1152)) == SplashBlocks(256, 384, True)
    assert splash_blocks(replace(CASE, queries=2560, keys=2560)) == SplashBlocks(640, 640, True)
    wide = replace(CASE, head_width=256)  # blocks of 1024 exceed the VMEM of a v4
    assert splash_blocks(wide) == SplashBlocks(512, 512, fused=True)
    assert splash_blocks(replace(CASE, head_width=128)).keys == 1024
    assert splash_blocks(replace(CASE, dtype=jnp.float32)).keys == 512  # padded to 128 lanes
    # One kernel for all gradients writes those of the queries for each block of keys.
    assert not splash_blocks(replace(CASE, keys=8192)).fused
    assert not splash_blocks(replace(CASE, window=512)).fused

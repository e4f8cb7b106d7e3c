"""Pallas kernels of a TPU's program, and the cycles that its compiler estimates."""

import dataclasses
import json
import math
import textwrap
from functools import partial
from pathlib import Path

import pytest
from plan_helpers import needs_libtpu, plan

from spmdtrain.plan.instruction_work import (
    KERNEL_EFFICIENCY,
    TrafficBasis,
    Work,
    bytes_moved,
    kernel_calls,
    planned_kernels,
    products,
    work_of,
)
from spmdtrain.plan.planner import kernel_notes
from spmdtrain.plan.summary import is_timed_apart
from spmdtrain.plan.time_model import (
    InstructionTimes,
    Times,
    TimeSource,
    instruction_times,
    overlapped_seconds,
    permute_direction,
)
from spmdtrain.step.flops import CostBasis, Flops, KernelFlops
from spmdtrain.xla.chips import CHIPS
from spmdtrain.xla.hlo import Module, UnreadableProgramError

# As libtpu writes them: the metadata of a kernel has a line for each field.
TEXT = """HloModule m

%fused (p: bf16[8,1024,128], q: bf16[128,128,1]) -> bf16[8,1024,128] {
  %p = bf16[8,1024,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %q = bf16[128,128,1]{1,0,2:T(8,128)(2,1)} parameter(1)
  ROOT %y = bf16[8,1024,128]{2,1,0:T(8,128)(2,1)} convolution(%p, %q), window={size=1}, \
dim_labels=0bf_io0->0bf
}

ENTRY %main (a: bf16[8,1024,128], b: bf16[128,128,1]) -> bf16[8,1024,64] {
  %a = bf16[8,1024,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[128,128,1]{1,0,2:T(8,128)(2,1)} parameter(1)
  %fusion = bf16[8,1024,128]{2,1,0:T(8,128)(2,1)} fusion(%a, %b), kind=kOutput, calls=%fused, \
backend_config={"window_config":{"estimated_cycles":"3000"}}
  %exp.1 = bf16[8,1024,128]{2,1,0:T(8,128)(2,1)} exponential(%fusion), \
backend_config={"window_config":{"estimated_cycles":"60000"}}
  %copy.1 = bf16[8,1024,128]{2,1,0:T(8,128)(2,1)} copy(%exp.1), \
backend_config={"window_config":{"estimated_cycles":"100"}}
  %splash_mha_fwd.1 = bf16[8,1024,64]{2,1,0:T(8,128)(2,1)} custom-call(%copy.1), \
custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 256}"
}}, metadata={op_name="jit(f)/splash_mha_fwd/pallas_call"}, backend_config={"flag_configs":[]}
  %splash_mha_fwd.2 = bf16[8,1024,64]{2,1,0:T(8,128)(2,1)} custom-call(%copy.1), \
custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/stated/pallas_call"}, \
backend_config={"custom_call_config":{"body":"TUz","cost_estimate":{"flops":"5000"}}}
  ROOT %z = bf16[8,1024,64]{2,1,0:T(8,128)(2,1)} add(%splash_mha_fwd.1, %splash_mha_fwd.2), \
backend_config={"window_config":{"estimated_cycles":"2000"}}
}
"""
WIDE, NARROW, WEIGHT = 2 * 8 * 1024 * 128, 2 * 8 * 1024 * 128, 2 * 128 * 128
PRODUCT = 2 * 8 * 1024 * 128 * 128
KNOWN = KernelFlops(
    name="splash_mha_fwd",
    line="model.py:7 (call)",
    results=((8, 1024, 64),),
    flops=10**9,
    padded=2e9,
    basis=CostBasis.BODY,
)


def test_a_kernel_with_metadata_on_several_lines_does_not_end_the_program() -> None:
    module = Module(TEXT)
    assert list(module.computations["main"].instructions)[-1] == "z"
    assert products(module) == PRODUCT
    calls = kernel_calls(module)
    assert [(call.name, call.stated) for call in calls] == [
        ("splash_mha_fwd", None),
        ("splash_mha_fwd", 5000),
    ]
    # A minor dim of 64 is stored as 128.
    assert {call.bytes for call in calls} == {(WIDE, NARROW)}


def test_the_time_of_a_kernel_is_that_of_its_padded_operations_or_of_its_bytes() -> None:
    first, second = kernel_calls(Module(TEXT))
    known, stated, unknown = (
        planned_kernels([call], kernels, peak=1e12, bandwidth=1e9, pads=True)[0]
        for call, kernels in ((first, [KNOWN]), (second, []), (first, []))
    )
    assert (known.flops, known.basis, known.line) == (10**9, CostBasis.BODY, KNOWN.line)
    assert known.seconds == pytest.approx(
        max(2e9 / (KERNEL_EFFICIENCY * 1e12), sum(first.bytes) / 1e9)
    )
    assert (stated.flops, stated.basis) == (5000, CostBasis.STATED)
    assert math.isnan(unknown.flops) and unknown.seconds == sum(first.bytes) / 1e9


def test_blocks_that_a_kernel_reads_again_count_again() -> None:
    call = kernel_calls(Module(TEXT))[0]
    plan_call = partial(planned_kernels, [call], peak=1e15, bandwidth=1e9, pads=True)
    again = dataclasses.replace(KNOWN, passes=(4.0, 1.0), stated_bytes=7)
    (found,) = plan_call([again])
    assert (found.bytes, found.traffic) == (4 * WIDE + NARROW, TrafficBasis.BLOCKS)
    assert found.seconds == pytest.approx(found.bytes / 1e9)
    by_itself = dataclasses.replace(again, passes=(None, 1.0))
    (found,) = plan_call([by_itself])
    assert (found.bytes, found.traffic) == (7, TrafficBasis.STATED)
    (found,) = plan_call([dataclasses.replace(by_itself, stated_bytes=0)])
    assert (found.bytes, found.traffic) == (WIDE + NARROW, TrafficBasis.ONCE)


def test_a_kernel_without_a_name_is_found_by_its_shapes() -> None:
    """XLA names it after the function that calls it."""
    call = kernel_calls(Module(TEXT))[0]
    unnamed = dataclasses.replace(KNOWN, name="body", operands=((8, 1024, 128),))
    other = dataclasses.replace(unnamed, operands=((8, 1024, 64),), flops=10**12)
    (found,) = planned_kernels([call], [other, unnamed], peak=1e12, bandwidth=1e9, pads=True)
    assert found.flops == KNOWN.flops


def test_the_kernel_for_the_groups_of_a_grouped_product_has_no_operations() -> None:
    """The kernel of the product itself states its operations."""
    call = dataclasses.replace(kernel_calls(Module(TEXT))[0], name="ragged-dot-metadata")
    found = planned_kernels([call], [], peak=1e12, bandwidth=1e9, pads=True)
    assert (found[0].flops, kernel_notes(found, Flops())) == (0, [])


@pytest.mark.parametrize("call", ["add/pallas_call", "add/mpmd_map"])
def test_a_mosaic_gpu_call_is_a_kernel(call: str) -> None:
    """As XLA writes it for an absent H100; the program of the kernel is an escaped text."""
    line = (
        "  ROOT %add.1 = f32[256,128]{1,0} custom-call(%x.1, %y.1), "
        'custom_call_target="mosaic_gpu_v2", operand_layout_constraints={f32[256,128]{1,0}, '
        "f32[128,128]{1,0}}, api_version=API_VERSION_TYPED_FFI, "
        f'metadata={{op_name="jit(f)/{call}" stack_frame_id=2}}, '
        r'backend_config={kernel_hash = "\17\B0}\"{", module = "ML\EFR{\0A (", '
        "use_custom_barrier = false}"
    )
    text = "\n".join(
        (
            "HloModule m",
            "",
            "ENTRY %main (x: f32[256,128], y: f32[128,128]) -> f32[256,128] {",
            "  %x.1 = f32[256,128]{1,0} parameter(0)",
            "  %y.1 = f32[128,128]{1,0} parameter(1)",
            line,
            "}",
        )
    )
    module = Module(text)
    (found,) = kernel_calls(module)
    assert (found.operands, found.results) == (((256, 128), (128, 128)), ((256, 128),))
    assert found.bytes == (4 * 256 * 128, 4 * 128 * 128, 4 * 256 * 128)
    assert products(module) == 0


def test_instructions_take_their_cycles_or_the_time_of_their_bytes() -> None:
    work = work_of(Module(TEXT))
    assert work == [
        Work(3000, 2 * WIDE + WEIGHT, has_products=True),
        Work(60000, 2 * WIDE, has_products=False),
        Work(100, 2 * WIDE, has_products=False),
        Work(2000, 3 * NARROW, has_products=False),
    ]
    chip = CHIPS["v5e"]
    assert chip.clock == pytest.approx(chip.flops / (4 * 128 * 128 * 2), rel=1e-3)
    found = instruction_times(work, chip)
    bandwidth = 819e9
    waiting = (2 * WIDE + WEIGHT + 2 * WIDE + 3 * NARROW) / bandwidth
    assert found is not None and found.products == 0
    assert (found.vector, found.memory) == pytest.approx((60000 / 1.503e9, waiting))
    assert instruction_times(work, CHIPS["v6e"]) is None  # whose clock is unknown
    assert work_of(Module(TEXT.replace("estimated_cycles", "other"))) == []


def test_an_estimate_says_which_part_is_the_compilers() -> None:
    own = InstructionTimes(products=4.0, vector=9.0, memory=1.0)
    times = Times(
        *(3.0, 3.0, 6.0, 2.0, 1.0, 0.5, 0.5),
        kernels=3.0,
        instructions=own,
    )
    assert (times.bound, times.estimate, times.bottleneck) == (3.0, 14 + 3 + 2, "vector unit")
    assert times.sources["instructions"] == TimeSource.COMPILER
    assert times.sources["kernels"] == TimeSource.ASSUMPTION
    assert times.sources["compute"] == TimeSource.PEAK


def test_permutes_in_opposite_directions_of_a_ring_run_at_the_same_time() -> None:
    there, back = (0, 1, 2, 3), (2, 1, 0, 3)  # the second one closes from 0 to 3
    directions = [permute_direction("collective-permute", group) for group in (there, back)]
    assert directions == [1, -1]
    permutes = [("over x", directions[0], 3.0), ("over x", directions[1], 2.0)]
    assert overlapped_seconds([*permutes, ("gathers", 0, 1.0), ("over y", 1, 0.5)]) == 4.5


EXPERIMENT = """
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from spmdtrain import Experiment, RunConfig
from spmdtrain.kernels.reference import uses_reference

TOKENS, HEADS, WIDTH = 512, 1, 64
SIZES = splash.BlockSizes(*[128] * 6, use_fused_bwd_kernel=True)


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    steps: int | None = 1
    global_batch_size: int | None = 2
    learning_rate: float | None = 0.1


def attention(x):
    if uses_reference():
        scores = jnp.einsum("bntd,bnsd->bnts", x, x)
        return jnp.einsum("bnts,bnsd->bntd", jax.nn.softmax(scores), x)
    mask = masks.MultiHeadMask([masks.CausalMask((TOKENS, TOKENS))] * HEADS)
    kernel = splash.make_splash_mha(mask, head_shards=1, q_seq_shards=1, block_sizes=SIZES)
    return jax.vmap(kernel)(x, x, x)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.ones(WIDTH))

    def __call__(self, x):
        x = x[:, None] * self.scale
        return attention(attention(x))[:, 0]


def build(config):
    return Experiment(
        model=Model,
        objective=lambda model, batch: {"loss": model(batch["x"]).mean((1, 2))},
        optimizer=optax.sgd(0.1),
        train={"x": np.zeros((4, TOKENS, WIDTH), np.float32)},
    )
"""


@needs_libtpu
@pytest.mark.nightly
def test_a_step_with_splash_attention_is_planned(tmp_path: Path) -> None:
    path = tmp_path / "splash.py"
    path.write_text(textwrap.dedent(EXPERIMENT))
    ended = plan(path, "--topology", "v5e:1x1", "--strategy", "default", "--no-advice", "--json")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    block = 2 * 2 * 128 * 128 * 64  # of the batch, for one product
    kernels = {kernel["name"]: kernel for kernel in found["kernels"]}
    forward = kernels["splash_mha_fwd_residuals"]
    assert forward["times"] * forward["flops"] == 2 * 10 * block  # 10 of 16 blocks
    backward = kernels["splash_mha_dkv_no_residuals"]
    assert backward["times"] * backward["flops"] == 5 * 10 * block
    # Of the model: the scores and the values, and two products for each in the backward pass.
    assert found["flops"]["model"] == 2 * 6 * 16 * block
    time = found["time"]
    assert 0 < time["kernels"] < time["estimate"]
    assert time["instructions"]["vector"] > 0
    assert any("splash.py:" in note and "no cost_estimate" in note for note in found["notes"])


CUDNN = """HloModule step, is_scheduled=true

ENTRY %main (q: bf16[16,1024,12,64]) -> bf16[16,12,1024,64] {
  %q = bf16[16,1024,12,64]{3,2,1,0} parameter(0)
  ROOT %fmha.1 = bf16[16,12,1024,64]{3,1,2,0} custom-call(%q, %q, %q), \
custom_call_target="TARGET", metadata={op_name="jit(step)/dot_product_attention_fwd"}, \
backend_config={"cudnn_fmha_backend_config": {"intermediate_tensor_shape": \
{"element_type": "BF16", "dimensions": ["16", "12", "1024", "1024"], "tuple_shapes": []}, \
"mask_type": "MASK", "sliding_window_length": WINDOW}}
}
"""
SUM = """
sum {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}
"""


@pytest.mark.parametrize(
    ("target", "mask", "window", "share"),
    [
        ("__cudnn$fmhaSoftmax", "NO_MASK", 0, 2),
        ("__cudnn$fmhaSoftmax", "CAUSAL", 0, 2 / 2),
        ("__cudnn$fmhaSoftmax", "CAUSAL", 128, 2 / 8),
        ("__cudnn$fmhaSoftmaxBackward", "CAUSAL", 0, 5 / 2),
    ],
)
def test_the_operations_of_the_attention_of_cudnn_follow_from_its_shapes(
    target: str, mask: str, window: int, share: float
) -> None:
    """They were missing in plans for GPUs, of which no other part knew them."""
    text = CUDNN.replace("MASK", mask).replace("TARGET", target).replace("WINDOW", str(window))
    module = Module(text)
    assert products(module) == 0
    (kernel,) = planned_kernels(kernel_calls(module), [], peak=1e15, bandwidth=3e12, pads=False)
    assert kernel.flops == share * 2 * 16 * 12 * 1024**2 * 64 and kernel.basis == CostBasis.SHAPES
    assert kernel.seconds == pytest.approx(max(kernel.flops / 0.24e15, kernel.bytes / 3e12))
    assert kernel_notes([kernel], Flops()) == []


def test_a_name_does_not_make_the_attention_of_cudnn_causal() -> None:
    text = CUDNN.replace("MASK", "NO_MASK").replace("WINDOW", "0").replace("step)", "CAUSAL)")
    (call,) = kernel_calls(Module(text.replace("TARGET", "__cudnn$fmhaSoftmax")))
    assert call.by_shapes == 2 * 2 * 16 * 12 * 1024**2 * 64


def test_an_attention_of_cudnn_without_its_shapes_is_a_named_error() -> None:
    text = CUDNN.replace("intermediate_tensor_shape", "another_shape")
    with pytest.raises(UnreadableProgramError):
        kernel_calls(Module(text.replace("TARGET", "__cudnn$fmhaSoftmax").replace("WINDOW", "0")))


def test_bytes_of_kernels_and_collectives_are_part_of_their_own_times() -> None:
    """The estimate for a GPU adds these times to that of the memory traffic."""
    copy = "  %copy = bf16[16,1024,12,64]{3,2,1,0} copy(%q)\n  ROOT %fmha.1"
    sums = copy.replace("copy", "all-reduce").replace("(%q)", "(%q), to_apply=%sum")
    text = CUDNN.replace("TARGET", "__cudnn$fmhaSoftmax").replace("WINDOW", "0")
    text = text.replace("  ROOT %fmha.1", copy).replace("  ROOT %fmha.1", sums)
    module = Module(text.replace("\nENTRY", f"{SUM}\nENTRY"))
    array = 2 * 16 * 1024 * 12 * 64
    assert bytes_moved(module) == (2 + 2 + 4) * array
    assert bytes_moved(module, omitted=is_timed_apart) == 2 * array

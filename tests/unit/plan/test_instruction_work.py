"""The work of instructions: products, kernels, operations on elements, and memory traffic."""

import dataclasses
import functools
import json
import math
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from plan_helpers import needs_libtpu, plan

from spmdtrain.plan.instruction_work import (
    KERNEL_EFFICIENCY,
    ElementKind,
    TrafficBasis,
    WorkKind,
    bytes_moved,
    element_operations,
    kernel_calls,
    opaque_calls,
    planned_kernels,
    products,
    work_of,
)
from spmdtrain.plan.measurement import ELEMENT_LOOPS
from spmdtrain.plan.planner import kernel_notes
from spmdtrain.plan.summary import is_timed_apart
from spmdtrain.plan.time_model import (
    InstructionTimes,
    Overlap,
    Times,
    TimeSource,
    element_seconds,
    instruction_times,
    overlapped_seconds,
    permute_direction,
)
from spmdtrain.step.flops import CostBasis, Flops, KernelFlops, count_flops
from spmdtrain.xla.chips import CHIPS
from spmdtrain.xla.hlo import RARE_BRANCH, Module, UnreadableProgramError

# A line of a program, the operands' dims and the operations: two for each multiply-add.
LINES = {
    "a dot with a batch dim": (
        "f32[8,32,16] dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}"
        ", rhs_contracting_dims={1}",
        ("8,32,64", "8,64,16"),
        2 * 8 * 32 * 16 * 64,
    ),
    "a TPU's dot": (
        "bf16[8,1024,3072] convolution(%a, %b), window={size=1}, dim_labels=0bf_io0->0bf",
        ("8,1024,768", "768,3072,1"),
        2 * 8 * 1024 * 3072 * 768,
    ),
    "whose batch dims are dilated": (
        "bf16[8,12,64,1024] convolution(%a, %b), window={size=8x12 stride=7x11 lhs_dilate=8x12}, "
        "dim_labels=0f1b_01oi->01bf",
        ("8,64,12,64", "8,12,1024,64"),
        2 * 8 * 12 * 64 * 1024 * 64,
    ),
    "one that is padded": (
        "f32[4,10,10,32] convolution(%a, %b), window={size=3x3 pad=1_1x1_1}, "
        "dim_labels=b01f_01io->b01f",
        ("4,10,10,16", "3,3,16,32"),
        2 * 4 * 28 * 28 * 16 * 32,  # along each dim 10 places meet 3 taps, but two of them 2
    ),
    "a strided one's gradient": (
        "f32[4,8,16] convolution(%a, %b), window={size=2 pad=1_1 lhs_dilate=2 rhs_reversal=1}, "
        "dim_labels=b0f_0oi->b0f",
        ("4,4,32", "2,16,32"),
        2 * 4 * 8 * 32 * 16,
    ),
    "one in groups": (
        "f32[4,10,32] convolution(%a, %b), window={size=1}, dim_labels=b0f_0io->b0f, "
        "feature_group_count=4",
        ("4,10,16", "1,4,32"),
        2 * 4 * 10 * 4 * 32,
    ),
    "one whose batch is in groups": (
        "f32[2,10,32] convolution(%a, %b), window={size=1}, dim_labels=b0f_0io->b0f, "
        "batch_group_count=4",
        ("8,10,16", "1,16,32"),
        2 * 2 * 10 * 16 * 32,
    ),
    "cuBLAS": (
        '(f32[32,16], s8[4096]) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", '
        'backend_config={"gemm_backend_config":{"dot_dimension_numbers":'
        '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}',
        ("32,64", "64,16"),
        2 * 32 * 16 * 64,
    ),
    "a kernel that does not tell": (
        'f32[32,16] custom-call(%a, %b), custom_call_target="__cudnn$fusion"',
        ("32,64", "64,16"),
        math.nan,
    ),
    "what is no product": (
        'f32[32,16] custom-call(%a, %b), custom_call_target="TopK"',
        ("32,64", "64,16"),
        0,
    ),
}


@pytest.mark.parametrize(("line", "operands", "expected"), LINES.values(), ids=LINES)
def test_operations(line: str, operands: tuple[str, str], expected: float) -> None:
    left, right = operands
    text = f"%a = f32[{left}] parameter(0)\n%b = f32[{right}] parameter(1)\nROOT %y = {line}\n"
    found = products(Module(f"HloModule m\n\nENTRY %main () -> f32[] {{\n{text}}}\n"))
    assert found == expected or (math.isnan(found) and math.isnan(expected))


def test_of_branches_the_one_that_does_most_counts() -> None:
    def chosen(x: jax.Array) -> jax.Array:
        branches = [lambda x: x, lambda x: x @ x, lambda x: x @ x @ x @ x]
        return jax.lax.switch(x[0, 0].astype(int), branches, x)

    step = jax.jit(chosen).trace(jnp.zeros((32, 32)))
    text = step.lower().compile().as_text() or ""
    assert "conditional" in text
    module = Module(text)
    assert products(module) == count_flops(step.jaxpr).total == 3 * 2 * 32**3
    (choice,) = module.choices
    # The others are known not to run: what is in them is not taken for the program's.
    assert sorted(module.times[name] for _, name in choice.called) == [0, 0, 1]


def test_a_rare_branch_counts_as_not_executed() -> None:
    def rare(x: jax.Array) -> jax.Array:
        with jax.named_scope(RARE_BRANCH):
            return x @ x @ x

    step = jax.jit(lambda x: jax.lax.cond(x[0, 0] > 0, rare, lambda x: x @ x, x))
    traced = step.trace(jnp.zeros((32, 32)))
    module = Module(traced.lower().compile().as_text() or "")
    assert products(module) == count_flops(traced.jaxpr).total == 2 * 32**3
    assert not module.choices
    assert len(module.with_rare_branch) == 1


def test_within_loops_and_fusions_as_often_as_they_run() -> None:
    def layers(weights: jax.Array, x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(h @ w), None

        return jax.lax.scan(layer, x, weights)[0].sum()

    step = jax.jit(jax.grad(layers)).trace(jnp.zeros((5, 32, 32)), jnp.zeros((8, 32)))
    text = step.lower().compile().as_text() or ""
    assert products(Module(text)) == count_flops(step.jaxpr).total == 5 * 3 * 2 * 8 * 32 * 32


# -- Pallas kernels of a TPU's program, and the cycles that its compiler estimates -----------------

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


def test_custom_calls_of_unknown_operations_are_named_with_their_lines() -> None:
    text = """HloModule m
ENTRY %main (a: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  %b = f32[8,8]{1,0} custom-call(%a), custom_call_target="__cudnn$fusion", metadata={op_name="conv"}
  ROOT %c = f32[8,8]{1,0} custom-call(%b), custom_call_target="Sharding"
}
"""
    module = Module(text)
    assert opaque_calls(module) == ["__cudnn$fusion (conv)"]
    assert math.isnan(products(module))
    assert opaque_calls(Module(text.replace("__cudnn$fusion", "Sharding"))) == []


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
    assert [(x.cycles, x.bytes, x.kind) for x in work if x.in_order and (x.cycles or x.bytes)] == [
        (3000, 2 * WIDE + WEIGHT, WorkKind.PRODUCTS),
        (60000, 2 * WIDE, WorkKind.VECTOR),
        (100, 2 * WIDE, WorkKind.VECTOR),
        (2000, 3 * NARROW, WorkKind.VECTOR),
    ]
    chip = CHIPS["v5e"]
    assert chip.clock == pytest.approx(chip.flops / (4 * 128 * 128 * 2), rel=1e-3)
    found = instruction_times(work, chip)
    bandwidth = 819e9
    waiting = (2 * WIDE + WEIGHT + 2 * WIDE + 3 * NARROW) / bandwidth
    assert found is not None and found.products == 0
    assert (found.vector, found.memory) == pytest.approx((60000 / 1.503e9, waiting))
    assert instruction_times(work, CHIPS["v6e"]) is None  # whose clock is unknown
    without = work_of(Module(TEXT.replace("estimated_cycles", "other")))
    assert instruction_times(without, chip) is None


def test_the_work_of_instructions_adds_up_to_that_of_the_program() -> None:
    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        def body(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.tanh(x @ w) / 3, None

        x = jax.lax.scan(body, x, None, length=5)[0]
        return x * jax.pure_callback(lambda: 2.0, jax.ShapeDtypeStruct((), x.dtype))

    shapes = jax.ShapeDtypeStruct((64, 32), "float32"), jax.ShapeDtypeStruct((32, 32), "float32")
    module = Module(jax.jit(step).lower(*shapes).compile().as_text() or "")
    work = work_of(module)
    assert module.name == "jit_step"
    assert sum(x.flops for x in work) == products(module) == 5 * 2 * 64 * 32 * 32
    assert sum(x.bytes for x in work) == bytes_moved(module)
    kinds = element_operations(module)
    assert kinds == {kind: sum(x.elements.get(kind, 0) for x in work) for kind in kinds}
    (product,) = (x for x in work if x.kind is WorkKind.PRODUCTS)
    assert (product.times, product.dtype, product.shape) == (5, "f32", "f32[64,32]")
    assert [x.kind for x in work if "callback" in x.op_name and x.bytes] == [WorkKind.HOST]
    assert "while" in [x.name.partition(".")[0] for x in work if x.kind is WorkKind.CONTROL]


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


# -- operations on elements, and their time --------------------------------------------------------

# Three of the five write elements in another order.
COPIES = """\
ENTRY %main (a: f32[1,16,8]) -> f32[8,1,16] {
  %a = f32[1,16,8]{2,1,0} parameter(0)
  %same = f32[1,16,8]{2,0,1} copy(%a)
  %other = f32[1,16,8]{1,2,0} copy(%same)
  %view = f32[1,8,16]{2,1,0} transpose(%other), dimensions={0,2,1}
  %moved = f32[1,16,8]{2,1,0} transpose(%view), dimensions={0,2,1}
  ROOT %again = f32[8,1,16]{2,1,0} transpose(%moved), dimensions={2,0,1}
}
"""
WINDOW = """\
ENTRY %main (a: f32[8,8]) -> f32[7,6] {
  %a = f32[8,8]{1,0} parameter(0)
  %z = f32[] constant(0)
  ROOT %sums = f32[7,6]{1,0} reduce-window(%a, %z), window={size=2x3}, to_apply=%add
}
"""


def five_times(x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, 5, lambda _, x: jnp.exp(-x), x)


@pytest.mark.parametrize(
    ("function", "kind", "count"),
    [
        (lambda x: jnp.exp(x) * 2 + x, "arithmetic", 2 * 2048),
        (lambda x: jnp.exp(x) * 2 + x, "functions", 2048),
        (lambda x: jnp.sqrt(x) / (x + 1), "divisions", 2 * 2048),
        (lambda x: (x * 2).sum(-1), "reductions", 2048),
        (five_times, "functions", 5 * 2048),
        (lambda x: x.swapaxes(0, 1) + 0, "transposes", 2048),
    ],
)
def test_operations_within_fusions_and_loops_count_for_each_element(
    function: Callable[[jax.Array], jax.Array], kind: str, count: int
) -> None:
    program = jax.jit(function).lower(jax.ShapeDtypeStruct((64, 32), jnp.float32)).compile()
    assert element_operations(Module(program.as_text() or ""))[kind] == count


@pytest.mark.parametrize(
    ("text", "found"),
    [(COPIES, {"transposes": 3 * 128}), (WINDOW, {"reductions": 7 * 6 * 2 * 3})],
)
def test_copies_count_if_elements_move_and_windows_in_full(
    text: str, found: dict[str, float]
) -> None:
    assert element_operations(Module(text)) == found


@pytest.mark.parametrize("kind", ElementKind)
def test_a_measured_loop_has_the_operations_and_copies_that_it_declares(kind: ElementKind) -> None:
    loop, iterations, elements = ELEMENT_LOOPS[kind], 20, 128 * 64
    body = functools.partial(jax.lax.fori_loop, 0, iterations, lambda _, x: loop.body(x))
    program = jax.jit(body).lower(jax.ShapeDtypeStruct((1, 128, 64), jnp.float32)).compile()
    module = Module(program.as_text() or "")
    declared = loop.operations * iterations * elements  # without those of the loop's counter
    assert element_operations(module)[kind] == pytest.approx(declared, rel=1e-4)
    copies = bytes_moved(module) / (iterations * 8 * elements)
    assert copies == pytest.approx(loop.copies, abs=0.1)


def test_the_time_of_operations_on_elements_is_added_to_a_step_on_cpu() -> None:
    operations = {"arithmetic": 3e6, "functions": 1e6}
    assert element_seconds(operations, CHIPS["h100"]) == 0  # no rates
    chip = dataclasses.replace(CHIPS["h100"], element_rates={"arithmetic": 1e9, "functions": 1e8})
    seconds = element_seconds(operations, chip)
    assert seconds == pytest.approx(0.013)
    times = Times(
        *(0.004, 0.004, 0.002, 0.001, 0.0, 0.0, 0.0), overlap=Overlap.NOTHING, elements=seconds
    )
    assert times.estimate == pytest.approx(0.004 + 0.002 + 0.001 + 0.013)
    assert times.bottleneck == "operations on elements"


# -- what instructions read and write in a device's main memory ------------------------------------

FUSED = """\
%copied (a: f32[16,8]) -> f32[16,8] {
  %a = f32[16,8]{1,0} parameter(0)
  ROOT %b = f32[16,8]{1,0} copy(%a)
}

%rows (a: f32[16,8], i: s32[]) -> f32[2,8] {
  %a = f32[16,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %z = s32[] constant(0)
  %part = f32[2,8]{1,0} dynamic-slice(%a, %i, %z), dynamic_slice_sizes={2,8}
  ROOT %twice = f32[2,8]{1,0} add(%part, %part)
}

%placed (a: f32[16,8], b: f32[2,8], i: s32[]) -> f32[16,8] {
  %a = f32[16,8]{1,0} parameter(0)
  %b = f32[2,8]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %z = s32[] constant(0)
  ROOT %all = f32[16,8]{1,0} dynamic-update-slice(%a, %b, %i, %z)
}

%nested_rows (a: f32[8,16], i: s32[]) -> f32[2,8] {
  %a = f32[8,16]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %same = f32[16,8]{1,0} bitcast(%a)
  ROOT %part = f32[2,8]{1,0} fusion(%same, %i), kind=kLoop, calls=%rows
}

%two (a: f32[16,8], b: f32[16,8]) -> (f32[16,8], f32[16,8], f32[16,8], f32[16,8]) {
  %a = f32[16,8]{1,0} parameter(0)
  %b = f32[16,8]{1,0} parameter(1)
  %c = f32[16,8]{1,0} negate(%a)
  %d = f32[16,8]{1,0} exponential(%a)
  %e = f32[16,8]{1,0} all-gather(%b), dimensions={0}
  ROOT %all = (f32[16,8]{1,0}, f32[16,8]{1,0}, f32[16,8]{1,0}, f32[16,8]{1,0}) \
tuple(%c, %d, %b, %e)
}

%nested_placed (a: f32[16,8], b: f32[2,8], i: s32[]) -> f32[8,16] {
  %a = f32[16,8]{1,0} parameter(0)
  %b = f32[2,8]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %all = f32[16,8]{1,0} fusion(%a, %b, %i), kind=kLoop, calls=%placed
  ROOT %same = f32[8,16]{1,0} bitcast(%all)
}
"""
WHOLE, PART, NUMBER = 4 * 16 * 8, 4 * 2 * 8, 4

TRAFFIC_LINES = {
    "an operand is read and a result written": ("f32[16,8]{1,0} negate(%a)", 2 * WHOLE),
    "what is in a TPU's vector memory is not": ("f32[16,8]{1,0:S(1)} negate(%a)", WHOLE),
    "nor what only names it": ("f32[8,16]{1,0} bitcast(%a)", 0),
    "of a slice the part": ("f32[2,8]{1,0} slice(%a), slice={[0:2], [0:8]}", 2 * PART),
    "also where the rest of it is read aside": (
        "((f32[16,8]{1,0}), f32[2,8]{1,0:S(1)}, s32[]{:S(2)}) slice-start(%a), "
        "slice={[0:2], [0:8]}",
        PART,
    ),
    "of an update the part": (
        "f32[16,8]{1,0} dynamic-update-slice(%a, %b, %i, %i)",
        2 * PART,
    ),
    "a copy to the vector memory is a read": (
        "(f32[16,8]{1,0:S(1)}, f32[16,8]{1,0}, u32[]{:S(2)}) copy-start(%a)",
        WHOLE,
    ),
    "a copy within the main memory is both": (
        "(f32[16,8]{1,0}, f32[16,8]{1,0}, u32[]{:S(2)}) copy-start(%a)",
        2 * WHOLE,
    ),
    "a fusion that slices": (
        "f32[2,8]{1,0} fusion(%a, %i), kind=kLoop, calls=%rows",
        2 * PART + NUMBER,
    ),
    "a fusion that slices in the background": (
        "((f32[16,8]{1,0}, s32[]), f32[2,8]{1,0}, u32[]) fusion-start(%a, %i), kind=kLoop, "
        "calls=%rows",
        2 * PART + NUMBER,
    ),
    "a fusion that updates in the background": (
        "((f32[16,8]{1,0}, f32[2,8]{1,0}, s32[]), f32[16,8]{1,0}, u32[]) "
        "fusion-start(%a, %b, %i), kind=kLoop, calls=%placed",
        2 * PART + NUMBER,
    ),
    "a fusion that updates": (
        "f32[16,8]{1,0} fusion(%a, %b, %i), kind=kLoop, calls=%placed",
        2 * PART + NUMBER,
    ),
    "a fusion with a result in a TPU's vector memory, beside a collective": (
        "(f32[16,8]{1,0:S(1)}, f32[16,8]{1,0}, f32[16,8]{1,0}, f32[16,8]{1,0}) "
        "fusion(%a, %a), kind=kLoop, calls=%two",
        2 * WHOLE,
    ),
    "whole tiles are stored": (
        "f32[16,8]{1,0:T(8,128)} negate(%a)",
        WHOLE + 4 * 16 * 128,
    ),
    "a fusion within which another slices what it renames": (
        "f32[2,8]{1,0} fusion(%a, %i), kind=kLoop, calls=%nested_rows",
        2 * PART + NUMBER,
    ),
    "a fusion within which another updates": (
        "f32[8,16]{1,0} fusion(%a, %b, %i), kind=kLoop, calls=%nested_placed",
        2 * PART + NUMBER,
    ),
    "what runs aside counts where it runs": (
        "((f32[16,8]{1,0}), f32[16,8]{1,0}, u32[]) call-start(%a), calls=%copied",
        2 * WHOLE,
    ),
    "what is reserved": (
        'f32[16,8]{1,0} custom-call(%a), custom_call_target="AllocateBuffer"',
        0,
    ),
}


@pytest.mark.parametrize(("line", "expected"), TRAFFIC_LINES.values(), ids=TRAFFIC_LINES)
def test_bytes(line: str, expected: int) -> None:
    text = (
        f"HloModule m\n\n{FUSED}\nENTRY %main () -> f32[] {{\n"
        "  %a = f32[16,8]{1,0} parameter(0)\n"
        "  %b = f32[2,8]{1,0} parameter(1)\n"
        "  %i = s32[] parameter(2)\n"
        f"  ROOT %y = {line}\n}}\n"
    )
    assert bytes_moved(Module(text)) == expected

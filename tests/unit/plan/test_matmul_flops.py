"""The products of a compiled program, as its text tells them."""

import math

import jax
import jax.numpy as jnp
import pytest

from spmdtrain.plan.instruction_work import products
from spmdtrain.step.flops import count_flops
from spmdtrain.xla.hlo import RARE_BRANCH, Module

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

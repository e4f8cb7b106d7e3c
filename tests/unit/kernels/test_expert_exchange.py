"""Both exchanges of tokens between experts, on emulated devices: XLA has one of them for CPUs."""

from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmdtrain.config.options import ExpertExchange, ExpertOptions
from spmdtrain.kernels.experts import ExpertLayer, split_experts

PyTree = Any
DEVICES, EXPERTS, TOP_K, TOKENS, WIDTH = 2, 4, 2, 5, 3


def ragged_all_to_all(
    operand: Any, output: Any, starts: Any, sizes: Any, targets: Any, _: Any, *, axis_name: str
) -> Any:
    """Emulates the operation by its definition: each device takes the rows sent to it."""
    own, place = jax.lax.axis_index(axis_name), jnp.arange(len(output))
    sent = [jax.lax.all_gather(x, axis_name) for x in (operand, starts, sizes, targets)]
    for rows, start, size, target in zip(*sent, strict=True):
        index = place - target[own]
        is_sent = (index >= 0) & (index < size[own])
        taken = rows[jnp.clip(start[own] + index, 0, len(rows) - 1)]
        output = jnp.where(is_sent[:, None], taken, output)
    return output


@jax.custom_vjp
def ragged_dot(rows: Any, kernel: Any, counts: Any) -> Any:
    """Emulates the operation; rows of no group become 7, because they are not specified.

    So do their gradients, because the transpose of the operation is one of its kind.
    """
    return grouped(rows, kernel, counts)[0]


def grouped(rows: Any, kernel: Any, counts: Any) -> Any:
    group = (jnp.arange(len(rows))[:, None] >= jnp.cumsum(counts)).sum(1)
    of_group = (group < len(kernel))[:, None]
    group = jnp.minimum(group, len(kernel) - 1)
    values = jnp.einsum("nw,nwo->no", rows, kernel[group])
    return jnp.where(of_group, values, 7.0), (rows, kernel, group, of_group)


def grouped_gradients(kept: Any, by: Any) -> Any:
    rows, kernel, group, of_group = kept
    of_rows = jnp.einsum("no,nwo->nw", by, kernel[group])
    of_each = jnp.where(of_group[..., None], jnp.einsum("nw,no->nwo", rows, by), 0.0)
    of_kernel = jnp.zeros_like(kernel).at[group].add(of_each)
    return jnp.where(of_group, of_rows, 7.0), of_kernel, None


ragged_dot.defvjp(grouped, grouped_gradients)


def ffn(rows: jax.Array, weights: PyTree, dot: Any) -> jax.Array:
    return dot(jnp.tanh(dot(rows, weights["up"])), weights["down"])


def arrays() -> tuple[Any, ...]:
    """Tokens, choices, factors, weights and cotangent; the leading dim is the device."""
    draw = np.random.default_rng(0)
    choices = draw.permuted(np.tile(np.arange(EXPERTS), (DEVICES, TOKENS, 1)), axis=-1)
    shape = DEVICES, EXPERTS // DEVICES, WIDTH, WIDTH
    weights = {name: draw.normal(size=shape).astype("f") for name in ("up", "down")}
    x, by = (draw.normal(size=(DEVICES, TOKENS, WIDTH)).astype("f") for _ in range(2))
    scale = draw.uniform(size=(DEVICES, TOKENS, TOP_K)).astype("f")
    return x, choices[..., :TOP_K].astype("i"), scale, weights, by


def reference(x: Any, chosen: Any, scale: Any, weights: Any) -> Any:
    """The sums by the definition, each token with the kernels of its experts."""
    up, down = (jnp.concatenate(weights[name])[chosen] for name in ("up", "down"))
    hidden = jnp.tanh(jnp.einsum("dtw,dtkwh->dtkh", x, up))
    return jnp.einsum("dtkh,dtkho,dtk->dto", hidden, down, scale)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", get_args(ExpertExchange))
@pytest.mark.parametrize(
    ("capacity_factor", "overflows"),
    [(1.0, True), pytest.param(2.0, False, marks=pytest.mark.nightly)],
)
def test_each_exchange_and_branch_has_the_sums_and_gradients_of_the_definition(
    monkeypatch: pytest.MonkeyPatch,
    exchange: ExpertExchange,
    capacity_factor: float,
    overflows: bool,
) -> None:
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
    monkeypatch.setattr(jax.lax, "ragged_dot", ragged_dot)
    options = ExpertOptions(exchange=exchange, capacity_factor=capacity_factor)
    layer = ExpertLayer(ffn, EXPERTS, DEVICES, options, ("expert",), on_cpu=False)
    x, chosen, scale, weights, by = arrays()

    def of_device(given: tuple[Any, ...], chosen: Any, by: Any) -> Any:
        def total(x: Any, scale: Any, weights: Any) -> Any:
            output, overflow = split_experts(layer, x, chosen, scale, weights)
            return (output * by).sum(), (output, overflow)

        (_, found), gradients = jax.value_and_grad(total, (0, 1, 2), has_aux=True)(*given)
        return found, gradients

    def wanted(x: Any, scale: Any, weights: Any) -> Any:
        output = reference(x, chosen, scale, weights)
        return (output * by).sum(), output

    def both(*given: Any) -> Any:
        (_, output), gradients = jax.value_and_grad(wanted, (0, 1, 2), has_aux=True)(*given)
        own = jax.vmap(of_device, axis_name="expert")(given, chosen, by)
        return own, (output, gradients)

    program = jax.jit(both).trace(x, scale, weights)
    assert str(program.jaxpr).count("cond[") == 2  # of the forward and of the backward pass
    ((output, overflow), gradients), expected = program.lower().compile()(x, scale, weights)
    assert overflow.tolist() == [overflows] * DEVICES
    found = jax.tree.leaves((output, gradients))
    for one, other in zip(found, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)

"""Products of rows with the matrices of their groups, by blocks of rows."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdtrain.kernels.experts import grouped_product
from spmdtrain.step.flops import count_flops

GROUPS, ROWS, WIDTH, OUT = 4, 560, 5, 3  # blocks of 64 rows


@partial(jax.jit, static_argnums=3)
def products(rows: Any, kernel: Any, counts: Any, platform: str) -> Any:
    """Returns the products, and gradients of a sum over the rows that belong to a group."""
    used = (jnp.arange(len(rows)) < counts.sum())[:, None]

    def total(rows: Any, kernel: Any) -> Any:
        rows = jnp.where(used, rows, 0)  # the gradients of others are not specified either
        found = jnp.where(used, grouped_product(rows, kernel, counts), 0)
        return (found * jnp.cos(jnp.arange(found.size).reshape(found.shape))).sum(), found

    (_, found), gradients = jax.value_and_grad(total, (0, 1), has_aux=True)(rows, kernel)
    return found, *gradients


@settings(max_examples=100, deadline=None)
@given(
    counts=st.lists(st.integers(0, 300), min_size=GROUPS, max_size=GROUPS).filter(
        lambda counts: sum(counts) <= ROWS
    ),
    spoiled=st.integers(0, GROUPS - 1),
)
@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu", "another"])
def test_each_row_has_the_product_with_its_own_matrix(
    platform: str, counts: list[int], spoiled: int
) -> None:
    draw = np.random.default_rng(sum(counts))
    rows = draw.normal(size=(ROWS, WIDTH)).astype("f")
    kernel = draw.normal(size=(GROUPS, WIDTH, OUT)).astype("f")
    if platform in ("cpu", "gpu"):  # not by `ragged_dot`, with which a CPU computes all products
        kernel[spoiled, 0, 0] = np.nan  # stays in the rows of its group
    with pytest.MonkeyPatch.context() as patch:
        device = SimpleNamespace(platform=platform)
        patch.setattr("spmdtrain.kernels.experts.current_device", lambda: device)
        of_three = 3 * kernel[0].nbytes
        patch.setattr("spmdtrain.kernels.experts.GATHERED_BYTES", of_three)
        outputs = products(rows, kernel, np.array(counts, "i"), platform)
    found, of_rows, of_kernel = map(np.asarray, outputs)
    by = np.cos(np.arange(ROWS * OUT).reshape(ROWS, OUT))
    start = 0
    for group, count in enumerate(counts):
        part = slice(start, start := start + count)
        for one, other in (
            (found[part], rows[part] @ kernel[group]),
            (of_rows[part], by[part] @ kernel[group].T),
            (of_kernel[group], rows[part].T @ by[part]),
        ):
            np.testing.assert_allclose(one, other, atol=1e-4)
    assert not found[start:].any() and not of_rows[start:].any()


def test_on_cpu_it_multiplies_few_more_rows_than_there_are() -> None:
    shapes = [(2048, 64), (8, 64, 32), (8,)]
    arrays = [jax.ShapeDtypeStruct(s, t) for s, t in zip(shapes, ("f", "f", "i"), strict=True)]
    program = jax.jit(grouped_product).lower(*arrays).compile()
    costs: Any = program.cost_analysis()
    assert costs["flops"] < 1.7 * 2 * 2048 * 64 * 32  # `ragged_dot` needs 8 times as many


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_on_accelerators_the_gradients_are_computed_from_few_more_rows(
    platform: str, tensor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimpleNamespace(platform=platform)
    monkeypatch.setattr("spmdtrain.kernels.experts.current_device", lambda: device)
    over = SimpleNamespace(parts={"tensor": tensor}.get)
    monkeypatch.setattr("spmdtrain.kernels.experts.current_mesh", lambda: over)
    rows, kernel, counts = jnp.ones((2048, 64)), jnp.ones((8, 64, 32)), jnp.full(8, 256)
    gradient = jax.make_jaxpr(jax.grad(lambda x: grouped_product(rows, x, counts).sum()))(kernel)
    in_blocks = (2048 // 128 + 8 - 1) * 128
    # JAX leaves out the gradient of the rows, which nothing uses, except by a `custom_vjp`.
    if platform == "gpu":
        rows_computed = 3 * in_blocks
    else:
        rows_computed = 2 * 2048 + in_blocks if tensor == 1 else 2 * 2048
    assert count_flops(gradient).total == 2 * 64 * 32 * rows_computed

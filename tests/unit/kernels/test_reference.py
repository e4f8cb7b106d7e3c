"""Parts that the kernels share: the context of the reference, batch moments, varying axes."""

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from step_helpers import on

from spmdtrain import linear_cross_entropy
from spmdtrain.config.run_config import RunConfig
from spmdtrain.kernels.experts import grouped_product
from spmdtrain.kernels.reference import moments, reference_kernels, uses_reference
from spmdtrain.sharding.placement import make_placement, use_placement
from spmdtrain.step.exact import ON_VIRTUAL_SHARD, VIRTUAL_SHARD


@jax.jit
def operation(x: jax.Array) -> jax.Array:
    return jnp.dot(x, x) if uses_reference() else jnp.sin(x)


def test_a_trace_with_kernels_is_not_reused_in_the_context() -> None:
    assert operation.trace(jnp.ones(3)).out_info.shape == (3,)
    with reference_kernels():
        assert operation.trace(jnp.ones(3)).out_info.shape == ()
    assert operation.trace(jnp.ones(3)).out_info.shape == (3,)


# -- mean and variance of each channel over the global batch ---------------------------------------


@pytest.mark.slow
def test_a_batch_that_does_not_divide_has_the_same_statistics() -> None:
    x = np.random.default_rng(0).normal(3, 1, (12, 2, 2, 3)).astype(np.float32)
    with use_placement(make_placement(RunConfig(strategy="mirrored", mesh=on(8)))):
        mean, var = jax.jit(moments)(x, jnp.zeros(3))
    np.testing.assert_allclose(mean, x.mean((0, 1, 2)), rtol=1e-6)
    np.testing.assert_allclose(var, x.var((0, 1, 2)), rtol=1e-6)


def test_statistics_over_a_named_axis_are_those_of_all_rows() -> None:
    x = np.random.default_rng(0).normal(1000, 1, (4, 16, 3)).astype(np.float32)
    near = jnp.full(3, 999.0)  # without it the variance would be wrong by several percent
    with use_placement(ON_VIRTUAL_SHARD):
        statistics = jax.vmap(partial(moments, near=near), axis_name=VIRTUAL_SHARD)(jnp.asarray(x))
    for found, expected in zip(statistics, (x.mean((0, 1)), x.var((0, 1))), strict=True):
        np.testing.assert_allclose(found, np.broadcast_to(expected, (4, 3)), rtol=1e-5)


# -- in a jax.shard_map of the user, with its check of the axes over which arrays vary -------------

DRAW = np.random.default_rng(0)
HALVES = slice(512), slice(512, 1024)
Function = Callable[[Any, Any], jax.Array]


def losses(**options: Any) -> Function:
    def function(params: Any, data: Any) -> jax.Array:
        hidden, targets = data
        head, bias = (x.astype(hidden.dtype) for x in params)
        return linear_cross_entropy(hidden, head, targets, bias=bias, **options).loss

    return function


def products(params: Any, data: Any) -> jax.Array:
    rows, weights = data
    return grouped_product(rows, params[0], jnp.array([160, 96, 0, 256])) * weights


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "dtype", "platform"),
    [
        (losses(), "bfloat16", "cpu"),
        (losses(chunks=3), "float32", "cpu"),
        (losses(logits_dtype="bfloat16"), "float32", "cpu"),
        (products, "float32", "cpu"),
        (products, "float32", "gpu"),
        (products, "float32", "tpu"),
    ],
)
def test_gradients_are_those_of_all_rows(
    function: Function, dtype: str, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimpleNamespace(platform=platform)
    monkeypatch.setattr("spmdtrain.kernels.experts.current_device", lambda: device)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x = DRAW.normal(size=(1024, 16)).astype("f")
    if function is products:
        params: Any = (jnp.asarray(DRAW.normal(size=(4, 16, 8)), "f"),)
        data: Any = (x, DRAW.normal(size=(1024, 8)).astype("f"))
    else:
        params = tuple(jnp.asarray(DRAW.normal(size=shape), "f") for shape in ((32, 16), (32,)))
        data = (jnp.asarray(x, dtype), DRAW.integers(0, 32, 1024))

    def expected(params: Any) -> jax.Array:
        first, second = (jax.tree.map(itemgetter(rows), data) for rows in HALVES)
        return function(params, first).sum() + function(params, second).sum()

    def of_device(params: Any, data: Any) -> jax.Array:
        return jax.lax.psum(function(params, data).sum(), "data")

    specs = PartitionSpec(), PartitionSpec("data")
    split = jax.shard_map(of_device, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())
    found = jax.jit(jax.value_and_grad(split))(params, data)
    for one, other in zip(
        jax.tree.leaves(found), jax.tree.leaves(jax.value_and_grad(expected)(params)), strict=True
    ):
        np.testing.assert_allclose(
            one, other, rtol=2e-2 if dtype == "bfloat16" else 1e-4, atol=1e-3
        )

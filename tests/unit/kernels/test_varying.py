"""Kernels in a `jax.shard_map` of the user, with its check of the axes over which arrays vary."""

from collections.abc import Callable
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from spmdtrain import linear_cross_entropy
from spmdtrain.kernels.experts import grouped_product

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

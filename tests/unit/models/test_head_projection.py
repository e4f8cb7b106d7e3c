"""Projections to heads for TPUs and GPUs, and the squared ReLU: the usual values and gradients."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmdtrain import MeshSpec, RunConfig
from spmdtrain.models import layers
from spmdtrain.models.layers import project_qkv, squared_relu
from spmdtrain.sharding.placement import make_placement, use_placement

SHAPES = (2, 5, 16), (16, 3, 4, 8), (3, 4, 8), (3, 2, 5, 4, 8)
RANDOM = np.random.default_rng(0)
X, KERNEL, BIAS, TARGET = (RANDOM.normal(size=shape).astype(np.float32) for shape in SHAPES)


def products(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    return (jnp.stack(project_qkv(x, kernel, bias)) * TARGET).sum()


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_the_platform_changes_neither_values_nor_derivatives(
    platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = tuple(map(jnp.asarray, (X, KERNEL, BIAS)))

    def computed() -> tuple[Any, ...]:
        gradients = jax.grad(products, argnums=(0, 1, 2))(*given)
        return project_qkv(*given), gradients, jax.jvp(products, given, given)

    def jaxpr_of(function: Any) -> str:
        return str(jax.make_jaxpr(partial(function))(*given))  # `partial`: a new trace

    with use_placement(make_placement(RunConfig(mesh=MeshSpec(devices=(0,))))):
        expected = computed()
        assert jaxpr_of(project_qkv).count("dot_general[") == 1
        device = SimpleNamespace(platform=platform)
        monkeypatch.setattr(layers, "current_device", lambda: device)
        found = computed()
        assert jaxpr_of(project_qkv).count("dot_general[") == 3
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_the_gradient_of_the_squared_relu_has_the_values_of_jax() -> None:
    x = jnp.array([-2.0, -0.0, 0.0, 0.5, 3.0])
    plain = jax.vmap(jax.grad(lambda x: jnp.square(jax.nn.relu(x))))(x)
    np.testing.assert_array_equal(jax.vmap(jax.grad(squared_relu))(x), plain)
    np.testing.assert_array_equal(squared_relu(x), jnp.square(jax.nn.relu(x)))

"""Mean and variance of each channel over the global batch."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from step_helpers import on

from spmdtrain.config.run_config import RunConfig
from spmdtrain.kernels.reference import moments
from spmdtrain.sharding.placement import make_placement, use_placement
from spmdtrain.step.exact import ON_VIRTUAL_SHARD, VIRTUAL_SHARD


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

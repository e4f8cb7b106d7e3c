"""The choice between unrolled layers and a loop, and its description."""

import jax
import jax.numpy as jnp
import pytest

from spmdtrain.step.layer_loop import describe_layers, scan_layers


@pytest.mark.parametrize(
    ("layers", "unroll", "text"),
    [
        (1, None, "1 layer unrolled"),
        (12, None, "12 layers unrolled"),
        (13, None, "13 layers in a loop"),
        (13, True, "13 layers unrolled"),
        (2, False, "2 layers in a loop"),
    ],
)
def test_small_numbers_of_layers_are_unrolled(layers: int, unroll: bool | None, text: str) -> None:
    def loss(weights: jax.Array) -> jax.Array:
        x, _ = scan_layers(lambda x, w: (jnp.sin(x * w), None), jnp.ones(3), weights, unroll)
        return x.sum()

    traced = jax.jit(jax.grad(loss)).trace(jnp.ones((layers, 3)))
    assert describe_layers(traced.jaxpr.jaxpr) == text
    if layers > 1:  # XLA removes a loop of one step
        assert ("while" in traced.lower().as_text()) == ("loop" in text)


def test_other_loops_are_not_layers() -> None:
    jaxpr = jax.make_jaxpr(lambda x: jax.lax.scan(lambda x, _: (x + 1, None), x, length=3))(0.0)
    assert describe_layers(jaxpr.jaxpr) == ""

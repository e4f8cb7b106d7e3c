"""The gradients of whole logits in 16 bits against those of the reference, which JAX derives."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmdtrain import MeshSpec, RunConfig, TokenLosses, linear_cross_entropy
from spmdtrain.kernels.linear_cross_entropy import normalizers_and_largest
from spmdtrain.kernels.reference import reference_kernels
from spmdtrain.sharding.placement import make_placement, use_placement

ROWS, TOKENS, WIDTH, HEAD, VOCABULARY = 8, 5, 16, 40, 37
RANDOM = np.random.default_rng(0)
ARRAYS = {
    "hidden": RANDOM.normal(size=(ROWS, TOKENS, WIDTH)).astype(jnp.bfloat16),
    "head": RANDOM.normal(size=(HEAD, WIDTH)).astype(jnp.bfloat16),
    "bias": RANDOM.normal(size=HEAD).astype(jnp.bfloat16),
}
TARGETS: Any = RANDOM.integers(0, VOCABULARY, (ROWS, TOKENS)).astype(np.int32)
WEIGHTS: Any = RANDOM.uniform(size=(ROWS, TOKENS)).astype(np.float32)
WEIGHTS[0] = 0  # a row of padding


def total(arrays: dict[str, jax.Array], **options: Any) -> tuple[jax.Array, TokenLosses]:
    found = linear_cross_entropy(
        arrays["hidden"], arrays["head"], TARGETS, bias=arrays.get("bias"), **options
    )
    return (found.loss * WEIGHTS).sum(), found


def computed(arrays: dict[str, jax.Array], **options: Any) -> Any:
    def run(arrays: dict[str, jax.Array]) -> Any:
        return jax.value_and_grad(lambda x: total(x, **options), has_aux=True)(arrays)

    (_, losses), gradients = jax.jit(run)(arrays)
    return losses, gradients


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize(
    ("names", "options"),
    [
        (("hidden", "head"), {"vocabulary": VOCABULARY}),
        (
            ("hidden", "head", "bias"),
            {"vocabulary": VOCABULARY, "z_loss": 1e-2, "soft_cap": 5.0},
        ),
    ],
)
def test_values_are_equal_and_gradients_round_to_16_bits(
    names: tuple[str, ...], options: dict[str, Any], platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = {name: jnp.asarray(ARRAYS[name]) for name in names}
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), arrays)
    with reference_kernels():
        expected, gradients = computed(wide, **options)
    device = SimpleNamespace(platform=platform, device_kind="")
    monkeypatch.setattr("spmdtrain.kernels.linear_cross_entropy.current_device", lambda: device)
    placement = make_placement(
        RunConfig(strategy="tensor_parallel", mesh=MeshSpec(data=2, tensor=4))
    )
    for place in (None, placement):
        if place is None:
            losses, found = computed(arrays, **options)
        else:
            with use_placement(place):
                losses, found = computed(arrays, **options)
        np.testing.assert_allclose(losses.loss, expected.loss, rtol=1e-5)
        np.testing.assert_array_equal(losses.correct, expected.correct)
        for name in names:
            assert found[name].dtype == jnp.bfloat16
            scale = float(jnp.abs(gradients[name]).max())
            np.testing.assert_allclose(
                found[name].astype(jnp.float32), gradients[name], rtol=0.02, atol=0.01 * scale
            )
    np.testing.assert_array_equal(found["hidden"][0].astype(jnp.float32), 0)


def test_one_pass_over_logits_has_the_results_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = (100 * RANDOM.normal(size=(7, 1000))).astype(np.float32)
    logits[0] = -1e9  # no row with a token, and equal ones
    logits[1, ::2] = -np.inf
    logits[2, 5], logits[3, 500] = np.nan, np.inf
    logits[4] = np.sort(logits[4])  # a new maximum in each step of the sum
    logits[5] = 3e38 * np.sign(logits[5])  # differences overflow

    def computed(logits: Any) -> Any:
        normalizers, largest = normalizers_and_largest(logits)
        return normalizers, largest, jax.grad(lambda x: normalizers_and_largest(x)[0].sum())(logits)

    *expected, of_finite = computed(logits)
    device = SimpleNamespace(platform="gpu")
    monkeypatch.setattr("spmdtrain.kernels.linear_cross_entropy.current_device", lambda: device)
    *found, gradients = computed(logits)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    assert np.isnan(gradients[2:4]).any(1).all()
    one, other = (np.delete(x, [2, 3], 0) for x in (gradients, of_finite))
    np.testing.assert_allclose(one, other, rtol=1e-6)
    assert "reduce_max" not in str(jax.make_jaxpr(partial(computed))(logits))

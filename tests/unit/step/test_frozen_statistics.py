"""Frozen batch normalizations: they train with their stored averages, which do not change."""

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from step_helpers import one_step, trainer

from spmdtrain import KerasModel, LinenModel
from spmdtrain.tree import named_leaves

ROWS, WIDTH = 64, 3
X = 5 + 2 * np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.body = nnx.List([nnx.BatchNorm(WIDTH, rngs=rngs)])
        self.head = nnx.BatchNorm(WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.body[0](x) ** 2)


class Body(linen.Module):
    by_argument: bool

    @linen.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        if self.by_argument:
            return linen.BatchNorm()(x, use_running_average=not train)
        return linen.BatchNorm(use_running_average=not train)(x)


class Linen(linen.Module):
    by_argument: bool

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = Body(self.by_argument, name="body")(x, train) ** 2
        return linen.BatchNorm(use_running_average=not train, name="head")(x)


def keras_model() -> KerasModel:
    import keras

    inputs = keras.Input((WIDTH,))
    body = keras.layers.BatchNormalization(name="body", epsilon=1e-5, momentum=0.99)
    head = keras.layers.BatchNormalization(name="head", epsilon=1e-5, momentum=0.99)
    return KerasModel(keras.Model(inputs, head(body(inputs) ** 2)))


def objective(model: Any, batch: Any) -> dict[str, jax.Array]:
    output = model(batch, train=model.training) if hasattr(model, "_module") else model(batch)
    return {"loss": ((output - 1) ** 3).mean(-1)}


@pytest.mark.parametrize(
    "model",
    [
        lambda: lambda rngs: Nnx(rngs),
        lambda: LinenModel(Linen(True), X),
        lambda: LinenModel(Linen(False), X),
        pytest.param(keras_model, marks=pytest.mark.slow),
    ],
    ids=["nnx", "linen", "linen by attribute", "keras"],
)
def test_a_frozen_normalization_uses_and_keeps_its_stored_averages(
    model: Callable[[], Any],
) -> None:
    made = trainer(model=model(), objective=objective, freeze=("^body",))
    before = named_leaves(made.functions.init(0).model_state)
    before = {name: np.asarray(x) for name, x in before.items()}
    state, output = one_step(made, X)
    # The stored averages are 0 and 1, so that the body passes its input on.
    y = (X / np.sqrt(1 + 1e-5)) ** 2
    z = (y - y.mean(0)) / np.sqrt(y.var(0) + 1e-5)
    np.testing.assert_allclose(output.metrics["loss"], ((z - 1) ** 3).mean(), rtol=1e-4)
    for name, array in named_leaves(state.model_state).items():
        assert ("body" in name) == (np.asarray(array) == before[name]).all(), name
    mean = next(
        x for n, x in named_leaves(state.model_state).items() if "head" in n and "mean" in n
    )
    np.testing.assert_allclose(mean, 0.01 * y.mean(0), rtol=1e-4)


def test_a_pattern_may_freeze_batch_statistics_alone() -> None:
    made = trainer(model=lambda rngs: Nnx(rngs), objective=objective, freeze=("/(mean|var)$",))
    state, output = one_step(made, X)
    assert named_leaves(state.opt_state.trace).keys() == named_leaves(state.params).keys()
    y = (X / np.sqrt(1 + 1e-5)) ** 2  # then the head has the averages 0 and 1 as well
    np.testing.assert_allclose(output.metrics["loss"], ((y - 1) ** 3).mean(), rtol=1e-4)


class Counting(nnx.Module):
    """A layer that is no batch normalization and counts its calls."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.calls = nnx.BatchStat(jnp.zeros(2))
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1
        return self.norm(x)


@pytest.mark.parametrize(("freeze", "calls"), [((), 1), (("^calls$",), 0)])
def test_the_frozen_state_of_any_layer_keeps_its_value(freeze: Any, calls: int) -> None:
    made = trainer(model=lambda rngs: Counting(rngs), objective=objective, freeze=freeze)
    state, _ = one_step(made, X)
    np.testing.assert_array_equal(named_leaves(state.model_state)["calls"], [calls] * 2)

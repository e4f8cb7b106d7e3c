"""Models that travel to workers: a copy computes what the model computes."""

import os
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from spmdtrain.adapters.as_adapter import FunctionModel, as_adapter
from spmdtrain.adapters.base import Mode
from spmdtrain.adapters.linen import LinenModel
from spmdtrain.adapters.lora import LoraModel
from spmdtrain.keras.model import KerasModel
from spmdtrain.parameter_server.worker import PickledProgram

os.environ.setdefault("KERAS_BACKEND", "jax")  # read when Keras is first imported
keras = pytest.importorskip("keras", reason="Keras is an extra")
pytest.importorskip("ray", reason="Ray is an extra")

X = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
Layer: Any = keras.layers.Layer
Model: Any = keras.Model


class Noisy(Layer):  # type: ignore[misc]
    """A layer without `get_config`, with an argument that Keras cannot write to a file."""

    def __init__(self, scale: Callable[[Any], Any]) -> None:
        super().__init__()
        self.scale, self.seeds = scale, keras.random.SeedGenerator(1)

    def build(self, shape: Any) -> None:
        self.gain = self.add_weight(shape=shape[-1:], name="gain", initializer="ones")

    def call(self, x: Any) -> Any:
        return self.scale(x) * self.gain + keras.random.normal(x.shape, seed=self.seeds)


class Subclassed(Model):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.hidden = [keras.layers.Dense(4), keras.layers.Dropout(0.5)]
        self.by_name = {"norm": keras.layers.BatchNormalization()}

    def call(self, x: Any) -> Any:
        for layer in (*self.hidden, *self.by_name.values()):
            x = layer(x)
        return x


def deep() -> Any:
    x = inputs = keras.Input((4,))
    for _ in range(150):  # deeper than Python's recursion
        x = keras.layers.Identity()(x)
    dense = keras.layers.Dense(4, kernel_regularizer="l2")
    return keras.Model(inputs, keras.layers.Add()([dense(x), dense(dense(x))]))


def of_keras(make: Callable[[], Any]) -> Callable[[], KerasModel]:
    return lambda: KerasModel(make(), X)


MODELS: dict[str, Callable[[], Any]] = {
    "layers without get_config": of_keras(
        lambda: keras.Sequential([keras.Input((4,)), Noisy(lambda x: 2 * x), keras.layers.Dense(2)])
    ),
    "subclassed": of_keras(Subclassed),
    "deep, with a regularizer and a layer that is called twice": of_keras(deep),
    "nnx": lambda: as_adapter(
        nnx.Sequential(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), nnx.BatchNorm(3, rngs=nnx.Rngs(1)))
    ),
    "linen": lambda: LinenModel(linen.Dense(3), X),
    "lora": lambda: LoraModel(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), "kernel$", rank=2),
    "function": lambda: FunctionModel(
        lambda key: {"w": jax.random.normal(key, (4, 2))}, lambda params, x: x @ params["w"]
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_copy_has_the_outputs_the_gradients_and_the_state_of_the_model(name: str) -> None:
    loss = keras.losses.MeanSquaredError(reduction=None)  # of the objective: it travels, too

    def objective(model: Any, batch: Any) -> dict[str, Any]:
        out = model(batch)
        return {"loss": loss(jnp.zeros_like(out), out) + sum(getattr(model, "losses", ()))}

    def step(part: Any) -> Any:
        adapter, function = part
        variables = jax.jit(adapter.init)(adapter.given, jax.random.key(0))

        def total(params: Any) -> Any:
            of = variables._replace(params=params)
            found, state = adapter.run(function, of, X, jax.random.key(1), Mode.TRAIN)
            return found["loss"].sum(), (found, state)

        return jax.jit(jax.grad(total, has_aux=True))(variables.params)

    program: Any = (MODELS[name](), objective)
    # As Ray pickles it, whose copies of arrays cannot be written to.
    pickled = pickle.dumps(PickledProgram.of(program), protocol=5)
    found, expected = step(pickle.loads(pickled).load()), step(program)
    jax.tree.map(np.testing.assert_array_equal, found, expected)

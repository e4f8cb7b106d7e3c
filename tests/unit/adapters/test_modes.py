"""Modes of layers: what the user has set to evaluation stays in it while the model trains."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import numpy as np
import optax
import pytest
from flax import linen, nnx
from step_helpers import one_step, trainer

from spmdtrain import LinenModel, LoraModel, Trainer, load_model
from spmdtrain.adapters.as_adapter import as_adapter
from spmdtrain.adapters.base import Mode
from spmdtrain.tree import named_leaves

ROWS, WIDTH, STACKED = 16, 4, 2
RANDOM = np.random.default_rng(0)
X = 5 + 2 * RANDOM.normal(size=(ROWS, WIDTH)).astype(np.float32)


class Block(nnx.Module):
    """Dropout of nearly all elements, so that a mask cannot go unseen."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.5, rngs=rngs)
        self.drop = nnx.Dropout(0.9, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.drop(self.norm(x))


class Net(nnx.Module):
    def __init__(self, setting: Callable[["Net"], Any] = lambda net: None) -> None:
        rngs = nnx.Rngs(0)
        self.body = nnx.List([Block(rngs)])
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.5, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 2, rngs=rngs)
        setting(self)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.norm(self.body[0](x)))


class Stacked(nnx.Module):
    """Layers of one module whose arrays have a leading dim."""

    def __init__(self, setting: Callable[[Any], Any]) -> None:
        rngs = nnx.Rngs(0)
        self.body = nnx.vmap(Block, in_axes=0, out_axes=0)(rngs.split(2))
        setting(self)

    def __call__(self, x: jax.Array) -> jax.Array:
        scan: Any = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        result: jax.Array = scan(x, self.body)
        return result


def objective(model: Any, batch: Any) -> dict[str, jax.Array]:
    output = model(batch, train=model.training) if hasattr(model, "_module") else model(batch)
    return {"loss": (output**2).mean(-1)}


def body(net: Any) -> None:
    block = net.body if isinstance(net, Stacked) else net.body[0]
    block.eval()


def dropout(net: Net) -> None:
    net.body[0].drop.deterministic = True


def everything(net: Net) -> None:
    net.eval()  # type: ignore[no-untyped-call]


def given(setting: Callable[[Net], Any]) -> Net:
    net = Net()
    setting(net)
    return net


def view(setting: Callable[[Net], Any]) -> Net:
    net: Net = nnx.view(Net(), deterministic=True, use_running_average=True)
    return net


CASES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], dict[str, Any]]] = {
    "in the constructor": (Net, body, {}),
    "in a function of rngs": (lambda setting: lambda rngs: Net(setting), body, {}),
    "dropout alone": (given, dropout, {}),
    "the whole model": (given, everything, {}),
    "view": (view, everything, {}),
    "freeze": (given, body, {"freeze": ("^body/0/norm/scale",)}),
    "remat": (given, body, {"remat": "full"}),
    "lora": (lambda setting: LoraModel(given(setting), "head/kernel"), body, {}),
    "stacked": (Stacked, body, {}),
}
FAST = ("in the constructor", "dropout alone")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [case if case in FAST else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_the_modes_that_the_user_has_set_persist_in_training(case: str) -> None:
    make, setting, options = CASES[case]
    model = make(setting)
    state, output = one_step(trainer(model=model, objective=objective, **options), X)
    plain: Any = Stacked(setting) if case == "stacked" else given(setting)
    if case == "lora":  # whose batch statistics are frozen
        plain.set_attributes(use_running_average=True)
    # As a hand-written loop calls the module.
    np.testing.assert_allclose(output.metrics["loss"], (plain(X) ** 2).mean(), rtol=1e-4)
    statistics = named_leaves(nnx.to_pure_dict(nnx.state(plain, nnx.BatchStat)))
    found = named_leaves(state.model_state)
    assert statistics.keys() == found.keys()
    for name, array in found.items():
        np.testing.assert_allclose(array, statistics[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_a_resumed_run_and_one_that_starts_from_it_keep_the_modes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fitted(steps: int, **options: Any) -> Trainer:
        made = Trainer(
            model=given(body),
            objective=objective,
            optimizer=optax.sgd(0.1),
            global_batch_size=ROWS,
            trackers=(),
            **options,
        )
        made.fit(X, steps=steps)
        return made

    def check(made: Trainer, expected: float) -> None:
        np.testing.assert_allclose(made.evaluate(X)["loss"], expected, rtol=1e-4)

    fitted(1, workdir=str(tmp_path / "run"))
    resumed = fitted(2, workdir=str(tmp_path / "run"))
    printed = " ".join(capsys.readouterr().out.split())
    assert "2 of 3 layers with a mode are in evaluation mode, as the model was given" in printed
    assert "body/0/drop, body/0/norm" in printed
    third = fitted(1, init_from=str(tmp_path / "run"))

    losses: list[float] = []
    plain: Any = given(body)  # in a hand-written loop
    for _ in range(3):
        grads = nnx.grad(lambda net: (net(X) ** 2).mean())(plain)
        state = nnx.state(plain, nnx.Param)
        nnx.update(plain, jax.tree.map(lambda x, g: x - 0.1 * g, state, grads))
        whole = nnx.clone(plain)
        whole.eval()
        losses.append(float((whole(X) ** 2).mean()))
    check(resumed, losses[1])
    check(third, losses[2])
    loaded = load_model(given(body), tmp_path / "run")
    for model in (resumed.model, loaded):  # to evaluate with
        assert all(
            getattr(module, name)
            for _, module in nnx.iter_modules(model)
            for name in ("deterministic", "use_running_average")
            if hasattr(module, name)
        )
        np.testing.assert_allclose((model(X) ** 2).mean(), losses[1], rtol=1e-4)


class Noisy(nnx.Module):
    """A model with a mode of its own, which its methods set as Flax's set the others."""

    def __init__(self) -> None:
        self.noisy = False
        self.attention = nnx.MultiHeadAttention(  # whose mode is None until it is set
            1, WIDTH, dropout_rate=0.5, decode=False, rngs=nnx.Rngs(0)
        )

    def train(self, **attributes: Any) -> None:
        super().train(noisy=True, **attributes)  # type: ignore[no-untyped-call]

    def eval(self, **attributes: Any) -> None:
        super().eval(noisy=False, **attributes)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("mode", Mode)
def test_modes_that_are_not_set_are_those_of_the_step(mode: Mode) -> None:
    adapter = as_adapter(Noisy())
    variables = adapter.init(adapter.given, jax.random.key(0))
    seen: list[Any] = []
    adapter.run(
        lambda model, _: seen.append((model.noisy, model.attention.deterministic)),
        *(variables, X, jax.random.key(0), mode),
    )
    assert seen == [(mode is Mode.TRAIN, mode is Mode.EVAL)]


class Linen(linen.Module):
    """Layers whose modes are attributes, or arguments that are constants."""

    by_argument: bool

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        if self.by_argument:
            x = linen.BatchNorm(momentum=0.5)(x, use_running_average=True)
            x = linen.Dropout(0.9)(x, deterministic=True)
        else:
            x = linen.BatchNorm(momentum=0.5, use_running_average=True)(x)
            x = linen.Dropout(0.9, deterministic=True)(x)
        return linen.BatchNorm(momentum=0.5, use_running_average=not train)(x) * x


@pytest.mark.slow
@pytest.mark.parametrize("freeze", [(), ("^BatchNorm_0",)])
@pytest.mark.parametrize("by_argument", [False, True])
def test_modes_of_linen_layers_persist_in_training(
    by_argument: bool, freeze: tuple[str, ...]
) -> None:
    module = Linen(by_argument)
    made = trainer(model=LinenModel(module, X), objective=objective, freeze=freeze)
    variables = module.init(jax.random.key(0), X)
    output, changed = module.apply(variables, X, train=True, mutable=["batch_stats"])
    state, found = one_step(made, X)
    np.testing.assert_allclose(found.metrics["loss"], (output**2).mean(), rtol=1e-4)
    for name, array in named_leaves(changed).items():
        np.testing.assert_allclose(named_leaves(state.model_state)[name], array, rtol=1e-5)


def keras_model(kind: str) -> Any:
    import keras

    def layers() -> list[Any]:
        drop = keras.layers.Dropout(0.9 if kind == "call of a subclass" else 0.0)
        return [keras.layers.BatchNormalization(momentum=0.5), drop]

    class Subclass(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = layers(), keras.layers.BatchNormalization(momentum=0.5)

        def call(self, x: Any, training: bool | None = None) -> Any:
            for layer in self.body:
                x = layer(x, training=False)
            return self.head(x)

    if kind == "call of a subclass":
        model = Subclass()
        model(X)
        return model
    inputs = keras.Input((WIDTH,))
    nested = keras.Sequential([keras.Input((WIDTH,)), *layers()])
    nested.trainable = kind != "not trainable"
    x = nested(inputs, training=False) if kind == "call of a functional model" else nested(inputs)
    return keras.Model(inputs, keras.layers.BatchNormalization(momentum=0.5)(x))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["not trainable", "call of a subclass", "call of a functional model"]
)
def test_modes_of_keras_layers_are_those_of_a_fit_of_keras(kind: str) -> None:
    import keras

    def compiled() -> Any:
        model = keras_model(kind)
        model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
        return model

    theirs, ours, targets = compiled(), compiled(), np.ones_like(X)
    loss = theirs.fit(X, targets, batch_size=ROWS, epochs=2, verbose=0).history["loss"][-1]
    made = Trainer.from_keras(ours, quiet=True, global_batch_size=ROWS, trackers=())
    found = made.fit((X, targets), epochs=2)
    np.testing.assert_allclose(found.train["loss"], loss, rtol=1e-4)
    for mine, other in zip(made.model.weights, theirs.weights, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5, err_msg=other.path)

"""Models of every kind through the same seam, and what they carry from step to step."""

import functools
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from spmdtrain import FunctionModel, LinenModel, MeshSpec, Trainer, UserError
from spmdtrain.document.terminal import Terminal
from spmdtrain.tree import is_key, named_leaves

BATCH = 16
X = np.random.default_rng(0).normal(2.0, 3.0, (64, 4)).astype(np.float32)
Y = (X @ np.array([[1.0], [-2.0], [0.5], [3.0]], np.float32)).astype(np.float32)


def squared_error(model: Any, batch: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
    x, y = batch
    return {"loss": ((model(x) - y) ** 2).mean(-1)}


def trainer(model: Any, devices: int = 8, **options: Any) -> Trainer:
    return Trainer(
        **{"model": model, "objective": squared_error, "optimizer": optax.sgd(0.01)} | options,
        mesh=MeshSpec(devices=tuple(range(devices))),
        global_batch_size=BATCH,
        terminal=Terminal(quiet=True),
    )


class Normed(nnx.Module):
    """Batch normalization and dropout, in a list: all that a model can carry."""

    def __init__(self, rngs: nnx.Rngs, dropout: float = 0.5) -> None:
        self.norm = nnx.BatchNorm(4, momentum=0.9, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)])
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layers[1](self.dropout(self.layers[0](self.norm(x))))


@pytest.mark.slow
def test_batch_statistics_are_those_of_the_global_batch_on_any_number_of_devices() -> None:
    for devices in (1, 2, 8):
        fitted = trainer(Normed, devices)
        fitted.fit((X[:BATCH], Y[:BATCH]), steps=1)
        assert fitted.state is not None
        state = named_leaves(fitted.state.model_state)
        assert set(state) == {"norm/mean", "norm/var"}
        np.testing.assert_allclose(state["norm/mean"], 0.1 * X[:BATCH].mean(0), rtol=1e-5)
        np.testing.assert_allclose(state["norm/var"], 0.9 + 0.1 * X[:BATCH].var(0), rtol=1e-5)


@pytest.mark.slow
def test_dropout_draws_the_same_on_any_number_of_devices_and_differs_each_step() -> None:
    losses: dict[int, list[float]] = {}
    for devices in (1, 8):
        seen: list[float] = []
        fitted = trainer(
            partial(Normed, dropout=0.5),
            devices,
            optimizer=optax.sgd(0.0),
            log_every=1,
            callbacks={"log": lambda event, seen=seen: seen.append(event.metrics["loss"])},
        )
        fitted.fit((X[:BATCH], Y[:BATCH]), steps=3)
        losses[devices] = seen
    np.testing.assert_allclose(losses[8], losses[1], rtol=1e-5)
    assert len(set(losses[1])) == 3  # nothing was learned: only the masks differ


@pytest.mark.slow
def test_evaluation_and_prediction_use_running_statistics_and_no_dropout() -> None:
    fitted = trainer(Normed)
    fitted.fit((X, Y), steps=4)
    before = jax.device_get(named_leaves(fitted.state))
    values = fitted.model
    mean, var = (np.asarray(v[...]) for v in (values.norm.mean, values.norm.var))
    scale, bias = (np.asarray(v[...]) for v in (values.norm.scale, values.norm.bias))
    hidden = (X - mean) / np.sqrt(var + 1e-5) * scale + bias
    for layer in values.layers:
        hidden = hidden @ np.asarray(layer.kernel[...]) + np.asarray(layer.bias[...])
    np.testing.assert_allclose(fitted.predict((X, Y)), hidden, rtol=1e-4, atol=1e-5)
    loss = fitted.evaluate((X, Y))["loss"]
    np.testing.assert_allclose(loss, ((hidden - Y) ** 2).mean(), rtol=1e-4)
    after = jax.device_get(named_leaves(fitted.state))
    assert all(np.array_equal(before[name], after[name]) for name in before if name != "key")


@pytest.mark.slow
def test_an_instance_starts_from_its_own_values_and_is_left_as_it_was() -> None:
    model = nnx.Linear(4, 1, rngs=nnx.Rngs(3))
    kernel = np.array(model.kernel[...])
    fitted = trainer(model)
    np.testing.assert_array_equal(fitted.model.kernel[...], kernel)
    fitted.fit((X, Y), steps=3)
    np.testing.assert_array_equal(model.kernel[...], kernel)
    assert not np.allclose(fitted.model.kernel[...], kernel)
    handed_back = np.array(fitted.model.kernel[...])
    kept = fitted.model
    fitted.fit((X, Y), steps=5)
    np.testing.assert_array_equal(kept.kernel[...], handed_back)  # not donated with the state


@pytest.mark.slow
def test_a_sown_value_is_no_state() -> None:
    class Sowing(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.linear = nnx.Linear(4, 1, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            self.sow(nnx.Intermediate, "input", x)
            return self.linear(x)

    fitted = trainer(Sowing)
    with pytest.warns(DeprecationWarning, match="sow"):
        fitted.fit((X, Y), steps=2)
    assert fitted.state is not None and fitted.state.model_state == {}


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        x = nn.Dropout(0.5, deterministic=not train)(nn.Dense(8)(x))
        return nn.Dense(1)(x)


def linen_objective(model: Any, batch: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
    x, y = batch
    return {"loss": ((model(x, train=model.training) - y) ** 2).mean(-1)}


@pytest.mark.slow
def test_a_linen_model_trains_with_statistics_and_dropout() -> None:
    results = []
    for devices in (1, 8):
        fitted = trainer(
            LinenModel(LinenNet(), jnp.zeros((1, 4))), devices, objective=linen_objective
        )
        before = fitted.evaluate((X, Y))["loss"]
        fitted.fit((X, Y), steps=1)
        assert fitted.state is not None
        first = np.asarray(fitted.state.model_state["batch_stats"]["BatchNorm_0"]["mean"])
        fitted.fit((X, Y), steps=40)
        after = fitted.evaluate((X, Y))["loss"]
        assert after < 0.5 * before
        assert fitted.evaluate((X, Y))["loss"] == after  # no dropout
        assert fitted.predict((X, Y)).shape == (64, 1)
        results.append([*first, before])
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5)


def test_the_error_for_a_linen_module_instance_says_how_to_fix_it() -> None:
    with pytest.raises(UserError, match=r"LinenModel\(module, example_input\)"):
        trainer(LinenNet())


@pytest.mark.slow
def test_plain_functions_follow_gradient_descent_by_hand() -> None:
    def init(key: jax.Array) -> dict[str, jax.Array]:
        return {"w": jnp.ones((4, 1)), "b": jnp.zeros((1,))}

    def objective(params: Any, batch: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
        x, y = batch
        return {"loss": ((x @ params["w"] + params["b"] - y) ** 2)[:, 0]}

    w, b = np.ones((4, 1)), np.zeros(1)
    for step in range(3):
        x, y = X[step * BATCH : (step + 1) * BATCH], Y[step * BATCH : (step + 1) * BATCH]
        error = x @ w + b - y
        w, b = w - 0.01 * 2 * x.T @ error / BATCH, b - 0.01 * 2 * error.mean(0)
    with_parameters = trainer(FunctionModel(init), objective=objective, shuffle=False)
    with_parameters.fit((X, Y), steps=3)
    assert with_parameters.state is not None
    np.testing.assert_allclose(with_parameters.state.params["w"], w, rtol=1e-4)
    np.testing.assert_allclose(with_parameters.state.params["b"], b, rtol=1e-4)

    applied = FunctionModel(init, lambda params, x: x @ params["w"] + params["b"])
    with_apply = trainer(applied, shuffle=False)
    with_apply.fit((X, Y), steps=3)
    np.testing.assert_allclose(with_apply.predict((X, Y)), X @ w + b, rtol=1e-4)


def test_other_things_are_no_model() -> None:
    with pytest.raises(UserError, match=r"builtins\.int"):
        trainer(3)
    with pytest.raises(UserError, match=r"dict, .*nnx\.Module"):
        trainer(lambda rngs: {})


@pytest.mark.slow
def test_a_dict_batch_without_a_usual_input_needs_a_predict_function() -> None:
    def objective(model: Any, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return squared_error(model, (batch["height"], batch["weight"]))

    data = {"height": X, "weight": Y}
    with pytest.raises(UserError, match=r"\['height', 'weight'\]"):
        trainer(partial(nnx.Linear, 4, 1), objective=objective).predict(data)
    predicting = trainer(
        partial(nnx.Linear, 4, 1),
        objective=objective,
        predict=lambda model, batch: {"weight": model(batch["height"])},
    )
    assert predicting.predict(data)["weight"].shape == (64, 1)


@pytest.mark.slow
def test_stacked_layers_each_draw_their_own_dropout() -> None:
    class Stacked(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            @nnx.split_rngs(splits=3)
            @nnx.vmap(in_axes=(0,), out_axes=0)
            def make(rngs: nnx.Rngs) -> nnx.Dropout:
                return nnx.Dropout(0.5, rngs=rngs)

            self.layers = make(rngs)
            self.scale = nnx.Param(jnp.ones(()))

        def __call__(self, x: jax.Array) -> jax.Array:
            @nnx.vmap(in_axes=(0, None), out_axes=0)
            def each(layer: nnx.Dropout, x: jax.Array) -> jax.Array:
                return layer(x)

            return each(self.layers, x) * self.scale[...]

    def objective(model: Any, batch: jax.Array) -> dict[str, jax.Array]:
        first, second, third = model(batch)
        differs = (first != second) & (second != third)
        return {"loss": first.sum(-1), "differs": differs.sum(-1, dtype=jnp.float32)}

    fitted = trainer(Stacked, objective=objective)
    result = fitted.fit(np.ones((BATCH, 64), np.float32), steps=1)
    assert 64 / 8 < result.train["differs"] < 64 / 2  # a quarter is expected, 0 if all were one


def test_parameters_that_are_trees_and_attributes_that_are_arrays() -> None:
    class Tree(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.both = nnx.Param({"a": jnp.full((4, 1), 2.0), "b": jnp.full((1,), 5.0)})

        def __call__(self, x: jax.Array) -> jax.Array:
            return x @ self.both["a"] + self.both["b"]

    fitted = trainer(Tree)
    np.testing.assert_allclose(fitted.predict((X, Y)), X.sum(-1, keepdims=True) * 2 + 5, rtol=1e-5)
    assert set(named_leaves(fitted.functions.abstract_state.params)) == {"both/a", "both/b"}

    class Bare(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.shift = nnx.data(jnp.ones(4))

    with pytest.raises(UserError, match=r"shift is .*nnx\.Variable"):
        trainer(Bare)
    with pytest.raises(UserError, match=r"shift is .*nnx\.Variable"):
        trainer(Bare(nnx.Rngs(0)))

    class Plain(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.shift = jnp.ones(4)

    with pytest.raises(UserError, match=r"shift is .*nnx\.Variable"):
        trainer(Plain)

    class Listed(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.table = nnx.static([jnp.ones(4)])
            self.layers = nnx.List([nnx.Linear(4, 1, rngs=rngs)])

    with pytest.raises(UserError, match=r"table is .*nnx\.Variable"):
        trainer(Listed)


def test_a_decorator_may_supply_arguments_of_a_model() -> None:
    def sized(make: Any) -> Any:
        @functools.wraps(make)
        def wrapped(**options: Any) -> Any:
            return make(4, **options)

        return wrapped

    @sized
    def linear(size: int, rngs: nnx.Rngs) -> nnx.Linear:
        return nnx.Linear(size, 1, rngs=rngs)

    assert trainer(linear).predict((X, Y)).shape == (64, 1)


@pytest.mark.parametrize("is_instance", [False, True])
def test_a_parameter_that_is_a_number_is_trained(is_instance: bool) -> None:
    class Scaled(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.scale = nnx.Param(2.0)

        def __call__(self, x: jax.Array) -> jax.Array:
            return x[:, :1] * self.scale[...]

    fitted = trainer(Scaled(nnx.Rngs(0)) if is_instance else Scaled)
    np.testing.assert_array_equal(fitted.predict((X, Y)), 2 * X[:, :1])
    fitted.fit((X, Y), steps=1)
    assert fitted.state is not None
    scale = fitted.state.params["scale"]
    assert scale.dtype == jnp.float32 and scale.shape == () and scale != 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FunctionModel({"w": X}), "a dict is not a function"),  # type: ignore[arg-type]
        (lambda: FunctionModel(lambda: X), r"init\(key\): too many positional arguments"),  # type: ignore[misc, arg-type]
        (lambda: FunctionModel(lambda key: {"act": "relu"}), "returned a str for 'act'"),
        (lambda: nnx.Linear, "missing a required argument: 'in_features'"),
        (lambda: lambda: nnx.Linear(4, 1, rngs=nnx.Rngs(0)), "unexpected keyword argument 'rngs'"),
        (lambda: nn.Dense, r"wrap it in LinenModel\(module, example_input\)"),
        (lambda: LinenModel(nn.Dense, X[:1]), "Dense is a class: give an instance"),
        (lambda: LinenModel(nn.Dense(1)), "missing a required argument: 'inputs'"),
    ],
)
def test_a_model_that_cannot_be_made_is_named(make: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        trainer(make())


class NoisyNnx(nnx.Module):
    """Keeps a typed random key in its state, and draws from it in training and evaluation."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layer = nnx.Linear(4, 1, rngs=rngs)
        self.key = nnx.Variable(jax.random.key(7))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.key[...], draw = jax.random.split(self.key[...])
        return self.layer(x) + jax.random.normal(draw, (len(x), 1))


class NoisyLinen(nn.Module):
    """The same as a linen module."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        key = self.variable("noise", "key", lambda: jax.random.key(7))
        after, draw = jax.random.split(key.value)
        if self.is_mutable_collection("noise") and not self.is_initializing():
            key.value = after
        return nn.Dense(1)(x) + jax.random.normal(draw, (len(x), 1))


@pytest.mark.slow
@pytest.mark.parametrize("make", [NoisyNnx, LinenModel(NoisyLinen(), np.ones((1, 4), np.float32))])
def test_a_model_may_keep_a_typed_key_in_its_state(make: Any, tmp_path: Path) -> None:
    data = np.ones((32, 4), np.float32)

    def trained(steps: int, **options: Any) -> Trainer:
        trainer = Trainer(
            model=make,
            objective=lambda model, x: {"loss": (model(x)[:, 0] - 1) ** 2},
            optimizer=optax.sgd(0.1),
            global_batch_size=16,
            terminal=Terminal(quiet=True),
            **options,
        )
        trainer.fit(data, steps=steps)
        return trainer

    saves: dict[str, Any] = {"workdir": str(tmp_path), "log_hash_every": 1}
    trained(2, **saves)
    resumed, whole = trained(3, **saves), trained(3)
    expected = jax.random.key(7)
    for _ in range(3):
        expected = jax.random.split(expected)[0]
    states = [named_leaves(trainer.state) for trainer in (resumed, whole)]
    for name, one in states[0].items():
        other = states[1][name]
        if is_key(one):
            one, other = map(jax.random.key_data, (one, other))
            np.testing.assert_array_equal(one, jax.random.key_data(expected))
        np.testing.assert_array_equal(one, other)
    for option in ({"exact": 16}, {"batch_statistics": "replica"}):
        with pytest.raises(UserError, match=f"{next(iter(option))} is .* keeps a random key"):
            trained(1, **option)

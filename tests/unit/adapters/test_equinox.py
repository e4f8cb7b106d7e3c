"""Equinox models: the numbers of a loop that uses Equinox alone, and what they carry."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import REPOSITORY
from step_helpers import on

from spmdtrain import (
    EquinoxModel,
    LoraModel,
    Trainer,
    UserError,
    export_params,
    load_model,
)
from spmdtrain.adapters.as_adapter import as_adapter
from spmdtrain.adapters.base import Mode, describe_modes
from spmdtrain.adapters.equinox import BoundEquinox
from spmdtrain.checkpoints.weights.source import open_weights
from spmdtrain.document.terminal import Terminal
from spmdtrain.tree import named_leaves

BATCH = 16
X = np.random.default_rng(0).normal(2.0, 3.0, (64, 4)).astype(np.float32)
Y = (X @ np.array([[1.0], [-2.0], [0.5], [3.0]], np.float32)).astype(np.float32)
KEY = jax.random.key(0)
Pair = tuple[jax.Array, jax.Array]


def squared_error(model: Any, batch: Pair) -> dict[str, jax.Array]:
    x, y = batch
    return {"loss": ((jax.vmap(model)(x) - y) ** 2).mean(-1)}


def trainer(model: Any, devices: int = 1, **options: Any) -> Trainer:
    defaults = {"objective": squared_error, "optimizer": optax.adam(1e-2), "shuffle": False}
    return Trainer(
        model=model,
        **defaults | options,
        mesh=on(devices),
        global_batch_size=BATCH,
        log_every=1,
        terminal=Terminal(quiet=True),
    )


def losses_of(made: Trainer, data: Any, steps: int) -> list[float]:
    return [made.fit(data, steps=step).train["loss"] for step in range(1, steps + 1)]


def loop(
    model: Any, loss: Callable[..., jax.Array], optimizer: Any, data: Any, steps: int
) -> list[float]:
    """The losses of Equinox' own loop, as its examples write it."""

    @eqx.filter_jit
    def make_step(model: Any, opt_state: Any, x: Any, y: Any) -> Any:
        value, grads = eqx.filter_value_and_grad(loss)(model, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), opt_state, value

    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    losses = []
    for step in range(steps):
        x, y = (a[step * BATCH : (step + 1) * BATCH] for a in data)
        model, opt_state, value = make_step(model, opt_state, x, y)
        losses.append(float(value))
    return losses


# -- Equinox' own examples -------------------------------------------------------------------------


class CNN(eqx.Module):
    """That of https://docs.kidger.site/equinox/examples/mnist, for images of 8x8."""

    layers: list[Any]

    def __init__(self, key: jax.Array) -> None:
        key1, key2, key3, key4 = jax.random.split(key, 4)
        self.layers = [
            eqx.nn.Conv2d(1, 3, kernel_size=3, key=key1),
            eqx.nn.MaxPool2d(kernel_size=2),
            jax.nn.relu,
            jnp.ravel,
            eqx.nn.Linear(75, 32, key=key2),
            jax.nn.sigmoid,
            eqx.nn.Linear(32, 16, key=key3),
            jax.nn.relu,
            eqx.nn.Linear(16, 10, key=key4),
            jax.nn.log_softmax,
        ]

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x


def cross_entropy(y: jax.Array, pred_y: jax.Array) -> jax.Array:
    """Of each example; the example takes the mean here."""
    return -jnp.take_along_axis(pred_y, jnp.expand_dims(y, 1), axis=1)[:, 0]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 8])
def test_the_convolutional_example_has_the_losses_of_its_loop(devices: int) -> None:
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = (digits.images[:64, None] / 16).astype(np.float32)
    y = digits.target[:64].astype(np.int32)

    def loss(model: CNN, x: jax.Array, y: jax.Array) -> jax.Array:
        return cross_entropy(y, jax.vmap(model)(x)).mean()

    def objective(model: CNN, batch: Pair) -> dict[str, jax.Array]:
        x, y = batch
        return {"loss": cross_entropy(y, jax.vmap(model)(x))}

    model, optimizer = CNN(KEY), optax.adamw(3e-3)
    made = trainer(model, devices, objective=objective, optimizer=optimizer)
    found = losses_of(made, (x, y), 4)
    np.testing.assert_allclose(found, loop(model, loss, optimizer, (x, y), 4), rtol=1e-5)
    assert made.predict((x, y)).shape == (64, 10)


class RNN(eqx.Module):
    """That of https://docs.kidger.site/equinox/examples/train_rnn."""

    hidden_size: int
    cell: eqx.Module
    linear: eqx.nn.Linear
    bias: jax.Array

    def __init__(self, in_size: int, out_size: int, hidden_size: int, *, key: jax.Array) -> None:
        ckey, lkey = jax.random.split(key)
        self.hidden_size = hidden_size
        self.cell = eqx.nn.GRUCell(in_size, hidden_size, key=ckey)
        self.linear = eqx.nn.Linear(hidden_size, out_size, use_bias=False, key=lkey)
        self.bias = jnp.zeros(out_size)

    def __call__(self, input: jax.Array) -> jax.Array:
        hidden = jnp.zeros((self.hidden_size,))

        def f(carry: jax.Array, inp: jax.Array) -> tuple[jax.Array, None]:
            cell: Any = self.cell
            return cell(inp, carry), None

        out, _ = jax.lax.scan(f, hidden, input)
        return jax.nn.sigmoid(self.linear(out) + self.bias)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 8])
def test_the_recurrent_example_has_the_losses_of_its_loop(devices: int) -> None:
    t = np.linspace(0, 4 * np.pi, 16)
    offset = np.random.default_rng(1).uniform(0, 2 * np.pi, (64, 1))
    x = np.stack([np.sin(t + offset), np.cos(t + offset)], -1) / (1 + t[:, None])
    x[:32, :, 0] *= -1  # half of the spirals turn clockwise
    y = (np.arange(64) < 32).astype(np.float32)
    order = np.random.default_rng(2).permutation(64)
    data = x[order].astype(np.float32), y[order]

    def binary(y: jax.Array, pred_y: jax.Array) -> jax.Array:
        return -(y * jnp.log(pred_y) + (1 - y) * jnp.log(1 - pred_y))

    def loss(model: RNN, x: jax.Array, y: jax.Array) -> jax.Array:
        return binary(y, jax.vmap(model)(x)[:, 0]).mean()

    def objective(model: RNN, batch: Pair) -> dict[str, jax.Array]:
        x, y = batch
        return {"loss": binary(y, jax.vmap(model)(x)[:, 0])}

    model, optimizer = RNN(2, 1, 8, key=KEY), optax.adam(3e-2)
    made = trainer(model, devices, objective=objective, optimizer=optimizer)
    found = losses_of(made, data, 4)
    np.testing.assert_allclose(found, loop(model, loss, optimizer, data, 4), rtol=1e-5)


# -- Parameters, values and keys -------------------------------------------------------------------


class Net(eqx.Module):
    """All that a module can hold: functions, numbers, integer arrays, keys, dropout."""

    mlp: eqx.nn.MLP
    drop: eqx.nn.Dropout
    by_name: dict[str, jax.Array]
    order: jax.Array
    scale: float
    name: str = eqx.field(static=True)

    def __init__(self, *, key: jax.Array, rate: float = 0.5) -> None:
        self.mlp = eqx.nn.MLP(4, 1, 8, 1, key=key)
        self.drop = eqx.nn.Dropout(rate)
        self.by_name = {"shift": jnp.zeros(4)}
        self.order = jnp.array([1, 0, 3, 2])
        self.scale, self.name = 0.5, "net"

    def __call__(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        return self.mlp(self.drop(x[self.order] * self.scale + self.by_name["shift"], key=key))


def with_keys(model: Any, batch: Pair, key: jax.Array) -> dict[str, jax.Array]:
    x, y = batch
    predicted = jax.vmap(model)(x, key=jax.random.split(key, len(x)))
    return {"loss": ((predicted - y) ** 2).mean(-1)}


@pytest.mark.parametrize("model", [Net(key=KEY), Net], ids=["module", "function of key"])
def test_parameters_have_the_paths_of_their_attributes(model: Any) -> None:
    adapter = EquinoxModel(model)
    variables = adapter.init(adapter.given, KEY)
    assert list(named_leaves(variables.params)) == [
        *("by_name/shift", "mlp/layers/0/bias", "mlp/layers/0/weight"),
        *("mlp/layers/1/bias", "mlp/layers/1/weight"),
    ]
    np.testing.assert_array_equal(named_leaves(variables.model_state)["order"], [1, 0, 3, 2])
    merged, given = adapter.merge(variables), eqx.nn.inference_mode(Net(key=KEY))
    assert eqx.tree_equal(merged, given)


@pytest.mark.slow
def test_a_function_of_key_is_initialized_with_the_key_of_the_seed() -> None:
    made = [trainer(EquinoxModel(partial(Net, rate=0.0)), seed=seed) for seed in (0, 0, 1)]
    first, again, other = (np.asarray(x.model.mlp.layers[0].weight) for x in made)
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other)


@pytest.mark.slow
def test_dropout_draws_from_the_objectives_key_on_any_number_of_devices() -> None:
    options: dict[str, Any] = {"objective": with_keys, "optimizer": optax.sgd(0.0)}
    losses = {
        n: losses_of(trainer(Net(key=KEY), n, **options), (X[:16], Y[:16]), 3) for n in (1, 8)
    }
    np.testing.assert_allclose(losses[8], losses[1], rtol=1e-5)
    assert len(set(losses[1])) == 3  # nothing was learned: only the masks differ

    made = trainer(Net(key=KEY), **options)
    expected = jax.vmap(eqx.nn.inference_mode(Net(key=KEY)))(X)
    np.testing.assert_allclose(
        made.evaluate((X, Y))["loss"], ((expected - Y) ** 2).mean(), rtol=1e-5
    )
    np.testing.assert_allclose(made.predict((X, Y)), expected, rtol=1e-5)


def test_layers_keep_their_modes_in_training_and_are_in_inference_mode_else() -> None:
    given = eqx.tree_at(lambda net: net.drop.inference, Net(key=KEY), True)
    for model, is_set in ((Net(key=KEY), False), (given, True)):
        adapter = EquinoxModel(model)
        variables = adapter.init(adapter.given, KEY)
        seen: dict[Mode, bool] = {}
        for mode in Mode:
            found, _ = adapter.run(lambda model, _: model.drop.inference, variables, X, KEY, mode)
            seen[mode] = found
        assert seen == {Mode.TRAIN: is_set, Mode.EVAL: True}
        assert ("1 of 1 layers with a mode" in describe_modes(adapter)) == is_set


@pytest.mark.slow
def test_the_default_prediction_maps_the_model_over_the_batch() -> None:
    square: Any = eqx.nn.Linear(BATCH, BATCH, key=KEY)  # would take a batch of 16 for one example
    x = np.random.default_rng(0).normal(size=(BATCH, BATCH)).astype(np.float32)
    for model in (square, LoraModel(square, "weight", rank=1)):
        found = trainer(model).predict((x, x))
        np.testing.assert_allclose(found, jax.vmap(square)(x), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_low_rank_factors_train_alone() -> None:
    model = eqx.nn.MLP(4, 1, 8, 1, key=KEY)
    losses = {}
    for devices in (1, 8):
        made = trainer(LoraModel(model, "layers/.*/weight", rank=2), devices)
        losses[devices] = losses_of(made, (X, Y), 3)
        assert made.state is not None
        after = named_leaves(made.state.params)
        np.testing.assert_array_equal(after["layers/0/weight"], model.layers[0].weight)
        assert np.any(np.asarray(after["lora/layers/0/weight/b"]))
    np.testing.assert_allclose(losses[8], losses[1], rtol=1e-5)


@pytest.mark.slow
def test_frozen_parameters_and_averages_go_by_path(tmp_path: Path) -> None:
    model = eqx.nn.MLP(4, 1, 8, 1, key=KEY)
    made = trainer(model, freeze=("^layers/0/",), ema_decay=0.5, workdir=str(tmp_path), trackers=())
    made.fit((X, Y), steps=2)
    assert made.state is not None
    after = named_leaves(made.state.params)
    np.testing.assert_array_equal(after["layers/0/weight"], model.layers[0].weight)
    assert not np.allclose(after["layers/1/weight"], model.layers[1].weight)
    averaged = np.asarray(made.model.layers[1].weight)
    assert not np.allclose(averaged, after["layers/1/weight"])
    loaded = load_model(model, str(tmp_path))
    np.testing.assert_array_equal(loaded.layers[1].weight, averaged)


# -- State -----------------------------------------------------------------------------------------


class Stateful(eqx.Module):
    """A normalization of the batch and one of a weight, as in the example of Equinox."""

    norm: eqx.nn.BatchNorm
    spectral: eqx.nn.SpectralNorm[eqx.nn.Linear]
    drop: eqx.nn.Dropout
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array, mode: Any = "batch", rate: float = 0.0) -> None:
        key1, key2, key3 = jax.random.split(key, 3)
        self.norm = eqx.nn.BatchNorm(4, axis_name="batch", momentum=0.9, mode=mode)
        self.spectral = eqx.nn.SpectralNorm(eqx.nn.Linear(4, 8, key=key1), "weight", key=key2)
        self.drop = eqx.nn.Dropout(rate)
        self.head = eqx.nn.Linear(8, 1, key=key3)

    def __call__(
        self, x: jax.Array, state: eqx.nn.State, *, key: jax.Array | None = None
    ) -> tuple[jax.Array, eqx.nn.State]:
        x, state = self.norm(x, state)
        x, state = self.spectral(x, state)
        return self.head(self.drop(jax.nn.relu(x), key=key)), state


make_stateful: Any = eqx.nn.make_with_state(Stateful)
STATE = [
    *("norm/batch_counter", "norm/batch_state_index/0", "norm/batch_state_index/1"),
    *("spectral/uv_index/0", "spectral/uv_index/1"),
]


def bound_error(model: Any, batch: Pair) -> dict[str, jax.Array]:
    x, y = batch
    return {"loss": ((model(x) - y) ** 2).mean(-1)}


def assigning_error(model: BoundEquinox, batch: Pair) -> dict[str, jax.Array]:
    """The line of Equinox' example."""
    x, y = batch
    batched = jax.vmap(model.module, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    predicted, model.state = batched(x, model.state)
    return {"loss": ((predicted - y) ** 2).mean(-1)}


def stateful_loop(optimizer: Any, mode: str, steps: int) -> tuple[list[float], Any, Any]:
    """Losses, module and state of the loop in Equinox' example of stateful layers."""
    model, state = make_stateful(KEY, mode=mode)

    def loss(model: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        batched = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        predicted, state = batched(x, state)
        return ((predicted - y) ** 2).mean(), state

    @eqx.filter_jit
    def make_step(model: Any, state: Any, opt_state: Any, x: Any, y: Any) -> Any:
        grad: Any = eqx.filter_value_and_grad(loss, has_aux=True)
        (value, state), grads = grad(model, state, x, y)
        updates, opt_state = optimizer.update(grads, opt_state)
        return eqx.apply_updates(model, updates), state, opt_state, value

    opt_state, losses = optimizer.init(eqx.filter(model, eqx.is_inexact_array)), []
    for step in range(steps):
        x, y = (a[step * BATCH : (step + 1) * BATCH] for a in (X, Y))
        model, state, opt_state, value = make_step(model, state, opt_state, x, y)
        losses.append(float(value))
    return losses, model, state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "devices", "objective"),
    [("batch", 1, bound_error), ("batch", 8, assigning_error), ("ema", 8, bound_error)],
)
def test_state_has_the_values_of_a_loop_on_any_number_of_devices(
    mode: str, devices: int, objective: Any
) -> None:
    optimizer = optax.adam(1e-2)
    expected, model, state = stateful_loop(optimizer, mode, 3)
    made = trainer(
        EquinoxModel(make_stateful(KEY, mode=mode)),
        devices,
        objective=objective,
        optimizer=optimizer,
    )
    np.testing.assert_allclose(losses_of(made, (X, Y), 3), expected, rtol=1e-5)
    found = jax.tree.leaves(made.model.state)
    for a, b in zip(found, jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    evaluated = eqx.nn.inference_mode(model)
    predicted = jax.vmap(evaluated, in_axes=(0, None), out_axes=(0, None), axis_name="batch")(
        X, state
    )[0]
    np.testing.assert_allclose(made.predict((X, Y)), predicted, rtol=1e-4, atol=1e-5)
    loss = ((predicted - Y) ** 2).mean()
    np.testing.assert_allclose(made.evaluate((X, Y))["loss"], loss, rtol=1e-4)
    for a, b in zip(found, jax.tree.leaves(made.model.state), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_state_has_the_paths_of_its_indices() -> None:
    for model in (make_stateful(KEY), make_stateful):
        adapter = EquinoxModel(model)
        variables = adapter.init(adapter.given, KEY)
        assert list(named_leaves(variables.model_state)) == STATE
        assert "norm/weight" in named_leaves(variables.params)
        merged = adapter.merge(variables)
        assert eqx.tree_equal(merged.state, make_stateful(KEY)[1])


@pytest.mark.slow
def test_a_call_gives_each_example_a_key_and_keeps_the_state() -> None:
    module, state = make_stateful(KEY, rate=0.5)
    bound = BoundEquinox(module, state)
    found = bound(X, key=KEY)
    mapped: Any = jax.vmap(
        lambda x, state, key: module(x, state, key=key),
        in_axes=(0, None, 0),
        out_axes=(0, None),
        axis_name="batch",
    )
    expected, after = mapped(X, make_stateful(KEY)[1], jax.random.split(KEY, len(X)))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert eqx.tree_equal(bound.state, after)
    assert int(jax.tree.leaves(after)[0]) == 1


@pytest.mark.slow
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path: Path) -> None:
    def fitted(folder: str, *steps: int) -> dict[str, np.ndarray]:
        for until in steps:
            made = trainer(
                EquinoxModel(partial(make_stateful, rate=0.5)),
                8,
                objective=lambda model, batch, key: bound_error(partial(model, key=key), batch),
                workdir=str(tmp_path / folder),
                trackers=(),
            )
            made.fit((X, Y), steps=until)
        assert made.state is not None
        return {n: np.asarray(x) for n, x in named_leaves(made.state).items() if n != "key"}

    whole, resumed = fitted("whole", 4), fitted("resumed", 2, 4)
    assert whole.keys() == resumed.keys() and "model_state/norm/batch_counter" in whole
    for name, value in whole.items():
        np.testing.assert_array_equal(resumed[name], value, err_msg=name)


@pytest.mark.slow
def test_frozen_layers_use_and_keep_their_state() -> None:
    made = trainer(EquinoxModel(make_stateful(KEY)), objective=bound_error, freeze=("^norm/",))
    losses = losses_of(made, (X, Y), 1)
    module, state = make_stateful(KEY)
    module = eqx.tree_at(lambda m: m.norm.inference, module, True)
    predicted = BoundEquinox(module, state)(X[:BATCH])
    np.testing.assert_allclose(losses[0], ((predicted - Y[:BATCH]) ** 2).mean(), rtol=1e-5)
    assert made.state is not None
    after = named_leaves(made.state.model_state)
    assert int(after["norm/batch_counter"]) == 0
    assert not np.allclose(after["spectral/uv_index/0"], jax.tree.leaves(state)[3], rtol=1e-6)


@pytest.mark.slow
def test_each_replica_may_normalize_its_own_examples() -> None:
    options: dict[str, Any] = {"objective": bound_error, "batch_statistics": "replica"}
    model = EquinoxModel(make_stateful(KEY))
    found = losses_of(trainer(model, 2, **options), (X, Y), 1)
    halves = [
        ((BoundEquinox(*make_stateful(KEY))(x) - y) ** 2).mean()
        for x, y in ((X[:8], Y[:8]), (X[8:16], Y[8:16]))
    ]
    np.testing.assert_allclose(found[0], np.mean(halves), rtol=1e-5)
    with pytest.raises(UserError, match=r"mode='ema'.* make it BatchNorm\(mode='batch'\)"):
        trainer(EquinoxModel(make_stateful(KEY, mode="ema")), 2, **options).fit((X, Y), steps=1)


class Spectral(eqx.Module):
    layer: eqx.nn.SpectralNorm[eqx.nn.Linear]

    def __init__(self, key: jax.Array) -> None:
        self.layer = eqx.nn.SpectralNorm(eqx.nn.Linear(4, 1, key=key), "weight", key=key)

    def __call__(self, x: jax.Array, state: eqx.nn.State) -> tuple[jax.Array, eqx.nn.State]:
        return self.layer(x, state)


@pytest.mark.slow
def test_exact_takes_state_that_does_not_depend_on_the_examples() -> None:
    def fitted(devices: int) -> Trainer:
        model = EquinoxModel(eqx.nn.make_with_state(Spectral))
        made = trainer(model, devices, objective=bound_error, exact=16)
        made.fit((X, Y), steps=2)
        return made

    def state_of(made: Trainer) -> dict[str, Any]:
        assert made.state is not None
        return named_leaves(made.state.model_state)

    one, eight = (state_of(fitted(n)) for n in (1, 8))
    for name, value in one.items():
        np.testing.assert_array_equal(eight[name], value)
    with pytest.raises(UserError, match="exact: a batch normalization of Equinox"):
        trainer(EquinoxModel(make_stateful), objective=bound_error, exact=16).fit((X, Y), steps=1)


# -- Files of `eqx.tree_serialise_leaves` ----------------------------------------------------------


def written(path: Path, tree: Any, line: bytes = b"") -> str:
    with path.open("wb") as file:
        file.write(line)
        eqx.tree_serialise_leaves(file, tree)
    return str(path)


@pytest.mark.slow
def test_a_run_starts_from_a_file(tmp_path: Path) -> None:
    saved = make_stateful(jax.random.key(7))
    saved = saved[0], jax.tree.map(lambda x: x + 1, saved[1])
    hyperparameters = json.dumps({"rate": 0.5}).encode() + b"\n"
    path = written(tmp_path / "model.eqx", saved, hyperparameters)
    made = trainer(EquinoxModel(make_stateful), 8, objective=bound_error, init_from=path)
    found = made.model
    expected = eqx.nn.inference_mode(saved[0])
    assert eqx.tree_equal(jax.device_get(found.module), jax.device_get(expected))
    assert eqx.tree_equal(jax.device_get(found.state), jax.device_get(saved[1]))


@pytest.mark.slow
def test_a_trained_model_is_written_as_equinox_reads_it(tmp_path: Path) -> None:
    made = trainer(Net(key=KEY), objective=with_keys, workdir=str(tmp_path / "run"), trackers=())
    made.fit((X, Y), steps=1)
    trained = eqx.nn.inference_mode(load_model(Net(key=KEY), str(tmp_path / "run")), False)
    eqx.tree_serialise_leaves(tmp_path / "net.eqx", trained)
    read = eqx.tree_deserialise_leaves(tmp_path / "net.eqx", Net(key=jax.random.key(5)))
    assert made.state is not None
    np.testing.assert_array_equal(
        read.mlp.layers[0].weight, named_leaves(made.state.params)["mlp/layers/0/weight"]
    )
    again = trainer(Net(key=KEY), objective=with_keys, init_from=str(tmp_path / "net.eqx"))
    np.testing.assert_array_equal(again.model.mlp.layers[0].weight, read.mlp.layers[0].weight)
    with pytest.raises(UserError, match=r"net2\.eqx: .* eqx\.tree_serialise_leaves"):
        export_params(str(tmp_path / "run"), str(tmp_path / "net2.eqx"))


@pytest.mark.slow
def test_a_file_of_another_model_is_refused_by_its_leaf(tmp_path: Path) -> None:
    def start(saved: Any) -> None:
        path = written(tmp_path / "other.eqx", saved)
        _ = trainer(eqx.nn.MLP(4, 1, 8, 1, key=KEY), init_from=path).model

    with pytest.raises(
        UserError, match=r"layers/0/weight \(leaf 0: float32\[6,4\] there, float32\[8,4\] here"
    ):
        start(eqx.nn.MLP(4, 1, 6, 1, key=KEY))
    with pytest.raises(UserError, match=r"this model alone has leaf 2 \(layers/1/weight\)"):
        start(eqx.nn.Linear(4, 1, key=KEY))


def test_arrays_of_a_file_are_read_in_parts(tmp_path: Path) -> None:
    arrays = [
        np.arange(12, dtype=np.float32).reshape(4, 3),
        np.asfortranarray(np.arange(12, dtype=np.int32).reshape(4, 3)),
        jnp.arange(4, dtype=jnp.bfloat16),
        3,
        np.zeros((0, 2), np.float32),
    ]
    for line in (b"", b'{"width": 8}\n'):
        source = open_weights(written(tmp_path / "arrays.eqx", arrays, line))
        described = {name: str(header) for name, header in source.headers.items()}
        assert described == {
            "leaf 0": "float32[4,3]",
            "leaf 1": "int32[4,3]",
            "leaf 2": "bfloat16[4]",
            "leaf 3": "int64[]",
            "leaf 4": "float32[0,2]",
        }
        for name, array in zip(("leaf 0", "leaf 1"), arrays, strict=False):
            part = source.read(name, ((1, 3), (0, 2)))
            np.testing.assert_array_equal(part, np.asarray(array)[1:3, 0:2])
        np.testing.assert_array_equal(source.read("leaf 2", ((2, 4),)), np.asarray(arrays[2])[2:])
        assert source.read("leaf 3", ()).shape == () and source.read("leaf 3", ()) == 3
        assert source.read("leaf 4", ((0, 0), (0, 2))).shape == (0, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[:-1], "it ends within leaf 1"),
        (lambda content: content[:200], "not a valid .eqx file"),
        (lambda content: b"PK" + content, "not a valid .eqx file"),
        (lambda content: content.replace(b"'<f4'", b"'|O8'"), "leaf 0 has the dtype object"),
    ],
)
def test_a_broken_file_is_refused(
    change: Callable[[bytes], bytes], message: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "broken.eqx", [np.ones(9, np.float32)] * 2)
    (tmp_path / "broken.eqx").write_bytes(change((tmp_path / "broken.eqx").read_bytes()))
    with pytest.raises(UserError, match=re.escape(message)):
        open_weights(path)


# -- Refusals --------------------------------------------------------------------------------------


def init(model: Any) -> Any:
    adapter = EquinoxModel(model)
    return adapter.init(adapter.given, KEY)


def run(function: Callable[[Any, Any], Any], model: Any = make_stateful) -> Any:
    adapter = EquinoxModel(model)
    variables = adapter.init(adapter.given, KEY)
    return adapter.run(function, variables, jnp.asarray(X), KEY, Mode.TRAIN)


class Unassigned(eqx.Module):
    """A module that sets its state outside of `jax.vmap`."""

    count: eqx.nn.StateIndex[jax.Array]
    weight: jax.Array

    def __init__(self, key: jax.Array) -> None:
        self.count, self.weight = eqx.nn.StateIndex(jnp.array(0)), jnp.ones(3)

    def __call__(self, x: jax.Array, state: eqx.nn.State) -> tuple[jax.Array, eqx.nn.State]:
        return x, state.set(self.count, state.get(self.count) + 1)


def without_out_axes(model: BoundEquinox, x: jax.Array) -> None:
    batched = jax.vmap(model.module, axis_name="batch", in_axes=(0, None))
    _, model.state = batched(x, model.state)


def two_axes(key: jax.Array) -> Any:
    return [eqx.nn.BatchNorm(4, axis_name=name, mode="batch") for name in ("batch", "rows")]


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (
            lambda: EquinoxModel(Stateful(KEY)),
            r"has state at norm/batch_counter, which is not given",
        ),
        (lambda: init(Stateful), r"make_with_state\(Model\)"),
        (
            lambda: EquinoxModel((Net(key=KEY), make_stateful(KEY)[1])),
            "the state is of another module",
        ),
        (lambda: EquinoxModel(eqx.nn.Dropout(0.5)), r"Dropout has no parameters"),
        (lambda: EquinoxModel(jnp.ones(3)), "is no module"),
        (lambda: EquinoxModel(3), r"builtins\.int has no parameters"),
        (lambda: EquinoxModel(eqx.nn.Linear), "missing a required argument: 'in_features'"),
        (lambda: EquinoxModel(lambda rngs: None), "a function of key, such as"),
        (lambda: init(lambda key: None), r"NoneType has no parameters"),
        (
            lambda: run(lambda m, x: m.module(x, m.state), eqx.nn.make_with_state(Unassigned)),
            r"outputs, model\.state = ",
        ),
        (
            lambda: run(without_out_axes),
            r"norm/batch_counter has shape \[64\] after the objective, and had \[\]",
        ),
        (
            lambda: run(lambda m, x: m(x), eqx.nn.make_with_state(two_axes)),
            "averages over 'rows', and a call of the model maps over one axis, 'batch'",
        ),
        (lambda: as_adapter(Net), r"wrap it in EquinoxModel\(functools\.partial"),
        (lambda: as_adapter(partial(Net, rate=0.1)), r"of key: wrap it in EquinoxModel\(function"),
        (lambda: as_adapter(make_stateful(KEY)), r"wrap it in EquinoxModel\(\(module, state\)\)"),
    ],
)
def test_what_is_no_equinox_model_is_refused(attempt: Callable[[], Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        attempt()


def of_library(name: str, call: bool) -> Any:
    """An object of a library that is not installed."""
    members = {"__call__": lambda self, *args, **kwargs: None} if call else {}
    kind = type("Model", (), members)
    kind.__module__ = name
    return kind()


@pytest.mark.parametrize("call", [True, False])
def test_the_message_for_another_library_names_the_adapters(call: bool) -> None:
    with pytest.raises(UserError) as caught:
        as_adapter(of_library("torch.nn.modules", call))
    assert str(caught.value) == (
        "model is a torch.nn.modules.Model. It must be an nnx module, a function of rngs that "
        "returns one, an Equinox module, or a LinenModel, EquinoxModel, KerasModel or, for any "
        "other library, FunctionModel(init, apply)"
    )


@pytest.mark.slow
def test_without_equinox_the_message_names_the_extra() -> None:
    code = """
import sys
sys.modules["equinox"] = None
from spmdtrain import EquinoxModel, UserError
try:
    EquinoxModel(lambda key: None)
except UserError as error:
    print(error)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Equinox models need equinox, which" in found.stdout
    assert "pip install 'spmdtrain[equinox]'" in found.stdout


# -- The page --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_page_and_its_adapter_of_ten_lines_train_models() -> None:
    page = (REPOSITORY / "docs" / "python.md").read_text()
    section = page.partition("### Equinox\n")[2].partition("### Initial values")[0]
    shown: dict[str, Any] = {"__name__": "shown"}
    for block in re.findall(r"^```python\n(.*?)^```", section, re.M | re.S):
        exec(block, shown)
    data = shown["inputs"], shown["targets"]
    trained = shown["trainer"].evaluate(data)["loss"]
    assert int(jax.tree.leaves(shown["trainer"].model.state)[0]) == 20
    assert trained < np.mean(data[1] ** 2)
    for objective in (shown["with_dropout"], shown["assigned"]):
        model = Net if objective is shown["with_dropout"] else make_stateful
        assert np.isfinite(losses_of(trainer(EquinoxModel(model), objective=objective), data, 1))

    def apply(params: Any, x: Any, *, key: jax.Array | None, train: bool) -> jax.Array:
        noise = jax.random.normal(key, x.shape) if train and key is not None else 0.0
        return (x + noise) @ params["w"]

    model = shown["Functions"](lambda key: {"w": jnp.ones((4, 1))}, apply)
    made = trainer(
        model,
        objective=lambda model, batch: {"loss": ((model(batch[0]) - batch[1]) ** 2)[:, 0]},
        optimizer=optax.sgd(0.0),
    )
    squares = (X.sum(1, keepdims=True) - Y) ** 2
    clean = squares.mean()
    assert abs(losses_of(made, (X, Y), 1)[0] / squares[:BATCH].mean() - 1) > 1e-3
    np.testing.assert_allclose(made.evaluate((X, Y))["loss"], clean, rtol=1e-5)
    np.testing.assert_allclose(made.model(X), X.sum(1, keepdims=True), rtol=1e-5)

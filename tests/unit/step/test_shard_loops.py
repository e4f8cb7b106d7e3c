"""Batch statistics with `exact`: those of the global batch, with the same bits on any devices."""

import contextlib
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from step_helpers import on

from spmdtrain import LinenModel, ShardingOptions, Trainer, UserError
from spmdtrain.document.terminal import Terminal
from spmdtrain.models import MobileNetV2, mobilenet
from spmdtrain.step.exact import VIRTUAL_SHARD, synchronized_loops
from spmdtrain.step.plan import plan_step
from spmdtrain.tree import named_leaves
from spmdtrain.xla.padding import why_parts_differ

SHARDS, ROWS = 16, 32
PLACEMENTS: Mapping[str, Mapping[str, Any]] = {
    "one device": {"mesh": on(1)},
    "two devices": {"mesh": on(2)},
    "four devices, zero": {"strategy": "zero", "mesh": on(4)},
    "eight devices": {},
    "fully_sharded": {"strategy": "fully_sharded"},
}


class Normalized(nnx.Module):
    """Layers with batch normalization and dropout, and a counter."""

    def __init__(self, rngs: nnx.Rngs, dropout: float = 0.1) -> None:
        self.layers = nnx.List([nnx.Linear(n, 128, rngs=rngs) for n in (64, 128)])
        self.norms = nnx.List([nnx.BatchNorm(128, momentum=0.9, rngs=rngs) for _ in range(2)])
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.classifier = nnx.Linear(128, 10, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] = self.calls[...] + 1
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = self.dropout(nnx.relu(norm(layer(x))))
        return self.classifier(x)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        for _ in range(2):
            x = nn.relu(nn.BatchNorm(not train, momentum=0.9)(nn.Dense(128)(x)))
        return nn.Dense(10)(x)


def objective(model: Any, batch: Any) -> dict[str, jax.Array]:
    x, y = batch
    logits = model(x, train=model.training) if hasattr(model, "model_state") else model(x)
    return {"loss": optax.softmax_cross_entropy_with_integer_labels(logits, y)}


def make(model: Any = Normalized, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "objective": objective,
        "optimizer": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
        "steps": 3,
        "global_batch_size": ROWS,
        "exact": SHARDS,
        "sharding": ShardingOptions(min_size=256),
        "terminal": Terminal(quiet=True),
    }
    return Trainer(model=model, **defaults | options)


def data(*shape: int, batches: int = 2) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    x = generator.normal(1, 2, (batches * ROWS, *shape)).astype(np.float32)
    return x, generator.integers(0, 10, len(x)).astype(np.int32)


def leaves(of: Trainer) -> dict[str, bytes]:
    """The bits of the state after a run, by name."""
    return {name: np.asarray(x).tobytes() for name, x in named_leaves(of.state).items()}


def test_a_loop_that_is_cut_has_the_sums_and_gradients_of_the_whole_batch() -> None:
    x, weights = data(6)[0], jnp.linspace(-1.0, 1.0, 6)

    def normalized(weights: jax.Array, x: jax.Array, mean: Any) -> jax.Array:
        for _ in range(2):  # the second statistics depend on the first ones
            centered = x - mean(x.mean(0))
            x = jnp.tanh(centered * jax.lax.rsqrt(mean((centered**2).mean(0))) * weights)
        return (x**3).sum()

    def of_turn(turn: jax.Array, rows: jax.Array) -> Any:
        over_all = partial(jax.lax.pmean, axis_name=VIRTUAL_SHARD)
        value, gradient = jax.value_and_grad(normalized)(weights, rows, over_all)
        return (value, gradient, turn), over_all((rows.mean(0), rows.max(0)))

    def loops() -> Any:
        slices = jnp.asarray(x).reshape(2, -1, 6)
        return synchronized_loops(of_turn, slices, turns=2, shards=2, reduce=lambda sums: sums)

    (value, gradient, turns), (mean, largest) = jax.jit(loops)()
    expected = jax.value_and_grad(normalized)(weights, x, lambda x: x)
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    np.testing.assert_allclose(gradient, expected[1], rtol=1e-5)
    np.testing.assert_allclose(mean, x.mean(0), rtol=1e-6)
    np.testing.assert_allclose(largest, x.reshape(2, -1, 6).max(1).mean(0), rtol=1e-6)
    assert turns == 0 + 1


@pytest.mark.parametrize(
    ("statistic", "is_sum"),
    [
        (lambda x, axis: jax.lax.pmean(x.mean(0), axis), True),
        (lambda x, axis: jax.lax.pmax(x.max(0), axis), False),
        (lambda x, axis: jax.lax.psum(x.sum(0), axis, axis_index_groups=[[0], [1]]), False),
        (lambda x, axis: x.sum(0) * jax.lax.axis_index(axis), False),
    ],
    ids=["mean", "maximum", "groups", "index"],
)
def test_collectives_that_are_no_sums_over_all_are_refused(statistic: Any, is_sum: bool) -> None:
    def of_turn(turn: jax.Array, rows: jax.Array) -> Any:
        return turn, statistic(rows, VIRTUAL_SHARD)

    def loops() -> Any:
        slices = jnp.ones((2, 4, 3))
        return synchronized_loops(of_turn, slices, turns=2, shards=2, reduce=lambda sums: sums)

    def values(_: Any, rows: jax.Array) -> jax.Array:
        return rows - statistic(rows, VIRTUAL_SHARD)

    axes = [(VIRTUAL_SHARD, 2)]
    assert (why_parts_differ(values, (), jnp.ones((8, 3)), 2, axes=axes) is None) == is_sum
    with contextlib.nullcontext() if is_sum else pytest.raises(UserError, match="parts of a batch"):
        jax.make_jaxpr(loops)()


def test_a_sum_must_not_depend_on_the_number_of_a_row_within_its_part() -> None:
    def values(_: Any, rows: jax.Array) -> jax.Array:
        weighted = rows * jnp.arange(len(rows))[:, None]
        return rows - jax.lax.pmean(weighted.mean(0), VIRTUAL_SHARD)

    axes = [(VIRTUAL_SHARD, 2)]
    assert why_parts_differ(values, (), jnp.ones((8, 3)), 2, axes=axes) is not None


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["layers", "mobilenet"])
def test_a_model_with_batch_statistics_has_one_hash_and_the_numbers_of_plain_steps(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        mobilenet, "STAGES", mobilenet.STAGES[:1]
    )  # compiles in a tenth of the time
    models: dict[str, Any] = {
        "layers": Normalized,
        "mobilenet": partial(MobileNetV2, 10, width_multiplier=0.25),
    }
    rows = data(64) if name == "layers" else data(8, 8, 3)
    model, optimizer = partial(models[name], dropout=0.0), optax.sgd(0.1, momentum=0.9)
    one, split, plain = (
        make(model, optimizer=optimizer, **options)
        for options in (
            PLACEMENTS["one device"],
            PLACEMENTS["fully_sharded"],
            {"exact": None, **PLACEMENTS["one device"]},
        )
    )
    for of in (one, split, plain):
        of.fit(rows)
    assert leaves(one) == leaves(split) != leaves(plain)
    assert one.evaluate(rows) == split.evaluate(rows)
    found = named_leaves(one.state)
    for leaf, value in named_leaves(plain.state).items():
        np.testing.assert_allclose(found[leaf], value, rtol=1e-4, atol=1e-5, err_msg=leaf)


def keras_model() -> Any:
    os.environ.setdefault("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras")
    from spmdtrain.keras.model import KerasModel

    keras.utils.set_random_seed(0)
    layers = keras.layers
    hidden = [
        layer
        for _ in range(2)
        for layer in (layers.Dense(128), layers.BatchNormalization(momentum=0.9), layers.ReLU())
    ]
    return KerasModel(keras.Sequential([keras.Input((64,)), *hidden, layers.Dense(10)]))


@pytest.mark.parametrize("library", ["linen", "keras"])
def test_models_of_other_libraries_average_their_statistics_as_well(library: str) -> None:
    """Otherwise the values of an example would depend on the examples of its virtual shard."""
    batch = tuple(x[:ROWS] for x in data(64))
    model = LinenModel(Linen(), batch[0]) if library == "linen" else keras_model()
    plan_step(make(model).functions, batch)


@pytest.mark.nightly
@pytest.mark.timeout(2400)  # XLA compiles the loops of MobileNetV2 in a minute or two
@pytest.mark.parametrize("library", ["nnx", "linen", "keras", "mobilenet"])
def test_many_steps_have_one_hash(library: str) -> None:
    x, y = data(16, 16, 3) if library == "mobilenet" else data(64)
    models: dict[str, Any] = {
        "nnx": Normalized,
        "linen": LinenModel(Linen(), x[:ROWS]),
        "keras": keras_model() if library == "keras" else None,
        "mobilenet": partial(MobileNetV2, 10, width_multiplier=0.35),
    }
    found = []
    for options in PLACEMENTS.values():
        of = make(models[library], steps=200, **options)
        of.fit((x, y))
        found.append(leaves(of))
    assert all(each == found[0] for each in found)


class OwnStatistics(nnx.Module):
    """Centers by the mean of the batch, and keeps an average of it."""

    def __init__(self, rngs: nnx.Rngs, *, uses: bool) -> None:
        self.linear = nnx.Linear(64, 10, rngs=rngs)
        self.mean = nnx.BatchStat(jnp.zeros(64))
        self.uses = uses

    def __call__(self, x: jax.Array) -> jax.Array:
        mean = jax.lax.stop_gradient(x.mean(0))
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * mean
        return self.linear(x - mean if self.uses else x)


class Masked(nnx.Module):
    """Normalizes by the statistics of some rows."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.linear = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(self.norm(x, mask=x[:, :1] > 0))


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (partial(OwnStatistics, uses=True), {}, "exact=16 .* depend on other examples"),
        (partial(OwnStatistics, uses=False), {}, "the model state mean depends on the examples"),
        (Masked, {}, "exact=16 .* depend on other examples"),
        (Normalized, {"microbatches": 2}, "batch statistics in a loop .* microbatches to 1"),
    ],
)
def test_statistics_that_cannot_be_exact_are_refused(
    model: Any, options: Any, message: str
) -> None:
    of = make(model, **options)
    batch = tuple(x[:ROWS] for x in data(64))
    with pytest.raises(UserError, match=message):
        plan_step(of.functions, batch).program().trace(of.functions.abstract_state, batch)

"""Batch statistics of each replica: the numbers of replicas computed one after the other."""

import os
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
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
from helpers import TESTS
from processes import job
from step_helpers import SHOWS_GRADIENTS, on, one_step

from spmdtrain import CollectiveOptions, LinenModel, MeshSpec, Trainer, UserError
from spmdtrain.adapters.base import Mode
from spmdtrain.checkpoints.restore import load_variables
from spmdtrain.document.terminal import Terminal
from spmdtrain.models import MLP
from spmdtrain.sharding.placement import use_placement
from spmdtrain.testing.compiled_step import compiled_step
from spmdtrain.tree import named_leaves

ROWS, MOMENTUM, EPSILON, REPLICAS = 16, 0.9, 1e-5, 2
_draw = np.random.default_rng(3)
# Of other means and variances in the first half of the rows than in the second.
X = np.concatenate([_draw.normal(0, 1, (8, 4)), _draw.normal(5, 3, (8, 4))]).astype(np.float32)
Y = _draw.normal(size=ROWS).astype(np.float32)
W = _draw.uniform(0.5, 2, ROWS).astype(np.float32)


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, dropout: float = 0.0) -> None:
        self.norm = nnx.BatchNorm(4, momentum=MOMENTUM, epsilon=EPSILON, rngs=rngs)
        self.linear = nnx.Linear(4, 1, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(self.dropout(self.norm(x)))[:, 0]


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = nn.BatchNorm(not train, momentum=MOMENTUM, epsilon=EPSILON, name="norm")(x)
        return nn.Dense(1, name="linear")(x)[:, 0]


def keras_model() -> Any:
    os.environ.setdefault("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras")
    from spmdtrain.keras.model import KerasModel

    keras.utils.set_random_seed(0)

    layers = [
        keras.Input((4,)),
        keras.layers.BatchNormalization(momentum=MOMENTUM, epsilon=EPSILON, name="norm"),
        keras.layers.Dense(1, name="linear"),
        keras.layers.Reshape(()),
    ]
    return KerasModel(keras.Sequential(layers, name="net"))


def objective(model: Any, batch: Any) -> dict[str, Any]:
    x, y, weights = batch
    train = {"train": model.training} if hasattr(model, "_module") else {}
    return {"loss": ((model(x, **train) - y) ** 2, weights)}


# Ours for each library's name of kernel, bias, scale, shift, running mean and variance.
NAMES = {
    "nnx": "linear/kernel linear/bias norm/scale norm/bias norm/mean norm/var",
    "linen": "linear/kernel linear/bias norm/scale norm/bias "
    "batch_stats/norm/mean batch_stats/norm/var",
    "keras": "linear/kernel linear/bias norm/gamma norm/beta norm/moving_mean norm/moving_variance",
}
MODELS = {"nnx": lambda: Nnx, "linen": lambda: LinenModel(Linen(), X), "keras": keras_model}


def trainer(model: Any = Nnx, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "objective": objective,
        "optimizer": SHOWS_GRADIENTS,
        "global_batch_size": ROWS,
        "batch_statistics": "replica",
        "mesh": on(REPLICAS),
        "terminal": Terminal(quiet=True),
    }
    return Trainer(model=model, **defaults | options)


def after_a_step(of: Trainer, batch: Any = (X, Y, W)) -> dict[str, np.ndarray]:
    """Gradients, loss and model state by name."""
    after, output = one_step(of, batch)
    found = named_leaves(after.opt_state.trace) | named_leaves(after.model_state) | output.metrics
    return {name: np.asarray(x) for name, x in found.items()}


def by_hand(params: dict[str, np.ndarray], parts: int) -> dict[str, np.ndarray]:
    """The same by NumPy in f64: parts of the batch, each normalized by its own statistics."""
    kernel, bias, scale, shift = (params[n] for n in ("kernel", "bias", "scale", "shift"))
    total = {name: np.zeros_like(x, np.float64) for name, x in params.items()}
    loss, mean, var = 0.0, np.zeros(4), np.zeros(4)
    for x, y, w in zip(*(np.split(a.astype(np.float64), parts) for a in (X, Y, W)), strict=True):
        normal = (x - x.mean(0)) / np.sqrt(x.var(0) + EPSILON)
        hidden = normal * scale + shift
        error = (hidden @ kernel)[:, 0] + bias - y
        loss += (w * error**2).sum()
        up = 2 * w * error
        below = up[:, None] * kernel[:, 0]
        total["kernel"] += hidden.T @ up[:, None]
        total["bias"] += up.sum()
        total["scale"] += (below * normal).sum(0)
        total["shift"] += below.sum(0)
        mean += x.mean(0) / parts
        var += x.var(0) / parts
    found = {name: x / W.sum(dtype=np.float64) for name, x in total.items()}
    averages = {"mean": (1 - MOMENTUM) * mean, "var": MOMENTUM + (1 - MOMENTUM) * var}
    return found | averages | {"loss": np.array(loss / W.sum(dtype=np.float64))}


@pytest.mark.slow
@pytest.mark.parametrize("library", MODELS)
def test_each_replica_normalizes_by_its_own_rows(library: str) -> None:
    of = trainer(MODELS[library]())
    ours = ["kernel", "bias", "scale", "shift", "mean", "var"]
    theirs = {
        o: next(n for n in names(of) if n.endswith(t))
        for o, t in zip(ours, NAMES[library].split(), strict=True)
    }
    params = named_leaves(of.functions.init(0).params)
    start = {name: np.asarray(params[theirs[name]], np.float64) for name in ours[:4]}
    found = after_a_step(of)
    for name, value in by_hand(start, REPLICAS).items():
        np.testing.assert_allclose(
            found[theirs.get(name, name)], value, rtol=2e-5, atol=2e-6, err_msg=name
        )
    assert abs(by_hand(start, REPLICAS)["loss"] - by_hand(start, 1)["loss"]) > 0.01


def names(of: Trainer) -> list[str]:
    state = of.functions.abstract_state
    return [*named_leaves(state.params), *named_leaves(state.model_state)]


@pytest.mark.slow
def test_all_travels_in_one_reduction() -> None:
    (one,) = compiled_step(trainer(), (X, Y, W)).collectives
    assert (one.kind, one.arrays) == ("all-reduce", 1)


@pytest.mark.slow
def test_keras_layers_have_the_statistics_of_the_global_batch_by_one_collective() -> None:
    of = trainer(keras_model(), batch_statistics="global", mesh=on(4))
    params = named_leaves(of.functions.init(0).params)
    ours = {"kernel": "kernel", "bias": "bias", "gamma": "scale", "beta": "shift"}
    start = {ours[name.rpartition("/")[2]]: np.asarray(x) for name, x in params.items()}
    names = zip(
        ["kernel", "bias", "scale", "shift", "mean", "var"], NAMES["keras"].split(), strict=True
    )
    theirs = dict(names)
    found = after_a_step(of)
    for name, value in by_hand(start, 1).items():
        key = f"net/{theirs[name]}" if name in theirs else name
        np.testing.assert_allclose(found[key], value, rtol=2e-5, atol=2e-6, err_msg=name)
    kinds = Counter(one.kind for one in compiled_step(of, (X, Y, W)).collectives)
    # Both moments, and all gradients and metrics: nothing is differentiated below the layer.
    assert kinds == {"all-gather": 1, "all-reduce": 1}


@pytest.mark.slow
def test_two_threads_may_trace_a_keras_model() -> None:
    """A step is compiled while another one, or an evaluation, is traced."""
    model, placement = keras_model(), trainer().placement
    key = jax.random.key(0)
    variables = model.init(model.given, key)

    def slow(bound: Any, x: jax.Array) -> jax.Array:
        time.sleep(0.1)
        result: jax.Array = bound(x)
        time.sleep(0.1)
        return result

    def trace(mode: Mode) -> Any:
        with use_placement(placement):
            return jax.make_jaxpr(lambda x: model.run(slow, variables, x, key, mode))(X)

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(trace, [Mode.TRAIN, Mode.EVAL]))


@pytest.mark.slow
def test_on_one_replica_it_is_the_global_batch() -> None:
    model = partial(Nnx, dropout=0.5)
    for place in ({"mesh": on(1)}, {"mesh": MeshSpec(), "strategy": "default"}):
        one, other = (
            after_a_step(trainer(model, batch_statistics=which, **place))
            for which in ("replica", "global")
        )
        for name, value in one.items():
            np.testing.assert_array_equal(other[name], value, err_msg=name)


@pytest.mark.slow
def test_each_replica_draws_its_own_masks() -> None:
    same = tuple(np.concatenate(2 * [x[:8]]) for x in (X, Y, W))  # the same rows for both
    drawn = after_a_step(trainer(partial(Nnx, dropout=0.5)), same)
    first = after_a_step(
        trainer(partial(Nnx, dropout=0.5), global_batch_size=8, mesh=on(1)),
        tuple(x[:8] for x in same),
    )
    assert abs(drawn["loss"] - first["loss"]) > 1e-3


class Counting(nnx.Module):
    """A counter, a mask with infinities and a float that nothing changes, beside a norm."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner = Nnx(rngs)
        self.calls = nnx.Variable(jnp.array(3, jnp.int32))
        self.mask = nnx.Variable(jnp.array([-jnp.inf, 0.1]))
        self.seen = nnx.Variable(jnp.array(False))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] = self.calls[...] + 1
        self.seen[...] = jnp.array(True)
        return self.inner(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"collectives": CollectiveOptions(reduction="hierarchical")}]
)
def test_counters_count_once_and_what_nothing_changes_keeps_its_bits(options: Any) -> None:
    found = after_a_step(trainer(Counting, mesh=on(4), **options))
    assert found["calls"] == 4 and bool(found["seen"])
    np.testing.assert_array_equal(found["mask"], np.array([-np.inf, 0.1], np.float32))
    whole = after_a_step(trainer(Counting, mesh=on(4), batch_statistics="global"))
    np.testing.assert_allclose(found["inner/norm/mean"], whole["inner/norm/mean"], rtol=1e-5)


class Observer(nnx.Module):
    """The largest inputs seen, from a start far below them."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(4, 1, rngs=rngs)
        self.largest = nnx.Variable(jnp.array([-1e9, -jnp.inf, 0, 1e9]))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.largest[...] = jnp.maximum(self.largest[...], x.max(0))
        return self.linear(x)[:, 0]


@pytest.mark.slow
def test_the_mean_over_replicas_has_the_digits_of_what_they_computed() -> None:
    found = after_a_step(trainer(Observer, mesh=on(4)))["largest"]
    by_hand = X.reshape(4, 4, 4).max(1).mean(0)
    assert by_hand[2] > 0
    np.testing.assert_allclose(found, [*by_hand[:3], 1e9], rtol=1e-6)


@pytest.mark.slow
def test_microbatches_are_of_a_replica_s_own_rows() -> None:
    found = after_a_step(trainer(microbatches=2))
    mean, var = np.zeros(4), np.ones(4)
    parts = []
    for rows in np.split(X.astype(np.float64), REPLICAS):
        mean, var = np.zeros(4), np.ones(4)
        for part in (rows[0::2], rows[1::2]):
            mean = MOMENTUM * mean + (1 - MOMENTUM) * part.mean(0)
            var = MOMENTUM * var + (1 - MOMENTUM) * part.var(0)
        parts.append((mean, var))
    mean, var = np.mean(parts, 0)
    np.testing.assert_allclose(found["norm/mean"], mean, rtol=1e-5)
    np.testing.assert_allclose(found["norm/var"], var, rtol=1e-5)


def contrastive(model: Any, batch: Any) -> dict[str, jax.Array]:
    out = model(batch[0])
    return {"loss": (out[:, None] * out[None]).mean(1)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": partial(MLP, 4, [8], 1)}, "batch_statistics is replica, and the model carries"),
        ({"objective": contrastive}, "batch_statistics=replica .* depend on other examples"),
        (
            {"collectives": CollectiveOptions(reduction="automatic")},
            "collectives.reduction is automatic: the first reduces gradients",
        ),
        ({"batch_statistics": "local"}, "batch_statistics.*'local'"),
    ],
)
def test_what_it_is_refused_for(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        after_a_step(trainer(**options))


@pytest.mark.slow
def test_a_change_on_resume_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for which, steps in (("global", 1), ("replica", 2)):
        of = trainer(
            batch_statistics=which,
            optimizer=optax.sgd(0.1),
            workdir=str(tmp_path),
            terminal=Terminal(),
        )
        of.fit((X, Y, W), steps=steps)
    out = capsys.readouterr().out
    assert "batch_statistics: global -> replica" in out
    assert "batch statistics of each replica" in out


EXPERIMENT = f"""
import sys
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(TESTS)!r}]
from functools import partial
import optax
from spmdtrain import Experiment, RunConfig as Config
from test_batch_statistics import Nnx, X, Y, W, objective


def build(config):
    model = partial(Nnx, dropout=0.3)
    return Experiment(model=model, objective=objective, optimizer=optax.sgd(0.1), train=(X, Y, W))
"""


@pytest.mark.drill
def test_two_processes_have_the_numbers_of_two_replicas_in_one(tmp_path: Path) -> None:
    path = tmp_path / "norm.py"
    path.write_text(EXPERIMENT)
    options = ("--global-batch-size", ROWS, "--steps", 3, "--batch-statistics", "replica")
    found = []
    for processes, devices in ((1, 2), (2, 1)):
        workdir = tmp_path / str(processes)
        job(path, *options, "--workdir", workdir, processes=processes, devices=devices)
        variables = load_variables(workdir)
        found.append(named_leaves(variables.params) | named_leaves(variables.model_state))
    for name, value in found[0].items():
        np.testing.assert_allclose(found[1][name], value, rtol=1e-6, atol=1e-7, err_msg=name)

"""Evaluations of objectives that mix examples or draw, and the proof that rows are independent."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import REPOSITORY

from spmdtrain import CollectiveOptions, FunctionModel, Loop, MeshSpec, Trainer, UserError
from spmdtrain.config.experiment import load_experiment
from spmdtrain.document.terminal import Terminal
from spmdtrain.models import (
    LLAMA_AXIS_RULES,
    MLP,
    VIT_AXIS_RULES,
    Llama,
    LlamaConfig,
    MobileNetV2,
    Transformer,
    TransformerConfig,
    ViT,
    ViTConfig,
)
from spmdtrain.xla.padding import why_not_sums, why_padding_matters, why_parts_differ

X = np.arange(100, dtype=np.float32)
NOISE = np.random.default_rng(0).normal(size=(100, 8)).astype(np.float32)


def trainer(objective: Any, devices: int = 1, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "model": FunctionModel(lambda key: {"w": jnp.ones(())}),
        "global_batch_size": 64,
        "mesh": MeshSpec(devices=tuple(range(devices))),
        "terminal": Terminal(quiet=True),
        "optimizer": optax.sgd(0.1),
    }
    return Trainer(objective=objective, **defaults | options)


def mean(m: Any, b: Any) -> Any:
    return {"loss": jnp.broadcast_to(b["x"].mean(), b["x"].shape[:1])}


def normalized(m: Any, b: Any) -> Any:
    w = b["x"] % 7
    return {"loss": b["x"] * w * len(w) / w.sum()}


def by_size(m: Any, b: Any) -> Any:
    return {"loss": b["x"] / len(b["x"])}


def contrastive(m: Any, b: Any) -> Any:
    z = b["z"] / jnp.linalg.norm(b["z"], axis=1, keepdims=True)
    return {"loss": optax.softmax_cross_entropy_with_integer_labels(z @ z.T, jnp.arange(len(z)))}


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 3, 8])
@pytest.mark.parametrize("objective", [mean, normalized, by_size, contrastive])
def test_an_objective_that_mixes_examples_never_sees_padding(objective: Any, devices: int) -> None:
    data = {"x": X, "z": NOISE}
    found = trainer(objective, devices).evaluate(data)["loss"]
    parts = [{k: jnp.asarray(v[s]) for k, v in data.items()} for s in (slice(64), slice(64, 100))]
    exact = sum(np.asarray(objective(None, part)["loss"], np.float64).sum() for part in parts) / 100
    np.testing.assert_allclose(found, exact, rtol=2e-6)
    if objective is mean:
        assert found == 49.5  # 52.256 with padding


@pytest.mark.parametrize("devices", [1, 3])
def test_a_prediction_that_mixes_examples_never_sees_padding(devices: int) -> None:
    of = trainer(by_size, devices, predict=lambda m, b: b["x"] - b["x"].mean())
    exact = np.concatenate([X[:64] - X[:64].mean(), X[64:] - X[64:].mean()])
    np.testing.assert_allclose(of.predict({"x": X}), exact, rtol=1e-6)


def test_as_many_rows_left_as_classes_are_not_taken_for_pairs() -> None:
    def of_classes(m: Any, b: Any) -> Any:
        return {"loss": (b["z"] - b["z"].mean(0)) @ jnp.ones((8, 36)) + b["x"][:, None]}

    assert trainer(of_classes).evaluate({"x": X, "z": NOISE})["loss"] == pytest.approx(49.5)

    def of_pairs(m: Any, b: Any) -> Any:
        return {"loss": b["x"] - b["x"][:, None]}

    with pytest.raises(UserError, match="each pair"):
        trainer(of_pairs).evaluate({"x": X})


@pytest.mark.slow
def test_eval_batch_size_is_that_of_every_evaluation() -> None:
    seen = []

    def objective(m: Any, b: Any) -> Any:
        seen.append(b["x"].shape[0])
        return {"loss": jnp.broadcast_to(m["w"] * b["x"].mean(), b["x"].shape)}

    of = trainer(objective, eval_batch_size=50)
    assert of.evaluate({"x": X})["loss"] == 49.5
    assert set(seen) == {50}
    of = trainer(objective, eval_batch_size=20)
    of.fit({"x": X}, validation={"x": X}, steps=1)
    assert set(seen) == {50, 64, 20}


@pytest.mark.slow
def test_an_objective_may_take_the_mask_and_is_then_padded() -> None:
    def objective(m: Any, b: Any, mask: jax.Array) -> Any:
        mean = (b["x"] * mask).sum() / mask.sum()
        return {"loss": jnp.broadcast_to(m["w"] * mean, mask.shape), "real": mask}

    of = trainer(objective, 8)
    found = of.evaluate({"x": X})
    assert found["loss"] == 49.5
    assert of.fit({"x": X}, steps=1).train["real"] == 1


def drawing(m: Any, b: Any, key: jax.Array) -> Any:
    return {"loss": m["w"] * jax.random.uniform(key, b["x"].shape)}


@pytest.mark.slow
def test_evaluation_draws_differ_by_batch_and_are_repeated_on_any_devices() -> None:
    def predict(m: Any, b: Any, *, key: jax.Array) -> jax.Array:
        return jax.random.uniform(key, b["x"].shape)

    data = {"x": X}
    ones = [trainer(drawing, devices, predict=predict) for devices in (1, 3, 8)]
    first, second, third = (of.predict(data) for of in ones)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(first, third)
    assert not np.isin(first[:36], first[64:]).any()
    losses = [of.evaluate(data)["loss"] for of in (*ones, ones[0])]
    np.testing.assert_allclose(losses, first.mean(), rtol=1e-6)
    other = trainer(drawing, 1, predict=predict, seed=1)
    assert other.evaluate(data)["loss"] != losses[0]


def test_a_loop_has_the_same_key_for_a_batch_of_an_evaluation() -> None:
    def predict(m: Any, b: Any, key: jax.Array) -> jax.Array:
        return jax.random.key_data(key)[None].repeat(len(b["x"]), 0)

    of = trainer(drawing, predict=predict)
    with Loop(steps=1, terminal=Terminal(quiet=True)) as loop:
        keys = [loop.eval_key(number) for number in (0, 1)]
    found = of.predict({"x": X})[[0, 64]]
    assert len({tuple(jax.random.key_data(key).tolist()) for key in keys}) == 2
    assert len({tuple(key.tolist()) for key in found}) == 2


def test_a_model_that_draws_in_eval_mode_draws_differently_in_each_batch() -> None:
    class Noisy(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.w, self.rngs = nnx.Param(jnp.ones(())), rngs

        def __call__(self, x: jax.Array) -> jax.Array:
            return x * 0 + self.rngs.noise.uniform(x.shape) * self.w

    of = Trainer(
        model=lambda rngs: Noisy(nnx.Rngs(noise=0)),
        objective=lambda m, b: {"loss": m(b["x"])},
        optimizer=optax.sgd(0.1),
        global_batch_size=64,
        terminal=Terminal(quiet=True),
    )
    found = of.predict({"x": X})
    assert not np.isin(found[:36], found[64:]).any()
    np.testing.assert_array_equal(found, of.predict({"x": X}))


def test_training_gives_an_objective_another_key_in_each_step() -> None:
    seen: list[float] = []
    of = trainer(
        drawing,
        8,
        log_every=1,
        callbacks={"log": lambda event: seen.append(event.metrics["loss"])},
        optimizer=optax.sgd(0.0),
    )
    of.fit({"x": X}, steps=3)
    assert len(set(seen)) == 3


# -- the proof -------------------------------------------------------------------------------------


def why(function: Any, **arrays: Any) -> str | None:
    return why_padding_matters(lambda _, b: function(b), {}, arrays)


ROWS = {"x": np.ones((8, 6, 4), np.float32), "y": np.zeros(8, np.int32)}
INDEPENDENT: dict[str, Any] = {
    "elementwise": lambda b: jnp.tanh(b["x"]) * 2 + b["y"][:, None, None],
    "reduction": lambda b: b["x"].mean((1, 2)),
    "reshape": lambda b: b["x"].reshape(-1, 4).reshape(-1, 6, 2, 2).sum((1, 2, 3)),
    "tokens": lambda b: (b["x"].reshape(-1, 4) @ jnp.ones((4, 3))).reshape(-1, 18),
    "attention": lambda b: jnp.einsum("bqd,bkd->bqk", b["x"], b["x"]).sum(1),
    "transpose": lambda b: b["x"].transpose(2, 0, 1).sum(0),
    "take_along_axis": lambda b: jnp.take_along_axis(b["x"][:, 0], b["y"][:, None], 1),
    "arange": lambda b: b["x"][:, 0][jnp.arange(len(b["y"])), b["y"]],
    "table": lambda b: jnp.ones((5, 3))[b["y"]],
    "one_hot": lambda b: jax.nn.one_hot(b["y"], 5),
    "map": lambda b: jax.lax.map(lambda x: x.sum(), b["x"]),
    "scan over tokens": lambda b: jax.lax.scan(
        lambda c, x: (c + x, c.sum(1)), b["x"][:, 0], b["x"].swapaxes(0, 1)
    )[0],
    "vmap": lambda b: jax.vmap(lambda x, y: x[y % 6] @ x[0])(b["x"], b["y"]),
    "sort": lambda b: jnp.sort(b["x"], axis=1)[:, -1],
    "top_k": lambda b: jax.lax.top_k(b["x"].sum(1), 2)[0],
    "pad": lambda b: jnp.pad(b["x"], ((0, 0), (1, 2), (0, 0))),
    "draws": lambda b: b["x"] + jax.random.normal(jax.random.key(0), b["x"].shape),
    "keys of rows": lambda b: jax.vmap(jax.random.uniform)(
        jax.random.split(jax.random.key(0), len(b["y"]))
    ),
    "per-row gradient": lambda b: jax.vmap(jax.grad(lambda x: (x**2).sum()))(b["x"]),
    "checkpoint": lambda b: jax.checkpoint(lambda x: jnp.sin(x).sum((1, 2)))(b["x"]),
    "einsum of tokens": lambda b: jnp.einsum("btd,dh->bth", b["x"], jnp.ones((4, 4))),
    "stack and select": lambda b: jnp.select(
        [b["x"] > 0, b["x"] < -1], [jnp.stack([b["x"], 2 * b["x"]], 2).sum(2), b["x"]]
    ),
    "unstack": lambda b: sum(jnp.unstack(b["x"], axis=1)) + jnp.unstack(b["x"], axis=2)[0][:, :4],
    "tile": lambda b: jnp.tile(b["x"], (1, 2, 1)),
    "linear systems": lambda b: jnp.linalg.solve(
        jnp.eye(6) + b["x"] @ b["x"].swapaxes(1, 2), b["x"]
    ),
    "gamma": lambda b: jax.random.gamma(jax.random.key(0), jnp.exp(b["x"])),
    "gamma of rows": lambda b: jax.vmap(jax.random.gamma)(
        jax.random.split(jax.random.key(0), len(b["y"])), jnp.exp(b["x"][:, 0, 0])
    ),
    "mean of tokens over a named axis": lambda b: jax.vmap(
        lambda x: x - jax.lax.pmean(x, "tokens"), 1, 1, axis_name="tokens"
    )(b["x"]),
    "layer norm": lambda b: (b["x"] - b["x"].mean(-1, keepdims=True)) / b["x"].std(-1)[..., None],
}
MIXING: dict[str, Any] = {
    "mean": lambda b: b["x"] - b["x"].mean(0),
    "mean over a named axis": lambda b: jax.vmap(
        lambda x: x - jax.lax.pmean(x, "rows"), axis_name="rows"
    )(b["x"]),
    "sum of sums over a named axis": lambda b: (
        b["x"][:, 0]
        + jax.vmap(lambda x: jax.lax.psum(x, "dims"), out_axes=None, axis_name="dims")(
            b["x"].sum((0, 1))
        )
    ),
    "size": lambda b: b["x"] / len(b["x"]),
    "power of the size": lambda b: b["x"] ** len(b["x"]),
    "gram": lambda b: b["x"].sum(1) @ b["x"].sum(1).T,
    "roll": lambda b: jnp.roll(b["x"], 1, 0),
    "flip": lambda b: b["x"][::-1],
    "unstacked rows": lambda b: jnp.stack(jnp.unstack(b["x"])[::-1]),
    "neighbors": lambda b: b["x"].reshape(-1, 2, 6, 4).sum(1).repeat(2, 0),
    "sort": lambda b: jnp.sort(b["x"], axis=0),
    "permutation": lambda b: jax.random.permutation(jax.random.key(0), b["x"]),
    "halves": lambda b: jnp.concatenate([b["x"][4:], b["x"][:4]]),
    "by value": lambda b: b["x"][b["y"]],
    "by a moved number": lambda b: b["x"][jnp.arange(len(b["y"])) ^ 1],
    "last row": lambda b: b["x"] - b["x"][-1],
    "draws across": lambda b: (
        b["x"][:, 0] + jax.random.normal(jax.random.key(0), (4, len(b["y"]))).T
    ),
    "gammas across": lambda b: jax.random.gamma(jax.random.key(0), jnp.exp(b["x"][:, 0].T)).T,
    "windows of rows": lambda b: jax.vmap(lambda i: jax.lax.dynamic_slice_in_dim(b["x"], i, 2))(
        jnp.arange(len(b["y"]))
    ).sum(1),
    "tiled rows": lambda b: jnp.tile(b["x"], (2, 1, 1))[: len(b["y"])],
    "another rank": lambda b: b["x"].reshape(len(b["y"]), *([4, 6] if len(b["y"]) == 8 else [24])),
    "loop until all": lambda b: jax.lax.while_loop(
        lambda x: (x < 100).any(), lambda x: x * 2, b["x"]
    ),
    "rows before": lambda b: jax.lax.scan(lambda c, x: (c + x, c), b["x"][0], b["x"])[1],
    "other dim": lambda b: b["x"].transpose(1, 0, 2),
    "callback": lambda b: jax.pure_callback(
        lambda x: x, jax.ShapeDtypeStruct(b["x"].shape, b["x"].dtype), b["x"]
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", INDEPENDENT)
def test_independent_rows_are_proven(name: str) -> None:
    of = INDEPENDENT[name]
    assert why(of, **ROWS) is None
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(13, 6, 4)).astype(np.float32), draw.integers(0, 4, 13)
    alone, followed = (of({"x": x[:n], "y": jnp.asarray(y[:n])}) for n in (8, 13))
    np.testing.assert_allclose(followed[:8], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_rows_is_found(name: str) -> None:
    assert why(MIXING[name], **ROWS) is not None


def by_mask(m: Any, b: Any, mask: Any) -> Any:
    return {"loss": m["w"] * b["x"] * mask / mask.sum()}


def by_place(m: Any, b: Any) -> Any:
    return {"loss": m["w"] * b["x"] * jnp.arange(len(b["x"]))}


def by_own_draws(m: Any, b: Any) -> Any:
    return {"loss": m["w"] * jax.random.normal(jax.random.key(0), b["x"].shape)}


def by_constants(m: Any, b: Any) -> Any:
    return {"loss": m["w"] * b["x"] * np.linspace(0, 1, 64, dtype=np.float32)}


@pytest.mark.slow
@pytest.mark.parametrize("objective", [by_size, by_mask, by_place, by_own_draws, by_constants])
def test_training_on_8_devices_has_the_loss_of_one(objective: Any) -> None:
    def objective_of_w(m: Any, b: Any) -> Any:
        return {"loss": m["w"] * by_size(m, b)["loss"]}

    used = objective_of_w if objective is by_size else objective
    one, eight = (trainer(used, n).fit({"x": X}, steps=1).train["loss"] for n in (1, 8))
    assert eight == pytest.approx(one, rel=1e-5)
    asked = trainer(used, 8, collectives=CollectiveOptions(reduction="flattened"))
    with pytest.raises(UserError, match="position"):
        asked.fit({"x": X}, steps=1)


# Padding does not change these, but splitting the batch does.
PLACED: dict[str, Any] = {
    "number": lambda b: b["y"] * jnp.arange(len(b["y"])),
    "numbers of the host": lambda b: b["y"] * np.arange(len(b["y"])),
    "wide numbers": lambda b: b["x"] * jax.lax.broadcasted_iota(jnp.int32, b["x"].shape, 0),
    "table by number": lambda b: jnp.arange(100.0)[jnp.arange(len(b["y"]))],
    "own entry by number": lambda b: jnp.take_along_axis(
        b["x"][:, 0], jnp.arange(len(b["y"]))[:, None] % 4, 1
    ),
    "diagonal": lambda b: jnp.pad(b["x"][:, 0], ((0, 0), (0, 100)))[
        jnp.arange(len(b["y"])), jnp.arange(len(b["y"]))
    ],
    "draws": INDEPENDENT["draws"],
    "keys of rows": INDEPENDENT["keys of rows"],
    "gamma": INDEPENDENT["gamma"],
    "rows before": lambda b: jax.lax.scan(lambda c, x: (c + x, c), jnp.zeros((6, 4)), b["x"])[1],
    "number in a loop": lambda b: jax.lax.fori_loop(
        0, 3, lambda _, c: c + jnp.arange(len(b["y"])), b["y"]
    ),
    "number in map": lambda b: jax.lax.map(lambda x: 2 * x, jnp.arange(len(b["y"]))),
}


@pytest.mark.parametrize("name", sorted({*INDEPENDENT} - {*PLACED, "gamma of rows"}))
def test_values_of_parts_are_proven_those_of_the_whole(name: str) -> None:
    assert why_parts_differ(lambda _, b: INDEPENDENT[name](b), {}, ROWS, 2) is None


@pytest.mark.parametrize("name", [*PLACED, *(f"mixing: {name}" for name in MIXING)])
def test_values_that_depend_on_the_place_are_found(name: str) -> None:
    of = PLACED.get(name) or MIXING[name.removeprefix("mixing: ")]
    assert why_parts_differ(lambda _, b: of(b), {}, ROWS, 2) is not None
    if name in PLACED:
        assert why(of, **ROWS) is None


def with_rule(derivative: Callable[[jax.Array, jax.Array], jax.Array]) -> Any:
    @jax.custom_jvp
    def function(x: jax.Array) -> jax.Array:
        return jnp.maximum(x, 0)

    function.defjvp(lambda x, t: (function(x[0]), derivative(x[0], t[0])))
    return function


@pytest.mark.parametrize("place", ["alone", "in a loop", "of each row"])
@pytest.mark.parametrize(
    ("derivative", "found"),
    [
        (lambda x, t: jnp.where(x > 0, t, 0.1 * t), None),
        (lambda x, t: t - t.mean(0), "reduce_sum at"),
        (lambda x, t: t / len(x), "the batch size as a number"),
        (lambda x, t: jnp.cumsum(t, 0), "cumsum at"),
    ],
    ids=["of each element", "mean", "size", "place"],
)
def test_rules_of_derivatives_are_examined_if_there_are_gradients(
    derivative: Any, found: str | None, place: str
) -> None:
    function = with_rule(derivative)

    def values(weights: Any, batch: Any) -> Any:
        x = batch["x"][:, None] * weights
        if place == "alone":
            return function(x)
        if place == "in a loop":
            return jax.lax.fori_loop(0, 2, lambda _, x: function(x), x)
        return jax.vmap(lambda x: function(x[None])[0])(x)

    given = jnp.ones(3), {"x": jnp.ones(8)}
    assert why_parts_differ(values, *given, 2) is None
    why = why_parts_differ(values, *given, 2, gradients=True)
    if found is None or place == "of each row":  # a rule that is given one row combines no others
        assert why is None
    else:
        assert why is not None and found in why


def backward_by(rule: Any, forward: Any = None) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """A product of rows with parameters, or another function, and the rule of its backward pass."""
    forward = forward or (lambda x, w: x @ w)
    function = jax.custom_vjp(lambda x, w: forward(x, w))
    function.defvjp(lambda x, w: (forward(x, w), (x, w)), lambda kept, g: rule(*kept, g))
    return function


@jax.custom_gradient  # type: ignore[untyped-decorator]
def scaled_by_gradient(x: jax.Array) -> Any:
    return x, lambda g: g / jnp.linalg.norm(g)


def of_parameters(rule: Any) -> Any:
    function = jax.custom_vjp(lambda w: w)
    function.defvjp(lambda w: (w, w), lambda w, g: (rule(w, g),))
    return lambda x, w: jnp.tanh(x @ function(w))


def ruled(name: str) -> Any:
    """The sine of JAX, with a derivative of a user that combines rows."""
    if name == "custom_jvp":
        forward = jax.custom_jvp(jnp.sin)
        forward.defjvp(lambda x, t: (jnp.sin(x[0]), t[0] - t[0].mean(0)))
        return lambda x, w: forward(x @ w)
    backward = jax.custom_vjp(jnp.sin)
    backward.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g - g.mean(0),))
    return lambda x, w: backward(x @ w)


def in_a_scan(function: Any) -> Any:
    return lambda x, w: jax.lax.scan(lambda c, _: (function(c, w), None), x, length=2)[0]


LAYER = backward_by(lambda x, w, g: (g @ w.T, x.T @ g))
BY_TOKEN = backward_by(
    lambda x, w, g: (jnp.clip(g, -1, 1) @ w.T, jnp.einsum("bti,btj->ij", x, g)),
    lambda x, w: jnp.einsum("bti,ij->btj", x, w),
)
FAKE = jax.custom_vjp(lambda w: jnp.round(w))  # quantization of weights
FAKE.defvjp(lambda w: (jnp.round(w), w), lambda w, g: (jnp.where(jnp.abs(w) < 0.8, g, 0.0),))
CLIPPED = jax.custom_vjp(lambda x: x)
CLIPPED.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.3, 0.3),))
SEPARATE: dict[str, Any] = {
    "layer": LAYER,
    "layer of tokens": lambda x, w: BY_TOKEN(jnp.stack([x, 2 * x], 1), w).sum(1),
    "clipped by row": lambda x, w: CLIPPED(x @ w),
    "divided by the norm of a row": lambda x, w: jax.vmap(scaled_by_gradient)(x @ w),
    "rounded parameters": lambda x, w: x @ FAKE(w),
    "scaled parameters": of_parameters(lambda w, g: -0.5 * g),
    "turned parameters": of_parameters(lambda w, g: jnp.tanh(w) @ (w.T @ g)),
    "without gradient": backward_by(lambda x, w, g: (g @ w.T, None)),
    "zeros": backward_by(lambda x, w, g: (jnp.zeros_like(x), jnp.zeros_like(w))),
    "in a scan": in_a_scan(LAYER),
    "in remat": jax.checkpoint(LAYER),
    "in jit": jax.jit(LAYER),
}
COMBINED: dict[str, Any] = {
    "centered": backward_by(lambda x, w, g: ((g - g.mean(0)) @ w.T, x.T @ g)),
    "mean": backward_by(lambda x, w, g: (g @ w.T, x.T @ g / len(x))),
    "clipped layer": backward_by(lambda x, w, g: (g @ w.T, jnp.clip(x.T @ g, -1, 1))),
    "constant": backward_by(lambda x, w, g: (g @ w.T, jnp.ones_like(w))),
    "penalty": backward_by(lambda x, w, g: (g @ w.T, x.T @ g + 0.1 * w)),
    "norm of all": lambda x, w: scaled_by_gradient(x @ w),
    "clipped parameters": of_parameters(lambda w, g: jnp.clip(g, -0.3, 0.3)),
    "parameters by norm": of_parameters(lambda w, g: g / jnp.linalg.norm(g)),
    "decayed parameters": of_parameters(lambda w, g: g + 0.1 * w),
    "other rows": backward_by(lambda x, w, g: (g[::-1] @ w.T, x.T @ g)),
    "rule for JAX's function": ruled("custom_vjp"),
    "rule in forward mode": ruled("custom_jvp"),
    "in a scan": in_a_scan(backward_by(lambda x, w, g: ((g - g.mean(0)) @ w.T, x.T @ g))),
    "in remat": jax.checkpoint(of_parameters(lambda w, g: jnp.clip(g, -0.3, 0.3))),
}


@pytest.mark.parametrize("name", [*SEPARATE, *(f"combined: {name}" for name in COMBINED)])
def test_a_rule_of_a_user_is_proven_if_the_gradients_of_parts_add_up(name: str) -> None:
    function = SEPARATE.get(name) or COMBINED[name.removeprefix("combined: ")]
    generator = np.random.default_rng(0)
    w, v = (generator.normal(size=(4, 4)).astype(np.float32) for _ in range(2))
    x = generator.normal(size=(8, 4)).astype(np.float32)

    def values(params: Any, rows: jax.Array) -> jax.Array:
        v, w = params
        return (jnp.sin(function(rows @ v, w)) ** 2).sum(1)

    gradients = jax.grad(lambda params, rows: values(params, rows).sum())
    parts = [gradients((v, w), x[part::2]) for part in range(2)]
    apart = jax.tree.map(np.add, *parts)
    whole = gradients((v, w), x)
    off = max(
        np.abs(a - b).max() / (1 + np.abs(b).max()) for a, b in zip(apart, whole, strict=True)
    )
    proof = why_parts_differ(values, (v, w), x, 2, gradients=True, vjps=True)
    # Neither device by device, where a rule of rows is not examined.
    strict = why_parts_differ(values, (v, w), x, 2, gradients=True)
    if name in SEPARATE:
        assert off < 1e-5 and proof is None
        assert (strict is None) == ("parameters" in name)
    else:
        assert off > 1e-3 and proof is not None and strict is not None
        assert " at " in proof and "test_padding.py" in proof


def experiment(name: str) -> Any:
    return load_experiment(str(REPOSITORY / "experiments" / f"{name}.py"), frozenset()).module


GPT = TransformerConfig(vocabulary=11, rows=12, context=8, layers=2, width=8, heads=2, hidden=16)
LLAMA = LlamaConfig(vocabulary=11, context=8, layers=2, width=8, heads=2, kv_heads=1, hidden=16)
VIT = ViTConfig(
    classes=10, image_size=8, patch_size=4, channels=1, layers=2, width=8, heads=2, hidden=16
)
SHIPPED: dict[str, Any] = {
    "digits_mlp": (partial(MLP, 64, (8,), 10), {"image": (64,), "label": ()}),
    "flowers_mobilenet": (partial(MobileNetV2, 5), {"image": (32, 32, 3), "label": ()}),
    "shakespeare_gpt": (partial(Transformer, GPT), {"tokens": (9,), "weights": (8,)}),
    "shakespeare_text": (
        partial(Transformer, GPT),
        dict.fromkeys(("tokens", "segments", "positions", "weights"), (8,)),
    ),
    "llama": (partial(Llama, LLAMA), {"tokens": (9,), "weights": (8,)}),
    "vit": (partial(ViT, VIT), {"image": (8, 8), "label": ()}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SHIPPED, "shakespeare_gpt on a GPU"])
def test_shipped_experiments_are_proven_and_so_compile_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _, on_gpu = name.partition(" on a ")
    if on_gpu:  # its models and kernels are traced
        device = SimpleNamespace(platform="gpu", device_kind="H100")
        for module in ("models.layers", "kernels.linear_cross_entropy"):
            monkeypatch.setattr(f"spmdtrain.{module}.current_device", lambda: device)
    model, shapes = SHIPPED[name]
    axis_rules = {"llama": LLAMA_AXIS_RULES, "vit": VIT_AXIS_RULES}.get(name)
    of = trainer(experiment(name).objective, model=model, axis_rules=axis_rules)
    rows = {
        k: np.zeros((1, *s), np.int32 if k != "image" else np.float32) for k, s in shapes.items()
    }
    assert of.functions.checks.why_not_padded(rows, 8) is None


def looped(x: Any) -> Any:
    return jax.lax.scan(lambda carry, _: (carry + x.sum(), None), 1.0, None, length=3)[0]


SUMS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: x.sum(),
    "number of rows": lambda x: x.sum() + len(x),
    "linear": lambda x: 2 * jnp.cumsum((x**2).sum(0) / 3)[::-1],
    "histogram": lambda x: jnp.zeros(4).at[jnp.clip(x[:, 0], 0, 3).astype(int)].add(x[:, 1]),
    "thresholds": lambda x: (x.reshape(1, -1) > jnp.tile(0.5, (2, x.size))).astype(int).sum(1),
}
NO_SUMS: dict[str, Callable[[Any], Any]] = {
    "mean": lambda x: x.mean(),
    "square of a sum": lambda x: x.sum() ** 2,
    "constant": lambda x: x.sum() + 1,
    "one batch": lambda x: (x.sum(), jnp.ones(())),
    "maximum": lambda x: x.max(),
    "square of the size": lambda x: x.sum() + len(x) ** 2,
    "size but one": lambda x: x.sum() + (len(x) - 1),
    "roll": lambda x: (x * jnp.roll(x, 1, 0)).sum(),
    "rounded": lambda x: x.sum().astype(int),
    "histogram of others": lambda x: jnp.ones(4).at[x[:, 0].astype(int)].add(x[:, 1]),
    "branches": lambda x: jax.lax.cond(True, lambda: x.sum(), lambda: 1.0),
    "loop": looped,
    "rows": lambda x: x,
    "position": lambda x: (x[:, 0] * jnp.arange(len(x))).sum(),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", [*SUMS, *NO_SUMS])
def test_sums_over_the_rows_of_a_batch_are_proven(case: str) -> None:
    function = (SUMS | NO_SUMS)[case]
    batch = jax.random.normal(jax.random.key(0), (6, 2))
    assert (why_not_sums(function, batch) is None) is (case in SUMS)
    if case in SUMS:
        parts = [function(batch[:2]), function(batch[2:3]), function(batch[3:])]
        np.testing.assert_allclose(sum(parts), function(batch), rtol=1e-5)


def test_a_reason_without_a_line_of_the_user_names_the_operation_alone() -> None:
    x = jax.ShapeDtypeStruct((8, 3), jnp.float32)
    reasons = {why_parts_differ(lambda _, x: jnp.roll(x, 1, 0), None, x, 2) for _ in range(2)}
    assert not any(str(reason).endswith(" at ") for reason in reasons)

"""Values for each replica: what may be done with them, and what they come to."""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdtrain import (
    BATCH_AXES,
    MeshSpec,
    PerReplica,
    RunConfig,
    UserError,
    per_replica,
    reduce,
    weighted_mean,
)
from spmdtrain.sharding.placement import Placement, make_placement, use_placement
from spmdtrain.step.gradients import all_reduce

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(16, 3)).astype(np.float32), RNG.normal(size=16).astype(np.float32)
W = RNG.normal(size=3).astype(np.float32)


def placed(strategy: str = "mirrored", **mesh: Any) -> Placement:
    return make_placement(RunConfig(strategy=strategy, mesh=MeshSpec(**mesh)))


def squares(examples: Any, w: Any) -> Any:
    x, y = examples
    return (x @ w - y) ** 2


def gradient(examples: Any, w: Any) -> Any:
    return jax.grad(lambda w: squares(examples, w).sum())(w)


PLACES = [
    ("default", {}, 1),
    ("mirrored", {}, 8),
    ("mirrored", {"tensor": 2}, 4),
    ("hybrid", {}, 8),
    ("fully_sharded", {"data": 2, "fsdp": 4}, 8),
]


@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(("strategy", "mesh", "replicas"), PLACES)
def test_each_replica_computes_its_part_of_the_batch(
    strategy: str, mesh: dict[str, int], replicas: int, jit: bool
) -> None:
    def both(batch: Any, w: Any) -> PerReplica:
        return per_replica(
            lambda rows, w: {"of": squares(rows, w), "g": gradient(rows, w)}, batch, w
        )

    with use_placement(placed(strategy, **mesh)):
        found = (jax.jit(both) if jit else both)((X, Y), W)
    expected = (X @ W - Y) ** 2
    cut = (np.split(array, replicas) for array in (X, Y))
    parts = [2 * x.T @ (x @ W - y) for x, y in zip(*cut, strict=True)]
    np.testing.assert_allclose(found.stack()["g"], parts, rtol=2e-5, atol=1e-5)
    np.testing.assert_allclose(found.sum()["g"], sum(parts), rtol=2e-5, atol=1e-5)
    local = found.local()
    assert len(local) == replicas
    for one, part in zip(local, parts, strict=True):
        assert isinstance(one["g"], np.ndarray)
        np.testing.assert_allclose(one["g"], part, rtol=2e-5, atol=1e-5)
    with use_placement(placed(strategy, **mesh)):
        values = per_replica(squares, (X, Y), W)
    np.testing.assert_allclose(values.gather(), expected, rtol=2e-5)
    np.testing.assert_allclose(values.mean(), expected.mean(), rtol=2e-5)
    np.testing.assert_allclose(values.mean(Y), np.average(expected, weights=Y), rtol=1e-3)


@pytest.mark.slow
def test_summed_by_hand_it_is_the_gradient_of_the_whole_batch() -> None:
    """What tf.distribute's run and reduce come to; within, replicas may also meet by themselves."""
    whole = jax.grad(lambda w: weighted_mean((X @ w - Y) ** 2))(W)
    with use_placement(placed()):
        summed = jax.jit(lambda: per_replica(gradient, (X, Y), W).sum() / len(X))()
    np.testing.assert_allclose(summed, whole, rtol=1e-5)
    for strategy in ("mirrored", "default", "hybrid"):
        with use_placement(placed(strategy)):
            met = per_replica(lambda *of: all_reduce(gradient(*of), BATCH_AXES), (X, Y), W)
        for one in met.local():
            np.testing.assert_allclose(one / len(X), whole, rtol=1e-5)


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "plus": lambda v: v + 1,
    "right plus": lambda v: 1 + v,
    "array plus": lambda v: jnp.ones(8) + v,
    "numpy plus": lambda v: np.ones(8) + v,
    "minus": lambda v: 2.0 - v,
    "times": lambda v: v * v,
    "over": lambda v: v / 8,
    "less": lambda v: v < 1,
    "equal": lambda v: v == 1,
    "negative": operator.neg,
    "float": float,
    "bool": bool,
    "len": len,
    "iter": list,
    "item": lambda v: v[0],
    "format": lambda v: f"{v:.3f}",
    "numpy": np.asarray,
    "jax": jnp.asarray,
    "sum": jnp.sum,
    "mean": weighted_mean,
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_used_unreduced_it_is_an_error(operation: Callable[[Any], Any]) -> None:
    with use_placement(placed()):
        value = per_replica(lambda x: x.sum(), Y)
    with pytest.raises(TypeError, match=r"reduce it first by sum\(\), mean\(\)|got.*PerReplica"):
        operation(value)
    with pytest.raises(TypeError):
        jax.jit(lambda v: operation(v))(value)


def test_the_gradient_of_one_is_an_error() -> None:
    with use_placement(placed()), pytest.raises(TypeError):
        jax.grad(lambda w: per_replica(lambda y, w: (w * y).sum(), Y, w))(1.0)


@pytest.mark.slow
def test_what_has_no_dim_of_examples_has_no_mean() -> None:
    with use_placement(placed()):
        total = per_replica(lambda y: {"total": y.sum()}, Y)
    for reduced in (total.mean, total.gather):
        with pytest.raises(UserError, match=r"shape \(\)"):
            reduced()
    np.testing.assert_allclose(total.stack()["total"], Y.reshape(8, 2).sum(1), rtol=1e-6)
    with use_placement(placed()):
        slopes = per_replica(gradient, (X, Y), W)
    words = r"value has shape \(3,\), without a leading dim of its 2 examples"
    with pytest.raises(UserError, match=words):
        slopes.mean()
    np.testing.assert_allclose(slopes.stack().mean(0), slopes.sum() / 8, rtol=1e-5)
    with (
        use_placement(placed()),
        pytest.raises(UserError, match=r"\(3,\) for 16"),
    ):
        per_replica(lambda y: y, Y).mean(np.ones(3))


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with (
        use_placement(placed()),
        pytest.raises(UserError, match=r"y has 12 .* 8 replicas"),
    ):
        per_replica(lambda batch: batch, {"x": X, "y": Y[:12]})
    with use_placement(placed()), pytest.raises(UserError, match="arrays differ"):
        per_replica(lambda batch: batch, {"x": X, "y": Y[:8]})
    with use_placement(placed()), pytest.raises(UserError, match="single number"):
        per_replica(lambda batch: batch, 3.0)
    with use_placement(placed()), pytest.raises(UserError, match="no arrays"):
        per_replica(lambda batch: batch, {})
    with use_placement(placed()), pytest.raises(UserError, match="returned a str"):
        per_replica(lambda batch: "a", Y)


@pytest.mark.slow
def test_each_replica_gets_its_own_of_what_an_earlier_one_made() -> None:
    with use_placement(placed()):
        doubled = per_replica(lambda y: {"y": 2 * y, "sum": y.sum()}, Y)
        again = per_replica(lambda of: of["y"] - of["sum"], doubled)
        beside = per_replica(lambda of: of[0]["sum"] * of[1], (doubled, Y))
        parts = Y.reshape(8, 2)
        sums = parts.sum(1, keepdims=True)
        np.testing.assert_allclose(again.gather(), (2 * parts - sums).ravel(), rtol=1e-5)
        np.testing.assert_allclose(beside.gather(), (sums * parts).ravel(), rtol=1e-5)
        np.testing.assert_allclose(per_replica(lambda y: y["sum"], doubled).sum(), Y.sum(), 1e-5)
        with pytest.raises(TypeError, match="in full"):
            per_replica(lambda y, whole: y, Y, doubled)
        with pytest.raises(UserError, match="per_replica"):
            per_replica(lambda y: per_replica(lambda z: z, y).sum(), Y)
    with (
        use_placement(placed(data=4, tensor=2)),
        pytest.raises(UserError, match="4 replicas"),
    ):
        per_replica(lambda y: y, doubled)


def test_there_are_no_local_values_while_jax_traces() -> None:
    with use_placement(placed()), pytest.raises(UserError, match="jitted"):
        jax.jit(lambda: per_replica(lambda y: y, Y).local())()


def test_it_leaves_a_jitted_function_as_its_own_type() -> None:
    with use_placement(placed()):
        found = jax.jit(lambda: per_replica(lambda y: y.max(), Y))()
    assert isinstance(found, PerReplica) and repr(found) == "PerReplica((8,))"
    np.testing.assert_array_equal(found.stack(), Y.reshape(8, 2).max(1))


# -- the weighted mean -----------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 40),
    tokens=st.integers(0, 3),
    seed=st.integers(0, 10_000),
    of=st.sampled_from(["example", "token", "none"]),
)
def test_the_weighted_mean_is_that_of_numpy(size: int, tokens: int, seed: int, of: str) -> None:
    draw = np.random.default_rng(seed)
    values = draw.normal(size=(size, tokens) if tokens else size).astype(np.float32)
    if of == "none":
        np.testing.assert_allclose(weighted_mean(values), values.mean(), rtol=1e-5, atol=1e-6)
        return
    weights = draw.integers(0, 3, size if of == "example" else values.shape).astype(np.float32)
    full = weights.reshape(weights.shape + (1,) * (values.ndim - weights.ndim))
    spoiled = np.where(full == 0, np.nan, values)
    full = np.broadcast_to(full, values.shape)
    expected = np.average(values, weights=full) if full.sum() else 0.0
    np.testing.assert_allclose(weighted_mean(spoiled, weights), expected, rtol=1e-5, atol=1e-6)


def test_a_weighted_mean_says_what_is_wrong() -> None:
    with pytest.raises(UserError, match=r"weighted_mean .*\(3,\)"):
        weighted_mean(X, W)
    with pytest.raises(UserError, match="single number"):
        weighted_mean(jnp.float32(3))


def test_the_strategy_within_a_replica_is_the_default() -> None:
    from spmdtrain import current_strategy

    seen: list[str] = []

    def look(y: Any) -> Any:
        seen.append(current_strategy().name)
        return y

    with use_placement(placed("fully_sharded")):
        per_replica(look, Y)
        seen.append(current_strategy().name)
    assert seen == ["default", "fully_sharded"]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "mesh", "replicas"), PLACES)
def test_reduce_takes_values_of_replicas_under_every_strategy(
    strategy: str, mesh: dict[str, int], replicas: int
) -> None:
    with use_placement(placed(strategy, **mesh)):
        found = per_replica(lambda rows: rows, X)
        over_replicas = reduce("sum", found), reduce("mean", found)
        over_examples = reduce("sum", found, axis=0), reduce("mean", found, axis=0)
        with pytest.raises(UserError, match="op is 'max'"):
            reduce("max", found)  # type: ignore[arg-type]
    by_replica = X.reshape(replicas, -1, 3)
    for one, expected in zip(over_replicas, (by_replica.sum(0), by_replica.mean(0)), strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-5, atol=1e-6)
    for one, expected in zip(over_examples, (X.sum(0), X.mean(0)), strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_reduce_takes_an_array_only_if_there_is_one_replica() -> None:
    with use_placement(placed("default")):
        np.testing.assert_array_equal(reduce("sum", X), X)
        np.testing.assert_allclose(reduce("mean", X, axis=0), X.mean(0), rtol=1e-5, atol=1e-6)
        with pytest.raises(UserError, match="leading dim"):
            reduce("mean", 2.0, axis=0)
    with use_placement(placed("mirrored")), pytest.raises(UserError, match="8 replicas"):
        reduce("sum", X)

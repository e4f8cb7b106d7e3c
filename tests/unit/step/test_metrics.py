import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spmdtrain.adapters.as_adapter import FunctionModel
from spmdtrain.config.options import MeshSpec
from spmdtrain.config.run_config import RunConfig
from spmdtrain.errors import UserError
from spmdtrain.sharding.placement import make_placement, use_placement
from spmdtrain.step.metrics import (
    Means,
    Sums,
    WeightedValues,
    loss_first,
    mean,
    weighted_mean,
    weighted_sums,
)
from spmdtrain.train.trainer import Trainer

settings = hypothesis.settings(max_examples=150, deadline=None, derandomize=True)

# Few, because every new shape is compiled; a dim of 1 and one as long as the batch are traps.
BATCHES = (1, 2, 5)
TOKENS = (1, 3, 5)


def reference(values: np.ndarray, weights: np.ndarray, mask: np.ndarray | None) -> Sums:
    """The sums in f64, by one loop over the examples."""
    total = weight = 0.0
    for example in range(len(values)):
        if mask is not None and mask[example] == 0:
            continue
        # A weight an example counts for all its tokens.
        own = weights if weights.ndim == 0 else weights[example % len(weights)]
        row = np.asarray(values[example], np.float64)
        own = np.broadcast_to(np.asarray(own, np.float64), row.shape)
        total += float((row * own).sum())
        weight += float(own.sum())
    return Sums(total, weight)


@st.composite
def outputs(draw: st.DrawFn) -> tuple[Any, Sums, np.ndarray | None, float]:
    """A metric in one of its forms, what its sums must be, the mask, and a bound on rounding."""
    batch = draw(st.sampled_from(BATCHES))
    shape = draw(st.sampled_from([(batch,), *((batch, tokens) for tokens in TOKENS)]))
    dtype = draw(st.sampled_from([np.float32, np.bool_, np.int32]))
    elements = {
        np.float32: st.floats(-100, 100, width=32),
        np.bool_: st.booleans(),
        np.int32: st.integers(-1000, 1000),
    }[dtype]
    values = draw(hnp.arrays(dtype, shape, elements=elements))
    weighed = draw(
        st.sampled_from(
            [None, (), (1,), (batch,), *([(batch, 1), (1, shape[1]), shape] if shape[1:] else [])]
        )
    )
    weights = np.ones((), np.float32)
    if weighed is not None:
        weights = draw(hnp.arrays(np.float32, weighed, elements=st.floats(0, 10, width=16)))
    mask = draw(st.none() | hnp.arrays(np.float32, (batch,), elements=st.sampled_from([0.0, 1.0])))
    form = draw(st.sampled_from([WeightedValues, lambda v, w: (v, w)]))
    output = values if weighed is None else form(values, weights)
    bound = 1e-6 * float(np.abs(values.astype(np.float64)).sum()) * float(weights.max())
    return output, reference(values, weights, mask), mask, bound + 1e-30


@pytest.mark.nightly
@pytest.mark.slow
@settings
@hypothesis.given(outputs())
def test_sums_are_those_of_a_loop_over_the_examples(
    case: tuple[Any, Sums, np.ndarray | None, float],
) -> None:
    output, expected, mask, bound = case
    batch = np.shape(output[0] if isinstance(output, tuple) else output)[0]
    masked = None if mask is None else jnp.asarray(mask)
    sums = weighted_sums({"loss": output}, batch, masked)["loss"]
    assert sums.total.dtype == sums.weight.dtype == jnp.float32
    assert sums.total.shape == sums.weight.shape == ()
    assert float(sums.total) == pytest.approx(expected.total, rel=1e-6, abs=bound)
    assert float(sums.weight) == pytest.approx(expected.weight, rel=1e-6)
    if expected.weight > 1e-3:
        found = float(mean(sums))
        assert found == pytest.approx(
            expected.total / expected.weight, rel=1e-5, abs=2 * bound / expected.weight
        )


def one_sum(output: Any, batch: int, mask: Any = None) -> tuple[float, float]:
    sums = weighted_sums({"loss": output}, batch, mask)["loss"]
    return float(sums.total), float(sums.weight)


def test_a_weight_an_example_counts_each_of_its_tokens() -> None:
    values = np.array([[1.0, 2.0], [3.0, 4.0]])
    assert one_sum(values, 2) == (10, 4)
    assert one_sum((values, np.array([1.0, 10.0])), 2) == (73, 22)  # not by token: (64, 22)
    assert one_sum(WeightedValues(values, np.array([[1.0, 10.0]])), 2) == (64, 22)
    assert one_sum((values, [[1.0, 0.0], [0.0, 2.0]]), 2) == (9, 3)
    assert one_sum((values, 2.0), 2) == (20, 8)


def test_a_mask_takes_whole_examples_out() -> None:
    values = np.array([[1.0, 2.0], [3.0, 4.0]])
    assert one_sum(values, 2, jnp.array([0.0, 1.0])) == (7, 2)
    assert one_sum((values, [[1.0, 0.0], [0.0, 2.0]]), 2, jnp.array([0.0, 1.0])) == (8, 2)


def test_each_metric_has_weights_of_its_own() -> None:
    sums = weighted_sums(
        {
            "loss": (np.array([1.0, 3.0]), np.array([3.0, 1.0])),
            "accuracy": np.array([True, False]),
            "tokens": WeightedValues(np.ones((2, 3)), np.array([[1, 1, 0], [1, 0, 0]])),
        },
        2,
    )
    assert {name: float(mean(value)) for name, value in sums.items()} == {
        "loss": 1.5,
        "accuracy": 0.5,
        "tokens": 1.0,
    }
    assert float(sums["tokens"].weight) == 3


def test_small_floats_are_added_up_in_f32() -> None:
    # In bfloat16 the sum of ones would stop growing at 256.
    sums = weighted_sums({"loss": jnp.ones(4096, jnp.bfloat16)}, 4096)["loss"]
    assert (float(sums.total), float(sums.weight)) == (4096, 4096)


# --- What counts nothing ---


@pytest.mark.parametrize("spoiled", [np.nan, np.inf, -np.inf])
def test_a_value_that_counts_nothing_does_not_spoil_the_sum(spoiled: float) -> None:
    values = np.array([1.0, spoiled, 3.0], np.float32)
    assert one_sum(values, 3, jnp.array([1.0, 0.0, 1.0])) == (4, 2)
    assert one_sum((values, [1.0, 0.0, 2.0]), 3) == (7, 3)
    tokens = np.array([[1.0, spoiled], [3.0, 4.0]], np.float32)
    assert one_sum((tokens, [[1, 0], [1, 1]]), 2) == (8, 3)


def test_a_nan_value_with_a_weight_is_not_hidden() -> None:
    total, weight = one_sum(np.array([1.0, np.nan, 3.0], np.float32), 3, jnp.array([1.0, 1.0, 0.0]))
    assert math.isnan(total)
    assert weight == 2


def test_the_gradient_of_what_counts_nothing_is_zero() -> None:
    def loss(values: jax.Array) -> jax.Array:
        return mean(weighted_sums({"loss": (values, jnp.array([1.0, 0.0, 3.0]))}, 3)["loss"])

    gradient = jax.grad(loss)(jnp.array([1.0, jnp.nan, 2.0]))
    assert gradient.tolist() == [0.25, 0.0, 0.75]


@pytest.mark.slow
def test_the_gradient_of_a_weighted_mean_is_that_of_its_formula() -> None:
    values, weights = jnp.array([1.0, 4.0, jnp.inf, 2.0]), jnp.array([0.5, 0.0, 0.0, 2.0])

    def formula(values: jax.Array, weights: jax.Array) -> jax.Array:
        return (values * weights).sum() / weights.sum()

    kept = jnp.array([0, 1, 3])  # an infinite value of weight 0 does not exist
    of_values, of_weights = jax.grad(formula, (0, 1))(values[kept], weights[kept])
    found = jax.jit(jax.grad(weighted_mean, (0, 1)))(values, weights)
    np.testing.assert_allclose(found[0][kept], of_values, rtol=1e-6)
    np.testing.assert_allclose(found[1][kept], of_weights, rtol=1e-6)
    assert np.isfinite(found).all()
    nothing = jax.grad(weighted_mean, (0, 1))(values, jnp.zeros(4))
    assert not np.any(nothing)


def test_a_mean_over_nothing_is_zero_in_a_step_and_no_number_in_a_result() -> None:
    sums = weighted_sums({"loss": (np.ones(3), np.zeros(3))}, 3)
    assert float(mean(sums["loss"])) == 0
    gradient = jax.grad(
        lambda values: mean(weighted_sums({"loss": (values, np.zeros(3))}, 3)["loss"])
    )(jnp.ones(3))
    assert gradient.tolist() == [0, 0, 0]
    assert jax.grad(lambda total: mean(Sums(total, jnp.float32(0))))(jnp.float32(0)) == 0
    means = Means()
    means.add(sums)
    assert math.isnan(means.result()["loss"])


# --- Many batches ---


@settings
@hypothesis.given(
    st.lists(
        st.tuples(
            st.floats(-1e3, 1e3, width=32),
            st.sampled_from([0.0, 0.5, 1.0, 3.0, 1e4]),
            st.booleans(),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_means_over_batches_are_weighted_by_each_batchs_weight(
    batches: list[tuple[float, float, bool]],
) -> None:
    means = Means()
    for value, weight, hit in batches:
        means.add(
            {
                "accuracy": Sums(np.float32(hit), np.float32(1)),
                "loss": Sums(np.float32(value) * np.float32(weight), np.float32(weight)),
            }
        )
    result = means.result()
    assert list(result) == ["loss", "accuracy"]
    values, weights, hits = (np.array(column, np.float64) for column in zip(*batches, strict=True))
    assert result["accuracy"] == pytest.approx(hits.mean(), rel=1e-12)
    if weights.sum() == 0:
        assert math.isnan(result["loss"])
    else:
        bound = 1e-7 * float(np.abs(values * weights).sum() / weights.sum())
        expected = float((values * weights).sum() / weights.sum())
        assert result["loss"] == pytest.approx(expected, rel=1e-6, abs=bound + 1e-30)


def test_small_batches_are_not_lost_against_a_large_sum() -> None:
    means = Means()
    means.add({"loss": Sums(np.float32(2**25), np.float32(2**25))})
    for _ in range(64):  # in f32 each of these would round away
        means.add({"loss": Sums(np.float32(0), np.float32(1))})
    assert means.result()["loss"] == 2**25 / (2**25 + 64)


def test_the_loss_comes_first_and_then_the_alphabet() -> None:
    assert list(loss_first({"z": 1, "accuracy": 2, "loss": 3, "a": 4})) == [
        *("loss", "a", "accuracy", "z")
    ]


# --- What an objective may not return ---


def refusal(returned: Any, batch: int = 4) -> str:
    with pytest.raises(UserError) as caught:
        weighted_sums(returned, batch)
    return str(caught.value)


def test_metrics_in_a_dictionary_of_their_own_are_refused_by_name() -> None:
    nested = {"loss": jnp.ones(4), "aux": {"accuracy": jnp.ones(4)}}
    with pytest.raises(UserError, match=r"'aux' .*accuracy"):
        weighted_sums(nested, 4)


def test_a_result_without_a_loss_is_refused_with_what_it_has() -> None:
    message = refusal({"error": np.ones(4), "accuracy": np.ones(4)})
    assert "returned the values 'error', 'accuracy'" in message
    assert '"loss"' in message
    assert "returned an array of shape (4,):" in refusal(np.ones(4))
    assert "returned a tuple" in refusal((np.ones(4), {}))


@pytest.mark.parametrize("shape", [(), (3,), (1,), (8,), (3, 4)])
def test_values_that_are_not_one_an_example_are_refused_by_name(shape: tuple[int, ...]) -> None:
    message = refusal({"loss": np.ones(4), "accuracy": np.ones(shape)})
    assert f"'accuracy' has shape {shape}" in message
    assert "each of the 4 examples" in message
    weighted = refusal({"loss": WeightedValues(np.ones(shape), 1.0)})
    assert f"'loss' has shape {shape}" in weighted


@pytest.mark.parametrize(
    ("values", "weights"),
    [
        ((4,), (3,)),
        ((4,), (4, 1)),
        ((4,), (4, 4)),
        ((4, 3), (3,)),  # by token alone needs (1, 3): from the left a weight is an example's
        ((4, 3), (4, 2)),
        ((4, 3), (2, 3)),
        ((4, 3), (4, 3, 1)),
    ],
)
def test_weights_that_do_not_broadcast_are_refused_with_both_shapes(
    values: tuple[int, ...], weights: tuple[int, ...]
) -> None:
    message = refusal({"loss": (np.ones(values), np.ones(weights))})
    assert f"'loss' has weights of shape {weights}" in message
    assert f"values of shape {values}" in message


@pytest.mark.parametrize("length", [0, 1, 3])
def test_a_tuple_that_is_no_pair_is_refused(length: int) -> None:
    message = refusal({"loss": (np.ones(4),) * length})
    assert f"'loss' is a tuple of {length}: return (values, weights)" in message


# --- Over a whole dataset, on eight devices ---

PARAMETER = 1.5


def objective(model: jax.Array, batch: Mapping[str, jax.Array]) -> dict[str, Any]:
    return {
        "loss": (model * batch["x"], batch["weight"]),
        "plain": batch["x"],
        "tokens": WeightedValues(batch["tokens"], batch["tokens_weight"]),
        "by_example": (batch["tokens"], batch["weight"]),
        "hit": batch["x"] > 0.5,
        "nothing": (batch["x"], 0 * batch["weight"]),
    }


def prediction(model: jax.Array, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    return {"scaled": model * batch["x"], "place": batch["place"], "tokens": batch["tokens"]}


@functools.cache
def trainer() -> Trainer:
    # One for all sizes, so that the steps are compiled once for each batch size.
    return Trainer(
        model=FunctionModel(lambda key: jnp.float32(PARAMETER)),
        objective=objective,
        predict=prediction,
        optimizer=optax.sgd(0.1),
    )


def examples(number: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(number)
    return {
        "x": random.random(number, np.float32),
        "weight": random.random(number, np.float32) * 10,
        "tokens": random.random((number, 3), np.float32),
        "tokens_weight": random.integers(0, 3, (number, 3)).astype(np.float32) + 0.25,
        "place": np.arange(number, dtype=np.int32),
    }


SIZES = (1, 2, 7, 8, 9, 15, 16, 17, 63, 64, 65, 200)
BATCH_SIZES = (8, 16, 64)
RAGGED = list(itertools.product(SIZES, BATCH_SIZES))


@pytest.mark.parametrize(("number", "batch"), RAGGED)
def test_an_evaluation_is_exact_for_any_number_of_examples(number: int, batch: int) -> None:
    data = examples(number)
    f64 = {name: array.astype(np.float64) for name, array in data.items()}
    wide = np.broadcast_to(f64["weight"][:, None], (number, 3))
    expected = {
        "loss": PARAMETER * np.average(f64["x"], weights=f64["weight"]),
        "plain": f64["x"].mean(),
        "tokens": np.average(f64["tokens"], weights=f64["tokens_weight"]),
        "by_example": np.average(f64["tokens"], weights=wide),
        "hit": (data["x"] > 0.5).mean(),
    }
    found = dict(trainer().evaluate(data, global_batch_size=batch))
    assert math.isnan(found.pop("nothing"))
    assert found == {name: pytest.approx(value, rel=1e-6) for name, value in expected.items()}


@pytest.mark.parametrize(("number", "batch"), RAGGED)
def test_a_prediction_has_a_row_for_each_example_in_their_order(number: int, batch: int) -> None:
    data = examples(number)
    found = trainer().predict(data, global_batch_size=batch)
    assert {name: (array.shape, array.dtype) for name, array in found.items()} == {
        "scaled": ((number,), np.float32),
        "place": ((number,), np.int32),
        "tokens": ((number, 3), np.float32),
    }
    assert all(isinstance(array, np.ndarray) for array in found.values())
    assert found["place"].tolist() == list(range(number))
    np.testing.assert_array_equal(found["scaled"], np.float32(PARAMETER) * data["x"])
    np.testing.assert_array_equal(found["tokens"], data["tokens"])


@pytest.mark.parametrize("wrong", [lambda x: x.mean(), lambda x: x[:3], lambda x: x[None]])
def test_a_prediction_that_is_not_one_row_an_example_is_refused(wrong: Any) -> None:
    reduced = Trainer(
        model=FunctionModel(lambda key: jnp.float32(PARAMETER)),
        objective=objective,
        predict=lambda model, batch: wrong(batch["x"]),
        optimizer=optax.sgd(0.1),
    )
    with pytest.raises(UserError, match="16 examples"):
        reduced.predict(examples(20), global_batch_size=16)


def test_on_cpus_that_split_experts_the_weights_are_added_up_after_the_values() -> None:
    """Otherwise the sum may run beside a loop of layers, and devices wait for one another."""

    def weight(values: jax.Array, weights: jax.Array) -> jax.Array:
        found: jax.Array = weighted_sums({"loss": (values, weights)}, 8)["loss"].weight
        return found

    values, weights = jnp.full(8, jnp.nan), jnp.arange(8.0)
    for mesh, depends in ((MeshSpec(expert=8), True), (MeshSpec(data=8), False)):
        with use_placement(make_placement(RunConfig(strategy="mirrored", mesh=mesh))):
            program = jax.jit(weight).lower(values, weights).compile().as_text()
            assert program is not None and ("compare(" in program) == depends
            assert weight(values, weights) == 28

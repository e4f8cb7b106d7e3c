"""Steps that would compute something else than the user's code says, or could not be resumed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from spmdtrain import (
    Combination,
    FunctionModel,
    LinenModel,
    MeshSpec,
    Scalar,
    Trainer,
    UserError,
)
from spmdtrain.document.terminal import Terminal

X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)


class MeanVariable(nnx.Variable[Any]):
    pass


class RunningMean(nnx.Module):
    """Subtracts a running mean, which is an integer at first."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.mean = MeanVariable(jnp.array(0))
        self.linear = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        self.mean.set_value(0.9 * self.mean.get_value() + 0.1 * x.mean())
        return self.linear(x - self.mean.get_value())


class Carries(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        carried = self.variable("carry", "hidden", lambda: jnp.zeros((len(x), 3)))
        hidden = linen.Dense(3)(x) + carried.value
        if train:
            carried.value = hidden
        return hidden


class Sows(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        self.sow("losses", "aux", x.mean())
        return linen.Dense(1)(x)


def squares(model: Any, x: jax.Array) -> Any:
    return {"loss": model(x) ** 2}


def in_training(model: Any, x: jax.Array) -> Any:
    return {"loss": model(x, train=model.training) ** 2}


WEIGHTS = FunctionModel(lambda key: {"w": jnp.ones(3)}, lambda params, x: x @ params["w"])
COMPLEX = FunctionModel(
    lambda key: {"w": jnp.ones(3, jnp.complex64)}, lambda params, x: x @ params["w"]
)
COUNTED = FunctionModel(
    lambda key: {"w": jnp.ones(3), "n": jnp.int32(2)}, lambda p, x: x @ p["w"] * p["n"]
)
HALVES = optax.GradientTransformation(
    lambda params: jnp.int32(0), lambda updates, state, params=None: (updates, state + 0.5)
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": RunningMean}, "assigns float32 to mean of its state, which is int32"),
        (
            {"model": LinenModel(Carries(), X[:1]), "objective": in_training},
            r"model_state/carry/hidden of the state is float32\[1, 3\] before .* float32\[8, 3\]",
        ),
        ({"model": LinenModel(Sows(), X[:1])}, "adds or removes losses/aux/1 in its state"),
        ({"optimizer": HALVES}, r"opt_state of the state is int32\[\] before a step and float32"),
        ({"model": COMPLEX}, "'loss' is complex64: return real values"),
        ({"objective": lambda m, x: {"loss": m(x) ** 2, "z": 1j * m(x)}}, "'z' is complex64"),
        ({"objective": lambda m, x: {"loss": m(x) > 0}}, "'loss' is bool, which has no gradient"),
        ({"objective": lambda m, x: {"loss": Scalar(1, 1)}}, "'loss' is int32, which has no"),
        ({"model": COUNTED}, "parameter n is int32, which has no gradient: freeze it"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-",
)
def test_a_step_that_would_round_drop_or_change_values_is_refused(
    options: dict[str, Any], message: str
) -> None:
    defaults: dict[str, Any] = {"model": WEIGHTS, "objective": squares, "optimizer": optax.sgd(0.1)}
    with pytest.raises(UserError, match=message):
        Trainer(**defaults | options, terminal=Terminal(quiet=True)).fit(
            X, steps=1, global_batch_size=8
        )


def of_labels(model: Any, x: Any) -> dict[str, Any]:
    """A loss of the predicted class, which has no derivative, with weights that have none."""
    return {"loss": ((model(x) > 0) * 1.0, jax.lax.stop_gradient(model(x)))}


def of_constants(model: Any, x: Any) -> dict[str, Any]:
    terms = {"a": jax.lax.stop_gradient(model(x)), "b": Scalar(jnp.ones(()))}
    return {"loss": Combination({"a": 1.0, "b": 1.0})} | terms


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"microbatches": 2},
        {"exact": 2, "mesh": MeshSpec(devices=(0,)), "strategy": "mirrored"},
        {"remat": "full"},
        {"jit": False},
        {"strategy": "mirrored", "freeze": ("b",)},
    ],
    ids=str,
)
@pytest.mark.parametrize("objective", [of_labels, of_constants])
def test_a_loss_that_no_parameter_changes_is_refused_before_the_first_step(
    objective: Any, options: dict[str, Any]
) -> None:
    model = FunctionModel(
        lambda key: {"w": jnp.ones(3), "b": jnp.ones(())}, lambda p, x: x @ p["w"] + p["b"]
    )
    if "exact" in options and objective is of_constants:
        options = {}  # several terms are refused before
    with pytest.raises(UserError, match=r"does not depend on the trained parameters \((b, )?w\)"):
        Trainer(
            model=model, objective=objective, optimizer=optax.sgd(0.1), quiet=True, **options
        ).fit(X, steps=1, global_batch_size=16)


def test_a_model_without_parameters_is_evaluated_but_not_trained() -> None:
    model = FunctionModel(lambda key: {}, lambda params, x: x[:, 0])
    of = Trainer(model=model, objective=squares, optimizer=optax.sgd(0.1), quiet=True)
    assert of.evaluate(X, global_batch_size=8)["loss"] > 0
    with pytest.raises(UserError, match="the model has no parameters, so a step trains nothing"):
        of.fit(X, steps=1, global_batch_size=8)


@pytest.mark.parametrize(
    "data",
    [
        np.ma.masked_array(X, X > 1),
        {"x": np.ma.masked_array(X, X > 1)},
        [{"x": x} for x in np.ma.masked_array(X, X > 1)],
    ],
    ids=["array", "dictionary", "records"],
)
def test_masked_arrays_are_refused(data: Any) -> None:
    with pytest.raises(UserError, match="is a masked array, and JAX has no masks"):
        Trainer(model=WEIGHTS, objective=squares, optimizer=optax.sgd(0.1), quiet=True).fit(
            data, steps=1, global_batch_size=8
        )


def test_random_keys_as_data_and_predictions_of_a_batch_are_refused() -> None:
    options: dict[str, Any] = {"objective": squares, "optimizer": optax.sgd(0.1), "quiet": True}
    trained = Trainer(model=WEIGHTS, **options)
    with pytest.raises(UserError, match=r"array 'keys' .* give jax.random.key_data\(keys\)"):
        keys = jax.random.split(jax.random.key(0), len(X))
        trained.fit({"keys": keys}, steps=1, global_batch_size=8)
    products = Trainer(model=FunctionModel(lambda key: {}, lambda params, x: x @ x.T), **options)
    assert products.predict(X[:6], global_batch_size=6).shape == (6, 6)
    with pytest.raises(
        UserError, match=r"predicts \[4, 4\] for one batch and \[2, 2\] for another"
    ):
        products.predict(X[:6], global_batch_size=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "array", [X.astype(np.longdouble), np.zeros(4, [("a", "f4"), ("b", "i4")])]
)
def test_dtypes_that_jax_has_not_are_refused_in_short(array: np.ndarray) -> None:
    trained = Trainer(model=WEIGHTS, objective=squares, optimizer=optax.sgd(0.1), quiet=True)
    with pytest.raises(UserError, match="not numbers"):
        trained.fit({"x": array}, steps=1, global_batch_size=8)
    with pytest.raises(UserError, match="leading dim of examples") as raised:
        trained.fit({"x": [[1.0] * 30] * 2000}, steps=1, global_batch_size=8)
    assert len(str(raised.value)) < 500

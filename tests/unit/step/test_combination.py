"""Losses of several terms with their own weights, scalars, and batch-coupled objectives."""

from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from step_helpers import (
    ROWS,
    check_equal,
    equations,
    gradients,
    on,
    one_step,
    tokens_batch,
    tokens_model,
    trainer,
)

from spmdtrain import Combination, FunctionModel, Scalar, UserError, batch_coupled
from spmdtrain.config.options import CollectiveOptions
from spmdtrain.sharding.placement import use_placement
from spmdtrain.step.metrics import Means, Sums
from spmdtrain.step.program import plan_step

COEFFICIENTS = {"tokens": 1.0, "examples": 0.5, "penalty": 0.1}
# Devices, microbatches, the reduction of gradients: all paths of `Gradients`.
WAYS: list[tuple[int, int, Any]] = [
    (1, 4, None),
    (8, 1, None),  # on CPU flattened under shard_map
    (8, 4, None),
    (8, 4, "automatic"),
    (2, 2, "all_reduce"),
]


def two_losses(model: Any, batch: Any) -> dict[str, Any]:
    """A loss of tokens, one of labeled examples only, and a penalty on a parameter."""
    output = model(batch["x"])
    error = output - batch["y"]
    return {
        "loss": Combination(COEFFICIENTS),
        "tokens": (error**2, batch["tokens"]),
        "examples": (jnp.abs(error).sum(1), batch["examples"]),
        "penalty": Scalar((model(jnp.zeros((1, 3, 5))) ** 2).sum()),
    }


def expected(params: Any, batch: dict[str, np.ndarray]) -> dict[str, Any]:
    """The same, as one function of the whole batch on one device, without spmdtrain."""

    def of(params: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        def model(x: Any) -> jax.Array:
            return jnp.tanh(x @ params["first"]) @ params["second"] + params["shift"]

        error = model(batch["x"]) - batch["y"]
        tokens, examples = batch["tokens"], batch["examples"]
        terms = {
            "tokens": (error**2 * tokens).sum() / max(tokens.sum(), 1e-9),
            "examples": (jnp.abs(error).sum(1) * examples).sum() / max(examples.sum(), 1e-9),
            "penalty": (model(jnp.zeros((1, 3, 5))) ** 2).sum(),
        }
        return sum((COEFFICIENTS[n] * x for n, x in terms.items()), jnp.zeros(())), terms

    found, (loss, terms) = jax.grad(lambda p: of(p)[0])(params), of(params)
    return {name: np.asarray(x) for name, x in (found | terms | {"loss": loss}).items()}


def of_two_losses(devices: int, microbatches: int = 1, **options: Any) -> Any:
    defaults = {"strategy": "mirrored"} if devices > 1 else {}
    return trainer(
        model=tokens_model(),
        objective=two_losses,
        mesh=on(devices),
        microbatches=microbatches,
        **defaults | options,
    )


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [pytest.param(1, marks=pytest.mark.nightly), 4])
def test_each_term_is_divided_by_its_weight_over_the_whole_batch(microbatches: int) -> None:
    batch = tokens_batch(np.random.default_rng(1))
    batch["examples"][np.arange(ROWS) % 4 < 2] = 0  # no labels in microbatches 0 and 1 of 4
    of = of_two_losses(2, microbatches)
    check_equal(gradients(of, batch), expected(of.functions.init(0).params, batch))


@pytest.mark.slow
@pytest.mark.parametrize(
    "missing", ["some", "in a microbatch", pytest.param("all", marks=pytest.mark.nightly)]
)
def test_the_terms_are_the_same_on_any_devices_and_microbatches(missing: str) -> None:
    batch = tokens_batch(np.random.default_rng(1))
    if missing == "in a microbatch":
        batch["examples"][np.arange(ROWS) % 4 < 2] = 0
    if missing == "all":
        batch["examples"][:] = 0
    one = of_two_losses(1)
    reference = expected(one.functions.init(0).params, batch)
    assert missing != "all" or reference["examples"] == 0
    check_equal(gradients(one, batch), reference, "on one device")
    for devices, microbatches, reduction in WAYS if missing == "some" else WAYS[:2]:
        options = CollectiveOptions(reduction=reduction)
        of = of_two_losses(devices, microbatches, collectives=options)
        check_equal(gradients(of, batch), reference, f"{devices} {microbatches} {reduction}")


@pytest.mark.slow
def test_the_weights_of_a_batch_do_not_cost_a_second_pass_of_the_model() -> None:
    batch = tokens_batch(np.random.default_rng(1))

    def products(objective: Any) -> int:
        of = trainer(model=tokens_model(), objective=objective, mesh=on(1), microbatches=4)
        with use_placement(of.placement):
            traced = plan_step(of.functions, batch).program().trace(of.abstract_state, batch)
        return sum(x.primitive.name == "dot_general" for x in equations(traced.jaxpr))

    def one_loss(model: Any, batch: Any) -> dict[str, Any]:
        outputs = two_losses(model, batch)
        _, weights = outputs["tokens"]
        return outputs | {"loss": (outputs["tokens"][0] * outputs["penalty"].value, weights)}

    assert products(two_losses) == products(one_loss)


# -- any weights ---------------------------------------------------------------------------------

PARTS = (1, 2, 4)
X = np.linspace(-1, 1, 8, dtype=np.float32)
_steps: dict[int, Any] = {}


def of_three(model: Any, batch: Any) -> dict[str, Any]:
    x, a, b, c = batch
    return {
        "loss": Combination({"a": 2, "b": -0.5, "c": 1e-2}),
        "a": (model(x), a),
        "b": ((model(x) - 1) ** 2, b),
        "c": Scalar(model(x[:1])[0] * 0 + model(jnp.ones(1))[0], c[0]),
    }


def step_of_three(microbatches: int) -> Any:
    """Returns a function from weights to the gradient, the loss and the means of one step."""
    if microbatches not in _steps:
        model = FunctionModel(lambda key: {"w": jnp.full((), 1.5)}, lambda p, x: p["w"] * x)
        of = trainer(
            model=model,
            objective=of_three,
            mesh=on(1),
            global_batch_size=len(X),
            microbatches=microbatches,
        )
        _steps[microbatches] = lambda *weights: gradients(of, (X, *weights))
    return _steps[microbatches]


WEIGHTS = hnp.arrays(np.float32, 8, elements=st.sampled_from([0, 0, 0.5, 1, 30]))


@pytest.mark.slow
@hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
@hypothesis.given(st.sampled_from(PARTS), WEIGHTS, WEIGHTS, st.sampled_from([0.0, 2.0]))
def test_any_weights_give_the_gradient_of_the_whole_batch(
    microbatches: int, a: np.ndarray, b: np.ndarray, c: float
) -> None:
    found = step_of_three(microbatches)(a, b, np.full(8, c, np.float32))
    x, w = X.astype(np.float64), 1.5

    def mean(values: Any, weights: np.ndarray) -> float:
        return float((values * weights).sum() / weights.sum()) if weights.any() else 0.0

    means = mean(w * x, a), mean((w * x - 1) ** 2, b), w if c else 0.0
    slopes = mean(x, a), mean(2 * (w * x - 1) * x, b), 1.0 if c else 0.0
    combined = np.array([2, -0.5, 1e-2])
    np.testing.assert_allclose(found["w"], combined @ slopes, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose([found[n] for n in "abc"], means, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["loss"], combined @ means, rtol=1e-5, atol=1e-5)


# -- over many batches ---------------------------------------------------------------------------


def test_over_batches_the_loss_is_combined_from_the_means_of_all() -> None:
    means = Means()
    loss = Combination({"a": 1.0, "b": 10.0, "missing": 3.0})
    for a, b in (Sums(6.0, 2.0), Sums(5.0, 1.0)), (Sums(0.0, 8.0), Sums(0.0, 0.0)):
        means.add({"loss": loss, "a": a, "b": b, "missing": Sums(0.0, 0.0)})
    found = means.result()
    # Not the mean of the batches' losses, 53 and 0.
    assert next(iter(found)) == "loss"
    assert found.pop("missing") != found.get("missing")  # NaN: the split has no such label
    assert found == {"loss": 0.6 + 10 * 5, "a": 0.6, "b": 5.0}


# -- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ({"loss": {"mlmm": 1.0}}, "combines 'mlmm', which the objective does not return.*'mlm'"),
        ({"loss": {"mlm": 1.0, "other": 1}, "other": {"mlm": 1}}, "'other', which is a Combina"),
        ({"loss": {"mlm": 1.0}, "mlm": 3.0}, r"return Scalar\(value, weight\)"),
    ],
)
def test_terms_without_a_mean_are_refused(outputs: dict[str, Any], message: str) -> None:
    def objective(model: Any, batch: Any) -> dict[str, Any]:
        values = {"mlm": model(batch["x"])} | outputs
        return {n: Combination(x) if isinstance(x, dict) else x for n, x in values.items()}

    of = trainer(model=tokens_model(), objective=objective, mesh=on(1))
    with pytest.raises(UserError, match=message):
        gradients(of, tokens_batch(np.random.default_rng(0)))


@pytest.mark.parametrize(
    "coefficients", [{}, {"a": float("nan")}, {"a": True}, {"a": jnp.ones(())}, {"a": 1, 2: 1}]
)
def test_coefficients_are_finite_python_numbers(coefficients: Any) -> None:
    with pytest.raises(UserError, match="Combination"):
        Combination(coefficients)


# -- objectives that combine examples ------------------------------------------------------------


def info_nce(model: Any, batch: Any) -> dict[str, Any]:
    """The example itself against all others of the batch."""
    embedded = model(batch["x"])
    similar = embedded @ embedded.T
    return {
        "loss": -jax.nn.log_softmax(similar)[jnp.arange(len(similar)), jnp.arange(len(similar))]
    }


@pytest.mark.slow
def test_a_batch_coupled_objective_gets_the_whole_batch_or_is_refused() -> None:
    batch = tokens_batch(np.random.default_rng(2))

    def contrastive(devices: int, objective: Any = None, **options: Any) -> Any:
        return trainer(
            model=tokens_model(),
            objective=objective or batch_coupled(info_nce),
            strategy="mirrored",
            mesh=on(devices),
            **options,
        )

    check_equal(gradients(contrastive(8), batch), gradients(contrastive(1), batch))
    with pytest.raises(UserError, match=r"microbatches is 4, .* only the 16 examples"):
        gradients(contrastive(8, microbatches=4), batch)
    by_hand = CollectiveOptions(reduction="all_reduce")
    with pytest.raises(UserError, match=r"all_reduce reduces .* declared as batch_coupled"):
        gradients(contrastive(8, collectives=by_hand), batch)
    # Without the declaration, the analysis finds it.
    with pytest.raises(UserError, match=r"microbatches is 4, .* may depend .* Set microbatches"):
        gradients(contrastive(1, info_nce, microbatches=4), batch)
    assert plan_step(contrastive(1, two_losses, microbatches=4).functions, batch).reasons == ()


def of_batch(kind: str) -> Any:
    """An objective whose values are those of the examples with a number of the whole batch."""

    def objective(model: Any, batch: Any) -> dict[str, Any]:
        output = model(batch["x"])
        error = ((output - batch["y"]) ** 2).mean(1)
        if kind == "weighted mean":
            return {"loss": (error + output.mean(), batch["examples"] + 1)}
        if kind == "metric":
            return {"loss": error, "spread": jnp.broadcast_to(output.std(), error.shape)}
        number: Any = {
            "sum": lambda: output.sum(),
            "mean": lambda: 0.3 * (output**2).mean() + (model(jnp.ones((1, 3, 5))) ** 2).sum(),
            "mean of sums": lambda: output.sum(1).sum() / len(output) - output.mean(),
            "inverse mean": lambda: len(output) / jnp.abs(output).sum(),
            "number": lambda: jnp.log(1.0 * len(output)) + 0 * output.sum(),
            "unknown": lambda: output.sum() / (len(output) + 1),
            "deviation": lambda: output.std(),
            "largest": lambda: output.max(),
            "product": lambda: output.mean() * output.mean(),
        }
        return {"loss": error + number[kind]()}

    return objective


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mean", "mean of sums"])
def test_a_mean_over_the_examples_is_the_same_with_microbatches(kind: str) -> None:
    batch = tokens_batch(np.random.default_rng(1))
    one, parts = (
        trainer(model=tokens_model(), objective=of_batch(kind), mesh=on(1), microbatches=n)
        for n in (1, 4)
    )
    check_equal(gradients(parts, batch), gradients(one, batch))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "sum",
        "weighted mean",
        "metric",
        "inverse mean",
        "number",
        "unknown",
        "deviation",
        "largest",
        "product",
    ],
)
def test_another_number_of_the_batch_is_refused_with_microbatches(kind: str) -> None:
    batch = tokens_batch(np.random.default_rng(1))
    options: dict[str, Any] = {"model": tokens_model(), "mesh": on(1)}
    gradients(trainer(objective=of_batch(kind), **options), batch)
    with pytest.raises(UserError, match="microbatches is 4, and the objective's values may depend"):
        gradients(trainer(objective=of_batch(kind), microbatches=4, **options), batch)
    # What the analysis cannot prove can be declared; here that is wrong.
    declared = batch_coupled(of_batch(kind), coupled=False)
    gradients(trainer(objective=declared, microbatches=4, **options), batch)


SCALARS: dict[str, Callable[[Any, Any], Scalar]] = {
    "mean": lambda output, _: Scalar(0.2 * (output**2).mean()),
    "mean by row": lambda output, _: Scalar((output**2).sum() / len(output)),
    "penalty": lambda _, model: Scalar((model(jnp.ones((1, 3, 5))) ** 2).sum()),
    "ratio": lambda output, _: Scalar(jnp.sin(output).sum() / (output**2).sum(), (output**2).sum()),
    "sum": lambda output, _: Scalar((output**2).sum()),
    "weighted sum": lambda output, _: Scalar((output**2).sum(), 1.0),
    "deviation": lambda output, _: Scalar(output.std()),
}


@pytest.mark.slow
@pytest.mark.parametrize("is_loss", [True, False])
@pytest.mark.parametrize("kind", SCALARS)
def test_a_scalar_with_microbatches_is_that_of_the_batch_or_refused(
    kind: str, is_loss: bool
) -> None:
    def objective(model: Any, batch: Any) -> dict[str, Any]:
        output = model(batch["x"])
        terms = {"error": ((output - batch["y"]) ** 2).mean(1), "a": SCALARS[kind](output, model)}
        return terms | {"loss": Combination({"error": 1.0} | ({"a": 0.5} if is_loss else {}))}

    batch = tokens_batch(np.random.default_rng(1))
    options: dict[str, Any] = {"model": tokens_model(), "objective": objective, "mesh": on(1)}
    whole = gradients(trainer(**options), batch)
    if "sum" in kind or (kind == "deviation" and is_loss):
        what = "is a sum over the examples" if "sum" in kind else "may not be a mean over examples"
        with pytest.raises(UserError, match=f"the Scalar 'a' {what} .*Set microbatches to 1"):
            gradients(trainer(microbatches=4, **options), batch)
    else:
        found = gradients(trainer(microbatches=4, **options), batch)
        if kind != "deviation":  # by definition the mean over microbatches
            check_equal(found, whole)


# -- weights that depend on trained parameters ---------------------------------------------------

SCATTERED = CollectiveOptions(reduction="reduce_scatter")
RULES: dict[str, dict[str, Any]] = {
    "one device": {"mesh": on(1)},
    "microbatches": {"mesh": on(1), "microbatches": 4},
    "without jit": {"mesh": on(1), "jit": False},
    "remat": {"mesh": on(2), "strategy": "mirrored", "remat": "full", "microbatches": 2},
    "flattened": {"mesh": on(8), "strategy": "mirrored"},
    "flattened microbatches": {"mesh": on(8), "strategy": "mirrored", "microbatches": 4},
    "by XLA": {
        "mesh": on(8),
        "strategy": "mirrored",
        "microbatches": 2,
        "collectives": CollectiveOptions(reduction="automatic"),
    },
    "reduce_scatter": {"mesh": on(8), "strategy": "zero", "collectives": SCATTERED},
}


def confident_model() -> FunctionModel:
    """(B, width) to two arrays (B,): a prediction, and the logit of its weight."""

    def init(key: jax.Array) -> dict[str, jax.Array]:
        first, second = jax.random.split(key)
        draw = jax.random.normal
        return {"output": draw(first, (64,)), "trust": 0.3 * draw(second, (64,))}

    return FunctionModel(init, lambda p, x: (x @ p["output"], x @ p["trust"]))


def confident(kind: str) -> Any:
    """An objective whose weights are the model's; some are 0 where their derivatives are not."""

    def objective(model: Any, batch: Any) -> dict[str, Any]:
        output, trust = model(batch["x"])
        error = (output - batch["y"]) ** 2
        weights = jnp.where(
            batch["at_0"], trust - jax.lax.stop_gradient(trust), jax.nn.sigmoid(trust)
        )
        pair = (error, batch["mask"] * weights)
        if kind != "terms":
            return {"loss": pair}
        scale = jnp.exp(trust)
        scalar = Scalar((scale * jnp.sin(output)).sum() / scale.sum(), scale.sum())
        terms = {"error": pair, "size": jnp.abs(output), "scalar": scalar}
        return terms | {"loss": Combination({"error": 1.0, "size": 0.5, "scalar": 0.2})}

    return objective


def confident_batch() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(2)
    return {
        "x": generator.normal(size=(ROWS, 64)).astype(np.float32),
        "y": generator.normal(size=ROWS).astype(np.float32),
        "mask": (generator.random(ROWS) < 0.6).astype(np.float32),
        "at_0": generator.random(ROWS) < 0.3,
    }


def of_formula(params: Any, batch: dict[str, np.ndarray], kind: str) -> jax.Array:
    """The sum of weight times value, divided by the sum of weights, without spmdtrain."""
    output, trust = batch["x"] @ params["output"], batch["x"] @ params["trust"]
    at_0 = trust - jax.lax.stop_gradient(trust)
    weights = batch["mask"] * jnp.where(batch["at_0"], at_0, jax.nn.sigmoid(trust))
    loss = (weights * (output - batch["y"]) ** 2).sum() / weights.sum()
    if kind == "terms":
        scale = jnp.exp(trust)
        loss += 0.5 * jnp.abs(output).mean() + 0.2 * (scale * jnp.sin(output)).sum() / scale.sum()
    return loss


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one loss", "terms"])
@pytest.mark.parametrize("rule", RULES)
def test_weights_that_depend_on_parameters_are_trained_by_every_rule(kind: str, rule: str) -> None:
    if (kind, rule) == ("terms", "reduce_scatter"):
        pytest.skip("a scalar of the batch is not known to the parts")
    batch = confident_batch()
    of = trainer(model=confident_model(), objective=confident(kind), **RULES[rule])
    params = jax.device_get(of.functions.init(0).params)
    loss, expected = jax.value_and_grad(of_formula)(params, batch, kind)
    assert np.abs(expected["trust"]).max() > 0.1
    found = gradients(of, batch)
    shown = {name: found[name] for name in ("loss", *expected)}
    check_equal(shown, jax.device_get(expected | {"loss": loss}), rule)


@pytest.mark.slow
def test_trained_weights_reach_optimizers_that_evaluate_the_loss_and_exact_refuses_them() -> None:
    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        by_value = jax.grad(extra["value_fn"])(params)
        # The derivative of the sum of squared gradients: derivatives of derivatives.
        size = jax.grad(lambda p: sum((x**2).sum() for x in extra["grad_fn"](p, 0).values()))
        return updates, [updates, by_value, extra["grad_fn"](params, 0), size(params)]

    def declared(
        updates: Any, state: Any, params: Any = None, *, value_fn: Any, grad_fn: Any
    ) -> Any:
        return update(updates, state, params, value_fn=value_fn, grad_fn=grad_fn)

    shows = optax.GradientTransformationExtraArgs(lambda params: [params] * 4, declared)
    batch, kind = confident_batch() | {"at_0": np.zeros(ROWS, bool)}, "one loss"
    options: dict[str, Any] = {"model": confident_model(), "objective": confident(kind)}

    def first(p: Any) -> Any:
        return jax.grad(of_formula)(p, batch, kind)

    for microbatches in (1, 2):
        of = trainer(**options, optimizer=shows, mesh=on(1), microbatches=microbatches)
        params = jax.device_get(of.functions.init(0).params)
        twice = jax.grad(lambda p: sum((x**2).sum() for x in first(p).values()))(params)
        found = jax.device_get(one_step(of, batch)[0].opt_state)
        for once in found[:3]:
            check_equal(once, jax.device_get(first(params)))
        check_equal(found[3], jax.device_get(twice))
    with pytest.raises(UserError, match="exact: the weights of the loss depend on trained"):
        gradients(trainer(**options, exact=16), batch)


@pytest.mark.slow
def test_without_weight_there_is_no_gradient_and_constant_weights_cost_no_first_pass() -> None:
    batch = confident_batch() | {"mask": np.zeros(ROWS, np.float32)}
    model = confident_model()
    for microbatches in (1, 4):
        options: dict[str, Any] = {"mesh": on(1), "microbatches": microbatches}
        found = gradients(trainer(model=model, objective=confident("one loss"), **options), batch)
        assert not any(x.any() for x in found.values())

    def products(objective: Any) -> int:
        of = trainer(model=model, objective=objective, mesh=on(1), microbatches=4)
        with use_placement(of.placement):
            traced = plan_step(of.functions, batch).program().trace(of.abstract_state, batch)
        return sum(x.primitive.name == "dot_general" for x in equations(traced.jaxpr))

    def of_constant_weights(model: Any, batch: Any) -> dict[str, Any]:
        error, weights = confident("one loss")(model, batch)["loss"]
        return {"loss": (error, jax.lax.stop_gradient(weights))}

    def of_no_weights(model: Any, batch: Any) -> dict[str, Any]:
        error, weights = confident("one loss")(model, batch)["loss"]
        return {"loss": error * jax.lax.stop_gradient(weights)}

    constant = products(of_constant_weights)
    assert constant == products(of_no_weights) < products(confident("one loss"))

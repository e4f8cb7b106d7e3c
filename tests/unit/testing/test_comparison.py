"""The comparison of a training loop with a trainer."""

import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from spmdtrain import FunctionModel, LinenModel, Trainer, UserError
from spmdtrain.testing import LossComparison, compare_losses

BATCH, STEPS = 16, 8  # an epoch has 4 steps
DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(64, 4)).astype(np.float32)
Y = (X @ np.array([1, -2, 3, 0.5], np.float32)).astype(np.float32)
FIRST = {"w": np.full(4, 0.5, np.float32), "b": np.zeros((), np.float32)}
OPTIMIZER = optax.adam(0.1)


def run(params: Any, batch: Any) -> Any:
    return batch[0] @ params["w"] + params["b"]


def trainer(**options: Any) -> Trainer:
    own: dict[str, Any] = {
        "model": FunctionModel(init=lambda key: FIRST, apply=run),
        "objective": lambda model, batch: {"loss": (model(batch) - batch[1]) ** 2},
        "optimizer": OPTIMIZER,
        "strategy": "fully_sharded",
        "shuffle": False,
    }
    return Trainer(**{**own, **options})


def loop(
    *,
    loss: Callable[[Any], Any] = jnp.mean,
    optimizer: optax.GradientTransformation = OPTIMIZER,
    first: Any = FIRST,
    data: Any = (X, Y),
    steps: int = STEPS,
) -> Iterator[tuple[Any, Any]]:
    """A loop on one device that donates its parameters."""

    def objective(params: Any, batch: Any) -> Any:
        return loss((run(params, batch) - batch[1]) ** 2)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(objective)(params, batch)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return value, optax.apply_updates(params, updates), opt_state

    compiled = jax.jit(step, donate_argnums=(0, 1))
    params = jax.tree.map(jnp.array, first)
    opt_state = optimizer.init(params)
    for number in range(steps):
        rows = slice(start := number % 4 * BATCH, start + BATCH)
        value, params, opt_state = compiled(params, opt_state, tuple(x[rows] for x in data))
        yield value, params


def compare(own: Any, **options: Any) -> LossComparison:
    return compare_losses(own, trainer(**options), STEPS, train=(X, Y), global_batch_size=BATCH)


@pytest.mark.slow
def test_a_loop_on_one_device_equals_a_trainer_on_several() -> None:
    given = trainer(log_every=1)
    assert given.mesh is not None and given.mesh.size == 8
    found = compare_losses(loop(), given, STEPS, train=(X, Y), global_batch_size=BATCH)
    assert found.first is None and found.compares_params
    assert [pair.step for pair in found.steps] == list(range(1, STEPS + 1))
    assert "losses and parameters of 8 steps are equal" in found.verdict
    # The trainer's steps are those of one `fit`, bit for bit.
    losses: list[float] = []
    callbacks = {"log": lambda event: losses.append(event.metrics["loss"])}
    whole = trainer(log_every=1, callbacks=callbacks)
    whole.fit((X, Y), steps=STEPS, global_batch_size=BATCH)
    assert [pair.trainer for pair in found.steps] == losses
    states = [jax.tree.map(np.asarray, each.state) for each in (given, whole)]
    jax.tree.map(np.testing.assert_array_equal, *states)


def late(step: Any) -> Any:
    return jnp.where(step < 2, 0.1, 0.2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "step", "array", "cause"),
    [
        ({"loss": jnp.sum}, 1, "loss", "or the objective differ"),
        ({"optimizer": optax.adam(late)}, 3, "params/b", "or the optimizer's update differs"),
        ({"data": (X, np.where(np.arange(64) == 40, 9, Y))}, 3, "loss", "its batch or its random"),
    ],
)
def test_the_first_difference_says_what_differs(
    changed: dict[str, Any], step: int, array: str, cause: str
) -> None:
    found = compare(loop(**changed))
    assert found.first is not None and (found.first.step, found.first.array) == (step, array)
    assert cause in found.verdict
    if array == "loss":
        pair = found.steps[step - 1]
        expected = abs(pair.loop - pair.trainer) / max(pair.loop, pair.trainer)
        assert found.first.relative == pytest.approx(expected) and expected > 0.1
    # The difference is marked in the table, which shows the other steps as well.
    table, _ = found.blocks()
    (row,) = table.marked
    assert [table.rows[row][0], table.rows[-1][0]] == [str(step), str(STEPS)]
    assert str(found).splitlines()[-1] == found.verdict


@pytest.mark.slow
def test_without_parameters_a_late_update_shows_in_the_next_loss() -> None:
    losses = (float(loss) for loss, _ in loop(optimizer=optax.adam(late)))
    found = compare(losses)
    assert found.first is not None and (found.first.step, found.first.array) == (4, "loss")
    assert "the update of step 3, or the batch of step 4, differs: yield (loss" in found.verdict
    named = ({"loss": loss, "params": params} for loss, params in loop())
    assert compare(named).first is None


class Dense(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.Dense(1)(x)[:, 0]


@pytest.mark.slow
def test_parameters_of_flax_have_the_paths_of_the_trainer() -> None:
    model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    variables = Dense().init(jax.random.key(0), X)
    given = trainer(
        model=model,
        objective=lambda model, batch: {"loss": (model(batch[0])[:, 0] - batch[1]) ** 2},
        optimizer=optax.sgd(0.1),
    )

    def of_nnx() -> Iterator[Any]:
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        rows = slice(BATCH)
        loss, gradients = nnx.value_and_grad(
            lambda model: jnp.mean((model(X[rows])[:, 0] - Y[rows]) ** 2)
        )(model)
        optimizer.update(model, gradients)  # in place: the trainer has its own values
        yield loss, nnx.state(model, nnx.Param)

    found = compare_losses(of_nnx(), given, 1, train=(X, Y), global_batch_size=BATCH)
    assert found.first is None and found.compares_params

    variables = Dense().init(jax.random.key(0), X)
    given = trainer(
        model=LinenModel(Dense(), X[:1]),
        objective=lambda model, batch: {"loss": (model(batch[0]) - batch[1]) ** 2},
    )
    named = compare_losses([(1.0, variables)], given, 1, train=(X, Y), rtol=math.inf)
    assert named.compares_params


@pytest.mark.slow
def test_values_that_are_not_finite_end_the_comparison() -> None:
    y = np.where(np.arange(64) == 40, np.nan, Y).astype(np.float32)
    train: dict[str, Any] = {"train": (X, y), "global_batch_size": BATCH}
    both = compare_losses(loop(data=(X, y)), trainer(), STEPS, **train)
    assert both.first is None and len(both.steps) == 3
    assert "both end with a value that is not finite: step 3: loss" in both.verdict
    one = compare_losses(loop(), trainer(), STEPS, **train)
    assert one.first is not None and (one.first.step, one.first.array) == (3, "loss")
    assert one.first.relative == math.inf and "the trainer stopped, step 3: loss" in one.verdict
    other = compare(loop(data=(X, y)))
    assert other.first is not None and other.first.step == 3
    assert other.first.relative == math.inf and len(other.steps) == STEPS


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (loop, "loop is a function.*: call it, compare_losses"),
        (lambda: loop(steps=3), "the loop ended after 3 of 8 steps: .* or give steps=3"),
        (lambda: [np.ones(3)], r"yields an array of shape \(3,\) as the loss of step 1"),
        (lambda: [{"los": 1.0}], "yields a mapping without 'loss' after step 1"),
        (
            lambda: ((x, {"w": p["w"], "c": p["b"]}) for x, p in loop()),
            "yields 2 arrays .* and the trainer has 2: it lacks b; it has also c. They",
        ),
        (lambda: ((x, p | {"w": p["w"][:3]}) for x, p in loop()), r"params/w has shape \(3,\) in"),
    ],
)
def test_a_loop_that_cannot_be_compared_is_refused(own: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        compare(own if own is loop else own())


def test_a_trainer_that_would_not_begin_with_step_1_is_refused(tmp_path: Any) -> None:
    with pytest.raises(UserError, match=r"the trainer has workdir=.*give compare_losses a Trainer"):
        compare(loop(), workdir=str(tmp_path / "run"))
    given = trainer(quiet=True)
    given.fit((X, Y), steps=2, global_batch_size=BATCH)
    with pytest.raises(UserError, match="the trainer is at step 2, and the comparison begins"):
        compare_losses(loop(), given, STEPS, train=(X, Y), global_batch_size=BATCH)
    with pytest.raises(UserError, match="steps is 0"):
        compare_losses(loop(), trainer(), 0, train=(X, Y))
    for rtol in (math.nan, -1.0, "1e-3"):
        with pytest.raises(UserError, match=f"rtol is {rtol!r}: it must be a number"):
            compare_losses(loop(), trainer(), 1, train=(X, Y), rtol=rtol)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"trainer is a str: compare_losses calls the fit"):
        compare_losses(loop(), "trainer", 1, train=(X, Y))  # type: ignore[arg-type]


def test_a_keras_model_that_a_fit_writes_into_is_refused() -> None:
    os.environ.setdefault("KERAS_BACKEND", "jax")  # read when Keras is first imported
    keras = pytest.importorskip("keras", reason="Keras is an extra")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    losses = (model.train_on_batch(X[:BATCH], Y[:BATCH]) for _ in range(STEPS))
    with pytest.raises(UserError, match=r"of from_keras, which writes .* the loop another model"):
        compare_losses(losses, Trainer.from_keras(model, quiet=True), STEPS, train=(X, Y))


def test_rounding_of_a_small_array_is_no_difference() -> None:
    first = {**FIRST, "b": np.full((), 1e-9, np.float32)}
    frozen = optax.masked(optax.set_to_zero(), {"w": False, "b": True})
    options = {
        "model": FunctionModel(init=lambda key: first, apply=run),
        "optimizer": optax.chain(OPTIMIZER, frozen),
    }
    small = loop(first=first, optimizer=optax.chain(OPTIMIZER, frozen))
    noisy = ((loss, {**params, "b": params["b"] * 3}) for loss, params in small)
    assert compare(noisy, **options).first is None
    large = loop(first=first, optimizer=optax.chain(OPTIMIZER, frozen))
    moved = ((loss, {**params, "b": params["b"] + 1e-4}) for loss, params in large)
    found = compare(moved, **options).first
    assert found is not None and found.array == "params/b"


def test_a_run_that_diverges_as_its_loop_does_is_equal() -> None:
    wild = optax.sgd(1e30)
    pairs = list(loop(optimizer=wild, steps=2))
    found = compare((loss for loss, _ in pairs), steps=2, optimizer=wild)
    assert found.first is None and "not finite" in found.stopped
    assert found.steps[-1].trainer == found.steps[-1].loop or math.isnan(found.steps[-1].loop)

"""Optimizers of optax that take more than gradients, against optax's own loop."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import REPOSITORY
from jax.sharding import PartitionSpec

from spmdtrain import (
    Combination,
    FunctionModel,
    MeshSpec,
    RunConfig,
    Trainer,
    UserError,
    load_params,
)
from spmdtrain.config.options import ShardingOptions
from spmdtrain.document.terminal import Terminal
from spmdtrain.sharding.rules import Rule
from spmdtrain.step.optimizer import Update, extra_names

PyTree = Any
GENERATOR = np.random.default_rng(5)
X = GENERATOR.normal(size=(48, 8)).astype(np.float32)
Y = GENERATOR.normal(size=(48, 8)).astype(np.float32)
ROW_WEIGHTS = GENERATOR.uniform(0.5, 2, size=48).astype(np.float32)
W = GENERATOR.normal(size=(8, 8)).astype(np.float32)
SIZE, STEPS = 16, 4
MATRIX = optax.contrib.MuonDimensionNumbers(1, 0)
ADVERSARY = optax.chain(optax.contrib.normalize(), optax.sgd(0.1))
SAM = "optax.contrib.sam(optax.sgd(0.01), ADVERSARY, opaque_mode=True)"
NAMES = {"optax": optax, "MATRIX": MATRIX, "ADVERSARY": ADVERSARY}


def first() -> dict[str, jax.Array]:
    return {"w": jnp.asarray(W), "b": jnp.zeros(8)}


def apply(params: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["w"] + params["b"])


def objective(model: Any, batch: Any) -> dict[str, Any]:
    x, y, weights = batch
    return {"loss": (((model(x) - y) ** 2).sum(-1), weights)}


def trainer(optimizer: Any, **options: Any) -> Trainer:
    given: dict[str, Any] = {
        "model": FunctionModel(lambda key: first(), apply),
        "objective": objective,
        "optimizer": optimizer,
        "global_batch_size": SIZE,
        "shuffle": False,
        "log_every": 1,
        "sharding": ShardingOptions(min_size=1),
    }
    return Trainer(**given | options, terminal=Terminal(quiet=True))


def trained(optimizer: Any, steps: int = STEPS, **options: Any) -> dict[str, np.ndarray]:
    found = trainer(optimizer, **options)
    found.fit((X, Y, ROW_WEIGHTS), steps=steps)
    assert found.state is not None
    return jax.tree.map(np.asarray, found.state.params)


def plain(optimizer: Any, steps: int = STEPS) -> tuple[dict[str, jax.Array], PyTree]:
    """The parameters and the state after a loop of optax alone, on one device."""

    def loss(params: PyTree, x: Any, y: Any, weights: Any) -> jax.Array:
        return (((apply(params, x) - y) ** 2).sum(-1) * weights).sum() / weights.sum()

    @jax.jit
    def step(params: PyTree, state: PyTree, *batch: Any) -> tuple[PyTree, PyTree]:
        def value_fn(params: PyTree) -> jax.Array:
            return loss(params, *batch)

        value, grad = jax.value_and_grad(value_fn)(params)
        arguments = {
            "value": value,
            "grad": grad,
            "value_fn": value_fn,
            "obj_fn": value_fn,
            "grad_fn": lambda params, _: jax.grad(value_fn)(params),
        }
        given = {name: arguments[name] for name in extra_names(optimizer)}
        updates, state = optimizer.update(grad, state, params, **given)
        return optax.apply_updates(params, updates), state

    params: Any = first()
    state = optimizer.init(params)
    for number in range(steps):
        rows = slice(number % 3 * SIZE, (number % 3 + 1) * SIZE)
        params, state = step(params, state, X[rows], Y[rows], ROW_WEIGHTS[rows])
    return params, state


def check_equal(found: PyTree, expected: PyTree, rtol: float = 1e-5) -> None:
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * np.abs(np.asarray(y)).max())


# Rows of optimizers that a step runs as other rows, or without any extra argument.
NIGHTLY = (
    *("the same", "as in optax", "the learning rate that they estimate is not logged"),
    "line search: the loss of the same global batch is evaluated several times in a step",
)


def shown() -> list[Any]:
    """The optimizers in the table of docs/step.md."""
    section = (REPOSITORY / "docs/step.md").read_text().split("\n## Optimizers\n")[1]
    table = section.split("| optimizer |")[1].split("\n\n")[0]
    rows = [row.split("|")[1:3] for row in table.splitlines()[2:]]
    return [
        pytest.param(code, marks=[pytest.mark.nightly] * (how.strip() in NIGHTLY))
        for codes, how in rows
        for code in re.findall(r"`([^`]+)`", codes)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("code", shown())
def test_an_optimizer_of_the_table_equals_optax_on_eight_devices(code: str) -> None:
    optimizer = eval(code, NAMES)
    # `acprop` divides by differences of gradients, which amplifies rounding.
    rtol = 2e-3 if "acprop" in code else 1e-5
    check_equal(trained(optimizer, strategy="mirrored"), plain(optimizer)[0], rtol)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "options"),
    [
        ("optax.contrib.muon(1e-2)", {"strategy": "fully_sharded"}),
        (
            "optax.contrib.muon(1e-2)",
            {
                "strategy": "tensor_parallel",
                "rules": [Rule("w", PartitionSpec("tensor"))],
                "mesh": MeshSpec(data=2, tensor=4),
            },
        ),
        (SAM, {"strategy": "zero"}),
    ],
    ids=str,
)
def test_it_does_so_with_split_parameters(code: str, options: dict[str, Any]) -> None:
    optimizer = eval(code, NAMES)
    check_equal(trained(optimizer, **options), plain(optimizer)[0])


@pytest.mark.nightly
def test_lbfgs_reaches_the_known_optimum_of_least_squares() -> None:
    target = X @ W + 1

    def squares(model: Any, batch: Any) -> dict[str, Any]:
        x, y = batch
        return {"loss": ((model(x) - y) ** 2).sum(-1)}

    model = FunctionModel(
        lambda key: {"w": jnp.zeros((8, 8)), "b": jnp.zeros(8)}, lambda p, x: x @ p["w"] + p["b"]
    )
    options = {"model": model, "objective": squares, "global_batch_size": 48}
    found = trainer(optax.lbfgs(), **options, strategy="fully_sharded", microbatches=2)
    found.fit((X, target), steps=25)
    assert found.state is not None
    check_equal(found.state.params, {"w": W, "b": np.ones(8)}, 1e-4)


def recorder() -> optax.GradientTransformationExtraArgs:
    """Gradient descent that records the extra arguments."""

    def init(params: PyTree) -> PyTree:
        return {"value": jnp.zeros(()), "again": jnp.zeros(2), "differ": jnp.zeros(2)}

    def update(
        updates: PyTree,
        state: PyTree,
        params: PyTree = None,
        *,
        value: Any,
        grad: Any,
        value_fn: Any,
        obj_fn: Any,
        grad_fn: Any,
    ) -> tuple[PyTree, PyTree]:
        others = jax.grad(value_fn)(params), grad_fn(params, 0)
        differ = [
            optax.tree.norm(jax.tree.map(jnp.subtract, x, grad)) / optax.tree.norm(grad)
            for x in others
        ]
        again = jnp.stack([value_fn(params), obj_fn(params)])
        after = {"value": value, "again": again, "differ": jnp.stack(differ)}
        return jax.tree.map(lambda x: -0.1 * x, updates), after

    return optax.GradientTransformationExtraArgs(init, update)


@pytest.mark.slow
@pytest.mark.parametrize("terms", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_optimizer_evaluates_the_loss_of_the_step_with_its_dropout_and_microbatches(
    terms: int,
) -> None:
    def noisy(model: Any, batch: Any, key: jax.Array) -> dict[str, Any]:
        x, y, weights = batch
        kept = jax.random.bernoulli(key, 0.5, x.shape)
        error, size = ((model(x * kept) - y) ** 2).sum(-1), abs(model(x)).sum(-1)
        if terms == 1:
            return {"loss": (error, weights), "size": size}
        # Each term is divided by its own weights over all microbatches.
        loss = Combination({"error": 1.0, "size": 0.5})
        return {"loss": loss, "error": (error, weights), "size": (size, x[:, 0] > 0)}

    found = trainer(recorder(), objective=noisy, strategy="mirrored", microbatches=2, freeze=("b",))
    result = found.fit((X, Y, ROW_WEIGHTS), steps=1)
    assert found.state is not None
    recorded = found.state.opt_state
    assert float(recorded["value"]) == pytest.approx(result.train["loss"], rel=1e-6)
    np.testing.assert_allclose(recorded["again"], result.train["loss"], rtol=1e-5)
    assert np.asarray(recorded["differ"]).max() < 1e-5
    norms = result.train["update_norm"], result.train["gradient_norm"]
    assert norms[0] == pytest.approx(0.1 * norms[1], rel=1e-5)


def test_the_transformation_of_the_page_skips_an_update() -> None:
    page = (REPOSITORY / "docs/step.md").read_text()
    (code,) = re.findall(r"^```python\n(import jax.*?)^```", page, re.M | re.S)
    shown: dict[str, Any] = {}
    exec(code, shown)
    assert extra_names(shown["optimizer"]) == ["value"]
    skips, ones = shown["skip_spikes"](3.0), {"w": jnp.ones(2)}
    state, sizes = skips.init(ones), []
    for value in (1.0, 2.0, 9.0, 2.0):
        updates, state = skips.update(ones, state, value=jnp.asarray(value))
        sizes.append(float(updates["w"].sum()))
    assert sizes == [2, 2, 0, 2]


def with_plateau(learning_rate: float) -> optax.GradientTransformation:
    return optax.chain(optax.sgd(learning_rate), optax.contrib.reduce_on_plateau())


MOMO = optax.contrib.momo()


def with_own_value(updates: PyTree, state: PyTree, params: PyTree = None) -> Any:
    return MOMO.update(updates, state, params, value=jnp.ones(()))


@pytest.mark.parametrize(
    ("optimizer", "names"),
    [
        (optax.GradientTransformation(MOMO.init, with_own_value), []),
        (optax.adam(1.0), []),
        (optax.lbfgs(), ["value", "grad", "value_fn"]),
        (optax.masked(optax.lbfgs(), True), ["value", "grad", "value_fn"]),
        (optax.MultiSteps(optax.contrib.momo(), 2), ["value"]),
        (optax.inject_hyperparams(with_plateau)(0.1), ["value"]),
        (optax.chain(optax.clip(1.0), eval(SAM, NAMES)), ["grad_fn"]),
        (optax.contrib.sophia(1.0), ["obj_fn"]),
    ],
)
def test_the_declared_arguments_are_found(optimizer: Any, names: list[str]) -> None:
    assert extra_names(optimizer) == names


def needs_loss() -> optax.GradientTransformation:
    def update(updates: Any, state: Any, params: Any = None, *, loss: Any, **extra: Any) -> Any:
        return updates, state

    return optax.GradientTransformationExtraArgs(lambda params: (), update)


def returning(result: Any) -> optax.GradientTransformation:
    return optax.GradientTransformation(lambda params: (), lambda g, s, params=None: result(g, s))


@pytest.mark.parametrize(
    ("optimizer", "options", "words"),
    [
        (optax.contrib.sam(optax.sgd(0.1), ADVERSARY), {}, "Set opaque_mode=True"),
        (
            optax.contrib.differentially_private_aggregate(1.0, 1.0, key=0),
            {},
            "gradient of each example",
        ),
        (optax.contrib.schedule_free_sgd(), {"ema_decay": 0.9}, "Leave ema_decay out"),
        (optax.chain(needs_loss()), {}, "requires the extra argument 'loss'.*value_fn"),
        (returning(lambda g, s: g), {}, "update returned .*: it must return .updates, state"),
        (returning(lambda g, s: 3), {}, "update returned a value of type int: it must return"),
        (returning(lambda g, s: ({}, s)), {}, "no update of "),
        (
            returning(lambda g, s: (jax.tree.map(lambda x: x[..., None], g), s)),
            {},
            r"with shape \(.*, 1\): the parameter has shape",
        ),
    ],
    ids=[
        "sam",
        "dpsgd",
        "average",
        "argument",
        "no pair",
        "a number",
        "no updates",
        "one more dim",
    ],
)
def test_it_is_refused_in_one_line(optimizer: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        trainer(optimizer, **options).fit((X, Y, ROW_WEIGHTS), steps=1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_average_of_a_schedule_free_part_leaves_other_parameters_as_they_are(
    dtype: Any,
) -> None:
    free = optax.contrib.schedule_free_sgd(0.1)
    both = optax.partition({"free": free, "sgd": optax.sgd(0.1)}, {"w": "free", "b": "sgd"})
    params = jax.tree.map(lambda x: x.astype(dtype), first())
    state, params = both.init(params), jax.tree.map(lambda x: x + 1, params)
    of_free = state.inner_states["free"].inner_state
    z, b1 = (jnp.asarray(x, jnp.float32) for x in (of_free.z["w"], of_free.b1))
    found = Update(both).average({}, params, state, jnp.zeros((), jnp.int32))
    np.testing.assert_array_equal(found["b"], params["b"])
    expected = (params["w"].astype(jnp.float32) - (1 - b1) * z) / b1
    np.testing.assert_allclose(found["w"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_schedule_free_run_is_evaluated_saved_and_resumed_with_its_average(
    tmp_path: Path,
) -> None:
    free = optax.contrib.schedule_free_sgd(0.05)
    data = (X, Y, ROW_WEIGHTS)
    params, state = plain(free, 6)
    expected = optax.contrib.schedule_free_eval_params(state, params)
    error = ((apply(expected, jnp.asarray(X)) - Y) ** 2).sum(-1)
    loss = float((error * ROW_WEIGHTS).sum() / ROW_WEIGHTS.sum())

    def run(workdir: Path, steps: int) -> Any:
        made = trainer(free, workdir=str(workdir), strategy="fully_sharded")
        return made, made.fit(data, validation=data, test=data, steps=steps)

    made, result = run(tmp_path / "whole", 6)
    assert result.validation["loss"] == pytest.approx(loss, rel=1e-5)
    assert result.test["loss"] == pytest.approx(loss, rel=1e-5)
    assert made.evaluate(data)["loss"] == pytest.approx(loss, rel=1e-5)
    check_equal(load_params(tmp_path / "whole", which="best"), expected)
    check_equal(load_params(tmp_path / "whole", averaged=False), params)
    run(tmp_path / "parts", 3)
    resumed, _ = run(tmp_path / "parts", 6)
    for x, y in zip(*map(jax.tree.leaves, (resumed.state, made.state)), strict=True):
        np.testing.assert_array_equal(x, y)


PLATEAU = optax.contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=0.9)
SEARCH = optax.scale_by_backtracking_linesearch(10, decrease_factor=0.1)


@pytest.mark.parametrize(
    ("base", "optimizer", "steps"),
    [
        (0.1, optax.chain(optax.inject_hyperparams(optax.sgd)(0.1), PLATEAU), 3),
        pytest.param(1e4, optax.chain(optax.sgd(1e4), SEARCH), 1, marks=pytest.mark.slow),
    ],
    ids=["plateau", "line search"],
)
def test_the_rate_includes_the_scale_of_a_plateau_and_the_step_of_a_line_search(
    base: float, optimizer: Any, steps: int
) -> None:
    found = trainer(optimizer, strategy="mirrored", config=RunConfig(learning_rate=7.0))
    line = found.fit((X, Y, ROW_WEIGHTS), steps=steps).train
    rate = line["update_norm"] / line["gradient_norm"]
    assert line["learning_rate"] == pytest.approx(rate, rel=1e-5)
    assert 0 < line["learning_rate"] < 0.6 * base


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["inject_hyperparams", "monitor"])
def test_a_state_that_changes_at_its_first_update_is_that_of_optax(kind: str) -> None:
    """Moments widen to the dtype of an injected rate; measurements appear with the first update."""
    optimizer: Any = (
        optax.inject_hyperparams(optax.adam)(0.05)
        if kind == "inject_hyperparams"
        else optax.chain(
            optax.sgd(0.05),
            optax.monitor({"norm": lambda updates, **_: optax.tree.norm(updates)}),
        )
    )

    def start(key: jax.Array) -> PyTree:
        return {"w": jnp.asarray(W, jnp.bfloat16), "b": jnp.zeros(8, jnp.float32)}

    def loss(params: PyTree, batch: Any) -> jax.Array:
        return jnp.square(batch @ params["w"].astype(jnp.float32) + params["b"]).mean(-1)

    trainer = Trainer(
        model=FunctionModel(start),
        objective=lambda params, batch: {"loss": loss(params, batch)},
        optimizer=optimizer,
        mesh=MeshSpec(devices=(0,)),
        global_batch_size=16,
        shuffle=False,
        terminal=Terminal(quiet=True),
    )
    trainer.fit(X, steps=3)
    params = start(jax.random.key(0))
    state = optimizer.init(params)
    for rows in X.reshape(3, 16, 8):
        gradients = jax.grad(lambda p, rows=rows: loss(p, rows).mean())(params)
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    ours: Any = trainer.state
    for mine, own in ((ours.params, params), (ours.opt_state, state)):
        assert jax.tree.map(lambda x: x.dtype, mine) == jax.tree.map(lambda x: x.dtype, own)
        for x, y in zip(jax.tree.leaves(mine), jax.tree.leaves(own), strict=True):
            np.testing.assert_allclose(np.float32(x), np.float32(y), rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn", "float8_e5m2"])
def test_parameters_too_narrow_for_the_gradient_of_a_sum_are_refused(dtype: str) -> None:
    params = {"w": jnp.zeros(4, dtype)}
    update = Update(optax.sgd(0.1))
    with pytest.raises(UserError, match=f"parameter w is {dtype}, whose largest number is"):
        update.check(params, update.init(params))
    Update(optax.sgd(0.1), frozen=("w",)).check(params | {"v": jnp.zeros(2)}, ())


@pytest.mark.parametrize(
    "make",
    [
        lambda state: optax.masked(optax.sgd(0.1), jax.tree.map(lambda x: True, state)),
        lambda state: optax.adamw(0.1, mask=jax.tree.map(lambda x: True, state)),
        lambda state: optax.partition({"a": optax.sgd(0.1)}, jax.tree.map(lambda x: "a", state)),
    ],
    ids=["masked", "adamw", "partition"],
)
def test_a_mask_that_is_a_state_of_nnx_is_refused_in_one_line(make: Any) -> None:
    state = nnx.state(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(UserError, match=r"give it nnx\.to_pure_dict\(state\)"):
        Update(make(state)).init(nnx.to_pure_dict(state))
    Update(make(nnx.to_pure_dict(state))).init(nnx.to_pure_dict(state))
    with pytest.raises(UserError, match="compares another tree"):
        Update(make({"kernel": jnp.zeros(2)})).init(nnx.to_pure_dict(state))

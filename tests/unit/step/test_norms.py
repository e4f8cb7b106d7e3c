"""The norms and the learning rate in a line of training, against NumPy and optax."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from spmdtrain import CallbackContext, FunctionModel, MeshSpec, Rule, Trainer
from spmdtrain.config.options import CollectiveOptions, ShardingOptions
from spmdtrain.document.terminal import Terminal
from spmdtrain.step.health import global_norm
from spmdtrain.testing.compiled_step import compiled_step

GENERATOR = np.random.default_rng(3)
X = GENERATOR.normal(size=(48, 16)).astype(np.float32)
Y = GENERATOR.normal(size=(48, 8)).astype(np.float32)
W = GENERATOR.normal(size=(16, 8)).astype(np.float32)
B = GENERATOR.normal(size=8).astype(np.float32)
RATE, SIZE = 0.1, 16


def squared_error(model: Any, batch: Any) -> dict[str, jax.Array]:
    x, y = batch
    return {"loss": ((model(x) - y) ** 2).sum(-1)}


def lines(steps: int = 3, **options: Any) -> list[dict[str, float]]:
    """The lines of training of a linear model of 16 numbers to 8."""
    found: list[dict[str, float]] = []

    def collect(context: CallbackContext) -> None:
        found.append({"step": context.step, **context.metrics})

    given: dict[str, Any] = {
        "model": FunctionModel(lambda key: {"w": jnp.asarray(W), "b": jnp.asarray(B)}, apply),
        "objective": squared_error,
        "optimizer": optax.sgd(RATE),
        "global_batch_size": SIZE,
        "shuffle": False,
        "log_every": 1,
    }
    trainer = Trainer(**given | options, callbacks={"log": collect}, terminal=Terminal(quiet=True))
    trainer.fit((X, Y), steps=steps)
    return found


def apply(params: Any, x: jax.Array) -> jax.Array:
    return x @ params["w"] + params["b"]


def expected(*, trains_bias: bool = True) -> list[tuple[float, float, float]]:
    """The norms of three steps of gradient descent, in NumPy and float64."""
    w, b, norms = W.astype(np.float64), B.astype(np.float64), []
    for step in range(3):
        x, y = (part[step * SIZE : (step + 1) * SIZE].astype(np.float64) for part in (X, Y))
        error = 2 * (x @ w + b - y) / SIZE
        of_w, of_b = x.T @ error, error.sum(0) * trains_bias
        w, b = w - RATE * of_w, b - RATE * of_b
        norm = np.sqrt((of_w**2).sum() + (of_b**2).sum())
        norms.append((norm, np.sqrt((w**2).sum() + (b**2).sum()), RATE * norm))
    return norms


OTHER_OPTIONS: list[dict[str, Any]] = [
    {},
    {"strategy": "mirrored", "microbatches": 2, "ema_decay": 0.9},
    {
        "strategy": "mirrored",
        "mesh": MeshSpec(replica=2, data=4),
        "collectives": CollectiveOptions(reduction="hierarchical"),
    },
    {"strategy": "zero"},
    {"strategy": "fully_sharded", "steps_per_dispatch": 3},
    {"strategy": "tensor_parallel", "rules": [Rule("w", PartitionSpec(None, "tensor"))]},
]


@pytest.mark.parametrize(
    "options",
    [{"freeze": ("b",)}, *(pytest.param(each, marks=pytest.mark.slow) for each in OTHER_OPTIONS)],
    ids=str,
)
def test_norms_are_those_of_numpy_under_every_strategy(options: dict[str, Any]) -> None:
    found = lines(**options, sharding=ShardingOptions(min_size=1))
    names = ("gradient_norm", "parameter_norm", "update_norm")
    norms = [tuple(line[name] for name in names) for line in found]
    np.testing.assert_allclose(norms, expected(trains_bias="freeze" not in options), rtol=1e-5)


@pytest.mark.parametrize("strategy", ["mirrored", "zero", "fully_sharded"])
def test_no_collective_is_in_a_branch_or_a_loop(strategy: str) -> None:
    """XLA's CPU client runs those beside others, in another order on each device."""
    trainer = Trainer(
        model=FunctionModel(lambda key: {"w": jnp.asarray(W), "b": jnp.asarray(B)}, apply),
        objective=squared_error,
        optimizer=optax.sgd(RATE),
        strategy=strategy,
        global_batch_size=SIZE,
        sharding=ShardingOptions(min_size=1),
    )
    step = compiled_step(trainer, (X[:SIZE], Y[:SIZE]))
    inner, _, entry = step.text.rpartition("ENTRY")
    assert re.search("all-reduce|reduce-scatter", entry)
    assert not re.search("all-reduce|all-gather|reduce-scatter|collective-permute", inner)


def test_a_step_that_is_not_logged_has_no_norms_and_the_first_and_tenth_have_them() -> None:
    every, some = lines(13), lines(13, log_every=5)
    assert [line["step"] for line in some] == [1, 5, 10, 13]
    kept = [{k: x for k, x in line.items() if "norm" not in k} for line in some[3:]]
    assert [every[int(line["step"]) - 1] for line in some[:3]] == some[:3]
    assert some[3:] == kept and kept[0]["loss"] == every[12]["loss"]


@pytest.mark.parametrize("dtype", [jnp.complex64, jnp.float16, jnp.bfloat16, jnp.float32])
def test_a_norm_is_that_of_all_parts_of_a_number(dtype: Any) -> None:
    values = np.array([3 + 4j, 12]) if dtype is jnp.complex64 else np.array([5.0, 12.0])
    tree = {"w": jnp.asarray(values, dtype), "step": jnp.array(7), "frozen": None}
    norm = global_norm(tree, None)
    assert (norm.dtype, float(norm)) == (jnp.float32, 13.0)


SCHEDULE = optax.linear_schedule(1e-2, 1e-3, 4)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(SCHEDULE)),
        optax.sgd(SCHEDULE, momentum=0.9),
        optax.inject_hyperparams(optax.adam)(learning_rate=SCHEDULE),
    ],
    ids=["chain", "sgd", "injected"],
)
def test_a_line_has_the_rate_of_its_update(optimizer: optax.GradientTransformation) -> None:
    rates = [line["learning_rate"] for line in lines(optimizer=optimizer)]
    np.testing.assert_allclose(rates, [float(SCHEDULE(n)) for n in range(3)], rtol=1e-6)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.chain(optax.sgd(SCHEDULE), optax.scale(0.5)),
        optax.chain(optax.sgd(0.1), optax.scale_by_schedule(SCHEDULE)),
        optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(lambda n: -SCHEDULE(n))),
    ],
    ids=["scaled", "twice", "own"],
)
def test_without_a_single_schedule_a_line_has_no_rate(
    optimizer: optax.GradientTransformation,
) -> None:
    (line,) = lines(1, optimizer=optimizer)
    assert "learning_rate" not in line


def test_many_small_arrays_are_added_up_by_one_product() -> None:
    """A product for each made XLA compile a step of 2,000 arrays for 95 s instead of 15 s."""
    draw = np.random.default_rng(0)
    shapes = [(), (3,), (2, 4), (0,), (200, 100)] * 20
    arrays = [jnp.asarray(draw.normal(size=shape), "float32") for shape in shapes]
    arrays[1] = arrays[1].astype(jnp.bfloat16)
    arrays[3] = jnp.arange(5)  # integers do not count
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    found = global_norm([*arrays, None], [place] * 101)
    counted = [np.asarray(x, "float64").ravel() for x in arrays if x.dtype != jnp.int32]
    assert float(found) == pytest.approx(np.linalg.norm(np.concatenate(counted)), rel=1e-6)
    jaxpr = jax.make_jaxpr(lambda tree: global_norm(tree, [place] * 100))(arrays)
    assert str(jaxpr).count("dot_general[") == 1 + 20  # and one for each large array

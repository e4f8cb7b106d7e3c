"""The health of a step: whether its state is finite, and its norms, also within the update."""

import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from spmdtrain import CallbackContext, FunctionModel, MeshSpec, Rule, Trainer
from spmdtrain.config.options import CollectiveOptions, ShardingOptions
from spmdtrain.document.terminal import Terminal
from spmdtrain.step.flops import count_flops
from spmdtrain.step.health import FLAGS, finite_flags, global_norm, stays_finite
from spmdtrain.step.program import fused_evaluation
from spmdtrain.testing.compiled_step import compiled_step

SHAPES = ((), (3,), (4, 5), (2, 3, 4), (70_000,), (300, 200), (0, 4))
KINDS = (jnp.float32, jnp.bfloat16, jnp.int32)
LEAVES = [(shape, kind) for shape in SHAPES for kind in KINDS]
FLOATS = [n for n, (shape, kind) in enumerate(LEAVES) if kind != jnp.int32 and np.prod(shape)]


def tree(value: float) -> list[jax.Array]:
    return [jnp.full(shape, value).astype(kind) for shape, kind in LEAVES]


@pytest.fixture(scope="module", params=[1, 8], ids=["one", "mesh"])
def places(request: pytest.FixtureRequest) -> list[NamedSharding]:
    mesh = Mesh(np.array(jax.devices()[: request.param]), ("data",))
    return [NamedSharding(mesh, PartitionSpec())] * len(LEAVES)


@pytest.mark.slow
@pytest.mark.parametrize("value", [0.0, 3e38, -3e38])
def test_what_is_finite_is(value: float, places: list[NamedSharding]) -> None:
    assert stays_finite(tree(0.0), tree(value), places)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    leaf=st.sampled_from(FLOATS),
    where=st.floats(0, 1, exclude_max=True),
    value=st.sampled_from([np.nan, np.inf, -np.inf]),
)
def test_one_element_that_is_not_is_seen(
    leaf: int, where: float, value: float, places: list[NamedSharding]
) -> None:
    after = tree(1.0)
    flat = after[leaf].ravel()
    after[leaf] = flat.at[int(where * flat.size)].set(value).reshape(after[leaf].shape)
    assert not stays_finite(tree(1.0), after, places)


def test_a_scalar_that_was_infinite_before_is_meant_so(places: list[NamedSharding]) -> None:
    assert stays_finite([jnp.inf], [jnp.asarray(jnp.inf)], places[:1])
    assert not stays_finite([jnp.inf], [jnp.asarray(jnp.nan)], places[:1])
    assert not stays_finite([jnp.ones(3)], [jnp.full(3, jnp.inf)], places[:1])


@pytest.mark.parametrize(
    ("is_last", "param", "expected"),
    [
        (False, 1.0, [True, True, True, True]),  # found after the last step of the dispatch
        (True, 1.0, [True, True, False, True]),
        (False, np.nan, [True, False, False, True]),
    ],
)
def test_within_a_dispatch_the_optimizer_is_checked_after_the_last_step_or_a_bad_one(
    is_last: bool, param: float, expected: list[bool]
) -> None:
    place = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("data",)), PartitionSpec())

    def state(param: float, moment: float) -> SimpleNamespace:
        params, moments = jnp.full((3, 4), param), [jnp.full((3, 4), moment)]
        return SimpleNamespace(params=params, opt_state=moments, model_state={})

    places = SimpleNamespace(params=place, opt_state=[place], model_state={})
    before, after, last = state(1.0, 1.0), state(param, np.inf), jnp.array(is_last)
    flags = finite_flags(jnp.array(1.0), before, after, places, is_last=last)
    assert flags.tolist() == expected


# -- norms and the learning rate in a line of training, against NumPy and optax --------------------

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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


# -- norms and flags in the pass of the update -----------------------------------------------------

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
PARAMS: dict[str, Any] = {
    "a": {"kernel": jnp.linspace(-1, 1, 12).reshape(3, 4)},
    "b": jnp.ones(3),
}
GRADIENTS = jax.tree.map(lambda x: jnp.sin(7 * x), PARAMS)


def updated(state: Any, gradients: Any) -> tuple[Any, tuple[Any, Any]]:
    scaled = jax.tree.map(lambda x: x / 3, gradients)
    updates, opt_state = OPTIMIZER.update(scaled, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    after = SimpleNamespace(params=params, opt_state=opt_state, model_state={})
    return after, (scaled, updates)


@jax.jit
def step(state: Any, gradients: Any) -> Any:
    def run(state: Any, gradients: Any) -> Any:
        after, changes = updated(state, gradients)
        return Found(after.params, after.opt_state), changes

    found, checks = fused_evaluation(run, state, gradients)
    before = SimpleNamespace(**state, model_state={})
    place = SingleDeviceSharding(jax.devices()[0])
    places = SimpleNamespace(
        opt_state=jax.tree.map(lambda _: place, state["opt_state"]), model_state={}
    )
    flags = checks.flags(jnp.float32(0), before, found.state, places)
    return found.params, found.opt_state, checks.norms, flags


@jax.tree_util.register_pytree_node_class
class Found:
    """The first result of an update."""

    def __init__(self, params: Any, opt_state: Any) -> None:
        self.params, self.opt_state = params, opt_state

    @property
    def state(self) -> Any:
        return SimpleNamespace(params=self.params, opt_state=self.opt_state, model_state={})

    def tree_flatten(self) -> Any:
        return (self.params, self.opt_state), None

    @classmethod
    def tree_unflatten(cls, _: Any, children: Any) -> "Found":
        return cls(*children)


def start() -> dict[str, Any]:
    return {"params": PARAMS, "opt_state": OPTIMIZER.init(PARAMS)}


@pytest.mark.slow
def test_the_state_has_the_same_bits_and_norms_are_those_of_all_elements() -> None:
    after, (scaled, updates) = jax.jit(
        lambda state, gradients: (lambda found: ((found[0].params, found[0].opt_state), found[1]))(
            updated(state, gradients)
        )
    )(start(), GRADIENTS)
    params, opt_state, norms, flags = step(start(), GRADIENTS)
    for one, other in zip(
        jax.tree.leaves((params, opt_state)), jax.tree.leaves(after), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    expected = [optax.tree.norm(tree) for tree in (params, scaled, updates)]
    np.testing.assert_allclose(norms, expected, rtol=1e-6)
    assert flags.all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["params", "opt_state"])
def test_one_element_that_is_not_finite_is_found_and_named(name: str, value: float) -> None:
    state = start()
    if name == "params":
        state["params"] = {**PARAMS, "b": PARAMS["b"].at[1].set(value)}
    else:
        adam = state["opt_state"][1][0]
        nu = {**adam.nu, "b": adam.nu["b"].at[1].set(value)}
        state["opt_state"] = (
            state["opt_state"][0],
            (adam._replace(nu=nu), *state["opt_state"][1][1:]),
        )
    flags = dict(zip(FLAGS, step(state, GRADIENTS)[3].tolist(), strict=True))
    assert not flags[name]
    assert flags["loss"] and flags["model_state"]
    if name == "params":
        assert flags["opt_state"]


def test_large_elements_whose_squares_are_infinite_are_finite() -> None:
    state = start()
    state["params"] = {**PARAMS, "b": PARAMS["b"] * 1e30}
    assert step(state, GRADIENTS)[3].all()


def test_the_products_of_a_step_count_although_its_norms_are_computed_with_it() -> None:
    def run(state: Any, gradients: Any) -> Any:
        after, changes = updated(state, gradients)
        kernel = state["params"]["a"]["kernel"]
        after.params["b"] += (kernel @ kernel.T).sum()
        return Found(after.params, after.opt_state), changes

    traced = jax.make_jaxpr(lambda *given: fused_evaluation(run, *given)[0].params)(
        start(), GRADIENTS
    )
    assert count_flops(traced.jaxpr).total == 2 * 3 * 4 * 3

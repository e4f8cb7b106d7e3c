"""How a step's gradients come about: in microbatches, in bfloat16, recomputed, for a part."""

import re
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import run, saved_steps, small_experiment, together
from step_helpers import (
    ROWS,
    check_equal,
    gradients,
    in_loops,
    on,
    one_step,
    primitives,
    tokens_batch,
    tokens_expected,
    tokens_model,
    tokens_objective,
    trainer,
)

from spmdtrain import (
    CallbackContext,
    FunctionModel,
    RunConfig,
    Trainer,
    UserError,
    load_params,
    remat,
)
from spmdtrain.config.options import CollectiveOptions, ShardingOptions
from spmdtrain.models import MLP
from spmdtrain.sharding.mesh import resolve
from spmdtrain.testing.compiled_step import CompiledStep, compiled_step
from spmdtrain.tree import named_leaves

GENERATOR = np.random.default_rng(3)
X = GENERATOR.normal(size=(ROWS, 6)).astype(np.float32)
Y = GENERATOR.normal(size=(ROWS, 4)).astype(np.float32)
BY_HAND = CollectiveOptions(reduction="all_reduce")


def squared_error(model: Any, batch: Any) -> dict[str, jax.Array]:
    x, y = batch
    return {"loss": (model(x).astype(jnp.float32) - y) ** 2}


def mlp(**options: Any) -> Trainer:
    """Of three layers: a step has 3 products forward, and backward 3 for weights, 2 for inputs."""
    defaults = {"model": partial(MLP, 6, [8, 8], 4), "objective": squared_error}
    if not {"strategy", "collectives"} & options.keys():
        defaults["mesh"] = on(1)  # which is faster; on more where devices are what it is about
    return trainer(**defaults | options)


@cache
def expected() -> dict[str, np.ndarray]:
    """The gradients of the whole batch, in float32 and of all parameters."""
    return gradients(mlp(), (X, Y))


def params_after(of: Trainer, steps: int) -> dict[str, np.ndarray]:
    of.fit((X, Y), steps=steps)
    assert of.state is not None
    return {name: np.asarray(x) for name, x in named_leaves(of.state.params).items()}


# -- microbatches ----------------------------------------------------------------------------------


@cache
def of_tokens(devices: int, microbatches: int) -> tuple[Trainer, CompiledStep]:
    of = trainer(
        model=tokens_model(),
        objective=tokens_objective,
        mesh=on(devices),
        microbatches=microbatches,
    )
    return of, compiled_step(of, tokens_batch(np.random.default_rng(0)))


@pytest.mark.slow
@hypothesis.settings(max_examples=4, deadline=None, derandomize=True)
@hypothesis.given(seed=st.integers(0, 2**32 - 1), dead=st.sets(st.integers(0, 7)))
@hypothesis.example(seed=0, dead={3})  # of 8 microbatches one counts nothing
@hypothesis.example(seed=0, dead={1, 5})  # nor does one of 4
@hypothesis.example(seed=0, dead=set(range(8)))
def test_microbatches_add_up_to_the_big_batch_however_its_parts_weigh(
    seed: int, dead: set[int]
) -> None:
    batch = tokens_batch(np.random.default_rng(seed))
    for part in dead:
        batch["tokens"][part::8] = batch["examples"][part::8] = 0
    params = of_tokens(1, 1)[0].functions.init(0).params
    expected = tokens_expected(params, batch)
    for devices in (1, 8):
        for microbatches in (1, 2, 4, 8):
            of, step = of_tokens(devices, microbatches)
            found = gradients(of, batch, step.compiled)
            check_equal(found, expected, f"on {devices} devices in {microbatches} microbatches")


class Normalized(nnx.Module):
    """Batch normalization, and nothing else."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(4, momentum=0.9, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(x)


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [2, 8])
def test_batch_statistics_are_those_of_each_microbatch(microbatches: int) -> None:
    x = (3 * X[:, :4] + np.arange(ROWS)[:, None]).astype(np.float32)  # no two parts are alike
    mean, variance = np.zeros(4), np.ones(4)
    scale, bias = np.zeros(4), np.zeros(4)
    for part in range(microbatches):
        rows, wanted = x[part::microbatches].astype(np.float64), Y[part::microbatches]
        mean = 0.9 * mean + 0.1 * rows.mean(0)
        variance = 0.9 * variance + 0.1 * rows.var(0)
        normal = (rows - rows.mean(0)) / np.sqrt(rows.var(0) + 1e-5)
        scale += (2 * (normal - wanted) * normal).sum(0) / x.size
        bias += (2 * (normal - wanted)).sum(0) / x.size
    for devices in (1, 2, 8):
        of = trainer(
            model=Normalized,
            objective=squared_error,
            mesh=on(devices),
            microbatches=microbatches,
        )
        after, _ = one_step(of, (x, Y))
        found = named_leaves({"state": after.model_state, "gradient": after.opt_state.trace})
        expected = {
            "state/norm/mean": mean,
            "state/norm/var": variance,
            "gradient/norm/scale": scale,
            "gradient/norm/bias": bias,
        }
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            # E[x^2] - E[x]^2 in f32 loses some digits.
            np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


class Dropped(nnx.Module):
    """A number for each row, half of them dropped: its gradient shows which."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.each = nnx.Param(jnp.ones(ROWS))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(x @ self.each[...])


@pytest.mark.slow
def test_dropout_draws_for_each_microbatch_the_same_on_any_devices() -> None:
    def objective(model: Any, x: jax.Array) -> dict[str, jax.Array]:
        return {"loss": model(x)}

    rows = np.eye(ROWS, dtype=np.float32)
    masks = {}
    for devices in (1, 2, 8):
        of = trainer(model=Dropped, objective=objective, mesh=on(devices), microbatches=4)
        found = gradients(of, rows)["each"]
        assert set(found) == {0.0, 2 / ROWS}
        masks[devices] = found > 0
    parts = [masks[1][part::4].tolist() for part in range(4)]
    assert all(parts[a] != parts[b] for a in range(4) for b in range(a))
    assert (masks[2] == masks[1]).all() and (masks[8] == masks[1]).all()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (48, r"over 8 devices and 4 microbatches \(48 = 1 \* 32 \+ 16\); 32 would"),
        (24, r"over 8 devices and 4 microbatches \(24 = 0 \* 32 \+ 24\); 32 would"),
        (44, r"over 8 devices \(44 = 5 \* 8 \+ 4\); 40 would"),
    ],
)
def test_a_batch_that_does_not_divide_is_refused_with_the_division(
    batch: int, message: str
) -> None:
    with pytest.raises(UserError, match=f"global_batch_size is {batch}: .*{message}"):
        resolve(RunConfig(global_batch_size=batch, microbatches=4), batch_shards=8)
    with pytest.raises(UserError, match=message):
        mlp(global_batch_size=batch, microbatches=4, mesh=on(8)).fit((X, Y), steps=1)


def test_a_batch_size_by_device_must_divide_over_microbatches_too() -> None:
    with pytest.raises(UserError, match=r"48 = 1 \* 32 \+ 16"):
        resolve(RunConfig(batch_size_per_device=6, microbatches=4), batch_shards=8)
    config = resolve(RunConfig(batch_size_per_device=8, microbatches=4), batch_shards=8)
    assert config.global_batch_size == 64


@pytest.mark.slow
def test_parameters_of_16_bits_keep_their_optimizer_s_dtypes() -> None:
    of = mlp(
        model=partial(nnx.Linear, 6, 4, param_dtype=jnp.bfloat16),
        optimizer=optax.adam(0.01),
        microbatches=2,
    )
    before = jax.tree.map(lambda x: x.dtype, of.functions.abstract_state)
    of.fit((X, Y), steps=2)
    assert jax.tree.map(lambda x: x.dtype, of.state) == before


@pytest.mark.nightly
def test_a_step_without_jit_is_the_same() -> None:
    found = [
        gradients(mlp(model=partial(nnx.Linear, 6, 4), microbatches=2, mesh=on(1), jit=jit), (X, Y))
        for jit in (True, False)
    ]
    check_equal(found[1], found[0])


# -- memory and collectives ------------------------------------------------------------------------

SIDE = 256
KERNEL = 4 * SIDE * SIDE
WIDE = 4 * KERNEL  # the bytes of its parameters, each gradient's too


def wide(rows: int, **options: Any) -> CompiledStep:
    """The step of four square layers without biases, on 8 devices where nothing is said."""

    def init(key: jax.Array) -> list[jax.Array]:
        return list(jax.random.normal(key, (4, SIDE, SIDE)))

    def apply(params: list[jax.Array], x: jax.Array) -> jax.Array:
        for kernel in params:
            x = jnp.tanh(x @ kernel)
        return x

    x = jax.ShapeDtypeStruct((rows, SIDE), jnp.float32)
    of = trainer(
        model=FunctionModel(init, apply),
        objective=squared_error,
        optimizer=optax.sgd(0.1, momentum=0.9),
        global_batch_size=rows,
        **options,
    )
    return compiled_step(of, (x, x))


@pytest.mark.slow
def test_microbatches_hold_at_most_one_more_copy_of_the_gradients_and_fewer_activations() -> None:
    rows = 8 * SIDE
    batch = 2 * 4 * rows * SIDE
    whole, parts = (wide(rows, mesh=on(1), microbatches=m).memory for m in (1, 8))
    assert parts.argument_size_in_bytes == whole.argument_size_in_bytes
    activations = whole.temp_size_in_bytes - WIDE
    assert activations > 4 * 4 * rows * SIDE  # what rematerialization can save
    # The batch is copied into its parts, and the rest is what one part needs.
    assert parts.temp_size_in_bytes <= batch + 2 * WIDE + activations / 8


@pytest.mark.slow
def test_by_hand_the_gradients_cross_once_after_the_loop_and_are_not_copied() -> None:
    mesh = mlp(mesh=on(8)).mesh
    assert mesh is not None
    steps = [wide(64, microbatches=m, collectives=BY_HAND) for m in (1, 4)]
    for step in steps:
        step.assert_count(1, "all-reduce", axes="data")
        (crossing,) = step.collectives
        assert WIDE <= crossing.bytes <= WIDE + 16
        assert in_loops(step.text, mesh) == []
    whole, parts = (step.memory.temp_size_in_bytes for step in steps)
    assert parts <= whole + KERNEL / 4


@pytest.mark.slow
def test_xla_adds_no_more_than_a_copy_and_on_cpu_reduces_each_microbatch() -> None:
    # On GPU and TPU it moves the all-reduce out of the loop. If it does so here one day, the
    # second half of this test has nothing to say any more, and neither has docs/step.md.
    mesh = mlp(mesh=on(8)).mesh
    assert mesh is not None
    by_xla = CollectiveOptions(reduction="automatic")
    whole, parts = (wide(64, microbatches=m, collectives=by_xla) for m in (1, 4))
    added = parts.memory.temp_size_in_bytes - whole.memory.temp_size_in_bytes
    assert added <= WIDE + KERNEL / 4
    assert in_loops(whole.text, mesh) == []
    (within,) = in_loops(parts.text, mesh)
    assert within.kind == "all-reduce" and within.bytes >= WIDE


@pytest.mark.slow
def test_split_gradients_are_added_up_in_parts() -> None:
    for strategy in ("zero", "fully_sharded"):
        step = wide(64, microbatches=4, strategy=strategy, sharding=ShardingOptions(min_size=1))
        part, whole = f"f32[{SIDE // 8},{SIDE}]", f"f32[{SIDE},{SIDE}]"
        # The other loop computes the norm of the gradients.
        loops = re.findall(r"= \((.*?)\) while\(", step.text)
        (carried,) = (loop for loop in loops if whole in loop)
        # Four kernels are read as they are gathered, and four gradients added up in parts.
        assert (carried.count(part), carried.count(whole)) == (4, 4), strategy


# -- precision -------------------------------------------------------------------------------------


class Embedding(nnx.Module):
    """A linear layer and a table, with batch normalization behind them."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(10, 6, dtype=jnp.bfloat16, rngs=rngs)  # else f32, as it was made
        self.linear = nnx.Linear(6, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, dtype=jnp.bfloat16, rngs=rngs)  # else f32, as its statistics

    def __call__(self, x: jax.Array, ids: jax.Array) -> jax.Array:
        return self.norm(self.linear(x + self.table(ids)))


def in_bfloat16(seen: list[dict[str, str]], **options: Any) -> Trainer:
    def objective(model: Any, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        out = model(batch["x"], batch["ids"])
        seen.append({name: str(x.dtype) for name, x in batch.items()})
        seen[-1]["training"] = str(not model.norm.use_running_average)
        for name, x in (("kernel", model.linear.kernel), ("mean", model.norm.mean), ("out", out)):
            seen[-1][name] = str(x.dtype)
        return {"loss": (out.astype(jnp.float32) - 1) ** 2}

    def predict(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
        return model(batch["x"], batch["ids"])

    return trainer(
        model=Embedding,
        objective=objective,
        predict=predict,
        **{"compute_dtype": "bfloat16", "optimizer": optax.adam(0.01)} | options,
    )


WORDS = {"x": X, "ids": np.arange(ROWS, dtype=np.int32) % 10}


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 4])
def test_bfloat16_is_what_the_model_computes_in_and_nothing_else(microbatches: int) -> None:
    seen: list[dict[str, str]] = []
    of = in_bfloat16(seen, microbatches=microbatches, ema_decay=0.9)
    of.fit(WORDS, validation=WORDS, steps=2)
    expected = {"x": "bfloat16", "ids": "int32", "kernel": "bfloat16", "mean": "float32"}
    expected["out"] = "bfloat16"
    assert {one.pop("training") for one in seen} == {"True", "False"}
    assert all(one == expected for one in seen)
    integers = ("step", "key", "opt_state/0/count", "averaged_before")
    for name, leaf in named_leaves(of.state).items():
        assert leaf.dtype == jnp.float32 or name in integers, name
    assert of.predict(WORDS).dtype == np.float32


@pytest.mark.slow
def test_the_products_of_a_bfloat16_step_are_in_bfloat16() -> None:
    shapes = jax.eval_shape(lambda: (X, Y))
    for dtype in ("float32", "bfloat16"):
        products = primitives(mlp(compute_dtype=dtype), shapes, "dot_general")
        assert len(products) == 8
        assert {str(x.aval.dtype) for dot in products for x in dot.invars} == {dtype}


@pytest.mark.slow
def test_bfloat16_gradients_are_near_those_of_float32_and_metrics_as_exact() -> None:
    for microbatches in (1, 4):
        near = gradients(mlp(compute_dtype="bfloat16", microbatches=microbatches), (X, Y))
        for name, value in expected().items():
            assert near[name].dtype == np.float32
            difference = np.abs(near[name] - value).max() / np.abs(value).max()
            assert difference < 0.05, name
            assert name == "loss" or difference > 1e-5, name  # it has been computed otherwise


@pytest.mark.slow
def test_in_bfloat16_targets_and_weights_keep_their_digits() -> None:
    x = np.ones((8, 1), np.float32)
    targets = np.full((8, 1), 1001, np.float32)  # 1000 in bfloat16

    def objective(model: Any, batch: Any) -> dict[str, Any]:
        seen = {"seen": batch["y"], "input": batch["x"].astype(jnp.float32)}
        loss = (model(batch["x"]).astype(jnp.float32) - batch["y"]) ** 2
        return {"loss": (loss, batch["w"])} | seen

    of = mlp(
        model=partial(MLP, 1, [], 1), objective=objective, compute_dtype="bfloat16", ema_decay=0.5
    )
    batch = {"x": x * 1.001, "y": targets, "w": x * 1.001}
    found = of.evaluate(batch)
    assert found["seen"] == 1001 and found["input"] == 1.0
    tuples = mlp(
        model=partial(MLP, 1, [], 1),
        objective=lambda model, b: {"loss": (model(b[0]) * 0).astype(jnp.float32), "seen": b[1]},
        compute_dtype="bfloat16",
    )
    assert tuples.evaluate((x, targets))["seen"] == 1001


@pytest.mark.slow
def test_a_step_that_computes_nothing_in_bfloat16_is_refused() -> None:
    def objective(model: Any, batch: Any) -> dict[str, jax.Array]:
        return {"loss": (model(batch["features"]).astype(jnp.float32) - batch["y"]) ** 2}

    of = mlp(objective=objective, compute_dtype="bfloat16")
    with pytest.raises(UserError, match="3 products"):
        of.fit({"features": X, "y": Y}, steps=1)
    mlp(objective=objective).fit({"features": X, "y": Y}, steps=1)


class Pair(NamedTuple):
    x: Any
    y: Any


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_batch_keeps_its_type_whatever_is_computed_in(dtype: str) -> None:
    def objective(model: Any, batch: Pair) -> dict[str, jax.Array]:
        assert batch.x.dtype == dtype and batch.y.dtype == jnp.float32
        return {"loss": (model(batch.x).astype(jnp.float32) - batch.y) ** 2}

    mlp(objective=objective, compute_dtype=dtype).fit(Pair(X, Y), steps=1)


@pytest.mark.slow
def test_a_loss_in_bfloat16_is_refused_with_what_to_do() -> None:
    def objective(model: Any, batch: Any) -> dict[str, jax.Array]:
        return {"loss": model(batch[0]) ** 2}

    of = mlp(objective=objective, compute_dtype="bfloat16")
    with pytest.raises(UserError, match=r"loss is bfloat16.*astype"):
        of.fit((X, Y), steps=1)
    with pytest.raises(UserError, match="loss is bfloat16"):
        of.evaluate((X, Y))
    mlp(objective=objective).fit((X, Y), steps=1)


# -- rematerialization -----------------------------------------------------------------------------


class Blocks(nnx.Module):
    """Three layers and a product with a batch dim; the first two layers are marked, or none is."""

    def __init__(self, marked: bool, *, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(6, 6, rngs=rngs) for _ in range(2)])
        self.last = nnx.Linear(6, 4, rngs=rngs)
        self.marked = marked

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:

            def block(x: jax.Array, layer: nnx.Linear = layer) -> jax.Array:
                y = jnp.tanh(layer(x))
                return jnp.sin(jnp.einsum("bi,bi->b", y, y))[:, None] * y

            x = (remat(block) if self.marked else block)(x)
        return self.last(x)


@remat
def layer(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, None]:
    """Outside of any model: JAX remembers what it has traced of it, under another policy too."""
    return jnp.tanh(x @ kernel), None


class Looped(nnx.Module):
    """The same layer a few times, in a scan."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.kernels = nnx.Param(jax.random.normal(rngs.params(), (5, 6, 6)))
        self.last = nnx.Linear(6, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(jax.lax.scan(layer, x, self.kernels[...])[0])


# Model, and by policy how many regions there are and how many products. Forward and backward of
# `Blocks` have 3 and 5 of matrices, and with a batch dim 2 and 4.
PROGRAMS: dict[str, tuple[Any, dict[str, tuple[int, int]]]] = {
    "unmarked": (
        partial(Blocks, False),
        {"none": (0, 14), "full": (1, 19), "dots": (1, 14), "dots_no_batch": (1, 16)},
    ),
    "marked": (
        partial(Blocks, True),
        {"none": (0, 14), "full": (2, 18), "dots": (2, 14), "dots_no_batch": (2, 16)},
    ),
    # In the text of a scan a product stands once.
    "looped": (
        Looped,
        {"none": (0, 6), "full": (1, 7), "dots": (1, 6), "dots_no_batch": (1, 6)},
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_policy_computes_again_what_it_says_and_changes_no_number(name: str) -> None:
    model, programs = PROGRAMS[name]
    shapes = jax.eval_shape(lambda: (X, Y))
    expected = gradients(mlp(model=model), (X, Y))
    found = {}
    for policy in programs:
        of = mlp(model=model, remat=policy)
        regions, products = (
            len(primitives(of, shapes, primitive)) for primitive in ("remat2", "dot_general")
        )
        found[policy] = (regions, products)
        for microbatches in (1, 4) if policy == "full" else (1,):
            if microbatches > 1:
                of = mlp(model=model, remat=policy, microbatches=microbatches)
            now = gradients(of, (X, Y))
            for leaf, value in expected.items():
                np.testing.assert_allclose(
                    now[leaf],
                    value,
                    rtol=1e-6 if microbatches == 1 else 1e-5,
                    atol=1e-6 * np.abs(value).max(),
                    err_msg=f"{leaf} with {policy}",
                )
    assert found == programs


@pytest.mark.slow
def test_rematerialization_takes_less_memory() -> None:
    def init(key: jax.Array) -> jax.Array:
        return jnp.zeros((16, 32, 32))

    def apply(kernels: jax.Array, x: jax.Array) -> jax.Array:
        @remat
        def block(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, None]:
            return jnp.sin(jnp.tanh(jnp.cos(x @ kernel))), None

        # Of layers in a row, not in a scan, XLA on CPU finds what is computed twice, and keeps it.
        return jax.lax.scan(block, x, kernels)[0]

    x = jax.ShapeDtypeStruct((1024, 32), jnp.float32)
    needed = {
        policy: compiled_step(
            mlp(model=FunctionModel(init, apply), remat=policy, global_batch_size=1024), (x, x)
        ).memory.temp_size_in_bytes
        for policy in ("none", "full", "dots")
    }
    layers = 16 * 4 * 1024 * 32  # what all blocks take, or the product in each
    assert needed["full"] < 1.5 * layers
    assert 1.8 * layers < needed["dots"] < 2.4 * layers
    assert needed["none"] > 2.8 * layers


@pytest.mark.slow
def test_dropout_draws_the_same_again_when_it_is_computed_again() -> None:
    model = partial(MLP, 6, [8, 8], 4, dropout=0.5)
    expected = gradients(mlp(model=model, microbatches=2), (X, Y))
    check_equal(gradients(mlp(model=model, microbatches=2, remat="full"), (X, Y)), expected)


# -- frozen parameters -----------------------------------------------------------------------------

FREEZING = ("layers/0", "layers/1/kernel$")
FROZEN = {"layers/0/kernel", "layers/0/bias", "layers/1/kernel"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "fully_sharded", "sharding": ShardingOptions(min_size=1)},
        {"collectives": BY_HAND, "microbatches": 2},
        *(
            pytest.param(options, marks=pytest.mark.nightly)
            for options in (
                {},
                {"microbatches": 4},
                {"mesh": on(1)},
                {"strategy": "zero", "sharding": ShardingOptions(min_size=1)},
                {"compute_dtype": "bfloat16", "remat": "full"},
            )
        ),
    ],
)
def test_frozen_parameters_keep_every_bit_and_have_no_optimizer_state(
    options: dict[str, Any],
) -> None:
    of = mlp(
        optimizer=optax.adamw(0.01, weight_decay=0.5), freeze=FREEZING, ema_decay=0.9, **options
    )
    before = {name: np.asarray(x) for name, x in named_leaves(of.functions.init(0).params).items()}
    after = params_after(of, 3)
    unchanged = {name for name, value in before.items() if (after[name] == value).all()}
    assert unchanged == FROZEN
    assert of.state is not None
    moments = named_leaves(of.state.opt_state[0].mu)
    assert set(moments) == set(before) - FROZEN
    for name, average in named_leaves(of.state.averaged).items():
        assert (np.asarray(average) == before[name]).all() == (name in FROZEN), name


@pytest.mark.slow
def test_the_others_are_trained_as_if_nothing_were_frozen() -> None:
    trained = {name: x for name, x in expected().items() if name not in FROZEN}
    for microbatches in (1, 4):
        found = gradients(mlp(freeze=FREEZING, microbatches=microbatches), (X, Y))
        check_equal(found, trained)


@pytest.mark.slow
def test_no_gradient_of_a_frozen_parameter_is_computed() -> None:
    shapes = jax.eval_shape(lambda: (X, Y))
    products = len(primitives(mlp(freeze=FREEZING), shapes, "dot_general"))
    assert products == 3 + 2  # for the last kernel, and for the bias of the layer before it
    flops = []
    for frozen in ((), FREEZING):
        cost = compiled_step(mlp(freeze=frozen), shapes).compiled.cost_analysis()
        assert cost is not None
        flops.append(cost["flops"])
    assert flops[1] < 0.7 * flops[0]


@pytest.mark.parametrize(
    ("freeze", "message"),
    [
        (("layers/7",), r"'layers/7' matches no parameter's path: \['layers/0/bias', "),
        (("kernel", "baias"), "'baias' matches no parameter's path"),
        (("layers/(0|1)", "2"), "no parameter is left to train of"),
        (("",), "no parameter is left to train of"),
        (("layers/(",), r"'layers/\(' is not a valid regular expression"),
    ],
)
def test_patterns_that_freeze_nothing_or_all_are_refused(
    freeze: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UserError, match=f"freeze: {message}"):
        mlp(freeze=freeze)


@pytest.mark.slow
def test_a_frozen_run_resumes_bitwise(tmp_path: Path) -> None:
    def options(name: str) -> dict[str, Any]:
        optimizer = optax.adamw(0.01)
        return {"optimizer": optimizer, "freeze": FREEZING, "workdir": str(tmp_path / name)}

    expected = params_after(mlp(**options("whole")), 4)
    params_after(mlp(**options("parts")), 2)
    again = mlp(**options("parts"))
    found = params_after(again, 4)
    assert again.step == 4
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.nightly
def test_the_command_freezes_by_path(tmp_path: Path) -> None:
    path = small_experiment(tmp_path)
    workdir = tmp_path / "run"
    frozen, wrong = together(
        lambda: run(path, "--workdir", workdir, "--freeze", "kernel$", "none", "--steps", 2),
        lambda: run(path, "--workdir", workdir / "other", "--freeze", "^bias", "--steps", 2),
    )
    assert frozen.returncode == 2 and "freeze: 'none' matches no parameter" in frozen.stderr
    assert wrong.returncode == 0, wrong.stderr
    assert saved_steps(workdir) == [] and saved_steps(workdir / "other") == [2]
    params = load_params(str(workdir / "other"))
    assert float(params["bias"][0]) == 0 and abs(float(params["kernel"][0, 0])) > 0


# -- optimizers ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_clipping_and_a_schedule_are_the_same_on_any_devices() -> None:
    rates = [0.5, 0.25, 0.25, 0.125]
    schedule = optax.piecewise_constant_schedule(0.5, {1: 0.5, 3: 0.5})
    optimizer = optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(schedule))
    sharding = ShardingOptions(min_size=1)
    places: list[dict[str, Any]] = [
        {"mesh": on(1)},
        {"mesh": on(8)},
        {"mesh": on(8), "microbatches": 4},
        {"strategy": "zero", "sharding": sharding},
        {"strategy": "fully_sharded", "sharding": sharding},
    ]
    initial = named_leaves(jax.device_get(mlp().functions.init(0).params))
    expected: dict[str, np.ndarray] = {}
    for place in places:
        seen = [initial]

        def note(event: CallbackContext, seen: list[Any] = seen) -> None:
            assert event.trainer.state is not None
            seen.append(named_leaves(jax.device_get(event.trainer.state.params)))

        of = mlp(optimizer=optimizer, callbacks={"step": note}, **place)
        after = params_after(of, len(rates))
        for rate, before, then in zip(rates, seen[:-1], seen[1:], strict=True):
            moved = np.sqrt(sum(((then[name] - before[name]) ** 2).sum() for name in then))
            np.testing.assert_allclose(moved, 0.01 * rate, rtol=1e-3)  # all gradients are larger
        expected = expected or after
        for name, value in expected.items():
            np.testing.assert_allclose(after[name], value, rtol=1e-5, atol=1e-7, err_msg=name)

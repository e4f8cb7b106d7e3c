"""`exact`: the same bits on any number of devices, with any split and with batch statistics."""

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from collective_order import unordered_collectives
from flax import nnx
from helpers import BOUND, environment
from jax.sharding import PartitionSpec
from plan_helpers import needs_libtpu
from step_helpers import on

from spmdtrain import (
    Combination,
    LinenModel,
    MeshSpec,
    PredictionMetric,
    Rule,
    ShardingOptions,
    SumMetric,
    Trainer,
    UserError,
    batch_coupled,
)
from spmdtrain.document.terminal import Terminal
from spmdtrain.models import (
    MLP,
    Llama,
    LlamaConfig,
    MobileNetV2,
    Transformer,
    TransformerConfig,
    mlp_rules,
    mobilenet,
)
from spmdtrain.plan import topologies
from spmdtrain.plan.topologies import compiler_environment, devices_of
from spmdtrain.sharding.mesh import abstract_devices
from spmdtrain.step.exact import VIRTUAL_SHARD, synchronized_loops, tree_loop
from spmdtrain.step.program import plan_step
from spmdtrain.testing.compiled_step import compiled_step
from spmdtrain.tree import named_leaves
from spmdtrain.xla.padding import why_parts_differ

SHARDS, ROWS = 16, 32
Options = Mapping[str, Any]
PLACEMENTS: Mapping[str, Options] = {
    "one device": {"mesh": on(1)},
    "two devices": {"mesh": on(2)},
    "eight devices": {},
    "zero": {"strategy": "zero", "mesh": on(4)},
    "fully_sharded": {"strategy": "fully_sharded"},
}


def objective(model: Any, batch: Any) -> dict[str, jax.Array]:
    x, y = batch
    return {"loss": optax.softmax_cross_entropy_with_integer_labels(model(x), y)}


def make(**options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "model": partial(MLP, 64, (256, 256), 10, dropout=0.1),
        "objective": objective,
        "optimizer": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
        "steps": 4,
        "global_batch_size": ROWS,
        "exact": SHARDS,
        "sharding": ShardingOptions(min_size=256),
        "terminal": Terminal(quiet=True),
    }
    return Trainer(**defaults | options)


def digest(**options: Any) -> str:
    """The SHA-256 of the state after a run."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(4 * ROWS, 64)).astype(np.float32)
    of = make(**options)
    of.fit((x, generator.integers(0, 10, len(x)).astype(np.int32)))
    return state_digest(of)


def state_digest(of: Trainer) -> str:
    assert of.state is not None
    leaves = sorted(named_leaves(of.state).items())
    return hashlib.sha256(b"".join(np.asarray(x).tobytes() for _, x in leaves)).hexdigest()


@pytest.mark.nightly
@pytest.mark.slow
def test_dropout_clipping_and_adam_have_one_hash_and_without_exact_several() -> None:
    few = "one device", "eight devices", "fully_sharded"
    assert len({digest(**PLACEMENTS[name]) for name in few}) == 1
    assert digest(exact=None) != digest(exact=None, mesh=on(1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "hidden", "dtype"),
    [
        # LLVM fuses its products and sums in the vectors of a loop, but not in the elements left.
        (optax.chain(optax.zero_nans(), optax.sgd(0.1)), (296, 520), "float32"),
        pytest.param(  # its first state has a norm of the parameters
            *(optax.contrib.dog(), (16,), "float32"), marks=pytest.mark.nightly
        ),
        pytest.param(  # the updates have another dtype than the gradients
            *(optax.adam(1e-2, mu_dtype="float32"), (16,), "bfloat16"), marks=pytest.mark.nightly
        ),
    ],
    ids=["zero_nans", "dog", "adam"],
)
def test_the_bits_of_an_optimizer_do_not_depend_on_the_shape_of_its_arrays(
    optimizer: Any, hidden: tuple[int, ...], dtype: str
) -> None:
    def model(rngs: nnx.Rngs) -> nnx.Module:
        made = MLP(64, hidden, 10, rngs=rngs)
        nnx.update(made, jax.tree.map(lambda x: x.astype(dtype), nnx.state(made, nnx.Param)))
        return made

    same: Options = {
        "model": model,
        "optimizer": optimizer,
        "sharding": ShardingOptions(min_size=1),
    }
    assert digest(**same, **PLACEMENTS["one device"]) == digest(
        **same, **PLACEMENTS["fully_sharded"]
    )


@pytest.mark.slow
def test_collectives_after_the_loop_of_the_update_depend_on_it() -> None:
    """Otherwise the step may hang (see `in_loop_of_one_turn`)."""
    batch = np.zeros((ROWS, 64), np.float32), np.zeros(ROWS, np.int32)
    text = compiled_step(make(**PLACEMENTS["two devices"]), batch).text
    assert "while(" in text and not unordered_collectives(text)


@pytest.mark.nightly
@pytest.mark.slow
def test_an_evaluation_has_the_bits_of_one_device_on_eight() -> None:
    """With values by row, padding rows, random numbers, and a sum of more digits than f32 has."""

    def measured(model: Any, batch: Any, key: jax.Array) -> dict[str, Any]:
        x, _ = batch
        drawn = jax.random.uniform(key, x.shape[:1])
        value = (model(x).mean(1) + drawn) * 1e3
        return {
            "loss": value,
            "rows": PredictionMetric(lambda x: float(x @ np.arange(40.0)), value),
            "different": PredictionMetric(lambda x: len(set(x.tolist())), drawn),
        }

    x = np.random.default_rng(1).normal(size=(40, 64)).astype(np.float32)
    data = (x, np.zeros(40, np.int32))
    one, eight = (make(objective=measured, mesh=on(n)).evaluate(data) for n in (1, 8))
    assert one == eight and one["rows"] != 0.0 and one["different"] == len(x)


def test_an_objective_may_make_other_functions_at_each_trace() -> None:
    def squares(model: Any, batch: Any) -> dict[str, Any]:
        (x,) = batch
        return {"loss": model(x).mean(1), "twice": SumMetric(x[:, 0], lambda total: 2 * total)}

    x = np.ones((ROWS + 8, 64), np.float32)  # the last batch is padded
    of = make(objective=squares, model=partial(MLP, 64, (), 10), mesh=on(2))
    assert of.evaluate((x,))["twice"] == 2 * (ROWS + 8)


@pytest.mark.nightly
@pytest.mark.parametrize("microbatches", [1, 2])
def test_two_hundred_steps_have_one_hash(microbatches: int) -> None:
    options = {"steps": 200, "microbatches": microbatches}
    assert len({digest(**options, **each) for each in PLACEMENTS.values()}) == 1


def transformer_digest(**options: Any) -> str:
    """The same of a small transformer, with clipping by global norm and AdamW."""
    config = TransformerConfig(
        vocabulary=64, rows=64, layers=2, width=128, heads=4, hidden=512, context=32
    )
    tokens = np.random.default_rng(0).integers(0, 64, (4 * ROWS, 33)).astype(np.int32)

    def of_tokens(model: Any, batch: Any) -> dict[str, Any]:
        return {"loss": model.token_losses(batch[:, :-1], batch[:, 1:]).loss}

    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3))
    given = {"model": partial(Transformer, config), "objective": of_tokens, "optimizer": optimizer}
    of = make(**given | {"steps": 200} | options)
    of.fit(tokens)
    return state_digest(of)


@pytest.mark.nightly
def test_a_transformer_has_one_hash_after_two_hundred_steps() -> None:
    """Attention divides by sums, which XLA simplifies in another way on one device."""
    assert len({transformer_digest(**options) for options in PLACEMENTS.values()}) == 1


LLAMA = LlamaConfig(vocabulary=64, layers=2, width=64, heads=4, kv_heads=2, hidden=128, context=16)
GPT2 = TransformerConfig(
    vocabulary=61,
    rows=64,
    layers=2,
    width=64,
    heads=4,
    hidden=128,
    context=16,
    positions="learned",
    blocks="gpt2",
    dropout=0.1,
)


@pytest.mark.nightly
@pytest.mark.parametrize("model", [partial(Llama, LLAMA), partial(Transformer, GPT2)])
def test_shipped_transformers_have_the_losses_and_the_state_of_one_device(model: Any) -> None:
    tokens = np.random.default_rng(0).integers(0, 61, (64, 17)).astype(np.int32)

    def of_tokens(model: Any, batch: Any) -> dict[str, Any]:
        return {"loss": model.token_losses(batch[:, :-1], batch[:, 1:]).loss}

    def found(devices: int) -> tuple[list[float], str]:
        losses: list[float] = []
        of = make(
            **{"model": model, "objective": of_tokens, "exact": 8, "mesh": on(devices)},
            **{"steps": 12, "global_batch_size": 16, "log_every": 1},
            callbacks={"log": lambda event: losses.append(event.metrics["loss"])},
        )
        of.fit(tokens)
        assert len(losses) == 12
        return losses, state_digest(of)

    assert found(1) == found(2) == found(4)


def test_the_order_of_a_sum_does_not_depend_on_how_many_turns_a_device_has() -> None:
    """The terms cancel, so that another order has another sum."""
    terms = jnp.array([1e8, 1.0, -1e8, 1.0, 3e7, 0.5, -3e7, 0.5], jnp.float32)
    total, turns = jax.jit(lambda: tree_loop(lambda turn: (terms[turn], turn), 8))()
    halves = [jax.jit(lambda i=i: tree_loop(lambda t: (terms[4 * i + t], t), 4))() for i in (0, 1)]
    assert total == halves[0][0] + halves[1][0] == 0.0
    assert sum(np.asarray(terms), np.float32(0)) == 0.5 and list(turns) == list(range(8))


# -- for TPUs that are not there -------------------------------------------------------------------


def print_kernels_for_tpus() -> None:
    """Prints the kernels with floating-point results in the loop over virtual shards, by chips."""
    for shape in ("1x1", "2x2", "2x4"):
        with abstract_devices(devices_of(topologies.parse(f"v5e:{shape}"))):
            of = make(optimizer=optax.adam(1e-2), compilation_cache="off")
            rows = jax.ShapeDtypeStruct((ROWS, 64), np.float32)
            text = of.compile_step((rows, jax.ShapeDtypeStruct((ROWS,), np.int32))).as_text()
        print(json.dumps(floating_kernels(text or "")))


def floating_kernels(text: str) -> list[str]:
    """The instructions with floating-point results of the longest body of a loop, sorted."""
    computations = dict(re.findall(r"^%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", text, re.M | re.S))
    body = max((computations[x] for x in re.findall(r"body=%?([\w.\-]+)", text)), key=len)
    found = re.findall(r"= \(?((?:f32|bf16)\[[\d,]*\])\S* (fusion|reduce|copy|convolution)\(", body)
    return sorted(" ".join(each) for each in found)


@needs_libtpu
@pytest.mark.nightly
def test_the_loop_for_1_4_and_8_tpus_has_the_same_kernels_and_shapes() -> None:
    # In a process of its own, because programs for absent devices cannot be read from the cache.
    code = f"import {__name__}; {__name__}.print_kernels_for_tpus()"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(8)
        | compiler_environment(topologies.parse("v5e:2x4"))
        | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=BOUND,
    )
    assert ended.returncode == 0, ended.stderr
    one, four, eight = map(json.loads, ended.stdout.splitlines()[-3:])
    # The gradient of a hidden layer of the network is among them.
    assert one == four == eight and "f32[256,256] fusion" in one


# -- what is refused -------------------------------------------------------------------------------


def coupled(model: Any, batch: Any) -> dict[str, jax.Array]:
    x, y = batch
    return {"loss": (model(x).mean(1) - y) ** 2 * y.mean()}


def combined(model: Any, batch: Any) -> dict[str, Any]:
    x, _ = batch
    return {"loss": Combination({"a": 1.0}), "a": model(x).mean(1)}


@jax.custom_vjp
def centered(x: jax.Array) -> jax.Array:
    """The identity, whose gradients are centered over the batch."""
    return x


centered.defvjp(lambda x: (x, None), lambda _, g: (g - g.mean(0),))


@jax.custom_jvp
def centered_by_rule(x: jax.Array) -> jax.Array:
    return x


centered_by_rule.defjvp(lambda x, t: (x[0], t[0] - t[0].mean(0)))


def with_own_rule(model: Any, batch: Any) -> dict[str, Any]:
    x, _ = batch
    return {"loss": centered_by_rule(model(x)).mean(1)}


def with_own_gradients(model: Any, batch: Any) -> dict[str, Any]:
    x, _ = batch
    return {"loss": centered(model(x)).mean(1)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exact": 12}, "exact is 12: it must be a power of two"),
        ({"exact": 8}, "exact is 8 on 8 devices: each needs at least two"),
        ({"strategy": "parameter_server"}, "exact is 16 and strategy is parameter_server"),
        (
            {"strategy": "tensor_parallel", "rules": mlp_rules(3)},
            "strategy is tensor_parallel: that strategy splits",
        ),
        (
            {"mesh": MeshSpec(tensor=2), "rules": mlp_rules(3)},
            "mesh.tensor is 2, over which sums are added up in another order",
        ),
        ({"strategy": "default"}, "strategy is default: that strategy has no mesh; use one_device"),
        ({"strategy": "central_storage"}, "is central_storage: that strategy keeps state"),
        (
            {"mesh": MeshSpec(expert=2), "rules": (Rule("kernel$", PartitionSpec("expert")),)},
            "mesh.expert is 2, over which the gradients of an expert",
        ),
        ({"steps_per_dispatch": 2}, "exact is 16 and steps_per_dispatch is 2"),
        ({"uneven_batch": "pad"}, "exact is 16 and uneven_batch is pad"),
        ({"reduction": jax.lax.psum}, "a reduction function is given"),
        ({"optimizer": optax.lbfgs()}, "the optimizer evaluates the loss"),
    ],
)
def test_an_option_that_cannot_be_exact_is_refused_by_name(options: Options, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make(**options)


def products(updates: Any, params: Any) -> Any:
    return jax.tree.map(lambda x: x @ x.T @ x if x.ndim == 2 else x, updates)


def repeated(updates: Any, params: Any) -> Any:
    def twice(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 2, lambda _, y: 0.3 * y + x, x)

    return jax.tree.map(twice, updates)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"microbatches": 4}, "microbatches: give a multiple of 64"),
        ({"objective": coupled}, "exact=16 .* may depend on other examples"),
        ({"objective": combined}, "the loss is a Combination"),
        ({"objective": with_own_gradients}, "exact=16 .*custom_vjp_call at"),
        ({"objective": with_own_rule}, "exact=16 .*reduce_sum at"),
        ({"optimizer": optax.sm3(0.1)}, "the optimizer takes the maximum of some dims"),
        ({"optimizer": optax.adafactor(1e-2)}, "the optimizer adds up some dims"),
        ({"optimizer": optax.contrib.muon(1e-2)}, "the optimizer adds up some dims"),
        ({"optimizer": optax.stateless(products)}, "the optimizer computes dot_general"),
        ({"optimizer": optax.stateless(repeated)}, "the optimizer multiplies in a loop"),
        (
            {"optimizer": optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0)), 2)},
            "adds up an array in a branch, .* use microbatches",
        ),
    ],
)
def test_a_step_that_cannot_be_exact_is_refused_when_it_is_traced(
    options: Options, message: str
) -> None:
    of = make(**options)
    batch = (np.zeros((ROWS, 64), np.float32), np.zeros(ROWS, np.int32))
    with pytest.raises(UserError, match=message):
        plan_step(of.functions, batch).program().trace(of.functions.abstract_state, batch)


@batch_coupled
def declared(model: Any, batch: Any) -> dict[str, jax.Array]:
    return objective(model, batch)


def coupled_in_evaluations(model: Any, batch: Any) -> dict[str, Any]:
    x, _ = batch
    values = model(x).mean(1)
    return {"loss": values, "centered": SumMetric(values - values.mean(), float)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": declared}, "exact=16 .* declared as batch_coupled"),
        ({"objective": coupled_in_evaluations}, "exact=16 .* may depend on other examples"),
        ({"eval_batch_size": 24}, r"exact is 16 and eval_batch_size is 24, .* multiple of 16"),
    ],
)
def test_an_evaluation_that_cannot_be_exact_is_refused_before_training_too(
    options: Options, message: str
) -> None:
    data = (np.zeros((ROWS, 64), np.float32), np.zeros(ROWS, np.int32))
    of = make(**options)
    with pytest.raises(UserError, match=message):
        of.evaluate(data)
    with pytest.raises(UserError, match=message):
        of.fit(data, validation=data)
    assert of.step == 0


# -- batch statistics, which are those of the global batch -----------------------------------------

NORMALIZED_PLACEMENTS: Mapping[str, Mapping[str, Any]] = {
    "one device": {"mesh": on(1)},
    "two devices": {"mesh": on(2)},
    "four devices, zero": {"strategy": "zero", "mesh": on(4)},
    "eight devices": {},
    "fully_sharded": {"strategy": "fully_sharded"},
}


class Normalized(nnx.Module):
    """Layers with batch normalization and dropout, and a counter."""

    def __init__(self, rngs: nnx.Rngs, dropout: float = 0.1) -> None:
        self.layers = nnx.List([nnx.Linear(n, 128, rngs=rngs) for n in (64, 128)])
        self.norms = nnx.List([nnx.BatchNorm(128, momentum=0.9, rngs=rngs) for _ in range(2)])
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.classifier = nnx.Linear(128, 10, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] = self.calls[...] + 1
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = self.dropout(nnx.relu(norm(layer(x))))
        return self.classifier(x)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        for _ in range(2):
            x = nn.relu(nn.BatchNorm(not train, momentum=0.9)(nn.Dense(128)(x)))
        return nn.Dense(10)(x)


def normalized_objective(model: Any, batch: Any) -> dict[str, jax.Array]:
    x, y = batch
    logits = model(x, train=model.training) if hasattr(model, "model_state") else model(x)
    return {"loss": optax.softmax_cross_entropy_with_integer_labels(logits, y)}


def make_normalized(model: Any = Normalized, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "objective": normalized_objective,
        "optimizer": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
        "steps": 3,
        "global_batch_size": ROWS,
        "exact": SHARDS,
        "sharding": ShardingOptions(min_size=256),
        "terminal": Terminal(quiet=True),
    }
    return Trainer(model=model, **defaults | options)


def data(*shape: int, batches: int = 2) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    x = generator.normal(1, 2, (batches * ROWS, *shape)).astype(np.float32)
    return x, generator.integers(0, 10, len(x)).astype(np.int32)


def leaves(of: Trainer) -> dict[str, bytes]:
    """The bits of the state after a run, by name."""
    return {name: np.asarray(x).tobytes() for name, x in named_leaves(of.state).items()}


@pytest.mark.slow
def test_a_loop_that_is_cut_has_the_sums_and_gradients_of_the_whole_batch() -> None:
    x, weights = data(6)[0], jnp.linspace(-1.0, 1.0, 6)

    def normalized(weights: jax.Array, x: jax.Array, mean: Any) -> jax.Array:
        for _ in range(2):  # the second statistics depend on the first ones
            centered = x - mean(x.mean(0))
            x = jnp.tanh(centered * jax.lax.rsqrt(mean((centered**2).mean(0))) * weights)
        return (x**3).sum()

    def of_turn(turn: jax.Array, rows: jax.Array) -> Any:
        over_all = partial(jax.lax.pmean, axis_name=VIRTUAL_SHARD)
        value, gradient = jax.value_and_grad(normalized)(weights, rows, over_all)
        return (value, gradient, turn), over_all((rows.mean(0), rows.max(0)))

    def loops() -> Any:
        slices = jnp.asarray(x).reshape(2, -1, 6)
        return synchronized_loops(of_turn, slices, turns=2, shards=2, reduce=lambda sums: sums)

    (value, gradient, turns), (mean, largest) = jax.jit(loops)()
    expected = jax.value_and_grad(normalized)(weights, x, lambda x: x)
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    np.testing.assert_allclose(gradient, expected[1], rtol=1e-5)
    np.testing.assert_allclose(mean, x.mean(0), rtol=1e-6)
    np.testing.assert_allclose(largest, x.reshape(2, -1, 6).max(1).mean(0), rtol=1e-6)
    assert turns == 0 + 1


@pytest.mark.parametrize(
    ("statistic", "is_sum"),
    [
        (lambda x, axis: jax.lax.pmean(x.mean(0), axis), True),
        (lambda x, axis: jax.lax.pmax(x.max(0), axis), False),
        (lambda x, axis: jax.lax.psum(x.sum(0), axis, axis_index_groups=[[0], [1]]), False),
        (lambda x, axis: x.sum(0) * jax.lax.axis_index(axis), False),
    ],
    ids=["mean", "maximum", "groups", "index"],
)
def test_collectives_that_are_no_sums_over_all_are_refused(statistic: Any, is_sum: bool) -> None:
    def of_turn(turn: jax.Array, rows: jax.Array) -> Any:
        return turn, statistic(rows, VIRTUAL_SHARD)

    def loops() -> Any:
        slices = jnp.ones((2, 4, 3))
        return synchronized_loops(of_turn, slices, turns=2, shards=2, reduce=lambda sums: sums)

    def values(_: Any, rows: jax.Array) -> jax.Array:
        return rows - statistic(rows, VIRTUAL_SHARD)

    axes = [(VIRTUAL_SHARD, 2)]
    assert (why_parts_differ(values, (), jnp.ones((8, 3)), 2, axes=axes) is None) == is_sum
    with contextlib.nullcontext() if is_sum else pytest.raises(UserError, match="parts of a batch"):
        jax.make_jaxpr(loops)()


def test_a_sum_must_not_depend_on_the_number_of_a_row_within_its_part() -> None:
    def values(_: Any, rows: jax.Array) -> jax.Array:
        weighted = rows * jnp.arange(len(rows))[:, None]
        return rows - jax.lax.pmean(weighted.mean(0), VIRTUAL_SHARD)

    axes = [(VIRTUAL_SHARD, 2)]
    assert why_parts_differ(values, (), jnp.ones((8, 3)), 2, axes=axes) is not None


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["layers", "mobilenet"])
def test_a_model_with_batch_statistics_has_one_hash_and_the_numbers_of_plain_steps(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        mobilenet, "STAGES", mobilenet.STAGES[:1]
    )  # compiles in a tenth of the time
    models: dict[str, Any] = {
        "layers": Normalized,
        "mobilenet": partial(MobileNetV2, 10, width_multiplier=0.25),
    }
    rows = data(64) if name == "layers" else data(8, 8, 3)
    model, optimizer = partial(models[name], dropout=0.0), optax.sgd(0.1, momentum=0.9)
    one, split, plain = (
        make_normalized(model, optimizer=optimizer, **options)
        for options in (
            NORMALIZED_PLACEMENTS["one device"],
            NORMALIZED_PLACEMENTS["fully_sharded"],
            {"exact": None, **NORMALIZED_PLACEMENTS["one device"]},
        )
    )
    for of in (one, split, plain):
        of.fit(rows)
    assert leaves(one) == leaves(split) != leaves(plain)
    assert one.evaluate(rows) == split.evaluate(rows)
    found = named_leaves(one.state)
    for leaf, value in named_leaves(plain.state).items():
        np.testing.assert_allclose(found[leaf], value, rtol=1e-4, atol=1e-5, err_msg=leaf)


def keras_model() -> Any:
    os.environ.setdefault("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras")
    from spmdtrain.keras.model import KerasModel

    keras.utils.set_random_seed(0)
    layers = keras.layers
    hidden = [
        layer
        for _ in range(2)
        for layer in (layers.Dense(128), layers.BatchNormalization(momentum=0.9), layers.ReLU())
    ]
    return KerasModel(keras.Sequential([keras.Input((64,)), *hidden, layers.Dense(10)]))


@pytest.mark.slow
@pytest.mark.parametrize("library", ["linen", "keras"])
def test_models_of_other_libraries_average_their_statistics_as_well(library: str) -> None:
    """Otherwise the values of an example would depend on the examples of its virtual shard."""
    batch = tuple(x[:ROWS] for x in data(64))
    model = LinenModel(Linen(), batch[0]) if library == "linen" else keras_model()
    plan_step(make_normalized(model).functions, batch)


@pytest.mark.nightly
@pytest.mark.timeout(2400)  # XLA compiles the loops of MobileNetV2 in a minute or two
@pytest.mark.parametrize("library", ["nnx", "linen", "keras", "mobilenet"])
def test_many_steps_have_one_hash(library: str) -> None:
    x, y = data(16, 16, 3) if library == "mobilenet" else data(64)
    models: dict[str, Any] = {
        "nnx": Normalized,
        "linen": LinenModel(Linen(), x[:ROWS]),
        "keras": keras_model() if library == "keras" else None,
        "mobilenet": partial(MobileNetV2, 10, width_multiplier=0.35),
    }
    found = []
    for options in NORMALIZED_PLACEMENTS.values():
        of = make_normalized(models[library], steps=200, **options)
        of.fit((x, y))
        found.append(leaves(of))
    assert all(each == found[0] for each in found)


class OwnStatistics(nnx.Module):
    """Centers by the mean of the batch, and keeps an average of it."""

    def __init__(self, rngs: nnx.Rngs, *, uses: bool) -> None:
        self.linear = nnx.Linear(64, 10, rngs=rngs)
        self.mean = nnx.BatchStat(jnp.zeros(64))
        self.uses = uses

    def __call__(self, x: jax.Array) -> jax.Array:
        mean = jax.lax.stop_gradient(x.mean(0))
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * mean
        return self.linear(x - mean if self.uses else x)


class Masked(nnx.Module):
    """Normalizes by the statistics of some rows."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.linear = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(self.norm(x, mask=x[:, :1] > 0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (partial(OwnStatistics, uses=True), {}, "exact=16 .* depend on other examples"),
        (partial(OwnStatistics, uses=False), {}, "the model state mean depends on the examples"),
        (Masked, {}, "exact=16 .* depend on other examples"),
        (Normalized, {"microbatches": 2}, "batch statistics in a loop .* microbatches to 1"),
    ],
)
def test_statistics_that_cannot_be_exact_are_refused(
    model: Any, options: Any, message: str
) -> None:
    of = make_normalized(model, **options)
    batch = tuple(x[:ROWS] for x in data(64))
    with pytest.raises(UserError, match=message):
        plan_step(of.functions, batch).program().trace(of.functions.abstract_state, batch)

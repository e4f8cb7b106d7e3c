"""Explicitly reduce-scattered gradients: the numbers of one device, and the collectives."""

from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec
from step_helpers import SHOWS_GRADIENTS, check_equal, one_step, trainer

from spmdtrain import (
    AxisRules,
    FunctionModel,
    GatherPolicy,
    MeshSpec,
    Rule,
    RunConfig,
    Trainer,
    UserError,
)
from spmdtrain.config.options import CollectiveOptions, ShardingOptions
from spmdtrain.models import (
    LLAMA_AXIS_RULES,
    TRANSFORMER_RULES,
    Llama,
    LlamaConfig,
    Transformer,
    TransformerConfig,
)
from spmdtrain.models.layers import normal_param
from spmdtrain.sharding.placement import current_strategy, use_placement
from spmdtrain.step.gradients import ScatteredReduction, flattened
from spmdtrain.step.plan import default_reduction, plan_step
from spmdtrain.testing.compiled_step import compiled_step
from spmdtrain.tree import named_leaves

SHAPE = TransformerConfig(
    vocabulary=20, rows=24, layers=2, width=16, heads=2, hidden=32, context=8, unroll=False
)
SCATTER = CollectiveOptions(reduction="reduce_scatter")
CLIPPED = optax.chain(optax.clip_by_global_norm(1e-2), SHOWS_GRADIENTS)
SMALL = 400  # bytes: more than the norms' scales and scalars, less than a matrix


def batch() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(3)
    weights = generator.choice([0, 0.25, 1, 3], size=(16, 8)).astype(np.float32)
    weights[-5:] = 0  # as padding rows have
    return {"tokens": generator.integers(0, 20, (16, 9)).astype(np.int32), "weights": weights}


def objective(model: Any, batch: dict[str, jax.Array]) -> dict[str, Any]:
    inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    return {"loss": (model.token_losses(inputs, targets).loss, batch["weights"])}


def transformer(strategy: str = "fully_sharded", **options: Any) -> Trainer:
    defaults = {
        "model": partial(Transformer, SHAPE),
        "objective": objective,
        "optimizer": CLIPPED,
        "global_batch_size": 16,
        "rules": TRANSFORMER_RULES,
        "sharding": ShardingOptions(min_size=100),
        "strategy": strategy,
        "collectives": SCATTER,
    }
    return trainer(**defaults | options)


def numbers(of: Trainer) -> dict[str, np.ndarray]:
    """The clipped gradients and the loss of the batch at the initial parameters."""
    after, output = one_step(of, batch())
    shown = named_leaves(after.opt_state[1].trace) | output.metrics
    return {name: np.asarray(x) for name, x in shown.items()}


@cache
def expected() -> dict[str, np.ndarray]:
    plain = CollectiveOptions()
    return numbers(
        transformer("one_device", collectives=plain, mesh=MeshSpec(devices=(0,)), rules=())
    )


@pytest.mark.slow
def test_the_numbers_are_those_of_one_device_and_no_gradient_is_all_reduced() -> None:
    of = transformer(microbatches=2)
    check_equal(numbers(of), expected())
    program = compiled_step(of, batch())
    # Four matrices of the layers and the tied embedding, once each, and nothing of their size.
    program.assert_count(5, "reduce-scatter", axes="fsdp")
    program.assert_no("all-reduce", larger_than=SMALL)
    # The weights of one layer at a time are gathered, in its backward pass again.
    gathers = [x for x in program.collectives if x.kind == "all-gather"]
    assert max(x.bytes for x in gathers) == 4 * SHAPE.width * 3 * SHAPE.width
    assert len(gathers) == 2 * 4 + 1


@pytest.mark.nightly
def test_an_annotated_model_has_these_numbers_too_and_gathers_a_layer_at_a_time() -> None:
    shape = LlamaConfig(
        vocabulary=20, context=8, layers=2, width=16, heads=2, kv_heads=1, hidden=32, unroll=False
    )
    own: dict[str, Any] = {"model": partial(Llama, shape), "rules": ()}
    own["axis_rules"] = LLAMA_AXIS_RULES
    default, alone = {"collectives": CollectiveOptions()}, {"mesh": MeshSpec(devices=(0,))}
    expected = numbers(transformer("one_device", **own | default | alone))
    scattering, replicated = transformer(**own), transformer("mirrored", **own | default)
    check_equal(numbers(scattering), expected)
    check_equal(numbers(replicated), expected)
    assert plan_step(replicated.functions, batch()).reduction is flattened
    gathers = [x for x in compiled_step(scattering, batch()).collectives if x.kind == "all-gather"]
    assert max(x.bytes for x in gathers) == 4 * shape.width * shape.hidden  # not both layers
    assert sum(x.times for x in gathers) == 2 * 2 * 7 + 2  # the embedding and the head once
    in_two_dims = {"axis_rules": AxisRules(dict(LLAMA_AXIS_RULES.pairs) | {"mlp": "data"})}
    of = transformer(**own | in_two_dims, mesh=MeshSpec(data=2, fsdp=4))
    check_equal(numbers(of), expected)


PLACES: dict[str, dict[str, Any]] = {
    "zero": {"strategy": "zero"},
    "two axes": {"mesh": MeshSpec(data=2, fsdp=4), "remat": "attention"},
    "groups": {"strategy": "hybrid+fully_sharded", "mesh": MeshSpec(replica=2)},
    "half precision": {"collectives": CollectiveOptions(reduce_dtype="float16")},
    "unrolled": {"model": partial(Transformer, replace(SHAPE, unroll=True)), "remat": "full"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    [
        "zero",
        *(
            pytest.param(x, marks=pytest.mark.nightly)
            for x in ("half precision", "two axes", "groups", "unrolled")
        ),
    ],
)
def test_other_placements_give_the_same_numbers(place: str) -> None:
    of = transformer(**PLACES[place])
    found = numbers(of)
    assert isinstance(plan_step(of.functions, batch()).reduction, ScatteredReduction)
    if place == "half precision":
        for name, value in expected().items():
            np.testing.assert_allclose(found[name], value, atol=2e-3 * np.abs(value).max())
    else:
        check_equal(found, expected(), place)
    program = compiled_step(of, batch())
    assert sum(x.kind == "reduce-scatter" for x in program.collectives) >= 5
    if "two axes" != place != "groups":  # there, the parts are all-reduced over the other axis
        program.assert_no("all-reduce", larger_than=SMALL)


def test_what_cannot_be_scattered_is_refused() -> None:
    with pytest.raises(UserError, match="which is for the strategies that split gradients"):
        transformer("mirrored")

    def init(key: jax.Array) -> dict[str, jax.Array]:
        return {"blocks": jax.random.normal(key, (3, 8, 8))}

    def apply(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        # A loop of its own: XLA would gather one layer at a time, an explicit gather all of them.
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["blocks"])[0]

    own_loop = trainer(
        model=FunctionModel(init, apply),
        objective=lambda model, batch: {"loss": model(batch["x"]) ** 2},
        rules=[Rule("blocks", PartitionSpec(None, None, None), GatherPolicy.PER_LAYER)],
        strategy="fully_sharded",
        sharding=ShardingOptions(min_size=1),
        collectives=SCATTER,
    )
    rows = {"x": np.ones((64, 8), np.float32)}
    with pytest.raises(UserError, match="params/blocks would be gathered whole"):
        plan_step(own_loop.functions, rows)

    class Annotated(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs) -> None:
            self.kernel = normal_param(rngs, (8, 8), std=1.0, names=("embed", None))

        def __call__(self, x: jax.Array) -> jax.Array:
            return x @ self.kernel[...]  # XLA gathers it here

    no_loop = trainer(
        model=Annotated,
        objective=lambda model, batch: {"loss": model(batch["x"]) ** 2},
        axis_rules=AxisRules({"embed": "fsdp"}),
        strategy="fully_sharded",
        collectives=SCATTER,
    )
    with pytest.raises(UserError, match="params/kernel would be gathered whole"):
        plan_step(no_loop.functions, rows)

    def asks(model: Any, batch: dict[str, jax.Array]) -> dict[str, Any]:
        return {"loss": objective(model, batch)["loss"][0] * current_strategy().batch_shards}

    asking = transformer(objective=asks)
    refused = pytest.raises(UserError, match=r"reduction=reduce_scatter .*current_strategy")
    with use_placement(asking.placement), refused:
        plan_step(asking.functions, batch())


def replicated_here(x: jax.Array) -> jax.Array:
    return jax.sharding.reshard(x, PartitionSpec())


def scaled_by_axis(x: jax.Array) -> jax.Array:
    return x * jax.sharding.get_abstract_mesh().shape["fsdp"]


def scaled_by_rules(x: jax.Array) -> jax.Array:
    return x * (1 + len(nn.get_logical_axis_rules()))


@pytest.mark.parametrize(
    "uses", [replicated_here, scaled_by_axis, scaled_by_rules, pytest.param(None, id="nothing")]
)
def test_a_model_that_depends_on_its_context_is_reduced_by_xla(uses: Any) -> None:
    class Annotated(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs) -> None:
            self.kernel = normal_param(rngs, (8, 8), std=1.0, names=("embed", None))

        def __call__(self, x: jax.Array) -> jax.Array:
            return (uses or jnp.abs)(x @ self.kernel[...])

    of = trainer(
        model=Annotated,
        objective=lambda model, batch: {"loss": model(batch["x"]).sum(-1)},
        axis_rules=AxisRules({"embed": "fsdp"}),
    )
    plan = plan_step(of.functions, {"x": np.ones((64, 8), np.float32)})
    reasons = " ".join(plan.reasons)
    assert ("depends on the mesh of JAX's context" in reasons) == (uses is not None)
    assert plan.reduction is (None if uses else flattened)


@pytest.mark.parametrize(
    ("platform", "splits", "chosen"),
    [
        ("tpu", True, ScatteredReduction),
        ("tpu", False, type(None)),
        ("cpu", True, type(None)),
        ("gpu", True, type(None)),
    ],
)
def test_only_tpus_scatter_by_default(platform: str, splits: bool, chosen: type) -> None:
    devices = [SimpleNamespace(platform=platform)] * 8
    placement: Any = SimpleNamespace(devices=devices, batch_shards=8)
    layout: Any = SimpleNamespace(splits_gradients=splits, replicates_params=False)
    assert isinstance(default_reduction(RunConfig(), placement, layout), chosen)
    automatic = RunConfig(collectives=CollectiveOptions(reduction="automatic"))
    assert default_reduction(automatic, placement, layout) is None

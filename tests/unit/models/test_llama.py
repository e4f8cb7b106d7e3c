"""Llama: the numbers of an independent implementation, sharding by annotations, generation."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import llama_reference
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import REPOSITORY

from spmdtrain import AxisRules, MeshSpec, Trainer, UserError
from spmdtrain.checkpoints.weights.weight_map import unmapped
from spmdtrain.config.experiment import load_experiment
from spmdtrain.models import (
    LLAMA_AXIS_RULES,
    GenerationOptions,
    LinearRopeScaling,
    Llama,
    Llama3RopeScaling,
    LlamaConfig,
    generate,
)
from spmdtrain.tree import named_leaves

experiment: Any = load_experiment(str(REPOSITORY / "experiments" / "llama.py"), frozenset()).module
SMALL = LlamaConfig(
    vocabulary=64,
    layers=2,
    width=32,
    heads=4,
    kv_heads=2,
    hidden=48,
    context=48,
    # Of the 4 rotations of a head two are kept, one is interpolated, and one is slowed down.
    rope_base=500_000.0,
    rope_scaling=Llama3RopeScaling(factor=4.0),
)
TOKENS = np.random.default_rng(0).integers(0, 64, (8, 24)).astype(np.int32)


def randomized(**changes: Any) -> Llama:
    """A model whose norms are random, too, and whose logits are far apart."""
    model = Llama(dataclasses.replace(SMALL, **changes), rngs=nnx.Rngs(0))
    random = np.random.default_rng(1)
    state = jax.tree.map(
        lambda x: jnp.asarray(x + 0.2 * random.normal(size=x.shape), x.dtype), nnx.state(model)
    )
    nnx.update(model, state)
    return model


@nnx.jit
def forward(model: Llama, tokens: jax.Array) -> jax.Array:
    return model(tokens)


def arrays(model: Llama) -> dict[str, np.ndarray]:
    named = named_leaves(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    return {name: np.asarray(x) for name, x in named.items()}


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_logits_are_those_of_an_independent_llama(tied: bool) -> None:
    model = randomized(tied=tied)
    weights = unmapped(experiment.weight_map(tied=tied), arrays(model))
    expected = llama_reference.logits(
        weights, TOKENS, heads=4, kv_heads=2, base=SMALL.rope_base, factor=4.0
    )
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(forward(model, jnp.array(TOKENS)), expected, atol=2e-5)


def test_rope_scaling() -> None:
    """The published 64 rotations of a head of 128 values, against the reference's cases."""
    config = dataclasses.replace(SMALL, width=512, rope_base=500_000.0)
    for factor in (8.0, 32.0):
        scaled = dataclasses.replace(config, rope_scaling=Llama3RopeScaling(factor=factor)).speeds
        expected = llama_reference.rotary_speeds(128, 500_000.0, factor)
        np.testing.assert_allclose(scaled, expected, rtol=1e-6)
    plain = dataclasses.replace(config, rope_scaling=None).speeds
    kinds = np.round(plain / scaled, 6)
    assert kinds[0] == 1 and kinds[-1] == 32 and ((kinds > 1) & (kinds < 32)).any()
    linear = dataclasses.replace(config, rope_scaling=LinearRopeScaling(factor=2.0)).speeds
    np.testing.assert_array_equal(linear, plain / 2)


@pytest.mark.parametrize(
    ("preset", "count"),
    [("llama-3.2-1b", 1_235_814_400), ("llama-3.1-8b", 8_030_261_248)],
)
def test_published_shapes_have_the_published_numbers_of_parameters(preset: str, count: int) -> None:
    shape = experiment.shape(experiment.PRESETS[preset])
    model = nnx.eval_shape(lambda: Llama(shape, rngs=nnx.Rngs(0)))
    assert sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))) == count


def objective(model: Llama, tokens: jax.Array) -> dict[str, jax.Array]:
    logits = model(tokens[:, :-1])
    return {"loss": optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])}


@pytest.mark.slow
def test_parameters_carry_the_axes_of_their_names() -> None:
    def specs(**given: Any) -> list[Any]:
        mesh = MeshSpec(fsdp=4, tensor=2)
        model = partial(Llama, SMALL)
        given |= {"model": model, "objective": objective, "optimizer": optax.sgd(0.5)}
        return list(Trainer(mesh=mesh, quiet=True, **given).sharding_table().rows)

    assert specs() == specs(axis_rules=LLAMA_AXIS_RULES)
    assert specs() != specs(axis_rules=AxisRules({"vocab": None}))


def fitted(strategy: str, mesh: MeshSpec | None = None) -> tuple[Trainer, list[float]]:
    losses: list[float] = []
    trainer = Trainer(
        model=partial(Llama, SMALL),
        objective=objective,
        optimizer=optax.sgd(0.5),
        axis_rules=LLAMA_AXIS_RULES,
        strategy=strategy,
        mesh=mesh or MeshSpec(),
        log_every=1,
        quiet=True,
        callbacks={"log": lambda event: losses.append(event.metrics["loss"])},
    )
    trainer.fit(TOKENS, steps=3, global_batch_size=8)
    return trainer, losses


@pytest.mark.nightly
@pytest.mark.slow
def test_annotations_split_over_fsdp_and_tensor_with_the_losses_of_one_device() -> None:
    trainer, losses = fitted("fully_sharded", MeshSpec(fsdp=4, tensor=2))
    _, expected = fitted("one_device")
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert losses[2] < losses[0] - 0.01
    assert trainer.state is not None
    params = named_leaves(trainer.state.params)
    shards = {name: x.addressable_shards[0].data.shape for name, x in params.items()}
    assert shards == {
        "embedding": (32, 8),
        "head": (32, 8),
        "norm": (32,),
        "blocks/attention/norm": (2, 32),
        "blocks/attention/query": (2, 8, 2, 8),
        "blocks/attention/key": (2, 8, 1, 8),
        "blocks/attention/value": (2, 8, 1, 8),
        "blocks/attention/out": (2, 2, 8, 8),
        "blocks/mlp/norm": (2, 32),
        "blocks/mlp/gate": (2, 8, 24),
        "blocks/mlp/up": (2, 8, 24),
        "blocks/mlp/down": (2, 24, 8),
    }
    # The cache is split over the same axes: the text is that of one device.
    found = generate(trainer.model, PROMPTS, GREEDY)
    on_one = Llama(SMALL, rngs=nnx.Rngs(0))
    nnx.update(on_one, jax.tree.map(np.asarray, nnx.state(trainer.model, nnx.Param)))
    assert [x.tolist() for x in found] == [x.tolist() for x in generate(on_one, PROMPTS, GREEDY)]


PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5]]
GREEDY = GenerationOptions(max_new_tokens=30, temperature=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("unroll", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_the_cache_gives_the_text_of_the_whole_window(unroll: bool) -> None:
    model = randomized(unroll=unroll)
    for prompt, new in zip(PROMPTS, generate(model, PROMPTS, GREEDY), strict=True):
        text = [*prompt, *new]
        best = np.asarray(forward(model, jnp.array([text]))).argmax(-1)[0]
        assert len(new) == 30 and len(set(new)) > 4
        assert best[len(prompt) - 1 : -1].tolist() == new.tolist()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"kv_heads": 3}, "4 heads do not divide over 3 key-value heads"),
        ({"heads": 32, "kv_heads": 32}, "is 1 a head: an odd number"),
        ({"rope_base": 0.5}, "rope_base is 0.5: it must be above 1"),
        ({"layers": 0}, "layers is 0"),
        ({"logits_dtype": "bf16"}, "logits_dtype is 'bf16'"),
        ({"rope_scaling": 8}, "rope_scaling is 8: it must have a method"),
        ({"experts": 4}, "experts is 4: it must be a RoutedExperts"),
    ],
)
def test_shapes_that_make_no_sense(changes: Any, why: str) -> None:
    with pytest.raises(UserError, match=why):
        dataclasses.replace(SMALL, **changes)
    with pytest.raises(UserError, match="factor is 0"):
        Llama3RopeScaling(factor=0.0)

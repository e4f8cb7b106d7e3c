"""Layers of the models: projections to heads, the residual stream of split tokens, and experts."""

import dataclasses
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import llama_reference
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import BOUND, REPOSITORY, environment
from plan_helpers import needs_libtpu

from spmdtrain import MeshSpec, RunConfig, Trainer, UserError
from spmdtrain.checkpoints.weights.weight_map import unmapped
from spmdtrain.config.experiment import load_experiment
from spmdtrain.document.terminal import Terminal
from spmdtrain.kernels.reference import reference_kernels
from spmdtrain.models import (
    LLAMA_AXIS_RULES,
    GenerationOptions,
    Llama,
    LlamaConfig,
    RoutedExperts,
    Routing,
    generate,
    layers,
    peak_load,
)
from spmdtrain.models.layers import project_qkv, squared_relu
from spmdtrain.models.transformer import TRANSFORMER_RULES, Transformer, TransformerConfig
from spmdtrain.plan import topologies
from spmdtrain.plan.topologies import compiler_environment, devices_of
from spmdtrain.sharding.mesh import abstract_devices
from spmdtrain.sharding.placement import make_placement, use_placement
from spmdtrain.step.flops import count_flops
from spmdtrain.testing.compiled_step import CompiledStep, compiled_step
from spmdtrain.tree import named_leaves

SHAPES = (2, 5, 16), (16, 3, 4, 8), (3, 4, 8), (3, 2, 5, 4, 8)
RANDOM = np.random.default_rng(0)
X, KERNEL, BIAS, TARGET = (RANDOM.normal(size=shape).astype(np.float32) for shape in SHAPES)


def products(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    return (jnp.stack(project_qkv(x, kernel, bias)) * TARGET).sum()


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_the_platform_changes_neither_values_nor_derivatives(
    platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = tuple(map(jnp.asarray, (X, KERNEL, BIAS)))

    def computed() -> tuple[Any, ...]:
        gradients = jax.grad(products, argnums=(0, 1, 2))(*given)
        return project_qkv(*given), gradients, jax.jvp(products, given, given)

    def jaxpr_of(function: Any) -> str:
        return str(jax.make_jaxpr(partial(function))(*given))  # `partial`: a new trace

    with use_placement(make_placement(RunConfig(mesh=MeshSpec(devices=(0,))))):
        expected = computed()
        assert jaxpr_of(project_qkv).count("dot_general[") == 1
        device = SimpleNamespace(platform=platform)
        monkeypatch.setattr(layers, "current_device", lambda: device)
        found = computed()
        assert jaxpr_of(project_qkv).count("dot_general[") == 3
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_the_gradient_of_the_squared_relu_has_the_values_of_jax() -> None:
    x = jnp.array([-2.0, -0.0, 0.0, 0.5, 3.0])
    plain = jax.vmap(jax.grad(lambda x: jnp.square(jax.nn.relu(x))))(x)
    np.testing.assert_array_equal(jax.vmap(jax.grad(squared_relu))(x), plain)
    np.testing.assert_array_equal(squared_relu(x), jnp.square(jax.nn.relu(x)))


# -- the residual stream with split tokens: its memory, and collectives on TPUs --------------------

ROWS, WIDTH, LAYERS = 64, 128, 32
TOPOLOGY = topologies.parse("v5e:2x4")


def step(length: int, layers: int, **options: Any) -> CompiledStep:
    """Compiles a step of a transformer, whose heads and hidden values are split over "tensor"."""
    config = TransformerConfig(
        vocabulary=64,
        rows=64,
        layers=layers,
        width=WIDTH,
        heads=4,
        hidden=WIDTH,
        context=length,
        unroll=False,
    )
    trainer = Trainer(
        model=partial(Transformer, config),
        objective=lambda model, x: {"loss": model.token_losses(x[:, :-1], x[:, 1:]).loss},
        optimizer=optax.sgd(0.1),
        mesh=MeshSpec(data=2, tensor=4),
        rules=TRANSFORMER_RULES,
        global_batch_size=ROWS,
        compilation_cache="off",
        terminal=Terminal(quiet=True),
        **options,
    )
    with jax.default_device(trainer.placement.devices[0]):
        return compiled_step(trainer, jax.ShapeDtypeStruct((ROWS, length + 1), jnp.int32))


@pytest.mark.slow
def test_a_device_keeps_its_part_of_the_tokens_between_blocks() -> None:
    memory = step(128, LAYERS, remat="full").memory
    whole = 4 * LAYERS * ROWS // 2 * 128 * WIDTH  # bytes of the inputs of all blocks
    assert memory.temp_size_in_bytes < 0.7 * whole, memory


def print_collectives_for_tpus() -> None:
    """Prints kind, axes and bytes of the collectives of a step on TPUs."""
    with abstract_devices(devices_of(TOPOLOGY)):
        found = step(128, 1, compute_dtype="bfloat16").collectives
    print(json.dumps([(x.kind, x.axes, x.bytes, x.line) for x in found]))


@needs_libtpu
@pytest.mark.nightly
def test_for_tpus_each_half_of_a_block_scatters_and_gathers_instead_of_an_all_reduce() -> None:
    # In a process of its own, because programs for absent devices cannot be read from the cache.
    code = f"import {__name__}; {__name__}.print_collectives_for_tpus()"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(8) | compiler_environment(TOPOLOGY) | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=BOUND,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    residual = 2 * ROWS // 2 * 128 * WIDTH  # bytes of the residual stream of a device's rows
    over = [kind for kind, axes, size, _ in found if axes == ["tensor"] and size >= residual]
    assert set(over) == {"reduce-scatter", "all-gather"}, found
    # Forward and backward: two halves of a block, the embedding or the output layer.
    assert over.count("reduce-scatter") == 6, found


# -- experts: an independent Mixtral, the router's values, any number of devices -------------------

experiment: Any = load_experiment(str(REPOSITORY / "experiments" / "llama.py"), frozenset()).module
SMALL = LlamaConfig(
    vocabulary=32,
    layers=2,
    width=16,
    heads=4,
    kv_heads=2,
    hidden=24,
    context=48,
    rope_base=10_000.0,
    experts=RoutedExperts(count=4, top_k=2),
    unroll=False,
)
TOKENS = np.random.default_rng(0).integers(0, 32, (8, 13)).astype(np.int32)


def randomized() -> Llama:
    random = np.random.default_rng(1)
    graph, state = nnx.split(nnx.eval_shape(lambda: Llama(SMALL, rngs=nnx.Rngs(0))))
    values = jax.tree.map(lambda x: jnp.asarray(0.4 * random.normal(size=x.shape), x.dtype), state)
    model: Llama = nnx.merge(graph, values)
    return model


@nnx.jit
def forward(model: Llama, tokens: jax.Array) -> tuple[jax.Array, Routing]:
    hidden, routing = model.hidden_and_routing(tokens)
    return model.logits(hidden), routing


@pytest.mark.slow
def test_logits_and_weight_map_are_those_of_an_independent_mixtral() -> None:
    model = randomized()
    named = named_leaves(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    arrays = {name: np.asarray(x) for name, x in named.items()}
    weights = unmapped(experiment.weight_map(tied=False, experts=True), arrays)
    assert weights["model.layers.1.block_sparse_moe.experts.3.w2.weight"].shape == (16, 24)
    expected = llama_reference.logits(
        weights, TOKENS, heads=4, kv_heads=2, base=SMALL.rope_base, factor=None, top_k=2
    )
    logits, routing = forward(model, jnp.array(TOKENS))
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(logits, expected, atol=2e-5)
    assert routing.load.shape == (8, 2, 4)
    np.testing.assert_array_equal(routing.load.sum(-1), 2 * 13)  # no token is dropped

    # All experts are equally probable, and of equal ones the first two are chosen.
    model.blocks["mlp"]["router"][...] *= 0
    _, routing = forward(model, jnp.array(TOKENS))
    np.testing.assert_allclose(routing.balance, 1, rtol=1e-6)
    np.testing.assert_allclose(routing.entropy, np.log(4), rtol=1e-6)
    np.testing.assert_allclose(routing.z, np.log(4) ** 2, rtol=1e-6)
    np.testing.assert_array_equal(routing.load.sum((0, 1)), [8 * 2 * 13, 8 * 2 * 13, 0, 0])
    np.testing.assert_array_equal(peak_load(routing.load), 2)


def test_the_published_shape_has_the_published_number_of_parameters() -> None:
    shape = experiment.shape(experiment.PRESETS["mixtral-8x7b"])
    model = nnx.eval_shape(lambda: Llama(shape, rngs=nnx.Rngs(0)))
    sizes = jax.tree.map(lambda x: x.size, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    assert sum(jax.tree.leaves(sizes)) == 46_702_792_704


def test_the_small_mixture_has_the_flops_of_its_dense_model() -> None:
    def flops(preset: str) -> int:
        shape = experiment.shape(experiment.PRESETS[preset])
        graph, abstract = nnx.split(nnx.eval_shape(lambda: Llama(shape, rngs=nnx.Rngs(0))))
        with reference_kernels():
            traced = jax.make_jaxpr(lambda values, x: nnx.merge(graph, values).hidden(x))(
                abstract, jax.ShapeDtypeStruct((4, 64), jnp.int32)
            )
        return count_flops(traced).once

    assert 0.98 < flops("moe") / flops("moe-dense") <= 1


def fitted(strategy: str, **options: Any) -> tuple[Trainer, list[dict[str, float]]]:
    lines: list[dict[str, float]] = []
    config = experiment.Config(experts=4, balance_weight=0.5, router_z_weight=0.1)
    trainer = Trainer(
        model=partial(Llama, SMALL),
        objective=partial(experiment.routed_objective, config),
        optimizer=optax.sgd(0.5),
        axis_rules=LLAMA_AXIS_RULES,
        strategy=strategy,
        log_every=1,
        quiet=True,
        callbacks={"log": lambda event: lines.append(dict(event.metrics))},
        **options,
    )
    data = {"tokens": TOKENS, "weights": np.ones((8, 12), np.float32)}
    trainer.fit(data, steps=3, global_batch_size=8)
    return trainer, lines


# tests/drills/test_mesh_axes.py has the losses of the experiment. The first case waited forever.
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("strategy", "mesh"),
    [
        ("mirrored", MeshSpec(data=2, expert=4)),
        ("fully_sharded", MeshSpec(fsdp=2, expert=2, tensor=2)),
    ],
)
def test_eight_devices_have_the_metrics_of_one_also_with_microbatches(
    strategy: str, mesh: MeshSpec
) -> None:
    _, expected = fitted("one_device")
    trainer, found = fitted(strategy, mesh=mesh)
    _, parts = fitted("one_device", microbatches=2)
    for line, on_eight, in_parts in zip(expected, found, parts, strict=True):
        terms = line["cross_entropy"] + 0.5 * line["balance"] + 0.1 * line["router_z"]
        assert line["loss"] == pytest.approx(terms, rel=1e-6)
        assert 1 <= line["expert_load"] <= 2 and 0 < line["expert_entropy"] <= np.log(4)
        on_eight["expert_overflow"] = 0  # buffers of few tokens may overflow
        assert on_eight == pytest.approx(line, rel=1e-5)
        assert in_parts == pytest.approx(line, rel=1e-5)
    assert expected[2]["loss"] < expected[0]["loss"] - 0.01
    # A row depends on no other: an evaluation is padded, and compiles once.
    rows = {"tokens": np.zeros((1, 13), np.int32), "weights": np.zeros((1, 12), np.float32)}
    assert trainer.functions.checks.why_not_padded(rows, 8) is None


@pytest.mark.nightly
def test_the_cache_gives_the_text_of_the_whole_window() -> None:
    model = randomized()
    prompts = [[3, 1, 4], [1]]
    texts = generate(model, prompts, GenerationOptions(max_new_tokens=20, temperature=0.0))
    assert len(set(np.concatenate(texts).tolist())) > 4
    for prompt, new in zip(prompts, texts, strict=True):
        text = jnp.array([[*prompt, *new]])
        best = np.asarray(forward(model, text)[0]).argmax(-1)[0]
        assert len(new) == 20
        assert best[len(prompt) - 1 : -1].tolist() == new.tolist()


def test_the_values_of_layers_are_means_but_the_overflow_is_their_number() -> None:
    each = jnp.array([[1.0], [3.0]])
    load = jnp.arange(8.0).reshape(2, 1, 4)
    layers = Routing(each, each, each, load, overflow=jnp.array([1.0, 1.0]))
    found = Routing.over_layers(layers)
    assert [x.tolist() for x in (found.balance, found.z, found.entropy)] == [[2.0]] * 3
    assert found.load.tolist() == [[[0, 1, 2, 3], [4, 5, 6, 7]]]
    assert found.overflow == 2


def test_numbers_of_experts_that_make_no_sense() -> None:
    with pytest.raises(UserError, match="each token has 5 of 4 experts"):
        RoutedExperts(count=4, top_k=5)
    for weight in (0.1, 0.02):  # the second is the default
        with pytest.raises(UserError, match=f"balance_weight is {weight}, but the model has no ex"):
            experiment.build(experiment.Config(balance_weight=weight))
    dense = nnx.eval_shape(
        lambda: Llama(dataclasses.replace(SMALL, experts=None), rngs=nnx.Rngs(0))
    )
    with pytest.raises(UserError, match="is for a Llama with experts"):
        dense.hidden_and_routing(jnp.array(TOKENS))

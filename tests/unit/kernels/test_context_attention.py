"""Attention over split tokens: the numbers of whole sequences, and the training of a model."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import BOUND, environment
from jax.sharding import PartitionSpec
from plan_helpers import needs_libtpu

from spmdtrain import MeshSpec, RunConfig, Trainer, UserError, attention
from spmdtrain.config.options import ContextMethod, ContextOptions
from spmdtrain.document.terminal import Terminal
from spmdtrain.kernels import context_attention
from spmdtrain.kernels.context_attention import (
    Pattern,
    Tokens,
    attend,
    choose_context_method,
    merge_mixed,
    no_values,
)
from spmdtrain.models import MLP
from spmdtrain.models.transformer import TRANSFORMER_RULES, Transformer, TransformerConfig
from spmdtrain.plan import topologies
from spmdtrain.plan.topologies import compiler_environment, devices_of
from spmdtrain.sharding.mesh import abstract_devices, build_mesh
from spmdtrain.sharding.placement import CurrentMesh, Placement, use_placement
from spmdtrain.strategies import strategy
from spmdtrain.xla.collectives import collectives

METHODS = ("ring", "gather", "ulysses")
# Sizes of data, context and tensor; tokens; heads; key-value heads; options; with documents.
CASES: tuple[tuple[Any, ...], ...] = (
    ((2, 2, 2), 16, 4, 2, {"causal": True}, True),
    ((1, 8, 1), 32, 8, 8, {"causal": True, "scale": 0.5}, False),
    ((1, 4, 2), 32, 8, 1, {"causal": True, "window": 11}, False),
    ((2, 4, 1), 32, 4, 2, {"causal": False, "window": 3}, True),
    ((1, 4, 1), 32, 4, 2, {"causal": False}, True),
)


def placement(sizes: tuple[int, ...], method: ContextMethod | None) -> Placement:
    data, context, tensor = sizes
    devices = tuple(range(data * context * tensor))
    spec = MeshSpec(data=data, context=context, tensor=tensor, devices=devices)
    of = strategy("mirrored")
    return Placement(of, build_mesh(spec, of), method)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "case"),
    [
        pytest.param(
            method,
            case,
            id=f"{method} {case[0]} {case[4]}",
            marks=[pytest.mark.nightly] * (number > (1 if method == "ring" else 0)),
        )
        for method in METHODS
        for number, case in enumerate(CASES)
    ],
)
def test_split_tokens_mix_what_whole_sequences_do(method: ContextMethod, case: Any) -> None:
    sizes, tokens, heads, kv_heads, options, documents = case
    draw = np.random.default_rng(0)
    query, by = (draw.normal(size=(2, tokens, heads, 8)).astype("f") for _ in range(2))
    key, value = (draw.normal(size=(2, tokens, kv_heads, 8)).astype("f") for _ in range(2))
    segments: Any = np.sort(draw.integers(0, 4, (2, tokens)), axis=1) if documents else None

    def total(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        mixed = attention(*arrays, segments=segments, **options)
        return (mixed * by).sum(), mixed

    def found() -> Any:
        function = jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))
        (_, mixed), gradients = function(query, key, value)
        return mixed, *gradients

    expected = found()
    with use_placement(placement(sizes, method)):
        parts = found()
    for one, other in zip(parts, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6 * np.abs(other).max())


@pytest.mark.nightly
@pytest.mark.slow
def test_a_ring_in_blocks_of_queries_has_the_numbers_of_whole_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A part of 7 queries has two blocks, of which the second is padded."""
    monkeypatch.setattr(context_attention, "QUERY_BLOCK", 4)
    test_split_tokens_mix_what_whole_sequences_do(
        "ring", ((1, 2, 1), 28, 4, 2, {"causal": True}, True)
    )


@pytest.mark.parametrize("method", ["ring", "gather"])
def test_no_rows_give_no_rows(method: ContextMethod) -> None:
    none = jnp.zeros((0, 8, 4, 8))
    with use_placement(placement((2, 4, 1), method)):
        assert attention(none, none, none, causal=True).shape == none.shape


@pytest.mark.nightly
@pytest.mark.slow
def test_the_scale_may_be_a_parameter() -> None:
    query, key, value = np.random.default_rng(0).normal(size=(3, 2, 16, 4, 8)).astype("f")

    def total(scale: jax.Array) -> jax.Array:
        return jnp.square(attention(query, key, value, causal=True, scale=scale)).sum()

    expected = jax.jit(jax.value_and_grad(total))(0.5)
    with use_placement(placement((1, 2, 1), "ring")):
        found = jax.jit(jax.value_and_grad(total))(0.5)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


CONFIG = TransformerConfig(
    vocabulary=32, rows=32, layers=2, width=32, heads=4, hidden=64, context=32, dropout=0.1
)
DATA = {"tokens": np.random.default_rng(0).integers(0, 8, (64, 33))}


def losses(sizes: tuple[int, ...], method: ContextMethod | None, **options: Any) -> list[float]:
    def objective(model: Any, batch: Any) -> Any:
        tokens = batch["tokens"]
        loss = optax.softmax_cross_entropy_with_integer_labels
        return {"loss": loss(model(tokens[:, :-1]), tokens[:, 1:]).mean(-1)}

    data, context, tensor = sizes
    devices = tuple(range(data * context * tensor))
    found: list[float] = []
    trainer = Trainer(
        model=lambda rngs: Transformer(CONFIG, rngs=rngs),
        objective=objective,
        optimizer=optax.adam(1e-2),
        mesh=MeshSpec(data=data, context=context, tensor=tensor, devices=devices),
        rules=TRANSFORMER_RULES if tensor > 1 else (),
        context=ContextOptions(method=method),
        log_every=1,
        callbacks={"log": lambda event: found.append(event.metrics["loss"])},
        terminal=Terminal(quiet=True),
        **options,
    )
    trainer.fit(DATA, steps=20, global_batch_size=8)
    return found


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "method", "options"),
    [
        ((2, 2, 2), "ulysses", {}),
        *(
            pytest.param(*row, marks=pytest.mark.nightly)
            for row in (
                ((1, 8, 1), "ring", {"microbatches": 2, "remat": "attention"}),
                ((2, 4, 1), "gather", {"strategy": "zero"}),
            )
        ),
    ],
)
def test_a_model_with_split_tokens_has_the_losses_of_whole_ones(
    sizes: tuple[int, ...], method: ContextMethod, options: Any
) -> None:
    found = losses(sizes, method, **options)
    assert found[-1] < 0.8 * found[0]
    np.testing.assert_allclose(found, losses((1, 1, 1), None, **options), rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "heads", "options", "method"),
    [
        ("TPU v5", 32, {"has_kernel": True}, "ulysses"),
        ("TPU v5", 32, {"has_kernel": False}, "ring"),
        ("TPU v5", 4, {"has_kernel": True}, "ring"),  # 4 heads do not divide over 8 devices
        ("TPU v5", 32, {"has_kernel": True, "window": 1024}, "ring"),
        ("cpu", 32, {"has_kernel": False}, "ring"),
    ],
)
def test_the_method_is_that_of_the_fastest_products_and_transfers(
    kind: str, heads: int, options: dict[str, Any], method: ContextMethod
) -> None:
    mesh = CurrentMesh(None, {"context": 8, "tensor": 1}, ("context", "tensor"))
    query, key = (
        jax.ShapeDtypeStruct((1, 131_072, number, 128), jnp.bfloat16) for number in (heads, 4)
    )
    device, given = SimpleNamespace(device_kind=kind), {"window": None, "causal": True} | options
    found = choose_context_method(device, query, key, over=mesh, **given)  # type: ignore[arg-type]
    assert found == method


@pytest.mark.parametrize(
    ("method", "tokens", "message"),
    [
        (None, 12, r"12 tokens .* mesh.context=4: .* multiple of 8"),
        ("ulysses", 16, r"3 heads on each device .* use ring"),
    ],
)
def test_what_cannot_be_split_is_refused(
    method: ContextMethod | None, tokens: int, message: str
) -> None:
    x: Any = np.ones((1, tokens, 3, 8), "f")
    with use_placement(placement((1, 4, 1), method)), pytest.raises(UserError, match=message):
        attention(x, x, x, causal=True)


def test_other_keys_and_kernels_are_refused_over_split_tokens() -> None:
    x, y = (jnp.ones((1, tokens, 2, 128)) for tokens in (512, 1024))
    with use_placement(placement((1, 4, 1), "ring")):
        with pytest.raises(UserError, match="512 queries and 1024 keys: over"):
            attention(x, y, y, causal=False)
        with pytest.raises(UserError, match="implementation is splash, and"):
            attention(x, x, x, causal=True, implementation="splash")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": MeshSpec(context=2), "jit": False}, "mesh.context is 2 and jit is False"),
        ({"context": ContextOptions(method="ring")}, "context.method is ring, and mesh.context is"),
        (
            {"mesh": MeshSpec(context=2), "strategy": "parameter_server"},
            "mesh.context is 2, but under parameter_server",
        ),
    ],
)
def test_options_that_do_not_fit_the_axis_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        RunConfig(global_batch_size=8, steps=1, **options)


def test_a_model_that_does_not_split_its_tokens_is_refused() -> None:
    trainer = Trainer(
        model=partial(MLP, 4, (8,), 2),
        objective=lambda model, batch: {"loss": model(batch["x"]).sum(-1)},
        optimizer=optax.sgd(0.1),
        mesh=MeshSpec(data=2, context=4),
        terminal=Terminal(quiet=True),
    )
    batch = {"x": np.ones((8, 4), "f")}
    with pytest.raises(UserError, match="mesh axis context=4 is not used"):
        trainer.fit(batch, steps=1, global_batch_size=8)
    for function in (trainer.evaluate, trainer.predict):
        with pytest.raises(UserError, match="mesh axis context=4 is not used"):
            function(batch, global_batch_size=8)


# -- compiled programs -----------------------------------------------------------------------------


def gradients_of(
    mix: Callable[..., jax.Array], of: Placement | None, shape: tuple[int, ...], dtype: Any
) -> jax.stages.Compiled:
    """Compiles the gradients of attention, whose tokens are split if there is a placement."""
    sharding = None if of is None else of.sharding(PartitionSpec(None, "context"))
    one = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def loss(*arrays: jax.Array) -> jax.Array:
        return jnp.square(mix(*arrays).astype(jnp.float32)).sum()

    return jax.jit(jax.grad(loss, (0, 1, 2))).lower(one, one, one).compile()


def plain_ring(mesh: jax.sharding.Mesh, size: int) -> Callable[..., jax.Array]:
    """Returns a causal ring whose gradients JAX derives, so that it keeps keys of all devices."""

    def local(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        device, length = jax.lax.axis_index("context"), query.shape[1]
        of = Tokens(device * length + jnp.arange(length), None)
        pattern = Pattern(causal=True, window=None, scale=query.shape[3] ** -0.5)
        by_one = [(n, (n + 1) % size) for n in range(size)]

        def turn(carry: Any, number: jax.Array) -> tuple[Any, None]:
            mixed, key, value = carry
            to = Tokens((device - number) % size * length + jnp.arange(length), None)
            found = attend(query, key, value, of, to, pattern, every=False)
            key, value = (jax.lax.ppermute(x, "context", by_one) for x in (key, value))
            return (merge_mixed(mixed, found), key, value), None

        carry = (no_values(query), key, value)
        (mixed, *_), _ = jax.lax.scan(turn, carry, jnp.arange(size))
        return mixed.values

    split = PartitionSpec(None, "context")
    return jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)


@pytest.mark.nightly
def test_a_ring_takes_a_fiftieth_of_the_memory_of_whole_sequences() -> None:
    shape, of = (1, 8192, 8, 64), placement((1, 8, 1), "ring")
    causal = partial(attention, causal=True)
    whole = gradients_of(causal, None, shape, jnp.float32)
    with use_placement(of):
        ring = gradients_of(causal, of, shape, jnp.float32)
    assert of.mesh is not None
    derived = gradients_of(plain_ring(of.mesh, 8), of, shape, jnp.float32)
    memory: Any = [x.memory_analysis() for x in (ring, whole, derived)]
    took, of_whole, of_derived = (x.temp_size_in_bytes for x in memory)
    assert took <= of_whole / 50 and took <= of_derived / 4, (took, of_whole, of_derived)


def print_collectives_for_tpus() -> None:
    """Prints the kind, bytes and overlap of the collectives of a ring for each kind of TPU."""
    found = {}
    for name in ("v5e:2x4", "v5p:2x2x2"):
        with abstract_devices(devices_of(topologies.parse(name))):
            of = placement((1, 8, 1), "ring")
            with use_placement(of):
                text = gradients_of(
                    partial(attention, causal=True), of, (1, 2048, 8, 128), jnp.bfloat16
                ).as_text()
        assert text is not None
        assert of.mesh is not None
        found[name] = [(x.kind, x.bytes, x.overlapped) for x in collectives(text, of.mesh)]
    print(json.dumps(found))


@needs_libtpu
@pytest.mark.nightly
def test_for_tpus_a_ring_sends_while_it_computes_and_gathers_nothing() -> None:
    # In a process of its own, because programs for absent devices cannot be read from the cache.
    code = f"import {__name__}; {__name__}.print_collectives_for_tpus()"
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
    for of_chip in json.loads(ended.stdout.splitlines()[-1]).values():
        permutes = [overlapped for kind, _, overlapped in of_chip if kind == "collective-permute"]
        assert len(permutes) >= 8 and all(permutes), of_chip
        assert not [size for kind, size, _ in of_chip if kind == "all-gather" and size > 1e6]

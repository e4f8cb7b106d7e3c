"""Attention: the numbers of each implementation, on a mesh, and what a backward pass keeps."""

import functools
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
from jax.extend.core import Var
from jax.sharding import PartitionSpec
from plan_helpers import needs_libtpu
from step_helpers import check_equal, gradients, trainer

from spmdtrain import BATCH_AXES, FunctionModel, MeshSpec, Rule, UserError, attention, remat
from spmdtrain.config.options import CollectiveOptions, ShardingOptions
from spmdtrain.kernels.attention import describe_attention, keep_attention
from spmdtrain.kernels.reference import reference_kernels
from spmdtrain.plan import topologies
from spmdtrain.plan.topologies import compiler_environment, devices_of
from spmdtrain.sharding.mesh import abstract_devices, build_mesh
from spmdtrain.sharding.placement import Placement, use_placement
from spmdtrain.step.gradients import AllReduced
from spmdtrain.step.program import plan_step
from spmdtrain.strategies import strategy
from spmdtrain.xla.jaxpr import equations, inner_jaxprs


def placement(name: str, mesh: MeshSpec | None = None) -> Placement:
    of = strategy(name)
    return Placement(of, None if mesh is None else build_mesh(mesh, of))


def expected(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, mask: np.ndarray, scale: float
) -> np.ndarray:
    """Attention in float64; `mask` (B, T, S) is True where a token attends."""
    group = query.shape[2] // key.shape[2]
    key, value = (np.repeat(x, group, axis=2) for x in (key, value))
    scores = np.einsum("btnh,bsnh->bnts", query, key) * scale
    scores = np.where(mask[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("bnts,bsnh->btnh", weights / weights.sum(axis=-1, keepdims=True), value)


def mask_of(segments: np.ndarray, causal: bool, window: int | None) -> np.ndarray:
    at = np.arange(segments.shape[1])
    distance = at[:, None] - at
    seen = segments[:, :, None] == segments[:, None]
    seen = seen & (distance >= 0) if causal else seen
    return seen if window is None else seen & (np.abs(distance) < window)


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def some(length: int, heads: int, kv_heads: int, rows: int = 2, width: int = 8) -> list[np.ndarray]:
    """Queries, keys, values and segments."""
    arrays = [draw(rows, length, n, width, seed=n) for n in (heads, kv_heads)]
    documents = np.random.default_rng(3).integers(0, 2, (rows, length)).cumsum(axis=1) // 40
    return [*arrays, draw(rows, length, kv_heads, width, seed=9), documents]


def value_and_gradients(
    implementation: Any, query: Any, key: Any, value: Any, **options: Any
) -> dict[str, np.ndarray]:
    """Attention's output, and the gradients of its product with fixed numbers."""
    by = draw(*query.shape, seed=5)

    def total(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        mixed = attention(*arrays, implementation=implementation, **options)
        return (mixed * by).sum(), mixed

    run = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))
    (_, mixed), found = run(query, key, value)
    names = ("output", "query", "key", "value")
    return dict(zip(names, map(np.asarray, (mixed, *found)), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("segmented", [True, False])
def test_the_output_is_that_of_numpy(causal: bool, window: int | None, segmented: bool) -> None:
    query, key, value, segments = some(100, 4, 2)
    mixed = attention(
        *map(jnp.asarray, (query, key, value)),
        causal=causal,
        window=window,
        segments=jnp.asarray(segments) if segmented else None,
        scale=0.2,
    )
    mask = mask_of(segments if segmented else 0 * segments, causal, window)
    wanted = expected(query, key, value, mask, 0.2)
    np.testing.assert_allclose(mixed, wanted, rtol=1e-5, atol=1e-6)


def test_the_gradients_are_those_of_finite_differences() -> None:
    query, key, value, segments = some(12, 2, 1)
    options: dict[str, Any] = {"causal": True, "window": 5, "segments": segments}
    found = value_and_gradients(None, query, key, value, **options)
    mask, by = mask_of(segments, True, 5), draw(*query.shape, seed=5)
    for name, array in (("query", query), ("key", key), ("value", value)):
        direction, step = draw(*array.shape, seed=7), 1e-4
        moved = []
        for sign in (1, -1):
            arrays = {"query": query, "key": key, "value": value}
            arrays[name] = array.astype(np.float64) + sign * step * direction
            moved.append((expected(**arrays, mask=mask, scale=8**-0.5) * by).sum())
        slope = (moved[0] - moved[1]) / (2 * step)
        np.testing.assert_allclose((found[name] * direction).sum(), slope, rtol=1e-4)


# Number of key-value heads and options. The heads are four, "tensor" is 4: of two key-value heads
# each is of two devices, and three do not divide.
KERNEL_CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "causal": (4, {"causal": True}),
    "shared key-value heads, segments, window": (
        2,
        {"causal": True, "segments": True, "window": 70},
    ),
    "not causal, segments": (1, {"causal": False, "segments": True, "scale": 0.3}),
    "not causal, window": (4, {"causal": False, "window": 100}),
}
SHARDED = placement("tensor_parallel", MeshSpec(data=2, tensor=4))


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNEL_CASES)
def test_the_kernel_has_the_numbers_of_xla_on_a_mesh(name: str) -> None:
    kv_heads, options = KERNEL_CASES[name]
    query, key, value, segments = some(256, 4, kv_heads)
    options = options | ({"segments": segments} if options.get("segments") else {})
    with use_placement(SHARDED):
        found = value_and_gradients("splash", query, key, value, **options)
        check_equal(found, value_and_gradients("xla", query, key, value, **options), name)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 200])
def test_the_kernel_has_the_numbers_of_xla_in_several_blocks(window: int | None) -> None:
    query, key, value, _ = some(1152, 1, 1, rows=1)  # blocks of 384
    with use_placement(placement("default")):
        found = value_and_gradients("splash", query, key, value, causal=True, window=window)
        check_equal(
            found, value_and_gradients("xla", query, key, value, causal=True, window=window)
        )


@pytest.mark.nightly
@pytest.mark.slow
def test_a_batch_that_does_not_divide_is_computed_by_each_device() -> None:
    query, key, value, _ = some(128, 3, 3, rows=1)
    with use_placement(SHARDED):
        found = value_and_gradients("splash", query, key, value, causal=True)
        check_equal(found, value_and_gradients("xla", query, key, value, causal=True))


@pytest.mark.slow
def test_under_a_user_s_shard_map_over_the_batch_it_splits_the_heads() -> None:
    query, key, value, _ = map(jnp.asarray, some(128, 4, 2))
    rows = PartitionSpec(BATCH_AXES)
    mapped = jax.shard_map(
        partial(attention, causal=True, implementation="splash"),
        mesh=SHARDED.mesh,
        in_specs=rows,
        out_specs=rows,
        axis_names=set(BATCH_AXES),
        check_vma=False,
    )
    with use_placement(SHARDED):
        traced = jax.jit(mapped).trace(query, key, value)
        found = traced.lower().compile()(query, key, value)
    regions = [e for e in equations(traced.jaxpr.jaxpr) if e.primitive.name == "shard_map"]
    assert [e.params["newly_manual_axes"] for e in regions] == [
        {*BATCH_AXES},
        {"context", "tensor"},
    ]
    wanted = attention(query, key, value, causal=True)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


# -- in a run --------------------------------------------------------------------------------------

LENGTH, HEADS, WIDTH = 128, 4, 8
BATCH = 16
ROWS = tuple(draw(BATCH, LENGTH, HEADS * WIDTH, seed=seed) for seed in (0, 1))
SHAPES: Any = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), ROWS)
RULES = [Rule("", PartitionSpec(None, None, None, "tensor", None))]  # by heads


def init(key: jax.Array) -> jax.Array:
    return jax.random.normal(key, (2, 3, HEADS * WIDTH, HEADS, WIDTH)) / 6


def apply(implementation: Any, kernels: jax.Array, x: jax.Array) -> jax.Array:
    """Two blocks of attention, in a scan."""

    @remat
    def block(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, None]:
        heads = jnp.einsum("btd,cdnh->cbtnh", x, kernel)
        mixed = attention(*heads, causal=True, implementation=implementation)
        return x + jnp.tanh(mixed.reshape(x.shape)), None

    return jax.lax.scan(block, x, kernels)[0]


def squared_error(model: Any, batch: Any) -> dict[str, jax.Array]:
    x, y = batch
    return {"loss": optax.squared_error(model(x), y).mean(-1)}


def run_of(implementation: Any, **options: Any) -> Any:
    model = FunctionModel(init, partial(apply, implementation))
    given = {"model": model, "objective": squared_error, "global_batch_size": BATCH}
    return trainer(**given | options)


def kernels_in(jaxpr: Any) -> list[str]:
    """The kernels whose results a program uses; JAX leaves unused ones to XLA to remove."""
    found = []
    read = (*(x for e in jaxpr.eqns for x in e.invars), *jaxpr.outvars)
    used = {x for x in read if isinstance(x, Var)}
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call" and used.intersection(equation.outvars):
            found.append(str(equation.params["name"]))
        for inner in inner_jaxprs(equation):
            found += kernels_in(inner)
    return sorted(found)


FORWARD, BACKWARD = "splash_mha_fwd_residuals", "splash_mha_dkv_no_residuals"


@pytest.mark.slow
def test_with_attention_kept_the_kernel_runs_once_forward() -> None:
    of_policy = {}
    for policy in ("full", "attention", "dots", "dots_no_batch"):
        program = run_of("splash", remat=policy).trace_step(SHAPES).jaxpr.jaxpr
        of_policy[policy] = kernels_in(program)
    assert of_policy == {
        "full": [BACKWARD, FORWARD, FORWARD],
        **{policy: [BACKWARD, FORWARD] for policy in ("attention", "dots", "dots_no_batch")},
    }
    assert describe_attention(program, "tpu") == "attention: splash"
    assert describe_attention(program, "cpu") == ""
    other = jax.make_jaxpr(jax.named_call(jnp.sin, name="attention_norm"))(1.0)  # of the user's
    assert describe_attention(other.jaxpr, "tpu") == ""


def test_with_attention_kept_cudnn_runs_once_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    # Traced only: there is no GPU.
    h100 = SimpleNamespace(platform="gpu", device_kind="H100", compute_capability="9.0")
    monkeypatch.setattr("spmdtrain.kernels.attention.current_device", lambda: h100)
    version = SimpleNamespace(cudnn_get_version=lambda: 91000)
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.cuda_versions", version)

    def block(x: jax.Array) -> jax.Array:
        return jnp.tanh(attention(jnp.sin(x), x, x, causal=True)).astype(jnp.float32)

    def forward_kernels(policy: Any) -> int:
        part = jax.checkpoint(block, policy=policy)
        traced = jax.make_jaxpr(jax.grad(lambda x: part(x).sum()))(
            jnp.ones((2, 8, 4, 64), "bfloat16")
        )
        names = [equation.primitive.name for equation in equations(traced.jaxpr)]
        return sum(name.startswith("dot_product_attention_fwd") for name in names)

    assert forward_kernels(jax.checkpoint_policies.nothing_saveable) == 2
    assert forward_kernels(keep_attention) == 1


@functools.cache
def wanted() -> dict[str, np.ndarray]:
    return gradients(run_of("xla", strategy="default"), ROWS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("implementation", "options"),
    [
        ("xla", {"remat": "attention"}),
        pytest.param(  # flattened gradients: each device computes alone
            *("splash", {"remat": "attention"}),
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "splash",
            {
                "strategy": "hybrid",
                "mesh": MeshSpec(replica=2),
                "collectives": CollectiveOptions(reduction="hierarchical"),
                "microbatches": 2,
            },
            marks=pytest.mark.nightly,
        ),
        ("splash", {"strategy": "fully_sharded", "sharding": ShardingOptions(min_size=1)}),
        pytest.param(
            "splash",
            {
                "strategy": "tensor_parallel",
                "mesh": MeshSpec(data=4, tensor=2),
                "rules": RULES,
                "remat": "attention",
            },
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["xla", "mirrored", "hybrid", "fully_sharded", "tensor_parallel"],
)
def test_a_step_has_the_gradients_of_xla_without_remat(
    implementation: Any, options: dict[str, Any]
) -> None:
    of = run_of(implementation, **options)
    check_equal(gradients(of, ROWS), wanted())
    # A kernel cannot be analyzed: the checks of the reduction read XLA's implementation.
    rule = plan_step(of.functions, ROWS).rule
    assert isinstance(rule, AllReduced) == (of.placement.name in ("mirrored", "hybrid"))


def test_checks_of_a_model_see_its_mathematics() -> None:
    query, key, value, _ = some(128, 1, 1)

    def primitives() -> set[str]:
        traced = jax.make_jaxpr(partial(attention, causal=True, implementation="splash"))
        return {e.primitive.name for e in equations(traced(query, key, value).jaxpr)}

    with use_placement(placement("default")):
        assert "pallas_call" in primitives()
        with reference_kernels():
            assert "pallas_call" not in primitives()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: attention(q[:, 0], k, v, causal=True), r"shapes must be \(B, T, heads"),
        (lambda q, k, v: attention(q, k[:, :, :3], v[:, :, :3], causal=True), "4 query heads do"),
        (lambda q, k, v: attention(q, k, v, causal=True, window=0), "window is 0: it must be 1"),
        (lambda q, k, v: attention(q[:, :5], k, v, causal=True, window=2), "5 queries and 9 keys"),
        (lambda q, k, v: attention(q, k, v, causal=True, segments=q[..., 0, 0]), "float32"),
        (lambda q, k, v: attention(q, k.astype("bfloat16"), v, causal=True), "the same dtype"),
        (lambda q, k, v: attention(q, k, v, causal=True, implementation="cudnn"), "NVIDIA"),
        (lambda q, k, v: attention(*(x.astype(int) for x in (q, k, v)), causal=True), "query is i"),
        (lambda q, k, v: attention(q, k[:, :, :0], v[:, :, :0], causal=True), "over 0 key-value"),
    ],
)
def test_arguments_that_do_not_fit_are_errors(
    change: Callable[..., jax.Array], message: str
) -> None:
    query = jnp.zeros((2, 9, 4, 8))
    with pytest.raises(UserError, match=message):
        change(query, query, query)


# -- for TPUs that are not there -------------------------------------------------------------------


STRATEGIES: dict[str, dict[str, Any]] = {
    "mirrored": {},
    "fully_sharded": {"sharding": ShardingOptions(min_size=1)},
    "tensor_parallel": {"mesh": MeshSpec(data=2, tensor=2), "rules": RULES},
}
TOPOLOGY = topologies.parse("v5e:2x2")


def print_kernels_for_tpus() -> None:
    """Prints the number of kernels of the compiled step by strategy, and their names in the log."""
    found = {}
    with abstract_devices(devices_of(TOPOLOGY)):
        for name, options in STRATEGIES.items():
            of = run_of(None, strategy=name, remat="attention", compilation_cache="off", **options)
            traced = of.trace_step(SHAPES)
            text = traced.lower().compile().as_text()
            calls = text.count('custom_call_target="tpu_custom_call"')
            found[name] = (calls, describe_attention(traced.jaxpr.jaxpr, "tpu"))
    print(json.dumps(found))


@needs_libtpu
@pytest.mark.slow
def test_a_step_for_tpus_contains_the_kernel_once_forward_and_once_backward() -> None:
    # In a process of its own, because programs for absent devices cannot be read from the cache.
    code = f"import {__name__}; {__name__}.print_kernels_for_tpus()"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(8) | compiler_environment(TOPOLOGY) | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=BOUND,
    )
    assert ended.returncode == 0, ended.stderr
    expected = [2, "attention: splash"]
    assert json.loads(ended.stdout.splitlines()[-1]) == dict.fromkeys(STRATEGIES, expected)

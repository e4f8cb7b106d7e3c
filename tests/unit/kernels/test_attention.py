"""Attention: the numbers of each implementation, on a mesh, and what a backward pass keeps."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from plan_helpers import needs_libtpu
from step_helpers import check_equal, gradients, trainer

from spmdtrain import FunctionModel, MeshSpec, UserError, attention, remat
from spmdtrain.config.option_groups import CollectiveOptions
from spmdtrain.kernels.attention import describe_attention
from spmdtrain.kernels.reference import reference_kernels
from spmdtrain.sharding.mesh import build_mesh
from spmdtrain.sharding.placement import Placement, use_placement
from spmdtrain.strategies import strategy
from spmdtrain.xla.jaxpr import equations


def placement(name: str, **sizes: int) -> Placement:
    of = strategy(name)
    return Placement(of, build_mesh(MeshSpec(**sizes), of) if of.has_mesh else None)


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


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("segmented", [True, False])
def test_the_output_is_that_of_numpy(causal: bool, window: int | None, segmented: bool) -> None:
    query, key, value, segments = some(100, 4, 2)
    mixed = attention(
        *(query, key, value),
        causal=causal,
        window=window,
        segments=segments if segmented else None,
        scale=0.2,
    )
    mask = mask_of(segments if segmented else 0 * segments, causal, window)
    wanted = expected(query, key, value, mask, 0.2)
    np.testing.assert_allclose(mixed, wanted, rtol=1e-5, atol=1e-6)


def test_the_gradients_are_those_of_finite_differences() -> None:
    query, key, value, segments = some(12, 2, 1)
    options: dict[str, Any] = {"causal": True, "window": 5, "segments": segments // 1}
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
SHARDED = placement("tensor_parallel", data=2, tensor=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNEL_CASES)
@pytest.mark.parametrize("place", [placement("default"), SHARDED], ids=["one device", "mesh"])
def test_the_kernel_has_the_numbers_of_xla(name: str, place: Placement) -> None:
    kv_heads, options = KERNEL_CASES[name]
    query, key, value, segments = some(256, 4, kv_heads)
    options = options | ({"segments": segments} if options.get("segments") else {})
    with use_placement(place):
        found = value_and_gradients("splash", query, key, value, **options)
        check_equal(found, value_and_gradients("xla", query, key, value, **options), name)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 200])
def test_the_kernel_has_the_numbers_of_xla_in_several_blocks(window: int | None) -> None:
    query, key, value, _ = some(1152, 1, 1, rows=1)  # blocks of 384
    with use_placement(placement("default")):
        found = value_and_gradients("splash", query, key, value, causal=True, window=window)
        wanted = value_and_gradients("xla", query, key, value, causal=True, window=window)
        check_equal(found, wanted)


def test_a_batch_that_does_not_divide_is_computed_by_each_device() -> None:
    query, key, value, _ = some(128, 3, 3, rows=1)
    with use_placement(SHARDED):
        found = value_and_gradients("splash", query, key, value, causal=True)
        check_equal(found, value_and_gradients("xla", query, key, value, causal=True))


# -- in a run --------------------------------------------------------------------------------------

LENGTH, HEADS, WIDTH = 128, 4, 8
ROWS = (draw(8, LENGTH, HEADS * WIDTH), draw(8, LENGTH, HEADS * WIDTH, seed=1))


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
    given = {"model": model, "objective": squared_error, "global_batch_size": 8}
    return trainer(**given | options)


def kernels_in(of: Any) -> list[str]:
    """The kernels of a train step by name."""
    shapes = jax.eval_shape(lambda: ROWS)
    program = of.trace_step(shapes).jaxpr.jaxpr
    calls = [e for e in equations(program) if e.primitive.name == "pallas_call"]
    return sorted(str(call.params["name"]) for call in calls)


FORWARD, BACKWARD = "splash_mha_fwd_residuals", "splash_mha_dkv_no_residuals"


def test_with_attention_kept_the_kernel_runs_once_forward() -> None:
    step = run_of("splash", remat="attention")
    assert kernels_in(step) == [BACKWARD, FORWARD]
    assert kernels_in(run_of("splash", remat="full")) == [BACKWARD, *[FORWARD] * 2]
    program = step.trace_step(jax.eval_shape(lambda: ROWS)).jaxpr.jaxpr
    assert describe_attention(program, "tpu") == "attention: splash"
    assert describe_attention(program, "cpu") == ""


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["xla", "splash"])
def test_remat_of_all_but_attention_changes_no_number(implementation: Any) -> None:
    wanted = gradients(run_of("xla", strategy="default"), ROWS)
    check_equal(gradients(run_of(implementation, remat="attention"), ROWS), wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},  # flattened gradients: each device computes under `shard_map`
        {"strategy": "hybrid", "mesh": MeshSpec(replica=2)},
        {"collectives": CollectiveOptions(reduction="hierarchical"), "microbatches": 2},
        {"collectives": CollectiveOptions(reduction="automatic")},
        {"strategy": "fully_sharded", "sharding": None},
        {"strategy": "tensor_parallel", "mesh": MeshSpec(data=4, tensor=2)},
    ],
    ids=str,
)
def test_a_step_with_the_kernel_has_the_gradients_of_xla(options: dict[str, Any]) -> None:
    wanted = gradients(run_of("xla", strategy="default"), ROWS)
    options = {name: value for name, value in options.items() if value is not None}
    of = run_of("splash", **options)
    check_equal(gradients(of, ROWS), wanted)
    # The checks of the reduction read the model without its kernel.
    flattens = of.config.strategy in ("mirrored", "hybrid") and "collectives" not in options
    assert (of.functions.reduction is not None) == (flattens or "microbatches" in options)


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
    ],
)
def test_arguments_that_do_not_fit_are_errors(
    change: Callable[..., jax.Array], message: str
) -> None:
    query = jnp.zeros((2, 9, 4, 8))
    with pytest.raises(UserError, match=message):
        change(query, query, query)


# -- for TPUs that are not there -------------------------------------------------------------------


@needs_libtpu
@pytest.mark.slow
def test_for_tpus_a_step_contains_the_kernel() -> None: ...

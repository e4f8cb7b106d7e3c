"""FLOPs of what ships, of Pallas kernels and of the model that they implement."""

import itertools
import math
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import DIGITS, GPT
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, PartitionSpec

from spmdtrain import Trainer
from spmdtrain.config.experiment import load_experiment
from spmdtrain.kernels.reference import uses_reference
from spmdtrain.models import MobileNetV2, mobilenet
from spmdtrain.sharding.mesh import resolve
from spmdtrain.step.flops import CostBasis, Flops, count_flops, model_flops
from spmdtrain.xla.hlo import RARE_BRANCH


def traced(file: Path, **options: Any) -> Flops:
    """What the train step of an experiment computes, on one device."""
    found = load_experiment(str(file), frozenset())
    config = found.config_class(strategy="default", **options)
    experiment = found.build(resolve(config, batch_shards=1))
    trainer = Trainer.from_experiment(experiment, config)
    rows = experiment.train.rows(np.arange(config.global_batch_size or 0))
    return count_flops(trainer.trace_step(rows).jaxpr)


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 4])
def test_an_mlp(microbatches: int) -> None:
    sizes = [64, 48, 32, 10]
    found = traced(DIGITS, hidden=(48, 32), microbatches=microbatches)
    forward = sum(2 * 64 * a * b for a, b in itertools.pairwise(sizes))
    # Backward: for each layer one for its weights and, but for the first, one for its input.
    assert found.total == 3 * forward - 2 * 64 * sizes[0] * sizes[1]
    assert sum(found.by_line.values()) == found.total
    assert all("layers.py:" in line for line in found.by_line)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("remat", "unroll", "microbatches"),
    [("none", True, 1), ("none", False, 1), ("none", False, 2), ("full", False, 1)],
)
def test_a_transformer(text: Path, remat: str, unroll: bool, microbatches: int) -> None:
    layers, width, context, batch, rows = 3, 64, 32, 8, 64
    found = traced(
        GPT,
        data_dir=str(text.parent),
        layers=layers,
        width=width,
        length=context,
        global_batch_size=batch,
        remat=remat,
        unroll=unroll,
        microbatches=microbatches,
    )
    tokens = batch * context
    block = 2 * tokens * 12 * width**2 + 4 * tokens * context * width  # with attention's products
    logits = 2 * tokens * width * rows
    expected = layers * 3 * block + 3 * logits
    if (
        remat == "full"
    ):  # once more, but for the last product, which the backward pass does not need
        expected += layers * (block - 2 * tokens * 4 * width**2)
    assert math.isclose(found.total, expected, rel_tol=0.02)
    assert found.unknown_loops == []
    assert not found.has_reference  # on CPU these products are the model's: no second trace


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "input.txt"
    path.write_text("".join(f"{i} green bottles, hanging on the wall\n" for i in range(200)))
    return path


@pytest.mark.slow
def test_mobilenet_as_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """300 million multiply-adds for a picture of 224 x 224 (Sandler et al., table 4)."""

    def forward(x: jax.Array) -> Any:
        return MobileNetV2(1000, rngs=nnx.Rngs(0))(x)

    # On CPU depthwise convolutions are sums of pictures, and no products.
    there = SimpleNamespace(platform="tpu")
    monkeypatch.setattr(mobilenet, "current_device", lambda: there)
    found = count_flops(jax.make_jaxpr(forward)(jnp.zeros((1, 224, 224, 3))))
    assert math.isclose(found.total, 2 * 300e6, rel_tol=0.02)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("groups", [1, 8])
def test_the_gradient_of_a_convolution_takes_twice_the_convolution(
    stride: int, groups: int
) -> None:
    x, kernel = jnp.ones((4, 16, 16, 8)), jnp.ones((3, 3, 8 // groups, 16))

    def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
        found = lax.conv_general_dilated(
            x,
            kernel,
            (stride, stride),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )
        return found.sum()

    forward = 2 * 4 * (16 // stride) ** 2 * 16 * 9 * 8 // groups
    assert count_flops(jax.make_jaxpr(convolve)(x, kernel)).total == forward
    both = count_flops(jax.make_jaxpr(jax.value_and_grad(convolve, argnums=(0, 1)))(x, kernel))
    assert both.total == 3 * forward


W = jnp.ones((8, 8))
ONE = 2 * 8**3


def twice(x: jax.Array) -> jax.Array:
    return W @ (W @ x)


def rarely(x: Any) -> Any:
    with jax.named_scope(RARE_BRANCH):
        return W @ x


@pytest.mark.parametrize(
    ("function", "products"),
    [
        (lambda x: lax.scan(lambda c, _: (W @ c, None), x, length=7)[0], 7),
        (lambda x: lax.fori_loop(0, 5, lambda _, c: W @ c, x), 5),
        (lambda x: lax.cond(x.sum() > 0, twice, lambda x: x, x), 2),
        (lambda x: lax.cond(x.sum() > 0, lambda x: W @ x, twice, x), 2),
        (lambda x: lax.cond(x.sum() > 0, rarely, lambda x: x, x), 0),
        (lambda x: lax.cond(x.sum() > 0, rarely, rarely, x), 1),
        (lambda x: jax.checkpoint(twice)(x), 2),
        (lambda x: jax.jit(jax.vmap(lambda row: W @ row))(x), 1),
    ],
)
def test_loops_and_branches(function: Any, products: int) -> None:
    assert count_flops(jax.make_jaxpr(function)(jnp.ones((8, 8)))).total == products * ONE


@pytest.mark.parametrize("argnums", [(0,), (1,), (0, 1)])
def test_the_gradient_of_a_ragged_dot_takes_twice_the_dot(argnums: tuple[int, ...]) -> None:
    rows, matrices, sizes = jnp.ones((8, 16)), jnp.ones((4, 16, 32)), jnp.array([2, 2, 1, 3])

    def dot(rows: jax.Array, matrices: jax.Array) -> jax.Array:
        return lax.ragged_dot(rows, matrices, sizes).sum()

    forward = 2 * 8 * 16 * 32
    assert count_flops(jax.make_jaxpr(dot)(rows, matrices)).total == forward
    found = count_flops(jax.make_jaxpr(jax.value_and_grad(dot, argnums))(rows, matrices))
    assert found.total == (1 + len(argnums)) * forward


@pytest.mark.slow
@pytest.mark.parametrize(
    ("microbatches", "remat"),
    [(1, "none"), pytest.param(2, "full", marks=pytest.mark.nightly)],
)
def test_training_mobilenet(
    monkeypatch: pytest.MonkeyPatch, microbatches: int, remat: Literal["none", "full"]
) -> None:
    there = SimpleNamespace(platform="tpu")
    monkeypatch.setattr(mobilenet, "current_device", lambda: there)

    def objective(model: Any, batch: Any) -> dict[str, jax.Array]:
        return {"loss": model(batch["image"]).sum(-1)}

    trainer = Trainer(
        model=lambda rngs: MobileNetV2(1000, rngs=rngs),
        objective=objective,
        optimizer=optax.sgd(0.1),
        microbatches=microbatches,
        remat=remat,
        global_batch_size=2,
        strategy="default",
    )
    found = count_flops(trainer.trace_step({"image": np.zeros((2, 224, 224, 3), np.float32)}).jaxpr)
    forward, first = 2 * 2 * 300e6, 2 * 2 * 112 * 112 * 32 * 27  # whose input has no gradient
    expected = 3 * forward - first + (forward if remat == "full" else 0)
    assert math.isclose(found.total, expected, rel_tol=0.02)


def test_under_shard_map_each_device_counts() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    spec = PartitionSpec("data")
    mapped = jax.shard_map(lambda x: x @ W, mesh=mesh, in_specs=spec, out_specs=spec)
    assert count_flops(jax.make_jaxpr(mapped)(jnp.ones((32, 8)))).total == 4 * ONE


def test_operations_of_a_library_alone_have_its_line() -> None:
    layer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    with ThreadPoolExecutor() as pool:  # whose stack has no line of this file
        found = count_flops(pool.submit(jax.make_jaxpr(layer), jnp.ones((8, 8))).result())
    assert found.total == found.float32 == ONE
    (line,) = found.by_line
    assert re.search(r"linear\.py:\d+ \(.*\), in a library$", line)


def test_a_loop_of_unknown_trip_count_is_named() -> None:
    def search(x: jax.Array) -> Any:
        return lax.while_loop(lambda c: c.sum() < 100, lambda c: W @ c, x)

    found = count_flops(jax.make_jaxpr(search)(jnp.ones((8, 8))))
    assert found.total == ONE
    assert [line.partition(" (")[0].split(":")[0] for line in found.unknown_loops] == [__file__]


# -- Pallas kernels, and the model that they implement ---------------------------------------------

BLOCK, BLOCKS, WIDTH = 128, 4, 64
ONE_BLOCK = 2 * BLOCK * BLOCK * WIDTH  # operations of one block of scores
ROWS = jax.ShapeDtypeStruct((BLOCK * BLOCKS, WIDTH), jnp.float32)


def scores(q: Any, k: Any, out: Any, *, causal: bool) -> None:
    i, j = pl.program_id(0), pl.program_id(1)

    @pl.when(j <= i if causal else True)
    def _() -> None:
        out[...] = q[...] @ k[...].T


def call(q: jax.Array, k: jax.Array, rows: Any = BLOCKS, **options: Any) -> jax.Array:
    causal = options.pop("causal", False)
    return pl.pallas_call(
        lambda q, k, out: scores(q, k, out, causal=causal),
        grid=(rows, BLOCKS),
        in_specs=[
            pl.BlockSpec((BLOCK, WIDTH), lambda i, j: (i, 0)),
            pl.BlockSpec((BLOCK, WIDTH), lambda i, j: (j, 0)),
        ],
        out_specs=pl.BlockSpec((BLOCK, BLOCK), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((BLOCK * BLOCKS, BLOCK * BLOCKS), jnp.float32),
        name="scores",
        **options,
    )(q, k)


def test_a_kernel_counts_its_body_at_each_point_of_its_grid() -> None:
    found = count_flops(jax.make_jaxpr(call)(ROWS, ROWS))
    assert found.total == BLOCKS * BLOCKS * ONE_BLOCK
    (kernel,) = found.kernels
    assert (kernel.name, kernel.basis) == ("scores", CostBasis.BODY)
    assert kernel.line.startswith(__file__)
    assert kernel.padded == 2 * found.total  # 64 of the 128 rows of the matrix unit are used
    # Each turn of the outer dim reads all blocks of k again.
    assert kernel.passes == (1, BLOCKS, 1)


def test_blocks_that_a_causal_kernel_skips_do_not_count_also_under_vmap() -> None:
    causal = count_flops(jax.make_jaxpr(lambda q, k: call(q, k, causal=True))(ROWS, ROWS))
    assert causal.total == 10 * ONE_BLOCK  # 4 + 3 + 2 + 1 blocks
    batch = jax.ShapeDtypeStruct((3, *ROWS.shape), ROWS.dtype)
    mapped = jax.vmap(lambda q, k: call(q, k, causal=True))
    assert count_flops(jax.make_jaxpr(mapped)(batch, batch)).total == 3 * 10 * ONE_BLOCK


def test_blocks_that_a_table_of_the_mask_excludes_do_not_count() -> None:
    """The table reaches the kernel as splash attention's: through inner functions and a scan."""
    table = np.tri(BLOCKS, dtype=np.int8)

    def kernel(table: Any, q: Any, k: Any, out: Any) -> None:
        @pl.when(table[pl.program_id(0), pl.program_id(1)] > 0)
        def _() -> None:
            out[...] = q[...] @ k[...].T

    @jax.jit
    def masked(table: jax.Array, q: jax.Array, k: jax.Array) -> jax.Array:
        return pl.pallas_call(
            kernel,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(BLOCKS, BLOCKS),
                in_specs=[
                    pl.BlockSpec((BLOCK, WIDTH), lambda i, j, table: (i, 0)),
                    pl.BlockSpec((BLOCK, WIDTH), lambda i, j, table: (j, 0)),
                ],
                out_specs=pl.BlockSpec((BLOCK, BLOCK), lambda i, j, table: (i, j)),
            ),
            out_shape=jax.ShapeDtypeStruct((BLOCK * BLOCKS, BLOCK * BLOCKS), jnp.float32),
        )(table, q, k)

    def layers(q: jax.Array, k: jax.Array) -> jax.Array:
        constant = jnp.asarray(table)
        return jax.lax.scan(lambda q, _: (masked(constant, q, k)[:, :WIDTH], None), q, length=5)[0]

    assert count_flops(jax.make_jaxpr(layers)(ROWS, ROWS)).total == 5 * 10 * ONE_BLOCK


def test_blocks_of_a_table_are_read_again_and_unblocked_arrays_are_unknown() -> None:
    """The table gives the number of the block of k at each point of the grid."""
    chosen = np.array([[0, 0, 1, 1], [2, 2, 2, 2], [0, 0, 0, 0], [0, 3, 3, 3]], np.int32)

    def kernel(table: Any, q: Any, k: Any, rest: Any, out: Any) -> None:
        out[...] = q[...] @ k[...].T

    def run(table: jax.Array, q: jax.Array, k: jax.Array) -> jax.Array:
        return pl.pallas_call(
            kernel,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(BLOCKS, BLOCKS),
                in_specs=[
                    pl.BlockSpec((BLOCK, WIDTH), lambda i, j, table: (i, 0)),
                    pl.BlockSpec((BLOCK, WIDTH), lambda i, j, table: (table[i, j], 0)),
                    pl.BlockSpec(memory_space=pl.ANY),
                ],
                out_specs=pl.BlockSpec((BLOCK, BLOCK), lambda i, j, table: (i, 0)),
            ),
            out_shape=jax.ShapeDtypeStruct((BLOCK * BLOCKS, BLOCK), jnp.float32),
        )(table, q, k, q)

    table = jnp.asarray(chosen)
    (known,) = count_flops(jax.make_jaxpr(lambda q, k: run(table, q, k))(ROWS, ROWS)).kernels
    reads_of_k = 5  # 0, 1, 2, 0, 3, of 4 blocks
    assert known.passes == (1, 1, reads_of_k / 4, None, 1)
    (unknown,) = count_flops(jax.make_jaxpr(run)(table, ROWS, ROWS)).kernels
    assert unknown.passes == (1, 1, None, None, 1)


def test_a_kernel_on_named_units_of_a_device() -> None:
    """Of Mosaic GPU; its matrix instructions are unknown without a cost estimate."""

    def add(x: Any, y: Any, out: Any) -> None:
        out[...] = x[...] + y[...]

    def call_with(**options: Any) -> Any:
        mesh = plgpu.Mesh(grid=(2,), grid_names=("x",))
        kernel = pl.kernel(add, out_type=ROWS, mesh=mesh, **options)
        return count_flops(jax.make_jaxpr(kernel)(ROWS, ROWS))

    cost = pl.CostEstimate(flops=1234, bytes_accessed=99, transcendentals=0)
    (stated,) = call_with(cost_estimate=cost).kernels
    assert (stated.flops, stated.basis, stated.stated_bytes) == (1234, CostBasis.STATED, 99)
    assert stated.results == (ROWS.shape,) and stated.passes == (None,) * 3
    (plain,) = call_with().kernels
    assert (plain.flops, plain.basis) == (0, CostBasis.BODY)


def test_a_stated_cost_counts_instead() -> None:
    cost = pl.CostEstimate(flops=1234, bytes_accessed=0, transcendentals=0)
    found = count_flops(jax.make_jaxpr(lambda q, k: call(q, k, cost_estimate=cost))(ROWS, ROWS))
    assert found.total == 1234
    assert (found.kernels[0].basis, found.kernels[0].padded) == (CostBasis.STATED, 2 * 1234)


def test_a_grid_of_unknown_size_is_counted_once_and_reported() -> None:
    found = count_flops(jax.make_jaxpr(lambda q, k, n: call(q, k, rows=n))(ROWS, ROWS, 3))
    assert found.total == BLOCKS * ONE_BLOCK
    assert found.kernels[0].unknown_grid


def test_the_model_is_counted_by_its_reference() -> None:
    """A kernel that computes the scores a second time in the backward pass, and skips some."""

    def attention(q: jax.Array, k: jax.Array) -> jax.Array:
        return q @ k.T if uses_reference() else call(q, k, causal=True)

    def trace() -> Any:
        return jax.make_jaxpr(lambda q, k: attention(q, k))(ROWS, ROWS)

    jaxpr = trace()
    assert count_flops(jaxpr).total == 10 * ONE_BLOCK
    found = model_flops(jaxpr, trace)
    assert (found.once, found.kernels) == (16 * ONE_BLOCK, [])

    def dense() -> Any:
        raise AssertionError("a step without kernels is not traced again")

    plain = jax.make_jaxpr(lambda q, k: q @ k.T)(ROWS, ROWS)
    assert model_flops(plain, dense).once == 16 * ONE_BLOCK

"""FLOPs of Pallas kernels, and of the model that they implement."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from spmdtrain.kernels.reference import uses_reference
from spmdtrain.step.flops import CostBasis, count_flops, model_flops

BLOCK, BLOCKS, WIDTH = 128, 4, 64
ONE = 2 * BLOCK * BLOCK * WIDTH  # operations of one block of scores
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
    assert found.total == BLOCKS * BLOCKS * ONE
    (kernel,) = found.kernels
    assert (kernel.name, kernel.basis) == ("scores", CostBasis.BODY)
    assert kernel.line.startswith(__file__)
    assert kernel.padded == 2 * found.total  # 64 of the 128 rows of the matrix unit are used
    # Each turn of the outer dim reads all blocks of k again.
    assert kernel.passes == (1, BLOCKS, 1)


def test_blocks_that_a_causal_kernel_skips_do_not_count_also_under_vmap() -> None:
    causal = count_flops(jax.make_jaxpr(lambda q, k: call(q, k, causal=True))(ROWS, ROWS))
    assert causal.total == 10 * ONE  # 4 + 3 + 2 + 1 blocks
    batch = jax.ShapeDtypeStruct((3, *ROWS.shape), ROWS.dtype)
    mapped = jax.vmap(lambda q, k: call(q, k, causal=True))
    assert count_flops(jax.make_jaxpr(mapped)(batch, batch)).total == 3 * 10 * ONE


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

    assert count_flops(jax.make_jaxpr(layers)(ROWS, ROWS)).total == 5 * 10 * ONE


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
    assert found.total == BLOCKS * ONE
    assert found.kernels[0].unknown_grid


def test_the_model_is_counted_by_its_reference() -> None:
    """A kernel that computes the scores a second time in the backward pass, and skips some."""

    def attention(q: jax.Array, k: jax.Array) -> jax.Array:
        return q @ k.T if uses_reference() else call(q, k, causal=True)

    def trace() -> Any:
        return jax.make_jaxpr(lambda q, k: attention(q, k))(ROWS, ROWS)

    jaxpr = trace()
    assert count_flops(jaxpr).total == 10 * ONE
    found = model_flops(jaxpr, trace)
    assert (found.once, found.kernels) == (16 * ONE, [])

    def dense() -> Any:
        raise AssertionError("a step without kernels is not traced again")

    plain = jax.make_jaxpr(lambda q, k: q @ k.T)(ROWS, ROWS)
    assert model_flops(plain, dense).once == 16 * ONE

"""Products of rows, which are sorted by group, with the matrices of their groups."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from spmdtrain.kernels.varying import varying_alike
from spmdtrain.sharding.placement import current_device, current_mesh


@dataclass(frozen=True)
class _Limits:
    """The sizes at which products of blocks take less time than of all rows with each matrix.

    These are the least number of groups, and the least and most rows of a block.
    """

    groups: int
    least: int
    most: int


# A GPU copies the matrix of each block, which takes as long as some hundred rows' products.
_LIMITS = {"cpu": _Limits(2, 8, 128), "gpu": _Limits(4, 64, 1024), "tpu": _Limits(2, 8, 1024)}
GATHERED_BYTES = 256 * 1024**2
"""About the bytes of the matrices that a GPU gathers for some blocks at once."""


def grouped_product(rows: jax.Array, kernel: jax.Array, counts: jax.Array) -> jax.Array:
    """Returns each row times the matrix of its group, (rows, out).

    On CPU and GPUs, XLA computes `jax.lax.ragged_dot` as a product of all rows with each matrix.
    Products of blocks of rows have about as many operations as the rows need. On TPUs, XLA has a
    kernel for `ragged_dot`, but not for the gradient of the matrices, which is computed from blocks
    there.

    Args:
      rows: (rows, in), sorted by group.
      kernel: (groups, in, out).
      counts: int (groups,), the number of rows of each group. The results of rows beyond their sum
        are not specified, and their cotangents must be 0.
    """
    rows, kernel, counts = varying_alike((rows, kernel, counts))
    platform = current_device().platform
    size = _block_size(len(rows), len(kernel), platform)
    if size is None or (platform == "tpu" and _over_tensor()):
        return jax.lax.ragged_dot(rows, kernel, counts)
    if platform == "cpu":
        return _by_blocks(rows, kernel, counts, size)
    return _on_accelerator(platform, size, rows, kernel, counts)


def _over_tensor() -> bool:
    """Returns whether "tensor" splits arrays: XLA would gather all rows again for each block."""
    over = current_mesh()
    return over is not None and over.parts("tensor") > 1


def _block_size(rows: int, groups: int, platform: str) -> int | None:
    """Returns about half of the rows of a group, so that few blocks have rows of two groups.

    It is a multiple of 8. It is None if products of blocks would take longer, or on a platform
    where this is not known.
    """
    if (limits := _LIMITS.get(platform)) is None:
        return None
    size = min(limits.most, rows // (2 * groups) // 8 * 8)
    return size if groups >= limits.groups and size >= limits.least else None


@dataclass(frozen=True)
class _Pairs:
    """Pairs of a block of rows and a group that has rows in it, in the order of the rows.

    Rows of several groups meet in a block only where one group ends and the next one begins, so
    there are at most as many pairs as blocks and groups together.

    Attributes:
      group: int (pairs,). After the last pair, entries have the last group, and no rows.
      block: int (pairs,).
      own: bool (pairs, size), whether a row of the block belongs to the group.
      first: int (groups,), the number of each group's first pair.
      first_block: int (groups,), the block of that pair.
    """

    group: jax.Array
    block: jax.Array
    own: jax.Array
    first: jax.Array
    first_block: jax.Array

    @classmethod
    def of(cls, counts: jax.Array, blocks: int, size: int, batches: int = 1) -> "_Pairs":
        """Returns the pairs of `blocks` blocks of `size` rows.

        Empty pairs are added to make their number a multiple of `batches`.
        """
        groups = len(counts)
        ends = jnp.cumsum(counts)
        starts = ends - counts
        first_block = starts // size
        pairs = jnp.where(counts > 0, (ends - 1) // size - first_block + 1, 0)
        ends_of_pairs = jnp.cumsum(pairs)
        first = ends_of_pairs - pairs

        pair = jnp.arange(-(-(blocks + groups - 1) // batches) * batches, dtype=jnp.int32)
        group = jnp.minimum(
            (pair[:, None] >= ends_of_pairs[None]).sum(-1, dtype=jnp.int32), groups - 1
        )
        block = first_block[group] + pair - first[group]
        row = block[:, None] * size + jnp.arange(size, dtype=jnp.int32)[None]
        own = (row >= starts[group, None]) & (row < ends[group, None])
        return cls(group, jnp.minimum(block, blocks - 1), own, first, first_block)


def _by_blocks(
    rows: jax.Array, kernel: jax.Array, counts: jax.Array, size: int, batches: int = 1
) -> jax.Array:
    """Returns the products, computed for blocks of `size` rows with each matrix that its rows need.

    The shapes are as in `grouped_product`. The products are computed in `batches` steps, each with
    copies of its matrices.
    """
    padded, kernel = _blocks(rows, size), jnp.asarray(kernel)
    pairs = _Pairs.of(counts, len(padded), size, batches)

    def product(pair: tuple[jax.Array, ...]) -> jax.Array:
        group, block, own = pair
        return jnp.where(own[:, None], padded[block], 0) @ kernel[group]

    each = pairs.group, pairs.block, pairs.own
    if batches == 1:
        products = jax.vmap(product)(each)
    else:
        products = jax.lax.map(product, each, batch_size=len(pairs.group) // batches)

    number, groups = jnp.arange(len(rows), dtype=jnp.int32), len(kernel)
    of_row = jnp.minimum(
        (number[:, None] >= jnp.cumsum(counts)[None]).sum(-1, dtype=jnp.int32), groups - 1
    )
    place = pairs.first[of_row] + number // size - pairs.first_block[of_row]
    return products[jnp.clip(place, 0, len(pairs.group) - 1), number % size]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _on_accelerator(
    platform: str, size: int, rows: jax.Array, kernel: jax.Array, counts: jax.Array
) -> jax.Array:
    """Returns the products. The gradient of the matrices is computed from blocks of `size`."""
    if platform == "tpu":
        return jax.lax.ragged_dot(rows, kernel, counts)
    pairs = -(-len(rows) // size) + len(kernel) - 1
    batches = -(-pairs // max(1, GATHERED_BYTES // kernel[0].nbytes))
    return _by_blocks(rows, kernel, counts, size, batches)


def _forward(
    platform: str, size: int, rows: jax.Array, kernel: jax.Array, counts: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    return _on_accelerator(platform, size, rows, kernel, counts), (rows, kernel, counts)


def _backward(
    platform: str,
    size: int,
    kept: tuple[jax.Array, jax.Array, jax.Array],
    gradient: jax.Array,
) -> tuple[jax.Array, jax.Array, None]:
    rows, kernel, counts = kept
    of_rows = _on_accelerator(platform, size, gradient, kernel.swapaxes(1, 2), counts)
    of_kernel = _kernel_gradient(size, rows, gradient, counts)
    if platform == "tpu":
        # Otherwise XLA may give the sums the layout of their user, and transpose each product. On
        # GPUs the constraint would gather what "tensor" splits.
        of_kernel = with_layout_constraint(of_kernel, Layout((0, 1, 2)))
    return of_rows, of_kernel.astype(kernel.dtype), None


_on_accelerator.defvjp(_forward, _backward)


def _kernel_gradient(
    size: int, rows: jax.Array, gradient: jax.Array, counts: jax.Array
) -> jax.Array:
    """Returns the sums of the outer products of each group's rows and gradients, f32.

    The result is (groups, in, out), and `gradient` the gradient (rows, out) of the products.
    """
    blocks, gradients = _blocks(rows, size), _blocks(gradient, size)
    pairs = _Pairs.of(counts, len(blocks), size)

    def add(total: jax.Array, pair: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        group, block, own = pair
        # Both, because 0 times the NaN of another group would be NaN.
        x, y = (jnp.where(own[:, None], part[block], 0) for part in (blocks, gradients))
        part = jnp.einsum("bi,bo->io", x, y, preferred_element_type=jnp.float32)
        return total.at[group].add(part), None

    zeros = jnp.zeros((len(counts), rows.shape[1], gradient.shape[1]), jnp.float32)
    zeros, *_ = varying_alike((zeros, rows))
    total, _ = jax.lax.scan(add, zeros, (pairs.group, pairs.block, pairs.own))
    return total


def _blocks(rows: jax.Array, size: int) -> jax.Array:
    """Returns rows as (blocks, size, width), padded with 0."""
    count, width = rows.shape
    blocks = -(-count // size)
    return jnp.pad(rows, ((0, blocks * size - count), (0, 0))).reshape(blocks, size, width)

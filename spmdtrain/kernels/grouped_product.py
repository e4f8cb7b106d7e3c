"""Products of rows, which are sorted by group, with the matrices of their groups."""

import jax
import jax.numpy as jnp

from spmdtrain.sharding.placement import current_device

_BLOCK = 128  # rows of a block, at most
_ROWS = 8  # and at least


def grouped_product(rows: jax.Array, kernel: jax.Array, counts: jax.Array) -> jax.Array:
    """Returns each row times the matrix of its group, (rows, out).

    On CPU, XLA computes `jax.lax.ragged_dot` as a product of all rows with each matrix. Products
    of blocks of rows have about as many operations as the rows need.

    Args:
      rows: (rows, in), sorted by group.
      kernel: (groups, in, out).
      counts: int (groups,), the number of rows of each group. The results of rows beyond their sum
        are not specified, and their cotangents must be 0.
    """
    groups = len(kernel)
    size = min(_BLOCK, len(rows) // (2 * groups) // _ROWS * _ROWS)
    if current_device().platform != "cpu" or groups == 1 or size < _ROWS:
        return jax.lax.ragged_dot(rows, kernel, counts)
    return _by_blocks(rows, kernel, counts, size)


def _by_blocks(rows: jax.Array, kernel: jax.Array, counts: jax.Array, size: int) -> jax.Array:
    """Returns the products, of each block of `size` rows with each matrix that its rows need.

    Rows of several groups meet in a block only where one group ends and the next one begins, so
    there are at most as many pairs of a block and a matrix as blocks and groups together.
    """
    (count, width), groups = rows.shape, len(kernel)
    blocks = -(-count // size)
    ends = jnp.cumsum(counts)
    starts = ends - counts
    first = starts // size  # block of each group
    pairs = jnp.where(counts > 0, (ends - 1) // size - first + 1, 0)
    ends_of_pairs = jnp.cumsum(pairs)

    pair = jnp.arange(blocks + groups - 1)
    group = jnp.minimum((pair[:, None] >= ends_of_pairs).sum(-1), groups - 1)
    block = first[group] + pair - (ends_of_pairs - pairs)[group]
    row = block[:, None] * size + jnp.arange(size)
    own = ((row >= starts[group, None]) & (row < ends[group, None]))[..., None]
    padded = jnp.pad(rows, ((0, blocks * size - count), (0, 0))).reshape(blocks, size, width)
    given = jnp.where(own, padded[jnp.minimum(block, blocks - 1)], 0)
    products = jnp.einsum("pbi,pio->pbo", given, kernel[group])

    number = jnp.arange(count)
    of_row = jnp.minimum((number[:, None] >= ends).sum(-1), groups - 1)
    place = (ends_of_pairs - pairs)[of_row] + number // size - first[of_row]
    return products[jnp.clip(place, 0, len(pair) - 1), number % size]

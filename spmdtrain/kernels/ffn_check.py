"""Check that the function of a mixture of experts computes each row alone."""

from typing import Any

import jax
import jax.numpy as jnp

from spmdtrain.errors import UserError
from spmdtrain.kernels.expert_exchange import Ffn
from spmdtrain.xla.padding import why_parts_differ

PyTree = Any
_ROWS = 4  # any number above 1


def check_ffn(ffn: Ffn, x: jax.Array, weights: PyTree, *, is_split: bool) -> None:
    """Checks that a device may compute a part of the rows with a part of the experts.

    The function is traced with rows of different experts, one of each. Then its weights have the
    rows' leading dim, and the same proof holds for both: nothing may combine entries of it.
    `is_split` tells whether the mesh splits the experts, not the rows alone.

    Raises:
      UserError: If a row's result may depend on other rows or on other experts, if its width is not
        that of `x`, or if experts are split and the function reads a traced array that is not an
        argument.
    """
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((_ROWS, *leaf.shape[1:]), leaf.dtype),
        (x[0], weights),
    )

    def one_of_each(fixed: tuple[()], given: tuple[jax.Array, PyTree]) -> jax.Array:
        del fixed
        return ffn(*given, _product_of_each)

    traced = jax.make_jaxpr(one_of_each)((), shapes)
    if is_split and any(isinstance(value, jax.core.Tracer) for value in traced.consts):
        raise UserError(
            "experts: ffn reads an array that is not an argument, whose gradient cannot be "
            "computed with mesh.expert: pass it in weights, with an entry for each expert"
        )
    if len(traced.out_avals) != 1:
        raise UserError(
            f"experts: ffn returns {len(traced.out_avals)} arrays: it must return one, (rows, "
            "width)"
        )
    (result,) = traced.out_avals
    if result.shape != shapes[0].shape:
        raise UserError(
            f"experts: ffn returns {result.shape} for rows of {shapes[0].shape}: the shapes must "
            "be equal"
        )
    if why := why_parts_differ(one_of_each, (), shapes, 2, gradients=True):
        raise UserError(
            "experts: ffn must compute each row with the weights of its expert alone, because a "
            f"device has a part of the rows and of the experts: {why}"
        )


def _product_of_each(rows: jax.Array, kernel: jax.Array) -> jax.Array:
    return jnp.einsum("ni,nio->no", rows, kernel)

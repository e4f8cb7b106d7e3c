"""Training batches that do not divide over the devices, padded with rows of weight 0."""

from collections.abc import Callable
from typing import Any

import jax

from spmdtrain.xla.padding import why_padding_matters

PyTree = Any


def why_not_in_training(
    outputs: Callable[[PyTree, PyTree, PyTree], PyTree],
    params: PyTree,
    frozen: PyTree,
    batch: PyTree,
    rows: int,
) -> str | None:
    """Returns why padding rows could change what a training step computes; None if they cannot.

    The proof covers the values and their derivatives with respect to the parameters. Forward mode
    computes these for each row, so it also covers custom derivatives (`custom_jvp`). A `custom_vjp`
    has no forward mode, so it is returned as a reason.

    Args:
      outputs: Maps (params, frozen, batch) to the objective's values.
      params: Trained parameters; here and below, abstract arrays suffice.
      frozen: Parameters that are not trained.
      rows: Number of rows that the objective gets at once.
    """

    def run(given: tuple[PyTree, PyTree, PyTree], batch: PyTree) -> PyTree:
        params, tangents, frozen = given
        values, derivatives = jax.jvp(lambda p: outputs(p, frozen, batch), (params,), (tangents,))
        inexact = [x for x in jax.tree.leaves(derivatives) if x.dtype != jax.dtypes.float0]
        return values, inexact

    part = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((max(rows, 2), *x.shape[1:]), x.dtype), batch
    )
    why = why_padding_matters(run, (params, params, frozen), part)
    return why and why.replace("custom_lin", "custom_vjp")  # the primitive's name in forward mode

"""Training batches that do not divide over the devices, padded with rows of weight 0."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from spmdtrain.xla.padding import why_padding_matters

PyTree = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Padded:
    """A batch of B examples in P rows.

    Attributes:
        rows: Arrays of leading dim P. Rows from B on repeat the last example.
        mask: f32 (P,), 1 for the examples and 0 for the padding rows.
    """

    rows: PyTree
    mask: jax.Array


def rows_and_mask(batch: PyTree) -> tuple[PyTree, jax.Array | None]:
    """Returns the rows of a batch, and the mask if it is padded."""
    return (batch.rows, batch.mask) if isinstance(batch, Padded) else (batch, None)


def why_not_in_training(
    outputs: Callable[[PyTree, PyTree, PyTree], PyTree],
    params: PyTree,
    frozen: PyTree,
    batch: PyTree,
    rows: int,
) -> str | None:
    """Returns why padding rows could change what a training step computes; None if they cannot.

    The proof covers the values and their derivatives with respect to the parameters. Forward mode
    gives these for each row, so that a gradient of its own (`custom_jvp`) is followed too; one of
    `custom_vjp` cannot be, and is a reason.

    Args:
        outputs: The objective's values, of (params, frozen, batch).
        params: What is trained; abstract arrays suffice here and below.
        frozen: Parameters that are not trained.
        batch: Rows of a batch.
        rows: Rows that the objective is given at once.
    """

    def run(given: tuple[PyTree, PyTree, PyTree], batch: PyTree) -> PyTree:
        params, tangents, frozen = given
        values, found = jax.jvp(lambda p: outputs(p, frozen, batch), (params,), (tangents,))
        changes = [x for x in jax.tree.leaves(found) if x.dtype != jax.dtypes.float0]
        return values, changes

    part = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((max(rows, 2), *x.shape[1:]), x.dtype), batch
    )
    why = why_padding_matters(run, (params, params, frozen), part)
    return why and why.replace("custom_lin", "custom_vjp")  # as forward mode names it

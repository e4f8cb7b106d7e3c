"""Rows of a batch with marks: whether a row is padding, and its component of a mixture."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax

PyTree = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MarkedRows:
    """Rows of a batch with marks, which the objective does not receive.

    Attributes:
      rows: Arrays of leading dim P.
      mask: f32 (P,), 1 for examples and 0 for padding rows; None if there is no padding.
      component: int32 (P,), the number of each row's component in `names`; None if the examples
        are not of a mixture.
    """

    rows: PyTree
    mask: Any = None
    component: Any = None
    names: tuple[str, ...] = field(default=(), metadata={"static": True})


def with_marks(batch: PyTree, **marks: Any) -> MarkedRows:
    """Returns rows with these fields of `MarkedRows` besides the marks that they have."""
    return replace(as_marked(batch), **marks)


def as_marked(batch: PyTree) -> MarkedRows:
    """Returns a batch as `MarkedRows`; without marks if it is rows alone."""
    return batch if isinstance(batch, MarkedRows) else MarkedRows(batch)


def rows_of(batch: PyTree) -> PyTree:
    """Returns the rows of a batch, without its marks."""
    return batch.rows if isinstance(batch, MarkedRows) else batch

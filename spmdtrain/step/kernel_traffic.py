"""Reads and writes of a Pallas kernel's blocks.

A kernel copies a block of an operand if its index differs from the index at the previous point of
the grid, whose last dim runs fastest. It writes a block of a result after the last point with its
index (https://docs.jax.dev/en/latest/pallas/grid_blockspec.html). So an operand whose index does
not depend on an inner dim is read once, and an operand whose index does is read again for each
point of the outer dims.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spmdtrain.step.kernel_scalars import Known, ScalarTable, computed, table_element
from spmdtrain.xla.jaxpr import inner_jaxprs

_MOST_POINTS = 2**20  # of a grid whose points are distinguished
_UNBLOCKED = ("any", "hbm", "gmem", "host")  # memory from which the body copies by itself


def block_passes(
    mapping: Any, grid: Sequence[int], tables: Sequence[np.ndarray | None]
) -> tuple[float | None, ...]:
    """Returns how often a kernel reads each whole operand and writes each whole result.

    The number is 1 if each block is copied once, and None if it is not known.

    Args:
      mapping: The `grid_mapping` of the `pallas_call`.
      grid: Sizes of its grid.
      tables: The operands that the index maps read, which have no number in the result; None for
        those that are not known.
    """
    points = math.prod(grid)
    if points > _MOST_POINTS:
        return (None,) * len(mapping.block_mappings)
    places = np.indices(grid).reshape(len(grid), points)
    return tuple(_passes(block, places, tables) for block in mapping.block_mappings)


def _passes(block: Any, places: np.ndarray, tables: Sequence[np.ndarray | None]) -> float | None:
    if str(block.transformed_block_aval.memory_space).lower() in _UNBLOCKED:
        return None
    points = places.shape[1]
    if not points:
        return 0.0
    jaxpr = block.index_map_jaxpr.jaxpr
    values: list[Known | None] = [*places, *(None if x is None else ScalarTable(x) for x in tables)]
    given = {
        variable: value
        for variable, value in zip(jaxpr.invars, values, strict=True)
        if value is not None
    }
    index = _results(jaxpr, given, points)
    moves = np.zeros(points - 1, bool)
    for part in index:
        if not isinstance(part, np.ndarray):
            return None
        moves |= part[1:] != part[:-1]
    sizes = (getattr(size, "block_size", 1) for size in block.block_shape)
    pairs = zip(block.array_aval.shape, sizes, strict=True)
    blocks = math.prod(-(-whole // size) for whole, size in pairs)
    return float(1 + moves.sum()) / max(1, blocks)


def _results(jaxpr: Any, given: Mapping[Any, Known], points: int) -> list[Known | None]:
    """Returns the results of an index map at all points; None for those that are not known."""
    known = dict(given)

    def value(atom: Any) -> Known | None:
        return np.full(points, atom.val) if hasattr(atom, "val") else known.get(atom)

    for equation in jaxpr.eqns:
        operands = [value(x) for x in equation.invars]
        inner = list(inner_jaxprs(equation))
        results: Sequence[Known | None]
        if equation.primitive.name == "get":
            results = [table_element(equation, operands, points)]
        elif len(inner) == 1 and len(inner[0].invars) == len(operands):
            pairs = zip(inner[0].invars, operands, strict=True)
            results = _results(inner[0], {x: y for x, y in pairs if y is not None}, points)
        else:
            results = [computed(equation, operands)]
        for variable, result in zip(equation.outvars, results, strict=False):
            if result is not None:
                known[variable] = result
    return [value(x) for x in jaxpr.outvars]

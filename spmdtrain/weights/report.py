"""The table of what a model takes from a file."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from rich.table import Table

from spmdtrain.errors import foreign
from spmdtrain.weights.assignment import WeightAssignment
from spmdtrain.weights.source import ArrayHeader

_NUMBER = re.compile(r"(?<![^./])[0-9]+(?![^./])", re.ASCII)  # a whole part of a name


def report(
    path: str,
    found: WeightAssignment,
    headers: Mapping[str, ArrayHeader],
    targets: Mapping[str, Any],
) -> Table:
    """Returns a table of the arrays that are taken, that differ, and that are left.

    Arrays whose names differ only in numbers share a row: `h.*.mlp.c_fc.weight`. `path` is the
    file, `headers` describe its arrays and `targets` those of the model.
    """
    table = Table("", "in the model", "in the file", "arrays", title=foreign(f"init_from {path}"))
    table.columns[3].justify = "right"
    taken = [
        ("taken", _text(name, _header(targets[name])), _text(piece.source, headers[piece.source]))
        for name, pieces in found.pieces.items()
        for piece in pieces
    ]
    differs = [
        ("differs", _text(name, _header(targets[name])), why) for name, why in found.misfits.items()
    ]
    missing = [("initial", _text(name, _header(targets[name])), "") for name in found.missing]
    left = [("left", "", _text(name, headers[name])) for name in found.left]
    for rows in (taken, differs, missing, left):
        for row, count in _counted(rows).items():
            table.add_row(*map(foreign, row), str(count))
    return table


def _header(leaf: Any) -> ArrayHeader:
    return ArrayHeader(tuple(leaf.shape), np.dtype(leaf.dtype))


def _text(name: str, header: ArrayHeader) -> str:
    return f"{_NUMBER.sub('*', name)} {header}"


def _counted(rows: Iterable[tuple[str, str, str]]) -> dict[tuple[str, str, str], int]:
    """Returns how often each row occurs, in the order of the rows."""
    counts: dict[tuple[str, str, str], int] = {}
    for row in rows:
        counts[row] = counts.get(row, 0) + 1
    return counts

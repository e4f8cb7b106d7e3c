"""Tables of a plan's page: the parameters and where they lie."""

from typing import Any

from spmdtrain.document.blocks import Block, TableBlock
from spmdtrain.document.terminal import byte_size

_MOST_ROWS = 16  # parameters that are visible without a click
_MOST_FOLDED = 1000
_COLUMNS = (
    *("parameter", "shape", "dtype", "sharding", "parts", "bytes"),
    *("optimizer", "its parts", "together"),
)


def parameter_blocks(plan: dict[str, Any]) -> list[Block]:
    """Returns the parameters of `plan_as_json` with their bytes on a device, largest first."""
    state = sorted(plan["state"], key=lambda row: -_bytes(row))
    blocks: list[Block] = [_table(state[:_MOST_ROWS], "Parameters, the largest first")]
    rest = state[_MOST_ROWS:]
    if rest:
        size = byte_size(sum(map(_bytes, rest)))
        title = f"{len(rest):,} smaller parameters, {size} with their optimizer state"
        if len(rest) > _MOST_FOLDED:
            title += f"; the largest {_MOST_FOLDED:,}"
        blocks.append(_table(rest[:_MOST_FOLDED], title, folded=True))
    return blocks


def _bytes(row: dict[str, Any]) -> int:
    return int(row["bytes"] + row["optimizer_bytes"] + row["average_bytes"])


def _table(state: list[dict[str, Any]], title: str, *, folded: bool = False) -> TableBlock:
    rows = [
        (
            row["name"],
            row["shape"],
            row["dtype"],
            row["spec"],
            f"{row['parts']:,}",
            byte_size(row["bytes"]),
            byte_size(row["optimizer_bytes"]),
            f"{row['optimizer_parts']:,}" if row["optimizer_bytes"] else "",
            byte_size(_bytes(row)),
        )
        for row in state
    ]
    return TableBlock(
        _COLUMNS, rows, numeric=frozenset({4, 5, 6, 7, 8}), title=title, folded=folded
    )

"""What `--show-sharding` prints under parameter servers: which of them has what."""

import jax
from rich.table import Table

from spmdtrain.parameter_server.state_partition import ServerPartition
from spmdtrain.parameter_server.tree_partition import TreePartition
from spmdtrain.terminal import Terminal, byte_size
from spmdtrain.tree import named_leaves


def show(terminal: Terminal, division: ServerPartition) -> None:
    """Print the rows that each server has of each parameter, and the bytes of its part."""
    table = Table()
    table.add_column("parameter")
    table.add_column("shape")
    for server in range(division.servers):
        table.add_column(f"ps {server}", justify="right")
    shapes = {name: leaf.shape for name, leaf in named_leaves(division.params.whole).items()}
    parts = [named_leaves(part) for part in division.params.parts]
    for name, shape in shapes.items():
        table.add_row(name, str(shape), *_rows(shape, [part[name].shape for part in parts]))
    table.add_section()
    kept = {"parameters": division.params, "optimizer": division.opt_state}
    kept |= {"average": division.averaged, "model state": division.model_state}
    for name, cuts in kept.items():
        if jax.tree.leaves(cuts.whole):
            table.add_row(name, "", *_bytes(cuts, division.servers))
    terminal.console.print(table)


def _rows(shape: tuple[int, ...], parts: list[tuple[int, ...]]) -> list[str]:
    """Of a parameter, each server's rows; nothing where it has none."""
    if not shape:
        return ["all" if part == shape else "" for part in parts]
    found, first = [], 0
    for part in parts:
        found.append(f"{first}:{first + part[0]}" if part[0] else "")
        first += part[0]
    return ["all" if part == shape else rows for part, rows in zip(parts, found, strict=True)]


def _bytes(cuts: TreePartition, servers: int) -> list[str]:
    return [byte_size(cuts.bytes_of(server)) for server in range(servers)]

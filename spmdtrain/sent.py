"""What a step sends, against what its strategy has to send at the least."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from spmdtrain.estimate import wire_bytes
from spmdtrain.hlo import Collective
from spmdtrain.sharding_table import Row

_REST = "the rest"


@dataclass(frozen=True)
class Sent:
    """What each device sends for one parameter in a step.

    Attributes:
        parameter: Its path; `the rest` for losses, metrics, checks, and what nobody can tell.
        bytes: What it sends.
        least: What it has to.
        how: With which collectives, and how often all of the parameter crosses in each.
    """

    parameter: str
    bytes: float
    least: float
    how: str


@dataclass(frozen=True)
class Traffic:
    """What each device sends in a step: `least` is known where a formula is."""

    bytes: float
    least: float | None
    by_parameter: list[Sent]
    """Those with the largest excess first."""


def least_sent(row: Row, batch_shards: int, *, compute_width: int, width: int) -> float:
    """Bytes that each device sends at the least for one parameter of so many devices' batch.

    Gradients cross once, in the dtype of the computation (`compute_width` bytes an element): an
    all-reduce of n bytes over g devices sends 2 n (g - 1) / g ("Bandwidth optimal all-reduce
    algorithms", Patarasuk and Yuan, 2009), half of that to scatter the sums, half to gather. With
    the optimizer's state in parts (ZeRO-1, arXiv 1910.02054) what is gathered are parameters, of
    `width` bytes an element. Parameters in parts (ZeRO-3) are gathered for the forward pass and for
    the backward pass.
    """
    elements, parts = row.elements, row.own.parts
    if parts > 1:
        gathers, element = 2, compute_width
    else:
        parts, gathers, element = min(row.optimizer.parts, batch_shards), 1, width
    share = elements * (parts - 1) / parts
    rest = batch_shards / parts  # groups of devices that hold the same part
    across = 2 * (rest - 1) / rest * elements / parts * compute_width
    return share * (gathers * element + compute_width) + across


def traffic_of(
    collectives: Sequence[Collective], rows: Sequence[Row], least: dict[str, float] | None
) -> Traffic:
    """What is sent by parameter; `least` by parameter, None where no formula holds."""
    sizes: dict[str, float] = defaultdict(float)
    crossed: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    elements = {row.name: row.elements for row in rows if row.elements}
    for one in collectives:
        for carried in one.carries:
            # What several travel in together is shared out by their sizes.
            names = [name for name in carried.parameters if name in elements] or [_REST]
            whole = sum(elements.get(name, 1) for name in names)
            sent = one.times * wire_bytes(one.kind, carried.bytes, one.group_size)
            for name in names:
                share = elements.get(name, 1) / whole
                sizes[name] += share * sent
                crossed[name][one.kind] += share * one.times * carried.elements
    found = [
        Sent(
            parameter=name,
            bytes=sizes[name],
            least=(least or {}).get(name, 0.0),
            how=", ".join(
                kind if name == _REST else f"{kind} {_often(count / elements[name])}"
                for kind, count in crossed[name].items()
            ),
        )
        for name in sizes
    ]
    found.sort(key=lambda one: one.least - one.bytes)
    return Traffic(sum(sizes.values()), None if least is None else sum(least.values()), found)


def _often(times: float) -> str:
    return "once" if round(times, 2) == 1 else f"{times:.3g} times"

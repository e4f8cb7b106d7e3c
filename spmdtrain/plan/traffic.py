"""Communication of a step, compared with the minimum of its strategy."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from spmdtrain.plan.time_model import wire_bytes
from spmdtrain.sharding.layout import Row
from spmdtrain.xla.collectives import Collective

_REST = "the rest"


@dataclass(frozen=True)
class StepTraffic:
    """Bytes that each device sends for one parameter in a step.

    Attributes:
      parameter: Its path; "the rest" for losses, metrics, checks, and arrays of unknown origin.
      least: Minimum for the strategy.
      excess: Bytes beyond the minimum, computed for gradients and for parameters separately.
      how: The collectives, and how often the whole parameter crosses in each.
    """

    parameter: str
    bytes: float
    least: float
    excess: float
    how: str


@dataclass(frozen=True)
class Traffic:
    """Bytes that each device sends in a step; `least` and `excess` are None without a formula."""

    bytes: float
    least: float | None
    excess: float | None
    by_parameter: list[StepTraffic]
    """Sorted by excess, the largest first."""


@dataclass(frozen=True)
class MinimumTraffic:
    """Elements that each device must send in a step for one parameter.

    Attributes:
      reduced: Elements sent to sum gradients.
      renewed: Elements sent to distribute the new values.
      gathered: Elements sent to gather the whole parameter once.
      width: Bytes of a stored element.
      compute_width: Bytes of an element in the dtype of the computation.
    """

    reduced: float
    renewed: float
    gathered: float
    width: int
    compute_width: int


def least_sent(
    row: Row,
    batch_shards: int,
    *,
    context: int = 1,
    compute_width: int,
    width: int,
    is_trained: bool = True,
) -> MinimumTraffic:
    """Returns the minimum that a strategy must send for one parameter.

    Gradients cross once, in the dtype of the computation: an all-reduce of n elements over g
    devices sends 2 n (g - 1) / g ("Bandwidth optimal all-reduce algorithms", Patarasuk and Yuan,
    2009), half of that to scatter the sums, half to gather. With a sharded optimizer state
    (ZeRO-1, arXiv 1910.02054) the gather moves new parameters instead. Sharded parameters (ZeRO-3)
    are gathered before the computation.

    Args:
      row: The parameter, with the number of its shards.
      batch_shards: Number of devices over which the batch is split.
      context: Number of devices over which the tokens of each example are split. Gradients are
        summed over them, too.
      compute_width: Bytes of an element in the dtype of the computation.
      width: Bytes of a stored element.
    """
    parts = row.own.parts
    more = max(1, min(row.optimizer.parts, batch_shards) // parts)  # shards of the optimizer state
    scattered, groups = parts * more, batch_shards * context / (parts * more)
    reduced = row.elements * (scattered - 1) / scattered
    reduced += 2 * (groups - 1) / groups * row.elements / scattered
    return MinimumTraffic(
        reduced=reduced if is_trained else 0.0,
        renewed=row.elements / parts * (more - 1) / more if is_trained else 0.0,
        gathered=row.elements * (parts - 1) / parts,
        width=width,
        compute_width=compute_width,
    )


@dataclass
class _Crossing:
    """Bytes sent for one form of a parameter, how often it crosses, and bytes of an element."""

    bytes: float = 0.0
    times: float = 0.0
    width: float = math.inf


@dataclass
class _Crossed:
    parameter: _Crossing = field(default_factory=_Crossing)
    """The parameter itself."""
    produced: _Crossing = field(default_factory=_Crossing)
    """Gradients and new values."""
    kinds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """How often the whole parameter crosses, by kind of collective."""
    exchanged: float = 0.0
    """Bytes sent to exchange keys and values over the axis "context"."""


def traffic_of(
    collectives: Sequence[Collective],
    rows: Sequence[Row],
    least: Mapping[str, MinimumTraffic] | None,
) -> Traffic:
    """Returns the traffic of a step by parameter.

    What is exchanged over the axis "context", such as keys and values, counts as necessary. `least`
    is None if there is no formula for the minimum.
    """
    elements = {row.name: row.elements for row in rows if row.elements}
    crossed = {name: _Crossed() for name in (*elements, _REST)}
    for collective in collectives:
        for carried in collective.carries:
            sent = collective.times * wire_bytes(
                collective.kind, carried.bytes, collective.group_size
            )
            names = [name for name in carried.parameters if name in elements]
            whole = sum(elements[name] for name in names)
            # An array with several parameters is divided among them by size; elements beyond their
            # sum belong to none of them.
            known = min(1.0, whole / carried.elements) if carried.elements else 0.0
            for name in names:
                share = known * elements[name] / whole
                times = share * collective.times * carried.elements / elements[name]
                totals = crossed[name]
                crossing = totals.parameter if carried.is_parameter else totals.produced
                crossing.bytes += share * sent
                crossing.times += times
                crossing.width = min(crossing.width, carried.bytes / carried.elements)
                totals.kinds[collective.kind] += times
            if known < 1 and sent:
                crossed[_REST].produced.bytes += (1 - known) * sent
                if collective.axes == ("context",) and collective.kind != "all-reduce":
                    crossed[_REST].exchanged += (1 - known) * sent
                crossed[_REST].kinds[collective.kind] += 1
    if least is None:
        crossed[_REST].exchanged = 0.0
    traffic = [_sent(name, totals, (least or {}).get(name)) for name, totals in crossed.items()]
    traffic.sort(key=lambda each: -each.excess)
    return Traffic(
        bytes=sum(each.bytes for each in traffic),
        least=None if least is None else sum(each.least for each in traffic),
        excess=None if least is None else sum(each.excess for each in traffic),
        by_parameter=[each for each in traffic if each.bytes or each.least],
    )


def _sent(name: str, totals: _Crossed, least: MinimumTraffic | None) -> StepTraffic:
    gathered, produced = 0.0, totals.exchanged
    if least is not None:
        # A narrower dtype than the configured one is allowed. A second gather, for the backward
        # pass, is necessary if the program does not keep the result of the first.
        width = min(least.compute_width, totals.parameter.width)
        gathered = least.gathered * width * (2 if totals.parameter.times > 1.5 else 1)
        produced += least.reduced * min(least.compute_width, totals.produced.width)
        produced += least.renewed * least.width
    excess = max(0.0, totals.parameter.bytes - gathered)
    return StepTraffic(
        parameter=name,
        bytes=totals.parameter.bytes + totals.produced.bytes,
        least=gathered + produced,
        excess=excess + max(0.0, totals.produced.bytes - produced),
        how=", ".join(
            kind if name == _REST else f"{kind} {_often(times)}"
            for kind, times in totals.kinds.items()
        ),
    )


def _often(times: float) -> str:
    return "once" if round(times, 2) == 1 else f"{times:.3g} times"

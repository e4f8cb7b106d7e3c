"""What a step sends, against what its strategy has to send at the least."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from spmdtrain.plan.time_model import wire_bytes
from spmdtrain.sharding.table import Row
from spmdtrain.xla.collectives import Collective

_REST = "the rest"


@dataclass(frozen=True)
class StepTraffic:
    """What each device sends for one parameter in a step.

    Attributes:
        parameter: Its path; `the rest` for losses, metrics, checks, and what nobody can tell.
        bytes: What it sends.
        least: What it has to.
        excess: What of it is more than that, of gradients and of parameters each by itself.
        how: With which collectives, and how often all of the parameter crosses in each.
    """

    parameter: str
    bytes: float
    least: float
    excess: float
    how: str


@dataclass(frozen=True)
class Traffic:
    """What each device sends in a step: `least` and `excess` are known where a formula is."""

    bytes: float
    least: float | None
    excess: float | None
    by_parameter: list[StepTraffic]
    """Those with the largest excess first."""


@dataclass(frozen=True)
class MinimumTraffic:
    """What each device has to send at the least in a step for one parameter, in elements.

    Attributes:
        reduced: So that gradients are summed.
        renewed: So that each device has the new values.
        gathered: So that all of it is there to compute with, once.
        width: Bytes of an element where it rests.
        compute_width: Bytes of an element where it is computed with.
    """

    reduced: float
    renewed: float
    gathered: float
    width: int
    compute_width: int


def least_sent(
    row: Row, batch_shards: int, *, compute_width: int, width: int, is_trained: bool = True
) -> MinimumTraffic:
    """What a strategy has to send for one parameter, where so many devices share a batch.

    Gradients cross once, in the dtype of the computation: an all-reduce of n elements over g
    devices sends 2 n (g - 1) / g ("Bandwidth optimal all-reduce algorithms", Patarasuk and Yuan,
    2009), half of that to scatter the sums, half to gather. With the optimizer's state in parts
    (ZeRO-1, arXiv 1910.02054) what is gathered are new parameters. Parameters in parts (ZeRO-3) are
    gathered to compute with.
    """
    parts = row.own.parts
    more = max(1, min(row.optimizer.parts, batch_shards) // parts)  # parts of the optimizer's state
    scattered, groups = parts * more, batch_shards / (parts * more)
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
    """How a parameter crosses in one of its forms: bytes sent, how often, and how wide."""

    bytes: float = 0.0
    times: float = 0.0
    width: float = math.inf


@dataclass
class _Crossed:
    parameter: _Crossing = field(default_factory=_Crossing)
    """What is computed with."""
    made: _Crossing = field(default_factory=_Crossing)
    """Gradients and new values."""
    kinds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """How often all of it crosses in each kind of collective."""


def traffic_of(
    collectives: Sequence[Collective],
    rows: Sequence[Row],
    least: Mapping[str, MinimumTraffic] | None,
) -> Traffic:
    """What is sent by parameter; `least` by parameter, None where no formula holds."""
    elements = {row.name: row.elements for row in rows if row.elements}
    crossed = {name: _Crossed() for name in (*elements, _REST)}
    for one in collectives:
        for carried in one.carries:
            sent = one.times * wire_bytes(one.kind, carried.bytes, one.group_size)
            names = [name for name in carried.parameters if name in elements]
            whole = sum(elements[name] for name in names)
            # What several travel in together is shared out by their sizes, and what is in it
            # beside them is none of theirs.
            theirs = min(1.0, whole / carried.elements) if carried.elements else 0.0
            for name in names:
                share = theirs * elements[name] / whole
                times = share * one.times * carried.elements / elements[name]
                of = crossed[name].parameter if carried.is_parameter else crossed[name].made
                of.bytes += share * sent
                of.times += times
                of.width = min(of.width, carried.bytes / carried.elements)
                crossed[name].kinds[one.kind] += times
            if theirs < 1 and sent:
                crossed[_REST].made.bytes += (1 - theirs) * sent
                crossed[_REST].kinds[one.kind] += 1
    found = [_sent(name, of, (least or {}).get(name)) for name, of in crossed.items()]
    found.sort(key=lambda one: -one.excess)
    return Traffic(
        bytes=sum(one.bytes for one in found),
        least=None if least is None else sum(one.least for one in found),
        excess=None if least is None else sum(one.excess for one in found),
        by_parameter=[one for one in found if one.bytes or one.least],
    )


def _sent(name: str, of: _Crossed, least: MinimumTraffic | None) -> StepTraffic:
    gathered = made = 0.0
    if least is not None:
        # A narrower form than asked for is as good; and a second gather, for the backward pass, is
        # needed where the first is not kept until then, which is what the program does.
        width = min(least.compute_width, of.parameter.width)
        gathered = least.gathered * width * (2 if of.parameter.times > 1.5 else 1)
        made = least.reduced * min(least.compute_width, of.made.width)
        made += least.renewed * least.width
    return StepTraffic(
        parameter=name,
        bytes=of.parameter.bytes + of.made.bytes,
        least=gathered + made,
        excess=max(0.0, of.parameter.bytes - gathered) + max(0.0, of.made.bytes - made),
        how=", ".join(
            kind if name == _REST else f"{kind} {_often(times)}" for kind, times in of.kinds.items()
        ),
    )


def _often(times: float) -> str:
    return "once" if round(times, 2) == 1 else f"{times:.3g} times"

"""Lower bound and estimate of a step's time, and its communication."""

import enum
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from spmdtrain.plan import time_model
from spmdtrain.plan.instruction_work import Work, WorkKind
from spmdtrain.plan.topologies import Topology
from spmdtrain.sharding.layout import Row
from spmdtrain.sharding.placement import Placement
from spmdtrain.strategies import SEQUENCE_AXIS
from spmdtrain.xla.chips import Chip
from spmdtrain.xla.collectives import Carried, Collective

# -- Lower bound and estimate of a step's time, from rates and link bandwidths ---------------------
#
# The bound is strict at peak rates: no step of this program is faster. The estimate is not: it
# takes the cycles of the compiler's model for the instructions that run one after another, adds the
# memory that they read and write, and assumes that everything overlaps that XLA can overlap. On a
# GPU only collectives overlap; on CPU the rates are measured, and nothing overlaps. `TimeSource`
# names the origin of each part.

_HOP = 1e-6  # seconds from a chip to its neighbor, "How to Scale Your Model" (jax-ml.github.io)
_RING = {"v3": 32, "v5e": 16, "v6e": 16}  # chips in a dim that is a ring


WITHIN = "the chip"
"""Name of the link between two devices of one chip."""
_MEMORY, _NVLINK = "memory", "NVLink"
NETWORKS = _HOSTS, _SLICES = "the network between hosts", "the network between slices"
"""Names of the links that are networks."""
_DIMS = "xyz"


@dataclass(frozen=True)
class TopologyLink:
    """Links of one kind in a topology: those along a dim of a torus, NVLink, or a network.

    Attributes:
      name: "x", "y" or "z" for a dim of a torus, otherwise the name of the link.
      size: Number of chips, hosts, slices or devices that they connect.
      bandwidth: Bytes per second that a chip sends over them, in both directions of a ring; None
        if unknown.
      ring: Whether they close to a ring.
    """

    name: str
    size: int
    bandwidth: float | None
    ring: bool = False


def topology_links(topology: Topology) -> list[TopologyLink]:
    """Returns the links of a topology, from the fastest kind to the slowest."""
    chip, links = topology.chip, []
    if chip is None or topology.platform == "cpu":
        return [TopologyLink(_MEMORY, topology.devices, None if chip is None else chip.link)]
    if topology.platform == "gpu":
        hosts, gpus = topology.shape
        links = [TopologyLink(_NVLINK, gpus, chip.link), TopologyLink(_HOSTS, hosts, chip.network)]
    else:
        links = [TopologyLink(WITHIN, chip.devices, chip.bandwidth)]
        for name, size in zip(_DIMS, topology.shape, strict=False):
            ring = _closes(size, topology, chip)
            links.append(TopologyLink(name, size, chip.link * (2 if ring else 1), ring))
        links.append(TopologyLink(_SLICES, topology.slices, chip.network))
    return [link for link in links if link.size > 1]


@dataclass(frozen=True)
class Link:
    """The connection between the devices of a group.

    Attributes:
      bandwidth: Bytes per second that each device sends, over all links that it uses at once.
      hops: Hops from one end of the group to the other.
      name: Name for the user.
      latency: Seconds that each collective takes in addition to the transfer.
      shares: Fraction of the bytes that a device sends over each link of the topology, by the
        name of the `TopologyLink`.
    """

    bandwidth: float
    hops: int
    name: str
    latency: float = 0.0
    shares: Mapping[str, float] = field(default_factory=dict)


def link_between(kind: str, devices: Sequence[Any], topology: Topology, chip: Chip) -> Link:
    """Returns the link of a group of devices: links of a torus, NVLink, or the network.

    On a torus, a collective uses a ring in each dim along which the devices differ, in both
    directions if the group covers a whole dim that is a ring. The devices of a permute are a chain
    in which each is assumed to send to its neighbor.
    """
    if topology.platform == "cpu":
        return Link(chip.link, 0, _MEMORY, chip.latency, {_MEMORY: 1.0})
    if topology.platform == "gpu":
        hosts = Counter(device.id // topology.shape[1] for device in devices)
        if len(hosts) > 1:
            return _between(hosts, chip, _HOSTS)
        return Link(chip.link, 1, _NVLINK, chip.latency, {_NVLINK: 1.0})
    slices = Counter(getattr(device, "slice_index", 0) for device in devices)
    if len(slices) > 1:
        return _between(slices, chip, _SLICES)
    hops, across, along = 0, math.inf, dict[str, float]()
    for dim, size in enumerate(topology.shape):
        places = {device.coords[dim] for device in devices}
        if len(places) == 1:
            continue
        closed = len(places) == size and _closes(size, topology, chip)
        along[_DIMS[dim]] = chip.link * (2 if closed else 1)
        hops += len(places) // 2 if closed else max(places) - min(places)
        # Half of an all-to-all's bytes cross the middle of the dim, where a ring has two links.
        across = min(across, chip.link * (8 if closed else 4) / len(places))
    if not along:  # two devices of a chip
        return Link(chip.bandwidth, 0, WITHIN, chip.latency, {WITHIN: 1.0})
    bandwidth = sum(along.values())
    shares = {name: each / bandwidth for name, each in along.items()}
    if kind == "collective-permute":
        return Link(chip.link, 1, "a link", chip.latency, shares)
    if kind in ("all-to-all", "ragged-all-to-all"):
        bandwidth = min(bandwidth, across)
    return Link(bandwidth, hops, "links", chip.latency, shares)


def _closes(size: int, topology: Topology, chip: Chip) -> bool:
    """Returns whether a dim of a slice is a ring.

    v4 and v5p are cubes of 4 x 4 x 4 with optical links between them, so that slices of whole cubes
    are tori. On other chips only the dims of a whole pod are rings
    (https://cloud.google.com/tpu/docs).
    """
    if chip.torus == 3:
        return all(dim % 4 == 0 for dim in topology.shape)
    return size == _RING[chip.name]


def _between(groups: Counter[int], chip: Chip, name: str) -> Link:
    """Returns a network link on which the devices of one host or slice send in parallel."""
    bandwidth = min(chip.network * max(groups.values()), chip.links * chip.link)
    return Link(bandwidth, 1, name, chip.latency, {name: 1.0})


def wire_bytes(kind: str, whole: float, group: int) -> float:
    """Returns the bytes that each device of a group must send in a collective.

    An all-gather or a reduce-scatter sends (g - 1) / g of the payload, an all-reduce twice that.
    `whole` is the payload in bytes (see `Collective.bytes`), `group` the number of devices.
    """
    if group < 2:
        return 0.0
    share = whole * (group - 1) / group
    match kind:
        case "all-reduce":
            return 2 * share
        case "collective-permute" | "collective-broadcast":
            return whole
    return share


def least_bytes(kind: str, whole: float, group: int, topology: Topology, chip: Chip) -> float:
    """Returns the bytes that a chip must send in a collective, whatever the algorithm.

    A chip whose two devices are in the group sends once for both. Switches between GPUs may sum
    values (NVLink SHARP), so that each value is sent once. The arguments are as in `wire_bytes`.
    """
    sent = wire_bytes(kind, whole, max(1, group // chip.devices))
    return sent / 2 if topology.platform == "gpu" and kind == "all-reduce" else sent


def seconds(kind: str, whole: float, group: int, link: Link) -> float:
    """Returns the seconds that a collective takes in a group with exclusive use of its link.

    `whole` and `group` are as in `wire_bytes`.
    """
    hops = link.hops * (group > 1) * (2 if kind == "all-reduce" else 1)  # there and back
    return max(wire_bytes(kind, whole, group) / link.bandwidth, _HOP * hops) + link.latency


class TimeSource(enum.StrEnum):
    """The origin of a part of a time."""

    COMPILER = "the compiler's cycles"
    PEAK = "peak rates"
    MEASURED = "measured rates"
    ASSUMPTION = "an assumption"


@dataclass(frozen=True)
class InstructionTimes:
    """Seconds of the instructions that run one after another on a device.

    Each takes the cycles that the compiler estimates or, if that is longer, the time to read and
    write its arrays.

    Attributes:
      products: Instructions with matrix products or convolutions, and what is fused into them.
      vector: Other instructions, which the vector unit executes.
      memory: Instructions that wait for memory longer than the compiler estimates.
    """

    products: float
    vector: float
    memory: float

    @property
    def total(self) -> float:
        """Seconds of all of them."""
        return self.products + self.vector + self.memory


def instruction_times(work: Sequence[Work], chip: Chip) -> InstructionTimes | None:
    """Returns the times of instructions; None without cycles, or if the chip's clock is unknown."""
    if chip.clock is None or not any(each.cycles for each in work):
        return None
    products = vector = memory = 0.0
    for each in work:
        if not each.in_order:
            continue
        busy = each.cycles / chip.clock
        waiting = each.bytes * chip.devices / chip.bandwidth
        if waiting > busy:
            memory += waiting
        elif each.kind is WorkKind.PRODUCTS:
            products += busy
        else:
            vector += busy
    return InstructionTimes(products, vector, memory)


def instruction_seconds(work: Work, chip: Chip, overlap: "Overlap") -> float:
    """Returns the seconds of an instruction in all its executions in a step, by itself.

    The times of all instructions of a step add up to its estimate, without kernels, collectives and
    what overlaps. The time is NaN if the operations of a product are unknown.
    """
    waiting = work.bytes * chip.devices / chip.bandwidth
    if chip.clock is not None and overlap is Overlap.ALL:
        return max(work.cycles / chip.clock, waiting) if work.in_order else 0.0
    peak = chip.flops
    if work.dtype == "f32" and chip.float32_flops is not None:
        peak = chip.float32_flops
    busy = work.flops * chip.devices / peak + element_seconds(work.elements, chip)
    return max(busy, waiting) if overlap is Overlap.ALL else busy + waiting


def element_seconds(operations: Mapping[str, float], chip: Chip) -> float:
    """Returns the seconds of operations on elements; 0 if the chip's rates are unknown.

    `operations` are those of a step on one device, by kind (see `element_operations`). The rates of
    virtual devices are measured.
    """
    rates = chip.element_rates
    return sum(count / rates[kind] for kind, count in operations.items()) if rates else 0.0


class Overlap(enum.StrEnum):
    """The work that a device does while it computes products.

    The kernels of a GPU run one after another: on an H100, steps of GPT-2 small with 8, 16 and 32
    rows of 1,024 tokens took 1.01 to 1.06 of the sum of products, kernels and other memory traffic.
    """

    ALL = "memory traffic and collectives"
    COLLECTIVES = "collectives"
    NOTHING = "nothing"

    @classmethod
    def of(cls, platform: str) -> "Overlap":
        """Returns the overlap of a platform: tpu, gpu or cpu."""
        return {"cpu": cls.NOTHING, "gpu": cls.COLLECTIVES}.get(platform, cls.ALL)


@dataclass(frozen=True)
class Times:
    """Seconds of one step, by component.

    Attributes:
      compute: Products of the compiled program at the chip's peak, without those of kernels.
      useful: A device's share of the model's products at the chip's peak, without recomputed or
        duplicated ones.
      memory: Reads and writes of all instructions; on a GPU not of kernels and
        collectives, because their times are added.
      waiting: Collectives during which nothing else runs.
      overlapped: Collectives that run at the same time as other instructions.
      least_memory: Reading and writing the state once.
      least_links: Sending all bytes over all links of a chip at once.
      overlap: What runs while products are computed.
      kernels: Kernels of Pallas and cuDNN, with an assumed part of the chip's peak.
      instructions: Instructions by the compiler's cycles; None if it gives none.
      elements: Operations on elements, at the rates measured on CPU; 0 on other chips.
      host: The device waits for the host; 0 if that was not measured.
    """

    compute: float
    useful: float
    memory: float
    waiting: float
    overlapped: float
    least_memory: float
    least_links: float
    overlap: Overlap = Overlap.ALL
    kernels: float = 0.0
    instructions: InstructionTimes | None = None
    elements: float = 0.0
    host: float = 0.0
    rates: TimeSource = TimeSource.PEAK

    @property
    def bound(self) -> float:
        """Lower bound in seconds, in which the operations of kernels do not count."""
        return max(self.compute, self.least_memory, self.least_links)

    @property
    def estimate(self) -> float:
        """Estimate in seconds."""
        return max(self.bound, self.busy + self.waiting) + self.host

    @property
    def busy(self) -> float:
        """Seconds of the estimate in which not only collectives run."""
        instructions = self.compute if self.instructions is None else self.instructions.total
        products = instructions + self.kernels + self.elements
        match self.overlap:
            case Overlap.NOTHING:
                return products + self.memory + self.overlapped
            case Overlap.COLLECTIVES:
                return max(products + self.memory, self.overlapped)
            case Overlap.ALL:
                return max(products, self.memory, self.overlapped)

    @property
    def bottleneck(self) -> str:
        """The largest component of the estimate."""
        parts = {
            "compute": self.compute + self.kernels,
            "memory": self.memory,
            "collectives": self.overlapped + self.waiting,
            "operations on elements": self.elements,
            "the host": self.host,
        }
        if (instructions := self.instructions) is not None:
            # All cycles but those of products at the peak, also of what is fused into products.
            parts["vector unit"] = instructions.products + instructions.vector - self.compute
            if self.memory < instructions.total + self.kernels:
                parts["memory"] = instructions.memory
        return max(parts, key=lambda name: parts[name])

    @property
    def sources(self) -> dict[str, TimeSource]:
        """The source of each part of the estimate."""
        sources = dict.fromkeys(("compute", "memory", "overlapped", "waiting"), self.rates)
        if self.instructions is not None:
            sources["instructions"] = TimeSource.COMPILER
        if self.elements:
            sources["elements"] = self.rates
        if self.kernels:
            sources["kernels"] = TimeSource.ASSUMPTION
        if self.host:
            sources["host"] = self.rates
        return sources


def overlapped_seconds(collectives: Iterable[tuple[str, int, float]]) -> float:
    """Returns the seconds of collectives that run at the same time as other instructions.

    Permutes in opposite directions use the two directions of the same links, at the same time. Each
    collective has a name, a direction (0 if it has none) and seconds.
    """
    by_direction: dict[str, dict[int, float]] = defaultdict(dict)
    for name, direction, seconds in collectives:
        times = by_direction[name]
        times[direction] = times.get(direction, 0.0) + seconds
    return sum(
        times.pop(0, 0.0) + max(times.values(), default=0.0) for times in by_direction.values()
    )


def permute_direction(kind: str, group: Sequence[int]) -> int:
    """Returns the direction of a permute along its chain of devices: 1, -1, or 0 for other kinds.

    Each device of the group sends to the next one.
    """
    if kind != "collective-permute" or len(group) < 3:
        return 0
    ascending = sum(1 if after > before else -1 for before, after in pairwise(group))
    return 1 if ascending >= 0 else -1


# -- Collectives of a planned step, with their links and times -------------------------------------


@dataclass(frozen=True)
class PlannedCollective:
    """One collective of the compiled step, with its estimated time. See also `Collective`.

    Attributes:
      group_size: Number of devices in a group; 0 if unknown.
      bytes: Payload of one execution.
      times: Number of executions in a step.
      link: Name of the link that it uses, or "unknown".
      sent: Bytes that each device sends in all its executions in a step, by the name of the
        topology's link (`TopologyLink`); empty if the group is unknown.
      seconds: Minimum time of all its executions in a step; NaN if unknown.
      direction: Direction of a permute along its axes; see `permute_direction`.
      name: The instruction.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    bytes: int
    times: float
    overlapped: bool
    link: str
    seconds: float
    op_name: str
    line: str
    carries: tuple[Carried, ...] = ()
    sent: dict[str, float] = field(default_factory=dict)
    direction: int = 0
    name: str = ""


def planned_collective(
    collective: Collective, placement: Placement, topology: Topology
) -> PlannedCollective:
    """Returns a collective of a compiled step with its link and its time."""
    seconds, name, shares = math.nan, "unknown", {}
    if topology.chip is None:
        name = "memory"
        shares = {name: 1.0}
    elif collective.group:
        group = [placement.devices[number] for number in collective.group]
        link = time_model.link_between(collective.kind, group, topology, topology.chip)
        name, shares = link.name, dict(link.shares)
        seconds = collective.times * time_model.seconds(
            collective.kind, collective.bytes, collective.group_size, link
        )
    sent = collective.times * time_model.wire_bytes(
        collective.kind, collective.bytes, collective.group_size
    )
    return PlannedCollective(
        kind=collective.kind,
        axes=collective.axes,
        group_size=collective.group_size,
        bytes=collective.bytes,
        times=collective.times,
        overlapped=collective.overlapped,
        link=name,
        seconds=seconds,
        op_name=collective.op_name,
        line=collective.line,
        carries=collective.carries,
        sent={each: share * sent for each, share in shares.items()},
        direction=time_model.permute_direction(collective.kind, collective.group),
        name=collective.name,
    )


# -- Communication of a step, compared with the minimum of its strategy ----------------------------

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
    """Bytes sent to exchange keys and values between devices that share sequences."""


def traffic_of(
    collectives: Sequence[Collective],
    rows: Sequence[Row],
    least: Mapping[str, MinimumTraffic] | None,
) -> Traffic:
    """Returns the traffic of a step by parameter.

    What devices that share sequences exchange, such as keys and values, counts as necessary.
    `least` is None if there is no formula for the minimum.
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
                if collective.axes == (SEQUENCE_AXIS,) and collective.kind != "all-reduce":
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

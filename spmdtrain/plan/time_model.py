"""How long a step takes at least, and how long it may take: a model, of peaks and of links.

The bound is strict: no step of this program is faster. The estimate is not: it counts what each
instruction reads and writes, and lets all that XLA can overlap be overlapped.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spmdtrain.plan.chips import Chip
from spmdtrain.plan.topologies import Topology

_HOP = 1e-6  # seconds from a chip to its neighbour, "How to Scale Your Model" (jax-ml.github.io)
_WHOLE = {"v3": 32, "v5e": 16, "v6e": 16}  # chips in a dim that closes to a ring


WITHIN = "the chip"
"""What joins two devices of one chip."""


@dataclass(frozen=True)
class Link:
    """What joins the devices of a group.

    Attributes:
        bandwidth: Bytes a second out of each device, over all that it can use at once.
        hops: From one end of the group to the other.
        name: In words.
        latency: Seconds of any collective, beside those that its bytes take.
    """

    bandwidth: float
    hops: int
    name: str
    latency: float = 0.0


def link_between(kind: str, devices: Sequence[Any], of: Topology) -> Link:
    """What joins these devices: links of a torus, NVLink, or the network between hosts or slices.

    Of a permute, the devices are a chain, of which each is taken to send to its neighbour.

    A ring in each dim of the torus along which they differ; where the whole dim is theirs and
    closes to a ring, both of its directions.
    """
    assert of.chip is not None
    chip = of.chip
    if of.platform == "cpu":
        return Link(chip.link, 0, "memory", chip.latency)
    if of.platform == "gpu":
        hosts = Counter(device.id // of.shape[1] for device in devices)
        if len(hosts) > 1:
            return _between(hosts, chip, "the network between hosts")
        return Link(chip.link, 1, "NVLink")
    slices = Counter(getattr(device, "slice_index", 0) for device in devices)
    if len(slices) > 1:
        return _between(slices, chip, "the network between slices")
    bandwidth, hops, across = 0.0, 0, math.inf
    for dim, size in enumerate(of.shape):
        places = {device.coords[dim] for device in devices}
        if len(places) == 1:
            continue
        closed = len(places) == size and _closes(size, of)
        bandwidth += chip.link * (2 if closed else 1)
        hops += len(places) // 2 if closed else max(places) - min(places)
        # Half of what all send crosses the middle of the dim, where a ring has two links.
        across = min(across, chip.link * (8 if closed else 4) / len(places))
    if not bandwidth:  # two devices of a chip
        return Link(chip.bandwidth, 0, WITHIN)
    if kind == "collective-permute":
        return Link(chip.link, 1, "a link")
    if kind in ("all-to-all", "ragged-all-to-all"):
        return Link(min(bandwidth, across), hops, "links")
    return Link(bandwidth, hops, "links")


def _closes(size: int, of: Topology) -> bool:
    """Whether a dim of a slice is a ring.

    v4 and v5p are cubes of 4 x 4 x 4 with optical links between them, so that slices of whole cubes
    are tori; of the others only a whole pod's dim closes (https://cloud.google.com/tpu/docs).
    """
    assert of.chip is not None
    if of.chip.torus == 3:
        return all(dim % 4 == 0 for dim in of.shape)
    return size == _WHOLE[of.chip.name]


def _between(groups: Counter[int], chip: Chip, name: str) -> Link:
    """A network to which each device has a way of its own: those of one host send side by side."""
    return Link(min(chip.network * max(groups.values()), chip.links * chip.link), 1, name)


def wire_bytes(kind: str, whole: float, group: int) -> float:
    """What each device of a group sends at the least in a collective of `whole` bytes.

    Of an all-gather or reduce-scatter what others need, (g - 1) / g of the whole; of an all-reduce
    that twice.
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


def least_bytes(kind: str, whole: float, group: int, of: Topology) -> float:
    """What a chip sends at the very least for it, whatever the algorithm.

    Of a group that has both devices of each chip a chip sends for both; and switches between GPUs
    may add up (NVLink SHARP), so that each value is sent once.
    """
    assert of.chip is not None
    sent = wire_bytes(kind, whole, max(1, group // of.chip.devices))
    return sent / 2 if of.platform == "gpu" and kind == "all-reduce" else sent


def seconds(kind: str, whole: float, group: int, link: Link) -> float:
    """How long a collective of `whole` bytes takes in a group that has its link for itself."""
    hops = link.hops * (group > 1) * (2 if kind == "all-reduce" else 1)  # there and back
    return max(wire_bytes(kind, whole, group) / link.bandwidth, _HOP * hops) + link.latency


@dataclass(frozen=True)
class Times:
    """Seconds of one step.

    Attributes:
        compute: Its products at the chip's peak.
        useful: The same of a device's part of the model's own: none is made again, or elsewhere.
        memory: What its instructions read and write.
        waiting: Collectives during which nothing else runs.
        overlapped: Collectives beside which something else runs.
        least_memory: To read the state once.
        least_links: To send what is sent over all links of a chip at once.
        serial: Whether one thing is done after the other, as a CPU does, and not side by side.
    """

    compute: float
    useful: float
    memory: float
    waiting: float
    overlapped: float
    least_memory: float
    least_links: float
    serial: bool = False

    @property
    def bound(self) -> float:
        """Below this it cannot be."""
        return max(self.compute, self.least_memory, self.least_links)

    @property
    def estimate(self) -> float:
        """What it may take."""
        parts = (self.compute, self.memory, self.overlapped)
        beside = sum(parts) if self.serial else max(parts)
        return max(self.bound, beside + self.waiting)

    @property
    def bottleneck(self) -> str:
        """What the estimate is made of most."""
        parts = {
            "compute": self.compute,
            "memory": self.memory,
            "collectives": self.overlapped + self.waiting,
        }
        return max(parts, key=lambda name: parts[name])

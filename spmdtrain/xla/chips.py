"""Accelerators: their peak rates, with sources, and the memory that is used."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from spmdtrain.document.terminal import parse_byte_size

GB, GIB, TERA = 10**9, 2**30, 10**12
MEASURED = "measured"
"""Begins the `Chip.source` of measured rates."""


@dataclass(frozen=True)
class Chip:
    """Specification of one chip; rates are peaks per second.

    Attributes:
      name: Name in a topology, such as "v5e" or "h100".
      flops: Floating-point operations on bfloat16.
      memory: Bytes that one JAX device may use; less than the physical memory.
      bandwidth: Bytes between the chip and its memory.
      links: Number of links to other chips; 1 for a GPU, its NVLink.
      link: Bytes over one link, in one direction.
      network: Bytes to other slices or hosts, in one direction.
      torus: Number of dims of the torus; 0 if all chips of a host are directly connected.
      devices: JAX devices per chip.
      source: Where the peaks are published, or how the rates were measured.
      latency: Seconds that a tiny collective takes, in addition to its hops; 0 if unknown.
      clock: Cycles per second in which the compiler's estimates count; None if unknown.
      element_rates: Operations on elements, by their kind; empty if unknown.
      float32_flops: Floating-point operations on float32 at JAX's default precision: TensorFloat-32
        on a GPU. None if they are as fast as those on bfloat16: a TPU rounds the values to it.
      gap: Seconds of a step in which a device waits for the host; 0 if unknown.
    """

    name: str
    flops: float
    memory: int
    bandwidth: float
    links: int
    link: float
    network: float
    torus: int
    devices: int
    source: str
    latency: float = 0.0
    clock: float | None = None
    element_rates: Mapping[str, float] = field(default_factory=dict, hash=False)
    float32_flops: float | None = None
    gap: float = 0.0

    @property
    def is_measured(self) -> bool:
        """Whether its rates were measured, not published."""
        return self.source.startswith(MEASURED)


_TPU = "https://cloud.google.com/tpu/docs/"
_NVIDIA = "https://www.nvidia.com/en-us/data-center/"

# The memory of a TPU is the limit of its compiler ("exceeds available HBM"), found by compiling
# programs that are too big. The memory of a GPU is all of it: the part that JAX preallocates, three
# quarters by default, is an option of the user. The clock of a TPU follows from its peak: each of
# the chip's matrix units (4 in v5e, 8 in v5p) makes 128 x 128 multiply-adds, two operations each,
# in a cycle (https://cloud.google.com/tpu/docs/system-architecture-tpu-vm).
CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="v3",
            flops=123 * TERA,
            memory=int(15.48 * GIB),
            bandwidth=900 * GB,
            links=4,
            link=70 * GB,
            network=12.5 * GB,
            torus=2,
            devices=2,
            source=_TPU + "v3",
        ),
        Chip(
            name="v4",
            flops=275 * TERA,
            memory=int(30.75 * GIB),
            bandwidth=1200 * GB,
            links=6,
            link=50 * GB,
            network=6.25 * GB,
            torus=3,
            devices=1,
            source=_TPU + "v4",
        ),
        Chip(
            name="v5e",
            flops=197 * TERA,
            memory=int(15.75 * GIB),
            bandwidth=819 * GB,
            links=4,
            link=50 * GB,
            network=3.125 * GB,
            torus=2,
            devices=1,
            source=_TPU + "v5e",
            clock=1.503e9,
        ),
        Chip(
            name="v5p",
            flops=459 * TERA,
            memory=int(95.74 * GIB),
            bandwidth=2765 * GB,
            links=6,
            link=100 * GB,
            network=6.25 * GB,
            torus=3,
            devices=1,
            source=_TPU + "v5p",
            clock=1.75e9,
        ),
        Chip(
            name="v6e",
            flops=918 * TERA,
            memory=int(31.25 * GIB),
            bandwidth=1638 * GB,
            links=4,
            link=100 * GB,
            network=12.5 * GB,
            torus=2,
            devices=1,
            source=_TPU + "v6e",
        ),
        Chip(
            name="tpu7x",
            flops=2307 * TERA,
            memory=int(94.75 * GIB),
            bandwidth=7380 * GB,
            links=6,
            link=100 * GB,
            network=12.5 * GB,
            torus=3,
            devices=2,
            source=_TPU + "tpu7x",
        ),
        Chip(
            name="a100",
            flops=312 * TERA,
            memory=80 * GB,
            bandwidth=2039 * GB,
            links=1,
            link=300 * GB,
            network=25 * GB,
            torus=0,
            devices=1,
            source=_NVIDIA + "a100/",
            float32_flops=156 * TERA,
        ),
        Chip(
            name="h100",
            flops=989 * TERA,
            memory=80 * GB,
            bandwidth=3350 * GB,
            links=1,
            link=450 * GB,
            network=50 * GB,
            torus=0,
            devices=1,
            source=_NVIDIA + "h100/",
            float32_flops=494.5 * TERA,
        ),
        Chip(
            name="h200",
            flops=989 * TERA,
            memory=141 * GB,
            bandwidth=4800 * GB,
            links=1,
            link=450 * GB,
            network=50 * GB,
            torus=0,
            devices=1,
            source=_NVIDIA + "h200/",
            float32_flops=494.5 * TERA,
        ),
    )
}


def published(chip: Chip) -> Chip:
    """Returns a chip with the published peaks; a chip that has none, such as a CPU, unchanged."""
    return CHIPS.get(chip.name, chip)


KINDS = (
    (r"TPU v3", "v3"),
    (r"TPU v4", "v4"),
    (r"TPU v5 ?lite|TPU v5e", "v5e"),
    (r"TPU v5p?", "v5p"),
    (r"TPU v6 ?lite|TPU v6e", "v6e"),
    (r"TPU ?7x|TPU v7x", "tpu7x"),
    (r"NVIDIA A100\b.*", "a100"),
    (r"NVIDIA H100\b(?!.*(PCIe|NVL)).*", "h100"),
    (r"NVIDIA H200\b(?!.*NVL).*", "h200"),
)
"""Patterns of `device_kind`, the name that JAX gives to a device, with the name of its chip."""


def chip_of(device_kind: str) -> Chip | None:
    """Returns the chip of a `jax.Device.device_kind`, such as "TPU v5 lite"; None if unknown."""
    for pattern, name in KINDS:
        if re.fullmatch(pattern, device_kind):
            return CHIPS[name]
    return None


def memory_of(device_kind: str) -> int | None:
    """Returns the bytes of memory of a `jax.Device.device_kind`; None if its chip is not known.

    The name may state less than the memory of the chip: "NVIDIA A100-SXM4-40GB", or a part of a GPU
    as in "NVIDIA H100 80GB HBM3 MIG 1g.10gb".
    """
    chip = chip_of(device_kind)
    if chip is None:
        return None
    stated = (int(size) * GB for size in re.findall(r"(\d+) ?gb", device_kind.lower()))
    return min((chip.memory, *stated))


def peak_flops(device_kind: str) -> float | None:
    """Returns the peak FLOP/s of one JAX device on bfloat16, by its `jax.Device.device_kind`.

    It is None if the chip is not known, or if the device is a part of a GPU (MIG).
    """
    chip = chip_of(device_kind)
    is_part = re.search(r"\bmig\b", device_kind.lower())
    return None if chip is None or is_part else chip.flops / chip.devices


MEMORY_LIMIT = "SPMDTRAIN_DEVICE_MEMORY"
"""The environment variable with the memory of a device, such as 15.7GB."""


class DeviceMemory(NamedTuple):
    """Memory of the devices of this process, in bytes; None if it is not known, as for CPUs.

    Attributes:
      peak: The most bytes in use so far on the fullest device.
      limit: The bytes that programs may use on a device.
    """

    peak: int | None
    limit: int | None


def device_memory(devices: Sequence[Any]) -> DeviceMemory:
    """Returns the memory of these devices; a user may give the limit in `MEMORY_LIMIT`."""
    found = [device.memory_stats() or {} for device in devices]
    peaks, limits = (
        [stats[name] for stats in found if name in stats]
        for name in ("peak_bytes_in_use", "bytes_limit")
    )
    limit = min(limits, default=None)
    if text := os.environ.get(MEMORY_LIMIT):
        limit = parse_byte_size(text, MEMORY_LIMIT)
    return DeviceMemory(max(peaks, default=None), limit)

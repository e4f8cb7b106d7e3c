"""Target topologies by name: `v5e:4x4`, `v5p:8x8x8@2`, `cpu:8`, `gpu:h100:2x8`."""

import math
import re
from collections.abc import Collection
from dataclasses import dataclass

from spmdtrain.errors import UserError, did_you_mean
from spmdtrain.xla.chips import CHIPS, Chip

_SHAPE = re.compile(r"[0-9]+(x[0-9]+)*")
MOST_CPU_DEVICES = 4096
_HELP = (
    "a topology is TPU:SHAPE (v5e:4x4, v5p:8x8x8; v5e:16x16@2 is two slices), "
    "gpu:MODEL:HOSTSxGPUS (gpu:h100:2x8) or cpu:DEVICES"
)

# The description of a GPU that XLA's compiler needs if none is present (`TargetConfig`, the text
# form of xla/stream_executor/device_description.proto; jax issue 28376 shows one). The values are
# from NVIDIA's tuning guides for Ampere and Hopper; the clock is the boost clock.
_GPU_CONFIG = """gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {shared_per_core} threads_per_core_limit: 2048 core_count: {cores}
  fpus_per_core: {fpus} block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: {bandwidth} l2_cache_size: {l2}
  clock_rate_ghz: {clock} device_memory_size: {memory}
  shared_memory_per_block_optin: {shared_per_block}
  cuda_compute_capability {{ major: {capability} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }} device_description_str: "{name}"
"""
_HOPPER = {
    "cores": 132,
    "fpus": 128,
    "shared_per_core": 233472,
    "shared_per_block": 232448,
    "l2": 52428800,
    "clock": 1.98,
    "capability": 9,
}
_GPUS = {
    "h100": _HOPPER | {"memory": 84929347584, "name": "NVIDIA H100 80GB HBM3"},
    "h200": _HOPPER | {"memory": 150122528768, "name": "NVIDIA H200"},
    "a100": {
        "cores": 108,
        "fpus": 64,
        "shared_per_core": 167936,
        "shared_per_block": 166912,
        "l2": 41943040,
        "clock": 1.41,
        "capability": 8,
        "memory": 85031714816,
        "name": "NVIDIA A100-SXM4-80GB",
    },
}


@dataclass(frozen=True)
class Topology:
    """Chips and their arrangement.

    Attributes:
      text: The name that the user gave.
      platform: "tpu", "gpu" or "cpu".
      chip: Rates of a chip; None for CPU, unless they were measured.
      shape: TPU: chips along each dim of a slice. GPU: hosts, and GPUs of a host. CPU: devices.
      slices: Number of slices; a slower network connects them.
    """

    text: str
    platform: str
    chip: Chip | None
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def chips(self) -> int:
        """Number of chips in all slices."""
        return math.prod(self.shape) * self.slices

    @property
    def devices(self) -> int:
        """Number of JAX devices."""
        return self.chips * (1 if self.chip is None else self.chip.devices)

    def __str__(self) -> str:
        return self.text


def parse(text: str) -> Topology:
    """Returns the topology with a name such as "v5e:4x4", "v5e:16x16@2", "gpu:h100:2x8" or "cpu:8".

    Raises:
      UserError: If there is no such topology.
    """
    kind, _, rest = text.partition(":")
    if kind == "cpu":
        if not (rest.isascii() and rest.isdecimal() and 1 <= int(rest) <= MOST_CPU_DEVICES):
            raise UserError(
                f"--topology {text}: cpu needs a number of devices up to {MOST_CPU_DEVICES:,}, "
                "such as cpu:8"
            )
        return Topology(text, "cpu", None, (int(rest),))
    if kind == "gpu":
        kind, _, rest = rest.partition(":")
        chip = _chip(text, kind, _GPUS)
        shape = _numbers(text, rest)
        if len(shape) != 2:
            raise UserError(f"--topology {text}: give GPUs as HOSTSxGPUS, such as gpu:{kind}:2x8")
        return Topology(text, "gpu", chip, shape)
    tpus = [name for name in CHIPS if name not in _GPUS]
    chip = _chip(text, kind, tpus)
    rest, at, slices = rest.partition("@")
    shape = _numbers(text, rest)
    if len(shape) != chip.torus:
        example = "x".join("4" * chip.torus)
        raise UserError(
            f"--topology {text}: a slice of {kind} has {chip.torus} dims, such as {kind}:{example}"
        )
    if at and not (slices.isascii() and slices.isdecimal() and int(slices) >= 1):
        raise UserError(f"--topology {text}: @ needs a number of slices, such as {kind}:...@2")
    return Topology(text, "tpu", chip, shape, int(slices or 1))


def _chip(text: str, name: str, known: Collection[str]) -> Chip:
    if name not in known:
        raise UserError(
            f"--topology {text!r}: unknown chip {name!r}.{did_you_mean(name, known)} {_HELP}"
        )
    return CHIPS[name]


def _numbers(text: str, shape: str) -> tuple[int, ...]:
    numbers = tuple(map(int, shape.split("x"))) if _SHAPE.fullmatch(shape) else ()
    if not numbers or 0 in numbers:
        raise UserError(f"--topology {text}: {shape!r} is not a shape such as 4x4; {_HELP}")
    return numbers


def gpu_config(chip: Chip) -> str:
    """Returns XLA's `TargetConfig` of a GPU as text, to compile for it if none is present."""
    return _GPU_CONFIG.format(bandwidth=int(chip.bandwidth), **_GPUS[chip.name])

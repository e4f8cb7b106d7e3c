"""Target topologies by name, and ahead-of-time compilers for their absent chips."""

import contextlib
import enum
import importlib.metadata
import importlib.util
import math
import os
import re
import sys
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.experimental import topologies as jax_topologies
from packaging.requirements import Requirement

from spmdtrain.errors import NOT_INSTALLED, UserError, did_you_mean, foreign, version_of
from spmdtrain.xla.chips import CHIPS, Chip, chip_of, published

# -- Target topologies by name: `v5e:4x4`, `v5p:8x8x8@2`, `cpu:8`, `gpu:h100:2x8` ------------------

_SHAPE = re.compile(r"[0-9]+(x[0-9]+)*")
MOST_CPU_DEVICES = 4096
_HOST_CHIPS = 4  # of a TPU
_HOST_GPUS = 8
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


def topology_of_run(kind: str, devices: int, processes: int, given: str | None) -> Topology:
    """Returns the topology on which a run was made.

    Args:
      kind: The `jax.Device.device_kind` of its devices.
      devices: Number of its devices.
      processes: Number of its processes.
      given: The topology as the user says it; None if it is that of the record.

    Raises:
      UserError: If the topology does not follow from the record, or is another one.
    """
    chip = None if kind == "cpu" else chip_of(kind)
    if kind != "cpu" and chip is None:
        raise UserError(f"the run was made on {foreign(kind)}, whose rates are not known")
    made_on = f"the run was made on {devices} x {foreign(kind)}"
    if given is not None:
        topology = parse(given)
        if topology.chip != chip or topology.devices != devices:
            raise UserError(f"--topology {given}: {made_on}")
        return topology
    if chip is None:
        return parse(f"cpu:{devices}")
    if chip.name in _GPUS:
        # One process on each host, or one for each GPU.
        hosts = processes if processes < devices else -(-devices // _HOST_GPUS)
        return parse(f"gpu:{chip.name}:{hosts}x{devices // hosts}")
    chips = devices // chip.devices
    if chips == 1:
        return parse(f"{chip.name}:{'x'.join('1' * chip.torus)}")
    raise UserError(
        f"{made_on}, and the shape of a slice is not recorded: add --topology {chip.name}:SHAPE "
        f"with {chips} chips"
    )


def half_of(topology: Topology) -> Topology | None:
    """Returns a topology with half the chips: fewer slices or hosts, else a shorter largest dim.

    None if there is no such topology, or if the chips belong to one host of a TPU, or to a CPU.
    """
    if topology.platform == "cpu" or topology.chip is None:
        return None
    shape, slices = list(topology.shape), topology.slices
    dim = shape.index(max(shape)) if topology.platform == "tpu" or shape[0] < 2 else 0
    if len(shape) == 3 and shape[2] == shape[dim]:
        dim = 2  # chips of a host are neighbors along the first two dims
    if slices > 1:
        slices = slices // 2 if slices % 2 == 0 else 0
    elif shape[dim] % 2 or (topology.platform == "tpu" and topology.chips <= _HOST_CHIPS):
        return None
    else:
        shape[dim] //= 2
    if not slices:
        return None
    prefix = "gpu:" if topology.platform == "gpu" else ""
    at = f"@{slices}" if slices > 1 else ""
    return parse(f"{prefix}{topology.chip.name}:{'x'.join(map(str, shape))}{at}")


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
    # Measured rates change no program.
    return _GPU_CONFIG.format(bandwidth=int(published(chip).bandwidth), **_GPUS[chip.name])


# -- Ahead-of-time compilers for absent chips: their environment and their devices -----------------

_CUDA = ("cuda13", "cuda12")
"""The extras that install the GPU's compiler; `jax_plugins.xla_cuda13` is the plugin's module."""


def compiler_environment(topology: Topology) -> dict[str, str]:
    """Returns environment variables for a process that plans for a topology.

    The process may need the plugin of the topology's devices, but never the devices.
    """
    if topology.platform == "tpu":
        return {
            "JAX_PLATFORMS": "cpu",  # experiments build their arrays here
            "TPU_SKIP_MDS_QUERY": "1",  # otherwise libtpu queries Google's servers
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "TPU_STDERR_LOG_LEVEL": "1",  # so that the partitioner's warnings are written
            "TPU_LOG_DIR": "disabled",
            "TF_CPP_MIN_LOG_LEVEL": "1",
        }
    if topology.platform == "gpu" and installed_cuda():
        return {
            "JAX_PLATFORMS": "cpu",  # experiments build their arrays here
            "CUDA_VISIBLE_DEVICES": "-1",  # the plugin compiles without a GPU, also if there is one
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
            "XLA_FLAGS": "--xla_gpu_autotune_level=0",  # autotuning would run kernels
            "TF_CPP_MIN_LOG_LEVEL": "1",
        }
    return {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "1"}


def installed_cuda() -> str | None:
    """Returns the extra whose CUDA plugin is installed; None if there is none."""
    with contextlib.suppress(ImportError):
        for extra in _CUDA:
            if importlib.util.find_spec(f"jax_plugins.xla_{extra}") is not None:
                return extra
    return None


def has_compiler(topology: Topology) -> bool:
    """Returns whether the topology's own compiler is available, not only virtual CPU devices."""
    return topology.platform != "gpu" or installed_cuda() is not None


class Compiler(enum.StrEnum):
    """The compiler of a plan's step."""

    TPU = "the TPU's own compiler"
    GPU = "the GPU's own compiler, without autotuning"
    CPU = "the CPU's own compiler"
    STAND_IN = "the CPU's compiler, not by the GPU's: its figures are rough"


def compiler_of(topology: Topology) -> Compiler:
    """Returns the compiler that a plan for a topology uses."""
    return Compiler[topology.platform.upper()] if has_compiler(topology) else Compiler.STAND_IN


def devices_of(topology: Topology) -> list[jax.Device]:
    """Returns devices of a topology to compile for.

    Without the CUDA plugin, virtual CPU devices stand in for GPUs.

    Raises:
      UserError: If the compiler is not installed or rejects the topology.
    """
    chip = topology.chip
    if chip is None or topology.platform == "cpu" or not has_compiler(topology):
        if topology.devices > MOST_CPU_DEVICES:
            raise UserError(
                f"--topology {topology}: {topology.devices:,} devices; without the GPU compiler, "
                f"at most {MOST_CPU_DEVICES:,} virtual devices are supported. Install it with "
                "pip install 'spmdtrain[cuda12]' or 'spmdtrain[cuda13]'"
            )
        return jax.devices("cpu")[: topology.devices]
    options: dict[str, Any] = {}
    shape = "x".join(map(str, topology.shape))
    if topology.platform == "gpu":
        options = {"target_config": gpu_config(chip), "topology": f"1x{shape}"}
        platform, name = "cuda", chip.name
    else:
        if importlib.util.find_spec("libtpu") is None:
            raise UserError(
                f"--topology {topology}: the compiler for TPUs is not installed; "
                "pip install 'spmdtrain[tpu]'"
            )
        if topology.slices > 1:
            options = {"num_slices": topology.slices}
        if math.prod(topology.shape) == 1:
            options["chips_per_host_bounds"] = [1, 1, 1]
        if chip.name == "v4":
            options["chip_config_name"] = "megacore"
        platform, name = "tpu", f"{chip.name}:{shape}"
    try:
        description = jax_topologies.get_topology_desc(
            platform=platform, topology_name=name, **options
        )
    except Exception as error:  # plugins raise errors of any class
        why = f"--topology {topology}: {short(error)}"
        if other := other_compiler(topology):
            why += f" ({other})"
        raise UserError(why) from error
    return list(description.devices)


def other_compiler(topology: Topology) -> str:
    """Returns a sentence if the compiler's version is not the one that JAX requires, else "".

    The compiler is libtpu or the CUDA plugin.
    """
    if topology.platform == "tpu":
        extra, package = "tpu", "libtpu"
    elif topology.platform == "gpu" and (cuda := installed_cuda()):
        extra, package = cuda, f"jax-{cuda}-plugin"
    else:
        return ""
    installed = version_of(package)
    for text in importlib.metadata.requires("jax") or ():
        required = Requirement(text)
        if required.name != package or required.marker is None or installed == NOT_INSTALLED:
            continue
        applies = required.marker.evaluate({"extra": extra})
        if applies and not required.specifier.contains(installed, prereleases=True):
            return (
                f"{package} {installed} is installed, but jax {jax.__version__} requires "
                f"{package}{required.specifier}: pip install 'spmdtrain[{extra}]'"
            )
    return ""


# -- Capture of what XLA's compilers write to stderr -----------------------------------------------

# https://github.com/openxla/xla/blob/main/xla/service/spmd/spmd_partitioner.cc; older versions
# write "was not able to go".
_REMATERIALIZES = re.compile(
    r"Involuntary full rematerialization\. The compiler (?:cannot|was not able to) go from "
    r"sharding "
    r"(?P<given>\{.*?\}(?: last_tile_dim_replicate\})?) to (?P<wanted>\{.*?\}) "
    r"(?:efficiently|without).*?operation:? (?P<operation>%.*)"
)


LOG = "compiler-log-"  # prefix of the log's file name in the temporary folder


@dataclass(frozen=True)
class Resharded:
    """An array that the partitioner replicates on each device to change its sharding."""

    given: str
    """Sharding before, in XLA's notation."""
    wanted: str
    """Required sharding."""
    operation: str
    """The instruction that requires it, before partitioning."""


@dataclass
class CompilerLog:
    """Captured output by lines; available after the context of `kept_log` exits."""

    lines: list[str] = field(default_factory=list)

    @property
    def resharded(self) -> list[Resharded]:
        """The partitioner's warnings of full rematerialization, without duplicates."""
        matches = (_REMATERIALIZES.search(line) for line in self.lines)
        return list(dict.fromkeys(Resharded(**match.groupdict()) for match in matches if match))


@contextlib.contextmanager
def kept_log() -> Iterator[CompilerLog]:
    """Captures what this process writes to stderr, including C++ libraries.

    The log has its lines after the exit. If the context exits with an exception, the captured
    output is written to stderr.
    """
    log = CompilerLog()
    sys.stderr.flush()
    stderr = os.dup(2)
    # A named file, because it is all that remains if the compiler aborts the process.
    with tempfile.NamedTemporaryFile("w+", errors="replace", prefix=LOG) as file:
        os.dup2(file.fileno(), 2)
        try:
            yield log
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            file.seek(0)
            log.lines = file.read().splitlines()
            if sys.exc_info()[0] is not None:
                sys.stderr.writelines(f"{line}\n" for line in log.lines)


def short(error: Exception) -> str:
    """Returns the first line of an error, with the second if the first is only a heading.

    At most 300 characters are returned.
    """
    first, *others = str(error).strip().splitlines() or [type(error).__name__]
    return (f"{first} {others[0]}" if first.endswith(":") and others else first)[:300]

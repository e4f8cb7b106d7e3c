"""Ahead-of-time compilers for absent chips: their environment and their devices."""

import contextlib
import importlib.metadata
import importlib.util
import math
from typing import Any

import jax
from jax.experimental import topologies as jax_topologies
from packaging.requirements import Requirement

from spmdtrain.errors import UserError
from spmdtrain.optional import NOT_INSTALLED, version_of
from spmdtrain.plan.compiler_log import short
from spmdtrain.plan.topologies import MOST_CPU_DEVICES, Topology, gpu_config

_CUDA = ("cuda13", "cuda12")
"""The extras that install the GPU's compiler; `jax_plugins.xla_cuda13` is the plugin's module."""


def environment(topology: Topology) -> dict[str, str]:
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
        return jax.devices("cpu")
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

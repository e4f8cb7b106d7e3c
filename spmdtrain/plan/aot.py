"""The compilers of chips that are not there: what they need, and the devices they compile for."""

import contextlib
import importlib.metadata
import importlib.util
import math
from typing import Any

import jax
from jax.experimental import topologies as jax_topologies
from packaging.requirements import Requirement

from spmdtrain.errors import UserError
from spmdtrain.plan.compiler_log import short
from spmdtrain.plan.summary import CUDA, version_of
from spmdtrain.plan.topologies import MOST_CPU_DEVICES, Topology, gpu_config

_COMPILERS = {"tpu": ("tpu", "libtpu"), "gpu": ("cuda12", CUDA)}  # the extra, and the package


def environment(topology: Topology) -> dict[str, str]:
    """What a process that plans for a topology needs in its environment when it starts."""
    if topology.platform == "tpu":
        return {
            "JAX_PLATFORMS": "cpu",  # where what an experiment builds is built
            "TPU_SKIP_MDS_QUERY": "1",  # else libtpu asks Google's servers which machine this is
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "TPU_STDERR_LOG_LEVEL": "1",  # so that the partitioner's warnings are read
            "TPU_LOG_DIR": "disabled",
            "TF_CPP_MIN_LOG_LEVEL": "1",
        }
    if topology.platform == "gpu" and _has_cuda():
        return {
            "JAX_PLATFORMS": "",  # the plugin is to be loaded, and finds no GPU
            "CUDA_VISIBLE_DEVICES": "-1",
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
            "XLA_FLAGS": "--xla_gpu_autotune_level=0",  # which would run kernels
            "TF_CPP_MIN_LOG_LEVEL": "1",
        }
    return {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "1"}


def _has_cuda() -> bool:
    with contextlib.suppress(ImportError):
        return importlib.util.find_spec("jax_plugins.xla_cuda12") is not None
    return False


def has_compiler(topology: Topology) -> bool:
    """Whether its own compiler is used, and not that of virtual devices in its stead."""
    return topology.platform != "gpu" or _has_cuda()


def devices_of(topology: Topology) -> list[jax.Device]:
    """The devices of a topology, to compile for. Raises `UserError`.

    Without the CUDA plugin those of GPUs are virtual ones of the CPU.
    """
    chip = topology.chip
    if topology.platform == "cpu" or not has_compiler(topology):
        if topology.devices > MOST_CPU_DEVICES:
            raise UserError(
                f"--topology {topology}: {topology.devices:,} devices, and without the compiler "
                f"for GPUs (pip install 'spmdtrain[cuda12]') at most {MOST_CPU_DEVICES:,} virtual "
                "ones stand for them"
            )
        return jax.devices("cpu")
    assert chip is not None
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
        found = jax_topologies.get_topology_desc(platform=platform, topology_name=name, **options)
    except Exception as error:  # of whatever class the plugin's are
        why = f"--topology {topology}: {short(error)}"
        if other := other_compiler(topology):
            why += f" ({other})"
        raise UserError(why) from error
    return list(found.devices)


def other_compiler(topology: Topology) -> str:
    """Which compiler was found where JAX asks for another, in a sentence; "" where all is well."""
    if topology.platform not in _COMPILERS:
        return ""
    extra, package = _COMPILERS[topology.platform]
    has = version_of(package)
    for text in importlib.metadata.requires("jax") or ():
        asked = Requirement(text)
        if asked.name != package or asked.marker is None:
            continue
        wanted = asked.marker.evaluate({"extra": extra})
        if wanted and has != "none" and not asked.specifier.contains(has, prereleases=True):
            return (
                f"{package} {has} is installed, and jax {jax.__version__} was made with "
                f"{package}{asked.specifier}: pip install 'spmdtrain[{extra}]'"
            )
    return ""

"""Settings of a process that change the results of its programs.

If one process of a job has different settings, its programs differ from the others': the job hangs,
or computes wrong numbers. The names of JAX's options come from its own cache keys, so that the new
options of a new version of JAX are included.
"""

import enum
import importlib.metadata
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

# JAX has no public name for the options on which its programs depend, nor for the flags of XLA that
# do not change a compiled program.
from jax._src import cache_key
from jax._src.config import trace_context_names

from spmdtrain.errors import NOT_SET, UserError, version_of

_PACKAGES = (
    *("spmdtrain", "jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "grain"),
    *("keras", "numpy", "ml-dtypes"),
)
# Options that JAX reads when it compiles, selects devices or creates keys, not when it traces.
_OPTIONS = (
    "jax_platforms",
    "jax_sort_devices_by_process_index",
    "jax_cpu_collectives_implementation",
    "jax_share_binary_between_hosts",
    "jax_default_prng_impl",
    "jax_enable_custom_prng",
    "jax_compiler_enable_remat_pass",
    "jax_disable_most_optimizations",
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort",
    "jax_optimization_level",
    "jax_memory_fitting_level",
    *("jax_debug_nans", "jax_debug_infs", "jax_disable_jit"),
)
# Options that may differ: a device of one process, and the text of source locations.
_OF_ONE_HOST = ("jax_default_device", "jax_hlo_source_file_canonicalization_regex")
# Variables of other libraries that select another algorithm or precision.
_VARIABLES = (
    *("NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "CUDA_FORCE_PTX_JIT"),
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE", "NCCL_COLLNET_ENABLE"),
    *("KERAS_BACKEND", "ONEDNN_MAX_CPU_ISA"),
)
_FLAGS_OF_ONE_HOST = {
    *cache_key.xla_flags_to_exclude_from_cache_key,
    "--xla_gpu_per_fusion_autotune_cache_dir",
    "--xla_gpu_kernel_cache_file",
}
_DUMPS = ("--xla_dump_", "--xla_gpu_dump_")
# Settings whose values stand for other draws, another precision or other dtypes. Other settings
# change the rounding, or what is checked.
_MEANINGS = (
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_random_seed_offset",
    "jax_high_dynamic_range_gumbel",
    "jax_enable_x64",
    "jax_default_dtype_bits",
    "jax_numpy_dtype_promotion",
    "jax_default_matmul_precision",
    "NVIDIA_TF32_OVERRIDE",
)
# Settings of a job's processes, which may change from one start to the next.
_OF_ONE_JOB = (
    "jax_platforms",
    "jax_cpu_collectives_implementation",
    "jax_share_binary_between_hosts",
    "jax_sort_devices_by_process_index",
    "KERAS_BACKEND",
)
_FLAGS = ("XLA_FLAGS ", "LIBTPU_INIT_ARGS ")
_AS_VARIABLE = {"True": "1", "False": "0"}


def versions() -> dict[str, str]:
    """Returns package name to version, for the libraries that affect compiled programs."""
    installed = {name: version_of(name) for name in _PACKAGES}
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    return installed | {x.dist.name: x.dist.version for x in plugins if x.dist is not None}


def settings() -> dict[str, str]:
    """Returns name to value of the settings that change a program in the calling thread.

    These are JAX's options, the flags of XLA and libtpu, and variables of CUDA and other libraries.

    Raises:
      UserError: If XLA_FLAGS names a file that cannot be read.
    """
    values: dict[str, Any] = jax.config.values
    names = sorted({*trace_context_names(), *_OPTIONS} - {*_OF_ONE_HOST})
    options = {name: _text(values[name]) for name in names if name in values}
    for variable in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        flags = xla_flags(os.environ.get(variable, ""), may_name_file=variable == "XLA_FLAGS")
        options |= {f"{variable} {name}": value for name, value in flags.items()}
    return options | {name: os.environ.get(name, NOT_SET) for name in _VARIABLES}


def of_run() -> dict[str, str]:
    """Returns the `settings` of a run that a later start compares with its current ones."""
    return {name: value for name, value in settings().items() if name not in _OF_ONE_JOB}


def versions_of_run() -> dict[str, str]:
    """Returns package name to version for the libraries of a run, and Python's version."""
    found = versions() | {"python": ".".join(map(str, sys.version_info[:2]))}
    return {name: x for name, x in found.items() if name != "keras" or name in sys.modules}


def differences(
    saved: Mapping[str, str], now: Mapping[str, str]
) -> dict[str, tuple[str, str, bool]]:
    """Returns the settings that differ: both values, and whether results get another meaning.

    `saved` are the settings of an earlier start. A setting that is known on one side only is from
    another version of JAX, and left out.
    """
    found = {}
    for name in {**now, **saved}:
        absent = NOT_SET if name.startswith(_FLAGS) else None
        before, here = saved.get(name, absent), now.get(name, absent)
        if before is not None and here is not None and before != here:
            found[name] = before, here, name in _MEANINGS
    return found


def way_back(name: str, value: str) -> str:
    """Returns what the user does to give a setting its earlier value."""
    variable = name.upper() if name.startswith("jax_") else name
    if value == NOT_SET:
        return f"unset {variable}"
    return f"set {variable}={_AS_VARIABLE.get(value, value)}"


def _text(value: Any) -> str:
    if value is None:
        return NOT_SET
    return str(value.name if isinstance(value, enum.Enum) else value)


def xla_flags(text: str, *, may_name_file: bool = True) -> dict[str, str]:
    """Returns name to value of the flags that change compiled programs.

    Args:
      text: The value of XLA_FLAGS: flags, or the name of a file with flags. The last of several
        flags with the same name counts.
      may_name_file: Whether `text` can be the name of a file; False for libtpu, which reads none.

    Raises:
      UserError: If the file cannot be read.
    """
    if may_name_file and text.strip() and not text.lstrip().startswith("-"):
        try:
            text = Path(text).read_text()
        except (OSError, ValueError) as error:
            raise UserError(f"XLA_FLAGS names the file {text!r}, which is not readable") from error
    flags = {}
    for flag in text.split():
        name, equals, value = flag.partition("=")
        if name not in _FLAGS_OF_ONE_HOST and not name.startswith(_DUMPS):
            flags[name] = value.lower() if value in ("True", "False") else value
            if not equals:
                flags[name] = "true"
    return flags

"""XLA and JAX settings for `CollectiveOptions`; unsupported combinations are errors."""

import math
import os

import jax
from jax._src import xla_bridge  # no public name for whether a backend is initialized

from spmdtrain.config.options import CollectiveOptions
from spmdtrain.errors import UserError, option

MPI_LIBRARY = "MPITRAMPOLINE_LIB"  # environment variable with the path of the MPI library for JAX

_GPU = ("gpu", "cuda", "rocm")
# Largest size up to which XLA combines arrays into one collective. TPU has more such options, which
# changed nothing in a fully sharded step.
_GPU_THRESHOLDS = (
    "xla_gpu_all_reduce_combine_threshold_bytes",
    "xla_gpu_all_gather_combine_threshold_bytes",
    "xla_gpu_reduce_scatter_combine_threshold_bytes",
)
_TPU_THRESHOLDS = ("xla_jf_crs_combiner_threshold_in_bytes",)  # all-reduces only

# XLA:CPU reads its timeouts from XLA_FLAGS, once per process. It accepts them as options of a
# program too, but ignores them. Gloo's reduce-scatter always uses 30 seconds (jax issue 40831).
_BETWEEN_PROCESSES = "xla_cpu_collective_timeout_seconds"
# Within a process it waits for the first timeout, logs a warning, and waits for the second one.
_UNTIL_WARNING = "xla_cpu_collective_call_warn_stuck_timeout_seconds"
_AFTER_WARNING = "xla_cpu_collective_call_terminate_timeout_seconds"
_SILENT = 20  # seconds; XLA's default for the first
_MOST_SECONDS = 2**31 - 1


def configure_collectives(options: CollectiveOptions, processes: int) -> None:
    """Applies the options that JAX and XLA read when they initialize the devices.

    Call it before the first use of a device. A timeout is rounded up to whole seconds and holds for
    the rest of this process. It has no effect on accelerators, where `compiler_options` rejects it.
    `processes` is the number of processes of the job.

    Raises:
      UserError: If an option is not supported, or the devices are already initialized.
    """
    if options.cpu_implementation is not None:
        _use_cpu_implementation(options.cpu_implementation, processes)
    if options.timeout is not None:
        implementation = jax.config.jax_cpu_collectives_implementation  # type: ignore[attr-defined]
        if processes > 1 and implementation == "mpi":
            raise UserError(
                "collectives.timeout is not supported by MPI: use cpu_implementation=gloo, or "
                f"{option('hang_timeout')}, which works for any job"
            )
        _limit_cpu(options.timeout)


def compiler_options(
    options: CollectiveOptions, platform: str, *, gathers: bool = False
) -> dict[str, str | int | bool | float]:
    """Returns the XLA options with which a step is compiled.

    Args:
      platform: Platform of the devices, such as "cpu", "gpu" or "tpu".
      gathers: Whether the step of the strategy also contains all-gathers and reduce-scatters.

    Raises:
      UserError: If an option would have no effect on this platform.
    """
    if platform not in ("cpu", "tpu", *_GPU):
        for name in ("reduce_dtype", "combine_threshold_bytes", "cpu_implementation", "timeout"):
            if getattr(options, name) is not None:
                raise UserError(
                    f"collectives.{name} is not supported on platform {platform}, only on cpu, "
                    "gpu and tpu"
                )
        return {}
    check_reduce_dtype(options, platform)
    if options.cpu_implementation is not None and platform != "cpu":
        raise UserError(
            f"collectives.cpu_implementation is {options.cpu_implementation}, but platform "
            f"{platform} has its own collectives: remove the option"
        )
    if options.timeout is not None and platform in _GPU:
        raise UserError(
            "collectives.timeout is not supported on GPU: XLA's timeouts cover the setup of NCCL "
            "groups and the enqueuing of a step, but not a collective that waits on the device; "
            f"use {option('hang_timeout')}"
        )
    if options.timeout is not None and platform == "tpu":
        raise UserError(
            "collectives.timeout is not supported on TPU, where XLA has no such timeout; use "
            f"{option('hang_timeout')}"
        )
    if options.combine_threshold_bytes is None:
        return {}
    if platform == "cpu":
        raise UserError(
            "collectives.combine_threshold_bytes is not supported on CPU, where XLA has no "
            "threshold: it combines all collectives that it can, and gloo then sends each array "
            "separately"
        )
    if platform == "tpu" and gathers:
        raise UserError(
            "collectives.combine_threshold_bytes is not supported on TPU with this strategy: XLA "
            "applies it to all-reduces only, but the strategy also gathers and scatters"
        )
    names = _TPU_THRESHOLDS if platform == "tpu" else _GPU_THRESHOLDS
    return dict.fromkeys(names, options.combine_threshold_bytes)


def check_reduce_dtype(options: CollectiveOptions, platform: str) -> None:
    """Raises `UserError` if a platform does not reduce in `options.reduce_dtype`."""
    if options.reduce_dtype == "bfloat16" and platform == "cpu":
        raise UserError(
            "collectives.reduce_dtype=bfloat16 has no effect on CPU, where XLA reduces bfloat16 in "
            "float32: use float16, which CPU, GPU and TPU all reduce directly"
        )


def _use_cpu_implementation(name: str, processes: int) -> None:
    if processes == 1:
        raise UserError(
            f"collectives.cpu_implementation is {name}, but the job has one process: the "
            "option selects how several processes communicate; remove it"
        )
    # Without a library JAX aborts this process when it initializes the devices, and Python cannot
    # catch that. With an invalid library it has already done so at its import.
    if name == "mpi" and not os.environ.get(MPI_LIBRARY):
        raise UserError(
            f"collectives.cpu_implementation is mpi, but {MPI_LIBRARY} is not set: set it to the "
            "path of libmpiwrapper.so from MPIwrapper, built for the installed MPI"
        )
    if jax.config.jax_cpu_collectives_implementation == name:  # type: ignore[attr-defined]
        return
    _check_not_initialized(f"cpu_implementation={name}")
    jax.config.update("jax_cpu_collectives_implementation", name)


def _limit_cpu(timeout: float) -> None:
    if timeout > _MOST_SECONDS:
        raise UserError(
            f"collectives.timeout is {timeout:g}: it must be at most {_MOST_SECONDS} seconds"
        )
    seconds = math.ceil(timeout)
    silent = min(_SILENT, math.ceil(seconds / 2))
    wanted = {
        _BETWEEN_PROCESSES: str(seconds),
        _UNTIL_WARNING: str(silent),
        _AFTER_WARNING: str(seconds - silent),
    }
    flags = os.environ.get("XLA_FLAGS", "").split()
    if flags and not flags[0].startswith("-"):
        raise UserError(
            f"collectives.timeout adds to XLA_FLAGS, which names a file ({flags[0]}): set the "
            "flags themselves instead"
        )
    current = dict(flag.lstrip("-").partition("=")[::2] for flag in flags)
    for name, value in wanted.items():
        if current.get(name, value) != value:
            raise UserError(
                f"collectives.timeout is {timeout:g}, but XLA_FLAGS already contains "
                f"--{name}={current[name]}: remove one of the two"
            )
    missing = [f"--{name}={value}" for name, value in wanted.items() if name not in current]
    if missing:
        _check_not_initialized(f"timeout={timeout:g}")
        os.environ["XLA_FLAGS"] = " ".join(flags + missing)


def _check_not_initialized(option: str) -> None:
    if xla_bridge.backends_are_initialized():
        raise UserError(
            f"collectives.{option} is set too late: JAX has already initialized the devices"
        )

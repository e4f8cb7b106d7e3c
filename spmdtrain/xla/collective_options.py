"""What is asked of the collectives, put where it is heeded; what nothing would heed is refused."""

import math
import os

import jax
from jax._src import xla_bridge  # there is no public name for whether JAX has begun to use devices

from spmdtrain.config import CollectiveOptions
from spmdtrain.errors import UserError

MPI_LIBRARY = "MPITRAMPOLINE_LIB"  # the variable that names the MPI that JAX is to use

_GPU = ("gpu", "cuda", "rocm")
# XLA combines arrays into one collective up to these. On TPU there are more of them, which
# changed nothing in a fully sharded step.
_GPU_THRESHOLDS = (
    "xla_gpu_all_reduce_combine_threshold_bytes",
    "xla_gpu_all_gather_combine_threshold_bytes",
    "xla_gpu_reduce_scatter_combine_threshold_bytes",
)
_TPU_THRESHOLDS = ("xla_jf_crs_combiner_threshold_in_bytes",)  # of all-reduces

# XLA:CPU reads its limits from XLA_FLAGS, once. As options of one program it takes them as well,
# and does not look at them. Gloo's reduce-scatter keeps 30 seconds whatever is said (jax issue
# 40831).
_BETWEEN_PROCESSES = "xla_cpu_collective_timeout_seconds"
# Within a process it first waits so long in silence, then so long again.
_UNTIL_WARNING = "xla_cpu_collective_call_warn_stuck_timeout_seconds"
_AFTER_WARNING = "xla_cpu_collective_call_terminate_timeout_seconds"
_SILENT = 20  # seconds, XLA's own
_MOST_SECONDS = 2**31 - 1


def configure_collectives(options: CollectiveOptions, processes: int) -> None:
    """Set what is read once, when JAX starts its devices; call it before anything uses one.

    `processes` is how many the job has. A timeout is rounded up to whole seconds and holds for
    the rest of this process; on accelerators it is without effect here, and `compiler_options`
    refuses it. Raises `UserError` where it is too late, or cannot be had.
    """
    if options.cpu_implementation is not None:
        _use_cpu_implementation(options.cpu_implementation, processes)
    if options.timeout is not None:
        carrier = jax.config.jax_cpu_collectives_implementation  # type: ignore[attr-defined]
        if processes > 1 and carrier == "mpi":
            raise UserError(
                "collectives.timeout: MPI knows none; cpu_implementation=gloo has one, and the "
                "launcher's --hang-timeout watches over any job"
            )
        _limit_cpu(options.timeout)


def compiler_options(
    options: CollectiveOptions, platform: str, *, gathers: bool = False
) -> dict[str, str | int | bool | float]:
    """The options that XLA is to compile a step with, for devices of this platform.

    `gathers` says that the strategy has the step gather and scatter parts, too. Raises `UserError`
    for whatever could not take effect there.
    """
    if platform not in ("cpu", "tpu", *_GPU):
        for name in ("reduce_dtype", "combine_threshold_bytes", "cpu_implementation", "timeout"):
            if getattr(options, name) is not None:
                raise UserError(
                    f"collectives.{name}: whether it takes effect on {platform} is not known"
                )
        return {}
    check_reduce_dtype(options, platform)
    if options.cpu_implementation is not None and platform != "cpu":
        raise UserError(
            f"collectives.cpu_implementation is {options.cpu_implementation}, and the devices are "
            f"of platform {platform}, which brings its own collectives"
        )
    if options.timeout is not None and platform in _GPU:
        raise UserError(
            "collectives.timeout: XLA's limits on GPU end with the forming of NCCL's groups and "
            "the queueing of a step, and a collective that waits on the device has none; the "
            "launcher's --hang-timeout watches over the whole job"
        )
    if options.timeout is not None and platform == "tpu":
        raise UserError(
            "collectives.timeout: XLA has none on TPU; the launcher's --hang-timeout watches over "
            "the whole job"
        )
    if options.combine_threshold_bytes is None:
        return {}
    if platform == "cpu":
        raise UserError(
            "collectives.combine_threshold_bytes: XLA has no threshold on CPU. It joins all the "
            "collectives that it can, and gloo then sends each array by itself"
        )
    if platform == "tpu" and gathers:
        raise UserError(
            "collectives.combine_threshold_bytes: on TPU XLA applies it to all-reduces only, and "
            "this strategy gathers and scatters"
        )
    names = _TPU_THRESHOLDS if platform == "tpu" else _GPU_THRESHOLDS
    return dict.fromkeys(names, options.combine_threshold_bytes)


def check_reduce_dtype(options: CollectiveOptions, platform: str) -> None:
    """Raise `UserError` for a dtype in which that platform does not reduce."""
    if options.reduce_dtype == "bfloat16" and platform == "cpu":
        raise UserError(
            "collectives.reduce_dtype is bfloat16: XLA on CPU turns such a reduction into one of "
            "float32, so nothing would be saved; float16 is reduced as it is, and GPU and TPU "
            "reduce both"
        )


def _use_cpu_implementation(name: str, processes: int) -> None:
    if processes == 1:
        raise UserError(
            f"collectives.cpu_implementation is {name}, and there is one process: it carries what "
            "several send each other, and within one there is nothing to choose"
        )
    # Without a library, JAX ends this process from within when it starts its devices, past all that
    # Python could do; with a wrong one it has done so already, when it was imported.
    if name == "mpi" and not os.environ.get(MPI_LIBRARY):
        raise UserError(
            f"collectives.cpu_implementation is mpi, and {MPI_LIBRARY} is not set: it names the "
            "library in which JAX finds MPI (libmpiwrapper.so of MPIwrapper, built for the MPI at "
            "hand)"
        )
    if jax.config.jax_cpu_collectives_implementation == name:  # type: ignore[attr-defined]
        return
    _not_too_late(f"cpu_implementation={name}")
    jax.config.update("jax_cpu_collectives_implementation", name)


def _limit_cpu(timeout: float) -> None:
    if not 0 < timeout <= _MOST_SECONDS:
        raise UserError(f"collectives.timeout is {timeout}: it must be above 0, in seconds")
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
            f"collectives.timeout is set by XLA_FLAGS, which here names a file ({flags[0]}): put "
            "the flags themselves there"
        )
    given = dict(flag.lstrip("-").partition("=")[::2] for flag in flags)
    for name, value in wanted.items():
        if given.get(name, value) != value:
            raise UserError(
                f"collectives.timeout is {timeout:g}, and XLA_FLAGS already says "
                f"--{name}={given[name]}: give one of the two, for the whole process"
            )
    missing = [f"--{name}={value}" for name, value in wanted.items() if name not in given]
    if missing:
        _not_too_late(f"timeout={timeout:g}")
        os.environ["XLA_FLAGS"] = " ".join(flags + missing)


def _not_too_late(option: str) -> None:
    if xla_bridge.backends_are_initialized():
        raise UserError(f"collectives.{option} comes too late: JAX has already started its devices")

"""Options of XLA's compilers, and the persistent compilation cache."""

import contextlib
import enum
import errno
import hashlib
import math
import os
import platform
import re
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath
from jax._src import cache_key, compilation_cache, compiler, xla_bridge
from jax._src import distributed as jax_distributed
from jax._src.compilation_cache_interface import CacheInterface
from jax.sharding import Sharding

from spmdtrain.config.options import CollectiveOptions
from spmdtrain.errors import UserError, option
from spmdtrain.record.user_folders import cache_folder, check_own, keep_file, make_folder
from spmdtrain.record.validation import Malformed, read_bytes
from spmdtrain.xla.chips import chip_of

# -- Compiler options and the persistent compilation cache -----------------------------------------

OFF = "off"
MAX_BYTES = 4 * 2**30
_MARK, _SUM_BYTES = b"spmdtrain program 1\n", hashlib.sha256().digest_size
# JAX's file names, and those of temporary files that a killed process left. The folder may contain
# other files of the user.
_PROGRAM = re.compile(r".+-[0-9a-f]{64}(-cache|-atime)?|\.new-\w+")


def keep_programs(folder: str | None) -> None:
    """Enables the persistent compilation cache, which all processes of the user share.

    Without a folder, an existing JAX setting (JAX_COMPILATION_CACHE_DIR) has priority. A read-only
    folder is only read. `folder` is None for the user's own cache, "off" for no cache.
    """
    current = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if folder == OFF or (folder is None and current is not None):
        return
    if folder is None:  # one folder per processor type: different hosts may share a home
        path = cache_folder() / "programs" / processor()
    else:
        path = Path(folder).expanduser().absolute()
    if current == str(path):
        return
    try:
        make_folder(path)
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        if folder is None:
            check_own(path)  # write access allows running code as this user
    except OSError as error:  # such as the home of another user, a file, or a full disk
        reason = f"{error.filename or path}: {error.strerror}"
        warnings.warn(f"the compilation cache is not used: {reason}", stacklevel=2)
        return
    evict(path)
    compilation_cache.reset_cache()
    # JAX's own cache writes in place, so that it would read the partial file of a killed process.
    compilation_cache.get_file_cache = lambda path: (CacheFolder(Path(path)), path)
    compiler._cache_write = _write  # type: ignore[assignment]  # JAX 0.10 alone has callbacks
    cache_key.get = _key
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def processor() -> str:
    """Returns a hash of this host's processor type; programs for CPU depend on it."""
    features = [platform.machine(), platform.processor()]
    with contextlib.suppress(OSError):  # not Linux
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features += sorted({x for x in lines if x.startswith(("model name", "flags", "Features"))})
    return hashlib.blake2b("\n".join(features).encode(), digest_size=8).hexdigest()


Value = str | int | bool | float


_hits = threading.local()


def _count_hit(event: str, **_: Any) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        _hits.count = getattr(_hits, "count", 0) + 1


jax.monitoring.register_event_listener(_count_hit)


def compile_lowered(lowered: Any, began: float) -> tuple[Any, str]:
    """Compiles a lowered train step, or reads it from the persistent cache.

    Returns the compiled step, and what was done in which time, for the log. `began` is when the
    trace began, by `time.perf_counter`.
    """
    before, traced = getattr(_hits, "count", 0), time.perf_counter()
    compiled = lowered.compile()
    ended = time.perf_counter()
    if getattr(_hits, "count", 0) == before:
        return compiled, f"step compiled in {ended - began:.1f} s"
    read = f"read from the cache in {ended - traced:.1f} s"
    return compiled, f"step traced in {traced - began:.1f} s, {read}"


def merge_compiler_options(
    user: Sequence[str],
    ours: Mapping[str, Value],
    sharding: Sharding,
    preset: Mapping[str, Value] | None = None,
) -> dict[str, Value]:
    """Returns the compiler options of the user, of other options of the run, and of a preset.

    Args:
      user: Options of the user as NAME=VALUE.
      ours: Options that follow from other options of the run.
      sharding: Its devices are those to compile for.
      preset: Options that the others replace. Those that XLA does not know, because its version is
        another one, are omitted.

    Raises:
      UserError: If an option is given twice, or XLA rejects it for these devices, which the
        compilation of a trivial program shows.
    """
    options = dict(ours)
    for setting in user:
        name, _, value = setting.partition("=")
        if name in options:
            raise UserError(
                f"compiler_options {name} is given twice or set by another option: remove one"
            )
        options[name] = _typed(value)
    if user and (error := _refusal(options, sharding)) is not None:
        raise UserError(f"compiler_options {' '.join(user)}: {error}") from error
    extra = {name: value for name, value in (preset or {}).items() if name not in options}
    if extra and _refusal(extra, sharding) is not None:
        extra = {k: v for k, v in extra.items() if _refusal({k: v}, sharding) is None}
    return extra | options


def _refusal(options: Mapping[str, Value], sharding: Sharding) -> Exception | None:
    """Returns the error with which XLA rejects options for the devices of a sharding, or None."""
    trivial = jax.jit(lambda: jnp.zeros(()), out_shardings=sharding, compiler_options=dict(options))
    try:
        trivial.lower().compile()
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        return error
    return None


def options_for_one_run(platform: str) -> dict[str, Value] | None:
    """Returns compiler options for a program that runs once, so that its compilation counts most.

    On CPUs, LLVM's first level of optimization compiles an initialization faster, and the values of
    JAX's initializers have the same bits (see the tests). Other backends have no such option.
    """
    return {"xla_backend_optimization_level": 1} if platform == "cpu" else None


def _typed(value: str) -> Value:
    if value in ("true", "True", "false", "False"):
        return value in ("true", "True")
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(value)
    return value


class CacheFolder(CacheInterface):
    """A cache folder with one file per program, each written atomically."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def get(self, key: str) -> bytes | None:
        file = self._path / key
        try:
            content = read_bytes(epath.Path(file), MAX_BYTES)
        except OSError:
            return None
        except Malformed as error:
            warnings.warn(f"{error}: compiling again", stacklevel=2)
            return None
        stored, program = content[: len(_MARK) + _SUM_BYTES], content[len(_MARK) + _SUM_BYTES :]
        if stored != _mark(key, program):
            warnings.warn(
                f"the cached program {file} is corrupted or renamed: compiling again", stacklevel=2
            )
            return None
        with contextlib.suppress(OSError):  # marks it as recently used, if the folder is writable
            os.utime(file)
        return program

    def put(self, key: str, value: bytes) -> None:
        keep_file(self._path / key, _mark(key, value) + value)


def _mark(key: str, program: bytes) -> bytes:
    """Returns the header of a program's file: a checksum over its key and its content.

    The key is included because a renamed file would otherwise run in place of another program.
    """
    return _MARK + hashlib.sha256(key.encode() + b"\0" + program).digest()


_key_of = cache_key.get


def _key(module: Any, devices: Any, compile_options: Any, *args: Any, **kwargs: Any) -> str:
    """Returns JAX's key of a program, independent of the path of the cache.

    JAX sets a folder for autotuning inside the cache as an XLA option, and would hash its path.
    """
    options = compile_options.executable_build_options.debug_options
    folder = options.xla_gpu_per_fusion_autotune_cache_dir
    options.xla_gpu_per_fusion_autotune_cache_dir = ""
    try:
        return _key_of(module, devices, compile_options, *args, **kwargs)
    finally:
        options.xla_gpu_per_fusion_autotune_cache_dir = folder


_write_in_process_0 = compiler._cache_write


def _write(
    cache_key: str,
    compile_time_secs: float,
    module_name: str,
    backend: Any,
    executable: Any,
    *host_callbacks: Sequence[Any],  # JAX 0.10 alone passes them
) -> None:
    """Writes a compiled program to the cache: on CPU in every process, elsewhere in process 0.

    JAX writes in process 0 only, whose programs serve all processes if their keys are equal. On CPU
    the key depends on the process, so each process finds only what it wrote itself.
    """
    if backend.platform != "cpu" or jax_distributed.global_state.process_id in (None, 0):
        _write_in_process_0(
            cache_key, compile_time_secs, module_name, backend, executable, *host_callbacks
        )
    elif not any(host_callbacks):  # callbacks are addresses in this process
        try:
            compilation_cache.put_executable_and_time(
                cache_key, module_name, executable, backend, int(compile_time_secs)
            )
        except Exception as error:  # as in process 0
            reason = f"{type(error).__name__}: {error}"
            warnings.warn(
                f"the compiled program {module_name} is not cached: {reason}", stacklevel=2
            )


def evict(path: Path) -> None:
    """Removes the least recently used programs if the cache is too large."""
    with contextlib.suppress(OSError):
        programs = [entry for entry in os.scandir(path) if _PROGRAM.fullmatch(entry.name)]
        files = [(entry.stat(), entry.path) for entry in programs if entry.is_file()]
        files.sort(key=lambda each: each[0].st_mtime)
        size = sum(stat.st_size for stat, _ in files)
        for stat, name in files:
            if size <= MAX_BYTES:
                break
            with contextlib.suppress(OSError):  # another process removed it
                os.unlink(name)
            size -= stat.st_size


# -- XLA and JAX settings for `CollectiveOptions`; unsupported combinations are errors -------------

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


# -- XLA options by generation of the chip, as data: the presets of `--xla-preset` -----------------
#
# The table holds only options with which the chip's own compiler estimates a shorter step, and
# which leave the operations of a program as they are: they decide when and where collectives run.


class Parameters(enum.StrEnum):
    """The placement of the parameters, on which the collectives of a step depend."""

    REPLICATED = "replicated"
    """On every device: gradients are all-reduced."""
    SHARDED = "sharded"
    """Split over devices: they are gathered for each use."""


@dataclass(frozen=True)
class Flag:
    """An option of XLA; the reason is the measured effect, as a sentence for the user."""

    name: str
    value: Value
    reason: str


_OVERLAPPED_ON_V5E = (
    Flag(
        "xla_enable_async_all_reduce",
        True,
        "all-reduces of gradients run while the backward pass computes the next ones",
    ),
    Flag(
        "xla_tpu_enable_async_collective_fusion_fuse_all_reduce",
        True,
        "the same: without it they are not fused with the computation beside them",
    ),
    Flag(
        "xla_jf_crs_combiner_threshold_in_bytes",
        0,
        "an all-reduce of many gradients would begin after the last of them",
    ),
)
_SPARSE_CORES_REDUCE = (
    Flag(
        "xla_tpu_enable_sparse_core_collective_offload_all_reduce",
        True,
        "all-reduces run on the SparseCores while the other cores compute",
    ),
    Flag(
        "xla_tpu_use_tc_device_shape_on_sc",
        True,
        "required by the offloading of collectives in this version of libtpu",
    ),
)
PRESETS: dict[tuple[str, Parameters], tuple[Flag, ...]] = {
    ("v5e", Parameters.REPLICATED): _OVERLAPPED_ON_V5E,
    # XLA replaces reduce-scatters over a whole v5e slice by all-reduces.
    ("v5e", Parameters.SHARDED): _OVERLAPPED_ON_V5E,
    ("v5p", Parameters.REPLICATED): _SPARSE_CORES_REDUCE,
    ("v5p", Parameters.SHARDED): (
        *_SPARSE_CORES_REDUCE,
        Flag(
            "xla_tpu_enable_sparse_core_collective_offload_all_gather",
            True,
            "parameters are gathered by the SparseCores while the other cores compute",
        ),
    ),
}
"""The flags by name of the chip (see `chips`) and placement of the parameters."""


def preset_flags(device_kind: str, parameters: Parameters) -> tuple[Flag, ...]:
    """Returns the flags of the preset for a `jax.Device.device_kind`; none without a preset."""
    chip = chip_of(device_kind)
    return () if chip is None else PRESETS.get((chip.name, parameters), ())

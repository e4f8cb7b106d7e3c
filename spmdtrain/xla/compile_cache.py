"""Compiler options and the persistent compilation cache."""

import contextlib
import errno
import hashlib
import os
import platform
import re
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath
from jax._src import cache_key, compilation_cache, compiler
from jax._src import distributed as jax_distributed
from jax._src.compilation_cache_interface import CacheInterface
from jax.sharding import Sharding

from spmdtrain.errors import UserError
from spmdtrain.record.user_folders import cache_folder, check_own, keep_file, make_folder
from spmdtrain.record.validation import Malformed, read_bytes

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
    path = _own_folder() if folder is None else Path(folder).expanduser().absolute()
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


def _own_folder() -> Path:
    """Returns the default folder, one per processor type: different hosts may share a home."""
    return cache_folder() / "programs" / processor()


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


def compile_step(lowered: Any, began: float) -> tuple[Any, str]:
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
    for option in user:
        name, _, value = option.partition("=")
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

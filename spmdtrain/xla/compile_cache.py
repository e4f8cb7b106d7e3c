"""How programs are compiled, and kept for later starts in a folder of the user's."""

import contextlib
import hashlib
import os
import platform
import re
import tempfile
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
from spmdtrain.files.user_folders import cache_folder, check_own, make_folder
from spmdtrain.files.validation import Malformed, read_bytes

OFF = "off"
_MOST_BYTES = 4 * 2**30
_MARK, _SUM_BYTES = b"spmdtrain program 1\n", hashlib.sha256().digest_size
# JAX's names, and those of what a killed process left: in a user's folder may be other files.
_PROGRAM = re.compile(r".+-[0-9a-f]{64}(-cache|-atime)?|\.new-\w+")


def keep_programs(folder: str | None) -> None:
    """Keep compiled programs in `folder`, or in the user's own cache; `off` keeps none.

    All processes of the user's share it. What JAX has been told already (JAX_COMPILATION_CACHE_DIR)
    stays as it is, if no folder is given. A folder that cannot be written to is read from alone.
    """
    current = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if folder == OFF or (folder is None and current is not None):
        return
    path = _own_folder() if folder is None else Path(folder).expanduser().absolute()
    if current == str(path):
        return
    try:
        make_folder(path)
        if folder is None:
            check_own(path)  # who writes here runs code as this user
    except PermissionError as error:  # as a home of another user's
        what = f"{error.filename or path}: {error.strerror}"
        warnings.warn(f"the cache of programs is not used: {what}", stacklevel=2)
        return
    except OSError:
        pass  # then every program is compiled anew
    _make_room(path)
    compilation_cache.reset_cache()
    # JAX's own cache writes in place: what a process that is killed leaves behind would be read.
    compilation_cache.get_file_cache = lambda path: (_Folder(Path(path)), path)
    compiler._cache_write = _write
    cache_key.get = _key
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _own_folder() -> Path:
    """One for each kind of processor: a home may be shared by hosts that differ."""
    return cache_folder() / "programs" / processor()


def processor() -> str:
    """What programs for this host's processor are good for, in short."""
    told = [platform.machine(), platform.processor()]
    with contextlib.suppress(OSError):  # elsewhere than on Linux
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        told += sorted({x for x in lines if x.startswith(("model name", "flags", "Features"))})
    return hashlib.blake2b("\n".join(told).encode(), digest_size=8).hexdigest()


Value = str | int | bool | float


def compiler_options(
    given: Sequence[str], ours: Mapping[str, Value], place: Sharding
) -> dict[str, Value]:
    """The user's own options (NAME=VALUE) and ours, for programs on the devices of `place`.

    Raises `UserError` for what XLA does not know there; to find out, it compiles next to nothing.
    """
    options = dict(ours)
    for option in given:
        name, _, value = option.partition("=")
        if name in options:
            raise UserError(f"compiler_options {name} is given twice, or set by another option")
        options[name] = _typed(value)
    if given:
        nothing = jax.jit(lambda: jnp.zeros(()), out_shardings=place, compiler_options=options)
        try:
            nothing.lower().compile()
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            raise UserError(f"compiler_options {' '.join(given)}: {error}") from error
    return options


def _typed(value: str) -> Value:
    if value in ("true", "True", "false", "False"):
        return value in ("true", "True")
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(value)
    return value


class _Folder(CacheInterface):
    """A file for each program, which is there whole or not at all."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def get(self, key: str) -> bytes | None:
        file = self._path / key
        try:
            content = read_bytes(epath.Path(file), _MOST_BYTES)
        except OSError:
            return None
        except Malformed as error:
            warnings.warn(f"{error}: compiled anew", stacklevel=2)
            return None
        stored, program = content[: len(_MARK) + _SUM_BYTES], content[len(_MARK) + _SUM_BYTES :]
        if stored != _mark(key, program):
            warnings.warn(
                f"the program {file} is damaged or of another name: compiled anew", stacklevel=2
            )
            return None
        with contextlib.suppress(OSError):  # of use until now, where that can be written
            os.utime(file)
        return program

    def put(self, key: str, value: bytes) -> None:
        keep_file(self._path / key, _mark(key, value) + value)


def _mark(key: str, program: bytes) -> bytes:
    """Returns the header of a program's file: a check sum over its key and its content.

    The key is included because a renamed file would otherwise run in place of another program.
    """
    return _MARK + hashlib.sha256(key.encode() + b"\0" + program).digest()


_key_of = cache_key.get


def _key(module: Any, devices: Any, compile_options: Any, *args: Any, **kwargs: Any) -> str:
    """The key of a program, wherever the cache is.

    JAX tells XLA of a folder for autotuning inside the cache, and hashes its path.
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
    host_callbacks: Sequence[Any],
) -> None:
    """Writes a compiled program to the cache: on CPU in every process, elsewhere in process 0.

    JAX writes in process 0 only, which serves all processes if their keys are equal. On CPU the key
    covers the process, so that each finds only what it wrote itself.
    """
    if backend.platform != "cpu" or jax_distributed.global_state.process_id in (None, 0):
        _write_in_process_0(
            cache_key, compile_time_secs, module_name, backend, executable, host_callbacks
        )
    elif not host_callbacks:  # which are addresses in this process
        try:
            compilation_cache.put_executable_and_time(
                cache_key, module_name, executable, backend, int(compile_time_secs)
            )
        except Exception as error:  # as in process 0
            what = f"{type(error).__name__}: {error}"
            warnings.warn(f"the compiled program {module_name} is not kept: {what}", stacklevel=2)


def keep_file(path: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all; what cannot be kept is made again."""
    with contextlib.suppress(OSError):
        make_folder(path.parent)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.replace(name, path)
        except OSError:
            os.unlink(name)


def _make_room(path: Path) -> None:
    """Remove the programs that were not used for the longest time, where there are too many."""
    with contextlib.suppress(OSError):
        programs = [entry for entry in os.scandir(path) if _PROGRAM.fullmatch(entry.name)]
        found = [(entry.stat(), entry.path) for entry in programs if entry.is_file()]
        found.sort(key=lambda each: each[0].st_mtime)
        size = sum(stat.st_size for stat, _ in found)
        for stat, name in found:
            if size <= _MOST_BYTES:
                break
            with contextlib.suppress(OSError):  # another process was faster
                os.unlink(name)
            size -= stat.st_size

"""Programs that were compiled once are kept for later starts, in a folder of the user's."""

import contextlib
import hashlib
import os
import platform
import re
import tempfile
from pathlib import Path

import jax
from jax._src import compilation_cache
from jax._src.compilation_cache_interface import CacheInterface

OFF = "off"
_MOST_BYTES = 4 * 2**30
_WORTH_KEEPING = 0.05  # seconds that a program took to compile
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
    if not path.exists():
        with contextlib.suppress(OSError):  # then every program is compiled anew
            path.mkdir(mode=0o700, parents=True)  # who writes here runs code as this user
    _make_room(path)
    compilation_cache.reset_cache()
    # JAX's own cache writes in place: what a process that is killed leaves behind would be read.
    compilation_cache.get_file_cache = lambda path: (_Folder(Path(path)), path)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _WORTH_KEEPING)


def _own_folder() -> Path:
    """One for each kind of processor: a home may be shared by hosts that differ."""
    above = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(above) / "spmdtrain" / "programs" / _processor()


def _processor() -> str:
    """What programs for this host's processor are good for, in short."""
    told = [platform.machine(), platform.processor()]
    with contextlib.suppress(OSError):  # elsewhere than on Linux
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        told += sorted({x for x in lines if x.startswith(("model name", "flags", "Features"))})
    return hashlib.blake2b("\n".join(told).encode(), digest_size=8).hexdigest()


class _Folder(CacheInterface):
    """A file for each program, which is there whole or not at all."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def get(self, key: str) -> bytes | None:
        file = self._path / key
        try:
            content = file.read_bytes()
        except OSError:
            return None
        with contextlib.suppress(OSError):  # of use until now, where that can be written
            os.utime(file)
        return content

    def put(self, key: str, value: bytes) -> None:
        # A program that is not kept is compiled again, and nothing else.
        with contextlib.suppress(OSError):
            handle, name = tempfile.mkstemp(dir=self._path, prefix=".new-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(value)
                os.replace(name, self._path / key)
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

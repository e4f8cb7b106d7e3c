"""Modules of the user: those that another process cannot import, and digests of their source."""

import functools
import hashlib
import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from spmdtrain.distributed import process_group
from spmdtrain.errors import is_library

_MAX_COMPARED = 5_000  # modules; reading that many files takes about 1 s


def user_modules(path: Sequence[str]) -> list[ModuleType]:
    """Returns the imported modules of the user that a process with this `sys.path` cannot import.

    An experiment is one of them, because it is loaded from its file. Functions and classes of these
    modules must be pickled by value. Modules of libraries are not among them.
    """
    return [module for _, module in _imported() if not _is_importable(module, path)]


def source_digests() -> dict[str, str]:
    """Returns digests of the source files of the user's modules, to compare between processes.

    All processes call it at the same points. The modules are the ones that process 0 has imported.
    A process that has not imported one of them returns the digest of process 0, because a module
    that only some processes import, such as one that draws figures, is no difference. With one
    process there are none.
    """
    if process_group.count() == 1:
        return {}
    own = {
        f"module {module.__name__}": f"{_path_in_root(module.__name__, file)} {file_digest(file)}"
        for file, module in _imported()
        if file.suffix == ".py" and file.is_file()
    }
    # Of too many, the last ones: libraries are imported before what uses them.
    first = process_group.broadcast(dict(list(own.items())[-_MAX_COMPARED:]))
    return {name: own.get(name, digest) for name, digest in first.items()}


def _imported() -> list[tuple[Path, ModuleType]]:
    """Returns the imported modules that belong to no library, with their files."""
    return [
        (Path(file), module)
        for module in list(sys.modules.values())
        if isinstance(module, ModuleType)
        and (file := vars(module).get("__file__"))  # not `getattr`, which may import lazily
        and not is_library(file)
    ]


def _is_importable(module: ModuleType, path: Sequence[str]) -> bool:
    """Returns whether a process with this `sys.path` can import a module by its name."""
    top = module.__name__.partition(".")[0]
    return importlib.machinery.PathFinder.find_spec(top, list(path)) is not None


def _path_in_root(name: str, file: Path) -> str:
    """Returns the path of a module's file in the folder from which the module is imported."""
    depth = name.count(".") + (file.name == "__init__.py")
    return "/".join(file.parts[-1 - depth :])


@functools.cache  # the first digest is the closest to what was imported
def file_digest(file: Path) -> str:
    """Returns a digest of a file's content at the first call."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12]

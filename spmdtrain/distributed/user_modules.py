"""Modules of the user that a new process could not import by name."""

import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

from spmdtrain.xla.hlo_parser import is_library


def user_modules(path: Sequence[str]) -> list[ModuleType]:
    """Returns the imported modules of the user that a process with another path cannot import.

    An experiment is one of them, because it is loaded from its file. Functions and classes of these
    modules must be pickled by value. Modules of libraries are not among them.

    Args:
      path: `sys.path` of the other process.
    """
    return [
        module
        for module in list(sys.modules.values())
        if (file := getattr(module, "__file__", None))
        and not _is_importable(module, path)
        and not is_library(file)
    ]


def _is_importable(module: ModuleType, path: Sequence[str]) -> bool:
    """Returns whether a process with this `sys.path` can import a module by its name."""
    top = module.__name__.partition(".")[0]
    return importlib.machinery.PathFinder.find_spec(top, list(path)) is not None

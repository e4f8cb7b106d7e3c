"""The source files of users, as opposed to those of libraries."""

import os
import traceback
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_MODELS = _PACKAGE / "models"
_STANDARD_LIBRARY = os.path.dirname(os.__file__)


def is_library(file: str) -> bool:
    """Returns whether a source file belongs to Python, a library or this package except its models.

    Args:
        file: Path of the file.
    """
    if "-packages" in file or file.startswith(("<frozen", _STANDARD_LIBRARY)):
        return True
    path = Path(file)
    return path.is_relative_to(_PACKAGE) and not path.is_relative_to(_MODELS)


def place_of(error: BaseException) -> str:
    """Returns `in FUNCTION (FILE:LINE)`: where an exception was raised, if possible a user's line.

    Args:
        error: A raised exception.
    """
    found = list(traceback.extract_tb(error.__traceback__))
    frames = [f for f in found if not is_library(f.filename)] or found
    return f"in {frames[-1].name} ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def describe_sys_exit(stop: SystemExit, where: str = "") -> str:
    """Returns `sys.exit(CODE) WHERE, in FUNCTION (FILE:LINE)`.

    Args:
        stop: A raised `SystemExit`.
        where: What the process did, or which process it is.
    """
    call = f"sys.exit({'' if stop.code is None else repr(stop.code)})"
    said = f"{call} {where}," if where else call
    return f"{said} {place_of(stop)}".rstrip(" ,")

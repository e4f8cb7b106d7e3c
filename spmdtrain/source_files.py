"""The source files of users, as opposed to those of libraries."""

import functools
import os
import re
import traceback
from pathlib import Path
from types import FrameType, TracebackType

_PACKAGE = Path(__file__).parent
_MODELS = _PACKAGE / "models"
_STANDARD_LIBRARY = os.path.dirname(os.__file__)


@functools.cache
def is_library(file: str) -> bool:
    """Returns whether a source file is of Python, a library or this package except its models."""
    if "-packages" in file or file.startswith(("<frozen", _STANDARD_LIBRARY)):
        return True
    path = Path(file)
    return path.is_relative_to(_PACKAGE) and not path.is_relative_to(_MODELS)


def is_users(file: str) -> bool:
    """Returns whether a source file belongs to neither a library nor this package."""
    return not is_library(file) and not _is_package(file)


def place_of(error: BaseException) -> str:
    """Returns `in FUNCTION (FILE:LINE)`: where an error was raised, if possible in user code."""
    found = list(traceback.extract_tb(error.__traceback__))
    frames = [f for f in found if not is_library(f.filename)] or found
    return f"in {frames[-1].name} ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def describe_sys_exit(stop: SystemExit, where: str = "") -> str:
    """Returns `sys.exit(CODE) WHERE, in FUNCTION (FILE:LINE)`.

    `where` is what the process did, or which process it is.
    """
    call = f"sys.exit({'' if stop.code is None else repr(stop.code)})"
    said = f"{call} {where}," if where else call
    return f"{said} {place_of(stop)}".rstrip(" ,")


def call_by_user(frame: FrameType | None, called: str = "") -> str:
    """Returns `CALLED, called in FUNCTION (FILE:LINE)` for the innermost user's code of a stack.

    It begins with the innermost frame, which calls `called`. "" if there is no user's code.
    """
    while frame is not None:
        code = frame.f_code
        if not is_library(code.co_filename):
            place = f"in {code.co_name} ({code.co_filename}:{frame.f_lineno})"
            return f"{called}, called {place}" if called else place
        # An object is known by its class.
        called = re.sub(r"\.__(init|call)__$", "", code.co_qualname).rpartition(".")[2]
        frame = frame.f_back
    return ""


def users_traceback(
    trace: TracebackType | None, *, all_others: bool = False
) -> TracebackType | None:
    """Returns the frames of the user's code alone, if it was the user's code that failed.

    The traceback stays as it is if this package is not in it, or if this package called no code of
    the user: then the error may be a fault of the package. `all_others` leaves out other frames
    also if this package itself has raised the error, so that the last frame is the user's call.
    """
    frames = list(traceback.walk_tb(trace))
    files = [frame.f_code.co_filename for frame, _ in frames]
    own = [is_users(file) for file in files]
    entry = next((i for i, file in enumerate(files) if _is_package(file)), None)
    if entry is None or not (any(own) if all_others else any(own[entry:])):
        return trace
    kept: TracebackType | None = None
    for (frame, line), is_own in zip(reversed(frames), reversed(own), strict=True):
        if is_own:
            kept = TracebackType(kept, frame, frame.f_lasti, line)
    return kept


def _is_package(file: str) -> bool:
    return Path(file).is_relative_to(_PACKAGE)

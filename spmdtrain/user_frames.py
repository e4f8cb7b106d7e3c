"""Errors of a user's function with the user's own line of code first."""

import functools
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from spmdtrain.errors import UserError

F = TypeVar("F", bound=Callable[..., Any])

_OTHERS = tuple(
    str(Path(str(path)).resolve())
    for path in (
        Path(__file__).parent,
        *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
    )
)


class _Plain(str):
    """A message that a KeyError shows as it is, not quoted."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def locate_errors(function: F) -> F:
    """Wraps a function so that its errors begin with the user's innermost line.

    The type of an error and its traceback stay as they are; `UserError` is left alone.

    Args:
      function: A function that JAX traces, an objective for example.

    Returns:
      A function of the same arguments.
    """

    @functools.wraps(function)
    def located(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except UserError:
            raise
        except Exception as error:
            where = _own_line(error)
            if where is not None:
                _prepend(error, where)
            raise

    return located  # type: ignore[return-value]


def _own_line(error: Exception) -> str | None:
    """The innermost frame that is in neither a library nor this package."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame
        for frame in frames
        if not str(Path(frame.filename).resolve()).startswith(_OTHERS)
        and "site-packages" not in frame.filename
        and not frame.filename.startswith("<frozen")
    ]
    if not own:
        return None
    last = own[-1]
    return f"{last.filename}:{last.lineno}, in {last.name}: {last.line}"


def _prepend(error: Exception, where: str) -> None:
    if error.args and isinstance(error.args[0], str):
        error.args = (_Plain(f"{where}\n{error.args[0]}"), *error.args[1:])
    else:
        error.add_note(where)

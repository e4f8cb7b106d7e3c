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
    Path(str(path)).resolve()
    for path in (
        Path(__file__).parents[1],
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
    own = [frame for frame in frames if _is_own(frame.filename)]
    if not own:
        return None
    last = own[-1]
    return f"{last.filename}:{last.lineno}, in {last.name}: {last.line}"


def _is_own(filename: str) -> bool:
    path = Path(filename).resolve()
    of_others = any(map(path.is_relative_to, _OTHERS)) or "site-packages" in path.parts
    return not of_others and not filename.startswith("<frozen")


def _prepend(error: Exception, where: str) -> None:
    first = error.args[0] if error.args else None
    if isinstance(error, KeyError) and error.args and not isinstance(first, str):
        first = repr(first)  # for example a number
    if isinstance(first, str):
        error.args = (_Plain(f"{where}\n{first}"), *error.args[1:])
    else:
        error.add_note(where)

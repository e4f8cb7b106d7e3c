"""Errors in the code of users: their place, and what an uncaught one shows and exits with.

Python ends a script with code 1 after any error, and shows all frames. Schedulers and the launcher
decide by the code whether a restart helps, and users look for their own line.
"""

import functools
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from spmdtrain.errors import ExitCode, UserError, for_users, open_closed_output
from spmdtrain.source_files import is_users, users_traceback

SWITCH = "SPMDTRAIN_EXCEPTHOOK"
"""Environment variable: `off` leaves uncaught errors to Python."""
_LEFT_OUT = "(frames of libraries are left out: JAX_TRACEBACK_FILTERING=off shows them)"
_NOTE_OF_JAX = "JAX has removed its internal frames"  # in a note that JAX adds to an error


class Located(str):
    """A message that begins with the place of an error, which a traceback shows as well.

    A KeyError shows it as it is, not quoted. `place` has the file, line and code.
    """

    place: str
    message: str

    def __new__(cls, place: str, message: str) -> "Located":
        located = super().__new__(cls, f"{place}\n{message}" if message else place)
        located.place, located.message = place, message
        return located

    def __reduce__(self) -> tuple[type["Located"], tuple[str, str]]:
        return Located, (self.place, self.message)

    def __repr__(self) -> str:
        return str(self)


class _Plain(str):
    """A message that a KeyError shows as it is, not quoted."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _show_only(code: int, error: BaseException, show: Callable[[], None]) -> None:
    show()


@dataclass
class _State:
    """The hook of this process."""

    installed: bool = False
    usual: Callable[..., Any] = sys.__excepthook__
    """The hook that it has replaced."""
    end: Callable[[int, BaseException, Callable[[], None]], None] = _show_only
    """Takes the exit code, the error and a function that shows it; in a job it ends the process."""


_STATE = _State()


def install_hook() -> None:
    """Reports uncaught errors from now on; later calls do nothing: scripts may replace the hook."""
    if _STATE.installed:
        return
    _STATE.installed = True
    open_closed_output()
    _STATE.usual, sys.excepthook = sys.excepthook, _report
    _install_in_notebook()


def end_by(end: Callable[[int, BaseException, Callable[[], None]], None] | None) -> None:
    """Sets how uncaught errors end this process; None for a process without a job.

    `end` takes the exit code, the error and a function that shows it.
    """
    install_hook()
    _STATE.end = end or _show_only


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Shows an error, and exits with the code that the commands have for it: `sys.excepthook`.

    Raises `SystemExit` for errors of users, if Python is not interactive.
    """
    is_on = os.environ.get(SWITCH) != "off"
    reported = for_users(error) if is_on else None
    code = ExitCode.INTERRUPTED if isinstance(error, KeyboardInterrupt) else ExitCode.FAILED
    if reported is not None:
        code, line = reported

    def show() -> None:
        # Another hook, such as a tracker's, also wants to see errors that are one line.
        if reported is not None and _STATE.usual is sys.__excepthook__:
            print(line, file=sys.stderr)
            return
        if is_on and _simplify(error):
            print(_LEFT_OUT, file=sys.stderr)
        _STATE.usual(kind, error, error.__traceback__)

    _STATE.end(code, error, show)
    is_interactive = hasattr(sys, "ps1") or sys.flags.interactive or sys.flags.inspect
    if reported is not None and not is_interactive:
        raise SystemExit(int(code))


def _simplify(error: BaseException) -> bool:
    """Removes frames of libraries from an error and its causes; returns whether there were any."""
    if _shows_all_frames():
        return False
    found, seen = False, set[int]()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        trace = users_traceback(each.__traceback__, all_others=for_users(each) is not None)
        if trace is not each.__traceback__:
            found = True
            each.__traceback__ = trace
            _remove_place(each)
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
    return found


def _remove_place(error: BaseException) -> None:
    """Removes what the traceback shows, and JAX's note that some of the traceback is missing."""
    if error.args and isinstance(first := error.args[0], Located):
        error.args = (_Plain(first.message), *error.args[1:])
    notes = getattr(error, "__notes__", [])
    notes[:] = [x for x in notes if _NOTE_OF_JAX not in x and not isinstance(x, Located)]


def _shows_all_frames() -> bool:
    jax = sys.modules.get("jax")
    if jax is None:
        return os.environ.get("JAX_TRACEBACK_FILTERING") == "off"
    return bool(jax.config.jax_traceback_filtering == "off")


def _install_in_notebook() -> None:
    """Simplifies errors of IPython's cells, unless the user has set another way to show errors."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is None or shell.custom_exceptions:
        return

    def show(
        shell: Any,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
        tb_offset: int | None = None,
    ) -> None:
        if os.environ.get(SWITCH) != "off" and _simplify(error):
            # Without IPython's own frame, which it would leave out.
            trace, tb_offset = error.__traceback__, 0
            if for_users(error) is None:
                print(_LEFT_OUT, file=sys.stderr)
        shell.showtraceback((kind, error, trace), tb_offset=tb_offset)

    shell.set_custom_exc((Exception,), show)


# -- errors of a function --------------------------------------------------------------------------


def locate_errors(
    function: Callable[..., Any], what: str, *, takes: str = "(model, batch)"
) -> Callable[..., Any]:
    """Wraps a function so that its errors begin with the user's innermost line.

    The type of an error and its traceback stay as they are; `UserError` is left alone. A KeyError
    lists the fields of the batch, or example, if the key is none of them.

    Args:
      function: An objective for example.
      what: Its name as an argument, for messages: `objective`.
      takes: Its arguments, a batch or an example among them.

    Raises:
      UserError: If it is not a function.
    """
    if not callable(function):
        several = isinstance(function, (list, tuple, dict))
        hint = (
            "; one function returns several values by name, and its loss may be their sum"
            if several and what == "objective"
            else ""
        )
        raise UserError(
            f"{what} is a {type(function).__name__}: it must be a function of {takes}{hint}"
        )
    names = takes.strip("()").split(", ")
    name = "batch" if "batch" in names else "example"
    position = names.index(name)

    @functools.wraps(function)
    def located(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except UserError:
            raise
        except Exception as error:
            where = _own_line(error)
            if where is not None:
                _prepend(error, where, name, args[position] if len(args) > position else None)
            raise

    return located


def _own_line(error: Exception) -> str | None:
    """Returns the innermost line in neither a library nor this package; None without one."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_users(frame.filename)]
    if not own:
        return None
    last = own[-1]
    return f"{last.filename}:{last.lineno}, in {last.name}: {last.line}"


def _prepend(error: Exception, where: str, name: str, batch: Any) -> None:
    first = error.args[0] if error.args else None
    if isinstance(first, Located):
        return  # a function that was called by another one
    if isinstance(error, KeyError) and error.args:
        is_field = isinstance(batch, Mapping) and first not in batch
        # Another dictionary may have lacked the key: this names the batch without a verdict.
        fields = f" (the fields of the {name}: {', '.join(map(repr, batch))})" if is_field else ""
        first = f"{first!r}{fields}"
    if isinstance(first, str):
        error.args = (Located(where, first), *error.args[1:])
    else:
        error.add_note(Located(where, ""))

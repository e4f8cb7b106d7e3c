"""Errors for users: exceptions, exit codes, messages, places in user code, missing libraries."""

import contextlib
import difflib
import enum
import errno
import functools
import importlib
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any

# -- Exceptions for users, exit codes, and helpers for error messages ------------------------------

NOT_SET = "not set"
"""Stands in messages for the value of an option that only another process has."""

# Control characters, line separators, characters that change the direction of text, and lone
# surrogates: they would break a line, change how a terminal displays it, or cannot be encoded.
# Credentials in a URL: user and password, and the parameters of a URL that is signed in advance.
_USER = re.compile(r"://[^/?#\s@]*@")
_SIGNATURE = re.compile(
    r"([?&](?:X-(?:Amz|Goog)-\w[\w-]*|AWSAccessKeyId|GoogleAccessId|Signature|sig)=)[^&\s\"']*",
    re.I,
)
_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


LARGEST_INTEGER = 2**63
"""Integers in configurations and files are smaller: JSON is read with that bound."""


class ExitCode(enum.IntEnum):
    """Exit codes of commands and scripts. Any other code is an unexpected failure."""

    DONE = 0
    FAILED = 1
    BAD_INPUT = 2
    NON_FINITE = 3
    DEVICE_FAULT = 4
    DIFFERENT = 5  # a replayed step, or one of two runs
    PREEMPTED = 75
    INTERRUPTED = 130  # Ctrl-C before a run had started; the code that shells use


class UserError(ValueError):
    """Wrong usage, configuration or data.

    Commands and scripts print the message without a traceback and exit 2.

    Args:
      *message: The message.
    """

    def __init__(self, *message: object) -> None:
        super().__init__(*message)
        # Here, so that scripts that fail before they train exit 2, too.

        install_hook()


class BadRecordError(UserError):
    """A record of a source that is corrupted or cannot be decoded: `SkipBadRecords` skips it."""


class StateError(ArithmeticError):
    """An invalid training state, which must be neither used nor saved.

    Args:
      message: What is wrong.
      step: The step that computed it; None if that is not known.
    """

    def __init__(self, message: str, step: int | None = None) -> None:
        super().__init__(message)
        self.step = step


class NonFiniteError(StateError):
    """A loss or state that is NaN or infinite. The exit code is 3.

    Args:
      message: What is not finite.
      step: The step that computed it; None if that is not known.
      loss: The loss of the step; None if that is not known.
      is_infinite: Whether what was looked at is infinite, and nothing of it NaN.
      first_step: The first of the steps that may have computed it; None if `step` alone may.
    """

    def __init__(
        self,
        message: str,
        step: int | None = None,
        *,
        loss: float | None = None,
        is_infinite: bool = False,
        first_step: int | None = None,
    ) -> None:
        super().__init__(message, step)
        self.loss, self.is_infinite, self.first_step = loss, is_infinite, first_step


class ReplicaError(StateError):
    """Copies of replicated data that differ between processes. The exit code is 1."""


class DeviceFaultError(StateError):
    """A device computed gradients that other devices did not reproduce. The exit code is 4."""


class StorageError(OSError):
    """A failure to read or write data, a run's files or checkpoints. The exit code is 1."""


class ClusterError(ConnectionError):
    """A failure of the processes of a job to connect, or a lost connection between them.

    The exit code is 1.
    """


class OwnExit(SystemExit):
    """An end of this process that the framework raises: never a `sys.exit` of the user's code."""


class EarlyExit(OwnExit):
    """Raised in place of the `SystemExit` of a `sys.exit` that ends a run before its end.

    Args:
      reason: The call and its place, in one line.
      code: The exit code of the process, which is a failure.
    """

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(code)
        self.reason = reason
        self.status = code


CONTROL = "spmdtrain control"
"""In place of the name of a signal: the request of the run's owner to stop it."""


class PreemptedExit(OwnExit):
    """Raised after a signal stopped the run. Its state is saved if it has a workdir. Exits 75.

    After a stop by `spmdtrain control` it exits 0, so that nothing starts the run again.

    It is a `SystemExit`, so that a script that calls `fit` exits with this code and an
    `except Exception` does not swallow it.

    Args:
      signal: The name of the signal, such as `SIGTERM`, or `CONTROL`.
    """

    def __init__(self, signal: str) -> None:
        super().__init__(int(ExitCode.DONE if signal == CONTROL else ExitCode.PREEMPTED))
        self.signal = signal


class Interrupted(KeyboardInterrupt):
    """Raised in place of `PreemptedExit` after Ctrl-C in a notebook or an interactive Python.

    A `SystemExit` would end an interactive Python, and its variables would be lost.
    """


def for_users(error: BaseException) -> tuple[ExitCode, str] | None:
    """Returns the exit code and the line to print of an error for users; None for other errors."""
    if _is_limit_of_processes(error):
        return ExitCode.FAILED, (
            "failed: no further thread or process can be started: raise the limit of processes of "
            "this user (ulimit -u) or container (pids.max)"
        )
    if not isinstance(error, (UserError, StorageError, ClusterError, StateError)):
        return None
    # It may quote a path or a name with control characters, as the user gave it.
    message = "\n".join(map(printable, str(error).split("\n")))
    if isinstance(error, UserError):
        return ExitCode.BAD_INPUT, f"error: {message}"
    if isinstance(error, (StorageError, ClusterError, ReplicaError)):
        return ExitCode.FAILED, f"failed: {message}"
    if isinstance(error, NonFiniteError):
        return ExitCode.NON_FINITE, f"stopped: {message}"
    if isinstance(error, DeviceFaultError):
        return ExitCode.DEVICE_FAULT, f"stopped: {message}"
    return None


def _is_limit_of_processes(error: BaseException) -> bool:
    """Returns whether a thread or process could not be started, because there are too many."""
    if type(error) is RuntimeError:
        return str(error) == "can't start new thread"
    if not isinstance(error, BlockingIOError) or error.errno != errno.EAGAIN:
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))
    return where.partition(".")[0] in ("subprocess", "multiprocessing")


def print_error(code: int, line: str, error: Exception) -> int:
    """Prints the line of an error for users to stderr; returns the exit code."""
    print(line, file=sys.stderr)
    return code


def exit_code_of(
    command: Callable[[], int], failed: Callable[[int, str, Exception], int] = print_error
) -> int:
    """Runs a command, and reports an error for users without a traceback; returns the exit code.

    `failed` reports the error: it takes the exit code, the line and the exception, and returns the
    exit code. Any other exception propagates.
    """
    install_hook()  # for the other exceptions
    _COMMANDS.append(command)
    try:
        code = command()
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except Exception as error:
        if isinstance(error, OSError) and (why := _unwritable()):
            error = StorageError(f"standard output cannot be written: {why}")
        if (reported := for_users(error)) is None:
            raise
        return failed(*reported, error)
    finally:
        _COMMANDS.pop()


@contextlib.contextmanager
def exit_if_output_is_closed() -> Iterator[None]:
    """Ends the process without a traceback if nothing reads its standard output, as after `head`.

    Raises `SystemExit` with `FAILED`, or `StorageError` if the disk of the output is full.
    """
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:  # it was closed before Python started
                sys.stdout.flush()
    except BrokenPipeError:
        discard_output(sys.stdout)
        raise SystemExit(ExitCode.FAILED) from None  # as rich does
    except OSError as error:
        if error.filename is not None:
            raise
        discard_output(sys.stdout)
        raise StorageError(f"standard output cannot be written: {error.strerror}") from error


def discard_output(stream: IO[str]) -> None:
    """Discards what is written to a standard stream from now on, and what Python still buffers."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def open_closed_output() -> None:
    """Opens the standard streams that the caller has closed, as `>&-` does.

    Otherwise the next file that is opened, such as one of a checkpoint, would get the number of the
    stream, and everything that libraries print.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
    for number, name in enumerate(("stdout", "stderr"), start=1):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", closefd=False))


def _unwritable() -> str | None:
    """Returns why standard output cannot be written, and discards it; None if it can be."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()  # what could not be written is still in its buffer
    except OSError as error:
        discard_output(sys.stdout)
        return error.strerror
    return None


_NO_VALUE = object()
_COMMANDS: list[Callable[[], int]] = []  # that run in this process


def option(name: str, value: object = _NO_VALUE) -> str:
    """Returns how the user sets a field: `--log-every 3` in a command, else `log_every=3`.

    The name of a nested field has a dot. Without a value, the name alone is returned.
    """
    if not _COMMANDS:
        shown = tuple(value) if isinstance(value, list) else value
        return name if value is _NO_VALUE else f"{name}={shown!r}"
    *group, own = name.replace("_", "-").split(".")
    flag = f"--{'.'.join([*group, f'no-{own}' if value is False else own])}"
    if value is _NO_VALUE or isinstance(value, bool):
        return flag
    values = value if isinstance(value, list) else [value]
    return " ".join([flag, *(shlex.quote(str(item)) for item in values)])


def in_command() -> bool:
    """Returns whether a command of this package runs, as opposed to a script of the user."""
    return bool(_COMMANDS)


def printable(name: object) -> str:
    """Returns text, such as a file name, in one line: control characters are escaped.

    Credentials in a URL are left out.
    """
    text = str(name)
    if "://" in text:
        text = without_credentials(text)
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)


def without_credentials(text: str) -> str:
    """Returns text whose URLs show `***` for a user with a password, and for signatures."""
    return _SIGNATURE.sub(r"\1***", _USER.sub("://***@", text))


def is_text(name: str) -> bool:
    """Returns whether a name can be written as UTF-8; the name of a file may have any bytes."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def foreign(text: object, longest: int = 2000) -> str:
    """Returns untrusted text in one line of at most `longest` characters, then `...` if cut."""
    shown = printable(str(text)[: longest + 1])
    return shown if len(shown) <= longest else f"{shown[:longest]}..."


OTHER_NAMES = {
    "learning_rate": "lr",
    "steps": "num_steps n_steps max_steps total_steps train_steps num_train_steps iterations",
    "epochs": "num_epochs n_epochs max_epochs num_train_epochs",
    "global_batch_size": "batch_size train_batch_size bs",
    "batch_size_per_device": "per_device_batch_size per_replica_batch_size micro_batch_size",
    "microbatches": "gradient_accumulation_steps accumulate_grad_batches grad_accum_steps",
    "workdir": "output_dir out_dir outdir logdir log_dir model_dir checkpoint_dir ckpt_dir "
    "save_dir default_root_dir working_dir",
    "compute_dtype": "dtype precision mixed_precision",
    "steps_per_dispatch": "steps_per_execution",
    "data_workers": "num_workers workers dataloader_num_workers",
    "seed": "random_seed tf_random_seed",
    "checkpoint_every_steps": "save_steps save_every save_freq save_checkpoints_steps",
    "eval_every_steps": "eval_steps eval_every validation_freq",
    "eval_batch_size": "validation_batch_size per_device_eval_batch_size val_batch_size",
    "validation": "validation_data eval_dataset val_data valid_data dev_data",
    "train": "train_dataset training_data train_data",
    "keep_latest": "save_total_limit max_to_keep",
    "trackers": "report_to logger loggers",
    "resume": "resume_from_checkpoint auto_resume",
    "log_every": "log_every_n_steps logging_steps log_freq",
    "remat": "gradient_checkpointing rematerialize",
    "ema_decay": "ema ema_momentum",
    "profile_steps": "profile_batch",
}
"""Field name -> its names in other frameworks."""
_FIELDS = {other: field for field, others in OTHER_NAMES.items() for other in others.split()}


def field_meant(name: str, known: Iterable[str]) -> str | None:
    """Returns the field that other frameworks call `name`, if it is in `known`; else None."""
    field = _FIELDS.get(name.replace("-", "_"))
    return field if field is not None and field in known else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns `" Did you mean 'x'?"` with the nearest known name, or a list of all names."""
    names = [str(name) for name in known]
    meant = field_meant(name, names)
    near = [meant] if meant else difflib.get_close_matches(name, names, n=1)
    return f" Did you mean {near[0]!r}?" if near else f" There are: {', '.join(names)}."


# -- Errors in the code of users: their place, and what an uncaught one shows and exits with -------
#
# Python ends a script with code 1 after any error, and shows all frames. Schedulers and the
# launcher decide by the code whether a restart helps, and users look for their own line.

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
    if reported is not None and not is_interactive():
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


def in_notebook() -> bool:
    """Returns whether a cell of a notebook runs this code."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def is_interactive() -> bool:
    """Returns whether a person types the statements of this Python, also in a notebook."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive or sys.flags.inspect)


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
        if isinstance(error, Interrupted):
            return  # the run has printed what it has saved
        if os.environ.get(SWITCH) != "off" and _simplify(error):
            # Without IPython's own frame, which it would leave out.
            trace, tb_offset = error.__traceback__, 0
            if for_users(error) is None:
                print(_LEFT_OUT, file=sys.stderr)
        shell.showtraceback((kind, error, trace), tb_offset=tb_offset)

    shell.set_custom_exc((Exception, Interrupted), show)


# -- errors of a function --------------------------------------------------------------------------


class LocatedErrors(contextlib.AbstractContextManager[Any, None]):
    """A context in which the errors of a user's function begin with the user's innermost line.

    The type of an error and its traceback stay as they are; `UserError` is left alone. A KeyError
    lists the fields of the batch, or example, if the key is none of them.

    Args:
      batch: What the function gets.
      name: "batch" or "example".
    """

    def __init__(self, batch: Any, name: str = "batch") -> None:
        self._batch, self._name = batch, name

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, Exception) or isinstance(error, UserError):
            return
        if (where := _own_line(error)) is not None:
            _prepend(error, where, self._name, self._batch)


def locate_errors(
    function: Callable[..., Any], what: str, *, takes: str = "(model, batch)"
) -> Callable[..., Any]:
    """Wraps a function so that its errors are located; see `LocatedErrors`.

    Args:
      function: An objective for example.
      what: Its name as an argument, for messages: `objective`.
      takes: Its arguments, a batch or an example among them.

    Raises:
      UserError: If it is not a function.
    """
    if not callable(function):
        raise function_error(function, what, takes)
    names = takes.strip("()").split(", ")
    name = "batch" if "batch" in names else "example"
    position = names.index(name)

    @functools.wraps(function)
    def located(*args: Any, **kwargs: Any) -> Any:
        with LocatedErrors(args[position] if len(args) > position else None, name):
            return function(*args, **kwargs)

    return located


def function_error(given: Any, what: str, takes: str = "(model, batch)") -> UserError:
    """Returns the error for an argument that is not a function."""
    several = isinstance(given, (list, tuple, dict))
    hint = (
        "; one function returns several values by name, and its loss may be their sum"
        if several and what == "objective"
        else ""
    )
    return UserError(f"{what} is a {type(given).__name__}: it must be a function of {takes}{hint}")


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
    notes = getattr(error, "__notes__", ())
    if isinstance(first, Located) or any(isinstance(note, Located) for note in notes):
        return  # of a function that was called by another one
    if isinstance(error, KeyError) and error.args:
        is_field = isinstance(batch, Mapping) and first not in batch
        # Another dictionary may have lacked the key: this names the batch without a verdict.
        fields = f" (the fields of the {name}: {', '.join(map(repr, batch))})" if is_field else ""
        first = f"{first!r}{fields}"
    if isinstance(first, str):
        error.args = (Located(where, first), *error.args[1:])
    else:
        error.add_note(Located(where, ""))


# -- The source files of users, as opposed to those of libraries -----------------------------------

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


# -- Versions of libraries, and libraries that only some users need --------------------------------

NOT_INSTALLED = "not installed"


def version_of(package: str) -> str:
    """Returns the installed version of a package such as "orbax-checkpoint", or `NOT_INSTALLED`.

    spmdtrain has a version without an installation, too: if its folder is on the path.
    """
    import importlib.metadata  # takes longer than the rest of this file

    import spmdtrain  # which imports this file

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return spmdtrain.__version__ if package == "spmdtrain" else NOT_INSTALLED


def import_extra(module: str, extra: str, purpose: str) -> Any:
    """Imports a module of an optional library.

    Args:
      module: The module's full name, such as `pyarrow.parquet`.
      extra: The extra of pyproject.toml that installs the library.
      purpose: What needs the library, a noun in the plural for the message: `Parquet files`.

    Raises:
      UserError: If the library is not installed, or cannot be imported.
    """
    library = module.partition(".")[0]
    try:
        importlib.import_module(library)
        return importlib.import_module(module)
    except ImportError as error:
        why = f"cannot be imported ({' '.join(str(error).split())})"
        if isinstance(error, ModuleNotFoundError) and error.name == library:
            why = "is not installed"
        raise UserError(
            f"{purpose} need {library}, which {why}: pip install 'spmdtrain[{extra}]'"
        ) from error

"""Exceptions for users, exit codes, and helpers for error messages."""

import contextlib
import difflib
import enum
import errno
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import IO

NOT_SET = "not set"
"""Stands in messages for the value of an option that only another process has."""

# Control characters, line separators, characters that change the direction of text, and lone
# surrogates: they would break a line, change how a terminal displays it, or cannot be encoded.
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
        # Here, so that scripts that fail before they train exit 2, too. Imported late, because the
        # hook is about these errors.
        from spmdtrain.user_errors import install_hook

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
    """A loss or state that is NaN or infinite. The exit code is 3."""


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


class PreemptedExit(OwnExit):
    """Raised after a signal stopped the run. Its state is saved if it has a workdir. Exits 75.

    It is a `SystemExit`, so that a script that calls `fit` exits with this code and an
    `except Exception` does not swallow it.

    Args:
      signal: The name of the signal, such as `SIGTERM`.
    """

    def __init__(self, signal: str) -> None:
        super().__init__(int(ExitCode.PREEMPTED))
        self.signal = signal


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
    from spmdtrain.user_errors import install_hook

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


def printable(name: object) -> str:
    """Returns text, such as a file name, in one line: control characters are escaped."""
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], str(name))


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

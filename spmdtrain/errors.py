"""The errors a user meets, and the exit codes they end in."""

import difflib
import enum
import sys
from collections.abc import Callable, Iterable


class ExitCode(enum.IntEnum):
    """What the commands exit with; anything else is an unforeseen failure."""

    DONE = 0
    FAILED = 1
    BAD_INPUT = 2
    NON_FINITE = 3
    PREEMPTED = 75
    INTERRUPTED = 130  # by Ctrl-C before a run had begun, as shells have it


class UserError(ValueError):
    """Wrong usage, configuration or data. The commands print its message alone and exit 2."""


class NonFiniteError(ArithmeticError):
    """The loss or the state became NaN or infinite. The commands exit 3."""


class StorageError(OSError):
    """A run's files or checkpoints can no longer be written."""


class ClusterError(ConnectionError):
    """The processes of a job could not come together, or have lost one another."""


class Preempted(SystemExit):
    """The run was asked to stop, saved its state, and can be started again. Exits 75.

    A `SystemExit`, so that a script which calls `fit` ends with the right code by itself and an
    `except Exception` on the way does not swallow it.
    """

    def __init__(self, signal: str) -> None:
        super().__init__(int(ExitCode.PREEMPTED))
        self.signal = signal


def for_users(error: BaseException) -> tuple[ExitCode, str] | None:
    """The exit code and the line of an error that is meant for users; None for any other."""
    if isinstance(error, UserError):
        return ExitCode.BAD_INPUT, f"error: {error}"
    if isinstance(error, (StorageError, ClusterError)):
        return ExitCode.FAILED, f"failed: {error}"
    if isinstance(error, NonFiniteError):
        return ExitCode.NON_FINITE, f"stopped: {error}"
    return None


def tell(code: int, line: str, error: Exception) -> int:
    """Print the line of an error that is meant for users; returns the exit code."""
    print(line, file=sys.stderr)
    return code


def exit_code_of(
    command: Callable[[], int], failed: Callable[[int, str, Exception], int] = tell
) -> int:
    """What a command returns; an error that is meant for users is one line and its exit code."""
    try:
        return command()
    except Exception as error:
        if (found := for_users(error)) is None:
            raise
        return failed(*found, error)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`" Did you mean 'x'?"` for the nearest known name, or the list of names."""
    names = [str(name) for name in known]
    near = difflib.get_close_matches(name, names, n=1)
    return f" Did you mean {near[0]!r}?" if near else f" There are: {', '.join(names)}."

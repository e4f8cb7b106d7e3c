"""The errors a user meets, and the exit codes they end in."""

import difflib
import enum
import re
import sys
from collections.abc import Callable, Iterable

NOT_SET = "not set"
"""The value of an option that only the other process has, in a message."""

# What would end a line, or change how a terminal shows it, its direction too; and halves of pairs,
# which are no text.
_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


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


class StateError(ArithmeticError):
    """The state of a training is wrong, and must be neither used nor saved."""


class NonFiniteError(StateError):
    """The loss or the state became NaN or infinite. The commands exit 3."""


class ReplicaError(StateError):
    """Processes hold different copies of what must be equal. The commands exit 1."""


class StorageError(OSError):
    """A run's files or checkpoints can no longer be written."""


class ClusterError(ConnectionError):
    """The processes of a job could not come together, or have lost one another."""


class PreemptedExit(SystemExit):
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
    if isinstance(error, (StorageError, ClusterError, ReplicaError)):
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


def printable(name: object) -> str:
    """A file's name, say, so that it is shown in one line, whatever is in it."""
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], str(name))


def foreign(text: object, longest: int = 2000) -> str:
    """Returns text from the network in one line of bounded length, control characters escaped."""
    shown = printable(str(text)[: longest + 1])
    return shown if len(shown) <= longest else f"{shown[:longest]}..."


# What other frameworks call a field, by the field's name here.
_OTHER_NAMES = {
    "learning_rate": "lr",
    "steps": "num_steps n_steps max_steps total_steps train_steps num_train_steps iterations",
    "epochs": "num_epochs n_epochs max_epochs num_train_epochs",
    "global_batch_size": "batch_size train_batch_size bs",
    "batch_size_per_device": "per_device_batch_size per_replica_batch_size micro_batch_size",
    "microbatches": "gradient_accumulation_steps accumulate_grad_batches grad_accum_steps",
    "workdir": "output_dir out_dir outdir logdir log_dir model_dir",
    "compute_dtype": "dtype precision mixed_precision",
    "steps_per_dispatch": "steps_per_execution",
    "data_threads": "num_workers workers dataloader_num_workers",
    "seed": "random_seed tf_random_seed",
    "checkpoint_every_steps": "save_steps save_every save_freq save_checkpoints_steps",
    "eval_every_steps": "eval_steps eval_every validation_freq",
    "log_every": "log_every_n_steps logging_steps log_freq",
    "remat": "gradient_checkpointing rematerialize",
    "ema_decay": "ema ema_momentum",
    "profile_steps": "profile_batch",
}
_FIELDS = {other: field for field, others in _OTHER_NAMES.items() for other in others.split()}


def field_meant(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name of what another framework calls `name`; None if there is none."""
    field = _FIELDS.get(name.replace("-", "_"))
    return field if field is not None and field in known else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`" Did you mean 'x'?"` for the nearest known name, or the list of names."""
    names = [str(name) for name in known]
    meant = field_meant(name, names)
    near = [meant] if meant else difflib.get_close_matches(name, names, n=1)
    return f" Did you mean {near[0]!r}?" if near else f" There are: {', '.join(names)}."

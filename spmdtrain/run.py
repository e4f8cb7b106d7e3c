"""`python -m spmdtrain.run --config experiments/NAME.py`: train, evaluate or predict."""

import gc
import signal

from spmdtrain.distributed.out_of_memory import keep_freed_memory

_INTERRUPT = signal.getsignal(signal.SIGINT)
if __name__ == "__main__":
    # Garbage collections take a fifth of the time of the imports, which leave no garbage. `_load`
    # enables them after the last import.
    gc.disable()
    keep_freed_memory()  # before the imports, which start threads
    if _INTERRUPT is signal.default_int_handler:
        # During the import of JAX there is nothing to save: Ctrl-C ends the process at once,
        # without a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

import functools
import sys
from collections.abc import Callable, Sequence

from spmdtrain.config.command_line import parse_command_line
from spmdtrain.distributed import failures, initialize, progress
from spmdtrain.errors import ExitCode, PreemptedExit, exit_code_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    try:
        given = sys.argv[1:] if arguments is None else arguments
        progress.begin()
        code = exit_code_of(lambda: _load(given)(), failures.fail_with_message)
        initialize.leave()
        return code
    except PreemptedExit:
        initialize.leave()
        raise
    except SystemExit as stop:  # at the end of a role or of the help, or of the user's code
        failures.check_exit(stop)
        raise
    except KeyboardInterrupt as stop:
        why = "interrupted: what was saved last stays"
        return failures.fail(ExitCode.INTERRUPTED, why, stop, lambda: print(why, file=sys.stderr))


def _load(arguments: Sequence[str]) -> Callable[[], int]:
    """Returns the run that a command line describes, after the last import."""
    try:
        command = parse_command_line(arguments)  # imports the experiment
        from spmdtrain.train.command import execute  # `--help` has ended before, without it
    finally:
        if not gc.isenabled():
            # Later collections, also that of the interpreter's exit, skip the modules.
            gc.freeze()
            gc.enable()
    return functools.partial(execute, command)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, _INTERRUPT)
    sys.exit(main())

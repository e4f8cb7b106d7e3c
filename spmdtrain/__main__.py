"""The command `spmdtrain`, also `python -m spmdtrain`."""

import functools
import operator
import os
import pathlib
import runpy
import sys
from collections.abc import Sequence
from typing import Annotated, Any

from spmdtrain import __version__
from spmdtrain.errors import (
    ExitCode,
    UserError,
    did_you_mean,
    exit_code_of,
    exit_if_output_is_closed,
)

COMMANDS = {
    "run": "train, evaluate or predict with an experiment",
    "launch": "start, watch and restart the processes of a job",
    "plan": "check if a run fits on other devices, and estimate its speed there",
    "sweep": "train with many configurations, and compare them",
    "report": "write a page with curves, failures, checkpoints and samples of runs",
    "control": "ask a run in progress to save, profile, evaluate or stop",
    "cluster": "check TF_CONFIG and the network between its tasks",
    "checkpoints": "verify, show or export the checkpoints of a run",
    "replay": "make a step again, compare two runs, or print the examples of a step",
    "init": "write a small project: an experiment, its tests, pyproject.toml",
}
"""Subcommands and their summaries. `NAME` is the module that `python -m spmdtrain.NAME` runs."""

HELP = "\n".join(
    [
        "usage: spmdtrain COMMAND ...",
        "",
        "Trains JAX models on any number of devices and hosts.",
        "",
        "commands:",
        *(f"  {name:11}  {summary}" for name, summary in COMMANDS.items()),
        "",
        "options:",
        "  -h, --help   show this text and exit; `spmdtrain COMMAND --help` describes a command",
        "  --version    show the version and exit",
        "  --tyro-write-completion {bash,zsh,fish} FILE",
        "               write a file for the shell's completion of commands and options",
    ]
)
_COMPLETION = "--tyro-write-completion"


def main() -> int:
    """Runs the subcommand named by the first argument, as `python -m spmdtrain.NAME` does.

    The module of the subcommand runs as `__main__`, before anything that imports JAX. Therefore
    Ctrl-C is handled identically from the start (`spmdtrain.run` sets its handler before its
    imports), and the processes of a job compare the same source files, however each was started.

    Returns the exit code, unless the subcommand itself ends the process.
    """
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in COMMANDS:
        if __name__ != "__main__" and not sys.flags.safe_path:
            # The installed script: modules are imported from the working directory, as by
            # `python -m`, and not from the directory of the script.
            sys.path[0] = os.getcwd()
        del sys.argv[1]
        runpy.run_module(f"spmdtrain.{name}", run_name="__main__", alter_sys=True)
    elif name in ("-h", "--help"):
        with exit_if_output_is_closed():
            print(HELP)
    elif name == "--version":
        print(f"spmdtrain {__version__}")
    elif name.replace("_", "-") == _COMPLETION:
        return exit_code_of(lambda: write_completion(sys.argv[2:]))
    elif not name:
        print(HELP, file=sys.stderr)
        return ExitCode.BAD_INPUT
    else:
        line = f"error: {name!r} is not a command of spmdtrain.{did_you_mean(name, COMMANDS)}"
        print(line, file=sys.stderr)
        return ExitCode.BAD_INPUT
    return ExitCode.DONE


def write_completion(arguments: Sequence[str]) -> int:
    """Writes a completion file for the command `spmdtrain`, its subcommands and their options.

    `arguments` are the shell and the file to write; `--config FILE` adds the options of an
    experiment. Returns the exit code.

    Raises:
      SystemExit: If an argument is wrong.
      UserError: If the file cannot be written.
    """
    import argparse

    import tyro

    import spmdtrain.checkpoints.command as checkpoints
    import spmdtrain.cluster.command as cluster
    import spmdtrain.control.command as control
    import spmdtrain.init as init
    import spmdtrain.launch.launcher as launch
    import spmdtrain.plan.command as plan
    import spmdtrain.replay.command as replay
    import spmdtrain.report.command as report
    import spmdtrain.sweep.command as sweep
    from spmdtrain.config import command_line

    parser = argparse.ArgumentParser(prog=f"spmdtrain {_COMPLETION}")
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    parser.add_argument("file")
    parser.add_argument("--config", help="an experiment whose own options are completed, too")
    given = parser.parse_args(arguments)
    commands: dict[str, Any] = {
        "run": command_line.command_type(given.config),
        "launch": launch.Options,
        "plan": command_line.command_type(given.config, plan.Options),
        "sweep": command_line.command_type(given.config, sweep.Options),
        "report": report.Options,
        "control": control.Options,
        "cluster": cluster.Options,
        "checkpoints": checkpoints.SUBCOMMANDS,
        "replay": replay.Options,
        "init": init.Options,
    }
    parts = [
        Annotated[kind, tyro.conf.subcommand(name, prefix_name=False, description=COMMANDS[name])]
        for name, kind in commands.items()
    ]
    command: Any = Annotated[functools.reduce(operator.or_, parts), tyro.conf.arg(name="")]
    try:
        tyro.cli(command, args=[_COMPLETION, given.shell, given.file], prog="spmdtrain")
    except SystemExit as end:
        if end.code:
            raise
    except OSError as error:
        raise UserError(f"{given.file} cannot be written: {error.strerror}") from error
    # A description of several lines would be completed as several words.
    file = pathlib.Path(given.file)
    script = file.read_text().split("\n")
    spec = "COMPLETION_SPEC = "
    lines = (x.replace("\\n", " ") if x.startswith(spec) else x for x in script)
    file.write_text("\n".join(lines))
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())

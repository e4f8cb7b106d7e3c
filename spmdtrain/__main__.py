"""The command `spmdtrain`, also `python -m spmdtrain`."""

import os
import runpy
import sys

from spmdtrain import __version__
from spmdtrain.errors import ExitCode, did_you_mean, exit_if_output_is_closed

COMMANDS = {
    "run": "train, evaluate or predict with an experiment",
    "launch": "start, watch and restart the processes of a job",
    "plan": "check if a run fits on other devices, and estimate its speed there",
    "cluster": "check TF_CONFIG and the network between its tasks",
    "checkpoints": "verify, show or export the checkpoints of a run",
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
    ]
)


def main() -> int:
    """Runs the subcommand named by the first argument, as `python -m spmdtrain.NAME` does.

    The module of the subcommand runs as `__main__`, before anything that imports JAX. Therefore
    Ctrl-C is handled identically from the start (`spmdtrain.run` sets its handler before its
    imports), and the processes of a job compare the same source files, however each was started.

    Returns:
      The exit code, unless the subcommand itself ends the process.
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
    elif not name:
        print(HELP, file=sys.stderr)
        return ExitCode.BAD_INPUT
    else:
        line = f"error: {name!r} is not a command of spmdtrain.{did_you_mean(name, COMMANDS)}"
        print(line, file=sys.stderr)
        return ExitCode.BAD_INPUT
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())

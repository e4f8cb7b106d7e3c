"""`python -m spmdtrain.launch`: starts, watches and restarts the processes of a job.

Usage: python -m spmdtrain.launch --processes N [OPTIONS] -- COMMAND. Each process runs COMMAND,
such as `python -m spmdtrain.run --config experiments/X.py --workdir RUN`.
"""

import os
import shutil
import sys
from collections.abc import Sequence

import tyro

from spmdtrain.errors import UserError, exit_code_of, exit_if_output_is_closed
from spmdtrain.launch.child import Signals
from spmdtrain.launch.launcher import Launcher, Options
from spmdtrain.launch.machine import Machine
from spmdtrain.launch.task_env import EVALUATOR, environments_of, gpus_of, training_tasks

_USAGE = "python -m spmdtrain.launch --processes N [options] -- COMMAND"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command, by default with the arguments of the process; returns the exit code."""
    return exit_code_of(lambda: execute(sys.argv[1:] if arguments is None else arguments))


def execute(arguments: Sequence[str]) -> int:
    """Runs a job and returns its exit code.

    The arguments are the options of the launcher, `--`, and the command of the tasks.

    Raises:
      UserError: If an option is not valid, or if the command is missing or cannot be run.
    """
    own, separator, command = _split(arguments)
    with exit_if_output_is_closed():
        options = tyro.cli(
            Options, args=own, prog="python -m spmdtrain.launch", description=__doc__
        )
    if not command:
        missing = "nothing follows the --" if separator else "there is no --"
        raise UserError(f"no command to start, because {missing}: write {_USAGE}")
    _check(options)
    # The Python and the command of this environment, which need not be the first in PATH.
    if command[0] in ("python", "python3"):
        command = [sys.executable, *command[1:]]
    elif command[0] == "spmdtrain":
        command = [sys.executable, "-m", *command]
    if shutil.which(command[0]) is None:
        raise UserError(f"{command[0]!r} cannot be run: no such command, or not executable")
    names = training_tasks(options.processes, options.ps) + [EVALUATOR] * options.evaluator
    gpus = gpus_of(os.environ)
    environments = environments_of(names, options.devices_per_process, os.environ, gpus)
    machine = Machine(
        command,
        names,
        environments["chief"],
        warm_spares=options.warm_spares,
        with_servers=bool(options.ps),
        asks_for_refused=options.min_processes is not None,
    )
    with Signals() as signals, machine:
        if gpus and options.evaluator and not environments[EVALUATOR]["CUDA_VISIBLE_DEVICES"]:
            machine.log("the evaluator runs on the CPU because the training uses all GPUs")
        return Launcher(options, environments, machine, signals).run()


def _split(arguments: Sequence[str]) -> tuple[list[str], bool, list[str]]:
    """Returns the launcher's own arguments, whether a `--` follows, and the command after it."""
    own = list(arguments)
    at = own.index("--") if "--" in own else len(own)
    return own[:at], at < len(own), own[at + 1 :]


def _check(options: Options) -> None:
    minimum = {"processes": 1, "devices_per_process": 1, "min_processes": 1}
    for name, value in vars(options).items():
        if value is not None and not value >= minimum.get(name, 0):
            option = name.replace("_", "-")
            raise UserError(f"--{option} is {value}: it must be at least {minimum.get(name, 0)}")
    if (least := options.min_processes) is None:
        return
    if options.ps:
        raise UserError(
            f"--min-processes is {least}, and with --ps workers are restarted one by one while the "
            "others continue: leave --min-processes out"
        )
    if least >= options.processes:
        raise UserError(
            f"--min-processes is {least} of {options.processes}: give less than --processes"
        )

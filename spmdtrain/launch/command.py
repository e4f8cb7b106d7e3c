"""`python -m spmdtrain.launch`: starts, watches and restarts the processes of a job.

Usage: python -m spmdtrain.launch --processes N [OPTIONS] -- COMMAND. Each process runs COMMAND,
such as `python -m spmdtrain.run --config experiments/X.py --workdir RUN`. On several machines, each
runs it with its TF_CONFIG and without --processes.
"""

import os
import shutil
import sys
from collections.abc import Sequence

import tyro

from spmdtrain.cluster import job_token
from spmdtrain.cluster.spec import Role, from_environment
from spmdtrain.errors import ExitCode, UserError, exit_code_of, exit_if_output_is_closed
from spmdtrain.launch.child import Signals
from spmdtrain.launch.launcher import Launcher, Options
from spmdtrain.launch.machine import Machine
from spmdtrain.launch.machines import Cluster, Follower, Machines
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
    if options.processes is None:
        return _run_on_several(options, command)
    return _run_on_one(options, command, options.processes)


def _run_on_one(options: Options, command: Sequence[str], processes: int) -> int:
    """Runs a job whose processes are all on this machine."""
    names = training_tasks(processes, options.ps) + [EVALUATOR] * options.evaluator
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
        code = Launcher(options, environments, machine, signals).run()
    assert code is not None  # there are no other machines
    return code


def _run_on_several(options: Options, command: Sequence[str]) -> int:
    """Runs the process of this machine in a job of several, with the launchers of the others."""
    cluster = _cluster(options)
    name = cluster.names[cluster.rank]
    inherited = {n: value for n, value in os.environ.items() if n != "TF_CONFIG"}
    found = environments_of([name], options.devices_per_process, inherited, gpus_of(os.environ))
    environments = {other: found.get(other, {}) for other in cluster.names}
    machine = Machine(
        command,
        training_tasks(len(cluster.names)),
        environments[name],
        warm_spares=options.warm_spares,
        asks_for_refused=options.min_processes is not None,
    )
    code: int | None = None
    again = False
    with (
        Signals() as signals,
        machine,
        Machines(cluster, machine.folder, machine.log, signals) as machines,
    ):
        while code is None:
            leader = machines.seek(again=again)
            again = True
            if signals.received:
                code = ExitCode.PREEMPTED  # nothing is lost: it may be started again
            elif leader is None:
                code = Launcher(options, environments, machine, signals, machines).run()
            else:
                own = environments[name]
                code = Follower(leader, machines, machine, own, signals, options.grace).run()
    return code


def _cluster(options: Options) -> Cluster:
    """Returns the machines of TF_CONFIG; raises `UserError` if there are none, or by an option."""
    spec = from_environment()
    if spec.role is Role.LOCAL:
        raise UserError(
            f"--processes is missing, and TF_CONFIG describes no other machines: write {_USAGE}"
        )
    if spec.rank is None or spec.has_ps:
        what = "the cluster has parameter servers" if spec.has_ps else "this is an evaluator"
        raise UserError(
            f"TF_CONFIG: {what}, and without --processes the launchers of several machines start "
            "chief and workers only: start the command without the launcher"
        )
    if options.ps or options.evaluator:
        option = "--ps" if options.ps else "--evaluator"
        raise UserError(f"{option} needs --processes: on several machines, name them in TF_CONFIG")
    if (least := options.min_processes) is not None and least >= spec.num_processes:
        raise UserError(
            f"--min-processes is {least} of the {spec.num_processes} of TF_CONFIG: give less, or "
            "leave it out"
        )
    token = job_token.read(warn=lambda text: print(text, file=sys.stderr))
    if not token:
        raise UserError(
            "the launchers of several machines need the job's token, because they start and end "
            f"processes for each other: set the same {job_token.TOKEN} or {job_token.TOKEN_FILE} "
            "for all of them (openssl rand -hex 32 makes one)"
        )
    names = [str(task) for task in spec.processes]
    addresses = [task.address for task in spec.processes]
    return Cluster(names, addresses, spec.rank, token, least)


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
    if options.processes is not None and least >= options.processes:
        raise UserError(
            f"--min-processes is {least} of {options.processes}: give less than --processes"
        )

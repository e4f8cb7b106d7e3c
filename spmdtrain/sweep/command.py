"""Trains with many configurations and compares them.

`python -m spmdtrain.sweep --config experiments/X.py --set learning_rate=1e-3,3e-3 seed=0..4`
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from spmdtrain.cluster.spec import Role, from_environment
from spmdtrain.config.command_line import Command, parse_command_line
from spmdtrain.config.run_config import RunConfig
from spmdtrain.document.terminal import Terminal
from spmdtrain.errors import ExitCode, StorageError, UserError, exit_code_of, printable
from spmdtrain.launch.child import Signals
from spmdtrain.record.run_files import WorkdirLock
from spmdtrain.record.storage import folder_of, is_url, one_line
from spmdtrain.sweep.runner import (
    LOG,
    SweepRunner,
    read_results,
    result_tables,
    trial_environments,
    write_results,
)
from spmdtrain.sweep.trials import (
    GridTrials,
    SearchTrials,
    Setting,
    SweepSpecification,
    TrialFactory,
    TrialSource,
    TrialState,
    check_option_names,
    corners,
    grid_points,
    option_kinds,
    parse_settings,
    readable_name,
    store_specification,
)

PROGRAM = "python -m spmdtrain.sweep"
PAGE = "report.html"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the command; all others are those of the experiment, for every trial."""

    config: str
    """The experiment: a Python file with a Config, and a build(config) or train(config, loop)."""
    preset: str | None = None
    """One of the experiment's PRESETS; other options override its values."""
    set: tuple[str, ...]
    """The options that vary, and their values: learning_rate=1e-3,3e-3 seed=0..4 mesh.data=1,2
    shuffle=true,false. All combinations are tried. For --search also ranges of real numbers:
    learning_rate=log:1e-4..1e-2 ema_decay=0.9..0.99."""
    search: int | None = None
    """Number of trials that Optuna samples, instead of all combinations (extra `sweep`). Once five
    trials have finished, a trial is ended at an evaluation if its best value so far is worse than
    the median of theirs at that step."""
    jobs: int = 1
    """Number of trials that run at the same time."""
    devices_per_trial: int | None = None
    """GPUs of each trial, or virtual CPU devices if there is no GPU. None means an equal share of
    the GPUs, or the CPU devices of the experiment."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command, by default with the arguments of the process, and returns its exit code.

    It is 0 if all trials have finished or were pruned, 1 if one failed, 2 for invalid input, and 75
    if trials were preempted, so that the same command resumes them.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        return exit_code_of(lambda: execute(words))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED


def execute(arguments: Sequence[str]) -> int:
    """Runs or resumes a sweep and prints its results; returns the exit code of `main`.

    Raises:
      UserError: If an option, the experiment or the folder is not valid.
      StorageError: If a file of the sweep can no longer be written.
    """
    command = parse_command_line(arguments, Options, PROGRAM, __doc__)
    options, config = command.options, command.config
    _check(options)
    settings = parse_settings(options.set)
    kinds = option_kinds(config)
    check_option_names(settings, ["preset", *kinds])
    others = _options_of_trials(arguments)
    _check_given_once(settings, others)
    environments = trial_environments(options.jobs, options.devices_per_trial, os.environ)
    folder = _folder_of(command)
    factory = TrialFactory(
        options.config, others, [name for name in kinds if kinds[name]], folder, PROGRAM
    )
    # Everything is checked before the folder is written.
    combine = grid_points if options.search is None else corners
    points = combine(settings)
    configs = [factory.check(values) for values in points]
    if options.search is None:
        _check_different(points, configs)
    sweep = SweepSpecification(
        config=options.config,
        arguments=others,
        set={
            setting.option: text.partition("=")[2]
            for setting, text in zip(settings, options.set, strict=True)
        },
        search=options.search,
        metric=config.best_metric,
        direction=config.best_direction,
    )
    lock = _lock(folder)
    try:
        store_specification(folder_of(str(folder)), sweep)
        source: TrialSource = (
            GridTrials(factory.grid(points))
            if options.search is None
            else SearchTrials(
                folder, settings, factory, options.search, sweep.direction, sweep.metric
            )
        )
        return _run(source, factory, environments, sweep)
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {one_line(error)}") from error
    finally:
        lock.close()


def _check(options: Options) -> None:
    for name in ("search", "jobs", "devices_per_trial"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} is {value}: it must be 1 or more")
    if from_environment().role is not Role.LOCAL:
        raise UserError(
            "TF_CONFIG describes a cluster, and each trial of a sweep is a run of one process: "
            "unset TF_CONFIG"
        )


def _options_of_trials(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments without the options of this command and the workdir."""
    own = {"workdir", *Options.__dataclass_fields__} - {"preset"}
    kept, keeps = list[str](), True
    for argument in arguments:
        if argument.startswith("--"):
            keeps = argument.partition("=")[0][2:].replace("-", "_") not in own
        if keeps:
            kept.append(argument)
    return kept


def _check_given_once(settings: Sequence[Setting], others: Sequence[str]) -> None:
    given = {
        word.partition("=")[0][2:].replace("-", "_") for word in others if word.startswith("--")
    }
    for setting in settings:
        group, dot, name = setting.option.rpartition(".")
        if given & {setting.option, f"{group}{dot}no_{name}"}:
            raise UserError(
                f"{setting.option} is both in --set and an option for every trial: remove one"
            )


def _check_different(points: Sequence[Mapping[str, str]], configs: Sequence[RunConfig]) -> None:
    names: dict[str, str] = {}
    for values, config in zip(points, configs, strict=True):
        name = readable_name(values)
        if (other := names.setdefault(repr(config), name)) != name:
            raise UserError(
                f"--set: the trials {other} and {name} are the same: remove one of the values"
            )


def _folder_of(command: Command) -> Path:
    workdir = command.config.workdir
    assert workdir is not None
    if is_url(workdir):
        raise UserError(
            f"--workdir {printable(workdir)}: the folder of a sweep must be on this machine"
        )
    return Path(folder_of(workdir if command.own_workdir else f"{workdir}-sweep"))


def _lock(folder: Path) -> WorkdirLock:
    """Creates the sweep's folder and locks it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return WorkdirLock(folder_of(str(folder)), ".lock", "sweep", Terminal().line)
    except StorageError:  # in use
        raise
    except OSError as error:
        raise UserError(f"workdir {folder} cannot be written: {one_line(error)}") from error


def _run(
    source: TrialSource,
    factory: TrialFactory,
    environments: Sequence[dict[str, str]],
    sweep: SweepSpecification,
) -> int:
    """Runs the trials and shows their results; returns the exit code."""
    terminal, folder = Terminal(), factory.folder
    terminal.line(_introduction(source, len(environments), folder))
    # The trials are stopped by signals, but the results are not.
    with Signals() as signals:
        with (
            terminal.live() as show,
            SweepRunner(
                *(source, factory, environments, sweep.metric, sweep.direction),
                *(signals, terminal, show),
            ) as runner,
        ):
            runner.run()
        stopped = bool(signals.received)
    results = read_results(source.trials, sweep.metric, sweep.direction)
    terminal.show(*result_tables(results, sweep.metric, sweep.direction))
    write_results(folder, results, sweep.metric, sweep.direction)
    for trial in source.trials:
        if trial.state is TrialState.FAILED:
            log = trial.folder / LOG
            terminal.line(f"failed: {trial.name} {trial.reason}; see {log}")
    if results and all(result.value is None for result in results):
        terminal.line(f"no trial has an evaluation of {sweep.metric!r} (best_metric)")
    if not stopped:  # a machine that is taken away leaves little time
        _write_page(terminal, [result.trial.folder for result in results], folder / PAGE)
    states = [trial.state for trial in source.trials]
    if stopped or TrialState.PREEMPTED in states:
        terminal.line("the sweep is not complete: the same command resumes it")
        return ExitCode.PREEMPTED
    return ExitCode.FAILED if TrialState.FAILED in states else ExitCode.DONE


def _introduction(source: TrialSource, jobs: int, folder: Path) -> str:
    states = [trial.state for trial in source.trials]
    done = sum(state not in (TrialState.WAITING, TrialState.RUNNING) for state in states)
    before = f", {done} of them done before" if done else ""
    return f"{source.total} trials{before}, {jobs} at a time, in {folder}"


def _write_page(terminal: Terminal, runs: Sequence[Path], page: Path) -> None:
    """Writes the report page that compares the trials, in a separate process."""
    written = [str(run) for run in runs if (run / "config.json").exists()]
    if not written:
        return
    command = [sys.executable, "-m", "spmdtrain.report", *written, "--output", str(page)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:  # the message names the extra that is missing
        *_, last = ["no message", *ended.stderr.strip().splitlines()]
        terminal.line(f"no report page (exit code {ended.returncode}): {last}")
    else:
        terminal.line(f"report page: {page}")

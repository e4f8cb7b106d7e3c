"""The command line of an experiment: options of the command and fields of its configuration."""

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import tyro

from spmdtrain.config.options import Which, unchecked_groups
from spmdtrain.config.run_config import RunConfig, check_compute_dtype
from spmdtrain.errors import UserError, exit_if_output_is_closed, field_meant
from spmdtrain.sharding.mesh import check_inherited, cpu_devices_in_environment
from spmdtrain.train.command_help import HELP, HELP_ALL, show_help
from spmdtrain.train.experiment import ExperimentFile, load_experiment

PROGRAM = "python -m spmdtrain.run"
DESCRIPTION = f"`{PROGRAM} --config experiments/NAME.py`: train, evaluate or predict."
EXCLUSIVE = (("epochs", "steps"), ("global_batch_size", "batch_size_per_device"))
"""Pairs of fields with the same meaning: a given one replaces the default of the other."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the command; fields of an experiment's Config cannot have these names."""

    config: str
    """The experiment: a Python file with a Config, and a build(config) or train(config, loop)."""
    preset: str | None = None
    """One of the experiment's PRESETS; other options override its values."""
    mode: Literal["train", "evaluate", "predict"] = "train"
    """What to do; evaluate and predict take the model from a checkpoint."""
    split: Literal["train", "validation", "test"] | None = None
    """The split to evaluate or predict. By default test, or validation if there is no test split;
    predict first uses the experiment's prompts or its own generation of text, if it has them."""
    role: Literal["train", "evaluate"] | None = None
    """The role of this process if TF_CONFIG does not set it: with evaluate it evaluates the
    checkpoints of a training that runs in another job."""
    evaluate_which: tyro.conf.EnumChoicesFromValues[Which] = Which.EACH
    """The checkpoints that an evaluator evaluates: each, the oldest first, or always the newest,
    which skips older ones."""
    cluster: Literal["tf_config", "auto"] = "tf_config"
    """Source of the list of processes: TF_CONFIG alone; or auto, without TF_CONFIG also a TPU pod,
    Slurm, Open MPI or Kubernetes, of which one must be found."""
    coordinator: str | None = None
    """HOST:PORT of process 0 if there is no TF_CONFIG; the same in all processes."""
    processes: int | None = None
    """Number of processes, with --coordinator."""
    process_id: int | None = None
    """Number of this process, from 0, with --coordinator."""
    show_sharding: bool = False
    """First print the sharding of each parameter, and the memory of a device that it and its
    optimizer state use."""
    init_timeout: float = 300.0
    """Seconds to wait for the other processes at the start."""
    hang_timeout: float | None = None
    """Seconds without progress in any process after which the job ends as hung; 0 is never. The
    default is five times the longest pause between steps so far, at least 60, and 1800 for the
    first steps, compilations, saves and callbacks. A process that is alone has no default. Under
    the launcher, the launcher's --hang-timeout applies instead."""


# Options that describe the job without TF_CONFIG, and their defaults.
JOB_OPTIONS = (("coordinator", None), ("processes", None), ("process_id", None))
_OF_PLANS = {"topology", "json", "advice", "measure", "html"}
_OF_SWEEPS = {"set", "search", "jobs", "devices_per_trial"}
RESERVED = frozenset(
    {f.name for f in dataclasses.fields(Options)} | _OF_PLANS | _OF_SWEEPS | {"help", "help_all"}
)


@dataclass(frozen=True)
class Command:
    """A parsed command line."""

    options: Any
    """The options of the command."""
    experiment: ExperimentFile
    config: RunConfig
    source: str | None
    """The checkpoint or workdir to evaluate or predict from, if --init-from is given."""
    own_workdir: bool
    """Whether the workdir was given, not chosen by default."""


def parse_command_line(
    arguments: Sequence[str],
    of: type = Options,
    prog: str = PROGRAM,
    description: str | None = DESCRIPTION,
) -> Command:
    """Parses a command line in two passes, because the experiment's file defines options.

    Args:
      arguments: The arguments, without the program's name.
      of: The dataclass of the command's options, `config` and `preset` among them.
      prog: The program's name, for the help.
      description: The first paragraph of the help if no experiment is given.

    Raises:
      UserError: If an option or the experiment is wrong.
      SystemExit: After `--help` or `--help-all`, or if the parser finds an error.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--config")
    first.add_argument("--preset")
    try:
        known, _ = first.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UserError(str(error)) from error
    help_all = any(argument in HELP_ALL for argument in arguments)
    asks_help = help_all or any(argument in HELP for argument in arguments)
    if known.config is None:
        if asks_help:
            text = description or ""
            show_help(RunConfig(), of, prog, text, experiment="", all_options=help_all)
            raise SystemExit(0)
        _parse(_command(RunConfig(), description, of), arguments, prog)
        raise AssertionError("tyro exits if --config is missing")
    experiment = load_experiment(known.config, RESERVED)
    default = experiment.preset(known.preset)
    given = {a.split("=")[0].lstrip("-").replace("-", "_") for a in arguments if a[:2] == "--"}
    default = _without_replaced(default, given)
    if asks_help:
        name = f"Experiment {experiment.name}"
        show_help(default, of, prog, experiment.doc, experiment=name, all_options=help_all)
        raise SystemExit(0)
    _check_words(arguments, default, of)
    arguments = _together(arguments, _lists(type(default), of))
    with unchecked_groups():  # their errors would be printed by tyro, in a box
        command = _parse(_command(default, experiment.doc, of), arguments, prog)
    config = command.experiment
    check_inherited(config)  # its class may override the checks
    if "cpu_devices" in given and (setting := cpu_devices_in_environment()):
        raise UserError(f"--cpu-devices and {setting} in the environment exclude each other")
    own_workdir = config.workdir is not None
    if not own_workdir:
        config = dataclasses.replace(config, workdir=f"runs/{experiment.name}")
    source = config.init_from if "init_from" in given else None
    return Command(command, experiment, config, source, own_workdir)


def command_type(config: str | None, of: type = Options) -> Any:
    """Returns the dataclass of all options of a command, for tyro.

    Args:
      config: The experiment's file; None leaves out the experiment's own options.
      of: The dataclass of the command's own options.
    """
    if config is None:
        return _command(RunConfig(), None, of)
    experiment = load_experiment(config, RESERVED)
    return _command(experiment.preset(None), None, of)


def _command(default: RunConfig, description: str | None, of: type) -> Any:
    """Returns one flat dataclass of the command's options and the experiment's, for tyro."""
    config: Any = Annotated[type(default), tyro.conf.arg(name="")]
    return dataclasses.make_dataclass(
        "Command",
        [("experiment", config, dataclasses.field(default=default))],
        bases=(of,),
        frozen=True,
        kw_only=True,
        namespace={"__doc__": description},
    )


def _parse(command: Any, arguments: Sequence[str], prog: str) -> Any:
    with exit_if_output_is_closed():
        return tyro.cli(command, args=arguments, prog=prog)


def _check_words(arguments: Sequence[str], default: RunConfig, of: type) -> None:
    """Raises `UserError` for option names of other frameworks, with the name that is used here."""
    known = [field.name for fields in (default, of) for field in dataclasses.fields(fields)]
    for number, argument in enumerate(arguments):
        option, _, value = argument.partition("=")
        name = option.removeprefix("--").replace("-", "_")
        if not option.startswith("--"):
            continue
        if name == "compute_dtype":
            check_compute_dtype(value or "".join(arguments[number + 1 : number + 2]))
        if name not in known and (meant := field_meant(name, known)) is not None:
            raise UserError(f"{option} is not an option. Did you mean --{meant.replace('_', '-')}?")


def _lists(*classes: type) -> set[str]:
    """Returns the names of the fields that hold any number of values."""
    hints = {name: hint for each in classes for name, hint in get_type_hints(each).items()}
    # Of `tuple[str, ...] | None`, too.
    kinds = {name: [hint, *get_args(hint)] for name, hint in hints.items()}
    return {
        name
        for name, found in kinds.items()
        if any(
            get_origin(x) is list or (get_origin(x) is tuple and ... in get_args(x)) for x in found
        )
    }


def _together(arguments: Sequence[str], lists: set[str]) -> list[str]:
    """Joins repeated options of several values, because tyro would keep only the last.

    `--freeze a --freeze b` becomes `--freeze a b`. `lists` has the names of these options.
    """
    parts: list[list[str]] = []  # an option with its values, or one argument
    places: dict[str, list[str]] = {}
    values: list[str] | None = None  # of the option that was mentioned last
    for argument in arguments:
        option, has_value, value = argument.partition("=")
        name = option.removeprefix("--").replace("-", "_")
        if argument.startswith("--") and name in lists:
            if name not in places:
                places[name] = [option]
                parts.append(places[name])
            values = places[name]
            values += [value] if has_value else []
        elif values is not None and not argument.startswith("--"):
            values.append(argument)
        else:
            values = None
            parts.append([argument])
    return [argument for part in parts for argument in part]


def _without_replaced(default: RunConfig, given: set[str]) -> RunConfig:
    """Returns the defaults without the fields that a given option replaces."""
    for one, other in EXCLUSIVE:
        if one in given and other in given:
            raise UserError(f"--{one} and --{other} exclude each other".replace("_", "-"))
        for chosen, replaced in ((one, other), (other, one)):
            if chosen in given:
                cleared: dict[str, Any] = {replaced: None}
                default = dataclasses.replace(default, **cleared)
    return default

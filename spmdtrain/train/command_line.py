"""The command line of an experiment: options of the command and fields of its configuration."""

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from spmdtrain.config import RunConfig
from spmdtrain.config_checks import check, check_compute_dtype
from spmdtrain.errors import UserError, field_meant
from spmdtrain.sharding.mesh import cpu_devices_in_environment
from spmdtrain.train import evaluator
from spmdtrain.train.experiment import ExperimentFile, load_experiment

PROGRAM = "python -m spmdtrain.run"
DESCRIPTION = f"`{PROGRAM} --config experiments/NAME.py`: train, evaluate or predict."
# Pairs of fields that say the same thing: to give one replaces a default of the other.
_EXCLUSIVE = (("epochs", "steps"), ("global_batch_size", "batch_size_per_device"))


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command's own options; an experiment's Config may not have fields of these names."""

    config: str
    """The experiment: a Python file with a Config and a build(config)."""
    preset: str | None = None
    """One of the experiment's PRESETS, whose values the other options then change."""
    mode: Literal["train", "evaluate", "predict"] = "train"
    """What to do; evaluate and predict take the model from a checkpoint."""
    split: Literal["train", "validation", "test"] | None = None
    """The split to evaluate or predict; by default the test split, or else the validation split."""
    role: Literal["train", "evaluate"] | None = None
    """What this process is for, where TF_CONFIG does not say so: evaluate looks at the checkpoints
    of a training that goes on elsewhere, outside its job."""
    evaluate_which: evaluator.Which = evaluator.Which.EACH
    """The checkpoints that such an evaluator looks at."""
    cluster: Literal["tf_config", "auto"] = "tf_config"
    """Where the other processes are described; auto also finds TPU pods, Slurm, Open MPI and
    Kubernetes."""
    coordinator: str | None = None
    """HOST:PORT of process 0, where there is no TF_CONFIG; the same in all processes."""
    processes: int | None = None
    """How many processes there are, with coordinator."""
    process_id: int | None = None
    """Which of them this one is, from 0, with coordinator."""
    show_sharding: bool = False
    """First print where each parameter lives, and what it and its optimizer state take of a
    device."""
    init_timeout: float = 300.0
    """Seconds in which all processes have to come."""
    hang_timeout: float | None = None
    """Seconds without any progress in any process after which a job counts as hung, and ends; 0 is
    never. 1800 where nothing is said; under the launcher its own --hang-timeout counts."""


BY_HAND = (("coordinator", None), ("processes", None), ("process_id", None))
_OF_PLANS = {"topology", "json", "advice", "measure"}
RESERVED = frozenset({f.name for f in dataclasses.fields(Options)} | _OF_PLANS | {"help"})


@dataclass(frozen=True)
class Command:
    """A command line, understood."""

    options: Any
    """The command's own."""
    experiment: ExperimentFile
    config: RunConfig
    source: str | None
    """What to evaluate or predict from, where --init-from names it."""
    own_workdir: bool
    """Whether anybody has said where the run's files go."""


def parse(
    arguments: Sequence[str],
    of: type = Options,
    prog: str = PROGRAM,
    description: str | None = DESCRIPTION,
) -> Command:
    """A command line, read in two steps: the experiment's file says what options there are.

    `of` are the command's own, `config` and `preset` among them; `description` is what its help
    begins with where no experiment is given.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--config")
    first.add_argument("--preset")
    try:
        known, _ = first.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UserError(str(error)) from error
    if known.config is None:
        tyro.cli(_command(RunConfig(), description, of), args=arguments, prog=prog)
        raise AssertionError("tyro ends where --config is missing")
    experiment = load_experiment(known.config, RESERVED)
    default = experiment.preset(known.preset)
    given = {a.split("=")[0].lstrip("-").replace("-", "_") for a in arguments if a[:2] == "--"}
    default = _without_replaced(default, given)
    _check_words(arguments, default, of)
    arguments = _together(arguments)
    command: Any = tyro.cli(_command(default, experiment.doc, of), args=arguments, prog=prog)
    config = command.experiment
    check(config)
    if "cpu_devices" in given and (setting := cpu_devices_in_environment()):
        raise UserError(f"--cpu-devices and {setting} in the environment exclude each other")
    own_workdir = config.workdir is not None
    if not own_workdir:
        config = dataclasses.replace(config, workdir=f"runs/{experiment.name}")
    source = config.init_from if "init_from" in given else None
    return Command(command, experiment, config, source, own_workdir)


def _command(default: RunConfig, description: str | None, of: type) -> Any:
    """The command's options and the experiment's as one flat dataclass for tyro."""
    config: Any = Annotated[type(default), tyro.conf.arg(name="")]
    return dataclasses.make_dataclass(
        "Command",
        [("experiment", config, dataclasses.field(default=default))],
        bases=(of,),
        frozen=True,
        kw_only=True,
        namespace={"__doc__": description},
    )


def _check_words(arguments: Sequence[str], default: RunConfig, of: type) -> None:
    """Raises `UserError` for options and values of other frameworks that have a name here."""
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


_LISTS = ("compiler_options", "freeze")  # in no order, so that they may be given one by one


def _together(arguments: Sequence[str]) -> list[str]:
    """All values of such an option after its first mention: else those of the last alone count.

    So `--freeze a --freeze b` is `--freeze a b`.
    """
    found: list[list[str]] = []  # an option with its values, or one argument
    places: dict[str, list[str]] = {}
    values: list[str] | None = None  # of the option that was mentioned last
    for argument in arguments:
        option, has_value, value = argument.partition("=")
        name = option.removeprefix("--").replace("-", "_")
        if argument.startswith("--") and name in _LISTS:
            if name not in places:
                places[name] = [option]
                found.append(places[name])
            values = places[name]
            values += [value] if has_value else []
        elif values is not None and not argument.startswith("--"):
            values.append(argument)
        else:
            values = None
            found.append([argument])
    return [argument for part in found for argument in part]


def _without_replaced(default: RunConfig, given: set[str]) -> RunConfig:
    """The defaults less those that an option given in their stead replaces."""
    for one, other in _EXCLUSIVE:
        if one in given and other in given:
            raise UserError(f"--{one} and --{other} exclude each other".replace("_", "-"))
        for chosen, replaced in ((one, other), (other, one)):
            if chosen in given:
                cleared: dict[str, Any] = {replaced: None}
                default = dataclasses.replace(default, **cleared)
    return default

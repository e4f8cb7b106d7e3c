"""The command line of an experiment: options, their groups, and the help."""

import argparse
import dataclasses
import enum
import functools
import json
import operator
import re
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Never, Union, get_args, get_origin, get_type_hints

import tyro
from rich.text import Text

from spmdtrain.config.conflicts import EXCLUSIVE
from spmdtrain.config.experiment import ExperimentFile, load_experiment
from spmdtrain.config.options import (
    Group,
    OptionRow,
    Which,
    default_of,
    field_docs,
    option_field,
    option_rows,
    schema_of,
    unchecked_groups,
)
from spmdtrain.config.run_config import (
    OPTIONS,
    RunConfig,
    check_compute_dtype,
    config_as_json,
)
from spmdtrain.document.terminal import LINE_WIDTH, Terminal
from spmdtrain.errors import UserError, exit_if_output_is_closed, field_meant, foreign
from spmdtrain.sharding.mesh import check_inherited, cpu_devices_in_environment
from spmdtrain.trackers.base import find_tracker

# -- The command line of an experiment: options of the command and fields of its configuration -----

PROGRAM = "python -m spmdtrain.run"
DESCRIPTION = f"`{PROGRAM} --config experiments/NAME.py`: train, evaluate or predict."


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the command; fields of an experiment's Config cannot have these names."""

    config: str
    """The experiment: a Python file, or the name of its module or entry point, with a Config, and a
    build(config) or train(config, loop)."""
    preset: str | None = None
    """One of the experiment's PRESETS; other options override its values."""
    mode: Literal["train", "evaluate", "predict"] = "train"
    """What to do; evaluate and predict take the model from a checkpoint."""
    schema: bool = False
    """Print the JSON schema of the configuration, and exit."""
    split: Literal["train", "validation", "test"] | None = option_field(
        None, Group.EVALUATION, usual=True
    )
    """The split to evaluate or predict. By default test, or validation if there is no test split;
    predict first uses the experiment's prompts or its own generation of text, if it has them."""
    role: Literal["train", "evaluate"] | None = option_field(None, Group.EVALUATION)
    """The role of this process if TF_CONFIG does not set it: with evaluate it evaluates the
    checkpoints of a training that runs in another job."""
    evaluate_which: tyro.conf.EnumChoicesFromValues[Which] = option_field(
        Which.EACH, Group.EVALUATION
    )
    """The checkpoints that an evaluator evaluates: each, the oldest first, or always the newest,
    which skips older ones."""
    cluster: Literal["tf_config", "auto"] = option_field("tf_config", Group.PROCESSES, usual=True)
    """Source of the list of processes: TF_CONFIG alone; or auto, without TF_CONFIG also a TPU pod,
    Slurm, Open MPI or Kubernetes, of which one must be found."""
    coordinator: str | None = option_field(None, Group.PROCESSES)
    """HOST:PORT of process 0 if there is no TF_CONFIG; the same in all processes."""
    processes: int | None = option_field(None, Group.PROCESSES)
    """Number of processes, with --coordinator."""
    process_id: int | None = option_field(None, Group.PROCESSES)
    """Number of this process, from 0, with --coordinator."""
    show_sharding: bool = option_field(False, Group.PLACEMENT)
    """Print the sharding of each parameter, and the memory of a device that it and its optimizer
    state use, and exit. Nothing is compiled or allocated."""
    init_timeout: float = option_field(300.0, Group.PROCESSES)
    """Seconds to wait for the other processes at the start."""
    hang_timeout: float | None = option_field(None, Group.PROCESSES)
    """Seconds without progress in any process after which the job ends as hung; 0 is never. The
    default is five times the longest pause between steps so far, at least 60, and 1800 for the
    first steps, compilations, saves and callbacks. A process that is alone has no default. Under
    the launcher, the launcher's --hang-timeout applies instead."""


# Options that describe the job without TF_CONFIG, and their defaults.
JOB_OPTIONS = (("coordinator", None), ("processes", None), ("process_id", None))
_OF_PLANS = {"topology", "json", "advice", "measure", "html"}
_OF_PLANS |= {"mttf", "save_seconds", "snapshot_seconds", "restart_seconds"}
_OF_PLANS |= {"against", "calibrate", "rates"}
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
      SystemExit: After `--help`, `--help-all` or `--schema`, or if the parser finds an error.
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
    asks_schema = of is Options and "--schema" in arguments
    if known.config is None:
        if asks_schema:
            _print_schema(RunConfig())
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
    if asks_schema:
        _print_schema(default)
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
    if "trackers" in given:
        for name in config.trackers:
            find_tracker(name)
    if "cpu_devices" in given and (setting := cpu_devices_in_environment()):
        raise UserError(f"--cpu-devices and {setting} in the environment exclude each other")
    own_workdir = config.workdir is not None
    if not own_workdir:
        config = dataclasses.replace(config, workdir=f"runs/{experiment.name}")
    source = config.init_from if "init_from" in given else None
    return Command(command, experiment, config, source, own_workdir)


def _print_schema(default: RunConfig) -> Never:
    with exit_if_output_is_closed():
        schema = schema_of(type(default), config_as_json(default), OPTIONS)
        print(json.dumps(schema, indent=2, allow_nan=False))
    raise SystemExit(0)


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
    config: Any = Annotated[type(default), tyro.conf.arg(name="", help="")]
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


# -- The arguments that make a run's configuration again ------------------------------------------

# Fields of the place of a run, and those that are resolved already.
_OWN = {
    *("workdir", "cpu_devices", "resume", "trackers"),
    *("learning_rate_scaling", "learning_rate_base_batch_size", "learning_rate_table"),
}


def arguments_of(
    saved: Mapping[str, Any], default: Any, path: str, prefix: str = ""
) -> Iterator[str]:
    """Yields the arguments of the run command that turn the defaults into a configuration.

    Args:
      saved: The resolved configuration of a run as JSON.
      default: The configuration without arguments.
      path: The experiment's file, for messages.
    """
    before = config_as_json(default)
    hints = get_type_hints(type(default))
    exclusive = {name: other for pair in EXCLUSIVE for name, other in (pair, pair[::-1])}
    for name, value in saved.items():
        if not prefix and name in _OWN:
            continue
        if name not in before:
            raise UserError(
                f"the run was trained with {foreign(prefix + name)}={foreign(value)}, and the "
                f"configuration of {path} has no such field: give the file of that time: --config "
                "FILE"
            )
        if value == before[name]:
            continue
        if value is None and not prefix and saved.get(exclusive.get(name, "")) is not None:
            continue  # the other one of the pair clears it
        own = getattr(default, name)
        if dataclasses.is_dataclass(own) and isinstance(value, dict):
            yield from arguments_of(value, own, path, f"{prefix}{name}.")
            continue
        flag = f"--{prefix}{name}".replace("_", "-")
        if hints[name] is bool:
            group, _, last = f"{prefix}{name}".replace("_", "-").rpartition(".")
            inside = f"{group}." if group else ""
            yield f"--{inside}{last}" if value else f"--{inside}no-{last}"
        elif isinstance(value, (list, dict)):
            yield from (flag, *map(str, _flat(value)))
        else:
            yield f"{flag}={value}"


def _flat(value: Any) -> Iterator[Any]:
    """Yields the values in nested lists and objects, in order."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield key
            yield from _flat(each)
    elif isinstance(value, list):
        for each in value:
            yield from _flat(each)
    else:
        yield value


# -- The help of a command whose options include the options of an experiment ----------------------
#
# tyro parses the options, but has no groups of options, and cannot hide an option from the help
# only.

HELP, HELP_ALL = ("-h", "--help"), ("--help-all", "--help_all")
_INDENT, _DOC_COLUMN = 2, 30
_OPTION, _HEADING, _DEFAULT = "cyan", "bold", "dim"  # styles of rich
_NONE = type(None)
_OF_NONE = re.compile(r"None means (.+?)\.(?:\s|$)")  # in a docstring


@dataclass(frozen=True)
class OptionHelp:
    """The help of one option.

    Attributes:
      name: The name of the field; a nested one has a dot.
      spelling: The option with the placeholder of its value: `--mesh.data INT`.
      doc: The docstring of the field.
      default: As written on a command line; empty for None and empty values.
    """

    name: str
    spelling: str
    doc: str
    default: str
    is_required: bool


def show_help(
    default: RunConfig, of: type, prog: str, description: str, *, experiment: str, all_options: bool
) -> None:
    """Prints the help of a command.

    Args:
      default: The experiment's configuration with the default values.
      of: The dataclass of the command's own options.
      prog: The program's name.
      description: The first paragraphs.
      experiment: The name of the experiment; empty if none is given.
      all_options: Whether to show also rare options, and complete descriptions.
    """
    terminal = Terminal()
    width = min(terminal.console.width, 100 if terminal.console.is_terminal else LINE_WIDTH)
    own = list(option_help(of, None))
    required = [f"--{x.name} {x.name.upper()}" for x in own if x.is_required]
    usage = textwrap.wrap(" ".join(["usage:", prog, *required, "[OPTIONS]"]), width)
    lines = [*map(Text, usage), Text(), *map(Text, _paragraphs(description, width)), Text()]
    hidden, known = 0, {**OPTIONS, **option_rows(of)}
    sections = grouped(experiment, own, list(option_help(type(default), default)), known)
    for title, members in sections.items():
        is_whole = all_options or title not in list(Group)
        shown = [x for x in members if is_whole or known[x.name].option.usual]
        hidden += len(members) - len(shown)
        if shown:
            lines.append(Text(title, _HEADING))
            complete = all_options or title in (experiment, "Command")
            for option in shown:
                lines += _entry(option, width, complete=complete)
            lines.append(Text())
    rest = (
        f"--help-all shows {hidden} more options, and complete descriptions."
        if hidden
        else "--help shows the usual options only."
    )
    lines += map(Text, textwrap.wrap(rest, width))
    with exit_if_output_is_closed():
        for line in lines:
            terminal.console.print(line)


def grouped(
    experiment: str,
    own: Sequence[OptionHelp],
    config: Sequence[OptionHelp],
    known: Mapping[str, OptionRow],
) -> dict[str, list[OptionHelp]]:
    """Returns options by heading: those of the experiment, of the command, and of each group.

    In a group, usual options come first, the command's before the configuration's; the others
    follow in the other order.

    Args:
      experiment: The name of the experiment; empty if none is given.
      own: Options of the command.
      config: Options of the experiment's configuration.
      known: The properties of all options but the experiment's.
    """
    sections = {
        experiment or "Experiment": [x for x in config if x.name not in OPTIONS],
        "Command": [x for x in own if known[x.name].option.group is None],
    }
    for group in Group:
        of_command, of_config = (
            [x for x in options if x.name in known and known[x.name].option.group is group]
            for options in (own, config)
        )
        usual = [x for x in (*of_command, *of_config) if known[x.name].option.usual]
        sections[group] = usual + [x for x in (*of_config, *of_command) if x not in usual]
    return sections


# -- the options of a dataclass --------------------------------------------------------------------


def option_help(of: type, default: Any, prefix: str = "") -> Iterator[OptionHelp]:
    """Yields the help of the options that tyro makes of a dataclass.

    Args:
      default: An instance with the default values; None takes the defaults of the class.
      prefix: The beginning of the names of its options.
    """
    docs, kinds = field_docs(of), get_type_hints(of, include_extras=True)
    for field in dataclasses.fields(of):
        value = default_of(field) if default is None else getattr(default, field.name)
        kind = kinds[field.name]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from option_help(type(value), value, f"{prefix}{field.name}.")
            continue
        name = prefix + field.name
        option = f"--{name}".replace("_", "-")
        if bool in (kind, _without_none(kind)):
            option = option.replace("--", "--[no-]", 1) if value is True else option
        else:
            option += f" {_values(kind)}"
        required = value is dataclasses.MISSING
        text = "" if required else _as_written(value)
        yield OptionHelp(name, option, docs.get(field.name, ""), text, required)


def _as_written(value: Any) -> str:
    """Returns a default value as it is written on a command line."""
    if value is None or value is False:
        return ""
    if value is True:
        return "on"
    if isinstance(value, Mapping):
        return " ".join(f"{name} {_as_written(x)}" for name, x in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return " ".join(map(_as_written, value))
    if isinstance(value, enum.Enum):
        return str(value.value) if isinstance(value, enum.StrEnum) else value.name
    return str(value)


def _without_none(kind: Any) -> Any:
    """Removes Annotated from a type, and None from a union."""
    while get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) in (Union, types.UnionType):
        rest = [x for x in get_args(kind) if x is not _NONE]
        return functools.reduce(operator.or_, rest)
    return kind


def _values(kind: Any) -> str:
    """Returns the placeholder of the values of a type: INT, {auto,never}, STR ..."""
    kind = _without_none(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return "{" + ",".join(str(x) for x in arguments if x is not None) + "}"
    if isinstance(kind, type) and issubclass(kind, enum.StrEnum):
        return "{" + ",".join(kind) + "}"
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return "{" + ",".join(x.name for x in kind) + "}"
    if origin in (Union, types.UnionType):
        return "|".join(map(_values, arguments))
    if origin is tuple and arguments[-1:] != (...,):
        return " ".join(map(_values, arguments))
    if isinstance(origin, type) and arguments:  # several values of one type, or pairs
        return " ".join(_values(x) for x in arguments if x is not ...) + " ..."
    return getattr(kind, "__name__", str(kind)).upper()


# -- layout ----------------------------------------------------------------------------------------


def _entry(option: OptionHelp, width: int, *, complete: bool) -> list[Text]:
    doc = option.doc if complete else _first_sentence(option.doc)
    note = "(required)" if option.is_required else ""
    if option.default:
        note = f"[default: {option.default}]"
    elif not complete and (meaning := _OF_NONE.search(option.doc)):
        note = f"[default: {meaning[1]}]"
    column = _DOC_COLUMN if width >= 60 else _INDENT + 4
    room = max(width - column, 20)
    note_at = len(doc) + 1 if doc else 0
    words = textwrap.wrap(f"{doc} {note}".strip(), room, break_on_hyphens=False)
    left = Text(" " * _INDENT + option.spelling)
    left.stylize(_OPTION, _INDENT, _INDENT + len(option.spelling.split(" ")[0]))
    texts, seen = [], 0
    for line in words:  # the note is dim, on whichever lines it is
        text = Text(line)
        if seen + len(line) > note_at:
            text.stylize(_DEFAULT, max(0, note_at - seen))
        seen += len(line) + 1
        texts.append(text)
    if texts and left.cell_len + 2 <= column:
        left.append(" " * (column - left.cell_len)).append_text(texts.pop(0))
    wrapped = textwrap.wrap(left.plain, width, subsequent_indent=" " * (_INDENT + 4))
    lines = [left] if left.cell_len <= width else [Text(line, _OPTION) for line in wrapped]
    return lines + [Text(" " * column).append_text(text) for text in texts]


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=[.:])\s+(?=[A-Z`])", text, maxsplit=1)[0].rstrip(":")


def _paragraphs(text: str, width: int) -> list[str]:
    """Returns a text as lines of a width; indented paragraphs keep their lines."""
    lines: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        given = paragraph.strip("\n").splitlines()
        if lines:
            lines.append("")
        indented = any(line.startswith((" ", "\t")) for line in given)
        wrapped = textwrap.wrap(" ".join(given), width, break_on_hyphens=False)
        lines += given if indented else wrapped
    return lines

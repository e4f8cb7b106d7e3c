"""Specification of a sweep: the options that vary, their values, and the file `sweep.json`."""

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_type_hints

from etils import epath

from spmdtrain.config.run_config import RunConfig
from spmdtrain.errors import UserError, did_you_mean
from spmdtrain.record import no_follow, validation

FILE = "sweep.json"
MOST_TRIALS = 10_000
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"(log:)?({_NUMBER})\.\.({_NUMBER})")
_INTEGER = re.compile(r"[-+]?\d+")
_NOT_SWEPT = {
    "workdir": "each trial has its own, in the folder of the sweep",
    "config": "start a sweep for each experiment",
}


@dataclass(frozen=True)
class ListedValues:
    """An option with the values to try."""

    option: str
    values: tuple[str, ...]
    """As on a command line; several words are separated by spaces."""


@dataclass(frozen=True)
class ValueRange:
    """An option with a range of numbers to try, both ends included."""

    option: str
    low: float
    high: float
    integer: bool
    """Whether only integers are tried."""
    log: bool
    """Whether a search samples on a logarithmic scale."""

    def ends(self) -> tuple[str, str]:
        """Returns both ends as on a command line."""
        return number_text(self.low, self.integer), number_text(self.high, self.integer)


Setting = ListedValues | ValueRange


def number_text(value: float, integer: bool) -> str:
    """Returns a number as on a command line, with all its digits."""
    return str(int(value)) if integer else repr(float(value))


def parse_setting(text: str) -> Setting:
    """Parses an option and its values.

    Args:
      text: `NAME=A,B,...`, `NAME=0..4` (integers, both ends included), `NAME=0.1..0.5` or
        `NAME=log:1e-4..1e-2`. An element of a list may also be a range of integers.

    Raises:
      UserError: If the text has another form, or a value is missing, invalid or given twice.
    """
    name, equals, values = text.partition("=")
    option = name.strip().removeprefix("--").replace("-", "_")
    if not option or not equals:
        raise UserError(
            f"--set {text!r} has no values: write NAME=VALUE,VALUE, such as "
            "learning_rate=1e-3,3e-3 or seed=0..4"
        )
    elements = [element.strip() for element in values.split(",")]
    if "" in elements:
        raise UserError(f"--set {text}: a value is empty")
    ranges = [_range_of(option, element) for element in elements]
    if len(elements) == 1 and ranges[0] is not None:
        return ranges[0]
    listed: list[str] = []
    for element, found in zip(elements, ranges, strict=True):
        listed += [element] if found is None else _integers(found, f"{option}={element}")
    repeated = next((value for value in listed if listed.count(value) > 1), None)
    if repeated is not None:
        raise UserError(f"--set {option}: the value {repeated} is given twice")
    return ListedValues(option, tuple(listed))


def _range_of(option: str, text: str) -> ValueRange | None:
    """Returns the range that a text describes; None if it describes none."""
    if (match := _RANGE.fullmatch(text)) is None:
        if text.startswith("log:"):
            raise UserError(f"--set {option}={text}: write log:LOW..HIGH, two numbers")
        return None
    log, *ends = match.groups()
    integer = all(map(_INTEGER.fullmatch, ends))
    low, high = map(float, ends)
    if not (low <= high and math.isfinite(high - low)) or (low == high and not integer):
        raise UserError(f"--set {option}={text}: the first number must be the smaller one")
    if log and low <= 0:
        raise UserError(f"--set {option}={text}: a logarithmic range begins above 0")
    return ValueRange(option, low, high, integer, bool(log))


def _integers(values: ValueRange, text: str) -> list[str]:
    """Returns the integers of a range; `text` names it in errors."""
    if not values.integer or values.log:
        raise UserError(
            f"--set {text} is a range to sample from: add --search N to try N samples, or list "
            "the values (A,B,C)"
        )
    if values.high - values.low >= MOST_TRIALS:
        raise UserError(f"--set {text}: more than {MOST_TRIALS:,} values")
    return [str(value) for value in range(int(values.low), int(values.high) + 1)]


def parse_settings(texts: Sequence[str]) -> list[Setting]:
    """Parses the options that vary; see `parse_setting`.

    Raises:
      UserError: If there is none, or one of them is not valid or given twice.
    """
    settings = [parse_setting(text) for text in texts]
    if not settings:
        raise UserError("--set is missing: write --set NAME=VALUE,VALUE")
    names = [setting.option for setting in settings]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"--set gives {name} twice: write {name}=A,B,C once")
        if name in _NOT_SWEPT:
            raise UserError(f"--set {name}: it cannot vary in a sweep; {_NOT_SWEPT[name]}")
    return settings


def grid_points(settings: Sequence[Setting]) -> list[dict[str, str]]:
    """Returns all combinations, each as option name to value; the last option varies fastest.

    Raises:
      UserError: If there are too many, or a setting is a range of real numbers.
    """
    values = [
        setting.values
        if isinstance(setting, ListedValues)
        else tuple(_integers(setting, _text_of(setting)))
        for setting in settings
    ]
    if (count := math.prod(map(len, values))) > MOST_TRIALS:
        raise UserError(
            f"--set describes {count:,} trials, and the limit is {MOST_TRIALS:,}: use --search N "
            "to try N of them"
        )
    names = [setting.option for setting in settings]
    return [dict(zip(names, point, strict=True)) for point in itertools.product(*values)]


def _text_of(values: ValueRange) -> str:
    return f"{values.option}={'log:' * values.log}{'..'.join(values.ends())}"


def corners(settings: Sequence[Setting]) -> list[dict[str, str]]:
    """Returns assignments that contain each listed value and both ends of each range at least once.

    A search checks them before it starts, because its trials are not known then.
    """
    values = {
        setting.option: setting.values if isinstance(setting, ListedValues) else setting.ends()
        for setting in settings
    }
    longest = max(map(len, values.values()))
    return [
        {option: found[min(i, len(found) - 1)] for option, found in values.items()}
        for i in range(longest)
    ]


# -- the options of an experiment ------------------------------------------------------------------


def option_kinds(config: RunConfig) -> dict[str, bool]:
    """Returns the options of an experiment, nested ones with a dot, and whether each is a bool."""
    return dict(_fields_of(config, ""))


def _fields_of(group: Any, prefix: str) -> Iterator[tuple[str, bool]]:
    types = get_type_hints(type(group))
    for field in dataclasses.fields(group):
        name, value = f"{prefix}{field.name}", getattr(group, field.name)
        if dataclasses.is_dataclass(value):
            yield from _fields_of(value, f"{name}.")
        else:
            yield name, types[field.name] is bool


def check_option_names(settings: Sequence[Setting], known: Sequence[str]) -> None:
    """Raises `UserError`, with the nearest name, if an option does not exist."""
    for setting in settings:
        if setting.option not in known:
            raise UserError(
                f"--set {setting.option}: the experiment has no such option."
                f"{did_you_mean(setting.option, known)}"
            )


_BOOLS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def option_words(option: str, value: str, is_bool: bool) -> list[str]:
    """Returns the words of a command line that set an option.

    Args:
      value: Several words are separated by spaces.
      is_bool: Whether it is a switch: `--NAME` or `--no-NAME`.

    Raises:
      UserError: If the value of a switch is neither true nor false.
    """
    # The parser keeps underscores at the end of a name.
    words = option.split(".")
    stems = [word.rstrip("_") for word in words]
    parts = [s.replace("_", "-") + w[len(s) :] for s, w in zip(stems, words, strict=True)]
    group, dot, name = ".".join(parts).rpartition(".")
    if not is_bool:
        return [f"--{group}{dot}{name}", *value.split()]
    if value.lower() not in _BOOLS:
        raise UserError(f"--set {option}={value}: the value must be true or false")
    return [f"--{group}{dot}{'' if _BOOLS[value.lower()] else 'no-'}{name}"]


# -- sweep.json ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SweepSpecification:
    """The content of `sweep.json`: everything that the trials of a sweep depend on."""

    config: str
    """The experiment's file."""
    arguments: list[str]
    """Options of every trial."""
    set: dict[str, str]
    """The values of each option that varies, by name, as given."""
    search: int | None
    """Number of trials of a search; None for all combinations."""
    metric: str
    """The evaluation metric that compares the trials."""
    direction: Literal["min", "max"]

    def differences(self, other: "SweepSpecification") -> list[str]:
        """Returns the differences that make another sweep; another number of trials is none."""
        mine, others = _flat(self), _flat(other)
        return [
            f"{name} is {_shown(others.get(name))} there and {_shown(mine.get(name))} here"
            for name in dict.fromkeys([*others, *mine])
            if mine.get(name) != others.get(name)
        ]


def _flat(specification: SweepSpecification) -> dict[str, str]:
    content = dataclasses.asdict(specification)
    content["search"] = "a search" if content["search"] else "a grid"
    content["arguments"] = " ".join(content["arguments"])
    return {**{f"set {k}": v for k, v in content.pop("set").items()}, **content}


def _shown(value: str | None) -> str:
    return "missing" if value is None else value or "empty"


def store_specification(folder: epath.Path, specification: SweepSpecification) -> None:
    """Writes `sweep.json`; a sweep that is stored there must be the same.

    A search may have more trials than the stored one.

    Raises:
      UserError: If the folder holds another sweep, or its file is not valid.
    """
    try:
        text = validation.read_bytes(folder / FILE)
    except FileNotFoundError:
        text = None
    if text is not None:
        try:
            stored = validation.build(SweepSpecification, validation.parse_object(text))
        except validation.Malformed as error:
            raise UserError(f"{folder / FILE} is not the file of a sweep: {error}") from error
        if differences := specification.differences(stored):
            raise UserError(
                f"{folder} holds another sweep: {'; '.join(differences)}. Give another --workdir, "
                "or the options of that sweep to continue it"
            )
    content = json.dumps(dataclasses.asdict(specification), indent=2) + "\n"
    no_follow.write(folder, FILE, lambda file: file.write(content.encode()))


def readable_name(values: Mapping[str, str]) -> str:
    """Returns `NAME=VALUE,NAME=VALUE` with only characters that file names can have everywhere."""
    text = ",".join(f"{option}={value}" for option, value in values.items())
    return re.sub(r"[^\w.,=+-]", "_", text, flags=re.ASCII)

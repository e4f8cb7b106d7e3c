"""The options that vary in a sweep, their values, and the file of a sweep."""

import dataclasses
import itertools
import json
import re
from pathlib import Path

import pytest
from etils import epath
from helpers import DIGITS, REPOSITORY
from hypothesis import given
from hypothesis import strategies as st

from spmdtrain import RunConfig, UserError
from spmdtrain.config.command_line import parse_command_line
from spmdtrain.sweep.command import Options
from spmdtrain.sweep.trials import (
    ListedValues,
    SweepSpecification,
    ValueRange,
    check_option_names,
    corners,
    grid_points,
    option_kinds,
    option_words,
    parse_setting,
    parse_settings,
    readable_name,
    store_specification,
)

WORDS = st.text("abcdefgxyz_0123456789-", min_size=1, max_size=8)
VALUES = st.lists(WORDS, min_size=1, max_size=4, unique=True)


@given(st.dictionaries(WORDS.map(lambda word: f"o{word}".replace("-", "_")), VALUES, min_size=1))
def test_a_grid_has_each_combination_of_the_listed_values_once(
    options: dict[str, list[str]],
) -> None:
    options = dict(itertools.islice(options.items(), 4))
    settings = parse_settings([f"{name}={','.join(values)}" for name, values in options.items()])
    points = [tuple(point[name] for name in options) for point in grid_points(settings)]
    assert points == list(itertools.product(*options.values()))
    checked = corners(settings)
    for name, values in options.items():
        assert {point[name] for point in checked} == set(values)


@given(st.integers(-50, 50), st.integers(0, 20))
def test_a_range_of_integers_includes_both_ends(low: int, count: int) -> None:
    (setting,) = parse_settings([f"seed={low}..{low + count}"])
    values = [int(point["seed"]) for point in grid_points([setting])]
    assert values == list(range(low, low + count + 1))


def test_ranges_and_lists_are_distinguished() -> None:
    assert parse_setting("a=log:1e-4..1e-2") == ValueRange("a", 1e-4, 1e-2, False, True)
    assert parse_setting("a-b=0..0.5") == ValueRange("a_b", 0.0, 0.5, False, False)
    assert parse_setting("a=0..2,7") == ListedValues("a", ("0", "1", "2", "7"))
    assert parse_setting("dir=../a,../b") == ListedValues("dir", ("../a", "../b"))
    assert parse_setting("hidden=64,128 128") == ListedValues("hidden", ("64", "128 128"))


@pytest.mark.parametrize(
    "texts",
    [
        *(["seed"], ["=1"], ["seed=1,,2"], ["seed=1,1"], ["seed=3..1"], ["seed=0..1", "seed=2"]),
        *(["x=log:0..1"], ["x=log:a..b"], ["x=0.1..0.2"], ["x=0..99999"], ["workdir=a,b"], []),
        ["a=0..999", "b=0..99"],
    ],
    ids=str,
)
def test_what_has_no_meaning_in_a_grid_is_refused(texts: list[str]) -> None:
    with pytest.raises(UserError, match="--set"):
        grid_points(parse_settings(texts))


def test_an_unknown_option_is_refused_with_the_nearest_name() -> None:
    kinds = option_kinds(RunConfig())
    assert kinds["shuffle"] and not kinds["mesh.data"]
    check_option_names(parse_settings(["mesh.data=1,2"]), list(kinds))
    with pytest.raises(UserError, match=r"mesh\.dat.* Did you mean 'mesh\.data'"):
        check_option_names(parse_settings(["mesh.dat=1,2"]), list(kinds))


def test_options_become_words_of_a_command_line() -> None:
    assert option_words("learning_rate", "1e-3", False) == ["--learning-rate", "1e-3"]
    assert option_words("hidden", "64 64", False) == ["--hidden", "64", "64"]
    assert option_words("mode_.of_it_", "a", False) == ["--mode_.of-it_", "a"]
    assert option_words("group.keep_all", "False", True) == ["--group.no-keep-all"]
    assert option_words("shuffle", "true", True) == ["--shuffle"]
    with pytest.raises(UserError, match="true or false"):
        option_words("shuffle", "maybe", True)


def test_names_are_safe_in_file_systems() -> None:
    assert readable_name({"lr": "1e-3", "dir": "../a b:ü"}) == "lr=1e-3,dir=.._a_b__"


def test_a_folder_holds_one_sweep(tmp_path: Path) -> None:
    folder = epath.Path(tmp_path)
    sweep = SweepSpecification(
        config="a.py",
        arguments=["--epochs", "2"],
        set={"seed": "0..4"},
        search=10,
        metric="loss",
        direction="min",
    )
    store_specification(folder, sweep)
    store_specification(
        folder, dataclasses.replace(sweep, search=20)
    )  # more trials of the same search
    assert json.loads((tmp_path / "sweep.json").read_text())["search"] == 20
    for other, difference in (
        (dataclasses.replace(sweep, set={"seed": "0..5"}), r"set seed is 0\.\.4 there and 0\.\.5"),
        (dataclasses.replace(sweep, arguments=[]), "--epochs 2 there and empty here"),
        (dataclasses.replace(sweep, search=None), "a search there and a grid here"),
    ):
        with pytest.raises(UserError, match=difference):
            store_specification(folder, other)
    (tmp_path / "sweep.json").write_text('{"config": 3}')
    with pytest.raises(UserError, match="not the file of a sweep"):
        store_specification(folder, sweep)
    (tmp_path / "sweep.json").write_text('{"metrics": "loss"}')
    with pytest.raises(UserError, match=r"metrics is unknown\. Did you mean 'metric'\?"):
        store_specification(folder, sweep)


# -- docs/sweeps.md --------------------------------------------------------------------------------

PAGE = (REPOSITORY / "docs" / "sweeps.md").read_text()


def test_the_forms_of_values_in_the_documentation_try_what_it_says() -> None:
    rows = re.findall(r"^\| `([a-z][\w.]*=.+)` \| (.+) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 8
    for text, tries in rows:
        (setting,) = parse_settings([text])
        if tries.startswith("samples"):
            assert isinstance(setting, ValueRange) and setting.log == ("logarithmic" in tries)
            continue
        assert len(grid_points([setting])) == int(tries.split()[0]), text


def test_the_commands_in_the_documentation_are_valid() -> None:
    commands = re.findall(r"^    python -m spmdtrain\.sweep (.*)$", PAGE, re.MULTILINE)
    assert len(commands) == 2
    for line in commands:
        words = [str(DIGITS) if "digits_mlp.py" in word else word for word in line.split()]
        command = parse_command_line(words, Options)
        kinds = option_kinds(command.config)
        check_option_names(parse_settings(command.options.set), list(kinds))
        assert command.options.search or len(
            grid_points(parse_settings(command.options.set))
        ) == int(re.findall(r"each of the (\d+) combinations", PAGE)[0])

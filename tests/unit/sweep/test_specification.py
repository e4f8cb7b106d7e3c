"""The options that vary in a sweep, their values, and the file of a sweep."""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
from etils import epath
from hypothesis import given
from hypothesis import strategies as st

from spmdtrain import RunConfig, UserError
from spmdtrain.sweep.specification import (
    ListedValues,
    SweepSpecification,
    ValueRange,
    check_names,
    corners,
    grid,
    option_kinds,
    option_words,
    parse_setting,
    parse_settings,
    readable_name,
    store,
)

WORDS = st.text("abcdefgxyz_0123456789-", min_size=1, max_size=8)
VALUES = st.lists(WORDS, min_size=1, max_size=4, unique=True)


@given(st.dictionaries(WORDS.map(lambda word: f"o{word}".replace("-", "_")), VALUES, min_size=1))
def test_a_grid_has_each_combination_of_the_listed_values_once(
    options: dict[str, list[str]],
) -> None:
    options = dict(itertools.islice(options.items(), 4))
    settings = parse_settings([f"{name}={','.join(values)}" for name, values in options.items()])
    points = [tuple(point[name] for name in options) for point in grid(settings)]
    assert points == list(itertools.product(*options.values()))
    checked = corners(settings)
    for name, values in options.items():
        assert {point[name] for point in checked} == set(values)


@given(st.integers(-50, 50), st.integers(0, 20))
def test_a_range_of_integers_includes_both_ends(low: int, count: int) -> None:
    (setting,) = parse_settings([f"seed={low}..{low + count}"])
    values = [int(point["seed"]) for point in grid([setting])]
    assert values == list(range(low, low + count + 1))


def test_ranges_and_lists_are_told_apart() -> None:
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
        grid(parse_settings(texts))


def test_an_unknown_option_is_refused_with_the_nearest_name() -> None:
    kinds = option_kinds(RunConfig())
    assert kinds["shuffle"] and not kinds["mesh.data"]
    check_names(parse_settings(["mesh.data=1,2"]), list(kinds))
    with pytest.raises(UserError, match=r"mesh\.dat.* Did you mean 'mesh\.data'"):
        check_names(parse_settings(["mesh.dat=1,2"]), list(kinds))


def test_options_become_words_of_a_command_line() -> None:
    assert option_words("learning_rate", "1e-3", False) == ["--learning-rate", "1e-3"]
    assert option_words("hidden", "64 64", False) == ["--hidden", "64", "64"]
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
    store(folder, sweep)
    store(folder, dataclasses.replace(sweep, search=20))  # more trials of the same search
    assert json.loads((tmp_path / "sweep.json").read_text())["search"] == 20
    for other, difference in (
        (dataclasses.replace(sweep, set={"seed": "0..5"}), r"set seed is 0\.\.4 there and 0\.\.5"),
        (dataclasses.replace(sweep, arguments=[]), "--epochs 2 there and empty here"),
        (dataclasses.replace(sweep, search=None), "a search there and a grid here"),
    ):
        with pytest.raises(UserError, match=difference):
            store(folder, other)
    (tmp_path / "sweep.json").write_text('{"config": 3}')
    with pytest.raises(UserError, match="not the file of a sweep"):
        store(folder, sweep)

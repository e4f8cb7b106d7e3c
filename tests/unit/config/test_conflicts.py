"""Every refused pair of options: each row of the table raises its text, with exit code 2."""

import dataclasses
import operator
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest
from helpers import DIGITS
from linear_model import trainer

from spmdtrain import RunConfig, UserError
from spmdtrain.config.conflicts import (
    CONFLICTS,
    Conflict,
    Kind,
    Moment,
    conflict,
    strategies_of,
)
from spmdtrain.config.options import CollectiveOptions, MeshSpec, OptionGroup, unchecked_groups
from spmdtrain.config.run_config import OPTIONS
from spmdtrain.run import main
from spmdtrain.sharding.mesh import resolve

OF_STRINGS = {"checkpoint": "best", "profile_steps": "1:2", "strategy": "mirrored"}
SERVERS: dict[str, Any] = {"strategy": "parameter_server"}
BESIDE: dict[tuple[str, str], dict[str, Any]] = {
    ("sharding.max_shards", "mesh.fsdp"): {"strategy": "fully_sharded"},
    ("servers.min_shard_bytes", "servers.partitioner"): SERVERS,
    ("servers.max_shard_bytes", "servers.partitioner"): SERVERS,
    ("sentinel_action", "workdir"): {"sentinel_every": 2},
    ("learning_rate_scaling", "learning_rate_base_batch_size"): {"learning_rate": 0.1},
}
"""Options without which another row refuses the example of a row first."""


def hint_of(name: str) -> Any:
    group, _, field = name.rpartition(".")
    of = type(operator.attrgetter(group)(RunConfig())) if group else RunConfig
    return typing.get_type_hints(of)[field]


def candidates(name: str) -> Iterator[Any]:
    """Values of an option that are not its default."""
    kinds = [kind for kind in (get_args(hint_of(name)) or [hint_of(name)]) if kind is not NoneType]
    if get_origin(hint_of(name)) in (Literal, dict):
        kinds = [hint_of(name)]
    for kind in kinds:
        if get_origin(kind) is Literal:
            yield from get_args(kind)
        elif get_origin(kind) is dict:
            yield {32: 0.1}
        elif kind is bool:
            yield not OPTIONS[name].default
        elif kind in (int, float):
            yield from (kind(8), kind(4))
        elif kind is str or get_origin(hint_of(name)) is tuple:
            value = OF_STRINGS.get(name, "7")
            yield (value,) if get_origin(hint_of(name)) is tuple else value


def given_by(row: Conflict) -> dict[str, Any]:
    """Values of the two options of a row, which refuses them."""
    known = OPTIONS[row.option]
    value = next(iter(row.values or [x for x in candidates(row.option) if known.is_given(x)]))
    beside = BESIDE.get((row.option, row.other), {})
    if row.kind is Kind.NEEDS:
        return {row.option: value, **beside}
    others = strategies_of(row) or candidates(row.other)
    known = OPTIONS[row.other]
    other = next(
        x for x in others if row.strategies or (known.is_given(x) and x not in row.allowed)
    )
    return {row.option: value, row.other: other, **beside}


def constructed(given: dict[str, Any]) -> RunConfig:
    """A configuration; of options with a dot, too."""
    fields: dict[str, Any] = {}
    for name, value in given.items():
        group, _, field = name.rpartition(".")
        if group:
            before: OptionGroup = fields.get(group, getattr(RunConfig(), group))
            with unchecked_groups():
                fields[group] = dataclasses.replace(before, **{field: value})  # type: ignore[type-var]
        else:
            fields[field] = value
    return RunConfig(**fields)


def text_of(row: Conflict, given: dict[str, Any]) -> str:
    """The text of a row for a configuration that cannot be constructed."""
    config = constructed({})
    for name, value in given.items():
        group, _, field = name.rpartition(".")
        of = config
        if group:
            of = dataclasses.replace(getattr(config, group))
            object.__setattr__(config, group, of)
        object.__setattr__(of, field, value)
    return row.text(config)


def arguments(given: dict[str, Any]) -> Iterator[str]:
    for name, value in given.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{option}" if value else f"--no-{option}"
        else:
            shown = value if isinstance(value, (tuple, dict)) else (value,)
            yield from (f"--{option}", *map(str, shown))


def rows_at(moment: Moment) -> list[Any]:
    rows = [row for row in CONFLICTS if row.moment is moment]
    names = [f"{row.option} {row.other}" for row in rows]
    return [
        pytest.param(row, id=f"{name} {names[:n].count(name)}".removesuffix(" 0"))
        for n, (name, row) in enumerate(zip(names, rows, strict=True))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("row", rows_at(Moment.CONSTRUCTED))
def test_the_command_refuses_each_pair_with_its_text(
    row: Conflict, capsys: pytest.CaptureFixture[str]
) -> None:
    given = given_by(row)
    command = ["--config", str(DIGITS), *arguments(given)]
    expected = text_of(row, given)
    if row.kind is Kind.SAME:  # the command replaces the default of the other one
        expected = f"--{row.option} and --{row.other} exclude each other".replace("_", "-")
        with pytest.raises(UserError) as refused:
            constructed(given)
        assert str(refused.value) == text_of(row, given)
    assert main(command) == 2
    assert expected in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("row", rows_at(Moment.RESOLVED))
def test_a_pair_that_may_be_replaced_is_refused_when_a_run_begins(row: Conflict) -> None:
    given = given_by(row)
    config = constructed(given)  # another option may still replace one of them
    with pytest.raises(UserError) as refused:
        resolve(config, batch_shards=1)
    assert str(refused.value) == row.text(config)


@pytest.mark.parametrize("row", rows_at(Moment.FIT))
def test_a_training_is_refused_before_it_begins(row: Conflict) -> None:
    given = given_by(row)
    data = np.ones((16, 4), np.float32), np.ones((16, 1), np.float32)
    with pytest.raises(UserError) as refused:
        trainer(config=constructed(given)).fit(data, steps=2)
    assert str(refused.value) == row.text(constructed(given))


def test_rows_that_code_asks_for_are_known() -> None:
    asked = {(row.option, row.other) for row in CONFLICTS if row.moment is Moment.ASKED}
    assert asked == {
        ("batch_statistics", "collectives.reduction"),
        ("collectives.reduction", "strategy"),
        ("fork_from", "init_from"),
    }
    assert conflict("collectives.reduction", "strategy").values == ("reduce_scatter",)


@dataclass(frozen=True, kw_only=True)
class Scattering(RunConfig):
    """An experiment's configuration, whose default needs another strategy than the default."""

    collectives: CollectiveOptions = CollectiveOptions(reduction="reduce_scatter")


def test_a_default_that_needs_another_option_is_refused_only_without_it() -> None:
    trainer(config=Scattering(), strategy="zero", mesh=MeshSpec(data=8))
    with pytest.raises(UserError, match="and strategy is mirrored: reduce_scatter is for"):
        trainer(config=Scattering())


def test_every_row_names_options() -> None:
    for row in CONFLICTS:
        assert {row.option, row.other} <= set(OPTIONS)
        assert row.option != row.other


def test_the_texts_say_what_is_wrong_and_what_to_do() -> None:
    """One of each kind, word by word."""
    expected = {
        ("data_workers", "data_on_device"): "data_workers is 8 and data_on_device is True: the "
        "devices hold all examples, so processes have nothing to read; leave one of the two out",
        ("epochs", "steps"): "epochs is 8 and steps is 8: give one of the two",
        ("context.method", "mesh.context"): "context.method is ring, and mesh.context is not "
        "given: give the number of devices that split the tokens, or leave context.method out",
        ("skip_steps", "strategy"): "skip_steps is 7, but under parameter_server a worker reads "
        "the batch with the number of the step: leave it out",
        ("sharding.offload", "strategy"): "sharding.offload is for central_storage, but the "
        "strategy is default",
        ("exact", "uneven_batch"): "exact is 8 and uneven_batch is pad: padding depends on the "
        "devices, so the bits would depend on the number of devices; leave one of the two out",
    }
    for row in CONFLICTS:
        if text := expected.get((row.option, row.other)):
            assert text_of(row, given_by(row)) == text

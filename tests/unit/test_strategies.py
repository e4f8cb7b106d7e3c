"""The strategies by name, how they are joined, and the meshes they ask for."""

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdtrain.errors import UserError
from spmdtrain.strategies import (
    AXES,
    DEFAULT,
    MESH_AXES,
    STRATEGIES,
    mesh_sizes,
    strategy,
)

ALONE = ("default", "one_device")
JOINED = [name for name in STRATEGIES if name not in (*ALONE, "parameter_server")]


def refusal(name: str) -> str:
    with pytest.raises(UserError) as caught:
        strategy(name)
    return str(caught.value)


# --- Names ---


def test_every_strategy_goes_by_its_own_name() -> None:
    assert [one.name for one in STRATEGIES.values()] == list(STRATEGIES)
    assert all(strategy(name) is one for name, one in STRATEGIES.items())


def test_these_are_the_strategies_that_the_command_line_promises() -> None:
    assert list(STRATEGIES) == [
        *ALONE,
        "mirrored",
        "zero",
        "fully_sharded",
        "tensor_parallel",
        "central_storage",
        "hybrid",
        "parameter_server",
    ]


def test_parameter_servers_join_no_other() -> None:
    for name in ("parameter_server+zero", "hybrid+parameter_server"):
        assert refusal(name) == f"strategy {name}: parameter_server cannot be combined with another"


def test_what_a_strategy_splits_and_where_it_keeps_it() -> None:
    def those(field: str) -> list[str]:
        return [name for name, one in STRATEGIES.items() if getattr(one, field)]

    assert those("shards_params") == ["fully_sharded"]
    assert those("shards_optimizer") == ["zero"]
    assert those("is_asynchronous") == ["parameter_server"]
    assert those("needs_rules") == ["tensor_parallel"]
    assert those("on_host") == ["central_storage"]
    assert strategy("central_storage").on_host is True
    assert those("devices") == list(ALONE)
    assert [name for name, one in STRATEGIES.items() if not one.has_mesh] == ["default"]
    assert DEFAULT is STRATEGIES["default"]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("mirored", "mirrored"),
        ("fully-sharded", "fully_sharded"),
        ("hybrid+fully_shard", "fully_sharded"),
        ("tensor_paralel+zero", "tensor_parallel"),
        ("onedevice", "one_device"),
    ],
)
def test_an_unknown_strategy_is_refused_with_the_nearest_name(name: str, nearest: str) -> None:
    (wrong,) = [part for part in name.split("+") if part not in STRATEGIES]
    assert f"there is no strategy {wrong!r}. Did you mean {nearest!r}?" in refusal(name)


@pytest.mark.parametrize("name", ["", "+", "zero+", "+zero", "zero++hybrid", "zero hybrid"])
def test_a_name_with_an_empty_part_is_refused(name: str) -> None:
    assert "there is no strategy" in refusal(name)


# --- Axes ---


def test_the_axes_with_each_property() -> None:
    properties = {
        "splits_batch": ("replica", "data", "fsdp", "expert"),
        "shares_examples": ("expert", "context", "tensor"),
        "only_by_rules": ("expert", "tensor"),
    }
    for name, axes in properties.items():
        assert tuple(axis.name for axis in MESH_AXES if getattr(axis, name)) == axes
    assert all(axis.splits_batch or axis.shares_examples for axis in MESH_AXES)
    assert MESH_AXES[0].spans_hosts  # `build_mesh` stacks its groups, so it is the first axis
    assert AXES == ("replica", "data", "fsdp", "expert", "context", "tensor")


# --- Several ---


def test_joined_strategies_split_what_each_of_them_splits() -> None:
    found = strategy("hybrid+fully_sharded+tensor_parallel")
    assert found.name == "hybrid+fully_sharded+tensor_parallel"
    assert dict(found.sizes) == {"replica": -1, "data": 1, "fsdp": -1, "tensor": 2}
    assert (found.shards_params, found.needs_rules) == (True, True)
    assert (found.shards_optimizer, found.on_host) == (False, False)
    found = strategy("zero+central_storage")
    assert (found.shards_params, found.shards_optimizer) == (False, True)
    assert found.on_host is True


@pytest.mark.parametrize("alone", ALONE)
@pytest.mark.parametrize("other", JOINED)
def test_a_strategy_for_one_device_joins_no_other(alone: str, other: str) -> None:
    for name in (f"{alone}+{other}", f"{other}+{alone}"):
        message = refusal(name)
        assert message.startswith(f"strategy {name}: {alone} is for one device")
    assert "cannot be combined with another" in refusal("default+one_device")


@pytest.mark.slow
@given(st.lists(st.sampled_from(JOINED), min_size=1, max_size=4, unique=True))
@settings(deadline=None, derandomize=True)
def test_the_order_of_joined_strategies_changes_their_name_alone(names: list[str]) -> None:
    for order in permutations(names):
        found, first = strategy("+".join(order)), strategy("+".join(names))
        assert found.name == "+".join(order)
        assert found.has_mesh and found.devices is None
        assert mesh_sizes(found, {}) == mesh_sizes(first, {})
        for field in ("shards_params", "shards_optimizer", "needs_rules", "on_host"):
            parts = [getattr(STRATEGIES[name], field) for name in order]
            assert bool(getattr(found, field)) == any(parts)


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_a_strategy_named_twice_is_there_once(name: str) -> None:
    assert strategy(f"{name}+{name}") is STRATEGIES[name]
    if name in JOINED and name != "zero":
        assert strategy(f"{name}+zero+{name}").name == f"{name}+zero"


# --- The sizes of the axes ---


@pytest.mark.parametrize(
    ("name", "given_sizes", "sizes"),
    [
        # Without sizes from the user: (replica, data, fsdp, expert, context, tensor).
        ("one_device", {}, (1, -1, 1, 1, 1, 1)),
        ("mirrored", {}, (1, -1, 1, 1, 1, 1)),
        ("zero", {}, (1, -1, 1, 1, 1, 1)),
        ("central_storage", {}, (1, -1, 1, 1, 1, 1)),
        ("fully_sharded", {}, (1, 1, -1, 1, 1, 1)),
        ("tensor_parallel", {}, (1, -1, 1, 1, 1, 2)),
        ("hybrid", {}, (-1, -1, 1, 1, 1, 1)),
        ("fully_sharded+tensor_parallel", {}, (1, 1, -1, 1, 1, 2)),
        ("hybrid+fully_sharded", {}, (-1, 1, -1, 1, 1, 1)),
        ("hybrid+zero+tensor_parallel", {}, (-1, -1, 1, 1, 1, 2)),
        # What is given stands.
        ("mirrored", {"data": 8}, (1, 8, 1, 1, 1, 1)),
        ("mirrored", {"data": -1}, (1, -1, 1, 1, 1, 1)),
        ("mirrored", {"tensor": 4}, (1, -1, 1, 1, 1, 4)),
        ("mirrored", {"fsdp": -1}, (1, 1, -1, 1, 1, 1)),
        ("mirrored", {"replica": -1}, (-1, -1, 1, 1, 1, 1)),
        ("mirrored", {"replica": 2, "data": 4}, (2, 4, 1, 1, 1, 1)),
        ("fully_sharded", {"data": 2}, (1, 2, -1, 1, 1, 1)),
        ("fully_sharded", {"fsdp": 4}, (1, -1, 4, 1, 1, 1)),
        ("fully_sharded", {"fsdp": 4, "data": 2}, (1, 2, 4, 1, 1, 1)),
        ("fully_sharded", {"replica": 2}, (2, 1, -1, 1, 1, 1)),
        ("fully_sharded", {"data": -1}, (1, -1, 1, 1, 1, 1)),
        ("tensor_parallel", {"tensor": 4}, (1, -1, 1, 1, 1, 4)),
        ("fully_sharded", {"expert": 4}, (1, 1, -1, 4, 1, 1)),
        ("tensor_parallel", {"tensor": -1}, (1, 1, 1, 1, 1, -1)),
        ("tensor_parallel", {"tensor": -1, "data": 2}, (1, 2, 1, 1, 1, -1)),
        ("tensor_parallel", {"fsdp": -1}, (1, 1, -1, 1, 1, 2)),
        ("fully_sharded+tensor_parallel", {"tensor": -1, "fsdp": 2}, (1, 1, 2, 1, 1, -1)),
        ("hybrid", {"replica": 4}, (4, -1, 1, 1, 1, 1)),
        ("hybrid", {"fsdp": -1}, (-1, 1, -1, 1, 1, 1)),
        ("hybrid", {"replica": 2, "data": 2, "fsdp": 2}, (2, 2, 2, 1, 1, 1)),
        # Given twice, it is for `build_mesh` to refuse.
        ("mirrored", {"data": -1, "fsdp": -1}, (1, -1, -1, 1, 1, 1)),
    ],
)
def test_what_is_given_counts_above_what_the_strategy_says(
    name: str, given_sizes: dict[str, int], sizes: tuple[int, ...]
) -> None:
    every: dict[str, int | None] = {axis: given_sizes.get(axis) for axis in AXES}
    assert tuple(mesh_sizes(strategy(name), every).items()) == tuple(zip(AXES, sizes, strict=True))
    assert mesh_sizes(strategy(name), given_sizes) == mesh_sizes(strategy(name), every)


SIZES = st.one_of(st.none(), st.just(-1), st.integers(1, 8))


@pytest.mark.slow
@given(
    st.lists(st.sampled_from(JOINED), min_size=1, max_size=3, unique=True),
    st.fixed_dictionaries(dict.fromkeys(AXES, SIZES)),
)
@settings(deadline=None, derandomize=True, max_examples=300)
def test_of_the_axes_within_a_group_only_one_is_the_rest_unless_two_are_given(
    names: list[str], given_sizes: dict[str, int | None]
) -> None:
    sizes = mesh_sizes(strategy("+".join(names)), given_sizes)
    assert list(sizes) == list(AXES)
    for axis, size in given_sizes.items():
        assert size is None or sizes[axis] == size
    rest = [axis for axis in AXES[1:] if sizes[axis] == -1]
    asked = [axis for axis in AXES[1:] if given_sizes[axis] == -1]
    assert rest == asked if asked else len(rest) <= 1
    if given_sizes["data"] is None:  # then there is always one to take them
        assert rest

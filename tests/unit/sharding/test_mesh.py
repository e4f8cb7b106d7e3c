from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh

from spmdtrain.config.options import MeshSpec
from spmdtrain.distributed import process_group
from spmdtrain.errors import UserError
from spmdtrain.sharding import mesh as meshes
from spmdtrain.sharding.mesh import (
    batch_sharding,
    batch_shards,
    build_mesh,
    cpu_devices_in_environment,
    describe_mesh,
    make_cpu_devices,
)
from spmdtrain.strategies import AXES, STRATEGIES, strategy


def ids(spec: MeshSpec) -> list[int]:
    return [device.id for device in build_mesh(spec).devices.flat]


def shape(name: str, spec: MeshSpec | None = None, **options: Any) -> str:
    """The axes in use of a strategy's mesh, in words."""
    return describe_mesh(build_mesh(spec or MeshSpec(), strategy(name), **options))


def refusal(spec: MeshSpec, name: str = "mirrored", **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        build_mesh(spec, strategy(name), **options)
    return str(caught.value)


# --- Sizes ---


@pytest.mark.parametrize(
    ("spec", "sizes", "text", "shards"),
    [
        (MeshSpec(), (1, 8, 1, 1, 1, 1), "data=8", 8),
        (MeshSpec(data=8), (1, 8, 1, 1, 1, 1), "data=8", 8),
        (MeshSpec(tensor=2), (1, 4, 1, 1, 1, 2), "data=4 tensor=2", 4),
        (MeshSpec(expert=4), (1, 2, 1, 4, 1, 1), "data=2 expert=4", 8),
        (MeshSpec(data=2, fsdp=4), (1, 2, 4, 1, 1, 1), "data=2 fsdp=4", 8),
        (MeshSpec(data=2, fsdp=-1), (1, 2, 4, 1, 1, 1), "data=2 fsdp=4", 8),
        (MeshSpec(data=2, fsdp=2, tensor=-1), (1, 2, 2, 1, 1, 2), "data=2 fsdp=2 tensor=2", 4),
        (MeshSpec(data=2, fsdp=2, tensor=2), (1, 2, 2, 1, 1, 2), "data=2 fsdp=2 tensor=2", 4),
        (MeshSpec(data=1, tensor=8), (1, 1, 1, 1, 1, 8), "tensor=8", 1),
        (MeshSpec(data=1, fsdp=1, tensor=8), (1, 1, 1, 1, 1, 8), "tensor=8", 1),
        (MeshSpec(data=1, fsdp=8), (1, 1, 8, 1, 1, 1), "fsdp=8", 8),
        (MeshSpec(data=-1, fsdp=8), (1, 1, 8, 1, 1, 1), "fsdp=8", 8),
        (MeshSpec(devices=(0, 1)), (1, 2, 1, 1, 1, 1), "data=2", 2),
        (MeshSpec(devices=(4,)), (1, 1, 1, 1, 1, 1), "data=1", 1),
        (MeshSpec(data=1, devices=(5,)), (1, 1, 1, 1, 1, 1), "data=1", 1),
        (MeshSpec(tensor=3, devices=(0, 1, 2, 3, 4, 5)), (1, 2, 1, 1, 1, 3), "data=2 tensor=3", 2),
        (MeshSpec(replica=2), (2, 4, 1, 1, 1, 1), "replica=2 data=4", 8),
        (MeshSpec(replica=4, data=2), (4, 2, 1, 1, 1, 1), "replica=4 data=2", 8),
        (MeshSpec(replica=4, tensor=2), (4, 1, 1, 1, 1, 2), "replica=4 tensor=2", 4),
        (
            MeshSpec(replica=2, fsdp=2, tensor=2),
            *((2, 1, 2, 1, 1, 2), "replica=2 fsdp=2 tensor=2", 4),
        ),
        (
            MeshSpec(replica=2, data=2, fsdp=1, tensor=2),
            *((2, 2, 1, 1, 1, 2), "replica=2 data=2 tensor=2", 4),
        ),
    ],
)
def test_every_axis_is_there_with_its_size_and_the_batch_axes_split_a_batch(
    spec: MeshSpec, sizes: tuple[int, ...], text: str, shards: int
) -> None:
    mesh = build_mesh(spec)
    assert tuple(mesh.shape.items()) == tuple(zip(AXES, sizes, strict=True))
    assert mesh.devices.shape == sizes
    assert len(set(mesh.devices.flat)) == mesh.size
    assert describe_mesh(mesh) == text
    assert batch_shards(mesh) == shards
    batch = jax.device_put(np.arange(48).reshape(16, 3), batch_sharding(mesh))
    held = [np.asarray(shard.data) for shard in batch.addressable_shards]
    assert {rows.shape for rows in held} == {(16 // shards, 3)}
    assert len({rows[0, 0] for rows in held}) == shards


def test_all_axes_are_of_the_kind_whose_collectives_the_compiler_places() -> None:
    assert build_mesh(MeshSpec(tensor=2)).axis_types == (AxisType.Auto,) * len(AXES)


def test_by_default_all_devices_are_used() -> None:
    assert set(build_mesh(MeshSpec()).devices.flat) == set(jax.devices())


@pytest.mark.parametrize(
    ("spec", "arithmetic"),
    [
        (
            MeshSpec(data=3),
            "replica=1 * data=3 * fsdp=1 * expert=1 * context=1 * tensor=1 = 3 != 8 devices",
        ),
        (
            MeshSpec(data=4, tensor=4),
            "replica=1 * data=4 * fsdp=1 * expert=1 * context=1 * tensor=4 = 16 != 8 devices",
        ),
        (
            MeshSpec(data=4, devices=(0, 1)),
            " * data=4 * fsdp=1 * expert=1 * context=1 * tensor=1 = 4 != 2 devices",
        ),
        (
            MeshSpec(tensor=3),
            "replica=1 * fsdp=1 * expert=1 * context=1 * tensor=3 = 3 does not divide 8 devices",
        ),
        (
            MeshSpec(fsdp=16),
            "replica=1 * fsdp=16 * expert=1 * context=1 * tensor=1 = 16 does not divide 8 devices",
        ),
        (
            MeshSpec(data=2, fsdp=-1, devices=(0, 1, 2)),
            "replica=1 * data=2 * expert=1 * context=1 * tensor=1 = 2 does",
        ),
    ],
)
def test_sizes_that_do_not_multiply_to_the_devices_are_refused_with_the_arithmetic(
    spec: MeshSpec, arithmetic: str
) -> None:
    assert arithmetic in refusal(spec)


def test_only_one_axis_can_be_the_rest() -> None:
    assert "data and fsdp are both -1" in refusal(MeshSpec(data=-1, fsdp=-1))
    assert "data and tensor are both -1" in refusal(MeshSpec(data=-1, tensor=-1))


# --- Chosen devices ---


def test_devices_are_chosen_by_index_and_by_name_in_the_order_given() -> None:
    assert ids(MeshSpec(devices=(3, 1))) == [3, 1]
    assert ids(MeshSpec(devices=("3", "1"))) == [3, 1]
    assert ids(MeshSpec(devices=("cpu:3", "cpu:0"))) == [3, 0]
    assert ids(MeshSpec(devices=(6, "cpu:2", "4"))) == [6, 2, 4]
    assert ids(MeshSpec(devices=("/cpu:3", "CPU:0", "/device:CPU:5"))) == [3, 0, 5]


@pytest.mark.parametrize("name", [8, "8", "cpu:8", "gpu:0", "cpu:", "cpu", "", -1, "cpu:-1", "x"])
def test_a_device_that_is_not_visible_is_refused_by_name(name: str | int) -> None:
    message = refusal(MeshSpec(devices=(0, name)))
    assert f"there is no device {str(name)!r}" in message


def test_the_devices_that_are_visible_are_listed_instead() -> None:
    every = ", ".join(f"cpu:{index}" for index in range(8))
    assert refusal(MeshSpec(devices=(8,))).endswith(f"visible: {every}")
    assert refusal(MeshSpec(devices=("cpu:9",))).endswith(f"visible of platform cpu: {every}")
    assert refusal(MeshSpec(devices=("gpu:0",))).endswith("visible of platform gpu: none")


@pytest.mark.parametrize("twice", [(0, 0), ("cpu:3", "cpu:3"), (3, "cpu:3"), (1, 2, "1")])
def test_a_device_named_twice_is_refused(twice: tuple[str | int, ...]) -> None:
    assert f"names a device twice: {' '.join(map(str, twice))}" in refusal(MeshSpec(devices=twice))


# --- The meshes of the strategies ---


@pytest.mark.parametrize(
    ("name", "spec", "found"),
    [
        ("one_device", MeshSpec(), "data=1"),
        ("mirrored", MeshSpec(), "data=8"),
        ("zero", MeshSpec(), "data=8"),
        ("central_storage", MeshSpec(), "data=8"),
        ("fully_sharded", MeshSpec(), "fsdp=8"),
        ("fully_sharded", MeshSpec(data=2), "data=2 fsdp=4"),
        ("fully_sharded", MeshSpec(fsdp=2), "data=4 fsdp=2"),
        ("fully_sharded", MeshSpec(replica=2), "replica=2 fsdp=4"),
        ("fully_sharded", MeshSpec(devices=(0,)), "data=1"),
        ("tensor_parallel", MeshSpec(), "data=4 tensor=2"),
        ("tensor_parallel", MeshSpec(tensor=-1), "tensor=8"),
        ("hybrid", MeshSpec(), "replica=2 data=4"),
        ("hybrid", MeshSpec(replica=4), "replica=4 data=2"),
        ("hybrid", MeshSpec(devices=(5,)), "data=1"),
        ("hybrid+fully_sharded", MeshSpec(), "replica=2 fsdp=4"),
        ("hybrid+tensor_parallel", MeshSpec(), "replica=2 data=2 tensor=2"),
        ("hybrid+fully_sharded+tensor_parallel", MeshSpec(), "replica=2 fsdp=2 tensor=2"),
        ("zero+fully_sharded", MeshSpec(data=2), "data=2 fsdp=4"),
        ("zero+fully_sharded", MeshSpec(), "fsdp=8"),  # which splits the optimizer's state too
        ("zero", MeshSpec(data=2, fsdp=-1), "data=2 fsdp=4"),
    ],
)
def test_the_mesh_of_a_strategy(name: str, spec: MeshSpec, found: str) -> None:
    assert shape(name, spec) == found


@pytest.mark.parametrize(
    ("name", "spec", "axis"),
    [
        ("fully_sharded", MeshSpec(data=-1), "fsdp"),
        ("fully_sharded", MeshSpec(fsdp=1), "fsdp"),
        ("tensor_parallel", MeshSpec(tensor=1), "tensor"),
        ("hybrid", MeshSpec(replica=1), "replica"),
        ("hybrid+fully_sharded", MeshSpec(replica=1), "replica"),
        ("fully_sharded+tensor_parallel", MeshSpec(tensor=-1), "fsdp"),
        ("zero", MeshSpec(data=1, fsdp=-1), "data"),
        ("zero", MeshSpec(tensor=-1), "data"),
        ("hybrid+zero", MeshSpec(replica=8), "data"),
    ],
)
def test_a_strategy_whose_axis_has_one_device_of_several_is_refused(
    name: str, spec: MeshSpec, axis: str
) -> None:
    message = refusal(spec, name)
    assert message.startswith(f"strategy {name} uses the axis {axis}, and the mesh has {axis}=1: ")
    assert f"{axis}=1" in message.split(": ")[1] and message.endswith("on 8 devices")


def test_every_strategy_with_a_mesh_runs_on_a_single_device() -> None:
    for name, one in STRATEGIES.items():
        if one.has_mesh:
            assert shape(name, MeshSpec(devices=(3,))) == "data=1"
    assert "tensor=2 = 2 does not divide 1 device" in refusal(MeshSpec(tensor=2, devices=(3,)))


# --- One device ---


def test_one_device_is_the_first_or_the_chosen_one() -> None:
    choices: list[tuple[tuple[str | int, ...], int]] = [((), 0), ((5,), 5), (("cpu:3",), 3)]
    for devices, found in choices:
        mesh = build_mesh(MeshSpec(devices=devices), strategy("one_device"))
        assert [device.id for device in mesh.devices.flat] == [found]
        assert mesh.axis_names == AXES


def test_one_device_of_several_named_ones_is_refused() -> None:
    message = refusal(MeshSpec(devices=(1, 4)), "one_device")
    assert message == "strategy one_device takes one device, but mesh.devices names 2"


@pytest.mark.parametrize("axis", ["data", "fsdp", "tensor", "replica"])
def test_one_device_has_no_axis_of_two(axis: str) -> None:
    message = refusal(MeshSpec(**{axis: 2}), "one_device")  # type: ignore[arg-type]
    assert f"{axis}=2" in message and "1 device" in message


# --- At most so many shards ---


@pytest.mark.parametrize(
    ("spec", "most", "found"),
    [
        (MeshSpec(), 8, "fsdp=8"),
        (MeshSpec(), 100, "fsdp=8"),
        (MeshSpec(), 7, "data=2 fsdp=4"),
        (MeshSpec(), 4, "data=2 fsdp=4"),
        (MeshSpec(), 3, "data=4 fsdp=2"),
        (MeshSpec(devices=(0, 1, 2, 3, 4, 5)), 4, "data=2 fsdp=3"),
        (MeshSpec(devices=(0, 1, 2, 3, 4, 5)), 5, "data=2 fsdp=3"),
        (MeshSpec(replica=2), 8, "replica=2 fsdp=4"),
        (MeshSpec(replica=2), 3, "replica=2 data=2 fsdp=2"),
        (MeshSpec(tensor=2), 3, "data=2 fsdp=2 tensor=2"),
        (MeshSpec(data=2, fsdp=-1), 4, "data=2 fsdp=4"),
    ],
)
def test_the_shards_are_the_largest_number_not_above_the_most_that_divides(
    spec: MeshSpec, most: int, found: str
) -> None:
    assert shape("fully_sharded", spec, max_shards=most) == found


@pytest.mark.parametrize(
    ("spec", "most", "found"),
    [
        (MeshSpec(), 4, "data=2 fsdp=4"),
        (MeshSpec(tensor=2), 2, "data=2 fsdp=2 tensor=2"),
        (MeshSpec(), 3, "data=4 fsdp=2"),
        (MeshSpec(), 8, "fsdp=8"),
        # Of 6 devices 2 would be less than half of the limit.
        (MeshSpec(devices=(0, 1, 2, 3, 4, 5)), 5, "data=2 fsdp=3"),
        (MeshSpec(devices=(0, 1, 2, 3, 4, 5, 6)), 4, "fsdp=7"),
        # What the user gives is not changed.
        (MeshSpec(fsdp=-1), 4, "fsdp=8"),
        (MeshSpec(data=1), 4, "fsdp=8"),
        (MeshSpec(fsdp=8), 4, "fsdp=8"),
    ],
)
def test_a_strategy_limits_the_shards_of_a_mesh_that_the_user_leaves_open(
    spec: MeshSpec, most: int, found: str
) -> None:
    limited = replace(strategy("fully_sharded"), max_shards=most)
    assert describe_mesh(build_mesh(spec, limited)) == found


def test_a_bound_on_the_shards_leaves_other_strategies_alone() -> None:
    assert shape("mirrored", max_shards=2) == "data=8"


@given(st.integers(2, 8), st.integers(2, 9))
@settings(deadline=None, derandomize=True)
def test_any_bound_on_the_shards_holds_on_any_number_of_devices(count: int, most: int) -> None:
    spec = MeshSpec(devices=tuple(range(count)))
    fitting = [n for n in range(2, most + 1) if count % n == 0]
    if fitting:
        sizes = build_mesh(spec, strategy("fully_sharded"), max_shards=most).shape
        assert sizes["fsdp"] == max(fitting) and sizes["data"] == count // max(fitting)
    else:
        assert "uses the axis fsdp" in refusal(spec, "fully_sharded", max_shards=most)


def test_a_bound_that_no_size_keeps_together_with_what_is_given_is_refused() -> None:
    message = refusal(MeshSpec(data=2), "fully_sharded", max_shards=2)
    assert "data=2 * fsdp=2 * expert=1 * context=1 * tensor=1 = 4 != 8 devices" in message


# --- Groups of hosts ---


@dataclass(frozen=True)
class Device:
    """One of another process, of which no more is asked than where it is."""

    id: int
    process_index: int
    slice_index: int = 0
    platform: str = "cpu"
    device_kind: str = "cpu"


Cluster = Callable[..., list[Device]]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Makes the devices of several processes, by their process; these are then all there are."""

    def make(
        owners: Sequence[int], *, hosts: Sequence[str] = (), slices: Sequence[int] = ()
    ) -> list[Device]:
        devices = [
            Device(number, owner, slices[number] if slices else 0)
            for number, owner in enumerate(owners)
        ]
        count = len(set(owners))
        names = list(hosts) or [f"host {process}" for process in range(count)]
        monkeypatch.setattr(meshes, "choose_devices", lambda names: devices)
        monkeypatch.setattr(process_group, "count", lambda: count)
        monkeypatch.setattr(process_group, "gather", lambda value: names)
        return devices

    return make


def groups(mesh: Mesh) -> list[list[int]]:
    """The devices of each replica, by their number."""
    return [[device.id for device in group.flat] for group in mesh.devices]


def hybrid(spec: MeshSpec) -> list[list[int]]:
    return groups(build_mesh(spec, strategy("hybrid")))


HALVES, PAIRS = [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1], [2, 3], [4, 5], [6, 7]]
TWO_HOSTS, FOUR_HOSTS = [0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        (MeshSpec(), HALVES),
        (MeshSpec(replica=4), PAIRS),
        (MeshSpec(devices=(7, 6, 1, 0)), [[7, 6], [1, 0]]),
    ],
)
def test_a_single_host_is_divided(spec: MeshSpec, found: list[list[int]]) -> None:
    assert hybrid(spec) == found


def test_a_single_host_that_does_not_divide_in_two_is_refused() -> None:
    message = refusal(MeshSpec(devices=(0, 1, 2)), "hybrid")
    assert "expert=1 * context=1 * tensor=1 = 2 does not divide 3 devices" in message


@pytest.mark.parametrize(
    ("owners", "cluster_options", "spec", "found"),
    [
        # Each host is a group.
        (TWO_HOSTS, {}, MeshSpec(), HALVES),
        (FOUR_HOSTS, {}, MeshSpec(), PAIRS),
        ([0, 0, 1, 1, 2, 2], {}, MeshSpec(), [[0, 1], [2, 3], [4, 5]]),
        # Its devices may come in any order.
        ([0, 1, 0, 1, 0, 1, 0, 1], {}, MeshSpec(), [[0, 2, 4, 6], [1, 3, 5, 7]]),
        # A group may be several hosts, and a host several groups.
        (FOUR_HOSTS, {}, MeshSpec(replica=2), HALVES),
        (TWO_HOSTS, {}, MeshSpec(replica=4), PAIRS),
        (TWO_HOSTS, {}, MeshSpec(replica=8), [[number] for number in range(8)]),
        ([0, 0, 1, 1, 1, 1], {}, MeshSpec(replica=3), [[2, 3], [4, 5], [0, 1]]),
        # Several processes of one host are one host; a single one is divided.
        (FOUR_HOSTS, {"hosts": ["a", "a", "b", "b"]}, MeshSpec(), HALVES),
        (FOUR_HOSTS, {"hosts": ["a", "b", "a", "b"]}, MeshSpec(), [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ([0, 0, 1, 1], {"hosts": ["a", "a"]}, MeshSpec(), [[0, 1], [2, 3]]),
        # Slices come before hosts, but a single slice says nothing.
        (
            *(FOUR_HOSTS, {"slices": [0, 0, 1, 1, 0, 0, 1, 1]}),
            *(MeshSpec(), [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ),
        (TWO_HOSTS, {"slices": [0, 0, 1, 1, 2, 2, 3, 3]}, MeshSpec(), PAIRS),
        ([0, 1] * 4, {"slices": [3] * 8}, MeshSpec(), [[0, 2, 4, 6], [1, 3, 5, 7]]),
    ],
)
def test_groups_are_slices_or_hosts_or_equal_parts_of_them(
    cluster: Cluster,
    owners: list[int],
    cluster_options: dict[str, Any],
    spec: MeshSpec,
    found: list[list[int]],
) -> None:
    cluster(owners, **cluster_options)
    assert hybrid(spec) == found


@pytest.mark.parametrize(
    ("owners", "spec", "name", "text", "found"),
    [
        (TWO_HOSTS, MeshSpec(), "hybrid+fully_sharded", "replica=2 fsdp=4", HALVES),
        (
            *([0, 1, 0, 1, 0, 1, 0, 1], MeshSpec(tensor=2), "hybrid+tensor_parallel"),
            *("replica=2 data=2 tensor=2", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ),
        (
            *([0, 1, 0, 1], MeshSpec(replica=2), "fully_sharded"),
            *("replica=2 fsdp=2", [[0, 2], [1, 3]]),
        ),
        (
            *([0, 1, 0, 1], MeshSpec(replica=-1), "mirrored"),
            *("replica=2 data=2", [[0, 2], [1, 3]]),
        ),
    ],
)
def test_the_replicas_of_any_strategy_are_hosts(
    cluster: Cluster,
    owners: list[int],
    spec: MeshSpec,
    name: str,
    text: str,
    found: list[list[int]],
) -> None:
    cluster(owners)
    mesh = build_mesh(spec, strategy(name))
    assert (describe_mesh(mesh), groups(mesh)) == (text, found)


def test_without_replicas_nothing_is_asked_of_the_hosts(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster([0, 1, 0, 1])
    monkeypatch.setattr(process_group, "gather", lambda value: pytest.fail("asked"))
    flat = build_mesh(MeshSpec(), strategy("mirrored"))
    assert [device.id for device in flat.devices.flat] == [0, 1, 2, 3]


def test_groups_that_would_cut_through_a_host_are_refused(cluster: Cluster) -> None:
    cluster([0, 0, 1, 1, 2, 2])
    message = refusal(MeshSpec(replica=2), "hybrid")
    assert "replica=2 does not divide 6 devices (2 + 2 + 2 of 3 processes)" in message
    assert "on 3 hosts of 2 into groups of whole hosts, or hosts into whole groups" in message
    cluster([0, 0, 1, 1, 1, 1])
    assert "on 2 hosts of 2 or 4 into groups" in refusal(MeshSpec(replica=2), "hybrid")


@pytest.mark.slow
@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(2, 12), st.data())
@settings(deadline=None, derandomize=True, max_examples=100)
def test_a_group_is_whole_hosts_or_a_part_of_one(
    counts: list[int], number: int, data: st.DataObject
) -> None:
    order = data.draw(st.permutations([host for host, n in enumerate(counts) for _ in range(n)]))
    devices: Any = [Device(n, host) for n, host in enumerate(order)]
    hosts = [[d for d in devices if d.process_index == host] for host in range(len(counts))]
    try:
        found = meshes.host_groups(devices, hosts, number)
    except UserError as error:
        assert f"replica={number} does not divide {len(devices)} device" in str(error)
        return
    assert len(found) == number and len({len(group) for group in found}) == 1
    assert sorted(d.id for group in found for d in group) == list(range(len(devices)))
    for group in found:
        own = {d.process_index for d in group}
        whole = sum(counts[host] for host in own) == len(group)
        assert whole or len(own) == 1


# --- Virtual devices ---


def test_the_environment_says_how_many_cpu_devices_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "6")
    assert cpu_devices_in_environment() == "JAX_NUM_CPU_DEVICES=6"
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES")
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_force_host_platform_device_count=4")
    found = cpu_devices_in_environment()
    assert found == "--xla_force_host_platform_device_count=4"
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    assert cpu_devices_in_environment() is None
    monkeypatch.delenv("XLA_FLAGS")
    assert cpu_devices_in_environment() is None


def test_the_environment_counts_above_the_number_asked_for() -> None:
    make_cpu_devices(3)  # else too late: this process uses its devices already
    assert len(jax.devices()) == 8


def test_cpu_devices_made_too_late_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    with pytest.raises(UserError, match="cpu_devices=3"):
        make_cpu_devices(3)

"""The table of `--show-sharding`: its bytes are those that a state really takes on each device."""

import io
import re
from collections.abc import Sequence
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)
from rich.console import Console

from spmdtrain.document.terminal import Terminal
from spmdtrain.sharding.layout import (
    MemoryUse,
    Row,
    ShardingTable,
    sharding_blocks,
    summary,
    tabulate,
)
from spmdtrain.step.state import TrainState, average_of
from spmdtrain.tree import named_leaves, path_name

P = PartitionSpec


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return jax.make_mesh((2, 4, 1), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def shaped(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


PARAMS = {
    "blocks": {"q": shaped(4, 64, 32), "norm": shaped(4, 32)},
    "embed": {"table": shaped(1024, 32), "q": shaped(8, 8, dtype=jnp.bfloat16)},
}


def state(
    params: Any = PARAMS,
    optimizer: optax.GradientTransformation | None = None,
    *,
    averaged: bool = False,
    model_state: Any = None,
) -> TrainState:
    """An abstract state, of Adam by default."""
    opt_state = jax.eval_shape((optimizer or optax.adam(1e-3)).init, params)
    return TrainState(
        step=shaped(dtype=jnp.int32),  # type: ignore[arg-type]
        params=params,
        opt_state=opt_state,
        averaged=average_of(params) if averaged else {},
        model_state=model_state or {},
        key=jax.eval_shape(lambda: jax.random.key(0)),
    )


def placed(of: TrainState, mesh: Mesh, *by_pattern: tuple[str, Any]) -> TrainState:
    """Shardings by the first pattern that the path matches, else replicated."""

    def sharding(path: Any, leaf: Any) -> Sharding:
        name = path_name(path)
        found = next((s for p, s in by_pattern if re.search(p, name)), P())
        return found if isinstance(found, Sharding) else NamedSharding(mesh, found)

    return jax.tree_util.tree_map_with_path(sharding, of)


def rows(table: ShardingTable) -> dict[str, Row]:
    return {row.name: row for row in table.rows}


def drawn(table: ShardingTable, width: int | None) -> list[str]:
    """What is printed on a terminal of some width, or into a file."""
    terminal, file = Terminal(), io.StringIO()
    terminal.console = Console(
        file=file,
        force_terminal=width is not None,
        width=width or 1000,
        highlight=False,
        soft_wrap=True,
        color_system=None,
        markup=False,
    )
    terminal.show(*sharding_blocks(table))
    return [re.sub("\x1b\\[[0-9;]*m", "", line) for line in file.getvalue().splitlines()]


# --- Rows ---


def test_a_row_a_parameter_with_the_leaves_of_the_optimizer_that_follow_it(mesh: Mesh) -> None:
    of = state(averaged=True)
    table = tabulate(of, placed(of, mesh, ("blocks/q", P(None, "fsdp"))))
    found = rows(table)
    assert list(found) == ["blocks/norm", "blocks/q", "embed/q", "embed/table", "other"]
    whole = 4 * 64 * 32 * 4
    assert found["blocks/q"] == Row(
        name="blocks/q",
        shape="(4, 64, 32)",
        dtype="float32",
        spec="P(None, 'fsdp')",
        own=MemoryUse(whole // 4, 0, whole),
        optimizer=MemoryUse(whole // 2, 0, 2 * whole),  # mu and nu
        average=MemoryUse(whole // 4, 0, whole),
        elements=4 * 64 * 32,
    )
    # Not that of blocks/q, though both end in q; and its average is in f32.
    assert found["embed/q"].dtype == "bfloat16"
    assert (found["embed/q"].own.whole, found["embed/q"].average.whole) == (128, 256)
    # step and key, and Adam's count.
    assert found["other"].own == MemoryUse(12, 0, 12)
    assert found["other"].optimizer == MemoryUse(4, 0, 4)


def test_the_longest_path_that_ends_an_optimizers_leaf_owns_it(mesh: Mesh) -> None:
    params = {"q": shaped(3), "blocks": {"q": shaped(5), "blocks": {"q": shaped(7)}}}
    of = state(params, optax.sgd(0.1, momentum=0.9))
    found = rows(tabulate(of, placed(of, mesh)))
    assert {name: row.optimizer.whole for name, row in found.items()} == {
        "blocks/blocks/q": 28,
        "blocks/q": 20,
        "q": 12,
        "other": 0,
    }


def test_leaves_of_another_shape_follow_their_parameter_too(mesh: Mesh) -> None:
    of = state({"w": shaped(256, 128)}, optax.adafactor(1e-3, min_dim_size_to_factor=64))
    found = rows(tabulate(of, placed(of, mesh)))
    assert found["w"].optimizer.whole >= 4 * (256 + 128)
    assert found["w"].optimizer.whole + found["other"].optimizer.whole == sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(of.opt_state)
    )


def test_model_state_and_what_follows_no_parameter_are_other(mesh: Mesh) -> None:
    rate = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    of = state({"w": shaped(8)}, rate, model_state={"w": shaped(6)})
    row = rows(tabulate(of, placed(of, mesh)))["other"]
    assert row.own.whole == 12 + 24
    assert row.optimizer.whole == 8  # the rate and its count
    assert (row.shape, row.spec) == ("5 arrays", "replicated")


def test_parameters_that_are_one_array_have_its_name(mesh: Mesh) -> None:
    of = state(shaped(8, 8))
    found = rows(tabulate(of, placed(of, mesh, ("params|mu|nu", P("fsdp")))))
    assert found["params"].own == MemoryUse(64, 0, 256)
    assert found["params"].optimizer.whole >= 512


@pytest.mark.parametrize(
    ("sharding", "text"),
    [
        (P("fsdp"), "P('fsdp')"),
        (P("fsdp", None), "P('fsdp', None)"),
        (P(None, ("data", "fsdp")), "P(None, ('data', 'fsdp'))"),
        (P("fsdp", "tensor"), "P('fsdp', 'tensor')"),
        (P(), "replicated"),
        (P(None, None), "replicated"),
        (P("tensor"), "replicated (tensor=1)"),
    ],
)
def test_specs(mesh: Mesh, sharding: PartitionSpec, text: str) -> None:
    of = state({"w": shaped(16, 8)})
    for kind, marked in (("device", text), ("pinned_host", f"{text} host")):
        where = NamedSharding(mesh, sharding, memory_kind=kind)
        assert rows(tabulate(of, placed(of, mesh, ("w", where))))["w"].spec == marked


# --- Sums ---


@hypothesis.given(st.data())
@hypothesis.settings(deadline=None, max_examples=10)
def test_the_bytes_are_those_of_the_real_arrays_on_each_device(
    mesh: Mesh, data: st.DataObject
) -> None:
    of = state(averaged=True, model_state={"mean": shaped(16)})
    one = SingleDeviceSharding(jax.devices()[3])
    choices: dict[str, list[Any]] = {
        "table": [P("fsdp"), P(("data", "fsdp")), P(None, "data"), P()],
        "blocks/q": [P(None, "fsdp", "data"), P("data"), P(), one],
        "norm": [P("fsdp"), P(), one],
        "step|key|mean": [P(), one],
    }
    chosen = [(pattern, data.draw(st.sampled_from(specs))) for pattern, specs in choices.items()]
    shardings = placed(of, mesh, *chosen)
    table = tabulate(of, shardings)

    per_device = dict.fromkeys(jax.devices(), 0)
    for name, leaf in named_leaves(of).items():
        array = jax.device_put(np.zeros(leaf.shape, np.int8), named_leaves(shardings)[name])
        for shard in array.addressable_shards:
            per_device[shard.device] += shard.data.size * leaf.dtype.itemsize
    assert (table.fullest, table.emptiest) == (max(per_device.values()), min(per_device.values()))
    assert table.devices == 8
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(of))
    total = table.total
    assert (total.own + total.optimizer + total.average).whole == whole


def test_host_memory_is_counted_beside_the_devices(mesh: Mesh) -> None:
    of = state({"w": shaped(1000, 80)})
    on_host = NamedSharding(mesh, P("fsdp"), memory_kind="pinned_host")
    table = tabulate(of, placed(of, mesh, ("opt_state.*w", on_host), ("w", P(("data", "fsdp")))))
    row = rows(table)["w"]
    assert (row.own, row.optimizer) == (
        MemoryUse(40_000, 0, 320_000),
        MemoryUse(0, 160_000, 640_000),
    )
    assert (str(row.own), str(row.optimizer)) == ("40.0 kB", "160 kB host")
    assert table.fullest == 40_000 + 16  # with the scalars
    assert summary(table)[0] == (
        "each of 8 devices holds 40.0 kB, and 160 kB in host memory, of 960 kB "
        "(21%; an even split is 120 kB)"
    )
    assert str(MemoryUse(1, 2, 3)) == "1 B + 2 B host"
    assert str(MemoryUse()) == "0 B"


def test_an_even_split_is_a_part_of_the_whole(mesh: Mesh) -> None:
    of = state({"w": shaped(4000, 1000)})
    table = tabulate(of, placed(of, mesh, ("w", P(("data", "fsdp")))))
    assert summary(table)[0] == "each of 8 devices holds 6.00 MB of 48.0 MB (1/8)"
    table = tabulate(of, placed(of, mesh))
    assert summary(table)[0] == (
        "each of 8 devices holds 48.0 MB of 48.0 MB (all of it; an even split is 6.00 MB)"
    )


def test_one_device_has_no_imbalance() -> None:
    of = state({"w": shaped(1000)})
    where = SingleDeviceSharding(jax.devices()[0])
    table = tabulate(of, jax.tree.map(lambda _: where, of))
    assert rows(table)["w"].spec == "on 1 device"
    assert summary(table) == ["the one device holds 12.0 kB of 12.0 kB (all of it)"]


# --- The worst imbalance ---


def test_the_leaf_with_the_most_beyond_an_even_split_is_named(mesh: Mesh) -> None:
    of = state()
    # embed/table is larger, but split in four: its excess is a half of what a device holds of it.
    table = tabulate(of, placed(of, mesh, ("table", P("fsdp"))))
    assert table.worst is not None
    assert (table.worst.name, table.worst.spec) == ("blocks/q", "replicated")
    assert (table.worst.held, table.worst.excess) == (32_768, 32_768 - 4096)
    assert (table.worst.holders, table.worst.copies) == (8, 8)
    line = summary(table)[1]
    assert line.startswith(
        "worst imbalance: blocks/q (replicated), 32.8 kB on each of 8 devices (8 copies): "
        "28.7 kB more than an even split, "
    )
    share = 28_672 / table.fullest
    assert line.endswith(f", {share:.1%} of what a device holds")

    table = tabulate(of, placed(of, mesh, ("table", P("fsdp")), ("blocks/q", P(None, "fsdp"))))
    assert table.worst is not None
    assert (table.worst.name, table.worst.copies) == ("embed/table", 2)
    assert table.worst.spec == "P('fsdp')"


def test_an_optimizers_leaf_is_named_by_its_own_path(mesh: Mesh) -> None:
    of = state({"w": shaped(1000, 80)})
    table = tabulate(of, placed(of, mesh, ("nu/w", P()), ("w", P(("data", "fsdp")))))
    assert table.worst is not None
    assert table.worst.name == "opt_state/0/nu/w"


def test_what_one_device_alone_holds_is_an_imbalance(mesh: Mesh) -> None:
    of = state({"v": shaped(10_000), "w": shaped(1000, 80)})
    alone = SingleDeviceSharding(jax.devices()[0])
    table = tabulate(of, placed(of, mesh, ("/v", alone), ("w", P(("data", "fsdp")))))
    assert (table.fullest, table.emptiest) == (120_000 + 120_000 + 16, 120_000 + 16)
    assert summary(table) == [
        "the fullest of 8 devices holds 240 kB, the emptiest 120 kB, of 1.08 MB "
        "(22%; an even split is 135 kB)",
        "worst imbalance: v (on 1 device), 40.0 kB on 1 of 8 devices (1 copy): 35.0 kB more than "
        "an even split, 14.6% of what a device holds",
    ]


def test_an_even_state_has_none_and_a_trivial_one_is_called_so(mesh: Mesh) -> None:
    of = state({"w": shaped(1000, 80)})
    table = tabulate(of, placed(of, mesh, ("w", P(("data", "fsdp")))))
    assert summary(table)[1] == (
        "worst imbalance: key (replicated), 8 B on each of 8 devices (8 copies): 7 B more than "
        "an even split, under 0.1% of what a device holds"
    )
    even = TrainState(of.params, of.params, {}, {}, {}, of.params)
    table = tabulate(even, placed(even, mesh, ("w", P(("data", "fsdp")))))
    assert table.worst is None
    assert summary(table)[1] == "worst imbalance: none, every array is split evenly"


# --- What is printed ---


def joined(lines: Sequence[str]) -> str:
    """The text of lines, wherever they are broken."""
    return " ".join(" ".join(lines).split())


def test_a_wide_terminal_and_a_file_get_a_table(mesh: Mesh) -> None:
    of = state()
    table = tabulate(of, placed(of, mesh, ("table", P("fsdp", None))))
    for width in (140, None):
        lines = drawn(table, width)
        (line,) = [line for line in lines if "embed/table" in line and "worst" not in line]
        assert re.split(r"\s*[│|]\s*", line.strip())[1:-1] == [
            *("embed/table", "(1024, 32)", "float32", "P('fsdp', None)", "32.8 kB", "65.5 kB")
        ]
        assert joined(lines).endswith(joined(summary(table)))
    assert not any("average" in line for line in lines)
    averaged = state(averaged=True)
    assert any("average" in line for line in drawn(tabulate(averaged, placed(averaged, mesh)), 140))


def test_a_narrow_terminal_gets_two_lines_a_parameter_and_no_name_is_cut(mesh: Mesh) -> None:
    params = {"blocks": {"attention": {"query_projection": {"kernel": shaped(16, 64, 64)}}}}
    of = state(params, averaged=True)
    table = tabulate(of, placed(of, mesh, ("kernel", P(None, ("data", "fsdp"), None))))
    lines = drawn(table, 80)
    assert joined(lines).endswith(joined(summary(table)))
    assert lines[:2] == [
        "blocks/attention/query_projection/kernel  P(None, ('data', 'fsdp'), None)",
        "    (16, 64, 64)  float32  32.8 kB  optimizer 65.5 kB  average 32.8 kB",
    ]
    assert lines[4].startswith("total")
    assert max(map(len, lines)) <= 80

    framed = drawn(table, 200)
    width = len(framed[0])
    assert 80 < width < 200
    assert drawn(table, width) == framed
    assert joined(drawn(table, width - 1)) == joined(lines)


@pytest.mark.slow
def test_all_of_many_parameters_are_printed_and_brackets_stay(mesh: Mesh) -> None:
    of = state({f"layer[bold]{n}": shaped(8) for n in range(500)}, optax.sgd(0.1))
    table = tabulate(of, placed(of, mesh))
    for width in (40, 140, None):
        text = "\n".join(drawn(table, width))
        assert all(f"layer[bold]{n} " in text for n in range(500))

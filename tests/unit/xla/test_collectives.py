"""The collectives of a compiled program, and the parameters from which a value of it comes."""

import contextlib
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from spmdtrain.xla.collectives import Collective, Origin, Origins, collectives, describe_collectives
from spmdtrain.xla.hlo import Computation, Instruction, Module, UnreadableProgramError


def make_mesh(**sizes: int) -> Mesh:
    axis_types = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=axis_types)


def read(line: str, mesh: Mesh) -> Collective:
    (found,) = collectives(f"ENTRY %main {{\n  {line}\n}}\n", mesh)
    return found


def all_reduce(groups: str) -> str:
    return (
        "ROOT %psum.7 = f32[128]{0} all-reduce(%wrapped_reduce), channel_id=1, "
        f"replica_groups={groups}, use_global_device_ids=true, to_apply=%region_0.0.clone, "
        'metadata={op_name="jit(step)/reduce_sum" stack_frame_id=3}'
    )


# --- Groups ---


@pytest.mark.parametrize(
    ("groups", "axes", "group_size"),
    [
        ("{{0,2,4,6},{1,3,5,7}}", ("data",), 4),
        ("{{0,1}, {2,3}, {4,5}, {6,7}}", ("tensor",), 2),
        ("{{0,1,2,3,4,5,6,7}}", ("data", "tensor"), 8),
        ("{{7,6,5,4,3,2,1,0}}", ("data", "tensor"), 8),
        ("{{0,2},{4,6},{1,3},{5,7}}", ("data",), 2),  # a part of the axis
        ("{{0},{1},{2,4,6},{3},{5},{7}}", ("data",), 3),
        ("{}", ("data", "tensor"), 8),
        ("[4,2]<=[8]", ("tensor",), 2),
        ("[2,4]<=[4,2]T(1,0)", ("data",), 4),
        ("[1,8]<=[8]", ("data", "tensor"), 8),
        ("[4,2]<=[2,2,2]T(2,0,1)", ("data",), 2),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", ("data",), 4),
        ("mesh['axis_0'=4,'axis_1'=1,'axis_2'=2] {'axis_2'}", ("tensor",), 2),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_0','axis_1'}", ("data", "tensor"), 8),
        ("mesh['axis_0'=8] {'axis_0':(4)2}", ("tensor",), 2),
        ("mesh['axis_0'=8] {'axis_0':(1)4}", ("data",), 4),
        ("mesh['axis_0'=8] {'axis_0':(1)2,'axis_0':(4)2}", ("data", "tensor"), 4),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", ("data",), 4),
        ("mesh['a'=2,'b'=4], device_ids=(0,2,4,6,1,3,5,7) {'a'}", ("tensor",), 2),
    ],
)
def test_spellings_of_groups(groups: str, axes: tuple[str, ...], group_size: int) -> None:
    found = read(all_reduce(groups), make_mesh(data=4, tensor=2))
    assert found == Collective("all-reduce", axes, group_size, 512, 1, "jit(step)/reduce_sum")


@pytest.mark.parametrize(
    ("pairs", "axes", "group_size"),
    [
        ("{{0,1},{1,0},{2,3},{3,2},{4,5},{5,4},{6,7},{7,6}}", ("tensor",), 2),
        ("{{0,2},{2,4},{4,6},{6,0},{1,3},{3,5},{5,7},{7,1}}", ("data",), 4),
        ("{{4,6},{0,2},{2,4}}", ("data",), 4),  # a shift without the way back
        ("{{0,0},{1,2},{2,1},{3,3}}", ("data", "tensor"), 2),
    ],
)
def test_pairs_of_a_permute(pairs: str, axes: tuple[str, ...], group_size: int) -> None:
    line = (
        f"%p = f32[32,32]{{1,0}} collective-permute(%x), channel_id=1, source_target_pairs={pairs}"
    )
    found = read(line, make_mesh(data=4, tensor=2))
    assert found == Collective("collective-permute", axes, group_size, 4096, 1, "")


@pytest.mark.parametrize(
    "line",
    [
        all_reduce("{{0},{1},{2},{3},{4},{5},{6},{7}}"),
        all_reduce("[8,1]<=[8]"),
        all_reduce("mesh['axis_0'=8,'axis_1'=1] {'axis_1'}"),
        all_reduce("mesh['axis_0'=8] {}"),
        "%p = f32[8] collective-permute(%x), source_target_pairs={{0,0},{1,1}}",
    ],
)
def test_groups_of_one_are_left_out(line: str) -> None:
    assert collectives(line, make_mesh(data=8)) == []


def test_all_of_one_device_are_left_out() -> None:
    one = Mesh(np.array(jax.devices()[:1]), ("data",), axis_types=(AxisType.Auto,))
    assert collectives(all_reduce("{}"), one) == []


@pytest.mark.parametrize(
    "groups",
    [
        "what[8]",
        "[4,4]<=[8]",
        "[2,4]<=[8]T(1,0)",
        "maximal_mesh[device_id=3] {}",
        "mesh[] {}",
        "mesh['a'=8] {'b'}",
        "mesh['a'=8], device_ids=(0,1,2) {'a'}",
    ],
)
def test_unreadable_groups_are_no_error(groups: str) -> None:
    mesh = make_mesh(data=8)
    assert read(all_reduce(groups), mesh) == Collective(
        "all-reduce", (), 0, 512, 1, "jit(step)/reduce_sum"
    )
    # Nor is a payload that cannot be made whole.
    assert read(all_reduce(groups).replace("all-reduce(", "reduce-scatter("), mesh).bytes == 512


@hypothesis.given(st.data())
@hypothesis.settings(deadline=None)
def test_no_corruption_is_an_unknown_error(data: st.DataObject) -> None:
    whole = all_reduce(
        data.draw(
            st.sampled_from(
                [
                    "{{0,1,2,3},{4,5,6,7}}",
                    "[2,4]<=[4,2]T(1,0)",
                    "mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a','b':(2)2}",
                    "{{0}}, source_target_pairs={{0,1},{1,0}}",
                ]
            )
        )
    )
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, len(whole)))
    with contextlib.suppress(UnreadableProgramError):  # such as a brace that is not closed
        assert len(collectives(whole[:start] + whole[end:], make_mesh(data=8))) <= 1


def test_devices_beyond_the_mesh_name_no_axis() -> None:
    found = read(all_reduce("[2,8]<=[16]"), make_mesh(data=8))
    assert (found.axes, found.group_size) == ((), 8)


@st.composite
def iota_groups(draw: st.DrawFn) -> tuple[list[int], list[int] | None, int]:
    """The dims of 8 devices, their permutation, and the size of the groups they are cut into."""
    dims = draw(st.permutations(draw(st.sampled_from([[8], [2, 4], [2, 2, 2], [1, 2, 4]]))))
    permutation = draw(st.none() | st.permutations(range(len(dims))))
    return dims, permutation, draw(st.sampled_from([2, 4, 8]))


@hypothesis.given(iota_groups(), st.permutations([4, 2, 1]) | st.just([2, 2, 2]))
@hypothesis.settings(deadline=None)
def test_iota_says_what_the_lists_say(
    iota: tuple[list[int], list[int] | None, int], sizes: list[int]
) -> None:
    dims, permutation, group_size = iota
    mesh = make_mesh(**dict(zip("abc", sizes, strict=True)))
    ids = np.arange(8).reshape(dims).transpose(permutation).reshape(-1, group_size)
    found = read(all_reduce(_spell_iota(ids, dims, permutation)), mesh)
    lists = "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in ids) + "}"
    assert found == read(all_reduce(lists), mesh)
    coordinates = {int(i): np.argwhere(np.arange(8).reshape(sizes) == i)[0] for i in range(8)}
    assert found.axes == tuple(
        axis
        for position, axis in enumerate("abc")
        if any(len({coordinates[int(i)][position] for i in group}) > 1 for group in ids)
    )


def _spell_iota(ids: np.ndarray, dims: list[int], permutation: list[int] | None) -> str:
    transposed = "" if permutation is None else f"T({','.join(map(str, permutation))})"
    return f"[{len(ids)},{len(ids[0])}]<=[{','.join(map(str, dims))}]{transposed}"


# --- Shapes ---

GROUPS = "replica_groups=[1,8]<=[8]"


@pytest.mark.parametrize(
    ("line", "kind", "payload", "arrays"),
    [
        (f"%a = f32[] all-reduce(%x), {GROUPS}", "all-reduce", 4, 1),
        (f"a = f32[16,8] all-reduce(f32[16,8] x), {GROUPS}", "all-reduce", 512, 1),
        (
            "%a = (f32[], f32[8,128]{1,0:T(8,128)}, bf16[16]{0:T(1024)(2,1)S(1)}) "
            f"all-reduce(%x, %y, %z), {GROUPS}",
            "all-reduce",
            4 + 4096 + 32,
            3,
        ),
        (
            "%a = (f32[2]{0}, f32[2]{0}, f32[2]{0}, f32[2]{0}, f32[2]{0}, /*index=5*/f32[2]{0}) "
            f"all-to-all(%a, %b, %c, %d, %e, /*index=5*/%f), {GROUPS}",
            "all-to-all",
            48,
            6,
        ),
        (f"%a = bf16[8,4,16]{{2,0,1}} all-to-all(%x), {GROUPS}", "all-to-all", 1024, 1),
        (f"%a = f32[<=8,16]{{1,0}} all-gather(%x), {GROUPS}", "all-gather", 512, 1),
        (f"%a = f32[8,4]{{1,0}} reduce-scatter(%x), {GROUPS}", "reduce-scatter", 1024, 1),
        (f"%a = (f32[8], f32[4]) reduce-scatter(%x, %y), {GROUPS}", "reduce-scatter", 384, 2),
        (f"%a = f32[6] ragged-all-to-all(%x, %y, %i), {GROUPS}", "ragged-all-to-all", 24, 1),
        (f"%a = u32[2] collective-broadcast(%x), {GROUPS}", "collective-broadcast", 8, 1),
        # Started here, done elsewhere.
        (f"%a = f32[16]{{0}} all-reduce-start(%x), {GROUPS}", "all-reduce", 64, 1),
        (f"%a = (f32[16]{{0}}, f32[4]) all-reduce-start(%x, %y), {GROUPS}", "all-reduce", 80, 2),
        (f"%a = ((f32[16]), f32[16]) all-reduce-start(%x), {GROUPS}", "all-reduce", 64, 1),
        (f"%a = (f32[2]{{0}}, f32[16]{{0}}) all-gather-start(%x), {GROUPS}", "all-gather", 64, 1),
        (
            "%a = ((f32[2]{0}, bf16[1]{0}), (f32[16]{0}, bf16[8]{0})) "
            f"all-gather-start(%x, %y), {GROUPS}",
            "all-gather",
            80,
            2,
        ),
        (
            f"%a = ((f32[16], f32[8]), (f32[2], f32[1])) reduce-scatter-start(%x, %y), {GROUPS}",
            "reduce-scatter",
            96,
            2,
        ),
        (
            "%a = (f32[8,4]{1,0:T(8,128)}, f32[8,4]{1,0:T(8,128)S(1)}, u32[]{:S(2)}, u32[]{:S(2)}) "
            "collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}",
            "collective-permute",
            128,
            1,
        ),
    ],
)
def test_payloads(line: str, kind: str, payload: int, arrays: int) -> None:
    found = read(line, make_mesh(data=8))
    assert (found.kind, found.bytes, found.arrays) == (kind, payload, arrays)
    assert found.axes == ("data",)


@pytest.mark.parametrize(
    ("element_type", "payload"),
    [
        *[(name, 64) for name in ("pred", "s8", "u8", "f8e4m3fn", "f8e5m2", "f8e4m3b11fnuz")],
        *[(name, 128) for name in ("s16", "u16", "f16", "bf16")],
        *[(name, 256) for name in ("s32", "u32", "f32")],
        *[(name, 512) for name in ("s64", "u64", "f64", "c64")],
        ("c128", 1024),
        ("s4", 32),
    ],
)
def test_element_types(element_type: str, payload: int) -> None:
    line = f"%a = ({element_type}[4,16]{{1,0}}, token[]) all-gather(%x), {GROUPS}"
    found = read(line, make_mesh(data=8))
    assert (found.bytes, found.arrays) == (payload, 1)


@pytest.mark.parametrize(
    "line",
    [
        "%d = f32[16]{0} all-reduce-done(%all-reduce-start)",
        "%d = f32[16]{0} all-gather-done(%all-gather-start)",
        "%g = f32[8,4]{1,0} get-tuple-element(%all-to-all), index=0",
        '%f = f32[4] fusion(%x), kind=kLoop, metadata={op_name="a = f32[4] all-reduce(x)"}',
        "HloModule jit_step, num_partitions=8",
    ],
)
def test_what_is_no_collective(line: str) -> None:
    assert collectives(line, make_mesh(data=8)) == []


@pytest.mark.parametrize(
    ("metadata", "op_name"),
    [
        ('metadata={op_type="AllReduce" op_name="dp" source_file="a.py"}', "dp"),
        (r'metadata={op_name="params[\"w\"]/{x}"}', 'params["w"]/{x}'),
        ('metadata={source_file="a.py"}, frontend_attributes={x="y"}', ""),
    ],
)
def test_op_name(metadata: str, op_name: str) -> None:
    line = f"%a = f32[2] all-reduce(%x), {GROUPS}, to_apply=%add, {metadata}"
    assert read(line, make_mesh(data=8)).op_name == op_name


def test_pieces_of_a_collective_on_a_tpu_are_counted_once() -> None:
    piece = (
        "%all-gather.{} = f32[16]{{0:T(1024)}} all-gather(%x), channel_id=5, " + GROUPS + ", "
        'frontend_attributes={{chain_id="{}"}}, backend_config={{"flag_configs":[],'
        '"async_collective_fusion_config":{{"flag_start":"-1","flag_end":"-1"}}}}'
    )
    text = "\n".join(piece.format(n, chain) for n, chain in [(1, 0), (2, 0), (3, 0), (4, 1)])
    assert len(collectives(text, make_mesh(data=8))) == 2


def test_a_fused_slice_of_an_all_reduce_is_a_reduce_scatter_on_a_tpu() -> None:
    whole, part = "bf16[4,256,256]{2,1,0}", "bf16[4,64,256]{2,1,0}"
    text = f"""
%all-reduce-scatter.1 (input.1: bf16[4,256,256]) -> bf16[4,64,256] {{
  %input.1 = {whole} parameter(0)
  %all-reduce.8 = {whole} all-reduce(%input.1), replica_groups={{{{0,1,2,3}},{{4,5,6,7}}}}
  %zero = u32[] constant(0)
  ROOT %slice.1 = {part} dynamic-slice(%all-reduce.8, %zero, %zero, %zero)
}}

ENTRY %main {{
  %x = {whole} parameter(0)
  ROOT %fusion.1 = {part} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
}}
"""
    (found,) = collectives(text, make_mesh(data=2, tensor=4))
    assert (found.kind, found.axes, found.bytes) == ("reduce-scatter", ("tensor",), 2 * 4 * 256**2)


def test_a_shared_channel_is_not_a_piece() -> None:
    # What a function called twice compiles to.
    text = "\n".join([all_reduce("{}"), all_reduce("{}").replace("psum.7", "psum.8")])
    assert len(collectives(text, make_mesh(data=8))) == 2


# --- In words ---


def test_describe_collectives() -> None:
    mesh = make_mesh(data=4, tensor=2)
    found = [
        Collective("all-gather", ("data", "tensor"), 8, 100, 1, ""),
        Collective("all-reduce", ("data",), 4, 1_000_000, 9, ""),
        Collective("all-reduce", ("tensor",), 2, 4, 1, ""),
        Collective("all-reduce", ("data",), 4, 80_000, 1, ""),
        Collective("all-to-all", (), 0, 12_345, 1, ""),
    ]
    assert describe_collectives(found, mesh) == (
        "2 all-reduces, 1.08 MB, over data=4; "
        "1 all-to-all, 12.3 kB, over unknown axes; "
        "1 all-gather, 100 B, over data=4 tensor=2; "
        "1 all-reduce, 4 B, over tensor=2"
    )
    assert describe_collectives([], mesh) == "no collectives"


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (9_996, "10.0 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (123_456_789, "123 MB"),
        (2_500_000_000, "2.50 GB"),
        (4_321_000_000_000, "4321 GB"),
    ],
)
def test_describe_bytes(payload: int, words: str) -> None:
    one = Collective("all-reduce", ("data",), 8, payload, 1, "")
    assert describe_collectives([one], make_mesh(data=8)) == f"1 all-reduce, {words}, over data=8"


# --- Compiled ---

P = PartitionSpec


def compiled(function: Callable[..., Any], *args: Any, **options: Any) -> str:
    return str(jax.jit(function, **options).lower(*args).compile().as_text())


def sharded(mesh: Mesh, *axes: str | tuple[str, ...] | None) -> NamedSharding:
    return NamedSharding(mesh, P(*axes))


def in_shard_map(
    function: Callable[[jax.Array], jax.Array], mesh: Mesh, source: P, target: P, array: jax.Array
) -> Collective:
    mapped = jax.shard_map(function, mesh=mesh, in_specs=source, out_specs=target, check_vma=False)
    (found,) = collectives(compiled(mapped, array), mesh)
    return found


@pytest.mark.parametrize("sizes", [{"data": 8}, {"data": 4, "tensor": 2}])
def test_sum_over_a_sharded_batch(sizes: Mapping[str, int]) -> None:
    mesh = make_mesh(**sizes)
    text = compiled(
        lambda x: x.sum(0),
        jnp.ones((16, 128)),
        in_shardings=sharded(mesh, "data"),
        out_shardings=sharded(mesh),
    )
    (found,) = collectives(text, mesh)
    assert re.fullmatch(
        rf"{re.escape(__file__)}:\d+ \({test_sum_over_a_sharded_batch.__name__}.*\)", found.line
    )
    assert replace(found, line="") == Collective(
        "all-reduce", ("data",), sizes["data"], 128 * 4, 1, "jit(<lambda>)/reduce_sum"
    )
    assert describe_collectives([found], mesh) == f"1 all-reduce, 512 B, over data={sizes['data']}"


def test_sum_over_the_other_axis() -> None:
    mesh = make_mesh(data=4, tensor=2)
    text = compiled(
        lambda x: x.sum(1),
        jnp.ones((16, 128)),
        in_shardings=sharded(mesh, "data", "tensor"),
        out_shardings=sharded(mesh, "data"),
    )
    (found,) = collectives(text, mesh)
    assert (found.axes, found.group_size, found.bytes) == (("tensor",), 2, 4 * 4)


def test_axes_are_found_where_devices_are_not_in_order() -> None:
    devices = np.array(jax.devices()).reshape(2, 4).T
    mesh = Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    text = compiled(
        lambda x: x.sum(0),
        jnp.ones((16, 128)),
        in_shardings=sharded(mesh, "data"),
        out_shardings=sharded(mesh),
    )
    (found,) = collectives(text, mesh)
    assert (found.axes, found.group_size) == (("data",), 4)


def test_data_parallel_gradients() -> None:
    mesh = make_mesh(data=8)
    weights = {"in": jnp.ones((16, 32)), "out": jnp.ones((32, 4))}

    def loss(weights: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(x @ weights["in"]) @ weights["out"])

    text = compiled(
        jax.value_and_grad(loss),
        weights,
        jnp.ones((64, 16)),
        in_shardings=(sharded(mesh), sharded(mesh, "data")),
        out_shardings=sharded(mesh),
    )
    found = collectives(text, mesh)
    assert {one.kind for one in found} == {"all-reduce"}
    # Each gradient byte crosses once, and with them the loss.
    gradients = sum(weight.nbytes for weight in weights.values())
    assert sum(one.bytes for one in found) == gradients + 4
    assert {one.axes for one in found} == {("data",)}


def test_gather_to_replicated() -> None:
    mesh = make_mesh(data=4, tensor=2)
    for spec, axes in [(P("data"), ("data",)), (P(None, "tensor"), ("tensor",))]:
        text = compiled(
            lambda x: x * 2,
            jnp.ones((16, 128)),
            in_shardings=NamedSharding(mesh, spec),
            out_shardings=sharded(mesh),
        )
        (found,) = collectives(text, mesh)
        assert (found.kind, found.axes, found.bytes) == ("all-gather", axes, 16 * 128 * 4)


def test_shard_map() -> None:
    mesh = make_mesh(data=4, tensor=2)
    array = jnp.ones((64, 32))

    found = in_shard_map(
        lambda x: jax.lax.psum_scatter(x, "data", tiled=True), mesh, P(), P("data"), array
    )
    assert (found.kind, found.axes, found.bytes) == ("reduce-scatter", ("data",), array.nbytes)

    found = in_shard_map(
        lambda x: jax.lax.all_to_all(x, "tensor", 1, 0, tiled=True),
        mesh,
        P("tensor"),
        P("tensor"),
        array,
    )
    assert (found.kind, found.axes, found.bytes) == ("all-to-all", ("tensor",), array.nbytes // 2)

    found = in_shard_map(
        lambda x: jax.lax.ppermute(x, "data", [(i, (i + 1) % 4) for i in range(4)]),
        mesh,
        P("data"),
        P("data"),
        array,
    )
    assert (found.kind, found.axes) == ("collective-permute", ("data",))
    assert (found.group_size, found.bytes) == (4, array.nbytes // 4)

    found = in_shard_map(
        lambda x: jax.lax.all_gather(x, ("data", "tensor"), tiled=True),
        mesh,
        P(("data", "tensor")),
        P(),
        array,
    )
    assert (found.kind, found.axes) == ("all-gather", ("data", "tensor"))
    assert (found.group_size, found.bytes) == (8, array.nbytes)


def test_one_device_has_no_collectives() -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",), axis_types=(AxisType.Auto,))
    text = compiled(
        lambda x: x.sum(0),
        jnp.ones((16, 128)),
        in_shardings=sharded(mesh, "data"),
        out_shardings=sharded(mesh),
    )
    assert collectives(text, mesh) == []


# --- What a value is followed back and ahead to ---

NAMES = {"state.params['w']": "w", "state.params['v']": "v"}
ARGUMENTS = """\
%w = f32[8,4]{1,0} parameter(0), metadata={op_name="state.params['w']"}
%v = f32[8,4]{1,0} parameter(1), metadata={op_name="state.params['v']"}
%x = f32[8,4]{1,0} parameter(2), metadata={op_name="batch"}
%i = s32[8,1]{1,0} parameter(3), metadata={op_name="numbers"}
%p = pred[] parameter(4), metadata={op_name="flag"}
"""
COMPUTATIONS = """\
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%gathering (a: f32[4,4], b: f32[4,4]) -> (f32[8,4], f32[8,4]) {
  %a = f32[4,4]{1,0} parameter(0)
  %b = f32[4,4]{1,0} parameter(1)
  ROOT %all = (f32[8,4]{1,0}, f32[8,4]{1,0}) all-gather(%a, %b), dimensions={0}
}

%taken (t: (f32[8,4], f32[8,4])) -> f32[8,4] {
  %t = (f32[8,4]{1,0}, f32[8,4]{1,0}) parameter(0)
  ROOT %second = f32[8,4]{1,0} get-tuple-element(%t), index=1
}

%doubled (a: f32[8,4]) -> f32[8,4] {
  %a = f32[8,4]{1,0} parameter(0)
  ROOT %twice = f32[8,4]{1,0} add(%a, %a)
}
"""


def program(lines: str, w: str, v: str = "%v") -> tuple[Origins, Computation]:
    """A step whose results `w` and `v` take the places of the parameters."""
    body = f"{ARGUMENTS}{lines.strip()}\nROOT %out = (f32[8,4], f32[8,4]) tuple({w}, {v})\n"
    text = (
        "HloModule step, input_output_alias={ {0}: (0, {}, may-alias), {1}: (1, {}, may-alias) }\n"
        f"\n{COMPUTATIONS}\nENTRY %main () -> (f32[8,4], f32[8,4]) {{\n"
        f"{textwrap.indent(body, '  ')}}}\n"
    )
    module = Module(text)
    return Origins(module, NAMES, devices=2), module.computations["main"]


def origin(found: tuple[Origins, Computation], name: str, index: int = 0) -> Origin:
    origins, within = found
    return origins.parameters_of(within.instructions[name], within, index)


FORMS = {
    "a convert": "%y = bf16[8,4]{1,0} convert(%w)",
    "a part": "%y = f32[4,4]{1,0} slice(%w), slice={[0:4], [0:4]}",
    "the done half of a pair": """
%s = (f32[8,4]{1,0}, f32[8,4]{1,0}, u32[]) copy-start(%w)
%y = f32[8,4]{1,0} copy-done(%s)""",
    "one of a tuple": """
%t = (f32[8,4]{1,0}, f32[8,4]{1,0}) tuple(%v, %w)
%y = f32[8,4]{1,0} call(%t), to_apply=%taken""",
    "one of a gather that was begun": """
%h = f32[4,4]{1,0} slice(%v), slice={[0:4], [0:4]}
%k = f32[4,4]{1,0} slice(%w), slice={[0:4], [0:4]}
%s = ((f32[4,4]{1,0}, f32[4,4]{1,0}), (f32[8,4]{1,0}, f32[8,4]{1,0})) async-start(%h, %k), \
calls=%gathering
%d = (f32[8,4]{1,0}, f32[8,4]{1,0}) async-done(%s)
%y = f32[8,4]{1,0} get-tuple-element(%d), index=1""",
}


@pytest.mark.parametrize("lines", FORMS.values(), ids=FORMS)
def test_a_parameter_in_another_form_is_known_behind(lines: str) -> None:
    assert origin(program(lines, "%w"), "y") == Origin(("w",), is_source=True)


BECOMING = {
    "through what the optimizer does": """
%y = f32[8,4]{1,0} negate(%x)
%n = f32[8,4]{1,0} add(%w, %y)""",
    "where a scatter adds to it": """
%y = f32[8,4]{1,0} negate(%x)
%n = f32[8,4]{1,0} scatter(%y, %i, %x), to_apply=%add""",
    "through either branch": """
%y = f32[8,4]{1,0} negate(%x)
%n = f32[8,4]{1,0} conditional(%p, %y, %x), true_computation=%doubled, \
false_computation=%doubled""",
    "to another slice": """
%y = f32[8,4]{1,0} negate(%x)
%a = token[] after-all()
%s = (f32[8,4]{1,0}, u32[], token[]) send(%y, %a), is_host_transfer=true, \
frontend_attributes={_xla_host_transfer_rendezvous="all-reduce.1_0"}
%r = (f32[8,4]{1,0}, u32[], token[]) recv(%a), is_host_transfer=true, \
frontend_attributes={_xla_host_transfer_rendezvous="all-reduce.1_0"}
%d = (f32[8,4]{1,0}, token[]) recv-done(%r), is_host_transfer=true
%n = f32[8,4]{1,0} get-tuple-element(%d), index=0""",
    "in parts": """
%y = f32[8,4]{1,0} negate(%x)
%g = f32[4,4]{1,0} reduce-scatter(%y), dimensions={0}, to_apply=%add
%n = f32[8,4]{1,0} all-gather(%g), dimensions={0}""",
}


@pytest.mark.parametrize("lines", BECOMING.values(), ids=BECOMING)
def test_what_a_parameter_is_made_of_is_known_ahead(lines: str) -> None:
    assert origin(program(lines, "%n"), "y") == Origin(("w",), is_source=False)


def test_what_is_sent_to_another_slice_is_known_where_it_is_sent() -> None:
    found = program(BECOMING["to another slice"], "%n")
    assert origin(found, "s") == Origin(("w",), is_source=False)
    sent = program(BECOMING["to another slice"].replace("negate(%x)", "copy(%v)"), "%w")
    assert origin(sent, "s") == origin(sent, "d") == Origin(("v",), is_source=True)


OTHERS = {
    "what a scatter adds": """
%y = f32[8,4]{1,0} negate(%x)
%n = f32[8,4]{1,0} scatter(%x, %i, %y), to_apply=%add""",
    "what a product is of": """
%y = f32[8,8]{1,0} negate(%x)
%n = f32[8,4]{1,0} dot(%y, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}""",
    "a sum that is part of no array": """
%y = f32[] negate(%x)
%n = f32[8,4]{1,0} broadcast(%y), dimensions={}""",
    "what goes elsewhere": "%y = f32[8,4]{1,0} negate(%x)",
}


@pytest.mark.parametrize("lines", OTHERS.values(), ids=OTHERS)
def test_other_data_is_no_parameter(lines: str) -> None:
    assert origin(program(lines, "%n" if "%n" in lines else "%w"), "y") == Origin((), False)


def test_each_of_several_that_travel_together() -> None:
    lines = """
%g = f32[8,4]{1,0} negate(%x)
%h = f32[8,4]{1,0} sine(%x)
%y = (f32[4,4]{1,0}, f32[4,4]{1,0}) reduce-scatter(%g, %h), dimensions={0}, to_apply=%add
%a = f32[4,4]{1,0} get-tuple-element(%y), index=0
%b = f32[4,4]{1,0} get-tuple-element(%y), index=1
%c = f32[8,4]{1,0} all-gather(%a), dimensions={0}
%d = f32[8,4]{1,0} all-gather(%b), dimensions={0}"""
    found = program(lines, "%d", "%c")
    assert [origin(found, "y", index).parameter for index in (0, 1)] == ["v", "w"]


def test_who_made_what_was_moved_since() -> None:
    lines = """
%m = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}, \
metadata={op_name="jit(step)/dot_general"}
%c = bf16[8,8]{1,0} convert(%m)
%y = bf16[4,8]{1,0} reduce-scatter(%c), dimensions={0}, to_apply=%add"""
    origins, within = program(lines, "%w")
    made: Instruction = origins.producer(within.instructions["y"], within)
    assert made.op_name == "jit(step)/dot_general"

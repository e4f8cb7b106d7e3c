"""The advice of a plan: which options avoid excess traffic, and how its figures are labeled."""

import dataclasses
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import DIGITS, GPT, text_in
from plan_helpers import advised, needs_libtpu, plan, planned

from spmdtrain.config import command_line
from spmdtrain.plan.advice import events
from spmdtrain.plan.command import Options
from spmdtrain.plan.planner import Plan
from spmdtrain.plan.summary import Live, Use, read_dump
from spmdtrain.plan.tables import advice_blocks, step_seconds
from spmdtrain.plan.time_model import least_sent, traffic_of
from spmdtrain.plan.topologies import CompilerLog, half_of, kept_log, parse
from spmdtrain.sharding.layout import MemoryUse, Row
from spmdtrain.xla.collectives import Carried, Collective

NAMES = {f"layers/{n}/{kind}" for n in range(3) for kind in ("kernel", "bias")}
PARAMETERS = 64 * 128 + 128 + 128 * 128 + 128 + 128 * 10 + 10  # of digits_mlp


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_in(tmp_path_factory.mktemp("text"))


def carried(found: dict[str, Any], *kinds: str, is_parameter: bool) -> set[str]:
    return {
        name
        for one in found["collectives"]
        if one["kind"] in kinds
        for x in one["carries"]
        if x["is_parameter"] == is_parameter
        for name in x["parameters"]
    }


# -- whose it is -----------------------------------------------------------------------------------


@pytest.mark.nightly
def test_each_collective_is_known_by_the_parameters_it_carries() -> None:
    split = NAMES - {"layers/2/bias"}  # of 10 elements, over 8 devices
    sharded = planned(DIGITS, "--strategy", "fully_sharded", "--sharding.min-size", 1)
    assert carried(sharded, "all-gather", is_parameter=True) == split
    assert carried(sharded, "all-reduce", "reduce-scatter", is_parameter=False) == NAMES
    assert carried(sharded, "all-reduce", is_parameter=True) == set()

    zero = planned(DIGITS, "--strategy", "zero", "--sharding.min-size", 1)
    assert carried(zero, "all-gather", is_parameter=False) == split  # the new values
    mirrored = planned(DIGITS)
    assert carried(mirrored, "all-reduce", is_parameter=False) == NAMES


@pytest.mark.nightly
@pytest.mark.slow
def test_within_loops_too(text: Path) -> None:
    options = ("--preset", "tiny", "--data-dir", text, "--unroll", False, "--sharding.min-size", 1)
    found = planned(GPT, *options, "--strategy", "fully_sharded")
    blocks = {
        *("blocks/attention/qkv", "blocks/attention/out", "blocks/attention/norm"),
        *("blocks/mlp/up", "blocks/mlp/down", "blocks/mlp/norm"),
    }
    whole = blocks | {"embedding", "norm"}
    assert {row["name"] for row in found["state"]} == whole
    assert carried(found, "all-gather", is_parameter=True) == whole
    in_loop = [one for one in found["collectives"] if one["times"] == 2]
    names = {n for one in in_loop for x in one["carries"] for n in x["parameters"]}
    assert names and names <= blocks


@pytest.mark.nightly
@pytest.mark.slow
def test_memory_is_reported_by_purpose(text: Path) -> None:
    options = ("--preset", "tiny", "--data-dir", text, "--global-batch-size", 64)
    found = planned(GPT, *options, "--strategy", "mirrored")
    memory = found["memory"]
    uses = memory["uses"]
    assert 0.9 * memory["temporaries"] <= sum(uses.values()) <= memory["temporaries"]
    assert uses[Use.ACTIVATION] > 0.5 * memory["temporaries"]
    sizes = [one["bytes"] * one["count"] for one in memory["buffers"]]
    assert sizes == sorted(sizes, reverse=True) and all(
        one["line"] or one["parameter"] for one in memory["buffers"][:5]
    )
    # More examples make activations alone more.
    more = planned(GPT, *options[:-1], 256, "--strategy", "mirrored")["memory"]["uses"]
    assert more[Use.ACTIVATION] > 3 * uses[Use.ACTIVATION]


def test_peak_memory_follows_from_the_live_ranges_of_values(tmp_path: Path) -> None:
    start = tmp_path / "module_0001.step.after_optimizations"
    report = "Memory Space: default (color=0)\nTotal bytes: 1000 (1.00KiB)\n"
    Path(f"{start}-memory-usage-report.txt").write_text(report)
    Path(f"{start}-buffer-assignment.txt").write_text(
        "BufferAssignment:\n"
        "allocation 0: size 400, parameter 0, shape |f32[100]| at ShapeIndex {}:\n"
        " value: <1 a @0> (size=400,offset=0): f32[100]{0}\n"
        "allocation 1: size 600, preallocated-temp:\n"
        " value: <2 early @0> (size=300,offset=0): f32[75]{0}\n"
        " value: <3 loop{1} (phi) @0> (size=300,offset=300): f32[75]{0}\n"
        " value: <4 late{0} @0> (size=200,offset=0): f32[50]{0}\n"
        " value: <5 same @0> (size=200,offset=0): f32[50]{0}\n"
        "allocation 2: size 9999, color 1, preallocated-temp:\n"
        " value: <6 fast @1> (size=9999,offset=0): f32[2499]{0:S(1)}\n"
    )
    ranges = "early{}:1-3\n    loop{1}:4-9\n    late{0}:5-7\n    same{}:6-8\n    fast{}:1-9\n"
    Path(f"{start}-live-range.txt").write_text(f"HloLiveRange (max 9):\n    {ranges}")
    found = read_dump(tmp_path)
    assert found is not None and found.total == 1000
    # `same` is made of `late` in its place: together they are 200, and nothing is there with early.
    assert found.live == [Live("loop", (1,), 300), Live("late", (0,), 200)]
    Path(f"{start}-live-range.txt").unlink()
    assert read_dump(tmp_path) is None


# -- what is sent ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_mirrored_sends_what_it_has_to() -> None:
    found = planned(DIGITS)["sent"]
    assert found["least"] == pytest.approx(2 * 7 / 8 * 4 * PARAMETERS)
    assert found["bytes"] == pytest.approx(found["least"], abs=64)  # and metrics
    assert found["excess"] < 64
    # Of what is not trained no gradient crosses.
    frozen = planned(DIGITS, "--freeze", "layers/0", "--freeze", "layers/1")["sent"]
    assert frozen["least"] == pytest.approx(2 * 7 / 8 * 4 * (128 * 10 + 10))
    assert frozen["excess"] < 64


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero", "fully_sharded"])
def test_what_a_strategy_sends_beyond_what_it_has_to(strategy: str) -> None:
    """Here sums are not scattered, but added up whole on each device, and cut."""
    found = planned(DIGITS, "--strategy", strategy, "--sharding.min-size", 11)["sent"]
    split = PARAMETERS - 10  # the last bias is whole
    scattered, whole = 7 / 8 * 4 * split, 2 * 7 / 8 * 4 * 10
    assert found["least"] == pytest.approx(2 * scattered + whole)
    assert found["bytes"] == pytest.approx(3 * scattered + whole, abs=200)
    assert found["excess"] == pytest.approx(scattered, abs=200)
    (one,) = (x for x in found["by_parameter"] if x["parameter"] == "layers/1/kernel")
    assert one["excess"] == pytest.approx(7 / 8 * 4 * 128 * 128)
    assert set(one["how"].split(", ")) == {"all-reduce once", "all-gather once"}


# -- advice ----------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.slow
def test_an_embedding_that_is_used_twice_is_reduced_twice_and_how_to_fix_it(text: Path) -> None:
    options = ("--preset", "tiny", "--data-dir", text, "--strategy", "mirrored")
    where = ("--topology", "gpu:h100:1x8")
    (one,) = advised(GPT, *options, *where)
    assert "embedding is reduced 2 times" in one.finding
    assert one.options == "--collectives.reduction all_reduce"
    assert one.with_options is not None
    rows, width = 64, 64
    saved = one.without.sent - one.with_options.sent
    assert saved == pytest.approx(2 * 7 / 8 * 4 * rows * width, rel=0.01)
    untied = advised(GPT, *options, "--no-tied", *where)
    assert not any("reduced" in other.finding for other in untied)

    def slower(plan: Plan) -> Plan:
        assert plan.times is not None
        times = replace(plan.times, waiting=plan.times.waiting + 1)
        return replace(plan, times=times)

    (one,) = advised(GPT, *options, *where, change=slower)
    assert one.options == "" and one.tried == (
        "--collectives.reduction all_reduce: no improvement",
    )


@pytest.mark.slow
def test_a_sum_over_one_axis_and_then_over_another_is_not_one_for_each_use(text: Path) -> None:
    options = ("--preset", "tiny", "--data-dir", text, "--no-tied", "--mesh.context", 4)
    found = advised(GPT, *options, "--topology", "cpu:8")
    assert not [one.finding for one in found if "reduced" in one.finding]


@pytest.mark.nightly
@pytest.mark.slow
def test_a_plan_that_does_not_fit_names_options_that_make_it_fit(text: Path) -> None:
    options = ("--width", 8192, "--layers", 8, "--heads", 32, "--data-dir", text)
    where = ("--topology", "gpu:a100:1x8", "--strategy", "mirrored")
    (one,) = advised(GPT, *options, *where)
    assert one.without.fits is False
    assert one.options == "--strategy zero" and one.with_options is not None
    assert one.with_options.fits and one.with_options.peak < one.without.peak
    assert one.tried == ()


@pytest.mark.slow
def test_a_parameter_that_fills_a_device_is_a_giant(tmp_path: Path) -> None:
    wide = tmp_path / "wide.py"
    wide.write_text(ONE_MATRIX)
    options = ("--width", 40_000, "--topology", "gpu:a100:1x8", "--strategy")
    (one,) = advised(wide, *options, "mirrored")
    assert (
        "weights (40000, 40000)" in one.finding and "replicated on each of 8 devices" in one.finding
    )
    assert one.options == "--strategy zero" and one.with_options is not None
    # The moments of Adam, in eight parts.
    saved = one.without.peak - one.with_options.peak
    assert saved == pytest.approx(2 * 4 * 40_000**2 * 7 / 8, rel=0.05)
    (other,) = advised(wide, *options, "fully_sharded")
    assert "with 1 example per chip" in other.finding and not other.options
    assert any(each.options.startswith("--batch-size") for each in other.rescaled)


@pytest.mark.nightly
def test_dims_that_do_not_divide_and_into_how_many_parts_they_do(tmp_path: Path) -> None:
    wide = tmp_path / "wide.py"
    wide.write_text(ONE_MATRIX)
    options = ("--width", 1002, "--topology", "gpu:a100:1x8", "--strategy", "fully_sharded")
    ended = plan(wide, *options)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert "no dim divides (1002 = 125 * 8 + 2" in line
    assert "(or raise --sharding.replicated-limit)" in line
    assert (
        "with --sharding.max-shards 2 all parameters are divisible, and each device holds 6.02 MB"
        in line
    )
    (one,) = advised(wide, *options, "--sharding.replicated-limit", 2**30)
    assert "no dim of weights (1002, 1002) is divisible by 8 devices" in one.finding
    assert one.options == "--sharding.max-shards 2" and one.with_options is not None
    assert one.with_options.peak < one.without.peak


@pytest.mark.slow
def test_bfloat16_is_advised_where_products_of_float32_limit_the_step(tmp_path: Path) -> None:
    wide = tmp_path / "wide.py"
    wide.write_text(ONE_MATRIX.replace("np.ones((64,", "np.zeros((131072,"))
    options = ("--width", 4096, "--strategy", "mirrored", "--batch-size-per-device", 16384)
    where = ("--topology", "gpu:h100:1x8")
    (one,) = advised(wide, *options, *where)
    assert "the model computes in float32, whose products take 2 times as long" in one.finding
    assert one.options == "--compute-dtype bfloat16" and one.with_options is not None
    narrow, full = (
        planned(wide, *options, *where, "--compute-dtype", dtype)["time"]
        for dtype in ("bfloat16", "float32")
    )
    assert one.with_options.estimate == narrow["estimate"]
    assert one.without.estimate == full["estimate"]
    assert full["compute"] == pytest.approx(2 * narrow["compute"])  # TensorFloat-32
    assert advised(wide, *options, *where, "--compute-dtype", "bfloat16") == []
    assert advised(wide, *options, "--topology", "cpu:8") == []


@pytest.mark.slow
def test_where_no_option_helps_fewer_chips_or_a_larger_batch_do(tmp_path: Path) -> None:
    """With an example per device, the gradient of the matrix is most of the work of a step."""
    wide = tmp_path / "wide.py"
    wide.write_text(ONE_MATRIX)
    options = ("--width", 4096, "--strategy", "mirrored", "--compute-dtype", "bfloat16")
    (one,) = advised(wide, *options, "--topology", "gpu:h100:1x8")
    assert one.options == "" and one.finding.startswith("products take 0.")
    fewer, larger = one.rescaled
    assert fewer.options == "--topology gpu:h100:1x4 --batch-size-per-device 2"
    assert larger.options == "--batch-size-per-device 4"
    assert (fewer.chips, fewer.global_batch_size) == (4, 8)
    assert (larger.chips, larger.global_batch_size) == (8, 32)
    again = planned(wide, *options, "--topology", "gpu:h100:1x8", *larger.options.split())
    assert larger.estimate == again["time"]["estimate"]
    now = one.without.estimate
    assert now is not None and fewer.estimate * 4 < 0.75 * now * 8
    assert larger.estimate / 32 < 0.75 * now / 8
    shown = planned(wide, *options, "--topology", "gpu:h100:1x8")
    shown["advice"] = [dataclasses.asdict(one)]
    (line,) = (block.text for block in advice_blocks(shown))
    assert "use fewer chips or a larger batch: with --topology gpu:h100:1x4 --batch-si" in line
    assert f"(now {step_seconds(now)})" in line

    def slower(plan: Plan) -> Plan:
        assert plan.times is not None
        return replace(plan, times=replace(plan.times, waiting=1.0))

    assert advised(wide, *options, "--topology", "gpu:h100:1x8", change=slower) == []


@pytest.mark.parametrize(
    ("name", "half"),
    [
        ("v5e:4x4", "v5e:2x4"), ("v5e:4x8", "v5e:4x4"), ("v5e:16x16@2", "v5e:16x16"),
        ("v5e:2x2", None), ("v5e:4x4@3", None), ("gpu:h100:4x8", "gpu:h100:2x8"),
        ("gpu:h100:1x8", "gpu:h100:1x4"), ("gpu:h100:1x1", None), ("cpu:8", None),
    ],
)  # fmt: skip
def test_half_the_chips_of_a_topology(name: str, half: str | None) -> None:
    assert half_of(parse(name)) == (None if half is None else parse(half))


ONE_MATRIX = """
from dataclasses import dataclass
import jax, jax.numpy as jnp, numpy as np, optax
from spmdtrain import Experiment, FunctionModel, RunConfig

@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    steps: int = 3
    batch_size_per_device: int = 1
    width: int = 8

def build(config):
    def init(key):
        return {"weights": jnp.zeros((config.width, config.width))}
    def loss(model, batch):
        y = (batch["x"] @ model["weights"]).astype(jnp.float32)
        return {"loss": jnp.square(y).mean(-1)}
    data = {"x": np.ones((64, config.width), np.float32)}
    return Experiment(model=FunctionModel(init), objective=loss, train=data,
                      optimizer=optax.adam(1e-3))
"""


# -- what changes between topologies, and what the partitioner warns of ----------------------------


@pytest.mark.nightly
@pytest.mark.slow
def test_what_changes_between_topologies() -> None:
    options = ("--strategy", "fully_sharded", "--sharding.min-size", 1, "--no-advice")
    ended = plan(DIGITS, *options, "--topology", "cpu:2,cpu:8")
    assert ended.returncode == 0, ended.stderr
    (change,) = [x for x in ended.stdout.splitlines() if x.startswith("cpu:2 to cpu:8: ")]
    assert change.endswith(
        ": layers/2/bias (10,): replicated (2 shards before) on 4 times the devices"
    )


def test_events_of_collectives_and_of_time() -> None:
    def of(kind: str, waiting: float, rules: str, link: str) -> dict[str, Any]:
        carries = [{"parameters": ["w"], "is_parameter": True}]
        return {
            "fits": True,
            "devices": 8,
            "state": [],
            "collectives": [{"kind": kind, "carries": carries, "link": link}],
            "time": {"waiting": waiting, "estimate": 1.0, "rules": rules},
        }

    before = of("all-gather", 0.0, "compute", "links")
    after = of("all-reduce", 0.25, "collectives", "the network between slices")
    assert list(events(before, before)) == []
    assert list(events(before, after | {"fits": False})) == [
        "no longer fits",
        "w: sent by all-reduce (all-gather before)",
        "collectives cross the network between slices",
        "only collectives run in 25% of a step (0% before)",
        "the bottleneck is collectives (compute before)",
    ]


@pytest.mark.slow
def test_an_array_that_is_gathered_whole_is_reported_with_its_line(tmp_path: Path) -> None:
    config = tmp_path / "resharded.py"
    source = ONE_MATRIX.replace("    def loss(model, batch):\n", RESHARDED)
    config.write_text(source)
    line = next(n for n, text in enumerate(source.splitlines(), 1) if "HERE" in text)
    options = ("--width", 256, "--mesh.data", 2, "--mesh.fsdp", 4, "--topology", "cpu:8")
    found = planned(config, *options)
    there, back = found["rematerialized"]  # in the forward pass, and in the backward pass
    assert there["parameter"] == "weights" and there["shape"] == "f32[4,32,64]"
    assert f"resharded.py:{line} " in there["line"] and "resharded.py:" in back["line"]
    # XLA writes a sharding in one of two notations.
    assert there["given"] == back["wanted"] and there["wanted"] and back["given"]
    ended = plan(config, *options, "--no-advice")
    assert ended.returncode == 0, ended.stderr
    output = " ".join(ended.stdout.split())
    assert (
        f"weights resharded.py:{line} (build" in output
        and "is replicated on every device" in output
    )
    assert "Involuntary" not in ended.stdout + ended.stderr


RESHARDED = """    def loss(model, batch):
        from jax.sharding import NamedSharding, PartitionSpec as P
        from spmdtrain.sharding.placement import current_strategy
        mesh = current_strategy().mesh
        def lay(x, *spec):
            return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))
        weights = lay(jnp.sin(model["weights"]), ("fsdp", "data"), None)
        weights = lay(weights.reshape(-1, 32, 64), None, "fsdp", "data")  # HERE
        model = {"weights": weights.reshape(config.width, config.width)}
"""


def test_the_partitioners_warnings_are_read_in_both_spellings(
    capfd: pytest.CaptureFixture[str],
) -> None:
    output = "%reshape.0 = f32[8,32,64]{2,1,0} reshape(%x), sharding={devices=[8,1,1]<=[8]}"
    line = (
        "W1122 18:31:03 spmd_partitioner.cc:656] [SPMD] Involuntary full rematerialization. The "
        "compiler {} go from sharding {{devices=[8,1,1]<=[2,4]T(1,0)}} to {{devices=[1,4,2]<=[8]}} "
        "{} for HLO operation{} {}. As the last resort"
    )
    log = CompilerLog(
        [
            line.format("cannot", "efficiently", "", output),
            line.format("was not able to", "without doing a full rematerialization", ":", output),
            "something else",
        ]
    )
    (one,) = log.resharded  # the same twice
    assert (one.given, one.wanted) == ("{devices=[8,1,1]<=[2,4]T(1,0)}", "{devices=[1,4,2]<=[8]}")
    assert one.operation.startswith(output)
    with pytest.raises(KeyError), kept_log() as log:
        os.write(2, b"from C\n")
        raise KeyError
    assert log.lines == ["from C"] and "from C" in capfd.readouterr().err


# -- options and measuring -------------------------------------------------------------------------


def test_an_option_of_several_values_may_be_given_several_times() -> None:
    given = ["--compiler-options", "a=1", "--steps", "5", "--compiler-options=b=2", "c=3"]
    where = ["--config", str(DIGITS), "--topology", "cpu:8"]
    config = command_line.parse_command_line(
        [*where, *given, "--freeze", "x", "--freeze", "y"], Options
    ).config
    assert config.compiler_options == ("a=1", "b=2", "c=3")
    assert (config.freeze, config.steps) == (("x", "y"), 5)
    given = ["--hidden", "3", "4", "--trackers", "wandb", "--hidden=5", "--trackers", "trackio"]
    config = command_line.parse_command_line([*where, *given], Options).config
    found = dataclasses.asdict(config)
    assert (found["trackers"], found["hidden"]) == (("wandb", "trackio"), (3, 4, 5))


@pytest.mark.nightly
def test_measuring_needs_the_devices_of_the_topology() -> None:
    ended = plan(DIGITS, "--topology", "gpu:h100:1x8", "--measure")
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert "--measure gpu:h100:1x8 needs 8 gpu devices, but this machine has" in line


@needs_libtpu
@pytest.mark.nightly
@pytest.mark.slow
def test_gathers_that_a_tpu_makes_sums_of_are_found(text: Path) -> None:
    options = ("--preset", "tiny", "--width", 512, "--batch-size-per-device", 1)
    where = ("--topology", "v5p:4x4x4", "--strategy", "fully_sharded")
    ended = plan(GPT, *options, "--data-dir", text, *where, "--json")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    (one,) = found["advice"]
    summed = [x for x in found["collectives"] if x["kind"] == "all-reduce"]
    gathers = [x for x in summed if any(array["is_parameter"] for array in x["carries"])]
    exposed = sum(x["bytes"] * x["times"] for x in gathers if not x["overlapped"])
    assert exposed > 1e6  # the preset of v5p lets the SparseCore overlap some of them
    found_as = f"parameters are gathered as all-reduces, {exposed / 1e6:.1f} MB with nothing else"
    assert one["finding"].startswith(found_as)
    tried = " ".join([one["options"], *one["tried"]])
    assert "xla_tpu_prefer_async_allgather_to_allreduce=true" in tried
    assert one["without"]["estimate"] == found["time"]["estimate"]


@pytest.mark.nightly
def test_tokens_and_what_is_computed_twice(text: Path) -> None:
    options = ("--preset", "tiny", "--data-dir", text, "--topology", "gpu:h100:1x8")
    none, full = (planned(GPT, *options, "--remat", remat) for remat in ("none", "full"))
    context = 32
    time = none["time"]
    assert time["tokens_per_second"] == pytest.approx(time["examples_per_second"] * context)
    assert none["flops"]["again"] == 0 < full["flops"]["again"]
    assert full["flops"]["step"] - full["flops"]["again"] == none["flops"]["step"]
    time = full["time"]
    once = none["flops"]["step"] / full["flops"]["step"]
    # The products are of float32, at half of the peak on bfloat16, which useful FLOPs count.
    assert time["useful"] == pytest.approx(time["compute"] * once / 2, rel=0.02)
    assert time["utilization"] == pytest.approx(time["useful"] / time["estimate"])


@pytest.mark.nightly
def test_what_is_made_on_several_devices_alike_counts_on_each(text: Path) -> None:
    """The rules split the kernels of an MLP, but not the last, whose 10 columns do not divide."""
    options = ("--preset", "tiny", "--data-dir", text, "--topology", "gpu:h100:1x8")
    split = planned(GPT, *options)
    assert split["flops"]["device"] == pytest.approx(split["flops"]["chip"], rel=0.02)
    assert not any("its share" in note for note in split["notes"])
    alike = planned(DIGITS, "--topology", "gpu:h100:1x8", "--mesh.data", 2, "--mesh.tensor", 4)
    last = 6 * 64 * 128 * 10 / 8
    made = alike["flops"]["device"]
    assert made == alike["flops"]["chip"] + 3 * last
    (note,) = (note for note in alike["notes"] if "its share" in note)
    assert note.startswith("each device computes 1.17 times its share of the products")
    assert made / alike["time"]["compute"] == pytest.approx(494.5e12, rel=0.01)  # of float32
    share = alike["flops"]["chip"] / made
    assert alike["time"]["useful"] == pytest.approx(alike["time"]["compute"] * share / 2)


# -- traffic, compared with what a strategy must send ----------------------------------------------


def test_sums_and_exchanges_over_the_axis_context_are_necessary() -> None:
    """On a mesh of data=2 and context=4, with one all-reduce over each axis."""
    whole = MemoryUse(device=4096, whole=4096)
    row = Row("w", "(1024,)", "float32", "()", whole, MemoryUse(), MemoryUse(), elements=1024)
    gradient, keys = Carried(("w",), False, 4096, 1024), Carried((), False, 500, 125)
    collectives = [
        Collective("all-reduce", ("context",), 4, 4096, 1, carries=(gradient,)),
        Collective("all-reduce", ("data",), 2, 4096, 1, carries=(gradient,)),
        Collective("collective-permute", ("context",), 4, 500, 1, times=3, carries=(keys,)),
    ]
    least = least_sent(row, 2, context=4, compute_width=4, width=4)
    found = traffic_of(collectives, [row], {"w": least})
    needed = 2 * 7 / 8 * 4096 + 3 * 500
    assert found.least == pytest.approx(needed)
    assert found.bytes == pytest.approx(2 * (3 / 4 + 1 / 2) * 4096 + 3 * 500)
    assert found.excess == pytest.approx(found.bytes - needed)

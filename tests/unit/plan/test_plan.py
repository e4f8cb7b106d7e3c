"""`python -m spmdtrain.plan`, as it ships: what it says is what the trainer's own step then is."""

import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from helpers import BOUND, DIGITS, GAN, GPT, environment, text_in
from plan_helpers import needs_libtpu, plan, planned

from spmdtrain import Trainer
from spmdtrain.config.experiment import load_experiment
from spmdtrain.errors import UserError
from spmdtrain.plan import time_model, topologies
from spmdtrain.plan.command import EndedError, main, run_child
from spmdtrain.plan.summary import sealed
from spmdtrain.sharding.mesh import resolve
from spmdtrain.xla.collectives import Origins, collectives_of
from spmdtrain.xla.hlo import Module

PARAMETERS = 64 * 128 + 128 + 128 * 128 + 128 + 128 * 10 + 10  # of digits_mlp


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_in(tmp_path_factory.mktemp("text"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    ["fully_sharded", *(pytest.param(x, marks=pytest.mark.nightly) for x in ("mirrored", "zero"))],
)
def test_on_cpu_it_is_what_the_compiled_step_and_the_live_arrays_say(strategy: str) -> None:
    found = planned(DIGITS, "--strategy", strategy)

    file = load_experiment(str(DIGITS), frozenset())
    config = resolve(file.config_class(strategy=strategy, compilation_cache="off"), batch_shards=8)
    experiment = file.build(config)
    trainer = Trainer.from_experiment(experiment, config)
    batch = experiment.train.rows(np.arange(64))
    compiled: Any = trainer.compile_step(batch).memory_analysis()
    memory = found["memory"]
    state = [memory[name] for name in ("params", "optimizer", "average", "other")]
    assert sum(state) + memory["inputs"] == compiled.argument_size_in_bytes
    assert memory["temporaries"] == compiled.temp_size_in_bytes
    assert memory["results"] == compiled.output_size_in_bytes - compiled.alias_size_in_bytes

    live = trainer.functions.init(0)

    def held(tree: Any) -> int:
        return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))

    assert memory["params"] == held(live.params)
    assert memory["optimizer"] == held(live.opt_state)
    assert found["fits"] is None and found["time"] is None  # the speed of this CPU is unknown


@pytest.mark.slow
def test_a_mirrored_step_sends_each_gradient_once() -> None:
    found = planned(DIGITS)
    sent = sum(one["bytes"] * one["times"] for one in found["collectives"])
    assert {one["kind"] for one in found["collectives"]} == {"all-reduce"}
    assert 4 * PARAMETERS <= sent < 4 * PARAMETERS + 64  # and two metrics
    over = [one["sent"]["memory"] for one in found["collectives"]]
    assert sum(over) == pytest.approx(2 * 7 / 8 * sent)  # the reduction, and its result
    assert {row["spec"].partition(" ")[0] for row in found["state"]} == {"replicated"}
    assert {tuple(one["axes"]) for one in found["collectives"]} == {("data",)}
    assert found["flops"]["step"] == 6 * 64 * (64 * 128 + 128 * 128 + 128 * 10) - 2 * 64 * 64 * 128


@pytest.mark.nightly
@pytest.mark.slow
def test_loops_count_as_often_as_they_turn(text: Path) -> None:
    options = ("--preset", "tiny", "--layers", 5, "--data-dir", text)
    sharded = ("--strategy", "fully_sharded", "--sharding.min_size", 1)
    looped, unrolled = (
        planned(GPT, *options, *sharded, "--unroll", unroll) for unroll in (False, True)
    )

    def sent(found: dict[str, Any]) -> float:
        kinds = ("all-gather",)
        return sum(x["bytes"] * x["times"] for x in found["collectives"] if x["kind"] in kinds)

    assert {one["times"] for one in unrolled["collectives"]} == {1}
    assert 5 in {one["times"] for one in looped["collectives"]}
    assert math.isclose(sent(looped), sent(unrolled), rel_tol=0.25)
    assert math.isclose(looped["flops"]["step"], unrolled["flops"]["step"], rel_tol=0.01)
    lines = {one["line"].partition(" (")[0].rpartition("/")[2] for one in looped["collectives"]}
    assert any(line.startswith("transformer.py:") for line in lines)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_compiler_option_passes_through_and_a_summary_is_kept_for_each(tmp_path: Path) -> None:
    cpu = ("--topology", "cpu:8", "--no-advice")
    options = (*cpu, "--dropout", 0, "--collectives.reduction", "all_reduce")
    apart = ("--compiler-options", "xla_disable_hlo_passes=cpu-all-reduce-combiner")
    env = environment() | {"XDG_CACHE_HOME": str(tmp_path)}

    def reduces(*more: str) -> int:
        ended = subprocess.run(
            [
                *(sys.executable, "-m", "spmdtrain.plan", "--config", str(DIGITS), "--json"),
                *map(str, options),
                *more,
            ],
            env=env,
            capture_output=True,
            text=True,
            timeout=BOUND,
        )
        assert ended.returncode == 0, ended.stderr
        found = json.loads(ended.stdout)
        return len(found["collectives"])

    kept = tmp_path / "spmdtrain" / "plans"
    together = reduces()
    assert len(list(kept.iterdir())) == 1
    assert reduces(*apart) > together
    first, _ = sorted(kept.iterdir(), key=lambda path: path.stat().st_mtime)
    # The cached summary gives the same report.
    whole = first.read_bytes()
    summary = json.loads(whole.partition(b"\n")[2])
    changed = json.dumps(summary | {"collectives": summary["collectives"] * 3}).encode()
    first.write_bytes(sealed(first.stem, changed))
    assert reduces() == 3 * together
    # Without its digest it is corrupted, and computed again.
    first.write_bytes(whole.partition(b"\n")[0] + b"\n" + changed)
    assert reduces() == together and first.read_bytes() == whole
    assert len(list(kept.iterdir())) == 2
    first.write_text("{")  # truncated: computed again
    assert reduces() == together
    ended = plan(DIGITS, *options, "--compiler-options", "xla_no_such=1")
    assert ended.returncode == 2 and "No such compile option: 'xla_no_such'" in ended.stderr


@pytest.mark.nightly
def test_what_is_too_big_is_refused_without_compiling(text: Path) -> None:
    options = ("--width", 16384, "--layers", 24, "--data-dir", text)
    began = time.monotonic()
    ended = plan(GPT, *options, "--topology", "gpu:a100:1x8", "--strategy", "mirrored")
    assert time.monotonic() - began < 60
    assert ended.returncode == 1, ended.stderr
    assert "does not fit: " in ended.stdout and "GB of 80.0 GB" in ended.stdout
    assert "optimizer state" in ended.stdout
    found = planned(GPT, *options, "--topology", "gpu:a100:1x8", "--strategy", "mirrored")
    memory = found["memory"]
    assert found["fits"] is False and memory["temporaries"] is None
    assert memory["optimizer"] == 2 * memory["params"] + 8  # two moments, two counts


@pytest.mark.nightly
@pytest.mark.slow
def test_several_topologies_end_in_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    # What describes a job is not for the plan.
    monkeypatch.setitem(os.environ, "TF_CONFIG", '{"cluster": {"worker": ["a:1", "b:1"]}}')
    monkeypatch.setitem(os.environ, "XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    ended = plan(DIGITS, "--topology", "gpu:h100:1x8,gpu:h100:2x8")
    assert ended.returncode == 0, ended.stderr
    *_, last = ended.stdout.split("\n\n") if "\n\n" in ended.stdout else [ended.stdout]
    rows = [line for line in last.splitlines() if line.startswith("│ gpu:h100")]
    assert [row.split()[3] for row in rows] == ["8", "16"]


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ("v5x:4x4", "Did you mean 'v5p'?|Did you mean 'v5e'?"),
        ("v5e:4", "2 dims, such as v5e:4x4"),
        ("v5e:4y4", "'4y4' is not a shape"),
        ("v5p:0x4x4", "is not a shape"),
        ("v5e:4x4@x", "number of slices"),
        ("gpu:h100:8", "HOSTSxGPUS"),
        ("gpu:b7:1x8", "There are: h100, h200, a100"),
        ("v5e:4x4@", "number of slices"),
        ("cpu:8,", "unknown chip ''"),
        ("cpu:99999999", "up to 4,096"),
        ("cpu:none", "cpu needs a number"),
    ],
)
def test_a_topology_that_is_none(
    topology: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert main(["--config", str(DIGITS), "--topology", topology]) == 2
    assert signal.getsignal(signal.SIGTERM) is before
    (line,) = capsys.readouterr().err.splitlines()
    assert any(words in line for words in message.split("|"))


@pytest.mark.slow
def test_an_error_in_the_experiment_is_reported_as_by_the_run_command(text: Path) -> None:
    ended = plan(DIGITS, "--topology", "cpu:8", "--mesh.data", 3)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert "data=3" in line and "8 devices" in line


def test_an_experiment_with_its_own_loop_cannot_be_planned(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--config", str(GAN), "--topology", "cpu:8"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "train(config, loop); plan experiments that define build(config)" in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "note"),
    [
        (("--data-on-device",), None),
        (("--steps-per-dispatch", 10), "holds 9 more batches"),
        (("--strategy", "one_device"), "uses 1 of the 8 chips"),
        (("--strategy", "central_storage"), "copied to the device and back in each step"),
    ],
)
def test_options_of_the_run(options: tuple[object, ...], note: str | None) -> None:
    found = planned(DIGITS, *options, "--topology", "gpu:h100:1x8", "--dropout", 0)
    assert any("the GPU's compiler is not installed" in one for one in found["notes"])
    if note is not None:
        assert any(note in one for one in found["notes"])
    time = found["time"]
    assert 0 < time["bound"] <= time["estimate"]
    assert found["fits"] is True


@pytest.mark.slow
def test_a_reduction_of_one_s_own_is_not_tried_on_devices_that_are_not_there(
    tmp_path: Path,
) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "import dataclasses, jax\n"
        f"import sys; sys.path.insert(0, {str(DIGITS.parent)!r})\n"
        "from digits_mlp import Config, build as digits\n"
        "def mean(gradients, axes):\n"
        "    return jax.tree.map(lambda g: jax.lax.pmean(g, axes), gradients)\n"
        "def build(config):\n"
        "    return dataclasses.replace(digits(config), reduction=mean)\n"
    )
    found = planned(own, "--topology", "gpu:h100:1x8", "--dropout", 0)
    assert any("own reduction" in note for note in found["notes"])
    assert {one["kind"] for one in found["collectives"]} == {"all-reduce"}


# -- for chips that are not there ------------------------------------------------------------------


@pytest.mark.slow
@needs_libtpu
def test_on_a_tpu() -> None:
    ended = plan(DIGITS, "--topology", "v5e:4x4", "--strategy", "mirrored", "--json")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert (found["chips"], found["fits"]) == (16, True)
    memory = found["memory"]
    assert memory["params"] == 4 * PARAMETERS and memory["code"] > 0
    sent = sum(one["bytes"] * one["times"] for one in found["collectives"])
    assert 4 * PARAMETERS <= sent < 4 * PARAMETERS + 64
    time = found["time"]
    assert 0 < time["bound"] <= time["estimate"]


@needs_libtpu
@pytest.mark.nightly
def test_what_the_compiler_refuses_has_its_figure(text: Path) -> None:
    options = ("--width", 4096, "--heads", 32, "--layers", 5, "--length", 2048, "--unroll", False)
    where = ("--topology", "v5e:1x1", "--global-batch-size", 16, "--data-dir", text)
    ended = plan(GPT, *options, *where)
    assert ended.returncode == 1, ended.stderr
    assert re.search(r"does not fit: \d\d+\.?\d* GB of 16.9 GB\n", ended.stdout)
    assert "note: the compiler: RESOURCE_EXHAUSTED" in ended.stdout
    assert "unknown" not in ended.stdout


@needs_libtpu
@pytest.mark.nightly
def test_over_two_slices_of_tpus_the_network_between_them_is_one_axis() -> None:
    options = ("--topology", "v5e:2x4@2", "--mesh.data", 8, "--mesh.tensor", 2, "--json")
    ended = plan(DIGITS, *options, "--strategy", "tensor_parallel")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["devices"] == 16
    between = [x for x in found["collectives"] if x["link"] == "the network between slices"]
    assert {tuple(one["axes"]) for one in between} == {("data",)}
    carried = [array for one in between for array in one["carries"]]
    assert not any(array["is_parameter"] for array in carried)
    gradients = {name for array in carried for name in array["parameters"]}
    assert gradients == {f"layers/{n}/{part}" for n in range(3) for part in ("bias", "kernel")}
    # Of what a chip has of the parameters, a quarter by each of the four that share it in a slice;
    # XLA rounds up, at most to twice as much.
    bias, last = 2 * 128 + 10, 128 * 10
    own = (PARAMETERS - bias - last) // 2 + bias + last
    sent = sum(one["bytes"] for one in between)
    assert 4 * own / 4 <= sent <= 2 * 4 * own / 4
    assert ("tensor",) in {tuple(x["axes"]) for x in found["collectives"] if x["link"] == "links"}


def test_without_libtpu_it_says_which_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"spmdtrain\[tpu\]"):
        topologies.devices_of(topologies.parse("v5e:4x4"))


def test_a_compiler_that_jax_was_not_made_with_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topologies, "version_of", lambda package: "0.0.11")
    monkeypatch.setattr(topologies, "installed_cuda", lambda: "cuda12")
    tpu, gpu = (topologies.other_compiler(topologies.parse(x)) for x in ("v5e:4x4", "gpu:h100:1x8"))
    assert tpu.startswith(f"libtpu 0.0.11 is installed, but jax {jax.__version__} requires libtpu")
    assert "pip install 'spmdtrain[tpu]'" in tpu and "pip install 'spmdtrain[cuda12]'" in gpu
    monkeypatch.undo()
    assert topologies.other_compiler(topologies.parse("v5e:4x4")) == ""
    assert topologies.other_compiler(topologies.parse("cpu:8")) == ""


def test_a_plan_for_gpus_does_not_start_the_gpus_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Experiments build their arrays on CPU: with the platform "" JAX would ask for a GPU."""
    monkeypatch.setattr(topologies, "installed_cuda", lambda: "cuda13")
    found = topologies.compiler_environment(topologies.parse("gpu:h100:1x8"))
    assert found["JAX_PLATFORMS"] == "cpu" and found["CUDA_VISIBLE_DEVICES"] == "-1"


@pytest.mark.slow
@needs_libtpu
def test_jax_does_not_look_for_tpus_where_there_are_none() -> None:
    env = environment()
    del env["JAX_PLATFORMS"]
    program = (
        "import spmdtrain; spmdtrain.initialize(); import jax; print(jax.devices()[0].platform)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=BOUND
    )
    assert ended.stderr == "" and ended.stdout.strip() in ("cpu", "gpu", "tpu")


# -- the model of links ----------------------------------------------------------------------------


def torus(*shape: int) -> list[Any]:
    return [
        SimpleNamespace(id=n, coords=list(np.unravel_index(n, shape)), process_index=n // 4)
        for n in range(math.prod(shape))
    ]


def link_between(
    kind: str, devices: Sequence[Any], topology: topologies.Topology
) -> time_model.Link:
    assert topology.chip is not None
    return time_model.link_between(kind, devices, topology, topology.chip)


@pytest.mark.parametrize(
    ("name", "chosen", "bandwidth", "hops", "shares"),
    [
        ("v5e:4x4", slice(None), 100, 6, {"x": 1 / 2, "y": 1 / 2}),  # two dims that do not close
        ("v5e:16x16", slice(None), 200, 16, {"x": 1 / 2, "y": 1 / 2}),  # two rings
        ("v5e:16x16", slice(0, 16), 100, 8, {"y": 1}),  # one ring
        ("v5e:16x4", slice(None), 150, 11, {"x": 2 / 3, "y": 1 / 3}),  # a ring and a line
        ("v5e:4x4", slice(0, 2), 50, 1, {"y": 1}),  # a line
        ("v5p:4x4x4", slice(None), 600, 6, dict.fromkeys("xyz", 1 / 3)),
        ("v5p:2x2x2", slice(None), 300, 3, dict.fromkeys("xyz", 1 / 3)),
    ],
)
def test_links_of_a_torus(
    name: str, chosen: slice, bandwidth: float, hops: int, shares: dict[str, float]
) -> None:
    topology = topologies.parse(name)
    link = link_between("all-reduce", torus(*topology.shape)[chosen], topology)
    assert (link.bandwidth / 1e9, link.hops) == (bandwidth, hops)
    assert link.shares == pytest.approx(shares)


@pytest.mark.parametrize(
    ("name", "chosen", "bandwidth"),
    [
        ("v5e:16x16", slice(0, 16), 25),  # eight links' worth over the ring's 16 chips
        ("v5e:16x16", slice(None), 25),  # in each dim; both are used at once
        ("v5e:4x4", slice(0, 4), 50),  # a line: half of it all crosses one link, each way
        ("v5e:4x4", slice(0, 2), 50),  # not more than the link
    ],
)
def test_all_to_all_crosses_the_middle(name: str, chosen: slice, bandwidth: float) -> None:
    """The time of n arrays of B / n bytes over a ring of links w is n B / 8 w (bisection)."""
    topology = topologies.parse(name)
    link = link_between("all-to-all", torus(*topology.shape)[chosen], topology)
    assert link.bandwidth / 1e9 == bandwidth


def test_gpus_of_a_host_and_of_two() -> None:
    topology = topologies.parse("gpu:h100:2x8")
    devices = [SimpleNamespace(id=n) for n in range(16)]
    assert link_between("all-reduce", devices[:8], topology).name == "NVLink"
    assert link_between("all-reduce", devices, topology).name == "the network between hosts"


def test_seconds_of_collectives() -> None:
    link = time_model.Link(bandwidth=1e9, hops=4, name="links")
    assert time_model.seconds("all-gather", 8e9, 8, link) == pytest.approx(7)
    assert time_model.seconds("reduce-scatter", 8e9, 8, link) == pytest.approx(7)
    assert time_model.seconds("all-reduce", 8e9, 8, link) == pytest.approx(14)
    assert time_model.seconds("collective-permute", 8e9, 8, link) == pytest.approx(8)
    assert time_model.seconds("all-reduce", 8, 8, link) == pytest.approx(8e-6)
    assert time_model.seconds("all-gather", 8, 8, link) == pytest.approx(4e-6)
    assert time_model.seconds("all-reduce", 8e9, 1, link) == 0
    times = time_model.Times(
        useful=0.0, compute=3, memory=5, waiting=2, overlapped=4, least_memory=1, least_links=3.5
    )
    assert (times.bound, times.estimate, times.bottleneck) == (3.5, 7, "collectives")


# -- loops of a TPU's program, which does not say how often they turn ------------------------------

TPU_LOOP = """HloModule jit_step

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[]{:T(128)}, f32[8]{0:T(128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %one = s32[]{:T(128)} constant(STEP)
  %same = s32[]{:T(128)S(6)} copy(%i)
  %next = s32[]{:T(128)} add(%same, %one)
  %x = f32[8]{0:T(128)} get-tuple-element(%p), index=1
  %sum = f32[8]{0:T(128)} all-reduce(%x), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %t = (s32[]{:T(128)}, f32[8]{0:T(128)}) tuple(%next, %sum)
}

%condition (q: (s32[], f32[8])) -> pred[] {
  %q = (s32[]{:T(128)}, f32[8]{0:T(128)}) parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%q), index=0
  %limit = s32[]{:T(128)} constant(LIMIT)
  ROOT %less = pred[]{:T(512)} compare(%j, %limit), direction=LT
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0:T(128)} parameter(0)
  %start = s32[]{:T(128)} constant(START)
  %state = (s32[]{:T(128)}, f32[8]{0:T(128)}) tuple(%start, %a)
  %loop = (s32[]{:T(128)}, f32[8]{0:T(128)}) while(%state), condition=%condition, body=%body
  ROOT %out = f32[8]{0:T(128)} get-tuple-element(%loop), index=1
}
"""


@pytest.mark.parametrize(
    ("start", "step", "limit", "times"),
    [(0, 1, 12, 12), (2, 1, 12, 10), (0, 1, 1, 1), (0, 2, 8, 4), (0, 3, 8, 3), (5, 1, 5, 0)],
)
def test_a_loop_counts_from_its_start_to_its_limit(
    start: int, step: int, limit: int, times: int
) -> None:
    text = TPU_LOOP.replace("START", str(start)).replace("LIMIT", str(limit))
    module = Module(text.replace("STEP", str(step)))
    found = {one.opcode: n for one, _, n in module.instructions()}
    assert found["all-reduce"] == times and found["while"] == 1 and found["compare"] == times + 1
    assert module.unknown_loops == []


def test_a_loop_of_unknown_trip_count_is_reported() -> None:
    text = TPU_LOOP.replace("START", "0").replace("LIMIT", "8").replace("STEP", "1")
    module = Module(text.replace("direction=LT", "direction=NE"))
    assert [one.name for one in module.unknown_loops] == ["loop"]
    assert {one.opcode: n for one, _, n in module.instructions()}["all-reduce"] == 1


def test_unknown_chips_are_refused_in_words() -> None:
    with pytest.raises(UserError, match="TPU:SHAPE"):
        topologies.parse("abacus")


# -- a TPU's SparseCore, which moves beside the program --------------------------------------------

SPARSE = """HloModule jit_step, input_output_alias={ {0}: (0, {}, may-alias) }

%called (x: f32[8]) -> f32[8] {
  %x = f32[8]{0:T(128)} parameter(0)
  ROOT %sum = f32[8]{0:T(128)} all-reduce(%x), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
}, execution_thread="sparsecore"

ENTRY %main (w: f32[8]) -> (f32[8]) {
  %w = f32[8]{0:T(128)} parameter(0), metadata={op_name="state.params[\\'dense\\'][\\'kernel\\']"}
  %grad = f32[8]{0:T(128)} multiply(%w, %w)
  %ready = s32[]{:S(2)} custom-call(), custom_call_target="PrepareAsyncCallStart"
  %start = ((f32[8]{0}, token[]), f32[8]{0}, s32[]) call-start(%grad, %ready), to_apply=%called
  %done = f32[8]{0:T(128)} call-done(%start)
  %new = f32[8]{0:T(128)} subtract(%w, %done)
  ROOT %out = (f32[8]{0:T(128)}) tuple(%new)
}
"""


def test_what_the_sparse_core_moves_is_beside_other_work() -> None:
    module = Module(SPARSE)
    mesh = jax.make_mesh((8,), ("data",))
    names = {"state.params['dense']['kernel']": "dense/kernel"}
    (one,) = collectives_of(module, mesh, Origins(module, names, 8))
    assert (one.kind, one.overlapped, one.times, one.bytes) == ("all-reduce", True, 1, 32)
    (carried,) = one.carries
    assert (carried.parameters, carried.is_parameter) == (("dense/kernel",), False)


# -- subprocesses that send messages: a result counts, whatever happens after it -------------------

SENDS = """
import time
from spmdtrain.plan import command
command.send("progress", 1)
command.send("result", 2)
command.end_messages()
"""


@pytest.mark.slow
def test_a_process_that_does_not_end_after_its_result_is_killed() -> None:
    began, heard = time.monotonic(), list[tuple[str, int]]()
    result = run_child(
        ["-c", SENDS + "time.sleep(100)"], {}, lambda *said: heard.append(said), seconds_to_end=0.5
    )
    assert tuple(result) == ("result", 2) and heard == [("progress", 1), ("result", 2)]
    assert time.monotonic() - began < 50


@pytest.mark.slow
def test_one_that_fails_after_its_result_has_failed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EndedError, match="ended with code 3, see above"):
        run_child(["-c", SENDS + "print('why'); exit(3)"], {}, lambda *said: None)
    assert capsys.readouterr().err == "why\n"

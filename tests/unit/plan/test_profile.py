"""Traces in the forms of TPUs, GPUs and virtual devices, compared with plans; measured rates."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jax.profiler import ProfileData
from plan_helpers import small_plan

from spmdtrain.errors import UserError
from spmdtrain.plan import planner, topologies
from spmdtrain.plan.instruction_work import PlannedKernel, Work, WorkKind
from spmdtrain.plan.profile import (
    Comparison,
    TimeClass,
    calibrate,
    compare,
    newest_trace,
    rates_file,
    with_rates,
    write_rates,
)
from spmdtrain.plan.time_model import (
    Overlap,
    PlannedCollective,
    Times,
    instruction_seconds,
    link_between,
    wire_bytes,
)
from spmdtrain.xla.chips import CHIPS, Chip

US = 1e-6
STEP = "jit_train_step"


# -- Traces, written as the profiler writes them ---------------------------------------------------


Event = tuple[str, float, float, dict[str, Any]]
"""Name, start and duration in us, and what else it states."""
Planes = Mapping[str, Mapping[str, Sequence[Event]]]
"""Events by plane and line."""


def text_of(planes: Planes) -> str:
    """Planes of lines of events, as text of the format of traces."""
    text = ""
    for number, (plane, lines) in enumerate(planes.items()):
        names, stats, body = dict[str, int](), dict[str, int](), ""
        for line, events in lines.items():
            body += f"lines {{ id: {len(body)} name: {json.dumps(line)} timestamp_ns: 1000\n"
            for name, start, duration, stated in events:
                key = names.setdefault(name, len(names) + 1)
                body += f"events {{ metadata_id: {key} offset_ps: {round(start * 1e6)} "
                body += f"duration_ps: {round(duration * 1e6)} "
                for stat, value in stated.items():
                    kind = "int64_value" if isinstance(value, int) else "str_value"
                    place = stats.setdefault(stat, len(stats) + 1)
                    body += f"stats {{ metadata_id: {place} {kind}: {json.dumps(value)} }} "
                body += "}\n"
            body += "}\n"
        for kind, known in (("event", names), ("stat", stats)):
            for name, key in known.items():
                body += f"{kind}_metadata {{ key: {key} value {{ id: {key} name: "
                body += f"{json.dumps(name)} }} }}\n"
        text += f"planes {{ id: {number} name: {json.dumps(plane)}\n{body}}}\n"
    return text


def written(folder: Path, planes: Planes) -> Sequence[Path]:
    """The files of a run's newest trace."""
    trace = folder / "plugins" / "profile" / "2026_12_01_00_00_00"
    trace.mkdir(parents=True)
    content = ProfileData.text_proto_to_serialized_xspace(text_of(planes))
    (trace / "host.xplane.pb").write_bytes(content)
    return newest_trace(str(folder))


Run = tuple[str, float, float]
"""An instruction, its start in a step and its duration, in us."""


def repeated(runs: Sequence[Run], steps: int, every: float) -> list[Run]:
    return [(n, step * every + at, long) for step in range(steps) for n, at, long in runs]


def on_gpu(runs: Sequence[Run], program: str = STEP) -> list[Event]:
    return [(f"kernel_{n}", at, long, {"hlo_op": n, "hlo_module": program}) for n, at, long in runs]


def work(name: str, kind: WorkKind, **more: Any) -> Work:
    fields: dict[str, Any] = {"cycles": 0.0, "bytes": 0.0, "kind": kind, "name": name}
    return Work(**(fields | more))


def exposed(name: str, seconds: float, size: int, group: int, times: float = 1) -> Any:
    return PlannedCollective(
        kind="all-reduce",
        axes=("data",),
        group_size=group,
        bytes=size,
        times=times,
        overlapped=False,
        link="NVLink",
        seconds=seconds,
        op_name="",
        line="",
        name=name,
    )


def seconds(found: Comparison) -> dict[TimeClass, Any]:
    """The predicted and the measured seconds of each class."""
    return {each.name: (each.predicted, each.measured) for each in found.classes}


# -- GPUs ------------------------------------------------------------------------------------------

MB = 10**6
TRUE = dataclasses.replace(
    CHIPS["h100"], flops=600e12, float32_flops=200e12, bandwidth=2.5e12, link=300e9
)
GPU_WORK = [
    work("gemm.1", WorkKind.PRODUCTS, flops=6e11, bytes=50 * MB, dtype="bf16", line="m.py:1 (f)"),
    work("gemm.2", WorkKind.PRODUCTS, flops=3e11, bytes=10 * MB, dtype="bf16"),
    work("gemm.3", WorkKind.PRODUCTS, flops=4e10, bytes=10 * MB, dtype="f32"),
    work("loop_fusion.1", WorkKind.VECTOR, bytes=1000 * MB, line="m.py:2 (g)"),
    work("loop_fusion.2", WorkKind.VECTOR, bytes=250 * MB),
    work("attention.1", WorkKind.KERNELS, line="m.py:3 (h)"),
    work("all-reduce-start.1", WorkKind.COLLECTIVES, in_order=False, end="all-reduce-done.1"),
    work("while.1", WorkKind.CONTROL, in_order=False),
]
SENT = wire_bytes("all-reduce", 100 * MB, 2)


def gpu_plan(chip: Chip = CHIPS["h100"]) -> planner.Plan:
    parts = {w.name: instruction_seconds(w, chip, Overlap.COLLECTIVES) for w in GPU_WORK}
    reduced = SENT / chip.link
    return small_plan(
        "gpu:h100:1x2",
        chip=chip,
        program=STEP,
        work=GPU_WORK,
        collectives=[exposed("all-reduce-start.1", reduced, 100 * MB, 2)],
        kernels=[
            PlannedKernel("attention", "", 1, 0.0, "", 0, "", 100 * US, instruction="attention.1")
        ],
        times=Times(
            *(sum(parts.values()), 1e-4, 0.0, reduced, 0.0, 0.0, 0.0),
            overlap=Overlap.COLLECTIVES,
            kernels=100 * US,
            host=chip.gap,
        ),
    )


def gpu_runs(late: float = 0.0) -> tuple[list[Run], float]:
    """The compute of a step at the true rates, and its end; the collective begins `late`."""
    runs, at = [], late
    for each in GPU_WORK[:5]:
        long = instruction_seconds(each, TRUE, Overlap.COLLECTIVES) / US
        runs.append((each.name, at, long))
        at += long
    runs.append(("attention.1", at, 150.0))
    return runs, at + 150.0


def gpu_trace(steps: int = 6, gap: float = 40.0) -> Planes:
    """Two GPUs; the second begins its collective 30 us after the first."""
    planes: dict[str, Mapping[str, Sequence[Event]]] = {}
    sent = SENT / TRUE.link / US
    for number, late in enumerate((0.0, 30.0)):
        runs, end = gpu_runs()
        whole = end + 30.0 + sent + gap
        reduces = [("all-reduce-start.1", end + late, 30.0 - late + sent)]
        planes[f"/device:GPU:{number}"] = {
            "Stream #13(Compute)": on_gpu(repeated(runs, steps, whole)),
            "Stream #20(NCCL)": on_gpu(repeated(reduces, steps, whole)),
            "Steps": [("7", 0.0, whole * steps, {})],
        }
    planes["/host:CPU"] = {"python": [("train", 0.0, 1.0, {"step_num": 3})]}
    return planes


def test_a_trace_of_gpus_has_each_class_of_the_time(tmp_path: Path) -> None:
    found = compare(gpu_plan(), written(tmp_path, gpu_trace()), 1)
    assert (found.steps, found.devices, found.others) == (5, 2, {})
    classes = seconds(found)
    true = {w.name: instruction_seconds(w, TRUE, Overlap.COLLECTIVES) for w in GPU_WORK}
    products = sum(true[w.name] for w in GPU_WORK if w.kind is WorkKind.PRODUCTS)
    assert classes[TimeClass.PRODUCTS][1] == pytest.approx(products, rel=1e-3)
    assert classes[TimeClass.VECTOR] == pytest.approx((1250 * MB / 3.35e12, 500 * US), rel=1e-3)
    assert classes[TimeClass.KERNELS] == pytest.approx((100 * US, 150 * US), rel=1e-3)
    reduced = pytest.approx((SENT / 450e9, SENT / 300e9), rel=1e-3)
    assert classes[TimeClass.COLLECTIVES] == reduced
    # One of the two waits for the other for 30 us.
    assert classes[TimeClass.WAITING] == (None, pytest.approx(15 * US, rel=1e-2))
    # The other one's gap is longer.
    assert classes[TimeClass.GAPS] == (None, pytest.approx((40 + 15) * US, rel=1e-2))
    assert found.measured == pytest.approx(sum(x.measured for x in found.classes), rel=1e-9)
    assert found.instructions[0].name == "gemm.1"
    assert found.instructions[0].work == GPU_WORK[0]
    names = [each.name for each in found.instructions]
    assert "while.1" not in names and len(names) == len(GPU_WORK) - 1


def test_a_trace_measures_the_rates_of_a_gpu(tmp_path: Path) -> None:
    plan = gpu_plan()
    comparison = compare(plan, written(tmp_path, gpu_trace(steps=12)), 1)
    found = calibrate(plan, comparison, "runs/x")
    chip = found.chip
    for name in ("flops", "float32_flops", "bandwidth", "link"):
        assert found.rates[name] == getattr(chip, name) == pytest.approx(getattr(TRUE, name), 5e-3)
    assert found.rates["gap"] == pytest.approx(55 * US, rel=1e-2)
    assert "latency" not in found.rates and "not measured" in found.evidence["latency"]
    assert chip.is_measured and chip.source.endswith("by runs/x")
    before, after = (gpu_plan(each).times for each in (CHIPS["h100"], chip))
    assert before is not None and after is not None
    ratios = [comparison.measured / each.estimate for each in (before, after)]
    assert ratios[0] > 1.3 and abs(ratios[1] - 1) < 0.1


def test_a_rate_needs_evidence(tmp_path: Path) -> None:
    # 8 executions of float32 products, of at least 20; and less than 1 % of the step.
    plan = gpu_plan()
    comparison = compare(plan, written(tmp_path / "short", gpu_trace(steps=5)), 1)
    found = calibrate(plan, comparison, "runs/x")
    assert "float32_flops" not in found.rates and found.chip.float32_flops == 494.5e12
    assert found.evidence["float32_flops"].startswith("not measured: 8 executions")
    comparison = compare(plan, written(tmp_path / "idle", gpu_trace(steps=12, gap=1e6)), 1)
    found = calibrate(plan, comparison, "runs/x")
    assert set(found.rates) == {"gap"} and found.chip.flops == CHIPS["h100"].flops


def test_tiny_collectives_show_the_latency(tmp_path: Path) -> None:
    sizes = {"all-reduce.1": 4, "all-reduce.2": 1024, "all-reduce.3": 100 * MB}
    chip = CHIPS["h100"]
    every = {"all-reduce.1": 0.0, "all-reduce.2": 0.0, "all-reduce.3": 200 * US}
    plan = small_plan(
        "gpu:h100:1x1",
        chip=chip,
        used=1,
        program=STEP,
        work=[work(name, WorkKind.COLLECTIVES, in_order=False) for name in sizes],
        collectives=[exposed(name, every[name], size, 8) for name, size in sizes.items()],
        times=Times(*(0.0, 0.0, 0.0, 200 * US, 0.0, 0.0, 0.0), overlap=Overlap.COLLECTIVES),
    )
    runs = [("all-reduce.1", 0.0, 10.0), ("all-reduce.2", 20.0, 14.0), ("all-reduce.3", 50, 412.0)]
    events = on_gpu(repeated(runs, 22, 500.0))
    found = calibrate(
        plan, compare(plan, written(tmp_path, {"/device:GPU:0": {"Stream #1": events}}), 1), "x"
    )
    assert found.rates["latency"] == pytest.approx(12 * US)
    # 400 of 412 us are the transfer, which the plan expects to take 200.
    assert found.rates["link"] == pytest.approx(chip.link / 2)
    assert found.evidence["latency"] == "42 executions of tiny collectives"
    topology = dataclasses.replace(topologies.parse("gpu:h100:1x2"), chip=found.chip)
    devices = [SimpleNamespace(id=0), SimpleNamespace(id=1)]
    link = link_between("all-reduce", devices, topology, found.chip)
    assert (link.latency, link.bandwidth) == (found.chip.latency, found.chip.link)


def test_a_step_with_an_evaluation_is_left_out(tmp_path: Path) -> None:
    steps = [("gemm.1", start, 4.0) for start in (0, 10, 20, 1030, 1040, 1050)]
    evaluates = [("gemm.7", 25, 900.0)]
    events = [*on_gpu(steps), *on_gpu(evaluates, "jit_evaluate")]
    plan = dataclasses.replace(gpu_plan(), used=1)
    found = compare(plan, written(tmp_path, {"/device:GPU:0": {"Stream #1": events}}), 1)
    assert found.steps == 4 and not found.others
    assert found.measured == pytest.approx(10 * US)
    assert found.notes[0] == (
        "1 of 5 steps are left out, in which other programs ran: jit_evaluate"
    )


def test_a_kernel_may_have_only_its_instructions_name(tmp_path: Path) -> None:
    runs = [("gemm_1", 0.0, 5.0), ("loop_fusion_1", 5.0, 2.0), ("MemcpyH2D", 7.0, 1.0)]
    events: list[Event] = [(n, at, long, {}) for n, at, long in repeated(runs, 4, 10.0)]
    plan = dataclasses.replace(gpu_plan(), used=1)
    found = compare(plan, written(tmp_path, {"/device:GPU:0": {"Stream #1": events}}), 1)
    measured = {each.name: each.measured for each in found.instructions if each.measured}
    assert measured == pytest.approx({"gemm.1": 5 * US, "loop_fusion.1": 2 * US})
    assert found.others == pytest.approx({"transfers": US})
    assert seconds(found)[TimeClass.GAPS][1] == pytest.approx(2 * US)


# -- TPUs ------------------------------------------------------------------------------------------

TPU_WORK = [
    work("fusion.1", WorkKind.PRODUCTS, cycles=15030, bytes=MB, flops=1e9, dtype="bf16"),  # 10 us
    work("fusion.2", WorkKind.VECTOR, cycles=3006, bytes=MB),  # 2 us
    work("fusion.3", WorkKind.VECTOR, cycles=10, bytes=8.19 * MB, times=3),  # 10 us of memory
    work("copy-start.4", WorkKind.VECTOR, in_order=False, end="copy-done.4"),
    work("all-reduce.5", WorkKind.COLLECTIVES, in_order=False),
    work("while.6", WorkKind.CONTROL, in_order=False),
]


def tpu_plan() -> planner.Plan:
    return small_plan(
        "v5e:1x1",
        used=1,
        program=STEP,
        work=TPU_WORK,
        collectives=[],
        times=Times(*(5 * US, 5 * US, 10 * US, 0.0, 0.0, 0.0, 0.0)),
    )


def hlo(runs: Sequence[Run]) -> list[Event]:
    return [(f"%{n} = bf16[8]{{0}} op(%p)", at, long, {"program_id": 1}) for n, at, long in runs]


def test_a_trace_of_a_tpu_names_instructions_by_their_text(tmp_path: Path) -> None:
    runs = [
        ("while.6", 0.0, 30.0),
        ("fusion.1", 0.0, 12.0),
        *(("fusion.3", 12.0 + 5 * turn, 5.0) for turn in range(3)),
        ("fusion.2", 30.0, 4.0),
        ("copy-done.4", 34.0, 1.0),
        ("all-reduce.5", 35.0, 3.0),
    ]
    evaluates = [("fusion.1", 40.0, 6.0)]  # of another program
    steps = 11
    programs: list[Event] = [
        *((f"{STEP}(77)", 50.0 * step, 38.0, {}) for step in range(steps)),
        *(("jit_evaluate(78)", 50.0 * step + 40, 6.0, {}) for step in range(steps)),
    ]
    plane: Mapping[str, Sequence[Event]] = {
        "Steps": [("0", 0.0, 500.0, {})],
        "XLA Modules": programs,
        "XLA Ops": hlo(repeated([*runs, *evaluates], steps, 50.0)),
        "Async XLA Ops": hlo(repeated([("copy-start.4", 0.0, 35.0)], steps, 50.0)),
    }
    plan = tpu_plan()
    core = {"XLA Ops": hlo(repeated([("fusion.9", 0.0, 50.0)], steps, 50.0))}
    planes: Planes = {"/device:TPU:0": plane, "/device:TPU:0 SparseCore 0": core}
    found = compare(plan, written(tmp_path, planes), 1)
    assert found.steps == 10 and found.others == pytest.approx({"jit_evaluate": 6 * US})
    classes = seconds(found)
    assert classes[TimeClass.PRODUCTS] == pytest.approx((10 * US, 12 * US))
    assert classes[TimeClass.VECTOR] == pytest.approx((12 * US, (15 + 4 + 1) * US))
    assert classes[TimeClass.COLLECTIVES] == (0.0, pytest.approx(3 * US))
    # What the loop takes beside its instructions, and the time without any event.
    assert classes[TimeClass.GAPS] == (None, pytest.approx((3 + 2 + 4) * US))
    assert found.measured == pytest.approx(50 * US)
    rows = {each.name: each for each in found.instructions}
    assert rows["fusion.3"].times == pytest.approx(3)
    assert found.instructions[0].name == "fusion.3"  # 5 us more than its memory traffic takes

    measured = calibrate(plan, found, "runs/x")
    # fusion.1 and fusion.2 take 1.2 and 2 times their cycles; the one with more cycles decides.
    assert measured.rates["clock"] == pytest.approx(1.503e9 / 1.2)
    assert "flops" not in measured.rates  # its instructions take cycles, not operations
    assert measured.rates["bandwidth"] == pytest.approx(819e9 / 1.5)


# -- Input that is not what it should be -----------------------------------------------------------


def test_a_foreign_or_broken_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no profiler trace: train with --profile-steps"):
        newest_trace(str(tmp_path))
    plan = dataclasses.replace(gpu_plan(), used=1)

    def refused(name: str, events: Sequence[Event]) -> str:
        files = written(tmp_path / name, {"/device:GPU:0": {"Stream #1": events}})
        with pytest.raises(UserError) as error:
            compare(plan, files, 1)
        return str(error.value)

    other = on_gpu(repeated([("gemm.1", 0.0, 1.0)], 3, 2.0), "jit_other")
    assert "has no jit_train_step, the step of the run, but jit_other" in refused("other", other)
    runs = repeated([("gemm.1", 0.0, 1.0), ("gemm.9", 1.0, 3.0)], 3, 5.0)
    # A loop is not counted beside the instructions in it.
    runs += repeated([("while.1", 0.0, 4.0)], 3, 5.0)
    said = refused("changed", on_gpu(runs))
    assert "25% of its time in jit_train_step is of instructions" in said
    assert "no two steps on one device" in refused("short", on_gpu([("gemm.1", 0.0, 1.0)]))
    assert "has no event of a device" in refused("empty", [])

    whole = written(tmp_path / "whole", gpu_trace())
    with pytest.raises(UserError, match=r"2 devices of 1 of 1 processes, .* had 1 devices in all"):
        compare(plan, whole, 1)
    content = whole[0].read_bytes()
    for broken in (content[: len(content) // 2], b"no trace", b""):
        whole[0].write_bytes(broken)
        with pytest.raises(UserError, match=r"cannot be read|has no event of a device"):
            compare(gpu_plan(), whole, 1)


def test_an_instruction_that_the_plan_lacks_has_a_class_of_its_own(tmp_path: Path) -> None:
    runs = repeated([("gemm.1", 0.0, 3.0), ("gemm.9", 3.0, 1.0)], 3, 5.0)
    plan = dataclasses.replace(gpu_plan(), used=1)
    found = compare(plan, written(tmp_path, {"/device:GPU:0": {"Stream #1": on_gpu(runs)}}), 1)
    assert seconds(found)[TimeClass.UNKNOWN] == (None, pytest.approx(US))
    (row,) = [each for each in found.instructions if each.name == "gemm.9"]
    assert (row.work, row.predicted, row.times) == (None, 0.0, None)


# -- The file of rates, and the devices of a run ---------------------------------------------------


def test_measured_rates_are_those_of_their_chip_until_they_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    h100, v5e = (topologies.parse(name) for name in ("gpu:h100:2x8", "v5e:4x4"))
    assert with_rates(h100, None) == h100
    plan = gpu_plan()
    measured = calibrate(plan, compare(plan, written(tmp_path / "run", gpu_trace()), 1), "runs/x")
    file = rates_file(h100, None)
    assert file == tmp_path / "spmdtrain" / "rates" / "h100.json"
    write_rates(file, h100, measured)
    chip = with_rates(topologies.parse("gpu:h100:1x1"), None).chip
    assert chip is not None and chip.flops == measured.chip.flops != CHIPS["h100"].flops
    assert (chip.memory, chip.network) == (CHIPS["h100"].memory, CHIPS["h100"].network)
    assert f"by runs/x ({file})" in chip.source
    # XLA compiles for the same chip, and an ignored file changes nothing.
    assert topologies.gpu_config(chip) == topologies.gpu_config(CHIPS["h100"])
    assert with_rates(h100, "none") == h100 and with_rates(v5e, None) == v5e
    with pytest.raises(UserError, match="has the rates of h100, and the topology is v5e:4x4"):
        with_rates(v5e, str(file))
    content = json.loads(file.read_text())
    for change in ({"flops": 0}, {"flops": "fast"}, {"speed": 1}, {"element_rates": {"a": -1}}):
        file.write_text(json.dumps(content | {"rates": content["rates"] | change}))
        with pytest.raises(UserError, match=r"h100.json is not a file of rates: .*--rates none"):
            with_rates(h100, None)
    file.unlink()
    assert with_rates(h100, None) == h100


def test_the_topology_of_a_run_follows_from_its_devices() -> None:
    def name(*given: Any) -> str:
        return str(topologies.topology_of_run(*given))

    assert name("cpu", 8, 2, None) == "cpu:8"
    assert name("NVIDIA H100 80GB HBM3", 16, 2, None) == "gpu:h100:2x8"
    assert name("NVIDIA H100 80GB HBM3", 16, 16, None) == "gpu:h100:2x8"  # a process for each GPU
    assert name("TPU v5 lite", 1, 1, None) == "v5e:1x1"
    assert name("TPU v5 lite", 16, 4, "v5e:4x4") == "v5e:4x4"
    for given, said in (
        (("TPU v5 lite", 16, 4, None), "add --topology v5e:SHAPE with 16 chips"),
        (("TPU v5 lite", 16, 4, "v5p:2x2x4"), "made on 16 x TPU v5 lite"),
        (("cpu", 8, 1, "cpu:4"), "--topology cpu:4: the run was made on 8 x cpu"),
        (("NVIDIA GB200", 8, 1, None), "NVIDIA GB200, whose rates are not known"),
    ):
        with pytest.raises(UserError, match=said):
            topologies.topology_of_run(*given)

"""The benchmark's own arithmetic: peers take turns, and what they took becomes the page."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import REPOSITORY

BENCHMARKS = REPOSITORY / "benchmarks"
PEER = f"""
import sys, time
sys.path.insert(0, {str(BENCHMARKS / "peers")!r})
from gate import Gate
from work import Work
gate, work = Gate(), Work.from_arguments()
if gate.checks:
    gate.report_work(2.5 + float(sys.argv[-1]), 1234, 5e6, "float32")
gate.mark("imported")
while gate.wait(saves=1):
    for step in range(work.segment):
        time.sleep(float(sys.argv[-1]))
        gate.mark("first step")
"""
ORIGIN = {"cpus": 2, "processor": "a processor", "python": "3", "versions": {"jax": "1"}}


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS / "peers"))
    import compare
    import report

    return compare, report


@pytest.mark.slow
def test_a_peer_is_reported_by_its_ratio_to_the_floor(tmp_path: Path, modules: Any) -> None:
    compare, report = modules
    program = tmp_path / "peer.py"
    program.write_text(PEER)
    peers = [
        compare.Peer("floor", str(program), ("0.02",), trains=False),
        compare.Peer("spmdtrain", str(program), ("0.04",)),
        compare.Peer("slow", str(program), ("0.08",), share=5),
        compare.Peer("absent", str(program), (), str(tmp_path / "python")),
    ]
    file = tmp_path / "w1-batch-32.json"
    origin = ORIGIN | {"time": "today", "commit": "abc"}
    result = compare.compare(peers, compare.Work("mlp", 32, 10), 4, file, origin)
    assert result == json.loads(file.read_text())
    assert list(result["start"]) == ["floor", "floor, again", "spmdtrain", "slow"]
    orders = [[name for name in turn if name != "load"] for turn in result["rounds"]]
    assert orders[0] == list(result["start"])
    assert orders[1] == ["floor", "slow", "spmdtrain", "floor, again"]
    assert compare.ratio(result, "spmdtrain").median == pytest.approx(0.5, rel=0.3)
    # A fifth of the steps, and four times as long each.
    assert result["rounds"][0]["slow"]["steps"] == 2
    assert compare.ratio(result, "slow").median == pytest.approx(0.25, rel=0.3)

    page = report.page(tmp_path)
    assert "4 rounds of 10 steps" in page and "2 processors (a processor), no accelerator" in page
    assert "spmdtrain saved 4 times; skipped: absent; today, commit abc" in page
    assert "Not measured" in page
    for slower, void in ((1.0, False), (1.2, True)):
        for turn in result["rounds"]:
            turn["floor, again"]["seconds"] = turn["floor"]["seconds"] * slower
        assert compare.is_void(result) == void


def test_peers_are_given_no_steps_per_dispatch_but_those_that_name_them(
    modules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare, _ = modules
    import bench

    given = compare.Work("mlp", 32, 10)
    steps = []
    for peer in (bench.OURS, bench.OURS_1, bench.FAST):
        monkeypatch.setattr("sys.argv", ["ours.py", *given.arguments, *peer.arguments])
        steps.append(compare.Work.from_arguments().per_dispatch)
    assert steps == [0, 1, 50]  # 0: the default


@pytest.mark.slow
def test_peers_that_compute_something_else_are_refused_before_they_are_timed(
    tmp_path: Path, modules: Any
) -> None:
    compare, report = modules
    program = tmp_path / "peer.py"
    program.write_text(PEER)

    def peer(name: str, value: float) -> Any:
        return compare.Peer(name, str(program), (str(value),))

    file, origin = tmp_path / "w1-batch-32.json", ORIGIN | {"time": "today", "commit": "abc"}
    given = compare.Work("mlp", 32, 1), 1, file, origin
    with pytest.raises(
        compare.UnequalWorkError, match=r"spmdtrain has loss 2\.501000 .* 2\.500000"
    ):
        compare.compare([peer("floor", 0), peer("spmdtrain", 1e-3)], *given)
    assert not file.exists()
    compare.compare([peer("floor", 0), peer("spmdtrain", 1e-5)], *given)
    assert "| 2.50001 | 1,234 | 5.0 | float32 |" in report.page(tmp_path)


def test_attention_over_split_tokens_is_reported_by_ratios_within_a_round(
    tmp_path: Path, modules: Any
) -> None:
    _, report = modules
    import context

    memory = {method: 10.0 * (number + 1) for number, method in enumerate(context.METHODS)}
    seconds = {"full": [1.0, 9.0], "ring": [0.5, 4.5], "gather": [1.0, 4.5], "ulysses": [2.0, 18]}
    fitting = {"ring": [8.0], "gather": [16.0]}
    lengths = [
        {"tokens": tokens, "temporary_mb": memory, "seconds": of}
        for tokens, of in ((1024, seconds), (16384, fitting), (65536, {}))
    ]
    result = {"origin": ORIGIN | {"time": "today", "commit": "abc"}, "rounds": 2}
    (tmp_path / "w9-context.json").write_text(json.dumps(result | {"lengths": lengths}))
    page = report.page(tmp_path)
    start = "10.0 | 20.0 | 30.0 | 40.0 |"
    assert f"| 1,024 | {start} 0.50 | 0.75 | 0.25 | 0.4 | 2 |" in page
    assert f"| 16,384 | {start} does not fit | 0.50 | does not fit | 0.125 | 1 |" in page
    assert f"| 65,536 | {start}" + 4 * " not run |" + " 0 |" in page
    assert "--lengths 1024 16384 65536 --timed 1024 16384 --rounds 2" in page


def test_a_mixture_is_reported_by_its_speed_relative_to_the_dense_model(
    tmp_path: Path, modules: Any
) -> None:
    _, report = modules
    model = {"width": 64, "parameters": [1000, 2500], "seconds": [0.1, 0.4], "ratio": 4.0}
    result = {"origin": ORIGIN | {"time": "today", "commit": "abc"}, "rounds": 2}
    (tmp_path / "w10-experts.json").write_text(json.dumps(result | {"models": [model]}))
    assert "| 64 | 1,000 | 2,500 | 100.0 | 400.0 | 0.25 |" in report.page(tmp_path)


def test_scaling_is_reported_by_ratios_within_a_round(tmp_path: Path, modules: Any) -> None:
    _, report = modules
    import scaling

    def turn(slow: float) -> dict[str, float]:
        seconds = {
            scaling.ALONE: 0.4,
            "2 processes": 0.256,
            scaling.HALF: 0.212,
            scaling.APART: 0.224,
        }
        return {"load": 1.0} | {name: slow * x for name, x in seconds.items()}

    rounds = [turn(1.0), turn(3.0), turn(1.5)]  # the machine has other work in the second
    origin = ORIGIN | {"time": "today", "commit": "abc"}
    result = {"origin": origin, "segment": 5, "batch_size": 32, "rounds": rounds}
    rows = {row[0]: row[1:] for row in scaling.table(result)[1:]}
    assert rows["2 processes"] == ["384.0", "83", "1.56", "1.56", "1.56"]
    assert rows[scaling.HALF][2] == "0.94" and rows[scaling.APART][2] == "1.79"
    (line,) = scaling.losses(result)
    assert "halve with the batch 0.03, contention of two cores 0.03" in line
    assert "communication and waiting 0.08" in line
    (tmp_path / "scaling-mlp.json").write_text(json.dumps(result))
    assert "| 2 processes | 384.0 | 83 | 1.56 |" in report.page(tmp_path)


def test_a_peer_that_ends_is_named(tmp_path: Path, modules: Any) -> None:
    compare, _ = modules
    program = tmp_path / "peer.py"
    program.write_text("raise SystemExit(3)")
    peers = [compare.Peer("floor", str(program), trains=False)]
    with pytest.raises(RuntimeError, match=r"floor .*3"):
        compare.compare(peers, compare.Work("mlp", 32, 1), 1, tmp_path / "result.json", {})

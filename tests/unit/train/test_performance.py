"""The files beside the metrics: performance, events and the report of the program."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import REPOSITORY, metrics, status

from spmdtrain import CallbackContext, FunctionModel, Tracker, Trainer
from spmdtrain.document.terminal import Terminal
from spmdtrain.errors import StorageError
from spmdtrain.record.lines import RunTimes, read_events, run_times
from spmdtrain.train.run_logger import TimeAccount, goodput_line, peak_memory
from spmdtrain.xla import chips

TOKENS = np.random.default_rng(0).integers(0, 32, (64, 9)).astype(np.int32)
WEIGHTS = np.ones((64, 8), np.float32)
WEIGHTS[:, :2] = 0  # of eight tokens, six are trained on


def objective(params: Any, batch: Any) -> dict[str, Any]:
    tokens, weights = batch
    logits = params["embed"][tokens[:, :-1]] @ params["out"]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return {"loss": (loss, weights)}


def init(key: jax.Array) -> dict[str, jax.Array]:
    return {"embed": jax.random.normal(key, (32, 16)), "out": jnp.zeros((16, 32))}


def fit(workdir: Path | None, steps: int, **options: Any) -> None:
    given: dict[str, Any] = {
        "model": FunctionModel(init),
        "objective": objective,
        "optimizer": optax.sgd(0.1),
        "strategy": "mirrored",
        "global_batch_size": 16,
        "log_every": 2,
        "checkpoint_every_steps": 4,
        "workdir": str(workdir) if workdir else None,
        "terminal": Terminal(quiet=True),
    }
    Trainer(**given | options).fit((TOKENS, WEIGHTS), steps=steps)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Values(Tracker):
    """Keeps the values that it receives."""

    name = "values"

    def __init__(self) -> None:
        self.found: dict[str, float] = {}

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.found |= values


def test_trackers_receive_the_performance_of_a_run_without_files() -> None:
    tracker = Values()
    fit(None, 6, checkpoint_every_steps=None, trackers=[tracker])
    speed = {"examples_per_second", "steps_per_second", "tokens_per_second", "input_wait"}
    assert {f"speed/{name}" for name in speed} | {"time/goodput"} <= set(tracker.found)
    steps, tokens = (tracker.found[f"speed/{name}_per_second"] for name in ("steps", "tokens"))
    assert tokens == pytest.approx(steps * 16 * 6)


def test_a_part_of_a_gpu_has_the_memory_in_its_name_and_no_known_peak() -> None:
    name = "NVIDIA H100 80GB HBM3"
    assert chips.peak_flops(name) == chips.CHIPS["h100"].flops
    assert chips.peak_flops(f"{name} MIG 1g.10gb") is None
    assert chips.memory_of(f"{name} MIG 1g.10gb") == 10 * chips.GB


def test_a_run_of_two_starts_writes_its_speed_its_events_and_its_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chips, "KINDS", (("cpu", "v3"), *chips.KINDS))
    monkeypatch.chdir(tmp_path)
    tmp_path = tmp_path / "runs" / "mine"
    fit(tmp_path, 4)
    fit(tmp_path, 8)

    program = json.loads((tmp_path / "program.json").read_text())
    # Products of 16 x 8 tokens: one forward, two backward; no gradient is one of a table's lookup.
    assert program["flops_per_step"] == 3 * 2 * (16 * 8) * 16 * 32
    assert program["parameters"] == 2 * 32 * 16 and program["mesh"] == {"data": 8}
    assert program["peak_flops_per_device"] == chips.CHIPS["v3"].flops / 2
    assert [(c["kind"], c["axes"], c["count"]) for c in program["collectives"]] == [
        ("all-reduce", ["data"], 1)
    ]
    assert program["sharding"][0] == {
        "path": "embed",
        "shape": [32, 16],
        "dtype": "float32",
        "spec": "replicated",
        "bytes_per_device": 2048,
    }

    of_speed = lines(tmp_path / "performance.jsonl")
    assert [line["step"] for line in of_speed] == [1, 2, 4, 6, 8]
    assert all(0 <= line["goodput"] <= 1 for line in of_speed)
    assert not any("device_memory_bytes" in line for line in of_speed)
    for line in of_speed:
        if (steps := line.get("steps_per_second")) is None:
            continue
        assert line["examples_per_second"] == pytest.approx(16 * steps)
        assert line["tokens_per_second"] == pytest.approx(16 * 6 * steps)
        peak = 8 * program["peak_flops_per_device"]
        if (share := line.get("model_flops_utilization")) is not None:
            assert share == pytest.approx(program["flops_per_step"] * steps / peak)
    assert "model_flops_utilization" in of_speed[-1]

    events = read_events(str(tmp_path))
    kinds = [event["event"] for event in events if event["event"] != "phases"]
    one = ["start", "checkpoint", "end"]
    assert kinds == one + one
    assert [event["step"] for event in events if event["event"] == "start"] == [0, 4]
    times = run_times(events)
    assert times.lost["repeated"] == 0 and times.lost["compile"] > 0
    assert times.productive + sum(times.lost.values()) == pytest.approx(times.wall, rel=0.05)
    shown = goodput_line(times)
    assert shown.startswith("goodput ") and len(shown) <= 80

    # The page describes every key, and its code reads these files.
    page = (REPOSITORY / "docs" / "logging.md").read_text()
    described = set(re.findall(r"`(\w+)`", page))
    of_events = {key for event in events for key in event.get("seconds", {})}
    cells = set(re.findall(r"^\| `(\w+)` \|", page, re.M))
    assert of_events <= cells
    assert {*of_speed[-1], *program} <= described | {"step", "time"}
    assert {"gradient_norm", "parameter_norm", "update_norm"} <= cells & {*metrics(tmp_path)[0]}
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    found: dict[str, Any] = {}
    exec(code, found)
    assert found["times"] == times


def test_the_goodput_line_has_the_largest_losses_in_at_most_80_characters() -> None:
    lost = {"compile": 351.9, "save": 156.4, "down": 117.3, "host": 3.0}
    times = RunTimes(3910.0, 3245.3, lost)
    assert goodput_line(times) == "goodput 83 % of 1:05:10: compile 9 %, save 4 %, down 3 %"
    many = RunTimes(100.0, 0.0, {f"a phase with a long name {n}": 10.0 for n in range(10)})
    assert len(goodput_line(many)) <= 80


def test_the_memory_is_that_of_the_fullest_device() -> None:
    class Device:
        def __init__(self, peak: int | None) -> None:
            self._peak = peak

        def memory_stats(self) -> dict[str, int] | None:
            return None if self._peak is None else {"peak_bytes_in_use": self._peak}

    assert peak_memory([Device(3), Device(7), Device(None)]) == 7
    assert peak_memory(jax.devices()) is None


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", None),  # slower than the one in the table
        ("NVIDIA GH200 480GB", None),
        ("cpu", None),
    ],
)
def test_a_device_is_recognized_by_the_name_that_jax_gives_it(kind: str, name: str | None) -> None:
    found = chips.chip_of(kind)
    assert (found and found.name) == name


def test_a_failed_run_has_its_status_although_its_events_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise StorageError("events.jsonl: no space left on device")

    def fail(event: CallbackContext) -> None:
        raise RuntimeError("the callback fails")

    monkeypatch.setattr(TimeAccount, "end", full)
    with pytest.raises(RuntimeError, match="the callback fails"):
        fit(tmp_path, 2, callbacks={"step": fail})
    assert status(tmp_path)["status"] == "failed"

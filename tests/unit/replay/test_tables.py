"""Conditions under which a replayed step may differ in its bits."""

import json
from pathlib import Path

import jax
import pytest

from spmdtrain.record.storage import source_digest
from spmdtrain.replay.command import other_conditions
from spmdtrain.replay.recorded_run import read_run
from spmdtrain.replay.rerun import Rerun


@pytest.mark.parametrize(
    ("exact", "expected"),
    [
        (
            None,
            [
                "other devices: the run made step 15 on 4",
                "other processes: the run made step 15 in 2",
            ],
        ),
        (16, []),
    ],
)
def test_other_devices_and_processes_are_named_unless_the_run_is_exact(
    exact: int | None, expected: list[str], tmp_path: Path
) -> None:
    kind = jax.devices()[0].device_kind
    config = {"config": {"exact": exact}, "versions": {}, "device_kind": kind}
    (tmp_path / "config.json").write_text(json.dumps(config))
    # The second start made the steps again from 10 on.
    starts = [(0, 1, 8), (20, 1, 8), (10, 2, 4)]
    events = [
        {"time": 1.0, "event": "start", "step": step, "processes": processes, "devices": devices}
        for step, processes, devices in starts
    ]
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (tmp_path / "events.jsonl").write_text(lines)
    run, made = read_run(str(tmp_path)), Rerun("", 10, "", 8)
    assert other_conditions(run, made, 15) == expected
    assert other_conditions(run, made, 5) == []


def test_an_experiment_that_was_changed_is_named(tmp_path: Path) -> None:
    file = tmp_path / "experiment.py"
    file.write_text("scale = 1.0")
    recorded = {"experiment": str(file), "experiment_sha256": source_digest(str(file))}
    config = {"config": {"exact": 16}, "versions": {}, "device_kind": "", **recorded}
    (tmp_path / "config.json").write_text(json.dumps(config))
    run, made = read_run(str(tmp_path)), Rerun("", 10, "", 8)
    assert other_conditions(run, made, 5) == []
    file.write_text("scale = 1.01")
    (line,) = other_conditions(run, made, 5)
    assert line.startswith(f"another experiment: {file}")
    (other := tmp_path / "copy.py").write_text("scale = 1.0")
    assert other_conditions(run, made, 5, str(other)) == []

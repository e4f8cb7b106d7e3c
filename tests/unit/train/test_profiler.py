"""Profiled steps, and the workdir in which they are."""

import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linear_model import trainer

from spmdtrain.config.run_config import RunConfig
from spmdtrain.train.trainer import profiled_steps


def markers(trace: Path) -> list[tuple[str, Any]]:
    """The names and numbers of the steps that a trace marks."""
    planes = jax.profiler.ProfileData.from_file(str(trace)).planes
    events = [event for plane in planes for line in plane.lines for event in line.events]
    stats = [(event.name, dict(event.stats)) for event in events]
    return [(name, each["step_num"]) for name, each in stats if "step_num" in each]


def test_a_trace_is_in_the_workdir_of_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "run").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    config = RunConfig(steps=1, workdir="~/run", profile_steps="1:1")
    with profiled_steps(config, 0, print) as profile:
        profile.before(1)
        profile.after(1, jnp.ones(1))
    assert list((tmp_path / "home" / "run").rglob("*.xplane.pb"))
    assert not list((tmp_path / "here").iterdir())


def test_a_relative_workdir_stays_if_a_callback_changes_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (other := tmp_path / "other").mkdir()
    options: dict[str, Any] = {"log_every": 1, "log_hash_every": 2, "profile_steps": "3:3"}
    leaves = {"log": lambda _: os.chdir(other)}
    trained = trainer(workdir="run", callbacks=leaves, **options)
    data = np.ones((8, 4), np.float32), np.ones((8, 1), np.float32)
    trained.fit(data, steps=4)
    assert trained.fit(data, steps=6).step == 6
    assert not any(other.iterdir())
    written = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"metrics.jsonl", "hashes.jsonl", "plugins", "checkpoints", "tensorboard"} <= written
    config = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    assert config["workdir"] == "run"
    (trace,) = (tmp_path / "run").rglob("*.xplane.pb")
    assert markers(trace) == [("train", 3)]

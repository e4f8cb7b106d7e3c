"""Profiled steps."""

from pathlib import Path

import jax.numpy as jnp
import pytest

from spmdtrain.config.run_config import RunConfig
from spmdtrain.train.profiler import profiled_steps


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

"""Memory of devices that is exhausted, or nearly so, in the real command."""

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import linear_model
import numpy as np
import pytest
from helpers import BOUND, DIGITS

from spmdtrain import UserError
from spmdtrain.plan.command import execute as plan
from spmdtrain.report.command import main as report

pytestmark = pytest.mark.slow

EXPERIMENT = '''
"""A network whose step needs 60 MB, and a callback that keeps arrays."""
from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
import numpy as np
import optax

from spmdtrain import Experiment, RunConfig
from spmdtrain.models import MLP

KEPT = []


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    steps: int | None = 4
    global_batch_size: int | None = 4096
    log_every: int = 1
    huge_at: int = 0


def build(config):
    x = np.random.default_rng(0).normal(size=(4096, 64)).astype(np.float32)

    def keep(event):
        KEPT.append(jnp.ones((1000, 1000)))
        if event.step == config.huge_at:
            jnp.ones(2**46).block_until_ready()

    return Experiment(
        model=partial(MLP, 64, (512, 512, 512), 1),
        objective=lambda model, batch: {"loss": (model(batch[0])[:, 0] - batch[1]) ** 2},
        optimizer=optax.adam(0.01),
        train=(x, x.sum(1)),
        callbacks={"step": keep},
    )
'''


def run(folder: Path, limit: str, *options: object) -> subprocess.CompletedProcess[str]:
    file = folder / "kept.py"
    file.write_text(EXPERIMENT)
    given = ("--config", file, "--strategy", "one_device", "--workdir", folder / "run", *options)
    return subprocess.run(
        [sys.executable, "-m", "spmdtrain.run", *map(str, given)],
        env=os.environ | {"SPMDTRAIN_DEVICE_MEMORY": limit},
        capture_output=True,
        text=True,
        timeout=BOUND,
    )


def megabytes(pattern: str, text: str) -> float:
    found = re.search(pattern + r"[^\n]*?([\d.]+) MB │", text)
    assert found is not None, text
    return float(found[1])


def test_exhausted_memory_is_explained_below_the_traceback(tmp_path: Path) -> None:
    ended = run(tmp_path, "40MB", "--huge-at", 3)
    assert ended.returncode == 1
    shown = ended.stderr.partition("RESOURCE_EXHAUSTED: Out of memory allocating")[2]
    assert "asked for: 281475 GB" in shown and "limit of a device: 40.0 MB" in shown
    # What is alive: the callback's arrays of steps 1 to 3, and the state.
    assert re.search(r"others, such as float32\[1000,1000\] +│ +3 │ 12.0 MB", shown), shown
    parameters = megabytes(r"│ parameters +│ +8 │", shown)
    assert parameters == pytest.approx(4 * (64 * 512 + 2 * 512**2 + 512 + 3 * 512 + 1) / 1e6, 0.01)
    assert megabytes(r"│ optimizer +│", shown) == pytest.approx(2 * parameters, 0.01)
    # The plan of the step with this limit, and the first option with which it fits.
    assert 55 < megabytes(r"│ peak", shown) < 65
    assert re.search(r"advice: .*\n +--microbatches 4: memory 60\.\d MB -> 2\d\.\d MB", shown), (
        shown
    )


def test_a_step_that_hardly_fits_is_named_before_it_begins(tmp_path: Path) -> None:
    ended = run(tmp_path, "62MB", "--quiet")
    assert ended.returncode == 0, ended.stderr
    said = r"the step needs 6\d\.\d MB of the 62\.0 MB of each device \((9[5-9]|10\d)%\)"
    assert re.search(said, ended.stderr), ended.stderr
    ended = run(tmp_path, "70MB", "--resume", "auto", "--steps", 5)
    assert ended.returncode == 0 and "the step needs" not in ended.stdout + ended.stderr


def test_a_limit_that_is_no_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'20X': it must be a size such as 15\.7GB or 16GiB"):
        plan(["--config", str(DIGITS), "--topology", "cpu:1", "--device-memory", "20X"])
    ended = run(tmp_path, "much")
    assert ended.returncode == 2
    assert ended.stderr == (
        "error: SPMDTRAIN_DEVICE_MEMORY is 'much': it must be a size such as 15.7GB or 16GiB\n"
    )


def test_a_profile_shows_what_becomes_of_the_memory(tmp_path: Path) -> None:
    ended = run(tmp_path, "1GB", "--memory-profile", "--steps", 24)
    assert ended.returncode == 0, ended.stderr
    lines = (tmp_path / "run" / "performance.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    arrays = [line["live_array_bytes"] for line in found]
    # The callback keeps an array of 4 MB after each step; lines are written some steps later.
    growth = (arrays[11] - arrays[0]) / 11
    assert growth == pytest.approx(4e6, rel=0.25) and arrays[0] > 6.7e6
    assert all(100e6 < line["host_memory_bytes"] < 20e9 for line in found)
    profile = gzip.decompress((tmp_path / "run" / "memory.pprof").read_bytes())
    assert b"kept.py" in profile and b"keep" in profile
    page = tmp_path / "page.html"
    assert report([str(tmp_path / "run"), "--output", str(page)]) == 0
    text = page.read_text()
    assert "arrays on a device, GB" in text and "memory of process 0, GB" in text
    with pytest.raises(UserError, match="memory_profile is True, and workdir is not given"):
        linear_model.trainer(memory_profile=True, steps=1).fit((np.ones((8, 4)), np.ones((8, 1))))

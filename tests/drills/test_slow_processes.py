"""Processes that the others wait for, among three that are otherwise equal."""

import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import BOUND
from processes import drill, job, quiet, show, start_job

from spmdtrain import open_run
from spmdtrain.testing import run_processes

SLOW = "time.sleep(config.pause if process_group.rank() == config.fault_rank else 0.001)"
NAMED = re.compile(r"step (\d+): (.+) is the one that the others wait for: (.+)")


def experiment(folder: Path) -> Path:
    """An experiment in which worker 0 needs `pause` seconds for a batch."""
    return drill(
        folder,
        ("time.sleep(config.pause)", SLOW),
        ("log_every: int = 1", "log_every: int = 5"),
        ("eval_every_steps: int | None = 12", "eval_every_steps: int | None = 500"),
        ("checkpoint_every_steps: int | None = 5", "checkpoint_every_steps: int | None = 500"),
    )


def slow_events(workdir: Path) -> list[Any]:
    return [event for event in open_run(str(workdir)).events if event["event"] == "slow"]


def test_a_slow_reader_is_named_with_its_phase(tmp_path: Path) -> None:
    options = ["--workdir", tmp_path / "run", "--steps", 80, "--pause", 0.1]
    ended = job(experiment(tmp_path), *options, processes=3)
    found = NAMED.findall(ended[0].output)
    assert len(found) == 1, show(ended)  # it is reported once, not by each window
    step, name, how = found[0]
    assert int(step) <= 50 and name == "worker 0"
    share, phase, seconds, whole = re.fullmatch(
        r"(\d+) % in (\w+), ([\d.]+) ms of each ([\d.]+) ms step", how
    ).groups()  # type: ignore[union-attr]
    assert phase == "load" and int(share) >= 90 and 50 < float(seconds) <= float(whole)
    assert not any("wait for" in one.output for one in ended[1:])  # process 0 alone reports it

    (event,) = slow_events(tmp_path / "run")
    assert (event["step"], event["process"], event["cause"]) == (int(step), "worker 0", "load")
    assert 0.5 < event["share"] <= 1 and how in event["reason"]
    of_speed = open_run(str(tmp_path / "run")).performance()
    assert of_speed["slow_process"][-1] == 1 and 0.5 < of_speed["slowest_share"][-1] <= 1
    assert np.isnan(of_speed["slow_process"][of_speed["step"] < int(step)]).all()


LOOP = """
import sys
import time

import jax.numpy as jnp
import numpy as np
import optax

import spmdtrain
from spmdtrain.distributed import process_group

spmdtrain.initialize()
data = np.zeros((48, 4), np.float32)
optimizer = optax.sgd(0.1)


def init(key):
    params = {"w": jnp.ones((4, 1))}
    return {"params": params, "opt_state": optimizer.init(params)}


def train(state, batch, key):
    loss = jnp.mean((batch @ state.params["w"]) ** 2) + jnp.sum(state.params["w"] ** 2)
    return state, {"loss": loss}


options = {"steps": 80, "log_every": 5, "global_batch_size": 24, "workdir": sys.argv[1]}
with spmdtrain.Loop(strategy="mirrored", **options) as loop:
    state = loop.start(init, train=data)
    step = loop.compile_step(train)
    for batch in loop.batches():
        state, output = step(state, batch)
        if process_group.rank() == 2:
            time.sleep(0.1)
        loop.end_step(state, output)
"""


def test_a_loop_names_the_process_that_works_on_its_host(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LOOP)
    line = [sys.executable, str(script), str(tmp_path / "run")]
    ended = run_processes(line, processes=3, timeout=BOUND, grace=40, env=quiet())
    (event,) = slow_events(tmp_path / "run")
    assert event["process"] == "worker 1" and event["cause"] == "host", show(ended)
    assert re.search(r"step \d+: worker 1 is the one .*: \d+ % in host, ", ended[0].output)


SLOW_DEVICE = """def wait(x):
    time.sleep(0.03 if process_group.rank() == 1 else 0)
    return np.zeros((), np.float32)


def objective(model, batch):
    x, y = batch
    x = x + jax.pure_callback(wait, jax.ShapeDtypeStruct((), np.float32), jax.lax.stop_gradient(x))
"""


@pytest.mark.nightly
def test_a_device_with_a_slow_step_is_named_by_the_sentinel(tmp_path: Path) -> None:
    config = drill(
        tmp_path,
        ("import numpy as np\n", "import jax\nimport numpy as np\n"),
        ("def objective(model, batch):\n    x, y = batch\n", SLOW_DEVICE),
        ("eval_every_steps: int | None = 12", "eval_every_steps: int | None = 500"),
        ("checkpoint_every_steps: int | None = 5", "checkpoint_every_steps: int | None = 500"),
    )
    options = ["--workdir", tmp_path / "run", "--steps", 60, "--sentinel-every", 4]
    ended = job(config, *options, processes=3)
    (event,) = [event for event in slow_events(tmp_path / "run") if event["cause"] == "device"]
    assert event["process"].startswith("device 1 (") and " of worker 0 on " in event["process"]
    assert event["step"] <= 50 and event["share"] > 0.5, show(ended)


@pytest.mark.nightly
def test_a_process_that_is_stopped_again_and_again_is_named(tmp_path: Path) -> None:
    options = ["--workdir", tmp_path / "run", "--steps", 200, "--pause", 0.001]
    with start_job(experiment(tmp_path), *options, processes=3) as running:
        running[0].wait_for("step 10/", BOUND)

        def throttle() -> None:
            while running[1].code is None:
                running[1].send(signal.SIGSTOP)
                time.sleep(0.3)
                running[1].send(signal.SIGCONT)
                time.sleep(0.1)

        thread = threading.Thread(target=throttle)
        thread.start()
        ended = running.wait()
        thread.join()
    (event,) = [event for event in slow_events(tmp_path / "run") if event["share"]]
    assert (event["process"], event["cause"]) == ("worker 0", "paused"), show(ended)
    assert event["step"] <= 100  # it takes three windows of a quarter of a second


@pytest.mark.nightly
def test_no_process_of_three_equal_ones_is_named_in_1000_steps(tmp_path: Path) -> None:
    options = ["--workdir", tmp_path / "run", "--steps", 1000, "--pause", 0.001]
    ended = job(experiment(tmp_path), *options, processes=3)
    assert not slow_events(tmp_path / "run"), show(ended)
    shares = open_run(str(tmp_path / "run")).performance()["slowest_share"]
    assert np.isfinite(shares).sum() > 50

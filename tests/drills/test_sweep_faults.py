"""Sweeps that are stopped and killed: no trial outlives them, and the same command resumes."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import BOUND, assert_gone, environment, metrics, run, saved_steps, status

from spmdtrain.sweep.trials import SearchTrials, TrialFactory, TrialState, parse_settings

# Its steps are slow until the file `open` exists beside it, so that it does not end before.
EXPERIMENT = '''
"""Fits a line."""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import optax
from flax import nnx

from spmdtrain import Experiment, RunConfig


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    steps: int | None = 3000
    learning_rate: float | None = 0.1
    log_every: int = 1000
    eval_every_steps: int | None = 10
    checkpoint_every_steps: int | None = 10
    cpu_devices: int | None = 1


def squared_error(model, batch):
    x, y = batch
    return {"loss": (model(x) - y) ** 2}


def slow(event):
    if not Path(__file__).with_name("open").exists():
        time.sleep(0.3)


def build(config):
    x = np.linspace(-1, 1, 64, dtype=np.float32)[:, None]
    return Experiment(
        model=partial(nnx.Linear, 1, 1),
        objective=squared_error,
        optimizer=optax.sgd(config.learning_rate),
        train=(x, 3 * x + 2),
        validation=(x, 3 * x + 2),
        callbacks={"step": slow},
    )
'''


def start(folder: Path, *options: str) -> "subprocess.Popen[bytes]":
    experiment = folder / "line.py"
    experiment.write_text(EXPERIMENT)
    command = [sys.executable, "-m", "spmdtrain.sweep", "--config", str(experiment), *options]
    with (folder / "output.txt").open("wb") as output:
        return subprocess.Popen(
            [*command, "--workdir", str(folder / "sweep")], env=environment(), stdout=output
        )


def wait_until(condition: Callable[[], bool], process: "subprocess.Popen[bytes]") -> None:
    until = time.monotonic() + BOUND
    while not condition():
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.1)


def children(process: "subprocess.Popen[bytes]") -> list[int]:
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(number) for number in path.read_text().split()]


def test_a_sweep_that_is_stopped_and_killed_resumes_its_trials(tmp_path: Path) -> None:
    options = ["--set", "learning_rate=0.1,0.01,0.001", "--jobs", "2", "--steps", "200"]
    names = [f"learning_rate={rate}" for rate in ("0.1", "0.01", "0.001")]
    runs = [tmp_path / "sweep" / name for name in names]

    def saved(step: int) -> bool:
        return all(max(saved_steps(run), default=0) >= step for run in runs[:2])

    # SIGTERM: the trials save, and the sweep exits with 75.
    stopped = start(tmp_path, *options)
    wait_until(lambda: saved(10), stopped)
    stopped.send_signal(signal.SIGTERM)
    assert stopped.wait(BOUND) == 75
    assert "the same command resumes it" in (tmp_path / "output.txt").read_text()
    assert [status(run)["status"] for run in runs[:2]] == ["preempted"] * 2
    assert not runs[2].exists()
    # SIGKILL: the trials are killed with the sweep.
    reached = max(max(saved_steps(run)) for run in runs[:2])
    killed = start(tmp_path, *options)
    wait_until(lambda: saved(reached + 10), killed)
    trials = children(killed)
    assert len(trials) == 3  # and the process that ends them
    killed.kill()
    killed.wait()
    assert_gone(trials)
    # The same command finishes what is left: with the bits of a run that nothing has interrupted.
    (tmp_path / "open").touch()
    assert start(tmp_path, *options).wait(BOUND) == 0
    results = json.loads((tmp_path / "sweep" / "results.json").read_text())
    assert {trial["state"] for trial in results["trials"]} == {"finished"}
    assert results["best"] == names[0]
    ordinary = tmp_path / "ordinary"
    options = ["--learning-rate", "0.01", "--steps", "200", "--workdir", str(ordinary)]
    assert run(tmp_path / "line.py", *options).returncode == 0
    assert metrics(runs[1]) == metrics(ordinary)


@pytest.mark.nightly
def test_a_search_ends_a_trial_that_is_worse_than_the_others(tmp_path: Path) -> None:
    folder, experiment = tmp_path / "sweep", tmp_path / "line.py"
    folder.mkdir()
    experiment.write_text(EXPERIMENT)
    options = ["learning_rate=log:0.01..0.1"]
    # Five trials of an earlier sweep were better than any can be at its first evaluation.
    factory = TrialFactory(str(experiment), [], [], folder, "sweep")
    study = SearchTrials(folder, parse_settings(options), factory, 5, "min", "loss")
    while (trial := study.next_trial()) is not None:
        study.should_prune(trial, {10: 1e-9})
        trial.state = TrialState.FINISHED
        study.record_end(trial, 1e-9)
    sweep = start(tmp_path, "--set", *options, "--search", "6")
    assert sweep.wait(BOUND) == 0
    shown = (tmp_path / "output.txt").read_text()
    assert "6 trials, 5 of them done before" in shown and ": pruned at step" in shown
    results = json.loads((folder / "results.json").read_text())
    (pruned,) = [trial for trial in results["trials"] if trial["state"] == "pruned"]
    # It was ended as by a signal: saved after few of its 3,000 steps, and could be resumed.
    assert status(folder / pruned["name"])["status"] == "preempted"
    assert 10 <= max(saved_steps(folder / pruned["name"])) < 3000

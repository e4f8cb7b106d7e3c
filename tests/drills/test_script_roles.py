"""One unchanged script in every role of a job with parameter servers."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from helpers import BOUND, environment, metrics, saved_steps

from spmdtrain.launch.task_env import tf_configs

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed"
)

SCRIPT = """
import sys
from functools import partial

import numpy as np
import optax
from spmdtrain import Trainer, initialize
from spmdtrain.models import MLP

initialize()
draw = np.random.default_rng(0)
x = draw.normal(size=(256, 8)).astype(np.float32)
y = x.sum(1) ** 2 / 8


def objective(model, batch):
    x, y = batch
    return {"loss": (model(x)[:, 0] - y) ** 2}


strategy, workdir = sys.argv[1:]
trainer = Trainer(
    model=partial(MLP, 8, (16,), 1),
    objective=objective,
    optimizer=optax.sgd(1e-2),
    strategy=strategy,
    workdir=workdir,
    checkpoint_every_steps=10,
    evaluated_by="evaluator",
)
result = trainer.fit((x, y), steps=20, validation=(x, y), global_batch_size=32)
print("trained", result.step)
"""


def run_tasks(
    configs: Mapping[str, str],
    names: Sequence[str],
    strategy: str,
    folder: Path,
    script: str = SCRIPT,
) -> dict[str, tuple[int, str]]:
    """Runs a script as these tasks; returns exit code and output of each."""
    folder.mkdir(exist_ok=True)
    (folder / "script.py").write_text(script)
    line = [sys.executable, "-u", str(folder / "script.py"), strategy, str(folder / "run")]
    running = {
        name: subprocess.Popen(
            line,
            env=environment(1) | {"TF_CONFIG": configs[name]},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in names
    }
    try:
        found = {name: process.communicate(timeout=BOUND)[0] for name, process in running.items()}
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    return {name: (running[name].returncode, text) for name, text in found.items()}


def check_job(found: Mapping[str, tuple[int, str]], folder: Path, trained: set[str]) -> None:
    said = "\n".join(text for _, text in found.values())
    assert {name: code for name, (code, _) in found.items()} == dict.fromkeys(found, 0), said
    assert {name for name, (_, text) in found.items() if "trained 20" in text} == trained
    assert saved_steps(folder / "run") == [10, 20]
    written = (folder / "run" / "metrics.evaluator.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in written] == [10, 20]
    assert not metrics(folder / "run", "eval")


@needs_ray
def test_a_script_under_parameter_server(tmp_path: Path) -> None:
    names = ["chief", "worker 0", "ps 0", "evaluator"]
    found = run_tasks(tf_configs(names), names, "parameter_server", tmp_path)
    check_job(found, tmp_path, trained={"chief"})


def test_the_same_script_under_mirrored(tmp_path: Path) -> None:
    # The cluster lists a parameter server, so that initialize() cannot know the strategy.
    configs = tf_configs(["chief", "worker 0", "ps 0", "evaluator"])
    names = ["chief", "worker 0", "evaluator"]
    found = run_tasks(configs, names, "mirrored", tmp_path)
    check_job(found, tmp_path, trained={"chief", "worker 0"})
    assert "2 processes, mirrored" in found["chief"][1]


AVERAGED = """
import sys
from functools import partial

import numpy as np
import optax
from spmdtrain import ParameterServerOptions, Trainer
from spmdtrain.models import MLP

draw = np.random.default_rng(0)
x = draw.normal(size=(256, 8)).astype(np.float32)
y = x.sum(1) ** 2 / 8

def objective(model, batch):
    x, y = batch
    return {"loss": (model(x)[:, 0] - y) ** 2}

chain = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))
strategy, workdir = sys.argv[1:3]
trainer = Trainer(
    model=partial(MLP, 8, (16,), 1),
    objective=objective,
    optimizer=chain,
    strategy=strategy,
    workdir=workdir,
    log_every=1,
    ema_decay=0.9,
    servers=ParameterServerOptions(
        max_staleness=0 if strategy == "parameter_server" else None
    ),
)
result = trainer.fit((x, y), steps=30, validation=(x, y), test=(x, y), global_batch_size=32)
print("trained", result.step, "predicted", len(trainer.predict((x, y))))
"""


@pytest.mark.nightly
@needs_ray
def test_without_a_chief_worker_0_leads_and_the_numbers_are_those_of_mirrored(
    tmp_path: Path,
) -> None:
    names = ["worker 0", "worker 1", "ps 0"]
    served, alone = tmp_path / "served", tmp_path / "alone"
    found = run_tasks(tf_configs(names), names, "parameter_server", served, AVERAGED)
    assert {name: code for name, (code, _) in found.items()} == dict.fromkeys(names, 0), found
    said = {name for name, (_, text) in found.items() if "trained 30 predicted 256" in text}
    assert said == {"worker 0"}
    report = json.loads((served / "run" / "servers.json").read_text())
    assert report["batches"] == {"worker 1": 30}
    found = run_tasks({"alone": ""}, ["alone"], "mirrored", alone, AVERAGED)
    assert found["alone"][0] == 0, found
    own, expected = (
        [line["loss"] for line in metrics(folder / "run", "train")] for folder in (served, alone)
    )
    assert own == pytest.approx(expected, rel=1e-5)
    for split in ("epoch", "eval", "test"):  # evaluated with the moving average
        (one,), (other,) = (metrics(folder / "run", split)[-1:] for folder in (served, alone))
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)

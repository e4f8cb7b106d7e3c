"""One unchanged script in every role: TF_CONFIG and the strategy decide what each process does."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
from flax import nnx
from helpers import environment, metrics, saved_steps

from spmdtrain import Loop, Trainer, UserError
from spmdtrain.cluster.checks import check_servers
from spmdtrain.cluster.spec import from_tf_config
from spmdtrain.distributed import initialize
from spmdtrain.launch.task_env import tf_configs
from spmdtrain.parameter_server.roles import run_task_role

BOUND = 120  # seconds

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
    configs: Mapping[str, str], names: Sequence[str], strategy: str, folder: Path
) -> dict[str, tuple[int, str]]:
    """Runs the script as these tasks; returns exit code and output of each."""
    (folder / "script.py").write_text(SCRIPT)
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


@pytest.mark.drill
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.parametrize("chief", ["chief", "worker 0"])
def test_a_script_under_parameter_server(tmp_path: Path, chief: str) -> None:
    names = {
        "chief": ["chief", "worker 0", "ps 0", "evaluator"],
        "worker 0": ["worker 0", "worker 1", "ps 0"],
    }[chief]
    configs = tf_configs(names)
    if "evaluator" in names:
        check_job(
            run_tasks(configs, names, "parameter_server", tmp_path), tmp_path, trained={chief}
        )
        return
    found = run_tasks(configs, names, "parameter_server", tmp_path)
    assert {name: code for name, (code, _) in found.items()} == dict.fromkeys(names, 0), found
    assert [name for name, (_, text) in found.items() if "trained 20" in text] == [chief]
    report = json.loads((tmp_path / "run" / "servers.json").read_text())
    assert report["batches"] == {"worker 1": 20}


@pytest.mark.drill
def test_the_same_script_under_mirrored(tmp_path: Path) -> None:
    # The cluster lists a parameter server, so that initialize() cannot know the strategy.
    configs = tf_configs(["chief", "worker 0", "ps 0", "evaluator"])
    names = ["chief", "worker 0", "evaluator"]
    found = run_tasks(configs, names, "mirrored", tmp_path)
    check_job(found, tmp_path, trained={"chief", "worker 0"})
    assert "2 processes, mirrored" in found["chief"][1]


# -- in this process -------------------------------------------------------------------------------

X = np.linspace(-1, 1, 64, dtype=np.float32)[:, None]


def test_fit_in_an_evaluator_task_evaluates_and_exits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def objective(model: Any, x: Any) -> dict[str, Any]:
        return {"loss": (model(x) - 3 * x) ** 2}

    def fit(**options: Any) -> None:
        trainer = Trainer(
            model=partial(nnx.Linear, 1, 1),
            objective=objective,
            optimizer=optax.sgd(0.1),
            workdir=str(tmp_path),
            strategy="mirrored",
            checkpoint_every_steps=2,
        )
        trainer.fit(X, validation=X, **options)

    fit(steps=4, global_batch_size=32)
    trained = {line["step"]: line["loss"] for line in metrics(tmp_path, "eval")}
    before = (tmp_path / "metrics.jsonl").read_bytes()
    monkeypatch.setenv("TF_CONFIG", tf_configs(["chief", "evaluator"])["evaluator"])
    with pytest.raises(SystemExit) as stop:
        fit(steps=4, global_batch_size=32)
    assert stop.value.code == 0
    lines = (tmp_path / "metrics.evaluator.jsonl").read_text().splitlines()
    found = {line["step"]: line["loss"] for line in map(json.loads, lines)}
    assert list(found) == [2, 4] and found[4] == pytest.approx(trained[4], rel=1e-6)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    with pytest.raises(UserError, match="a Loop in task evaluator 0"):
        Loop(steps=1)


@pytest.mark.parametrize(
    ("jobs", "missing"),
    [
        ({"worker": ["a:1", "b:1"], "ps": ["c:1"]}, None),
        ({"chief": ["a:1"], "ps": ["c:1"]}, "no worker besides the chief"),
        ({"worker": ["a:1"], "ps": ["c:1"]}, "no worker besides the chief"),
    ],
)
def test_the_doctor_refuses_what_a_run_refuses(
    monkeypatch: pytest.MonkeyPatch, jobs: dict[str, list[str]], missing: str | None
) -> None:
    task = {"type": next(iter(jobs)), "index": 0}
    text = json.dumps({"cluster": jobs, "task": task})
    monkeypatch.setenv("TF_CONFIG", text)
    monkeypatch.setattr(initialize, "_initialized", False)  # restored after the test
    (finding,) = check_servers(from_tf_config(text))
    if missing is None:
        assert finding.level == "ok"
        run_task_role(1.0)
        return
    assert finding.level == "error" and missing in finding.text
    with pytest.raises(UserError, match=missing):
        run_task_role(1.0)

"""Processes that end with code 0 before their run is finished: each is a failure, named at once."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers import BOUND, environment, run, status
from processes import codes, drill, job, launch, show

pytestmark = pytest.mark.drill
PLACE = "during the training, in fail ("


@pytest.mark.parametrize("fault", [pytest.param("exit", marks=pytest.mark.nightly), "end"])
def test_a_worker_of_the_data_that_ends_with_code_0(tmp_path: Path, fault: str) -> None:
    options = ("--fault", fault, "--fault-rank", 0, "--fault-at", 4, "--data-workers", 2)
    ended = run(drill(tmp_path), *options, "--workdir", tmp_path / "run")
    assert ended.returncode == 1, ended.stderr
    found = {"exit": "sys.exit(0) in a process that reads batches, in fail", "end": "exit code 1"}
    assert found[fault] in ended.stderr and found[fault] in status(tmp_path / "run")["reason"]
    if fault == "end":
        assert "failed: os._exit(0) ended a process that reads batches" in ended.stderr


def test_a_process_of_a_job_that_calls_sys_exit(tmp_path: Path) -> None:
    ended = job(
        drill(tmp_path), "--fault", "exit", "--workdir", tmp_path / "run", check=False, grace=60
    )
    assert codes(ended) == [1, 1]
    chief, worker = ended
    assert f"failed: sys.exit(0) {PLACE}" in worker.output
    assert f"chief exits because worker 0 failed: sys.exit(0) {PLACE}" in chief.output, show(ended)
    assert status(tmp_path / "run")["reason"].startswith("worker 0 failed: sys.exit(0)")


@pytest.mark.parametrize(("processes", "task"), [(1, "chief"), (2, "worker 0")])
def test_the_launcher_names_a_process_that_calls_os_exit(
    tmp_path: Path, processes: int, task: str
) -> None:
    options = ("--fault", "end", "--fault-rank", processes - 1, "--workdir", tmp_path / "run")
    own = ("--max-restarts", 0)
    ended = launch(drill(tmp_path), *options, own=own, processes=processes)
    assert ended.code == 1
    (line,) = (text for text in ended.said if text.startswith(f"{task} ended (code 0)"))
    assert "during the training, without an error: by os._exit, or in native code" in line


def test_without_a_launcher_the_others_name_a_process_that_calls_os_exit(tmp_path: Path) -> None:
    # Each process reports its phase 10 times within the timeout, which is longer than to compile.
    options = ("--fault", "end", "--pause", 0.6, "--workdir", tmp_path / "run")
    ended = job(drill(tmp_path), *options, "--hang-timeout", 60, processes=3, check=False, grace=60)
    assert ended[1].code == 0 and ended[0].code == ended[2].code == 1, show(ended)
    why = "lost the connection to worker 0, which ended without a report during the training ("
    assert why in ended[0].output, show(ended)
    assert why in ended[2].output and "last heard of " in ended[2].output, show(ended)
    assert why in status(tmp_path / "run")["reason"]


EXITS = """
def in_evaluator():
    return '"evaluator", "index"' in os.environ.get("TF_CONFIG", "")


class Exits:
    def __len__(self):
        return 50

    def __getitem__(self, index):
        if index > 20:
            {call}
        return np.zeros(8, np.float32), np.float32(0)


"""


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("sys.exit(0)", "sys.exit(0) during the evaluation, in __getitem__ ("),
        ("os._exit(0)", "during the evaluation, without an error: by os._exit"),
    ],
)
def test_an_evaluator_whose_dataset_ends_it(tmp_path: Path, call: str, why: str) -> None:
    split = "validation=(rows.x[:50], rows.y[:50]),"
    change = (split, split.replace("=", "=Exits() if in_evaluator() else ", 1))
    exits = ("def objective(model", EXITS.format(call=call) + "def objective(model")
    options = ("--evaluated-by", "evaluator", "--workdir", tmp_path / "run")
    own = ("--evaluator", "--max-restarts", 0)
    ended = launch(drill(tmp_path, change, exits), *options, own=own, processes=1)
    said = "\n".join(ended.said)
    assert ended.code == 1, said
    assert "evaluator" in said and why in said, said


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fault", "why"),
    [("exit", "sys.exit(0)"), pytest.param("end", "ended (code 0)", marks=pytest.mark.nightly)],
)
def test_a_trial_of_a_sweep_that_ends_with_code_0(tmp_path: Path, fault: str, why: str) -> None:
    own = ("--set", "learning_rate=0.01,0.02", "--workdir", str(tmp_path / "sweep"))
    options = ("--config", str(drill(tmp_path)), "--fault", fault, "--fault-rank", "0")
    line = [sys.executable, "-m", "spmdtrain.sweep", *options, *own]
    ended = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=BOUND)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert ": failed: " in ended.stdout and why in ended.stdout


SCRIPT = """
import os, sys, threading
import numpy as np, optax
from functools import partial
from flax import nnx
from spmdtrain import Trainer

began, x = threading.Event(), np.ones((8, 1), np.float32)

def callback(event):
    began.set()
    threading.Event().wait(60)

def train():
    Trainer(
        model=partial(nnx.Linear, 1, 1), objective=lambda m, b: {"loss": (m(b) - 1) ** 2},
        optimizer=optax.sgd(0.1), steps=3, global_batch_size=8, workdir=sys.argv[1], quiet=True,
        callbacks={"step": callback} if sys.argv[2] == "open" else {},
    ).fit(x)

thread = threading.Thread(target=train, daemon=True)
thread.start()
began.wait() if sys.argv[2] == "open" else thread.join()
sys.exit(0)
"""


@pytest.mark.parametrize(("kind", "code"), [("open", 1), ("finished", 0)])
def test_an_interpreter_that_ends_while_a_thread_trains(
    tmp_path: Path, kind: str, code: int
) -> None:
    line = [sys.executable, "-c", SCRIPT, str(tmp_path / "run"), kind]
    env = environment(1) | {"PYTHONWARNINGS": "error"}
    ended = subprocess.run(line, env=env, capture_output=True, text=True, timeout=BOUND)
    assert ended.returncode == code, ended.stderr
    found = status(tmp_path / "run")
    assert found["status"] == ("failed" if code else "finished")
    if code:
        assert "failed: Python ended during the training" in ended.stderr
        assert found["reason"] == "Python ended during the training"

"""Runs whose batches are read by worker processes, and their ends."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import (
    BOUND,
    assert_gone,
    command,
    environment,
    metrics,
    read_until,
    run,
    saved_steps,
    small_experiment,
    start,
    status,
)

SLOW = (
    (
        "def build(config):",
        "class Slow:  # only this file has it, and no other process can import this file\n"
        "    def __init__(self, data, seconds):\n"
        "        self.data, self.seconds = data, seconds\n\n"
        "    def __len__(self):\n"
        "        return len(self.data[0])\n\n"
        "    def rows(self, indices):\n"
        "        time.sleep(self.seconds)\n"
        "        return tuple(x[indices] for x in self.data)\n\n\n"
        "def noisy(example, generator):\n"
        "    return example[0] + generator.normal(0, 0.1, 1).astype(np.float32), example[1]\n\n\n"
        "def build(config):",
    ),
    ("        train=data,", "        train=Slow(data, config.pause),\n        augment=noisy,"),
    ("    examples: int = 64", "    pause: float = 0.0\n    examples: int = 64"),
    ("import numpy as np", "import time\n\nimport numpy as np"),
)
LONG = ("--steps", 2000, "--pause", 0.05, "--log-every", 1, "--data-workers", 2)


HANGS = "sleep(1000 if (np.diff(indices) < 0).any() else 0)"  # not in what the start looks at


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """The processes that read the batches of a run."""
    found = subprocess.run(
        ["pgrep", "-P", str(process.pid), "-f", "spawn_main"], capture_output=True, text=True
    )
    return [int(number) for number in found.stdout.split()]


def test_workers_change_no_number_and_outlive_a_signal(tmp_path: Path) -> None:
    experiment = small_experiment(tmp_path, *SLOW)
    alone, workers = tmp_path / "alone", tmp_path / "workers"
    assert run(experiment, "--steps", 60, "--workdir", alone).returncode == 0

    options = ("--steps", 60, "--data-workers", 2, "--workdir", workers)
    process = start(experiment, *options, "--pause", 0.2)
    read_until(process, "step 10/60")
    readers = workers_of(process)
    assert len(readers) == 2
    for number in (process.pid, *readers):  # as Ctrl-C in a terminal does
        os.kill(number, signal.SIGINT)
    output, _ = process.communicate(timeout=BOUND)
    assert process.returncode == 75, output
    assert "leaked" not in output and "Traceback" not in output
    assert_gone(readers)
    assert 10 <= saved_steps(workers)[-1] < 60
    assert run(experiment, *options).returncode == 0
    for split in ("train", "eval"):
        found, expected = (
            [(x["step"], x["loss"]) for x in metrics(folder, split) if x["step"] in (10, 40, 60)]
            for folder in (workers, alone)
        )
        assert found == expected


@pytest.mark.parametrize("target", ["run", "worker"])
def test_no_process_is_left_after_a_kill(tmp_path: Path, target: str) -> None:
    process = start(small_experiment(tmp_path, *SLOW), *LONG, "--workdir", tmp_path / "run")
    read_until(process, "step 5/")
    readers = workers_of(process)
    assert len(readers) == 2
    os.kill(process.pid if target == "run" else readers[0], signal.SIGKILL)
    output, _ = process.communicate(timeout=BOUND)
    assert_gone(readers)
    if target == "worker":
        assert process.returncode == 1
        assert "data_workers: a process that reads batches ended with exit code -9: " in output


def test_a_script_is_not_run_again_by_its_workers(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        """
import jax, numpy as np, optax
from flax import nnx
from spmdtrain import Trainer

jax.config.update("jax_platforms", "cpu")

print("script", flush=True)


class Rows:
    def __len__(self):
        return 64

    def rows(self, indices):
        assert jax.config.jax_platforms == "cpu"  # workers, too, although no variable says so
        return {"x": indices[:, None].astype(np.float32)}


def objective(model, batch):
    return {"loss": model(batch["x"]) ** 2}


trainer = Trainer(
    model=nnx.Linear(1, 1, rngs=nnx.Rngs(0)), objective=objective, optimizer=optax.sgd(1e-5),
    data_workers=2,
)
trainer.fit(Rows(), steps=5, global_batch_size=8)
print("file", __file__)
"""
    )
    env = {name: value for name, value in environment().items() if name != "JAX_PLATFORMS"}
    ended = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("script\n") == 1 and f"file {script}" in ended.stdout


def test_a_process_alone_ends_by_its_hang_timeout_and_by_a_second_signal(tmp_path: Path) -> None:
    experiment = small_experiment(tmp_path, *SLOW)
    experiment.write_text(experiment.read_text().replace("sleep(self.seconds)", HANGS))
    for options in ((), ("--data-workers", 2)):
        ended = run(experiment, "--steps", 5, "--hang-timeout", 30, *options)
        assert ended.returncode == 1
        assert "no progress for 30 s: the process is in load at step 1" in ended.stderr
        assert 'File "' in ended.stderr and "Thread 0x" in ended.stderr

    process = start(experiment, "--steps", 5, "--data-workers", 2)
    until = time.monotonic() + BOUND
    while len(readers := workers_of(process)) < 2 and time.monotonic() < until:
        time.sleep(0.5)
    assert len(readers) == 2
    time.sleep(5)  # until the run waits for its first batch
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(1)
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGTERM
    assert_gone(readers)


def test_a_process_whose_output_is_not_read_and_an_evaluator_end_by_hang_timeouts(
    tmp_path: Path,
) -> None:
    experiment, workdir = small_experiment(tmp_path), tmp_path / "run"
    own = ("--steps", 2000, "--log-every", 1, "--checkpoint-every-steps", 5)
    with start(experiment, *own, "--hang-timeout", 30, "--workdir", workdir) as blocked:
        assert blocked.wait(200) == 1  # although the reason is not read either
    why = r"no progress for 30 s: the process is in .*step \d+: its standard output is not read"
    assert re.fullmatch(why, status(workdir)["reason"])

    hangs = ("sleep(self.seconds)", "sleep(1000 if indices[0] > 0 else 0)")
    validation = ("validation=data", "validation=Slow(data, 0)")
    evaluates = small_experiment(tmp_path, *SLOW, hangs, validation, name="evaluates")
    task = {"cluster": {"chief": ["a:1"]}, "task": {"type": "evaluator", "index": 0}}
    ended = subprocess.run(
        command(evaluates, "--hang-timeout", 30, "--workdir", workdir),
        env=environment() | {"TF_CONFIG": json.dumps(task)},
        capture_output=True,
        text=True,
        timeout=BOUND,
    )
    assert ended.returncode == 1
    assert "no progress for 30 s: the process is in load at step" in ended.stderr


@pytest.mark.nightly
@pytest.mark.usefixtures("root")
def test_shared_memory_that_is_too_small_is_named(tmp_path: Path) -> None:
    own = command(small_experiment(tmp_path), "--data-workers", 2)
    mount = 'mount -t tmpfs -o size=4k none /dev/shm && exec "$@"'
    ended = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount, "sh", *own],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=BOUND,
    )
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == (
        "failed: data_workers: the shared memory of processes (/dev/shm) is full: give it more, "
        "or use data_threads"
    )

"""Training by parameter servers, in real processes: what it makes, and what it survives."""

import contextlib
import importlib.util
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import DIGITS, MNIST, command, environment, metrics, run, status
from processes import launch, launching
from server_jobs import BOUND, Lines, made, of_task, send, text_of, until

from spmdtrain.launch.task_env import tf_configs, training_tasks

pytestmark = [
    pytest.mark.drill,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]
ASYNCHRONOUS = ("--strategy", "parameter_server")


def losses(workdir: Path) -> dict[int, float]:
    return {x["step"]: x["loss"] for x in metrics(workdir, "train")}


def report(workdir: Path) -> Any:
    return json.loads((workdir / "servers.json").read_text())


@contextlib.contextmanager
def training(
    workdir: Path, *options: object, launcher: tuple[object, ...] = ()
) -> Iterator[tuple[subprocess.Popen[str], Lines]]:
    """Two workers and two servers on the digits."""
    line = command(DIGITS, *options, *ASYNCHRONOUS, "--workdir", workdir)
    own = ("--ps", 2, *launcher)
    with launching(line, *own, processes=3, devices=1) as (process, lines):
        yield process, lines


# -- what it makes ---------------------------------------------------------------------------------


def test_without_staleness_it_is_what_mirrored_is(tmp_path: Path) -> None:
    """Two workers, each of which mirrors the model over two devices."""
    options = ("--steps", 60, "--log-every", 1)
    fresh = ("--servers.max-staleness", 0, "--servers.partitioner", "fixed_shards")
    served = launch(
        DIGITS,
        *(*options, *ASYNCHRONOUS, *fresh, "--workdir", tmp_path / "served"),
        own=["--ps", 2],
        processes=3,
        devices=2,
    )
    assert served.code == 0, served.output
    mirrored = launch(DIGITS, *options, "--workdir", tmp_path / "mirrored", processes=1)
    assert mirrored.code == 0, mirrored.output
    found, expected = losses(tmp_path / "served"), losses(tmp_path / "mirrored")
    assert list(found) == list(range(1, 61))
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-5)
    assert report(tmp_path / "served")["staleness"] == {"0": 60}
    for split in ("eval", "test"):
        (one,), (other,) = (metrics(tmp_path / x, split)[-1:] for x in ("served", "mirrored"))
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
    assert not of_task("ps 0") and not of_task("worker 0")


def test_a_run_goes_from_mirrored_to_servers_and_back(tmp_path: Path) -> None:
    one = ("--log-every", 1, "--workdir", tmp_path / "changing")
    assert run(DIGITS, "--steps", 20, *one, devices=1).returncode == 0
    options = ("--steps", 40, *one, *ASYNCHRONOUS, "--servers.max-staleness", 0)
    served = launch(DIGITS, *options, own=["--ps", 2], processes=3)
    assert served.code == 0, served.output
    assert "resumed from step 20" in served.output
    again = launch(DIGITS, *options, own=["--ps", 2], processes=3)  # nothing is left to do
    assert again.code == 0 and "[launch] killed" not in again.output, again.output
    back = run(DIGITS, "--steps", 60, *one, devices=1)
    assert back.returncode == 0 and "resumed from step 40" in back.stdout, back.stdout
    same = run(DIGITS, "--steps", 60, *one[:2], "--workdir", tmp_path / "same", devices=1)
    assert same.returncode == 0
    found, expected = losses(tmp_path / "changing"), losses(tmp_path / "same")
    assert list(found) == list(range(1, 61))
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-4)


def test_mnist_is_learned_as_well_as_by_mirrored(mnist: Path, tmp_path: Path) -> None:
    options = ("--data-dir", mnist, "--epochs", 3, "--eval-every-steps", 1000, "--log-every", 100)
    mirrored = launch(MNIST, *options, "--workdir", tmp_path / "mirrored", processes=1)
    served = (*options, *ASYNCHRONOUS, "--workdir", tmp_path / "served")
    asynchronous = launch(MNIST, *served, own=["--ps", 2], processes=3)
    assert mirrored.code == asynchronous.code == 0, asynchronous.output
    assert any(int(n) > 0 for n in report(tmp_path / "served")["staleness"])
    found = {}
    for name in ("mirrored", "served"):  # of 1,000 images each: together less is up to chance
        logged = [metrics(tmp_path / name, split)[-1]["accuracy"] for split in ("eval", "test")]
        found[name] = np.mean(logged)
    assert abs(found["served"] - found["mirrored"]) <= 0.01, found
    assert found["served"] > 0.92


SCRIPT = """
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
seen = []
result = trainer.fit((x, y), steps=30, validation=(x, y), test=(x, y), global_batch_size=32)
print("the chief alone:", result.step, len(trainer.predict((x, y))))
"""


def test_a_script_is_the_same_for_all_tasks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    line = [sys.executable, "-u", str(script)]
    with launching([*line, "parameter_server", str(tmp_path / "a")], "--ps", 1, processes=3) as (
        process,
        lines,
    ):
        assert process.wait(BOUND) == 0, text_of(lines)
    said = [text for _, text in lines if "the chief alone" in text]
    assert said == ["[chief] the chief alone: 30 256"]
    with launching([*line, "mirrored", str(tmp_path / "b")], processes=1) as (process, lines):
        assert process.wait(BOUND) == 0, text_of(lines)
    found, expected = losses(tmp_path / "a"), losses(tmp_path / "b")
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-5)
    for split in ("epoch", "eval", "test"):  # evaluated with the moving average
        (one,), (other,) = (metrics(tmp_path / x, split)[-1:] for x in "ab")
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)


def test_an_experiment_brings_the_modules_beside_it(tmp_path: Path) -> None:
    text, line = DIGITS.read_text(), "from spmdtrain.models import MLP"
    assert text.count(line) == text.count("partial(MLP,") == 1
    (tmp_path / "mylayers.py").write_text(f"{line}\n\n\nclass Mine(MLP):\n    pass\n")
    path = tmp_path / "mine.py"
    text = text.replace("partial(MLP,", "partial(Mine,")
    path.write_text(text.replace(line, f"from mylayers import Mine\n{line}"))
    options = ("--steps", 20, *ASYNCHRONOUS, "--workdir", tmp_path / "run")
    found = launch(path, *options, own=["--ps", 1], processes=2)
    assert found.code == 0, found.output
    assert report(tmp_path / "run")["updates"] == 20


def test_staleness_is_reported_and_an_evaluator_evaluates_each_checkpoint(tmp_path: Path) -> None:
    options = ("--steps", 300, "--log-every", 50, "--servers.max-staleness", 3)
    evaluated = ("--checkpoint-every-steps", 100, "--evaluated-by", "evaluator")
    with training(tmp_path, *options, *evaluated, launcher=("--evaluator",)) as (process, lines):
        assert process.wait(BOUND) == 0, text_of(lines)
    evaluations = (tmp_path / "metrics.evaluator.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in evaluations] == [100, 200, 300]
    assert not metrics(tmp_path, "eval")
    logged = metrics(tmp_path, "train")
    counts = [line["staleness_counts"] for line in logged]
    assert [sum(of.values()) for of in counts] == [1, 49, 50, 50, 50, 50, 50]
    assert all(int(n) <= 3 for of in counts for n in of)
    found = report(tmp_path)
    assert sum(found["staleness"].values()) == sum(found["batches"].values()) == 300
    params = sum(of["params_bytes"] for of in found["servers"].values())
    assert found["pulled_bytes_per_step"] == found["pushed_bytes_per_step"] == params
    assert "staleness of the updates" in text_of(lines)


# -- what it survives ------------------------------------------------------------------------------


def check_ledgers(workdir: Path, steps: int) -> Any:
    """Each server has added each batch once; the log tells of all."""
    found = report(workdir)
    assert [of["added"] for of in found["servers"].values()] == [steps, steps]
    assert found["updates"] == sum(found["batches"].values()) == steps
    assert list(losses(workdir)) == [1, *range(10, steps + 1, 10)]
    assert losses(workdir)[steps // 10 * 10] < 0.2
    return found


def test_each_batch_is_added_once_whichever_process_is_killed(tmp_path: Path) -> None:
    rounds, draw = 5, np.random.default_rng(0)
    with training(tmp_path, "--steps", 100_000, "--eval-every-steps", 500) as (process, lines):
        until(lambda: made(lines) >= 100, lines)
        for _ in range(rounds):
            name = f"worker {draw.integers(2)}"
            until(lambda name=name: is_there(name, lines), lines)  # type: ignore[misc]
            time.sleep(draw.uniform(0.0, 0.5))
            send(signal.SIGKILL, name, "ray::WorkerActor")
            until(lambda name=name: not is_there(name, lines), lines)  # type: ignore[misc]
        # Without any worker, the batches in progress could not complete, nor the state be saved.
        until(lambda: is_there("worker 0", lines) or is_there("worker 1", lines), lines)
        process.send_signal(signal.SIGTERM)
        assert process.wait(BOUND) == 75, text_of(lines)
    check_ledgers(tmp_path, status(tmp_path)["step"])
    output = text_of(lines)
    assert len(re.findall(r"worker \d is lost", output)) >= rounds
    assert len(re.findall(r"batch \d+ is reassigned", output)) >= rounds // 2
    assert "raylet" not in output and "restart" not in output


def is_there(name: str, lines: Lines) -> bool:
    output = text_of(list(lines))
    return output.count(f"{name} is lost") == output.count(f"{name} is back")


def test_a_stopped_worker_delays_neither_evaluations_nor_the_log_nor_the_end(
    tmp_path: Path,
) -> None:
    options = ("--steps", 1_000_000, "--eval-every-steps", 200)
    with training(tmp_path, *options) as (process, lines):
        until(lambda: made(lines) >= 150, lines)
        send(signal.SIGSTOP, "worker 1", "ray::WorkerActor")
        stopped = made(lines)
        # Over four evaluations, each of which waits for all earlier batches. A backup task makes
        # the stopped worker's batch, after which all that has been made is logged.
        until(lambda: made(lines) >= stopped + 900, lines)
        send(signal.SIGCONT, "worker 1", "ray::WorkerActor")
        resumed = made(lines)
        until(lambda: made(lines) >= resumed + 1000, lines)
        send(signal.SIGSTOP, "worker 1", "ray::WorkerActor")
        process.send_signal(signal.SIGTERM)
        assert process.wait(BOUND) == 75, text_of(lines)
    found = status(tmp_path)
    assert found["status"] == "preempted" and found["step"] >= resumed + 1000, found
    assert f"saved step {found['step']:,}" in text_of(lines)
    # Before it was stopped worker 1 had made fewer.
    assert check_ledgers(tmp_path, found["step"])["batches"]["worker 1"] > 300
    assert re.search(
        r"\[chief\] worker 1: batch \d+ has taken more than .*; worker 0 computes it",
        text_of(lines),
    )


def test_a_worker_whose_task_is_killed_rejoins_and_the_others_continue(tmp_path: Path) -> None:
    steps = 2500
    with training(tmp_path, "--steps", steps, "--eval-every-steps", 1000) as (process, lines):
        until(lambda: made(lines) >= 300, lines)
        send(signal.SIGKILL, "worker 1")
        assert process.wait(BOUND) == 0, text_of(lines)
    output = text_of(lines)
    killed = re.search(
        r"worker 1 was killed \(SIGKILL\) at step (\d+); the others continue", output
    )
    assert killed and 250 <= int(killed[1]) <= 1000, output
    assert "restart 1 of 3 of worker 1" in output
    assert re.search(r"\[chief\] worker 1 is lost", output)
    assert output.count("; restart ") == 1 and "resumed" not in output
    check_ledgers(tmp_path, steps)


def test_after_a_lost_server_and_a_lost_chief_the_job_resumes_from_its_checkpoint(
    tmp_path: Path,
) -> None:
    options = ("--steps", 1200, "--checkpoint-every-steps", 200, "--eval-every-steps", 1000)
    with training(tmp_path, *options) as (process, lines):
        until(lambda: made(lines) >= 300, lines)
        send(signal.SIGKILL, "ps 1", "ray::ServerActor")
        until(lambda: text_of(list(lines)).count("resumed from step ") == 1, lines)
        until(lambda: made(lines) >= 600, lines)
        send(signal.SIGKILL, "chief", "spmdtrain.run")
        assert process.wait(BOUND) == 0, text_of(lines)
    output = text_of(lines)
    resumed = [int(step) for step in re.findall(r"resumed from step ([\d,]+) of", output)]
    assert len(resumed) == 2 and all(step % 200 == 0 for step in resumed), output
    assert resumed[0] >= 200 and resumed[1] >= 400, output
    assert "restart 1 of 3" in output
    assert "a parameter server is lost, and its part of the state with it" in output
    assert list(losses(tmp_path)) == [1, *range(10, 1201, 10)]
    assert status(tmp_path)["status"] == "finished"


def test_after_a_signal_it_saves_and_resumes(tmp_path: Path) -> None:
    options = ("--steps", 1000, "--eval-every-steps", 1000)
    with training(tmp_path, *options) as (process, lines):
        until(lambda: made(lines) >= 100, lines)
        for task in ("worker 1", "ps 0"):  # Slurm sends it to all tasks of a job
            send(signal.SIGUSR1, task)
        until(lambda: made(lines) >= 200, lines)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(BOUND) == 75, text_of(lines)
    assert "lost" not in text_of(lines) and "(SIGUSR1)" not in text_of(lines)
    at = status(tmp_path)
    assert at["status"] == "preempted" and 200 <= at["step"] < 1000
    with training(tmp_path, *options) as (process, lines):
        assert process.wait(BOUND) == 0, text_of(lines)
    assert f"resumed from step {at['step']}" in text_of(lines)
    assert list(losses(tmp_path)) == [1, *range(10, 1001, 10)]


def test_asked_to_stop_while_a_server_hangs_it_ends_with_what_was_saved(tmp_path: Path) -> None:
    options = ("--steps", 100_000, "--checkpoint-every-steps", 200)
    with training(tmp_path, *options) as (process, lines):
        until(lambda: made(lines) >= 500, lines)
        send(signal.SIGSTOP, "ps 1", "ray::ServerActor")
        # The chief waits for a batch, or for the state if an evaluation is due.
        until(
            lambda: re.search(r"for 20 s: no answer from ps 1$", text_of(list(lines)), re.M), lines
        )
        process.send_signal(signal.SIGTERM)
        asked = time.monotonic()
        assert process.wait(BOUND) == 75, text_of(lines)
        assert time.monotonic() - asked < 40  # 15 of them for what does not come in
    assert "the state cannot be saved, because the" in text_of(lines)
    assert not any(of_task(name) for name in training_tasks(3, 2))
    saved = sorted(int(at.name) for at in (tmp_path / "checkpoints").iterdir() if at.name.isdigit())
    assert saved and all(step % 200 == 0 for step in saved) and saved[-1] >= 400
    assert status(tmp_path)["status"] == "preempted"


def test_no_task_is_left_when_the_launcher_is_killed(tmp_path: Path) -> None:
    tasks = training_tasks(3, 2)
    with training(tmp_path, "--steps", 100_000) as (process, lines):
        until(lambda: made(lines) >= 50, lines)
        assert all(of_task(name) for name in tasks)
        process.kill()
        process.wait()
        # Ray's own agents notice some seconds later that what they served is gone.
        until(lambda: not any(of_task(name) for name in tasks), lines)


def test_a_worker_may_come_late_and_without_a_launcher(tmp_path: Path) -> None:
    names = training_tasks(3, 1)
    configs = tf_configs(names)
    line = command(
        DIGITS, "--steps", 1500, *ASYNCHRONOUS, "--workdir", tmp_path, "--eval-every-steps", 1000
    )
    running = {}

    def start(name: str) -> None:
        environ = environment(1) | {
            "TF_CONFIG": configs[name].replace("127.0.0.1", "localhost"),
            "SPMDTRAIN_TASK": f"late {name}",
        }
        with (tmp_path / "log.txt").open("a") as log:
            running[name] = subprocess.Popen(
                line, env=environ, stdout=log, stderr=subprocess.STDOUT
            )

    def said() -> str:
        return (tmp_path / "log.txt").read_text()

    try:
        for name in names:
            if name != "worker 1":
                start(name)
        until(lambda: "step 10/" in said(), [])
        start("worker 1")
        ended = {name: process.wait(BOUND) for name, process in running.items()}
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    assert ended == dict.fromkeys(names, 0), said()
    assert report(tmp_path)["batches"].get("worker 1", 0) > 10


def test_asked_to_stop_while_servers_are_awaited_the_chief_ends(tmp_path: Path) -> None:
    config = tf_configs(training_tasks(2, 1))["chief"]
    port = json.loads(config)["cluster"]["chief"][0].rpartition(":")[2]
    chief = subprocess.Popen(
        command(DIGITS, "--steps", 10, *ASYNCHRONOUS, "--workdir", tmp_path),
        env=environment(1) | {"TF_CONFIG": config},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        until(lambda: listens(int(port)), [])
        chief.send_signal(signal.SIGTERM)
        output, _ = chief.communicate(timeout=BOUND)  # it would wait for five minutes
    finally:
        chief.kill()
        chief.wait()
    assert chief.returncode == 75, output
    assert "SIGTERM: nothing saved" in output and "saved step" not in output


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


# -- what ends it ----------------------------------------------------------------------------------

WRONG = '''"""An objective that is wrong in some way."""

from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
import numpy as np
import optax

from spmdtrain import Experiment, RunConfig
from spmdtrain.models import MLP


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    steps: int | None = 50
    global_batch_size: int | None = 8
    fault: str = ""


def objective(model, batch):
    x, y, bad = batch
    return {"loss": (model(x)[:, 0] - y) ** 2 + bad}


def build(config):
    x = np.ones((80, 4), np.float32)
    bad = np.zeros(80, np.float32)
    if config.fault == "nan":
        bad[33] = np.nan

    def objective(model, batch):
        if config.fault == "error":
            raise ZeroDivisionError("in the objective")
        x, y, bad = batch
        return {"loss": (model(x)[:, 0] - y) ** 2 * (1 + bad)}

    optimizer = optax.adam(1e-2)
    if config.fault == "clip":
        optimizer = optax.chain(optax.scale_by_adam(), optax.clip_by_global_norm(1.0))
    return Experiment(
        model=partial(MLP, 4, (8,), 1),
        objective=objective,
        optimizer=optimizer,
        train=(x, x.sum(1), bad),
    )
'''


@pytest.mark.parametrize(
    ("fault", "code", "message"),
    [
        ("nan", 3, r"stopped: step 1?\d: loss and .*not finite .*\(loss nan; params/"),
        ("error", 1, r"ZeroDivisionError: \S+wrong.py:\d+, in objective: raise ZeroDivisionError"),
        ("clip", 2, r"error: strategy parameter_server: the optimizer's clip_by_global_norm needs"),
    ],
)
def test_what_is_wrong_is_said_once_and_ends_all(
    tmp_path: Path, fault: str, code: int, message: str
) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(WRONG)
    line = command(path, "--fault", fault, *ASYNCHRONOUS, "--workdir", tmp_path / "run")
    with launching(line, "--ps", 2, "--max-restarts", 0, processes=2) as (process, lines):
        assert process.wait(BOUND) == code, text_of(lines)
    assert re.search(r"\[chief\] .*" + message, text_of(lines)), text_of(lines)
    assert not any(of_task(name) for name in training_tasks(2, 2))

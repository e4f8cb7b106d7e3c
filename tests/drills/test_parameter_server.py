"""Training by parameter servers, in real processes: what it makes, and what it survives."""

import contextlib
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import BOUND, DIGITS, MNIST, command, environment, metrics, run, status
from processes import launch, launching
from server_jobs import Lines, made, of_task, send, stale_updates, text_of, until

from spmdtrain.launch.task_env import tf_configs, training_tasks
from spmdtrain.record.run import Run

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
    workdir: Path, *options: object, workers: int = 2, launcher: tuple[object, ...] = ()
) -> Iterator[tuple[subprocess.Popen[str], Lines]]:
    """Workers and two servers on the digits."""
    line = command(DIGITS, *options, *ASYNCHRONOUS, "--workdir", workdir)
    own = ("--ps", 2, *launcher)
    with launching(line, *own, processes=1 + workers, devices=1) as (process, lines):
        yield process, lines


# -- what it makes ---------------------------------------------------------------------------------


def with_own_module(folder: Path) -> Path:
    """The experiment of the digits, whose model is of a module beside it."""
    text, line = DIGITS.read_text(), "from spmdtrain.models import MLP"
    assert text.count(line) == text.count("partial(MLP,") == 1
    (folder / "mylayers.py").write_text(f"{line}\n\n\nclass Mine(MLP):\n    pass\n")
    path = folder / "mine.py"
    text = text.replace("partial(MLP,", "partial(Mine,")
    path.write_text(text.replace(line, f"from mylayers import Mine\n{line}"))
    return path


@pytest.mark.nightly
def test_a_run_goes_from_mirrored_to_servers_and_back(tmp_path: Path) -> None:
    """Without staleness it has the losses of a run that is mirrored from beginning to end.

    Each of the two workers mirrors the model over two devices.
    """
    experiment = with_own_module(tmp_path)
    logged = ("--log-every", 1, "--eval-every-steps", 20)
    same = run(experiment, *logged, "--steps", 60, "--workdir", tmp_path / "same", devices=1)
    assert same.returncode == 0, same.stdout
    changing = (experiment, *logged, "--workdir", tmp_path / "changing")
    first = run(*changing, "--steps", 20, devices=1)
    assert first.returncode == 0, first.stdout
    fresh = ("--servers.max-staleness", 0, "--servers.partitioner", "fixed_shards")
    by_servers = (*changing, "--steps", 40, *ASYNCHRONOUS, *fresh)
    served = launch(*by_servers, own=["--ps", 2], processes=3, devices=2)
    assert served.code == 0, served.output
    assert "resumed from step 20" in served.output
    found = report(tmp_path / "changing")
    assert found["staleness"] == {"0": 20} and found["updates"] == 20
    again = launch(*by_servers, own=["--ps", 1])  # nothing is left to do
    assert again.code == 0 and "[launch] killed" not in again.output, again.output
    assert not of_task("ps 0") and not of_task("worker 0")
    back = run(*changing, "--steps", 60, devices=1)
    assert back.returncode == 0 and "resumed from step 40" in back.stdout, back.stdout
    changed, expected = losses(tmp_path / "changing"), losses(tmp_path / "same")
    assert list(changed) == list(range(1, 61))
    assert list(changed.values()) == pytest.approx(list(expected.values()), rel=1e-5)
    for split, steps in (("eval", [20, 40, 60]), ("test", [60])):
        own, others = (
            {x["step"]: x["loss"] for x in metrics(tmp_path / of, split)}
            for of in ("changing", "same")
        )
        assert [own[step] for step in steps] == pytest.approx(
            [others[step] for step in steps], rel=1e-4
        )


KERAS = '''"""A compiled Keras model with a layer that Keras cannot write to a file."""

import os
from dataclasses import dataclass

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np
import optax

from spmdtrain import Experiment, RunConfig


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    steps: int | None = 6
    global_batch_size: int | None = 8
    log_every: int = 1


class Scaled(keras.layers.Layer):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def call(self, x):
        return self.scale(x)


def build(config):
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    layers = [
        keras.layers.Dense(8, kernel_regularizer="l2"),
        Scaled(lambda x: 2 * x),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(2),
    ]
    model = keras.Sequential([keras.Input((4,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, metrics=["accuracy"])
    train = (x, (x.sum(1) > 0).astype(np.int32))
    return Experiment.from_keras(model, optimizer=optax.sgd(0.1), train=train)
'''


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="Keras is not installed")
def test_a_keras_model_trains_with_servers_as_on_one_device(tmp_path: Path) -> None:
    experiment = tmp_path / "compiled.py"
    experiment.write_text(KERAS)
    alone = run(experiment, "--workdir", tmp_path / "alone", devices=1)
    assert alone.returncode == 0, alone.stdout
    options = (*ASYNCHRONOUS, "--servers.max-staleness", 0, "--workdir", tmp_path / "served")
    served = launch(experiment, *options, own=["--ps", 1], processes=3)
    assert served.code == 0, served.output
    found, expected = losses(tmp_path / "served"), losses(tmp_path / "alone")
    assert list(found) == list(expected) == list(range(1, 7))
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-5)


@pytest.mark.nightly
def test_mnist_is_learned_as_well_as_by_mirrored(mnist: Path, tmp_path: Path) -> None:
    options = ("--data-dir", mnist, "--epochs", 2, "--eval-every-steps", 1000, "--log-every", 100)
    mirrored = launch(MNIST, *options, "--workdir", tmp_path / "mirrored", processes=1)
    served = (*options, *ASYNCHRONOUS, "--workdir", tmp_path / "served")
    asynchronous = launch(MNIST, *served, own=["--ps", 2], processes=3)
    assert mirrored.code == asynchronous.code == 0, asynchronous.output
    made_by = report(tmp_path / "served")
    # On a busy machine one worker may start after the other has made all batches.
    assert any(int(n) > 0 for n in made_by["staleness"]) or len(made_by["batches"]) == 1
    found = {}
    for name in ("mirrored", "served"):  # of 1,000 images each: together less is up to chance
        logged = [metrics(tmp_path / name, split)[-1]["accuracy"] for split in ("eval", "test")]
        found[name] = np.mean(logged)
    assert abs(found["served"] - found["mirrored"]) <= 0.01, found
    assert found["served"] > 0.92


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_each_batch_is_added_once_though_workers_are_killed_and_stopped(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    with training(tmp_path, "--steps", 1_000_000, "--eval-every-steps", 100) as (process, lines):

        def until_both_work() -> int:
            """Returns a step after which both have made batches."""
            step = made(lines)
            until(lambda: stale_updates(tmp_path, step) >= 20, lines)
            return step

        until_both_work()
        for task in ("worker 1", "ps 0"):  # Slurm sends it to all tasks of a job
            send(signal.SIGUSR1, task)
        signaled = made(lines)
        until(lambda: made(lines) >= signaled + 100, lines)
        assert "lost" not in text_of(lines)

        kills = 0  # of workers' processes, until a batch of one was in progress
        while kills < 2 or not re.search(r"batch \d+ is reassigned", text_of(list(lines))):
            name = f"worker {draw.integers(2)}"
            until(lambda name=name: is_there(name, lines), lines)  # type: ignore[misc]
            time.sleep(draw.uniform(0.0, 0.5))
            send(signal.SIGKILL, name, "ray::WorkerActor")
            kills += 1
            until(lambda name=name: not is_there(name, lines), lines)  # type: ignore[misc]
        until(lambda: is_there("worker 0", lines) and is_there("worker 1", lines), lines)
        output = text_of(list(lines))
        assert len(re.findall(r"worker \d is lost", output)) == kills
        assert "raylet" not in output and "restart" not in output

        until_both_work()
        before, at = made(lines), len(lines)
        send(signal.SIGKILL, "worker 1")  # the whole task, which the launcher starts again
        until(lambda: "[chief] worker 1 is back" in text_of(lines[at:]), lines)
        output = text_of(list(lines))
        killed = re.search(
            r"worker 1 was killed \(SIGKILL\) at step (\d+); the others continue; "
            r"restart 1 of 3 of worker 1",
            output,
        )
        assert killed and before / 2 <= int(killed[1]) <= made(lines) + 10, output
        assert output.count("; restart ") == 1 and "resumed" not in output
        later = text_of(lines[at:]).partition("[chief] worker 1 is lost")[2]
        assert "[chief] step " in later.partition("[chief] worker 1 is back")[0], output

        until_both_work()
        at = len(lines)
        send(signal.SIGSTOP, "worker 1", "ray::WorkerActor")
        stopped = made(lines)
        # Over two evaluations, each of which waits for all earlier batches. A backup task makes
        # the stopped worker's batch, after which all that has been made is logged.
        until(lambda: made(lines) >= stopped + 300, lines)
        assert re.search(
            r"\[chief\] worker 1: batch \d+ has taken more than .*; worker 0 computes it",
            text_of(lines[at:]),
        )
        send(signal.SIGCONT, "worker 1", "ray::WorkerActor")
        resumed = until_both_work()
        send(signal.SIGSTOP, "worker 1", "ray::WorkerActor")
        process.send_signal(signal.SIGUSR1)
        assert process.wait(BOUND) == 75, text_of(lines)
    assert "(SIGUSR1)" not in text_of(lines)
    found = status(tmp_path)
    saved = found["step"]
    assert found["status"] == "preempted" and saved > resumed, found
    assert f"saved step {saved:,}" in text_of(lines)
    check_ledgers(tmp_path, saved)
    steps = saved // 10 * 10 + 20
    more = run(DIGITS, "--steps", steps, "--workdir", tmp_path, devices=1)
    assert more.returncode == 0 and f"resumed from step {saved} of" in more.stdout, more.stdout
    assert list(losses(tmp_path)) == [1, *range(10, steps + 1, 10)]


def is_there(name: str, lines: Lines) -> bool:
    output = text_of(list(lines))
    return output.count(f"{name} is lost") == output.count(f"{name} is back")


@pytest.mark.parametrize(
    "kills_chief", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["server", "both"]
)
def test_a_job_survives_its_server_and_its_chief_and_ends_with_its_launcher(
    tmp_path: Path, kills_chief: bool
) -> None:
    options = ("--steps", 1_000_000, "--checkpoint-every-steps", 20, "--eval-every-steps", 1000)
    with training(tmp_path, *options, workers=1) as (process, lines):

        def until_resumed(times: int) -> int:
            """Returns the step from which a restarted job has resumed."""
            pattern = r"resumed from step (\d+) of"
            until(lambda: len(re.findall(pattern, text_of(list(lines)))) == times, lines)
            return int(re.findall(pattern, text_of(list(lines)))[-1])

        until(lambda: made(lines) >= 60, lines)  # a save begins after the one before has ended
        send(signal.SIGKILL, "ps 1", "ray::ServerActor")
        first, at = until_resumed(1), len(lines)
        assert first >= 20 and first % 20 == 0, text_of(lines)
        output = text_of(list(lines))
        assert "restart 1 of 3" in output
        assert "a parameter server is lost, and its part of the state with it" in output

        resumed = first
        if kills_chief:
            until(lambda: made(lines[at:]) >= first + 60, lines)
            send(signal.SIGKILL, "chief", "spmdtrain.run")
            resumed, at = until_resumed(2), len(lines)
            assert resumed >= first + 20 and resumed % 20 == 0, text_of(lines)

        until(lambda: made(lines[at:]) >= resumed + 20, lines)
        tasks = training_tasks(2, 2)
        assert all(of_task(name) for name in tasks)
        process.kill()
        process.wait()
        # Ray's own agents notice some seconds later that what they served is gone.
        until(lambda: not any(of_task(name) for name in tasks), lines)
    steps = list(losses(tmp_path))
    assert steps == [1, *range(10, steps[-1] + 1, 10)] and steps[-1] >= resumed + 20


@pytest.mark.nightly
def test_asked_to_stop_while_a_server_hangs_it_ends_with_what_was_saved(tmp_path: Path) -> None:
    options = ("--steps", 1_000_000, "--checkpoint-every-steps", 50)
    with training(tmp_path, *options, workers=1) as (process, lines):
        until(lambda: made(lines) >= 150, lines)
        send(signal.SIGSTOP, "ps 1", "ray::ServerActor")
        # The chief waits for a batch, or for the state if an evaluation is due.
        until(
            lambda: re.search(r"for 20 s: no answer from ps 1$", text_of(list(lines)), re.M), lines
        )
        process.send_signal(signal.SIGTERM)
        asked = time.time()
        assert process.wait(BOUND) == 75, text_of(lines)
    (at,) = [at for at, text in lines if "the state cannot be saved, because the" in text]
    assert at - asked < 40  # 15 of them for what does not come in
    assert not any(of_task(name) for name in training_tasks(2, 2))
    saved = sorted(int(at.name) for at in (tmp_path / "checkpoints").iterdir() if at.name.isdigit())
    assert saved and all(step % 50 == 0 for step in saved) and saved[-1] >= 50
    assert status(tmp_path)["status"] == "preempted"


def test_a_worker_may_come_late_and_without_a_launcher(tmp_path: Path) -> None:
    names = training_tasks(3, 1)
    configs = tf_configs(names)
    line = command(
        *(DIGITS, "--steps", 1_000_000, *ASYNCHRONOUS, "--workdir", tmp_path),
        *("--eval-every-steps", 1000),
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
        assert not stale_updates(tmp_path)
        start("worker 1")
        until(lambda: stale_updates(tmp_path) >= 20, [])
        niceness = {
            os.getpriority(os.PRIO_PROCESS, pid)
            for name in ("late ps 0", "late worker 1")
            for pid, line in of_task(name).items()
            if "ray::ServerActor" in line or "ray::WorkerActor" in line
        }
        running["chief"].send_signal(signal.SIGTERM)
        ended = {name: process.wait(BOUND) for name, process in running.items()}
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    assert ended == dict.fromkeys(names, 75), said()
    assert report(tmp_path)["batches"]["worker 1"] >= 10
    # Ray's default would let other processes of the host take the CPU time of the actors.
    assert niceness == {os.getpriority(os.PRIO_PROCESS, 0)}


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

import jax.numpy as jnp
import numpy as np
import optax
import ray  # before the command, which sets Ray's environment

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

    def model(rngs):
        if config.fault == "exit" and ray.is_initialized():  # in a worker
            raise SystemExit(0)
        return MLP(4, (8,), 1, rngs=rngs)

    return Experiment(
        model=model,
        objective=objective,
        optimizer=optimizer,
        train=(x, x.sum(1), bad),
    )
'''


@pytest.mark.parametrize(
    ("fault", "code", "message"),
    [
        ("nan", 3, r"stopped: step 1?\d: loss and .*not finite .*\(loss nan; params/"),
        pytest.param(
            *("error", 1),
            r"ZeroDivisionError: \S+wrong.py:\d+, in objective: raise ZeroDivisionError",
            marks=pytest.mark.nightly,
        ),
        ("exit", 1, r"RuntimeError: sys.exit\(0\) in a worker, in model"),
        ("clip", 2, r"error: strategy parameter_server: the optimizer's clip_by_global_norm needs"),
    ],
)
def test_what_is_wrong_is_said_once_and_ends_all(
    tmp_path: Path, fault: str, code: int, message: str
) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(WRONG)
    line = command(path, "--fault", fault, *ASYNCHRONOUS, "--workdir", tmp_path / "run")
    servers = 2 if fault == "clip" else 1  # a single one has the whole gradient
    with launching(line, "--ps", servers, "--max-restarts", 0, processes=2) as (process, lines):
        assert process.wait(BOUND) == code, text_of(lines)
    assert re.search(r"\[chief\] .*" + message, text_of(lines)), text_of(lines)
    assert not re.search(r"finished|\(code 0\)", text_of(lines)), text_of(lines)
    assert not any(of_task(name) for name in training_tasks(2, servers))


BATCH = "        x, y, bad = batch\n"
SLOW = f"""{BATCH}
        from jax import lax

        long = lax.fori_loop(0, 100, lambda _, a: a @ a / 500, jnp.ones((500, 500)) + bad[0])
        y = y + 0 * long[0, 0]
"""


def test_the_time_of_the_workers_counts_as_steps(tmp_path: Path) -> None:
    path = tmp_path / "slow.py"
    path.write_text(WRONG.replace(BATCH, SLOW))
    line = command(path, *ASYNCHRONOUS, "--workdir", tmp_path / "run")
    with launching(line, "--ps", 1, "--max-restarts", 0, processes=2) as (process, lines):
        assert process.wait(BOUND) == 0, text_of(lines)
    found = [x["seconds"] for x in Run(str(tmp_path / "run")).events if x["event"] == "phases"][-1]
    others = sum(found.get(name, 0.0) for name in ("host", "load"))
    assert found["step"] > 3 * others, found
    assert found["compile"] > 0, found  # by the workers

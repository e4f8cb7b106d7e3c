"""`spmdtrain control`: what a run in progress does for its owner, and that its bits stay."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers import (
    BOUND,
    GAN,
    command,
    environment,
    metrics,
    read_until,
    run,
    saved_steps,
    start,
    status,
    together,
)
from other_user import UID, as_stranger
from processes import drill, start_job, sums

from spmdtrain.record.requests import PREFIX, Request, find_run, send_request

ENDLESS = ("--steps", 1_000_000, "--pause", 0.01, "--log-every", 1000)
RARE = ("--checkpoint-every-steps", 900_000, "--eval-every-steps", 900_000)


def control(workdir: Path, *options: object) -> subprocess.CompletedProcess[str]:
    """Runs the command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "spmdtrain.control", str(workdir), *map(str, options)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=BOUND,
    )


def asked(workdir: Path, *options: object) -> str:
    """What the command prints if the run does what it is asked for."""
    ended = control(workdir, *options)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def step_of(text: str) -> int:
    """The step in an answer."""
    return int(text.partition("step ")[2].partition(":")[0].replace(",", ""))


def await_step(workdir: Path) -> None:
    """Waits until a run has made its first step."""
    end = time.monotonic() + BOUND
    while not (workdir / "metrics.jsonl").exists() or not metrics(workdir, "train"):
        assert time.monotonic() < end
        time.sleep(0.1)


@contextmanager
def started(
    folder: Path, *options: object, changes: Sequence[tuple[str, str]] = ()
) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """A run of one process that would never end, after its first step; yields its workdir."""
    workdir = folder / "run"
    config = drill(folder, *changes)
    process = start(config, *ENDLESS, *RARE, *options, "--workdir", workdir, devices=1)
    reader = threading.Thread(target=process.communicate, daemon=True)
    reader.start()
    try:
        await_step(workdir)
        yield workdir, process
    finally:
        process.kill()
        reader.join(BOUND)


def check_answers(workdir: Path, names: Sequence[str]) -> int:
    """Asks a run for everything, at last to stop; returns the step at which it has stopped."""
    saved = asked(workdir, "--save")
    first = step_of(saved)
    assert saved == f"step {first:,}: saved {workdir}/checkpoints/{first}\n"
    assert saved_steps(workdir) == [first]  # complete when the command ends
    evaluated = asked(workdir, "--evaluate")
    (line,) = metrics(workdir, "eval")
    assert line["step"] == step_of(evaluated) > first
    assert evaluated == f"step {line['step']:,}: loss {line['loss']:.4g}\n"
    profiled = asked(workdir, "--profile", 3)
    begun = int(profiled.partition("profile from step ")[2].partition(":")[0])
    assert begun > line["step"] + 1
    assert len(list(workdir.glob("plugins/profile/*/*.xplane.pb"))) == 1
    stacks = asked(workdir, "--stacks")
    assert stacks.startswith(f"stacks of {', '.join(names)}\n")
    parts = stacks.split("\n== ")[1:]
    assert [part.partition("\n")[0] for part in parts] == [*names]
    assert all("-- thread MainThread\n" in x and "trainer.py" in x for x in parts)
    both = together(lambda: asked(workdir, "--save"), lambda: asked(workdir, "--evaluate"))
    assert "saved" in both[0] and "loss" in both[1]
    stopped = asked(workdir, "--stop")
    last = step_of(stopped)
    assert stopped == f"step {last:,}: saved {workdir}/checkpoints/{last}; the run stops\n"
    return last


@pytest.mark.slow
@pytest.mark.drill
@pytest.mark.parametrize("dispatched", [1, pytest.param(4, marks=pytest.mark.nightly)])
def test_two_processes_act_at_one_step_and_keep_their_bits(tmp_path: Path, dispatched: int) -> None:
    config, workdir = drill(tmp_path), tmp_path / "run"
    options = ("--steps-per-dispatch", dispatched, "--log-every", 1000, *RARE)
    with start_job(config, *ENDLESS, *options, "--workdir", workdir) as job:
        await_step(workdir)
        last = check_answers(workdir, ["chief", "worker 0"])
        ended = job.wait(check=False)
    assert [one.code for one in ended] == [0, 0], ended[0].output
    assert status(workdir) == {"status": "preempted", "step": last, "reason": "spmdtrain control"}
    assert "spmdtrain control: saved step" in ended[0].output
    assert not list(workdir.glob(f"{PREFIX}*"))
    end, whole = last + 7, tmp_path / "whole"
    for folder in (workdir, whole):
        with start_job(config, "--steps", end, *options, "--workdir", folder) as job:
            job.wait()
    assert sums(workdir, end) == sums(whole, end)


@pytest.mark.slow
@pytest.mark.drill
@pytest.mark.parametrize("dispatched", [pytest.param(1, marks=pytest.mark.nightly), 4])
def test_one_process_does_what_it_is_asked_and_keeps_its_bits(
    tmp_path: Path, dispatched: int
) -> None:
    options = ("--steps-per-dispatch", dispatched)
    with started(tmp_path, *options) as (workdir, process):
        last = check_answers(workdir, ["this process"])
        assert process.wait(BOUND) == 0
    end, whole = last + 7, tmp_path / "whole"
    for folder in (workdir, whole):
        run(drill(tmp_path), "--steps", end, *options, *RARE, "--workdir", folder, devices=1)
    assert sums(workdir, end) == sums(whole, end)


@pytest.mark.slow
@pytest.mark.drill
def test_callbacks_that_stop_a_run_do_not_see_an_evaluation_that_is_asked_for(
    tmp_path: Path,
) -> None:
    stops = '"evaluation": lambda event: event.trainer.stop()'
    given = ('callbacks={"step": stop} if config.stop_at else {}', f"callbacks={{{stops}}}")
    with started(tmp_path, changes=[given]) as (workdir, process):
        assert "loss" in asked(workdir, "--evaluate")
        assert "; " not in asked(workdir, "--save")  # of the last step
        assert process.poll() is None


@pytest.mark.slow
@pytest.mark.drill
def test_a_trial_of_a_sweep_that_is_stopped_is_not_a_failure(tmp_path: Path) -> None:
    config, sweep = drill(tmp_path), tmp_path / "sweep"
    line = [sys.executable, "-m", "spmdtrain.sweep", "--config", config, "--workdir", sweep]
    line += [*ENDLESS, *RARE, "--set", "seed=1"]
    with subprocess.Popen(
        list(map(str, line)),
        env=environment(1),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            end = time.monotonic() + BOUND
            while not (found := list(sweep.rglob("status.json"))):
                assert time.monotonic() < end and process.poll() is None
                time.sleep(0.1)
            asked(found[0].parent, "--stop")
            shown, _ = process.communicate(timeout=BOUND)
        finally:
            process.kill()
    assert process.returncode == 75 and ": preempted at step" in shown, shown


@pytest.mark.slow
@pytest.mark.drill
def test_a_launcher_does_not_start_a_stopped_job_again(tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    line = command(drill(tmp_path), *ENDLESS, *RARE, "--workdir", workdir)
    launcher = [sys.executable, "-m", "spmdtrain.launch", "--processes", "2", "--", *line]
    with subprocess.Popen(
        launcher, env=environment(1), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            await_step(workdir)
            last = step_of(asked(workdir, "--stop"))
            shown, _ = process.communicate(timeout=BOUND)
        finally:
            process.send_signal(signal.SIGKILL)
    assert process.returncode == 0 and "restart" not in shown, shown
    assert saved_steps(workdir) == [last] == [status(workdir)["step"]]


@pytest.mark.slow
@pytest.mark.drill
def test_a_request_to_a_killed_run_has_no_effect_on_the_next(tmp_path: Path) -> None:
    with started(tmp_path) as (workdir, process):
        holder = find_run(workdir)
        assert holder is not None and f"process {process.pid} on " in holder.where
    left = Request("stop", holder.start)
    send_request(workdir, left)  # which no run reads now
    gone = control(workdir, "--save")
    assert gone.returncode == 2, gone.stderr
    assert f"no run is in progress in {workdir} (its process was killed" in gone.stderr
    (workdir / "metrics.jsonl").unlink()  # `started` waits for the next start's
    with started(tmp_path) as (workdir, process):
        assert "saved" in asked(workdir, "--save")
        assert "loss" in asked(workdir, "--evaluate")
        assert process.poll() is None  # it has seen the request to stop by now
        assert (workdir / f"{PREFIX}{left.id}").exists()


@pytest.mark.slow
@pytest.mark.drill
def test_the_stacks_of_a_run_that_hangs_show_where(tmp_path: Path) -> None:
    fault = ("--fault", "hang", "--fault-rank", 0, "--fault-at", 40)
    with started(tmp_path, *fault) as (workdir, process):
        assert "time.sleep(1000)" in asked(workdir, "--stacks")
        silent = control(workdir, "--save", "--timeout", 4)
        assert silent.returncode == 1 and "has accepted the request and not acted" in silent.stderr
        threading.Timer(3.0, process.kill).start()
        ended = control(workdir, "--save")
    assert ended.returncode == 1, ended.stderr
    assert "has ended (its process was killed after step 0" in ended.stderr


@pytest.mark.slow
@pytest.mark.drill
def test_a_loop_saves_and_stops_and_refuses_what_its_user_codes(tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    process = start(GAN, "--steps", 1_000_000, "--workdir", workdir, devices=1)
    try:
        read_until(process, "step 1/")
        reader = threading.Thread(target=process.communicate, daemon=True)
        reader.start()
        step = step_of(asked(workdir, "--save"))
        assert step in saved_steps(workdir)
        for option in (["--evaluate"], ["--profile", 2]):
            refused = control(workdir, *option)
            assert refused.returncode == 2 and "a Loop" in refused.stderr, refused.stderr
        last = step_of(asked(workdir, "--stop"))
        assert process.wait(BOUND) == 0
        reader.join(BOUND)
    finally:
        process.kill()
    assert last in saved_steps(workdir) and status(workdir)["status"] == "preempted"


@pytest.mark.slow
@pytest.mark.drill
@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts processes of others")
def test_another_user_controls_no_run(tmp_path: Path) -> None:
    with started(tmp_path) as (workdir, process):
        for folder in (tmp_path, workdir):
            folder.chmod(0o777)
        line = [sys.executable, "-m", "spmdtrain.control", workdir, "--stop"]
        env = environment() | {"HOME": "/nonexistent"}
        refused = subprocess.run(as_stranger(line), env=env, capture_output=True, text=True)
        assert refused.returncode == 2, refused.stderr
        assert "belongs to user 0: only that user, and root, can control" in refused.stderr
        holder = find_run(workdir)  # which the stranger can read, too
        assert holder is not None
        forged = Request("stop", holder.start)
        send_request(workdir, forged)
        os.chown(workdir / f"{PREFIX}{forged.id}", UID, UID)
        asked(workdir, "--save")
        asked(workdir, "--save")
        assert process.poll() is None and (workdir / f"{PREFIX}{forged.id}").exists()

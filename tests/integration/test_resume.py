"""Stopped at any moment and started again, a run ends with the same bits."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from helpers import (
    BOUND,
    DIGITS,
    events,
    metrics,
    read_until,
    run,
    saved_steps,
    small_experiment,
    start,
    status,
    together,
)

from spmdtrain.run import main

# Dropout is on, by the experiment's default. An epoch is 21 steps: nothing here ends with one.
MODEL = ("--hidden", 16, "--log-every", 1, "--eval-every-steps", 10)
LONG = (*MODEL, "--steps", 160)
SAVED = ("--checkpoint-every-steps", 10, "--keep-latest", 99)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    whole, first_five = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("five")
    return together(
        lambda: finished(whole, *LONG, *SAVED), lambda: finished(first_five, *MODEL, "--steps", 5)
    )


@pytest.fixture(scope="module")
def uninterrupted(runs: list[Path]) -> Path:
    """A run at one go."""
    return runs[0]


@pytest.fixture(scope="module")
def resumed_runs(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A run of five steps that went on to ten: on its eight devices, and on two."""
    same, fewer = (tmp_path_factory.mktemp(name) / "run" for name in ("same", "fewer"))
    for workdir in (same, fewer):
        shutil.copytree(runs[1], workdir)
    with (same / "metrics.jsonl").open("a") as file:  # what a run killed after a save leaves behind
        file.write('{"step": 6, "split": "train", "loss": 77.0, "accuracy": 0.0}\n')
        file.write('{"step": 7, "split": "train", "lo')
    (same / "checkpoints" / "7.orbax-checkpoint-tmp").mkdir()
    return together(
        lambda: finished(same, *MODEL, "--steps", 10),
        lambda: finished(fewer, *MODEL, "--steps", 10, devices=2),
    )


def finished(workdir: Path, *options: object, devices: int | None = None) -> Path:
    ended = run(DIGITS, *options, "--workdir", workdir, devices=devices)
    assert ended.returncode == 0, (ended.stdout, ended.stderr)
    assert status(workdir)["status"] == "finished"
    return workdir


def saved(workdir: Path, step: int) -> dict[str, np.ndarray]:
    """Every array of a checkpoint: parameters, optimizer state, step and key."""
    folder = workdir / "checkpoints" / str(step)
    with ocp.StandardCheckpointer() as checkpointer:
        items = {item: checkpointer.restore(folder / item) for item in ("params", "training")}
    return {
        jax.tree_util.keystr(path): np.asarray(
            jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        )
        for path, leaf in jax.tree_util.tree_leaves_with_path(items)
    }


def assert_same_bits(workdir: Path, expected: Path, step: int) -> None:
    found, other = saved(workdir, step), saved(expected, step)
    assert found.keys() == other.keys() and len(other) > 10
    for name, array in other.items():
        assert found[name].dtype == array.dtype and found[name].tobytes() == array.tobytes(), name


def up_to_ten(workdir: Path, split: str) -> list[dict[str, Any]]:
    """The lines of the first ten steps, without what ended the run of five."""
    lines = [line for line in metrics(workdir, split) if line["step"] <= 10]
    return lines if split == "train" else [line for line in lines if line["step"] != 5]


# -- at a step of one's choice ---------------------------------------------------------------------


def test_ten_steps_equal_five_and_five_resumed_steps_bitwise(
    uninterrupted: Path, runs: list[Path], resumed_runs: list[Path]
) -> None:
    workdir, before = resumed_runs[0], metrics(runs[1])
    assert metrics(workdir)[: len(before)] == before
    assert [line["step"] for line in metrics(workdir, "train")] == list(range(1, 11))
    assert up_to_ten(workdir, "train") == up_to_ten(uninterrupted, "train")
    (evaluated,) = up_to_ten(workdir, "eval")
    assert [evaluated] == up_to_ten(uninterrupted, "eval") and evaluated["step"] == 10
    assert saved_steps(workdir) == [5, 10]
    assert_same_bits(workdir, uninterrupted, 10)
    assert purged(workdir)[-1] == 6


def test_a_run_resumes_on_another_number_of_devices(
    uninterrupted: Path, resumed_runs: list[Path]
) -> None:
    workdir = resumed_runs[1]
    content = json.loads((workdir / "config.json").read_text())
    assert (content["devices"], content["mesh"]) == (2, "data=2")
    for split, count, examples in (("train", 10, 64), ("eval", 1, 200)):
        found, expected = up_to_ten(workdir, split), up_to_ten(uninterrupted, split)
        assert len(found) == len(expected) == count
        for line, other in zip(found, expected, strict=True):
            assert line["loss"] == pytest.approx(other["loss"], rel=1e-5), line
            # one example may fall to the other side
            assert line["accuracy"] == pytest.approx(other["accuracy"], abs=1.5 / examples), line
    found_state = saved(workdir, 10)
    for name, array in saved(uninterrupted, 10).items():
        np.testing.assert_allclose(found_state[name], array, rtol=1e-3, atol=1e-5, err_msg=name)


def purged(workdir: Path) -> list[int]:
    """The steps from which the event files make TensorBoard discard earlier points."""
    from tensorboardX.proto.event_pb2 import SessionLog

    return [e.step for e in events(workdir) if e.session_log.status == SessionLog.START]


def test_learning_rate_and_length_may_change_and_the_change_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses, path = [], small_experiment(tmp_path)
    for name, rate in (("same", 0.1), ("other", 0.2)):
        options = ["--config", str(path), "--workdir", str(tmp_path / name), "--log-every", "1"]
        assert main([*options, "--steps", "2"]) == 0
        assert "changed since" not in capsys.readouterr().out
        assert main([*options, "--steps", "4", "--learning-rate", str(rate)]) == 0
        changes = [line for line in capsys.readouterr().out.splitlines() if "changed since" in line]
        change = []
        if rate != 0.1:
            of_optimizer = f"changed since: optimizer: scale.step_size: -0.1 -> -{rate}"
            change = [f"changed since: learning_rate: 0.1 -> {rate}", of_optimizer]
        assert sorted(changes) == [*change, "changed since: steps: 2 -> 4"]
        losses.append([line["loss"] for line in metrics(tmp_path / name, "train")])
    same, other = losses
    assert same[:3] == other[:3]  # a line holds the loss before its update
    assert same[3] != other[3]


def test_no_curve_is_lost_where_runs_follow_each_other_at_once(tmp_path: Path) -> None:
    options = ["--config", str(small_experiment(tmp_path)), "--log-every", "1"]
    for steps in (1, 2, 3, 4):
        assert main([*options, "--workdir", str(tmp_path / "run"), "--steps", str(steps)]) == 0
    points = [(v.tag, e.step) for e in events(tmp_path / "run") for v in e.summary.value]
    assert [step for tag, step in points if tag == "train/loss"] == [1, 2, 3, 4]


def test_a_restarted_run_discards_the_curves_of_its_first_start(tmp_path: Path) -> None:
    path, workdir = small_experiment(tmp_path), tmp_path / "run"
    options = ["--config", str(path), "--workdir", str(workdir)]
    assert main([*options, "--learning-rate", "1e30"]) == 3
    assert [line["step"] for line in metrics(workdir)] == [1] and saved_steps(workdir) == []
    assert main(options) == 0
    assert [line["step"] for line in metrics(workdir, "train")] == [1, 4]
    assert purged(workdir)[-1] == 0


# -- stopped from outside --------------------------------------------------------------------------


def interrupted(workdir: Path, moment: str, number: signal.Signals) -> str:
    """Run, send a signal when a line is printed that begins with `moment`; the rest printed."""
    process = start(DIGITS, *LONG, "--workdir", workdir)
    read_until(process, moment)
    process.send_signal(number)
    rest = process.communicate(timeout=BOUND)[0]
    assert process.returncode == 75, rest
    return rest


def preempted(workdir: Path, name: str, output: str) -> int:
    """The step that a run stopped by a signal says it saved, and did."""
    found = status(workdir)
    step: int = found["step"]
    assert found == {"status": "preempted", "step": step, "reason": name}
    assert saved_steps(workdir)[-1] == step
    assert f"{name}: saved step {step}; run the" in output and "Traceback" not in output
    return step


def stop_twice(workdir: Path) -> Path:
    """A run asked to stop in mid-run, and again while the step is compiled."""
    rest = interrupted(workdir, "step 13/", signal.SIGTERM)
    step = preempted(workdir, "SIGTERM", rest)
    assert 13 <= step < 160
    assert metrics(workdir, "train")[-1]["step"] == step

    rest = interrupted(workdir, f"resumed from step {step}", signal.SIGINT)
    assert step < preempted(workdir, "SIGINT", rest) < 160
    return finished(workdir, *LONG)


def kill(workdir: Path) -> Path:
    """A run killed in mid-run, once it had saved a checkpoint."""
    # Without epochs, and with fewer than 500 steps, nothing but the seconds can have it saved.
    process = start(DIGITS, *LONG, "--workdir", workdir, "--checkpoint-every-seconds", 0.01)
    while not saved_steps(workdir):
        read_until(process, "step ")
    process.kill()
    process.communicate(timeout=BOUND)
    assert process.returncode == -signal.SIGKILL
    assert status(workdir)["status"] == "running"
    newest, last = saved_steps(workdir)[-1], metrics(workdir, "train")[-1]["step"]
    assert newest <= last < 160

    ended = run(DIGITS, *LONG, "--workdir", workdir)
    assert ended.returncode == 0, ended.stderr
    assert f"resumed from step {newest} " in ended.stdout
    return workdir


@pytest.mark.nightly
def test_a_run_stopped_or_killed_ends_as_if_nothing_had_been(
    uninterrupted: Path, tmp_path: Path
) -> None:
    for workdir in together(
        lambda: stop_twice(tmp_path / "stopped"), lambda: kill(tmp_path / "killed")
    ):
        assert metrics(workdir) == metrics(uninterrupted), workdir.name
        assert_same_bits(workdir, uninterrupted, 160)


# An experiment that asks itself to stop, once, where the file `stop` lies beside it.
STOPPING = """import signal
from pathlib import Path


def stop_if_requested():
    request = Path(__file__).with_name("stop")
    if request.exists():
        request.unlink()
        signal.raise_signal(signal.SIGTERM)


class Stopping(ArrayDataset):
    def rows(self, indices):
        stop_if_requested()
        return super().rows(indices)


def build"""


@pytest.mark.parametrize(
    ("change", "saved_step", "lines"),
    [
        (("    x, y = batch\n", "    stop_if_requested()\n    x, y = batch\n"), 1, 1),
        (("validation=data", "validation=Stopping(data)"), 2, 3),
        (("validation=data", "validation=data, test=Stopping(data)"), 4, 8),
    ],
    ids=["compiling", "evaluating", "testing"],
)
def test_a_run_asked_to_stop_while_it_does_something_else_loses_no_line(
    change: tuple[str, str], saved_step: int, lines: int, tmp_path: Path
) -> None:
    imported = ("import Experiment", "import ArrayDataset, Experiment")
    path = small_experiment(tmp_path, imported, ("def build", STOPPING), change)
    options = ["--config", str(path), "--log-every", "1", "--workdir"]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert main([*options, str(whole)]) == 0

    (tmp_path / "stop").touch()
    with pytest.raises(SystemExit) as end:
        main([*options, str(stopped)])
    assert end.value.code == 75
    assert status(stopped) == {"status": "preempted", "step": saved_step, "reason": "SIGTERM"}
    assert saved_steps(stopped) == [saved_step]
    assert metrics(stopped) == metrics(whole)[:lines]

    assert main([*options, str(stopped)]) == 0
    assert status(stopped) == {"status": "finished", "step": 4}
    assert metrics(stopped) == metrics(whole)

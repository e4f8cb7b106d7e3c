"""The command `python -m spmdtrain.replay`: a step again, two runs, and the examples of a step."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers import BOUND, DIGITS, contents, environment, small_experiment

from spmdtrain.checkpoints.command import main as checkpoints
from spmdtrain.config.experiment import load_experiment
from spmdtrain.data.sampling import TrainBatches
from spmdtrain.replay.command import main as replay
from spmdtrain.run import main as train

OPTIONS = ("--hidden", 16, "--log-hash-every", 5, "--checkpoint-every-steps", 10)
SAVED = ("--keep-latest", 9, "--trackers")


def finished(workdir: Path, *options: object) -> Path:
    given = ("--config", DIGITS, "--workdir", workdir, *OPTIONS, *options, *SAVED)
    assert train([*map(str, given)]) == 0
    return workdir


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished(tmp_path_factory.mktemp("replay") / "run", "--steps", 30)


def test_a_step_is_made_again_on_the_same_devices_and_on_others(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(run)
    command = [sys.executable, "-m", "spmdtrain.replay", str(run), "--step", "15"]
    ended = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=BOUND
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (
        "steps 11 to 15 again, from checkpoint 10: 8 x cpu, mirrored, mesh data=8" in ended.stdout
    )
    assert re.search(r"state hash │ (\w{16}) │ \1 │ +equal", ended.stdout)
    assert "step 15 is equal, bit for bit" in ended.stdout

    assert replay([str(run), "--step", "20", "--devices", "2"]) == 0
    shown = capsys.readouterr().out
    assert "other devices: the run made step 20 on 8" in shown
    assert "step 20 is equal to a relative difference of 1e-5, as expected" in shown
    assert re.search(r"gradient_norm +│ .*│ +(equal|\d\.\de-(0[6-9]|1\d)) │", shown)
    assert contents(run) == before  # the run is only read


@pytest.mark.nightly
def test_a_replay_says_if_its_first_parameters_may_be_others(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for given, warns in ((run, True), (run / "checkpoints" / "30", False)):
        tuned = finished(tmp_path / f"warns-{warns}", "--steps", 5, "--init-from", given)
        capsys.readouterr()
        assert replay([str(tuned), "--step", "5"]) == 0
        shown = "".join(capsys.readouterr())
        assert (f"began with the latest checkpoint of {run}: the replay" in shown) == warns


def test_a_step_that_differs_from_the_log_names_the_first_step_and_the_parameter(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "run"
    other.mkdir()
    (other / "checkpoints").symlink_to(run / "checkpoints")
    for name in ("config.json", "metrics.jsonl", "events.jsonl"):
        (other / name).write_bytes((run / name).read_bytes())
    lines = [json.loads(line) for line in (run / "hashes.jsonl").read_text().splitlines()]
    lines[2]["arrays"]["params/layers/1/kernel"] = "00000000"  # of step 15
    (other / "hashes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert replay([str(other), "--step", "20"]) == 5
    shown = capsys.readouterr().out
    assert "the first step that differs is 15" in shown
    assert "step 20 is equal, bit for bit, but not all steps before it" in shown
    assert "after step 15, 1 of 15 arrays of the state differ" in shown
    assert re.search(r"│ params/layers/1/kernel +│ differs │", shown)
    # Under other conditions the state may differ, and only the checkpoint has recorded the step.
    (other / "metrics.jsonl").write_text("")
    (other / "hashes.jsonl").unlink()
    assert replay([str(other), "--step", "20", "--devices", "2"]) == 2
    assert "has recorded neither of step 20" in capsys.readouterr().err
    assert replay([str(other), "--step", "12"]) == 2
    assert "has recorded nothing of step 12; the nearest step" in capsys.readouterr().err
    config = json.loads((run / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"experimnt": config["experiment"]}))
    assert replay([str(other), "--step", "20"]) == 2
    assert "experimnt is unknown. Did you mean 'experiment'?" in capsys.readouterr().err


def test_two_runs_are_compared_up_to_the_first_step_that_differs(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fork = finished(
        *(tmp_path / "fork", "--steps", 30, "--fork-from", f"{run}@10"),
        *("--checkpoint-every-steps", 5, "--skip-steps", "17:19"),
    )
    capsys.readouterr()
    assert replay([str(run), "--against", str(fork), "--per-layer"]) == 5
    shown = capsys.readouterr().out
    assert "other configuration: skip_steps: [] -> ['17:19']" in shown
    assert "the first step that differs is 20; the last equal one is 15" in shown
    # Both have a checkpoint of step 20.
    assert re.search(r"│ params/layers/0 +│ 2 of 2 differ │ +\d.\d+e-0\d │", shown)
    assert re.search(r"│ key +│ equal +│", shown)
    assert replay([str(run), "--against", str(fork), "--step", "15"]) == 0

    assert replay([str(fork), "--step", "20", "--examples"]) == 0
    shown = capsys.readouterr().out
    assert "step 20 used batch 21; --skip-steps 21:22" in shown
    module = load_experiment(str(DIGITS), frozenset()).module
    data, _, _ = module.load_digits()
    indices, _ = TrainBatches(data, 64, 0, True, 30, np.arange(64)).examples(21)
    found = re.findall(r"│ \d+ +│ ([\d,]+) +│ example (\d+) of ArrayDataset +│.*label (\d)", shown)
    assert [(int(i.replace(",", "")), int(j)) for i, j, _ in found] == [
        (i, data.indices[i]) for i in indices.tolist()
    ]
    assert [int(label) for *_, label in found] == data.rows(indices)["label"].tolist()


def test_the_first_step_of_a_run_that_it_has_not_made_or_that_is_not_finite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def ended(command: Callable[[list[str]], int], *given: object) -> tuple[int, str]:
        capsys.readouterr()
        code, shown = command([*map(str, given)]), capsys.readouterr()
        return code, shown.out + shown.err

    infinite = small_experiment(tmp_path, ("3 * x + 2)", "x + np.float32(np.inf))"), name="inf")
    failed, run, fork = (tmp_path / name for name in ("failed", "run", "fork"))
    assert ended(train, "--config", infinite, "--workdir", failed)[0] == 3
    code, shown = ended(replay, failed, "--step", 1)
    assert code == 2 and "step 1 of" in shown
    assert "failed, so nothing of it is recorded (NonFiniteError: step 1: loss and params" in shown
    code, shown = ended(replay, failed, "--step", 1, "--examples")
    assert code == 0 and "step 1 used batch 0; --skip-steps 0:1 leaves it out" in shown
    code, shown = ended(replay, failed, "--step", 2)
    assert code == 2 and shown.endswith("is known to have made is 1\n")
    code, shown = ended(checkpoints, "verify", failed)
    assert code == 2 and "(its run has saved none; failed, NonFiniteError: step 1: loss" in shown

    small = small_experiment(tmp_path)
    assert ended(train, "--config", small, "--workdir", run, "--steps", 1)[0] == 0
    given = ("--fork-from", run, "--steps", 2)  # names no step
    assert ended(train, "--config", small, "--workdir", fork, *given)[0] == 0
    code, shown = ended(replay, fork, "--step", 1, "--examples")
    assert code == 2 and f"began after step 1 as a fork of {run}" in shown
    assert ended(replay, fork, "--step", 2)[0] == 0

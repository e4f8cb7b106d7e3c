"""The command `python -m spmdtrain.sweep`: trials are ordinary runs, and their results a table."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import BOUND, DIGITS, environment, metrics, status

from spmdtrain.sweep.command import main


def sweep(*options: object, config: Path = DIGITS) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "spmdtrain.sweep", "--config", str(config)]
    return subprocess.run(
        [*command, *map(str, options)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=BOUND,
    )


@pytest.mark.nightly
def test_a_sweep_compares_its_trials_and_names_those_that_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sweep"
    options = ["--set", "global_batch_size=64,63", "seed=0..1", "--jobs", 2, "--workdir", folder]
    options += ["--steps", 12, "--eval-every-steps", 4, "--hidden", 16, "--best-metric", "accuracy"]
    options += ["--best-direction", "max"]
    ended = sweep(*options)
    assert (ended.returncode, ended.stderr) == (1, "")
    found = json.loads((folder / "results.json").read_text())
    values = {}
    for trial in found["trials"]:
        workdir = folder / trial["name"]
        if trial["values"]["global_batch_size"] == "63":
            assert (trial["state"], trial["value"]) == ("failed", None)
            assert "global_batch_size is 63" in trial["reason"]
            assert "global_batch_size is 63" in (workdir / "log.txt").read_text()
            assert re.search(f"^failed: {trial['name']} .*63.*log.txt$", ended.stdout, re.MULTILINE)
            continue
        assert status(workdir)["status"] == "finished"
        evaluations = {line["step"]: line["accuracy"] for line in metrics(workdir, "eval")}
        assert list(evaluations) == [4, 8, 12]
        assert trial["value"] == evaluations[trial["step"]] == max(evaluations.values())
        assert [trial["test"]] == [line["accuracy"] for line in metrics(workdir, "test")]
        assert json.loads((workdir / "config.json").read_text())["config"]["hidden"] == [16]
        values[trial["name"]] = trial["value"]
    assert values.keys() == {f"global_batch_size=64,seed={seed}" for seed in (0, 1)}
    assert found["best"] == found["trials"][0]["name"] == max(values, key=lambda n: values[n])
    (mean,) = found["means"]
    assert mean["trials"] == 2 and mean["mean"] == pytest.approx(sum(values.values()) / 2)
    assert re.search(r"best .*64 .*finished", ended.stdout)
    assert (folder / "report.html").exists()
    # Another sweep in this folder is refused; the same one runs only what has not finished.
    arguments = ["--config", str(DIGITS), *map(str, options)]
    assert main([*arguments, "--dropout", "0"]) == 2
    assert "--workdir, or the options of that sweep" in capsys.readouterr().err
    logs = {name: (folder / name / "log.txt").read_bytes() for name in values}
    assert main(arguments) == 1
    assert "4 trials, 2 of them done before" in capsys.readouterr().out
    assert logs == {name: (folder / name / "log.txt").read_bytes() for name in values}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--set lr=1e-3", r"--set lr: .* Did you mean 'learning_rate'\?"),
        ("--set learning_rate=1e-3 --set hiden=1", r"--set hiden: .* Did you mean 'hidden'\?"),
        ("--set learning_rate=1e-3,-1", "learning_rate is -1.0: it must be"),
        ("--set learning_rate=log:1e-4..1e-2", "add --search N"),
        ("--set learning_rate=log:-1..1 --search 3", "begins above 0"),
        ("--set seed=0..1 --seed 2", "both in --set and an option"),
        (
            "--set seed=0,1 learning_rate=1e-3,0.001",
            "seed=0,learning_rate=1e-3 and seed=0,learning_rate=0.001 are the same",
        ),
        ("--set seed=0..1 --jobs 0", "--jobs is 0"),
        ("--set seed=0..1 --workdir gs://a/b", "must be on this machine"),
        ("--set learning_rate=1e-3,fast", "could not convert string to float: 'fast'"),
        ("--set seed=0..1 --learning-rat 1e-3", "Perhaps you meant"),
    ],
)
def test_a_wrong_option_is_one_message_and_nothing_starts(
    options: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES")
    try:
        code = main(["--config", str(DIGITS), *options.split()])
    except SystemExit as stop:  # by the parser
        code = int(stop.code or 0)
    shown = " ".join(re.sub("[│╭╮╰╯─]", " ", capsys.readouterr().err).split())
    assert code == 2 and re.search(message, shown), shown
    assert not list(tmp_path.iterdir())

"""The command `control`: requests that are not sent."""

import json
from pathlib import Path

import pytest

from spmdtrain.control.command import main
from spmdtrain.record.run_files import RunFiles, Writer


@pytest.mark.parametrize(
    ("run", "options", "text"),
    [
        ("", ["--save"], "no run is in progress in {run} (it is finished, step 9 is saved)"),
        ("", ["--save", "--stop"], "the run is asked for --save and --stop: give one of --save"),
        ("", [], "the run is asked for nothing: give one of --save"),
        ("", ["--profile", "0"], "--profile is 0: give a number of steps, from 1"),
        ("", ["--stop", "--timeout", "0"], "--timeout is 0: give seconds, above 0"),
        ("gs://b/run", ["--stop"], "gs://b/run is in a bucket, whose objects have no owner"),
        ("missing", ["--stop"], "missing is not the workdir of a run"),
    ],
)
def test_a_request_that_cannot_be_sent_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    run: str,
    options: list[str],
    text: str,
) -> None:
    (tmp_path / "status.json").write_text(json.dumps({"status": "finished", "step": 9}))
    run = run or str(tmp_path)
    assert main([run, *options]) == 2
    shown, errors = capsys.readouterr()
    assert errors.startswith(f"error: {text.format(run=run)}"), errors
    assert errors.count("\n") == 1 and not shown
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_an_evaluator_takes_no_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "status.json").write_text(json.dumps({"status": "running", "step": 9}))
    files = RunFiles(str(tmp_path), Writer.EVALUATOR)
    assert main([str(tmp_path), "--stop"]) == 2
    files.close()
    assert "but an evaluator, which takes no requests: send it signals" in capsys.readouterr().err


def test_a_run_that_does_not_listen_is_named_after_the_timeout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "status.json").write_text(json.dumps({"status": "running", "step": 9}))
    files = RunFiles(str(tmp_path))
    assert main([str(tmp_path), "--stop", "--timeout", "0.1"]) == 1
    files.close()
    assert "has not taken the request" in capsys.readouterr().err
    assert not list(tmp_path.glob(".control-*"))

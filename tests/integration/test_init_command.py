"""The project that `spmdtrain init` writes: its commands and its tests, as its README has them."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers import environment, status

from spmdtrain.init import main


def run(folder: Path, *words: str) -> str:
    """Runs a module in a folder; returns what it prints."""
    command = [sys.executable, "-m", *words]
    ended = subprocess.run(
        command, cwd=folder, env=environment(devices=8), capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_a_new_project_trains_and_its_tests_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["spirals"]) == 0
    folder = tmp_path / "spirals"
    assert "cd spirals" in capsys.readouterr().out
    assert not [path for path in folder.rglob("*") if "NAME" in path.name]
    # As after `pip install -e .`: its metadata are found in the folder.
    metadata = folder / "spirals-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: spirals\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[spmdtrain.experiments]\nspirals = spirals.experiment\n"
    )
    run(folder, "spmdtrain.run", "--config", "spirals", "--workdir", "runs/first", "--width", "32")
    assert status(folder / "runs" / "first")["status"] == "finished"
    assert "3 passed" in run(folder, "pytest", "-p", "no:cacheprovider")
    run(
        folder, "ruff", "check", "--isolated", "--select", "E,F,I,UP,B", "--line-length", "100", "."
    )
    run(folder, "ruff", "format", "--isolated", "--line-length", "100", "--check", ".")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("taken", "taken exists"),
        ("two words", "cannot name a package"),
        ("a/b", "cannot name a package"),
        ("class", "cannot name a package"),
        ("_x", "cannot name a package"),
        ("json", "the name of another module"),
        ("orbax", "the name of another module"),
        ("pytest", "the name of another module"),
    ],
)
def test_a_name_that_cannot_be_a_package_is_refused(
    name: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    assert main([name]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["taken"]

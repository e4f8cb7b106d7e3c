"""Trackers found by name: entry points of this package and of others."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from helpers import BOUND, REPOSITORY, command, environment, metrics, small_experiment

from spmdtrain import RunConfig, Trainer, UserError
from spmdtrain.run import main
from spmdtrain.trackers.base import GROUP, SHIPPED, find_tracker, make_tracker
from spmdtrain.trackers.run_trackers import choose_trackers
from spmdtrain.trackers.tensorboard import TensorBoardTracker


def install(folder: Path, points: str, module: str = "") -> Path:
    """Makes a folder of installed packages, with a module `line_tracker` and its entry points."""
    info = folder / "line_tracker-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: line-tracker\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{points}\n")
    (folder / "line_tracker.py").write_text(module)
    return folder


def test_the_entry_points_of_this_package_are_those_that_a_checkout_knows() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert project["entry-points"][GROUP] == SHIPPED
    for name in SHIPPED:
        made = make_tracker(name)
        assert (made.name, type(made).name) == (name, name)


@pytest.mark.slow
def test_a_run_of_the_command_writes_to_the_package_that_the_page_shows(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "trackers.md").read_text()
    (project,) = map(tomllib.loads, re.findall(r"^```toml\n(.*?)^```", page, re.M | re.S))
    (code,) = re.findall(r"^```python\n([^`]*?class [^`]*)^```", page, re.M)
    points = project["project"]["entry-points"][GROUP]
    lines = "\n".join(f"{name} = {value}" for name, value in points.items())
    (tmp_path / "site").mkdir()
    install(tmp_path / "site", lines, code)
    env = environment()
    env["PYTHONPATH"] = f"{tmp_path / 'site'}:{env.get('PYTHONPATH', REPOSITORY)}"
    options = ("--workdir", "run", "--log-every", 1, "--trackers", "lines", "tensorboard")
    ended = subprocess.run(
        command(small_experiment(tmp_path), *options),
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=BOUND,
    )
    assert ended.returncode == 0, ended.stderr
    first, *written = (tmp_path / "lines.txt").read_text().splitlines()
    assert first == "from step 0, seed 0"
    for line in metrics(tmp_path / "run", "train"):
        assert any(x.startswith(f"{line['step']} ") and str(line["loss"]) in x for x in written)
    assert '"lines": "lines-1"' in (tmp_path / "run" / "trackers.json").read_text()
    assert list((tmp_path / "run" / "tensorboard").iterdir())


ABSENT = (
    "trackers is 'linse'. Did you mean 'lines'? There are: tensorboard, wandb, mlflow, trackio, "
    "lines."
)


def test_an_unknown_name_is_a_short_message_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(install(tmp_path, "lines = line_tracker:Lines"))
    build = "def build(config):\n"
    config = small_experiment(tmp_path, (build, f"{build}    1 / 0\n"))
    assert main(["--config", str(config), "--trackers", "tensorboard", "linse"]) == 2
    assert capsys.readouterr().err == f"error: {ABSENT}\n"
    unused: Any = None
    with pytest.raises(UserError, match=f"^{re.escape(ABSENT)}$"):
        Trainer(model=unused, objective=unused, optimizer=unused, trackers=["linse"])
    config_of_file = RunConfig(trackers=("xyz",))  # of an experiment: checked when it is used
    with pytest.raises(
        UserError, match=r"^trackers is 'xyz'\. There are: tensorboard, .*, lines\.$"
    ):
        choose_trackers(config_of_file.trackers, (), has_workdir=True)


def test_the_names_of_this_package_stay_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(install(tmp_path, "tensorboard = line_tracker:Lines"))
    assert find_tracker("tensorboard") == EntryPoint("tensorboard", SHIPPED["tensorboard"], GROUP)
    chosen = choose_trackers(["tensorboard"], (), has_workdir=True)
    assert [type(tracker) for tracker in chosen] == [TensorBoardTracker]
    assert choose_trackers(["tensorboard"], (), has_workdir=False) == []


NEEDS = "from spmdtrain import Tracker\nclass Lines(Tracker):\n    imports = 'no_such.client'\n"


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("import no_such", "line_tracker:Lines cannot be imported: No module named 'no_such'"),
        ("", "line_tracker:Lines cannot be imported: module 'line_tracker' has no attribute"),
        ("Lines = print", "line_tracker:Lines is not a subclass of spmdtrain.Tracker"),
        (NEEDS, "no_such is not installed$"),
    ],
)
def test_a_package_that_cannot_be_used_is_named(
    module: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(install(tmp_path, "lines = line_tracker:Lines", module))
    with pytest.raises(UserError, match=f"^trackers has 'lines', and {message}"):
        make_tracker("lines")
    sys.modules.pop("line_tracker", None)

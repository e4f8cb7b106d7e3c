"""Experiments by the names of modules and entry points, and in packages with relative imports."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import environment, status

MODEL = """
import numpy as np
import optax
from flax import nnx

X = np.ones((64, 2), np.float32)


def objective(model, x):
    return {"loss": (model(x) ** 2)[:, 0]}
"""
EXPERIMENT = """
import dataclasses

import optax
from flax import nnx

from spmdtrain import Experiment, RunConfig

import neighbor  # an absolute import from the folder of the file, as of a file in no package

from .model import X, objective


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    steps: int | None = 2
    width: int = 3


def build(config):
    def model(rngs):
        return nnx.Linear(2, config.width, rngs=rngs)

    return Experiment(model=model, objective=objective, optimizer=optax.sgd(0.1), train=X)
"""
ENTRY_POINTS = """[spmdtrain.experiments]
small = package.inner.experiment
with-dash = package.inner.experiment
lost = package.gone
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a package, and the metadata of an installed one."""
    folder = tmp_path_factory.mktemp("project")
    inner = folder / "package" / "inner"
    inner.mkdir(parents=True)
    (inner / "model.py").write_text(MODEL)
    (inner / "experiment.py").write_text(EXPERIMENT)
    (inner / "neighbor.py").write_text("")
    for name in ("package", "package/inner"):
        (folder / name / "__init__.py").write_text("")
    (folder / "package" / "broken.py").write_text("import no_such_library\n")
    (folder / "needs").mkdir()
    (folder / "needs" / "__init__.py").write_text("import no_such_library\n")
    (folder / "other" / "optax").mkdir(parents=True)
    for name in ("__init__.py", "other.py"):
        (folder / "other" / "optax" / name).write_text("")
    metadata = folder / "project-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: project\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


def run(folder: Path, *options: str, script: bool = False) -> tuple[int, str]:
    """Runs the command in the project; returns its exit code and its output."""
    command = [str(Path(sys.executable).parent / "spmdtrain"), "run"] if script else []
    command = command or [sys.executable, "-m", "spmdtrain.run"]
    ended = subprocess.run(
        [*command, *options], cwd=folder, env=environment(devices=1), capture_output=True, text=True
    )
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "package.inner.experiment",
        pytest.param("package/inner/experiment.py", marks=pytest.mark.nightly),
        pytest.param("./package/inner/experiment.py", marks=pytest.mark.nightly),
        pytest.param("small", marks=pytest.mark.nightly),
    ],
)
def test_an_experiment_of_a_package_may_import_its_siblings(name: str, folder: Path) -> None:
    workdir = folder / "runs" / name.replace("/", "-")
    code, output = run(folder, "--config", name, "--width", "5", "--workdir", str(workdir))
    assert code == 0, output
    assert status(workdir)["step"] == 2
    recorded = json.loads((workdir / "config.json").read_text())["experiment"]
    assert Path(recorded) == folder / "package" / "inner" / "experiment.py"
    command = [sys.executable, "-m", "spmdtrain.replay", str(workdir), "--step", "2"]
    ended = subprocess.run(
        command, cwd=folder.parent, env=environment(devices=1), capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr  # it finds the file again, and imports it alike


@pytest.mark.nightly
@pytest.mark.slow
def test_the_installed_command_finds_modules_of_its_folder_as_well(folder: Path) -> None:
    for name in ("package.inner.experiment", "small", "with-dash"):
        code, output = run(folder, "--config", name, "--help", script=True)
        assert code == 0 and "--width" in output, output


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("package.inner.experimen", "package.inner.experimen: no such file or module; --config"),
        ("no_such.module", "no_such.module: no such file or module; --config takes"),
        ("smal", "smal: no such file or module; --config takes an experiment's .py"),
        ("package.broken", "No module named 'no_such_library'"),
        ("needs.experiment", "No module named 'no_such_library'"),
        ("lost", "lost: its entry point names package.gone, which is no module"),
        ("package", "package: is a folder; --config takes"),
        ("optax.other", "no such file or module"),
        ("other/optax/other.py", "is in the package optax, and Python imports another one of this"),
        ("package/inner/experiment", "package/inner/experiment: no such file; --config takes an"),
        ("package.inner", "has no dataclass Config(RunConfig)"),
        ("jax", "has no dataclass Config(RunConfig)"),
    ],
)
@pytest.mark.slow
def test_what_is_no_experiment_is_refused(name: str, message: str, folder: Path) -> None:
    code, output = run(folder, "--config", name)
    assert code == 2 and message in output and "Traceback" not in output, output


@pytest.mark.slow
def test_a_name_that_is_nearly_an_entry_point_is_proposed(folder: Path) -> None:
    assert "Did you mean 'small'?" in run(folder, "--config", "smal")[1]

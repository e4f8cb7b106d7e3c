"""`spmdtrain NAME` is `python -m spmdtrain.NAME`: exit codes, output, signals, import path."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from helpers import BOUND, DIGITS, REPOSITORY, environment, metrics, together

from spmdtrain import __version__

NAMES = (
    "run",
    "launch",
    "plan",
    "sweep",
    "report",
    "control",
    "cluster",
    "checkpoints",
    "replay",
    "init",
)

# In place of JAX, in the working directory.
NO_JAX = "raise ImportError('this command must not import jax')"
SLOW_JAX = "import time; print('importing', flush=True); time.sleep(100)"


def script(folder: Path) -> str:
    """Writes what pip installs for `[project.scripts]`; returns its path."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["spmdtrain"].partition(":")
    path = folder / "bin" / "spmdtrain"
    path.parent.mkdir()
    path.write_text(f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    return str(path)


@pytest.fixture(params=["installed", "module"])
def spmdtrain(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """Both spellings of the command."""
    spelled = [script(tmp_path)] if request.param == "installed" else ["-m", "spmdtrain"]
    return [sys.executable, *spelled]


def outcome(command: Sequence[str], folder: Path) -> tuple[int, str, str]:
    """The exit code, standard output and standard error of a command."""
    ended = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=BOUND
    )
    return ended.returncode, ended.stdout, ended.stderr


def test_help_version_cluster_and_launch_do_not_import_jax(
    spmdtrain: list[str], tmp_path: Path
) -> None:
    (tmp_path / "jax.py").write_text(NO_JAX)
    code, shown, errors = outcome([*spmdtrain, "--help"], tmp_path)
    assert (code, errors) == (0, "")
    assert re.findall(r"^  (\w+)  +\w", shown, re.MULTILINE) == [*NAMES]
    assert outcome([*spmdtrain, "--version"], tmp_path) == (0, f"spmdtrain {__version__}\n", "")
    code, shown, errors = outcome([*spmdtrain, "cluster", "--json"], tmp_path)
    assert (code, errors) == (0, "") and '"num_processes": 1' in shown
    assert outcome([*spmdtrain, "launch", "--processes", "1", "--", "true"], tmp_path)[0] == 0
    assert outcome([*spmdtrain, "init", "mine"], tmp_path)[0] == 0
    code, _, errors = outcome([*spmdtrain, "run", "--help"], tmp_path)
    assert code == 1 and NO_JAX.split("'")[1] in errors  # the check above can fail


def test_an_unknown_command_is_one_line_with_a_suggestion(
    spmdtrain: list[str], tmp_path: Path
) -> None:
    assert outcome([*spmdtrain, "chekpoints"], tmp_path) == (
        2,
        "",
        "error: 'chekpoints' is not a command of spmdtrain. Did you mean 'checkpoints'?\n",
    )
    code, shown, errors = outcome(spmdtrain, tmp_path)
    assert (code, shown) == (2, "") and errors.startswith("usage: spmdtrain COMMAND")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("run", "--help"), 0),
        (("run", "--config", "missing.py"), 2),
        (("launch", "--processes", "1", "--", "missing"), 2),
        pytest.param(("checkpoints", "verify", "missing"), 2, marks=pytest.mark.nightly),
    ],
    ids=["help", "no experiment", "no program", "no run"],
)
def test_a_subcommand_is_its_module(arguments: Sequence[str], code: int, tmp_path: Path) -> None:
    name, *rest = arguments
    module, installed = together(
        lambda: outcome([sys.executable, "-m", f"spmdtrain.{name}", *rest], tmp_path),
        lambda: outcome([sys.executable, script(tmp_path), *arguments], tmp_path),
    )
    assert module == installed and module[0] == code, module


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("run", "--help"),
        ("launch", "--help"),
        ("plan", "--help"),
        ("cluster",),
        ("checkpoints", "--help"),
    ],
    ids=" ".join,
)
def test_output_that_is_no_longer_read_ends_the_command_quietly(
    arguments: Sequence[str], tmp_path: Path
) -> None:
    read, write = os.pipe()
    os.close(read)  # as `head` does once it has its lines
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "spmdtrain", *arguments],
            cwd=tmp_path,
            env=environment(),
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            timeout=BOUND,
        )
    finally:
        os.close(write)
    assert (ended.returncode, ended.stderr) == (1, "")


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Commands started here get Ctrl-C, which a background process of a shell would ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_during_the_import_of_jax_ends_without_a_traceback(
    spmdtrain: list[str], tmp_path: Path
) -> None:
    (tmp_path / "jax.py").write_text(SLOW_JAX)
    with interruptible():
        process = subprocess.Popen(
            [*spmdtrain, "run", "--config", str(DIGITS)],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert process.stdout is not None and process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=BOUND) == ("", "")
    assert process.returncode == -signal.SIGINT


@pytest.mark.drill
def test_a_job_of_the_launcher_trains(tmp_path: Path) -> None:
    """The launcher takes the command from its own environment; here PATH has none."""
    run = ("run", "--config", DIGITS, "--steps", 2, "--hidden", 8, "--cpu-devices", 1)
    command = ("launch", "--processes", 2, "--", "spmdtrain", *run, "--workdir", tmp_path / "run")
    code, shown, errors = outcome([sys.executable, script(tmp_path), *map(str, command)], tmp_path)
    assert code == 0, errors
    assert "2 processes" in shown and metrics(tmp_path / "run", "train")[-1]["step"] == 2

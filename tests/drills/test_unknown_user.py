"""A user without an entry in /etc/passwd and without HOME, as in many containers."""

import importlib.util
import os
import pwd
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import BOUND, DIGITS, environment, saved_steps, status
from other_user import UID, as_stranger

from spmdtrain.launch.task_env import tf_configs

# Reads a run.
READS = """
import sys
import jax
from spmdtrain import load_params, load_variables
from spmdtrain.checkpoints import command

assert command.main(["verify", sys.argv[1]]) == 0
assert jax.tree.leaves(load_params(sys.argv[1])) and load_variables(sys.argv[1])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a folder of the other user."""
    with pytest.raises(KeyError):
        pwd.getpwuid(UID)
    found = tmp_path / "own"
    found.mkdir()
    os.chown(found, UID, UID)
    return found


def start(*arguments: object, tmp: Path, **environ: str) -> subprocess.Popen[str]:
    """Starts Python as the other user."""
    without = {"HOME", "USER", "LOGNAME", "USERNAME", "XDG_CACHE_HOME"}
    own = {name: value for name, value in environment(1).items() if name not in without}
    return subprocess.Popen(
        as_stranger([sys.executable, *arguments]),
        env=own | {"TMPDIR": str(tmp)} | environ,
        cwd=tmp,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def check(process: subprocess.Popen[str]) -> None:
    """Waits for a process and checks that it succeeds."""
    try:
        said, _ = process.communicate(timeout=BOUND)
        assert process.returncode == 0, said
    finally:
        process.kill()


@pytest.mark.usefixtures("root")
def test_train_resume_verify_and_load(folder: Path) -> None:
    workdir = folder / "run"
    command = ["-m", "spmdtrain.run", "--config", DIGITS, "--workdir", workdir]
    check(start(*command, "--steps", 4, "--checkpoint-every-steps", 2, tmp=folder))
    cached = [path for path in folder.glob("spmdtrain-*/cache/programs/*/*") if path.is_file()]
    assert cached and {path.stat().st_uid for path in cached} == {UID}
    assert stat.S_IMODE((folder / f"spmdtrain-{UID}").stat().st_mode) == 0o700
    check(start(*command, "--steps", 6, "--checkpoint-every-steps", 2, tmp=folder))
    assert saved_steps(workdir)[-1] == 6 and status(workdir)["status"] == "finished"
    check(start("-c", READS, workdir, tmp=folder))


@pytest.mark.nightly
@pytest.mark.usefixtures("root")
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_parameter_servers(folder: Path) -> None:
    command = ["-m", "spmdtrain.run", "--config", DIGITS, "--workdir", folder / "run"]
    options = ["--strategy", "parameter_server", "--steps", 4]
    # In /tmp, because a socket's path has at most 107 bytes.
    tasks = [
        start(*command, *options, tmp=Path("/tmp"), TF_CONFIG=config)
        for config in tf_configs(["chief", "worker 0", "ps 0"]).values()
    ]
    try:
        for task in tasks:
            check(task)
    finally:
        for task in tasks:
            task.kill()
            task.wait()
    assert status(folder / "run")["status"] == "finished"

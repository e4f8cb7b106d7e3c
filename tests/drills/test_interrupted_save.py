"""A process that is killed, or cannot write, while it saves a checkpoint."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import DIGITS, TESTS, saved_steps
from processes import codes, differing, run_line, show

from spmdtrain.distributed import progress
from spmdtrain.launch.child import TaskExit, describe_exit


def test_a_kill_between_data_and_manifest_is_one_in_save(tmp_path: Path) -> None:
    script = """
import os, signal, sys, time
from pathlib import Path
from spmdtrain.checkpoints import manifest
from spmdtrain.distributed import progress
sys.path[:0] = sys.argv[1:]
from test_links import fit
progress.begin()
def write(*_):
    time.sleep(0.3)  # training continues meanwhile
    os.kill(os.getpid(), signal.SIGKILL)
manifest.Manifest.write = write
fit(Path("run"), 500, checkpoint_every_steps=100, callbacks={"step": lambda _: time.sleep(0.01)})
"""
    env = os.environ | {progress.LAUNCH: str(tmp_path), progress.TASK: "worker 0"}
    ended = subprocess.run(
        [sys.executable, "-c", script, str(TESTS), str(TESTS / "unit" / "checkpoints")],
        cwd=tmp_path,
        env=env,
    )
    assert ended.returncode == -signal.SIGKILL
    record = progress.read(tmp_path, "worker 0")
    assert record is not None and record.sealing == 100 < record.step < 200
    message = describe_exit(TaskExit("worker 0", ended.returncode, record=record))
    assert message.startswith("worker 0 was killed (SIGKILL) in save of step 100, at step ")


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_process_that_cannot_write_ends_both(tmp_path: Path, rank: int) -> None:
    """Without a word of its own, each would wait for the other in a barrier of Orbax."""
    options: list[object] = ["--hidden", 256, 256, "--steps", 20, "--checkpoint-every-steps", 10]
    options += ["--workdir", tmp_path / "run", "--strategy", "fully_sharded"]
    limits = {rank: "ulimit -f 100"}  # kB in a file

    def line(number: int) -> list[str]:
        shell = f'{limits.get(number, ":")}; exec "$@"'
        return ["bash", "-c", shell, "task", *run_line(DIGITS, *options)]

    ended = differing(line)
    assert codes(ended) == [1, 1], show(ended)
    failed = "step 10 could not be saved in .*/run/checkpoints: File too large"
    assert re.search(f"^failed: {failed}", ended[rank].output, re.M), show(ended)
    name = ("chief", "worker 0")[rank]
    assert re.search(f"exits because {name} failed: {failed}", ended[1 - rank].output)
    assert max(one.seconds for one in ended) < 60
    assert saved_steps(tmp_path / "run") == []

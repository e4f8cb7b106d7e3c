"""Kills of a process while it seals a checkpoint."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from helpers import TESTS

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

"""TensorBoard's event files: their imports, and a full disk."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from helpers import metrics, small_experiment

from spmdtrain.run import main

IMPORTS = """
import sys

from spmdtrain.trackers import tensorboard

tensorboard.import_writer()
assert "google.cloud.storage" not in sys.modules
import google.cloud.storage  # which others can still import
"""


def test_the_writer_does_not_import_the_client_of_google_cloud_storage() -> None:
    ended = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_event_files_that_cannot_be_written_are_named_and_end_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    open_full = partial(open, "/dev/full", "wb")
    monkeypatch.setattr("tensorboardX.record_writer.open_file", lambda path: open_full())
    assert main(["--config", str(small_experiment(tmp_path)), "--workdir", str(tmp_path)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "tensorboard" in line]
    assert len(lines) == 1
    assert lines[0].startswith("tensorboard: metrics of step 1: OSError: [Errno 28] No space left")
    assert lines[0].endswith("; the run continues without it")
    assert [line["step"] for line in metrics(tmp_path, "train")] == [1, 4]

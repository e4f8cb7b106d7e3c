"""TensorBoard's event files: their imports, a full disk, and media."""

import contextlib
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import events, metrics, small_experiment

from spmdtrain import Figure, Histogram, Image, Table, Text
from spmdtrain.record.run_files import RunFiles, Split
from spmdtrain.run import main
from spmdtrain.trackers.base import Media
from spmdtrain.trackers.run_trackers import RunTrackers
from spmdtrain.trackers.tensorboard import TensorBoardTracker

IMPORTS = """
import sys

from spmdtrain.trackers import tensorboard

tensorboard.import_writer()
assert "google.cloud.storage" not in sys.modules
import google.cloud.storage  # which others can still import
"""


@pytest.mark.slow
def test_the_writer_does_not_import_the_client_of_google_cloud_storage() -> None:
    ended = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_event_files_that_cannot_be_written_are_named_and_end_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    open_full = partial(open, "/dev/full", "wb")
    monkeypatch.setattr("tensorboardX.record_writer.open_file", lambda path: open_full())
    assert main(["--config", str(small_experiment(tmp_path)), "--workdir", str(tmp_path)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "tensorboard" in line]
    assert len(lines) == 1
    # Written when no call is pending: after the first step, or a later one.
    what = r"(metrics of step \d|a flush|its end): OSError: \[Errno 28\] No space left on device"
    assert re.fullmatch(f"tensorboard: {what}; the run continues without it", lines[0])
    assert [line["step"] for line in metrics(tmp_path, "train")] == [1, 4]


def test_media_are_images_texts_and_histograms(tmp_path: Path) -> None:
    found: dict[tuple[str, int], Any] = {}
    with contextlib.closing(RunFiles(str(tmp_path))) as files:
        trackers = RunTrackers([TensorBoardTracker()], files, print)
        with contextlib.closing(trackers):
            trackers.start(0, {})
            media: dict[str, Media] = {
                "image": Image(np.zeros((2, 3, 5), np.uint8)),
                "text": Text("two\nlines"),
                "table": Table({"a": [1], "b": ["x | y\nz"]}),
                "histogram": Histogram(edges=[0, 1, 3], counts=[0, 2]),
                "svg": Figure("<svg></svg>"),  # which TensorBoard does not show
            }
            trackers.media(7, Split.EVAL, media)
    for event in events(tmp_path):
        found |= {(value.tag, event.step): value for value in event.summary.value}
    assert found.keys() == {(f"eval/{n}", 7) for n in ("image", "text", "table", "histogram")}
    image = found["eval/image", 7].image
    assert (image.width, image.height) == (10, 3) and image.encoded_image_string[1:4] == b"PNG"
    assert found["eval/text", 7].tensor.string_val == [b"    two\n    lines"]
    assert found["eval/text", 7].metadata.plugin_data.plugin_name == "text"
    (table,) = found["eval/table", 7].tensor.string_val
    assert table.decode() == "| a | b |\n| --- | --- |\n| 1 | x \\| y z |"
    histogram = found["eval/histogram", 7].histo
    assert (histogram.num, histogram.sum, histogram.min) == (2, 4, 2)
    assert list(histogram.bucket) == [0, 0, 2] and list(histogram.bucket_limit) == [0, 1, 3]

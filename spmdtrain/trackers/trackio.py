"""The tracker of Trackio."""

import os
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spmdtrain.record.run_files import Status
from spmdtrain.trackers.base import RunInfo, Tracker
from spmdtrain.trackers.media import Figure, Histogram, Image, Table, Text
from spmdtrain.trackers.wandb import PROJECT


class TrackioTracker(Tracker):
    """Records a run with Trackio.

    The environment variables of its library apply: TRACKIO_DIR is the folder of its databases, and
    without TRACKIO_SPACE_ID and TRACKIO_SERVER_URL nothing leaves this machine.

    Args:
      **options: Arguments of `trackio.init`, such as `project` and `space_id`.
    """

    name = "trackio"

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._run: Any = None

    def start(self, run: RunInfo) -> str:
        """Begins the run, or continues the run of an earlier start."""
        import trackio

        defaults = {
            "project": os.environ.get("TRACKIO_PROJECT", PROJECT),
            # A run continues by its name, which runs in other workdirs must not share.
            "name": run.earlier or f"{_plain(run.name)}-{uuid.uuid4().hex[:8]}",
            "resume": "allow",
            "config": dict(run.config),
            "embed": False,
            "auto_log_cpu": False,
            "auto_log_gpu": False,
        }
        self._run = trackio.init(**{**defaults, **self._options})
        found: str = self._run.name
        return found

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def image(self, step: int, tag: str, image: Image) -> None:
        """Records the images as one."""
        import trackio

        array = image.grid()
        array = array.repeat(3, axis=-1) if array.shape[-1] == 1 else array
        self._run.log({tag: trackio.Image(array, caption=", ".join(image.captions))}, step=step)

    def text(self, step: int, tag: str, text: Text) -> None:
        """Records the texts as Markdown."""
        import trackio

        self._run.log({tag: trackio.Markdown(text.joined())}, step=step)

    def histogram(self, step: int, tag: str, histogram: Histogram) -> None:
        import trackio

        content = trackio.Histogram(np_histogram=(histogram.counts, histogram.edges))
        self._run.log({tag: content}, step=step)

    def table(self, step: int, tag: str, table: Table) -> None:
        import trackio

        content = trackio.Table(columns=list(table.columns), data=table.rows())
        self._run.log({tag: content}, step=step)

    def figure(self, step: int, tag: str, figure: Figure) -> None:
        """Records a PNG figure as an image, and an SVG figure as HTML."""
        import trackio

        if figure.format == "svg":
            self._run.log({tag: trackio.Html(figure.content.decode())}, step=step)
            return
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "figure.png")
            path.write_bytes(figure.content)
            self._run.log({tag: trackio.Image(str(path))}, step=step)

    def artifact(self, path: str, name: str) -> None:
        """Records the file as an artifact of type `file`."""
        self._run.log_artifact(path, name=name, type="file")

    def close(self, status: Status) -> None:
        """Ends the run, and waits until it is written."""
        if self._run is not None:
            self._run.finish()


def _plain(name: str) -> str:
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in name)[:60]

"""TensorBoard event files."""

import contextlib
import importlib
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etils import epath

from spmdtrain.record import no_follow
from spmdtrain.record.run_files import Status
from spmdtrain.trackers.base import (
    Figure,
    Histogram,
    Image,
    RunInfo,
    Table,
    Text,
    Tracker,
    encode_png,
    png_size,
)

_MAX_TABLE_ROWS = 100  # TensorBoard shows tables as text


class TensorBoardTracker(Tracker):
    """Writes TensorBoard event files in a folder of the workdir."""

    name = "tensorboard"
    in_workdir = True
    _root: Path

    def __init__(self, folder: str = "tensorboard") -> None:
        self._name = folder
        self._file: EventFile | None = None
        self._purge_from: int | None = None

    def before_start(self) -> None:
        import_writer()  # in this thread: for a moment it hides a module from other imports

    def start(self, run: RunInfo) -> None:
        """Checks for events of an earlier start, because events of later steps are stale."""
        assert run.folder is not None and run.workdir is not None
        self._root = run.folder
        if (epath.Path(run.workdir) / self._name).exists():
            self._purge_from = run.step + 1

    def rewind(self, step: int) -> None:
        """Makes TensorBoard discard the events of steps after `step`."""
        if self._file is not None:
            self._file.purge(step + 1)
        elif (self._root / self._name).exists():
            self._purge_from = step + 1

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the values as one event."""
        self._open().add_scalars(step, values)

    def image(self, step: int, tag: str, image: Image) -> None:
        """Writes the images as one."""
        self._open().add_png(step, tag, encode_png(image.grid()))

    def figure(self, step: int, tag: str, figure: Figure) -> None:
        """Writes a PNG figure; TensorBoard does not show SVG."""
        if figure.format == "png":
            self._open().add_png(step, tag, figure.content)

    def text(self, step: int, tag: str, text: Text) -> None:
        """Writes the texts, in fixed width."""
        blocks = "\n\n".join(_indented(each) for each in text.value)
        self._open().add_markdown(step, tag, blocks)

    def table(self, step: int, tag: str, table: Table) -> None:
        """Writes the first rows as a table in Markdown."""
        rows = [list(table.columns), ["---"] * len(table.columns), *table.rows()]
        lines = (f"| {' | '.join(map(_cell, row))} |" for row in rows[: _MAX_TABLE_ROWS + 2])
        self._open().add_markdown(step, tag, "\n".join(lines))

    def histogram(self, step: int, tag: str, histogram: Histogram) -> None:
        self._open().add_histogram(step, tag, histogram)

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def close(self, status: Status) -> None:
        if self._file is not None:
            try:
                self._file.flush()
            finally:
                self._file.close()

    def _open(self) -> "EventFile":
        """Returns the event file; creates it late, so that a start that writes nothing has none."""
        if self._file is None:
            self._file = EventFile(self._root / self._name, self._purge_from)
        return self._file


def _cell(value: Any) -> str:
    """Returns a cell of a table in Markdown: one line, with bars escaped."""
    return " ".join(str(value).split()).replace("|", "\\|")


def _indented(text: str) -> str:
    return "\n".join("    " + line for line in text.splitlines())


def import_writer() -> None:
    """Imports the modules that write event files, so that the first write is as fast as others.

    tensorboardX would import the client of Google Cloud Storage if it is installed, which takes
    a tenth of the start of a run. Event files are written to local files only, so that this import
    is made to fail, unless the client is imported already.
    """
    client = "google.cloud.storage"
    hides = client not in sys.modules
    if hides:
        sys.modules[client] = None  # type: ignore[assignment]
    try:
        for module in ("record_writer", "proto.event_pb2", "proto.summary_pb2"):
            importlib.import_module(f"tensorboardX.{module}")
    finally:
        if hides:
            del sys.modules[client]


class EventFile:
    """One TensorBoard event file.

    It replaces tensorboardX's SummaryWriter, which blocks forever after its thread has failed to
    write to a full disk.

    Args:
      folder: The folder of the file, which is created. TensorBoard shows it as a run.
      purge_from: The first step whose earlier events, in other files, TensorBoard discards; None to
        keep all.
    """

    def __init__(self, folder: Path, purge_from: int | None) -> None:
        from tensorboardX.record_writer import RecordWriter

        no_follow.make_subfolder(folder.parent, folder.name)
        now = time.time_ns()  # so that runs that start within the same second have different files
        name = f"events.out.tfevents.{now // 10**9}.{socket.gethostname()}.{now}"
        self._file = RecordWriter(str(folder / name))
        self._write(0, file_version="brain.Event:2")
        if purge_from is not None:
            self._write(purge_from, file_version="brain.Event:2")
            self.purge(purge_from)

    def purge(self, step: int) -> None:
        """Makes TensorBoard discard the earlier events of `step` and later steps."""
        from tensorboardX.proto.event_pb2 import SessionLog

        self._write(step, session_log=SessionLog(status=SessionLog.START))

    def add_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes the values of a step, by tag."""
        from tensorboardX.proto.summary_pb2 import Summary

        # A single record, because most of its time goes into its checksums, computed in Python.
        self._add(step, [Summary.Value(tag=name, simple_value=x) for name, x in scalars.items()])

    def add_histogram(self, step: int, tag: str, histogram: Histogram) -> None:
        """Writes a histogram, with the statistics of the centers of its bins."""
        from tensorboardX.proto.summary_pb2 import HistogramProto, Summary

        edges, counts = histogram.edges, histogram.counts
        centers = (edges[1:] + edges[:-1]) / 2
        occurring = centers[counts > 0] if counts.any() else centers
        content = HistogramProto(
            min=occurring[0],
            max=occurring[-1],
            num=counts.sum(),
            sum=(centers * counts).sum(),
            sum_squares=(centers**2 * counts).sum(),
            # The first bucket counts smaller values.
            bucket_limit=edges.tolist(),
            bucket=[0, *counts.tolist()],
        )
        self._add(step, [Summary.Value(tag=tag, histo=content)])

    def add_png(self, step: int, tag: str, content: bytes) -> None:
        """Writes an image, given as the content of a PNG file."""
        from tensorboardX.proto.summary_pb2 import Summary

        width, height = png_size(content)
        image = Summary.Image(
            width=width, height=height, colorspace=3, encoded_image_string=content
        )
        self._add(step, [Summary.Value(tag=tag, image=image)])

    def add_markdown(self, step: int, tag: str, text: str) -> None:
        """Writes a text in Markdown."""
        from tensorboardX.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboardX.proto.tensor_pb2 import TensorProto
        from tensorboardX.proto.tensor_shape_pb2 import TensorShapeProto

        plugin = SummaryMetadata.PluginData(plugin_name="text")
        tensor = TensorProto(
            dtype="DT_STRING",
            string_val=[text.encode()],
            tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
        )
        metadata = SummaryMetadata(plugin_data=plugin)
        self._add(step, [Summary.Value(tag=tag, metadata=metadata, tensor=tensor)])

    def _add(self, step: int, values: list[Any]) -> None:
        from tensorboardX.proto.summary_pb2 import Summary

        self._write(step, summary=Summary(value=values))

    def _write(self, step: int, **content: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        event = Event(wall_time=time.time(), step=step, **content)
        self._file.write(event.SerializeToString())

    def flush(self) -> None:
        """Writes buffered events to the file."""
        self._file.flush()

    def close(self) -> None:
        """Closes the file. Call `flush` first, because errors are not raised here."""
        with contextlib.suppress(OSError):
            self._file.close()


class EpochEvents:
    """The means of epochs in event files, as the callback `TensorBoard` of Keras writes them.

    The files are in the subfolders `train` and `validation` of a folder, which is created; steps
    are epochs, counted from 0.
    """

    def __init__(self, folder: str) -> None:
        self._root = Path(folder)
        self._files: dict[str, EventFile] = {}

    def add(self, epoch: int, means: Mapping[str, float]) -> None:
        """Writes the means of an epoch by name; discards this and later epochs of an earlier run.

        Names of validation metrics begin with `val_`.
        """
        parts: dict[str, dict[str, float]] = {"train": {}, "validation": {}}
        for name, value in means.items():
            part = "validation" if name.startswith("val_") else "train"
            parts[part][f"epoch_{name.removeprefix('val_')}"] = value
        for part, scalars in parts.items():
            if not scalars:
                continue
            if part not in self._files:
                self._root.mkdir(parents=True, exist_ok=True)
                exists = (self._root / part).exists()
                self._files[part] = EventFile(self._root / part, epoch if exists else None)
            self._files[part].add_scalars(epoch, scalars)
            self._files[part].flush()  # a killed run leaves its epochs

    def close(self) -> None:
        """Closes the files."""
        for file in self._files.values():
            file.close()
        self._files = {}

"""TensorBoard event files."""

import contextlib
import importlib
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from spmdtrain.files import no_follow


def import_writer() -> None:
    """Imports the modules that write event files, so that the first write is as fast as others."""
    with _without_module("google.cloud.storage"):
        for module in ("record_writer", "proto.event_pb2", "proto.summary_pb2"):
            importlib.import_module(f"tensorboardX.{module}")


@contextlib.contextmanager
def _without_module(name: str) -> Iterator[None]:
    """Makes imports of an optional module fail, unless it is imported already.

    tensorboardX would import the client of Google Cloud Storage if it is installed, which takes
    a tenth of the start of a run. Event files are written to local files only.
    """
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]


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

    def add(
        self,
        step: int,
        scalars: Mapping[str, float],
        histograms: Mapping[str, Mapping[int, int]],
    ) -> None:
        """Writes the values of a step.

        Args:
          step: The step.
          scalars: Tag to value.
          histograms: Tag to the count of each integer; at least one integer each.
        """
        from tensorboardX.proto.summary_pb2 import HistogramProto, Summary

        # A single record, because most of its time goes into its checksums, computed in Python.
        values = [Summary.Value(tag=name, simple_value=x) for name, x in scalars.items()]
        for name, counts in histograms.items():
            numbers = sorted(counts)
            histogram = HistogramProto(
                min=numbers[0],
                max=numbers[-1],
                num=sum(counts.values()),
                sum=sum(n * count for n, count in counts.items()),
                sum_squares=sum(n * n * count for n, count in counts.items()),
                # A bucket for each integer, with edges halfway to its neighbors.
                bucket_limit=[n + 0.5 for n in range(numbers[0] - 1, numbers[-1] + 1)],
                bucket=[counts.get(n, 0) for n in range(numbers[0] - 1, numbers[-1] + 1)],
            )
            values.append(Summary.Value(tag=name, histo=histogram))
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

"""The interface of trackers."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdtrain.record.run_files import Status
from spmdtrain.trackers.media import Figure, Histogram, Image, Table, Text


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """The run that a tracker is about to record."""

    name: str
    """The name of the workdir; "run" without one."""
    workdir: str | None
    """The folder or URL of the run."""
    folder: Path | None
    """A local folder whose content is copied to the workdir: the workdir itself unless that is a
    URL. None without a workdir."""
    step: int
    """The step from which the run starts: 0, or the step of the checkpoint that it resumes."""
    earlier: str | None
    """What `Tracker.start` returned at an earlier start of this run; None at the first one."""
    config: Mapping[str, Any]
    """The resolved configuration, as JSON values."""


class Tracker:
    """Receives the metrics and media of a run. The base class of trackers.

    A tracker overrides the methods it needs; the others do nothing. All of them are called in one
    thread, which belongs to the tracker, in process 0. An exception ends the tracking, not the run.
    Tags are `SPLIT/NAME`, such as `train/loss`. The arrays of media are NumPy arrays.

    Attributes:
      name: Names the tracker in messages and in `trackers.json`. By default the name of the class.
      close_timeout: Seconds that the run waits at its end for pending calls and `close`.
    """

    name: str = ""
    close_timeout: float = 60.0

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "name" not in vars(cls):
            cls.name = cls.__name__

    def start(self, run: RunInfo) -> str | None:
        """Begins to record a run, or continues to.

        Args:
          run: The run.

        Returns:
          An identifier by which a later start of this run finds what was recorded: letters, digits
          and `._-`. None if there is none.
        """
        return None

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Records the metrics of a step.

        Args:
          step: The step.
          values: Tag to value.
        """

    def image(self, step: int, tag: str, image: Image) -> None:
        """Records images.

        Args:
          step: The step.
          tag: The tag.
          image: Its array is uint8 (N, H, W, C), where C is 1, 3 or 4.
        """

    def text(self, step: int, tag: str, text: Text) -> None:
        """Records texts.

        Args:
          step: The step.
          tag: The tag.
          text: Its value is a tuple of strings.
        """

    def histogram(self, step: int, tag: str, histogram: Histogram) -> None:
        """Records a histogram.

        Args:
          step: The step.
          tag: The tag.
          histogram: It has `edges` (n + 1,) and `counts` (n,).
        """

    def table(self, step: int, tag: str, table: Table) -> None:
        """Records a table.

        Args:
          step: The step.
          tag: The tag.
          table: Its columns are lists of numbers and strings.
        """

    def figure(self, step: int, tag: str, figure: Figure) -> None:
        """Records a figure.

        Args:
          step: The step.
          tag: The tag.
          figure: Its content is PNG or SVG, as bytes.
        """

    def artifact(self, path: str, name: str) -> None:
        """Records a file.

        Args:
          path: The path of the file.
          name: The name under which to record it.
        """

    def rewind(self, step: int) -> None:
        """Prepares for steps after `step` that were recorded already and are recorded again.

        Args:
          step: The last step whose records are valid.
        """

    def flush(self) -> None:
        """Writes what is buffered; called when no call is pending."""

    def close(self, status: Status) -> None:
        """Ends the recording.

        Args:
          status: How the run ended.
        """

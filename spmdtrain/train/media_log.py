"""Media that a run logs: by the user's calls, and those declared for evaluations."""

import functools
import os
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from spmdtrain.adapters.base import Function
from spmdtrain.errors import UserError, did_you_mean
from spmdtrain.record.run_files import Split
from spmdtrain.trackers.base import Figure, Media
from spmdtrain.trackers.run_trackers import RunTrackers, check_items

_SPLITS = (Split.TRAIN, Split.EVAL, Split.TEST)


class MediaLogger:
    """The methods of `Trainer` and `Loop` that log media."""

    @property
    @abstractmethod
    def _trackers_and_step(self) -> tuple[RunTrackers, int]:
        """The trackers of the run, and its step; raises `UserError` if there is no run."""

    def log(
        self, media: Mapping[str, Media], step: int | None = None, *, split: str = "train"
    ) -> None:
        """Logs images, texts, histograms, tables and figures, without waiting for the devices.

        They are written to `media.jsonl` and `media/` of the workdir, and passed to the trackers,
        by process 0. All processes may call it.

        Args:
          media: Name to `Image`, `Text`, `Histogram`, `Table` or `Figure`.
          step: The step; by default the step of the callback, or the last one.
          split: "train", "eval" or "test".

        Raises:
          UserError: If a name or an item is not valid, or no run is in progress.
        """
        if split not in _SPLITS:
            raise UserError(f"there is no split {split!r}.{did_you_mean(split, _SPLITS)}")
        trackers, current = self._trackers_and_step
        if step is not None and (type(step) is not int or step < 0):
            raise UserError(f"log(): step is {step!r}: it must be a whole number, 0 or more")
        check_items(media, "log()")
        trackers.media(current if step is None else step, Split(split), media)

    def log_artifact(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        """Passes a file to the trackers that keep files: W&B, MLflow and Trackio.

        It is read later, so it must not change until the run has ended.

        Args:
          path: The path of the file.
          name: The name of the artifact; by default the name of the file.

        Raises:
          UserError: If there is no such file, or no run is in progress.
        """
        trackers, _ = self._trackers_and_step
        if not os.path.isfile(path):
            raise UserError(f"log_artifact(): {os.fspath(path)} is not a file")
        trackers.artifact(os.fspath(path), name or os.path.basename(path))


def checked_media(function: Function | None) -> Function | None:
    """Returns a function of (model, batch) that checks the media that it returns by name.

    It is traced by JAX. Raises `UserError` if it is no function.
    """
    if function is None:
        return None
    if not callable(function):
        raise UserError(
            f"media is a {type(function).__name__}: it must be a function (model, batch) -> media "
            "by name"
        )

    @functools.wraps(function)
    def checked(*args: Any, **declared: Any) -> dict[str, Media]:
        found = function(*args, **declared)
        check_items(found, "media")
        for name, item in found.items():
            if isinstance(item, Figure):
                raise UserError(
                    f"media: {name!r} is a Figure, which has no arrays: log it in a callback"
                )
        return dict(found)

    return checked

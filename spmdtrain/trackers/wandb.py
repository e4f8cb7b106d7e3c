"""The tracker of Weights & Biases."""

import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from spmdtrain.record.run_files import Status
from spmdtrain.trackers.base import RunInfo, Tracker
from spmdtrain.trackers.media import Figure, Histogram, Image, Table, Text

PROJECT = "spmdtrain"
"""The project of trackers that have one, unless the user names another."""


class WandbTracker(Tracker):
    """Records a run with Weights & Biases.

    The environment variables of its client apply: WANDB_MODE=offline writes to the folder `wandb`
    of the current directory alone.

    Args:
      **options: Arguments of `wandb.init`, such as `project` and `entity`.
    """

    name = "wandb"

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._run: Any = None

    def start(self, run: RunInfo) -> str:
        """Begins the run, or continues the run of an earlier start."""
        import wandb

        mode = self._options.get("mode") or wandb.setup().settings.mode
        # The client would ask on a terminal, which shows the progress of the run.
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            raise ValueError("no API key: call `wandb login` first, or set WANDB_MODE=offline")
        defaults = {
            "project": os.environ.get("WANDB_PROJECT", PROJECT),
            "name": run.name,
            "id": run.earlier or uuid.uuid4().hex[:12],
            "resume": "allow",
            "reinit": "create_new",  # leaves a run of the user's own script alone
            "config": dict(run.config),
        }
        # The output of the run stays with the terminal.
        settings = wandb.Settings(console="off", silent=True)
        self._run = wandb.init(**{"settings": settings, **defaults, **self._options})
        # The client's own step only rises, and a resumed run repeats steps.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        found: str = self._run.id
        return found

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Records the values with the step among them."""
        self._run.log({"step": step, **values})

    def image(self, step: int, tag: str, image: Image) -> None:
        """Records each image with its caption."""
        import wandb

        captions: Sequence[str | None] = image.captions or [None] * len(image.array)
        images = [
            wandb.Image(each[..., 0] if each.shape[-1] == 1 else each, caption=caption)
            for each, caption in zip(image.array, captions, strict=True)
        ]
        self._run.log({"step": step, tag: images})

    def text(self, step: int, tag: str, text: Text) -> None:
        """Records the texts as a table of one column, because the client has no texts."""
        import wandb

        rows = [[each] for each in text.value]
        self._run.log({"step": step, tag: wandb.Table(columns=["text"], data=rows)})

    def histogram(self, step: int, tag: str, histogram: Histogram) -> None:
        import wandb

        content = wandb.Histogram(np_histogram=(histogram.counts, histogram.edges))
        self._run.log({"step": step, tag: content})

    def table(self, step: int, tag: str, table: Table) -> None:
        import wandb

        content = wandb.Table(columns=list(table.columns), data=table.rows())
        self._run.log({"step": step, tag: content})

    def figure(self, step: int, tag: str, figure: Figure) -> None:
        """Records a PNG figure as an image, and an SVG figure as HTML."""
        import wandb

        if figure.format == "svg":
            content: Any = wandb.Html(figure.content.decode(), inject=False)
        else:
            import io

            from PIL import Image as Pillow

            content = wandb.Image(Pillow.open(io.BytesIO(figure.content)))
        self._run.log({"step": step, tag: content})

    def artifact(self, path: str, name: str) -> None:
        """Records the file as an artifact of type `file`."""
        self._run.log_artifact(path, name=name, type="file")

    def close(self, status: Status) -> None:
        """Ends the run, and waits for its upload."""
        if self._run is not None:
            if status is Status.PREEMPTED:
                self._run.mark_preempting()
            self._run.finish(exit_code=0 if status is Status.FINISHED else 1)

"""The trackers of Weights & Biases, MLflow and Trackio."""

import os
import re
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spmdtrain.record.run_files import Status
from spmdtrain.trackers.base import Figure, Histogram, Image, RunInfo, Table, Text, Tracker

# -- The tracker of Weights & Biases ---------------------------------------------------------------

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
    imports = "wandb.apis.public"  # `wandb.init` imports it, and it imports all models

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


# -- The tracker of MLflow -------------------------------------------------------------------------

_ENDS = {Status.FINISHED: "FINISHED", Status.PREEMPTED: "KILLED"}
_MAX_VALUE = 6000  # characters of a parameter
_MAX_METRICS = 1000  # of one request
_REFUSED = re.compile(r"[^\w/ .-]")  # characters that MLflow refuses in the name of a metric


class MlflowTracker(Tracker):
    """Records a run with MLflow.

    In the name of a metric, `_` replaces each character that MLflow refuses: `acc@5` becomes
    `acc_5`. The environment variables of its client apply. Without MLFLOW_TRACKING_URI, and without
    a server that the script has chosen, it writes to the folder `mlruns` of the current directory.

    Args:
      experiment: Name of MLflow's experiment. None means MLFLOW_EXPERIMENT_NAME, or `spmdtrain`.
    """

    name = "mlflow"
    imports = "mlflow"

    def __init__(self, experiment: str | None = None) -> None:
        self._experiment = experiment
        self._client: Any = None
        self._run = ""

    def start(self, run: RunInfo) -> str:
        """Begins the run, or continues the run of an earlier start."""
        import mlflow
        from mlflow.entities import Param

        uri = None
        if not mlflow.is_tracking_uri_set():  # type: ignore[no-untyped-call]
            # The default, a database, needs more than the client.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = Path("mlruns").absolute().as_uri()
        self._client = client = mlflow.MlflowClient(uri)
        known = self._continue(run.earlier) if run.earlier else None
        if known is None:
            chosen = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            experiment = client.get_experiment_by_name(chosen)
            number = experiment.experiment_id if experiment else client.create_experiment(chosen)
            self._run, known = client.create_run(number, run_name=run.name).info.run_id, set()
        params = {name: str(x)[:_MAX_VALUE] for name, x in _flat(run.config).items()}
        # Parameters cannot change; `config.json` has those of the last start.
        new = [Param(name, value) for name, value in params.items() if name not in known]
        client.log_batch(self._run, params=new)
        client.log_dict(self._run, dict(run.config), "config.json")
        return self._run

    def _continue(self, run: str) -> set[str] | None:
        """Continues a run; returns the names of its parameters, None if it does not exist."""
        from mlflow.exceptions import MlflowException

        try:
            found = self._client.get_run(run)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        self._run = run
        self._client.update_run(run, status="RUNNING")
        return set(found.data.params)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        tags = {tag: _REFUSED.sub("_", tag) for tag in values}
        metrics = [Metric(tags[tag], value, now, step) for tag, value in values.items()]
        for first in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(self._run, metrics=metrics[first : first + _MAX_METRICS])

    def image(self, step: int, tag: str, image: Image) -> None:
        """Records the images as one."""
        array = image.grid()
        array = array[..., 0] if array.shape[-1] == 1 else array
        self._client.log_image(self._run, array, key=tag, step=step)

    def text(self, step: int, tag: str, text: Text) -> None:
        """Records the texts as a file."""
        self._client.log_text(self._run, text.joined(), f"texts/{tag}-{step:08}.txt")

    def histogram(self, step: int, tag: str, histogram: Histogram) -> None:
        """Records edges and counts as a JSON file, because MLflow has no histograms."""
        content = {"edges": histogram.edges.tolist(), "counts": histogram.counts.tolist()}
        self._client.log_dict(self._run, content, f"histograms/{tag}-{step:08}.json")

    def table(self, step: int, tag: str, table: Table) -> None:
        """Records the table as a JSON file, in the format of `mlflow.log_table`."""
        content = {"columns": list(table.columns), "data": table.rows()}
        self._client.log_dict(self._run, content, f"tables/{tag}-{step:08}.json")

    def figure(self, step: int, tag: str, figure: Figure) -> None:
        """Records the figure as a file."""
        split, _, name = tag.partition("/")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f"{name}-{step:08}.{figure.format}")
            path.write_bytes(figure.content)
            self._client.log_artifact(self._run, str(path), f"figures/{split}")

    def artifact(self, path: str, name: str) -> None:
        """Records the file in a folder of this name."""
        self._client.log_artifact(self._run, path, name)

    def close(self, status: Status) -> None:
        if self._run:
            self._client.set_terminated(self._run, _ENDS.get(status, "FAILED"))


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the values of a configuration by name; nested names have a dot."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


# -- The tracker of Trackio ------------------------------------------------------------------------


class TrackioTracker(Tracker):
    """Records a run with Trackio.

    The environment variables of its library apply: TRACKIO_DIR is the folder of its databases, and
    without TRACKIO_SPACE_ID and TRACKIO_SERVER_URL nothing leaves this machine.

    Args:
      **options: Arguments of `trackio.init`, such as `project` and `space_id`.
    """

    name = "trackio"
    imports = "trackio"

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

"""The tracker of MLflow."""

import os
import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spmdtrain.record.run_files import Status
from spmdtrain.trackers.base import RunInfo, Tracker
from spmdtrain.trackers.media import Figure, Histogram, Image, Table, Text
from spmdtrain.trackers.wandb import PROJECT

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

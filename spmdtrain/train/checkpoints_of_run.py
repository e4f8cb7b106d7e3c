"""The checkpoints of a run, by its configuration."""

import functools
from collections.abc import Callable

from spmdtrain.checkpoints.listing import Retention
from spmdtrain.checkpoints.save import Checkpoints
from spmdtrain.config.run_config import RunConfig
from spmdtrain.record.run_files import evaluator_metrics
from spmdtrain.record.storage import folder_of


def open_checkpoints(
    config: RunConfig, workdir: str, check_lock: Callable[[], None]
) -> Checkpoints:
    """Opens the checkpoints of a run's workdir."""
    retention = Retention(
        latest=config.keep_latest,
        best=config.keep_best,
        metric=config.best_metric,
        direction=config.best_direction,
        every_steps=config.keep_every_steps,
        every_hours=config.keep_every_hours,
    )
    metrics = functools.partial(evaluator_metrics, workdir)
    by_evaluator = config.evaluated_by == "evaluator"
    folder = folder_of(workdir) / "checkpoints"
    return Checkpoints(folder, retention, metrics if by_evaluator else None, check_lock)

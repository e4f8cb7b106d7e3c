"""The examples of a step."""

import collections
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from rich.table import Table

from spmdtrain.checkpoints.manifest import read_positions
from spmdtrain.config.run_config import RunConfig
from spmdtrain.data.example_names import describe_values, place_of_example
from spmdtrain.data.sampling import Augment, TrainBatches, all_rows, rows_of
from spmdtrain.data.streams import ShardedStream
from spmdtrain.data.training_data import training_data
from spmdtrain.document.terminal import Terminal
from spmdtrain.errors import UserError, foreign
from spmdtrain.replay.recorded_run import RecordedRun, manifest_at
from spmdtrain.replay.restored_config import restore_config
from spmdtrain.sharding.placement import configure_backend

PyTree = Any


def print_examples(run: RecordedRun, step: int, file: str | None, terminal: Terminal) -> None:
    """Prints the examples of a step: where each comes from, and its values in short.

    Args:
      file: The experiment's file; None for the file that the run has recorded.

    Raises:
      UserError: If the examples cannot be found.
    """
    experiment_file, config = restore_config(run, file, terminal)
    configure_backend(config)
    experiment = experiment_file.build(config)
    data = training_data(experiment.train, config)
    batch = config.skipped_batches.batch_of(step - 1)
    if isinstance(data, ShardedStream):
        with_places = _of_stream(run, data, config, step, experiment.augment)
    else:
        with_places = _of_dataset(data, config, step, experiment.augment)
    table = Table("row", "example", "from", "values")
    for row, (example, place, values) in enumerate(with_places):
        shown = "  ".join(foreign(value, 200) for value in values)
        table.add_row(str(row), example, foreign(place, 300), shown)
    terminal.console.print(table)
    terminal.line(
        f"step {step} used batch {batch}; --skip-steps {batch}:{batch + 1} leaves it out of a run "
        f"that continues from step {step - 1} or an earlier one"
    )


_Example = tuple[str, str, list[str]]  # index, place, values


def _of_dataset(
    data: Any, config: RunConfig, step: int, augment: Augment | None
) -> Iterator[_Example]:
    """Yields the examples of a step of a dataset, after `augment`."""
    size = config.resolved_batch_size
    batches = TrainBatches(
        *(data, size, config.seed, config.shuffle, step, all_rows(size), augment),
        config.skipped_batches,
    )
    indices, _ = batches.examples(step - 1)
    rows = rows_of(batches[step - 1])
    for row, index in enumerate(indices.tolist()):
        yield f"{index:,}", place_of_example(data, index), describe_values(data, rows, row)


def _of_stream(
    run: RecordedRun, data: ShardedStream, config: RunConfig, step: int, augment: Augment | None
) -> Iterator[_Example]:
    """Yields the examples of a step of a stream, read from the last checkpoint before the step."""
    first = max((saved for saved in run.checkpoints.steps if saved < step), default=0)
    positions = {}
    if first:
        if (manifest := manifest_at(run.checkpoints, first)) is None:
            raise UserError(f"checkpoint {run.checkpoints.path(first)} is corrupted")
        positions = dict(read_positions(run.checkpoints.path(first), manifest.stream))
    skipped, size = config.skipped_batches, config.resolved_batch_size
    last = skipped.batch_of(step - 1)
    batches = data.batches(
        size,
        all_rows(size),
        start=skipped.position(first),
        stop=last + 1,
        positions=positions,
        seed=config.seed,
        augment=augment,
    )
    ((batch, _),) = collections.deque(batches, maxlen=1)
    rows = jax.tree.map(np.asarray, batch)
    for row in range(size):
        shard = row * data.shards // size
        yield "", f"shard {shard} of the stream", describe_values(data.stream, rows, row)

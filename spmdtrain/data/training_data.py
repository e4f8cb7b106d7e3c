"""Training data: a dataset, or a stream."""

from typing import Any

from spmdtrain.config.run_config import RunConfig
from spmdtrain.data import datasets
from spmdtrain.data.bad_records import run_dataset
from spmdtrain.data.datasets import Dataset, as_dataset, batched_of
from spmdtrain.data.indexable import describe
from spmdtrain.data.mixture import epoch_size
from spmdtrain.data.sharded_stream import ShardedStream, shards_of
from spmdtrain.data.streams import as_stream
from spmdtrain.errors import UserError
from spmdtrain.strategies import strategy

TrainingData = Dataset | ShardedStream


def training_data(data: Any, config: RunConfig) -> TrainingData:
    """Returns training data as a dataset, or as a stream in shards.

    `data` is anything that `as_dataset` or `as_stream` accepts; `config` is resolved.

    Raises:
      UserError: If `data` is neither, or the configuration has an option that streams do not
        support.
    """
    if isinstance(data, ShardedStream):
        return data
    if (stream := as_stream(data)) is None:
        if config.stream_shards is not None:
            raise UserError(
                f"stream_shards is {config.stream_shards}: it is for streams, and a "
                f"{type(data).__name__} has random access"
            )
        dataset = run_dataset(data, config, "train data")
        batched, size = batched_of(dataset), config.resolved_batch_size
        if batched is not None and batched.batch_size != size:
            raise UserError(
                f"the batches of a {describe(batched.source)} have {batched.batch_size} rows, and "
                f"global_batch_size is {size}: give global_batch_size={batched.batch_size}, or "
                f"Subset(data, np.arange({len(dataset)})), whose examples are in other batches"
            )
        return dataset
    if config.steps is None:
        raise UserError("a stream has no number of examples, so it has no epochs: give steps")
    if strategy(config.strategy).by_servers:
        raise UserError(
            f"strategy {config.strategy} assigns batches to workers by number, and a stream has no "
            "random access: give a dataset, or use another strategy"
        )
    if config.on_bad_record == "skip":
        raise UserError(
            "on_bad_record is 'skip', and which records of a stream are bad is not known before "
            "they are read: leave them out in the stream itself"
        )
    if config.data_on_device:
        raise UserError("data_on_device copies all examples of a dataset; a stream has no end")
    for name, readers in (("data_threads", "threads"), ("data_workers", "worker processes")):
        if number := getattr(config, name):
            raise UserError(
                f"{name} is {number}: {readers} read the batches of a dataset, and a stream reads "
                "ahead itself (Grain: to_iter_dataset(read_options), mp_prefetch)"
            )
    return ShardedStream(stream, shards_of(config))


def examples_per_epoch(data: Any) -> int:
    """Returns the number of examples of an epoch; 0 for a stream or mixture, or without data."""
    if data is None or isinstance(data, ShardedStream) or as_stream(data) is not None:
        return 0
    return epoch_size(as_dataset(data))


SAME_DATA = (
    "give every process the whole dataset, in the same order, and not a shard chosen by its rank: "
    "each process reads only its own rows of a global batch. Data of which each process should "
    "open its files alone are a stream with stream_shards"
)
"""Advice to processes with different data."""


def data_fingerprint(data: TrainingData) -> dict[str, Any]:
    """Returns what identifies training data, as JSON. All processes of a job call it."""
    return data.fingerprint if isinstance(data, ShardedStream) else datasets.fingerprint(data)

"""Data of other libraries: what can be a dataset, and why anything else cannot."""

import sys
from collections.abc import Collection
from typing import Any

from spmdtrain.data.batched import BatchedDataset, holds_batches
from spmdtrain.data.tables import HuggingFaceDataset, arrow_columns, pandas_columns
from spmdtrain.errors import UserError

_STREAMS = {
    "grain.IterDataset": "Give the MapDataset from before .to_iter_dataset()",
    "grain.DatasetIterator": "Give the MapDataset that it iterates over",
    "grain.DataLoader": (
        "Give its source, with its operations as transformations: "
        "grain.MapDataset.source(source).map(function)"
    ),
    "datasets.IterableDataset": "Load it without streaming=True",
    "torch.IterableDataset": "Give a map-style dataset, with __getitem__ and __len__",
    "torch.DataLoader": "Give its dataset, loader.dataset",
    "tensorflow.DatasetV2": (
        "Read its files by an indexed format: docs/data.md names one for each kind of data"
    ),
}
NO_STREAM = (
    "a stream has no number of examples, so it is training data only; evaluate on a list of its "
    "first examples, list(itertools.islice(stream, 1000))"
)


def known_as(data: Any) -> frozenset[str]:
    """Returns an object's classes and bases as `library.Class`, such as `pandas.DataFrame`.

    They identify objects of a library without importing it.
    """
    classes = type(data).__mro__
    return frozenset(f"{c.__module__.partition('.')[0]}.{c.__name__}" for c in classes)


def stream_advice(data: Any) -> tuple[str, str] | None:
    """Returns the name of a known stream, and the dataset to give instead; None for other data."""
    name = min(known_as(data) & _STREAMS.keys(), default=None)
    return None if name is None else (name, _STREAMS[name])


def from_library(data: Any, *, sparse: bool = False) -> Any:
    """Converts a table, and checks a collection, of a library that spmdtrain knows.

    A table becomes a dictionary of arrays or a dataset; other data are returned as they are. If
    `sparse`, examples of a `grain.MapDataset` may be missing.

    Raises:
      UserError: If `data` cannot be a dataset; says what to give instead.
    """
    names = known_as(data)
    if advice := stream_advice(data):
        name, instead = advice
        raise UserError(f"a {name} is not a dataset: {NO_STREAM}. {instead}")
    if splits := sorted(names & {"datasets.DatasetDict", "datasets.IterableDatasetDict"}):
        raise UserError(
            f"a {splits[0]} is not a dataset: it holds several splits: give one, data[name] with "
            f"name in {sorted(data)}"
        )
    if "grain.MapDataset" in names:
        _check_map_dataset(data, sparse)
    return _table(data, names)


def _table(data: Any, names: frozenset[str]) -> Any:
    """Returns the arrays or the dataset of a table; any other object as it is."""
    if "pandas.DataFrame" in names:
        return pandas_columns(data)
    if "polars.LazyFrame" in names:
        raise UserError(
            "a polars.LazyFrame is not a dataset: it has no rows yet: give data.collect()"
        )
    if "polars.DataFrame" in names:
        return arrow_columns(data.to_arrow(), "polars", "polars.DataFrame")
    if names & {"pandas.Series", "polars.Series"}:
        frame = data.to_frame(data.name or "values")
        return next(iter(_table(frame, known_as(frame)).values()))
    if names & {"pyarrow.Table", "pyarrow.RecordBatch"}:
        return arrow_columns(data)
    if holds_batches(names) and not isinstance(data, BatchedDataset):
        return BatchedDataset(data)
    return HuggingFaceDataset(data) if "datasets.Dataset" in names else data


def _check_map_dataset(data: Any, sparse: bool) -> None:
    """Checks that a `grain.MapDataset` has a length, and that its elements are single examples."""
    if len(data) >= sys.maxsize:
        raise UserError(
            "a grain.MapDataset that repeats without end has no epochs: leave .repeat() out; "
            "`epochs` or `steps` of the run give its length"
        )
    check_unbatched(data, "grain.MapDataset", "grain.MapDataset.source(data)")
    removes = {"grain.FilterMapDataset": ".filter()", "grain.FlatMapMapDataset": ".flat_map()"}
    for name, call in removes.items():
        if not sparse and _transformation(data, name) is not None:
            raise UserError(
                f"a grain.MapDataset with {call} has a length that also counts removed examples: "
                "select those that are left, Subset(data, np.array([i for i in range(len(data)) if "
                "data[i] is not None]))"
            )


def check_unbatched(data: Any, name: str, instead: str) -> None:
    """Raises `UserError` if a Grain pipeline has a `batch` without a later `flat_map`.

    For the message, `name` is its kind, and `instead` says what to give if batches are meant to be
    the examples.
    """
    until = ("grain.FlatMapMapDataset", "grain.FlatMapIterDataset")
    for batch in ("grain.BatchMapDataset", "grain.BatchIterDataset", "grain.RebatchIterDataset"):
        if (batches := _transformation(data, batch, until)) is not None:
            raise UserError(
                f"a {name} with .batch() has batches as its examples ({batches}): leave .batch() "
                "out; global_batch_size of the run gives their size. If each batch is meant to be "
                f"one example, give {instead}"
            )


def check_examples(iterable: Any) -> None:
    """Raises `UserError` if an iterable of a `Stream` is a `DataLoader` that makes batches.

    Batches of a `grain.IterDataset` may be meant to be the examples.
    """
    names = known_as(iterable)
    if "grain.DataLoader" in names:
        check_unbatched(
            getattr(iterable, "_dataset", None),
            "grain.DataLoader",
            "the grain.IterDataset of the batches in spmdtrain.Stream(make_shard)",
        )
    makes_batches = getattr(iterable, "batch_size", None) or getattr(
        iterable, "batch_sampler", None
    )
    if "torch.DataLoader" in names and makes_batches:
        raise UserError(
            f"a {type(iterable).__name__} of PyTorch has batches as its examples: give it "
            "batch_size=None; global_batch_size of the run gives their size"
        )


def inputs_of(dataset: Any) -> list[Any]:
    """Returns the datasets that a `grain.MapDataset` or `grain.IterDataset` reads.

    Interleaved datasets that are made lazily are left out.
    """
    # An InterleaveIterDataset, with which mp_prefetch begins, does not count them as its parents.
    interleaved = getattr(dataset, "_datasets", ())
    listed = interleaved if isinstance(interleaved, (list, tuple)) else ()
    return [*getattr(dataset, "parents", ()), *listed]


def _transformation(data: Any, name: str, until: Collection[str] = ()) -> Any:
    """Returns the first transformation of a class on the way to the sources; None without one."""
    names = known_as(data)
    if name in names:
        return data
    if names & {*until}:
        return None
    found = (_transformation(each, name, until) for each in inputs_of(data))
    return next((each for each in found if each is not None), None)

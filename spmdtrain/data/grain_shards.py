"""Shards of Grain pipelines, and the preparation of their worker processes."""

import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from spmdtrain.data.libraries import inputs_of, known_as
from spmdtrain.data.read_ahead import begin_worker, parse_flags, prepare_workers
from spmdtrain.errors import UserError, option

# Transformations of a grain.IterDataset whose shards together would differ from the whole.
_DIFFERENT_IN_SHARDS = {
    "LimitIterDataset": ("a limit", "each shard would have that many examples"),
    "MapWithIndexIterDataset": (".map_with_index()", "the index would count within each shard"),
    "RandomMapIterDataset": (".random_map()", "each shard would draw the same numbers"),
}


def shard_of(dataset: Any, index: int, count: int) -> Any:
    """Returns a shard of a `grain.IterDataset`: every `count`-th example of its random access part.

    Grain divides datasets in the same way over the workers of `mp_prefetch`. The result shares all
    data with `dataset`, because slices are views.

    Raises:
      UserError: If it cannot be divided into that many shards.
    """
    if count == 1:
        return dataset
    shared: dict[int, Any] = {}
    _share_map_datasets(dataset, shared)
    shard = copy.deepcopy(dataset, shared)
    _slice(shard, slice(index, None, count), set())
    return shard


def largest_divisor(count: int, most: int) -> int:
    """Returns the largest divisor of `count` that is not above `most`."""
    return next(n for n in range(most, 0, -1) if count % n == 0)


def prepare(iterable: Any) -> None:
    """Prepares an iterable that may be a Grain pipeline for reading.

    The processes of its `mp_prefetch` or `worker_count` end with this process, whatever ends it.
    """
    if "grain" not in sys.modules:
        return
    parse_flags()
    if "grain.DataLoader" in known_as(iterable):
        iterable = getattr(iterable, "_dataset", None)
    workers = [x for x in _pipeline(iterable) if type(x).__name__ == "ProcessPrefetchIterDataset"]
    if workers:
        prepare_workers()
    for node in workers:
        # An argument of mp_prefetch, which the user has called; Grain has no other way to set it.
        own = node._worker_init_fn
        node._worker_init_fn = own if isinstance(own, _BeginWorker) else _BeginWorker(own)


@dataclass(frozen=True)
class _BeginWorker:
    """The function that a worker process of a stream calls first."""

    then: Callable[[], None] | None

    def __call__(self) -> None:
        begin_worker()
        if self.then is not None:
            self.then()


def _pipeline(dataset: Any) -> Iterator[Any]:
    """Yields the datasets of a pipeline, from its end to its sources."""
    yield dataset
    for each in inputs_of(dataset):
        yield from _pipeline(each)


def _share_map_datasets(dataset: Any, shared: dict[int, Any]) -> None:
    """Marks the `grain.MapDataset`s of a pipeline as not to copy."""
    for parent in inputs_of(dataset):
        if hasattr(parent, "__len__"):
            shared[id(parent)] = parent
        else:
            _share_map_datasets(parent, shared)


def _slice(dataset: Any, part: slice, seen: set[int]) -> None:
    if id(dataset) in seen:  # two branches of a pipeline may begin with the same dataset
        return
    seen.add(id(dataset))
    name = type(dataset).__name__
    if name in _DIFFERENT_IN_SHARDS:
        what, why = _DIFFERENT_IN_SHARDS[name]
        raise UserError(
            f"a grain.IterDataset with {what} cannot be divided into shards, because {why}: apply "
            "it to the grain.MapDataset, before .to_iter_dataset(). Or give "
            "spmdtrain.Stream(make_shard), with make_shard(index, count) for each shard"
        )
    if hasattr(dataset, "set_slice"):
        # The datasets that InterleaveIterDataset reads, also for the workers of mp_prefetch.
        parts = getattr(dataset, "_datasets", None)
        if parts is not None and len(parts) < part.step:
            fewer = largest_divisor(part.step, len(parts)) if len(parts) else 1
            raise UserError(
                f"a grain.IterDataset that reads {len(parts)} datasets or workers of mp_prefetch "
                f"cannot be divided into {part.step} shards: give "
                f"{option('stream_shards', fewer)}, or at least {part.step} of them"
            )
        dataset.set_slice(part)
        return
    if not dataset.parents or any(hasattr(parent, "__len__") for parent in dataset.parents):
        raise UserError(
            f"a {name} of Grain cannot be divided into shards. Give spmdtrain.Stream(make_shard): "
            "make_shard(index, count) returns the pipeline of shard `index` of `count`"
        )
    for parent in dataset.parents:
        _slice(parent, part, seen)

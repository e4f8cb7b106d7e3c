"""Streams: examples without random access, in shards whose iterators have a state."""

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from spmdtrain.errors import UserError

_NEEDED = (
    "Give spmdtrain.Stream(make_shard): make_shard(index, count) returns the iterable of shard "
    "`index` of `count`, such as a grain.DataLoader with these ShardOptions; its iterators need "
    "get_state() and set_state(state)"
)


@dataclass(frozen=True)
class Stream:
    """Training examples that are read in order.

    A run divides a stream into `stream_shards` shards and reads each by an iterator of its own. A
    shard that ends begins its next epoch at once, so shards may differ in length.

    Attributes:
      make_shard: (index, count) -> the iterable of the examples of shard `index` of `count`; called
        for every epoch. Its iterators have `get_state()` and `set_state(state)`, or it has
        `state_dict()` and `load_state_dict(state)` itself. If it has `set_epoch(epoch)`, that is
        called before each epoch, counted from 0.
    """

    make_shard: Callable[[int, int], Iterable[Any]]


def is_iterable_only(data: Any) -> bool:
    """Returns whether examples can only be iterated over, without random access."""
    indexable = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    return isinstance(data, (Stream, Iterable)) and not indexable and not hasattr(data, "rows")


def as_stream(data: Any) -> Stream | None:
    """Returns the stream of training data that have no random access; None for other data.

    Args:
      data: A `Stream`, a `grain.IterDataset`, a Hugging Face `IterableDataset`, an iterable whose
        iterators have a state, or any other object.

    Raises:
      UserError: If it is an iterable that cannot begin again, such as a generator.
    """
    if isinstance(data, Stream):
        return data
    if not is_iterable_only(data):
        return None
    name, library = type(data).__name__, type(data).__module__.partition(".")[0]
    if isinstance(data, Iterator):
        raise UserError(
            f"a {name} is no stream, because it can be read only once and, after an interruption, "
            f"not from the same example. {_NEEDED}"
        )
    if library == "datasets" and hasattr(data, "num_shards"):
        return Stream(lambda index, count: _shard_of_hugging_face(data, index, count))
    if library == "grain" and hasattr(data, "parents"):
        return Stream(lambda index, count: _shard_of_grain(data, index, count))
    return Stream(lambda index, count: _whole(data, index, count))


def _whole(data: Iterable[Any], index: int, count: int) -> Iterable[Any]:
    """Returns an iterable of unknown kind if it is the only shard."""
    if count > 1:
        raise UserError(
            f"a {type(data).__name__} cannot be divided into {count} shards. {_NEEDED}. Or give "
            "stream_shards=1, with which one process reads all of it"
        )
    return data


# -- Grain -----------------------------------------------------------------------------------------


def _shard_of_grain(dataset: Any, index: int, count: int) -> Iterable[Any]:
    """Returns a shard of a `grain.IterDataset`: every `count`-th example of its random access part.

    Grain divides datasets in the same way over the workers of `mp_prefetch`. The result shares all
    data with `dataset`, because slices are views.
    """
    if count == 1:
        return dataset
    shared: dict[int, Any] = {}
    _share_map_datasets(dataset, shared)
    shard = copy.deepcopy(dataset, shared)
    _slice(shard, slice(index, None, count), set())
    return shard


def _share_map_datasets(dataset: Any, shared: dict[int, Any]) -> None:
    """Marks the `grain.MapDataset`s of a pipeline as not to copy."""
    for parent in dataset.parents:
        if hasattr(parent, "__len__"):
            shared[id(parent)] = parent
        else:
            _share_map_datasets(parent, shared)


def _slice(dataset: Any, part: slice, seen: set[int]) -> None:
    if id(dataset) in seen:  # two branches of a pipeline may begin with the same dataset
        return
    seen.add(id(dataset))
    name = type(dataset).__name__
    if name == "LimitIterDataset":
        raise UserError(
            "a grain.IterDataset with a limit cannot be divided into shards, because each shard "
            f"would have that many examples. Limit the grain.MapDataset before. {_NEEDED}"
        )
    if hasattr(dataset, "set_slice"):
        dataset.set_slice(part)
        return
    if not dataset.parents or any(hasattr(parent, "__len__") for parent in dataset.parents):
        raise UserError(f"a {name} of Grain cannot be divided into shards. {_NEEDED}")
    for parent in dataset.parents:
        _slice(parent, part, seen)


# -- Hugging Face ----------------------------------------------------------------------------------


def _shard_of_hugging_face(dataset: Any, index: int, count: int) -> Iterable[Any]:
    """Returns a shard of an `IterableDataset`: some of its files."""
    if "BufferShuffledExamplesIterable" in _stages(getattr(dataset, "_ex_iterable", None)):
        raise UserError(
            "shuffle() of a Hugging Face IterableDataset cannot be resumed exactly, because its "
            "buffer is not part of its state: leave it out, shuffle the files beforehand, or give "
            "a map-style dataset, which spmdtrain shuffles"
        )
    if dataset.num_shards < count:
        raise UserError(
            f"the Hugging Face IterableDataset has num_shards={dataset.num_shards} (its files), "
            f"fewer than stream_shards={count}: give --stream-shards {dataset.num_shards} or a "
            "divisor of it, or dataset.reshard()"
        )
    return dataset.shard(num_shards=count, index=index)


def _stages(iterable: Any) -> set[str]:
    """Returns the class names of the stages of a Hugging Face pipeline."""
    if iterable is None:
        return set()
    before = [getattr(iterable, "ex_iterable", None), *getattr(iterable, "ex_iterables", ())]
    return {type(iterable).__name__}.union(*map(_stages, before))

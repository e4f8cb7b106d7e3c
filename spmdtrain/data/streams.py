"""Streams: examples without random access, in shards whose iterators have a state."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from spmdtrain.data import grain_shards
from spmdtrain.data.batched import holds_batches
from spmdtrain.data.libraries import check_unbatched, known_as, stream_advice
from spmdtrain.data.tables import HuggingFaceStream
from spmdtrain.errors import UserError, option

_NEEDED = (
    "Give spmdtrain.Stream(make_shard): make_shard(index, count) returns the iterable of shard "
    "`index` of `count`, such as a grain.DataLoader with these ShardOptions; its iterators need "
    "get_state() and set_state(state)"
)
_WITHOUT_STATE = ("torch.DataLoader", "tensorflow.DatasetV2")


@dataclass(frozen=True)
class Stream:
    """Training examples that are read in order.

    A run divides a stream into `stream_shards` shards and reads each by an iterator of its own. A
    shard that ends begins its next epoch at once, so shards may differ in length. An epoch of a
    shard that is shorter than its first one is an error, because data are missing.

    Attributes:
      make_shard: (index, count) -> the iterable of the examples of shard `index` of `count`; called
        for every epoch. Its iterators have `get_state()` and `set_state(state)`, or it has
        `state_dict()` and `load_state_dict(state)` itself. If it has `set_epoch(epoch)`, that is
        called before each epoch, counted from 0.
      same_length: Whether each epoch of a shard has at least as many examples as its first. False
        for a pipeline that removes examples at random: then missing data are not noticed.
    """

    make_shard: Callable[[int, int], Iterable[Any]]
    same_length: bool = True


def is_iterable_only(data: Any) -> bool:
    """Returns whether examples can only be iterated over, without random access."""
    indexable = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    indexable = indexable or holds_batches(known_as(data))
    return isinstance(data, (Stream, Iterable)) and not indexable and not hasattr(data, "rows")


def as_stream(data: Any) -> Stream | None:
    """Returns the stream of training data that have no random access; None for other data.

    Such data are a `Stream`, a `grain.IterDataset`, a Hugging Face `IterableDataset`, or an
    iterable whose iterators have a state.

    Raises:
      UserError: If it is an iterable that cannot begin again, such as a generator, or is known to
        be no stream of single examples that can be resumed.
    """
    if isinstance(data, Stream):
        return data
    if not is_iterable_only(data):
        return None
    if isinstance(data, Iterator):
        raise UserError(
            f"a {type(data).__name__} is not a stream, because it can be read only once and, after "
            f"an interruption, not from the same example. {_NEEDED}"
        )
    if "datasets.IterableDataset" in known_as(data):
        return Stream(lambda index, count: _shard_of_hugging_face(data, index, count))
    if "grain.IterDataset" in known_as(data):
        check_unbatched(data, "grain.IterDataset", "spmdtrain.Stream(make_shard) of the batches")
        return Stream(lambda index, count: grain_shards.shard_of(data, index, count))
    name, instead = stream_advice(data) or ("", "")
    if name in _WITHOUT_STATE and not hasattr(data, "state_dict"):
        raise UserError(
            f"a {name} is not a stream, because its position cannot be stored: {instead}"
        )
    return Stream(lambda index, count: _whole(data, index, count))


def _whole(data: Iterable[Any], index: int, count: int) -> Iterable[Any]:
    """Returns an iterable of unknown kind if it is the only shard."""
    if count > 1:
        raise UserError(
            f"a {type(data).__name__} cannot be divided into {count} shards. {_NEEDED}. Or, if "
            "its own iterators have both, give stream_shards=1: one process reads all of it"
        )
    return data


# -- Hugging Face ----------------------------------------------------------------------------------


def _shard_of_hugging_face(dataset: Any, index: int, count: int) -> Iterable[Any]:
    """Returns a shard of an `IterableDataset`: some of its files."""
    if (pipeline := getattr(dataset, "_ex_iterable", None)) is None:
        raise UserError(
            "spmdtrain cannot see whether this Hugging Face IterableDataset is shuffled, which "
            "could not be resumed, because this version of datasets has another structure. "
            f"{_NEEDED}"
        )
    stages = list(_stages(pipeline))
    if any(type(stage).__name__ == "BufferShuffledExamplesIterable" for stage in stages):
        raise UserError(
            "shuffle() of a Hugging Face IterableDataset cannot be resumed exactly, because its "
            "buffer is not part of its state: leave it out, shuffle the files beforehand, or give "
            "a map-style dataset, which spmdtrain shuffles"
        )
    functions = {getattr(getattr(stage, "function", None), "__name__", "") for stage in stages}
    if functions & {"_batch_fn", "_batch_arrow_table"}:
        raise UserError(
            "a Hugging Face IterableDataset with .batch() has batches as its examples: leave "
            ".batch() out; global_batch_size of the run gives their size"
        )
    if dataset.num_shards < count:
        fewer = grain_shards.largest_divisor(count, dataset.num_shards)
        raise UserError(
            f"the Hugging Face IterableDataset has num_shards={dataset.num_shards} (its files), "
            f"fewer than stream_shards={count}: give "
            f"{option('stream_shards', fewer)}, or dataset.reshard()"
        )
    return HuggingFaceStream.from_data(dataset.shard(num_shards=count, index=index))


def _stages(iterable: Any) -> Iterator[Any]:
    """Yields the stages of a Hugging Face pipeline."""
    if iterable is not None:
        yield iterable
        before = [getattr(iterable, "ex_iterable", None), *getattr(iterable, "ex_iterables", ())]
        for each in before:
            yield from _stages(each)

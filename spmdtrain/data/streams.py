"""Streams: examples without random access, in shards whose iterators have a state."""

import base64
import contextlib
import copy
import functools
import gc
import itertools
import json
import multiprocessing
import pickle
import sys
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from spmdtrain.config.run_config import RunConfig
from spmdtrain.data.datasets import (
    HuggingFaceStream,
    check_examples,
    check_unbatched,
    fingerprint_of_rows,
    inputs_of,
    known_as,
    stream_advice,
)
from spmdtrain.data.examples import BATCHED, ExampleReader, raise_with_place
from spmdtrain.data.read_ahead import (
    begin_worker,
    death_of_worker,
    in_thread,
    parse_flags,
    prepare_workers,
)
from spmdtrain.data.sampling import Augment, augmented
from spmdtrain.distributed import process_group
from spmdtrain.errors import StorageError, UserError, option

_NEEDED = (
    "Give spmdtrain.Stream(make_shard): make_shard(index, count) returns the iterable of shard "
    "`index` of `count`, such as a grain.DataLoader with these ShardOptions; its iterators need "
    "get_state() and set_state(state)"
)
_WITHOUT_STATE = ("torch.DataLoader", "tensorflow.DatasetV2", "webdataset.WebDataset")


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
    indexable = indexable or not BATCHED.isdisjoint(known_as(data))
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
        return Stream(lambda index, count: shard_of(data, index, count))
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
        fewer = largest_divisor(count, dataset.num_shards)
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


# -- The reader of one shard of a stream: its examples epoch after epoch, and its position ---------

PyTree = Any
_END = object()


class Place(NamedTuple):
    """The place of an example in a stream; its text is how messages name it."""

    number: int
    epoch: int
    shard: int
    shards: int

    def __str__(self) -> str:
        return f"{self.number} of epoch {self.epoch} of shard {self.shard} of {self.shards}"


@dataclass(frozen=True)
class Position:
    """A position in a shard.

    Attributes:
      shard: The shard as named in messages.
      pickled: Epoch, number of examples, length of the first epoch and the iterator's state, which
        the iterator may change later. Pickle copies them 20 times faster than `text` does, and each
        batch has positions; only a save stores them, as text.
    """

    shard: str
    pickled: bytes

    def text(self) -> str:
        """Returns the position as text.

        Raises:
          UserError: If the state of the iterator holds a value that cannot be stored.
        """
        try:
            return as_text(pickle.loads(self.pickled))
        except UnsupportedStateError as error:
            raise UserError(
                f"the state of {self.shard} holds {error}, which a checkpoint cannot store: it may "
                "hold numbers, text, bytes, NumPy arrays, lists, tuples and dictionaries"
            ) from error


class ShardReader:
    """The reader of a shard of a stream.

    It continues from `position`, the text of a position; None to begin.

    Raises:
      UserError: If the shard cannot be made, or has no state.
    """

    def __init__(self, stream: Stream, index: int, count: int, position: str | None = None) -> None:
        self._stream, self.index, self._count = stream, index, count
        self.epoch = 0
        """Epoch of the shard that the last example belongs to, from 0."""
        self.number = 0
        """Number of examples read of this epoch."""
        self._length: int | None = None  # of the first epoch that was read to its end
        self._restored: int | None = None  # `number` of the position, until an example is read
        state = None
        if position is not None:
            self.epoch, self.number, self._length, state = from_text(position)
            self._restored = self.number
        self._iterator = self._open()
        if position is not None:
            with self._named_errors("cannot continue"):
                self._iterator.set_state(state)

    @property
    def name(self) -> str:
        """The shard as named in messages."""
        return f"shard {self.index} of {self._count} of the stream"

    def read(self) -> PyTree:
        """Returns the next example; begins the next epoch at the end of the shard.

        Raises:
          UserError: If it cannot be read, or the shard is empty or has become shorter.
          StorageError: If storage, a connection or a worker process fails.
        """
        while (example := self._next(self._iterator)) is _END:
            self._check_end()
            self.close()
            self.epoch, self.number = self.epoch + 1, 0
            self._iterator = self._open()
        self.number += 1
        self._restored = None
        return example

    @property
    def last(self) -> "Place":
        """The place of the example that was read last."""
        return Place(self.number - 1, self.epoch, self.index, self._count)

    def _next(self, iterator: Any) -> Any:
        with self._named_errors("failed"):
            return next(iterator, _END)

    def _check_end(self) -> None:
        """Checks that the epoch which has ended is complete; keeps the first one's length."""
        if not self.number:
            raise UserError(
                f"{self.name} has no examples in epoch {self.epoch}: give fewer stream_shards, or "
                "iterables that can be read again"
            )
        if not self._stream.same_length:
            return
        found, before = self.number, self._length or 0
        if self._restored is not None and self._restored > before:
            # Nothing has followed the position: it is the end, or the shard now ends before it.
            found, before = self._read_again(self._restored), self._restored
        if found < before:
            raise UserError(
                f"{self.name} ends after {found} examples of epoch {self.epoch}, and {before} were "
                "read before: files are missing or truncated. If its epochs differ in length, give "
                "Stream(make_shard, same_length=False)"
            )
        self._length = self._length or found

    def _read_again(self, most: int) -> int:
        """Reads the epoch again, up to `most` examples, and returns their number."""
        if process_group.is_chief():
            message = f"{self.name}: reading epoch {self.epoch} again, to check that it is complete"
            print(message, file=sys.stderr, flush=True)
        iterator = self._open()
        try:
            return sum(1 for _ in itertools.islice(self._rest(iterator), most))
        finally:
            _close(iterator)

    def _rest(self, iterator: Any) -> Iterator[Any]:
        while (example := self._next(iterator)) is not _END:
            yield example

    def position(self) -> "Position":
        """Returns the position after the last example.

        Raises:
          UserError: If the iterator cannot give its state.
        """
        with self._named_errors("has no state"):
            state = self._iterator.get_state()
            kept = pickle.dumps([self.epoch, self.number, self._length, state])
        return Position(self.name, kept)

    def close(self) -> None:
        """Ends the threads and processes of the iterator."""
        _close(self._iterator)
        self._iterator = None

    def _open(self) -> Any:
        """Returns the iterator of the current epoch, with `get_state` and `set_state`."""
        with self._named_errors("cannot be opened"):
            iterable = self._stream.make_shard(self.index, self._count)
            check_examples(iterable)
            if set_epoch := getattr(iterable, "set_epoch", None):
                set_epoch(self.epoch)
            prepare_pipeline(iterable)
            if hasattr(iterable, "state_dict") and hasattr(iterable, "load_state_dict"):
                return _StateDictIterator(iterable)
            iterator = iter(iterable)
        if not (hasattr(iterator, "get_state") and hasattr(iterator, "set_state")):
            raise UserError(
                f"{self.name}: its iterator, a {type(iterator).__name__}, cannot be resumed, "
                "because it lacks get_state() and set_state(state): return a grain.IterDataset, a "
                "grain.DataLoader, a Hugging Face IterableDataset, or an iterable whose iterators "
                "have both"
            )
        return iterator

    def place(self) -> str:
        """Returns the example that is read next, or has just been read, as named in messages."""
        return f"example {self.number} of epoch {self.epoch}"

    @contextlib.contextmanager
    def _named_errors(self, what: str) -> Iterator[None]:
        """Raises errors of the user's code again, with shard and example."""
        try:
            yield
        except (UserError, StorageError, MemoryError):
            raise
        except Exception as error:
            where = f"{self.name} {what} at {self.place()}"
            if reason := death_of_worker(error):
                raise StorageError(f"{where}: {reason}") from None
            raise_with_place(where, error)


def _close(iterator: Any) -> None:
    if close := getattr(iterator, "close", None):
        close()


class _StateDictIterator:
    """An iterator over an iterable that keeps the state of its iteration itself."""

    def __init__(self, iterable: Any) -> None:
        self._iterable, self._iterator = iterable, iter(iterable)

    def __next__(self) -> PyTree:
        return next(self._iterator)

    def get_state(self) -> Any:
        return self._iterable.state_dict()

    def set_state(self, state: Any) -> None:
        self._iterable.load_state_dict(state)
        self._iterator = iter(self._iterable)


# -- Training batches of a stream that is read as a fixed number of shards -------------------------

Positions = Mapping[str, Position]
"""The position of each shard, by its index."""
_READER = ExampleReader("stream", in_stream=True)


@dataclass
class StreamProgress:
    """Positions of the shards after the batches that a run has received last.

    Batches are read ahead, so the readers themselves are at later positions. For a dataset nothing
    is kept, because its batches are found by their number.

    Attributes:
      after: Positions by step, ascending. An interrupted loop may have received one batch more
        than it has recorded steps, so two are kept.
    """

    after: dict[int, Mapping[str, Position | str]] = field(default_factory=dict)

    def at(self, step: int) -> Mapping[str, str]:
        """Returns the positions after a step as text; empty at the beginning, and for a dataset.

        `step` is the last step received, or the one before it.
        """
        after = self.after.get(step, {})
        return {i: x if isinstance(x, str) else x.text() for i, x in after.items()}

    def record(self, step: int, positions: Mapping[str, Position | str]) -> None:
        """Keeps the positions after a step, as batches or `at` have them."""
        self.after[step] = positions
        while len(self.after) > 2:
            del self.after[next(iter(self.after))]


class ShardedStream:
    """A stream, divided into shards.

    Row r of a global batch of B examples is from shard `r * shards // B`, so each shard has B /
    shards consecutive rows; `shards` divides B. A process reads only the shards whose rows it
    holds.
    """

    def __init__(self, stream: Stream, shards: int) -> None:
        self.stream, self.shards = stream, shards
        # Refers weakly, so that a loop which is left ends the reading.
        self._reading: Callable[[], Generator[Any, None, None] | None] = lambda: None

    @functools.cached_property
    def first(self) -> tuple[PyTree, Place]:
        """The first example of the first shard of this process, and its place.

        All other examples have its structure, shapes and dtypes.
        """
        index = process_group.rank() * self.shards // process_group.count()
        with _closing() as readers:
            readers.append(ShardReader(self.stream, min(index, self.shards - 1), self.shards))
            first = readers[0].read()
            readers[0].position().text()  # a state that cannot be stored is an error at the start
            _READER.dtypes(first, readers[0].last)  # ... and so are text and the like
            return first, readers[0].last

    def first_row(self, augment: Augment | None) -> PyTree:
        """Returns the first example as arrays of leading dim 1, after `augment`."""
        example, place = self.first
        row = _READER.stack([example], [place])
        return row if augment is None else augmented(augment, row, np.zeros((1, 4), np.int64), 0)

    @functools.cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Number of shards, shapes, dtypes and a CRC-32 of the first example, as JSON.

        All processes read it together.
        """
        found = fingerprint_of_rows(self.first_row(None))
        # Process 0 has read shard 0; the others, perhaps, first examples of other shards.
        return {"stream_shards": self.shards, **found} | {
            "crc32": process_group.broadcast(found["crc32"])
        }

    def batches(
        self,
        batch_size: int,
        rows: np.ndarray,
        *,
        start: int,
        stop: int,
        positions: Mapping[str, str],
        seed: int,
        augment: Augment | None,
    ) -> Generator[tuple[PyTree, Positions], None, None]:
        """Returns a generator of the batches of this process, which a thread reads ahead.

        It yields pairs of the batch's rows and the positions of this process's shards after it. Its
        end closes the iterators.

        Args:
          rows: Indices of the rows of each batch to load, ascending.
          start: Number of batches made before.
          stop: Number of batches after the last one.
          positions: Positions of the shards after batch `start`, as text.

        Raises:
          UserError: If this process holds a part of a shard's rows, or positions are missing.
        """
        per_shard = batch_size // self.shards
        own = np.unique(rows // per_shard)
        order = np.concatenate([np.arange(i * per_shard, (i + 1) * per_shard) for i in own])
        if not np.isin(order, rows).all():
            raise UserError(
                f"stream_shards is {self.shards}, and {process_group.count()} processes divide a "
                "batch in the middle of a shard: the number of processes must divide stream_shards"
            )
        if start and (missing := [str(i) for i in own if str(i) not in positions]):
            raise UserError(
                f"no position of shard {missing[0]} of the stream is known after step {start}"
            )
        self.close()
        batches = self._read(
            {i: positions.get(str(i)) if start else None for i in own.tolist()},
            per_shard,
            np.searchsorted(order, rows),
            range(start, stop),
            seed,
            augment,
        )
        reading = in_thread(batches)
        self._reading = weakref.ref(reading)
        return reading

    def _read(
        self,
        positions: Mapping[int, str | None],
        per_shard: int,
        rows: np.ndarray,
        steps: Sequence[int],
        seed: int,
        augment: Augment | None,
    ) -> Generator[tuple[PyTree, Positions], None, None]:
        size = per_shard * len(positions)
        in_order = np.array_equal(rows, np.arange(size))
        draws = np.empty((size, 4), np.int64)
        first, place = self.first
        dtypes = _READER.dtypes(first, place)
        with _closing() as readers:
            for index, position in positions.items():
                readers.append(ShardReader(self.stream, index, self.shards, position))
            in_rows = [reader for reader in readers for _ in range(per_shard)]
            for _ in steps:
                examples, places = [first], [place]  # with which all others must agree
                for number, shard in enumerate(in_rows):
                    examples.append(shard.read())
                    places.append(shard.last)
                    draws[number] = 0, shard.index, shard.number - 1, shard.epoch
                found = _READER.stack(examples, places, dtypes)
                batch = jax.tree.map(lambda x: x[1:], found)
                if augment is not None:
                    batch = augmented(augment, batch, draws, seed)
                if not in_order:
                    batch = jax.tree.map(lambda x: x[rows], batch)
                yield batch, {str(shard.index): shard.position() for shard in readers}

    def close(self) -> None:
        """Ends the threads and processes of the iterators."""
        if (reading := self._reading()) is not None:
            reading.close()


@contextlib.contextmanager
def _closing() -> Iterator[list[ShardReader]]:
    """Closes the readers that are added to the list."""
    readers: list[ShardReader] = []
    try:
        yield readers
    finally:
        for reader in readers:
            reader.close()
        if multiprocessing.active_children():
            # Grain does not close an iterator that it has made ahead, and a DataLoader has no
            # close(): their processes end when they are deleted, also from reference cycles.
            readers.clear()
            gc.collect()


def shards_of(config: RunConfig) -> int:
    """Returns the number of shards of a stream: `stream_shards`, or a divisor of the batch size.

    `config` is resolved. `UserError` if `stream_shards` does not divide the global batch size.
    """
    batch_size = config.resolved_batch_size
    shards = config.stream_shards or int(np.gcd(batch_size, 8))
    if batch_size % shards:
        raise UserError(
            f"stream_shards is {shards}: it must divide the global batch size, {batch_size}, "
            "because each shard gives the same number of rows"
        )
    return shards


# -- Shards of Grain pipelines, and the preparation of their worker processes ----------------------

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


def prepare_pipeline(iterable: Any) -> None:
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


# -- States of iterators as text, which is stored in checkpoints -----------------------------------
#
# The text is JSON. Values without a JSON type (bytes, arrays, tuples, keys other than text) are
# stored under a tag. Pickle would run code that is in the checkpoint.

_TAG = "__stored_as__"


class UnsupportedStateError(ValueError):
    """A state holds a value that cannot be stored."""


def as_text(state: Any) -> str:
    """Converts a state to text.

    Args:
      state: Numbers, text, bytes, NumPy arrays of numbers, and lists, tuples and dictionaries of
        them.

    Raises:
      UnsupportedStateError: If it holds another value.
    """
    return json.dumps(_plain(state), separators=(",", ":"))


def from_text(text: str) -> Any:
    """Returns the state that `as_text` has stored; `ValueError` if the text is malformed."""
    try:
        return _restored(json.loads(text))
    except (TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _plain(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        if all(type(key) is str for key in value) and _TAG not in value:
            return {key: _plain(item) for key, item in value.items()}
        return _tagged("dict", [[_plain(key), _plain(item)] for key, item in value.items()])
    if type(value) is tuple:
        return _tagged("tuple", [_plain(item) for item in value])
    if isinstance(value, (bytes, bytearray)):
        return _tagged("bytes", base64.b64encode(value).decode())
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        content = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return _tagged("array", [value.dtype.str, list(value.shape), content])
    raise UnsupportedStateError(f"a value of type {type(value).__module__}.{type(value).__name__}")


def _tagged(tag: str, value: Any) -> dict[str, Any]:
    return {_TAG: tag, "value": value}


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return [_restored(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: _restored(item) for key, item in value.items()}
    tag, content = value[_TAG], value["value"]
    if tag == "dict":
        return {_restored(key): _restored(item) for key, item in content}
    if tag == "tuple":
        return tuple(_restored(item) for item in content)
    if tag == "bytes":
        return base64.b64decode(content)
    if tag == "array":
        name, shape, data = content
        dtype = np.dtype(name)
        if dtype.kind not in "biufc":
            raise ValueError(f"an array of {dtype}")
        return np.frombuffer(base64.b64decode(data), dtype).reshape(shape).copy()
    raise ValueError(f"unknown tag {tag!r}")

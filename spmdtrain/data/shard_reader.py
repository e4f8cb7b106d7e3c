"""The reader of one shard of a stream: its examples epoch after epoch, and its position."""

import contextlib
import itertools
import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from spmdtrain.data import grain_shards
from spmdtrain.data.indexable import raise_with_place
from spmdtrain.data.libraries import check_examples
from spmdtrain.data.read_ahead import death_of_worker
from spmdtrain.data.stream_state import UnsupportedStateError, as_text, from_text
from spmdtrain.data.streams import Stream
from spmdtrain.distributed import process_group
from spmdtrain.errors import StorageError, UserError

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
            grain_shards.prepare(iterable)
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

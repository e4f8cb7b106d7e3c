"""The reader of one shard of a stream: its examples epoch after epoch, and its position."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from spmdtrain.data.stream_state import UnsupportedStateError, as_text, from_text
from spmdtrain.data.streams import Stream
from spmdtrain.errors import UserError
from spmdtrain.tree import path_name

PyTree = Any
Record = tuple[list[np.ndarray], Any]
"""The leaves of an example and its tree structure."""


class ShardReader:
    """Reads a shard of a stream.

    Args:
      stream: The stream.
      index: Index of the shard.
      count: Number of shards.
      position: The position to continue from, as `position()` has returned it; None to begin.

    Raises:
      UserError: If the shard cannot be made, or has no state.
    """

    def __init__(self, stream: Stream, index: int, count: int, position: str | None = None) -> None:
        self._stream, self.index, self._count = stream, index, count
        self.epoch = 0
        """Epoch of the shard that the last example belongs to, from 0."""
        self.number = 0
        """Number of examples read of this epoch."""
        state = None
        if position is not None:
            self.epoch, self.number, state = from_text(position)
        self._iterator = self._open()
        if position is not None:
            with self._named_errors("cannot continue"):
                self._iterator.set_state(state)

    @property
    def name(self) -> str:
        """The shard as named in messages."""
        return f"shard {self.index} of {self._count} of the stream"

    def read(self) -> Record:
        """Returns the next example; begins the next epoch at the end of the shard.

        Raises:
          UserError: If it cannot be read, is not a pytree of numbers, or the shard is empty.
        """
        while True:
            with self._named_errors("failed"):
                try:
                    example = next(self._iterator)
                except StopIteration:
                    if self.number:
                        self.close()
                        self.epoch, self.number = self.epoch + 1, 0
                        self._iterator = self._open()
                        continue
                    raise UserError(
                        f"{self.name} has no examples in epoch {self.epoch}: give fewer "
                        "stream_shards, or iterables that can be read again"
                    ) from None
            record = self._record(example)
            self.number += 1
            return record

    def position(self) -> str:
        """Returns the position after the last example, as text.

        Raises:
          UserError: If the state of the iterator holds a value that cannot be stored.
        """
        with self._named_errors("has no state"):
            state = self._iterator.get_state()
        try:
            return as_text([self.epoch, self.number, state])
        except UnsupportedStateError as error:
            raise UserError(
                f"the state of {self.name} holds {error}, which a checkpoint cannot store: it may "
                "hold numbers, text, bytes, NumPy arrays, lists, tuples and dictionaries"
            ) from error

    def close(self) -> None:
        """Ends the threads and processes of the iterator."""
        if close := getattr(self._iterator, "close", None):
            close()

    def _open(self) -> Any:
        """Returns the iterator of the current epoch, with `get_state` and `set_state`."""
        with self._named_errors("cannot be opened"):
            iterable = self._stream.make_shard(self.index, self._count)
            if set_epoch := getattr(iterable, "set_epoch", None):
                set_epoch(self.epoch)
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

    def _record(self, example: PyTree) -> Record:
        leaves, structure = jax.tree.flatten(example)
        arrays = [np.asarray(leaf) for leaf in leaves]
        for position, array in enumerate(arrays):
            if array.dtype.kind not in "biufcV":
                path = jax.tree_util.tree_leaves_with_path(example)[position][0]
                field = f"field {path_name(path)!r}" if path else "an example"
                raise UserError(
                    f"{self.name}, {self.place()}: {field} holds {array.dtype}, not numbers: "
                    "tokenize or encode it in the pipeline, and remove fields that are not needed"
                )
        if not arrays:
            raise UserError(f"{self.name}, {self.place()}: the example holds no arrays")
        return arrays, structure

    def place(self) -> str:
        """Returns the example that is read next, or has just been read, as named in messages."""
        return f"example {self.number} of epoch {self.epoch}"

    @contextlib.contextmanager
    def _named_errors(self, what: str) -> Iterator[None]:
        """Raises errors of the user's code as `UserError` with shard and example."""
        try:
            yield
        except (UserError, MemoryError):
            raise
        except Exception as error:
            raise UserError(
                f"{self.name} {what} at {self.place()}: {type(error).__name__}: {error}"
            ) from error


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

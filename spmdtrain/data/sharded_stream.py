"""Training batches of a stream that is read as a fixed number of shards."""

import contextlib
import functools
import gc
import multiprocessing
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from spmdtrain.config.run_config import RunConfig
from spmdtrain.data.datasets import fingerprint_of_rows
from spmdtrain.data.examples import ExampleReader
from spmdtrain.data.read_ahead import in_thread
from spmdtrain.data.sampling import Augment, augmented
from spmdtrain.data.shard_reader import Place, Position, ShardReader
from spmdtrain.data.streams import Stream
from spmdtrain.distributed import process_group
from spmdtrain.errors import UserError

PyTree = Any
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

"""Training data: a dataset or a stream, perhaps without the records that cannot be read."""

import contextlib
import functools
import operator
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from spmdtrain.config.run_config import RunConfig
from spmdtrain.data import datasets
from spmdtrain.data.datasets import (
    ArrayDataset,
    Dataset,
    MappedDataset,
    Subset,
    as_dataset,
    batched_of,
    blocks_of,
    from_library,
    known_as,
    sources_within,
)
from spmdtrain.data.examples import BatchedDataset, IndexableDataset, describe, read_examples
from spmdtrain.data.images import ImageFolder
from spmdtrain.data.mixture import Mixture, epoch_size
from spmdtrain.data.sources.files import cached_scan, delayed_progress, scan_folder, source_key
from spmdtrain.data.streams import ShardedStream, as_stream, shards_of
from spmdtrain.data.text import Packed
from spmdtrain.distributed import process_group
from spmdtrain.errors import BadRecordError, UserError
from spmdtrain.strategies import strategy

# -- Training data: a dataset, or a stream ---------------------------------------------------------

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
    if strategy(config.strategy).is_asynchronous:
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
        if (number := getattr(config, name)) not in (0, "auto"):
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


# -- Sources without the records that cannot be read, and the option of a run that leaves them out

PyTree = Any

_BATCH = 1024  # records read at once
_CHECKING = "checking records"


class SkipBadRecords:
    """A source without the records that are corrupted or cannot be decoded.

    All records are read once, at the start. So the examples of a batch do not depend on when and
    where a bad record is read, an evaluation counts every other record once, and a resume on other
    devices has the same batches. If the source has `fingerprint()`, one process of each machine
    reads them, and the result is cached in the user's cache folder, by its `source_key`. Only
    `BadRecordError` is skipped; exceptions of a function that decodes records become this error.

    Args:
      source: An object with `__len__` and `__getitem__(int)`.
      max_bad_records: The largest number of bad records.

    Attributes:
      source: The source.
      skipped: int64 (n,), the numbers of the bad records in the source, ascending.

    Raises:
      UserError: If more records are bad, no record is left, or the source is not one of records.
      StorageError: If the storage of a record fails.
    """

    def __init__(self, source: Any, max_bad_records: int = 100) -> None:
        converted = from_library(source)  # refuses streams
        if isinstance(converted, BatchedDataset):
            raise UserError(
                f"the items of a {describe(source)} are batches, so its bad records cannot be left "
                "out: do so where it makes them"
            )
        is_source = hasattr(source, "__getitem__") and hasattr(source, "__len__")
        if not is_source or isinstance(converted, dict):  # the columns of a table
            raise UserError(
                f"SkipBadRecords needs an object with __len__ and __getitem__(int), not a "
                f"{describe(source)}"
            )
        valid = isinstance(max_bad_records, int) and not isinstance(max_bad_records, bool)
        if not valid or max_bad_records < 0:
            raise UserError(f"max_bad_records is {max_bad_records!r}: it must be 0 or more")
        self.source = source
        self.skipped = _bad_records(source, max_bad_records)
        # Record i of this source is record i + (number of offsets up to i) of the other one.
        self._offsets = self.skipped - np.arange(len(self.skipped))
        # Without rows of its own, a source has the dtypes of the first record that can be read.
        self._source_rows = converted if isinstance(converted, Dataset) else None
        self._examples = IndexableDataset(self)
        if not len(self.skipped):
            return
        first = _reason(source, int(self.skipped[0]))
        message = f"{len(self.skipped):,} of {len(source):,} records cannot be read; the first: "
        if not len(self):
            raise UserError(f"{message}{first}. None is left")
        if process_group.is_chief():
            print(f"bad_records: {message}{first}. They are left out", file=sys.stderr, flush=True)

    def __len__(self) -> int:
        return len(self.source) - len(self.skipped)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([operator.index(index)])[0]

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        """Returns several records by their numbers."""
        originals = self._originals(np.asarray(indices, np.int64)).tolist()
        with _checked_before():
            return read_examples(self.source, originals)

    def rows(self, indices: np.ndarray) -> PyTree:
        if self._source_rows is None:
            return self._examples.rows(indices)
        with _checked_before():
            return self._source_rows.rows(self._originals(indices))

    @property
    def blocks(self) -> np.ndarray | None:
        """The first record of each block, int64 (m + 1,); None if the source has no blocks."""
        if (blocks := blocks_of(self.source)) is None:
            return None
        return blocks - np.searchsorted(self.skipped, blocks)

    @property
    def classes(self) -> Sequence[str]:
        """The names of the source's classes."""
        classes: Sequence[str] = getattr(self.source, "classes", ())
        return classes

    def reserve_blocks(self, count: int) -> None:
        """Lets the source keep at least this number of blocks in memory, if it can.

        Args:
          count: Number of blocks.
        """
        if hasattr(self.source, "reserve_blocks"):
            self.source.reserve_blocks(count)

    def fingerprint(self) -> str:
        """Returns the source's fingerprint, if it has one, and the numbers of the bad records."""
        known = self.source.fingerprint() if hasattr(self.source, "fingerprint") else ""
        return f"{known} without {self.skipped.tolist()}"

    def describe(self, index: int) -> str:
        """Returns the name of a record in the source, for messages.

        Args:
          index: Its number in this source.
        """
        original = int(self._originals(np.array([index]))[0])
        known = hasattr(self.source, "describe")
        return str(self.source.describe(original)) if known else f"record {original}"

    def _originals(self, indices: np.ndarray) -> np.ndarray:
        """Returns the numbers of records in the source."""
        if len(indices) and not (indices.min() >= 0 and indices.max() < len(self)):
            raise IndexError(f"records {indices.min()} to {indices.max()} of {len(self)}")
        return indices + np.searchsorted(self._offsets, indices, side="right")


@contextlib.contextmanager
def _checked_before() -> Iterator[None]:
    """Raises `UserError` for a bad record that could be read when all were checked."""
    try:
        yield
    except BadRecordError as error:
        raise UserError(
            f"{error}. It could be read when all records were checked: the data, or the function "
            f"that decodes them, have changed since then. If this is intended, delete "
            f"{scan_folder()}/bad-* and start again"
        ) from error


# -- the scan --------------------------------------------------------------------------------------


def _bad_records(source: Any, limit: int) -> np.ndarray:
    """Returns the numbers of the bad records, int64 (n,)."""
    scan = functools.partial(_scan, source, limit)
    if not hasattr(source, "fingerprint"):
        return scan()
    key = source_key(source, functools.partial(_contents, source), describe(source))

    def is_valid(bad: np.ndarray) -> bool:  # the function that decodes records may be another one
        return all(_reason(source, index) is not None for index in bad.tolist())

    bad = cached_scan("bad", key, scan, _CHECKING, dtype=np.int64, is_valid=is_valid)
    if len(bad) > limit:  # of a run with a higher limit
        _refuse(source, limit, _reason(source, int(bad[0])))
    return bad


def _scan(source: Any, limit: int) -> np.ndarray:
    bad: list[int] = []
    with delayed_progress(_CHECKING, len(source)) as advance:
        for start in range(0, len(source), _BATCH):
            indices = range(start, min(start + _BATCH, len(source)))
            try:
                read_examples(source, list(indices))
            except BadRecordError:
                for index in indices:
                    if _reason(source, index) is not None:
                        bad.append(index)
                    if len(bad) > limit:
                        _refuse(source, limit, _reason(source, bad[0]))
            advance(indices.stop)
    return np.array(bad, np.int64)


def _reason(source: Any, index: int) -> str | None:
    """Returns why a record cannot be read; None if it can be."""
    try:
        read_examples(source, [index])
    except BadRecordError as error:
        return str(error)
    return None


def _refuse(source: Any, limit: int, first: str | None) -> NoReturn:
    raise UserError(
        f"over {limit} records of a {describe(source)} cannot be read, the limit max_bad_records; "
        f"the first: {first}"
    )


def _contents(source: Any, indices: Sequence[int]) -> Iterator[bytes]:
    """Yields the content of records, `b"bad"` for a bad one."""
    for index in indices:
        try:
            (example,) = read_examples(source, [index])
        except BadRecordError:
            yield b"bad"
            continue
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(example)]
        # An array of objects holds their addresses.
        parts = [x.tobytes() for x in leaves if x.dtype.kind != "O"]
        yield repr([(x.dtype, x.shape) for x in leaves]).encode() + b"".join(parts)


# -- the option of a run ---------------------------------------------------------------------------

_WRITE = {
    Packed: "Packed(SkipBadRecords(documents), length)",
    Subset: "Subset(SkipBadRecords(source), indices)",
    ImageFolder: "ImageFolder(..., broken='skip')",
}
"""Code to suggest for the experiment, by the class of a dataset that the option cannot reach."""

_DONE = (SkipBadRecords, ArrayDataset, tuple, dict, list, np.ndarray, jax.Array)
"""Data without bad records: they are left out, or all are in memory."""


def run_dataset(data: Any, config: RunConfig, what: str = "the dataset") -> Dataset:
    """Returns a dataset of a run, without its bad records if `on_bad_record` is "skip".

    `data` is anything that `as_dataset` accepts; `what` is its name in error messages.

    Raises:
      UserError: As `as_dataset`, or if too many records are bad, or if the records cannot be
        reached and are not checked already.
    """
    if config.on_bad_record == "skip":
        data = _without_bad_records(data, config.max_bad_records)
    return as_dataset(data, what)


def _without_bad_records(data: Any, limit: int) -> Any:
    """Returns data without their bad records; the same object if nothing has to be done."""
    if isinstance(data, IndexableDataset):
        data = data.source
    if isinstance(data, MappedDataset):
        inner = _without_bad_records(data.dataset, limit)
        return data if inner is data.dataset else MappedDataset(inner, data.function)
    if isinstance(data, Mixture):
        parts = {name: _without_bad_records(x, limit) for name, x in data.components.items()}
        if all(part is data.components[name] for name, part in parts.items()):
            return data
        weights = data.stages[0]
        components = {name: (part, weights[name]) for name, part in parts.items()}
        return Mixture(components, {step: x for step, x in data.stages.items() if step})
    innermost = data
    while isinstance(innermost, Subset):
        innermost = innermost.dataset
    in_files = "spmdtrain.NumpyFiles" in known_as(innermost)  # arrays have no bad records
    if in_files or isinstance(from_library(innermost, sparse=True), _DONE):
        return data
    if hasattr(data, "__getitem__"):
        return SkipBadRecords(data, limit)
    within = list(sources_within(data))
    if any(isinstance(x, SkipBadRecords) or getattr(x, "broken", "") == "skip" for x in within):
        return data
    write = _WRITE.get(type(data), "SkipBadRecords(source) around the source of its records")
    raise UserError(
        f"on_bad_record is 'skip', but a {describe(data)} reads its records itself: write {write} "
        "in the experiment"
    )

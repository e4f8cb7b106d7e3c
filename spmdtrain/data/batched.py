"""Data whose items are batches, as in Keras' `PyDataset`: their rows are the examples."""

import functools
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from spmdtrain.data.examples import ExampleReader
from spmdtrain.data.indexable import describe, read_examples
from spmdtrain.data.sources.block_cache import BlockCache
from spmdtrain.errors import UserError
from spmdtrain.tree import named_leaves

PyTree = Any

_BASES = {"keras.PyDataset", "keras.Sequence", "tf_keras.Sequence", "tensorflow.Sequence"}
_HOOKS = ("on_epoch_begin", "on_epoch_end")


def holds_batches(names: Collection[str]) -> bool:
    """Returns whether an object's items are batches, by its classes as `known_as` returns them."""
    return not _BASES.isdisjoint(names)


@dataclass(frozen=True)
class BatchedDataset:
    """The rows of the batches of a `keras.utils.PyDataset` as a dataset.

    A batch is a tuple of up to three parts, a dictionary or an array. All batches but the last one
    have one number of rows, so that a row is found by its number.

    Raises:
      UserError: If it has no known number of batches, changes between epochs or between two reads,
        reads by workers of its own, or batches differ in their number of rows.
    """

    source: Any
    _cache: BlockCache[tuple[int, PyTree]] = field(default_factory=BlockCache, repr=False)

    def __post_init__(self) -> None:
        name = describe(self.source)
        if (hook := self._overridden_hook) is not None:
            raise UserError(
                f"a {name} has {hook}(), which changes its batches between epochs, and neither a "
                "resume nor another process can repeat that: leave it out, because the run "
                "shuffles the batches (shuffle=True), and draw changes of examples in augment"
            )
        workers = getattr(self.source, "_workers", 1)
        if workers > 1 or getattr(self.source, "_use_multiprocessing", False):
            raise UserError(
                f"a {name} has workers={workers} of Keras, which read nothing here: leave workers "
                f"and use_multiprocessing out, and give data_threads={workers} or data_workers"
            )
        first, again = (named_leaves(self._read(0)[1]) for _ in range(2))
        same = {part for part, x in again.items() if part in first and _equal(x, first[part])}
        if differing := [part for part in first if part not in same]:
            raise UserError(
                f"batch 0 of a {name} differs between two reads"
                f"{f' in {differing[0]}' if differing[0] else ''}: a batch must be the same "
                "whenever it is read. Draw changes of examples in augment, by its generator"
            )

    def __len__(self) -> int:
        return self._length

    def rows(self, indices: np.ndarray) -> PyTree:
        batches, within = np.divmod(np.asarray(indices), self.batch_size)
        order: list[np.ndarray] = []
        parts = []
        for number in np.unique(batches):
            chosen = np.flatnonzero(batches == number)
            rows = within[chosen]
            parts.append(jax.tree.map(lambda x, rows=rows: x[rows], self._batch(int(number))[1]))
            order.append(chosen)
        places = np.argsort(np.concatenate(order), kind="stable")
        try:
            return jax.tree.map(lambda *x: np.concatenate(x)[places], *parts)
        except ValueError:
            raise UserError(
                f"batches of a {describe(self.source)} have other fields or shapes than others: "
                "all must have the same, except for their number of rows"
            ) from None

    def describe(self, index: int) -> str:
        """Returns the batch and the row of an example."""
        batch, row = divmod(index, self.batch_size)
        return f"row {row} of batch {batch} of {describe(self.source)}"

    @functools.cached_property
    def batch_size(self) -> int:
        """The number of rows of each batch but the last one."""
        return self._read(0)[0]

    @functools.cached_property
    def _length(self) -> int:
        last = self._batches - 1
        return last * self.batch_size + self._batch(last)[0]

    @property
    def blocks(self) -> np.ndarray:
        """The first example of each batch, int64 (m + 1,)."""
        return np.append(np.arange(self._batches) * self.batch_size, len(self)).astype(np.int64)

    @functools.cached_property
    def _batches(self) -> int:
        try:
            # Sequence of Keras 2 has no num_batches.
            number = self.source.num_batches if hasattr(type(self.source), "num_batches") else None
            count = (
                len(self.source) if number is None and hasattr(self.source, "__len__") else number
            )
        except NotImplementedError:
            count = None
        if not isinstance(count, int) or count < 1:
            raise UserError(
                f"a {describe(self.source)} has the number of batches {count}: it needs at least "
                "one, and a __len__ that returns their number"
            )
        return count

    @property
    def _overridden_hook(self) -> str | None:
        """The name of a method for epochs that the class of the source defines, or None."""
        kind = type(self.source)
        base = next(c for c in kind.__mro__ if c.__name__ in ("PyDataset", "Sequence"))
        own = (x for x in _HOOKS if getattr(kind, x, None) is not getattr(base, x, None))
        return next(own, None)

    def _batch(self, number: int) -> tuple[int, PyTree]:
        """Returns the number of rows of a batch, and its arrays; they are cached."""
        return self._cache.get(number, self._checked)

    def _checked(self, number: int) -> tuple[int, PyTree]:
        found = self._read(number)
        if number and found[0] != self.batch_size:
            is_last = number == self._batches - 1
            if not is_last or found[0] > self.batch_size:
                self._refuse(number, found[0])
        return found

    def _refuse(self, number: int, rows: int) -> None:
        raise UserError(
            f"batch {number} of a {describe(self.source)} has {rows} rows, and batch 0 has "
            f"{self.batch_size}: all but the last one, which may have fewer, need one number. Give "
            "its examples as arrays: tuple(map(np.concatenate, zip(*data)))"
        )

    def _read(self, number: int) -> tuple[int, PyTree]:
        """Returns the number of rows of a batch, and its arrays, which are new."""
        (batch,) = read_examples(self.source, [number])
        if isinstance(batch, list):  # as in Keras
            batch = tuple(batch)
        while isinstance(batch, tuple) and batch and batch[-1] is None:  # no targets or weights
            batch = batch[:-1]
        name = describe(self.source)
        stacked = ExampleReader(name, unit="batch").stack([batch], [number])
        arrays = jax.tree.map(lambda x: x[0], stacked)
        shapes = {part: leaf.shape for part, leaf in named_leaves(arrays).items()}
        sizes = {shape[0] if shape else None for shape in shapes.values()}
        if len(sizes) != 1 or not isinstance(size := sizes.pop(), int) or not size:
            raise UserError(
                f"batch {number} of a {name} has the shapes {shapes}: its arrays need one number "
                "of rows, the examples of the batch"
            )
        return size, arrays


def _equal(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and one.tobytes() == other.tobytes()

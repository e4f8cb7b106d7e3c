"""Loading of batches, ahead of the steps.

The path of a training batch: `sampling.TrainBatches` reads its rows from the dataset, `read_ahead`
does so in threads or worker processes, `_group` collects the batches of a dispatch, `_Placer`
stacks them and places them on the devices as global arrays, and `_prefetch` does that before they
are requested. The batches of a stream are read by `ShardedStream.batches`, and each comes with the
positions of the shards after it.
"""

import collections
import itertools
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from spmdtrain.config.run_config import NOTHING_SKIPPED, SkippedBatches
from spmdtrain.data.datasets import Dataset
from spmdtrain.data.read_ahead import Threads, read_ahead
from spmdtrain.data.sampling import (
    Augment,
    CountedBatches,
    OrderedBatches,
    TrainBatches,
    indexed,
    padded_size,
    process_rows,
    rows_of,
    stack_batches,
    stacked_sharding,
    with_marks,
)
from spmdtrain.data.streams import Positions, ShardedStream, StreamProgress
from spmdtrain.data.training_data import TrainingData
from spmdtrain.errors import UserError
from spmdtrain.sharding.placement import Placement
from spmdtrain.tree import named_leaves

PyTree = Any
T = TypeVar("T")

_WIDE = (np.dtype(np.int64), np.dtype(np.uint64))
_CHUNK = 1024  # examples read at once by `on_devices`


def on_devices(dataset: Dataset, placement: Placement) -> PyTree:
    """Places all examples of a dataset on each device, as replicated arrays (N, ...).

    Raises:
      UserError: If they do not fit into a device's memory.
    """
    size = len(dataset)
    first = dataset.rows(np.arange(1))
    bytes_needed = size * sum(np.asarray(x).nbytes for x in jax.tree.leaves(first))
    for device in placement.devices:
        if device.process_index != jax.process_index():
            continue
        limit = (device.memory_stats() or {}).get("bytes_limit")
        if limit is not None and bytes_needed > limit:
            raise UserError(
                f"data_on_device: {size:,} examples are {bytes_needed:,} bytes, and {device} has "
                f"memory for {limit:,}"
            )
    check = BatchCheck()
    check(first, 1)
    whole = jax.tree.map(lambda x: np.empty((size, *np.shape(x)[1:]), np.asarray(x).dtype), first)
    for start in range(0, size, _CHUNK):
        stop = min(start + _CHUNK, size)
        rows = dataset.rows(np.arange(start, stop))
        check(rows, stop - start)
        for kept, read in zip(*map(jax.tree.leaves, (whole, rows)), strict=True):
            kept[start:stop] = read
    replicated = placement.replicated
    return jax.tree.map(
        lambda x: jax.make_array_from_callback(x.shape, replicated, lambda index: x[index]), whole
    )


def abstract_batch(
    dataset: TrainingData,
    batch_size: int,
    placement: Placement,
    *,
    augment: Augment | None,
    steps: int,
    by_index: bool,
    step_may_place: bool,
    counted: bool = False,
    padded_to: int | None = None,
) -> PyTree:
    """Returns the shapes, dtypes and shardings of a batch of `train_batches`. Reads one example.

    Args:
      steps: Number of steps of a dispatch.
      by_index: Whether batches are `IndexedBatch`.
      step_may_place: As for `train_batches`.
      counted: Whether they are `CountedBatches` of up to `steps` steps.
      padded_to: Number of rows, if batches are padded.
    """
    size = padded_to or batch_size
    if isinstance(dataset, ShardedStream):
        example = read = dataset.first_row(augment)
        count = 0
    else:
        batches = TrainBatches(dataset, 1, 0, False, 1, np.arange(1), augment)
        read = _Indices(batches)[0] if by_index else batches[0]
        example, count = rows_of(batches[0]), len(dataset)
    if size != batch_size:
        read = with_marks(read, mask=np.zeros(1, np.float32))
    lead = () if steps == 1 else (steps,)
    place: Sharding | None = placement.batch if steps == 1 else stacked_sharding(placement.batch)
    if step_may_place and places_in_step(placement.batch):
        place = None

    def array(x: Any, shape: tuple[int, ...], place: Sharding | None) -> jax.ShapeDtypeStruct:
        dtype = jax.dtypes.canonicalize_dtype(np.asarray(x).dtype)
        return jax.ShapeDtypeStruct((*shape, *np.shape(x)[1:]), dtype, sharding=place)

    batch = jax.tree.map(lambda x: array(x, (*lead, size), place), read)
    if counted:
        batch = CountedBatches(batch, jax.ShapeDtypeStruct((), np.int32))
    if not by_index:
        return batch
    replicated = placement.replicated
    return indexed(batch, jax.tree.map(lambda x: array(x, (count,), replicated), example))


@dataclass(frozen=True)
class _Indices:
    """The batches of `IndexedBatch`: the indices of the examples, instead of their rows."""

    batches: TrainBatches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, step: int) -> PyTree:
        indices, _ = self.batches.local_examples(step)
        return self.batches.with_components(indices.astype(np.int32), indices)


def train_batches(
    dataset: TrainingData,
    batch_size: int,
    sharding: Sharding,
    *,
    seed: int,
    shuffle: bool,
    start: int,
    stop: int,
    augment: Augment | None = None,
    threads: Threads = 0,
    workers: int = 0,
    announce: Callable[[str], None] = lambda line: None,
    sizes: Iterable[int] = itertools.repeat(1),
    most_steps: int | None = None,
    arrays: PyTree = None,
    step_may_place: bool = False,
    padded_to: int | None = None,
    progress: StreamProgress | None = None,
    skipped: SkippedBatches = NOTHING_SKIPPED,
) -> Generator[PyTree, None, None]:
    """Returns a generator of the training batches, placed on the devices.

    Args:
      batch_size: Number of examples of the global batch.
      start: Number of steps made before. Without batches that are left out, it is the number of the
        first batch.
      stop: Number of steps after the last batch.
      threads: Number of threads that read ahead, in each worker if there are workers; without both,
        batches are read when requested.
      workers: Number of processes that read ahead; they end when the iterator is closed.
      announce: Prints the number of threads that "auto" has chosen.
      sizes: Number of steps of each dispatch. The batches of n > 1 steps are stacked, with a new
        leading dim of n.
      most_steps: If given, all dispatches have `CountedBatches` with this leading dim.
      arrays: All examples on the devices (see `on_devices`); batches are then `IndexedBatch`.
      step_may_place: Whether the step is jitted and places host arrays itself. If that is faster
        (`places_in_step`), batches stay host arrays.
      padded_to: If above `batch_size`, batches are padded to this number of rows, and are
        `MarkedRows` with a mask.
      progress: Has the positions of a stream after `start` steps, and receives the positions after
        each batch that is returned.
      skipped: Batches that are left out. If the dataset is a stream, they are read and dropped.
    """
    progress = progress or StreamProgress()
    size = padded_to or batch_size
    local = process_rows(sharding, size)
    examples = np.minimum(local, batch_size - 1)
    if isinstance(dataset, ShardedStream):
        first = skipped.position(start)
        every = dataset.batches(
            batch_size,
            examples,
            start=first,
            stop=skipped.position(stop),
            positions=progress.at(start),
            seed=seed,
            augment=augment,
        )
        read = (each for number, each in enumerate(every, first) if number not in skipped)
    else:
        batches = TrainBatches(dataset, batch_size, seed, shuffle, stop, examples, augment, skipped)
        items = batches if arrays is None else _Indices(batches)
        rows = read_ahead(items, start, threads=threads, workers=workers, announce=announce)
        read = ((x, {}) for x in rows)
    if size != batch_size:
        mask = (local < batch_size).astype(np.float32)
        read = ((with_marks(x, mask=mask), after) for x, after in read)
    placing = _Placer(sharding, size, step_may_place=step_may_place, most_steps=most_steps)
    ready = (
        _Dispatch(placing([batch for batch, _ in group]), len(group), group[-1][1])
        for group in _group(read, sizes)
    )
    placed = ready if placing.step_may_place else _prefetch(ready)
    received = _received(placed, start, progress)
    return received if arrays is None else (indexed(x, arrays) for x in received)


class _Dispatch(NamedTuple):
    """The placed batches of a dispatch."""

    batch: PyTree
    steps: int
    positions: Positions
    """Positions of a stream after the last of its steps."""


def _received(
    dispatches: Iterator[_Dispatch], step: int, progress: StreamProgress
) -> Generator[PyTree, None, None]:
    """Yields the batches; records the positions after each when it is requested."""
    for dispatch in dispatches:
        step += dispatch.steps
        if dispatch.positions:
            progress.record(step, dispatch.positions)
        yield dispatch.batch


def ordered_batches(
    dataset: Dataset,
    batch_size: int,
    sharding: Sharding,
    *,
    threads: Threads = 0,
    padded: bool = True,
) -> tuple[Iterator[tuple[PyTree, jax.Array]], int]:
    """Returns all examples once, as placed batches of (rows, mask), and the number of batches.

    Args:
      batch_size: Number of examples of a batch; it need not divide over the devices.
      padded: Whether each batch is padded to a size that divides over the devices. If not, a batch
        of another size is replicated instead.
    """
    size = padded_size(batch_size, sharding)
    split_size = None if padded else size
    batches = OrderedBatches(dataset, batch_size, process_rows(sharding, size), split_size)
    place_split, replicated = _Placer(sharding, size), sharding
    if isinstance(sharding, NamedSharding):
        replicated = NamedSharding(sharding.mesh, PartitionSpec())

    def placed(index: int, batch: PyTree) -> PyTree:
        if not batches.is_unpadded(index):
            return place_split([batch])
        return _Placer(replicated, len(batch[1]))([batch])

    rows = read_ahead(batches, 0, threads=threads)
    return _prefetch(itertools.starmap(placed, enumerate(rows))), len(batches)


def _group(batches: Iterator[T], sizes: Iterable[int]) -> Iterator[Sequence[T]]:
    """Yields the batches of one dispatch after the other."""
    for size in sizes:
        if not (group := list(itertools.islice(batches, size))):
            return
        yield group


def _prefetch(batches: Iterator[T], count: int = 2) -> Iterator[T]:
    """Yields the batches; `count` of them are placed before they are requested.

    `flax.jax_utils.prefetch_to_device` places batches along a mesh of its own, as for `jax.pmap`.
    `grain.experimental.device_put` adds two threads, and calls `jax.device_put`, which with several
    processes needs all rows in each process.
    """
    ready = collections.deque(itertools.islice(batches, count))
    while ready:
        yield ready.popleft()
        ready.extend(itertools.islice(batches, 1))


class _Placer:
    """Places this process's rows of batches on the devices, as global arrays.

    The batches of a dispatch of several steps are stacked. Raises the errors of `BatchCheck`.
    """

    def __init__(
        self,
        sharding: Sharding,
        batch_size: int,
        *,
        step_may_place: bool = False,
        most_steps: int | None = None,
    ) -> None:
        self._sharding, self._batch_size = sharding, batch_size
        self._most_steps = most_steps
        self._local_rows = len(process_rows(sharding, batch_size))
        # If this process has all rows, one call places all arrays, in half the time.
        self._at_once = self._local_rows == batch_size and sharding.is_fully_addressable
        self.step_may_place = step_may_place and places_in_step(sharding)
        self._check = BatchCheck()

    def __call__(self, batches: Sequence[PyTree]) -> PyTree:
        for batch in batches:
            self._check(rows_of(batch), self._local_rows)
        if self._most_steps is None and len(batches) == 1:
            return self._place(batches[0], self._sharding)
        size = self._most_steps or len(batches)
        placed = self._place(stack_batches(batches, size), stacked_sharding(self._sharding), size)
        counts = self._most_steps is not None
        return CountedBatches(placed, np.int32(len(batches))) if counts else placed

    def _place(self, batch: PyTree, sharding: Sharding, *steps: int) -> PyTree:
        if self.step_may_place:
            # Host arrays, even if an array is already on a device.
            are_arrays = all(type(x) is np.ndarray for x in jax.tree.leaves(batch))
            return batch if are_arrays else jax.tree.map(np.asarray, batch)
        if self._at_once:
            return jax.device_put(batch, sharding)

        def on_mesh(local: np.ndarray) -> jax.Array:
            shape = (*steps, self._batch_size, *local.shape[len(steps) + 1 :])
            return jax.make_array_from_process_local_data(sharding, local, shape)

        return jax.tree.map(on_mesh, batch)


class BatchCheck:
    """A check that all batches have the shapes and dtypes of the first, and fit JAX's dtypes.

    With other shapes the step would be compiled again. Raises `UserError`.
    """

    def __init__(self) -> None:
        # The structure, then shapes and dtypes of the first examples; also rows of the last batch.
        self._first: list[Any] = []
        self._last: list[Any] = []
        self._may_not_fit: list[int] = []  # numbers of arrays of 64-bit integers

    def __call__(self, batch: PyTree, rows: int) -> None:
        leaves, structure = jax.tree.flatten(batch)
        current = [rows, structure, *((local.shape, local.dtype) for local in leaves)]
        if current != self._last:
            self._check_shapes(structure, leaves, rows)
            self._last = current
            self._may_not_fit = [n for n, local in enumerate(leaves) if local.dtype in _WIDE]
        for number in self._may_not_fit:
            check_fits(leaves[number])

    def _check_shapes(self, structure: Any, leaves: Sequence[np.ndarray], rows: int) -> None:
        for local in leaves:
            if local.shape[0] != rows:
                raise UserError(
                    f"the dataset returned {local.shape[0]} rows, shape {local.shape}, for {rows} "
                    "indices"
                )
        examples = [structure, *((local.shape[1:], local.dtype) for local in leaves)]
        self._first = self._first or examples
        if examples != self._first:
            raise UserError(
                f"the dataset returned {_describe(examples)} after {_describe(self._first)}: all "
                "examples must have the same shapes and dtypes"
            )


def places_in_step(sharding: Sharding) -> bool:
    """Returns whether a jitted step places host batches faster than `jax.device_put`.

    On CPU it takes a tenth of the time. On other platforms batches are transferred while the
    previous step runs.
    """
    devices: Collection[Any] = sharding.device_set
    return sharding.is_fully_addressable and all(x.platform == "cpu" for x in devices)


def _describe(batch: Sequence[Any]) -> str:
    structure, *arrays = batch
    named = named_leaves(jax.tree.unflatten(structure, [f"{d}{list(s)}" for s, d in arrays]))
    return ", ".join(f"{name} {array}".strip() for name, array in named.items()) or "nothing"


def check_fits(local: np.ndarray) -> None:
    """Raises `UserError` if integers do not fit: JAX without x64 keeps only their lower 32 bits."""
    kept = jax.dtypes.canonicalize_dtype(local.dtype)
    if local.dtype.kind not in "iu" or kept == local.dtype:
        return
    narrow = np.iinfo(kept)
    if local.size and not (narrow.min <= local.min() and local.max() <= narrow.max):
        raise UserError(
            f"the data holds integers from {local.min()} to {local.max()}, which do not fit "
            f"{narrow.dtype}, to which JAX converts {local.dtype} unless jax_enable_x64 is set"
        )

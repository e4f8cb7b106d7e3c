"""From data to devices: batches are read, joined and placed ahead of the steps that use them."""

import collections
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from spmdtrain.data.datasets import Dataset
from spmdtrain.data.sampling import Augment, OrderedBatches, TrainBatches, padded_size, process_rows
from spmdtrain.data.uneven_batch import Padded, rows_and_mask
from spmdtrain.errors import UserError
from spmdtrain.sharding.placement import Placement, carried
from spmdtrain.tree import named_leaves

PyTree = Any

_CHUNK = 1024  # examples read at once to be put on the devices


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class IndexedBatch:
    """A batch by number: which examples it has of arrays that are on every device."""

    indices: PyTree
    """int32 (B,), or `Padded` of it; (n, B) of n steps."""
    arrays: PyTree
    """All examples: each array (N, ...)."""


def examples_of(batch: PyTree) -> PyTree:
    """The examples of a batch, gathered where it gives their numbers alone."""
    if not isinstance(batch, IndexedBatch):
        return batch
    indices, mask = rows_and_mask(batch.indices)
    rows = jax.tree.map(lambda x: jnp.take(x, indices, axis=0), batch.arrays)
    return rows if mask is None else Padded(rows, mask)


def of_first(batch: PyTree, steps: int) -> PyTree:
    """Of the batch of so many steps, the first one's."""
    if steps == 1:
        return batch
    if isinstance(batch, IndexedBatch):
        return IndexedBatch(of_first(batch.indices, steps), batch.arrays)
    return jax.tree.map(lambda x: x[0], batch)


def on_devices(dataset: Dataset, placement: Placement) -> PyTree:
    """All examples of a dataset as arrays (N, ...), whole on each device.

    Raises `UserError` where they would not fit.
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
    everywhere = placement.replicated
    return jax.tree.map(
        lambda x: jax.make_array_from_callback(x.shape, everywhere, lambda index: x[index]), whole
    )


def abstract_batch(
    dataset: Dataset,
    batch_size: int,
    placement: Placement,
    *,
    augment: Augment | None,
    steps: int,
    by_index: bool,
    by_step: bool,
    padded_to: int | None = None,
) -> PyTree:
    """What stands for a batch of `train_batches`: shapes and places. One example is read."""
    size = padded_to or batch_size
    one = TrainBatches(dataset, 1, 0, False, 1, np.arange(1), augment)[0]
    lead = () if steps == 1 else (steps,)
    place: Sharding | None = placement.batch if steps == 1 else stacked_sharding(placement.batch)
    if by_step and places_in_step(placement.batch):
        place = None

    def array(x: Any, shape: tuple[int, ...], place: Sharding | None) -> jax.ShapeDtypeStruct:
        dtype = jax.dtypes.canonicalize_dtype(np.asarray(x).dtype)
        return jax.ShapeDtypeStruct((*shape, *np.shape(x)[1:]), dtype, sharding=place)

    found = jax.tree.map(
        lambda x: array(x, (*lead, size), place), np.zeros(1, np.int32) if by_index else one
    )
    if size != batch_size:
        found = Padded(found, array(np.zeros(1, np.float32), (*lead, size), place))  # type: ignore[arg-type]
    if not by_index:
        return found
    everywhere = placement.replicated
    return IndexedBatch(found, jax.tree.map(lambda x: array(x, (len(dataset),), everywhere), one))


@dataclass(frozen=True)
class _Numbers:
    """The numbers of each batch's examples, in the place of these."""

    batches: TrainBatches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, step: int) -> np.ndarray:
        return self.batches.own_examples(step)[0].astype(np.int32)


def train_batches(
    dataset: Dataset,
    batch_size: int,
    sharding: Sharding,
    *,
    seed: int,
    shuffle: bool,
    start: int,
    stop: int,
    augment: Augment | None = None,
    threads: int = 0,
    sizes: Iterable[int] = itertools.repeat(1),
    arrays: PyTree = None,
    by_step: bool = False,
    padded_to: int | None = None,
) -> Iterator[PyTree]:
    """The training batches `start` to `stop`, placed on the mesh.

    `sizes` are the steps of each dispatch: the batches of several come as one, of leading dim n.
    With `arrays`, all of the dataset's examples on the devices, a batch is `Rows` of them.
    `by_step` says that the step may be given arrays of the host, which it then places itself.
    If `padded_to` is above `batch_size`, batches are `Padded` to so many rows.
    """
    size = padded_to or batch_size
    local = process_rows(sharding, size)
    examples = np.minimum(local, batch_size - 1)
    batches = TrainBatches(dataset, batch_size, seed, shuffle, stop, examples, augment)
    read = _read(batches if arrays is None else _Numbers(batches), start, threads)
    if size != batch_size:
        read = (Padded(rows, (local < batch_size).astype(np.float32)) for rows in read)  # type: ignore[arg-type]
    placing = _Placing(sharding, size, by_step=by_step)
    ready = map(placing, _joined(read, sizes))
    placed = ready if placing.by_step else _ahead(ready)
    return placed if arrays is None else (IndexedBatch(indices, arrays) for indices in placed)


def ordered_batches(
    dataset: Dataset, batch_size: int, sharding: Sharding, *, threads: int = 0, padded: bool = True
) -> tuple[Iterator[tuple[PyTree, jax.Array]], int]:
    """All examples once, as placed batches of (rows, mask), and the number of batches.

    Args:
        dataset: The examples.
        batch_size: Examples of a batch; it need not divide over the devices.
        sharding: That of a batch.
        threads: Threads that read ahead.
        padded: Whether each batch is filled up to a size that divides over the devices. Otherwise
            a batch that does not have that size is given as it is, in full on each device.
    """
    size = padded_size(batch_size, sharding)
    unless = None if padded else size
    batches = OrderedBatches(dataset, batch_size, process_rows(sharding, size), unless)
    split, everywhere = _Placing(sharding, size), sharding
    if isinstance(sharding, NamedSharding):
        everywhere = NamedSharding(sharding.mesh, PartitionSpec())

    def placed(number: int, batch: PyTree) -> PyTree:
        if not batches.is_whole(number):
            return split([batch])
        return _Placing(everywhere, len(batch[1]))([batch])

    read = _read(batches, 0, threads)
    return _ahead(itertools.starmap(placed, enumerate(read))), len(batches)


class _Carried:
    """Items that are read under the strategy of the code that made this, in any thread."""

    def __init__(self, items: Any) -> None:
        self._items, self._read = items, carried(items.__getitem__)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, number: int) -> PyTree:
        return self._read(number)


def _read(batches: Any, start: int, threads: int) -> Iterator[PyTree]:
    """The items from `start` on, read ahead by Grain in as many threads.

    0 threads read when asked: faster for rows in memory, where a thread costs more than the read.
    """
    if threads == 0:
        return (batches[number] for number in range(start, len(batches)))
    import grain

    dataset: Any = grain.MapDataset.source(_Carried(batches))
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * threads)
    return iter(dataset[start:].to_iter_dataset(options))


def _joined(batches: Iterator[PyTree], sizes: Iterable[int]) -> Iterator[Sequence[PyTree]]:
    """The batches of each dispatch."""
    for size in sizes:
        if not (together := list(itertools.islice(batches, size))):
            return
        yield together


def _ahead(batches: Iterator[PyTree], count: int = 2) -> Iterator[PyTree]:
    """The batches, each placed when that many others are still to be used before it."""
    waiting = collections.deque(itertools.islice(batches, count))
    while waiting:
        yield waiting.popleft()
        waiting.extend(itertools.islice(batches, 1))


class _Placing:
    """Puts batches of this process's rows on the mesh, as global arrays.

    Several of one dispatch become one, of one more dim in front. Raises what `BatchCheck` does.
    """

    def __init__(self, sharding: Sharding, batch_size: int, *, by_step: bool = False) -> None:
        self._sharding, self._batch_size = sharding, batch_size
        self._local_rows = len(process_rows(sharding, batch_size))
        # All arrays at once where nothing is left out: half the time.
        self._at_once = self._local_rows == batch_size and sharding.is_fully_addressable
        self.by_step = by_step and places_in_step(sharding)
        self._check = BatchCheck()

    def __call__(self, batches: Sequence[PyTree]) -> PyTree:
        for batch in batches:
            self._check(batch, self._local_rows)
        if len(batches) == 1:
            return self._place(batches[0], self._sharding)
        joined = jax.tree.map(lambda *parts: np.stack(parts), *batches)
        return self._place(joined, stacked_sharding(self._sharding), len(batches))

    def _place(self, batch: PyTree, sharding: Sharding, *steps: int) -> PyTree:
        if self.by_step:
            return jax.tree.map(np.asarray, batch)  # of one that lies on a device, too
        if self._at_once:
            return jax.device_put(batch, sharding)

        def on_mesh(local: np.ndarray) -> jax.Array:
            shape = (*steps, self._batch_size, *local.shape[len(steps) + 1 :])
            return jax.make_array_from_process_local_data(sharding, local, shape)

        return jax.tree.map(on_mesh, batch)


class BatchCheck:
    """That batches fit, and are like the first: the step would be compiled again for another.

    Raises `UserError`.
    """

    def __init__(self) -> None:
        self._first: list[Any] = []  # the structure of the first batch, then shapes and dtypes

    def __call__(self, batch: PyTree, rows: int) -> None:
        leaves, structure = jax.tree.flatten(batch)
        for local in leaves:
            if local.shape[0] != rows:
                raise UserError(
                    f"the dataset gave {local.shape[0]} rows, shape {local.shape}, for {rows} "
                    "indices"
                )
            check_fits(local)
        found = [structure, *((local.shape[1:], local.dtype) for local in leaves)]
        self._first = self._first or found
        if found != self._first:
            raise UserError(
                f"the dataset gave {_described(found)} after {_described(self._first)}: all of "
                "its examples must be of the same shapes and dtypes"
            )


def places_in_step(sharding: Sharding) -> bool:
    """Whether a jitted step had better be given batches of the host as they are.

    On CPU its call takes them in a tenth of the time that `jax.device_put` needs; elsewhere they
    are put on their way while the step before runs.
    """
    devices: Collection[Any] = sharding.device_set
    return sharding.is_fully_addressable and all(one.platform == "cpu" for one in devices)


def stacked_sharding(sharding: Sharding) -> Sharding:
    """The sharding of batches of several steps, whose first dim is the steps."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))


def _described(found: Sequence[Any]) -> str:
    structure, *arrays = found
    named = named_leaves(jax.tree.unflatten(structure, [f"{d}{list(s)}" for s, d in arrays]))
    return ", ".join(f"{name} {array}".strip() for name, array in named.items()) or "nothing"


def check_fits(local: np.ndarray) -> None:
    """JAX without x64 keeps the lower 32 bits of an integer: refuse what has more."""
    kept = jax.dtypes.canonicalize_dtype(local.dtype)
    if local.dtype.kind not in "iu" or kept == local.dtype:
        return
    narrow = np.iinfo(kept)
    if local.size and not (narrow.min <= local.min() and local.max() <= narrow.max):
        raise UserError(
            f"the data holds integers from {local.min()} to {local.max()}, which do not fit "
            f"{narrow.dtype}, all that JAX keeps of {local.dtype} unless jax_enable_x64 is set"
        )

import collections
import functools
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from spmdtrain.config.options import MeshSpec
from spmdtrain.data.datasets import (
    ArrayDataset,
    Dataset,
    MappedDataset,
    Subset,
    as_dataset,
    fingerprint,
    is_thread_safe,
)
from spmdtrain.data.loader import ordered_batches, train_batches
from spmdtrain.data.mixture import Mixture
from spmdtrain.data.order import permuted
from spmdtrain.data.sampling import (
    Augment,
    OrderedBatches,
    TrainBatches,
    all_rows,
    process_rows,
)
from spmdtrain.errors import UserError
from spmdtrain.sharding.mesh import batch_sharding, build_mesh

DEVICES = (1, 2, 4, 8)


def settings(max_examples: int) -> hypothesis.settings:
    return hypothesis.settings(max_examples=max_examples, deadline=None, derandomize=True)


@functools.cache
def sharding(devices: int = 8) -> NamedSharding:
    return batch_sharding(build_mesh(MeshSpec(devices=tuple(range(devices)))))


def order(size: int, epoch: int, seed: int = 0) -> np.ndarray:
    positions = np.arange(size)
    return permuted(positions, size=size, seed=seed, epochs=np.full(size, epoch))


def placed(
    number: int,
    batch_size: int,
    *,
    devices: int = 8,
    seed: int = 0,
    shuffle: bool = True,
    start: int = 0,
    stop: int,
    threads: int = 0,
) -> list[np.ndarray]:
    """The indices of the examples in each batch, as they come off the devices."""
    batches = train_batches(
        ArrayDataset(np.arange(number)),
        batch_size,
        sharding(devices),
        seed=seed,
        shuffle=shuffle,
        start=start,
        stop=stop,
        threads=threads,
    )
    found = []
    for batch in batches:
        assert batch.sharding == sharding(devices)
        found.append(jax.device_get(batch))
    return found


def indices(
    number: int, batch_size: int, steps: int, *, seed: int = 0, shuffle: bool = True
) -> np.ndarray:
    """The stream of the first `steps` batches, on the host alone."""
    dataset = ArrayDataset(np.arange(number))
    batches = TrainBatches(dataset, batch_size, seed, shuffle, steps, all_rows(batch_size))
    return np.concatenate([batches[step] for step in range(steps)])


# --- The permutation ---


@pytest.mark.slow
def test_the_order_of_each_epoch_is_a_permutation_for_every_small_size() -> None:
    for size in range(1, 301):
        for seed, epoch in ((0, 0), (0, 1), (3, 7)):
            found = order(size, epoch, seed)
            assert found.dtype == np.int64
            assert sorted(found.tolist()) == list(range(size)), (size, seed, epoch)


@settings(40)
@hypothesis.given(st.integers(300, 60_000), st.integers(0, 2**40), st.integers(0, 10**6))
def test_the_order_of_each_epoch_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    assert np.array_equal(np.sort(order(size, epoch, seed)), np.arange(size))


@pytest.mark.slow
@pytest.mark.parametrize("size", [10**9, 10**9 + 7, 2**31 - 1, 2**31, 2**32 + 1, 10**12, 2**45])
def test_the_order_of_a_huge_dataset_repeats_nothing_and_stays_inside(size: int) -> None:
    random = np.random.default_rng(0)
    ends = np.concatenate([np.arange(50_000), size - 1 - np.arange(50_000)])
    positions = np.unique(np.concatenate([ends, random.integers(0, size, 100_000)]))
    found = permuted(positions, size=size, seed=1, epochs=np.full(positions.size, 5))
    assert np.unique(found).size == positions.size
    assert 0 <= found.min() < size * 1e-3
    assert size * (1 - 1e-3) < found.max() < size


def test_where_a_position_goes_depends_on_nothing_asked_for_beside_it() -> None:
    positions, epochs = np.arange(500) % 100, np.arange(500) // 100
    together = permuted(positions, size=100, seed=4, epochs=epochs)
    for chosen in (slice(0, 1), slice(99, 102), slice(250, 251), slice(None, None, 7)):
        alone = permuted(positions[chosen], size=100, seed=4, epochs=epochs[chosen])
        assert alone.tolist() == together[chosen].tolist()


def test_positions_and_epochs_that_are_handed_over_are_left_as_they_were() -> None:
    positions, epochs = np.arange(50), np.zeros(50, np.int64)
    permuted(positions, size=50, seed=0, epochs=epochs)
    assert positions.tolist() == list(range(50))
    assert not epochs.any()


STABLE = (
    "the order of the examples changed: an old run that is resumed would train on other data, and "
    "see some examples of its epoch twice and others never. Fix it, or state it in the changelog"
)


def test_the_order_of_a_seed_and_size_is_what_it_always_was() -> None:
    assert order(10, 0).tolist() == [1, 0, 7, 2, 8, 5, 9, 4, 3, 6], STABLE
    assert order(20, 3, seed=7).tolist() == [
        *(0, 7, 16, 9, 15, 13, 18, 8, 10, 12, 14, 5, 1, 6, 11, 17, 2, 3, 4, 19)
    ], STABLE
    huge = permuted(np.arange(4), size=10**9, seed=42, epochs=np.arange(4))
    assert huge.tolist() == [180547056, 726348129, 631957039, 807147159], STABLE
    assert indices(7, 5, 4, seed=1).tolist() == [
        *(4, 6, 5, 3, 2, 1, 0),
        *(5, 6, 3, 0, 2, 4, 1),
        *(0, 4, 2, 5, 6, 1),
    ], STABLE


# --- How good the shuffle is: all seeds are fixed, so these either hold or do not ---


def chi_square(counts: np.ndarray) -> float:
    """How many standard deviations the statistic is from its mean under uniformity."""
    expected, freedom = counts.sum() / counts.size, counts.size - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return (statistic - freedom) / (2 * freedom) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 10, 37, 64, 100])
@pytest.mark.parametrize("by", ["epoch", "seed"])
def test_over_many_orders_an_example_is_equally_often_in_each_place(size: int, by: str) -> None:
    repeats = 100 * size if by == "epoch" else 1000
    if by == "epoch":
        positions = np.tile(np.arange(size), repeats)
        epochs = np.repeat(np.arange(repeats), size)
        orders = permuted(positions, size=size, seed=0, epochs=epochs).reshape(repeats, size)
    else:
        orders = np.stack([order(size, 0, seed) for seed in range(repeats)])
    for example in (0, 1, size - 1):
        places = np.nonzero(orders == example)[1]
        assert places.size == repeats
        assert abs(chi_square(np.bincount(places, minlength=size))) < 5


@pytest.mark.parametrize("size", [100, 1437, 5000])
def test_neighbors_in_the_dataset_are_not_kept_together(size: int) -> None:
    steps = np.concatenate([np.diff(order(size, epoch)) for epoch in range(20)]) % size
    # Each distance from 1 to size - 1 is equally likely; without a shuffle all of them are 1.
    assert abs(chi_square(np.bincount(steps, minlength=size)[1:])) < 5


@pytest.mark.parametrize("size", [100, 1437, 5000])
def test_the_orders_of_two_epochs_and_of_two_seeds_have_nothing_in_common(size: int) -> None:
    first = order(size, 0)
    for other in (order(size, 1), order(size, 2), order(size, 0, seed=1), np.arange(size)):
        # Two independent orders agree in one place on average, in 10 or more once in 10 million.
        assert int((first == other).sum()) < 10
        assert abs(float(np.corrcoef(first, other)[0, 1])) < 5 / size**0.5


# --- The stream of training examples ---


@pytest.mark.slow
@settings(150)
@hypothesis.given(
    number=st.integers(1, 60),
    per_device=st.integers(1, 12),
    devices=st.sampled_from(DEVICES),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_each_example_comes_exactly_once_an_epoch(
    number: int, per_device: int, devices: int, epochs: int, seed: int
) -> None:
    batch_size = per_device * devices
    steps = -(-epochs * number // batch_size)
    batches = placed(number, batch_size, devices=devices, stop=steps, seed=seed)
    assert [batch.shape for batch in batches] == [(batch_size,)] * steps
    stream = np.concatenate(batches)
    for epoch in range(epochs):
        seen = stream[epoch * number : (epoch + 1) * number]
        assert sorted(seen.tolist()) == list(range(number))
    # What the last, full batch holds beyond is the beginning of the epochs that follow.
    for begin in range(epochs * number, stream.size, number):
        rest = stream[begin : begin + number]
        assert len(set(rest.tolist())) == rest.size


@pytest.mark.slow
@settings(100)
@hypothesis.given(
    number=st.integers(1, 3000), batch_size=st.integers(1, 9000), seed=st.integers(0, 100)
)
def test_the_stream_is_each_epochs_order_after_the_other(
    number: int, batch_size: int, seed: int
) -> None:
    steps = min(1200, 2 + 12_000 // batch_size)  # beyond the blocks that are permuted at once
    stream = indices(number, batch_size, steps, seed=seed)
    epochs = min(60, -(-stream.size // number))
    expected = np.concatenate([order(number, epoch, seed) for epoch in range(epochs)])
    length = min(stream.size, expected.size)
    assert np.array_equal(stream[:length], expected[:length])


def test_epochs_differ_in_their_order_and_so_do_seeds() -> None:
    first, second, third = indices(50, 10, 15).reshape(3, 50)
    other = indices(50, 10, 5, seed=1)
    orders = [first, second, third, other, np.arange(50)]
    assert len({tuple(found.tolist()) for found in orders}) == 5
    assert all(sorted(found.tolist()) == list(range(50)) for found in orders)


def test_without_shuffling_every_epoch_is_in_the_order_of_the_dataset() -> None:
    stream = np.concatenate(placed(10, 8, shuffle=False, stop=5))
    assert stream.tolist() == [*range(10)] * 4
    assert indices(3, 8, 2, shuffle=False).tolist() == [0, 1, 2] * 5 + [0]


def test_a_batch_larger_than_the_dataset_holds_several_epochs() -> None:
    (batch,) = placed(3, 8, stop=1)
    assert batch[:3].tolist() == order(3, 0).tolist()
    assert batch[3:6].tolist() == order(3, 1).tolist()
    assert batch[6:].tolist() == order(3, 2)[:2].tolist()


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize(("number", "batch_size"), [(23, 8), (23, 16), (5, 16), (64, 16)])
def test_batch_k_is_the_same_on_any_number_of_devices_and_from_any_first_step(
    number: int, batch_size: int, threads: int
) -> None:
    steps = 11
    expected = indices(number, batch_size, steps, seed=9).reshape(steps, batch_size).tolist()
    for devices in DEVICES:
        for start in (0, 1, 6, 10):
            found = placed(
                number,
                batch_size,
                devices=devices,
                seed=9,
                start=start,
                stop=steps,
                threads=threads,
            )
            assert [batch.tolist() for batch in found] == expected[start:]


def test_threads_that_read_ahead_change_nothing_where_blocks_meet() -> None:
    # 4096 positions are permuted at once: with batches of 8 a new block begins at step 512.
    alone = placed(1000, 8, start=500, stop=530)
    ahead = placed(1000, 8, start=500, stop=530, threads=3)
    whole = indices(1000, 8, 530).reshape(530, 8)[500:]
    assert np.array_equal(alone, whole)
    assert np.array_equal(ahead, whole)


def test_two_processes_load_the_two_halves_of_what_one_would() -> None:
    dataset = ArrayDataset({"x": np.arange(100) * 3, "y": np.arange(200).reshape(100, 2)})
    whole = TrainBatches(dataset, 16, 0, True, 20, all_rows(16))
    halves = [TrainBatches(dataset, 16, 0, True, 20, rows) for rows in np.split(all_rows(16), 2)]
    for step in (0, 6, 19):
        parts = [half[step] for half in halves]
        for name in ("x", "y"):
            joined = np.concatenate([part[name] for part in parts])
            assert np.array_equal(joined, whole[step][name])


def test_arrays_in_one_batch_are_rows_of_the_same_examples() -> None:
    arrays = (np.arange(30), {"double": 2 * np.arange(30), "square": np.arange(30) ** 2})
    batches = train_batches(
        ArrayDataset(arrays), 8, sharding(), seed=0, shuffle=True, start=0, stop=4
    )
    for x, rest in batches:
        assert (rest["double"] == 2 * x).all()
        assert (rest["square"] == x * x).all()


# --- A dataset too large for any memory ---


class Virtual:
    """Rows computed from their indices."""

    def __len__(self) -> int:
        return 10**9

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {"index": indices, "digits": (indices[:, None] // 10 ** np.arange(9)) % 10}


@pytest.fixture
def step_1_000_000() -> Any:
    def read(threads: int) -> dict[str, np.ndarray]:
        batches = train_batches(
            Virtual(),
            1024,
            sharding(),
            seed=3,
            shuffle=True,
            start=1_000_000,
            stop=2_000_000,
            threads=threads,
        )
        found: dict[str, np.ndarray] = jax.device_get(next(batches))
        return found

    # What the first batch of a process costs, imports most of all, is no matter of the step.
    placed(10, 8, stop=1, threads=2)
    return read


@pytest.mark.parametrize("threads", [0, 2])
def test_step_1_000_000_of_a_billion_rows_is_read_in_under_a_second(
    step_1_000_000: Any, threads: int
) -> None:
    began = time.perf_counter()
    batch = step_1_000_000(threads)
    assert time.perf_counter() - began < 1
    # 1,000,000 * 1024 is beyond the first billion: the batch is of epoch 1.
    positions = np.arange(1024) + 1_000_000 * 1024 - 10**9
    expected = permuted(positions, size=10**9, seed=3, epochs=np.ones(1024, np.int64))
    assert np.array_equal(batch["index"], expected)
    assert np.array_equal(batch["digits"] @ 10 ** np.arange(9), expected)


def test_step_1_000_000_of_a_billion_rows_is_read_in_under_100_mb(step_1_000_000: Any) -> None:
    tracemalloc.start()
    try:
        step_1_000_000(0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 1024 * 8 < peak < 100e6  # below the lower bound nothing was traced


def test_the_batch_an_epoch_of_a_billion_rows_ends_in_runs_on_into_the_next() -> None:
    batches = TrainBatches(Virtual(), 1024, 3, True, 10**6, all_rows(1024))
    found, epochs = batches.examples(10**9 // 1024)
    assert np.bincount(epochs).tolist() == [512, 512]
    positions = np.concatenate([np.arange(10**9 - 512, 10**9), np.arange(512)])
    assert np.array_equal(found, permuted(positions, size=10**9, seed=3, epochs=epochs))


def test_rows_of_an_array_in_another_order_are_read_without_a_copy_of_it() -> None:
    array = np.arange(2**20, dtype=np.float32).reshape(1024, 1024)
    unaligned = np.zeros(array.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(array.shape)
    unaligned[:] = array
    for given in (np.asfortranarray(array), unaligned, np.repeat(array, 2, axis=1)[:, ::2]):
        dataset = ArrayDataset({"x": given})
        tracemalloc.start()
        rows = dataset.rows(np.array([3, 1]))["x"]
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        np.testing.assert_array_equal(rows, array[[3, 1]])
        assert rows.nbytes <= peak < 100_000


# --- Host transforms of the examples ---


def drawing(example: Any, random: np.random.Generator) -> dict[str, Any]:
    return {"index": example, "drawn": random.integers(2**31, size=2)}


def draws(
    number: int,
    batch_size: int,
    *,
    stop: int,
    start: int = 0,
    devices: int = 8,
    seed: int = 0,
    threads: int = 0,
    shuffle: bool = True,
    augment: Augment = drawing,
) -> dict[tuple[int, int], tuple[int, ...]]:
    """What was drawn, by epoch and example."""
    batches = train_batches(
        ArrayDataset(np.arange(number)),
        batch_size,
        sharding(devices),
        seed=seed,
        shuffle=shuffle,
        start=start,
        stop=stop,
        augment=augment,
        threads=threads,
    )
    found = {}
    for step, batch in enumerate(jax.device_get(list(batches)), start):
        for row in range(batch_size):
            epoch = (step * batch_size + row) // number
            found[epoch, int(batch["index"][row])] = tuple(batch["drawn"][row].tolist())
    return found


def test_what_a_transform_draws_depends_on_seed_example_and_epoch_alone() -> None:
    expected = draws(12, 8, stop=6)  # four epochs
    assert len(expected) == 48
    assert draws(12, 16, stop=3) == expected
    assert draws(12, 24, stop=2, devices=4) == expected
    assert draws(12, 8, stop=6, devices=1) == expected
    assert draws(12, 8, stop=6, threads=2) == expected
    assert draws(12, 8, stop=6, shuffle=False) == expected
    assert draws(12, 3, stop=16, devices=1) == expected
    later = draws(12, 8, start=3, stop=6)
    assert len(later) == 24
    assert later == {place: drawn for place, drawn in expected.items() if place in later}


def test_each_example_draws_differently_in_each_epoch_and_for_each_seed() -> None:
    drawn = [*draws(12, 8, stop=6).values(), *draws(12, 8, stop=6, seed=1).values()]
    assert len(set(drawn)) == len(drawn) == 96
    single = {value for pair in drawn for value in pair}
    assert len(single) == 192  # no stream overlaps another's either


def test_what_is_drawn_is_what_it_always_was() -> None:
    def raw(example: Any, random: np.random.Generator) -> dict[str, Any]:
        bits: Any = random.bit_generator
        return {"index": example, "drawn": np.array([int(bits.random_raw()) >> 33])}

    found = draws(3, 8, stop=1, augment=raw)
    assert {place: drawn[0] for place, drawn in found.items()} == {
        (0, 0): 1755808899,
        (0, 1): 1268542151,
        (0, 2): 248798625,
        (1, 0): 866036842,
        (1, 1): 341175589,
        (1, 2): 743093176,
        (2, 1): 1929790473,
        (2, 2): 807882801,
    }, (
        "the random stream of an example changed: an old run that is resumed would continue with "
        "other augmentations"
    )


def test_a_transform_may_change_shapes_and_leaves_the_dataset_as_it_was() -> None:
    images = np.arange(40.0, dtype=np.float32).reshape(10, 2, 2)

    def crop(example: dict[str, Any], random: np.random.Generator) -> dict[str, Any]:
        example["image"][...] = example["image"] + 100
        return {"image": example["image"][:1], "label": example["label"]}

    batches = train_batches(
        ArrayDataset({"image": images, "label": np.arange(10)}),
        8,
        sharding(),
        seed=0,
        shuffle=False,
        start=0,
        stop=1,
        augment=crop,
    )
    batch = next(batches)
    assert batch["image"].shape == (8, 1, 2)
    assert batch["label"].tolist() == list(range(8))
    assert batch["image"][3].tolist() == [[112, 113]]
    assert images.ravel().tolist() == list(range(40))


# --- All examples once, in order ---


@pytest.mark.slow
@settings(150)
@hypothesis.given(
    number=st.integers(1, 70), per_device=st.integers(1, 12), devices=st.sampled_from(DEVICES)
)
def test_ordered_batches_count_each_example_exactly_once(
    number: int, per_device: int, devices: int
) -> None:
    batch_size = per_device * devices
    dataset = ArrayDataset(np.arange(number) + 1000)
    placed_batches, count = ordered_batches(dataset, batch_size, sharding(devices))
    batches = jax.device_get(list(placed_batches))
    assert len(batches) == count == -(-number // batch_size)
    rows = np.concatenate([rows for rows, _ in batches])
    mask = np.concatenate([mask for _, mask in batches])
    assert rows.shape == mask.shape == (count * batch_size,)
    assert mask.dtype == np.float32
    assert mask.sum() == number
    assert set(mask.tolist()) <= {0.0, 1.0}
    assert rows[mask == 1].tolist() == list(range(1000, 1000 + number))
    assert set(rows[mask == 0].tolist()) <= {999 + number}  # filled up by the last row


@pytest.mark.parametrize("threads", [0, 2])
def test_ordered_batches_are_the_same_in_every_reader(threads: int) -> None:
    dataset = ArrayDataset({"x": np.arange(21)})
    placed_batches, _ = ordered_batches(dataset, 8, sharding(), threads=threads)
    found = [(rows["x"].tolist(), mask.tolist()) for rows, mask in placed_batches]
    assert found == [
        ([*range(8)], [1.0] * 8),
        ([*range(8, 16)], [1.0] * 8),
        ([16, 17, 18, 19, 20, 20, 20, 20], [1.0] * 5 + [0.0] * 3),
    ]
    second_process = OrderedBatches(dataset, 8, np.arange(4, 8))
    rows, mask = second_process[2]
    assert (rows["x"].tolist(), mask.tolist()) == ([20, 20, 20, 20], [1.0, 0.0, 0.0, 0.0])


# --- Which rows a process loads, and where they are placed ---


@pytest.mark.parametrize(
    "spec",
    [
        MeshSpec(),
        MeshSpec(data=2, tensor=4),
        MeshSpec(data=2, fsdp=2, tensor=2),
        MeshSpec(replica=2, data=2, tensor=2),
        MeshSpec(data=1, tensor=8),
    ],
)
def test_a_single_process_loads_each_row_of_a_batch_once(spec: MeshSpec) -> None:
    found = process_rows(batch_sharding(build_mesh(spec)), 16)
    assert found.tolist() == list(range(16))


class OfOneProcess:
    """A sharding as one of several processes sees it."""

    def __init__(self, *spans: tuple[int, int]) -> None:
        self.spans = spans

    def addressable_devices_indices_map(self, shape: tuple[int, ...]) -> dict[int, Any]:
        assert shape == (16,)
        return {device: (slice(*span),) for device, span in enumerate(self.spans)}


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([(8, 12), (12, 16)], [*range(8, 16)]),
        ([(12, 16), (0, 4)], [0, 1, 2, 3, 12, 13, 14, 15]),  # wherever the mesh put its devices
        ([(4, 8), (4, 8)], [4, 5, 6, 7]),  # its devices hold the same rows
    ],
)
def test_a_process_loads_the_rows_that_its_devices_hold(
    spans: list[tuple[int, int]], expected: list[int]
) -> None:
    one: Any = OfOneProcess(*spans)
    assert process_rows(one, 16).tolist() == expected


def test_each_device_holds_its_part_of_the_batch_in_the_order_of_the_mesh() -> None:
    (batch,) = train_batches(
        ArrayDataset(np.arange(16)), 16, sharding(), seed=0, shuffle=False, start=0, stop=1
    )
    held = {shard.device.id: shard.data.tolist() for shard in batch.addressable_shards}
    assert held == {device: [2 * device, 2 * device + 1] for device in range(8)}


def test_a_batch_is_whole_on_a_mesh_with_a_tensor_axis() -> None:
    mesh = build_mesh(MeshSpec(data=2, tensor=4))
    (batch,) = train_batches(
        ArrayDataset(np.arange(6)), 6, batch_sharding(mesh), seed=2, shuffle=True, start=0, stop=1
    )
    assert jax.device_get(batch).tolist() == order(6, 0, seed=2).tolist()
    assert sorted(shard.data.tolist() for shard in batch.addressable_shards) == sorted(
        [order(6, 0, seed=2)[:3].tolist()] * 4 + [order(6, 0, seed=2)[3:].tolist()] * 4
    )
    assert batch.sharding.spec == PartitionSpec(("replica", "data", "fsdp", "expert"))


# --- Placing ahead ---


class Recording:
    """Knows how many batches have been read from it."""

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return 8000

    def rows(self, indices: np.ndarray) -> np.ndarray:
        self.reads += 1
        return indices


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 9])
def test_placing_ahead_neither_loses_nor_repeats_a_batch(steps: int, threads: int) -> None:
    found = placed(1000, 8, shuffle=False, start=5, stop=5 + steps, threads=threads)
    expected = [list(range(8 * step, 8 * step + 8)) for step in range(5, 5 + steps)]
    assert [batch.tolist() for batch in found] == expected


def test_some_batches_are_read_ahead_of_their_use_but_not_the_whole_dataset() -> None:
    dataset = Recording()
    batches = train_batches(
        dataset, 8, sharding(), seed=0, shuffle=False, start=0, stop=1000, threads=0
    )
    for used in range(1, 6):
        next(batches)
        assert used + 1 <= dataset.reads <= used + 4


def test_an_error_in_a_dataset_reaches_the_one_who_reads() -> None:
    class Broken(Recording):
        def rows(self, indices: np.ndarray) -> np.ndarray:
            if 40 in indices:
                raise OSError("the disk is gone")
            return super().rows(indices)

    for threads in (0, 2):
        batches = train_batches(
            Broken(), 8, sharding(), seed=0, shuffle=False, start=0, stop=9, threads=threads
        )
        with pytest.raises(OSError, match="the disk is gone"):
            list(batches)


def test_a_dataset_is_as_safe_for_threads_as_all_that_it_reads_from() -> None:
    class Safe(Recording):
        thread_safe = True

    safe, unsafe = Safe(), Recording()
    assert is_thread_safe(MappedDataset(Subset(safe, np.arange(3)), lambda rows: rows))
    assert not is_thread_safe(MappedDataset(Subset(unsafe, np.arange(3)), lambda rows: rows))
    assert is_thread_safe(Mixture({"a": (safe, 0.5), "b": (safe, 0.5)}))
    assert not is_thread_safe(Mixture({"a": (safe, 0.5), "b": (unsafe, 0.5)}))
    assert not is_thread_safe(ArrayDataset(np.zeros(3)))  # is read between steps, which is faster


# --- What can be a dataset ---


def test_arrays_of_different_lengths_are_refused_with_their_shapes() -> None:
    with pytest.raises(UserError, match=r"'x': \(5, 2\).*'y': \(4,\)"):
        ArrayDataset({"x": np.zeros((5, 2)), "y": np.zeros(4)})


@pytest.mark.parametrize("arrays", [np.float32(1), {"x": np.zeros(3), "y": 2.0}, (), {}])
def test_arrays_without_a_leading_dim_are_refused(arrays: Any) -> None:
    with pytest.raises(UserError, match="leading dim"):
        ArrayDataset(arrays)


def test_a_dataset_without_examples_is_refused() -> None:
    none = np.zeros((0, 4))
    empties: list[Any] = [
        none,
        (none, np.zeros(0)),
        {"x": none},
        collections.UserList(),
        ArrayDataset(none),
    ]
    for empty in empties:
        with pytest.raises(UserError, match="is empty"):
            as_dataset(empty)


def stream() -> Iterator[int]:
    yield from range(10)


@pytest.mark.parametrize(
    ("data", "name"),
    [(stream(), "generator"), (iter([1, 2]), "list_iterator"), (map(int, "12"), "map")],
)
def test_a_stream_is_refused_with_the_reason(data: Any, name: str) -> None:
    with pytest.raises(UserError) as caught:
        as_dataset(data)
    message = str(caught.value)
    assert f"a {name} is not a dataset" in message
    assert "a stream has no number of examples" in message
    assert "__len__ and rows(indices)" in message


def test_arrays_in_a_tuple_a_dictionary_or_alone_are_a_dataset() -> None:
    x, y = np.arange(12.0).reshape(6, 2), np.arange(6)
    chosen = np.array([4, 0, 4])
    assert as_dataset(x).rows(chosen).tolist() == [[8, 9], [0, 1], [8, 9]]
    assert [a.tolist() for a in as_dataset((x, y)).rows(chosen)] == [
        [[8, 9], [0, 1], [8, 9]],
        [4, 0, 4],
    ]
    assert as_dataset({"y": y}).rows(chosen)["y"].tolist() == [4, 0, 4]
    on_device = as_dataset(jax.numpy.arange(6) * 2)
    assert (len(on_device), on_device.rows(chosen).tolist()) == (6, [8, 0, 8])


def test_an_object_with_a_length_and_rows_is_a_dataset_as_it_is() -> None:
    virtual = Virtual()
    assert as_dataset(virtual) is virtual
    assert isinstance(virtual, Dataset)
    assert not isinstance([1, 2], Dataset)


def test_rows_of_another_byte_order_are_those_of_the_devices() -> None:
    dataset = ArrayDataset({"x": np.arange(6, dtype=">f4"), "y": np.ones((6, 2), ">i2")})
    rows = dataset.rows(np.array([4, 1]))
    assert rows["x"].tolist() == [4, 1] and rows["x"].dtype == np.dtype("=f4")
    assert rows["y"].tolist() == [[1, 1], [1, 1]] and rows["y"].dtype == np.dtype("=i2")


def test_a_dataset_may_return_the_same_array_again() -> None:
    class Reusing(ArrayDataset):
        def __init__(self) -> None:
            super().__init__(np.zeros(64))
            self.array = np.zeros(8, np.int32)

        def rows(self, indices: np.ndarray) -> np.ndarray:
            self.array[: len(indices)] = indices
            return self.array[: len(indices)]

    batches = TrainBatches(Reusing(), 8, 0, False, 8, all_rows(8))
    assert np.concatenate([batches[step] for step in range(8)]).tolist() == list(range(64))
    ordered = OrderedBatches(Reusing(), 8, all_rows(8))
    assert np.concatenate([ordered[step][0] for step in range(8)]).tolist() == list(range(64))


def test_a_dataset_that_returns_too_few_rows_is_refused() -> None:
    class Short:
        def __len__(self) -> int:
            return 16

        def rows(self, indices: np.ndarray) -> np.ndarray:
            return np.zeros((len(indices) - 1, 3))

    with pytest.raises(UserError, match=r"7 rows.*8 indices"):
        next(ordered_batches(Short(), 8, sharding())[0])


def test_a_source_of_grain_is_a_dataset_with_its_transforms() -> None:
    import grain

    source = grain.MapDataset.range(100).map(lambda value: {"x": value, "square": value**2})
    batches = train_batches(
        as_dataset(source), 8, sharding(), seed=0, shuffle=True, start=12, stop=14
    )
    found = jax.device_get(list(batches))
    expected = indices(100, 8, 14).reshape(14, 8)[12:]
    assert np.array_equal([batch["x"] for batch in found], expected)
    assert np.array_equal([batch["square"] for batch in found], expected**2)


def test_a_subset_holds_the_chosen_examples_in_the_order_chosen() -> None:
    subset = Subset(ArrayDataset({"x": np.arange(10) * 10}), np.array([7, 2, 5]))
    assert len(subset) == 3
    assert subset.rows(np.array([2, 0]))["x"].tolist() == [50, 70]
    nested = Subset(subset, np.array([1]))
    assert nested.rows(np.array([0, 0]))["x"].tolist() == [20, 20]
    (rows, mask), *_ = ordered_batches(subset, 8, sharding())[0]
    assert rows["x"].tolist() == [70, 20, 50, 50, 50, 50, 50, 50]
    assert mask.tolist() == [1, 1, 1, 0, 0, 0, 0, 0]


def test_a_mapped_dataset_is_mapped_a_batch_at_once_when_it_is_read() -> None:
    calls: list[int] = []

    def scale(rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        calls.append(len(rows["x"]))
        return {"x": rows["x"] / 10}

    mapped = MappedDataset(ArrayDataset({"x": np.arange(20)}), scale)
    assert len(mapped) == 20
    assert calls == []
    assert mapped.rows(np.array([3, 1, 19]))["x"].tolist() == [0.3, 0.1, 1.9]
    assert calls == [3]


def test_an_error_of_a_map_function_names_the_examples() -> None:
    mapped = MappedDataset({"x": np.arange(20)}, lambda rows: rows["y"])
    with pytest.raises(KeyError) as raised:
        mapped.rows(np.arange(19, 9, -1))
    (note,) = raised.value.__notes__
    assert note.endswith("for the examples 19, 18, 17, 16, 15, 14, 13, 12 and 2 more")


# --- Telling one dataset from another ---


def test_equal_datasets_have_equal_fingerprints() -> None:
    def make() -> ArrayDataset:
        return ArrayDataset({"x": np.arange(60.0).reshape(30, 2), "y": np.arange(30)})

    first = fingerprint(make())
    assert first == fingerprint(make())
    assert first["examples"] == 30
    assert first["arrays"] == {"x": "float32[2]", "y": "int32[]"}  # of a step
    assert fingerprint(Virtual()) == fingerprint(Virtual())


def test_a_fingerprint_tells_length_type_shape_name_and_content() -> None:
    x = np.arange(12, dtype=np.int32).reshape(12, 1)
    last, first = x.copy(), x.copy()
    last[-1], first[0] = 99, 99
    others: list[Any] = [
        {"x": x},
        {"x": x[:-1]},
        {"x": np.concatenate([x, x[-1:]])},
        {"x": x.astype(np.int16)},
        {"x": x.view(np.float32)},
        {"x": x[:, 0]},
        {"x": x[::-1]},
        {"y": x},
        {"x": x, "y": x},
        {"x": last},
        {"x": first},
    ]
    prints = [str(fingerprint(ArrayDataset(arrays))) for arrays in others]
    assert len(set(prints)) == len(prints)
    assert str(fingerprint(ArrayDataset({"x": x.astype(np.int64)}))) == prints[0]  # x64 is off


def test_a_fingerprint_reads_a_few_rows_alone() -> None:
    seen: list[int] = []

    def look(rows: np.ndarray) -> np.ndarray:
        seen.extend(rows.tolist())
        return rows

    fingerprint(MappedDataset(Recording(), look))
    assert seen[0] == 0
    assert seen[-1] == 7999
    assert 2 < len(seen) <= 64


def test_integers_that_the_devices_would_cut_off_are_refused() -> None:
    fitting = {"x": np.array([2**31 - 1] * 8)}
    placed = next(
        ordered_batches(as_dataset(fitting), 8, batch_sharding(build_mesh(MeshSpec())))[0]
    )
    assert placed[0]["x"].tolist() == [2**31 - 1] * 8
    too_large = {"x": np.array([2**40 + 5] * 8)}
    with pytest.raises(UserError, match="1099511627781"):
        next(ordered_batches(as_dataset(too_large), 8, batch_sharding(build_mesh(MeshSpec())))[0])


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([True, False], "bool"),
        ([-1, 3], "from -1 to 3"),
        ([0, 10], "has 0 to 9"),
        ([[1]], "one dim"),
    ],
)
def test_a_subset_takes_only_indices_that_are_there(indices: list[Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Subset(as_dataset(np.zeros(10)), np.array(indices))


def test_what_is_no_collection_at_all_is_not_called_a_stream() -> None:
    with pytest.raises(UserError, match="int is not a dataset"):
        as_dataset(7)

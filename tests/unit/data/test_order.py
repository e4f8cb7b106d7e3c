"""The order of training: which example is at which position, with and without blocks."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from spmdtrain.data.datasets import (
    MappedDataset,
    Subset,
    blocks_of,
    fingerprint,
)
from spmdtrain.data.examples import IndexableDataset
from spmdtrain.data.order import BLOCKS_PER_GROUP, EpochOrder, permuted
from spmdtrain.data.sampling import TrainBatches, all_rows, order_of
from spmdtrain.errors import UserError

SETTINGS = hypothesis.settings(max_examples=60, deadline=None, derandomize=True)


class Blocked:
    """Numbers from 0 on, in blocks."""

    def __init__(self, blocks: list[int] | np.ndarray) -> None:
        self.blocks = np.asarray(blocks)

    def __len__(self) -> int:
        return int(self.blocks[-1])

    def rows(self, indices: np.ndarray) -> np.ndarray:
        return indices

    def __getitem__(self, index: int) -> int:
        return index


def begins(sizes: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes)])


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_order_without_blocks_is_what_it_always_was(shuffle: bool) -> None:
    indices, epochs = EpochOrder(7, 1, shuffle=shuffle).examples(np.arange(20))
    # The values of tests/unit/data/test_data.py, for batches of the same data.
    shuffled = [4, 6, 5, 3, 2, 1, 0, 5, 6, 3, 0, 2, 4, 1, 0, 4, 2, 5, 6, 1]
    assert indices.tolist() == (shuffled if shuffle else [*range(7), *range(7), *range(6)])
    assert epochs.tolist() == [0] * 7 + [1] * 7 + [2] * 6


def test_the_order_with_blocks_stays_what_it_is() -> None:
    order = EpochOrder(23, 7, shuffle=True, blocks=np.arange(24)[[*range(0, 23, 2), 23]])
    indices, _ = order.examples(np.arange(46))
    assert indices.tolist() == [
        *(5, 14, 7, 0, 4, 12, 19, 15, 8, 22, 6, 13, 9, 18, 1, 17, 20, 3, 21, 11, 16, 2, 10),
        *(0, 11, 7, 13, 2, 1, 12, 10, 5, 4, 3, 17, 6, 16, 19, 18, 14, 8, 21, 15, 20, 22, 9),
    ]


@pytest.mark.slow
@hypothesis.given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=40).filter(any),
    seed=st.integers(0, 5),
    epoch=st.integers(0, 10**6),
)
@SETTINGS
def test_with_blocks_every_example_is_there_once_an_epoch(
    sizes: list[int], seed: int, epoch: int
) -> None:
    blocks = begins(sizes)
    size = int(blocks[-1])
    order = EpochOrder(size, seed, shuffle=True, blocks=blocks)
    positions = np.arange(epoch * size, (epoch + 1) * size)
    indices, epochs = order.examples(positions)
    assert np.sort(indices).tolist() == list(range(size))
    assert set(epochs) == {epoch}
    # The same at any position and in any order of asking.
    chosen = np.random.default_rng(seed).permutation(size)[:5]
    assert np.array_equal(order.examples(positions[chosen])[0], indices[chosen])


def test_a_window_of_positions_touches_few_blocks() -> None:
    blocks = np.arange(0, 100_001, 100)
    order = EpochOrder(100_000, 0, shuffle=True, blocks=blocks)
    indices, _ = order.examples(np.arange(100_000))
    touched = [len(set(window // 100)) for window in indices.reshape(-1, 100)]
    assert max(touched) <= 2 * BLOCKS_PER_GROUP
    # Nevertheless shuffled: the blocks of a group are mixed, and groups are of distant blocks.
    assert np.mean(touched) > 0.9 * BLOCKS_PER_GROUP
    neighbors = np.abs(np.diff(indices[:: 100 * BLOCKS_PER_GROUP]))
    assert np.median(neighbors) > 10_000
    # Another order in the next epoch.
    following, _ = order.examples(np.arange(100_000, 200_000))
    assert (following == indices).mean() < 0.01


@pytest.mark.slow
def test_examples_of_a_group_are_shuffled_as_well_as_without_blocks() -> None:
    """Each position of the first group gets each of the examples about equally often."""
    order = EpochOrder(12, 0, shuffle=True, blocks=np.array([0, 3, 6, 9, 12]))
    indices, _ = order.examples(np.arange(12 * 2400))
    counts = np.array([np.bincount(column, minlength=12) for column in indices.reshape(-1, 12).T])
    assert counts.min() > 140 and counts.max() < 260  # expected 200, standard deviation 14


def test_batches_follow_the_blocks_of_their_dataset() -> None:
    data = Blocked(np.arange(0, 1001, 10))
    batches = TrainBatches(data, 50, 3, True, 20, all_rows(50))
    expected, _ = EpochOrder(1000, 3, shuffle=True, blocks=data.blocks).examples(np.arange(1000))
    assert np.array_equal(np.concatenate([batches[k] for k in range(20)]), expected)
    assert len(set(batches[0] // 10)) <= 2 * BLOCKS_PER_GROUP


def test_blocks_are_passed_on_where_they_stay_true() -> None:
    data = Blocked([0, 10, 20, 25])
    passed = [
        MappedDataset(data, lambda rows: rows).blocks,
        IndexableDataset(data).blocks,
        Subset(data, np.arange(5, 22)).blocks,
        Subset(data, np.arange(25)[::-1]).blocks,
        Subset(np.arange(9), np.arange(3)).blocks,
    ]
    found = [None if x is None else x.tolist() for x in passed]
    assert found == [[0, 10, 20, 25], [0, 10, 20, 25], [0, 5, 15, 17], None, None]


@pytest.mark.parametrize("blocks", [[0, 4], [1, 5], [0, 3, 2, 5], [0.0, 5.0], 5, [5]])
def test_blocks_that_do_not_divide_the_examples_are_refused(blocks: object) -> None:
    data = Blocked([0, 5])
    data.blocks = np.asarray(blocks)
    data.__class__ = type("Parts", (Blocked,), {"__len__": lambda self: 5})
    with pytest.raises(UserError, match=r"blocks of a Parts.* ascend from 0 to its 5 examples"):
        order_of(data, 0, shuffle=True, batch_size=1)


def test_blocks_are_part_of_what_identifies_a_dataset() -> None:
    prints = [fingerprint(Blocked(blocks)) for blocks in ([0, 2, 9], [0, 3, 9], [0, 2, 9])]
    assert prints[0]["blocks"] != prints[1]["blocks"]
    assert prints[0] == prints[2]
    assert "blocks" not in fingerprint(MappedDataset(np.arange(3), lambda rows: rows))
    assert blocks_of(np.arange(3)) is None


@pytest.mark.slow
@hypothesis.given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=20), part=st.integers(0, 9)
)
@SETTINGS
def test_permutations_of_different_sizes_are_computed_together(sizes: list[int], part: int) -> None:
    of = np.repeat(np.arange(len(sizes)), sizes)
    positions = np.concatenate([np.arange(size) for size in sizes])
    epochs = np.zeros_like(of)
    together = permuted(positions, size=np.array(sizes)[of], seed=0, epochs=epochs, part=part + of)
    for number, size in enumerate(sizes):
        one = permuted(
            np.arange(size), size=size, seed=0, epochs=np.zeros(size, int), part=part + number
        )
        assert np.array_equal(together[of == number], one)

"""The partitioners, against the cases that TensorFlow documents, and what is placed where."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from spmdtrain.parameter_server.partition import (
    FixedShards,
    Leaf,
    MaxSize,
    MinSize,
    Partitioner,
    assign_rows,
)


@pytest.mark.parametrize(
    ("partitioner", "shape", "shards"),
    [
        # The examples of tf.distribute.experimental.partitioners, all of float32.
        (FixedShards(num_shards=2), (10, 3), 2),
        (MinSize(min_shard_bytes=4, max_shards=2), (6, 1), 2),
        (MinSize(min_shard_bytes=4, max_shards=10), (6, 1), 6),
        (MaxSize(max_shard_bytes=4), (6, 1), 6),
        (MaxSize(max_shard_bytes=4, max_shards=2), (6, 1), 2),
        (MaxSize(max_shard_bytes=1024), (6, 1), 1),
        # Their defaults, and what follows from their rules.
        (MinSize(), (1 << 20, 4), 1),
        (MinSize(max_shards=4), (1024, 64), 1),  # of 256 KiB
        (MinSize(max_shards=4), (1025, 64), 2),
        (MinSize(max_shards=4), (1 << 20, 4), 4),
        (MaxSize(max_shard_bytes=100), (10, 10), 5),  # two rows of 40 bytes each
        (MaxSize(max_shard_bytes=10), (10, 10), 10),  # a row is not cut
        (FixedShards(num_shards=8), (3, 100), 3),
        (FixedShards(num_shards=8), (), 1),
        (MaxSize(max_shard_bytes=1), (), 1),
        (MaxSize(max_shard_bytes=1), (0, 4), 1),
    ],
)
def test_shards(partitioner: Partitioner, shape: tuple[int, ...], shards: int) -> None:
    assert partitioner(shape, 4) == shards


PARTITIONERS = st.one_of(
    st.builds(FixedShards, st.integers(1, 9)),
    st.builds(MinSize, st.integers(1, 9), st.integers(1, 400)),
    st.builds(MaxSize, st.integers(1, 400), st.none() | st.integers(1, 9)),
)
SHAPES = st.lists(st.lists(st.integers(0, 12), max_size=3).map(tuple), min_size=1, max_size=6)


@given(SHAPES, st.integers(1, 5), PARTITIONERS)
def test_each_row_is_on_one_server(
    shapes: list[tuple[int, ...]], servers: int, partitioner: Partitioner
) -> None:
    leaves = {str(n): Leaf(shape, 4) for n, shape in enumerate(shapes)}
    placed = assign_rows(leaves, servers, partitioner)
    for name, leaf in leaves.items():
        held = [rows[name] for rows in placed if name in rows]
        # In the order of the servers, without a gap.
        assert [rows.start for rows in held] == [0, *(rows.stop for rows in held[:-1])]
        assert held[-1].stop == (leaf.shape[0] if leaf.shape else 1)
        assert len(held) == min(partitioner(leaf.shape, 4), servers)


def test_more_shards_than_servers_lie_side_by_side() -> None:
    first, second = assign_rows({"w": Leaf((10, 3), 4)}, 2, FixedShards(5))
    assert (first["w"].start, first["w"].stop, second["w"].start) == (0, 6, 6)  # three and two


def test_servers_get_as_much_as_each_other() -> None:
    leaves = {str(size): Leaf((size, 8), 4) for size in (60, 50, 40, 30, 20, 10)}
    placed = assign_rows(leaves, 2, MinSize())
    rows = [sum(r.stop - r.start for r in held.values()) for held in placed]
    assert rows == [110, 100] or rows == [100, 110]

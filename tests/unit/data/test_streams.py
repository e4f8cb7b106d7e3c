"""Streams: their shards, the order of the examples, and the positions."""

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest
from stream_helpers import (
    Counter,
    as_text,
    batches,
    counters,
    filtered,
    hugging_face,
    loader,
    mixed,
    numbers,
    windows,
)

from spmdtrain import Stream, UserError
from spmdtrain.data.streams import ShardedStream, ShardReader, as_stream

# -- the order of the examples ---------------------------------------------------------------------


def test_each_shard_gives_consecutive_rows_and_repeats_by_itself() -> None:
    stream = ShardedStream(counters(7), 2)  # shards 0 2 4 6 and 1 3 5
    assert numbers(batches(stream, 4, 4)) == [
        [0, 2, 1, 3],
        [4, 6, 5, 1],
        [0, 2, 3, 5],
        [4, 6, 1, 3],
    ]


def test_a_process_reads_only_the_shards_of_its_rows() -> None:
    made = []

    def make_shard(index: int, count: int) -> Counter:
        made.append(index)
        return Counter(index, count, 40)

    stream = ShardedStream(Stream(make_shard), 4)
    stream.first  # noqa: B018 (reads the first example of this process)
    made.clear()
    found = numbers(batches(stream, 8, 2, rows=np.array([4, 5, 6, 7])))
    assert found == [[2, 6, 3, 7], [10, 14, 11, 15]]
    assert made == [2, 3]


def test_two_batches_are_read_ahead_by_a_thread_that_ends() -> None:
    threads: set[threading.Thread] = set()
    read = threading.Semaphore(0)

    def make_shard(index: int, count: int) -> Counter:
        threads.add(threading.current_thread())
        return Counter(index, count, 400, called=read.release)

    reading = batches(ShardedStream(Stream(make_shard), 2), 4, 50)
    assert numbers([next(reading)]) == [[0, 2, 1, 3]]
    assert all(read.acquire(timeout=20) for _ in range(13))  # the first example, and 3 batches
    assert not read.acquire(timeout=0.1)
    (reader,) = threads - {threading.current_thread()}
    reading.close()  # type: ignore[attr-defined]
    assert not reader.is_alive()


def test_padding_rows_repeat_the_last_example() -> None:
    stream = ShardedStream(counters(40), 3)
    rows = np.array([0, 1, 2, 3, 4, 5, 5, 5])
    assert numbers(batches(stream, 6, 1, rows=rows)) == [[0, 3, 1, 4, 2, 5, 5, 5]]


def test_a_process_that_holds_a_part_of_a_shard_is_refused() -> None:
    with pytest.raises(UserError, match="stream_shards is 2, and 1 processes divide a batch"):
        batches(ShardedStream(counters(40), 2), 8, 1, rows=np.arange(2))


def test_augment_draws_by_seed_shard_example_and_epoch() -> None:
    def augment(example: Any, generator: np.random.Generator) -> Any:
        return {"x": generator.integers(2**30)}

    def drawn(seed: int, start: int = 0, positions: Any = None) -> list[list[int]]:
        found = batches(
            ShardedStream(counters(8), 2),
            4,
            6,
            seed=seed,
            augment=augment,
            start=start,
            positions=positions or {},
        )
        return numbers(found)

    first = drawn(1)
    assert len({*itertools.chain(*first)}) == 24  # also in other epochs of the same example
    *_, (_, after) = itertools.islice(
        batches(ShardedStream(counters(8), 2), 4, 6, seed=1, augment=augment), 3
    )
    assert drawn(1, 3, as_text(after)) == first[3:]
    assert drawn(2) != first


# -- pipelines of libraries ------------------------------------------------------------------------


SOURCES: dict[str, Callable[[Path], Any]] = {
    "own": lambda _: counters(40),
    "grain": lambda _: filtered(),
    "grain-windows": lambda _: windows(),
    "grain-mix": lambda _: mixed(),
    "grain-loader": lambda _: Stream(loader),
    "hugging-face": hugging_face,
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::Warning")  # of the libraries
@pytest.mark.parametrize("name", SOURCES)
def test_from_every_position_the_same_examples_follow(name: str, tmp_path: Path) -> None:
    stream = as_stream(SOURCES[name](tmp_path))
    assert stream is not None
    whole = list(batches(ShardedStream(stream, 2), 6, 20))
    for done in range(1, 20, 3):
        positions = json.loads(json.dumps(as_text(whole[done - 1][1])))
        again = SOURCES[name](tmp_path)
        resumed = ShardedStream(as_stream(again) or stream, 2)
        found = batches(resumed, 6, 20, start=done, positions=positions)
        assert numbers(found) == numbers(whole[done:])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::Warning")
@pytest.mark.parametrize("name", [n for n in SOURCES if n != "grain-mix"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_shards_are_a_partition_of_the_examples(name: str, count: int, tmp_path: Path) -> None:
    stream = as_stream(SOURCES[name](tmp_path))
    assert stream is not None

    def epoch(index: int, count: int) -> Iterator[int]:
        reader = ShardReader(stream, index, count)
        for _ in range(10_000):
            (leaf,) = reader.read().values()
            if reader.epoch:
                return
            yield int(leaf)

    shards = [[*epoch(index, count)] for index in range(count)]
    assert sorted(itertools.chain(*shards)) == sorted(epoch(0, 1))
    assert all(shards)


def test_a_shard_of_grain_shares_the_source() -> None:
    class Source:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            return {"x": np.int32(index)}

        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("copied")

    stream = as_stream(grain.MapDataset.source(Source()).to_iter_dataset())
    assert stream is not None
    assert [example["x"] for example in stream.make_shard(1, 4)] == [1, 5]


# -- data that are missing -------------------------------------------------------------------------


def changing(*lengths: int, **options: Any) -> Stream:
    """A stream of one shard whose epochs have these lengths."""
    remaining = list(lengths)
    return Stream(lambda index, count: Counter(index, count, remaining.pop(0)), **options)


def read(reader: ShardReader, count: int) -> list[int]:
    return [reader.read()["x"].item() for _ in range(count)]


def test_an_epoch_that_is_shorter_than_the_first_is_an_error() -> None:
    reader = ShardReader(changing(3, 10), 0, 1)  # a longer one is not
    assert read(reader, 13) == [*range(3), *range(10)]
    reader = ShardReader(changing(10, 11, 3), 0, 1)
    position = [reader.position().text() for _ in read(reader, 12)][-1]
    for same in (reader, ShardReader(changing(11, 3), 0, 1, position)):
        with pytest.raises(UserError) as error:
            read(same, 20)
        assert str(error.value) == (
            "shard 0 of 1 of the stream ends after 3 examples of epoch 2, and 10 were read before: "
            "files are missing or truncated. If its epochs differ in length, give "
            "Stream(make_shard, same_length=False)"
        )
    reader = ShardReader(changing(10, 3, 4, same_length=False), 0, 1)
    assert read(reader, 17) == [*range(10), *range(3), *range(4)]


def test_a_position_beyond_the_data_is_an_error() -> None:
    reader = ShardReader(counters(48), 1, 2)
    first = read(reader, 24)
    position = reader.position().text()
    with pytest.raises(UserError, match=r"ends after 15 examples of epoch 0, and 24 were"):
        ShardReader(counters(30), 1, 2, position).read()
    assert read(ShardReader(counters(48), 1, 2, position), 24) == first  # the end is no error

"""Streams for tests: numbers that a class, Grain and Hugging Face datasets give; TFRecords."""

import json
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import crc32c
import grain
import numpy as np
import pytest

from spmdtrain import Stream
from spmdtrain.data.streams import ShardedStream

MakeShard = Callable[[int, int], Iterable[Any]]


class Counter:
    """Numbers of a shard, as the iterable that a user writes; fails or changes at one of them."""

    def __init__(self, index: int, count: int, end: int, **changes: Any) -> None:
        self.numbers, self.changes = range(index, end, count), changes

    def __iter__(self) -> "CounterIterator":
        return CounterIterator(self)


class CounterIterator:
    def __init__(self, counter: Counter) -> None:
        self.counter, self.position = counter, 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.position >= len(self.counter.numbers):
            raise StopIteration
        number = self.counter.numbers[self.position]
        self.position += 1
        self.counter.changes.get("called", int)()
        if number == self.counter.changes.get("fails"):
            raise self.counter.changes["error"]("the connection is lost")
        changed = number == self.counter.changes.get("at")
        return self.counter.changes["example"] if changed else {"x": np.int32(number)}

    def get_state(self) -> Any:
        return {"position": self.position, "token": b"\xff"}

    def set_state(self, state: Any) -> None:
        assert state["token"] == b"\xff"
        self.position = state["position"]


def counters(end: int, **changes: Any) -> Stream:
    return Stream(lambda index, count: Counter(index, count, end, **changes))


def numbers(batches: Iterable[Any]) -> list[list[int]]:
    return [batch["x"].tolist() for batch, _ in batches]


def as_text(positions: Any) -> dict[str, str]:
    return {index: position.text() for index, position in positions.items()}


def batches(stream: ShardedStream, size: int, stop: int, **options: Any) -> Iterator[Any]:
    defaults = {"rows": np.arange(size), "start": 0, "positions": {}, "seed": 0, "augment": None}
    return stream.batches(size, stop=stop, **defaults | options)  # type: ignore[arg-type]


def filtered(end: int = 50) -> grain.IterDataset:
    source = grain.MapDataset.range(end).shuffle(seed=3).map(lambda x: {"x": np.int32(x)})
    return source.to_iter_dataset().filter(lambda example: example["x"] % 3 != 0)


def windows(end: int = 50) -> grain.IterDataset:
    return grain.experimental.WindowShuffleIterDataset(filtered(end), window_size=5, seed=1)


def mixed(end: int = 50) -> grain.IterDataset:
    return grain.IterDataset.mix([filtered(end), windows(end)], [1, 2])


def loader(index: int, count: int) -> grain.DataLoader:
    return grain.DataLoader(
        data_source=range(48),
        sampler=grain.samplers.IndexSampler(48, shuffle=True, num_epochs=1, seed=0),
        operations=[AsExample()],
        shard_options=grain.sharding.ShardOptions(index, count),
    )


class AsExample(grain.transforms.Map):  # type: ignore[misc]
    def map(self, element: int) -> Any:
        return {"x": np.int32(element)}


def hugging_face(folder: Path) -> Any:
    datasets = pytest.importorskip("datasets")
    for name in range(4):
        lines = "".join(f'{{"x": {20 * name + n}}}\n' for n in range(7 + name))
        (folder / f"{name}.jsonl").write_text(lines)

    def read(files: list[str]) -> Iterator[Any]:
        for file in files:
            yield from map(json.loads, Path(file).read_text().splitlines())

    files = [str(folder / f"{name}.jsonl") for name in range(4)]
    return datasets.IterableDataset.from_generator(read, gen_kwargs={"files": files})


def tf_record(content: bytes) -> bytes:
    """The definition of a record of a TFRecord file."""

    def masked(part: bytes) -> bytes:
        crc = crc32c.crc32c(part)
        return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32)

    length = struct.pack("<Q", len(content))
    return length + masked(length) + content + masked(content)

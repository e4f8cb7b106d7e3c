"""Shuffled batches from files, without training: `--way grain --workers 0`, and others.

The work is the same everywhere. Images: a record of an ArrayRecord file is an image of uint8. Text:
a row of a Parquet file becomes its first 1,024 UTF-8 bytes as int32, padded by 0. Images are
shuffled completely; text within 8 row groups of 2,048 documents, in all libraries.
"""

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

EDGE = 64
TOKENS = 1024
ROW_GROUPS = 8  # that are shuffled together
WINDOW = ROW_GROUPS * 2048


def image_of(record: bytes | bytearray) -> dict[str, np.ndarray]:
    return {"image": np.frombuffer(record, np.uint8).reshape(EDGE, EDGE, 3)}


def tokens_of(text: str) -> dict[str, np.ndarray]:
    found = np.frombuffer(text.encode()[:TOKENS], np.uint8)
    tokens = np.zeros(TOKENS, np.int32)
    tokens[: len(found)] = found
    return {"tokens": tokens}


def paths(folder: str, kind: str) -> list[str]:
    return [
        str(path)
        for path in sorted(Path(folder).glob(f"{'images' if kind == 'images' else 'text'}-*"))
    ]


def dataset_of(kind: str, folder: str) -> Any:
    import spmdtrain

    files = paths(folder, kind)
    if kind == "images":
        return spmdtrain.ArrayRecordSource(files, image_of)
    documents = spmdtrain.Tokenized(spmdtrain.ParquetSource(files), "bytes")
    return spmdtrain.Packed(documents, TOKENS) if kind == "packed" else Cropped(documents)


def by_spmdtrain(
    kind: str,
    folder: str,
    size: int,
    threads: int,
    processes: int = 0,
    epochs: int | None = None,
) -> Iterator[Any]:
    import jax
    from jax.sharding import SingleDeviceSharding

    from spmdtrain.data.datasets import as_dataset
    from spmdtrain.data.loader import train_batches

    dataset = as_dataset(dataset_of(kind, folder))
    return train_batches(
        dataset,
        size,
        SingleDeviceSharding(jax.devices()[0]),
        seed=0,
        shuffle=True,
        start=0,
        stop=10**9 if epochs is None else -(-epochs * len(dataset) // size),
        threads=threads,
        workers=processes,
        step_may_place=True,
    )


class Cropped:
    """The first tokens of each document."""

    def __init__(self, documents: Any) -> None:
        self.documents, self.blocks = documents, documents.blocks

    def __len__(self) -> int:
        return len(self.documents)

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        tokens = np.zeros((len(indices), TOKENS), np.int32)
        found = self.documents.__getitems__(indices.tolist())
        for row, document in zip(tokens, found, strict=True):
            row[: len(document)] = document[:TOKENS]
        return {"tokens": tokens}


def by_grain(kind: str, folder: str, size: int, threads: int) -> Iterator[Any]:
    import grain

    files = paths(folder, kind)
    data: Any
    if kind == "images":
        source = grain.sources.ArrayRecordDataSource(files)
        data = grain.MapDataset.source(source).seed(0).shuffle().map(image_of).batch(size).repeat()
        data = data.to_iter_dataset(
            grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * threads)
        )
        return iter(data)
    from grain.experimental import (
        InterleaveIterDataset,
        ParquetIterDataset,
        ThreadPrefetchIterDataset,
        WindowShuffleIterDataset,
    )

    parts = grain.MapDataset.source(files).seed(0).shuffle().repeat().map(ParquetIterDataset)
    data = InterleaveIterDataset(parts, cycle_length=2)
    data = WindowShuffleIterDataset(data, window_size=WINDOW, seed=0)
    data = data.map(lambda row: tokens_of(row["text"])).batch(size)
    if threads:
        data = ThreadPrefetchIterDataset(data, prefetch_buffer_size=2 * threads)
    return iter(data)


def shuffled_texts(files: list[str], draws: np.random.Generator) -> Iterator[str]:
    """Yields texts for ever, shuffled within `ROW_GROUPS` random row groups."""
    import pyarrow.parquet as pq

    opened = [pq.ParquetFile(file) for file in files]
    groups = [(file, n) for file in opened for n in range(file.num_row_groups)]
    while True:
        order = draws.permutation(len(groups))
        for start in range(0, len(order), ROW_GROUPS):
            texts: list[str] = []
            for number in order[start : start + ROW_GROUPS]:
                file, group = groups[number]
                texts += file.read_row_group(group)["text"].to_pylist()
            for position in draws.permutation(len(texts)):
                yield texts[position]


def by_torch(kind: str, folder: str, size: int, workers: int) -> Iterator[Any]:
    import torch
    from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    files = paths(folder, kind)

    class Texts(IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            info = get_worker_info()
            number, count = (info.id, info.num_workers) if info else (0, 1)
            texts = shuffled_texts(files[number::count], np.random.default_rng(number))
            return map(tokens_of, texts)

    class Images(Dataset):  # type: ignore[misc]
        def __init__(self) -> None:
            from array_record.python.array_record_data_source import ArrayRecordDataSource

            self.source = ArrayRecordDataSource(files)

        def __len__(self) -> int:
            return len(self.source)

        def __getitem__(self, index: int) -> Any:
            return image_of(bytearray(self.source[index]))  # PyTorch warns if not writable

    keep = {"persistent_workers": True} if workers else {}
    data: Any = Images() if kind == "images" else Texts()
    shuffle = {"shuffle": True, "drop_last": True} if kind == "images" else {}
    loader = DataLoader(data, batch_size=size, num_workers=workers, **shuffle, **keep)
    return itertools.chain.from_iterable(itertools.repeat(loader))


def by_tensorflow(kind: str, folder: str, size: int, workers: int) -> Iterator[Any]:
    import tensorflow as tf

    files = paths(folder, kind)
    calls = workers or None
    if kind == "images":
        from array_record.python.array_record_data_source import ArrayRecordDataSource

        source = ArrayRecordDataSource(files)

        def records() -> Iterator[list[bytes]]:
            draws = np.random.default_rng(0)
            while True:
                order = draws.permutation(len(source))
                for start in range(0, len(order) - size + 1, size):
                    yield [source[number] for number in order[start : start + size].tolist()]

        def decode(content: Any) -> Any:
            return {"image": tf.reshape(tf.io.decode_raw(content, tf.uint8), (-1, EDGE, EDGE, 3))}

        data = tf.data.Dataset.from_generator(
            records, output_signature=tf.TensorSpec((size,), tf.string)
        ).map(decode, num_parallel_calls=calls)
    else:

        def groups() -> Iterator[list[str]]:
            texts = shuffled_texts(files, np.random.default_rng(0))
            while True:
                yield list(itertools.islice(texts, size))

        def tokenize(texts: Any) -> Any:
            found = tf.io.decode_raw(texts, tf.uint8, fixed_length=TOKENS)
            return {"tokens": tf.cast(found, tf.int32)}

        data = tf.data.Dataset.from_generator(
            groups, output_signature=tf.TensorSpec((size,), tf.string)
        ).map(tokenize, num_parallel_calls=calls)
    if workers:
        data = data.prefetch(2 * workers)
    return iter(data.as_numpy_iterator())


def by_processes(kind: str, folder: str, size: int, workers: int) -> Iterator[Any]:
    return by_spmdtrain(kind, folder, size, 0, processes=workers)


WAYS: dict[str, Callable[[str, str, int, int], Iterator[Any]]] = {
    "spmdtrain": by_spmdtrain,
    "processes": by_processes,
    "grain": by_grain,
    "torch": by_torch,
    "tensorflow": by_tensorflow,
}


def main() -> None:
    """Reads batches whenever it is this peer's turn."""
    from gate import Gate
    from work import Work

    gate, work = Gate(), Work.from_arguments()
    given = dict(argument.removeprefix("--").split("=") for argument in sys.argv[1:])
    gate.mark("imported")
    stream = WAYS[given["way"]](work.workload, work.data, work.batch_size, int(given["workers"]))
    while gate.wait():
        # Some libraries create batches during the turns of other peers: use these up.
        for _ in range(max(1, work.segment // 4)):
            next(stream)
            gate.mark("first step")
        gate.begin()
        for _ in range(work.segment):
            next(stream)
    os._exit(0)


if __name__ == "__main__":
    main()

"""Shuffled batches of rows in memory, without training: `--way numpy`, and others."""

from gate import Gate
from work import Work

gate, work = Gate(), Work.from_arguments()

import itertools
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

images, labels = work.arrays()
SIZE = work.batch_size


def by_numpy() -> Iterator[Any]:
    """Batches from a hand-written loop."""
    draws = np.random.default_rng(0)
    while True:
        order = draws.permutation(len(images))
        for start in range(0, len(order) - SIZE + 1, SIZE):
            rows = order[start : start + SIZE]
            yield images[rows], labels[rows]


def by_spmdtrain() -> Iterator[Any]:
    from spmdtrain.data.datasets import ArrayDataset
    from spmdtrain.data.sampling import TrainBatches, all_rows

    batches = TrainBatches(ArrayDataset((images, labels)), SIZE, 0, True, 10**9, all_rows(SIZE))
    return (batches[step] for step in itertools.count())


def by_grain() -> Iterator[Any]:
    """Grain's DataLoader, one example at a time, as in its documentation."""
    import grain.python as grain

    class Source:
        def __len__(self) -> int:
            return len(images)

        def __getitem__(self, index: int) -> Any:
            return images[index], labels[index]

    shard = grain.NoSharding()
    sampler = grain.IndexSampler(len(images), shard, shuffle=True, num_epochs=None, seed=0)
    return iter(
        grain.DataLoader(
            data_source=Source(), sampler=sampler, operations=[grain.Batch(SIZE)], worker_count=0
        )
    )


def by_torch() -> Iterator[Any]:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    data = TensorDataset(torch.from_numpy(images), torch.from_numpy(labels))
    loader = DataLoader(data, batch_size=SIZE, shuffle=True, drop_last=True)
    return itertools.chain.from_iterable(itertools.repeat(loader))


def by_tensorflow() -> Iterator[Any]:
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices((images, labels)).cache().shuffle(len(images))
    data = data.repeat().batch(SIZE, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
    return iter(data.as_numpy_iterator())


WAYS = {
    "numpy": by_numpy,
    "spmdtrain": by_spmdtrain,
    "grain": by_grain,
    "torch": by_torch,
    "tensorflow": by_tensorflow,
}
stream = WAYS[sys.argv[-1].removeprefix("--way=")]()
gate.mark("imported")
while gate.wait():
    # Some libraries create batches during the turns of other peers: use these up.
    for _ in range(work.segment // 4):
        next(stream)
        gate.mark("first step")
    gate.begin()
    for _ in range(work.segment):
        next(stream)
os._exit(0)

"""Batches of JPEG files, decoded and resized to 224 x 224: `--way one`, and others."""

from gate import Gate
from work import Work

gate, work = Gate(), Work.from_arguments()

import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EDGE = 224


def by_spmdtrain(threads: int | None = None) -> Iterator[Any]:
    from spmdtrain.data.images import ImageFolder
    from spmdtrain.data.sampling import TrainBatches, all_rows

    folder = ImageFolder(work.data, EDGE, threads=threads)
    batches = TrainBatches(folder, work.batch_size, 0, True, 10**9, all_rows(work.batch_size))
    return (batches[step] for step in itertools.count())


def by_tensorflow() -> Iterator[Any]:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(int(os.environ["OMP_NUM_THREADS"]))
    files = sorted(str(path) for path in Path(work.data).rglob("*.jpg"))
    classes = sorted({Path(file).parent.name for file in files})
    labels = [classes.index(Path(file).parent.name) for file in files]

    def read(file: Any, label: Any) -> Any:
        image = tf.io.decode_jpeg(tf.io.read_file(file), channels=3)
        image = tf.image.resize(image, (EDGE, EDGE), antialias=True)
        return tf.cast(image, tf.uint8), label

    data = tf.data.Dataset.from_tensor_slices((files, labels)).shuffle(len(files)).repeat()
    data = data.map(read, num_parallel_calls=tf.data.AUTOTUNE)
    # Two batches: AUTOTUNE would buffer a whole segment, created during the turns of other peers.
    return iter(data.batch(work.batch_size).prefetch(2).as_numpy_iterator())


WAYS = {"one": lambda: by_spmdtrain(1), "all": by_spmdtrain, "tensorflow": by_tensorflow}
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

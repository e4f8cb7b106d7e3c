"""Speed of decoding images with all cores or from a cache, relative to one thread.

    python benchmarks/images.py [FOLDER [SIZE]]

FOLDER contains one folder per class; without it, 200 generated images of 500 x 375 are read. Where
simplejpeg and OpenCV are installed, the faster decoder and the filter without antialiasing are
measured, too, and where TensorFlow is, tf.data with both filters, in turns with the others.
Compare the ratios to one thread. Measure all cores on an idle machine: the ratio is close to their
number as long as that is small, because of about 2.3 ms per photograph 0.3 ms are spent in Python,
which only one thread can execute at a time.
"""

import functools
import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from spmdtrain.data.image_decoding import Decoder
from spmdtrain.data.images import ImageFolder

REPEATS = 5
COUNT = 200


def make(folder: Path) -> Path:
    """Creates smooth images with some noise, which compress like photographs."""
    from PIL import Image

    draws = np.random.default_rng(0)
    (folder / "class").mkdir()
    for number in range(COUNT):
        coarse = Image.fromarray(draws.integers(0, 256, (30, 40, 3)).astype(np.uint8))
        smooth = np.asarray(coarse.resize((500, 375)), np.int16)
        noisy = (smooth + draws.integers(-8, 9, smooth.shape)).clip(0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(folder / "class" / f"{number}.jpg", quality=90)
    return folder


def seconds(dataset: ImageFolder) -> float:
    """Returns the seconds to read a dataset once, in batches of 32."""
    start_time = time.perf_counter()
    for start in range(0, len(dataset), 32):
        dataset.rows(np.arange(start, min(start + 32, len(dataset))))
    return time.perf_counter() - start_time


def by_tensorflow(folder: str | Path, size: int, antialias: bool) -> Callable[[], float]:
    """Returns a function that reads all files by tf.data, and returns the seconds."""
    import tensorflow as tf

    def read(file: Any) -> Any:
        image = tf.io.decode_jpeg(tf.io.read_file(file), channels=3)
        return tf.cast(tf.image.resize(image, (size, size), antialias=antialias), tf.uint8)

    files = sorted(str(path) for path in Path(folder).rglob("*.jpg"))
    data = tf.data.Dataset.from_tensor_slices(files).map(read, num_parallel_calls=tf.data.AUTOTUNE)
    data = data.batch(32).prefetch(2)

    def once() -> float:
        start = time.perf_counter()
        for _ in data.as_numpy_iterator():
            pass
        return time.perf_counter() - start

    return once


def compare(folder: str | Path, size: int) -> None:
    """Prints the speed of each decoder and filter that is installed, relative to tf.data."""
    has = {name: importlib.util.find_spec(name) for name in ("simplejpeg", "cv2", "tensorflow")}
    decoders: list[Decoder] = ["pillow"]
    decoders += ["simplejpeg"] if has["simplejpeg"] else []
    for antialias in [True] + [False] * bool(has["cv2"]):
        ways: dict[str, Callable[[], float]] = {
            name: functools.partial(
                seconds, ImageFolder(folder, size, antialias=antialias, decoder=name)
            )
            for name in decoders
        }
        if has["tensorflow"]:
            ways["tf.data"] = by_tensorflow(folder, size, antialias)
        count = len(ImageFolder(folder, size))
        for way in ways.values():  # fills caches, and traces
            way()
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(REPEATS):
            for name, way in ways.items():
                times[name].append(way())
        reference = statistics.median(times[list(ways)[-1]])
        print(f"antialias={antialias}, relative to {list(ways)[-1]}")
        for name, taken in times.items():
            median = statistics.median(taken)
            print(f"{name}: {count / median:,.0f} images/s, {reference / median:.2f} x")


def measure(folder: str | Path, size: int) -> None:
    with tempfile.TemporaryDirectory() as cache:
        one = ImageFolder(folder, size, threads=1)
        every = ImageFolder(folder, size)
        disk = ImageFolder(folder, size, cache="disk", cache_dir=cache)
        memory = ImageFolder(folder, size, cache="memory")
        sources = {"1 thread": one, "all cores": every, "disk cache": disk, "memory cache": memory}
        for source in sources.values():  # fills the system's file cache
            seconds(source)
        times: dict[str, list[float]] = {name: [] for name in sources}
        for _ in range(REPEATS):  # in turns, so that the machine's load is the same for all
            for name, source in sources.items():
                times[name].append(seconds(source))
    slowest = statistics.median(times["1 thread"])
    print(f"{len(one)} images to {size} x {size}")
    for name, taken in times.items():
        median = statistics.median(taken)
        rate = len(one) / median
        print(f"{name}: {median * 1e3:.0f} ms, {rate:,.0f} images/s, {slowest / median:.2f} x")


if __name__ == "__main__":
    edge = int(sys.argv[2]) if len(sys.argv) > 2 else 96
    if len(sys.argv) > 1:
        measure(sys.argv[1], edge)
        compare(sys.argv[1], edge)
    else:
        with tempfile.TemporaryDirectory() as folder:
            measure(make(Path(folder)), edge)
            compare(folder, edge)

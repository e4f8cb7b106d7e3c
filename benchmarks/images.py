"""How much faster images are decoded by all cores than by one thread, and read from a cache.

    python benchmarks/images.py [FOLDER [SIZE]]

FOLDER holds the folders of the classes; without one, 200 made pictures of 500 x 375 are read.
The ratios to one thread are what to look at; that of all cores wants a machine where nothing else
runs, and is near their number as long as it is small: of about 2.3 ms that a photograph takes,
0.3 ms are Python's, which one thread alone can be in.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from spmdtrain.data.image_folder import ImageFolder

REPEATS = 5
COUNT = 200


def make(folder: Path) -> Path:
    """Pictures that are smooth with some noise, so that they compress as photographs do."""
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
    """To read all of it once, in batches of 32."""
    began = time.perf_counter()
    for start in range(0, len(dataset), 32):
        dataset.rows(np.arange(start, min(start + 32, len(dataset))))
    return time.perf_counter() - began


def measure(folder: str | Path, size: int) -> None:
    with tempfile.TemporaryDirectory() as cache:
        one = ImageFolder(folder, size, threads=1)
        every = ImageFolder(folder, size)
        disk = ImageFolder(folder, size, cache="disk", cache_dir=cache)
        memory = ImageFolder(folder, size, cache="memory")
        sources = {"1 thread": one, "all cores": every, "disk cache": disk, "memory cache": memory}
        for source in sources.values():  # the first reads files that the system then holds
            seconds(source)
        times: dict[str, list[float]] = {name: [] for name in sources}
        for _ in range(REPEATS):  # by turns, so that all meet the same machine
            for name, source in sources.items():
                times[name].append(seconds(source))
    slowest = statistics.median(times["1 thread"])
    print(f"{len(one)} images to {size} x {size}")
    for name, taken in times.items():
        median = statistics.median(taken)
        rate = len(one) / median
        print(f"{name}: {median * 1e3:.0f} ms, {rate:,.0f} images/s, {slowest / median:.2f} times")


if __name__ == "__main__":
    edge = int(sys.argv[2]) if len(sys.argv) > 2 else 96
    if len(sys.argv) > 1:
        measure(sys.argv[1], edge)
    else:
        with tempfile.TemporaryDirectory() as made:
            measure(make(Path(made)), edge)

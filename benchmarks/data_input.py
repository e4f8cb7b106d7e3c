"""Files for the benchmark of data input, and the memory that reading them takes.

    python benchmarks/data_input.py [--gigabytes 5] [--threads 0]

Writes Parquet files with text and ArrayRecord files with images to .bench/inputs, once (about 100
MB each, always the same bytes). Then reads them again and again with spmdtrain, shuffled, until the
batches sum up to that many gigabytes, and prints the resident memory of the process after every
tenth. `bench.py` compares the speed with other libraries (lines w8-...).
"""

import argparse
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "peers"))

FOLDER = HERE.parent / ".bench" / "inputs"
MEGABYTES = 100
"""Size of the images, and of the text."""
FILES = 8
GROUP = 2048
"""Documents of a row group."""
VOCABULARY = 4096
EDGE = 64
"""Height and width of an image in pixels."""


def make(folder: Path) -> None:
    """Writes the files of both kinds; shows the progress on standard error.

    Args:
        folder: Receives `text-0.parquet` and so on, and `images-0.array_record`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draws = np.random.default_rng(0)
    words = np.array(
        [
            "".join(map(chr, draws.integers(97, 123, draws.integers(2, 12))))
            for _ in range(VOCABULARY)
        ]
    )
    for number in range(FILES):
        print(f"writing file {number + 1} of {FILES}", file=sys.stderr)
        _write_text(folder / f"text-{number}.parquet", words, draws)
        _write_images(folder / f"images-{number}.array_record", draws)


def _write_text(path: Path, words: np.ndarray, draws: np.random.Generator) -> None:
    """Writes documents of about 1 kB; their lengths have a log-normal distribution."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    left = MEGABYTES * 10**6 // FILES
    schema = pa.schema([("text", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        while left > 0:
            sizes = np.maximum(1, draws.lognormal(4.7, 0.7, GROUP).astype(int))
            chosen = np.split(
                words[draws.integers(0, VOCABULARY, sizes.sum())], sizes.cumsum()[:-1]
            )
            texts = [" ".join(each) for each in chosen]
            writer.write_table(pa.table({"text": texts}, schema))
            left -= sum(map(len, texts))


def _write_images(path: Path, draws: np.random.Generator) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path), "group_size:1,uncompressed")
    for _ in range(MEGABYTES * 10**6 // FILES // (3 * EDGE**2)):
        writer.write(draws.bytes(3 * EDGE**2))
    writer.close()


def batches(kind: str, threads: int) -> Iterator[Any]:
    """Returns endless batches of spmdtrain.

    Args:
        kind: text, packed or images.
        threads: Number of threads that read ahead.
    """
    import inputs

    return inputs.by_spmdtrain(kind, str(FOLDER), 64, threads)


def resident() -> float:
    """Returns the resident memory of this process in MB, without pages of mapped files."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) / 1024


def measure_memory(kind: str, gigabytes: float, threads: int) -> None:
    """Prints the resident memory while batches are read.

    Args:
        kind: text, packed or images.
        gigabytes: Size of all batches.
        threads: Number of threads that read ahead.
    """
    stream, read, printed = batches(kind, threads), 0.0, 0
    memory: list[float] = []
    while read < gigabytes * 1e9:
        read += sum(array.nbytes for array in itertools.chain(next(stream).values()))
        if read >= (printed + 1) * gigabytes * 1e8:
            printed += 1
            memory.append(resident())
            print(f"{kind}: {read / 1e9:.1f} GB read, {memory[-1]:.0f} MB resident", flush=True)
    growth = memory[-1] / memory[1] - 1
    print(f"{kind}: {growth:+.1%} from a fifth of the batches to the last one")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=5)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", default=["text", "packed", "images"])
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if not FOLDER.exists():
        make(FOLDER)
    for each in options.kinds:
        measure_memory(each, options.gigabytes, options.threads)

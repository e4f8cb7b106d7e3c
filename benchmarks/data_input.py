"""Files for the benchmark of data input, and the memory that reading them takes.

    python benchmarks/data_input.py [--gigabytes 5] [--threads 0] [--workers 0]

Writes that many gigabytes of text as Parquet files, and of images as ArrayRecord files, to a
temporary folder. Then reads each once with spmdtrain, shuffled, and prints the resident memory of
the process after every tenth. Exits with 1 if it grows by more than 5 % from a fifth of the data to
the end. The figures are written to benchmarks/results/w8-memory.json.

`bench.py` compares the speed with other libraries (lines w8-...), on 100 MB of each kind.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "peers"))

FOLDER = HERE.parent / ".bench" / "inputs"
MEGABYTES = 100
"""Size of the images, and of the text, for `bench.py`."""
FILES = 8
RESULT = "w8-memory"
ALLOWED = 0.05
"""Growth of the memory."""
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


def make_large(folder: Path, gigabytes: float) -> None:
    """Writes the files of both kinds, copied until they have a size.

    Args:
        folder: As for `make`.
        gigabytes: Size of each kind.
    """
    make(folder)
    for path in sorted(folder.iterdir()):
        for copy in range(1, round(gigabytes * 1000 / MEGABYTES)):
            kind, _, number = path.stem.partition("-")
            shutil.copy(path, folder / f"{kind}-{number}-{copy}{path.suffix}")


def resident() -> float:
    """Returns the resident memory of this process in MB, pages of mapped files included."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) / 1024


def measure_memory(kind: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Prints the resident memory while batches are read; returns the figures.

    Args:
        kind: text, packed or images.
        folder: The files.
        options: The size, and the readers.
    """
    import inputs

    size = sum(path.stat().st_size for path in map(Path, inputs.paths(str(folder), kind)))
    stream = inputs.by_spmdtrain(
        kind, str(folder), 64, options.threads, processes=options.workers, epochs=1
    )
    batches = -(-len(inputs.dataset_of(kind, str(folder))) // 64)
    memory: list[float] = []
    for number, _ in enumerate(stream, 1):
        if number >= (len(memory) + 1) * batches // 10:
            memory.append(resident())
            done = size * number / batches / 1e9
            print(f"{kind}: {done:.1f} GB read, {memory[-1]:.0f} MB resident", flush=True)
    growth = memory[-1] / memory[1] - 1
    print(f"{kind}: {growth:+.1%} from a fifth of the files to their end")
    return {"kind": kind, "gigabytes": size / 1e9, "resident_mb": memory, "growth": growth}


def main() -> int:
    """Measures the memory; returns the exit code."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import bench  # which imports this module

    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=5)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", default=["text", "packed", "images"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_large(Path(folder), options.gigabytes)
        found = [measure_memory(kind, Path(folder), options) for kind in options.kinds]
    result = {"origin": bench.origin(), "kinds": found}
    result |= {"threads": options.threads, "workers": options.workers}
    (HERE / "results" / f"{RESULT}.json").write_text(json.dumps(result, indent=1) + "\n")
    return int(any(each["growth"] > ALLOWED for each in found))


if __name__ == "__main__":
    sys.exit(main())

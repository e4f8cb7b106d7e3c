"""The table of docs/data.md: each of its lines is run on real files and objects."""

import gzip
import io
import json
import os
import re
import tarfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import grain
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from helpers import REPOSITORY
from PIL import Image
from stream_helpers import tf_record

import spmdtrain
from spmdtrain.data.datasets import as_dataset
from spmdtrain.data.images import ImageFolder
from spmdtrain.data.sources.tf_record import example_class

os.environ.setdefault("KERAS_BACKEND", "jax")  # read when Keras is first imported
keras = pytest.importorskip("keras", reason="Keras is an extra")

PAGE = (REPOSITORY / "docs" / "data.md").read_text()
TABLE = PAGE.partition("| you have | write | extra |\n")[2].partition("\n\n")[0].splitlines()[1:]
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in TABLE]
CELLS = [(code, row[0]) for row in ROWS for code in re.findall(r"`([^`]+)`", row[1])]

X = np.arange(12, dtype=np.float32).reshape(6, 2)
Y = np.arange(6)
RECORDS = [{"x": X[i].tolist(), "y": i} for i in range(6)]
TEXTS = [f"Example {i} of the tests." for i in range(6)]


class Batches(keras.utils.PyDataset):  # type: ignore[misc, name-defined]
    """Batches of 4 and 2 examples."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return X[index * 4 : index * 4 + 4], Y[index * 4 : index * 4 + 4]


def decode(record: bytes) -> Any:
    """Returns an example from a record."""
    return json.loads(record)


def write_records(path: Path, records: list[bytes]) -> None:
    path.parent.mkdir(exist_ok=True)
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


def example(index: int) -> bytes:
    """A `tf.train.Example` of one of the records."""
    message = example_class()()
    for name, values in (("x", X[index]), ("y", Y[index : index + 1])):
        entry = message.context.feature.add(key=name)
        kind = entry.value.float_list if name == "x" else entry.value.int64_list
        kind.value.extend(values.tolist())
    found: bytes = message.SerializeToString()
    return found


def write_table(path: Path, columns: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    pyarrow.parquet.write_table(pa.table(columns), path)


def write_sample(tar: tarfile.TarFile, index: int) -> None:
    """Writes one of the records as a sample, with an image."""
    contents = {name: io.BytesIO() for name in ("x.npy", "cls", "png", "label.cls")}
    np.save(contents["x.npy"], X[index])
    contents["cls"].write(f"{Y[index]}".encode())
    Image.new("RGB", (8, 8), (index, 0, 0)).save(contents["png"], "PNG")
    contents["label.cls"].write(f"{index % 2}".encode())
    for name, content in contents.items():
        member = tarfile.TarInfo(f"{index}.{name}")
        member.size = content.tell()
        content.seek(0)
        tar.addfile(member, content)


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The names that the cells use, in a folder with the files that they name."""
    folder = tmp_path_factory.mktemp("data")
    frame = pd.DataFrame({"x0": X[:, 0], "y": Y})
    table = pa.table({"x": X.tolist(), "y": Y})
    np.savez(folder / "numbers.npz", x=X, y=Y)
    np.save(folder / "x.npy", X)
    frame.to_csv(folder / "numbers.csv", index=False)
    write_table(folder / "parquet" / "0.parquet", {"x": X.tolist(), "y": Y})
    write_table(folder / "text" / "0.parquet", {"text": TEXTS})
    write_table(folder / "tokens" / "0.parquet", {"tokens": [[1, 2, 3], [4], [5, 6], [7]]})
    write_records(folder / "records" / "0.array_record", [json.dumps(x).encode() for x in RECORDS])
    write_records(folder / "text" / "0.array_record", [text.encode() for text in TEXTS])
    for number in range(2):  # of three records each
        examples = b"".join(tf_record(example(i)) for i in range(3 * number, 3 * number + 3))
        name, content = [("0.tfrecord", examples), ("1.tfrecord.gz", gzip.compress(examples))][
            number
        ]
        (folder / "records" / name).write_bytes(content)
    for number in range(2):  # of three samples each
        (folder / "numpy" / f"{number}").mkdir(parents=True)
        (folder / "shards").mkdir(exist_ok=True)
        np.save(folder / "numpy" / f"{number}" / "x.npy", X[3 * number :][:3])
        np.save(folder / "numpy" / f"{number}" / "y.npy", Y[3 * number :][:3])
        with tarfile.open(folder / "shards" / f"{number:03}.tar", "w") as tar:
            for i in range(3 * number, 3 * number + 3):
                write_sample(tar, i)
    np.tile(np.array([5, 6, 7, 0], np.uint16), 64).tofile(folder / "tokens" / "0.bin")
    lines = [json.dumps(record) for record in RECORDS]
    (folder / "lines").mkdir()
    (folder / "lines" / "0.jsonl").write_text("\n".join(lines[:3]))
    (folder / "lines" / "1.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[3:]).encode()))
    (folder / "text" / "0.jsonl").write_text("\n".join(json.dumps({"text": x}) for x in TEXTS))
    (folder / "text" / "0.txt").write_text("\n\n".join(TEXTS))
    memory = datasets.table.InMemoryTable(table)
    datasets.Dataset(memory, fingerprint="of-test").save_to_disk(str(folder / "saved"))
    with gzip.open(folder / "x-idx2-ubyte.gz", "wb") as file:
        file.write(bytes([0, 0, 8, 2, 0, 0, 0, 6, 0, 0, 0, 2]) + X.astype(np.uint8).tobytes())
    for number in range(6):
        (folder / "images" / f"class-{number % 2}").mkdir(parents=True, exist_ok=True)
        image = Image.new("RGB", (8, 8), (number, 0, 0))
        image.save(folder / "images" / f"class-{number % 2}" / f"{number}.png")
    found = {name: getattr(spmdtrain, name) for name in spmdtrain.__all__}
    found |= {"np": np, "pandas": pd, "grain": grain, "datasets": datasets}
    found |= {"ImageFolder": ImageFolder, "decode": decode}
    found |= {"x": X, "y": Y, "records": RECORDS, "frame": frame, "table": table}
    found |= {"source": [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)]}
    found |= {"function": lambda example: example | {"z": example["y"]}}
    found |= {"batches": Batches()}
    found |= {"records_as_pairs": [(x, y) for x, y in zip(X, Y, strict=True)]}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield found


@pytest.mark.parametrize(("code", "have"), CELLS, ids=[code for code, _ in CELLS])
def test_each_cell_of_the_table_is_a_dataset(code: str, have: str, names: dict[str, Any]) -> None:
    dataset = as_dataset(eval(code, names))
    rows = dataset.rows(np.array([3, 0]) if len(dataset) > 3 else np.array([0, 0]))
    if isinstance(rows, tuple):
        rows = {"x": rows[0], "y": rows[1]}
    elif isinstance(rows, np.ndarray):
        rows = {"x": rows}
    if "tokens" in rows:
        assert rows["tokens"].dtype == np.int32 and rows["tokens"].shape[0] == 2
        assert rows["weights"].sum() > 0
    elif "image" in rows:
        assert rows["image"].shape == (2, 8, 8, 3)
        assert sorted(rows["label"].tolist()) == [0, 1]
    elif "Mixture" in code:
        assert (rows["x"][:, 0] == 2 * rows["y"]).all()
    else:
        if "y" in rows:
            assert rows["y"].tolist() == [3, 0]
        first = rows["x"][:, 0] if "x" in rows else rows["x0"]
        assert first.tolist() == [6, 0]


def test_the_extras_of_the_table_exist() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    named = {extra for row in ROWS for extra in re.findall(r"`(\w+)`", row[2])}
    assert len(ROWS) > 15
    assert {"parquet", "arrayrecord", "huggingface", "images"} <= named
    assert named <= project["optional-dependencies"].keys()

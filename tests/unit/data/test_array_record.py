"""Records of ArrayRecord files: reading by index, and corrupted, truncated and lost files."""

import os
import pickle
from collections.abc import Sequence
from pathlib import Path

import grain
import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from spmdtrain import ArrayRecordSource
from spmdtrain.data.datasets import as_dataset
from spmdtrain.errors import StorageError, UserError

NOISE = np.random.default_rng(0)


def write(path: Path, records: Sequence[bytes]) -> Path:
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    return path


def numbers(first: int, count: int) -> list[bytes]:
    return [np.arange(i, i + 3, dtype=np.int32).tobytes() for i in range(first, first + count)]


def decode(record: bytes) -> dict[str, np.ndarray]:
    return {"x": np.frombuffer(record, np.int32)}


def firsts(data: object, *indices: int) -> list[int]:
    return as_dataset(data).rows(np.array(indices))["x"][:, 0].tolist()


@pytest.fixture
def noise(tmp_path: Path) -> Path:
    """A file of 200 records that do not compress, of 2,000 bytes each."""
    return write(tmp_path / "noise.array_record", [NOISE.bytes(2000) for _ in range(200)])


def test_records_of_several_files_are_read_by_index(tmp_path: Path) -> None:
    for shard, first in enumerate((0, 5, 5, 12)):
        count = (5, 0, 7, 3)[shard]
        write(tmp_path / f"data-{shard}.array_record", numbers(first, count))
    source = ArrayRecordSource(tmp_path / "data-*", decode)
    assert len(source) == 15
    order = [14, 0, 4, 5, 11, 12, 5]
    assert firsts(source, *order) == order
    assert [source[i]["x"][0] for i in order] == order
    assert firsts(pickle.loads(pickle.dumps(source)), 7) == [7]
    doubled = grain.MapDataset.source(source).map(lambda example: {"x": 2 * example["x"]})
    assert firsts(doubled, 14, 3) == [28, 6]
    # Grain's own source, with its own decoding.
    own = grain.sources.ArrayRecordDataSource([file.path for file in source.files])
    assert firsts(grain.MapDataset.source(own).map(decode), *order) == order
    with pytest.raises(IndexError):
        source[15]


def test_a_record_that_is_corrupted_or_does_not_decode_is_named_with_its_file(
    noise: Path, tmp_path: Path
) -> None:
    content = bytearray(noise.read_bytes())
    content[70_000] ^= 0xFF
    noise.write_bytes(content)
    source = ArrayRecordSource(noise)
    with pytest.raises(UserError, match=r"noise.array_record: record 33: cannot be read: .*hash m"):
        source.__getitems__([1, 33, 2])
    assert len(source[34]) == 2000
    path = write(tmp_path / "a.array_record", [*numbers(0, 5), b"seven", *numbers(6, 2)])
    first = write(tmp_path / "0.array_record", numbers(0, 4))
    line = decode.__code__.co_firstlineno + 1
    with pytest.raises(UserError) as caught:
        ArrayRecordSource([first, path], decode).__getitems__([8, 9])
    assert str(caught.value) == (
        f"{path}: record 5 (5 bytes) cannot be decoded: ValueError: buffer size must be a multiple "
        f"of element size ({__file__}:{line}, in decode)"
    )


@pytest.mark.parametrize("size", [0, 100, 65_536, 240_000])
def test_a_truncated_file_is_refused_at_the_start(noise: Path, size: int) -> None:
    os.truncate(noise, size)
    with pytest.raises(UserError, match=r"noise.array_record: cannot be read: .* is truncated, co"):
        ArrayRecordSource([noise])


@pytest.mark.parametrize("first", [[], [0]])
def test_a_file_that_is_truncated_or_removed_later_is_named(noise: Path, first: list[int]) -> None:
    before = noise.read_bytes()
    source = ArrayRecordSource(noise)
    source.__getitems__(first)
    os.truncate(noise, 200_000)
    with pytest.raises(UserError, match=r"changed .*\(524,288 bytes at the start, 200,000 now\)"):
        source[199]  # Grain's own returns b""
    noise.write_bytes(before)
    source = ArrayRecordSource(noise)
    noise.unlink()
    with pytest.raises(StorageError, match=r"noise.array_record: the file has been removed"):
        source[199]


def test_wrong_arguments_are_refused(tmp_path: Path, noise: Path) -> None:
    with pytest.raises(UserError, match="no file matches this pattern"):
        ArrayRecordSource(tmp_path / "*.riegeli")
    with pytest.raises(UserError, match=r"gs://bucket/a: .* read from local folders"):
        ArrayRecordSource(["gs://bucket/a"])
    with pytest.raises(UserError, match="decode is 'json': it must be a function"):
        ArrayRecordSource(noise, "json")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="hold no records"):
        ArrayRecordSource(write(tmp_path / "none.array_record", []))
    with pytest.raises(UserError, match=r"is bytes: .* Decode it"):
        as_dataset(ArrayRecordSource(noise)).rows(np.arange(2))

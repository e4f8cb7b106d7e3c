import gzip
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from etils import epath

from spmdtrain.errors import UserError
from spmdtrain.idx import find_idx, read_idx

CODES = {
    "uint8": 0x08,
    "int8": 0x09,
    "int16": 0x0B,
    "int32": 0x0C,
    "float32": 0x0D,
    "float64": 0x0E,
}


def header(code: int, sizes: Sequence[int]) -> bytes:
    return bytes([0, 0, code, len(sizes)]) + struct.pack(f">{len(sizes)}I", *sizes)


def idx_bytes(array: np.ndarray) -> bytes:
    big_endian = array.astype(array.dtype.newbyteorder(">"))
    return header(CODES[array.dtype.name], array.shape) + big_endian.tobytes()


def write(folder: Path, content: bytes, name: str = "some-idx") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        read_idx(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


# --- What is in a file ---


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 2, 2)])
def test_an_array_comes_back_as_it_was_written(
    tmp_path: Path, name: str, shape: tuple[int, ...], compressed: bool
) -> None:
    dtype = np.dtype(name)
    random = np.random.default_rng(0)
    if dtype.kind == "f":
        array = np.asarray(random.standard_normal(shape) * 1e3, dtype)
    else:
        limits = np.iinfo(dtype)
        array = np.asarray(random.integers(limits.min, limits.max, shape, dtype, True))
    content = idx_bytes(array)
    found = read_idx(write(tmp_path, gzip.compress(content) if compressed else content))
    assert (found.dtype, found.shape) == (dtype, shape)
    assert found.dtype.isnative
    assert found.tobytes() == array.tobytes()


def test_a_file_that_was_written_byte_by_byte_reads_as_the_format_says(tmp_path: Path) -> None:
    content = bytes.fromhex("00000b02 00000002 00000003 0001 0002 0003 0100 ffff 8000")
    found = read_idx(write(tmp_path, content))
    assert found.tolist() == [[1, 2, 3], [256, -1, -32768]]


@pytest.mark.parametrize("sizes", [(0,), (0, 28, 28), (3, 0)])
def test_a_dim_of_size_zero_gives_an_empty_array_of_that_shape(
    tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    assert read_idx(write(tmp_path, header(0x08, sizes))).shape == sizes


def test_what_is_read_can_be_written_to(tmp_path: Path) -> None:
    found = read_idx(write(tmp_path, idx_bytes(np.arange(3, dtype=np.uint8))))
    found += 1
    assert found.tolist() == [1, 2, 3]


def test_the_path_may_be_a_string(tmp_path: Path) -> None:
    path = write(tmp_path, idx_bytes(np.arange(3, dtype=np.int32)))
    assert read_idx(str(path)).tolist() == [0, 1, 2]


# --- What is wrong with a file ---


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert refusal(tmp_path / "absent") == "no such file"


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    assert refusal(tmp_path).startswith("cannot be read: ")


@pytest.mark.parametrize(
    ("content", "begin"),
    [
        (b"", "nothing"),
        (b"\0\0\x08", "00 00 08"),
        (b"\0\0\x07\x01\0\0\0\1x", "00 00 07 01"),  # a type that does not exist
        (b"\0\1\x08\x01\0\0\0\1x", "00 01 08 01"),
        (b"\1\0\x08\x01\0\0\0\1x", "01 00 08 01"),
        (b"\x89PNG....", "89 50 4e 47"),
    ],
)
def test_a_file_that_begins_otherwise_is_refused_with_its_beginning(
    tmp_path: Path, content: bytes, begin: str
) -> None:
    assert refusal(write(tmp_path, content)) == f"no IDX file (it begins with {begin})"


@pytest.mark.parametrize("length", [4, 8, 15])
def test_a_header_cut_short_is_refused_with_the_arithmetic(tmp_path: Path, length: int) -> None:
    content = idx_bytes(np.zeros((2, 3, 4), np.uint8))[:length]
    message = refusal(write(tmp_path, content))
    assert message == f"truncated: {length} bytes, and the header alone is 16"


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(
    ("missing", "problem", "size"),
    [(1, "truncated", "6,011"), (6000, "truncated", "12"), (-1, "too long", "6,013")],
)
def test_a_file_of_another_length_than_announced_is_refused_with_the_arithmetic(
    tmp_path: Path, missing: int, problem: str, size: str, compressed: bool
) -> None:
    content = idx_bytes(np.zeros((1500, 2), np.int16))
    content = content[:-missing] if missing > 0 else content + b"\0" * -missing
    message = refusal(write(tmp_path, gzip.compress(content) if compressed else content))
    assert message == f"{problem}: shape (1500, 2) needs 6,012 bytes, the file has {size}"


def test_a_header_of_huge_sizes_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, header(0x0E, [2**32 - 1] * 3) + b"\0" * 100))
    assert message.startswith("truncated: shape (4294967295, 4294967295, 4294967295) needs ")
    assert message.endswith("the file has 116")


@pytest.mark.parametrize("sizes", [[1] * 65, [0, *[2**32 - 1] * 3]])
def test_a_shape_that_no_array_can_have_is_refused(tmp_path: Path, sizes: list[int]) -> None:
    # Its length is as announced, so that only the shape can be what is wrong.
    content = header(0x08, sizes) + b"\1" * (0 if 0 in sizes else 1)
    assert "shape" in refusal(write(tmp_path, content))


def damaged(how: str) -> bytes:
    content = bytearray(gzip.compress(idx_bytes(np.arange(5000, dtype=np.int32))))
    match how:
        case "cut short":
            return bytes(content[:-20])
        case "cut in its header":
            return bytes(content[:5])
        case "changed inside":
            content[len(content) // 2 : len(content) // 2 + 40] = b"\xff" * 40
        case "changed checksum":
            content[-6] ^= 0xFF
        case "followed by something else":
            content += b"something else"
    return bytes(content)


@pytest.mark.parametrize(
    "how",
    [
        "cut short",
        "cut in its header",
        "changed inside",
        "changed checksum",
        "followed by something else",
    ],
)
def test_a_damaged_gzip_file_is_refused(tmp_path: Path, how: str) -> None:
    assert refusal(write(tmp_path, damaged(how), "some-idx.gz")).startswith("cannot be read: ")


# --- Finding a file ---


def test_a_file_is_found_plain_or_gzipped_and_the_plain_one_first(tmp_path: Path) -> None:
    folder = epath.Path(tmp_path)
    assert find_idx(folder, "labels") is None
    write(tmp_path, gzip.compress(idx_bytes(np.arange(2, dtype=np.uint8))), "labels.gz")
    found = find_idx(folder, "labels")
    assert found is not None
    assert found.name == "labels.gz"
    assert read_idx(found).tolist() == [0, 1]
    write(tmp_path, idx_bytes(np.arange(3, dtype=np.uint8)), "labels")
    found = find_idx(folder, "labels")
    assert found is not None
    assert found.name == "labels"


def test_a_file_is_found_in_a_folder_of_any_kind(tmp_path: Path) -> None:
    (tmp_path / "labels.gz").write_bytes(b"")
    assert str(find_idx(str(tmp_path), "labels")) == str(tmp_path / "labels.gz")
    assert find_idx(tmp_path, "images") is None
    with pytest.raises(UserError, match="lacks the file's name"):
        find_idx(str(tmp_path / "labels"))

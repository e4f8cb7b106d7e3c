import gzip
import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from etils import epath
from helpers import BOUND, REPOSITORY

from spmdtrain.config.experiment import load_experiment
from spmdtrain.data.images import find_idx, read_idx
from spmdtrain.errors import UserError

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
    assert message == f"truncated: {length} bytes, but the header alone has 16"


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(
    ("missing", "problem", "size"),
    [(1, "truncated", "6,011"), (6000, "truncated", "12"), (-1, "too long", "6,013 or more")],
)
def test_a_file_of_another_length_than_announced_is_refused_with_the_arithmetic(
    tmp_path: Path, missing: int, problem: str, size: str, compressed: bool
) -> None:
    content = idx_bytes(np.zeros((1500, 2), np.int16))
    content = content[:-missing] if missing > 0 else content + b"\0" * -missing
    message = refusal(write(tmp_path, gzip.compress(content) if compressed else content))
    size = size if compressed else size.removesuffix(" or more")
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


def corrupted(how: str) -> bytes:
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
def test_a_corrupted_gzip_file_is_refused(tmp_path: Path, how: str) -> None:
    assert refusal(write(tmp_path, corrupted(how), "some-idx.gz")).startswith("cannot be read: ")


# --- Files that grow ---


def zeros_behind(begin: bytes, blocks: int) -> bytes:
    """Returns `begin` and that many blocks of 16 MiB of zeros, compressed to a thousandth."""
    parts = []
    for content in (begin, bytes(2**24)):
        packer = zlib.compressobj(wbits=-15)
        parts.append(packer.compress(content) + packer.flush(zlib.Z_FULL_FLUSH))
    check = zlib.crc32(begin)
    for _ in range(blocks if blocks < 100 else 0):  # of more it is not read that far
        check = zlib.crc32(bytes(2**24), check)
    end = b"\x03\0" + struct.pack("<2I", check, (len(begin) + blocks * 2**24) % 2**32)
    return b"\x1f\x8b\x08" + bytes(7) + parts[0] + parts[1] * blocks + end


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("declared", "blocks", "says"),
    [
        (1000, 192, "too long: shape (1000,) needs 1,008 bytes, the file has 1,009 or more"),
        (2**29, 31, "truncated: shape (536870912,) needs 536,870,920 bytes, the file has 520,093,"),
        (2**32 - 1, 16, "truncated: shape (4294967295,) needs 4,294,967,303 bytes, the file has "),
    ],
)
def test_a_file_that_grows_a_thousandfold_is_refused_in_little_memory(
    tmp_path: Path, declared: int, blocks: int, says: str
) -> None:
    path = write(tmp_path, zeros_behind(header(0x08, [declared]), blocks), "bomb.gz")
    assert path.stat().st_size < 4 * 2**20
    code = """
import sys
from pathlib import Path
from spmdtrain.data.images import read_idx
try:
    read_idx(sys.argv[1])
except ValueError as error:
    print(error)
print(next(x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x))
"""
    said, peak = subprocess.run(
        [sys.executable, "-c", code, path],
        capture_output=True,
        text=True,
        check=True,
        timeout=BOUND,
    ).stdout.splitlines()
    assert said.startswith(f"{path}: {says}")
    assert int(peak.split()[1]) < 200_000, peak  # kB, of which Python with NumPy takes half


@pytest.mark.slow
def test_a_file_that_shrinks_much_and_is_whole_is_read(tmp_path: Path) -> None:
    content = idx_bytes(np.zeros((70, 2**20), np.uint8))
    found = read_idx(write(tmp_path, gzip.compress(content, compresslevel=1)))
    assert found.shape == (70, 2**20) and not found.any()


def test_an_array_that_does_not_fit_into_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    path = write(tmp_path, idx_bytes(np.zeros((2, 3), np.int32)))
    monkeypatch.setattr(np, "empty", full)
    assert refusal(path) == "not enough memory for 24 bytes, shape (2, 3)"


@pytest.mark.timeout(20)
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert refusal(tmp_path / "pipe") == "cannot be read: it is not a regular file"


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
    with pytest.raises(UserError, match="file's name"):
        find_idx(str(tmp_path / "labels"))


@pytest.mark.parametrize(
    "labels",
    [
        np.array([0.7, 1.2], np.float32),
        np.array([-3, 1], np.int8),
        np.array([[1], [2]], np.uint8),
        np.array([1, 200], np.uint8),
    ],
    ids=["floats", "negative", "two dims", "too large"],
)
def test_labels_that_are_no_digits_are_refused(labels: np.ndarray, tmp_path: Path) -> None:
    write(tmp_path, idx_bytes(np.zeros((2, 28, 28), np.uint8)), "t10k-images-idx3-ubyte")
    write(tmp_path, idx_bytes(labels), "t10k-labels-idx1-ubyte")
    file = load_experiment(str(REPOSITORY / "experiments/mnist_mlp.py"), frozenset())
    with pytest.raises(UserError, match="t10k-labels-idx1-ubyte"):
        file.module.load_part(epath.Path(tmp_path), "t10k")

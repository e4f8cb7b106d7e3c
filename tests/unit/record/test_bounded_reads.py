"""Reads of files with a limit."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from etils import epath

from spmdtrain.record import no_follow
from spmdtrain.record.validation import Malformed, read_bytes

GIB = 2**30


def below_root(path: epath.Path, most: int) -> bytes:
    return no_follow.read_file(Path(path).parent, path.name, most)


@pytest.mark.parametrize("read", [read_bytes, below_root])
def test_a_read_allocates_the_size_of_the_file_and_not_the_limit(
    tmp_path: Path, read: Callable[[epath.Path, int], bytes]
) -> None:
    file = epath.Path(tmp_path / "file")
    file.write_bytes(b"0123456789")
    tracemalloc.start()
    try:
        assert read(file, 4 * GIB) == b"0123456789"
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert read(file, 10) == b"0123456789"
    with pytest.raises((Malformed, OSError), match=r"the limit is 9|larger than 9 bytes"):
        read(file, 9)


def test_a_read_from_an_offset_returns_the_rest(tmp_path: Path) -> None:
    file = epath.Path(tmp_path / "file")
    file.write_bytes(b"0123456789")
    assert [read_bytes(file, start=start) for start in (0, 7, 10, 12)] == [
        b"0123456789",
        b"789",
        b"",
        b"",
    ]

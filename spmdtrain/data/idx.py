"""IDX files, the format of MNIST: a header with the shape, then the values; gzipped or not.

Source: the format's description on the MNIST page of Y. LeCun, C. Cortes and C. Burges.
"""

import gzip
import math
import os
import stat
import zlib
from typing import IO

import numpy as np
from etils import epath

from spmdtrain.errors import UserError
from spmdtrain.record.storage import is_url

_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_PIECE = 2**20  # bytes decompressed at a time
_SAFE_SIZE = 2**26  # bytes up to which an array is allocated before its file's length is checked
_USUAL_RATIO = 20  # of compression; deflate reaches 1032 on zeros alone

_Content = IO[bytes] | gzip.GzipFile


def read_idx(path: str | epath.Path) -> np.ndarray:
    """Reads an IDX file.

    Memory is bounded: a gzip file is decompressed in pieces, up to the size in its header.

    Args:
      path: The file, plain or gzipped.

    Returns:
      The array of the shape and dtype in the header, in native byte order.

    Raises:
      UserError: If the file is missing, is not an IDX file, has a length that contradicts its
        header, or does not fit into memory.
    """
    path = epath.Path(path)
    try:
        if not is_url(path) and not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError("it is not a regular file")  # opening a pipe would block
        with path.open("rb") as file:
            return _read(file, path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error


def _read(file: IO[bytes], path: epath.Path) -> np.ndarray:
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    compressed = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    content: _Content = gzip.GzipFile(fileobj=file) if compressed else file
    magic = content.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in _DTYPES:
        raise UserError(f"{path}: no IDX file (it begins with {magic.hex(' ') or 'nothing'})")
    dtype, dims = np.dtype(_DTYPES[magic[2]]), magic[3]
    sizes = content.read(4 * dims)
    if len(sizes) < 4 * dims:
        raise UserError(
            f"{path}: truncated: {4 + len(sizes)} bytes, but the header alone has {4 + 4 * dims}"
        )
    shape = tuple(int(size) for size in np.frombuffer(sizes, ">u4"))
    expected = 4 + 4 * dims + math.prod(shape) * dtype.itemsize

    def check_length(length: int, more: str = "") -> None:
        if length != expected:
            raise UserError(
                f"{path}: {'truncated' if length < expected else 'too long'}: shape {shape} "
                f"needs {expected:,} bytes, the file has {length:,}{more}"
            )

    if not compressed:
        check_length(size)
    elif expected > max(_SAFE_SIZE, _USUAL_RATIO * size):
        # The length is checked before so much memory is filled.
        length = _skip(content, expected + 1)
        check_length(length, " or more" if length > expected else "")
        content.seek(len(magic) + len(sizes))
    try:
        array = np.empty(shape, dtype)
    except ValueError as error:
        raise UserError(
            f"{path}: NumPy cannot create an array of shape {shape}: {error}"
        ) from error
    except MemoryError as error:
        needed = expected - len(magic) - len(sizes)
        raise UserError(f"{path}: not enough memory for {needed:,} bytes, shape {shape}") from error
    data, filled = array.reshape(-1).view(np.uint8), 0
    while piece := content.read(min(_PIECE, len(data) - filled)):
        data[filled : filled + len(piece)] = np.frombuffer(piece, np.uint8)
        filled += len(piece)
    length = 4 + len(sizes) + filled
    check_length(length)
    # The last read of a gzip file also compares its checksum.
    check_length(length + len(content.read(1)), " or more")
    return array if dtype.isnative else array.byteswap(inplace=True).view(dtype.newbyteorder("="))


def _skip(content: _Content, end: int) -> int:
    """Reads up to the byte `end`; returns the position, less than `end` if the file is shorter."""
    while piece := content.read(min(_PIECE, end - content.tell())):
        del piece
    return content.tell()


def find_idx(folder: str | os.PathLike[str], name: str = "") -> epath.Path | None:
    """Returns the path of an IDX file, plain or gzipped; None if it does not exist.

    Args:
      folder: The folder, a local path or a URL.
      name: The name of the plain file; the gzipped file has the suffix `.gz` in addition.

    Raises:
      UserError: If `name` is empty.
    """
    if not name:
        raise UserError(
            f"find_idx({str(folder)!r}) lacks the file's name: call find_idx(folder, name), for "
            'example find_idx("data", "train-images-idx3-ubyte"). read_idx(path) reads a file'
        )
    inside = epath.Path(folder)
    return next((p for p in (inside / name, inside / f"{name}.gz") if p.exists()), None)

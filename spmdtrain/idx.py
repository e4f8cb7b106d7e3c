"""IDX files, the format of MNIST: a header of sizes, then the numbers; gzipped or not.

Source: the format's description on the MNIST page of Y. LeCun, C. Cortes and C. Burges.
"""

import gzip
import math
import os
import zlib

import numpy as np
from etils import epath

from spmdtrain.errors import UserError

_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: str | epath.Path) -> np.ndarray:
    """The array in an IDX file, its shape and dtype as the header says, in native byte order.

    Raises `UserError` for a file that is missing, no IDX file, or not of the announced length.
    """
    path = epath.Path(path)
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _DTYPES:
        raise UserError(f"{path}: no IDX file (it begins with {content[:4].hex(' ') or 'nothing'})")
    dtype, dims = np.dtype(_DTYPES[content[2]]), content[3]
    begin = 4 + 4 * dims
    if len(content) < begin:
        raise UserError(f"{path}: truncated: {len(content)} bytes, and the header alone is {begin}")
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", dims, 4))
    expected = begin + math.prod(shape) * dtype.itemsize
    if len(content) != expected:
        raise UserError(
            f"{path}: {'truncated' if len(content) < expected else 'too long'}: shape {shape} "
            f"needs {expected:,} bytes, the file has {len(content):,}"
        )
    try:
        array = np.frombuffer(content, dtype, offset=begin).reshape(shape)
    except ValueError as error:
        raise UserError(f"{path}: no array can have the shape {shape}: {error}") from error
    return array.astype(dtype.newbyteorder("="))


def find_idx(folder: str | os.PathLike[str], name: str = "") -> epath.Path | None:
    """Returns the file `name` or `name.gz` in `folder`; None if there is neither.

    Raises:
      UserError: If no name is given.
    """
    if not name:
        raise UserError(
            f"find_idx({str(folder)!r}) lacks the file's name: find_idx(folder, name), for example "
            'find_idx("data", "train-images-idx3-ubyte"). read_idx(path) reads a file'
        )
    inside = epath.Path(folder)
    return next((p for p in (inside / name, inside / f"{name}.gz") if p.exists()), None)

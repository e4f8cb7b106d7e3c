"""Files of arrays in NumPy's formats."""

import io
import zipfile
from collections.abc import Mapping
from typing import IO, Any

import numpy as np

from spmdtrain.errors import LARGEST_INTEGER

_NPY_START = 8  # bytes of the magic string and the version
_LONGEST_NPY_HEADER = 10_000  # bytes, which is NumPy's limit too


def write_npz(file: IO[bytes], arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays like `numpy.savez`, which cannot name an array `file` or `allow_pickle`."""
    with zipfile.ZipFile(file, "w", allowZip64=True) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, np.asarray(array))


def read_npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Reads the header of an array in NumPy's format; anyone may have written the file.

    Returns the shape, whether the array is in Fortran order, its dtype, and the position of its
    first value. Raises `ValueError` if the header is not valid.
    """
    start = file.read(_NPY_START)
    version = np.lib.format.read_magic(io.BytesIO(start))
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"version {version[0]}.{version[1]} is not known")
    width = 2 * version[0]  # bytes of the length that follows
    length = int.from_bytes(field := file.read(width), "little")
    if length > _LONGEST_NPY_HEADER:
        raise ValueError(f"a header of {length:,} bytes")
    header = io.BytesIO(field + file.read(length))
    try:
        if version == (1, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(header)
        else:
            shape, fortran, dtype = np.lib.format.read_array_header_2_0(header)
    except Exception as error:  # NumPy parses it as Python: TokenError, RecursionError, TypeError
        text = " ".join(str(error).split())[:200]
        raise ValueError(f"a header that is not valid: {type(error).__name__}: {text}") from error
    if not all(type(size) is int and 0 <= size < LARGEST_INTEGER for size in shape):
        raise ValueError(f"the shape {str(shape)[:200]}")
    return shape, fortran, dtype, _NPY_START + width + length

"""Weights in a `.npz` file."""

import contextlib
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from etils import epath

from spmdtrain.errors import UserError, foreign
from spmdtrain.record.storage import in_short
from spmdtrain.record.validation import read_npy_header
from spmdtrain.weights.region import Box, slices
from spmdtrain.weights.source import ArrayHeader

_MOST_EXPANSION = 1032  # bytes that a byte of DEFLATE becomes at most
_HEADER = 2**16


class NpzWeights:
    """The arrays of a `.npz` file. Of an uncompressed array only the needed part is read.

    `path` is as the user gave it. Raises `UserError` if the file is corrupted, or contains pickled
    objects.
    """

    def __init__(self, path: str, file: epath.Path) -> None:
        self.path = path
        self._file = file
        headers: dict[str, ArrayHeader] = {}
        self._members: dict[str, str] = {}
        with self._reported_faults(), zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                name = info.filename.removesuffix(".npy")
                if name == info.filename or name in headers:
                    raise UserError(
                        f"{path}: {foreign(info.filename, 200)} is not the name of an array, or "
                        "twice in the file"
                    )
                with archive.open(info) as member:
                    where = f"{path}: {foreign(name, 200)}"
                    headers[name], _, begin = _read_header(member, where)
                if (
                    headers[name].nbytes != info.file_size - begin
                    or info.file_size > _MOST_EXPANSION * info.compress_size + _HEADER
                ):
                    raise UserError(
                        f"{path}: {foreign(name, 200)} is {headers[name]} by its header, "
                        f"and has {info.file_size - begin:,} bytes"
                    )
                self._members[name] = info.filename
        self.headers: Mapping[str, ArrayHeader] = headers

    def read(self, name: str, box: Box) -> np.ndarray:
        with self._reported_faults(), zipfile.ZipFile(self._file) as archive:
            info = archive.getinfo(self._members[name])
            with archive.open(info) as member:
                header, fortran, begin = _read_header(member, f"{self.path}: {name}")
                whole = box[1:] == tuple((0, length) for length in header.shape[1:])
                if info.compress_type == zipfile.ZIP_STORED and whole and box and not fortran:
                    row = header.nbytes // header.shape[0] if header.shape[0] else 0
                    first, end = box[0]
                    member.seek(begin + first * row)
                    rows = np.frombuffer(member.read((end - first) * row), header.dtype)
                    return rows.reshape(end - first, *header.shape[1:])
                values = np.frombuffer(member.read(header.nbytes), header.dtype)
                shaped = values.reshape(header.shape, order="F" if fortran else "C")
                return shaped[slices(box)]

    @contextlib.contextmanager
    def _reported_faults(self) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except (zipfile.BadZipFile, OSError, ValueError, EOFError, zlib.error, KeyError) as error:
            raise UserError(f"{self.path} is not a valid .npz file: {in_short(error)}") from error
        except (NotImplementedError, RuntimeError) as error:  # another compression, encrypted
            raise UserError(f"{self.path} cannot be read: {in_short(error)}") from error


def _read_header(member: Any, where: str) -> tuple[ArrayHeader, bool, int]:
    """Returns the header of an array, whether it is in Fortran order, and where its data begin."""
    shape, fortran, dtype, start = read_npy_header(member)
    if dtype.hasobject or dtype.kind == "V":
        raise UserError(
            f"{where} has Python objects, records, or a dtype that NumPy's format lacks, such as "
            f"bfloat16 ({dtype}): save it as float32"
        )
    return ArrayHeader(shape, dtype), fortran, start

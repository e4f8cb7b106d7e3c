"""Arrays in `.npy` and `.npz` files, mapped into memory, as a dataset."""

import itertools
import os
import re
import struct
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import IO, Any

import numpy as np

from spmdtrain.data.examples import holds_numbers
from spmdtrain.data.sources.files import BlockCache, Files, SourceFile, find_files, listed
from spmdtrain.errors import UserError, did_you_mean, printable
from spmdtrain.record.storage import is_url, one_line
from spmdtrain.record.validation import read_npy_header

_NAME = re.compile(r"(.+?)(-\d+-of-\d+)?\.npy", re.IGNORECASE)
_LOCAL_HEADER = 30  # bytes of the header of a zip's member, without its name and extra field
_MAPPED = 64  # parts that are mapped at a time; each file takes a descriptor


@dataclass(frozen=True)
class _Place:
    """An array of a file: all of it, or a member of a `.npz`."""

    file: SourceFile
    member: str | None = None

    def __str__(self) -> str:
        return f"{self.file}{f': {printable(self.member)}' if self.member else ''}"


@dataclass(frozen=True)
class _Array:
    """Shape, dtype and position of an array in a file."""

    file: SourceFile
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    is_fortran: bool

    @property
    def row_bytes(self) -> int:
        return prod(self.shape[1:]) * self.dtype.itemsize

    def map(self) -> np.ndarray:
        """Maps the array into memory: as bytes (n, bytes of a row), or in Fortran order."""
        shape = self.shape if self.is_fortran else (self.shape[0], self.row_bytes)
        dtype = self.dtype if self.is_fortran else np.dtype(np.uint8)
        if not prod(shape):  # an empty memory map is an error
            return np.zeros(shape, dtype)
        order: Any = "F" if self.is_fortran else "C"
        try:
            return np.asarray(
                np.memmap(self.file.path, dtype, "r", self.offset, shape, order=order)
            )
        except (OSError, ValueError) as error:  # the latter if the file is shorter now
            self.file.check_unchanged()
            self.file.fail(error)

    def take(self, mapped: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Returns rows of the mapped array, in native byte order."""
        if self.is_fortran:
            found = mapped[rows]
        else:
            # `take` would copy the whole array if its values were not aligned, as in a .npz.
            found = np.frombuffer(mapped.take(rows, axis=0).data, self.dtype)
            found = found.reshape(len(rows), *self.shape[1:])
        return found.astype(self.dtype.newbyteorder("="), order="C", copy=False)


class NumpyFiles:
    """The arrays of `.npy` and `.npz` files as a dataset; only the rows of a batch are read.

    An example is a row of each array: {field: row}. The name of a `.npy` file is its field, and
    files in one folder are one part of the data. There are several parts in several folders
    (`part-0/x.npy`, `part-1/x.npy`), in files with numbers (`x-00000-of-00002.npy`,
    `x-00001-of-00002.npy`), or in several `.npz` files, each with all fields of its part.

    Args:
      files: A local folder, a file, a pattern, or a list of these.
      fields: Names of the fields to keep, which each part must have. The default is all, and all
        parts must have the same.

    Raises:
      UserError: If there are no such files, one is remote, malformed, truncated, compressed or
        holds anything but numbers, the arrays of a part differ in their number of rows, or parts
        in fields, shapes or dtypes.
      StorageError: If a file cannot be read.
    """

    def __init__(self, files: Files, fields: Sequence[str] | None = None) -> None:
        if isinstance(fields, str) or (fields is not None and not len(fields)):
            raise UserError(f"fields is {fields!r}: it must be a list of names, or None for all")
        for path in listed(files):
            if isinstance(path, (str, os.PathLike)) and is_url(os.fspath(path)):
                raise UserError(
                    f"{printable(path)}: NumPy files are mapped into memory, from a local disk: "
                    "copy them first (gcloud storage cp, aws s3 cp)"
                )
        parts = _parts(find_files(files, (".npy", ".npz"), "NumPy files"))
        chosen = _fields(parts, fields)
        self._parts = [{name: _array(part[name]) for name in chosen} for part in parts]
        counts = [_count(part, arrays) for part, arrays in zip(parts, self._parts, strict=True)]
        self._check_kinds(parts)
        self._ends = np.cumsum(counts, dtype=np.int64)
        if not self._ends[-1]:
            raise UserError(f"{parts[0][chosen[0]]}: the arrays have no rows")
        self._maps: BlockCache[dict[str, np.ndarray]] = BlockCache(_MAPPED)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns rows of the arrays.

        Args:
          indices: int64 (n,), their numbers.

        Returns:
          By field, an array (n, ...) in native byte order.

        Raises:
          UserError: If a file has changed.
          StorageError: If a file cannot be read.
          IndexError: If an index is out of range.
        """
        numbers = np.asarray(indices, np.int64)
        if len(numbers) and not (numbers.min() >= 0 and numbers.max() < len(self)):
            raise IndexError(f"rows {numbers.min()} to {numbers.max()} of {len(self)}")
        owners = np.searchsorted(self._ends, numbers, side="right")
        order = np.argsort(owners, kind="stable")
        found, counts = np.unique(owners, return_counts=True)
        if len(found) == 1:
            return self._rows(int(found[0]), numbers)
        rows = {
            name: np.empty((len(numbers), *array.shape[1:]), array.dtype.newbyteorder("="))
            for name, array in self._parts[0].items()
        }
        cuts = itertools.pairwise([0, *np.cumsum(counts).tolist()])
        for part, (start, stop) in zip(found.tolist(), cuts, strict=True):
            places = order[start:stop]
            for name, values in self._rows(part, numbers[places]).items():
                rows[name][places] = values
        return rows

    def describe(self, index: int) -> str:
        """Returns the file of a row, and its number there, for messages.

        Args:
          index: Its number in the dataset.
        """
        part = int(np.searchsorted(self._ends, index, side="right"))
        array = next(iter(self._parts[part].values()))
        return f"{array.file}: row {index - self._first(part):,}"

    def _first(self, part: int) -> int:
        return int(self._ends[part - 1]) if part else 0

    def _rows(self, part: int, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Returns rows of one part."""
        arrays = self._parts[part]
        mapped = self._maps.get(part, self._map)
        files = {array.file.path: array.file for array in arrays.values()}.values()
        for file in files:  # to read what a file has lost would end the process
            file.check_unchanged()
        within = numbers - self._first(part)
        rows = {name: array.take(mapped[name], within) for name, array in arrays.items()}
        for file in files:
            file.check_unchanged()
        return rows

    def _map(self, part: int) -> dict[str, np.ndarray]:
        return {name: array.map() for name, array in self._parts[part].items()}

    def _check_kinds(self, parts: Sequence[dict[str, _Place]]) -> None:
        """Raises `UserError` if a field has other dims or another dtype in a part."""
        for part, arrays in zip(parts, self._parts, strict=True):
            for name, array in arrays.items():
                first = self._parts[0][name]
                kinds = [f"{x.dtype.newbyteorder('=')} {x.shape[1:]} a row" for x in (array, first)]
                if kinds[0] != kinds[1]:
                    raise UserError(
                        f"{part[name]}: holds {kinds[0]}, and {parts[0][name]} {kinds[1]}: all "
                        "parts of a field need one shape of their rows, and one dtype"
                    )


def _parts(files: Sequence[SourceFile]) -> list[dict[str, _Place]]:
    """Returns the places of the arrays, by part and field."""
    parts: dict[tuple[str, str], dict[str, _Place]] = {}
    for file in files:
        if file.path.lower().endswith(".npz"):
            parts[file.path, ""] = {
                member.removesuffix(".npy"): _Place(file, member) for member in _members(file)
            }
            continue
        folder, name = os.path.split(file.path)
        if (match := _NAME.fullmatch(name)) is None:
            raise UserError(
                f"{file}: not the name of a NumPy file: the field and .npy, with a number as "
                "x-00000-of-00010.npy if it is one of several, or .npz"
            )
        parts.setdefault((folder, match[2] or ""), {})[match[1]] = _Place(file)
    return list(parts.values())


def _fields(parts: Sequence[dict[str, _Place]], wanted: Sequence[str] | None) -> list[str]:
    """Returns the names of the fields; raises `UserError` if a part lacks one."""
    first = parts[0]
    chosen = [*first] if wanted is None else [str(name) for name in wanted]
    if not chosen:
        raise UserError("a .npz file without arrays: there are no fields")
    for part in parts:
        if missing := [name for name in chosen if name not in part]:
            raise UserError(
                f"{next(iter(part.values())).file}: its part of the data has no array "
                f"{printable(missing[0])!r}.{did_you_mean(missing[0], part)}"
            )
        if wanted is None and (more := [name for name in part if name not in first]):
            raise UserError(
                f"{part[more[0]]}: the field {printable(more[0])!r} is not in all parts: "
                f"fields={chosen} leaves it out"
            )
    return chosen


def _count(part: dict[str, _Place], arrays: dict[str, _Array]) -> int:
    """Returns the number of rows of a part; raises `UserError` if its arrays differ."""
    counts = {name: array.shape[0] for name, array in arrays.items()}
    first, *others = counts
    for name in others:
        if counts[name] != counts[first]:
            raise UserError(
                f"{part[name]}: {counts[name]:,} rows, and {part[first]} has {counts[first]:,}: "
                "the arrays of a part need one number of rows, the examples"
            )
    return counts[first]


def _array(place: _Place) -> _Array:
    """Reads the header of an array. Nothing is unpickled."""
    file = place.file
    try:
        with file.open() as content:
            begin, size = 0, file.size
            if place.member is not None:
                begin, size = _stored(content, place)
            content.seek(begin)
            shape, is_fortran, dtype, offset = read_npy_header(content)
    except (ValueError, OSError, zipfile.BadZipFile, struct.error) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{place}: not an array of NumPy: {one_line(error)}") from error
    _check_dtype(place, dtype)
    if not shape:
        raise UserError(
            f"{place}: holds a single number: an array needs a leading dim of examples "
            "(fields=[...] names the fields to keep)"
        )
    if size != offset + prod(shape) * dtype.itemsize:
        raise UserError(
            f"{place}: the header says {dtype}{list(shape)}, which are "
            f"{offset + prod(shape) * dtype.itemsize:,} bytes, but there are {size:,}: truncated "
            "or corrupted"
        )
    return _Array(file, begin + offset, shape, dtype, is_fortran and len(shape) > 1)


def _check_dtype(place: _Place, dtype: np.dtype[Any]) -> None:
    """Raises `UserError` for anything but numbers of JAX."""
    if holds_numbers(dtype) and dtype.kind != "V":
        return
    if dtype.hasobject:
        what, instead = "Python objects, which are not unpickled", "save arrays of numbers"
    elif dtype.names is not None:
        what, instead = f"records ({', '.join(dtype.names)})", "save an array for each field"
    elif dtype.kind == "V":
        what, instead = f"{dtype}, as NumPy writes bfloat16", "save it as float32"
    else:
        what, instead = f"{dtype}, not numbers", "save numbers"
    raise UserError(f"{place}: holds {what}: {instead}, or leave it out by fields=[...]")


def _members(file: SourceFile) -> list[str]:
    """Returns the names of the arrays in a `.npz`."""
    try:
        with file.open() as content, zipfile.ZipFile(content) as archive:
            names = archive.namelist()
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{file}: not a .npz file: {one_line(error)}. It is truncated, corrupted or of another "
            "format"
        ) from error
    for name in names:
        if not name.endswith(".npy") or names.count(name) > 1:
            raise UserError(
                f"{file}: {printable(name)!r} is not the name of an array, or twice in the file"
            )
    return names


def _stored(content: IO[bytes], place: _Place) -> tuple[int, int]:
    """Returns position and size of an uncompressed member of a `.npz`."""
    with zipfile.ZipFile(content) as archive:
        info = archive.getinfo(place.member or "")
    if info.flag_bits & 1:
        raise UserError(f"{place}: encrypted, which NumPy does not read either")
    if info.compress_type != zipfile.ZIP_STORED:
        path = printable(place.file.path)
        raise UserError(
            f"{place}: compressed, so its rows have no positions: write it again, "
            f"np.savez({path!r}, **np.load({path!r})), or read it into memory, "
            f"dict(np.load({path!r}))"
        )
    content.seek(info.header_offset)
    header = content.read(_LOCAL_HEADER)
    if header[:4] != b"PK\3\4":
        raise zipfile.BadZipFile("no header where the member begins")
    begin = info.header_offset + _LOCAL_HEADER + sum(struct.unpack_from("<HH", header, 26))
    if begin + info.file_size > place.file.size:
        raise zipfile.BadZipFile("the member ends after the file")
    return begin, info.file_size

"""Weights in one `.safetensors` file or several, perhaps with an index."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
from etils import epath

from spmdtrain.errors import UserError, did_you_mean, foreign
from spmdtrain.optional import import_extra
from spmdtrain.record.storage import folder_of, in_short
from spmdtrain.record.validation import (
    Malformed,
    check,
    check_regular_file,
    parse_object,
    read_bytes,
)
from spmdtrain.weights.region import Box, slices
from spmdtrain.weights.source import ArrayHeader

# ml_dtypes registers the names of the narrow dtypes with NumPy.
_DTYPES = {
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{"BOOL": "bool", "BF16": "bfloat16", "C64": "complex64"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"},
}
SAFETENSORS_DTYPES = frozenset(_DTYPES.values())
# The library looks for them in NumPy, which lacks them.
_NOT_OF_NUMPY = frozenset(name for code, name in _DTYPES.items() if code.startswith("F8"))

_PART = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")
_BLOCK = 2**24  # bytes


class _Index(TypedDict):
    """The part of an index that is read."""

    weight_map: Mapping[str, str]


class SafetensorsWeights:
    """The arrays of `.safetensors` files.

    A file is opened again for each block that is read, because the pages of an open file that were
    read count as memory of the process.

    Args:
      path: The path, as the user gave it.
      files: The files, or one index.

    Raises:
      UserError: If a file is missing, corrupted or has an array that another one has too.
    """

    def __init__(self, path: str, files: Sequence[epath.Path]) -> None:
        self.path = path
        self._library = import_extra("safetensors", "safetensors", "safetensors files")
        self._files: dict[str, epath.Path] = {}
        headers: dict[str, ArrayHeader] = {}
        index = files[0] if files[0].suffix == ".json" else None
        of_index = {} if index is None else _read_index(index)
        for file in files if index is None else _shards(index, of_index.values()):
            for name, header in self._read_headers(file).items():
                if name in headers:
                    raise UserError(
                        f"{path}: {foreign(name, 200)} is both in {self._files[name].name} and in "
                        f"{file.name}: give one of the files"
                    )
                if index is not None and of_index.get(name) != file.name:
                    continue
                headers[name], self._files[name] = header, file
        if index is None and folder_of(path).is_dir():
            _check_parts([file.name for file in files], path)
        if missing := [name for name in of_index if name not in headers]:
            raise UserError(
                f"{path}: {foreign(missing[0], 200)} is not in "
                f"{foreign(of_index[missing[0]], 200)}, where the index has it"
            )
        self.headers: Mapping[str, ArrayHeader] = headers

    def _read_headers(self, file: epath.Path) -> dict[str, ArrayHeader]:
        check_regular_file(file)
        try:
            with self._library.safe_open(file, framework="numpy") as opened:
                parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
                found = {n: (tuple(x.get_shape()), str(x.get_dtype())) for n, x in parts.items()}
        except (self._library.SafetensorError, OSError) as error:
            raise UserError(f"{file} is corrupted or incomplete: {in_short(error)}") from error
        for name, (_, dtype) in found.items():
            if dtype not in _DTYPES:
                raise UserError(f"{file}: {foreign(name, 200)} has the unknown dtype {dtype}")
        return {n: ArrayHeader(shape, np.dtype(_DTYPES[d])) for n, (shape, d) in found.items()}

    def read(self, name: str, box: Box) -> np.ndarray:
        header = self.headers[name]
        rows = max(1, _BLOCK * header.shape[0] // max(1, header.nbytes)) if box else 1
        if not box or box[0][1] - box[0][0] <= rows:
            return self._read_block(name, box)
        (first, end), others = box[0], box[1:]
        values = np.empty([end - first for first, end in box], header.dtype)
        for row in range(first, end, rows):
            last = min(row + rows, end)
            values[row - first : last - first] = self._read_block(name, ((row, last), *others))
        return values

    def _read_block(self, name: str, box: Box) -> np.ndarray:
        file, header = self._files[name], self.headers[name]
        try:
            if header.dtype.name in _NOT_OF_NUMPY:
                return _read_bytes_of(file, name, header, box)
            with self._library.safe_open(file, framework="numpy") as opened:
                part: Any = opened.get_slice(name)[slices(box) or ...]
                return np.asarray(part)
        except (self._library.SafetensorError, OSError) as error:
            raise UserError(
                f"{file}: {foreign(name, 200)} cannot be read: {in_short(error)}"
            ) from error


def _read_bytes_of(file: epath.Path, name: str, header: ArrayHeader, box: Box) -> np.ndarray:
    """Returns a part of an array, from a file whose header the library has checked."""
    (first, end), *others = box or [(0, 1)]
    row = header.nbytes // max(1, header.shape[0]) if box else header.nbytes
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        offsets = json.loads(opened.read(length))[name]["data_offsets"]
        opened.seek(8 + length + offsets[0] + first * row)
        rows = np.frombuffer(opened.read((end - first) * row), header.dtype)
    if not box:
        return rows.reshape(())
    return rows.reshape(end - first, *header.shape[1:])[:, *slices(tuple(others))]


def _check_parts(names: Sequence[str], path: str) -> None:
    """Raises `UserError` if files such as `model-00001-of-00002` do not include all parts."""
    numbers: dict[tuple[str, int], set[int]] = {}
    for match in filter(None, map(_PART.fullmatch, names)):
        numbers.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    for (name, count), found in numbers.items():
        if len(found) < count:
            missing = next(n for n in range(min(1, *found), count + 1) if n not in found)
            raise UserError(f"{path}: part {missing} of {count} of {name} is missing")


def _read_index(index: epath.Path) -> Mapping[str, str]:
    """Returns the name of each array's file."""
    try:
        content = parse_object(read_bytes(index))
        if "weight_map" not in content:  # other programs add fields of their own
            raise Malformed(f"weight_map is missing.{did_you_mean('weight_map', content)}")
        check({"weight_map": content["weight_map"]}, _Index, "index")
    except Malformed as error:
        raise UserError(f"{index} is not an index of safetensors files: {error}") from error
    of_index: Mapping[str, str] = content["weight_map"]
    return of_index


def _shards(index: epath.Path, names: Iterable[str]) -> list[epath.Path]:
    """Returns the files that an index names, in its folder."""
    unique = sorted(set(names))
    for name in unique:
        if "/" in name or "\\" in name or not name.endswith(".safetensors"):
            raise UserError(f"{index} names {foreign(repr(name), 200)}: not a file of its folder")
    files = [index.parent / name for name in unique]
    if missing := [file.name for file in files if not file.exists()]:
        raise UserError(
            f"{index.parent}: {len(missing)} of {len(files)} files of the index are missing: "
            f"{', '.join(missing[:5])}"
        )
    return files

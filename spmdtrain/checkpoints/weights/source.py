"""Files of arrays of other programs, read array by array."""

import contextlib
import functools
import hashlib
import json
import os
import re
import stat
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from spmdtrain.checkpoints.orbax_import import ocp
from spmdtrain.checkpoints.weights.weight_map import Box, slices
from spmdtrain.distributed.out_of_memory import available_memory
from spmdtrain.document.terminal import byte_size
from spmdtrain.errors import UserError, did_you_mean, foreign, import_extra
from spmdtrain.record.storage import (
    absolute,
    folder_of,
    in_short,
    is_corruption,
    is_url,
    silence_tensorstore_shutdown,
)
from spmdtrain.record.validation import (
    ORBAX_METADATA,
    Malformed,
    check,
    check_array_names,
    check_regular_file,
    parse_object,
    read_bytes,
    read_npy_header,
)
from spmdtrain.tree import is_key, leaves_by_path, path_name

_FORMATS = (
    "a .safetensors, .npz, .keras, .weights.h5 or .eqx file, a folder of .safetensors, or an "
    "Orbax checkpoint"
)


@dataclass(frozen=True)
class ArrayHeader:
    """Shape and dtype of an array in a file."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __str__(self) -> str:
        return f"{self.dtype.name}[{','.join(map(str, self.shape))}]"

    @property
    def nbytes(self) -> int:
        """The bytes of the array in memory."""
        return prod(self.shape) * self.dtype.itemsize


class WeightSource(Protocol):
    """Arrays by name, which are read one at a time.

    Attributes:
      path: The file or folder, as the user gave it.
      headers: Shape and dtype of each array by its name.
    """

    path: str
    headers: Mapping[str, ArrayHeader]

    def read(self, name: str, box: Box) -> np.ndarray:
        """Returns a part of an array; raises `UserError` if the file is corrupted."""
        ...


def is_weights_file(path: str) -> bool:
    """Returns whether a path is a file or folder of weights, and not a run or its checkpoint.

    It is true for a file of another format, too, because `open_weights` then names the formats.
    """
    if path.endswith((".safetensors", ".npz", ".keras", ".h5", ".eqx", ".safetensors.index.json")):
        return True
    folder = folder_of(path)
    if is_url(folder) or not folder.is_dir():
        return not is_url(folder) and folder.is_file()
    own = (folder / "manifest.json").exists() or (folder / "checkpoints").exists()
    if own or folder.name == "checkpoints":
        return False
    return _is_orbax(folder) or any(folder.glob("*.safetensors")) or bool(_indices(folder))


def open_weights(path: str) -> WeightSource:
    """Opens a file or folder of arrays; only the headers are read.

    Args:
      path: A file `.safetensors`, `.npz`, `.keras`, `.weights.h5` or `.eqx`, a folder of
        `.safetensors` files, perhaps with an index, or an Orbax checkpoint.

    Raises:
      UserError: If it is not such a file or folder, is corrupted, or a file of it is missing.
    """
    found = folder_of(path)
    if is_url(found):
        raise UserError(f"{path}: weights of other programs must be local files: copy them first")
    if not found.exists():
        raise UserError(f"{path}: no such file: init_from takes {_FORMATS}, or a run")
    source = _open(path, found)
    for name, header in source.headers.items():
        if header.nbytes > available_memory():
            raise UserError(
                f"{path}: {foreign(name, 200)} is {header} by its header, "
                f"{byte_size(header.nbytes)}: more than the memory of this machine"
            )
    return source


def _open(path: str, found: epath.Path) -> WeightSource:
    # Imported late, because each format needs a library of its own.
    if found.is_dir() and _is_orbax(found):
        return OrbaxWeights(path, found)
    if found.is_dir():
        indices = _indices(found)
        if len(indices) > 1:
            raise UserError(f"{path}: has {len(indices)} indices: give one of these files")
        files = indices or sorted(found.glob("*.safetensors"))
        if not files:
            raise UserError(f"{path}: init_from takes {_FORMATS}, or a run")
        return SafetensorsWeights(path, files)
    check_regular_file(found)
    if found.suffix in (".safetensors", ".json"):
        return SafetensorsWeights(path, [found])
    if found.suffix == ".npz":
        return NpzWeights(path, found)
    if found.suffix == ".keras" or found.name.endswith(".weights.h5"):
        return KerasWeights(path, found)
    if found.suffix == ".eqx":
        return EquinoxWeights(path, found)
    raise UserError(f"{path}: init_from takes {_FORMATS}, or a run")


def _is_orbax(folder: epath.Path) -> bool:
    return any((folder / name).exists() for name in ("_METADATA", "_CHECKPOINT_METADATA"))


def _indices(folder: epath.Path) -> list[epath.Path]:
    return sorted(folder.glob("*.safetensors.index.json"))


@contextlib.contextmanager
def _reported_faults(path: str, kind: str) -> Iterator[None]:
    """Turns the errors of a corrupted file into a `UserError`; `kind` is its ending."""
    try:
        yield
    except UserError:
        raise
    except (zipfile.BadZipFile, OSError, ValueError, EOFError, zlib.error, KeyError) as error:
        raise UserError(f"{path} is not a valid {kind} file: {in_short(error)}") from error
    except (NotImplementedError, RuntimeError) as error:  # another compression, encrypted
        raise UserError(f"{path} cannot be read: {in_short(error)}") from error


# -- Weights in one `.safetensors` file or several, perhaps with an index --------------------------

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


# -- Weights in a `.npz` file ----------------------------------------------------------------------

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
        with _reported_faults(self.path, ".npz"), zipfile.ZipFile(file) as archive:
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
        with _reported_faults(self.path, ".npz"), zipfile.ZipFile(self._file) as archive:
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


def _read_header(member: Any, where: str) -> tuple[ArrayHeader, bool, int]:
    """Returns the header of an array, whether it is in Fortran order, and where its data begin."""
    shape, fortran, dtype, start = read_npy_header(member)
    if dtype.hasobject or dtype.kind == "V":
        raise UserError(
            f"{where} has Python objects, records, or a dtype that NumPy's format lacks, such as "
            f"bfloat16 ({dtype}): save it as float32"
        )
    return ArrayHeader(shape, dtype), fortran, start


# -- Weights in an Orbax checkpoint of another program ---------------------------------------------

_DEEPEST = 32


class OrbaxWeights:
    """The arrays of an Orbax checkpoint, by their paths: `params/dense/kernel`.

    If the checkpoint has items, such as those of a `CheckpointManager`, the names of the items are
    the first parts of the paths. An array is read as a whole, and the last one is kept in memory.
    `path` is as the user gave it. Raises `UserError` if the folder is corrupted, or holds several
    checkpoints.
    """

    def __init__(self, path: str, folder: epath.Path) -> None:
        self.path = path
        folder = absolute(folder)
        _check_kinds(folder)
        silence_tensorstore_shutdown()
        items = [x for x in sorted(folder.iterdir()) if (x / ORBAX_METADATA).is_file()]
        prefixes = (
            {"": folder}
            if (folder / ORBAX_METADATA).is_file()
            else {f"{x.name}/": x for x in items}
        )
        headers: dict[str, ArrayHeader] = {}
        self._where: dict[str, tuple[epath.Path, Any, Any]] = {}
        for prefix, item in prefixes.items():
            try:
                check_array_names(item)
                tree = ocp.PyTreeCheckpointHandler().metadata(item).tree
            except Exception as error:
                if not is_corruption(error) and not isinstance(error, Malformed):
                    raise
                raise UserError(f"{item} cannot be read: {in_short(error)}") from error
            for at, leaf in jax.tree_util.tree_leaves_with_path(tree):
                name = prefix + path_name(at)
                if (header := self._header(name, leaf)) is not None:
                    headers[name], self._where[name] = header, (item, tree, at)
        if not headers:
            raise UserError(f"{path}: holds no arrays: give the folder of one checkpoint")
        self.headers: Mapping[str, ArrayHeader] = headers
        self._read_whole = functools.lru_cache(maxsize=1)(self._read_array)

    def _header(self, name: str, leaf: Any) -> ArrayHeader | None:
        """Returns the header of an array; None for text and other leaves."""
        shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
        if shape is None or dtype is None:
            return None
        header = ArrayHeader(tuple(shape), np.dtype(dtype))
        chunk = getattr(getattr(leaf, "storage", None), "chunk_shape", None) or ()
        if prod(chunk) > max(1, prod(shape)):
            raise UserError(
                f"{self.path}: {foreign(name, 200)} is {header} by its header, and a chunk of it "
                f"is {list(chunk)}"
            )
        return header

    def read(self, name: str, box: Box) -> np.ndarray:
        part: np.ndarray = self._read_whole(name)[slices(box)]
        return part

    def _read_array(self, name: str) -> np.ndarray:
        item, tree, at = self._where[name]
        single = jax.tree_util.tree_map_with_path(lambda p, leaf: leaf if p == at else ..., tree)
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        try:
            restored = ocp.PyTreeCheckpointHandler().restore(
                item, args=ocp.args.PyTreeRestore(item=single, restore_args=as_numpy)
            )
        except Exception as error:
            if not is_corruption(error):
                raise
            raise UserError(
                f"{self.path}: {foreign(name, 200)} cannot be read: {in_short(error)}"
            ) from error
        leaves = jax.tree_util.tree_leaves_with_path(restored)
        return np.asarray(next(leaf for path, leaf in leaves if path == at))


def _check_kinds(folder: epath.Path) -> None:
    """Checks that a folder has regular files and folders only: opening a FIFO blocks for ever."""
    for root, folders, names in os.walk(folder):
        if len(Path(root).relative_to(folder).parts) > _DEEPEST:
            raise UserError(f"{folder}: its folders are nested too deeply")
        for path in [Path(root, name) for name in folders + names]:
            try:
                mode = path.stat().st_mode
            except OSError as error:
                raise UserError(f"{path} cannot be read: {error.strerror}") from error
            if not stat.S_ISREG(mode) and not (stat.S_ISDIR(mode) and not path.is_symlink()):
                raise UserError(f"{path} is not a regular file or folder")


# -- Weights in a Keras file, by their names in its HDF5 file: `layers/dense/vars/0` ---------------

_MEMBER = "model.weights.h5"


class KerasWeights:
    """The arrays of a `.keras` or `.weights.h5` file.

    The model's configuration is not read, and no code is run. `path` is as the user gave it. Raises
    `UserError` if the file is corrupted.
    """

    def __init__(self, path: str, file: epath.Path) -> None:
        self.path = path
        self._file = file
        self._h5py = import_extra("h5py", "keras", ".keras files")
        headers: dict[str, ArrayHeader] = {}
        with self._opened() as weights:
            self._collect(weights, "", headers)
        self.headers: Mapping[str, ArrayHeader] = headers

    def _collect(self, group: Any, prefix: str, headers: dict[str, ArrayHeader]) -> None:
        """Adds the arrays below a group; only hard links are followed, each once."""
        for name in group:
            if not isinstance(group.get(name, getlink=True), self._h5py.HardLink):
                raise UserError(f"{self.path}: {foreign(prefix + name, 200)} is a link")
            found = group[name]
            if isinstance(found, self._h5py.Group):
                if prefix.count("/") >= 32:
                    raise UserError(f"{self.path}: groups are nested more than 32 deep")
                self._collect(found, f"{prefix}{name}/", headers)
                continue
            properties = found.id.get_create_plist()
            if found.is_virtual or properties.get_external_count():
                raise UserError(f"{self.path}: {foreign(prefix + name, 200)} is in another file")
            if found.dtype.kind not in "biufcV" or found.dtype.names is not None:
                raise UserError(
                    f"{self.path}: {foreign(prefix + name, 200)} has the dtype {found.dtype}"
                )
            headers[prefix + name] = ArrayHeader(tuple(found.shape), _dtype_of(found))

    def read(self, name: str, box: Box) -> np.ndarray:
        with self._opened() as weights:
            found = weights[name]
            part = np.asarray(found[slices(box) or ()])
            return part.view(_dtype_of(found)) if part.dtype.kind == "V" else part

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Any]:
        try:
            with contextlib.ExitStack() as stack:
                member: Any = str(self._file)
                if self._file.suffix == ".keras":
                    archive = stack.enter_context(zipfile.ZipFile(self._file))
                    member = stack.enter_context(archive.open(_MEMBER))
                yield stack.enter_context(self._h5py.File(member, "r"))
        except UserError:
            raise
        except (
            zipfile.BadZipFile,
            OSError,
            EOFError,
            LookupError,
            ValueError,
            RuntimeError,
        ) as error:
            kind = self._file.suffix
            raise UserError(f"{self.path} is not a valid {kind} file: {in_short(error)}") from error


def _dtype_of(dataset: Any) -> np.dtype[Any]:
    """Returns the dtype of an array; Keras stores bfloat16 as bytes with an attribute."""
    if dataset.dtype.kind == "V" and dataset.dtype.itemsize == 2:
        return np.dtype(str(dataset.attrs.get("dtype", "bfloat16")))
    found: np.dtype[Any] = dataset.dtype
    return found


# -- Weights in a file of `eqx.tree_serialise_leaves`: arrays of NumPy's format, without names -----

_LONGEST_LINE = 2**20


class EquinoxWeights:
    """The leaves of an `.eqx` file, in the order in which they were written: `leaf 0`, `leaf 1`.

    A first line of JSON, in which a program may have written hyperparameters, is skipped. `path` is
    as the user gave it. Raises `UserError` if the file is corrupted.
    """

    def __init__(self, path: str, file: epath.Path) -> None:
        self.path = path
        self._file = file
        headers: dict[str, ArrayHeader] = {}
        self._arrays: dict[str, tuple[int, bool]] = {}  # the first byte, and if in Fortran order
        with _reported_faults(self.path, ".eqx"), file.open("rb") as opened:
            size = opened.seek(0, os.SEEK_END)
            opened.seek(0)
            at = len(opened.readline(_LONGEST_LINE)) if opened.read(1) == b"{" else -1
            at += 1  # the byte that was read
            while at < size:
                opened.seek(at)
                name = f"leaf {len(headers)}"
                shape, fortran, dtype, begin = read_npy_header(opened)
                if dtype.kind == "V" and dtype.itemsize == 2:
                    dtype = np.dtype("bfloat16")  # which NumPy writes as bytes
                if dtype.kind not in "biufc" and dtype.name != "bfloat16":
                    raise UserError(f"{path}: {name} has the dtype {dtype}: it is not an array")
                headers[name] = ArrayHeader(shape, dtype)
                self._arrays[name] = at + begin, fortran
                at += begin + headers[name].nbytes
            if at != size:
                raise ValueError(f"it ends within leaf {len(headers) - 1}")
        self.headers: Mapping[str, ArrayHeader] = headers

    def read(self, name: str, box: Box) -> np.ndarray:
        header, (begin, fortran) = self.headers[name], self._arrays[name]
        first, end = box[0] if box and not fortran else (0, header.shape[0] if box else 1)
        row = header.nbytes // max(1, header.shape[0]) if box else header.nbytes
        with _reported_faults(self.path, ".eqx"), self._file.open("rb") as opened:
            opened.seek(begin + first * row)
            values = np.frombuffer(opened.read((end - first) * row), header.dtype)
            shape = (end - first, *header.shape[1:]) if box else ()
            shaped = values.reshape(shape, order="F" if fortran else "C")
            inner = slices(box) if fortran else (slice(None), *slices(box[1:]))
            return np.asarray(shaped[inner[: len(box)]])


# -- Arrays in memory, for a model whose paths they have -------------------------------------------


class GivenArrays:
    """Arrays in memory by their paths in a model.

    NumPy's arrays and those of this process's devices are copied to the host, because their owner
    may change or donate them.

    Args:
      what: Names the arrays in messages.
      tree: The arrays, perhaps below `params` and `model_state`, or in Flax's boxes or variables.
      names: The paths of the model's arrays.

    Raises:
      UserError: If a path of the model has two arrays, or an array is deleted.
    """

    def __init__(self, what: str, tree: Any, names: Iterable[str]) -> None:
        self.path, self._arrays, known = what, dict[str, Any](), frozenset(names)
        for path, leaf in leaves_by_path(tree, known):
            name = path or "params"
            is_known, is_array = path in known, hasattr(leaf, "dtype")
            # Not the functions and numbers of an Equinox module, nor the random streams of nnx.
            is_value = is_array and not is_key(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)
            if not is_known and not is_value:
                continue
            if name in self._arrays:
                raise UserError(f"{what} have {name} twice")
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise UserError(f"{what}: {name} was donated to a step: give a copy of it")
            on_other_processes = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
            self._arrays[name] = leaf if on_other_processes else np.array(leaf)
        self.headers: Mapping[str, ArrayHeader] = {
            name: ArrayHeader(tuple(array.shape), np.dtype(array.dtype))
            for name, array in self._arrays.items()
        }

    def digests(self) -> dict[str, str]:
        """Returns a text of each array; of one that other processes have, too, its header."""
        return {
            name: f"{self.headers[name]} {hashlib.sha256(x.tobytes()).hexdigest()[:16]}"
            if isinstance(x, np.ndarray)
            else str(self.headers[name])
            for name, x in self._arrays.items()
        }

    def read(self, name: str, box: Box) -> np.ndarray:
        array = self._arrays[name]
        if isinstance(array, np.ndarray):
            return array[slices(box)]
        for shard in array.addressable_shards:
            held = [part.indices(n)[:2] for part, n in zip(shard.index, array.shape, strict=True)]
            dims = list(zip(box, held, strict=True))
            if all(at[0] <= part[0] and part[1] <= at[1] for part, at in dims):
                within = tuple((part[0] - at[0], part[1] - at[0]) for part, at in dims)
                return np.asarray(shard.data)[slices(within)]
        raise UserError(
            f"{self.path}: {name} is split over the processes otherwise than in this run: save it, "
            "and give the file to init_from"
        )

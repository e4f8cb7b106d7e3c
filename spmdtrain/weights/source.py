"""Files of arrays of other programs, read array by array."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np
from etils import epath

from spmdtrain.distributed.out_of_memory import available_memory
from spmdtrain.document.terminal import byte_size
from spmdtrain.errors import UserError, foreign
from spmdtrain.record.storage import folder_of, is_url
from spmdtrain.record.validation import check_regular_file
from spmdtrain.weights.region import Box

_FORMATS = (
    "a .safetensors, .npz, .keras or .weights.h5 file, a folder of .safetensors, or an Orbax "
    "checkpoint"
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
    if path.endswith((".safetensors", ".npz", ".keras", ".h5", ".safetensors.index.json")):
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
      path: A file `.safetensors`, `.npz`, `.keras` or `.weights.h5`, a folder of `.safetensors`
        files, perhaps with an index, or an Orbax checkpoint.

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
        from spmdtrain.weights.orbax_folder import OrbaxWeights

        return OrbaxWeights(path, found)
    if found.is_dir():
        from spmdtrain.weights.safetensors_files import SafetensorsWeights

        indices = _indices(found)
        if len(indices) > 1:
            raise UserError(f"{path}: has {len(indices)} indices: give one of these files")
        files = indices or sorted(found.glob("*.safetensors"))
        if not files:
            raise UserError(f"{path}: init_from takes {_FORMATS}, or a run")
        return SafetensorsWeights(path, files)
    check_regular_file(found)
    if found.suffix in (".safetensors", ".json"):
        from spmdtrain.weights.safetensors_files import SafetensorsWeights

        return SafetensorsWeights(path, [found])
    if found.suffix == ".npz":
        from spmdtrain.weights.npz_file import NpzWeights

        return NpzWeights(path, found)
    if found.suffix == ".keras" or found.name.endswith(".weights.h5"):
        from spmdtrain.weights.keras_file import KerasWeights

        return KerasWeights(path, found)
    raise UserError(f"{path}: init_from takes {_FORMATS}, or a run")


def _is_orbax(folder: epath.Path) -> bool:
    return any((folder / name).exists() for name in ("_METADATA", "_CHECKPOINT_METADATA"))


def _indices(folder: epath.Path) -> list[epath.Path]:
    return sorted(folder.glob("*.safetensors.index.json"))

"""Weights in a Keras file, by their names in its HDF5 file: `layers/dense/vars/0`."""

import contextlib
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from etils import epath

from spmdtrain.errors import UserError, foreign
from spmdtrain.optional import import_extra
from spmdtrain.record.storage import in_short
from spmdtrain.weights.region import Box, slices
from spmdtrain.weights.source import ArrayHeader

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

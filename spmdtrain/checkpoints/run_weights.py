"""The arrays of a run's checkpoint as weights for another model."""

import functools
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from etils import epath

from spmdtrain.checkpoints.manifest import Manifest
from spmdtrain.checkpoints.read_arrays import check_saved_items, holds, read_host_array
from spmdtrain.weights.region import Box, slices
from spmdtrain.weights.source import ArrayHeader


class RunWeights:
    """The parameters and the model state of a checkpoint, by their paths in the model.

    The parameters are the averaged ones if the run kept an average. An array is read as a whole,
    its checksum is verified, and the last one is kept in memory. Raises `CheckpointCorruptedError`
    or `StorageError`.
    """

    def __init__(self, folder: epath.Path, manifest: Manifest) -> None:
        self.path = str(folder)
        self._folder, self._manifest = folder, manifest
        fields = ["averaged" if holds(manifest, "averaged") else "params"]
        fields += ["model_state"] if holds(manifest, "model_state") else []
        check_saved_items(folder, manifest, fields)
        headers: dict[str, ArrayHeader] = {}
        self._where: dict[str, tuple[str, str]] = {}
        for saved_name, text in manifest.identity.leaves.items():
            field, _, name = saved_name.partition("/")
            if field in fields and not text.startswith("key<"):
                dtype, _, dims = text.rstrip("]").partition("[")
                shape = tuple(int(dim) for dim in dims.split(",") if dim)
                headers[name] = ArrayHeader(shape, np.dtype(jnp.dtype(dtype)))
                self._where[name] = field, saved_name
        self.headers: Mapping[str, ArrayHeader] = headers
        self._read_whole = functools.lru_cache(maxsize=1)(self._read_array)

    def read(self, name: str, box: Box) -> np.ndarray:
        part: np.ndarray = self._read_whole(name)[slices(box)]
        return part

    def _read_array(self, name: str) -> np.ndarray:
        field, saved_name = self._where[name]
        return read_host_array(self._folder, self._manifest, field, saved_name)

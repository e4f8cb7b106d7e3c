"""Weights in an Orbax checkpoint of another program."""

import functools
import os
import stat
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath, epy

from spmdtrain.errors import UserError, foreign
from spmdtrain.record.storage import absolute, in_short, is_corruption, silence_tensorstore_shutdown
from spmdtrain.record.validation import ORBAX_METADATA, Malformed, check_array_names
from spmdtrain.tree import path_name
from spmdtrain.weights.region import Box, slices
from spmdtrain.weights.source import ArrayHeader

with epy.lazy_imports():  # because importing it takes long
    import orbax.checkpoint as ocp

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

"""Checks of the headers of stored arrays, before memory is allocated for the arrays.

A header of a few bytes can declare any size, which TensorStore then allocates.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from spmdtrain.checkpoints.manifest import CheckpointCorruptedError, Manifest
from spmdtrain.checkpoints.run_identity import describe_leaf
from spmdtrain.distributed.out_of_memory import available_memory
from spmdtrain.document.terminal import byte_size
from spmdtrain.tree import path_name

PyTree = Any

_LONGEST_KEY = 16  # uint32s; JAX's own keys have 2 or 4


def check_headers(tree: PyTree, manifest: Manifest, *, in_memory: bool) -> None:
    """Compares the headers of an item's arrays with the manifest of the checkpoint.

    `tree` is Orbax' metadata of the arrays. `in_memory` means that this machine then reads all of
    them whole, so they must also fit into its memory together.

    Raises:
      CheckpointCorruptedError: If an array is not in the manifest, has another shape or dtype
        there, or needs more memory than there is.
    """
    total = 0
    for path, header in jax.tree_util.tree_leaves_with_path(tree):
        if fault := header_fault(path_name(path), header, manifest, in_memory=in_memory):
            raise CheckpointCorruptedError(fault)
        total += _size(header)
    if in_memory and total > available_memory():
        raise CheckpointCorruptedError(
            f"its arrays have {byte_size(total)} by their headers, {_more_than_memory()}"
        )


def header_fault(name: str, header: Any, manifest: Manifest, *, in_memory: bool) -> str | None:
    """Returns what is wrong with the header of one array; None if it is valid."""
    saved = manifest.identity.leaves.get(name)
    if saved is None:
        return f"{name} is not of this checkpoint"
    if getattr(header, "shape", None) is None or getattr(header, "dtype", None) is None:
        return f"{name} is not an array by its header, and was saved as {saved}"
    shape, declared = tuple(header.shape), describe_leaf(header)
    if declared != saved and not _is_key_data(header, saved):
        return f"{name} is {declared} by its header, and was saved as {saved}"
    chunk = tuple(getattr(header.storage, "chunk_shape", None) or ())
    if math.prod(chunk) > max(1, math.prod(shape)):
        return f"{name} is {declared} by its header, and a chunk of it is {list(chunk)}"
    if in_memory and (size := _size(header)) > available_memory():
        return f"{name} is {declared} by its header, {byte_size(size)}, {_more_than_memory()}"
    return None


def _size(header: Any) -> int:
    """Returns the bytes that a header declares."""
    return math.prod(header.shape) * jnp.dtype(header.dtype).itemsize


def _more_than_memory() -> str:
    return f"more than the {byte_size(available_memory())} of memory here"


def _is_key_data(header: Any, saved: str) -> bool:
    """Returns whether an array can be the data of a random key that `saved` describes."""
    *dims, words = header.shape or (0,)
    as_key = f"{saved.partition('[')[0]}[{','.join(map(str, dims))}]"
    return saved.startswith("key<") and saved == as_key and words <= _LONGEST_KEY

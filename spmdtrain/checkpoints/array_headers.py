"""Headers of the stored arrays of a checkpoint, checked before memory is allocated for the arrays.

A header of a few bytes may declare any size, and TensorStore allocates what it declares.
"""

import functools
import math
import os
from typing import Any

import jax
import jax.numpy as jnp

from spmdtrain.checkpoints.manifest import CheckpointCorruptedError, Manifest
from spmdtrain.checkpoints.run_identity import describe
from spmdtrain.distributed.out_of_memory import group_limit
from spmdtrain.terminal import byte_size
from spmdtrain.tree import path_name

PyTree = Any

_LONGEST_KEY = 16  # uint32s; JAX's own keys have 2 or 4


def check_headers(tree: PyTree, manifest: Manifest, *, in_memory: bool) -> None:
    """Compares the headers of the arrays of an item with the checkpoint's manifest.

    Args:
      tree: Orbax' metadata of the item's arrays.
      manifest: The checkpoint's.
      in_memory: Whether all of them are then read whole by this machine.

    Raises:
      CheckpointCorruptedError: If an array is not in the manifest, has another shape or dtype
        there, or they have to fit into this machine's memory and do not.
    """
    total = 0
    for path, header in jax.tree_util.tree_leaves_with_path(tree):
        if fault := header_fault(path_name(path), header, manifest, in_memory=in_memory):
            raise CheckpointCorruptedError(fault)
        total += _size(header)
    if in_memory and total > _memory():
        raise CheckpointCorruptedError(
            f"its arrays have {byte_size(total)} by their headers, {_more_than_memory()}"
        )


def header_fault(name: str, header: Any, manifest: Manifest, *, in_memory: bool) -> str | None:
    """Returns what is wrong with the header of one array; None if nothing is."""
    saved = manifest.identity.leaves.get(name)
    if saved is None:
        return f"{name} is not of this checkpoint"
    if getattr(header, "shape", None) is None or getattr(header, "dtype", None) is None:
        return f"{name} is no array by its header, and was saved as {saved}"
    shape, found = tuple(header.shape), describe(header)
    if found != saved and not _are_numbers_of_key(header, saved):
        return f"{name} is {found} by its header, and was saved as {saved}"
    chunk = tuple(getattr(header.storage, "chunk_shape", None) or ())
    if math.prod(chunk) > max(1, math.prod(shape)):
        return f"{name} is {found} by its header, and a chunk of it is {list(chunk)}"
    if in_memory and (size := _size(header)) > _memory():
        return f"{name} is {found} by its header, {byte_size(size)}, {_more_than_memory()}"
    return None


def _size(header: Any) -> int:
    """Returns the bytes of an array by its header."""
    return math.prod(header.shape) * jnp.dtype(header.dtype).itemsize


def _more_than_memory() -> str:
    return f"more than the {byte_size(_memory())} of memory here"


def _are_numbers_of_key(header: Any, saved: str) -> bool:
    """Returns whether an array can be the stored form of a random key described by `saved`."""
    *dims, numbers = header.shape or (0,)
    as_key = f"{saved.partition('[')[0]}[{','.join(map(str, dims))}]"
    return saved.startswith("key<") and saved == as_key and numbers <= _LONGEST_KEY


@functools.cache
def _memory() -> int:
    """Returns the bytes of memory of this machine, or of the container."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(machine, group_limit() or machine)

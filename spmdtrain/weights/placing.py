"""Placement of a file's arrays: each process reads what its devices hold, one shard at a time."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from spmdtrain.distributed import process_group
from spmdtrain.errors import UserError, foreign
from spmdtrain.weights.assignment import WeightAssignment
from spmdtrain.weights.region import Box, overlap, slices
from spmdtrain.weights.source import WeightSource


def place(
    source: WeightSource,
    found: WeightAssignment,
    targets: Mapping[str, Any],
    expected: type[Exception] = UserError,
) -> dict[str, jax.Array]:
    """Returns the arrays of a model that a file has, in their shardings.

    All processes of a job call it. The host holds one shard and the part of the file's array that
    is read for it.

    Args:
      targets: `jax.ShapeDtypeStruct` with a sharding, by the path of the array.
      expected: The errors that one process raises in all of them.

    Raises:
      UserError: If a value is NaN or infinite, or too large for the model's integers, or the file
        is corrupted.
    """

    def read() -> dict[str, jax.Array]:
        return {name: _array(source, found, name, targets[name]) for name in found.pieces}

    return process_group.run_on_all(read, expected)


def read_whole(source: WeightSource, found: WeightAssignment, name: str, target: Any) -> np.ndarray:
    """Returns an array of a model that a file has, on the host; raises `UserError` like `place`.

    `name` is the path of the array, `target` its shape and dtype.
    """
    return _shard(source, found, name, tuple((0, n) for n in target.shape), target.dtype)


def _array(source: WeightSource, found: WeightAssignment, name: str, target: Any) -> jax.Array:
    holders: dict[Box, list[jax.Device]] = {}
    for device, index in target.sharding.addressable_devices_indices_map(target.shape).items():
        box = tuple(
            part.indices(length)[:2] for part, length in zip(index, target.shape, strict=True)
        )
        holders.setdefault(box, []).append(device)
    memory = target.sharding.memory_kind
    shards = []
    for box, devices in holders.items():
        values = _shard(source, found, name, box, target.dtype)
        for device in devices:
            # Copied, because an array that shares memory with NumPy's cannot be donated.
            where = SingleDeviceSharding(device, memory_kind=memory)
            shards.append(jax.device_put(values, where, may_alias=False))
        jax.block_until_ready(shards[-len(devices) :])  # the copies are made, so `values` is freed
        del values
    return jax.make_array_from_single_device_arrays(target.shape, target.sharding, shards)


def _shard(
    source: WeightSource, found: WeightAssignment, name: str, box: Box, dtype: Any
) -> np.ndarray:
    values = np.full([end - first for first, end in box], found.fill.get(name, 0), dtype)
    origin = [first for first, _ in box]
    for piece in found.pieces[name]:
        if (shared := overlap(box, piece.filled.box)) is None:
            continue
        read = piece.read(source, shared)
        with np.errstate(over="ignore", invalid="ignore"):  # an overflow is found below
            place: tuple[Any, ...] = (*slices(shared, origin), ...)  # a view, also of 0 dims
            part = values[place]
            part[...] = read
        if jnp.issubdtype(dtype, jnp.integer) and not np.array_equal(part, read):
            raise UserError(
                f"{source.path}: {foreign(piece.source, 200)} is {read.dtype.name} and has a value "
                f"that {np.dtype(dtype).name} cannot hold; nothing was loaded"
            )
        del read
        if jnp.issubdtype(dtype, jnp.inexact) and not np.isfinite(part).all():
            raise UserError(
                f"{source.path}: {foreign(piece.source, 200)} has a value that is NaN or infinite "
                f"(as {np.dtype(dtype).name}); nothing was loaded"
            )
    return values

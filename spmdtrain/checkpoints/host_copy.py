"""Copies of arrays that a save reads while training continues."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from spmdtrain.checkpoints.checksums import (
    PartSum,
    distinct_shards,
    host_sum,
    part_sum,
    start_sums,
    starts_of,
)
from spmdtrain.tree import named_leaves

PyTree = Any


@dataclass(frozen=True)
class ShardCopy:
    """The copy of one part of an array, with the attributes of JAX's `Shard`."""

    index: tuple[slice, ...]
    replica_id: int
    data: jax.Array


@dataclass(frozen=True, eq=False)
class HostCopy:
    """A copy of the parts of an array that this process holds, each distinct part once.

    Orbax' `ArrayHandler` reads no other attributes of an array than these. A `jax.Array` could not
    hold the copy: it has memory for each device, also if these hold the same part.
    """

    shape: tuple[int, ...]
    dtype: Any
    sharding: Sharding
    addressable_shards: Sequence[ShardCopy]

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements of the whole array."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return int(self.dtype.itemsize)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return self.size * self.itemsize


def can_copy(tree: PyTree) -> bool:
    """Returns whether `copy_to_host` applies: not without CPU devices (JAX_PLATFORMS=cuda).

    Args:
      tree: A pytree of JAX arrays.
    """
    return _is_on_cpu(tree) or _cpu() is not None


def copy_to_host(tree: PyTree) -> PyTree:
    """Returns copies of the arrays of a pytree, as `HostCopy`. The arrays may then be donated.

    Of an accelerator, all parts are requested before the first is awaited, and all have arrived
    when this returns. On CPU the parts are copied while this returns already: JAX donates the
    memory of an array to a later computation only after the copy.

    Args:
      tree: A pytree of arrays that `can_copy`, without random keys.
    """
    leaves, structure = jax.tree.flatten(tree)
    shards = [distinct_shards(leaf) for leaf in leaves]
    parts = [[shard.data for shard in each] for each in shards]
    if _is_on_cpu(tree):
        # An array without replicas is copied whole, which takes less time than each of its parts.
        data: list[Any] = [
            leaf if leaf.is_fully_addressable and len(each) == len(leaf.addressable_shards) else each
            for leaf, each in zip(leaves, parts, strict=True)
        ]
        # `np.asarray` would not copy: its result is a view of the array on the CPU.
        places = jax.tree.map(lambda x: x.sharding, data)
        copies = jax.device_put(data, places, may_alias=False)
    else:
        for part in jax.tree.leaves(parts):
            part.copy_to_host_async()
        copies = jax.device_put(jax.tree.map(np.asarray, parts), _cpu())
    shared = map(_shards_of, leaves, shards, copies)
    return jax.tree.unflatten(
        structure,
        [
            HostCopy(leaf.shape, leaf.dtype, leaf.sharding, each)
            for leaf, each in zip(leaves, shared, strict=True)
        ],
    )


def _shards_of(leaf: jax.Array, distinct: Sequence[Any], copied: Any) -> Sequence[Any]:
    """Returns the shards of a copied array; replicas share the copy of their part."""
    if isinstance(copied, jax.Array):
        return copied.addressable_shards
    copies = {starts_of(s.index): copy for s, copy in zip(distinct, copied, strict=True)}
    return [
        ShardCopy(shard.index, shard.replica_id, copies[starts_of(shard.index)])
        for shard in leaf.addressable_shards
    ]


def _is_on_cpu(tree: PyTree) -> bool:
    devices = (next(iter(leaf.sharding.device_set)) for leaf in jax.tree.leaves(tree))
    return all(device.platform == "cpu" for device in devices)


def _cpu() -> Any:
    """Returns a CPU device of this process; None if JAX has none."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def start_sums_of_copies(tree: PyTree) -> dict[str, list[PartSum]]:
    """Returns the checksums of `start_sums`: for a `HostCopy` computed by this thread.

    Args:
      tree: A pytree of copies, or of arrays that cannot be copied.
    """
    leaves = named_leaves(tree)
    copies = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, HostCopy)}
    others = {name: leaf for name, leaf in leaves.items() if name not in copies}
    return start_sums(others) | {name: _sum_parts(leaf) for name, leaf in copies.items()}


def _sum_parts(leaf: HostCopy) -> list[PartSum]:
    return [
        part_sum(leaf, host_sum(np.asarray(shard.data), starts_of(shard.index), leaf.shape), shard)
        for shard in distinct_shards(leaf)
    ]

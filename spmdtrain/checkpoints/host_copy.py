"""Copies of arrays that a save reads while training continues."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from spmdtrain.checkpoints.checksums import distinct_shards, host_sum, starts_of
from spmdtrain.distributed import process_group
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
    """A copy of the distinct parts of an array, each of them once.

    Orbax' `ArrayHandler` reads no other attributes of an array than these. A `jax.Array` could not
    hold the copy: it has one part for each device, also if these are copies of each other.
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
    """Returns whether `copy_to_host` applies to a state: arrays on CPUs, in a single process.

    There, the memory of devices is memory of the host. On other devices the copy to the host is
    part of what Orbax does. Several processes together write one copy of a replicated array.

    Args:
      tree: A pytree of JAX arrays.
    """
    devices = {d.platform for leaf in jax.tree.leaves(tree) for d in leaf.sharding.device_set}
    return process_group.count() == 1 and devices == {"cpu"}


def copy_to_host(tree: PyTree) -> PyTree:
    """Returns copies of the arrays of a pytree, as `HostCopy`. The arrays may then be donated.

    `np.asarray` would not copy: its result is a view of the array on the CPU.

    Args:
      tree: A pytree of arrays that `can_copy`, without random keys.
    """
    leaves, structure = jax.tree.flatten(tree)
    shards = [distinct_shards(leaf) for leaf in leaves]
    # An array without replicas is copied whole, which takes less time than each of its parts.
    is_whole = [
        len(parts) == len(leaf.addressable_shards)
        for leaf, parts in zip(leaves, shards, strict=True)
    ]
    data = [
        leaf if whole else [shard.data for shard in parts]
        for leaf, parts, whole in zip(leaves, shards, is_whole, strict=True)
    ]
    copies = jax.device_put(data, jax.tree.map(lambda x: x.sharding, data), may_alias=False)
    return jax.tree.unflatten(
        structure,
        [
            HostCopy(leaf.shape, leaf.dtype, leaf.sharding, _parts(copied, parts))
            for leaf, copied, parts in zip(leaves, copies, shards, strict=True)
        ],
    )


def _parts(copied: jax.Array | list[jax.Array], shards: Sequence[Any]) -> Sequence[Any]:
    """Returns the parts of a copied array, or the copies of these shards."""
    if isinstance(copied, jax.Array):
        return copied.addressable_shards
    return [
        ShardCopy(shard.index, shard.replica_id, copy)
        for shard, copy in zip(shards, copied, strict=True)
    ]


def sum_copies(tree: PyTree) -> dict[str, int]:
    """Returns the checksum of each `HostCopy` of a pytree by its path, computed by this thread."""
    return {
        name: sum(
            host_sum(np.asarray(part.data), starts_of(part.index), leaf.shape)
            for part in leaf.addressable_shards
        )
        for name, leaf in named_leaves(tree).items()
    }

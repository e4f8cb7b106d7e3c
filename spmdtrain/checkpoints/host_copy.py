"""Copies of arrays that a save reads, and sums of a state, while later steps run."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from spmdtrain.checkpoints.checksums import (
    PartSum,
    distinct_shards,
    host_sum,
    is_small,
    part_sum,
    start_sums,
    starts_of,
)
from spmdtrain.step.state import TrainState
from spmdtrain.tree import named_leaves

# -- Copies of arrays that a save reads while training continues -----------------------------------

PyTree = Any

_LARGE = 2**20  # bytes from which XLA's copy takes less time than NumPy's


@dataclass(frozen=True)
class ShardCopy:
    """The copy of one part of an array, with the attributes of JAX's `Shard`."""

    index: tuple[slice, ...]
    replica_id: int
    data: Any


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
    """Returns whether `copy_to_host` works: not if JAX has no CPU device (JAX_PLATFORMS=cuda)."""
    return is_on_cpu(tree) or _cpu() is not None


def copy_to_host(tree: PyTree) -> PyTree:
    """Returns copies of the arrays of a pytree, as `HostCopy`. The arrays may then be donated.

    The arrays must pass `can_copy` and include no random keys.
    """
    leaves, structure = jax.tree.flatten(tree)
    distinct = [distinct_shards(leaf) for leaf in leaves]
    copy = _copies_on_cpu if is_on_cpu(leaves) else _copies_from_accelerators
    parts = [
        {starts_of(shard.index): data for shard, data in zip(shards, copies, strict=True)}
        for shards, copies in zip(distinct, copy(leaves, distinct), strict=True)
    ]
    return jax.tree.unflatten(
        structure,
        [
            HostCopy(
                leaf.shape,
                leaf.dtype,
                leaf.sharding,
                [
                    ShardCopy(shard.index, shard.replica_id, each[starts_of(shard.index)])
                    for shard in leaf.addressable_shards
                ],
            )
            for leaf, each in zip(leaves, parts, strict=True)
        ],
    )


def _copies_from_accelerators(leaves: Any, distinct: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Returns complete copies of the distinct parts of each array.

    All transfers are started before the first is awaited.
    """
    parts = [[shard.data for shard in shards] for shards in distinct]
    for part in jax.tree.leaves(parts):
        part.copy_to_host_async()
    return jax.tree.map(np.asarray, parts)


def _copies_on_cpu(
    leaves: Sequence[jax.Array], distinct: Sequence[Sequence[Any]]
) -> list[list[Any]]:
    """Returns copies of the distinct parts of each array.

    XLA may still be copying large arrays when this returns: it lets a later computation write to
    the memory of a donated array only after the copy.
    """
    units: list[list[jax.Array]] = [  # an array without replicas as a whole
        [leaf]
        if leaf.is_fully_addressable
        and len(shards) == len(leaf.addressable_shards)
        and leaf.nbytes >= _LARGE
        else [shard.data for shard in shards]
        for leaf, shards in zip(leaves, distinct, strict=True)
    ]
    large = [x for each in units for x in each if x.nbytes >= _LARGE]
    by_xla = iter(jax.device_put(large, [x.sharding for x in large], may_alias=False))
    # `np.asarray` would not copy: its result is a view of the array on the CPU.
    copies: list[list[Any]] = [
        [next(by_xla) if x.nbytes >= _LARGE else np.array(x) for x in each] for each in units
    ]
    return [
        copied
        if len(copied) == len(shards)
        else [shard.data for shard in copied[0].addressable_shards]
        for copied, shards in zip(copies, distinct, strict=True)
    ]


def as_jax_arrays(tree: PyTree) -> PyTree:
    """Returns copies whose parts are all JAX arrays, as Orbax requires; keeps other leaves."""

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, HostCopy):
            return leaf
        parts = {id(shard.data): shard.data for shard in leaf.addressable_shards}
        arrays = {
            number: part if isinstance(part, jax.Array) else jax.device_put(part, _cpu())
            for number, part in parts.items()
        }
        shards = [replace(s, data=arrays[id(s.data)]) for s in leaf.addressable_shards]
        return replace(leaf, addressable_shards=shards)

    return jax.tree.map(convert, tree)


def is_on_cpu(tree: PyTree) -> bool:
    """Returns whether all arrays are in host memory: on CPU devices, or NumPy arrays."""
    arrays = (leaf for leaf in jax.tree.leaves(tree) if not isinstance(leaf, np.ndarray))
    devices = (next(iter(array.sharding.device_set)) for array in arrays)
    return all(device.platform == "cpu" for device in devices)


def _cpu() -> Any:
    """Returns a CPU device of this process; None if JAX has none."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def sum_copies(tree: PyTree) -> dict[str, list[PartSum]]:
    """Returns the checksums of each `HostCopy` of a pytree by its path, computed by this thread."""
    return {
        name: [
            part_sum(leaf, host_sum(np.asarray(x.data), starts_of(x.index), leaf.shape), x)
            for x in distinct_shards(leaf)
        ]
        for name, leaf in named_leaves(tree).items()
    }


# -- Checksums of a whole state that are computed while later steps run ----------------------------


class StateSums:
    """The checksums of a state, started when a step is dispatched and read later.

    The start does not wait for the step: the checksums of large arrays are computed on their
    devices, and small arrays are copied there for the host.

    Args:
      state: The state after the step. It may be donated to the next step.
      in_host_memory: Whether to include arrays in host memory, which waits for the step.
    """

    def __init__(self, state: TrainState, *, in_host_memory: bool) -> None:
        leaves = named_leaves(state)
        self._names = list(leaves)
        on_device = {name: x for name, x in leaves.items() if not _is_in_host_memory(x)}
        self._small = _copies({name: x for name, x in on_device.items() if is_small(x)})
        large = {name: x for name, x in on_device.items() if not is_small(x)}
        others = leaves.keys() - on_device.keys() if in_host_memory else ()
        self._started = start_sums(large | {name: leaves[name] for name in others})

    def parts(self) -> Mapping[str, Sequence[PartSum]]:
        """Waits for the small arrays. Returns the parts of each array by its path, in order."""
        found = self._started | start_sums(self._small)
        return {name: found[name] for name in self._names if name in found}


@jax.jit
def _copies(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return jax.tree.map(jnp.copy, leaves)


def _is_in_host_memory(leaf: jax.Array) -> bool:
    device: Any = next(iter(leaf.sharding.device_set))
    return leaf.sharding.memory_kind not in (None, device.default_memory().kind)

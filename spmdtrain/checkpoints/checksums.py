"""Checksums of arrays, and the comparison of the copies that processes hold."""

import collections
import functools
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from spmdtrain.distributed import process_group
from spmdtrain.errors import ReplicaError
from spmdtrain.tree import is_key, named_leaves

# -- Checksums of arrays, independent of their sharding --------------------------------------------
#
# A checksum is computed before a checkpoint is written, on the devices that hold the array or from
# the copy that is written (`host_copy`), and again after a restore has placed the array. It
# therefore covers encoding, storage and decoding.
#
# It is the sum modulo 2**32 of a hash of each element and its position, so neither sharding nor
# order matters. A change of one element always changes the sum; a change of several is missed with
# probability 2**-32. A CRC, which Orbax's storage formats use, depends on the order of the bytes,
# and therefore on the sharding.

CHUNK = 2**16  # elements that the host sums at a time, so that they stay in the cache
_GOLDEN, _LAST_SHIFT = np.uint32(0x9E3779B9), np.uint32(16)  # constants of `_hash`
_ROUNDS = (
    (np.uint32(16), np.uint32(0x7FEB352D)),
    (np.uint32(15), np.uint32(0x846CA68B)),
)
_SMALL = 2**16  # bytes up to which fetching an array is faster than compiling for its shape


@dataclass(frozen=True)
class PartSum:
    """The checksum of a part of an array, of which this process holds a copy."""

    value: Any
    """An int, or an array of one element whose computation may be pending."""
    starts: tuple[int, ...] = ()
    """Start index of the part in each dim of the array."""
    holders: tuple[int, ...] = (0,)
    """Ranks of the processes that hold a copy of the part, ascending."""
    counts: bool = True
    """Whether this copy counts in the array's checksum: only the first copy of a part does."""

    def read(self) -> int:
        """Waits for the value and returns it."""
        return int(np.asarray(self.value).item())


def start_sums(tree: Any) -> dict[str, list[PartSum]]:
    """Starts the computation of the checksums of all leaves, on the devices that hold them.

    Returns the parts of each leaf by its path. The leaves, JAX or NumPy arrays, may be donated to
    another computation at once.
    """
    return {name: _start(leaf) for name, leaf in named_leaves(tree).items()}


def read_parts(started: Mapping[str, Sequence[PartSum]]) -> dict[str, int]:
    """Waits for the checksums of `start_sums`, and returns them by the path of the leaf.

    For an array over several processes, the result is the addend of this process. A part that
    several processes hold counts in one of them.
    """
    return {
        name: sum(part.read() for part in parts if part.counts) for name, parts in started.items()
    }


def format_sums(totals: Mapping[str, int]) -> dict[str, str]:
    """Returns checksums as text: eight hexadecimal digits each."""
    return {name: f"{total % 2**32:08x}" for name, total in totals.items()}


def sums(tree: Any) -> dict[str, str]:
    """Returns the checksums of all leaves by path: NumPy arrays, or JAX arrays of this process."""
    return format_sums(read_parts(start_sums(tree)))


def is_small(leaf: Any) -> bool:
    """Returns whether the host computes the checksum of a leaf, which waits for the leaf."""
    return not isinstance(leaf, jax.Array) or (leaf.nbytes <= _SMALL and leaf.is_fully_replicated)


def _start(leaf: Any) -> list[PartSum]:
    if not isinstance(leaf, jax.Array):
        return [PartSum(host_sum(np.asarray(leaf)))]
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    if is_small(leaf):
        return [part_sum(leaf, host_sum(np.asarray(leaf)), distinct_shards(leaf)[0])]
    return sums_on_devices(leaf)


def sums_on_devices(leaf: jax.Array) -> list[PartSum]:
    """Returns the checksums of the parts that this process holds, each computed where the part is.

    Nothing is gathered, because many queued programs with collectives, one for each leaf, can
    deadlock virtual devices.
    """
    shards = distinct_shards(leaf)
    device: Any = next(iter(leaf.sharding.device_set))
    in_host_memory = leaf.sharding.memory_kind not in (None, device.default_memory().kind)
    if leaf.is_fully_replicated and not in_host_memory:
        values = [_jit_sum(shard.data) for shard in shards]
    elif in_host_memory or not isinstance(leaf.sharding, NamedSharding):
        values = [
            host_sum(np.asarray(shard.data), starts_of(shard.index), leaf.shape) for shard in shards
        ]
    else:
        part_sums = _jit_part_sums(leaf.sharding.mesh, leaf.sharding.spec, leaf.shape)(leaf)
        by_device = {shard.device: shard.data for shard in part_sums.addressable_shards}
        values = [by_device[shard.device] for shard in shards]
    return [part_sum(leaf, value, shard) for value, shard in zip(values, shards, strict=True)]


def distinct_shards(leaf: Any) -> list[Any]:
    """Returns one shard for each part of an array in this process, the first copy if it is here."""
    shards: dict[tuple[int, ...], Any] = {}
    for shard in leaf.addressable_shards:
        starts = starts_of(shard.index)
        if starts not in shards or shard.replica_id == 0:
            shards[starts] = shard
    return list(shards.values())


def part_sum(leaf: Any, value: Any, shard: Any) -> PartSum:
    """Returns the record of the checksum of one part of an array.

    Args:
      leaf: The array, or its copy.
      value: The checksum; its computation may be pending.
      shard: The part, one of `distinct_shards(leaf)`.
    """
    starts, counts = starts_of(shard.index), shard.replica_id == 0
    if process_group.count() == 1:
        return PartSum(value, starts, counts=counts)
    return PartSum(value, starts, holders_of_parts(leaf.sharding, leaf.shape)[starts], counts)


def process_of_device(device: Any) -> int:
    """Returns the number of the process that has a device."""
    return int(device.process_index)


@functools.lru_cache(4096)
def holders_of_parts(
    sharding: Sharding,
    shape: tuple[int, ...],
    process_of: Callable[[Any], int] = process_of_device,
) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Returns the processes that hold a copy of each part of an array, by the part's starts.

    `process_of` may give the devices of a plan other processes than JAX does.
    """
    holders: dict[tuple[int, ...], set[int]] = {}
    parts: Mapping[Any, Any] = sharding.devices_indices_map(shape)
    for device, index in parts.items():
        holders.setdefault(starts_of(index), set()).add(process_of(device))
    return {starts: tuple(sorted(processes)) for starts, processes in holders.items()}


def starts_of(index: Any) -> tuple[int, ...]:
    """Returns the index of the first element of a part in each dim."""
    return tuple(part.start or 0 for part in index)


# -- on the host -----------------------------------------------------------------------------------


def host_sum(x: np.ndarray, starts: Sequence[int] = (), shape: Sequence[int] = ()) -> int:
    """Returns the checksum of an array, or of the part at `starts` of an array of `shape`.

    `starts` is the index of the part's first element in each dim; `starts` and `shape` are () for a
    whole array. A large array is processed in chunks of rows, to need little memory.
    """
    x = np.ascontiguousarray(_whole_bytes(x))
    if not starts or x.shape[1:] == tuple(shape)[1:]:  # whole rows: positions are consecutive
        first = starts[0] * math.prod(shape[1:]) if starts else 0
        x, starts, shape = x.reshape(-1), (first,), (x.size,)
    rows = max(1, CHUNK * len(x) // max(1, x.size))
    total = 0
    for row in range(0, len(x), rows):
        part = x[row : row + rows]
        words = _words_on_host(part)
        position: Any = np.uint32(0)
        offsets = (starts[0] + row, *starts[1:])
        with np.errstate(over="ignore"):
            for dim, (start, size) in enumerate(zip(offsets, shape, strict=True)):
                index = np.arange(start, start + part.shape[dim], dtype=np.uint64).astype(np.uint32)
                index = index.reshape([-1 if d == dim else 1 for d in range(part.ndim)])
                position = position * np.uint32(size % 2**32) + index
            if words.ndim > part.ndim:
                count = words.shape[-1]
                word = np.arange(count, dtype=np.uint32)
                position = position[..., None] * np.uint32(count) + word
            total += _sum_of_hashes(words, position)
    return total % 2**32


def _sum_of_hashes(words: np.ndarray, position: np.ndarray) -> int:
    """Returns the sum of `_hash`, without its temporary arrays; overwrites both arguments."""
    h, other = words, position
    other *= _GOLDEN
    h += other
    for shift, factor in _ROUNDS:
        np.right_shift(h, shift, out=other)
        h ^= other
        h *= factor
    np.right_shift(h, _LAST_SHIFT, out=other)
    h ^= other
    return int(h.sum(dtype=np.uint32))


# -- on devices ------------------------------------------------------------------------------------


def _sum_of(x: jax.Array, starts: Sequence[Any], shape: Sequence[int]) -> jax.Array:
    """Returns the checksum of a part of an array, like `host_sum`; traced."""
    words = _words_on_device(_whole_bytes(x))
    position = jnp.zeros(x.shape, jnp.uint32)  # in the whole array, in row-major order
    for dim, (start, size) in enumerate(zip(starts, shape, strict=True)):
        index = jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim) + jnp.uint32(start)
        position = position * jnp.uint32(size % 2**32) + index
    if words.ndim > x.ndim:
        count = words.shape[-1]
        word = jnp.arange(count, dtype=jnp.uint32)
        position = position[..., None] * jnp.uint32(count) + word
    return _hash(words, position).sum(dtype=jnp.uint32)


def traced_sum(x: jax.Array) -> jax.Array:
    """Returns the checksum of a whole array as a uint32 scalar, like `host_sum`; traced."""
    return _sum_of(x, (0,) * x.ndim, x.shape)


_jit_sum = jax.jit(traced_sum)


@functools.cache
def _jit_part_sums(mesh: Mesh, spec: PartitionSpec, shape: tuple[int, ...]) -> Any:
    """Returns a function from an array to the checksums of its parts, one for each device."""
    axes = [*spec, *[None] * (len(shape) - len(spec))]

    def part_sum(part: jax.Array) -> jax.Array:
        starts = [
            jax.lax.axis_index(names) * size if names else 0
            for names, size in zip(axes, part.shape, strict=True)
        ]
        return _sum_of(part, starts, shape)[None]

    one_each = PartitionSpec(mesh.axis_names)
    return jax.jit(jax.shard_map(part_sum, mesh=mesh, in_specs=spec, out_specs=one_each))


# -- words and hashes ------------------------------------------------------------------------------


def _hash(words: Any, position: Any) -> Any:
    """Returns a hash of each word and its position; for one position it is injective.

    The function is `lowbias32` of Chris Wellons' "Prospecting for Hash Functions" (2018).
    """
    h = words + position * _GOLDEN
    for shift, factor in _ROUNDS:
        h = (h ^ (h >> shift)) * factor
    return h ^ (h >> _LAST_SHIFT)


def _whole_bytes(x: Any) -> Any:
    """Converts elements of less than a byte (int4, float4) to float32, which has their values."""
    return x.astype(np.float32) if jax.dtypes.itemsize_bits(x.dtype) < 8 else x


def _words_on_host(x: np.ndarray) -> np.ndarray:
    """Returns a copy of an array's bits as uint32 words; wider elements add a last dim of words."""
    width = x.dtype.itemsize
    if width > 4:
        return x.reshape(*x.shape, 1).view(np.uint32).copy()
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[width]).astype(np.uint32)


def _words_on_device(x: jax.Array) -> jax.Array:
    shape = x.shape
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], -1)
    width = x.dtype.itemsize
    kind = {1: jnp.uint8, 2: jnp.uint16}.get(width, jnp.uint32)
    words = jax.lax.bitcast_convert_type(x, kind).astype(jnp.uint32)
    word_dims = words.shape[len(shape) :]  # if an element has several words
    return words.reshape(*shape, math.prod(word_dims)) if word_dims else words


# -- Comparison of the copies of a state that several processes hold -------------------------------


def check_equal(
    started: Mapping[str, Sequence[PartSum]],
    step: int,
    sequence: process_group.CallSequence | None = None,
) -> None:
    """Compares the checksums of copies in several processes. All processes call it together.

    Parts of arrays that only one process holds are not compared. Only checksums are exchanged;
    `multihost_utils.assert_equal` would gather all arrays in every process.

    Args:
      started: The result of `start_sums`.
      sequence: The sequence of the calling thread; None for the main thread.

    Raises:
      ReplicaError: If copies differ. Names the processes that differ from most others, and the
        first array.
    """
    if process_group.count() == 1:
        return
    shared: dict[str, dict[str, int]] = {}  # by the processes with a copy, then by name
    for name, parts in started.items():
        for part in parts:
            if len(part.holders) > 1:
                group = json.dumps(part.holders)
                shared.setdefault(group, {})[_part_name(name, part)] = part.read()
    digests = {_digest(group): _digest(sums) for group, sums in shared.items()}
    sequence = sequence or process_group.joined().main
    odd = sequence.broadcast(find_odd(sequence.collect(digests)))
    if odd is None:
        return
    group, usual, different, certain = odd
    own = next((sums for holders, sums in shared.items() if _digest(holders) == group), {})
    sums = sequence.gather(own if process_group.rank() in (usual, different[0]) else {})
    usual_sums, other_sums = sums[usual], sums[different[0]]
    names = [name for name in usual_sums if usual_sums[name] != other_sums.get(name)]
    copies = f"step {step}: the copies of {_first(names)} differ between processes"
    which = _names(different) if certain else _names([usual, *different])
    raise ReplicaError(
        f"{copies}: {which} {'differs' if len(different) == 1 and certain else 'differ'} from "
        f"{'the other processes' if certain else 'each other'}; the state was not saved. Compare "
        "what these processes run with (environment, libraries, hardware), and start again from "
        "the last checkpoint"
    )


def _names(ranks: Sequence[int]) -> str:
    return process_group.format_names([process_group.names()[rank] for rank in ranks])


def _part_name(name: str, part: PartSum) -> str:
    return f"{name} from {list(part.starts)}" if any(part.starts) else name


def _first(names: Sequence[str]) -> str:
    """Returns the first parameter; without one, the first array of any other kind."""
    return min(names, key=lambda name: not name.startswith("params/"))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def find_odd(digests: Sequence[Mapping[str, str]]) -> tuple[str, int, list[int], bool] | None:
    """Finds the first group of processes whose digests differ.

    `digests` has the digests of each process by group. Returns the group, a process of the
    majority, the processes that differ from it, and True. Without a majority: the group, its first
    process, the others, and False. None if all are equal.
    """
    for group in sorted({group for own in digests for group in own}):
        by_rank = {rank: own[group] for rank, own in enumerate(digests) if group in own}
        (most, count), *others = collections.Counter(by_rank.values()).most_common()
        if others:
            usual = next(rank for rank, digest in by_rank.items() if digest == most)
            certain = 2 * count > len(by_rank)
            odd = [r for r in by_rank if r != usual and not (certain and by_rank[r] == most)]
            return group, usual, odd, certain
    return None

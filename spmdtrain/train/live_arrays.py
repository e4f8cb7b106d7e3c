"""The arrays on the devices: their bytes, their owners, and whether a step fits beside them."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

from spmdtrain.document.terminal import byte_size
from spmdtrain.sharding.rules import field_of
from spmdtrain.step.compile import ProgramMemory
from spmdtrain.step.state import TrainState
from spmdtrain.tree import named_leaves

_FULL = 0.95  # part of a device's memory from which on a step may not fit beside other arrays


def why_nearly_full(memory: ProgramMemory, limit: int) -> str | None:
    """Returns why a step may not fit in this many bytes of a device; None if it does."""
    # At least: arrays of the user may take the place of a batch that is not yet there.
    extra = max(0, live_array_bytes() - memory.arguments)
    if (needed := memory.peak + extra) <= _FULL * limit:
        return None
    beside = f" with {byte_size(extra)} of other arrays" if extra > 0 else ""
    return (
        f"the step{beside} needs {byte_size(needed)} of the {byte_size(limit)} of each device "
        f"({needed / limit:.0%}): python -m spmdtrain.plan says what for, and which options need "
        "less"
    )


def live_array_bytes() -> int:
    """Returns the bytes of all arrays on the fullest device of this process."""
    sizes: Counter[jax.Device] = Counter()
    for array in distinct_arrays():
        sizes.update(bytes_on_devices(array))
    return max(sizes.values(), default=0)


def distinct_arrays() -> Iterator[jax.Array]:
    """Yields the arrays that are alive, without parts of others, which share their memory.

    JAX makes a restored array from its parts, and lists both.
    """
    known: set[tuple[jax.Device, int]] = set()
    for array in sorted(jax.live_arrays(), key=_is_on_one_device):
        buffers = _buffers(array)
        if not buffers or not buffers <= known:
            yield array
        known |= buffers


def _is_on_one_device(array: jax.Array) -> bool:
    return isinstance(array.sharding, jax.sharding.SingleDeviceSharding)


def _buffers(array: Any) -> set[tuple[jax.Device, int]]:
    """Returns the addresses of the parts of an array; none if its computation has failed.

    None either if it is not yet ready: its computation may wait for another process.
    """
    try:
        parts = array.addressable_shards if array.is_ready() else []
        return {(each.device, each.data.unsafe_buffer_pointer()) for each in parts}
    except (RuntimeError, ValueError):
        return set()


def bytes_on_devices(array: jax.Array) -> dict[jax.Device, int]:
    """Returns the bytes of an array on each device of this process that has a part of it.

    None for an array that is offloaded to the memory of the host.
    """
    if array.sharding.memory_kind == "pinned_host":
        return {}
    size = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
    return dict.fromkeys(array.sharding.addressable_devices, size)


@dataclass(frozen=True)
class Owned:
    """Arrays of an owner.

    Attributes:
      arrays: Their number.
      bytes: On the device that holds the most of all owners.
    """

    owner: str
    arrays: int
    bytes: int


def live_arrays(state: TrainState | None, batch: Any) -> list[Owned]:
    """Returns the arrays on the devices of this process by owner, the largest first.

    Args:
      state: The shapes and shardings of the run's state.
      batch: The shapes of a batch.
    """
    titles = {name: row.title or name for name, row in TrainState.FIELDS.items()}
    of_state: dict[Any, list[str]] = {}
    for name, leaf in named_leaves(state).items():
        field = field_of(name)
        of_state.setdefault(_kind(leaf), []).append(titles.get(field, field))
    of_batch = {(x.shape, x.dtype) for x in jax.tree.leaves(batch)}
    counts: Counter[str] = Counter()
    sizes: dict[jax.Device, Counter[str]] = {}
    for array in distinct_arrays():
        if not (on_devices := bytes_on_devices(array)):
            continue
        if owners := of_state.get(_kind(array)):
            owner = owners.pop(0)  # another array of this kind is a copy
        elif (array.shape, array.dtype) in of_batch:
            owner = "batches"
        else:
            owner = f"others, such as {array.dtype}[{','.join(map(str, array.shape))}]"
        counts[owner] += 1
        for device, size in on_devices.items():
            sizes.setdefault(device, Counter())[owner] += size
    fullest = max(sizes.values(), key=lambda of: of.total(), default=Counter[str]())
    return [Owned(owner, counts[owner], size) for owner, size in fullest.most_common()]


def _kind(x: Any) -> Any:
    return x.shape, x.dtype, x.sharding

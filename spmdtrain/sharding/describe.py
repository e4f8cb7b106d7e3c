"""Shardings as text, and the check that arrays have the intended ones."""

from collections.abc import Collection
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from spmdtrain.errors import UserError
from spmdtrain.sharding.mesh import describe_devices
from spmdtrain.tree import named_leaves

PyTree = Any


def check_placed(tree: PyTree, shardings: PyTree, when: str) -> None:
    """Raises `UserError` if a leaf does not have its sharding, including the memory kind.

    A float0 leaf is an error, too: JAX places it on no device. `when` begins the message, for
    example "as restored".
    """
    wanted = named_leaves(shardings)
    for name, leaf in named_leaves(tree).items():
        if leaf.dtype == jax.dtypes.float0:
            raise UserError(
                f"{when}, {name} is float0, which holds no values and is on no device: leave it "
                "out of the state"
            )
        want, has = wanted[name], leaf.sharding
        if has.is_equivalent_to(want, leaf.ndim) and _memory(has) == _memory(want):
            continue
        raise UserError(
            f"{when}, {name} of shape {leaf.shape} is {_with_memory(has)}, but its rules require "
            f"{_with_memory(want)}"
        )


def describe_sharding(sharding: Sharding) -> str:
    """Returns a sharding as text, for example "P('fsdp', None)".

    If its spec names only axes of size 1, the text is "replicated" with their sizes.
    """
    if not isinstance(sharding, NamedSharding):
        return f"on {describe_devices(sorted(sharding.device_set, key=lambda device: device.id))}"
    mesh, axes = sharding.mesh, axes_of_spec(sharding.spec)
    if not sharding.is_fully_replicated:
        return f"P({', '.join(map(_entry, sharding.spec))})"
    sizes = ", ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)
    return f"replicated ({sizes})" if axes else "replicated"


def _entry(entry: Any) -> str:
    return repr(entry[0] if isinstance(entry, tuple) and len(entry) == 1 else entry)


def _with_memory(sharding: Sharding) -> str:
    on_host = _memory(sharding) == "pinned_host"
    return describe_sharding(sharding) + (", in host memory" if on_host else "")


def _memory(sharding: Sharding) -> str:
    kind: str | None = sharding.memory_kind
    return "device" if kind in (None, "device") else kind


def axes_of_entry(entry: Any) -> tuple[str, ...]:
    """Returns the axes of one entry of a spec."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def axes_of_spec(spec: PartitionSpec) -> list[str]:
    """Returns the axes of a spec in order."""
    return [axis for entry in spec for axis in axes_of_entry(entry)]


def split_dims(spec: PartitionSpec, ndim: int) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """Returns the dims that a spec splits, counted from the end, with the axes of each."""
    entries = ((dim - ndim, axes_of_entry(entry)) for dim, entry in enumerate(spec))
    return tuple((dim, axes) for dim, axes in entries if axes)


def keep_axes(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    """Returns a spec with only those of its axes that are in `axes`."""
    kept = [tuple(axis for axis in axes_of_entry(entry) if axis in axes) for entry in spec]
    return PartitionSpec(*(entry or None for entry in kept))


def division(size: int, parts: int) -> str:
    """Returns a division with remainder as text: `50257 = 6282 * 8 + 1`."""
    return f"{size} = {size // parts} * {parts} + {size % parts}"

"""Checksums of a whole state that are computed while later steps run."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from spmdtrain.checkpoints.checksums import PartSum, is_small, start_sums
from spmdtrain.step.state import TrainState
from spmdtrain.tree import named_leaves


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

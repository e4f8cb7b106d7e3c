"""XLA options by generation of the chip, as data: the presets of `--xla-preset`.

The table holds only options with which the chip's own compiler estimates a shorter step, and which
leave the operations of a program as they are: they decide when and where collectives run.
"""

import enum
from dataclasses import dataclass

from spmdtrain.xla.chips import chip_of

Value = str | int | bool | float


class Parameters(enum.StrEnum):
    """The placement of the parameters, on which the collectives of a step depend."""

    REPLICATED = "replicated"
    """On every device: gradients are all-reduced."""
    SHARDED = "sharded"
    """Split over devices: they are gathered for each use."""


@dataclass(frozen=True)
class Flag:
    """An option of XLA; the reason is the measured effect, as a sentence for the user."""

    name: str
    value: Value
    reason: str


_OVERLAPPED_ON_V5E = (
    Flag(
        "xla_enable_async_all_reduce",
        True,
        "all-reduces of gradients run while the backward pass computes the next ones",
    ),
    Flag(
        "xla_tpu_enable_async_collective_fusion_fuse_all_reduce",
        True,
        "the same: without it they are not fused with the computation beside them",
    ),
    Flag(
        "xla_jf_crs_combiner_threshold_in_bytes",
        0,
        "an all-reduce of many gradients would begin after the last of them",
    ),
)
_SPARSE_CORES_REDUCE = (
    Flag(
        "xla_tpu_enable_sparse_core_collective_offload_all_reduce",
        True,
        "all-reduces run on the SparseCores while the other cores compute",
    ),
    Flag(
        "xla_tpu_use_tc_device_shape_on_sc",
        True,
        "required by the offloading of collectives in this version of libtpu",
    ),
)
PRESETS: dict[tuple[str, Parameters], tuple[Flag, ...]] = {
    ("v5e", Parameters.REPLICATED): _OVERLAPPED_ON_V5E,
    # XLA replaces reduce-scatters over a whole v5e slice by all-reduces.
    ("v5e", Parameters.SHARDED): _OVERLAPPED_ON_V5E,
    ("v5p", Parameters.REPLICATED): _SPARSE_CORES_REDUCE,
    ("v5p", Parameters.SHARDED): (
        *_SPARSE_CORES_REDUCE,
        Flag(
            "xla_tpu_enable_sparse_core_collective_offload_all_gather",
            True,
            "parameters are gathered by the SparseCores while the other cores compute",
        ),
    ),
}
"""The flags by name of the chip (see `chips`) and placement of the parameters."""


def preset_flags(device_kind: str, parameters: Parameters) -> tuple[Flag, ...]:
    """Returns the flags of the preset for a `jax.Device.device_kind`; none without a preset."""
    chip = chip_of(device_kind)
    return () if chip is None else PRESETS.get((chip.name, parameters), ())

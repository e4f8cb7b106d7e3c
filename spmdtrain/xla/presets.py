"""XLA options by generation of the chip, as data: the presets of `--xla-preset`.

The table holds only options with which the chip's own compiler estimates a shorter step, and which
leave the operations of a program as they are: they decide when and where collectives run.
"""

import enum
from collections.abc import Iterable
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
    """An option of XLA.

    Attributes:
        name: Its name.
        value: Its value.
        reason: The measured effect, as a sentence for the user.
    """

    name: str
    value: Value
    reason: str


PRESETS: dict[tuple[str, Parameters], tuple[Flag, ...]] = {}
"""The flags by name of the chip (see `chips`) and placement of the parameters."""


def preset_flags(device_kind: str, parameters: Parameters) -> tuple[Flag, ...]:
    """Returns the flags of the preset for a device; none for a chip without a preset.

    Args:
        device_kind: The name that JAX gives to the device.
        parameters: The placement of the parameters.
    """
    chip = chip_of(device_kind)
    return () if chip is None else PRESETS.get((chip.name, parameters), ())

"""Scales and axes that the charts of a plan's page share."""

from typing import Any

from spmdtrain.document.blocks import COLORS

BYTES_LABEL = "datum.value === 0 ? '0' : format(datum.value, '~s') + 'B'"
"""Vega expression for the label of an axis in bytes."""
MUTED = COLORS - 1
"""The number of a color that does not stand out."""


def color_scale(alt: Any) -> Any:
    """Returns the encoding of a column `color`, the number of a color of the page."""
    scale = alt.Scale(domain=list(range(COLORS)))
    return alt.Color("color:N", legend=None, scale=scale)


def time_axis(alt: Any, unit: str) -> Any:
    """Returns an axis of times in a unit."""
    label = f"datum.value === 0 ? '0' : datum.label + ' {unit}'"
    return alt.Axis(title=None, labelSeparation=8, labelExpr=label)


def time_unit(seconds: float) -> tuple[str, float]:
    """Returns the unit of an axis up to a time, and the units in a second."""
    if seconds >= 1:
        return "s", 1.0
    return ("ms", 1e3) if seconds >= 1e-3 else ("us", 1e6)
